//! May this node be replayed now? Nothing is changed by asking.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::args::Arg;
use super::node::{InputSpec, Node};
use crate::device::{Device, DevicePtr};
use crate::storage::{Storage, Tensor};

/// Why a node may not be replayed. Inputs are numbered as they are passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// Another number of inputs.
    Count,
    /// The input is a tensor where a host value was, or the other way round, or another host value.
    Value(usize),
    /// The input has another length.
    Length(usize),
    /// The static input lies elsewhere.
    StaticMoved {
        /// Which.
        input: usize,
        /// Where it lay.
        recorded: DevicePtr,
        /// Where it lies.
        passed: DevicePtr,
    },
    /// The input is not the output of an earlier node that it was.
    ManagedMoved {
        /// Which.
        input: usize,
        /// Where that output lies.
        recorded: DevicePtr,
        /// Where the input lies.
        passed: DevicePtr,
    },
    /// The input was copied in, and is an output of an earlier node now: the function would see a copy where it is to see the output itself.
    ManagedNow(usize),
    /// Memory that the graph writes is held: of an output that was dead when the recording began, or of an earlier path.
    Held,
    /// An output that died during the recording is held by more than this call's given inputs.
    NotGivenUp,
}

impl Mismatch {
    /// Whether an input that is used in place lies elsewhere.
    #[must_use]
    pub fn is_move(&self) -> bool {
        self.addresses().is_some()
    }

    /// Whether it is about what is held, not about what is passed.
    pub(super) fn is_liveness(&self) -> bool {
        matches!(self, Mismatch::Held | Mismatch::NotGivenUp)
    }

    /// The input it is about.
    #[must_use]
    pub fn input(&self) -> Option<usize> {
        match self {
            Mismatch::Value(input)
            | Mismatch::Length(input)
            | Mismatch::ManagedNow(input)
            | Mismatch::StaticMoved { input, .. }
            | Mismatch::ManagedMoved { input, .. } => Some(*input),
            Mismatch::Count | Mismatch::Held | Mismatch::NotGivenUp => None,
        }
    }

    /// Of a move: the input, where it lay, where it lies.
    pub(super) fn addresses(&self) -> Option<(usize, DevicePtr, DevicePtr)> {
        match *self {
            Mismatch::StaticMoved {
                input,
                recorded,
                passed,
            }
            | Mismatch::ManagedMoved {
                input,
                recorded,
                passed,
            } => Some((input, recorded, passed)),
            _ => None,
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Count => f.write_str("another number of inputs"),
            Mismatch::Value(input) => write!(f, "another host value at input {input}"),
            Mismatch::Length(input) => write!(f, "another length of input {input}"),
            Mismatch::StaticMoved {
                input,
                recorded,
                passed,
            } => write!(
                f,
                "static input {input} moved from {recorded:?} to {passed:?}"
            ),
            Mismatch::ManagedMoved {
                input,
                recorded,
                passed,
            } => write!(
                f,
                "input {input} was the output at {recorded:?} and lies at {passed:?}"
            ),
            Mismatch::ManagedNow(input) => {
                write!(f, "input {input} was copied and is an output of the path")
            }
            Mismatch::Held => f.write_str("memory that it writes is held"),
            Mismatch::NotGivenUp => f.write_str("what it consumes is not given up"),
        }
    }
}

