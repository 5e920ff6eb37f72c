//! Replay: launch the recorded graph, hand out its outputs. The path that is to cost nothing.
//!
//! No allocator, no driver call but the launch (and an event where the caller's stream changed), no heap allocation.

use std::sync::MutexGuard;

use tracing::trace;

use super::args::Arg;
use super::call::Call;
use super::node::{InputSpec, OutputSpec};
use super::outputs::Outputs;
use super::path::{Entry, Run};
use super::{Inner, NodeKey, State};
use crate::device::Device;
use crate::error::{Error, Phase, Result};
use crate::storage::Tensor;

impl<D: Device> Inner<D> {
    /// Replays a node that was admitted. An error of the launch leaves everything as it was.
    pub(super) fn replay(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        key: NodeKey,
        mut call: Call<'_, '_, D>,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        self.order(&mut state, call.stream)?;
        let state = &mut *state;
        let node = &mut state.nodes[key];
        node.sources.clear();
        for (spec, arg) in node.inputs.iter().zip(&*call.args) {
            if let (InputSpec::Copied { .. }, Some(tensor)) = (spec, arg.tensor()) {
                node.sources.push(tensor.address());
            }
        }
        // A bound constant may have died between the look and here; then nothing was launched yet.
        for output in &node.outputs {
            if let OutputSpec::Bound(weak) = output
                && weak.upgrade().is_none()
            {
                return Err(Error::StaticDied {
                    function: call.name.clone(),
                    input: 0,
                });
            }
        }
        self.allocator
            .device()
            .launch_graph(&node.exec, call.stream, &node.sources)?;
        trace!(node = node.id.0, "replay");

        for consumed in &node.consumed {
            consumed.storage.hush();
        }
        out.begin(Phase::Replay, Some(node.id));
        for (storage, outputs) in &node.slots {
            storage.hand_out(*outputs);
        }
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
        state.path.push(Entry {
            generation: call.generation,
            run: Run::Node {
                node: key,
                replayed: true,
            },
        });
        state.books_exact = false;
        state.counts.replays += 1;
        call.give_up();
        Ok(())
    }
}
