//! The books: which bytes of which segment are live and which are free. This is the state that a checkpoint keeps
//! and a restore brings back. Touched by the pool's own operations and by `restore`; knows neither
//! backing, nor streams, nor statistics.
//!
//! Invariants: the blocks of a segment cover it, in address order, linked by `prev` and `next`; no two
//! neighbours are both free; a record is in the index if and only if its block is free; the block at the
//! beginning of a segment never changes its slot, nor does a live block.

use smallvec::SmallVec;

use super::index::{Found, FreeList, Octave};
use super::pages::{Cell, NIL, Owner, Record, Records, Tables, height};

/// The beginning of a segment in the books.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// The segment's number.
    pub segment: u32,
    /// The block at its beginning.
    pub slot: u32,
}

/// What is live.
#[derive(Clone, Copy, Default)]
pub(super) struct Live {
    /// Live blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The bytes that were asked for.
    pub requested: u64,
}

impl Live {
    /// Nothing.
    const NONE: Live = Live {
        blocks: 0,
        bytes: 0,
        requested: 0,
    };
}

/// All of the state that is not in pages.
pub(super) struct State {
    /// The free blocks, by (stream, size class).
    pub lists: Vec<FreeList>,
    /// The segments in order of registration.
    pub heads: Vec<Head>,
    /// The first unused record; the others follow by `next`.
    pub unused: u32,
    /// Slots ever used: all above are unused too, and not linked.
    pub slots: u32,
    /// What is live.
    pub live: Live,
}

impl State {
    /// No segment.
    pub const EMPTY: State = State {
        lists: Vec::new(),
        heads: Vec::new(),
        unused: NIL,
        slots: 0,
        live: Live::NONE,
    };

    /// Keeps it in `saved`, in the memory that that already has.
    pub fn save(&self, saved: &mut SavedState) {
        saved.octaves.clear();
        let octaves = self.lists.iter().map(FreeList::octaves).sum();
        saved.octaves.reserve_exact(octaves);
        for (number, list) in (0..).zip(&self.lists) {
            list.save(number, &mut saved.octaves);
        }
        saved.heads.clear();
        saved.heads.extend_from_slice(&self.heads);
        (saved.unused, saved.slots, saved.live) = (self.unused, self.slots, self.live);
    }

    /// Becomes what was saved. Lists that came later are empty then.
    pub fn load(&mut self, saved: &SavedState) {
        self.lists.iter_mut().for_each(FreeList::clear);
        for octave in &saved.octaves {
            self.lists[octave.list as usize].load(octave);
        }
        self.heads.clear();
        self.heads.extend_from_slice(&saved.heads);
        (self.unused, self.slots, self.live) = (saved.unused, saved.slots, saved.live);
    }
}

/// A [`State`] that is kept: what is not empty of it.
pub(super) struct SavedState {
    /// The free lists' octaves.
    octaves: SmallVec<[Octave; 1]>,
    /// As in [`State`].
    pub heads: SmallVec<[Head; 2]>,
    /// As in [`State`].
    unused: u32,
    /// As in [`State`].
    pub slots: u32,
    /// As in [`State`].
    pub live: Live,
}

impl SavedState {
    /// No segment.
    pub const EMPTY: SavedState = SavedState {
        octaves: SmallVec::new_const(),
        heads: SmallVec::new_const(),
        unused: NIL,
        slots: 0,
        live: Live::NONE,
    };
}

/// Where a block lies.
struct Place {
    /// Its segment's number.
    segment: u32,
    /// The free lists its segment belongs to.
    list: u32,
    /// Where it begins.
    address: u64,
    /// Its length in bytes.
    size: u64,
    /// The block before it in its segment.
    prev: u32,
    /// The block after it in its segment.
    next: u32,
}

/// The books.
pub(super) struct Books {
    /// The block records.
    pub records: Records,
    /// All else.
    pub state: State,
    /// log2 of the smallest block.
    shift: u32,
}

impl Books {
    /// Empty books of a pool whose smallest block is `1 << shift` bytes.
    pub fn new(shift: u32) -> Self {
        Self {
            records: Records::default(),
            state: State::EMPTY,
            shift,
        }
    }

    /// Makes an unused record the free block of a place, and puts it into the index.
    #[inline]
    fn add_free(&mut self, place: Place) -> u32 {
        let slot = if self.state.unused != NIL {
            self.state.unused
        } else {
            self.new_slot()
        };
        let record = self.records.edit(slot);
        self.state.unused = record.next;
        *record = Record {
            address: place.address,
            size: place.size,
            height: height(place.address),
            segment: place.segment,
            list: place.list,
            prev: place.prev,
            next: place.next,
            ..Record::NONE
        };
        self.state.lists[place.list as usize].insert(
            &mut self.records.blocks,
            slot,
            place.size >> self.shift,
        );
        slot
    }

    /// A record that was never used.
    #[cold]
    fn new_slot(&mut self) -> u32 {
        debug_assert!(self.state.slots < NIL, "2^32 records are 256 GiB of books");
        let slot = self.state.slots;
        self.records.reach(slot);
        self.state.slots += 1;
        debug_assert_eq!(self.records.get(slot).next, NIL, "it is on no list");
        slot
    }

