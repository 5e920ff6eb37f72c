//! Outputs of an ended generation that are the next run's inputs: copied in before their memory is used again, and stale afterwards.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::Rig;
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, Code, Device};
use cudagraph_trees::{Arg, Error, FunctionSpec, MovePolicy, OnMove, Phase, Tensor, give, lend};

suite!(
    t1_09_a_cache_carried_for_thousands_of_steps,
    t1_09_two_caches_that_change_places,
    a_fed_input_is_stale_after_the_run_that_read_it,
    a_view_of_an_ended_output_is_fed,
    what_is_fed_beside_what_is_held,
    a_generation_that_ended_below_one_that_lives,
    an_error_of_the_closure_leaves_the_fed_input,
    a_fed_input_declared_static_is_read_in_place,
    an_eager_run_reads_what_is_fed,
    fed_through_a_path_of_two,
);

use Phase::{Eager, Record, Replay, Warmup};

/// The token of each step is dropped before the next run, which gets its output.
fn t1_09_a_cache_carried_for_thousands_of_steps<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let mut cache = rig.floats(&[0.0; 64]);
    let mut phases = Vec::new();
    for round in 0..2000 {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&cache]);
        phases.push(out.phase());
        cache = out.only().unwrap();
        drop(step);
        if round % 100 < 4 {
            assert_eq!(rig.read(&cache), [round as f32 + 1.0; 64]);
        }
    }
    assert_eq!(phases[..3], [Warmup, Record, Replay]);
    assert!(phases[3..].iter().all(|p| *p == Replay), "{phases:?}");
    assert_eq!(rig.trees.counts().recordings, 1);
    assert_eq!(rig.trees.counts().restores, 0);
    drop(cache);
    rig.finish();
}

fn t1_09_two_caches_that_change_places<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let (a, b) = (inputs.get(0)?, inputs.get(1)?);
        Ok(vec![k.apply(rec, b, 1.0, 1.0)?, k.apply(rec, a, 2.0, 0.0)?])
    });
    let mut caches = [rig.floats(&[0.0; 64]), rig.floats(&[1.0; 64])];
    let mut want = [0.0f32, 1.0];
    let mut recorded = 0;
    for round in 0..60 {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&caches[0], &caches[1]]);
        recorded += u32::from(out.phase() == Record);
        let mut out = out.into_iter();
        caches = [out.next().unwrap(), out.next().unwrap()];
        want = [want[1] + 1.0, (want[0] * 2.0) % 1e6];
        if round % 2 == 1 {
            // The caller's own doing: the caches change places, and so do their addresses.
            caches.swap(0, 1);
            want.swap(0, 1);
        }
        drop(step);
        let values: Vec<f32> = caches.iter().map(|c| rig.read(c)[63]).collect();
        assert_eq!(values, want, "round {round}");
        if values.iter().any(|v| *v > 1000.0) {
            caches = [rig.floats(&[0.0; 64]), rig.floats(&[1.0; 64])];
            want = [0.0, 1.0];
        }
    }
    assert!(recorded <= 4, "{recorded} recordings");
    drop(caches);
    rig.finish();
}

fn stale_by<D: Device>(tensor: &Tensor<D>) -> Option<String> {
    match tensor.check() {
        Err(Error::Stale(stale)) => stale.taken_by.map(|by| by.to_string()),
        other => panic!("not stale: {other:?}"),
    }
}

fn a_fed_input_is_stale_after_the_run_that_read_it<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 10.0, 0.0);
    let x = rig.floats(&[1.0; 16]);
    for round in 0..5 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        let other = out.view(0, 4).unwrap();
        drop(step);
        assert_eq!(rig.read(&out), [2.0; 16]);
        let step = rig.trees.step();
        let next = if round % 2 == 0 {
            rig.one(&g, &step, &out)
        } else {
            rig.moved(&g, &step, out.clone()).1
        };
        assert_eq!(rig.read(&next), [20.0; 16]);
        assert_eq!(stale_by(&out).as_deref(), Some("g"));
        assert_eq!(stale_by(&other).as_deref(), Some("g"));
        rig.trees.audit().unwrap();
    }
    drop(x);
    rig.finish();
}

