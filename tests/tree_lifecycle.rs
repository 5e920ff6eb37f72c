//! The life of a tree: what is warmed up, recorded and replayed, and what shape the tree takes. Names carry the rows of
//! the behaviour tables.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{
    Counts, FunctionSpec, InputView, NodeId, OutputView, Phase, Tensor, Value, lend,
};

suite!(
    tree_01_two_lengths_are_two_roots,
    tree_02_a_function_twice_on_a_path,
    tree_04_a_replay_then_a_branch,
    tree_05_several_recordings_and_handles_of_ended_steps,
    tree_08_three_more_runs_record_nothing,
    tree_09_each_key_warms_up_and_records,
    tree_11_steps_alone_make_nothing,
    tree_13_the_tree_goes_while_outputs_stay,
    tree_14_memory_is_the_trees_until_it_goes,
    tree_15_two_branches_with_the_same_end,
    tree_17_an_output_dead_at_the_recording_is_held_now,
    tree_18_live_memory_makes_a_child,
    tree_19_a_result_rebound_each_time,
    tree_28_an_empty_output,
    tree_31_constants_pass_through,
    tree_38_a_host_value_is_static,
    a_path_of_a_hundred_runs,
    two_trees_of_one_allocator,
);

use Phase::{Record, Replay, Warmup};

fn tree_01_two_lengths_are_two_roots<D: Device>(rig: Rig<D>) {
    let cube = rig.register(FunctionSpec::new("cube"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        let square = k.product(rec, x, x)?;
        Ok(vec![k.product(rec, &square, x)?])
    });
    for (values, cubes) in [
        (vec![1.0, 2.0, 3.0, -1.0], vec![1.0, 8.0, 27.0, -1.0]),
        (
            vec![2.0, 0.0, 1.0, 0.5, 4.0],
            vec![8.0, 0.0, 1.0, 0.125, 64.0],
        ),
    ] {
        let x = rig.floats(&values);
        for phase in [Warmup, Record] {
            let step = rig.trees.step();
            // The length is the key, as a compiler's guard would have it.
            let out = rig.call(&cube, &step, &[values.len() as i64], &mut [lend(&x)]);
            assert_eq!(out.phase(), phase);
            assert_eq!(rig.read(&out[0]), cubes);
        }
    }
    assert_eq!(rig.trees.descendants(), [0, 0]);
    rig.finish();
}

fn tree_02_a_function_twice_on_a_path<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 1.0);
    let x = rig.floats(&[0.0, 1.0, -4.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let (first, y) = rig.phased(&f, &step, &x);
        let (second, y2) = rig.phased(&f, &step, &y);
        assert_eq!((first, second), (phase, phase));
        assert_eq!(rig.read(&y), [1.0, 3.0, -7.0]);
        assert_eq!(rig.read(&y2), [3.0, 7.0, -13.0]);
    }
    assert_eq!(rig.trees.descendants(), [1]);
    let view = rig.trees.view();
    assert_eq!(view.functions.len(), 1);
    assert_eq!(view.nodes[1].parent, Some(view.nodes[0].id));
    assert_eq!(
        view.nodes[1].inputs,
        [InputView::Managed {
            function: "f".into(),
            output: 0,
            offset: 0,
            bytes: 12
        }]
    );
    drop(x);
    rig.finish();
}

fn tree_04_a_replay_then_a_branch<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 2.0, 0.0);
    let p = rig.scale_add("p", 1.0, -10.0);
    let q = rig.scale_add("q", 1.0, 10.0);
    let x = rig.floats(&[0.0; 4]);
    for phase in [Warmup, Record] {
        let step = rig.trees.step();
        let (first, y) = rig.phased(&a, &step, &x);
        let (second, out) = rig.moved(&p, &step, y);
        assert_eq!((first, second), (phase, phase));
        assert_eq!(rig.read(&out), [-10.0; 4]);
    }
    rig.put(&x, &[1.0; 4]);
    let run = |first, second| {
        let step = rig.trees.step();
        let (was_a, y) = rig.phased(&a, &step, &x);
        let (was_q, out) = rig.moved(&q, &step, y);
        assert_eq!((was_a, was_q), (first, second));
        assert_eq!(rig.read(&out), [12.0; 4]);
        out
    };
    let out_w = run(Replay, Warmup);
    assert_eq!(rig.blocks(), 1);
    let out_l = run(Replay, Record);
    assert_eq!(rig.blocks(), 1, "the warmup's output was reclaimed");
    drop(out_w);
    assert_eq!(rig.blocks(), 1);
    drop(out_l);
    assert_eq!(rig.blocks(), 0);
    let out = run(Replay, Replay);
    assert_eq!(rig.blocks(), 0, "a replay does not touch the books");
    assert_eq!(rig.trees.path_live(), 1);
    drop(out);
    assert_eq!(rig.trees.descendants(), [2]);
    drop(x);
    rig.finish();
}

