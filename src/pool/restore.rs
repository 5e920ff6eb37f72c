//! Back to a checkpoint. Everything is checked before anything is changed; then nothing can fail.

use super::books::Books;
use super::pages::{NO_OWNERS, Owner, PAGE, Record, bits, differences, place};
use super::segment::Segments;
use super::{Allocation, Backing, Checkpoint, LiveBlock, Pool, PoolError, SegmentId, Tag};

/// A block that the caller takes over from a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopt {
    /// The block, as it was named when the checkpoint was taken. [`Allocation::EMPTY`] is adopted by doing nothing.
    pub saved: Allocation,
    /// Its owner from now on.
    pub tag: Tag,
}

/// What becomes of blocks of the checkpoint that are neither in the books now nor adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unclaimed {
    /// They are freed at once.
    Free,
    /// They are live, with new names.
    Keep,
}

/// What a restore did. Lists are in order of `adopt`, or in an order that depends on the two states alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// For each entry of `adopt` the block's name from now on: the same as before if it was live all along.
    pub adopted: Vec<Allocation>,
    /// Blocks that were live all along, adopted or not: their names stay good.
    pub kept: usize,
    /// Blocks of the checkpoint that nobody adopted and that are free now, as they were in the checkpoint.
    pub freed: Vec<LiveBlock>,
    /// Blocks of the checkpoint that nobody adopted and that are live now, by their new names.
    pub unclaimed: Vec<Allocation>,
    /// Blocks that were live and are not in the checkpoint: out of the books. Each may be freed once more,
    /// to no effect; until then the pool remembers it.
    pub orphaned: Vec<LiveBlock>,
}

impl Restored {
    /// Empties the lists, and keeps their memory.
    pub fn clear(&mut self) {
        self.adopted.clear();
        self.kept = 0;
        self.freed.clear();
        self.unclaimed.clear();
        self.orphaned.clear();
    }
}

/// Vectors that one restore leaves to the next.
#[derive(Default)]
pub(super) struct Scratch {
    /// For each slot, 1 + the entry of `adopt` that names its block; 0 between restores.
    adopter: Vec<u32>,
    /// Tags of kept blocks that were changed since the checkpoint.
    tags: Vec<(u32, u64)>,
}

impl<B: Backing> Pool<B> {
    /// Returns to the state of a checkpoint, and says block by block what that meant.
    ///
    /// | live now | live in the checkpoint | becomes |
    /// |---|---|---|
    /// | yes | the same allocation | *kept*: name and tag stay |
    /// | no, or another allocation | yes, and in `adopt` | *adopted*: live, with a new name |
    /// | no, or another allocation | yes | *freed* or *unclaimed*, as `unclaimed` says |
    /// | yes | no, or another allocation | *orphaned* |
    ///
    /// An entry of `adopt` may name a block that is live all along: it is kept, and gets the tag. Afterwards the pool places
    /// blocks as if it had never left the state, but for segments added since, which are there as free
    /// space. Nothing is counted as allocated or freed, and no memory is mapped or unmapped.
    ///
    /// O(pages + blocks of pages that differ). The checkpoint can be restored again.
    ///
    /// # Errors
    /// [`PoolError::ForeignCheckpoint`], [`PoolError::AdoptNotInCheckpoint`], [`PoolError::AdoptedTwice`]; nothing
    /// has changed then.
    pub fn restore(
        &mut self,
        checkpoint: &Checkpoint,
        adopt: &[Adopt],
        unclaimed: Unclaimed,
    ) -> Result<Restored, PoolError> {
        let mut out = Restored::default();
        self.restore_into(checkpoint, adopt, unclaimed, &mut out)?;
        Ok(out)
    }

    /// As [`Pool::restore`], writing to a report whose memory is used again.
    ///
    /// # Errors
    /// As [`Pool::restore`]; the report is empty then.
    pub fn restore_into(
        &mut self,
        checkpoint: &Checkpoint,
        adopt: &[Adopt],
        unclaimed: Unclaimed,
        out: &mut Restored,
    ) -> Result<(), PoolError> {
        out.clear();
        self.settle_dropped();
        let key = checkpoint
            .key(&self.token)
            .ok_or(PoolError::ForeignCheckpoint)?;
        if let Err(error) = self.name_adopted(key, adopt, out) {
            self.scratch.adopter.fill(0);
            out.clear();
            return Err(error);
        }
        self.compare(key, unclaimed, out);

        let Pool {
            books,
            saved,
            scratch,
            segments,
            ..
        } = self;
        let saved = &saved[key];
        books.records.load(&saved.tables);
        books.state.load(&saved.state);
        for (slot, tag) in scratch.tags.drain(..) {
            books.records.owners.edit(slot).tag = tag;
        }
        if saved.epoch != segments.epoch {
            match_segments(books, segments);
        }
        for (entry, now) in adopt.iter().zip(&out.adopted) {
            if now.is_empty() {
                continue;
            }
            scratch.adopter[now.slot as usize] = 0;
            let (id, tag) = (now.id, entry.tag.0);
            if id != entry.saved.id || books.records.owners.get(now.slot).tag != tag {
                *books.records.owners.edit(now.slot) = Owner { id, tag };
            }
        }
        for now in &out.unclaimed {
            books.records.owners.edit(now.slot).id = now.id;
        }
        for block in &out.freed {
            books.vacate(block.allocation.slot);
        }
        let live = books.state.live;
        self.stats.live_blocks.reach(live.blocks);
        self.stats.live_bytes.reach(live.bytes);
        self.stats.requested_bytes.reach(live.requested);
        self.stats.restores += 1;
        Ok(())
    }

