//! What fails inside a run, and what is left afterwards: errors and panics of closures, memory kept, the device's refusals at each call,
//! runs from inside a run. Names carry the rows of the tables of what users report.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use common::{Rig, wrapped};
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, CaptureStatus, Code, Device, DeviceError};
use cudagraph_trees::pool::PoolError;
use cudagraph_trees::{
    Arg, Error, Function, FunctionSpec, GraphTrees, Phase, Reason, Tensor, give, lend,
};

suite!(
    an_error_of_the_closure_is_returned,
    an_error_after_everything_died_inside,
    a_panic_of_the_closure_goes_on,
    t2_13_a_workspace_kept,
    what_is_advised_about_a_workspace_works,
    a_kept_input_is_the_callers_own,
    a_hidden_output_of_the_path_is_refused,
    an_output_made_outside_the_pool_is_passed_through,
    a_run_inside_a_run,
    another_threads_run_waits,
    what_a_closure_may_call,
    inputs_that_do_not_fit,
    handles_of_another_tree,
    a_capture_broken_by_the_closure_is_answered_eagerly,
    t3_04_what_a_closure_makes_of_a_refusal,
    t3_04_an_operation_of_a_stream_that_a_closure_forks,
    t3_04_an_inline_run_in_a_broken_capture,
);

use Phase::{Eager, Record, Replay, Warmup};

/// A function whose closure fails as long as it is told to, after it has used its given input and allocated.
fn failing<D: Device>(
    rig: &Rig<D>,
    spec: FunctionSpec<D>,
    how: Fail,
) -> (Function, Arc<AtomicBool>) {
    let fail = Arc::new(AtomicBool::new(false));
    let told = fail.clone();
    let f = rig.register(spec, move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 10.0, 0.0)?;
        let keep = (how == Fail::WithInput).then_some(x);
        let z = k.apply(rec, &y, 1.0, 1.0)?;
        if told.load(Ordering::Relaxed) {
            if how == Fail::Panic {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            return Err("on purpose".into());
        }
        drop(keep);
        Ok(vec![z])
    });
    (f, fail)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fail {
    /// While it holds its input.
    WithInput,
    /// After its input has died, and its memory was used again.
    WithoutInput,
    Panic,
}

fn closure_fails<D: Device>(rig: Rig<D>, how: Fail) {
    let a = rig.register(FunctionSpec::new("a"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![k.apply(rec, x, 1.0, 1.0)?, k.apply(rec, x, 1.0, 2.0)?])
    });
    let x = rig.floats(&[1.0, 2.0]);
    drop(rig.run(&a, &rig.trees.step(), &[&x]));
    for replayed in [false, true] {
        let spec = FunctionSpec::new("f").skip_warmup();
        let (f, fail) = failing(&rig, spec, how);
        let step = rig.trees.step();
        let outputs = rig.run(&a, &step, &[&x]);
        assert_eq!(outputs.phase(), if replayed { Replay } else { Record });
        let mut outputs = outputs.into_iter();
        let (first, second) = (outputs.next().unwrap(), outputs.next().unwrap());
        let alias = first.view(4, 4).unwrap();
        // A view, too, is given; and an eager tensor.
        let mut args = [
            give(first),
            give(alias),
            give(rig.floats(&[5.0])),
            lend(&second),
        ];
        let ids = |args: &[Arg<'_, D>]| -> Vec<_> {
            args.iter()
                .map(|a| match a {
                    Arg::Give(t) => (true, t.storage_id(), t.offset(), t.bytes()),
                    Arg::Lend(t) => (false, t.storage_id(), t.offset(), t.bytes()),
                    other => panic!("{other:?}"),
                })
                .collect()
        };
        let given = ids(&args);
        let live = rig.trees.path_live();
        let nodes = rig.trees.counts().recordings;
        fail.store(true, Ordering::Relaxed);
        let mut layout = None;
        for _ in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                rig.trees.run(&f, &step, &[], &rig.stream, &mut args)
            }));
            match (how, result) {
                (Fail::Panic, Err(panic)) => {
                    assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
                }
                (
                    _,
                    Ok(Err(Error::Function {
                        function,
                        phase,
                        source,
                    })),
                ) => {
                    assert_eq!((&*function, phase), ("f", Record));
                    assert_eq!(source.to_string(), "on purpose");
                }
                (_, other) => panic!("{other:?}"),
            }
            assert_eq!(ids(&args), given, "given inputs are back");
            let Arg::Give(first) = &args[0] else {
                unreachable!()
            };
            assert_eq!(rig.read(first), [2.0, 3.0], "with their bytes");
            assert_eq!(rig.read(&second), [3.0, 4.0]);
            assert_eq!(rig.trees.path_live(), live);
            assert_eq!(rig.trees.counts().recordings, nodes);
            // The books were brought up to date by the first try; from then on nothing moves.
            let now = rig.layout();
            assert_eq!(*layout.get_or_insert_with(|| now.clone()), now);
            rig.trees.audit().unwrap();
            assert_eq!(rig.blocks(), live as u64);
        }
        fail.store(false, Ordering::Relaxed);
        let out = rig.call(&f, &step, &[], &mut args);
        assert!(args[..3].iter().all(|a| matches!(a, Arg::Taken)));
        assert_eq!((out.phase(), rig.read(&out[0])), (Record, vec![21.0, 31.0]));
        assert_eq!(rig.trees.path_live(), 2);
        drop((out, args));
        drop((second, step));
        // and once more, replayed
        let step = rig.trees.step();
        let mut outputs = rig.run(&a, &step, &[&x]).into_iter();
        let (first, second) = (outputs.next().unwrap(), outputs.next().unwrap());
        let alias = first.view(4, 4).unwrap();
        let mut args = [
            give(first),
            give(alias),
            give(rig.floats(&[6.0])),
            lend(&second),
        ];
        let out = rig.call(&f, &step, &[], &mut args);
        assert_eq!((out.phase(), rig.read(&out[0])), (Replay, vec![21.0, 31.0]));
    }
    drop(x);
    rig.finish();
}

