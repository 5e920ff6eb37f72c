//! Private pools under single graphs: the scenarios of the first graph suites, with their numbers. Names carry the catalogue's ids.
mod common;

use common::{Rig, layout};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Code, Device, FaultReason};
use cudagraph_trees::pool::Trimmed;
use cudagraph_trees::{
    Allocator, Capture, CaptureOptions, Error, Graph, PoolHandle, PoolOptions, Tensor,
};

suite!(
    pool_01_two_successive_graphs,
    pool_02_concurrent_replay_from_separate_pools_is_exact,
    pool_02_concurrent_replay_from_one_pool_is_not_promised,
    pool_03_three_graphs_in_order_and_out_of_order,
    pool_04_statistics_and_the_result_after_the_graph_is_gone,
    pool_07_reset_and_capture_again,
    pool_09_six_graphs_of_one_pool_in_order,
    a_graph_object_without_a_graph,
    tensors_outlive_graph_pool_and_allocator,
    pools_of_another_allocator_are_refused,
);

const MIB: u64 = 1 << 20;

/// Captures with a pool of the graph's own, or into `pool`.
#[track_caller]
fn begin<'g, D: Device>(
    rig: &Rig<D>,
    graph: &'g mut Graph<D>,
    pool: Option<PoolHandle<D>>,
) -> Capture<'g, D> {
    let options = CaptureOptions {
        pool,
        ..CaptureOptions::default()
    };
    graph.capture_with(&rig.stream, options).unwrap()
}

/// (x + val) + (x + val), over two temporaries for each term.
fn with_temporaries<D: Device>(
    rig: &Rig<D>,
    capture: &Capture<'_, D>,
    t: &Tensor<D>,
    val: f32,
) -> Tensor<D> {
    let term = || {
        let copy = rig.captured(capture, t, 1.0, 0.0);
        rig.captured(capture, &copy, 1.0, val)
    };
    let (x, y) = (term(), term());
    let out = capture.alloc(t.bytes()).unwrap();
    rig.kernels
        .add(
            &rig.device,
            capture.stream(),
            out.ptr().unwrap(),
            x.ptr().unwrap(),
            y.ptr().unwrap(),
            t.bytes() / 4,
        )
        .unwrap();
    out
}

/// Five rounds of it, from `first`.
fn five_rounds<D: Device>(
    rig: &Rig<D>,
    capture: &Capture<'_, D>,
    first: Tensor<D>,
    val: f32,
) -> Tensor<D> {
    (0..5).fold(first, |b, _| with_temporaries(rig, capture, &b, val))
}

/// Private pools that hold memory: how many, and their bytes.
fn private<D: Device>(rig: &Rig<D>) -> (usize, u64) {
    let held: Vec<u64> = rig
        .allocator
        .private_pools()
        .iter()
        .map(|(_, _, stats)| stats.reserved_bytes.current)
        .filter(|bytes| *bytes > 0)
        .collect();
    (held.len(), held.iter().sum())
}

fn pool_01_two_successive_graphs<D: Device>(rig: Rig<D>) {
    for shared in [false, true] {
        let a = rig.floats(&[1.0; 1000]);
        let (mut g0, mut g1) = (Graph::new(&rig.allocator), Graph::new(&rig.allocator));

        let capture = begin(&rig, &mut g0, None);
        let copy = rig.captured(&capture, &a, 1.0, 0.0);
        let b = five_rounds(&rig, &capture, copy, 1.0);
        capture.end().unwrap();

        let pool = shared.then(|| g0.pool().unwrap());
        let capture = begin(&rig, &mut g1, pool);
        // The first graph's result dies inside the second's capture, as in `b = f(b)`.
        let b = five_rounds(&rig, &capture, b, 1.0);
        capture.end().unwrap();

        for (value, result) in [(1.0, 3070.0), (2.0, 4094.0)] {
            rig.put(&a, &[value; 1000]);
            g0.replay(&rig.stream).unwrap();
            g1.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&b), [result; 1000], "shared: {shared}");
        }
        let pools = if shared { 1 } else { 2 };
        assert_eq!(private(&rig), (pools as usize, pools * 2 * MIB));
        // Four blocks of 4,096 B at a time: the argument, two terms, and the sum or a temporary.
        let stats = g1.pool().unwrap().stats();
        assert_eq!(stats.live_blocks.current, 1);
        assert_eq!(stats.live_bytes.peak, 4 * 4096);
        assert_eq!(
            (stats.segments.allocated, stats.segments.freed),
            (1, 0),
            "replays allocate nothing"
        );
        // 26 allocations in the first graph, 25 in the second.
        assert_eq!(
            stats.live_blocks.allocated,
            if shared { 26 + 25 } else { 25 }
        );
        drop((a, b, g0, g1));
        rig.allocator.trim().unwrap();
        assert_eq!(private(&rig), (0, 0));
    }
    rig.finish();
}

