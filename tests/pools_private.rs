//! Private pools as such: numbers, backings, routes, uses, statistics, and what comes back to the device. Names carry the catalogue's ids.
mod common;

use std::sync::Barrier;
use std::thread;

use common::{Rig, Toy, ToyCounts, layout};
use cudagraph_trees::allocator::PoolId;
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, Code, Device};
use cudagraph_trees::pool::{PoolConfig, PoolError, Stat, Trimmed};
use cudagraph_trees::{Allocator, Error, Graph, PoolHandle, PoolOptions, Tensor};

suite!(
    pool_10_numbers_grow_and_are_not_reused,
    pool_14_a_pool_over_a_backing_of_the_callers,
    pool_15_a_tensor_keeps_its_backing,
    pool_18_a_pool_that_does_not_split,
    pool_20_pools_made_by_four_threads,
    pool_21_trim_leaves_a_routed_pool_alone,
    pool_22_routes_nest,
    ckpt_11_one_thread_allocates_to_a_graphs_pool,
    pool_23_a_thread_route_is_one_threads,
    pool_26_equal_blocks_are_taken_in_order_of_registration,
    pool_27_reserved_bytes_of_each_pool,
    routes_by_stream,
    eager_allocations_beside_a_capture,
    trim_during_a_capture_is_refused,
    configurations_that_contradict_themselves,
);

const MIB: u64 = 1 << 20;

fn toy_pool<D: Device>(allocator: &Allocator<D>, toy: Toy) -> PoolHandle<D> {
    allocator
        .create_pool(PoolOptions {
            backing: Some(Box::new(toy)),
            ..PoolOptions::default()
        })
        .unwrap()
}

fn plain_pool<D: Device>(rig: &Rig<D>) -> PoolHandle<D> {
    rig.allocator.create_pool(PoolOptions::default()).unwrap()
}

fn pool_10_numbers_grow_and_are_not_reused<D: Device>(rig: Rig<D>) {
    let first = plain_pool(&rig);
    let second = plain_pool(&rig);
    assert!(first.id() > PoolId::DEFAULT);
    assert_eq!(second.id(), PoolId(first.id().0 + 1));
    let again = rig.allocator.pool(first.id()).unwrap();
    assert_eq!((again.id(), first.uses()), (first.id(), 2));
    let gone = second.id();
    drop((first, second, again));
    let third = plain_pool(&rig);
    assert_eq!(third.id(), PoolId(gone.0 + 1));
    assert!(matches!(rig.allocator.pool(gone), Err(Error::UnknownPool(id)) if id == gone));
    // The default pool is nobody's to capture into: its free memory goes back whoever uses it.
    assert!(matches!(
        rig.allocator.pool(PoolId::DEFAULT),
        Err(Error::UnknownPool(PoolId::DEFAULT))
    ));
    drop(third);
    rig.finish();
}

fn pool_14_a_pool_over_a_backing_of_the_callers<D: Device>(rig: Rig<D>) {
    let (toy, counts) = Toy::new();
    let pool = toy_pool(&rig.allocator, toy);
    assert_eq!(pool.uses(), 1);
    let mut held = Vec::new();
    let route = rig.allocator.route_thread(&pool).unwrap();
    assert_eq!(pool.uses(), 2);
    for segments in [1, 1, 2] {
        held.push(rig.allocator.alloc(&rig.stream, MIB).unwrap());
        assert_eq!(pool.snapshot().segments.len(), segments);
    }
    drop(route);
    assert_eq!(pool.uses(), 1);
    assert_eq!(
        layout(&pool.snapshot()),
        "S0@st0[A1048576 A1048576]; S1@st0[A1048576 F1048576]"
    );
    let eager = rig.allocator.alloc(&rig.stream, MIB).unwrap();
    assert_eq!(rig.allocator.stats().live_blocks.current, 1);
    assert_eq!(pool.stats().live_blocks.current, 3);

    drop(held);
    rig.allocator.trim().unwrap();
    let seen = || *counts.lock().unwrap();
    assert_eq!((seen().mapped, seen().given_back), (4 * MIB, 0));
    drop(pool);
    assert_eq!(
        seen().given_back,
        0,
        "the last use is gone, the memory not yet"
    );
    assert_eq!(
        rig.allocator.trim().unwrap(),
        Trimmed {
            segments: 2,
            bytes: 4 * MIB
        }
    );
    assert_eq!(
        seen(),
        ToyCounts {
            mapped: 0,
            ranges: 0,
            given_back: 4 * MIB
        }
    );
    drop(eager);
    rig.finish();
}

