//! Pinned host memory, and copies from and to it.

use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::inner::Inner;
use super::stream::Handle;
use crate::device::pinned::{beyond, fits};
use crate::device::{Call, Code, DeviceError, DevicePtr, PinnedMemory, Result};
use crate::sync::{Mutex, lock};

/// Page-locked host memory of a [`CudaDevice`](super::CudaDevice).
pub struct CudaPinned {
    device: Arc<Inner>,
    /// Held for each access of the host's.
    start: Mutex<Start>,
    address: usize,
    bytes: u64,
}

/// The first byte.
struct Start(NonNull<u8>);

// SAFETY: it is memory of the process, bound to no thread.
unsafe impl Send for Start {}

/// Allocates. No capture minds.
pub(super) fn alloc(device: &Arc<Inner>, bytes: u64) -> Result<CudaPinned> {
    let call = Call::AllocPinned;
    let _current = device.enter(call)?;
    if bytes == 0 {
        let detail = "0 B of pinned memory are asked for; ask for some";
        return Err(DeviceError::new(call, Code::InvalidValue, detail));
    }
    let _relaxed = device.relax(call)?;
    let mut start = ptr::null_mut::<c_void>();
    // SAFETY: the pointer is to a live local.
    let code = unsafe { (device.driver.cuMemHostAlloc)(&raw mut start, bytes as usize, 0) };
    device.check(call, code, || format!("{bytes} B of pinned memory"))?;
    let Some(start) = NonNull::new(start.cast::<u8>()) else {
        let detail = format!("the driver gave no address for {bytes} B of pinned memory");
        return Err(DeviceError::new(call, Code::OutOfMemory, detail));
    };
    Ok(CudaPinned {
        device: device.clone(),
        start: Mutex::new(Start(start)),
        address: start.as_ptr().addr(),
        bytes,
    })
}

impl CudaPinned {
    pub(super) fn device(&self) -> &Arc<Inner> {
        &self.device
    }

    /// The address of a range, for the driver or for a copy of the host's.
    fn at(&self, call: Call, offset: u64, bytes: u64) -> Result<*mut u8> {
        if !fits(offset, bytes, self.bytes) {
            let detail = beyond(offset, bytes, self.bytes);
            return Err(DeviceError::new(call, Code::InvalidValue, detail));
        }
        Ok(lock(&self.start).0.as_ptr().wrapping_add(offset as usize))
    }

    /// Copies to the device. The context is current.
    pub(super) fn copy_out(
        &self,
        stream: &Handle,
        dst: DevicePtr,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        let call = Call::CopyFromPinned;
        let src = self.at(call, offset, bytes)?;
        if bytes == 0 {
            return self.device.nothing_to_do(call, stream);
        }
        // SAFETY: the source is this allocation's, of which the caller says that it lives until the work has run, and as long as a graph with it is
        // launched; the handle keeps the stream alive.
        let code = unsafe {
            (self.device.driver.cuMemcpyHtoDAsync_v2)(
                dst.0,
                src.cast_const().cast(),
                bytes as usize,
                stream.raw.0,
            )
        };
        self.device.check(call, code, || {
            format!("{bytes} B from pinned memory to {dst:?}")
        })
    }

    /// Copies from the device. The context is current.
    pub(super) fn copy_in(
        &self,
        stream: &Handle,
        offset: u64,
        src: DevicePtr,
        bytes: u64,
    ) -> Result<()> {
        let call = Call::CopyToPinned;
        let dst = self.at(call, offset, bytes)?;
        if bytes == 0 {
            return self.device.nothing_to_do(call, stream);
        }
        // SAFETY: as above, for the target.
        let code = unsafe {
            (self.device.driver.cuMemcpyDtoHAsync_v2)(
                dst.cast(),
                src.0,
                bytes as usize,
                stream.raw.0,
            )
        };
        self.device.check(call, code, || {
            format!("{bytes} B from {src:?} to pinned memory")
        })
    }
}

impl PinnedMemory for CudaPinned {
    fn address(&self) -> usize {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, dst: &mut [u8]) -> Result<()> {
        let src = self.at(Call::Driver("read"), offset, dst.len() as u64)?;
        let _alone = lock(&self.start);
        // SAFETY: the range lies in the allocation, which lives as long as `self`; no thread of the host writes it, since the lock is held. (The device may, where
        // the caller has not waited for it: then bytes are old or new, and nothing else depends on them.) `dst` is exclusive, so elsewhere.
        unsafe { ptr::copy_nonoverlapping(src.cast_const(), dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    fn write(&self, offset: u64, src: &[u8]) -> Result<()> {
        let dst = self.at(Call::Driver("write"), offset, src.len() as u64)?;
        let _alone = lock(&self.start);
        // SAFETY: as above; no reference to the allocation's bytes is ever made.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
        Ok(())
    }
}

impl Drop for CudaPinned {
    fn drop(&mut self) {
        let start = lock(&self.start).0.as_ptr();
        if let Some(_ending) = self.device.ending("cuMemFreeHost") {
            // SAFETY: the driver gave it, nobody else has it, and the driver waits for work that runs; of queued work and of graphs the caller has
            // seen to it that none touches it.
            unsafe { (self.device.driver.cuMemFreeHost)(start.cast()) };
        }
    }
}

impl fmt::Debug for CudaPinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaPinned({:#x}, {} B)", self.address, self.bytes)
    }
}
