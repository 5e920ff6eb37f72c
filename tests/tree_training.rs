//! Training and partitions over the tree: forward and backward functions, pieces between what the host does. Names carry the rows of the tables.
//!
//! There is no autograd here: a backward is a function that takes what the forward saved.

mod common;

use std::sync::{Arc, Mutex};

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::pool::PoolConfig;
use cudagraph_trees::{
    Allocator, Function, FunctionSpec, Generator, GraphTrees, InputView, Mismatch, NodeId, Phase,
    PoolOptions, Reason, Tensor, give, lend,
};

suite!(
    static_23_one_segment_of_a_size_that_was_asked_for,
    static_25_limits_of_forward_and_backward,
    static_35_guarded_and_unguarded_addresses,
    tree_20_a_backward_that_is_never_captured,
    tree_21_a_backward_that_is_not_called,
    tree_22_saved_tensors_die_in_the_backward,
    tree_23_the_same_in_a_second_tree,
    tree_27_shapes_that_change_in_both,
    tree_33_random_numbers_as_eagerly,
    tree_35_a_function_that_only_views,
    tree_41_inputs_that_are_copied_and_not,
    tree_44_small_functions,
    part_01_a_host_operation_in_the_middle,
    part_04_each_piece_is_recorded_once,
    part_07_buffers_reused_across_pieces,
);

use Phase::{Eager, Record, Replay, Warmup};

/// Adaptation: a pool grown beforehand is one whose large segments are that large.
fn static_23_one_segment_of_a_size_that_was_asked_for<D: Device>(rig: Rig<D>) {
    const MIB: u64 = 1 << 20;
    let config = PoolConfig {
        large_segment: 40 * MIB,
        ..PoolConfig::default()
    };
    let options = PoolOptions {
        config,
        ..PoolOptions::default()
    };
    let allocator = Allocator::new(rig.device.clone()).unwrap();
    let trees = GraphTrees::with_pool(&allocator, options).unwrap();
    let kernels = rig.kernels.clone();
    let f = trees
        .register(FunctionSpec::new("f"), move |rec, inputs| {
            let x = inputs.get(0)?;
            let out = rec.alloc(x.bytes())?;
            let (to, from) = (out.ptr()?, x.ptr()?);
            kernels.scale_add(rec.device(), rec.stream(), to, from, 4, 2.0, 0.0)?;
            Ok(vec![out])
        })
        .unwrap();
    let x = allocator.alloc(&rig.stream, 8 * MIB).unwrap();
    rig.put(&x.view(0, 16).unwrap(), &[1.0; 4]);
    for phase in [Warmup, Record, Replay] {
        let step = trees.step();
        let run = trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
        let out = run.unwrap();
        assert_eq!(out.phase(), phase);
        assert_eq!(rig.read(&out[0].view(0, 16).unwrap()), [2.0; 4]);
        let snapshot = trees.pool_snapshot();
        let large: Vec<_> = snapshot
            .segments
            .iter()
            .map(|s| s.bytes)
            .filter(|bytes| *bytes > 2 * MIB)
            .collect();
        assert_eq!(large, [41_943_040]);
    }
    drop((f, x, trees, allocator));
    rig.finish();
}

fn static_25_limits_of_forward_and_backward<D: Device>(rig: Rig<D>) {
    let said = Arc::new(Mutex::new(Vec::new()));
    let hears = said.clone();
    rig.trees
        .on_advice(move |advice| hears.lock().unwrap().push(advice.function.clone()));
    let limited = |name: &str, scale: f32| {
        let spec = FunctionSpec::new(name).max_recordings(2);
        rig.register(spec, move |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, scale, 0.0)?])
        })
    };
    let (forward, backward) = (limited("forward", 2.0), limited("backward", 3.0));
    let run = |n: usize, with_backward: bool| {
        let x = rig.floats(&vec![n as f32; n]);
        let step = rig.trees.step();
        let key = [n as i64];
        let y = rig.call(&forward, &step, &key, &mut [lend(&x)]);
        assert_eq!(rig.read(&y[0]), vec![2.0 * n as f32; n]);
        if with_backward {
            let g = rig.call(&backward, &step, &key, &mut [lend(&y[0])]);
            assert_eq!(rig.read(&g[0]), vec![6.0 * n as f32; n]);
        }
        (step, y)
    };
    let (a, b, c) = (3, 5, 7);
    for _ in 0..3 {
        drop(run(a, false));
    }
    for n in [b, c] {
        for _ in 0..3 {
            drop(run(n, true));
        }
    }
    assert_eq!(rig.trees.counts().recordings, 4);
    let mut previous = None;
    for _ in 0..5 {
        let now = run(a, true);
        if let Some((_step, y)) = previous.replace(now) {
            assert_eq!(rig.read(&y[0]), vec![6.0; a]);
        }
    }
    let counts = rig.trees.counts();
    let [of_forward, of_backward] = [&forward, &backward].map(|f| rig.trees.report(f).unwrap());
    assert_eq!((of_forward.recordings, of_backward.recordings), (2, 2));
    assert_eq!(counts.recordings, 4, "{counts:?}");
    assert_eq!(*said.lock().unwrap(), ["forward", "backward"]);
    drop(previous);
    rig.finish();
}

