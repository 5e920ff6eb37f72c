//! Which outputs are live, and what that does to the pool: aliases, views, empty storages, handles that come and go. Names
//! carry the rows of the behaviour tables.

mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::pool::PoolStats;
use cudagraph_trees::{
    Error, FunctionSpec, NodeId, OutputView, Outputs, Phase, Tensor, give, lend,
};

suite!(
    live_01_two_storages_under_five_handles,
    live_03_an_alias_of_a_bound_parameter,
    live_05_a_copied_input_returned,
    live_06_zero_bytes_are_never_live,
    live_07_a_view_alone_keeps_an_output,
    live_08_a_child_that_returns_its_parents_output,
    live_20_books_and_outputs_compared,
    live_22_one_block_under_two_handles,
    live_23_an_output_dies_before_the_child,
    live_24_an_aliased_output_dies_before_the_child,
    live_25_a_managed_input_comes_from_outside,
    live_26_a_second_handle_keeps_the_storage,
    live_27_dead_after_the_child_then_held,
    more_than_sixty_four_outputs,
    one_tensor_returned_many_times,
    an_input_given_and_returned,
    the_same_tensor_passed_twice,
    a_view_as_a_managed_input,
    an_output_is_never_replayed_as_a_copy,
    a_given_view_does_not_free_its_sibling,
    a_given_input_is_reused_inside_the_graph,
    a_given_input_that_owns_its_memory_is_overwritten_by_a_replay,
    a_replay_leaves_the_allocator_alone,
    outputs_outlive_the_tree,
    more_handles_than_are_counted,
);

use Phase::{Record, Replay, Warmup};

fn live_01_two_storages_under_five_handles<D: Device>(rig: Rig<D>) {
    let a = rig.register(FunctionSpec::new("a"), |k, rec, inputs| {
        let x = k.apply(rec, inputs.get(0)?, 2.0, 0.0)?;
        let y = k.apply(rec, inputs.get(0)?, 1.0, 7.0)?;
        Ok(vec![x.clone(), x.view(0, 4)?, y])
    });
    let b = rig.register(FunctionSpec::new("b"), |_, _, inputs| {
        let (x, y) = (inputs.get(0)?, inputs.get(1)?);
        Ok(vec![x.view(4, 4)?, y.clone(), y.view(4, 4)?])
    });
    let x = rig.floats(&[1.0, 10.0]);
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let from_a = rig.run(&a, &step, &[&x]);
        let from_b = rig.run(&b, &step, &[&from_a[0], &from_a[2]]);
        assert_eq!((from_a.phase(), from_b.phase()), (phase, phase));
        let ids = |o: &Outputs<D>| {
            o.iter()
                .map(|t| t.storage_id().unwrap())
                .collect::<Vec<_>>()
        };
        let (ids_a, ids_b) = (ids(&from_a), ids(&from_b));
        assert_eq!(ids_a[0], ids_a[1]);
        assert_ne!(ids_a[0], ids_a[2]);
        assert_eq!(ids_b, [ids_a[0], ids_a[2], ids_a[2]]);
        assert_eq!(from_a[1].ptr().unwrap(), from_a[0].ptr().unwrap());
        assert_eq!(rig.trees.path_live(), 2);
        let [xa, xa2, ya, ya2] =
            [&from_a[1], &from_b[0], &from_b[1], &from_b[2]].map(|t| rig.read(t));
        assert_eq!(rig.read(&from_a[0]), [2.0, 20.0]);
        assert_eq!((xa, xa2), (vec![2.0], vec![20.0]));
        assert_eq!((ya, ya2), (vec![8.0, 17.0], vec![17.0]));
        // b's handles alone hold both.
        drop(from_a);
        assert_eq!(rig.trees.path_live(), 2);
        let mut from_b = from_b.into_iter();
        drop(from_b.next());
        assert_eq!(rig.trees.path_live(), 1);
        drop(from_b.next());
        assert_eq!(rig.trees.path_live(), 1);
        drop(from_b.next());
        assert_eq!(rig.trees.path_live(), 0);
        drop(from_b);
    }
    assert_eq!(rig.trees.descendants(), [1]);
    drop(x);
    rig.finish();
}

fn live_03_an_alias_of_a_bound_parameter<D: Device>(rig: Rig<D>) {
    let param = rig.floats(&[3.0, 4.0]);
    let spec = FunctionSpec::new("f").bind(0, &param);
    let f = rig.register(spec, |k, rec, inputs| {
        let (param, x) = (inputs.get(0)?, inputs.get(1)?);
        let sum = k.sum(rec, param, x)?;
        Ok(vec![param.view(0, 4)?, param.clone(), sum])
    });
    let x = rig.floats(&[1.0, 2.0]);
    let mut held = None;
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x]);
        assert_eq!(out.phase(), phase);
        assert_eq!(rig.trees.path_live(), 1, "only the sum is the path's");
        assert_eq!(rig.read(&out[0]), [3.0]);
        assert_eq!(out[1].storage_id(), param.storage_id());
        assert_eq!(rig.read(&out[2]), [4.0, 6.0]);
        held = Some(out);
    }
    // The parameter outlives its output handles' step.
    let step = rig.trees.step();
    drop(rig.run(&f, &step, &[&x]));
    let held = held.unwrap();
    assert_eq!(rig.read(&held[1]), [3.0, 4.0]);
    assert!(matches!(rig.try_read(&held[2]), Err(Error::Stale(_))));
    drop((x, param, held, step));
    rig.finish();
}

