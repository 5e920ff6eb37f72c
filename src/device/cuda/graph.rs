//! Graphs: what a capture gave, read once; executables whose gather takes new sources at a launch.

use std::fmt;
use std::ptr;
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys;
use smallvec::SmallVec;

use super::conditional::CONDITIONAL;
use super::gather::{KernelNode, Slots};
use super::inner::{Inner, Shared};
use super::stream::{Handle, RawEvent};
use crate::device::{Call, Code, DeviceError, DevicePtr, GraphInfo, Result};
use crate::sync::{Mutex, lock};

/// A captured graph of a [`CudaDevice`](super::CudaDevice): a template.
pub struct CudaGraph(pub(super) Arc<Template>);

pub(super) struct Template {
    pub(super) device: Arc<Inner>,
    /// The driver does not serialise calls on one graph: whoever reads it holds the lock.
    raw: Mutex<Shared<sys::CUgraph>>,
    pub(super) info: GraphInfo,
    /// The nodes of its gather, in the order of their slots.
    gather: Vec<GatherNode>,
    /// The events that its nodes record or wait for.
    events: Vec<Arc<RawEvent>>,
}

/// One launch of a gather kernel in a graph.
#[derive(Clone, Debug)]
struct GatherNode {
    node: Shared<sys::CUgraphNode>,
    params: Shared<sys::CUDA_KERNEL_NODE_PARAMS>,
    /// What the executable's node is set to.
    slots: Slots,
}

/// An executable graph of a [`CudaDevice`](super::CudaDevice).
pub struct CudaExec {
    pub(super) device: Arc<Inner>,
    /// The driver does not serialise calls on one executable: setting its sources and launching it are done under the lock.
    state: Mutex<ExecState>,
    /// The driver names an executable's nodes by those of its template, which therefore stays.
    _template: Option<Arc<Template>>,
    _events: Vec<Arc<RawEvent>>,
}

struct ExecState {
    raw: Shared<sys::CUgraphExec>,
    slots: usize,
    /// What the driver was last told of, for all slots; nothing where that is not sure, because telling it failed.
    sources: SmallVec<[DevicePtr; 4]>,
    gather: Vec<GatherNode>,
}

impl CudaGraph {
    /// Calls a function with the driver's handle, while nobody else uses the graph.
    pub fn with_raw<R>(&self, f: impl FnOnce(sys::CUgraph) -> R) -> R {
        f(lock(&self.0.raw).0)
    }
}

impl CudaExec {
    /// Calls a function with the driver's handle, while nobody else uses the executable.
    pub fn with_raw<R>(&self, f: impl FnOnce(sys::CUgraphExec) -> R) -> R {
        f(lock(&self.state).raw.0)
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGraph({} nodes)", self.0.info.nodes())
    }
}

impl fmt::Debug for CudaExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaExec({} slots)", lock(&self.state).slots)
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        let raw = lock(&self.raw).0;
        if let Some(_ending) = self.device.ending("cuGraphDestroy") {
            // SAFETY: the graph came from a sound capture and has no other owner; executables are independent of it, and those
            // that name its nodes keep it.
            unsafe { (self.device.driver.cuGraphDestroy)(raw) };
        }
    }
}

impl Drop for CudaExec {
    fn drop(&mut self) {
        let raw = lock(&self.state).raw.0;
        if let Some(_ending) = self.device.ending("cuGraphExecDestroy") {
            // SAFETY: the executable has no other owner. The driver lets a launch in flight run to its end.
            unsafe { (self.device.driver.cuGraphExecDestroy)(raw) };
        }
    }
}

