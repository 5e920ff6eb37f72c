//! Recordings that go: their function is dropped or invalidated, or a static input dies. What is held of them stays, what was below them goes along,
//! and the program runs on. Names carry the rows of the tables.

mod common;

use std::sync::Arc;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{
    Error, Function, FunctionSpec, GraphTrees, NodeId, Phase, Reason, Tensor, give, lend,
};

suite!(
    a_dropped_function_takes_everything_along,
    a_clone_keeps_the_function,
    outputs_that_are_held_stay,
    what_was_below_goes_along,
    runs_of_the_path_that_is_removed,
    held_by_generations_that_are_open,
    held_and_the_tree_goes,
    the_step_ends_after_the_removal,
    invalidated_it_warms_up_anew,
    used_on_another_stream_when_it_is_removed,
    order_of_registration,
    static_32_nothing_holds_a_static_input,
    a_static_input_that_dies_takes_its_recordings_along,
    another_tensor_at_the_same_address,
    a_bound_input_that_dies_takes_the_recordings_along,
);

use Phase::{Record, Replay, Warmup};

fn function<D: Device>(rig: &Rig<D>, name: &str, scale: f32, add: f32) -> Function {
    rig.register(
        FunctionSpec::new(name).skip_warmup(),
        move |k, rec, inputs| Ok(vec![k.apply(rec, inputs.get(0)?, scale, add)?]),
    )
}

/// Bytes that the tree's pool has, once what it need not keep was given back.
fn kept<D: Device>(rig: &Rig<D>) -> u64 {
    rig.allocator.trim().unwrap();
    rig.trees.pool_stats().reserved_bytes.current
}

fn a_dropped_function_takes_everything_along<D: Device>(rig: Rig<D>) {
    let owned = Arc::new(());
    let own = owned.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let _ = &own;
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Replay] {
        let (p, out) = rig.phased(&f, &rig.trees.step(), &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![2.0]));
    }
    assert_eq!((rig.nodes().as_str(), kept(&rig)), ("f", 2 << 20));
    drop(f);
    let view = rig.trees.view();
    assert_eq!(
        (view.functions.len(), view.nodes.len(), view.roots.len()),
        (0, 0, 0)
    );
    assert_eq!(Arc::strong_count(&owned), 1, "the closure is gone");
    assert_eq!(kept(&rig), 0);
    assert_eq!(rig.trees.counts().removed, 1);
    drop(x);
    rig.finish();
}

fn a_clone_keeps_the_function<D: Device>(rig: Rig<D>) {
    let f = function(&rig, "f", 2.0, 0.0);
    let clone = f.clone();
    let x = rig.floats(&[1.0]);
    drop(rig.one(&f, &rig.trees.step(), &x));
    drop(f);
    assert_eq!(rig.phased(&clone, &rig.trees.step(), &x).0, Replay);
    drop(clone);
    assert_eq!(rig.nodes(), "");
    drop(x);
    rig.finish();
}

fn outputs_that_are_held_stay<D: Device>(rig: Rig<D>) {
    for runs in 1..=3 {
        let f = rig.scale_add("f", 2.0, 0.0);
        let x = rig.floats(&[1.0, 5.0]);
        for _ in 1..runs {
            drop(rig.one(&f, &rig.trees.step(), &x));
        }
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&f, &step, &x);
        assert_eq!(phase, [Warmup, Record, Replay][runs - 1]);
        let view = out.view(4, 4).unwrap();
        drop(f);
        assert_eq!((rig.nodes().as_str(), rig.blocks()), ("", 1), "{runs}");
        rig.trees.audit().unwrap();
        assert_eq!(
            (rig.read(&out), rig.read(&view)),
            (vec![2.0, 10.0], vec![10.0])
        );
        assert_eq!(kept(&rig), 2 << 20);
        // Others run beside it.
        let g = function(&rig, "g", 3.0, 0.0);
        for phase in [Record, Replay] {
            let (p, other) = rig.phased(&g, &rig.trees.step(), &x);
            assert_eq!((p, rig.read(&other)), (phase, vec![3.0, 15.0]));
            assert_eq!(rig.read(&out), [2.0, 10.0]);
        }
        drop((g, out));
        assert_eq!((rig.read(&view), kept(&rig)), (vec![10.0], 2 << 20));
        drop(view);
        assert_eq!((rig.blocks(), kept(&rig)), (0, 0), "with the last handle");
        drop((step, x));
    }
    rig.finish();
}

