//! What a pool refuses, and that it is as it was then.

#[path = "common/pool.rs"]
mod common;

use std::error::Error;

use common::*;
use cudagraph_trees::pool::{Allocation, Freed, Pool, PoolConfig, PoolError, StreamId, Tag};

fn default() -> PoolConfig {
    PoolConfig::default()
}

#[test]
fn out_of_memory_at_the_limit_leaves_the_pool_as_it_was() {
    let (mut pool, toy) = pool_of(PoolConfig {
        limit: Some(22 * MIB),
        ..default()
    });
    alloc(&mut pool, 0, 4 * MIB);
    alloc(&mut pool, 0, 512);
    let before = (pool.snapshot(), pool.stats());
    let error = pool.alloc(StreamId(3), 3 * MIB - 1, NOBODY).unwrap_err();
    let PoolError::OutOfMemory {
        requested,
        rounded,
        stream,
        state,
        source,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (*requested, *rounded, *stream),
        (3 * MIB - 1, 3 * MIB, StreamId(3))
    );
    assert!(source.is_none());
    let line = "23068672 B reserved in 2 segments, 4194816 B live in 2 blocks, largest free block 16777216 B";
    assert_eq!(state, line);
    let text =
        format!("out of memory: 3145727 B asked for on stream 3 (3145728 B rounded); {line}");
    assert_eq!(error.to_string(), text);
    assert_eq!(
        ((pool.snapshot(), pool.stats()), toy.reserved()),
        (before, 2)
    );
    // What fits into what is there still goes.
    alloc(&mut pool, 0, 16 * MIB);
}

#[test]
fn a_failing_reserve_or_map_gives_the_addresses_back() {
    let (mut pool, toy) = pool_of(default());
    let kept = alloc(&mut pool, 0, 512);
    for call in [Call::Reserve, Call::Map] {
        let before = (pool.snapshot(), pool.stats());
        toy.fail.set(Some(call));
        let error = pool.alloc(StreamId(0), 5 * MIB, NOBODY).unwrap_err();
        assert_eq!(
            error.source().unwrap().to_string(),
            format!("the toy's {call:?} was told to fail")
        );
        assert!(matches!(
            error,
            PoolError::OutOfMemory {
                source: Some(_),
                ..
            }
        ));
        assert_eq!(
            ((pool.snapshot(), pool.stats()), toy.reserved()),
            (before, 1)
        );
    }
    // The number of the segment that failed is the next one's.
    let block = alloc(&mut pool, 0, 5 * MIB);
    assert_eq!(at(&pool, block), (1, 0));
    assert!(pool.contains(kept));
}

#[test]
fn a_backing_that_reserves_nonsense_is_not_believed() {
    let (mut pool, toy) = pool_of(default());
    let block = alloc(&mut pool, 0, 512);
    for nonsense in [
        0,
        513,
        u64::MAX - 511,
        block.address(),
        block.address() - 512,
    ] {
        toy.answer.set(Some(nonsense));
        let error = pool.alloc(StreamId(0), 5 * MIB, NOBODY).unwrap_err();
        assert!(
            error.source().unwrap().to_string().contains("must not"),
            "{nonsense:#x}"
        );
    }
    assert_eq!(layout(&pool), "S0@st0[A512 F2096640]");
}

#[test]
fn a_second_free_is_an_error() {
    let mut pool = pool();
    let [first, second] = [512, 512].map(|bytes| alloc(&mut pool, 0, bytes));
    free(&mut pool, first);
    let before = (pool.snapshot(), pool.stats());
    assert!(
        matches!(pool.free(first), Err(PoolError::NotLive { allocation }) if allocation == first)
    );
    assert!(matches!(
        pool.set_tag(first, Tag(1)),
        Err(PoolError::NotLive { .. })
    ));
    assert_eq!((pool.snapshot(), pool.stats()), before);
    // Also when somebody else has the place.
    let third = alloc(&mut pool, 0, 512);
    assert_eq!(third.address(), first.address());
    assert!(pool.free(first).is_err());
    assert!(pool.contains(second) && pool.contains(third) && !pool.contains(first));
}

