//! The nodes of an if: the kernel that reads the predicate, and the conditional node with its body's graph.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use smallvec::SmallVec;

use super::super::inner::{Inner, Shared};
use super::super::module::{Function, Origin};
use super::super::stream::Handle;
use crate::device::{Call, Code, DeviceError, DevicePtr, Result};

/// The driver's number for a conditional node.
pub(in crate::device::cuda) const CONDITIONAL: u32 = 13;

const PTX: &[u8] = include_bytes!("if.ptx");

/// Where a node comes in a graph.
pub(super) struct Place {
    pub(super) graph: sys::CUgraph,
    pub(super) after: SmallVec<[sys::CUgraphNode; 4]>,
    /// One for each of those, or none at all.
    pub(super) edges: SmallVec<[sys::CUgraphEdgeData; 4]>,
}

impl Place {
    pub(super) fn behind(graph: sys::CUgraph, node: Option<Shared<sys::CUgraphNode>>) -> Self {
        Place {
            graph,
            after: node.iter().map(|node| node.0).collect(),
            edges: SmallVec::new(),
        }
    }
}

impl Inner {
    /// The kernel that reads a predicate; loaded at the first call.
    pub(super) fn if_kernel(&self) -> Result<Arc<Function>> {
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
    pub(super) fn place(&self, call: Call, stream: &Handle) -> Result<Place> {
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
    pub(super) fn add_node(
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
    pub(super) fn add_if(
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
}

/// Parameters of a node, with nothing set.
pub(super) fn zeroed() -> sys::CUgraphNodeParams {
    // SAFETY: a plain struct of the driver's: numbers, an enum of which zero is a value, and a union of plain structs.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::super::super::ptx;
    use super::PTX;

    #[test]
    fn the_kernel_takes_the_handle_and_the_address() {
        let text = std::str::from_utf8(PTX).unwrap();
        let kernels: Vec<_> = ptx::parameters(text).into_iter().collect();
        assert_eq!(kernels, [("cudagraph_trees_if".into(), 2)]);
    }
}
