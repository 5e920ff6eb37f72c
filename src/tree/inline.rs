//! A run on a stream that captures already: the function's work becomes a part of that capture.
//!
//! Launching a graph there would break the capture, so this is known before anything else is done. The caller's graph has the addresses of
//! what such a run allocates, and nobody says when it was launched for the last time. So those addresses are not used again as long as the
//! tree lives; within one run they are, in the order of the capture.

use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use tracing::debug_span;

use super::args::{Arg, Inputs, Slot, Slots};
use super::call::{Outcome, all_bound_fit, taken};
use super::function::{Function, FunctionState, HeldBound};
use super::outputs::Outputs;
use super::{FunctionKey, Inner, State};
use crate::allocator::{PoolHandle, PoolOptions};
use crate::device::{Call, CaptureStatus, Code, Device, DeviceError};
use crate::error::{Phase, Result};
use crate::storage::{Storage, Tensor};
use crate::sync::{MutexGuard, lock};

/// What runs inside captures of the caller's have used: kept as long as the tree.
pub(super) struct Inlined<D: Device> {
    /// A handle on each block, whether it was alive at its run's end or not.
    kept: Vec<Tensor<D>>,
    /// The pool they come from, once there is one.
    pool: Option<PoolHandle<D>>,
    /// Pools of which a block could not be kept; nothing is allocated from them any more.
    closed: Vec<PoolHandle<D>>,
}

impl<D: Device> Default for Inlined<D> {
    fn default() -> Self {
        Inlined {
            kept: Vec::new(),
            pool: None,
            closed: Vec::new(),
        }
    }
}

impl<D: Device> Inner<D> {
    /// Whether a stream captures. An error where its capture is broken.
    #[inline(always)] // on the path of every replay
    pub(super) fn captures(&self, stream: &D::Stream) -> Result<bool> {
        let device = self.allocator.device();
        match device.capture_status(stream)? {
            CaptureStatus::None => Ok(false),
            CaptureStatus::Active => Ok(true),
            CaptureStatus::Invalidated => {
                let detail = "the stream that the run was called on captures, and its capture is broken: end it, then run again";
                let code = Code::StreamCaptureInvalidated;
                let error = DeviceError::new(Call::CaptureStatus, code, detail);
                Err(device.refuse(stream, error, false).into())
            }
        }
    }

    /// Runs a function inside the capture that the stream takes part in. An error leaves tree and given inputs as they were; what the closure had
    /// enqueued stays in the capture.
    #[inline(never)] // not on the way of a recording
    pub(super) fn inline<'s>(
        &'s self,
        state: MutexGuard<'s, State<D>>,
        (function, key): (&Function, FunctionKey),
        stream: &D::Stream,
        args: &mut [Arg<'_, D>],
        out: &mut Outputs<D>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let span = debug_span!("inline", function = %function.name());
        let _entered = span.enter();
        self.refuse_foreign(function.shared_name(), args)?;
        // Not dropped under the lock.
        let bound = state.functions[key].hold_bound();
        let state = state;
        let inputs = state.functions[key].inputs_as_they_are(args, &bound)?;
        let body = state.functions[key].body.clone();
        let pool = self.inline_pool()?;
        let (mut state, (outcome, born)) = self.unlocked(state, || {
            let body = (function.shared_name(), &body);
            let route = self.allocator.route_call(stream, &pool);
            self.call_body(body, inputs, Phase::Inline, stream, route)
        });
        lock(&self.inlined).keep(&pool, stream, &born, at);
        let (outputs, said) = match outcome {
            Outcome::Returned(outputs, said) => (outputs, said),
            Outcome::Failed(failed) => return Err(failed.0),
            Outcome::Panicked(panic) => {
                drop(state);
                std::panic::resume_unwind(panic);
            }
        };
        let checked = self.check_outputs(function.shared_name(), &outputs);
        state.counts.inlined += u64::from(checked.is_ok());
        // Whatever is dropped from here on may be the caller's.
        drop(state);
        checked?;
        out.hand_out(Phase::Inline, None, None, outputs, at);
        out.set_values(said.values);
        for given in args.iter_mut().filter_map(Arg::take) {
            // The caller's graph reads it at every launch. An output of the tree goes the way of all outputs.
            if given.storage().is_some_and(|s| s.is_eternal()) {
                lock(&self.inlined).kept.push(given);
            }
        }
        Ok(())
    }

