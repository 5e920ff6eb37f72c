//! What a run gives back.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use super::args::Value;
use super::node::NodeId;
use super::reason::Reason;
use crate::device::Device;
use crate::error::Phase;
use crate::storage::Tensor;

/// The outputs of a run, in the order in which the function returned them. Up to four need no heap.
pub struct Outputs<D: Device> {
    tensors: SmallVec<[Tensor<D>; 4]>,
    phase: Phase,
    node: Option<NodeId>,
    reason: Option<Reason>,
    values: Vec<Value>,
}

impl<D: Device> Outputs<D> {
    /// No outputs: to be filled by [`GraphTrees::run_into`](crate::GraphTrees::run_into).
    #[must_use]
    pub fn new() -> Self {
        Outputs {
            tensors: SmallVec::new(),
            phase: Phase::Replay,
            node: None,
            reason: None,
            values: Vec::new(),
        }
    }

    /// What the run did.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The node that was recorded or replayed; `None` after a warmup, an eager run, and inside a capture of the caller's.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        self.node
    }

    /// Why the run was no replay; `None` if it was one, and inside a capture of the caller's.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        self.reason
    }

    /// How many host values the function returned beside the tensors.
    #[must_use]
    pub fn values(&self) -> usize {
        self.values.len()
    }

    /// The host value that the function returned at `index`, if it is of this type. It is the recording's in every replay.
    #[must_use]
    pub fn value<T: Any + Send + Sync>(&self, index: usize) -> Option<Arc<T>> {
        self.values.get(index)?.clone().downcast().ok()
    }

    /// Drops the outputs and keeps the room.
    #[inline]
    pub fn clear(&mut self) {
        self.tensors.clear();
        self.values.clear();
    }

    /// Takes the only output out. `None` where there are none or several.
    #[must_use]
    pub fn only(mut self) -> Option<Tensor<D>> {
        if self.tensors.len() == 1 {
            self.tensors.pop()
        } else {
            None
        }
    }

    #[inline]
    pub(super) fn begin(&mut self, phase: Phase, node: Option<NodeId>, reason: Option<Reason>) {
        debug_assert!(
            self.tensors.is_empty() && self.values.is_empty(),
            "cleared by the call"
        );
        (self.phase, self.node, self.reason) = (phase, node, reason);
    }

    pub(super) fn set_values(&mut self, values: Vec<Value>) {
        self.values = values;
    }

    pub(super) fn extend_values(&mut self, values: &[Value]) {
        self.values.extend(values.iter().cloned());
    }

    pub(super) fn push(&mut self, tensor: Tensor<D>) {
        self.tensors.push(tensor);
    }

    pub(super) fn hand_out(
        &mut self,
        phase: Phase,
        node: Option<NodeId>,
        reason: Option<Reason>,
        tensors: Vec<Tensor<D>>,
        at: &'static Location<'static>,
    ) {
        self.begin(phase, node, reason);
        self.tensors
            .extend(tensors.into_iter().map(|t| t.remade_at(at)));
    }
}

impl<D: Device> Default for Outputs<D> {
    fn default() -> Self {
        Outputs::new()
    }
}

impl<D: Device> Deref for Outputs<D> {
    type Target = [Tensor<D>];

    fn deref(&self) -> &[Tensor<D>] {
        &self.tensors
    }
}

impl<D: Device> IntoIterator for Outputs<D> {
    type Item = Tensor<D>;
    type IntoIter = smallvec::IntoIter<[Tensor<D>; 4]>;

    fn into_iter(self) -> Self::IntoIter {
        self.tensors.into_iter()
    }
}

impl<D: Device> fmt::Debug for Outputs<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outputs")
            .field("phase", &self.phase)
            .field("node", &self.node)
            .field("tensors", &self.tensors)
            .finish()
    }
}