fn a_view_of_an_ended_output_is_fed<D: Device>(rig: Rig<D>) {
    // Twice the input, one after the other, of which every round takes a half.
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        let out = rec.alloc(2 * x.bytes())?;
        let (to, from, n) = (out.ptr()?, x.ptr()?, x.bytes() / 4);
        let (device, stream) = (rec.device(), rec.stream());
        k.kernels.scale_add(device, stream, to, from, n, 1.0, 1.0)?;
        let high = to.offset(4 * n);
        k.kernels
            .scale_add(device, stream, high, from, n, 2.0, 0.0)?;
        Ok(vec![out])
    });
    let mut view = rig.floats(&[1.0; 64]);
    let mut want = 1.0;
    for round in 0..12 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &view);
        let high = round % 3 == 0;
        view = out.view(if high { 256 } else { 0 }, 256).unwrap();
        want = if high { want * 2.0 } else { want + 1.0 };
        drop((out, step));
        assert_eq!(rig.read(&view), [want; 64]);
        rig.trees.audit().unwrap();
    }
    assert!(rig.trees.counts().recordings <= 3);
    drop(view);
    rig.finish();
}

fn what_is_fed_beside_what_is_held<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[0.0; 64]);
    // An open generation holds an output all the while.
    let long = rig.trees.step();
    let kept = rig.one(&f, &long, &x);
    let mut cache = rig.floats(&[100.0; 64]);
    for round in 0..10 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &cache);
        cache = out;
        drop(step);
        assert_eq!(rig.read(&kept), [1.0; 64]);
        assert_eq!(rig.read(&cache), [101.0 + round as f32; 64]);
        rig.trees.audit().unwrap();
    }
    drop((kept, long, cache, x));
    rig.finish();
}

fn a_generation_that_ended_below_one_that_lives<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 2.0, 0.0);
    let x = rig.floats(&[1.0; 16]);
    for _ in 0..5 {
        let first = rig.trees.step();
        let a = rig.one(&f, &first, &x);
        let second = rig.trees.step();
        let b = rig.one(&g, &second, &a);
        // The earlier ends, the later lives: its output keeps the path, on which `a` is an input in place.
        drop(first);
        let c = rig.one(&g, &second, &a);
        assert_eq!(rig.read(&b), [4.0; 16]);
        assert_eq!(rig.read(&c), [4.0; 16]);
        let d = rig.one(&f, &second, &c);
        assert_eq!(rig.read(&d), [5.0; 16]);
        assert!(matches!(a.check(), Err(Error::Stale(_))));
        drop((a, b, c, d));
    }
    drop(x);
    rig.finish();
}

fn an_error_of_the_closure_leaves_the_fed_input<D: Device>(rig: Rig<D>) {
    let fails = Arc::new(AtomicU32::new(0));
    let left = fails.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let x = inputs.get(0)?;
        let y = k.apply(rec, x, 1.0, 1.0)?;
        if rec.phase() == Record
            && left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
                .is_ok()
        {
            return Err("on purpose".into());
        }
        Ok(vec![y])
    });
    let x = rig.floats(&[1.0; 64]);
    let step = rig.trees.step();
    let cache = rig.one(&f, &step, &x);
    drop(step);
    fails.store(2, Ordering::Relaxed);
    for _ in 0..2 {
        let step = rig.trees.step();
        let failed = rig
            .trees
            .run(&f, &step, &[], &rig.stream, &mut [lend(&cache)]);
        assert!(matches!(failed, Err(Error::Function { phase: Record, .. })));
        // A recording does nothing, so nothing was read: what was fed is as before.
        assert_eq!(rig.read(&cache), [2.0; 64]);
        assert_eq!(rig.blocks(), 1);
        rig.trees.audit().unwrap();
    }
    let step = rig.trees.step();
    let (phase, next) = rig.phased(&f, &step, &cache);
    assert_eq!((phase, rig.read(&next)), (Record, vec![3.0; 64]));
    assert_eq!(stale_by(&cache).as_deref(), Some("f"));
    drop((x, next));
    rig.finish();
}

