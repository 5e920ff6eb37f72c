//! What users reported of captures that fail, are abandoned, or meet other work, as scenarios over single graphs. Names carry the reports' ids.
mod common;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Barrier;
use std::thread;

use common::Rig;
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::kernels;
use cudagraph_trees::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, LaunchConfig,
};
use cudagraph_trees::{
    Allocator, CaptureOptions, Error, FunctionSpec, Graph, GraphTrees, Phase, PoolHandle,
    PoolOptions, Tensor, lend,
};

suite!(
    t3_02_captures_abandoned_midway,
    t3_02_a_tensor_of_an_abandoned_capture_is_a_tensor,
    t3_04_the_seventh_of_twenty_operations,
    t3_04_a_refusal_that_breaks_nothing,
    t3_04_an_operation_of_a_stream_that_forked_off,
    t3_04_two_captures_at_once,
    t3_04_a_capture_broken_from_outside,
    t3_07_reset_is_idempotent_and_the_object_reusable,
    t3_08_a_refusal_leaves_no_error_behind,
    t3_09_a_graph_dropped_inside_another_capture,
    t3_10_allocating_after_an_illegal_call,
    t3_11_eager_work_between_two_captures,
    t3_14_a_failed_capture_leaves_a_sound_device,
    t4_06_the_first_allocation_of_everything_is_inside_a_capture,
    t4_08_captures_on_many_threads,
    memory_of_a_stream_that_forks_off_is_the_graphs,
    t5_01_a_block_allocated_and_freed_a_hundred_times,
    t5_09_rebuilding_does_not_leak,
    t5_23_a_graph_keeps_every_pool_it_allocated_from,
    t6_05_copies_from_the_host_are_refused_inside,
    t6_09_eager_churn_beside_a_graph,
    an_input_allocated_inside_is_written_before_the_first_replay,
    a_capture_that_cannot_begin,
);

const MIB: u64 = 1 << 20;

const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

/// A small capture that works, as a check that everything is as it was.
#[track_caller]
fn a_capture_works<D: Device>(rig: &Rig<D>) {
    let x = rig.floats(&[1.0, 2.0, 3.0]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 2.0, 1.0);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [3.0, 5.0, 7.0]);
}

/// Pools other than the tree's.
fn pools<D: Device>(rig: &Rig<D>) -> usize {
    rig.allocator.private_pools().len() - 1
}

/// Whether the device refused this call because of a capture.
#[track_caller]
fn refused<T>(result: Result<T, Error>, call: Call, code: Code) {
    match result.map(drop) {
        Err(Error::Device(error)) => assert_eq!((error.call, error.code), (call, code), "{error}"),
        other => panic!("{other:?}"),
    }
}

fn t3_02_captures_abandoned_midway<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 128]);
    let mut graph = Graph::new(&rig.allocator);
    a_capture_works(&rig);
    rig.allocator.trim().unwrap();
    let free = rig.device.memory_info().unwrap().free;
    let books = (rig.allocator.stats(), rig.allocator.private_pools());
    for round in 0..100 {
        let capture = graph.capture(&rig.stream).unwrap();
        let kept = rig.captured(&capture, &x, 2.0, 0.0);
        drop(rig.captured(&capture, &kept, 2.0, 0.0));
        let large = capture.alloc(20 * MIB).unwrap();
        match round % 3 {
            0 => drop(capture),
            1 => {
                // Waiting for the stream breaks the capture; ending it says so.
                let waited = rig.device.synchronize(&rig.stream).unwrap_err();
                assert_eq!(waited.code, Code::StreamCaptureUnsupported);
                let ended = capture.end();
                refused(ended, Call::EndCapture, Code::StreamCaptureInvalidated);
            }
            _ => {
                let unwound = catch_unwind(AssertUnwindSafe(|| {
                    let _capture = capture;
                    resume_unwind(Box::new("from inside"));
                }));
                assert_eq!(unwound.unwrap_err().downcast_ref(), Some(&"from inside"));
            }
        }
        assert_eq!(
            rig.device.capture_status(&rig.stream),
            Ok(CaptureStatus::None)
        );
        assert!(matches!(graph.replay(&rig.stream), Err(Error::NotCaptured)));
        drop((kept, large));
        rig.allocator.trim().unwrap();
        assert_eq!(rig.device.memory_info().unwrap().free, free);
        assert_eq!(
            (rig.allocator.stats(), rig.allocator.private_pools()),
            books
        );
    }
    drop(graph);
    a_capture_works(&rig);
    drop(x);
    rig.finish();
}

fn t3_02_a_tensor_of_an_abandoned_capture_is_a_tensor<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 16]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 2.0, 0.0);
    drop(capture);
    // Nothing was run, but the memory is y's, and eager work may use it.
    rig.scale_into(&rig.stream, &y, &x, 4.0, 0.0);
    assert_eq!(rig.read(&y), [4.0; 16]);
    assert_eq!(pools(&rig), 1, "its pool lives as long as it");
    drop((x, y, graph));
    rig.allocator.trim().unwrap();
    assert_eq!(pools(&rig), 0);
    rig.finish();
}

