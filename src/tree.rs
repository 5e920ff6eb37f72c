//! Graph trees: functions that are warmed up, recorded and replayed over one shared pool. What a compiler backend embeds.
//!
//! [`GraphTrees`] is the face; the verbs are files in the folder of the same name: [`warmup`], [`record`], [`replay`], and
//! [`mod@admit`], which decides between them; and [`mod@inline`], for a stream that captures already. One mutex guards a tree's state. It is never held while a closure runs: the
//! tree is then marked busy, a nested run is an error, and another thread's run waits.

mod admit;
mod args;
mod call;
mod control;
mod decide;
mod eager;
mod fast;
mod function;
mod generation;
mod inline;
mod keep;
mod leaves;
#[cfg(all(test, loom))]
mod models;
mod node;
mod outputs;
mod path;
mod policy;
mod prepare;
mod reason;
mod record;
mod recorder;
mod remove;
mod replay;
mod run;
mod undo;
mod view;
mod warmup;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

use slotmap::SlotMap;
use smallvec::SmallVec;

use crate::allocator::{Allocator, Elsewhere, PoolHandle, PoolOptions};
use crate::device::{Device, DevicePtr};
use crate::error::{Error, Result};
use crate::pool::Checkpoint;
use crate::storage::Storage;
use crate::sync::thread::ThreadId;
use crate::sync::{AtomicBool, Condvar, Mutex, lock};
use call::inputs_error;
use decide::Place;
use function::{Bound, FunctionState};
use generation::Generations;
use inline::Inlined;
use leaves::Leaves;
use node::Node;
use path::Entry;
use remove::{Buried, Registry};
use undo::Failure;

pub use admit::Mismatch;
pub use args::{Arg, BodyResult, Inputs, Value, give, lend};
pub use function::{Function, FunctionSpec};
pub use generation::Step;
pub use node::NodeId;
pub use outputs::Outputs;
pub use policy::{Budget, MovePolicy, OnMove, OnOverwrite};
pub use prepare::{Prepare, Prepared};
pub use reason::{Advice, FunctionReport, Reason, ReasonKind};
use recorder::Made;
pub use recorder::Recorder;
pub use view::{Counts, FunctionView, HeldView, InputView, NodeView, OutputView, TreeView};

slotmap::new_key_type! {
    /// A function of a tree.
    pub(crate) struct FunctionKey;
    /// A node of a tree.
    pub(crate) struct NodeKey;
}

/// A tree of recorded graphs over one pool.
///
/// Functions are [registered](GraphTrees::register) once and [run](GraphTrees::run) many times: the first run of a
/// function warms it up, the second records it, later ones replay the recording, as long as inputs and liveness are what they were;
/// otherwise it is recorded again, beside the first. Clones are the same tree. All methods may be called from any thread.
pub struct GraphTrees<D: Device> {
    inner: Arc<Inner<D>>,
}

/// What the handles of one tree share. What a replay touches comes first, here and in [`State`].
#[repr(C)]
struct Inner<D: Device> {
    /// Which functions are ours.
    owner: Arc<()>,
    generations: Arc<Generations>,
    /// Something is to be removed or said: dropped functions, static inputs that died. Raised from anywhere.
    untidy: Arc<AtomicBool>,
    /// Streams that outputs were said to be used on.
    elsewhere: Option<Arc<Elsewhere<D>>>,
    device: D,
    allocator: Allocator<D>,
    state: Mutex<State<D>>,
    pool: PoolHandle<D>,
    /// The pool without any block.
    empty: Checkpoint,
    /// Where warmups and recordings run.
    stream: D::Stream,
    /// Orders one stream after another; re-recorded each time.
    event: D::Event,
    /// Who is told of advice.
    on_advice: Mutex<Option<AdviceHook>>,
    /// State of functions.
    made: Made<D>,
    /// What runs inside captures of the caller's have used.
    inlined: Mutex<Inlined<D>>,
    /// Told when the tree is not busy any more.
    idle: Condvar,
}

/// Who is told of advice.
type AdviceHook = Arc<dyn Fn(&Advice) + Send + Sync>;

