//! What a function's closure works with: it allocates through the recorder and launches on its stream.

use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::{Arc, Weak};

use super::args::Value;
use crate::allocator::{Allocator, PinnedBuffer, RouteGuard, predicate_of, refuse_escaped};
use crate::device::{Call, Code, Device, DeviceError, DevicePtr, KernelArg, LaunchConfig};
use crate::error::{BoxError, Phase, Result};
use crate::storage::{Storage, Tensor};
use crate::sync::{Mutex, lock};

/// The closure's side of a warmup or a recording.
///
/// All work of the function goes to [`stream`](Recorder::stream) (or to streams forked from and joined to it), and all memory it needs comes from
/// [`alloc`](Recorder::alloc). A tensor dropped inside gives its memory to what is allocated next, in the graph too.
pub struct Recorder<'a, D: Device> {
    /// The function's name.
    pub(super) name: &'a Arc<str>,
    pub(super) device: &'a D,
    pub(super) stream: &'a D::Stream,
    pub(super) phase: Phase,
    /// Where its memory comes from.
    pub(super) route: &'a RouteGuard<D>,
    /// Where memory from outside of the tree comes from.
    pub(super) allocator: &'a Allocator<D>,
    pub(super) said: Said,
    /// Where state is noted.
    pub(super) made: &'a Made<D>,
}

/// State that functions have allocated, as long as they keep it.
pub(super) type Made<D> = Mutex<Vec<Weak<Storage<D>>>>;

/// What a closure said of its call, besides its outputs.
#[derive(Default)]
pub(super) struct Said {
    /// Host values that it returns.
    pub(super) values: Vec<Value>,
    /// One more warmup is wanted.
    pub(super) incomplete: bool,
    /// This recording is not to be kept.
    pub(super) discard: bool,
}