fn an_input_allocated_inside_is_written_before_the_first_replay<D: Device>(rig: Rig<D>) {
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let input = capture.alloc(64).unwrap();
    let output = rig.captured(&capture, &input, 3.0, 1.0);
    capture.end().unwrap();
    for value in [1.0, 2.0] {
        rig.put(&input, &[value; 16]);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&output), [value * 3.0 + 1.0; 16]);
        assert_eq!(rig.read(&input), [value; 16]);
    }
    drop((input, output, graph));
    rig.finish();
}

/// One operation, the same each time: 64 B of zeros.
fn fill<D: Device>(rig: &Rig<D>, stream: &D::Stream, to: &Tensor<D>) -> Result<(), DeviceError> {
    rig.device.fill(stream, to.ptr().unwrap(), 0, 64)
}

/// A launch that no device takes, and that leaves the capture alone.
fn bad_launch<D: Device>(rig: &Rig<D>, stream: &D::Stream, function: &D::Function) -> DeviceError {
    let config = LaunchConfig {
        grid: [0, 1, 1],
        block: [1, 1, 1],
        shared_bytes: 0,
    };
    let refused = rig.device.launch(stream, function, config, &[]);
    refused.unwrap_err()
}

#[track_caller]
fn device_error<T>(result: Result<T, Error>) -> DeviceError {
    match result.map(drop) {
        Err(Error::Device(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn t3_04_the_seventh_of_twenty_operations<D: Device>(rig: Rig<D>) {
    let function = rig.device.load(&kernels::fill()).unwrap();
    let x = rig.floats(&[1.0; 16]);
    let mut graph = Graph::new(&rig.allocator);
    for _ in 0..2 {
        let capture = graph.capture(&rig.stream).unwrap();
        let done: Vec<_> = (1..=20)
            .map(|n| match n {
                7 => rig.device.synchronize(&rig.stream),
                _ => fill(&rig, &rig.stream, &x),
            })
            .collect();
        assert!(done[..6].iter().all(Result::is_ok), "{done:?}");
        let seventh = done[6].clone().unwrap_err();
        assert_eq!(
            (seventh.call, seventh.code, seventh.position, &seventh.first),
            (
                Call::Synchronize,
                Code::StreamCaptureUnsupported,
                Some(7),
                &None
            )
        );
        assert!(
            seventh
                .to_string()
                .ends_with(" (operation 7 of the capture)")
        );
        for (later, n) in done[7..].iter().zip(8..) {
            let later = later.as_ref().unwrap_err();
            assert_eq!(
                (later.call, later.code, later.position),
                (Call::Fill, Code::StreamCaptureInvalidated, Some(n))
            );
            assert_eq!(later.first.as_deref(), Some(&seventh));
        }
        let ended = device_error(capture.end());
        assert_eq!(
            (ended.call, ended.code, ended.position),
            (Call::EndCapture, Code::StreamCaptureInvalidated, None)
        );
        assert_eq!(ended.root(), &seventh);
        let text = ended.to_string();
        let told = "; the capture was broken by its operation 7: Synchronize failed with StreamCaptureUnsupported (900): ";
        assert!(text.contains(told), "{text}");
        let source = std::error::Error::source(&ended).unwrap();
        assert_eq!(source.downcast_ref(), Some(&seventh));
    }
    // The next begins at 1, and knows nothing of them.
    let capture = graph.capture(&rig.stream).unwrap();
    let refused = bad_launch(&rig, &rig.stream, &function);
    assert_eq!((refused.position, &refused.first), (Some(1), &None));
    fill(&rig, &rig.stream, &x).unwrap();
    capture.end().unwrap();
    // And what is no part of a capture has no place in one.
    let refused = bad_launch(&rig, &rig.stream, &function);
    assert_eq!((refused.position, &refused.first), (None, &None));
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&x), [0.0; 16]);
    drop((x, graph));
    rig.finish();
}

fn t3_04_a_refusal_that_breaks_nothing<D: Device>(rig: Rig<D>) {
    let function = rig.device.load(&kernels::fill()).unwrap();
    let x = rig.floats(&[1.0; 16]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    for n in 1..=20 {
        if n % 7 == 0 {
            let refused = bad_launch(&rig, &rig.stream, &function);
            assert_eq!(
                (refused.call, refused.code, refused.position),
                (Call::Launch, Code::InvalidValue, Some(n))
            );
            continue;
        }
        fill(&rig, &rig.stream, &x).unwrap();
    }
    // What breaks it afterwards is the first that did.
    let waited = rig.device.synchronize(&rig.stream).unwrap_err();
    assert_eq!((waited.position, &waited.first), (Some(21), &None));
    let refused = bad_launch(&rig, &rig.stream, &function);
    assert_eq!((refused.position, &refused.first), (Some(22), &None));
    assert_eq!(device_error(capture.end()).root(), &waited);
    let capture = graph.capture(&rig.stream).unwrap();
    fill(&rig, &rig.stream, &x).unwrap();
    bad_launch(&rig, &rig.stream, &function);
    fill(&rig, &rig.stream, &x).unwrap();
    capture.end().unwrap();
    assert_eq!(graph.info().unwrap().nodes(), 2);
    drop((x, graph));
    rig.finish();
}

/// Operations are counted on all streams of a capture, in the order of the calls.
fn t3_04_an_operation_of_a_stream_that_forked_off<D: Device>(rig: Rig<D>) {
    let forked = rig.device.create_stream().unwrap();
    let [fork, join] = [(); 2].map(|()| rig.device.create_event().unwrap());
    let x = rig.floats(&[1.0; 16]);
    let y = rig.floats(&[1.0; 16]);
    rig.device.synchronize(&rig.stream).unwrap(); // y is written there
    let mut graph = Graph::new(&rig.allocator);
    for breaks in [true, false] {
        let capture = graph.capture(&rig.stream).unwrap();
        fill(&rig, &rig.stream, &x).unwrap();
        rig.device.record(&fork, &rig.stream).unwrap();
        rig.device.wait(&forked, &fork).unwrap();
        for _ in 0..2 {
            fill(&rig, &forked, &y).unwrap();
            fill(&rig, &rig.stream, &x).unwrap();
        }
        if breaks {
            let waited = rig.device.synchronize(&forked).unwrap_err();
            assert_eq!(
                (waited.code, waited.position),
                (Code::StreamCaptureUnsupported, Some(6))
            );
            for (stream, position) in [(&rig.stream, 7), (&forked, 8)] {
                let later = fill(&rig, stream, &x).unwrap_err();
                assert_eq!((later.position, later.root()), (Some(position), &waited));
            }
            assert_eq!(device_error(capture.end()).root(), &waited);
        } else {
            rig.device.record(&join, &forked).unwrap();
            rig.device.wait(&rig.stream, &join).unwrap();
            capture.end().unwrap();
        }
        // The forked stream is no capture's any more.
        fill(&rig, &forked, &y).unwrap();
        rig.device.synchronize(&forked).unwrap();
    }
    assert_eq!(graph.info().unwrap().fills, 5);
    drop((x, y, graph));
    rig.finish();
}

fn t3_04_two_captures_at_once<D: Device>(rig: Rig<D>) {
    let turn = Barrier::new(2);
    thread::scope(|scope| {
        for breaks_at in [5, 9] {
            let (rig, turn) = (&rig, &turn);
            scope.spawn(move || {
                let stream = rig.device.create_stream().unwrap();
                let x = rig.allocator.alloc(&stream, 64).unwrap();
                let mut graph = Graph::new(&rig.allocator);
                let capture = graph.capture(&stream).unwrap();
                let mut refused = Vec::new();
                for n in 1..=12 {
                    turn.wait();
                    let done = match n == breaks_at {
                        true => rig.device.synchronize(&stream),
                        false => fill(rig, &stream, &x),
                    };
                    refused.extend(done.err());
                }
                let ended = device_error(capture.end());
                let positions: Vec<_> = refused.iter().map(|e| e.position).collect();
                let expected: Vec<_> = (breaks_at..=12).map(Some).collect();
                assert_eq!(positions, expected);
                assert!(refused.iter().all(|e| e.root() == &refused[0]));
                assert_eq!(ended.root(), &refused[0]);
                assert_eq!(ended.root().call, Call::Synchronize);
            });
        }
    });
    rig.finish();
}

/// In the global mode a call anywhere breaks the capture. It is no operation of it, and named all the same.
fn t3_04_a_capture_broken_from_outside<D: Device>(rig: Rig<D>) {
    let other = rig.device.create_stream().unwrap();
    let x = rig.floats(&[1.0; 16]);
    rig.device.synchronize(&rig.stream).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let options = CaptureOptions {
        pool: None,
        mode: CaptureMode::Global,
    };
    let capture = graph.capture_with(&rig.stream, options).unwrap();
    fill(&rig, &rig.stream, &x).unwrap();
    let waited = thread::scope(|scope| {
        let waits = scope.spawn(|| rig.device.synchronize(&other));
        waits.join().unwrap().unwrap_err()
    });
    assert_eq!(
        (waited.code, waited.position, &waited.first),
        (Code::StreamCaptureUnsupported, None, &None)
    );
    let later = fill(&rig, &rig.stream, &x).unwrap_err();
    assert_eq!((later.position, later.root()), (Some(2), &waited));
    let ended = device_error(capture.end());
    assert_eq!(ended.root(), &waited);
    let text = ended.to_string();
    let told = "; the capture was broken by another call: Synchronize failed with StreamCaptureUnsupported (900): ";
    assert!(text.contains(told), "{text}");
    drop((x, graph));
    rig.finish();
}

fn t3_07_reset_is_idempotent_and_the_object_reusable<D: Device>(rig: Rig<D>) {
    let pool = rig.allocator.create_pool(PoolOptions::default()).unwrap();
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    for round in 1..=3 {
        let options = CaptureOptions {
            pool: Some(pool.clone()),
            ..CaptureOptions::default()
        };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        assert_eq!(pool.uses(), 3, "the handle, the route, the capture");
        let y = rig.captured(&capture, &x, round as f32, 0.0);
        capture.end().unwrap();
        assert_eq!(pool.uses(), 2);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [round as f32; 4]);
        graph.reset();
        assert_eq!(pool.uses(), 1);
        graph.reset();
        assert_eq!(pool.uses(), 1);
    }
    drop(graph);
    assert_eq!(pool.uses(), 1);
    drop((x, pool));
    rig.finish();
}

fn t3_08_a_refusal_leaves_no_error_behind<D: Device>(rig: Rig<D>) {
    let default = rig.device.default_stream();
    let mut graph = Graph::new(&rig.allocator);
    for _ in 0..3 {
        refused(
            graph.capture(&default).map(drop),
            Call::BeginCapture,
            Code::StreamCaptureUnsupported,
        );
        assert_eq!(rig.device.query(&rig.stream), Ok(true));
        assert_eq!(rig.device.synchronize_device(), Ok(()));
    }
    drop(graph);
    a_capture_works(&rig);
    rig.finish();
}

fn a_capture_that_cannot_begin<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graphs = [(); 2].map(|()| Graph::new(&rig.allocator));
    let [g0, g1] = &mut graphs;
    let capture = g0.capture(&rig.stream).unwrap();
    // The stream captures already: the second begin is refused, and touches neither the first nor the routes.
    refused(
        g1.capture(&rig.stream).map(drop),
        Call::BeginCapture,
        Code::IllegalState,
    );
    let y = rig.captured(&capture, &x, 2.0, 0.0);
    let z = rig.allocator.alloc(&rig.stream, 16).unwrap();
    rig.scale_into(&rig.stream, &z, &y, 1.0, 1.0);
    capture.end().unwrap();
    let pool = g0.pool().unwrap();
    assert!(
        pool.check_live(&[y.ptr().unwrap().0, z.ptr().unwrap().0])
            .is_exact()
    );
    g0.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&z), [3.0; 4]);
    drop((x, y, z, pool, graphs));
    rig.finish();
}

