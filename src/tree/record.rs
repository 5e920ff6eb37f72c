//! Recording: a function is captured in the memory state that the path left, and becomes a node.
//!
//! Until the graph has been launched, the way back is open. A capture executes nothing, so whatever it did to the books can be undone
//! without a trace: what it allocated is freed, and what was given to it and died inside is claimed back where it lay.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;
use tracing::{debug_span, warn};

use super::args::{Arg, Value};
use super::call::{Blame, Call, Given, Lent, Outcome, Placed, Sorted, given_in};
use super::function::Never;
use super::node::{
    Consumed, DeadBits, Footprint, InputSpec, Launchable, Node, NodeId, OutputSpec, footprint,
};
use super::outputs::Outputs;
use super::path::{Entry, Run};
use super::reason::Reason;
use super::{Inner, State};
use crate::allocator::{Baked, Claim};
use crate::device::{Bare, Broke, CaptureMode, Code, Device, DeviceError, GraphInfo, relaxed};
use crate::error::{Error, Phase, Result};
use crate::pool::{Allocation, Tag};
use crate::storage::{Storage, Tensor};
use crate::sync::MutexGuard;

/// Why a capture failed for its own reasons.
pub(super) struct Failure {
    /// In words: an error of the caller's is not kept, nor asked again.
    text: String,
    /// The device's refusal that was the first of it.
    pub(super) first: Option<Box<DeviceError>>,
}

impl From<DeviceError> for Failure {
    #[cold]
    fn from(error: DeviceError) -> Self {
        Failure {
            first: first_of(&error),
            text: error.to_string(),
        }
    }
}

impl From<DeviceError> for Box<Undone> {
    #[cold]
    fn from(error: DeviceError) -> Self {
        Box::new(Undone::Capture(error.into()))
    }
}

impl Undone {
    #[cold]
    fn call(error: impl Into<Error>) -> Box<Self> {
        Box::new(Undone::Call(error.into()))
    }

    /// Why a graph of such nodes is not kept.
    #[cold]
    fn of(info: GraphInfo) -> Box<Self> {
        Box::new(if info.memory > 0 {
            let text = Error::MemoryNodes(info).to_string();
            Undone::Capture(Failure { text, first: None })
        } else {
            Undone::Never(Never::TooSmall)
        })
    }
}

impl fmt::Display for Failure {
    /// The error, and the first refusal where the error does not tell of it: a closure may go on after that, and fail with words of its own.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        match &self.first {
            Some(first) if !self.text.contains(&Bare(first).to_string()) => {
                write!(f, "; {}", Broke(first))
            }
            _ => Ok(()),
        }
    }
}

/// Why there is no recording.
enum Undone {
    /// The capture failed for its own reasons: the call is answered eagerly.
    Capture(Failure),
    /// The key is not to be captured again: the call is answered eagerly.
    Never(Never),
    /// The closure did not want it kept: the call is answered eagerly.
    Discarded,
    /// The caller hears of it.
    Call(Error),
    /// The closure panicked; in a capture that was broken, if that is known.
    Panic(Box<dyn std::any::Any + Send>, Option<DeviceError>),
}

/// A graph that was captured and launched, and what there is to say of it.
struct Recorded<D: Device> {
    graph: Launchable<D>,
    placed: Placed<D>,
    sorted: Sorted<D>,
    outputs: Vec<Tensor<D>>,
    footprint: Footprint,
    values: Vec<Value>,
    /// What [`deaths`](Inner::deaths) says.
    deaths: Deaths<D>,
}

/// What died before and during a recording.
type Deaths<D> = (Box<[DeadBits]>, Box<[Consumed<D>]>);

/// What a recording that comes to nothing has in its hands.
struct Loose<D: Device> {
    given: Vec<Given<D>>,
    lent: Lent<D>,
    born: Vec<Arc<Storage<D>>>,
    outputs: Vec<Tensor<D>>,
    values: Vec<Value>,
}

