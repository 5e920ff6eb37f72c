//! Warming up and recording ahead of traffic: a list of keys, with progress reported.

use super::args::lend;
use super::function::Function;
use super::{Arg, GraphTrees, Reason};
use crate::device::Device;
use crate::error::{Phase, Result};
use crate::storage::Tensor;
use crate::sync::lock;

/// One key of a function to be recorded before it is wanted.
#[derive(Clone, Debug)]
pub struct Prepare<'a, D: Device> {
    /// The function.
    pub function: &'a Function,
    /// Its key.
    pub key: &'a [i64],
    /// The inputs that are not bound, lent: of the lengths that will come, the static ones at their addresses.
    pub inputs: Vec<&'a Tensor<D>>,
}

/// What became of one request.
#[derive(Debug)]
pub struct Prepared {
    /// Which of the list, from 0.
    pub index: usize,
    /// How many the list has.
    pub total: usize,
    /// What its last run did: [`Record`](Phase::Record), or [`Replay`](Phase::Replay) where it was recorded already, or [`Eager`](Phase::Eager) where it
    /// is not to be.
    pub outcome: Result<Phase>,
    /// Why, where that was no replay.
    pub reason: Option<Reason>,
    /// How many runs it took.
    pub runs: u32,
}

/// Runs that a request gets before it is left as it is: it may ask for more warmup.
const MOST_RUNS: u32 = 16;

impl<D: Device> GraphTrees<D> {
    /// Runs each request until it is recorded, every time as a step of its own: with nothing held, as it will be at the beginning of a step. What a function
    /// does to its static inputs is done that many times. `progress` is told of each; an error of one does not keep the others from being prepared. How many
    /// have a recording now: fewer than were recorded, where the budget is smaller than the list.
    ///
    /// Other threads may run functions meanwhile. Any order of the list gives the same answers; with the largest lengths first the pool grows the least.
    pub fn prepare<'a>(
        &self,
        stream: &D::Stream,
        requests: &[Prepare<'a, D>],
        mut progress: impl FnMut(&Prepared),
    ) -> usize {
        for (index, request) in requests.iter().enumerate() {
            let mut prepared = Prepared {
                index,
                total: requests.len(),
                outcome: Ok(Phase::Warmup),
                reason: None,
                runs: 0,
            };
            while matches!(prepared.outcome, Ok(Phase::Warmup)) && prepared.runs < MOST_RUNS {
                prepared.runs += 1;
                let mut args: Vec<Arg<'_, D>> = request.inputs.iter().map(|t| lend(t)).collect();
                let step = self.step();
                let run = self.run(request.function, &step, request.key, stream, &mut args);
                prepared.reason = run.as_ref().ok().and_then(super::Outputs::reason);
                prepared.outcome = run.map(|outputs| outputs.phase());
            }
            progress(&prepared);
        }
        let is_recorded =
            |request: &&Prepare<'a, D>| self.is_recorded(request.function, request.key);
        requests.iter().filter(is_recorded).count()
    }

    /// Whether a key has a recording, wherever in the tree.
    fn is_recorded(&self, function: &Function, key: &[i64]) -> bool {
        let state = lock(&self.inner.state);
        function
            .key_in(&self.inner.owner)
            .and_then(|f| Some((f, state.functions.get(f)?.variant(key)?)))
            .is_some_and(|variant| state.nodes.values().any(|node| node.variant == variant))
    }
}