fn what_was_below_goes_along<D: Device>(rig: Rig<D>) {
    let [a, b, c] = ["a", "b", "c"].map(|name| function(&rig, name, 2.0, 1.0));
    let x = rig.floats(&[1.0]);
    let chain = |functions: &[&Function]| {
        let step = rig.trees.step();
        let (mut held, mut phases) = (vec![x.clone()], Vec::new());
        for f in functions {
            let (phase, out) = rig.phased(f, &step, held.last().unwrap());
            let value = rig.read(held.last().unwrap())[0];
            assert_eq!(rig.read(&out), [value * 2.0 + 1.0]);
            phases.push(phase);
            held.push(out);
        }
        phases
    };
    assert_eq!(chain(&[&a, &b, &c, &c]), [Record; 4]);
    assert_eq!(chain(&[&a, &c]), [Replay, Record]);
    assert_eq!(chain(&[&c]), [Record]);
    assert_eq!(rig.trees.descendants(), [4, 0]);
    drop(b);
    assert_eq!(rig.nodes(), "a c c");
    assert_eq!(rig.trees.descendants(), [1, 0]);
    assert_eq!(rig.trees.report(&c).unwrap().recordings, 2);
    assert_eq!(chain(&[&a, &c, &c]), [Replay, Replay, Record]);
    assert_eq!(chain(&[&a, &c, &c]), [Replay; 3]);
    rig.trees.audit().unwrap();
    drop(a);
    assert_eq!(rig.nodes(), "c");
    assert_eq!(chain(&[&c]), [Replay]);
    drop(x);
    rig.finish();
}

fn runs_of_the_path_that_is_removed<D: Device>(rig: Rig<D>) {
    for removed in 0..3 {
        let mut functions = ["f", "g", "h"].map(|name| Some(function(&rig, name, 2.0, 1.0)));
        let x = rig.floats(&[1.0]);
        let run = |f: &Option<Function>, step: &_, x: &Tensor<D>| {
            rig.phased(f.as_ref().unwrap(), step, x)
        };
        for _ in 0..2 {
            let step = rig.trees.step();
            let y = run(&functions[0], &step, &x).1;
            drop(run(&functions[1], &step, &y));
        }
        // f and g are replayed and held when one of them goes, or h that was not run.
        let step = rig.trees.step();
        let (p, y) = run(&functions[0], &step, &x);
        let (q, z) = run(&functions[1], &step, &y);
        assert_eq!((p, q), (Replay, Replay));
        functions[removed] = None;
        // What has no node any more is as a warmup.
        assert_eq!(path(&rig), ["f* g*", "f g*", "f g"][removed]);
        assert_eq!((rig.read(&y), rig.read(&z)), (vec![3.0], vec![7.0]));
        if removed < 2 {
            assert_eq!(rig.blocks(), 2);
            rig.trees.audit().unwrap();
            // Only warmups follow in this step.
            let out = rig.run(functions[2].as_ref().unwrap(), &step, &[&z]);
            assert_eq!(out.reason(), Some(Reason::BelowWarmup));
            assert_eq!(rig.read(&out[0]), [15.0]);
        } else {
            functions[2] = Some(function(&rig, "h", 2.0, 1.0));
            assert_eq!(run(&functions[2], &step, &z).0, Record);
        }
        assert_eq!((rig.read(&y), rig.read(&z)), (vec![3.0], vec![7.0]));
        drop((y, z, step));
        // In the next everything is as if they had never been.
        for phase in [Record, Replay] {
            let step = rig.trees.step();
            let mut value = x.clone();
            for f in functions.iter().flatten() {
                let (p, out) = rig.phased(f, &step, &value);
                assert!(p == phase || p == Replay, "{removed} {p:?}");
                assert_eq!(rig.read(&out)[0], rig.read(&value)[0] * 2.0 + 1.0);
                value = out;
            }
        }
        drop((functions, x));
        assert_eq!(kept(&rig), 0);
    }
    rig.finish();
}

/// The functions of the path, with a star where there is no node.
fn path<D: Device>(rig: &Rig<D>) -> String {
    let view = rig.trees.view();
    let run = |run: &Result<NodeId, String>| match run {
        Ok(id) => view
            .nodes
            .iter()
            .find(|n| n.id == *id)
            .unwrap()
            .function
            .clone(),
        Err(name) => format!("{name}*"),
    };
    view.path.iter().map(run).collect::<Vec<_>>().join(" ")
}