#[repr(C)]
struct State<D: Device> {
    /// Whose closure is running.
    busy: Option<ThreadId>,
    /// How many threads wait for its end.
    waiting: usize,
    functions: SlotMap<FunctionKey, FunctionState<D>>,
    nodes: SlotMap<NodeKey, Node<D>>,
    path: Vec<Entry<D>>,
    /// Runs of earlier paths of which a living generation still holds something: the path keeps out of their way.
    carried: Vec<Entry<D>>,
    /// Room for what the next recording allocates.
    born: Vec<Arc<Storage<D>>>,
    /// Room for the addresses that a replay copies from.
    sources: Vec<DevicePtr>,
    /// The streams that runs of the path were called on, and the last run before it.
    streams: SmallVec<[D::Stream; 2]>,
    /// How many dropped tokens the path knows of.
    seen_ended: u64,
    /// How many places there are at which a function is skipped.
    skips: usize,
    counts: Counts,
    /// It was shut down.
    down: bool,
    /// The pool's books say what is held of the path. Not so after a replay.
    books_exact: bool,
    /// How many were registered so far.
    registered: u32,
    /// In order of creation.
    roots: VecDeque<NodeKey>,
    leaves: Leaves,
    /// What functions did below a node (or at the root) on account of inputs that moved.
    places: HashMap<(Option<NodeKey>, FunctionKey), Place>,
    budget: Budget,
    on_overwrite: OnOverwrite,
    /// Recordings keep their templates.
    keeps_templates: bool,
    /// Bytes of all graphs, as estimated.
    graph_bytes: u64,
    /// Kinds of reasons that are errors, as bits.
    refused: u16,
    /// Functions whose handle is gone, and that are here still.
    leaving: Vec<FunctionKey>,
    /// What was not said yet.
    advice: Vec<Advice>,
    /// What is the caller's and is to be dropped when the lock is free.
    buried: Vec<Buried>,
    /// Why the last capture that failed did.
    last_failure: Option<Failure>,
}

impl<D: Device> GraphTrees<D> {
    /// A tree without functions, with a pool of its own.
    ///
    /// # Errors
    /// The device's, where it gives no stream or event.
    pub fn new(allocator: &Allocator<D>) -> Result<Self> {
        Self::with_pool(allocator, PoolOptions::default())
    }

    /// The same with options for the pool.
    ///
    /// # Errors
    /// As [`new`](GraphTrees::new), and [`PoolError::InvalidConfig`](crate::pool::PoolError::InvalidConfig).
    pub fn with_pool(allocator: &Allocator<D>, options: PoolOptions) -> Result<Self> {
        let device = allocator.device();
        let stream = device.create_stream()?;
        let event = device.create_event()?;
        let pool = allocator.new_pool(options, true)?;
        Ok(GraphTrees {
            inner: Arc::new(Inner {
                device: device.clone(),
                allocator: allocator.clone(),
                elsewhere: pool.elsewhere(),
                empty: pool.checkpoint_blocks(),
                pool,
                stream,
                event,
                generations: Generations::new(),
                owner: Arc::new(()),
                state: Mutex::new(State::new()),
                untidy: Arc::default(),
                on_advice: Mutex::default(),
                made: Made::default(),
                inlined: Mutex::default(),
                idle: Condvar::new(),
            }),
        })
    }

    /// The allocator that the tree's pool belongs to.
    #[must_use]
    pub fn allocator(&self) -> &Allocator<D> {
        &self.inner.allocator
    }