fn pool_15_a_tensor_keeps_its_backing<D: Device>(rig: Rig<D>) {
    for keep_allocator in [true, false] {
        let (toy, counts) = Toy::new();
        let given_back = || counts.lock().unwrap().given_back;
        let allocator = Allocator::new(rig.device.clone()).unwrap();
        let pool = toy_pool(&allocator, toy);
        let id = pool.id();
        let tensor = pool.alloc(&rig.stream, 100).unwrap();
        drop(pool);
        assert!(matches!(allocator.pool(id), Err(Error::PoolReleased(other)) if other == id));
        assert_eq!(allocator.trim().unwrap(), Trimmed::default());
        if keep_allocator {
            drop(tensor);
            assert_eq!(given_back(), 0);
            assert_eq!(allocator.trim().unwrap().bytes, 2 * MIB);
            assert_eq!(given_back(), 2 * MIB);
            assert!(matches!(allocator.pool(id), Err(Error::UnknownPool(_))));
        } else {
            drop(allocator);
            assert_eq!(given_back(), 0, "the tensor keeps all of it");
            drop(tensor);
            assert_eq!(given_back(), 2 * MIB);
        }
    }
    rig.finish();
}

fn pool_18_a_pool_that_does_not_split<D: Device>(rig: Rig<D>) {
    let whole = rig
        .allocator
        .create_pool(PoolOptions {
            config: PoolConfig {
                no_split: true,
                ..PoolConfig::default()
            },
            ..PoolOptions::default()
        })
        .unwrap();
    let normal = plain_pool(&rig);
    let two = |pool: &PoolHandle<D>| [(); 2].map(|()| pool.alloc(&rig.stream, 4 * MIB).unwrap());
    let held = (two(&whole), two(&normal));
    assert_eq!(
        layout(&whole.snapshot()),
        "L0@st0[A20971520]; L1@st0[A20971520]"
    );
    assert_eq!(
        layout(&normal.snapshot()),
        "L0@st0[A4194304 A4194304 F12582912]"
    );
    drop((held, whole, normal));
    rig.finish();
}

fn pool_20_pools_made_by_four_threads<D: Device>(rig: Rig<D>) {
    let pools: Vec<PoolHandle<D>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| plain_pool(&rig))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut ids: Vec<u32> = pools.iter().map(|p| p.id().0).collect();
    ids.sort_unstable();
    let first = ids[0];
    assert_eq!(ids, [first, first + 1, first + 2, first + 3]);
    drop(pools);
    rig.finish();
}

fn pool_21_trim_leaves_a_routed_pool_alone<D: Device>(rig: Rig<D>) {
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let pool = plain_pool(&rig);
                let stream = rig.device.create_stream().unwrap();
                let route = rig.allocator.route_thread(&pool).unwrap();
                drop(rig.allocator.alloc(&stream, 16).unwrap());
                rig.allocator.trim().unwrap();
                assert_eq!(layout(&pool.snapshot()), "S0@st0[F2097152]");
                drop(route);
            });
        }
    });
    rig.finish();
}

