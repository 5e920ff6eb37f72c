//! Handles and steps on other threads: dropped while a closure runs, while others run the tree, and on other streams.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{Error, FunctionSpec, NodeId, Phase, Tensor, lend};

suite!(
    dropped_by_another_thread_inside_a_closure,
    dropped_inside_a_closure_that_fails,
    threads_that_clone_and_drop_what_others_run,
    threads_that_run_each_its_own_steps,
    streams_take_turns,
    waves_of_handles_dropped_elsewhere,
);

use Phase::{Record, Replay, Warmup};

/// The closure's work does not get the memory of what dies meanwhile, and the recording does not depend on when it died.
fn dropped_by_another_thread_inside_a_closure<D: Device>(rig: Rig<D>) {
    let slot: Arc<Mutex<Vec<Tensor<D>>>> = Arc::default();
    let inside = slot.clone();
    let a = rig.register(FunctionSpec::new("a").static_input(0), |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![k.apply(rec, x, 1.0, 1.0)?, k.apply(rec, x, 1.0, 2.0)?])
    });
    let b = rig.register(FunctionSpec::new("b"), move |k, rec, inputs| {
        let dropped = std::mem::take(&mut *inside.lock().unwrap());
        let places: Vec<_> = dropped.iter().map(|t| t.ptr()).collect::<Result<_, _>>()?;
        std::thread::scope(|s| {
            s.spawn(|| drop(dropped));
        });
        let mut all = Vec::new();
        for i in 0..4 {
            let next = k.apply(rec, inputs.get(0)?, 10.0, i as f32)?;
            assert!(
                !places.contains(&next.ptr()?),
                "memory that somebody may still read"
            );
            all.push(next);
        }
        Ok(all)
    });
    let x = rig.floats(&[1.0; 128]);
    for (round, phase) in [Warmup, Record, Replay, Replay, Replay]
        .into_iter()
        .enumerate()
    {
        let step = rig.trees.step();
        let mut outputs = rig.run(&a, &step, &[&x]).into_iter();
        let (first, second) = (outputs.next().unwrap(), outputs.next().unwrap());
        // Held in the closure at the recording; at replays dropped before, or held beyond.
        let kept = match round {
            0 | 1 => {
                slot.lock().unwrap().push(second);
                None
            }
            2 => {
                drop(second);
                None
            }
            _ => Some(second),
        };
        let out = rig.run(&b, &step, &[&first]);
        assert_eq!(out.phase(), phase);
        if phase != Warmup {
            assert_eq!(out.node(), Some(NodeId(1)));
        }
        for i in 0..4 {
            assert_eq!(rig.read(&out[i]), [20.0 + i as f32; 128]);
        }
        assert_eq!(rig.trees.path_live(), 5 + usize::from(kept.is_some()));
        if let Some(kept) = kept {
            assert_eq!(rig.read(&kept), [3.0; 128]);
        }
        rig.trees.audit().unwrap();
    }
    assert_eq!(rig.trees.descendants(), [1]);
    drop(x);
    rig.finish();
}

fn dropped_inside_a_closure_that_fails<D: Device>(rig: Rig<D>) {
    let slot: Arc<Mutex<Vec<Tensor<D>>>> = Arc::default();
    let inside = slot.clone();
    let a = rig.register(FunctionSpec::new("a"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![k.apply(rec, x, 1.0, 1.0)?, k.apply(rec, x, 1.0, 2.0)?])
    });
    let b = rig.register(FunctionSpec::new("b"), move |k, rec, mut inputs| {
        let dropped = std::mem::take(&mut *inside.lock().unwrap());
        let fail = !dropped.is_empty();
        drop(dropped);
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 10.0, 0.0)?;
        drop(x);
        let z = k.apply(rec, &y, 1.0, 0.0)?;
        if fail {
            Err("on purpose".into())
        } else {
            Ok(vec![z])
        }
    });
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Replay] {
        for fails in [true, false] {
            let step = rig.trees.step();
            let mut outputs = rig.run(&a, &step, &[&x]).into_iter();
            let (first, second) = (outputs.next().unwrap(), outputs.next().unwrap());
            if fails {
                slot.lock().unwrap().push(second);
            }
            let mut args = [cudagraph_trees::give(first)];
            let result = rig.trees.run(&b, &step, &[], &rig.stream, &mut args);
            if fails && phase != Replay {
                let Err(Error::Function { phase: p, .. }) = result else {
                    panic!("{result:?}")
                };
                assert_eq!(p, phase);
                if phase == Record {
                    // Given back; the other is gone, as its owner wished.
                    let cudagraph_trees::Arg::Give(first) = &args[0] else {
                        panic!()
                    };
                    assert_eq!(rig.read(first), [2.0]);
                    assert_eq!((rig.trees.path_live(), rig.blocks()), (1, 1));
                }
            } else {
                let out = result.unwrap();
                assert_eq!((out.phase(), rig.read(&out[0])), (phase, vec![20.0]));
                slot.lock().unwrap().clear();
            }
            rig.trees.audit().unwrap();
        }
    }
    drop(x);
    rig.finish();
}

