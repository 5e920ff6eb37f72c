//! Pinned host memory: the cache, copies that run when the device comes to them, and buffers that belong to a graph.
//! Names carry the catalogues' ids.
mod common;

use std::sync::Mutex;
use std::thread;

use common::{Rig, on_cuda, one_by_one, wrapped};
use cudagraph_trees::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, PinnedMemory,
};
use cudagraph_trees::{
    CaptureOptions, Error, FunctionSpec, Graph, Phase, PinnedBuffer, PinnedConfig, Reason, lend,
};

suite!(
    host_02_a_buffer_that_nothing_used_is_reused_in_its_capture,
    host_03_a_buffer_that_a_captured_copy_reads_is_the_graphs,
    host_04_two_graphs_of_one_pool,
    host_05_pageable_copies_are_refused_and_pinned_ones_are_not,
    host_06_sizes_reuse_and_figures,
    host_06_a_buffer_is_not_reused_before_its_copies_have_run,
    host_07_limits_of_rounding_and_caching,
    t6_04_the_staging_of_a_recording_is_nobody_elses,
    t6_04_what_a_graph_only_writes_is_the_graphs_too,
    t6_04_the_staging_of_a_single_graph,
    each_replay_reads_what_was_filled_in_before,
    each_replay_writes_what_is_read_afterwards,
    a_graph_on_several_streams_is_waited_for_on_each,
    copies_run_in_order_with_the_bytes_of_their_time,
    the_host_does_not_touch_what_its_capture_copies,
    a_recording_that_cannot_be_as_the_warmup_is_given_up,
    a_failed_recording_lets_go,
    captures_of_others_keep_it_for_good,
    a_run_inside_a_graphs_capture_is_the_graphs,
    a_forked_stream_copies_for_its_graph,
    no_capture_is_touched,
    no_launch_reads_half_a_write,
    ranges_streams_and_handles,
    an_allocator_ends_with_copies_underway,
);

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A pinned buffer of these values.
#[track_caller]
fn pinned<D: Device>(rig: &Rig<D>, values: &[f32]) -> PinnedBuffer<D> {
    let buffer = rig.allocator.alloc_pinned(4 * values.len() as u64).unwrap();
    buffer.write(0, &bytes(values)).unwrap();
    buffer
}

/// Allocates more pinned memory of a size than is cached, writes it over, and says whether `address` was among it.
#[track_caller]
fn others_get<D: Device>(rig: &Rig<D>, size: u64, address: usize) -> bool {
    let cached = rig.allocator.pinned_stats().blocks.current;
    let all: Vec<_> = (0..=cached)
        .map(|_| rig.allocator.alloc_pinned(size).unwrap())
        .collect();
    for buffer in &all {
        buffer.write(0, &vec![0xEE; size as usize]).unwrap();
    }
    all.iter().any(|b| b.address() == address)
}

/// The device's work is over, and the cache has seen it.
#[track_caller]
fn settle<D: Device>(rig: &Rig<D>) {
    rig.device.quiesce().unwrap();
    assert_eq!(rig.allocator.pinned_stats().waiting, 0);
}

/// Nothing pinned is left when the cache is emptied.
#[track_caller]
fn nothing_pinned<D: Device>(rig: &Rig<D>) {
    settle(rig);
    rig.allocator.trim_pinned();
    let stats = rig.allocator.pinned_stats();
    assert_eq!(
        (stats.live_blocks.current, stats.reserved_bytes.current),
        (0, 0)
    );
}

fn host_02_a_buffer_that_nothing_used_is_reused_in_its_capture<D: Device>(rig: Rig<D>) {
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let first = pinned(&rig, &[1.0; 8]);
    let kept = pinned(&rig, &[2.0; 8]);
    assert_ne!(first.address(), kept.address());
    let address = first.address();
    drop(first);
    let second = pinned(&rig, &[3.0; 8]);
    assert_eq!(second.address(), address);
    capture.end().unwrap();
    drop((second, kept, graph));
    nothing_pinned(&rig);
    rig.finish();
}

fn host_03_a_buffer_that_a_captured_copy_reads_is_the_graphs<D: Device>(rig: Rig<D>) {
    let out = rig.floats(&[0.0; 8]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let buffer = pinned(&rig, &[5.0; 8]);
    out.copy_from_pinned(capture.stream(), &buffer, 0).unwrap();
    let address = buffer.address();
    drop(buffer);
    assert!(!others_get(&rig, 32, address));
    capture.end().unwrap();
    assert!(!others_get(&rig, 32, address));
    for _ in 0..3 {
        rig.put(&out, &[0.0; 8]);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&out), [5.0; 8]);
        assert!(!others_get(&rig, 32, address));
    }
    let stats = rig.allocator.pinned_stats();
    assert_eq!((stats.live_blocks.current, stats.kept), (1, 0));
    // With the graph, and its launches, goes what holds it.
    graph.reset();
    settle(&rig);
    assert!(others_get(&rig, 32, address));
    drop((out, graph));
    nothing_pinned(&rig);
    rig.finish();
}

