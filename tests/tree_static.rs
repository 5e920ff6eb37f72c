//! Static inputs over a function's life: which addresses are checked, what a move costs, and what each policy for moves does. Names carry
//! the rows of the behaviour tables.
//!
//! Where a row has a forward and a backward, both are functions here: the backward takes what the forward gave, and the parameter.

mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{
    Function, FunctionSpec, InputView, Mismatch, Phase, Reason, ReasonKind, Tensor,
};

suite!(
    static_01_a_misaligned_parameter_is_copied,
    static_02_alignment_that_alternates_makes_no_clones,
    static_03_two_parameters_in_turn,
    static_04_a_parameter_or_a_buffer_replaced,
    static_05_a_child_with_another_parameter,
    static_06_a_parent_with_another_parameter,
    static_13_buffer_and_bias_replaced,
    static_14_other_addresses_are_nobodys_concern,
    t6_07_alignment_at_the_replay,
    t7_07_each_cause_has_its_reason,
);

use Phase::{Record, Replay, Warmup};

/// a * b, of which b is static.
fn times<D: Device>(rig: &Rig<D>, spec: FunctionSpec<D>) -> Function {
    rig.register(spec.static_input(1), |k, rec, inputs| {
        Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(1)?)?])
    })
}

fn static_01_a_misaligned_parameter_is_copied<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").static_input(0).align(16);
    let f = rig.register(spec, |k, rec, inputs| {
        let (p, x) = (inputs.get(0)?, inputs.get(1)?);
        assert!(p.ptr()?.0.is_multiple_of(16), "the function's wish");
        Ok(vec![k.product(rec, p, x)?])
    });
    let whole = rig.floats(&[0.0, 3.0, 4.0]);
    let param = whole.view(4, 8).unwrap();
    for (round, phase) in [Warmup, Record, Replay].into_iter().enumerate() {
        // In the way of an address that comes again.
        let x = rig.floats(&[round as f32, 1.0]);
        rig.put(&param, &[3.0 + round as f32, 4.0]);
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&param, &x]);
        assert_eq!(out.phase(), phase);
        assert_eq!(
            rig.read(&out[0]),
            [(3.0 + round as f32) * round as f32, 4.0]
        );
    }
    assert_eq!(
        rig.trees.view().nodes[0].inputs,
        [
            InputView::Copied { bytes: 8 },
            InputView::Copied { bytes: 8 }
        ]
    );
    drop((whole, param));
    rig.finish();
}

/// Adaptation: a clone would be a block of the default pool, or one more of the tree's at a replay.
fn static_02_alignment_that_alternates_makes_no_clones<D: Device>(rig: Rig<D>) {
    for misaligned_first in [true, false] {
        let spec = FunctionSpec::new("f").static_input(0).align(16);
        let f = rig.register(spec, |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
        });
        let whole = rig.floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let (off, on) = (whole.view(4, 8).unwrap(), whole.view(16, 8).unwrap());
        let pair = if misaligned_first {
            [(&off, [4.0, 6.0]), (&on, [10.0, 12.0])]
        } else {
            [(&on, [10.0, 12.0]), (&off, [4.0, 6.0])]
        };
        let eager = rig.allocator.stats().live_blocks.allocated;
        let mut phases = Vec::new();
        let mut pool = 0;
        for round in 0..3 {
            for (input, values) in &pair {
                let step = rig.trees.step();
                let out = rig.run(&f, &step, &[*input]);
                assert_eq!(rig.read(&out[0]), values);
                phases.push(out.phase());
            }
            let now = rig.trees.pool_stats().live_blocks.allocated;
            assert!(round < 2 || now == pool, "a replay allocates nothing");
            pool = now;
        }
        assert_eq!(rig.allocator.stats().live_blocks.allocated, eager);
        // Once there is a recording that copies, it does for both.
        let third = if misaligned_first { Record } else { Replay };
        let expected = [Warmup, Record, third, Replay, Replay, Replay];
        assert_eq!(phases, expected, "misaligned first: {misaligned_first}");
        drop((whole, off, on));
    }
    rig.finish();
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

fn static_03_two_parameters_in_turn<D: Device>(rig: Rig<D>) {
    let functions = forward_backward(&rig, FunctionSpec::new);
    let x = rig.floats(&[0.0; 4]);
    let (p1, p2) = (rig.floats(&[2.0; 4]), rig.floats(&[5.0; 4]));
    for (param, recordings) in [((&p1, 2.0), 2), ((&p2, 5.0), 4), ((&p1, 2.0), 4)] {
        train(&rig, &functions, &x, param, 6);
        assert_eq!(rig.trees.counts().recordings, recordings);
    }
    assert_eq!(rig.trees.counts().warmups, 2, "nothing is compiled anew");
    assert_eq!(rig.trees.descendants(), [1, 1]);
    drop((x, p1, p2));
    rig.finish();
}

