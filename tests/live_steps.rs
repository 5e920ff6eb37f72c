//! Steps: when handles go stale, what the error says, and that what it advises works. Names carry the rows of the tables of what users report.

mod common;

use std::sync::{Arc, Mutex};

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{Error, FunctionSpec, Made, NodeId, Phase, Stale, Tensor, give, lend};

suite!(
    t1_01_the_first_result_after_the_second_run,
    t1_02_both_remedies_work,
    t1_03_every_alias_goes_stale,
    t1_04_the_outcome_does_not_depend_on_the_phase,
    t1_07_each_phase_gives_real_data,
    t1_10_dead_at_the_recording_and_held_at_the_replay,
    t2_08_zero_bytes_in_each_phase,
    the_error_names_the_run_that_took_each_generation,
    a_stale_handle_is_refused_everywhere,
    a_dropped_token_alone_changes_nothing,
    two_open_tokens,
    tokens_closed_in_either_order,
    a_token_within_a_token,
    an_inner_loop_within_a_token_records_a_bounded_tree,
    a_token_dropped_inside_a_closure,
    a_stale_clone_and_its_drop_are_harmless,
);

use Phase::{Record, Replay, Warmup};

fn stale<D: Device>(rig: &Rig<D>, tensor: &Tensor<D>) -> Stale {
    match rig.try_read(tensor) {
        Err(Error::Stale(stale)) => *stale,
        other => panic!("not stale: {other:?}"),
    }
}

fn t1_01_the_first_result_after_the_second_run<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("pair"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![k.apply(rec, x, 1.0, 1.0)?, k.apply(rec, x, 1.0, 2.0)?])
    });
    let x = rig.floats(&[1.0]);
    let mut last: Option<(u32, cudagraph_trees::Outputs<D>)> = None;
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let (line, out) = (line!(), rig.run(&f, &step, &[&x]));
        assert_eq!(out.phase(), phase);
        if let Some((made_at, old)) = last.take() {
            for (index, handle) in old.iter().enumerate() {
                let error = stale(&rig, handle);
                assert_eq!(
                    error.made,
                    Made::Output {
                        function: "pair".into(),
                        output: index
                    }
                );
                assert_eq!(
                    (error.made_at.file(), error.made_at.line()),
                    (file!(), made_at)
                );
                assert_eq!(error.taken_by.as_deref(), Some("pair"));
                assert_eq!(error.taken_at.map(|at| at.line()), Some(line));
            }
        }
        assert_eq!(
            (rig.read(&out[0]), rig.read(&out[1])),
            (vec![2.0], vec![3.0])
        );
        last = Some((line, out));
    }
    drop((x, last));
    rig.finish();
}

fn t1_02_both_remedies_work<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[1.0]);
    for _ in 0..3 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        drop(step);
        let next = rig.trees.step();
        drop(rig.one(&f, &next, &x));
        let text = stale(&rig, &out).to_string();
        assert!(
            text.contains("was overwritten by a subsequent run")
                && text.ends_with(
                    "keep the token as long as you read its outputs, or copy them out before"
                ),
            "{text}"
        );
    }
    // Keep the token as long as you read its outputs.
    for round in 0..4 {
        rig.put(&x, &[round as f32]);
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        let next = rig.trees.step();
        rig.put(&x, &[-1.0]);
        let other = rig.one(&f, &next, &x);
        assert_eq!(rig.read(&out), [2.0 * round as f32]);
        assert_eq!(rig.read(&other), [-2.0]);
        drop(step);
    }
    // Or copy them out before.
    for round in 0..4 {
        rig.put(&x, &[round as f32]);
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        let copy = rig.allocator.alloc(&rig.stream, out.bytes()).unwrap();
        let (dst, src) = (copy.ptr().unwrap(), out.ptr().unwrap());
        rig.device.copy(&rig.stream, dst, src, 4).unwrap();
        drop(step);
        rig.put(&x, &[-1.0]);
        let next = rig.trees.step();
        let other = rig.one(&f, &next, &x);
        assert_eq!(rig.read(&copy), [2.0 * round as f32]);
        assert_eq!(rig.read(&other), [-2.0]);
        assert!(!out.is_current());
    }
    drop(x);
    rig.finish();
}