fn host_04_two_graphs_of_one_pool<D: Device>(rig: Rig<D>) {
    for (used, dropped) in [(true, true), (true, false), (false, true), (false, false)] {
        let out = rig.floats(&[0.0; 8]);
        let mut graphs = [Graph::new(&rig.allocator), Graph::new(&rig.allocator)];
        let mut pool = None;
        let mut buffers = Vec::new();
        let mut addresses = Vec::new();
        for (n, graph) in graphs.iter_mut().enumerate() {
            let options = CaptureOptions {
                pool: pool.clone(),
                ..CaptureOptions::default()
            };
            let capture = graph.capture_with(&rig.stream, options).unwrap();
            let buffer = pinned(&rig, &[n as f32 + 1.0; 8]);
            addresses.push(buffer.address());
            if used {
                out.copy_from_pinned(capture.stream(), &buffer, 0).unwrap();
            }
            if !dropped {
                buffers.push(buffer);
            }
            capture.end().unwrap();
            pool = Some(graph.pool().unwrap());
        }
        let same = addresses[0] == addresses[1];
        assert_eq!(same, dropped && !used, "used: {used}, dropped: {dropped}");
        if used {
            for n in [0, 1, 0] {
                graphs[n].replay(&rig.stream).unwrap();
                assert_eq!(rig.read(&out), [n as f32 + 1.0; 8]);
            }
        }
        drop((graphs, pool, buffers, out));
        nothing_pinned(&rig);
    }
    rig.finish();
}

fn host_05_pageable_copies_are_refused_and_pinned_ones_are_not<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let host = rig.allocator.alloc_pinned(32).unwrap();
    let refused = |result: Result<(), Error>, call| match result {
        Err(Error::Device(error)) => {
            assert_eq!(
                (error.call, error.code),
                (call, Code::StreamCaptureUnsupported)
            );
            assert!(error.to_string().contains("pinned"), "{error}");
        }
        other => panic!("{other:?}"),
    };
    refused(x.write(&rig.device, &rig.stream, &[0; 16]), Call::Write);
    refused(x.read(&rig.device, &rig.stream).map(drop), Call::Read);
    x.copy_to_pinned(capture.stream(), &host, 16).unwrap();
    x.copy_from_pinned(capture.stream(), &host, 0).unwrap();
    capture.end().unwrap();
    assert_eq!(graph.info().unwrap().copies, 2);
    host.write(0, &bytes(&[7.0; 8])).unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&x), [7.0; 4]);
    let after = [bytes(&[7.0; 4]), bytes(&[1.0; 4])].concat();
    assert_eq!(host.to_vec().unwrap(), after);
    drop((x, graph, host));
    nothing_pinned(&rig);
    rig.finish();
}

fn host_06_sizes_reuse_and_figures<D: Device>(rig: Rig<D>) {
    let allocator = &rig.allocator;
    let figures = || {
        let s = allocator.pinned_stats();
        let live = (s.live_blocks.current, s.live_bytes.current);
        (live, (s.blocks.current, s.reserved_bytes.current))
    };
    assert_eq!(figures(), ((0, 0), (0, 0)));
    let first = allocator.alloc_pinned(4 * 10_240).unwrap();
    assert_eq!(figures(), ((1, 65_536), (1, 65_536)));
    let second = allocator.alloc_pinned(4 * 20_480).unwrap();
    assert_eq!((first.bytes(), second.bytes()), (40_960, 81_920));
    assert_eq!(figures(), ((2, 196_608), (2, 196_608)));
    let addresses = (first.address(), second.address());
    drop((first, second));
    assert_eq!(figures(), ((0, 0), (2, 196_608)));
    // Of the same size when rounded.
    let first = allocator.alloc_pinned(65_536).unwrap();
    let second = allocator.alloc_pinned(65_537).unwrap();
    assert_eq!((first.address(), second.address()), addresses);
    let third = allocator.alloc_pinned(100).unwrap();
    assert_eq!(figures(), ((3, 196_736), (3, 196_736)));
    let clone = first.clone();
    drop(first);
    assert_eq!(figures().0.0, 3, "a clone holds it");
    drop(clone);
    let trimmed = allocator.trim_pinned();
    assert_eq!((trimmed.segments, trimmed.bytes), (1, 65_536));
    drop((second, third));
    let trimmed = allocator.trim_pinned();
    assert_eq!((trimmed.segments, trimmed.bytes), (2, 131_200));
    let stats = allocator.pinned_stats();
    assert_eq!(
        (
            stats.blocks.allocated,
            stats.blocks.freed,
            stats.blocks.peak
        ),
        (3, 3, 3)
    );
    assert_eq!(
        (stats.live_blocks.allocated, stats.live_blocks.peak),
        (5, 3)
    );
    // What was trimmed is not there to be reused.
    drop(allocator.alloc_pinned(65_536).unwrap());
    assert_eq!(allocator.pinned_stats().blocks.allocated, 4);
    let none = allocator.alloc_pinned(0).unwrap();
    assert_eq!((none.bytes(), none.to_vec().unwrap()), (0, vec![]));
    drop(none);
    nothing_pinned(&rig);
    rig.finish();
}

fn host_06_a_buffer_is_not_reused_before_its_copies_have_run<D: Device>(rig: Rig<D>) {
    let other = rig.device.create_stream().unwrap();
    let tensors: Vec<_> = (0..12).map(|_| rig.floats(&[0.0; 256])).collect();
    rig.device.synchronize(&rig.stream).unwrap();
    for (n, tensor) in tensors.iter().enumerate() {
        let buffer = pinned(&rig, &[n as f32; 256]);
        let stream = if n % 3 == 0 { &other } else { &rig.stream };
        tensor.copy_from_pinned(stream, &buffer, 0).unwrap();
        // Its memory is whose next? Not before the copy has read it.
    }
    let all = rig.allocator.pinned_stats();
    assert_eq!(all.live_blocks.current, 0);
    if !on_cuda() {
        // Nothing has run yet.
        assert_eq!((all.waiting, all.blocks.current), (12, 12));
    }
    rig.device.synchronize(&other).unwrap();
    for (n, tensor) in tensors.iter().enumerate() {
        assert_eq!(rig.read(tensor), [n as f32; 256]);
    }
    let settled = rig.allocator.pinned_stats();
    assert_eq!((settled.waiting, settled.blocks), (0, all.blocks));
    let again = pinned(&rig, &[1.0; 256]);
    assert_eq!(rig.allocator.pinned_stats().blocks, all.blocks);
    drop((again, tensors));
    nothing_pinned(&rig);
    rig.finish();
}

