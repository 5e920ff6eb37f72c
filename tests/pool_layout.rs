//! Where the pool places blocks: the traces of PyTorch's suites, byte for byte. Names carry the rows of the
//! behaviour tables. Each trace is also a snapshot, one file each, under `snapshots/`.

#[path = "common/pool.rs"]
mod common;

use common::*;
use cudagraph_trees::pool::{Adopt, Freed, Pool, PoolError, Unclaimed};

/// Takes a checkpoint, returns to it with all held, and finds the same layout.
fn absorb(trace: &mut Trace, pool: &mut Pool<Toy>) {
    let (before, live) = (pool.snapshot(), held(pool));
    let checkpoint = pool.checkpoint();
    let done = pool.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    assert_eq!((pool.snapshot(), held(pool)), (before, live));
    assert_eq!(
        (done.kept as u64, done.freed.len(), done.orphaned.len()),
        (live.0, 0, 0)
    );
    trace.note("checkpoint, restore: the same");
}

#[test]
fn k1_ckpt_01_simple() {
    let (mut pool, mut t) = (pool(), Trace::default());
    let p = &mut pool;
    t.alloc(p, "x", 8 * MIB, 0, "L0+0");
    t.alloc(p, "x2", 8 * MIB, 0, "L0+8388608");
    t.free(p, "x");
    t.expect(p, 1, 20971520, "L0@st0[F8388608 A8388608 F4194304]");
    t.alloc(p, "a", MIB, 0, "S1+0");
    t.alloc(p, "b", MIB, 0, "S1+1048576");
    t.alloc(p, "t", MIB, 0, "S2+0");
    t.free(p, "a");
    t.free(p, "b");
    t.expect(
        p,
        2,
        25165824,
        "L0@st0[F8388608 A8388608 F4194304]; S1@st0[F2097152]; S2@st0[A1048576 F1048576]",
    );
    t.alloc(p, "c", MIB, 0, "S2+1048576");
    t.alloc(p, "x1", MIB, 0, "S1+0");
    t.free(p, "t");
    t.free(p, "c");
    t.expect(
        p,
        2,
        25165824,
        "L0@st0[F8388608 A8388608 F4194304]; S1@st0[A1048576 F1048576]; S2@st0[F2097152]",
    );
    t.alloc(p, "d", MIB, 0, "S1+1048576");
    t.alloc(p, "y", MIB, 0, "S2+0");
    t.free(p, "d");
    t.alloc(p, "z", MIB, 0, "S1+1048576");
    t.free(p, "x1");
    let kept =
        "L0@st0[F8388608 A8388608 F4194304]; S1@st0[F1048576 A1048576]; S2@st0[A1048576 F1048576]";
    t.expect(p, 3, 25165824, kept);
    absorb(&mut t, p);
    t.expect(p, 3, 25165824, kept);
    t.check("k1_simple");
}

/// Eleven blocks of 512 bytes, of which only those of `kept` are not freed again.
fn eleven(name: &str, kept: &[&str], layout: &str) {
    const NAMES: [&str; 11] = [
        "b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8", "b9", "b10",
    ];
    let (mut pool, mut t) = (pool(), Trace::default());
    let p = &mut pool;
    for (n, name) in NAMES.into_iter().enumerate() {
        t.alloc(p, name, 512, 0, &format!("S0+{}", n * 512));
    }
    t.expect(
        p,
        11,
        2097152,
        "S0@st0[A512 A512 A512 A512 A512 A512 A512 A512 A512 A512 A512 F2091520]",
    );
    for name in NAMES.into_iter().filter(|name| !kept.contains(name)) {
        t.free(p, name);
    }
    t.expect(p, kept.len() as u64, 2097152, layout);
    absorb(&mut t, p);
    t.expect(p, kept.len() as u64, 2097152, layout);
    for name in NAMES.into_iter().filter(|name| kept.contains(name)) {
        t.free(p, name);
    }
    t.expect(p, 0, 2097152, "S0@st0[F2097152]");
    t.check(name);
}

#[test]
fn k2_ckpt_02_allocated_in_middle_of_segment() {
    eleven(
        "k2_allocated_in_middle_of_segment",
        &["b5"],
        "S0@st0[F2560 A512 F2094080]",
    );
}

#[test]
fn k3_ckpt_03_multiple_middle_allocations() {
    let layout = "S0@st0[F2560 A512 F1024 A512 F2092544]";
    eleven("k3_multiple_middle_allocations", &["b5", "b8"], layout);
}

#[test]
fn k4_ckpt_04_middle_allocations_contiguous() {
    let layout = "S0@st0[F2560 A512 A512 F2093568]";
    eleven("k4_middle_allocations_contiguous", &["b5", "b6"], layout);
}

