//! Runs on a stream that captures already: the function's work goes into the caller's graph, and the tree stays as it is.
//! (User report T4-15.)

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use common::Rig;
use cudagraph_trees::device::{CaptureMode, CaptureStatus, Code, Device};
use cudagraph_trees::{
    CaptureOptions, Counts, Error, FunctionSpec, Graph, GraphTrees, Outputs, Phase, Tensor, give,
    lend,
};

suite!(
    t4_15_the_callers_graph_recomputes,
    a_warm_tree_stays_as_it_is,
    every_mode,
    graphs_do_not_share_what_they_use,
    outputs_are_not_reused_however_they_are_held,
    a_chain_of_functions_in_one_capture,
    inputs_of_every_kind,
    errors_leave_the_capture_usable,
    a_broken_capture_is_an_error,
    captures_that_the_allocator_does_not_know,
    on_a_stream_that_forked_off,
    a_tree_within_a_recording_of_another,
    a_graph_outlives_the_tree,
    a_tree_that_was_shut_down,
);

/// out = (x * 2) + (x * 2) * (x * 2), with temporaries that die inside.
fn with_temporaries<D: Device>(rig: &Rig<D>, name: &str) -> cudagraph_trees::Function {
    rig.register(FunctionSpec::new(name), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let double = k.apply(rec, &x, 2.0, 0.0)?;
        let square = k.product(rec, &double, &double)?;
        let sum = k.sum(rec, &double, &square)?;
        drop((double, square));
        // Lies where a temporary was.
        let copy = k.apply(rec, &sum, 1.0, 0.0)?;
        drop(sum);
        Ok(vec![k.apply(rec, &copy, 1.0, 0.0)?])
    })
}

fn expected(x: f32) -> f32 {
    2.0 * x + 4.0 * x * x
}

/// One graph with one run in it.
fn graph_of<D: Device>(
    rig: &Rig<D>,
    f: &cudagraph_trees::Function,
    x: &Tensor<D>,
) -> (Graph<D>, Tensor<D>) {
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let step = rig.trees.step();
    let outputs = rig.run(f, &step, &[x]);
    assert_eq!((outputs.phase(), outputs.node()), (Phase::Inline, None));
    capture.end().unwrap();
    (graph, outputs.only().unwrap())
}

fn t4_15_the_callers_graph_recomputes<D: Device>(rig: Rig<D>) {
    let f = with_temporaries(&rig, "f");
    let x = rig.floats(&[1.0; 100]);
    let before = rig.trees.view();
    let (graph, y) = graph_of(&rig, &f, &x);
    assert_eq!(graph.info().unwrap().nodes(), 5);
    for value in [1.0, 2.0, -3.0] {
        rig.put(&x, &[value; 100]);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [expected(value); 100]);
    }
    assert_eq!(rig.trees.view(), before);
    let inlined = Counts {
        inlined: 1,
        ..Counts::default()
    };
    assert_eq!(rig.trees.counts(), inlined);
    assert_eq!(rig.blocks(), 0);
    // The function is not warm by it.
    let step = rig.trees.step();
    assert_eq!(rig.phased(&f, &step, &x).0, Phase::Warmup);
    drop((graph, y, x, step, f));
    rig.finish();
}

fn a_warm_tree_stays_as_it_is<D: Device>(rig: Rig<D>) {
    let (f, g) = (with_temporaries(&rig, "f"), rig.scale_add("g", 3.0, 1.0));
    let x = rig.floats(&[1.0; 8]);
    let walk = |step: &_| {
        let y = rig.one(&f, step, &x);
        let z = rig.one(&g, step, &y);
        (y, z)
    };
    let mut graphs = Vec::new();
    for round in 0..6 {
        rig.put(&x, &[1.0; 8]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let (view, counts) = (rig.trees.view(), rig.trees.counts());
        // In the middle of a path, of which an output is held and goes in.
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&rig.stream).unwrap();
        let inside = rig.one(&g, &step, &y);
        let again = rig.one(&f, &step, &inside);
        capture.end().unwrap();
        assert_eq!(rig.trees.view(), view, "round {round}");
        assert_eq!(rig.trees.counts().inlined, counts.inlined + 2);
        assert_eq!(rig.trees.counts().replays, counts.replays);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&inside), [19.0; 8]);
        assert_eq!(rig.read(&again), [expected(19.0); 8]);
        let z = rig.one(&g, &step, &y);
        assert_eq!(rig.read(&z), [19.0; 8]);
        rig.trees.audit().unwrap();
        drop((y, z));
        graphs.push((graph, inside, again));
    }
    let counts = rig.trees.counts();
    assert_eq!((counts.warmups, counts.recordings), (2, 2));
    // An ended step's outputs are stale only at the next run that is not inside a capture; this one touches nothing of the path.
    let step = rig.trees.step();
    let (y, z) = walk(&step);
    drop(step);
    let (graph, out) = graph_of(&rig, &f, &x);
    assert!(y.is_current() && z.is_current());
    let step = rig.trees.step();
    let after = walk(&step);
    assert!(!y.is_current() && !z.is_current());
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&out), rig.read(&after.0));
    assert!(matches!(rig.try_read(&z), Err(Error::Stale(_))));
    drop((graphs, graph, out, after, y, z, x, f, g, step));
    rig.finish();
}