    /// Puts a free block into the index.
    #[inline]
    fn index(&mut self, slot: u32) {
        let record = self.records.get(slot);
        let (list, units) = (record.list, record.size >> self.shift);
        self.state.lists[list as usize].insert(&mut self.records.blocks, slot, units);
    }

    /// Takes a free block out of the index.
    #[inline]
    pub fn unindex(&mut self, slot: u32) {
        let record = self.records.get(slot);
        let (list, units) = (record.list, record.size >> self.shift);
        self.state.lists[list as usize].remove(&mut self.records.blocks, slot, units);
    }

    /// Makes a record unused whose block has become part of another.
    #[inline]
    fn retire(&mut self, slot: u32) {
        let unused = std::mem::replace(&mut self.state.unused, slot);
        self.records.edit(slot).next = unused;
    }

    /// Adds a segment as one free block.
    pub fn add_segment(&mut self, segment: u32, list: u32, address: u64, size: u64) -> u32 {
        let slot = self.add_free(Place {
            segment,
            list,
            address,
            size,
            prev: NIL,
            next: NIL,
        });
        self.state.heads.push(Head { segment, slot });
        slot
    }

    /// Strikes a segment that is one free block out, all but its head.
    pub fn strike_segment(&mut self, head: Head) {
        self.unindex(head.slot);
        self.retire(head.slot);
    }

    /// The free block that best fits `size` bytes: the smallest, then the segment registered first, then
    /// the lowest address.
    #[inline]
    pub fn best_fit(&self, list: usize, size: u64) -> Option<Found> {
        self.state
            .lists
            .get(list)?
            .at_least(&self.records.blocks, size, size >> self.shift)
    }

    /// Takes a block that was found out of the index, to be occupied at once.
    #[inline]
    pub fn take(&mut self, list: usize, found: Found) {
        self.state.lists[list].take(&mut self.records.blocks, found);
    }

    /// Makes a free block live that has been taken out of the index, and what is beyond `size` a free block if `split`.
    /// Returns address and length.
    #[inline]
    pub fn occupy(
        &mut self,
        slot: u32,
        size: u64,
        split: bool,
        id: u64,
        tag: u64,
        requested: u64,
    ) -> (u64, u64) {
        *self.records.owners.edit(slot) = Owner { id, tag };
        let record = self.records.edit(slot);
        record.requested = requested;
        let (address, mut bytes) = (record.address, record.size);
        if split {
            let (segment, list, next) = (record.segment, record.list, record.next);
            record.size = size;
            let rest = self.add_free(Place {
                segment,
                list,
                address: address + size,
                size: bytes - size,
                prev: slot,
                next,
            });
            self.records.edit(slot).next = rest;
            if next != NIL {
                self.records.edit(next).prev = rest;
            }
            bytes = size;
        }
        self.state.live.blocks += 1;
        self.state.live.bytes += bytes;
        self.state.live.requested += requested;
        (address, bytes)
    }

    /// Parts a free block in two, of which the second is out of the index; the caller makes it live at once: no two
    /// neighbours are free otherwise.
    pub fn part(&mut self, slot: u32, front: u64) -> u32 {
        self.unindex(slot);
        let record = self.records.edit(slot);
        let next = record.next;
        let back = Place {
            segment: record.segment,
            list: record.list,
            address: record.address + front,
            size: record.size - front,
            prev: slot,
            next,
        };
        record.size = front;
        self.index(slot);
        let second = self.add_free(back);
        self.records.edit(slot).next = second;
        if next != NIL {
            self.records.edit(next).prev = second;
        }
        self.unindex(second);
        second
    }

    /// Makes a live block free, and one with the free blocks beside it. Returns address, length, and
    /// the bytes that had been asked for.
    #[inline]
    pub fn vacate(&mut self, slot: u32) -> (u64, u64, u64) {
        *self.records.owners.edit(slot) = Owner::NONE;
        let blocks = &mut self.records.blocks;
        let record = blocks.edit(slot);
        let (address, bytes) = (record.address, record.size);
        let requested = std::mem::take(&mut record.requested);
        let (prev, next) = (record.prev, record.next);
        let list = &mut self.state.lists[record.list as usize];
        self.state.live.blocks -= 1;
        self.state.live.bytes -= bytes;
        self.state.live.requested -= requested;

        let (mut first, mut size, mut after) = (slot, bytes, next);
        if next != NIL {
            let beside = blocks.get(next);
            if !beside.is_live() {
                let more = beside.size;
                (size, after) = (size + more, beside.next);
                list.remove(blocks, next, more >> self.shift);
                blocks.edit(next).next = self.state.unused;
                self.state.unused = next;
            }
        }
        if prev != NIL {
            let beside = blocks.get(prev);
            if !beside.is_live() {
                let more = beside.size;
                (size, first) = (size + more, prev);
                list.remove(blocks, prev, more >> self.shift);
                blocks.edit(slot).next = self.state.unused;
                self.state.unused = slot;
            }
        }
        if size != bytes {
            let merged = blocks.edit(first);
            (merged.size, merged.next) = (size, after);
            if after != NIL {
                blocks.edit(after).prev = first;
            }
        }
        list.insert(blocks, first, size >> self.shift);
        (address, bytes, requested)
    }