#[test]
fn k5_ckpt_05_additional_free_following_checkpoint() {
    let (mut pool, mut t) = (pool(), Trace::default());
    let p = &mut pool;
    t.alloc(p, "o1", 512, 1, "S0+0");
    t.expect(p, 1, 2097152, "S0@st1[A512 F2096640]");
    let checkpoint = p.checkpoint();
    t.note("c = checkpoint");
    t.alloc(p, "o2", 512, 2, "S1+0");
    t.expect(
        p,
        2,
        4194304,
        "S0@st1[A512 F2096640]; S1@st2[A512 F2096640]",
    );
    let done = p.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    assert_eq!(done.orphaned[0].allocation, t.get("o2"));
    t.note("restore c: o2 is orphaned");
    t.expect(p, 1, 4194304, "S0@st1[A512 F2096640]; S1@st2[F2097152]");
    assert_eq!(p.free(t.get("o2")).unwrap(), Freed::Orphan);
    t.note("free  o2: no effect");
    t.expect(p, 1, 4194304, "S0@st1[A512 F2096640]; S1@st2[F2097152]");
    t.check("k5_additional_free_following_checkpoint");
}

#[test]
fn k5b_ckpt_05_additional_free_on_the_same_stream() {
    let (mut pool, mut t) = (pool(), Trace::default());
    let p = &mut pool;
    t.alloc(p, "o1", 512, 1, "S0+0");
    t.expect(p, 1, 2097152, "S0@st1[A512 F2096640]");
    let checkpoint = p.checkpoint();
    t.note("c = checkpoint");
    t.alloc(p, "o2", 512, 1, "S0+512");
    t.expect(p, 2, 2097152, "S0@st1[A512 A512 F2096128]");
    let done = p.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    assert_eq!(done.orphaned[0].allocation, t.get("o2"));
    t.note("restore c: o2 is orphaned");
    t.expect(p, 1, 2097152, "S0@st1[A512 F2096640]");
    t.check("k5b_additional_free_on_the_same_stream");
}

#[test]
fn k7_ckpt_08_assigning_back() {
    let (mut pool, mut t) = (pool(), Trace::default());
    let p = &mut pool;
    t.alloc(p, "t1", 2097152, 0, "L0+0");
    t.alloc(p, "o1", 16777216, 0, "L0+2097152");
    t.free(p, "t1");
    t.alloc(p, "t2", 2097152, 0, "L0+0");
    t.alloc(p, "o2", 16777216, 0, "L1+0");
    t.free(p, "t2");
    t.alloc(p, "t3", 20971520, 0, "L2+0");
    t.alloc(p, "o3", 167772160, 0, "L3+0");
    t.free(p, "t3");
    let kept = "L0@st0[F2097152 A16777216 F2097152]; L1@st0[A16777216]; L2@st0[F20971520]; L3@st0[A167772160]";
    let empty = "L0@st0[F20971520]; L1@st0[F16777216]; L2@st0[F20971520]; L3@st0[F167772160]";
    t.expect(p, 3, 226492416, kept);
    let checkpoint = p.checkpoint();
    t.note("c = checkpoint");
    for name in ["o1", "o2", "o3"] {
        t.free(p, name);
    }
    t.expect(p, 0, 226492416, empty);
    let adopt = ["o1", "o2"].map(|name| Adopt {
        saved: t.get(name),
        tag: NOBODY,
    });
    let done = p.restore(&checkpoint, &adopt, Unclaimed::Keep).unwrap();
    t.note("restore c: h1, h2 adopt o1, o2; o3 is kept and unclaimed");
    t.expect(p, 3, 226492416, kept);
    assert_eq!(
        done.adopted.iter().map(|h| at(p, *h)).collect::<Vec<_>>(),
        [(0, 2097152), (1, 0)]
    );
    free(p, done.adopted[0]);
    assert_eq!(held(p).0, 2);
    free(p, done.adopted[1]);
    assert_eq!(held(p).0, 1);
    // The third handle owns nothing: the name it was captured under is long freed.
    assert!(matches!(
        p.free(t.get("o3")),
        Err(PoolError::NotLive { .. })
    ));
    assert_eq!(held(p).0, 1);
    let raw = p.find(t.get("o3").address()).unwrap();
    assert_eq!(raw, done.unclaimed[0]);
    free(p, raw);
    t.note("free h1, h2; free what lies at o3's address");
    t.expect(p, 0, 226492416, empty);
    t.check("k7_assigning_back");
}

#[test]
fn k7b_assigning_back_plain_bytes() {
    let (mut pool, mut t) = (pool(), Trace::default());
    let p = &mut pool;
    t.alloc(p, "t1", 2097152, 0, "L0+0");
    t.alloc(p, "o1", 2097152, 0, "L0+2097152");
    t.free(p, "t1");
    t.alloc(p, "t2", 2097152, 0, "L0+0");
    t.alloc(p, "o2", 2097152, 0, "L0+4194304");
    t.free(p, "t2");
    t.alloc(p, "t3", 20971520, 0, "L1+0");
    t.alloc(p, "o3", 20971520, 0, "L2+0");
    t.free(p, "t3");
    let kept = "L0@st0[F2097152 A2097152 A2097152 F14680064]; L1@st0[F20971520]; L2@st0[A20971520]";
    t.expect(p, 3, 62914560, kept);
    absorb(&mut t, p);
    t.check("k7b_assigning_back_plain_bytes");
}
