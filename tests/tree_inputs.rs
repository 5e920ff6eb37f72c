//! What goes into a run: copied, static and bound inputs, host values, keys, given and lent, in any mixture. Names carry the rows of
//! the behaviour tables where there is one.

mod common;

use std::sync::Arc;

use common::Rig;
use cudagraph_trees::device::{CaptureMode, Device};
use cudagraph_trees::{
    Arg, Error, FunctionSpec, Graph, InputView, Mismatch, NodeId, Phase, Reason, Tensor, Value,
    give, lend,
};

suite!(
    tree_16_one_input_of_each_kind_varied,
    a_static_input_that_moves_records_a_sibling,
    a_view_of_a_static_input_returned,
    a_static_input_is_written_in_place,
    a_static_input_may_be_an_output,
    a_parent_with_another_static_input_is_another_parent,
    bound_inputs_are_not_passed,
    a_bound_input_dies,
    a_bound_input_dies_inside_a_closure,
    a_bound_value,
    lengths_of_copied_inputs,
    many_copied_inputs,
    inputs_are_read_anew_at_each_replay,
    a_lent_input_stays_the_callers,
    no_inputs_and_no_outputs,
    imported_memory,
    another_number_of_inputs_is_another_recording,
    a_declared_number_of_inputs,
);

use Phase::{Record, Replay, Warmup};

fn tree_16_one_input_of_each_kind_varied<D: Device>(rig: Rig<D>) {
    let producer = rig.scale_add("m", 1.0, 0.0);
    let spec = FunctionSpec::new("f").static_input(1).skip_warmup();
    let f = rig.register(spec, |k, rec, inputs| {
        let (e, s, m) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        let sum = k.sum(rec, e, s)?;
        Ok(vec![k.sum(rec, &sum, m)?])
    });
    let x = rig.floats(&[1000.0]);
    let (s1, s2) = (rig.floats(&[10.0]), rig.floats(&[20.0]));
    drop(rig.one(&producer, &rig.trees.step(), &x));
    let run = |e: &Tensor<D>, s: &Tensor<D>, twice: bool| {
        let step = rig.trees.step();
        let mut m = rig.one(&producer, &step, &x);
        if twice {
            // Another output, and so another address.
            m = rig.one(&producer, &step, &m);
        }
        let restores = rig.trees.counts().restores;
        let out = rig.run(&f, &step, &[e, s, &m]);
        let value = rig.read(&out[0])[0];
        (out.phase(), value, rig.trees.counts().restores - restores)
    };
    let e = rig.floats(&[1.0]);
    assert_eq!(run(&e, &s1, false), (Record, 1011.0, 0));
    assert_eq!(run(&e, &s1, false), (Replay, 1011.0, 0));
    for value in [2.0, 3.0, 4.0] {
        let other = rig.floats(&[value]);
        assert_eq!(run(&other, &s1, false), (Replay, 1010.0 + value, 0));
    }
    assert_eq!(run(&e, &s2, false), (Record, 1021.0, 1));
    assert_eq!(run(&e, &s2, false), (Replay, 1021.0, 0));
    assert_eq!(run(&e, &s1, false), (Replay, 1011.0, 0));
    assert_eq!(rig.trees.descendants(), [2]);
    // The second producer is recorded (a restore), and f below it with its books exact.
    assert_eq!(run(&e, &s1, true), (Record, 1011.0, 0));
    assert_eq!(run(&e, &s1, true), (Replay, 1011.0, 0));
    assert_eq!(rig.trees.descendants(), [4]);
    assert_eq!(
        rig.trees.view().nodes[1].inputs,
        [
            InputView::Copied { bytes: 4 },
            InputView::Static { bytes: 4 },
            InputView::Managed {
                function: "m".into(),
                output: 0,
                offset: 0,
                bytes: 4
            }
        ]
    );
    drop((x, s1, s2, e));
    rig.finish();
}

