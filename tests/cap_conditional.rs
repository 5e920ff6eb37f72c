//! Ifs inside captures (CAP-15, POOL-30, POOL-31, T3-06): bodies that run or not at each launch, what they allocate, what is refused in them, and what is left of
//! those that fail. Of a device, and of a graph without a tree.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{Rig, on_cuda, wrapped};
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, DevicePtr, GatherSlot, GraphInfo,
};
use cudagraph_trees::pool::PoolError;
use cudagraph_trees::{BoxError, CaptureOptions, Error, Generator, Graph, IfBody, Tensor};

suite!(
    cap_15_forty_bodies_in_one_graph,
    cap_15_forty_graphs_with_a_body,
    pool_30_a_capture_and_its_bodies,
    pool_31_the_end_of_the_whole_ends_its_bodies,
    pool_31_a_body_that_is_open_on_a_fork,
    t3_06_a_body_that_is_broken,
    t3_06_a_broken_body_is_left,
    the_predicate_is_read_in_stream_order,
    nested,
    what_a_graph_holds,
    memory_goes_through_a_body,
    a_body_is_of_its_captures_graph,
    draws_of_a_body_are_its_graphs,
    pinned_copies_of_a_body_are_its_graphs,
    what_a_body_uses_waits_for_the_whole_capture,
    bodies_that_were_begun_past_the_allocator,
    on_a_fork,
    what_died_outside_is_used_inside,
    what_is_born_in_a_body_dies_in_it,
    a_predicate_is_one_byte,
    ifs_that_cannot_begin,
    ends_that_fit_no_if,
    a_stream_takes_no_work_beside_its_body,
    forks_of_a_body,
    what_a_body_does_not_take,
    errors_and_panics_of_a_body,
    every_mode,
);

const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

fn byte<D: Device>(rig: &Rig<D>, value: u8) -> Tensor<D> {
    let tensor = rig.allocator.alloc(&rig.stream, 1).unwrap();
    set(rig, &tensor, value);
    tensor
}

fn set<D: Device>(rig: &Rig<D>, byte: &Tensor<D>, value: u8) {
    byte.write(&rig.device, &rig.stream, &[value]).unwrap();
}

/// In a body: out = x * scale + add.
fn scale<D: Device>(
    rig: &Rig<D>,
    body: &IfBody<'_, D>,
    out: &Tensor<D>,
    x: &Tensor<D>,
    by: f32,
    add: f32,
) {
    rig.scale_into(body.stream(), out, x, by, add);
}

/// The device's refusal that an error is.
#[track_caller]
fn device_error(error: BoxError) -> DeviceError {
    match error.downcast::<Error>().map(|error| *error) {
        Ok(Error::Device(error)) => error,
        Ok(other) => panic!("{other}"),
        Err(error) => *error.downcast::<DeviceError>().unwrap(),
    }
}

/// The stream captures nothing, and a graph with an if is captured there and works.
fn all_is_well<D: Device>(rig: &Rig<D>) {
    assert_eq!(
        rig.device.capture_status(&rig.stream),
        Ok(CaptureStatus::None)
    );
    let (holds, x) = (byte(rig, 1), rig.floats(&[3.0; 4]));
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 1.0, 0.0);
    capture
        .if_node(&holds, |body| {
            scale(rig, body, &y, &x, 2.0, 1.0);
            Ok(())
        })
        .unwrap();
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [7.0; 4]);
    set(rig, &holds, 0);
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [3.0; 4]);
}

// ---- bookkeeping ----------------------------------------------------------------------------------

/// A body that allocates: y = 2 * (x + i) if the byte holds.
fn with_a_temporary<D: Device>(
    rig: &Rig<D>,
    body: &mut IfBody<'_, D>,
    y: &Tensor<D>,
    x: &Tensor<D>,
    i: f32,
) -> Result<(), BoxError> {
    let temporary = body.alloc(x.bytes())?;
    scale(rig, body, &temporary, x, 1.0, i);
    scale(rig, body, y, &temporary, 2.0, 0.0);
    Ok(())
}

fn cap_15_forty_bodies_in_one_graph<D: Device>(rig: Rig<D>) {
    const BODIES: usize = 40;
    let x = rig.floats(&[1.0; 64]);
    let holds = rig.allocator.alloc(&rig.stream, BODIES as u64).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let out: Vec<_> = (0..BODIES).map(|_| capture.alloc(256).unwrap()).collect();
    for (i, y) in out.iter().enumerate() {
        rig.scale_into(capture.stream(), y, &x, 0.0, -1.0);
        let holds = holds.view(i as u64, 1).unwrap();
        capture
            .if_node(&holds, |body| with_a_temporary(&rig, body, y, &x, i as f32))
            .unwrap();
    }
    capture.end().unwrap();
    let info = graph.info().unwrap();
    assert_eq!((info.conditionals, info.kernels), (BODIES, 3 * BODIES));
    let pool = graph.pool().unwrap();
    // The graph, and this handle: nothing of the bodies is left. All temporaries lay in one place.
    assert_eq!(pool.uses(), 2);
    let stats = pool.stats();
    assert_eq!(
        (stats.live_blocks.current, stats.live_blocks.peak),
        (BODIES as u64, BODIES as u64 + 1)
    );
    assert_eq!(stats.segments.current, 1);
    for round in 0..3_usize {
        let byte = |i: usize| u8::from(i % 3 == round) * 7;
        let bytes: Vec<u8> = (0..BODIES).map(byte).collect();
        holds.write(&rig.device, &rig.stream, &bytes).unwrap();
        graph.replay(&rig.stream).unwrap();
        for (i, y) in out.iter().enumerate() {
            let expected = if i % 3 == round {
                2.0 * (1.0 + i as f32)
            } else {
                -1.0
            };
            assert_eq!(rig.read(y), [expected; 64], "body {i}, round {round}");
        }
    }
    drop((x, holds, out, pool, graph));
    rig.finish();
}

fn cap_15_forty_graphs_with_a_body<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 64]);
    let holds = byte(&rig, 0);
    for shared in [false, true] {
        let mut graphs: Vec<(Graph<D>, Tensor<D>)> = Vec::new();
        for i in 0..40 {
            let pool = graphs.first().filter(|_| shared);
            let options = CaptureOptions {
                pool: pool.map(|(graph, _)| graph.pool().unwrap()),
                ..CaptureOptions::default()
            };
            let mut graph = Graph::new(&rig.allocator);
            let mut capture = graph.capture_with(&rig.stream, options).unwrap();
            let y = rig.captured(&capture, &x, 0.0, -1.0);
            capture
                .if_node(&holds, |body| {
                    with_a_temporary(&rig, body, &y, &x, i as f32)
                })
                .unwrap();
            capture.end().unwrap();
            graphs.push((graph, y));
        }
        let pools = if shared { 1 } else { 40 };
        assert_eq!(
            rig.allocator.private_pools().len(),
            1 + pools,
            "the tree's, and these"
        );
        for value in [1, 0] {
            set(&rig, &holds, value);
            for (i, (graph, y)) in graphs.iter().enumerate() {
                graph.replay(&rig.stream).unwrap();
                let expected = if value == 1 {
                    2.0 * (1.0 + i as f32)
                } else {
                    -1.0
                };
                assert_eq!(rig.read(y), [expected; 64]);
            }
        }
        drop(graphs);
        rig.allocator.trim().unwrap();
        assert_eq!(rig.allocator.private_pools().len(), 1);
        // Routes are as before: this comes from the default pool.
        let before = rig.allocator.stats().live_blocks.current;
        let eager = rig.floats(&[0.0]);
        assert_eq!(rig.allocator.stats().live_blocks.current, before + 1);
        drop(eager);
    }
    drop((x, holds));
    rig.finish();
}

