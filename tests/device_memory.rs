//! Memory of the simulated device: mapping, remapping under graphs, liveness, faults.

use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::device::kernels::{self, KernelSet};
use cudagraph_trees::device::{
    Call, CaptureMode, Code, Device, DeviceError, DevicePtr, Fault, FaultReason, Kernel, KernelArg,
    LaunchConfig, Mark, MemoryInfo,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn bytes<const N: usize>(device: &HostDevice, stream: &HostStream, ptr: DevicePtr) -> [u8; N] {
    let mut bytes = [0; N];
    device.read(stream, &mut bytes, ptr).unwrap();
    bytes
}

/// A device, a stream, and a reservation of which the first 2 MiB are mapped.
fn scene() -> (HostDevice, HostStream, DevicePtr) {
    let device = HostDevice::new();
    let stream = device.create_stream().unwrap();
    let ptr = device.reserve(8 * MIB).unwrap();
    device.map(ptr, 2 * MIB).unwrap();
    (device, stream, ptr)
}

fn fault(kernel: &str, address: &str, bytes: u64, reason: FaultReason) -> Fault {
    Fault {
        kernel: kernel.into(),
        address: address.into(),
        bytes,
        reason,
    }
}

#[test]
fn ranges_are_granular_and_accounted() {
    let device = HostDevice::builder().memory(6 * MIB).build().unwrap();
    let code = |error: DeviceError| error.code;
    assert_eq!(device.granularity(), 2 * MIB);
    assert_eq!(device.reserve(MIB).map_err(code), Err(Code::InvalidValue));
    let ptr = device.reserve(16 * MIB).unwrap();
    assert_eq!(ptr.0 % (2 * MIB), 0);
    assert_eq!(device.map(ptr, 4 * MIB), Ok(()));
    assert_eq!(
        device.memory_info(),
        Ok(MemoryInfo {
            free: 2 * MIB,
            total: 6 * MIB
        })
    );
    let refused = device.map(ptr.offset(4 * MIB), 4 * MIB).unwrap_err();
    assert_eq!((refused.call, refused.code), (Call::Map, Code::OutOfMemory));
    assert_eq!(
        refused.detail,
        "4194304 B are asked for; 2097152 B of 6291456 B are free"
    );
    assert_eq!(
        device.map(ptr.offset(2 * MIB), 2 * MIB).map_err(code),
        Err(Code::InvalidValue)
    );
    assert_eq!(
        device.map(ptr.offset(16 * MIB), 2 * MIB).map_err(code),
        Err(Code::InvalidValue)
    );
    assert_eq!(
        device.unmap(ptr, 2 * MIB).map_err(code),
        Err(Code::InvalidValue)
    );
    assert_eq!(
        device.release(ptr, 16 * MIB).map_err(code),
        Err(Code::InvalidValue)
    );
    assert_eq!(device.unmap(ptr, 4 * MIB), Ok(()));
    assert_eq!(device.release(ptr, 16 * MIB), Ok(()));
    assert_eq!(device.counts(), Default::default());
    let odd = HostDevice::builder().granularity(3 << 20).build();
    assert_eq!(odd.map(drop).map_err(code), Err(Code::InvalidValue));
}

#[test]
fn a_graph_follows_its_address_to_new_memory() {
    let (device, stream, ptr) = scene();
    let out = ptr.offset(2 * MIB);
    device.begin_capture(&stream, CaptureMode::Global).unwrap();
    device.copy(&stream, ptr.offset(64), ptr, 4).unwrap();
    let graph = device.end_capture(&stream).unwrap();
    let exec = device.instantiate(&graph).unwrap();
    device.write(&stream, ptr, &[1, 2, 3, 4]).unwrap();
    device.launch_graph(&exec, &stream, &[]).unwrap();
    assert_eq!(bytes(&device, &stream, ptr.offset(64)), [1, 2, 3, 4]);

    device.unmap(ptr, 2 * MIB).unwrap();
    device.map(ptr, 2 * MIB).unwrap();
    // Fresh: what was there is gone.
    assert_eq!(bytes(&device, &stream, ptr.offset(64)), [0xCD; 4]);
    device.write(&stream, ptr, &[5, 6, 7, 8]).unwrap();
    device.launch_graph(&exec, &stream, &[]).unwrap();
    assert_eq!(bytes(&device, &stream, ptr.offset(64)), [5, 6, 7, 8]);

    // Capturing against memory that is not there is allowed; launching is not.
    device.unmap(ptr, 2 * MIB).unwrap();
    device.map(out, 2 * MIB).unwrap();
    device.launch_graph(&exec, &stream, &[]).unwrap();
    let error = device.synchronize(&stream).unwrap_err();
    assert_eq!(
        (error.call, error.code),
        (Call::Synchronize, Code::IllegalAddress)
    );
    assert_eq!(
        *error.fault.unwrap(),
        fault("copy", "R0+0", 4, FaultReason::Unmapped)
    );
}

#[test]
fn an_access_may_span_ranges_that_adjoin() {
    let (device, stream, ptr) = scene();
    device.map(ptr.offset(2 * MIB), 2 * MIB).unwrap();
    let edge = ptr.offset(2 * MIB - 2);
    device.write(&stream, edge, &[1, 2, 3, 4]).unwrap();
    device.copy(&stream, ptr, edge, 4).unwrap();
    assert_eq!(bytes(&device, &stream, ptr), [1, 2, 3, 4]);
    device.fill(&stream, edge, 9, 6 * MIB).unwrap();
    let error = device.synchronize(&stream).unwrap_err();
    assert_eq!(
        *error.fault.unwrap(),
        fault("fill", "R0+4194304", 4 * MIB - 2, FaultReason::Unmapped)
    );
    // Work that faults has no effect, the part before the fault included.
    device.clear_fault();
    assert_eq!(bytes(&device, &stream, edge), [1, 2, 3, 4]);
}

#[test]
fn marks_poison_what_dies_and_name_who_touches_it() {
    let (device, stream, ptr) = scene();
    device.write(&stream, ptr, &[1; 32]).unwrap();
    device.mark(&stream, ptr.offset(8), 8, Mark::Dead);
    assert_eq!(bytes(&device, &stream, ptr), [1; 8]);
    let error = device.read(&stream, &mut [0; 16], ptr).unwrap_err();
    assert_eq!(error.code, Code::IllegalAddress);
    assert_eq!(
        error.detail,
        "read touched 8 B at S0+8: it has no owner (freed, or never allocated)"
    );
    assert_eq!(
        error.fault.as_deref(),
        Some(&fault("read", "S0+8", 8, FaultReason::NotLive))
    );

    // Sticky: nothing works but taking down, until the simulation's own way out.
    assert_eq!(
        device.fill(&stream, ptr, 0, 1).unwrap_err().fault,
        error.fault
    );
    assert_eq!(
        device.synchronize_device().unwrap_err().call,
        Call::SynchronizeDevice
    );
    assert_eq!(device.clear_fault(), error.fault.map(|fault| *fault));
    assert_eq!(device.clear_fault(), None);
    device.mark(&stream, ptr.offset(8), 8, Mark::Live);
    let mut expected = [1; 24];
    expected[8..16].fill(0xDB);
    assert_eq!(bytes(&device, &stream, ptr), expected);
}

#[test]
fn marks_are_ordered_like_work() {
    let (device, stream, ptr) = scene();
    device.fill(&stream, ptr, 1, 16).unwrap();
    device.mark(&stream, ptr, 16, Mark::Dead);
    device.mark(&stream, ptr, 16, Mark::Live);
    device.fill(&stream, ptr, 2, 8).unwrap();
    device.mark(&stream, ptr, 2 * MIB, Mark::Dead);
    let read = device.read(&stream, &mut [0], ptr).unwrap_err();
    assert_eq!(read.fault.unwrap().address, "S0+0");
    device.clear_fault();
    device.mark(&stream, ptr, 16, Mark::Live);
    assert_eq!(bytes(&device, &stream, ptr), [0xDB; 16]);
}

#[test]
fn a_mark_that_waits_does_not_reach_what_is_mapped_later() {
    let (device, stream, ptr) = scene();
    device.mark(&stream, ptr, 2 * MIB, Mark::Dead);
    device.unmap(ptr, 2 * MIB).unwrap();
    device.map(ptr, 2 * MIB).unwrap();
    device.write(&stream, ptr, &[3]).unwrap();
    assert_eq!(bytes(&device, &stream, ptr), [3]);
}

#[test]
fn a_launch_revives_what_its_graph_owns_and_kills_it_again() {
    let (device, stream, ptr) = scene();
    let (temporary, out) = (ptr.offset(4096), ptr.offset(8192));
    device.mark(&stream, ptr.offset(4096), 8192, Mark::Dead);
    device
        .begin_capture(&stream, CaptureMode::ThreadLocal)
        .unwrap();
    device.mark(&stream, temporary, 64, Mark::Live);
    device.copy(&stream, temporary, ptr, 64).unwrap();
    device.mark(&stream, out, 64, Mark::Live);
    device.copy(&stream, out, temporary, 64).unwrap();
    device.mark(&stream, temporary, 64, Mark::Dead);
    let graph = device.end_capture(&stream).unwrap();
    // Marks are no nodes.
    assert_eq!(
        (
            graph.to_string().as_str(),
            device.graph_info(&graph).unwrap().nodes()
        ),
        ("memcpy×2", 2)
    );
    let exec = device.instantiate(&graph).unwrap();
    // Capturing marked nothing.
    device.synchronize(&stream).unwrap();
    assert_eq!(
        device
            .read(&stream, &mut [0], out)
            .unwrap_err()
            .fault
            .unwrap()
            .address,
        "S0+8192"
    );
    device.clear_fault();
    for round in 1..=3 {
        device.fill(&stream, ptr, round, 64).unwrap();
        device.launch_graph(&exec, &stream, &[]).unwrap();
        assert_eq!(bytes(&device, &stream, out), [round; 64]);
        assert_eq!(
            device
                .read(&stream, &mut [0], temporary)
                .unwrap_err()
                .fault
                .unwrap()
                .address,
            "S0+4096"
        );
        device.clear_fault();
        device.mark(&stream, out, 64, Mark::Dead);
    }
}

#[test]
fn kernels_fault_by_name_and_without_effect() {
    let (device, stream, ptr) = scene();
    let set = KernelSet::load(&device).unwrap();
    device.fill(&stream, ptr, 0, 2 * MIB).unwrap();
    // The second piece of 64 KiB is where the owner is missing: the first was written by then.
    device.mark(&stream, ptr.offset(65536), 4, Mark::Dead);
    set.fill(&device, &stream, ptr, 20_000, 1.0).unwrap();
    let error = device.synchronize(&stream).unwrap_err();
    assert_eq!(
        *error.fault.unwrap(),
        fault("fill_f32", "S0+65536", 14464, FaultReason::NotLive)
    );
    device.clear_fault();
    assert_eq!(bytes(&device, &stream, ptr), [0; 8]);

    let function = device.load(&kernels::sum()).unwrap();
    device
        .launch(
            &stream,
            &function,
            LaunchConfig::for_elements(1),
            &[KernelArg::U32(1)],
        )
        .unwrap();
    let error = device.synchronize(&stream).unwrap_err();
    assert_eq!(error.code, Code::LaunchFailed);
    assert_eq!(
        error.detail,
        "sum_f32: argument 0, which must be a pointer: it does not fit the kernel"
    );
    device.clear_fault();

    let swallow = Kernel::new("swallow").host(move |context| {
        let _ = context.write(DevicePtr(16), &[1]);
        context.write(ptr, &[7])
    });
    let function = device.load(&swallow).unwrap();
    device
        .launch(&stream, &function, LaunchConfig::for_elements(1), &[])
        .unwrap();
    let error = device.synchronize(&stream).unwrap_err();
    assert_eq!(
        *error.fault.unwrap(),
        fault("swallow", "0x10", 1, FaultReason::Unmapped)
    );
    device.clear_fault();
    assert_eq!(bytes(&device, &stream, ptr), [0]);
}

#[test]
fn a_body_that_panics_or_calls_its_device_breaks_nothing() {
    let (device, stream, ptr) = scene();
    let panics = Kernel::new("panics").host(|_| panic!("out of {}", "luck"));
    let function = device.load(&panics).unwrap();
    device
        .launch(&stream, &function, LaunchConfig::for_elements(1), &[])
        .unwrap();
    let error = device.synchronize(&stream).unwrap_err();
    assert_eq!(
        (error.code, error.detail.as_str()),
        (Code::LaunchFailed, "panics panicked: out of luck")
    );
    device.clear_fault();

    let (inner, seen) = (
        device.clone(),
        std::sync::Arc::new(std::sync::Mutex::new(None)),
    );
    let result = seen.clone();
    let calls = Kernel::new("calls").host(move |_| {
        // A handle that comes and goes inside is fine; a call is not.
        let stream = inner.default_stream();
        *result.lock().unwrap() = Some(inner.synchronize(&stream).unwrap_err().code);
        Ok(())
    });
    let function = device.load(&calls).unwrap();
    device
        .launch(&stream, &function, LaunchConfig::for_elements(1), &[])
        .unwrap();
    assert_eq!(device.synchronize(&stream), Ok(()));
    assert_eq!(*seen.lock().unwrap(), Some(Code::Other(800)));

    let missing = device.load(&Kernel::new("nothing")).unwrap_err();
    assert_eq!((missing.call, missing.code), (Call::Load, Code::NotFound));
    device.write(&stream, ptr, &[1]).unwrap();
    assert_eq!(bytes(&device, &stream, ptr), [1]);
}

#[test]
fn huge_ranges_cost_what_is_written() {
    let device = HostDevice::new();
    let stream = device.create_stream().unwrap();
    let ptr = device.reserve(20 * GIB).unwrap();
    device.map(ptr, 20 * GIB).unwrap();
    let far = ptr.offset(19 * GIB);
    device.write(&stream, far, &[1, 2, 3]).unwrap();
    assert_eq!(bytes(&device, &stream, far), [1, 2, 3, 0xCD]);
    device.mark(&stream, ptr, 20 * GIB, Mark::Dead);
    device.mark(&stream, ptr, 20 * GIB, Mark::Live);
    assert_eq!(bytes(&device, &stream, far), [0xDB; 4]);
    assert!(resident() < GIB, "{} B are resident", resident());
}

/// Bytes of this process that lie in memory.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
