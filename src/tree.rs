//! Graph trees: functions that are warmed up, recorded and replayed over one shared pool. What a compiler backend embeds.
//!
//! [`GraphTrees`] is the face; the verbs are files in the folder of the same name: [`warmup`], [`record`], [`replay`], and
//! [`mod@admit`], which decides between them; and [`mod@inline`], for a stream that captures already. One mutex guards a tree's state. It is never held while a closure runs: the
//! tree is then marked busy, a nested run is an error, and another thread's run waits.

mod admit;
mod args;
mod call;
mod function;
mod generation;
mod inline;
mod node;
mod outputs;
mod path;
mod record;
mod recorder;
mod replay;
mod view;
mod warmup;

use std::fmt;
use std::panic::Location;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use slotmap::SlotMap;
use smallvec::SmallVec;

use crate::allocator::{Allocator, PoolHandle, PoolOptions};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pool::Checkpoint;
use crate::storage::Storage;
use crate::sync::lock;
use admit::admit;
use call::{Call, inputs_error};
use function::{Bound, FunctionState};
use generation::Generations;
use inline::Inlined;
use node::Node;
use path::Entry;
use record::Failure;
use replay::Taken;

pub use admit::Mismatch;
pub use args::{Arg, BodyResult, Inputs, Value, give, lend};
pub use function::{Function, FunctionSpec};
pub use generation::Step;
pub use node::NodeId;
pub use outputs::Outputs;
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

struct Inner<D: Device> {
    allocator: Allocator<D>,
    pool: PoolHandle<D>,
    /// The pool without any block.
    empty: Checkpoint,
    /// Where warmups and recordings run.
    stream: D::Stream,
    /// Orders one stream after another; re-recorded each time.
    event: D::Event,
    generations: Arc<Generations>,
    /// Which functions are ours.
    owner: Arc<()>,
    state: Mutex<State<D>>,
    /// What runs inside captures of the caller's have used.
    inlined: Mutex<Inlined<D>>,
    /// Told when the tree is not busy any more.
    idle: Condvar,
}

