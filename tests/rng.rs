//! Random numbers: warmup, record, replay and eager runs draw from one sequence.
mod common;

use common::{Rig, on_cuda};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, CaptureMode, CaptureStatus, Code, Device};
use cudagraph_trees::{Error, FunctionSpec, Generator, GeneratorState, Graph, Phase, Tensor};

suite!(
    rng_01_replays_after_reseeding_give_what_warmup_record_and_replay_gave,
    rng_02_eager_and_replayed_draws_are_one_sequence,
    rng_03_a_capture_draws_nothing_and_a_replay_follows_the_seed,
    rng_04_states_are_exchanged_inside_a_capture,
    rng_04_states_are_exchanged_inside_a_tree,
    rng_04_what_a_state_is,
    rng_04_a_graph_keeps_the_states_that_it_draws_from,
    rng_04_a_node_keeps_the_states_that_it_draws_from,
    rng_04_a_run_inside_a_capture_keeps_its_states_with_that_graph,
    rng_04_on_a_fork_beside_another_capture,
    rng_04_a_capture_of_others_keeps_states_for_good,
    rng_04_a_capture_that_is_abandoned_keeps_nothing,
    rng_07_a_graph_that_goes_while_it_runs,
    rng_07_a_node_that_goes_while_it_runs,
    rng_08_seeding_inside_a_capture_is_refused,
);

const N: u64 = 10;

fn drawer<D: Device>(
    rig: &Rig<D>,
    generator: &Generator<D>,
    draws: usize,
) -> cudagraph_trees::Function {
    let generator = generator.clone();
    rig.register(FunctionSpec::new("draw"), move |_, rec, _| {
        let mut out = Vec::new();
        for _ in 0..draws {
            let t = rec.alloc(4 * N)?;
            generator.uniform(rec.stream(), t.ptr()?, N)?;
            out.push(t);
        }
        Ok(out)
    })
}

/// What an eager run of `draws` draws gives, one after the other.
fn eager<D: Device>(rig: &Rig<D>, generator: &Generator<D>, draws: usize) -> Vec<Vec<f32>> {
    let t = rig.floats(&[0.0; N as usize]);
    (0..draws)
        .map(|_| {
            generator.uniform(&rig.stream, t.ptr().unwrap(), N).unwrap();
            rig.read(&t)
        })
        .collect()
}

fn rng_01_replays_after_reseeding_give_what_warmup_record_and_replay_gave<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 0).unwrap();
    let f = drawer(&rig, &generator, 1);
    let run = |expected: Phase| {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[]);
        assert_eq!(out.phase(), expected);
        rig.read(&out[0])
    };
    let first = [run(Phase::Warmup), run(Phase::Record), run(Phase::Replay)];
    generator.seed(&rig.stream, 0).unwrap();
    let again = [run(Phase::Replay), run(Phase::Replay), run(Phase::Replay)];
    assert_eq!(first, again);
    assert_ne!(first[0], first[1]);
    assert_eq!(generator.get(&rig.stream).unwrap(), (0, 9));
    // The first number of seed 0: the top 24 bits of the generator's first word.
    assert_eq!(first[0][0], (0x6627_e8d5u32 >> 8) as f32 / (1 << 24) as f32);
    generator.seed(&rig.stream, 0).unwrap();
    assert_eq!(eager(&rig, &generator, 3), first);
    drop((f, generator));
    rig.finish();
}

fn rng_02_eager_and_replayed_draws_are_one_sequence<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let f = drawer(&rig, &generator, 2);
    let run = || {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[]);
        [rig.read(&out[0]), rig.read(&out[1])]
    };
    run();
    run();
    let mut old = Vec::new();
    for seed in [5, 6, 128, 9999] {
        generator.seed(&rig.stream, seed).unwrap();
        let mut mixed: Vec<Vec<f32>> = run().into();
        mixed.extend(eager(&rig, &generator, 2));
        mixed.extend(run());
        generator.seed(&rig.stream, seed).unwrap();
        assert_eq!(mixed, eager(&rig, &generator, 6));
        assert_ne!(mixed, old);
        old = mixed;
    }
    drop((f, generator));
    rig.finish();
}