/// Adaptation: what upstream says of cached output objects is said of the recorded outputs, which lie in one storage of the graph's.
fn live_05_a_copied_input_returned<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        drop(k.sum(rec, &x, &x)?);
        let first = x.view(0, 4)?;
        Ok(vec![x, first])
    });
    let x = rig.floats(&[5.0, 6.0]);
    for (round, phase) in [Warmup, Record, Replay].into_iter().enumerate() {
        let value = round as f32;
        rig.put(&x, &[value, 6.0]);
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x]);
        assert_eq!(out.phase(), phase);
        assert_eq!(out[0].storage_id(), out[1].storage_id());
        assert_ne!(
            out[0].storage_id(),
            x.storage_id(),
            "the closure has a copy"
        );
        assert_eq!(rig.trees.path_live(), 1);
        rig.put(&x, &[-1.0, -1.0]);
        assert_eq!(rig.read(&out[0]), [value, 6.0]);
        assert_eq!(rig.read(&out[1]), [value]);
        drop(out);
        assert_eq!(rig.trees.path_live(), 0);
    }
    let view = rig.trees.view();
    let storages: Vec<_> = view.nodes[0]
        .outputs
        .iter()
        .map(|o| match o {
            OutputView::Fresh { storage, held, .. } => (*storage, *held),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(storages[0], storages[1]);
    assert!(!storages[0].1);
    drop(x);
    rig.finish();
}

fn live_06_zero_bytes_are_never_live<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let hundred = rec.alloc(400)?;
        let none = rec.alloc(0)?;
        let out = k.apply(rec, inputs.get(0)?, 3.0, 0.0)?;
        Ok(vec![out, none, hundred.view(0, 0)?])
    });
    let f2 = rig.register(FunctionSpec::new("f2"), |k, rec, inputs| {
        let (nothing, x) = (inputs.get(0)?, inputs.get(1)?);
        let tripled = k.apply(rec, nothing, 3.0, 0.0)?;
        Ok(vec![tripled, k.apply(rec, x, 1.0, 10.0)?])
    });
    let x = rig.floats(&[1.0, 2.0, 3.0, 4.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x]);
        assert_eq!((out.phase(), rig.trees.path_live()), (phase, 1));
        assert_eq!(rig.read(&out[0]), [3.0, 6.0, 9.0, 12.0]);
        assert_eq!([out[1].bytes(), out[2].bytes()], [0, 0]);
        rig.trees.audit().unwrap();
    }
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let empty = Tensor::empty();
        // Given or lent, nothing is nothing.
        let args = &mut [give(empty), lend(&x)];
        let out = rig.call(&f2, &step, &[], args);
        assert_eq!((out.phase(), rig.trees.path_live()), (phase, 1));
        assert_eq!(out[0].bytes(), 0);
        assert_eq!(rig.read(&out[1]), [11.0, 12.0, 13.0, 14.0]);
        // and an empty output is an empty input
        let again = rig.run(&f2, &step, &[&out[0], &out[1]]);
        assert_eq!(again.phase(), phase);
        assert_eq!(rig.read(&again[1]), [21.0, 22.0, 23.0, 24.0]);
    }
    drop(x);
    rig.finish();
}

fn live_07_a_view_alone_keeps_an_output<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[1.0, 2.0]);
    let mut id = None;
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&f, &step, &x);
        assert_eq!(p, phase);
        if p != Warmup {
            // The recording's own output is the storage that every replay hands out.
            assert_eq!(*id.get_or_insert(out.storage_id()), out.storage_id());
        }
    }
    let allocated = rig.trees.pool_stats().live_blocks.allocated;
    for _ in 0..3 {
        let step = rig.trees.step();
        assert_eq!(rig.trees.path_live(), 0);
        let (phase, out) = rig.phased(&f, &step, &x);
        assert_eq!((phase, rig.trees.path_live()), (Replay, 1));
        assert_eq!(Some(out.storage_id()), id);
        let view = out.view(0, 8).unwrap();
        drop(out);
        assert_eq!(rig.trees.path_live(), 1);
        assert_eq!(rig.read(&view), [2.0, 4.0]);
        drop(view);
        assert_eq!(rig.trees.path_live(), 0);
    }
    assert_eq!(rig.trees.pool_stats().live_blocks.allocated, allocated);
    drop(x);
    rig.finish();
}

