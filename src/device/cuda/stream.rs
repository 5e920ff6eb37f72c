//! Streams and events: the device's own, and streams of the caller's.

use std::collections::HashMap;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::sys;

use super::driver::SUCCESS;
use super::inner::{Inner, Shared};
use crate::device::{Call, CaptureMode, CaptureStatus, Code, DeviceError, Result};
use crate::sync::lock;

/// The caller's streams that handles exist for, by the driver's handle: the same stream has one number.
pub(super) type Wrapped = HashMap<usize, Weak<Handle>>;

/// A stream of a [`CudaDevice`](super::CudaDevice). Clones are the same stream; a stream that the device made is destroyed with the
/// last of them, after what is enqueued has run (nobody waits for that).
#[derive(Clone)]
pub struct CudaStream(pub(super) Arc<Handle>);

pub(super) struct Handle {
    pub(super) device: Arc<Inner>,
    pub(super) raw: Shared<sys::CUstream>,
    pub(super) id: u32,
    /// Whether a capture was begun here through the device, and has not been ended.
    begun: AtomicBool,
    /// The stream as cudarc has it, once somebody asked.
    cudarc: OnceLock<Arc<cudarc::driver::CudaStream>>,
    owner: Owner,
}

/// Who destroys a stream.
enum Owner {
    Device,
    /// The caller, or nobody (the default stream).
    Other,
    /// cudarc, when this goes.
    Cudarc(Arc<cudarc::driver::CudaStream>),
}

impl CudaStream {
    /// The driver's handle, to give to libraries (cuBLAS and others). Good as long as a clone of this stream lives.
    #[must_use]
    pub fn raw(&self) -> sys::CUstream {
        self.0.device.mix();
        self.0.raw.0
    }

    /// The stream as cudarc has it, for cudarc's own calls: the one that this was made of, or one that is made now. A stream of the
    /// device's is destroyed with the last clone of either, but where clones of cudarc's are left, only with the context.
    #[must_use]
    pub fn cudarc(&self) -> &Arc<cudarc::driver::CudaStream> {
        let Handle { device, owner, .. } = &*self.0;
        device.mix();
        if let Owner::Cudarc(stream) = owner {
            return stream;
        }
        self.0.cudarc.get_or_init(|| match self.0.raw.0.is_null() {
            true => device.context.default_stream(),
            // SAFETY: the stream is of this context, and is not destroyed while a clone of this is left: see the handle's drop, and what the caller
            // promised of a stream that is not ours.
            false => unsafe { device.context.wrap_borrowed_stream(self.0.raw.0) },
        })
    }
}

impl PartialEq for CudaStream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (Arc::ptr_eq(&self.0.device, &other.0.device) && self.0.raw == other.0.raw)
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream({})", self.0.id)
    }
}

impl Handle {
    /// Notes that a capture begins here; [`capture_ended`](Handle::capture_ended) takes it back.
    pub(super) fn capture_begins(&self) {
        if !self.begun.swap(true, Ordering::AcqRel) {
            self.device.captures.fetch_add(1, Ordering::AcqRel);
        }
    }

    pub(super) fn capture_ended(&self) {
        if self.begun.swap(false, Ordering::AcqRel) {
            lock(&self.device.begun).end(self.id);
            self.device.captures.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.capture_ended();
        self.device.leave_bodies(self.id);
        lock(&self.device.streams).remove(&self.id);
        if let Some(stream) = self.cudarc.take()
            && Arc::into_inner(stream).is_none()
        {
            tracing::debug!(
                stream = self.id,
                "a stream is left to its context: cudarc's handle is in use"
            );
            return;
        }
        // Also what cudarc destroys is destroyed in here.
        let owner = std::mem::replace(&mut self.owner, Owner::Other);
        if let Owner::Other = owner {
            return;
        }
        let ending = self.device.ending("cuStreamDestroy");
        if let (Owner::Device, Some(_)) = (&owner, &ending) {
            // SAFETY: the device made it, and this was its last handle. The driver lets what is enqueued run.
            unsafe { (self.device.driver.cuStreamDestroy_v2)(self.raw.0) };
        }
        drop(owner);
    }
}

/// An event of a [`CudaDevice`](super::CudaDevice). Graphs that record it or wait for it keep the driver's part of it.
pub struct CudaEvent {
    pub(super) held: Arc<RawEvent>,
    /// The number of the capture that its last record through the device belongs to, or 0.
    pub(super) capture: AtomicU64,
    /// Whether nodes of graphs record it.
    pub(super) in_graphs: AtomicBool,
    /// Whether it takes the time.
    pub(super) timed: bool,
}

/// The driver's event, and who destroys it.
pub(super) struct RawEvent {
    pub(super) device: Arc<Inner>,
    raw: Shared<sys::CUevent>,
    /// It is the context's to destroy.
    left: AtomicBool,
}

impl RawEvent {
    /// Leaves it to its context, and so for good as far as graphs are concerned.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
    }
}