fn t1_03_every_alias_goes_stale<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0, 2.0, 3.0]);
    let functions = [rig.scale_add("f", 1.0, 1.0), rig.scale_add("g", 1.0, 1.0)];
    drop(rig.one(&functions[1], &rig.trees.step(), &x));
    for (f, phase) in [(0, Warmup), (1, Record), (0, Replay), (1, Replay)] {
        let f = &functions[f];
        rig.put(&x, &[1.0, 2.0, 3.0]);
        let step = rig.trees.step();
        let (p, y) = rig.phased(f, &step, &x);
        assert_eq!(p, phase);
        let view = y.view(4, 8).unwrap();
        let of_view = view.view(4, 4).unwrap();
        let weak = of_view.downgrade();
        assert_eq!(rig.read(&of_view), [4.0]);
        drop((y, step));
        rig.put(&x, &[7.0, 8.0, 9.0]);
        let step = rig.trees.step();
        let y2 = rig.one(f, &step, &x);
        for alias in [&view, &of_view, &view.clone()] {
            stale(&rig, alias);
            assert!(!alias.is_current());
        }
        assert!(weak.upgrade().is_none());
        assert_eq!(rig.read(&y2), [8.0, 9.0, 10.0]);
    }
    drop(x);
    rig.finish();
}

/// A producer so many times, then a consumer; with one step for all, and with one for each run.
fn t1_04_the_outcome_does_not_depend_on_the_phase<D: Device>(rig: Rig<D>) {
    for one_step in [true, false] {
        for hold in [true, false] {
            for n in 1..=6 {
                let trees = cudagraph_trees::GraphTrees::new(&rig.allocator).unwrap();
                let inner = Rig {
                    device: rig.device.clone(),
                    allocator: rig.allocator.clone(),
                    kernels: rig.kernels.clone(),
                    stream: rig.stream.clone(),
                    trees,
                };
                let f = inner.scale_add("f", 2.0, 0.0);
                let g = inner.scale_add("g", 1.0, 0.5);
                let x = inner.floats(&[0.0]);
                let mut steps = vec![inner.trees.step()];
                let mut held: Vec<Tensor<D>> = Vec::new();
                for i in 0..n {
                    if !one_step {
                        // The last run's token goes before the next run.
                        steps = vec![inner.trees.step()];
                    }
                    inner.put(&x, &[i as f32]);
                    let y = inner.one(&f, &steps[0], &x);
                    if !hold {
                        held.clear();
                    }
                    held.push(y);
                }
                let newest = held.last().unwrap();
                let out = inner.one(&g, &steps[0], newest);
                assert_eq!(inner.read(&out), [2.0 * (n - 1) as f32 + 0.5]);
                for (i, y) in held.iter().enumerate() {
                    if one_step || i + 1 == held.len() {
                        let value = if hold { i } else { n - 1 };
                        assert_eq!(inner.read(y), [2.0 * value as f32]);
                    } else {
                        stale(&inner, y);
                    }
                }
                // A next step: all of it is stale, in whatever phase it was made.
                drop(steps);
                let step = inner.trees.step();
                let next = inner.one(&g, &step, &x);
                for y in held.iter().chain([&out]) {
                    stale(&inner, y);
                }
                assert_eq!(inner.read(&next), [(n - 1) as f32 + 0.5]);
                drop((x, next, held, out, step));
            }
        }
    }
    rig.finish();
}

fn t1_07_each_phase_gives_real_data<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        let half = k.apply(rec, x, 0.1, 0.3)?;
        let square = k.product(rec, &half, x)?;
        Ok(vec![k.sum(rec, &square, &half)?, half])
    });
    let inputs = [[1.0f32, -2.5, 1e-3], [0.3, 0.7, 1e6], [9.0, 0.0, -0.1]];
    let x = rig.floats(&inputs[0]);
    for values in inputs.iter().chain(&inputs) {
        rig.put(&x, values);
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x]);
        let half: Vec<f32> = values.iter().map(|v| v * 0.1 + 0.3).collect();
        let all: Vec<f32> = values.iter().zip(&half).map(|(v, h)| v * h + h).collect();
        let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(rig.read(&out[0])), bits(all), "{:?}", out.phase());
        assert_eq!(bits(rig.read(&out[1])), bits(half));
    }
    assert_eq!(rig.trees.counts().replays, 4);
    drop(x);
    rig.finish();
}

