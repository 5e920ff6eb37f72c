//! Ifs inside captures: conditional nodes, with bodies that are captured apart.
//!
//! A driver can capture into the body of a conditional node (`cuStreamBeginCaptureToGraph`). But where such a capture is invalidated, its end frees the body that
//! the node still owns, and the end of the whole capture crashes (reported publicly as cuda-python's issue 2918). So here a body is a capture like any, and its graph goes
//! into the node's body as a child graph once it has ended well. What is broken never comes near the node, so there is nothing to crash on, and nothing to leak.
//!
//! A child graph may hold no conditional node. An inner if therefore cuts its body: what was captured before becomes one child graph, then comes the inner node,
//! and what is captured behind it becomes another.

mod nodes;

use std::ptr;
use std::sync::{Arc, Weak};

use cudarc::driver::sys;
use smallvec::SmallVec;

use super::driver::SUCCESS;
use super::inner::{Inner, Shared};
use super::module::Function;
use super::stream::{self, Handle};
use crate::device::{
    Call, CaptureMode, CaptureStatus, Code, DeviceError, DevicePtr, GraphInfo, Result,
};
use crate::sync::lock;

pub(super) use self::nodes::CONDITIONAL;
use self::nodes::{Place, zeroed};

/// The body of an if that is open. Inner ones come after their outer ones in the device's list.
pub(super) struct Body {
    /// The stream that the if was begun on.
    stream: u32,
    outer: Weak<Handle>,
    /// The stream that captures the body.
    body: u32,
    handle: Weak<Handle>,
    /// The node's own graph for it. The node owns it.
    graph: Shared<sys::CUgraph>,
    /// What was added to it last.
    tail: Option<Shared<sys::CUgraphNode>>,
    info: GraphInfo,
}

/// What [`Device::begin_if`](crate::device::Device::begin_if) does. The context is current.
pub(super) fn begin_if(
    device: &Arc<Inner>,
    stream: &Arc<Handle>,
    predicate: DevicePtr,
    body: &Arc<Handle>,
) -> Result<()> {
    let call = Call::BeginIf;
    let refuse = |code, detail: String| Err(DeviceError::new(call, code, detail));
    let place = device.place(call, stream)?;
    if predicate == DevicePtr::NULL {
        let detail = "the predicate is the null address; give that of a byte";
        return refuse(Code::InvalidValue, detail.into());
    }
    if body.id == 0 {
        let detail = "the default stream cannot capture; give the body a stream that was created";
        return refuse(Code::StreamCaptureUnsupported, detail.into());
    }
    if device.status(call, body)? != CaptureStatus::None {
        let detail = format!(
            "stream {} captures already; give the body a stream that does not",
            body.id
        );
        return refuse(Code::IllegalState, detail);
    }
    let inner = device.is_body(stream);
    if !inner && device.is_in_body(stream) {
        let detail = format!(
            "stream {} forked off the body of an if; an inner if is begun on the body's own stream",
            stream.id
        );
        return refuse(Code::NotSupported, detail);
    }
    let _relaxed = device.relax(call)?;
    let kernel = device.if_kernel()?;
    let begun = match inner {
        true => device.add_inner(call, stream, &kernel, predicate),
        false => device.add_outer(call, stream, &place, &kernel, predicate),
    };
    // From here on the graph may have what it should not.
    begun
        .and_then(|graph| device.begin_body(call, stream, body, graph))
        .inspect_err(|_| {
            device.break_capture(stream);
            device.break_family(stream);
        })
}