fn an_error_of_the_closure_is_returned<D: Device>(rig: Rig<D>) {
    // In a warmup first: nothing is left of it, and the function is not warm.
    let (f, fail) = failing(&rig, FunctionSpec::new("f"), Fail::WithInput);
    let x = rig.floats(&[1.0]);
    fail.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        let step = rig.trees.step();
        let mut args = [give(x.clone())];
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
        let Err(Error::Function { phase, source, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!((phase, source.to_string().as_str()), (Warmup, "on purpose"));
        assert!(matches!(&args[0], Arg::Give(t) if t.storage_id() == x.storage_id()));
        assert_eq!((rig.blocks(), rig.trees.path_live()), (0, 0));
        assert!(rig.trees.view().path.is_empty());
    }
    fail.store(false, Ordering::Relaxed);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&f, &step, &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![11.0]));
    }
    // Below a live warmup as well.
    let (g, fail) = failing(&rig, FunctionSpec::new("g"), Fail::WithInput);
    fail.store(true, Ordering::Relaxed);
    let step = rig.trees.step();
    let (_, y) = rig.phased(&f, &step, &x);
    let result = rig.trees.run(&g, &step, &[], &rig.stream, &mut [lend(&y)]);
    assert!(matches!(result, Err(Error::Function { phase: Warmup, .. })));
    assert_eq!((rig.read(&y), rig.blocks()), (vec![11.0], 1));
    rig.trees.audit().unwrap();
    drop((y, x, step));
    rig.finish();
}

fn an_error_after_everything_died_inside<D: Device>(rig: Rig<D>) {
    closure_fails(rig, Fail::WithoutInput);
}

fn a_panic_of_the_closure_goes_on<D: Device>(rig: Rig<D>) {
    closure_fails(rig, Fail::Panic);
}

fn t2_13_a_workspace_kept<D: Device>(rig: Rig<D>) {
    let kept: Arc<Mutex<Vec<Tensor<D>>>> = Arc::default();
    let keep = Arc::new(AtomicBool::new(false));
    let (cache, told) = (kept.clone(), keep.clone());
    let spec = || FunctionSpec::new("f");
    let body = move |k: &common::Ops<D>,
                     rec: &mut cudagraph_trees::Recorder<'_, D>,
                     mut inputs: cudagraph_trees::Inputs<D>| {
        let x = inputs.take(0)?;
        let workspace = rec.alloc(4 << 20)?;
        k.kernels
            .fill(rec.device(), rec.stream(), workspace.ptr()?, 1 << 10, 7.0)?;
        let y = k.apply(rec, &x, 2.0, 0.0)?;
        if told.load(Ordering::Relaxed) {
            cache.lock().unwrap().push(workspace.view(16, 32)?);
            cache.lock().unwrap().push(k.apply(rec, &y, 1.0, 0.0)?);
        }
        Ok(vec![y])
    };
    let a = rig.scale_add("a", 1.0, 1.0);
    let f = rig.register(spec(), body);
    let x = rig.floats(&[1.0]);
    for (round, phase) in [Warmup, Record].into_iter().enumerate() {
        // Twice in each phase: caught each time, not only the first.
        for _ in 0..2 {
            let step = rig.trees.step();
            let y = rig.one(&a, &step, &x);
            let held = rig.trees.path_live();
            keep.store(true, Ordering::Relaxed);
            let mut args = [give(y)];
            let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
            let Err(Error::Untracked {
                function,
                phase: p,
                bytes,
                place,
                at,
                count,
            }) = result
            else {
                panic!("{result:?}")
            };
            assert_eq!((&*function, p, bytes, count), ("f", phase, 4 << 20, 2));
            assert!(at.file().ends_with("tree_failures.rs"));
            assert!(place.starts_with('S') && place.contains('+'), "{place}");
            // What was kept is stale, not a hole in the books.
            let mut kept = kept.lock().unwrap();
            assert_eq!(kept.len(), 2);
            for tensor in kept.drain(..) {
                let Err(Error::Stale(stale)) = rig.try_read(&tensor) else {
                    panic!("readable")
                };
                assert_eq!(stale.made, cudagraph_trees::Made::Inside);
                assert!(!stale.to_string().contains("token"), "{stale}");
                assert_eq!(stale.taken_by.as_deref(), Some("f"));
            }
            if phase == Record {
                let Arg::Give(y) = &args[0] else {
                    panic!("not given back")
                };
                assert_eq!(rig.read(y), [2.0]);
                assert_eq!(rig.blocks(), held as u64);
                rig.trees.audit().unwrap();
            }
        }
        // The same without keeping: it works.
        keep.store(false, Ordering::Relaxed);
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let (p, out) = rig.moved(&f, &step, y);
        assert_eq!((p, rig.read(&out)), (phase, vec![4.0]), "round {round}");
        assert_eq!((rig.trees.path_live(), rig.blocks()), (1, 1));
    }
    // A replay keeps nothing, whatever the closure would do.
    keep.store(true, Ordering::Relaxed);
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    let (p, out) = rig.moved(&f, &step, y);
    assert_eq!((p, rig.read(&out)), (Replay, vec![4.0]));
    drop((x, out, step));
    rig.finish();
}

/// Return it as an output, or allocate it outside of the function.
fn what_is_advised_about_a_workspace_works<D: Device>(rig: Rig<D>) {
    let returned = rig.register(FunctionSpec::new("returned"), |k, rec, inputs| {
        let workspace = k.apply(rec, inputs.get(0)?, 1.0, 5.0)?;
        Ok(vec![k.apply(rec, &workspace, 2.0, 0.0)?, workspace])
    });
    let workspace = rig.floats(&[0.0]);
    let own = workspace.clone();
    let outside = rig.register(FunctionSpec::new("outside"), move |k, rec, inputs| {
        let x = inputs.get(0)?;
        let (dst, src) = (own.ptr()?, x.ptr()?);
        k.kernels
            .scale_add(rec.device(), rec.stream(), dst, src, 1, 1.0, 5.0)?;
        Ok(vec![k.apply(rec, &own, 2.0, 0.0)?])
    });
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let a = rig.run(&returned, &step, &[&x]);
        let b = rig.run(&outside, &step, &[&x]);
        assert_eq!((a.phase(), b.phase()), (phase, phase));
        assert_eq!((rig.read(&a[0]), rig.read(&a[1])), (vec![12.0], vec![6.0]));
        assert_eq!(
            (rig.read(&b[0]), rig.read(&workspace)),
            (vec![12.0], vec![6.0])
        );
    }
    drop((x, workspace));
    rig.finish();
}

