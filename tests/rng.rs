//! Random numbers: warmup, record, replay and eager runs draw from one sequence.
mod common;

use common::Rig;
use cudagraph_trees::device::{Code, Device};
use cudagraph_trees::{Error, FunctionSpec, Generator, Graph, Phase};

suite!(
    rng_01_replays_after_reseeding_give_what_warmup_record_and_replay_gave,
    rng_02_eager_and_replayed_draws_are_one_sequence,
    rng_03_a_capture_draws_nothing_and_a_replay_follows_the_seed,
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