/// The capture of the run that is fed fails: the call is answered eagerly, with the bytes of what was fed.
#[test]
fn a_failed_capture_still_reads_what_is_fed() {
    let device = Faulty::new(HostDevice::new());
    let rig = Rig::new(device.clone());
    let f = rig.scale_add("f", 1.0, 1.0);
    let mut cache = rig.floats(&[0.0; 64]);
    let mut phases = Vec::new();
    for round in 0..8 {
        if round == 1 {
            device.fail(Call::EndCapture, 1, Code::StreamCaptureInvalidated);
        }
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&f, &step, &cache);
        phases.push(phase);
        cache = out;
        drop(step);
        assert_eq!(rig.read(&cache), [round as f32 + 1.0; 64]);
        rig.trees.audit().unwrap();
    }
    assert_eq!(phases[..4], [Warmup, Eager, Record, Replay]);
    drop(cache);
    rig.finish();
}

/// A launch that fails leaves what was fed, and the next run reads it.
#[test]
fn a_failed_launch_leaves_what_is_fed() {
    let device = Faulty::new(HostDevice::new());
    let rig = Rig::new(device.clone());
    let f = rig.scale_add("f", 1.0, 1.0);
    let mut cache = rig.floats(&[0.0; 64]);
    for _ in 0..4 {
        let step = rig.trees.step();
        cache = rig.one(&f, &step, &cache);
    }
    device.fail(Call::LaunchGraph, 1, Code::OutOfMemory);
    let step = rig.trees.step();
    let mut args = [give(cache)];
    let refused = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
    assert!(matches!(refused, Err(Error::Device(e)) if e.code == Code::OutOfMemory));
    let Arg::Give(cache) = &args[0] else {
        panic!("{args:?}")
    };
    assert_eq!(rig.read(cache), [4.0; 64]);
    let out = rig
        .trees
        .run(&f, &step, &[], &rig.stream, &mut args)
        .unwrap();
    assert_eq!(out.phase(), Replay);
    assert_eq!(rig.read(&out[0]), [5.0; 64]);
    drop(out);
    rig.finish();
}

fn a_fed_input_declared_static_is_read_in_place<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let spec = FunctionSpec::new("s")
        .static_input(0)
        .on_static_move(MovePolicy {
            after: 8,
            then: OnMove::Eager,
        });
    let s = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 3.0, 0.0)?])
    });
    let x = rig.floats(&[1.0; 64]);
    for _ in 0..8 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        drop(step);
        let step = rig.trees.step();
        let third = rig.one(&s, &step, &out);
        assert_eq!(rig.read(&third), [6.0; 64]);
        drop((out, third, step));
        rig.trees.audit().unwrap();
    }
    drop(x);
    rig.finish();
}

fn an_eager_run_reads_what_is_fed<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").capture_keys([[7].as_slice()]);
    let f = rig.register(spec, |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        Ok(vec![k.apply(rec, &x, 1.0, 1.0)?])
    });
    let mut cache = rig.floats(&[0.0; 64]);
    for round in 0..12 {
        let step = rig.trees.step();
        let key = if round % 3 == 2 { 1 } else { 7 };
        let mut args = [if round % 2 == 0 {
            lend(&cache)
        } else {
            give(cache.clone())
        }];
        let out = rig.call(&f, &step, &[key], &mut args);
        assert_eq!(out.phase() == Eager, key == 1);
        let next = out.only().unwrap();
        drop(args);
        cache = next;
        drop(step);
        assert_eq!(rig.read(&cache), [round as f32 + 1.0; 64]);
        rig.trees.audit().unwrap();
    }
    drop(cache);
    rig.finish();
}

fn fed_through_a_path_of_two<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 2.0, 0.0);
    let mut cache = rig.floats(&[0.0; 64]);
    let mut want = 0.0;
    let mut replayed = 0;
    for _ in 0..20 {
        let step = rig.trees.step();
        let (p1, a) = rig.phased(&f, &step, &cache);
        let (p2, b) = rig.phased(&g, &step, &a);
        want = (want + 1.0) * 2.0 % 4096.0;
        replayed += u32::from((p1, p2) == (Replay, Replay));
        assert_eq!(rig.read(&b), [want; 64]);
        assert_eq!(rig.read(&a), [want / 2.0; 64]);
        cache = b;
        drop((a, step));
        if want > 2000.0 {
            cache = rig.floats(&[0.0; 64]);
            want = 0.0;
        }
    }
    assert!(replayed >= 15, "{replayed}");
    drop(cache);
    rig.finish();
}