fn a_kept_input_is_the_callers_own<D: Device>(rig: Rig<D>) {
    let kept: Arc<Mutex<Vec<Tensor<D>>>> = Arc::default();
    let cache = kept.clone();
    let a = rig.scale_add("a", 1.0, 1.0);
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 2.0, 0.0)?;
        cache.lock().unwrap().push(x);
        Ok(vec![y])
    });
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let id = y.storage_id();
        let (p, out) = rig.moved(&f, &step, y);
        assert_eq!((p, rig.trees.path_live()), (phase, 2));
        let mine = kept.lock().unwrap().pop().unwrap();
        assert_eq!((mine.storage_id(), rig.read(&mine)), (id, vec![2.0]));
        assert_eq!(rig.read(&out), [4.0]);
        drop((mine, step));
    }
    // At a replay the given input dies, as any that was given.
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    let (p, out) = rig.moved(&f, &step, y);
    assert_eq!((p, rig.trees.path_live()), (Replay, 1));
    assert_eq!(rig.read(&out), [4.0]);
    drop((x, out, step));
    // An input that was copied in for the call is not the caller's: kept, it is memory of the pool.
    let x = rig.floats(&[3.0]);
    let step = rig.trees.step();
    let result = rig.trees.run(&f, &step, &[1], &rig.stream, &mut [lend(&x)]);
    let Err(Error::Untracked { count: 1, at, .. }) = result else {
        panic!("{result:?}")
    };
    assert!(
        at.file().ends_with("mod.rs") || at.file().ends_with("tree_failures.rs"),
        "{at}"
    );
    kept.lock().unwrap().clear();
    drop((x, step));
    rig.finish();
}

fn a_hidden_output_of_the_path_is_refused<D: Device>(rig: Rig<D>) {
    let hidden: Arc<Mutex<Option<Tensor<D>>>> = Arc::default();
    let source = hidden.clone();
    let a = rig.scale_add("a", 1.0, 1.0);
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let mut all = vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?];
        all.extend(source.lock().unwrap().take());
        Ok(all)
    });
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        *hidden.lock().unwrap() = Some(y.clone());
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
        let Err(Error::ForeignOutput { function, output }) = &result else {
            panic!("{result:?}")
        };
        assert_eq!((&**function, *output), ("f", 1));
        assert_eq!(
            (rig.read(&y), rig.blocks(), rig.trees.path_live()),
            (vec![2.0], 1, 1)
        );
        let (p, out) = rig.phased(&f, &step, &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![2.0]));
        // A stale one is stale.
        drop((step, y.clone()));
        let step = rig.trees.step();
        *hidden.lock().unwrap() = Some(y);
        let result = rig.trees.run(&f, &step, &[7], &rig.stream, &mut [lend(&x)]);
        assert!(matches!(result, Err(Error::Stale(_))), "{result:?}");
        assert_eq!(rig.blocks(), 0);
    }
    drop(x);
    rig.finish();
}

fn an_output_made_outside_the_pool_is_passed_through<D: Device>(rig: Rig<D>) {
    let outside = rig.floats(&[4.0, 5.0]);
    let id = outside.storage_id();
    let tensor = Mutex::new(Some(outside));
    // The closure gives its own handle away: the recording keeps it.
    let f = rig.register(FunctionSpec::new("f").skip_warmup(), move |_, _, _| {
        Ok(tensor.lock().unwrap().take().into_iter().collect())
    });
    for phase in [Record, Replay, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[]);
        assert_eq!((out.phase(), out[0].storage_id()), (phase, id));
        assert_eq!(rig.read(&out[0]), [4.0, 5.0]);
    }
    rig.finish();
}

fn a_run_inside_a_run<D: Device>(rig: Rig<D>) {
    let inner = rig.scale_add("inner", 1.0, 1.0);
    let trees = Arc::new(Mutex::new(Some(rig.trees.clone())));
    let (stream, f) = (rig.stream.clone(), inner.clone());
    let x = rig.floats(&[1.0]);
    let (handle, again) = (x.clone(), trees.clone());
    let outer = rig.register(FunctionSpec::new("outer"), move |k, rec, inputs| {
        let trees = again.lock().unwrap().clone().ok_or("no tree")?;
        let step = trees.step();
        let result = trees.run(&f, &step, &[], &stream, &mut [lend(&handle)]);
        assert!(matches!(&result, Err(Error::Nested { function }) if &**function == "inner"));
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&outer, &step, &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![2.0]));
        let (p, out) = rig.phased(&inner, &step, &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![2.0]));
    }
    *trees.lock().unwrap() = None;
    let Rig {
        trees,
        device,
        allocator,
        kernels,
        stream,
    } = rig;
    drop((trees, x, inner, outer));
    // The closure (and so its handle on x) went with the tree.
    assert_eq!(allocator.stats().live_blocks.current, 0);
    let trees = GraphTrees::new(&allocator).unwrap();
    Rig {
        device,
        allocator,
        kernels,
        stream,
        trees,
    }
    .finish();
}

fn another_threads_run_waits<D: Device>(rig: Rig<D>) {
    let (entered, inside) = mpsc::channel::<()>();
    let (leave, may_leave) = mpsc::channel::<()>();
    let may_leave = Mutex::new(may_leave);
    let entered = Mutex::new(entered);
    let log: Arc<Mutex<Vec<&str>>> = Arc::default();
    let slow_log = log.clone();
    let slow = rig.register(FunctionSpec::new("slow"), move |k, rec, inputs| {
        entered.lock().unwrap().send(())?;
        may_leave.lock().unwrap().recv()?;
        slow_log.lock().unwrap().push("slow is done");
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let quick_log = log.clone();
    let quick = rig.register(FunctionSpec::new("quick"), move |k, rec, inputs| {
        quick_log.lock().unwrap().push("quick begins");
        Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 1.0)?])
    });
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record] {
        let step = rig.trees.step();
        let second = rig.trees.step();
        std::thread::scope(|scope| {
            let slow_run = scope.spawn(|| rig.one(&slow, &step, &x));
            inside.recv().unwrap();
            // The tree can be looked at and opened meanwhile, but not run.
            assert!(rig.trees.picture().contains("tree:"));
            let quick_run = scope.spawn(|| rig.phased(&quick, &second, &x));
            let third = rig.trees.step();
            assert!(third.number() > second.number());
            leave.send(()).unwrap();
            let slow_out = slow_run.join().unwrap();
            let (p, quick_out) = quick_run.join().unwrap();
            assert_eq!(p, phase);
            let log = std::mem::take(&mut *log.lock().unwrap());
            assert_eq!(log, ["slow is done", "quick begins"]);
            assert_eq!(rig.read(&slow_out), [2.0]);
            assert_eq!(rig.read(&quick_out), [2.0]);
            assert_eq!(rig.trees.view().path.len(), 2);
        });
    }
    drop(x);
    rig.finish();
}