/// Nothing of what bodies need is left on the device.
#[test]
fn cap_15_the_device_holds_what_it_held() {
    let device = HostDevice::new();
    let rig = Rig::new(device.clone());
    all_is_well(&rig);
    rig.allocator.trim().unwrap();
    let before = device.counts();
    for _ in 0..40 {
        all_is_well(&rig);
        let mut graph = Graph::new(&rig.allocator);
        let mut capture = graph.capture(&rig.stream).unwrap();
        let holds = capture.alloc(1).unwrap();
        capture
            .if_node(&holds, |_| Err("on purpose".into()))
            .unwrap_err();
        drop(capture);
    }
    rig.allocator.trim().unwrap();
    let after = device.counts();
    let held = |c: &cudagraph_trees::device::host::HostCounts| {
        (
            c.streams,
            c.events,
            c.captures,
            c.graphs,
            c.execs,
            c.mapped_bytes,
            c.reserved_ranges,
        )
    };
    assert_eq!(held(&after), held(&before));
    rig.finish();
}

fn pool_30_a_capture_and_its_bodies<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let holds = byte(&rig, 1);
    let predicate = holds.ptr().unwrap();
    let (body, inner) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    let statuses = || [&rig.stream, &body, &inner].map(|s| d.capture_status(s).unwrap());
    let (on, off) = (CaptureStatus::Active, CaptureStatus::None);
    for mode in MODES {
        d.begin_capture(&rig.stream, mode).unwrap();
        assert_eq!(statuses(), [on, off, off]);
        d.begin_if(&rig.stream, predicate, &body).unwrap();
        assert_eq!(statuses(), [on, on, off]);
        d.begin_if(&body, predicate, &inner).unwrap();
        assert_eq!(statuses(), [on, on, on]);
        d.end_if(&body, &inner).unwrap();
        assert_eq!(statuses(), [on, on, off]);
        d.end_if(&rig.stream, &body).unwrap();
        assert_eq!(statuses(), [on, off, off]);
        // A second one, on the same streams.
        d.begin_if(&rig.stream, predicate, &body).unwrap();
        assert_eq!(statuses(), [on, on, off]);
        d.end_if(&rig.stream, &body).unwrap();
        let graph = d.end_capture(&rig.stream).unwrap();
        assert_eq!(statuses(), [off, off, off]);
        let info = d.graph_info(&graph).unwrap();
        assert_eq!((info.conditionals, info.nodes()), (3, 3));
        // Bodies without a node may run.
        let exec = d.instantiate(&graph).unwrap();
        d.launch_graph(&exec, &rig.stream, &[]).unwrap();
        d.synchronize(&rig.stream).unwrap();
    }
    drop(holds);
    rig.finish();
}

fn pool_31_the_end_of_the_whole_ends_its_bodies<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let holds = byte(&rig, 1);
    let predicate = holds.ptr().unwrap();
    let (body, inner) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    for nested in [false, true] {
        d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
            .unwrap();
        d.begin_if(&rig.stream, predicate, &body).unwrap();
        d.fill(&body, predicate, 1, 1).unwrap();
        if nested {
            d.begin_if(&body, predicate, &inner).unwrap();
        }
        let ended = d.end_capture(&rig.stream).unwrap_err();
        assert_eq!(
            (ended.call, ended.code),
            (Call::EndCapture, Code::StreamCaptureUnjoined)
        );
        assert!(ended.detail.contains("body of an if"), "{ended}");
        for stream in [&rig.stream, &body, &inner] {
            assert_eq!(d.capture_status(stream), Ok(CaptureStatus::None));
            d.fill(stream, predicate, 1, 1).unwrap();
            d.synchronize(stream).unwrap();
        }
        for (stream, body) in [(&rig.stream, &body), (&body, &inner)] {
            let late = d.end_if(stream, body).unwrap_err();
            assert_eq!((late.call, late.code), (Call::EndIf, Code::IllegalState));
        }
    }
    all_is_well(&rig);
    drop(holds);
    rig.finish();
}

fn pool_31_a_body_that_is_open_on_a_fork<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let holds = byte(&rig, 1);
    let predicate = holds.ptr().unwrap();
    let (fork, body) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    let event = d.create_event().unwrap();
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    d.record(&event, &rig.stream).unwrap();
    d.wait(&fork, &event).unwrap();
    d.begin_if(&fork, predicate, &body).unwrap();
    // The capture's own stream takes work meanwhile.
    d.fill(&rig.stream, predicate, 1, 1).unwrap();
    let ended = d.end_capture(&rig.stream).unwrap_err();
    assert_eq!(ended.code, Code::StreamCaptureUnjoined);
    for stream in [&rig.stream, &fork, &body] {
        assert_eq!(d.capture_status(stream), Ok(CaptureStatus::None));
        d.fill(stream, predicate, 1, 1).unwrap();
        d.synchronize(stream).unwrap();
    }
    assert_eq!(d.end_if(&fork, &body).unwrap_err().code, Code::IllegalState);
    all_is_well(&rig);
    drop((holds, event));
    rig.finish();
}

// ---- broken bodies --------------------------------------------------------------------------------

/// In a graph's capture: the refusal in the body is named by what comes later, and the process survives it.
fn t3_06_a_body_that_is_broken<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
    let modes = if on_cuda() { &MODES[1..] } else { &MODES[..] };
    for (&mode, nested) in modes.iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions { pool: None, mode };
        let mut capture = graph.capture_with(&rig.stream, options).unwrap();
        // Operations 1 to 5: the launch, the if, in it a launch and the inner if, then what is refused.
        let y = rig.captured(&capture, &x, 1.0, 0.0);
        let mut first = None;
        let broken = |body: &mut IfBody<'_, D>, first: &mut Option<DeviceError>| {
            let waited = d.synchronize(body.stream()).unwrap_err();
            assert_eq!(waited.code, Code::StreamCaptureUnsupported);
            assert_eq!(
                d.capture_status(body.stream()),
                Ok(CaptureStatus::Invalidated)
            );
            assert_eq!(
                d.capture_status(&rig.stream),
                Ok(CaptureStatus::Invalidated)
            );
            let later = rig
                .kernels
                .fill(d, body.stream(), y.ptr().unwrap(), 4, 9.0)
                .unwrap_err();
            assert_eq!(
                (later.code, later.root()),
                (Code::StreamCaptureInvalidated, &waited)
            );
            *first = Some(waited);
        };
        let ended = capture.if_node(&holds, |body| {
            scale(&rig, body, &y, &x, 2.0, 0.0);
            if !nested {
                broken(body, &mut first);
                return Ok(());
            }
            body.if_node(&holds, |inner| {
                broken(inner, &mut first);
                Ok(())
            })
        });
        let first = first.unwrap();
        assert_eq!(first.position, Some(if nested { 5 } else { 4 }));
        let ended = device_error(ended.unwrap_err());
        assert_eq!(
            (ended.call, ended.code),
            (Call::EndIf, Code::StreamCaptureInvalidated)
        );
        assert_eq!(ended.root(), &first);
        let Err(Error::Device(ended)) = capture.end() else {
            panic!("a broken capture gave a graph")
        };
        assert_eq!(
            (ended.call, ended.code),
            (Call::EndCapture, Code::StreamCaptureInvalidated)
        );
        assert_eq!(ended.root(), &first);
        drop((y, graph));
        all_is_well(&rig);
    }
    drop((holds, x));
    rig.finish();
}