fn a_static_input_that_moves_records_a_sibling<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").static_input(0);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let params: Vec<_> = (1..=5).map(|i| rig.floats(&[i as f32])).collect();
    let x = rig.floats(&[7.0]);
    for (round, phases) in [[Warmup, Record, Replay], [Replay; 3]]
        .into_iter()
        .enumerate()
    {
        for (index, param) in params.iter().enumerate() {
            for mut phase in phases {
                if index > 0 && phase == Warmup {
                    continue; // one warmup is enough, whatever the address
                }
                let step = rig.trees.step();
                let out = rig.run(&f, &step, &[param, &x]);
                if round == 1 {
                    phase = Replay;
                }
                assert_eq!(out.phase(), phase);
                assert_eq!(rig.read(&out[0]), [7.0 * (index as f32 + 1.0)]);
                assert_eq!(out.node().is_none(), phase == Warmup);
            }
        }
    }
    assert_eq!(rig.trees.descendants(), [0; 5]);
    // What is read at a replay is what lies there then.
    rig.put(&params[2], &[-1.0]);
    let step = rig.trees.step();
    let out = rig.run(&f, &step, &[&params[2], &x]);
    assert_eq!((out.phase(), out.node()), (Replay, Some(NodeId(2))));
    assert_eq!(rig.read(&out[0]), [-7.0]);
    drop((params, x, out, step));
    rig.finish();
}

fn a_view_of_a_static_input_returned<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").static_input(0).skip_warmup();
    let f = rig.register(spec, |_, _, mut inputs| {
        let x = inputs.take(0)?;
        Ok(vec![x.view(4, 4)?, x])
    });
    let whole = rig.floats(&[1.0, 2.0, 3.0, 4.0]);
    let middle = whole.view(4, 8).unwrap();
    for phase in [Record, Replay, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&middle]);
        assert_eq!(out.phase(), phase);
        assert_eq!(out[0].storage_id(), whole.storage_id());
        assert_eq!(
            (rig.read(&out[0]), rig.read(&out[1])),
            (vec![3.0], vec![2.0, 3.0])
        );
        assert_eq!(rig.trees.path_live(), 0);
        drop(step);
        drop(rig.trees.step());
    }
    // Returned handles are the caller's own and never go stale.
    let step = rig.trees.step();
    let out = rig.run(&f, &step, &[&middle]);
    drop((whole, middle, step));
    let other = rig.floats(&[5.0, 6.0]);
    let step = rig.trees.step();
    drop(rig.run(&f, &step, &[&other]));
    assert_eq!(rig.read(&out[1]), [2.0, 3.0]);
    // The same bytes in another storage of another shape: another recording, since the output's storage is another.
    assert_eq!(rig.trees.counts().recordings, 2);
    drop((other, out, step));
    rig.finish();
}

fn a_static_input_is_written_in_place<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("bump").static_input(0);
    let bump = rig.register(spec, |k, rec, inputs| {
        let counter = inputs.get(0)?;
        k.kernels
            .increment(rec.device(), rec.stream(), counter.ptr()?, 1, 1.0)?;
        Ok(vec![])
    });
    let counter = rig.floats(&[0.0]);
    let mut phases = Vec::new();
    for round in 1..=6 {
        let step = rig.trees.step();
        let out = rig.run(&bump, &step, &[&counter]);
        assert!(out.is_empty());
        phases.push(out.phase());
        assert_eq!(
            rig.read(&counter),
            [round as f32],
            "once each time, in each phase"
        );
    }
    assert_eq!(phases, [Warmup, Record, Replay, Replay, Replay, Replay]);
    drop(counter);
    rig.finish();
}

fn a_static_input_may_be_an_output<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let spec = FunctionSpec::new("f").static_input(0).skip_warmup();
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let x = rig.floats(&[1.0]);
    drop(rig.one(&a, &rig.trees.step(), &x));
    for round in 0..3 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let (phase, out) = rig.phased(&f, &step, &y);
        assert_eq!(phase, if round == 0 { Record } else { Replay });
        assert_eq!(rig.read(&out), [4.0]);
        let (phase, outside) = rig.phased(&f, &step, &x);
        assert_eq!(phase, if round == 0 { Record } else { Replay });
        assert_eq!((rig.read(&outside), rig.read(&out)), (vec![2.0], vec![4.0]));
    }
    let view = rig.trees.view();
    assert!(matches!(view.nodes[1].inputs[0], InputView::Managed { .. }));
    assert!(matches!(
        view.nodes[2].inputs[0],
        InputView::Static { bytes: 4 }
    ));
    drop(x);
    rig.finish();
}

