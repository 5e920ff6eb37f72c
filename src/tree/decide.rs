//! What is done with a call: one function, one answer, and why.

use std::sync::Arc;

use smallvec::SmallVec;

use super::admit::{Mismatch, admit, differences};
use super::args::Arg;
use super::function::{FunctionState, Never};
use super::node::OutputSpec;
use super::path::Entry;
use super::policy::OnMove;
use super::reason::{Advice, Reason};
use super::{FunctionKey, Inner, NodeKey, State};
use crate::device::Device;
use crate::error::{Error, MovedInput};
use crate::storage::{Storage, Tensor};
use crate::sync::raise;

/// Passed inputs that are copied although they are declared static, or are outputs of the path.
pub(super) type Demoted = Vec<usize>;

/// What is to be done with a call.
pub(super) enum Choice {
    Replay(NodeKey),
    Record(Reason, Demoted),
    Warmup(Reason),
    Eager(Reason),
    /// Eager, as every later call of the function at this place.
    Skip(Reason),
    Refuse(Box<Error>),
}

impl Choice {
    /// Why it is no replay; `None` where it is one, and for an error.
    #[inline]
    pub(super) fn reason(&self) -> Option<Reason> {
        match self {
            Choice::Replay(_) | Choice::Refuse(_) => None,
            Choice::Record(reason, _)
            | Choice::Warmup(reason)
            | Choice::Eager(reason)
            | Choice::Skip(reason) => Some(*reason),
        }
    }
}

/// A function below one node (or at the root): what it did there on account of inputs that moved.
#[derive(Debug, Default)]
pub(super) struct Place {
    /// Recordings on account of static inputs.
    static_moves: u32,
    /// Recordings on account of outputs of the path.
    managed_moves: u32,
    /// It is skipped here.
    skip: bool,
}

impl Place {
    pub(super) fn is_skipped(&self) -> bool {
        self.skip
    }
}