impl CudaEvent {
    /// The driver's handle. Good as long as this event lives.
    #[must_use]
    pub fn raw(&self) -> sys::CUevent {
        self.held.device.mix();
        self.handle()
    }

    pub(super) fn handle(&self) -> sys::CUevent {
        self.held.raw.0
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CudaEvent")
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        if self.left.load(Ordering::Relaxed) {
            return;
        }
        if let Some(_ending) = self.device.ending("cuEventDestroy") {
            // SAFETY: the device made it, and nobody else has it, no graph either. What waits for it goes on waiting.
            unsafe { (self.device.driver.cuEventDestroy_v2)(self.raw.0) };
        }
    }
}

/// A number for a new stream.
fn next_id(device: &Inner) -> u32 {
    device.next_stream.fetch_add(1, Ordering::Relaxed)
}

fn handle(device: &Arc<Inner>, raw: sys::CUstream, id: u32, owner: Owner) -> Arc<Handle> {
    // A stream of the caller's may be destroyed as soon as the caller has dropped its handles: nobody else may hold one.
    let kept = !matches!(owner, Owner::Other);
    let new = Arc::new(Handle {
        device: device.clone(),
        raw: Shared(raw),
        id,
        begun: AtomicBool::new(false),
        cudarc: OnceLock::new(),
        owner,
    });
    if kept {
        lock(&device.streams).insert(id, Arc::downgrade(&new));
    }
    new
}

/// The default stream.
pub(super) fn legacy(device: &Arc<Inner>) -> CudaStream {
    CudaStream(handle(device, ptr::null_mut(), 0, Owner::Other))
}

/// A stream of the device's own.
pub(super) fn create(device: &Arc<Inner>) -> Result<CudaStream> {
    let call = Call::CreateStream;
    let _current = device.enter(call)?;
    let mut raw = ptr::null_mut();
    // SAFETY: the pointer is to a live local. 1 is CU_STREAM_NON_BLOCKING.
    let code = unsafe { (device.driver.cuStreamCreate)(&raw mut raw, 1) };
    device.check(call, code, || "a stream".into())?;
    Ok(CudaStream(handle(
        device,
        raw,
        next_id(device),
        Owner::Device,
    )))
}

/// A handle for a stream of cudarc's, which it keeps alive.
pub(super) fn from_cudarc(
    device: &Arc<Inner>,
    stream: Arc<cudarc::driver::CudaStream>,
) -> Result<CudaStream> {
    let raw = stream.cu_stream();
    // SAFETY: it lives as long as the handle, which owns a part of it.
    unsafe { wrap(device, raw, || Owner::Cudarc(stream)) }
}

/// A handle for a stream that the caller destroys.
///
/// # Safety
/// `raw` is a stream, and lives as long as any clone of the handle.
pub(super) unsafe fn from_raw(device: &Arc<Inner>, raw: sys::CUstream) -> Result<CudaStream> {
    // SAFETY: the caller's promise.
    unsafe { wrap(device, raw, || Owner::Other) }
}

/// # Safety
/// As for [`from_raw`].
unsafe fn wrap(
    device: &Arc<Inner>,
    raw: sys::CUstream,
    owner: impl FnOnce() -> Owner,
) -> Result<CudaStream> {
    let call = Call::Driver("cuStreamGetCtx");
    device.mix();
    let _current = device.enter(call)?;
    let refuse = |why: &str| DeviceError::new(call, Code::InvalidValue, why);
    match raw.addr() {
        0 | 1 => return Ok(legacy(device)), // null, CU_STREAM_LEGACY
        2 => {
            let why = "CU_STREAM_PER_THREAD is a different stream on each thread; give one that is the same";
            return Err(refuse(why));
        }
        _ => {}
    }
    let mut context = ptr::null_mut();
    // SAFETY: the caller says that it is a stream; the pointer is to a live local.
    let code = unsafe { (device.driver.cuStreamGetCtx)(raw, &raw mut context) };
    device.check(call, code, || "the context of a stream".into())?;
    if context != device.raw.0 {
        return Err(refuse("the stream belongs to another context"));
    }
    let mut wrapped = lock(&device.wrapped);
    if let Some(known) = wrapped.get(&raw.addr()).and_then(Weak::upgrade) {
        // The caller keeps the stream alive as long as either handle: that of the first call will do.
        return Ok(CudaStream(known));
    }
    wrapped.retain(|_, stream| stream.strong_count() > 0);
    let new = handle(device, raw, next_id(device), owner());
    wrapped.insert(raw.addr(), Arc::downgrade(&new));
    Ok(CudaStream(new))
}

