//! Which runs are captured at all, and what is said of those that are not: keys, graphs too small, what cannot be captured; refusals, advice and reports. Names carry the rows of the tables.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{Rig, Said, kinds};
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, Code, Device};
use cudagraph_trees::{
    Arg, Error, Function, FunctionSpec, MovePolicy, OnMove, Phase, Reason, ReasonKind, Tensor,
    give, lend,
};

suite!(
    skip_02_keys_with_a_size_are_skipped,
    skip_04_an_operation_that_cannot_be_captured,
    not_capturable_in_every_phase,
    pol_01_a_closure_chooses_the_keys,
    static_26_more_sizes_than_the_limit,
    static_27_capture_sizes,
    static_28_capture_sizes_of_two,
    static_29_capture_sizes_of_three,
    part_09_small_graphs_are_not_kept,
    t7_11_graphs_of_no_node_one_and_two,
    refusing_changes_nothing,
    refusing_any_kind,
    a_refused_skip_skips_nothing,
    advice_is_given_once_for_each_function_and_kind,
    the_hook_may_use_the_tree,
    t7_08_strict_and_a_report,
);

use Phase::{Eager, Record, Replay, Warmup};

/// Adds `by` to input 0, in place, and gives what it reads there afterwards.
fn adds<D: Device>(rig: &Rig<D>, spec: FunctionSpec<D>, by: f32) -> Function {
    rig.register(spec, move |k, rec, inputs| {
        let y = inputs.get(0)?;
        k.kernels
            .increment(rec.device(), rec.stream(), y.ptr()?, y.bytes() / 4, by)?;
        Ok(vec![k.apply(rec, y, 1.0, 0.0)?])
    })
}

fn skip_02_keys_with_a_size_are_skipped<D: Device>(rig: Rig<D>) {
    // A key that names a size is a dynamic shape.
    let spec = FunctionSpec::new("f").capture_if(<[i64]>::is_empty);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    for round in 0..3 {
        for n in [1usize, 4] {
            let x = rig.floats(&vec![n as f32; n]);
            let out = rig.call(&f, &rig.trees.step(), &[n as i64], &mut [lend(&x)]);
            assert_eq!(out.reason(), Some(Reason::KeyNotCaptured));
            assert_eq!(
                (out.phase(), rig.read(&out[0])),
                (Eager, vec![2.0 * n as f32; n])
            );
        }
        let x = rig.floats(&[7.0]);
        let (phase, out) = rig.phased(&f, &rig.trees.step(), &x);
        assert_eq!(phase, [Warmup, Record, Replay][round]);
        assert_eq!(rig.read(&out), [14.0]);
    }
    let report = rig.trees.report(&f).unwrap();
    assert_eq!(report.count(ReasonKind::KeyNotCaptured), 6);
    assert_eq!(
        (report.eager(), report.recordings, report.replays),
        (6, 1, 1)
    );
    rig.finish();
}

/// x * 2, after something that cannot be captured.
fn unsafe_op<D: Device>(rig: &Rig<D>, name: &str) -> (Function, Arc<Mutex<Vec<Phase>>>) {
    let phases = Arc::new(Mutex::new(Vec::new()));
    let seen = phases.clone();
    let f = rig.register(FunctionSpec::new(name), move |k, rec, mut inputs| {
        seen.lock().unwrap().push(rec.phase());
        let x = inputs.take(0)?;
        let doubled = k.apply(rec, &x, 2.0, 0.0)?;
        drop(x);
        rec.not_capturable("topk")?;
        Ok(vec![doubled])
    });
    (f, phases)
}

