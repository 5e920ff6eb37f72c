//! The driver's codes: their names here, its own words for them, and which of them end a context.

use std::ffi::CStr;
use std::ptr;

use super::driver::{Driver, SUCCESS};
use crate::device::Code;

/// A code by number.
pub(super) fn code(number: u32) -> Code {
    match number {
        1 => Code::InvalidValue,
        2 => Code::OutOfMemory,
        3 => Code::NotInitialized,
        100 => Code::NoDevice,
        201 => Code::InvalidContext,
        304 => Code::OperatingSystem,
        400 => Code::InvalidHandle,
        401 => Code::IllegalState,
        500 => Code::NotFound,
        600 => Code::NotReady,
        700 => Code::IllegalAddress,
        719 => Code::LaunchFailed,
        801 => Code::NotSupported,
        900 => Code::StreamCaptureUnsupported,
        901 => Code::StreamCaptureInvalidated,
        902 => Code::StreamCaptureMerge,
        903 => Code::StreamCaptureUnmatched,
        904 => Code::StreamCaptureUnjoined,
        905 => Code::StreamCaptureIsolation,
        906 => Code::StreamCaptureImplicit,
        907 => Code::CapturedEvent,
        908 => Code::StreamCaptureWrongThread,
        other => Code::Other(other),
    }
}

/// Whether the driver repeats this code from every later call: the context is in a state that only its end mends.
pub(super) fn ends_context(number: u32) -> bool {
    matches!(
        number,
        214 // ECC_UNCORRECTABLE
        | 220 // NVLINK_UNCORRECTABLE
        | 226 // CONTAINED
        | 700 // ILLEGAL_ADDRESS
        | 702 // LAUNCH_TIMEOUT
        | 709 // CONTEXT_IS_DESTROYED
        | 710 // ASSERT
        | 714
            ..=719 // hardware stack, illegal instruction, misaligned address, address space, pc, launch failed
        | 721 // TENSOR_MEMORY_LEAK
    )
}

/// The driver's words for a code.
pub(super) fn text(driver: &Driver, number: u32) -> String {
    let unknown = || format!("the driver has no text for code {number}");
    // SAFETY: a function takes an enum of 32 bits as it takes that number, so the pointer may be called at this type; it is the
    // number that is passed, which need not be one of the enum's.
    let get: unsafe extern "C" fn(u32, *mut *const std::ffi::c_char) -> u32 =
        unsafe { std::mem::transmute(driver.cuGetErrorString) };
    let mut text = ptr::null();
    // SAFETY: the pointer is to a live local. What the driver writes there is a C string that is never freed.
    unsafe {
        if get(number, &raw mut text) != SUCCESS || text.is_null() {
            return unknown();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_keep_their_numbers() {
        for number in 0..1000 {
            assert_eq!(code(number).number(), number);
        }
        assert!(ends_context(700) && ends_context(719));
        assert!(!ends_context(1) && !ends_context(2) && !ends_context(901));
    }
}