struct State<D: Device> {
    functions: SlotMap<FunctionKey, FunctionState<D>>,
    nodes: SlotMap<NodeKey, Node<D>>,
    /// In order of creation.
    roots: Vec<NodeKey>,
    path: Vec<Entry<D>>,
    /// Runs of earlier paths of which a living generation still holds something: the path keeps out of their way.
    carried: Vec<Entry<D>>,
    /// The pool's books say what is held of the path. Not so after a replay.
    books_exact: bool,
    /// How many dropped tokens the path knows of.
    seen_ended: u64,
    /// It was shut down.
    down: bool,
    /// Whose closure is running.
    busy: Option<ThreadId>,
    /// The streams that runs of the path were called on, and the last run before it.
    streams: SmallVec<[D::Stream; 2]>,
    counts: Counts,
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
                allocator: allocator.clone(),
                empty: pool.checkpoint_blocks(),
                pool,
                stream,
                event,
                generations: Generations::new(),
                owner: Arc::new(()),
                state: Mutex::new(State::new()),
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
    /// [`Error::Inputs`] where a position is declared twice, or a bound tensor is an output of this tree.
    pub fn register<F>(&self, spec: FunctionSpec<D>, body: F) -> Result<Function>
    where
        F: Fn(&mut Recorder<'_, D>, Inputs<D>) -> BodyResult<D> + Send + Sync + 'static,
    {
        let FunctionSpec {
            name,
            mut statics,
            mut bound,
            skip_warmup,
        } = spec;
        statics.sort_unstable();
        bound.sort_by_key(|(position, _)| *position);
        if let Some(position) = bound.windows(2).find(|w| w[0].0 == w[1].0).map(|w| w[0].0) {
            return Err(inputs_error(
                &name,
                format!("input {position} is bound twice"),
            ));
        }
        if let Some((position, _)) = bound
            .iter()
            .find(|(position, _)| statics.binary_search(position).is_ok())
        {
            return Err(inputs_error(
                &name,
                format!(
                    "input {position} is bound, and so static already: do not declare it as a static input too"
                ),
            ));
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
            if storage
                .memory()
                .is_some_and(|m| m.in_pool(&self.inner.pool))
            {
                let detail = format!(
                    "input {position} is an output of this tree, whose memory is reused: pass it to run, or bind a tensor from outside"
                );
                return Err(inputs_error(&name, detail));
            }
            storage.watch(&bound_died);
        }
        let mut state = lock(&self.inner.state);
        if state.down {
            return Err(Error::ShutDown);
        }
        let number = u32::try_from(state.functions.len()).unwrap_or(u32::MAX);
        let function = FunctionState {
            number,
            name: name.clone(),
            body: Arc::new(body),
            statics,
            bound,
            bound_died,
            skip_warmup,
            variants: Vec::new(),
        };
        let key = state.functions.insert(function);
        Ok(Function {
            key,
            name,
            owner: self.inner.owner.clone(),
        })
    }

    /// Ends the tree in order: waits for the work in flight, lets what is held own its memory, and drops every graph and function. Every later run is
    /// [`Error::ShutDown`]; handles stay readable, and dropping them does nothing but free their memory. May be called again.
    ///
    /// # Errors
    /// [`Error::Nested`] from inside a function; the device's, with the graphs dropped all the same.
    pub fn shutdown(&self) -> Result<()> {
        let mut state = self.inner.enter(&"shutdown".into())?;
        state.down = true;
        let ended = self.inner.end(&mut state);
        let device = self.inner.allocator.device();
        let waited = state
            .streams
            .iter()
            .chain([&self.inner.stream])
            .try_for_each(|stream| device.synchronize(stream));
        let counts = state.counts;
        let old = std::mem::replace(&mut *state, State::new());
        (state.down, state.counts) = (true, counts);
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
    /// # Errors
    /// [`Error::Function`] where the closure fails; [`Error::Untracked`] where it keeps pool memory; [`Error::Stale`] for an input of an
    /// ended generation; [`Error::Nested`]; [`Error::StaticDied`]; the pool's and the device's. Given inputs that were not given up are left in `args`.
    ///
    /// # Panics
    /// Only with the closure's own panic, after everything is as it was.
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

    /// The same, into `out`, whose room is used again: no run of a warm tree then allocates on the heap, however many outputs there are.
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

/// What is to be done with a call.
enum Choice {
    Replay(NodeKey),
    Record,
    Warmup,
}

impl<D: Device> Inner<D> {
    #[allow(clippy::too_many_arguments)] // the public face's, and where the result goes
    fn run(
        &self,
        function: &Function,
        step: &Step,
        key: &[i64],
        stream: &D::Stream,
        args: &mut [Arg<'_, D>],
        out: &mut Outputs<D>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        if !Arc::ptr_eq(&function.owner, &self.owner) {
            return Err(Error::ForeignHandle { what: "function" });
        }
        if !Arc::ptr_eq(&step.generations, &self.generations) {
            return Err(Error::ForeignHandle { what: "step" });
        }
        let mut state = self.enter(&function.name)?;
        if state.down {
            return Err(Error::ShutDown);
        }
        if self.captures(stream)? {
            return self.inline(state, function, stream, args, out, at);
        }
        let ended = self.generations.ended();
        if ended != state.seen_ended {
            state.retire(&self.generations, ended, &function.name, at);
        }
        state.functions[function.key].check_bound()?;
        let mut gives = false;
        for arg in &*args {
            if let Some(tensor) = arg.tensor() {
                tensor.check()?;
            }
            gives |= arg.is_given();
        }
        let variant = state.functions[function.key].variant_or_new(key);
        let (choice, taken) = loop {
            let choice = state.choose(function.key, variant, step.number(), args);
            let Choice::Replay(node) = choice else {
                break (choice, Taken::new());
            };
            // Otherwise somebody has come to hold what the node consumes: it is not admitted any more.
            if let Some(taken) = state.take_consumed(node, args) {
                break (choice, taken);
            }
        };
        let call = Call {
            function: function.key,
            variant,
            name: &function.name,
            generation: step.number(),
            stream,
            args,
            gives,
            at,
        };
        match choice {
            Choice::Replay(node) => self.replay(state, node, call, &taken, out),
            Choice::Record => self.record(state, call, out),
            Choice::Warmup => self.warmup(state, call, out),
        }
    }

    /// Takes the state, once no closure of another thread is running.
    fn enter(&self, function: &Arc<str>) -> Result<MutexGuard<'_, State<D>>> {
        let mut state = lock(&self.state);
        while let Some(thread) = state.busy {
            if thread == thread::current().id() {
                return Err(Error::Nested {
                    function: function.clone(),
                });
            }
            state = self
                .idle
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state)
    }

    /// Calls `f` with the state given back, marked busy meanwhile. `f` does not unwind.
    fn unlocked<'s, T>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        f: impl FnOnce() -> T,
    ) -> (MutexGuard<'s, State<D>>, T) {
        state.busy = Some(thread::current().id());
        drop(state);
        let result = f();
        let mut state = lock(&self.state);
        state.busy = None;
        self.idle.notify_all();
        (state, result)
    }
}

impl<D: Device> State<D> {
    fn new() -> Self {
        State {
            functions: SlotMap::with_key(),
            nodes: SlotMap::with_key(),
            roots: Vec::new(),
            path: Vec::new(),
            carried: Vec::new(),
            books_exact: true,
            seen_ended: 0,
            down: false,
            busy: None,
            streams: SmallVec::new(),
            counts: Counts::default(),
            last_failure: None,
        }
    }

    /// What to do with a call, and where on the path: runs at the path's end of which nothing is held may be forgotten here, and a path of which
    /// only other generations hold something may be carried along.
    fn choose(
        &mut self,
        function: FunctionKey,
        variant: usize,
        generation: u64,
        args: &[Arg<'_, D>],
    ) -> Choice {
        self.drop_carried();
        while self.tip_is_exact() && self.tip_is_dead() {
            self.cut_tip();
        }
        let warm = self.functions[function].variants[variant].warm;
        if self.tip_is_warm() && warm && self.tip_is_before(generation) {
            // Only warmups follow a warmup; but this is another generation, which need not wait until the warmup's outputs are let go.
            self.carry_path();
        }
        if self.tip_is_warm() || !warm {
            return Choice::Warmup;
        }
        loop {
            if let Some(node) = self.admitted(function, variant, args) {
                return Choice::Replay(node);
            }
            if !self.tip_is_dead() {
                break;
            }
            self.cut_tip();
        }
        if self.tip_is_before(generation)
            && let Some(node) = self.admitted_apart(function, variant, args)
        {
            self.carry_path();
            return Choice::Replay(node);
        }
        if self.functions[function].variants[variant].pauses() {
            return Choice::Warmup;
        }
        Choice::Record
    }

    /// The first recording of a variant below the tip that may be replayed.
    fn admitted(
        &self,
        function: FunctionKey,
        variant: usize,
        args: &[Arg<'_, D>],
    ) -> Option<NodeKey> {
        let fits = |key: &NodeKey| {
            self.fits(*key, args, |s| self.on_path(s)) && !self.overwrites_others(*key)
        };
        match self.path.last() {
            None => self.functions[function].variants[variant]
                .roots
                .iter()
                .copied()
                .find(fits),
            Some(_) => {
                let tip = self.tip()?;
                self.nodes[tip]
                    .children
                    .iter()
                    .filter(|(v, _)| *v == (function, variant))
                    .map(|(_, node)| *node)
                    .find(fits)
            }
        }
    }

    /// The first recording of a variant, wherever in the tree, that writes over nothing that is held: it may be replayed although the path is another.
    fn admitted_apart(
        &self,
        function: FunctionKey,
        variant: usize,
        args: &[Arg<'_, D>],
    ) -> Option<NodeKey> {
        let mut all: Vec<NodeKey> = self
            .nodes
            .iter()
            .filter(|(_, node)| node.variant == (function, variant))
            .map(|(key, _)| key)
            .collect();
        all.sort_by_key(|key| self.nodes[*key].id);
        all.into_iter().find(|key| {
            let node = &self.nodes[*key];
            // The path would be carried along, and so its outputs are copied in like others.
            self.fits(*key, args, |_| false) && !self.all_held().any(|held| node.overwrites(held))
        })
    }

    fn fits(
        &self,
        key: NodeKey,
        args: &[Arg<'_, D>],
        on_path: impl Fn(&Storage<D>) -> bool,
    ) -> bool {
        match admit(&self.nodes[key], args, on_path) {
            Ok(()) => true,
            Err(mismatch) => {
                tracing::debug!(node = self.nodes[key].id.0, ?mismatch, "not replayed");
                false
            }
        }
    }

    /// Whether a child of the tip would write over something that is held and that its masks do not speak of.
    fn overwrites_others(&self, key: NodeKey) -> bool {
        let node = &self.nodes[key];
        let over = |entry: &Entry<D>| self.held(entry).any(|held| node.overwrites(held));
        self.carried.iter().any(over) || (node.apart && self.path.iter().any(over))
    }
}

impl<D: Device> Inner<D> {
    /// Ends the tree: what is held owns its memory from here on, and outlives graphs and tree.
    fn end(&self, state: &mut State<D>) -> Result<()> {
        let Some(last) = state.streams.last().cloned() else {
            return Ok(());
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
