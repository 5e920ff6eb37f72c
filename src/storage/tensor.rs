//! Tensors: handles on a byte range of a storage, each with the stamp of its generation.

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

use super::{Storage, StorageId};
use crate::allocator::{PinnedBuffer, refuse_tensor};
use crate::device::{Device, DevicePtr};
use crate::error::{Error, Result};
use crate::sync::MutexGuard;

/// A handle on a range of bytes in device memory.
///
/// It owns its share of the storage: the memory is given back when the last handle of a storage is gone, views included.
/// Cloning and dropping cost an atomic each and never wait for the device. A handle on an output of a graph tree belongs
/// to the generation it was made in; once that has ended (see [`GraphTrees::step`](crate::GraphTrees::step)) and the memory was
/// taken, reading through it is [`Error::Stale`], never somebody else's bytes.
///
/// A tensor of zero bytes has no storage and the null address.
pub struct Tensor<D: Device> {
    storage: Option<Arc<Storage<D>>>,
    /// The generation it was made in; `ETERNAL` for a storage that has only one.
    stamp: u64,
    /// Of a storage that never moves, the address of the range's first byte; else the range's offset in it.
    at: u64,
    bytes: u64,
    made_at: &'static Location<'static>,
}

/// The stamp of handles that cannot go stale: checking one touches no memory but the handle's.
const ETERNAL: u64 = u64::MAX;

/// The stamp that a handle's storage says for it.
fn in_word(stamp: u64) -> u64 {
    if stamp == ETERNAL { 0 } else { stamp }
}

impl<D: Device> Tensor<D> {
    /// The tensor of zero bytes.
    #[track_caller]
    #[must_use]
    pub fn empty() -> Self {
        Tensor::nothing(Location::caller())
    }

    fn nothing(made_at: &'static Location<'static>) -> Self {
        Tensor {
            storage: None,
            stamp: ETERNAL,
            at: DevicePtr::NULL.0,
            bytes: 0,
            made_at,
        }
    }

    /// Wraps a new storage, whose first owner this is.
    pub(crate) fn first(storage: Arc<Storage<D>>) -> Self {
        let (stamp, bytes, made_at) = (storage.stamp(), storage.bytes(), storage.made_at());
        Tensor::counted(storage, stamp, 0, bytes, made_at)
    }

    /// Wraps a storage whose word already counts this owner, with the stamp it was handed out with.
    pub(crate) fn counted(
        storage: Arc<Storage<D>>,
        stamp: u64,
        offset: u64,
        bytes: u64,
        made_at: &'static Location<'static>,
    ) -> Self {
        let eternal = storage.never_moves();
        Tensor {
            stamp: if eternal { ETERNAL } else { stamp },
            at: if eternal {
                storage.ptr().offset(offset).0
            } else {
                offset
            },
            storage: Some(storage),
            bytes,
            made_at,
        }
    }

    /// One more owner of the whole storage, if it has any.
    pub(crate) fn hold(storage: &Arc<Storage<D>>) -> Option<Self> {
        let (stamp, bytes) = (storage.stamp(), storage.bytes());
        storage
            .retain_if_held(stamp)
            .then(|| Tensor::counted(storage.clone(), stamp, 0, bytes, storage.made_at()))
    }

    /// The same range, as if made at another place.
    pub(crate) fn remade_at(mut self, made_at: &'static Location<'static>) -> Self {
        self.made_at = made_at;
        self
    }

    /// Another range of the same storage: one more owner.
    pub(crate) fn range(
        &self,
        offset: u64,
        bytes: u64,
        made_at: &'static Location<'static>,
    ) -> Self {
        let mut range = self.clone();
        range.at = self.place(offset);
        (range.bytes, range.made_at) = (bytes, made_at);
        range
    }

