//! Which pool an allocation comes from when nobody names one: by thread or by stream, the innermost route first.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::storage::{Storage, Tensor};
use crate::sync::thread::ThreadId;
use crate::sync::thread_id;

use super::{Books, Origin, PoolHandle, PoolId, PoolKey, Shared, alloc_in};

/// The routes in force, oldest first.
pub(super) struct Routes<D: Device> {
    routes: Vec<Route<D>>,
    next: u64,
}

struct Route<D: Device> {
    serial: u64,
    pool: PoolKey,
    filter: Filter,
    /// Of a call of a function, what was allocated during it, in order.
    born: Vec<Arc<Storage<D>>>,
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
    /// The pool for an allocation of this thread for `stream`, and the route. `origin` is the stream whose capture it belongs to, if it
    /// forked off one; else itself.
    pub(super) fn pool_for(&self, stream: u32, origin: u32) -> Option<(PoolKey, u64)> {
        if self.routes.is_empty() {
            return None;
        }
        let thread = thread_id();
        let takes = |r: &&Route<D>| match r.filter {
            Filter::Thread(t) => t == thread,
            Filter::Stream(s) => s == stream || s == origin,
            Filter::Call(t, s) => t == thread || s == stream,
        };
        self.routes
            .iter()
            .rev()
            .find(takes)
            .map(|r| (r.pool, r.serial))
    }

    /// Notes what was allocated by a route, if that is a call's.
    pub(super) fn note(&mut self, serial: u64, storage: &Arc<Storage<D>>) {
        let is_it = |r: &&mut Route<D>| r.serial == serial && matches!(r.filter, Filter::Call(..));
        if let Some(route) = self.routes.iter_mut().rev().find(is_it) {
            route.born.push(storage.clone());
        }
    }

    /// What was noted of a route.
    fn born(&self, serial: u64) -> &[Arc<Storage<D>>] {
        let route = self.routes.iter().rev().find(|r| r.serial == serial);
        route.map_or(&[], |route| &route.born)
    }

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
    ended: bool,
}

impl<D: Device> RouteGuard<D> {
    pub(super) fn thread(shared: &Arc<Shared<D>>, pool: &PoolHandle<D>) -> Self {
        let filter = Filter::Thread(thread_id());
        shared.books().route(shared, pool, filter, Vec::new())
    }

    pub(super) fn stream(shared: &Arc<Shared<D>>, stream: u32, pool: &PoolHandle<D>) -> Self {
        let filter = Filter::Stream(stream);
        shared.books().route(shared, pool, filter, Vec::new())
    }

    /// Allocates from its pool, as if it had been looked up.
    pub(crate) fn alloc_at(
        &self,
        stream: &D::Stream,
        bytes: u64,
        made_at: &'static Location<'static>,
    ) -> Result<Tensor<D>> {
        let from = Origin::Route(self.pool, self.serial);
        alloc_in(&self.shared, from, stream, bytes, made_at)
    }

    /// How much was allocated by it so far, if it is a call's.
    pub(crate) fn noted(&self) -> usize {
        let books = self.shared.books();
        books.routes.born(self.serial).len()
    }

    /// What of it was allocated behind the first `from` and is held.
    pub(crate) fn held_since(&self, from: usize) -> Vec<Arc<Storage<D>>> {
        let books = self.shared.books();
        let since = books.routes.born(self.serial).iter().skip(from);
        since.filter(|s| s.owners() > 0).cloned().collect()
    }

    /// Takes it back; what was allocated by it, if it is a call's.
    pub(crate) fn end(mut self) -> Vec<Arc<Storage<D>>> {
        self.take_back()
    }

    fn take_back(&mut self) -> Vec<Arc<Storage<D>>> {
        self.ended = true;
        let mut books = self.shared.books();
        let routes = &mut books.routes.routes;
        let mut born = Vec::new();
        if let Some(at) = routes.iter().position(|r| r.serial == self.serial) {
            let route = routes.remove(at);
            if matches!(route.filter, Filter::Call(..)) {
                books.closure_returned(&self.shared.device, route.call());
            }
            born = route.born;
        }
        books.let_go(self.pool);
        born
    }
}

impl<D: Device> Books<D> {
    /// Routes a call of a function. What it allocates is noted in `room`, which is empty.
    pub(super) fn route_call(
        &mut self,
        shared: &Arc<Shared<D>>,
        stream: &D::Stream,
        pool: &PoolHandle<D>,
        room: Vec<Arc<Storage<D>>>,
    ) -> RouteGuard<D> {
        let filter = Filter::Call(thread_id(), shared.device.stream_id(stream));
        self.route(shared, pool, filter, room)
    }

    fn route(
        &mut self,
        shared: &Arc<Shared<D>>,
        pool: &PoolHandle<D>,
        filter: Filter,
        born: Vec<Arc<Storage<D>>>,
    ) -> RouteGuard<D> {
        self.pools[pool.key].uses += 1;
        let serial = self.routes.next;
        self.routes.next += 1;
        self.routes.routes.push(Route {
            serial,
            pool: pool.key,
            filter,
            born,
        });
        RouteGuard {
            shared: shared.clone(),
            pool: pool.key,
            id: pool.id,
            serial,
            ended: false,
        }
    }
}

impl<D: Device> Drop for RouteGuard<D> {
    fn drop(&mut self) {
        if !self.ended {
            self.take_back();
        }
    }
}

impl<D: Device> fmt::Debug for RouteGuard<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RouteGuard(PoolHandle({}))", self.id)
    }
}
