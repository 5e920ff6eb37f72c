//! What users reported of outputs, inputs and settings of trees (T1, T2, T6, T7), where other suites do not have it.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{Rig, wrapped};
use cudagraph_trees::device::{Call, Code, Device};
use cudagraph_trees::pool::PoolConfig;
use cudagraph_trees::{
    Budget, Error, FunctionSpec, Generator, GraphTrees, InputView, Phase, Reason, ReasonKind,
    Tensor, give, lend,
};

suite!(
    t1_13_escaping_outputs_and_intermediates,
    t1_14_inputs_and_pinned_buffers_returned,
    t2_05_two_variants_in_turn,
    t2_05_two_sessions_interleaved,
    t2_11_modes_switched_and_a_block_leaked,
    t2_12_two_graphs_of_two_streams_share_memory,
    t6_03_a_temporary_as_an_argument,
    t6_06_an_external_input_is_freed,
    t6_10_the_seed_and_two_graphs_interleaved,
    t6_12_more_memory_in_the_second_call,
    t6_13_the_first_call_runs_once,
    t6_14_work_is_ordered_on_both_sides,
    t6_15_a_soak_with_checksums_and_a_switch,
    t7_02_every_source_of_a_size,
    t7_06_a_recording_is_discarded,
);

use Phase::{Eager, Record, Replay, Warmup};

fn t1_13_escaping_outputs_and_intermediates<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        // What is not returned is an intermediate, whose memory is used again inside.
        let inner = k.apply(rec, inputs.get(0)?, 2.0, 0.0)?;
        let out = k.apply(rec, &inner, 1.0, 1.0)?;
        drop(inner);
        let again = k.apply(rec, &out, 3.0, 0.0)?;
        Ok(vec![out, again])
    });
    for _ in 0..4 {
        // Both runs' results stay, as long as both tokens do.
        let runs: Vec<_> = [1.0, 2.0]
            .into_iter()
            .map(|value| {
                let x = rig.floats(&[value; 8]);
                let step = rig.trees.step();
                let out = rig.run(&f, &step, &[&x]);
                (value, step, out)
            })
            .collect();
        for (value, _, out) in &runs {
            let first = 2.0 * value + 1.0;
            assert_eq!(rig.read(&out[0]), [first; 8]);
            assert_eq!(rig.read(&out[1]), [3.0 * first; 8]);
        }
        assert_eq!(rig.trees.view().held.len(), 4, "no intermediate");
    }
    rig.finish();
}

fn t1_14_inputs_and_pinned_buffers_returned<D: Device>(rig: Rig<D>) {
    let pinned = rig.floats(&[7.0]);
    let bound = rig.floats(&[8.0]);
    let spec = FunctionSpec::new("f").static_input(1).bind(2, &bound);
    let own = rig.floats(&[9.0]);
    let constant = own.clone();
    let f = rig.register(spec, move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let made = k.apply(rec, &x, 2.0, 0.0)?;
        let (pinned, bound) = (inputs.take(1)?, inputs.take(2)?);
        Ok(vec![made, x, pinned, bound, constant.clone()])
    });
    let mut last: Option<Vec<Tensor<D>>> = None;
    for generation in 0..5 {
        let value = generation as f32;
        let x = rig.floats(&[value]);
        let step = rig.trees.step();
        let out: Vec<_> = rig.run(&f, &step, &[&x, &pinned]).into_iter().collect();
        let values: Vec<f32> = out.iter().map(|t| rig.read(t)[0]).collect();
        assert_eq!(values, [2.0 * value, value, 7.0, 8.0, 9.0]);
        // Three kinds: the pool's own, the caller's, and what comes from outside.
        assert_eq!(rig.trees.path_live(), 2);
        let ids = [&pinned, &bound, &own].map(|t| t.storage_id());
        assert_eq!([2, 3, 4].map(|i: usize| out[i].storage_id()), ids);
        if let Some(last) = last.replace(out) {
            let stale = |t: &Tensor<D>| matches!(rig.try_read(t), Err(Error::Stale(_)));
            let all: Vec<bool> = last.iter().map(stale).collect();
            assert_eq!(all, [true, true, false, false, false]);
        }
    }
    let last = last.unwrap();
    assert_eq!(rig.read(&last[2]), [7.0]);
    drop((f, pinned, bound, own, last));
    rig.finish();
}

