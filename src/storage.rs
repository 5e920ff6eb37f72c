//! Storages and tensors: a place in device memory that never moves, and the handles on it.
//!
//! A [`Storage`] is made by the allocator (or a recorder, through it) and lives behind an `Arc`. Users hold
//! [`Tensor`]s. The tree is the only other room that changes a storage: it hands outputs out again at a replay, and
//! ends generations. All of that goes through one atomic word (see [`word`]), so that a handle may be dropped on any
//! thread at any time.

#[cfg(all(test, loom))]
mod models;
mod tensor;
mod word;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::allocator::{Memory, PoolHandle, Uses};
use crate::device::{CaptureStatus, Device, DeviceError, DevicePtr};
use crate::error::{Made, Stale};
use crate::pool::Allocation;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, OnceLock, lock, raise};

pub use tensor::{Tensor, WeakTensor};
use word::{Release, Word};

/// The name of a storage within its allocator: small, in order of creation, never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorageId(pub u64);

impl fmt::Debug for StorageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}", self.0)
    }
}

/// Which outputs of one node are held: one bit for each output storage.
///
/// Set when the outputs are handed out, cleared by each storage's death. A set bit may be late by the length of a drop on
/// another thread; a clear bit is never wrong.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct LiveMask {
    /// The first 64 bits: mostly all there are.
    first: AtomicU64,
    /// There is one bit: whoever clears it need not mind others.
    one: bool,
    more: Box<[AtomicU64]>,
}