/// Adaptation: upstream gives a new object once a path aliases an output; here the storage is the same at each replay, aliased or
/// not, and a replay allocates nothing.
fn live_08_a_child_that_returns_its_parents_output<D: Device>(rig: Rig<D>) {
    let square = |k: &common::Ops<D>, rec: &mut cudagraph_trees::Recorder<'_, D>, x: &Tensor<D>| {
        k.product(rec, x, x)
    };
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
        Ok(vec![square(k, rec, inputs.get(0)?)?])
    });
    let g = rig.register(FunctionSpec::new("g"), move |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![x.view(0, 4)?, square(k, rec, x)?])
    });
    let x = rig.floats(&[2.0, 3.0]);
    let mut ids = Vec::new();
    for _ in 0..3 {
        let step = rig.trees.step();
        ids.push(rig.one(&f, &step, &x).storage_id());
    }
    assert_eq!(ids[1], ids[2]);
    assert_eq!(rig.trees.counts().restores, 0);
    for (round, phase) in [Warmup, Record].into_iter().enumerate() {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        assert_eq!(out.storage_id(), ids[1]);
        let pair = rig.run(&g, &step, &[&out]);
        assert_eq!(pair.phase(), phase);
        let [a, o2] = two(pair);
        assert_eq!(rig.read(&a), [4.0]);
        assert_eq!(rig.read(&o2), [16.0, 81.0]);
        drop(a);
        assert_eq!(rig.trees.counts().restores, round as u64 + 1);
        assert_eq!(rig.blocks(), 2);
        drop(out);
        assert_eq!(rig.blocks(), 1);
        drop(o2);
        assert_eq!(rig.blocks(), 0);
    }
    let allocated = rig.trees.pool_stats().live_blocks.allocated;
    for _ in 0..3 {
        let step = rig.trees.step();
        let out = rig.one(&f, &step, &x);
        let pair = rig.run(&g, &step, &[&out]);
        assert_eq!(pair.phase(), Replay);
        assert_eq!((out.storage_id(), pair[0].storage_id()), (ids[1], ids[1]));
        // The alias alone keeps the parent's output.
        drop(out);
        assert_eq!(rig.trees.path_live(), 2);
        assert_eq!(rig.read(&pair[0]), [4.0]);
    }
    assert_eq!(rig.trees.pool_stats().live_blocks.allocated, allocated);
    assert_eq!(rig.trees.counts().restores, 2);
    drop(x);
    rig.finish();
}

fn live_20_books_and_outputs_compared<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 0.0);
    let x = rig.floats(&[1.0, 2.0]);
    let pool = rig.allocator.pool(rig.trees.pool_id()).unwrap();
    for phase in [Warmup, Record] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&f, &step, &x);
        assert_eq!(p, phase);
        rig.trees.audit().unwrap();

        let place = {
            let (segment, offset) = pool.locate(out.ptr().unwrap()).unwrap();
            format!("S{}+{offset}", segment.0)
        };
        let stray = pool.alloc(&rig.stream, 4).unwrap();
        let Err(Error::Books(text)) = rig.trees.audit() else {
            panic!("a block that is no output");
        };
        let (segment, offset) = pool.locate(stray.ptr().unwrap()).unwrap();
        assert_eq!(
            text,
            format!(
                "not allocated in the pool but should be: []; in the pool and not tracked as outputs: [S{}+{offset}]",
                segment.0
            )
        );
        drop(stray);
        rig.trees.audit().unwrap();

        assert!(pool.free_at(&rig.stream, out.ptr().unwrap()).unwrap());
        let Err(Error::Books(text)) = rig.trees.audit() else {
            panic!("an output that is no block");
        };
        assert_eq!(
            text,
            format!(
                "not allocated in the pool but should be: [{place}]; in the pool and not tracked as outputs: []"
            )
        );
        // The output's own free is then nobody's.
        drop(out);
        rig.trees.audit().unwrap();
        assert_eq!(rig.blocks(), 0);
    }
    // The tree works on.
    let step = rig.trees.step();
    let (phase, out) = rig.phased(&f, &step, &x);
    assert_eq!((phase, rig.read(&out)), (Replay, vec![2.0, 4.0]));
    drop((x, out, pool, step));
    rig.finish();
}

fn live_22_one_block_under_two_handles<D: Device>(rig: Rig<D>) {
    let spec = || FunctionSpec::new("a").skip_warmup();
    let a = rig.register(spec(), |_, _, mut inputs| {
        let x = inputs.take(0)?;
        Ok(vec![x.view(0, 4)?, x.view(4, 4)?])
    });
    let b = rig.register(FunctionSpec::new("b").skip_warmup(), |k, rec, inputs| {
        let doubled = k.apply(rec, inputs.get(0)?, 2.0, 0.0)?;
        Ok(vec![doubled.clone(), doubled])
    });
    let x = rig.floats(&[1.0, 2.0]);
    drop(rig.run(&a, &rig.trees.step(), &[&x]));
    assert_eq!(rig.trees.counts().restores, 0);
    let step = rig.trees.step();
    let pair = rig.run(&a, &step, &[&x]);
    assert_eq!(pair.phase(), Replay);
    let [x1, x2] = two(pair);
    let doubled = rig.run(&b, &step, &[&x1]);
    assert_eq!(doubled.phase(), Record);
    assert_eq!(rig.read(&doubled[1]), [2.0]);
    drop(doubled);
    assert_eq!(rig.trees.counts().restores, 1);
    assert_eq!(x1.storage_id(), x2.storage_id());
    assert_eq!(x1.ptr().unwrap().offset(4), x2.ptr().unwrap());
    assert_eq!(rig.blocks(), 1);
    drop(x1);
    assert_eq!(rig.blocks(), 1);
    assert_eq!(rig.read(&x2), [2.0]);
    drop(x2);
    assert_eq!(rig.blocks(), 0);
    drop((x, step));
    rig.finish();
}