fn t2_05_two_variants_in_turn<D: Device>(rig: Rig<D>) {
    let variants = [2.0, 3.0].map(|by| {
        let name = format!("by {by}");
        rig.scale_add(&name, by, 0.0)
    });
    let x = rig.floats(&[1.0; 16]);
    // One alone, as for timing; then the other; then the first again.
    for (variant, phases) in [
        (0, [Warmup, Record, Replay]),
        (1, [Warmup, Record, Replay]),
        (0, [Replay; 3]),
    ] {
        for phase in phases {
            let (p, out) = rig.phased(&variants[variant], &rig.trees.step(), &x);
            assert_eq!((p, rig.read(&out)), (phase, vec![2.0 + variant as f32; 16]));
        }
    }
    for round in 0..8 {
        let (p, out) = rig.phased(&variants[round % 2], &rig.trees.step(), &x);
        assert_eq!((p, rig.read(&out)[0]), (Replay, 2.0 + (round % 2) as f32));
    }
    assert_eq!(rig.trees.counts().recordings, 2);
    drop(x);
    rig.finish();
}

fn t2_05_two_sessions_interleaved<D: Device>(rig: Rig<D>) {
    // Each session holds its last output while the other runs, in one tree or in two.
    let f = rig.scale_add("f", 2.0, 0.0);
    let second = GraphTrees::new(&rig.allocator).unwrap();
    let kernels = rig.kernels.clone();
    let g = second
        .register(FunctionSpec::new("g"), move |rec, inputs| {
            let x = inputs.get(0)?;
            let out = rec.alloc(x.bytes())?;
            let (to, from) = (out.ptr()?, x.ptr()?);
            kernels.scale_add(
                rec.device(),
                rec.stream(),
                to,
                from,
                x.bytes() / 4,
                3.0,
                0.0,
            )?;
            Ok(vec![out])
        })
        .unwrap();
    let mut held = Vec::new();
    for round in 0..6 {
        for session in 0..2 {
            let value = (10 * round + session) as f32;
            let x = rig.floats(&[value; 16]);
            let step = rig.trees.step();
            let key = [session as i64];
            let y = rig.call(&f, &step, &key, &mut [lend(&x)]);
            let other = second.step();
            let run = second.run(&g, &other, &key, &rig.stream, &mut [lend(&y[0])]);
            held.push((value, step, y, other, run.unwrap()));
            if held.len() > 2 {
                drop(held.remove(0));
            }
            for (value, _, y, _, z) in &held {
                assert_eq!(rig.read(&y[0]), [2.0 * value; 16]);
                assert_eq!(rig.read(&z[0]), [6.0 * value; 16]);
            }
        }
    }
    for trees in [&rig.trees, &second] {
        let counts = trees.counts();
        assert!(counts.replays >= 4, "{counts:?}");
        trees.audit().unwrap();
    }
    drop((held, g, second));
    rig.finish();
}

fn t2_11_modes_switched_and_a_block_leaked<D: Device>(rig: Rig<D>) {
    let leaked = Arc::new(Mutex::new(None::<Tensor<D>>));
    let leaks = Arc::new(AtomicUsize::new(0));
    let (keeps, told) = (leaked.clone(), leaks.clone());
    let line = line!() + 4;
    let forward = rig.register(FunctionSpec::new("forward"), move |k, rec, inputs| {
        let x = inputs.get(0)?;
        if told.load(Ordering::Relaxed) == 1 {
            let hidden = rec.alloc(1000)?;
            *keeps.lock().unwrap() = Some(hidden);
        }
        Ok(vec![k.apply(rec, x, 2.0, 0.0)?])
    });
    let backward = rig.scale_add("backward", 3.0, 0.0);
    let (train, infer) = ([1i64], [0i64]);
    let x = rig.floats(&[1.0]);
    for _ in 0..2 {
        for phase in 0..3 {
            let step = rig.trees.step();
            let y = rig.call(&forward, &step, &train, &mut [lend(&x)]);
            let g = rig.one(&backward, &step, &y[0]);
            assert_eq!(
                (rig.read(&y[0]), rig.read(&g)),
                (vec![2.0], vec![6.0]),
                "{phase}"
            );
            rig.trees.audit().unwrap();
        }
        for _ in 0..3 {
            let out = rig.call(&forward, &rig.trees.step(), &infer, &mut [lend(&x)]);
            assert_eq!(rig.read(&out[0]), [2.0]);
            rig.trees.audit().unwrap();
        }
    }
    // One block on purpose, in a warmup and in a recording: a report by name, and the pool is sound.
    for phase in [Warmup, Record] {
        leaks.store(1, Ordering::Relaxed);
        let failed = rig.trees.run(
            &forward,
            &rig.trees.step(),
            &[2],
            &rig.stream,
            &mut [lend(&x)],
        );
        match failed.map(drop) {
            Err(Error::Untracked {
                function,
                phase: p,
                bytes,
                at,
                count,
                ..
            }) => {
                assert_eq!((&*function, p, bytes, count), ("forward", phase, 1000, 1));
                assert_eq!((at.file(), at.line()), (file!(), line));
            }
            other => panic!("{other:?}"),
        }
        leaks.store(0, Ordering::Relaxed);
        drop(leaked.lock().unwrap().take());
        rig.trees.audit().unwrap();
        let out = rig.call(&forward, &rig.trees.step(), &[2], &mut [lend(&x)]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![2.0]));
        let out = rig.call(&forward, &rig.trees.step(), &infer, &mut [lend(&x)]);
        assert_eq!(out.phase(), Replay);
    }
    drop((forward, x));
    rig.finish();
}

