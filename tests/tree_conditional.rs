//! Ifs of functions (CAP-15, T3-06): a body runs or not at each run, whatever the phase, by the byte as it is then; what it allocates, what fails in it, and what is left of that.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use common::{Ops, Rig, wrapped};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, Code, Device};
use cudagraph_trees::pool::PoolError;
use cudagraph_trees::{
    BoxError, Error, Function, FunctionSpec, Generator, Graph, Phase, ReasonKind, Recorder, Tensor,
    give, lend,
};

suite!(
    cap_15_every_phase_obeys_the_byte,
    cap_15_forty_ifs_in_one_function,
    cap_15_forty_functions_with_an_if,
    an_eager_run_calls_no_body_that_is_not_to_run,
    inside_a_capture_of_the_callers,
    nested_in_every_phase,
    on_a_fork,
    the_byte_is_computed_by_the_function,
    memory_of_a_body,
    a_given_input_dies_in_a_body,
    state_that_is_made_in_a_body,
    draws_of_a_body,
    copies_of_pinned_memory_in_a_body,
    what_a_body_says,
    an_error_of_a_body,
    an_error_of_an_inner_body,
    a_panic_of_a_body,
    t3_06_a_refusal_in_a_body_is_answered_eagerly,
    a_body_that_cannot_be_captured,
    no_memory_in_a_body,
    a_tensor_that_leaves_its_body,
    a_predicate_that_is_none,
    t3_06_a_hundred_failures_leave_nothing,
);

use Phase::{Eager, Inline, Record, Replay, Warmup};

fn byte<D: Device>(rig: &Rig<D>, value: u8) -> Tensor<D> {
    let tensor = rig.allocator.alloc(&rig.stream, 1).unwrap();
    tensor.write(&rig.device, &rig.stream, &[value]).unwrap();
    tensor
}

/// out = x * scale + add, on the recorder's stream.
fn into<D: Device>(
    k: &Ops<D>,
    rec: &Recorder<'_, D>,
    out: &Tensor<D>,
    x: &Tensor<D>,
    scale: f32,
    add: f32,
) -> Result<(), BoxError> {
    let n = out.bytes() / 4;
    let (to, from) = (out.ptr()?, x.ptr()?);
    Ok(k.kernels
        .scale_add(rec.device(), rec.stream(), to, from, n, scale, add)?)
}

/// y = x, and if the byte holds, y = (x + 1) * 10 by way of a temporary. How often the body was called.
fn gated<D: Device>(rig: &Rig<D>, spec: FunctionSpec<D>) -> (Function, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let f = rig.register(spec, move |k, rec, inputs| {
        let (x, holds) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
        let y = k.apply(rec, &x, 1.0, 0.0)?;
        rec.if_node(&holds, |rec| {
            counter.fetch_add(1, Ordering::Relaxed);
            let temporary = k.apply(rec, &x, 1.0, 1.0)?;
            into(k, rec, &y, &temporary, 10.0, 0.0)
        })?;
        Ok(vec![y])
    });
    (f, calls)
}

fn expected(x: f32, value: u8) -> f32 {
    if value == 0 { x } else { (x + 1.0) * 10.0 }
}

/// One run of a gated function in a step of its own.
#[track_caller]
fn run<D: Device>(rig: &Rig<D>, f: &Function, x: f32, value: u8) -> Phase {
    let (input, holds) = (rig.floats(&[x; 64]), byte(rig, value));
    let out = rig.run(f, &rig.trees.step(), &[&input, &holds]);
    assert_eq!(
        rig.read(&out[0]),
        [expected(x, value); 64],
        "{:?} {value}",
        out.phase()
    );
    out.phase()
}

// ---- phases -----------------------------------------------------------------------------------------

fn cap_15_every_phase_obeys_the_byte<D: Device>(rig: Rig<D>) {
    for (first, second) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let (f, calls) = gated(&rig, FunctionSpec::new("f"));
        assert_eq!(run(&rig, &f, 1.0, first), Warmup);
        // A warmup calls the body that runs; a recording calls it whatever the byte says.
        assert_eq!(calls.load(Ordering::Relaxed), usize::from(first));
        assert_eq!(run(&rig, &f, 2.0, second), Record);
        assert_eq!(calls.load(Ordering::Relaxed), usize::from(first) + 1);
        for (i, value) in [0, 1, 1, 0, 255, 0, 128].into_iter().enumerate() {
            assert_eq!(run(&rig, &f, 3.0 + i as f32, value), Replay);
        }
        assert_eq!(calls.load(Ordering::Relaxed), usize::from(first) + 1);
        // The gather; two launches of the body and one before it; the if.
        let view = rig.trees.view();
        assert_eq!(view.nodes.last().unwrap().graph_nodes, 5);
        rig.trees.audit().unwrap();
        drop(f);
    }
    rig.finish();
}

