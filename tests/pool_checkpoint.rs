//! Checkpoint and restore: what is kept, adopted, freed, orphaned, and that nothing happens by halves. Names
//! carry the rows of the behaviour tables.

#[path = "common/pool.rs"]
mod common;

use std::thread;

use common::*;
use cudagraph_trees::pool::{
    Allocation, Backing, Checkpoint, Freed, LiveBlock, Pool, PoolConfig, PoolError, Restored,
    StreamId, Tag, Unclaimed,
};

/// The pool's snapshot and figures, to see that nothing has changed.
fn all(pool: &Pool<Toy>) -> impl PartialEq + std::fmt::Debug + use<> {
    (pool.snapshot(), pool.stats(), pool.live())
}

fn assert_send_sync<T: Send + Sync + Clone>() {}

#[test]
fn a_checkpoint_may_go_anywhere_and_be_dropped_at_any_time() {
    assert_send_sync::<Checkpoint>();
    let mut pool = pool();
    let kept = alloc(&mut pool, 0, 512);
    let checkpoint = pool.checkpoint();
    let clone = checkpoint.clone();
    thread::spawn(move || drop(checkpoint)).join().unwrap();
    free(&mut pool, kept);
    // The clone still holds the state.
    assert_eq!(pool.trim().unwrap().segments, 0);
    assert_eq!(
        pool.restore(&clone, &[adopt(kept, 1)], Unclaimed::Free)
            .unwrap()
            .adopted
            .len(),
        1
    );
    assert_eq!(pool.stats().checkpoints_held, 1);
    let late = pool.checkpoint();
    drop(pool);
    drop((clone, late));
}

#[test]
fn a_dropped_checkpoint_costs_nothing_after_the_next_call() {
    let mut pool = pool();
    let blocks: Vec<_> = (0..1000).map(|_| alloc(&mut pool, 0, 512)).collect();
    for block in blocks {
        let checkpoint = pool.checkpoint();
        free(&mut pool, block);
        drop(checkpoint);
    }
    drop(pool.checkpoint());
    assert_eq!(pool.stats().checkpoints, 1001);
    assert_eq!(pool.trim().unwrap().segments, 1);
    assert_eq!(pool.stats().checkpoints_held, 0);
}

#[test]
fn ckpt_06_a_block_missing_in_the_checkpoint_is_an_orphan_and_freeing_it_does_nothing_once() {
    let mut pool = pool();
    let first = alloc(&mut pool, 1, 512);
    let checkpoint = pool.checkpoint();
    let second = pool.alloc(StreamId(1), 400, Tag(22)).unwrap();
    let done = pool.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    let segment = cudagraph_trees::pool::SegmentId(0);
    let orphan = LiveBlock {
        allocation: second,
        tag: Tag(22),
        segment,
        offset: 512,
        bytes: 512,
        requested: 400,
    };
    assert_eq!(
        done,
        Restored {
            kept: 1,
            orphaned: vec![orphan],
            ..Restored::default()
        }
    );
    assert_eq!(pool.stats().orphans, 1);
    assert!(pool.contains(first) && !pool.contains(second));
    let before = layout(&pool);
    assert_eq!(pool.free(second).unwrap(), Freed::Orphan);
    assert!(
        matches!(pool.free(second), Err(PoolError::NotLive { allocation }) if allocation == second)
    );
    assert_eq!((layout(&pool), pool.stats().orphans), (before, 0));
}

#[test]
fn t2_07_an_orphans_place_can_be_had_again_before_and_after_its_free() {
    let mut pool = pool();
    let checkpoint = pool.checkpoint();
    let orphan = alloc(&mut pool, 0, 512);
    pool.restore(&checkpoint, &[], Unclaimed::Free).unwrap();
    let first = alloc(&mut pool, 0, 512);
    assert_eq!(first.address(), orphan.address());
    assert_ne!(first.id(), orphan.id());
    assert_eq!(pool.free(orphan).unwrap(), Freed::Orphan);
    assert!(pool.contains(first));
    let second = alloc(&mut pool, 0, 512);
    assert_ne!(
        second.address(),
        first.address(),
        "the place was not freed twice"
    );
}

#[test]
fn t2_08_zero_byte_blocks_are_legal_and_untracked() {
    let mut pool = pool();
    let empty = alloc(&mut pool, 0, 0);
    assert_eq!(
        (empty, empty.address(), empty.bytes(), empty.is_empty()),
        (Allocation::EMPTY, 0, 0, true)
    );
    assert_eq!((held(&pool), pool.contains(empty)), ((0, 0), false));
    assert!(pool.check_live(&[]).is_exact());
    let checkpoint = pool.checkpoint();
    let done = pool
        .restore(
            &checkpoint,
            &[adopt(empty, 1), adopt(empty, 2)],
            Unclaimed::Free,
        )
        .unwrap();
    assert_eq!(done.adopted, [Allocation::EMPTY; 2]);
    pool.set_tag(empty, Tag(3)).unwrap();
    assert_eq!(
        [pool.free(empty).unwrap(), pool.free(empty).unwrap()],
        [Freed::Empty; 2]
    );
}

/// The smallest backing there can be.
struct Numbers(u64);

impl Backing for Numbers {
    fn reserve(&mut self, bytes: u64) -> Result<u64, cudagraph_trees::pool::BackingError> {
        self.0 += bytes;
        Ok(self.0 - bytes)
    }
    fn map(&mut self, _: u64, _: u64) -> Result<(), cudagraph_trees::pool::BackingError> {
        Ok(())
    }
    fn unmap(&mut self, _: u64, _: u64) -> Result<(), cudagraph_trees::pool::BackingError> {
        Ok(())
    }
    fn release(&mut self, _: u64, _: u64) -> Result<(), cudagraph_trees::pool::BackingError> {
        Ok(())
    }
}