fn rng_03_a_capture_draws_nothing_and_a_replay_follows_the_seed<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 1).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let t = capture.alloc(4 * N).unwrap();
    generator.uniform(&rig.stream, t.ptr().unwrap(), N).unwrap();
    capture.end().unwrap();
    assert_eq!(generator.get(&rig.stream).unwrap(), (1, 0));
    for seed in [6, 314, 271] {
        generator.seed(&rig.stream, seed).unwrap();
        let skipped = eager(&rig, &generator, 1);
        graph.replay(&rig.stream).unwrap();
        let replayed = rig.read(&t);
        generator.seed(&rig.stream, seed).unwrap();
        assert_eq!(eager(&rig, &generator, 2), [skipped[0].clone(), replayed]);
    }
    drop((graph, t, generator));
    rig.finish();
}

fn rng_08_seeding_inside_a_capture_is_refused<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 1).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let t = capture.alloc(4 * N).unwrap();
    generator.uniform(&rig.stream, t.ptr().unwrap(), N).unwrap();
    match generator.seed(&rig.stream, 2) {
        Err(Error::Device(error)) => assert_eq!(error.code, Code::StreamCaptureUnsupported),
        other => panic!("{other:?}"),
    }
    capture.end().unwrap();
    graph.replay(&rig.stream).unwrap();
    let replayed = rig.read(&t);
    generator.seed(&rig.stream, 1).unwrap();
    assert_eq!(eager(&rig, &generator, 1), [replayed]);
    drop((graph, t, generator));
    rig.finish();
}

// ---- states ---------------------------------------------------------------------------------------

/// Draws once from `new` and twice from `old`, which is drawn from afterwards: three tensors of `N` numbers.
fn draw_from_both<D: Device>(
    generator: &Generator<D>,
    [old, new]: [&GeneratorState<D>; 2],
    stream: &D::Stream,
    out: &[Tensor<D>; 3],
) -> Result<(), Error> {
    let draw = |to: &Tensor<D>| generator.uniform(stream, to.ptr()?, N);
    generator.exchange_state(new)?;
    draw(&out[0])?;
    generator.exchange_state(old)?;
    draw(&out[1])?;
    draw(&out[2])
}

fn rng_04_states_are_exchanged_inside_a_capture<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 0).unwrap();
    // So that the two do not draw the same.
    generator.set(&rig.stream, 0, 3).unwrap();
    let old = generator.state();
    let new = generator.clone_state(&rig.stream).unwrap();
    old.set(&rig.stream, 0, 40).unwrap();
    // The same, to be drawn from eagerly.
    let control = Generator::new(&rig.allocator, &rig.stream, 0).unwrap();
    control.set(&rig.stream, 0, 40).unwrap();
    let control_new = control.clone_state(&rig.stream).unwrap();
    control_new.set(&rig.stream, 0, 3).unwrap();
    let control_old = control.state();

    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let out = [0; 3].map(|_| capture.alloc(4 * N).unwrap());
    draw_from_both(&generator, [&old, &new], &rig.stream, &out).unwrap();
    capture.end().unwrap();
    assert_eq!(
        old.get(&rig.stream).unwrap(),
        (0, 40),
        "a capture draws nothing"
    );
    // What the generator draws from meanwhile is another matter.
    let third = generator.clone_state(&rig.stream).unwrap();
    assert!(generator.exchange_state(&third).unwrap() == old);

    let eager = [0; 3].map(|_| rig.floats(&[0.0; N as usize]));
    let mut seen = Vec::new();
    for _ in 0..3 {
        graph.replay(&rig.stream).unwrap();
        let states = [&control_old, &control_new];
        draw_from_both(&control, states, &rig.stream, &eager).unwrap();
        for (replayed, eager) in out.iter().zip(&eager) {
            let replayed = rig.read(replayed);
            assert_eq!(replayed, rig.read(eager));
            assert!(!seen.contains(&replayed));
            seen.push(replayed);
        }
    }
    // Three blocks a draw: once a replay from the one, twice from the other.
    for (state, offset) in [(&old, 40 + 18), (&new, 3 + 9), (&third, 40)] {
        assert_eq!(state.get(&rig.stream).unwrap(), (0, offset));
    }
    assert_eq!(control_old.get(&rig.stream).unwrap(), (0, 58));
    assert_eq!(control_new.get(&rig.stream).unwrap(), (0, 12));
    drop((graph, out, eager, generator, control));
    drop((old, new, third, control_old, control_new));
    rig.finish();
}

