//! Eager runs: outside of the tree, on the caller's stream, with memory of the default pool. The path stays as it is, and what comes next replays.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use common::{Rig, on_cuda};
use cudagraph_trees::device::Device;
use cudagraph_trees::{
    Arg, Error, Function, FunctionSpec, Phase, Reason, ReasonKind, Tensor, give, lend,
};

suite!(
    the_next_of_the_step_replays,
    outputs_never_go_stale,
    what_is_a_copy_and_what_is_in_place,
    outputs_that_are_inputs,
    bound_inputs_lie_where_they_were_bound,
    given_from_another_stream,
    given_outputs_of_the_path,
    outputs_of_the_path_are_read_later,
    on_a_stream_of_its_own,
    an_error_inside,
    a_panic_inside,
    inputs_that_cannot_be,
    memory_is_the_default_pools,
    a_run_inside_an_eager_run,
    a_stale_output_is_refused,
    counted_in_the_report,
);

use Phase::{Eager, Record, Replay, Warmup};

/// A function that is never captured.
fn eager<D: Device>(rig: &Rig<D>, name: &str, scale: f32, add: f32) -> Function {
    let spec = FunctionSpec::new(name).capture_if(|_| false);
    rig.register(spec, move |k, rec, mut inputs| {
        assert_eq!(rec.phase(), Eager);
        let x = inputs.take(0)?;
        let out = k.apply(rec, &x, scale, add)?;
        drop(x);
        Ok(vec![out])
    })
}

fn the_next_of_the_step_replays<D: Device>(rig: Rig<D>) {
    let (f, g) = (rig.scale_add("f", 2.0, 0.0), rig.scale_add("g", 3.0, 0.0));
    let e = eager(&rig, "e", 1.0, 100.0);
    for phase in [Warmup, Record, Replay, Replay] {
        let x = rig.floats(&[1.0, 2.0]);
        let step = rig.trees.step();
        let (p, y) = rig.phased(&f, &step, &x);
        let before = (rig.trees.view(), rig.layout());
        let restores = rig.trees.counts().restores;
        let out = rig.run(&e, &step, &[&y]);
        assert_eq!((out.phase(), out.node()), (Eager, None));
        assert_eq!(out.reason(), Some(Reason::KeyNotCaptured));
        let mut after = rig.trees.view();
        // Its key was not known before.
        after.functions[2].keys = before.0.functions[2].keys.clone();
        assert_eq!((after, rig.layout()), before);
        assert_eq!(rig.trees.counts().restores, restores);
        // What it gives is copied in, wherever it lies.
        let (q, z) = rig.phased(&g, &step, &out[0]);
        assert_eq!((p, q), (phase, phase));
        assert_eq!(rig.read(&y), [2.0, 4.0]);
        assert_eq!(rig.read(&out[0]), [102.0, 104.0]);
        assert_eq!(rig.read(&z), [306.0, 312.0]);
        rig.trees.audit().unwrap();
    }
    assert_eq!(rig.trees.descendants(), [1]);
    rig.finish();
}

fn outputs_never_go_stale<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let e = eager(&rig, "e", 1.0, 1.0);
    let mut kept = Vec::new();
    for round in 0..5 {
        let x = rig.floats(&[round as f32; 32]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        kept.push(rig.one(&e, &step, &y));
    }
    for (round, out) in kept.iter().enumerate() {
        assert!(out.is_current());
        assert_eq!(rig.read(out), [2.0 * round as f32 + 1.0; 32]);
    }
    let ids: Vec<_> = kept.iter().map(|t| t.storage_id().unwrap()).collect();
    assert!(ids.windows(2).all(|w| w[0] != w[1]));
    // They outlive the tree.
    rig.trees.shutdown().unwrap();
    assert_eq!(rig.read(&kept[4]), [9.0; 32]);
    drop(kept);
    rig.finish();
}

/// Writes to each of its inputs, and says where they lay.
fn writes<D: Device>(rig: &Rig<D>, spec: FunctionSpec<D>) -> (Function, Arc<Mutex<Vec<u64>>>) {
    let places = Arc::new(Mutex::new(Vec::new()));
    let seen = places.clone();
    let f = rig.register(spec.capture_if(|_| false), move |k, rec, inputs| {
        let mut places = seen.lock().unwrap();
        places.clear();
        for index in 0..inputs.len() {
            let x = inputs.get(index)?;
            places.push(x.ptr()?.0);
            k.kernels
                .increment(rec.device(), rec.stream(), x.ptr()?, x.bytes() / 4, 1.0)?;
        }
        Ok(vec![])
    });
    (f, places)
}