/// Of two outputs, `drop_before` die before the child and the first is given to it.
fn dies_before<D: Device>(rig: Rig<D>, aliased: bool) {
    let a = rig.register(
        FunctionSpec::new("a").skip_warmup(),
        move |k, rec, inputs| {
            let x = inputs.get(0)?;
            let first = k.apply(rec, x, 1.0, 1.0)?;
            let second = k.apply(rec, x, 1.0, 2.0)?;
            let mut all = vec![first, second];
            if aliased {
                all.push(all[1].view(0, 4)?);
            }
            Ok(all)
        },
    );
    let x = rig.floats(&[1.0, 2.0]);
    drop(rig.run(&a, &rig.trees.step(), &[&x]));
    for _ in 0..2 {
        let step = rig.trees.step();
        assert_eq!(rig.run(&a, &step, &[&x]).phase(), Replay);
    }
    let step = rig.trees.step();
    let mut outputs = rig.run(&a, &step, &[&x]).into_iter();
    let o1 = outputs.next().unwrap();
    drop(outputs);
    assert_eq!((rig.trees.counts().restores, rig.blocks()), (0, 0));
    let b = rig.register(
        FunctionSpec::new("b").skip_warmup(),
        |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            let square = k.product(rec, &x, &x)?;
            Ok(vec![k.product(rec, &square, &x)?])
        },
    );
    let (phase, out) = rig.moved(&b, &step, o1);
    assert_eq!(phase, Record);
    assert_eq!((rig.trees.counts().restores, rig.blocks()), (1, 1));
    rig.trees.audit().unwrap();
    assert_eq!(rig.read(&out), [8.0, 27.0]);
    drop(out);
    assert_eq!(rig.blocks(), 0);
    drop((x, step));
    rig.finish();
}

fn live_23_an_output_dies_before_the_child<D: Device>(rig: Rig<D>) {
    dies_before(rig, false);
}

fn live_24_an_aliased_output_dies_before_the_child<D: Device>(rig: Rig<D>) {
    dies_before(rig, true);
}

fn live_25_a_managed_input_comes_from_outside<D: Device>(rig: Rig<D>) {
    let a = rig.register(FunctionSpec::new("a").skip_warmup(), |k, rec, inputs| {
        let x = inputs.get(0)?;
        Ok(vec![k.apply(rec, x, 1.0, 1.0)?, k.apply(rec, x, 1.0, 2.0)?])
    });
    let b = rig.register(FunctionSpec::new("b").skip_warmup(), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 10.0, 0.0)?])
    });
    let x = rig.floats(&[1.0, 2.0]);
    {
        let step = rig.trees.step();
        let pair = rig.run(&a, &step, &[&x]);
        assert_eq!(rig.read(&rig.one(&b, &step, &pair[0])), [20.0, 30.0]);
    }
    let step = rig.trees.step();
    let pair = rig.run(&a, &step, &[&x]);
    assert_eq!(pair.phase(), Replay);
    assert_eq!(rig.trees.counts().restores, 0);
    let outside = rig.floats(&[-1.0, -2.0]);
    let (phase, out) = rig.phased(&b, &step, &outside);
    assert_eq!((phase, rig.trees.counts().restores), (Record, 1));
    assert_eq!(rig.read(&out), [-10.0, -20.0]);
    assert_eq!(rig.read(&pair[1]), [3.0, 4.0]);
    assert_eq!(rig.trees.descendants(), [2]);
    drop((x, outside, out, pair, step));
    rig.finish();
}

fn live_26_a_second_handle_keeps_the_storage<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let (p, h) = rig.phased(&f, &step, &x);
        let blocks = u64::from(p != Replay);
        let h2 = h.clone();
        drop(h);
        assert_eq!((p, rig.blocks(), rig.trees.path_live()), (phase, blocks, 1));
        assert_eq!(rig.read(&h2), [2.0]);
        drop(h2);
        assert_eq!((rig.blocks(), rig.trees.path_live()), (0, 0));
    }
    drop(x);
    rig.finish();
}

