//! Checkpoint and restore: what is kept, adopted, freed, orphaned, and that nothing happens by halves. Names
//! carry the rows of the behaviour tables.

#[path = "common/pool.rs"]
mod common;

use std::thread;

use common::*;
use cudagraph_trees::pool::{
    Adopt, Allocation, Backing, Checkpoint, Freed, LiveBlock, Pool, PoolConfig, PoolError,
    Restored, StreamId, Tag, Unclaimed,
};

/// An adopter of `saved`.
fn adopt(saved: Allocation, tag: u64) -> Adopt {
    Adopt {
        saved,
        tag: Tag(tag),
    }
}

/// The pool's snapshot and figures, to see that nothing has changed.
fn all(pool: &Pool<Toy>) -> impl PartialEq + std::fmt::Debug + use<> {
    (pool.snapshot(), pool.stats(), pool.live())
}

fn assert_send_sync<T: Send + Sync + Clone>() {}

#[test]
fn a_checkpoint_may_go_anywhere_and_be_dropped_at_any_time() {
    assert_send_sync::<Checkpoint>();
    let mut pool = pool();
    let kept = alloc(&mut pool, 0, 512);
    let checkpoint = pool.checkpoint();
    let clone = checkpoint.clone();
    thread::spawn(move || drop(checkpoint)).join().unwrap();
    free(&mut pool, kept);
    // The clone still holds the state.
    assert_eq!(pool.trim().unwrap().segments, 0);
    assert_eq!(
        pool.restore(&clone, &[adopt(kept, 1)], Unclaimed::Free)
            .unwrap()
            .adopted
            .len(),
        1
    );
    assert_eq!(pool.stats().checkpoints_held, 1);
    let late = pool.checkpoint();
    drop(pool);
    drop((clone, late));
}

#[test]
fn a_dropped_checkpoint_costs_nothing_after_the_next_call() {
    let mut pool = pool();
    let blocks: Vec<_> = (0..1000).map(|_| alloc(&mut pool, 0, 512)).collect();
    for block in blocks {
        let checkpoint = pool.checkpoint();
        free(&mut pool, block);
        drop(checkpoint);
    }
    drop(pool.checkpoint());
    assert_eq!(pool.stats().checkpoints, 1001);
    assert_eq!(pool.trim().unwrap().segments, 1);
    assert_eq!(pool.stats().checkpoints_held, 0);
}

#[test]
fn ckpt_06_a_block_missing_in_the_checkpoint_is_an_orphan_and_freeing_it_does_nothing_once() {
    let mut pool = pool();
    let first = alloc(&mut pool, 1, 512);
    let checkpoint = pool.checkpoint();
    let second = pool.alloc(StreamId(1), 400, Tag(22)).unwrap();
    let done = pool.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    let segment = cudagraph_trees::pool::SegmentId(0);
    let orphan = LiveBlock {
        allocation: second,
        tag: Tag(22),
        segment,
        offset: 512,
        bytes: 512,
        requested: 400,
    };
    assert_eq!(
        done,
        Restored {
            kept: 1,
            orphaned: vec![orphan],
            ..Restored::default()
        }
    );
    assert_eq!(pool.stats().orphans, 1);
    assert!(pool.contains(first) && !pool.contains(second));
    let before = layout(&pool);
    assert_eq!(pool.free(second).unwrap(), Freed::Orphan);
    assert!(
        matches!(pool.free(second), Err(PoolError::NotLive { allocation }) if allocation == second)
    );
    assert_eq!((layout(&pool), pool.stats().orphans), (before, 0));
}

#[test]
fn t2_07_an_orphans_place_can_be_had_again_before_and_after_its_free() {
    let mut pool = pool();
    let checkpoint = pool.checkpoint();
    let orphan = alloc(&mut pool, 0, 512);
    pool.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    let first = alloc(&mut pool, 0, 512);
    assert_eq!(first.address(), orphan.address());
    assert_ne!(first.id(), orphan.id());
    assert_eq!(pool.free(orphan).unwrap(), Freed::Orphan);
    assert!(pool.contains(first));
    let second = alloc(&mut pool, 0, 512);
    assert_ne!(
        second.address(),
        first.address(),
        "the place was not freed twice"
    );
}

