//! How much a tree and a function may keep: budgets of graphs and of their bytes, and who goes first; limits of recordings, in all and at one place.
//! Names carry the rows of the tables.

mod common;
#[allow(dead_code)] // numbers that are not whole
#[path = "../examples/support/random.rs"]
mod random;

use std::sync::{Arc, Mutex, mpsc};

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{Budget, Function, FunctionSpec, Phase, Reason, ReasonKind, lend};
use random::Random;

suite!(
    the_one_unused_the_longest_goes,
    a_replay_is_later_than_the_recording_before_it,
    leaves_go_before_what_they_are_below,
    who_goes_is_what_a_search_through_all_says,
    what_is_held_stays,
    where_the_oldest_is_held_the_next_goes,
    no_graph_at_all,
    one_graph,
    bytes_of_graphs,
    a_budget_that_shrinks,
    a_budget_set_while_a_closure_runs,
    what_was_evicted_gives_its_memory_back,
    an_eviction_makes_room_for_its_function,
    limits_at_each_place,
    t7_01_forty_shapes_and_a_cap_of_eight,
    t7_03_told_at_the_threshold,
    t7_13_more_keys_than_graphs,
    t7_14_sizes_in_any_order,
);

use Phase::{Eager, Record, Replay, Warmup};

/// x * 2 + `add`, recorded at its first run.
fn root<D: Device>(rig: &Rig<D>, name: &str, add: f32) -> Function {
    rig.register(
        FunctionSpec::new(name).skip_warmup(),
        move |k, rec, inputs| Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, add)?]),
    )
}

fn graphs(graphs: usize) -> Budget {
    Budget {
        graphs,
        ..Budget::default()
    }
}

fn the_one_unused_the_longest_goes<D: Device>(rig: Rig<D>) {
    rig.trees.set_budget(graphs(3));
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| root(&rig, name, 1.0));
    let x = rig.floats(&[1.0]);
    let run = |f: &Function| {
        let (phase, out) = rig.phased(f, &rig.trees.step(), &x);
        assert_eq!(rig.read(&out), [3.0]);
        phase
    };
    assert_eq!([&a, &b, &c].map(run), [Record; 3]);
    assert_eq!([&a, &b].map(run), [Replay; 2]);
    assert_eq!(run(&d), Record);
    assert_eq!(rig.nodes(), "a b d");
    assert_eq!(run(&c), Record, "recorded anew, without a warmup");
    assert_eq!(rig.nodes(), "b d c");
    assert_eq!([&b, &d, &c].map(run), [Replay; 3]);
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.removed), (5, 2));
    assert_eq!(rig.trees.report(&a).unwrap().recordings, 0);
    drop(x);
    rig.finish();
}

fn a_replay_is_later_than_the_recording_before_it<D: Device>(rig: Rig<D>) {
    rig.trees.set_budget(graphs(2));
    let [a, b, c] = ["a", "b", "c"].map(|name| root(&rig, name, 1.0));
    let x = rig.floats(&[1.0]);
    for f in [&a, &b, &a, &c] {
        drop(rig.one(f, &rig.trees.step(), &x));
    }
    assert_eq!(rig.nodes(), "a c");
    drop(x);
    rig.finish();
}

fn leaves_go_before_what_they_are_below<D: Device>(rig: Rig<D>) {
    rig.trees.set_budget(graphs(4));
    let [parent, child, other, d, e, f] =
        ["parent", "child", "other", "d", "e", "f"].map(|name| root(&rig, name, 1.0));
    let x = rig.floats(&[1.0]);
    let step = rig.trees.step();
    let y = rig.one(&parent, &step, &x);
    // Two below the parent, of which the second is the later.
    drop(rig.one(&child, &step, &y));
    drop(rig.one(&other, &step, &y));
    assert_eq!(rig.trees.descendants(), [2]);
    drop((y, step));
    let run = |f: &Function| drop(rig.one(f, &rig.trees.step(), &x));
    run(&d);
    assert_eq!(rig.nodes(), "parent child other d");
    run(&e);
    assert_eq!(rig.nodes(), "parent other d e");
    run(&f);
    assert_eq!(rig.nodes(), "parent d e f", "the parent was used before d");
    run(&other);
    assert_eq!(rig.nodes(), "d e f other", "without a child, it is next");
    assert_eq!(rig.trees.descendants(), [0; 4]);
    drop(x);
    rig.finish();
}