/// Ends the capture on a stream, and reads the graph it gave.
pub(super) fn end_capture(device: &Arc<Inner>, stream: &Handle) -> Result<CudaGraph> {
    let call = Call::EndCapture;
    let _current = device.current(call)?;
    if let Some(capture) = device.capture_id(stream) {
        lock(&device.gathered).retain(|other| *other != capture);
    }
    if device.is_body(stream) {
        let why = "the stream captures the body of an if; end that with end_if, and the capture on its own stream";
        device.break_capture(stream);
        let error = DeviceError::new(call, Code::StreamCaptureUnmatched, why);
        return Err(device.refused(Some(stream), 0, error));
    }
    let open = device.close_all_bodies(stream);
    let bodies = lock(&device.begun).bodies(stream.id);
    let broken = device.first_refusal(stream);
    let events = device.take_events(stream);
    let mut raw = ptr::null_mut();
    // SAFETY: the handle keeps the stream alive; the pointer is to a live local.
    let code = unsafe { (device.driver.cuStreamEndCapture)(stream.raw.0, &raw mut raw) };
    device.note_end(stream);
    // What the driver may have written there on an error is no graph, and must not be destroyed.
    let ended = device.check(call, code, || {
        format!("the capture on stream {}", stream.id)
    });
    if let Err(mut error) = ended {
        error.first = broken;
        return Err(device.refused(Some(stream), 0, error));
    }
    let mut template = Template {
        device: device.clone(),
        raw: Mutex::new(Shared(raw)),
        info: bodies,
        gather: Vec::new(),
        events,
    };
    if open {
        let detail = "the body of an if was open; it is over now, with the capture";
        return Err(DeviceError::new(call, Code::StreamCaptureUnjoined, detail));
    }
    template.read(call, raw)?;
    Ok(CudaGraph(Arc::new(template)))
}

impl Template {
    /// Counts the nodes and finds those of the gather, which count as one.
    fn read(&mut self, call: Call, raw: sys::CUgraph) -> Result<()> {
        let device = self.device.clone();
        for node in device.nodes(call, raw)? {
            match device.kind(call, node)? {
                0 => match device.kernel_of(node)? {
                    KernelNode::Gather(slots, params) => self.gather.push(GatherNode {
                        node: Shared(node),
                        params: Shared(params),
                        slots,
                    }),
                    KernelNode::If => {} // counts with its if
                    KernelNode::Other => self.info.kernels += 1,
                },
                1 => self.info.copies += 1,
                2 => self.info.fills += 1,
                10 | 11 => self.info.memory += 1, // MEM_ALLOC, MEM_FREE
                CONDITIONAL => self.info.conditionals += 1,
                _ => self.info.other += 1,
            }
        }
        self.info.kernels += usize::from(!self.gather.is_empty());
        self.gather.sort_by_key(|node| node.slots.first());
        Ok(())
    }
}

/// Makes a graph executable.
pub(super) fn instantiate(template: &Arc<Template>) -> Result<CudaExec> {
    let call = Call::Instantiate;
    let device = &template.device;
    let _current = device.enter(call)?;
    let graph = lock(&template.raw);
    let mut raw = ptr::null_mut();
    // SAFETY: the graph lives, and nobody else uses it meanwhile; the pointer is to a live local.
    let code = unsafe { (device.driver.cuGraphInstantiateWithFlags)(&raw mut raw, graph.0, 0) };
    let made = device.check(call, code, || {
        format!("a graph of {} nodes", template.info.nodes())
    });
    made.map_err(|error| device.refused(None, 0, error))?;
    let gather = template.gather.clone();
    Ok(CudaExec {
        device: device.clone(),
        _template: (!gather.is_empty()).then(|| template.clone()),
        _events: template.events.clone(),
        state: Mutex::new(ExecState {
            raw: Shared(raw),
            slots: gather.iter().map(|node| node.slots.count()).sum(),
            sources: gather
                .iter()
                .flat_map(|node| node.slots.sources())
                .collect(),
            gather,
        }),
    })
}

impl CudaExec {
    /// Launches. The context is current.
    pub(super) fn launch(&self, stream: &Handle, sources: &[DevicePtr]) -> Result<()> {
        lock(&self.state).launch(&self.device, stream, sources)
    }

