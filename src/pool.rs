//! The pool: blocks in segments, and its whole state as a value that can be kept and returned to.
//!
//! A [`Pool`] hands out blocks of device memory by exact best fit, as PyTorch's caching allocator places
//! them. What is its own is [`Pool::checkpoint`] and [`Pool::restore`]: a checkpoint costs the copy of a
//! small table, a restore the comparison of what has changed. The pool knows no graph and no device,
//! only a [`Backing`], and it never touches the memory it hands out.
//!
//! ```
//! # use cudagraph_trees::pool::{Backing, BackingError, Pool, PoolConfig, StreamId, Tag};
//! use cudagraph_trees::pool::{Adopt, Freed, Unclaimed};
//! # struct Numbers(u64);
//! # impl Backing for Numbers {
//! #     fn reserve(&mut self, bytes: u64) -> Result<u64, BackingError> { self.0 += bytes; Ok(self.0 - bytes) }
//! #     fn map(&mut self, _: u64, _: u64) -> Result<(), BackingError> { Ok(()) }
//! #     fn unmap(&mut self, _: u64, _: u64) -> Result<(), BackingError> { Ok(()) }
//! #     fn release(&mut self, _: u64, _: u64) -> Result<(), BackingError> { Ok(()) }
//! # }
//! let mut pool = Pool::new(PoolConfig::default(), Numbers(1 << 21))?;
//! let stream = StreamId(0);
//! let kept = pool.alloc(stream, 512, Tag(1))?;
//! let dropped = pool.alloc(stream, 512, Tag(2))?;
//! let checkpoint = pool.checkpoint();
//!
//! pool.free(dropped)?;
//! let later = pool.alloc(stream, 4096, Tag(3))?;
//! let done = pool.restore(&checkpoint, &[Adopt { saved: dropped, tag: Tag(4) }], Unclaimed::Free)?;
//!
//! assert_eq!(pool.snapshot().layout(), "S0@st0[A512 A512 F2096128]");
//! assert!(pool.contains(kept) && pool.contains(done.adopted[0]) && !pool.contains(dropped));
//! assert_eq!(pool.free(later)?, Freed::Orphan); // once
//! assert!(pool.free(later).is_err());
//! # Ok::<(), cudagraph_trees::pool::PoolError>(())
//! ```

mod backing;
mod block;
mod books;
mod checkpoint;
mod claim;
mod config;
mod error;
mod index;
mod orphans;
mod pages;
mod pin;
mod query;
mod restore;
mod segment;
mod snapshot;
mod stats;
mod trim;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use backing::{Backing, BackingError};
pub use block::{Allocation, AllocationId, Freed, LiveBlock, SegmentId, StreamId, Tag};
pub use checkpoint::Checkpoint;
pub use config::{PoolConfig, SizeClass};
pub use error::PoolError;
pub use pin::Pins;
pub use restore::{Adopt, Restored, Unclaimed};
pub use snapshot::{BlockSnapshot, LiveCheck, OwnerSnapshot, PoolSnapshot, SegmentSnapshot};
pub use stats::{PoolStats, Stat};
pub use trim::Trimmed;

use books::Books;
use checkpoint::{Saved, Token};
use index::FreeList;
use orphans::Orphans;
use restore::Scratch;
use segment::{Segment, Segments};

/// Blocks of device memory, in segments that a [`Backing`] gives. See the [module](self).
///
/// Dropping the pool gives all segments back, also those with live blocks.
pub struct Pool<B: Backing> {
    /// Sizes and limits.
    config: PoolConfig,
    /// Where segments come from.
    backing: B,
    /// The state: what a checkpoint keeps.
    books: Books,
    /// The segments held now.
    segments: Segments,
    /// Streams seen; the lists of stream `n` and its small or large class are `2n` and `2n + 1`.
    streams: Vec<StreamId>,
    /// The stream of the last allocation, by position in `streams`.
    last_stream: usize,
    /// The id of the next allocation.
    next_id: u64,
    /// Blocks that a restore took out of the books and whose owners have not freed them yet.
    orphans: Orphans,
    /// Saved states, by the keys of checkpoints.
    saved: Vec<Saved>,
    /// Places in `saved` that no checkpoint names.
    vacant: Vec<u32>,
    /// What the pool shares with its checkpoints.
    token: Arc<Token>,
    /// In each allocation, to know it again: from the address of `token`.
    mark: u32,
    /// Ranges that were unmapped and that the backing would not take back yet.
    unreleased: Vec<(SegmentId, u64, u64)>,
    /// How many keep a segment, by its number, though nothing in it is live.
    pinned: BTreeMap<u32, usize>,
    /// Figures.
    stats: PoolStats,
    /// Memory for restores.
    scratch: Scratch,
}

