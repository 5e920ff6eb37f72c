//! Generations: the steps of a program, each open as long as its token lives.
//!
//! Opening and ending one is on the path of every step, so it takes no lock: a ring says which of the last generations are
//! open, and only a token that outlives a full turn of the ring sends its successor there to a list.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicU64, Mutex, lock};

/// Generations that are open at once before the list is needed. (A model has few, so that they come to need it.)
pub(super) const RING: u64 = if cfg!(loom) { 2 } else { 64 };

/// The generations of one tree. What each step touches lies together, beside the count of its handles.
#[repr(C)]
pub(super) struct Generations {
    next: AtomicU64,
    /// How many tokens were dropped: a run looks at the path only when this has changed.
    ended: AtomicU64,
    /// How many are listed.
    listed_len: AtomicU64,
    /// At `g % RING`: `g + 1` while `g` is open and has its place here, else 0.
    ring: [AtomicU64; RING as usize],
    /// Open generations whose place in the ring was taken.
    listed: Mutex<Vec<u64>>,
}

impl Generations {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Generations {
            ring: std::array::from_fn(|_| AtomicU64::new(0)),
            listed: Mutex::new(Vec::new()),
            listed_len: AtomicU64::new(0),
            next: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        })
    }

    pub(super) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    fn place(&self, generation: u64) -> &AtomicU64 {
        &self.ring[(generation % RING) as usize]
    }

    #[inline]
    pub(super) fn is_open(&self, generation: u64) -> bool {
        self.place(generation).load(Ordering::Acquire) == generation + 1
            || (self.listed_len.load(Ordering::Acquire) > 0
                && lock(&self.listed).contains(&generation))
    }

    #[inline]
    pub(super) fn open(self: &Arc<Self>) -> Step {
        let generation = self.next.fetch_add(1, Ordering::Relaxed);
        let place = self.place(generation);
        if place
            .compare_exchange(0, generation + 1, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            self.list(|listed| listed.push(generation));
        }
        Step {
            generations: self.clone(),
            generation,
        }
    }

    #[cold]
    fn list(&self, change: impl FnOnce(&mut Vec<u64>)) {
        let mut listed = lock(&self.listed);
        change(&mut listed);
        self.listed_len
            .store(listed.len() as u64, Ordering::Release);
    }

    #[inline]
    fn end(&self, generation: u64) {
        let place = self.place(generation);
        // Nobody else writes a place that holds this generation.
        if place.load(Ordering::Relaxed) == generation + 1 {
            place.store(0, Ordering::Release);
        } else {
            self.list(|listed| listed.retain(|g| *g != generation));
        }
        self.ended.fetch_add(1, Ordering::Release);
    }
}

/// The token of a generation.
///
/// While it lives, outputs made with it that are held are never overwritten. (An input that is passed through keeps the step it was made in.) From the first run after it was dropped, reading
/// them is [`Error::Stale`](crate::Error::Stale); that run itself may still take them as inputs, so what goes from step to step needs no old token. (Other runs of
/// that step may not: who feeds several keeps the old token until the last.)
#[must_use = "a generation ends when its token is dropped"]
pub struct Step {
    pub(super) generations: Arc<Generations>,
    generation: u64,
}

impl Step {
    /// Its number, from 0, in order of opening.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.generation
    }
}

impl Drop for Step {
    #[inline]
    fn drop(&mut self) {
        self.generations.end(self.generation);
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Step({})", self.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_outlives_the_ring_keeps_its_generation_open() {
        let generations = Generations::new();
        let old = generations.open();
        let tokens: Vec<Step> = (0..200).map(|_| generations.open()).collect();
        assert!((0..=200).all(|g| generations.is_open(g)));
        assert!(!generations.is_open(201));
        drop(tokens);
        assert_eq!(generations.ended(), 200);
        assert!(generations.is_open(0));
        assert!((1..=200).all(|g| !generations.is_open(g)));
        // The place of generation 0 is still its own: 256 is listed.
        let later: Vec<Step> = (201..=256).map(|_| generations.open()).collect();
        drop(old);
        assert!(!generations.is_open(0));
        assert!(generations.is_open(256));
        drop(later);
        assert!(!generations.is_open(256));
        assert_eq!(*lock(&generations.listed), Vec::<u64>::new());
    }
}