fn cap_15_forty_ifs_in_one_function<D: Device>(rig: Rig<D>) {
    const IFS: usize = 40;
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let (x, holds) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
        let y = k.apply(rec, &x, 1.0, 0.0)?;
        for i in 0..IFS {
            rec.if_node(&holds.view(i as u64, 1)?, |rec| {
                let temporary = k.apply(rec, &y, 1.0, i as f32)?;
                into(k, rec, &y, &temporary, 1.0, 0.0)
            })?;
        }
        Ok(vec![y])
    });
    let x = rig.floats(&[0.5; 64]);
    let holds = rig.allocator.alloc(&rig.stream, IFS as u64).unwrap();
    for (round, phase) in [Warmup, Record, Replay, Replay, Replay]
        .into_iter()
        .enumerate()
    {
        let bytes: Vec<u8> = (0..IFS).map(|i| u8::from(i % 3 == round % 3)).collect();
        holds.write(&rig.device, &rig.stream, &bytes).unwrap();
        let sum: usize = (0..IFS).filter(|i| i % 3 == round % 3).sum();
        let out = rig.run(&f, &rig.trees.step(), &[&x, &holds]);
        assert_eq!(
            (out.phase(), rig.read(&out[0])),
            (phase, vec![0.5 + sum as f32; 64])
        );
        assert_eq!(rig.blocks(), u64::from(phase != Replay), "{phase:?}");
    }
    assert_eq!(rig.trees.view().nodes[0].graph_nodes, 2 + 3 * IFS);
    drop((x, holds, f));
    rig.finish();
}

fn cap_15_forty_functions_with_an_if<D: Device>(rig: Rig<D>) {
    let functions: Vec<_> = (0..40)
        .map(|i| gated(&rig, FunctionSpec::new(&format!("f{i}"))).0)
        .collect();
    let (x, on, off) = (rig.floats(&[0.0; 64]), byte(&rig, 1), byte(&rig, 0));
    for (round, phase) in [Warmup, Record, Replay, Replay].into_iter().enumerate() {
        let step = rig.trees.step();
        let mut value = 0.0;
        let mut last = x.clone();
        for (i, f) in functions.iter().enumerate() {
            let runs = (i + round) % 2;
            let out = rig.run(f, &step, &[&last, if runs == 1 { &on } else { &off }]);
            assert_eq!(out.phase(), phase);
            last = out.only().unwrap();
            // Kept small: only every eighth is passed on.
            value = expected(value, runs as u8);
            if i % 8 == 7 {
                assert_eq!(rig.read(&last), [value; 64]);
                (value, last) = (0.0, x.clone());
            }
        }
    }
    assert_eq!(rig.trees.counts().recordings, 40);
    drop((x, on, off, functions));
    rig.finish();
}

fn an_eager_run_calls_no_body_that_is_not_to_run<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("e").capture_if(|_| false);
    let (f, calls) = gated(&rig, spec);
    for (i, value) in [0, 1, 0, 7].into_iter().enumerate() {
        assert_eq!(run(&rig, &f, i as f32, value), Eager);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    drop(f);
    rig.finish();
}

fn inside_a_capture_of_the_callers<D: Device>(rig: Rig<D>) {
    let (f, calls) = gated(&rig, FunctionSpec::new("f"));
    let (x, holds) = (rig.floats(&[0.0; 64]), byte(&rig, 0));
    let mut graph = Graph::new(&rig.allocator);
    let mut capture = graph.capture(&rig.stream).unwrap();
    let out = rig.run(&f, &rig.trees.step(), &[&x, &holds]);
    assert_eq!(out.phase(), Inline);
    let y = out.only().unwrap();
    // A run inside a body of the caller's.
    let z = capture.alloc(y.bytes()).unwrap();
    rig.scale_into(capture.stream(), &z, &y, 1.0, 0.0);
    capture
        .if_node(&holds, |body| {
            let step = rig.trees.step();
            let mut args = [lend(&y), lend(&holds)];
            let out = rig.trees.run(&f, &step, &[], body.stream(), &mut args)?;
            assert_eq!(out.phase(), Inline);
            rig.scale_into(body.stream(), &z, &out[0], 1.0, 0.5);
            Ok(())
        })
        .unwrap();
    capture.end().unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    let info = graph.info().unwrap();
    assert_eq!((info.conditionals, info.kernels), (3, 8));
    for (i, value) in [0, 1, 1, 0].into_iter().enumerate() {
        rig.put(&x, &[i as f32; 64]);
        holds.write(&rig.device, &rig.stream, &[value]).unwrap();
        graph.replay(&rig.stream).unwrap();
        let first = expected(i as f32, value);
        assert_eq!(rig.read(&y), [first; 64]);
        let second = expected(first, value) + 0.5 * f32::from(value);
        assert_eq!(rig.read(&z), [second; 64]);
    }
    drop((x, y, z, holds, graph, f));
    rig.finish();
}