/// The parent is ended first, or dropped, or the streams are.
fn t3_06_a_broken_body_is_left<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let holds = byte(&rig, 1);
    let predicate = holds.ptr().unwrap();
    for how in 0..5 {
        let (stream, body) = (d.create_stream().unwrap(), d.create_stream().unwrap());
        d.begin_capture(&stream, CaptureMode::Relaxed).unwrap();
        d.begin_if(&stream, predicate, &body).unwrap();
        d.fill(&body, predicate, 1, 1).unwrap();
        let waited = d
            .synchronize(if how == 4 { &stream } else { &body })
            .unwrap_err();
        assert_eq!(
            waited.code,
            if how == 4 {
                Code::IllegalState
            } else {
                Code::StreamCaptureUnsupported
            }
        );
        match how {
            0 | 4 => {
                let ended = d.end_capture(&stream).unwrap_err();
                assert_eq!(
                    (ended.code, ended.root()),
                    (Code::StreamCaptureInvalidated, &waited)
                );
                assert_eq!(d.capture_status(&body), Ok(CaptureStatus::None));
                assert_eq!(
                    d.end_if(&stream, &body).unwrap_err().code,
                    Code::IllegalState
                );
            }
            1 => {
                let ended = d.end_if(&stream, &body).unwrap_err();
                assert_eq!(
                    (ended.code, ended.root()),
                    (Code::StreamCaptureInvalidated, &waited)
                );
                let ended = d.end_capture(&stream).unwrap_err();
                assert_eq!(
                    (ended.code, ended.root()),
                    (Code::StreamCaptureInvalidated, &waited)
                );
            }
            2 => drop((body, stream)),
            _ => drop((stream, body)),
        }
        all_is_well(&rig);
    }
    // A body's stream that goes leaves an if that cannot be ended.
    let (stream, body) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    d.begin_capture(&stream, CaptureMode::Relaxed).unwrap();
    d.begin_if(&stream, predicate, &body).unwrap();
    drop(body);
    let ended = d.end_capture(&stream).unwrap_err();
    assert_eq!(ended.code, Code::StreamCaptureUnjoined);
    all_is_well(&rig);
    drop(holds);
    rig.finish();
}

// ---- what runs ------------------------------------------------------------------------------------

fn the_predicate_is_read_in_stream_order<D: Device>(rig: Rig<D>) {
    let (d, from, x) = (&rig.device, byte(&rig, 0), rig.floats(&[1.0; 4]));
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 0.0, 0.0);
    // Computed in the graph, and changed by the body that it lets run: twice the same if.
    let holds = capture.alloc(1).unwrap();
    let predicate = holds.ptr().unwrap();
    d.copy(capture.stream(), predicate, from.ptr().unwrap(), 1)
        .unwrap();
    for _ in 0..2 {
        capture
            .if_node(&holds, |body| {
                rig.kernels.increment(d, body.stream(), y.ptr()?, 4, 1.0)?;
                d.fill(body.stream(), predicate, 0, 1)?;
                Ok(())
            })
            .unwrap();
    }
    // The body comes before what follows the node.
    let z = rig.captured(&capture, &y, 10.0, 0.0);
    capture.end().unwrap();
    drop(holds);
    for value in [0, 1, 0, 255, 128, 0] {
        set(&rig, &from, value);
        graph.replay(&rig.stream).unwrap();
        let ran = f32::from(u8::from(value != 0));
        assert_eq!(
            (rig.read(&y), rig.read(&z)),
            (vec![ran; 4], vec![10.0 * ran; 4]),
            "{value}"
        );
    }
    // Launches in flight each see the byte as it was in their order.
    for value in [1, 0, 1] {
        d.fill(&rig.stream, from.ptr().unwrap(), value, 1).unwrap();
        graph.replay(&rig.stream).unwrap();
        rig.scale_into(&rig.stream, &x, &z, 1.0, f32::from(value));
    }
    assert_eq!(rig.read(&x), [11.0; 4]);
    drop((from, x, y, z, graph));
    rig.finish();
}

fn nested<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let holds: [_; 3] = std::array::from_fn(|_| byte(&rig, 0));
    let x = rig.floats(&[0.0]);
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 0.0, 0.0);
    let add = |stream: &D::Stream, by: f32| {
        rig.kernels
            .increment(d, stream, y.ptr().unwrap(), 1, by)
            .unwrap()
    };
    capture
        .if_node(&holds[0], |a| {
            add(a.stream(), 1.0);
            a.if_node(&holds[1], |b| {
                // No part before, and none after.
                b.if_node(&holds[2], |c| {
                    add(c.stream(), 10.0);
                    Ok(())
                })
            })?;
            add(a.stream(), 100.0);
            a.if_node(&holds[2], |c| {
                add(c.stream(), 1000.0);
                Ok(())
            })
        })
        .unwrap();
    add(capture.stream(), 0.5);
    capture.end().unwrap();
    let info = graph.info().unwrap();
    let all = GraphInfo {
        kernels: 6,
        conditionals: 4,
        ..GraphInfo::default()
    };
    assert_eq!((info, info.nodes()), (all, 10));
    for bits in 0..8_u8 {
        let on: [bool; 3] = std::array::from_fn(|i| bits >> i & 1 == 1);
        for (holds, on) in holds.iter().zip(on) {
            set(&rig, holds, u8::from(on));
        }
        let [a, b, c] = on.map(|on| f32::from(u8::from(on)));
        for _ in 0..2 {
            graph.replay(&rig.stream).unwrap();
            assert_eq!(
                rig.read(&y),
                [a * (1.0 + b * c * 10.0 + 100.0 + c * 1000.0) + 0.5],
                "{on:?}"
            );
        }
    }
    drop((holds, x, y, graph));
    rig.finish();
}

