//! Functions: what is registered, and its variants by key.

use std::fmt;
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::args::{BodyResult, Inputs, Value};
use super::call::inputs_error;
use super::policy::{Limits, MovePolicy};
use super::reason::ReasonKind;
use super::recorder::Recorder;
use super::remove::Registry;
use super::{FunctionKey, NodeKey};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::storage::{Tensor, WeakTensor};
use crate::sync::AtomicBool;

/// A function's body.
pub(super) type Body<D> =
    Arc<dyn Fn(&mut Recorder<'_, D>, Inputs<D>) -> BodyResult<D> + Send + Sync>;

/// A key: the integers that choose a variant.
pub(super) type Key = SmallVec<[i64; 4]>;

/// The declaration of a function, for [`GraphTrees::register`](crate::GraphTrees::register).
pub struct FunctionSpec<D: Device> {
    pub(super) name: Arc<str>,
    pub(super) statics: Vec<(usize, &'static Location<'static>)>,
    pub(super) bound: Vec<(usize, Bound<D>)>,
    pub(super) skip_warmup: bool,
    pub(super) settings: Settings,
}

/// What a function declares besides its inputs.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// How many inputs it takes, bound ones included, if that is declared.
    pub(super) inputs: Option<usize>,
    /// Positions that it writes to, sorted.
    pub(super) mutates: Vec<usize>,
    /// Addresses of static inputs that are used in place are multiples of this.
    pub(super) align: u64,
    pub(super) limits: Limits,
    pub(super) on_static_move: MovePolicy,
    pub(super) on_managed_move: MovePolicy,
    /// Which keys are captured.
    pub(super) keys: Keys,
    /// Graphs of fewer nodes are not kept.
    pub(super) min_nodes: usize,
}

/// Says of a key whether it is captured.
pub(super) type Wanted = Arc<dyn Fn(&[i64]) -> bool + Send + Sync>;

/// Which keys are captured.
#[derive(Clone)]
pub(super) enum Keys {
    All,
    These(Vec<Key>),
    If(Wanted),
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Keys::All => f.write_str("all"),
            Keys::These(keys) => f.debug_list().entries(keys).finish(),
            Keys::If(_) => f.write_str("as a closure says"),
        }
    }
}

impl Keys {
    /// Whether a key is captured; `Err` is who is to be asked, without the lock.
    pub(super) fn contain(&self, key: &[i64]) -> Result<bool, Wanted> {
        match self {
            Keys::All => Ok(true),
            Keys::These(keys) => Ok(keys.iter().any(|k| k.as_slice() == key)),
            Keys::If(wanted) => Err(wanted.clone()),
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            inputs: None,
            mutates: Vec::new(),
            align: 1,
            limits: Limits::default(),
            on_static_move: MovePolicy::RECORD,
            on_managed_move: MovePolicy::RECORD,
            keys: Keys::All,
            min_nodes: 0,
        }
    }
}

/// What an input was bound to at registration. Tensors are held weakly.
pub(super) enum Bound<D: Device> {
    Tensor(WeakTensor<D>),
    Value(Value),
}

impl<D: Device> FunctionSpec<D> {
    /// A function of that name; the name is what errors and pictures call it.
    #[must_use]
    pub fn new(name: &str) -> Self {
        FunctionSpec {
            name: name.into(),
            statics: Vec::new(),
            bound: Vec::new(),
            skip_warmup: false,
            settings: Settings::default(),
        }
    }

    /// The function takes so many inputs, bound ones included: a call with more or fewer is [`Error::Inputs`].
    ///
    /// Without, how many inputs there are is part of what a recording fits, like their lengths: a call with another number is recorded anew, beside. What the closure does not
    /// look at is copied in all the same.
    #[must_use]
    pub fn inputs(mut self, count: usize) -> Self {
        self.settings.inputs = Some(count);
        self
    }