fn rng_04_states_are_exchanged_inside_a_tree<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 7).unwrap();
    let old = generator.state();
    let new = generator.clone_state(&rig.stream).unwrap();
    new.set(&rig.stream, 8, 0).unwrap();
    let (g, o, n) = (generator.clone(), old.clone(), new.clone());
    let f = rig.register(FunctionSpec::new("both"), move |_, rec, _| {
        let out = [rec.alloc(4 * N)?, rec.alloc(4 * N)?, rec.alloc(4 * N)?];
        draw_from_both(&g, [&o, &n], rec.stream(), &out)?;
        Ok(out.into())
    });
    let control = [7, 8].map(|seed| Generator::new(&rig.allocator, &rig.stream, seed).unwrap());
    for want in [Phase::Warmup, Phase::Record, Phase::Replay, Phase::Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[]);
        assert_eq!(out.phase(), want);
        assert_eq!(rig.read(&out[0]), eager(&rig, &control[1], 1)[0]);
        assert_eq!(
            [rig.read(&out[1]), rig.read(&out[2])],
            eager(&rig, &control[0], 2)[..]
        );
    }
    assert_eq!(old.get(&rig.stream).unwrap(), (7, 4 * 2 * 3));
    assert_eq!(new.get(&rig.stream).unwrap(), (8, 4 * 3));
    drop((f, generator, old, new, control));
    rig.finish();
}

