//! Code of the caller's that a run drops or asks: keepers of imported memory, host values, errors, closures. None of it runs under a lock of ours, so it may
//! call the tree.

mod common;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{Rig, Toy};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Code, Device, DeviceError};
use cudagraph_trees::pool::{Backing, BackingError};
use cudagraph_trees::{
    Error, Function, FunctionSpec, Graph, GraphTrees, Phase, PoolOptions, Tensor, give, lend,
};

suite!(
    a_given_inputs_keeper_drops_the_last_clone_of_a_function,
    a_given_inputs_keeper_runs_a_function,
    a_given_inputs_keeper_trims,
    what_a_closure_returned_is_dropped_without_the_lock_where_the_run_fails,
    an_error_of_the_closure_may_ask_the_tree,
    a_closure_that_chooses_keys_may_ask_the_tree,
    a_closure_that_chooses_keys_panics,
    a_bound_tensors_keeper_runs_a_function,
);

use Phase::{Eager, Inline, Record, Replay, Warmup};

/// Does something when it is dropped.
struct Keeper(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Keeper {
    fn new(then: impl FnOnce() + Send + 'static) -> Self {
        Keeper(Mutex::new(Some(Box::new(then))))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let then = self.0.lock().unwrap().take();
        then.into_iter().for_each(|then| then());
    }
}

/// The tensor's memory once more, imported; and what its keeper is to do, which may be taken out.
fn kept<D: Device>(
    rig: &Rig<D>,
    tensor: Tensor<D>,
    then: impl FnOnce() + Send + 'static,
) -> Tensor<D> {
    let (ptr, bytes) = (tensor.ptr().unwrap(), tensor.bytes());
    let keeper = Keeper::new(move || {
        drop(tensor);
        then();
    });
    rig.allocator.import(ptr, bytes, keeper)
}

/// Gives a function an input whose keeper does what `then` makes, in every phase but inside a capture: in which, and what it said.
fn in_each_phase<D: Device, T: Send + 'static>(
    rig: &Rig<D>,
    then: impl Fn(&Rig<D>) -> Box<dyn FnOnce() -> T + Send>,
) -> Vec<(Phase, T)> {
    let captured = rig.scale_add("captured", 2.0, 1.0);
    let spec = FunctionSpec::new("eager").capture_keys([]);
    let eager = rig.register(spec, |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        Ok(vec![k.apply(rec, &x, 2.0, 1.0)?])
    });
    let mut said = Vec::new();
    for f in [&captured, &captured, &captured, &captured, &eager] {
        let heard = Arc::new(Mutex::new(None));
        let (says, then) = (heard.clone(), then(rig));
        let x = kept(rig, rig.floats(&[3.0; 4]), move || {
            *says.lock().unwrap() = Some(then());
        });
        let step = rig.trees.step();
        let (phase, out) = rig.moved(f, &step, x);
        // By the run's end.
        let heard = heard.lock().unwrap().take();
        said.push((phase, heard.expect("the keeper was dropped in the run")));
        // The next step's run may take the place of this output: it is read before.
        assert_eq!(rig.read(&out), [7.0; 4], "{phase}");
        rig.trees.audit().unwrap();
    }
    said
}

/// The same inside a capture: there the tree keeps what it was given.
fn in_a_capture<D: Device>(rig: &Rig<D>, then: impl FnOnce() + Send + 'static) {
    let f = rig.scale_add("inline", 2.0, 1.0);
    let x = kept(rig, rig.floats(&[3.0; 4]), then);
    rig.device.synchronize(&rig.stream).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let (phase, out) = rig.moved(&f, &rig.trees.step(), x);
    assert_eq!(phase, Inline);
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&out), [7.0; 4]);
}

fn a_given_inputs_keeper_drops_the_last_clone_of_a_function<D: Device>(rig: Rig<D>) {
    let said = in_each_phase(&rig, |rig| {
        let g = rig.scale_add("g", 1.0, 0.0);
        let x = rig.floats(&[1.0; 4]);
        // Recorded, so that there is something to remove.
        for phase in [Warmup, Record] {
            assert_eq!(rig.phased(&g, &rig.trees.step(), &x).0, phase);
        }
        Box::new(move || drop(g))
    });
    let phases: Vec<Phase> = said.into_iter().map(|(phase, ())| phase).collect();
    assert_eq!(phases, [Warmup, Record, Replay, Replay, Eager]);
    // Nothing of any `g` is left.
    assert_eq!(rig.nodes(), "");
    let g = rig.scale_add("g", 1.0, 0.0);
    in_a_capture(&rig, move || drop(g));
    rig.finish();
}