/// Adaptation: a guard is a key that says which tensor it is. Each key is compiled: it warms up. Without, another address is recorded only.
fn static_35_guarded_and_unguarded_addresses<D: Device>(rig: Rig<D>) {
    for guarded in [true, false] {
        let spec = FunctionSpec::new("f").static_input(0);
        let (f, runs) = rig.counted(spec, |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
        });
        let warmups = rig.trees.counts().warmups;
        let mut kept = Vec::new();
        for value in [1.0, 2.0] {
            let input = rig.floats(&[value]);
            let key: &[i64] = if guarded { &[value as i64] } else { &[] };
            for _ in 0..3 {
                let out = rig.call(&f, &rig.trees.step(), key, &mut [lend(&input)]);
                assert_eq!(rig.read(&out[0]), [2.0 * value]);
            }
            // So the second lies elsewhere.
            kept.push(input);
        }
        let compiled = rig.trees.counts().warmups - warmups;
        assert_eq!(compiled, if guarded { 2 } else { 1 });
        assert_eq!(rig.trees.report(&f).unwrap().recordings, 2);
        let runs = runs.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(runs, compiled as usize + 2);
    }
    rig.finish();
}

fn tree_20_a_backward_that_is_never_captured<D: Device>(rig: Rig<D>) {
    let forward = rig.scale_add("forward", 2.0, 0.0);
    let spec = FunctionSpec::new("backward").capture_if(|_| false);
    let backward = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 3.0, 0.0)?])
    });
    for (round, phase) in [Warmup, Record, Replay].into_iter().enumerate() {
        let x = rig.floats(&[round as f32]);
        let step = rig.trees.step();
        let (p, y) = rig.phased(&forward, &step, &x);
        let (q, g) = rig.phased(&backward, &step, &y);
        assert_eq!((p, q), (phase, Eager));
        assert_eq!(rig.read(&g), [6.0 * round as f32]);
    }
    assert_eq!(rig.trees.counts().recordings, 1);
    assert_eq!(rig.trees.path_live(), 0, "nothing is pending");
    rig.finish();
}

fn tree_21_a_backward_that_is_not_called<D: Device>(rig: Rig<D>) {
    let forwards = ["f1", "f2"].map(|name| rig.scale_add(name, 2.0, 0.0));
    let backwards = ["b1", "b2"].map(|name| rig.scale_add(name, 3.0, 0.0));
    for (round, phase) in [Warmup, Record, Replay].into_iter().enumerate() {
        let inputs = [rig.floats(&[round as f32]), rig.floats(&[-1.0])];
        let step = rig.trees.step();
        let y = [0, 1].map(|i| rig.one(&forwards[i], &step, &inputs[i]));
        let (p, g) = rig.phased(&backwards[0], &step, &y[0]);
        assert_eq!((p, rig.read(&g)), (phase, vec![6.0 * round as f32]));
        assert_eq!(rig.read(&y[1]), [-2.0]);
    }
    assert_eq!(rig.trees.counts().recordings, 3);
    assert_eq!(rig.trees.report(&backwards[1]).unwrap().recordings, 0);
    assert_eq!(rig.trees.path_live(), 0);
    rig.finish();
}

/// out = x * 2, and two tensors saved for the backward, whose gradient is their sum.
fn saving<D: Device>(rig: &Rig<D>) -> [Function; 2] {
    let forward = rig.register(
        FunctionSpec::new("forward").skip_warmup(),
        |k, rec, inputs| {
            let x = inputs.get(0)?;
            let all = [(2.0, 0.0), (1.0, 10.0), (1.0, 20.0)];
            let apply = |(scale, add)| k.apply(rec, x, scale, add);
            Ok(all.map(apply).into_iter().collect::<Result<_, _>>()?)
        },
    );
    let backward = rig.register(
        FunctionSpec::new("backward").skip_warmup(),
        |k, rec, mut inputs| {
            let (s1, s2) = (inputs.take(0)?, inputs.take(1)?);
            let g = k.sum(rec, &s1, &s2)?;
            Ok(vec![g])
        },
    );
    [forward, backward]
}