fn what_a_graph_holds<D: Device>(rig: Rig<D>) {
    let (d, holds, x) = (&rig.device, byte(&rig, 1), rig.floats(&[1.0; 4]));
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 1.0, 0.0);
    let to = y.ptr().unwrap();
    capture
        .if_node(&holds, |body| {
            scale(&rig, body, &y, &x, 2.0, 0.0);
            d.fill(body.stream(), to, 0, 4)?;
            d.copy(body.stream(), to.offset(4), to, 4)?;
            Ok(())
        })
        .unwrap();
    capture.end().unwrap();
    let all = GraphInfo {
        kernels: 2,
        copies: 1,
        fills: 1,
        conditionals: 1,
        ..GraphInfo::default()
    };
    assert_eq!(graph.info().unwrap(), all);
    assert_eq!(all.exec_bytes(), 50 * 1024);
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [0.0, 0.0, 2.0, 2.0]);
    drop((holds, x, y, graph));
    rig.finish();
}

// ---- memory ---------------------------------------------------------------------------------------

fn memory_goes_through_a_body<D: Device>(rig: Rig<D>) {
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 1000]));
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = capture.alloc(4000).unwrap();
    rig.scale_into(capture.stream(), &y, &x, 0.0, 0.0);
    let mut places = Vec::new();
    for i in 0..3 {
        // Before, in the body twice, in an inner one, after: always the same place.
        let before = rig.captured(&capture, &x, 1.0, i as f32);
        places.push(before.ptr().unwrap());
        drop(before);
        capture
            .if_node(&holds, |body| {
                for _ in 0..2 {
                    let inside = body.alloc(4000)?;
                    places.push(inside.ptr()?);
                    scale(&rig, body, &inside, &x, 3.0, i as f32);
                    scale(&rig, body, &y, &inside, 1.0, 0.0);
                }
                body.if_node(&holds, |inner| {
                    // By the route: from another thread, for this stream.
                    let stream = inner.stream();
                    let there = || rig.allocator.alloc(stream, 4000);
                    let inside = std::thread::scope(|s| s.spawn(there).join().unwrap())?;
                    places.push(inside.ptr()?);
                    scale(&rig, inner, &inside, &y, 1.0, 0.0);
                    scale(&rig, inner, &y, &inside, 2.0, 0.0);
                    Ok(())
                })
            })
            .unwrap();
    }
    capture.end().unwrap();
    assert!(places.iter().all(|place| *place == places[0]), "{places:?}");
    let pool = graph.pool().unwrap();
    assert_eq!(
        (pool.stats().segments.current, pool.stats().live_blocks.peak),
        (1, 2)
    );
    for value in [1, 0, 1] {
        set(&rig, &holds, value);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [10.0 * f32::from(value); 1000]);
    }
    drop((holds, x, y, pool, graph));
    rig.finish();
}

fn a_body_is_of_its_captures_graph<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let holds = byte(&rig, 1);
    let (side, event) = (d.create_stream().unwrap(), d.create_event().unwrap());
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let whole = d.capture_id(&rig.stream).unwrap();
    assert_ne!(whole, None);
    capture
        .if_node(&holds, |body| {
            assert_eq!(d.capture_id(body.stream())?, whole);
            for _ in 0..2 {
                // Before an inner if, and behind it.
                d.record(&event, body.stream())?;
                d.wait(&side, &event)?;
                assert_eq!(d.capture_id(&side)?, whole);
                // What is allocated for the fork is the capture's, and the body's.
                let temporary = rig.allocator.alloc(&side, 64)?;
                d.fill(&side, temporary.ptr()?, 1, 64)?;
                drop(temporary);
                d.record(&event, &side)?;
                d.wait(body.stream(), &event)?;
                body.if_node(&holds, |inner| {
                    assert_eq!(d.capture_id(inner.stream())?, whole);
                    Ok(())
                })?;
            }
            Ok(())
        })
        .unwrap();
    // On the fork, too, nothing may be held.
    let mut kept = None;
    let escaped = capture.if_node(&holds, |body| {
        d.record(&event, body.stream())?;
        d.wait(&side, &event)?;
        kept = Some(rig.allocator.alloc(&side, 48)?);
        d.record(&event, &side)?;
        Ok(d.wait(body.stream(), &event)?)
    });
    match escaped.unwrap_err().downcast_ref() {
        Some(Error::Escaped { bytes, count, .. }) => assert_eq!((*bytes, *count), (48, 1)),
        other => panic!("{other:?}"),
    }
    // Another thread's allocation for the capture is none of the body's, though the body is open.
    let stream = rig.stream.clone();
    let mut others = None;
    capture
        .if_node(&holds, |_| {
            let there = || rig.allocator.alloc(&stream, 32);
            others = Some(std::thread::scope(|s| s.spawn(there).join().unwrap())?);
            Ok(())
        })
        .unwrap();
    capture.end().unwrap();
    assert_eq!(graph.pool().unwrap().stats().live_blocks.current, 2);
    graph.replay(&rig.stream).unwrap();
    drop((holds, event, kept, others, graph));
    rig.finish();
}

fn draws_of_a_body_are_its_graphs<D: Device>(rig: Rig<D>) {
    const N: u64 = 8;
    let (d, holds, x) = (&rig.device, byte(&rig, 1), rig.floats(&[0.0; N as usize]));
    let reference = Generator::new(&rig.allocator, &rig.stream, 9).unwrap();
    let next = || {
        reference.uniform(&rig.stream, x.ptr().unwrap(), N).unwrap();
        rig.read(&x)
    };
    let before = rig.allocator.stats().live_blocks.current;
    let generator = Generator::new(&rig.allocator, &rig.stream, 9).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = capture.alloc(4 * N).unwrap();
    let draw = |stream: &D::Stream| generator.uniform(stream, y.ptr().unwrap(), N);
    capture
        .if_node(&holds, |body| {
            draw(body.stream())?;
            body.if_node(&holds, |inner| Ok(draw(inner.stream())?))
        })
        .unwrap();
    capture.end().unwrap();
    drop(generator);
    // Its state is the graph's: nobody gets it.
    let others: Vec<_> = (0..8).map(|_| rig.floats(&[7.0; 2])).collect();
    for value in [1, 0, 1, 1, 0] {
        set(&rig, &holds, value);
        rig.put(&y, &[-1.0; N as usize]);
        graph.replay(&rig.stream).unwrap();
        let mut drawn = vec![-1.0; N as usize];
        for _ in 0..2 * value {
            drawn = next();
        }
        assert_eq!(rig.read(&y), drawn);
    }
    drop((graph, y, others));
    d.synchronize(&rig.stream).unwrap();
    rig.allocator.trim().unwrap();
    assert_eq!(rig.allocator.stats().live_blocks.current, before);
    drop((holds, x, reference));
    rig.finish();
}

