//! A device's memory: the default pool, private pools, and who allocates from which.
//!
//! One [`Allocator`] serves one device. Everything that touches a pool goes through its one lock, held for the time of one pool
//! operation; pools, storages and graphs hold the shared part alive. Marks (see [`Device::mark`]) are enqueued under the
//! same lock, so that the device sees them in the order of the books.

mod backing;
mod bodies;
mod captures;
mod pinned;
mod pools;
mod routes;
mod uses;

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slotmap::SlotMap;

use crate::device::{CaptureStatus, Device, DevicePtr, Mark};
use crate::error::{Error, Result};
use crate::pool::{
    Allocation, Backing, Freed, Pool, PoolConfig, PoolError, PoolSnapshot, PoolStats, StreamId,
    Tag, Trimmed,
};
use crate::storage::{Birth, Source, Storage, StorageId, Tensor};
use crate::sync::{AtomicU64, Mutex, MutexGuard, lock};
use backing::PoolBacking;
use bodies::BodyStream;
use captures::{Made, Underway};
use routes::Routes;
use uses::Deferred;

pub(crate) use bodies::{predicate_of, refuse_escaped};
pub(crate) use captures::Baked;
pub(crate) use uses::{Elsewhere, Use, Uses};

pub use pinned::{PinnedBuffer, PinnedConfig, PinnedStats};
pub(crate) use pools::Claim;
pub use pools::{PoolCheckpoint, PoolHandle, PoolId, PoolOptions, PoolRestored};
pub use routes::RouteGuard;

slotmap::new_key_type! {
    /// A pool's key in the books.
    pub(crate) struct PoolKey;
}

/// A device's default pool and its private pools. Clones are the same allocator.
///
/// It ends when the last of its clones, pools, graphs and tensors is dropped. Then the device's work is waited for, in a way that
/// breaks no capture ([`Device::quiesce`]), and the memory is given back.
pub struct Allocator<D: Device> {
    shared: Arc<Shared<D>>,
}

/// What the allocator's handles share.
pub(crate) struct Shared<D: Device> {
    device: D,
    books: Mutex<Books<D>>,
    storages: AtomicU64,
    /// Page-locked memory of the host, with locks of its own.
    pinned: pinned::Cache<D>,
}

/// All that the lock guards.
struct Books<D: Device> {
    pools: SlotMap<PoolKey, Entry<D>>,
    default: PoolKey,
    routes: Routes<D>,
    captures: Vec<Underway<D>>,
    /// Bodies of ifs that are open.
    bodies: Vec<BodyStream<D>>,
    /// Room for what the next capture makes.
    spare_made: Made,
    /// Dead blocks that are in use on other streams.
    deferred: Vec<Deferred<D>>,
    /// Events of theirs, to be used again.
    spare: Vec<D::Event>,
    next_pool: u32,
    /// The serial of the next capture; none has 0.
    next_capture: u64,
    /// Pools that nobody can reach any more: their backings may be the caller's, and are dropped when the lock is free.
    gone: Vec<Entry<D>>,
}

/// The books, locked. What goes meanwhile is dropped after the lock: the fields are dropped in this order.
struct Held<'a, D: Device> {
    books: MutexGuard<'a, Books<D>>,
    gone: Option<Vec<Entry<D>>>,
}

impl<D: Device> Drop for Held<'_, D> {
    fn drop(&mut self) {
        if !self.books.gone.is_empty() {
            self.gone = Some(std::mem::take(&mut self.books.gone));
        }
    }
}

impl<D: Device> Deref for Held<'_, D> {
    type Target = Books<D>;

    fn deref(&self) -> &Books<D> {
        &self.books
    }
}

impl<D: Device> DerefMut for Held<'_, D> {
    fn deref_mut(&mut self) -> &mut Books<D> {
        &mut self.books
    }
}

/// One pool of the books.
struct Entry<D: Device> {
    id: PoolId,
    pool: Pool<PoolBacking<D>>,
    /// Graphs, handles and captures that use it. At zero, `trim` may take its free segments.
    uses: usize,
    /// Of a tree's pool, the streams that its next run waits for. Its memory goes from generation to generation, and so handles on it can go stale.
    elsewhere: Option<Arc<Elsewhere<D>>>,
}

