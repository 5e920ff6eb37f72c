//! What users reported of programs with more than one device, over simulated ones (T4-09, T4-14, T4-16). The CUDA device's own part, that each call leaves the
//! caller's current context as it was, is in the suite of that device.

mod common;

use std::sync::{Arc, Barrier};
use std::thread;

use common::Rig;
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, CaptureMode, Code, Device, FaultReason};
use cudagraph_trees::pool::{PoolError, Unclaimed};
use cudagraph_trees::{CaptureOptions, Error, FunctionSpec, Graph, Phase, PoolOptions, give, lend};

fn two() -> [Rig<HostDevice>; 2] {
    [5, 6].map(|seed| Rig::new(HostDevice::builder().seed(seed).build().unwrap()))
}

/// What a device holds: bytes mapped, ranges, launches so far.
fn holds(rig: &Rig<HostDevice>) -> (u64, usize, u64) {
    let counts = rig.device.counts();
    (counts.mapped_bytes, counts.mapped_ranges, counts.launches)
}

#[test]
fn t4_16_two_devices_used_from_one_thread_keep_to_their_own_memory() {
    let both = two();
    let functions = [0, 1].map(|n| both[n].scale_add("f", 2.0 + n as f32, 1.0));
    let inputs = [0, 1].map(|n| both[n].floats(&[10.0 * (n as f32 + 1.0); 4]));
    let mut phases = Vec::new();
    for _ in 0..4 {
        // One within the other, so that neither is the last that was used.
        let steps = [0, 1].map(|n| both[n].trees.step());
        let outputs = [0, 1].map(|n| both[n].run(&functions[n], &steps[n], &[&inputs[n]]));
        phases.push(outputs.each_ref().map(|o| o.phase()));
        let [first, second] = outputs.each_ref().map(|o| &o[0]);
        assert_eq!(both[0].read(first), [21.0; 4]);
        assert_eq!(both[1].read(second), [61.0; 4]);
    }
    use Phase::{Record, Replay, Warmup};
    assert_eq!(phases, [[Warmup; 2], [Record; 2], [Replay; 2], [Replay; 2]]);
    // Captures of both at once, begun and ended crosswise.
    let [mut a, mut b] = [0, 1].map(|n| Graph::new(&both[n].allocator));
    let options = || CaptureOptions {
        pool: None,
        mode: CaptureMode::Global,
    };
    let first = a.capture_with(&both[0].stream, options()).unwrap();
    let second = b.capture_with(&both[1].stream, options()).unwrap();
    let y = both[0].captured(&first, &inputs[0], 3.0, 0.0);
    let z = both[1].captured(&second, &inputs[1], 3.0, 0.0);
    first.end().unwrap();
    second.end().unwrap();
    a.replay(&both[0].stream).unwrap();
    b.replay(&both[1].stream).unwrap();
    assert_eq!(both[0].read(&y), [30.0; 4]);
    assert_eq!(both[1].read(&z), [60.0; 4]);
    // Memory is the device's whose allocator was asked, on whatever thread, whatever that thread used last.
    for (n, other) in [(0, 1), (1, 0)] {
        for here in [true, false] {
            let before = both.each_ref().map(holds);
            let used = both[other].floats(&[1.0; 4]);
            let take = || both[n].allocator.alloc(&both[n].stream, 20 << 20).unwrap();
            let large = match here {
                true => take(),
                false => thread::scope(|scope| scope.spawn(take).join().unwrap()),
            };
            let now = both.each_ref().map(holds);
            assert_eq!(now[n].0, before[n].0 + (20 << 20), "{n}, here: {here}");
            assert_eq!(now[other], before[other], "{n}, here: {here}");
            drop((large, used));
            both[n].allocator.trim().unwrap();
        }
    }
    drop((functions, inputs, a, b, y, z));
    both.into_iter().for_each(Rig::finish);
}

