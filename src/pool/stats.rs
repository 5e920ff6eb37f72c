//! Figures of a pool. Peaks and totals are never brought back by a restore.

/// One figure over time, as PyTorch counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most since the last reset.
    pub peak: u64,
    /// What allocating added since the last reset.
    pub allocated: u64,
    /// What freeing took away since the last reset.
    pub freed: u64,
}

impl Stat {
    /// Adds by an allocation.
    #[inline]
    pub(crate) fn gain(&mut self, by: u64) {
        self.allocated = self.allocated.wrapping_add(by);
        self.reach(self.current + by);
    }

    /// Takes away by a free.
    #[inline]
    pub(crate) fn lose(&mut self, by: u64) {
        self.freed = self.freed.wrapping_add(by);
        self.current -= by;
    }

    /// Sets what is now, by a restore: neither allocated nor freed.
    #[inline]
    pub(super) fn reach(&mut self, current: u64) {
        self.current = current;
        self.peak = self.peak.max(current);
    }

    /// Keeps what is now, and forgets the rest.
    pub(super) fn reset(&mut self) {
        *self = Stat {
            current: self.current,
            peak: self.current,
            allocated: 0,
            freed: 0,
        };
    }
}

/// Figures of a pool at one time: see [`Pool::stats`](super::Pool::stats).
///
/// A restore moves `current` (and so perhaps a peak) of the first three, without counting as allocations
/// or frees; so `current` is not `allocated - freed` in a pool that has been restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Live blocks; allocations and frees.
    pub live_blocks: Stat,
    /// Bytes of live blocks.
    pub live_bytes: Stat,
    /// Bytes asked for, of live blocks.
    pub requested_bytes: Stat,
    /// Bytes of segments.
    pub reserved_bytes: Stat,
    /// Segments.
    pub segments: Stat,
    /// Bytes of free blocks.
    pub free_bytes: u64,
    /// Bytes of the largest free block.
    pub largest_free: u64,
    /// Checkpoints taken.
    pub checkpoints: u64,
    /// Checkpoints held (one dropped just now may still be counted).
    pub checkpoints_held: u64,
    /// Restores done.
    pub restores: u64,
    /// Orphans not freed yet: each costs the pool a few bytes until it is.
    pub orphans: u64,
}

impl PoolStats {
    /// The share of free bytes that are not in the largest free block; 0 if nothing is free.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.largest_free as f64 / self.free_bytes as f64
    }
}