    /// Size of the largest free block.
    pub fn largest_free(&self) -> u64 {
        self.state
            .lists
            .iter()
            .map(|list| list.largest(&self.records.blocks))
            .max()
            .unwrap_or(0)
    }

    /// The slots of a segment's blocks, in address order.
    pub fn blocks(&self, head: Head) -> impl Iterator<Item = u32> + '_ {
        let mut next = head.slot;
        std::iter::from_fn(move || {
            let slot = next;
            (slot != NIL).then(|| {
                next = self.records.get(slot).next;
                slot
            })
        })
    }

    /// Whether the slot's block is free and covers `size` bytes.
    pub fn is_one_free_block(&self, head: Head, size: u64) -> bool {
        let record = self.records.get(head.slot);
        !record.is_live() && record.size == size
    }

    /// The same in a saved state.
    pub fn was_one_free_block(&self, tables: &Tables, head: Head, size: u64) -> bool {
        self.records
            .blocks
            .saved(&tables.blocks, head.slot)
            .is_some_and(|record| !record.is_live() && record.size == size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks every invariant. O(blocks).
    fn check(books: &Books, segments: &[(u32, u64, u64)]) {
        let mut seen = vec![false; books.state.slots as usize];
        let mut live = Live::default();
        assert_eq!(books.state.heads.len(), segments.len());
        for (head, &(number, address, size)) in books.state.heads.iter().zip(segments) {
            assert_eq!(head.segment, number);
            let (mut at, mut prev, mut free_before) = (address, NIL, false);
            for slot in books.blocks(*head) {
                let record = books.records.get(slot);
                assert!(!std::mem::replace(&mut seen[slot as usize], true));
                assert_eq!(
                    (record.address, record.prev, record.segment),
                    (at, prev, number)
                );
                let free = !record.is_live();
                assert_eq!(free, books.records.owners.get(slot).id == 0);
                assert!(!(free && free_before), "two free neighbours");
                if free {
                    let found = books.best_fit(record.list as usize, record.size);
                    assert!(
                        found
                            .is_some_and(|found| books.records.get(found.slot).size == record.size)
                    );
                } else {
                    live.blocks += 1;
                    live.bytes += record.size;
                    live.requested += books.records.get(slot).requested;
                }
                (at, prev, free_before) = (at + record.size, slot, free);
            }
            assert_eq!(at, address + size);
        }
        let mut unused = books.state.unused;
        while unused != NIL {
            assert!(!std::mem::replace(&mut seen[unused as usize], true));
            assert!(!books.records.get(unused).is_live());
            assert_eq!(books.records.owners.get(unused).id, 0);
            unused = books.records.get(unused).next;
        }
        assert!(
            seen.into_iter().all(|seen| seen),
            "a record is neither in a segment nor unused"
        );
        let kept = books.state.live;
        assert_eq!(
            (kept.blocks, kept.bytes, kept.requested),
            (live.blocks, live.bytes, live.requested)
        );
    }

    #[test]
    fn invariants_hold_through_splits_merges_saves_and_loads() {
        let mut books = Books::new(9);
        books.state.lists.resize(2, FreeList::EMPTY);
        let segments = [
            (0, 1 << 21, 1 << 20),
            (1, 1 << 24, 1 << 19),
            (2, 1 << 23, 1 << 18),
        ];
        for (number, address, size) in segments {
            books.add_segment(number, number % 2, address, size);
        }
        let (mut seed, mut live, mut saved) = (9_u64, Vec::new(), None);
        for id in 1..6000 {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (draw, size) = (seed >> 33, 512 * (1 + (seed >> 50) % 64));
            if id % 500 == 250 {
                let (mut tables, mut state) = (Tables::EMPTY, SavedState::EMPTY);
                books.records.save(&mut tables);
                books.state.save(&mut state);
                saved = Some((tables, state, live.clone()));
            } else if id % 500 == 0
                && let Some((mut tables, state, then)) = saved.take()
            {
                books.records.load(&tables);
                books.records.forget(&mut tables);
                books.state.load(&state);
                live = then;
            } else if draw % 2 == 0
                && let list = (draw / 2 % 2) as usize
                && let Some(found) = books.best_fit(list, size)
            {
                books.take(list, found);
                let slot = found.slot;
                let split = books.records.get(slot).size > size;
                books.occupy(slot, size, split, id, 0, size - 1);
                live.push(slot);
            } else if !live.is_empty() {
                books.vacate(live.swap_remove((draw / 2) as usize % live.len()));
            }
            check(&books, &segments);
        }
        for slot in live {
            books.vacate(slot);
        }
        check(&books, &segments);
        assert!(
            books
                .state
                .heads
                .iter()
                .zip(segments)
                .all(|(head, (.., size))| books.is_one_free_block(*head, size))
        );
        assert_eq!(books.largest_free(), 1 << 20);
    }
}
