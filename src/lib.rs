//! cudagraph-trees
pub mod device;
pub mod pool;
