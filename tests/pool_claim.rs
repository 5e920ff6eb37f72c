//! Claiming a given range: exact place, exact neighbours, or a refusal that changes nothing.
#[path = "common/pool.rs"]
mod common;

use common::MIB;
use cudagraph_trees::pool::{Pool, PoolError, StreamId, Tag, Unclaimed};

fn pool() -> (Pool<common::Toy>, u64) {
    let mut pool = common::pool();
    let first = pool.alloc(StreamId(0), 512, Tag(1)).unwrap();
    pool.free(first).unwrap();
    (pool, first.address())
}

#[test]
fn alloc_22_24_a_range_in_the_middle_of_a_free_block() {
    let (mut pool, base) = pool();
    let claimed = pool.claim(base + 4096, 1024, Tag(7)).unwrap();
    assert_eq!((claimed.address(), claimed.bytes()), (base + 4096, 1024));
    assert_eq!(pool.snapshot().layout(), "S0@st0[F4096 A1024 F2092032]");
    assert_eq!(pool.live()[0].tag, Tag(7));
    // At either end, and all of the rest.
    pool.claim(base, 512, Tag(8)).unwrap();
    pool.claim(base + 2 * MIB - 512, 512, Tag(9)).unwrap();
    assert_eq!(
        pool.snapshot().layout(),
        "S0@st0[A512 F3584 A1024 F2091520 A512]"
    );
    pool.claim(base + 512, 3584, Tag(10)).unwrap();
    assert_eq!(
        pool.snapshot().layout(),
        "S0@st0[A512 A3584 A1024 F2091520 A512]"
    );
    pool.free(claimed).unwrap();
    assert_eq!(pool.snapshot().layout(), "S0@st0[A512 A3584 F2092544 A512]");
    assert_eq!(
        (
            pool.stats().live_blocks.current,
            pool.stats().live_blocks.allocated
        ),
        (3, 1)
    );
}

#[test]
fn alloc_23_what_is_not_free_is_refused() {
    let (mut pool, base) = pool();
    let live = pool.alloc(StreamId(0), 1024, Tag(1)).unwrap();
    let before = pool.snapshot();
    for (address, bytes) in [
        (live.address(), 512),
        (live.address() + 512, 1024),
        (base + 2 * MIB - 512, 1024),
        (base + 2 * MIB, 512),
        (base - 512, 512),
        (base + 2048, 0),
        (base + 2049, 512),
        (base + 2048, 100),
        (base + 2048, u64::MAX - 511),
    ] {
        match pool.claim(address, bytes, Tag(2)) {
            Err(PoolError::Occupied {
                address: a,
                bytes: b,
            }) => {
                assert_eq!((a, b), (address, bytes));
            }
            other => panic!("{address:#x} {bytes}: {other:?}"),
        }
        assert_eq!(pool.snapshot(), before);
    }
}

#[test]
fn what_is_claimed_after_a_restore_is_kept_out_of_the_way() {
    let (mut pool, _) = pool();
    let empty = pool.checkpoint();
    let a = pool.alloc(StreamId(0), 512, Tag(1)).unwrap();
    let b = pool.alloc(StreamId(0), 512, Tag(2)).unwrap();
    pool.restore(&empty, &[], Unclaimed::Free).unwrap();
    let again = pool.claim(b.address(), b.bytes(), Tag(2)).unwrap();
    assert_eq!(pool.snapshot().layout(), "S0@st0[F512 A512 F2096128]");
    let c = pool.alloc(StreamId(0), 1024, Tag(3)).unwrap();
    assert_eq!(c.address(), b.address() + 512);
    let d = pool.alloc(StreamId(0), 512, Tag(4)).unwrap();
    assert_eq!(d.address(), a.address());
    for block in [again, c, d] {
        pool.free(block).unwrap();
    }
    assert_eq!(pool.snapshot().layout(), "S0@st0[F2097152]");
}