fn tree_05_several_recordings_and_handles_of_ended_steps<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 3.0, 0.0);
    let b = rig.scale_add("b", 10.0, 0.0);
    let run = |values: &[f32]| {
        let x = rig.floats(values);
        let step = rig.trees.step();
        let y = rig
            .call(&a, &step, &[values.len() as i64], &mut [lend(&x)])
            .only()
            .unwrap();
        // The branch that a compiler's control flow would take.
        if values[0] == 0.0 {
            y
        } else {
            rig.moved(&b, &step, y).1
        }
    };
    let twice = |values: &[f32]| {
        drop(run(values));
        run(values)
    };
    let out1 = twice(&[0.0; 5]);
    let out2 = twice(&[0.0; 6]);
    assert_eq!(rig.blocks(), 1);
    let out3 = twice(&[1.0; 5]);
    assert_eq!(rig.blocks(), 1);
    assert_eq!(rig.read(&out3), [30.0; 5]);
    drop(out1);
    drop(out2);
    assert_eq!(rig.blocks(), 1, "handles of ended steps free nothing");
    assert_eq!(rig.read(&out3), [30.0; 5]);
    drop(out3);
    assert_eq!(rig.blocks(), 0);
    rig.finish();
}

fn tree_08_three_more_runs_record_nothing<D: Device>(rig: Rig<D>) {
    let (f, bodies) = rig.counted(FunctionSpec::new("f"), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 1.0)?])
    });
    let x = rig.floats(&[1.0]);
    for round in 0..6 {
        let step = rig.trees.step();
        assert_eq!(rig.read(&rig.one(&f, &step, &x)), [2.0]);
        let recordings = u32::from(round >= 1);
        assert_eq!(rig.trees.counts().recordings, recordings);
    }
    assert_eq!(bodies.load(Ordering::Relaxed), 2);
    assert_eq!(
        rig.trees.counts(),
        Counts {
            warmups: 1,
            recordings: 1,
            replays: 4,
            ..Counts::default()
        }
    );
    drop(x);
    rig.finish();
}

fn tree_09_each_key_warms_up_and_records<D: Device>(rig: Rig<D>) {
    let (f, bodies) = rig.counted(FunctionSpec::new("f"), |k, rec, inputs| {
        let by = inputs.value::<f32>(1)?;
        Ok(vec![k.apply(rec, inputs.get(0)?, *by, 0.0)?])
    });
    let x = rig.floats(&[1.0, 5.0]);
    for (k, expected_bodies) in [(2i64, 2), (3, 4)] {
        let scale: Value = Arc::new(k as f32);
        for _ in 0..3 {
            let step = rig.trees.step();
            let args = &mut [lend(&x), cudagraph_trees::Arg::Value(scale.clone())];
            let out = rig.call(&f, &step, &[k], args);
            assert_eq!(rig.read(&out[0]), [k as f32, 5.0 * k as f32]);
        }
        assert_eq!(bodies.load(Ordering::Relaxed), expected_bodies);
    }
    let view = rig.trees.view();
    assert_eq!(
        view.functions[0].keys,
        [(vec![2], true), (vec![3], true)],
        "each key is a variant"
    );
    // A key that is another's beginning is another key.
    for key in [&[][..], &[2, 3], &[2, 0]] {
        let step = rig.trees.step();
        let value: Value = Arc::new(1.0f32);
        let args = &mut [lend(&x), cudagraph_trees::Arg::Value(value)];
        assert_eq!(rig.call(&f, &step, key, args).phase(), Warmup);
    }
    drop(x);
    rig.finish();
}

