//! Copying out what is held when its generation ends (`OnOverwrite::Copy`): old handles keep their values.

mod common;

use common::Rig;
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, Code, Device};
use cudagraph_trees::{
    Error, FunctionSpec, OnOverwrite, OutputView, Phase, Tensor, WeakTensor, lend,
};

suite!(
    gen_09_held_outputs_keep_their_values,
    gen_10_nothing_is_copied_where_nothing_is_held,
    gen_11_aliases_move_together,
    gen_12_an_alias_made_by_the_function_moves_too,
    gen_14_a_view_alone_keeps_the_bytes,
    gen_15_an_output_that_is_the_next_input,
    gen_16_held_for_a_later_backward,
    children_and_what_they_consume_replay_afterwards,
    a_moved_output_is_the_callers,
    t1_05_an_accumulated_gradient,
    what_lives_in_an_open_generation_stays,
);

use Phase::{Record, Replay, Warmup};

/// Its outputs in every node of the tree: where they lie.
fn places<D: Device>(rig: &Rig<D>) -> Vec<String> {
    let view = rig.trees.view();
    let outputs = view.nodes.iter().flat_map(|node| &node.outputs);
    outputs
        .filter_map(|output| match output {
            OutputView::Fresh { place, .. } => Some(place.clone()),
            _ => None,
        })
        .collect()
}

fn gen_09_held_outputs_keep_their_values<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 10.0, 0.0);
    let mut held: Vec<(Tensor<D>, f32)> = Vec::new();
    let mut freed = Vec::new();
    for (round, phase) in [Warmup, Record, Replay, Replay, Replay]
        .into_iter()
        .enumerate()
    {
        let x = rig.floats(&[round as f32; 16]);
        let step = rig.trees.step();
        let (went, out) = rig.phased(&f, &step, &x);
        assert_eq!(went, phase);
        let at = out.ptr().unwrap();
        for (old, value) in &held {
            assert_eq!(rig.read(old), [*value; 16]);
            assert_ne!(old.ptr().unwrap(), at);
        }
        freed.push(rig.trees.pool_stats().live_blocks.freed);
        held.push((out, 10.0 * round as f32));
        drop(step);
        rig.trees.audit().unwrap();
    }
    // The copied input of each run besides: those that own no block are replays' outputs.
    assert_eq!(freed[3], freed[4]);
    assert_eq!(rig.trees.counts().recordings, 1);
    // Each lies by itself, in memory of the default pool.
    let mut all: Vec<_> = held.iter().map(|(t, _)| t.ptr().unwrap()).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 5);
    assert_eq!(rig.allocator.stats().live_blocks.current, 4);
    drop(held);
    assert_eq!(rig.allocator.stats().live_blocks.current, 0);
    rig.finish();
}

fn gen_10_nothing_is_copied_where_nothing_is_held<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[3.0; 16]);
    let mut seen = Vec::new();
    let before = rig.allocator.stats().live_blocks.allocated;
    for _ in 0..6 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        assert_eq!(rig.read(&out), [6.0; 16]);
        seen.push((out.storage_id(), out.ptr().unwrap()));
    }
    assert!(seen[1..].iter().all(|s| *s == seen[1]), "{seen:?}");
    assert_eq!(rig.allocator.stats().live_blocks.allocated, before);
    drop(x);
    rig.finish();
}

fn gen_11_aliases_move_together<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 1.0, 0.0);
    for round in 0..4 {
        let x = rig.floats(&[1.0, 2.0, 3.0, round as f32]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        let tail = y.view(4, 12).unwrap();
        let weak: WeakTensor<D> = tail.downgrade();
        let before = (y.ptr().unwrap(), tail.ptr().unwrap());
        drop(step);
        let step = rig.trees.step();
        let other = rig.floats(&[9.0; 4]);
        rig.one(&f, &step, &other);
        assert_ne!(y.ptr().unwrap(), before.0);
        assert_eq!(y.storage_id(), tail.storage_id());
        assert_eq!(tail.ptr().unwrap().0, y.ptr().unwrap().0 + 4);
        assert_eq!((tail.offset(), tail.bytes()), (4, 12));
        assert_eq!(rig.read(&y), [1.0, 2.0, 3.0, round as f32]);
        assert_eq!(rig.read(&tail), [2.0, 3.0, round as f32]);
        assert_eq!(rig.read(&weak.upgrade().unwrap())[2], round as f32);
        drop((y, tail));
        assert!(weak.upgrade().is_none());
    }
    rig.finish();
}