fn what_is_a_copy_and_what_is_in_place<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let spec = FunctionSpec::new("e").static_input(1).mutates(2).align(16);
    let (e, places) = writes(&rig, spec);
    let all = [1.0, 2.0, 3.0].map(|v| rig.floats(&[v, v]));
    for round in 0..3 {
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &rig.floats(&[4.0, 4.0]));
        let given = rig.floats(&[5.0, 5.0]);
        let kept = given.clone();
        let mut args = [
            lend(&all[0]),
            lend(&all[1]),
            lend(&all[2]),
            lend(&y),
            give(given),
        ];
        let out = rig.call(&e, &step, &[], &mut args);
        assert_eq!((out.phase(), out.len()), (Eager, 0));
        drop(args);
        let places = places.lock().unwrap().clone();
        let at = |t: &Tensor<D>| t.ptr().unwrap().0;
        assert_ne!(places[0], at(&all[0]), "lent: a copy");
        let in_place = [at(&all[1]), at(&all[2]), at(&y), at(&kept)];
        assert_eq!(places[1..], in_place);
        let round = round as f32 + 1.0;
        assert_eq!(rig.read(&all[0]), [1.0; 2]);
        assert_eq!(rig.read(&all[1]), [2.0 + round; 2]);
        assert_eq!(rig.read(&all[2]), [3.0 + round; 2]);
        assert_eq!(
            (rig.read(&y), rig.read(&kept)),
            (vec![9.0; 2], vec![6.0; 2])
        );
    }
    // A static input that does not lie as the function wants it is a copy, too; one of nothing is nothing.
    let (x, empty) = (rig.floats(&[0.0, 1.0, 2.0]), Tensor::empty());
    let off = x.view(4, 8).unwrap();
    let mut args = [lend(&empty), lend(&off)];
    rig.call(&e, &rig.trees.step(), &[], &mut args);
    assert_eq!(places.lock().unwrap()[0], 0);
    assert_ne!(places.lock().unwrap()[1], off.ptr().unwrap().0);
    assert_eq!(rig.read(&x), [0.0, 1.0, 2.0]);
    drop((all, x, off));
    rig.finish();
}

fn outputs_that_are_inputs<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let spec = FunctionSpec::new("e").static_input(2).capture_if(|_| false);
    let e = rig.register(spec, |_, _, inputs| {
        let all = [inputs.get(0)?, inputs.get(1)?, inputs.get(2)?];
        let mut outputs: Vec<_> = all.into_iter().cloned().collect();
        outputs.push(inputs.get(1)?.view(4, 4)?);
        Ok(outputs)
    });
    let (x, s) = (rig.floats(&[1.0, 2.0]), rig.floats(&[7.0]));
    for _ in 0..3 {
        drop(rig.one(&f, &rig.trees.step(), &x));
    }
    let step = rig.trees.step();
    let y = rig.one(&f, &step, &x);
    let out = rig.run(&e, &step, &[&x, &y, &s]);
    assert_ne!(out[0].storage_id(), x.storage_id());
    assert_eq!(out[1].storage_id(), y.storage_id());
    assert_eq!(out[2].storage_id(), s.storage_id());
    assert_eq!(
        (rig.read(&out[0]), rig.read(&out[3])),
        (vec![1.0, 2.0], vec![4.0])
    );
    // What is an output of the path stays one: a handle of the eager run holds it, and goes stale with it.
    drop(y);
    assert_eq!(rig.trees.path_live(), 1);
    drop(step);
    drop(rig.one(&f, &rig.trees.step(), &x));
    assert!(matches!(rig.try_read(&out[1]), Err(Error::Stale(_))));
    assert!(matches!(rig.try_read(&out[3]), Err(Error::Stale(_))));
    assert_eq!(
        (rig.read(&out[0]), rig.read(&out[2])),
        (vec![1.0, 2.0], vec![7.0])
    );
    drop((x, s, out));
    rig.finish();
}

