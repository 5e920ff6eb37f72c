//! What all handles of a CUDA device share, and how every call is made: the context current, the code read, a loss remembered.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::{CudaContext, sys};

use super::captures::Captures;
use super::codes;
use super::conditional::Body;
use super::driver::{Driver, SUCCESS};
use super::gather::GatherKernels;
use super::memory::{Books, Source};
use super::module::{Function, Modules};
use super::stream::{Handle, Wrapped};
use crate::device::{Call, Code, DeviceError, Result};
use crate::sync::Mutex;

/// A value of the driver's that threads may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shared<T>(pub(super) T);
// SAFETY: it is only made of the driver's handles, which are names: the driver may be called with them from any thread. What
// the driver does not serialise itself (graphs, executables) lies behind a lock.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

/// One device. What a launch touches comes first.
#[repr(C)]
pub(super) struct Inner {
    pub(super) driver: &'static Driver,
    /// The context's handle.
    pub(super) raw: Shared<sys::CUcontext>,
    /// Captures that were begun through this device, and have not been ended through it.
    pub(super) captures: AtomicUsize,
    /// How the context was lost.
    pub(super) lost: OnceLock<(Call, Code)>,
    /// Whether others may have a stream or an event of this device in hand, or it one of theirs: then captures may be underway that it does not know of.
    pub(super) mixed: AtomicBool,
    pub(super) context: ManuallyDrop<Arc<CudaContext>>,
    pub(super) ordinal: i32,
    pub(super) name: String,
    /// The compute capability: major, minor.
    pub(super) arch: (u32, u32),
    /// Where memory comes from, and with it what sizes and addresses are multiples of.
    pub(super) source: Source,
    pub(super) granularity: u64,
    /// Whether the device reads pageable memory itself, so that a copy from there may still be reading when its call returns.
    pub(super) reads_pageable: bool,
    pub(super) next_stream: AtomicU32,
    pub(super) books: Mutex<Books>,
    pub(super) modules: Mutex<Modules>,
    /// The streams that this device keeps alive itself, by number.
    pub(super) streams: Mutex<HashMap<u32, Weak<Handle>>>,
    pub(super) wrapped: Mutex<Wrapped>,
    /// Memory that is freed to wait for all streams.
    pub(super) block: Mutex<Option<sys::CUdeviceptr>>,
    pub(super) gather: OnceLock<GatherKernels>,
    /// The captures underway that have their gather, by the driver's number.
    pub(super) gathered: Mutex<Vec<u64>>,
    /// What is known of the captures underway that were begun through this device.
    pub(super) begun: Mutex<Captures<Weak<Handle>>>,
    /// The bodies of ifs that are open.
    pub(super) bodies: Mutex<Vec<Body>>,
    /// The kernel that reads the predicate of an if.
    pub(super) if_kernel: OnceLock<Arc<Function>>,
}

/// While it lives, the device's context is this thread's current one; then the caller's is again.
pub(super) struct Current<'a> {
    driver: &'a Driver,
    before: Option<sys::CUcontext>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was this thread's current context (or null: none) when the call began.
            unsafe { (self.driver.cuCtxSetCurrent)(before) };
        }
    }
}

/// While it lives, this thread may make calls that captures of other streams would mind.
pub(super) struct Relaxed<'a> {
    driver: &'a Driver,
    before: u32,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // SAFETY: the pointer is to a live number of the enum's size, one that the driver itself gave.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)((&raw mut self.before).cast()) };
    }
}

/// While it lives, this thread may destroy what is the device's: its context is current, and no capture minds, whoever began it
/// and in which mode. Destroying an executable is one of the calls that break a capture otherwise.
pub(super) struct Ending<'a> {
    // Given back in this order.
    _relaxed: Option<Relaxed<'a>>,
    _current: Current<'a>,
}