fn t3_09_a_graph_dropped_inside_another_capture<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let capture_one = |graph: &mut Graph<D>, mode, inside: &mut dyn FnMut()| {
        let options = CaptureOptions { pool: None, mode };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        let y = rig.captured(&capture, &x, 3.0, 0.0);
        inside();
        capture.end().unwrap();
        y
    };
    for mode in MODES {
        let mut old = Graph::new(&rig.allocator);
        let y = capture_one(&mut old, mode, &mut || ());
        let mut new = Graph::new(&rig.allocator);
        let mut leaving = Some((old, y));
        let z = capture_one(&mut new, mode, &mut || drop(leaving.take()));
        new.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&z), [3.0; 4], "{mode:?}");
        assert_eq!(
            pools(&rig),
            2,
            "the old graph's memory is not given back yet"
        );
        drop((new, z));
        rig.allocator.trim().unwrap();
        assert_eq!(pools(&rig), 0);
    }
    drop(x);
    rig.finish();
}

fn t3_10_allocating_after_an_illegal_call<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let waited = rig.device.synchronize(&rig.stream).unwrap_err();
    assert_eq!(
        (waited.call, waited.code),
        (Call::Synchronize, Code::StreamCaptureUnsupported)
    );
    // Memory is handed out still; launching says what happened to the capture.
    let y = capture.alloc(20 * MIB).unwrap();
    assert_eq!(y.bytes(), 20 * MIB);
    let out = capture.alloc(16).unwrap();
    let launched = rig.kernels.copy(
        &rig.device,
        capture.stream(),
        out.ptr().unwrap(),
        x.ptr().unwrap(),
        4,
    );
    let error = launched.unwrap_err();
    assert_eq!(error.code, Code::StreamCaptureInvalidated);
    assert!(error.is_capture());
    refused(
        capture.end(),
        Call::EndCapture,
        Code::StreamCaptureInvalidated,
    );
    drop((x, y, out, graph));
    a_capture_works(&rig);
    rig.finish();
}