/// Adaptation: the row's marker for unfinished warmups does not exist yet; what can be called without running anything are steps.
fn tree_11_steps_alone_make_nothing<D: Device>(rig: Rig<D>) {
    for _ in 0..3 {
        let outer = rig.trees.step();
        let inner = rig.trees.step();
        assert_eq!(inner.number(), outer.number() + 1);
        drop(outer);
        drop(inner);
    }
    let view = rig.trees.view();
    assert_eq!(
        (view.functions.len(), view.nodes.len(), view.path.len()),
        (0, 0, 0)
    );
    assert_eq!(rig.trees.counts(), Counts::default());
    assert_eq!(rig.trees.pool_stats().segments.current, 0);
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    assert_eq!(rig.phased(&f, &rig.trees.step(), &x).0, Warmup);
    drop(x);
    rig.finish();
}

fn tree_13_the_tree_goes_while_outputs_stay<D: Device>(rig: Rig<D>) {
    let Rig {
        device,
        allocator,
        kernels,
        stream,
        trees,
    } = rig;
    for runs in 1..=3 {
        // skip_warmup: the first run records, so that one to three runs are one recording and replays of it.
        let trees = cudagraph_trees::GraphTrees::new(&allocator).unwrap();
        let pool = trees.pool_id();
        let kernels = kernels.clone();
        let f = trees
            .register(FunctionSpec::new("f").skip_warmup(), move |rec, inputs| {
                let x = inputs.get(0)?;
                let out = rec.alloc(12)?;
                let (dst, src) = (out.ptr()?, x.ptr()?);
                kernels.scale_add(rec.device(), rec.stream(), dst, src, 3, 1.0, runs as f32)?;
                Ok(vec![out])
            })
            .unwrap();
        let x = allocator.alloc(&stream, 12).unwrap();
        x.write(
            &device,
            &stream,
            bytemuck_bytes(&[1.0, 2.0, 3.0]).as_slice(),
        )
        .unwrap();
        let mut last = None;
        for _ in 0..runs {
            let step = trees.step();
            last = trees
                .run(&f, &step, &[], &stream, &mut [lend(&x)])
                .unwrap()
                .only();
        }
        let out = last.unwrap();
        assert_eq!(trees.counts().recordings, 1);
        drop((trees, f));
        // Nobody uses the pool any more; the block that is held lives on in it.
        let (uses, live) = allocator
            .private_pools()
            .iter()
            .find(|(id, ..)| *id == pool)
            .map(|(_, uses, stats)| (*uses, stats.live_blocks.current))
            .unwrap();
        assert_eq!((uses, live), (0, 1), "after {runs} runs");
        allocator.trim().unwrap();
        let shift = runs as f32;
        assert_eq!(
            out.read(&device, &stream).unwrap(),
            bytemuck_bytes(&[1.0 + shift, 2.0 + shift, 3.0 + shift])
        );
        drop(out);
        allocator.trim().unwrap();
        assert_eq!(
            allocator
                .private_pools()
                .iter()
                .find(|(id, ..)| *id == pool),
            None
        );
    }
    Rig {
        device,
        allocator,
        kernels,
        stream,
        trees,
    }
    .finish();
}

fn bytemuck_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The row is the leak oracle of every scenario (`Rig::finish`); here it is looked at more closely.
fn tree_14_memory_is_the_trees_until_it_goes<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0; (1 << 18) + 1]); // more than 1 MiB: large segments
    for _ in 0..3 {
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let z = rig.moved(&f, &step, y).1;
        assert_eq!(rig.read(&z)[..2], [3.0, 3.0]);
    }
    let before = rig.trees.pool_stats();
    assert!(before.segments.current > 0);
    rig.allocator.trim().unwrap();
    let after = rig.trees.pool_stats();
    assert_eq!(
        (after.segments, after.reserved_bytes),
        (before.segments, before.reserved_bytes),
        "graphs live: trim takes nothing of their pool"
    );
    // and the graphs still run there
    let step = rig.trees.step();
    let (phase, y) = rig.phased(&f, &step, &x);
    assert_eq!((phase, rig.read(&y)[7]), (Replay, 2.0));
    drop((x, y, step));
    rig.finish();
}

