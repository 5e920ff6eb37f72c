//! Policies for inputs that move: how often they are recorded again, and what is done then. Names carry the rows of the tables.
//!
//! Where a row has a forward and a backward, both are functions here: the backward takes what the forward gave, and the parameter.

mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{
    Error, Function, FunctionSpec, InputView, Mismatch, MovePolicy, NodeId, OnMove, Phase, Reason,
    ReasonKind, Tensor, give, lend,
};

suite!(
    static_07_moves_within_the_limit,
    static_08_static_moves_are_not_charged,
    static_09_static_moves_charged_by_policy,
    static_11_a_managed_input_that_moves_is_charged,
    static_12_an_error_lists_every_moved_input,
    static_17_a_demoted_input_and_its_lifetime,
    static_19_skipped_for_good_at_one_place,
    static_20_a_declared_static_input_is_not_demoted,
    static_22_an_input_that_escapes_is_not_demoted,
    limits_count_moves_of_one_length_among_others,
    t7_04_two_parameter_sets_alternate,
    tree_40_options_are_each_functions_own,
);

use Phase::{Eager, Record, Replay, Warmup};

const fn after(after: u32, then: OnMove) -> MovePolicy {
    MovePolicy { after, then }
}

/// a * b, of which b is static.
fn times<D: Device>(rig: &Rig<D>, spec: FunctionSpec<D>) -> Function {
    rig.register(spec.static_input(1), |k, rec, inputs| {
        Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(1)?)?])
    })
}

/// y = x * p and g = y * p, and what both come to.
fn forward_backward<D: Device>(rig: &Rig<D>, spec: fn(&str) -> FunctionSpec<D>) -> [Function; 2] {
    [times(rig, spec("forward")), times(rig, spec("backward"))]
}

/// Steps of both, and the values.
fn train<D: Device>(
    rig: &Rig<D>,
    [forward, backward]: &[Function; 2],
    x: &Tensor<D>,
    (param, p): (&Tensor<D>, f32),
    steps: usize,
) {
    for round in 0..steps {
        let value = round as f32 + 1.0;
        rig.put(x, &[value; 4]);
        let step = rig.trees.step();
        let y = rig.run(forward, &step, &[x, param]);
        let g = rig.run(backward, &step, &[&y[0], param]);
        assert_eq!(rig.read(&y[0]), [value * p; 4]);
        assert_eq!(rig.read(&g[0]), [value * p * p; 4]);
    }
}

fn static_07_moves_within_the_limit<D: Device>(rig: Rig<D>) {
    let spec = |name: &str| {
        let policy = after(1, OnMove::Skip);
        let spec = FunctionSpec::new(name).on_static_move(policy);
        spec.on_managed_move(policy)
    };
    let functions = forward_backward(&rig, spec);
    let x = rig.floats(&[0.0; 4]);
    let (p1, p2) = (rig.floats(&[2.0; 4]), rig.floats(&[5.0; 4]));
    for param in [(&p1, 2.0), (&p2, 5.0), (&p1, 2.0)] {
        train(&rig, &functions, &x, param, 6);
    }
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.eager), (4, 0));
    drop((x, p1, p2));
    rig.finish();
}

fn static_08_static_moves_are_not_charged<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let spec = |name: &str| FunctionSpec::new(name).on_managed_move(after(0, OnMove::Skip));
    let functions = forward_backward(&rig, spec);
    let x = rig.floats(&[0.0; 4]);
    let params: Vec<_> = (1..=5).map(|p| rig.floats(&[p as f32; 4])).collect();
    for (index, param) in params.iter().enumerate() {
        train(&rig, &functions, &x, (param, index as f32 + 1.0), 6);
    }
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.eager), (10, 0));
    for f in &functions {
        let report = rig.trees.report(f).unwrap();
        assert_eq!((report.recordings, report.eager()), (5, 0));
    }
    assert_eq!(*said.lock().unwrap(), []);
    drop((x, params));
    rig.finish();
}