/// What [`Device::end_if`](crate::device::Device::end_if) does. The context is current.
pub(super) fn end_if(device: &Arc<Inner>, stream: &Arc<Handle>, body: &Arc<Handle>) -> Result<()> {
    let call = Call::EndIf;
    let is_it = |b: &Body| b.stream == stream.id && b.body == body.id;
    if !lock(&device.bodies).iter().any(is_it) {
        let detail = format!(
            "stream {} has no body of an if that was begun on stream {}",
            body.id, stream.id
        );
        return Err(DeviceError::new(call, Code::IllegalState, detail));
    }
    let inner = device.close_bodies(body.id);
    let part = device
        .end_part(call, body)
        .and_then(|()| device.fill_empty(call, body));
    body.capture_ended();
    let ended = {
        let mut bodies = lock(&device.bodies);
        let at = bodies.iter().position(is_it);
        at.map(|at| bodies.remove(at))
    };
    let info = ended.map(|ended| ended.info).unwrap_or_default();
    let sound = match device.status(call, stream)? {
        CaptureStatus::Active if inner => {
            let detail = "an inner body is open; it is over now, with this one";
            Err(DeviceError::new(call, Code::StreamCaptureUnjoined, detail))
        }
        CaptureStatus::Active => part,
        _ => {
            let detail = "the capture broke while the body was open; the body is over now";
            Err(DeviceError::new(
                call,
                Code::StreamCaptureInvalidated,
                detail,
            ))
        }
    };
    sound.inspect_err(|_| device.break_capture(stream))?;
    match lock(&device.bodies)
        .iter_mut()
        .find(|b| b.body == stream.id)
    {
        Some(outer) => outer.info += info,
        None => lock(&device.begun).add_body(stream.id, info),
    }
    Ok(())
}

impl Inner {
    /// Whether a stream captures the body of an if.
    pub(super) fn is_body(&self, stream: &Handle) -> bool {
        lock(&self.bodies).iter().any(|b| b.body == stream.id)
    }

    /// Whether a stream captures the body of an if, or forked off one as far as that is known.
    pub(super) fn is_in_body(&self, stream: &Handle) -> bool {
        let origin = {
            let mut begun = lock(&self.begun);
            if begun.is_in_body(stream.id) {
                return true;
            }
            begun.origin(stream.id).unwrap_or(stream.id)
        };
        lock(&self.bodies).iter().any(|b| b.body == origin)
    }

    /// A stream takes no work while the body of an if is open there: it would come after the if, whatever the predicate says. The context is current.
    pub(super) fn refuse_beside_body(&self, call: Call, stream: &Handle) -> Result<()> {
        if self.none_begun() || !lock(&self.bodies).iter().any(|b| b.stream == stream.id) {
            return Ok(());
        }
        if self.status(call, stream)? != CaptureStatus::Active {
            // The driver refuses it.
            return Ok(());
        }
        self.break_capture(stream);
        let why = "the body of an if is open on the stream: work for the body goes to the body's stream, and other work comes after end_if; the capture is invalid now and must be ended";
        Err(DeviceError::new(call, Code::IllegalState, why))
    }

    /// Ends the bodies that are open on a stream, and those inside of them, and drops what they hold. Whether there were any.
    pub(super) fn close_bodies(&self, stream: u32) -> bool {
        let mut any = false;
        loop {
            let open = {
                let mut bodies = lock(&self.bodies);
                let at = bodies.iter().position(|b| b.stream == stream);
                at.map(|at| bodies.remove(at))
            };
            let Some(open) = open else { return any };
            any = true;
            self.close_bodies(open.body);
            if let Some(body) = open.handle.upgrade() {
                let mut graph = ptr::null_mut();
                // SAFETY: the handle keeps the stream alive; the pointer is to a live local.
                let code = unsafe { (self.driver.cuStreamEndCapture)(body.raw.0, &raw mut graph) };
                if code == SUCCESS {
                    self.destroy(graph);
                }
                body.capture_ended();
            }
        }
    }

    /// Ends the bodies that are open on the streams of the capture of one, which ends. Whether there were any.
    pub(super) fn close_all_bodies(&self, stream: &Handle) -> bool {
        if lock(&self.bodies).is_empty() {
            return false;
        }
        let streams = lock(&self.begun).streams(stream.id);
        let closed = streams.iter().map(|one| self.close_bodies(*one));
        // All of them, not up to the first.
        closed.fold(self.close_bodies(stream.id), |any, one| any | one)
    }

