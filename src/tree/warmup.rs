//! Warmup: a function runs eagerly, with its memory in the tree's pool.
//!
//! It is how a function's first run is done, and how everything below a warmup is.

use tracing::debug_span;

use super::call::{Call, Outcome, Placed, Sorted};
use super::outputs::Outputs;
use super::path::{Entry, Run, Warm};
use super::reason::Reason;
use super::recorder::Said;
use super::{Inner, State};
use crate::device::Device;
use crate::error::{Phase, Result};
use crate::sync::MutexGuard;

impl<D: Device> Inner<D> {
    /// Runs the call's function eagerly. An error before the closure was called leaves everything as it was; after it, given outputs of the path
    /// are as the closure left them.
    #[inline(never)] // not on the way of a recording
    pub(super) fn warmup<'s>(
        &'s self,
        state: MutexGuard<'s, State<D>>,
        mut call: Call<'_, '_, D>,
        reason: Reason,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        let span = debug_span!("warmup", function = %call.name);
        let _entered = span.enter();
        // The closure may see the last handle go: what it enqueued reads them until it has been joined.
        // And they are not dropped under the lock.
        let bound = state.functions[call.function].hold_bound();
        let mut state = state;
        state.functions[call.function].bound_inputs()?;
        // Before the wait: what is dropped from here on is free only after this run, so that its user's work is waited for by the next.
        let _held = state.hold(call.args);
        self.order(&mut state, call.stream)?;
        self.note_uses(&call, &bound);
        self.catch_up(&mut state, call.stream)?;
        self.follow(call.stream, &self.stream)?;
        state.use_stream(call.stream);
        let route = self.allocator.route_call(&self.stream, &self.pool);
        let mut placed = Placed::new(call.args.len());
        let inputs = self.place(&state, &call, &route, &mut placed);
        let inputs = inputs.and_then(|inputs| {
            self.copy_in(&placed)?;
            Ok(inputs)
        });
        let inputs = match inputs {
            Ok(inputs) => inputs,
            Err(error) => {
                self.join(call.stream)?;
                return Err(error);
            }
        };
        let body = state.functions[call.function].body.clone();
        let (inputs, given) = self.hand_in(&mut call, inputs, &placed.given);
        let (mut state, (outcome, storages)) = self.unlocked(state, || {
            let body = (call.name, &body);
            self.call_body(body, inputs, Phase::Warmup, &self.stream, route)
        });
        let mut panicked = None;
        let mut said = Said::default();
        let sorted = match outcome {
            Outcome::Returned(outputs, spoken) => {
                said = spoken;
                let function = &state.functions[call.function];
                let specs = &mut placed.specs;
                let mut sorted = Sorted::default();
                let made = (&*storages, &*outputs);
                match self.sort_outputs(function, &call, Phase::Warmup, specs, made, &mut sorted) {
                    Ok(()) => Ok(Some((sorted, outputs))),
                    Err(error) => {
                        self.let_go(&mut state, outputs, std::mem::take(&mut said.values));
                        Err(error)
                    }
                }
            }
            Outcome::Failed(failed) => Err(failed.0),
            Outcome::Panicked(panic) => {
                panicked = Some(panic);
                Ok(None)
            }
        };
        if !matches!(sorted, Ok(Some(_))) {
            self.drop_survivors(&call, &storages);
        }
        // Whatever came of it, the caller's next work comes after what was enqueued, and after what died of it.
        let joined = self.join(call.stream);
        self.note_state(call.stream);
        for given in &given {
            given.storage.hand_over(call.stream);
        }
        if let Some(panic) = panicked {
            drop(state);
            std::panic::resume_unwind(panic);
        }
        let (sorted, outputs) = match (sorted, joined) {
            (Ok(Some(sorted)), Ok(())) => sorted,
            (Err(error), _) => {
                self.drop_survivors(&call, &storages);
                return Err(error);
            }
            (Ok(unheard), Err(error)) => {
                let outputs = unheard.map(|(_, outputs)| outputs);
                self.let_go(&mut state, outputs.unwrap_or_default(), said.values);
                self.drop_survivors(&call, &storages);
                return Err(error);
            }
            // Nothing but a panic gives neither.
            (Ok(None), Ok(())) => return Ok(()),
        };
        // A warmup that fails leaves it: nothing was written over it.
        call.end_fed();
        state.drop_carried();
        let live = self.settle(call.name, &sorted, call.stream, |_, _| {});
        let slots = sorted
            .slots
            .into_iter()
            .map(|(storage, _)| storage)
            .collect();
        let warm = Warm {
            function: call.name.clone(),
            slots,
            live,
        };
        state.path.push(Entry {
            generation: call.generation,
            run: Run::Warm(Box::new(warm)),
        });
        state.functions[call.function].variants[call.variant].warm |= !said.incomplete;
        state.counts.warmups += 1;
        out.hand_out(Phase::Warmup, None, Some(reason), outputs, call.at);
        out.set_values(said.values);
        self.give_up(&mut call);
        Ok(())
    }
}
