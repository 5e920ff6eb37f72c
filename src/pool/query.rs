//! What a pool says about itself. Nothing here changes a block, and nothing is on a hot path.

use super::restore::live_block;
use super::{
    Allocation, Backing, BlockSnapshot, LiveBlock, LiveCheck, OwnerSnapshot, Pool, PoolConfig,
    PoolError, PoolSnapshot, PoolStats, SegmentId, SegmentSnapshot,
};

impl<B: Backing> Pool<B> {
    /// Sizes and limits.
    #[must_use]
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// Where segments come from.
    #[must_use]
    pub fn backing(&self) -> &B {
        &self.backing
    }

    /// Changes how blocks are split from now on. Blocks that are split stay so, and a restore brings the split of
    /// its checkpoint back.
    ///
    /// # Errors
    /// [`PoolError::InvalidConfig`]; nothing has changed then.
    pub fn set_split(&mut self, max_split: Option<u64>, no_split: bool) -> Result<(), PoolError> {
        let config = PoolConfig {
            max_split,
            no_split,
            ..self.config.clone()
        };
        config.validate_split()?;
        self.config = config;
        Ok(())
    }

    /// Changes the most bytes of segments to hold at a time. What is held already stays.
    pub fn set_limit(&mut self, limit: Option<u64>) {
        self.config.limit = limit;
    }

    /// Figures. O(free lists).
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        PoolStats {
            free_bytes: self.stats.reserved_bytes.current - self.stats.live_bytes.current,
            largest_free: self.books.largest_free(),
            orphans: self.orphans.len() as u64,
            ..self.stats
        }
    }

    /// Makes every peak what is now, and every count of allocated and freed zero.
    pub fn reset_peaks(&mut self) {
        let stats = &mut self.stats;
        for stat in [
            &mut stats.live_blocks,
            &mut stats.live_bytes,
            &mut stats.requested_bytes,
            &mut stats.reserved_bytes,
            &mut stats.segments,
        ] {
            stat.reset();
        }
    }

    /// The pool in a line, for errors.
    pub(super) fn state_line(&self) -> String {
        let stats = self.stats();
        format!(
            "{} B reserved in {} segments, {} B live in {} blocks, largest free block {} B",
            stats.reserved_bytes.current,
            stats.segments.current,
            stats.live_bytes.current,
            stats.live_blocks.current,
            stats.largest_free,
        )
    }

    /// The live block that begins at an address. O(blocks of its segment).
    #[must_use]
    pub fn find(&self, address: u64) -> Option<Allocation> {
        let number = self.segments.holding(address)?.number;
        let heads = &self.books.state.heads;
        let head = heads[heads
            .binary_search_by_key(&number, |head| head.segment)
            .ok()?];
        let slot = self
            .books
            .blocks(head)
            .find(|&slot| self.books.records.get(slot).address == address)?;
        self.block(slot).map(|block| block.allocation)
    }

    /// Segment and offset of an address in the pool, live or free, for printing. O(log segments).
    #[must_use]
    pub fn locate(&self, address: u64) -> Option<(SegmentId, u64)> {
        self.segments
            .holding(address)
            .map(|segment| (SegmentId(segment.number), address - segment.address))
    }

    /// The slot's block, if it is live.
    fn block(&self, slot: u32) -> Option<LiveBlock> {
        let records = &self.books.records;
        let (record, owner) = (records.get(slot), records.owners.get(slot));
        record
            .is_live()
            .then(|| live_block(&self.segments, record, *owner, slot, self.mark))
    }

    /// All live blocks, by segment and offset. O(blocks).
    #[must_use]
    pub fn live(&self) -> Vec<LiveBlock> {
        let heads = self.books.state.heads.iter();
        heads
            .flat_map(|head| self.books.blocks(*head))
            .filter_map(|slot| self.block(slot))
            .collect()
    }

    /// Compares the live blocks with a set of addresses: they must be the same set. An address may be given more
    /// than once; 0 is never live. O(blocks + addresses · log addresses).
    #[must_use]
    pub fn check_live(&self, addresses: &[u64]) -> LiveCheck {
        let mut missing = addresses.to_vec();
        missing.sort_unstable();
        missing.dedup();
        let mut found = vec![false; missing.len()];
        let mut untracked = self.live();
        untracked.retain(
            |block| match missing.binary_search(&block.allocation.address()) {
                Ok(at) => {
                    found[at] = true;
                    false
                }
                Err(_) => true,
            },
        );
        let mut found = found.iter();
        missing.retain(|_| found.next() == Some(&false));
        LiveCheck { missing, untracked }
    }

    /// A picture of all segments and blocks. O(blocks).
    #[must_use]
    pub fn snapshot(&self) -> PoolSnapshot {
        let picture = |(segment, head): (&super::Segment, &super::books::Head)| SegmentSnapshot {
            id: SegmentId(segment.number),
            class: segment.class,
            stream: segment.stream,
            address: segment.address,
            bytes: segment.bytes,
            blocks: self
                .books
                .blocks(*head)
                .map(|slot| {
                    let record = self.books.records.get(slot);
                    BlockSnapshot {
                        offset: record.address - segment.address,
                        bytes: record.size,
                        owner: self.block(slot).map(
                            |LiveBlock {
                                 allocation,
                                 tag,
                                 requested,
                                 ..
                             }| OwnerSnapshot {
                                allocation,
                                tag,
                                requested,
                            },
                        ),
                    }
                })
                .collect(),
        };
        // The books' segments are those that are held, in the same order.
        let segments = self
            .segments
            .as_slice()
            .iter()
            .zip(&self.books.state.heads)
            .map(picture)
            .collect();
        PoolSnapshot { segments }
    }
}
