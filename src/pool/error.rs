//! What can go wrong in a pool: one variant for each thing a caller can act on.

use super::{Allocation, BackingError, SegmentId, StreamId};

/// Why a pool refused. Unless a variant says otherwise, the pool is as it was before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// No free block fits, and no segment could be added: give memory back, trim, raise the limit.
    #[error("out of memory: {requested} B asked for on stream {} ({rounded} B rounded); {state}", .stream.0)]
    OutOfMemory {
        /// Bytes asked for.
        requested: u64,
        /// Bytes after rounding.
        rounded: u64,
        /// The stream that asked.
        stream: StreamId,
        /// The pool in a line: reserved, live, free.
        state: String,
        /// What the backing said; none if the pool's own limit was in the way.
        source: Option<BackingError>,
    },

    /// The size cannot be rounded without leaving 64 bits: no pool could serve it.
    #[error("{requested} B is more than any pool can hold")]
    TooLarge {
        /// Bytes asked for.
        requested: u64,
    },

    /// The allocation is not in the books: freed before, orphaned and settled before, or of another pool.
    #[error("{allocation:?} is not live in this pool (freed twice, or from another pool?)")]
    NotLive {
        /// What was given.
        allocation: Allocation,
    },

    /// The checkpoint was taken of another pool.
    #[error("the checkpoint was taken of another pool")]
    ForeignCheckpoint,

    /// A block to adopt was not live when the checkpoint was taken.
    #[error("adopt[{index}]: {saved:?} was not live when the checkpoint was taken")]
    AdoptNotInCheckpoint {
        /// Position in `adopt`.
        index: usize,
        /// What was to be adopted.
        saved: Allocation,
    },

    /// A block has two adopters.
    #[error("adopt[{first}] and adopt[{second}] both name {saved:?}")]
    AdoptedTwice {
        /// Position of the first in `adopt`.
        first: usize,
        /// Position of the second in `adopt`.
        second: usize,
        /// The block both name.
        saved: Allocation,
    },

    /// The range to claim is not free memory of the pool.
    #[error(
        "{bytes} B at {address:#x} cannot be claimed: the range is not free, not in the pool, or not made of smallest blocks"
    )]
    Occupied {
        /// Where the range begins.
        address: u64,
        /// Its length.
        bytes: u64,
    },

    /// The configuration contradicts itself.
    #[error("invalid pool configuration: {field} = {value}: {rule}")]
    InvalidConfig {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it must obey.
        rule: &'static str,
    },

    /// The backing failed while memory was given back. What was given back before stays given back,
    /// and the books are right: calling again goes on.
    #[error("giving segment {} back failed", .segment.0)]
    Backing {
        /// The segment that was being given back.
        segment: SegmentId,
        /// What the backing said.
        source: BackingError,
    },
}
