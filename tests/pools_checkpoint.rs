//! Checkpoints of private pools with tensors that own, lose and adopt blocks: the catalogue's CKPT rows and their traces.
mod common;

use std::collections::HashMap;

use common::{Rig, Toy, layout};
use cudagraph_trees::device::{Device, DevicePtr};
use cudagraph_trees::pool::{
    Pool, PoolConfig, PoolError, PoolSnapshot, StreamId, Tag, Trimmed, Unclaimed,
};
use cudagraph_trees::{CaptureOptions, Error, Graph, PoolHandle, PoolOptions, Tensor};

suite!(
    ckpt_01_a_function_of_many_sizes,
    ckpt_02_one_block_in_the_middle,
    ckpt_03_two_blocks_in_the_middle,
    ckpt_04_two_blocks_side_by_side,
    ckpt_05_a_later_block_is_orphaned,
    ckpt_05b_the_same_on_one_stream,
    ckpt_06_orphans_are_named,
    ckpt_07_blocks_whose_tensors_died_come_back_without_an_owner,
    ckpt_08_tensors_adopt_blocks,
    ckpt_10_live_blocks_are_compared_as_a_set,
    ckpt_13_segments_go_back,
    ckpt_15_pools_that_cannot_be_reached,
    ckpt_19_what_cannot_be_adopted,
    adopting_changes_owners_not_contents,
    back_and_forth_between_two_states,
    t2_02_a_restore_that_fails_changes_nothing,
    t2_07_an_orphan_is_freed_once_and_to_no_effect,
    t2_08_empty_tensors_have_no_block,
);

const MIB: u64 = 1 << 20;

fn new_pool<D: Device>(rig: &Rig<D>) -> PoolHandle<D> {
    rig.allocator.create_pool(PoolOptions::default()).unwrap()
}

/// One step of a trace: an allocation of so many bytes, or (0) the death of what has the name.
type Step = (&'static str, u64);

/// Captures a graph that does nothing but allocate and free.
fn captured<D: Device>(
    rig: &Rig<D>,
    stream: &D::Stream,
    pool: &PoolHandle<D>,
    steps: &[Step],
) -> (Graph<D>, HashMap<&'static str, Tensor<D>>) {
    let mut graph = Graph::new(&rig.allocator);
    let options = CaptureOptions {
        pool: Some(pool.clone()),
        ..CaptureOptions::default()
    };
    let capture = graph.capture_with(stream, options).unwrap();
    let mut held = HashMap::new();
    for (name, bytes) in steps {
        if *bytes == 0 {
            assert!(held.remove(name).is_some(), "{name}");
        } else {
            let tensor = capture.alloc(*bytes).unwrap();
            assert!(held.insert(*name, tensor).is_none(), "{name}");
        }
    }
    capture.end().unwrap();
    (graph, held)
}

/// Captures the steps, checks the layout, keeps it, returns to it with everything still held, and drops all.
fn same_after_restore<D: Device>(rig: Rig<D>, steps: &[Step], expected: &str, segments: u64) {
    let pool = new_pool(&rig);
    let (graph, held) = captured(&rig, &rig.stream, &pool, steps);
    let before = pool.snapshot();
    assert_eq!(layout(&before), expected);
    let checkpoint = pool.checkpoint();
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[], Unclaimed::Free)
        .unwrap();
    assert_eq!(
        (
            restored.kept,
            restored.adopted,
            restored.unclaimed,
            restored.orphaned
        ),
        (held.len(), 0, vec![], vec![])
    );
    assert_eq!(
        pool.snapshot(),
        before,
        "segments, blocks, owners: all as before"
    );
    drop(held);
    assert_eq!(pool.stats().live_blocks.current, 0);
    for segment in &pool.snapshot().segments {
        assert_eq!(segment.blocks.len(), 1, "merged again");
    }
    assert_eq!(pool.stats().segments.current, segments);
    drop((graph, checkpoint, pool));
    rig.finish();
}

