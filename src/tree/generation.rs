//! Generations: the steps of a program, each open as long as its token lives.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;

use crate::sync::lock;

/// The generations of one tree.
#[derive(Debug, Default)]
pub(super) struct Generations {
    /// Those whose token lives.
    open: Mutex<SmallVec<[u64; 8]>>,
    next: AtomicU64,
    /// How many tokens were dropped: a run looks at the path only when this has changed.
    ended: AtomicU64,
}

impl Generations {
    pub(super) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    pub(super) fn is_open(&self, generation: u64) -> bool {
        lock(&self.open).contains(&generation)
    }

    pub(super) fn open(self: &Arc<Self>) -> Step {
        let generation = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.open).push(generation);
        Step {
            generations: self.clone(),
            generation,
        }
    }
}

/// The token of a generation.
///
/// While it lives, outputs made with it that are held are never overwritten. From the first run after it was dropped, reading
/// them is [`Error::Stale`](crate::Error::Stale).
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
    fn drop(&mut self) {
        lock(&self.generations.open).retain(|g| *g != self.generation);
        self.generations.ended.fetch_add(1, Ordering::Release);
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Step({})", self.generation)
    }
}
