//! Private pools as their users see them: handles that count as uses, statistics, checkpoints.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use crate::device::{Device, DevicePtr, Mark};
use crate::error::Result;
use crate::pool::{
    Adopt, Allocation, Checkpoint, LiveBlock, LiveCheck, Pins, PoolConfig, PoolError, PoolSnapshot,
    PoolStats, Restored, SegmentId, Tag, Unclaimed,
};
use crate::storage::{Birth, Source, Storage, Tensor};

use super::{
    CustomBacking, Elsewhere, Memory, Origin, PoolKey, Shared, alloc_in, refuse_tensor, with_pool,
};

/// A pool's number within its allocator, in order of creation; 0 is the default pool. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u32);

impl PoolId {
    /// The default pool.
    pub const DEFAULT: PoolId = PoolId(0);
}

impl fmt::Debug for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{}", self.0)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How a private pool is made.
#[derive(Default)]
pub struct PoolOptions {
    /// Sizes and rules.
    pub config: PoolConfig,
    /// Where its segments come from; the device's memory if none is given.
    pub backing: Option<CustomBacking>,
}

/// A use of a private pool. While one is held (by a graph, a capture, or the caller) the pool keeps its memory.
///
/// Clones are further uses.
pub struct PoolHandle<D: Device> {
    pub(super) shared: Arc<Shared<D>>,
    pub(super) key: PoolKey,
    pub(super) id: PoolId,
}

/// A kept state of a private pool, with what its blocks' owners were.
#[derive(Debug)]
pub struct PoolCheckpoint {
    inner: Checkpoint,
    /// By address.
    live: Vec<LiveBlock>,
}

/// Memory that is held although a checkpoint may not know it.
pub(crate) struct Claim {
    /// Its addresses.
    pub(crate) range: Range<u64>,
    /// Its owner.
    pub(crate) tag: Tag,
    /// The block that its owner has in the books, if it has one: a restore may keep it.
    pub(crate) owned: Option<Allocation>,
}

/// What a restore did, in bytes and blocks.
#[derive(Debug)]
pub struct PoolRestored {
    /// Live as before, with the owner they had.
    pub kept: usize,
    /// Live, now owned by the tensors that were to adopt them.
    pub adopted: usize,
    /// Live in the checkpoint and owned by nobody: free now, or (with [`Unclaimed::Keep`]) still live, to be freed by address.
    pub unclaimed: Vec<DevicePtr>,
    /// Live before, not in the checkpoint: their tensors own nothing any more.
    pub orphaned: Vec<DevicePtr>,
}