#[test]
fn t4_16_what_belongs_to_another_device_is_refused() {
    let [ours, theirs] = two();
    let (d, stream) = (&ours.device, &ours.stream);
    let x = theirs.floats(&[1.0; 4]);
    theirs.device.synchronize(&theirs.stream).unwrap();
    let event = theirs.device.create_event().unwrap();
    let mut graph = Graph::new(&theirs.allocator);
    let capture = graph.capture(&theirs.stream).unwrap();
    drop(theirs.captured(&capture, &x, 2.0, 0.0));
    capture.end().unwrap();
    let mine = ours.floats(&[1.0; 4]);
    let ptr = mine.ptr().unwrap();
    for (name, refused) in [
        ("synchronize", d.synchronize(&theirs.stream)),
        ("query", d.query(&theirs.stream).map(drop)),
        ("record", d.record(&event, stream)),
        ("wait", d.wait(stream, &event)),
        ("query event", d.query_event(&event).map(drop)),
        ("synchronize event", d.synchronize_event(&event)),
        ("fill", d.fill(&theirs.stream, ptr, 0, 4)),
        ("write", d.write(&theirs.stream, ptr, &[0; 4])),
        ("read", d.read(&theirs.stream, &mut [0; 4], ptr)),
        (
            "begin capture",
            d.begin_capture(&theirs.stream, CaptureMode::Relaxed),
        ),
        ("status", d.capture_status(&theirs.stream).map(drop)),
        ("end capture", d.end_capture(&theirs.stream).map(drop)),
        ("unmap", d.unmap(x.ptr().unwrap(), d.granularity())),
        ("release", d.release(x.ptr().unwrap(), d.granularity())),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.code, Code::InvalidValue, "{name}: {error}");
    }
    // And by the rooms above: pools, functions, steps.
    let pool = theirs
        .allocator
        .create_pool(PoolOptions::default())
        .unwrap();
    assert!(matches!(
        ours.allocator.route_thread(&pool).map(drop),
        Err(Error::ForeignPool)
    ));
    let options = CaptureOptions {
        pool: Some(pool.clone()),
        mode: CaptureMode::ThreadLocal,
    };
    let refused = Graph::new(&ours.allocator)
        .capture_with(stream, options)
        .map(drop);
    assert!(matches!(refused, Err(Error::ForeignPool)), "{refused:?}");
    let (f, g) = (
        ours.scale_add("f", 1.0, 0.0),
        theirs.scale_add("g", 1.0, 0.0),
    );
    for (function, step) in [(&f, theirs.trees.step()), (&g, ours.trees.step())] {
        let ran = ours
            .trees
            .run(function, &step, &[], stream, &mut [lend(&mine)])
            .map(drop);
        assert!(matches!(ran, Err(Error::ForeignHandle { .. })), "{ran:?}");
    }
    // Nothing of this reached either device, and both work on.
    assert_eq!(ours.read(&mine), [1.0; 4]);
    graph.replay(&theirs.stream).unwrap();
    assert_eq!(theirs.read(&x), [1.0; 4]);

    // An address of the other device is memory that is not there.
    ours.scale_into(stream, &mine, &x, 1.0, 0.0);
    d.synchronize(stream).unwrap_err();
    let fault = d.clear_fault().unwrap();
    assert_eq!(fault.reason, FaultReason::Unmapped);
    assert_eq!(theirs.read(&x), [1.0; 4]);
    drop((x, mine, event, graph, pool, f, g));
    ours.finish();
    theirs.finish();
}

/// What is foreign: which input, and what was said.
#[track_caller]
fn assert_foreign<T: std::fmt::Debug>(result: Result<T, Error>, tensor: &str) {
    match result {
        Err(Error::ForeignTensor { what }) => assert_eq!(what, tensor),
        other => panic!("{tensor} is of another device, and the answer is {other:?}"),
    }
}

/// Calls of a device that enqueue something.
fn enqueued(device: &Faulty<HostDevice>) -> [u64; 6] {
    use Call::{Copy, Gather, Launch, LaunchGraph, Record, Wait};
    [Copy, Gather, Launch, LaunchGraph, Record, Wait].map(|call| device.calls(call))
}

fn two_faulty() -> [Rig<Faulty<HostDevice>>; 2] {
    [5, 6].map(|seed| {
        let device = HostDevice::builder().seed(seed).build().unwrap();
        Rig::new(Faulty::new(device))
    })
}

#[test]
fn skip_01_and_t4_14_an_input_of_another_device_is_refused_in_every_phase() {
    let [ours, theirs] = two_faulty();
    let (mine, other) = (ours.floats(&[3.0; 4]), theirs.floats(&[5.0; 4]));
    let specs = [
        FunctionSpec::new("f"),
        FunctionSpec::new("f").static_input(0),
        FunctionSpec::new("f").static_input(0).mutates(0),
        FunctionSpec::new("f").capture_keys([]),
    ];
    for (n, spec) in specs.into_iter().enumerate() {
        let f = ours.register(spec, |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 1.0)?])
        });
        let expected = match n {
            3 => [Phase::Eager; 3],
            _ => [Phase::Warmup, Phase::Record, Phase::Replay],
        };
        for phase in expected {
            let step = ours.trees.step();
            for given in [false, true] {
                let mut args = [match given {
                    true => give(other.clone()),
                    false => lend(&other),
                }];
                let before = enqueued(&ours.device);
                let counts = ours.trees.counts();
                let ran = ours
                    .trees
                    .run(&f, &step, &[], &ours.stream, &mut args)
                    .map(|outputs| outputs.phase());
                assert_foreign(ran, "input 0 of f");
                assert_eq!(enqueued(&ours.device), before, "{n}, {phase}");
                assert_eq!(ours.trees.counts(), counts, "{n}, {phase}");
                assert_eq!(args[0].is_given(), given);
            }
            // And the phase that was refused is still to come.
            let (went, out) = ours.phased(&f, &step, &mine);
            assert_eq!((went, ours.read(&out)), (phase, vec![7.0; 4]), "{n}");
        }
        // Inside a capture of the caller's.
        ours.device.synchronize(&ours.stream).unwrap();
        let mut graph = Graph::new(&ours.allocator);
        let capture = graph.capture(&ours.stream).unwrap();
        let step = ours.trees.step();
        let mut args = [lend(&other)];
        let ran = ours
            .trees
            .run(&f, &step, &[], &ours.stream, &mut args)
            .map(drop);
        assert_foreign(ran, "input 0 of f");
        let out = ours.one(&f, &step, &mine);
        capture.end().unwrap();
        graph.replay(&ours.stream).unwrap();
        assert_eq!(ours.read(&out), [7.0; 4]);
    }
    assert_eq!(theirs.read(&other), [5.0; 4]);
    drop((mine, other));
    ours.finish();
    theirs.finish();
}

