//! Warmup: a function runs eagerly, with its memory in the tree's pool.
//!
//! It is how a function's first run is done, how everything below a warmup is, and how a call is answered whose capture failed.

use std::sync::MutexGuard;

use tracing::debug_span;

use super::call::{Call, Outcome};
use super::outputs::Outputs;
use super::path::{Entry, Run, Warm};
use super::{Inner, State};
use crate::allocator::Born;
use crate::device::Device;
use crate::error::{Error, Phase, Result};

impl<D: Device> Inner<D> {
    /// Runs the call's function eagerly. An error before the closure was called leaves everything as it was; after it, given outputs of the path
    /// are as the closure left them.
    pub(super) fn warmup<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        mut call: Call<'_, '_, D>,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        let span = debug_span!("warmup", function = %call.name);
        let _entered = span.enter();
        self.order(&mut state, call.stream)?;
        self.catch_up(&mut state, call.stream)?;
        self.follow(call.stream, &self.stream)?;
        let born = Born::new();
        let mut placed = self.place(&state, &call, &born)?;
        self.copy_in(&placed)?;
        let body = state.functions[call.function].body.clone();
        let (inputs, _) = self.hand_in(
            &mut call,
            std::mem::take(&mut placed.slots),
            std::mem::take(&mut placed.bound),
        );

        let outcome = self.unlocked(state, || {
            self.call_body(&body, inputs, Phase::Warmup, &born)
        });
        let (mut state, outcome) = outcome;
        let storages = born.storages();
        // Whatever came of it, the caller's next work comes after what was enqueued.
        let followed = self.follow(&self.stream, call.stream);
        let outputs = match outcome {
            Outcome::Returned(outputs) => outputs,
            Outcome::Failed(source) => {
                self.drop_survivors(&call, &storages);
                return Err(Error::Function {
                    function: call.name.clone(),
                    phase: Phase::Warmup,
                    source,
                });
            }
            Outcome::Panicked(panic) => {
                self.drop_survivors(&call, &storages);
                drop(state);
                std::panic::resume_unwind(panic);
            }
        };
        let sorted = followed.and_then(|()| {
            let function = &state.functions[call.function];
            self.sort_outputs(
                function,
                &call,
                Phase::Warmup,
                &mut placed.specs,
                &outputs,
                &storages,
            )
        });
        let sorted = match sorted {
            Ok(sorted) => sorted,
            Err(error) => {
                drop(outputs);
                self.drop_survivors(&call, &storages);
                return Err(error);
            }
        };
        let live = self.settle(call.name, &sorted, call.stream);
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
        state.functions[call.function].variants[call.variant].warm = true;
        state.counts.warmups += 1;
        out.hand_out(Phase::Warmup, None, outputs, call.at);
        self.give_up(&mut call);
        Ok(())
    }
}
