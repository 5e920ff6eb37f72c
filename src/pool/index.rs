//! The free blocks of one size class on one stream: exact best fit by (size, segment, address).
//! Touched by `books` alone.
//!
//! Sizes fall into bins of two levels with a bitmap each (as in TLSF): octaves, and 32 parts of each. In
//! each bin lies a treap over the records themselves, in the order of the full triple, whose priorities
//! are a hash of the place. So neither its shape nor an answer depends on history, and a bin of equal blocks
//! costs a logarithm. Nothing is allocated.

use std::cmp::Ordering;

use super::pages::{NIL, Records};

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

/// A place that holds a link of a treap.
#[derive(Clone, Copy)]
enum Link {
    Root,
    Left(u32),
    Right(u32),
}

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
fn key(records: &Records, slot: u32) -> (u64, u32, u64) {
    let record = records.get(slot);
    (record.size, record.segment, record.address)
}

/// The order of the index.
#[inline]
fn order(a: (u64, u32, u64), b: (u64, u32, u64)) -> Ordering {
    a.cmp(&b)
}

/// How high a free block stands in its treap: a hash of its place, and the place itself where hashes agree.
#[inline]
fn height(records: &Records, slot: u32) -> (u64, u64) {
    let address = records.get(slot).address;
    let product = u128::from(address ^ 0xD6E8_FEB8_6659_FD93) * 0x9E37_79B9_7F4A_7C15;
    ((product ^ (product >> 64)) as u64, address)
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
    fn set(&mut self, records: &mut Records, at: (usize, usize), link: Link, to: u32) {
        match link {
            Link::Root => self.roots[at.0][at.1] = to,
            Link::Left(slot) => records.edit(slot).left = to,
            Link::Right(slot) => records.edit(slot).right = to,
        }
    }

    /// Puts a free block in. `units` is its size in smallest blocks. O(log n) of the blocks in its bin.
    pub fn insert(&mut self, records: &mut Records, slot: u32, units: u64) {
        let at = bin(units);
        let mut below = self.roots[at.0][at.1];
        if below == NIL {
            self.roots[at.0][at.1] = slot;
            self.bins[at.0] |= 1 << at.1;
            self.octaves |= 1 << at.0;
            let record = records.edit(slot);
            (record.left, record.right) = (NIL, NIL);
            return;
        }
        let (mine, high) = (key(records, slot), height(records, slot));
        let mut link = Link::Root;
        while below != NIL && height(records, below) > high {
            (link, below) = match order(mine, key(records, below)) {
                Ordering::Less => (Link::Left(below), records.get(below).left),
                _ => (Link::Right(below), records.get(below).right),
            };
        }
        self.set(records, at, link, slot);
        // What stood there is parted by the key into the two sides.
        let (mut left, mut right) = (Link::Left(slot), Link::Right(slot));
        while below != NIL {
            if order(key(records, below), mine) == Ordering::Less {
                self.set(records, at, left, below);
                (left, below) = (Link::Right(below), records.get(below).right);
            } else {
                self.set(records, at, right, below);
                (right, below) = (Link::Left(below), records.get(below).left);
            }
        }
        self.set(records, at, left, NIL);
        self.set(records, at, right, NIL);
    }

    /// Takes a block out that is in. O(log n) of the blocks in its bin.
    pub fn remove(&mut self, records: &mut Records, slot: u32, units: u64) {
        let at = bin(units);
        let mut link = Link::Root;
        let mut here = self.roots[at.0][at.1];
        if here != slot {
            let mine = key(records, slot);
            while here != slot {
                debug_assert!(here != NIL, "a free block is in the index");
                if here == NIL {
                    return;
                }
                (link, here) = match order(mine, key(records, here)) {
                    Ordering::Less => (Link::Left(here), records.get(here).left),
                    _ => (Link::Right(here), records.get(here).right),
                };
            }
        }
        let (mut a, mut b) = (records.get(slot).left, records.get(slot).right);
        while a != NIL && b != NIL {
            if height(records, a) > height(records, b) {
                self.set(records, at, link, a);
                (link, a) = (Link::Right(a), records.get(a).right);
            } else {
                self.set(records, at, link, b);
                (link, b) = (Link::Left(b), records.get(b).left);
            }
        }
        self.set(records, at, link, if a == NIL { b } else { a });
        if self.roots[at.0][at.1] == NIL {
            self.bins[at.0] &= !(1 << at.1);
            if self.bins[at.0] == 0 {
                self.octaves &= !(1 << at.0);
            }
        }
    }

    /// The first block in order of at least `size` bytes (`units` smallest blocks).
    #[inline]
    pub fn at_least(&self, records: &Records, size: u64, units: u64) -> Option<u32> {
        let (octave, part) = bin(units);
        let (mut found, mut here) = (NIL, self.roots[octave][part]);
        while here != NIL {
            let record = records.get(here);
            if record.size >= size {
                (found, here) = (here, record.left);
            } else {
                here = record.right;
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
        while records.get(first).left != NIL {
            first = records.get(first).left;
        }
        Some(first)
    }

    /// Size of the largest block, 0 if there is none.
    pub fn largest(&self, records: &Records) -> u64 {
        let Some(octave) = self.octaves.checked_ilog2() else {
            return 0;
        };
        let part = self.bins[octave as usize].ilog2();
        let mut last = self.roots[octave as usize][part as usize];
        while records.get(last).right != NIL {
            last = records.get(last).right;
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
        records: Records,
        list: FreeList,
        set: BTreeSet<(u64, u32, u64, u32)>,
    }

    impl Both {
        fn new(slots: u32) -> Self {
            let mut records = Records::default();
            while records.capacity() < slots as usize {
                records.grow();
            }
            Self {
                records,
                list: FreeList::EMPTY,
                set: BTreeSet::new(),
            }
        }

        fn insert(&mut self, slot: u32, size: u64, segment: u32, address: u64) {
            let record = self.records.edit(slot);
            (record.size, record.segment, record.address) = (size, segment, address);
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
        fn shape(&self) -> Vec<(u64, u32, u32)> {
            let mut shape: Vec<_> = self
                .set
                .iter()
                .map(|found| {
                    (
                        found.2,
                        self.records.get(found.3).left,
                        self.records.get(found.3).right,
                    )
                })
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
                depth.extend([(record.left, level + 1), (record.right, level + 1)]);
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
