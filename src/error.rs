//! The crate's errors: one enum, a variant for each thing a caller can act on.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use crate::allocator::PoolId;
use crate::device::{DeviceError, DevicePtr, GraphInfo};
use crate::pool::PoolError;
use crate::tree::NodeId;

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a caller's closure failed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Whatever a call of this crate can come back with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device refused a call.
    #[error(transparent)]
    Device(#[from] DeviceError),

    /// The pool could not do it; it is as it was.
    #[error(transparent)]
    Pool(#[from] PoolError),

    /// The handle's memory was given to a later run.
    #[error(transparent)]
    Stale(Box<Stale>),

    /// A range that does not lie in the tensor.
    #[error("{bytes} B from offset {offset} do not fit a tensor of {of} B")]
    View {
        /// Where the range was to begin.
        offset: u64,
        /// How long it was to be.
        bytes: u64,
        /// How long the tensor is.
        of: u64,
    },

    /// Another number of bytes than the tensor has.
    #[error(
        "{bytes} B are to be written over a tensor of {of} B: give as many as it has, or write to a view of it"
    )]
    Length {
        /// How many were given.
        bytes: u64,
        /// How many it has.
        of: u64,
    },

    /// A batch is larger than every bucket.
    #[error(
        "{rows} rows do not fit the largest bucket, of {largest}: make a larger one, or split the batch"
    )]
    NoBucket {
        /// Rows of the batch.
        rows: u64,
        /// Rows of the largest bucket.
        largest: u64,
    },

    /// Buckets, rows and fill values do not go together.
    #[error("padding: {0}")]
    Padding(String),

    /// No pool has this id.
    #[error(
        "there is no pool {0}: it was never made, or its last graph, handle and block are gone"
    )]
    UnknownPool(PoolId),

    /// The pool's last user is gone; what is left of it only waits to be trimmed.
    #[error(
        "pool {0} has no graph and no handle any more and cannot be used again; make a new one"
    )]
    PoolReleased(PoolId),

    /// The pool belongs to another allocator.
    #[error("the pool belongs to another allocator; pools are shared within one allocator only")]
    ForeignPool,

    /// The tensor lies on another device than the one that is to work with it. Nothing was enqueued for it.
    #[error(
        "{what} lies on another device: read it there and write it to a tensor of this one; or import its memory, if this device can reach that"
    )]
    ForeignTensor {
        /// Which tensor.
        what: String,
    },

    /// The stream belongs to another device than the one that is to work on it.
    #[error("the stream belongs to another device: use one that this device gave")]
    ForeignStream,

    /// Tensors of the pool died while work of other streams, named by [`record_stream`](crate::Tensor::record_stream), still uses them.
    #[error(
        "{blocks} dead block(s) of pool {pool} are in use on streams that record_stream named: synchronize those, then restore"
    )]
    UsedElsewhere {
        /// Which pool.
        pool: PoolId,
        /// How many blocks.
        blocks: usize,
    },

    /// Memory can be given back only while nothing captures.
    #[error("{captures} capture(s) underway, of this thread or others: trim when they have ended")]
    CaptureUnderway {
        /// How many.
        captures: usize,
    },

    /// The graph object holds a graph already.
    #[error("the graph object holds a captured graph; call reset() before it captures another")]
    AlreadyCaptured,

    /// The graph object holds no graph.
    #[error("nothing was captured into this graph object yet (or it was reset)")]
    NotCaptured,

    /// There is no picture of the graph: its template went when it had been made executable.
    #[error(
        "the graph's template was not kept when it was captured: call keep_template(true) on the graph object, or keep_templates(true) on the tree, and capture again"
    )]
    TemplateNotKept,

    /// The tree has no such node (any more).
    #[error(
        "the tree has no node n{}: its recording was removed, or is another tree's; view() lists those that are there", .0.0
    )]
    UnknownNode(NodeId),

    /// The driver put allocations of its own into the graph.
    #[error("the captured graph holds {} memory node(s), made by an allocation that bypassed the pool (cuMemAllocAsync, or cuBLAS without a workspace): \
             such a graph cannot be instantiated twice; allocate through the recorder, or set the library's workspace", .0.memory)]
    MemoryNodes(GraphInfo),

    /// The function's closure returned an error. Nothing was recorded, and the pool is as before the call.
    #[error("{function} failed during its {phase}: {source}")]
    Function {
        /// The function's name.
        function: Arc<str>,
        /// What was being done.
        phase: Phase,
        /// The closure's error.
        source: BoxError,
    },

    /// The closure kept memory of the pool beyond the call without returning it.
    #[error(
        "{function} kept {bytes} B at {place}, allocated at {at} during its {phase}, without returning it: the pool reuses that memory, so the handle is \
             stale now; return it as an output, or allocate it outside of the function"
    )]
    Untracked {
        /// The function's name.
        function: Arc<str>,
        /// What was being done.
        phase: Phase,
        /// Length of the first such allocation, in bytes.
        bytes: u64,
        /// Where it lies, as segment+offset.
        place: String,
        /// Where it was allocated.
        at: &'static Location<'static>,
        /// How many such allocations there are.
        count: usize,
    },

    /// The predicate of an if is another number of bytes than one.
    #[error(
        "the predicate of an if is a byte, and the tensor has {bytes} B: pass a view of the byte"
    )]
    Predicate {
        /// How many it has.
        bytes: u64,
    },

    /// Memory that was allocated in the body of an if is held behind it: at a launch that does not run the body, it would hold nothing.
    #[error(
        "{bytes} B allocated at {at} in the body of an if are held behind it ({count} such in all): what is born in a body must die in it; allocate it before the \
         if, and write it in the body"
    )]
    Escaped {
        /// Length of the first such allocation, in bytes.
        bytes: u64,
        /// Where it was allocated.
        at: &'static Location<'static>,
        /// How many such allocations there are.
        count: usize,
    },

    /// The closure returned a tensor that is none of: allocated in this call, one of its inputs, or memory outside the pool.
    #[error(
        "output {output} of {function} lies in the tree's pool but is neither made in this call nor one of its inputs: pass it to run"
    )]
    ForeignOutput {
        /// The function's name.
        function: Arc<str>,
        /// Which output.
        output: usize,
    },

    /// `run`, `invalidate` or `shutdown` was called from inside a function's closure.
    #[error(
        "{function} was called from inside a function of the same tree: a run, invalidate and shutdown come after the outer run has returned"
    )]
    Nested {
        /// The function that was to be run or invalidated; "shutdown".
        function: Arc<str>,
    },

    /// The function or token belongs to another tree.
    #[error(
        "the {what} belongs to another GraphTrees; functions, tokens and trees are used together"
    )]
    ForeignHandle {
        /// What does.
        what: &'static str,
    },

    /// The call's inputs do not fit the function's declaration.
    #[error("{function}: {detail}")]
    Inputs {
        /// The function's name.
        function: Arc<str>,
        /// What does not fit.
        detail: String,
    },

    /// A static input that was bound at registration is gone.
    #[error(
        "input {input} of {function} was bound at registration, and its storage has died since; register the function again with one that lives"
    )]
    StaticDied {
        /// The function's name.
        function: Arc<str>,
        /// Which input.
        input: usize,
    },

    /// Inputs that are used in place lie elsewhere than where they were recorded, and the function's policy makes that an error.
    #[error("{function}: {}; pass the same tensors, or choose another policy for moves", moved.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    InputMoved {
        /// The function's name.
        function: Arc<str>,
        /// All inputs that moved.
        moved: Vec<MovedInput>,
    },

    /// The run would not have been a replay, for a reason that [`refuse`](crate::GraphTrees::refuse) made an error.
    #[error("{function} was not run: {reason}, and that is refused; nothing has changed")]
    Refused {
        /// The function's name.
        function: Arc<str>,
        /// Why it would not have replayed.
        reason: crate::tree::Reason,
    },

    /// A closure came, while it was recorded, to something that [`Recorder::not_capturable`](crate::Recorder::not_capturable) names, or used a
    /// [`PinnedBuffer`](crate::PinnedBuffer) as a graph could not. The call is answered eagerly.
    #[error("{what} cannot be captured")]
    NotCapturable {
        /// What.
        what: String,
    },

    /// The tree was shut down.
    #[error("the tree was shut down: its graphs are gone; make a new one")]
    ShutDown,

    /// Pool and tree disagree about what is held: a defect of this crate, or memory of the pool freed behind its back.
    #[error("the pool and what the tree tracks of it differ: {0}")]
    Books(String),
}