#[test]
fn t4_14_what_lies_on_another_device_is_refused_elsewhere_too() {
    let [ours, theirs] = two();
    let (mine, other) = (ours.floats(&[3.0; 4]), theirs.floats(&[5.0; 4]));
    // Bound at registration; an import is of the device that it was imported for.
    let imported = theirs
        .allocator
        .import(other.ptr().unwrap(), 16, other.clone());
    for foreign in [&other, &imported] {
        let spec = FunctionSpec::new("f").bind(1, foreign);
        let registered = ours.trees.register(spec, |_, _| Ok(vec![])).map(drop);
        assert_foreign(registered, "input 1 of f");
    }
    // Returned by the closure.
    let hidden = other.clone();
    for (phase, spec) in [
        (Phase::Warmup, FunctionSpec::new("g")),
        (Phase::Record, FunctionSpec::new("g").skip_warmup()),
        (Phase::Eager, FunctionSpec::new("g").capture_keys([])),
        (Phase::Inline, FunctionSpec::new("g")),
    ] {
        let hidden = hidden.clone();
        let g = ours.register(spec, move |k, rec, inputs| {
            assert_eq!(rec.phase(), phase);
            Ok(vec![
                k.apply(rec, inputs.get(0)?, 1.0, 0.0)?,
                hidden.clone(),
            ])
        });
        let run = || {
            let step = ours.trees.step();
            let mut args = [lend(&mine)];
            let ran = ours.trees.run(&g, &step, &[], &ours.stream, &mut args);
            assert_foreign(ran.map(|outputs| outputs.phase()), "output 1 of g");
        };
        if phase == Phase::Inline {
            ours.device.synchronize(&ours.stream).unwrap();
            let mut graph = Graph::new(&ours.allocator);
            let capture = graph.capture(&ours.stream).unwrap();
            run();
            capture.end().unwrap();
        } else {
            run();
        }
        ours.trees.audit().unwrap();
    }
    // To adopt a block of a checkpoint.
    let pool = ours.allocator.create_pool(PoolOptions::default()).unwrap();
    let kept = pool.checkpoint();
    let restored = pool.restore(&ours.stream, &kept, &[&mine, &other], Unclaimed::Free);
    assert!(
        matches!(
            restored,
            Err(Error::Pool(PoolError::AdoptNotInCheckpoint {
                index: 0,
                ..
            }))
        ),
        "{restored:?}"
    );
    let restored = pool.restore(&ours.stream, &kept, &[&other], Unclaimed::Free);
    assert_foreign(restored, "tensor 0 of those that are to adopt");
    // Read and written through another device than its own.
    assert_foreign(other.read(&ours.device, &ours.stream), "the tensor");
    assert_foreign(
        other.write(&ours.device, &ours.stream, &[0; 16]),
        "the tensor",
    );
    // A graph cannot be over two devices: an event of one is nothing to a capture of the other.
    let event = theirs.device.create_event().unwrap();
    theirs.device.record(&event, &theirs.stream).unwrap();
    let mut graph = Graph::new(&ours.allocator);
    let capture = graph.capture(&ours.stream).unwrap();
    let refused = ours.device.wait(&ours.stream, &event).unwrap_err();
    assert_eq!(refused.code, Code::InvalidValue);
    assert_eq!(refused.detail, "the event belongs to another device");
    let y = ours.captured(&capture, &mine, 2.0, 0.0);
    capture.end().unwrap();
    graph.replay(&ours.stream).unwrap();
    assert_eq!(ours.read(&y), [6.0; 4]);
    assert_eq!(theirs.read(&other), [5.0; 4]);
    drop((mine, other, imported, hidden, pool, kept, y, graph, event));
    ours.finish();
    theirs.finish();
}

