//! The free blocks of one size class on one stream: exact best fit by (size, segment, address).
//! Touched by `books` alone.
//!
//! Sizes fall into bins of two levels with a bitmap each (as in TLSF): octaves, and 32 parts of each. In
//! each bin lies a treap over the records themselves, in the order of the full triple, whose priorities
//! are a hash of the place. So neither its shape nor an answer depends on history, and a bin of equal blocks
//! costs a logarithm. Nothing is allocated.

use super::pages::{BLOCKS, NIL, Pages, Record};

/// What the index works on.
type Blocks = Pages<Record, BLOCKS>;

/// Bins of an octave, as a power of two: most bins hold a block or two.
const PARTS_LOG: u32 = 5;
/// Bins of an octave.
const PARTS: usize = 1 << PARTS_LOG;
/// Octaves; the last one takes all that is larger.
const OCTAVES: usize = 32;

/// The free blocks of one size class on one stream.
#[derive(Clone)]
pub(super) struct FreeList {
    /// Octaves in which some bin is not empty.
    octaves: u32,
    /// For each octave the bins that are not empty.
    bins: [u32; OCTAVES],
    /// The root of each bin's treap.
    roots: [[u32; PARTS]; OCTAVES],
}

/// A place that holds a link of a treap: a side of a record, or the root of the bin ([`NIL`]).
type Link = (u32, usize);

/// The bin of a size in units of the pool's smallest block.
#[inline]
fn bin(units: u64) -> (usize, usize) {
    debug_assert!(units > 0, "a block of no bytes has no bin");
    let octave = (u64::BITS - 1 - units.leading_zeros()) as usize;
    if octave >= OCTAVES {
        return (OCTAVES - 1, PARTS - 1);
    }
    (octave, ((units << PARTS_LOG) >> octave) as usize % PARTS)
}

/// The key of a free block.
#[inline]
fn key(records: &Blocks, slot: u32) -> (u64, u32, u64) {
    let record = records.get(slot);
    (record.size, record.segment, record.address)
}

/// Whether a key comes before another; without a branch, since no processor could guess it.
#[inline]
fn before(a: (u64, u32, u64), b: (u64, u32, u64)) -> bool {
    (a.0 < b.0) | ((a.0 == b.0) & ((a.1 < b.1) | ((a.1 == b.1) & (a.2 < b.2))))
}

/// How high a free block stands in its treap.
#[inline]
fn height(records: &Blocks, slot: u32) -> u64 {
    records.get(slot).height
}

impl FreeList {
    /// No blocks.
    pub const EMPTY: FreeList = FreeList {
        octaves: 0,
        bins: [0; OCTAVES],
        roots: [[NIL; PARTS]; OCTAVES],
    };

    /// Becomes a copy of `other`. Octaves that are empty in both are equal already.
    pub fn copy_from(&mut self, other: &FreeList) {
        let mut octaves = self.octaves | other.octaves;
        (self.octaves, self.bins) = (other.octaves, other.bins);
        while octaves != 0 {
            let octave = octaves.trailing_zeros() as usize;
            self.roots[octave] = other.roots[octave];
            octaves &= octaves - 1;
        }
    }

    /// Writes a link.
    #[inline]
    fn set(&mut self, records: &mut Blocks, at: (usize, usize), (slot, side): Link, to: u32) {
        match slot {
            NIL => self.roots[at.0][at.1] = to,
            _ => records.edit(slot).below[side] = to,
        }
    }

    /// Puts a free block in. `units` is its size in smallest blocks. O(log n) of the blocks in its bin.
    #[inline]
    pub fn insert(&mut self, records: &mut Blocks, slot: u32, units: u64) {
        let at = bin(units);
        let root = &mut self.roots[at.0][at.1];
        if *root != NIL {
            return self.insert_below(records, slot, at);
        }
        *root = slot;
        self.bins[at.0] |= 1 << at.1;
        self.octaves |= 1 << at.0;
        records.edit(slot).below = [NIL; 2];
    }

