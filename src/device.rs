//! What the runtime asks of an accelerator, and nothing else: memory, streams, events, capture, launch.
//!
//! Every room above reaches a device through [`Device`] alone. Two devices implement it, the
//! simulated [`host`] device and (feature `cuda`) the CUDA driver; [`faulty`] wraps any device and makes
//! chosen calls fail. Each method states what must hold before it (the caller's duty) and what
//! holds after it (the device's).
//!
//! A device handle is cheap to clone and may be used from any thread. Dropping one (a stream, an event, a graph, an executable, the device)
//! touches no capture underway, of whatever thread and in whatever mode, and fails for nobody; only waiting does, but for
//! [`quiesce`](Device::quiesce).

#[cfg(feature = "cuda-any")]
pub mod cuda;
pub mod faulty;
pub mod host;
pub mod kernels;

mod error;
mod kernel;
mod log;
mod pattern;
mod pinned;

use std::fmt;
use std::ops::AddAssign;

pub(crate) use error::{Bare, Broke, EventState};
pub use error::{Call, Code, DeviceError, Fault, FaultReason};
pub use kernel::{HostFn, Kernel, KernelArg, KernelContext, LaunchConfig};
pub use pattern::Pattern;
pub use pinned::PinnedMemory;

/// Result of a device call.
pub type Result<T, E = DeviceError> = std::result::Result<T, E>;

/// An address in a device's memory, in bytes. Zero is the null address.
///
/// It is a number, not a reference: holding one keeps nothing alive.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The null address: what a zero-byte allocation has.
    pub const NULL: DevicePtr = DevicePtr(0);

    /// The address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0.wrapping_add(bytes))
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// How strictly calls that do not belong to a capture are judged while it is underway
/// (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Unsafe calls are refused on every thread, and invalidate the capture.
    Global,
    /// Unsafe calls are refused on the thread that began the capture.
    ThreadLocal,
    /// Unsafe calls are allowed.
    Relaxed,
}

/// Whether a stream captures (`CUstreamCaptureStatus`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureStatus {
    /// Work enqueued on the stream runs.
    None,
    /// Work enqueued on the stream becomes nodes of a graph.
    Active,
    /// The capture broke; it must still be ended, and ending it gives an error.
    Invalidated,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, as the driver gives it.
    pub name: String,
    /// Its number among the devices of its kind.
    pub ordinal: u32,
}

/// A device's physical memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Not mapped by anyone.
    pub free: u64,
    /// In all.
    pub total: u64,
}

/// What a pool tells the device of a range of its memory, in stream order (see [`Device::mark`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mark {
    /// The range has an owner from here on; its bytes are undefined until written.
    Live,
    /// The range has no owner from here on: whoever reads or writes it is wrong.
    Dead,
}

/// One slot of a [`Device::gather`]: where a moving input is copied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherSlot {
    /// Where the bytes go.
    pub dst: DevicePtr,
    /// How many.
    pub bytes: u64,
}

/// What a captured graph holds, by kind of node. The nodes in bodies of ifs are among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphInfo {
    /// Kernel launches, the gather node included.
    pub kernels: usize,
    /// Copies.
    pub copies: usize,
    /// Fills.
    pub fills: usize,
    /// Allocations and frees made by the driver itself; the runtime refuses such a graph.
    pub memory: usize,
    /// Ifs. What reads the predicate is a part of the node.
    pub conditionals: usize,
    /// Everything else (events, host functions).
    pub other: usize,
}

impl GraphInfo {
    /// About how many bytes the driver takes for an executable of it: 10 KiB a node. No driver says; the figure is from public reports of what many
    /// executables took.
    #[must_use]
    pub fn exec_bytes(&self) -> u64 {
        10 * 1024 * self.nodes() as u64
    }

    /// All nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.kernels + self.copies + self.fills + self.memory + self.conditionals + self.other
    }
}

impl AddAssign for GraphInfo {
    fn add_assign(&mut self, other: GraphInfo) {
        self.kernels += other.kernels;
        self.copies += other.copies;
        self.fills += other.fills;
        self.memory += other.memory;
        self.conditionals += other.conditionals;
        self.other += other.other;
    }
}

