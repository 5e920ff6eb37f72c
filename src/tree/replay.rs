//! Replay: launch the recorded graph, hand out its outputs. The path that is to cost nothing.
//!
//! No allocator, no driver call but the launch (and an event where the caller's stream changed), no heap allocation.

use std::sync::MutexGuard;

use tracing::trace;

use super::args::Arg;
use super::call::Call;
use super::node::OutputSpec;
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
        gives: bool,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        self.order(&mut state, call.stream)?;
        let state = &mut *state;
        let node = &mut state.nodes[key];
        node.sources.clear();
        for index in &node.copied {
            node.sources
                .extend(call.args[*index as usize].tensor().map(Tensor::address));
        }
        // What a function bound may have died between the look and here; then nothing was launched yet.
        let died = |output: &&OutputSpec<D>| matches!(output, OutputSpec::Bound(weak) if weak.upgrade().is_none());
        if node.returns_bound && node.outputs.iter().any(|o| died(&o)) {
            return Err(Error::StaticDied {
                function: call.name.clone(),
                input: 0,
            });
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
        node.live.set_all(node.slots.len());
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
        if gives {
            self.give_up(&mut call);
        }
        Ok(())
    }
}