/// Compares a call with a recording: addresses, lengths, liveness. `on_path` says whether a storage is an output of the path.
pub(super) fn admit<D: Device>(
    node: &Node<D>,
    args: &[Arg<'_, D>],
    on_path: impl Fn(&Storage<D>) -> bool,
) -> Result<(), Mismatch> {
    if node.inputs.len() != args.len() {
        return Err(Mismatch::Count);
    }
    for (index, (spec, arg)) in node.inputs.iter().zip(args).enumerate() {
        compare(index, spec, arg, &on_path)?;
    }
    liveness(node, args)
}

/// All that [`admit`] would find.
pub(super) fn differences<D: Device>(
    node: &Node<D>,
    args: &[Arg<'_, D>],
    on_path: impl Fn(&Storage<D>) -> bool,
) -> SmallVec<[Mismatch; 4]> {
    let mut all = SmallVec::new();
    if node.inputs.len() != args.len() {
        all.push(Mismatch::Count);
        return all;
    }
    for (index, (spec, arg)) in node.inputs.iter().zip(args).enumerate() {
        all.extend(compare(index, spec, arg, &on_path).err());
    }
    all.extend(liveness(node, args).err());
    all
}

#[inline(always)] // the loop over static inputs is what a replay with many costs
pub(super) fn compare<D: Device>(
    index: usize,
    spec: &InputSpec<D>,
    arg: &Arg<'_, D>,
    on_path: &impl Fn(&Storage<D>) -> bool,
) -> Result<(), Mismatch> {
    let tensor = match (spec, arg) {
        (InputSpec::Value(recorded), Arg::Value(value)) if Arc::ptr_eq(recorded, value) => {
            return Ok(());
        }
        (InputSpec::Value(_), _) | (_, Arg::Value(_) | Arg::Taken) => {
            return Err(Mismatch::Value(index));
        }
        (_, Arg::Lend(tensor)) => *tensor,
        (_, Arg::Give(tensor)) => tensor,
    };
    let wrong_length = |bytes: u64| tensor.bytes() != bytes;
    match spec {
        InputSpec::Copied { bytes, demoted } => {
            if wrong_length(*bytes) {
                return Err(Mismatch::Length(index));
            }
            if !demoted && tensor.storage().is_some_and(|s| on_path(s)) {
                return Err(Mismatch::ManagedNow(index));
            }
        }
        InputSpec::Static {
            ptr, bytes, whole, ..
        } => {
            if wrong_length(*bytes) {
                return Err(Mismatch::Length(index));
            }
            let moved = tensor.address() != *ptr
                || whole
                    .is_some_and(|w| tensor.storage().is_none_or(|s| (s.ptr(), s.bytes()) != w));
            if moved {
                return Err(moved_static(index, *ptr, tensor));
            }
        }
        InputSpec::Managed {
            storage,
            offset,
            bytes,
        } => {
            if wrong_length(*bytes) {
                return Err(Mismatch::Length(index));
            }
            if tensor.offset() != *offset
                || tensor.storage().is_none_or(|s| !Arc::ptr_eq(s, storage))
            {
                return Err(Mismatch::ManagedMoved {
                    input: index,
                    recorded: storage.ptr().offset(*offset),
                    passed: tensor.address(),
                });
            }
        }
        InputSpec::Empty => {
            if !tensor.is_empty() {
                return Err(Mismatch::Length(index));
            }
        }
        InputSpec::Value(_) => return Err(Mismatch::Value(index)),
    }
    Ok(())
}

#[cold]
fn moved_static<D: Device>(input: usize, recorded: DevicePtr, tensor: &Tensor<D>) -> Mismatch {
    Mismatch::StaticMoved {
        input,
        recorded,
        passed: tensor.address(),
    }
}

#[inline]
fn liveness<D: Device>(node: &Node<D>, args: &[Arg<'_, D>]) -> Result<(), Mismatch> {
    if writes_over_held(node) {
        return Err(Mismatch::Held);
    }
    for consumed in &node.consumed {
        if consumed.storage.owners() != consumed.given(args) {
            return Err(Mismatch::NotGivenUp);
        }
    }
    Ok(())
}

/// Whether an ancestor's output is held whose memory the graph may write.
#[inline(always)]
pub(super) fn writes_over_held<D: Device>(node: &Node<D>) -> bool {
    node.must_be_dead
        .iter()
        .any(|d| d.live.word(d.word) & d.bits != 0)
}
