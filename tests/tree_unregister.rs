//! When a function is dropped: inside closures, by other threads, inside captures, after the tree; and what its drop may do.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{Error, Function, FunctionSpec, Graph, GraphTrees, Phase, lend};

suite!(
    dropped_inside_another_functions_closure,
    dropped_by_another_thread_meanwhile,
    dropped_inside_a_closure_that_panics,
    dropped_inside_a_capture,
    dropped_inside_an_inline_run,
    dropped_after_the_tree,
    a_function_that_holds_itself,
    invalidated_from_inside_and_beside_a_run,
    what_is_dropped_may_use_the_tree,
);

use Phase::{Eager, Record, Replay, Warmup};

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

fn dropped_inside_another_functions_closure<D: Device>(rig: Rig<D>) {
    for phase in [Warmup, Record, Eager] {
        let (f, below) = (
            function(&rig, "f", 2.0, 0.0),
            function(&rig, "below", 1.0, 1.0),
        );
        let x = rig.floats(&[1.0]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let z = rig.one(&below, &step, &y);
        let last = Mutex::new(Some(f));
        let spec = FunctionSpec::new("g");
        let spec = match phase {
            Warmup => spec,
            Record => spec.skip_warmup(),
            _ => spec.capture_if(|_| false),
        };
        let trees = rig.trees.clone();
        let g = rig.register(spec, move |k, rec, inputs| {
            if let Some(f) = last.lock().unwrap().take() {
                drop(f);
                assert_eq!(trees.view().functions.len(), 3, "at the run's end");
            }
            Ok(vec![k.sum(rec, inputs.get(0)?, inputs.get(1)?)?])
        });
        let out = rig.run(&g, &step, &[&y, &z]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![5.0]));
        // g was recorded below it.
        assert_eq!(rig.nodes(), "");
        assert_eq!(rig.trees.view().functions.len(), 2);
        assert_eq!((rig.read(&y), rig.read(&z)), (vec![2.0], vec![3.0]));
        rig.trees.audit().unwrap();
        drop((out, y, z, step));
        let step = rig.trees.step();
        let again = rig.run(&g, &step, &[&x, &x]);
        assert_eq!(again.phase(), if phase == Eager { Eager } else { Record });
        assert_eq!(rig.read(&again[0]), [2.0]);
        drop((again, step, g, below, x));
        assert_eq!(kept(&rig), 0);
    }
    rig.finish();
}

fn dropped_by_another_thread_meanwhile<D: Device>(rig: Rig<D>) {
    for phase in [Warmup, Record, Eager] {
        let f = function(&rig, "f", 2.0, 0.0);
        let x = rig.floats(&[1.0]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let (to, from) = mpsc::channel::<mpsc::Sender<()>>();
        let thread = std::thread::spawn(move || {
            let done = from.recv().unwrap();
            drop(f);
            done.send(()).unwrap();
        });
        let to = Mutex::new(Some(to));
        let spec = FunctionSpec::new("g");
        let spec = match phase {
            Warmup => spec,
            Record => spec.skip_warmup(),
            _ => spec.capture_if(|_| false),
        };
        let g = rig.register(spec, move |k, rec, inputs| {
            if let Some(to) = to.lock().unwrap().take() {
                let (done, is_done) = mpsc::channel();
                to.send(done).unwrap();
                // The drop does not wait for this run.
                is_done.recv().unwrap();
            }
            Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 1.0)?])
        });
        let out = rig.run(&g, &step, &[&y]);
        thread.join().unwrap();
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![3.0]));
        assert_eq!(rig.trees.view().functions.len(), 1);
        assert_eq!((rig.nodes().as_str(), rig.read(&y)), ("", vec![2.0]));
        rig.trees.audit().unwrap();
        drop((out, y, step, g, x));
        assert_eq!(kept(&rig), 0);
    }
    rig.finish();
}

