//! The segments a pool holds now: physical memory, never brought back by a restore.

use std::collections::BTreeMap;

use super::{SizeClass, StreamId};

/// A reserved and mapped range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    /// Its number in order of registration.
    pub number: u32,
    /// The requests it serves.
    pub class: SizeClass,
    /// The stream it serves.
    pub stream: StreamId,
    /// The free lists of that stream and class.
    pub list: u32,
    /// Where it begins.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Segments by number, and by address.
#[derive(Default)]
pub(super) struct Segments {
    /// In order of registration.
    all: Vec<Segment>,
    /// Number by first address.
    by_address: BTreeMap<u64, u32>,
    /// The number of the next one.
    pub next_number: u32,
    /// Counts additions and removals: equal counts, equal segments.
    pub epoch: u64,
}

impl Segments {
    /// In order of registration.
    pub fn as_slice(&self) -> &[Segment] {
        &self.all
    }

    /// Where a number stands. O(1) while none was removed, else O(log n).
    fn position(&self, number: u32) -> Option<usize> {
        let guess = number as usize;
        if self
            .all
            .get(guess)
            .is_some_and(|segment| segment.number == number)
        {
            return Some(guess);
        }
        self.all
            .binary_search_by_key(&number, |segment| segment.number)
            .ok()
    }

    /// The segment of a number.
    pub fn get(&self, number: u32) -> Option<&Segment> {
        self.position(number).map(|at| &self.all[at])
    }

    /// The segment an address lies in. O(log n).
    pub fn holding(&self, address: u64) -> Option<&Segment> {
        let (_, &number) = self.by_address.range(..=address).next_back()?;
        self.get(number)
            .filter(|segment| address - segment.address < segment.bytes)
    }

    /// Whether a range shares an address with a segment. O(log n).
    pub fn overlaps(&self, address: u64, bytes: u64) -> bool {
        self.holding(address).is_some()
            || self
                .by_address
                .range(address..address + bytes)
                .next()
                .is_some()
    }

    /// Adds one, whose number is `next_number`.
    pub fn push(&mut self, segment: Segment) {
        self.next_number = segment.number + 1;
        self.epoch += 1;
        self.by_address.insert(segment.address, segment.number);
        self.all.push(segment);
    }

    /// Removes the one at a position.
    pub fn remove(&mut self, at: usize) -> Segment {
        let segment = self.all.remove(at);
        self.by_address.remove(&segment.address);
        self.epoch += 1;
        segment
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_by_number_and_by_address_also_when_some_are_gone() {
        let mut segments = Segments::default();
        for (number, address) in [(0, 3000), (1, 1000), (2, 2000)] {
            let (class, stream) = (SizeClass::Small, StreamId(0));
            segments.push(Segment {
                number,
                class,
                stream,
                list: 0,
                address,
                bytes: 1000,
            });
        }
        let at =
            |segments: &Segments, address| segments.holding(address).map(|segment| segment.number);
        assert_eq!(
            [999, 1000, 1999, 2000, 3999, 4000].map(|a| at(&segments, a)),
            [None, Some(1), Some(1), Some(2), Some(0), None]
        );
        assert_eq!(segments.remove(1).address, 1000);
        assert_eq!(
            [999, 1000, 2000].map(|a| at(&segments, a)),
            [None, None, Some(2)]
        );
        assert!(segments.get(1).is_none());
        assert_eq!(segments.get(2).map(|segment| segment.address), Some(2000));
        assert_eq!(segments.epoch, 4);
        let overlaps = [
            (1000, 1000),
            (1000, 1001),
            (3999, 1),
            (4000, 1),
            (1500, 5000),
        ];
        assert_eq!(
            overlaps.map(|(a, b)| segments.overlaps(a, b)),
            [false, true, true, false, true]
        );
    }
}