fn ckpt_01_a_function_of_many_sizes<D: Device>(rig: Rig<D>) {
    let steps = [
        ("x", 8 * MIB),
        ("x2", 8 * MIB),
        ("x", 0),
        ("a", MIB),
        ("b", MIB),
        ("t", MIB),
        ("a", 0),
        ("b", 0),
        ("c", MIB),
        ("x1", MIB),
        ("t", 0),
        ("c", 0),
        ("d", MIB),
        ("y", MIB),
        ("d", 0),
        ("z", MIB),
        ("x1", 0),
    ];
    let expected =
        "L0@st0[F8388608 A8388608 F4194304]; S1@st0[F1048576 A1048576]; S2@st0[A1048576 F1048576]";
    same_after_restore(rig, &steps, expected, 3);
}

/// Eleven blocks of 512 B, of which `kept` stay.
fn eleven<D: Device>(rig: Rig<D>, kept: &[usize], expected: &str) {
    const NAMES: [&str; 11] = [
        "b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8", "b9", "b10",
    ];
    let allocated = NAMES.iter().map(|name| (*name, 512));
    let freed = (0..11).filter(|i| !kept.contains(i)).map(|i| (NAMES[i], 0));
    let steps: Vec<Step> = allocated.chain(freed).collect();
    same_after_restore(rig, &steps, expected, 1);
}

fn ckpt_02_one_block_in_the_middle<D: Device>(rig: Rig<D>) {
    eleven(rig, &[5], "S0@st0[F2560 A512 F2094080]");
}

fn ckpt_03_two_blocks_in_the_middle<D: Device>(rig: Rig<D>) {
    eleven(rig, &[5, 8], "S0@st0[F2560 A512 F1024 A512 F2092544]");
}

fn ckpt_04_two_blocks_side_by_side<D: Device>(rig: Rig<D>) {
    eleven(rig, &[5, 6], "S0@st0[F2560 A512 A512 F2093568]");
}

/// A block captured after the checkpoint, on `stream`; then back.
fn orphan_one<D: Device>(rig: Rig<D>, other_stream: bool, with_both: &str, back: &str) {
    let pool = new_pool(&rig);
    let stream = if other_stream {
        rig.device.create_stream().unwrap()
    } else {
        rig.stream.clone()
    };
    let (g1, o1) = captured(&rig, &rig.stream, &pool, &[("o1", 512)]);
    assert_eq!(layout(&pool.snapshot()), "S0@st0[A512 F2096640]");
    let checkpoint = pool.checkpoint();
    let (g2, o2) = captured(&rig, &stream, &pool, &[("o2", 512)]);
    assert_eq!(layout(&pool.snapshot()), with_both);

    let place = o2["o2"].ptr().unwrap();
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[], Unclaimed::Free)
        .unwrap();
    assert_eq!((restored.kept, restored.adopted), (1, 0));
    assert_eq!(restored.orphaned, [place]);
    assert_eq!(layout(&pool.snapshot()), back);
    assert_eq!(pool.stats().orphans, 1);

    drop(o2); // its block is not its own any more
    assert_eq!(layout(&pool.snapshot()), back);
    assert_eq!(
        (pool.stats().orphans, pool.stats().live_blocks.current),
        (0, 1)
    );
    drop((o1, g1, g2, checkpoint, pool));
    rig.finish();
}

fn ckpt_05_a_later_block_is_orphaned<D: Device>(rig: Rig<D>) {
    orphan_one(
        rig,
        true,
        "S0@st0[A512 F2096640]; S1@st1[A512 F2096640]",
        "S0@st0[A512 F2096640]; S1@st1[F2097152]",
    );
}

fn ckpt_05b_the_same_on_one_stream<D: Device>(rig: Rig<D>) {
    orphan_one(
        rig,
        false,
        "S0@st0[A512 A512 F2096128]",
        "S0@st0[A512 F2096640]",
    );
}

