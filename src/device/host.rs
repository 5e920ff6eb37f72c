//! The simulated device: real bytes at real addresses, the driver's rules, schedules drawn from a seed.
//!
//! * **Memory** is mapped under reserved addresses, and sparse. What was never written reads as `0xCD`; what died and was made
//!   live again reads as `0xDB` until it is written. Touching memory that is not mapped or not live is a fault, which names the
//!   kernel and the place. So is a copy that touches pinned host memory which is freed or dead.
//! * **Work** runs when somebody waits (or asks: each query makes a step), in an order drawn from the seed among all streams,
//!   and among the branches of a graph. The same calls with the same seed run in the same order. Queues have no
//!   bound, so whoever launches forever must wait now and then.
//! * **Time** is the device's own: a microsecond for each piece of work, so the same schedule takes the same time.
//! * **Captures** follow the rules that the driver of an H200 gave, code for code. An if's predicate is read when its node runs; a body that
//!   does not run is skipped with its marks.
//! * **Faults are sticky**, as on a GPU, where they cost the context: what is queued never runs (marks are still applied), and
//!   each later call that can fail gives the fault again, but for `unmap`, `release` and the drops, so that memory
//!   can be taken down, and `end_capture`, which ends the capture first. [`HostDevice::clear_fault`] has no counterpart in CUDA.
//!
//! A kernel's host body, or a host function, that calls back into its device gets an error ([`Code::Other`] 800, not permitted).

mod capture;
mod conditional;
mod contents;
mod context;
mod device;
mod dot;
mod driver;
mod gate;
mod graph;
mod handles;
mod liveness;
mod mapping;
mod memory;
mod pinned;
mod rules;
mod schedule;
mod state;
mod stream;
mod work;

use std::fmt;
use std::sync::{Arc, PoisonError};

use self::gate::Gate;
use self::handles::{EventRef, StreamHandle};
pub use self::handles::{HostEvent, HostExec, HostFunction, HostGraph, HostStream};
use self::memory::Memory;
pub use self::pinned::HostPinned;
use self::state::State;
use self::stream::{Event, Record, StreamKey};
pub use self::work::HostBuffer;
use super::{Call, Code, DeviceError, Fault, Result};
use crate::sync::{Mutex, MutexGuard};

/// What handles and devices share.
struct Inner {
    state: Mutex<State>,
    gate: Arc<Gate>,
    default_stream: StreamKey,
    seed: u64,
    granularity: u64,
    /// Whether memory has owners: without, marks do nothing.
    ownership: bool,
    pinned: pinned::Counts,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostDevice(seed {})", self.seed)
    }
}

/// A device made of host memory; see the [module](self). Clones are the same device.
#[derive(Clone)]
pub struct HostDevice {
    inner: Arc<Inner>,
}

/// Chooses what a [`HostDevice`] is like.
#[derive(Clone, Debug)]
pub struct HostBuilder {
    seed: u64,
    memory: u64,
    granularity: u64,
    ownership: bool,
}

/// What a device holds and has done, for tests that look for leaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCounts {
    /// Kernel launches accepted, captured ones included.
    pub launches: u64,
    /// Graph launches accepted.
    pub graph_launches: u64,
    /// Kernels that ran to their end.
    pub kernels_run: u64,
    /// Bytes of physical memory in use.
    pub mapped_bytes: u64,
    /// Ranges that have memory.
    pub mapped_ranges: usize,
    /// Ranges of addresses reserved.
    pub reserved_ranges: usize,
    /// Bytes of pinned host memory allocated.
    pub pinned_bytes: u64,
    /// Streams that are alive or have work queued, the default stream not included.
    pub streams: usize,
    /// Events alive.
    pub events: usize,
    /// Captures underway.
    pub captures: usize,
    /// Captured graphs alive.
    pub graphs: usize,
    /// Executables alive.
    pub execs: usize,
}

impl HostBuilder {
    /// What the schedule is drawn from. Default: 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// How much physical memory there is, in bytes. Default: 64 GiB, of which the host spends what is written.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// What mapped sizes and addresses are multiples of, in bytes: a power of two, at least the host's page. Default: 2 MiB.
    #[must_use]
    pub fn granularity(mut self, bytes: u64) -> Self {
        self.granularity = bytes;
        self
    }

    /// Whether memory without an owner may not be touched. Default: yes. Without the check whoever writes last is right, as on a GPU:
    /// for showing what a wrong order of replays does to the bytes.
    #[must_use]
    pub fn check_ownership(mut self, check: bool) -> Self {
        self.ownership = check;
        self
    }

    /// The device.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] where the granularity cannot be had.
    pub fn build(self) -> Result<HostDevice> {
        let page = rustix::param::page_size() as u64;
        if !self.granularity.is_power_of_two() || self.granularity < page {
            let detail = format!(
                "a granularity of {} B is asked for; it must be a power of two, and at least {page} B",
                self.granularity
            );
            return Err(DeviceError::new(
                Call::Driver("cuInit"),
                Code::InvalidValue,
                detail,
            ));
        }
        Ok(self.assemble())
    }

