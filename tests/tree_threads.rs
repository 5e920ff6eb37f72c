//! Many threads on one tree, each with its own stream, inputs and tokens: every value is right, and nothing goes stale before its time.
mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{FunctionSpec, GraphTrees, lend};

/// Each thread runs a chain of two in each step, holds both outputs until it has read them, and its token throughout.
fn threads<D: Device>(rig: Rig<D>, threads: usize, turns: usize) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let g = rig.scale_add("g", 3.0, 1.0);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (rig, f, g) = (&rig, &f, &g);
            scope.spawn(move || {
                let stream = rig.device.create_stream().unwrap();
                let x = rig.allocator.alloc(&stream, 256).unwrap();
                for turn in 0..turns {
                    let value = (thread * turns + turn) as f32;
                    let of = |v: f32| [v; 64].map(f32::to_le_bytes).concat();
                    x.write(&rig.device, &stream, &of(value)).unwrap();
                    let step = rig.trees.step();
                    let a = rig
                        .trees
                        .run(f, &step, &[], &stream, &mut [lend(&x)])
                        .unwrap();
                    let b = rig
                        .trees
                        .run(g, &step, &[7], &stream, &mut [lend(&a[0])])
                        .unwrap();
                    assert_eq!(
                        b[0].read(&rig.device, &stream).unwrap(),
                        of(value * 6.0 + 1.0)
                    );
                    assert_eq!(a[0].read(&rig.device, &stream).unwrap(), of(value * 2.0));
                    assert!(a[0].is_current() && b[0].is_current());
                    drop((a, b));
                    drop(step);
                }
            });
        }
    });
    rig.finish();
}

#[test]
fn t4_08_two_threads() {
    for seed in 0..6 {
        threads(
            Rig::new(HostDevice::builder().seed(seed).build().unwrap()),
            2,
            100,
        );
    }
}

#[test]
fn t4_08_eight_threads() {
    for seed in 0..6 {
        threads(
            Rig::new(HostDevice::builder().seed(seed).build().unwrap()),
            8,
            60,
        );
    }
}

#[test]
fn t4_08_thirty_two_threads() {
    threads(Rig::new(HostDevice::new()), 32, 20);
}

/// A stream that the device refuses leaves the tree as it was.
#[test]
fn a_stream_of_another_device_is_refused_once() {
    let rig = Rig::new(HostDevice::new());
    let stranger = HostDevice::new().create_stream().unwrap();
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[1.5]);
    for _ in 0..4 {
        let step = rig.trees.step();
        assert!(
            rig.trees
                .run(&f, &step, &[], &stranger, &mut [lend(&x)])
                .is_err()
        );
        let out = rig.one(&f, &step, &x);
        assert_eq!(rig.read(&out), [3.0]);
    }
    drop(x);
    rig.trees.shutdown().unwrap();
    rig.finish();
}

/// STREAM-04: each thread has a tree of its own, over one allocator; they share nothing else, and none waits for another's closures.
#[test]
fn stream_04_two_trees_do_not_meet() {
    let rig = Rig::new(HostDevice::new());
    let barrier = std::sync::Barrier::new(3);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (rig, barrier) = (&rig, &barrier);
            scope.spawn(move || {
                let trees = GraphTrees::new(&rig.allocator).unwrap();
                let stream = rig.device.create_stream().unwrap();
                let kernels = rig.kernels.clone();
                let f = trees
                    .register(FunctionSpec::new("f"), move |rec, inputs| {
                        let x = inputs.get(0)?;
                        let out = rec.alloc(x.bytes())?;
                        let (to, from, n) = (out.ptr()?, x.ptr()?, x.bytes() / 4);
                        let scale = thread as f32 + 2.0;
                        kernels.scale_add(rec.device(), rec.stream(), to, from, n, scale, 0.0)?;
                        Ok(vec![out])
                    })
                    .unwrap();
                barrier.wait();
                for round in 0..20 {
                    let x = rig.allocator.alloc(&stream, 64).unwrap();
                    let value = (10 * thread + round) as f32;
                    let bytes = [value; 16].map(f32::to_le_bytes).concat();
                    x.write(&rig.device, &stream, &bytes).unwrap();
                    let step = trees.step();
                    let out = trees.run(&f, &step, &[], &stream, &mut [lend(&x)]).unwrap();
                    let got = out[0].read(&rig.device, &stream).unwrap();
                    let want = value * (thread as f32 + 2.0);
                    assert_eq!(got, [want; 16].map(f32::to_le_bytes).concat());
                }
                let counts = trees.counts();
                assert_eq!(
                    (counts.warmups, counts.recordings, counts.replays),
                    (1, 1, 18)
                );
                // A function or a token of another tree is refused.
                let step = rig.trees.step();
                let foreign = trees.run(&f, &step, &[], &stream, &mut []);
                assert!(matches!(
                    foreign,
                    Err(cudagraph_trees::Error::ForeignHandle { what: "step" })
                ));
                assert!(matches!(
                    rig.trees.report(&f),
                    Err(cudagraph_trees::Error::ForeignHandle { what: "function" })
                ));
            });
        }
    });
    assert_eq!(rig.trees.counts().recordings, 0);
    rig.device.synchronize_device().unwrap();
    rig.finish();
}