fn nested_in_every_phase<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let (x, holds) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
        let y = k.apply(rec, &x, 1.0, 0.0)?;
        let [a, b, c] = [0, 1, 2].map(|i| holds.view(i, 1));
        let (b, c) = (b?, c?);
        rec.if_node(&a?, |rec| {
            let first = k.apply(rec, &y, 1.0, 1.0)?;
            rec.if_node(&b, |rec| {
                let second = k.apply(rec, &first, 1.0, 10.0)?;
                rec.if_node(&c, |rec| {
                    let third = k.apply(rec, &second, 1.0, 100.0)?;
                    into(k, rec, &second, &third, 1.0, 0.0)
                })?;
                into(k, rec, &first, &second, 1.0, 0.0)
            })?;
            rec.if_node(&c, |rec| {
                let fourth = k.apply(rec, &first, 1.0, 1000.0)?;
                into(k, rec, &first, &fourth, 1.0, 0.0)
            })?;
            into(k, rec, &y, &first, 1.0, 0.0)
        })?;
        Ok(vec![y])
    });
    let (x, holds) = (
        rig.floats(&[0.5; 16]),
        rig.allocator.alloc(&rig.stream, 3).unwrap(),
    );
    for (round, bits) in (0..8_u8).chain((0..8).rev()).enumerate() {
        let on: [u8; 3] = std::array::from_fn(|i| bits >> i & 1);
        holds.write(&rig.device, &rig.stream, &on).unwrap();
        let [a, b, c] = on.map(f32::from);
        let sum = 0.5 + a * (1.0 + b * (10.0 + c * 100.0) + c * 1000.0);
        let out = rig.run(&f, &rig.trees.step(), &[&x, &holds]);
        let phase = [Warmup, Record].get(round).copied().unwrap_or(Replay);
        assert_eq!(
            (out.phase(), rig.read(&out[0])),
            (phase, vec![sum; 16]),
            "{on:?}"
        );
    }
    drop((x, holds, f));
    rig.finish();
}

/// The fork's if and the function's own work run beside each other.
fn on_a_fork<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let side = d.create_stream().unwrap();
    let (fork, join) = (d.create_event().unwrap(), d.create_event().unwrap());
    let (stranger, other) = (d.create_stream().unwrap(), Arc::new(AtomicBool::new(false)));
    let wrong = other.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let (x, holds) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
        let (y, z) = (k.apply(rec, &x, 1.0, 0.0)?, rec.alloc(x.bytes())?);
        let d = rec.device();
        d.record(&fork, rec.stream())?;
        d.wait(&side, &fork)?;
        let on = if wrong.load(Ordering::Relaxed) && rec.phase() == Record {
            &stranger
        } else {
            &side
        };
        rec.if_node_on(on, &holds, |rec| {
            let temporary = k.apply(rec, &x, 1.0, 1.0)?;
            into(k, rec, &y, &temporary, 10.0, 0.0)
        })?;
        into(k, rec, &z, &x, 3.0, 0.0)?;
        d.record(&join, &side)?;
        d.wait(rec.stream(), &join)?;
        Ok(vec![y, z])
    });
    for (i, value) in [1, 0, 1, 0, 0, 1].into_iter().enumerate() {
        let (x, holds) = (rig.floats(&[i as f32; 256]), byte(&rig, value));
        let out = rig.run(&f, &rig.trees.step(), &[&x, &holds]);
        let phase = [Warmup, Record].get(i).copied().unwrap_or(Replay);
        assert_eq!(out.phase(), phase);
        assert_eq!(rig.read(&out[0]), [expected(i as f32, value); 256]);
        assert_eq!(rig.read(&out[1]), [3.0 * i as f32; 256]);
    }
    // A stream that takes no part in the capture: refused, and answered eagerly.
    other.store(true, Ordering::Relaxed);
    rig.trees.invalidate(&f).unwrap();
    let (x, holds) = (rig.floats(&[1.0; 256]), byte(&rig, 0));
    for phase in [Warmup, Eager] {
        let out = rig.run(&f, &rig.trees.step(), &[&x, &holds]);
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![1.0; 256]));
    }
    let refusal = rig.trees.last_refusal().unwrap();
    assert_eq!(
        (refusal.call, refusal.code, refusal.position),
        (Call::BeginIf, Code::IllegalState, Some(3))
    );
    drop((x, holds, f));
    rig.finish();
}

/// A loop of a decoder that stops by itself: the first graph computes the byte that the second looks at.
fn the_byte_is_computed_by_the_function<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let (x, source) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
        let (y, holds) = (k.apply(rec, &x, 1.0, 0.0)?, rec.alloc(1)?);
        let d = rec.device();
        d.copy(rec.stream(), holds.ptr()?, source.ptr()?, 1)?;
        for _ in 0..3 {
            rec.if_node(&holds, |rec| {
                let temporary = k.apply(rec, &y, 2.0, 0.0)?;
                into(k, rec, &y, &temporary, 1.0, 0.0)?;
                // Each body that runs is the last.
                Ok(rec.device().fill(rec.stream(), holds.ptr()?, 0, 1)?)
            })?;
        }
        Ok(vec![y])
    });
    for (i, value) in [1, 1, 0, 1, 0, 1].into_iter().enumerate() {
        let (x, source) = (rig.floats(&[1.0 + i as f32]), byte(&rig, value));
        let out = rig.run(&f, &rig.trees.step(), &[&x, &source]);
        let times = 1.0 + f32::from(value);
        assert_eq!(rig.read(&out[0]), [times * (1.0 + i as f32)]);
    }
    drop(f);
    rig.finish();
}

// ---- memory -----------------------------------------------------------------------------------------