impl<'a, D: Device> Recorder<'a, D> {
    /// Allocates from the tree's pool. The bytes are undefined.
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`](crate::pool::PoolError::OutOfMemory), with the pool as it was.
    #[track_caller]
    pub fn alloc(&mut self, bytes: u64) -> Result<Tensor<D>> {
        self.route.alloc_at(self.stream, bytes, Location::caller())
    }

    /// Allocates state that the function makes once and keeps, say in its closure: memory of the allocator's default pool, which belongs to no generation and
    /// keeps its address. Kept as long as the function: recordings have its address. The bytes are undefined.
    ///
    /// (Memory of [`alloc`](Recorder::alloc) that is kept without being returned is [`Error::Untracked`](crate::Error::Untracked).)
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`](crate::pool::PoolError::OutOfMemory), with the pool as it was.
    #[track_caller]
    pub fn alloc_state(&mut self, bytes: u64) -> Result<Tensor<D>> {
        let pool = self.allocator.default_pool();
        let state = pool.alloc_at(self.stream, bytes, Location::caller())?;
        let made = state.storage().map(Arc::downgrade);
        lock(self.made).extend(made);
        Ok(state)
    }

    /// Allocates pinned memory of the host: [`Allocator::alloc_pinned`]. What is recorded with it keeps it, dropped or not, and a replay copies the bytes that it has then.
    ///
    /// # Errors
    /// The device's.
    pub fn alloc_pinned(&self, bytes: u64) -> Result<PinnedBuffer<D>> {
        self.allocator.alloc_pinned(bytes)
    }

    /// Returns a host value beside the tensors (of the body of an if, which is called once for the graph, whatever the predicate says then), for [`Outputs::value`](crate::Outputs::value): a size, a flag, whatever goes with the outputs. A replay gives
    /// what the recording gave.
    pub fn return_value(&mut self, value: Value) {
        self.said.values.push(value);
    }

    /// Says, during a warmup, that one more is wanted before the key is recorded (something is still being tuned, a cache still grows). In any other phase
    /// nothing happens.
    pub fn need_more_warmup(&mut self) {
        self.said.incomplete |= self.phase == Phase::Warmup;
    }

    /// Says, during a recording, that it is not to be kept: the call is answered eagerly, and the next one records again. In any other phase nothing happens.
    pub fn discard_recording(&mut self) {
        self.said.discard |= self.phase == Phase::Record;
    }

    /// Launches a kernel on the stream: [`Device::launch`].
    ///
    /// # Errors
    /// The device's.
    pub fn launch(
        &self,
        function: &D::Function,
        config: LaunchConfig,
        args: &[KernelArg],
    ) -> Result<()> {
        Ok(self.device.launch(self.stream, function, config, args)?)
    }

    /// Runs `body` if the predicate holds: a tensor of one byte, true if that is not 0, as it is in stream order.
    ///
    /// While the function is captured (recorded, or inside a capture of the caller's), the body becomes a conditional node of the graph, and is called once, whatever the byte
    /// says now: each launch reads the byte and runs the body or not. Otherwise the byte is read, for which the stream is waited for, and the body called if it is
    /// true. So a run in any phase computes what an uncompiled run does. Ifs may be nested.
    ///
    /// The body's work goes to the stream of the recorder that the body is given. What it allocates dies in it: results are written to memory that was allocated before the if.
    /// It may hold launches, copies (those from and to pinned buffers too), fills and ifs; see [`Device::begin_if`] for what holds on that stream.
    ///
    /// # Errors
    /// The body's own. While the function is recorded, one of those gives the recording up, and the call is answered eagerly: an uncompiled run has the error only if the predicate
    /// holds. (The same goes for a panic, which goes on.) Inside a capture of the caller's, what the body had enqueued stays in the node.
    ///
    /// [`Error::Predicate`](crate::Error::Predicate); [`Error::Escaped`](crate::Error::Escaped) where memory of the body is held behind it;
    /// [`Error::Stale`](crate::Error::Stale); [`Error::ForeignTensor`](crate::Error::ForeignTensor); the device's.
    #[track_caller]
    pub fn if_node(
        &mut self,
        predicate: &Tensor<D>,
        body: impl FnOnce(&mut Recorder<'_, D>) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        self.if_node_on(self.stream, predicate, body)
    }

    /// The same on a stream that forked off the function's, which takes no work of the closure's meanwhile; the others do.
    ///
    /// # Errors
    /// As [`if_node`](Recorder::if_node). While the function is captured, also where the stream does not take part in that capture.
    #[track_caller]
    pub fn if_node_on(
        &mut self,
        stream: &D::Stream,
        predicate: &Tensor<D>,
        body: impl FnOnce(&mut Recorder<'_, D>) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        self.allocator.own_stream(stream)?;
        let byte = predicate_of(self.device, predicate)?;
        let from = self.route.noted();
        match self.phase {
            Phase::Record | Phase::Inline => {
                self.capture_if((stream, byte), from, body, Location::caller())
            }
            Phase::Warmup | Phase::Replay | Phase::Eager => {
                if predicate.read(self.device, stream)? == [0] {
                    return Ok(());
                }
                self.call(stream, body)
                    .unwrap_or_else(|p| resume_unwind(p))?;
                Ok(refuse_escaped(&self.route.held_since(from))?)
            }
        }
    }

    /// Calls the body of an if with a recorder of the same call, on another stream.
    fn call(
        &mut self,
        stream: &D::Stream,
        body: impl FnOnce(&mut Recorder<'_, D>) -> Result<(), BoxError>,
    ) -> std::thread::Result<Result<(), BoxError>> {
        let mut inner = Recorder {
            stream,
            said: std::mem::take(&mut self.said),
            ..*self
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| body(&mut inner)));
        self.said = inner.said;
        outcome
    }

    fn capture_if(
        &mut self,
        (stream, predicate): (&D::Stream, DevicePtr),
        from: usize,
        body: impl FnOnce(&mut Recorder<'_, D>) -> Result<(), BoxError>,
        at: &'static Location<'static>,
    ) -> Result<(), BoxError> {
        let begun = self.allocator.begin_body(self.stream, stream, predicate);
        let open = match begun {
            Ok(open) => open,
            Err(error) => {
                self.give_recording_up(error.clone());
                return Err(error.into());
            }
        };
        let outcome = self.call(open.body(), body);
        let held = self.route.held_since(from);
        let escaped = refuse_escaped(&held);
        // While the body captures, so that it dies there. What another pool gave goes its own way.
        for held in held {
            if !held.is_eternal() {
                held.invalidate(self.name, at);
            }
        }
        let ended = open.end();
        match outcome {
            Ok(Ok(())) => {
                ended?;
                Ok(escaped?)
            }
            Ok(Err(error)) => {
                self.give_recording_up(body_failed(&*error));
                Err(error)
            }
            Err(panic) => {
                self.give_recording_up(body_failed(&"it panicked"));
                resume_unwind(panic)
            }
        }
    }

    /// Breaks the capture of a recording, which lacks a part of an if.
    fn give_recording_up(&self, error: DeviceError) {
        if self.phase == Phase::Record {
            self.device.refuse(self.stream, error, true);
        }
    }

    /// The stream to launch on. It captures while the function is recorded.
    #[must_use]
    pub fn stream(&self) -> &'a D::Stream {
        self.stream
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &'a D {
        self.device
    }

    /// Says that what comes now cannot be captured (it waits for the device, reads a value, calls a library that does). While the function is recorded, that is an
    /// error to be returned: the recording is given up, the call answered eagerly, and the key not recorded again. In any other phase nothing happens.
    ///
    /// # Errors
    /// [`Error::NotCapturable`](crate::Error::NotCapturable) while the function is captured.
    pub fn not_capturable(&self, what: &str) -> Result<()> {
        match self.phase {
            Phase::Record | Phase::Inline => Err(crate::Error::NotCapturable { what: what.into() }),
            Phase::Warmup | Phase::Replay | Phase::Eager => Ok(()),
        }
    }

    /// Whether this is a warmup or a recording.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }
}

fn body_failed(why: &dyn fmt::Display) -> DeviceError {
    let detail = format!("the body of an if failed while it was captured: {why}");
    DeviceError::new(Call::EndIf, Code::IllegalState, detail)
}

impl<D: Device> fmt::Debug for Recorder<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}