fn tree_15_two_branches_with_the_same_end<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let b = rig.scale_add("b", 2.0, 0.0);
    let c = rig.scale_add("c", 3.0, 0.0);
    let d = rig.scale_add("d", 1.0, 100.0);
    let x = rig.floats(&[1.0, 2.0]);
    let path = |middle, expected: [Phase; 3], result: [f32; 2]| {
        let step = rig.trees.step();
        let (p1, y) = rig.phased(&a, &step, &x);
        let (p2, z) = rig.phased(middle, &step, &y);
        let (p3, out) = rig.phased(&d, &step, &z);
        assert_eq!([p1, p2, p3], expected);
        assert_eq!(rig.read(&out), result);
        assert_eq!(rig.read(&y), [2.0, 3.0]);
    };
    path(&b, [Warmup; 3], [104.0, 106.0]);
    path(&b, [Record; 3], [104.0, 106.0]);
    path(&b, [Replay; 3], [104.0, 106.0]);
    path(&c, [Replay, Warmup, Warmup], [106.0, 109.0]);
    path(&c, [Replay, Record, Record], [106.0, 109.0]);
    path(&c, [Replay; 3], [106.0, 109.0]);
    path(&b, [Replay; 3], [104.0, 106.0]);
    assert_eq!(rig.trees.descendants(), [4]);
    let view = rig.trees.view();
    let shape: Vec<_> = view
        .nodes
        .iter()
        .map(|n| (n.function.as_str(), n.parent.map(|p| p.0)))
        .collect();
    assert_eq!(
        shape,
        [
            ("a", None),
            ("b", Some(0)),
            ("d", Some(1)),
            ("c", Some(0)),
            ("d", Some(3))
        ]
    );
    drop(x);
    rig.finish();
}

fn tree_17_an_output_dead_at_the_recording_is_held_now<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("a").skip_warmup().static_input(0);
    let a = rig.register(spec, |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![k.apply(rec, x, 1.0, 1.0)?, k.apply(rec, x, 1.0, 2.0)?])
    });
    let b = rig.register(FunctionSpec::new("b").skip_warmup(), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 10.0, 0.0)?])
    });
    let x = rig.floats(&[1.0, 2.0]);
    {
        let step = rig.trees.step();
        let [a0, a1] = two(rig.run(&a, &step, &[&x]));
        drop(a1);
        let out = rig.one(&b, &step, &a0);
        assert_eq!(rig.read(&out), [20.0, 30.0]);
    }
    let view = rig.trees.view();
    let place = |node: usize, output: usize| match &view.nodes[node].outputs[output] {
        OutputView::Fresh { place, .. } => place.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        place(0, 1),
        place(1, 0),
        "b's output lies where a's second did"
    );
    for round in 0..3 {
        let step = rig.trees.step();
        let [a0, a1] = two(rig.run(&a, &step, &[&x]));
        let (phase, out) = rig.phased(&b, &step, &a0);
        assert_eq!(phase, if round == 0 { Record } else { Replay });
        assert_eq!(rig.read(&out), [20.0, 30.0]);
        assert_eq!(rig.read(&a1), [3.0, 4.0], "what is held is intact");
    }
    assert_eq!(rig.trees.descendants(), [2]);
    // Dropped again before b, the first recording is good again.
    let step = rig.trees.step();
    let [a0, a1] = two(rig.run(&a, &step, &[&x]));
    drop(a1);
    let out = rig.run(&b, &step, &[&a0]);
    assert_eq!((out.phase(), out.node()), (Replay, Some(NodeId(1))));
    assert_eq!(rig.read(&out[0]), [20.0, 30.0]);
    drop((x, a0, out, step));
    rig.finish();
}

fn tree_18_live_memory_makes_a_child<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("x", 1.0, 1.0);
    let g = rig.scale_add("y", 2.0, 0.0);
    let input = rig.floats(&[3.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let (p1, x) = rig.phased(&f, &step, &input);
        let (p2, y) = rig.phased(&g, &step, &input);
        assert_eq!((p1, p2), (phase, phase));
        assert_eq!((rig.read(&x), rig.read(&y)), (vec![4.0], vec![6.0]));
    }
    assert_eq!(rig.trees.descendants(), [1]);
    for phase in [Record, Replay] {
        let step = rig.trees.step();
        let (p, y) = rig.phased(&g, &step, &input);
        assert_eq!((p, rig.read(&y)), (phase, vec![6.0]));
    }
    assert_eq!(rig.trees.descendants(), [1, 0], "y is there twice");
    drop(input);
    rig.finish();
}

