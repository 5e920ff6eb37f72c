//! Streams and events of the simulated device: order, and what shows when it is missing.

use std::collections::BTreeSet;

use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::device::{Call, Code, Device, DevicePtr};

const MIB: u64 = 1 << 20;

fn scene(seed: u64) -> (HostDevice, HostStream, HostStream, DevicePtr) {
    let device = HostDevice::builder().seed(seed).build().unwrap();
    let (a, b) = (
        device.create_stream().unwrap(),
        device.create_stream().unwrap(),
    );
    let ptr = device.reserve(2 * MIB).unwrap();
    device.map(ptr, 2 * MIB).unwrap();
    (device, a, b, ptr)
}

fn byte(device: &HostDevice, stream: &HostStream, ptr: DevicePtr) -> u8 {
    let mut byte = [0];
    device.read(stream, &mut byte, ptr).unwrap();
    byte[0]
}

/// One stream fills, another copies the result; with or without the wait between them.
fn race(seed: u64, wait: bool) -> u8 {
    let (device, a, b, ptr) = scene(seed);
    device.fill(&a, ptr, 1, 1).unwrap();
    device.fill(&a, ptr, 2, 1).unwrap();
    if wait {
        let event = device.create_event().unwrap();
        device.record(&event, &a).unwrap();
        device.wait(&b, &event).unwrap();
    }
    device.copy(&b, ptr.offset(64), ptr, 1).unwrap();
    byte(&device, &b, ptr.offset(64))
}

#[test]
fn a_missing_wait_shows_under_some_seed_and_a_seed_repeats() {
    let seen: BTreeSet<u8> = (0..64).map(|seed| race(seed, false)).collect();
    assert_eq!(seen, [1, 2, 0xCD].into());
    for seed in 0..64 {
        assert_eq!(race(seed, false), race(seed, false));
        assert_eq!(race(seed, true), 2);
    }
}

#[test]
fn a_stream_keeps_its_order_whatever_the_seed() {
    for seed in 0..16 {
        let (device, a, b, ptr) = scene(seed);
        let set = KernelSet::load(&device).unwrap();
        for (stream, at) in [(&a, 0), (&b, 256)] {
            let x = ptr.offset(at);
            set.fill(&device, stream, x, 8, 1.0).unwrap();
            for _ in 0..3 {
                set.scale_add(&device, stream, x, x, 8, 2.0, 1.0).unwrap();
            }
            set.increment(&device, stream, x, 8, 0.5).unwrap();
            set.sum(&device, stream, x.offset(128), x, 8).unwrap();
        }
        device.synchronize_device().unwrap();
        for at in [128, 384] {
            let mut sum = [0; 4];
            device.read(&a, &mut sum, ptr.offset(at)).unwrap();
            assert_eq!(f32::from_le_bytes(sum), 8.0 * 15.5);
        }
        assert_eq!(device.counts().kernels_run, 12);
    }
}

#[test]
fn nothing_runs_before_somebody_waits_and_polling_ends() {
    let (device, a, b, ptr) = scene(3);
    let set = KernelSet::load(&device).unwrap();
    for stream in [&a, &b] {
        for _ in 0..5 {
            set.fill(&device, stream, ptr, 1, 1.0).unwrap();
        }
    }
    assert_eq!(
        (device.counts().launches, device.counts().kernels_run),
        (10, 0)
    );
    let mut asked = 0;
    while !device.query(&a).unwrap() {
        asked += 1;
        assert_eq!(device.counts().kernels_run, asked);
    }
    assert!((4..10).contains(&asked), "{asked}");
    device.synchronize(&b).unwrap();
    assert_eq!(device.counts().kernels_run, 10);
    assert_eq!((device.query(&a), device.query(&b)), (Ok(true), Ok(true)));
}

