//! Captures: who takes part in one, what it has recorded, and how it ends. [`rules`](super::rules) says what is refused meanwhile.

use std::sync::Arc;

use petgraph::graph::NodeIndex;
use petgraph::visit::{Dfs, Reversed};
use slotmap::Key;

use super::conditional::BodyOf;
use super::graph::{Dag, GraphMemory, Template};
use super::state::State;
use super::stream::{CaptureKey, Frontier, StreamKey};
use super::work::Work;
use crate::device::log::Log;
use crate::device::{Call, CaptureMode, CaptureStatus, Code, DeviceError, Result};
use crate::sync::thread::{self, ThreadId};

/// A stream's part in a capture.
pub(super) struct Joined {
    pub(super) capture: CaptureKey,
    /// The nodes that the next one depends on.
    pub(super) after: Frontier,
    /// The stream of the if's body that was begun here and is open.
    pub(super) open: Option<StreamKey>,
}

/// A capture that is underway.
pub(super) struct Capture {
    pub(super) origin: StreamKey,
    pub(super) owner: ThreadId,
    pub(super) mode: CaptureMode,
    /// What it was given, and what broke it; of an if's body, see `root`.
    pub(super) log: Log,
    pub(super) dag: Dag,
    pub(super) streams: Vec<StreamKey>,
    has_gather: bool,
    pub(super) memory: Vec<Arc<GraphMemory>>,
    /// Of an if's body, where it belongs.
    pub(super) body: Option<BodyOf>,
}

impl State {
    pub(super) fn stream_name(&self, key: StreamKey) -> String {
        match self.streams[key].id {
            0 => "the default stream".into(),
            id => format!("stream {id}"),
        }
    }

    /// Adds a node to the capture of a stream that captures.
    pub(super) fn capture(&mut self, key: StreamKey, work: Work) -> Option<NodeIndex> {
        let joined = self.streams[key].joined.as_mut()?;
        let dag = &mut self.captures[joined.capture].dag;
        let node = dag.add_node(work);
        for &before in &joined.after {
            dag.add_edge(before, node, ());
        }
        joined.after = smallvec::smallvec![node];
        Some(node)
    }

    /// Notes that a capture has its one gather node, refused where it has it already.
    pub(super) fn claim_gather(&mut self, call: Call, capture: CaptureKey) -> Result<()> {
        if self.captures[capture].body.is_some() {
            let detail = "a gather is asked for in the body of an if, where no launch could bring its sources; gather before the if";
            return Err(DeviceError::new(call, Code::NotSupported, detail));
        }
        if std::mem::replace(&mut self.captures[capture].has_gather, true) {
            return Err(DeviceError::new(
                call,
                Code::NotSupported,
                "a graph holds at most one gather, and this one has it",
            ));
        }
        Ok(())
    }

    // ---- begin, status, end ------------------------------------------------------------------------

    pub(super) fn begin_capture(&mut self, key: StreamKey, mode: CaptureMode) -> Result<()> {
        let call = Call::BeginCapture;
        if key == self.default_stream {
            let detail = "the default stream cannot capture; capture on a stream that was created";
            return Err(DeviceError::new(
                call,
                Code::StreamCaptureUnsupported,
                detail,
            ));
        }
        if self.streams[key].joined.is_some() {
            let detail = format!(
                "{} captures already; end that capture first",
                self.stream_name(key)
            );
            return Err(DeviceError::new(call, Code::IllegalState, detail));
        }
        self.open_capture(key, mode, None, Dag::new(), Frontier::new());
        Ok(())
    }

    /// A capture of this thread's begins on a stream, with what it has already.
    pub(super) fn open_capture(
        &mut self,
        key: StreamKey,
        mode: CaptureMode,
        body: Option<BodyOf>,
        dag: Dag,
        after: Frontier,
    ) {
        let capture = self.captures.insert(Capture {
            origin: key,
            owner: thread::current().id(),
            mode,
            log: Log::default(),
            dag,
            streams: vec![key],
            has_gather: false,
            memory: Vec::new(),
            body,
        });
        self.streams[key].joined = Some(Joined {
            capture,
            after,
            open: None,
        });
    }

    pub(super) fn capture_status(&self, key: StreamKey) -> Result<CaptureStatus> {
        if key == self.default_stream && self.blocking_capture().is_some() {
            let detail = "a blocking stream captures, and the default stream orders itself with it";
            return Err(DeviceError::new(
                Call::CaptureStatus,
                Code::StreamCaptureImplicit,
                detail,
            ));
        }
        Ok(match &self.streams[key].joined {
            None => CaptureStatus::None,
            Some(joined) if self.is_broken(joined.capture) => CaptureStatus::Invalidated,
            Some(_) => CaptureStatus::Active,
        })
    }

