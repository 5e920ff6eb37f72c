//! Bodies of ifs inside captures: the stream that each is captured on, and whose memory it draws on.
//!
//! A body is captured on a stream of its own, made for it and gone with it. To the books that stream is the one that the if was begun on: that one takes no work meanwhile, and comes
//! after the body. So a body reuses what died before it, and what dies in it is used again behind it. What is born in a body must die in it: at a launch that does not
//! run the body, nobody tells the device of it. The death of what was born outside is told behind the node, whether or not the body runs.

use std::sync::Arc;

use super::{Allocator, Books, PoolHandle, refuse_tensor};
use crate::device::{Call, Code, Device, DeviceError, DevicePtr, relaxed};
use crate::error::{Error, Result};
use crate::storage::{Storage, Tensor};
use crate::sync::thread::ThreadId;
use crate::sync::thread_id;

/// The body of an if that is open.
pub(super) struct BodyStream<D: Device> {
    /// The stream that captures it, and the one that stands for it in the books, by number.
    id: u32,
    stands_for: u32,
    /// Serial of the capture it belongs to; `None` where that was not begun through the allocator.
    capture: Option<u64>,
    /// Who is in its closure.
    thread: ThreadId,
    /// What was allocated in it, from whatever pool.
    born: Vec<Arc<Storage<D>>>,
}

impl<D: Device> BodyStream<D> {
    /// Notes what was allocated in it.
    pub(super) fn note(&mut self, storage: &Arc<Storage<D>>) {
        self.born.push(storage.clone());
    }
}

/// An if of a capture whose body is open. Dropped, it is ended all the same.
pub(crate) struct OpenBody<D: Device> {
    allocator: Allocator<D>,
    /// What the if was begun on, and what captures its body.
    stream: D::Stream,
    body: D::Stream,
    open: bool,
}

impl<D: Device> Books<D> {
    /// The number by which a stream allocates.
    pub(super) fn stands_for(&self, id: u32) -> u32 {
        let body = self.bodies.iter().rev().find(|body| body.id == id);
        body.map_or(id, |body| body.stands_for)
    }

    /// In which body an allocation for a stream is born: the one that the stream captures, else the innermost of the stream's capture that this thread is in the closure of.
    pub(super) fn born_in_body(&self, id: u32, capture: Option<usize>) -> Option<usize> {
        if self.bodies.is_empty() {
            return None;
        }
        let by_stream = self.bodies.iter().rposition(|body| body.id == id);
        by_stream.or_else(|| {
            let (serial, thread) = (self.captures[capture?].serial, thread_id());
            let is_it =
                |body: &BodyStream<D>| body.capture == Some(serial) && body.thread == thread;
            self.bodies.iter().rposition(is_it)
        })
    }

    /// What was born in it.
    fn leave_body(
        &mut self,
        device: &D,
        body: &D::Stream,
        stream: &D::Stream,
    ) -> Vec<Arc<Storage<D>>> {
        let id = device.stream_id(body);
        let at = self.bodies.iter().position(|body| body.id == id);
        let left = at.map(|at| self.bodies.remove(at).born);
        for deferred in &mut self.deferred {
            deferred.frees_on(body, stream);
        }
        left.unwrap_or_default()
    }
}

impl<D: Device> Allocator<D> {
    /// Adds an if to the capture of `own`, on that stream or one that forked off it, and opens its body.
    pub(crate) fn begin_body(
        &self,
        own: &D::Stream,
        stream: &D::Stream,
        predicate: DevicePtr,
    ) -> Result<OpenBody<D>, DeviceError> {
        let device = self.device();
        if stream != own && device.capture_id(stream)? != device.capture_id(own)? {
            let why = "the stream does not take part in the capture that the if is to be a node of: fork it off that";
            let error = DeviceError::new(Call::BeginIf, Code::IllegalState, why);
            return Err(device.refuse(stream, error, false));
        }
        let body = relaxed(device, || device.create_stream())?;
        device.begin_if(stream, predicate, &body)?;
        let mut books = self.shared.books();
        let capture = books.capture_of(device, stream);
        let open = BodyStream {
            id: device.stream_id(&body),
            stands_for: books.stands_for(device.stream_id(stream)),
            capture: capture.map(|at| books.captures[at].serial),
            thread: thread_id(),
            born: Vec::new(),
        };
        books.bodies.push(open);
        drop(books);
        Ok(OpenBody {
            allocator: self.clone(),
            stream: stream.clone(),
            body,
            open: true,
        })
    }
}

impl<D: Device> OpenBody<D> {
    /// The stream that captures the body.
    pub(crate) fn body(&self) -> &D::Stream {
        &self.body
    }

    /// Ends the body.
    pub(crate) fn end(mut self) -> Result<(), DeviceError> {
        self.close()
    }

    /// Ends the body, which may leave nothing behind that it allocated from this pool.
    pub(crate) fn end_without(mut self, pool: &PoolHandle<D>) -> Result<()> {
        let escaped = {
            let books = self.allocator.shared.books();
            let id = self.allocator.device().stream_id(&self.body);
            let body = books.bodies.iter().find(|body| body.id == id);
            let born = body.iter().flat_map(|body| &body.born);
            let escaped = |s: &&Arc<Storage<D>>| s.owners() > 0 && s.in_pool(pool);
            born.filter(escaped).cloned().collect::<Vec<_>>()
        };
        self.close()?;
        refuse_escaped(&escaped)
    }

    fn close(&mut self) -> Result<(), DeviceError> {
        self.open = false;
        let device = self.allocator.device();
        let ended = device.end_if(&self.stream, &self.body);
        let mut books = self.allocator.shared.books();
        let born = books.leave_body(device, &self.body, &self.stream);
        drop(books);
        for left in born {
            left.dies_on(&self.body, &self.stream);
        }
        ended
    }
}

impl<D: Device> Drop for OpenBody<D> {
    fn drop(&mut self) {
        if self.open
            && let Err(error) = self.close()
        {
            tracing::debug!(%error, "the body of an if that was left ended with an error");
        }
    }
}

/// Where the predicate of an if lies.
pub(crate) fn predicate_of<D: Device>(device: &D, predicate: &Tensor<D>) -> Result<DevicePtr> {
    refuse_tensor(device, predicate, || "the predicate of an if".into())?;
    match predicate.bytes() {
        1 => predicate.ptr(),
        bytes => Err(Error::Predicate { bytes }),
    }
}

/// The error for what was born in a body and is held behind it, if anything is.
pub(crate) fn refuse_escaped<D: Device>(held: &[Arc<Storage<D>>]) -> Result<()> {
    match held {
        [] => Ok(()),
        [first, ..] => Err(Error::Escaped {
            bytes: first.bytes(),
            at: first.made_at(),
            count: held.len(),
        }),
    }
}