fn dropped_inside_a_closure_that_panics<D: Device>(rig: Rig<D>) {
    for phase in [Warmup, Record, Eager] {
        let f = function(&rig, "f", 2.0, 0.0);
        let x = rig.floats(&[1.0]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let last = Mutex::new(Some(f));
        let spec = FunctionSpec::new("g");
        let spec = match phase {
            Warmup => spec,
            Record => spec.skip_warmup(),
            _ => spec.capture_if(|_| false),
        };
        let g = rig.register(spec, move |_, _, _| {
            drop(last.lock().unwrap().take());
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        let panicked = catch_unwind(AssertUnwindSafe(|| rig.run(&g, &step, &[&y])));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"on purpose"));
        assert_eq!(rig.trees.view().functions.len(), 1, "{phase:?}");
        assert_eq!((rig.nodes().as_str(), rig.read(&y)), ("", vec![2.0]));
        rig.trees.audit().unwrap();
        drop((y, step, g, x));
        assert_eq!(kept(&rig), 0);
    }
    rig.finish();
}

fn dropped_inside_a_capture<D: Device>(rig: Rig<D>) {
    let (f, g) = (function(&rig, "f", 2.0, 0.0), function(&rig, "g", 3.0, 0.0));
    let x = rig.floats(&[1.0]);
    drop(rig.one(&f, &rig.trees.step(), &x));
    drop(rig.one(&g, &rig.trees.step(), &x));
    let step = rig.trees.step();
    let y = rig.one(&f, &step, &x);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    // Of one something is held by the stream that captures, of the other nothing.
    drop((f, g));
    assert_eq!(rig.nodes(), "");
    let z = rig.captured(&capture, &x, 10.0, 1.0);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!((rig.read(&z), rig.read(&y)), (vec![11.0], vec![2.0]));
    rig.trees.audit().unwrap();
    assert_eq!(rig.blocks(), 1);
    drop((y, step));
    assert_eq!(kept(&rig), 0);
    drop((graph, x, z));
    rig.finish();
}

fn dropped_inside_an_inline_run<D: Device>(rig: Rig<D>) {
    let f = function(&rig, "f", 2.0, 0.0);
    let x = rig.floats(&[1.0]);
    drop(rig.one(&f, &rig.trees.step(), &x));
    let last = Mutex::new(Some(f));
    let g = rig.register(FunctionSpec::new("g"), move |k, rec, inputs| {
        drop(last.lock().unwrap().take());
        Ok(vec![k.apply(rec, inputs.get(0)?, 5.0, 0.0)?])
    });
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let step = rig.trees.step();
    let out = rig
        .trees
        .run(&g, &step, &[], capture.stream(), &mut [lend(&x)])
        .unwrap();
    assert_eq!(out.phase(), Phase::Inline);
    assert_eq!(rig.nodes(), "");
    assert_eq!(rig.trees.view().functions.len(), 1);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&out[0]), [5.0]);
    drop((graph, out, step, x));
    rig.finish();
}

fn dropped_after_the_tree<D: Device>(rig: Rig<D>) {
    let owned = Arc::new(());
    for shut_down in [false, true] {
        let trees = GraphTrees::new(&rig.allocator).unwrap();
        let own = owned.clone();
        let f = trees
            .register(FunctionSpec::new("f"), move |_, _| {
                let _ = &own;
                Ok(vec![])
            })
            .unwrap();
        drop(trees.run(&f, &trees.step(), &[], &rig.stream, &mut []));
        if shut_down {
            trees.shutdown().unwrap();
            assert_eq!(Arc::strong_count(&owned), 1);
            assert!(matches!(trees.report(&f), Err(Error::ShutDown)));
            trees.invalidate(&f).unwrap();
            drop(f);
            assert_eq!(trees.counts().warmups, 1);
        } else {
            drop(trees);
            assert_eq!(Arc::strong_count(&owned), 1, "a handle keeps no closure");
            assert_eq!(f.name(), "f");
            drop(f);
        }
    }
    rig.finish();
}