#[test]
fn t2_09_any_backing_will_do_also_a_boxed_one() {
    let boxed: Box<dyn Backing + Send> = Box::new(Numbers(1 << 30));
    let mut pool = Pool::new(PoolConfig::default(), boxed).unwrap();
    let block = pool.alloc(StreamId(0), 3 << 20, Tag(1)).unwrap();
    let checkpoint = pool.checkpoint();
    pool.free(block).unwrap();
    let done = pool
        .restore(&checkpoint, &[adopt(block, 1)], Unclaimed::Free)
        .unwrap();
    assert_eq!(done.adopted[0].address(), block.address());
    fn assert_send<T: Send>(_: &T) {}
    assert_send(&pool);
}

#[test]
fn ckpt_10_the_live_blocks_are_exactly_those_asked_about() {
    let mut pool = pool();
    let block = alloc(&mut pool, 0, 16);
    let at = block.address();
    assert!(pool.check_live(&[at]).is_exact());
    assert!(pool.check_live(&[at, at]).is_exact());
    let check = pool.check_live(&[at, 0]);
    assert_eq!(
        (check.is_exact(), &check.missing[..], check.untracked.len()),
        (false, &[0][..], 0)
    );
    let check = pool.check_live(&[]);
    assert_eq!(
        (
            check.is_exact(),
            check.missing.len(),
            check.untracked[0].allocation
        ),
        (false, 0, block)
    );
    assert_eq!(pool.check_live(&[at + 1]).missing, [at + 1]);
    free(&mut pool, block);
    assert!(pool.check_live(&[]).is_exact());
    assert_eq!(pool.check_live(&[at]).missing, [at]);
}

#[test]
fn ckpt_13_a_pool_without_checkpoints_and_live_blocks_gives_all_back() {
    let (mut pool, toy) = pool_of(PoolConfig::default());
    let blocks: Vec<_> = (0..9)
        .map(|n| alloc(&mut pool, n % 3, u64::from(n + 1) * MIB))
        .collect();
    let checkpoint = pool.checkpoint();
    blocks.into_iter().for_each(|block| free(&mut pool, block));
    assert_eq!(
        pool.trim().unwrap().segments,
        0,
        "the checkpoint has a live block in each"
    );
    drop(checkpoint);
    let segments = pool.stats().segments.current;
    assert_eq!(pool.trim().unwrap().segments, segments);
    assert_eq!((toy.reserved(), toy.mapped(), held(&pool)), (0, 0, (0, 0)));
}

#[test]
fn dropping_a_pool_gives_all_back() {
    let (mut pool, toy) = pool_of(PoolConfig::default());
    alloc(&mut pool, 0, 512);
    alloc(&mut pool, 0, 50 * MIB);
    assert_eq!(toy.reserved(), 2);
    drop(pool);
    assert_eq!(toy.reserved(), 0);
}

#[test]
fn ckpt_14_a_restore_brings_the_split_back_whatever_the_policy_now() {
    let mut pool = pool();
    let blocks = [3, 5, 2].map(|mib| alloc(&mut pool, 0, mib * MIB));
    free(&mut pool, blocks[1]);
    let (checkpoint, then) = (pool.checkpoint(), layout(&pool));
    free(&mut pool, blocks[0]);
    free(&mut pool, blocks[2]);
    pool.set_split(None, true).unwrap();
    let whole = alloc(&mut pool, 0, MIB + 512);
    assert_eq!(layout(&pool), "L0@st0[A20971520]");
    let adopted = [adopt(blocks[0], 1), adopt(blocks[2], 2)];
    let done = pool
        .restore(&checkpoint, &adopted, Unclaimed::Free)
        .unwrap();
    assert_eq!(layout(&pool), then);
    assert_eq!(done.orphaned[0].allocation, whole);
}

#[test]
fn ckpt_15_and_19_what_is_not_the_pools_is_refused_and_nothing_changes() {
    let (mut one, mut two) = (pool(), pool());
    let mine = alloc(&mut one, 0, 512);
    let other = alloc(&mut two, 0, 512);
    let (checkpoint, foreign) = (one.checkpoint(), two.checkpoint());
    let later = alloc(&mut one, 0, 512);
    free(&mut one, mine);
    let before = all(&one);

    let error = one.restore(&foreign, &[], Unclaimed::Free).unwrap_err();
    assert!(matches!(error, PoolError::ForeignCheckpoint));
    // Live now, not live then; of another pool, with the same address; named twice.
    for wrong in [later, other] {
        let error = one
            .restore(
                &checkpoint,
                &[adopt(mine, 1), adopt(wrong, 2)],
                Unclaimed::Free,
            )
            .unwrap_err();
        assert!(
            matches!(error, PoolError::AdoptNotInCheckpoint { index: 1, saved } if saved == wrong)
        );
        assert_eq!(all(&one), before);
    }
    let twice = [adopt(Allocation::EMPTY, 0), adopt(mine, 1), adopt(mine, 2)];
    let error = one
        .restore(&checkpoint, &twice, Unclaimed::Free)
        .unwrap_err();
    assert!(
        matches!(error, PoolError::AdoptedTwice { first: 1, second: 2, saved } if saved == mine)
    );
    assert_eq!(all(&one), before);
    // And then it works.
    let done = one
        .restore(&checkpoint, &twice[..2], Unclaimed::Free)
        .unwrap();
    assert_eq!(
        (done.adopted[1].address(), done.orphaned[0].allocation),
        (mine.address(), later)
    );
}
