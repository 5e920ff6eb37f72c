//! Memory that is in use on other streams than its own: who waits for that before it is used again.
//!
//! There are two answers. A tree orders its runs, so the memory of its pool needs no watching: its next run waits for every stream that was named
//! ([`Elsewhere`]), and only what dies while a closure runs is kept until the closure has returned. Memory of any other pool stays live in the books
//! until the work is done ([`Deferred`]), as events say.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::{Books, PoolKey};
use crate::device::{CaptureStatus, Device, DeviceError, relaxed};
use crate::pool::Allocation;
use crate::sync::{AtomicBool, Mutex, lock};

/// A stream that uses a storage besides its own.
#[derive(Clone, Debug)]
pub(crate) struct Use<D: Device> {
    stream: D::Stream,
    /// It captured when it was named: the work is a graph's, and does not run now.
    captured: bool,
    /// The call of a function it was named in, where that allocates from the storage's pool; 0 for none.
    call: u64,
}

impl<D: Device> Use<D> {
    pub(crate) fn is_of(&self, other: &Use<D>) -> bool {
        self.stream == other.stream
    }
}

/// The streams that use a storage besides its own.
pub(crate) type Uses<D> = SmallVec<[Use<D>; 1]>;

/// The streams that outputs of one tree were said to be used on, until its next run takes the list.
pub(crate) struct Elsewhere<D: Device> {
    any: AtomicBool,
    streams: Mutex<Vec<D::Stream>>,
}

impl<D: Device> Elsewhere<D> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Elsewhere {
            any: AtomicBool::new(false),
            streams: Mutex::default(),
        })
    }

    fn note(&self, stream: &D::Stream) {
        let mut streams = lock(&self.streams);
        if !streams.contains(stream) {
            streams.push(stream.clone());
        }
        self.any.store(true, Ordering::Release);
    }

    /// Whether a stream was named since the last look.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// The streams named since the last look.
    #[cold]
    pub(crate) fn take(&self) -> Vec<D::Stream> {
        let mut streams = lock(&self.streams);
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *streams)
    }
}

/// A block whose storage is dead, and that work of other streams may still touch: live in the books until it does not.
pub(super) struct Deferred<D: Device> {
    pool: PoolKey,
    block: Allocation,
    stream: Option<D::Stream>,
    born: u64,
    until: Until<D>,
}

impl<D: Device> Deferred<D> {
    /// What was to be free in the order of one stream, is in that of another.
    pub(super) fn frees_on(&mut self, from: &D::Stream, to: &D::Stream) {
        if self.stream.as_ref() == Some(from) {
            self.stream = Some(to.clone());
        }
    }
}

enum Until<D: Device> {
    /// The closure of this call has returned.
    Returned(u64),
    /// The work on these streams is done.
    Done {
        /// Streams of which the work so far has no event yet, because they capture.
        running: SmallVec<[D::Stream; 1]>,
        /// Streams whose captures have it.
        capturing: SmallVec<[D::Stream; 1]>,
        /// What says that the work is done.
        events: SmallVec<[(u32, D::Event); 1]>,
    },
}

impl<D: Device> Books<D> {
    /// Notes that a storage of a pool is used on a stream from now on; what its owner is to keep of it.
    pub(super) fn note_use(&mut self, device: &D, pool: PoolKey, stream: &D::Stream) -> Use<D> {
        let captured = !matches!(device.capture_status(stream), Ok(CaptureStatus::None));
        if let Some(elsewhere) = self
            .pools
            .get(pool)
            .and_then(|entry| entry.elsewhere.as_ref())
            .filter(|_| !captured)
        {
            elsewhere.note(stream);
        }
        // A capture's work is one, and over with its end, whatever stream of it is named: that of an if's body captures no longer than the body.
        let origin = captured.then(|| self.origin_of(device, stream)).flatten();
        Use {
            stream: origin.unwrap_or(stream).clone(),
            captured,
            call: self.routes.call_in(pool),
        }
    }