/// Adaptation: a module is a set of static inputs; a custom one has them in one flat tensor.
fn static_04_a_parameter_or_a_buffer_replaced<D: Device>(rig: Rig<D>) {
    for (replaced, flat) in [(1, false), (2, false), (1, true), (2, true)] {
        let spec = |name| FunctionSpec::new(name).static_input(2).static_input(1);
        let affine = |name| {
            rig.register(spec(name), |k, rec, inputs| {
                let scaled = k.product(rec, inputs.get(0)?, inputs.get(1)?)?;
                Ok(vec![k.sum(rec, &scaled, inputs.get(2)?)?])
            })
        };
        let (forward, backward) = (affine("forward"), affine("backward"));
        let tensor = |value: f32| {
            if flat {
                let all = rig.floats(&[-1.0, value, value]);
                all.view(4, 8).unwrap()
            } else {
                rig.floats(&[value, value])
            }
        };
        let (parameter, buffer, other) = (tensor(2.0), tensor(10.0), tensor(4.0));
        let before = rig.trees.counts().recordings;
        let x = rig.floats(&[1.0, 3.0]);
        for turn in 0..3 {
            let (mut p, mut b) = ((&parameter, 2.0), (&buffer, 10.0));
            if turn == 1 {
                *(if replaced == 1 { &mut p } else { &mut b }) = (&other, 4.0);
            }
            for _ in 0..6 {
                let step = rig.trees.step();
                let y = rig.run(&forward, &step, &[&x, p.0, b.0]);
                let g = rig.run(&backward, &step, &[&y[0], p.0, b.0]);
                let expected = [1.0, 3.0].map(|x| (x * p.1 + b.1) * p.1 + b.1);
                assert_eq!(rig.read(&g[0]), expected);
            }
        }
        assert_eq!(
            rig.trees.counts().recordings - before,
            4,
            "{replaced} {flat}"
        );
    }
    rig.finish();
}

fn static_05_a_child_with_another_parameter<D: Device>(rig: Rig<D>) {
    let g1 = rig.register(FunctionSpec::new("g1"), |k, rec, inputs| {
        Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(0)?)?])
    });
    let functions = forward_backward(&rig, FunctionSpec::new);
    let x = rig.floats(&[3.0]);
    let (p1, p2) = (rig.floats(&[2.0]), rig.floats(&[5.0]));
    for (param, p) in [(&p1, 2.0), (&p2, 5.0), (&p1, 2.0)] {
        for _ in 0..6 {
            let step = rig.trees.step();
            let y = rig.one(&g1, &step, &x);
            let z = rig.run(&functions[0], &step, &[&y, param]);
            let g = rig.run(&functions[1], &step, &[&z[0], param]);
            assert_eq!(rig.read(&g[0]), [9.0 * p * p]);
        }
    }
    assert_eq!(rig.trees.counts().recordings, 5);
    assert_eq!(rig.trees.descendants(), [4]);
    drop((x, p1, p2));
    rig.finish();
}