fn live_27_dead_after_the_child_then_held<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    // The input dies inside, and its memory is written by what comes after.
    let b = rig.register(
        FunctionSpec::new("b").skip_warmup(),
        |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            let middle = k.apply(rec, &x, 10.0, 0.0)?;
            drop(x);
            Ok(vec![k.apply(rec, &middle, 1.0, 3.0)?])
        },
    );
    let x = rig.floats(&[1.0, 2.0]);
    for _ in 0..2 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        drop(rig.moved(&b, &step, y));
    }
    let normal = |expected_node: u32| {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let out = rig.call(&b, &step, &[], &mut [give(y)]);
        assert_eq!(
            (out.phase(), out.node()),
            (Replay, Some(NodeId(expected_node)))
        );
        assert_eq!(rig.read(&out[0]), [23.0, 33.0]);
    };
    normal(1);
    let reserved = rig.trees.pool_stats().reserved_bytes.current;
    for (round, lent) in [true, false, true, false].into_iter().enumerate() {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let out = if lent {
            rig.run(&b, &step, &[&y])
        } else {
            rig.call(&b, &step, &[], &mut [give(y.clone())])
        };
        assert_eq!(out.phase(), if round == 0 { Record } else { Replay });
        assert_eq!(rig.read(&y), [2.0, 3.0], "the held input is intact");
        assert_eq!(rig.read(&out[0]), [23.0, 33.0]);
    }
    assert_eq!(rig.trees.descendants(), [2]);
    normal(1);
    assert_eq!(rig.trees.pool_stats().reserved_bytes.current, reserved);
    assert_eq!(rig.trees.counts().recordings, 3);
    drop(x);
    rig.finish();
}

fn more_than_sixty_four_outputs<D: Device>(rig: Rig<D>) {
    const N: usize = 200;
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let x = inputs.get(0)?;
        (0..N)
            .map(|i| Ok(k.apply(rec, x, 1.0, i as f32)?))
            .collect()
    });
    let g = rig.register(FunctionSpec::new("g"), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 2.0, 0.0)?])
    });
    let x = rig.floats(&[0.5]);
    // Each round keeps each so-manieth output, and so finds other bits set when g comes.
    for (keep, phases, node) in [
        (64, [Warmup; 2], None),
        (64, [Record; 2], Some(1)),
        (3, [Replay, Record], Some(2)),
        (1, [Replay, Record], Some(3)),
        (64, [Replay; 2], Some(1)),
        (3, [Replay; 2], Some(2)),
        (1, [Replay; 2], Some(3)),
        (192, [Replay; 2], Some(1)),
        (5, [Replay; 2], Some(3)),
        (6, [Replay; 2], Some(2)),
    ] {
        let step = rig.trees.step();
        let outputs = rig.run(&f, &step, &[&x]);
        assert_eq!((outputs.phase(), rig.trees.path_live()), (phases[0], N));
        let held: Vec<_> = outputs
            .into_iter()
            .enumerate()
            .filter(|(i, _)| i % keep == 0)
            .collect();
        assert_eq!(rig.trees.path_live(), N.div_ceil(keep));
        let out = rig.run(&g, &step, &[&held[0].1]);
        assert_eq!(
            (out.phase(), out.node().map(|n| n.0)),
            (phases[1], node),
            "keeping each {keep}."
        );
        assert_eq!(rig.read(&out[0]), [1.0]);
        for (i, output) in &held {
            assert_eq!(rig.read(output), [*i as f32 + 0.5]);
        }
    }
    drop(x);
    rig.finish();
}

fn one_tensor_returned_many_times<D: Device>(rig: Rig<D>) {
    let f = rig.register(FunctionSpec::new("f"), |k, rec, inputs| {
        let y = k.apply(rec, inputs.get(0)?, 2.0, 0.0)?;
        let mut all = vec![y.clone(); 3];
        all.push(y.view(4, 4)?);
        all.push(y.view(0, 0)?);
        Ok(all)
    });
    let x = rig.floats(&[1.0, 2.0]);
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let out = rig.run(&f, &step, &[&x]);
        assert_eq!(
            (out.phase(), out.len(), rig.trees.path_live()),
            (phase, 5, 1)
        );
        let blocks = rig.blocks();
        let mut handles = out.into_iter();
        for _ in 0..3 {
            assert_eq!(rig.read(&handles.next().unwrap()), [2.0, 4.0]);
            assert_eq!((rig.trees.path_live(), rig.blocks()), (1, blocks));
        }
        assert_eq!(rig.read(&handles.next().unwrap()), [4.0]);
        assert_eq!((rig.trees.path_live(), rig.blocks()), (0, 0));
        drop(handles);
    }
    drop(x);
    rig.finish();
}