/// Steps of both: nodes, and values.
fn saved_steps<D: Device>(rig: &Rig<D>, [f, b]: &[Function; 2]) {
    for (round, phase) in [Record, Replay, Replay].into_iter().enumerate() {
        let x = rig.floats(&[round as f32]);
        let step = rig.trees.step();
        let out: Vec<_> = rig.run(f, &step, &[&x]).into_iter().collect();
        let [out, s1, s2] = <[Tensor<D>; 3]>::try_from(out).unwrap();
        assert_eq!(rig.trees.path_live(), 3, "none is dead before the backward");
        let weak = [s1.downgrade(), s2.downgrade()];
        let g = rig.call(b, &step, &[], &mut [give(s1), give(s2)]);
        assert_eq!(g.phase(), phase);
        // Both saved tensors died of it; the user's output is there.
        assert!(weak.iter().all(|w| w.upgrade().is_none()));
        assert_eq!(rig.trees.path_live(), 2);
        let value = round as f32;
        assert_eq!(
            (rig.read(&out), rig.read(&g[0])),
            (vec![2.0 * value], vec![2.0 * value + 30.0])
        );
    }
    assert_eq!(rig.trees.descendants(), [1]);
}

fn tree_22_saved_tensors_die_in_the_backward<D: Device>(rig: Rig<D>) {
    let functions = saving(&rig);
    saved_steps(&rig, &functions);
    assert_eq!(rig.trees.counts().recordings, 2);
    // Held besides, they are not to be taken: another recording.
    let x = rig.floats(&[1.0]);
    let step = rig.trees.step();
    let out: Vec<_> = rig.run(&functions[0], &step, &[&x]).into_iter().collect();
    let mut args = [give(out[1].clone()), give(out[2].clone())];
    let g = rig.call(&functions[1], &step, &[], &mut args);
    assert_eq!(g.reason(), Some(Reason::Changed(Mismatch::NotGivenUp)));
    assert_eq!(
        (rig.read(&g[0]), rig.read(&out[1])),
        (vec![32.0], vec![11.0])
    );
    drop((x, out, g, step));
    rig.finish();
}

fn tree_23_the_same_in_a_second_tree<D: Device>(mut rig: Rig<D>) {
    // Adaptation: compiled code that is loaded again is registered again.
    for _ in 0..2 {
        let functions = saving(&rig);
        saved_steps(&rig, &functions);
        rig.trees.shutdown().unwrap();
        drop(functions);
        rig.trees = GraphTrees::new(&rig.allocator).unwrap();
    }
    rig.finish();
}

/// Adaptation: what the function returns besides tensors is known of its key.
fn tree_27_shapes_that_change_in_both<D: Device>(rig: Rig<D>) {
    let forward = rig.register(FunctionSpec::new("forward"), |k, rec, inputs| {
        let (x, y) = (inputs.get(0)?, inputs.get(1)?);
        let cat = rec.alloc(x.bytes() + y.bytes())?;
        for (part, offset) in [(x, 0), (y, x.bytes())] {
            let to = cat.ptr()?.offset(offset);
            let n = part.bytes() / 4;
            k.kernels
                .copy(rec.device(), rec.stream(), to, part.ptr()?, n)?;
        }
        Ok(vec![k.product(rec, &cat, &cat)?, cat])
    });
    let backward = rig.register(FunctionSpec::new("backward"), |k, rec, mut inputs| {
        let cat = inputs.take(0)?;
        Ok(vec![k.apply(rec, &cat, 2.0, 0.0)?])
    });
    for (rows, columns) in [(2, 4), (3, 6)] {
        for phase in [Warmup, Record, Replay, Replay] {
            let n = rows * columns;
            let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let (x, y) = (rig.floats(&values), rig.floats(&values[..columns]));
            let key = [rows as i64, columns as i64];
            let step = rig.trees.step();
            let out = rig.call(&forward, &step, &key, &mut [lend(&x), lend(&y)]);
            let mut out = out.into_iter();
            let (squares, cat) = (out.next().unwrap(), out.next().unwrap());
            let g = rig.call(&backward, &step, &key, &mut [give(cat)]);
            assert_eq!(g.phase(), phase);
            let all: Vec<f32> = values.iter().chain(&values[..columns]).copied().collect();
            assert_eq!(squares.bytes() as usize, 4 * (n + columns));
            assert_eq!(
                rig.read(&squares),
                all.iter().map(|v| v * v).collect::<Vec<_>>()
            );
            assert_eq!(
                rig.read(&g[0]),
                all.iter().map(|v| 2.0 * v).collect::<Vec<_>>()
            );
        }
    }
    assert_eq!(rig.trees.counts().recordings, 4);
    rig.finish();
}

