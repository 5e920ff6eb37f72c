//! Ifs inside captures: the body is a capture of its own, whose nodes go into the if's.

use std::sync::Arc;

use petgraph::graph::NodeIndex;

use super::capture::{Capture, is_joined};
use super::graph::Dag;
use super::state::State;
use super::stream::{CaptureKey, Frontier, StreamKey};
use super::work::Work;
use crate::device::{Call, CaptureMode, Code, DeviceError, DevicePtr, Result};
use crate::sync::thread;

/// Why a body is refused for what it holds.
const NOT_IN_A_BODY: &str = "the body holds memory nodes, events, host functions or copies from or to pageable memory; it may hold launches, copies, fills and ifs";

/// Where the capture of an if's body belongs.
#[derive(Clone, Copy)]
pub(super) struct BodyOf {
    /// The stream that the if was begun on.
    stream: StreamKey,
    /// The if, in the capture of that stream.
    node: NodeIndex,
    /// The capture that all of it belongs to: it has the log.
    pub(super) root: CaptureKey,
}

impl State {
    /// A stream takes no work while the body of an if is open there: it would come after the if, whatever the predicate says.
    pub(super) fn refuse_beside_body(
        &mut self,
        call: Call,
        key: StreamKey,
        capture: CaptureKey,
    ) -> Result<()> {
        if self.streams[key]
            .joined
            .as_ref()
            .is_none_or(|j| j.open.is_none())
        {
            return Ok(());
        }
        let why = "the body of an if is open on the stream: work for the body goes to the body's stream, and other work comes after end_if";
        Err(self.invalidate_own(capture, call, Code::IllegalState, why))
    }

    pub(super) fn begin_if(
        &mut self,
        call: Call,
        key: StreamKey,
        predicate: DevicePtr,
        body: StreamKey,
    ) -> Result<()> {
        let refuse = |code, detail: String| Err(DeviceError::new(call, code, detail));
        let Some(capture) = self.admit(call, key)? else {
            let detail = format!(
                "{} does not capture; an if is a node of a graph",
                self.stream_name(key)
            );
            return refuse(Code::IllegalState, detail);
        };
        let root = self.root(capture);
        if predicate == DevicePtr::NULL {
            return refuse(
                Code::InvalidValue,
                "the predicate is the null address; give that of a byte".into(),
            );
        }
        if body == self.default_stream {
            let detail =
                "the default stream cannot capture; give the body a stream that was created";
            return refuse(Code::StreamCaptureUnsupported, detail.into());
        }
        if self.streams[body].joined.is_some() {
            let detail = format!(
                "{} captures already; give the body a stream that does not",
                self.stream_name(body)
            );
            return refuse(Code::IllegalState, detail);
        }
        if let Some(of) = self.captures[capture].body {
            if self.captures[capture].origin != key {
                let detail = format!(
                    "{} forked off the body of an if; an inner if is begun on the body's own stream",
                    self.stream_name(key)
                );
                return refuse(Code::NotSupported, detail);
            }
            self.cross_border(call, capture, of)?;
        }
        let work = Work::If {
            predicate,
            body: Arc::new(Dag::new()),
        };
        if let Some(node) = self.capture(key, work)
            && let Some(joined) = self.streams[key].joined.as_mut()
        {
            joined.open = Some(body);
            let of = BodyOf {
                stream: key,
                node,
                root,
            };
            let mode = self.captures[root].mode;
            self.open_capture(body, mode, Some(of), Dag::new(), Frontier::new());
        }
        Ok(())
    }

    /// An inner if cuts a body: what comes before is closed.
    fn cross_border(&mut self, call: Call, capture: CaptureKey, of: BodyOf) -> Result<()> {
        let Capture {
            origin,
            mode,
            owner,
            ..
        } = self.captures[capture];
        if mode != CaptureMode::Relaxed && owner != thread::current().id() {
            let why = "an inner if closes what its body holds so far, and the body was begun by another thread";
            return Err(self.invalidate_own(capture, call, Code::StreamCaptureWrongThread, why));
        }
        let joined = self.streams[origin].joined.as_ref();
        if !joined.is_some_and(|joined| is_joined(&self.captures[capture].dag, &joined.after)) {
            let why =
                "a stream that forked off the body has not joined it; it must before an inner if";
            return Err(self.invalidate_own(capture, call, Code::StreamCaptureUnjoined, why));
        }
        if !self.captures[capture]
            .dag
            .node_weights()
            .all(may_be_in_a_body)
        {
            return Err(self.invalidate_own(capture, call, Code::NotSupported, NOT_IN_A_BODY));
        }
        if let Some(ended) = self.leave_capture(capture) {
            self.open_capture(origin, mode, Some(of), ended.dag, ended.after_origin);
        }
        Ok(())
    }