fn bound_inputs_lie_where_they_were_bound<D: Device>(rig: Rig<D>) {
    let (first, last) = (rig.floats(&[1.0]), rig.floats(&[1000.0]));
    let spec = FunctionSpec::new("e")
        .bind(3, &last)
        .bind(0, &first)
        .bind_value(2, Arc::new(10.0f32))
        .capture_if(|_| false);
    let e = rig.register(spec, |k, rec, inputs| {
        let by = inputs.value::<f32>(2)?;
        let scaled = k.apply(rec, inputs.get(1)?, *by, 0.0)?;
        let sum = k.sum(rec, &scaled, inputs.get(0)?)?;
        let sum = k.sum(rec, &sum, inputs.get(3)?)?;
        Ok(vec![k.sum(rec, &sum, inputs.get(4)?)?])
    });
    let (x, y) = (rig.floats(&[2.0]), rig.floats(&[5.0]));
    let mut args = [lend(&x), give(y)];
    let out = rig.call(&e, &rig.trees.step(), &[], &mut args);
    assert_eq!((out.phase(), rig.read(&out[0])), (Eager, vec![1026.0]));
    assert!(matches!(args[1], Arg::Taken));
    // Too few inputs for what is bound.
    let failed = rig
        .trees
        .run(&e, &rig.trees.step(), &[], &rig.stream, &mut []);
    let Err(Error::Inputs { detail, .. }) = failed.map(drop) else {
        panic!("there is no input 3")
    };
    assert!(detail.starts_with("input 3 is bound"), "{detail}");
    drop(args);
    drop((first, last, x, out));
    rig.finish();
}

/// Memory that is given from another stream is not used again there before the run has read it.
fn given_from_another_stream<D: Device>(rig: Rig<D>) {
    let e = eager(&rig, "e", 2.0, 0.0);
    let other = rig.device.create_stream().unwrap();
    for held in [false, true] {
        for _ in 0..4 {
            let x = rig.allocator.alloc(&other, 4096).unwrap();
            let bytes: Vec<u8> = [3.0f32; 1024]
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect();
            x.write(&rig.device, &other, &bytes).unwrap();
            rig.device.synchronize(&other).unwrap();
            let at = x.ptr().unwrap();
            // The last handle goes inside, or after the run.
            let keeps = held.then(|| x.clone());
            let mut args = [give(x)];
            let out = rig.call(&e, &rig.trees.step(), &[], &mut args);
            drop((args, keeps));
            // Whatever lies there next is written later than it was read, on the stream that it came from.
            let y = rig.allocator.alloc(&other, 4096).unwrap();
            assert!(on_cuda() || y.ptr().unwrap() != at, "nothing has run yet");
            rig.device
                .fill(&other, y.ptr().unwrap(), 0xff, 4096)
                .unwrap();
            rig.device.synchronize(&other).unwrap();
            assert_eq!(rig.read(&out[0]), [6.0; 1024]);
            drop(y);
        }
    }
    rig.device.synchronize(&other).unwrap();
    rig.finish();
}

fn given_outputs_of_the_path<D: Device>(rig: Rig<D>) {
    let (f, g) = (rig.scale_add("f", 2.0, 0.0), rig.scale_add("g", 3.0, 0.0));
    let e = eager(&rig, "e", 1.0, 1.0);
    let x = rig.floats(&[1.0; 64]);
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let mut args = [give(y)];
        let out = rig.call(&e, &step, &[], &mut args);
        assert!(matches!(args[0], Arg::Taken));
        assert_eq!(rig.trees.path_live(), 0, "it died inside");
        // g may take its memory: it comes after the eager run.
        let (p, z) = rig.phased(&g, &step, &x);
        assert_eq!(p, phase);
        assert_eq!(
            (rig.read(&out[0]), rig.read(&z)),
            (vec![3.0; 64], vec![3.0; 64])
        );
        rig.trees.audit().unwrap();
    }
    drop(x);
    rig.finish();
}

fn outputs_of_the_path_are_read_later<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let e = eager(&rig, "e", 1.0, 1.0);
    let (x, y) = (rig.floats(&[1.0; 64]), rig.floats(&[5.0; 64]));
    let other = rig.device.create_stream().unwrap();
    // Each turn runs it twice.
    for phase in [Warmup, Replay, Replay, Replay] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&f, &step, &x);
        assert_eq!(p, phase);
        // The eager run is on another stream than the path, and waits for nothing on the host.
        let run = rig.trees.run(&e, &step, &[], &other, &mut [lend(&out)]);
        let read = run.unwrap().only().unwrap();
        drop((out, step));
        // Written again by the next run, which comes after.
        let next = rig.one(&f, &rig.trees.step(), &y);
        let bytes = read.read(&rig.device, &other).unwrap();
        assert_eq!(bytes[..4], 3.0f32.to_le_bytes());
        assert_eq!(rig.read(&next), [10.0; 64]);
    }
    drop((x, y));
    rig.finish();
}

