//! Random runs of the pool beside a model that copies everything and searches linearly. After each step
//! both have the same layout, owners and figures; a state that was returned to then places blocks alike.

#[path = "common/pool.rs"]
mod common;
#[path = "common/pool_model.rs"]
mod model;

use std::collections::BTreeSet;

use common::*;
use cudagraph_trees::pool::{
    Adopt, Allocation, Checkpoint, Freed, Pool, PoolConfig, PoolError, StreamId, Tag, Unclaimed,
};
use model::{Model, Segments, live};
use proptest::prelude::*;

/// A checkpoint, the model's copy, and the blocks that were live.
type Kept = (Checkpoint, Segments, Vec<(Allocation, u64)>);

/// Pool and model, and what both call their live blocks.
struct Run {
    pool: Pool<Toy>,
    model: Model,
    live: Vec<(Allocation, u64)>,
    orphans: Vec<Allocation>,
    dead: Vec<Allocation>,
    kept: Vec<Kept>,
}

impl Run {
    fn new(config: PoolConfig) -> Self {
        let model = Model {
            config: config.clone(),
            segments: Vec::new(),
            registered: 0,
            names: 0,
        };
        let pool = pool_of(config).0;
        Run {
            pool,
            model,
            live: Vec::new(),
            orphans: Vec::new(),
            dead: Vec::new(),
            kept: Vec::new(),
        }
    }

    fn step(&mut self, kind: u8, seed: u64) {
        let mut random = Random(seed | 1);
        random.next();
        match kind {
            0..45 => {
                let (stream, tag) = (random.below(2) as u32, random.below(1000));
                let bytes = random.bytes(17);
                let (name, number, offset, length) = self.model.alloc(stream, bytes, tag);
                let block = self.pool.alloc(StreamId(stream), bytes, Tag(tag)).unwrap();
                assert_eq!(
                    (at(&self.pool, block), block.bytes()),
                    ((number, offset), length)
                );
                self.live.push((block, name));
            }
            45..75 if !self.live.is_empty() => {
                let (block, name) = self
                    .live
                    .swap_remove(random.below(self.live.len() as u64) as usize);
                free(&mut self.pool, block);
                assert!(self.model.free(name));
                self.dead.push(block);
            }
            75..80 if !self.live.is_empty() => {
                let (block, name) = self.live[random.below(self.live.len() as u64) as usize];
                self.pool.set_tag(block, Tag(seed)).unwrap();
                self.model.owner(name).unwrap().as_mut().unwrap().1 = seed;
            }
            80..83 => {
                for orphan in self.orphans.drain(..) {
                    assert_eq!(self.pool.free(orphan).unwrap(), Freed::Orphan);
                    self.dead.push(orphan);
                }
                for dead in &self.dead {
                    assert!(matches!(
                        self.pool.free(*dead),
                        Err(PoolError::NotLive { .. })
                    ));
                }
            }
            83..88 => {
                let checkpoint = self.pool.checkpoint();
                self.kept
                    .push((checkpoint, self.model.segments.clone(), self.live.clone()));
            }
            88..90 if !self.kept.is_empty() => {
                self.kept
                    .swap_remove(random.below(self.kept.len() as u64) as usize);
            }
            90..93 => {
                self.pool.trim().unwrap();
                self.model.trim(self.kept.iter().map(|kept| &kept.1));
            }
            93.. if !self.kept.is_empty() => self.restore(&mut random),
            _ => {}
        }
        self.compare();
    }