fn held_by_generations_that_are_open<D: Device>(rig: Rig<D>) {
    let f = function(&rig, "f", 2.0, 1.0);
    let (g, h) = (function(&rig, "g", 3.0, 0.0), function(&rig, "h", 1.0, 5.0));
    let x = rig.floats(&[1.0; 8]);
    let turn = |expected: Option<Phase>| {
        let step = rig.trees.step();
        let (p, y) = rig.phased(&g, &step, &x);
        let (q, z) = rig.phased(&h, &step, &y);
        assert_eq!((rig.read(&y), rig.read(&z)), (vec![3.0; 8], vec![8.0; 8]));
        if let Some(phase) = expected {
            assert_eq!((p, q), (phase, phase));
        }
    };
    turn(Some(Record));
    drop(rig.one(&f, &rig.trees.step(), &x));
    // Two steps of f are open, and held; one was replayed, one is carried along.
    let steps = [rig.trees.step(), rig.trees.step()];
    let held = [0, 1].map(|i| rig.one(&f, &steps[i], &x));
    let values = |held: &[Tensor<D>]| {
        for out in held {
            assert_eq!(rig.read(out), [3.0; 8]);
        }
    };
    turn(None);
    values(&held);
    drop(f);
    values(&held);
    rig.trees.audit().unwrap();
    for _ in 0..4 {
        turn(None);
        values(&held);
        rig.trees.audit().unwrap();
    }
    turn(Some(Replay));
    let [first, second] = held;
    drop(first);
    turn(None);
    values(std::slice::from_ref(&second));
    // One step ends while its output is held: from the next run on it is stale.
    drop(steps);
    turn(None);
    assert!(matches!(rig.try_read(&second), Err(Error::Stale(_))));
    turn(Some(Replay));
    drop((g, h));
    assert_eq!((rig.blocks(), kept(&rig)), (0, 0));
    drop((x, second));
    rig.finish();
}

fn held_and_the_tree_goes<D: Device>(rig: Rig<D>) {
    for shut_down in [false, true] {
        let trees = GraphTrees::new(&rig.allocator).unwrap();
        let kernels = rig.kernels.clone();
        let body = move |rec: &mut cudagraph_trees::Recorder<'_, D>,
                         inputs: cudagraph_trees::Inputs<D>| {
            let (x, out) = (inputs.get(0)?, rec.alloc(4)?);
            let (to, from) = (out.ptr()?, x.ptr()?);
            kernels.scale_add(rec.device(), rec.stream(), to, from, 1, 2.0, 0.0)?;
            Ok(vec![out])
        };
        let f = trees
            .register(FunctionSpec::new("f").skip_warmup(), body)
            .unwrap();
        let x = rig.floats(&[4.0]);
        let step = trees.step();
        let run = || trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
        let out = run().unwrap().only().unwrap();
        drop(f);
        if shut_down {
            trees.shutdown().unwrap();
        }
        drop((step, trees));
        assert_eq!(rig.read(&out), [8.0]);
        assert_eq!(rig.allocator.private_pools().len(), 2);
        drop(out);
        rig.allocator.trim().unwrap();
        assert_eq!(rig.allocator.private_pools().len(), 1);
        drop(x);
    }
    rig.finish();
}

fn the_step_ends_after_the_removal<D: Device>(rig: Rig<D>) {
    let f = function(&rig, "f", 2.0, 0.0);
    let g = function(&rig, "g", 3.0, 0.0);
    let x = rig.floats(&[1.0]);
    drop(rig.one(&g, &rig.trees.step(), &x));
    drop(rig.one(&f, &rig.trees.step(), &x));
    let step = rig.trees.step();
    let (phase, out) = rig.phased(&f, &step, &x);
    assert_eq!(phase, Replay);
    drop(step);
    drop(f);
    assert_eq!(rig.read(&out), [2.0], "no run has taken it");
    let (phase, other) = rig.phased(&g, &rig.trees.step(), &x);
    assert_eq!((phase, rig.read(&other)), (Replay, vec![3.0]));
    let Err(Error::Stale(stale)) = rig.try_read(&out) else {
        panic!("its step had ended")
    };
    let text = stale.to_string();
    assert!(text.starts_with("output 0 of f, handed out at "), "{text}");
    assert!(text.contains("by a subsequent run (g, at "), "{text}");
    drop((out, other, x));
    rig.finish();
}