fn static_09_static_moves_charged_by_policy<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let spec = |name: &str| FunctionSpec::new(name).on_static_move(after(0, OnMove::Eager));
    let functions = forward_backward(&rig, spec);
    let x = rig.floats(&[0.0; 4]);
    let (p1, p2) = (rig.floats(&[2.0; 4]), rig.floats(&[5.0; 4]));
    train(&rig, &functions, &x, (&p1, 2.0), 3);
    assert_eq!(rig.trees.counts().recordings, 2);
    // What the forward gives is no output of the path now, so the backward is at the root.
    train(&rig, &functions, &x, (&p2, 5.0), 1);
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.eager), (3, 1));
    {
        let said = said.lock().unwrap();
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].function, "forward");
        let moved = Mismatch::StaticMoved {
            input: 1,
            recorded: p1.ptr().unwrap(),
            passed: p2.ptr().unwrap(),
        };
        assert_eq!(said[0].reason, Reason::InputMoved(moved));
    }
    // At the address that was recorded both replay.
    train(&rig, &functions, &x, (&p1, 2.0), 3);
    assert_eq!(rig.trees.counts().eager, 1);
    drop((x, p1, p2));
    rig.finish();
}

fn static_11_a_managed_input_that_moves_is_charged<D: Device>(rig: Rig<D>) {
    for then in [OnMove::Eager, OnMove::Skip] {
        let said = rig.advice();
        let a = rig.scale_add("a", 2.0, 0.0);
        let spec = FunctionSpec::new("b").on_managed_move(after(0, then));
        let b = rig.register(spec, |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 10.0)?])
        });
        let x = rig.floats(&[1.0, 2.0]);
        for phase in [Warmup, Record, Replay] {
            let step = rig.trees.step();
            let y = rig.one(&a, &step, &x);
            let (p, out) = rig.phased(&b, &step, &y);
            assert_eq!((p, rig.read(&out)), (phase, vec![12.0, 14.0]));
        }
        for round in 0..6 {
            let step = rig.trees.step();
            let y = rig.one(&a, &step, &x);
            let copy = rig.floats(&rig.read(&y));
            let out = rig.run(&b, &step, &[&copy]);
            assert_eq!((out.phase(), rig.read(&out[0])), (Eager, vec![12.0, 14.0]));
            let reason = out.reason().unwrap();
            if round == 0 || then == OnMove::Eager {
                let Reason::InputMoved(Mismatch::ManagedMoved {
                    input: 0,
                    recorded,
                    passed,
                }) = reason
                else {
                    panic!("{reason:?}")
                };
                assert_eq!((recorded, passed), (y.ptr().unwrap(), copy.ptr().unwrap()));
            } else {
                assert_eq!(reason, Reason::Skipped);
            }
        }
        let said = said.lock().unwrap();
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].reason.kind(), ReasonKind::InputMoved);
        assert_eq!(rig.trees.report(&b).unwrap().eager(), 6);
        assert_eq!(rig.trees.report(&b).unwrap().recordings, 1);
    }
    rig.finish();
}

