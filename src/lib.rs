//! A CUDA-graph runtime: trees of captured graphs over one checkpointable memory pool.
//!
//! A compiler backend hands over functions. The runtime runs each once eagerly (warmup), once under capture (record), and from then on
//! launches the captured graph (replay). Recordings form a tree: a node is one recording, made in the memory state its
//! ancestors left. All nodes share one pool, each keeps a checkpoint of it, and switching from one path to another restores
//! that checkpoint. The memory needed is the most that any branch needs, never the sum.
//!
//! ```
//! use std::sync::Arc;
//! use cudagraph_trees::device::{Device, host::HostDevice, kernels::KernelSet};
//! use cudagraph_trees::{Allocator, FunctionSpec, GraphTrees, Phase, lend};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = HostDevice::new();
//! let allocator = Allocator::new(device.clone())?;
//! let trees = GraphTrees::new(&allocator)?;
//! let kernels = Arc::new(KernelSet::load(&device)?);
//! let stream = device.create_stream()?;
//!
//! // out = in * 2: allocates through the recorder, launches on its stream.
//! let double = trees.register(FunctionSpec::new("double"), move |recorder, mut inputs| {
//!     let x = inputs.take(0)?;
//!     let out = recorder.alloc(x.bytes())?;
//!     kernels.scale_add(recorder.device(), recorder.stream(), out.ptr()?, x.ptr()?, x.bytes() / 4, 2.0, 0.0)?;
//!     Ok(vec![out])
//! })?;
//!
//! let x = allocator.alloc(&stream, 4)?;
//! for (value, phase) in [(1.0f32, Phase::Warmup), (2.0, Phase::Record), (3.0, Phase::Replay)] {
//!     x.write(&device, &stream, &value.to_le_bytes())?;
//!     let step = trees.step();
//!     let out = trees.run(&double, &step, &[], &stream, &mut [lend(&x)])?;
//!     assert_eq!(out.phase(), phase);
//!     assert_eq!(out[0].read(&device, &stream)?, (value * 2.0).to_le_bytes());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Where to go next
//! * [`GraphTrees`]: registering and running functions; [`Step`]: how long outputs are safe.
//! * [`Graph`]: one captured graph without a tree; [`PoolHandle`]: private pools, shared on request.
//! * [`PinnedBuffer`]: page-locked host memory, whose bytes a graph's copies read at each launch.
//! * [`PaddedInput`]: batches of any size in graphs of a few sizes.
//! * [`pool`]: the checkpointable pool alone, over any backing.
//! * [`device`]: what the runtime asks of an accelerator, the simulated one ([`device::host`]) and the adaptor that makes calls fail
//!   ([`device::faulty`]).
//! * [`inspect`]: pictures of pools and trees.
#![deny(missing_docs)]

pub mod allocator;
pub mod device;
mod error;
mod graph;
pub mod inspect;
mod padding;
pub mod pool;
mod rng;
mod storage;
mod sync;
mod tree;

pub use allocator::{
    Allocator, PinnedBuffer, PinnedConfig, PinnedStats, PoolCheckpoint, PoolHandle, PoolId,
    PoolOptions, RouteGuard,
};
pub use error::{BoxError, Error, Made, MovedInput, Phase, Result, Stale};
pub use graph::{Capture, CaptureOptions, Graph, IfBody};
pub use padding::{Buckets, Padded, PaddedInput};
pub use rng::{Generator, GeneratorState, STATE_BYTES};
pub use storage::{StorageId, Tensor, WeakTensor};
pub use tree::{
    Advice, Arg, BodyResult, Budget, Counts, Function, FunctionReport, FunctionSpec, FunctionView,
    GraphTrees, HeldView, InputView, Inputs, Mismatch, MovePolicy, NodeId, NodeView, OnMove,
    OnOverwrite, OutputView, Outputs, Prepare, Prepared, Reason, ReasonKind, Recorder, Step,
    TreeView, Value, give, lend,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
