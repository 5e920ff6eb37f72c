//! Streams: runs of one tree are ordered with each other and with the caller, whatever streams the caller uses.
mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, Code};
use cudagraph_trees::{Graph, Phase, give, lend};

suite!(
    stream_01_a_slow_producer_is_waited_for_in_every_phase,
    a_run_on_another_stream_comes_after_the_last,
    what_is_given_from_another_stream_is_not_reused_before_it_was_read,
    the_event_of_a_run_says_when_its_work_is_done,
);

fn stream_01_a_slow_producer_is_waited_for_in_every_phase<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[0.0; 64]);
    for round in 0..6 {
        // A hundred kernels on the caller's stream, none of which has run when f is called.
        rig.put(&x, &[round as f32; 64]);
        for _ in 0..100 {
            rig.kernels
                .increment(&rig.device, &rig.stream, x.ptr().unwrap(), 64, 1.0)
                .unwrap();
        }
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        assert_eq!(rig.read(&out), [2.0 * (round as f32 + 100.0); 64]);
    }
    drop(x);
    rig.finish();
}

fn a_run_on_another_stream_comes_after_the_last<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 3.0, 0.0);
    let x = rig.floats(&[4.0; 16]);
    rig.device.synchronize(&rig.stream).unwrap();
    let streams = [rig.stream.clone(), rig.device.create_stream().unwrap()];
    for round in 0..8 {
        let (first, second) = (&streams[round % 2], &streams[(round + 1) % 2]);
        let step = rig.trees.step();
        let a = rig
            .trees
            .run(&f, &step, &[], first, &mut [lend(&x)])
            .unwrap();
        let b = rig
            .trees
            .run(&g, &step, &[], second, &mut [lend(&a[0])])
            .unwrap();
        let bytes = b[0].read(&rig.device, second).unwrap();
        assert_eq!(bytes, [15.0f32; 16].map(f32::to_le_bytes).concat());
    }
    assert_eq!(rig.trees.counts().replays, 12);
    drop(x);
    drop(streams);
    rig.finish();
}

fn what_is_given_from_another_stream_is_not_reused_before_it_was_read<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 0.0);
    let other = rig.device.create_stream().unwrap();
    for round in 0..8 {
        let step = rig.trees.step();
        let x = rig.floats(&[round as f32; 1024]);
        rig.device.synchronize(&rig.stream).unwrap();
        // The run reads x on `other`; its memory is free for the rig's stream when the run returns.
        let out = rig
            .trees
            .run(&f, &step, &[], &other, &mut [give(x)])
            .unwrap();
        let next = rig.floats(&[-1.0; 1024]);
        let bytes = out[0].read(&rig.device, &other).unwrap();
        assert_eq!(bytes, [round as f32; 1024].map(f32::to_le_bytes).concat());
        drop(next);
    }
    rig.finish();
}

fn the_event_of_a_run_says_when_its_work_is_done<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let other = rig.device.create_stream().unwrap();
    let x = rig.floats(&[0.0; 64]);
    for round in 0..4 {
        for _ in 0..100 {
            let ptr = x.ptr().unwrap();
            rig.kernels
                .increment(&rig.device, &rig.stream, ptr, 64, 1.0)
                .unwrap();
        }
        let step = rig.trees.step();
        let (out, done) = rig
            .trees
            .run_with_event(&f, &step, &[], &rig.stream, &mut [lend(&x)])
            .unwrap();
        if !common::on_cuda() {
            // Nothing waits, so nothing ran yet.
            assert!(!rig.device.poll_event(&done).unwrap());
        }
        rig.device.wait(&other, &done).unwrap();
        let bytes = out[0].read(&rig.device, &other).unwrap();
        let want = [200.0 * (round as f32 + 1.0); 64];
        assert_eq!(bytes, want.map(f32::to_le_bytes).concat());
        assert!(rig.device.poll_event(&done).unwrap());
    }
    drop(x);
    rig.finish();
}

