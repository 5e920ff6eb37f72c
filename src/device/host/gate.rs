//! What surrounds the device's lock: handles that were dropped, and who runs work just now.
//!
//! A handle's drop never takes the device's lock, so it may happen anywhere (inside a kernel's body, in
//! a closure that work owned); the next call that takes the lock does what is due.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::stream::{EventKey, ExecKey, StreamKey};
use crate::device::DevicePtr;
use crate::sync::thread::{self, ThreadId};

/// What a dropped handle leaves to be done.
pub(super) enum Deferred {
    Stream(StreamKey),
    Event(EventKey),
    Exec(ExecKey),
    Graph,
    GraphMemory(DevicePtr, u64),
}

#[derive(Default)]
pub(super) struct Gate {
    due: Mutex<Vec<Deferred>>,
    any_due: AtomicBool,
    runner: Mutex<Option<ThreadId>>,
    running: AtomicBool,
}

impl Gate {
    pub(super) fn defer(&self, what: Deferred) {
        self.due
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(what);
        self.any_due.store(true, Ordering::Release);
    }

    /// What has become due since the last time. One load where nothing has.
    pub(super) fn take_due(&self) -> Option<Vec<Deferred>> {
        if !self.any_due.load(Ordering::Acquire) {
            return None;
        }
        self.any_due.store(false, Ordering::Release);
        Some(std::mem::take(
            &mut *self.due.lock().unwrap_or_else(PoisonError::into_inner),
        ))
    }

    /// Notes that this thread, which has the lock, runs work from here on, until the guard is dropped.
    pub(super) fn run(&self) -> Running<'_> {
        *self.runner.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current().id());
        self.running.store(true, Ordering::Release);
        Running(self)
    }

    /// Whether this thread runs work just now, so that taking the lock would wait for itself.
    pub(super) fn is_inside(&self) -> bool {
        self.running.load(Ordering::Acquire)
            && *self.runner.lock().unwrap_or_else(PoisonError::into_inner)
                == Some(thread::current().id())
    }
}

pub(super) struct Running<'a>(&'a Gate);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::Release);
        *self.0.runner.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