/// A storage's way back to its pool.
pub(crate) struct Memory<D: Device> {
    shared: Arc<Shared<D>>,
    pool: PoolKey,
}

impl<D: Device> Clone for Memory<D> {
    fn clone(&self) -> Self {
        Memory {
            shared: self.shared.clone(),
            pool: self.pool,
        }
    }
}

impl<D: Device> Memory<D> {
    pub(crate) fn device(&self) -> &D {
        &self.shared.device
    }

    pub(crate) fn in_pool(&self, pool: &PoolHandle<D>) -> bool {
        Arc::ptr_eq(&self.shared, &pool.shared) && self.pool == pool.key
    }

    /// Frees a block, in order on `stream` and after its other uses.
    pub(crate) fn free(
        &self,
        block: Allocation,
        stream: Option<&D::Stream>,
        born: u64,
        uses: Uses<D>,
    ) {
        let (mut books, device) = (self.shared.books(), &self.shared.device);
        if uses.is_empty() {
            books.free(device, self.pool, block, stream, born);
        } else {
            books.free_used(device, (self.pool, block), stream, born, uses);
        }
    }

    /// Notes that a storage here is used on a stream from now on.
    pub(crate) fn note_use(&self, stream: &D::Stream) -> Use<D> {
        self.shared
            .books()
            .note_use(&self.shared.device, self.pool, stream)
    }
}

impl<D: Device> Books<D> {
    fn free(
        &mut self,
        device: &D,
        pool: PoolKey,
        block: Allocation,
        stream: Option<&D::Stream>,
        born: u64,
    ) {
        let capture = stream
            .and_then(|stream| self.capture_of(device, stream))
            .map(|at| self.captures[at].serial);
        let Some(entry) = self.pools.get_mut(pool) else {
            return;
        };
        // An orphan's free is a no-op: its memory belongs to the restored state.
        let freed = entry.pool.free(block);
        #[cfg(loom)]
        assert!(freed.is_ok(), "a block is freed once: {freed:?}");
        if let Ok(Freed::Block { .. }) = freed
            && let Some(stream) = stream
        {
            // A capture kills only what was born in it: what came from outside lives on until a run takes its place. And what was born in
            // a capture belongs to its graph, which may be launched on any stream: only a tree, which orders its runs, says when that dies.
            if capture.unwrap_or(0) == born {
                device.mark(
                    stream,
                    DevicePtr(block.address()),
                    block.bytes(),
                    Mark::Dead,
                );
            }
        }
        if entry.uses == 0 {
            self.forget_if_empty(pool);
        }
    }

    /// One use of a pool less.
    fn let_go(&mut self, pool: PoolKey) {
        let entry = &mut self.pools[pool];
        entry.uses -= 1;
        if entry.uses == 0 {
            self.forget_if_empty(pool);
        }
    }

    /// Drops the record of a pool that nobody can reach any more.
    fn forget_if_empty(&mut self, key: PoolKey) {
        if key != self.default
            && self
                .pools
                .get(key)
                .is_some_and(|e| e.uses == 0 && e.pool.stats().segments.current == 0)
        {
            self.gone.extend(self.pools.remove(key));
        }
    }

    /// Gives free segments of the default pool, of trees' pools and of pools without a user back to the device, which is idle.
    fn trim(&mut self) -> Result<Trimmed, PoolError> {
        let mut all = Trimmed::default();
        let keys: Vec<PoolKey> = self.pools.keys().collect();
        for key in keys {
            let entry = &mut self.pools[key];
            // A tree says by pins what its graphs have the addresses of.
            if key == self.default || entry.uses == 0 || entry.elsewhere.is_some() {
                let trimmed = entry.pool.trim()?;
                all.segments += trimmed.segments;
                all.bytes += trimmed.bytes;
                self.forget_if_empty(key);
            }
        }
        Ok(all)
    }
}