fn on_a_stream_of_its_own<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let spec = FunctionSpec::new("e").capture_if(|_| false);
    let stream = rig.device.create_stream().unwrap();
    let id = rig.device.stream_id(&stream);
    let e = rig.register(spec, move |k, rec, inputs| {
        assert_eq!(rec.device().stream_id(rec.stream()), id, "the caller's");
        Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 1.0)?])
    });
    let x = rig.floats(&[1.0; 16]);
    for _ in 0..4 {
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let mut args = [lend(&y)];
        let z = rig.trees.run(&e, &step, &[], &stream, &mut args).unwrap();
        let bytes = z[0].read(&rig.device, &stream).unwrap();
        assert_eq!(bytes[60..], 3.0f32.to_le_bytes());
    }
    drop(x);
    rig.finish();
}

/// A function that fails as long as it is told to, after it has allocated and read its input.
fn failing<D: Device>(rig: &Rig<D>, panics: bool) -> (Function, Arc<AtomicBool>) {
    let fail = Arc::new(AtomicBool::new(true));
    let told = fail.clone();
    let spec = FunctionSpec::new("e").capture_if(|_| false);
    let e = rig.register(spec, move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 2.0, 0.0)?;
        drop(x);
        let z = k.apply(rec, &y, 1.0, 1.0)?;
        if told.load(Ordering::Relaxed) {
            if panics {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            return Err("on purpose".into());
        }
        Ok(vec![z])
    });
    (e, fail)
}

fn fails_inside<D: Device>(rig: Rig<D>, panics: bool) {
    let (f, g) = (rig.scale_add("f", 2.0, 0.0), rig.scale_add("g", 3.0, 0.0));
    let (e, fail) = failing(&rig, panics);
    let x = rig.floats(&[1.0, 2.0]);
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let live = rig.allocator.stats().live_blocks.current;
        let before = rig.trees.counts();
        fail.store(true, Ordering::Relaxed);
        for given in [false, true] {
            let mut args = [if given { give(x.clone()) } else { lend(&y) }];
            let run = || {
                rig.trees
                    .run(&e, &step, &[], &rig.stream, &mut args)
                    .map(drop)
            };
            let result = catch_unwind(AssertUnwindSafe(run));
            match result {
                Ok(Err(Error::Function {
                    function,
                    phase,
                    source,
                })) if !panics => {
                    assert_eq!((&*function, phase), ("e", Eager));
                    assert_eq!(source.to_string(), "on purpose");
                }
                Err(panic) if panics => {
                    assert_eq!(panic.downcast_ref(), Some(&"on purpose"));
                }
                other => panic!("{other:?}"),
            }
            // As the closure left it.
            assert!(!given || matches!(args[0], Arg::Taken));
        }
        assert_eq!(rig.allocator.stats().live_blocks.current, live);
        assert_eq!(rig.trees.counts(), before);
        assert_eq!(
            (rig.read(&x), rig.read(&y)),
            (vec![1.0, 2.0], vec![2.0, 4.0])
        );
        // This thread allocates from where it did.
        let own = rig.floats(&[0.0]);
        assert_eq!(rig.allocator.stats().live_blocks.current, live + 1);
        drop(own);
        fail.store(false, Ordering::Relaxed);
        let out = rig.run(&e, &step, &[&y]);
        assert_eq!((out.phase(), rig.read(&out[0])), (Eager, vec![5.0, 9.0]));
        let (p, z) = rig.phased(&g, &step, &y);
        assert_eq!((p, rig.read(&z)), (phase, vec![6.0, 12.0]));
        rig.trees.audit().unwrap();
    }
    drop(x);
    rig.finish();
}

fn an_error_inside<D: Device>(rig: Rig<D>) {
    fails_inside(rig, false);
}

fn a_panic_inside<D: Device>(rig: Rig<D>) {
    fails_inside(rig, true);
}

fn inputs_that_cannot_be<D: Device>(rig: Rig<D>) {
    let e = eager(&rig, "e", 1.0, 0.0);
    let x = rig.floats(&[1.0]);
    let mut args = [give(x.clone()), Arg::Taken];
    let failed = rig
        .trees
        .run(&e, &rig.trees.step(), &[], &rig.stream, &mut args);
    assert!(matches!(failed, Err(Error::Inputs { .. })));
    assert!(args[0].is_given(), "nothing was given up");
    assert_eq!(rig.trees.counts().eager, 0);
    // What it binds is gone.
    let param = rig.floats(&[1.0]);
    let spec = FunctionSpec::new("bound")
        .bind(0, &param)
        .capture_if(|_| false);
    let bound = rig.register(spec, |_, _, _| Ok(vec![]));
    drop(param);
    let failed = rig
        .trees
        .run(&bound, &rig.trees.step(), &[], &rig.stream, &mut []);
    assert!(matches!(failed, Err(Error::StaticDied { input: 0, .. })));
    drop((x, args));
    rig.finish();
}

