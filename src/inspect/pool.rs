//! A pool as text.

use std::fmt::Write;

use crate::pool::{PoolSnapshot, SizeClass, Tag};

/// A pool's segments and blocks in address order, one line each; `owner` names the owner of a live block by its tag.
///
/// ```text
/// pool 1: 1 segment, 2097152 B reserved, 1 block live, 512 B
/// S0 small, stream 2, 2097152 B
///   +0           512 live g1.0
///   +512     2096640 free
/// ```
#[must_use]
pub fn pool_picture(
    name: &str,
    snapshot: &PoolSnapshot,
    owner: &dyn Fn(Tag) -> Option<String>,
) -> String {
    let reserved: u64 = snapshot.segments.iter().map(|s| s.bytes).sum();
    let live = || {
        snapshot
            .segments
            .iter()
            .flat_map(|s| &s.blocks)
            .filter(|b| b.owner.is_some())
    };
    let bytes: u64 = live().map(|b| b.bytes).sum();
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{name}: {}, {reserved} B reserved, {} live, {bytes} B",
        counted(snapshot.segments.len(), "segment"),
        counted(live().count(), "block"),
    );
    for segment in &snapshot.segments {
        let class = match segment.class {
            SizeClass::Small => "small",
            SizeClass::Large => "large",
        };
        let _ = writeln!(
            text,
            "S{} {class}, stream {}, {} B",
            segment.id.0, segment.stream.0, segment.bytes
        );
        for block in &segment.blocks {
            let _ = write!(text, "  +{:<9} {:>9} ", block.offset, block.bytes);
            let _ = match &block.owner {
                Some(o) => writeln!(
                    text,
                    "live {}",
                    owner(o.tag).unwrap_or_else(|| format!("t{}", o.tag.0))
                ),
                None => writeln!(text, "free"),
            };
        }
    }
    text
}

pub(super) fn counted(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}