    fn inline_pool(&self) -> Result<PoolHandle<D>> {
        let mut inlined = lock(&self.inlined);
        if let Some(pool) = &inlined.pool {
            return Ok(pool.clone());
        }
        let pool = self.allocator.create_pool(PoolOptions::default())?;
        Ok(inlined.pool.insert(pool).clone())
    }
}

impl<D: Device> FunctionState<D> {
    /// The inputs of a call, by position, as they lie.
    fn inputs_as_they_are(&self, args: &[Arg<'_, D>], held: &HeldBound<D>) -> Result<Inputs<D>> {
        if self.lost_bound() {
            return Err(self.bound_error(held));
        }
        self.takes(args.len())?;
        let bound = self.bound_inputs()?;
        all_bound_fit(&self.name, &bound, args.len())?;
        let mut all = Slots::with_capacity(args.len() + bound.len());
        for (index, arg) in args.iter().enumerate() {
            all.push(match arg {
                Arg::Lend(tensor) => Slot::Tensor((*tensor).clone()),
                Arg::Give(tensor) => Slot::Tensor(tensor.clone()),
                Arg::Value(value) => Slot::Value(value.clone()),
                Arg::Taken => return Err(taken(&self.name, index)),
            });
        }
        for arg in args {
            if let Some(tensor) = arg.tensor() {
                tensor.check()?;
            }
        }
        Ok(Inputs::new(all, bound))
    }
}

impl<D: Device> Inlined<D> {
    /// Keeps all that one run allocated.
    fn keep(
        &mut self,
        pool: &PoolHandle<D>,
        stream: &D::Stream,
        born: &[Arc<Storage<D>>],
        at: &'static Location<'static>,
    ) {
        let mut live = Vec::new();
        for held in born.iter().filter_map(Tensor::hold) {
            live.extend(held.storage().map(|s| s.range()));
            self.kept.push(held);
        }
        for range in without(union(born.iter().map(|s| s.range()).collect()), live) {
            match pool.claim(stream, &range, at) {
                Ok(tensor) => self.kept.push(tensor),
                // Another thread let go of it just now, and it is not free yet, say: it will be, so nothing may be allocated there.
                Err(error) => {
                    tracing::debug!(%error, "a pool for runs inside captures is closed");
                    self.closed.extend(self.pool.take());
                }
            }
        }
    }
}

/// The same addresses, as disjoint ranges in ascending order. What only touches stays apart: it may lie in two segments.
fn union(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|r| (r.start, r.end));
    let mut all: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match all.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

/// What is left of disjoint ascending ranges without others.
fn without(ranges: Vec<Range<u64>>, mut others: Vec<Range<u64>>) -> Vec<Range<u64>> {
    others.sort_unstable_by_key(|r| r.start);
    let mut left = Vec::new();
    for mut range in ranges {
        for other in &others {
            if other.end <= range.start || range.end <= other.start {
                continue;
            }
            if range.start < other.start {
                left.push(range.start..other.start);
            }
            range.start = other.end.min(range.end);
        }
        if !range.is_empty() {
            left.push(range);
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_and_cut() {
        let joined = union(vec![8..12, 0..4, 4..8, 2..3, 10..16, 20..24]);
        assert_eq!(joined, [0..4, 4..8, 8..16, 20..24]);
        let left = without(joined.clone(), vec![10..12, 2..4, 20..24, 13..14]);
        assert_eq!(left, [0..2, 4..8, 8..10, 12..13, 14..16]);
        assert_eq!(without(joined.clone(), vec![]), joined);
        assert_eq!(without(vec![3..9, 9..10], vec![0..5, 7..9]), [5..7, 9..10]);
    }
}