/// What a plain model knows of a recording: the functions from the root to it, and when it was used last.
type Known = (Vec<usize>, u64);

/// The leaf that was used the longest ago and is not on the path.
fn oldest(known: &[Known], path: &[usize]) -> Option<usize> {
    let below = |a: &[usize], b: &[usize]| a.len() > b.len() && a.starts_with(b);
    let goes = |(at, _): &(usize, u64)| {
        let it = &known[*at].0;
        !path.starts_with(it) && !known.iter().any(|(other, _)| below(other, it))
    };
    let used = known.iter().map(|(_, used)| *used).enumerate();
    used.filter(goes)
        .min_by_key(|(_, used)| *used)
        .map(|(at, _)| at)
}

fn who_goes_is_what_a_search_through_all_says<D: Device>(rig: Rig<D>) {
    const FUNCTIONS: usize = 6;
    let functions: Vec<Function> = (0..FUNCTIONS)
        .map(|f| root(&rig, &f.to_string(), f as f32))
        .collect();
    let x = rig.floats(&[1.0]);
    let mut random = Random::new(5);
    let mut known: Vec<Known> = Vec::new();
    let (mut clock, mut replays, mut removed) = (0, 0, 0);
    let mut cap = 7;
    for round in 0..600 {
        if round % 97 == 96 {
            // Never above what there is room for already, so nothing goes at once.
            cap = 7 + random.below(6) + known.len().saturating_sub(7);
            rig.trees.set_budget(graphs(cap));
        } else if round == 0 {
            rig.trees.set_budget(graphs(cap));
        }
        if round % 31 == 30 {
            // What is recorded of a function goes, with all that is below.
            let gone = random.below(FUNCTIONS);
            rig.trees.invalidate(&functions[gone]).unwrap();
            let before = known.len();
            known.retain(|(it, _)| !it.contains(&gone));
            removed += before - known.len();
        }
        let step = rig.trees.step();
        let (mut path, mut at) = (Vec::new(), x.clone());
        for _ in 0..=random.below(3) {
            let f = random.below(FUNCTIONS);
            path.push(f);
            clock += 1;
            let expected = match known.iter_mut().find(|(it, _)| *it == path) {
                Some((_, used)) => {
                    *used = clock;
                    replays += 1;
                    Replay
                }
                None => {
                    while known.len() + 1 > cap {
                        known.remove(oldest(&known, &path[..path.len() - 1]).unwrap());
                        removed += 1;
                    }
                    known.push((path.clone(), clock));
                    Record
                }
            };
            let (phase, out) = rig.phased(&functions[f], &step, &at);
            assert_eq!(phase, expected, "{round}: {path:?}");
            at = out;
        }
        let view = rig.trees.view();
        let way = |id| {
            let mut way = Vec::new();
            let mut next = Some(id);
            while let Some(node) = view.nodes.iter().find(|n| Some(n.id) == next) {
                way.insert(0, node.function.parse::<usize>().unwrap());
                next = node.parent;
            }
            way
        };
        let there: Vec<_> = view.nodes.iter().map(|node| way(node.id)).collect();
        let kept: Vec<_> = known.iter().map(|(it, _)| it.clone()).collect();
        assert_eq!(there, kept, "{round}");
        let roots: Vec<_> = view.roots.iter().map(|root| way(*root)).collect();
        let first: Vec<_> = kept.into_iter().filter(|it| it.len() == 1).collect();
        assert_eq!(roots, first, "{round}");
    }
    let counts = rig.trees.counts();
    assert_eq!((counts.replays, counts.removed), (replays, removed as u64));
    assert!(replays > 50 && removed > 300, "{replays}, {removed}");
    drop(x);
    rig.finish();
}

