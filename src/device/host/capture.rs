//! Captures: who takes part in one, and which calls are refused while it is underway.
//!
//! The rules are those that the driver of an H200 gave (driver 580, CUDA 13.0), code for code: which call is refused, which
//! refusal invalidates the capture, what ending it gives. Refusals that were not measured follow CUDA's documentation.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use petgraph::graph::NodeIndex;
use petgraph::visit::{Dfs, Reversed};

use super::graph::{Dag, GraphMemory, Template};
use super::state::State;
use super::stream::{CaptureKey, Frontier, Record, StreamKey};
use super::work::Work;
use crate::device::{Call, CaptureMode, CaptureStatus, Code, DeviceError, Result};

/// A stream's part in a capture.
pub(super) struct Joined {
    pub(super) capture: CaptureKey,
    /// The nodes that the next one depends on.
    pub(super) after: Frontier,
}

/// A capture that is underway.
pub(super) struct Capture {
    origin: StreamKey,
    owner: ThreadId,
    mode: CaptureMode,
    /// The call that broke it.
    broken_by: Option<Call>,
    dag: Dag,
    streams: Vec<StreamKey>,
    has_gather: bool,
    pub(super) memory: Vec<Arc<GraphMemory>>,
}

impl State {
    fn stream_name(&self, key: StreamKey) -> String {
        match self.streams[key].id {
            0 => "the default stream".into(),
            id => format!("stream {id}"),
        }
    }

    /// Breaks a capture, and says so.
    fn invalidate(
        &mut self,
        capture: CaptureKey,
        call: Call,
        code: Code,
        why: &str,
    ) -> DeviceError {
        let detail = match self.captures.get_mut(capture) {
            None => why.to_owned(),
            Some(underway) => {
                underway.broken_by.get_or_insert(call);
                let origin = underway.origin;
                format!(
                    "{why}; the capture on {} is invalid now and must be ended",
                    self.stream_name(origin)
                )
            }
        };
        DeviceError::new(call, code, detail)
    }

    /// The capture a stream takes part in, refused where it is broken.
    fn valid_capture(&self, call: Call, key: StreamKey) -> Result<Option<CaptureKey>> {
        let Some(joined) = &self.streams[key].joined else {
            return Ok(None);
        };
        match self.captures[joined.capture].broken_by {
            None => Ok(Some(joined.capture)),
            Some(by) => {
                let detail = format!(
                    "the capture on {} was broken by {by:?}; end it",
                    self.stream_name(key)
                );
                Err(DeviceError::new(
                    call,
                    Code::StreamCaptureInvalidated,
                    detail,
                ))
            }
        }
    }

    /// Work for a stream: the capture it goes into, or none.
    pub(super) fn admit(&mut self, call: Call, key: StreamKey) -> Result<Option<CaptureKey>> {
        let capture = self.valid_capture(call, key)?;
        if capture.is_none() && !self.captures.is_empty() {
            self.refuse_implicit(call, key)?;
        }
        Ok(capture)
    }

    /// The default stream orders itself with blocking streams, so it may not be used while one of them captures.
    fn refuse_implicit(&mut self, call: Call, key: StreamKey) -> Result<()> {
        if key == self.default_stream
            && let Some(capture) = self.blocking_capture()
        {
            let why = "the default stream would wait for a blocking stream that captures";
            return Err(self.invalidate(capture, call, Code::StreamCaptureImplicit, why));
        }
        Ok(())
    }

    fn blocking_capture(&self) -> Option<CaptureKey> {
        let blocking = |c: &Capture| c.streams.iter().any(|&s| self.streams[s].blocking);
        self.captures
            .iter()
            .find(|(_, c)| blocking(c))
            .map(|(key, _)| key)
    }

    /// A call that a capturing stream does not take, and that breaks its capture.
    pub(super) fn refuse_capturing(&mut self, call: Call, key: StreamKey, why: &str) -> Result<()> {
        match self.admit(call, key)? {
            None => Ok(()),
            Some(capture) => {
                Err(self.invalidate(capture, call, Code::StreamCaptureUnsupported, why))
            }
        }
    }

