//! Kernels as both devices take them: a name, a host function, CUDA C.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::{DevicePtr, Fault};

/// A kernel's body on the simulated device.
pub type HostFn = Arc<dyn Fn(&mut dyn KernelContext) -> Result<(), Fault> + Send + Sync>;

/// What a host kernel sees while it runs: its arguments, and memory through checked accesses.
///
/// Memory is read into and written from buffers of the kernel's own, so that ranges which overlap or
/// alias (an in-place kernel) are plain values and no reference into device memory exists.
pub trait KernelContext {
    /// How the kernel was launched.
    fn config(&self) -> LaunchConfig;

    /// The `index`-th argument.
    ///
    /// # Errors
    /// [`FaultReason::BadArgument`](super::FaultReason::BadArgument) where there are not so many.
    fn arg(&self, index: usize) -> Result<KernelArg, Fault>;

    /// Reads `dst.len()` bytes at `src`. Fails where the range is not mapped or not live.
    fn read(&mut self, src: DevicePtr, dst: &mut [u8]) -> Result<(), Fault>;

    /// Writes `src` at `dst`. Fails where the range is not mapped or not live.
    fn write(&mut self, dst: DevicePtr, src: &[u8]) -> Result<(), Fault>;
}

/// A kernel that any device can load: the same function written for the host and in CUDA C.
#[derive(Clone)]
pub struct Kernel {
    /// Its name; in CUDA C the `extern "C" __global__` function of that name.
    pub name: Cow<'static, str>,
    /// The body on the simulated device.
    pub host: Option<HostFn>,
    /// CUDA C source that defines the function.
    pub cuda: Option<Cow<'static, str>>,
}

impl Kernel {
    /// A kernel with no body yet.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Kernel {
            name: name.into(),
            host: None,
            cuda: None,
        }
    }

    /// With a body for the simulated device.
    #[must_use]
    pub fn host(
        mut self,
        body: impl Fn(&mut dyn KernelContext) -> Result<(), Fault> + Send + Sync + 'static,
    ) -> Self {
        self.host = Some(Arc::new(body));
        self
    }

    /// With CUDA C source.
    #[must_use]
    pub fn cuda(mut self, source: impl Into<Cow<'static, str>>) -> Self {
        self.cuda = Some(source.into());
        self
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("name", &self.name)
            .field("host", &self.host.is_some())
            .field("cuda", &self.cuda.is_some())
            .finish()
    }
}

/// One argument of a launch, by value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // the types' own names
pub enum KernelArg {
    Ptr(DevicePtr),
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    F64(f64),
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl LaunchConfig {
    /// One thread for each of `n` elements, in blocks of 256.
    #[must_use]
    pub fn for_elements(n: u64) -> Self {
        let blocks = u32::try_from(n.div_ceil(256)).unwrap_or(u32::MAX).max(1);
        LaunchConfig {
            grid: [blocks, 1, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
        }
    }
}
