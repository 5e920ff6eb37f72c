//! The fast replay path: the commonest run, from the call to the launch and back, in one piece that touches little memory.
//!
//! A run goes this way if nothing of an ended generation is held, nothing is carried along or given up, and the first recording that fits hands out its own
//! storages or the passed inputs. It compares as [`decide`](super::decide) does, and does what [`replay`](super::replay) does; in doubt it
//! declines, and the run goes the whole way. What it has changed until then, that way would have changed too: dead runs are forgotten.
//!
//! After a launch the processor's caches hold the driver's code and data, so what counts here is less the number of instructions than that of cache lines.

use std::panic::Location;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::{debug, trace};

use super::admit::{Mismatch, compare, writes_over_held};
use super::args::Arg;
use super::generation::Step;
use super::node::{InputSpec, Node, NodeId, OutputSpec};
use super::outputs::Outputs;
use super::path::{Entry, Run, is_on_path};
use super::{FunctionKey, Inner, NodeKey, State};
use crate::device::{CaptureStatus, Device, DevicePtr};
use crate::error::{Phase, Result};
use crate::storage::{Storage, Tensor};

/// Why a recording is not replayed this way.
enum Not {
    /// It does not fit.
    Fits(Mismatch),
    /// Only the whole way can tell.
    Known,
}