fn every_mode<D: Device>(rig: Rig<D>) {
    let f = with_temporaries(&rig, "f");
    let x = rig.floats(&[2.0; 4]);
    for round in 0..3 {
        for mode in [
            CaptureMode::Global,
            CaptureMode::ThreadLocal,
            CaptureMode::Relaxed,
        ] {
            let mut graph = Graph::new(&rig.allocator);
            let options = CaptureOptions { pool: None, mode };
            let capture = graph.capture_with(&rig.stream, options).unwrap();
            let step = rig.trees.step();
            let y = rig.one(&f, &step, &x);
            capture.end().unwrap();
            graph.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&y), [expected(2.0); 4], "{mode:?}");
        }
        // Unwarmed, warmed up, recorded.
        let step = rig.trees.step();
        let (phase, y) = rig.phased(&f, &step, &x);
        assert_eq!(phase, [Phase::Warmup, Phase::Record, Phase::Replay][round]);
        assert_eq!(rig.read(&y), [expected(2.0); 4]);
    }
    drop((x, f));
    rig.finish();
}

fn graphs_do_not_share_what_they_use<D: Device>(rig: Rig<D>) {
    let f = with_temporaries(&rig, "f");
    let inputs: Vec<_> = (0..4).map(|i| rig.floats(&[i as f32; 1000])).collect();
    let graphs: Vec<_> = inputs.iter().map(|x| graph_of(&rig, &f, x)).collect();
    // In any order: no launch writes over what another has left.
    for order in [[0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 3, 0]] {
        for which in order {
            graphs[which].0.replay(&rig.stream).unwrap();
        }
        for which in order {
            assert_eq!(rig.read(&graphs[which].1), [expected(which as f32); 1000]);
        }
    }
    // And on several streams at once.
    rig.device.synchronize(&rig.stream).unwrap();
    let streams: Vec<_> = (0..4)
        .map(|_| rig.device.create_stream().unwrap())
        .collect();
    for ((graph, _), stream) in graphs.iter().zip(&streams) {
        graph.replay(stream).unwrap();
    }
    for stream in &streams {
        rig.device.synchronize(stream).unwrap();
    }
    for (which, (_, y)) in graphs.iter().enumerate() {
        assert_eq!(rig.read(y), [expected(which as f32); 1000]);
    }
    drop((graphs, inputs, f));
    rig.finish();
}

fn outputs_are_not_reused_however_they_are_held<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[1.0; 16]);
    let mut seen = Vec::new();
    let mut graphs = Vec::new();
    for _ in 0..8 {
        let (graph, y) = graph_of(&rig, &f, &x);
        let ptr = y.ptr().unwrap();
        assert!(!seen.contains(&ptr), "{ptr:?} of {seen:?}");
        seen.push(ptr);
        drop(y);
        graphs.push(graph);
    }
    // Nor by runs that are not in a capture.
    for _ in 0..3 {
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        assert!(!seen.contains(&y.ptr().unwrap()));
        assert!(!seen.contains(&rig.floats(&[0.0; 16]).ptr().unwrap()));
    }
    for graph in &graphs {
        graph.replay(&rig.stream).unwrap();
    }
    rig.device.synchronize(&rig.stream).unwrap();
    drop((graphs, x, f));
    rig.finish();
}