fn static_06_a_parent_with_another_parameter<D: Device>(rig: Rig<D>) {
    let g1 = times(&rig, FunctionSpec::new("g1"));
    let g2 = rig.register(FunctionSpec::new("g2"), |k, rec, inputs| {
        Ok(vec![k.sum(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let backward = times(&rig, FunctionSpec::new("backward"));
    let x = rig.floats(&[3.0]);
    let (p1, p2) = (rig.floats(&[2.0]), rig.floats(&[5.0]));
    for (param, p) in [(&p1, 2.0), (&p2, 5.0), (&p1, 2.0)] {
        for _ in 0..6 {
            let step = rig.trees.step();
            let y = rig.run(&g1, &step, &[&x, param]);
            let z = rig.run(&g2, &step, &[&y[0], &x]);
            let g = rig.run(&backward, &step, &[&z[0], param]);
            assert_eq!(rig.read(&g[0]), [(3.0 * p + 3.0) * p]);
        }
    }
    assert_eq!(rig.trees.counts().recordings, 6);
    assert_eq!(rig.trees.descendants(), [2, 2]);
    drop((x, p1, p2));
    rig.finish();
}

fn static_13_buffer_and_bias_replaced<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").static_input(1).static_input(2);
    let f = rig.register(spec, |k, rec, inputs| {
        let sum = k.sum(rec, inputs.get(0)?, inputs.get(1)?)?;
        Ok(vec![k.sum(rec, &sum, inputs.get(2)?)?])
    });
    let x = rig.floats(&[1.0]);
    let pairs = [[10.0, 20.0], [30.0, 40.0]].map(|values| values.map(|v| rig.floats(&[v])));
    let mut phases = Vec::new();
    for ([buffer, bias], value) in pairs.iter().zip([31.0, 71.0]) {
        for _ in 0..3 {
            let out = rig.run(&f, &rig.trees.step(), &[&x, buffer, bias]);
            assert_eq!(rig.read(&out[0]), [value]);
            phases.push(out.phase());
        }
    }
    assert_eq!(phases, [Warmup, Record, Replay, Record, Replay, Replay]);
    assert_eq!(rig.trees.counts().recordings, 2);
    drop((x, pairs));
    rig.finish();
}

fn static_14_other_addresses_are_nobodys_concern<D: Device>(rig: Rig<D>) {
    let functions = forward_backward(&rig, FunctionSpec::new);
    let y = rig.floats(&[2.0; 4]);
    // All kept, so that each lies elsewhere.
    let inputs: Vec<_> = (0..5).map(|_| rig.floats(&[0.0; 4])).collect();
    for x in &inputs {
        train(&rig, &functions, x, (&y, 2.0), 1);
    }
    let counts = rig.trees.counts();
    assert_eq!(
        (counts.recordings, counts.warmups, counts.replays),
        (2, 2, 6)
    );
    drop((y, inputs));
    rig.finish();
}

fn t6_07_alignment_at_the_replay<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").skip_warmup().align(16);
    let f = times(&rig, spec);
    let whole = rig.floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let (on, off) = (whole.view(0, 8).unwrap(), whole.view(4, 8).unwrap());
    let x = rig.floats(&[10.0, 100.0]);
    for (param, phase, values) in [
        (&on, Record, [10.0, 200.0]),
        (&on, Replay, [10.0, 200.0]),
        (&off, Record, [20.0, 300.0]),
        (&off, Replay, [20.0, 300.0]),
        (&on, Replay, [10.0, 200.0]),
    ] {
        let out = rig.run(&f, &rig.trees.step(), &[&x, param]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, values.to_vec()));
    }
    let view = rig.trees.view();
    let second = |index: usize| view.nodes[index].inputs[1].clone();
    assert_eq!(second(0), InputView::Static { bytes: 8 });
    assert_eq!(second(1), InputView::Copied { bytes: 8 });
    // What is copied may lie anywhere, and is read anew.
    let elsewhere = whole.view(12, 8).unwrap();
    rig.put(&elsewhere, &[7.0, 8.0]);
    let out = rig.run(&f, &rig.trees.step(), &[&x, &elsewhere]);
    assert_eq!(
        (out.phase(), rig.read(&out[0])),
        (Replay, vec![70.0, 800.0])
    );
    drop((whole, on, off, elsewhere, x, out));
    rig.finish();
}

fn t7_07_each_cause_has_its_reason<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 0.0);
    let f = rig.register(FunctionSpec::new("f").static_input(1), |k, rec, inputs| {
        let n = inputs.get(0)?.bytes().min(inputs.get(1)?.bytes());
        let (x, p) = (inputs.get(0)?.view(0, n)?, inputs.get(1)?.view(0, n)?);
        Ok(vec![k.sum(rec, &x, &p)?])
    });
    let (x, long) = (rig.floats(&[1.0]), rig.floats(&[1.0, 1.0]));
    let (p1, p2) = (rig.floats(&[2.0]), rig.floats(&[3.0]));
    let reason = |inputs: &[&Tensor<D>]| rig.run(&f, &rig.trees.step(), inputs).reason();
    assert_eq!(reason(&[&x, &p1]), Some(Reason::NotWarm));
    assert_eq!(reason(&[&x, &p1]), Some(Reason::FirstRecording));
    assert_eq!(reason(&[&x, &p1]), None);
    let moved = Mismatch::StaticMoved {
        input: 1,
        recorded: p1.ptr().unwrap(),
        passed: p2.ptr().unwrap(),
    };
    assert_eq!(reason(&[&x, &p2]), Some(Reason::Changed(moved)));
    let length = Mismatch::Length(0);
    assert_eq!(reason(&[&long, &p2]), Some(Reason::Changed(length)));
    assert_eq!(
        reason(&[&long, &p2, &x]),
        Some(Reason::Changed(Mismatch::Count))
    );
    // Below a warmup in the same step.
    let other = rig.scale_add("other", 1.0, 0.0);
    let step = rig.trees.step();
    let warm = rig.one(&other, &step, &x);
    let out = rig.run(&f, &step, &[&x, &p1]);
    assert_eq!(out.reason(), Some(Reason::BelowWarmup));
    drop((warm, out, step));
    // Copied at the recording, and an output of the path now; held, and in the way.
    for _ in 0..2 {
        drop(rig.one(&a, &rig.trees.step(), &x));
    }
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    drop(rig.run(&f, &step, &[&x, &p1]));
    let out = rig.run(&f, &step, &[&y, &p1]);
    assert_eq!(out.reason(), Some(Reason::Changed(Mismatch::ManagedNow(0))));
    drop((y, out, step));
    let report = rig.trees.report(&f).unwrap();
    assert_eq!(report.count(ReasonKind::NotWarm), 1);
    assert_eq!(report.count(ReasonKind::BelowWarmup), 1);
    assert_eq!(report.count(ReasonKind::FirstRecording), 2);
    assert_eq!(report.count(ReasonKind::Changed), 4);
    assert_eq!((report.replays, report.eager()), (1, 0));
    assert_eq!(report.recordings, 6);
    drop((x, long, p1, p2));
    rig.finish();
}