fn what_is_held_stays<D: Device>(rig: Rig<D>) {
    rig.trees.set_budget(graphs(2));
    let [a, b, c] = ["a", "b", "c"].map(|name| root(&rig, name, 1.0));
    let x = rig.floats(&[1.0]);
    let step = rig.trees.step();
    let (y, z) = (rig.one(&a, &step, &x), rig.one(&b, &step, &x));
    for round in 0..2 {
        let out = rig.run(&c, &step, &[&x]);
        assert_eq!(out.reason(), Some(Reason::GraphBudget));
        assert_eq!((out.phase(), rig.read(&out[0])), (Eager, vec![3.0]));
        assert_eq!(rig.nodes(), "a b", "{round}");
    }
    assert_eq!((rig.read(&y), rig.read(&z)), (vec![3.0], vec![3.0]));
    // Of the tip nothing is held: its recording may go.
    drop(z);
    assert_eq!(rig.phased(&c, &step, &x).0, Record);
    assert_eq!(rig.nodes(), "a c");
    // Held by a step that is open, while others run.
    let next = rig.trees.step();
    let (phase, out) = rig.phased(&b, &next, &x);
    assert_eq!((phase, rig.read(&out)), (Record, vec![3.0]));
    assert_eq!((rig.nodes().as_str(), rig.read(&y)), ("a b", vec![3.0]));
    drop((y, out, step, next));
    drop(rig.one(&c, &rig.trees.step(), &x));
    assert_eq!(rig.nodes(), "a c");
    rig.trees.audit().unwrap();
    drop(x);
    rig.finish();
}

fn where_the_oldest_is_held_the_next_goes<D: Device>(rig: Rig<D>) {
    rig.trees.set_budget(graphs(3));
    let [a, b, c, d, e] = ["a", "b", "c", "d", "e"].map(|name| root(&rig, name, 1.0));
    let warms = rig.scale_add("warms", 2.0, 1.0);
    let x = rig.floats(&[1.0]);
    let run = |f: &Function| rig.phased(f, &rig.trees.step(), &x).0;
    let open = rig.trees.step();
    let (phase, y) = rig.phased(&a, &open, &x);
    assert_eq!(phase, Record);
    // Behind what was warmed up and is held, another step begins at the root again; what is held is carried along.
    let other = rig.trees.step();
    let (phase, z) = rig.phased(&warms, &other, &x);
    assert_eq!(phase, Warmup);
    assert_eq!([&b, &c, &d].map(run), [Record; 3]);
    assert_eq!(rig.trees.view().roots.len(), 3);
    assert_eq!(rig.nodes(), "a c d", "a is the oldest");
    assert_eq!((rig.read(&y), rig.read(&z)), (vec![3.0], vec![3.0]));
    drop((y, z, open, other));
    assert_eq!(run(&e), Record);
    assert_eq!(rig.nodes(), "c d e", "nothing of it is held any more");
    drop(x);
    rig.finish();
}

fn no_graph_at_all<D: Device>(rig: Rig<D>) {
    let f = root(&rig, "f", 1.0);
    let warmed = rig.scale_add("warmed", 2.0, 1.0);
    let x = rig.floats(&[1.0]);
    for (budget, phase) in [(0, Eager), (1, Record), (0, Eager)] {
        rig.trees.set_budget(graphs(budget));
        assert_eq!(rig.nodes(), "");
        for _ in 0..2 {
            let out = rig.run(&f, &rig.trees.step(), &[&x]);
            assert_eq!(rig.read(&out[0]), [3.0]);
            if phase == Eager {
                assert_eq!(out.reason(), Some(Reason::GraphBudget));
            } else {
                assert_eq!(rig.nodes(), "f");
            }
        }
    }
    let mut phases = Vec::new();
    for _ in 0..3 {
        let (phase, out) = rig.phased(&warmed, &rig.trees.step(), &x);
        assert_eq!(rig.read(&out), [3.0]);
        phases.push(phase);
    }
    assert_eq!(phases, [Warmup, Eager, Eager]);
    assert_eq!(rig.trees.counts().removed, 1);
    drop(x);
    rig.finish();
}