impl<B: Backing> Pool<B> {
    /// A pool without segments.
    ///
    /// # Errors
    /// [`PoolError::InvalidConfig`].
    pub fn new(config: PoolConfig, backing: B) -> Result<Self, PoolError> {
        config.validate()?;
        let token = Arc::new(Token::default());
        // Tokens are at least 16 bytes apart.
        let mark = (Arc::as_ptr(&token).addr() >> 4) as u32;
        Ok(Self {
            books: Books::new(config.min_block.trailing_zeros()),
            config,
            backing,
            segments: Segments::default(),
            streams: Vec::new(),
            last_stream: 0,
            next_id: 1,
            orphans: Orphans::default(),
            saved: Vec::new(),
            vacant: Vec::new(),
            token,
            mark,
            unreleased: Vec::new(),
            pinned: BTreeMap::new(),
            stats: PoolStats::default(),
            scratch: Scratch::default(),
        })
    }

    /// Hands out a block of at least `bytes` bytes for work on `stream`, owned by `tag`.
    ///
    /// The smallest free block of the stream and size class that fits, then the segment registered first, then the
    /// lowest address; without one, a new segment. O(log free blocks of a size), and the backing's time
    /// for a new segment. A request for no bytes gets [`Allocation::EMPTY`].
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`], [`PoolError::TooLarge`]; the pool is as it was.
    #[inline]
    pub fn alloc(
        &mut self,
        stream: StreamId,
        bytes: u64,
        tag: Tag,
    ) -> Result<Allocation, PoolError> {
        if bytes == 0 {
            return Ok(Allocation::EMPTY);
        }
        let slot = self.take_block(stream, bytes, tag)?;
        let block = self.books.records.get(slot);
        Ok(Allocation {
            id: self.next_id - 1,
            address: block.address,
            bytes: block.size,
            slot,
            pool: self.mark,
        })
    }

    /// Makes a block live, with the next id; returns its slot. What `alloc` returns is put together in its caller, and so
    /// in registers.
    fn take_block(&mut self, stream: StreamId, bytes: u64, tag: Tag) -> Result<u32, PoolError> {
        let rounded = self
            .config
            .round(bytes)
            .ok_or_else(|| PoolError::TooLarge { requested: bytes })?;
        let class = self.config.class(rounded);
        let list = self.list(stream, class);
        let fit = self
            .books
            .best_fit(list, rounded)
            .map(|found| (found, self.books.records.get(found.slot).size));
        let (slot, size) = match fit {
            Some((found, size)) if self.config.may_serve(rounded, size) => {
                self.books.take(list, found);
                (found.slot, size)
            }
            _ => self.add_segment(stream, class, list, bytes, rounded)?,
        };
        let split = self.config.splits(rounded, size);
        let id = self.next_id();
        let (_, size) = self.books.occupy(slot, rounded, split, id, tag.0, bytes);
        self.stats.live_blocks.gain(1);
        self.stats.live_bytes.gain(size);
        self.stats.requested_bytes.gain(bytes);
        Ok(slot)
    }

    /// Frees a block. O(log free blocks of a size).
    ///
    /// The first free of a block that a restore orphaned does nothing.
    ///
    /// # Errors
    /// [`PoolError::NotLive`]: freed twice, or of another pool; the pool is as it was.
    #[inline]
    pub fn free(&mut self, allocation: Allocation) -> Result<Freed, PoolError> {
        if !self.contains(allocation) {
            return self.free_absent(allocation);
        }
        let (address, bytes, requested) = self.books.vacate(allocation.slot);
        self.stats.live_blocks.lose(1);
        self.stats.live_bytes.lose(bytes);
        self.stats.requested_bytes.lose(requested);
        Ok(Freed::Block { address, bytes })
    }

    /// Frees what is not in the books.
    #[cold]
    fn free_absent(&mut self, allocation: Allocation) -> Result<Freed, PoolError> {
        if allocation.is_empty() {
            Ok(Freed::Empty)
        } else if allocation.pool == self.mark && self.orphans.remove(allocation.id) {
            Ok(Freed::Orphan)
        } else {
            Err(PoolError::NotLive { allocation })
        }
    }

    /// Whether an allocation is in the books: live, and of this pool. O(1).
    #[inline]
    #[must_use]
    pub fn contains(&self, allocation: Allocation) -> bool {
        let records = &self.books.records;
        allocation.pool == self.mark
            && !allocation.is_empty()
            && records
                .owners
                .find(allocation.slot)
                .is_some_and(|owner| owner.id == allocation.id)
            && records.get(allocation.slot).address == allocation.address
    }

    /// Gives a live block another owner. A restore that keeps the block keeps the tag too. An empty allocation has no
    /// owner: nothing is done.
    ///
    /// # Errors
    /// [`PoolError::NotLive`].
    pub fn set_tag(&mut self, allocation: Allocation, tag: Tag) -> Result<(), PoolError> {
        if allocation.is_empty() {
            return Ok(());
        }
        if !self.contains(allocation) {
            return Err(PoolError::NotLive { allocation });
        }
        self.books.records.owners.edit(allocation.slot).tag = tag.0;
        Ok(())
    }

    /// Keeps the present state, to be returned to by [`Pool::restore`]. O(blocks / 512 + changes since the last
    /// checkpoint): 128 bytes for each 512 blocks near one that changed, 4 bytes for other 512, and the heads of the free lists.
    #[must_use = "dropping a checkpoint lets go of it"]
    pub fn checkpoint(&mut self) -> Checkpoint {
        self.settle_dropped();
        let key = self.vacant.pop().unwrap_or_else(|| {
            self.saved.push(Saved::EMPTY);
            self.saved.len() as u32 - 1
        });
        let saved = &mut self.saved[key as usize];
        self.books.records.save(&mut saved.tables);
        self.books.state.save(&mut saved.state);
        saved.held = true;
        saved.epoch = self.segments.epoch;
        self.stats.checkpoints += 1;
        self.stats.checkpoints_held += 1;
        Checkpoint::new(&self.token, key)
    }

    /// Lets go of the states of dropped checkpoints.
    fn settle_dropped(&mut self) {
        let before = self.vacant.len();
        self.token.take_dropped(&mut self.vacant);
        for &key in &self.vacant[before..] {
            let saved = &mut self.saved[key as usize];
            self.books.records.forget(&mut saved.tables);
            saved.held = false;
            self.stats.checkpoints_held -= 1;
        }
    }

    /// The next allocation's id.
    #[inline]
    fn next_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    /// The free lists of a stream and class; O(1) for the stream of the last call, else O(streams).
    #[inline]
    fn list(&mut self, stream: StreamId, class: SizeClass) -> usize {
        if self.streams.get(self.last_stream) != Some(&stream) {
            self.last_stream = self
                .streams
                .iter()
                .position(|seen| *seen == stream)
                .unwrap_or_else(|| {
                    self.streams.push(stream);
                    self.streams.len() - 1
                });
        }
        2 * self.last_stream + class as usize
    }

    /// Adds a segment for a request that no free block can serve; returns its block, out of the index, and its length.
    #[cold]
    fn add_segment(
        &mut self,
        stream: StreamId,
        class: SizeClass,
        list: usize,
        requested: u64,
        rounded: u64,
    ) -> Result<(u32, u64), PoolError> {
        let bytes = self
            .config
            .segment(rounded)
            .ok_or(PoolError::TooLarge { requested })?;
        let address = self
            .map_segment(bytes)
            .map_err(|source| PoolError::OutOfMemory {
                requested,
                rounded,
                stream,
                state: self.state_line(),
                source,
            })?;
        let number = self.segments.next_number;
        tracing::debug!(segment = number, stream = stream.0, bytes, "segment added");
        if self.books.state.lists.len() <= list {
            self.books.state.lists.resize(list + 1, FreeList::EMPTY);
        }
        self.segments.push(Segment {
            number,
            class,
            stream,
            list: list as u32,
            address,
            bytes,
        });
        let slot = self.books.add_segment(number, list as u32, address, bytes);
        self.books.unindex(slot);
        self.stats.segments.gain(1);
        self.stats.reserved_bytes.gain(bytes);
        Ok((slot, bytes))
    }

    /// Reserves and maps a range, or leaves everything as it was.
    fn map_segment(&mut self, bytes: u64) -> Result<u64, Option<BackingError>> {
        let reserved = self.stats.reserved_bytes.current.checked_add(bytes);
        if reserved.is_none_or(|sum| self.config.limit.is_some_and(|limit| sum > limit)) {
            return Err(None);
        }
        if self.segments.next_number == u32::MAX {
            return Err(Some("segment numbers are used up".into()));
        }
        let address = self.backing.reserve(bytes)?;
        let sound = address != 0
            && address.is_multiple_of(self.config.min_block)
            && address.checked_add(bytes).is_some()
            && !self.segments.overlaps(address, bytes);
        if !sound {
            return Err(Some(
                format!("the backing reserved a range it must not: {address:#x}+{bytes}").into(),
            ));
        }
        if let Err(error) = self.backing.map(address, bytes) {
            if self.backing.release(address, bytes).is_err() {
                self.unreleased
                    .push((SegmentId(self.segments.next_number), address, bytes));
            }
            return Err(Some(error));
        }
        Ok(address)
    }
}

impl<B: Backing> Drop for Pool<B> {
    fn drop(&mut self) {
        for segment in self.segments.as_slice() {
            let (address, bytes) = (segment.address, segment.bytes);
            let done = self
                .backing
                .unmap(address, bytes)
                .and_then(|()| self.backing.release(address, bytes));
            if let Err(error) = done {
                tracing::warn!(segment = segment.number, %error, "a dropped pool's segment was not given back");
            }
        }
        for (segment, address, bytes) in self.unreleased.drain(..) {
            if let Err(error) = self.backing.release(address, bytes) {
                tracing::warn!(segment = segment.0, %error, "a dropped pool's range was not given back");
            }
        }
    }
}