fn pinned_copies_of_a_body_are_its_graphs<D: Device>(rig: Rig<D>) {
    let bytes =
        |value: f32| -> Vec<u8> { [value; 8].iter().flat_map(|v| v.to_le_bytes()).collect() };
    let holds = byte(&rig, 0);
    let (source, target) = (
        rig.allocator.alloc_pinned(32).unwrap(),
        rig.allocator.alloc_pinned(32).unwrap(),
    );
    source.write(0, &bytes(3.0)).unwrap();
    target.write(0, &bytes(-1.0)).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = capture.alloc(32).unwrap();
    rig.kernels
        .fill(&rig.device, capture.stream(), y.ptr().unwrap(), 8, 0.5)
        .unwrap();
    capture
        .if_node(&holds, |body| {
            y.copy_from_pinned(body.stream(), &source, 0)?;
            body.if_node(&holds, |inner| {
                Ok(y.copy_to_pinned(inner.stream(), &target, 0)?)
            })
        })
        .unwrap();
    capture.end().unwrap();
    assert_eq!(graph.info().unwrap().copies, 2);
    // Kept for no longer than the graph lives, and so nobody else's.
    assert_eq!(rig.allocator.pinned_stats().kept, 0);
    let address = source.address();
    drop(source);
    let others: Vec<_> = (0..4)
        .map(|_| rig.allocator.alloc_pinned(32).unwrap())
        .collect();
    assert!(others.iter().all(|other| other.address() != address));
    let mut read = vec![0; 32];
    for (value, y_is, told) in [(0, 0.5, -1.0), (1, 3.0, 3.0), (0, 0.5, 3.0)] {
        set(&rig, &holds, value);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [y_is; 8]);
        target.read(0, &mut read).unwrap();
        assert_eq!(read, bytes(told));
    }
    drop((holds, y, target, others, graph));
    rig.finish();
}

/// Memory of another stream that a body reads is not used again before the whole capture is over: the body's stream captures no longer than the body.
fn what_a_body_uses_waits_for_the_whole_capture<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (holds, other) = (byte(&rig, 1), d.create_stream().unwrap());
    let x = rig.allocator.alloc(&other, 4096).unwrap();
    d.fill(&other, x.ptr().unwrap(), 0, 4096).unwrap();
    d.synchronize(&other).unwrap();
    let place = x.ptr().unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = capture.alloc(4096).unwrap();
    capture
        .if_node(&holds, |body| {
            scale(&rig, body, &y, &x, 1.0, 0.0);
            x.record_stream(body.stream())?;
            drop(x);
            Ok(())
        })
        .unwrap();
    let during = rig.allocator.alloc(&other, 4096).unwrap();
    assert_ne!(during.ptr().unwrap(), place);
    capture.end().unwrap();
    let after = rig.allocator.alloc(&other, 4096).unwrap();
    assert_eq!(after.ptr().unwrap(), place);
    drop((holds, y, during, after, graph));
    rig.finish();
}

/// A library adds an if by the device alone: what is allocated there is the capture's all the same.
fn bodies_that_were_begun_past_the_allocator<D: Device>(rig: Rig<D>) {
    let (d, holds, x) = (&rig.device, byte(&rig, 1), rig.floats(&[1.0; 4]));
    let body = d.create_stream().unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 1.0, 0.0);
    d.begin_if(&rig.stream, holds.ptr().unwrap(), &body)
        .unwrap();
    let temporary = rig.allocator.alloc(&body, 16).unwrap();
    rig.scale_into(&body, &temporary, &x, 1.0, 1.0);
    rig.scale_into(&body, &y, &temporary, 10.0, 0.0);
    drop(temporary);
    d.end_if(&rig.stream, &body).unwrap();
    capture.end().unwrap();
    // Of this stream, and of the body's.
    let stats = graph.pool().unwrap().stats();
    assert_eq!((stats.segments.current, stats.live_blocks.current), (2, 1));
    for value in [1, 0, 1] {
        set(&rig, &holds, value);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [if value == 1 { 20.0 } else { 1.0 }; 4]);
    }
    drop((holds, x, y, graph));
    rig.finish();
}

/// An if on a stream that forked off, beside which the capture's own stream goes on.
fn on_a_fork<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 256]));
    let [side, idle, elsewhere] = std::array::from_fn(|_| d.create_stream().unwrap());
    let event = d.create_event().unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let (y, z) = (
        rig.captured(&capture, &x, 1.0, 0.0),
        rig.captured(&capture, &x, 1.0, 0.0),
    );
    // Streams that take no part in the capture.
    let refused = |result: Result<(), BoxError>| {
        let error = device_error(result.unwrap_err());
        assert_eq!(
            (error.call, error.code),
            (Call::BeginIf, Code::IllegalState)
        );
    };
    refused(capture.if_node_on(&idle, &holds, |_| Ok(())));
    d.begin_capture(&elsewhere, CaptureMode::ThreadLocal)
        .unwrap();
    refused(capture.if_node_on(&elsewhere, &holds, |_| Ok(())));
    d.end_capture(&elsewhere).unwrap();
    d.record(&event, capture.stream()).unwrap();
    d.wait(&side, &event).unwrap();
    let own = capture.stream().clone();
    capture
        .if_node_on(&side, &holds, |body| {
            let temporary = body.alloc(1024)?;
            scale(&rig, body, &temporary, &x, 1.0, 1.0);
            // Meanwhile, elsewhere in the capture.
            rig.scale_into(&own, &z, &x, 3.0, 0.0);
            scale(&rig, body, &y, &temporary, 10.0, 0.0);
            body.if_node(&holds, |inner| {
                scale(&rig, inner, &temporary, &y, 1.0, 0.0);
                scale(&rig, inner, &y, &temporary, 1.0, 0.5);
                Ok(())
            })
        })
        .unwrap();
    d.record(&event, &side).unwrap();
    d.wait(capture.stream(), &event).unwrap();
    let sum = capture.alloc(1024).unwrap();
    let [to, a, b] = [&sum, &y, &z].map(|t| t.ptr().unwrap());
    rig.kernels.add(d, capture.stream(), to, a, b, 256).unwrap();
    capture.end().unwrap();
    for value in [1, 0, 1, 0] {
        set(&rig, &holds, value);
        graph.replay(&rig.stream).unwrap();
        let y_is = if value == 1 { 20.5 } else { 1.0 };
        assert_eq!(rig.read(&sum), [y_is + 3.0; 256]);
    }
    drop((holds, x, y, z, sum, event, graph));
    rig.finish();
}

fn what_died_outside_is_used_inside<D: Device>(rig: Rig<D>) {
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 0.0, 0.0);
    let outer = rig.captured(&capture, &x, 5.0, 0.0);
    let place = outer.ptr().unwrap();
    let mut reused = None;
    capture
        .if_node(&holds, |body| {
            scale(&rig, body, &y, &outer, 1.0, 0.0);
            drop(outer);
            let inside = body.alloc(16)?;
            reused = Some(inside.ptr()?);
            scale(&rig, body, &inside, &y, 10.0, 0.0);
            scale(&rig, body, &y, &inside, 1.0, 1.0);
            Ok(())
        })
        .unwrap();
    assert_eq!(reused, Some(place));
    let after = rig.captured(&capture, &y, 1.0, 0.5);
    assert_eq!(after.ptr().unwrap(), place);
    capture.end().unwrap();
    for value in [0, 1, 0] {
        set(&rig, &holds, value);
        graph.replay(&rig.stream).unwrap();
        let expected = if value == 1 { 51.0 } else { 0.0 };
        assert_eq!(rig.read(&y), [expected; 4]);
        assert_eq!(rig.read(&after), [expected + 0.5; 4]);
    }
    drop((holds, x, y, after, graph));
    rig.finish();
}