/// Upstream asks for a list of the tensors that lose their block, and refuses a restore whose list lacks one. Here the restore is
/// total: it finds them itself and names them, in the order of their places.
fn ckpt_06_orphans_are_named<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let kept = pool.alloc(&rig.stream, 512).unwrap();
    let checkpoint = pool.checkpoint();
    let later = [512, 4096, 2 * MIB].map(|bytes| pool.alloc(&rig.stream, bytes).unwrap());
    let places = later.each_ref().map(|t| t.ptr().unwrap());
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[], Unclaimed::Free)
        .unwrap();
    let mut orphaned = restored.orphaned;
    orphaned.sort_unstable();
    let mut expected = places;
    expected.sort_unstable();
    assert_eq!(orphaned, expected);
    assert!(
        pool.check_live(&[kept.ptr().unwrap().0]).is_exact(),
        "only what the checkpoint has is live"
    );
    drop((kept, later, checkpoint, pool));
    rig.finish();
}

fn ckpt_07_blocks_whose_tensors_died_come_back_without_an_owner<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let (graph, outputs) = captured(&rig, &rig.stream, &pool, &[("a", 512), ("b", 512)]);
    let places = ["a", "b"].map(|name| outputs[name].ptr().unwrap());
    let checkpoint = pool.checkpoint();
    let live = || pool.stats().live_blocks.current;
    drop(outputs);
    assert_eq!(live(), 0);
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[], Unclaimed::Keep)
        .unwrap();
    assert_eq!((restored.kept, restored.unclaimed), (0, places.to_vec()));
    assert_eq!(live(), 2);
    assert!(pool.free_at(&rig.stream, places[0]).unwrap());
    assert_eq!(live(), 1);
    assert!(
        !pool.free_at(&rig.stream, places[0]).unwrap(),
        "it is free already"
    );
    assert!(
        !pool.free_at(&rig.stream, places[1].offset(8)).unwrap(),
        "not where a block begins"
    );
    assert!(!pool.free_at(&rig.stream, DevicePtr::NULL).unwrap());
    assert!(pool.free_at(&rig.stream, places[1]).unwrap());
    assert_eq!(live(), 0);
    // With the other policy nobody has to free them.
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[], Unclaimed::Free)
        .unwrap();
    assert_eq!((restored.unclaimed, live()), (places.to_vec(), 0));
    drop((graph, checkpoint, pool));
    rig.finish();
}

