//! The CUDA driver as a device (feature `cuda`).
//!
//! Nothing of CUDA is needed to build, and a machine without it gives a value that says why
//! ([`CudaUnavailable`], [`probe`]), never a panic: the driver is loaded at run time.
//!
//! * **Context.** A [`CudaDevice`] works in one context: the device's primary one ([`CudaDevice::new`]), or one of the caller's
//!   ([`CudaDevice::adopt`]). Each call makes it current for its own time; the caller's current context is the same afterwards.
//! * **Streams** do not order themselves with the default stream. Streams of the caller's can be used too
//!   ([`CudaDevice::stream_from_cudarc`], [`CudaDevice::stream_from_raw`]).
//! * **Memory** is virtual (`cuMemMap`), so it may come and go during a capture and under graphs, and the driver can export its chunks as file
//!   descriptors where the device supports that. Or it is plain (`cuMemAlloc`), by choice ([`CudaOptions`]) and on devices without virtual memory:
//!   see [`CudaMemory::Plain`] for what that changes.
//! * **Pinned memory** is `cuMemHostAlloc`'s: page-locked, cached by the processor, reached by copies ([`CudaPinned`]). To free it waits for the work of all streams.
//! * **Kernels** are compiled by NVRTC from [`Kernel::cuda`](super::Kernel), for the device at hand and with arithmetic as written, or
//!   loaded from PTX ([`CudaDevice::load_ptx`]) or machine code ([`CudaDevice::load_image`]). They stay as long as the device.
//!   NVRTC is looked for in the folder that the variable [`NVRTC_VARIABLE`] names, in toolkits, and where libraries are.
//! * **Errors.** Work that faults costs the context (as always with CUDA): the call that hears of it gives the driver's code, and
//!   each later one gives it again, but for `unmap`, `release`, `end_capture` and the drops. Which kernel it was, the driver does not say.
//! * **Captures** that are begun here have a log: an error on one of their streams says which operation it was, and what broke the capture
//!   ([`DeviceError::position`], [`DeviceError::first`]). Which streams take part is known by events recorded and waited for through the device;
//!   what others do with its streams and events, the log does not see.
//! * **Ifs** are conditional nodes. A body is captured apart from its node and becomes a child graph in it; an inner if cuts its body into two. So a body that is broken never
//!   comes near the node. A kernel of one thread in front of the node reads the predicate.
//! * **Addresses** are the caller's word. A kernel that is given a wrong one faults, or writes where it should not.
//!
//! # Beside cudarc and CUDA's libraries
//! cudarc's own streams and slices can be used beside it, in the same context ([`CudaDevice::context`]).
//! * **Our memory in cudarc's calls**: a [`TypedView`] of a tensor ([`Tensor::typed`](crate::Tensor::typed)) goes where a `CudaSlice` goes: copies, cuBLAS,
//!   NCCL, kernel arguments. [`CudaStream::cudarc`] is the stream as cudarc has it.
//! * **Event tracking.** Once a context has several streams of cudarc's, cudarc waits for and records events for each `CudaSlice` that it uses. Inside a capture
//!   that breaks it. Our views have no such events, so calls that take only views are safe there; for `CudaSlice`s, call
//!   `CudaContext::disable_event_tracking` before the first is made, and drop none inside a capture. A `PinnedHostSlice` uses its event whatever is disabled.
//! * **cuBLAS** allocates its workspace inside the capture unless it has one: [`set_cublas_workspace`].
//! * **Conditional nodes** of a capture of your own, made past the device: where the capture of a body was invalidated, end it before the parent's. Some drivers crash at the end of the parent
//!   otherwise (a driver's defect, reported publicly as cuda-python's issue 2918; the runtime cannot catch it). Those that [`begin_if`](super::Device::begin_if) makes are safe from it.
//! * **NCCL**: drop the graphs that captured collectives before the communicator.

mod captures;
mod codes;
mod conditional;
mod cublas;
mod dot;
mod driver;
mod event;
mod fill;
mod gather;
mod graph;
mod inner;
mod memory;
mod module;
mod nvrtc;
mod pinned;
mod ptx;
mod quiesce;
mod stream;
mod typed;
mod unavailable;
mod work;

use std::ffi::{CStr, c_char};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, sys};

