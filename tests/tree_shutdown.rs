//! The tree's end: in order, twice if need be, with outputs still held.
mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{Error, FunctionSpec, Phase, lend};

suite!(
    t3_13_shutdown_drops_the_graphs_and_keeps_what_is_held,
    shutdown_inside_a_function_is_refused,
);

fn t3_13_shutdown_drops_the_graphs_and_keeps_what_is_held<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 1.0);
    let g = rig.scale_add("g", 3.0, 0.0);
    let x = rig.floats(&[1.0, 2.0]);
    let mut held = None;
    let mut phases = Vec::new();
    for _ in 0..3 {
        drop(held.take());
        let step = rig.trees.step();
        let a = rig.one(&f, &step, &x);
        let out = rig.run(&g, &step, &[&a]);
        phases.push(out.phase());
        held = Some((a, out.only().unwrap(), step));
    }
    assert_eq!(phases, [Phase::Warmup, Phase::Record, Phase::Replay]);
    let (a, b, step) = held.unwrap();
    assert_eq!(rig.blocks(), 0, "a replay's outputs own nothing");

    rig.trees.shutdown().unwrap();
    assert_eq!(rig.blocks(), 2, "from here on they do");
    assert_eq!(rig.trees.view().nodes, vec![]);
    assert_eq!(
        (rig.read(&a), rig.read(&b)),
        (vec![3.0, 5.0], vec![9.0, 15.0])
    );
    rig.trees.shutdown().unwrap();
    let refused = rig.trees.run(&f, &step, &[], &rig.stream, &mut [lend(&x)]);
    assert!(matches!(refused, Err(Error::ShutDown)), "{refused:?}");
    let refused = rig
        .trees
        .register(FunctionSpec::new("h"), |_, _| Ok(vec![]));
    assert!(matches!(refused, Err(Error::ShutDown)), "{refused:?}");
    assert_eq!(rig.read(&b), [9.0, 15.0]);
    drop(a);
    assert_eq!(rig.blocks(), 1);
    drop((b, step, x));
    assert_eq!(rig.blocks(), 0);
    rig.finish();
}

fn shutdown_inside_a_function_is_refused<D: Device>(rig: Rig<D>) {
    let trees = std::sync::Arc::new(std::sync::Mutex::new(Some(rig.trees.clone())));
    let inside = trees.clone();
    let f = rig.register(FunctionSpec::new("f"), move |ops, rec, mut inputs| {
        let x = inputs.take(0)?;
        if let Some(trees) = inside.lock().unwrap().as_ref() {
            let refused = trees.shutdown();
            assert!(matches!(refused, Err(Error::Nested { .. })), "{refused:?}");
        }
        Ok(vec![ops.apply(rec, &x, 1.0, 1.0)?])
    });
    let x = rig.floats(&[1.0]);
    for _ in 0..3 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        assert_eq!(rig.read(&out), [2.0]);
    }
    trees.lock().unwrap().take();
    drop(x);
    rig.finish();
}
