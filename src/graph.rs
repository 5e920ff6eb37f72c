//! One captured graph and its lease on a pool, without a tree.
//!
//! A [`Graph`] captures work that allocates from a private pool, its own or one it shares, and launches it as often as
//! asked. What the graph's addresses refer to stays in its pool as long as the graph lives. Sharing a pool is a promise by the
//! caller: graphs of one pool reuse each other's memory and are to be replayed in the order of their capture; a
//! [`GraphTrees`](crate::GraphTrees) is the way to have that checked.

use std::fmt;
use std::panic::Location;

use tracing::{debug_span, warn};

use crate::allocator::{Allocator, Baked, PoolHandle, PoolOptions, RouteGuard, predicate_of};
use crate::device::{CaptureMode, Device, GraphInfo, relaxed};
use crate::error::{BoxError, Error, Result};
use crate::storage::Tensor;

/// How a graph captures.
#[derive(Debug)]
pub struct CaptureOptions<D: Device> {
    /// The pool to allocate from; a new private one if none is given.
    pub pool: Option<PoolHandle<D>>,
    /// How strictly other calls are judged meanwhile.
    pub mode: CaptureMode,
}

impl<D: Device> Default for CaptureOptions<D> {
    fn default() -> Self {
        CaptureOptions {
            pool: None,
            mode: CaptureMode::ThreadLocal,
        }
    }
}

/// A captured graph. It may be reset and captured again; the object stays.
pub struct Graph<D: Device> {
    allocator: Allocator<D>,
    captured: Option<Captured<D>>,
    keeps_template: bool,
}

struct Captured<D: Device> {
    exec: D::Exec,
    info: GraphInfo,
    /// What the executable was made of, if it is kept.
    template: Option<D::Graph>,
    pool: PoolHandle<D>,
    /// What else was used during the capture.
    baked: Baked<D>,
}

impl<D: Device> Graph<D> {
    /// A graph object without a graph.
    #[must_use]
    pub fn new(allocator: &Allocator<D>) -> Self {
        Graph {
            allocator: allocator.clone(),
            captured: None,
            keeps_template: false,
        }
    }

    /// Whether captures that end from now on keep their template beside the executable, for [`debug_dump`](Graph::debug_dump). At first they do not: it takes
    /// memory of the host's, and nothing else here needs it.
    pub fn keep_template(&mut self, keep: bool) {
        self.keeps_template = keep;
    }

    /// The captured graph's own picture, in the DOT language: the driver's on CUDA, with all it knows of each node. See [`Device::graph_dot`].
    ///
    /// # Errors
    /// [`Error::NotCaptured`]; [`Error::TemplateNotKept`]; the device's.
    pub fn debug_dump(&self) -> Result<String> {
        let template = self.captured()?.template.as_ref();
        let template = template.ok_or(Error::TemplateNotKept)?;
        Ok(self.allocator.device().graph_dot(template)?)
    }

