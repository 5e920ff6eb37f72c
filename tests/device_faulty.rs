//! The adaptor that makes chosen calls fail.

use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, DevicePtr, Mark,
};

const MIB: u64 = 1 << 20;

fn scene() -> (Faulty<HostDevice>, HostStream, DevicePtr) {
    let device = Faulty::new(HostDevice::new());
    let stream = device.create_stream().unwrap();
    let ptr = device.reserve(4 * MIB).unwrap();
    device.map(ptr, 2 * MIB).unwrap();
    (device, stream, ptr)
}

#[test]
fn the_nth_call_fails_once_and_does_not_reach_the_device() {
    let (device, stream, ptr) = scene();
    device.fail(Call::Fill, 2, Code::LaunchFailed);
    assert_eq!(device.fill(&stream, ptr, 1, 1), Ok(()));
    let error = device.fill(&stream, ptr, 2, 1).unwrap_err();
    assert_eq!(
        error,
        DeviceError::new(Call::Fill, Code::LaunchFailed, "made to fail")
    );
    let mut byte = [0];
    device.read(&stream, &mut byte, ptr).unwrap();
    assert_eq!(
        (byte, device.calls(Call::Fill), device.calls(Call::Read)),
        ([1], 2, 1)
    );
    assert_eq!(device.fill(&stream, ptr, 3, 1), Ok(()));

    device.fail(Call::Map, 1, Code::OutOfMemory);
    let mapped = device.inner().counts().mapped_bytes;
    assert_eq!(
        device.map(ptr.offset(2 * MIB), 2 * MIB).unwrap_err().code,
        Code::OutOfMemory
    );
    assert_eq!(device.inner().counts().mapped_bytes, mapped);
    assert_eq!(device.map(ptr.offset(2 * MIB), 2 * MIB), Ok(()));
}

#[test]
fn failures_are_kept_apart_and_can_be_taken_back() {
    let (device, stream, ptr) = scene();
    let special = DeviceError::new(Call::Query, Code::NotReady, "in words");
    device
        .fail(Call::Query, 1, Code::InvalidContext)
        .fail_with(2, special.clone());
    device
        .fail(Call::Copy, 1, Code::InvalidValue)
        .fail(Call::Copy, 3, Code::NotFound);
    let copy = || {
        device
            .copy(&stream, ptr.offset(64), ptr, 4)
            .map_err(|error| error.code)
    };
    assert_eq!(
        [copy(), copy(), copy()],
        [Err(Code::InvalidValue), Ok(()), Err(Code::NotFound)]
    );
    // A clone is the same device.
    let clone = device.clone();
    assert_eq!(clone.query(&stream).unwrap_err().code, Code::InvalidContext);
    assert_eq!(device.query(&stream), Err(special));
    device.fail(Call::Query, 1, Code::InvalidContext);
    clone.clear();
    assert_eq!(device.query(&stream).map(drop), Ok(()));
    assert_eq!(device.calls(Call::Query), 3);
}

#[test]
fn a_failed_end_still_ends_the_capture() {
    let (device, stream, ptr) = scene();
    device.begin_capture(&stream, CaptureMode::Global).unwrap();
    device.fill(&stream, ptr, 1, 1).unwrap();
    device.fail(Call::EndCapture, 1, Code::StreamCaptureInvalidated);
    assert_eq!(
        device.end_capture(&stream).unwrap_err().code,
        Code::StreamCaptureInvalidated
    );
    assert_eq!(device.capture_status(&stream), Ok(CaptureStatus::None));
    assert_eq!(
        (
            device.inner().counts().captures,
            device.inner().counts().graphs
        ),
        (0, 0)
    );
    assert_eq!(device.synchronize(&stream), Ok(()));
}

#[test]
fn a_failure_may_invalidate_the_capture() {
    let (device, stream, ptr) = scene();
    let set = KernelSet::load(&device).unwrap();
    device
        .begin_capture(&stream, CaptureMode::ThreadLocal)
        .unwrap();
    device.fail(Call::Launch, 1, Code::OutOfMemory);
    assert_eq!(
        set.fill(&device, &stream, ptr, 4, 1.0).unwrap_err().code,
        Code::OutOfMemory
    );
    assert_eq!(device.capture_status(&stream), Ok(CaptureStatus::Active));
    device.fail_invalidating(Call::Launch, 1, Code::OutOfMemory);
    let error = set.fill(&device, &stream, ptr, 4, 1.0).unwrap_err();
    assert_eq!(error.detail, "made to fail, and to invalidate the capture");
    assert_eq!(error.position, Some(2), "the one before counts, too");
    assert_eq!(
        device.capture_status(&stream),
        Ok(CaptureStatus::Invalidated)
    );
    assert_eq!(
        device.end_capture(&stream).unwrap_err().code,
        Code::StreamCaptureInvalidated
    );
    // Where nothing captures there is nothing to invalidate.
    device.fail_invalidating(Call::Copy, 1, Code::OutOfMemory);
    assert_eq!(
        device
            .copy(&stream, ptr.offset(64), ptr, 4)
            .unwrap_err()
            .code,
        Code::OutOfMemory
    );
    assert_eq!(device.copy(&stream, ptr.offset(64), ptr, 4), Ok(()));
    assert_eq!(device.calls(Call::Synchronize), 0);
}

#[test]
fn what_cannot_fail_passes_through() {
    let (device, stream, ptr) = scene();
    assert_eq!(
        (device.info(), device.granularity()),
        (device.inner().info(), 2 * MIB)
    );
    assert_eq!(device.stream_id(&device.default_stream()), 0);
    device.mark(&stream, ptr, 16, Mark::Dead);
    device.fill(&stream, ptr, 1, 16).unwrap();
    assert_eq!(
        device
            .synchronize(&stream)
            .unwrap_err()
            .fault
            .unwrap()
            .address,
        "S0+0"
    );
}