    /// Puts a free block into a bin that is not empty.
    fn insert_below(&mut self, records: &mut Blocks, slot: u32, at: (usize, usize)) {
        let mut below = self.roots[at.0][at.1];
        let (mine, high) = (key(records, slot), height(records, slot));
        let mut link = (NIL, 0);
        while below != NIL && height(records, below) > high {
            let side = usize::from(before(key(records, below), mine));
            (link, below) = ((below, side), records.get(below).below[side]);
        }
        self.set(records, at, link, slot);
        // What stood there is parted by the key into the two sides; `holes` are where the next of each goes.
        let mut holes = [(slot, 0), (slot, 1)];
        while below != NIL {
            let side = usize::from(before(mine, key(records, below)));
            let (hole, inner) = (holes[side], 1 - side);
            records.edit(hole.0).below[hole.1] = below;
            holes[side] = (below, inner);
            below = records.get(below).below[inner];
        }
        for hole in holes {
            records.edit(hole.0).below[hole.1] = NIL;
        }
    }

    /// Takes a block out that is in. O(log n) of the blocks in its bin.
    #[inline]
    pub fn remove(&mut self, records: &mut Blocks, slot: u32, units: u64) {
        let at = bin(units);
        let record = records.get(slot);
        let root = &mut self.roots[at.0][at.1];
        if *root != slot || record.below[0] & record.below[1] != NIL {
            return self.remove_from(records, slot, at);
        }
        *root = NIL;
        self.bins[at.0] &= !(1 << at.1);
        if self.bins[at.0] == 0 {
            self.octaves &= !(1 << at.0);
        }
    }

    /// Takes a block out of a bin in which there are others.
    fn remove_from(&mut self, records: &mut Blocks, slot: u32, at: (usize, usize)) {
        let mut link = (NIL, 0);
        let mut here = self.roots[at.0][at.1];
        let mine = key(records, slot);
        while here != slot {
            debug_assert!(here != NIL, "a free block is in the index");
            if here == NIL {
                return;
            }
            let side = usize::from(before(key(records, here), mine));
            (link, here) = ((here, side), records.get(here).below[side]);
        }
        // The higher of the two below takes its place, and so on down.
        let mut sides = records.get(slot).below;
        while sides[0] != NIL && sides[1] != NIL {
            let side = usize::from(height(records, sides[1]) > height(records, sides[0]));
            let (higher, inner) = (sides[side], 1 - side);
            self.set(records, at, link, higher);
            link = (higher, inner);
            sides[side] = records.get(higher).below[inner];
        }
        let rest = if sides[0] == NIL { sides[1] } else { sides[0] };
        self.set(records, at, link, rest);
    }

    /// The first block in order of at least `size` bytes (`units` smallest blocks).
    #[inline]
    pub fn at_least(&self, records: &Blocks, size: u64, units: u64) -> Option<u32> {
        let (octave, part) = bin(units);
        let (mut found, mut here) = (NIL, self.roots[octave][part]);
        while here != NIL {
            let record = records.get(here);
            if record.size >= size {
                (found, here) = (here, record.below[0]);
            } else {
                here = record.below[1];
            }
        }
        if found != NIL {
            return Some(found);
        }
        // All bins above hold larger blocks only: the first of the next one is it.
        let above = u64::from(self.bins[octave]) & (!1 << part);
        let (octave, part) = if above != 0 {
            (octave, above.trailing_zeros() as usize)
        } else {
            let octaves = u64::from(self.octaves) & (!1 << octave);
            if octaves == 0 {
                return None;
            }
            let octave = octaves.trailing_zeros() as usize;
            (octave, self.bins[octave].trailing_zeros() as usize)
        };
        let mut first = self.roots[octave][part];
        while records.get(first).below[0] != NIL {
            first = records.get(first).below[0];
        }
        Some(first)
    }