    /// Whether the other is a handle on the same storage.
    pub(crate) fn is_same_storage(&self, other: &Self) -> bool {
        match (&self.storage, &other.storage) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    pub(crate) fn made_at(&self) -> &'static Location<'static> {
        self.made_at
    }

    pub(crate) fn storage(&self) -> Option<&Arc<Storage<D>>> {
        self.storage.as_ref()
    }

    /// Whether its storage is still in the handle's generation.
    #[must_use]
    #[inline]
    pub fn is_current(&self) -> bool {
        self.stamp == ETERNAL
            || self
                .storage
                .as_ref()
                .is_none_or(|s| s.stamp() == self.stamp)
    }

    /// Whether the handle may still be read.
    ///
    /// # Errors
    /// [`Error::Stale`] where its memory was given to a later run.
    #[inline]
    pub fn check(&self) -> Result<()> {
        match &self.storage {
            Some(storage) if !self.is_current() => Err(Error::Stale(Box::new(
                storage.stale(self.stamp, self.made_at),
            ))),
            _ => Ok(()),
        }
    }

    /// Says that work on `stream` uses the tensor's memory, besides the stream it was allocated for or handed out on.
    ///
    /// The order of work on that stream and others is the caller's, as always. What this adds is the other end: when the last handle is gone, the
    /// memory is not used again before all work that `stream` was given until then has run. It is for the whole storage, through whichever view
    /// it is said, and for this generation of it. An output of a tree may be overwritten by a later run without having died: the tree's next run, on
    /// whatever stream, waits for `stream`. (Streams that runs were called on are waited for without being named.)
    ///
    /// If `stream` captures, the work is the graph's: the memory is kept until that capture has ended; whoever launches the graph keeps the tensor.
    /// Of [imported](crate::Allocator::import) memory nothing is known of its reuse: its keeper sees to that.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::ForeignStream`].
    pub fn record_stream(&self, stream: &D::Stream) -> Result<()> {
        self.check()?;
        if let Some(storage) = &self.storage {
            if !storage.device().owns(stream) {
                return Err(Error::ForeignStream);
            }
            storage.use_on(stream);
        }
        Ok(())
    }

    /// Length of the range, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the range is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where the range begins in its storage, in bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.storage.as_ref().map_or(0, |s| match self.stamp {
            ETERNAL => self.at.wrapping_sub(s.ptr().0),
            _ => self.at,
        })
    }

    /// The identity of the storage; `None` for the empty tensor. Two tensors alias exactly if they share it.
    #[must_use]
    pub fn storage_id(&self) -> Option<StorageId> {
        self.storage.as_ref().map(|s| s.id())
    }

    /// Address of the range's first byte, to be used in work that is enqueued while the handle is held.
    ///
    /// Of memory outside of trees it is good as long as a handle is held. Of an output it is good, on whatever thread, as long as the token of its step lives
    /// besides: no run takes or moves the memory before. Once the token was dropped, any thread's next run may: then it goes stale, or
    /// ([`OnOverwrite::Copy`](crate::OnOverwrite::Copy)) lies elsewhere, and work with the old address that is enqueued after that run touches the run's memory. Of work that was enqueued
    /// before, a run waits for that on the streams that runs were called on or that were [named](Tensor::record_stream).
    ///
    /// # Errors
    /// [`Error::Stale`], as [`check`](Tensor::check).
    pub fn ptr(&self) -> Result<DevicePtr> {
        self.check()?;
        Ok(self.address())
    }

    /// The address, whoever owns it by now.
    pub(crate) fn address(&self) -> DevicePtr {
        match &self.storage {
            Some(storage) if self.stamp != ETERNAL => storage.ptr().offset(self.at),
            _ => DevicePtr(self.at),
        }
    }

    /// What `at` says for a range at an offset of the storage.
    fn place(&self, offset: u64) -> u64 {
        match &self.storage {
            Some(storage) if self.stamp == ETERNAL => storage.ptr().offset(offset).0,
            _ => offset,
        }
    }

    /// A handle on `bytes` bytes from `offset` of this range: one more owner of the same storage.
    ///
    /// # Errors
    /// [`Error::View`] where the range does not lie in this one; [`Error::Stale`], as [`check`](Tensor::check).
    #[track_caller]
    pub fn view(&self, offset: u64, bytes: u64) -> Result<Tensor<D>> {
        self.check()?;
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(Error::View {
                offset,
                bytes,
                of: self.bytes,
            });
        }
        if bytes == 0 {
            return Ok(Tensor::empty());
        }
        let mut view = self.clone();
        view.at = self.at + offset;
        view.bytes = bytes;
        view.made_at = Location::caller();
        Ok(view)
    }

    /// Copies the range to the host, in stream order, and waits for it.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::ForeignTensor`] on another device; the device's own, where the copy or work before it failed.
    pub fn read(&self, device: &D, stream: &D::Stream) -> Result<Vec<u8>> {
        self.check_on(device)?;
        let mut bytes = vec![
            0;
            usize::try_from(self.bytes).map_err(|_| Error::View {
                offset: 0,
                bytes: self.bytes,
                of: self.bytes
            })?
        ];
        // Another thread's run may have taken the memory while the copy was underway: then it is stale, or lies elsewhere by now.
        loop {
            let from = self.ptr()?;
            self.await_copy(device, stream)?;
            if self.bytes > 0 {
                device.read(stream, &mut bytes, from)?;
            }
            if self.ptr()? == from {
                return Ok(bytes);
            }
        }
    }

    /// Copies host bytes over the whole range, in stream order. `src` has been read when the call returns.
    ///
    /// Another thread's run may end the tensor's generation, or move it, meanwhile (see [`ptr`](Tensor::ptr) for when): the bytes are enqueued either before that, and move with
    /// it, or after, to where it lies then, or not at all: [`Error::Stale`]. Never over the memory of that run. (As far as the streams are ordered: see [`record_stream`](Tensor::record_stream).)
    ///
    /// # Errors
    /// [`Error::Length`] where the lengths differ; [`Error::Stale`]; [`Error::ForeignTensor`] on another device; the device's own.
    pub fn write(&self, device: &D, stream: &D::Stream, src: &[u8]) -> Result<()> {
        self.check_on(device)?;
        // Of a storage that may move, this thread's check and its work are one step for the thread that moves it.
        let storage = self.storage.as_ref().filter(|s| !s.never_moves());
        let _stays = storage.map(|s| s.stay());
        self.check()?;
        if src.len() as u64 != self.bytes {
            return Err(Error::Length {
                bytes: src.len() as u64,
                of: self.bytes,
            });
        }
        self.await_copy(device, stream)?;
        if self.bytes > 0 {
            device.write(stream, self.address(), src)?;
        }
        Ok(())
    }

    /// Copies bytes of a pinned buffer, from `offset` of it, over the whole range, in stream order; waits for nothing. They are read when the work runs, and stay until then: see
    /// [`PinnedBuffer`]. On a stream that captures, the copy is the graph's, and reads the buffer at each launch.
    ///
    /// What another thread's run may do meanwhile is as for [`write`](Tensor::write).
    ///
    /// # Errors
    /// [`Error::View`] where the bytes do not lie in the buffer; [`Error::Stale`]; [`Error::ForeignTensor`], [`Error::ForeignStream`] where tensor or stream are not of the buffer's
    /// device; the device's own.
    pub fn copy_from_pinned(
        &self,
        stream: &D::Stream,
        src: &PinnedBuffer<D>,
        offset: u64,
    ) -> Result<()> {
        let device = src.device();
        let _stays = self.begin_copy(device, stream)?;
        let dst = self.address();
        src.enqueue(stream, (offset, self.bytes), false, |memory| {
            device.copy_from_pinned(stream, dst, memory, offset, self.bytes)
        })
    }

    /// Copies the range to a pinned buffer, to `offset` of it, in stream order; waits for nothing. [`PinnedBuffer::read`] does. On a stream that captures, the copy is the graph's, and
    /// writes the buffer at each launch.
    ///
    /// # Errors
    /// As [`copy_from_pinned`](Tensor::copy_from_pinned).
    pub fn copy_to_pinned(
        &self,
        stream: &D::Stream,
        dst: &PinnedBuffer<D>,
        offset: u64,
    ) -> Result<()> {
        let device = dst.device();
        let _stays = self.begin_copy(device, stream)?;
        let src = self.address();
        dst.enqueue(stream, (offset, self.bytes), true, |memory| {
            device.copy_to_pinned(stream, memory, offset, src, self.bytes)
        })
    }

    /// Before the tensor is used in work that is enqueued as long as the guard is held.
    pub(crate) fn begin_copy(
        &self,
        device: &D,
        stream: &D::Stream,
    ) -> Result<Option<MutexGuard<'_, ()>>> {
        self.check_on(device)?;
        // Of a storage that may move, this thread's check and its work are one step for the thread that moves it.
        let storage = self.storage.as_ref().filter(|s| !s.never_moves());
        let stays = storage.map(|s| s.stay());
        self.check()?;
        if !device.owns(stream) {
            return Err(Error::ForeignStream);
        }
        self.await_copy(device, stream)?;
        Ok(stays)
    }

    /// Refuses another device than its own.
    fn check_on(&self, device: &D) -> Result<()> {
        refuse_tensor(device, self, || "the tensor".into())
    }

    /// Whether it is current, and lies where it was made: nothing is to be waited for.
    #[inline]
    pub(crate) fn is_settled(&self) -> bool {
        self.stamp == ETERNAL
            || self
                .storage
                .as_ref()
                .is_none_or(|s| s.stamp() == self.stamp && !s.has_moved())
    }

    /// Makes a stream wait for the copy by which an output of an ended step was kept, if it was.
    pub(crate) fn await_copy(&self, device: &D, stream: &D::Stream) -> Result<()> {
        if self.stamp != ETERNAL
            && let Some(storage) = &self.storage
        {
            storage.await_copy(device, stream)?;
        }
        Ok(())
    }

    /// A handle that does not own.
    #[must_use]
    pub fn downgrade(&self) -> WeakTensor<D> {
        WeakTensor {
            storage: self.storage.as_ref().map_or_else(Weak::new, Arc::downgrade),
            stamp: in_word(self.stamp),
            offset: self.offset(),
            bytes: self.bytes,
            made_at: self.made_at,
        }
    }
}