pub use self::cublas::{CUBLAS_WORKSPACE, set_cublas_workspace};
use self::driver::{Driver, SUCCESS};
pub use self::graph::{CudaExec, CudaGraph};
use self::inner::{Inner, Shared};
use self::memory::Source;
pub use self::module::CudaFunction;
use self::module::Origin;
pub use self::nvrtc::NVRTC_VARIABLE;
pub use self::pinned::CudaPinned;
pub use self::stream::{CudaEvent, CudaStream};
pub use self::typed::{TypedView, TypedViewMut};
pub use self::unavailable::{CudaUnavailable, Probe, probe};
use super::{Call, Code, DeviceError, Result};
use crate::sync::{Mutex, lock};

/// A CUDA device; see the [module](self). Clones are the same device. It ends, with all it has, when the last of its clones
/// and handles is dropped.
#[derive(Clone)]
pub struct CudaDevice {
    inner: Arc<Inner>,
}

/// Where a [`CudaDevice`]'s memory comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CudaMemory {
    /// Addresses are reserved, and physical chunks created and mapped under them (`cuMemAddressReserve`, `cuMemCreate`, `cuMemMap`).
    #[default]
    Virtual,
    /// Addresses and physical memory come and go together (`cuMemAlloc`, `cuMemFree`).
    ///
    /// The same calls are refused with the same words as for virtual memory, and everything is as legal during captures. But:
    /// * [`reserve`](super::Device::reserve) takes the physical memory, and is what fails where there is none. `map` and `unmap` only note what is
    ///   mapped: between an `unmap` and the next `map` the memory stays taken, and work that touches it does not fault.
    /// * [`release`](super::Device::release) gives the physical memory back, and waits for the work of all streams, as `cuMemFree` does.
    /// * Nothing can be exported as a file descriptor: the driver's calls for that (`cuMemRetainAllocationHandle` and those that follow) refuse.
    ///
    /// Sizes and addresses are multiples of 2 MiB: see [`granularity`](super::Device::granularity).
    Plain,
}

/// Choices for a [`CudaDevice`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    memory: Option<CudaMemory>,
}

impl CudaOptions {
    /// Where memory comes from. Left out, it is virtual where the device has virtual memory management, and plain where it has not; an explicit
    /// [`CudaMemory::Virtual`] is refused there.
    #[must_use]
    pub fn memory(mut self, memory: CudaMemory) -> Self {
        self.memory = Some(memory);
        self
    }
}

/// What a device holds, for tests that look for leaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaCounts {
    /// Bytes of memory mapped.
    pub mapped_bytes: u64,
    /// Ranges that have memory.
    pub mapped_ranges: usize,
    /// Ranges of addresses reserved.
    pub reserved_ranges: usize,
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({}: {})", self.inner.ordinal, self.inner.name)
    }
}

