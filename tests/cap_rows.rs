//! What PyTorch's tests ask of captures (CAP-*, STREAM-02), restated for this API.
//!
//! * CAP-09 and CAP-10 ask for a graph that is kept before it is instantiated (`keep_graph`). A [`Graph`] has no such choice: it instantiates at the
//!   end of its capture and drops the template, or keeps it for pictures alone (CAP-12: `cap_dumps`). Whoever wants the steps apart takes them from the device, which gives a template and makes any number
//!   of executables of it; a graph that is not there is `NotCaptured`, and there is no way to hold an executable before it was made.
//! * CAP-13 asks for hooks at the end of a capture and after each instantiation. There are none: the end of a capture is the caller's own
//!   call, and the caller's next line is the hook; with the device's steps, there is a line between the two. What remains of the row is
//!   that each happens as often as asked for, and in this order.

mod common;

use std::collections::HashSet;

use common::{Rig, wrapped};
use cudagraph_trees::device::{Call, CaptureMode, CaptureStatus, Code, Device, DeviceError};
use cudagraph_trees::{CaptureOptions, Error, FunctionSpec, Graph, Phase, Tensor, lend};

const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

suite!(
    cap_01_a_stream_says_whether_it_captures,
    cap_02_ten_sums_replayed,
    cap_03_the_default_stream_cannot_capture,
    cap_07_memory_is_had_on_another_thread,
    cap_08_the_host_cannot_wait_inside,
    cap_08_a_function_that_waits_is_answered_eagerly,
    cap_09_there_is_no_graph_before_it_is_captured,
    cap_10_an_executable_is_made_of_a_template,
    cap_11_instantiated_twice_reset_and_captured_again,
    stream_02_one_stream_has_the_trees_memory,
);

fn device_error(error: Error) -> DeviceError {
    match error {
        Error::Device(error) => error,
        other => panic!("{other}"),
    }
}

fn cap_01_a_stream_says_whether_it_captures<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let other = d.create_stream().unwrap();
    let status = |stream: &D::Stream| d.capture_status(stream).unwrap();
    for mode in MODES {
        assert_eq!(status(&rig.stream), CaptureStatus::None);
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions { pool: None, mode };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        assert_eq!(status(&rig.stream), CaptureStatus::Active);
        assert_eq!(status(&other), CaptureStatus::None);
        assert_eq!(status(&d.default_stream()), CaptureStatus::None);
        // A thread that did not begin it sees the same.
        std::thread::scope(|scope| {
            let seen = scope.spawn(|| d.capture_status(&rig.stream)).join();
            assert_eq!(seen.unwrap(), Ok(CaptureStatus::Active));
        });
        capture.end().unwrap();
        assert_eq!(status(&rig.stream), CaptureStatus::None);
        // Two at once, and one of them broken.
        let (mut a, mut b) = (Graph::new(&rig.allocator), Graph::new(&rig.allocator));
        let options = || CaptureOptions {
            pool: None,
            mode: CaptureMode::Relaxed,
        };
        let first = a.capture_with(&rig.stream, options()).unwrap();
        let second = b.capture_with(&other, options()).unwrap();
        d.synchronize(&other).unwrap_err();
        assert_eq!(status(&rig.stream), CaptureStatus::Active);
        assert_eq!(status(&other), CaptureStatus::Invalidated);
        second.end().unwrap_err();
        assert_eq!(status(&other), CaptureStatus::None);
        assert_eq!(status(&rig.stream), CaptureStatus::Active);
        drop(first);
        assert_eq!(status(&rig.stream), CaptureStatus::None);
    }
    rig.finish();
}

fn cap_02_ten_sums_replayed<D: Device>(rig: Rig<D>) {
    let a = rig.floats(&[1.0; 1000]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let mut b = a.clone();
    for _ in 0..10 {
        b = rig.captured(&capture, &b, 1.0, 1.0);
    }
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&b).iter().sum::<f32>(), 11_000.0);
    drop((a, b, graph));
    rig.finish();
}

