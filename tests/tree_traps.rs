//! Traps that users of the runtime fell into: what looks right at the call, and went wrong later.

mod common;

use std::sync::{Arc, Mutex};

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{
    Arg, Budget, Error, FunctionSpec, OnOverwrite, Phase, Prepare, Reason, Tensor, give, lend,
};

suite!(
    a_declared_write_to_a_misaligned_output_is_seen,
    a_lent_tensor_of_another_stream_is_dropped_at_once,
    a_kept_output_is_read_on_another_stream,
    a_given_output_comes_back_from_a_failed_warmup,
    state_of_an_eager_function_used_on_two_streams,
    positions_that_the_function_does_not_have,
    prepare_counts_what_is_there,
    a_tree_that_was_shut_down_is_in_order,
    a_length_that_is_not_the_tensors,
    what_a_recording_has_the_address_of_is_dropped_at_once,
    an_output_of_another_tree_is_read_before_it_goes,
);

use Phase::{Eager, Record, Replay, Warmup};

/// Declared static, an output of the path at an address that is not aligned is copied; so a write to it must not be taken for one in place.
fn a_declared_write_to_a_misaligned_output_is_seen<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 0.0);
    let spec = FunctionSpec::new("inc")
        .static_input(0)
        .mutates(0)
        .align(1 << 30);
    let inc = rig.register(spec, |k, rec, inputs| {
        let x = inputs.get(0)?;
        let (device, stream) = (rec.device(), rec.stream());
        k.kernels
            .increment(device, stream, x.ptr()?, x.bytes() / 4, 1.0)?;
        Ok(vec![])
    });
    let x = rig.floats(&[1.0; 16]);
    for _ in 0..5 {
        let step = rig.trees.step();
        let pad = rig.one(&f, &step, &x);
        let y = rig.one(&f, &step, &pad);
        let aligned = y.ptr().unwrap().0.is_multiple_of(1 << 30);
        let out = rig.run(&inc, &step, &[&y]);
        assert!(aligned || out.reason() == Some(Reason::InputMutated(0)));
        assert_eq!(rig.read(&y), [2.0; 16]);
    }
    drop(x);
    rig.finish();
}

/// Written on one stream, lent to a run on another, dropped, and its memory written again: in each phase, by each schedule.
fn lent_and_dropped<D: Device>(rig: &Rig<D>, rounds: usize) {
    let f = rig.scale_add("f", 1.0, 0.0);
    let other = rig.device.create_stream().unwrap();
    for round in 0..rounds {
        let x = rig.floats(&[round as f32; 1024]);
        rig.device.synchronize(&rig.stream).unwrap();
        let step = rig.trees.step();
        let mut args = [lend(&x)];
        let out = rig.trees.run(&f, &step, &[], &other, &mut args).unwrap();
        drop(x);
        let next = rig.floats(&[-1.0; 1024]);
        let got = out[0].read(&rig.device, &other).unwrap();
        assert_eq!(got, [round as f32; 1024].map(f32::to_le_bytes).concat());
        rig.device.synchronize(&rig.stream).unwrap();
        drop(next);
    }
}

fn a_lent_tensor_of_another_stream_is_dropped_at_once<D: Device>(rig: Rig<D>) {
    lent_and_dropped(&rig, 6);
    rig.device.synchronize_device().unwrap();
    rig.finish();
}

#[test]
fn a_lent_tensor_of_another_stream_in_many_schedules() {
    for seed in 0..32 {
        let rig = Rig::new(HostDevice::builder().seed(seed).build().unwrap());
        lent_and_dropped(&rig, 4);
    }
}

