//! Recording: a function is captured in the memory state that the path left, and becomes a node.
//!
//! Until the graph has been launched, the way back is open. A capture executes nothing, so whatever it did to the books can be undone
//! without a trace: what it allocated is freed, and what was given to it and died inside is claimed back where it lay.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;
use tracing::{debug_span, warn};

use super::args::{Arg, Value};
use super::call::{Blame, Call, Given, Outcome, Placed, Sorted, given_in};
use super::function::Never;
use super::node::{
    Consumed, DeadBits, Footprint, InputSpec, Launchable, Node, NodeId, OutputSpec, footprint,
};
use super::outputs::Outputs;
use super::path::{Entry, Run};
use super::reason::Reason;
use super::{Inner, State};
use crate::allocator::Claim;
use crate::device::{Bare, Broke, CaptureMode, Code, Device, DeviceError, relaxed};
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
    fn from(error: DeviceError) -> Self {
        Failure {
            first: first_of(&error),
            text: error.to_string(),
        }
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

/// What there is between the closure's return and the node: the graph, and what the outputs are.
type Finished<D> = (Launchable<D>, Sorted<D>);

/// A graph that was captured and launched, and what there is to say of it.
struct Recorded<D: Device> {
    graph: Launchable<D>,
    placed: Placed<D>,
    sorted: Sorted<D>,
    given: Vec<Given<D>>,
    outputs: Vec<Tensor<D>>,
    footprint: Footprint,
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
            Err(Undone::Call(error)) => Err(error),
            Err(Undone::Discarded) => {
                drop((entered, held));
                self.fall_back(state, call, reason, Reason::Discarded, out)
            }
            Err(Undone::Never(never)) => {
                state.functions[call.function].variants[call.variant].never = Some(never);
                drop((entered, held));
                self.fall_back(state, call, reason, never.into(), out)
            }
            Err(Undone::Panic(panic, broken)) => {
                if let Some(broken) = broken {
                    state.last_failure = Some(broken.into());
                }
                drop(state);
                std::panic::resume_unwind(panic);
            }
            Err(Undone::Capture(failure)) => {
                warn!(function = %call.name, %failure, "the capture failed; the call is answered eagerly");
                state.counts.failed_captures += 1;
                state.functions[call.function].variants[call.variant].capture_failed();
                state.last_failure = Some(failure);
                drop((entered, held));
                self.fall_back(state, call, reason, Reason::CaptureFailed, out)
            }
        }
    }

    /// Answers a call eagerly that was to be recorded on account of `recorded`, unless the reason why it is not is refused.
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
    ) -> (MutexGuard<'s, State<D>>, Result<(), Undone>) {
        let device = self.allocator.device();
        let room = std::mem::take(&mut state.born);
        let (serial, route) = self
            .allocator
            .enter_recording(&self.stream, &self.pool, room);
        if let Err(error) = device.begin_capture(&self.stream, CaptureMode::ThreadLocal) {
            self.allocator
                .leave_capture(serial, Some((&self.pool, &[])));
            return (state, Err(Undone::Capture(error.into())));
        }
        let (mut placed, inputs) = match self.place(&state, call, &route) {
            Ok(placed) => placed,
            Err(error) => {
                self.abandon(&mut state, serial);
                return (state, Err(Undone::Call(error)));
            }
        };
        if let Err(error) = self.copy_in(&placed) {
            self.abandon(&mut state, serial);
            return (state, Err(Undone::Capture(error.into())));
        }
        let lent = self.lend_fed(call);
        let body = state.functions[call.function].body.clone();
        let (inputs, given) = self.hand_in(call, inputs, &placed.given);
        let (mut state, (outcome, mut storages)) = self.unlocked(state, || {
            let body = (call.name, &body);
            self.call_body(body, inputs, Phase::Record, &self.stream, route)
        });
        let (mut values, mut returned) = (Vec::new(), Vec::new());
        let ended = match outcome {
            Outcome::Returned(outputs, said) => {
                (values, returned) = (said.values, outputs);
                if said.discard {
                    match self.abandon(&mut state, serial) {
                        Some(broken) => Err(Undone::Capture(broken.into())),
                        None => Err(Undone::Discarded),
                    }
                } else {
                    self.finish(&mut state, call, &mut placed, &storages, &returned, serial)
                }
            }
            Outcome::Failed(error, blame) if blame.not_capturable => {
                self.abandon(&mut state, serial);
                self.bury(&mut state, error);
                Err(Undone::Never(Never::NotCapturable))
            }
            Outcome::Failed(error, Blame { text, refused, .. }) => {
                let broken = self.abandon(&mut state, serial);
                let failed = refused.is_some() || broken.is_some();
                let first = broken.and_then(|broken| broken.first);
                let first = first.or_else(|| first_of(&refused?));
                Err(if failed {
                    self.bury(&mut state, error);
                    Undone::Capture(Failure { text, first })
                } else {
                    Undone::Call(error)
                })
            }
            Outcome::Panicked(panic) => Err(Undone::Panic(panic, self.abandon(&mut state, serial))),
        };
        match ended {
            Ok((graph, sorted)) => {
                let recorded = Recorded {
                    graph,
                    placed,
                    sorted,
                    given,
                    outputs: returned,
                    footprint: footprint(&storages),
                    values,
                };
                state.charge(call.function, reason);
                call.end_fed();
                state.drop_carried();
                self.commit(&mut state, call, before, recorded, reason, out);
                storages.clear();
                state.born = storages;
                (state, Ok(()))
            }
            Err(undone) => {
                // A given input that is among the outputs dies only here, outside of the capture. It is brought back, so the device is told nothing.
                given.iter().for_each(|g| g.storage.hush());
                self.let_go(&mut state, returned, values);
                self.drop_survivors(call, &storages);
                let undone = match self.roll_back(call, given, &lent) {
                    Ok(()) => undone,
                    Err(error) => {
                        self.bury(&mut state, undone);
                        Undone::Call(error)
                    }
                };
                (state, Err(undone))
            }
        }
    }

    /// From the closure's return to the first launch.
    fn finish(
        &self,
        state: &mut State<D>,
        call: &Call<'_, '_, D>,
        placed: &mut Placed<D>,
        born: &[Arc<Storage<D>>],
        outputs: &[Tensor<D>],
        serial: u64,
    ) -> Result<Finished<D>, Undone> {
        let device = self.allocator.device();
        let sorted = self.sort_outputs(
            &state.functions[call.function],
            call,
            Phase::Record,
            &mut placed.specs,
            outputs,
            born,
        );
        let sorted = match sorted {
            Ok(sorted) => sorted,
            Err(error) => {
                // In a broken capture that came first; answered eagerly, the call meets the error again if it stands for itself.
                return Err(match self.abandon(state, serial) {
                    Some(broken) => Undone::Capture(broken.into()),
                    None => Undone::Call(error),
                });
            }
        };
        let ended = device.end_capture(&self.stream);
        let own = (&self.pool, born);
        let baked = self.allocator.leave_capture(serial, Some(own));
        let min_nodes = state.functions[call.function].min_nodes;
        let capture = |error: DeviceError| Undone::Capture(error.into());
        let launch = || {
            let template = ended.map_err(capture)?;
            let info = device.graph_info(&template).map_err(capture)?;
            if info.memory > 0 {
                let text = Error::MemoryNodes(info).to_string();
                return Err(Undone::Capture(Failure { text, first: None }));
            }
            if info.nodes() < min_nodes {
                return Err(Undone::Never(Never::TooSmall));
            }
            let exec = relaxed(device, || device.instantiate(&template)).map_err(capture)?;
            let first = || device.launch_graph(&exec, call.stream, &placed.sources);
            baked
                .launch(device, call.stream, first)
                .map_err(|error| Undone::Call(error.into()))?;
            let template = state.keeps_templates.then(|| Arc::new(template));
            Ok((exec, info, template))
        };
        match launch() {
            Ok((exec, info, template)) => {
                let graph = Launchable {
                    exec,
                    info,
                    template,
                    baked,
                };
                Ok((graph, sorted))
            }
            Err(undone) => {
                self.pool.unpin(&baked.pins);
                // Of the last one the backing may be the caller's.
                if baked.has_pools() {
                    self.bury(state, baked);
                }
                Err(undone)
            }
        }
    }

    /// Ends a capture that comes to nothing. Whatever ending it says, the stream does not capture any more; if it says that the capture
    /// was broken, that is given.
    fn abandon(&self, state: &mut State<D>, serial: u64) -> Option<DeviceError> {
        let ended = self.allocator.device().end_capture(&self.stream);
        let baked = self
            .allocator
            .leave_capture(serial, Some((&self.pool, &[])));
        if baked.has_pools() {
            self.bury(state, baked);
        }
        let error = ended.err()?;
        tracing::debug!(%error, "an abandoned capture ended with an error");
        let broken = error.code == Code::StreamCaptureInvalidated || error.first.is_some();
        broken.then_some(error)
    }

    /// Brings back what was given and died inside: its block, and a handle in the caller's hands for each. What was allocated inside is free again, so
    /// wherever such a block lay is free too.
    fn roll_back(
        &self,
        call: &mut Call<'_, '_, D>,
        given: Vec<Given<D>>,
        lent: &[(Arc<Storage<D>>, Allocation)],
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

    /// Makes the node. Nothing here can fail.
    fn commit(
        &self,
        state: &mut State<D>,
        call: &Call<'_, '_, D>,
        before: &[SmallVec<[u64; 2]>],
        recorded: Recorded<D>,
        reason: Reason,
        out: &mut Outputs<D>,
    ) {
        let Recorded {
            graph,
            placed,
            sorted,
            given,
            outputs,
            footprint,
            values,
        } = recorded;
        // Given and kept inside: the caller's again, and not to die between the looks that follow.
        let _kept: Vec<_> = given
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
                    let mut inputs = given_in(&given, storage);
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
            must_be_dead: must_be_dead.into(),
            footprint,
            used: state.counts.uses(),
            consumed: consumed.into(),
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