fn t2_12_two_graphs_of_two_streams_share_memory<D: Device>(rig: Rig<D>) {
    const BYTES: u64 = 12 << 20;
    let functions = ["f", "g"].map(|name| {
        rig.register(FunctionSpec::new(name), |k, rec, inputs| {
            let large = rec.alloc(BYTES)?;
            let x = inputs.get(0)?;
            let n = x.bytes() / 4;
            k.kernels
                .copy(rec.device(), rec.stream(), large.ptr()?, x.ptr()?, n)?;
            Ok(vec![large])
        })
    });
    let streams = [rig.stream.clone(), rig.device.create_stream().unwrap()];
    let mut reserved = Vec::new();
    for (f, stream) in functions.iter().zip(&streams) {
        for phase in [Warmup, Record, Replay] {
            let x = rig.floats(&[5.0; 4]);
            rig.device.synchronize(&rig.stream).unwrap();
            let step = rig.trees.step();
            let run = rig.trees.run(f, &step, &[], stream, &mut [lend(&x)]);
            let out = run.unwrap();
            assert_eq!(out.phase(), phase);
            rig.device.synchronize(stream).unwrap();
            assert_eq!(rig.read(&out[0].view(0, 16).unwrap()), [5.0; 4]);
        }
        reserved.push(rig.trees.pool_stats().reserved_bytes.current);
    }
    // Of both the most, not the sum: the copy's small segment, and one for the output.
    let most = BYTES + PoolConfig::default().small_segment;
    assert_eq!(reserved, [most, most]);
    rig.finish();
}

fn t6_03_a_temporary_as_an_argument<D: Device>(rig: Rig<D>) {
    // Values on the stack, a temporary of the call, and a table of the closure's own.
    let table = rig.floats(&[10.0, 20.0]);
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let by = [2.0f32];
        let temporary = rec.alloc(8)?;
        k.kernels
            .fill(rec.device(), rec.stream(), temporary.ptr()?, 2, by[0])?;
        let scaled = k.product(rec, inputs.get(0)?, &temporary)?;
        drop(temporary);
        Ok(vec![k.sum(rec, &scaled, &table)?])
    });
    let churn = rig.scale_add("churn", 1.0, 0.0);
    for round in 0..20 {
        let value = round as f32;
        let x = rig.floats(&[value, 1.0]);
        let out = rig.one(&f, &rig.trees.step(), &x);
        assert_eq!(rig.read(&out), [2.0 * value + 10.0, 22.0]);
        drop(out);
        let junk: Vec<_> = (0..4).map(|_| rig.floats(&[-1.0; 2])).collect();
        drop(rig.one(&churn, &rig.trees.step(), &junk[0]));
    }
    drop(f);
    rig.finish();
}