impl Inner {
    /// Begins a call: refused if the context is lost.
    pub(super) fn enter(&self, call: Call) -> Result<Current<'_>> {
        match self.lost.get() {
            None => self.current(call),
            Some(lost) => Err(self.lost_error(call, *lost)),
        }
    }

    /// Begins a call that also a lost context admits: those that take down. Two driver calls fewer where the context is current.
    pub(super) fn current(&self, call: Call) -> Result<Current<'_>> {
        let mut now = ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let code = unsafe { (self.driver.cuCtxGetCurrent)(&raw mut now) };
        self.check(call, code, || "which context is current".into())?;
        if now == self.raw.0 {
            return Ok(Current {
                driver: self.driver,
                before: None,
            });
        }
        // SAFETY: the context lives as long as `self`.
        let code = unsafe { (self.driver.cuCtxSetCurrent)(self.raw.0) };
        self.check(call, code, || "to make the context current".into())?;
        Ok(Current {
            driver: self.driver,
            before: Some(now),
        })
    }

    /// Whether, as far as this device can know, no stream of its own captures.
    pub(super) fn nothing_captures(&self) -> bool {
        self.captures.load(Ordering::Acquire) == 0 && !self.mixed.load(Ordering::Acquire)
    }

    /// Notes that a handle of the driver's goes out, or came in.
    pub(super) fn mix(&self) {
        self.mixed.store(true, Ordering::Release);
    }

    /// Exchanges this thread's capture mode for the relaxed one.
    pub(super) fn relax(&self, call: Call) -> Result<Relaxed<'_>> {
        const RELAXED: u32 = 2; // CU_STREAM_CAPTURE_MODE_RELAXED
        Ok(Relaxed {
            driver: self.driver,
            before: self.exchange_mode(call, RELAXED)?,
        })
    }

    /// Exchanges this thread's capture mode, by the driver's numbers.
    pub(super) fn exchange_mode(&self, call: Call, mut mode: u32) -> Result<u32> {
        // SAFETY: the pointer is to a live number of the enum's size, one of the enum's; it is read as a number, whatever the driver writes.
        let code =
            unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)((&raw mut mode).cast()) };
        self.check(call, code, || {
            "to exchange this thread's capture mode".into()
        })?;
        Ok(mode)
    }

    /// Begins a call that destroys something, from a drop: also on a lost context. `None` where the context cannot be made current, and so nothing
    /// can be destroyed in it.
    pub(super) fn ending(&self, what: &'static str) -> Option<Ending<'_>> {
        self.ending_call(Call::Driver(what)).ok()
    }

    /// The same for a call that can fail.
    pub(super) fn ending_call(&self, call: Call) -> Result<Ending<'_>> {
        let current = self.current(call)?;
        let relaxed = match self.lost.get() {
            None => self.relax(call).ok(),
            // Nothing captures in a lost context.
            Some(_) => None,
        };
        Ok(Ending {
            _relaxed: relaxed,
            _current: current,
        })
    }

    /// Reads a call's code. `asked` says what was asked for.
    pub(super) fn check(
        &self,
        call: Call,
        code: u32,
        asked: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(self.error(call, code, &asked()))
    }

    /// The same for what takes down: on a lost context the books are kept whatever the driver says.
    pub(super) fn check_unless_lost(
        &self,
        call: Call,
        code: u32,
        asked: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == SUCCESS || self.lost.get().is_some() || codes::ends_context(code) {
            return Ok(());
        }
        Err(self.error(call, code, &asked()))
    }

    #[cold]
    fn error(&self, call: Call, number: u32, asked: &str) -> DeviceError {
        let code = codes::code(number);
        let text = codes::text(self.driver, number);
        let mut detail = format!("{asked}: {text}");
        if codes::ends_context(number) {
            let (by, _) = self.lost.get_or_init(|| (call, code));
            tracing::error!(?by, ?code, "a CUDA context is lost");
            detail.push_str("; the context is lost, and every later call of this device fails");
        }
        DeviceError::new(call, code, detail)
    }

    #[cold]
    fn lost_error(&self, call: Call, (by, code): (Call, Code)) -> DeviceError {
        let detail = format!(
            "the context of device {} was lost ({by:?} reported it); memory can be taken down, nothing else",
            self.ordinal
        );
        DeviceError::new(call, code, detail)
    }
}

impl Drop for Inner {
    /// The last handle is gone: memory and kernels are given back, then the context.
    ///
    /// Work may still run, of streams that are gone or that are the caller's, and is waited for. Whatever captures in this context is somebody
    /// else's, since a stream of this device would keep the device; it minds neither the wait nor what follows.
    fn drop(&mut self) {
        if let Some(_ending) = self.ending("drop") {
            let waited = self.wait_by_freeing(Call::Driver("drop"));
            self.give_back_memory(waited);
            self.unload_modules();
        }
        let mut before = ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let code = unsafe { (self.driver.cuCtxGetCurrent)(&raw mut before) };
        // SAFETY: taken once, here.
        drop(unsafe { ManuallyDrop::take(&mut self.context) });
        // cudarc makes a context current before it gives it up, and leaves it so.
        if code == SUCCESS && before != self.raw.0 {
            // SAFETY: it was current just now, and is not the one that was given up.
            unsafe { (self.driver.cuCtxSetCurrent)(before) };
        }
    }
}