fn a_chain_of_functions_in_one_capture<D: Device>(rig: Rig<D>) {
    let f = with_temporaries(&rig, "f");
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let step = rig.trees.step();
    let own = rig.captured(&capture, &x, 0.5, 0.0);
    let mut y = rig.one(&f, &step, &own);
    for _ in 0..2 {
        // The one before is dropped: it is read at each launch all the same.
        y = rig.one(&f, &step, &y);
    }
    let after = rig.captured(&capture, &y, 1.0, 1.0);
    capture.end().unwrap();
    drop(own);
    for value in [0.25, 1.0, 0.5] {
        rig.put(&x, &[value; 4]);
        graph.replay(&rig.stream).unwrap();
        let want = expected(expected(expected(value / 2.0)));
        assert_eq!(rig.read(&y), [want; 4]);
        assert_eq!(rig.read(&after), [want + 1.0; 4]);
    }
    drop((graph, y, after, x, step, f));
    rig.finish();
}

fn inputs_of_every_kind<D: Device>(rig: Rig<D>) {
    let (weight, fixed) = (rig.floats(&[10.0; 4]), rig.floats(&[0.5; 4]));
    let spec = FunctionSpec::new("f")
        .bind(1, &weight)
        .bind_value(3, Arc::new(2.0f32))
        .static_input(2);
    let f = rig.register(spec, |k, rec, mut inputs| {
        let scale = *inputs.value::<f32>(3)?;
        let more = *inputs.value::<f32>(4)?;
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, scale, more)?;
        let z = k.sum(rec, &y, inputs.get(1)?)?;
        let out = k.sum(rec, &z, inputs.get(2)?)?;
        // An output of its own, a view of it, an input, a bound one, nothing.
        let (view, bound) = (out.view(8, 8)?, inputs.take(1)?);
        Ok(vec![out, view, x, bound, Tensor::empty()])
    });
    let x = rig.floats(&[1.0; 4]);
    let address = x.ptr().unwrap();
    let value = Arc::new(100.0f32);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let step = rig.trees.step();
    let kept = x.clone();
    let mut args = [give(x), lend(&fixed), cudagraph_trees::Arg::Value(value)];
    let mut out = Outputs::new();
    rig.trees
        .run_into(&f, &step, &[1, 2], &rig.stream, &mut args, &mut out)
        .unwrap();
    // Given up.
    assert!(matches!(args[0], cudagraph_trees::Arg::Taken));
    let taken = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
    assert!(matches!(taken, Err(Error::Inputs { .. })), "{taken:?}");
    let few = rig.trees.run(&f, &step, &[], &rig.stream, &mut []);
    assert!(matches!(few, Err(Error::Inputs { .. })), "{few:?}");
    capture.end().unwrap();
    assert_eq!(out[2].ptr().unwrap(), address);
    assert_eq!(out[3].storage_id(), weight.storage_id());
    assert!(out[4].is_empty());
    for value in [1.0, 3.0] {
        rig.put(&kept, &[value; 4]);
        rig.put(&weight, &[value * 10.0; 4]);
        graph.replay(&rig.stream).unwrap();
        let want = 2.0 * value + 100.0 + 10.0 * value + 0.5;
        assert_eq!(rig.read(&out[0]), [want; 4]);
        assert_eq!(rig.read(&out[1]), [want; 2]);
        assert_eq!(rig.read(&out[2]), [value; 4]);
    }
    // What was given stays, although nobody holds it: the graph reads it.
    drop((out, kept));
    let fresh = rig.floats(&[7.0; 4]);
    assert_ne!(fresh.ptr().unwrap(), address);
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&fresh), [7.0; 4]);
    // A bound tensor that died is an error, inside as outside.
    drop(weight);
    let mut second = Graph::new(&rig.allocator);
    let capture = second.capture(&rig.stream).unwrap();
    let died = rig.trees.run(
        &f,
        &step,
        &[],
        &rig.stream,
        &mut [lend(&fresh), lend(&fixed)],
    );
    assert!(matches!(died, Err(Error::StaticDied { input: 1, .. })));
    capture.end().unwrap();
    drop(args);
    drop((graph, second, fresh, fixed, step, f));
    rig.finish();
}