fn host_07_limits_of_rounding_and_caching<D: Device>(rig: Rig<D>) {
    const KIB: u64 = 1 << 10;
    let allocator = &rig.allocator;
    let reserved = || allocator.pinned_stats().reserved_bytes.current;
    allocator.configure_pinned(PinnedConfig {
        round_up_to: 128 * KIB,
        ..PinnedConfig::default()
    });
    let small = allocator.alloc_pinned(127 * KIB).unwrap();
    let large = allocator.alloc_pinned(129 * KIB).unwrap();
    assert_eq!(reserved(), (128 + 129) * KIB);
    let address = large.address();
    drop(large);
    let again = allocator.alloc_pinned(129 * KIB).unwrap();
    assert_eq!((again.address(), reserved()), (address, (128 + 129) * KIB));
    drop((small, again));
    // What is free and too large now, goes at once; what is dropped later, then.
    allocator.configure_pinned(PinnedConfig {
        cache_up_to: 32 * KIB,
        ..PinnedConfig::default()
    });
    assert_eq!(reserved(), 0);
    let kept = allocator.alloc_pinned(32 * KIB).unwrap();
    let gone = allocator.alloc_pinned(64 * KIB).unwrap();
    assert_eq!(reserved(), 96 * KIB);
    drop((kept, gone));
    assert_eq!(reserved(), 32 * KIB);
    nothing_pinned(&rig);
    rig.finish();
}

fn t6_04_the_staging_of_a_recording_is_nobody_elses<D: Device>(rig: Rig<D>) {
    let addresses = std::sync::Arc::new(Mutex::new(Vec::new()));
    let seen = addresses.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        // Indices that the host works out, say.
        let staging = rec.alloc_pinned(x.bytes())?;
        staging.write(0, &[4.0_f32; 8].map(f32::to_le_bytes).concat())?;
        seen.lock().unwrap().push(staging.address());
        let y = rec.alloc(x.bytes())?;
        y.copy_from_pinned(rec.stream(), &staging, 0)?;
        drop(staging);
        Ok(vec![k.sum(rec, &x, &y)?])
    });
    for (n, phase) in [Phase::Warmup, Phase::Record, Phase::Replay, Phase::Replay]
        .into_iter()
        .enumerate()
    {
        let x = rig.floats(&[n as f32; 8]);
        let step = rig.trees.step();
        let (ran, out) = rig.phased(&f, &step, &x);
        assert_eq!(ran, phase);
        // Other work takes all the pinned memory that it can get, and writes it over, before the launch has run.
        let recorded = addresses.lock().unwrap().get(1).copied();
        let taken = others_get(&rig, 32, recorded.unwrap_or(0));
        assert!(!taken, "{phase:?}");
        assert_eq!(rig.read(&out), [n as f32 + 4.0; 8], "{phase:?}");
    }
    assert_eq!(rig.allocator.pinned_stats().live_blocks.current, 1);
    let recorded = addresses.lock().unwrap()[1];
    // With a launch underway, the recording goes. What it held is free when that has run.
    let x = rig.floats(&[9.0; 8]);
    let step = rig.trees.step();
    let (_, out) = rig.phased(&f, &step, &x);
    drop(f);
    if !on_cuda() {
        assert!(!others_get(&rig, 32, recorded));
    }
    assert_eq!(rig.read(&out), [13.0; 8]);
    settle(&rig);
    assert!(others_get(&rig, 32, recorded));
    drop((x, out, step));
    nothing_pinned(&rig);
    rig.finish();
}

fn t6_04_what_a_graph_only_writes_is_the_graphs_too<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[3.0; 8]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let buffer = pinned(&rig, &[0.0; 8]);
    x.copy_to_pinned(capture.stream(), &buffer, 0).unwrap();
    capture.end().unwrap();
    let address = buffer.address();
    drop(buffer);
    // If it were another's now, a launch would write over that one's bytes.
    let others: Vec<_> = (0..4).map(|n| pinned(&rig, &[n as f32; 8])).collect();
    assert!(others.iter().all(|b| b.address() != address));
    graph.replay(&rig.stream).unwrap();
    rig.device.synchronize(&rig.stream).unwrap();
    for (n, buffer) in others.iter().enumerate() {
        assert_eq!(buffer.to_vec().unwrap(), bytes(&[n as f32; 8]));
    }
    drop((x, graph, others));
    settle(&rig);
    assert!(others_get(&rig, 32, address));
    nothing_pinned(&rig);
    rig.finish();
}

fn t6_04_the_staging_of_a_single_graph<D: Device>(rig: Rig<D>) {
    // Warmed up eagerly, then captured; a prefill between two launches takes the staging's size.
    let out = rig.floats(&[0.0; 8]);
    let decode = |stream: &D::Stream| {
        let staging = pinned(&rig, &[6.0; 8]);
        out.copy_from_pinned(stream, &staging, 0).unwrap();
    };
    decode(&rig.stream);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    decode(capture.stream());
    capture.end().unwrap();
    for round in 0..4 {
        let prefill = pinned(&rig, &[round as f32; 8]);
        let scratch = rig.floats(&[0.0; 8]);
        scratch.copy_from_pinned(&rig.stream, &prefill, 0).unwrap();
        drop(prefill);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&out), [6.0; 8]);
        assert_eq!(rig.read(&scratch), [round as f32; 8]);
    }
    // An abandoned launch's staging outlives graph and allocator handle as long as the launch runs.
    rig.put(&out, &[0.0; 8]);
    graph.replay(&rig.stream).unwrap();
    drop(graph);
    let churn: Vec<_> = (0..4).map(|_| pinned(&rig, &[-1.0; 8])).collect();
    assert_eq!(rig.read(&out), [6.0; 8]);
    drop((churn, out));
    nothing_pinned(&rig);
    rig.finish();
}

