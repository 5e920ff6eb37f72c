//! Address ranges and the bytes under them: the only place of the simulated device that is `unsafe`.
//!
//! A [`Reservation`] owns a range of this process's addresses in which nothing may be touched. A
//! [`Chunk`] is fresh memory (a memfd of its own, so sparse: a page exists once it is written) mapped
//! under a part of one. Chunks of a reservation never overlap, and keep it alive.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A range of addresses that belongs to us and holds nothing but its chunks.
pub(super) struct Reservation {
    base: NonNull<u8>,
    len: usize,
    /// Offset and length of each chunk: what keeps chunks from overlapping.
    taken: Mutex<BTreeMap<usize, usize>>,
}

// SAFETY: `base` is a plain address range of the process, bound to no thread. The reservation itself
// never reads or writes through it, and `taken` has a lock.
unsafe impl Send for Reservation {}
// SAFETY: as above; every method that changes anything does so under `taken`'s lock.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `len` bytes of addresses at a multiple of `align` (a power of two, at least a page).
    pub(super) fn new(len: usize, align: usize) -> io::Result<Self> {
        let padded = len.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: without MAP_FIXED the kernel chooses a range that nobody uses.
        let start = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                padded,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let skip = start.align_offset(align);
        let base = start.wrapping_byte_add(skip);
        let tail = padded - skip - len;
        // SAFETY: both pieces lie inside the range that was just mapped, outside `base..base + len`,
        // and nothing refers to them. `align_offset` of a byte address is below `align`, so `skip + len`
        // is at most `padded`.
        unsafe {
            if skip > 0 {
                munmap(start, skip)?;
            }
            if tail > 0 {
                munmap(base.wrapping_byte_add(len), tail)?;
            }
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Reservation {
            base,
            len,
            taken: Mutex::new(BTreeMap::new()),
        })
    }

    /// The first address.
    pub(super) fn base(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// How many bytes.
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Maps fresh memory under `offset..offset + len` (multiples of the page), where no chunk may be.
    pub(super) fn map(self: &Arc<Self>, offset: usize, len: usize) -> io::Result<Chunk> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let end = offset
            .checked_add(len)
            .filter(|&end| end <= self.len && len > 0);
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        if taken
            .range(..end)
            .next_back()
            .is_some_and(|(&at, &bytes)| at + bytes > offset)
        {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let file = memfd_create("device memory", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len as u64)?;
        let at = self.base.as_ptr().wrapping_add(offset);
        // SAFETY: the range lies inside the reservation (checked above), which we own, and holds no
        // chunk (checked above), so the mapping it replaces is our own empty one. The file is
        // as long as the mapping and is never truncated: its descriptor is closed below.
        unsafe {
            mmap(
                at.cast::<c_void>(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                &file,
                0,
            )?;
        }
        taken.insert(offset, len);
        Ok(Chunk {
            reservation: self.clone(),
            offset,
            len,
        })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and no chunk is left in it: each holds the reservation alive.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "an owned range unmaps");
    }
}

/// Memory mapped under a part of a reservation. Dropping it leaves the addresses reserved and empty.
pub(super) struct Chunk {
    reservation: Arc<Reservation>,
    offset: usize,
    len: usize,
}

impl Chunk {
    /// How many bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address `offset` into the chunk, or `None` where `bytes` from there do not lie in it.
    fn at(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.len);
        inside.then(|| {
            self.reservation
                .base
                .as_ptr()
                .wrapping_add(self.offset + offset)
        })
    }

    /// Copies bytes out. Ranges outside the chunk are the caller's mistake and copy nothing.
    pub(super) fn read(&self, offset: usize, dst: &mut [u8]) {
        let Some(src) = self.at(offset, dst.len()) else {
            return debug_assert!(false, "read inside the chunk");
        };
        // SAFETY: `src` is mapped readable for `dst.len()` bytes (`at`, and the chunk's own mapping). `dst`
        // is memory of Rust's, which never lies in a reservation. Writers need `&mut self`.
        unsafe { ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) }
    }

    /// Copies bytes in.
    pub(super) fn write(&mut self, offset: usize, src: &[u8]) {
        let Some(dst) = self.at(offset, src.len()) else {
            return debug_assert!(false, "write inside the chunk");
        };
        // SAFETY: as in `read`, with the roles changed; `&mut self` keeps other accesses away.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) }
    }

    /// Sets each byte of a part.
    pub(super) fn fill(&mut self, offset: usize, bytes: usize, value: u8) {
        let Some(dst) = self.at(offset, bytes) else {
            return debug_assert!(false, "fill inside the chunk");
        };
        // SAFETY: `dst` is mapped writable for `bytes` bytes, and `&mut self` keeps other accesses away.
        unsafe { ptr::write_bytes(dst, value, bytes) }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let mut taken = self
            .reservation
            .taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let at = self.reservation.base.as_ptr().wrapping_add(self.offset);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range is this chunk's own part of a reservation that is alive, and no reference
        // into it exists: accesses copy.
        let emptied =
            unsafe { mmap_anonymous(at.cast::<c_void>(), self.len, ProtFlags::empty(), flags) };
        // Were the kernel to refuse, the part stays taken: mapping there again is refused instead of unsound.
        if emptied.is_ok() {
            taken.remove(&self.offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_do_not_overlap_and_come_back_fresh() {
        let range = Arc::new(Reservation::new(4 << 20, 2 << 20).unwrap());
        assert_eq!(range.base() % (2 << 20), 0);
        let mut chunk = range.map(0, 2 << 20).unwrap();
        assert_eq!(
            range.map(4096, 4096).err().unwrap().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert_eq!(
            range.map(2 << 20, 4 << 20).err().unwrap().kind(),
            io::ErrorKind::InvalidInput
        );
        chunk.write(10, &[1, 2, 3]);
        chunk.fill(11, 1, 9);
        let mut bytes = [0; 4];
        chunk.read(9, &mut bytes);
        assert_eq!(bytes, [0, 1, 9, 3]);
        drop(chunk);
        range.map(0, 4 << 20).unwrap().read(9, &mut bytes);
        assert_eq!(bytes, [0; 4]);
    }
}
