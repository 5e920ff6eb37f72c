//! Pinned host memory: bytes that copies read and write when they run, and that say whether they have an owner.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::contents::{FRESH, POISON};
use super::{HostDevice, Inner};
use crate::device::pinned::{beyond, fits};
use crate::device::{
    Call, Code, DeviceError, DevicePtr, Fault, FaultReason, Mark, PinnedMemory, Result,
};

/// What a device's allocations of pinned memory share.
#[derive(Default)]
pub(super) struct Counts {
    /// How many were ever made: the number of the next one; and how many bytes are held.
    totals: Mutex<(u32, u64)>,
}

impl Counts {
    pub(super) fn bytes(&self) -> u64 {
        self.lock().1
    }

    fn lock(&self) -> MutexGuard<'_, (u32, u64)> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One allocation, as work that is queued has it.
#[derive(Debug)]
pub(super) struct Pinned {
    /// By which faults name it.
    number: u32,
    bytes: Mutex<Box<[u8]>>,
    /// Marked so.
    dead: AtomicBool,
    /// Its handle was dropped.
    freed: AtomicBool,
}

impl Pinned {
    pub(super) fn lock(&self) -> MutexGuard<'_, Box<[u8]>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `who` may touch a range, which lies in it.
    pub(super) fn check(&self, who: &str, offset: u64, bytes: u64) -> Result<(), Fault> {
        let reason = if self.freed.load(Ordering::Acquire) {
            FaultReason::Unmapped
        } else if self.dead.load(Ordering::Acquire) {
            FaultReason::NotLive
        } else {
            return Ok(());
        };
        Err(Fault {
            kernel: who.to_owned(),
            address: format!("H{}+{offset}", self.number),
            bytes,
            reason,
        })
    }
}

/// Pinned host memory of a [`HostDevice`]. What was never written reads as `0xCD`. Work that runs once it is dropped, or marked dead, and touches
/// it, is a fault.
#[derive(Debug)]
pub struct HostPinned {
    pub(super) memory: Arc<Pinned>,
    pub(super) device: Arc<Inner>,
    address: usize,
    bytes: u64,
}

impl Drop for HostPinned {
    fn drop(&mut self) {
        self.memory.freed.store(true, Ordering::Release);
        self.device.pinned.lock().1 -= self.bytes;
    }
}

impl HostPinned {
    /// The bytes from `offset` on, as a range.
    pub(super) fn range(&self, call: Call, offset: u64, bytes: u64) -> Result<()> {
        if fits(offset, bytes, self.bytes) {
            return Ok(());
        }
        let detail = beyond(offset, bytes, self.bytes);
        Err(DeviceError::new(call, Code::InvalidValue, detail))
    }
}

impl PinnedMemory for HostPinned {
    fn address(&self) -> usize {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, dst: &mut [u8]) -> Result<()> {
        self.range(Call::Driver("read"), offset, dst.len() as u64)?;
        let at = offset as usize;
        dst.copy_from_slice(&self.memory.lock()[at..at + dst.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, src: &[u8]) -> Result<()> {
        self.range(Call::Driver("write"), offset, src.len() as u64)?;
        let at = offset as usize;
        self.memory.lock()[at..at + src.len()].copy_from_slice(src);
        Ok(())
    }

    fn mark(&self, mark: Mark) {
        if !self.device.ownership {
            return;
        }
        if mark == Mark::Dead {
            self.memory.lock().fill(POISON);
        }
        self.memory
            .dead
            .store(mark == Mark::Dead, Ordering::Release);
    }
}

impl HostDevice {
    pub(super) fn new_pinned(&self, call: Call, bytes: u64) -> Result<HostPinned> {
        drop(self.enter(call)?);
        let refused = |code, detail: String| Err(DeviceError::new(call, code, detail));
        if bytes == 0 {
            let detail = "0 B of pinned memory are asked for; ask for some";
            return refused(Code::InvalidValue, detail.into());
        }
        let mut memory = Vec::new();
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        if memory.try_reserve_exact(len).is_err() {
            let detail = format!("the host has no {bytes} B");
            return refused(Code::OutOfMemory, detail);
        }
        memory.resize(len, FRESH);
        let memory = memory.into_boxed_slice();
        let number = {
            let mut totals = self.inner.pinned.lock();
            totals.0 += 1;
            totals.1 += bytes;
            totals.0 - 1
        };
        Ok(HostPinned {
            address: memory.as_ptr().addr(),
            memory: Arc::new(Pinned {
                number,
                bytes: Mutex::new(memory),
                dead: AtomicBool::new(false),
                freed: AtomicBool::new(false),
            }),
            device: self.inner.clone(),
            bytes,
        })
    }
}

impl super::work::World {
    /// A copy from pinned memory to the device's.
    pub(super) fn copy_from_pinned(
        &mut self,
        dst: DevicePtr,
        (src, offset, bytes): (&Pinned, u64, u64),
    ) -> Result<(), Fault> {
        let who = "copy from pinned memory";
        src.check(who, offset, bytes)?;
        self.memory.check(who, dst, bytes)?;
        let at = offset as usize;
        self.memory.write(dst, &src.lock()[at..at + bytes as usize]);
        Ok(())
    }

    /// A copy from the device's memory to pinned memory.
    pub(super) fn copy_to_pinned(
        &mut self,
        (dst, offset, bytes): (&Pinned, u64, u64),
        src: DevicePtr,
    ) -> Result<(), Fault> {
        let who = "copy to pinned memory";
        dst.check(who, offset, bytes)?;
        self.memory.check(who, src, bytes)?;
        let at = offset as usize;
        self.memory
            .read(src, &mut dst.lock()[at..at + bytes as usize]);
        Ok(())
    }
}