    /// The same for who has it alone.
    pub(super) fn launch_mut(&mut self, stream: &Handle, sources: &[DevicePtr]) -> Result<()> {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.launch(&self.device, stream, sources)
    }
}

impl ExecState {
    #[inline]
    fn launch(&mut self, device: &Inner, stream: &Handle, sources: &[DevicePtr]) -> Result<()> {
        let call = Call::LaunchGraph;
        if sources.len() != self.slots {
            return Err(self.wrong_sources(call, sources.len()));
        }
        if self.sources.as_slice() != sources {
            self.set_sources(device, call, sources)?;
        }
        // SAFETY: the executable and the stream live as long as their handles, and nobody else uses the executable meanwhile.
        let code = unsafe { (device.driver.cuGraphLaunch)(self.raw.0, stream.raw.0) };
        device.check(call, code, || {
            format!("the launch of a graph on stream {}", stream.id)
        })
    }

    /// Tells the driver other sources than last time.
    #[cold]
    fn set_sources(&mut self, device: &Inner, call: Call, sources: &[DevicePtr]) -> Result<()> {
        let known = std::mem::take(&mut self.sources);
        for node in &mut self.gather {
            let (first, count) = (node.slots.first(), node.slots.count());
            let range = first..first + count;
            if known.get(range.clone()) == Some(&sources[range.clone()]) {
                continue;
            }
            for (index, source) in sources[range].iter().enumerate() {
                node.slots.set_source(index, *source);
            }
            let mut param = [node.slots.as_param()];
            let mut params = node.params.0;
            params.kernelParams = param.as_mut_ptr();
            let set = device.driver.cuGraphExecKernelNodeSetParams_v2;
            // SAFETY: the node is one of the template of this executable, which keeps it; the parameters are those that the driver
            // gave for it, with a pointer to words of the kernel's size, which the driver copies. Launches in flight keep theirs.
            let code = unsafe { set(self.raw.0, node.node.0, &raw const params) };
            device.check(call, code, || format!("new sources for {count} slots"))?;
        }
        self.sources = known;
        self.sources.clear();
        self.sources.extend_from_slice(sources);
        Ok(())
    }

    #[cold]
    fn wrong_sources(&self, call: Call, given: usize) -> DeviceError {
        let slots = self.slots;
        let detail =
            format!("{given} sources are given; the graph's gather node has {slots} slots");
        DeviceError::new(call, Code::InvalidValue, detail)
    }
}

impl Inner {
    /// A graph's nodes.
    pub(super) fn nodes(&self, call: Call, graph: sys::CUgraph) -> Result<Vec<sys::CUgraphNode>> {
        let asked = || "the nodes of a graph".to_owned();
        let mut count = 0;
        // SAFETY: the graph lives; without an array the driver only counts.
        let code = unsafe { (self.driver.cuGraphGetNodes)(graph, ptr::null_mut(), &raw mut count) };
        self.check(call, code, asked)?;
        let mut nodes = vec![ptr::null_mut(); count];
        if count > 0 {
            // SAFETY: the array has room for as many as the driver counted. (With room for none it refuses.)
            let code =
                unsafe { (self.driver.cuGraphGetNodes)(graph, nodes.as_mut_ptr(), &raw mut count) };
            self.check(call, code, asked)?;
        }
        Ok(nodes)
    }

    /// A node's kind, by the driver's number: newer drivers have more of them.
    pub(super) fn kind(&self, call: Call, node: sys::CUgraphNode) -> Result<u32> {
        let mut kind = 0_u32;
        // SAFETY: the node lives; the pointer is to a live number of the enum's size, and read as such.
        let code = unsafe { (self.driver.cuGraphNodeGetType)(node, (&raw mut kind).cast()) };
        self.check(call, code, || "the kind of a node".into())?;
        Ok(kind)
    }
}