/// The same two pieces of work as graphs without a tree, which nobody orders: in some schedule the second reads what the first has not written yet. A tree
/// waits, once for each change of stream.
#[test]
fn without_an_event_between_streams_bytes_are_wrong_in_some_schedule() {
    let mut wrong = 0;
    for seed in 0..16 {
        let rig = Rig::new(HostDevice::builder().seed(seed).build().unwrap());
        let other = rig.device.create_stream().unwrap();
        let x = rig.floats(&[4.0; 16]);
        let mut graphs = [Graph::new(&rig.allocator), Graph::new(&rig.allocator)];
        let [first, second] = &mut graphs;
        let capture = first.capture(&rig.stream).unwrap();
        let a = rig.captured(&capture, &x, 1.0, 1.0);
        capture.end().unwrap();
        let capture = second.capture(&other).unwrap();
        let b = rig.captured(&capture, &a, 3.0, 0.0);
        capture.end().unwrap();
        rig.device.synchronize_device().unwrap();
        first.replay(&rig.stream).unwrap();
        second.replay(&other).unwrap();
        let got = b.read(&rig.device, &other);
        let want = [15.0f32; 16].map(f32::to_le_bytes).concat();
        wrong += u32::from(!got.is_ok_and(|got| got == want));
        // The tree, under the same schedules: see `a_run_on_another_stream_comes_after_the_last`.
        let (f, g) = (rig.scale_add("f", 1.0, 1.0), rig.scale_add("g", 3.0, 0.0));
        let _ = rig.device.clear_fault();
        for _ in 0..4 {
            let step = rig.trees.step();
            let (trees, stream) = (&rig.trees, &rig.stream);
            let a = trees.run(&f, &step, &[], stream, &mut [lend(&x)]).unwrap();
            let args = &mut [lend(&a[0])];
            let b = trees.run(&g, &step, &[], &other, args).unwrap();
            assert_eq!(b[0].read(&rig.device, &other).unwrap(), want);
        }
        rig.device.synchronize_device().unwrap();
    }
    assert!(wrong > 0);
}

/// After a run whose event the device does not take, its outputs are there and its work is done.
#[test]
fn a_run_whose_event_fails_has_run() {
    let device = Faulty::new(HostDevice::new());
    let rig = Rig::new(device.clone());
    let f = rig.scale_add("f", 2.0, 1.0);
    let x = rig.floats(&[3.0]);
    for _ in 0..2 {
        rig.one(&f, &rig.trees.step(), &x);
    }
    device.fail(Call::CreateEvent, 1, Code::OutOfMemory);
    let step = rig.trees.step();
    let args = &mut [lend(&x)];
    let refused = rig
        .trees
        .run_with_event(&f, &step, &[], &rig.stream, args)
        .unwrap_err();
    assert!(matches!(refused, cudagraph_trees::Error::Device(e) if e.code == Code::OutOfMemory));
    assert_eq!(rig.trees.counts().replays, 0);
    // A replay on the same stream records no event but the caller's.
    device.fail(Call::Record, 1, Code::OutOfMemory);
    let (out, done) = rig
        .trees
        .run_with_event(&f, &step, &[], &rig.stream, args)
        .unwrap();
    assert_eq!(
        (out.phase(), rig.trees.counts().replays),
        (Phase::Replay, 1)
    );
    assert!(device.query(&rig.stream).unwrap());
    device.synchronize_event(&done).unwrap();
    assert_eq!(rig.read(&out[0]), [7.0]);
    drop((out, x));
    rig.finish();
}

/// After the first failed capture the next call tries again; then one call in 2, in 4, and so on.
#[test]
fn t3_03_captures_that_fail_are_answered_eagerly_and_tried_again_less_and_less() {
    let device = Faulty::new(HostDevice::new());
    let rig = Rig::new(device.clone());
    let f = rig.scale_add("f", 2.0, 1.0);
    let x = rig.floats(&[3.0]);
    let mut tried = Vec::new();
    for call in 0..40 {
        let before = device.calls(Call::BeginCapture);
        if call > 0 {
            device.fail(Call::EndCapture, 1, Code::StreamCaptureInvalidated);
        }
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&f, &step, &x);
        let want = if call == 0 {
            Phase::Warmup
        } else {
            Phase::Eager
        };
        assert_eq!((phase, rig.read(&out)), (want, vec![7.0]));
        device.clear();
        if device.calls(Call::BeginCapture) > before {
            tried.push(call);
        }
    }
    assert_eq!(tried, [1, 2, 4, 8, 16, 32]);
    // The sixth failure pauses for 31 calls, of which 7 have been made; then nothing fails any more.
    let mut eager = 0;
    loop {
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&f, &step, &x);
        assert_eq!(rig.read(&out), [7.0]);
        if phase == Phase::Record {
            break;
        }
        eager += 1;
    }
    assert_eq!(eager, 24);
    drop(x);
    rig.finish();
}