fn pool_22_routes_nest<D: Device>(rig: Rig<D>) {
    let pools = [(); 3].map(|()| plain_pool(&rig));
    let mut held: Vec<Tensor<D>> = Vec::new();
    let mut alloc = || held.push(rig.allocator.alloc(&rig.stream, 20 * MIB).unwrap());
    let enter = |n: usize| rig.allocator.route_thread(&pools[n]).unwrap();
    let outer = enter(0);
    alloc();
    let middle = enter(1);
    alloc();
    let inner = enter(2);
    alloc();
    drop(inner);
    alloc();
    drop(middle);
    alloc();
    drop(outer);
    assert_eq!(
        pools.each_ref().map(|p| p.snapshot().segments.len()),
        [2, 2, 1]
    );
    alloc();
    assert_eq!(rig.allocator.stats().segments.current, 1);
    drop((held, pools));
    rig.finish();
}

fn ckpt_11_one_thread_allocates_to_a_graphs_pool<D: Device>(rig: Rig<D>) {
    // A graph's pool of one segment, whose output is gone.
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    drop(capture.alloc(16).unwrap());
    capture.end().unwrap();
    let pool = graph.pool().unwrap();
    assert_eq!(pool.stats().segments.current, 1);
    let three = |stream: &D::Stream, n: usize| -> Vec<Tensor<D>> {
        (0..n)
            .map(|_| rig.allocator.alloc(stream, 20 * MIB).unwrap())
            .collect()
    };
    thread::scope(|scope| {
        let (rig, pool, three) = (&rig, &pool, &three);
        scope.spawn(move || {
            let stream = rig.device.create_stream().unwrap();
            let route = rig.allocator.route_thread(pool).unwrap();
            let mut places = Vec::new();
            for _ in 0..10 {
                let round = three(&stream, 3);
                places.push(round.iter().map(|t| t.ptr().unwrap()).collect::<Vec<_>>());
            }
            assert!(places.iter().all(|round| *round == places[0]));
            drop(route);
            let outside = three(&stream, 3);
            assert!(
                outside
                    .iter()
                    .all(|t| pool.locate(t.ptr().unwrap()).is_none())
            );
        });
        scope.spawn(move || {
            let stream = rig.device.create_stream().unwrap();
            for _ in 0..10 {
                let round = three(&stream, 2);
                assert!(
                    round
                        .iter()
                        .all(|t| pool.locate(t.ptr().unwrap()).is_none())
                );
            }
        });
    });
    // The one it had, and three large ones.
    let snapshot = pool.snapshot();
    let sizes: Vec<u64> = snapshot.segments.iter().map(|s| s.bytes).collect();
    assert_eq!(sizes, [2 * MIB, 20 * MIB, 20 * MIB, 20 * MIB]);
    assert_eq!(pool.stats().live_blocks.current, 0);
    let id = pool.id();
    drop((graph, pool));
    rig.allocator.trim().unwrap();
    assert!(
        rig.allocator
            .private_pools()
            .iter()
            .all(|(other, ..)| *other != id)
    );
    rig.finish();
}

fn pool_23_a_thread_route_is_one_threads<D: Device>(rig: Rig<D>) {
    let pool = plain_pool(&rig);
    let route = rig.allocator.route_thread(&pool).unwrap();
    let both = Barrier::new(2);
    let sides = thread::scope(|scope| {
        let side = scope.spawn(|| {
            both.wait();
            let first = rig.allocator.alloc(&rig.stream, MIB).unwrap();
            both.wait();
            [first, rig.allocator.alloc(&rig.stream, MIB).unwrap()]
        });
        both.wait();
        let mine = rig.allocator.alloc(&rig.stream, MIB).unwrap();
        drop(mine);
        both.wait();
        side.join().unwrap()
    });
    let default = rig.allocator.stats();
    assert_eq!(
        (default.segments.current, default.live_bytes.current),
        (1, 2 * MIB)
    );
    assert_eq!(
        (
            pool.stats().segments.current,
            pool.stats().live_bytes.current
        ),
        (1, 0)
    );
    drop((route, sides, pool));
    rig.finish();
}

