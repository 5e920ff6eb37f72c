//! Where the pool places blocks: orders, classes, policies, and the figures that follow. Names carry the rows of
//! the behaviour tables.

#[path = "common/pool.rs"]
mod common;

use common::*;
use cudagraph_trees::pool::{Pool, PoolConfig};

/// POOL-04: b = clone(a), then five times c = clone(b), o = c + 1, of which o becomes b. `places` are those of
/// b, then c and o in turn.
fn memory_stats(
    bytes: u64,
    places: [(u32, u64); 11],
    reserved: u64,
    active: u64,
    layouts: [&str; 2],
) {
    let (mut pool, toy) = pool_of(PoolConfig::default());
    let p = &mut pool;
    let mut places = places.into_iter();
    let mut place = |p: &mut _| {
        let block = alloc(p, 0, bytes);
        assert_eq!(Some(at(p, block)), places.next());
        block
    };
    let mut b = place(p);
    for _ in 0..5 {
        let c = place(p);
        let o = place(p);
        free(p, c);
        free(p, b);
        b = o;
    }
    let checkpoint = p.checkpoint();
    assert_eq!(layout(p), layouts[0]);
    let stats = p.stats();
    assert_eq!(
        (stats.reserved_bytes.current, stats.live_bytes.current),
        (reserved, active)
    );
    assert_eq!(
        (stats.live_blocks.current, stats.requested_bytes.current),
        (1, bytes)
    );
    assert_eq!(stats.segments.current as usize, p.snapshot().segments.len());
    assert_eq!(toy.mapped(), reserved);
    // What the allocator asks for once nothing refers to the graph.
    drop(checkpoint);
    let trimmed = p.trim().unwrap();
    assert_eq!(layout(p), layouts[1]);
    assert_eq!(trimmed.bytes, reserved - p.stats().reserved_bytes.current);
    assert_eq!(
        (
            held(p).0,
            p.stats().live_bytes.current,
            p.stats().segments.current
        ),
        (1, active, 1)
    );
    assert_eq!(toy.mapped(), held(p).1);
    assert!(p.contains(b));
}

#[test]
fn m_512_pool_04_memory_stats() {
    let (a, b, c) = ((0, 0), (0, 512), (0, 1024));
    let places = [a, b, c, a, b, a, c, a, b, a, c];
    let layout = "S0@st0[F1024 A512 F2095616]";
    memory_stats(512, places, 2097152, 512, [layout; 2]);
}

#[test]
fn m_1mib_pool_04_memory_stats() {
    let (a, b, c, d) = ((0, 0), (0, MIB), (1, 0), (1, MIB));
    let places = [a, b, c, d, a, b, c, d, a, b, c];
    let layouts = [
        "S0@st0[F2097152]; S1@st0[A1048576 F1048576]",
        "S1@st0[A1048576 F1048576]",
    ];
    memory_stats(MIB, places, 4194304, 1048576, layouts);
}

#[test]
fn m_1mib_and_512_pool_04_memory_stats() {
    let (a, b, c) = ((0, 0), (0, 1049088), (0, 2098176));
    let places = [a, b, c, a, b, a, c, a, b, a, c];
    let layout = "L0@st0[F2098176 A1049088 F17824256]";
    memory_stats(MIB + 512, places, 20971520, 1049088, [layout; 2]);
}

#[test]
fn m_10mib_less_512_pool_04_memory_stats() {
    let (a, b, c, d) = ((0, 0), (0, 10485248), (1, 0), (1, 10485248));
    let places = [a, b, c, d, a, b, c, d, a, b, c];
    let layouts = [
        "L0@st0[F20971520]; L1@st0[A10485248 F10486272]",
        "L1@st0[A10485248 F10486272]",
    ];
    memory_stats(10 * MIB - 512, places, 41943040, 10485248, layouts);
}

#[test]
fn m_10mib_and_512_pool_04_memory_stats() {
    let (a, b, c) = ((0, 0), (1, 0), (2, 0));
    let places = [a, b, c, a, b, a, c, a, b, a, c];
    let layouts = [
        "L0@st0[F12582912]; L1@st0[F12582912]; L2@st0[A10486272 F2096640]",
        "L2@st0[A10486272 F2096640]",
    ];
    memory_stats(10 * MIB + 512, places, 37748736, 10486272, layouts);
}

#[test]
fn p3_pool_03_three_successive_graphs_in_one_pool() {
    let p = &mut pool();
    let places: Vec<_> = (0..4).map(|_| alloc(p, 0, 4000)).collect();
    assert_eq!(
        places.iter().map(|a| at(p, *a).1).collect::<Vec<_>>(),
        [0, 4096, 8192, 12288]
    );
    free(p, places[1]);
    let f = alloc(p, 0, 4000);
    assert_eq!(at(p, f), (0, 4096));
    assert_eq!(held(p), (4, 2097152));
    assert_eq!(layout(p), "S0@st0[A4096 A4096 A4096 A4096 F2080768]");
}

#[test]
fn pt_ckpt_11_rounds_on_another_stream() {
    let p = &mut pool();
    let r = alloc(p, 1, 16);
    free(p, r);
    assert_eq!(
        (held(p), layout(p)),
        ((0, 2097152), "S0@st1[F2097152]".to_owned())
    );
    for _ in 0..10 {
        let round = [1, 2, 3].map(|number| {
            let block = alloc(p, 2, 20 * MIB);
            assert_eq!(at(p, block), (number, 0));
            block
        });
        round.into_iter().for_each(|block| free(p, block));
    }
    assert_eq!(held(p), (0, 65011712));
    let all = "S0@st1[F2097152]; L1@st2[F20971520]; L2@st2[F20971520]; L3@st2[F20971520]";
    assert_eq!(layout(p), all);
    assert_eq!(p.trim().unwrap().segments, 4);
    assert_eq!(layout(p), "");
}

