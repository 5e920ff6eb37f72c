//! The atomic word of a storage: generation, owners, and two flags. Only `storage.rs` touches it.
//!
//! Layout, from the top: 46 bits of stamp (the generation; at a replay every microsecond it lasts two years), one bit *watched*,
//! one bit *owning* (it owns a block of a pool), 16 bits of owners. Two values of owners are special: `STUCK` (so many
//! handles that they are not counted any more; held until the generation ends) and `DYING` (the last owner is gone and its
//! thread is still clearing up; whoever wants to hand the storage out waits for it).

use std::sync::atomic::Ordering;

use crate::sync::{AtomicU64, spin_loop, thread};

const OWNERS: u64 = 0xffff;
const STUCK: u64 = 0xffff;
const DYING: u64 = 0xfffe;
const OWNING: u64 = 1 << 16;
const WATCHED: u64 = 1 << 17;
const STAMP: u32 = 18;

#[derive(Debug)]
pub(super) struct Word(AtomicU64);

fn owners(w: u64) -> u64 {
    match w & OWNERS {
        DYING => 0,
        n => n,
    }
}

/// What became of a release.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Release {
    /// Somebody else holds it still, or the handle is of another generation.
    Other,
    /// That was the last owner. The word says `DYING` until [`Word::settle_dead`].
    Last { owning: bool, watched: bool },
}

impl Word {
    pub(super) fn new(owning: bool, owners: u64) -> Word {
        Word(AtomicU64::new(owners | if owning { OWNING } else { 0 }))
    }

    pub(super) fn stamp(&self) -> u64 {
        self.0.load(Ordering::Acquire) >> STAMP
    }

    /// Handles that hold it. `DYING` counts as none, `STUCK` as its number.
    pub(super) fn owners(&self) -> u64 {
        owners(self.0.load(Ordering::Acquire))
    }

    /// The same, in the word's own order: a load may miss a release on another thread that misses in turn what this thread wrote before. Of two
    /// exchanges one sees the other, and all that came before it.
    pub(super) fn owners_in_order(&self) -> u64 {
        owners(self.0.fetch_add(0, Ordering::AcqRel))
    }

    pub(super) fn owning(&self) -> bool {
        self.0.load(Ordering::Acquire) & OWNING != 0
    }