/// A function that copies `buffer` in, and gives it plus its input.
fn reads<D: Device>(rig: &Rig<D>, buffer: &PinnedBuffer<D>) -> cudagraph_trees::Function {
    let buffer = buffer.clone();
    rig.register(FunctionSpec::new("reads"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = rec.alloc(x.bytes())?;
        y.copy_from_pinned(rec.stream(), &buffer, 0)?;
        Ok(vec![k.sum(rec, &x, &y)?])
    })
}

fn each_replay_reads_what_was_filled_in_before<D: Device>(rig: Rig<D>) {
    let buffer = pinned(&rig, &[0.0; 64]);
    let f = reads(&rig, &buffer);
    let x = rig.floats(&[100.0; 64]);
    let results: Vec<_> = (0..8).map(|_| rig.floats(&[0.0; 64])).collect();
    for (n, result) in results.iter().enumerate() {
        // Nobody waits for the run before but this.
        buffer.write(0, &bytes(&[n as f32; 64])).unwrap();
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&f, &step, &x);
        let expected = [Phase::Warmup, Phase::Record];
        assert_eq!(phase, *expected.get(n).unwrap_or(&Phase::Replay));
        assert!(on_cuda() || buffer.is_in_use());
        rig.scale_into(&rig.stream, result, &out, 1.0, 0.0);
    }
    for (n, result) in results.iter().enumerate() {
        assert_eq!(rig.read(result), [100.0 + n as f32; 64]);
    }
    assert!(!buffer.is_in_use());
    // Eagerly too.
    let g = rig.register(FunctionSpec::new("eager").capture_if(|_| false), {
        let buffer = buffer.clone();
        move |_, rec, mut inputs| {
            let x = inputs.take(0)?;
            let y = rec.alloc(x.bytes())?;
            y.copy_from_pinned(rec.stream(), &buffer, 0)?;
            Ok(vec![y])
        }
    });
    for n in 20..23 {
        buffer.write(0, &bytes(&[n as f32; 64])).unwrap();
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&g, &step, &x);
        buffer.write(0, &bytes(&[-1.0; 64])).unwrap();
        assert_eq!(phase, Phase::Eager);
        assert_eq!(rig.read(&out), [n as f32; 64]);
    }
    drop((x, results, f, g));
    assert_eq!(rig.allocator.pinned_stats().live_blocks.current, 1);
    drop(buffer);
    nothing_pinned(&rig);
    rig.finish();
}

fn each_replay_writes_what_is_read_afterwards<D: Device>(rig: Rig<D>) {
    let buffer = pinned(&rig, &[0.0; 16]);
    let logits = buffer.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 2.0, 1.0)?;
        y.copy_to_pinned(rec.stream(), &logits, 0)?;
        Ok(vec![y])
    });
    for n in 0..5 {
        let x = rig.floats(&[n as f32; 16]);
        let step = rig.trees.step();
        rig.one(&f, &step, &x);
        // The host waits for the launch by reading.
        let mut last = [0; 4];
        buffer.read(60, &mut last).unwrap();
        assert_eq!(last, (2.0 * n as f32 + 1.0).to_le_bytes());
        assert_eq!(buffer.to_vec().unwrap(), bytes(&[2.0 * n as f32 + 1.0; 16]));
    }
    drop((buffer, f));
    nothing_pinned(&rig);
    rig.finish();
}

fn a_graph_on_several_streams_is_waited_for_on_each<D: Device>(rig: Rig<D>) {
    let streams = [(); 3].map(|()| rig.device.create_stream().unwrap());
    let buffer = pinned(&rig, &[1.0; 16]);
    let out = rig.floats(&[0.0; 16]);
    rig.device.synchronize(&rig.stream).unwrap();
    let results: Vec<_> = streams
        .iter()
        .map(|s| rig.allocator.alloc(s, 64).unwrap())
        .collect();
    let mut graphs: Vec<Graph<D>> = Vec::new();
    for result in &results {
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&rig.stream).unwrap();
        result
            .copy_from_pinned(capture.stream(), &buffer, 0)
            .unwrap();
        capture.end().unwrap();
        graphs.push(graph);
    }
    for round in 1..4 {
        buffer.write(0, &bytes(&[round as f32; 16])).unwrap();
        for (graph, stream) in graphs.iter().zip(&streams) {
            graph.replay(stream).unwrap();
        }
        buffer.write(0, &bytes(&[-1.0; 16])).unwrap();
        for (result, stream) in results.iter().zip(&streams) {
            assert_eq!(
                result.read(&rig.device, stream).unwrap(),
                bytes(&[round as f32; 16])
            );
        }
    }
    drop((out, results, graphs, buffer));
    nothing_pinned(&rig);
    rig.finish();
}

