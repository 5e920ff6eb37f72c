//! Ifs inside captures: conditional nodes, with bodies that are captured apart.
//!
//! A driver can capture into the body of a conditional node (`cuStreamBeginCaptureToGraph`). But where such a capture is invalidated, its end frees the body that
//! the node still owns, and the end of the whole capture crashes (reported publicly as cuda-python's issue 2918). So here a body is a capture like any, and its graph goes
//! into the node's body as a child graph once it has ended well. What is broken never comes near the node, so there is nothing to crash on, and nothing to leak.
//!
//! A child graph may hold no conditional node. An inner if therefore cuts its body: what was captured before becomes one child graph, then comes the inner node,
//! and what is captured behind it becomes another.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Weak};

use cudarc::driver::sys;
use smallvec::SmallVec;

use super::driver::SUCCESS;
use super::inner::{Inner, Shared};
use super::module::{Function, Origin};
use super::stream::{self, Handle};
use crate::device::{
    Call, CaptureMode, CaptureStatus, Code, DeviceError, DevicePtr, GraphInfo, Result,
};
use crate::sync::lock;

/// The driver's number for a conditional node.
pub(super) const CONDITIONAL: u32 = 13;

const PTX: &[u8] = include_bytes!("conditional.ptx");

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

/// Where a node comes in a graph.
struct Place {
    graph: sys::CUgraph,
    after: SmallVec<[sys::CUgraphNode; 4]>,
    /// One for each of those, or none at all.
    edges: SmallVec<[sys::CUgraphEdgeData; 4]>,
}

impl Place {
    fn behind(graph: sys::CUgraph, node: Option<Shared<sys::CUgraphNode>>) -> Self {
        Place {
            graph,
            after: node.iter().map(|node| node.0).collect(),
            edges: SmallVec::new(),
        }
    }
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

    /// The kernel that reads a predicate; loaded at the first call.
    fn if_kernel(&self) -> Result<Arc<Function>> {
        if let Some(kernel) = self.if_kernel.get() {
            return Ok(kernel.clone());
        }
        let kernel = self.load_from(&Origin::Image(PTX.into()), "cudagraph_trees_if")?;
        if kernel.params[..] != [8, 8] {
            let detail = format!("{} takes {:?} B", kernel.name, kernel.params);
            return Err(DeviceError::new(Call::BeginIf, Code::NotSupported, detail));
        }
        Ok(self.if_kernel.get_or_init(|| kernel).clone())
    }

    /// Where a stream's next node comes, in the capture that it takes part in.
    fn place(&self, call: Call, stream: &Handle) -> Result<Place> {
        let (mut status, mut id, mut count) = (0_u32, 0, 0);
        let (mut graph, mut after, mut edges) = (ptr::null_mut(), ptr::null(), ptr::null());
        // SAFETY: the handle keeps the stream alive; the pointers are to live locals, the first to a number of the enum's size.
        let code = unsafe {
            (self.driver.cuStreamGetCaptureInfo_v3)(
                stream.raw.0,
                (&raw mut status).cast(),
                &raw mut id,
                &raw mut graph,
                &raw mut after,
                &raw mut edges,
                &raw mut count,
            )
        };
        self.check(call, code, || format!("what stream {} captures", stream.id))?;
        match status {
            1 => {}
            0 => {
                let detail = format!(
                    "stream {} does not capture; an if is a node of a graph",
                    stream.id
                );
                return Err(DeviceError::new(call, Code::IllegalState, detail));
            }
            _ => {
                let detail = format!("stream {} captures, and the capture is broken", stream.id);
                return Err(DeviceError::new(
                    call,
                    Code::StreamCaptureInvalidated,
                    detail,
                ));
            }
        }
        let mut place = Place::behind(graph, None);
        if count > 0 && !after.is_null() {
            // SAFETY: the driver gives arrays of this length, good until the next call on the stream; of edges, none where all are plain.
            unsafe {
                place
                    .after
                    .extend_from_slice(std::slice::from_raw_parts(after, count));
                if !edges.is_null() {
                    place
                        .edges
                        .extend_from_slice(std::slice::from_raw_parts(edges, count));
                }
            }
        }
        Ok(place)
    }