fn t3_11_eager_work_between_two_captures<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 1024]);
    let graph_of = |scale: f32| {
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&rig.stream).unwrap();
        let temporary = rig.captured(&capture, &x, scale, 0.0);
        let y = rig.captured(&capture, &temporary, 1.0, 1.0);
        drop(temporary);
        capture.end().unwrap();
        assert_eq!(graph.info().unwrap().memory, 0, "no memory nodes");
        (graph, y)
    };
    let first = graph_of(2.0);
    let second = graph_of(3.0);
    for round in 0..50 {
        let eager = rig.floats(&vec![round as f32; 100 + 37 * round]);
        first.0.replay(&rig.stream).unwrap();
        second.0.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&eager)[99], round as f32);
    }
    assert_eq!(rig.read(&first.1), [3.0; 1024]);
    assert_eq!(rig.read(&second.1), [4.0; 1024]);
    drop((x, first, second));
    rig.finish();
}

fn t3_14_a_failed_capture_leaves_a_sound_device<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let x = rig.floats(&[1.0; 4]);
    let event = d.create_event().unwrap();
    let side = d.create_stream().unwrap();
    for (round, mode) in MODES.into_iter().enumerate() {
        for how in 0..3 {
            let value = (1 + 3 * round + how) as f32;
            let mut graph = Graph::new(&rig.allocator);
            let options = CaptureOptions { pool: None, mode };
            let capture = graph.capture_with(&rig.stream, options).unwrap();
            let lost = rig.captured(&capture, &x, 9.0, 9.0);
            let code = match how {
                0 => {
                    d.synchronize(&rig.stream).unwrap_err();
                    Code::StreamCaptureInvalidated
                }
                1 => {
                    d.synchronize_device().unwrap_err();
                    Code::StreamCaptureInvalidated
                }
                _ => {
                    d.record(&event, &rig.stream).unwrap();
                    d.wait(&side, &event).unwrap();
                    rig.scale_into(&side, &lost, &x, 8.0, 8.0);
                    Code::StreamCaptureUnjoined
                }
            };
            refused(capture.end(), Call::EndCapture, code);
            let at = format!("{mode:?}, {how}");
            // On both streams: eager work, and what waits.
            for stream in [&rig.stream, &side] {
                assert_eq!(d.capture_status(stream), Ok(CaptureStatus::None), "{at}");
                let eager = rig.allocator.alloc(stream, 16).unwrap();
                rig.scale_into(stream, &eager, &x, value, 0.0);
                let bytes = eager.read(d, stream).unwrap();
                assert_eq!(bytes, [value; 4].map(f32::to_le_bytes).concat(), "{at}");
                assert_eq!((d.synchronize(stream), d.query(stream)), (Ok(()), Ok(true)));
            }
            assert_eq!(d.synchronize_device(), Ok(()), "{at}");
            // The same object captures, in the same mode.
            let options = CaptureOptions { pool: None, mode };
            let capture = graph.capture_with(&rig.stream, options).unwrap();
            let y = rig.captured(&capture, &x, value, 1.0);
            capture.end().unwrap();
            graph.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&y), [value + 1.0; 4], "{at}");
            a_capture_works(&rig);
            drop((lost, y));
        }
    }
    drop((x, event, side));
    rig.finish();
}

