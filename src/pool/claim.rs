//! Making a given range live: for memory that is in use although the books do not say so.

use super::{Allocation, Backing, Pool, PoolError, Tag};

impl<B: Backing> Pool<B> {
    /// Makes the `bytes` bytes at `address` a live block owned by `tag`, wherever a request of that size would have gone. They must
    /// lie in one free block. Like a restore, it counts as no allocation, and it splits whatever the configuration says.
    ///
    /// O(blocks of the segment).
    ///
    /// # Errors
    /// [`PoolError::Occupied`]: the range is not free, not in the pool, or not made of smallest blocks. Nothing has changed.
    pub fn claim(&mut self, address: u64, bytes: u64, tag: Tag) -> Result<Allocation, PoolError> {
        let occupied = PoolError::Occupied { address, bytes };
        let Some(segment) = self.segments.holding(address) else {
            return Err(occupied);
        };
        let unit = self.config.min_block;
        let whole = bytes > 0
            && bytes.is_multiple_of(unit)
            && (address - segment.address).is_multiple_of(unit);
        let heads = &self.books.state.heads;
        let Ok(head) = heads.binary_search_by_key(&segment.number, |head| head.segment) else {
            return Err(occupied);
        };
        let records = &self.books.records;
        let around = self.books.blocks(heads[head]).find(|&slot| {
            let block = records.get(slot);
            !block.is_live()
                && block.address <= address
                && bytes <= block.size
                && address - block.address <= block.size - bytes
        });
        let (true, Some(mut slot)) = (whole, around) else {
            return Err(occupied);
        };
        let front = address - records.get(slot).address;
        if front > 0 {
            slot = self.books.part(slot, front);
        } else {
            self.books.unindex(slot);
        }
        let split = self.books.records.get(slot).size > bytes;
        let id = self.next_id();
        let (address, bytes) = self.books.occupy(slot, bytes, split, id, tag.0, bytes);
        let live = self.books.state.live;
        self.stats.live_blocks.reach(live.blocks);
        self.stats.live_bytes.reach(live.bytes);
        self.stats.requested_bytes.reach(live.requested);
        Ok(Allocation {
            id,
            address,
            bytes,
            slot,
            pool: self.mark,
        })
    }
}