    /// Adds a node to a graph. `params` are those of its type, and what they point to is live.
    fn add_node(
        &self,
        call: Call,
        place: &Place,
        what: &str,
        params: &mut sys::CUgraphNodeParams,
    ) -> Result<sys::CUgraphNode> {
        let mut node = ptr::null_mut();
        let after = match place.after[..] {
            [] => ptr::null(),
            _ => place.after.as_ptr(),
        };
        let edges = match place.edges[..] {
            [] => ptr::null(),
            _ => place.edges.as_ptr(),
        };
        // SAFETY: the graph lives, its capture is this thread's, and the nodes are its own; the arrays have the length that is said, or are left out.
        let code = unsafe {
            (self.driver.cuGraphAddNode_v2)(
                &raw mut node,
                place.graph,
                after,
                edges,
                place.after.len(),
                params,
            )
        };
        self.check(call, code, || what.into())?;
        Ok(node)
    }

    /// Adds an if to a graph: the kernel that reads the predicate, and the node. The node, and its body's graph.
    fn add_if(
        &self,
        call: Call,
        place: &Place,
        kernel: &Function,
        predicate: DevicePtr,
    ) -> Result<(Shared<sys::CUgraphNode>, Shared<sys::CUgraph>)> {
        const ASSIGN_DEFAULT: u32 = 1; // CU_GRAPH_COND_ASSIGN_DEFAULT
        let mut handle: sys::CUgraphConditionalHandle = 0;
        // SAFETY: graph and context live; the pointer is to a live local.
        let code = unsafe {
            (self.driver.cuGraphConditionalHandleCreate)(
                &raw mut handle,
                place.graph,
                self.raw.0,
                0,
                ASSIGN_DEFAULT,
            )
        };
        self.check(call, code, || "a handle for an if".into())?;
        let mut words = [handle, predicate.0];
        let mut args = words
            .each_mut()
            .map(|word| ptr::from_mut(word).cast::<c_void>());
        let mut params = zeroed();
        params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL;
        // SAFETY: zero is a value of each field of this member.
        let launch = unsafe { &mut params.__bindgen_anon_1.kernel };
        (launch.func, launch.kernelParams) = (kernel.raw.0, args.as_mut_ptr());
        (launch.gridDimX, launch.gridDimY, launch.gridDimZ) = (1, 1, 1);
        (launch.blockDimX, launch.blockDimY, launch.blockDimZ) = (1, 1, 1);
        let reads = self.add_node(
            call,
            place,
            "the kernel that reads a predicate",
            &mut params,
        )?;

        let mut params = zeroed();
        params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
        // SAFETY: as above.
        let conditional = unsafe { &mut params.__bindgen_anon_1.conditional };
        conditional.type_ = sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF;
        (conditional.handle, conditional.size, conditional.ctx) = (handle, 1, self.raw.0);
        let place = Place::behind(place.graph, Some(Shared(reads)));
        let node = self.add_node(call, &place, "an if", &mut params)?;
        // SAFETY: the driver has written the address of an array of `size` graphs there, which the node owns.
        let body = unsafe {
            let bodies = params.__bindgen_anon_1.conditional.phGraph_out;
            if bodies.is_null() {
                ptr::null_mut()
            } else {
                *bodies
            }
        };
        if body.is_null() {
            let detail = "the driver gives no graph for the body of an if";
            return Err(DeviceError::new(call, Code::NotSupported, detail));
        }
        Ok((Shared(node), Shared(body)))
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

/// Parameters of a node, with nothing set.
fn zeroed() -> sys::CUgraphNodeParams {
    // SAFETY: a plain struct of the driver's: numbers, an enum of which zero is a value, and a union of plain structs.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::super::ptx;
    use super::PTX;

    #[test]
    fn the_kernel_takes_the_handle_and_the_address() {
        let text = std::str::from_utf8(PTX).unwrap();
        let kernels: Vec<_> = ptx::parameters(text).into_iter().collect();
        assert_eq!(kernels, [("cudagraph_trees_if".into(), 2)]);
    }
}