    /// Registers a function.
    ///
    /// The closure is called for warmups and recordings. It gets the inputs by position, allocates through the recorder, launches on the recorder's
    /// stream, and returns the outputs: tensors it allocated, views of them, inputs and views of them, or tensors from outside the pool. It is to do the
    /// same work each time for the same key and inputs of the same lengths; a replay repeats what the recording did.
    ///
    /// # Errors
    /// [`Error::Inputs`] where a position is bound twice, or bound and declared static, or beyond the [number of inputs](FunctionSpec::inputs), or a bound tensor is an output of a tree; [`Error::ForeignTensor`] where it is of another device;
    /// [`Error::StaticDied`] where it is gone; [`Error::ShutDown`].
    pub fn register<F>(&self, spec: FunctionSpec<D>, body: F) -> Result<Function>
    where
        F: Fn(&mut Recorder<'_, D>, Inputs<D>) -> BodyResult<D> + Send + Sync + 'static,
    {
        let FunctionSpec {
            name,
            mut statics,
            mut bound,
            skip_warmup,
            settings,
        } = spec;
        statics.sort_by_key(|(position, _)| *position);
        bound.sort_by_key(|(position, _)| *position);
        if let Some(position) = bound.windows(2).find(|w| w[0].0 == w[1].0).map(|w| w[0].0) {
            return Err(inputs_error(
                &name,
                format!("input {position} is bound twice"),
            ));
        }
        if let Some(twice) = statics.windows(2).find(|w| w[0].0 == w[1].0) {
            let (position, first, second) = (twice[0].0, twice[0].1, twice[1].1);
            let detail =
                format!("input {position} is declared static twice, at {first} and at {second}");
            return Err(inputs_error(&name, detail));
        }
        if let Some((position, _)) = bound
            .iter()
            .find(|(position, _)| statics.iter().any(|(s, _)| s == position))
        {
            return Err(inputs_error(
                &name,
                format!(
                    "input {position} is bound, and so static already: do not declare it as a static input too"
                ),
            ));
        }
        if let Some(count) = settings.inputs {
            let declared = statics.iter().map(|(position, _)| *position);
            let bound = bound.iter().map(|(position, _)| *position);
            let all = declared
                .chain(bound)
                .chain(settings.mutates.iter().copied());
            if let Some(position) = all.max().filter(|position| *position >= count) {
                let detail = format!(
                    "input {position} is declared, of {count} inputs in all; positions count from 0"
                );
                return Err(inputs_error(&name, detail));
            }
        }
        let bound_died = Arc::new(AtomicBool::new(false));
        for (position, input) in &bound {
            let Bound::Tensor(weak) = input else { continue };
            let tensor = weak.upgrade().ok_or_else(|| Error::StaticDied {
                function: name.clone(),
                input: *position,
            })?;
            let Some(storage) = tensor.storage() else {
                continue;
            };
            self.inner.refuse_input(&name, *position, &tensor)?;
            if !storage.is_eternal() {
                let whose = if storage.in_pool(&self.inner.pool) {
                    "this"
                } else {
                    "another"
                };
                let detail = format!(
                    "input {position} is an output of {whose} tree, whose memory is reused: pass it to run, or bind a tensor from outside of trees"
                );
                return Err(inputs_error(&name, detail));
            }
            storage.watch(&bound_died);
            storage.watch(&self.inner.untidy);
        }
        let mut state = lock(&self.inner.state);
        if state.down {
            return Err(Error::ShutDown);
        }
        let number = state.registered;
        state.registered = number.saturating_add(1);
        let function = FunctionState {
            number,
            name: name.clone(),
            body: Arc::new(body),
            statics,
            bound,
            bound_died,
            skip_warmup,
            variants: SmallVec::new(),
            settings,
            recordings: 0,
            replays: 0,
            reasons: [0; ReasonKind::ALL.len()],
            advised: 0,
        };
        let key = state.functions.insert(function);
        let registry: Weak<dyn Registry> = Arc::<Inner<D>>::downgrade(&self.inner);
        Ok(Function::new(key, name, self.inner.owner.clone(), registry))
    }

    /// Ends the tree in order: waits for the work in flight (but for what captures hold, and breaking none), lets what is held own its memory, and drops every graph and function. Every later run is
    /// [`Error::ShutDown`]; handles stay readable, and dropping them does nothing but free their memory. May be called again.
    ///
    /// # Errors
    /// [`Error::Nested`] from inside a function; the device's, with the graphs dropped all the same.
    pub fn shutdown(&self) -> Result<()> {
        let mut state = self.inner.enter(&"shutdown".into())?;
        state.down = true;
        let ended = self.inner.end(&mut state);
        let waited = self.inner.allocator.device().quiesce();
        self.inner.unpin_all(&state);
        let (counts, waiting) = (state.counts, state.waiting);
        let old = std::mem::replace(&mut *state, State::new());
        (state.down, state.counts, state.waiting) = (true, counts, waiting);
        // Closures and values are the caller's: what their drop does is not done under our lock.
        drop(state);
        drop(old);
        ended.and(waited.map_err(Error::from))
    }

    /// Opens a generation: a step of the program. See [`Step`] for what its token protects.
    ///
    /// A new step may be opened before the last one's token is dropped. A loop needs a token for each turn: below one token that lives on, what is
    /// held of earlier turns stays, and each turn is another place in the tree.
    pub fn step(&self) -> Step {
        self.inner.generations.open()
    }

    /// Runs a function: warms it up, records it, or replays a recording of it.
    ///
    /// `key` chooses the variant (often `&[]`); each key warms up and records on its own. Work is ordered after what `stream` has been given so far, and
    /// what `stream` is given next is ordered after it. `args` are the inputs that are not bound, in order of position.
    /// Returns as soon as the work is enqueued. While a closure runs, another thread's run of the same tree waits: a closure does not wait for one.
    ///
    /// **On a stream that captures** the function's work becomes a part of that capture, as if the closure had been called there: nothing is warmed up,
    /// recorded or launched, and the tree stays as it is. The caller's graph then reads each input where it lies now, at every launch, and whoever
    /// launches it sees to it that inputs and bound tensors live; orders the capture after what wrote them; and keeps the tree (or a
    /// [`Graph`](crate::Graph) that was captured so) as long as it is launched. All that such a run allocates, outputs included, is of a pool
    /// of its own, and is not used again as long as the tree lives.
    ///
    /// Given inputs are dropped by the run's end, when no lock is held: what keeps imported memory may call the tree. (Inside an eager run's closure it is a closure's call.)
    ///
    /// # Errors
    /// Before anything is done:
    /// * [`Error::ForeignHandle`]: function or step are another tree's. [`Error::ForeignStream`], [`Error::ForeignTensor`]: stream or input are another device's.
    /// * [`Error::Nested`]: from inside a closure of the tree. [`Error::ShutDown`].
    /// * [`Error::Stale`]: an input of a generation that was taken. [`Error::StaticDied`]: a bound tensor is gone.
    /// * [`Error::Inputs`]: an input was [taken](Arg::Taken) by an earlier run, one is bound at a position that the call does not have, or there are more or fewer than the function
    ///   [declares](FunctionSpec::inputs).
    /// * [`Error::InputMoved`]: an input moved, and [`OnMove::Error`] is the function's policy. [`Error::Refused`]: it would be no replay, for a reason that
    ///   was made an error ([`refuse`](GraphTrees::refuse)); where that comes out only in a recording, the closure was called, and that was undone.
    ///
    /// From the closure, with its recording undone, or what it allocated in a warmup given back (what it enqueued there runs):
    /// * [`Error::Function`]: it failed. [`Error::Untracked`]: it kept memory of the pool. [`Error::ForeignOutput`]: it returned an output that it was not passed.
    /// * [`Error::Stale`], [`Error::ForeignTensor`]: what it returned is stale, or of another device.
    ///
    /// At any point:
    /// * [`Error::Pool`]: above all [`PoolError::OutOfMemory`](crate::pool::PoolError::OutOfMemory).
    /// * [`Error::Device`]: the device's. With [`Code::StreamCaptureInvalidated`](crate::device::Code::StreamCaptureInvalidated) where `stream` captures and its capture is broken, with
    ///   [`Code::StreamCaptureIsolation`](crate::device::Code::StreamCaptureIsolation) where a stream that earlier runs were called on, or their outputs used, captures now. A refusal because of the
    ///   tree's own capture is none: the call is answered eagerly.
    ///
    /// Generations whose tokens were dropped have ended all the same. Given inputs that were not given up are left in `args`.
    ///
    /// # Panics
    /// Only with the panic of the function's closure (or of the one that [chooses keys](FunctionSpec::capture_if)), after everything is as it was.
    #[track_caller]
    pub fn run(
        &self,
        function: &Function,
        step: &Step,
        key: &[i64],
        stream: &D::Stream,
        args: &mut [Arg<'_, D>],
    ) -> Result<Outputs<D>> {
        let mut out = Outputs::new();
        self.inner.run(
            function,
            step,
            key,
            stream,
            args,
            &mut out,
            Location::caller(),
        )?;
        Ok(out)
    }

    /// The same, with an event that says when the run's work is done: recorded on `stream` behind it. To be waited for by other streams, or asked for
    /// by the host. On a stream that captures, it is the capture's.
    ///
    /// # Errors
    /// As [`run`](GraphTrees::run); [the device's](Device::create_event), with nothing run, where it gives no event.
    ///
    /// # Panics
    /// As [`run`](GraphTrees::run).
    #[track_caller]
    pub fn run_with_event(
        &self,
        function: &Function,
        step: &Step,
        key: &[i64],
        stream: &D::Stream,
        args: &mut [Arg<'_, D>],
    ) -> Result<(Outputs<D>, D::Event)> {
        let device = self.inner.allocator.device();
        let event = device.create_event()?;
        let outputs = self.run(function, step, key, stream, args)?;
        if let Err(error) = device.record(&event, stream) {
            // The run is done with: its outputs are not lost. Waiting for an event that was never recorded does nothing, and so it is right.
            tracing::warn!(%error, "waiting for a run on the host, in place of its event");
            device.synchronize(stream)?;
        }
        Ok((outputs, event))
    }

    /// The same as [`run`](GraphTrees::run), into `out`, whose room is used again: no run of a warm tree then allocates on the heap, however many outputs there are.
    ///
    /// # Errors
    /// As [`run`](GraphTrees::run); `out` is empty then.
    ///
    /// # Panics
    /// As [`run`](GraphTrees::run).
    #[track_caller]
    pub fn run_into(
        &self,
        function: &Function,
        step: &Step,
        key: &[i64],
        stream: &D::Stream,
        args: &mut [Arg<'_, D>],
        out: &mut Outputs<D>,
    ) -> Result<()> {
        out.clear();
        self.inner
            .run(function, step, key, stream, args, out, Location::caller())
    }
}

impl<D: Device> State<D> {
    fn new() -> Self {
        State {
            functions: SlotMap::with_key(),
            registered: 0,
            nodes: SlotMap::with_key(),
            roots: VecDeque::new(),
            leaves: Leaves::default(),
            path: Vec::new(),
            carried: Vec::new(),
            books_exact: true,
            seen_ended: 0,
            down: false,
            busy: None,
            waiting: 0,
            streams: SmallVec::new(),
            counts: Counts::default(),
            places: HashMap::new(),
            skips: 0,
            budget: Budget::default(),
            on_overwrite: OnOverwrite::Stale,
            keeps_templates: false,
            graph_bytes: 0,
            refused: 0,
            leaving: Vec::new(),
            advice: Vec::new(),
            buried: Vec::new(),
            last_failure: None,
            born: Vec::new(),
            sources: Vec::new(),
        }
    }
}

impl<D: Device> Inner<D> {
    /// Ends the tree: what is held owns its memory from here on, and outlives graphs and tree.
    fn end(&self, state: &mut State<D>) -> Result<()> {
        self.hear_of_streams(state);
        // A stream that captures by now is not waited for: an event of its would be the capture's, and what was freed is the pool's last, which is
        // given back only once the device has been waited for.
        state
            .streams
            .retain(|used| matches!(self.captures(used), Ok(false)));
        let Some(last) = state.streams.last().cloned() else {
            return self.catch_up(state, &self.stream);
        };
        for used in state.streams.iter().filter(|used| **used != last) {
            self.follow(used, &last)?;
        }
        self.catch_up(state, &last)
    }
}

impl<D: Device> Drop for Inner<D> {
    fn drop(&mut self) {
        let mut state = std::mem::replace(&mut *lock(&self.state), State::new());
        if let Err(error) = self.end(&mut state) {
            tracing::error!(%error, "the pool's books could not catch up with what is held at the tree's end");
        }
        self.unpin_all(&state);
    }
}

impl<D: Device> Clone for GraphTrees<D> {
    fn clone(&self) -> Self {
        GraphTrees {
            inner: self.inner.clone(),
        }
    }
}

impl<D: Device> fmt::Debug for GraphTrees<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.inner.state);
        f.debug_struct("GraphTrees")
            .field("functions", &state.functions.len())
            .field("nodes", &state.nodes.len())
            .finish_non_exhaustive()
    }
}