fn pool_26_equal_blocks_are_taken_in_order_of_registration<D: Device>(rig: Rig<D>) {
    let pool = toy_pool(&rig.allocator, Toy::descending());
    let streams = [rig.stream.clone(), rig.device.create_stream().unwrap()];
    // Three of 24 MiB and three of 32 MiB on each stream.
    let round = || -> Vec<Tensor<D>> {
        (0..12)
            .map(|i: usize| {
                let bytes = if i % 4 < 2 { 24 * MIB } else { 32 * MIB };
                pool.alloc(&streams[i % 2], bytes).unwrap()
            })
            .collect()
    };
    let places =
        |round: &[Tensor<D>]| -> Vec<u64> { round.iter().map(|t| t.ptr().unwrap().0).collect() };
    let first = round();
    let created = places(&first);
    assert!(
        created.windows(2).all(|w| w[0] > w[1]),
        "every segment lies below the one before it"
    );
    assert_eq!(pool.stats().segments.current, 12);
    drop(first);
    for stream in &streams {
        // Splits one block of the stream, and merges it again.
        let halves = [(); 2].map(|()| pool.alloc(stream, 12 * MIB).unwrap());
        assert_eq!(
            halves[1].ptr().unwrap().0 - halves[0].ptr().unwrap().0,
            12 * MIB
        );
    }
    let second = round();
    assert_eq!(places(&second), created);
    assert_eq!(pool.stats().segments.current, 12);
    drop((second, pool));
    rig.finish();
}

fn pool_27_reserved_bytes_of_each_pool<D: Device>(rig: Rig<D>) {
    let (toy, counts) = Toy::new();
    let pool = toy_pool(&rig.allocator, toy);
    let reserved = || pool.stats().reserved_bytes;
    let mut held = Vec::new();
    for n in 1..=4 {
        held.push(pool.alloc(&rig.stream, 20 * MIB).unwrap());
        assert_eq!(
            reserved(),
            Stat {
                current: n * 20 * MIB,
                peak: n * 20 * MIB,
                allocated: n * 20 * MIB,
                freed: 0
            }
        );
    }
    let full = reserved();
    drop(held);
    assert_eq!(reserved(), full);
    rig.allocator.trim().unwrap();
    assert_eq!(reserved(), full, "trim leaves a living pool alone");
    pool.reset_peaks();
    let reset = Stat {
        current: 80 * MIB,
        peak: 80 * MIB,
        allocated: 0,
        freed: 0,
    };
    assert_eq!(reserved(), reset);

    let others = [(); 2].map(|()| plain_pool(&rig));
    let tensors = others
        .each_ref()
        .map(|p| p.alloc(&rig.stream, 20 * MIB).unwrap());
    for other in &others {
        assert_eq!(other.stats().reserved_bytes.current, 20_971_520);
    }
    assert_eq!(reserved(), reset);

    // Upstream's counters outlive the pool; here the pool is gone from the books after the trim, and its backing got all of it.
    let id = pool.id();
    drop(pool);
    let listed = || {
        rig.allocator
            .private_pools()
            .into_iter()
            .find(|(i, ..)| *i == id)
            .map(|(_, uses, stats)| (uses, stats.reserved_bytes))
    };
    assert_eq!(listed(), Some((0, reset)));
    assert_eq!(
        rig.allocator.trim().unwrap(),
        Trimmed {
            segments: 4,
            bytes: 80 * MIB
        }
    );
    assert_eq!(listed(), None);
    assert_eq!(counts.lock().unwrap().given_back, 80 * MIB);
    for other in &others {
        assert_eq!(other.stats().reserved_bytes.current, 20_971_520);
    }
    drop((tensors, others));
    rig.finish();
}