fn cap_03_the_default_stream_cannot_capture<D: Device>(rig: Rig<D>) {
    let default = rig.device.default_stream();
    for mode in MODES {
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions { pool: None, mode };
        let error = device_error(graph.capture_with(&default, options).map(drop).unwrap_err());
        assert_eq!(
            (error.call, error.code),
            (Call::BeginCapture, Code::StreamCaptureUnsupported)
        );
        assert!(error.detail.contains("stream"), "{error}");
        // Nothing is left: it captures elsewhere, and what is allocated for the default stream is the default pool's.
        assert_eq!(rig.allocator.private_pools().len(), 1, "the tree's");
        graph.capture(&rig.stream).unwrap().end().unwrap();
    }
    let x = rig.allocator.alloc(&default, 4).unwrap();
    assert_eq!(rig.allocator.stats().live_blocks.current, 1);
    drop(x);
    rig.finish();
}

fn cap_07_memory_is_had_on_another_thread<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[2.0; 4]);
    let d = &rig.device;
    let outside = d.create_event().unwrap();
    d.record(&outside, &rig.stream).unwrap();
    for mode in MODES {
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions { pool: None, mode };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        // Taking memory from the device and giving it back is no "unsafe call": it is harmless in all modes.
        std::thread::scope(|scope| {
            let memory = || {
                let bytes = d.granularity();
                let ptr = d.reserve(2 * bytes)?;
                d.map(ptr, bytes)?;
                d.map(ptr.offset(bytes), bytes)?;
                d.unmap(ptr, bytes)?;
                d.unmap(ptr.offset(bytes), bytes)?;
                d.release(ptr, 2 * bytes)
            };
            scope.spawn(memory).join().unwrap().unwrap();
            memory().unwrap();
        });
        let y = rig.captured(&capture, &x, 3.0, 0.0);
        capture.end().unwrap();
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [6.0; 4]);
    }
    // What is unsafe breaks a capture of another thread's in the global mode alone.
    for mode in MODES {
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions { pool: None, mode };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        let asked =
            std::thread::scope(|scope| scope.spawn(|| d.query_event(&outside)).join().unwrap());
        let ended = capture.end();
        if mode == CaptureMode::Global {
            assert_eq!(asked.unwrap_err().code, Code::StreamCaptureUnsupported);
            let error = device_error(ended.unwrap_err());
            assert_eq!(error.code, Code::StreamCaptureInvalidated);
        } else {
            asked.unwrap();
            ended.unwrap();
        }
    }
    drop((x, outside));
    rig.finish();
}

fn cap_08_the_host_cannot_wait_inside<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[2.0; 4]);
    let d = &rig.device;
    for mode in MODES {
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions { pool: None, mode };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        // A value that is read is refused before the driver is asked, and the capture goes on.
        let read = device_error(x.read(d, &rig.stream).unwrap_err());
        assert_eq!(
            (read.call, read.code),
            (Call::Read, Code::StreamCaptureUnsupported)
        );
        assert!(read.detail.contains("captures"), "{read}");
        assert!(read.is_capture());
        assert_eq!(d.capture_status(&rig.stream), Ok(CaptureStatus::Active));
        // Waiting for the stream is the driver's to refuse, and breaks it.
        let wait = d.synchronize(&rig.stream).unwrap_err();
        assert_eq!(wait.code, Code::StreamCaptureUnsupported);
        assert_eq!(
            d.capture_status(&rig.stream),
            Ok(CaptureStatus::Invalidated)
        );
        let ended = device_error(capture.end().unwrap_err());
        assert_eq!(ended.code, Code::StreamCaptureInvalidated);
        assert_eq!(rig.read(&x), [2.0; 4]);
    }
    drop(x);
    rig.finish();
}

fn cap_08_a_function_that_waits_is_answered_eagerly<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        // The way a shape depends on a value.
        let first = x.view(0, 4)?.read(rec.device(), rec.stream())?;
        let first = f32::from_le_bytes([first[0], first[1], first[2], first[3]]);
        Ok(vec![k.apply(rec, &x, first, 0.0)?])
    });
    for (value, want) in [
        (2.0, Phase::Warmup),
        (3.0, Phase::Eager),
        (4.0, Phase::Eager),
    ] {
        let x = rig.floats(&[value; 4]);
        let step = rig.trees.step();
        let (phase, y) = rig.phased(&f, &step, &x);
        assert_eq!(phase, want);
        assert_eq!(rig.read(&y), [value * value; 4]);
    }
    let why = rig.trees.last_failure().unwrap();
    assert!(why.contains("captures"), "{why}");
    rig.finish();
}

