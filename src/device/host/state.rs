//! Everything behind the device's lock, and how work gets into a stream.

use std::collections::HashMap;
use std::sync::Arc;

use slotmap::SlotMap;

use super::capture::Capture;
use super::gate::{Deferred, Gate};
use super::graph::Plan;
use super::memory::Memory;
use super::schedule::Rng;
use super::stream::{
    CaptureKey, Entry, Event, EventKey, ExecKey, Launch, Point, Record, Stream, StreamKey,
};
use super::work::{Body, Broken, Work, World};
use crate::device::{Call, CaptureMode, Code, DeviceError, DevicePtr, Result};
use crate::sync::thread::ThreadId;

/// What made a range that the driver's own allocator gave out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Allocated {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemHostAlloc`.
    Host,
    /// `cuMemAllocAsync` on a stream that did not capture.
    Async,
    /// `cuMemAllocAsync` in this capture.
    Graph(CaptureKey),
}

/// Counts of work accepted; see `HostCounts`.
#[derive(Default)]
pub(super) struct Accepted {
    pub(super) launches: u64,
    pub(super) graph_launches: u64,
}

pub(super) struct State {
    pub(super) world: World,
    pub(super) streams: SlotMap<StreamKey, Stream>,
    pub(super) default_stream: StreamKey,
    pub(super) next_stream: u32,
    /// How many streams order themselves with the default stream.
    pub(super) blocking_streams: usize,
    /// The streams whose queue is not empty.
    pub(super) busy: Vec<StreamKey>,
    pub(super) events: SlotMap<EventKey, Event>,
    pub(super) captures: SlotMap<CaptureKey, Capture>,
    /// The capture mode of threads that exchanged it for another than the global one.
    pub(super) thread_modes: HashMap<ThreadId, CaptureMode>,
    pub(super) execs: SlotMap<ExecKey, Arc<Plan>>,
    pub(super) graphs: usize,
    /// Loaded kernels, by name and host body.
    pub(super) bodies: HashMap<(String, usize), Arc<Body>>,
    pub(super) allocated: HashMap<u64, Allocated>,
    pub(super) broken: Option<Broken>,
    pub(super) rng: Rng,
    /// Source buffers of launches that are over.
    pub(super) spare: Vec<Vec<DevicePtr>>,
    /// Scratch of the scheduler.
    pub(super) choices: Vec<StreamKey>,
    pub(super) accepted: Accepted,
    pub(super) gate: Arc<Gate>,
}

impl State {
    pub(super) fn new(memory: Memory, seed: u64, gate: Arc<Gate>) -> Self {
        let mut streams = SlotMap::with_key();
        let default_stream = streams.insert(Stream::new(0, false));
        State {
            world: World::new(memory),
            streams,
            default_stream,
            next_stream: 1,
            blocking_streams: 0,
            busy: Vec::new(),
            events: SlotMap::with_key(),
            captures: SlotMap::with_key(),
            thread_modes: HashMap::new(),
            execs: SlotMap::with_key(),
            graphs: 0,
            bodies: HashMap::new(),
            allocated: HashMap::new(),
            broken: None,
            rng: Rng::new(seed),
            spare: Vec::new(),
            choices: Vec::new(),
            accepted: Accepted::default(),
            gate,
        }
    }

    /// Gives the error that stopped the device, if one did.
    pub(super) fn check_broken(&self, call: Call) -> Result<()> {
        self.broken
            .as_ref()
            .map_or(Ok(()), |broken| Err(broken.error(call)))
    }

    /// Does what dropped handles left to be done.
    pub(super) fn settle(&mut self) {
        while let Some(due) = self.gate.take_due() {
            for what in due {
                match what {
                    Deferred::Stream(key) => self.close_stream(key),
                    Deferred::Event(key) => drop(self.events.remove(key)),
                    Deferred::Exec(key) => drop(self.execs.remove(key)),
                    Deferred::Graph => self.graphs -= 1,
                    Deferred::GraphMemory(ptr, bytes) => {
                        self.allocated.remove(&ptr.0);
                        let call = Call::Driver("cuGraphDestroy");
                        // It has memory only if a launch got that far.
                        let _ = self.world.memory.unmap(call, ptr, bytes);
                        let _ = self.world.memory.release(call, ptr, bytes);
                    }
                }
            }
        }
    }

    pub(super) fn open_stream(&mut self, blocking: bool) -> (StreamKey, u32) {
        let id = self.next_stream;
        self.next_stream += 1;
        self.blocking_streams += usize::from(blocking);
        (self.streams.insert(Stream::new(id, blocking)), id)
    }

    fn close_stream(&mut self, key: StreamKey) {
        self.abandon_capture(key);
        if let Some(stream) = self.streams.get_mut(key) {
            stream.closed = true;
            self.forget_if_over(key);
        }
    }

