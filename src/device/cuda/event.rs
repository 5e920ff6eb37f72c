//! Events recorded and waited for, in streams and as nodes of graphs, and the time between two of them.

use std::sync::atomic::Ordering;

use super::driver::SUCCESS;
use super::inner::Inner;
use super::stream::{CudaEvent, Handle};
use crate::device::{Call, Code, EventState, Result};

/// `CU_EVENT_RECORD_EXTERNAL`, `CU_EVENT_WAIT_EXTERNAL`: refused by the driver on a stream that does not capture.
const EXTERNAL: u32 = 1;

/// Records an event at a stream's end. The context is current, here and below.
pub(super) fn record(device: &Inner, call: Call, event: &CudaEvent, stream: &Handle) -> Result<()> {
    // SAFETY: the handles keep event and stream alive.
    let code = unsafe { (device.driver.cuEventRecord)(event.handle(), stream.raw.0) };
    let recorded = device.check(call, code, || format!("an event on stream {}", stream.id));
    if recorded.is_ok() {
        let capture = device.capture_of(stream);
        event.capture.store(capture, Ordering::Relaxed);
    }
    device.answer(call, stream, recorded)
}

/// Makes a stream wait for an event's last record.
pub(super) fn wait(device: &Inner, call: Call, stream: &Handle, event: &CudaEvent) -> Result<()> {
    // SAFETY: the handles keep event and stream alive.
    let code = unsafe { (device.driver.cuStreamWaitEvent)(stream.raw.0, event.handle(), 0) };
    let waited = device.check(call, code, || {
        format!("that stream {} waits for an event", stream.id)
    });
    let capture = event.capture.load(Ordering::Relaxed);
    match waited {
        Ok(()) => device.join_capture(stream, capture),
        Err(error) => return Err(device.refused(Some(stream), capture, error)),
    }
    Ok(())
}

/// Adds a node that records an event to the capture on a stream.
pub(super) fn record_node(
    device: &Inner,
    call: Call,
    event: &CudaEvent,
    stream: &Handle,
) -> Result<()> {
    // The graph may outlive the caller's handle, and the driver does not promise that an event's nodes keep it.
    device.keep_event(stream, &event.held);
    event.in_graphs.store(true, Ordering::Relaxed);
    // SAFETY: the handles keep event and stream alive; what becomes of the capture keeps the event.
    let code =
        unsafe { (device.driver.cuEventRecordWithFlags)(event.handle(), stream.raw.0, EXTERNAL) };
    let recorded = device.check(call, code, || {
        format!("a node that records an event, on stream {}", stream.id)
    });
    device.answer(call, stream, recorded)
}

/// Adds a node that waits for an event to the capture on a stream.
pub(super) fn wait_node(
    device: &Inner,
    call: Call,
    stream: &Handle,
    event: &CudaEvent,
) -> Result<()> {
    device.keep_event(stream, &event.held);
    // SAFETY: the handles keep event and stream alive; what becomes of the capture keeps the event.
    let code = unsafe { (device.driver.cuStreamWaitEvent)(stream.raw.0, event.handle(), EXTERNAL) };
    let waited = device.check(call, code, || {
        format!("a node that waits for an event, on stream {}", stream.id)
    });
    device.answer(call, stream, waited)
}

/// The time between two events, in milliseconds.
pub(super) fn elapsed(device: &Inner, start: &CudaEvent, end: &CudaEvent) -> Result<f32> {
    let call = Call::Elapsed;
    for (which, event) in [("start", start), ("end", end)] {
        if !event.timed {
            return Err(EventState::Untimed.no_time(which));
        }
        // Of a capture that is underway, the driver would break it. Where a graph records it besides, its last record may be a launch's.
        let capture = event.capture.load(Ordering::Relaxed);
        let launched = event.in_graphs.load(Ordering::Relaxed);
        if capture != 0 && (!launched || device.is_underway(capture)) {
            return Err(EventState::Captured.no_time(which));
        }
    }
    let _relaxed = device.relax(call)?;
    let mut milliseconds = 0.0;
    // SAFETY: the pointer is to a live local; the handles keep the events alive.
    let code = unsafe {
        (device.driver.cuEventElapsedTime)(&raw mut milliseconds, start.handle(), end.handle())
    };
    if code == SUCCESS {
        return Ok(milliseconds);
    }
    // Which of the two it is, the driver says only when it is asked for each.
    for (which, event) in [("start", start), ("end", end)] {
        // SAFETY: as above.
        let alone = unsafe {
            (device.driver.cuEventElapsedTime)(
                &raw mut milliseconds,
                event.handle(),
                event.handle(),
            )
        };
        let why = [
            (Code::InvalidHandle, EventState::Never),
            (Code::NotReady, EventState::Pending),
            (Code::InvalidValue, EventState::Captured),
            (Code::CapturedEvent, EventState::Captured),
        ];
        if let Some((_, why)) = why.iter().find(|(code, _)| code.number() == alone) {
            return Err(why.no_time(which));
        }
    }
    let asked = || "the time between two events".to_owned();
    device.check(call, code, asked).map(|()| milliseconds)
}
