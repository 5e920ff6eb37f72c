//! Restores: each row of the table, what is never brought back, segments that came and went, and placement
//! afterwards.

#[path = "common/pool.rs"]
mod common;

use common::*;
use cudagraph_trees::pool::{Allocation, Pool, PoolConfig, StreamId, Tag, Unclaimed};

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
