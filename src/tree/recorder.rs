//! What a function's closure works with: it allocates through the recorder and launches on its stream.

use std::fmt;
use std::panic::Location;

use crate::allocator::{Born, PoolHandle};
use crate::device::{Device, KernelArg, LaunchConfig};
use crate::error::{Phase, Result};
use crate::storage::Tensor;

/// The closure's side of a warmup or a recording.
///
/// All work of the function goes to [`stream`](Recorder::stream) (or to streams forked from and joined to it), and all memory it needs comes from
/// [`alloc`](Recorder::alloc). A tensor dropped inside gives its memory to what is allocated next, in the graph too.
pub struct Recorder<'a, D: Device> {
    pub(super) device: &'a D,
    pub(super) stream: &'a D::Stream,
    pub(super) pool: &'a PoolHandle<D>,
    pub(super) phase: Phase,
    pub(super) born: &'a Born<D>,
}

impl<'a, D: Device> Recorder<'a, D> {
    /// Allocates from the tree's pool. The bytes are undefined.
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`](crate::pool::PoolError::OutOfMemory), with the pool as it was.
    #[track_caller]
    pub fn alloc(&mut self, bytes: u64) -> Result<Tensor<D>> {
        let tensor = self.pool.alloc_at(self.stream, bytes, Location::caller())?;
        self.born.note(&tensor);
        Ok(tensor)
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