fn threads_that_clone_and_drop_what_others_run<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 2.0, 0.0);
    let x = rig.floats(&[1.0, 2.0]);
    let shared: Mutex<Vec<Tensor<D>>> = Mutex::new(Vec::new());
    let done = AtomicBool::new(false);
    let stale = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let mut mine: Vec<Tensor<D>> = Vec::new();
                let mut turn = 0usize;
                while !done.load(Ordering::Acquire) {
                    turn += 1;
                    let taken = shared.lock().unwrap().last().cloned();
                    if let Some(tensor) = taken {
                        let view = tensor.view(4, 4);
                        mine.push(tensor);
                        match view {
                            Ok(view) => mine.push(view),
                            Err(Error::Stale(_)) => {
                                stale.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(other) => panic!("{other}"),
                        }
                    }
                    if turn.is_multiple_of(7) {
                        mine.clear();
                    }
                    std::thread::yield_now();
                }
            });
        }
        for _ in 0..200 {
            let step = rig.trees.step();
            let y = rig.one(&f, &step, &x);
            shared.lock().unwrap().push(y.clone());
            let z = rig.one(&g, &step, &y);
            shared.lock().unwrap().push(z.clone());
            assert_eq!(rig.read(&y), [2.0, 3.0]);
            assert_eq!(rig.read(&z), [4.0, 6.0]);
            let mut shared = shared.lock().unwrap();
            if shared.len() > 4 {
                shared.clear();
            }
        }
        done.store(true, Ordering::Release);
    });
    shared.lock().unwrap().clear();
    let counts = rig.trees.counts();
    assert_eq!(
        (counts.warmups, counts.recordings, counts.replays),
        (2, 2, 396)
    );
    drop(x);
    rig.finish();
}

fn threads_that_run_each_its_own_steps<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    let start = Barrier::new(3);
    std::thread::scope(|s| {
        for thread in 0..3 {
            let (f, x, rig, start) = (&f, &x, &rig, &start);
            s.spawn(move || {
                start.wait();
                for _ in 0..30 {
                    let step = rig.trees.step();
                    let y = rig
                        .trees
                        .run(f, &step, &[thread], &rig.stream, &mut [lend(x)])
                        .unwrap();
                    // Whatever the others do, as long as the token lives this is mine.
                    let z = rig
                        .trees
                        .run(f, &step, &[thread], &rig.stream, &mut [lend(&y[0])])
                        .unwrap();
                    assert_eq!(rig.read(&y[0]), [2.0]);
                    assert_eq!(rig.read(&z[0]), [3.0]);
                }
            });
        }
    });
    rig.trees.audit().unwrap();
    drop(x);
    rig.finish();
}

fn streams_take_turns<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 2.0, 0.0);
    let streams: Vec<_> = (0..3)
        .map(|_| rig.device.create_stream().unwrap())
        .collect();
    let x = rig.floats(&[1.0]);
    rig.device.synchronize(&rig.stream).unwrap();
    let mut phases = Vec::new();
    for turn in 0..9 {
        let step = rig.trees.step();
        let on = |f, stream, input: &Tensor<D>| {
            rig.trees
                .run(f, &step, &[], stream, &mut [lend(input)])
                .unwrap()
        };
        // Nothing waits on the host between the runs.
        let y = on(&f, &streams[turn % 3], &x);
        let z = on(&g, &streams[(turn + 1) % 3], &y[0]);
        let w = on(&g, &streams[(turn + turn / 3) % 3], &z[0]);
        phases.push(w.phase());
        let last = &streams[(turn + turn / 3) % 3];
        for (out, value) in [(&y, 2.0f32), (&z, 4.0), (&w, 8.0)] {
            assert_eq!(out[0].read(&rig.device, last).unwrap(), value.to_le_bytes());
        }
    }
    assert_eq!(phases[..3], [Warmup, Record, Replay]);
    assert_eq!(rig.trees.counts().recordings, 3);
    drop(x);
    rig.finish();
}

fn waves_of_handles_dropped_elsewhere<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        (0..70)
            .map(|i| Ok(k.apply(rec, x, 1.0, i as f32)?))
            .collect()
    });
    let x = rig.floats(&[0.0]);
    for round in 0..6 {
        let step = rig.trees.step();
        let outputs: Vec<_> = rig.run(&f, &step, &[&x]).into_iter().collect();
        let (mut mine, mut theirs) = (Vec::new(), Vec::new());
        for (i, out) in outputs.into_iter().enumerate() {
            if (i + round) % 2 == 0 {
                &mut mine
            } else {
                &mut theirs
            }
            .push((i, out));
        }
        let other = std::thread::spawn(move || drop(theirs));
        for (i, out) in &mine {
            assert_eq!(rig.read(out), [*i as f32]);
        }
        other.join().unwrap();
        assert_eq!(rig.trees.path_live(), 35);
        drop(mine);
        assert_eq!((rig.trees.path_live(), rig.blocks()), (0, 0));
    }
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.replays), (1, 4));
    drop(x);
    rig.finish();
}
