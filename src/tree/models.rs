//! Models of a tree's lock under loom: runs, closures and ends of a tree on one thread, handles, tokens and functions that go on another.
//!
//! Everything here is what runs otherwise, over the simulated device. Most models first warm up and record, alone, and then race.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::generation::Generations;
use super::{Function, FunctionSpec, GraphTrees, OnOverwrite, Outputs, Step, give, lend};
use crate::allocator::Allocator;
use crate::device::Device;
use crate::device::host::HostDevice;
use crate::device::kernels::KernelSet;
use crate::error::{Error, Phase, Result};
use crate::storage::Tensor;
use crate::sync::{Mutex, lock, model, thread};

type Handle = Tensor<HostDevice>;

#[derive(Clone)]
struct Rig {
    device: HostDevice,
    allocator: Allocator<HostDevice>,
    kernels: Arc<KernelSet<HostDevice>>,
    stream: <HostDevice as Device>::Stream,
    trees: GraphTrees<HostDevice>,
}

impl Rig {
    fn new() -> Self {
        let device = HostDevice::new();
        let allocator = Allocator::new(device.clone()).unwrap();
        Rig {
            kernels: Arc::new(KernelSet::load(&device).unwrap()),
            stream: device.create_stream().unwrap(),
            trees: GraphTrees::new(&allocator).unwrap(),
            device,
            allocator,
        }
    }

    fn floats(&self, value: f32) -> Handle {
        let tensor = self.allocator.alloc(&self.stream, 4).unwrap();
        let bytes = value.to_le_bytes();
        tensor.write(&self.device, &self.stream, &bytes).unwrap();
        tensor
    }

    fn read(&self, tensor: &Handle) -> f32 {
        let bytes = tensor.read(&self.device, &self.stream).unwrap();
        f32::from_le_bytes(bytes.try_into().unwrap())
    }

    /// Registers a function that calls `inside`, and then gives its input plus one. The input dies inside, if it was given.
    fn plus_one_after(
        &self,
        spec: FunctionSpec<HostDevice>,
        inside: impl Fn() + Send + Sync + 'static,
    ) -> Function {
        let kernels = self.kernels.clone();
        self.trees
            .register(spec, move |rec, mut inputs| {
                inside();
                let x = inputs.take(0)?;
                let out = rec.alloc(x.bytes())?;
                let (to, from) = (out.ptr()?, x.ptr()?);
                kernels.scale_add(rec.device(), rec.stream(), to, from, 1, 1.0, 1.0)?;
                Ok(vec![out])
            })
            .unwrap()
    }

    fn plus_one(&self, name: &str) -> Function {
        self.plus_one_after(FunctionSpec::new(name), || {})
    }

    fn try_run(&self, f: &Function, step: &Step, x: &Handle) -> Result<Outputs<HostDevice>> {
        self.trees.run(f, step, &[], &self.stream, &mut [lend(x)])
    }

    fn run(&self, f: &Function, step: &Step, x: &Handle, phase: Phase) -> Handle {
        let outputs = self.try_run(f, step, x).unwrap();
        assert_eq!(outputs.phase(), phase);
        outputs.only().unwrap()
    }

    /// Warms a function up and records it, each in a step of its own.
    fn warm(&self, f: &Function, x: &Handle) {
        for phase in [Phase::Warmup, Phase::Record] {
            self.run(f, &self.trees.step(), x, phase);
        }
    }

    /// The books are exact or can be made so, and when the tree is gone, nothing of its pool is live.
    fn finish(self) {
        self.trees.audit().unwrap();
        self.trees.shutdown().unwrap();
        assert_eq!(self.trees.pool_stats().live_blocks.current, 0);
    }
}

/// Each waits while the other's closure runs, and is woken.
#[test]
fn two_threads_run_one_function() {
    model(|| {
        let rig = Rig::new();
        let inside = Arc::new(AtomicUsize::new(0));
        let entered = inside.clone();
        let f = rig.plus_one_after(FunctionSpec::new("f").static_input(0), move || {
            assert_eq!(entered.fetch_add(1, Ordering::Relaxed), 0);
            thread::yield_now();
            assert_eq!(entered.fetch_sub(1, Ordering::Relaxed), 1);
        });
        let x = rig.floats(1.0);
        let other = {
            let (rig, f, x) = (rig.clone(), f.clone(), x.clone());
            thread::spawn(move || {
                let step = rig.trees.step();
                let y = rig.try_run(&f, &step, &x).unwrap();
                assert!(y[0].is_current());
                y[0].clone()
            })
        };
        let step = rig.trees.step();
        let y = rig.try_run(&f, &step, &x).unwrap();
        assert_eq!(rig.read(&y[0]), 2.0);
        let its = other.join().unwrap();
        drop((y, its, step));
        let counts = rig.trees.counts();
        assert_eq!((counts.warmups, counts.recordings), (1, 1));
        assert_eq!(inside.load(Ordering::Relaxed), 0);
        rig.finish();
    });
}

