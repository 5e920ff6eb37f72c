//! Recording: a function is captured in the memory state that the path left, and becomes a node.
//!
//! Until the graph has been launched, the way back is open: `undo` goes it.

use std::sync::Arc;

use smallvec::SmallVec;
use tracing::debug_span;

use super::args::Value;
use super::call::{Call, Given, Outcome, Placed, Sorted, given_in};
use super::node::{
    Consumed, DeadBits, Footprint, InputSpec, Launchable, Node, NodeId, OutputSpec, footprint,
};
use super::outputs::Outputs;
use super::path::{Entry, Run};
use super::reason::Reason;
use super::undo::{Loose, Undone};
use super::{Inner, State};
use crate::device::{CaptureMode, Device, relaxed};
use crate::error::{Phase, Result};
use crate::pool::Allocation;
use crate::storage::{Storage, Tensor};
use crate::sync::MutexGuard;

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
                let (state, instead) = self.not_recorded(state, &call, *undone)?;
                drop((entered, held));
                self.fall_back(state, call, reason, instead, out)
            }
        }
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
        let (mut outputs, mut values) = (Vec::new(), Vec::new());
        let mut sorted = Sorted::default();
        let finished = match outcome {
            Outcome::Returned(returned, said) => {
                (outputs, values) = (returned, said.values);
                if said.discard {
                    Err(self.abandoned(&mut state, serial, Undone::Discarded))
                } else {
                    let made = (&*born, &*outputs);
                    self.finish(&mut state, call, &mut placed, &mut sorted, made, serial)
                }
            }
            Outcome::Failed(failed) => Err(self.failed(&mut state, serial, *failed)),
            Outcome::Panicked(panic) => Err(self.panicked(&mut state, serial, panic)),
        };
        let graph = match finished {
            Ok(graph) => graph,
            Err(undone) => {
                let loose = Loose {
                    given,
                    lent,
                    born,
                    outputs,
                    values,
                };
                let undone = self.undo(&mut state, call, loose, undone);
                return (state, Err(undone));
            }
        };
        state.charge(call.function, reason);
        call.end_fed();
        state.drop_carried();
        // What is given is of the path.
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
            values,
            deaths,
        };
        self.commit(&mut state, call, recorded, reason, out);
        born.clear();
        state.born = born;
        (state, Ok(()))
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
            return Err(self.abandoned(state, serial, Undone::Call(error)));
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
            listed: 0,
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
            Some(key) => {
                let parent = &mut state.nodes[key];
                if parent.children.is_empty() {
                    state.leaves.remove(key, parent);
                }
                parent.children.push((variant, node));
            }
            None => {
                state.functions[call.function].variants[call.variant]
                    .roots
                    .push(node);
                state.roots.push_back(node);
            }
        }
        state.leaves.add(node, &mut state.nodes[node]);
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