    /// Checks `adopt`, notes the adopter of each slot, and writes the names that adopted blocks will have.
    fn name_adopted(
        &mut self,
        key: usize,
        adopt: &[Adopt],
        out: &mut Restored,
    ) -> Result<(), PoolError> {
        let saved = &self.saved[key];
        let records = &self.books.records;
        let adopter = &mut self.scratch.adopter;
        if adopter.len() < saved.state.slots as usize {
            adopter.resize(saved.state.slots as usize, 0);
        }
        let mut next_id = self.next_id;
        // Neighbours in `adopt` are mostly neighbours in the books.
        let (mut last, mut pages) = (usize::MAX, None);
        out.adopted.reserve(adopt.len());
        for (index, &Adopt { saved: block, .. }) in adopt.iter().enumerate() {
            if block.is_empty() {
                out.adopted.push(block);
                continue;
            }
            let (entry, at) = place(block.slot);
            if entry != last {
                last = entry;
                let owners = records.owners.saved_page(&saved.tables.owners, entry);
                let blocks = records.blocks.saved_page(&saved.tables.blocks, entry);
                let now = records.owners.present_page(entry).unwrap_or(&NO_OWNERS);
                pages = owners
                    .zip(blocks)
                    .map(|(owners, blocks)| (owners, blocks, now));
            }
            let named = pages.filter(|(owners, blocks, _)| {
                block.pool == self.mark
                    && owners[at].id == block.id
                    && blocks[at].address == block.address
            });
            let Some((.., now)) = named else {
                return Err(PoolError::AdoptNotInCheckpoint {
                    index,
                    saved: block,
                });
            };
            let adopter = &mut adopter[block.slot as usize];
            if *adopter != 0 {
                let first = *adopter as usize - 1;
                return Err(PoolError::AdoptedTwice {
                    first,
                    second: index,
                    saved: block,
                });
            }
            *adopter = index as u32 + 1;
            let id = if now[at].id == block.id {
                block.id
            } else {
                next_id += 1;
                next_id - 1
            };
            out.adopted.push(Allocation { id, ..block });
        }
        self.next_id = next_id;
        Ok(())
    }

    /// Compares the present state with a saved one, and writes all of the report but the adopted.
    fn compare(&mut self, key: usize, unclaimed: Unclaimed, out: &mut Restored) {
        let Pool {
            books,
            saved,
            scratch,
            segments,
            orphans,
            mark,
            next_id,
            ..
        } = self;
        let (records, saved) = (&books.records, &saved[key]);
        let tables = &saved.tables;
        let mut returning = 0;
        for entry in records.owners.differing(&tables.owners) {
            let now = records.owners.present_page(entry).unwrap_or(&NO_OWNERS);
            let then = records.owners.saved_page(&tables.owners, entry);
            let then = then.unwrap_or(&NO_OWNERS);
            for at in bits(differences(now, then)) {
                let slot = (entry * PAGE + at) as u32;
                let (now, then) = (now[at], then[at]);
                if now.id == then.id {
                    scratch.tags.push((slot, now.tag));
                    continue;
                }
                if now.id != 0 {
                    orphans.insert(now.id);
                    let record = records.get(slot);
                    out.orphaned
                        .push(live_block(segments, record, now, slot, *mark));
                }
                if then.id != 0 {
                    returning += 1;
                    if scratch.adopter[slot as usize] != 0 {
                        continue;
                    }
                    let Some(record) = records.blocks.saved(&tables.blocks, slot) else {
                        continue;
                    };
                    let block = live_block(segments, record, then, slot, *mark);
                    match unclaimed {
                        Unclaimed::Free => out.freed.push(block),
                        Unclaimed::Keep => {
                            out.unclaimed.push(Allocation {
                                id: *next_id,
                                ..block.allocation
                            });
                            *next_id += 1;
                        }
                    }
                }
            }
        }
        out.kept = saved.state.live.blocks as usize - returning;
    }
}

/// The block of a record that is live.
#[inline]
pub(super) fn live_block(
    segments: &Segments,
    record: &Record,
    owner: Owner,
    slot: u32,
    mark: u32,
) -> LiveBlock {
    let base = segments
        .get(record.segment)
        .map_or(record.address, |segment| segment.address);
    LiveBlock {
        allocation: Allocation {
            id: owner.id,
            address: record.address,
            bytes: record.size,
            slot,
            pool: mark,
        },
        tag: Tag(owner.tag),
        segment: SegmentId(record.segment),
        offset: record.address - base,
        bytes: record.size,
        requested: record.requested,
    }
}

/// Strikes segments out that were given back since the restored state, and adds those registered since as
/// free space. What was given back was one free block in every state that could be restored.
fn match_segments(books: &mut Books, segments: &Segments) {
    let mut heads = std::mem::take(&mut books.state.heads);
    heads.retain(|head| {
        let there = segments.get(head.segment).is_some();
        if !there {
            books.strike_segment(*head);
        }
        there
    });
    // Numbers only grow: all that is missing was registered after all that is there.
    let known = heads.len();
    books.state.heads = heads;
    for segment in &segments.as_slice()[known..] {
        books.add_segment(segment.number, segment.list, segment.address, segment.bytes);
    }
}
