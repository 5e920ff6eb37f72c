//! Models of a storage's word, bit and custody under loom: handles that go on one thread while a tree does what it does to their storage on another.
//!
//! Everything here is what runs otherwise: tensors, the allocator and its pool, over the simulated device. Each model is one race.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Home, LiveMask, Storage, StorageId, Tensor};
use crate::allocator::{Allocator, Claim, PoolHandle, PoolOptions};
use crate::device::Device;
use crate::device::host::HostDevice;
use crate::pool::{Allocation, Stat, Tag};
use crate::sync::{AtomicBool, model, thread};

type Handle = Tensor<HostDevice>;
type Place = Arc<Storage<HostDevice>>;

/// A tree's pool without the tree, and the mask of a node with one output.
struct Rig {
    device: HostDevice,
    stream: <HostDevice as Device>::Stream,
    pool: PoolHandle<HostDevice>,
    live: Arc<LiveMask>,
    _allocator: Allocator<HostDevice>,
}

impl Rig {
    fn new() -> Self {
        let device = HostDevice::new();
        let allocator = Allocator::new(device.clone()).unwrap();
        Rig {
            stream: device.create_stream().unwrap(),
            pool: allocator.new_pool(PoolOptions::default(), true).unwrap(),
            live: LiveMask::new(1),
            device,
            _allocator: allocator,
        }
    }

    /// A storage that owns a block, with one handle, which is no output yet.
    fn fresh(&self) -> (Place, Handle) {
        let tensor = self.pool.alloc(&self.stream, 512).unwrap();
        (tensor.storage().unwrap().clone(), tensor)
    }

    /// The same as the output of the node, after its warmup or recording.
    fn output(&self) -> (Place, Handle) {
        let (storage, tensor) = self.fresh();
        storage.settle(self.home());
        (storage, tensor)
    }

    fn home(&self) -> Home {
        Home {
            function: "f".into(),
            output: 0,
            live: self.live.clone(),
            bit: 0,
        }
    }

    /// The same after a replay: held, and owning no block.
    fn replayed(&self) -> (Place, Handle) {
        let (storage, tensor) = self.output();
        drop(tensor);
        let tensor = self.hand_out(&storage);
        (storage, tensor)
    }

    /// A replay's last act, with one handle on the output.
    fn hand_out(&self, storage: &Place) -> Handle {
        storage.hand_out(1);
        self.live.set_all(1);
        handle(storage)
    }

    /// A block at the storage's place, as a restore gives it.
    fn claim(&self, storage: &Place) -> Allocation {
        let claim = Claim {
            range: storage.range(),
            tag: Tag(storage.id().0),
            owned: None,
        };
        self.pool.claim_blocks(&self.stream, &[claim]).unwrap()[0]
    }

    fn blocks(&self) -> Stat {
        self.pool.stats().live_blocks
    }

    /// Nobody holds it, and its one block was freed. (That a block is freed twice, the allocator finds.)
    fn is_dead(&self, storage: &Place) {
        assert_eq!(storage.owners(), 0);
        assert_eq!(self.live.word(0), 0, "the bit of a dead storage is clear");
        assert_eq!(storage.block(), None);
        assert_eq!(self.blocks().current, 0);
    }

    /// One handle holds it, and it has a block or has none.
    fn is_held(&self, storage: &Place, blocks: u64) {
        assert_eq!(storage.owners(), 1);
        assert_eq!(self.live.word(0), 1, "the bit of a held storage is set");
        assert_eq!(self.blocks().current, blocks);
    }
}

/// The handle of a storage that was just handed out to one.
fn handle(storage: &Place) -> Handle {
    Tensor::counted(
        storage.clone(),
        storage.stamp(),
        0,
        storage.bytes(),
        Location::caller(),
    )
}

#[test]
fn the_last_two_handles_are_dropped_at_once() {
    model(|| {
        let rig = Rig::new();
        let (storage, first) = rig.output();
        let second = first.view(0, 8).unwrap();
        let other = thread::spawn(move || drop(second));
        drop(first);
        other.join().unwrap();
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 1);
    });
}

#[test]
fn a_handle_is_cloned_while_another_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, first) = rig.output();
        let second = first.clone();
        let other = thread::spawn(move || {
            let third = second.clone();
            drop(second);
            third
        });
        drop(first);
        let third = other.join().unwrap();
        rig.is_held(&storage, 1);
        drop(third);
        rig.is_dead(&storage);
    });
}

