//! An eager run: the function does its work outside of the tree, on the caller's stream and with memory of the allocator's.
//!
//! The path stays as it is, so what comes next in the step replays. Outputs are tensors like any that the allocator gives: no run takes their
//! memory. Inputs are what they are elsewhere: a copy, unless they are static, outputs of the path, declared to be written, or given.

use smallvec::SmallVec;
use tracing::debug_span;

use super::args::{Arg, Inputs, Slot, Slots};
use super::call::{Call, Outcome, all_bound_fit, taken};
use super::outputs::Outputs;
use super::reason::Reason;
use super::{Inner, State};
use crate::allocator::PoolHandle;
use crate::device::{Device, DevicePtr, GatherSlot};
use crate::error::{Phase, Result};
use crate::sync::MutexGuard;

impl<D: Device> Inner<D> {
    /// Runs the call's function eagerly. An error before the closure was called leaves everything as it was; after it, given inputs are as the closure
    /// left them.
    #[inline(never)] // not on the way of a recording
    pub(super) fn eager<'s>(
        &'s self,
        state: MutexGuard<'s, State<D>>,
        mut call: Call<'_, '_, D>,
        reason: Reason,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        let span = debug_span!("eager", function = %call.name);
        let _entered = span.enter();
        // Before the wait, as in a warmup: what others drop meanwhile is free only after this run has read it.
        let _held = state.hold(call.args);
        // Not dropped under the lock.
        let bound = state.functions[call.function].hold_bound();
        let mut state = state;
        self.order(&mut state, call.stream)?;
        self.note_uses(&call, &bound);
        let pool = self.allocator.default_pool();
        let inputs = self.inputs_for_eager(&state, &mut call, &pool)?;
        state.use_stream(call.stream);
        let body = state.functions[call.function].body.clone();
        let (mut state, (outcome, _)) = self.unlocked(state, || {
            let body = (call.name, &body);
            let route = self.allocator.route_call(call.stream, &pool);
            self.call_body(body, inputs, Phase::Eager, call.stream, route)
        });
        // State of whatever function may have been used, on another stream than the one it was made on.
        self.note_state(call.stream);
        call.end_fed();
        state.drop_carried();
        let (outputs, said) = match outcome {
            Outcome::Returned(outputs, said) => (outputs, said),
            Outcome::Failed(failed) => return Err(failed.0),
            Outcome::Panicked(panic) => {
                drop(state);
                std::panic::resume_unwind(panic);
            }
        };
        if let Err(error) = self.check_outputs(call.name, &outputs) {
            // They, and the values, are dropped without the lock.
            drop(state);
            return Err(error);
        }
        state.counts.eager += 1;
        out.hand_out(Phase::Eager, None, Some(reason), outputs, call.at);
        out.set_values(said.values);
        Ok(())
    }

    /// The inputs by position, and the copies enqueued. Nothing has been given up if it fails.
    fn inputs_for_eager(
        &self,
        state: &State<D>,
        call: &mut Call<'_, '_, D>,
        pool: &PoolHandle<D>,
    ) -> Result<Inputs<D>> {
        let function = &state.functions[call.function];
        let bound = function.bound_inputs()?;
        all_bound_fit(call.name, &bound, call.args.len())?;
        let mut all = Slots::with_capacity(call.args.len() + bound.len());
        let mut slots: SmallVec<[GatherSlot; 4]> = SmallVec::new();
        let mut sources: SmallVec<[DevicePtr; 4]> = SmallVec::new();
        for (index, arg) in call.args.iter().enumerate() {
            all.push(match (arg, arg.tensor()) {
                (Arg::Value(value), _) => Slot::Value(value.clone()),
                (_, None) => return Err(taken(call.name, index)),
                (_, Some(tensor)) => {
                    let fed = tensor.storage().is_some_and(|s| call.is_fed(s));
                    let in_place = function.in_place(index, arg)
                        || function.mutates(function.position(index))
                        || tensor.storage().is_none_or(|s| state.on_path(s));
                    if !fed && arg.is_given() {
                        // Taken out below, when nothing can fail any more.
                        Slot::Taken
                    } else if !fed && in_place {
                        Slot::Tensor(tensor.clone())
                    } else {
                        let copy = pool.alloc_at(call.stream, tensor.bytes(), tensor.made_at())?;
                        slots.push(GatherSlot {
                            dst: copy.address(),
                            bytes: tensor.bytes(),
                        });
                        sources.push(tensor.address());
                        Slot::Tensor(copy)
                    }
                }
            });
        }
        if !slots.is_empty() {
            self.allocator
                .device()
                .gather(call.stream, &slots, &sources)?;
        }
        for (slot, arg) in all.iter_mut().zip(call.args.iter_mut()) {
            let Some(given) = arg.take() else { continue };
            if !matches!(slot, Slot::Taken) {
                // Copied: it dies here, on whatever stream it was handed out, before the copy has been made.
                given.storage().inspect(|s| s.hush());
                continue;
            }
            if let Some(storage) = given.storage()
                && !storage.is_eternal()
            {
                storage.hand_over(call.stream);
            }
            *slot = Slot::Tensor(given);
        }
        Ok(Inputs::new(all, bound))
    }
}
