//! Functions that write to their inputs: where the write is in place the function is captured, where it would go to a copy it runs eagerly. And inputs
//! of the host. Names carry the rows of the tables.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Rig, kinds};
use cudagraph_trees::device::Device;
use cudagraph_trees::{Arg, Error, Function, FunctionSpec, Phase, Reason, ReasonKind, lend};

suite!(
    mut_01_an_eager_input_and_a_buffer,
    mut_02_an_argument_for_the_output,
    mut_03_what_is_written_was_made_eagerly,
    mut_04_an_output_of_the_path_is_written,
    mut_06_said_once_whatever_comes_between,
    mut_08_a_constant_of_the_closure,
    mut_09_a_mutation_is_the_callers_to_see,
    mut_10_a_fallback_refused,
    skip_01_host_values_are_static,
    t7_09_an_output_is_updated_in_place,
    t7_10_a_value_of_the_host_changes,
);

use Phase::{Eager, Record, Replay, Warmup};

/// Adds `by` to input 0, in place, and gives what it reads there afterwards.
fn adds<D: Device>(rig: &Rig<D>, spec: FunctionSpec<D>, by: f32) -> Function {
    rig.register(spec, move |k, rec, inputs| {
        let y = inputs.get(0)?;
        k.kernels
            .increment(rec.device(), rec.stream(), y.ptr()?, y.bytes() / 4, by)?;
        Ok(vec![k.apply(rec, y, 1.0, 0.0)?])
    })
}

fn mut_01_an_eager_input_and_a_buffer<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let f = adds(&rig, FunctionSpec::new("f").mutates(0), 1.0);
    let x = rig.floats(&[1.0, 2.0]);
    let out = rig.run(&f, &rig.trees.step(), &[&x]);
    assert_eq!(out.reason(), Some(Reason::InputMutated(0)));
    assert_eq!((out.phase(), out.node()), (Eager, None));
    assert_eq!(
        (rig.read(&x), rig.read(&out[0])),
        (vec![2.0, 3.0], vec![2.0, 3.0])
    );
    assert_eq!(kinds(&said), [("f".into(), ReasonKind::InputMutated)]);
    assert_eq!(rig.trees.descendants(), []);
    assert_eq!(rig.trees.report(&f).unwrap().eager(), 1);
    // A buffer of the function's own is where it was.
    let buffer = rig.floats(&[0.0]);
    let spec = FunctionSpec::new("g").mutates(0).bind(0, &buffer);
    let g = adds(&rig, spec, 1.0);
    for (round, phase) in [Warmup, Record, Replay].into_iter().enumerate() {
        let out = rig.run(&g, &rig.trees.step(), &[]);
        let value = vec![round as f32 + 1.0];
        assert_eq!(out.phase(), phase);
        assert_eq!(
            (rig.read(&buffer), rig.read(&out[0])),
            (value.clone(), value)
        );
    }
    assert_eq!(kinds(&said).len(), 1);
    drop((x, out, buffer));
    rig.finish();
}

fn mut_02_an_argument_for_the_output<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let body = |spec: FunctionSpec<D>| {
        rig.register(spec.mutates(1), |k, rec, inputs| {
            let (x, out) = (inputs.get(0)?, inputs.get(1)?);
            let n = x.bytes() / 4;
            k.kernels.scale_add(
                rec.device(),
                rec.stream(),
                out.ptr()?,
                x.ptr()?,
                n,
                3.0,
                1.0,
            )?;
            Ok(vec![])
        })
    };
    let (f, in_place) = (
        body(FunctionSpec::new("f")),
        body(FunctionSpec::new("in place").static_input(1)),
    );
    let out = rig.floats(&[0.0, 0.0]);
    for round in 0..3 {
        let x = rig.floats(&[round as f32, 2.0]);
        for (f, phase) in [(&f, Eager), (&in_place, [Warmup, Record, Replay][round])] {
            rig.put(&out, &[0.0, 0.0]);
            assert_eq!(rig.run(f, &rig.trees.step(), &[&x, &out]).phase(), phase);
            assert_eq!(rig.read(&out), [round as f32 * 3.0 + 1.0, 7.0]);
        }
    }
    assert_eq!(kinds(&said), [("f".into(), ReasonKind::InputMutated)]);
    drop(out);
    rig.finish();
}