impl<D: Device> Shared<D> {
    fn books(&self) -> Held<'_, D> {
        Held {
            books: lock(&self.books),
            gone: None,
        }
    }

    pub(crate) fn next_storage(&self) -> StorageId {
        StorageId(self.storages.fetch_add(1, Ordering::Relaxed))
    }

    /// Refuses a stream of another device: its number would be taken for one of ours.
    fn refuse_stream(&self, stream: &D::Stream) -> Result<()> {
        if self.device.owns(stream) {
            Ok(())
        } else {
            Err(Error::ForeignStream)
        }
    }

    /// Allocates once more where the device is out of memory: after what is dead and still in use on other streams, whose work is waited for; then after a
    /// trim, for which all work is.
    #[cold]
    fn alloc_after_waiting(
        &self,
        books: &mut Books<D>,
        pool: PoolKey,
        stream: StreamId,
        bytes: u64,
        tag: Tag,
    ) -> Result<Allocation> {
        if books.wait_for_deferred(&self.device)?
            && let Ok(block) = books.pools[pool].pool.alloc(stream, bytes, tag)
        {
            return Ok(block);
        }
        // Not the device's own wait, which breaks captures that were begun past this allocator.
        self.device.quiesce()?;
        books.free_deferred(&self.device);
        books.trim()?;
        Ok(books.pools[pool].pool.alloc(stream, bytes, tag)?)
    }

    /// Allocates from a pool, or from the one that the routes name (looked up under the same lock, so that it is there still);
    /// where the device is out of memory and nothing captures, once more after that was waited for.
    fn alloc_storage(
        self: &Arc<Self>,
        from: Origin,
        stream: &D::Stream,
        bytes: u64,
        at: &'static Location<'static>,
    ) -> Result<Arc<Storage<D>>> {
        let storage = self.next_storage();
        let tag = Tag(storage.0);
        self.refuse_stream(stream)?;
        let mut books = self.books();
        books.free_deferred(&self.device);
        let own_id = self.device.stream_id(stream);
        let capture = books.capture_of(&self.device, stream);
        let (id, in_body) = (
            books.stands_for(own_id),
            books.born_in_body(own_id, capture),
        );
        let (pool, route) = match from {
            Origin::Pool(pool) => (pool, None),
            Origin::Route(pool, serial) => (pool, Some(serial)),
            Origin::Any => {
                let origin = capture.map_or(id, |at| books.captures[at].id);
                match books.routes.pool_for(id, origin) {
                    Some((pool, serial)) => (pool, Some(serial)),
                    None => (books.default, None),
                }
            }
        };
        let first = books.pools[pool].pool.alloc(StreamId(id), bytes, tag);
        let block = match first {
            Err(PoolError::OutOfMemory { .. })
                if books.captures.is_empty()
                    && matches!(self.device.capture_status(stream), Ok(CaptureStatus::None)) =>
            {
                self.alloc_after_waiting(&mut books, pool, StreamId(id), bytes, tag)?
            }
            other => other.map_err(in_capture)?,
        };
        let mut born = 0;
        let Books {
            pools,
            default,
            captures,
            ..
        } = &mut *books;
        if let Some(capture) = capture.map(|at| &mut captures[at]) {
            born = capture.serial;
            capture.made.push((pool, block));
            if pool != *default && !capture.pools.contains(&pool) {
                capture.pools.push(pool);
                pools[pool].uses += 1;
            }
        }
        self.device.mark(
            stream,
            DevicePtr(block.address()),
            block.bytes(),
            Mark::Live,
        );
        let eternal = pools[pool].elsewhere.is_none();
        let memory = Memory {
            shared: self.clone(),
            pool,
        };
        let birth = Birth {
            stream: stream.clone(),
            stream_id: own_id,
            capture: born,
            at,
        };
        let storage = Storage::owning(storage, block, bytes, memory, birth, eternal);
        if let Some(serial) = route {
            books.routes.note(serial, &storage);
        }
        if let Some(at) = in_body {
            books.bodies[at].note(&storage);
        }
        Ok(storage)
    }
}

