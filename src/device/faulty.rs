//! An adaptor that makes chosen calls of a device fail.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, DeviceInfo, DevicePtr, GatherSlot,
    GraphInfo, Kernel, KernelArg, LaunchConfig, Mark, MemoryInfo, Pattern, Result,
};

/// A device whose n-th call of a kind fails, for tests of what then becomes of everything else.
///
/// A call that fails does not reach the inner device, but for [`Call::EndCapture`], which ends the inner capture
/// and drops its graph, and [`Call::EndIf`], which ends the inner body and breaks the capture: after them a stream does not capture, whatever they return. On a capturing stream it counts as an operation of the
/// capture all the same ([`Device::refuse`]). A failure is used up by the call it
/// was meant for. Clones share the inner device, the failures and the counts.
#[derive(Clone, Debug)]
pub struct Faulty<D: Device> {
    device: D,
    plan: Arc<Mutex<Plan>>,
}

#[derive(Debug, Default)]
struct Plan {
    calls: HashMap<Call, u64>,
    failures: Vec<Failure>,
}

#[derive(Debug)]
struct Failure {
    /// Which call, by the count that it has.
    at: u64,
    error: DeviceError,
    invalidate: bool,
}

impl<D: Device> Faulty<D> {
    /// A device whose calls all reach `device`, until told otherwise.
    pub fn new(device: D) -> Self {
        Faulty {
            device,
            plan: Arc::default(),
        }
    }

    /// Makes the `nth` next call of this kind (1 is the next) fail with `code`.
    pub fn fail(&self, call: Call, nth: u64, code: Code) -> &Self {
        self.fail_with(nth, DeviceError::new(call, code, "made to fail"))
    }

    /// The same with an error of the caller's choice; which calls it counts is said by [`DeviceError::call`].
    pub fn fail_with(&self, nth: u64, error: DeviceError) -> &Self {
        self.add(nth, error, false)
    }

    /// The same as [`fail`](Faulty::fail), and where the call is made on a capturing stream, that capture is invalidated, as many
    /// of the driver's refusals do. Only calls on a stream can do that.
    pub fn fail_invalidating(&self, call: Call, nth: u64, code: Code) -> &Self {
        self.add(
            nth,
            DeviceError::new(call, code, "made to fail, and to invalidate the capture"),
            true,
        )
    }

    /// Forgets all failures that did not happen yet. Counts go on.
    pub fn clear(&self) -> &Self {
        self.plan().failures.clear();
        self
    }

    /// How many calls of this kind were made, failed ones included.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.plan().calls.get(&call).copied().unwrap_or(0)
    }

    /// The device within.
    #[must_use]
    pub fn inner(&self) -> &D {
        &self.device
    }

    fn plan(&self) -> std::sync::MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, nth: u64, error: DeviceError, invalidate: bool) -> &Self {
        let mut plan = self.plan();
        let at = plan.calls.get(&error.call).copied().unwrap_or(0) + nth.max(1);
        plan.failures.push(Failure {
            at,
            error,
            invalidate,
        });
        drop(plan);
        self
    }

    /// Counts a call, and gives the failure that was meant for it.
    fn count(&self, call: Call) -> Option<Failure> {
        let mut plan = self.plan();
        let count = plan.calls.entry(call).or_insert(0);
        *count += 1;
        let count = *count;
        let meant = plan
            .failures
            .iter()
            .position(|failure| failure.error.call == call && failure.at == count)?;
        Some(plan.failures.swap_remove(meant))
    }

    fn check(&self, call: Call) -> Result<()> {
        self.count(call)
            .map_or(Ok(()), |failure| Err(failure.error))
    }

    /// The same for a call on a stream.
    fn check_on(&self, call: Call, stream: &D::Stream) -> Result<()> {
        let Some(failure) = self.count(call) else {
            return Ok(());
        };
        Err(self
            .device
            .refuse(stream, failure.error, failure.invalidate))
    }
}

/// Methods that are counted, may fail, and else are the inner device's. After `on`, the failure may invalidate the capture
/// of the stream named there.
macro_rules! forward {
    ($($call:ident $(on $on:ident)? : fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            fn $name(&self, $($arg: $type),*) -> Result<$result> {
                forward!(@check self, Call::$call $(, $on)?)?;
                self.device.$name($($arg),*)
            }
        )*
    };
    (@check $self:ident, $call:expr) => { $self.check($call) };
    (@check $self:ident, $call:expr, $on:ident) => { $self.check_on($call, $on) };
}

impl<D: Device> Device for Faulty<D> {
    type Stream = D::Stream;
    type Event = D::Event;
    type Function = D::Function;
    type Graph = D::Graph;
    type Exec = D::Exec;
    type Pinned = D::Pinned;

    fn info(&self) -> DeviceInfo {
        self.device.info()
    }

    fn is_same(&self, other: &Self) -> bool {
        self.device.is_same(&other.device)
    }

    fn owns(&self, stream: &D::Stream) -> bool {
        self.device.owns(stream)
    }

    fn granularity(&self) -> u64 {
        self.device.granularity()
    }

    fn manage(&self, ptr: DevicePtr, bytes: u64) {
        self.device.manage(ptr, bytes);
    }

