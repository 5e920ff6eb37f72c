//! Captures underway, and what the graphs that come of them keep.
//!
//! Whoever captures through this allocator tells it before the driver's begin and after the driver's end. In between nothing is given back to the device, and what is used
//! of memory that is not the caller's to keep is noted for the graph, which has the addresses baked in.

use std::sync::Arc;

use smallvec::SmallVec;

use super::pinned::{Captured, PinnedUses};
use super::{Allocator, Books, PoolHandle, PoolKey, RouteGuard};
use crate::device::{CaptureStatus, Device, DeviceError, DevicePtr, Mark};
use crate::error::Result;
use crate::pool::{Allocation, Pins};
use crate::storage::{Storage, Tensor};
use crate::sync::thread::ThreadId;
use crate::sync::thread_id;

/// A capture underway.
pub(super) struct Underway<D: Device> {
    stream: D::Stream,
    pub(super) id: u32,
    pub(super) serial: u64,
    /// Who began it.
    pub(super) thread: ThreadId,
    /// What was allocated for its stream.
    pub(super) made: Made,
    /// The private pools that it came from, each a use.
    pub(super) pools: SmallVec<[PoolKey; 2]>,
    /// What its graph is to keep besides.
    kept: Vec<Tensor<D>>,
    /// The pinned memory that it has copies of.
    pub(super) pinned: Vec<Captured<D>>,
}

/// A pool that whoever has a graph keeps, and the storages of it that the graph uses.
pub(crate) type Own<'a, D> = (&'a PoolHandle<D>, &'a [Arc<Storage<D>>]);

/// Blocks, each with its pool.
pub(super) type Made = Vec<(PoolKey, Allocation)>;

/// What a graph keeps because it has the addresses baked in.
pub(crate) struct Baked<D: Device> {
    /// The private pools that were allocated from during the capture.
    pools: Vec<PoolHandle<D>>,
    /// Tensors that the caller may not know: see [`Allocator::keep_in_capture`].
    tensors: Vec<Tensor<D>>,
    /// The pinned memory that it has copies of.
    pinned: Option<PinnedUses<D>>,
    /// The segments of the pool of whoever has the graph. Who drops it [unpins](PoolHandle::unpin) them.
    pub(crate) pins: Pins,
}

impl<D: Device> Books<D> {
    /// The capture that a stream belongs to, if it was begun through this allocator: on the stream, or on one that it forked off, or that it captures the body of an if of. (Of
    /// a fork of a broken capture the device does not say which that is: the last one that this thread began.)
    pub(super) fn capture_of(&self, device: &D, stream: &D::Stream) -> Option<usize> {
        if self.captures.is_empty() {
            return None;
        }
        let id = device.stream_id(stream);
        let begun = self.captures.iter().position(|c| c.id == id);
        begun.or_else(|| match device.capture_status(stream) {
            Ok(CaptureStatus::Active) => {
                let capture = device.capture_id(stream).ok()??;
                let has_it = |c: &Underway<D>| device.capture_id(&c.stream) == Ok(Some(capture));
                self.captures.iter().position(has_it)
            }
            Ok(CaptureStatus::Invalidated) => {
                let thread = thread_id();
                self.captures.iter().rposition(|c| c.thread == thread)
            }
            Ok(CaptureStatus::None) | Err(_) => None,
        })
    }

    /// The stream that began the capture which a stream takes part in.
    pub(super) fn origin_of(&self, device: &D, stream: &D::Stream) -> Option<&D::Stream> {
        let at = self.capture_of(device, stream)?;
        Some(&self.captures[at].stream)
    }

    /// Notes a capture that is about to begin. Its serial.
    fn begin_capture(&mut self, device: &D, stream: &D::Stream) -> u64 {
        let serial = self.next_capture;
        self.next_capture += 1;
        self.captures.push(Underway {
            stream: stream.clone(),
            id: device.stream_id(stream),
            serial,
            thread: thread_id(),
            made: std::mem::take(&mut self.spare_made),
            pools: SmallVec::new(),
            kept: Vec::new(),
            pinned: Vec::new(),
        });
        serial
    }
}

impl<D: Device> Allocator<D> {
    /// Notes that a capture is about to begin on `stream`, so that nothing is given back to the device meanwhile. Its serial.
    ///
    /// Called before the driver's begin; [`leave_capture`](Allocator::leave_capture) after the driver's end: the notes enclose the window.
    pub(crate) fn enter_capture(&self, stream: &D::Stream) -> u64 {
        self.shared
            .books()
            .begin_capture(&self.shared.device, stream)
    }