fn a_given_inputs_keeper_runs_a_function<D: Device>(rig: Rig<D>) {
    let g = rig.scale_add("g", 10.0, 0.0);
    let y = rig.floats(&[1.0; 4]);
    let said = in_each_phase(&rig, |rig| {
        let (trees, stream) = (rig.trees.clone(), rig.stream.clone());
        let (g, y) = (g.clone(), y.clone());
        Box::new(move || run_alone(&trees, &g, &stream, &y))
    });
    let mut said = said.into_iter();
    for phase in [Warmup, Record, Replay, Replay] {
        let (went, inner) = said.next().unwrap();
        assert_eq!(went, phase);
        let bytes = inner.unwrap().read(&rig.device, &rig.stream);
        // Its step is over: whether the next run took the memory is not the point here.
        assert!(matches!(bytes, Ok(_) | Err(Error::Stale(_))), "{bytes:?}");
    }
    // An eager run's closure has the input itself, and so the keeper goes inside.
    let (went, inner) = said.next().unwrap();
    assert_eq!(went, Eager);
    assert!(matches!(inner, Err(Error::Nested { function }) if &*function == "g"));
    drop((g, y));
    rig.finish();
}

fn run_alone<D: Device>(
    trees: &GraphTrees<D>,
    function: &Function,
    stream: &D::Stream,
    x: &Tensor<D>,
) -> Result<Tensor<D>, Error> {
    let outputs = trees.run(function, &trees.step(), &[], stream, &mut [lend(x)])?;
    Ok(outputs.only().unwrap())
}

fn a_given_inputs_keeper_trims<D: Device>(rig: Rig<D>) {
    let said = in_each_phase(&rig, |rig| {
        let allocator = rig.allocator.clone();
        Box::new(move || allocator.trim().map(drop))
    });
    for (phase, trimmed) in said {
        assert!(trimmed.is_ok(), "{phase}: {trimmed:?}");
    }
    let allocator = rig.allocator.clone();
    in_a_capture(&rig, move || {
        allocator.trim().unwrap();
    });
    rig.finish();
}

/// Outputs and values that come to nothing: because the closure kept memory of the pool, because it discarded its recording.
fn what_a_closure_returned_is_dropped_without_the_lock_where_the_run_fails<D: Device>(rig: Rig<D>) {
    for phase in [Warmup, Record] {
        for fails in [true, false] {
            let dropped = Arc::new(AtomicUsize::new(0));
            let (allocator, trees, counts) =
                (rig.allocator.clone(), rig.trees.clone(), dropped.clone());
            let kept = Arc::new(Mutex::new(Vec::new()));
            let keeps = kept.clone();
            let trouble = Arc::new(AtomicUsize::new(0));
            let troubled = trouble.clone();
            let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
                let out = k.apply(rec, inputs.get(0)?, 1.0, 1.0)?;
                if rec.phase() != phase || troubled.load(Ordering::Relaxed) == 0 {
                    return Ok(vec![out]);
                }
                let says = |counts: Arc<AtomicUsize>, trees: GraphTrees<D>| {
                    Keeper::new(move || {
                        let _asked = trees.counts();
                        counts.fetch_add(1, Ordering::Relaxed);
                    })
                };
                let mine = allocator.import(
                    inputs.get(0)?.ptr()?,
                    16,
                    says(counts.clone(), trees.clone()),
                );
                rec.return_value(Arc::new(says(counts.clone(), trees.clone())));
                if fails {
                    keeps.lock().unwrap().push(rec.alloc(64)?);
                } else {
                    rec.discard_recording();
                }
                Ok(vec![out, mine])
            });
            let x = rig.floats(&[1.0; 4]);
            let run = || {
                let step = rig.trees.step();
                rig.trees
                    .run(&f, &step, &[], &rig.stream, &mut [lend(&x)])
                    .map(|outputs| outputs.phase())
            };
            if phase == Record {
                assert_eq!(run().unwrap(), Warmup);
            }
            trouble.store(1, Ordering::Relaxed);
            let went = run();
            match (phase, fails) {
                (_, true) => assert!(matches!(went, Err(Error::Untracked { .. })), "{went:?}"),
                (Warmup, false) => assert_eq!(went.unwrap(), Warmup),
                _ => assert_eq!(went.unwrap(), Eager),
            }
            assert_eq!(dropped.load(Ordering::Relaxed), 2, "{phase}, {fails}");
            kept.lock().unwrap().clear();
            rig.trees.audit().unwrap();
            // The closure has the tree: without this, each keeps the other.
            rig.trees.invalidate(&f).unwrap();
            drop(f);
        }
    }
    rig.finish();
}