/// Trace K7, with real tensors: u8 inputs of 2, 2 and 20 MiB, outputs of 16, 16 and 160 MiB. The kernels work on the first elements.
/// A device with memory checks poisons what died, so values are read after a replay, which makes its outputs live again.
fn ckpt_08_tensors_adopt_blocks<D: Device>(rig: Rig<D>) {
    let head = |t: &Tensor<D>| t.view(0, 1024).unwrap();
    let x = rig.floats(&[1.0; 256]);
    let pool = new_pool(&rig);
    let mut graph = Graph::new(&rig.allocator);
    let options = CaptureOptions {
        pool: Some(pool.clone()),
        ..CaptureOptions::default()
    };
    let capture = graph.capture_with(&rig.stream, options).unwrap();
    let outputs = [2, 2, 20].map(|mib| {
        let temporary = capture.alloc(mib * MIB).unwrap();
        let out = capture.alloc(8 * mib * MIB).unwrap();
        rig.scale_into(capture.stream(), &head(&temporary), &x, 1.0, 0.0);
        rig.scale_into(capture.stream(), &head(&out), &head(&temporary), 1.0, 1.0);
        out
    });
    capture.end().unwrap();
    let recorded = "L0@st0[F2097152 A16777216 F2097152]; L1@st0[A16777216]; L2@st0[F20971520]; L3@st0[A167772160]";
    let free = "L0@st0[F20971520]; L1@st0[F16777216]; L2@st0[F20971520]; L3@st0[F167772160]";
    let check = |live: u64, blocks: &str| {
        let stats = pool.stats();
        assert_eq!(
            (stats.live_blocks.current, stats.reserved_bytes.current),
            (live, 226_492_416)
        );
        assert_eq!(layout(&pool.snapshot()), blocks);
    };
    check(3, recorded);
    let checkpoint = pool.checkpoint();

    let read = |t: &Tensor<D>| rig.read(&head(t));
    graph.replay(&rig.stream).unwrap();
    for out in &outputs {
        assert_eq!(read(out), [2.0; 256]);
    }
    let places = outputs.each_ref().map(|t| (t.ptr().unwrap(), t.bytes()));
    drop(outputs);
    check(0, free);

    let handles = places.map(|(ptr, bytes)| pool.unowned(ptr, bytes));
    check(0, free);
    for expected in [2.0, 3.0] {
        rig.put(&x, &[expected - 1.0; 256]);
        graph.replay(&rig.stream).unwrap();
        for handle in &handles {
            assert_eq!(read(handle), [expected; 256]);
        }
    }
    let [h1, h2, h3] = handles;
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[&h1, &h2], Unclaimed::Keep)
        .unwrap();
    assert_eq!((restored.kept, restored.adopted), (0, 2));
    assert_eq!(restored.unclaimed, [places[2].0]);
    assert_eq!(restored.orphaned, []);
    check(3, recorded);
    for adopted in [&h1, &h2] {
        assert_eq!(read(adopted), [3.0; 256], "adopting leaves the bytes alone");
    }
    drop(h1);
    assert_eq!(pool.stats().live_blocks.current, 2);
    drop(h2);
    assert_eq!(pool.stats().live_blocks.current, 1);
    drop(h3); // it adopted nothing
    assert_eq!(pool.stats().live_blocks.current, 1);
    assert!(pool.free_at(&rig.stream, places[2].0).unwrap());
    check(0, free);
    drop((x, graph, checkpoint, pool));
    rig.finish();
}

fn ckpt_10_live_blocks_are_compared_as_a_set<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let (graph, mut outputs) = captured(&rig, &rig.stream, &pool, &[("out", 16)]);
    let out = outputs.remove("out").unwrap();
    let at = out.ptr().unwrap().0;
    assert!(pool.check_live(&[at]).is_exact());
    assert!(pool.check_live(&[at, at]).is_exact(), "a set");
    assert_eq!(pool.check_live(&[at, 0]).missing, [0]);
    let unknown = pool.check_live(&[]);
    assert_eq!(unknown.missing, []);
    assert_eq!(
        (
            unknown.untracked.len(),
            unknown.untracked[0].allocation.address(),
            unknown.untracked[0].requested
        ),
        (1, at, 16)
    );
    drop(out);
    assert!(pool.check_live(&[]).is_exact());
    assert_eq!(pool.check_live(&[at]).missing, [at]);
    drop((graph, pool));
    rig.finish();
}

fn ckpt_13_segments_go_back<D: Device>(rig: Rig<D>) {
    let free = || rig.device.memory_info().unwrap().free;
    let before = (free(), rig.allocator.private_pools());
    let pool = new_pool(&rig);
    let (graph, outputs) = captured(&rig, &rig.stream, &pool, &[("a", 512), ("b", 20 * MIB)]);
    let checkpoint = pool.checkpoint();
    drop(outputs);
    pool.restore(&rig.stream, &checkpoint, &[], Unclaimed::Free)
        .unwrap();
    assert_eq!(rig.allocator.trim().unwrap(), Trimmed::default());
    drop((graph, pool));
    // A checkpoint nobody can return to any more is no reason to keep memory, once it is dropped.
    drop(checkpoint);
    assert_eq!(
        rig.allocator.trim().unwrap(),
        Trimmed {
            segments: 2,
            bytes: 22 * MIB
        }
    );
    assert_eq!((free(), rig.allocator.private_pools()), before);
    rig.finish();
}