fn cap_09_there_is_no_graph_before_it_is_captured<D: Device>(rig: Rig<D>) {
    let mut graph = Graph::new(&rig.allocator);
    let nothing = |graph: &Graph<D>| {
        assert!(matches!(graph.replay(&rig.stream), Err(Error::NotCaptured)));
        assert!(matches!(graph.info(), Err(Error::NotCaptured)));
        assert!(matches!(graph.pool().map(drop), Err(Error::NotCaptured)));
    };
    nothing(&graph);
    let capture = graph.capture(&rig.stream).unwrap();
    let x = capture.alloc(16).unwrap();
    capture.end().unwrap();
    graph.info().unwrap();
    let again = graph.capture(&rig.stream).map(drop).unwrap_err();
    assert!(again.to_string().contains("reset()"), "{again}");
    graph.reset();
    nothing(&graph);
    drop((x, graph));
    rig.finish();
}

/// `x += by` on the stream, as a template.
fn increment<D: Device>(rig: &Rig<D>, x: &Tensor<D>, by: f32) -> D::Graph {
    let (d, stream) = (&rig.device, &rig.stream);
    d.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
    let count = x.bytes() / 4;
    rig.kernels
        .increment(d, stream, x.ptr().unwrap(), count, by)
        .unwrap();
    d.end_capture(stream).unwrap()
}

fn cap_10_an_executable_is_made_of_a_template<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[0.0; 4]);
    let d = &rig.device;
    let template = increment(&rig, &x, 1.0);
    let info = d.graph_info(&template).unwrap();
    assert_eq!((info.nodes(), info.kernels), (1, 1));
    // Several of one template, which outlive it, and are launched alike.
    let execs: Vec<_> = (0..3).map(|_| d.instantiate(&template).unwrap()).collect();
    assert_eq!(
        rig.read(&x),
        [0.0; 4],
        "neither capture nor instantiation runs"
    );
    drop(template);
    for exec in &execs {
        d.launch_graph(exec, &rig.stream, &[]).unwrap();
    }
    assert_eq!(rig.read(&x), [3.0; 4]);
    drop((execs, x));
    rig.finish();
}

fn cap_11_instantiated_twice_reset_and_captured_again<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    for by in [1.0, 2.0] {
        let x = rig.floats(&[0.0; 4]);
        let template = increment(&rig, &x, by);
        let launch = |exec: &D::Exec| d.launch_graph(exec, &rig.stream, &[]).unwrap();
        let exec = d.instantiate(&template).unwrap();
        launch(&exec);
        assert_eq!(rig.read(&x), [by; 4]);
        let exec = d.instantiate(&template).unwrap();
        launch(&exec);
        assert_eq!(rig.read(&x), [2.0 * by; 4]);
        launch(&exec);
        assert_eq!(rig.read(&x), [3.0 * by; 4]);
    }
    // The same of the object that keeps its memory.
    let mut graph = Graph::new(&rig.allocator);
    for by in [1.0, 2.0] {
        graph.reset();
        let x = rig.floats(&[0.0; 4]);
        let capture = graph.capture(&rig.stream).unwrap();
        let (ptr, stream) = (x.ptr().unwrap(), capture.stream());
        rig.kernels.increment(d, stream, ptr, 4, by).unwrap();
        capture.end().unwrap();
        for times in 1..=3 {
            graph.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&x), [by * times as f32; 4]);
        }
    }
    drop(graph);
    rig.finish();
}