fn static_12_an_error_lists_every_moved_input<D: Device>(rig: Rig<D>) {
    let bound = rig.floats(&[100.0]);
    let line = line!();
    let spec = FunctionSpec::new("f")
        .static_input(3)
        .static_input(0)
        .bind(1, &bound)
        .on_static_move(after(0, OnMove::Error));
    let f = rig.register(spec, |k, rec, inputs| {
        let first = k.sum(rec, inputs.get(0)?, inputs.get(1)?)?;
        let second = k.sum(rec, inputs.get(2)?, inputs.get(3)?)?;
        Ok(vec![k.sum(rec, &first, &second)?])
    });
    let x = rig.floats(&[1.0]);
    let old = [rig.floats(&[10.0]), rig.floats(&[20.0])];
    let new = [rig.floats(&[30.0]), rig.floats(&[40.0])];
    for phase in [Warmup, Record, Replay] {
        let out = rig.run(&f, &rig.trees.step(), &[&old[0], &x, &old[1]]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![131.0]));
    }
    let step = rig.trees.step();
    let before = rig.trees.counts();
    let mut args = [lend(&new[0]), give(x.clone()), lend(&new[1])];
    let refused = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
    let Err(error) = refused.map(drop) else {
        panic!("both moved")
    };
    let text = error.to_string();
    let Error::InputMoved { function, moved } = error else {
        panic!("{error}")
    };
    assert_eq!((&*function, moved.len()), ("f", 2));
    for (moved, (input, declared, index)) in moved.iter().zip([(0, line + 3, 0), (3, line + 2, 1)])
    {
        assert_eq!(moved.input, input);
        assert_eq!(
            (moved.recorded, moved.passed),
            (old[index].ptr().unwrap(), new[index].ptr().unwrap())
        );
        let at = moved.declared_at.unwrap();
        assert_eq!((at.file(), at.line()), (file!(), declared));
        assert!(text.contains(&moved.to_string()), "{text}");
    }
    // Nothing was run, and nothing given up.
    assert!(args[1].is_given());
    assert_eq!(rig.trees.counts(), before);
    // One that moved alone is named alone.
    let refused = rig.trees.run(
        &f,
        &step,
        &[],
        &rig.stream,
        &mut [lend(&old[0]), lend(&x), lend(&new[1])],
    );
    let Err(Error::InputMoved { moved, .. }) = refused.map(drop) else {
        panic!("it moved")
    };
    assert_eq!(moved.iter().map(|m| m.input).collect::<Vec<_>>(), [3]);
    let out = rig.run(&f, &step, &[&old[0], &x, &old[1]]);
    assert_eq!((out.phase(), rig.read(&out[0])), (Replay, vec![131.0]));
    drop(args);
    drop((out, step, bound, x, old, new));
    rig.finish();
}

/// A producer of three outputs.
fn three<D: Device>(rig: &Rig<D>) -> Function {
    rig.register(FunctionSpec::new("p").skip_warmup(), |k, rec, inputs| {
        let x = inputs.get(0)?;
        let make = |add: f32| k.apply(rec, x, 1.0, add);
        Ok([1.0, 2.0, 3.0]
            .map(make)
            .into_iter()
            .collect::<Result<_, _>>()?)
    })
}

fn static_17_a_demoted_input_and_its_lifetime<D: Device>(rig: Rig<D>) {
    let p = three(&rig);
    let spec = FunctionSpec::new("c")
        .skip_warmup()
        .on_managed_move(after(0, OnMove::Copy));
    let c = rig.register(spec, |k, rec, mut inputs| {
        let (a, b) = (inputs.take(0)?, inputs.take(1)?);
        let out = k.sum(rec, &a, &b)?;
        Ok(vec![out])
    });
    let x = rig.floats(&[10.0]);
    let mut nodes = Vec::new();
    for round in 0..2 {
        for i in 0..3 {
            let step = rig.trees.step();
            let made: Vec<_> = rig.run(&p, &step, &[&x]).into_iter().collect();
            let (a, b) = (made[i].clone(), made[2].clone());
            drop(made);
            assert_eq!(rig.trees.path_live(), if i == 2 { 1 } else { 2 });
            let mut args = [give(a), give(b)];
            let out = rig.call(&c, &step, &[], &mut args);
            assert_eq!(rig.read(&out[0]), [11.0 + i as f32 + 13.0], "{round} {i}");
            assert_eq!(rig.trees.path_live(), 1, "both are given up, copied or not");
            nodes.push(out.node().unwrap());
        }
    }
    let children = [1, 2, 2].map(NodeId);
    assert_eq!(nodes, [children, children].concat());
    let view = rig.trees.view();
    assert_eq!(view.nodes[2].inputs[0], InputView::Copied { bytes: 4 });
    assert!(matches!(
        view.nodes[2].inputs[1],
        InputView::Managed { output: 2, .. }
    ));
    drop(x);
    rig.finish();
}

