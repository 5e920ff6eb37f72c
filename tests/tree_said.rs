//! What a closure says besides its outputs, and recording ahead of traffic.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{
    Error, FunctionSpec, Outputs, Phase, Prepare, Reason, ReasonKind, Tensor, Value, lend,
};

suite!(
    tree_10_t7_06_more_warmup_is_asked_for,
    t7_06_a_recording_is_discarded,
    tree_27_host_values_go_with_the_outputs,
    t1_08_state_made_at_the_first_run,
    t4_08_prepared_then_served_by_many_threads,
    t7_14_prepared_in_any_order,
    what_cannot_be_prepared_is_told,
);

use Phase::{Eager, Record, Replay, Warmup};

fn tree_10_t7_06_more_warmup_is_asked_for<D: Device>(rig: Rig<D>) {
    // Warm before: what f asks for concerns f alone.
    let stable = rig.scale_add("stable", 1.0, 0.0);
    let x = rig.floats(&[1.0; 16]);
    rig.one(&stable, &rig.trees.step(), &x);
    let spec = FunctionSpec::new("f");
    let executions = Arc::new(AtomicU32::new(0));
    let count = executions.clone();
    let f = rig.register(spec, move |k, rec, inputs| {
        let n = count.fetch_add(1, Ordering::Relaxed) + 1;
        if [1, 2, 4].contains(&n) {
            rec.need_more_warmup();
        }
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let warm = |name: &str| {
        let view = rig.trees.view();
        let function = view.functions.iter().find(|f| f.name == name).unwrap();
        function.keys.iter().any(|(_, warm)| *warm)
    };
    let mut phases = Vec::new();
    for (call, is_warm) in [false, false, true, true, true].into_iter().enumerate() {
        let step = rig.trees.step();
        let (phase, y) = rig.phased(&f, &step, &x);
        assert_eq!(rig.read(&y), [2.0; 16]);
        assert_eq!(warm("f"), is_warm, "after call {call}");
        phases.push(phase);
    }
    assert_eq!(phases, [Warmup, Warmup, Warmup, Record, Replay]);
    assert_eq!(executions.load(Ordering::Relaxed), 4);
    assert!(warm("stable"));
    let report = rig.trees.report(&f).unwrap();
    assert_eq!(
        report.reasons,
        [(ReasonKind::NotWarm, 3), (ReasonKind::FirstRecording, 1)]
    );
    assert_eq!((report.replays, report.recordings), (1, 1));
    drop(x);
    rig.finish();
}

fn t7_06_a_recording_is_discarded<D: Device>(rig: Rig<D>) {
    let records = Arc::new(AtomicU32::new(0));
    let count = records.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        if rec.phase() == Record && count.fetch_add(1, Ordering::Relaxed) < 2 {
            rec.discard_recording();
        }
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 3.0, 0.0)?;
        drop(x);
        Ok(vec![y])
    });
    let a = rig.scale_add("a", 1.0, 1.0);
    let x = rig.floats(&[1.0; 16]);
    let mut phases = Vec::new();
    for _ in 0..6 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        // Given up, and died inside of the recording: it is there for the eager answer.
        let (phase, z) = rig.moved(&f, &step, y);
        assert_eq!(rig.read(&z), [6.0; 16]);
        phases.push(phase);
        rig.trees.audit().unwrap();
    }
    assert_eq!(phases, [Warmup, Eager, Eager, Record, Replay, Replay]);
    assert_eq!(rig.trees.counts().failed_captures, 0);
    let report = rig.trees.report(&f).unwrap();
    assert_eq!(report.count(ReasonKind::Discarded), 2);
    drop(x);
    rig.finish();
}

