//! Giving memory back beside captures that were begun past the allocator: what waits there breaks none.

mod common;

use common::{Rig, cuda, on_cuda, one_by_one, wrapped};
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::{Call, CaptureMode, CaptureStatus, Code, Device};
use cudagraph_trees::pool::PoolError;
use cudagraph_trees::{Error, Graph, PoolOptions, Tensor};

suite!(
    a_trim_breaks_no_capture_of_others,
    a_trim_is_refused_beside_a_capture_of_ours,
);

const MIB: u64 = 1 << 20;
const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

/// Captures on a stream, past the allocator, two steps of x += 1 with `between` between them; and launches that.
fn capture_around<D: Device>(
    rig: &Rig<D>,
    theirs: &D::Stream,
    mode: CaptureMode,
    x: &Tensor<D>,
    between: impl FnOnce(),
) {
    let d = &rig.device;
    let (ptr, n) = (x.ptr().unwrap(), x.bytes() / 4);
    let step = || rig.kernels.increment(d, theirs, ptr, n, 1.0).unwrap();
    let before = rig.read(x);
    d.begin_capture(theirs, mode).unwrap();
    step();
    between();
    assert_eq!(d.capture_status(theirs), Ok(CaptureStatus::Active));
    step();
    let graph = d.end_capture(theirs).unwrap();
    assert_eq!(d.graph_info(&graph).unwrap().kernels, 2);
    d.launch_graph(&d.instantiate(&graph).unwrap(), theirs, &[])
        .unwrap();
    d.synchronize(theirs).unwrap();
    let expected: Vec<f32> = before.iter().map(|v| v + 2.0).collect();
    assert_eq!(rig.read(x), expected);
}

/// A segment of its own, free, on which work is underway.
fn leave_behind<D: Device>(rig: &Rig<D>, bytes: u64) {
    let big = rig.allocator.alloc(&rig.stream, bytes).unwrap();
    let ptr = big.ptr().unwrap();
    for value in 0..20 {
        rig.device.fill(&rig.stream, ptr, value, bytes).unwrap();
    }
}

fn a_trim_breaks_no_capture_of_others<D: Device>(rig: Rig<D>) {
    let theirs = rig.device.create_stream().unwrap();
    let x = rig.floats(&[0.0; 4]);
    rig.device.synchronize(&rig.stream).unwrap();
    for mode in MODES {
        capture_around(&rig, &theirs, mode, &x, || {
            leave_behind(&rig, 16 * MIB);
            let pool = rig.allocator.create_pool(PoolOptions::default()).unwrap();
            drop(pool.alloc(&rig.stream, 32 * MIB).unwrap());
            drop(pool);
            let free = rig.device.memory_info().unwrap().free;
            let trimmed = rig.allocator.trim().unwrap();
            assert_eq!((trimmed.segments, trimmed.bytes), (2, 48 * MIB));
            let given_back = rig.device.memory_info().unwrap().free - free;
            assert!(given_back >= 48 * MIB, "{given_back} B");
        });
    }
    drop(x);
    rig.finish();
}

fn a_trim_is_refused_beside_a_capture_of_ours<D: Device>(rig: Rig<D>) {
    let theirs = rig.device.create_stream().unwrap();
    let x = rig.floats(&[0.0; 4]);
    rig.device.synchronize(&rig.stream).unwrap();
    leave_behind(&rig, 16 * MIB);
    let mut graph = Graph::new(&rig.allocator);
    capture_around(&rig, &theirs, CaptureMode::ThreadLocal, &x, || {
        let capture = graph.capture(&rig.stream).unwrap();
        let refused = rig.allocator.trim().unwrap_err();
        assert!(
            matches!(refused, Error::CaptureUnderway { captures: 1 }),
            "{refused}"
        );
        capture.end().unwrap();
        assert_eq!(rig.allocator.trim().unwrap().bytes, 16 * MIB);
    });
    drop((graph, x));
    rig.finish();
}

/// The last step before an allocation is refused: all work is waited for, and what is free given back.
fn retried_beside_a_capture_of_others<D: Device>(rig: Rig<Faulty<D>>) {
    let d = &rig.device;
    let theirs = d.create_stream().unwrap();
    let x = rig.floats(&[0.0; 4]);
    d.synchronize(&rig.stream).unwrap();
    for (call, mode) in [Call::Reserve, Call::Map]
        .into_iter()
        .flat_map(|call| MODES.map(|mode| (call, mode)))
    {
        capture_around(&rig, &theirs, mode, &x, || {
            leave_behind(&rig, 16 * MIB);
            let reserved = rig.allocator.stats().reserved_bytes.current;
            let waits = [Call::Quiesce, Call::SynchronizeDevice].map(|wait| d.calls(wait));
            d.fail(call, 1, Code::OutOfMemory);
            let big = rig.allocator.alloc(&rig.stream, 64 * MIB).unwrap();
            let now = rig.allocator.stats().reserved_bytes.current;
            assert_eq!(
                now,
                reserved - 16 * MIB + 64 * MIB,
                "the segment was given back"
            );
            let waited = [Call::Quiesce, Call::SynchronizeDevice].map(|wait| d.calls(wait));
            assert_eq!(waited, [waits[0] + 1, waits[1]]);
            // Where that does not help, it is out of memory; the capture does not mind.
            d.fail(call, 1, Code::OutOfMemory)
                .fail(call, 2, Code::OutOfMemory);
            let refused = rig.allocator.alloc(&rig.stream, 128 * MIB).map(drop);
            let Err(Error::Pool(PoolError::OutOfMemory { state, .. })) = refused else {
                panic!("{refused:?}");
            };
            assert!(!state.contains("capture"), "{state}");
            drop(big);
            assert_eq!(rig.allocator.trim().unwrap().bytes, 64 * MIB);
        });
    }
    drop(x);
    rig.finish();
}

#[test]
fn an_allocation_is_tried_again_beside_a_capture_of_others() {
    let _alone = one_by_one();
    if on_cuda() {
        retried_beside_a_capture_of_others(Rig::new(Faulty::new(cuda())));
    } else {
        retried_beside_a_capture_of_others(Rig::new(wrapped()));
    }
}