    fn assemble(self) -> HostDevice {
        let gate = Arc::new(Gate::default());
        let state = State::new(
            Memory::new(self.memory, self.granularity),
            self.seed,
            gate.clone(),
        );
        let HostBuilder {
            seed,
            granularity,
            ownership,
            ..
        } = self;
        let default_stream = state.default_stream;
        HostDevice {
            inner: Arc::new(Inner {
                state: Mutex::new(state),
                gate,
                default_stream,
                seed,
                granularity,
                ownership,
                pinned: pinned::Counts::default(),
            }),
        }
    }
}

impl Default for HostDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl HostDevice {
    /// A device with 64 GiB of memory, a granularity of 2 MiB (as CUDA's) and seed 0.
    #[must_use]
    pub fn new() -> Self {
        Self::builder().assemble()
    }

    /// A device of another kind than [`new`](HostDevice::new) gives.
    #[must_use]
    pub fn builder() -> HostBuilder {
        // A granularity that some host's page exceeds would be refused by `map`, with words.
        HostBuilder {
            seed: 0,
            memory: 64 << 30,
            granularity: 2 << 20,
            ownership: true,
        }
    }

    /// What the schedule is drawn from.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.inner.seed
    }

    /// What the device holds and has done.
    #[must_use]
    pub fn counts(&self) -> HostCounts {
        let Ok(state) = self.lock(Call::Driver("counts")) else {
            return HostCounts::default();
        };
        HostCounts {
            launches: state.accepted.launches,
            graph_launches: state.accepted.graph_launches,
            kernels_run: state.world.kernels_run,
            mapped_bytes: state.world.memory.mapped_bytes(),
            mapped_ranges: state.world.memory.mapped_ranges(),
            reserved_ranges: state.world.memory.reserved_ranges(),
            pinned_bytes: self.inner.pinned.bytes(),
            streams: state.streams.len() - 1,
            events: state.events.len(),
            captures: state.captures.len(),
            graphs: state.graphs,
            execs: state.execs.len(),
        }
    }

    /// Lets a device that a fault stopped work again, with empty queues, and gives the fault. CUDA has no such call: there, the
    /// context is lost.
    pub fn clear_fault(&self) -> Option<Fault> {
        let broken = self.lock(Call::Driver("clear_fault")).ok()?.broken.take()?;
        broken.fault.map(|fault| *fault)
    }

    /// Takes the lock, unless this thread has it: a kernel's body cannot call its device.
    fn lock(&self, call: Call) -> Result<MutexGuard<'_, State>> {
        if self.inner.gate.is_inside() {
            let detail = "a kernel's body or a host function calls the device that runs it; it may only use its context";
            return Err(DeviceError::new(call, Code::Other(800), detail));
        }
        let mut state = self
            .inner
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        state.settle();
        Ok(state)
    }

    /// Takes the lock for a call that a stopped device refuses.
    fn enter(&self, call: Call) -> Result<MutexGuard<'_, State>> {
        let state = self.lock(call)?;
        state.check_broken(call)?;
        Ok(state)
    }

    /// The same for a call on a stream.
    fn enter_on(
        &self,
        call: Call,
        stream: &HostStream,
    ) -> Result<(MutexGuard<'_, State>, StreamKey)> {
        self.check_ours(call, "stream", &stream.0.device)?;
        Ok((self.enter(call)?, stream.0.key))
    }

    /// Makes a call on a stream. Where the stream captures, it is one of the capture's operations, or refused as such.
    fn on<T>(
        &self,
        call: Call,
        stream: &HostStream,
        f: impl FnOnce(&mut State, StreamKey) -> Result<T>,
    ) -> Result<T> {
        let (mut state, key) = self.enter_on(call, stream)?;
        state.on(call, key, |state| f(state, key))
    }

    fn check_ours(&self, call: Call, what: &str, device: &Arc<Inner>) -> Result<()> {
        if Arc::ptr_eq(&self.inner, device) {
            return Ok(());
        }
        Err(DeviceError::new(
            call,
            Code::InvalidValue,
            format!("the {what} belongs to another device"),
        ))
    }

    fn stream_handle(&self, key: StreamKey, id: u32) -> HostStream {
        HostStream(Arc::new(StreamHandle {
            device: self.inner.clone(),
            key,
            id,
        }))
    }

    fn new_event(&self, call: Call, timed: bool) -> Result<HostEvent> {
        let event = Event {
            last: Record::Never,
            timed,
            time: None,
        };
        let key = self.enter(call)?.events.insert(event);
        Ok(HostEvent {
            device: self.inner.clone(),
            held: Arc::new(EventRef(key, self.inner.gate.clone())),
        })
    }

    fn new_stream(&self, call: Call, blocking: bool) -> Result<HostStream> {
        let (key, id) = self.enter(call)?.open_stream(blocking);
        Ok(self.stream_handle(key, id))
    }

    /// An event's last record, for a call of the host that asks or waits for it.
    fn enter_event(
        &self,
        call: Call,
        event: &HostEvent,
    ) -> Result<(MutexGuard<'_, State>, Record)> {
        self.check_ours(call, "event", &event.device)?;
        let mut state = self.enter(call)?;
        let record = state.events[event.key()].last.clone();
        state.refuse_captured(call, &record)?;
        state.refuse_unsafe(call)?;
        Ok((state, record))
    }
}
