//! The names a pool speaks in: streams, tags, allocations, live blocks.

use std::fmt;

/// A stream, as far as the pool is concerned: which free lists. A block is used again only on the
/// stream its segment was made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u32);

/// Who owns a block; opaque to the pool (a storage's identity, say). 0 is nobody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

/// A segment: its number in order of registration, from 0. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u32);

/// The identity of one allocation in its pool. Grows with every allocation, and is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocationId(pub(super) u64);

impl AllocationId {
    /// The number, for printing.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

/// A block that was handed out. A name, not an owner: dropping it frees nothing.
///
/// It also says (in 32 bits) which pool handed it out; printing leaves that out.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Allocation {
    /// Identity, never 0 except in `EMPTY`.
    pub(super) id: u64,
    /// Where the block begins.
    pub(super) address: u64,
    /// Length of the block.
    pub(super) bytes: u64,
    /// The block's record: the same for as long as it lives.
    pub(super) slot: u32,
    /// The pool's mark.
    pub(super) pool: u32,
}

impl Allocation {
    /// What a request for no bytes gets: address 0, not in the books, free it as often as you like.
    pub const EMPTY: Allocation = Allocation {
        id: 0,
        address: 0,
        bytes: 0,
        slot: 0,
        pool: 0,
    };

    /// Its identity.
    #[must_use]
    pub fn id(&self) -> AllocationId {
        AllocationId(self.id)
    }

    /// Where it begins; 0 if empty.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length of the block in bytes: at least what was asked for, and more than its rounded size where
    /// the rest was too little to be split off. 0 if empty.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is [`Allocation::EMPTY`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.id == 0
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Allocation(#{} {:#x}+{})",
            self.id, self.address, self.bytes
        )
    }
}

/// What became of an allocation that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// Its block is free.
    Block {
        /// Where the block began.
        address: u64,
        /// How long it was.
        bytes: u64,
    },
    /// A restore had taken it out of the books: nothing was done. Its block may have another owner by now.
    Orphan,
    /// It was empty: nothing was done.
    Empty,
}

/// A block in the books that has an owner (or had, in [`Restored`](super::Restored)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Its name.
    pub allocation: Allocation,
    /// Its owner.
    pub tag: Tag,
    /// Its segment.
    pub segment: SegmentId,
    /// Where it begins in its segment, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The bytes that were asked for.
    pub requested: u64,
}