#[test]
fn events_are_points_in_their_stream() {
    for seed in 0..16 {
        let (device, a, b, ptr) = scene(seed);
        let event = device.create_event().unwrap();
        // Never recorded: nothing to wait for.
        device.wait(&b, &event).unwrap();
        assert_eq!(
            (device.query_event(&event), device.synchronize_event(&event)),
            (Ok(true), Ok(()))
        );

        device.fill(&a, ptr, 1, 1).unwrap();
        device.record(&event, &a).unwrap();
        device.wait(&b, &event).unwrap();
        device.copy(&b, ptr.offset(1), ptr, 1).unwrap();
        let copied = device.create_event().unwrap();
        device.record(&copied, &b).unwrap();
        device.wait(&a, &copied).unwrap();
        device.fill(&a, ptr, 2, 1).unwrap();
        // Recorded anew, the event means the later point; the earlier wait still means the earlier one.
        device.record(&event, &a).unwrap();
        let mut steps = 0;
        while !device.query_event(&event).unwrap() {
            steps += 1;
        }
        assert!(steps > 0);
        assert_eq!(
            (byte(&device, &a, ptr), byte(&device, &a, ptr.offset(1))),
            (2, 1)
        );
        assert_eq!(device.query(&b), Ok(true));
    }
}

#[test]
fn the_default_stream_orders_itself_with_blocking_streams_alone() {
    let mut seen = BTreeSet::new();
    for seed in 0..32 {
        let (device, free, _, ptr) = scene(seed);
        let blocking = device.create_blocking_stream().unwrap();
        let default = device.default_stream();
        device.fill(&blocking, ptr, 1, 1).unwrap();
        device.copy(&default, ptr.offset(1), ptr, 1).unwrap();
        device.fill(&blocking, ptr, 2, 1).unwrap();
        device.copy(&free, ptr.offset(2), ptr, 1).unwrap();
        device.synchronize_device().unwrap();
        assert_eq!(byte(&device, &default, ptr.offset(1)), 1);
        seen.insert(byte(&device, &free, ptr.offset(2)));
    }
    assert_eq!(seen, [1, 2, 0xCD].into());
}

#[test]
fn handles_come_and_go_and_leave_nothing() {
    let (device, a, b, ptr) = scene(0);
    assert_eq!(
        (
            device.stream_id(&device.default_stream()),
            device.stream_id(&a),
            device.stream_id(&b)
        ),
        (0, 1, 2)
    );
    assert_eq!(
        format!("{device:?} {a:?}"),
        "HostDevice(seed 0) HostStream(1)"
    );
    assert_eq!((a.clone() == a, a == b), (true, false));
    let event = device.create_event().unwrap();
    device.fill(&a, ptr, 7, 1).unwrap();
    device.record(&event, &a).unwrap();
    device.wait(&b, &event).unwrap();
    assert_eq!((device.counts().streams, device.counts().events), (2, 1));
    // What was enqueued still runs, in order.
    drop((a, event));
    assert_eq!((device.counts().streams, device.counts().events), (2, 0));
    device.copy(&b, ptr.offset(1), ptr, 1).unwrap();
    assert_eq!(byte(&device, &b, ptr.offset(1)), 7);
    assert_eq!(device.counts().streams, 1);

    let other = HostDevice::new();
    let refused = other.synchronize(&b).unwrap_err();
    assert_eq!(
        (refused.call, refused.code),
        (Call::Synchronize, Code::InvalidValue)
    );
    let onto_itself = device.copy(&b, ptr, ptr.offset(1), 4).unwrap_err();
    assert_eq!(
        (onto_itself.call, onto_itself.code),
        (Call::Copy, Code::InvalidValue)
    );
}

#[test]
fn threads_share_a_device() {
    let (device, _, _, ptr) = scene(5);
    let set = KernelSet::load(&device).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (device, set) = (device.clone(), set.clone());
            scope.spawn(move || {
                let stream = device.create_stream().unwrap();
                let x = ptr.offset(thread * 4);
                set.fill(&device, &stream, x, 1, 0.0).unwrap();
                for _ in 0..100 {
                    set.increment(&device, &stream, x, 1, 1.0).unwrap();
                }
                device.synchronize(&stream).unwrap();
            });
        }
    });
    let mut values = [0; 16];
    device
        .read(&device.default_stream(), &mut values, ptr)
        .unwrap();
    assert_eq!(bytemuck::cast_slice::<u8, f32>(&values), [100.0; 4]);
}
