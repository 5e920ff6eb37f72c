//! May this node be replayed now? Nothing is changed by asking.

use std::sync::Arc;

use super::args::Arg;
use super::node::{InputSpec, Node};
use crate::device::Device;
use crate::storage::Storage;

/// Why a node may not be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// Another number of inputs.
    Count,
    /// The input is a tensor where a host value was, or the other way round, or another host value.
    Value(usize),
    /// The input has another length.
    Length(usize),
    /// The static input lies elsewhere.
    StaticMoved(usize),
    /// The input is not the output of an earlier node that it was.
    ManagedMoved(usize),
    /// The input was copied in, and is an output of an earlier node now: the function would see a copy where it is to see the output itself.
    ManagedNow(usize),
    /// An output that was dead when the recording began is held now.
    Held,
    /// An output that died during the recording is held by more than this call's given inputs.
    NotGivenUp,
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
        let tensor = match (spec, arg) {
            (InputSpec::Value(recorded), Arg::Value(value)) if Arc::ptr_eq(recorded, value) => {
                continue;
            }
            (InputSpec::Value(_), _) | (_, Arg::Value(_) | Arg::Taken) => {
                return Err(Mismatch::Value(index));
            }
            (_, Arg::Lend(tensor)) => *tensor,
            (_, Arg::Give(tensor)) => tensor,
        };
        match spec {
            InputSpec::Copied { bytes } => {
                if tensor.bytes() != *bytes {
                    return Err(Mismatch::Length(index));
                }
                if tensor.storage().is_some_and(|s| on_path(s)) {
                    return Err(Mismatch::ManagedNow(index));
                }
            }
            InputSpec::Static { ptr, bytes, whole } => {
                if tensor.bytes() != *bytes {
                    return Err(Mismatch::Length(index));
                }
                let moved = tensor.address() != *ptr
                    || whole.is_some_and(|w| {
                        tensor.storage().is_none_or(|s| (s.ptr(), s.bytes()) != w)
                    });
                if moved {
                    return Err(Mismatch::StaticMoved(index));
                }
            }
            InputSpec::Managed {
                storage,
                offset,
                bytes,
            } => {
                if tensor.bytes() != *bytes {
                    return Err(Mismatch::Length(index));
                }
                if tensor.offset() != *offset
                    || tensor.storage().is_none_or(|s| !Arc::ptr_eq(s, storage))
                {
                    return Err(Mismatch::ManagedMoved(index));
                }
            }
            InputSpec::Empty => {
                if !tensor.is_empty() {
                    return Err(Mismatch::Length(index));
                }
            }
            InputSpec::Value(_) => return Err(Mismatch::Value(index)),
        }
    }
    if node
        .must_be_dead
        .iter()
        .any(|d| d.live.word(d.word) & d.bits != 0)
    {
        return Err(Mismatch::Held);
    }
    for consumed in &node.consumed {
        if consumed.storage.owners() != consumed.given(args) {
            return Err(Mismatch::NotGivenUp);
        }
    }
    Ok(())
}