    pub(super) fn capture_id(&self, key: StreamKey) -> Option<u64> {
        let joined = self.streams[key].joined.as_ref()?;
        let sound = !self.is_broken(joined.capture);
        sound.then(|| self.root(joined.capture).data().as_ffi())
    }

    pub(super) fn end_capture(&mut self, key: StreamKey) -> Result<Template> {
        let call = Call::EndCapture;
        let Some(capture) = self.streams[key]
            .joined
            .as_ref()
            .map(|joined| joined.capture)
        else {
            let detail = format!(
                "{} does not capture; begin a capture first",
                self.stream_name(key)
            );
            return Err(DeviceError::new(call, Code::IllegalState, detail));
        };
        if self.captures[capture].origin != key {
            let why = "the capture was begun on another stream; end it there";
            return Err(self.invalidate(capture, call, Code::StreamCaptureUnmatched, why));
        }
        if self.captures[capture].body.is_some() {
            let why = "the stream captures the body of an if; end that with end_if, and the capture on its own stream";
            return Err(self.invalidate(capture, call, Code::StreamCaptureUnmatched, why));
        }
        let open = self.leave_bodies(capture);
        let Some(ended) = self.leave_capture(capture) else {
            return Err(DeviceError::new(
                call,
                Code::IllegalState,
                "the capture is gone",
            ));
        };
        let over = |code, detail: &str| {
            let mut error = DeviceError::new(call, code, detail);
            ended.log.explain(&mut error);
            Err(error)
        };
        if ended.mode != CaptureMode::Relaxed && ended.owner != thread::current().id() {
            let detail = "the capture was begun by another thread; it is over now";
            return over(Code::StreamCaptureWrongThread, detail);
        }
        if ended.log.first().is_some() {
            let detail = "the capture broke while it was underway; it is over now";
            return over(Code::StreamCaptureInvalidated, detail);
        }
        if open {
            let detail = "the body of an if was open; it is over now, with the capture";
            return over(Code::StreamCaptureUnjoined, detail);
        }
        if !is_joined(&ended.dag, &ended.after_origin) {
            let detail = "work was captured on another stream, and the capture's own did not wait for it; it is over now";
            return over(Code::StreamCaptureUnjoined, detail);
        }
        self.check_broken(call)?;
        self.graphs += 1;
        Ok(Template {
            dag: ended.dag,
            memory: ended.memory,
            instantiated: false.into(),
        })
    }

    /// Takes a capture away from all its streams.
    pub(super) fn leave_capture(&mut self, key: CaptureKey) -> Option<Ended> {
        let Capture {
            origin,
            owner,
            mode,
            log,
            dag,
            streams,
            memory,
            ..
        } = self.captures.remove(key)?;
        let mut after_origin = Frontier::new();
        for stream in streams {
            if let Some(joined) = self.streams[stream].joined.take()
                && stream == origin
            {
                after_origin = joined.after;
            }
            self.forget_if_over(stream);
        }
        Some(Ended {
            owner,
            mode,
            log,
            dag,
            memory,
            after_origin,
        })
    }

    /// A stream's last handle is gone: nobody can end the capture that was begun on it.
    pub(super) fn abandon_capture(&mut self, key: StreamKey) {
        let capture = self
            .streams
            .get(key)
            .and_then(|s| s.joined.as_ref())
            .map(|joined| joined.capture);
        if let Some(capture) = capture.filter(|&c| self.captures[c].origin == key) {
            self.leave_bodies(capture);
            self.leave_capture(capture);
        }
    }
}

/// A capture that is over.
pub(super) struct Ended {
    pub(super) owner: ThreadId,
    pub(super) mode: CaptureMode,
    pub(super) log: Log,
    pub(super) dag: Dag,
    pub(super) memory: Vec<Arc<GraphMemory>>,
    pub(super) after_origin: Frontier,
}

/// Whether every node comes before the end of the stream that began the capture. Marks need not: they are no nodes.
pub(super) fn is_joined(dag: &Dag, end: &Frontier) -> bool {
    let mut search = Dfs::empty(Reversed(dag));
    for &node in end {
        search.move_to(node);
        while search.next(Reversed(dag)).is_some() {}
    }
    dag.node_indices()
        .all(|node| dag[node].node_kind().is_none() || search.discovered.contains(node.index()))
}