fn t6_06_an_external_input_is_freed<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").skip_warmup().static_input(0);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let bound_to = rig.floats(&[4.0]);
    let g = rig.register(
        FunctionSpec::new("g").skip_warmup().bind(0, &bound_to),
        |k, rec, inputs| Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?]),
    );
    let external = rig.floats(&[3.0]);
    drop(rig.one(&f, &rig.trees.step(), &external));
    drop(rig.run(&g, &rig.trees.step(), &[]));
    drop((external, bound_to));
    let run = |f| {
        rig.trees
            .run(f, &rig.trees.step(), &[], &rig.stream, &mut [])
    };
    assert!(matches!(run(&g), Err(Error::StaticDied { input: 0, .. })));
    // What lies there now is another tensor: nothing is played of the old one.
    let other = rig.floats(&[5.0]);
    let (phase, out) = rig.phased(&f, &rig.trees.step(), &other);
    assert_eq!((phase, rig.read(&out)), (Record, vec![10.0]));
    drop((other, out));
    rig.finish();
}

fn t6_10_the_seed_and_two_graphs_interleaved<D: Device>(rig: Rig<D>) {
    let generators = [1, 2].map(|seed| Generator::new(&rig.allocator, &rig.stream, seed).unwrap());
    let functions = [0, 1].map(|index: usize| {
        let generator = generators[index].clone();
        rig.register(FunctionSpec::new("draw").skip_warmup(), move |_, rec, _| {
            let t = rec.alloc(16)?;
            generator.uniform(rec.stream(), t.ptr()?, 4)?;
            Ok(vec![t])
        })
    });
    let draw = |index: usize| {
        let out = rig.run(&functions[index], &rig.trees.step(), &[]);
        rig.read(&out[0])
    };
    draw(0);
    draw(1);
    let seed = |index: usize, seed: u64| generators[index].seed(&rig.stream, seed).unwrap();
    seed(0, 1);
    let first = [draw(0), draw(0), draw(0)];
    seed(0, 1);
    assert_eq!([draw(0), draw(0), draw(0)], first);
    assert_ne!(first[0], first[1]);
    // Each has a timeline of its own.
    seed(0, 1);
    seed(1, 1);
    for values in &first {
        assert_eq!((&draw(0), &draw(1)), (values, values));
    }
    assert_eq!(rig.trees.counts().recordings, 2);
    drop((functions, generators));
    rig.finish();
}

fn t6_12_more_memory_in_the_second_call<D: Device>(rig: Rig<D>) {
    let calls = AtomicUsize::new(0);
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let more = calls.fetch_add(1, Ordering::Relaxed) == 1;
        // Past the segments that the first call has had.
        let large = more.then(|| rec.alloc(30 << 20)).transpose()?;
        if let Some(large) = &large {
            k.kernels
                .fill(rec.device(), rec.stream(), large.ptr()?, 16, 1.0)?;
        }
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    for (round, phase) in [Warmup, Record, Replay, Replay].into_iter().enumerate() {
        let x = rig.floats(&[round as f32]);
        let (p, out) = rig.phased(&f, &rig.trees.step(), &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![2.0 * round as f32]));
    }
    assert_eq!(rig.trees.counts().failed_captures, 0);
    assert_eq!(rig.trees.view().nodes[0].graph_nodes, 3, "no memory node");
    rig.finish();
}

fn t6_13_the_first_call_runs_once<D: Device>(rig: Rig<D>) {
    let in_place = |spec: FunctionSpec<D>| {
        rig.register(spec.mutates(0), |k, rec, inputs| {
            let x = inputs.get(0)?;
            k.kernels
                .increment(rec.device(), rec.stream(), x.ptr()?, 1, 1.0)?;
            Ok(vec![])
        })
    };
    let specs = [
        FunctionSpec::new("static").static_input(0),
        FunctionSpec::new("recorded").static_input(0).skip_warmup(),
        FunctionSpec::new("eager"),
        FunctionSpec::new("too small")
            .static_input(0)
            .min_graph_nodes(2),
    ];
    for f in specs.map(in_place) {
        let x = rig.floats(&[0.0]);
        for n in 1..=6 {
            rig.run(&f, &rig.trees.step(), &[&x]);
            assert_eq!(rig.read(&x), [n as f32], "{}", f.name());
        }
    }
    rig.finish();
}