#[test]
fn t2_08_zero_byte_blocks_are_legal_and_untracked() {
    let mut pool = pool();
    let empty = alloc(&mut pool, 0, 0);
    assert_eq!(
        (empty, empty.address(), empty.bytes(), empty.is_empty()),
        (Allocation::EMPTY, 0, 0, true)
    );
    assert_eq!((held(&pool), pool.contains(empty)), ((0, 0), false));
    assert!(pool.check_live(&[]).is_exact());
    let checkpoint = pool.checkpoint();
    let done = pool
        .restore(
            &checkpoint,
            &[adopt(empty, 1), adopt(empty, 2)],
            Unclaimed::Free,
        )
        .unwrap();
    assert_eq!(done.adopted, [Allocation::EMPTY; 2]);
    pool.set_tag(empty, Tag(3)).unwrap();
    assert_eq!(
        [pool.free(empty).unwrap(), pool.free(empty).unwrap()],
        [Freed::Empty; 2]
    );
}

/// The smallest backing there can be.
struct Numbers(u64);

impl Backing for Numbers {
    fn reserve(&mut self, bytes: u64) -> Result<u64, cudagraph_trees::pool::BackingError> {
        self.0 += bytes;
        Ok(self.0 - bytes)
    }
    fn map(&mut self, _: u64, _: u64) -> Result<(), cudagraph_trees::pool::BackingError> {
        Ok(())
    }
    fn unmap(&mut self, _: u64, _: u64) -> Result<(), cudagraph_trees::pool::BackingError> {
        Ok(())
    }
    fn release(&mut self, _: u64, _: u64) -> Result<(), cudagraph_trees::pool::BackingError> {
        Ok(())
    }
}

#[test]
fn t2_09_any_backing_will_do_also_a_boxed_one() {
    let boxed: Box<dyn Backing + Send> = Box::new(Numbers(1 << 30));
    let mut pool = Pool::new(PoolConfig::default(), boxed).unwrap();
    let block = pool.alloc(StreamId(0), 3 << 20, Tag(1)).unwrap();
    let checkpoint = pool.checkpoint();
    pool.free(block).unwrap();
    let done = pool
        .restore(&checkpoint, &[adopt(block, 1)], Unclaimed::Free)
        .unwrap();
    assert_eq!(done.adopted[0].address(), block.address());
    fn assert_send<T: Send>(_: &T) {}
    assert_send(&pool);
}

#[test]
fn ckpt_10_the_live_blocks_are_exactly_those_asked_about() {
    let mut pool = pool();
    let block = alloc(&mut pool, 0, 16);
    let at = block.address();
    assert!(pool.check_live(&[at]).is_exact());
    assert!(pool.check_live(&[at, at]).is_exact());
    let check = pool.check_live(&[at, 0]);
    assert_eq!(
        (check.is_exact(), &check.missing[..], check.untracked.len()),
        (false, &[0][..], 0)
    );
    let check = pool.check_live(&[]);
    assert_eq!(
        (
            check.is_exact(),
            check.missing.len(),
            check.untracked[0].allocation
        ),
        (false, 0, block)
    );
    assert_eq!(pool.check_live(&[at + 1]).missing, [at + 1]);
    free(&mut pool, block);
    assert!(pool.check_live(&[]).is_exact());
    assert_eq!(pool.check_live(&[at]).missing, [at]);
}