#[test]
fn pi_initial_mempool_allocation() {
    let p = &mut pool();
    let prime = alloc(p, 0, 40 * MIB);
    free(p, prime);
    let out = alloc(p, 0, 8 * MIB);
    assert_eq!(at(p, out), (0, 0));
    assert_eq!(
        (held(p), layout(p)),
        ((1, 41943040), "L0@st0[A8388608 F33554432]".to_owned())
    );
}

#[test]
fn pool_18_no_split_gives_each_block_a_segment() {
    let p = &mut pool();
    let two: Vec<_> = (0..2).map(|_| alloc(p, 0, 4 * MIB)).collect();
    assert_eq!(layout(p), "L0@st0[A4194304 A4194304 F12582912]");
    assert_eq!(two[1].bytes(), 4 * MIB);

    let p = &mut pool_of(PoolConfig {
        no_split: true,
        ..PoolConfig::default()
    })
    .0;
    let two: Vec<_> = (0..2).map(|_| alloc(p, 0, 4 * MIB)).collect();
    assert_eq!(layout(p), "L0@st0[A20971520]; L1@st0[A20971520]");
    assert_eq!(two[1].bytes(), 20 * MIB);
    assert_eq!(p.stats().requested_bytes.current, 8 * MIB);
}

#[test]
fn pool_25_equal_blocks_come_back_in_the_same_order() {
    let p = &mut pool();
    let sizes: Vec<u64> = (0..16).map(|n| [2, 4, 6, 8][n % 4] * MIB).collect();
    let round = |p: &mut _, sizes: &[u64]| {
        let blocks: Vec<_> = sizes.iter().map(|bytes| alloc(p, 0, *bytes)).collect();
        blocks.iter().for_each(|block| free(p, *block));
        blocks
            .iter()
            .map(|block| block.address())
            .collect::<Vec<_>>()
    };
    let first = round(p, &sizes);
    round(p, &sizes.iter().map(|bytes| bytes / 2).collect::<Vec<_>>());
    assert_eq!(round(p, &sizes), first);
}

#[test]
fn pool_26_order_is_that_of_registration_not_of_addresses() {
    let toy = Toy::falling();
    let mut pool = Pool::new(PoolConfig::default(), toy).unwrap();
    let p = &mut pool;
    let sizes = [24, 32, 24, 32, 24, 32].map(|mib| mib * MIB);
    let round = |p: &mut _| {
        let blocks: Vec<_> = [1, 2]
            .into_iter()
            .flat_map(|s| sizes.map(|bytes| (s, bytes)))
            .collect();
        let blocks: Vec<_> = blocks
            .into_iter()
            .map(|(s, bytes)| alloc(p, s, bytes))
            .collect();
        blocks.iter().for_each(|block| free(p, *block));
        blocks
            .into_iter()
            .map(|block| at(p, block))
            .collect::<Vec<_>>()
    };
    let first = round(p);
    assert_eq!(first, (0..12).map(|number| (number, 0)).collect::<Vec<_>>());
    for stream in [1, 2] {
        let half = alloc(p, stream, 12 * MIB);
        free(p, half);
    }
    assert_eq!(round(p), first);
    assert_eq!(p.stats().segments.current, 12);
}

#[test]
fn pool_27_reserved_bytes_grow_and_resets_keep_what_is_now() {
    let p = &mut pool();
    let four: Vec<_> = (1..=4)
        .map(|n| {
            let block = alloc(p, 0, 20 * MIB);
            assert_eq!(p.stats().reserved_bytes.current, n * 20971520);
            block
        })
        .collect();
    four.into_iter().for_each(|block| free(p, block));
    p.reset_peaks();
    let reserved = p.stats().reserved_bytes;
    assert_eq!(
        (
            reserved.current,
            reserved.peak,
            reserved.allocated,
            reserved.freed
        ),
        (83886080, 83886080, 0, 0)
    );
    p.trim().unwrap();
    let reserved = p.stats().reserved_bytes;
    assert_eq!(
        (reserved.current, reserved.peak, reserved.freed),
        (0, 83886080, 83886080)
    );
}

#[test]
fn alloc_02_figures_of_one_block() {
    let p = &mut pool();
    let block = alloc(p, 0, 1000);
    let stats = p.stats();
    assert_eq!(
        (stats.live_bytes.current, stats.requested_bytes.current),
        (1024, 1000)
    );
    assert_eq!((stats.free_bytes, stats.largest_free), (2096128, 2096128));
    free(p, block);
    let stats = p.stats();
    assert_eq!(
        (
            stats.live_bytes.freed,
            stats.live_bytes.peak,
            stats.live_bytes.current
        ),
        (1024, 1024, 0)
    );
    p.reset_peaks();
    assert_eq!(p.stats().live_bytes.peak, 0);
}

#[test]
fn classes_never_mix() {
    let p = &mut pool();
    let large = alloc(p, 0, MIB + 1);
    let small = alloc(p, 0, MIB);
    assert_eq!((at(p, large).0, at(p, small).0), (0, 1));
    // 1 MiB is free in the small segment, and 19 MiB in the large one.
    let (next_small, next_large) = (alloc(p, 0, 512), alloc(p, 0, MIB + 512));
    assert_eq!(
        (at(p, next_small), at(p, next_large)),
        ((1, MIB), (0, MIB + 512))
    );
}

#[test]
fn a_block_is_used_again_on_its_stream_alone() {
    let p = &mut pool();
    let block = alloc(p, 7, 512);
    free(p, block);
    let (other, same) = (alloc(p, 8, 512), alloc(p, 7, 512));
    assert_eq!((at(p, other), at(p, same)), ((1, 0), (0, 0)));
}