    /// The input at `position` keeps its address from call to call; it is never copied, and another address is another recording (or what
    /// [`on_static_move`](FunctionSpec::on_static_move) says). Held weakly: when the tensor dies, the recordings that have its address go.
    ///
    /// An output of the path that is passed there is used as such, in place; if it is another one later, that is a move of a static input. One of an
    /// ended generation is read in place too. Where the address is no multiple of [`align`](FunctionSpec::align), the input is copied in. A [bound](FunctionSpec::bind) position is static already, and is not
    /// declared so too.
    #[track_caller]
    #[must_use]
    pub fn static_input(mut self, position: usize) -> Self {
        self.statics.push((position, Location::caller()));
        self
    }

    /// The function writes to the input at `position`, and the caller is to see it. That is so where the input is used in place: where it is static, or an
    /// output of the path. In any other call the function runs eagerly ([`Reason::InputMutated`](crate::Reason::InputMutated)), on the input itself.
    ///
    /// So a static input that is not [aligned](FunctionSpec::align) runs eagerly, and [`OnMove::Copy`](crate::OnMove::Copy) is not for an input that is written: it is recorded again
    /// where it moved. The other policies hold for it as for any. A bound input is in place always.
    #[must_use]
    pub fn mutates(mut self, position: usize) -> Self {
        self.settings.mutates.push(position);
        self.settings.mutates.sort_unstable();
        self
    }

    /// The function wants its inputs at multiples of `bytes`. A static input at another address is copied in as if it were not static (and if the
    /// function writes to it, the call runs eagerly). Copied inputs lie at multiples of 512 anyway. Outputs of the path at positions that are not static, and bound inputs, are
    /// used where they lie, whatever this says.
    ///
    /// An input that is copied for its address does not move: [`on_static_move`](FunctionSpec::on_static_move) is asked when an input that was used in place comes to lie elsewhere, also at an address that is not
    /// aligned.
    #[must_use]
    pub fn align(mut self, bytes: u64) -> Self {
        self.settings.align = bytes.max(1);
        self
    }

    /// What is done when a static input has moved; by default it is recorded again, each time. Of inputs that the function [writes](FunctionSpec::mutates) or returns,
    /// [`MovePolicy`] says what holds. A run of which several inputs moved follows the policy of each that has reached its count; what is not recording goes before. Recordings
    /// on account of moves count for [`max_recordings`](FunctionSpec::max_recordings) and [`max_recordings_at_a_place`](FunctionSpec::max_recordings_at_a_place) too.
    #[must_use]
    pub fn on_static_move(mut self, policy: MovePolicy) -> Self {
        self.settings.on_static_move = policy;
        self
    }

    /// What is done when an input that was an output of the path is another, or none, at a later call; by default it is recorded again, each time. At a position that is
    /// declared static, [`on_static_move`](FunctionSpec::on_static_move) is asked in its place.
    #[must_use]
    pub fn on_managed_move(mut self, policy: MovePolicy) -> Self {
        self.settings.on_managed_move = policy;
        self
    }

    /// How many recordings the function may have, of all keys and at all places of the tree; 1,024 unless said. Beyond, what is not recorded runs eagerly, and no key is
    /// warmed up.
    #[must_use]
    pub fn max_recordings(mut self, recordings: usize) -> Self {
        self.settings.limits.recordings = recordings;
        self
    }

    /// How many recordings of one key there may be at one place of the tree; 128 unless said. Beyond, what is not recorded runs eagerly.
    #[must_use]
    pub fn max_recordings_at_a_place(mut self, recordings: usize) -> Self {
        self.settings.limits.at_a_place = recordings;
        self
    }