fn memory_of_a_body<D: Device>(rig: Rig<D>) {
    let places = Arc::new(Mutex::new(Vec::new()));
    let seen = places.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let (x, holds) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
        let y = k.apply(rec, &x, 1.0, 0.0)?;
        let mut all = Vec::new();
        let before = k.apply(rec, &x, 7.0, 0.0)?;
        all.push(before.ptr()?);
        drop(before);
        rec.if_node(&holds, |rec| {
            for _ in 0..2 {
                let inside = k.apply(rec, &x, 1.0, 1.0)?;
                all.push(inside.ptr()?);
                into(k, rec, &y, &inside, 10.0, 0.0)?;
            }
            Ok(())
        })?;
        let after = k.apply(rec, &y, 1.0, 0.0)?;
        all.push(after.ptr()?);
        *seen.lock().unwrap() = all;
        into(k, rec, &y, &after, 1.0, 0.0)?;
        Ok(vec![y])
    });
    for value in [1, 1, 0, 1, 0] {
        let phase = run(&rig, &f, 2.0, value);
        if phase == Record {
            let places = places.lock().unwrap();
            assert_eq!(places.len(), 4);
            assert!(places.iter().all(|place| *place == places[0]), "{places:?}");
        }
    }
    drop(f);
    rig.finish();
}

/// The path's output dies in the body of the function that it is given to: its memory is used again in the body, and behind it.
fn a_given_input_dies_in_a_body<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let f = rig.register(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let (x, holds) = (inputs.take(0)?, inputs.take(1)?);
        let y = k.apply(rec, &x, 1.0, 0.0)?;
        let mut x = Some(x);
        rec.if_node(&holds, |rec| {
            let temporary = k.apply(rec, x.as_ref().ok_or("gone")?, 1.0, 1.0)?;
            drop(x.take());
            let other = k.apply(rec, &temporary, 10.0, 0.0)?;
            into(k, rec, &y, &other, 1.0, 0.0)
        })?;
        drop(x);
        let after = k.apply(rec, &y, 1.0, 0.0)?;
        drop(y);
        Ok(vec![k.apply(rec, &after, 1.0, 0.0)?])
    });
    for (i, value) in [1, 0, 1, 0, 0, 1].into_iter().enumerate() {
        let (x, holds) = (rig.floats(&[i as f32; 64]), byte(&rig, value));
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let out = rig.call(&f, &step, &[], &mut [give(y), lend(&holds)]);
        let phase = [Warmup, Record].get(i).copied().unwrap_or(Replay);
        assert_eq!(out.phase(), phase);
        assert_eq!(rig.read(&out[0]), [expected(1.0 + i as f32, value); 64]);
        rig.trees.audit().unwrap();
    }
    drop((a, f));
    rig.finish();
}

/// A body makes what it keeps: state is no temporary, and may stay.
fn state_that_is_made_in_a_body<D: Device>(rig: Rig<D>) {
    for first in [0, 1] {
        let cache: Arc<OnceLock<Tensor<D>>> = Arc::default();
        let kept = cache.clone();
        let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
            let (x, holds) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
            let y = k.apply(rec, &x, 1.0, 0.0)?;
            rec.if_node(&holds, |rec| {
                let workspace = match kept.get() {
                    Some(workspace) => workspace.clone(),
                    None => {
                        let new = rec.alloc_state(x.bytes())?;
                        kept.get_or_init(|| new).clone()
                    }
                };
                into(k, rec, &workspace, &x, 1.0, 1.0)?;
                into(k, rec, &y, &workspace, 10.0, 0.0)
            })?;
            Ok(vec![y])
        });
        for (i, value) in [first, 0, 0, 1, 0, 1].into_iter().enumerate() {
            let phase = run(&rig, &f, i as f32, value);
            assert_eq!(phase, [Warmup, Record].get(i).copied().unwrap_or(Replay));
        }
        // The last run that did anything to it was this one.
        let workspace = cache.get().unwrap();
        assert_eq!(rig.read(workspace), [6.0; 64]);
        drop(f);
        drop(cache);
    }
    rig.finish();
}

/// A body draws where it runs, and its node keeps the state that it draws from.
fn draws_of_a_body<D: Device>(rig: Rig<D>) {
    const N: u64 = 8;
    let x = rig.floats(&[0.0; N as usize]);
    let reference = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let next = || {
        reference.uniform(&rig.stream, x.ptr().unwrap(), N).unwrap();
        rig.read(&x)
    };
    let before = rig.allocator.stats().live_blocks.current;
    let generator = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let slot = Arc::new(Mutex::new(Some(generator)));
    let draws = slot.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let holds = inputs.get(0)?.clone();
        let y = rec.alloc(4 * N)?;
        k.kernels
            .fill(rec.device(), rec.stream(), y.ptr()?, N, -1.0)?;
        let draws = draws.lock().unwrap();
        let generator = draws.as_ref().ok_or("no generator")?;
        rec.if_node(&holds, |rec| {
            Ok(generator.uniform(rec.stream(), y.ptr()?, N)?)
        })?;
        Ok(vec![y])
    });
    for (i, value) in [1, 0, 1, 0, 1, 1].into_iter().enumerate() {
        let holds = byte(&rig, value);
        let out = rig.run(&f, &rig.trees.step(), &[&holds]);
        let phase = [Warmup, Record].get(i).copied().unwrap_or(Replay);
        let drawn = match value {
            0 => vec![-1.0; N as usize],
            _ => next(),
        };
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, drawn));
        if i == 1 {
            // From here on the state is the node's.
            slot.lock().unwrap().take();
        }
    }
    drop(f);
    // Dead states may wait for the launch that used them.
    rig.device.synchronize(&rig.stream).unwrap();
    rig.allocator.trim().unwrap();
    assert_eq!(rig.allocator.stats().live_blocks.current, before);
    drop((x, reference));
    rig.finish();
}