    /// Begins a capture on `stream`, with a pool of its own.
    ///
    /// # Errors
    /// As [`capture_with`](Graph::capture_with).
    pub fn capture(&mut self, stream: &D::Stream) -> Result<Capture<'_, D>> {
        self.capture_with(stream, CaptureOptions::default())
    }

    /// Begins a capture on `stream`. Until the guard is ended or dropped, allocations for the stream come from the pool, and so do those
    /// that this thread makes for streams that forked off it.
    ///
    /// # Errors
    /// [`Error::AlreadyCaptured`]; [`Error::ForeignPool`]; the device's, for example on the default stream. Nothing has changed then.
    pub fn capture_with(
        &mut self,
        stream: &D::Stream,
        options: CaptureOptions<D>,
    ) -> Result<Capture<'_, D>> {
        if self.captured.is_some() {
            return Err(Error::AlreadyCaptured);
        }
        let pool = match options.pool {
            Some(pool) => {
                self.allocator.own(&pool)?;
                pool
            }
            None => self.allocator.create_pool(PoolOptions::default())?,
        };
        let allocator = self.allocator.clone();
        let route = allocator.route_stream(stream, &pool)?;
        let serial = allocator.enter_capture(stream);
        if let Err(error) = allocator.device().begin_capture(stream, options.mode) {
            allocator.leave_capture(serial, None);
            return Err(error.into());
        }
        Ok(Capture {
            graph: self,
            stream: stream.clone(),
            window: Some(Window {
                route,
                serial,
                pool,
            }),
        })
    }

    /// The pool that the graph's memory lies in, as a further use: to capture another graph into it.
    ///
    /// # Errors
    /// [`Error::NotCaptured`].
    pub fn pool(&self) -> Result<PoolHandle<D>> {
        Ok(self.captured()?.pool.clone())
    }

    /// What the graph holds.
    ///
    /// # Errors
    /// [`Error::NotCaptured`].
    pub fn info(&self) -> Result<GraphInfo> {
        Ok(self.captured()?.info)
    }

    /// Launches the graph on `stream`. Returns at once (unless a thread of the host is at a [`PinnedBuffer`](crate::PinnedBuffer) that the graph has copies of: after that).
    ///
    /// # Errors
    /// [`Error::NotCaptured`]; the device's.
    pub fn replay(&self, stream: &D::Stream) -> Result<()> {
        let captured = self.captured()?;
        let device = self.allocator.device();
        let launch = || device.launch_graph(&captured.exec, stream, &[]);
        Ok(captured.baked.launch(device, stream, launch)?)
    }

    /// Drops the graph and its use of the pool. Idempotent. Tensors made during its capture stay good.
    pub fn reset(&mut self) {
        self.captured = None;
    }

    fn captured(&self) -> Result<&Captured<D>> {
        self.captured.as_ref().ok_or(Error::NotCaptured)
    }
}

impl<D: Device> fmt::Debug for Graph<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.captured {
            Some(c) => f
                .debug_struct("Graph")
                .field("pool", &c.pool)
                .field("nodes", &c.info.nodes())
                .finish_non_exhaustive(),
            None => f.write_str("Graph(not captured)"),
        }
    }
}

/// A capture underway. Work enqueued on its stream becomes the graph. Dropped without [`end`](Capture::end), it is
/// abandoned: stream, routing and pool are as before.
#[must_use = "a capture that is dropped is abandoned; call end()"]
pub struct Capture<'g, D: Device> {
    graph: &'g mut Graph<D>,
    stream: D::Stream,
    window: Option<Window<D>>,
}

/// What is in force while a capture is.
struct Window<D: Device> {
    route: RouteGuard<D>,
    serial: u64,
    pool: PoolHandle<D>,
}