fn skip_04_an_operation_that_cannot_be_captured<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let a = rig.scale_add("a", 1.0, 1.0);
    let (f, phases) = unsafe_op(&rig, "f");
    let x = rig.floats(&[1.0, 2.0]);
    for round in 0..5 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let held = y.clone();
        let out = rig.call(&f, &step, &[], &mut [give(y)]);
        assert_eq!(rig.read(&out[0]), [4.0, 6.0]);
        assert_eq!(rig.read(&held), [2.0, 3.0]);
        if round == 0 {
            assert_eq!(out.phase(), Warmup);
        } else {
            assert_eq!(out.reason(), Some(Reason::NotCapturable));
            assert_eq!((out.phase(), out.node()), (Eager, None));
        }
    }
    // The recording is tried once, and answered eagerly in the same call.
    assert_eq!(
        *phases.lock().unwrap(),
        [Warmup, Record, Eager, Eager, Eager, Eager]
    );
    assert_eq!(kinds(&said), [("f".into(), ReasonKind::NotCapturable)]);
    let counts = rig.trees.counts();
    assert_eq!(
        (counts.eager, counts.failed_captures, counts.recordings),
        (4, 0, 1)
    );
    assert_eq!(rig.trees.last_failure(), None);
    drop(x);
    rig.finish();
}

fn not_capturable_in_every_phase<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let (f, phases) = unsafe_op(&rig, "f");
    let x = rig.floats(&[1.0]);
    // In a capture of the caller's it is the run's error.
    let mut graph = cudagraph_trees::Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let step = rig.trees.step();
    let failed = rig
        .trees
        .run(&f, &step, &[], capture.stream(), &mut [lend(&x)]);
    let Err(Error::Function { phase, source, .. }) = failed.map(drop) else {
        panic!("it cannot be captured there either")
    };
    assert_eq!(
        (phase, source.to_string().as_str()),
        (Phase::Inline, "topk cannot be captured")
    );
    capture.end().unwrap();
    drop((graph, step));
    // An output of the path that is given, and that died before the closure said so, is given to the eager run.
    for round in 0..4 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let out = rig.call(&f, &step, &[], &mut [give(y)]);
        assert_eq!(
            (out.phase(), rig.read(&out[0])),
            (if round == 0 { Warmup } else { Eager }, vec![4.0])
        );
        rig.trees.audit().unwrap();
        assert_eq!(rig.trees.path_live(), usize::from(round == 0));
    }
    assert_eq!(
        *phases.lock().unwrap(),
        [Phase::Inline, Warmup, Record, Eager, Eager, Eager]
    );
    // Told to forget what it knows, the tree tries again.
    rig.trees.invalidate(&f).unwrap();
    let (phase, out) = rig.phased(&f, &rig.trees.step(), &x);
    assert_eq!((phase, rig.read(&out)), (Warmup, vec![2.0]));
    drop((x, out));
    rig.finish();
}

fn pol_01_a_closure_chooses_the_keys<D: Device>(rig: Rig<D>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let asks = asked.clone();
    let spec = FunctionSpec::new("f").capture_if(move |key| {
        asks.fetch_add(1, Ordering::Relaxed);
        key[0] % 2 == 0
    });
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    // The same without a say.
    let plain = rig.scale_add("plain", 2.0, 0.0);
    let x = rig.floats(&[3.0]);
    for round in 0..4 {
        for key in 0..4 {
            for (f, always) in [(&f, false), (&plain, true)] {
                let out = rig.call(f, &rig.trees.step(), &[key], &mut [lend(&x)]);
                let captured = [Warmup, Record, Replay, Replay][round];
                let phase = if always || key % 2 == 0 {
                    captured
                } else {
                    Eager
                };
                assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![6.0]));
            }
        }
    }
    assert_eq!(asked.load(Ordering::Relaxed), 4, "once for each key");
    assert_eq!(
        rig.trees
            .report(&f)
            .unwrap()
            .count(ReasonKind::KeyNotCaptured),
        8
    );
    assert_eq!(rig.trees.report(&plain).unwrap().eager(), 0);
    drop(x);
    rig.finish();
}

fn static_26_more_sizes_than_the_limit<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let spec = FunctionSpec::new("f").max_recordings(1);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    for n in 1..=19usize {
        let x = rig.floats(&vec![1.0; n]);
        for _ in 0..3 {
            let out = rig.call(&f, &rig.trees.step(), &[n as i64], &mut [lend(&x)]);
            assert_eq!(rig.read(&out[0]), vec![2.0; n]);
        }
        assert_eq!(said.lock().unwrap().len(), usize::from(n > 1));
    }
    let said = said.lock().unwrap();
    assert_eq!(said[0].reason, Reason::RecordingLimit);
    assert!(
        said[0].text.contains("raise max_recordings"),
        "{}",
        said[0].text
    );
    // No warmup for what is not going to be recorded.
    let counts = rig.trees.counts();
    assert_eq!(
        (counts.recordings, counts.warmups, counts.eager),
        (1, 1, 54)
    );
    drop(said);
    rig.finish();
}