fn copies_run_in_order_with_the_bytes_of_their_time<D: Device>(rig: Rig<D>) {
    let buffer = pinned(&rig, &[1.0, 2.0, 3.0, 4.0]);
    let x = rig.floats(&[0.0; 4]);
    x.view(0, 8)
        .unwrap()
        .copy_from_pinned(&rig.stream, &buffer, 8)
        .unwrap();
    x.view(8, 8)
        .unwrap()
        .copy_from_pinned(&rig.stream, &buffer, 0)
        .unwrap();
    // Read by both before it is written.
    buffer.write(0, &bytes(&[9.0; 4])).unwrap();
    x.copy_to_pinned(&rig.stream, &buffer, 0).unwrap();
    assert_eq!(buffer.to_vec().unwrap(), bytes(&[3.0, 4.0, 1.0, 2.0]));
    // A read waits for no copy that only reads, and what it sees is what the last write made of it.
    x.copy_from_pinned(&rig.stream, &buffer, 0).unwrap();
    buffer.write(4, &bytes(&[7.0])).unwrap();
    assert_eq!(buffer.to_vec().unwrap(), bytes(&[3.0, 7.0, 1.0, 2.0]));
    assert_eq!(rig.read(&x), [3.0, 4.0, 1.0, 2.0]);
    drop((x, buffer));
    nothing_pinned(&rig);
    rig.finish();
}

#[track_caller]
fn not_capturable<T: std::fmt::Debug>(result: Result<T, Error>) {
    match result {
        Err(Error::NotCapturable { what }) => assert!(what.contains("pinned"), "{what}"),
        other => panic!("{other:?}"),
    }
}

fn the_host_does_not_touch_what_its_capture_copies<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let (input, output) = (pinned(&rig, &[2.0; 4]), pinned(&rig, &[3.0; 4]));
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    input.write(0, &bytes(&[4.0; 4])).unwrap();
    x.copy_from_pinned(capture.stream(), &input, 0).unwrap();
    x.copy_to_pinned(capture.stream(), &output, 0).unwrap();
    not_capturable(input.write(0, &[0; 4]));
    not_capturable(output.write(0, &[0; 4]));
    not_capturable(output.to_vec());
    assert_eq!(input.to_vec().unwrap(), bytes(&[4.0; 4]));
    // Another thread has no capture: it fills the buffer for the first launch.
    thread::scope(|scope| {
        let fill = || input.write(0, &bytes(&[5.0; 4])).unwrap();
        scope.spawn(fill).join().unwrap();
    });
    capture.end().unwrap();
    assert_eq!(output.to_vec().unwrap(), bytes(&[3.0; 4]));
    graph.replay(&rig.stream).unwrap();
    assert_eq!(output.to_vec().unwrap(), bytes(&[5.0; 4]));
    drop((x, input, output, graph));
    nothing_pinned(&rig);
    rig.finish();
}

fn a_recording_that_cannot_be_as_the_warmup_is_given_up<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let staging = rec.alloc_pinned(16)?;
        let mut sum = k.apply(rec, &x, 1.0, 0.0)?;
        for value in [1.0_f32, 10.0, 100.0] {
            // One buffer for three copies: in a graph, all would read the last value.
            staging.write(0, &[value; 4].map(f32::to_le_bytes).concat())?;
            let y = rec.alloc(16)?;
            y.copy_from_pinned(rec.stream(), &staging, 0)?;
            sum = k.sum(rec, &sum, &y)?;
        }
        Ok(vec![sum])
    });
    let x = rig.floats(&[1000.0; 4]);
    for n in 0..4 {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x]);
        let expected = match n {
            0 => (Phase::Warmup, Some(Reason::NotWarm)),
            _ => (Phase::Eager, Some(Reason::NotCapturable)),
        };
        assert_eq!((out.phase(), out.reason()), expected);
        assert_eq!(rig.read(&out[0]), [1111.0; 4]);
    }
    drop((f, x));
    nothing_pinned(&rig);
    rig.finish();
}

fn a_failed_recording_lets_go<D: Device>(rig: Rig<D>) {
    let address = std::sync::Arc::new(Mutex::new(0));
    let seen = address.clone();
    let f = rig.register(
        FunctionSpec::new("f").skip_warmup(),
        move |_, rec, mut inputs| {
            let x = inputs.take(0)?;
            let staging = rec.alloc_pinned(64)?;
            *seen.lock().unwrap() = staging.address();
            let y = rec.alloc(64)?;
            y.copy_from_pinned(rec.stream(), &staging, 0)?;
            Err(if x.bytes() == 64 { "no" } else { "never" }.into())
        },
    );
    let x = rig.floats(&[1.0; 16]);
    let step = rig.trees.step();
    let failed = rig
        .trees
        .run(&f, &step, &[], &rig.stream, &mut [lend(&x)])
        .unwrap_err();
    assert!(
        matches!(&failed, Error::Function { phase: Phase::Record, source, .. } if source.to_string() == "no"),
        "{failed:?}"
    );
    let stats = rig.allocator.pinned_stats();
    assert_eq!(
        (stats.live_blocks.current, stats.waiting, stats.kept),
        (0, 0, 0)
    );
    let next = rig.allocator.alloc_pinned(64).unwrap();
    assert_eq!(next.address(), *address.lock().unwrap());
    // An abandoned capture does, too.
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    next.write(0, &bytes(&[1.0; 16])).unwrap();
    x.copy_from_pinned(capture.stream(), &next, 0).unwrap();
    drop(capture);
    next.write(0, &bytes(&[2.0; 16])).unwrap();
    let address = next.address();
    drop((next, graph));
    assert_eq!(rig.allocator.alloc_pinned(64).unwrap().address(), address);
    drop((x, f, step));
    nothing_pinned(&rig);
    rig.finish();
}

