//! What a function's closure works with: it allocates through the recorder and launches on its stream.

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

use super::args::Value;
use crate::allocator::{Allocator, PinnedBuffer, RouteGuard};
use crate::device::{Device, KernelArg, LaunchConfig};
use crate::error::{Phase, Result};
use crate::storage::{Storage, Tensor};
use crate::sync::{Mutex, lock};

/// The closure's side of a warmup or a recording.
///
/// All work of the function goes to [`stream`](Recorder::stream) (or to streams forked from and joined to it), and all memory it needs comes from
/// [`alloc`](Recorder::alloc). A tensor dropped inside gives its memory to what is allocated next, in the graph too.
pub struct Recorder<'a, D: Device> {
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

    /// Returns a host value beside the tensors, for [`Outputs::value`](crate::Outputs::value): a size, a flag, whatever goes with the outputs. A replay gives
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

impl<D: Device> fmt::Debug for Recorder<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}