fn gen_12_an_alias_made_by_the_function_moves_too<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let y = k.apply(rec, inputs.get(0)?, 1.0, 1.0)?;
        let half = y.view(32, 32)?;
        Ok(vec![y, half])
    });
    let mut held = Vec::new();
    for round in 0..4 {
        let x = rig.floats(&[round as f32; 16]);
        let step = rig.trees.step();
        held.push(rig.run(&f, &step, &[&x]));
        drop(step);
        rig.trees.audit().unwrap();
    }
    for (round, out) in held.iter().enumerate() {
        assert_eq!(out[0].storage_id(), out[1].storage_id());
        assert_eq!(out[1].ptr().unwrap().0, out[0].ptr().unwrap().0 + 32);
        assert_eq!(rig.read(&out[0]), [round as f32 + 1.0; 16]);
        assert_eq!(rig.read(&out[1]), [round as f32 + 1.0; 8]);
    }
    drop(held);
    rig.finish();
}

fn gen_14_a_view_alone_keeps_the_bytes<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 1.0, 1.0);
    let mut views = Vec::new();
    for round in 0..5 {
        let x = rig.floats(&[round as f32; 16]);
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        views.push(out.view(16, 16).unwrap());
    }
    for (round, view) in views.iter().enumerate() {
        assert_eq!(rig.read(view), [round as f32 + 1.0; 4]);
    }
    drop(views);
    rig.finish();
}

fn gen_15_an_output_that_is_the_next_input<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 2.0, 0.0);
    let mut x = rig.floats(&[0.0; 16]);
    let mut chain = Vec::new();
    for round in 0..8 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        // Within the generation it is consumed where it lies.
        let at = out.ptr().unwrap();
        let double = rig.one(&g, &step, &out);
        assert_eq!(out.ptr().unwrap(), at);
        assert_eq!(rig.read(&double), [2.0 * (round as f32 + 1.0); 16]);
        chain.push(out.clone());
        x = out;
    }
    for (round, out) in chain.iter().enumerate() {
        assert_eq!(rig.read(out), [round as f32 + 1.0; 16]);
    }
    drop((x, chain));
    rig.finish();
}

fn gen_16_held_for_a_later_backward<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let forward = rig.register(FunctionSpec::new("forward"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        let saved = k.apply(rec, x, 2.0, 0.0)?;
        let out = k.apply(rec, &saved, 1.0, 1.0)?;
        Ok(vec![out, saved.view(0, saved.bytes())?])
    });
    let backward = rig.scale_add("backward", -1.0, 0.0);
    let mut pending: Vec<(f32, Tensor<D>)> = Vec::new();
    for round in 0..6 {
        let x = rig.floats(&[round as f32; 16]);
        let step = rig.trees.step();
        let out = rig.run(&forward, &step, &[&x]);
        let saved = out[1].clone();
        drop((out, step));
        pending.push((round as f32, saved));
        if pending.len() == 2 {
            let (value, saved) = pending.remove(0);
            let step = rig.trees.step();
            let grad = rig.one(&backward, &step, &saved);
            assert_eq!(rig.read(&grad), [-2.0 * value; 16]);
        }
    }
    drop(pending);
    rig.finish();
}

/// A node whose outputs have other storages now: its children, and what they consume, are admitted as before.
fn children_and_what_they_consume_replay_afterwards<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 3.0, 0.0);
    let x = rig.floats(&[1.0; 16]);
    let mut held = Vec::new();
    for round in 0..10 {
        let step = rig.trees.step();
        let a = rig.one(&f, &step, &x);
        let hold = round % 3 == 0;
        if hold {
            held.push(a.clone());
        }
        let out = rig.call(
            &g,
            &step,
            &[i64::from(hold)],
            &mut [cudagraph_trees::give(a)],
        );
        if round >= 6 {
            assert_eq!(out.phase(), Replay, "round {round}");
        }
        assert_eq!(rig.read(&out[0]), [6.0; 16]);
        assert_eq!(places(&rig).len() as u32, rig.trees.counts().recordings);
        drop(out);
        rig.trees.audit().unwrap();
    }
    assert_eq!(rig.trees.counts().recordings, 3);
    assert!(held.iter().all(|h| rig.read(h) == [2.0; 16]));
    drop((x, held));
    rig.finish();
}