fn a_function_that_holds_itself<D: Device>(rig: Rig<D>) {
    let myself = Arc::new(OnceLock::<Function>::new());
    let me: Arc<OnceLock<Function>> = myself.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        assert_eq!(me.get().unwrap().name(), "f");
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let weak: Weak<OnceLock<Function>> = Arc::downgrade(&myself);
    assert!(myself.set(f.clone()).is_ok());
    drop(myself);
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Replay] {
        assert_eq!(rig.phased(&f, &rig.trees.step(), &x).0, phase);
    }
    rig.trees.invalidate(&f).unwrap();
    assert_eq!((rig.nodes().as_str(), kept(&rig)), ("", 0));
    for phase in [Warmup, Record, Replay] {
        let (p, out) = rig.phased(&f, &rig.trees.step(), &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![2.0]));
    }
    drop(f);
    assert_eq!(rig.nodes(), "f", "it keeps itself");
    let trees = rig.trees.clone();
    trees.shutdown().unwrap();
    assert!(weak.upgrade().is_none());
    drop((x, trees));
    rig.finish();
}

fn invalidated_from_inside_and_beside_a_run<D: Device>(rig: Rig<D>) {
    let f = function(&rig, "f", 2.0, 0.0);
    let x = rig.floats(&[1.0]);
    drop(rig.one(&f, &rig.trees.step(), &x));
    let (trees, inner) = (rig.trees.clone(), f.clone());
    let (to, from) = mpsc::channel();
    let to = Mutex::new(to);
    let g = rig.register(FunctionSpec::new("g"), move |k, rec, inputs| {
        assert!(matches!(
            trees.invalidate(&inner),
            Err(Error::Nested { function }) if &*function == "f"
        ));
        to.lock().unwrap().send(()).unwrap();
        Ok(vec![k.apply(rec, inputs.get(0)?, 3.0, 0.0)?])
    });
    let (trees, other) = (rig.trees.clone(), f.clone());
    let thread = std::thread::spawn(move || {
        from.recv().unwrap();
        // Waits for the closure's end.
        trees.invalidate(&other).unwrap();
        from
    });
    let out = rig.one(&g, &rig.trees.step(), &x);
    let from = thread.join().unwrap();
    assert_eq!((rig.read(&out), rig.nodes().as_str()), (vec![3.0], ""));
    assert_eq!(rig.phased(&f, &rig.trees.step(), &x).0, Record);
    drop((g, out, x, from));
    rig.finish();
}

/// What counts the tree's nodes when it is dropped.
struct Looks<D: Device>(GraphTrees<D>, mpsc::Sender<usize>);

impl<D: Device> Drop for Looks<D> {
    fn drop(&mut self) {
        self.1.send(self.0.view().nodes.len()).unwrap();
    }
}

fn what_is_dropped_may_use_the_tree<D: Device>(rig: Rig<D>) {
    let (to, from) = mpsc::channel();
    let place = rig.floats(&[7.0]);
    let looks = || Looks(rig.trees.clone(), to.clone());
    let constant = rig
        .allocator
        .import(place.ptr().unwrap(), 4, Mutex::new(looks()));
    let (closure, again) = (Mutex::new(looks()), function(&rig, "again", 1.0, 0.0));
    let constants = Mutex::new(Some(constant));
    let f = rig.register(FunctionSpec::new("f").skip_warmup(), move |_, _, _| {
        // The closure owns another function, and its graph a constant.
        let _ = (&closure, &again);
        Ok(vec![constants.lock().unwrap().take().unwrap()])
    });
    let other = function(&rig, "other", 1.0, 0.0);
    let x = rig.floats(&[1.0]);
    drop(rig.run(&f, &rig.trees.step(), &[]));
    drop(rig.one(&other, &rig.trees.step(), &x));
    drop(f);
    assert_eq!([from.recv().unwrap(), from.recv().unwrap()], [1, 1]);
    assert_eq!(rig.trees.view().functions.len(), 1);
    // The same by an eviction.
    let constant = rig
        .allocator
        .import(place.ptr().unwrap(), 4, Mutex::new(looks()));
    let constants = Mutex::new(Some(constant));
    let f = rig.register(FunctionSpec::new("f").skip_warmup(), move |_, _, _| {
        Ok(vec![constants.lock().unwrap().take().unwrap()])
    });
    drop(rig.run(&f, &rig.trees.step(), &[]));
    rig.trees.set_budget(cudagraph_trees::Budget {
        graphs: 1,
        ..Default::default()
    });
    drop(rig.one(&function(&rig, "third", 1.0, 0.0), &rig.trees.step(), &x));
    assert!(from.recv().unwrap() <= 1);
    drop((f, other, x, place));
    rig.finish();
}