fn rng_04_what_a_state_is<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 1).unwrap();
    let clone = generator.clone();
    let first = generator.state();
    let copy = generator.clone_state(&rig.stream).unwrap();
    assert!(first == clone.state() && first != copy);
    let drawn = eager(&rig, &generator, 2);
    assert_eq!(first.get(&rig.stream).unwrap(), (1, 6));
    assert_eq!(copy.get(&rig.stream).unwrap(), (1, 0));
    // Exchanged for all clones of the generator.
    assert!(clone.exchange_state(&copy).unwrap() == first);
    assert_eq!(eager(&rig, &generator, 2), drawn);
    generator.seed(&rig.stream, 2).unwrap();
    assert_eq!(copy.get(&rig.stream).unwrap(), (2, 0));
    assert_eq!(first.get(&rig.stream).unwrap(), (1, 6));
    // In a capture a state has no value that could be cloned, and the capture goes on.
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    match generator.clone_state(&rig.stream) {
        Err(Error::Device(error)) => {
            assert_eq!(
                (error.call, error.code, error.position),
                (Call::Copy, Code::StreamCaptureUnsupported, Some(1))
            );
            assert!(error.detail.contains("before the capture"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    let status = rig.device.capture_status(&rig.stream);
    assert_eq!(status, Ok(CaptureStatus::Active));
    capture.end().unwrap();
    drop((graph, generator, clone, first, copy));
    rig.finish();
}

#[test]
fn rng_04_states_and_streams_of_another_device_are_refused() {
    let rig = Rig::new(HostDevice::new());
    let other = Rig::new(HostDevice::new());
    let [ours, theirs] =
        [&rig, &other].map(|r| Generator::new(&r.allocator, &r.stream, 1).unwrap());
    let before = ours.state();
    let refused = ours.exchange_state(&theirs.state()).unwrap_err();
    assert!(matches!(refused, Error::ForeignTensor { .. }), "{refused}");
    assert!(ours.state() == before);
    let t = rig.floats(&[0.0; N as usize]);
    let stream = &other.stream;
    for result in [
        Generator::new(&rig.allocator, stream, 1).map(drop),
        ours.seed(stream, 1),
        ours.get(stream).map(drop),
        ours.clone_state(stream).map(drop),
        ours.uniform(stream, t.ptr().unwrap(), N),
    ] {
        assert!(matches!(result, Err(Error::ForeignStream)), "{result:?}");
    }
    drop((t, before, ours, theirs));
    rig.finish();
    other.finish();
}

/// The blocks of the default pool, once what is dead and was in use has been looked at.
fn live_blocks<D: Device>(rig: &Rig<D>) -> u64 {
    drop(rig.allocator.alloc(&rig.stream, 4).unwrap());
    rig.allocator.stats().live_blocks.current
}

/// Tensors where a state's memory would be used again, and what they hold.
fn squatters<D: Device>(rig: &Rig<D>) -> Vec<Tensor<D>> {
    (0..8).map(|n| rig.floats(&[n as f32; 4])).collect()
}

#[track_caller]
fn untouched<D: Device>(rig: &Rig<D>, squatters: &[Tensor<D>]) {
    for (n, tensor) in squatters.iter().enumerate() {
        assert_eq!(rig.read(tensor), [n as f32; 4]);
    }
}

/// Captures `draws` draws from a new generator of this seed, which nobody holds afterwards.
fn orphan<D: Device>(
    rig: &Rig<D>,
    graph: &mut Graph<D>,
    seed: u64,
    draws: usize,
) -> Vec<Tensor<D>> {
    let generator = Generator::new(&rig.allocator, &rig.stream, seed).unwrap();
    let capture = graph.capture(&rig.stream).unwrap();
    let out: Vec<_> = (0..draws).map(|_| capture.alloc(4 * N).unwrap()).collect();
    for t in &out {
        generator.uniform(&rig.stream, t.ptr().unwrap(), N).unwrap();
    }
    capture.end().unwrap();
    out
}

fn rng_04_a_graph_keeps_the_states_that_it_draws_from<D: Device>(rig: Rig<D>) {
    let control = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let before = live_blocks(&rig);
    let mut graph = Graph::new(&rig.allocator);
    let out = orphan(&rig, &mut graph, 5, 2);
    assert_eq!(live_blocks(&rig), before + 1);
    let others = squatters(&rig);
    for _ in 0..3 {
        graph.replay(&rig.stream).unwrap();
        let drawn: Vec<_> = out.iter().map(|t| rig.read(t)).collect();
        assert_eq!(drawn, eager(&rig, &control, 2));
        untouched(&rig, &others);
    }
    drop(others);
    assert_eq!(live_blocks(&rig), before + 1);
    graph.reset();
    assert_eq!(live_blocks(&rig), before);
    drop((graph, out, control));
    rig.finish();
}

fn rng_04_a_node_keeps_the_states_that_it_draws_from<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let control = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let f = drawer(&rig, &generator, 1);
    let run = |want: Phase| {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[]);
        assert_eq!(out.phase(), want);
        assert_eq!(rig.read(&out[0]), eager(&rig, &control, 1)[0]);
    };
    run(Phase::Warmup);
    run(Phase::Record);
    let before = live_blocks(&rig);
    // The one that was recorded with is now the node's alone.
    let other = generator.clone_state(&rig.stream).unwrap();
    drop(generator.exchange_state(&other).unwrap());
    assert_eq!(live_blocks(&rig), before + 1);
    let others = squatters(&rig);
    for _ in 0..3 {
        run(Phase::Replay);
        untouched(&rig, &others);
    }
    drop(others);
    assert_eq!(other.get(&rig.stream).unwrap(), (5, 6));
    rig.trees.invalidate(&f).unwrap();
    assert_eq!(live_blocks(&rig), before);
    drop((f, generator, other, control));
    rig.finish();
}

fn rng_04_a_run_inside_a_capture_keeps_its_states_with_that_graph<D: Device>(rig: Rig<D>) {
    let generator = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let control = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let f = drawer(&rig, &generator, 1);
    let before = live_blocks(&rig);
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let step = rig.trees.step();
    let out = rig.run(&f, &step, &[]);
    assert_eq!(out.phase(), Phase::Inline);
    capture.end().unwrap();
    // The function goes, and with it its handle on the generator.
    drop((f, generator));
    assert_eq!(live_blocks(&rig), before);
    let others = squatters(&rig);
    for _ in 0..3 {
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&out[0]), eager(&rig, &control, 1)[0]);
        untouched(&rig, &others);
    }
    drop((others, out));
    drop(graph);
    assert_eq!(live_blocks(&rig), before - 1);
    drop((control, step));
    rig.finish();
}