fn captures_of_others_keep_it_for_good<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (x, y) = (rig.floats(&[0.0; 8]), rig.floats(&[0.0; 8]));
    let f = rig.register(FunctionSpec::new("f"), |_, rec, mut inputs| {
        let x = inputs.take(0)?;
        let staging = rec.alloc_pinned(x.bytes())?;
        staging.write(0, &[8.0_f32; 8].map(f32::to_le_bytes).concat())?;
        x.copy_from_pinned(rec.stream(), &staging, 0)?;
        Ok(vec![])
    });
    d.synchronize(&rig.stream).unwrap();
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    let buffer = pinned(&rig, &[5.0; 8]);
    x.copy_from_pinned(&rig.stream, &buffer, 0).unwrap();
    let step = rig.trees.step();
    let out = rig.call(&f, &step, &[], &mut [lend(&y)]);
    assert_eq!(out.phase(), Phase::Inline);
    let graph = d.end_capture(&rig.stream).unwrap();
    let exec = d.instantiate(&graph).unwrap();
    let address = buffer.address();
    drop((buffer, out));
    assert!(!others_get(&rig, 32, address));
    let stats = rig.allocator.pinned_stats();
    assert_eq!((stats.live_blocks.current, stats.kept), (0, 2));
    for _ in 0..2 {
        rig.put(&x, &[0.0; 8]);
        rig.put(&y, &[0.0; 8]);
        d.launch_graph(&exec, &rig.stream, &[]).unwrap();
        assert_eq!((rig.read(&x), rig.read(&y)), (vec![5.0; 8], vec![8.0; 8]));
        assert!(!others_get(&rig, 32, address));
    }
    settle(&rig);
    rig.allocator.trim_pinned();
    assert_eq!(rig.allocator.pinned_stats().blocks.current, 2);
    drop((exec, graph, x, y, f, step));
    rig.finish();
}

fn a_run_inside_a_graphs_capture_is_the_graphs<D: Device>(rig: Rig<D>) {
    let buffer = pinned(&rig, &[1.0; 8]);
    let f = reads(&rig, &buffer);
    let x = rig.floats(&[10.0; 8]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let step = rig.trees.step();
    let out = rig.run(&f, &step, &[&x]);
    assert_eq!(out.phase(), Phase::Inline);
    let out = out.only().unwrap();
    capture.end().unwrap();
    for n in 2..5 {
        buffer.write(0, &bytes(&[n as f32; 8])).unwrap();
        graph.replay(&rig.stream).unwrap();
        buffer.write(0, &bytes(&[-1.0; 8])).unwrap();
        assert_eq!(rig.read(&out), [10.0 + n as f32; 8]);
    }
    let address = buffer.address();
    drop((buffer, f));
    assert!(!others_get(&rig, 32, address));
    assert_eq!(rig.allocator.pinned_stats().live_blocks.current, 1);
    graph.reset();
    settle(&rig);
    assert!(others_get(&rig, 32, address));
    drop((x, out, step, graph));
    nothing_pinned(&rig);
    rig.finish();
}

fn a_forked_stream_copies_for_its_graph<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (side, event) = (d.create_stream().unwrap(), d.create_event().unwrap());
    let x = rig.floats(&[0.0; 8]);
    let buffer = pinned(&rig, &[3.0; 8]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    d.record(&event, &rig.stream).unwrap();
    d.wait(&side, &event).unwrap();
    x.copy_from_pinned(&side, &buffer, 0).unwrap();
    d.record(&event, &side).unwrap();
    d.wait(&rig.stream, &event).unwrap();
    capture.end().unwrap();
    let address = buffer.address();
    drop(buffer);
    assert!(!others_get(&rig, 32, address));
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&x), [3.0; 8]);
    graph.reset();
    settle(&rig);
    assert_eq!(rig.allocator.pinned_stats().kept, 0);
    assert!(others_get(&rig, 32, address));
    drop((x, graph));
    nothing_pinned(&rig);
    rig.finish();
}

fn no_capture_is_touched<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let x = rig.floats(&[1.0; 8]);
    d.synchronize(&rig.stream).unwrap();
    for mode in [
        CaptureMode::Global,
        CaptureMode::ThreadLocal,
        CaptureMode::Relaxed,
    ] {
        for here in [true, false] {
            let used = pinned(&rig, &[1.0; 8]);
            let stream = d.create_stream().unwrap();
            x.copy_from_pinned(&stream, &used, 0).unwrap();
            d.begin_capture(&rig.stream, mode).unwrap();
            d.fill(&rig.stream, x.ptr().unwrap(), 0, 4).unwrap();
            let act = || {
                let fresh = rig.allocator.alloc_pinned(1 << 16).unwrap();
                fresh.write(0, &[1; 8]).unwrap();
                x.copy_to_pinned(&stream, &used, 0).unwrap();
                x.copy_to_pinned(&stream, &fresh, 0).unwrap();
                assert_eq!(used.to_vec().unwrap().len(), 32);
                used.write(0, &[2; 32]).unwrap();
                let _ = used.is_in_use();
                drop((fresh, used));
                let _ = rig.allocator.pinned_stats();
                rig.allocator.trim_pinned();
            };
            if here {
                act();
            } else {
                thread::scope(|scope| scope.spawn(act).join().unwrap());
            }
            assert_eq!(
                d.capture_status(&rig.stream),
                Ok(CaptureStatus::Active),
                "{mode:?}, here: {here}"
            );
            let graph = d.end_capture(&rig.stream).unwrap();
            assert_eq!(d.graph_info(&graph).unwrap().nodes(), 1);
            d.quiesce().unwrap();
        }
    }
    drop(x);
    nothing_pinned(&rig);
    rig.finish();
}

