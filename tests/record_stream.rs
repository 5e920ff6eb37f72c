//! Memory that is in use on other streams than its own is not used again before that work is done.
mod common;

use common::{Rig, on_cuda};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{CaptureMode, CaptureStatus, Code, Device, DeviceError};
use cudagraph_trees::pool::{PoolError, Unclaimed};
use cudagraph_trees::{
    CaptureOptions, Error, FunctionSpec, Graph, Phase, PoolOptions, Tensor, lend,
};

suite!(
    stream_07_a_block_is_not_reused_before_the_other_stream_is_done,
    stream_08_through_a_view_the_whole_storage_is_kept,
    stream_06_a_use_from_before_is_pending_while_something_captures,
    stream_10_used_on_a_fork_and_freed_inside_a_capture,
    stream_12_the_next_graph_of_a_shared_pool_has_it_again,
    stream_14_in_a_routed_pool_without_a_capture,
    t4_07_used_by_a_capture_and_freed_inside_it,
    ckpt_16_a_restore_is_refused_while_a_dead_block_is_in_use,
    the_next_run_waits_for_the_stream_that_reads_an_output,
    a_function_that_forks_and_frees_what_the_fork_uses,
    what_is_said_of_a_stale_output_is_an_error,
    a_run_after_one_on_a_stream_that_captures_now_is_refused,
    a_tree_ends_while_a_stream_of_its_runs_captures,
);

/// Makes `other` late: it comes to copy `from` only after many kernels, and after what `stream` was given so far.
fn copy_late<D: Device>(
    rig: &Rig<D>,
    other: &D::Stream,
    busy: &Tensor<D>,
    to: &Tensor<D>,
    from: &Tensor<D>,
) {
    let event = rig.device.create_event().unwrap();
    rig.device.record(&event, &rig.stream).unwrap();
    rig.device.wait(other, &event).unwrap();
    for _ in 0..50 {
        let ptr = busy.ptr().unwrap();
        rig.kernels
            .increment(&rig.device, other, ptr, 16, 1.0)
            .unwrap();
    }
    rig.scale_into(other, to, from, 1.0, 0.0);
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

/// A device with memory for a few blocks of 4 MiB, each a segment of its own.
fn small(seed: u64) -> Rig<HostDevice> {
    let device = HostDevice::builder().memory(24 << 20).seed(seed).build();
    Rig::new(device.unwrap())
}

const BLOCK: u64 = 4 << 20;

#[test]
fn stream_09_what_waits_for_another_stream_is_waited_for_where_the_device_has_no_more() {
    for seed in 0..4 {
        let rig = small(seed);
        let d = &rig.device;
        let sides = [d.create_stream().unwrap(), d.create_stream().unwrap()];
        let busy = rig.floats(&[0.0; 16]);
        let sums: Vec<_> = (0..100).map(|_| rig.floats(&[0.0; 4])).collect();
        d.synchronize(&rig.stream).unwrap();
        for (round, sum) in sums.iter().enumerate() {
            let x = rig.allocator.alloc(&rig.stream, BLOCK).unwrap();
            rig.put(&x.view(0, 16).unwrap(), &[round as f32; 4]);
            let side = &sides[round % 2];
            copy_late(&rig, side, &busy, sum, &x);
            x.record_stream(side).unwrap();
        }
        assert!(d.counts().mapped_bytes <= 24 << 20);
        for side in &sides {
            d.synchronize(side).unwrap();
        }
        for (round, sum) in sums.iter().enumerate() {
            assert_eq!(rig.read(sum), [round as f32; 4], "seed {seed}");
        }
        drop((busy, sums));
        rig.finish();
    }
}

/// Of a private pool, which gives nothing back, as of the default pool; and what others capture meanwhile is not broken by the wait.
#[test]
fn stream_09_in_a_private_pool_beside_a_capture_of_others() {
    for mode in [
        CaptureMode::Global,
        CaptureMode::ThreadLocal,
        CaptureMode::Relaxed,
    ] {
        let rig = small(3);
        let d = &rig.device;
        let (side, theirs) = (d.create_stream().unwrap(), d.create_stream().unwrap());
        let (busy, copy) = (rig.floats(&[0.0; 16]), rig.floats(&[0.0; 4]));
        let pool = rig.allocator.create_pool(PoolOptions::default()).unwrap();
        d.begin_capture(&theirs, mode).unwrap();
        for _ in 0..20 {
            let x = pool.alloc(&rig.stream, BLOCK).unwrap();
            d.fill(&rig.stream, x.ptr().unwrap(), 0, 16).unwrap();
            copy_late(&rig, &side, &busy, &copy, &x);
            x.record_stream(&side).unwrap();
        }
        assert_eq!(d.capture_status(&theirs), Ok(CaptureStatus::Active));
        drop(d.end_capture(&theirs).unwrap());
        d.synchronize(&side).unwrap();
        drop((busy, copy, pool));
        // Looks once more at what is dead.
        rig.allocator.trim().unwrap();
        rig.finish();
    }
}

#[test]
fn stream_09_nothing_is_waited_for_while_something_captures() {
    let rig = small(3);
    let d = &rig.device;
    let side = d.create_stream().unwrap();
    let (busy, copy) = (rig.floats(&[0.0; 16]), rig.floats(&[0.0; 4]));
    let take = || rig.allocator.alloc(&rig.stream, BLOCK);
    let mut dead = Vec::new();
    while let Ok(x) = take() {
        d.fill(&rig.stream, x.ptr().unwrap(), 0, 16).unwrap();
        dead.push(x);
    }
    for x in dead.drain(..) {
        copy_late(&rig, &side, &busy, &copy, &x);
        x.record_stream(&side).unwrap();
    }
    let input = rig.floats(&[3.0; 4]);
    d.synchronize(&rig.stream).unwrap();
    let third = d.create_stream().unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&third).unwrap();
    let refused = take().map(drop);
    assert!(
        matches!(refused, Err(Error::Pool(PoolError::OutOfMemory { .. }))),
        "{refused:?}"
    );
    assert_eq!(d.capture_status(&third), Ok(CaptureStatus::Active));
    capture.end().unwrap();
    // Afterwards it is, and there is memory.
    drop((take().unwrap(), busy, copy, input, graph));
    d.synchronize_device().unwrap();
    rig.finish();
}

