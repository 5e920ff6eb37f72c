//! What users reported of programs with more than one device, over simulated ones (T4-16). The CUDA device's own part, that each call leaves the
//! caller's current context as it was, is in the suite of that device.

mod common;

use std::thread;

use common::Rig;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{CaptureMode, Code, Device, FaultReason};
use cudagraph_trees::{CaptureOptions, Error, Graph, Phase, PoolOptions, lend};

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