    /// Size of the largest block, 0 if there is none.
    pub fn largest(&self, records: &Blocks) -> u64 {
        let Some(octave) = self.octaves.checked_ilog2() else {
            return 0;
        };
        let part = self.bins[octave as usize].ilog2();
        let mut last = self.roots[octave as usize][part as usize];
        while records.get(last).below[1] != NIL {
            last = records.get(last).below[1];
        }
        records.get(last).size
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A record for every slot; the index and a set of (size, segment, address, slot) side by side.
    struct Both {
        records: Blocks,
        list: FreeList,
        set: BTreeSet<(u64, u32, u64, u32)>,
    }

    impl Both {
        fn new(slots: u32) -> Self {
            let mut records = Blocks::default();
            (0..slots).for_each(|slot| records.reach(slot));
            Self {
                records,
                list: FreeList::EMPTY,
                set: BTreeSet::new(),
            }
        }

        fn insert(&mut self, slot: u32, size: u64, segment: u32, address: u64) {
            let record = self.records.edit(slot);
            (record.size, record.segment, record.address) = (size, segment, address);
            record.height = super::super::pages::height(address);
            self.list.insert(&mut self.records, slot, size);
            self.set.insert((size, segment, address, slot));
        }

        fn remove(&mut self, slot: u32) {
            let (size, segment, address) = key(&self.records, slot);
            self.list.remove(&mut self.records, slot, size);
            assert!(self.set.remove(&(size, segment, address, slot)));
        }

        fn check(&self, size: u64) {
            let first = self
                .set
                .range((size, 0, 0, 0)..)
                .next()
                .map(|found| found.3);
            assert_eq!(
                self.list.at_least(&self.records, size, size),
                first,
                "first of at least {size}"
            );
            assert_eq!(
                self.list.largest(&self.records),
                self.set.last().map_or(0, |found| found.0)
            );
        }

        /// The links of all treaps, in order of slots: their shape.
        fn shape(&self) -> Vec<(u64, [u32; 2])> {
            let mut shape: Vec<_> = self
                .set
                .iter()
                .map(|found| (found.2, self.records.get(found.3).below))
                .collect();
            shape.sort_unstable();
            shape
        }
    }

    fn random(seed: &mut u64) -> u64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    }

    #[test]
    fn bins_rise_with_the_size_and_the_last_takes_the_rest() {
        let mut last = bin(1);
        for units in 2..5000 {
            assert!(bin(units) >= last, "{units}");
            last = bin(units);
        }
        assert_eq!(
            (bin(1), bin(2), bin(3), bin(8), bin(9)),
            ((0, 0), (1, 0), (1, 16), (3, 0), (3, 4))
        );
        assert_eq!(
            (bin((1 << 32) - 1), bin(1 << 32), bin(u64::MAX)),
            ((31, 31), (31, 31), (31, 31))
        );
    }

    #[test]
    fn answers_as_an_ordered_set_does() {
        let mut both = Both::new(512);
        let mut seed = 5;
        for step in 0..20_000_u64 {
            let slot = (random(&mut seed) % 500) as u32;
            let size =
                1 + random(&mut seed) % [6, 40, 3000, 1 << 40][random(&mut seed) as usize % 4];
            if both.set.iter().any(|found| found.3 == slot) {
                both.remove(slot);
            } else {
                both.insert(slot, size, (random(&mut seed) % 3) as u32, step * 512);
            }
            both.check(1 + random(&mut seed) % size);
            both.check(size);
        }
    }

    #[test]
    fn ten_thousand_equal_blocks_stay_in_order_and_low() {
        let mut both = Both::new(10_000);
        for slot in 0..10_000 {
            both.insert(slot, 7, 0, u64::from(slot) * 512);
        }
        let mut depth = vec![(both.list.roots[2][24], 1)];
        let mut deepest = 0;
        while let Some((slot, level)) = depth.pop() {
            if slot != NIL {
                deepest = deepest.max(level);
                let record = both.records.get(slot);
                depth.extend(record.below.map(|below| (below, level + 1)));
            }
        }
        assert!((14..60).contains(&deepest), "{deepest}");
        for slot in 0..10_000 {
            assert_eq!(both.list.at_least(&both.records, 5, 5), Some(slot));
            both.remove(slot);
        }
        assert_eq!((both.list.octaves, both.list.bins), (0, [0; OCTAVES]));
    }

    #[test]
    fn the_shape_is_that_of_the_set_whatever_the_history() {
        let (mut up, mut down) = (Both::new(300), Both::new(300));
        for slot in 0..200 {
            up.insert(slot, 9, 0, u64::from(slot) * 512);
        }
        for slot in (0..300).rev() {
            down.insert(slot, 9, 0, u64::from(slot) * 512);
        }
        for slot in 200..300 {
            down.remove(slot);
        }
        assert_eq!(up.shape(), down.shape());
    }
}