    fn mark(&self, stream: &D::Stream, ptr: DevicePtr, bytes: u64, mark: Mark) {
        self.device.mark(stream, ptr, bytes, mark);
    }

    fn default_stream(&self) -> D::Stream {
        self.device.default_stream()
    }

    fn stream_id(&self, stream: &D::Stream) -> u32 {
        self.device.stream_id(stream)
    }

    fn end_capture(&self, stream: &D::Stream) -> Result<D::Graph> {
        let failure = self.count(Call::EndCapture);
        let ended = self.device.end_capture(stream);
        let Some(Failure { mut error, .. }) = failure else {
            return ended;
        };
        // What had broken the capture by then goes before.
        let broken = ended.err().and_then(|error| error.first);
        error.first = error.first.or(broken);
        Err(error)
    }

    fn end_if(&self, stream: &D::Stream, body: &D::Stream) -> Result<()> {
        let failure = self.count(Call::EndIf);
        let ended = self.device.end_if(stream, body);
        match failure {
            Some(Failure { error, .. }) => Err(self.device.refuse(stream, error, true)),
            None => ended,
        }
    }

    fn refuse(&self, stream: &D::Stream, error: DeviceError, invalidate: bool) -> DeviceError {
        self.device.refuse(stream, error, invalidate)
    }

    forward! {
        MemoryInfo: fn memory_info() -> MemoryInfo;
        Reserve: fn reserve(bytes: u64) -> DevicePtr;
        Release: fn release(ptr: DevicePtr, bytes: u64) -> ();
        Map: fn map(ptr: DevicePtr, bytes: u64) -> ();
        Unmap: fn unmap(ptr: DevicePtr, bytes: u64) -> ();
        AllocPinned: fn alloc_pinned(bytes: u64) -> D::Pinned;
        CreateStream: fn create_stream() -> D::Stream;
        Synchronize on stream: fn synchronize(stream: &D::Stream) -> ();
        SynchronizeDevice: fn synchronize_device() -> ();
        Quiesce: fn quiesce() -> ();
        Query on stream: fn query(stream: &D::Stream) -> bool;
        CreateEvent: fn create_event() -> D::Event;
        CreateTimedEvent: fn create_timed_event() -> D::Event;
        Record on stream: fn record(event: &D::Event, stream: &D::Stream) -> ();
        Wait on stream: fn wait(stream: &D::Stream, event: &D::Event) -> ();
        RecordExternal on stream: fn record_external(event: &D::Event, stream: &D::Stream) -> ();
        WaitExternal on stream: fn wait_external(stream: &D::Stream, event: &D::Event) -> ();
        Elapsed: fn elapsed(start: &D::Event, end: &D::Event) -> f32;
        QueryEvent: fn query_event(event: &D::Event) -> bool;
        PollEvent: fn poll_event(event: &D::Event) -> bool;
        SynchronizeEvent: fn synchronize_event(event: &D::Event) -> ();
        Load: fn load(kernel: &Kernel) -> D::Function;
        Launch on stream: fn launch(stream: &D::Stream, function: &D::Function, config: LaunchConfig, args: &[KernelArg]) -> ();
        Copy on stream: fn copy(stream: &D::Stream, dst: DevicePtr, src: DevicePtr, bytes: u64) -> ();
        Fill on stream: fn fill(stream: &D::Stream, dst: DevicePtr, value: u8, bytes: u64) -> ();
        FillPattern on stream: fn fill_pattern(stream: &D::Stream, dst: DevicePtr, pattern: Pattern, bytes: u64) -> ();
        Write on stream: fn write(stream: &D::Stream, dst: DevicePtr, src: &[u8]) -> ();
        Read on stream: fn read(stream: &D::Stream, dst: &mut [u8], src: DevicePtr) -> ();
        CopyFromPinned on stream: fn copy_from_pinned(stream: &D::Stream, dst: DevicePtr, src: &D::Pinned, offset: u64, bytes: u64) -> ();
        CopyToPinned on stream: fn copy_to_pinned(stream: &D::Stream, dst: &D::Pinned, offset: u64, src: DevicePtr, bytes: u64) -> ();
        Gather on stream: fn gather(stream: &D::Stream, slots: &[GatherSlot], sources: &[DevicePtr]) -> ();
        BeginCapture on stream: fn begin_capture(stream: &D::Stream, mode: CaptureMode) -> ();
        BeginIf on stream: fn begin_if(stream: &D::Stream, predicate: DevicePtr, body: &D::Stream) -> ();
        ExchangeCaptureMode: fn exchange_capture_mode(mode: CaptureMode) -> CaptureMode;
        CaptureStatus on stream: fn capture_status(stream: &D::Stream) -> CaptureStatus;
        CaptureId on stream: fn capture_id(stream: &D::Stream) -> Option<u64>;
        GraphInfo: fn graph_info(graph: &D::Graph) -> GraphInfo;
        GraphDot: fn graph_dot(graph: &D::Graph) -> String;
        Instantiate: fn instantiate(graph: &D::Graph) -> D::Exec;
        LaunchGraph on stream: fn launch_graph(exec: &D::Exec, stream: &D::Stream, sources: &[DevicePtr]) -> ();
    }
}
