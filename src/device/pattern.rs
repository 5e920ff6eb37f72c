//! Values that memory is filled with.

/// A value of 1, 2, 4 or 8 bytes, to be repeated: see [`Device::fill_pattern`](super::Device::fill_pattern). From numbers of these sizes, as
/// `Pattern::from(-1_i32)` or `Pattern::from(f32::NAN)`; in memory it has their bytes as the device has them, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// One byte.
    B8(u8),
    /// Two.
    B16(u16),
    /// Four.
    B32(u32),
    /// Eight.
    B64(u64),
}

impl Pattern {
    /// How many bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Pattern::B8(_) => 1,
            Pattern::B16(_) => 2,
            Pattern::B32(_) => 4,
            Pattern::B64(_) => 8,
        }
    }

    /// Its bytes, of which the first [`bytes`](Pattern::bytes) count.
    pub(super) fn to_bytes(self) -> [u8; 8] {
        match self {
            Pattern::B8(value) => u64::from(value),
            Pattern::B16(value) => u64::from(value),
            Pattern::B32(value) => u64::from(value),
            Pattern::B64(value) => value,
        }
        .to_le_bytes()
    }

    /// Why a range cannot be filled with it: it is no whole number of values, or they would not be aligned.
    pub(super) fn misfit(self, dst: super::DevicePtr, bytes: u64) -> Option<String> {
        let size = self.bytes();
        let fits = bytes.is_multiple_of(size) && dst.0.is_multiple_of(size);
        (!fits).then(|| format!("{bytes} B at {dst:?} are filled with values of {size} B: both must be multiples of that"))
    }
}

macro_rules! from {
    ($($from:ty, $variant:ident, $value:ident => $bits:expr;)*) => {
        $(impl From<$from> for Pattern {
            fn from($value: $from) -> Self {
                Pattern::$variant($bits)
            }
        })*
    };
}

from! {
    u8, B8, value => value;
    i8, B8, value => value.cast_unsigned();
    u16, B16, value => value;
    i16, B16, value => value.cast_unsigned();
    u32, B32, value => value;
    i32, B32, value => value.cast_unsigned();
    f32, B32, value => value.to_bits();
    u64, B64, value => value;
    i64, B64, value => value.cast_unsigned();
    f64, B64, value => value.to_bits();
}

#[cfg(test)]
mod tests {
    use super::super::DevicePtr;
    use super::*;

    #[test]
    fn numbers_keep_their_bytes() {
        let bytes = |pattern: Pattern| pattern.to_bytes()[..pattern.bytes() as usize].to_vec();
        assert_eq!(bytes((-1_i8).into()), [0xFF]);
        assert_eq!(bytes(0x1234_u16.into()), [0x34, 0x12]);
        assert_eq!(bytes((-2_i32).into()), (-2_i32).to_le_bytes());
        assert_eq!(bytes(f32::NAN.into()), f32::NAN.to_le_bytes());
        assert_eq!(bytes(1.5_f64.into()), 1.5_f64.to_le_bytes());
        assert_eq!(bytes(i64::MIN.into()), i64::MIN.to_le_bytes());
    }

    #[test]
    fn values_are_whole_and_aligned() {
        let pattern = Pattern::from(7_u32);
        assert_eq!(pattern.misfit(DevicePtr(8), 12), None);
        assert!(pattern.misfit(DevicePtr(8), 10).is_some());
        assert!(pattern.misfit(DevicePtr(6), 12).is_some());
        assert_eq!(Pattern::from(1_u8).misfit(DevicePtr(3), 5), None);
    }
}