/// What `other` read of a tensor whose memory was dropped and allocated again meanwhile.
fn read_while_dropped<D: Device>(rig: &Rig<D>, said: bool) -> Result<Vec<f32>, Error> {
    let other = rig.device.create_stream().unwrap();
    let busy = rig.floats(&[0.0; 16]);
    let copy = rig.floats(&[0.0; 1024]);
    let x = rig.floats(&[5.0; 1024]);
    copy_late(rig, &other, &busy, &copy, &x);
    if said {
        x.record_stream(&other).unwrap();
    }
    drop(x);
    let next = rig.floats(&[-1.0; 1024]);
    let bytes = copy.read(&rig.device, &other);
    rig.device.synchronize(&rig.stream)?;
    drop(next);
    Ok(floats(&bytes?))
}

fn stream_07_a_block_is_not_reused_before_the_other_stream_is_done<D: Device>(rig: Rig<D>) {
    assert_eq!(read_while_dropped(&rig, true).unwrap(), [5.0; 1024]);
    // By address: another block while `other` is busy, the same one afterwards.
    let other = rig.device.create_stream().unwrap();
    let (busy, copy) = (rig.floats(&[0.0; 16]), rig.floats(&[0.0; 16]));
    let x = rig.floats(&[5.0; 16]);
    let ptr = x.ptr().unwrap();
    copy_late(&rig, &other, &busy, &copy, &x);
    x.record_stream(&other).unwrap();
    drop(x);
    let live = rig.allocator.stats().live_blocks.current;
    if !on_cuda() {
        assert_eq!(live, 3); // busy, copy, and the dead one
        let y = rig.allocator.alloc(&rig.stream, 64).unwrap();
        assert_ne!(y.ptr().unwrap(), ptr);
    }
    rig.device.synchronize(&other).unwrap();
    let z = rig.allocator.alloc(&rig.stream, 64).unwrap();
    assert_eq!(z.ptr().unwrap(), ptr);
    drop((busy, copy, z));
    rig.finish();
}