fn t6_14_work_is_ordered_on_both_sides<D: Device>(rig: Rig<D>) {
    const N: usize = 1 << 14;
    let f = rig.scale_add("f", 2.0, 0.0);
    let spec = FunctionSpec::new("eager").capture_if(|_| false);
    let eager = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let (source, x, copy) = (
        rig.floats(&[1.0; N]),
        rig.floats(&[0.0; N]),
        rig.floats(&[0.0; N]),
    );
    for (f, phase) in [
        (&f, Warmup),
        (&f, Record),
        (&f, Replay),
        (&f, Replay),
        (&eager, Eager),
    ] {
        rig.put(&x, &[0.0; N]);
        let step = rig.trees.step();
        // A producer before, a consumer after, and one more that writes the input: nobody waits.
        for _ in 0..16 {
            rig.scale_into(&rig.stream, &x, &source, 3.0, 0.0);
        }
        let out = rig.run(f, &step, &[&x]);
        rig.scale_into(&rig.stream, &x, &source, -1.0, 0.0);
        rig.scale_into(&rig.stream, &copy, &out[0], 10.0, 0.0);
        assert_eq!(out.phase(), phase);
        drop((out, step));
        assert_eq!(rig.read(&copy), [60.0; N]);
    }
    drop((source, x, copy));
    rig.finish();
}

fn t6_15_a_soak_with_checksums_and_a_switch<D: Device>(rig: Rig<D>) {
    let (f, g) = (rig.scale_add("f", 2.0, 1.0), rig.scale_add("g", 3.0, 0.0));
    let x = rig.floats(&[0.0; 32]);
    let run = |round: usize| {
        rig.put(&x, &[round as f32; 32]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let z = rig.run(&g, &step, &[&y]);
        let expected = (2.0 * round as f32 + 1.0) * 3.0;
        assert_eq!(
            rig.read(&z[0]).iter().sum::<f32>(),
            32.0 * expected,
            "{round}"
        );
        z.phase()
    };
    for round in 0..2000 {
        assert_eq!(run(round), [Warmup, Record, Replay][round.min(2)]);
    }
    // The switch to eager runs, and back, while the program runs.
    rig.trees.set_budget(Budget {
        graphs: 0,
        ..Budget::default()
    });
    rig.trees.invalidate(&f).unwrap();
    rig.trees.invalidate(&g).unwrap();
    let phases: Vec<_> = (0..4).map(run).collect();
    assert_eq!(phases, [Warmup, Eager, Eager, Eager]);
    rig.trees.set_budget(Budget::default());
    assert_eq!((run(0), run(1)), (Record, Replay));
    drop(x);
    rig.finish();
}

fn t7_02_every_source_of_a_size<D: Device>(rig: Rig<D>) {
    // By its key, by the length of an input, by a host value, by the number of inputs.
    let spec = FunctionSpec::new("f")
        .capture_keys([[].as_slice()])
        .max_recordings_at_a_place(1);
    let f = rig.register(spec, |k, rec, inputs| {
        let by = inputs.value::<f32>(0)?;
        let x = inputs.get(1)?;
        drop(k.apply(rec, x, *by, 0.0)?);
        // The output is of one size, whatever the input's.
        Ok(vec![k.apply(rec, &x.view(0, 4)?, *by, 0.0)?])
    });
    let value = |by: f32| -> cudagraph_trees::Value { Arc::new(by) };
    let (two, x) = (value(2.0), rig.floats(&[1.0]));
    let run = |key: &[i64], by: &cudagraph_trees::Value, inputs: &[&Tensor<D>]| {
        let mut args = vec![cudagraph_trees::Arg::Value(by.clone())];
        args.extend(inputs.iter().map(|t| lend(t)));
        let out = rig.call(&f, &rig.trees.step(), key, &mut args);
        let by = by.downcast_ref::<f32>().unwrap();
        assert_eq!(rig.read(&out[0]), [*by]);
        (out.phase(), out.reason().map(|r| r.kind()))
    };
    for phase in [Warmup, Record, Replay] {
        assert_eq!(run(&[], &two, &[&x]).0, phase);
    }
    for n in 2..6 {
        let longer = rig.floats(&vec![1.0; n]);
        let limit = (Eager, Some(ReasonKind::PlaceLimit));
        assert_eq!(
            run(&[n as i64], &two, &[&x]),
            (Eager, Some(ReasonKind::KeyNotCaptured))
        );
        assert_eq!(run(&[], &two, &[&longer]), limit);
        assert_eq!(run(&[], &value(n as f32), &[&x]), limit);
        assert_eq!(run(&[], &two, &vec![&x; n]), limit);
        assert_eq!(run(&[], &two, &[&x]), (Replay, None));
    }
    assert_eq!(rig.trees.counts().recordings, 1);
    drop(x);
    rig.finish();
}

/// Adaptation: what settles late is warmed up again by discarding what there is.
fn t7_06_a_recording_is_discarded<D: Device>(rig: Rig<D>) {
    let (f, runs) = rig.counted(FunctionSpec::new("f").static_input(1), |k, rec, inputs| {
        Ok(vec![k.sum(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let x = rig.floats(&[1.0]);
    // The address settles at the third call.
    let tables: Vec<_> = (0..3).map(|i| rig.floats(&[i as f32])).collect();
    for (table, phase) in [(0, Warmup), (1, Record)] {
        assert_eq!(
            rig.run(&f, &rig.trees.step(), &[&x, &tables[table]])
                .phase(),
            phase
        );
    }
    rig.trees.invalidate(&f).unwrap();
    for phase in [Warmup, Record, Replay] {
        let out = rig.run(&f, &rig.trees.step(), &[&x, &tables[2]]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![3.0]));
    }
    assert_eq!(runs.load(Ordering::Relaxed), 4);
    let view = rig.trees.view();
    assert_eq!(view.nodes.len(), 1);
    assert_eq!(view.nodes[0].inputs[1], InputView::Static { bytes: 4 });
    drop((x, tables));
    rig.finish();
}

/// Nothing that a run does waits for the device, in any phase.
#[test]
fn t6_16_no_run_waits() {
    let device = wrapped();
    let rig = Rig::new(device.clone());
    let f = rig.scale_add("f", 2.0, 0.0);
    let spec = FunctionSpec::new("eager").capture_if(|_| false);
    let eager = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 3.0, 0.0)?])
    });
    let x = rig.floats(&[1.0; 16]);
    let waits = || {
        let calls = [
            Call::Synchronize,
            Call::SynchronizeDevice,
            Call::SynchronizeEvent,
            Call::Quiesce,
            Call::Read,
        ];
        calls.map(|call| device.calls(call))
    };
    for phase in [Warmup, Record, Replay, Replay] {
        let before = waits();
        let step = rig.trees.step();
        let (p, y) = rig.phased(&f, &step, &x);
        let z = rig.run(&eager, &step, &[&y]);
        assert_eq!((p, z.phase()), (phase, Eager));
        assert!(!rig.device.query(&rig.stream).unwrap(), "it has not run");
        assert_eq!(waits(), before);
        assert_eq!(rig.read(&z[0]), [6.0; 16]);
    }
    drop(x);
    rig.finish();
}