#[test]
fn an_allocation_of_another_pool_is_an_error_even_if_it_looks_the_same() {
    let (mut one, mut two) = (pool(), pool());
    let (mine, other) = (alloc(&mut one, 0, 512), alloc(&mut two, 0, 512));
    assert_eq!(
        (mine.id(), mine.address(), mine.bytes()),
        (other.id(), other.address(), other.bytes())
    );
    assert_ne!(mine, other);
    assert!(!one.contains(other));
    assert!(matches!(one.free(other), Err(PoolError::NotLive { .. })));
    assert!(matches!(
        one.set_tag(other, Tag(1)),
        Err(PoolError::NotLive { .. })
    ));
    // Slots that this pool never had.
    let far: Vec<_> = (0..1000).map(|_| alloc(&mut two, 0, 512)).collect();
    assert!(matches!(one.free(far[999]), Err(PoolError::NotLive { .. })));
    free(&mut one, mine);
}

#[test]
fn zero_bytes_are_nothing() {
    let mut pool = pool();
    let empty = alloc(&mut pool, 0, 0);
    assert_eq!(
        (empty, pool.free(empty).unwrap(), layout(&pool)),
        (Allocation::EMPTY, Freed::Empty, String::new())
    );
    assert_eq!(pool.stats(), Default::default());
}

#[test]
fn sizes_beyond_64_bits_are_refused() {
    let mut pool = pool();
    for bytes in [u64::MAX, u64::MAX - 510] {
        let error = pool.alloc(StreamId(0), bytes, NOBODY).unwrap_err();
        assert!(
            matches!(error, PoolError::TooLarge { requested } if requested == bytes),
            "{error}"
        );
    }
    // Rounds, but no segment can be that long.
    let error = pool.alloc(StreamId(0), u64::MAX - 511, NOBODY).unwrap_err();
    assert!(matches!(error, PoolError::TooLarge { .. }), "{error}");
    let mut pool = pool_of(PoolConfig {
        limit: Some(1 << 40),
        ..default()
    })
    .0;
    let error = pool.alloc(StreamId(0), 1 << 62, NOBODY).unwrap_err();
    assert!(matches!(error, PoolError::OutOfMemory { .. }), "{error}");
    assert_eq!(layout(&pool), "");
}

#[test]
fn configurations_that_contradict_themselves_are_refused() {
    let wrong = [
        (
            "min_block",
            PoolConfig {
                min_block: 0,
                ..default()
            },
        ),
        (
            "min_block",
            PoolConfig {
                min_block: 768,
                ..default()
            },
        ),
        (
            "small_segment",
            PoolConfig {
                small_segment: 2 * MIB + 1,
                ..default()
            },
        ),
        (
            "large_segment",
            PoolConfig {
                large_segment: 0,
                ..default()
            },
        ),
        (
            "round_large",
            PoolConfig {
                round_large: 256,
                ..default()
            },
        ),
        (
            "round_large",
            PoolConfig {
                round_large: 0,
                ..default()
            },
        ),
        (
            "small_limit",
            PoolConfig {
                small_limit: 3 * MIB,
                ..default()
            },
        ),
        (
            "large_limit",
            PoolConfig {
                large_limit: 21 * MIB,
                ..default()
            },
        ),
        (
            "max_split",
            PoolConfig {
                max_split: Some(20 * MIB),
                ..default()
            },
        ),
    ];
    for (name, config) in wrong {
        let error = Pool::new(config, Toy::rising()).err().unwrap();
        assert!(
            matches!(error, PoolError::InvalidConfig { field, .. } if field == name),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .starts_with(&format!("invalid pool configuration: {name} = "))
        );
    }
    let mut pool = pool();
    assert!(pool.set_split(Some(MIB), false).is_err());
    assert_eq!(pool.config(), &default());
}