impl<D: Device> Inner<D> {
    /// Records the call's function below the tip and launches it. An error leaves stream, routing, pool, path and given inputs as they were.
    pub(super) fn record<'s>(
        &'s self,
        state: MutexGuard<'s, State<D>>,
        mut call: Call<'_, '_, D>,
        reason: Reason,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        let span = debug_span!("record", function = %call.name);
        let entered = span.enter();
        // Before the wait: what is dropped from here on is free only after this run, so that its user's work is waited for by the next.
        let held = state.hold(call.args);
        // The closure may see the last handle go: the graph reads them when it is launched. And they are not dropped under the lock.
        let bound = state.functions[call.function].hold_bound();
        let mut state = state;
        state.functions[call.function].bound_inputs()?;
        self.order(&mut state, call.stream)?;
        self.note_uses(&call, &bound);
        // Before the new graph is made, so that there are never more than the budget says.
        let mut evicted = self.make_room(&mut state, 1);
        if let Err(error) = self.catch_up(&mut state, call.stream) {
            drop(state);
            return Err(error);
        }
        // Whatever comes of it: what is held dies on this stream from here on.
        state.use_stream(call.stream);
        let before: Vec<SmallVec<[u64; 2]>> =
            state.path.iter().map(|e| words(state.live_of(e))).collect();
        let (mut state, recorded) = self.capture(state, &mut call, &before, reason, out);
        match recorded {
            Ok(()) => {
                self.note_state(call.stream);
                self.give_up(&mut call);
                evicted.extend(self.make_room(&mut state, 0));
                drop(state);
                drop(evicted);
                Ok(())
            }
            Err(undone) => {
                drop(entered);
                self.not_recorded(state, call, reason, *undone, held, out)
            }
        }
    }

    /// What becomes of a call whose recording was undone.
    #[cold]
    fn not_recorded<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        call: Call<'_, '_, D>,
        recorded: Reason,
        undone: Undone,
        held: Vec<Tensor<D>>,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        let function = &mut state.functions[call.function];
        let reason = match undone {
            Undone::Call(error) => return Err(error),
            Undone::Discarded => Reason::Discarded,
            Undone::Never(never) => {
                function.variants[call.variant].never = Some(never);
                never.into()
            }
            Undone::Panic(panic, broken) => {
                if let Some(broken) = broken {
                    state.last_failure = Some(broken.into());
                }
                drop(state);
                std::panic::resume_unwind(panic);
            }
            Undone::Capture(failure) => {
                warn!(function = %call.name, %failure, "the capture failed; the call is answered eagerly");
                function.variants[call.variant].capture_failed();
                state.counts.failed_captures += 1;
                state.last_failure = Some(failure);
                Reason::CaptureFailed
            }
        };
        drop(held);
        self.fall_back(state, call, recorded, reason, out)
    }

    /// Answers a call eagerly that was to be recorded on account of `recorded`, unless the reason why it is not is refused.
    #[cold]
    fn fall_back<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        call: Call<'_, '_, D>,
        recorded: Reason,
        reason: Reason,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        // One reason for each run.
        state.functions[call.function].reasons[recorded.kind() as usize] -= 1;
        if state.refused & reason.kind().bit() != 0 {
            let function = call.name.clone();
            return Err(Error::Refused { function, reason });
        }
        self.answered(&mut state, call.function, reason);
        self.eager(state, call, reason, out)
    }

    /// Captures, instantiates, launches, and makes the node; undoes everything on any error.
    fn capture<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        call: &mut Call<'_, '_, D>,
        before: &[SmallVec<[u64; 2]>],
        reason: Reason,
        out: &mut Outputs<D>,
    ) -> (MutexGuard<'s, State<D>>, Result<(), Box<Undone>>) {
        let device = self.allocator.device();
        let room = std::mem::take(&mut state.born);
        let (serial, route) = self
            .allocator
            .enter_recording(&self.stream, &self.pool, room);
        if let Err(error) = device.begin_capture(&self.stream, CaptureMode::ThreadLocal) {
            return (state, Err(self.not_begun(serial, error)));
        }
        let mut placed = Placed::new(call.args.len());
        let entered = self.place(&state, call, &route, &mut placed);
        let entered = entered.map_err(Undone::call).and_then(|inputs| {
            self.copy_in(&placed)?;
            Ok(inputs)
        });
        let inputs = match entered {
            Ok(inputs) => inputs,
            Err(undone) => {
                self.abandon(&mut state, serial);
                return (state, Err(undone));
            }
        };
        let lent = self.lend_fed(call);
        let body = state.functions[call.function].body.clone();
        let (inputs, given) = self.hand_in(call, inputs, &placed.given);
        let (mut state, (outcome, mut born)) = self.unlocked(state, || {
            let body = (call.name, &body);
            self.call_body(body, inputs, Phase::Record, &self.stream, route)
        });
        let (outputs, said) = match outcome {
            Outcome::Returned(outputs, said) => (outputs, said),
            outcome => {
                let undone = self.not_returned(&mut state, outcome, serial);
                let loose = Loose {
                    given,
                    lent,
                    born,
                    outputs: Vec::new(),
                    values: Vec::new(),
                };
                let undone = self.undo(&mut state, call, loose, undone);
                return (state, Err(undone));
            }
        };
        let mut sorted = Sorted::new(outputs.len());
        let finished = if said.discard {
            Err(self.discarded(&mut state, serial))
        } else {
            self.finish(
                &mut state,
                call,
                &mut placed,
                &mut sorted,
                (&born, &outputs),
                serial,
            )
        };
        let graph = match finished {
            Ok(graph) => graph,
            Err(undone) => {
                let loose = Loose {
                    given,
                    lent,
                    born,
                    outputs,
                    values: said.values,
                };
                let undone = self.undo(&mut state, call, loose, undone);
                return (state, Err(undone));
            }
        };
        state.charge(call.function, reason);
        call.end_fed();
        state.drop_carried();
        let (_kept, deaths) = if state.path.is_empty() {
            Default::default()
        } else {
            self.deaths(&state, call, before, &given, &placed)
        };
        let recorded = Recorded {
            graph,
            placed,
            sorted,
            outputs,
            footprint: footprint(&born),
            values: said.values,
            deaths,
        };
        self.commit(&mut state, call, recorded, reason, out);
        born.clear();
        state.born = born;
        (state, Ok(()))
    }

    /// The driver did not begin the capture.
    #[cold]
    fn not_begun(&self, serial: u64, error: DeviceError) -> Box<Undone> {
        self.allocator
            .leave_capture(serial, Some((&self.pool, &[])));
        Box::new(Undone::Capture(error.into()))
    }

    /// The closure did not return; its capture is ended.
    #[cold]
    fn not_returned(&self, state: &mut State<D>, outcome: Outcome<D>, serial: u64) -> Box<Undone> {
        let broken = self.abandon(state, serial);
        Box::new(match outcome {
            Outcome::Returned(..) => Undone::Discarded,
            Outcome::Panicked(panic) => Undone::Panic(panic, broken),
            Outcome::Failed(failed) => {
                let (error, blame) = *failed;
                let Blame { text, refused, .. } = blame;
                let failed = refused.is_some() || broken.is_some();
                let first = || {
                    let first = broken.and_then(|broken| broken.first);
                    first.or_else(|| first_of(&refused?))
                };
                if blame.not_capturable {
                    self.bury(state, error);
                    Undone::Never(Never::NotCapturable)
                } else if failed {
                    self.bury(state, error);
                    let first = first();
                    Undone::Capture(Failure { text, first })
                } else {
                    Undone::Call(error)
                }
            }
        })
    }

    /// The closure wants nothing kept; its capture is ended.
    #[cold]
    fn discarded(&self, state: &mut State<D>, serial: u64) -> Box<Undone> {
        Box::new(match self.abandon(state, serial) {
            Some(broken) => Undone::Capture(broken.into()),
            None => Undone::Discarded,
        })
    }

    /// Brings back what a recording that came to nothing was given, and lets go of what it made. What to say of it.
    #[cold]
    fn undo(
        &self,
        state: &mut State<D>,
        call: &mut Call<'_, '_, D>,
        loose: Loose<D>,
        undone: Box<Undone>,
    ) -> Box<Undone> {
        // A given input that is among the outputs dies only here, outside of the capture. It is brought back, so the device is told nothing.
        loose.given.iter().for_each(|g| g.storage.hush());
        self.let_go(state, loose.outputs, loose.values);
        self.drop_survivors(call, &loose.born);
        match self.roll_back(call, loose.given, &loose.lent) {
            Ok(()) => undone,
            Err(error) => {
                self.bury(state, undone);
                Box::new(Undone::Call(error))
            }
        }
    }

    /// From the closure's return to the first launch.
    fn finish(
        &self,
        state: &mut State<D>,
        call: &Call<'_, '_, D>,
        placed: &mut Placed<D>,
        sorted: &mut Sorted<D>,
        made: (&[Arc<Storage<D>>], &[Tensor<D>]),
        serial: u64,
    ) -> Result<Launchable<D>, Box<Undone>> {
        let device = self.allocator.device();
        let function = &state.functions[call.function];
        let min_nodes = function.min_nodes;
        let specs = &mut placed.specs;
        if let Err(error) = self.sort_outputs(function, call, Phase::Record, specs, made, sorted) {
            // In a broken capture that came first; answered eagerly, the call meets the error again if it stands for itself.
            return Err(self.not_sorted(state, serial, error));
        }
        let ended = device.end_capture(&self.stream);
        let own = (&self.pool, made.0);
        let baked = self.allocator.leave_capture(serial, Some(own));
        let launch = || {
            let template = ended?;
            let info = device.graph_info(&template)?;
            if info.memory > 0 || info.nodes() < min_nodes {
                return Err(Undone::of(info));
            }
            let exec = relaxed(device, || device.instantiate(&template))?;
            let first = || device.launch_graph(&exec, call.stream, &placed.sources);
            baked
                .launch(device, call.stream, first)
                .map_err(Undone::call)?;
            let template = state.keeps_templates.then(|| Arc::new(template));
            Ok((exec, info, template))
        };
        match launch() {
            Ok((exec, info, template)) => Ok(Launchable {
                exec,
                info,
                template,
                baked,
            }),
            Err(undone) => {
                self.let_go_baked(state, baked);
                Err(undone)
            }
        }
    }

    /// The outputs cannot be handed out; the capture is ended.
    #[cold]
    fn not_sorted(&self, state: &mut State<D>, serial: u64, error: Error) -> Box<Undone> {
        Box::new(match self.abandon(state, serial) {
            Some(broken) => Undone::Capture(broken.into()),
            None => Undone::Call(error),
        })
    }

    /// Ends a capture that comes to nothing. Whatever ending it says, the stream does not capture any more; if it says that the capture
    /// was broken, that is given.
    #[cold]
    fn abandon(&self, state: &mut State<D>, serial: u64) -> Option<DeviceError> {
        let ended = self.allocator.device().end_capture(&self.stream);
        let own = (&self.pool, &[][..]);
        let baked = self.allocator.leave_capture(serial, Some(own));
        self.let_go_baked(state, baked);
        let error = ended.err()?;
        tracing::debug!(%error, "an abandoned capture ended with an error");
        let broken = error.code == Code::StreamCaptureInvalidated || error.first.is_some();
        broken.then_some(error)
    }

    /// Lets go of what a graph that never came to be would have kept.
    #[cold]
    fn let_go_baked(&self, state: &mut State<D>, baked: Baked<D>) {
        self.pool.unpin(&baked.pins);
        // Of the last one the backing may be the caller's.
        if baked.has_pools() {
            self.bury(state, baked);
        }
    }

    /// Brings back what was given and died inside: its block, and a handle in the caller's hands for each. What was allocated inside is free again, so
    /// wherever such a block lay is free too.
    #[cold]
    fn roll_back(
        &self,
        call: &mut Call<'_, '_, D>,
        given: Vec<Given<D>>,
        lent: &Lent<D>,
    ) -> Result<()> {
        let mut died: Vec<Arc<Storage<D>>> = Vec::new();
        let mut claim: Vec<Claim> = Vec::new();
        for g in &given {
            if let Some(block) = g.block
                && g.storage.owners() == 0
                && !died.iter().any(|s| Arc::ptr_eq(s, &g.storage))
            {
                claim.push(Claim {
                    range: block.address()..block.address() + block.bytes(),
                    tag: Tag(g.storage.id().0),
                    owned: None,
                });
                died.push(g.storage.clone());
            }
        }
        // What was fed has its block again, if it is held still.
        let lent: Vec<_> = lent.iter().filter(|(s, _)| s.owners() > 0).collect();
        for (storage, block) in &lent {
            claim.push(Claim {
                range: block.address()..block.address() + block.bytes(),
                tag: Tag(storage.id().0),
                owned: None,
            });
        }
        if !claim.is_empty() {
            let claimed = self.pool.claim_blocks(call.stream, &claim)?;
            let mut blocks = claimed.into_iter();
            for (storage, block) in died.iter().zip(&mut blocks) {
                // The handle is made below: until then the storage is held by this owner.
                if storage.resurrect().is_some() {
                    storage.adopt(block, call.stream.clone());
                }
            }
            for ((storage, _), block) in lent.iter().zip(blocks) {
                storage.adopt(block, call.stream.clone());
            }
        }
        for g in given {
            g.storage.hand_over(call.stream);
            let first = died.iter().position(|s| Arc::ptr_eq(s, &g.storage));
            let counted = match first {
                Some(index) => {
                    died.swap_remove(index);
                    true
                }
                None => g.storage.retain_if_held(g.stamp),
            };
            if counted {
                call.args[g.input] = Arg::Give(Tensor::counted(
                    g.storage, g.stamp, g.offset, g.bytes, g.made_at,
                ));
            }
        }
        Ok(())
    }

    /// Which outputs of the path were dead before a recording, and which died in it. What was given to it and kept inside is held from here on.
    #[inline(never)] // nothing of it where there is no path
    fn deaths(
        &self,
        state: &State<D>,
        call: &Call<'_, '_, D>,
        before: &[SmallVec<[u64; 2]>],
        given: &[Given<D>],
        placed: &Placed<D>,
    ) -> (Vec<Tensor<D>>, Deaths<D>) {
        // Given and kept inside: the caller's again, and not to die between the looks that follow.
        let kept: Vec<_> = given
            .iter()
            .filter_map(|given| {
                given.storage.hand_over(call.stream);
                Tensor::hold(&given.storage)
            })
            .collect();
        let mut must_be_dead = Vec::new();
        let mut consumed = Vec::new();
        for (entry, before) in state.path.iter().zip(before) {
            let live = state.live_of(entry);
            let all = state.all_bits(entry);
            for (word, (before, all)) in before.iter().zip(all).enumerate() {
                let dead = all & !before;
                if dead != 0 {
                    must_be_dead.push(DeadBits {
                        live: live.clone(),
                        word,
                        bits: dead,
                    });
                }
                let mut died = before & !live.word(word);
                while died != 0 {
                    let storage = state.slot(entry, word * 64 + died.trailing_zeros() as usize);
                    died &= died - 1;
                    let mut inputs = given_in(given, storage);
                    let demoted = |spec: &InputSpec<D>| {
                        matches!(spec, InputSpec::Copied { demoted: true, .. })
                    };
                    inputs.extend(
                        (0..)
                            .zip(&placed.specs)
                            .filter(|(_, s)| demoted(s))
                            .map(|(i, _)| i),
                    );
                    consumed.push(Consumed {
                        inputs,
                        storage: storage.clone(),
                    });
                }
            }
        }
        (kept, (must_be_dead.into(), consumed.into()))
    }

    /// Makes the node. Nothing here can fail.
    fn commit(
        &self,
        state: &mut State<D>,
        call: &Call<'_, '_, D>,
        recorded: Recorded<D>,
        reason: Reason,
        out: &mut Outputs<D>,
    ) {
        let Recorded {
            graph,
            placed,
            sorted,
            outputs,
            footprint,
            values,
            deaths: (must_be_dead, consumed),
        } = recorded;
        let variant = (call.function, call.variant);
        let parent = state.tip();
        let id = NodeId(state.counts.recordings);
        state.counts.recordings += 1;
        // With the books exact, what is held owns its block.
        let mut saved = SmallVec::with_capacity(sorted.slots.len());
        let mut save = |storage: &Arc<Storage<D>>, block: Option<Allocation>| {
            saved.extend(block.map(|block| (storage.clone(), block)));
        };
        for entry in &state.path {
            state.held(entry).for_each(|s| save(s, s.block()));
        }
        let live = self.settle(call.name, &sorted, call.stream, save);
        let copied = (0u32..)
            .zip(&placed.specs)
            .filter(|(_, spec)| matches!(spec, InputSpec::Copied { .. }))
            .map(|(index, _)| index)
            .collect();
        for (spec, arg) in placed.specs.iter().zip(&*call.args) {
            if let InputSpec::Static { storage, .. } = spec
                && storage.is_some()
                && let Some(storage) = arg.tensor().and_then(Tensor::storage)
            {
                storage.watch(&self.untidy);
            }
        }
        let node = state.nodes.insert(Node {
            id,
            variant,
            parent,
            apart: !state.path_is_rooted(),
            children: SmallVec::new(),
            copied,
            returns_bound: sorted
                .specs
                .iter()
                .any(|o| matches!(o, OutputSpec::Bound(_))),
            inputs: placed.specs,
            must_be_dead,
            footprint,
            used: state.counts.uses(),
            consumed,
            values: values.clone().into(),
            outputs: sorted.specs,
            slots: sorted.slots,
            live,
            graph,
            checkpoint: self.pool.checkpoint_blocks(),
            saved,
            copies: placed
                .gather
                .iter()
                .map(|slot| slot.dst.0..slot.dst.0 + slot.bytes)
                .collect(),
            noted: self.device.stream_id(call.stream),
            is_plain: false,
        });
        state.nodes[node].is_plain = state.nodes[node].may_be_fast();
        match parent {
            Some(parent) => state.nodes[parent].children.push((variant, node)),
            None => {
                state.functions[call.function].variants[call.variant]
                    .roots
                    .push(node);
                state.roots.push(node);
            }
        }
        state.path.push(Entry {
            generation: call.generation,
            run: Run::Node {
                node,
                replayed: false,
            },
        });
        state.graph_bytes += state.nodes[node].graph.info.exec_bytes();
        let f = &mut state.functions[call.function];
        f.recordings += 1;
        f.variants[call.variant].warm = true;
        f.variants[call.variant].captured();
        out.hand_out(Phase::Record, Some(id), Some(reason), outputs, call.at);
        out.set_values(values);
    }
}