/// Two graphs over the same input, captured on one stream; their results.
struct Pair<D: Device> {
    _input: Tensor<D>,
    graphs: [Graph<D>; 2],
    results: [Tensor<D>; 2],
}

/// Enough for several pieces of work to overlap, few enough for exact sums.
const SIZE: usize = 10_000;

impl<D: Device> Pair<D> {
    fn capture(rig: &Rig<D>, shared: bool) -> Pair<D> {
        let a = rig.floats(&[1.0; SIZE]);
        let (mut g0, mut g1) = (Graph::new(&rig.allocator), Graph::new(&rig.allocator));
        let capture = begin(rig, &mut g0, None);
        let copy = rig.captured(&capture, &a, 1.0, 0.0);
        let b = five_rounds(rig, &capture, copy, 1.0);
        capture.end().unwrap();
        let pool = shared.then(|| g0.pool().unwrap());
        let capture = begin(rig, &mut g1, pool);
        let copy = rig.captured(&capture, &a, 1.0, 0.0);
        let c = five_rounds(rig, &capture, copy, 2.0);
        capture.end().unwrap();
        Pair {
            _input: a,
            graphs: [g0, g1],
            results: [b, c],
        }
    }

    /// Replays both at once, on two streams that wait for the input only. The two sums over the size, or what went wrong.
    fn replay(&self, rig: &Rig<D>, streams: &[D::Stream; 2]) -> Result<[f64; 2], Error> {
        rig.device.synchronize(&rig.stream)?;
        for (graph, stream) in self.graphs.iter().zip(streams) {
            graph.replay(stream)?;
        }
        for stream in streams {
            rig.device.synchronize(stream)?;
        }
        let sum = |t: &Tensor<D>| -> Result<f64, Error> {
            let sum: f64 = rig.try_read(t)?.iter().map(|v| f64::from(*v)).sum();
            Ok(sum / SIZE as f64)
        };
        Ok([sum(&self.results[0])?, sum(&self.results[1])?])
    }
}

fn pool_02_concurrent_replay_from_separate_pools_is_exact<D: Device>(rig: Rig<D>) {
    let pair = Pair::capture(&rig, false);
    let streams = [(); 2].map(|()| rig.device.create_stream().unwrap());
    for _ in 0..3 {
        assert_eq!(pair.replay(&rig, &streams).unwrap(), [94.0, 156.0]);
    }
    assert_eq!(private(&rig), (2, 4 * MIB));
    drop(pair);
    rig.finish();
}

/// Whether a concurrent replay of two graphs of one pool gave something else than two exact results. A device with memory
/// checks may say so; nothing else may go wrong.
fn corrupted(outcome: Result<[f64; 2], Error>) -> bool {
    match outcome {
        Ok(sums) => sums != [94.0, 156.0],
        Err(Error::Device(error)) => {
            assert_eq!(error.code, Code::IllegalAddress);
            assert_eq!(error.fault.unwrap().reason, FaultReason::NotLive);
            true
        }
        Err(other) => panic!("{other}"),
    }
}