/// An error that asks its tree whatever is done with it.
struct Nosy<D: Device> {
    trees: GraphTrees<D>,
    asked: Arc<AtomicUsize>,
    source: DeviceError,
}

impl<D: Device> Nosy<D> {
    fn ask(&self) {
        let _asked = self.trees.counts();
        self.asked.fetch_add(1, Ordering::Relaxed);
    }
}

impl<D: Device> fmt::Debug for Nosy<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nosy")
    }
}

impl<D: Device> fmt::Display for Nosy<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ask();
        f.write_str("nosy")
    }
}

impl<D: Device> std::error::Error for Nosy<D> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.ask();
        Some(&self.source)
    }
}

impl<D: Device> Drop for Nosy<D> {
    fn drop(&mut self) {
        self.ask();
    }
}

fn an_error_of_the_closure_may_ask_the_tree<D: Device>(rig: Rig<D>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let (trees, counts) = (rig.trees.clone(), asked.clone());
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        if rec.phase() == Record {
            let call = cudagraph_trees::device::Call::Synchronize;
            let source = DeviceError::new(call, Code::StreamCaptureUnsupported, "refused");
            return Err(Box::new(Nosy {
                trees: trees.clone(),
                asked: counts.clone(),
                source,
            }));
        }
        Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 1.0)?])
    });
    let x = rig.floats(&[1.0; 4]);
    let mut phases = Vec::new();
    for _ in 0..3 {
        let (phase, out) = rig.phased(&f, &rig.trees.step(), &x);
        assert_eq!(rig.read(&out), [2.0; 4]);
        phases.push(phase);
    }
    assert_eq!(phases, [Warmup, Eager, Eager]);
    let before = asked.load(Ordering::Relaxed);
    assert!(before > 0);
    // In words, and the words only: the error itself is gone.
    let failure = rig.trees.last_failure().unwrap();
    assert!(
        failure.starts_with("f failed during its recording: nosy"),
        "{failure}"
    );
    assert_eq!(asked.load(Ordering::Relaxed), before);
    drop((f, x));
    rig.finish();
}

fn a_closure_that_chooses_keys_may_ask_the_tree<D: Device>(rig: Rig<D>) {
    let inner = rig.scale_add("inner", 1.0, 0.0);
    let x = rig.floats(&[1.0; 4]);
    let (trees, stream) = (rig.trees.clone(), rig.stream.clone());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (g, y, says) = (inner.clone(), x.clone(), asked.clone());
    let spec = FunctionSpec::new("f").capture_if(move |key| {
        let _asked = trees.counts();
        let nested = run_alone(&trees, &g, &stream, &y);
        let nested = matches!(nested, Err(Error::Nested { .. }));
        says.lock().unwrap().push((key[0], nested));
        key[0] > 0
    });
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 1.0)?])
    });
    let mut phases = Vec::new();
    for key in [0, 1, 0, 1, 1] {
        let out = rig.call(&f, &rig.trees.step(), &[key], &mut [lend(&x)]);
        phases.push(out.phase());
    }
    assert_eq!(phases, [Eager, Warmup, Eager, Record, Replay]);
    assert_eq!(*asked.lock().unwrap(), [(0, true), (1, true)]);
    drop((f, inner, x));
    rig.finish();
}

fn a_closure_that_chooses_keys_panics<D: Device>(rig: Rig<D>) {
    let panics = Arc::new(AtomicUsize::new(1));
    let told = panics.clone();
    let spec = FunctionSpec::new("f").capture_if(move |_| {
        if told.swap(0, Ordering::Relaxed) == 1 {
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        true
    });
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 1.0)?])
    });
    let x = rig.floats(&[1.0; 4]);
    let run = || rig.phased(&f, &rig.trees.step(), &x).0;
    let panicked = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    assert_eq!(panicked.downcast_ref(), Some(&"on purpose"));
    assert_eq!([run(), run(), run()], [Warmup, Record, Replay]);
    drop((f, x));
    rig.finish();
}