/// Runs a function that captures `sizes` with each key of `all` three times: which were recorded.
fn capture_sizes<D: Device>(rig: Rig<D>, sizes: &[&[i64]], all: &[Vec<i64>]) {
    let spec = FunctionSpec::new("f").capture_keys(sizes.iter().copied());
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    for key in all {
        let x = rig.floats(&vec![1.0; key.iter().product::<i64>() as usize]);
        for round in 0..3 {
            let out = rig.call(&f, &rig.trees.step(), key, &mut [lend(&x)]);
            let captured = sizes.contains(&key.as_slice());
            let phase = if captured {
                [Warmup, Record, Replay][round]
            } else {
                Eager
            };
            assert_eq!(out.phase(), phase, "{key:?}");
            assert_eq!(out[0].bytes(), x.bytes());
        }
    }
    assert_eq!(rig.trees.counts().recordings as usize, sizes.len());
    rig.finish();
}

fn static_27_capture_sizes<D: Device>(rig: Rig<D>) {
    let all: Vec<_> = (1..=9).map(|n| vec![n]).collect();
    capture_sizes(rig, &[&[2], &[5], &[7]], &all);
}

fn static_28_capture_sizes_of_two<D: Device>(rig: Rig<D>) {
    let all: Vec<_> = (2..=9)
        .flat_map(|i| (2..=9).map(move |j| vec![i, j]))
        .collect();
    capture_sizes(rig, &[&[2, 3], &[4, 5], &[6, 2], &[7, 3]], &all);
}

fn static_29_capture_sizes_of_three<D: Device>(rig: Rig<D>) {
    let all: Vec<_> = (2..=4)
        .flat_map(|i| (2..=4).flat_map(move |j| (2..=4).map(move |k| vec![i, j, k])))
        .collect();
    let sizes: [&[i64]; 4] = [&[2, 3, 4], &[4, 4, 3], &[3, 4, 4], &[4, 2, 3]];
    capture_sizes(rig, &sizes, &all);
}

/// A function of `kernels` kernels, with no input to be copied in.
fn of_kernels<D: Device>(rig: &Rig<D>, spec: FunctionSpec<D>, kernels: usize) -> Function {
    rig.register(spec.static_input(0), move |k, rec, inputs| {
        let mut x = inputs.get(0)?.clone();
        for _ in 0..kernels {
            x = k.apply(rec, &x, 1.0, 1.0)?;
        }
        Ok(vec![x])
    })
}

/// Adaptation: a partition is a function, and its kernels are its graph's nodes.
fn part_09_small_graphs_are_not_kept<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0]);
    for (least, kernels, recorded) in [(10, 5, false), (2, 5, true), (5, 5, true), (6, 5, false)] {
        let spec = FunctionSpec::new("f").min_graph_nodes(least);
        let f = of_kernels(&rig, spec, kernels);
        for phase in [Warmup, Record, Replay] {
            let out = rig.run(&f, &rig.trees.step(), &[&x]);
            let phase = if recorded || phase == Warmup {
                phase
            } else {
                Eager
            };
            assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![6.0]));
            if phase == Eager {
                assert_eq!(out.reason(), Some(Reason::GraphTooSmall));
            }
        }
        assert_eq!(
            rig.trees.report(&f).unwrap().recordings,
            usize::from(recorded)
        );
        assert_eq!(rig.trees.counts().failed_captures, 0);
    }
    drop(x);
    rig.finish();
}

fn t7_11_graphs_of_no_node_one_and_two<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0]);
    for kernels in 0..3 {
        for least in [0, 2] {
            let spec = FunctionSpec::new("f").min_graph_nodes(least);
            let f = of_kernels(&rig, spec, kernels);
            let mut phases = Vec::new();
            for _ in 0..4 {
                let out = rig.run(&f, &rig.trees.step(), &[&x]);
                assert_eq!(rig.read(&out[0]), [1.0 + kernels as f32]);
                phases.push(out.phase());
            }
            let expected = if kernels >= least {
                [Warmup, Record, Replay, Replay]
            } else {
                [Warmup, Eager, Eager, Eager]
            };
            assert_eq!(phases, expected, "{kernels} of {least}");
        }
    }
    drop(x);
    rig.finish();
}