#[test]
fn t4_14_a_stream_of_another_device_is_refused() {
    let [ours, theirs] = two();
    let f = ours.scale_add("f", 2.0, 1.0);
    let x = ours.floats(&[3.0; 4]);
    let pool = ours.allocator.create_pool(PoolOptions::default()).unwrap();
    let refused = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::ForeignStream)), "{result:?}");
    };
    for phase in [Phase::Warmup, Phase::Record, Phase::Replay] {
        let step = ours.trees.step();
        for stream in [&theirs.stream, &theirs.device.default_stream()] {
            let mut args = [lend(&x)];
            refused(ours.trees.run(&f, &step, &[], stream, &mut args).map(drop));
            let ran = ours.trees.run_with_event(&f, &step, &[], stream, &mut args);
            refused(ran.map(drop));
        }
        assert_eq!(ours.phased(&f, &step, &x).0, phase);
    }
    refused(ours.allocator.alloc(&theirs.stream, 64).map(drop));
    refused(pool.alloc(&theirs.stream, 64).map(drop));
    refused(ours.allocator.route_stream(&theirs.stream, &pool).map(drop));
    let kept = pool.checkpoint();
    let restored = pool.restore(&theirs.stream, &kept, &[], Unclaimed::Free);
    refused(restored.map(drop));
    refused(x.record_stream(&theirs.stream));
    let block = pool.alloc(&ours.stream, 64).unwrap();
    let freed = pool.free_at(&theirs.stream, block.ptr().unwrap());
    refused(freed.map(drop));
    // Nothing was freed, so its owner still can be taken for it.
    assert_eq!(pool.stats().live_blocks.current, 1);
    assert!(pool.free_at(&ours.stream, block.ptr().unwrap()).unwrap());
    assert_eq!(pool.stats().live_blocks.current, 0);
    drop(block);
    let captured = Graph::new(&ours.allocator)
        .capture(&theirs.stream)
        .map(drop);
    refused(captured);
    // Named in vain, it keeps nothing.
    drop((f, x, pool, kept));
    ours.finish();
    theirs.finish();
}

#[test]
fn a_tensor_of_another_allocator_of_the_same_device_is_an_input_like_any() {
    let ours = Rig::new(HostDevice::builder().seed(5).build().unwrap());
    let second = Rig::new(ours.device.clone());
    let x = second.floats(&[3.0; 4]);
    second.device.synchronize(&second.stream).unwrap();
    for spec in [
        FunctionSpec::new("f"),
        FunctionSpec::new("f").static_input(0),
        FunctionSpec::new("f").capture_keys([]),
    ] {
        let returned = x.clone();
        let f = ours.register(spec, move |k, rec, inputs| {
            let y = k.apply(rec, inputs.get(0)?, 2.0, 1.0)?;
            Ok(vec![y, returned.clone()])
        });
        for _ in 0..4 {
            let out = ours.run(&f, &ours.trees.step(), &[&x]);
            assert_eq!(ours.read(&out[0]), [7.0; 4]);
            assert_eq!(out[1].storage_id(), x.storage_id());
        }
    }
    drop(x);
    ours.finish();
    second.finish();
}

#[test]
fn t4_09_two_devices_capture_on_two_threads_at_once() {
    let both = two();
    let together = Arc::new(Barrier::new(2));
    thread::scope(|scope| {
        for (n, rig) in both.iter().enumerate() {
            let together = together.clone();
            scope.spawn(move || {
                let inside = together.clone();
                let scale = 2.0 + n as f32;
                let x = rig.floats(&[10.0; 4]);
                let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
                    // The other's closure is inside too: both capture.
                    inside.wait();
                    let y = k.apply(rec, inputs.get(0)?, scale, 0.0)?;
                    inside.wait();
                    Ok(vec![y])
                });
                for phase in [Phase::Warmup, Phase::Record, Phase::Replay] {
                    let (went, y) = rig.phased(&f, &rig.trees.step(), &x);
                    assert_eq!((went, rig.read(&y)), (phase, vec![10.0 * scale; 4]));
                }
                let mut graph = Graph::new(&rig.allocator);
                let options = CaptureOptions {
                    pool: None,
                    mode: CaptureMode::Global,
                };
                let capture = graph.capture_with(&rig.stream, options).unwrap();
                together.wait();
                let y = rig.captured(&capture, &x, scale, 1.0);
                together.wait();
                capture.end().unwrap();
                for _ in 0..2 {
                    graph.replay(&rig.stream).unwrap();
                    assert_eq!(rig.read(&y), [10.0 * scale + 1.0; 4]);
                }
            });
        }
    });
    both.into_iter().for_each(Rig::finish);
}