    /// Frees a block whose storage is dead, as soon as nothing uses it any more.
    pub(super) fn free_used(
        &mut self,
        device: &D,
        (pool, block): (PoolKey, Allocation),
        stream: Option<&D::Stream>,
        born: u64,
        uses: Uses<D>,
    ) {
        // An eager call draws from the default pool, and so does everybody else: nothing there is the call's to wait for.
        let call = if pool == self.default {
            0
        } else {
            self.routes.call_in(pool)
        };
        let of_a_tree = self.pools.get(pool).is_some_and(|e| e.elsewhere.is_some());
        let in_this_call = |used: &Use<D>| call != 0 && used.call == call;
        let until = if of_a_tree {
            // What was named before the call began, the call has waited for.
            if !uses.iter().any(in_this_call) {
                return self.free(device, pool, block, stream, born);
            }
            Until::Returned(call)
        } else if uses.iter().all(|used| in_this_call(used) && used.captured) {
            // Of a run inside a capture, which has an order of its own from here on.
            Until::Returned(call)
        } else {
            let (mut running, mut capturing) = (SmallVec::new(), SmallVec::new());
            for used in uses {
                if used.captured {
                    capturing.push(used.stream);
                } else if Some(&used.stream) != stream {
                    running.push(used.stream);
                }
            }
            Until::Done {
                running,
                capturing,
                events: SmallVec::new(),
            }
        };
        self.deferred.push(Deferred {
            pool,
            block,
            stream: stream.cloned(),
            born,
            until,
        });
        self.free_deferred(device);
    }

    /// Frees what a call's closure has kept from its own reuse.
    pub(super) fn closure_returned(&mut self, device: &D, call: u64) {
        if self.deferred.is_empty() {
            return;
        }
        let kept = |d: &mut Deferred<D>| matches!(d.until, Until::Returned(c) if c == call);
        let freed: Vec<_> = self.deferred.extract_if(.., kept).collect();
        for d in freed {
            self.free(device, d.pool, d.block, d.stream.as_ref(), d.born);
        }
    }

    /// Frees what is not used any more. Asks for the oldest event of each stream only, as long as that was not reached. Breaks no capture.
    pub(super) fn free_deferred(&mut self, device: &D) {
        if self.deferred.is_empty() {
            return;
        }
        let mut busy: SmallVec<[u32; 4]> = SmallVec::new();
        let spare = &mut self.spare;
        let done = |d: &mut Deferred<D>| {
            let Until::Done {
                running,
                capturing,
                events,
            } = &mut d.until
            else {
                return false;
            };
            let captures = |stream: &D::Stream| {
                !matches!(device.capture_status(stream), Ok(CaptureStatus::None))
            };
            capturing.retain(|stream| captures(stream));
            running.retain(|stream| {
                if captures(stream) {
                    return true;
                }
                let event = spare.pop().map_or_else(|| device.create_event(), Ok);
                let noted = event.and_then(|event| {
                    device.record(&event, stream)?;
                    events.push((device.stream_id(stream), event));
                    Ok(())
                });
                // Not noted: its memory stays out of circulation, and the next look tries again.
                noted.is_err()
            });
            let mut index = 0;
            while let Some((stream, event)) = events.get(index) {
                if busy.contains(stream) {
                    index += 1;
                } else if device.poll_event(event) == Ok(true) {
                    spare.push(events.swap_remove(index).1);
                } else {
                    busy.push(*stream);
                    index += 1;
                }
            }
            running.is_empty() && capturing.is_empty() && events.is_empty()
        };
        let freed: Vec<_> = self.deferred.extract_if(.., done).collect();
        for d in freed {
            self.free(device, d.pool, d.block, d.stream.as_ref(), d.born);
        }
    }

    /// Waits for the work that keeps dead blocks from being free, and frees them: for an allocation that there is no memory for. Not for what captures
    /// have, and breaks none. Whether it freed something.
    #[cold]
    pub(super) fn wait_for_deferred(&mut self, device: &D) -> Result<bool, DeviceError> {
        let before = self.deferred.len();
        // Also gives an event to what has none yet.
        self.free_deferred(device);
        for d in &self.deferred {
            let Until::Done { events, .. } = &d.until else {
                continue;
            };
            for (_, event) in events {
                relaxed(device, || device.synchronize_event(event))?;
            }
        }
        self.free_deferred(device);
        Ok(self.deferred.len() < before)
    }

    /// How many dead blocks of a pool still wait.
    pub(super) fn deferred_in(&self, pool: PoolKey) -> usize {
        self.deferred.iter().filter(|d| d.pool == pool).count()
    }
}