fn routes_by_stream<D: Device>(rig: Rig<D>) {
    let [by_stream, by_thread] = [(); 2].map(|()| plain_pool(&rig));
    let other = rig.device.create_stream().unwrap();
    let route = rig.allocator.route_stream(&rig.stream, &by_stream).unwrap();
    let held = thread::scope(|scope| {
        let from_elsewhere = scope.spawn(|| rig.allocator.alloc(&rig.stream, 512).unwrap());
        [
            from_elsewhere.join().unwrap(),
            rig.allocator.alloc(&other, 512).unwrap(),
        ]
    });
    let live = |p: &PoolHandle<D>| p.stats().live_blocks.current;
    assert_eq!(
        (live(&by_stream), rig.allocator.stats().live_blocks.current),
        (1, 1)
    );
    // The later route is the inner one, whatever its kind; a pool that is named is not routed.
    let inner = rig.allocator.route_thread(&by_thread).unwrap();
    let routed = rig.allocator.alloc(&rig.stream, 512).unwrap();
    let named = by_stream.alloc(&other, 512).unwrap();
    assert_eq!((live(&by_stream), live(&by_thread)), (2, 1));
    // Guards need not be dropped in order.
    drop(route);
    let again = rig.allocator.alloc(&rig.stream, 512).unwrap();
    assert_eq!((live(&by_stream), live(&by_thread)), (2, 2));
    drop(inner);
    assert_eq!((by_stream.uses(), by_thread.uses()), (1, 1));
    drop((held, routed, named, again, by_stream, by_thread));
    rig.finish();
}

fn eager_allocations_beside_a_capture<D: Device>(rig: Rig<D>) {
    let beside = rig.device.create_stream().unwrap();
    let x = rig.floats(&[1.0; 128]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let inside = rig.captured(&capture, &x, 2.0, 0.0);
    let eager = rig.allocator.alloc(&beside, 512).unwrap();
    let elsewhere = thread::scope(|scope| {
        scope
            .spawn(|| rig.allocator.alloc(&beside, 512).unwrap())
            .join()
            .unwrap()
    });
    assert_eq!(rig.allocator.stats().live_blocks.current, 3);
    // What the capturing stream is to use comes from the capture's pool, whoever asks for it.
    let for_the_capture = thread::scope(|scope| {
        scope
            .spawn(|| rig.allocator.alloc(&rig.stream, 512).unwrap())
            .join()
            .unwrap()
    });
    capture.end().unwrap();
    let pool = graph.pool().unwrap();
    let at = |t: &Tensor<D>| pool.locate(t.ptr().unwrap()).map(|(_, offset)| offset);
    assert_eq!(
        [&inside, &for_the_capture, &eager, &elsewhere].map(at),
        [Some(0), Some(512), None, None]
    );
    // Afterwards the stream's allocations are eager again.
    let after = rig.allocator.alloc(&rig.stream, 512).unwrap();
    assert_eq!(at(&after), None);
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&inside), [2.0; 128]);
    drop((x, inside, eager, elsewhere, for_the_capture, after));
    drop((pool, graph));
    rig.finish();
}

fn trim_during_a_capture_is_refused<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    drop(rig.allocator.alloc(&rig.stream, 20 * MIB).unwrap());
    let before = rig.allocator.stats();
    let streams = [rig.stream.clone(), rig.device.create_stream().unwrap()];
    let mut graphs = [(); 2].map(|()| Graph::new(&rig.allocator));
    let [g0, g1] = &mut graphs;
    let first = g0.capture(&streams[0]).unwrap();
    let second = g1.capture(&streams[1]).unwrap();
    let y = rig.captured(&first, &x, 5.0, 0.0);
    let refused = |captures: usize| {
        let trim = rig.allocator.trim();
        assert!(
            matches!(trim, Err(Error::CaptureUnderway { captures: n }) if n == captures),
            "{trim:?}"
        );
    };
    refused(2);
    drop(second);
    refused(1);
    assert_eq!(rig.allocator.stats(), before, "nothing was given back");
    first.end().unwrap(); // and the capture was not touched
    g0.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [5.0; 4]);
    assert_eq!(
        rig.allocator.trim().unwrap(),
        Trimmed {
            segments: 1,
            bytes: 20 * MIB
        }
    );
    drop((x, y, graphs));
    rig.finish();
}