/// Not a device's: the rule for splitting is changed between checkpoint and restore.
#[test]
fn ckpt_14_recorded_splits_come_back_whatever_the_rule_is_now() {
    let mut pool = Pool::new(PoolConfig::default(), Toy::new().0).unwrap();
    let mut alloc = |bytes| pool.alloc(StreamId(0), bytes, Tag(1)).unwrap();
    let (a, b) = (alloc(4 * MIB), alloc(8 * MIB));
    let checkpoint = pool.checkpoint();
    let recorded = "L0@st0[A4194304 A8388608 F8388608]";
    assert_eq!(pool.snapshot().layout(), recorded);
    pool.free(a).unwrap();
    pool.free(b).unwrap();
    pool.set_split(None, true).unwrap();
    let whole = pool.alloc(StreamId(0), 4 * MIB, Tag(2)).unwrap();
    assert_eq!(pool.snapshot().layout(), "L0@st0[A20971520]");
    let restored = pool.restore(&checkpoint, &[], Unclaimed::Keep).unwrap();
    assert_eq!(pool.snapshot().layout(), recorded);
    assert_eq!(restored.unclaimed.len(), 2);
    assert_eq!(restored.orphaned[0].allocation, whole);
    let rest = pool.alloc(StreamId(0), 2 * MIB, Tag(3)).unwrap();
    assert_eq!(rest.bytes(), 8 * MIB, "the new rule holds from here on");
}

fn ckpt_15_pools_that_cannot_be_reached<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let id = pool.id();
    let (graph, outputs) = captured(&rig, &rig.stream, &pool, &[("a", 512)]);
    drop(pool);
    assert_eq!(
        rig.allocator.pool(id).unwrap().uses(),
        2,
        "the graph uses it, and the new handle"
    );
    drop(graph);
    let released = rig.allocator.pool(id).unwrap_err();
    assert!(matches!(released, Error::PoolReleased(other) if other == id));
    assert_eq!(
        released.to_string(),
        format!(
            "pool {id} has no graph and no handle any more and cannot be used again; make a new one"
        )
    );
    drop(outputs);
    rig.allocator.trim().unwrap();
    assert!(matches!(rig.allocator.pool(id), Err(Error::UnknownPool(other)) if other == id));
    rig.finish();
}

fn ckpt_19_what_cannot_be_adopted<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let other = new_pool(&rig);
    let [a, b] = [(); 2].map(|()| pool.alloc(&rig.stream, 512).unwrap());
    let (at_a, at_b) = (a.ptr().unwrap(), b.ptr().unwrap());
    let checkpoint = pool.checkpoint();
    let foreign = other.checkpoint();
    drop((a, b));
    let c = pool.alloc(&rig.stream, 4096).unwrap();
    let before = (pool.snapshot(), pool.stats());
    let refused = |checkpoint, adopt: &[&Tensor<D>]| {
        let error = pool
            .restore(&rig.stream, checkpoint, adopt, Unclaimed::Free)
            .unwrap_err();
        assert_eq!((pool.snapshot(), pool.stats()), before, "{error}");
        match error {
            Error::Pool(error) => error,
            other => panic!("{other}"),
        }
    };
    let not_in = |index: usize, adopt: &[&Tensor<D>]| {
        let error = refused(&checkpoint, adopt);
        assert!(
            matches!(error, PoolError::AdoptNotInCheckpoint { index: i, .. } if i == index),
            "{error}"
        );
    };
    let good = pool.unowned(at_a, 512);
    let twin = pool.unowned(at_a, 512);
    let inside = pool.unowned(at_b.offset(64), 64);
    let unrelated = other.alloc(&rig.stream, 512).unwrap();
    // Where the block is, but not of this pool: its death would not free the block.
    let imported = rig.allocator.import(at_b, 512, ());
    let of_other_pool = other.unowned(at_b, 512);

    assert!(matches!(
        refused(&foreign, &[]),
        PoolError::ForeignCheckpoint
    ));
    not_in(0, &[&inside]);
    not_in(1, &[&good, &unrelated]);
    not_in(0, &[&Tensor::empty()]);
    not_in(0, &[&imported]);
    not_in(1, &[&good, &of_other_pool]);
    for both in [[&good, &twin], [&good, &good]] {
        let error = refused(&checkpoint, &both);
        assert!(
            matches!(
                error,
                PoolError::AdoptedTwice {
                    first: 0,
                    second: 1,
                    ..
                }
            ),
            "{error}"
        );
    }
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[&good], Unclaimed::Free)
        .unwrap();
    assert_eq!((restored.adopted, restored.unclaimed), (1, vec![at_b]));
    assert_eq!(layout(&pool.snapshot()), "S0@st0[A512 F2096640]");
    drop((good, twin, inside, unrelated, imported, of_other_pool, c));
    assert_eq!(pool.stats().live_blocks.current, 0);
    drop((checkpoint, foreign, pool, other));
    rig.finish();
}

