//! A node: one recording, what it took, what it gives, and when it may be replayed.

use std::ops::Range;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::args::{Arg, Value};
use super::{FunctionKey, NodeKey};
use crate::allocator::Baked;
use crate::device::{Device, DevicePtr, GraphInfo};
use crate::pool::{Allocation, Checkpoint};
use crate::storage::{LiveMask, Storage, Tensor, WeakTensor};

/// A node's number within its tree, in order of recording. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// Which variant of which function.
pub(super) type VariantKey = (FunctionKey, usize);

// What there is mostly one of lies in the node.

/// What each passed input was.
pub(super) type InputSpecs<D> = SmallVec<[InputSpec<D>; 1]>;

/// What each output was.
pub(super) type OutputSpecs<D> = SmallVec<[OutputSpec<D>; 1]>;

/// The storages that a graph makes, and how many outputs lie in each.
pub(super) type OutputSlots<D> = SmallVec<[(Arc<Storage<D>>, u64); 1]>;

/// Ranges of addresses: disjoint, ascending.
pub(super) type Footprint = SmallVec<[Range<u64>; 1]>;

/// One recording of a variant in the memory state its ancestors left. What a replay touches comes first.
#[repr(C)]
pub(super) struct Node<D: Device> {
    /// Which of the slots are held.
    pub(super) live: Arc<LiveMask>,
    /// One for each passed input.
    pub(super) inputs: InputSpecs<D>,
    /// Ancestors' outputs whose memory the graph writes, or may: they must be dead.
    pub(super) must_be_dead: Box<[DeadBits]>,
    pub(super) slots: OutputSlots<D>,
    pub(super) outputs: OutputSpecs<D>,
    /// When it was used last, by the tree's count of recordings and replays.
    pub(super) used: u64,
    /// As what of that it is listed among the leaves, if it is.
    pub(super) listed: u64,
    pub(super) id: NodeId,
    /// The number of the stream on which it was noted last that what it has the addresses of is used: once is enough, for memory that it lives no longer than.
    pub(super) noted: u32,
    /// Whether it may be replayed the fast way.
    pub(super) is_plain: bool,
    /// Whether an output is a bound input, which may die.
    pub(super) returns_bound: bool,
    /// It was recorded on a path that did not begin at a root: `must_be_dead` does not speak of all its ancestors.
    pub(super) apart: bool,
    pub(super) graph: Launchable<D>,
    /// In order of creation.
    pub(super) children: SmallVec<[(VariantKey, NodeKey); 2]>,
    pub(super) variant: VariantKey,
    pub(super) parent: Option<NodeKey>,
    /// The addresses that the graph may write in the pool: disjoint, ascending.
    pub(super) footprint: Footprint,
    /// Ancestors' outputs that died during the recording: they are held by this call's given inputs alone.
    pub(super) consumed: Box<[Consumed<D>]>,
    /// Host values that go with them.
    pub(super) values: Box<[Value]>,
    /// The pool as it was when the recording ended.
    pub(super) checkpoint: Checkpoint,
    /// The outputs of the path that were held then, and their blocks.
    pub(super) saved: SmallVec<[(Arc<Storage<D>>, Allocation); 1]>,
    /// Which inputs are copied, and where to.
    pub(super) copied: Box<[u32]>,
    pub(super) copies: Box<[Range<u64>]>,
}

/// An executable graph, with what it needs to live.
#[repr(C)]
pub(super) struct Launchable<D: Device> {
    pub(super) exec: D::Exec,
    pub(super) info: GraphInfo,
    /// What the executable was made of, if the tree keeps that.
    pub(super) template: Option<Arc<D::Graph>>,
    /// What else than the tree's pool was used during the capture; of that, the segments are pinned as long as the node is there.
    pub(super) baked: Baked<D>,
}

/// What an input was at the recording.
pub(super) enum InputSpec<D: Device> {
    /// Zero bytes.
    Empty,
    /// An output of an ancestor, this range of it.
    Managed {
        storage: Arc<Storage<D>>,
        offset: u64,
        bytes: u64,
    },
    /// Declared static, at this address. `whole` is the place of the whole storage where an output is a view of it. Of memory outside of trees, the storage
    /// is watched: when it dies, the node goes.
    Static {
        ptr: DevicePtr,
        bytes: u64,
        whole: Option<(DevicePtr, u64)>,
        storage: Option<Weak<Storage<D>>>,
    },
    /// Copied into the pool. `demoted`: although it is an output of the path, perhaps.
    Copied { bytes: u64, demoted: bool },
    /// A host value.
    Value(Value),
}