/// A recording that fails half way leaves no half of it: the next call makes it, whatever failed.
#[test]
fn t7_15_a_failed_build_is_built_again() {
    for call in [
        Call::BeginCapture,
        Call::EndCapture,
        Call::GraphInfo,
        Call::Instantiate,
        Call::LaunchGraph,
    ] {
        let device = wrapped();
        let rig = Rig::new(device.clone());
        let f = rig.scale_add("f", 2.0, 0.0);
        let x = rig.floats(&[1.0]);
        drop(rig.one(&f, &rig.trees.step(), &x));
        device.fail(call, 1, Code::OutOfMemory);
        let failed = rig.trees.run(
            &f,
            &rig.trees.step(),
            &[],
            &rig.stream,
            &mut [give(x.clone())],
        );
        match failed {
            Ok(out) => {
                assert_ne!(call, Call::LaunchGraph);
                assert_eq!(out.reason(), Some(Reason::CaptureFailed));
                assert_eq!((out.phase(), rig.read(&out[0])), (Eager, vec![2.0]));
            }
            Err(Error::Device(error)) => {
                assert_eq!((error.call, call), (Call::LaunchGraph, Call::LaunchGraph));
            }
            Err(other) => panic!("{other}"),
        }
        assert_eq!(rig.trees.view().nodes.len(), 0);
        for phase in [Record, Replay, Replay] {
            let (p, out) = rig.phased(&f, &rig.trees.step(), &x);
            assert_eq!((p, rig.read(&out)), (phase, vec![2.0]), "{call:?}");
        }
        drop(x);
        rig.finish();
    }
}