    /// Ends the bodies that are open on a stream which goes.
    pub(super) fn leave_bodies(&self, stream: u32) {
        if lock(&self.bodies).iter().any(|b| b.stream == stream)
            && let Some(_ending) = self.ending("cuStreamEndCapture")
        {
            self.close_bodies(stream);
        }
    }

    /// The number of the whole, where that of a capture is a body's. The context is current.
    pub(super) fn whole_capture(&self, mut id: u64) -> Option<u64> {
        // Upgraded, and dropped, outside of the lock: they may be the last of their streams.
        let both = |b: &Body| (b.handle.clone(), b.outer.clone());
        let open: SmallVec<[_; 4]> = lock(&self.bodies).iter().map(both).collect();
        for (body, outer) in open.iter().rev() {
            let body = body.upgrade();
            if body.is_some_and(|body| self.capture_id(&body) == Some(id)) {
                id = self.capture_id(&*outer.upgrade()?)?;
            }
        }
        Some(id)
    }

    /// Destroys a graph that a capture gave, and that nobody else has. The context is current.
    fn destroy(&self, graph: sys::CUgraph) {
        if let Some(_ending) = self.ending("cuGraphDestroy") {
            // SAFETY: the caller's promise.
            unsafe { (self.driver.cuGraphDestroy)(graph) };
        }
    }

    /// Adds an if to the capture of a stream. Its body's graph.
    fn add_outer(
        &self,
        call: Call,
        stream: &Handle,
        place: &Place,
        kernel: &Function,
        predicate: DevicePtr,
    ) -> Result<Shared<sys::CUgraph>> {
        const SET: u32 = 1; // CU_STREAM_SET_CAPTURE_DEPENDENCIES
        let (node, body) = self.add_if(call, place, kernel, predicate)?;
        let mut after = [node.0];
        // SAFETY: the stream captures into the graph of the node; the array has one node; without edges they are plain.
        let code = unsafe {
            (self.driver.cuStreamUpdateCaptureDependencies_v2)(
                stream.raw.0,
                after.as_mut_ptr(),
                ptr::null(),
                1,
                SET,
            )
        };
        self.check(call, code, || {
            format!("what comes next on stream {}", stream.id)
        })?;
        Ok(body)
    }

    /// Adds an if to the body that a stream captures, behind what it has captured so far. The inner body's graph.
    fn add_inner(
        &self,
        call: Call,
        stream: &Handle,
        kernel: &Function,
        predicate: DevicePtr,
    ) -> Result<Shared<sys::CUgraph>> {
        let mode = lock(&self.begun)
            .mode(stream.id)
            .unwrap_or(CaptureMode::ThreadLocal);
        let part = self.end_part(call, stream);
        // Whatever came of it, the stream captures until the body ends.
        // SAFETY: the handle keeps the stream alive.
        let code =
            unsafe { (self.driver.cuStreamBeginCapture_v2)(stream.raw.0, stream::raw_mode(mode)) };
        lock(&self.begun).renew(stream.id);
        part?;
        self.check(call, code, || {
            format!("to go on with the body on stream {}", stream.id)
        })?;
        let Some((graph, tail)) = self.end_of_body(stream) else {
            return Err(DeviceError::new(
                call,
                Code::IllegalState,
                "the body is gone",
            ));
        };
        let place = Place::behind(graph.0, tail);
        let (node, inner) = self.add_if(call, &place, kernel, predicate)?;
        if let Some(body) = lock(&self.bodies).iter_mut().find(|b| b.body == stream.id) {
            body.tail = Some(node);
            body.info.conditionals += 1;
        }
        Ok(inner)
    }