/// What died is dead behind the node whether or not its body ran, and the device says so.
#[test]
fn deaths_inside_hold_under_both_outcomes() {
    for device in common::hosts() {
        let rig = Rig::new(device.clone());
        let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
        let mut graph = Graph::new(&rig.allocator);
        let mut capture = graph.capture(&rig.stream).unwrap();
        let keep = rig.captured(&capture, &x, 1.0, 0.0);
        let outer = rig.captured(&capture, &x, 5.0, 0.0);
        let mut places = vec![outer.ptr().unwrap()];
        capture
            .if_node(&holds, |body| {
                // Not at the place of `outer`.
                let inside = body.alloc(16)?;
                scale(&rig, body, &inside, &outer, 1.0, 0.0);
                drop(outer);
                places.push(inside.ptr()?);
                Ok(())
            })
            .unwrap();
        capture.end().unwrap();
        for value in [0, 1, 0] {
            set(&rig, &holds, value);
            graph.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&keep), [1.0; 4]);
            for place in &places {
                let mut bytes = [0; 16];
                let read = device.read(&rig.stream, &mut bytes, *place).unwrap_err();
                assert_eq!(read.code, Code::IllegalAddress, "{value}: {read}");
                device.clear_fault().unwrap();
            }
        }
        drop((holds, x, keep, graph));
        rig.finish();
    }
}

/// A predicate that nobody owns, at a launch, is a fault like any.
#[test]
fn a_predicate_that_is_dead_faults() {
    let device = HostDevice::new();
    let rig = Rig::new(device.clone());
    let holds = byte(&rig, 1);
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    capture.if_node(&holds, |_| Ok(())).unwrap();
    capture.end().unwrap();
    drop(holds);
    graph.replay(&rig.stream).unwrap();
    let fault = device.synchronize(&rig.stream).unwrap_err().fault.unwrap();
    assert_eq!((fault.kernel.as_str(), fault.bytes), ("if", 1));
    device.clear_fault();
    drop(graph);
    rig.finish();
}

fn what_is_born_in_a_body_dies_in_it<D: Device>(rig: Rig<D>) {
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
    for routed in [false, true] {
        let mut graph = Graph::new(&rig.allocator);
        let mut capture = graph.capture(&rig.stream).unwrap();
        let y = rig.captured(&capture, &x, 1.0, 0.0);
        let mut kept = Vec::new();
        let line = line!();
        let escaped = capture.if_node(&holds, |body| {
            kept.push(body.alloc(16)?);
            kept.push(match routed {
                true => rig.allocator.alloc(body.stream(), 32)?,
                false => body.alloc(32)?,
            });
            Ok(())
        });
        let error = escaped.unwrap_err().downcast::<Error>().unwrap();
        let Error::Escaped { bytes, at, count } = *error else {
            panic!("{error}")
        };
        assert_eq!((bytes, count, at.line()), (16, 2, line + 2));
        // The capture goes on; what was kept is the holder's, as any memory of the pool.
        drop(kept.pop());
        capture.end().unwrap();
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [1.0; 4]);
        rig.put(&kept[0], &[4.0; 4]);
        assert_eq!(rig.read(&kept[0]), [4.0; 4]);
        drop((kept, y, graph));
    }
    drop((holds, x));
    rig.finish();
}

// ---- refusals -------------------------------------------------------------------------------------

fn a_predicate_is_one_byte<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    for (predicate, bytes) in [(x.clone(), 16), (Tensor::empty(), 0)] {
        let error = capture.if_node(&predicate, |_| Ok(())).unwrap_err();
        match error.downcast_ref() {
            Some(Error::Predicate { bytes: asked }) => assert_eq!(*asked, bytes),
            _ => panic!("{error}"),
        }
    }
    capture.if_node(&x.view(3, 1).unwrap(), |_| Ok(())).unwrap();
    capture.end().unwrap();
    assert_eq!(graph.info().unwrap().conditionals, 1);
    drop((x, graph));
    rig.finish();
}

fn ifs_that_cannot_begin<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let holds = byte(&rig, 1);
    let predicate = holds.ptr().unwrap();
    let (s, body, fork) = (
        &rig.stream,
        d.create_stream().unwrap(),
        d.create_stream().unwrap(),
    );
    let refused = |begun: Result<(), DeviceError>| {
        let error = begun.unwrap_err();
        assert_eq!(error.call, Call::BeginIf);
        (error.code, error.position)
    };
    assert_eq!(
        refused(d.begin_if(s, predicate, &body)),
        (Code::IllegalState, None)
    );
    d.begin_capture(s, CaptureMode::ThreadLocal).unwrap();
    // Refused, with a place among the operations, and the capture is left alone.
    assert_eq!(
        refused(d.begin_if(s, DevicePtr::NULL, &body)),
        (Code::InvalidValue, Some(1))
    );
    assert_eq!(
        refused(d.begin_if(s, predicate, s)),
        (Code::IllegalState, Some(2))
    );
    let default = d.default_stream();
    assert_eq!(
        refused(d.begin_if(s, predicate, &default)),
        (Code::StreamCaptureUnsupported, Some(3))
    );
    let event = d.create_event().unwrap();
    d.begin_if(s, predicate, &body).unwrap();
    d.record(&event, &body).unwrap();
    d.wait(&fork, &event).unwrap();
    let inner = d.create_stream().unwrap();
    assert_eq!(
        refused(d.begin_if(&fork, predicate, &inner)),
        (Code::NotSupported, Some(5))
    );
    d.record(&event, &fork).unwrap();
    d.wait(&body, &event).unwrap();
    assert_eq!(
        refused(d.begin_if(&body, predicate, &fork)),
        (Code::IllegalState, Some(6))
    );
    d.end_if(s, &body).unwrap();
    d.end_capture(s).unwrap();
    // In a broken capture.
    d.begin_capture(s, CaptureMode::ThreadLocal).unwrap();
    let waited = d.synchronize(s).unwrap_err();
    let begun = d.begin_if(s, predicate, &body).unwrap_err();
    assert_eq!(
        (begun.code, begun.root()),
        (Code::StreamCaptureInvalidated, &waited)
    );
    assert_eq!(d.capture_status(&body), Ok(CaptureStatus::None));
    d.end_capture(s).unwrap_err();
    drop(holds);
    rig.finish();
}