#[test]
fn ckpt_13_a_pool_without_checkpoints_and_live_blocks_gives_all_back() {
    let (mut pool, toy) = pool_of(PoolConfig::default());
    let blocks: Vec<_> = (0..9)
        .map(|n| alloc(&mut pool, n % 3, u64::from(n + 1) * MIB))
        .collect();
    let checkpoint = pool.checkpoint();
    blocks.into_iter().for_each(|block| free(&mut pool, block));
    assert_eq!(
        pool.trim().unwrap().segments,
        0,
        "the checkpoint has a live block in each"
    );
    drop(checkpoint);
    let segments = pool.stats().segments.current;
    assert_eq!(pool.trim().unwrap().segments, segments);
    assert_eq!((toy.reserved(), toy.mapped(), held(&pool)), (0, 0, (0, 0)));
}

#[test]
fn dropping_a_pool_gives_all_back() {
    let (mut pool, toy) = pool_of(PoolConfig::default());
    alloc(&mut pool, 0, 512);
    alloc(&mut pool, 0, 50 * MIB);
    assert_eq!(toy.reserved(), 2);
    drop(pool);
    assert_eq!(toy.reserved(), 0);
}

#[test]
fn ckpt_14_a_restore_brings_the_split_back_whatever_the_policy_now() {
    let mut pool = pool();
    let blocks = [3, 5, 2].map(|mib| alloc(&mut pool, 0, mib * MIB));
    free(&mut pool, blocks[1]);
    let (checkpoint, then) = (pool.checkpoint(), layout(&pool));
    free(&mut pool, blocks[0]);
    free(&mut pool, blocks[2]);
    pool.set_split(None, true).unwrap();
    let whole = alloc(&mut pool, 0, MIB + 512);
    assert_eq!(layout(&pool), "L0@st0[A20971520]");
    let adopted = [adopt(blocks[0], 1), adopt(blocks[2], 2)];
    let done = pool
        .restore(&checkpoint, &adopted, Unclaimed::Free)
        .unwrap();
    assert_eq!(layout(&pool), then);
    assert_eq!(done.orphaned[0].allocation, whole);
}

#[test]
fn ckpt_15_and_19_what_is_not_the_pools_is_refused_and_nothing_changes() {
    let (mut one, mut two) = (pool(), pool());
    let mine = alloc(&mut one, 0, 512);
    let other = alloc(&mut two, 0, 512);
    let (checkpoint, foreign) = (one.checkpoint(), two.checkpoint());
    let later = alloc(&mut one, 0, 512);
    free(&mut one, mine);
    let before = all(&one);

    let error = one.restore(&foreign, &[], Unclaimed::Free).unwrap_err();
    assert!(matches!(error, PoolError::ForeignCheckpoint));
    // Live now, not live then; of another pool, with the same address; named twice.
    for wrong in [later, other] {
        let error = one
            .restore(
                &checkpoint,
                &[adopt(mine, 1), adopt(wrong, 2)],
                Unclaimed::Free,
            )
            .unwrap_err();
        assert!(
            matches!(error, PoolError::AdoptNotInCheckpoint { index: 1, saved } if saved == wrong)
        );
        assert_eq!(all(&one), before);
    }
    let twice = [adopt(Allocation::EMPTY, 0), adopt(mine, 1), adopt(mine, 2)];
    let error = one
        .restore(&checkpoint, &twice, Unclaimed::Free)
        .unwrap_err();
    assert!(
        matches!(error, PoolError::AdoptedTwice { first: 1, second: 2, saved } if saved == mine)
    );
    assert_eq!(all(&one), before);
    // And then it works.
    let done = one
        .restore(&checkpoint, &twice[..2], Unclaimed::Free)
        .unwrap();
    assert_eq!(
        (done.adopted[1].address(), done.orphaned[0].allocation),
        (mine.address(), later)
    );
}