fn a_parent_with_another_static_input_is_another_parent<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("g1").static_input(1).skip_warmup();
    let g1 = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let g2 = rig.register(FunctionSpec::new("g2").skip_warmup(), |k, rec, inputs| {
        Ok(vec![k.sum(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let (x, p1, p2) = (rig.floats(&[3.0]), rig.floats(&[2.0]), rig.floats(&[5.0]));
    for (param, phase, value) in [
        (&p1, Record, 9.0),
        (&p1, Replay, 9.0),
        (&p2, Record, 18.0),
        (&p2, Replay, 18.0),
        (&p1, Replay, 9.0),
    ] {
        let step = rig.trees.step();
        let y = rig.run(&g1, &step, &[&x, param]);
        let z = rig.run(&g2, &step, &[&y[0], &x]);
        assert_eq!((y.phase(), z.phase()), (phase, phase));
        assert_eq!(rig.read(&z[0]), [value]);
    }
    assert_eq!(rig.trees.descendants(), [1, 1]);
    drop((x, p1, p2));
    rig.finish();
}

fn bound_inputs_are_not_passed<D: Device>(rig: Rig<D>) {
    let (w, b) = (rig.floats(&[2.0, 3.0]), rig.floats(&[10.0, 20.0]));
    // Bound on both sides of what is passed, out of order.
    let spec = FunctionSpec::new("linear")
        .bind(3, &b)
        .bind(0, &w)
        .static_input(2);
    let f = rig.register(spec, |k, rec, inputs| {
        assert_eq!(inputs.len(), 4);
        let product = k.product(rec, inputs.get(0)?, inputs.get(1)?)?;
        let sum = k.sum(rec, &product, inputs.get(2)?)?;
        Ok(vec![k.sum(rec, &sum, inputs.get(3)?)?])
    });
    let (x, fixed) = (rig.floats(&[1.0, 1.0]), rig.floats(&[100.0, 200.0]));
    for (round, phase) in [Warmup, Record, Replay, Replay].into_iter().enumerate() {
        rig.put(&x, &[round as f32, 1.0]);
        rig.put(&b, &[10.0 * round as f32, 20.0]);
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x, &fixed]);
        assert_eq!(out.phase(), phase);
        let round = round as f32;
        assert_eq!(
            rig.read(&out[0]),
            [2.0 * round + 100.0 + 10.0 * round, 223.0]
        );
    }
    let view = rig.trees.view();
    assert_eq!(
        view.nodes[0].inputs,
        [
            InputView::Copied { bytes: 8 },
            InputView::Static { bytes: 8 }
        ]
    );
    drop((w, b, x, fixed));
    rig.finish();
}

fn a_bound_input_dies<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0]);
    for runs in 0..4 {
        let param = rig.floats(&[5.0]);
        let live = rig.allocator.stats().live_blocks.current;
        // Bound through a view: it is the storage that must live.
        let view = param.view(0, 4).unwrap();
        let spec = FunctionSpec::new("f").bind(1, &view).bind(0, &x);
        let f = rig.register(spec, |k, rec, inputs| {
            Ok(vec![
                k.sum(rec, inputs.get(0)?, inputs.get(1)?)?,
                inputs.get(1)?.clone(),
            ])
        });
        drop(view);
        let mut last = None;
        for _ in 0..runs {
            let step = rig.trees.step();
            let out = rig.run(&f, &step, &[]);
            assert_eq!(rig.read(&out[0]), [6.0]);
            last = Some(out);
        }
        drop(param);
        if let Some(out) = last {
            // The output alone keeps it.
            let step = rig.trees.step();
            let again = rig.run(&f, &step, &[]);
            assert_eq!(rig.read(&again[1]), [5.0]);
            assert_eq!(out[1].storage_id(), again[1].storage_id());
        }
        assert_eq!(
            rig.allocator.stats().live_blocks.current,
            live - 1,
            "held weakly"
        );
        for _ in 0..3 {
            let step = rig.trees.step();
            match rig.trees.run(&f, &step, &[], &rig.stream, &mut []) {
                Err(Error::StaticDied { function, input }) => {
                    assert_eq!((&*function, input), ("f", 1));
                }
                other => panic!("{other:?}"),
            }
        }
        // An address that is used again is no life.
        let other = rig.floats(&[6.0]);
        let step = rig.trees.step();
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut []);
        assert!(matches!(result, Err(Error::StaticDied { .. })));
        drop(other);
        assert_eq!(rig.blocks(), 0);
    }
    let dead = rig.floats(&[1.0]);
    let spec = FunctionSpec::<D>::new("late").bind(2, &dead);
    drop(dead);
    let result = rig.trees.register(spec, |_, _| Ok(vec![]));
    assert!(matches!(result, Err(Error::StaticDied { input: 2, .. })));
    drop(x);
    rig.finish();
}