    /// The graph of the body that a stream captures, and what was added to it last.
    fn end_of_body(
        &self,
        stream: &Handle,
    ) -> Option<(Shared<sys::CUgraph>, Option<Shared<sys::CUgraphNode>>)> {
        let bodies = lock(&self.bodies);
        let body = bodies.iter().find(|b| b.body == stream.id)?;
        Some((body.graph, body.tail))
    }

    /// Begins to capture a body, by the rules of the capture it belongs to.
    fn begin_body(
        &self,
        call: Call,
        stream: &Arc<Handle>,
        body: &Arc<Handle>,
        graph: Shared<sys::CUgraph>,
    ) -> Result<()> {
        let mode = lock(&self.begun)
            .mode(stream.id)
            .unwrap_or(CaptureMode::ThreadLocal);
        body.capture_begins();
        // SAFETY: the handle keeps the stream alive.
        let code =
            unsafe { (self.driver.cuStreamBeginCapture_v2)(body.raw.0, stream::raw_mode(mode)) };
        if code != SUCCESS {
            self.note_end(body);
        }
        self.check(call, code, || {
            format!("to capture a body on stream {}", body.id)
        })?;
        let handle = Arc::downgrade(body);
        lock(&self.begun).begin_body(body.id, handle.clone(), mode, stream.id);
        lock(&self.bodies).push(Body {
            stream: stream.id,
            outer: Arc::downgrade(stream),
            body: body.id,
            handle,
            graph,
            tail: None,
            info: GraphInfo::default(),
        });
        Ok(())
    }

    /// Ends what a stream has captured of a body so far, and adds it to the body's graph.
    fn end_part(&self, call: Call, stream: &Handle) -> Result<()> {
        let mut part = ptr::null_mut();
        // SAFETY: the handle keeps the stream alive; the pointer is to a live local.
        let code = unsafe { (self.driver.cuStreamEndCapture)(stream.raw.0, &raw mut part) };
        // As at any end: what the driver may have written there on an error is no graph.
        self.check(call, code, || format!("the body on stream {}", stream.id))?;
        let added = self.add_part(call, stream, part);
        // A child graph is a copy.
        self.destroy(part);
        added
    }

    fn add_part(&self, call: Call, stream: &Handle, part: sys::CUgraph) -> Result<()> {
        let info = self.part_info(call, part)?;
        let Some((graph, tail)) = self.end_of_body(stream).filter(|_| info.nodes() > 0) else {
            return Ok(());
        };
        let mut params = zeroed();
        params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH;
        // Where this member has more fields, zero means a copy.
        params.__bindgen_anon_1.graph.graph = part;
        let place = Place::behind(graph.0, tail);
        let node = self.add_node(call, &place, "the body of an if", &mut params)?;
        if let Some(body) = lock(&self.bodies).iter_mut().find(|b| b.body == stream.id) {
            body.tail = Some(Shared(node));
            body.info += info;
        }
        Ok(())
    }

    /// A body that holds nothing gets a node that does nothing: no driver says that it takes a body without nodes.
    fn fill_empty(&self, call: Call, stream: &Handle) -> Result<()> {
        let Some((graph, None)) = self.end_of_body(stream) else {
            return Ok(());
        };
        let mut params = zeroed();
        params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        let place = Place::behind(graph.0, None);
        self.add_node(call, &place, "an empty body", &mut params)
            .map(drop)
    }

    /// What a part of a body holds; refused where that is what no body may.
    fn part_info(&self, call: Call, part: sys::CUgraph) -> Result<GraphInfo> {
        let mut info = GraphInfo::default();
        for node in self.nodes(call, part)? {
            match self.kind(call, node)? {
                0 => info.kernels += 1,
                1 => info.copies += 1,
                2 => info.fills += 1,
                5 => info.other += 1, // EMPTY
                _ => {
                    let why = "the body holds memory nodes, events, host functions or copies from or to pageable memory; it may hold launches, copies, fills and ifs";
                    return Err(DeviceError::new(call, Code::NotSupported, why));
                }
            }
        }
        Ok(info)
    }
}