/// Without the word, some schedule of the simulated device overwrites what the other stream has not read yet.
#[test]
fn without_record_stream_bytes_are_wrong_in_some_schedule() {
    let wrong = (0..16).filter(|seed| {
        let device = HostDevice::builder().seed(*seed).build().unwrap();
        let rig = Rig::new(device);
        !matches!(read_while_dropped(&rig, false), Ok(values) if values == [5.0; 1024])
    });
    assert!(wrong.count() > 0);
    for seed in 0..16 {
        let device = HostDevice::builder().seed(seed).build().unwrap();
        let rig = Rig::new(device);
        assert_eq!(read_while_dropped(&rig, true).unwrap(), [5.0; 1024]);
        assert_eq!(read_output_late(&rig, true).unwrap(), [6.0; 1024]);
    }
}

fn stream_08_through_a_view_the_whole_storage_is_kept<D: Device>(rig: Rig<D>) {
    let other = rig.device.create_stream().unwrap();
    let (busy, copy) = (rig.floats(&[0.0; 16]), rig.floats(&[0.0; 16]));
    let x = rig.floats(&[5.0; 1024]);
    let ptr = x.ptr().unwrap();
    let view = x.view(2048, 64).unwrap();
    copy_late(&rig, &other, &busy, &copy, &view);
    view.record_stream(&other).unwrap();
    drop((x, view));
    if !on_cuda() {
        let y = rig.allocator.alloc(&rig.stream, 4096).unwrap();
        assert_ne!(y.ptr().unwrap(), ptr);
    }
    rig.device.synchronize(&other).unwrap();
    let z = rig.allocator.alloc(&rig.stream, 4096).unwrap();
    assert_eq!(z.ptr().unwrap(), ptr);
    drop((busy, copy, z));
    rig.finish();
}

fn stream_06_a_use_from_before_is_pending_while_something_captures<D: Device>(rig: Rig<D>) {
    let other = rig.device.create_stream().unwrap();
    let (busy, copy) = (rig.floats(&[0.0; 16]), rig.floats(&[0.0; 16]));
    let before = rig.floats(&[5.0; 16]);
    let input = rig.floats(&[3.0; 16]);
    copy_late(&rig, &other, &busy, &copy, &before);
    before.record_stream(&other).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    // Dies inside the capture; every allocation here looks whether it is free by now, and breaks nothing.
    drop(before);
    let mut held = Vec::new();
    for i in 0..4 {
        held.push(rig.captured(&capture, &input, 1.0, i as f32));
        let eager = rig.allocator.alloc(&other, 64).unwrap();
        drop(eager);
    }
    assert_eq!(
        rig.device.capture_status(&rig.stream),
        Ok(CaptureStatus::Active)
    );
    capture.end().unwrap();
    rig.device.synchronize(&other).unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&held[3]), [6.0; 16]);
    assert_eq!(floats(&copy.read(&rig.device, &other).unwrap()), [5.0; 16]);
    drop((busy, copy, input, held, graph));
    rig.device.synchronize_device().unwrap();
    rig.finish();
}