fn errors_leave_the_capture_usable<D: Device>(rig: Rig<D>) {
    let failing = rig.register(FunctionSpec::new("failing"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 2.0, 0.0)?;
        drop(k.apply(rec, &y, 2.0, 0.0)?);
        Err("no".into())
    });
    let panicking = rig.register(FunctionSpec::new("panicking"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let _y = k.apply(rec, &x, 2.0, 0.0)?;
        panic!("in here");
    });
    let f = rig.scale_add("f", 3.0, 0.0);
    let x = rig.floats(&[1.0; 4]);
    let step = rig.trees.step();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let mut args = [give(x.clone())];
    let error = rig.trees.run(&failing, &step, &[], &rig.stream, &mut args);
    let Err(Error::Function {
        phase: Phase::Inline,
        source,
        ..
    }) = error
    else {
        panic!("{error:?}")
    };
    assert_eq!(source.to_string(), "no");
    // Not given up.
    assert!(matches!(args[0], cudagraph_trees::Arg::Give(_)));
    let panic = catch_unwind(AssertUnwindSafe(|| {
        let _ = rig
            .trees
            .run(&panicking, &step, &[], &rig.stream, &mut [lend(&x)]);
    }));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"in here"));
    assert_eq!(
        rig.device.capture_status(&rig.stream),
        Ok(CaptureStatus::Active)
    );
    let y = rig.one(&f, &step, &x);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [3.0; 4]);
    assert_eq!(rig.trees.counts().inlined, 1);
    for phase in [Phase::Warmup, Phase::Record, Phase::Replay] {
        let step = rig.trees.step();
        let (ran, z) = rig.phased(&f, &step, &x);
        assert_eq!(ran, phase);
        assert_eq!(rig.read(&z), [3.0; 4]);
    }
    drop((args, graph, y, x, f, failing, panicking, step));
    rig.finish();
}

fn a_broken_capture_is_an_error<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 3.0, 0.0);
    let x = rig.floats(&[1.0; 4]);
    let step = rig.trees.step();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    // Breaks it.
    rig.device.synchronize(&rig.stream).unwrap_err();
    let error = rig
        .trees
        .run(&f, &step, &[], &rig.stream, &mut [lend(&x)])
        .unwrap_err();
    let Error::Device(error) = error else {
        panic!("{error}")
    };
    assert_eq!(error.code, Code::StreamCaptureInvalidated);
    capture.end().unwrap_err();
    assert_eq!(rig.trees.counts(), Counts::default());
    assert_eq!(rig.phased(&f, &step, &x).0, Phase::Warmup);
    drop((graph, x, f, step));
    rig.finish();
}

fn captures_that_the_allocator_does_not_know<D: Device>(rig: Rig<D>) {
    let f = with_temporaries(&rig, "f");
    let x = rig.floats(&[1.0; 4]);
    let (d, stream) = (&rig.device, &rig.stream);
    for round in 0..3 {
        let step = rig.trees.step();
        d.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
        let y = rig.one(&f, &step, &x);
        let z = rig.one(&f, &step, &y);
        let graph = d.end_capture(stream).unwrap();
        assert_eq!(d.graph_info(&graph).unwrap().nodes(), 10);
        let exec = d.instantiate(&graph).unwrap();
        for value in [1.0, 0.5] {
            rig.put(&x, &[value; 4]);
            d.launch_graph(&exec, stream, &[]).unwrap();
            assert_eq!(rig.read(&z), [expected(expected(value)); 4], "{round}");
        }
        drop(rig.one(&f, &step, &x));
    }
    drop((x, f));
    rig.finish();
}

fn on_a_stream_that_forked_off<D: Device>(rig: Rig<D>) {
    let f = with_temporaries(&rig, "f");
    let x = rig.floats(&[1.0; 4]);
    let d = &rig.device;
    let side = d.create_stream().unwrap();
    let (fork, join) = (d.create_event().unwrap(), d.create_event().unwrap());
    let step = rig.trees.step();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    d.record(&fork, &rig.stream).unwrap();
    d.wait(&side, &fork).unwrap();
    let there = rig
        .trees
        .run(&f, &step, &[], &side, &mut [lend(&x)])
        .unwrap();
    let here = rig.one(&f, &step, &x);
    d.record(&join, &side).unwrap();
    d.wait(&rig.stream, &join).unwrap();
    capture.end().unwrap();
    assert_eq!(graph.info().unwrap().kernels, 10);
    for value in [2.0, 3.0] {
        rig.put(&x, &[value; 4]);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&there[0]), [expected(value); 4]);
        assert_eq!(rig.read(&here), [expected(value); 4]);
    }
    // The stream is an ordinary one again.
    let outputs = rig
        .trees
        .run(&f, &step, &[], &side, &mut [lend(&x)])
        .unwrap();
    assert_eq!(outputs.phase(), Phase::Warmup);
    d.synchronize(&side).unwrap();
    drop((outputs, there, here, graph, x, f, step));
    rig.finish();
}