fn adopting_changes_owners_not_contents<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let a = pool.alloc(&rig.stream, 64).unwrap();
    rig.put(&a, &[7.0; 16]);
    let checkpoint = pool.checkpoint();
    // A tensor that owns its block already keeps it, adopting or not.
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[&a], Unclaimed::Free)
        .unwrap();
    assert_eq!((restored.kept, restored.adopted), (1, 1));
    assert_eq!(rig.read(&a), [7.0; 16]);
    // The block is taken over from its owner, which is then a handle on somebody else's memory.
    let heir = pool.unowned(a.ptr().unwrap(), 64);
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[&heir], Unclaimed::Free)
        .unwrap();
    assert_eq!((restored.adopted, pool.stats().live_blocks.current), (1, 1));
    assert_eq!(rig.read(&heir), [7.0; 16]);
    drop(a); // owns nothing any more
    assert_eq!(pool.stats().live_blocks.current, 1);
    assert_eq!(rig.read(&heir), [7.0; 16]);
    let view = heir.view(4, 8).unwrap();
    drop(heir);
    assert_eq!(pool.stats().live_blocks.current, 1, "the view owns it too");
    assert_eq!(rig.read(&view), [7.0; 2]);
    drop(view);
    assert_eq!(pool.stats().live_blocks.current, 0);
    drop((checkpoint, pool));
    rig.finish();
}

/// Two branches below one state, left and returned to many times, with data in every block.
fn back_and_forth_between_two_states<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let base = pool.alloc(&rig.stream, 512).unwrap();
    rig.put(&base, &[1.0; 128]);
    let fork = pool.checkpoint();
    let branch = |sizes: [u64; 3]| {
        let held = sizes.map(|bytes| pool.alloc(&rig.stream, bytes).unwrap());
        let places: Vec<(DevicePtr, u64)> =
            held.iter().map(|t| (t.ptr().unwrap(), t.bytes())).collect();
        let kept = (pool.checkpoint(), pool.snapshot(), places);
        pool.restore(&rig.stream, &fork, &[], Unclaimed::Free)
            .unwrap();
        kept
    };
    let branches = [branch([512, 2048, MIB]), branch([1024, 512, 12 * MIB])];
    for round in 0..20_u8 {
        let (checkpoint, snapshot, places) = &branches[usize::from(round) % 2];
        let heirs: Vec<Tensor<D>> = places.iter().map(|(p, n)| pool.unowned(*p, *n)).collect();
        let adopt: Vec<&Tensor<D>> = heirs.iter().collect();
        let restored = pool
            .restore(&rig.stream, checkpoint, &adopt, Unclaimed::Free)
            .unwrap();
        assert_eq!(
            (restored.kept, restored.adopted, restored.orphaned),
            (1, 3, vec![])
        );
        // Segments of the other branch are there as free space.
        let blocks = |s: &PoolSnapshot| -> Vec<(u64, u64)> {
            let live = s.segments.iter().flat_map(|segment| {
                let live = segment.blocks.iter().filter(|b| b.owner.is_some());
                live.map(|b| (segment.address + b.offset, b.bytes))
            });
            live.collect()
        };
        assert_eq!(blocks(&pool.snapshot()), blocks(snapshot));
        let value = f32::from(round);
        let part = heirs[1].view(0, 512).unwrap();
        rig.put(&part, &[value; 128]);
        assert_eq!(rig.read(&part), [value; 128]);
        assert_eq!(rig.read(&base), [1.0; 128]);
        drop((heirs, part));
        assert_eq!(pool.stats().live_blocks.current, 1);
    }
    assert_eq!((pool.stats().restores, pool.stats().orphans), (22, 0));
    drop((base, fork, branches, pool));
    rig.finish();
}

