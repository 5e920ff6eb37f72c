//! Programs that hold a step's outputs while the next one runs: they leave warmup, keep every value, and come to replay.
mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{Phase, Step, Tensor};

suite!(
    a_window_of_two_steps_replays,
    a_window_of_five_steps_replays,
    t1_09_an_output_that_is_the_next_input_replays,
    t1_11_three_forwards_then_three_backwards,
);

/// Holds the last `window` steps, token and outputs, and reads all of them after each run.
fn window<D: Device>(rig: &Rig<D>, window: usize, steps: usize) -> Vec<[Phase; 2]> {
    let f = rig.scale_add("f", 2.0, 1.0);
    let g = rig.scale_add("g", 3.0, 0.0);
    let mut held: Vec<(f32, Tensor<D>, Tensor<D>, Step)> = Vec::new();
    let mut phases = Vec::new();
    for round in 0..steps {
        let value = round as f32;
        let x = rig.floats(&[value; 256]);
        let step = rig.trees.step();
        let a = rig.run(&f, &step, &[&x]);
        let b = rig.run(&g, &step, &[&a[0]]);
        phases.push([a.phase(), b.phase()]);
        held.push((value, a.only().unwrap(), b.only().unwrap(), step));
        for (value, a, b, _) in &held {
            assert_eq!(rig.read(a), [value * 2.0 + 1.0; 256]);
            assert_eq!(rig.read(b), [(value * 2.0 + 1.0) * 3.0; 256]);
        }
        rig.trees.audit().unwrap();
        if held.len() == window {
            drop(held.remove(0));
        }
    }
    phases
}

fn replays(phases: &[[Phase; 2]]) -> usize {
    phases
        .iter()
        .rev()
        .take_while(|p| **p == [Phase::Replay; 2])
        .count()
}

fn a_window_of_two_steps_replays<D: Device>(rig: Rig<D>) {
    let phases = window(&rig, 2, 20);
    println!("{phases:?}");
    assert!(replays(&phases) >= 14, "{phases:?}");
    rig.finish();
}

fn a_window_of_five_steps_replays<D: Device>(rig: Rig<D>) {
    let phases = window(&rig, 5, 60);
    assert!(replays(&phases) >= 30, "{phases:?}");
    rig.finish();
}

/// The cache of one step is the input of the next; the last token goes when the next step has run.
fn t1_09_an_output_that_is_the_next_input_replays<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let mut cache = rig.floats(&[0.0; 64]);
    let mut last: Option<Step> = None;
    let mut phases = Vec::new();
    for round in 0..50 {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&cache]);
        phases.push(out.phase());
        cache = out.only().unwrap();
        drop(last.replace(step));
        assert_eq!(rig.read(&cache), [round as f32 + 1.0; 64]);
    }
    let replayed = phases
        .iter()
        .rev()
        .take_while(|p| **p == Phase::Replay)
        .count();
    assert!(replayed >= 44, "{phases:?}");
    drop(cache);
    drop(last);
    rig.finish();
}

/// Several generations open at once: each backward sees its own forward's output.
fn t1_11_three_forwards_then_three_backwards<D: Device>(rig: Rig<D>) {
    let forward = rig.scale_add("forward", 2.0, 0.0);
    let backward = rig.scale_add("backward", -1.0, 0.5);
    let mut phases = Vec::new();
    for round in 0..8 {
        let steps: Vec<Step> = (0..3).map(|_| rig.trees.step()).collect();
        let mut saved = Vec::new();
        for (micro, step) in steps.iter().enumerate() {
            let x = rig.floats(&[round as f32 + micro as f32 / 8.0; 32]);
            let out = rig.run(&forward, step, &[&x]);
            phases.push(out.phase());
            saved.push(out.only().unwrap());
        }
        for (micro, (step, saved)) in steps.iter().zip(&saved).enumerate() {
            let out = rig.run(&backward, step, &[saved]);
            phases.push(out.phase());
            let expected = -2.0 * (round as f32 + micro as f32 / 8.0) + 0.5;
            assert_eq!(rig.read(&out[0]), [expected; 32]);
        }
        rig.trees.audit().unwrap();
    }
    let replayed = phases
        .iter()
        .rev()
        .take_while(|p| **p == Phase::Replay)
        .count();
    assert!(replayed >= 24, "{phases:?}");
    rig.finish();
}