/// An event, which takes the time if it is `timed`.
pub(super) fn create_event(device: &Arc<Inner>, call: Call, timed: bool) -> Result<CudaEvent> {
    let _current = device.enter(call)?;
    let mut raw = ptr::null_mut();
    let flags = if timed { 0 } else { 2 }; // CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING
    // SAFETY: the pointer is to a live local.
    let code = unsafe { (device.driver.cuEventCreate)(&raw mut raw, flags) };
    device.check(call, code, || "an event".into())?;
    Ok(CudaEvent {
        held: Arc::new(RawEvent {
            device: device.clone(),
            raw: Shared(raw),
            left: AtomicBool::new(false),
        }),
        capture: AtomicU64::new(0),
        in_graphs: AtomicBool::new(false),
        timed,
    })
}

impl Inner {
    /// Waits for a stream. The context is current.
    pub(super) fn wait_for(&self, call: Call, stream: &Handle) -> Result<()> {
        // SAFETY: the handle keeps the stream alive.
        let code = unsafe { (self.driver.cuStreamSynchronize)(stream.raw.0) };
        self.check(call, code, || format!("to wait for stream {}", stream.id))
    }

    /// Whether a stream captures. The context is current.
    pub(super) fn status(&self, call: Call, stream: &Handle) -> Result<CaptureStatus> {
        let mut status = 0_u32;
        // SAFETY: the handle keeps the stream alive; the pointer is to a live number of the enum's size, and read as such.
        let code =
            unsafe { (self.driver.cuStreamIsCapturing)(stream.raw.0, (&raw mut status).cast()) };
        self.check(call, code, || {
            format!("whether stream {} captures", stream.id)
        })?;
        Ok(match status {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active,
            _ => CaptureStatus::Invalidated,
        })
    }

    /// Takes note if the stream does not capture any more. The context is current.
    pub(super) fn note_end(&self, stream: &Handle) {
        if let Ok(CaptureStatus::None) = self.status(Call::CaptureStatus, stream) {
            stream.capture_ended();
        }
    }

    /// The driver's number for the capture that a stream takes part in, if it is sound.
    pub(super) fn capture_id(&self, stream: &Handle) -> Option<u64> {
        let (mut status, mut id) = (0_u32, 0);
        let none = ptr::null_mut;
        // SAFETY: the handle keeps the stream alive; the first two pointers are to live locals of the right sizes, and the others
        // may be null.
        let code = unsafe {
            (self.driver.cuStreamGetCaptureInfo_v3)(
                stream.raw.0,
                (&raw mut status).cast(),
                &raw mut id,
                none(),
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        (code == SUCCESS && status == 1).then_some(id)
    }

    /// What an operation of zero bytes does: nothing, but on a broken capture it is refused like any other.
    pub(super) fn nothing_to_do(&self, call: Call, stream: &Handle) -> Result<()> {
        if self.status(call, stream)? == CaptureStatus::Invalidated {
            let detail = format!("stream {} captures, and the capture is broken", stream.id);
            return Err(DeviceError::new(
                call,
                Code::StreamCaptureInvalidated,
                detail,
            ));
        }
        Ok(())
    }

    /// Refuses host memory to a capturing stream, before the driver would take it.
    pub(super) fn refuse_pageable(&self, call: Call, stream: &Handle) -> Result<()> {
        if self.status(call, stream)? == CaptureStatus::None {
            return Ok(());
        }
        let detail = format!(
            "stream {} captures, and a graph cannot keep pageable host memory alive; copy before or after the capture, or from and to a pinned buffer",
            stream.id
        );
        Err(DeviceError::new(
            call,
            Code::StreamCaptureUnsupported,
            detail,
        ))
    }
}

/// The driver's name for a capture mode.
pub(super) fn raw_mode(mode: CaptureMode) -> sys::CUstreamCaptureMode {
    match mode {
        CaptureMode::Global => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        CaptureMode::ThreadLocal => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CaptureMode::Relaxed => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    }
}