#[test]
fn each_row_of_the_table_in_one_restore() {
    let mut pool = pool();
    let [kept, owned, adopted, freed, replaced] =
        [1, 2, 3, 4, 5].map(|n| pool.alloc(StreamId(0), 512 * n, Tag(n)).unwrap());
    let (checkpoint, then) = (pool.checkpoint(), layout(&pool));
    for gone in [adopted, freed, replaced] {
        free(&mut pool, gone);
    }
    let orphan = pool.alloc(StreamId(0), 512 * 3, Tag(6)).unwrap();
    assert_eq!(orphan.address(), adopted.address());
    pool.set_tag(kept, Tag(11)).unwrap();

    let entries = [adopt(replaced, 15), adopt(owned, 12), adopt(adopted, 13)];
    let done = pool
        .restore(&checkpoint, &entries, Unclaimed::Free)
        .unwrap();
    assert_eq!(done.kept, 2);
    assert_eq!(done.adopted[1], owned, "live all along: the same name");
    for (now, then) in [(done.adopted[0], replaced), (done.adopted[2], adopted)] {
        assert!(now.id() > orphan.id());
        assert_eq!((now.address(), now.bytes()), (then.address(), then.bytes()));
    }
    assert_eq!(
        done.freed
            .iter()
            .map(|b| (b.allocation, b.tag, b.requested))
            .collect::<Vec<_>>(),
        [(freed, Tag(4), 2048)]
    );
    assert_eq!(
        done.orphaned
            .iter()
            .map(|b| (b.allocation, b.tag))
            .collect::<Vec<_>>(),
        [(orphan, Tag(6))]
    );
    assert!(done.unclaimed.is_empty());
    let live: Vec<_> = pool
        .live()
        .iter()
        .map(|block| (block.allocation, block.tag.0, block.requested))
        .collect();
    let expected = [
        (kept, 11, 512),
        (owned, 12, 1024),
        (done.adopted[2], 13, 1536),
        (done.adopted[0], 15, 2560),
    ];
    assert_eq!(
        live, expected,
        "a kept block keeps its tag, requested sizes come back"
    );
    assert_eq!(
        layout(&pool),
        "S0@st0[A512 A1024 A1536 F2048 A2560 F2089472]"
    );

    // Once more, with all that is unclaimed kept: names of before are no names now.
    let done = pool.restore(&checkpoint, &[], Unclaimed::Keep).unwrap();
    assert_eq!(
        (done.kept, done.unclaimed.len(), done.orphaned.len()),
        (2, 3, 2)
    );
    assert_eq!(layout(&pool), then);
    assert!(done.unclaimed.iter().all(|block| pool.contains(*block)));
}

#[test]
fn counts_and_peaks_are_never_brought_back() {
    let mut pool = pool();
    let first = alloc(&mut pool, 0, 1000);
    let checkpoint = pool.checkpoint();
    let more: Vec<_> = (0..9).map(|_| alloc(&mut pool, 0, 1000)).collect();
    free(&mut pool, more[0]);
    pool.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    let stats = pool.stats();
    assert_eq!(
        (
            stats.live_blocks.current,
            stats.live_bytes.current,
            stats.requested_bytes.current
        ),
        (1, 1024, 1000)
    );
    assert_eq!(
        (
            stats.live_blocks.peak,
            stats.live_blocks.allocated,
            stats.live_blocks.freed
        ),
        (10, 10, 1)
    );
    assert_eq!(
        (stats.checkpoints, stats.restores, stats.orphans),
        (1, 1, 8)
    );
    free(&mut pool, first);
    pool.reset_peaks();
    pool.restore(&checkpoint, &[adopt(first, 0)], Unclaimed::Free)
        .unwrap();
    let stats = pool.stats();
    assert_eq!(
        (
            stats.live_blocks.current,
            stats.live_blocks.peak,
            stats.live_blocks.allocated
        ),
        (1, 1, 0)
    );
}

#[test]
fn tags_of_kept_blocks_stay_whichever_way_the_pool_moves() {
    let mut pool = pool();
    let block = pool.alloc(StreamId(0), 512, Tag(1)).unwrap();
    let first = pool.checkpoint();
    pool.set_tag(block, Tag(2)).unwrap();
    let second = pool.checkpoint();
    let tag = |pool: &Pool<Toy>| pool.live()[0].tag;
    for checkpoint in [&first, &second, &first] {
        alloc(&mut pool, 0, 512);
        pool.restore(checkpoint, &[], Unclaimed::Free).unwrap();
        assert_eq!(tag(&pool), Tag(2));
    }
    pool.restore(&first, &[adopt(block, 3)], Unclaimed::Free)
        .unwrap();
    pool.restore(&second, &[], Unclaimed::Free).unwrap();
    assert_eq!(tag(&pool), Tag(3));
}