fn kept_and_read_elsewhere<D: Device>(rig: &Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 1.0, 1.0);
    let other = rig.device.create_stream().unwrap();
    let sibling = cudagraph_trees::GraphTrees::new(&rig.allocator).unwrap();
    let kernels = rig.kernels.clone();
    let g = sibling
        .register(FunctionSpec::new("g"), move |rec, inputs| {
            let x = inputs.get(0)?;
            let out = rec.alloc(x.bytes())?;
            let (to, from, n) = (out.ptr()?, x.ptr()?, x.bytes() / 4);
            kernels.scale_add(rec.device(), rec.stream(), to, from, n, 10.0, 0.0)?;
            Ok(vec![out])
        })
        .unwrap();
    for round in 0..5 {
        let x = rig.floats(&[round as f32; 256]);
        let held = rig.one(&f, &rig.trees.step(), &x);
        rig.device.synchronize(&rig.stream).unwrap();
        // Moves it, on the rig's stream, behind some work.
        for _ in 0..20 {
            let ptr = x.ptr().unwrap();
            rig.kernels
                .increment(&rig.device, &rig.stream, ptr, 256, 1.0)
                .unwrap();
        }
        rig.one(&f, &rig.trees.step(), &x);
        let want = round as f32 + 1.0;
        let step = sibling.step();
        let mut args = [lend(&held)];
        let out = sibling.run(&g, &step, &[], &other, &mut args).unwrap();
        let got = out[0].read(&rig.device, &other).unwrap();
        assert_eq!(got, [10.0 * want; 256].map(f32::to_le_bytes).concat());
        let got = held.read(&rig.device, &other).unwrap();
        assert_eq!(got, [want; 256].map(f32::to_le_bytes).concat());
    }
    rig.device.synchronize_device().unwrap();
}

fn a_kept_output_is_read_on_another_stream<D: Device>(rig: Rig<D>) {
    kept_and_read_elsewhere(&rig);
    rig.finish();
}

#[test]
fn a_kept_output_on_another_stream_in_many_schedules() {
    for seed in 0..32 {
        let rig = Rig::new(HostDevice::builder().seed(seed).build().unwrap());
        kept_and_read_elsewhere(&rig);
    }
}

fn a_given_output_comes_back_from_a_failed_warmup<D: Device>(rig: Rig<D>) {
    for policy in [OnOverwrite::Stale, OnOverwrite::Copy] {
        rig.trees.on_overwrite(policy);
        let f = rig.scale_add("f", 1.0, 1.0);
        let bad = rig.register(FunctionSpec::new("bad"), |k, rec, inputs| {
            // Memory of its own, all written, before it fails.
            let scratch = rec.alloc(1 << 20)?;
            let (device, stream) = (rec.device(), rec.stream());
            k.kernels
                .fill(device, stream, scratch.ptr()?, 1 << 18, 7.0)?;
            drop(inputs);
            Err("on purpose".into())
        });
        let x = rig.floats(&[1.0; 64]);
        for _ in 0..4 {
            let held = rig.one(&f, &rig.trees.step(), &x);
            let step = rig.trees.step();
            let mut args = [give(held)];
            let failed = rig.trees.run(&bad, &step, &[], &rig.stream, &mut args);
            assert!(matches!(failed, Err(Error::Function { phase: Warmup, .. })));
            let Arg::Give(back) = &args[0] else {
                panic!("{policy:?}: {args:?}")
            };
            assert_eq!(rig.read(back), [2.0; 64]);
            let out = rig
                .trees
                .run(&f, &step, &[], &rig.stream, &mut args)
                .unwrap();
            assert_eq!(rig.read(&out[0]), [3.0; 64]);
            rig.trees.audit().unwrap();
        }
    }
    rig.finish();
}

fn state_of_an_eager_function_used_on_two_streams<D: Device>(rig: Rig<D>) {
    let other = rig.device.create_stream().unwrap();
    let event = rig.device.create_event().unwrap();
    for _ in 0..4 {
        let kept: Arc<Mutex<Option<Tensor<D>>>> = Arc::default();
        let f = rig.register(
            FunctionSpec::new("f").capture_if(|_| false),
            move |k, rec, inputs| {
                let x = inputs.get(0)?;
                let mut kept = kept.lock().unwrap();
                if kept.is_none() {
                    *kept = Some(rec.alloc_state(x.bytes())?);
                }
                let state = kept.as_ref().unwrap().ptr()?;
                let (device, stream, n) = (rec.device(), rec.stream(), x.bytes() / 4);
                for _ in 0..20 {
                    k.kernels.fill(device, stream, state, n, 3.0)?;
                }
                let out = rec.alloc(x.bytes())?;
                k.kernels
                    .mul(device, stream, out.ptr()?, state, x.ptr()?, n)?;
                Ok(vec![out])
            },
        );
        let x = rig.floats(&[2.0; 64]);
        let step = rig.trees.step();
        let first = rig.run(&f, &step, &[&x]);
        assert_eq!(first.phase(), Eager);
        rig.device.record(&event, &rig.stream).unwrap();
        rig.device.wait(&other, &event).unwrap();
        let mut args = [lend(&x)];
        let second = rig.trees.run(&f, &step, &[], &other, &mut args).unwrap();
        // The state goes with the function, while the second run is in flight.
        drop(f);
        let next = rig.floats(&[-1.0; 64]);
        let got = second[0].read(&rig.device, &other).unwrap();
        assert_eq!(got, [6.0f32; 64].map(f32::to_le_bytes).concat());
        assert_eq!(rig.read(&first[0]), [6.0; 64]);
        drop(next);
    }
    rig.device.synchronize_device().unwrap();
    rig.finish();
}