fn tree_33_random_numbers_as_eagerly<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 0).unwrap();
    let draws = generator.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let noise = rec.alloc(40)?;
        draws.uniform(rec.stream(), noise.ptr()?, 10)?;
        Ok(vec![k.sum(rec, &noise, inputs.get(0)?)?])
    });
    let x = rig.floats(&[1.0; 10]);
    generator.seed(&rig.stream, 7).unwrap();
    let eager: Vec<Vec<f32>> = (0..4)
        .map(|_| {
            let t = rig.floats(&[0.0; 10]);
            generator
                .uniform(&rig.stream, t.ptr().unwrap(), 10)
                .unwrap();
            rig.read(&t).iter().map(|v| v + 1.0).collect()
        })
        .collect();
    generator.seed(&rig.stream, 7).unwrap();
    for values in &eager {
        let out = rig.one(&f, &rig.trees.step(), &x);
        assert_eq!(rig.read(&out), *values);
    }
    assert_eq!(rig.trees.counts().eager, 0);
    drop((f, generator, x));
    rig.finish();
}

fn tree_35_a_function_that_only_views<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |_, _, mut inputs| {
        let x = inputs.take(0)?;
        Ok(vec![x.view(4, 4)?])
    });
    for (round, phase) in [Warmup, Record, Replay].into_iter().enumerate() {
        let x = rig.floats(&[0.0, round as f32]);
        let (p, out) = rig.phased(&f, &rig.trees.step(), &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![round as f32]));
    }
    let view = rig.trees.view();
    assert_eq!(view.nodes[0].inputs, [InputView::Copied { bytes: 8 }]);
    assert_eq!(view.nodes[0].graph_nodes, 1, "the copy");
    rig.finish();
}

fn tree_41_inputs_that_are_copied_and_not<D: Device>(rig: Rig<D>) {
    let backward = rig.register(
        FunctionSpec::new("backward").static_input(1),
        |k, rec, inputs| {
            let sum = k.sum(rec, inputs.get(0)?, inputs.get(1)?)?;
            Ok(vec![k.sum(rec, &sum, inputs.get(2)?)?])
        },
    );
    let param = rig.floats(&[100.0]);
    for round in 0..5 {
        let (x, y) = (rig.floats(&[round as f32]), rig.floats(&[10.0]));
        let out = rig.run(&backward, &rig.trees.step(), &[&x, &param, &y]);
        assert_eq!(rig.read(&out[0]), [round as f32 + 110.0]);
        let view = rig.trees.view();
        let inputs = view.nodes.iter().flat_map(|n| &n.inputs);
        let copied = inputs
            .filter(|i| matches!(i, InputView::Copied { .. }))
            .count();
        assert_eq!(copied, if round == 0 { 0 } else { 2 });
    }
    drop(param);
    rig.finish();
}