/// Adaptation: outputs of the path may always be written; where the producer is not captured, what it makes is no output of the path.
fn mut_03_what_is_written_was_made_eagerly<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let spec = FunctionSpec::new("a").capture_if(|_| false);
    let a = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let mutate = adds(&rig, FunctionSpec::new("mutate").mutates(0), 1.0);
    let x = rig.floats(&[3.0]);
    for _ in 0..3 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let out = rig.run(&mutate, &step, &[&y]);
        assert_eq!(out.reason(), Some(Reason::InputMutated(0)));
        assert_eq!((rig.read(&y), rig.read(&out[0])), (vec![7.0], vec![7.0]));
    }
    assert_eq!(kinds(&said), [("mutate".into(), ReasonKind::InputMutated)]);
    drop(x);
    rig.finish();
}

fn mut_04_an_output_of_the_path_is_written<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let a = rig.scale_add("a", 2.0, 0.0);
    let mutate = adds(&rig, FunctionSpec::new("mutate").mutates(0), 1.0);
    let x = rig.floats(&[3.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let out = rig.run(&mutate, &step, &[&y]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![7.0]));
        assert_eq!(rig.read(&y), [7.0]);
    }
    assert_eq!((kinds(&said).len(), rig.trees.counts().eager), (0, 0));
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    let copy = rig.floats(&rig.read(&y));
    let out = rig.run(&mutate, &step, &[&copy]);
    assert_eq!((out.phase(), rig.read(&copy)), (Eager, vec![7.0]));
    assert_eq!(rig.read(&y), [6.0]);
    assert_eq!(kinds(&said), [("mutate".into(), ReasonKind::InputMutated)]);
    drop((x, y, out, copy, step));
    rig.finish();
}

fn mut_06_said_once_whatever_comes_between<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let a = rig.scale_add("a", 2.0, 0.0);
    let mutate = adds(&rig, FunctionSpec::new("mutate").mutates(0), 1.0);
    let x = rig.floats(&[3.0]);
    let eagerly = || {
        let y = rig.floats(&[0.0]);
        let out = rig.run(&mutate, &rig.trees.step(), &[&y]);
        assert_eq!((out.phase(), rig.read(&y)), (Eager, vec![1.0]));
    };
    eagerly();
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let out = rig.run(&mutate, &step, &[&y]);
        assert_eq!((out.phase(), rig.read(&y)), (phase, vec![7.0]));
    }
    eagerly();
    assert_eq!(kinds(&said), [("mutate".into(), ReasonKind::InputMutated)]);
    assert_eq!(rig.trees.report(&mutate).unwrap().eager(), 2);
    drop(x);
    rig.finish();
}

/// Adaptation: the module is the closure, which owns the constant.
fn mut_08_a_constant_of_the_closure<D: Device>(rig: Rig<D>) {
    let constant = rig.floats(&[10.0]);
    let own = constant.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        k.kernels
            .increment(rec.device(), rec.stream(), own.ptr()?, 1, 1.0)?;
        Ok(vec![k.sum(rec, inputs.get(0)?, &own)?])
    });
    let x = rig.floats(&[1.0]);
    for (round, phase) in [Warmup, Record, Replay, Replay].into_iter().enumerate() {
        let (p, out) = rig.phased(&f, &rig.trees.step(), &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![12.0 + round as f32]));
    }
    assert_eq!(rig.read(&constant), [14.0]);
    drop((f, constant, x));
    rig.finish();
}

fn mut_09_a_mutation_is_the_callers_to_see<D: Device>(rig: Rig<D>) {
    for (spec, phases) in [
        (FunctionSpec::new("eager").mutates(0), [Eager; 5]),
        (
            FunctionSpec::new("static").mutates(0).static_input(0),
            [Warmup, Record, Replay, Replay, Replay],
        ),
    ] {
        let f = adds(&rig, spec, 3.0);
        let y = rig.floats(&[1.0, -1.0]);
        for (round, phase) in phases.into_iter().enumerate() {
            assert_eq!(rig.run(&f, &rig.trees.step(), &[&y]).phase(), phase);
            let added = 3.0 * (round as f32 + 1.0);
            assert_eq!(rig.read(&y), [1.0 + added, -1.0 + added]);
        }
    }
    rig.finish();
}