fn positions_that_the_function_does_not_have<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let specs = [
        FunctionSpec::new("w").mutates(5),
        FunctionSpec::new("s").static_input(1),
        FunctionSpec::new("b").bind(1, &x).mutates(2),
    ];
    for spec in specs {
        let f = rig.register(spec, |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 0.0)?])
        });
        let step = rig.trees.step();
        let refused = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
        match refused {
            Err(Error::Inputs { detail, .. }) => assert!(detail.contains("declared"), "{detail}"),
            other => panic!("{other:?}"),
        }
    }
    let twice = rig.trees.register(
        FunctionSpec::new("t").static_input(0).static_input(0),
        |_, _| Ok(vec![]),
    );
    match twice {
        Err(Error::Inputs { detail, .. }) => {
            assert!(
                detail.contains("input 0 is declared static twice"),
                "{detail}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.trees.counts().warmups, 0);
    drop(x);
    rig.finish();
}

fn prepare_counts_what_is_there<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 0.0);
    rig.trees.set_budget(Budget {
        graphs: 3,
        ..Budget::default()
    });
    let x = rig.floats(&[1.0; 4]);
    let keys: Vec<[i64; 1]> = (0..7).map(|n| [n]).collect();
    let requests: Vec<Prepare<'_, D>> = keys
        .iter()
        .map(|key| Prepare {
            function: &f,
            key,
            inputs: vec![&x],
        })
        .collect();
    let mut phases = Vec::new();
    let recorded = rig.trees.prepare(&rig.stream, &requests, |p| {
        phases.push(*p.outcome.as_ref().unwrap())
    });
    assert_eq!((recorded, phases), (3, vec![Record; 7]));
    let step = rig.trees.step();
    let out = rig.call(&f, &step, &[6], &mut [lend(&x)]);
    assert_eq!(out.phase(), Replay);
    drop((out, requests));
    drop(x);
    rig.finish();
}

fn a_tree_that_was_shut_down_is_in_order<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0; 4]);
    let step = rig.trees.step();
    let held = rig.one(&f, &step, &x);
    rig.trees.shutdown().unwrap();
    rig.trees.audit().unwrap();
    assert_eq!(rig.read(&held), [2.0; 4]);
    drop((held, x));
    rig.finish();
}