fn ends_that_fit_no_if<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let holds = byte(&rig, 1);
    let predicate = holds.ptr().unwrap();
    let s = &rig.stream;
    let [body, inner, other] = std::array::from_fn(|_| d.create_stream().unwrap());
    d.begin_capture(s, CaptureMode::ThreadLocal).unwrap();
    d.begin_if(s, predicate, &body).unwrap();
    // No such pair: nothing happens.
    for (stream, body) in [(s, &other), (&other, &body), (&body, s), (s, s)] {
        assert_eq!(d.end_if(stream, body).unwrap_err().code, Code::IllegalState);
        assert_eq!(d.capture_status(s), Ok(CaptureStatus::Active));
    }
    // A body is no capture that can be ended as one.
    let ended = d.end_capture(&body).unwrap_err();
    assert_eq!(ended.code, Code::StreamCaptureUnmatched);
    assert_eq!(d.capture_status(&body), Ok(CaptureStatus::Invalidated));
    let closed = d.end_if(s, &body).unwrap_err();
    assert_eq!(
        (closed.code, closed.root()),
        (Code::StreamCaptureInvalidated, &ended)
    );
    assert_eq!(d.end_capture(s).unwrap_err().root(), &ended);
    // The outer before the inner.
    d.begin_capture(s, CaptureMode::ThreadLocal).unwrap();
    d.begin_if(s, predicate, &body).unwrap();
    d.begin_if(&body, predicate, &inner).unwrap();
    let ended = d.end_if(s, &body).unwrap_err();
    assert_eq!(
        (ended.code, ended.position),
        (Code::StreamCaptureUnjoined, Some(3))
    );
    for stream in [&body, &inner] {
        assert_eq!(d.capture_status(stream), Ok(CaptureStatus::None));
    }
    assert_eq!(d.capture_status(s), Ok(CaptureStatus::Invalidated));
    assert_eq!(d.end_capture(s).unwrap_err().root(), &ended);
    all_is_well(&rig);
    drop(holds);
    rig.finish();
}

fn a_stream_takes_no_work_beside_its_body<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (holds, event) = (byte(&rig, 1), d.create_event().unwrap());
    let predicate = holds.ptr().unwrap();
    let body = d.create_stream().unwrap();
    let calls: [&dyn Fn() -> Result<(), DeviceError>; 5] = [
        &|| rig.kernels.fill(d, &rig.stream, predicate, 0, 0.0),
        &|| d.fill(&rig.stream, predicate, 0, 1),
        &|| d.copy(&rig.stream, predicate, predicate.offset(8), 1),
        &|| d.record(&event, &rig.stream),
        &|| d.wait(&rig.stream, &event),
    ];
    for call in &calls[1..] {
        d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
            .unwrap();
        d.begin_if(&rig.stream, predicate, &body).unwrap();
        let refused = call().unwrap_err();
        assert_eq!(
            (refused.code, refused.position),
            (Code::IllegalState, Some(2))
        );
        assert!(refused.detail.contains("end_if"), "{refused}");
        assert_eq!(d.capture_status(&body), Ok(CaptureStatus::Invalidated));
        assert_eq!(d.end_if(&rig.stream, &body).unwrap_err().root(), &refused);
        assert_eq!(d.end_capture(&rig.stream).unwrap_err().root(), &refused);
    }
    // Reading is refused as ever, and breaks nothing.
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    d.begin_if(&rig.stream, predicate, &body).unwrap();
    for stream in [&rig.stream, &body] {
        let read = d.read(stream, &mut [0], predicate).unwrap_err();
        assert_eq!(read.code, Code::StreamCaptureUnsupported);
    }
    d.end_if(&rig.stream, &body).unwrap();
    d.end_capture(&rig.stream).unwrap();
    all_is_well(&rig);
    drop((holds, event));
    rig.finish();
}

fn forks_of_a_body<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
    let event = d.create_event().unwrap();
    let side = d.create_stream().unwrap();
    let fork = |from: &D::Stream| {
        d.record(&event, from).unwrap();
        d.wait(&side, &event).unwrap();
    };
    let join = |to: &D::Stream| {
        d.record(&event, &side).unwrap();
        d.wait(to, &event)
    };
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let (y, z) = (
        rig.captured(&capture, &x, 0.0, 0.0),
        rig.captured(&capture, &x, 0.0, 0.0),
    );
    capture
        .if_node(&holds, |body| {
            // Around an inner if, and again after it.
            for _ in 0..2 {
                fork(body.stream());
                rig.kernels.increment(d, body.stream(), y.ptr()?, 4, 1.0)?;
                rig.kernels.increment(d, &side, z.ptr()?, 4, 2.0)?;
                join(body.stream())?;
                body.if_node(&holds, |inner| {
                    Ok(rig
                        .kernels
                        .add(d, inner.stream(), y.ptr()?, y.ptr()?, z.ptr()?, 4)?)
                })?;
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(
        d.capture_status(&side),
        Ok(CaptureStatus::None),
        "it left with the body"
    );
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    // 1, +2; +1, +4.
    assert_eq!((rig.read(&y), rig.read(&z)), (vec![8.0; 4], vec![4.0; 4]));
    graph.reset();

    // Not joined: at the body's end, and at an inner if.
    for inner in [false, true] {
        let mut capture = graph.capture(&rig.stream).unwrap();
        let ended = capture.if_node(&holds, |body| {
            fork(body.stream());
            d.fill(&side, z.ptr()?, 0, 16)?;
            match inner {
                true => body.if_node(&holds, |_| Ok(())),
                false => Ok(()),
            }
        });
        let ended = device_error(ended.unwrap_err());
        assert_eq!(ended.code, Code::StreamCaptureUnjoined, "{ended}");
        let Err(Error::Device(error)) = capture.end() else {
            panic!("a broken capture gave a graph")
        };
        assert_eq!(error.root(), ended.root());
        assert_eq!(d.capture_status(&side), Ok(CaptureStatus::None));
    }
    // Events of outside, and of before an inner if.
    for inner in [false, true] {
        let mut capture = graph.capture(&rig.stream).unwrap();
        d.record(&event, if inner { &side } else { capture.stream() })
            .unwrap();
        let mut waited = None;
        let ended = capture.if_node(&holds, |body| {
            if inner {
                d.record(&event, body.stream())?;
                d.fill(body.stream(), z.ptr()?, 0, 16)?;
                body.if_node(&holds, |_| Ok(()))?;
            }
            waited = d.wait(body.stream(), &event).err();
            Ok(())
        });
        let waited = waited.unwrap();
        let code = match inner {
            true => Code::InvalidValue,
            false => Code::StreamCaptureMerge,
        };
        assert_eq!(waited.code, code);
        assert_eq!(device_error(ended.unwrap_err()).root(), &waited);
        capture.end().unwrap_err();
        graph.reset();
    }
    all_is_well(&rig);
    drop((holds, x, y, z, event, graph));
    rig.finish();
}

fn what_a_body_does_not_take<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
    // A gather is refused at once, and breaks nothing.
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &x, 0.0, 0.0);
    capture
        .if_node(&holds, |body| {
            let slot = GatherSlot {
                dst: y.ptr()?,
                bytes: 16,
            };
            let refused = d.gather(body.stream(), &[slot], &[x.ptr()?]).unwrap_err();
            assert_eq!(
                (refused.code, refused.position),
                (Code::NotSupported, Some(3))
            );
            Ok(())
        })
        .unwrap();
    capture.end().unwrap();
    drop((holds, x, y, graph));
    rig.finish();
}

/// Memory nodes and host functions, which no driver takes there.
#[test]
fn nodes_that_no_body_may_hold() {
    let device = HostDevice::new();
    let rig = Rig::new(device.clone());
    let holds = byte(&rig, 1);
    for what in 0..3 {
        let mut graph = Graph::new(&rig.allocator);
        let mut capture = graph.capture(&rig.stream).unwrap();
        let ended = capture.if_node(&holds, |body| {
            match what {
                0 => drop(device.mem_alloc_async(body.stream(), 4)?),
                1 => device.launch_host_func(body.stream(), || ())?,
                _ => {
                    let event = device.create_event()?;
                    device.wait_external(body.stream(), &event)?;
                }
            }
            Ok(())
        });
        let ended = device_error(ended.unwrap_err());
        assert_eq!((ended.call, ended.code), (Call::EndIf, Code::NotSupported));
        let Err(Error::Device(error)) = capture.end() else {
            panic!("a broken capture gave a graph")
        };
        assert_eq!(error.root(), &ended);
    }
    drop(holds);
    rig.finish();
}