/// Calls `f` while this thread's calls are judged as in the relaxed mode: for calls that captures of others would mind.
pub(crate) fn relaxed<D: Device, T>(device: &D, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = device.exchange_capture_mode(CaptureMode::Relaxed)?;
    let done = f();
    // Known to work: the same call did just now.
    device.exchange_capture_mode(before)?;
    done
}

/// An accelerator with memory, streams, events and graphs.
///
/// # Errors
/// Every fallible method gives a [`DeviceError`]: the call, the driver's code, and in words what was
/// refused and why. A call that is refused has no effect besides the one its code names
/// (a capture may be invalidated by it). On a capturing stream it says which operation of the capture it was, and once the capture is
/// broken, which refusal broke it.
pub trait Device: Clone + fmt::Debug + Send + Sync + 'static {
    /// An ordered queue of work. Cheap to clone; clones are the same stream.
    type Stream: Clone + PartialEq + fmt::Debug + Send + Sync + 'static;
    /// A point in a stream.
    type Event: fmt::Debug + Send + Sync + 'static;
    /// A loaded kernel. Cheap to clone.
    type Function: Clone + fmt::Debug + Send + Sync + 'static;
    /// A captured graph: a template that cannot run.
    type Graph: fmt::Debug + Send + Sync + 'static;
    /// An executable graph. Dropping it while a launch is in flight is allowed.
    type Exec: fmt::Debug + Send + Sync + 'static;
    /// Page-locked host memory.
    type Pinned: PinnedMemory;

    /// What the device is.
    fn info(&self) -> DeviceInfo;

    /// Whether the other is this device: addresses and streams of one are the other's. Clones are the same device.
    fn is_same(&self, other: &Self) -> bool;

    /// Whether the stream is one of this device's. Calls on a stream that is not are refused.
    fn owns(&self, stream: &Self::Stream) -> bool;

    /// How much physical memory there is.
    fn memory_info(&self) -> Result<MemoryInfo>;

    // ---- memory: addresses are reserved, physical memory is mapped under them --------------

    /// What sizes and addresses of [`map`](Device::map) and [`reserve`](Device::reserve) are multiples of, in bytes.
    fn granularity(&self) -> u64;

    /// Reserves `bytes` (a multiple of the granularity) of addresses. Nothing is mapped there yet; whether physical memory is taken already is
    /// the device's choice. Legal during a capture, in every mode.
    fn reserve(&self, bytes: u64) -> Result<DevicePtr>;

    /// Gives back what [`reserve`](Device::reserve) gave; nothing may be mapped there. Legal during a capture, in every mode. May wait for work.
    fn release(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Maps physical memory under a reserved range that has none mapped. Legal during a capture, in
    /// every mode; waits for nothing. The bytes there are undefined, and live until marked otherwise.
    fn map(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Tells the device at once, not in stream order, that a freshly mapped range is a pool's: nothing in it has an owner until it is marked
    /// [`Live`](Mark::Live). A device without memory checks does nothing.
    fn manage(&self, ptr: DevicePtr, bytes: u64) {
        let _ = (ptr, bytes);
    }

    /// Unmaps what one call of [`map`](Device::map) mapped. Waits for nothing: the caller has seen to it
    /// that no work in flight touches the range. The physical memory is free again now, or (where reserving took it) when the range
    /// is released. A graph captured with the address keeps it, and runs again once something is mapped there.
    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Tells the device in stream order that a range changes hands. A device without memory checks does nothing.
    ///
    /// The simulated device poisons what dies and reports whoever touches it. On a capturing
    /// stream the mark is captured, so that a launch revives what its graph owns; marks are no
    /// nodes and do not count as such.
    fn mark(&self, stream: &Self::Stream, ptr: DevicePtr, bytes: u64, mark: Mark);

    /// Allocates `bytes` (not 0) of page-locked host memory, undefined and [`Live`](Mark::Live). Touches no capture, of whatever thread and in whatever mode.
    /// [`Code::OutOfMemory`] where there is none. Slow (the system locks pages): an [`Allocator`](crate::Allocator::alloc_pinned) keeps what was freed.
    fn alloc_pinned(&self, bytes: u64) -> Result<Self::Pinned>;

    // ---- streams and events -----------------------------------------------------------------

    /// A new stream, which does not order itself with the default stream.
    fn create_stream(&self) -> Result<Self::Stream>;

    /// The default (legacy) stream. It cannot capture.
    fn default_stream(&self) -> Self::Stream;

    /// A small number that names the stream within this device: 0 for the default stream, then in order of creation.
    fn stream_id(&self, stream: &Self::Stream) -> u32;

    /// Waits until the stream's work has run. Reports what that work did wrong.
    fn synchronize(&self, stream: &Self::Stream) -> Result<()>;

    /// Waits until all work of the device has run. Refused while any stream captures, and invalidates that capture.
    fn synchronize_device(&self) -> Result<()>;

    /// Waits until all work of the device that was enqueued before has run, but for what captures hold. Touches no capture, of whatever thread and
    /// in whatever mode, and is refused because of none: so a drop waits, which cannot know whose captures are underway.
    fn quiesce(&self) -> Result<()>;

    /// Whether the stream's work has run.
    fn query(&self, stream: &Self::Stream) -> Result<bool>;

    /// A new event without timing; waiting for it before it is recorded does nothing.
    fn create_event(&self) -> Result<Self::Event>;

    /// A new event that takes the time whenever it is reached, for [`elapsed`](Device::elapsed). Recording one costs the device a little more.
    fn create_timed_event(&self) -> Result<Self::Event>;

    /// Records the event at the stream's end.
    fn record(&self, event: &Self::Event, stream: &Self::Stream) -> Result<()>;

    /// Makes the stream's later work wait for the event's last record. A record that was captured can be waited for in its capture alone: after that has ended, the wait is
    /// refused ([`Code::InvalidValue`]), and where the stream captures, its capture is broken.
    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<()>;

    /// The same as [`record`](Device::record) on a stream that does not capture. On one that does, a node of the graph (`CU_EVENT_RECORD_EXTERNAL`): each
    /// launch records the event, as of the call that launches, and reaches it where the node stands. So streams and other graphs can wait for the middle
    /// of a graph, and the host can ask for it. The capture itself leaves the event as it was. The graph keeps what it needs of the event.
    fn record_external(&self, event: &Self::Event, stream: &Self::Stream) -> Result<()>;

    /// The same as [`wait`](Device::wait) on a stream that does not capture. On one that does, a node of the graph (`CU_EVENT_WAIT_EXTERNAL`): what comes
    /// after it waits for the event's last record before the call that launches, from wherever that was; for nothing, where there was none. Joins
    /// no capture. The graph keeps what it needs of the event.
    fn wait_external(&self, stream: &Self::Stream, event: &Self::Event) -> Result<()>;

    /// The time between two events' last records, in milliseconds: negative where `end` was reached first. Both have
    /// been reached (see [`synchronize_event`](Device::synchronize_event)): nothing is waited for, and no capture touched.
    ///
    /// CUDA's resolution is about half a microsecond. The simulated device's clock moves by a microsecond with each piece of work that it runs.
    ///
    /// # Errors
    /// [`Code::InvalidHandle`] for an event without timing, or that was never recorded; [`Code::InvalidValue`] for one that was last recorded in a capture,
    /// where nothing runs; [`Code::NotReady`] for one that is not reached yet.
    fn elapsed(&self, start: &Self::Event, end: &Self::Event) -> Result<f32>;

    /// Whether the event's last record has been reached.
    fn query_event(&self, event: &Self::Event) -> Result<bool>;

    /// The same as [`query_event`](Device::query_event), for watchers: touches no capture, of whatever thread and in whatever mode. The event was
    /// last recorded outside of captures.
    fn poll_event(&self, event: &Self::Event) -> Result<bool>;

    /// Waits for the event's last record.
    fn synchronize_event(&self, event: &Self::Event) -> Result<()>;

    // ---- work in stream order ------------------------------------------------------------------

    /// Loads a kernel, compiling it where the device needs that. Cached by the device. Do it before
    /// capturing: loading may wait for running kernels.
    fn load(&self, kernel: &Kernel) -> Result<Self::Function>;

    /// Launches a kernel. The arguments are copied at the call.
    fn launch(
        &self,
        stream: &Self::Stream,
        function: &Self::Function,
        config: LaunchConfig,
        args: &[KernelArg],
    ) -> Result<()>;

    /// Copies within the device. Zero bytes: nothing is enqueued. The ranges must not overlap.
    fn copy(&self, stream: &Self::Stream, dst: DevicePtr, src: DevicePtr, bytes: u64)
    -> Result<()>;

    /// Fills a range with a value; address and length are multiples of its size. Captured, one fill (on CUDA two for a value of eight bytes whose halves
    /// differ).
    fn fill_pattern(
        &self,
        stream: &Self::Stream,
        dst: DevicePtr,
        pattern: Pattern,
        bytes: u64,
    ) -> Result<()>;

    /// Sets each byte of a range.
    fn fill(&self, stream: &Self::Stream, dst: DevicePtr, value: u8, bytes: u64) -> Result<()>;

    /// Copies from pageable host memory; `src` has been read when the call returns. Refused on a
    /// capturing stream, without touching the capture: the driver would bake in a host address that nobody keeps. (From pinned memory:
    /// [`copy_from_pinned`](Device::copy_from_pinned).)
    fn write(&self, stream: &Self::Stream, dst: DevicePtr, src: &[u8]) -> Result<()>;

    /// Copies to host memory in stream order and waits for it. Refused on a capturing stream, without touching the capture.
    fn read(&self, stream: &Self::Stream, dst: &mut [u8], src: DevicePtr) -> Result<()>;

    /// Copies from pinned memory, from `offset` of it. `src` is read when the work runs, not at the call: it lives until then, and its bytes stay. Captured, a copy
    /// that reads it anew at each launch: it lives as long as the graph is launched.
    fn copy_from_pinned(
        &self,
        stream: &Self::Stream,
        dst: DevicePtr,
        src: &Self::Pinned,
        offset: u64,
        bytes: u64,
    ) -> Result<()>;

    /// Copies to pinned memory, to `offset` of it. `dst` is written when the work runs (captured, at each launch), and lives as in
    /// [`copy_from_pinned`](Device::copy_from_pinned).
    fn copy_to_pinned(
        &self,
        stream: &Self::Stream,
        dst: &Self::Pinned,
        offset: u64,
        src: DevicePtr,
        bytes: u64,
    ) -> Result<()>;

    /// Copies `sources[i]` into `slots[i]` for all `i`, as one piece of work. Captured, it is the one node whose
    /// sources can be set anew at a launch; a graph holds at most one.
    fn gather(
        &self,
        stream: &Self::Stream,
        slots: &[GatherSlot],
        sources: &[DevicePtr],
    ) -> Result<()>;

    // ---- graphs ---------------------------------------------------------------------------------

    /// Begins a capture on the stream.
    fn begin_capture(&self, stream: &Self::Stream, mode: CaptureMode) -> Result<()>;

    /// How strictly this thread's calls are judged while something captures; gives what held before
    /// (`cuThreadExchangeStreamCaptureMode`). At first it is [`CaptureMode::Global`].
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;

    /// Whether the stream captures. Legal at any time.
    fn capture_status(&self, stream: &Self::Stream) -> Result<CaptureStatus>;

    /// The number of the capture that the stream takes part in, as the one that began it, as one that joined, or in the body of one of its ifs; no other capture of the device ever
    /// has it. `None`
    /// where the stream does not capture, and where the capture is broken. Legal at any time.
    fn capture_id(&self, stream: &Self::Stream) -> Result<Option<u64>>;

    /// Ends the capture that was begun on this stream. Whatever it returns, the stream does not capture any more
    /// (but for [`Code::IllegalState`], where it did not capture at all). Bodies of ifs that are open still end with it, and that is [`Code::StreamCaptureUnjoined`].
    fn end_capture(&self, stream: &Self::Stream) -> Result<Self::Graph>;

    /// Adds an if to the capture that `stream` takes part in: a node that runs a body at each launch at which the predicate holds, which is the byte at
    /// `predicate`, read in stream order; any value but 0 is true. What is enqueued on `body` from here on is the body's, until [`end_if`](Device::end_if)
    /// is called with the same streams on the same thread.
    ///
    /// `body` captures meanwhile, in the mode of the capture it belongs to, and by the same rules: it waits for nothing outside of the body, and what forks off it
    /// joins it again. It may have an if of its own, on `body` itself; such an inner if is a border: streams that forked off the body have joined it before, and events
    /// recorded in the body before are not waited for after. A body holds launches, copies within the device and from and to pinned
    /// memory, fills and ifs, nothing else.
    /// `stream` takes no work meanwhile (a [`mark`](Device::mark) comes after the node). A refusal in a body breaks the whole capture, as one anywhere else in it does.
    ///
    /// # Errors
    /// [`Code::IllegalState`] where `stream` does not capture, or `body` does; [`Code::NotSupported`] on a stream that forked off a body, and from a device without such nodes; on a
    /// body's own stream, of which what it holds so far is closed, those of [`end_if`](Device::end_if), which break the capture.
    fn begin_if(
        &self,
        stream: &Self::Stream,
        predicate: DevicePtr,
        body: &Self::Stream,
    ) -> Result<()> {
        let (_, _) = (predicate, body);
        let detail = "this device has no conditional nodes";
        let error = DeviceError::new(Call::BeginIf, Code::NotSupported, detail);
        Err(self.refuse(stream, error, false))
    }

    /// Ends the body of the last if that was begun on `stream`. Whatever it returns, `body` does not capture any more, and `stream` takes work again; an error
    /// breaks the capture (but for [`Code::IllegalState`], where no such body is open: then nothing happens).
    ///
    /// # Errors
    /// [`Code::StreamCaptureInvalidated`] where the capture is broken; [`Code::StreamCaptureUnjoined`] where a stream that forked off the body has not joined it, or an inner
    /// body is open; [`Code::StreamCaptureWrongThread`]; [`Code::NotSupported`] where the body holds what no body may (memory nodes, events, host functions).
    fn end_if(&self, stream: &Self::Stream, body: &Self::Stream) -> Result<()> {
        let _ = body;
        let detail = "this device has no conditional nodes";
        let error = DeviceError::new(Call::EndIf, Code::IllegalState, detail);
        Err(self.refuse(stream, error, false))
    }

    /// For adaptors, and for whoever refuses a call in the device's place: takes note that a call on this stream was refused with `error` before it
    /// reached the device, and gives the error as the device would have: where the stream captures, with its position there, and with what
    /// broke that capture before. One that has a position is the device's own, and is not counted again. With `invalidate` the refusal breaks the capture.
    fn refuse(&self, stream: &Self::Stream, error: DeviceError, invalidate: bool) -> DeviceError {
        if invalidate && self.capture_status(stream) == Ok(CaptureStatus::Active) {
            // A capturing stream that is waited for: refused, and the capture is invalid.
            let _ = self.synchronize(stream);
        }
        error
    }

    /// What the graph holds.
    fn graph_info(&self, graph: &Self::Graph) -> Result<GraphInfo>;

    /// The graph's picture for debugging, in the DOT language: its nodes with what they do, and their order. Addresses are what they are, so it differs from
    /// run to run; of CUDA it is the driver's (`cuGraphDebugDotPrint`, verbose), whose form differs between drivers. Legal during captures.
    ///
    /// # Errors
    /// The device's; of CUDA also [`Code::OperatingSystem`], since the driver writes it to a file: a temporary one, which is removed again.
    fn graph_dot(&self, graph: &Self::Graph) -> Result<String>;

    /// Makes a graph executable. The template may be dropped afterwards.
    fn instantiate(&self, graph: &Self::Graph) -> Result<Self::Exec>;

    /// Launches an executable. `sources` are the addresses that its gather node reads, in the order of the slots
    /// (empty where it has none); they are taken at the call, so a launch in flight keeps its own.
    /// Returns at once; allocates nothing on the host in steady state.
    fn launch_graph(
        &self,
        exec: &Self::Exec,
        stream: &Self::Stream,
        sources: &[DevicePtr],
    ) -> Result<()>;

    /// [`launch_graph`](Device::launch_graph) for who has the executable alone: a device need not lock it then.
    fn launch_graph_mut(
        &self,
        exec: &mut Self::Exec,
        stream: &Self::Stream,
        sources: &[DevicePtr],
    ) -> Result<()> {
        self.launch_graph(exec, stream, sources)
    }
}
