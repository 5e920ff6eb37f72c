//! x
mod common;
use common::Rig;
use cudagraph_trees::device::Device;

suite!(paths);

fn paths<D: Device>(rig: Rig<D>) {
    let g1 = rig.scale_add("g1", 1.0, 1.0);
    let g2 = rig.scale_add("g2", 2.0, 0.0);
    let g3 = rig.scale_add("g3", 3.0, 0.0);
    let x = rig.floats(&[1.0, 2.0, 3.0]);
    for i in 0..4 {
        let step = rig.trees.step();
        let a = rig.run(&g1, &step, &[&x]);
        let b = rig.run(&g2, &step, &[&a[0]]);
        println!(
            "{i} {:?} {:?} {}",
            a.phase(),
            b.phase(),
            rig.trees.pool_snapshot()
        );
        assert_eq!(rig.read(&b[0]), [4.0, 6.0, 8.0]);
        assert_eq!(rig.read(&a[0]), [2.0, 3.0, 4.0]);
    }
    for i in 0..4 {
        let step = rig.trees.step();
        let a = rig.run(&g1, &step, &[&x]);
        let b = rig.run(&g3, &step, &[&a[0]]);
        println!(
            "{i} {:?} {:?} {}",
            a.phase(),
            b.phase(),
            rig.trees.pool_snapshot()
        );
        assert_eq!(rig.read(&b[0]), [6.0, 9.0, 12.0]);
        assert_eq!(rig.read(&a[0]), [2.0, 3.0, 4.0]);
    }
    assert_eq!(rig.trees.descendants(), [2]);
    println!("{:#?}", rig.trees.counts());
    drop(x);
    rig.finish();
}