/// Nothing is set up at the first use that a capture would mind: neither of an allocator, nor of a pool, nor of a tree.
fn t4_06_the_first_allocation_of_everything_is_inside_a_capture<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let beside = d.create_stream().unwrap();
    let fill = |stream: &D::Stream, to: &Tensor<D>, value| {
        let (kernels, ptr) = (&rig.kernels, to.ptr().unwrap());
        kernels.fill(d, stream, ptr, 4, value).unwrap();
    };
    let is = |stream: &D::Stream, tensor: &Tensor<D>, value: f32| {
        let bytes = tensor.read(d, stream).unwrap();
        assert_eq!(bytes, [value; 4].map(f32::to_le_bytes).concat());
    };
    for mode in MODES {
        let fresh = Allocator::new(d.clone()).unwrap();
        let mut graph = Graph::new(&fresh);
        let options = CaptureOptions { pool: None, mode };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        let inside = capture.alloc(16).unwrap();
        fill(&rig.stream, &inside, 1.0);
        // The default pool's first, and a private pool's.
        let eager = fresh.alloc(&beside, 16).unwrap();
        fill(&beside, &eager, 2.0);
        let pool = fresh.create_pool(PoolOptions::default()).unwrap();
        let private = pool.alloc(&beside, 16).unwrap();
        fill(&beside, &private, 3.0);
        // An allocator that is itself made in here, and a tree's warmup.
        let within = Allocator::new(d.clone()).unwrap();
        let first = within.alloc(&beside, 16).unwrap();
        fill(&beside, &first, 4.0);
        let trees = GraphTrees::new(&within).unwrap();
        let kernels = rig.kernels.clone();
        let spec = FunctionSpec::new("f");
        let f = trees.register(spec, move |rec, mut inputs| {
            let x = inputs.take(0)?;
            let y = rec.alloc(16)?;
            let (to, from) = (y.ptr()?, x.ptr()?);
            kernels.scale_add(rec.device(), rec.stream(), to, from, 4, 10.0, 0.0)?;
            Ok(vec![y])
        });
        let f = f.unwrap();
        let step = trees.step();
        let run = || trees.run(&f, &step, &[], &beside, &mut [lend(&first)]);
        let warm = run().unwrap();
        assert_eq!(warm.phase(), Phase::Warmup);
        assert_eq!(d.capture_status(&rig.stream), Ok(CaptureStatus::Active));
        capture.end().unwrap();
        graph.replay(&rig.stream).unwrap();
        is(&rig.stream, &inside, 1.0);
        for (tensor, value) in [
            (&eager, 2.0),
            (&private, 3.0),
            (&first, 4.0),
            (&warm[0], 40.0),
        ] {
            is(&beside, tensor, value);
        }
        drop((warm, run));
    }
    // A tree whose first allocation is made by a recording.
    let fresh = Allocator::new(d.clone()).unwrap();
    let trees = GraphTrees::new(&fresh).unwrap();
    let kernels = rig.kernels.clone();
    let f = trees.register(FunctionSpec::new("f").skip_warmup(), move |rec, _| {
        let y = rec.alloc(16)?;
        kernels.fill(rec.device(), rec.stream(), y.ptr()?, 4, 6.0)?;
        Ok(vec![y])
    });
    let f = f.unwrap();
    assert_eq!(trees.pool_stats().segments.allocated, 0);
    for phase in [Phase::Record, Phase::Replay] {
        let step = trees.step();
        let outputs = trees.run(&f, &step, &[], &beside, &mut []).unwrap();
        assert_eq!(outputs.phase(), phase);
        is(&beside, &outputs[0], 6.0);
    }
    drop((trees, f, fresh, beside));
    rig.finish();
}