fn mut_10_a_fallback_refused<D: Device>(rig: Rig<D>) {
    rig.trees.refuse(ReasonKind::EAGER);
    let (f, runs) = rig.counted(FunctionSpec::new("f").mutates(0), |_, _, _| Ok(vec![]));
    let x = rig.floats(&[1.0]);
    let refused = rig
        .trees
        .run(&f, &rig.trees.step(), &[], &rig.stream, &mut [lend(&x)]);
    match refused {
        Err(Error::Refused { function, reason }) => {
            assert_eq!((&*function, reason), ("f", Reason::InputMutated(0)));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(runs.load(Ordering::Relaxed), 0);
    drop(x);
    rig.finish();
}

fn skip_01_host_values_are_static<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let by = inputs.value::<f32>(0)?;
        Ok(vec![k.apply(rec, inputs.get(1)?, *by, 0.0)?])
    });
    let x = rig.floats(&[3.0]);
    let values: [cudagraph_trees::Value; 2] = [Arc::new(2.0f32), Arc::new(5.0f32)];
    for (value, phase, result) in [
        (0, Warmup, 6.0),
        (0, Record, 6.0),
        (1, Record, 15.0),
        (1, Replay, 15.0),
        (0, Replay, 6.0),
    ] {
        let mut args = [Arg::Value(values[value].clone()), lend(&x)];
        let out = rig.call(&f, &rig.trees.step(), &[], &mut args);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![result]));
    }
    // A tensor where the host value was is the closure's to refuse, whatever the phase.
    let failed = rig.trees.run(
        &f,
        &rig.trees.step(),
        &[],
        &rig.stream,
        &mut [lend(&x), lend(&x)],
    );
    let Err(Error::Function { source, .. }) = failed.map(drop) else {
        panic!("a tensor is no host value")
    };
    assert!(
        matches!(source.downcast_ref(), Some(Error::Inputs { .. })),
        "{source}"
    );
    drop(x);
    rig.finish();
}

fn t7_09_an_output_is_updated_in_place<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let g = adds(&rig, FunctionSpec::new("g").mutates(0), 5.0);
    for (generation, phase) in [Warmup, Record, Replay, Replay, Replay]
        .into_iter()
        .enumerate()
    {
        let x = rig.floats(&[generation as f32]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let z = rig.run(&g, &step, &[&y]);
        assert_eq!(z.phase(), phase);
        let value = vec![2.0 * generation as f32 + 5.0];
        assert_eq!((rig.read(&y), rig.read(&z[0])), (value.clone(), value));
    }
    assert_eq!(rig.trees.counts().eager, 0);
    rig.finish();
}

fn t7_10_a_value_of_the_host_changes<D: Device>(rig: Rig<D>) {
    // The value is baked in, so each is a recording; a limit keeps that from going on, and says which input it is.
    let spec = FunctionSpec::new("f").max_recordings_at_a_place(2);
    let f = rig.register(spec, |k, rec, inputs| {
        let by = inputs.value::<f32>(1)?;
        Ok(vec![k.apply(rec, inputs.get(0)?, *by, 0.0)?])
    });
    // What comes before and after is not concerned.
    let (before, after) = (
        rig.scale_add("before", 1.0, 1.0),
        rig.scale_add("after", 1.0, 2.0),
    );
    let x = rig.floats(&[1.0]);
    for round in 0..8 {
        let by = round as f32 + 1.0;
        let step = rig.trees.step();
        let y = rig.one(&before, &step, &x);
        let mut args = [lend(&y), Arg::Value(Arc::new(by))];
        let z = rig.call(&f, &step, &[], &mut args);
        let (phase, out) = rig.phased(&after, &step, &z[0]);
        assert_eq!(rig.read(&out), [2.0 * by + 2.0]);
        let expected = match round {
            0 => Reason::NotWarm,
            1 => Reason::FirstRecording,
            2 => Reason::Changed(cudagraph_trees::Mismatch::Value(1)),
            _ => Reason::PlaceLimit,
        };
        assert_eq!(z.reason(), Some(expected));
        // Below the eager run it is recorded once, as a child of what came before.
        let phases = [
            Warmup, Record, Record, Record, Replay, Replay, Replay, Replay,
        ];
        assert_eq!(phase, phases[round], "{round}");
    }
    drop(x);
    rig.finish();
}
