//! A warm run allocates nothing on the heap: not the step's token, nor the inputs, nor the outputs, nor the drops of their handles.
//! This binary counts what its threads allocate.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::Rig;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{Arg, FunctionSpec, Outputs, Phase, Tensor, give, lend};

struct Counting;

thread_local! {
    /// Calls of the allocator by this thread: allocations and reallocations, and frees.
    static CALLS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

fn count(allocations: u64, frees: u64) {
    // A thread that is ending has no counter any more.
    let _ = CALLS.try_with(|calls| {
        let (a, f) = calls.get();
        calls.set((a + allocations, f + frees));
    });
}

// SAFETY: it forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, 0);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(0, 1);
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(1, 0);
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

type D = HostDevice;

/// Allocations and frees of the heap while `f` runs.
fn heap(f: impl FnOnce()) -> (u64, u64) {
    let before = CALLS.get();
    f();
    let after = CALLS.get();
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn the_counter_counts() {
    assert_eq!(heap(|| drop(Box::new(5))), (1, 1));
    assert_eq!(heap(|| drop(Vec::<u8>::with_capacity(100))), (1, 1));
}

/// Runs `turn` until it is warm (queues and lists have their room), then counts one more.
fn warm(rig: &Rig<D>, mut turn: impl FnMut() -> Phase) {
    for _ in 0..40 {
        turn();
        // Between turns the host waits, as a program that reads its results does.
        rig.device_wait();
    }
    for _ in 0..5 {
        let mut phase = Phase::Warmup;
        let counted = heap(|| phase = turn());
        assert_eq!((phase, counted), (Phase::Replay, (0, 0)));
        rig.device_wait();
    }
}

trait Wait {
    fn device_wait(&self);
}

impl Wait for Rig<D> {
    fn device_wait(&self) {
        use cudagraph_trees::device::Device;
        self.device.synchronize(&self.stream).unwrap();
    }
}

fn run(
    rig: &Rig<D>,
    f: &cudagraph_trees::Function,
    step: &cudagraph_trees::Step,
    args: &mut [Arg<'_, D>],
) -> Outputs<D> {
    rig.trees.run(f, step, &[3, 4], &rig.stream, args).unwrap()
}

#[test]
fn a_warm_run_on_one_node() {
    let rig = Rig::new(HostDevice::new());
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        (0..4)
            .map(|i| Ok(k.apply(rec, x, 1.0, i as f32)?))
            .collect()
    });
    let x = rig.floats(&[1.0, 2.0]);
    warm(&rig, || {
        let step = rig.trees.step();
        let out = run(&rig, &f, &step, &mut [lend(&x)]);
        let view = out[3].view(4, 4).unwrap();
        let clone = view.clone();
        let phase = out.phase();
        drop(out);
        drop((view, clone));
        phase
    });
    let step = rig.trees.step();
    let out = run(&rig, &f, &step, &mut [lend(&x)]);
    assert_eq!(rig.read(&out[3]), [4.0, 5.0]);
    drop((out, step, x));
    rig.finish();
}

#[test]
fn a_warm_path_with_every_kind_of_input() {
    let rig = Rig::new(HostDevice::new());
    let weights = rig.floats(&[2.0, 3.0]);
    let a = rig.register(
        FunctionSpec::new("a").bind(1, &weights),
        |k, rec, inputs| {
            let y = k.product(rec, inputs.get(0)?, inputs.get(1)?)?;
            Ok(vec![y.view(0, 8)?, inputs.get(1)?.clone()])
        },
    );
    // Given, lent, static, empty and a host value; the given one dies inside.
    let b = rig.register(
        FunctionSpec::new("b").static_input(2),
        |k, rec, mut inputs| {
            let y = inputs.take(0)?;
            let factor = inputs.value::<f32>(4)?;
            let z = k.sum(rec, &y, inputs.get(1)?)?;
            drop(y);
            let z = k.sum(rec, &z, inputs.get(2)?)?;
            Ok(vec![
                k.apply(rec, &z, *factor, 0.0)?,
                inputs.get(2)?.clone(),
                inputs.get(3)?.clone(),
            ])
        },
    );
    let c = rig.register(FunctionSpec::new("c"), |k, rec, inputs| {
        Ok(vec![
            inputs.get(0)?.clone(),
            k.sum(rec, inputs.get(0)?, inputs.get(1)?)?,
        ])
    });
    let (x, fixed) = (rig.floats(&[1.0, 1.0]), rig.floats(&[100.0, 100.0]));
    let value: cudagraph_trees::Value = std::sync::Arc::new(2.0f32);
    let empty = Tensor::empty();
    let check = |last: &Outputs<D>| assert_eq!(rig.read(&last[1]), [207.0, 209.0]);
    let turn = |checked: bool| {
        let outer = rig.trees.step();
        let step = rig.trees.step();
        let first = run(&rig, &a, &step, &mut [lend(&x)]);
        let mut first = first.into_iter();
        let given = first.next().unwrap();
        drop(first);
        let args = &mut [
            give(given),
            lend(&x),
            lend(&fixed),
            lend(&empty),
            Arg::Value(value.clone()),
        ];
        let second = run(&rig, &b, &step, args);
        let third = run(&rig, &c, &outer, &mut [lend(&second[0]), lend(&x)]);
        if checked {
            check(&third);
        }
        let phase = third.phase();
        // Held beyond the steps: the next run ends them.
        (phase, third, second)
    };
    let mut held = None;
    warm(&rig, || {
        let (phase, third, second) = turn(false);
        held = Some((third, second));
        phase
    });
    drop(turn(true));
    drop(held);
    drop((weights, x, fixed));
    rig.finish();
}

#[test]
fn run_into_with_many_outputs() {
    let rig = Rig::new(HostDevice::new());
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        (0..150)
            .map(|i| Ok(k.apply(rec, x, 1.0, i as f32)?))
            .collect()
    });
    let x = rig.floats(&[0.5]);
    let mut out = Outputs::new();
    warm(&rig, || {
        let step = rig.trees.step();
        rig.trees
            .run_into(&f, &step, &[], &rig.stream, &mut [lend(&x)], &mut out)
            .unwrap();
        out.phase()
    });
    assert_eq!(out.len(), 150);
    let step = rig.trees.step();
    rig.trees
        .run_into(&f, &step, &[], &rig.stream, &mut [lend(&x)], &mut out)
        .unwrap();
    assert_eq!(rig.read(&out[149]), [149.5]);
    // An error leaves nothing in it, and a next run has the room.
    let mut args = [Arg::Taken];
    let result = rig
        .trees
        .run_into(&f, &step, &[], &rig.stream, &mut args, &mut out);
    assert!(
        matches!(result, Err(cudagraph_trees::Error::Inputs { .. })),
        "{result:?}"
    );
    assert!(out.is_empty());
    drop((out, x, step));
    rig.finish();
}

/// A node that is replayed on one stream and on another in turn: what it has the addresses of is noted anew each time.
#[test]
fn streams_in_turn() {
    use cudagraph_trees::device::Device;
    let rig = Rig::new(HostDevice::new());
    let other = rig.device.create_stream().unwrap();
    let f = rig.register(FunctionSpec::new("f").static_input(0), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 1.0)?])
    });
    let x = rig.floats(&[1.0, 2.0]);
    rig.device.synchronize(&rig.stream).unwrap();
    let (mut turns, mut out) = (0, Outputs::new());
    warm(&rig, || {
        for stream in [&rig.stream, &other] {
            let step = rig.trees.step();
            let args = &mut [lend(&x)];
            rig.trees
                .run_into(&f, &step, &[], stream, args, &mut out)
                .unwrap();
            turns += 1;
        }
        out.phase()
    });
    assert!(turns > 4);
    assert_eq!(
        out[0].read(&rig.device, &other).unwrap(),
        [3.0f32, 5.0].map(f32::to_le_bytes).concat()
    );
    drop((x, out));
    rig.finish();
}