    /// Only these keys are captured, the others run eagerly. In place of what [`capture_if`](FunctionSpec::capture_if) said before.
    #[must_use]
    pub fn capture_keys<'k>(mut self, keys: impl IntoIterator<Item = &'k [i64]>) -> Self {
        let keys = keys.into_iter().map(Key::from_slice).collect();
        self.settings.keys = Keys::These(keys);
        self
    }

    /// Only keys that `wanted` says yes to are captured, the others run eagerly. It is asked once for each key, at its first run, as a closure of the tree: no lock
    /// is held, a run from inside is [`Error::Nested`], and its panic is the run's. In place of what [`capture_keys`](FunctionSpec::capture_keys) said before.
    #[must_use]
    pub fn capture_if(mut self, wanted: impl Fn(&[i64]) -> bool + Send + Sync + 'static) -> Self {
        self.settings.keys = Keys::If(Arc::new(wanted));
        self
    }

    /// A graph of fewer nodes is not kept: it costs more than it saves. The key then runs eagerly for good (until [`invalidate`](crate::GraphTrees::invalidate)). The gather
    /// of copied inputs is one of its nodes.
    #[must_use]
    pub fn min_graph_nodes(mut self, nodes: usize) -> Self {
        self.settings.min_nodes = nodes;
        self
    }

    /// The input at `position` is this tensor, in every call (of memory outside of trees: outputs are passed to `run`): static, and not passed to `run`, which then costs nothing for it. Held weakly: who
    /// binds it keeps it. Positions, here and in the other methods, count all inputs as the closure sees them, bound and passed; a function with bound inputs after the passed
    /// ones needs no renumbering. The tensor is used where it lies, whatever [`align`](FunctionSpec::align) says, and may be
    /// [written](FunctionSpec::mutates); it does not move.
    #[must_use]
    pub fn bind(mut self, position: usize, tensor: &Tensor<D>) -> Self {
        self.bound
            .push((position, Bound::Tensor(tensor.downgrade())));
        self
    }

    /// The input at `position` is this host value, in every call.
    #[must_use]
    pub fn bind_value(mut self, position: usize, value: Value) -> Self {
        self.bound.push((position, Bound::Value(value)));
        self
    }

    /// The first run of each key records, also after [`invalidate`](crate::GraphTrees::invalidate): for a function that has been run before and initialises nothing.
    #[must_use]
    pub fn skip_warmup(mut self) -> Self {
        self.skip_warmup = true;
        self
    }
}

impl<D: Device> fmt::Debug for FunctionSpec<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionSpec")
            .field("name", &self.name)
            .field("statics", &self.statics)
            .field("bound", &self.bound.len())
            .finish_non_exhaustive()
    }
}

/// A registered function. Clones are the same function.
///
/// When the last clone is dropped, the function is unregistered: its recordings go, with all that was recorded below them, their graphs and what memory only they
/// needed; and its closure is dropped. Outputs that are held stay. At once, or (dropped while a closure of the tree is running) when that run ends.
/// A closure that holds a clone of its own function keeps it; [`GraphTrees::invalidate`](crate::GraphTrees::invalidate) does not mind.
#[derive(Clone)]
pub struct Function {
    registration: Arc<Registration>,
}

struct Registration {
    key: FunctionKey,
    name: Arc<str>,
    owner: Arc<()>,
    registry: Weak<dyn Registry>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            registry.leave(self.key);
        }
    }
}

impl Function {
    pub(super) fn new(
        key: FunctionKey,
        name: Arc<str>,
        owner: Arc<()>,
        registry: Weak<dyn Registry>,
    ) -> Self {
        Function {
            registration: Arc::new(Registration {
                key,
                name,
                owner,
                registry,
            }),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.registration.name
    }

    pub(super) fn shared_name(&self) -> &Arc<str> {
        &self.registration.name
    }

    /// Its key in the tree that `owner` is of; `None` if it is another's.
    pub(super) fn key_in(&self, owner: &Arc<()>) -> Option<FunctionKey> {
        Arc::ptr_eq(&self.registration.owner, owner).then_some(self.registration.key)
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({})", self.name())
    }
}

/// A function as the tree keeps it. What a replay touches comes first.
#[repr(C)]
pub(super) struct FunctionState<D: Device> {
    pub(super) variants: SmallVec<[Variant; 1]>,
    /// Bound at registration, by position, sorted.
    pub(super) bound: Vec<(usize, Bound<D>)>,
    /// Its runs that were replays.
    pub(super) replays: u64,
    /// Raised by the death of a bound storage.
    pub(super) bound_died: Arc<AtomicBool>,
    pub(super) number: u32,
    pub(super) name: Arc<str>,
    pub(super) body: Body<D>,
    /// Declared static, by position, sorted, and where.
    pub(super) statics: Vec<(usize, &'static Location<'static>)>,
    pub(super) skip_warmup: bool,
    pub(super) settings: Settings,
    /// Recordings of it that are there.
    pub(super) recordings: usize,
    /// How often each kind of reason was the answer.
    pub(super) reasons: [u64; ReasonKind::ALL.len()],
    /// The kinds that advice was given for.
    pub(super) advised: u16,
}

impl<D: Device> std::ops::Deref for FunctionState<D> {
    type Target = Settings;