    /// The same for the recording of a call of a function, whose route it gives besides: see [`route_call`](Allocator::route_call).
    pub(crate) fn enter_recording(
        &self,
        stream: &D::Stream,
        pool: &PoolHandle<D>,
        room: Vec<Arc<Storage<D>>>,
    ) -> (u64, RouteGuard<D>) {
        let mut books = self.shared.books();
        let serial = books.begin_capture(&self.shared.device, stream);
        (serial, books.route_call(&self.shared, stream, pool, room))
    }

    /// Has the graph of the capture that a stream takes part in keep a tensor that is not the caller's to keep: its address is baked in. Does nothing where
    /// nothing is captured. Of a capture that was not begun through this allocator nobody says when its graph goes, so there the tensor's memory is kept
    /// as long as the tensor's allocator.
    pub(crate) fn keep_in_capture(&self, stream: &D::Stream, tensor: &Tensor<D>) -> Result<()> {
        let device = &self.shared.device;
        if device.capture_status(stream)? != CaptureStatus::Active {
            return Ok(());
        }
        let mut books = self.shared.books();
        match books.capture_of(device, stream) {
            Some(at) => {
                let kept = &mut books.captures[at].kept;
                if !kept.iter().any(|known| known.is_same_storage(tensor)) {
                    kept.push(tensor.clone());
                }
            }
            None => {
                if let Some(storage) = tensor.storage() {
                    // The block stays live in the books, and nobody frees it.
                    storage.disown();
                }
            }
        }
        Ok(())
    }

    /// Notes that the capture has ended, whatever came of it. What its graph is to keep as long as it lives: it has the addresses baked in. Not so a
    /// pool that whoever has the graph keeps anyway (`own`): of that, the segments of the storages that are named are pinned.
    ///
    /// What was allocated meanwhile and is held has an owner from here on, not only once the graph is launched: the marks of the
    /// allocations themselves are in the graph, or lost with it.
    pub(crate) fn leave_capture(&self, serial: u64, own: Option<Own<'_, D>>) -> Baked<D> {
        let mut books = self.shared.books();
        let Some(at) = books.captures.iter().position(|c| c.serial == serial) else {
            return Baked::default();
        };
        let mut ended = books.captures.remove(at);
        for &(pool, block) in &ended.made {
            if books
                .pools
                .get(pool)
                .is_some_and(|e| e.pool.contains(block))
            {
                let ptr = DevicePtr(block.address());
                let device = &self.shared.device;
                device.mark(&ended.stream, ptr, block.bytes(), Mark::Live);
            }
        }
        // Its room is the next capture's.
        ended.made.clear();
        books.spare_made = ended.made;
        books.free_deferred(&self.shared.device);
        let mut pins = Pins::default();
        if let Some((own, storages)) = own {
            let addresses = storages.iter().map(|s| s.ptr().0);
            pins = books.pools[own.key].pool.pin(addresses);
            if let Some(at) = ended.pools.iter().position(|key| *key == own.key) {
                ended.pools.remove(at);
                books.let_go(own.key);
            }
        }
        let handle = |key: PoolKey| PoolHandle {
            shared: self.shared.clone(),
            key,
            id: books.pools[key].id,
        };
        let pools = ended.pools.into_iter().map(handle).collect();
        // Pinned blocks are locked before the books.
        drop(books);
        Baked {
            pools,
            tensors: ended.kept,
            pinned: PinnedUses::of(ended.pinned),
            pins,
        }
    }
}

impl<D: Device> Baked<D> {
    /// Whether there is a pool, of which the backing may be the caller's, in it.
    pub(crate) fn has_pools(&self) -> bool {
        !self.pools.is_empty()
    }

    /// Whether launches have to be noted: then they go through [`launch`](Baked::launch).
    pub(crate) fn follows_launches(&self) -> bool {
        !self.tensors.is_empty() || self.pinned.is_some()
    }

    /// Launches the graph, when no thread of the host is at its pinned blocks. Notes the launch: the graph may go before it has run, and neither the tensors' memory nor the pinned
    /// blocks are used again, or written, before.
    #[inline]
    pub(crate) fn launch(
        &self,
        device: &D,
        stream: &D::Stream,
        launch: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        match &self.pinned {
            None => launch()?,
            Some(pinned) => pinned.launch(device, stream, launch)?,
        }
        for storage in self.tensors.iter().filter_map(Tensor::storage) {
            storage.used_by_run(stream);
        }
        Ok(())
    }
}

impl<D: Device> Default for Baked<D> {
    fn default() -> Self {
        Baked {
            pools: Vec::new(),
            tensors: Vec::new(),
            pinned: None,
            pins: Pins::default(),
        }
    }
}