    /// Removes a stream without handles once nothing is queued on it and no capture knows it.
    pub(super) fn forget_if_over(&mut self, key: StreamKey) {
        let over = |s: &Stream| s.closed && s.queue.is_empty() && s.joined.is_none();
        if self.streams.get(key).is_some_and(over)
            && let Some(stream) = self.streams.remove(key)
        {
            self.blocking_streams -= usize::from(stream.blocking);
        }
    }

    /// Puts an entry at a stream's end.
    pub(super) fn enqueue(&mut self, key: StreamKey, entry: Entry) {
        if self.blocking_streams > 0 {
            self.order_with_default(key);
        }
        self.push(key, entry);
    }

    fn push(&mut self, key: StreamKey, entry: Entry) {
        let stream = &mut self.streams[key];
        if stream.queue.is_empty() {
            self.busy.push(key);
        }
        stream.queue.push_back(entry);
        stream.enqueued += 1;
    }

    /// The default stream and the blocking streams wait for what is queued on the other side.
    fn order_with_default(&mut self, key: StreamKey) {
        let of_default = key == self.default_stream;
        if !of_default && !self.streams[key].blocking {
            return;
        }
        for place in 0..self.busy.len() {
            let other = self.busy[place];
            let there = &self.streams[other];
            if if of_default {
                there.blocking
            } else {
                other == self.default_stream
            } {
                let point = Point {
                    stream: other,
                    seq: there.enqueued,
                    node: None,
                };
                self.push(key, Entry::Wait(point));
            }
        }
    }

    /// Where a stream ends just now.
    pub(super) fn end_of(&self, key: StreamKey) -> Point {
        Point {
            stream: key,
            seq: self.streams[key].enqueued,
            node: None,
        }
    }

    /// Work on a stream: into its queue, or into the capture that the stream takes part in.
    pub(super) fn submit(&mut self, call: Call, key: StreamKey, work: Work) -> Result<()> {
        match self.admit(call, key)? {
            None => self.enqueue(key, Entry::Work(Box::new(work))),
            Some(_) => drop(self.capture(key, work)),
        }
        Ok(())
    }

    /// A mark on a stream. Where the body of an if is open there, it comes after the if.
    pub(super) fn mark(&mut self, call: Call, key: StreamKey, mark: Work) {
        match self.valid_capture(call, key) {
            Ok(Some(_)) => drop(self.capture(key, mark)),
            Ok(None) => drop(self.submit(call, key, mark)),
            Err(_) => {}
        }
    }

    /// A launch of an executable.
    pub(super) fn launch(
        &mut self,
        call: Call,
        exec: ExecKey,
        key: StreamKey,
        sources: &[DevicePtr],
    ) -> Result<()> {
        self.refuse_capturing(call, key, "a graph cannot be launched into a capture")?;
        let Some(plan) = self.execs.get(exec) else {
            return Err(DeviceError::new(
                call,
                Code::InvalidValue,
                "the executable belongs to another device",
            ));
        };
        if plan.slots != sources.len() {
            let detail = format!(
                "{} sources are given; the graph's gather node has {} slots",
                sources.len(),
                plan.slots
            );
            return Err(DeviceError::new(call, Code::InvalidValue, detail));
        }
        let mut launch = Launch {
            plan: Arc::clone(plan),
            sources: Vec::new(),
            waits: Box::default(),
        };
        if !sources.is_empty() {
            launch.sources = self.spare.pop().unwrap_or_default();
            launch.sources.extend_from_slice(sources);
        }
        if !launch.plan.waits.is_empty() {
            let recorded = |(_, event): &(u32, EventKey)| match self.events.get(*event)?.last {
                Record::Point(point) => Some(point),
                _ => None,
            };
            launch.waits = launch.plan.waits.iter().map(recorded).collect();
        }
        self.accepted.graph_launches += 1;
        let plan = Arc::clone(&launch.plan);
        self.enqueue(key, Entry::Graph(launch));
        for &(node, event) in &plan.records {
            let point = Point {
                node: Some(node),
                ..self.end_of(key)
            };
            self.note_record(event, Record::Point(point));
        }
        Ok(())
    }

    /// An event's last record is this one now.
    pub(super) fn note_record(&mut self, event: EventKey, record: Record) {
        if let Some(event) = self.events.get_mut(event) {
            (event.last, event.time) = (record, None);
        }
    }

    /// Records an event at a stream's end.
    pub(super) fn record_here(&mut self, event: EventKey, key: StreamKey) {
        if self.events[event].timed {
            self.enqueue(key, Entry::Time(event));
        }
        let end = self.end_of(key);
        self.note_record(event, Record::Point(end));
    }
}