impl<D: Device> PoolHandle<D> {
    /// The pool's number.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.id
    }

    /// How many graphs, captures, routes and handles use it, this one included.
    #[must_use]
    pub fn uses(&self) -> usize {
        self.shared.books().pools[self.key].uses
    }

    /// Allocates from this pool, whatever the routes say.
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`], [`Error::ForeignStream`](crate::Error::ForeignStream), with the pool as it was.
    #[track_caller]
    pub fn alloc(&self, stream: &D::Stream, bytes: u64) -> Result<Tensor<D>> {
        alloc_in(
            &self.shared,
            Origin::Pool(self.key),
            stream,
            bytes,
            Location::caller(),
        )
    }

    /// Its statistics. A restore or a replay never changes peaks and totals.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        with_pool(&self.shared, self.key, |p| p.stats())
    }

    /// Sets its peaks to what holds now, and its totals to zero.
    pub fn reset_peaks(&self) {
        with_pool(&self.shared, self.key, |p| p.reset_peaks());
    }

    /// Its blocks, in order of segment and address.
    #[must_use]
    pub fn snapshot(&self) -> PoolSnapshot {
        with_pool(&self.shared, self.key, |p| p.snapshot())
    }

    /// Whether the live blocks are exactly those at `addresses`.
    #[must_use]
    pub fn check_live(&self, addresses: &[u64]) -> LiveCheck {
        with_pool(&self.shared, self.key, |p| p.check_live(addresses))
    }

    /// Segment and offset of an address.
    #[must_use]
    pub fn locate(&self, ptr: DevicePtr) -> Option<(SegmentId, u64)> {
        with_pool(&self.shared, self.key, |p| p.locate(ptr.0))
    }

    /// A tensor over memory of this pool that owns nothing until a restore lets it adopt the block there.
    #[track_caller]
    pub fn unowned(&self, ptr: DevicePtr, bytes: u64) -> Tensor<D> {
        let id = self.shared.next_storage();
        Tensor::first(Storage::unowned(
            id,
            ptr,
            bytes,
            Source::Pool(self.memory()),
            Location::caller(),
        ))
    }

    /// Frees the live block that starts at `ptr`, in order on `stream`, whoever owned it. False where there is none.
    ///
    /// # Errors
    /// [`Error::ForeignStream`](crate::Error::ForeignStream), with nothing freed.
    pub fn free_at(&self, stream: &D::Stream, ptr: DevicePtr) -> Result<bool> {
        self.shared.refuse_stream(stream)?;
        let mut books = self.shared.books();
        let Some(block) = books.pools[self.key].pool.find(ptr.0) else {
            return Ok(false);
        };
        books.free(&self.shared.device, self.key, block, Some(stream), 0);
        Ok(true)
    }

    /// Keeps the pool's state as it is now. Costs about a microsecond for ten thousand blocks, besides the list of owners.
    #[must_use]
    pub fn checkpoint(&self) -> PoolCheckpoint {
        let (inner, mut live) = with_pool(&self.shared, self.key, |p| (p.checkpoint(), p.live()));
        live.sort_unstable_by_key(|b| b.allocation.address());
        PoolCheckpoint { inner, live }
    }

    /// Brings the pool back to a kept state. Tensors in `adopt` become the owners of the blocks at their addresses; a tensor that owned
    /// such a block until now does not any more. Total and transactional.
    ///
    /// # Errors
    /// [`PoolError::ForeignCheckpoint`]; [`PoolError::AdoptNotInCheckpoint`] where no live block of the checkpoint starts at a tensor's storage, or the
    /// storage is not this pool's; [`PoolError::AdoptedTwice`] for two tensors at one address; [`Error::Stale`](crate::Error::Stale);
    /// [`Error::UsedElsewhere`](crate::Error::UsedElsewhere); [`Error::ForeignTensor`](crate::Error::ForeignTensor) and
    /// [`Error::ForeignStream`](crate::Error::ForeignStream). Nothing has changed then.
    pub fn restore(
        &self,
        stream: &D::Stream,
        checkpoint: &PoolCheckpoint,
        adopt: &[&Tensor<D>],
        unclaimed: Unclaimed,
    ) -> Result<PoolRestored> {
        self.shared.refuse_stream(stream)?;
        self.refuse_used()?;
        let mut entries = Vec::with_capacity(adopt.len());
        let mut storages = Vec::with_capacity(adopt.len());
        for (index, tensor) in adopt.iter().enumerate() {
            tensor.check()?;
            refuse_tensor(&self.shared.device, tensor, || {
                format!("tensor {index} of those that are to adopt")
            })?;
            let absent = PoolError::AdoptNotInCheckpoint {
                index,
                saved: Allocation::EMPTY,
            };
            // The death of a storage of another pool, or of the caller's own memory, would not free the block.
            let storage = tensor.storage().filter(|s| s.in_pool(self));
            let Some(storage) = storage else {
                return Err(absent.into());
            };
            let address = storage.ptr().0;
            let at = checkpoint
                .live
                .binary_search_by_key(&address, |b| b.allocation.address());
            let Ok(at) = at else {
                return Err(absent.into());
            };
            entries.push(Adopt {
                saved: checkpoint.live[at].allocation,
                tag: Tag(storage.id().0),
            });
            storages.push(storage);
        }
        refuse_twice(&entries)?;
        // Blocks that are live all along under another owner: taken from it first, so that they get a name it does not know.
        let taken: Vec<Allocation> = entries
            .iter()
            .zip(&storages)
            .filter(|(entry, storage)| storage.block() != Some(entry.saved))
            .map(|(entry, _)| entry.saved)
            .collect();
        let restored =
            self.restore_taking(stream, &checkpoint.inner, &entries, &taken, unclaimed)?;
        for (storage, block) in storages.iter().zip(&restored.adopted) {
            if storage.block() != Some(*block) {
                self.let_go(storage.adopt(*block, stream.clone()));
            }
        }
        Ok(PoolRestored {
            kept: restored.kept,
            adopted: restored.adopted.len(),
            unclaimed: match unclaimed {
                Unclaimed::Free => restored
                    .freed
                    .iter()
                    .map(|b| DevicePtr(b.allocation.address()))
                    .collect(),
                Unclaimed::Keep => restored
                    .unclaimed
                    .iter()
                    .map(|b| DevicePtr(b.address()))
                    .collect(),
            },
            orphaned: restored
                .orphaned
                .iter()
                .map(|b| DevicePtr(b.allocation.address()))
                .collect(),
        })
    }

    /// Of a tree's pool, the streams that the tree's next run waits for.
    pub(crate) fn elsewhere(&self) -> Option<Arc<Elsewhere<D>>> {
        self.shared.books().pools[self.key].elsewhere.clone()
    }

    /// Refuses where dead blocks are in use on other streams still: nothing here knows what would be put in their place.
    fn refuse_used(&self) -> Result<()> {
        let mut books = self.shared.books();
        books.free_deferred(&self.shared.device);
        match books.deferred_in(self.key) {
            0 => Ok(()),
            blocks => Err(crate::Error::UsedElsewhere {
                pool: self.id,
                blocks,
            }),
        }
    }

    /// Lets go of segments that a graph had [pinned](super::Baked::pins).
    pub(crate) fn unpin(&self, pins: &Pins) {
        with_pool(&self.shared, self.key, |p| p.unpin(pins));
    }

    /// The pool's own checkpoint, for rooms that keep the list of owners themselves.
    pub(crate) fn checkpoint_blocks(&self) -> Checkpoint {
        with_pool(&self.shared, self.key, |p| p.checkpoint())
    }

    /// Restores, and marks what became free; the caller moves ownership. Those blocks of `taken` that are live are freed before. They are all
    /// adopted, by one tensor each.
    fn restore_taking(
        &self,
        stream: &D::Stream,
        checkpoint: &Checkpoint,
        adopt: &[Adopt],
        taken: &[Allocation],
        unclaimed: Unclaimed,
    ) -> Result<Restored> {
        let mut books = self.shared.books();
        let pool = &mut books.pools[self.key].pool;
        // Of another pool's checkpoint no block is live here, so a restore that is refused has freed none.
        for block in taken {
            if pool.contains(*block) {
                pool.free(*block)?;
            }
        }
        let restored = pool.restore(checkpoint, adopt, unclaimed)?;
        mark_restored(&self.shared.device, stream, &restored, &[]);
        Ok(restored)
    }

    /// Restores, and makes the ranges in `claim` live besides: memory that is held although the checkpoint does not know it. What nobody adopts is
    /// free. The blocks adopted and claimed, in order.
    pub(crate) fn restore_and_claim(
        &self,
        stream: &D::Stream,
        checkpoint: &Checkpoint,
        adopt: &[Adopt],
        claim: &[Claim],
    ) -> Result<(Vec<Allocation>, Vec<Allocation>)> {
        let mut books = self.shared.books();
        let pool = &mut books.pools[self.key].pool;
        let restored = pool.restore(checkpoint, adopt, Unclaimed::Free)?;
        let mut claimed = Vec::with_capacity(claim.len());
        for Claim { range, tag, owned } in claim {
            claimed.push(match owned {
                Some(block) if pool.contains(*block) => *block,
                _ => pool.claim(range.start, range.end - range.start, *tag)?,
            });
        }
        mark_restored(&self.shared.device, stream, &restored, &claimed);
        Ok((restored.adopted, claimed))
    }

    /// Makes free ranges live, as if they had been allocated for `stream`. The blocks, in order.
    pub(crate) fn claim_blocks(
        &self,
        stream: &D::Stream,
        claim: &[Claim],
    ) -> Result<Vec<Allocation>> {
        let mut books = self.shared.books();
        let pool = &mut books.pools[self.key].pool;
        let claim_one = |c: &Claim| pool.claim(c.range.start, c.range.end - c.range.start, c.tag);
        let claimed = claim.iter().map(claim_one).collect::<Result<Vec<_>, _>>()?;
        for block in &claimed {
            let ptr = DevicePtr(block.address());
            self.shared
                .device
                .mark(stream, ptr, block.bytes(), Mark::Live);
        }
        Ok(claimed)
    }

    /// Makes a free range of the pool live, owned by the tensor that this gives. The device is told nothing, now or at its death.
    pub(crate) fn claim(
        &self,
        stream: &D::Stream,
        range: &Range<u64>,
        at: &'static Location<'static>,
    ) -> Result<Tensor<D>> {
        let id = self.shared.next_storage();
        let bytes = range.end - range.start;
        let block = with_pool(&self.shared, self.key, |p| {
            p.claim(range.start, bytes, Tag(id.0))
        })?;
        let birth = Birth {
            stream: stream.clone(),
            stream_id: self.shared.device.stream_id(stream),
            capture: 0,
            at,
        };
        let storage = Storage::owning(id, block, bytes, self.memory(), birth, true);
        storage.hush();
        Ok(Tensor::first(storage))
    }

    /// Gives back what a storage owned before it adopted another block: an orphan by now, so a no-op.
    pub(crate) fn let_go(&self, old: Option<Allocation>) {
        if let Some(old) = old {
            self.shared
                .books()
                .free(&self.shared.device, self.key, old, None, 0);
        }
    }

    pub(crate) fn alloc_at(
        &self,
        stream: &D::Stream,
        bytes: u64,
        made_at: &'static Location<'static>,
    ) -> Result<Tensor<D>> {
        alloc_in(&self.shared, Origin::Pool(self.key), stream, bytes, made_at)
    }

    fn memory(&self) -> Memory<D> {
        Memory {
            shared: self.shared.clone(),
            pool: self.key,
        }
    }
}

/// Refuses two adopters of one block.
fn refuse_twice(entries: &[Adopt]) -> Result<(), PoolError> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|i| entries[*i].saved.address());
    for pair in order.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        let saved = entries[first].saved;
        if saved == entries[second].saved {
            return Err(PoolError::AdoptedTwice {
                first,
                second,
                saved,
            });
        }
    }
    Ok(())
}

impl<D: Device> Clone for PoolHandle<D> {
    fn clone(&self) -> Self {
        self.shared.books().pools[self.key].uses += 1;
        PoolHandle {
            shared: self.shared.clone(),
            key: self.key,
            id: self.id,
        }
    }
}

impl<D: Device> Drop for PoolHandle<D> {
    fn drop(&mut self) {
        self.shared.books().let_go(self.key);
    }
}

impl<D: Device> fmt::Debug for PoolHandle<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolHandle({})", self.id)
    }
}

/// Tells the device what a restore made free. Where something that is held lies (the same bytes under another id, perhaps), it stays live.
fn mark_restored<D: Device>(
    device: &D,
    stream: &D::Stream,
    restored: &Restored,
    claimed: &[Allocation],
) {
    let mut held: Vec<(u64, u64)> = restored
        .adopted
        .iter()
        .chain(claimed)
        .map(|b| (b.address(), b.address() + b.bytes()))
        .collect();
    held.sort_unstable();
    let taken = |a: Allocation| {
        let next = held.partition_point(|(_, end)| *end <= a.address());
        held.get(next)
            .is_some_and(|(start, _)| *start < a.address() + a.bytes())
    };
    for block in restored.orphaned.iter().chain(&restored.freed) {
        let block = block.allocation;
        if !taken(block) {
            device.mark(
                stream,
                DevicePtr(block.address()),
                block.bytes(),
                Mark::Dead,
            );
        }
    }
    for block in &restored.adopted {
        device.mark(
            stream,
            DevicePtr(block.address()),
            block.bytes(),
            Mark::Live,
        );
    }
}