fn one_graph<D: Device>(rig: Rig<D>) {
    rig.trees.set_budget(graphs(1));
    let [a, b] = [("a", 1.0), ("b", 2.0)].map(|(name, add)| root(&rig, name, add));
    let x = rig.floats(&[1.0]);
    for round in 0..4 {
        for (f, value) in [(&a, 3.0), (&b, 4.0)] {
            for phase in [Record, Replay] {
                let (p, out) = rig.phased(f, &rig.trees.step(), &x);
                assert_eq!((p, rig.read(&out)), (phase, vec![value]), "{round}");
                assert_eq!(rig.nodes(), f.name());
            }
        }
    }
    // The second of a step has no room as long as the first is held.
    let step = rig.trees.step();
    let y = rig.one(&a, &step, &x);
    let out = rig.run(&b, &step, &[&y]);
    assert_eq!(out.reason(), Some(Reason::GraphBudget));
    assert_eq!((rig.read(&y), rig.read(&out[0])), (vec![3.0], vec![8.0]));
    assert_eq!(rig.nodes(), "a");
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.removed), (9, 8));
    drop((x, y, out, step));
    rig.finish();
}

fn bytes_of_graphs<D: Device>(rig: Rig<D>) {
    /// Of a graph with one copy and one kernel.
    const EACH: u64 = 2 * 10 * 1024;
    let names = ["a", "b", "c", "d"];
    let functions = names.map(|name| root(&rig, name, 1.0));
    let x = rig.floats(&[1.0]);
    let bytes = |graph_bytes| {
        rig.trees.set_budget(Budget {
            graph_bytes,
            ..Budget::default()
        });
    };
    let run = |index: usize| {
        let (phase, out) = rig.phased(&functions[index], &rig.trees.step(), &x);
        assert_eq!(rig.read(&out), [3.0]);
        (phase, rig.nodes())
    };
    bytes(2 * EACH);
    assert_eq!(run(0), (Record, "a".into()));
    assert_eq!(run(1), (Record, "a b".into()));
    assert_eq!(run(2), (Record, "b c".into()));
    assert_eq!(run(1), (Replay, "b c".into()));
    assert_eq!(run(3), (Record, "b d".into()));
    bytes(2 * EACH - 1);
    assert_eq!(rig.nodes(), "d");
    // The latest stays, whatever it takes.
    bytes(0);
    assert_eq!(run(0), (Record, "a".into()));
    assert_eq!(run(0), (Replay, "a".into()));
    assert_eq!(run(1), (Record, "b".into()));
    bytes(u64::MAX);
    assert_eq!([2, 3].map(run).map(|(phase, _)| phase), [Record; 2]);
    drop(x);
    rig.finish();
}

fn a_budget_that_shrinks<D: Device>(rig: Rig<D>) {
    let functions = ["a", "b", "c", "d", "e"].map(|name| root(&rig, name, 1.0));
    let x = rig.floats(&[1.0]);
    for f in &functions {
        drop(rig.one(f, &rig.trees.step(), &x));
    }
    drop(rig.one(&functions[0], &rig.trees.step(), &x));
    rig.trees.set_budget(graphs(3));
    assert_eq!(rig.nodes(), "a d e", "at once");
    assert_eq!(rig.trees.counts().removed, 2);
    // What is in use stays, and goes when there is a reason to look again.
    let step = rig.trees.step();
    let mut held = Vec::new();
    for f in &functions[..3] {
        held.push(rig.one(f, &step, &x));
    }
    assert_eq!(rig.nodes(), "a b c");
    rig.trees.set_budget(graphs(1));
    assert_eq!(rig.nodes(), "a b c");
    for out in &held {
        assert_eq!(rig.read(out), [3.0]);
    }
    drop((held, step));
    let step = rig.trees.step();
    let out = rig.one(&functions[4], &step, &x);
    assert_eq!(rig.nodes(), "e");
    rig.trees.set_budget(graphs(0));
    assert_eq!((rig.nodes().as_str(), rig.read(&out)), ("e", vec![3.0]));
    drop(out);
    rig.trees.set_budget(graphs(0));
    assert_eq!(rig.nodes(), "");
    drop((x, step));
    rig.finish();
}