fn rng_04_on_a_fork_beside_another_capture<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let control = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let before = live_blocks(&rig);
    let [fork, second] = [0; 2].map(|_| d.create_stream().unwrap());
    let event = d.create_event().unwrap();
    let generator = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let (mut graph, mut other) = (Graph::new(&rig.allocator), Graph::new(&rig.allocator));
    let capture = graph.capture(&rig.stream).unwrap();
    // Begun later, on the same thread: the fork is none of its streams.
    let beside = other.capture(&second).unwrap();
    let out = capture.alloc(4 * N).unwrap();
    d.record(&event, &rig.stream).unwrap();
    d.wait(&fork, &event).unwrap();
    let ids = [&rig.stream, &fork, &second].map(|stream| d.capture_id(stream).unwrap());
    assert!(
        ids[0].is_some() && ids[0] == ids[1] && ids[2].is_some() && ids[2] != ids[0],
        "{ids:?}"
    );
    generator.uniform(&fork, out.ptr().unwrap(), N).unwrap();
    d.record(&event, &fork).unwrap();
    d.wait(&rig.stream, &event).unwrap();
    d.fill(&second, control_room(&beside), 0, 4).unwrap();
    beside.end().unwrap();
    capture.end().unwrap();
    assert_eq!(d.capture_id(&rig.stream), Ok(None));
    drop((generator, other));
    assert_eq!(live_blocks(&rig), before + 1);
    let others = squatters(&rig);
    for _ in 0..3 {
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&out), eager(&rig, &control, 1)[0]);
        untouched(&rig, &others);
    }
    drop((graph, others));
    assert_eq!(live_blocks(&rig), before);
    drop((out, control, event, fork, second));
    rig.finish();
}

/// A place that the capture's own graph may write.
fn control_room<D: Device>(
    capture: &cudagraph_trees::Capture<'_, D>,
) -> cudagraph_trees::device::DevicePtr {
    capture.alloc(64).unwrap().ptr().unwrap()
}

/// Whoever captures past the allocator has a graph of which nobody here knows when it goes.
fn rng_04_a_capture_of_others_keeps_states_for_good<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let control = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let out = rig.floats(&[0.0; N as usize]);
    let before = live_blocks(&rig);
    let generator = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    for _ in 0..2 {
        generator
            .uniform(&rig.stream, out.ptr().unwrap(), N)
            .unwrap();
    }
    let exec = d.instantiate(&d.end_capture(&rig.stream).unwrap()).unwrap();
    drop(generator);
    let others = squatters(&rig);
    for _ in 0..3 {
        d.launch_graph(&exec, &rig.stream, &[]).unwrap();
        assert_eq!(rig.read(&out), eager(&rig, &control, 2)[1]);
        untouched(&rig, &others);
    }
    drop((others, exec));
    assert_eq!(
        live_blocks(&rig),
        before + 1,
        "one, however often it was drawn from"
    );
    drop((out, control));
    // It goes with the allocator, which nothing of it keeps.
    assert_eq!(live_blocks(&rig), 1);
    let Rig {
        device,
        allocator,
        kernels,
        stream,
        trees,
    } = rig;
    let free = device.memory_info().unwrap().free;
    drop((allocator, trees));
    let freed = device.memory_info().unwrap().free - free;
    assert!(freed >= device.granularity(), "{freed} B");
    drop((kernels, stream));
}