    fn deref(&self) -> &Settings {
        &self.settings
    }
}

/// One key of a function. What a replay touches comes first.
#[repr(C)]
pub(super) struct Variant {
    pub(super) key: Key,
    /// Its recordings on the empty path, in order of creation.
    pub(super) roots: SmallVec<[NodeKey; 2]>,
    /// It has been warmed up, or need not be.
    pub(super) warm: bool,
    /// Why it is never captured, if it is not.
    pub(super) never: Option<Never>,
    /// Captures of it that failed since the last that did not.
    pub(super) failures: u32,
    /// Calls that are answered eagerly before the next capture is tried.
    pub(super) pause: u64,
}

/// Why a key is never captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Never {
    /// It is none of those to capture.
    Unwanted,
    /// Its graph was too small.
    TooSmall,
    /// Its closure said that it cannot be captured.
    NotCapturable,
}

/// Captures of a variant that may fail in a row before it is not tried again.
const FAILURES: u32 = 8;

impl Variant {
    /// A capture failed: the next call tries again, then one in 2, in 4, and so on, and after eight failures none.
    pub(super) fn capture_failed(&mut self) {
        self.failures += 1;
        self.pause = if self.failures >= FAILURES {
            u64::MAX
        } else {
            (1 << (self.failures - 1)) - 1
        };
    }

    /// Whether its recordings are replayed where they fit.
    pub(super) fn replays(&self) -> bool {
        self.warm && self.never.is_none()
    }

    /// A capture succeeded.
    pub(super) fn captured(&mut self) {
        (self.failures, self.pause) = (0, 0);
    }

    /// Whether this call is to be answered eagerly because captures failed.
    pub(super) fn pauses(&mut self) -> bool {
        let pauses = self.pause > 0;
        if pauses && self.pause != u64::MAX {
            self.pause -= 1;
        }
        pauses
    }
}

impl<D: Device> FunctionState<D> {
    /// The position that the `passed`-th input of a run has for the closure.
    pub(super) fn position(&self, passed: usize) -> usize {
        let mut position = passed;
        for (bound, _) in &self.bound {
            if *bound <= position {
                position += 1;
            }
        }
        position
    }

    pub(super) fn is_static(&self, position: usize) -> bool {
        self.statics
            .binary_search_by_key(&position, |(declared, _)| *declared)
            .is_ok()
    }

    /// Whether the function writes to the input at a position.
    pub(super) fn mutates(&self, position: usize) -> bool {
        self.settings.mutates.binary_search(&position).is_ok()
    }

    /// The index of a key's variant.
    pub(super) fn variant(&self, key: &[i64]) -> Option<usize> {
        self.find(key).map(|(index, _)| index)
    }

    /// A key's variant, and its index.
    #[inline]
    pub(super) fn find(&self, key: &[i64]) -> Option<(usize, &Variant)> {
        let mut all = self.variants.iter().enumerate();
        all.find(|(_, v)| v.key.as_slice() == key)
    }

    /// Refuses a call with another number of inputs than is declared. Asked of calls that are no replays: what is recorded has the right number.
    pub(super) fn takes(&self, passed: usize) -> Result<()> {
        match self.settings.inputs {
            Some(declared) if declared != passed + self.bound.len() => {
                Err(self.miscounted(passed, declared))
            }
            _ => Ok(()),
        }
    }

    /// The error for another number of inputs than is declared.
    #[cold]
    fn miscounted(&self, passed: usize, declared: usize) -> Error {
        let (bound, total) = (self.bound.len(), passed + self.bound.len());
        let detail = format!(
            "the run passes {passed} inputs and {bound} are bound, {total} in all; the function is declared to take {declared}"
        );
        inputs_error(&self.name, detail)
    }