/// Says of an allocation there is no memory for that no more was tried, because of a capture.
fn in_capture(mut error: PoolError) -> PoolError {
    if let PoolError::OutOfMemory { state, .. } = &mut error {
        state.push_str("; a capture is underway, so nothing was waited for or given back: allocate or trim before it");
    }
    error
}

/// Where an allocation comes from.
#[derive(Clone, Copy)]
pub(crate) enum Origin {
    /// A pool.
    Pool(PoolKey),
    /// The pool of a route, and the route's serial.
    Route(PoolKey, u64),
    /// What the routes say; else the default pool.
    Any,
}

impl<D: Device> Drop for Shared<D> {
    fn drop(&mut self) {
        let books = self
            .books
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let holds = |e: &Entry<D>| e.pool.stats().segments.current > 0;
        // The pools give everything back now, and work in flight may still touch it. Captures that are underway now are others': a capture of this
        // allocator, a graph, a tensor, each holds the allocator, and with it every address that a capture has baked in. So they need
        // not be waited for, and must not be broken.
        if (books.pools.values().any(holds) || self.pinned.is_waiting(&self.device))
            && let Err(error) = self.device.quiesce()
        {
            tracing::warn!(%error, "the device could not be waited for before an allocator's memory is given back");
        }
    }
}

impl<D: Device> Allocator<D> {
    /// An allocator over a device, with the default configuration for its default pool.
    ///
    /// # Errors
    /// The device's, where it has no memory to manage.
    pub fn new(device: D) -> Result<Self> {
        Self::with_config(device, PoolConfig::default())
    }

    /// The same with a configuration of the default pool.
    ///
    /// # Errors
    /// [`PoolError::InvalidConfig`] names the field.
    pub fn with_config(device: D, config: PoolConfig) -> Result<Self> {
        let mut pools = SlotMap::with_key();
        let pool = Pool::new(config, PoolBacking::device(device.clone()))?;
        let default = pools.insert(Entry {
            id: PoolId::DEFAULT,
            pool,
            uses: 1,
            elsewhere: None,
        });
        let books = Books {
            pools,
            default,
            routes: Routes::default(),
            captures: Vec::new(),
            bodies: Vec::new(),
            spare_made: Made::new(),
            deferred: Vec::new(),
            spare: Vec::new(),
            next_pool: 1,
            next_capture: 1,
            gone: Vec::new(),
        };
        Ok(Allocator {
            shared: Arc::new(Shared {
                device,
                books: Mutex::new(books),
                storages: AtomicU64::new(1),
                pinned: pinned::Cache::default(),
            }),
        })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.shared.device
    }