fn invalidated_it_warms_up_anew<D: Device>(rig: Rig<D>) {
    let (f, runs) = rig.counted(FunctionSpec::new("f"), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let skips = function(&rig, "skips", 3.0, 0.0);
    let below = function(&rig, "below", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    for round in 0..3 {
        for phase in [Warmup, Record, Replay] {
            for key in [0, 1] {
                let step = rig.trees.step();
                let out = rig.call(&f, &step, &[key], &mut [lend(&x)]);
                assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![2.0]));
                let (p, out) = rig.phased(&below, &step, &out[0]);
                assert!(p == phase || (phase == Warmup && p == Warmup), "{p:?}");
                assert_eq!(rig.read(&out), [3.0]);
            }
        }
        assert_eq!(
            runs.load(std::sync::atomic::Ordering::Relaxed),
            4 * (round + 1)
        );
        assert_eq!(rig.nodes(), "f below f below");
        rig.trees.invalidate(&f).unwrap();
        assert_eq!(
            (rig.nodes().as_str(), rig.trees.counts().removed),
            ("", 4 * (round as u64 + 1))
        );
        assert_eq!(rig.trees.report(&f).unwrap().recordings, 0);
    }
    // Nothing to be removed is no error.
    rig.trees.invalidate(&f).unwrap();
    for _ in 0..2 {
        assert_eq!(rig.phased(&skips, &rig.trees.step(), &x).0, Record);
        rig.trees.invalidate(&skips).unwrap();
    }
    drop(x);
    rig.finish();
}

fn used_on_another_stream_when_it_is_removed<D: Device>(rig: Rig<D>) {
    let f = function(&rig, "f", 2.0, 0.0);
    let g = function(&rig, "g", 3.0, 0.0);
    let x = rig.floats(&[1.0; 64]);
    let other = rig.device.create_stream().unwrap();
    for by_name in [false, true] {
        for first in [&rig.stream, &other] {
            let run = |step: &_| {
                let (phase, y) = rig.phased(&f, step, &x);
                if by_name {
                    y.record_stream(&other).unwrap();
                } else {
                    let mut args = [lend(&y)];
                    let out = rig.trees.run(&g, step, &[], &other, &mut args).unwrap();
                    assert_eq!(out.phase(), phase);
                }
                (phase, y)
            };
            assert_eq!(run(&rig.trees.step()).0, Record);
            let step = rig.trees.step();
            let (phase, y) = run(&step);
            assert_eq!(phase, Replay);
            // Both streams read it, later than the host is.
            let copies = [rig.floats(&[0.0; 64]), rig.floats(&[0.0; 64])];
            rig.device.synchronize(&rig.stream).unwrap();
            rig.scale_into(&rig.stream, &copies[0], &y, 10.0, 0.0);
            rig.scale_into(&other, &copies[1], &y, 100.0, 0.0);
            rig.trees.invalidate(&f).unwrap();
            drop(y);
            // One of them may be through before the other has begun.
            rig.device.synchronize(first).unwrap();
            // What takes the memory comes after both.
            let z = rig.one(&g, &rig.trees.step(), &x);
            rig.device.synchronize(&other).unwrap();
            assert_eq!(rig.read(&copies[0]), [20.0; 64]);
            assert_eq!(rig.read(&copies[1]), [200.0; 64]);
            assert_eq!(rig.read(&z), [3.0; 64]);
        }
    }
    drop(x);
    rig.finish();
}

fn order_of_registration<D: Device>(rig: Rig<D>) {
    let [a, b, c] = ["a", "b", "c"].map(|name| function(&rig, name, 1.0, 0.0));
    let names = || {
        let view = rig.trees.view();
        let names: Vec<_> = view.functions.into_iter().map(|f| f.name).collect();
        names.join(" ")
    };
    drop(a);
    let d = function(&rig, "d", 1.0, 0.0);
    assert_eq!(names(), "b c d");
    drop(c);
    let e = function(&rig, "e", 1.0, 0.0);
    let f = function(&rig, "f", 1.0, 0.0);
    assert_eq!(names(), "b d e f");
    drop((b, d, e, f));
    assert_eq!(names(), "");
    rig.finish();
}