/// A nested run is refused, whoever waits meanwhile; and who waits runs afterwards.
#[test]
fn a_nested_run_is_refused_while_another_thread_waits() {
    model(|| {
        let rig = Rig::new();
        let inner = rig.plus_one("inner");
        let x = rig.floats(1.0);
        let nested = {
            let (rig, inner, x) = (rig.clone(), inner.clone(), x.clone());
            // The tree is not to keep itself alive through its closure.
            let slot = Mutex::new(Some((rig, inner, x)));
            move || {
                let Some((rig, inner, x)) = lock(&slot).take() else {
                    return;
                };
                let step = rig.trees.step();
                let refused = rig.try_run(&inner, &step, &x);
                assert!(matches!(refused, Err(Error::Nested { .. })));
            }
        };
        let outer = rig.plus_one_after(FunctionSpec::new("outer"), nested);
        let other = {
            let (rig, x) = (rig.clone(), x.clone());
            thread::spawn(move || {
                let step = rig.trees.step();
                drop(rig.run(&inner, &step, &x, Phase::Warmup));
            })
        };
        let step = rig.trees.step();
        drop(rig.run(&outer, &step, &x, Phase::Warmup));
        drop(step);
        other.join().unwrap();
        rig.finish();
    });
}

/// The node is replayed again while the handle on its last output goes: with its token open that goes on being held, or is seen dead.
#[test]
fn a_node_is_replayed_while_its_last_output_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let f = rig.plus_one("f");
        let x = rig.floats(1.0);
        rig.warm(&f, &x);
        let step = rig.trees.step();
        let old = rig.run(&f, &step, &x, Phase::Replay);
        let other = thread::spawn(move || {
            let twin = old.clone();
            drop(old);
            drop(step);
            drop(twin);
        });
        let step = rig.trees.step();
        let new = rig.try_run(&f, &step, &x).unwrap().only().unwrap();
        other.join().unwrap();
        assert!(new.is_current());
        assert_eq!(rig.read(&new), 2.0);
        assert_eq!(rig.trees.path_live(), 1);
        drop((new, step));
        assert_eq!(rig.trees.path_live(), 0);
        rig.finish();
    });
}

/// The token is gone already: the other thread's handle goes stale under it, or is gone before.
#[test]
fn a_step_ends_while_its_output_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let f = rig.plus_one("f");
        let x = rig.floats(1.0);
        rig.warm(&f, &x);
        let step = rig.trees.step();
        let old = rig.run(&f, &step, &x, Phase::Replay);
        let weak = old.downgrade();
        drop(step);
        let other = thread::spawn(move || {
            drop(weak.upgrade());
            match old.view(0, 4) {
                Ok(view) => drop(view),
                Err(Error::Stale(stale)) => assert_eq!(stale.taken_by.as_deref(), Some("f")),
                Err(other) => panic!("{other}"),
            }
        });
        let step = rig.trees.step();
        let new = rig.run(&f, &step, &x, Phase::Replay);
        other.join().unwrap();
        assert_eq!(rig.read(&new), 2.0);
        assert_eq!(rig.trees.path_live(), 1);
        drop((new, step));
        rig.finish();
    });
}

/// Where old values are kept, what another thread reads is the old value, from wherever it lies.
#[test]
fn an_output_moves_out_while_it_is_read() {
    model(|| {
        let rig = Rig::new();
        rig.trees.on_overwrite(OnOverwrite::Copy);
        let f = rig.plus_one("f");
        let (x, later) = (rig.floats(1.0), rig.floats(5.0));
        rig.warm(&f, &x);
        let old = rig.run(&f, &rig.trees.step(), &x, Phase::Replay);
        let other = {
            let rig = rig.clone();
            thread::spawn(move || {
                assert_eq!(rig.read(&old), 2.0);
                old
            })
        };
        let step = rig.trees.step();
        let new = rig.run(&f, &step, &later, Phase::Replay);
        let old = other.join().unwrap();
        assert_eq!((rig.read(&old), rig.read(&new)), (2.0, 6.0));
        drop((old, new, step));
        rig.finish();
    });
}

/// What another thread writes moves with it, or goes to where it has moved: never over the run's own output.
#[test]
fn an_output_moves_out_while_it_is_written() {
    model(|| {
        let rig = Rig::new();
        rig.trees.on_overwrite(OnOverwrite::Copy);
        let f = rig.plus_one("f");
        let (x, later) = (rig.floats(1.0), rig.floats(5.0));
        rig.warm(&f, &x);
        let old = rig.run(&f, &rig.trees.step(), &x, Phase::Replay);
        let other = {
            let rig = rig.clone();
            thread::spawn(move || {
                let bytes = 9.0f32.to_le_bytes();
                old.write(&rig.device, &rig.stream, &bytes).unwrap();
                old
            })
        };
        let step = rig.trees.step();
        let new = rig.run(&f, &step, &later, Phase::Replay);
        let old = other.join().unwrap();
        assert_eq!((rig.read(&old), rig.read(&new)), (9.0, 6.0));
        drop((old, new, step));
        rig.finish();
    });
}