fn an_input_given_and_returned<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let pass = rig.register(FunctionSpec::new("pass"), |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let twice = k.apply(rec, &x, 2.0, 0.0)?;
        Ok(vec![x, twice])
    });
    let x = rig.floats(&[1.0, 2.0]);
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let id = y.storage_id();
        let pair = rig.call(&pass, &step, &[], &mut [give(y)]);
        assert_eq!(pair.phase(), phase);
        assert_eq!(pair[0].storage_id(), id);
        assert_eq!(rig.trees.path_live(), 2);
        // and given and returned again
        let [y, twice] = two(pair);
        let again = rig.call(&pass, &step, &[], &mut [give(y)]);
        assert_eq!(again.phase(), phase);
        assert_eq!(rig.read(&again[0]), [2.0, 3.0]);
        assert_eq!(rig.read(&again[1]), [4.0, 6.0]);
        assert_eq!(rig.read(&twice), [4.0, 6.0]);
        assert_eq!(rig.trees.path_live(), 3);
        drop(again);
        assert_eq!(rig.trees.path_live(), 1);
    }
    assert_eq!(rig.trees.descendants(), [2]);
    // A static input given and returned.
    let spec = FunctionSpec::new("fixed").static_input(0);
    let fixed = rig.register(spec, |_, _, mut inputs| Ok(vec![inputs.take(0)?]));
    for phase in [Warmup, Record, Replay] {
        let step = rig.trees.step();
        let out = rig.call(&fixed, &step, &[], &mut [give(x.clone())]);
        assert_eq!(out.phase(), phase);
        assert_eq!(out[0].storage_id(), x.storage_id());
        assert_eq!(rig.trees.path_live(), 0);
    }
    drop(x);
    rig.finish();
}

fn the_same_tensor_passed_twice<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let mul = rig.register(
        FunctionSpec::new("mul").skip_warmup(),
        |k, rec, mut inputs| {
            let (p, q) = (inputs.take(0)?, inputs.take(1)?);
            let out = k.product(rec, &p, &q)?;
            drop((p, q));
            let after = k.apply(rec, &out, 1.0, 0.5)?;
            Ok(vec![out, after])
        },
    );
    let x = rig.floats(&[1.0, 2.0]);
    let check = |out: &Outputs<D>| {
        assert_eq!(rig.read(&out[0]), [4.0, 9.0]);
        assert_eq!(rig.read(&out[1]), [4.5, 9.5]);
    };
    drop(rig.one(&a, &rig.trees.step(), &x));
    let mut nodes = Vec::new();
    // Each way twice: what was recorded one way is not replayed another way where that would be wrong.
    for _ in 0..2 {
        for way in 0..5 {
            let step = rig.trees.step();
            let y = rig.one(&a, &step, &x);
            let kept = y.clone();
            let out = match way {
                0 => {
                    drop(kept);
                    rig.call(&mul, &step, &[], &mut [give(y.clone()), give(y)])
                }
                1 => rig.call(&mul, &step, &[], &mut [lend(&kept), lend(&kept)]),
                2 => rig.call(&mul, &step, &[], &mut [give(y), lend(&kept)]),
                3 => rig.call(&mul, &step, &[], &mut [lend(&kept), give(y)]),
                _ => {
                    // Two views of it, one kept.
                    let view = y.view(0, 8).unwrap();
                    rig.call(&mul, &step, &[], &mut [give(view), give(y)])
                }
            };
            check(&out);
            assert_eq!(rig.trees.path_live(), if way == 0 { 2 } else { 3 });
            nodes.push((out.phase(), out.node().unwrap().0));
        }
    }
    assert_eq!(
        nodes,
        [
            (Record, 1),
            (Record, 2),
            (Replay, 2),
            (Replay, 2),
            (Replay, 2),
            (Replay, 1),
            (Replay, 2),
            (Replay, 2),
            (Replay, 2),
            (Replay, 2)
        ]
    );
    // The same eager tensor twice is copied twice.
    let step = rig.trees.step();
    let two = rig.floats(&[2.0, 3.0]);
    check(&rig.run(&mul, &step, &[&two, &two]));
    drop((x, two, step));
    rig.finish();
}

fn a_view_as_a_managed_input<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 0.0);
    let b = rig.register(FunctionSpec::new("b").skip_warmup(), |k, rec, inputs| {
        Ok(vec![k.apply(rec, inputs.get(0)?, 10.0, 0.0)?])
    });
    let x = rig.floats(&[0.0, 1.0, 2.0, 3.0]);
    drop(rig.one(&a, &rig.trees.step(), &x));
    // Offset, length, and which recording takes it.
    for (offset, bytes, phase, node) in [
        (0, 8, Record, 1),
        (4, 8, Record, 2),
        (4, 4, Record, 3),
        (0, 8, Replay, 1),
        (4, 8, Replay, 2),
        (4, 4, Replay, 3),
    ] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let view = y.view(offset, bytes).unwrap();
        let out = rig.run(&b, &step, &[&view]);
        assert_eq!((out.phase(), out.node()), (phase, Some(NodeId(node))));
        let expected: Vec<f32> = (offset / 4..(offset + bytes) / 4)
            .map(|i| 10.0 * i as f32)
            .collect();
        assert_eq!(rig.read(&out[0]), expected);
    }
    drop(x);
    rig.finish();
}