impl<D: Device> InputSpec<D> {
    /// Whether it may be another tree's output, used in place: of that every use is noted.
    pub(super) fn may_be_foreign(&self) -> bool {
        matches!(self, InputSpec::Static { storage: None, .. })
    }
}

/// What an output was at the recording.
pub(super) enum OutputSpec<D: Device> {
    /// Zero bytes.
    Empty,
    /// In a storage that the graph makes.
    Fresh {
        slot: usize,
        offset: u64,
        bytes: u64,
    },
    /// In the storage of a passed input: a managed or a static one.
    Input {
        input: usize,
        offset: u64,
        bytes: u64,
    },
    /// In the storage of an input bound at registration.
    Bound(WeakTensor<D>),
    /// Memory outside of the pool that the closure returned of its own.
    Constant(Tensor<D>),
}

/// Bits of one ancestor's mask.
pub(super) struct DeadBits {
    pub(super) live: Arc<LiveMask>,
    pub(super) word: usize,
    pub(super) bits: u64,
}

/// An ancestor's output that died during the recording.
pub(super) struct Consumed<D: Device> {
    pub(super) storage: Arc<Storage<D>>,
    /// The passed inputs that lie in it; and those that are copied in from wherever they lie, which may be there.
    pub(super) inputs: SmallVec<[usize; 2]>,
}

impl<D: Device> Consumed<D> {
    /// How many handles on it a call gives up.
    pub(super) fn given(&self, args: &[Arg<'_, D>]) -> u64 {
        let given = |i: &&usize| {
            let storage = args[**i].tensor().and_then(Tensor::storage);
            args[**i].is_given() && storage.is_some_and(|s| Arc::ptr_eq(s, &self.storage))
        };
        self.inputs.iter().filter(given).count() as u64
    }
}

/// The addresses of these storages, as disjoint ranges in ascending order.
pub(super) fn footprint<D: Device>(storages: &[Arc<Storage<D>>]) -> Footprint {
    let mut ranges: Footprint = storages.iter().map(|s| s.range()).collect();
    ranges.sort_unstable_by_key(|r| r.start);
    ranges.dedup_by(|range, last| {
        let joined = range.start <= last.end;
        if joined {
            last.end = last.end.max(range.end);
        }
        joined
    });
    ranges.shrink_to_fit();
    ranges
}

impl<D: Device> Node<D> {
    /// Whether the graph may write over a storage that is held: it lies in the footprint, and is not among what the call gives up.
    pub(super) fn overwrites(&self, held: &Arc<Storage<D>>) -> bool {
        let range = held.range();
        let next = self.footprint.partition_point(|r| r.end <= range.start);
        self.footprint
            .get(next)
            .is_some_and(|r| r.start < range.end)
            && !self.consumed.iter().any(|c| Arc::ptr_eq(&c.storage, held))
    }

    /// Whether the graph may write over an input that is held, because its generation has ended and this call copies it in first. Not so where the
    /// copies themselves would write over it: they are all one piece of work.
    pub(super) fn spends(
        &self,
        held: &Arc<Storage<D>>,
        args: &[Arg<'_, D>],
        fed: &[Arc<Storage<D>>],
    ) -> bool {
        fed.iter().any(|f| Arc::ptr_eq(f, held))
            && self.slots_of(held, args).all(|(slot, from)| {
                slot.is_some_and(|slot| {
                    self.copies.iter().enumerate().all(|(other, to)| {
                        let apart = to.end <= from.start || from.end <= to.start;
                        // Onto itself, a copy changes nothing.
                        apart || (other == slot && *to == from)
                    })
                })
            })
    }

    /// Whether a call's inputs that lie in a storage are all copied in.
    pub(super) fn only_copies(&self, storage: &Arc<Storage<D>>, args: &[Arg<'_, D>]) -> bool {
        self.slots_of(storage, args).all(|(slot, _)| slot.is_some())
    }

    /// A call's inputs that lie in a storage: the number of the copy, if it is copied, and where it lies.
    fn slots_of<'a>(
        &'a self,
        storage: &'a Arc<Storage<D>>,
        args: &'a [Arg<'_, D>],
    ) -> impl Iterator<Item = (Option<usize>, Range<u64>)> + 'a {
        args.iter().enumerate().filter_map(move |(index, arg)| {
            let tensor = arg.tensor()?;
            let lies = tensor.storage().is_some_and(|s| Arc::ptr_eq(s, storage));
            let slot = self.copied.iter().position(|c| *c as usize == index);
            let start = tensor.address().0;
            lies.then_some((slot, start..start + tensor.bytes()))
        })
    }
}