/// It can be given, declared static, bound, viewed, and outlives tree and allocator's trim.
fn a_moved_output_is_the_callers<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0; 16]);
    for _ in 0..3 {
        let step = rig.trees.step();
        drop(rig.one(&f, &step, &x));
    }
    let out = rig.one(&f, &rig.trees.step(), &x);
    rig.one(&f, &rig.trees.step(), &x);
    let other = rig.device.create_stream().unwrap();
    out.record_stream(&other).unwrap();
    let bound = rig.register(
        FunctionSpec::new("bound").bind(0, &out),
        |k, rec, inputs| Ok(vec![k.apply(rec, inputs.get(0)?, 5.0, 0.0)?]),
    );
    for _ in 0..4 {
        let step = rig.trees.step();
        let five = rig.call(&bound, &step, &[], &mut []);
        assert_eq!(rig.read(&five[0]), [10.0; 16]);
    }
    rig.trees.shutdown().unwrap();
    rig.allocator.trim().unwrap();
    assert_eq!(rig.read(&out), [2.0; 16]);
    drop((out, bound, x));
    rig.device.synchronize_device().unwrap();
    rig.finish();
}

/// T1-05: the sum of gradients over steps, each a step's output.
fn t1_05_an_accumulated_gradient<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let backward = rig.scale_add("backward", 2.0, 0.0);
    let add = rig.register(FunctionSpec::new("add"), |k, rec, inputs| {
        Ok(vec![k.sum(rec, inputs.get(0)?, inputs.get(1)?)?])
    });
    let mut total: Option<Tensor<D>> = None;
    let mut want = 0.0;
    for round in 0..8 {
        let x = rig.floats(&[round as f32; 16]);
        let step = rig.trees.step();
        let grad = rig.one(&backward, &step, &x);
        want += 2.0 * round as f32;
        total = Some(match total {
            None => grad,
            Some(total) => {
                let mut args = [lend(&total), lend(&grad)];
                rig.call(&add, &step, &[], &mut args).only().unwrap()
            }
        });
        drop(step);
        assert_eq!(rig.read(total.as_ref().unwrap()), [want; 16]);
    }
    drop(total);
    rig.finish();
}

fn what_lives_in_an_open_generation_stays<D: Device>(rig: Rig<D>) {
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0; 16]);
    let long = rig.trees.step();
    let kept = rig.one(&f, &long, &x);
    let at = kept.ptr().unwrap();
    for _ in 0..4 {
        let step = rig.trees.step();
        drop(rig.one(&f, &step, &x));
    }
    assert_eq!((kept.ptr().unwrap(), rig.read(&kept)), (at, vec![2.0; 16]));
    drop((kept, long, x));
    rig.finish();
}

/// Where there is no memory for the copy, nothing has changed: the run can be made again, or the outputs let go.
#[test]
fn a_copy_that_cannot_be_made_is_an_error_before_anything() {
    let device = Faulty::new(HostDevice::new());
    let rig = Rig::new(device.clone());
    rig.trees.on_overwrite(OnOverwrite::Copy);
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0; 16]);
    for _ in 0..3 {
        drop(rig.one(&f, &rig.trees.step(), &x));
    }
    let out = rig.one(&f, &rig.trees.step(), &x);
    let before = rig.trees.counts();
    device.fail(Call::Copy, 1, Code::LaunchFailed);
    let step = rig.trees.step();
    let refused = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
    assert!(matches!(refused, Err(Error::Device(e)) if e.call == Call::Copy));
    assert_eq!(rig.trees.counts(), before);
    assert_eq!(rig.read(&out), [2.0; 16]);
    let again = rig.one(&f, &step, &x);
    assert_eq!(rig.read(&out), [2.0; 16]);
    assert_ne!(out.ptr().unwrap(), again.ptr().unwrap());
    drop((out, again, x));
    rig.finish();
}
