//! Bodies of ifs inside captures: the stream that each is captured on, and whose memory it draws on.
//!
//! A body is captured on a stream of its own, made for it and gone with it. To the books that stream is the one that the if was begun on: that one takes no work meanwhile, and comes
//! after the body. So a body reuses what died before it, and what dies in it is used again behind it. What is born in a body must die in it: at a launch that does not
//! run the body, nobody tells the device of it. The death of what was born outside is told behind the node, whether or not the body runs.

use super::uses::Deferred;
use super::{Allocator, Books, Born, PoolHandle, RouteGuard, refuse_tensor};
use crate::device::{Device, DeviceError, DevicePtr};
use crate::error::{Error, Result};
use crate::storage::Tensor;

/// A stream that captures a body, and the one that stands for it in the books, by number.
pub(super) struct BodyStream {
    id: u32,
    stands_for: u32,
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

    fn leave_body(&mut self, device: &D, body: &D::Stream, stream: &D::Stream) {
        let id = device.stream_id(body);
        self.bodies.retain(|body| body.id != id);
        for deferred in &mut self.deferred {
            Deferred::rename(deferred, body, stream);
        }
    }
}

impl<D: Device> Allocator<D> {
    /// Adds an if to the capture of a stream, and opens its body.
    pub(crate) fn begin_body(
        &self,
        stream: &D::Stream,
        predicate: DevicePtr,
    ) -> Result<OpenBody<D>, DeviceError> {
        let device = self.device();
        let body = device.create_stream()?;
        device.begin_if(stream, predicate, &body)?;
        let mut books = self.shared.books();
        let stands_for = books.stands_for(device.stream_id(stream));
        books.bodies.push(BodyStream {
            id: device.stream_id(&body),
            stands_for,
        });
        drop(books);
        Ok(OpenBody {
            allocator: self.clone(),
            stream: stream.clone(),
            body,
            open: true,
        })
    }

    /// Routes allocations of a body of a single graph to its pool, and notes them.
    pub(crate) fn route_body(
        &self,
        stream: &D::Stream,
        pool: &PoolHandle<D>,
        born: &Born<D>,
    ) -> RouteGuard<D> {
        let stands_for = self
            .shared
            .books()
            .stands_for(self.device().stream_id(stream));
        RouteGuard::body(&self.shared, stands_for, pool, born.clone())
    }
}

impl<D: Device> OpenBody<D> {
    /// The stream that captures the body.
    pub(crate) fn stream(&self) -> &D::Stream {
        &self.body
    }

    /// Ends the body.
    pub(crate) fn end(mut self) -> Result<(), DeviceError> {
        self.close()
    }

    fn close(&mut self) -> Result<(), DeviceError> {
        self.open = false;
        let device = self.allocator.device();
        let ended = device.end_if(&self.stream, &self.body);
        let mut books = self.allocator.shared.books();
        books.leave_body(device, &self.body, &self.stream);
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
pub(crate) fn refuse_escaped<D: Device>(born: &Born<D>, from: usize) -> Result<()> {
    let held = born.held_since(from);
    match held.first() {
        None => Ok(()),
        Some(first) => Err(Error::Escaped {
            bytes: first.bytes(),
            at: first.made_at(),
            count: held.len(),
        }),
    }
}