/// What is allocated for a stream that joined the capture belongs to the graph like all else: freed inside, it must not serve eager work.
fn memory_of_a_stream_that_forks_off_is_the_graphs<D: Device>(rig: Rig<D>) {
    let [forked, beside] = [(); 2].map(|()| rig.device.create_stream().unwrap());
    let [fork, join] = [(); 2].map(|()| rig.device.create_event().unwrap());
    let x = rig.floats(&[1.0; 128]);
    let eager_before = rig.floats(&[5.0; 128]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = capture.alloc(512).unwrap();
    rig.device.record(&fork, &rig.stream).unwrap();
    rig.device.wait(&forked, &fork).unwrap();
    let temporary = rig.allocator.alloc(&forked, 512).unwrap();
    let eager = rig.allocator.alloc(&beside, 512).unwrap();
    rig.scale_into(&forked, &temporary, &x, 2.0, 0.0);
    rig.scale_into(&forked, &y, &temporary, 1.0, 1.0);
    let place = temporary.ptr().unwrap();
    drop(temporary);
    drop(eager_before); // from outside: the graph does not end its life again and again
    rig.device.record(&join, &forked).unwrap();
    rig.device.wait(&rig.stream, &join).unwrap();
    capture.end().unwrap();
    let pool = graph.pool().unwrap();
    assert!(pool.locate(place).is_some(), "in the capture's pool");
    assert_eq!(pool.locate(eager.ptr().unwrap()), None);
    // Eager work on that stream gets other memory.
    let after = rig.allocator.alloc(&forked, 512).unwrap();
    assert_ne!(after.ptr().unwrap(), place);
    assert_eq!(pool.locate(after.ptr().unwrap()), None);
    rig.device.synchronize(&rig.stream).unwrap(); // x is written there
    rig.scale_into(&forked, &after, &x, 9.0, 0.0);
    rig.device.synchronize(&forked).unwrap();
    for value in [1.0, 4.0] {
        rig.put(&x, &[value; 128]);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [2.0 * value + 1.0; 128]);
    }
    assert_eq!(rig.read(&after), [9.0; 128]);
    drop((x, y, eager, after, pool, graph));
    rig.finish();
}

fn t4_08_captures_on_many_threads<D: Device>(rig: Rig<D>) {
    let rig = &rig;
    let results: Vec<Vec<f32>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|n| {
                scope.spawn(move || {
                    let stream = rig.device.create_stream().unwrap();
                    let x = rig.allocator.alloc(&stream, 16).unwrap();
                    let bytes: Vec<u8> =
                        [n as f32; 4].iter().flat_map(|v| v.to_le_bytes()).collect();
                    x.write(&rig.device, &stream, &bytes).unwrap();
                    let mut graph = Graph::new(&rig.allocator);
                    let capture = graph.capture(&stream).unwrap();
                    let y = rig.captured(&capture, &x, 2.0, 0.0);
                    let z = rig.captured(&capture, &y, 1.0, 1.0);
                    drop(y);
                    capture.end().unwrap();
                    graph.replay(&stream).unwrap();
                    let bytes = z.read(&rig.device, &stream).unwrap();
                    bytes
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                        .collect()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (n, result) in results.iter().enumerate() {
        assert_eq!(*result, [2.0 * n as f32 + 1.0; 4]);
    }
    rig.allocator.trim().unwrap();
    assert_eq!(pools(rig), 0);
    assert_eq!(rig.allocator.stats().segments.current, 0);
}

fn t5_01_a_block_allocated_and_freed_a_hundred_times<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let total = capture.alloc(16).unwrap();
    rig.scale_into(capture.stream(), &total, &x, 0.0, 0.0);
    for _ in 0..100 {
        let temporary = capture.alloc(4 * MIB).unwrap();
        let part = temporary.view(0, 16).unwrap();
        rig.scale_into(capture.stream(), &part, &x, 2.0, 0.0);
        let [t, p] = [&total, &part].map(|t| t.ptr().unwrap());
        rig.kernels
            .add(&rig.device, capture.stream(), t, t, p, 4)
            .unwrap();
    }
    capture.end().unwrap();
    let stats = graph.pool().unwrap().stats();
    assert_eq!(
        (
            stats.live_bytes.peak,
            stats.live_bytes.current,
            stats.reserved_bytes.peak
        ),
        (4 * MIB + 512, 512, 22 * MIB)
    );
    for _ in 0..2 {
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&total), [200.0; 4]);
    }
    drop((x, total, graph));
    rig.finish();
}

fn t5_09_rebuilding_does_not_leak<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let mut last: Option<Tensor<D>> = None;
    let mut frees = Vec::new();
    for round in 0..100 {
        let capture = graph.capture(&rig.stream).unwrap();
        let y = rig.captured(&capture, &x, round as f32, 0.0);
        capture.end().unwrap();
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [round as f32; 4]);
        graph.reset();
        last = Some(y); // the caller keeps the last one only
        rig.allocator.trim().unwrap();
        frees.push(rig.device.memory_info().unwrap().free);
    }
    frees.dedup();
    assert_eq!(frees.len(), 1, "{frees:?}");
    assert_eq!(pools(&rig), 1);
    drop((x, last, graph));
    rig.finish();
}

