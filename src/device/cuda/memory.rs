//! Memory: virtual (addresses are reserved, physical chunks are created and mapped under them) or plain (the driver allocates both together).
//!
//! The books say what is reserved and what is mapped where, and with which handle, so that a wrong call is refused with words before
//! the driver is asked, and everything can be given back at the end. They are the same for both. All of it is legal during a capture.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ptr;

use cudarc::driver::sys;

use super::driver::SUCCESS;
use super::inner::{Inner, Shared};
use crate::device::{Call, Code, DeviceError, DevicePtr, Result};
use crate::sync::lock;

/// What sizes and addresses of plain memory are multiples of: the driver's own large pages, so that no two reservations share one.
///
/// A pool needs less: addresses that are multiples of its smallest block, 512 B unless it is configured otherwise. The driver promises only 256 B; what
/// it gives for whole pages begins at one as a rule, and where it does not, [`Inner::allocate`] sees to it.
pub(super) const PLAIN_GRANULARITY: u64 = 2 << 20;

/// Where a device's memory comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// Reserved, created, mapped. What a chunk of physical memory is like.
    Virtual(Shared<sys::CUmemAllocationProp>),
    /// Allocated.
    Plain,
}

/// What a device has reserved and mapped, by where it begins.
#[derive(Debug, Default)]
pub(super) struct Books {
    reserved: BTreeMap<u64, Reservation>,
    mapped: BTreeMap<u64, Mapping>,
}

/// One call of `reserve`.
#[derive(Clone, Copy, Debug)]
struct Reservation {
    bytes: u64,
    /// What the driver gave: where the range begins, or, if that was no multiple of the granularity, before it.
    base: u64,
}

/// One call of `map`.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    bytes: u64,
    /// The physical chunk; plain memory has none of its own.
    handle: Option<sys::CUmemGenericAllocationHandle>,
}

impl Books {
    /// Whether a fresh chunk may be mapped there.
    fn may_map(&self, ptr: u64, bytes: u64) -> Result<(), String> {
        let inside = |(start, there): (&u64, &Reservation)| ptr - start + bytes <= there.bytes;
        if !self.reserved.range(..=ptr).next_back().is_some_and(inside) {
            return Err("the range is not within one reservation".into());
        }
        self.nothing_mapped(ptr, bytes)
    }

    /// The reservation of exactly this range, if it has no memory.
    fn may_release(&self, ptr: u64, bytes: u64) -> Result<Reservation, String> {
        match self.reserved.get(&ptr) {
            Some(there) if there.bytes == bytes => self.nothing_mapped(ptr, bytes).map(|()| *there),
            _ => Err("no reservation begins there and is of this size".into()),
        }
    }

    /// The chunk that one call mapped there.
    fn mapping(&self, ptr: u64, bytes: u64) -> Result<Mapping, String> {
        match self.mapped.get(&ptr) {
            Some(mapping) if mapping.bytes == bytes => Ok(*mapping),
            Some(mapping) => Err(format!(
                "{} B were mapped there by one call, and are unmapped together",
                mapping.bytes
            )),
            None => Err("nothing was mapped there".into()),
        }
    }

    fn nothing_mapped(&self, ptr: u64, bytes: u64) -> Result<(), String> {
        match self.mapped.range(..ptr + bytes).next_back() {
            Some((&start, mapping)) if start + mapping.bytes > ptr => Err(format!(
                "{} B are mapped at {:?} already",
                mapping.bytes,
                DevicePtr(start)
            )),
            _ => Ok(()),
        }
    }

    /// Mapped bytes, mapped ranges, reserved ranges.
    pub(super) fn counts(&self) -> (u64, usize, usize) {
        (
            self.mapped.values().map(|mapping| mapping.bytes).sum(),
            self.mapped.len(),
            self.reserved.len(),
        )
    }

    pub(super) fn is_empty(&self) -> bool {
        self.mapped.is_empty() && self.reserved.is_empty()
    }
}

