//! Streams and events: queues of what was enqueued, and points in them.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use super::capture::Joined;
use super::graph::{Plan, Run};
use super::work::Work;
use crate::device::DevicePtr;

slotmap::new_key_type! {
    pub(super) struct StreamKey;
    pub(super) struct EventKey;
    pub(super) struct CaptureKey;
    pub(super) struct ExecKey;
}

/// A place in a stream: reached once its first `seq` entries are done, or, of the last of them, a launch, this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) stream: StreamKey,
    pub(super) seq: u64,
    pub(super) node: Option<u32>,
}

/// An event.
pub(super) struct Event {
    pub(super) last: Record,
    /// Whether it takes the time.
    pub(super) timed: bool,
    /// The device's clock when the last record was reached.
    pub(super) time: Option<u64>,
}

/// One thing in a stream's queue.
pub(super) enum Entry {
    Work(Box<Work>),
    /// Holds the stream up until the point is reached.
    Wait(Point),
    /// Takes the time of an event that was recorded here.
    Time(EventKey),
    Graph(Launch),
}

/// One launch of an executable graph: the graph as it was then, and what this launch binds.
pub(super) struct Launch {
    pub(super) plan: Arc<Plan>,
    /// The gather node's sources; the buffer is recycled.
    pub(super) sources: Vec<DevicePtr>,
    /// For each of the plan's waits, the event's record before the launch.
    pub(super) waits: Box<[Option<Point>]>,
}

pub(super) struct Stream {
    /// 0 for the default stream, then in order of creation.
    pub(super) id: u32,
    /// Whether it orders itself with the default stream.
    pub(super) blocking: bool,
    pub(super) queue: VecDeque<Entry>,
    /// How many entries were ever put in.
    pub(super) enqueued: u64,
    /// How many of them are done.
    pub(super) done: u64,
    /// Progress of the graph launch at the head of the queue.
    pub(super) run: Run,
    /// The capture it takes part in.
    pub(super) joined: Option<Joined>,
    /// Its last handle was dropped; it goes once its queue is empty.
    pub(super) closed: bool,
}

impl Stream {
    pub(super) fn new(id: u32, blocking: bool) -> Self {
        Stream {
            id,
            blocking,
            queue: VecDeque::new(),
            enqueued: 0,
            done: 0,
            run: Run::default(),
            joined: None,
            closed: false,
        }
    }
}

/// What an event's last record was.
#[derive(Clone, Debug, Default)]
pub(super) enum Record {
    #[default]
    Never,
    /// In a stream that ran.
    Point(Point),
    /// In a stream that captured: a set of nodes of that capture.
    Captured {
        capture: CaptureKey,
        after: Frontier,
    },
}

/// The nodes that whatever is captured next depends on.
pub(super) type Frontier = SmallVec<[petgraph::graph::NodeIndex; 2]>;