    pub(super) fn end_if(&mut self, call: Call, key: StreamKey, body: StreamKey) -> Result<()> {
        let open = self.body_on(body).filter(|(_, of)| of.stream == key);
        let Some((capture, of)) = open else {
            let (stream, body) = (self.stream_name(key), self.stream_name(body));
            let detail = format!("{body} has no body of an if that was begun on {stream}");
            return Err(DeviceError::new(call, Code::IllegalState, detail));
        };
        let inner = self.leave_inner(body);
        let (Some(ended), Some(joined)) = (
            self.leave_capture(capture),
            self.streams[key].joined.as_mut(),
        ) else {
            return Err(DeviceError::new(
                call,
                Code::IllegalState,
                "the capture is gone",
            ));
        };
        joined.open = None;
        let own = joined.capture;
        let (code, why) = if ended.mode != CaptureMode::Relaxed
            && ended.owner != thread::current().id()
        {
            (
                Code::StreamCaptureWrongThread,
                "the body was begun by another thread",
            )
        } else if self.is_broken(own) {
            let detail = "the capture broke while the body was open; the body is over now";
            return Err(DeviceError::new(
                call,
                Code::StreamCaptureInvalidated,
                detail,
            ));
        } else if inner {
            (Code::StreamCaptureUnjoined, "an inner body is open")
        } else if !is_joined(&ended.dag, &ended.after_origin) {
            (
                Code::StreamCaptureUnjoined,
                "a stream that forked off the body has not joined it",
            )
        } else if !ended.dag.node_weights().all(may_be_in_a_body) {
            (Code::NotSupported, NOT_IN_A_BODY)
        } else {
            if let Some(Work::If { body, .. }) = self.captures[own].dag.node_weight_mut(of.node) {
                *body = Arc::new(ended.dag);
            }
            return Ok(());
        };
        Err(self.invalidate_own(own, call, code, why))
    }

    /// The body that was begun on a stream.
    fn body_on(&self, stream: StreamKey) -> Option<(CaptureKey, BodyOf)> {
        let joined = self.streams.get(stream)?.joined.as_ref()?;
        let capture = &self.captures[joined.capture];
        let own = capture.body.filter(|_| capture.origin == stream)?;
        Some((joined.capture, own))
    }

    /// Ends the bodies that are open inside the one on this stream. Whether there were any.
    fn leave_inner(&mut self, stream: StreamKey) -> bool {
        let open = self.streams[stream].joined.as_ref().and_then(|j| j.open);
        let Some(inner) = open else { return false };
        if let Some((capture, of)) = self.body_on(inner)
            && of.stream == stream
        {
            self.leave_inner(inner);
            self.leave_capture(capture);
        }
        true
    }

    /// Ends all bodies of a capture that ends. Whether one of its streams had an open one.
    pub(super) fn leave_bodies(&mut self, root: CaptureKey) -> bool {
        let of_it = |c: &Capture| c.body.is_some_and(|of| of.root == root);
        let bodies = self.captures.iter().filter(|(_, c)| of_it(c));
        let bodies: Vec<CaptureKey> = bodies.map(|(key, _)| key).collect();
        let open = |stream: &StreamKey| {
            let joined = self.streams[*stream].joined.as_ref();
            joined.is_some_and(|joined| joined.open.is_some())
        };
        let any = !bodies.is_empty() || self.captures[root].streams.iter().any(open);
        for capture in bodies {
            self.leave_capture(capture);
        }
        any
    }
}

/// Whether a driver takes this in the body of an if.
fn may_be_in_a_body(work: &Work) -> bool {
    matches!(
        work,
        Work::Kernel { .. }
            | Work::Copy { .. }
            | Work::Fill { .. }
            | Work::FromPinned { .. }
            | Work::ToPinned { .. }
            | Work::If { .. }
            | Work::Mark { .. }
    )
}
