//! Locks, atomics and threads, and the one way this crate takes a lock.
//!
//! They are the standard ones. With `--cfg loom` they are loom's, which runs a model of a few threads in every order that the memory model allows; the
//! models are the files `models.rs` beside what they are of. Some small locks are the standard ones always: nothing of ours happens under them.

#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64},
    sync::{Condvar, Mutex, MutexGuard, OnceLock},
    thread,
};

#[cfg(loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64},
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
#[cfg(loom)]
pub(crate) use once::OnceLock;

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Takes the lock, whether or not a thread panicked while it held it: nothing here is left half done by a panic,
/// since no code of the caller's runs under a lock (but a backing's methods).
#[cfg(not(loom))]
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(loom)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This thread's name. Kept by the thread: the standard library counts a handle for each question.
#[cfg(not(loom))]
pub(crate) fn thread_id() -> thread::ThreadId {
    thread_local! {
        static ID: thread::ThreadId = thread::current().id();
    }
    ID.with(|id| *id)
}

#[cfg(loom)]
pub(crate) fn thread_id() -> thread::ThreadId {
    thread::current().id()
}

/// Raises a flag that several threads raise and one lowers. By an exchange, as [`lower`]: so whoever lowers it has seen what came before each raise, and
/// covers none that it has not seen.
pub(crate) fn raise(flag: &AtomicBool) {
    flag.swap(true, Ordering::AcqRel);
}

/// Lowers a flag, before the look for what it was raised for.
pub(crate) fn lower(flag: &AtomicBool) {
    flag.swap(false, Ordering::AcqRel);
}

/// Runs a model in every order of its threads with at most `LOOM_MAX_PREEMPTIONS` preemptions; in every order, where that is not set.
#[cfg(all(test, loom))]
pub(crate) fn model(f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 100_000; // a run of a tree takes some locks
    builder.check(f);
}

#[cfg(loom)]
mod once {
    //! A `OnceLock` that loom sees: who finds it empty may be late, as with the standard one.

    use std::fmt;
    use std::sync::atomic::Ordering;

    use super::AtomicBool;

    pub(crate) struct OnceLock<T> {
        set: AtomicBool,
        value: std::sync::OnceLock<T>,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            OnceLock {
                set: AtomicBool::new(false),
                value: std::sync::OnceLock::new(),
            }
        }

        pub(crate) fn from(value: T) -> Self {
            OnceLock {
                set: AtomicBool::new(true),
                value: std::sync::OnceLock::from(value),
            }
        }

        pub(crate) fn set(&self, value: T) -> Result<(), T> {
            self.value.set(value)?;
            self.set.store(true, Ordering::Release);
            Ok(())
        }

        pub(crate) fn get(&self) -> Option<&T> {
            self.set
                .load(Ordering::Acquire)
                .then(|| self.value.get())
                .flatten()
        }
    }

    impl<T: fmt::Debug> fmt::Debug for OnceLock<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.value.fmt(f)
        }
    }
}