fn static_19_skipped_for_good_at_one_place<D: Device>(rig: Rig<D>) {
    let p = three(&rig);
    let spec = FunctionSpec::new("c")
        .skip_warmup()
        .on_managed_move(after(0, OnMove::Skip));
    let (c, runs) = rig.counted(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 10.0, 0.0)?])
    });
    let x = rig.floats(&[0.0]);
    let run = |i: usize| {
        let step = rig.trees.step();
        let made = rig.run(&p, &step, &[&x]);
        let out = rig.run(&c, &step, &[&made[i]]);
        assert_eq!(rig.read(&out[0]), [10.0 * (i as f32 + 1.0)]);
        let runs = runs.load(std::sync::atomic::Ordering::Relaxed);
        (out.phase(), runs, rig.trees.descendants())
    };
    assert_eq!(run(0), (Record, 1, vec![1]));
    assert_eq!(run(1), (Eager, 2, vec![1]));
    // Also at the address that was recorded.
    assert_eq!(run(0), (Eager, 3, vec![1]));
    assert_eq!(run(0), (Eager, 4, vec![1]));
    let report = rig.trees.report(&c).unwrap();
    assert_eq!(report.count(ReasonKind::InputMoved), 1);
    assert_eq!(report.count(ReasonKind::Skipped), 2);
    // Elsewhere in the tree it is not skipped.
    for phase in [Record, Replay] {
        let (p, out) = rig.phased(&c, &rig.trees.step(), &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![0.0]));
    }
    // Its place goes with the recordings.
    rig.trees.invalidate(&p).unwrap();
    assert_eq!(run(0).0, Record);
    drop(x);
    rig.finish();
}

fn static_20_a_declared_static_input_is_not_demoted<D: Device>(rig: Rig<D>) {
    for then in [OnMove::Copy, OnMove::Skip] {
        let p = three(&rig);
        let spec = FunctionSpec::new("c")
            .skip_warmup()
            .static_input(0)
            .on_managed_move(after(0, then));
        let c = rig.register(spec, |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, 10.0, 0.0)?])
        });
        let x = rig.floats(&[0.0]);
        for phase in [Record, Replay] {
            for i in 0..3 {
                let step = rig.trees.step();
                let made = rig.run(&p, &step, &[&x]);
                let out = rig.run(&c, &step, &[&made[i]]);
                assert_eq!(rig.read(&out[0]), [10.0 * (i as f32 + 1.0)]);
                assert_eq!(out.phase(), phase);
            }
        }
        let view = rig.trees.view();
        let inputs: Vec<_> = view
            .nodes
            .iter()
            .filter(|node| node.function == "c")
            .map(|node| matches!(node.inputs[0], InputView::Managed { .. }))
            .collect();
        assert_eq!(inputs, [true; 3], "none is copied");
        drop((p, c));
    }
    rig.finish();
}

fn static_22_an_input_that_escapes_is_not_demoted<D: Device>(rig: Rig<D>) {
    for then in [OnMove::Copy, OnMove::Skip, OnMove::Eager] {
        let p = three(&rig);
        let spec = FunctionSpec::new("c")
            .skip_warmup()
            .on_managed_move(after(0, then));
        let c = rig.register(spec, |k, rec, inputs| {
            let x = inputs.get(0)?.clone();
            Ok(vec![k.apply(rec, &x, 10.0, 0.0)?, x])
        });
        let x = rig.floats(&[0.0]);
        for phase in [Record, Replay] {
            for i in 0..3 {
                let step = rig.trees.step();
                let made = rig.run(&p, &step, &[&x]);
                let out = rig.run(&c, &step, &[&made[i]]);
                assert_eq!(out.phase(), phase);
                assert_eq!(out[1].storage_id(), made[i].storage_id());
                assert_eq!(rig.read(&out[0]), [10.0 * (i as f32 + 1.0)]);
            }
        }
        assert_eq!(rig.trees.report(&c).unwrap().recordings, 3);
        drop((p, c));
    }
    rig.finish();
}

/// The move that is charged is of the recording that it was compared with, also where the last one at this place is of another length.
fn limits_count_moves_of_one_length_among_others<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").skip_warmup();
    let f = times(&rig, spec.on_static_move(after(2, OnMove::Eager)));
    let mut kept = Vec::new();
    let mut phases = Vec::new();
    for round in 0..6 {
        let pair: Vec<_> = [1, 3]
            .map(|n| {
                let (x, p) = (rig.floats(&vec![2.0; n]), rig.floats(&vec![3.0; n]));
                let out = rig.run(&f, &rig.trees.step(), &[&x, &p]);
                assert_eq!(rig.read(&out[0]), vec![6.0; n]);
                kept.push((x, p));
                out.phase()
            })
            .into();
        phases.push((round, pair));
    }
    let eager: Vec<_> = phases
        .iter()
        .map(|(_, pair)| pair.iter().filter(|p| **p == Eager).count())
        .collect();
    // Two first recordings and two moves of one place: the lengths share it.
    assert_eq!(eager, [0, 0, 2, 2, 2, 2]);
    assert_eq!(rig.trees.counts().recordings, 4);
    drop(kept);
    rig.finish();
}