fn a_bound_input_dies_inside_a_closure<D: Device>(rig: Rig<D>) {
    let slot = Arc::new(std::sync::Mutex::new(None::<Tensor<D>>));
    for phase in [Warmup, Record] {
        let param = rig.floats(&[5.0]);
        let mut spec = FunctionSpec::new("f").bind(0, &param);
        if phase == Record {
            spec = spec.skip_warmup();
        }
        *slot.lock().unwrap() = Some(param);
        let inside = slot.clone();
        let f = rig.register(spec, move |k, rec, inputs| {
            // The caller's last handle goes; the call's own keeps it to the call's end.
            drop(inside.lock().unwrap().take());
            Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
        });
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![10.0]));
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut []);
        assert!(matches!(result, Err(Error::StaticDied { input: 0, .. })));
    }
    rig.finish();
}

fn a_bound_value<D: Device>(rig: Rig<D>) {
    let factor: Value = Arc::new(4.0f32);
    let spec = FunctionSpec::new("f").bind_value(0, factor.clone());
    let f = rig.register(spec, |k, rec, inputs| {
        let wrong = inputs.value::<u8>(0).unwrap_err();
        assert!(wrong.to_string().contains("is not a u8"));
        assert!(
            inputs
                .get(0)
                .unwrap_err()
                .to_string()
                .contains("it is a host value")
        );
        assert!(
            inputs
                .value::<f32>(1)
                .unwrap_err()
                .to_string()
                .contains("it is a tensor")
        );
        assert!(
            inputs
                .value::<f32>(2)
                .unwrap_err()
                .to_string()
                .contains("no such input")
        );
        let factor = inputs.value::<f32>(0)?;
        Ok(vec![k.apply(rec, inputs.get(1)?, *factor, 0.0)?])
    });
    let x = rig.floats(&[2.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&f, &step, &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![8.0]));
    }
    drop(x);
    rig.finish();
}

fn lengths_of_copied_inputs<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f").skip_warmup(), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    // Without a key, another length is another recording.
    for round in 0..2 {
        for n in [1usize, 2, 200, 3] {
            let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let x = rig.floats(&values);
            let step = rig.trees.step();
            let (phase, out) = rig.phased(&f, &step, &x);
            assert_eq!(phase, if round == 0 { Record } else { Replay });
            assert_eq!(out.bytes(), 4 * n as u64);
            assert_eq!(
                rig.read(&out),
                values.iter().map(|v| 2.0 * v).collect::<Vec<_>>()
            );
        }
    }
    // Another number of inputs, too.
    let x = rig.floats(&[1.0]);
    let step = rig.trees.step();
    assert_eq!(rig.run(&f, &step, &[&x, &x]).phase(), Record);
    drop(step);
    let step = rig.trees.step();
    assert_eq!(rig.run(&f, &step, &[&x, &x]).phase(), Replay);
    assert_eq!(rig.trees.descendants(), [0; 5]);
    drop((x, step));
    rig.finish();
}

fn many_copied_inputs<D: Device>(rig: Rig<D>) {
    const N: usize = 60;
    let f = rig.register(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let mut total = inputs.take(0)?;
        for i in 1..inputs.len() {
            let next = inputs.take(i)?;
            total = k.sum(rec, &total, &next)?;
        }
        Ok(vec![total])
    });
    for (round, phase) in [Warmup, Record, Replay, Replay].into_iter().enumerate() {
        let tensors: Vec<_> = (0..N)
            .map(|i| rig.floats(&[(i * (round + 1)) as f32]))
            .collect();
        let step = rig.trees.step();
        let mut args: Vec<Arg<'_, D>> = tensors
            .iter()
            .enumerate()
            .map(|(i, t)| if i % 3 == 0 { give(t.clone()) } else { lend(t) })
            .collect();
        let out = rig.call(&f, &step, &[], &mut args);
        assert_eq!(out.phase(), phase);
        assert_eq!(rig.read(&out[0]), [((round + 1) * N * (N - 1) / 2) as f32]);
        if phase != Warmup {
            let view = rig.trees.view();
            assert_eq!(view.nodes[0].graph_nodes, N, "one gather, and the sums");
        }
    }
    rig.finish();
}