    /// A copy from or to pageable memory: refused on a capturing stream, whose capture is left alone.
    pub(super) fn refuse_pageable(&mut self, call: Call, key: StreamKey) -> Result<()> {
        if self.streams[key].joined.is_none() {
            return self.refuse_implicit(call, key);
        }
        let detail = format!(
            "{} captures, and a graph cannot keep host memory alive; copy before or after the capture",
            self.stream_name(key)
        );
        Err(DeviceError::new(
            call,
            Code::StreamCaptureUnsupported,
            detail,
        ))
    }

    /// A call that may not be made while a capture is underway that minds it: one that this thread began in another mode than
    /// the relaxed, or any thread in the global mode. A thread that exchanged its mode minds less.
    pub(super) fn refuse_unsafe(&mut self, call: Call) -> Result<()> {
        if self.captures.is_empty() {
            return Ok(());
        }
        let here = thread::current().id();
        let mode = self
            .thread_modes
            .get(&here)
            .copied()
            .unwrap_or(CaptureMode::Global);
        let minds = |c: &Capture| match (mode, c.mode) {
            (CaptureMode::Relaxed, _) | (_, CaptureMode::Relaxed) => false,
            (CaptureMode::Global, CaptureMode::Global) => true,
            _ => c.owner == here,
        };
        let minding: Vec<CaptureKey> = self
            .captures
            .iter()
            .filter(|(_, c)| minds(c))
            .map(|(key, _)| key)
            .collect();
        let why = "the call is not allowed while a capture is underway in this mode";
        let refused = minding
            .into_iter()
            .map(|c| self.invalidate(c, call, Code::StreamCaptureUnsupported, why));
        refused.last().map_or(Ok(()), Err)
    }

    /// A call that waits for every stream: refused in every mode.
    pub(super) fn refuse_any_capture(&mut self, call: Call) -> Result<()> {
        let all: Vec<CaptureKey> = self.captures.keys().collect();
        let why = "the call waits for all streams, and one captures";
        let refused = all
            .into_iter()
            .map(|c| self.invalidate(c, call, Code::StreamCaptureUnsupported, why));
        refused.last().map_or(Ok(()), Err)
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
        if std::mem::replace(&mut self.captures[capture].has_gather, true) {
            return Err(DeviceError::new(
                call,
                Code::NotSupported,
                "a graph holds at most one gather, and this one has it",
            ));
        }
        Ok(())
    }

    // ---- events ----------------------------------------------------------------------------------

    /// What an event stands for once its stream captures; `None` outside a capture.
    pub(super) fn captured_record(&mut self, call: Call, key: StreamKey) -> Result<Option<Record>> {
        let capture = self.admit(call, key)?;
        let after = self.streams[key]
            .joined
            .as_ref()
            .map(|joined| joined.after.clone())
            .unwrap_or_default();
        Ok(capture.map(|capture| Record::Captured { capture, after }))
    }

    /// An event whose record was captured cannot be asked or waited for by the host.
    pub(super) fn refuse_captured(&mut self, call: Call, record: &Record) -> Result<()> {
        let Record::Captured { capture, .. } = *record else {
            return Ok(());
        };
        self.refuse_stale(call, capture)?;
        let why = "the event was recorded in a capture, which runs nothing";
        Err(self.invalidate(capture, call, Code::CapturedEvent, why))
    }

    fn refuse_stale(&self, call: Call, capture: CaptureKey) -> Result<()> {
        if self.captures.contains_key(capture) {
            return Ok(());
        }
        Err(DeviceError::new(
            call,
            Code::InvalidValue,
            "the event was recorded in a capture that has ended; record it again",
        ))
    }