fn t2_02_a_restore_that_fails_changes_nothing<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let held: Vec<Tensor<D>> = (1..20)
        .map(|i| pool.alloc(&rig.stream, i * 700).unwrap())
        .collect();
    for (i, tensor) in held.iter().enumerate() {
        rig.put(&tensor.view(0, 4).unwrap(), &[i as f32]);
    }
    let checkpoint = pool.checkpoint();
    let later = pool.alloc(&rig.stream, 3000).unwrap();
    rig.put(&later.view(0, 4).unwrap(), &[99.0]);
    let before = pool.snapshot();
    for _ in 0..3 {
        let error = pool.restore(
            &rig.stream,
            &checkpoint,
            &[&held[3], &later],
            Unclaimed::Free,
        );
        assert!(matches!(
            error,
            Err(Error::Pool(PoolError::AdoptNotInCheckpoint {
                index: 1,
                ..
            }))
        ));
    }
    assert_eq!(pool.snapshot(), before);
    for (i, tensor) in held.iter().enumerate() {
        assert_eq!(rig.read(&tensor.view(0, 4).unwrap()), [i as f32]);
    }
    assert_eq!(rig.read(&later.view(0, 4).unwrap()), [99.0]);
    drop((held, later, checkpoint, pool));
    rig.finish();
}

fn t2_07_an_orphan_is_freed_once_and_to_no_effect<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let checkpoint = pool.checkpoint();
    let a = pool.alloc(&rig.stream, 512).unwrap();
    let place = a.ptr().unwrap();
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[], Unclaimed::Free)
        .unwrap();
    assert_eq!(restored.orphaned, [place]);
    // The same memory has another owner before the orphan dies.
    let b = pool.alloc(&rig.stream, 512).unwrap();
    assert_eq!(b.ptr().unwrap(), place);
    rig.put(&b, &[6.0; 128]);
    let view = a.view(0, 16).unwrap();
    drop(a);
    drop(view);
    assert!(
        pool.check_live(&[place.0]).is_exact(),
        "b's block is still b's"
    );
    assert_eq!(rig.read(&b), [6.0; 128]);
    let c = pool.alloc(&rig.stream, 512).unwrap();
    assert_eq!(c.ptr().unwrap(), place.offset(512));
    drop((b, c));
    assert_eq!(layout(&pool.snapshot()), "S0@st0[F2097152]");
    assert_eq!(pool.stats().orphans, 0);
    drop((checkpoint, pool));
    rig.finish();
}

fn t2_08_empty_tensors_have_no_block<D: Device>(rig: Rig<D>) {
    let pool = new_pool(&rig);
    let checkpoint = pool.checkpoint();
    let empty = pool.alloc(&rig.stream, 0).unwrap();
    assert_eq!(
        (empty.ptr().unwrap(), empty.bytes(), empty.storage_id()),
        (DevicePtr::NULL, 0, None)
    );
    assert_eq!(pool.snapshot().segments.len(), 0);
    assert!(pool.check_live(&[]).is_exact());
    let restored = pool
        .restore(&rig.stream, &checkpoint, &[], Unclaimed::Keep)
        .unwrap();
    assert_eq!((restored.orphaned, restored.unclaimed), (vec![], vec![]));
    assert_eq!(rig.read(&empty), [0.0; 0]);
    drop((empty, checkpoint, pool));
    rig.finish();
}