fn copies_of_pinned_memory_in_a_body<D: Device>(rig: Rig<D>) {
    let bytes =
        |value: f32| -> Vec<u8> { [value; 64].iter().flat_map(|v| v.to_le_bytes()).collect() };
    let (source, target) = (
        rig.allocator.alloc_pinned(256).unwrap(),
        rig.allocator.alloc_pinned(256).unwrap(),
    );
    target.write(0, &bytes(-1.0)).unwrap();
    let (from, to) = (source.clone(), target.clone());
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let holds = inputs.get(0)?.clone();
        let y = rec.alloc(256)?;
        k.kernels
            .fill(rec.device(), rec.stream(), y.ptr()?, 64, -2.0)?;
        rec.if_node(&holds, |rec| {
            let temporary = rec.alloc(256)?;
            temporary.copy_from_pinned(rec.stream(), &from, 0)?;
            into(k, rec, &y, &temporary, 2.0, 0.0)?;
            Ok(y.copy_to_pinned(rec.stream(), &to, 0)?)
        })?;
        Ok(vec![y])
    });
    let mut last = -1.0;
    for (i, value) in [1, 0, 0, 1, 0, 1].into_iter().enumerate() {
        source.write(0, &bytes(i as f32)).unwrap();
        let holds = byte(&rig, value);
        let out = rig.run(&f, &rig.trees.step(), &[&holds]);
        let phase = [Warmup, Record].get(i).copied().unwrap_or(Replay);
        let y = if value == 0 { -2.0 } else { 2.0 * i as f32 };
        assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![y; 64]));
        if value == 1 {
            last = y;
        }
        let mut read = vec![0; 256];
        target.read(0, &mut read).unwrap();
        assert_eq!(read, bytes(last), "{phase:?} {value}");
    }
    // The node has them, and nobody else.
    assert_eq!(rig.allocator.pinned_stats().kept, 0);
    drop((source, target, f));
    rig.finish();
}

fn what_a_body_says<D: Device>(rig: Rig<D>) {
    let discards = Arc::new(AtomicBool::new(true));
    let told = discards.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let (x, holds) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
        let y = k.apply(rec, &x, 1.0, 0.0)?;
        rec.return_value(Arc::new(1));
        rec.if_node(&holds, |rec| {
            rec.need_more_warmup();
            rec.return_value(Arc::new(2));
            if told.load(Ordering::Relaxed) {
                rec.discard_recording();
            }
            into(k, rec, &y, &x, 0.0, 5.0)
        })?;
        rec.return_value(Arc::new(3));
        Ok(vec![y])
    });
    let x = rig.floats(&[1.0]);
    let run = |value: u8| {
        let holds = byte(&rig, value);
        let out = rig.run(&f, &rig.trees.step(), &[&x, &holds]);
        let y = if value == 0 { 1.0 } else { 5.0 };
        assert_eq!(rig.read(&out[0]), [y]);
        (out.phase(), out.values())
    };
    // Heard in the warmup whose body runs; not in the other.
    assert_eq!(run(1), (Warmup, 3));
    assert_eq!(run(0), (Warmup, 2));
    assert_eq!(run(0), (Eager, 2));
    discards.store(false, Ordering::Relaxed);
    assert_eq!(run(0), (Record, 3));
    assert_eq!(run(1), (Replay, 3));
    assert_eq!(run(0), (Replay, 3));
    drop((x, f));
    rig.finish();
}

// ---- what fails in a body ---------------------------------------------------------------------------

/// What a body does when it is told to fail.
type Fails<D> = Arc<dyn Fn(&mut Recorder<'_, D>) -> Result<(), BoxError> + Send + Sync>;

/// A gated function whose body fails in phases that are told by bits: 1 in runs that capture, 2 in others.
fn failing<D: Device>(rig: &Rig<D>, inner: bool, fails: Fails<D>) -> (Function, Arc<AtomicU32>) {
    let when = Arc::new(AtomicU32::new(0));
    let told = when.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let (x, holds) = (inputs.get(0)?.clone(), inputs.get(1)?.clone());
        let y = k.apply(rec, &x, 1.0, 0.0)?;
        let body = |rec: &mut Recorder<'_, D>| {
            let temporary = k.apply(rec, &x, 1.0, 1.0)?;
            let bit = if rec.phase() == Record { 1 } else { 2 };
            if told.load(Ordering::Relaxed) & bit != 0 {
                fails(rec)?;
            }
            into(k, rec, &y, &temporary, 10.0, 0.0)
        };
        rec.if_node(&holds, |rec| match inner {
            true => rec.if_node(&holds, body),
            false => body(rec),
        })?;
        Ok(vec![y])
    });
    (f, when)
}