/// Registering, opening and closing steps, looking, eager memory of other threads: all of it is allowed inside a closure.
fn what_a_closure_may_call<D: Device>(rig: Rig<D>) {
    let trees = Arc::new(Mutex::new(Some(rig.trees.clone())));
    let (inside, allocator) = (trees.clone(), rig.allocator.clone());
    let registered: Arc<Mutex<Vec<Function>>> = Arc::default();
    let new = registered.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let trees = inside.lock().unwrap().clone().ok_or("no tree")?;
        new.lock()
            .unwrap()
            .push(trees.register(FunctionSpec::new("late"), |_, inputs| {
                Ok(vec![inputs.get(0)?.clone()])
            })?);
        drop(trees.step());
        let _ = (trees.picture(), trees.counts(), trees.path_live());
        let trimmed = allocator.trim();
        match rec.phase() {
            // A trim would break the capture: it is refused, and does not.
            Phase::Record => assert!(matches!(
                trimmed,
                Err(Error::CaptureUnderway { captures: 1 })
            )),
            _ => assert!(trimmed.is_ok()),
        }
        // Plain allocations of this thread, and for this stream from another, are the pool's.
        let mine = allocator.alloc(rec.stream(), 4)?;
        let stream = rec.stream();
        let theirs = std::thread::scope(|s| s.spawn(|| allocator.alloc(stream, 4)).join())
            .map_err(|_| "the thread panicked")??;
        let x = inputs.get(0)?;
        k.kernels.scale_add(
            rec.device(),
            rec.stream(),
            mine.ptr()?,
            x.ptr()?,
            1,
            1.0,
            1.0,
        )?;
        k.kernels.scale_add(
            rec.device(),
            rec.stream(),
            theirs.ptr()?,
            x.ptr()?,
            1,
            1.0,
            2.0,
        )?;
        Ok(vec![mine, theirs])
    });
    let x = rig.floats(&[1.0]);
    let eager = rig.allocator.stats().live_blocks.allocated;
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x]);
        assert_eq!((out.phase(), rig.trees.path_live()), (phase, 2));
        assert_eq!(
            (rig.read(&out[0]), rig.read(&out[1])),
            (vec![2.0], vec![3.0])
        );
    }
    assert_eq!(rig.allocator.stats().live_blocks.allocated, eager);
    // What was registered inside works.
    let late = registered.lock().unwrap().pop().unwrap();
    let step = rig.trees.step();
    let out = rig.one(&late, &step, &x);
    assert_eq!(rig.read(&out), [1.0]);
    *trees.lock().unwrap() = None;
    drop((x, out, step));
    rig.finish();
}

fn inputs_that_do_not_fit<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0]);
    let detail = |result: cudagraph_trees::Result<cudagraph_trees::Outputs<D>>| match result {
        Err(Error::Inputs { function, detail }) => (function.to_string(), detail),
        other => panic!("{other:?}"),
    };
    let pass = |_: &common::Ops<D>,
                _: &mut cudagraph_trees::Recorder<'_, D>,
                mut inputs: cudagraph_trees::Inputs<D>| {
        Ok(vec![inputs.take(0)?, inputs.take(0)?])
    };
    // A closure that asks for what is not there.
    let f = rig.register(FunctionSpec::new("f"), pass);
    let step = rig.trees.step();
    for args in [vec![], vec![lend(&x)]] {
        let mut args = args;
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
        let Err(Error::Function { source, .. }) = result else {
            panic!()
        };
        assert!(matches!(source.downcast_ref(), Some(Error::Inputs { .. })));
    }
    // A given input that an earlier run took.
    let g = rig.scale_add("g", 1.0, 1.0);
    let mut args = [give(x.clone())];
    drop(rig.call(&g, &step, &[], &mut args));
    for _ in 0..2 {
        let again = detail(rig.trees.run(&g, &step, &[], &rig.stream, &mut args));
        assert_eq!(
            again,
            ("g".into(), "input 0 was taken by an earlier run".into())
        );
        drop(rig.one(&g, &step, &x));
    }
    // Bound beyond what is passed.
    let h = rig.register(FunctionSpec::new("h").bind(3, &x), |_, _, _| Ok(vec![]));
    let (name, text) = detail(rig.trees.run(&h, &step, &[], &rig.stream, &mut [lend(&x)]));
    assert_eq!(name, "h");
    assert!(
        text.contains("input 3 is bound") && text.contains("2 in all"),
        "{text}"
    );
    // Registration: the same position twice, bound and static, an output of the tree.
    let refused = |spec: FunctionSpec<D>| match rig.trees.register(spec, |_, _| Ok(vec![])) {
        Err(Error::Inputs { detail, .. }) => detail,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refused(FunctionSpec::new("r").bind(1, &x).bind(1, &x)),
        "input 1 is bound twice"
    );
    assert!(
        refused(FunctionSpec::new("r").static_input(2).bind(2, &x))
            .starts_with("input 2 is bound, and so static")
    );
    let out = rig.one(&g, &step, &x);
    assert!(
        refused(FunctionSpec::new("r").bind(0, &out))
            .starts_with("input 0 is an output of this tree")
    );
    // Another tree's moves, or is overwritten, without this one's knowing.
    let others = GraphTrees::new(&rig.allocator).unwrap();
    let h = others
        .register(FunctionSpec::new("h"), |rec, _| Ok(vec![rec.alloc(64)?]))
        .unwrap();
    let theirs = others.step();
    let foreign = others.run(&h, &theirs, &[], &rig.stream, &mut []).unwrap();
    assert!(
        refused(FunctionSpec::new("r").bind(0, &foreign[0]))
            .starts_with("input 0 is an output of another tree")
    );
    drop((foreign, theirs, h, others));
    assert_eq!(
        rig.trees.view().functions.len(),
        3,
        "what was refused is not registered"
    );
    drop((x, out, step));
    rig.finish();
}