fn inputs_are_read_anew_at_each_replay<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[0.0]);
    for _ in 0..2 {
        drop(rig.one(&f, &rig.trees.step(), &x));
    }
    // Several replays enqueued before anything is waited for: each has its own source.
    let step = rig.trees.step();
    let mut held = Vec::new();
    let inputs: Vec<_> = (0..8).map(|i| rig.floats(&[i as f32])).collect();
    for input in &inputs {
        held.push(rig.one(&f, &step, input));
    }
    for (i, out) in held.iter().enumerate() {
        assert_eq!(rig.read(out), [2.0 * i as f32]);
    }
    drop((held, step));
    // The same node eight times, each result copied out in stream order.
    let copies = rig.allocator.alloc(&rig.stream, 32).unwrap();
    for (i, input) in inputs.iter().enumerate() {
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&f, &step, input);
        assert_eq!(phase, Replay);
        let to = copies.ptr().unwrap().offset(4 * i as u64);
        rig.device
            .copy(&rig.stream, to, out.ptr().unwrap(), 4)
            .unwrap();
    }
    assert_eq!(
        rig.read(&copies),
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    );
    drop((x, inputs, copies));
    rig.finish();
}

fn a_lent_input_stays_the_callers<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    // It takes its inputs out and drops them; what was lent is there all the same.
    let f = rig.register(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let (x, y) = (inputs.take(0)?, inputs.take(1)?);
        assert!(
            inputs
                .take(0)
                .unwrap_err()
                .to_string()
                .contains("taken already")
        );
        let z = k.product(rec, &x, &y)?;
        drop((x, y));
        Ok(vec![k.apply(rec, &z, 1.0, 0.0)?])
    });
    let x = rig.floats(&[3.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let out = rig.run(&f, &step, &[&x, &y]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![12.0]));
        assert_eq!((rig.read(&x), rig.read(&y)), (vec![3.0], vec![4.0]));
        assert_eq!(rig.trees.path_live(), 2);
    }
    drop(x);
    rig.finish();
}

fn no_inputs_and_no_outputs<D: Device>(rig: Rig<D>) {
    let nothing = rig.register(FunctionSpec::new("nothing"), |_, _, inputs| {
        assert!(inputs.is_empty());
        Ok(vec![])
    });
    let constant = rig.register(FunctionSpec::new("constant"), |k, rec, _| {
        let out = rec.alloc(8)?;
        k.kernels
            .fill(rec.device(), rec.stream(), out.ptr()?, 2, 4.5)?;
        Ok(vec![out])
    });
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&nothing, &step, &[]);
        assert_eq!((out.phase(), out.len()), (phase, 0));
        let out = rig.run(&constant, &step, &[]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![4.5, 4.5]));
        let after = rig.run(&nothing, &step, &[]);
        assert_eq!(after.len(), 0);
        assert_eq!(rig.read(&out[0]), [4.5, 4.5]);
    }
    rig.finish();
}

fn imported_memory<D: Device>(rig: Rig<D>) {
    struct Keeper<D: Device>(#[allow(dead_code)] Tensor<D>);
    let backing = rig.floats(&[8.0, 9.0]);
    let imported = rig
        .allocator
        .import(backing.ptr().unwrap(), 8, Keeper(backing));
    let spec = FunctionSpec::new("f").static_input(1).skip_warmup();
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![
            k.sum(rec, inputs.get(0)?, inputs.get(1)?)?,
            inputs.get(1)?.clone(),
        ])
    });
    for phase in [Record, Replay, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&imported, &imported]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![16.0, 18.0]));
        assert_eq!(out[1].storage_id(), imported.storage_id());
        assert_eq!(rig.trees.path_live(), 1);
    }
    assert_eq!(rig.allocator.stats().live_blocks.current, 1);
    drop(imported);
    assert_eq!(
        rig.allocator.stats().live_blocks.current,
        0,
        "the keeper went with the last handle"
    );
    rig.finish();
}