fn pool_02_concurrent_replay_from_one_pool_is_not_promised<D: Device>(rig: Rig<D>) {
    let pair = Pair::capture(&rig, true);
    assert_eq!(private(&rig), (1, 2 * MIB));
    // One after the other they are exact: both results are held, so nothing of theirs is reused.
    for stream in [&rig.stream, &rig.stream] {
        let one = [stream.clone(), stream.clone()];
        assert_eq!(pair.replay(&rig, &one).unwrap(), [94.0, 156.0]);
    }
    let streams = [(); 2].map(|()| rig.device.create_stream().unwrap());
    corrupted(pair.replay(&rig, &streams));
    // A device that found the corruption has stopped, so this scenario does not end in the leak oracle.
}

/// The simulated device runs two streams in an order drawn from its seed: the corruption that the shared pool allows must show.
#[test]
fn pool_02_concurrent_replay_from_one_pool_corrupts_under_most_schedules() {
    let mut bad = 0;
    for seed in 0..16 {
        let rig = Rig::new(HostDevice::builder().seed(seed).build().unwrap());
        let pair = Pair::capture(&rig, true);
        let streams = [(); 2].map(|()| rig.device.create_stream().unwrap());
        bad += usize::from(corrupted(pair.replay(&rig, &streams)));
    }
    assert!(bad >= 12, "only {bad} of 16 schedules showed it");
}

fn pool_03_three_graphs_in_order_and_out_of_order<D: Device>(rig: Rig<D>) {
    for shared in [false, true] {
        let a = rig.floats(&[1.0; 1000]);
        let mut graphs = [(); 3].map(|()| Graph::new(&rig.allocator));
        let [g0, g1, g2] = &mut graphs;

        let capture = begin(&rig, g0, None);
        let b = rig.captured(&capture, &a, 1.0, 0.0);
        let c = rig.captured(&capture, &b, 1.0, 1.0);
        let d = rig.captured(&capture, &b, 1.0, 2.0);
        capture.end().unwrap();
        let place_of_c = c.ptr().unwrap();

        let pool = || shared.then(|| g0.pool().unwrap());
        let capture = begin(&rig, g1, pool());
        let e = rig.captured(&capture, &c, 1.0, 3.0);
        drop(c);
        capture.end().unwrap();

        let capture = begin(&rig, g2, pool());
        let f = rig.captured(&capture, &d, 1.0, 4.0);
        capture.end().unwrap();

        if shared {
            assert_eq!(f.ptr().unwrap(), place_of_c, "f lies where c lay");
            assert_eq!(
                layout(&graphs[0].pool().unwrap().snapshot()),
                "S0@st0[A4096 A4096 A4096 A4096 F2080768]"
            );
        } else {
            assert_ne!(f.ptr().unwrap(), place_of_c);
        }
        for (order, expected_e) in [
            ([0, 1, 2], 5.0),
            ([0, 2, 1], if shared { 10.0 } else { 5.0 }),
        ] {
            for graph in order {
                graphs[graph].replay(&rig.stream).unwrap();
            }
            let sum = |t| rig.read(t).iter().sum::<f32>();
            assert_eq!(
                (sum(&e), sum(&f)),
                (1000.0 * expected_e, 7000.0),
                "shared: {shared}, order {order:?}"
            );
        }
        drop((a, b, d, e, f, graphs));
        rig.allocator.trim().unwrap();
    }
    rig.finish();
}