/// CAP-13, restated: one end and one instantiation for each graph, in this order, whether of an object or of a tree.
#[test]
fn cap_13_each_step_happens_once() {
    let rig = Rig::new(wrapped());
    let x = rig.floats(&[1.0; 4]);
    let counts = || {
        [
            Call::BeginCapture,
            Call::EndCapture,
            Call::Instantiate,
            Call::LaunchGraph,
        ]
        .map(|call| rig.device.calls(call))
    };
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 1.0, 0.0);
    assert_eq!(counts(), [1, 0, 0, 0]);
    capture.end().unwrap();
    assert_eq!(counts(), [1, 1, 1, 0]);
    graph.replay(&rig.stream).unwrap();
    assert_eq!(counts(), [1, 1, 1, 1]);
    // An instantiation that fails comes after the end, and none follows it.
    graph.reset();
    rig.device.fail(Call::Instantiate, 1, Code::OutOfMemory);
    graph.capture(&rig.stream).unwrap().end().unwrap_err();
    assert_eq!(counts(), [2, 2, 2, 1]);
    let f = rig.scale_add("f", 2.0, 0.0);
    for launches in [1, 2, 3] {
        let step = rig.trees.step();
        drop(rig.one(&f, &step, &x));
        let recorded = u64::from(launches > 1);
        assert_eq!(
            counts(),
            [2 + recorded, 2 + recorded, 2 + recorded, launches]
        );
    }
    drop((graph, x, y, f));
    rig.finish();
}

fn stream_02_one_stream_has_the_trees_memory<D: Device>(rig: Rig<D>) {
    // Forward keeps what backward takes.
    let forward = rig.register(FunctionSpec::new("forward"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let square = k.product(rec, &x, &x)?;
        let out = k.apply(rec, &square, 3.0, 1.0)?;
        Ok(vec![out, square])
    });
    let backward = rig.register(FunctionSpec::new("backward"), |k, rec, mut inputs| {
        let (grad, saved) = (inputs.take(0)?, inputs.take(1)?);
        let scaled = k.apply(rec, &grad, 3.0, 0.0)?;
        drop(grad);
        Ok(vec![k.product(rec, &scaled, &saved)?])
    });
    let streams = [rig.stream.clone(), rig.device.create_stream().unwrap()];
    let x = rig.floats(&[2.0; 1000]);
    rig.device.synchronize(&rig.stream).unwrap();
    for round in 0..4 {
        // Whatever streams the caller uses.
        let stream = &streams[round % 2];
        let step = rig.trees.step();
        let mut out = rig
            .trees
            .run(&forward, &step, &[], stream, &mut [lend(&x)])
            .unwrap()
            .into_iter();
        let (y, saved) = (out.next().unwrap(), out.next().unwrap());
        let args = &mut [cudagraph_trees::give(y), cudagraph_trees::give(saved)];
        let grad = rig.trees.run(&backward, &step, &[], stream, args).unwrap();
        let bytes = grad[0].read(&rig.device, stream).unwrap();
        assert_eq!(bytes, [156.0f32; 1000].map(f32::to_le_bytes).concat());
    }
    assert!(rig.trees.counts().recordings >= 1);
    let segments = rig.trees.pool_snapshot().segments;
    let used: HashSet<_> = segments.iter().map(|s| s.stream.0).collect();
    assert_eq!(used.len(), 1, "{segments:?}");
    for stream in &streams {
        let id = rig.device.stream_id(stream);
        assert!(!used.contains(&id), "the tree's own");
    }
    drop((x, streams));
    rig.finish();
}

// ---- user reports ---------------------------------------------------------------------------------

mod reports {
    use super::*;

    suite!(
        t6_01_a_piece_between_eager_operations,
        t6_02_weights_are_swapped,
        t11_04_more_memory_at_the_recording,
        t11_04_a_graph_of_copies_has_no_memory_nodes,
    );

    fn t6_01_a_piece_between_eager_operations<D: Device>(rig: Rig<D>) {
        let (f, g) = (rig.scale_add("f", 2.0, 0.0), rig.scale_add("g", 1.0, 5.0));
        let mut kept = Vec::new();
        for round in 0..5 {
            let step = rig.trees.step();
            let x = rig.floats(&[round as f32; 8]);
            let y = rig.one(&f, &step, &x);
            // Between the pieces: an eager operation whose output lies elsewhere each time.
            let z = rig.allocator.alloc(&rig.stream, 32).unwrap();
            rig.scale_into(&rig.stream, &z, &y, 10.0, 0.0);
            let out = rig.one(&g, &step, &z);
            assert_eq!(rig.read(&out), [round as f32 * 20.0 + 5.0; 8]);
            kept.push((x, z));
        }
        let counts = rig.trees.counts();
        assert_eq!((counts.recordings, counts.replays), (2, 6));
        drop((kept, f, g));
        rig.finish();
    }