#[test]
fn any_sound_configuration_works() {
    let tiny = PoolConfig {
        min_block: 1,
        small_limit: 0,
        small_segment: 1,
        large_segment: 10,
        large_limit: 0,
        round_large: 3,
        split_remainder_small: 0,
        split_remainder_large: 0,
        ..default()
    };
    let mut pool = pool_of(tiny).0;
    let blocks: Vec<_> = [1, 2, 2, 3, 4]
        .map(|bytes| alloc(&mut pool, 0, bytes))
        .to_vec();
    assert_eq!(
        layout(&pool),
        "L0@st0[A1 A2]; L1@st0[A2 F1]; L2@st0[A3]; L3@st0[A4 F2]"
    );
    blocks.into_iter().for_each(|block| free(&mut pool, block));
    assert_eq!(
        layout(&pool),
        "L0@st0[F3]; L1@st0[F3]; L2@st0[F3]; L3@st0[F6]"
    );
}

#[test]
fn blocks_beyond_max_split_stay_whole_and_serve_only_their_like() {
    let mut pool = pool_of(PoolConfig {
        max_split: Some(24 * MIB),
        ..default()
    })
    .0;
    let large = alloc(&mut pool, 0, 60 * MIB);
    free(&mut pool, large);
    // Not for a request below the bound.
    let small = alloc(&mut pool, 0, 12 * MIB);
    assert_eq!(at(&pool, small).0, 1);
    // Not for one that would waste 20 MiB; whole for one that wastes less.
    let wasteful = alloc(&mut pool, 0, 40 * MIB);
    assert_eq!(at(&pool, wasteful).0, 2);
    let close = alloc(&mut pool, 0, 41 * MIB);
    assert_eq!((at(&pool, close), close.bytes()), ((0, 0), 60 * MIB));
}

#[test]
fn a_trim_that_fails_midway_keeps_the_books_and_goes_on_when_called_again() {
    for (call, left) in [(Call::Unmap, 3), (Call::Release, 2)] {
        let (mut pool, toy) = pool_of(default());
        let blocks: Vec<_> = (0..3).map(|stream| alloc(&mut pool, stream, 512)).collect();
        blocks.into_iter().for_each(|block| free(&mut pool, block));
        toy.fail.set(Some(call));
        let error = pool.trim().unwrap_err();
        assert!(
            matches!(&error, PoolError::Backing { segment, .. } if segment.0 == 0),
            "{error}"
        );
        assert_eq!(
            error.source().unwrap().to_string(),
            format!("the toy's {call:?} was told to fail")
        );
        assert_eq!((pool.stats().segments.current, toy.reserved()), (left, 3));
        assert_eq!(toy.mapped(), pool.stats().reserved_bytes.current);
        let block = alloc(&mut pool, 2, 512);
        free(&mut pool, block);
        assert_eq!(pool.trim().unwrap().segments, left);
        assert_eq!((toy.reserved(), held(&pool)), (0, (0, 0)));
    }
}

#[test]
fn find_and_locate_know_only_what_is_there() {
    let mut pool = pool();
    let [first, second] = [1024, 512].map(|bytes| alloc(&mut pool, 0, bytes));
    assert_eq!(pool.find(first.address()), Some(first));
    assert_eq!(pool.find(second.address()), Some(second));
    assert_eq!(pool.find(first.address() + 512), None, "inside a block");
    assert_eq!(pool.find(second.address() + 512), None, "a free block");
    assert_eq!(
        (pool.find(0), pool.locate(0), pool.locate(u64::MAX)),
        (None, None, None)
    );
    assert_eq!(at(&pool, second), (0, 1024));
    assert_eq!(pool.locate(second.address() + 700).unwrap().1, 1724);
    assert_eq!(
        pool.locate(first.address() + 2 * MIB),
        None,
        "one past the segment"
    );
}