fn refusing_changes_nothing<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let a = rig.scale_add("a", 1.0, 1.0);
    let (f, runs) = rig.counted(
        FunctionSpec::new("f").max_recordings(1),
        |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            Ok(vec![k.apply(rec, &x, 2.0, 0.0)?])
        },
    );
    let x = rig.floats(&[1.0]);
    for _ in 0..3 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        drop(rig.moved(&f, &step, y));
    }
    rig.trees.refuse(ReasonKind::EAGER);
    for refused_after in [Record, Replay] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let z = rig.one(&a, &step, &y);
        if refused_after == Record {
            // a below a was warm, but not recorded there.
            assert_eq!(rig.trees.counts().recordings, 3);
        }
        let before = (rig.trees.view(), rig.trees.counts(), rig.layout());
        let report = rig.trees.report(&f).unwrap();
        let ran = runs.load(Ordering::Relaxed);
        let mut args = [give(z)];
        for _ in 0..3 {
            match rig.trees.run(&f, &step, &[], &rig.stream, &mut args) {
                Err(Error::Refused { function, reason }) => {
                    assert_eq!((&*function, reason), ("f", Reason::RecordingLimit));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(runs.load(Ordering::Relaxed), ran);
        assert_eq!((rig.trees.view(), rig.trees.counts(), rig.layout()), before);
        assert_eq!(rig.trees.report(&f).unwrap(), report);
        let [Arg::Give(z)] = args else {
            panic!("it is given still")
        };
        assert_eq!((rig.read(&y), rig.read(&z)), (vec![2.0], vec![3.0]));
        rig.trees.audit().unwrap();
    }
    // What replays is not refused.
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    let (phase, out) = rig.moved(&f, &step, y);
    assert_eq!((phase, rig.read(&out)), (Replay, vec![4.0]));
    drop((out, step));
    assert_eq!(kinds(&said), []);
    // And once it is allowed again, it is run.
    rig.trees.refuse(&[]);
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    let z = rig.one(&a, &step, &y);
    let (phase, out) = rig.moved(&f, &step, z);
    assert_eq!((phase, rig.read(&out)), (Eager, vec![6.0]));
    drop((x, y, out, step));
    rig.finish();
}

fn refusing_any_kind<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[1.0]);
    let reason = |f: &Function| {
        let step = rig.trees.step();
        match rig.trees.run(f, &step, &[], &rig.stream, &mut [lend(&x)]) {
            Err(Error::Refused { reason, .. }) => Some(reason),
            Ok(_) => None,
            Err(other) => panic!("{other}"),
        }
    };
    rig.trees
        .refuse(&[ReasonKind::NotWarm, ReasonKind::FirstRecording]);
    assert_eq!(reason(&f), Some(Reason::NotWarm));
    rig.trees.refuse(&[ReasonKind::FirstRecording]);
    assert_eq!(reason(&f), None);
    assert_eq!(reason(&f), Some(Reason::FirstRecording));
    rig.trees.refuse(&[ReasonKind::NotWarm]);
    assert_eq!((reason(&f), reason(&f)), (None, None));
    // What the closure says only while it is recorded: the call is not answered eagerly then.
    let (g, phases) = unsafe_op(&rig, "g");
    rig.trees.refuse(ReasonKind::EAGER);
    assert_eq!(reason(&g), None);
    let small = of_kernels(&rig, FunctionSpec::new("small").min_graph_nodes(9), 1);
    assert_eq!(reason(&small), None);
    for _ in 0..2 {
        assert_eq!(reason(&g), Some(Reason::NotCapturable));
        assert_eq!(reason(&small), Some(Reason::GraphTooSmall));
    }
    assert_eq!(*phases.lock().unwrap(), [Warmup, Record]);
    assert_eq!(rig.trees.counts().eager, 0);
    drop(x);
    rig.finish();
}