/// Where old values go stale, what another thread writes comes before the run, or is refused.
#[test]
fn an_output_goes_stale_while_it_is_written() {
    model(|| {
        let rig = Rig::new();
        let f = rig.plus_one("f");
        let (x, later) = (rig.floats(1.0), rig.floats(5.0));
        rig.warm(&f, &x);
        let old = rig.run(&f, &rig.trees.step(), &x, Phase::Replay);
        let other = {
            let rig = rig.clone();
            thread::spawn(move || {
                let bytes = 9.0f32.to_le_bytes();
                let wrote = old.write(&rig.device, &rig.stream, &bytes);
                assert!(matches!(wrote, Ok(()) | Err(Error::Stale(_))), "{wrote:?}");
            })
        };
        let step = rig.trees.step();
        let new = rig.try_run(&f, &step, &later).unwrap();
        other.join().unwrap();
        assert_eq!(rig.read(&new[0]), 6.0);
        drop((new, step));
        rig.finish();
    });
}

/// What a replay consumes is taken from this call alone; if somebody comes to hold it, it is left to them.
#[test]
fn a_replay_consumes_what_a_weak_handle_is_upgraded_to() {
    model(|| {
        let rig = Rig::new();
        let (f, g) = (rig.plus_one("f"), rig.plus_one("g"));
        let x = rig.floats(1.0);
        let chain = |step: &Step, y: Handle| {
            let mut args = [give(y)];
            let outputs = rig.trees.run(&g, step, &[], &rig.stream, &mut args);
            outputs.unwrap()
        };
        for phase in [Phase::Warmup, Phase::Record] {
            let step = rig.trees.step();
            let y = rig.run(&f, &step, &x, phase);
            assert_eq!(chain(&step, y).phase(), phase);
        }
        let step = rig.trees.step();
        let y = rig.run(&f, &step, &x, Phase::Replay);
        let weak = y.downgrade();
        let other = thread::spawn(move || weak.upgrade());
        let z = chain(&step, y);
        let kept = other.join().unwrap();
        assert_eq!(rig.read(&z[0]), 3.0);
        match kept {
            Some(kept) => assert_eq!(rig.read(&kept), 2.0, "held, so not written over"),
            None => assert_eq!(z.phase(), Phase::Replay),
        }
        drop((z, step));
        assert_eq!(rig.trees.path_live(), 0);
        rig.finish();
    });
}

/// A handle that is dropped while a closure runs frees its memory when the closure has ended, or before it began.
#[test]
fn a_handle_is_dropped_while_a_closure_runs() {
    model(|| {
        let rig = Rig::new();
        let f = rig.plus_one("f");
        let x = rig.floats(1.0);
        let step = rig.trees.step();
        let y = rig.run(&f, &step, &x, Phase::Warmup);
        let z = rig.run(&f, &step, &y, Phase::Warmup);
        let other = thread::spawn(move || drop(y));
        let w = rig.run(&f, &step, &z, Phase::Warmup);
        other.join().unwrap();
        assert_eq!((rig.read(&z), rig.read(&w)), (3.0, 4.0));
        assert_eq!(rig.trees.path_live(), 2);
        assert_eq!(rig.trees.pool_stats().live_blocks.current, 2);
        drop((z, w, step));
        rig.finish();
    });
}

/// Its recordings go at once, or at the end of the run whose closure is running; and its closure with them.
#[test]
fn a_function_is_dropped_while_another_runs() {
    model(|| {
        let rig = Rig::new();
        let kept = Arc::new(());
        let held = kept.clone();
        let f = rig.plus_one_after(FunctionSpec::new("f"), move || {
            let _ = &held;
        });
        let g = rig.plus_one("g");
        let x = rig.floats(1.0);
        rig.warm(&f, &x);
        let other = thread::spawn(move || drop(f));
        let y = rig.run(&g, &rig.trees.step(), &x, Phase::Warmup);
        other.join().unwrap();
        assert_eq!(rig.read(&y), 2.0);
        assert_eq!(Arc::strong_count(&kept), 1, "the closure is gone");
        assert_eq!(rig.trees.view().nodes.len(), 0);
        drop(y);
        rig.finish();
    });
}

