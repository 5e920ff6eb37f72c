//! Fills with values of several bytes, by the driver's memsets.

use super::inner::Inner;
use super::stream::Handle;
use crate::device::{Call, Code, DeviceError, DevicePtr, Pattern, Result};

/// Fills a range. The context is current. For values of eight bytes the driver has no memset of its own: each half is a column of words with a pitch of eight bytes.
pub(super) fn fill(
    device: &Inner,
    stream: &Handle,
    dst: DevicePtr,
    pattern: Pattern,
    bytes: u64,
) -> Result<()> {
    let call = Call::FillPattern;
    if let Some(detail) = pattern.misfit(dst, bytes) {
        return Err(DeviceError::new(call, Code::InvalidValue, detail));
    }
    if bytes == 0 {
        return device.nothing_to_do(call, stream);
    }
    let count = (bytes / pattern.bytes()) as usize;
    let (driver, to, on) = (device.driver, dst.0, stream.raw.0);
    let check = |code| device.check(call, code, || format!("{bytes} B at {dst:?}"));
    let words = |value: u32, count: usize| {
        // SAFETY: no host memory is meant by the address; the handle keeps the stream alive.
        check(unsafe { (driver.cuMemsetD32Async)(to, value, count, on) })
    };
    let column = |to: u64, value: u32| {
        // SAFETY: as above; a word wide and `count` high, with a pitch of two words.
        check(unsafe { (driver.cuMemsetD2D32Async)(to, 8, value, 1, count, on) })
    };
    match pattern {
        Pattern::B8(value) => {
            // SAFETY: as above.
            check(unsafe { (driver.cuMemsetD8Async)(to, value, count, on) })
        }
        Pattern::B16(value) => {
            // SAFETY: as above.
            check(unsafe { (driver.cuMemsetD16Async)(to, value, count, on) })
        }
        Pattern::B32(value) => words(value, count),
        Pattern::B64(value) => {
            let (low, high) = (value as u32, (value >> 32) as u32);
            if low == high {
                return words(low, 2 * count);
            }
            column(to, low)?;
            column(to + 4, high)
        }
    }
}