fn pool_04_statistics_and_the_result_after_the_graph_is_gone<D: Device>(rig: Rig<D>) {
    // size; segments, reserved and live bytes after the capture; reserved after the graph is gone; the layout.
    let cases = [
        (
            512,
            (1, 2_097_152, 512),
            2_097_152,
            "S0@st0[F1024 A512 F2095616]",
        ),
        (
            MIB,
            (2, 4_194_304, 1_048_576),
            2_097_152,
            "S0@st0[F2097152]; S1@st0[A1048576 F1048576]",
        ),
        (
            MIB + 512,
            (1, 20_971_520, 1_049_088),
            20_971_520,
            "L0@st0[F2098176 A1049088 F17824256]",
        ),
        (
            10 * MIB - 512,
            (2, 41_943_040, 10_485_248),
            20_971_520,
            "L0@st0[F20971520]; L1@st0[A10485248 F10486272]",
        ),
        (
            10 * MIB + 512,
            (3, 37_748_736, 10_486_272),
            12_582_912,
            "L0@st0[F12582912]; L1@st0[F12582912]; L2@st0[A10486272 F2096640]",
        ),
    ];
    for (bytes, (segments, reserved, live), reserved_after, blocks) in cases {
        let a = rig.allocator.alloc(&rig.stream, bytes).unwrap();
        // The blocks have the sizes of the scenario; the kernels work on both ends of them.
        let ends = |t: &Tensor<D>| [0, bytes - 256].map(|at| t.view(at, 256).unwrap());
        for end in ends(&a) {
            rig.put(&end, &[1.0; 64]);
        }
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&rig.stream).unwrap();
        let plus = |x: &Tensor<D>, add: f32| {
            let out = capture.alloc(bytes).unwrap();
            for (out, x) in ends(&out).iter().zip(&ends(x)) {
                rig.scale_into(capture.stream(), out, x, 1.0, add);
            }
            out
        };
        let mut b = plus(&a, 0.0);
        for _ in 0..5 {
            let c = plus(&b, 0.0);
            b = plus(&c, 1.0);
        }
        capture.end().unwrap();

        let pool = graph.pool().unwrap();
        let figures = || {
            let stats = pool.stats();
            assert_eq!(stats.live_blocks.current, 1);
            (
                stats.segments.current,
                stats.reserved_bytes.current,
                stats.live_bytes.current,
            )
        };
        let check = || {
            assert_eq!(figures(), (segments, reserved, live), "{bytes} B");
            assert_eq!(layout(&pool.snapshot()), blocks, "{bytes} B");
        };
        check();
        assert_eq!(rig.allocator.trim().unwrap(), Trimmed::default());
        check();
        for _ in 0..2 {
            graph.replay(&rig.stream).unwrap();
            for end in ends(&b) {
                assert_eq!(rig.read(&end), [6.0; 64]);
            }
        }
        check();

        let id = pool.id();
        drop(pool);
        graph.reset();
        assert_eq!(
            rig.allocator.trim().unwrap(),
            Trimmed {
                segments: segments - 1,
                bytes: reserved - reserved_after
            },
            "{bytes} B"
        );
        let left = || {
            rig.allocator
                .private_pools()
                .into_iter()
                .find(|p| p.0 == id)
        };
        let (_, uses, stats) = left().unwrap();
        assert_eq!(
            (
                uses,
                stats.segments.current,
                stats.reserved_bytes.current,
                stats.live_blocks.current,
                stats.live_bytes.current
            ),
            (0, 1, reserved_after, 1, live)
        );
        for end in ends(&b) {
            assert_eq!(rig.read(&end), [6.0; 64], "readable without its graph");
        }
        drop(b);
        assert_eq!(rig.allocator.trim().unwrap().bytes, reserved_after);
        assert_eq!(left(), None);
        drop(a);
        rig.allocator.trim().unwrap();
    }
    rig.finish();
}

fn pool_07_reset_and_capture_again<D: Device>(rig: Rig<D>) {
    let a = rig.floats(&[1.0; 1000]);
    let mut graph = Graph::new(&rig.allocator);
    for (step, sum) in [(1.0, 11_000.0), (2.0, 22_000.0)] {
        let capture = graph.capture(&rig.stream).unwrap();
        let mut b = rig.captured(&capture, &a, step, 0.0);
        for _ in 0..10 {
            b = rig.captured(&capture, &b, 1.0, step);
        }
        capture.end().unwrap();
        assert_eq!(graph.info().unwrap().kernels, 11);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&b).iter().sum::<f32>(), sum);
        assert!(matches!(
            graph.capture(&rig.stream),
            Err(Error::AlreadyCaptured)
        ));
        graph.replay(&rig.stream).unwrap(); // the refusal left it as it was
        graph.reset();
        graph.reset();
        drop(b);
    }
    drop((a, graph));
    rig.finish();
}

