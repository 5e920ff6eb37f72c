//! The free blocks of one size class on one stream: exact best fit by (size, segment, address).
//! Touched by `books` alone.
//!
//! Sizes fall into bins of two levels with a bitmap each (as in TLSF): octaves, and 32 parts of each. In
//! each bin lies a treap over the records themselves, in the order of the full triple, whose priorities
//! are a hash of the place. So neither its shape nor an answer depends on history, and a bin of equal blocks
//! costs a logarithm. Nothing is allocated. Below a block that is not in the index there is nothing.

use smallvec::SmallVec;

use super::pages::{NIL, Pages, Record, bits};

/// What the index works on.
type Blocks = Pages<Record>;

/// Bins of an octave, as a power of two: most bins hold a block or two.
const PARTS_LOG: u32 = 5;
/// Bins of an octave.
const PARTS: usize = 1 << PARTS_LOG;
/// Octaves; the last one takes all that is larger.
const OCTAVES: usize = 32;

/// Bins of all octaves.
const BINS: usize = OCTAVES * PARTS;

/// The free blocks of one size class on one stream.
#[derive(Clone)]
pub(super) struct FreeList {
    /// Octaves in which some bin is not empty.
    octaves: u32,
    /// For each octave the bins that are not empty.
    bins: [u32; OCTAVES],
    /// The root of each bin's treap.
    roots: [u32; BINS],
}

/// An octave of a saved free list in which some bin is not empty.
pub(super) struct Octave {
    /// The list's number.
    pub list: u32,
    /// The octave's.
    octave: u32,
    /// Its bins that are not empty.
    bins: u32,
    /// The roots of all its bins.
    roots: [u32; PARTS],
}

/// A place that holds a link of a treap: a side of a record, or the root of the bin ([`NIL`]).
type Link = (u32, usize);

/// The bin of a size in units of the pool's smallest block.
#[inline]
fn bin(units: u64) -> usize {
    debug_assert!(units > 0, "a block of no bytes has no bin");
    let octave = (u64::BITS - 1 - units.leading_zeros()) as usize;
    if octave >= OCTAVES {
        return BINS - 1;
    }
    octave * PARTS + ((units << PARTS_LOG) >> octave) as usize % PARTS
}

/// Octave and part of a bin.
#[inline]
fn parts(bin: usize) -> (usize, usize) {
    (bin / PARTS % OCTAVES, bin % PARTS)
}

/// A block in the index, and the link to it.
#[derive(Clone, Copy)]
pub(super) struct Found {
    /// The block.
    pub slot: u32,
    /// Its bin.
    at: usize,
    /// What holds it.
    link: Link,
}

/// The key of a free block.
#[inline]
fn key(block: &Record) -> (u64, u32, u64) {
    (block.size, block.segment, block.address)
}

/// Whether a key comes before another; without a branch, since no processor could guess it.
#[inline]
fn before(a: (u64, u32, u64), b: (u64, u32, u64)) -> bool {
    (a.0 < b.0) | ((a.0 == b.0) & ((a.1 < b.1) | ((a.1 == b.1) & (a.2 < b.2))))
}

impl FreeList {
    /// No blocks.
    pub const EMPTY: FreeList = FreeList {
        octaves: 0,
        bins: [0; OCTAVES],
        roots: [NIL; BINS],
    };

    /// How many octaves are not empty.
    pub fn octaves(&self) -> usize {
        self.octaves.count_ones() as usize
    }

    /// Adds its octaves that are not empty to `saved`, as those of list number `list`.
    pub fn save(&self, list: u32, saved: &mut SmallVec<[Octave; 1]>) {
        saved.extend(bits(self.octaves.into()).map(|octave| Octave {
            list,
            octave: octave as u32,
            bins: self.bins[octave],
            roots: self.roots.as_chunks().0[octave],
        }));
    }

    /// Makes a list that is empty have a saved octave.
    pub fn load(&mut self, saved: &Octave) {
        let octave = saved.octave as usize;
        self.octaves |= 1 << octave;
        self.bins[octave] = saved.bins;
        self.roots.as_chunks_mut().0[octave] = saved.roots;
    }

    /// Makes it empty.
    pub fn clear(&mut self) {
        for octave in bits(self.octaves.into()) {
            self.bins[octave] = 0;
            self.roots.as_chunks_mut::<PARTS>().0[octave] = [NIL; PARTS];
        }
        self.octaves = 0;
    }

    /// Writes a link.
    #[inline]
    fn set(&mut self, records: &mut Blocks, at: usize, (slot, side): Link, to: u32) {
        match slot {
            NIL => self.roots[at % BINS] = to,
            _ => records.edit(slot).below[side] = to,
        }
    }

    /// Puts a free block in, below which there is nothing. `units` is its size in smallest blocks. O(log n) of the blocks in its bin.
    #[inline]
    pub fn insert(&mut self, records: &mut Blocks, slot: u32, units: u64) {
        let at = bin(units);
        let root = &mut self.roots[at % BINS];
        if *root != NIL {
            return self.insert_below(records, slot, at);
        }
        *root = slot;
        let (octave, part) = parts(at);
        self.bins[octave] |= 1 << part;
        self.octaves |= 1 << octave;
    }