fn handles_of_another_tree<D: Device>(rig: Rig<D>) {
    let other = GraphTrees::new(&rig.allocator).unwrap();
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = other
        .register(FunctionSpec::new("g"), |_, _| Ok(vec![]))
        .unwrap();
    let x = rig.floats(&[1.0]);
    let (mine, foreign) = (rig.trees.step(), other.step());
    let mut args = [give(x.clone())];
    let run = |f: &Function, step, args: &mut [Arg<'_, D>]| match rig.trees.run(
        f,
        step,
        &[],
        &rig.stream,
        args,
    ) {
        Err(Error::ForeignHandle { what }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(run(&g, &mine, &mut args), "function");
    assert_eq!(run(&f, &foreign, &mut args), "step");
    assert!(matches!(args[0], Arg::Give(_)));
    assert_eq!(rig.read(&rig.one(&f, &mine, &x)), [2.0]);
    drop((other, x, args, mine));
    rig.finish();
}

fn a_capture_broken_by_the_closure_is_answered_eagerly<D: Device>(rig: Rig<D>) {
    let breaks = Arc::new(AtomicBool::new(false));
    let told = breaks.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 2.0, 0.0)?;
        drop(x);
        let z = k.apply(rec, &y, 1.0, 1.0)?;
        if told.load(Ordering::Relaxed) {
            // Waiting inside a capture is illegal, and invalidates it. Once the error is passed on, once not.
            let result = rec.device().synchronize(rec.stream());
            if inputs.len() == 1 {
                result?;
            }
        }
        Ok(vec![z])
    });
    let a = rig.scale_add("a", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    let pair = |phases: [Phase; 2], extra: bool| {
        let step = rig.trees.step();
        let (p1, y) = rig.phased(&a, &step, &x);
        let mut args = vec![give(y)];
        if extra {
            args.push(lend(&x));
        }
        let out = rig.call(&f, &step, &[], &mut args);
        assert_eq!([p1, out.phase()], phases);
        assert_eq!(rig.read(&out[0]), [5.0]);
        assert!(matches!(args[0], Arg::Taken));
        // The output of an eager run is none of the tree's.
        let live = match phases[1] {
            Eager => (0, 0),
            Replay => (1, 0),
            _ => (1, 1),
        };
        assert_eq!((rig.trees.path_live(), rig.blocks()), live);
        rig.trees.audit().unwrap();
    };
    pair([Warmup, Warmup], false);
    breaks.store(true, Ordering::Relaxed);
    pair([Record, Eager], false);
    pair([Replay, Eager], true);
    let counts = rig.trees.counts();
    assert_eq!((counts.failed_captures, counts.recordings), (2, 1));
    let text = rig.trees.last_failure().unwrap();
    assert!(text.contains("Capture"), "{text}");
    breaks.store(false, Ordering::Relaxed);
    // After two failures one call is answered eagerly without trying.
    pair([Replay, Eager], false);
    pair([Replay, Record], false);
    pair([Replay, Replay], false);
    drop(x);
    rig.finish();
}

/// What a closure does once an operation of it was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It goes on and returns its outputs.
    Ignores,
    /// It returns the device's error.
    Returns,
    /// It goes on, and returns the error of a later operation.
    ReturnsALater,
    /// It returns an error of its own, made from the device's.
    Wraps,
    /// It returns an error that says nothing of it.
    Fails,
    /// It returns without what it has made.
    Keeps,
    Panics,
}

#[derive(Debug)]
struct Wrapping(DeviceError);

impl std::fmt::Display for Wrapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a layer failed")
    }
}