/// A capture that fails is refused, too, and what was given is there again.
#[test]
fn refusing_captures_that_fail() {
    let device = Faulty::new(HostDevice::new());
    let rig = Rig::new(device.clone());
    let a = rig.scale_add("a", 1.0, 1.0);
    let (f, runs) = rig.counted(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        Ok(vec![k.apply(rec, &x, 2.0, 0.0)?])
    });
    let x = rig.floats(&[1.0]);
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    drop(rig.moved(&f, &step, y));
    drop(step);
    rig.trees.refuse(&[ReasonKind::CaptureFailed]);
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    let live = rig.blocks();
    device.fail(Call::Instantiate, 1, Code::OutOfMemory);
    let mut args = [give(y)];
    let refused = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
    match refused {
        Err(Error::Refused { reason, .. }) => assert_eq!(reason, Reason::CaptureFailed),
        other => panic!("{other:?}"),
    }
    assert_eq!(
        (runs.load(Ordering::Relaxed), rig.trees.counts().eager),
        (2, 0)
    );
    assert_eq!(
        (rig.blocks(), rig.trees.counts().failed_captures),
        (live, 1)
    );
    assert!(rig.trees.last_failure().unwrap().contains("made to fail"));
    let [Arg::Give(y)] = args else {
        panic!("it is given still")
    };
    assert_eq!(rig.read(&y), [2.0]);
    let (phase, out) = rig.moved(&f, &step, y);
    assert_eq!((phase, rig.read(&out)), (Record, vec![4.0]));
    drop((x, out, step));
    rig.finish();
}

fn a_refused_skip_skips_nothing<D: Device>(rig: Rig<D>) {
    let policy = MovePolicy {
        after: 0,
        then: OnMove::Skip,
    };
    let spec = FunctionSpec::new("f")
        .skip_warmup()
        .static_input(0)
        .on_static_move(policy);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let (p1, p2) = (rig.floats(&[1.0]), rig.floats(&[2.0]));
    drop(rig.one(&f, &rig.trees.step(), &p1));
    rig.trees.refuse(ReasonKind::EAGER);
    let refused = rig
        .trees
        .run(&f, &rig.trees.step(), &[], &rig.stream, &mut [lend(&p2)]);
    assert!(matches!(
        refused,
        Err(Error::Refused {
            reason: Reason::InputMoved(_),
            ..
        })
    ));
    let (phase, out) = rig.phased(&f, &rig.trees.step(), &p1);
    assert_eq!((phase, rig.read(&out)), (Replay, vec![2.0]));
    rig.trees.refuse(&[]);
    assert_eq!(rig.phased(&f, &rig.trees.step(), &p2).0, Eager);
    assert_eq!(rig.phased(&f, &rig.trees.step(), &p1).0, Eager);
    drop((p1, p2, out));
    rig.finish();
}

fn advice_is_given_once_for_each_function_and_kind<D: Device>(rig: Rig<D>) {
    let said = rig.advice();
    let spec = |name| FunctionSpec::new(name).mutates(0).max_recordings(0);
    let functions = ["f", "g"].map(|name| adds(&rig, spec(name), 1.0));
    let eager = rig.floats(&[0.0]);
    let a = rig.scale_add("a", 1.0, 0.0);
    for round in 1..=3 {
        for f in &functions {
            let step = rig.trees.step();
            drop(rig.run(f, &step, &[&eager]));
            let y = rig.one(&a, &step, &eager);
            drop(rig.run(f, &step, &[&y]));
        }
        let report = rig.trees.report(&functions[0]).unwrap();
        assert_eq!(
            report.reasons,
            [
                (ReasonKind::RecordingLimit, round),
                (ReasonKind::InputMutated, round)
            ]
        );
    }
    let all = [
        ("f", ReasonKind::InputMutated),
        ("f", ReasonKind::RecordingLimit),
        ("g", ReasonKind::InputMutated),
        ("g", ReasonKind::RecordingLimit),
    ];
    assert_eq!(kinds(&said), all.map(|(f, kind)| (f.to_owned(), kind)));
    // Given at the end of the run that it is about, also where that is found out inside of it.
    let (h, _) = unsafe_op(&rig, "h");
    drop(rig.one(&h, &rig.trees.step(), &eager));
    assert_eq!(kinds(&said).len(), 4);
    drop(rig.one(&h, &rig.trees.step(), &eager));
    assert_eq!(kinds(&said)[4..], [("h".into(), ReasonKind::NotCapturable)]);
    let said = said.lock().unwrap();
    for advice in &*said {
        let start = format!("{} runs eagerly: {}; ", advice.function, advice.reason);
        assert!(advice.text.starts_with(&start), "{}", advice.text);
        assert!(!advice.text.contains('\n'));
    }
    drop((said, eager));
    rig.finish();
}