/// As a run does that finds the output dead: it looks at the bit, then hands the storage out.
#[test]
fn a_storage_is_handed_out_while_its_last_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, old) = rig.output();
        let other = thread::spawn(move || drop(old));
        let new = (!rig.live.any()).then(|| {
            let new = rig.hand_out(&storage);
            // Who sees the bit clear comes after the block and its mark.
            assert_eq!(rig.blocks().current, 0);
            new
        });
        other.join().unwrap();
        match new {
            Some(new) => {
                assert_eq!(storage.stamp(), 1);
                rig.is_held(&storage, 0);
                drop(new);
                rig.is_dead(&storage);
            }
            None => rig.is_dead(&storage),
        }
        assert_eq!(rig.blocks().freed, 1);
    });
}

/// As a run does that ends a generation and replays the node: what the other thread has is of the generation that was.
#[test]
fn a_handle_of_an_ended_generation_touches_nothing() {
    model(|| {
        let rig = Rig::new();
        let (storage, old) = rig.output();
        let weak = old.downgrade();
        let other = thread::spawn(move || {
            let twin = old.clone();
            drop(old);
            drop(twin.view(0, 8));
            drop(twin);
            assert!(weak.upgrade().is_none());
        });
        storage.invalidate(&"f".into(), Location::caller());
        let new = rig.hand_out(&storage);
        other.join().unwrap();
        assert!(new.is_current());
        rig.is_held(&storage, 0);
        drop(new);
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 1);
    });
}

#[test]
fn a_generation_is_ended_while_its_last_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, first) = rig.output();
        let second = first.clone();
        let other = thread::spawn(move || drop(second));
        drop(first);
        storage.invalidate(&"f".into(), Location::caller());
        rig.is_dead(&storage);
        other.join().unwrap();
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 1);
    });
}

/// A weak handle comes to hold what a replay is about to consume, or does not.
#[test]
fn what_is_taken_is_held_by_nobody_and_is_put_back() {
    model(|| {
        let rig = Rig::new();
        let (storage, given) = rig.output();
        let weak = given.downgrade();
        let other = thread::spawn(move || weak.upgrade().is_some());
        if let Some(word) = storage.take(1) {
            assert_eq!(storage.owners(), 0);
            assert!(given.downgrade().upgrade().is_none());
            storage.put_back(word);
        }
        other.join().unwrap();
        assert!(given.is_current());
        rig.is_held(&storage, 1);
        drop(given);
        rig.is_dead(&storage);
    });
}

#[test]
fn what_is_taken_ends_or_is_not_taken() {
    model(|| {
        let rig = Rig::new();
        let (storage, given) = rig.output();
        let weak = given.downgrade();
        let other = thread::spawn(move || weak.upgrade());
        let ended = match storage.take(1) {
            Some(word) => {
                storage.end(word);
                rig.is_dead(&storage);
                true
            }
            None => false,
        };
        let upgraded = other.join().unwrap();
        if ended {
            assert!(upgraded.is_none(), "nobody comes in between");
            assert!(!given.is_current());
            drop(given);
        } else {
            let upgraded = upgraded.expect("somebody held it");
            assert!(upgraded.is_current());
            drop(given);
            rig.is_held(&storage, 1);
            drop(upgraded);
        }
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 1);
    });
}

/// The caller gives one of two handles; the other is dropped meanwhile, or held still.
#[test]
fn it_is_taken_from_exactly_its_owners() {
    model(|| {
        let rig = Rig::new();
        let (storage, given) = rig.output();
        let twin = given.clone();
        let other = thread::spawn(move || drop(twin));
        if let Some(word) = storage.take(1) {
            storage.end(word);
            rig.is_dead(&storage);
        }
        other.join().unwrap();
        drop(given);
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 1);
    });
}

/// As a catch-up does: what a replay left without a block gets one, unless it dies meanwhile.
#[test]
fn a_block_is_adopted_while_the_last_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, tensor) = rig.replayed();
        let block = rig.claim(&storage);
        let other = thread::spawn(move || drop(tensor));
        rig.pool.let_go(storage.adopt(block, rig.stream.clone()));
        other.join().unwrap();
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 2);
    });
}