fn t1_10_dead_at_the_recording_and_held_at_the_replay<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 10.0, 0.0);
    let x = rig.floats(&[1.0]);
    // Record f, g, g with f's output dropped before the last, which lies in its memory.
    let round = |hold: bool| {
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let z = rig.one(&g, &step, &y);
        let y = hold.then_some(y);
        let out = rig.run(&g, &step, &[&z]);
        assert_eq!(rig.read(&out[0]), [200.0]);
        assert_eq!(rig.read(&z), [20.0]);
        if let Some(y) = y {
            assert_eq!(rig.read(&y), [2.0], "what is held is intact");
        }
        (out.phase(), out.node())
    };
    assert_eq!(round(false).0, Warmup);
    assert_eq!(round(false), (Record, Some(NodeId(2))));
    assert_eq!(round(false), (Replay, Some(NodeId(2))));
    let reserved = rig.trees.pool_stats().reserved_bytes.current;
    assert_eq!(round(true), (Record, Some(NodeId(3))));
    assert_eq!(round(true), (Replay, Some(NodeId(3))));
    assert_eq!(round(false), (Replay, Some(NodeId(2))));
    assert_eq!(rig.trees.pool_stats().reserved_bytes.current, reserved);
    drop(x);
    rig.finish();
}

fn t2_08_zero_bytes_in_each_phase<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |_, rec, inputs| {
        assert_eq!(inputs.get(0)?.bytes(), 0);
        Ok(vec![rec.alloc(0)?, inputs.get(0)?.clone()])
    });
    let empty = rig.floats(&[]);
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&empty]);
        // Nothing of the path is live, so the second finds the first's place again.
        let second = rig.call(&f, &step, &[], &mut [give(Tensor::empty())]);
        assert_eq!((out.len(), out[0].bytes(), out[1].bytes()), (2, 0, 0));
        assert_eq!(
            out[0].ptr().unwrap(),
            cudagraph_trees::device::DevicePtr::NULL
        );
        assert_eq!(rig.trees.path_live(), 0);
        if phase == Warmup {
            assert_eq!((out.phase(), second.phase()), (Warmup, Record));
        } else {
            assert_eq!((out.phase(), second.phase()), (Replay, Replay));
        }
        assert_eq!(rig.blocks(), 0);
        rig.trees.audit().unwrap();
        drop(step);
        // Nothing to go stale.
        let step = rig.trees.step();
        drop(rig.run(&f, &step, &[&out[1]]));
        assert_eq!(rig.read(&out[0]), [0.0; 0]);
    }
    assert_eq!(rig.trees.pool_stats().segments.current, 0);
    // A non-empty input is another recording.
    let g = rig.register(FunctionSpec::new("g").skip_warmup(), |_, _, mut inputs| {
        Ok(vec![inputs.take(0)?])
    });
    let x = rig.floats(&[1.0]);
    for (input, phase) in [
        (&empty, Record),
        (&x, Record),
        (&empty, Replay),
        (&x, Replay),
    ] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&g, &step, input);
        assert_eq!((p, out.bytes()), (phase, input.bytes()));
    }
    drop(x);
    rig.finish();
}

fn the_error_names_the_run_that_took_each_generation<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    for _ in 0..2 {
        drop(rig.one(&f, &rig.trees.step(), &x));
        drop(rig.one(&g, &rig.trees.step(), &x));
    }
    // Three generations of one storage, each taken by another function's run.
    let first = rig.one(&f, &rig.trees.step(), &x);
    let second = rig.one(&f, &rig.trees.step(), &x);
    drop(rig.one(&g, &rig.trees.step(), &x));
    let third = rig.one(&f, &rig.trees.step(), &x);
    assert_eq!(first.storage_id(), third.storage_id());
    assert_eq!(stale(&rig, &first).taken_by.as_deref(), Some("f"));
    assert_eq!(stale(&rig, &second).taken_by.as_deref(), Some("g"));
    // One that died on its own was not taken from anybody; then nobody is named for another generation's handle.
    drop(rig.one(&g, &rig.trees.step(), &x));
    assert_eq!(stale(&rig, &third).taken_by.as_deref(), Some("g"));
    assert_eq!(stale(&rig, &first).taken_by.as_deref(), Some("f"));
    drop((x, first, second, third));
    rig.finish();
}