fn rng_04_a_capture_that_is_abandoned_keeps_nothing<D: Device>(rig: Rig<D>) {
    let before = live_blocks(&rig);
    let mut graph = Graph::new(&rig.allocator);
    for breaks in [false, true] {
        let generator = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
        let capture = graph.capture(&rig.stream).unwrap();
        let t = capture.alloc(4 * N).unwrap();
        generator.uniform(&rig.stream, t.ptr().unwrap(), N).unwrap();
        drop((generator, t));
        if breaks {
            rig.device.synchronize(&rig.stream).unwrap_err();
            capture.end().unwrap_err();
        } else {
            drop(capture);
        }
        assert_eq!(live_blocks(&rig), before);
    }
    drop(graph);
    rig.finish();
}

// ---- what goes while it runs ----------------------------------------------------------------------

/// Makes a stream late: so many kernels come first.
fn late<D: Device>(rig: &Rig<D>, stream: &D::Stream, busy: &Tensor<D>) {
    for _ in 0..200 {
        let ptr = busy.ptr().unwrap();
        rig.kernels
            .increment(&rig.device, stream, ptr, 4, 1.0)
            .unwrap();
    }
}

fn rng_07_a_graph_that_goes_while_it_runs<D: Device>(rig: Rig<D>) {
    let side = rig.device.create_stream().unwrap();
    let control = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let busy = rig.floats(&[0.0; 4]);
    let before = live_blocks(&rig);
    let mut graph = Graph::new(&rig.allocator);
    let out = orphan(&rig, &mut graph, 5, 1);
    // The state of the generator, and in the graph's pool what it draws into.
    let pool = graph.pool().unwrap();
    assert_eq!(live_blocks(&rig), before + 1);
    assert_eq!(pool.stats().live_blocks.current, 1);
    rig.device.synchronize(&rig.stream).unwrap();
    late(&rig, &side, &busy);
    graph.replay(&side).unwrap();
    drop(graph);
    if !on_cuda() {
        // There the replay cannot have run. (A device may have been faster.)
        assert_eq!(live_blocks(&rig), before + 1);
    }
    // What comes to lie where the state was is not written by the replay.
    let others = squatters(&rig);
    rig.device.synchronize(&side).unwrap();
    untouched(&rig, &others);
    drop(others);
    assert_eq!(live_blocks(&rig), before);
    assert_eq!(rig.read(&out[0]), eager(&rig, &control, 1)[0]);
    assert_eq!(pool.stats().live_blocks.current, 1);
    drop(out);
    assert_eq!(pool.stats().live_blocks.current, 0);
    drop((pool, busy, control));
    rig.finish();
}

/// Each replay on another stream than the generator's: the last of them is waited for.
fn rng_07_a_node_that_goes_while_it_runs<D: Device>(rig: Rig<D>) {
    let sides = [0; 2].map(|_| rig.device.create_stream().unwrap());
    let control = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let busy = [0; 2].map(|_| rig.floats(&[0.0; 4]));
    let before = live_blocks(&rig);
    let generator = Generator::new(&rig.allocator, &rig.stream, 5).unwrap();
    let f = drawer(&rig, &generator, 1);
    rig.device.synchronize(&rig.stream).unwrap();
    let mut last = None;
    for round in 0..5 {
        let side = &sides[round % 2];
        late(&rig, side, &busy[round % 2]);
        drop(last.take());
        let step = rig.trees.step();
        let out = rig.trees.run(&f, &step, &[], side, &mut []).unwrap();
        last = Some((step, out));
    }
    let (step, out) = last.unwrap();
    assert_eq!(out.phase(), Phase::Replay);
    let out = out.only().unwrap();
    // Function, recording and generator go; the output is its holder's.
    drop((f, generator));
    let others = squatters(&rig);
    for side in &sides {
        rig.device.synchronize(side).unwrap();
    }
    untouched(&rig, &others);
    drop(others);
    assert_eq!(live_blocks(&rig), before);
    assert_eq!(rig.read(&out), eager(&rig, &control, 5)[4]);
    drop((out, step, busy, control));
    rig.finish();
}
