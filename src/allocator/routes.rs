//! Which pool an allocation comes from when nobody names one: by thread or by stream, the innermost route first.

use std::fmt;
use std::sync::Arc;

use crate::device::Device;
use crate::storage::{Storage, Tensor};
use crate::sync::thread::{self, ThreadId};
use crate::sync::{Mutex, lock};

use super::{PoolHandle, PoolId, PoolKey, Shared};

/// The routes in force, oldest first.
pub(super) struct Routes<D: Device> {
    routes: Vec<Route<D>>,
    next: u64,
}

struct Route<D: Device> {
    serial: u64,
    pool: PoolKey,
    filter: Filter,
    /// Where what is allocated by this route is noted.
    born: Option<Born<D>>,
}

/// The storages allocated during one call of a function, in order.
pub(crate) struct Born<D: Device>(Arc<Mutex<Vec<Arc<Storage<D>>>>>);

impl<D: Device> Born<D> {
    pub(crate) fn new() -> Self {
        Born(Arc::new(Mutex::new(Vec::new())))
    }

    pub(crate) fn note(&self, tensor: &Tensor<D>) {
        if let Some(storage) = tensor.storage() {
            lock(&self.0).push(storage.clone());
        }
    }

    /// What was noted so far; nothing is noted any more.
    pub(crate) fn storages(&self) -> Vec<Arc<Storage<D>>> {
        std::mem::take(&mut *lock(&self.0))
    }

    /// Gives it the room of what it had noted, for the next call.
    pub(crate) fn give_room(&self, mut storages: Vec<Arc<Storage<D>>>) {
        storages.clear();
        *lock(&self.0) = storages;
    }

    /// A new one, in the room of one of an earlier call, unless somebody is still about to note something there.
    pub(crate) fn in_room_of(earlier: Option<Self>) -> Self {
        if let Some(mut earlier) = earlier
            && let Some(noted) = Arc::get_mut(&mut earlier.0)
        {
            lock(noted).clear();
            return earlier;
        }
        Born::new()
    }
}

impl<D: Device> Clone for Born<D> {
    fn clone(&self) -> Self {
        Born(self.0.clone())
    }
}

impl<D: Device> Default for Routes<D> {
    fn default() -> Self {
        Routes {
            routes: Vec::new(),
            next: 0,
        }
    }
}

/// Whose allocations a route takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Filter {
    Thread(ThreadId),
    Stream(u32),
    /// One call of a function: its thread, whatever the stream (it may fork), and its stream, whatever the thread.
    Call(ThreadId, u32),
}

impl<D: Device> Routes<D> {
    /// The pool for an allocation of this thread for `stream`, and where to note it. `origin` is the stream whose capture it belongs to, if it
    /// forked off one; else itself.
    pub(super) fn pool_for(&self, stream: u32, origin: u32) -> Option<(PoolKey, Option<Born<D>>)> {
        if self.routes.is_empty() {
            return None;
        }
        let thread = thread::current().id();
        let takes = |r: &&Route<D>| match r.filter {
            Filter::Thread(t) => t == thread,
            Filter::Stream(s) => s == stream || s == origin,
            Filter::Call(t, s) => t == thread || s == stream,
        };
        self.routes
            .iter()
            .rev()
            .find(takes)
            .map(|r| (r.pool, r.born.clone()))
    }
}

impl<D: Device> Routes<D> {
    /// The innermost call of a function that allocates from a pool, by a number that is not 0; 0 where there is none.
    pub(super) fn call_in(&self, pool: PoolKey) -> u64 {
        let call = |r: &&Route<D>| r.pool == pool && matches!(r.filter, Filter::Call(..));
        self.routes.iter().rev().find(call).map_or(0, Route::call)
    }
}

impl<D: Device> Route<D> {
    fn call(&self) -> u64 {
        self.serial + 1
    }
}

/// A route in force; dropping it takes it back. It counts as a use of its pool.
#[must_use = "the route ends when the guard is dropped"]
pub struct RouteGuard<D: Device> {
    shared: Arc<Shared<D>>,
    /// A use of it.
    pool: PoolKey,
    id: PoolId,
    serial: u64,
}

impl<D: Device> RouteGuard<D> {
    pub(super) fn thread(shared: &Arc<Shared<D>>, pool: &PoolHandle<D>) -> Self {
        Self::install(shared, pool, Filter::Thread(thread::current().id()), None)
    }

    pub(super) fn stream(shared: &Arc<Shared<D>>, stream: u32, pool: &PoolHandle<D>) -> Self {
        Self::install(shared, pool, Filter::Stream(stream), None)
    }

    pub(super) fn call(
        shared: &Arc<Shared<D>>,
        stream: u32,
        pool: &PoolHandle<D>,
        born: Born<D>,
    ) -> Self {
        Self::install(
            shared,
            pool,
            Filter::Call(thread::current().id(), stream),
            Some(born),
        )
    }

    fn install(
        shared: &Arc<Shared<D>>,
        pool: &PoolHandle<D>,
        filter: Filter,
        born: Option<Born<D>>,
    ) -> Self {
        let mut books = shared.books();
        books.pools[pool.key].uses += 1;
        let serial = books.routes.next;
        books.routes.next += 1;
        books.routes.routes.push(Route {
            serial,
            pool: pool.key,
            filter,
            born,
        });
        drop(books);
        RouteGuard {
            shared: shared.clone(),
            pool: pool.key,
            id: pool.id,
            serial,
        }
    }
}

impl<D: Device> Drop for RouteGuard<D> {
    fn drop(&mut self) {
        let mut books = self.shared.books();
        let routes = &mut books.routes.routes;
        if let Some(at) = routes.iter().position(|r| r.serial == self.serial) {
            let route = routes.remove(at);
            if matches!(route.filter, Filter::Call(..)) {
                books.closure_returned(&self.shared.device, route.call());
            }
        }
        books.let_go(self.pool);
    }
}

impl<D: Device> fmt::Debug for RouteGuard<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RouteGuard(PoolHandle({}))", self.id)
    }
}