/// Over a backing of numbers, with no device behind the pool's memory: a random walk through a tree of states,
/// with a restore at each branch. The layouts are those that were kept, and no block is lost or freed twice.
#[test]
fn t2_09_a_random_walk_over_a_toy_backing() {
    for seed in 1..6_u64 {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut draw = move |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let rig = Rig::new(cudagraph_trees::device::host::HostDevice::new());
        let (toy, counts) = Toy::new();
        let pool = rig
            .allocator
            .create_pool(PoolOptions {
                backing: Some(Box::new(toy)),
                ..PoolOptions::default()
            })
            .unwrap();
        let streams = [rig.stream.clone(), rig.device.create_stream().unwrap()];
        // A state is a checkpoint with the places of what was live then.
        let mut states = vec![(pool.checkpoint(), Vec::<(DevicePtr, u64)>::new())];
        let mut held: Vec<Tensor<_>> = Vec::new();
        for _ in 0..400 {
            match draw(10) {
                0..5 => {
                    let bytes = 1 << draw(24);
                    let stream = &streams[draw(2) as usize];
                    held.push(pool.alloc(stream, bytes + draw(bytes)).unwrap());
                }
                5..8 if !held.is_empty() => {
                    held.swap_remove(draw(held.len() as u64) as usize);
                }
                8 => {
                    let places = held.iter().map(|t| (t.ptr().unwrap(), t.bytes())).collect();
                    states.push((pool.checkpoint(), places));
                }
                _ => {
                    let (checkpoint, places) = &states[draw(states.len() as u64) as usize];
                    // Half of what was live is taken over by new handles, the rest is let go of.
                    let heirs: Vec<Tensor<_>> = places
                        .iter()
                        .filter(|_| draw(2) == 0)
                        .map(|(ptr, bytes)| pool.unowned(*ptr, *bytes))
                        .collect();
                    let adopt: Vec<&Tensor<_>> = heirs.iter().collect();
                    // Tensors held now own nothing afterwards, unless their block is in the state itself.
                    let still: Vec<u64> = held.iter().map(|t| t.ptr().unwrap().0).collect();
                    let restored = pool
                        .restore(&rig.stream, checkpoint, &adopt, Unclaimed::Free)
                        .unwrap();
                    assert_eq!(restored.adopted, heirs.len());
                    let orphaned: Vec<u64> = restored.orphaned.iter().map(|p| p.0).collect();
                    assert!(orphaned.iter().all(|p| still.contains(p)));
                    held.retain(|t| !orphaned.contains(&t.ptr().unwrap().0));
                    // A kept block that was adopted besides has its new owner.
                    held.retain(|t| heirs.iter().all(|h| h.ptr().unwrap() != t.ptr().unwrap()));
                    held.extend(heirs);
                }
            }
            let live: Vec<u64> = held.iter().map(|t| t.ptr().unwrap().0).collect();
            let check = pool.check_live(&live);
            assert!(check.is_exact(), "seed {seed}: {check:?}");
            assert_eq!(pool.stats().live_blocks.current, live.len() as u64);
            assert_eq!(
                pool.stats().reserved_bytes.current,
                counts.lock().unwrap().mapped
            );
        }
        drop((held, states));
        assert_eq!(pool.stats().live_blocks.current, 0);
        let mapped = counts.lock().unwrap().mapped;
        drop(pool);
        assert_eq!(rig.allocator.trim().unwrap().bytes, mapped);
        rig.finish();
    }
}