fn no_launch_reads_half_a_write<D: Device>(rig: Rig<D>) {
    const LEN: usize = 1 << 14;
    let buffer = pinned(&rig, &[0.0; LEN]);
    let f = reads(&rig, &buffer);
    let x = rig.floats(&[0.0; LEN]);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..40 {
                buffer.write(0, &bytes(&[n as f32; LEN])).unwrap();
            }
        });
        let mut last = 0.0;
        for _ in 0..40 {
            let step = rig.trees.step();
            let out = rig.read(&rig.one(&f, &step, &x));
            assert!(
                out.iter().all(|v| *v == out[0]),
                "{} … {}",
                out[0],
                out[LEN - 1]
            );
            assert!(out[0] >= last, "{} after {last}", out[0]);
            last = out[0];
        }
    });
    drop((f, x, buffer));
    nothing_pinned(&rig);
    rig.finish();
}

fn ranges_streams_and_handles<D: Device>(rig: Rig<D>) {
    let buffer = pinned(&rig, &[1.0; 4]);
    let x = rig.floats(&[2.0; 4]);
    let beyond = |result: Result<(), Error>, asked: (u64, u64)| match result {
        Err(Error::View { offset, bytes, of }) => {
            assert_eq!((offset, bytes, of), (asked.0, asked.1, 16))
        }
        other => panic!("{other:?}"),
    };
    beyond(buffer.write(13, &[0; 4]), (13, 4));
    beyond(buffer.read(u64::MAX, &mut [0; 2]), (u64::MAX, 2));
    beyond(x.copy_from_pinned(&rig.stream, &buffer, 4), (4, 16));
    beyond(x.copy_to_pinned(&rig.stream, &buffer, 1), (1, 16));
    let short = rig.allocator.alloc_pinned(8).unwrap();
    match x.copy_to_pinned(&rig.stream, &short, 0) {
        Err(Error::View { of: 8, .. }) => {}
        other => panic!("{other:?}"),
    }
    // A stale output is not copied.
    let f = rig.scale_add("f", 1.0, 0.0);
    let step = rig.trees.step();
    let out = rig.one(&f, &step, &x);
    drop(step);
    let step = rig.trees.step();
    let _next = rig.one(&f, &step, &x);
    assert!(matches!(
        out.copy_to_pinned(&rig.stream, &buffer, 0),
        Err(Error::Stale(_))
    ));
    assert!(!buffer.is_in_use());
    assert_eq!(buffer.to_vec().unwrap(), bytes(&[1.0; 4]));
    drop((out, _next, step, f, x, buffer, short));
    nothing_pinned(&rig);
    rig.finish();
}

fn an_allocator_ends_with_copies_underway<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[0.0; 8]);
    rig.device.synchronize(&rig.stream).unwrap();
    let other = cudagraph_trees::Allocator::new(rig.device.clone()).unwrap();
    let buffer = other.alloc_pinned(32).unwrap();
    buffer.write(0, &bytes(&[4.0; 8])).unwrap();
    x.copy_from_pinned(&rig.stream, &buffer, 0).unwrap();
    drop(other);
    drop(buffer);
    assert_eq!(rig.read(&x), [4.0; 8]);
    drop(x);
    rig.finish();
}

// ---- what an adaptor makes fail -------------------------------------------------------------------

#[test]
fn no_memory_is_answered_by_what_is_cached_and_what_waits() {
    let rig = Rig::new(wrapped());
    let x = rig.floats(&[0.0; 8]);
    let (free, used) = (pinned(&rig, &[1.0; 8]), pinned(&rig, &[2.0; 8]));
    x.copy_from_pinned(&rig.stream, &used, 0).unwrap();
    drop((free, used));
    rig.device.fail(Call::AllocPinned, 1, Code::OutOfMemory);
    let large = rig.allocator.alloc_pinned(1 << 20).unwrap();
    let stats = rig.allocator.pinned_stats();
    assert_eq!((stats.blocks.current, stats.waiting), (1, 0));
    assert_eq!(rig.device.inner().counts().pinned_bytes, 1 << 20);
    // Where there is nothing to be had, the error is the device's.
    rig.device.fail(Call::AllocPinned, 1, Code::OutOfMemory);
    let error = rig.allocator.alloc_pinned(1 << 20).unwrap_err();
    assert!(
        matches!(&error, Error::Device(e) if (e.call, e.code) == (Call::AllocPinned, Code::OutOfMemory)),
        "{error}"
    );
    assert_eq!(rig.allocator.pinned_stats().blocks.current, 1);
    assert_eq!(rig.read(&x), [2.0; 8]);
    drop((x, large));
    nothing_pinned(&rig);
    assert_eq!(rig.device.inner().counts().pinned_bytes, 0);
    rig.finish();
}