    /// Changes the word by `f` until the exchange succeeds or `f` declines. The value before.
    fn update(&self, f: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, f)
            .ok()
    }

    pub(super) fn retain(&self, stamp: u64) {
        self.update(|w| {
            let owners = w & OWNERS;
            // A current handle exists (the caller's), so owners is neither 0 nor DYING.
            (w >> STAMP == stamp && owners != STUCK).then(|| {
                if owners + 1 == DYING {
                    w | STUCK
                } else {
                    w + 1
                }
            })
        });
    }

    /// One more owner, if it has any in the generation `stamp`. Whether it had.
    pub(super) fn retain_if_held(&self, stamp: u64) -> bool {
        self.update(|w| {
            let owners = w & OWNERS;
            let held = w >> STAMP == stamp && owners != 0 && owners != DYING;
            held.then(|| {
                if owners == STUCK || owners + 1 == DYING {
                    w | STUCK
                } else {
                    w + 1
                }
            })
        })
        .is_some()
    }

    #[inline]
    pub(super) fn release(&self, stamp: u64) -> Release {
        let before = self.update(|w| {
            let owners = w & OWNERS;
            if w >> STAMP != stamp || owners == STUCK || owners == DYING || owners == 0 {
                return None;
            }
            Some(if owners == 1 {
                (w & !OWNERS) | DYING
            } else {
                w - 1
            })
        });
        match before {
            Some(w) if w & OWNERS == 1 => Release::Last {
                owning: w & OWNING != 0,
                watched: w & WATCHED != 0,
            },
            _ => Release::Other,
        }
    }

    /// `DYING` becomes no owner, owning nothing. For the thread whose release was the last: nobody else writes a dying word.
    pub(super) fn settle_dead(&self) {
        let w = self.0.load(Ordering::Relaxed);
        debug_assert_eq!(w & OWNERS, DYING, "only the last release settles");
        self.0.store(w & !(OWNERS | OWNING), Ordering::Release);
    }

    /// Waits while another thread is clearing up. That thread takes no lock that a caller of this may hold.
    #[inline]
    pub(super) fn settled(&self) -> u64 {
        let mut spins = 0u32;
        loop {
            let w = self.0.load(Ordering::Acquire);
            if w & OWNERS != DYING {
                return w;
            }
            spins += 1;
            if spins < 64 {
                spin_loop()
            } else {
                thread::yield_now()
            }
        }
    }

    /// The next generation with so many owners, owning no block.
    #[inline]
    pub(super) fn hand_out(&self, owners: u64) {
        let w = self.settled();
        let stamp = (w >> STAMP) + 1;
        let owners = if owners >= DYING { STUCK } else { owners };
        self.0
            .store((stamp << STAMP) | (w & WATCHED) | owners, Ordering::Release);
    }

    /// Ends the generation: a next one without owners. `None` if nobody held it; else whether it owned and was watched.
    pub(super) fn invalidate(&self) -> Option<(bool, bool)> {
        loop {
            let w = self.settled();
            if w & OWNERS == 0 {
                return None;
            }
            let next = ((w >> STAMP) + 1) << STAMP | (w & WATCHED);
            if self
                .0
                .compare_exchange(w, next, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
            {
                return Some((w & OWNING != 0, w & WATCHED != 0));
            }
        }
    }

    /// Takes the generation from exactly `owners` owners: the word is `DYING` until [`put_back`](Word::put_back) or [`end`](Word::end). The word
    /// before; `None` if others hold it, or fewer.
    pub(super) fn take(&self, owners: u64) -> Option<u64> {
        self.settled();
        self.update(|w| {
            let all = w & OWNERS == owners && owners != 0 && owners != STUCK;
            all.then_some((w & !OWNERS) | DYING)
        })
    }

    /// Gives back what was taken.
    pub(super) fn put_back(&self, before: u64) {
        self.0.store(before, Ordering::Release);
    }

    /// What a word that was taken said: whether it owned, and was watched.
    pub(super) fn flags(before: u64) -> (bool, bool) {
        (before & OWNING != 0, before & WATCHED != 0)
    }

    /// Ends a generation that was taken: its handles touch nothing from here on.
    pub(super) fn end(&self, before: u64) {
        let next = ((before >> STAMP) + 1) << STAMP | (before & WATCHED);
        self.0.store(next, Ordering::Release);
    }

    /// It owns a block now. False if nobody holds it (any more).
    pub(super) fn set_owning(&self) -> bool {
        self.set(OWNING)
    }

    /// Its death is watched from now on. False if nobody holds it (any more).
    pub(super) fn set_watched(&self) -> bool {
        self.set(WATCHED)
    }

    /// Sets a flag, if somebody holds it. False only when its death is done, also if that began after the first look.
    fn set(&self, flag: u64) -> bool {
        loop {
            if self.settled() & OWNERS == 0 {
                return false;
            }
            let held = |w: u64| w & OWNERS != 0 && w & OWNERS != DYING;
            if self.update(|w| held(w).then_some(w | flag)).is_some() {
                return true;
            }
        }
    }

    /// One owner for a generation that has none. Its stamp; `None` if it has owners.
    pub(super) fn resurrect(&self) -> Option<u64> {
        self.settled();
        self.update(|w| (w & OWNERS == 0).then_some(w + 1))
            .map(|w| w >> STAMP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_of_an_older_generation_touches_nothing() {
        let word = Word::new(true, 2);
        assert_eq!(word.release(0), Release::Other);
        assert_eq!(
            word.release(0),
            Release::Last {
                owning: true,
                watched: false
            }
        );
        word.settle_dead();
        word.hand_out(1);
        assert_eq!(word.stamp(), 1);
        assert_eq!(word.release(0), Release::Other);
        assert_eq!(word.owners(), 1);
        word.retain(0);
        assert_eq!(word.owners(), 1);
        assert_eq!(
            word.release(1),
            Release::Last {
                owning: false,
                watched: false
            }
        );
    }

    #[test]
    fn owners_saturate_and_stay() {
        let word = Word::new(true, 1);
        for _ in 0..70_000 {
            word.retain(0);
        }
        assert_eq!(word.owners(), STUCK);
        for _ in 0..70_000 {
            assert_eq!(word.release(0), Release::Other);
        }
        assert_eq!(word.invalidate(), Some((true, false)));
        assert_eq!((word.stamp(), word.owners()), (1, 0));
    }

    #[test]
    fn a_generation_is_taken_from_exactly_its_owners() {
        let word = Word::new(true, 2);
        assert_eq!(word.take(1), None);
        assert_eq!(word.take(3), None);
        let before = word.take(2).unwrap();
        assert_eq!(word.owners(), 0);
        assert!(!word.retain_if_held(0), "nobody comes in between");
        word.put_back(before);
        assert_eq!((word.owners(), word.stamp()), (2, 0));
        let before = word.take(2).unwrap();
        assert_eq!(Word::flags(before), (true, false));
        word.end(before);
        assert_eq!((word.owners(), word.stamp()), (0, 1));
        assert_eq!(word.release(0), Release::Other);
    }

    #[test]
    fn the_dead_are_resurrected_with_their_stamp() {
        let word = Word::new(true, 1);
        assert_eq!(word.resurrect(), None);
        assert_eq!(
            word.release(0),
            Release::Last {
                owning: true,
                watched: false
            }
        );
        assert!(word.owners() == 0);
        word.settle_dead();
        assert_eq!(word.resurrect(), Some(0));
        assert_eq!(word.owners(), 1);
    }
}