/// What a chunk of this device is like. `exportable` asks for a handle that can be sent to another process, which
/// cannot be had afterwards.
pub(super) fn properties(ordinal: i32, exportable: bool) -> sys::CUmemAllocationProp {
    let mut prop = MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
    // SAFETY: zero is a value of every field (its enums have a variant of that number); the fields written are within the struct.
    // A location is {kind, number}, both of 32 bits, in every version of the bindings; later ones call the number a union.
    unsafe {
        let raw = prop.as_mut_ptr();
        (*raw).type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        if exportable {
            let kind = (&raw mut (*raw).requestedHandleTypes).cast::<u32>();
            *kind = 1; // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        }
        *(&raw mut (*raw).location).cast() = location(ordinal);
        prop.assume_init()
    }
}

/// The memory of a device as a location: its kind (1: device) and number.
fn location(ordinal: i32) -> [i32; 2] {
    const {
        assert!(size_of::<sys::CUmemLocation>() == 8 && align_of::<sys::CUmemLocation>() == 4);
    }
    [1, ordinal]
}

/// Read and write for the device.
fn access(ordinal: i32) -> sys::CUmemAccessDesc {
    let mut access = MaybeUninit::<sys::CUmemAccessDesc>::zeroed();
    // SAFETY: as for the properties.
    unsafe {
        let raw = access.as_mut_ptr();
        *(&raw mut (*raw).location).cast() = location(ordinal);
        (*raw).flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        access.assume_init()
    }
}

fn refused(call: Call, ptr: u64, bytes: u64, why: &str) -> DeviceError {
    let detail = format!("{bytes} B at {:?}: {why}", DevicePtr(ptr));
    DeviceError::new(call, Code::InvalidValue, detail)
}

impl Inner {
    pub(super) fn reserve(&self, bytes: u64) -> Result<DevicePtr> {
        let call = Call::Reserve;
        let _current = self.enter(call)?;
        self.check_pages(call, 0, bytes)?;
        let (ptr, base) = match &self.source {
            Source::Plain => self.allocate(call, bytes)?,
            Source::Virtual(_) => {
                let mut ptr = 0;
                let size = bytes as usize;
                // SAFETY: the pointer is to a live local; the call asks for addresses and touches no memory.
                let code =
                    unsafe { (self.driver.cuMemAddressReserve)(&raw mut ptr, size, 0, 0, 0) };
                self.check(call, code, || format!("{bytes} B of addresses"))?;
                (ptr, ptr)
            }
        };
        let reservation = Reservation { bytes, base };
        lock(&self.books).reserved.insert(ptr, reservation);
        Ok(DevicePtr(ptr))
    }

    /// Plain memory that begins at a multiple of the granularity: where it begins, and what the driver gave. No capture minds.
    fn allocate(&self, call: Call, bytes: u64) -> Result<(u64, u64)> {
        let _relaxed = self.relax(call)?;
        let base = self.allocate_block(call, bytes)?;
        if base.is_multiple_of(self.granularity) {
            return Ok((base, base));
        }
        // Not seen, but not promised either. With room for what is missing, then.
        self.free_block(base);
        let base = self.allocate_block(call, bytes.saturating_add(self.granularity))?;
        Ok((base.next_multiple_of(self.granularity), base))
    }

    /// Memory as the driver gives it. The context is current, and the thread's capture mode relaxed.
    pub(super) fn allocate_block(&self, call: Call, bytes: u64) -> Result<u64> {
        let mut ptr = 0;
        // SAFETY: the pointer is to a live local.
        let code = unsafe { (self.driver.cuMemAlloc_v2)(&raw mut ptr, bytes as usize) };
        self.check(call, code, || self.amount_and_free(bytes))?;
        Ok(ptr)
    }

    /// Frees what `allocate_block` gave, which waits for work of all streams. The context is current, and the thread's capture mode relaxed.
    pub(super) fn free_block(&self, base: u64) -> u32 {
        // SAFETY: the driver gave it, and it is in no book any more.
        unsafe { (self.driver.cuMemFree_v2)(base) }
    }

    pub(super) fn release(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let call = Call::Release;
        let _ending = self.ending_call(call)?;
        let mut books = lock(&self.books);
        let reservation = books
            .may_release(ptr.0, bytes)
            .map_err(|why| refused(call, ptr.0, bytes, &why))?;
        books.reserved.remove(&ptr.0);
        // Freeing plain memory may wait for work, which may wait for a thread that wants memory.
        drop(books);
        let code = self.release_range(ptr.0, reservation);
        let done =
            self.check_unless_lost(call, code, || format!("{bytes} B of addresses at {ptr:?}"));
        if done.is_err() {
            lock(&self.books).reserved.insert(ptr.0, reservation);
        }
        done
    }

    /// Gives a range back to the driver that is in no book any more, and in which nothing is mapped. The thread's capture mode is relaxed.
    fn release_range(&self, ptr: u64, reservation: Reservation) -> u32 {
        match &self.source {
            Source::Plain => self.free_block(reservation.base),
            Source::Virtual(_) => {
                let size = reservation.bytes as usize;
                // SAFETY: exactly this range was reserved by this device, and nothing is mapped there.
                unsafe { (self.driver.cuMemAddressFree)(ptr, size) }
            }
        }
    }

    pub(super) fn map(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let call = Call::Map;
        let _current = self.enter(call)?;
        self.check_pages(call, ptr.0, bytes)?;
        let mut books = lock(&self.books);
        books
            .may_map(ptr.0, bytes)
            .map_err(|why| refused(call, ptr.0, bytes, &why))?;
        let handle = match &self.source {
            // The memory is there since it was reserved.
            Source::Plain => None,
            Source::Virtual(chunk) => {
                let handle = self.create_chunk(call, bytes, &chunk.0)?;
                if let Err(error) = self.map_chunk(call, ptr, bytes, handle) {
                    self.release_chunk(handle);
                    return Err(error);
                }
                Some(handle)
            }
        };
        books.mapped.insert(ptr.0, Mapping { bytes, handle });
        Ok(())
    }

    pub(super) fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let call = Call::Unmap;
        let _current = self.current(call)?;
        let mut books = lock(&self.books);
        let mapping = books
            .mapping(ptr.0, bytes)
            .map_err(|why| refused(call, ptr.0, bytes, &why))?;
        let Some(handle) = mapping.handle else {
            // Plain memory goes when it is released.
            books.mapped.remove(&ptr.0);
            return Ok(());
        };
        // SAFETY: exactly this range was mapped by one call. That no work in flight touches it is the caller's duty; work that
        // does faults on the device.
        let code = unsafe { (self.driver.cuMemUnmap)(ptr.0, bytes as usize) };
        self.check_unless_lost(call, code, || format!("{bytes} B at {ptr:?}"))?;
        books.mapped.remove(&ptr.0);
        self.check_unless_lost(call, self.release_chunk(handle), || {
            format!("the physical memory of {bytes} B at {ptr:?}, which are unmapped")
        })
    }

    /// A physical chunk that is mapped nowhere.
    fn create_chunk(
        &self,
        call: Call,
        bytes: u64,
        like: &sys::CUmemAllocationProp,
    ) -> Result<sys::CUmemGenericAllocationHandle> {
        let mut handle = 0;
        // SAFETY: both pointers are to live values.
        let code = unsafe { (self.driver.cuMemCreate)(&raw mut handle, bytes as usize, like, 0) };
        self.check(call, code, || self.amount_and_free(bytes))?;
        Ok(handle)
    }

    /// What was asked for, and what there is: for errors.
    fn amount_and_free(&self, bytes: u64) -> String {
        match self.free_and_total() {
            Some((free, total)) => {
                format!("{bytes} B of physical memory; {free} B of {total} B are free")
            }
            None => format!("{bytes} B of physical memory"),
        }
    }

    /// Maps a chunk and makes it accessible; undoes the one if the other fails.
    fn map_chunk(
        &self,
        call: Call,
        ptr: DevicePtr,
        bytes: u64,
        handle: sys::CUmemGenericAllocationHandle,
    ) -> Result<()> {
        let size = bytes as usize;
        // SAFETY: the range is reserved by this device and has no memory; the chunk is of its size.
        let code = unsafe { (self.driver.cuMemMap)(ptr.0, size, 0, handle, 0) };
        self.check(call, code, || format!("{bytes} B at {ptr:?}"))?;
        let access = access(self.ordinal);
        // SAFETY: the range was just mapped; the pointer is to one live descriptor.
        let code = unsafe { (self.driver.cuMemSetAccess)(ptr.0, size, &raw const access, 1) };
        let accessible = self.check(call, code, || format!("access to {bytes} B at {ptr:?}"));
        if accessible.is_err() {
            // SAFETY: it was mapped above, and nobody knows of it.
            unsafe { (self.driver.cuMemUnmap)(ptr.0, size) };
        }
        accessible
    }

    fn release_chunk(&self, handle: sys::CUmemGenericAllocationHandle) -> u32 {
        // SAFETY: the handle is one that `create_chunk` gave, and is in no book any more.
        unsafe { (self.driver.cuMemRelease)(handle) }
    }

    /// Free and total physical memory, if the driver says.
    fn free_and_total(&self) -> Option<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to live locals; the context is current.
        let code = unsafe { (self.driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        (code == SUCCESS).then_some((free as u64, total as u64))
    }

    fn check_pages(&self, call: Call, ptr: u64, bytes: u64) -> Result<()> {
        let page = self.granularity;
        let sound = bytes > 0
            && ptr.checked_add(bytes).is_some()
            && ptr.is_multiple_of(page)
            && bytes.is_multiple_of(page);
        if sound {
            return Ok(());
        }
        let why = format!("address and size must be multiples of {page} B, and the size not 0");
        Err(refused(call, ptr, bytes, &why))
    }

    /// Gives everything back: for the device's end, when no handle is left, and all work has been waited for, if it could be.
    pub(super) fn give_back_memory(&self, waited: Result<()>) {
        let mut books = lock(&self.books);
        if books.is_empty() {
            return;
        }
        let ranges = books.mapped.len();
        tracing::debug!(ranges, "a CUDA device ends with memory mapped");
        if let Err(error) = waited
            && self.lost.get().is_none()
        {
            // Work may still touch it: then it is better left mapped.
            tracing::warn!(%error, ranges, "a CUDA device's work could not be waited for at its end; its memory is left to the context");
            return;
        }
        for (ptr, mapping) in std::mem::take(&mut books.mapped) {
            let Some(handle) = mapping.handle else {
                continue;
            };
            // SAFETY: mapped by one call, and all work has run, or the context is lost.
            unsafe { (self.driver.cuMemUnmap)(ptr, mapping.bytes as usize) };
            self.release_chunk(handle);
        }
        for (ptr, reservation) in std::mem::take(&mut books.reserved) {
            self.release_range(ptr, reservation);
        }
    }

    /// What sizes and addresses are multiples of.
    pub(super) fn ask_granularity(
        driver: &super::driver::Driver,
        prop: &sys::CUmemAllocationProp,
    ) -> Result<u64, u32> {
        let mut granularity = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to live values.
        let code = unsafe {
            (driver.cuMemGetAllocationGranularity)(
                &raw mut granularity,
                ptr::from_ref(prop),
                minimum,
            )
        };
        match code {
            SUCCESS => Ok(granularity as u64),
            code => Err(code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_books_refuse_what_does_not_fit() {
        let mut books = Books::default();
        let reservation = |bytes, base| Reservation { bytes, base };
        books.reserved.insert(100, reservation(40, 97));
        books.reserved.insert(140, reservation(20, 140));
        let mapping = Mapping {
            bytes: 10,
            handle: Some(7),
        };
        books.mapped.insert(110, mapping);
        assert!(books.may_map(100, 10).is_ok() && books.may_map(120, 20).is_ok());
        // Below, across two reservations, beyond, onto something.
        for (ptr, bytes) in [
            (90, 10),
            (130, 20),
            (150, 20),
            (105, 10),
            (110, 5),
            (100, 40),
        ] {
            assert!(books.may_map(ptr, bytes).is_err(), "{ptr}+{bytes}");
        }
        assert_eq!(books.may_release(140, 20).unwrap().base, 140);
        assert!(books.may_release(100, 40).is_err() && books.may_release(140, 10).is_err());
        assert_eq!(books.mapping(110, 10).unwrap().handle, Some(7));
        assert!(books.mapping(110, 5).is_err() && books.mapping(100, 10).is_err());
        assert_eq!(books.counts(), (10, 1, 2));
        books.mapped.clear();
        assert_eq!(books.may_release(100, 40).unwrap().base, 97);
    }

    #[test]
    fn a_chunk_is_the_devices_own() {
        let prop = properties(3, true);
        // SAFETY: every byte of it was written or zeroed.
        let words: [u32; 4] = unsafe { ptr::from_ref(&prop).cast::<[u32; 4]>().read() };
        assert_eq!(words, [1, 1, 1, 3]); // pinned, file descriptor, device, number
        // SAFETY: as above.
        let words: [u32; 3] = unsafe { ptr::from_ref(&access(3)).cast::<[u32; 3]>().read() };
        assert_eq!(words, [1, 3, 3]); // device, number, read and write
    }
}