/// Three models of one layer y = x * w + b, each with a forward and a backward graph, all six in one pool and replayed in the order
/// of their capture. Upstream captures whole models; here a layer's gradients are its own graph: dw = dy * x, dx = dy * w.
fn pool_09_six_graphs_of_one_pool_in_order<D: Device>(rig: Rig<D>) {
    const N: usize = 64;
    let pool = rig.allocator.create_pool(PoolOptions::default()).unwrap();
    let x = rig.floats(&[0.0; N]);
    let dy = rig.floats(&[0.0; N]);
    let weights = [2.0_f32, 3.0, 5.0];
    let w: Vec<Tensor<D>> = weights.iter().map(|w| rig.floats(&[*w; N])).collect();

    let product = |capture: &Capture<'_, D>, a: &Tensor<D>, b: &Tensor<D>| {
        let out = capture.alloc(a.bytes()).unwrap();
        let [o, a, b] = [&out, a, b].map(|t| t.ptr().unwrap());
        rig.kernels
            .mul(&rig.device, capture.stream(), o, a, b, N as u64)
            .unwrap();
        out
    };
    let mut graphs = Vec::new();
    let mut capture_one = |body: &mut dyn FnMut(&Capture<'_, D>) -> Vec<Tensor<D>>| {
        let mut graph = Graph::new(&rig.allocator);
        let capture = begin(&rig, &mut graph, Some(pool.clone()));
        let out = body(&capture);
        capture.end().unwrap();
        graphs.push(graph);
        out
    };
    let mut activations = vec![x.clone()];
    for w in &w {
        let y = capture_one(&mut |capture| {
            let scaled = product(capture, activations.last().unwrap(), w);
            vec![rig.captured(capture, &scaled, 1.0, 1.0)]
        });
        activations.extend(y);
    }
    let mut upstream = dy.clone();
    let mut gradients = Vec::new();
    for (w, input) in w.iter().zip(&activations).rev() {
        let mut out = capture_one(&mut |capture| {
            let dw = product(capture, &upstream, input);
            vec![product(capture, &upstream, w), dw]
        });
        gradients.push(out.pop().unwrap());
        upstream = out.pop().unwrap();
    }
    assert_eq!(pool.uses(), 1 + 6);
    // The three outputs, three dw and the last dx are held: seven blocks of 512 B, none of them shared.
    let mut held: Vec<u64> = activations[1..]
        .iter()
        .chain(&gradients)
        .chain([&upstream])
        .map(|t| t.ptr().unwrap().0)
        .collect();
    held.sort_unstable();
    held.dedup();
    assert_eq!(held.len(), 7);
    assert!(pool.check_live(&held).is_exact());

    for round in 1..4 {
        let (x0, d0) = (round as f32, 0.5 * round as f32);
        rig.put(&x, &[x0; N]);
        rig.put(&dy, &[d0; N]);
        for graph in &graphs {
            graph.replay(&rig.stream).unwrap();
        }
        let y1 = x0 * 2.0 + 1.0;
        let y2 = y1 * 3.0 + 1.0;
        let y3 = y2 * 5.0 + 1.0;
        for (tensor, value) in activations[1..].iter().zip([y1, y2, y3]) {
            assert_eq!(rig.read(tensor), [value; N]);
        }
        for (tensor, value) in gradients
            .iter()
            .zip([d0 * y2, d0 * 5.0 * y1, d0 * 15.0 * x0])
        {
            assert_eq!(rig.read(tensor), [value; N]);
        }
        assert_eq!(rig.read(&upstream), [d0 * 30.0; N]);
    }
    assert_eq!(pool.stats().reserved_bytes.current, 2 * MIB);
    drop((x, dy, w, activations, upstream, gradients, graphs, pool));
    rig.finish();
}