    fn restore(&mut self, random: &mut Random) {
        let (checkpoint, saved, then) = &self.kept[random.below(self.kept.len() as u64) as usize];
        let mut claimed: Vec<(Allocation, u64, u64)> = Vec::new();
        for (block, name) in then {
            if random.below(3) > 0 {
                let at = random.below(claimed.len() as u64 + 1) as usize;
                claimed.insert(at, (*block, *name, random.below(1000)));
            }
        }
        let adopt: Vec<_> = claimed
            .iter()
            .map(|(saved, _, tag)| Adopt {
                saved: *saved,
                tag: Tag(*tag),
            })
            .collect();
        let names: Vec<_> = claimed.iter().map(|(_, name, tag)| (*name, *tag)).collect();
        let keep = random.below(2) == 0;
        let unclaimed = if keep {
            Unclaimed::Keep
        } else {
            Unclaimed::Free
        };
        let kept = self.model.live().intersection(&live(saved)).count();
        let done = self.pool.restore(checkpoint, &adopt, unclaimed).unwrap();
        let [adopted, _, orphaned, freed] = self.model.restore(saved, &names, keep);

        assert_eq!(
            (done.kept, done.freed.len(), done.orphaned.len()),
            (kept, freed.len(), orphaned.len())
        );
        let orphans: BTreeSet<u64> = done
            .orphaned
            .iter()
            .map(|o| o.allocation.address())
            .collect();
        let gone = self.live.iter().filter(|(_, name)| orphaned.contains(name));
        assert_eq!(orphans, gone.map(|(block, _)| block.address()).collect());
        self.orphans
            .extend(done.orphaned.iter().map(|orphan| orphan.allocation));
        self.live.retain(|(_, name)| !orphaned.contains(name));
        for ((now, name), (then, old, _)) in done.adopted.iter().zip(adopted).zip(&claimed) {
            assert_eq!(
                (now.address(), *now == *then),
                (then.address(), name == *old)
            );
            if name != *old {
                self.live.push((*now, name));
            }
        }
        // The model names unclaimed blocks in its own order: pair them by place.
        for now in done.unclaimed {
            let (number, offset) = at(&self.pool, now);
            let segment = self
                .model
                .segments
                .iter()
                .find(|segment| segment.number == number)
                .unwrap();
            let mut at = 0;
            let block = segment.blocks.iter().find(|block| {
                at += block.bytes;
                at > offset
            });
            self.live.push((now, block.unwrap().owner.unwrap().0));
        }
    }

    fn compare(&self) {
        assert_eq!(layout(&self.pool), self.model.layout());
        let blocks = self
            .model
            .segments
            .iter()
            .flat_map(|segment| &segment.blocks);
        let owners: Vec<_> = blocks
            .clone()
            .filter_map(|b| b.owner)
            .map(|owner| (owner.1, owner.2))
            .collect();
        let live = self.pool.live();
        assert_eq!(
            live.iter()
                .map(|block| (block.tag.0, block.requested))
                .collect::<Vec<_>>(),
            owners
        );
        let (stats, count) = (self.pool.stats(), live.len() as u64);
        assert_eq!(
            (stats.live_blocks.current, self.live.len() as u64),
            (count, count)
        );
        assert_eq!(
            stats.requested_bytes.current,
            owners.iter().map(|owner| owner.1).sum()
        );
        assert_eq!(
            stats.reserved_bytes.current,
            blocks.clone().map(|block| block.bytes).sum()
        );
        let free = blocks
            .filter(|block| block.owner.is_none())
            .map(|block| block.bytes);
        assert_eq!(
            (stats.free_bytes, stats.largest_free),
            (free.clone().sum(), free.max().unwrap_or(0))
        );
        assert_eq!(stats.orphans, self.orphans.len() as u64);
        assert!(
            self.live
                .iter()
                .all(|(block, _)| self.pool.contains(*block))
        );
    }
}

/// Sizes small enough for segments to fill up and mix.
fn small_sizes() -> PoolConfig {
    PoolConfig {
        small_limit: 4 * KIB,
        small_segment: 16 * KIB,
        large_segment: 64 * KIB,
        large_limit: 32 * KIB,
        round_large: 8 * KIB,
        split_remainder_large: 2 * KIB,
        ..PoolConfig::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_does_as_the_model_does(
        default in any::<bool>(),
        steps in prop::collection::vec((0..100_u8, any::<u64>()), 200..300),
    ) {
        let mut run = Run::new(if default { PoolConfig::default() } else { small_sizes() });
        for (kind, seed) in steps {
            run.step(kind, seed);
        }
    }
}

#[test]
fn a_long_run_with_many_blocks_does_as_the_model_does() {
    let (mut run, mut random) = (Run::new(small_sizes()), Random(17));
    for n in 0..2000_u64 {
        // Waves of growth and shrinking, so that many pages come and go.
        let kind = match (n / 500 % 2, random.below(100)) {
            (0, 0..88) => 0,
            (0, 88..97) => 50,
            (0, 97..99) => 85,
            (_, _) => random.below(100),
        };
        run.step(kind as u8, random.next());
        if run.kept.len() > 6 {
            run.kept.remove(0);
        }
    }
    assert!(
        run.pool.stats().live_blocks.peak > 300,
        "{}",
        run.pool.stats().live_blocks.peak
    );
}