fn a_stale_handle_is_refused_everywhere<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 1.0, 0.0);
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let (p, old) = rig.phased(&f, &step, &x);
        assert_eq!(p, phase);
        drop(step);
        let step = rig.trees.step();
        rig.one(&g, &step, &x);
        // Given or lent, it is refused, and a given one left where it was.
        let lent = rig
            .trees
            .run(&f, &step, &[], &rig.stream, &mut [lend(&old)]);
        assert!(matches!(lent, Err(Error::Stale(_))));
        let mut args = [give(old.clone())];
        let given = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
        assert!(matches!(given, Err(Error::Stale(_))));
        assert!(
            matches!(&args[0], cudagraph_trees::Arg::Give(t) if t.storage_id() == old.storage_id())
        );
        assert!(matches!(old.view(0, 0), Err(Error::Stale(_))));
        assert!(matches!(old.ptr(), Err(Error::Stale(_))));
        assert!(matches!(old.check(), Err(Error::Stale(_))));
        let write = old.write(&rig.device, &rig.stream, &[0; 4]);
        assert!(matches!(write, Err(Error::Stale(_))));
        let bind = rig
            .trees
            .register(FunctionSpec::new("bind").bind(0, &old), |_, _| Ok(vec![]));
        assert!(matches!(bind, Err(Error::StaticDied { input: 0, .. })));
        assert_eq!(rig.trees.path_live(), 0);
        // and the runtime works on
        drop(args);
    }
    let step = rig.trees.step();
    let (phase, out) = rig.phased(&f, &step, &x);
    assert_eq!((phase, rig.read(&out)), (Replay, vec![2.0]));
    drop((x, out, step));
    rig.finish();
}

fn a_dropped_token_alone_changes_nothing<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&f, &step, &x);
        drop(step);
        drop(rig.trees.step());
        // Until the next run, what was handed out is there; other trees' and eager work do not matter.
        drop(rig.floats(&[9.0]));
        assert_eq!((p, rig.read(&out)), (phase, vec![2.0]));
        assert_eq!(rig.trees.path_live(), 1);
    }
    drop(x);
    rig.finish();
}

fn two_open_tokens<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 2.0, 0.0);
    let x = rig.floats(&[1.0]);
    for round in 0..6 {
        let (s1, s2) = (rig.trees.step(), rig.trees.step());
        let (p1, a) = rig.phased(&f, &s1, &x);
        let (p2, b) = rig.phased(&f, &s2, &x);
        // Across tokens: an output of one is an input in the other.
        let (p3, c) = rig.phased(&g, &s2, &a);
        let (p4, d) = rig.phased(&g, &s1, &b);
        if round >= 4 {
            assert_eq!([p1, p2, p3, p4], [Replay; 4]);
        }
        for (t, value) in [(&a, 2.0), (&b, 2.0), (&c, 4.0), (&d, 4.0)] {
            assert_eq!(rig.read(t), [value]);
        }
        drop(s1);
        let e = rig.one(&g, &s2, &c);
        for t in [&a, &d] {
            stale(&rig, t);
        }
        assert_eq!(
            (rig.read(&b), rig.read(&c), rig.read(&e)),
            (vec![2.0], vec![4.0], vec![8.0])
        );
    }
    drop(x);
    rig.finish();
}

fn tokens_closed_in_either_order<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[0.0]);
    for round in 0..6 {
        let mut tokens: Vec<_> = (0..4).map(|_| Some(rig.trees.step())).collect();
        let mut outputs = Vec::new();
        for token in &tokens {
            rig.put(&x, &[outputs.len() as f32]);
            outputs.push(rig.one(&f, token.as_ref().unwrap(), &x));
        }
        let order: [usize; 4] = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]][round % 3];
        let mut closed = Vec::new();
        for index in order {
            tokens[index] = None;
            closed.push(index);
            let step = rig.trees.step();
            rig.put(&x, &[-5.0]);
            let probe = rig.one(&f, &step, &x);
            for (i, out) in outputs.iter().enumerate() {
                if closed.contains(&i) {
                    stale(&rig, out);
                } else {
                    assert_eq!(rig.read(out), [i as f32 + 1.0]);
                }
            }
            assert_eq!(rig.read(&probe), [-4.0]);
        }
    }
    drop(x);
    rig.finish();
}