/// The last handle but the run's own goes while the closure runs.
fn a_bound_tensors_keeper_runs_a_function<D: Device>(rig: Rig<D>) {
    for doomed in [Warmup, Record] {
        let g = rig.scale_add("g", 10.0, 0.0);
        let x = rig.floats(&[1.0; 4]);
        let heard = Arc::new(Mutex::new(None));
        let (says, trees, stream, y) = (
            heard.clone(),
            rig.trees.clone(),
            rig.stream.clone(),
            x.clone(),
        );
        let bound = kept(&rig, rig.floats(&[5.0; 4]), move || {
            let inner = run_alone(&trees, &g, &stream, &y);
            *says.lock().unwrap() = Some(inner.map(drop));
        });
        let holder = Arc::new(Mutex::new(None));
        let spec = FunctionSpec::new("f").bind(1, &bound);
        let lets_go = holder.clone();
        let f = rig.register(spec, move |k, rec, mut inputs| {
            let weight = inputs.take(1)?;
            let out = k.sum(rec, inputs.get(0)?, &weight)?;
            if rec.phase() == doomed {
                drop((weight, lets_go.lock().unwrap().take()));
            }
            Ok(vec![out])
        });
        *holder.lock().unwrap() = Some(bound);
        for phase in [Warmup, Record] {
            let (went, out) = rig.phased(&f, &rig.trees.step(), &x);
            assert_eq!((went, rig.read(&out)), (phase, vec![6.0; 4]));
            if phase == doomed {
                break;
            }
        }
        let inner = heard.lock().unwrap().take();
        assert!(matches!(inner, Some(Ok(()))), "{doomed}: {inner:?}");
        let step = rig.trees.step();
        let died = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
        assert!(matches!(died, Err(Error::StaticDied { input: 1, .. })));
    }
    rig.finish();
}

/// A backing that lives on memory of the same allocator, and lets go of it when it is dropped.
struct Carved<D: Device> {
    toy: Toy,
    _memory: Tensor<D>,
}

impl<D: Device> Backing for Carved<D> {
    fn reserve(&mut self, bytes: u64) -> Result<u64, BackingError> {
        self.toy.reserve(bytes)
    }

    fn map(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        self.toy.map(address, bytes)
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        self.toy.unmap(address, bytes)
    }

    fn release(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        self.toy.release(address, bytes)
    }
}

#[test]
fn a_backing_that_owns_a_tensor_is_dropped_without_the_allocators_lock() {
    let rig = Rig::new(HostDevice::new());
    for used in [false, true] {
        let backing = Carved {
            toy: Toy::new().0,
            _memory: rig.floats(&[1.0; 4]),
        };
        let options = PoolOptions {
            backing: Some(Box::new(backing)),
            ..PoolOptions::default()
        };
        let pool = rig.allocator.create_pool(options).unwrap();
        if used {
            drop(pool.alloc(&rig.stream, 64).unwrap());
        }
        assert_eq!(rig.allocator.stats().live_blocks.current, 1);
        drop(pool);
        rig.allocator.trim().unwrap();
        assert_eq!(rig.allocator.stats().live_blocks.current, 0, "{used}");
    }
    rig.finish();
}

#[test]
fn given_twice_and_given_to_a_run_that_fails() {
    let rig = Rig::new(HostDevice::new());
    let f = rig.scale_add("f", 1.0, 0.0);
    let dropped = Arc::new(AtomicUsize::new(0));
    let counts = dropped.clone();
    let x = kept(&rig, rig.floats(&[1.0; 4]), move || {
        counts.fetch_add(1, Ordering::Relaxed);
    });
    // One input too many for the closure is no error; a second handle keeps the memory until both are given up.
    let mut args = [give(x.clone()), give(x)];
    let out = rig.call(&f, &rig.trees.step(), &[], &mut args);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    drop((args, out));
    let counts = dropped.clone();
    let y = kept(&rig, rig.floats(&[1.0; 4]), move || {
        counts.fetch_add(1, Ordering::Relaxed);
    });
    rig.trees
        .refuse(&[cudagraph_trees::ReasonKind::FirstRecording]);
    let mut args = [give(y.clone()), give(y)];
    let step = rig.trees.step();
    let refused = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert!(args.iter().all(|arg| arg.is_given()));
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    drop((args, step));
    assert_eq!(dropped.load(Ordering::Relaxed), 2);
    rig.finish();
}