/// Two deaths, each on its thread, that a run is to hear of: whichever it comes between, none is forgotten.
#[test]
fn static_inputs_die_while_a_run_tidies_up() {
    model(|| {
        let rig = Rig::new();
        let f = rig.plus_one_after(FunctionSpec::new("f").static_input(0), || {});
        let g = rig.plus_one("g");
        let (a, b, x) = (rig.floats(1.0), rig.floats(2.0), rig.floats(3.0));
        rig.run(&f, &rig.trees.step(), &a, Phase::Warmup);
        for input in [&a, &b] {
            rig.run(&f, &rig.trees.step(), input, Phase::Record);
        }
        rig.warm(&g, &x);
        let others = [a, b].map(|input| thread::spawn(move || drop(input)));
        rig.run(&g, &rig.trees.step(), &x, Phase::Replay);
        others.into_iter().for_each(|other| other.join().unwrap());
        rig.run(&g, &rig.trees.step(), &x, Phase::Replay);
        assert_eq!(rig.trees.view().nodes.len(), 1, "that of g");
        rig.finish();
    });
}

/// A run comes before the end of its tree, or is refused.
#[test]
fn a_tree_is_shut_down_while_another_thread_runs() {
    model(|| {
        let rig = Rig::new();
        let f = rig.plus_one("f");
        let x = rig.floats(1.0);
        let other = {
            let rig = rig.clone();
            thread::spawn(move || rig.trees.shutdown().unwrap())
        };
        let step = rig.trees.step();
        match rig.try_run(&f, &step, &x) {
            Ok(y) => {
                other.join().unwrap();
                assert_eq!(rig.read(&y[0]), 2.0);
                assert_eq!(rig.trees.pool_stats().live_blocks.current, 1);
            }
            Err(error) => {
                assert!(matches!(error, Error::ShutDown));
                other.join().unwrap();
            }
        }
        rig.finish();
    });
}

/// A token's place in the ring is freed while the next one that is to have it is opened: wherever it comes to stand, it is open until it is dropped.
#[test]
fn a_token_is_dropped_while_its_place_is_asked_for() {
    model(|| {
        let generations = Generations::new();
        let first = generations.open();
        let between: Vec<Step> = (1..super::generation::RING)
            .map(|_| generations.open())
            .collect();
        let other = thread::spawn(move || drop(first));
        let next = generations.open();
        let number = next.number();
        assert!(generations.is_open(number));
        other.join().unwrap();
        assert!(generations.is_open(number) && !generations.is_open(0));
        assert!(
            between
                .iter()
                .all(|step| generations.is_open(step.number()))
        );
        assert_eq!(generations.ended(), 1);
        drop(next);
        assert!(!generations.is_open(number));
        drop(between);
    });
}

/// Who has heard that a token was dropped sees which.
#[test]
fn who_sees_an_end_sees_whose_it_was() {
    model(|| {
        let generations = Generations::new();
        let (first, second) = (generations.open(), generations.open());
        let other = thread::spawn(move || drop(first));
        let ended = generations.ended();
        let open = generations.is_open(0);
        assert!(ended == 0 || !open);
        assert!(generations.is_open(1));
        other.join().unwrap();
        assert_eq!((generations.ended(), generations.is_open(0)), (1, false));
        drop(second);
    });
}

/// A token that is dropped while a run ends and copies out what ended before is the next run's: what it held goes stale at no time.
#[test]
fn a_token_is_dropped_while_old_values_are_kept() {
    model(|| {
        let rig = Rig::new();
        rig.trees.on_overwrite(OnOverwrite::Copy);
        let f = rig.plus_one("f");
        let x = rig.floats(1.0);
        // Three deep: whatever the run finds, it replays.
        for _ in 0..4 {
            let step = rig.trees.step();
            let held = [(); 3].map(|()| rig.try_run(&f, &step, &x).unwrap());
            drop(held);
        }
        let (ended, token) = (rig.trees.step(), rig.trees.step());
        let older = rig.run(&f, &ended, &x, Phase::Replay);
        let old = rig.run(&f, &token, &x, Phase::Replay);
        // This one the run copies out.
        drop(ended);
        let other = thread::spawn(move || drop(token));
        let step = rig.trees.step();
        let new = rig.try_run(&f, &step, &x).unwrap();
        other.join().unwrap();
        let values = [&older, &old, &new[0]].map(|tensor| rig.read(tensor));
        assert_eq!(values, [2.0; 3]);
        drop((older, old, new, step));
        rig.finish();
    });
}

/// The books are right at any time: a handle that is being dropped has given its block back before the tree knows, and that is no fault of theirs.
#[test]
fn the_books_are_compared_while_an_output_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let f = rig.plus_one_after(FunctionSpec::new("f").skip_warmup(), || {});
        let x = rig.floats(1.0);
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &x, Phase::Record);
        let other = thread::spawn(move || drop(out));
        rig.trees.audit().unwrap();
        other.join().unwrap();
        rig.trees.audit().unwrap();
        drop(step);
        rig.finish();
    });
}
