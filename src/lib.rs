//! A CUDA-graph runtime: trees of captured graphs over one checkpointable memory pool.
pub mod allocator;
pub mod device;
mod error;
mod graph;
pub mod inspect;
pub mod pool;
mod storage;
mod sync;
mod tree;

pub use allocator::{Allocator, PoolHandle, PoolOptions};
pub use error::{BoxError, Error, Made, Phase, Result, Stale};
pub use graph::{Capture, CaptureOptions, Graph};
pub use storage::{StorageId, Tensor, WeakTensor};
pub use tree::*;
