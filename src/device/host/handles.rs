//! Handles on what the device holds. Dropping one never takes the device's lock.

use std::fmt;
use std::sync::Arc;

use super::Inner;
use super::gate::{Deferred, Gate};
use super::graph::Template;
use super::stream::{EventKey, ExecKey, StreamKey};
use super::work::Body;

pub(super) struct StreamHandle {
    pub(super) device: Arc<Inner>,
    pub(super) key: StreamKey,
    pub(super) id: u32,
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if self.id != 0 {
            self.device.gate.defer(Deferred::Stream(self.key));
        }
    }
}

/// A stream of a [`HostDevice`](super::HostDevice). Work that is queued when its last clone is dropped still runs.
#[derive(Clone)]
pub struct HostStream(pub(super) Arc<StreamHandle>);

impl PartialEq for HostStream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.0.key == other.0.key && Arc::ptr_eq(&self.0.device, &other.0.device))
    }
}

impl Eq for HostStream {}

impl fmt::Debug for HostStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostStream({})", self.0.id)
    }
}

/// An event of a [`HostDevice`](super::HostDevice). What a graph needs of it outlives it.
pub struct HostEvent {
    pub(super) device: Arc<Inner>,
    pub(super) held: Arc<EventRef>,
}

impl HostEvent {
    pub(super) fn key(&self) -> EventKey {
        self.held.0
    }
}

/// An event's place among those of its device, which goes with the last of its handle and the graphs that name it.
pub(super) struct EventRef(pub(super) EventKey, pub(super) Arc<Gate>);

impl Drop for EventRef {
    fn drop(&mut self) {
        self.1.defer(Deferred::Event(self.0));
    }
}

impl fmt::Debug for HostEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostEvent")
    }
}

/// A loaded kernel. It lives as long as its device, so a body that owns a handle of its device keeps that alive for good.
#[derive(Clone)]
pub struct HostFunction(pub(super) Arc<Body>);

impl fmt::Debug for HostFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostFunction({})", self.0.name)
    }
}

/// A captured graph of a [`HostDevice`](super::HostDevice). Its `Display` counts its nodes by kind, as `kernel×2 memset×1`.
pub struct HostGraph {
    pub(super) device: Arc<Inner>,
    pub(super) template: Template,
}

impl Drop for HostGraph {
    fn drop(&mut self) {
        self.device.gate.defer(Deferred::Graph);
    }
}

impl fmt::Display for HostGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.template.fmt(f)
    }
}

impl fmt::Debug for HostGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostGraph({})", self.template)
    }
}

/// An executable graph of a [`HostDevice`](super::HostDevice). Launches in flight when it is dropped still run.
pub struct HostExec {
    pub(super) device: Arc<Inner>,
    pub(super) key: ExecKey,
}

impl Drop for HostExec {
    fn drop(&mut self) {
        self.device.gate.defer(Deferred::Exec(self.key));
    }
}

impl fmt::Debug for HostExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostExec")
    }
}