impl<D: Device> Clone for Tensor<D> {
    fn clone(&self) -> Self {
        if let Some(storage) = &self.storage {
            storage.retain(in_word(self.stamp));
        }
        Tensor {
            storage: self.storage.clone(),
            ..*self
        }
    }
}

impl<D: Device> Drop for Tensor<D> {
    fn drop(&mut self) {
        if let Some(storage) = &self.storage {
            storage.release(in_word(self.stamp));
        }
    }
}

impl<D: Device> fmt::Debug for Tensor<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.storage {
            Some(s) => write!(
                f,
                "{:?}[{}..{}]",
                s.id(),
                self.offset(),
                self.offset() + self.bytes
            ),
            None => f.write_str("empty"),
        }
    }
}

/// A handle on a range that keeps nothing alive.
pub struct WeakTensor<D: Device> {
    storage: Weak<Storage<D>>,
    stamp: u64,
    offset: u64,
    bytes: u64,
    made_at: &'static Location<'static>,
}

impl<D: Device> WeakTensor<D> {
    /// The tensor, if somebody holds its storage still and it is in the same generation.
    #[must_use]
    pub fn upgrade(&self) -> Option<Tensor<D>> {
        if self.bytes == 0 {
            return Some(Tensor::nothing(self.made_at));
        }
        let storage = self.storage.upgrade()?;
        storage
            .word
            .retain_if_held(self.stamp)
            .then(|| Tensor::counted(storage, self.stamp, self.offset, self.bytes, self.made_at))
    }
}

impl<D: Device> fmt::Debug for WeakTensor<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakTensor")
            .field("offset", &self.offset)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
