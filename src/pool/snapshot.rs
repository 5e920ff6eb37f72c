//! A picture of a pool: its segments and their blocks, as data and as a line of text.

use std::fmt;

use super::{Allocation, LiveBlock, SegmentId, SizeClass, StreamId, Tag};

/// One block of a [`SegmentSnapshot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSnapshot {
    /// Where it begins in its segment, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Who has it; none if it is free.
    pub owner: Option<OwnerSnapshot>,
}

/// Who has a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerSnapshot {
    /// The block's name.
    pub allocation: Allocation,
    /// The owner's tag.
    pub tag: Tag,
    /// The bytes that were asked for.
    pub requested: u64,
}

/// One segment of a [`PoolSnapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentSnapshot {
    /// Its number in order of registration.
    pub id: SegmentId,
    /// The requests it serves.
    pub class: SizeClass,
    /// The stream it serves.
    pub stream: StreamId,
    /// Where it begins.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its blocks, which cover it, in address order.
    pub blocks: Vec<BlockSnapshot>,
}

/// A pool's segments in order of registration. Its text is one line, such as
/// `L0@st0[F8388608 A8388608 F4194304]; S1@st0[F2097152]`: class and number of each segment, its stream, and
/// its live (`A`) and free (`F`) blocks in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolSnapshot {
    /// The segments.
    pub segments: Vec<SegmentSnapshot>,
}

impl PoolSnapshot {
    /// The line of text; empty for a pool without segments.
    #[must_use]
    pub fn layout(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for SegmentSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = match self.class {
            SizeClass::Small => 'S',
            SizeClass::Large => 'L',
        };
        write!(f, "{class}{}@st{}[", self.id.0, self.stream.0)?;
        for (n, block) in self.blocks.iter().enumerate() {
            let space = if n == 0 { "" } else { " " };
            let state = if block.owner.is_some() { 'A' } else { 'F' };
            write!(f, "{space}{state}{}", block.bytes)?;
        }
        f.write_str("]")
    }
}

impl fmt::Display for PoolSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, segment) in self.segments.iter().enumerate() {
            if n > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{segment}")?;
        }
        Ok(())
    }
}

/// How the live blocks of a pool differ from a set of addresses: see
/// [`Pool::check_live`](super::Pool::check_live).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveCheck {
    /// Addresses asked about at which no live block begins, ascending; 0 is always one.
    pub missing: Vec<u64>,
    /// Live blocks nobody asked about, by segment and offset.
    pub untracked: Vec<LiveBlock>,
}

impl LiveCheck {
    /// Whether the live blocks begin at exactly the addresses asked about.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.missing.is_empty() && self.untracked.is_empty()
    }
}