fn the_hook_may_use_the_tree<D: Device>(rig: Rig<D>) {
    let f = adds(&rig, FunctionSpec::new("f").mutates(0), 1.0);
    let g = adds(&rig, FunctionSpec::new("g").mutates(0), 10.0);
    let x = rig.floats(&[0.0]);
    let said = Said::default();
    let (trees, stream, hears) = (rig.trees.clone(), rig.stream.clone(), said.clone());
    let (inside, y) = (Mutex::new(Some(g)), x.clone());
    rig.trees.on_advice(move |advice| {
        hears.lock().unwrap().push(advice.clone());
        trees.audit().unwrap();
        let Some(g) = inside.lock().unwrap().take() else {
            return;
        };
        // A run, whose advice comes to the same hook; and the end of a function.
        let out = trees
            .run(&g, &trees.step(), &[], &stream, &mut [lend(&y)])
            .unwrap();
        assert_eq!(out.phase(), Eager);
        trees.set_budget(cudagraph_trees::Budget::default());
        trees.invalidate(&g).unwrap();
        drop(g);
    });
    let out = rig.run(&f, &rig.trees.step(), &[&x]);
    assert_eq!((rig.read(&x), rig.read(&out[0])), (vec![11.0], vec![1.0]));
    assert_eq!(
        kinds(&said),
        [
            ("f".into(), ReasonKind::InputMutated),
            ("g".into(), ReasonKind::InputMutated)
        ]
    );
    assert_eq!(rig.trees.view().functions.len(), 1);
    // The hook holds the tree: another takes its place.
    rig.trees.on_advice(|_| ());
    drop((x, out));
    rig.finish();
}

fn t7_08_strict_and_a_report<D: Device>(rig: Rig<D>) {
    let f = adds(&rig, FunctionSpec::new("f").mutates(0).static_input(0), 1.0);
    let g = adds(&rig, FunctionSpec::new("g").mutates(0), 1.0);
    let x = rig.floats(&[0.0]);
    for _ in 0..5 {
        drop(rig.run(&f, &rig.trees.step(), &[&x]));
        drop(rig.run(&g, &rig.trees.step(), &[&x]));
    }
    let [of_f, of_g] = [&f, &g].map(|f| rig.trees.report(f).unwrap());
    assert_eq!((of_f.replays, of_f.eager(), of_f.recordings), (3, 0, 1));
    assert_eq!(
        of_f.reasons,
        [(ReasonKind::NotWarm, 1), (ReasonKind::FirstRecording, 1)]
    );
    assert_eq!((of_g.replays, of_g.eager(), of_g.recordings), (0, 5, 0));
    assert_eq!(of_g.reasons, [(ReasonKind::InputMutated, 5)]);
    rig.trees.refuse(ReasonKind::EAGER);
    let refused = |f: &Function, x: &Tensor<D>| {
        let step = rig.trees.step();
        let run = rig.trees.run(f, &step, &[], &rig.stream, &mut [lend(x)]);
        matches!(run, Err(Error::Refused { .. }))
    };
    assert!(!refused(&f, &x) && refused(&g, &x));
    assert_eq!(rig.read(&x), [11.0]);
    // Of another tree, there is nothing to report.
    let other = cudagraph_trees::GraphTrees::new(&rig.allocator).unwrap();
    assert!(matches!(
        other.report(&f),
        Err(Error::ForeignHandle { what: "function" })
    ));
    assert!(matches!(
        other.invalidate(&f),
        Err(Error::ForeignHandle { what: "function" })
    ));
    drop((x, other));
    rig.finish();
}