fn a_budget_set_while_a_closure_runs<D: Device>(rig: Rig<D>) {
    let functions = ["a", "b"].map(|name| root(&rig, name, 1.0));
    let x = rig.floats(&[1.0]);
    for f in &functions {
        drop(rig.one(f, &rig.trees.step(), &x));
    }
    let (to, from) = mpsc::channel::<(Option<Budget>, mpsc::Sender<()>)>();
    let trees = rig.trees.clone();
    let other = std::thread::spawn(move || {
        for (budget, done) in from {
            trees.set_budget(budget.unwrap());
            done.send(()).unwrap();
        }
    });
    let (trees, sender) = (Mutex::new(Some(rig.trees.clone())), Mutex::new(Some(to)));
    let spec = FunctionSpec::new("sets").skip_warmup();
    let sets = rig.register(spec, move |k, rec, inputs| {
        // By this thread, by another.
        if let Some(trees) = trees.lock().unwrap().take() {
            trees.set_budget(graphs(2));
            assert_eq!(trees.view().nodes.len(), 2, "not while the closure runs");
        } else if let Some(to) = sender.lock().unwrap().take() {
            let (done, is_done) = mpsc::channel();
            to.send((Some(graphs(1)), done)).unwrap();
            is_done.recv().unwrap();
        }
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 1.0)?])
    });
    drop(rig.one(&sets, &rig.trees.step(), &x));
    assert_eq!(rig.nodes(), "b sets");
    rig.trees.invalidate(&sets).unwrap();
    let (phase, out) = rig.phased(&sets, &rig.trees.step(), &x);
    assert_eq!((phase, rig.read(&out)), (Record, vec![3.0]));
    assert_eq!(rig.nodes(), "sets");
    other.join().unwrap();
    drop((x, out));
    rig.finish();
}

fn what_was_evicted_gives_its_memory_back<D: Device>(rig: Rig<D>) {
    const BYTES: usize = 10 << 20;
    rig.trees.set_budget(graphs(1));
    let (large, small) = (root(&rig, "large", 1.0), root(&rig, "small", 1.0));
    let (x, y) = (rig.floats(&vec![1.0; BYTES / 4]), rig.floats(&[1.0]));
    drop(rig.one(&large, &rig.trees.step(), &x));
    let reserved = || rig.trees.pool_stats().reserved_bytes.current;
    assert_eq!(
        reserved(),
        2 * BYTES as u64,
        "the copy of the input, and the output"
    );
    rig.allocator.trim().unwrap();
    assert_eq!(reserved(), 2 * BYTES as u64, "the graph has the addresses");
    drop(rig.one(&small, &rig.trees.step(), &y));
    assert_eq!(rig.nodes(), "small");
    rig.allocator.trim().unwrap();
    assert_eq!(reserved(), 2 << 20);
    // Both work on.
    let (phase, out) = rig.phased(&small, &rig.trees.step(), &y);
    assert_eq!((phase, rig.read(&out)), (Replay, vec![3.0]));
    let (phase, out) = rig.phased(&large, &rig.trees.step(), &x);
    assert_eq!(phase, Record);
    assert!(rig.read(&out).iter().all(|v| *v == 3.0));
    drop((x, y, out));
    rig.finish();
}