impl std::error::Error for Wrapping {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// T3-04: whatever becomes of a refusal, the tree says that it was the seventh operation, which, and why.
fn t3_04_what_a_closure_makes_of_a_refusal<D: Device>(rig: Rig<D>) {
    let kept: Arc<Mutex<Vec<Tensor<D>>>> = Arc::default();
    let x = rig.floats(&[1.0]);
    let mut failures = 0;
    assert_eq!(
        (rig.trees.last_failure(), rig.trees.last_refusal()),
        (None, None)
    );
    for then in [
        Then::Ignores,
        Then::Returns,
        Then::ReturnsALater,
        Then::Wraps,
        Then::Fails,
        Then::Keeps,
        Then::Panics,
    ] {
        let cache = kept.clone();
        let f = rig.register(
            FunctionSpec::new("f").skip_warmup(),
            move |k, rec, inputs| {
                let mut y = inputs.get(0)?.clone();
                // The copy of the input is the first operation, so five of these are the second to sixth.
                for _ in 0..5 {
                    y = k.apply(rec, &y, 1.0, 1.0)?;
                }
                let (device, stream) = (rec.device(), rec.stream());
                let refused = match rec.phase() {
                    Record => device.synchronize(stream),
                    _ => Ok(()),
                };
                let later = device.fill(stream, y.ptr()?, 0, 0);
                match (then, refused) {
                    (_, Ok(())) | (Then::Ignores, _) => {}
                    (Then::Returns, Err(refused)) => return Err(refused.into()),
                    (Then::ReturnsALater, _) => later?,
                    (Then::Wraps, Err(refused)) => return Err(Wrapping(refused).into()),
                    (Then::Fails, _) => return Err("on purpose".into()),
                    (Then::Keeps, _) => {
                        cache.lock().unwrap().push(y);
                        return Ok(vec![]);
                    }
                    (Then::Panics, _) => std::panic::resume_unwind(Box::new("on purpose")),
                }
                Ok(vec![y])
            },
        );
        let step = rig.trees.step();
        if then == Then::Panics {
            let unwound = catch_unwind(AssertUnwindSafe(|| rig.one(&f, &step, &x)));
            assert_eq!(unwound.unwrap_err().downcast_ref(), Some(&"on purpose"));
        } else {
            let (phase, y) = rig.phased(&f, &step, &x);
            assert_eq!((phase, rig.read(&y)), (Eager, vec![6.0]), "{then:?}");
            failures += 1;
        }
        assert_eq!(rig.trees.counts().failed_captures, failures);
        let refusal = rig.trees.last_refusal().unwrap();
        assert_eq!(
            (refusal.call, refusal.code, refusal.position),
            (Call::Synchronize, Code::StreamCaptureUnsupported, Some(7)),
            "{then:?}"
        );
        let text = rig.trees.last_failure().unwrap();
        assert!(text.contains("operation 7"), "{then:?}: {text}");
        let once = text.matches("Synchronize failed with StreamCaptureUnsupported (900)");
        assert_eq!(once.count(), 1, "{then:?}: {text}");
        let start = match then {
            Then::Ignores | Then::Keeps | Then::Panics => "EndCapture failed with",
            Then::Returns => "f failed during its recording: Synchronize failed with",
            Then::ReturnsALater => "f failed during its recording: Fill failed with",
            Then::Wraps => "f failed during its recording: a layer failed; the capture was",
            Then::Fails => "f failed during its recording: on purpose; the capture was",
        };
        assert!(text.starts_with(start), "{then:?}: {text}");
        kept.lock().unwrap().clear();
        rig.trees.audit().unwrap();
    }
    // An operation that is refused and breaks nothing is the closure's affair; its error leads there.
    let f = rig.register(FunctionSpec::new("f").skip_warmup(), |k, rec, inputs| {
        let y = k.apply(rec, inputs.get(0)?, 1.0, 1.0)?;
        let (device, stream) = (rec.device(), rec.stream());
        let refused = device.copy(stream, y.ptr()?, y.ptr()?.offset(1), 4); // onto itself
        match refused {
            Ok(()) => Ok(vec![y]),
            Err(refused) => Err(Wrapping(refused).into()),
        }
    });
    let step = rig.trees.step();
    let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
    let error = result.unwrap_err();
    let refused = std::error::Error::source(&error).and_then(|wrapping| wrapping.source());
    let refused: &DeviceError = refused.and_then(|error| error.downcast_ref()).unwrap();
    assert_eq!(
        (refused.call, refused.code, refused.position),
        (Call::Copy, Code::InvalidValue, Some(3))
    );
    assert_eq!(rig.trees.counts().failed_captures, failures);
    drop((x, step));
    rig.finish();
}

fn t3_04_an_operation_of_a_stream_that_a_closure_forks<D: Device>(rig: Rig<D>) {
    let forked = rig.device.create_stream().unwrap();
    let event = rig.device.create_event().unwrap();
    let f = rig.register(
        FunctionSpec::new("f").skip_warmup(),
        move |k, rec, inputs| {
            let y = k.apply(rec, inputs.get(0)?, 2.0, 0.0)?;
            if rec.phase() == Record {
                let device = rec.device();
                device.record(&event, rec.stream())?;
                device.wait(&forked, &event)?;
                let z = rec.alloc(4)?;
                k.kernels.fill(device, &forked, z.ptr()?, 1, 0.0)?;
                // Refused on the forked stream; the capture's own hears of it at the end.
                let _ = device.query(&forked);
            }
            Ok(vec![y])
        },
    );
    let x = rig.floats(&[1.0]);
    let step = rig.trees.step();
    let (phase, y) = rig.phased(&f, &step, &x);
    assert_eq!((phase, rig.read(&y)), (Eager, vec![2.0]));
    let refusal = rig.trees.last_refusal().unwrap();
    assert_eq!(
        (refusal.call, refusal.code, refusal.position),
        (Call::Query, Code::StreamCaptureUnsupported, Some(4))
    );
    drop((x, y, step));
    rig.finish();
}

/// A run on a stream whose capture is broken says by what.
fn t3_04_an_inline_run_in_a_broken_capture<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[1.0]);
    let step = rig.trees.step();
    let mut graph = cudagraph_trees::Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.one(&f, &step, &x);
    let waited = rig.device.synchronize(&rig.stream).unwrap_err();
    assert_eq!(waited.position, Some(2));
    let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
    let Err(Error::Device(error)) = result else {
        panic!("{result:?}")
    };
    assert_eq!(
        (error.code, error.position, error.root()),
        (Code::StreamCaptureInvalidated, None, &waited)
    );
    drop(capture);
    drop((graph, x, y, step));
    rig.finish();
}

// ---- the device's refusals ---------------------------------------------------------------------

type FaultyRig = Rig<Faulty<HostDevice>>;

/// a → f with a given input, f not recorded yet; `a` is replayed.
fn prepared() -> (FaultyRig, Function, Function, Tensor<Faulty<HostDevice>>) {
    let rig = Rig::new(wrapped());
    let a = rig.scale_add("a", 1.0, 1.0);
    let f = rig.register(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 2.0, 0.0)?;
        drop(x);
        Ok(vec![k.apply(rec, &y, 1.0, 1.0)?])
    });
    let x = rig.floats(&[1.0]);
    {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        drop(rig.call(&f, &step, &[], &mut [give(y), lend(&x)]));
    }
    drop(rig.one(&a, &rig.trees.step(), &x));
    (rig, a, f, x)
}

/// After whatever failed: memory, trims, captures and runs work, and nothing is left.
fn works_on(
    rig: FaultyRig,
    a: &Function,
    f: &Function,
    x: Tensor<Faulty<HostDevice>>,
    record: bool,
) {
    rig.trees.audit().unwrap();
    assert_eq!(rig.device.inner().counts().captures, 0);
    let eager = rig.floats(&[4.0, 5.0]);
    assert_eq!(rig.read(&eager), [4.0, 5.0]);
    drop(eager);
    rig.allocator.trim().unwrap();
    let mut graph = cudagraph_trees::Graph::new(&rig.allocator);
    let capture_stream = rig.device.create_stream().unwrap();
    let capture = graph.capture(&capture_stream).unwrap();
    let inside = capture.alloc(8).unwrap();
    rig.kernels
        .fill(
            capture.device(),
            capture.stream(),
            inside.ptr().unwrap(),
            2,
            6.0,
        )
        .unwrap();
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&inside), [6.0, 6.0]);
    drop((inside, graph));
    for phase in if record {
        [Record, Replay, Replay]
    } else {
        [Replay; 3]
    } {
        let step = rig.trees.step();
        let y = rig.one(a, &step, &x);
        let out = rig.call(f, &step, &[], &mut [give(y), lend(&x)]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![5.0]));
    }
    drop(x);
    let device = rig.device.clone();
    rig.finish();
    device.synchronize_device().unwrap();
    let counts = device.inner().counts();
    assert_eq!(
        (
            counts.mapped_bytes,
            counts.execs,
            counts.graphs,
            counts.captures
        ),
        (0, 0, 0, 0)
    );
}

