//! Replay: launch the recorded graph, hand out its outputs. The path that is to cost nothing.
//!
//! No allocator, no driver call but the launch (and an event where the caller's stream changed), no heap allocation.

use smallvec::SmallVec;
use tracing::trace;

use super::args::Arg;
use super::call::Call;
use super::node::{Consumed, InputSpec, Launchable, OutputSpec};
use super::outputs::Outputs;
use super::path::{Entry, Run};
use super::{Inner, NodeKey, State};
use crate::device::Device;
use crate::error::{Error, Phase, Result};
use crate::storage::Tensor;
use crate::sync::MutexGuard;

/// The words of the storages that a replay consumes, in order: taken from this call, and from nobody else.
pub(super) type Taken = SmallVec<[u64; 4]>;

impl<D: Device> State<D> {
    /// Takes what a node consumes. `None` if somebody has come to hold some of it since the node was admitted.
    pub(super) fn take_consumed(&self, key: NodeKey, args: &[Arg<'_, D>]) -> Option<Taken> {
        let consumed = &self.nodes[key].consumed;
        let mut taken = Taken::new();
        for c in consumed {
            let given = c.given(args);
            // Dead already: nobody can come to hold it.
            match if given == 0 {
                Some(0)
            } else {
                c.storage.take(given)
            } {
                Some(word) => taken.push(word),
                None => {
                    put_back(consumed, &taken, args);
                    return None;
                }
            }
        }
        Some(taken)
    }
}

fn put_back<D: Device>(consumed: &[Consumed<D>], taken: &[u64], args: &[Arg<'_, D>]) {
    for (c, word) in consumed.iter().zip(taken) {
        if c.given(args) > 0 {
            c.storage.put_back(*word);
        }
    }
}

impl<D: Device> Inner<D> {
    /// Replays a node that returns bound inputs. They are held meanwhile, and let go of without the lock: one that nobody else holds any more dies there. One may have
    /// died since they were looked at; then nothing is launched.
    pub(super) fn replay_returning_bound(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        key: NodeKey,
        call: Call<'_, '_, D>,
        taken: &Taken,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        let mut held: SmallVec<[Tensor<D>; 2]> = SmallVec::new();
        let node = &state.nodes[key];
        for output in &node.outputs {
            let OutputSpec::Bound(weak) = output else {
                continue;
            };
            let Some(tensor) = weak.upgrade() else {
                put_back(&node.consumed, taken, call.args);
                if !held.is_empty() {
                    self.bury(&mut state, held);
                }
                return Err(Error::StaticDied {
                    function: call.name.clone(),
                    input: 0,
                });
            };
            held.push(tensor);
        }
        // It takes the lock with it: what is held is dropped afterwards.
        self.replay(state, key, call, taken, out)
    }

    /// Replays a node that was admitted, with what it consumes taken. An error of the launch leaves everything as it was.
    pub(super) fn replay(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        key: NodeKey,
        mut call: Call<'_, '_, D>,
        taken: &Taken,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        let launched = self
            .find_sources(&mut state, key, &call)
            .and_then(|()| self.order(&mut state, call.stream))
            .and_then(|()| self.launch(&state, key, call.stream));
        let state = &mut *state;
        let node = &mut state.nodes[key];
        if let Err(error) = launched {
            put_back(&node.consumed, taken, call.args);
            return Err(error);
        }
        trace!(node = node.id.0, "replay");
        state.use_stream(call.stream);
        let used = state.counts.uses() + 1;
        let node = &mut state.nodes[key];

        for (consumed, word) in node.consumed.iter().zip(taken) {
            if consumed.given(call.args) > 0 {
                consumed.storage.hush();
                consumed.storage.end(*word);
            }
        }
        // Before its outputs are handed out anew: what was fed may be one of them. What is used in place goes on to the next run.
        for fed in call.fed {
            if node.only_copies(fed, call.args) {
                call.end_one(fed);
            }
        }
        out.begin(Phase::Replay, Some(node.id), None);
        for (storage, outputs) in &node.slots {
            storage.hand_out(*outputs);
        }
        node.live.set_all(node.slots.len());
        node.used = used;
        for output in &node.outputs {
            let tensor = match output {
                OutputSpec::Fresh {
                    slot,
                    offset,
                    bytes,
                } => {
                    let storage = &node.slots[*slot].0;
                    Tensor::counted(storage.clone(), storage.stamp(), *offset, *bytes, call.at)
                }
                OutputSpec::Input {
                    input,
                    offset,
                    bytes,
                } => match call.args.get(*input).and_then(Arg::tensor) {
                    Some(tensor) => tensor.range(*offset, *bytes, call.at),
                    None => Tensor::empty(),
                },
                OutputSpec::Bound(weak) => weak
                    .upgrade()
                    .unwrap_or_else(Tensor::empty)
                    .remade_at(call.at),
                OutputSpec::Constant(tensor) => tensor.clone().remade_at(call.at),
                OutputSpec::Empty => Tensor::empty().remade_at(call.at),
            };
            out.push(tensor);
        }
        if !node.values.is_empty() {
            out.extend_values(&node.values);
        }
        // Its last run may still be listed, if that died only now: this one takes its place.
        state
            .carried
            .retain(|e| !matches!(e.run, Run::Node { node, .. } if node == key));
        state.path.push(Entry {
            generation: call.generation,
            run: Run::Node {
                node: key,
                replayed: true,
            },
        });
        state.books_exact = false;
        state.counts.replays += 1;
        state.functions[call.function].replays += 1;
        if call.gives {
            self.give_up(&mut call);
        }
        Ok(())
    }

    /// The addresses of the moving inputs. (What is used in place lies where it lay, and so on this device.)
    #[inline]
    fn find_sources(
        &self,
        state: &mut State<D>,
        key: NodeKey,
        call: &Call<'_, '_, D>,
    ) -> Result<()> {
        let stream_id = self.device.stream_id(call.stream);
        let node = &mut state.nodes[key];
        if node.noted != stream_id || node.inputs.iter().any(InputSpec::may_be_foreign) {
            node.noted = stream_id;
            let bound = state.functions[call.function].hold_bound();
            self.note_uses(call, &bound);
            self.note_state(call.stream);
            if !bound.tensors().is_empty() {
                // One of them may be nobody else's by now.
                self.bury(state, bound);
            }
        }
        let State { nodes, sources, .. } = state;
        sources.clear();
        for index in &nodes[key].copied {
            let index = *index as usize;
            if let Some(tensor) = call.args[index].tensor() {
                self.refuse_input(call.name, index, tensor)?;
                if let Some(storage) = tensor.storage()
                    && storage.is_elsewhere(stream_id, &self.pool)
                {
                    storage.used_by(call.stream, Some(&self.pool));
                }
                sources.push(tensor.address());
            }
        }
        Ok(())
    }

    /// Hands them over with the launch.
    #[inline]
    fn launch(&self, state: &State<D>, key: NodeKey, stream: &D::Stream) -> Result<()> {
        let Launchable { exec, baked, .. } = &state.nodes[key].graph;
        let launch = || self.device.launch_graph(exec, stream, &state.sources);
        Ok(baked.launch(&self.device, stream, launch)?)
    }
}