    /// Refuses a key's first run where a position is declared that it does not have: a slip there would be a lost write, or a copy where none was wanted.
    pub(super) fn all_declared_fit(&self, passed: usize) -> Result<()> {
        self.takes(passed)?;
        let total = passed + self.bound.len();
        let statics = self
            .statics
            .iter()
            .map(|(position, _)| (*position, "static"));
        let written = self.settings.mutates.iter().map(|p| (*p, "written"));
        let Some((position, what)) = statics.chain(written).find(|(p, _)| *p >= total) else {
            return Ok(());
        };
        let detail = format!(
            "input {position} is declared {what}, and the run has {total} inputs, bound ones included; positions count from 0"
        );
        Err(inputs_error(&self.name, detail))
    }

    /// A variant for a key that has none yet.
    pub(super) fn add_variant(&mut self, key: &[i64], wanted: bool) -> usize {
        self.variants.push(Variant {
            key: Key::from_slice(key),
            never: (!wanted).then_some(Never::Unwanted),
            warm: self.skip_warmup,
            failures: 0,
            pause: 0,
            roots: SmallVec::new(),
        });
        self.variants.len() - 1
    }

    /// Whether a bound storage died.
    #[inline(always)] // on the path of every replay
    pub(super) fn lost_bound(&self) -> bool {
        !self.bound.is_empty() && self.bound_died.load(Ordering::Acquire)
    }

    /// The error for it. The bound tensors are held by the caller, who drops them without the lock.
    #[cold]
    pub(super) fn bound_error(&self, held: &HeldBound<D>) -> Error {
        Error::StaticDied {
            function: self.name.clone(),
            input: held.died.unwrap_or(0),
        }
    }

    /// Takes hold of the bound tensors that are alive. Whoever upgrades one under the lock has this besides: so its last handle, and with it a keeper of
    /// the caller's, is dropped without.
    #[inline]
    pub(super) fn hold_bound(&self) -> HeldBound<D> {
        let held = HeldBound {
            tensors: Vec::new(),
            died: None,
        };
        match self.bound.is_empty() {
            true => held,
            false => self.hold_all(held),
        }
    }

    /// The same where there are some.
    fn hold_all(&self, mut held: HeldBound<D>) -> HeldBound<D> {
        for (position, bound) in &self.bound {
            let Bound::Tensor(weak) = bound else { continue };
            match weak.upgrade() {
                Some(tensor) => held.tensors.push(tensor),
                None => held.died = held.died.or(Some(*position)),
            }
        }
        held
    }

    /// The bound inputs, alive.
    #[inline]
    pub(super) fn bound_inputs(&self) -> Result<Vec<(usize, BoundInput<D>)>> {
        match self.bound.is_empty() {
            true => Ok(Vec::new()),
            false => self.upgrade_bound(),
        }
    }

    /// The same where there are some.
    fn upgrade_bound(&self) -> Result<Vec<(usize, BoundInput<D>)>> {
        self.bound
            .iter()
            .map(|(position, bound)| {
                let input = match bound {
                    Bound::Tensor(weak) => {
                        BoundInput::Tensor(weak.upgrade().ok_or_else(|| Error::StaticDied {
                            function: self.name.clone(),
                            input: *position,
                        })?)
                    }
                    Bound::Value(value) => BoundInput::Value(value.clone()),
                };
                Ok((*position, input))
            })
            .collect()
    }
}

/// The bound tensors of a function, held. To be dropped when no lock is held.
pub(super) struct HeldBound<D: Device> {
    tensors: Vec<Tensor<D>>,
    /// The position of the first that is gone.
    pub(super) died: Option<usize>,
}

impl<D: Device> HeldBound<D> {
    pub(super) fn tensors(&self) -> &[Tensor<D>] {
        &self.tensors
    }
}

/// A bound input, alive for one call.
pub(super) enum BoundInput<D: Device> {
    Tensor(Tensor<D>),
    Value(Value),
}