#[test]
fn calls_that_fail_leave_things_as_they_were() {
    let rig = Rig::new(wrapped());
    let device = rig.device.clone();
    let x = rig.floats(&[0.0; 8]);
    let buffer = pinned(&rig, &[1.0; 8]);
    let is = |result: Result<(), Error>, call: Call| {
        assert!(
            matches!(&result, Err(Error::Device(DeviceError { call: c, .. })) if *c == call),
            "{result:?}"
        );
    };
    for call in [Call::CreateEvent, Call::CopyFromPinned] {
        device.fail(call, 1, Code::InvalidValue);
        is(x.copy_from_pinned(&rig.stream, &buffer, 0), call);
        assert!(!buffer.is_in_use());
        assert_eq!(rig.read(&x), [0.0; 8]);
    }
    // Without an event, the host waits.
    device.fail(Call::Record, 1, Code::InvalidValue);
    x.copy_from_pinned(&rig.stream, &buffer, 0).unwrap();
    assert!(!buffer.is_in_use());
    buffer.write(0, &bytes(&[-1.0; 8])).unwrap();
    assert_eq!(rig.read(&x), [1.0; 8]);

    // A launch that fails is none; one whose event fails is waited for.
    let f = reads(&rig, &buffer);
    for _ in 0..3 {
        let step = rig.trees.step();
        rig.one(&f, &step, &x);
    }
    buffer.write(0, &bytes(&[2.0; 8])).unwrap();
    let step = rig.trees.step();
    device.fail(Call::LaunchGraph, 1, Code::LaunchFailed);
    let failed = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
    is(failed.map(drop), Call::LaunchGraph);
    assert!(!buffer.is_in_use());
    device.fail(Call::Record, 1, Code::InvalidValue);
    let (phase, out) = rig.phased(&f, &step, &x);
    assert_eq!(phase, Phase::Replay);
    buffer.write(0, &bytes(&[-1.0; 8])).unwrap();
    assert_eq!(rig.read(&out), [3.0; 8]);

    // A recording whose capture, instantiation or first launch fails lets go of what it captured.
    for call in [Call::EndCapture, Call::Instantiate, Call::LaunchGraph] {
        let g = reads(&rig, &buffer);
        let step = rig.trees.step();
        rig.one(&g, &step, &x);
        drop(step);
        let step = rig.trees.step();
        device.fail(call, 1, Code::OutOfMemory);
        let run = rig.trees.run(&g, &step, &[], &rig.stream, &mut [lend(&x)]);
        let expected = if call == Call::LaunchGraph {
            None
        } else {
            Some(Phase::Eager)
        };
        assert_eq!(run.ok().map(|out| out.phase()), expected, "{call:?}");
    }
    drop((out, step, f));
    let address = buffer.address();
    drop(buffer);
    settle(&rig);
    assert!(others_get(&rig, 32, address));
    drop(x);
    nothing_pinned(&rig);
    rig.finish();
}

// ---- the devices ---------------------------------------------------------------------------------------

/// The device's own calls, without an allocator.
fn device_calls<D: Device>(device: &D) {
    let stream = device.create_stream().unwrap();
    let ptr = device.reserve(device.granularity()).unwrap();
    device.map(ptr, device.granularity()).unwrap();
    let memory = device.alloc_pinned(100).unwrap();
    assert_eq!((memory.bytes(), memory.address() == 0), (100, false));
    memory.write(90, &[7; 10]).unwrap();
    let mut read = [0; 3];
    memory.read(97, &mut read).unwrap();
    assert_eq!(read, [7; 3]);
    let refused = |result: Result<(), DeviceError>, call: Call| {
        let error = result.unwrap_err();
        assert_eq!(
            (error.call, error.code),
            (call, Code::InvalidValue),
            "{error}"
        );
    };
    refused(memory.write(91, &[0; 10]), Call::Driver("write"));
    refused(memory.read(101, &mut []), Call::Driver("read"));
    refused(
        device.copy_from_pinned(&stream, ptr, &memory, 1, 100),
        Call::CopyFromPinned,
    );
    refused(
        device.copy_to_pinned(&stream, &memory, u64::MAX, ptr, 2),
        Call::CopyToPinned,
    );
    refused(device.alloc_pinned(0).map(drop), Call::AllocPinned);
    assert_eq!(
        device.copy_from_pinned(&stream, ptr, &memory, 100, 0),
        Ok(())
    );
    device
        .copy_from_pinned(&stream, ptr, &memory, 90, 10)
        .unwrap();
    device.copy_to_pinned(&stream, &memory, 0, ptr, 10).unwrap();
    device.synchronize(&stream).unwrap();
    let mut read = [0; 10];
    memory.read(0, &mut read).unwrap();
    assert_eq!(read, [7; 10]);
    drop(memory);
    device.unmap(ptr, device.granularity()).unwrap();
    device.release(ptr, device.granularity()).unwrap();
}

#[test]
fn what_a_device_gives() {
    let _alone = one_by_one();
    if on_cuda() {
        device_calls(&common::cuda());
    } else {
        for device in common::hosts() {
            device_calls(&device);
            assert_eq!(device.counts().pinned_bytes, 0);
        }
    }
}

/// The simulated device reports who touches what is dead or gone.
#[test]
fn a_copy_of_what_has_no_owner_is_a_fault() {
    use cudagraph_trees::device::host::HostDevice;
    use cudagraph_trees::device::{FaultReason, Mark};
    for (dead, reason) in [(true, FaultReason::NotLive), (false, FaultReason::Unmapped)] {
        let device = HostDevice::new();
        let stream = device.create_stream().unwrap();
        let ptr = device.reserve(2 << 20).unwrap();
        device.map(ptr, 2 << 20).unwrap();
        let _first = device.alloc_pinned(8).unwrap();
        let memory = device.alloc_pinned(64).unwrap();
        device
            .copy_from_pinned(&stream, ptr, &memory, 16, 8)
            .unwrap();
        let memory = if dead {
            memory.mark(Mark::Dead);
            let mut read = [0; 8];
            memory.read(0, &mut read).unwrap();
            assert_eq!(read, [0xDB; 8]);
            Some(memory)
        } else {
            drop(memory);
            None
        };
        let error = device.synchronize(&stream).unwrap_err();
        let fault = error.fault.clone().unwrap();
        assert_eq!(
            (fault.address.as_str(), fault.bytes, fault.reason),
            ("H1+16", 8, reason),
            "{error}"
        );
        drop(memory);
    }
}