fn configurations_that_contradict_themselves<D: Device>(rig: Rig<D>) {
    let good = PoolConfig::default;
    let bad = [
        (
            "min_block",
            PoolConfig {
                min_block: 384,
                ..good()
            },
        ),
        (
            "small_segment",
            PoolConfig {
                small_segment: 0,
                ..good()
            },
        ),
        (
            "large_segment",
            PoolConfig {
                large_segment: 1000,
                ..good()
            },
        ),
        (
            "round_large",
            PoolConfig {
                round_large: 1,
                ..good()
            },
        ),
        (
            "small_limit",
            PoolConfig {
                small_limit: 4 * MIB,
                ..good()
            },
        ),
        (
            "large_limit",
            PoolConfig {
                large_limit: 21 * MIB,
                ..good()
            },
        ),
        (
            "max_split",
            PoolConfig {
                max_split: Some(MIB),
                ..good()
            },
        ),
    ];
    let pools = rig.allocator.private_pools();
    for (name, config) in bad {
        let options = PoolOptions {
            config: config.clone(),
            ..PoolOptions::default()
        };
        let refused = rig.allocator.create_pool(options);
        assert!(
            matches!(refused, Err(Error::Pool(PoolError::InvalidConfig { field, .. })) if field == name),
            "{name}"
        );
        assert!(
            matches!(Allocator::with_config(rig.device.clone(), config),
                Err(Error::Pool(PoolError::InvalidConfig { field, .. })) if field == name),
            "{name}"
        );
    }
    assert_eq!(rig.allocator.private_pools(), pools);
    rig.finish();
}

// ---- out of memory: the ladder before it is said -----------------------------------------------

/// A device of so much memory, with everything on it.
fn small_device(bytes: u64) -> Rig<HostDevice> {
    Rig::new(HostDevice::builder().memory(bytes).build().unwrap())
}

#[track_caller]
fn out_of_memory<T>(result: cudagraph_trees::Result<T>, bytes: u64) -> String {
    match result.map(drop) {
        Err(Error::Pool(PoolError::OutOfMemory {
            requested, state, ..
        })) if requested == bytes => state,
        other => panic!("{other:?}"),
    }
}

#[test]
fn pool_17_cached_memory_goes_back_when_a_routed_pool_needs_it() {
    let rig = small_device(80 * MIB);
    drop(rig.allocator.alloc(&rig.stream, 60 * MIB).unwrap());
    assert_eq!(rig.allocator.stats().reserved_bytes.current, 60 * MIB);
    let pool = plain_pool(&rig);
    let route = rig.allocator.route_thread(&pool).unwrap();
    let big = rig.allocator.alloc(&rig.stream, 60 * MIB).unwrap();
    assert_eq!(rig.allocator.stats().reserved_bytes.current, 0);
    assert_eq!(pool.stats().reserved_bytes.current, 60 * MIB);
    drop(route);
    // A living pool's own memory is not given back for anybody.
    drop(big);
    let state = out_of_memory(rig.allocator.alloc(&rig.stream, 30 * MIB), 30 * MIB);
    assert_eq!(
        state,
        "0 B reserved in 0 segments, 0 B live in 0 blocks, largest free block 0 B"
    );
    drop(pool);
    let eager = rig.allocator.alloc(&rig.stream, 30 * MIB).unwrap();
    assert_eq!(rig.allocator.stats().reserved_bytes.current, 30 * MIB);
    drop(eager);
    rig.finish();
}

#[test]
fn out_of_memory_waits_for_work_before_it_gives_memory_back() {
    let rig = small_device(64 * MIB);
    let x = rig.floats(&[1.0; 256]);
    let y = rig.allocator.alloc(&rig.stream, 40 * MIB).unwrap();
    let part = y.view(0, 1024).unwrap();
    rig.scale_into(&rig.stream, &part, &x, 3.0, 0.0);
    drop((y, part)); // the kernel that writes it has not run yet
    let z = rig.allocator.alloc(&rig.stream, 50 * MIB).unwrap();
    assert_eq!(rig.device.counts().kernels_run, 1);
    rig.device.synchronize(&rig.stream).unwrap();
    drop((x, z));
    rig.finish();
}

