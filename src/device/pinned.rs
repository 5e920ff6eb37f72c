//! Page-locked host memory, as a device gives it.

use std::fmt;

use super::{Mark, Result};

/// Page-locked host memory of a device, which owns it: what [`Device::alloc_pinned`](super::Device::alloc_pinned) gives.
///
/// Its methods are the host's side, and know nothing of what the device does with the memory meanwhile: whoever calls them has waited for the work that
/// uses it. A [`PinnedBuffer`](crate::PinnedBuffer) sees to that. Two threads that call them are kept apart.
///
/// Dropping it frees it: no work in flight touches it then, and no graph that has its address is launched afterwards. It touches no capture, and may wait for work.
pub trait PinnedMemory: fmt::Debug + Send + Sync + 'static {
    /// Where it begins, as an address of this process.
    fn address(&self) -> usize;

    /// How many bytes.
    fn bytes(&self) -> u64;

    /// Copies bytes out, from `offset`.
    ///
    /// # Errors
    /// [`Code::InvalidValue`](super::Code::InvalidValue) where they do not lie in it.
    fn read(&self, offset: u64, dst: &mut [u8]) -> Result<()>;

    /// Copies bytes in, from `offset`.
    ///
    /// # Errors
    /// As [`read`](PinnedMemory::read).
    fn write(&self, offset: u64, src: &[u8]) -> Result<()>;

    /// Tells the device at once whether the memory has an owner. A device without memory checks does nothing. The simulated device poisons what dies, and
    /// reports a copy that touches it.
    fn mark(&self, mark: Mark) {
        let _ = mark;
    }
}

/// Whether `bytes` from `offset` lie in memory of `of` bytes.
pub(super) fn fits(offset: u64, bytes: u64, of: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= of)
}

/// Why a range is refused that does not lie in the memory.
pub(super) fn beyond(offset: u64, bytes: u64, of: u64) -> String {
    format!("{bytes} B from offset {offset} do not lie in pinned memory of {of} B")
}