#[test]
fn segments_added_since_come_back_free_in_order_of_registration() {
    let mut pool = pool();
    let checkpoint = pool.checkpoint();
    for stream in [0, 1] {
        alloc(&mut pool, stream, 512);
        alloc(&mut pool, stream, 4 * MIB);
        alloc(&mut pool, stream, 30 * MIB);
    }
    pool.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    let free = "S0@st0[F2097152]; L1@st0[F20971520]; L2@st0[F31457280]; \
                S3@st1[F2097152]; L4@st1[F20971520]; L5@st1[F31457280]";
    assert_eq!(layout(&pool), free);
    let reserved = pool.stats().reserved_bytes.current;
    let again = [(1, 512), (1, 30 * MIB), (0, 4 * MIB)].map(|(stream, bytes)| {
        let block = alloc(&mut pool, stream, bytes);
        at(&pool, block)
    });
    assert_eq!(again, [(3, 0), (5, 0), (1, 0)]);
    assert_eq!(pool.stats().reserved_bytes.current, reserved);
}

#[test]
fn segments_trimmed_since_are_left_out_and_those_with_blocks_are_there() {
    let (mut pool, toy) = pool_of(PoolConfig::default());
    let [first, second, third] = [0, 1, 2].map(|stream| alloc(&mut pool, stream, 4 * MIB));
    free(&mut pool, second);
    let checkpoint = pool.checkpoint();
    free(&mut pool, first);
    let fourth = alloc(&mut pool, 1, 25 * MIB);
    assert_eq!(
        pool.trim().unwrap().segments,
        1,
        "the one that was free then and is now"
    );
    assert_eq!(
        layout(&pool),
        "L0@st0[F20971520]; L2@st2[A4194304 F16777216]; L3@st1[A27262976]"
    );
    let done = pool
        .restore(&checkpoint, &[adopt(first, 0)], Unclaimed::Free)
        .unwrap();
    assert_eq!(
        layout(&pool),
        "L0@st0[A4194304 F16777216]; L2@st2[A4194304 F16777216]; L3@st1[F27262976]"
    );
    assert_eq!((done.kept, done.orphaned[0].allocation), (1, fourth));
    assert!(pool.contains(third));
    // The checkpoint still has the block in the third segment, and the trim still skips it.
    free(&mut pool, third);
    free(&mut pool, done.adopted[0]);
    assert_eq!(pool.trim().unwrap().segments, 1);
    pool.restore(&checkpoint, &[], Unclaimed::Keep).unwrap();
    assert_eq!(
        layout(&pool),
        "L0@st0[A4194304 F16777216]; L2@st2[A4194304 F16777216]"
    );
    assert_eq!(toy.mapped(), 2 * 20 * MIB);
    // A new segment's number follows all there were.
    let block = alloc(&mut pool, 1, 512);
    assert_eq!(at(&pool, block), (4, 0));
}