fn t5_23_a_graph_keeps_every_pool_it_allocated_from<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let side = rig.allocator.create_pool(PoolOptions::default()).unwrap();
    let id = side.id();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = {
        let _route = rig.allocator.route_thread(&side).unwrap();
        rig.allocator.alloc(&rig.stream, 16).unwrap()
    };
    assert!(side.locate(y.ptr().unwrap()).is_some());
    rig.scale_into(capture.stream(), &y, &x, 2.0, 0.0);
    let z = rig.captured(&capture, &y, 1.0, 1.0);
    drop(y);
    capture.end().unwrap();
    drop(side);
    rig.allocator.trim().unwrap();
    let uses = |rig: &Rig<D>| {
        let pools = rig.allocator.private_pools();
        pools
            .into_iter()
            .find(|(i, ..)| *i == id)
            .map(|(_, uses, _)| uses)
    };
    assert_eq!(uses(&rig), Some(1), "the graph's");
    for value in [1.0, 5.0] {
        rig.put(&x, &[value; 4]);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&z), [2.0 * value + 1.0; 4]);
    }
    graph.reset();
    rig.allocator.trim().unwrap();
    assert_eq!(uses(&rig), None);

    // A capture that is abandoned keeps nothing.
    let side = rig.allocator.create_pool(PoolOptions::default()).unwrap();
    let capture = graph.capture(&rig.stream).unwrap();
    let in_side: Tensor<D> = side.alloc(&rig.stream, 16).unwrap();
    assert_eq!(side.uses(), 2);
    drop(capture);
    assert_eq!(side.uses(), 1);
    drop((x, z, in_side, side, graph));
    rig.finish();
}

fn t6_05_copies_from_the_host_are_refused_inside<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 2.0, 0.0);
    let write = y.write(&rig.device, &rig.stream, &[0; 16]);
    assert!(
        matches!(
            &write,
            Err(Error::Device(DeviceError {
                call: Call::Write,
                ..
            }))
        ),
        "{write:?}"
    );
    let read = y.read(&rig.device, &rig.stream);
    assert!(
        matches!(
            &read,
            Err(Error::Device(DeviceError {
                call: Call::Read,
                ..
            }))
        ),
        "{read:?}"
    );
    capture.end().unwrap(); // neither touched the capture
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [2.0; 4]);
    drop((x, y, graph));
    rig.finish();
}

fn t6_09_eager_churn_beside_a_graph<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 256]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let a = rig.captured(&capture, &x, 2.0, 0.0);
    let b = rig.captured(&capture, &a, 2.0, 0.0);
    let y = rig.captured(&capture, &b, 2.0, 0.0);
    drop((a, b));
    capture.end().unwrap();
    let pool = graph.pool().unwrap();
    let mut held: Vec<Tensor<D>> = Vec::new();
    let mut at = 1_u64;
    for _ in 0..1000 {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let draw = at >> 33;
        if draw.is_multiple_of(3) && !held.is_empty() {
            held.swap_remove(draw as usize % held.len());
        } else {
            let eager = rig
                .allocator
                .alloc(&rig.stream, 256 + draw % 100_000)
                .unwrap();
            assert_eq!(pool.locate(eager.ptr().unwrap()), None);
            rig.put(&eager.view(0, 8).unwrap(), &[-1.0; 2]);
            held.push(eager);
        }
    }
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [8.0; 256]);
    for eager in &held {
        assert_eq!(rig.read(&eager.view(0, 8).unwrap()), [-1.0; 2]);
    }
    drop((x, y, held, pool, graph));
    rig.finish();
}

// ---- calls that are made to fail ------------------------------------------------------------------

/// T3-01, T3-03, T7-15: whichever of the calls of a capture fails, what was allocated is given back, and the next capture works.
#[test]
fn t3_01_every_call_of_a_capture_fails_once() {
    for call in [
        Call::BeginCapture,
        Call::EndCapture,
        Call::GraphInfo,
        Call::Instantiate,
    ] {
        let rig = Rig::new(Faulty::new(HostDevice::new()));
        let x = rig.floats(&[1.0; 4]);
        let mut graph = Graph::new(&rig.allocator);
        let baseline = rig.device.inner().counts();
        for round in 0..10 {
            rig.device.fail(call, 1, Code::Other(999));
            let made = graph.capture(&rig.stream).and_then(|capture| {
                drop(rig.captured(&capture, &x, 2.0, 0.0));
                capture.end()
            });
            refused(made, call, Code::Other(999));
            assert_eq!(
                rig.device.capture_status(&rig.stream),
                Ok(CaptureStatus::None)
            );
            // Allocating, giving back and capturing again all work.
            let eager = rig.allocator.alloc(&rig.stream, 20 * MIB).unwrap();
            assert_eq!(rig.allocator.stats().live_blocks.current, 2, "{call:?}");
            drop(eager);
            rig.allocator.trim().unwrap();
            assert_eq!(pools(&rig), 0, "{call:?}, round {round}");
            let now = rig.device.inner().counts();
            assert_eq!(
                (
                    now.mapped_bytes,
                    now.reserved_ranges,
                    now.graphs,
                    now.execs,
                    now.captures
                ),
                (
                    baseline.mapped_bytes,
                    baseline.reserved_ranges,
                    baseline.graphs,
                    baseline.execs,
                    0
                )
            );
            a_capture_works(&rig);
        }
        drop((x, graph));
        rig.finish();
    }
}

