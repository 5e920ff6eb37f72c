//! Giving segments back.

use super::{Backing, Pool, PoolError, SegmentId};

/// What a trim gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trimmed {
    /// Segments.
    pub segments: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl<B: Backing> Pool<B> {
    /// Gives back every segment that is one free block, unless it is pinned, or a checkpoint that is held has a live block in it.
    /// O(segments of all checkpoints), and the backing's time.
    ///
    /// # Errors
    /// [`PoolError::Backing`]: the named segment was not given back in full, those after it were not
    /// looked at, those before it are gone. The books are right; trimming again goes on.
    pub fn trim(&mut self) -> Result<Trimmed, PoolError> {
        self.settle_dropped();
        while let Some(&(segment, address, bytes)) = self.unreleased.last() {
            self.backing
                .release(address, bytes)
                .map_err(|source| PoolError::Backing { segment, source })?;
            self.unreleased.pop();
        }
        let mut trimmed = Trimmed::default();
        let mut at = 0;
        while at < self.segments.as_slice().len() {
            if !self.may_go(at) {
                at += 1;
                continue;
            }
            let (number, address, bytes) = {
                let segment = &self.segments.as_slice()[at];
                (SegmentId(segment.number), segment.address, segment.bytes)
            };
            let failed = |source| PoolError::Backing {
                segment: number,
                source,
            };
            self.backing.unmap(address, bytes).map_err(failed)?;
            // The memory is gone: so is the segment, whatever happens to its addresses.
            let head = self.books.state.heads.remove(at);
            self.books.strike_segment(head);
            self.segments.remove(at);
            self.stats.segments.lose(1);
            self.stats.reserved_bytes.lose(bytes);
            trimmed.segments += 1;
            trimmed.bytes += bytes;
            tracing::debug!(segment = number.0, bytes, "segment given back");
            if let Err(source) = self.backing.release(address, bytes) {
                self.unreleased.push((number, address, bytes));
                return Err(failed(source));
            }
        }
        Ok(trimmed)
    }

    /// Whether the segment at a position is one free block, now and in every state that is held and knows it.
    fn may_go(&self, at: usize) -> bool {
        let segment = &self.segments.as_slice()[at];
        !self.pinned.contains_key(&segment.number)
            && self
                .books
                .is_one_free_block(self.books.state.heads[at], segment.bytes)
            && self.saved.iter().filter(|saved| saved.held).all(|saved| {
                match saved
                    .state
                    .heads
                    .binary_search_by_key(&segment.number, |head| head.segment)
                {
                    Ok(then) => {
                        let head = saved.state.heads[then];
                        self.books
                            .was_one_free_block(&saved.tables, head, segment.bytes)
                    }
                    Err(_) => true,
                }
            })
    }
}