fn stream_10_used_on_a_fork_and_freed_inside_a_capture<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let side = d.create_stream().unwrap();
    let (fork, join) = (d.create_event().unwrap(), d.create_event().unwrap());
    let x = rig.floats(&[2.0; 16]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let data = rig.captured(&capture, &x, 3.0, 0.0);
    let out = capture.alloc(64).unwrap();
    d.record(&fork, &rig.stream).unwrap();
    d.wait(&side, &fork).unwrap();
    rig.scale_into(&side, &out, &data, 1.0, 1.0);
    data.record_stream(&side).unwrap();
    let ptr = data.ptr().unwrap();
    drop(data);
    // The fork reads it still, as far as the order of the graph says.
    let second = rig.captured(&capture, &x, 10.0, 0.0);
    assert_ne!(second.ptr().unwrap(), ptr);
    d.record(&join, &side).unwrap();
    d.wait(&rig.stream, &join).unwrap();
    capture.end().unwrap();
    for _ in 0..3 {
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&out), [7.0; 16]);
        assert_eq!(rig.read(&second), [20.0; 16]);
    }
    // With the capture's end it is free.
    assert_eq!(graph.pool().unwrap().stats().live_blocks.current, 2);
    drop((x, out, second, graph));
    rig.finish();
}

fn stream_12_the_next_graph_of_a_shared_pool_has_it_again<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let side = d.create_stream().unwrap();
    let (fork, join) = (d.create_event().unwrap(), d.create_event().unwrap());
    let pool = rig.allocator.create_pool(PoolOptions::default()).unwrap();
    let mut graphs = Vec::new();
    let mut places = Vec::new();
    for _ in 0..2 {
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions {
            pool: Some(pool.clone()),
            mode: CaptureMode::ThreadLocal,
        };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        let data = capture.alloc(8 << 20).unwrap();
        d.record(&fork, &rig.stream).unwrap();
        d.wait(&side, &fork).unwrap();
        d.fill(&side, data.ptr().unwrap(), 1, 64).unwrap();
        data.record_stream(&side).unwrap();
        d.record(&join, &side).unwrap();
        d.wait(&rig.stream, &join).unwrap();
        places.push(data.ptr().unwrap());
        drop(data);
        capture.end().unwrap();
        graphs.push(graph);
    }
    assert_eq!(places[0], places[1]);
    drop((pool, graphs));
    rig.finish();
}

fn stream_14_in_a_routed_pool_without_a_capture<D: Device>(rig: Rig<D>) {
    let pool = rig.allocator.create_pool(PoolOptions::default()).unwrap();
    let other = rig.device.create_stream().unwrap();
    let (busy, copy) = (rig.floats(&[0.0; 16]), rig.floats(&[0.0; 16]));
    let route = rig.allocator.route_thread(&pool).unwrap();
    let x = rig.floats(&[5.0; 16]);
    let ptr = x.ptr().unwrap();
    copy_late(&rig, &other, &busy, &copy, &x);
    x.record_stream(&other).unwrap();
    drop(x);
    rig.device.synchronize(&other).unwrap();
    let y = rig.allocator.alloc(&rig.stream, 64).unwrap();
    assert_eq!(y.ptr().unwrap(), ptr);
    drop((route, y, busy, copy, pool));
    rig.finish();
}

fn t4_07_used_by_a_capture_and_freed_inside_it<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let default = d.default_stream();
    let a = rig.allocator.alloc(&default, 64).unwrap();
    a.write(d, &default, &[0; 64]).unwrap();
    d.synchronize(&default).unwrap();
    let ptr = a.ptr().unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, &a, 3.0, 1.0);
    a.record_stream(&rig.stream).unwrap();
    drop(a);
    // The capture has it: it is nobody else's before that has ended, and nobody asks the captured stream for events.
    let b = rig.allocator.alloc(&default, 64).unwrap();
    assert_ne!(b.ptr().unwrap(), ptr);
    assert_eq!(d.capture_status(&rig.stream), Ok(CaptureStatus::Active));
    capture.end().unwrap();
    let c = rig.allocator.alloc(&default, 64).unwrap();
    assert_eq!(c.ptr().unwrap(), ptr);
    c.write(d, &default, &[0; 64]).unwrap();
    d.synchronize(&default).unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [1.0; 16]);
    drop((b, c, y, graph));
    rig.finish();
}