/// The refusal that an error goes back to, unless all that is known is that the capture was broken.
#[cold]
fn first_of(error: &DeviceError) -> Option<Box<DeviceError>> {
    let root = error.root();
    (root.code != Code::StreamCaptureInvalidated).then(|| Box::new(root.clone()))
}

fn words(live: &crate::storage::LiveMask) -> SmallVec<[u64; 2]> {
    (0..live.words()).map(|index| live.word(index)).collect()
}

impl<D: Device> State<D> {
    /// The bits of all output storages of an entry.
    fn all_bits(&self, entry: &Entry<D>) -> SmallVec<[u64; 2]> {
        let slots = match &entry.run {
            Run::Node { node, .. } => self.nodes[*node].slots.len(),
            Run::Warm(warm) => warm.slots.len(),
        };
        (0..slots.div_ceil(64))
            .map(|word| {
                if slots - word * 64 >= 64 {
                    u64::MAX
                } else {
                    (1 << (slots - word * 64)) - 1
                }
            })
            .collect()
    }
}

impl Blame {
    #[cold]
    pub(super) fn of(error: &Error) -> Self {
        let all = || {
            std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |e| {
                e.source()
            })
        };
        let refused = |e: &(dyn std::error::Error + 'static)| {
            let refused = match e.downcast_ref() {
                Some(Error::Device(refused)) => Some(refused),
                _ => e.downcast_ref(),
            };
            refused
                .filter(|refused: &&DeviceError| refused.is_capture())
                .cloned()
        };
        Blame {
            text: error.to_string(),
            refused: all().find_map(refused),
            not_capturable: all()
                .any(|e| matches!(e.downcast_ref(), Some(Error::NotCapturable { .. }))),
        }
    }
}