fn a_length_that_is_not_the_tensors<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 2]);
    for bytes in [2u64, 9] {
        let refused = x.write(&rig.device, &rig.stream, &vec![0; bytes as usize]);
        match refused {
            Err(Error::Length { bytes: given, of }) => assert_eq!((given, of), (bytes, 8)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(rig.read(&x), [1.0; 2]);
    drop(x);
    rig.finish();
}

/// What a recording has the address of, and its user may drop.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Baked {
    Static,
    Bound,
    State,
}

/// Run some times on one stream, then on another, and dropped as soon as that run has returned.
fn baked_and_dropped<D: Device>(rig: &Rig<D>, kind: Baked, runs_before: usize) {
    let (d, n) = (&rig.device, 1024);
    let (other, event) = (d.create_stream().unwrap(), d.create_event().unwrap());
    let x = rig.floats(&[2.0; 1024]);
    let spec = match kind {
        Baked::Static => FunctionSpec::new("f").static_input(0),
        Baked::Bound => FunctionSpec::new("f").bind(0, &x),
        Baked::State => FunctionSpec::new("f"),
    };
    let state: Mutex<Option<Tensor<D>>> = Mutex::default();
    let f = rig.register(spec, move |k, rec, inputs| {
        let mut state = state.lock().unwrap();
        if kind == Baked::State && state.is_none() {
            let made = rec.alloc_state(4 * n)?;
            k.kernels
                .fill(rec.device(), rec.stream(), made.ptr()?, n, 2.0)?;
            *state = Some(made);
        }
        let from = match &*state {
            Some(state) => state,
            None => inputs.get(0)?,
        };
        Ok(vec![k.apply(rec, from, 1.0, 0.0)?])
    });
    let args = || match kind {
        Baked::Static => vec![lend(&x)],
        Baked::Bound | Baked::State => Vec::new(),
    };
    let run = |stream: &D::Stream| {
        let step = rig.trees.step();
        let out = rig.trees.run(&f, &step, &[], stream, &mut args()).unwrap();
        (out, step)
    };
    for _ in 0..runs_before {
        drop(run(&rig.stream));
    }
    d.record(&event, &rig.stream).unwrap();
    d.wait(&other, &event).unwrap();
    let (out, step) = run(&other);
    drop((x, f));
    let next = [rig.floats(&[-1.0; 1024]), rig.floats(&[-1.0; 1024])];
    let got = out[0].read(d, &other).unwrap();
    let want = [2.0f32; 1024].map(f32::to_le_bytes).concat();
    assert_eq!(got, want, "{kind:?} after {runs_before} runs");
    d.synchronize_device().unwrap();
    drop((next, out, step));
}

fn what_a_recording_has_the_address_of_is_dropped_at_once<D: Device>(rig: Rig<D>) {
    for kind in [Baked::Static, Baked::Bound, Baked::State] {
        for runs_before in 0..4 {
            baked_and_dropped(&rig, kind, runs_before);
        }
    }
    rig.finish();
}

#[test]
fn what_a_recording_has_the_address_of_in_many_schedules() {
    for seed in 0..32 {
        for kind in [Baked::Static, Baked::Bound, Baked::State] {
            for runs_before in 0..4 {
                let rig = Rig::new(HostDevice::builder().seed(seed).build().unwrap());
                baked_and_dropped(&rig, kind, runs_before);
            }
        }
    }
}

/// An output of another tree, passed to a run on another stream: that tree's next run comes after it.
fn of_another_tree<D: Device>(rig: &Rig<D>, in_place: bool) {
    let d = &rig.device;
    let (other, event) = (d.create_stream().unwrap(), d.create_event().unwrap());
    let theirs = cudagraph_trees::GraphTrees::new(&rig.allocator).unwrap();
    let kernels = rig.kernels.clone();
    let g = theirs
        .register(FunctionSpec::new("g"), move |rec, inputs| {
            let (x, out) = (inputs.get(0)?, rec.alloc(1024)?);
            let (to, from) = (out.ptr()?, x.ptr()?);
            kernels.scale_add(rec.device(), rec.stream(), to, from, 256, 1.0, 1.0)?;
            Ok(vec![out])
        })
        .unwrap();
    let spec = FunctionSpec::new("f");
    let spec = match in_place {
        true => spec.static_input(0),
        false => spec,
    };
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 10.0, 0.0)?])
    });
    for round in 0..8 {
        let (x, later) = (rig.floats(&[round as f32; 256]), rig.floats(&[-100.0; 256]));
        let run_theirs = |x: &Tensor<D>| {
            let step = theirs.step();
            let out = theirs.run(&g, &step, &[], &rig.stream, &mut [lend(x)]);
            (out.unwrap().only().unwrap(), step)
        };
        let (y, their_step) = run_theirs(&x);
        d.record(&event, &rig.stream).unwrap();
        d.wait(&other, &event).unwrap();
        let step = rig.trees.step();
        let mut args = [if round % 4 == 3 {
            give(y.clone())
        } else {
            lend(&y)
        }];
        let out = rig.trees.run(&f, &step, &[], &other, &mut args).unwrap();
        // Dropped, or its step ended.
        let held = (round % 2 == 0).then_some(y);
        drop(their_step);
        drop(run_theirs(&later));
        let got = out[0].read(d, &other).unwrap();
        let want = [10.0 * (round as f32 + 1.0); 256]
            .map(f32::to_le_bytes)
            .concat();
        assert_eq!(got, want, "round {round}, {:?}", out.phase());
        drop(held);
    }
    d.synchronize_device().unwrap();
}

fn an_output_of_another_tree_is_read_before_it_goes<D: Device>(rig: Rig<D>) {
    of_another_tree(&rig, false);
    of_another_tree(&rig, true);
    rig.finish();
}

#[test]
fn an_output_of_another_tree_in_many_schedules() {
    for seed in 0..32 {
        let rig = Rig::new(HostDevice::builder().seed(seed).build().unwrap());
        of_another_tree(&rig, seed % 2 == 1);
    }
}