#[test]
fn t3_01_a_capture_that_fails_is_answered_eagerly() {
    for call in [
        Call::BeginCapture,
        Call::EndCapture,
        Call::Instantiate,
        Call::Gather,
        Call::GraphInfo,
    ] {
        let (rig, a, f, x) = prepared();
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        rig.device.fail(call, 1, Code::Other(999));
        let mut args = [give(y), lend(&x)];
        let out = rig.call(&f, &step, &[], &mut args);
        assert_eq!((out.phase(), out.node()), (Eager, None), "{call:?}");
        assert_eq!(out.reason(), Some(Reason::CaptureFailed));
        assert_eq!(rig.read(&out[0]), [5.0]);
        assert!(matches!(args[0], Arg::Taken));
        assert_eq!(rig.trees.counts().failed_captures, 1);
        let text = rig.trees.last_failure().unwrap();
        assert!(
            text.starts_with(&format!("{call:?} failed with Other(999) (999)")),
            "{text}"
        );
        assert_eq!((rig.blocks(), rig.trees.path_live()), (0, 0));
        drop((args, out, step));
        works_on(rig, &a, &f, x, true);
    }
}

#[test]
fn a_capture_invalidated_at_any_launch_is_answered_eagerly() {
    for nth in 1..=2 {
        let (rig, a, f, x) = prepared();
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        rig.device
            .fail_invalidating(Call::Launch, nth, Code::StreamCaptureUnsupported);
        let out = rig.call(&f, &step, &[], &mut [give(y), lend(&x)]);
        assert_eq!((out.phase(), rig.read(&out[0])), (Eager, vec![5.0]));
        assert_eq!(rig.trees.counts().failed_captures, 1);
        let refusal = rig.trees.last_refusal().unwrap();
        assert_eq!(
            (refusal.call, refusal.position),
            (Call::Launch, Some(nth + 1)),
            "the copy of x comes first"
        );
        drop((out, step));
        works_on(rig, &a, &f, x, true);
    }
    // A launch that fails for another reason is the closure's error.
    let (rig, a, f, x) = prepared();
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    rig.device.fail(Call::Launch, 1, Code::InvalidValue);
    let mut args = [give(y), lend(&x)];
    let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
    let Err(Error::Function {
        phase: Record,
        source,
        ..
    }) = result
    else {
        panic!("{result:?}")
    };
    assert!(source.to_string().contains("InvalidValue"));
    assert!(matches!(args[0], Arg::Give(_)));
    drop((args, step));
    works_on(rig, &a, &f, x, true);
}

#[test]
fn a_launch_that_fails_changes_nothing() {
    // Of a recording that is to be launched for the first time, and of a replay.
    for recorded in [false, true] {
        let (rig, a, f, x) = prepared();
        if recorded {
            let step = rig.trees.step();
            let y = rig.one(&a, &step, &x);
            drop(rig.call(&f, &step, &[], &mut [give(y), lend(&x)]));
        }
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let mut args = [give(y), lend(&x)];
        for _ in 0..3 {
            let before = (
                rig.trees.view().path,
                rig.trees.counts().recordings,
                rig.trees.path_live(),
            );
            rig.device.fail(Call::LaunchGraph, 1, Code::LaunchFailed);
            let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
            let Err(Error::Device(error)) = result else {
                panic!("{result:?}")
            };
            assert_eq!(
                (error.call, error.code),
                (Call::LaunchGraph, Code::LaunchFailed)
            );
            let Arg::Give(y) = &args[0] else {
                panic!("not given back")
            };
            assert_eq!(rig.read(y), [2.0]);
            assert_eq!(
                before,
                (
                    rig.trees.view().path,
                    rig.trees.counts().recordings,
                    rig.trees.path_live()
                )
            );
            rig.trees.audit().unwrap();
        }
        drop((args, step));
        works_on(rig, &a, &f, x, !recorded);
    }
}

#[test]
fn memory_that_cannot_be_had() {
    for (call, record) in [(Call::Map, true), (Call::Map, false), (Call::Reserve, true)] {
        let rig = Rig::new(wrapped());
        let a = rig.scale_add("a", 1.0, 1.0);
        let big = rig.register(
            FunctionSpec::new("big").skip_warmup(),
            |k, rec, mut inputs| {
                let x = inputs.take(0)?;
                let y = k.apply(rec, &x, 2.0, 0.0)?;
                drop(x);
                let large = rec.alloc(32 << 20)?;
                k.kernels
                    .fill(rec.device(), rec.stream(), large.ptr()?, 1, 0.0)?;
                Ok(vec![k.apply(rec, &y, 1.0, 1.0)?])
            },
        );
        let x = rig.floats(&[1.0]);
        let run_a = |step: &_| rig.one(&a, step, &x);
        drop(run_a(&rig.trees.step()));
        if record {
            drop(run_a(&rig.trees.step()));
        }
        let step = rig.trees.step();
        let y = if record {
            run_a(&step)
        } else {
            // Below a warmup of another function: big is warmed up.
            rig.one(&rig.scale_add("w", 1.0, 1.0), &step, &x)
        };
        // The pool asks once more after a trim, where nothing captures.
        for nth in 1..=2 {
            rig.device.fail(call, nth, Code::OutOfMemory);
        }
        let mut args = [give(y), lend(&x)];
        let result = rig.trees.run(&big, &step, &[], &rig.stream, &mut args);
        rig.device.clear();
        let Err(Error::Function { source, .. }) = result else {
            panic!("{result:?}")
        };
        let Some(Error::Pool(PoolError::OutOfMemory { .. })) = source.downcast_ref() else {
            panic!("{source:?}")
        };
        if record {
            let Arg::Give(y) = &args[0] else {
                panic!("not given back")
            };
            assert_eq!(rig.read(y), [2.0]);
            let out = rig.call(&big, &step, &[], &mut args);
            assert_eq!((out.phase(), rig.read(&out[0])), (Record, vec![5.0]));
        }
        rig.trees.audit().unwrap();
        drop((args, step));
        for _ in 0..3 {
            let step = rig.trees.step();
            let y = rig.one(&a, &step, &x);
            let out = rig.call(&big, &step, &[], &mut [give(y), lend(&x)]);
            assert_eq!(rig.read(&out[0]), [5.0]);
        }
        drop(x);
        rig.finish();
    }
}