/// T3-04: of twenty launches the seventh breaks the capture, with an error of any kind; the later ones and the end name it.
#[test]
fn t3_04_the_seventh_of_twenty_launches() {
    let rig = Rig::new(Faulty::new(HostDevice::new()));
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let launches = |stream: &_, to: &Tensor<_>| -> Vec<Option<DeviceError>> {
        let (to, from) = (to.ptr().unwrap(), x.ptr().unwrap());
        let launch = |_| rig.kernels.copy(&rig.device, stream, to, from, 4);
        (0..20).map(launch).map(Result::err).collect()
    };
    for end_fails in [false, true] {
        let capture = graph.capture(&rig.stream).unwrap();
        let y = capture.alloc(16).unwrap();
        // The second is refused, and breaks nothing.
        rig.device.fail(Call::Launch, 2, Code::OutOfMemory);
        rig.device
            .fail_invalidating(Call::Launch, 7, Code::NotSupported);
        let refused = launches(capture.stream(), &y);
        let seventh = refused[6].clone().unwrap();
        let told: Vec<_> = refused
            .iter()
            .map(|e| e.as_ref().map(|e| (e.code, e.position, e.first.as_deref())))
            .collect();
        let mut expected = vec![None; 7];
        expected[1] = Some((Code::OutOfMemory, Some(2), None));
        expected[6] = Some((Code::NotSupported, Some(7), None));
        expected.extend(
            (8..=20).map(|n| Some((Code::StreamCaptureInvalidated, Some(n), Some(&seventh)))),
        );
        assert_eq!(told, expected);
        let code = match end_fails {
            false => Code::StreamCaptureInvalidated,
            true => Code::Other(999),
        };
        if end_fails {
            rig.device.fail(Call::EndCapture, 1, code);
        }
        let ended = device_error(capture.end());
        assert_eq!((ended.call, ended.code), (Call::EndCapture, code));
        assert_eq!(ended.first.as_deref(), Some(&seventh));
        let text = ended.to_string();
        let told = "; the capture was broken by its operation 7: Launch failed with NotSupported (801): made to fail, and to invalidate the capture";
        assert!(text.ends_with(told), "{text}");
        // Nothing is left of it.
        let capture = graph.capture(&rig.stream).unwrap();
        rig.device.fail(Call::Launch, 1, Code::NotSupported);
        let refused = launches(capture.stream(), &y);
        assert_eq!(refused[0].as_ref().unwrap().position, Some(1));
        assert_eq!(refused[1..], [const { None }; 19]);
        capture.end().unwrap();
        graph.reset();
    }
    drop((x, graph));
    a_capture_works(&rig);
    rig.finish();
}

/// T4-01: memory is short at the n-th allocation of a capture; the error is "out of memory", and the capture goes on.
#[test]
fn t4_01_out_of_memory_at_the_nth_allocation_of_a_capture() {
    for nth in 1..=4 {
        let rig = Rig::new(Faulty::new(HostDevice::new()));
        let x = rig.floats(&[1.0; 4]);
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&rig.stream).unwrap();
        rig.device.fail(Call::Map, nth, Code::OutOfMemory);
        let waits = rig.device.calls(Call::SynchronizeDevice);
        let mut failed = Vec::new();
        let mut held = Vec::new();
        for i in 1..=4_u64 {
            match capture.alloc(i * 20 * MIB) {
                Ok(tensor) => held.push(tensor),
                Err(error) => {
                    let text = error.to_string();
                    let start = format!("out of memory: {} B asked for on stream", i * 20 * MIB);
                    assert!(text.starts_with(&start), "{text}");
                    failed.push(i);
                }
            }
        }
        assert_eq!(failed, [nth]);
        assert_eq!(rig.device.calls(Call::SynchronizeDevice), waits);
        let y = rig.captured(&capture, &x, 2.0, 0.0);
        capture.end().unwrap();
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [2.0; 4]);
        let pool: PoolHandle<_> = graph.pool().unwrap();
        assert_eq!(pool.stats().segments.current, 4);
        drop((x, y, held, pool, graph));
        rig.finish();
    }
}

/// T5-20, T9-06: the last handle goes while work is in flight: the device is waited for before its memory is taken away.
#[test]
fn memory_is_not_taken_from_under_work_in_flight() {
    for seed in 0..4 {
        let device = HostDevice::builder().seed(seed).build().unwrap();
        let rig = Rig::new(device.clone());
        let stream = rig.stream.clone();
        let x = rig.floats(&[1.0; 1024]);
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&stream).unwrap();
        let y = rig.captured(&capture, &x, 2.0, 0.0);
        capture.end().unwrap();
        graph.replay(&stream).unwrap();
        assert_eq!(device.counts().kernels_run, 0, "nobody has waited yet");
        drop((y, graph, x, rig));
        assert_eq!(device.synchronize(&stream), Ok(()), "seed {seed}");
        let counts = device.counts();
        assert_eq!(
            (counts.kernels_run, counts.mapped_bytes, counts.execs),
            (1, 0, 0)
        );
    }
}