    /// Allocates `bytes` for use on `stream`, from the pool that this thread or stream is routed to, else from the default pool.
    /// The bytes are undefined. Zero bytes give the empty tensor.
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`] carries the size and the pool's state; [`Error::ForeignStream`]. The pool is as it was.
    #[track_caller]
    pub fn alloc(&self, stream: &D::Stream, bytes: u64) -> Result<Tensor<D>> {
        alloc_in(&self.shared, Origin::Any, stream, bytes, Location::caller())
    }

    /// A tensor over memory of the caller's own, which this allocator's device can reach; `keeper` is dropped when the last handle is gone, and never while a
    /// lock of this crate is held: it may call allocator and tree.
    #[track_caller]
    pub fn import(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        keeper: impl std::any::Any + Send + Sync,
    ) -> Tensor<D> {
        let id = self.shared.next_storage();
        let source = Source::Imported {
            device: self.shared.device.clone(),
            _keeper: Box::new(keeper),
        };
        Tensor::first(Storage::unowned(id, ptr, bytes, source, Location::caller()))
    }

    /// A new private pool; the handle is its first use.
    ///
    /// # Errors
    /// [`PoolError::InvalidConfig`] names the field.
    pub fn create_pool(&self, options: PoolOptions) -> Result<PoolHandle<D>> {
        self.new_pool(options, false)
    }

    /// A new private pool; `generations` for a tree's.
    pub(crate) fn new_pool(
        &self,
        options: PoolOptions,
        generations: bool,
    ) -> Result<PoolHandle<D>> {
        let backing = match options.backing {
            Some(custom) => PoolBacking::custom(custom),
            None => PoolBacking::device(self.shared.device.clone()),
        };
        let pool = Pool::new(options.config, backing)?;
        let mut books = self.shared.books();
        let id = PoolId(books.next_pool);
        books.next_pool += 1;
        let key = books.pools.insert(Entry {
            id,
            pool,
            uses: 1,
            elsewhere: generations.then(Elsewhere::new),
        });
        Ok(PoolHandle {
            shared: self.shared.clone(),
            key,
            id,
        })
    }

    pub(crate) fn next_storage(&self) -> StorageId {
        self.shared.next_storage()
    }

    /// A handle on the default pool, for runs outside of a tree's.
    pub(crate) fn default_pool(&self) -> PoolHandle<D> {
        let mut books = self.shared.books();
        let key = books.default;
        books.pools[key].uses += 1;
        PoolHandle {
            shared: self.shared.clone(),
            key,
            id: PoolId::DEFAULT,
        }
    }

    /// One more handle on a private pool that is in use.
    ///
    /// # Errors
    /// [`Error::UnknownPool`], also for the default pool: it is trimmed whoever uses it, so no graph may capture into it; [`Error::PoolReleased`] where its last user is gone.
    pub fn pool(&self, id: PoolId) -> Result<PoolHandle<D>> {
        let mut books = self.shared.books();
        let (key, entry) = books
            .pools
            .iter_mut()
            .find(|(_, e)| e.id == id && id != PoolId::DEFAULT)
            .ok_or(Error::UnknownPool(id))?;
        if entry.uses == 0 {
            return Err(Error::PoolReleased(id));
        }
        entry.uses += 1;
        Ok(PoolHandle {
            shared: self.shared.clone(),
            key,
            id,
        })
    }

    /// Gives memory back to the device: wholly free segments of the default pool, those of a tree's pool that no recording of it needs, and those of
    /// private pools whose last graph and handle are gone. Waits for the device's work, but for what captures hold, and breaks none ([`Device::quiesce`]). Memory
    /// that a living private pool has is its own, used or not.
    ///
    /// # Errors
    /// [`Error::CaptureUnderway`], with nothing done, while a graph or a tree of this allocator captures: the capture may have the addresses of what is free.
    pub fn trim(&self) -> Result<Trimmed> {
        let mut books = self.shared.books();
        if !books.captures.is_empty() {
            return Err(Error::CaptureUnderway {
                captures: books.captures.len(),
            });
        }
        self.shared.device.quiesce()?;
        books.free_deferred(&self.shared.device);
        Ok(books.trim()?)
    }

    /// The default pool's statistics.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let books = self.shared.books();
        books.pools[books.default].pool.stats()
    }

    /// The default pool's blocks.
    #[must_use]
    pub fn snapshot(&self) -> PoolSnapshot {
        let books = self.shared.books();
        books.pools[books.default].pool.snapshot()
    }

    /// The private pools that still exist: id, users, statistics.
    #[must_use]
    pub fn private_pools(&self) -> Vec<(PoolId, usize, PoolStats)> {
        let books = self.shared.books();
        let mut all: Vec<_> = books
            .pools
            .iter()
            .filter(|(k, _)| *k != books.default)
            .map(|(_, e)| (e.id, e.uses, e.pool.stats()))
            .collect();
        all.sort_by_key(|(id, ..)| *id);
        all
    }

    /// Routes this thread's allocations to `pool` until the guard is dropped. Guards nest: the innermost wins.
    ///
    /// # Errors
    /// [`Error::ForeignPool`].
    pub fn route_thread(&self, pool: &PoolHandle<D>) -> Result<RouteGuard<D>> {
        self.own(pool)?;
        Ok(RouteGuard::thread(&self.shared, pool))
    }

    /// Routes allocations for `stream`, from whatever thread, to `pool` until the guard is dropped.
    ///
    /// # Errors
    /// [`Error::ForeignPool`]; [`Error::ForeignStream`].
    pub fn route_stream(&self, stream: &D::Stream, pool: &PoolHandle<D>) -> Result<RouteGuard<D>> {
        self.own(pool)?;
        self.shared.refuse_stream(stream)?;
        Ok(RouteGuard::stream(
            &self.shared,
            self.shared.device.stream_id(stream),
            pool,
        ))
    }

    /// Refuses a stream of another device.
    pub(crate) fn own_stream(&self, stream: &D::Stream) -> Result<()> {
        self.shared.refuse_stream(stream)
    }

    /// Routes one call of a function: this thread's allocations, and those for `stream`. What is allocated so is given back at the route's [end](RouteGuard::end).
    pub(crate) fn route_call(&self, stream: &D::Stream, pool: &PoolHandle<D>) -> RouteGuard<D> {
        let mut books = self.shared.books();
        books.route_call(&self.shared, stream, pool, Vec::new())
    }

    /// Whether a tensor is of this allocator's device: its own, or another allocator's of the same device.
    #[inline]
    pub(crate) fn reaches(&self, tensor: &Tensor<D>) -> bool {
        let own = |memory: &Memory<D>| Arc::ptr_eq(&self.shared, &memory.shared);
        tensor.storage().is_none_or(|storage| {
            storage.memory().is_some_and(own) || storage.device().is_same(self.device())
        })
    }

    pub(crate) fn own(&self, pool: &PoolHandle<D>) -> Result<()> {
        if Arc::ptr_eq(&self.shared, &pool.shared) {
            Ok(())
        } else {
            Err(Error::ForeignPool)
        }
    }
}

/// Refuses a tensor of another device; of another allocator of the same one it may be.
#[inline]
pub(crate) fn refuse_tensor<D: Device>(
    device: &D,
    tensor: &Tensor<D>,
    what: impl FnOnce() -> String,
) -> Result<()> {
    match tensor.storage() {
        Some(storage) if !storage.device().is_same(device) => foreign(what),
        _ => Ok(()),
    }
}

#[cold]
fn foreign(what: impl FnOnce() -> String) -> Result<()> {
    Err(Error::ForeignTensor { what: what() })
}

/// Allocates a tensor from a pool, or from the one that the routes name.
pub(crate) fn alloc_in<D: Device>(
    shared: &Arc<Shared<D>>,
    from: Origin,
    stream: &D::Stream,
    bytes: u64,
    at: &'static Location<'static>,
) -> Result<Tensor<D>> {
    if bytes == 0 {
        return Ok(Tensor::empty().remade_at(at));
    }
    let storage = shared.alloc_storage(from, stream, bytes, at)?;
    Ok(Tensor::first(storage))
}

impl<D: Device> Clone for Allocator<D> {
    fn clone(&self) -> Self {
        Allocator {
            shared: self.shared.clone(),
        }
    }
}

impl<D: Device> fmt::Debug for Allocator<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let books = self.shared.books();
        f.debug_struct("Allocator")
            .field("pools", &books.pools.len())
            .field("captures", &books.captures.len())
            .finish_non_exhaustive()
    }
}

/// Gives access to a pool's books for one operation.
fn with_pool<D: Device, T>(
    shared: &Shared<D>,
    key: PoolKey,
    f: impl FnOnce(&mut Pool<PoolBacking<D>>) -> T,
) -> T {
    f(&mut shared.books().pools[key].pool)
}

/// A custom source of a pool's memory, as [`PoolOptions::backing`] takes it.
///
/// Its methods are called while the allocator's lock is held, and a tree's besides where a run allocates: they call neither allocator nor tree, drop
/// none of their handles (tensors, pools, functions), and wait for no thread that may do so. What a backing owns may be such handles: it is dropped without the
/// allocator's lock, so tensors and pools there are fine. Of trees it owns nothing: where a run finds the device out of memory, it may be dropped under that tree's lock.
pub type CustomBacking = Box<dyn Backing + Send>;