/// A value that the function computes on the host from what its key says: the same in every phase, and the recording's in a replay.
fn tree_27_host_values_go_with_the_outputs<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        let rows: Value = Arc::new(x.bytes() / 8);
        rec.return_value(rows);
        rec.return_value(Arc::new(()));
        Ok(vec![k.apply(rec, x, 1.0, 1.0)?])
    });
    for rows in [2u64, 3] {
        let x = rig.floats(&vec![1.0; 2 * rows as usize]);
        let mut out = Outputs::new();
        for phase in [Warmup, Record, Replay, Replay] {
            let step = rig.trees.step();
            rig.trees
                .run_into(
                    &f,
                    &step,
                    &[rows as i64],
                    &rig.stream,
                    &mut [lend(&x)],
                    &mut out,
                )
                .unwrap();
            assert_eq!((out.phase(), out.values()), (phase, 2));
            assert_eq!(out.value::<u64>(0).as_deref(), Some(&rows));
            assert!(out.value::<u32>(0).is_none());
            assert!(out.value::<()>(1).is_some());
            assert!(out.value::<()>(2).is_none());
            assert_eq!(rig.read(&out[0]), vec![2.0; 2 * rows as usize]);
            out.clear();
            assert_eq!(out.values(), 0);
        }
    }
    rig.finish();
}

/// A cache that the function makes at its first run and keeps: declared, it outlives generations; undeclared, it is named.
fn t1_08_state_made_at_the_first_run<D: Device>(rig: Rig<D>) {
    let state: Arc<Mutex<Option<Tensor<D>>>> = Arc::default();
    let kept = state.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        let x = inputs.get(0)?;
        let mut state = kept.lock().unwrap();
        let cache = match &*state {
            Some(cache) => cache.clone(),
            None => {
                let cache = rec.alloc_state(x.bytes())?;
                let n = x.bytes() / 4;
                k.kernels
                    .fill(rec.device(), rec.stream(), cache.ptr()?, n, 0.0)?;
                state.insert(cache).clone()
            }
        };
        // cache += x, in place
        let (device, stream) = (rec.device(), rec.stream());
        let n = x.bytes() / 4;
        k.kernels
            .add(device, stream, cache.ptr()?, cache.ptr()?, x.ptr()?, n)?;
        Ok(vec![k.apply(rec, &cache, 1.0, 0.0)?])
    });
    let mut at = None;
    for (round, phase) in [Warmup, Record, Replay, Replay, Replay]
        .into_iter()
        .enumerate()
    {
        let x = rig.floats(&[1.0; 16]);
        let step = rig.trees.step();
        let (went, y) = rig.phased(&f, &step, &x);
        assert_eq!(went, phase);
        assert_eq!(rig.read(&y), [round as f32 + 1.0; 16]);
        let cache = state.lock().unwrap().clone().unwrap();
        assert_eq!(rig.read(&cache), [round as f32 + 1.0; 16]);
        let ptr = cache.ptr().unwrap();
        assert_eq!(*at.get_or_insert(ptr), ptr);
    }
    // Kept, and not declared.
    let leak: Arc<Mutex<Option<Tensor<D>>>> = Arc::default();
    let kept = leak.clone();
    let g = rig.register(FunctionSpec::new("g"), move |k, rec, inputs| {
        let y = k.apply(rec, inputs.get(0)?, 1.0, 0.0)?;
        *kept.lock().unwrap() = Some(rec.alloc(4096)?);
        Ok(vec![y])
    });
    let x = rig.floats(&[1.0; 16]);
    let step = rig.trees.step();
    let refused = rig.trees.run(&g, &step, &[], &rig.stream, &mut [lend(&x)]);
    match refused {
        Err(Error::Untracked {
            function,
            bytes,
            count,
            at,
            ..
        }) => {
            assert_eq!((&*function, bytes, count), ("g", 4096, 1));
            assert!(at.file().ends_with("tree_said.rs"));
        }
        other => panic!("{other:?}"),
    }
    *leak.lock().unwrap() = None;
    *state.lock().unwrap() = None;
    drop((x, f, g));
    rig.finish();
}