/// A function that writes its input in place, recorded with a tensor from outside (of which it gets a copy), is then called with an output.
fn an_output_is_never_replayed_as_a_copy<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let bump = rig.register(FunctionSpec::new("bump").skip_warmup(), |k, rec, inputs| {
        let x = inputs.get(0)?;
        k.kernels
            .increment(rec.device(), rec.stream(), x.ptr()?, x.bytes() / 4, 100.0)?;
        Ok(vec![x.clone()])
    });
    let x = rig.floats(&[1.0]);
    drop(rig.one(&a, &rig.trees.step(), &x));
    for round in 0..3 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        // A copy of what comes from outside: the caller's tensor stays as it is.
        let (phase, copy) = rig.phased(&bump, &step, &x);
        assert_eq!(phase, if round == 0 { Record } else { Replay });
        assert_eq!((rig.read(&copy), rig.read(&x)), (vec![101.0], vec![1.0]));
        drop(copy);
        // The output itself: it is what changes.
        let (phase, same) = rig.phased(&bump, &step, &y);
        assert_eq!(phase, if round == 0 { Record } else { Replay });
        assert_eq!(same.storage_id(), y.storage_id());
        assert_eq!((rig.read(&same), rig.read(&y)), (vec![102.0], vec![102.0]));
    }
    drop(x);
    rig.finish();
}

fn a_given_view_does_not_free_its_sibling<D: Device>(rig: Rig<D>) {
    let a = rig.register(FunctionSpec::new("a"), |k, rec, inputs| {
        let y = k.apply(rec, inputs.get(0)?, 2.0, 0.0)?;
        Ok(vec![y.view(0, 4)?, y.view(4, 4)?])
    });
    let b = rig.register(
        FunctionSpec::new("b").skip_warmup(),
        |k, rec, mut inputs| {
            let y = inputs.take(0)?;
            let z = k.apply(rec, &y, 1.0, 1.0)?;
            drop(y);
            Ok(vec![k.apply(rec, &z, 1.0, 1.0)?])
        },
    );
    let x = rig.floats(&[1.0, 2.0]);
    for keep in [false, false, true, false, true, false] {
        let step = rig.trees.step();
        let [first, second] = two(rig.run(&a, &step, &[&x]));
        let second = keep.then_some(second);
        let (_, out) = rig.moved(&b, &step, first);
        assert_eq!(rig.read(&out), [4.0]);
        if let Some(second) = &second {
            assert_eq!(rig.read(second), [4.0]);
        }
        assert_eq!(rig.trees.path_live(), 1 + usize::from(keep));
    }
    // Not kept: it dies inside. Kept: one more recording, in which nothing dies.
    assert_eq!(rig.trees.counts().recordings, 3);
    drop(x);
    rig.finish();
}

fn a_given_input_is_reused_inside_the_graph<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let b = rig.register(
        FunctionSpec::new("b").skip_warmup(),
        |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            let place = x.ptr()?;
            let y = k.apply(rec, &x, 10.0, 0.0)?;
            let before = y.ptr()?;
            drop(x);
            let z = k.apply(rec, &y, 1.0, 1.0)?;
            assert_ne!(before, place);
            assert_eq!(z.ptr()?, place, "the given input's memory is used next");
            drop(y);
            Ok(vec![z])
        },
    );
    // Whole blocks of 512 B, so that the layout says what lies where.
    let x = rig.floats(&[1.0; 128]);
    let y = {
        drop(rig.one(&a, &rig.trees.step(), &x));
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        assert_eq!(rig.layout(), "S0@st0[F512 A512 F2096128]");
        let (phase, out) = rig.moved(&b, &step, y);
        assert_eq!(phase, Record);
        assert_eq!(
            rig.layout(),
            "S0@st0[F512 A512 F2096128]",
            "where a's output was"
        );
        assert_eq!(rig.read(&out), [21.0; 128]);
        out
    };
    for _ in 0..3 {
        let step = rig.trees.step();
        let first = rig.one(&a, &step, &x);
        let (id, place) = (first.storage_id(), first.ptr().unwrap());
        let (phase, out) = rig.moved(&b, &step, first);
        assert_eq!(phase, Replay);
        assert_eq!(out.ptr().unwrap(), place);
        assert_ne!(out.storage_id(), id);
        assert_eq!(rig.read(&out), [21.0; 128]);
    }
    assert!(!y.is_current());
    drop((x, y));
    rig.finish();
}

/// The input's block is in the books (something was recorded since), and dies after the launch that has put another output there.
fn a_given_input_that_owns_its_memory_is_overwritten_by_a_replay<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let b = rig.register(
        FunctionSpec::new("b").skip_warmup(),
        |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            let y = k.apply(rec, &x, 10.0, 0.0)?;
            drop(x);
            Ok(vec![k.apply(rec, &y, 1.0, 1.0)?])
        },
    );
    let other = rig.scale_add("other", 5.0, 0.0);
    let x = rig.floats(&[1.0; 128]);
    for _ in 0..2 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        drop(rig.moved(&b, &step, y));
    }
    for phase in [Warmup, Record] {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        // Brings the books up to date, and is forgotten again.
        assert_eq!(rig.phased(&other, &step, &x).0, phase);
        assert_eq!(rig.blocks(), 1);
        let place = y.ptr().unwrap();
        let (p, out) = rig.moved(&b, &step, y);
        assert_eq!((p, out.ptr().unwrap()), (Replay, place));
        assert_eq!(rig.read(&out), [21.0; 128]);
        assert_eq!(rig.blocks(), 0);
    }
    drop(x);
    rig.finish();
}

