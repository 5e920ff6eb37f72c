//! Waiting for all work of the device in a way that no capture minds: for drops, which cannot know who captures.
//!
//! The driver's own wait for a context breaks every capture in it, whatever the mode. A thread whose mode is relaxed may do two other things, and
//! here does both:
//! * **Each stream** of the device that does not capture is waited for.
//! * **A block of memory is freed**, for which the driver waits for the kernels of all streams. That reaches what the first does not: the default
//!   stream (to wait for it breaks the capture of a blocking stream), streams that only others know, streams that are gone while their work
//!   runs on, and what was enqueued on a stream before it began to capture.

use std::sync::{Arc, Weak};

use super::inner::Inner;
use super::memory::PLAIN_GRANULARITY;
use super::stream::{CudaEvent, Handle, create_event};
use crate::device::{Call, CaptureStatus, Code, Result};
use crate::sync::lock;

/// What [`Device::quiesce`](crate::device::Device::quiesce) does.
pub(super) fn quiesce(device: &Arc<Inner>) -> Result<()> {
    let call = Call::Quiesce;
    let _current = device.enter(call)?;
    let _relaxed = device.relax(call)?;
    // Not under the lock: a stream whose other handles go meanwhile ends here, and is struck from the list.
    let streams: Vec<Arc<Handle>> = lock(&device.streams)
        .values()
        .filter_map(Weak::upgrade)
        .collect();
    let waited = wait_for_each(device, call, &streams);
    let freed = device.wait_by_freeing(call);
    device.keep_block(call);
    waited.and(freed)
}

fn wait_for_each(device: &Arc<Inner>, call: Call, streams: &[Arc<Handle>]) -> Result<()> {
    if streams.is_empty() {
        return Ok(());
    }
    let event = create_event(device, call, false)?;
    streams
        .iter()
        .try_for_each(|stream| device.wait_beside_captures(call, &event, stream))
}

impl Inner {
    /// Waits for a stream, unless it captures. The thread's capture mode is relaxed.
    ///
    /// A capture may begin there at any moment, on another thread, and to wait for the stream would break it. So an event is recorded, which
    /// a capture does not mind, and waited for if the stream does not capture afterwards: then it is no part of a capture that is underway.
    fn wait_beside_captures(&self, call: Call, event: &CudaEvent, stream: &Handle) -> Result<()> {
        if self.status(call, stream)? != CaptureStatus::None {
            return Ok(());
        }
        // SAFETY: the handles keep event and stream alive.
        let code = unsafe { (self.driver.cuEventRecord)(event.handle(), stream.raw.0) };
        let recorded = self.check(call, code, || format!("an event on stream {}", stream.id));
        match recorded {
            // A capture has begun, and is broken already.
            Err(error) if error.is_capture() => return Ok(()),
            other => other?,
        }
        if self.status(call, stream)? != CaptureStatus::None {
            return Ok(());
        }
        // SAFETY: the handle keeps the event alive.
        let code = unsafe { (self.driver.cuEventSynchronize)(event.handle()) };
        if code == Code::InvalidValue.number() {
            // Recorded in a capture that has begun and ended since.
            return Ok(());
        }
        self.check(call, code, || format!("to wait for stream {}", stream.id))
    }

    /// Waits for the kernels of all streams. The context is current, and the thread's capture mode relaxed.
    pub(super) fn wait_by_freeing(&self, call: Call) -> Result<()> {
        let kept = lock(&self.block).take();
        let block = kept.map_or_else(|| self.allocate_block(call, PLAIN_GRANULARITY), Ok)?;
        let code = self.free_block(block);
        self.check(call, code, || {
            "to wait for all streams by freeing a block".into()
        })
    }

    /// Keeps a block for the next time: there may be no memory left by then, and yet work to wait for. The context is current, and the
    /// thread's capture mode relaxed.
    pub(super) fn keep_block(&self, call: Call) {
        let mut kept = lock(&self.block);
        if kept.is_none() {
            *kept = self.allocate_block(call, PLAIN_GRANULARITY).ok();
        }
    }
}