impl<D: Device> Capture<'_, D> {
    /// The stream that captures.
    #[must_use]
    pub fn stream(&self) -> &D::Stream {
        &self.stream
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &D {
        self.graph.allocator.device()
    }

    /// Allocates from the capture's pool. The tensor may outlive the graph.
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`](crate::pool::PoolError::OutOfMemory); the capture goes on.
    #[track_caller]
    pub fn alloc(&self, bytes: u64) -> Result<Tensor<D>> {
        let Some(window) = &self.window else {
            return Err(Error::NotCaptured);
        };
        window
            .pool
            .alloc_at(&self.stream, bytes, Location::caller())
    }

    /// Adds an if to the graph: a conditional node, whose body runs at each launch at which the predicate holds. That is a tensor of one byte, true if it is not 0, read in stream
    /// order. `body` is called once, now, and enqueues what the node is to run on the stream that it is given. The capture's own stream takes no work meanwhile.
    ///
    /// What the body allocates dies in it: results are written to memory that was allocated before the if. It may hold launches, copies (those from and to
    /// pinned buffers too), fills and ifs. See [`Device::begin_if`] for what holds on its stream.
    ///
    /// # Errors
    /// The body's own: what it had enqueued stays in the node, so whoever does not want that drops the capture. [`Error::Predicate`];
    /// [`Error::Escaped`] where memory of the body is held behind it; [`Error::Stale`]; [`Error::ForeignTensor`]; the device's: one of those may break the capture.
    pub fn if_node(
        &mut self,
        predicate: &Tensor<D>,
        body: impl FnOnce(&mut IfBody<'_, D>) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let own = self.stream.clone();
        self.if_node_on(&own, predicate, body)
    }

    /// The same on a stream that forked off the capture's, which takes no work meanwhile; the others do.
    ///
    /// # Errors
    /// As [`if_node`](Capture::if_node); [`Code::IllegalState`](crate::device::Code::IllegalState) where the stream does not take part in this capture.
    pub fn if_node_on(
        &mut self,
        stream: &D::Stream,
        predicate: &Tensor<D>,
        body: impl FnOnce(&mut IfBody<'_, D>) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let Some(window) = &self.window else {
            return Err(Error::NotCaptured.into());
        };
        let (allocator, pool) = (&self.graph.allocator, &window.pool);
        allocator.own_stream(stream)?;
        if_node(allocator, pool, (&self.stream, stream), predicate, body)
    }

    /// Ends the capture and makes the graph executable.
    ///
    /// # Errors
    /// The device's, where the capture was invalidated or not joined; [`Error::MemoryNodes`]. The graph object then holds no graph, and
    /// stream, routing and pool are as before.
    pub fn end(mut self) -> Result<()> {
        let span = debug_span!("capture");
        let _entered = span.enter();
        let Some(window) = self.window.take() else {
            return Err(Error::NotCaptured);
        };
        let allocator = self.graph.allocator.clone();
        let device = allocator.device();
        let ended = device.end_capture(&self.stream);
        let baked = allocator.leave_capture(window.serial, Some((&window.pool, &[])));
        drop(window.route);
        let template = ended?;
        let info = device.graph_info(&template)?;
        if info.memory > 0 {
            return Err(Error::MemoryNodes(info));
        }
        if info.nodes() == 0 {
            warn!("the captured graph is empty");
        }
        let exec = relaxed(device, || device.instantiate(&template))?;
        self.graph.captured = Some(Captured {
            exec,
            info,
            template: self.graph.keeps_template.then_some(template),
            pool: window.pool,
            baked,
        });
        Ok(())
    }
}

/// The body of an if while it is captured. Work enqueued on its stream becomes the body.
pub struct IfBody<'c, D: Device> {
    allocator: &'c Allocator<D>,
    pool: &'c PoolHandle<D>,
    stream: &'c D::Stream,
}

impl<'c, D: Device> IfBody<'c, D> {
    /// The stream that captures the body.
    #[must_use]
    pub fn stream(&self) -> &'c D::Stream {
        self.stream
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &'c D {
        self.allocator.device()
    }

    /// Allocates from the capture's pool, what dies in the body.
    ///
    /// # Errors
    /// [`PoolError::OutOfMemory`](crate::pool::PoolError::OutOfMemory); the capture goes on.
    #[track_caller]
    pub fn alloc(&mut self, bytes: u64) -> Result<Tensor<D>> {
        self.pool.alloc_at(self.stream, bytes, Location::caller())
    }

    /// An if within: as [`Capture::if_node`].
    ///
    /// # Errors
    /// As [`Capture::if_node`].
    pub fn if_node(
        &mut self,
        predicate: &Tensor<D>,
        body: impl FnOnce(&mut IfBody<'_, D>) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let stream = self.stream;
        if_node(self.allocator, self.pool, (stream, stream), predicate, body)
    }
}

impl<D: Device> fmt::Debug for IfBody<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IfBody")
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

/// An if of the capture of `own`, on a stream of it.
fn if_node<D: Device>(
    allocator: &Allocator<D>,
    pool: &PoolHandle<D>,
    (own, stream): (&D::Stream, &D::Stream),
    predicate: &Tensor<D>,
    body: impl FnOnce(&mut IfBody<'_, D>) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let predicate = predicate_of(allocator.device(), predicate)?;
    let open = allocator.begin_body(own, stream, predicate)?;
    let outcome = body(&mut IfBody {
        allocator,
        pool,
        stream: open.body(),
    });
    let ended = open.end_without(pool);
    outcome?;
    Ok(ended?)
}

impl<D: Device> Drop for Capture<'_, D> {
    fn drop(&mut self) {
        if let Some(window) = self.window.take() {
            let allocator = &self.graph.allocator;
            // The capture is abandoned: whatever ending it says, the stream does not capture any more.
            if let Err(error) = allocator.device().end_capture(&self.stream) {
                tracing::debug!(%error, "an abandoned capture ended with an error");
            }
            allocator.leave_capture(window.serial, None);
        }
    }
}

impl<D: Device> fmt::Debug for Capture<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture")
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}