/// Adaptation: each invocation gets a step; and, besides, none does but the result is dropped first.
fn tree_19_a_result_rebound_each_time<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[1.0]);
    let mut phases = Vec::new();
    let mut held = None;
    for round in 0..4 {
        rig.put(&x, &[round as f32]);
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&f, &step, &x);
        phases.push(phase);
        assert_eq!(rig.read(&out), [2.0 * round as f32]);
        held = Some(out); // the last round's dies here, after the run
    }
    assert_eq!(phases, [Warmup, Record, Replay, Replay]);
    drop(held);

    let g = rig.scale_add("g", 3.0, 0.0);
    let step = rig.trees.step();
    let mut phases = Vec::new();
    for round in 0..4 {
        rig.put(&x, &[round as f32]);
        let (phase, out) = rig.phased(&g, &step, &x);
        phases.push(phase);
        assert_eq!(rig.read(&out), [3.0 * round as f32]);
    }
    assert_eq!(phases, [Warmup, Record, Replay, Replay]);
    assert_eq!(rig.trees.counts().failed_captures, 0);
    drop((x, step));
    rig.finish();
}

fn tree_28_an_empty_output<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![k.product(rec, x, x)?, Tensor::empty()])
    });
    let x = rig.floats(&[3.0, -2.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x]);
        assert_eq!(out.phase(), phase);
        assert_eq!(rig.read(&out[0]), [9.0, 4.0]);
        assert_eq!((out[1].bytes(), out[1].storage_id()), (0, None));
        assert_eq!(rig.read(&out[1]), [0.0; 0]);
    }
    assert_eq!(rig.trees.counts().recordings, 1);
    drop(x);
    rig.finish();
}

fn tree_31_constants_pass_through<D: Device>(rig: Rig<D>) {
    let param = rig.floats(&[5.0, 6.0, 7.0]);
    let free = param.clone();
    // The same, once as the closure's own and once bound.
    let own = rig.register(FunctionSpec::new("own"), move |k, rec, inputs| {
        let out = k.apply(rec, inputs.get(0)?, 1.0, 2.0)?;
        Ok(vec![free.clone(), free.view(4, 8)?, out])
    });
    let bound = rig.register(
        FunctionSpec::new("bound").bind(1, &param),
        |k, rec, inputs| {
            let param = inputs.get(1)?;
            let out = k.apply(rec, inputs.get(0)?, 1.0, 2.0)?;
            Ok(vec![param.clone(), param.view(4, 8)?, out])
        },
    );
    let x = rig.floats(&[1.0]);
    for (f, kinds) in [(&own, ["constant", "constant"]), (&bound, ["bound"; 2])] {
        for phase in [Warmup, Record, Replay, Replay] {
            let step = rig.trees.step();
            let out = rig.run(f, &step, &[&x]);
            assert_eq!(out.phase(), phase);
            assert_eq!(out[0].storage_id(), param.storage_id());
            assert_eq!(out[1].storage_id(), param.storage_id());
            assert_eq!(rig.read(&out[0]), [5.0, 6.0, 7.0]);
            assert_eq!(rig.read(&out[1]), [6.0, 7.0]);
            assert_eq!(rig.read(&out[2]), [3.0]);
            assert_eq!(rig.trees.path_live(), 1, "constants are not the path's");
        }
        let view = rig.trees.view();
        let outputs = &view.nodes.last().unwrap().outputs;
        let got: Vec<_> = outputs[..2]
            .iter()
            .map(|o| match o {
                OutputView::Constant { .. } => "constant",
                OutputView::Bound => "bound",
                _ => "another",
            })
            .collect();
        assert_eq!(got, kinds);
    }
    // A step's end does not touch them.
    let step = rig.trees.step();
    let out = rig.run(&own, &step, &[&x]);
    drop(step);
    let step = rig.trees.step();
    drop(rig.run(&bound, &step, &[&x]));
    assert_eq!(rig.read(&out[1]), [6.0, 7.0]);
    drop((x, param, out, step));
    rig.finish();
}

struct Opaque(f32);