fn t4_08_prepared_then_served_by_many_threads<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 1.0);
    let inputs: Vec<Tensor<D>> = (1..=4).map(|n| rig.floats(&vec![1.0; 16 * n])).collect();
    let keys: Vec<[i64; 1]> = (1..=4).map(|n| [n]).collect();
    let requests: Vec<Prepare<'_, D>> = inputs
        .iter()
        .zip(&keys)
        .map(|(x, key)| Prepare {
            function: &f,
            key,
            inputs: vec![x],
        })
        .collect();
    let mut seen = Vec::new();
    let recorded = rig.trees.prepare(&rig.stream, &requests, |p| {
        seen.push((p.index, p.total, *p.outcome.as_ref().unwrap(), p.runs));
    });
    assert_eq!(recorded, 4);
    let want: Vec<_> = (0..4).map(|i| (i, 4, Record, 2)).collect();
    assert_eq!(seen, want);
    assert_eq!(rig.trees.prepare(&rig.stream, &requests, |_| {}), 4);
    assert_eq!(rig.trees.counts().recordings, 4);
    rig.device.synchronize(&rig.stream).unwrap();
    // 32 callers, each with streams, tokens and inputs of its own.
    std::thread::scope(|scope| {
        for thread in 0..32 {
            let (rig, f, keys) = (&rig, &f, &keys);
            scope.spawn(move || {
                let stream = rig.device.create_stream().unwrap();
                for round in 0..6 {
                    let n = (thread + round) % 4 + 1;
                    let value = (100 * thread + round) as f32;
                    let bytes: Vec<u8> = vec![value; 16 * n]
                        .into_iter()
                        .flat_map(f32::to_le_bytes)
                        .collect();
                    let x = rig.allocator.alloc(&stream, bytes.len() as u64).unwrap();
                    x.write(&rig.device, &stream, &bytes).unwrap();
                    let step = rig.trees.step();
                    let out = rig
                        .trees
                        .run(f, &step, &keys[n - 1], &stream, &mut [lend(&x)])
                        .unwrap();
                    let got = out[0].read(&rig.device, &stream).unwrap();
                    let want: Vec<u8> = vec![2.0 * value + 1.0; 16 * n]
                        .into_iter()
                        .flat_map(f32::to_le_bytes)
                        .collect();
                    assert_eq!(got, want);
                }
            });
        }
    });
    drop(requests);
    drop(inputs);
    rig.device.synchronize_device().unwrap();
    rig.finish();
}

fn t7_14_prepared_in_any_order<D: Device>(rig: Rig<D>) {
    let lengths = [8usize, 64, 1, 256, 16];
    for turn in 0..lengths.len() {
        let f = rig.scale_add("f", 1.0, 1.0);
        let mut order = lengths;
        order.rotate_left(turn);
        let keys = order.map(|n| [n as i64]);
        let inputs: Vec<Tensor<D>> = order.iter().map(|n| rig.floats(&vec![0.0; *n])).collect();
        let requests: Vec<Prepare<'_, D>> = inputs
            .iter()
            .zip(&keys)
            .map(|(x, key)| Prepare {
                function: &f,
                key,
                inputs: vec![x],
            })
            .collect();
        assert_eq!(rig.trees.prepare(&rig.stream, &requests, |_| {}), 5);
        for (x, key) in inputs.iter().zip(&keys) {
            rig.put(x, &vec![key[0] as f32; x.bytes() as usize / 4]);
            let step = rig.trees.step();
            let out = rig.call(&f, &step, key, &mut [lend(x)]);
            assert_eq!(out.phase(), Replay);
            assert!(rig.read(&out[0]).iter().all(|v| *v == key[0] as f32 + 1.0));
        }
    }
    rig.finish();
}

fn what_cannot_be_prepared_is_told<D: Device>(rig: Rig<D>) {
    let eager = rig.register(
        FunctionSpec::new("eager").capture_keys([[1].as_slice()]),
        |k, rec, inputs| Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 0.0)?]),
    );
    let fails = rig.register(FunctionSpec::new("fails"), |_, _, _| {
        Err("on purpose".into())
    });
    let never = rig.register(FunctionSpec::new("never"), |k, rec, inputs| {
        rec.need_more_warmup();
        Ok(vec![k.apply(rec, inputs.get(0)?, 1.0, 0.0)?])
    });
    let x = rig.floats(&[1.0; 4]);
    let request = |function| Prepare {
        function,
        key: &[9],
        inputs: vec![&x],
    };
    let mut told = Vec::new();
    let requests = [request(&eager), request(&fails), request(&never)];
    let recorded = rig.trees.prepare(&rig.stream, &requests, |p| {
        told.push((p.outcome.as_ref().ok().copied(), p.reason, p.runs));
    });
    assert_eq!(recorded, 0);
    assert_eq!(
        told,
        [
            (Some(Eager), Some(Reason::KeyNotCaptured), 1),
            (None, None, 1),
            (Some(Warmup), Some(Reason::NotWarm), 16),
        ]
    );
    drop(requests);
    drop(x);
    rig.finish();
}