impl<D: Device> State<D> {
    /// What to do with a call, and where on the path: runs at the path's end of which nothing is held may be forgotten here, and a path of which
    /// only other generations hold something may be carried along.
    pub(super) fn choose(
        &mut self,
        function: FunctionKey,
        variant: usize,
        generation: u64,
        args: &[Arg<'_, D>],
        fed: &[Arc<Storage<D>>],
    ) -> Choice {
        self.drop_carried();
        while self.tip_is_exact() && self.tip_is_dead() {
            self.cut_tip();
        }
        let f = &self.functions[function];
        let warm = f.variants[variant].warm;
        let spent = f.recordings >= f.limits.recordings;
        if let Some(never) = f.variants[variant].never {
            return Choice::Eager(never.into());
        }
        if self.tip_is_warm() && warm && self.tip_is_before(generation) {
            // Only warmups follow a warmup; but this is another generation, which need not wait until the warmup's outputs are let go.
            self.carry_path();
        }
        // What is carried along is copied in.
        let f = &self.functions[function];
        if !f.mutates.is_empty()
            && let Some(input) = self.mutated_copy(f, args)
        {
            return Choice::Eager(Reason::InputMutated(input));
        }
        if !warm {
            // A warmup is for a recording to come.
            return if spent {
                Choice::Eager(Reason::RecordingLimit)
            } else {
                Choice::Warmup(Reason::NotWarm)
            };
        }
        if self.tip_is_warm() {
            return Choice::Warmup(Reason::BelowWarmup);
        }
        loop {
            if self.skips > 0 && self.is_skipped(function) {
                return Choice::Eager(Reason::Skipped);
            }
            if let Some(node) = self.admitted(function, variant, args, fed) {
                return Choice::Replay(node);
            }
            if !self.tip_is_dead() {
                break;
            }
            self.cut_tip();
        }
        if self.tip_is_before(generation)
            && !self.mutates_path(function, args)
            && let Some(node) = self.admitted_apart(function, variant, args, fed)
        {
            self.carry_path();
            return Choice::Replay(node);
        }
        self.not_admitted(function, variant, args, fed)
    }

    /// What to do where nothing that is recorded fits.
    fn not_admitted(
        &mut self,
        function: FunctionKey,
        variant: usize,
        args: &[Arg<'_, D>],
        fed: &[Arc<Storage<D>>],
    ) -> Choice {
        let siblings = self.siblings(function, variant);
        let mut demoted = Demoted::new();
        let reason = match siblings.last() {
            None => Reason::FirstRecording,
            Some(last) => match self.on_move(function, &siblings, args, fed, &mut demoted) {
                Err(choice) => return choice,
                Ok(Some(moved)) => Reason::Changed(moved),
                Ok(None) => Reason::Changed(self.mismatch(*last, args, fed)),
            },
        };
        let f = &mut self.functions[function];
        if f.variants[variant].pauses() {
            return Choice::Eager(Reason::CaptureFailed);
        }
        if f.recordings >= f.limits.recordings {
            return Choice::Eager(Reason::RecordingLimit);
        }
        if siblings.len() >= f.limits.at_a_place {
            return Choice::Eager(Reason::PlaceLimit);
        }
        if self.nodes.len() >= self.budget.graphs && self.oldest_leaf().is_none() {
            return Choice::Eager(Reason::GraphBudget);
        }
        Choice::Record(reason, demoted)
    }

    /// An input that the function writes, and that it would get a copy of.
    #[inline(never)] // asked only of functions that write
    fn mutated_copy(&self, function: &FunctionState<D>, args: &[Arg<'_, D>]) -> Option<usize> {
        let written = |index: &usize| {
            let position = function.position(*index);
            let storage = args[*index].tensor().and_then(Tensor::storage);
            // As it is placed: what is declared static is in place if it is aligned, also where it is an output of the path.
            let copied = |s: &Arc<Storage<D>>| match function.is_static(position) {
                true => !function.in_place(*index, &args[*index]),
                false => !self.on_path(s),
            };
            function.mutates(position) && storage.is_some_and(copied)
        };
        (0..args.len()).find(written)
    }

    /// Whether the function writes an output of the path, which would be copied in if the path were carried along.
    fn mutates_path(&self, function: FunctionKey, args: &[Arg<'_, D>]) -> bool {
        let f = &self.functions[function];
        !f.mutates.is_empty()
            && args.iter().enumerate().any(|(index, arg)| {
                let storage = arg.tensor().and_then(Tensor::storage);
                f.mutates(f.position(index)) && storage.is_some_and(|s| self.on_path(s))
            })
    }

    /// Follows the function's policy for inputs that move, where one of the recordings is of the same inputs but for moves: then it is recorded on account of
    /// the first of them, with `demoted` copied, or what the policy says is done instead.
    #[inline(never)] // asked only where there are recordings at the place
    fn on_move(
        &self,
        function: FunctionKey,
        siblings: &[NodeKey],
        args: &[Arg<'_, D>],
        fed: &[Arc<Storage<D>>],
        demoted: &mut Demoted,
    ) -> Result<Option<Mismatch>, Choice> {
        let moved = siblings.iter().rev().find_map(|key| {
            let mut all = self.differences(*key, args, fed);
            // What is held besides goes with what is passed: another output here, another one held.
            all.retain(|mismatch| !mismatch.is_liveness());
            (!all.is_empty() && all.iter().all(Mismatch::is_move)).then_some((*key, all))
        });
        let Some((sibling, moves)) = moved else {
            return Ok(None);
        };
        let place = (self.tip(), function);
        let (statics, managed) = self
            .places
            .get(&place)
            .map_or((0, 0), |p| (p.static_moves, p.managed_moves));
        let f = &self.functions[function];
        let mut then = OnMove::Record;
        for mismatch in &moves {
            let (policy, count) = if f.static_move(mismatch) {
                (f.on_static_move, statics)
            } else {
                (f.on_managed_move, managed)
            };
            if count < policy.after {
                continue;
            }
            // What escapes as an output, or is written, is the function's to have in place.
            let escapes = |o: &OutputSpec<D>| matches!(o, OutputSpec::Input { input, .. } if Some(*input) == mismatch.input());
            if policy.then != OnMove::Error && self.nodes[sibling].outputs.iter().any(escapes) {
                continue;
            }
            match (policy.then, mismatch.input()) {
                (OnMove::Record, _) | (_, None) => {}
                (OnMove::Copy, Some(input)) if f.mutates(f.position(input)) => {}
                (OnMove::Copy, Some(input)) => demoted.push(input),
                (other, _) => then = other,
            }
        }
        let first = moves[0];
        match then {
            OnMove::Record | OnMove::Copy => Ok(Some(first)),
            OnMove::Eager => Err(Choice::Eager(Reason::InputMoved(first))),
            OnMove::Skip => Err(Choice::Skip(Reason::InputMoved(first))),
            OnMove::Error => {
                let moved = moves.iter().filter_map(|m| f.moved(m)).collect();
                Err(Choice::Refuse(Box::new(Error::InputMoved {
                    function: f.name.clone(),
                    moved,
                })))
            }
        }
    }

    /// Counts a recording on account of a move against the place it is made at.
    pub(super) fn charge(&mut self, function: FunctionKey, reason: Reason) {
        let Reason::Changed(mismatch) = reason else {
            return;
        };
        if mismatch.is_move() {
            let is_static = self.functions[function].static_move(&mismatch);
            let place = self.places.entry((self.tip(), function)).or_default();
            if is_static {
                place.static_moves += 1;
            } else {
                place.managed_moves += 1;
            }
        }
    }

    /// The function runs eagerly below the tip from now on.
    pub(super) fn skip_here(&mut self, function: FunctionKey) {
        let place = self.places.entry((self.tip(), function)).or_default();
        self.skips += usize::from(!place.skip);
        place.skip = true;
    }

    fn is_skipped(&self, function: FunctionKey) -> bool {
        let place = self.places.get(&(self.tip(), function));
        place.is_some_and(|place| place.skip)
    }

    /// The recordings of a variant at the path's end, in order of creation.
    fn siblings(&self, function: FunctionKey, variant: usize) -> SmallVec<[NodeKey; 4]> {
        match self.path.last() {
            None => self.functions[function].variants[variant]
                .roots
                .iter()
                .copied()
                .collect(),
            Some(_) => self
                .tip()
                .into_iter()
                .flat_map(|tip| &self.nodes[tip].children)
                .filter(|(v, _)| *v == (function, variant))
                .map(|(_, node)| *node)
                .collect(),
        }
    }

    /// The first recording of a variant below the tip that may be replayed.
    fn admitted(
        &self,
        function: FunctionKey,
        variant: usize,
        args: &[Arg<'_, D>],
        fed: &[Arc<Storage<D>>],
    ) -> Option<NodeKey> {
        let fits = |key: &NodeKey| {
            self.fits(*key, args, |s| self.on_path(s)) && !self.overwrites_others(*key, args, fed)
        };
        match self.path.last() {
            None => self.functions[function].variants[variant]
                .roots
                .iter()
                .copied()
                .find(fits),
            Some(_) => {
                let tip = self.tip()?;
                self.nodes[tip]
                    .children
                    .iter()
                    .filter(|(v, _)| *v == (function, variant))
                    .map(|(_, node)| *node)
                    .find(fits)
            }
        }
    }

    /// The first recording of a variant, wherever in the tree, that writes over nothing that is held: it may be replayed although the path is another.
    #[inline(never)] // asked only where something of another generation is held
    fn admitted_apart(
        &self,
        function: FunctionKey,
        variant: usize,
        args: &[Arg<'_, D>],
        fed: &[Arc<Storage<D>>],
    ) -> Option<NodeKey> {
        let mut all: Vec<NodeKey> = self
            .nodes
            .iter()
            .filter(|(_, node)| node.variant == (function, variant))
            .map(|(key, _)| key)
            .collect();
        all.sort_by_key(|key| self.nodes[*key].id);
        all.into_iter().find(|key| {
            let node = &self.nodes[*key];
            // The path would be carried along, and so its outputs are copied in like others.
            self.fits(*key, args, |_| false)
                && !self
                    .all_held()
                    .any(|held| node.overwrites(held) && !node.spends(held, args, fed))
        })
    }

    fn fits(
        &self,
        key: NodeKey,
        args: &[Arg<'_, D>],
        on_path: impl Fn(&Storage<D>) -> bool,
    ) -> bool {
        match admit(&self.nodes[key], args, on_path) {
            Ok(()) => true,
            Err(mismatch) => {
                tracing::debug!(node = self.nodes[key].id.0, %mismatch, "not replayed");
                false
            }
        }
    }

    /// Whether a child of the tip would write over something that is held and that its masks do not speak of.
    fn overwrites_others(
        &self,
        key: NodeKey,
        args: &[Arg<'_, D>],
        fed: &[Arc<Storage<D>>],
    ) -> bool {
        let node = &self.nodes[key];
        let over = |entry: &Entry<D>| {
            self.held(entry)
                .any(|held| node.overwrites(held) && !node.spends(held, args, fed))
        };
        self.carried.iter().any(over) || (node.apart && self.path.iter().any(over))
    }

    /// All that hinders a recording at the path's end from being replayed.
    fn differences(
        &self,
        key: NodeKey,
        args: &[Arg<'_, D>],
        fed: &[Arc<Storage<D>>],
    ) -> SmallVec<[Mismatch; 4]> {
        let mut all = differences(&self.nodes[key], args, |s| self.on_path(s));
        if all.is_empty() && self.overwrites_others(key, args, fed) {
            all.push(Mismatch::Held);
        }
        all
    }

    /// The first of it.
    fn mismatch(&self, key: NodeKey, args: &[Arg<'_, D>], fed: &[Arc<Storage<D>>]) -> Mismatch {
        self.differences(key, args, fed)
            .first()
            .copied()
            .unwrap_or(Mismatch::Held)
    }
}

impl<D: Device> Inner<D> {
    /// Counts an answer, and says once what to do about it: when the run ends.
    pub(super) fn answered(&self, state: &mut State<D>, function: FunctionKey, reason: Reason) {
        let kind = reason.kind();
        let f = &mut state.functions[function];
        f.reasons[kind as usize] += 1;
        tracing::debug!(function = %f.name, %reason, "not replayed");
        if let Some(what_to_do) = reason.advice()
            && f.advised & kind.bit() == 0
        {
            f.advised |= kind.bit();
            self.advise(state, function, reason, what_to_do);
        }
    }

    /// Says what to do about an answer.
    #[cold]
    fn advise(
        &self,
        state: &mut State<D>,
        function: FunctionKey,
        reason: Reason,
        what_to_do: &str,
    ) {
        let name = &state.functions[function].name;
        let text = format!("{name} runs eagerly: {reason}; {what_to_do}");
        tracing::warn!(function = %name, "{text}");
        state.advice.push(Advice {
            function: name.to_string(),
            reason,
            text,
        });
        raise(&self.untidy);
    }
}

impl From<Never> for Reason {
    fn from(never: Never) -> Self {
        match never {
            Never::Unwanted => Reason::KeyNotCaptured,
            Never::TooSmall => Reason::GraphTooSmall,
            Never::NotCapturable => Reason::NotCapturable,
        }
    }
}

impl<D: Device> FunctionState<D> {
    /// Whether what moved is the static inputs' concern: one that was declared so, also where it was an output of the path.
    fn static_move(&self, mismatch: &Mismatch) -> bool {
        let declared = |input| self.is_static(self.position(input));
        matches!(mismatch, Mismatch::StaticMoved { .. }) || mismatch.input().is_some_and(declared)
    }

    /// Which input moved, and where it was declared; `None` for what is no move.
    fn moved(&self, mismatch: &Mismatch) -> Option<MovedInput> {
        let (input, recorded, passed) = mismatch.addresses()?;
        let position = self.position(input);
        let declared = self.statics.iter().find(|(p, _)| *p == position);
        Some(MovedInput {
            input: position,
            recorded,
            passed,
            declared_at: declared.map(|(_, at)| *at),
        })
    }

    /// Whether a passed input is used where it lies because it was declared static.
    pub(super) fn in_place(&self, index: usize, arg: &Arg<'_, D>) -> bool {
        self.is_static(self.position(index))
            && arg
                .tensor()
                .is_none_or(|tensor| tensor.address().0.is_multiple_of(self.align))
    }
}