#[test]
fn out_of_memory_inside_a_capture_leaves_it_whole() {
    let rig = small_device(64 * MIB);
    let x = rig.floats(&[1.0; 256]);
    drop(rig.allocator.alloc(&rig.stream, 40 * MIB).unwrap());
    let cached = rig.allocator.stats();
    let beside = rig.device.create_stream().unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 2.0, 0.0);
    // The cached memory would do, but the capture may have addresses of what is free.
    for _ in 0..2 {
        for said in [
            out_of_memory(capture.alloc(50 * MIB), 50 * MIB),
            out_of_memory(rig.allocator.alloc(&beside, 50 * MIB), 50 * MIB),
        ] {
            assert!(said.contains("a capture is underway"), "{said}");
        }
    }
    assert_eq!(rig.allocator.stats().reserved_bytes, cached.reserved_bytes);
    let z = rig.captured(&capture, &y, 1.0, 1.0);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&z), [3.0; 256]);
    assert_eq!(graph.pool().unwrap().stats().live_blocks.current, 2);
    // Outside, the same request is served.
    let big = rig.allocator.alloc(&rig.stream, 50 * MIB).unwrap();
    assert_eq!(rig.allocator.stats().live_bytes.current, 50 * MIB + 1024);
    drop((x, y, z, big, graph));
    rig.finish();
}

#[test]
fn out_of_memory_by_a_pools_own_limit() {
    let rig = small_device(256 * MIB);
    let pool = rig
        .allocator
        .create_pool(PoolOptions {
            config: PoolConfig {
                limit: Some(20 * MIB),
                ..PoolConfig::default()
            },
            ..PoolOptions::default()
        })
        .unwrap();
    let a = pool.alloc(&rig.stream, 4 * MIB).unwrap();
    let before = pool.snapshot();
    let state = out_of_memory(pool.alloc(&rig.stream, 20 * MIB), 20 * MIB);
    assert_eq!(
        state,
        "20971520 B reserved in 1 segments, 4194304 B live in 1 blocks, largest free block 16777216 B"
    );
    assert_eq!(pool.snapshot(), before);
    let b = pool.alloc(&rig.stream, 16 * MIB).unwrap();
    assert_eq!(layout(&pool.snapshot()), "L0@st0[A4194304 A16777216]");
    assert!(matches!(
        pool.alloc(&rig.stream, u64::MAX),
        Err(Error::Pool(PoolError::TooLarge {
            requested: u64::MAX
        }))
    ));
    drop((a, b, pool));
    rig.finish();
}

#[test]
fn a_device_that_gives_no_memory_once() {
    for call in [Call::Reserve, Call::Map] {
        let rig = Rig::new(Faulty::new(HostDevice::new()));
        // The second try of the ladder succeeds.
        rig.device.fail(call, 1, Code::OutOfMemory);
        let a = rig.allocator.alloc(&rig.stream, 512).unwrap();
        assert_eq!(rig.device.calls(call), 2);
        // Twice in a row is out of memory, and says what the device said.
        rig.device
            .fail(call, 1, Code::OutOfMemory)
            .fail(call, 2, Code::OutOfMemory);
        let refused = rig.allocator.alloc(&rig.stream, 4 * MIB);
        let Err(Error::Pool(PoolError::OutOfMemory {
            rounded,
            source: Some(source),
            ..
        })) = refused
        else {
            panic!("{refused:?}");
        };
        assert_eq!(rounded, 4 * MIB);
        assert_eq!(
            source.to_string(),
            format!("{call:?} failed with OutOfMemory (2): made to fail")
        );
        let b = rig.allocator.alloc(&rig.stream, 4 * MIB).unwrap();
        assert_eq!(rig.allocator.stats().segments.current, 2);
        drop((a, b));
        rig.finish();
    }
}