fn an_eviction_makes_room_for_its_function<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f").skip_warmup().max_recordings(2);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 1.0)?])
    });
    let x = rig.floats(&[1.0]);
    let run = |key: i64| {
        let out = rig.call(&f, &rig.trees.step(), &[key], &mut [lend(&x)]);
        assert_eq!(rig.read(&out[0]), [3.0]);
        (out.phase(), rig.trees.report(&f).unwrap().recordings)
    };
    assert_eq!([0, 1].map(run), [(Record, 1), (Record, 2)]);
    assert_eq!(run(2), (Eager, 2));
    rig.trees.set_budget(graphs(1));
    assert_eq!(run(2), (Record, 1));
    assert_eq!(run(2), (Replay, 1));
    rig.trees.set_budget(Budget::default());
    assert_eq!(run(0), (Record, 2));
    assert_eq!(run(1), (Eager, 2));
    rig.trees.invalidate(&f).unwrap();
    assert_eq!(run(1), (Record, 1));
    drop(x);
    rig.finish();
}

fn limits_at_each_place<D: Device>(rig: Rig<D>) {
    let spec = FunctionSpec::new("f")
        .skip_warmup()
        .max_recordings_at_a_place(2);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 1.0)?])
    });
    let parent = root(&rig, "parent", 0.0);
    let inputs: Vec<_> = (1..=3).map(|n| rig.floats(&vec![1.0; n])).collect();
    for below in [false, true] {
        for round in 0..2 {
            for (index, x) in inputs.iter().enumerate() {
                let step = rig.trees.step();
                let held = below.then(|| rig.one(&parent, &step, &inputs[0]));
                let out = rig.run(&f, &step, &[x]);
                assert_eq!(rig.read(&out[0]), vec![3.0; index + 1]);
                let phase = match (index, round) {
                    (2, _) => Eager,
                    (_, 0) => Record,
                    _ => Replay,
                };
                assert_eq!(out.phase(), phase, "{below} {round} {index}");
                if phase == Eager {
                    assert_eq!(out.reason(), Some(Reason::PlaceLimit));
                }
                drop(held);
            }
        }
    }
    // Of each key there may be as many.
    let out = rig.call(&f, &rig.trees.step(), &[7], &mut [lend(&inputs[2])]);
    assert_eq!(out.phase(), Record);
    assert_eq!(rig.trees.report(&f).unwrap().recordings, 5);
    drop((inputs, out));
    rig.finish();
}

fn t7_01_forty_shapes_and_a_cap_of_eight<D: Device>(rig: Rig<D>) {
    let said = Arc::new(Mutex::new(Vec::new()));
    let hears = said.clone();
    rig.trees
        .on_advice(move |advice| hears.lock().unwrap().push(advice.reason));
    let spec = FunctionSpec::new("f").max_recordings(8);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let after = rig.scale_add("after", 1.0, 1.0);
    for round in 0..4 {
        for n in 1..=40usize {
            let x = rig.floats(&vec![n as f32; n]);
            let step = rig.trees.step();
            let out = rig.call(&f, &step, &[n as i64], &mut [lend(&x)]);
            assert_eq!(rig.read(&out[0]), vec![2.0 * n as f32; n]);
            let known = n <= 8 || (round == 0 && n == 1);
            let phase = match (known, round) {
                (true, 0) => Warmup,
                (true, 1) => Record,
                (true, _) => Replay,
                // In the first round there might be recordings yet.
                (false, 0) => Warmup,
                (false, 1) => Eager,
                (false, _) => Eager,
            };
            assert_eq!(out.phase(), phase, "{round} {n}");
            // What else is in the step is not concerned.
            if round > 1 && n > 9 {
                let y = rig.floats(&[1.0]);
                let phase = rig.phased(&after, &step, &y).0;
                assert!(n < 12 || phase == Replay, "{round} {n} {phase:?}");
            }
        }
    }
    assert_eq!(*said.lock().unwrap(), [Reason::RecordingLimit]);
    let report = rig.trees.report(&f).unwrap();
    assert_eq!(report.count(ReasonKind::RecordingLimit), 3 * 32);
    assert_eq!((report.recordings, report.replays), (8, 16));
    rig.finish();
}