fn another_number_of_inputs_is_another_recording<D: Device>(rig: Rig<D>) {
    // Of a second input it takes note, of a third it does not.
    let (f, calls) = rig.counted(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        Ok(vec![match inputs.get(1) {
            Ok(y) => k.sum(rec, &x, y)?,
            Err(_) => k.apply(rec, &x, 1.0, 0.0)?,
        }])
    });
    let (x, y, z) = (
        rig.floats(&[1.0]),
        rig.floats(&[10.0]),
        rig.floats(&[100.0]),
    );
    let run = |inputs: &[&Tensor<D>]| {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, inputs);
        (out.phase(), out.reason(), rig.read(&out[0])[0])
    };
    let count = Some(Reason::Changed(Mismatch::Count));
    assert_eq!(run(&[&x]), (Warmup, Some(Reason::NotWarm), 1.0));
    assert_eq!(run(&[&x]), (Record, Some(Reason::FirstRecording), 1.0));
    assert_eq!(run(&[&x, &y]), (Record, count, 11.0));
    assert_eq!(run(&[&x, &y, &z]), (Record, count, 11.0));
    for _ in 0..2 {
        assert_eq!(run(&[&x, &y, &z]), (Replay, None, 11.0));
        assert_eq!(run(&[&x]), (Replay, None, 1.0));
        assert_eq!(run(&[&x, &y]), (Replay, None, 11.0));
    }
    let copied: Vec<usize> = rig
        .trees
        .view()
        .nodes
        .iter()
        .map(|n| n.inputs.len())
        .collect();
    assert_eq!(copied, [1, 2, 3]);
    assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 4);
    drop((f, x, y, z));
    rig.finish();
}

fn a_declared_number_of_inputs<D: Device>(rig: Rig<D>) {
    let w = rig.floats(&[0.5]);
    let spec = FunctionSpec::new("f").inputs(2).bind(1, &w);
    let (f, calls) = rig.counted(spec, |k, rec, inputs| {
        Ok(vec![k.sum(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let (x, y) = (rig.floats(&[1.0]), rig.floats(&[2.0]));
    let refused = |args: &mut [Arg<'_, D>]| {
        let step = rig.trees.step();
        let error = rig
            .trees
            .run(&f, &step, &[], &rig.stream, args)
            .unwrap_err();
        let passed = args.len();
        let words = format!(
            "the run passes {passed} inputs and 1 are bound, {} in all; the function is declared to take 2",
            passed + 1
        );
        assert!(
            matches!(&error, Error::Inputs { function, detail } if &**function == "f" && *detail == words),
            "{error}"
        );
    };
    for (n, phase) in [Warmup, Record, Replay, Replay].into_iter().enumerate() {
        // Before its first run, before its recording, and beside it.
        refused(&mut []);
        let mut args = [lend(&x), give(y.clone())];
        refused(&mut args);
        assert!(args[1].is_given(), "it is the caller's still");
        let step = rig.trees.step();
        let (ran, out) = rig.phased(&f, &step, &x);
        assert_eq!((ran, rig.read(&out)), (phase, vec![1.5]), "run {n}");
    }
    assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 2);
    let counts = rig.trees.counts();
    assert_eq!(
        (counts.warmups, counts.recordings, counts.replays),
        (1, 1, 2)
    );
    // Inside of a capture, too, which goes on.
    let mut graph = Graph::new(&rig.allocator);
    let options = cudagraph_trees::CaptureOptions {
        mode: CaptureMode::ThreadLocal,
        ..Default::default()
    };
    let capture = graph.capture_with(&rig.stream, options).unwrap();
    refused(&mut [lend(&x), lend(&y)]);
    let step = rig.trees.step();
    let out = rig.one(&f, &step, &y);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&out), [2.5]);
    // A declaration that contradicts itself.
    let specs = [
        FunctionSpec::new("g").inputs(2).static_input(2),
        FunctionSpec::new("g").inputs(1).mutates(3),
        FunctionSpec::new("g").inputs(0).bind(0, &w),
    ];
    for spec in specs {
        let error = rig.trees.register(spec, |_, _| Ok(vec![])).unwrap_err();
        assert!(
            matches!(&error, Error::Inputs { detail, .. } if detail.contains("inputs in all")),
            "{error}"
        );
    }
    drop((out, step, graph, f, w, x, y));
    rig.finish();
}