impl CudaDevice {
    /// The device of this number, in its primary context: the one that CUDA's runtime library and most others use.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn new(ordinal: u32) -> Result<Self, CudaUnavailable> {
        Self::with_options(ordinal, CudaOptions::default())
    }

    /// The same with choices.
    ///
    /// # Errors
    /// Why it cannot be had; [`Code::NotSupported`] for a choice that the device cannot follow.
    pub fn with_options(ordinal: u32, options: CudaOptions) -> Result<Self, CudaUnavailable> {
        let driver = Driver::get()?;
        let devices = driver.device_count()?;
        if ordinal >= devices {
            return Err(CudaUnavailable::NoDevice { ordinal, devices });
        }
        // cudarc finds the same library (it tries the same names), leaves the new context current, and is asked for it once.
        let _before = Before::of(driver)?;
        let context = CudaContext::new(ordinal as usize).map_err(|error| {
            CudaUnavailable::failed(driver, "cuDevicePrimaryCtxRetain", error.0 as u32)
        })?;
        Self::adopt_with(context, options)
    }

    /// The device of a context of the caller's, which is kept as long as the device.
    ///
    /// Two devices of one context are two devices: neither takes the other's streams.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn adopt(context: Arc<CudaContext>) -> Result<Self, CudaUnavailable> {
        Self::adopt_with(context, CudaOptions::default())
    }

    /// The same with choices.
    ///
    /// # Errors
    /// Why it cannot be used; [`Code::NotSupported`] for a choice that the device cannot follow.
    pub fn adopt_with(
        context: Arc<CudaContext>,
        options: CudaOptions,
    ) -> Result<Self, CudaUnavailable> {
        let driver = Driver::get()?;
        let device = context.cu_device();
        let attribute = |which| attribute(driver, device, which);
        use sys::CUdevice_attribute as A;
        let memory = choose(
            options.memory,
            attribute(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0,
        )?;
        let arch = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?.cast_unsigned(),
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?.cast_unsigned(),
        );
        let ordinal = i32::try_from(context.ordinal()).unwrap_or(0);
        let (source, granularity) = match memory {
            CudaMemory::Plain => (Source::Plain, memory::PLAIN_GRANULARITY),
            CudaMemory::Virtual => {
                let exportable =
                    attribute(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?
                        != 0;
                let chunk = memory::properties(ordinal, exportable);
                let granularity = Inner::ask_granularity(driver, &chunk).map_err(|code| {
                    CudaUnavailable::failed(driver, "cuMemGetAllocationGranularity", code)
                })?;
                (Source::Virtual(Shared(chunk)), granularity)
            }
        };
        let device = CudaDevice {
            inner: Arc::new(Inner {
                driver,
                raw: Shared(context.cu_ctx()),
                name: name(driver, device)?,
                ordinal,
                arch,
                source,
                granularity,
                reads_pageable: attribute(A::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)? != 0,
                next_stream: AtomicU32::new(1),
                books: Mutex::default(),
                modules: Mutex::default(),
                streams: Mutex::default(),
                wrapped: Mutex::default(),
                block: Mutex::default(),
                gather: OnceLock::new(),
                gathered: Mutex::default(),
                captures: AtomicUsize::new(0),
                begun: Mutex::default(),
                bodies: Mutex::default(),
                if_kernel: OnceLock::new(),
                mixed: AtomicBool::new(false),
                lost: OnceLock::new(),
                context: ManuallyDrop::new(context),
            }),
        };
        let call = Call::Driver("cuMemAlloc");
        if let Ok(_ready) = device.inner.ending_call(call) {
            device.inner.keep_block(call);
        }
        Ok(device)
    }

    /// The context, for cudarc's own calls.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// The context's handle, to give to libraries. Good as long as the device lives.
    #[must_use]
    pub fn raw_context(&self) -> sys::CUcontext {
        self.inner.raw.0
    }

    /// The compute capability: major, minor.
    #[must_use]
    pub fn compute_capability(&self) -> (u32, u32) {
        self.inner.arch
    }

    /// Where its memory comes from.
    #[must_use]
    pub fn memory(&self) -> CudaMemory {
        match self.inner.source {
            Source::Virtual(_) => CudaMemory::Virtual,
            Source::Plain => CudaMemory::Plain,
        }
    }

    /// What the device holds.
    #[must_use]
    pub fn counts(&self) -> CudaCounts {
        let (mapped_bytes, mapped_ranges, reserved_ranges) = lock(&self.inner.books).counts();
        CudaCounts {
            mapped_bytes,
            mapped_ranges,
            reserved_ranges,
        }
    }

    /// A stream of cudarc's as one of this device's; it is kept alive. The default stream is the default stream.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] for a stream of another context; the driver's.
    pub fn stream_from_cudarc(
        &self,
        stream: Arc<cudarc::driver::CudaStream>,
    ) -> Result<CudaStream> {
        self.inner.prepare_gather();
        stream::from_cudarc(&self.inner, stream)
    }

    /// A stream of the caller's as one of this device's. Asked for the same stream again, it is the same stream, with the same number.
    ///
    /// # Errors
    /// As [`stream_from_cudarc`](CudaDevice::stream_from_cudarc); also for `CU_STREAM_PER_THREAD`.
    ///
    /// # Safety
    /// `raw` is a stream, and is not destroyed before the last clone of what this returns, nor before the last of what
    /// [`CudaStream::cudarc`] gave for it.
    pub unsafe fn stream_from_raw(&self, raw: sys::CUstream) -> Result<CudaStream> {
        self.inner.prepare_gather();
        // SAFETY: the caller's promise.
        unsafe { stream::from_raw(&self.inner, raw) }
    }

    /// A kernel in PTX. The same text is loaded once.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] for what is no PTX; the driver's, with what its compiler said.
    pub fn load_ptx(&self, ptx: &[u8], name: &str) -> Result<CudaFunction> {
        let wrong = |why: &str| {
            let detail = format!("the module of {name} {why}");
            DeviceError::new(Call::Load, Code::InvalidValue, detail)
        };
        let text = ptx.strip_suffix(b"\0").unwrap_or(ptx);
        // The driver tells the forms of a module apart by its first bytes, and takes anything else for text.
        if !std::str::from_utf8(text).is_ok_and(|text| text.contains(".version")) {
            return Err(wrong(
                "is no PTX text; machine code is loaded with load_image",
            ));
        }
        if text.contains(&0) {
            return Err(wrong("has a zero byte inside"));
        }
        self.load_origin(&Origin::Image(text.into()), name)
    }

    /// A kernel in machine code: a cubin or a fatbinary. The same image is loaded once.
    ///
    /// # Errors
    /// The driver's, for example where the image is for another kind of device.
    ///
    /// # Safety
    /// `image` is a whole cubin or fatbinary: the driver is not told its size, and reads as far as its headers say.
    pub unsafe fn load_image(&self, image: &[u8], name: &str) -> Result<CudaFunction> {
        self.load_origin(&Origin::Image(image.into()), name)
    }

    fn load_origin(&self, origin: &Origin, name: &str) -> Result<CudaFunction> {
        Ok(CudaFunction {
            function: self.inner.load_from(origin, name)?,
            device: self.inner.clone(),
        })
    }
}