fn tree_38_a_host_value_is_static<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f").skip_warmup(), |k, rec, inputs| {
        let opaque = inputs.value::<Opaque>(0)?;
        Ok(vec![k.apply(rec, inputs.get(1)?, opaque.0, 0.0)?])
    });
    let x = rig.floats(&[1.0, 2.0]);
    let double: Value = Arc::new(Opaque(2.0));
    let triple: Value = Arc::new(Opaque(3.0));
    for (value, phase, expected) in [
        (&double, Record, [2.0, 4.0]),
        (&double, Replay, [2.0, 4.0]),
        (&triple, Record, [3.0, 6.0]),
        (&double, Replay, [2.0, 4.0]),
        (&triple, Replay, [3.0, 6.0]),
    ] {
        let step = rig.trees.step();
        let args = &mut [cudagraph_trees::Arg::Value(value.clone()), lend(&x)];
        let out = rig.call(&f, &step, &[], args);
        assert_eq!(out.phase(), phase);
        assert_eq!(rig.read(&out[0]), expected);
    }
    let view = rig.trees.view();
    assert_eq!(
        view.nodes[0].inputs,
        [InputView::Value, InputView::Copied { bytes: 8 }]
    );
    drop(x);
    rig.finish();
}

fn a_path_of_a_hundred_runs<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[0.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let mut outputs = vec![rig.one(&f, &step, &x)];
        for _ in 1..100 {
            let (p, next) = rig.phased(&f, &step, outputs.last().unwrap());
            assert_eq!(p, phase);
            outputs.push(next);
        }
        for (depth, out) in outputs.iter().enumerate() {
            assert_eq!(rig.read(out), [depth as f32 + 1.0]);
        }
        assert_eq!(rig.trees.path_live(), 100);
    }
    assert_eq!(rig.trees.descendants(), [99]);
    drop(x);
    rig.finish();
}

fn two_trees_of_one_allocator<D: Device>(rig: Rig<D>) {
    let other = Rig {
        device: rig.device.clone(),
        allocator: rig.allocator.clone(),
        kernels: rig.kernels.clone(),
        stream: rig.stream.clone(),
        trees: cudagraph_trees::GraphTrees::new(&rig.allocator).unwrap(),
    };
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = other.scale_add("g", 2.0, 0.0);
    let x = rig.floats(&[1.0, 2.0]);
    for phase in [Warmup, Record, Replay, Replay] {
        let (step, step2) = (rig.trees.step(), other.trees.step());
        let (p1, y) = rig.phased(&f, &step, &x);
        // An output of another tree is a tensor from outside.
        let (p2, z) = other.phased(&g, &step2, &y);
        // An ended step of one tree is nothing to the other.
        drop(step);
        let z2 = other.one(&g, &step2, &z);
        assert_eq!((p1, p2), (phase, phase));
        assert_eq!(rig.read(&y), [2.0, 3.0]);
        assert_eq!(rig.read(&z), [4.0, 6.0]);
        assert_eq!(rig.read(&z2), [8.0, 12.0]);
    }
    assert_ne!(rig.trees.pool_id(), other.trees.pool_id());
    drop((x, other.trees));
    rig.finish();
}

fn two<D: Device>(outputs: cudagraph_trees::Outputs<D>) -> [Tensor<D>; 2] {
    let mut outputs = outputs.into_iter();
    [outputs.next().unwrap(), outputs.next().unwrap()]
}

/// The row's other half: graphs and executables are gone at once, whatever outputs are held.
#[test]
fn tree_13_executables_go_with_the_tree() {
    let device = HostDevice::new();
    let rig = Rig::new(device.clone());
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    let mut held = Vec::new();
    for _ in 0..3 {
        let step = rig.trees.step();
        held.push(rig.one(&f, &step, &x));
    }
    let streams = device.counts().streams;
    assert_eq!((device.counts().execs, device.counts().graphs), (1, 0));
    let Rig {
        trees, allocator, ..
    } = rig;
    drop(trees);
    device.synchronize_device().unwrap();
    let counts = device.counts();
    // The rig's stream went with the rest of the rig; the tree's may have to stay as long as a handle is freed on it.
    assert_eq!((counts.execs, counts.graphs), (0, 0));
    assert!(counts.streams <= streams);
    assert_eq!(
        held[2].read(&device, &device.default_stream()).unwrap(),
        2.0f32.to_le_bytes()
    );
    drop((held, x));
    allocator.trim().unwrap();
    assert_eq!(device.counts().mapped_bytes, 0);
}