fn a_graph_object_without_a_graph<D: Device>(rig: Rig<D>) {
    let mut graph = Graph::new(&rig.allocator);
    let refused = |graph: &Graph<D>| {
        assert!(matches!(graph.replay(&rig.stream), Err(Error::NotCaptured)));
        assert!(matches!(graph.pool(), Err(Error::NotCaptured)));
        assert!(matches!(graph.info(), Err(Error::NotCaptured)));
        assert_eq!(format!("{graph:?}"), "Graph(not captured)");
    };
    refused(&graph);
    graph.reset();
    refused(&graph);
    let x = rig.floats(&[1.0; 8]);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 3.0, 0.0);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [3.0; 8]);
    graph.reset();
    graph.reset();
    refused(&graph);
    assert_eq!(rig.read(&y), [3.0; 8]);
    // The capture that comes next gets a pool of its own, not the one that y keeps.
    let old = rig.allocator.private_pools().last().unwrap().0;
    let capture = graph.capture(&rig.stream).unwrap();
    capture.end().unwrap();
    assert!(graph.pool().unwrap().id() > old);
    assert_eq!(graph.info().unwrap().nodes(), 0);
    graph.replay(&rig.stream).unwrap(); // an empty graph does nothing
    rig.device.synchronize(&rig.stream).unwrap();
    drop((x, y, graph));
    rig.finish();
}

fn tensors_outlive_graph_pool_and_allocator<D: Device>(rig: Rig<D>) {
    let free = || rig.device.memory_info().unwrap().free;
    let baseline = free();
    let allocator = Allocator::new(rig.device.clone()).unwrap();
    let x = allocator.alloc(&rig.stream, 64).unwrap();
    rig.put(&x, &[4.0; 16]);
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let mut graph = Graph::new(&allocator);
    let capture = begin(&rig, &mut graph, Some(pool.clone()));
    let y = rig.captured(&capture, &x, 2.0, 1.0);
    let view = y.view(8, 16).unwrap();
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();

    drop(graph);
    assert_eq!(rig.read(&y), [9.0; 16]);
    drop(pool);
    assert_eq!(rig.read(&y), [9.0; 16]);
    allocator.trim().unwrap();
    drop(allocator);
    assert_eq!(rig.read(&y), [9.0; 16]);
    assert_eq!(rig.read(&x), [4.0; 16]);
    drop((x, y));
    assert_eq!(rig.read(&view), [9.0; 4], "a view alone keeps it");
    assert_eq!(baseline - free(), 4 * MIB, "a segment of each pool");
    drop(view);
    rig.device.synchronize(&rig.stream).unwrap();
    assert_eq!(
        free(),
        baseline,
        "with the last tensor all memory went back"
    );
    rig.finish();
}

fn pools_of_another_allocator_are_refused<D: Device>(rig: Rig<D>) {
    let other = Allocator::new(rig.device.clone()).unwrap();
    let foreign = other.create_pool(PoolOptions::default()).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let options = CaptureOptions {
        pool: Some(foreign.clone()),
        ..CaptureOptions::default()
    };
    assert!(matches!(
        graph.capture_with(&rig.stream, options),
        Err(Error::ForeignPool)
    ));
    assert!(matches!(
        rig.allocator.route_thread(&foreign),
        Err(Error::ForeignPool)
    ));
    assert!(matches!(
        rig.allocator.route_stream(&rig.stream, &foreign),
        Err(Error::ForeignPool)
    ));
    assert_eq!(foreign.uses(), 1, "no refusal kept a use");
    let x = rig.floats(&[1.0; 4]);
    assert_eq!(rig.allocator.stats().live_blocks.current, 1);
    assert_eq!(foreign.stats().live_blocks.current, 0);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 2.0, 0.0);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [2.0; 4]);
    drop((x, y, graph, foreign, other));
    rig.finish();
}