fn ckpt_16_a_restore_is_refused_while_a_dead_block_is_in_use<D: Device>(rig: Rig<D>) {
    let pool = rig.allocator.create_pool(PoolOptions::default()).unwrap();
    let other = rig.device.create_stream().unwrap();
    let (busy, copy) = (rig.floats(&[0.0; 16]), rig.floats(&[0.0; 16]));
    let empty = pool.checkpoint();
    let x = pool.alloc(&rig.stream, 64).unwrap();
    rig.put(&x, &[5.0; 16]);
    copy_late(&rig, &other, &busy, &copy, &x);
    x.record_stream(&other).unwrap();
    drop(x);
    if !on_cuda() {
        let refused = pool.restore(&rig.stream, &empty, &[], Unclaimed::Free);
        match refused {
            Err(Error::UsedElsewhere { pool: id, blocks }) => {
                assert_eq!((id, blocks), (pool.id(), 1));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(pool.stats().live_blocks.current, 1);
    }
    rig.device.synchronize(&other).unwrap();
    let restored = pool
        .restore(&rig.stream, &empty, &[], Unclaimed::Free)
        .unwrap();
    assert_eq!((restored.kept, restored.orphaned.len()), (0, 0));
    assert_eq!(pool.stats().live_blocks.current, 0);
    drop((busy, copy, pool));
    rig.finish();
}

/// What `other` read of an output that was dropped, its step ended, and its memory written by the next replay meanwhile.
fn read_output_late<D: Device>(rig: &Rig<D>, said: bool) -> Result<Vec<f32>, Error> {
    let f = rig.scale_add("f", 1.0, 1.0);
    let other = rig.device.create_stream().unwrap();
    let busy = rig.floats(&[0.0; 16]);
    let copy = rig.floats(&[0.0; 1024]);
    let (x, late) = (rig.floats(&[5.0; 1024]), rig.floats(&[-9.0; 1024]));
    for phase in [Phase::Warmup, Phase::Record, Phase::Replay] {
        let step = rig.trees.step();
        let (went, _) = rig.phased(&f, &step, &x);
        assert_eq!(went, phase);
    }
    let step = rig.trees.step();
    let out = rig.one(&f, &step, &x);
    copy_late(rig, &other, &busy, &copy, &out);
    if said {
        out.record_stream(&other).unwrap();
    }
    drop((out, step));
    let step = rig.trees.step();
    let next = rig.one(&f, &step, &late);
    let bytes = copy.read(&rig.device, &other);
    let values = rig.try_read(&next)?;
    assert_eq!(values, [-8.0; 1024]);
    Ok(floats(&bytes?))
}

fn the_next_run_waits_for_the_stream_that_reads_an_output<D: Device>(rig: Rig<D>) {
    for _ in 0..3 {
        assert_eq!(read_output_late(&rig, true).unwrap(), [6.0; 1024]);
    }
    rig.finish();
}

#[test]
fn without_record_stream_a_replay_overtakes_a_reader_in_some_schedule() {
    let wrong = (0..16).filter(|seed| {
        let device = HostDevice::builder().seed(*seed).build().unwrap();
        let rig = Rig::new(device);
        !matches!(read_output_late(&rig, false), Ok(values) if values == [6.0; 1024])
    });
    assert!(wrong.count() > 0);
}

fn a_function_that_forks_and_frees_what_the_fork_uses<D: Device>(rig: Rig<D>) {
    let side = rig.device.create_stream().unwrap();
    let places = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = places.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let d = rec.device().clone();
        let (fork, join) = (d.create_event()?, d.create_event()?);
        let x = inputs.get(0)?;
        let a = k.apply(rec, x, 2.0, 0.0)?;
        let out = rec.alloc(a.bytes())?;
        d.record(&fork, rec.stream())?;
        d.wait(&side, &fork)?;
        let n = a.bytes() / 4;
        k.kernels
            .scale_add(&d, &side, out.ptr()?, a.ptr()?, n, 1.0, 1.0)?;
        a.record_stream(&side)?;
        let before = a.ptr()?;
        drop(a);
        let b = k.apply(rec, x, 100.0, 0.0)?;
        seen.lock().unwrap().push((before, b.ptr()?));
        d.record(&join, &side)?;
        d.wait(rec.stream(), &join)?;
        let sum = k.sum(rec, &out, &b)?;
        Ok(vec![sum])
    });
    for round in 0..5 {
        let x = rig.floats(&[round as f32; 1024]);
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        assert_eq!(rig.read(&out), [102.0 * round as f32 + 1.0; 1024]);
        // In the books is the output alone.
        if round < 2 {
            assert_eq!(rig.blocks(), 1);
        }
        rig.trees.audit().unwrap();
    }
    let places = places.lock().unwrap();
    assert_eq!(places.len(), 2);
    assert!(places.iter().all(|(a, b)| a != b), "{places:?}");
    assert_eq!(places[0], places[1]);
    drop(places);
    rig.finish();
}

