//! A recording that allocates from another pool keeps that pool: its graph has the addresses baked in.
mod common;

use std::sync::{Arc, Mutex};

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::{FunctionSpec, Phase, PoolHandle, PoolOptions};

suite!(t5_23_a_node_keeps_the_pools_its_capture_drew_from);

fn t5_23_a_node_keeps_the_pools_its_capture_drew_from<D: Device>(rig: Rig<D>) {
    let side: Arc<Mutex<Option<PoolHandle<D>>>> = Arc::default();
    *side.lock().unwrap() = Some(rig.allocator.create_pool(PoolOptions::default()).unwrap());
    let inside = side.clone();
    let f = rig.register(FunctionSpec::new("f"), move |ops, rec, mut inputs| {
        let x = inputs.take(0)?;
        let pool = inside.lock().unwrap().clone();
        let Some(pool) = pool else {
            return Err("run after the pool was dropped".into());
        };
        // A temporary of the side pool, dead when the function returns.
        let doubled = pool.alloc(rec.stream(), x.bytes())?;
        ops.kernels.scale_add(
            rec.device(),
            rec.stream(),
            doubled.ptr()?,
            x.ptr()?,
            x.bytes() / 4,
            2.0,
            0.0,
        )?;
        Ok(vec![ops.apply(rec, &doubled, 1.0, 1.0)?])
    });
    let x = rig.floats(&[3.0; 8]);
    for phase in [Phase::Warmup, Phase::Record] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&f, &step, &x);
        assert_eq!((p, rig.read(&out)), (phase, vec![7.0; 8]));
    }
    // Nobody but the node has the side pool now.
    let id = side.lock().unwrap().take().unwrap().id();
    assert_eq!(rig.allocator.pool(id).unwrap().uses(), 2);
    rig.allocator.trim().unwrap();
    let step = rig.trees.step();
    let (p, out) = rig.phased(&f, &step, &x);
    assert_eq!((p, rig.read(&out)), (Phase::Replay, vec![7.0; 8]));
    drop((out, step, x));
    rig.finish();
}