/// A failing body: where the byte holds, the caller hears of it; where not, an uncompiled run has no error, and neither has this.
fn body_fails<D: Device>(rig: Rig<D>, inner: bool) {
    let (f, when) = failing(&rig, inner, Arc::new(|_| Err("on purpose".into())));
    let fails = |value: u8, phase: Phase| {
        let (x, holds) = (rig.floats(&[1.0; 64]), byte(&rig, value));
        let step = rig.trees.step();
        let mut args = [lend(&x), lend(&holds)];
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
        match result.unwrap_err() {
            Error::Function {
                function,
                phase: failed,
                source,
            } => assert_eq!(
                (&*function, failed, source.to_string().as_str()),
                ("f", phase, "on purpose")
            ),
            other => panic!("{other:?}"),
        }
        assert_eq!(rig.blocks(), 0);
        rig.trees.audit().unwrap();
    };
    when.store(2, Ordering::Relaxed);
    fails(1, Warmup);
    assert_eq!(run(&rig, &f, 1.0, 0), Warmup);
    // Captured, it fails whatever the byte says.
    when.store(3, Ordering::Relaxed);
    assert_eq!(run(&rig, &f, 2.0, 0), Eager);
    let text = rig.trees.last_failure().unwrap();
    assert!(text.contains("body of an if"), "{text}");
    assert!(text.contains("on purpose"), "{text}");
    fails(1, Eager);
    let counts = rig.trees.counts();
    assert_eq!((counts.failed_captures, counts.recordings), (2, 0));
    when.store(0, Ordering::Relaxed);
    // After two failures one call is answered without trying.
    assert_eq!(run(&rig, &f, 3.0, 1), Eager);
    assert_eq!(run(&rig, &f, 4.0, 0), Record);
    assert_eq!(run(&rig, &f, 5.0, 1), Replay);
    assert_eq!(run(&rig, &f, 6.0, 0), Replay);
    drop(f);
    rig.finish();
}

fn an_error_of_a_body<D: Device>(rig: Rig<D>) {
    body_fails(rig, false);
}

fn an_error_of_an_inner_body<D: Device>(rig: Rig<D>) {
    body_fails(rig, true);
}

fn a_panic_of_a_body<D: Device>(rig: Rig<D>) {
    for inner in [false, true] {
        let panics = |_: &mut Recorder<'_, D>| std::panic::resume_unwind(Box::new("on purpose"));
        let (f, when) = failing(&rig, inner, Arc::new(panics));
        let (x, on) = (rig.floats(&[1.0; 64]), byte(&rig, 1));
        let panics = || {
            let step = rig.trees.step();
            let mut args = [lend(&x), lend(&on)];
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                rig.trees.run(&f, &step, &[], &rig.stream, &mut args)
            }));
            assert_eq!(unwound.unwrap_err().downcast_ref(), Some(&"on purpose"));
            assert_eq!(rig.blocks(), 0);
            rig.trees.audit().unwrap();
        };
        when.store(2, Ordering::Relaxed);
        panics();
        assert_eq!(run(&rig, &f, 1.0, 0), Warmup);
        when.store(1, Ordering::Relaxed);
        panics();
        when.store(0, Ordering::Relaxed);
        assert_eq!(run(&rig, &f, 4.0, 0), Record);
        assert_eq!(run(&rig, &f, 5.0, 1), Replay);
        drop((f, x, on));
    }
    rig.finish();
}

fn t3_06_a_refusal_in_a_body_is_answered_eagerly<D: Device>(rig: Rig<D>) {
    for (inner, passed_on) in [(false, true), (false, false), (true, true), (true, false)] {
        let waits = move |rec: &mut Recorder<'_, D>| {
            // Illegal inside a capture; once the error is passed on, once not.
            match rec.device().synchronize(rec.stream()) {
                Err(error) if passed_on => Err(error.into()),
                _ => Ok(()),
            }
        };
        let (f, when) = failing(&rig, inner, Arc::new(waits));
        when.store(3, Ordering::Relaxed);
        let failed = rig.trees.counts().failed_captures;
        assert_eq!(run(&rig, &f, 1.0, 1), Warmup);
        assert_eq!(run(&rig, &f, 2.0, 1), Eager);
        assert_eq!(run(&rig, &f, 2.0, 0), Eager);
        assert_eq!(rig.trees.counts().failed_captures, failed + 2);
        let refusal = rig.trees.last_refusal().unwrap();
        // The gather, a launch, the if and perhaps another, a launch, and this.
        assert_eq!(
            (refusal.call, refusal.code, refusal.position),
            (
                Call::Synchronize,
                Code::StreamCaptureUnsupported,
                Some(5 + u64::from(inner))
            )
        );
        when.store(0, Ordering::Relaxed);
        assert_eq!(run(&rig, &f, 3.0, 1), Eager);
        assert_eq!(run(&rig, &f, 4.0, 0), Record);
        assert_eq!(run(&rig, &f, 5.0, 1), Replay);
        rig.trees.audit().unwrap();
        drop(f);
    }
    rig.finish();
}

