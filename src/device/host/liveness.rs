//! Which bytes of a mapped range have no owner.

use std::collections::BTreeMap;

/// The dead parts of one mapped range: disjoint intervals of offsets that do not touch, start to end.
///
/// Everything else is live. Both marks cost a logarithm, and the intervals they swallow.
#[derive(Debug, Default)]
pub(super) struct Dead(BTreeMap<u64, u64>);

impl Dead {
    /// Makes `start..end` dead.
    pub(super) fn kill(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let (mut low, mut high) = (start, end);
        // Every interval that overlaps or touches becomes part of the new one.
        while let Some((&at, &to)) = self
            .0
            .range(..=high)
            .next_back()
            .filter(|&(_, &to)| to >= low)
        {
            self.0.remove(&at);
            low = low.min(at);
            high = high.max(to);
        }
        self.0.insert(low, high);
    }

    /// Makes `start..end` live.
    pub(super) fn revive(&mut self, start: u64, end: u64) {
        while let Some((&at, &to)) = self
            .0
            .range(..end)
            .next_back()
            .filter(|&(_, &to)| to > start)
        {
            self.0.remove(&at);
            if to > end {
                self.0.insert(end, to);
            }
            if at < start {
                self.0.insert(at, start);
            }
        }
    }

    /// The first dead byte of `start..end`.
    pub(super) fn first(&self, start: u64, end: u64) -> Option<u64> {
        if self.0.is_empty() {
            return None;
        }
        if let Some((_, &to)) = self.0.range(..=start).next_back()
            && to > start
        {
            return (start < end).then_some(start);
        }
        self.0.range(start..end).next().map(|(&at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intervals(dead: &Dead) -> Vec<(u64, u64)> {
        dead.0.iter().map(|(&at, &to)| (at, to)).collect()
    }

    #[test]
    fn marks_agree_with_a_bitmap() {
        let mut rng = super::super::schedule::Rng::new(7);
        let (mut dead, mut bits) = (Dead::default(), [false; 64]);
        for _ in 0..5000 {
            let (a, b) = (rng.below(65), rng.below(65));
            let (start, end, kill) = (a.min(b), a.max(b), rng.below(2) == 0);
            bits[start..end].fill(kill);
            if kill {
                dead.kill(start as u64, end as u64)
            } else {
                dead.revive(start as u64, end as u64)
            }
            let (a, b) = (rng.below(65), rng.below(65));
            let (start, end) = (a.min(b), a.max(b));
            let first = (start..end).find(|&i| bits[i]).map(|i| i as u64);
            assert_eq!(
                dead.first(start as u64, end as u64),
                first,
                "{start}..{end} of {:?}",
                intervals(&dead)
            );
        }
    }

    #[test]
    fn touching_intervals_are_one() {
        let mut dead = Dead::default();
        dead.kill(0, 8);
        dead.kill(16, 24);
        dead.kill(8, 16);
        assert_eq!(intervals(&dead), [(0, 24)]);
        dead.revive(4, 6);
        assert_eq!(intervals(&dead), [(0, 4), (6, 24)]);
    }
}
