//! Many threads on one tree, each with its own stream, inputs and tokens: every value is right, and nothing goes stale before its time.
mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::lend;

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