/// An input that is used in place, and lies elsewhere than where it was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovedInput {
    /// Its position, as the closure sees it.
    pub input: usize,
    /// Where it lay.
    pub recorded: DevicePtr,
    /// Where it lies.
    pub passed: DevicePtr,
    /// Where it was declared static; `None` for one that was an output of the path.
    pub declared_at: Option<&'static Location<'static>>,
}

impl fmt::Display for MovedInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MovedInput {
            input,
            recorded,
            passed,
            ..
        } = self;
        match self.declared_at {
            Some(at) => write!(
                f,
                "static input {input} (declared at {at}) moved from {recorded:?} to {passed:?}"
            ),
            None => write!(
                f,
                "input {input} was the output at {recorded:?} and lies at {passed:?}"
            ),
        }
    }
}

/// What a run was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Running eagerly in the pool.
    Warmup,
    /// Being captured.
    Record,
    /// Launching the recorded graph.
    Replay,
    /// Being captured into a capture of the caller's.
    Inline,
    /// Running eagerly, with memory from outside of the tree.
    Eager,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Warmup => "warmup",
            Phase::Record => "recording",
            Phase::Replay => "replay",
            Phase::Inline => "inline run",
            Phase::Eager => "eager run",
        })
    }
}

/// What a stale handle was a handle on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Made {
    /// An output.
    Output {
        /// Of this function.
        function: Arc<str>,
        /// The first output that lies in its storage.
        output: usize,
    },
    /// Memory that a function allocated and did not return.
    Inside,
}

/// A handle whose memory was given to a later run: what it was, where it was made, who took it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Stale {
    /// What it was.
    pub made: Made,
    /// The call that handed it out.
    pub made_at: &'static Location<'static>,
    /// The function whose run ended its generation.
    pub taken_by: Option<Arc<str>>,
    /// The call of that run.
    pub taken_at: Option<&'static Location<'static>>,
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.made {
            Made::Output { function, output } => write!(
                f,
                "output {output} of {function}, handed out at {}, ",
                self.made_at
            )?,
            // No token would have kept it, so none is spoken of.
            Made::Inside => {
                return write!(
                    f,
                    "memory allocated inside a function at {}, and kept beyond its call, is the pool's again: \
                     return it as an output, or allocate it outside of the function",
                    self.made_at
                );
            }
        }
        f.write_str("was overwritten by a subsequent run")?;
        if let (Some(by), Some(at)) = (&self.taken_by, self.taken_at) {
            write!(f, " ({by}, at {at})")?;
        }
        f.write_str(": its step's token was dropped; keep the token as long as you read its outputs, or copy them out before")
    }
}