/// The same where it owns one already: each of the two goes back once.
#[test]
fn another_block_is_adopted_while_the_last_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, tensor) = rig.output();
        let (elsewhere, its) = rig.fresh();
        drop(its);
        let claim = Claim {
            range: elsewhere.range(),
            tag: Tag(storage.id().0),
            owned: None,
        };
        let block = rig.pool.claim_blocks(&rig.stream, &[claim]).unwrap()[0];
        let other = thread::spawn(move || drop(tensor));
        rig.pool.let_go(storage.adopt(block, rig.stream.clone()));
        other.join().unwrap();
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 3);
    });
}

#[test]
fn a_weak_handle_is_upgraded_while_the_last_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, tensor) = rig.output();
        let weak = tensor.downgrade();
        let other = thread::spawn(move || drop(tensor));
        match weak.upgrade() {
            Some(upgraded) => {
                other.join().unwrap();
                rig.is_held(&storage, 1);
                drop(upgraded);
            }
            None => other.join().unwrap(),
        }
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 1);
    });
}

/// What a run does with what it holds while its closure runs, and the drop that this outlasts.
#[test]
fn a_run_holds_what_another_thread_drops() {
    model(|| {
        let rig = Rig::new();
        let (storage, tensor) = rig.output();
        let other = thread::spawn(move || drop(tensor));
        match Tensor::hold(&storage) {
            Some(held) => {
                assert_eq!(rig.blocks().current, 1);
                drop(held);
            }
            None => {
                storage.settled();
                assert_eq!(rig.blocks().current, 0);
                assert_eq!(rig.live.word(0), 0);
            }
        }
        other.join().unwrap();
        rig.is_dead(&storage);
    });
}

/// It dies while it is made an output: nobody is left who would clear the bit later.
#[test]
fn it_becomes_an_output_while_the_last_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, tensor) = rig.fresh();
        let other = thread::spawn(move || drop(tensor));
        storage.settle(rig.home());
        other.join().unwrap();
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 1);
    });
}

/// As a rollback does: what died inside a capture that failed is the caller's again.
#[test]
fn the_dead_are_resurrected_while_a_weak_handle_is_upgraded() {
    model(|| {
        let rig = Rig::new();
        let (storage, tensor) = rig.output();
        let weak = tensor.downgrade();
        drop(tensor);
        let other = thread::spawn(move || drop(weak.upgrade()));
        let block = rig.claim(&storage);
        let stamp = storage.resurrect().unwrap();
        assert_eq!(storage.adopt(block, rig.stream.clone()), None);
        let tensor = handle(&storage);
        assert_eq!(stamp, 0);
        other.join().unwrap();
        rig.is_held(&storage, 1);
        drop(tensor);
        rig.is_dead(&storage);
    });
}

/// As the policy does that keeps old values: it moves out of the tree, and another storage has its place and bit from then on.
#[test]
fn a_storage_moves_out_while_its_last_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, old) = rig.output();
        let refuge = rig.pool.alloc(&rig.stream, 512).unwrap();
        let (place, weak) = (refuge.storage().unwrap().clone(), old.downgrade());
        let other = thread::spawn(move || {
            drop(weak.upgrade());
            drop(old);
        });
        let id = StorageId(1_000);
        let new = storage.replacement(id).unwrap();
        let event = rig.device.create_event().unwrap();
        let copied = Arc::new((rig.stream.clone(), event));
        rig.pool.let_go(storage.move_out(refuge, copied));
        let held = rig.hand_out(&new);
        other.join().unwrap();
        assert_eq!((storage.owners(), place.owners()), (0, 0));
        rig.is_held(&new, 0);
        drop(held);
        rig.is_dead(&new);
        assert_eq!(rig.blocks().freed, 2);
    });
}

/// However it comes, who watches is told.
#[test]
fn a_death_is_watched_while_the_last_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let (storage, tensor) = rig.output();
        let flag = Arc::new(AtomicBool::new(false));
        let other = thread::spawn(move || drop(tensor));
        storage.watch(&flag);
        other.join().unwrap();
        assert!(flag.load(Ordering::Acquire));
        rig.is_dead(&storage);
    });
}

/// Uses and the stream of its death lie in the custody, which the last drop reads.
#[test]
fn it_is_used_on_another_stream_while_a_handle_is_dropped() {
    model(|| {
        let rig = Rig::new();
        let stream = rig.device.create_stream().unwrap();
        let (storage, first) = rig.output();
        let second = first.clone();
        let other = thread::spawn(move || drop(second));
        first.record_stream(&stream).unwrap();
        drop(first);
        other.join().unwrap();
        rig.is_dead(&storage);
        assert_eq!(rig.blocks().freed, 1);
    });
}
