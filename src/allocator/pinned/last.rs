//! The last work of each stream that uses some memory of the host: what is waited for before the host touches it, or anybody else gets it.

use smallvec::SmallVec;

use crate::device::{Device, DeviceError, relaxed};

/// For each stream, an event behind the last work there. It says of all work before, too.
#[derive(Debug)]
pub(super) struct LastWork<D: Device> {
    streams: SmallVec<[Last<D>; 1]>,
}

#[derive(Debug)]
struct Last<D: Device> {
    stream: u32,
    event: D::Event,
    /// Some of the work writes the memory.
    writes: bool,
    /// The event may not have been reached yet.
    pending: bool,
}

/// Streams whose events are kept to be recorded again.
const KEPT: usize = 8;

impl<D: Device> Default for LastWork<D> {
    fn default() -> Self {
        LastWork {
            streams: SmallVec::new(),
        }
    }
}

impl<D: Device> LastWork<D> {
    /// Enqueues work on a stream that does not capture, and notes it. An error of the work itself leaves everything as it was.
    pub(super) fn follow(
        &mut self,
        device: &D,
        stream: &D::Stream,
        writes: bool,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        // Before the work: it is not to be without one.
        let at = self.place(device, stream)?;
        work()?;
        let last = &mut self.streams[at];
        match device.record(&last.event, stream) {
            Ok(()) => {
                last.writes |= writes;
                last.pending = true;
            }
            Err(error) => {
                tracing::warn!(%error, "waiting for work that uses pinned memory on the host, in place of its event");
                device.synchronize(stream)?;
            }
        }
        Ok(())
    }

    /// The place of a stream's event.
    fn place(&mut self, device: &D, stream: &D::Stream) -> Result<usize, DeviceError> {
        let id = device.stream_id(stream);
        if let Some(at) = self.streams.iter().position(|last| last.stream == id) {
            return Ok(at);
        }
        if self.streams.len() >= KEPT {
            self.poll(device, &mut SmallVec::new());
            self.streams.retain(|last| last.pending);
        }
        self.streams.push(Last {
            stream: id,
            event: device.create_event()?,
            writes: false,
            pending: false,
        });
        Ok(self.streams.len() - 1)
    }

    /// Waits for the work, or for what of it may write. Touches no capture.
    pub(super) fn wait(&mut self, device: &D, only_writes: bool) -> Result<(), DeviceError> {
        for last in &mut self.streams {
            if last.pending && (last.writes || !only_writes) {
                relaxed(device, || device.synchronize_event(&last.event))?;
                (last.writes, last.pending) = (false, false);
            }
        }
        Ok(())
    }

    /// Whether all of it has run. Asks of no stream in `busy`, and adds those whose work has not. Touches no capture.
    pub(super) fn poll(&mut self, device: &D, busy: &mut SmallVec<[u32; 4]>) -> bool {
        let mut done = true;
        for last in self.streams.iter_mut().filter(|last| last.pending) {
            if !busy.contains(&last.stream) && device.poll_event(&last.event) == Ok(true) {
                (last.writes, last.pending) = (false, false);
            } else {
                done = false;
                if !busy.contains(&last.stream) {
                    busy.push(last.stream);
                }
            }
        }
        done
    }
}