fn memory_is_the_default_pools<D: Device>(rig: Rig<D>) {
    let allocator = rig.allocator.clone();
    let spec = FunctionSpec::new("e").capture_if(|_| false);
    let kept = Arc::new(Mutex::new(None));
    let keeps = kept.clone();
    let e = rig.register(spec, move |k, rec, inputs| {
        // Through the recorder, or through the allocator; kept or not.
        let by_hand = allocator.alloc(rec.stream(), 256)?;
        *keeps.lock().unwrap() = Some(by_hand);
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let x = rig.floats(&[1.0; 64]);
    let live = rig.allocator.stats().live_blocks.current;
    let out = rig.one(&e, &rig.trees.step(), &x);
    assert_eq!(rig.allocator.stats().live_blocks.current, live + 2);
    assert_eq!(
        (rig.blocks(), rig.trees.pool_stats().segments.current),
        (0, 0)
    );
    let own = kept.lock().unwrap().take().unwrap();
    rig.put(&own, &[9.0; 64]);
    drop(rig.one(&e, &rig.trees.step(), &x));
    assert_eq!(
        (rig.read(&out), rig.read(&own)),
        (vec![2.0; 64], vec![9.0; 64])
    );
    drop((out, own, kept.lock().unwrap().take()));
    assert_eq!(rig.allocator.stats().live_blocks.current, live);
    drop((e, x, kept));
    rig.finish();
}

fn a_run_inside_an_eager_run<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let (trees, inner, stream) = (rig.trees.clone(), f.clone(), rig.stream.clone());
    let spec = FunctionSpec::new("e").capture_if(|_| false);
    let e = rig.register(spec, move |k, rec, inputs| {
        let x = inputs.get(0)?;
        let nested = trees.run(&inner, &trees.step(), &[], &stream, &mut [lend(x)]);
        assert!(matches!(nested, Err(Error::Nested { function }) if &*function == "f"));
        Ok(vec![k.apply(rec, x, 3.0, 0.0)?])
    });
    let x = rig.floats(&[1.0]);
    let out = rig.one(&e, &rig.trees.step(), &x);
    assert_eq!(rig.read(&out), [3.0]);
    drop((e, f, x, out));
    rig.finish();
}

fn a_stale_output_is_refused<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let spec = FunctionSpec::new("e").capture_if(|_| false);
    let kept = Arc::new(Mutex::new(None::<Tensor<D>>));
    let gives = kept.clone();
    let e = rig.register(spec, move |_, _, _| {
        Ok(gives.lock().unwrap().take().into_iter().collect())
    });
    let x = rig.floats(&[1.0]);
    let y = rig.one(&f, &rig.trees.step(), &x);
    drop(rig.one(&f, &rig.trees.step(), &x));
    *kept.lock().unwrap() = Some(y);
    let failed = rig
        .trees
        .run(&e, &rig.trees.step(), &[], &rig.stream, &mut []);
    assert!(matches!(failed, Err(Error::Stale(_))));
    assert_eq!(rig.run(&e, &rig.trees.step(), &[]).len(), 0);
    drop((e, x));
    rig.finish();
}

fn counted_in_the_report<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").capture_keys([[1i64].as_slice(), &[2]]);
    let f = rig.register(spec.max_recordings(1), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let x = rig.floats(&[1.0]);
    for _ in 0..4 {
        for key in 0..3 {
            let out = rig.call(&f, &rig.trees.step(), &[key], &mut [lend(&x)]);
            assert_eq!(rig.read(&out[0]), [2.0]);
        }
    }
    let report = rig.trees.report(&f).unwrap();
    // In the first round of both, nothing was recorded yet.
    assert_eq!(
        report.reasons,
        [
            (ReasonKind::NotWarm, 2),
            (ReasonKind::FirstRecording, 1),
            (ReasonKind::KeyNotCaptured, 4),
            (ReasonKind::RecordingLimit, 3),
        ]
    );
    assert_eq!(
        (report.replays, report.recordings, report.eager()),
        (2, 1, 7)
    );
    let runs = report.replays + report.reasons.iter().map(|(_, n)| n).sum::<u64>();
    assert_eq!(runs, 12, "one reason for each run that was no replay");
    assert_eq!(rig.trees.counts().eager, 7);
    drop(x);
    rig.finish();
}