impl<D: Device> Inner<D> {
    /// Replays, if this is the commonest run. `None` if it is not.
    #[inline(always)] // one caller
    #[allow(clippy::too_many_arguments)] // as that has
    pub(super) fn replay_fast(
        &self,
        state: &mut State<D>,
        key: FunctionKey,
        step: &Step,
        variant_key: &[i64],
        stream: &D::Stream,
        args: &[Arg<'_, D>],
        out: &mut Outputs<D>,
        at: &'static Location<'static>,
    ) -> Option<Result<()>> {
        if !self.is_quiet(state, stream) {
            return None;
        }
        let f = state.functions.get(key)?;
        let (variant, of_key) = f.find(variant_key)?;
        if !of_key.replays() || f.lost_bound() {
            return None;
        }
        self.forget_ended(state)?;
        let node = self.first_that_fits(state, (key, variant), stream, args)?;
        let used = state.counts.uses() + 1;
        let recorded = &mut state.nodes[node];
        let exec = &mut recorded.graph.exec;
        let launched = self.device.launch_graph_mut(exec, stream, &state.sources);
        if let Err(error) = launched {
            return Some(Err(error.into()));
        }
        trace!(node = recorded.id.0, "replay");
        recorded.used = used;
        out.begin(Phase::Replay, Some(recorded.id), None);
        recorded.hand_out(args, out, at);
        state.path.push(Entry {
            generation: step.number(),
            run: Run::Node {
                node,
                replayed: true,
            },
        });
        state.books_exact = false;
        state.counts.replays += 1;
        state.functions[key].replays += 1;
        Some(Ok(()))
    }

    /// Whether nothing but this run is to be thought of.
    #[inline(always)]
    fn is_quiet(&self, state: &State<D>, stream: &D::Stream) -> bool {
        !state.down
            && state.skips == 0
            && state.carried.is_empty()
            && state.streams.as_slice() == slice::from_ref(stream)
            && !self.untidy.load(Ordering::Acquire)
            && self.elsewhere.as_ref().is_none_or(|e| !e.any())
            && self.device.capture_status(stream) == Ok(CaptureStatus::None)
    }

    /// Ends the generations whose tokens were dropped, if nothing of them is held.
    #[inline(always)]
    fn forget_ended(&self, state: &mut State<D>) -> Option<()> {
        let ended = self.generations.ended();
        if ended == state.seen_ended {
            return Some(());
        }
        while let Some(tip) = state.path.last() {
            if state.live_of(tip).any() || self.generations.is_open(tip.generation) {
                let held_on = |e: &Entry<D>| {
                    state.live_of(e).any() && !self.generations.is_open(e.generation)
                };
                if state.path.iter().any(held_on) {
                    return None;
                }
                break;
            }
            state.cut_tip();
        }
        state.seen_ended = ended;
        Some(())
    }

    /// The first recording that fits, of a variant below the tip, or below the next before it of which something is held. The addresses of its copied
    /// inputs are in `sources`.
    #[inline(always)]
    fn first_that_fits(
        &self,
        state: &mut State<D>,
        variant: (FunctionKey, usize),
        stream: &D::Stream,
        args: &[Arg<'_, D>],
    ) -> Option<NodeKey> {
        loop {
            if state.tip_is_exact() {
                return None;
            }
            let tip = state.tip();
            let State {
                functions,
                nodes,
                path,
                sources,
                ..
            } = state;
            let (nodes, path) = (&*nodes, &*path);
            let on_path = |storage: &Storage<D>| is_on_path(nodes, path, storage);
            let mut fits = |node: NodeKey| {
                sources.clear();
                let node = &nodes[node];
                match self.fits_fast(node, stream, args, sources, on_path) {
                    Ok(()) => Some(true),
                    Err(Not::Fits(mismatch)) => {
                        say(node.id, &mismatch);
                        None
                    }
                    Err(Not::Known) => Some(false),
                }
            };
            let found = match tip {
                None => functions[variant.0].variants[variant.1]
                    .roots
                    .iter()
                    .find_map(|node| Some((*node, fits(*node)?))),
                Some(tip) => nodes[tip]
                    .children
                    .iter()
                    .filter(|(v, _)| *v == variant)
                    .find_map(|(_, node)| Some((*node, fits(*node)?))),
            };
            match found {
                Some((node, true)) => return Some(node),
                Some((_, false)) => return None,
                None if state.tip_is_dead() => state.cut_tip(),
                None => return None,
            }
        }
    }

    /// Compares a call with a recording, and finds the addresses of its copied inputs.
    #[inline(always)]
    fn fits_fast(
        &self,
        node: &Node<D>,
        stream: &D::Stream,
        args: &[Arg<'_, D>],
        sources: &mut Vec<DevicePtr>,
        on_path: impl Fn(&Storage<D>) -> bool,
    ) -> Result<(), Not> {
        // Where the list lies is asked once, here and below.
        let inputs = node.inputs.as_slice();
        if inputs.len() != args.len() {
            return Err(Not::Fits(Mismatch::Count));
        }
        if !node.is_plain {
            return Err(Not::Known);
        }
        let stream_id = self.device.stream_id(stream);
        if node.noted != stream_id {
            return Err(Not::Known);
        }
        for (index, (spec, arg)) in inputs.iter().zip(args).enumerate() {
            if let Some(tensor) = arg.tensor()
                && (arg.is_given() || !tensor.is_settled())
            {
                return Err(Not::Known);
            }
            compare(index, spec, arg, &on_path).map_err(Not::Fits)?;
            if let (InputSpec::Copied { .. }, Arg::Lend(tensor)) = (spec, arg) {
                let elsewhere = |s: &Arc<Storage<D>>| s.is_elsewhere(stream_id, &self.pool);
                if tensor.storage().is_some_and(elsewhere) || !self.allocator.reaches(tensor) {
                    return Err(Not::Known);
                }
                sources.push(tensor.address());
            }
        }
        if writes_over_held(node) {
            return Err(Not::Fits(Mismatch::Held));
        }
        Ok(())
    }
}

#[cold]
fn say(node: NodeId, mismatch: &Mismatch) {
    debug!(node = node.0, %mismatch, "not replayed");
}

impl<D: Device> Node<D> {
    /// Whether it may be replayed the fast way.
    pub(super) fn may_be_fast(&self) -> bool {
        let plain =
            |o: &OutputSpec<D>| matches!(o, OutputSpec::Fresh { .. } | OutputSpec::Input { .. });
        !self.apart
            && self.consumed.is_empty()
            && self.values.is_empty()
            && !self.inputs.iter().any(InputSpec::may_be_foreign)
            && !self.graph.baked.follows_launches()
            && self.outputs.iter().all(plain)
    }

    /// Hands out the outputs of a plain node whose graph was launched.
    #[inline(always)]
    fn hand_out(&self, args: &[Arg<'_, D>], out: &mut Outputs<D>, at: &'static Location<'static>) {
        let slots = self.slots.as_slice();
        for (storage, outputs) in slots {
            storage.hand_out(*outputs);
        }
        self.live.set_all(slots.len());
        for output in &self.outputs {
            out.push(match output {
                OutputSpec::Fresh {
                    slot,
                    offset,
                    bytes,
                } => {
                    let storage = &slots[*slot].0;
                    Tensor::counted(storage.clone(), storage.stamp(), *offset, *bytes, at)
                }
                OutputSpec::Input {
                    input,
                    offset,
                    bytes,
                } => match args.get(*input).and_then(Arg::tensor) {
                    Some(tensor) => tensor.range(*offset, *bytes, at),
                    None => Tensor::empty(),
                },
                // Not of a plain node.
                OutputSpec::Bound(_) | OutputSpec::Constant(_) | OutputSpec::Empty => {
                    Tensor::empty()
                }
            });
        }
    }
}