fn t7_04_two_parameter_sets_alternate<D: Device>(rig: Rig<D>) {
    let spec = |name: &str| FunctionSpec::new(name).on_static_move(after(1, OnMove::Eager));
    let f = times(&rig, spec("f"));
    let x = rig.floats(&[3.0]);
    let sets = [rig.floats(&[2.0]), rig.floats(&[5.0]), rig.floats(&[7.0])];
    let run = |set: usize| {
        let out = rig.run(&f, &rig.trees.step(), &[&x, &sets[set]]);
        assert_eq!(rig.read(&out[0]), [3.0 * [2.0, 5.0, 7.0][set]]);
        (out.phase(), out.reason().map(|r| r.kind()))
    };
    let mut recorded = 0;
    for _ in 0..20 {
        for set in 0..2 {
            recorded += usize::from(run(set).0 == Record);
        }
    }
    assert_eq!(recorded, 2);
    // Beyond the limit, by policy.
    assert_eq!(run(2), (Eager, Some(ReasonKind::InputMoved)));
    assert_eq!(run(1), (Replay, None));
    let report = rig.trees.report(&f).unwrap();
    assert_eq!(
        report.count(ReasonKind::Changed),
        1,
        "causes are told apart"
    );
    assert_eq!(report.count(ReasonKind::FirstRecording), 1);
    assert_eq!(report.recordings, 2);
    // Or it is copied from then on, in one more recording.
    let f = times(
        &rig,
        FunctionSpec::new("copying").on_static_move(after(1, OnMove::Copy)),
    );
    let many: Vec<_> = (0..8).map(|v| rig.floats(&[v as f32])).collect();
    for _ in 0..3 {
        for (value, set) in many.iter().enumerate() {
            let out = rig.run(&f, &rig.trees.step(), &[&x, set]);
            assert_eq!(rig.read(&out[0]), [3.0 * value as f32]);
        }
    }
    assert_eq!(rig.trees.report(&f).unwrap().recordings, 3);
    assert_eq!(rig.trees.report(&f).unwrap().eager(), 0);
    drop((x, sets, many));
    rig.finish();
}

/// Adaptation: there is nothing to read the options back from; each function does as it was told.
fn tree_40_options_are_each_functions_own<D: Device>(rig: Rig<D>) {
    let p = three(&rig);
    let function = |name: &str, policy| {
        let spec = FunctionSpec::new(name)
            .skip_warmup()
            .on_managed_move(policy);
        rig.register(spec, |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, 10.0, 0.0)?])
        })
    };
    let functions = [
        (
            function("skips", after(0, OnMove::Skip)),
            [Record, Eager, Eager, Eager],
        ),
        (
            function("eager", after(1, OnMove::Eager)),
            [Record, Record, Eager, Replay],
        ),
        (
            function("copies", after(0, OnMove::Copy)),
            [Record, Record, Replay, Replay],
        ),
        (
            function("records", MovePolicy::RECORD),
            [Record, Record, Record, Replay],
        ),
        (
            function("records 7", after(7, OnMove::Skip)),
            [Record, Record, Record, Replay],
        ),
    ];
    let x = rig.floats(&[0.0]);
    for (f, phases) in &functions {
        for (i, phase) in [0, 1, 2, 0].into_iter().zip(phases) {
            let step = rig.trees.step();
            let made = rig.run(&p, &step, &[&x]);
            let out = rig.run(f, &step, &[&made[i]]);
            assert_eq!(out.phase(), *phase, "{} {i}", f.name());
            assert_eq!(rig.read(&out[0]), [10.0 * (i as f32 + 1.0)]);
        }
    }
    drop(x);
    rig.finish();
}