    /// Puts a free block into a bin that is not empty.
    fn insert_below(&mut self, records: &mut Blocks, slot: u32, at: usize) {
        let mut below = self.roots[at % BINS];
        let block = records.get(slot);
        let (mine, high) = (key(block), block.height);
        let mut link = (NIL, 0);
        while below != NIL {
            let here = records.get(below);
            if here.height < high {
                break;
            }
            let side = usize::from(before(key(here), mine));
            (link, below) = ((below, side), here.below[side]);
        }
        self.set(records, at, link, slot);
        // What stood there is parted by the key into the two sides; `holes` are where the next of each goes.
        let mut holes = [(slot, 0), (slot, 1)];
        while below != NIL {
            let here = records.get(below);
            let side = usize::from(before(mine, key(here)));
            let (hole, inner) = (holes[side], 1 - side);
            let next = here.below[inner];
            records.edit(hole.0).below[hole.1] = below;
            holes[side] = (below, inner);
            below = next;
        }
        for (hole, side) in holes {
            records.edit(hole).below[side] = NIL;
        }
    }

    /// Takes a block out that is in. O(log n) of the blocks in its bin.
    #[inline]
    pub fn remove(&mut self, records: &mut Blocks, slot: u32, units: u64) {
        let at = bin(units);
        let root = self.roots[at % BINS];
        if root == slot {
            let link = (NIL, 0);
            return self.take(records, Found { slot, at, link });
        }
        self.remove_below(records, slot, at, root);
    }

    /// Takes a block out that is not its bin's root.
    fn remove_below(&mut self, records: &mut Blocks, slot: u32, at: usize, root: u32) {
        let mine = key(records.get(slot));
        let (mut link, mut below) = ((NIL, 0), root);
        while below != slot {
            debug_assert!(below != NIL, "a free block is in the index");
            if below == NIL {
                return;
            }
            let here = records.get(below);
            let side = usize::from(before(key(here), mine));
            (link, below) = ((below, side), here.below[side]);
        }
        self.take(records, Found { slot, at, link });
    }

    /// Takes a block out that was found. O(log n) of the blocks in its bin.
    #[inline]
    pub fn take(&mut self, records: &mut Blocks, Found { slot, at, link }: Found) {
        let below = records.get(slot).below;
        if link.0 != NIL || below[0] & below[1] != NIL {
            return self.take_from(records, slot, at, link);
        }
        self.roots[at % BINS] = NIL;
        let (octave, part) = parts(at);
        self.bins[octave] &= !(1 << part);
        self.octaves &= !(u32::from(self.bins[octave] == 0) << octave);
    }

    /// Takes a block out of a bin in which there are others.
    fn take_from(&mut self, records: &mut Blocks, slot: u32, at: usize, mut link: Link) {
        let mut sides = records.get(slot).below;
        records.edit(slot).below = [NIL; 2];
        // The higher of the two below takes its place, and so on down.
        while sides[0] != NIL && sides[1] != NIL {
            let height = |side: usize| records.get(sides[side]).height;
            let side = usize::from(height(1) > height(0));
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
    pub fn at_least(&self, records: &Blocks, size: u64, units: u64) -> Option<Found> {
        let at = bin(units);
        let (mut link, mut here) = ((NIL, 0), self.roots[at % BINS]);
        let (mut slot, mut to) = (NIL, link);
        while here != NIL {
            let record = records.get(here);
            let side = usize::from(record.size < size);
            if side == 0 {
                (slot, to) = (here, link);
            }
            (link, here) = ((here, side), record.below[side]);
        }
        if slot != NIL {
            return Some(Found { slot, at, link: to });
        }
        // All bins above hold larger blocks only: the first of the next one is it.
        let (octave, part) = parts(at);
        let above = u64::from(self.bins[octave]) & (!1 << part);
        let at = if above != 0 {
            octave * PARTS + above.trailing_zeros() as usize
        } else {
            let octaves = u64::from(self.octaves) & (!1 << octave);
            if octaves == 0 {
                return None;
            }
            let octave = octaves.trailing_zeros() as usize % OCTAVES;
            octave * PARTS + self.bins[octave].trailing_zeros() as usize
        };
        let (mut link, mut slot) = ((NIL, 0), self.roots[at % BINS]);
        loop {
            let smaller = records.get(slot).below[0];
            if smaller == NIL {
                return Some(Found { slot, at, link });
            }
            (link, slot) = ((slot, 0), smaller);
        }
    }

    /// Size of the largest block, 0 if there is none.
    pub fn largest(&self, records: &Blocks) -> u64 {
        let Some(octave) = self.octaves.checked_ilog2() else {
            return 0;
        };
        let part = self.bins[octave as usize].ilog2();
        let mut last = self.roots[octave as usize * PARTS + part as usize];
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
            let (size, segment, address) = key(self.records.get(slot));
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
                self.list
                    .at_least(&self.records, size, size)
                    .map(|found| found.slot),
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
            [1, 2, 3, 8, 9].map(|units| parts(bin(units))),
            [(0, 0), (1, 0), (1, 16), (3, 0), (3, 4)]
        );
        assert_eq!(
            [(1 << 32) - 1, 1 << 32, u64::MAX].map(|units| parts(bin(units))),
            [(31, 31); 3]
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
        let mut depth = vec![(both.list.roots[bin(7)], 1)];
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
            let found = both.list.at_least(&both.records, 5, 5).unwrap();
            assert_eq!(found.slot, slot);
            both.list.take(&mut both.records, found);
            assert_eq!(both.records.get(slot).below, [NIL; 2]);
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