    /// A stream that captures, or is to join a capture, waits for an event. False: nothing here captures.
    pub(super) fn wait_captured(
        &mut self,
        call: Call,
        key: StreamKey,
        record: &Record,
    ) -> Result<bool> {
        let own = self.valid_capture(call, key)?;
        let (capture, after) = match (record, own) {
            (Record::Never, _) | (Record::Point(_), None) => return Ok(false),
            (Record::Point(_), Some(own)) => {
                let why = "the event was recorded outside of the capture";
                return Err(self.invalidate(own, call, Code::StreamCaptureIsolation, why));
            }
            (Record::Captured { capture, after }, _) => (*capture, after),
        };
        self.refuse_stale(call, capture)?;
        if let Some(own) = own.filter(|&own| own != capture) {
            let why = "the event belongs to another capture";
            self.invalidate(own, call, Code::StreamCaptureMerge, why);
            return Err(self.invalidate(capture, call, Code::StreamCaptureMerge, why));
        }
        if self.captures[capture].broken_by.is_some() {
            let detail = "the event was recorded in a capture that is invalid; end that capture";
            return Err(DeviceError::new(
                call,
                Code::StreamCaptureInvalidated,
                detail,
            ));
        }
        if key == self.default_stream {
            let why = "the default stream cannot take part in a capture";
            return Err(self.invalidate(capture, call, Code::StreamCaptureUnsupported, why));
        }
        if own.is_none() {
            self.captures[capture].streams.push(key);
            self.streams[key].joined = Some(Joined {
                capture,
                after: after.clone(),
            });
        } else if let Some(joined) = &mut self.streams[key].joined {
            let new = after
                .iter()
                .filter(|&node| !joined.after.contains(node))
                .copied();
            let new: Frontier = new.collect();
            joined.after.extend(new);
        }
        Ok(true)
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
        let capture = self.captures.insert(Capture {
            origin: key,
            owner: thread::current().id(),
            mode,
            broken_by: None,
            dag: Dag::new(),
            streams: vec![key],
            has_gather: false,
            memory: Vec::new(),
        });
        self.streams[key].joined = Some(Joined {
            capture,
            after: Frontier::new(),
        });
        Ok(())
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
            Some(joined) if self.captures[joined.capture].broken_by.is_none() => {
                CaptureStatus::Active
            }
            Some(_) => CaptureStatus::Invalidated,
        })
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
        let Some(ended) = self.leave_capture(capture) else {
            return Err(DeviceError::new(
                call,
                Code::IllegalState,
                "the capture is gone",
            ));
        };
        if ended.mode != CaptureMode::Relaxed && ended.owner != thread::current().id() {
            let detail = "the capture was begun by another thread; it is over now";
            return Err(DeviceError::new(
                call,
                Code::StreamCaptureWrongThread,
                detail,
            ));
        }
        if let Some(by) = ended.broken_by {
            let detail = format!("{by:?} broke the capture while it was underway; it is over now");
            return Err(DeviceError::new(
                call,
                Code::StreamCaptureInvalidated,
                detail,
            ));
        }
        if !is_joined(&ended.dag, &ended.after_origin) {
            let detail = "work was captured on another stream, and the capture's own did not wait for it; it is over now";
            return Err(DeviceError::new(call, Code::StreamCaptureUnjoined, detail));
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
    fn leave_capture(&mut self, key: CaptureKey) -> Option<Ended> {
        let Capture {
            origin,
            owner,
            mode,
            broken_by,
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
            broken_by,
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
            self.leave_capture(capture);
        }
    }
}

/// A capture that is over.
struct Ended {
    owner: ThreadId,
    mode: CaptureMode,
    broken_by: Option<Call>,
    dag: Dag,
    memory: Vec<Arc<GraphMemory>>,
    after_origin: Frontier,
}

/// Whether every node comes before the end of the stream that began the capture. Marks need not: they are no nodes.
fn is_joined(dag: &Dag, end: &Frontier) -> bool {
    let mut search = Dfs::empty(Reversed(dag));
    for &node in end {
        search.move_to(node);
        while search.next(Reversed(dag)).is_some() {}
    }
    dag.node_indices()
        .all(|node| dag[node].node_kind().is_none() || search.discovered.contains(node.index()))
}