#[test]
fn placement_after_a_restore_is_that_of_a_pool_that_never_left() {
    for seed in 1..40 {
        let (mut left, mut stayed) = (pool(), pool());
        let mut random = Random(seed * 7919);
        let mut live: Vec<(Allocation, Allocation)> = Vec::new();
        let step = |random: &mut Random,
                    left: &mut Pool<Toy>,
                    stayed: Option<&mut Pool<Toy>>,
                    live: &mut Vec<_>| {
            let (stream, bytes) = (random.below(2) as u32, random.bytes(22));
            if random.below(5) < 2 && !live.is_empty() {
                let (a, b) = live.swap_remove(random.below(live.len() as u64) as usize);
                free(left, a);
                stayed.into_iter().for_each(|stayed| free(stayed, b));
            } else {
                let a = alloc(left, stream, bytes);
                live.push((a, stayed.map_or(a, |stayed| alloc(stayed, stream, bytes))));
            }
        };
        for _ in 0..60 {
            step(&mut random, &mut left, Some(&mut stayed), &mut live);
        }
        let checkpoint = left.checkpoint();
        // Away: other blocks come and go, some of the old ones too. No new segments, so both are comparable.
        let (mut away, mut churn) = (live.clone(), Random(seed));
        left.set_limit(Some(left.stats().reserved_bytes.current));
        for _ in 0..100 {
            let bytes = churn.bytes(18);
            if churn.below(2) == 0 && !away.is_empty() {
                let (block, _) = away.swap_remove(churn.below(away.len() as u64) as usize);
                free(&mut left, block);
            } else if let Ok(block) = left.alloc(StreamId(churn.below(2) as u32), bytes, NOBODY) {
                away.push((block, block));
            }
        }
        left.set_limit(None);
        let entries: Vec<_> = live.iter().map(|(a, _)| adopt(*a, 0)).collect();
        let done = left
            .restore(&checkpoint, &entries, Unclaimed::Free)
            .unwrap();
        live.iter_mut()
            .zip(done.adopted)
            .for_each(|((block, _), now)| *block = now);
        assert_eq!(layout(&left), layout(&stayed));
        for _ in 0..100 {
            step(&mut random, &mut left, Some(&mut stayed), &mut live);
            assert_eq!(layout(&left), layout(&stayed), "seed {seed}");
        }
    }
}

#[test]
fn restores_over_many_pages_touch_what_has_changed() {
    let mut pool = pool();
    let blocks: Vec<_> = (0..5000)
        .map(|n| pool.alloc(StreamId(0), 512, Tag(n)).unwrap())
        .collect();
    let (checkpoint, then) = (pool.checkpoint(), pool.snapshot());
    for block in blocks.iter().step_by(7) {
        free(&mut pool, *block);
    }
    let entries: Vec<_> = blocks
        .iter()
        .enumerate()
        .rev()
        .map(|(n, block)| adopt(*block, n as u64))
        .collect();
    let done = pool
        .restore(&checkpoint, &entries, Unclaimed::Free)
        .unwrap();
    assert_eq!((done.kept, done.adopted.len()), (5000 - 715, 5000));
    assert_eq!(pool.snapshot().layout(), then.layout());
    let tags: Vec<_> = pool.live().iter().map(|block| block.tag.0).collect();
    assert_eq!(tags, (0..5000).collect::<Vec<_>>());
    for (n, now) in done.adopted.iter().rev().enumerate() {
        assert_eq!(
            (now.address(), *now == blocks[n]),
            (blocks[n].address(), n % 7 != 0)
        );
    }
    // A report may be used again.
    let mut out = done;
    pool.restore_into(&checkpoint, &[], Unclaimed::Free, &mut out)
        .unwrap();
    assert_eq!(
        (
            out.adopted.len(),
            out.kept,
            out.freed.len(),
            out.orphaned.len()
        ),
        (0, 4285, 715, 715)
    );
}

#[test]
fn checkpoints_may_nest_and_be_returned_to_in_any_order() {
    let mut pool = pool();
    let mut states = vec![(pool.checkpoint(), String::new(), 0)];
    for n in 0..50 {
        alloc(&mut pool, 0, 512 * (n % 9 + 1));
        states.push((pool.checkpoint(), layout(&pool), n + 1));
    }
    let mut random = Random(3);
    for _ in 0..300 {
        let (checkpoint, layout, live) = &states[random.below(51) as usize];
        pool.restore(checkpoint, &[], Unclaimed::Keep).unwrap();
        assert_eq!(pool.stats().live_blocks.current, *live);
        if *live > 0 {
            assert_eq!(&self::layout(&pool), layout);
        }
    }
}