fn a_body_that_cannot_be_captured<D: Device>(rig: Rig<D>) {
    let reads = |rec: &mut Recorder<'_, D>| Ok(rec.not_capturable("a value is read")?);
    let (f, when) = failing(&rig, false, Arc::new(reads));
    when.store(3, Ordering::Relaxed);
    assert_eq!(run(&rig, &f, 1.0, 1), Warmup);
    for value in [0, 1, 0] {
        let (x, holds) = (rig.floats(&[2.0; 64]), byte(&rig, value));
        let out = rig.run(&f, &rig.trees.step(), &[&x, &holds]);
        assert_eq!(
            out.reason().map(|reason| reason.kind()),
            Some(ReasonKind::NotCapturable)
        );
        assert_eq!(rig.read(&out[0]), [expected(2.0, value); 64]);
    }
    assert_eq!(rig.trees.counts().failed_captures, 0);
    drop(f);
    rig.finish();
}

fn no_memory_in_a_body<D: Device>(rig: Rig<D>) {
    for inner in [false, true] {
        let takes = |rec: &mut Recorder<'_, D>| rec.alloc(1 << 50).map(drop).map_err(Into::into);
        let (f, when) = failing(&rig, inner, Arc::new(takes));
        assert_eq!(run(&rig, &f, 1.0, 1), Warmup);
        when.store(3, Ordering::Relaxed);
        assert_eq!(run(&rig, &f, 2.0, 0), Eager);
        let (x, holds) = (rig.floats(&[1.0; 64]), byte(&rig, 1));
        let step = rig.trees.step();
        let mut args = [lend(&x), lend(&holds)];
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
        let Err(Error::Function { phase, source, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(phase, Eager);
        match source.downcast_ref() {
            Some(Error::Pool(PoolError::OutOfMemory { requested, .. })) => {
                assert_eq!(*requested, 1 << 50);
            }
            _ => panic!("{source}"),
        }
        assert_eq!(rig.blocks(), 0);
        when.store(0, Ordering::Relaxed);
        assert_eq!(run(&rig, &f, 3.0, 1), Eager);
        assert_eq!(run(&rig, &f, 4.0, 0), Record);
        assert_eq!(run(&rig, &f, 5.0, 1), Replay);
        drop((step, x, holds, f));
    }
    rig.finish();
}

fn a_tensor_that_leaves_its_body<D: Device>(rig: Rig<D>) {
    let out: Arc<Mutex<Option<Tensor<D>>>> = Arc::default();
    let leaves = out.clone();
    let line = line!() + 2;
    let escapes = move |rec: &mut Recorder<'_, D>| {
        *leaves.lock().unwrap() = Some(rec.alloc(512)?);
        Ok(())
    };
    let (f, when) = failing(&rig, false, Arc::new(escapes));
    let escaped = |value: u8, expected: Phase| {
        let (x, holds) = (rig.floats(&[1.0; 64]), byte(&rig, value));
        let step = rig.trees.step();
        let mut args = [lend(&x), lend(&holds)];
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
        let Err(Error::Function { phase, source, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(phase, expected);
        match source.downcast_ref() {
            Some(Error::Escaped { bytes, at, count }) => {
                assert_eq!((*bytes, at.line(), *count), (512, line, 1));
            }
            _ => panic!("{source}"),
        }
        rig.trees.audit().unwrap();
        out.lock().unwrap().take().unwrap()
    };
    when.store(3, Ordering::Relaxed);
    drop(escaped(1, Warmup));
    assert_eq!(rig.blocks(), 0);
    // A warmup that does not run the body has nothing to say.
    assert_eq!(run(&rig, &f, 1.0, 0), Warmup);
    for value in [0, 1] {
        let tensor = escaped(value, Record);
        // Its memory went with the body.
        assert_eq!(rig.blocks(), 0);
        assert!(matches!(tensor.ptr(), Err(Error::Stale(_))), "{tensor:?}");
    }
    let counts = rig.trees.counts();
    assert_eq!((counts.failed_captures, counts.recordings), (0, 0));
    when.store(0, Ordering::Relaxed);
    assert_eq!(run(&rig, &f, 2.0, 0), Record);
    assert_eq!(run(&rig, &f, 3.0, 1), Replay);
    // Inside a capture of the caller's, too.
    when.store(3, Ordering::Relaxed);
    let mut graph = Graph::new(&rig.allocator);
    let (x, holds) = (rig.floats(&[1.0; 64]), byte(&rig, 1));
    let capture = graph.capture(&rig.stream).unwrap();
    let step = rig.trees.step();
    let mut args = [lend(&x), lend(&holds)];
    let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
    let Err(Error::Function { phase, source, .. }) = result else {
        panic!("{result:?}")
    };
    assert_eq!(phase, Inline);
    assert!(
        matches!(
            source.downcast_ref(),
            Some(Error::Escaped { bytes: 512, .. })
        ),
        "{source}"
    );
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    rig.device.synchronize(&rig.stream).unwrap();
    out.lock().unwrap().take();
    drop((step, x, holds, graph, f));
    rig.finish();
}

fn a_predicate_that_is_none<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?.clone();
        let y = k.apply(rec, &x, 1.0, 0.0)?;
        rec.if_node(&x, |_| Ok(()))?;
        Ok(vec![y])
    });
    let x = rig.floats(&[1.0; 3]);
    let step = rig.trees.step();
    for spec in [Warmup, Warmup] {
        let result = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
        let Err(Error::Function { phase, source, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(phase, spec);
        assert!(
            matches!(source.downcast_ref(), Some(Error::Predicate { bytes: 12 })),
            "{source}"
        );
    }
    drop((x, step, f));
    rig.finish();
}

/// Errors, panics and refusals in bodies, one after the other: the pool is as it was, and the device holds what it held.
fn t3_06_a_hundred_failures_leave_nothing<D: Device>(rig: Rig<D>) {
    hundred_failures(&rig);
    rig.finish();
}

fn hundred_failures<D: Device>(rig: &Rig<D>) {
    let turn = Arc::new(AtomicUsize::new(0));
    let now = turn.clone();
    let fails = move |rec: &mut Recorder<'_, D>| {
        let _large = rec.alloc(3 << 20)?;
        match now.load(Ordering::Relaxed) % 4 {
            0 => Err("on purpose".into()),
            1 => std::panic::resume_unwind(Box::new("on purpose")),
            2 => Ok(rec.device().synchronize(rec.stream())?),
            _ => {
                // Refused, and the error is not passed on.
                let _ = rec.device().query(rec.stream());
                Ok(())
            }
        }
    };
    let mut reserved = None;
    for i in 0..100 {
        turn.store(i, Ordering::Relaxed);
        let (f, when) = failing(rig, i % 8 < 4, Arc::new(fails.clone()));
        assert_eq!(run(rig, &f, 1.0, 0), Warmup);
        when.store(1, Ordering::Relaxed);
        let (x, off) = (rig.floats(&[1.0; 64]), byte(rig, 0));
        let step = rig.trees.step();
        let mut args = [lend(&x), lend(&off)];
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            rig.trees.run(&f, &step, &[], &rig.stream, &mut args)
        }));
        match outcome {
            Ok(out) => {
                assert_ne!(i % 4, 1);
                let out = out.unwrap();
                assert_eq!((out.phase(), rig.read(&out[0])), (Eager, vec![1.0; 64]));
            }
            Err(panic) => {
                assert_eq!(i % 4, 1);
                assert_eq!(panic.downcast_ref(), Some(&"on purpose"));
            }
        }
        assert_eq!(rig.blocks(), 0);
        let bytes = rig.trees.pool_stats().reserved_bytes.current;
        assert_eq!(*reserved.get_or_insert(bytes), bytes);
        rig.trees.audit().unwrap();
    }
    // And a function that fails nowhere is recorded as ever.
    let (f, _) = gated(rig, FunctionSpec::new("f"));
    for (value, phase) in [(0, Warmup), (1, Record), (0, Replay), (1, Replay)] {
        assert_eq!(run(rig, &f, 2.0, value), phase);
    }
}