fn static_32_nothing_holds_a_static_input<D: Device>(rig: Rig<D>) {
    for bind in [false, true] {
        for runs in 0..4 {
            let param = rig.floats(&[2.0]);
            let x = rig.floats(&[3.0]);
            let spec = FunctionSpec::new("f");
            let spec = if bind {
                spec.bind(0, &param)
            } else {
                spec.static_input(0)
            };
            let f = rig.register(spec, |k, rec, inputs| {
                Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(1)?)?])
            });
            for _ in 0..runs {
                let step = rig.trees.step();
                let out = if bind {
                    rig.run(&f, &step, &[&x])
                } else {
                    rig.run(&f, &step, &[&param, &x])
                };
                assert_eq!(rig.read(&out[0]), [6.0]);
            }
            let weak = param.downgrade();
            let live = rig.allocator.stats().live_blocks.current;
            drop(param);
            assert!(weak.upgrade().is_none());
            assert_eq!(rig.allocator.stats().live_blocks.current, live - 1);
        }
    }
    rig.finish();
}

fn a_static_input_that_dies_takes_its_recordings_along<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").skip_warmup().static_input(0);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let below = function(&rig, "below", 1.0, 1.0);
    let x = rig.floats(&[3.0]);
    let (p1, p2) = (rig.floats(&[2.0]), rig.floats(&[5.0]));
    let view = p1.view(0, 4).unwrap();
    for param in [&view, &p2] {
        let step = rig.trees.step();
        let y = rig.run(&f, &step, &[param, &x]);
        drop(rig.one(&below, &step, &y[0]));
    }
    assert_eq!(rig.trees.descendants(), [1, 1]);
    drop(p1);
    drop(rig.run(&f, &rig.trees.step(), &[&p2, &x]));
    assert_eq!(rig.trees.descendants(), [1, 1], "a view holds it");
    // While an output of it is held.
    let step = rig.trees.step();
    let y = rig.run(&f, &step, &[&view, &x]);
    assert_eq!(y.phase(), Replay);
    drop(view);
    let next = rig.trees.step();
    let z = rig.run(&f, &next, &[&p2, &x]);
    // The recording for p2 would write over it; a third is beside it.
    assert_eq!(rig.nodes(), "f below f");
    assert_eq!((rig.read(&y[0]), rig.read(&z[0])), (vec![6.0], vec![15.0]));
    rig.trees.audit().unwrap();
    drop((y, z, step, next));
    // Given up, it dies with the run.
    let mut args = [give(p2), lend(&x)];
    let out = rig.call(&f, &rig.trees.step(), &[], &mut args);
    assert_eq!((out.phase(), rig.read(&out[0])), (Replay, vec![15.0]));
    drop(args);
    assert_eq!(rig.nodes(), "");
    drop((out, x));
    assert_eq!(kept(&rig), 0);
    rig.finish();
}

fn another_tensor_at_the_same_address<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").skip_warmup().static_input(0);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let mut at = None;
    for round in 0..4 {
        let param = rig.floats(&[round as f32]);
        let ptr = param.ptr().unwrap();
        assert_eq!(*at.get_or_insert(ptr), ptr);
        for phase in [Record, Replay] {
            let (p, out) = rig.phased(&f, &rig.trees.step(), &param);
            assert_eq!((p, rig.read(&out)), (phase, vec![2.0 * round as f32]));
        }
        assert_eq!(rig.nodes(), "f");
    }
    assert_eq!(rig.trees.counts().removed, 3);
    rig.finish();
}

fn a_bound_input_that_dies_takes_the_recordings_along<D: Device>(rig: Rig<D>) {
    let param = rig.floats(&[2.0]);
    let spec = FunctionSpec::new("f").skip_warmup().bind(0, &param);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let other = function(&rig, "other", 1.0, 0.0);
    let x = rig.floats(&[3.0]);
    let step = rig.trees.step();
    let y = rig.run(&f, &step, &[&x]);
    drop(param);
    let refused = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
    assert!(matches!(refused, Err(Error::StaticDied { input: 0, .. })));
    assert_eq!((rig.nodes().as_str(), rig.read(&y[0])), ("", vec![6.0]));
    drop((y, step));
    assert_eq!(rig.phased(&other, &rig.trees.step(), &x).0, Record);
    drop((f, other, x));
    assert_eq!(kept(&rig), 0);
    rig.finish();
}