fn a_replay_leaves_the_allocator_alone<D: Device>(rig: Rig<D>) {
    let a = rig.scale_add("a", 1.0, 1.0);
    let b = rig.scale_add("b", 2.0, 0.0);
    let x = rig.floats(&[1.0, 2.0]);
    let books = || -> (PoolStats, String, PoolStats, String) {
        (
            rig.trees.pool_stats(),
            rig.layout(),
            rig.allocator.stats(),
            rig.allocator.snapshot().layout(),
        )
    };
    for _ in 0..2 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        let y2 = rig.one(&a, &step, &y);
        drop(rig.moved(&b, &step, y));
        drop(y2);
    }
    let before = books();
    let snapshot = rig.trees.pool_snapshot();
    for _ in 0..5 {
        let step = rig.trees.step();
        let y = rig.one(&a, &step, &x);
        assert_eq!(books(), before, "after the first");
        let y2 = rig.one(&a, &step, &y);
        let (phase, out) = rig.moved(&b, &step, y);
        assert_eq!((phase, books()), (Replay, before.clone()));
        assert_eq!(
            (rig.read(&y2), rig.read(&out)),
            (vec![3.0, 4.0], vec![4.0, 6.0])
        );
        drop(out);
        drop(y2);
        assert_eq!(books(), before, "dropping a replay's outputs");
        assert_eq!(rig.trees.pool_snapshot(), snapshot);
    }
    drop(x);
    rig.finish();
}

fn outputs_outlive_the_tree<D: Device>(rig: Rig<D>) {
    for runs in 1..=4 {
        let trees = cudagraph_trees::GraphTrees::new(&rig.allocator).unwrap();
        let inner = Rig {
            device: rig.device.clone(),
            allocator: rig.allocator.clone(),
            kernels: rig.kernels.clone(),
            stream: rig.stream.clone(),
            trees,
        };
        let a = inner.register(FunctionSpec::new("a"), |k, rec, inputs| {
            let y = k.apply(rec, inputs.get(0)?, 1.0, 1.0)?;
            Ok(vec![y.clone(), y.view(4, 4)?, k.apply(rec, &y, 10.0, 0.0)?])
        });
        let x = inner.floats(&[1.0, 2.0]);
        let mut kept = None;
        for _ in 0..runs {
            let step = inner.trees.step();
            let first = inner.run(&a, &step, &[&x]);
            let second = inner.run(&a, &step, &[&first[2]]);
            kept = Some((first, second, step));
        }
        let (first, second, step) = kept.unwrap();
        let mut first = first.into_iter();
        drop(first.next());
        let (view, tenfold) = (first.next().unwrap(), first.next().unwrap());
        let pool = inner.trees.pool_id();
        // The tree ends before the step: nobody can end it any more.
        drop(inner);
        drop(step);
        let live = |rig: &Rig<D>| {
            rig.allocator
                .private_pools()
                .iter()
                .find(|(id, ..)| *id == pool)
                .map(|(_, uses, stats)| (*uses, stats.live_blocks.current))
        };
        assert_eq!(live(&rig), Some((0, 4)), "after {runs} runs");
        assert_eq!(rig.read(&view), [3.0]);
        assert_eq!(rig.read(&tenfold), [20.0, 30.0]);
        assert_eq!(rig.read(&second[0]), [21.0, 31.0]);
        assert_eq!(rig.read(&second[2]), [210.0, 310.0]);
        drop(view);
        assert_eq!(live(&rig), Some((0, 3)));
        drop(second);
        assert_eq!(live(&rig), Some((0, 1)));
        rig.allocator.trim().unwrap();
        assert_eq!(rig.read(&tenfold), [20.0, 30.0]);
        drop(tenfold);
        rig.allocator.trim().unwrap();
        assert_eq!(live(&rig), None);
        drop((x, first));
    }
    rig.finish();
}

fn more_handles_than_are_counted<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 1.0, 1.0);
    let x = rig.floats(&[1.0]);
    for phase in [Warmup, Record, Replay, Replay] {
        let step = rig.trees.step();
        let (p, out) = rig.phased(&f, &step, &x);
        assert_eq!(p, phase);
        let many = vec![out.clone(); 70_000];
        assert_eq!(rig.read(&many[69_999]), [2.0]);
        drop(many);
        // So many that they were not counted: held until the step's end.
        assert_eq!(rig.read(&out), [2.0]);
        drop(out);
        assert_eq!(rig.trees.path_live(), 1);
    }
    let step = rig.trees.step();
    let (p, out) = rig.phased(&f, &step, &x);
    assert_eq!((p, rig.trees.path_live()), (Replay, 1));
    drop((x, out, step));
    rig.finish();
}

fn two<D: Device>(outputs: Outputs<D>) -> [Tensor<D>; 2] {
    let mut outputs = outputs.into_iter();
    [outputs.next().unwrap(), outputs.next().unwrap()]
}