fn a_token_within_a_token<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 3.0, 0.0);
    let x = rig.floats(&[1.0]);
    for _ in 0..4 {
        let outer = rig.trees.step();
        let a = rig.one(&f, &outer, &x);
        let b = {
            let inner = rig.trees.step();
            let b = rig.one(&g, &inner, &a);
            assert_eq!(rig.read(&b), [6.0]);
            b
        };
        let c = rig.one(&g, &outer, &a);
        stale(&rig, &b);
        assert_eq!((rig.read(&a), rig.read(&c)), (vec![2.0], vec![6.0]));
    }
    drop(x);
    rig.finish();
}

/// A program with a long step (weights prepared once, say) and short ones inside: the inner loop replays what it recorded.
fn an_inner_loop_within_a_token_records_a_bounded_tree<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 3.0, 0.0);
    let x = rig.floats(&[1.0]);
    for (round, hold) in [true, true, false, true].into_iter().enumerate() {
        let outer = rig.trees.step();
        let prepared = rig.one(&f, &outer, &x);
        let before = rig.trees.counts();
        let mut last = None;
        for _ in 0..20 {
            let inner = rig.trees.step();
            let out = rig.one(&g, &inner, &prepared);
            assert_eq!(rig.read(&out), [6.0]);
            assert!(rig.trees.view().path.len() <= 2);
            // Held beyond its step, or dropped within it.
            last = hold.then_some(out);
        }
        drop(last);
        let after = rig.trees.counts();
        let (replays, recordings) = (
            after.replays - before.replays,
            after.recordings - before.recordings,
        );
        assert!(
            recordings <= 1,
            "{recordings} recordings of one function in one place"
        );
        assert!(
            replays >= if round < 2 { 18 } else { 20 },
            "{replays} replays in round {round}"
        );
        assert_eq!(rig.read(&prepared), [2.0]);
    }
    // The same in one step, with the inner outputs dropped in time.
    let step = rig.trees.step();
    let prepared = rig.one(&f, &step, &x);
    for turn in 0..20 {
        let (phase, out) = rig.phased(&g, &step, &prepared);
        assert_eq!(phase, if turn == 0 { Record } else { Replay });
        assert_eq!(rig.read(&out), [6.0]);
        drop(out);
        let args = &mut [lend(&x)];
        let other = rig.call(&f, &step, &[], args);
        assert_eq!(rig.read(&other[0]), [2.0]);
    }
    drop((prepared, step));
    drop(x);
    rig.finish();
}

fn a_token_dropped_inside_a_closure<D: Device>(rig: Rig<D>) {
    let slot = Arc::new(Mutex::new(None::<cudagraph_trees::Step>));
    let inside = slot.clone();
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.register(FunctionSpec::new("g"), move |k, rec, inputs| {
        drop(inside.lock().unwrap().take());
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Record, Record] {
        let step = rig.trees.step();
        let a = rig.one(&f, &step, &x);
        *slot.lock().unwrap() = Some(step);
        let step = rig.trees.step();
        let key = if phase == Warmup { 0 } else { 1 };
        let b = rig.call(&g, &step, &[key], &mut [lend(&a)]);
        // Until the next run, what the token protected is there.
        assert_eq!((rig.read(&a), rig.read(&b[0])), (vec![2.0], vec![4.0]));
        let c = rig.one(&f, &step, &b[0]);
        if slot.lock().unwrap().take().is_none() {
            stale(&rig, &a);
        }
        assert_eq!((rig.read(&b[0]), rig.read(&c)), (vec![4.0], vec![5.0]));
    }
    drop(x);
    rig.finish();
}

fn a_stale_clone_and_its_drop_are_harmless<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    for _ in 0..4 {
        let old = rig.one(&f, &rig.trees.step(), &x);
        let step = rig.trees.step();
        let new = rig.one(&f, &step, &x);
        let blocks = rig.blocks();
        let clones = vec![old.clone(); 10];
        drop(old);
        drop(clones);
        assert_eq!((rig.blocks(), rig.trees.path_live()), (blocks, 1));
        assert_eq!(rig.read(&new), [2.0]);
        rig.trees.audit().unwrap();
    }
    drop(x);
    rig.finish();
}