#[test]
fn t3_06_the_device_holds_what_it_held() {
    let device = HostDevice::new();
    let rig = Rig::new(device.clone());
    let held = || {
        let c = device.counts();
        (c.streams, c.events, c.captures, c.graphs, c.execs)
    };
    let before = held();
    hundred_failures(&rig);
    let after = held();
    assert_eq!((after.0, after.2, after.3, after.4), (before.0, 0, 0, 0));
    rig.finish();
}

/// Each call that a run with an if makes fails once: an error or an eager answer, and never anything left behind.
#[test]
fn each_call_of_an_if_fails_once() {
    let calls = [
        Call::CreateStream,
        Call::BeginIf,
        Call::EndIf,
        Call::Launch,
        Call::Read,
        Call::Map,
        Call::CaptureStatus,
        Call::CaptureId,
        Call::ExchangeCaptureMode,
    ];
    for call in calls {
        for nth in 1..=4 {
            for runs_before in 0..=2 {
                let rig = Rig::new(wrapped());
                let (f, _) = gated(&rig, FunctionSpec::new("f"));
                for value in [1, 0].into_iter().take(runs_before) {
                    run(&rig, &f, 1.0, value);
                }
                let (x, holds) = (rig.floats(&[2.0; 64]), byte(&rig, 1));
                rig.device.fail(call, nth, Code::Other(777));
                {
                    let step = rig.trees.step();
                    let mut args = [lend(&x), lend(&holds)];
                    let outcome = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
                    rig.device.clear();
                    match outcome {
                        Ok(out) => assert_eq!(rig.read(&out[0]), [expected(2.0, 1); 64]),
                        Err(error) => {
                            let text = format!("{error} {error:?}");
                            assert!(
                                text.contains("777") || text.contains("OutOfMemory"),
                                "{text}"
                            );
                        }
                    }
                    rig.trees.audit().unwrap();
                    assert_eq!(rig.device.inner().counts().captures, 0);
                }
                for value in [0, 1, 0] {
                    run(&rig, &f, 3.0, value);
                }
                drop((f, x, holds));
                rig.finish();
            }
        }
    }
}
