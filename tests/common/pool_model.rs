//! The pool as a model: it copies everything and searches linearly. Written without a look at the pool's code.

use std::collections::BTreeSet;

use cudagraph_trees::pool::PoolConfig;

/// A block of the model: length, and who has it: (name, tag, requested bytes).
#[derive(Clone, Copy, PartialEq)]
pub struct Block {
    pub bytes: u64,
    pub owner: Option<(u64, u64, u64)>,
}

#[derive(Clone)]
pub struct Segment {
    pub number: u32,
    pub small: bool,
    pub stream: u32,
    pub blocks: Vec<Block>,
}

/// The state: all that a checkpoint copies.
pub type Segments = Vec<Segment>;

pub struct Model {
    pub config: PoolConfig,
    pub segments: Segments,
    pub registered: u32,
    pub names: u64,
}

impl Model {
    /// Allocates; returns name, segment number, offset and length.
    pub fn alloc(&mut self, stream: u32, bytes: u64, tag: u64) -> (u64, u32, u64, u64) {
        let rounded = bytes.div_ceil(self.config.min_block) * self.config.min_block;
        let small = rounded <= self.config.small_limit;
        let mut best: Option<(u64, usize, usize)> = None;
        for (s, segment) in self.segments.iter().enumerate() {
            for (b, block) in segment.blocks.iter().enumerate() {
                let fits =
                    (segment.small, segment.stream) == (small, stream) && block.owner.is_none();
                if fits
                    && block.bytes >= rounded
                    && best.is_none_or(|(bytes, ..)| block.bytes < bytes)
                {
                    best = Some((block.bytes, s, b));
                }
            }
        }
        let (_, s, b) = best.unwrap_or_else(|| {
            let bytes = if small {
                self.config.small_segment
            } else if rounded < self.config.large_limit {
                self.config.large_segment
            } else {
                rounded.div_ceil(self.config.round_large) * self.config.round_large
            };
            let blocks = vec![Block { bytes, owner: None }];
            self.segments.push(Segment {
                number: self.registered,
                small,
                stream,
                blocks,
            });
            self.registered += 1;
            (bytes, self.segments.len() - 1, 0)
        });
        let segment = &mut self.segments[s];
        let rest = segment.blocks[b].bytes - rounded;
        let split = match small {
            true => rest >= self.config.split_remainder_small,
            false => rest > self.config.split_remainder_large,
        };
        if split && rest > 0 {
            segment.blocks[b].bytes = rounded;
            segment.blocks.insert(
                b + 1,
                Block {
                    bytes: rest,
                    owner: None,
                },
            );
        }
        self.names += 1;
        segment.blocks[b].owner = Some((self.names, tag, bytes));
        let offset = segment.blocks[..b].iter().map(|block| block.bytes).sum();
        (self.names, segment.number, offset, segment.blocks[b].bytes)
    }

    pub fn owner(&mut self, name: u64) -> Option<&mut Option<(u64, u64, u64)>> {
        let blocks = self
            .segments
            .iter_mut()
            .flat_map(|segment| &mut segment.blocks);
        blocks
            .map(|block| &mut block.owner)
            .find(|owner| owner.is_some_and(|owner| owner.0 == name))
    }

    /// Frees a name; whether it was live.
    pub fn free(&mut self, name: u64) -> bool {
        let Some(owner) = self.owner(name) else {
            return false;
        };
        *owner = None;
        for segment in &mut self.segments {
            merge(&mut segment.blocks);
        }
        true
    }

    pub fn live(&self) -> BTreeSet<u64> {
        live(&self.segments)
    }

    /// Restores; returns the names of adopted, unclaimed and orphaned blocks, and those freed (as they were named).
    pub fn restore(&mut self, saved: &Segments, adopt: &[(u64, u64)], keep: bool) -> [Vec<u64>; 4] {
        let (now, then) = (self.live(), live(saved));
        let tags: Vec<_> = now
            .intersection(&then)
            .map(|name| (*name, self.owner(*name).unwrap().unwrap().1))
            .collect();
        let there: Vec<_> = self
            .segments
            .iter()
            .map(|segment| (segment.number, segment.clone()))
            .collect();
        self.segments = saved.clone();
        self.segments
            .retain(|segment| there.iter().any(|(number, _)| *number == segment.number));
        for (number, mut segment) in there {
            if saved.iter().all(|segment| segment.number != number) {
                segment
                    .blocks
                    .iter_mut()
                    .for_each(|block| block.owner = None);
                merge(&mut segment.blocks);
                self.segments.push(segment);
            }
        }
        for (name, tag) in tags {
            self.owner(name).unwrap().as_mut().unwrap().1 = tag;
        }
        let renamed = |model: &mut Model, name: u64, tag: Option<u64>| {
            let new = if now.contains(&name) {
                name
            } else {
                model.names + 1
            };
            model.names = model.names.max(new);
            let owner = model.owner(name).unwrap().as_mut().unwrap();
            *owner = (new, tag.unwrap_or(owner.1), owner.2);
            new
        };
        let adopted = adopt
            .iter()
            .map(|(name, tag)| renamed(self, *name, Some(*tag)))
            .collect();
        let nobodys: Vec<u64> = then
            .iter()
            .copied()
            .filter(|name| !now.contains(name) && adopt.iter().all(|(adopted, _)| adopted != name))
            .collect();
        let (mut unclaimed, mut freed) = (Vec::new(), Vec::new());
        for name in nobodys {
            if keep {
                unclaimed.push(renamed(self, name, None));
            } else {
                assert!(self.free(name));
                freed.push(name);
            }
        }
        [
            adopted,
            unclaimed,
            now.difference(&then).copied().collect(),
            freed,
        ]
    }

    /// Trims, given all states that are held.
    pub fn trim<'a>(&mut self, held: impl Iterator<Item = &'a Segments> + Clone) {
        let one_free =
            |segment: &Segment| segment.blocks.len() == 1 && segment.blocks[0].owner.is_none();
        self.segments.retain(|segment| {
            let then = held
                .clone()
                .flatten()
                .filter(|then| then.number == segment.number);
            !one_free(segment) || !then.into_iter().all(one_free)
        });
    }

    pub fn layout(&self) -> String {
        let line = |segment: &Segment| {
            let class = if segment.small { 'S' } else { 'L' };
            let blocks = segment.blocks.iter().map(|block| {
                format!(
                    "{}{}",
                    if block.owner.is_some() { 'A' } else { 'F' },
                    block.bytes
                )
            });
            let blocks: Vec<_> = blocks.collect();
            format!(
                "{class}{}@st{}[{}]",
                segment.number,
                segment.stream,
                blocks.join(" ")
            )
        };
        self.segments
            .iter()
            .map(line)
            .collect::<Vec<_>>()
            .join("; ")
    }
}

pub fn live(segments: &Segments) -> BTreeSet<u64> {
    segments
        .iter()
        .flat_map(|s| &s.blocks)
        .filter_map(|block| block.owner.map(|owner| owner.0))
        .collect()
}

/// Makes neighbours that are free one.
pub fn merge(blocks: &mut Vec<Block>) {
    blocks.dedup_by(|next, block| {
        let both = next.owner.is_none() && block.owner.is_none();
        block.bytes += if both { next.bytes } else { 0 };
        both
    });
}