/// The place of a copied input cannot be had: nothing was given up, nothing is left.
#[test]
fn no_memory_for_a_copied_input() {
    for record in [false, true] {
        let rig = Rig::new(wrapped());
        let mut spec = FunctionSpec::new("f");
        if record {
            spec = spec.skip_warmup();
        }
        let f = rig.register(spec, |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(1)?, 2.0, 0.0)?])
        });
        let (x, large) = (
            rig.floats(&[1.0]),
            rig.allocator.alloc(&rig.stream, 24 << 20).unwrap(),
        );
        rig.put(&x, &[3.0]);
        let fill = vec![0u8; 24 << 20];
        large.write(&rig.device, &rig.stream, &fill).unwrap();
        let step = rig.trees.step();
        let mut args = [give(large), lend(&x)];
        rig.device
            .fail(Call::Map, 1, Code::OutOfMemory)
            .fail(Call::Map, 2, Code::OutOfMemory);
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
        rig.device.clear();
        assert!(
            matches!(result, Err(Error::Pool(PoolError::OutOfMemory { .. }))),
            "{result:?}"
        );
        assert!(matches!(&args[0], Arg::Give(t) if t.bytes() == 24 << 20));
        assert_eq!(rig.blocks(), 0);
        assert_eq!(
            rig.device.capture_status(&rig.stream),
            Ok(CaptureStatus::None)
        );
        let out = rig.call(&f, &step, &[], &mut args);
        assert_eq!(rig.read(&out[0]), [6.0]);
        drop((args, out));
        drop((step, x));
        rig.finish();
    }
}

/// Each call that a run makes fails once, in each phase: an error or an eager answer, and never anything left behind.
#[test]
fn each_call_of_a_run_fails_once() {
    let calls = [
        Call::Record,
        Call::Wait,
        Call::Gather,
        Call::BeginCapture,
        Call::EndCapture,
        Call::GraphInfo,
        Call::Instantiate,
        Call::LaunchGraph,
        Call::Launch,
        Call::Map,
        Call::Reserve,
        Call::CaptureStatus,
    ];
    for call in calls {
        for nth in 1..=3 {
            for runs_before in 0..=2 {
                let rig = Rig::new(wrapped());
                let a = rig.scale_add("a", 1.0, 1.0);
                let f = rig.scale_add("f", 2.0, 0.0);
                let x = rig.floats(&[1.0]);
                let second = rig.device.create_stream().unwrap();
                let run = |f: &Function, step: &_, stream, input: &Tensor<_>| {
                    rig.trees.run(f, step, &[], stream, &mut [lend(input)])
                };
                for _ in 0..runs_before {
                    let step = rig.trees.step();
                    let y = rig.one(&a, &step, &x);
                    drop(rig.one(&f, &step, &y));
                }
                rig.device.fail(call, nth, Code::Other(777));
                {
                    let step = rig.trees.step();
                    // On two streams, so that events order them.
                    let outcome = run(&a, &step, &rig.stream, &x).and_then(|y| {
                        let z = run(&f, &step, &second, &y[0])?;
                        Ok((y, z))
                    });
                    rig.device.clear();
                    match outcome {
                        Ok((y, z)) => {
                            assert_eq!(
                                z[0].read(&rig.device, &second).unwrap(),
                                4.0f32.to_le_bytes()
                            );
                            assert_eq!(rig.read(&y[0]), [2.0]);
                        }
                        Err(error) => {
                            let text = format!("{error} {error:?}");
                            assert!(
                                text.contains("777") || matches!(error, Error::Pool(_)),
                                "{text}"
                            );
                        }
                    }
                    rig.trees.audit().unwrap();
                    assert_eq!(rig.device.inner().counts().captures, 0);
                }
                for _ in 0..3 {
                    let step = rig.trees.step();
                    let y = run(&a, &step, &second, &x).unwrap();
                    let z = rig.one(&f, &step, &y[0]);
                    assert_eq!(rig.read(&z), [4.0], "after {call:?} {nth} {runs_before}");
                    rig.trees.audit().unwrap();
                }
                drop(x);
                rig.finish();
            }
        }
    }
}

#[test]
fn t3_02_a_hundred_panics_leave_nothing() {
    let device = HostDevice::new();
    let rig = Rig::new(device.clone());
    let before = device.counts();
    for (spec, inner) in [
        (FunctionSpec::new("w"), 1),
        (FunctionSpec::new("r").skip_warmup(), 2),
    ] {
        let f = rig.register(spec, |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            let large = rec.alloc(3 << 20)?;
            let y = k.apply(rec, &x, 2.0, 0.0)?;
            if inputs.len() == 1 {
                let _held = (large, y);
                std::panic::resume_unwind(Box::new(7u8));
            }
            Ok(vec![y])
        });
        let x = rig.floats(&[1.0]);
        let mut reserved = None;
        for _ in 0..100 {
            let step = rig.trees.step();
            let result = catch_unwind(AssertUnwindSafe(|| {
                rig.trees
                    .run(&f, &step, &[], &rig.stream, &mut [give(x.clone())])
            }));
            assert_eq!(result.unwrap_err().downcast_ref(), Some(&7u8));
            assert_eq!(rig.blocks(), 0);
            let now = rig.trees.pool_stats().reserved_bytes.current;
            assert_eq!(*reserved.get_or_insert(now), now);
        }
        assert_eq!(device.counts().captures, 0);
        // The function works if it is called otherwise.
        for _ in 0..3 {
            let step = rig.trees.step();
            let out = rig.run(&f, &step, &[&x, &x]);
            assert_eq!(rig.read(&out[0]), [2.0]);
        }
        assert_eq!(rig.trees.counts().recordings, inner);
    }
    let Rig {
        trees,
        allocator,
        stream,
        ..
    } = rig;
    drop(trees);
    device.synchronize(&stream).unwrap();
    allocator.trim().unwrap();
    let after = device.counts();
    assert_eq!(
        (
            after.mapped_bytes,
            after.mapped_ranges,
            after.reserved_ranges
        ),
        (
            before.mapped_bytes,
            before.mapped_ranges,
            before.reserved_ranges
        )
    );
    assert_eq!((after.captures, after.graphs, after.execs), (0, 0, 0));
}