fn t7_03_told_at_the_threshold<D: Device>(rig: Rig<D>) {
    let said = Arc::new(Mutex::new(Vec::new()));
    let hears = said.clone();
    rig.trees
        .on_advice(move |advice| hears.lock().unwrap().push(advice.function.clone()));
    let spec = FunctionSpec::new("f").max_recordings(3);
    let f = rig.register(spec, |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let x = rig.floats(&[1.0]);
    for key in 0..6 {
        for _ in 0..2 {
            drop(rig.call(&f, &rig.trees.step(), &[key], &mut [lend(&x)]));
        }
        let told = usize::from(key >= 3);
        assert_eq!(said.lock().unwrap().len(), told, "{key}");
        let count = rig.trees.report(&f).unwrap();
        assert_eq!(
            count.count(ReasonKind::RecordingLimit),
            2 * (key - 2).max(0) as u64
        );
    }
    drop(x);
    rig.finish();
}

fn t7_13_more_keys_than_graphs<D: Device>(rig: Rig<D>) {
    const CAP: usize = 32;
    rig.trees.set_budget(graphs(CAP));
    let body = |name, add| {
        let spec = FunctionSpec::new(name).skip_warmup();
        rig.register(spec, move |k, rec, inputs| {
            Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, add)?])
        })
    };
    let (f, g): (Function, Function) = (body("f", 1.0), body("g", 2.0));
    let x = rig.floats(&[0.0; 64]);
    let run = |key: i64| {
        rig.put(&x, &[key as f32; 64]);
        let step = rig.trees.step();
        let y = rig.call(&f, &step, &[key], &mut [lend(&x)]);
        let z = rig.call(&g, &step, &[key], &mut [lend(&y[0])]);
        let first = 2.0 * key as f32 + 1.0;
        assert_eq!(rig.read(&y[0]), [first; 64]);
        assert_eq!(rig.read(&z[0]), [2.0 * first + 2.0; 64]);
        (y.phase(), z.phase())
    };
    let mut reserved = None;
    for key in 0..300 {
        assert_eq!(run(key), (Record, Record), "{key}");
        let view = rig.trees.view();
        assert_eq!(view.nodes.len(), CAP.min(2 * (key as usize + 1)));
        for node in &view.nodes {
            assert!(
                node.parent
                    .is_none_or(|p| view.nodes.iter().any(|n| n.id == p))
            );
        }
        let bytes = rig.trees.pool_stats().reserved_bytes.current;
        assert_eq!(*reserved.get_or_insert(bytes), bytes);
    }
    // The latest are there, the others come again.
    for key in 285..300 {
        assert_eq!(run(key), (Replay, Replay), "{key}");
    }
    assert_eq!(run(3), (Record, Record));
    assert_eq!(run(299), (Replay, Replay));
    assert_eq!(
        rig.trees.counts().removed as usize,
        2 * 301 - CAP,
        "{:?}",
        rig.trees.counts()
    );
    drop(x);
    rig.finish();
}

fn t7_14_sizes_in_any_order<D: Device>(rig: Rig<D>) {
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % below
    };
    for round in 0..20 {
        let mut sizes: Vec<usize> = vec![1, 2, 3, 8, 100, 1000, 5000];
        if round % 10 == 0 {
            sizes.push(300_000);
        }
        for at in (1..sizes.len()).rev() {
            sizes.swap(at, random(at + 1));
        }
        let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
            let doubled = k.apply(rec, inputs.get(0)?, 2.0, 0.0)?;
            Ok(vec![k.apply(rec, &doubled, 1.0, 1.0)?])
        });
        for phase in [Warmup, Record, Replay] {
            for n in &sizes {
                let x = rig.floats(&vec![round as f32; *n]);
                let mut args = [lend(&x)];
                let out = rig.call(&f, &rig.trees.step(), &[*n as i64], &mut args);
                assert_eq!(out.phase(), phase);
                let value = 2.0 * round as f32 + 1.0;
                assert!(rig.read(&out[0]).iter().all(|v| *v == value), "{sizes:?}");
            }
        }
        assert_eq!(rig.trees.report(&f).unwrap().recordings, sizes.len());
    }
    assert_eq!(
        rig.trees.view().nodes.len(),
        0,
        "each function took its own along"
    );
    rig.finish();
}