fn errors_and_panics_of_a_body<D: Device>(rig: Rig<D>) {
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
    let mut graph = Graph::new(&rig.allocator);
    for nested in [false, true] {
        // An error: the body keeps what it had, and the capture goes on.
        let mut capture = graph.capture(&rig.stream).unwrap();
        let y = rig.captured(&capture, &x, 0.0, 0.0);
        let fails = |body: &mut IfBody<'_, D>| -> Result<(), BoxError> {
            let temporary = body.alloc(16)?;
            scale(&rig, body, &temporary, &x, 4.0, 0.0);
            scale(&rig, body, &y, &temporary, 1.0, 0.0);
            Err("on purpose".into())
        };
        let error = capture.if_node(&holds, |body| match nested {
            true => body.if_node(&holds, fails),
            false => fails(body),
        });
        assert_eq!(error.unwrap_err().to_string(), "on purpose");
        capture.end().unwrap();
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [4.0; 4]);
        graph.reset();
        drop(y);
        // A panic: the capture is abandoned, and everything is as before.
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut capture = graph.capture(&rig.stream).unwrap();
            let panics = |body: &mut IfBody<'_, D>| -> Result<(), BoxError> {
                let _temporary = body.alloc(16)?;
                std::panic::resume_unwind(Box::new("on purpose"))
            };
            let _ = capture.if_node(&holds, |body| match nested {
                true => body.if_node(&holds, panics),
                false => panics(body),
            });
        }));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"on purpose"));
        rig.allocator.trim().unwrap();
        assert_eq!(rig.allocator.private_pools().len(), 1, "the tree's");
        let before = rig.allocator.stats().live_blocks.current;
        let eager = rig.floats(&[0.0]);
        assert_eq!(rig.allocator.stats().live_blocks.current, before + 1);
        drop(eager);
        all_is_well(&rig);
    }
    drop((holds, x, graph));
    rig.finish();
}

fn every_mode<D: Device>(rig: Rig<D>) {
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
    for mode in MODES {
        let mut graph = Graph::new(&rig.allocator);
        let mut capture = graph
            .capture_with(&rig.stream, CaptureOptions { pool: None, mode })
            .unwrap();
        let y = rig.captured(&capture, &x, 0.0, 0.0);
        capture
            .if_node(&holds, |body| {
                // New memory of the device, in the body.
                let big = body.alloc(64 << 20)?;
                scale(&rig, body, &big.view(0, 16)?, &x, 2.0, 0.0);
                scale(&rig, body, &y, &big.view(0, 16)?, 2.0, 0.0);
                Ok(())
            })
            .unwrap();
        capture.end().unwrap();
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [4.0; 4]);
    }
    drop((holds, x));
    rig.finish();
}

// ---- calls that are made to fail ------------------------------------------------------------------

/// Each call that an if makes fails once: the error is that, and everything works afterwards.
#[test]
fn every_call_of_an_if_fails_once() {
    for call in [
        Call::CreateStream,
        Call::BeginIf,
        Call::EndIf,
        Call::Launch,
        Call::Map,
    ] {
        for invalidating in [false, true] {
            let rig = Rig::new(Faulty::new(HostDevice::new()));
            let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
            let mut graph = Graph::new(&rig.allocator);
            let mut capture = graph.capture(&rig.stream).unwrap();
            let y = rig.captured(&capture, &x, 0.0, 0.0);
            match invalidating {
                true => rig.device.fail_invalidating(call, 1, Code::OutOfMemory),
                false => rig.device.fail(call, 1, Code::OutOfMemory),
            };
            let made = capture.if_node(&holds, |body| {
                let big = body.alloc(64 << 20)?;
                let (to, from) = (big.ptr()?, x.ptr()?);
                rig.kernels
                    .scale_add(body.device(), body.stream(), to, from, 4, 2.0, 0.0)?;
                Ok(())
            });
            let error = made.unwrap_err();
            let broken = match error.downcast_ref() {
                Some(Error::Pool(PoolError::OutOfMemory { .. })) => call != Call::Map,
                _ => {
                    let error = device_error(error);
                    assert_eq!((error.call, error.code), (call, Code::OutOfMemory));
                    // No stream is created on one that captures.
                    call == Call::EndIf || (invalidating && call != Call::CreateStream)
                }
            };
            assert_eq!(capture.end().is_err(), broken, "{call:?} {invalidating}");
            drop((holds, x, y, graph));
            all_is_well(&rig);
            rig.finish();
        }
    }
    // The adaptor's counts.
    let device = wrapped();
    let rig = Rig::new(device.clone());
    all_is_well(&rig);
    assert_eq!(
        (device.calls(Call::BeginIf), device.calls(Call::EndIf)),
        (1, 1)
    );
    rig.finish();
}

/// The picture of a body is a cluster behind its if, with the body's nodes and their order.
#[test]
fn a_picture_has_the_bodies() {
    let rig = Rig::new(HostDevice::new());
    let d = &rig.device;
    let (holds, x) = (byte(&rig, 1), rig.floats(&[1.0; 4]));
    let (predicate, to) = (holds.ptr().unwrap(), x.ptr().unwrap());
    let [body, inner] = std::array::from_fn(|_| d.create_stream().unwrap());
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    d.begin_if(&rig.stream, predicate, &body).unwrap();
    d.fill(&body, to, 1, 4).unwrap();
    d.begin_if(&body, predicate, &inner).unwrap();
    d.fill(&inner, to, 2, 4).unwrap();
    d.end_if(&body, &inner).unwrap();
    d.end_if(&rig.stream, &body).unwrap();
    d.fill(&rig.stream, to, 3, 4).unwrap();
    let graph = d.end_capture(&rig.stream).unwrap();
    let picture = d.graph_dot(&graph).unwrap();
    let lines: Vec<&str> = picture.lines().map(str::trim).collect();
    let starts = |line: &str, start: &str| line.starts_with(start);
    let expected = [
        "digraph graph_0 {",
        "n0 [label=\"conditional if the byte at",
        "subgraph cluster_n0 {",
        "n0_0 [label=\"memset",
        "n0_1 [label=\"conditional if the byte at",
        "subgraph cluster_n0_1 {",
        "n0_1_0 [label=\"memset",
        "}",
        "n0_0 -> n0_1;",
        "}",
        "n1 [label=\"memset",
        "n0 -> n1;",
        "}",
    ];
    assert_eq!(lines.len(), expected.len(), "{picture}");
    for (line, start) in lines.iter().zip(expected) {
        assert!(starts(line, start), "{line} for {start} in {picture}");
    }
    drop((graph, holds, x));
    rig.finish();
}