fn what_is_said_of_a_stale_output_is_an_error<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let other = rig.device.create_stream().unwrap();
    let x = rig.floats(&[1.0; 16]);
    let first = rig.one(&f, &rig.trees.step(), &x);
    let step = rig.trees.step();
    let second = rig.one(&f, &step, &x);
    assert!(matches!(
        first.record_stream(&other),
        Err(Error::Stale(stale)) if stale.taken_by.as_deref() == Some("f")
    ));
    Tensor::<D>::empty().record_stream(&other).unwrap();
    second.record_stream(&other).unwrap();
    assert_eq!(rig.read(&second), [2.0; 16]);
    drop((x, first, second));
    rig.finish();
}

/// The run would have to wait for work that has no place outside of the capture any more; it says so, and joins no capture.
fn a_run_after_one_on_a_stream_that_captures_now_is_refused<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let f = rig.scale_add("f", 1.0, 1.0);
    let other = d.create_stream().unwrap();
    let x = rig.floats(&[1.0; 16]);
    d.synchronize(&rig.stream).unwrap();
    let step = rig.trees.step();
    let out = rig
        .trees
        .run(&f, &step, &[], &other, &mut [lend(&x)])
        .unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&other).unwrap();
    let refused = rig
        .trees
        .run(&f, &step, &[], &rig.stream, &mut [lend(&out[0])]);
    match refused {
        Err(Error::Device(DeviceError { code, .. })) => {
            assert_eq!(code, Code::StreamCaptureIsolation);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(d.capture_status(&rig.stream), Ok(CaptureStatus::None));
    assert_eq!(d.capture_status(&other), Ok(CaptureStatus::Active));
    capture.end().unwrap();
    let second = rig.one(&f, &step, &out[0]);
    assert_eq!(rig.read(&second), [3.0; 16]);
    drop((x, out, second, graph));
    rig.finish();
}

fn a_tree_ends_while_a_stream_of_its_runs_captures<D: Device>(rig: Rig<D>) {
    let d = rig.device.clone();
    let f = rig.scale_add("f", 1.0, 1.0);
    let other = d.create_stream().unwrap();
    let x = rig.floats(&[1.0; 16]);
    d.synchronize(&rig.stream).unwrap();
    let step = rig.trees.step();
    for stream in [&rig.stream, &other, &rig.stream] {
        let mut args = [lend(&x)];
        let out = rig.trees.run(&f, &step, &[], stream, &mut args).unwrap();
        out[0].record_stream(&other).unwrap();
    }
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&other).unwrap();
    let y = rig.captured(&capture, &x, 4.0, 0.0);
    rig.trees.shutdown().unwrap();
    assert_eq!(d.capture_status(&other), Ok(CaptureStatus::Active));
    assert_eq!(d.capture_status(&rig.stream), Ok(CaptureStatus::None));
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [4.0; 16]);
    drop((x, y, graph, step));
    rig.finish();
}