/// The memory to use: what was asked for, if the device can; else what it can.
fn choose(asked: Option<CudaMemory>, has_virtual: bool) -> Result<CudaMemory, DeviceError> {
    match asked {
        Some(CudaMemory::Virtual) if !has_virtual => {
            let detail = "virtual memory is asked for, and the device has no virtual memory management; leave the choice to the device, or ask for plain memory";
            let call = Call::Driver("cuDeviceGetAttribute");
            Err(DeviceError::new(call, Code::NotSupported, detail))
        }
        Some(memory) => Ok(memory),
        None if has_virtual => Ok(CudaMemory::Virtual),
        None => Ok(CudaMemory::Plain),
    }
}

/// This thread's current context, made current again at the end.
struct Before {
    driver: &'static Driver,
    context: sys::CUcontext,
}

impl Before {
    fn of(driver: &'static Driver) -> Result<Self, CudaUnavailable> {
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        match unsafe { (driver.cuCtxGetCurrent)(&raw mut context) } {
            SUCCESS => Ok(Before { driver, context }),
            code => Err(CudaUnavailable::failed(driver, "cuCtxGetCurrent", code)),
        }
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        // SAFETY: it was this thread's current context, or null: none.
        unsafe { (self.driver.cuCtxSetCurrent)(self.context) };
    }
}

fn attribute(
    driver: &Driver,
    device: sys::CUdevice,
    which: sys::CUdevice_attribute,
) -> Result<i32, CudaUnavailable> {
    let mut value = 0;
    // SAFETY: the pointer is to a live local.
    match unsafe { (driver.cuDeviceGetAttribute)(&raw mut value, which, device) } {
        SUCCESS => Ok(value),
        code => Err(CudaUnavailable::failed(
            driver,
            "cuDeviceGetAttribute",
            code,
        )),
    }
}

fn name(driver: &Driver, device: sys::CUdevice) -> Result<String, CudaUnavailable> {
    let mut name: [c_char; 128] = [0; 128];
    // SAFETY: the buffer has the size that is said; the last byte is not told of, so that it stays zero.
    let code = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr(), 127, device) };
    if code != SUCCESS {
        return Err(CudaUnavailable::failed(driver, "cuDeviceGetName", code));
    }
    // SAFETY: the buffer ends with a zero and is live.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }
        .to_string_lossy()
        .into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_was_asked_for_or_what_the_device_has() {
        use CudaMemory::{Plain, Virtual};
        assert_eq!(choose(None, true), Ok(Virtual));
        assert_eq!(choose(None, false), Ok(Plain));
        for has_virtual in [true, false] {
            assert_eq!(choose(Some(Plain), has_virtual), Ok(Plain));
        }
        assert_eq!(choose(Some(Virtual), true), Ok(Virtual));
        let refused = choose(Some(Virtual), false).unwrap_err();
        assert_eq!(refused.code, Code::NotSupported);
        assert!(refused.detail.contains("plain memory"), "{refused}");
        assert_eq!(CudaOptions::default().memory, None);
    }
}