impl LiveMask {
    pub(crate) fn new(bits: usize) -> Arc<LiveMask> {
        let more = bits.div_ceil(64).saturating_sub(1);
        Arc::new(LiveMask {
            first: AtomicU64::new(0),
            one: bits == 1,
            more: (0..more).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    fn at(&self, index: usize) -> &AtomicU64 {
        match index {
            0 => &self.first,
            _ => &self.more[index - 1],
        }
    }

    /// Sets all bits of a mask of `bits`, none of which is set or being cleared.
    #[inline]
    pub(crate) fn set_all(&self, bits: usize) {
        let mask = |bits: usize| match bits {
            0..64 => (1 << bits) - 1,
            _ => u64::MAX,
        };
        self.first.store(mask(bits), Ordering::Release);
        for (index, word) in self.more.iter().enumerate() {
            word.store(mask(bits - 64 * (index + 1)), Ordering::Release);
        }
    }

    pub(crate) fn set(&self, bit: u32) {
        self.at(bit as usize / 64)
            .fetch_or(1 << (bit % 64), Ordering::AcqRel);
    }

    #[inline]
    pub(crate) fn clear(&self, bit: u32) {
        if self.one {
            return self.first.store(0, Ordering::Release);
        }
        self.at(bit as usize / 64)
            .fetch_and(!(1 << (bit % 64)), Ordering::AcqRel);
    }

    pub(crate) fn word(&self, index: usize) -> u64 {
        self.at(index).load(Ordering::Acquire)
    }

    pub(crate) fn words(&self) -> usize {
        1 + self.more.len()
    }

    fn all(&self) -> impl Iterator<Item = u64> {
        (0..self.words()).map(|index| self.word(index))
    }

    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.word(0) != 0 || self.all().skip(1).any(|word| word != 0)
    }

    pub(crate) fn count(&self) -> usize {
        self.all().map(|word| word.count_ones() as usize).sum()
    }
}

/// Where a storage stands as an output: whose, and which bit says that it is held.
#[derive(Debug)]
pub(crate) struct Home {
    /// The function that made it.
    pub(crate) function: Arc<str>,
    /// The first output that lies in it.
    pub(crate) output: usize,
    /// The mask of its node.
    pub(crate) live: Arc<LiveMask>,
    /// Its bit there.
    pub(crate) bit: u32,
}

/// What a storage owns, under a lock that no replay takes.
struct Custody<D: Device> {
    /// Its block in the pool, if it owns one now.
    block: Option<Allocation>,
    /// The stream on which its memory was last handed over: the one its death is ordered after.
    stream: Option<D::Stream>,
    /// Serial of the capture it was born in (0: none). A capture kills only what was born in it.
    born: u64,
    /// The streams it is used on besides.
    uses: Uses<D>,
    /// What few have.
    rare: Option<Box<Rare<D>>>,
}

/// What a storage has only if it is watched, has gone stale while it was held, or has moved out.
struct Rare<D: Device> {
    /// Where it moved out to: what keeps that memory.
    refuge: Option<Tensor<D>>,
    /// The copy that it moved out by, until it is known to be done.
    copied: Option<Arc<Copied<D>>>,
    /// Flags to raise at its death.
    watchers: Vec<Weak<AtomicBool>>,
    /// Who ended its last generations, the latest first.
    taken: [Option<Taken>; 4],
}

impl<D: Device> Custody<D> {
    fn rare(&mut self) -> &mut Rare<D> {
        self.rare.get_or_insert_with(|| {
            Box::new(Rare {
                refuge: None,
                copied: None,
                watchers: Vec::new(),
                taken: Default::default(),
            })
        })
    }
}

/// The stream that a copy was made on, and the event behind it.
pub(crate) type Copied<D> = (<D as Device>::Stream, <D as Device>::Event);

/// A generation that was ended while it was held: its stamp, the function whose run ended it, and that run's call.
type Taken = (u64, Arc<str>, &'static Location<'static>);

/// Where a storage's memory comes from.
pub(crate) enum Source<D: Device> {
    /// A pool of the allocator.
    Pool(Memory<D>),
    /// The caller's own memory, and what keeps it alive.
    Imported {
        /// The device that can reach it.
        device: D,
        _keeper: Box<dyn Any + Send + Sync>,
    },
}

/// When and where a storage comes to be.
pub(crate) struct Birth<D: Device> {
    /// The stream it is for.
    pub(crate) stream: D::Stream,
    /// Its number within the device.
    pub(crate) stream_id: u32,
    /// Serial of the capture underway on that stream, or 0.
    pub(crate) capture: u64,
    /// The call that asked for it.
    pub(crate) at: &'static Location<'static>,
}

/// The number of no stream.
const NO_STREAM: u32 = u32::MAX;

/// A place in device memory: address, length, identity. It never moves.
///
/// What a replay touches comes first.
#[repr(C)]
pub(crate) struct Storage<D: Device> {
    word: Word,
    /// The number of the stream it was allocated for; `NO_STREAM` for memory that was not.
    stream_id: u32,
    /// It has one generation only: its handles cannot go stale.
    eternal: bool,
    /// It lies outside of the tree's pool now, and is no node's any more.
    moved: AtomicBool,
    source: Source<D>,
    home: OnceLock<Home>,
    /// Where it lies. Written once more at most, when it [moves out](Storage::move_out).
    ptr: AtomicU64,
    bytes: u64,
    id: StorageId,
    /// Length of the block it has, or had, in the pool; `bytes` where it never had one.
    extent: u64,
    made_at: &'static Location<'static>,
    /// Held while the host enqueues a write by its address, and while it moves or a run ends its generation: so the write comes before or after.
    place: Mutex<()>,
    custody: Mutex<Custody<D>>,
}

impl<D: Device> Storage<D> {
    /// A storage that owns `block`, with one owner to come (the tensor that wraps it). `eternal` unless its pool is a tree's.
    pub(crate) fn owning(
        id: StorageId,
        block: Allocation,
        bytes: u64,
        source: Memory<D>,
        birth: Birth<D>,
        eternal: bool,
    ) -> Arc<Self> {
        Arc::new(Storage {
            id,
            ptr: AtomicU64::new(block.address()),
            bytes,
            extent: block.bytes(),
            stream_id: birth.stream_id,
            word: Word::new(true, 1),
            eternal,
            made_at: birth.at,
            home: OnceLock::new(),
            moved: AtomicBool::new(false),
            place: Mutex::new(()),
            custody: Mutex::new(Custody {
                block: Some(block),
                stream: Some(birth.stream),
                born: birth.capture,
                uses: Uses::new(),
                rare: None,
            }),
            source: Source::Pool(source),
        })
    }

    /// A storage that owns no block: imported memory, or a place in a pool that is to be adopted.
    pub(crate) fn unowned(
        id: StorageId,
        ptr: DevicePtr,
        bytes: u64,
        source: Source<D>,
        made_at: &'static Location<'static>,
    ) -> Arc<Self> {
        Arc::new(Storage {
            id,
            ptr: AtomicU64::new(ptr.0),
            bytes,
            extent: bytes,
            stream_id: NO_STREAM,
            word: Word::new(false, 1),
            eternal: true,
            made_at,
            home: OnceLock::new(),
            moved: AtomicBool::new(false),
            place: Mutex::new(()),
            custody: Mutex::new(Custody {
                block: None,
                stream: None,
                born: 0,
                uses: Uses::new(),
                rare: None,
            }),
            source,
        })
    }

    /// The addresses that its block takes in the pool.
    pub(crate) fn range(&self) -> Range<u64> {
        let start = self.ptr().0;
        start..start + self.extent
    }

    pub(crate) fn is_eternal(&self) -> bool {
        self.eternal || self.moved.load(Ordering::Acquire)
    }

    /// Whether it has moved out of its tree's pool.
    pub(crate) fn has_moved(&self) -> bool {
        self.moved.load(Ordering::Acquire)
    }

    /// Whether its handles may know it by its address.
    pub(crate) fn never_moves(&self) -> bool {
        self.eternal
    }

    pub(crate) fn id(&self) -> StorageId {
        self.id
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        DevicePtr(self.ptr.load(Ordering::Acquire))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it was allocated.
    pub(crate) fn made_at(&self) -> &'static Location<'static> {
        self.made_at
    }

    pub(crate) fn stamp(&self) -> u64 {
        self.word.stamp()
    }

    pub(crate) fn owners(&self) -> u64 {
        self.word.owners()
    }

    pub(crate) fn home(&self) -> Option<&Home> {
        self.home
            .get()
            .filter(|_| !self.moved.load(Ordering::Acquire))
    }

    /// Whether it lies in this pool.
    pub(crate) fn in_pool(&self, pool: &PoolHandle<D>) -> bool {
        !self.moved.load(Ordering::Acquire) && self.memory().is_some_and(|m| m.in_pool(pool))
    }

    /// The pool it was made in, if it was in one.
    pub(crate) fn memory(&self) -> Option<&Memory<D>> {
        match &self.source {
            Source::Pool(memory) => Some(memory),
            Source::Imported { .. } => None,
        }
    }

    /// The device it lies on.
    pub(crate) fn device(&self) -> &D {
        match &self.source {
            Source::Pool(memory) => memory.device(),
            Source::Imported { device, .. } => device,
        }
    }

    /// Makes it an output of a node. A storage is an output of one node at most; its bit is set if it is held.
    pub(crate) fn settle(&self, home: Home) {
        if self.home.set(home).is_ok()
            && let Some(home) = self.home.get()
        {
            home.live.set(home.bit);
            // It may have died between the caller's look and the set: then nobody else clears the bit. Its death looks for a home after it has changed
            // the word; so either it finds this one, or the owners are gone here.
            if self.word.owners_in_order() == 0 {
                home.live.clear(home.bit);
            }
        }
    }

    /// One more owner, if the handle's stamp is the storage's.
    fn retain(&self, stamp: u64) {
        self.word.retain(stamp);
    }

    /// One more owner, if it has any in the generation `stamp`. Whether it had.
    pub(crate) fn retain_if_held(&self, stamp: u64) -> bool {
        self.word.retain_if_held(stamp)
    }

    /// One owner less, if the handle's stamp is the storage's. The last one is the storage's death.
    fn release(&self, stamp: u64) {
        match self.word.release(stamp) {
            Release::Other => {}
            Release::Last { owning, watched } => {
                // First the block and its mark, then the bit: who sees the bit clear comes after both.
                if owning || watched {
                    self.give_back(watched);
                }
                if let Some(home) = self.home() {
                    home.live.clear(home.bit);
                }
                self.word.settle_dead();
            }
        }
    }

    /// Frees the block it owns, if any, and tells whoever watches.
    fn give_back(&self, watched: bool) {
        let (block, stream, born, uses, watchers, _refuge) = {
            let mut custody = lock(&self.custody);
            let (mut watchers, mut refuge) = (Vec::new(), None);
            if let Some(rare) = &mut custody.rare {
                if watched {
                    watchers = std::mem::take(&mut rare.watchers);
                }
                refuge = rare.refuge.take();
            }
            (
                custody.block.take(),
                custody.stream.clone(),
                custody.born,
                std::mem::take(&mut custody.uses),
                watchers,
                refuge,
            )
        };
        for watcher in watchers {
            if let Some(flag) = watcher.upgrade() {
                raise(&flag);
            }
        }
        if let (Some(block), Source::Pool(memory)) = (block, &self.source) {
            memory.free(block, stream.as_ref(), born, uses);
        }
    }

    /// Hands the storage out anew: a next generation with `owners` handles, owning no block.
    ///
    /// The caller has seen to it that nobody holds the last generation, and sets the node's bits once all its storages are handed out.
    #[inline]
    pub(crate) fn hand_out(&self, owners: u64) {
        self.word.hand_out(owners);
    }

    /// Ends its generation: handles on it are stale from here on, and its block, if it owns one, is free.
    pub(crate) fn invalidate(&self, by: &Arc<str>, at: &'static Location<'static>) {
        {
            let mut custody = lock(&self.custody);
            let taken = &mut custody.rare().taken;
            taken.rotate_right(1);
            taken[0] = Some((self.word.stamp(), by.clone(), at));
        }
        if let Some((owning, watched)) = self.word.invalidate() {
            if let Some(home) = self.home() {
                home.live.clear(home.bit);
            }
            if owning || watched {
                self.give_back(watched);
            }
        }
    }

    /// Takes it from exactly `owners` owners, so that nobody comes to hold it in between. What [`put_back`](Storage::put_back) or
    /// [`end`](Storage::end) wants, one of which must follow; `None` if others hold it too.
    pub(crate) fn take(&self, owners: u64) -> Option<u64> {
        self.word.take(owners)
    }

    /// Gives back what was taken, as if nothing had been.
    pub(crate) fn put_back(&self, taken: u64) {
        self.word.put_back(taken);
    }

    /// Ends what was taken: the storage is dead, and its last handles touch nothing.
    pub(crate) fn end(&self, taken: u64) {
        let (owning, watched) = Word::flags(taken);
        if owning || watched {
            self.give_back(watched);
        }
        if let Some(home) = self.home() {
            home.live.clear(home.bit);
        }
        self.word.end(taken);
    }

    /// Waits while another thread clears up after its last owner.
    pub(crate) fn settled(&self) {
        self.word.settled();
    }

    /// The block it owns now.
    pub(crate) fn block(&self) -> Option<Allocation> {
        lock(&self.custody).block
    }

    /// Makes it the owner of `block`; returns what it owned. For a storage that is held: after a restore, or a rollback.
    pub(crate) fn adopt(&self, block: Allocation, stream: D::Stream) -> Option<Allocation> {
        let old = {
            let mut custody = lock(&self.custody);
            custody.stream = Some(stream);
            custody.born = 0;
            custody.block.replace(block)
        };
        if !self.word.set_owning() {
            // It died meanwhile: the death saw no block, so the block goes back here.
            self.give_back(false);
        }
        old
    }

    /// Takes its block from it, while it is held: for one that is to be overwritten by the call that reads it.
    pub(crate) fn disown(&self) -> Option<Allocation> {
        lock(&self.custody).block.take()
    }

    /// Keeps it where it lies, in the generation it is in, until the guard is dropped.
    pub(crate) fn stay(&self) -> MutexGuard<'_, ()> {
        lock(&self.place)
    }

    /// Moves its bytes' identity out of the tree: from here on it lies in `refuge`, where its bytes were copied, with all its handles; its generation does not end.
    /// Whoever had it as an output has another storage in its place (see [`replacement`](Storage::replacement)). The block it owned, if any.
    pub(crate) fn move_out(&self, refuge: Tensor<D>, copied: Arc<Copied<D>>) -> Option<Allocation> {
        let home = self.home.get();
        let block = {
            let mut custody = lock(&self.custody);
            self.ptr.store(refuge.address().0, Ordering::Release);
            custody.stream = Some(copied.0.clone());
            let rare = custody.rare();
            (rare.refuge, rare.copied) = (Some(refuge), Some(copied));
            (custody.born, custody.uses) = (0, Uses::new());
            custody.block.take()
        };
        // A death that is underway is done before the word can be set, and one that begins later sees this.
        self.moved.store(true, Ordering::Release);
        if !self.word.set_owning() {
            self.give_back(false);
        }
        if let Some(home) = home {
            home.live.clear(home.bit);
        }
        block
    }

    /// Makes a stream wait for the copy that the storage moved out by, if it did: work enqueued there before knows nothing of it. A stream that captures cannot
    /// wait for it.
    pub(crate) fn await_copy(&self, device: &D, stream: &D::Stream) -> Result<(), DeviceError> {
        if self.eternal || !self.moved.load(Ordering::Acquire) {
            return Ok(());
        }
        let rare = |custody: &Custody<D>| custody.rare.as_ref()?.copied.clone();
        let Some(copied) = rare(&lock(&self.custody)) else {
            return Ok(());
        };
        if copied.0 == *stream {
            return Ok(());
        }
        if device.poll_event(&copied.1)? {
            lock(&self.custody).rare().copied = None;
            return Ok(());
        }
        match device.capture_status(stream)? {
            CaptureStatus::None => device.wait(stream, &copied.1),
            _ => Ok(()),
        }
    }

    /// A storage for the same output at the same place, which nobody holds. Before the move.
    pub(crate) fn replacement(&self, id: StorageId) -> Option<Arc<Self>> {
        let (Source::Pool(memory), Some(home)) = (&self.source, self.home.get()) else {
            return None;
        };
        let place = DevicePtr(self.range().start);
        let source = Source::Pool(memory.clone());
        let mut new = Storage::unowned(id, place, self.bytes, source, self.made_at);
        let storage = Arc::get_mut(&mut new)?;
        (storage.extent, storage.eternal, storage.word) = (self.extent, false, Word::new(false, 0));
        storage.stream_id = self.stream_id;
        storage.home = OnceLock::from(Home {
            function: home.function.clone(),
            output: home.output,
            live: home.live.clone(),
            bit: home.bit,
        });
        Some(new)
    }

    /// Brings back a storage that died inside a capture which is now undone: one owner, the same generation.
    /// Returns the stamp of the handle to make, or `None` if it is held after all.
    pub(crate) fn resurrect(&self) -> Option<u64> {
        let stamp = self.word.resurrect()?;
        if let Some(home) = self.home() {
            home.live.set(home.bit);
        }
        Some(stamp)
    }

    /// From now on its death is ordered on `stream`, as that of any eager storage. The block it owns now.
    pub(crate) fn hand_over(&self, stream: &D::Stream) -> Option<Allocation> {
        let mut custody = lock(&self.custody);
        custody.born = 0;
        if custody.stream.as_ref() != Some(stream) {
            custody.stream = Some(stream.clone());
        }
        custody.block
    }

    /// If its death was ordered on one stream, it is on another from now on.
    pub(crate) fn dies_on(&self, from: &D::Stream, to: &D::Stream) {
        let mut custody = lock(&self.custody);
        if custody.stream.as_ref() == Some(from) {
            custody.stream = Some(to.clone());
        }
    }

    /// Its death is not told to the device: a graph that was launched before has written over it, and its memory is somebody else's by then; or it is
    /// in use on several streams.
    pub(crate) fn hush(&self) {
        if self.word.owning() {
            lock(&self.custody).stream = None;
        }
    }

    /// Notes that work on a stream uses it from now on. Before its memory is used again, that work is waited for.
    pub(crate) fn use_on(&self, stream: &D::Stream) {
        let Source::Pool(memory) = &self.source else {
            return;
        };
        let custody = lock(&self.custody);
        if let Some(refuge) = custody.rare.as_ref().and_then(|rare| rare.refuge.as_ref()) {
            // The memory it has now is the refuge's to give back.
            let _current = refuge.record_stream(stream);
            return;
        }
        drop(custody);
        let noted = memory.note_use(stream);
        let mut custody = lock(&self.custody);
        custody.uses.retain(|used| !used.is_of(&noted));
        custody.uses.push(noted);
        drop(custody);
        // Its death has no place in the order of one stream.
        if !self.eternal {
            self.hush();
        }
    }

    /// Whether a run on the stream of this number, of a tree with this pool, may have to be noted: it is memory outside of trees for another stream, or another
    /// tree's.
    #[inline]
    pub(crate) fn is_elsewhere(&self, stream_id: u32, pool: &PoolHandle<D>) -> bool {
        if self.is_eternal() {
            self.stream_id != stream_id && self.stream_id != NO_STREAM
        } else {
            !self.in_pool(pool)
        }
    }

    /// Notes that a run on a stream uses it, where it is of memory outside of trees, and its own stream is another: it may be dropped as soon as the run has returned.
    pub(crate) fn used_by_run(&self, stream: &D::Stream) {
        let elsewhere = || {
            let custody = lock(&self.custody);
            custody.stream.as_ref().is_some_and(|own| own != stream)
        };
        if self.is_eternal() && elsewhere() {
            self.use_on(stream);
        }
    }

    /// The same of what may be an output of a tree: that tree's next run waits for the stream. Not so for `own`, whose pool the run's tree has: that orders its runs itself.
    pub(crate) fn used_by(&self, stream: &D::Stream, own: Option<&PoolHandle<D>>) {
        if self.is_eternal() {
            self.used_by_run(stream);
        } else if own.is_none_or(|pool| !self.in_pool(pool)) {
            self.use_on(stream);
        }
    }

    /// Raises `flag` when the storage dies.
    pub(crate) fn watch(&self, flag: &Arc<AtomicBool>) {
        let mut custody = lock(&self.custody);
        // A tree watches it once, however often it is recorded with it; functions come and go.
        let watchers = &mut custody.rare().watchers;
        watchers.retain(|w| w.strong_count() > 0);
        if !watchers.iter().any(|w| w.as_ptr() == Arc::as_ptr(flag)) {
            watchers.push(Arc::downgrade(flag));
        }
        drop(custody);
        if !self.word.set_watched() {
            raise(flag);
        }
    }

    /// The error for a handle of the older generation `stamp`. Who ended it is known of the last few.
    fn stale(&self, stamp: u64, made_at: &'static Location<'static>) -> Stale {
        let custody = lock(&self.custody);
        let mut taken = custody
            .rare
            .iter()
            .flat_map(|rare| rare.taken.iter().flatten());
        let (taken_by, taken_at) = match taken.find(|(ended, ..)| *ended == stamp) {
            Some((_, by, at)) => (Some(by.clone()), Some(*at)),
            None => (None, None),
        };
        drop(custody);
        let made = match self.home() {
            Some(home) => Made::Output {
                function: home.function.clone(),
                output: home.output,
            },
            None => Made::Inside,
        };
        Stale {
            made,
            made_at,
            taken_by,
            taken_at,
        }
    }
}

impl<D: Device> Drop for Storage<D> {
    fn drop(&mut self) {
        // Only a storage whose owners saturated still has a block here.
        self.give_back(true);
    }
}

impl<D: Device> fmt::Debug for Storage<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("id", &self.id)
            .field("bytes", &self.bytes)
            .field("stamp", &self.word.stamp())
            .field("owners", &self.word.owners())
            .finish_non_exhaustive()
    }
}
