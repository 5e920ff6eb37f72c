//! A pool's sizes and limits, how they are checked, and the two decisions that depend on them alone:
//! which class a request belongs to, and whether a block is split.

use super::PoolError;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Sizes and limits of a pool, in bytes. The defaults are those of PyTorch's caching allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Every block is a multiple of this; a power of two (512).
    pub min_block: u64,
    /// Requests that round to at most this are of the small class (1 MiB).
    pub small_limit: u64,
    /// Length of a segment of the small class (2 MiB).
    pub small_segment: u64,
    /// Length of a segment of the large class for requests below `large_limit` (20 MiB).
    pub large_segment: u64,
    /// Requests that round to at least this get a segment of their own length (10 MiB).
    pub large_limit: u64,
    /// Segments of their own length are multiples of this (2 MiB).
    pub round_large: u64,
    /// A block of the small class is split if at least this remains (512).
    pub split_remainder_small: u64,
    /// A block of the large class is split if more than this remains (1 MiB).
    pub split_remainder_large: u64,
    /// Blocks of the large class of this length and more are not split, and serve only requests of this
    /// length and more that waste less than a `large_segment`. None: no such blocks.
    pub max_split: Option<u64>,
    /// Never split: a segment is one block.
    pub no_split: bool,
    /// The most bytes of segments to hold at a time. None: as many as the backing gives.
    pub limit: Option<u64>,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            min_block: 512,
            small_limit: MIB,
            small_segment: 2 * MIB,
            large_segment: 20 * MIB,
            large_limit: 10 * MIB,
            round_large: 2 * MIB,
            split_remainder_small: 512,
            split_remainder_large: MIB,
            max_split: None,
            no_split: false,
            limit: None,
        }
    }
}

/// Which of the two kinds of segment a request is served from. They never mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SizeClass {
    /// Requests up to [`PoolConfig::small_limit`].
    Small,
    /// All others.
    Large,
}

impl PoolConfig {
    /// Checks that the settings agree with each other.
    ///
    /// # Errors
    /// [`PoolError::InvalidConfig`] names the first that does not.
    pub fn validate(&self) -> Result<(), PoolError> {
        let check = |ok: bool, field, value, rule| match ok {
            true => Ok(()),
            false => Err(PoolError::InvalidConfig { field, value, rule }),
        };
        let whole = |bytes: u64| bytes != 0 && bytes.is_multiple_of(self.min_block);
        check(
            self.min_block.is_power_of_two(),
            "min_block",
            self.min_block,
            "must be a power of two",
        )?;
        for (field, bytes) in [
            ("small_segment", self.small_segment),
            ("large_segment", self.large_segment),
            ("round_large", self.round_large),
        ] {
            check(
                whole(bytes),
                field,
                bytes,
                "must be a multiple of min_block, and not 0",
            )?;
        }
        check(
            self.small_limit <= self.small_segment,
            "small_limit",
            self.small_limit,
            "must not be above small_segment",
        )?;
        check(
            self.large_limit <= self.large_segment,
            "large_limit",
            self.large_limit,
            "must not be above large_segment",
        )?;
        self.validate_split()
    }

    /// Checks `max_split`, which may change during a pool's life.
    pub(super) fn validate_split(&self) -> Result<(), PoolError> {
        match self.max_split {
            // A fresh segment would be out of bounds for the requests it was made for.
            Some(value) if value <= self.large_segment => Err(PoolError::InvalidConfig {
                field: "max_split",
                value,
                rule: "must be above large_segment",
            }),
            _ => Ok(()),
        }
    }

    /// `bytes` rounded up to whole blocks; none if that leaves 64 bits.
    #[inline]
    pub(super) fn round(&self, bytes: u64) -> Option<u64> {
        Some(bytes.checked_add(self.min_block - 1)? & !(self.min_block - 1))
    }

    /// The class of a rounded request.
    #[inline]
    pub(super) fn class(&self, rounded: u64) -> SizeClass {
        if rounded <= self.small_limit {
            SizeClass::Small
        } else {
            SizeClass::Large
        }
    }

    /// Length of a new segment for a rounded request; none if that leaves 64 bits.
    pub(super) fn segment(&self, rounded: u64) -> Option<u64> {
        match self.class(rounded) {
            SizeClass::Small => Some(self.small_segment),
            SizeClass::Large if rounded < self.large_limit => Some(self.large_segment),
            SizeClass::Large => rounded.checked_next_multiple_of(self.round_large),
        }
    }

    /// Whether a free block of `block` bytes may serve a rounded request at all.
    #[inline]
    pub(super) fn may_serve(&self, rounded: u64, block: u64) -> bool {
        match self.max_split {
            None => true,
            Some(max) if rounded < max => block < max || self.class(rounded) == SizeClass::Small,
            Some(_) => block - rounded < self.large_segment,
        }
    }

    /// Whether what a rounded request leaves of a block of `block` bytes becomes a block of its own.
    #[inline]
    pub(super) fn splits(&self, rounded: u64, block: u64) -> bool {
        let rest = block - rounded;
        let enough = match self.class(rounded) {
            SizeClass::Small => self.split_remainder_small.max(1),
            SizeClass::Large if self.max_split.is_some_and(|max| rounded >= max) => return false,
            SizeClass::Large => self.split_remainder_large.saturating_add(1),
        };
        rest >= enough && !self.no_split
    }
}