    fn t6_02_weights_are_swapped<D: Device>(rig: Rig<D>) {
        let f = rig.register(
            FunctionSpec::new("f").static_input(1),
            |k, rec, mut inputs| {
                let (x, weight) = (inputs.take(0)?, inputs.take(1)?);
                Ok(vec![k.product(rec, &x, &weight)?])
            },
        );
        let x = rig.floats(&[3.0; 8]);
        let mut weight = rig.floats(&[1.0; 8]);
        let mut phases = Vec::new();
        for round in 1..=12 {
            if round % 4 == 0 {
                // Loaded again, beside the old ones, which then go; and their memory is used for something else.
                let new = rig.floats(&[round as f32; 8]);
                drop(std::mem::replace(&mut weight, new));
                let other = rig.floats(&[-1.0; 8]);
                drop(other);
            }
            let loaded = (round / 4 * 4).max(1) as f32;
            let step = rig.trees.step();
            let out = rig.run(&f, &step, &[&x, &weight]);
            phases.push(out.phase());
            assert_eq!(rig.read(&out[0]), [3.0 * loaded; 8], "round {round}");
        }
        use Phase::{Record, Replay, Warmup};
        assert_eq!(phases[..4], [Warmup, Record, Replay, Record]);
        // The same address again is the same recording.
        assert!(phases[4..].iter().all(|p| matches!(p, Record | Replay)));
        // Written in place, nothing is recorded anew.
        let before = rig.trees.counts().recordings;
        rig.put(&weight, &[0.5; 8]);
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x, &weight]);
        assert_eq!(rig.read(&out[0]), [1.5; 8]);
        assert_eq!(rig.trees.counts().recordings, before);
        drop((out, x, weight, f));
        rig.finish();
    }

    fn t11_04_more_memory_at_the_recording<D: Device>(rig: Rig<D>) {
        let f = rig.register(FunctionSpec::new("f"), |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            let y = k.apply(rec, &x, 2.0, 0.0)?;
            if rec.phase() == Phase::Record {
                // More than the pool has: a segment is mapped inside the capture, and no node comes of it.
                let more = rec.alloc(64 << 20)?;
                let more = more.view(0, x.bytes())?;
                let (device, stream) = (rec.device(), rec.stream());
                device.copy(stream, more.ptr()?, y.ptr()?, x.bytes())?;
                return Ok(vec![k.apply(rec, &more, 1.0, 1.0)?]);
            }
            Ok(vec![k.apply(rec, &y, 1.0, 1.0)?])
        });
        for round in 0..5 {
            let x = rig.floats(&[round as f32; 8]);
            let step = rig.trees.step();
            let y = rig.one(&f, &step, &x);
            assert_eq!(rig.read(&y), [2.0 * round as f32 + 1.0; 8]);
        }
        let counts = rig.trees.counts();
        assert_eq!((counts.replays, counts.failed_captures), (3, 0));
        assert_eq!(rig.trees.view().nodes[0].graph_nodes, 4);
        rig.finish();
    }

    fn t11_04_a_graph_of_copies_has_no_memory_nodes<D: Device>(rig: Rig<D>) {
        let x = rig.floats(&[1.0; 8]);
        let d = &rig.device;
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&rig.stream).unwrap();
        let stream = capture.stream();
        let mut last = x.clone();
        for _ in 0..10 {
            let next = capture.alloc(32).unwrap();
            let (to, from) = (next.ptr().unwrap(), last.ptr().unwrap());
            d.copy(stream, to, from, 32).unwrap();
            d.fill(stream, to, 0, 4).unwrap();
            last = next;
        }
        capture.end().unwrap();
        let info = graph.info().unwrap();
        assert_eq!((info.copies, info.fills, info.memory), (10, 10, 0));
        for _ in 0..3 {
            graph.replay(&rig.stream).unwrap();
        }
        let read = rig.read(&last);
        assert_eq!(read, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        drop((graph, x, last));
        rig.finish();
    }
}
