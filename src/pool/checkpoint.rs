//! Checkpoints: the handle a caller holds, and what the pool keeps for it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::books::SavedState;
use super::pages::Tables;

/// What a pool and its checkpoints share. Its address tells pools apart.
#[derive(Default)]
pub(super) struct Token {
    /// Keys of checkpoints that were dropped and not yet let go of.
    dropped: Mutex<Vec<u32>>,
    /// Whether there are such.
    any: AtomicBool,
}

impl Token {
    /// Moves the keys of dropped checkpoints to `keys`.
    #[inline]
    pub fn take_dropped(&self, keys: &mut Vec<u32>) {
        if self.any.load(Ordering::Acquire) {
            let mut dropped = self.dropped();
            self.any.store(false, Ordering::Relaxed);
            keys.append(&mut dropped);
        }
    }

    fn dropped(&self) -> MutexGuard<'_, Vec<u32>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A state of a pool that can be returned to: see [`Pool::checkpoint`](super::Pool::checkpoint).
///
/// Clones name the same state. When the last is dropped, on any thread and at any time, also after the
/// pool, the state is let go of; the pool takes note at its next checkpoint, restore or trim.
#[derive(Clone)]
pub struct Checkpoint(Arc<Held>);

/// The one thing all clones of a checkpoint share.
struct Held {
    /// The pool's.
    token: Arc<Token>,
    /// Which of its saved states.
    key: u32,
}

impl Checkpoint {
    /// A handle on the saved state `key`.
    pub(super) fn new(token: &Arc<Token>, key: u32) -> Self {
        Self(Arc::new(Held {
            token: Arc::clone(token),
            key,
        }))
    }

    /// Which saved state of the pool that has this token; none if another has it.
    pub(super) fn key(&self, token: &Arc<Token>) -> Option<usize> {
        Arc::ptr_eq(&self.0.token, token).then_some(self.0.key as usize)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut dropped = self.token.dropped();
        dropped.push(self.key);
        self.token.any.store(true, Ordering::Release);
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({})", self.0.key)
    }
}

/// A saved state. Its memory is used again for the next one.
pub(super) struct Saved {
    /// Whether a checkpoint names it.
    pub held: bool,
    /// The tables of its pages.
    pub tables: Tables,
    /// All else.
    pub state: SavedState,
    /// The segments' epoch then.
    pub epoch: u64,
}

impl Saved {
    /// A place for a state.
    pub const EMPTY: Saved = Saved {
        held: false,
        tables: Tables::EMPTY,
        state: SavedState::EMPTY,
        epoch: 0,
    };
}