/// Adaptation: what goes to the host and comes from it is outside of the functions; a tensor that is resized is another one.
fn tree_44_small_functions<D: Device>(rig: Rig<D>) {
    let constant = rig.floats(&[0.0]);
    let own = constant.clone();
    let mutates_constant = rig.register(FunctionSpec::new("constant"), move |k, rec, _| {
        k.kernels
            .increment(rec.device(), rec.stream(), own.ptr()?, 1, 1.0)?;
        Ok(vec![k.apply(rec, &own, 1.0, 0.0)?])
    });
    let factory = rig.register(FunctionSpec::new("factory"), |k, rec, _| {
        let small = rec.alloc(8)?;
        drop(small);
        let resized = rec.alloc(80)?;
        k.kernels
            .fill(rec.device(), rec.stream(), resized.ptr()?, 20, 2.0)?;
        Ok(vec![resized])
    });
    let dead_fill = rig.register(FunctionSpec::new("dead fill"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        let none = x.view(0, 0)?;
        k.kernels
            .fill(rec.device(), rec.stream(), x.ptr()?, 0, 9.0)?;
        Ok(vec![none, k.apply(rec, x, 1.0, 0.0)?])
    });
    for (round, phase) in [Warmup, Record, Replay, Replay, Replay]
        .into_iter()
        .enumerate()
    {
        // To the device and back.
        let x = rig.floats(&[round as f32]);
        let step = rig.trees.step();
        let out = rig.run(&mutates_constant, &step, &[]);
        assert_eq!(
            (out.phase(), rig.read(&out[0])),
            (phase, vec![round as f32 + 1.0])
        );
        let out = rig.run(&factory, &step, &[]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![2.0; 20]));
        let out = rig.run(&dead_fill, &step, &[&x]);
        assert_eq!((out.phase(), out[0].bytes()), (phase, 0));
        assert_eq!(rig.read(&out[1]), [round as f32]);
    }
    drop((mutates_constant, constant));
    rig.finish();
}

fn part_01_a_host_operation_in_the_middle<D: Device>(rig: Rig<D>) {
    for live_between in [true, false] {
        let (first, second) = (
            rig.scale_add("first", 2.0, 0.0),
            rig.scale_add("second", 1.0, 1.0),
        );
        let before = rig.trees.counts().recordings;
        for round in 0..5 {
            let x = rig.floats(&[round as f32]);
            let step = rig.trees.step();
            let y = rig.one(&first, &step, &x);
            let held = live_between.then(|| y.clone());
            let host = rig.read(&y)[0] * 10.0;
            drop(y);
            let z = rig.one(&second, &step, &rig.floats(&[host]));
            assert_eq!(rig.read(&z), [20.0 * round as f32 + 1.0]);
            drop(held);
        }
        assert_eq!(rig.trees.counts().recordings - before, 2);
        let shape: &[usize] = if live_between { &[1] } else { &[0, 0] };
        assert_eq!(rig.trees.descendants(), shape);
    }
    rig.finish();
}

fn part_04_each_piece_is_recorded_once<D: Device>(rig: Rig<D>) {
    let piece = rig.scale_add("piece 0", 2.0, 0.0);
    let x = rig.floats(&[1.0]);
    let mut recorded = Vec::new();
    for _ in 0..4 {
        let out = rig.run(&piece, &rig.trees.step(), &[&x]);
        if out.phase() == Record {
            recorded.push((out.node(), out.reason()));
        }
    }
    assert_eq!(recorded, [(Some(NodeId(0)), Some(Reason::FirstRecording))]);
    drop(x);
    rig.finish();
}

fn part_07_buffers_reused_across_pieces<D: Device>(rig: Rig<D>) {
    // The first piece's buffer is given to the second, past what cannot be captured, and freed late or at once.
    let first = rig.register(FunctionSpec::new("first"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![k.apply(rec, x, 2.0, 0.0)?, k.apply(rec, x, 3.0, 0.0)?])
    });
    let spec = FunctionSpec::new("unsafe").capture_if(|_| false);
    let unsafe_op = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 100.0)?])
    });
    let second = rig.register(FunctionSpec::new("second"), |k, rec, mut inputs| {
        let (a, b, c) = (inputs.take(0)?, inputs.take(1)?, inputs.take(2)?);
        let sum = k.sum(rec, &a, &b)?;
        drop((a, b));
        // In their memory.
        let again = k.apply(rec, &sum, 2.0, 0.0)?;
        Ok(vec![k.sum(rec, &again, &c)?])
    });
    for late in [false, true] {
        for round in 0..5 {
            let value = round as f32;
            let x = rig.floats(&[value; 128]);
            let step = rig.trees.step();
            let made: Vec<_> = rig.run(&first, &step, &[&x]).into_iter().collect();
            let host = rig.run(&unsafe_op, &step, &[&made[0]]);
            let kept = late.then(|| made.clone());
            let mut made = made.into_iter();
            let mut args = [
                give(made.next().unwrap()),
                give(made.next().unwrap()),
                lend(&host[0]),
            ];
            let out = rig.call(&second, &step, &[], &mut args);
            drop(args);
            assert_eq!(rig.read(&out[0]), [10.0 * value + 2.0 * value + 100.0; 128]);
            for (kept, by) in kept.iter().flatten().zip([2.0, 3.0]) {
                assert_eq!(rig.read(kept), [by * value; 128]);
            }
        }
    }
    rig.finish();
}