fn a_tree_within_a_recording_of_another<D: Device>(rig: Rig<D>) {
    let inner = GraphTrees::new(&rig.allocator).unwrap();
    let kernels = rig.kernels.clone();
    let g = inner
        .register(FunctionSpec::new("g"), move |rec, mut inputs| {
            let x = inputs.take(0)?;
            let out = rec.alloc(x.bytes())?;
            let (from, to) = (x.ptr()?, out.ptr()?);
            kernels.scale_add(
                rec.device(),
                rec.stream(),
                to,
                from,
                x.bytes() / 4,
                5.0,
                0.0,
            )?;
            Ok(vec![out])
        })
        .unwrap();
    let within = inner.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let step = within.step();
        let y = within.run(&g, &step, &[], rec.stream(), &mut [lend(&x)])?;
        // Copied while its step lives: in a warmup it is an output of the other tree.
        Ok(vec![k.apply(rec, &y[0], 1.0, 1.0)?])
    });
    let mut seen = Vec::new();
    for value in [1.0, 2.0, 3.0, 4.0] {
        let x = rig.floats(&[value; 4]);
        let step = rig.trees.step();
        let (phase, y) = rig.phased(&f, &step, &x);
        assert_eq!(rig.read(&y), [5.0 * value + 1.0; 4]);
        seen.push(phase);
        rig.trees.audit().unwrap();
        inner.audit().unwrap();
    }
    assert_eq!(
        seen,
        [Phase::Warmup, Phase::Record, Phase::Replay, Phase::Replay]
    );
    assert_eq!((inner.counts().warmups, inner.counts().inlined), (1, 1));
    drop((inner, f));
    rig.finish();
}

fn a_graph_outlives_the_tree<D: Device>(rig: Rig<D>) {
    let trees = GraphTrees::new(&rig.allocator).unwrap();
    let kernels = rig.kernels.clone();
    let f = trees
        .register(FunctionSpec::new("f"), move |rec, mut inputs| {
            let x = inputs.take(0)?;
            let mut y = x.clone();
            for _ in 0..3 {
                let next = rec.alloc(x.bytes())?;
                let (from, to) = (y.ptr()?, next.ptr()?);
                kernels.scale_add(
                    rec.device(),
                    rec.stream(),
                    to,
                    from,
                    x.bytes() / 4,
                    2.0,
                    0.0,
                )?;
                y = next;
            }
            Ok(vec![y])
        })
        .unwrap();
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let step = trees.step();
    let y = trees
        .run(&f, &step, &[], &rig.stream, &mut [lend(&x)])
        .unwrap()
        .only()
        .unwrap();
    capture.end().unwrap();
    rig.device.synchronize(&rig.stream).unwrap();
    drop((f, step, trees));
    rig.allocator.trim().unwrap();
    let eager: Vec<_> = (0..20).map(|i| rig.floats(&[i as f32; 4])).collect();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [8.0; 4]);
    for (i, tensor) in eager.iter().enumerate() {
        assert_eq!(rig.read(tensor), [i as f32; 4]);
    }
    drop((graph, y, eager, x));
    rig.finish();
}

fn a_tree_that_was_shut_down<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 3.0, 0.0);
    let x = rig.floats(&[1.0; 4]);
    let step = rig.trees.step();
    let (graph, y) = graph_of(&rig, &f, &x);
    rig.trees.shutdown().unwrap();
    let mut second = Graph::new(&rig.allocator);
    let capture = second.capture(&rig.stream).unwrap();
    let down = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
    assert!(matches!(down, Err(Error::ShutDown)));
    capture.end().unwrap();
    // What was captured before works on: the tree's end is what frees its memory.
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&y), [3.0; 4]);
    drop((graph, second, y, x, f, step));
    rig.finish();
}
