//! Captured graphs: the template, its executable form, and one launch's progress.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::{Incoming, Outgoing};
use smallvec::SmallVec;

use super::gate::{Deferred, Gate};
use super::schedule::Rng;
use super::stream::EventKey;
use super::work::{Broken, Work, World};
use crate::device::{DevicePtr, GraphInfo};

/// Work and its order, as captured.
pub(super) type Dag = DiGraph<Work, ()>;

/// Addresses that belong to a graph's own allocation; they go with the last of its graphs and executables.
pub(super) struct GraphMemory {
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    pub(super) gate: Arc<Gate>,
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        self.gate.defer(Deferred::GraphMemory(self.ptr, self.bytes));
    }
}

/// A captured graph.
pub(super) struct Template {
    pub(super) dag: Dag,
    pub(super) memory: Vec<Arc<GraphMemory>>,
    /// A graph with memory nodes can be made executable once.
    pub(super) instantiated: AtomicBool,
}

impl Template {
    pub(super) fn info(&self) -> GraphInfo {
        let mut info = GraphInfo::default();
        each_kind(&self.dag, &mut |kind| match kind {
            "kernel" => info.kernels += 1,
            "memcpy" => info.copies += 1,
            "memset" => info.fills += 1,
            "mem_alloc" | "mem_free" => info.memory += 1,
            "conditional" => info.conditionals += 1,
            _ => info.other += 1,
        });
        info
    }

    /// Whether this may be made executable (now).
    pub(super) fn claim(&self) -> bool {
        let memory = self
            .dag
            .node_weights()
            .any(|w| matches!(w, Work::Allocate { .. } | Work::Free { .. }));
        !memory || !self.instantiated.swap(true, Ordering::Relaxed)
    }
}

/// The kinds of all nodes, those in bodies of ifs included.
fn each_kind(dag: &Dag, each: &mut impl FnMut(&'static str)) {
    for work in dag.node_weights() {
        work.node_kind().into_iter().for_each(&mut *each);
        if let Work::If { body, .. } = work {
            each_kind(body, each);
        }
    }
}

/// Its nodes by kind, as `kernel×2 memset×1`.
impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts = std::collections::BTreeMap::new();
        each_kind(&self.dag, &mut |kind| {
            *counts.entry(kind).or_insert(0_usize) += 1;
        });
        if counts.is_empty() {
            return f.write_str("no nodes");
        }
        for (i, (kind, count)) in counts.into_iter().enumerate() {
            write!(f, "{}{kind}×{count}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

/// One node of a plan.
#[derive(Clone)]
pub(super) struct PlanNode {
    pub(super) work: Work,
    /// How many nodes must be done before it.
    before: u32,
    after: SmallVec<[u32; 2]>,
    /// Of an if, the nodes of its body.
    body: Range<u32>,
}

/// What an executable runs. Launches in flight hold it, so changing the executable means making a new one.
#[derive(Clone)]
pub(super) struct Plan {
    pub(super) nodes: Vec<PlanNode>,
    /// Slots of the gather node: how many sources a launch brings.
    pub(super) slots: usize,
    /// Events of the nodes that wait for one, with the node's place.
    pub(super) waits: Vec<(u32, EventKey)>,
    /// Events of the nodes that record one.
    pub(super) records: Vec<(u32, EventKey)>,
    /// Held for its drop.
    #[allow(dead_code)]
    memory: Vec<Arc<GraphMemory>>,
}

impl Plan {
    pub(super) fn new(template: &Template) -> Self {
        let mut plan = Plan {
            nodes: Vec::new(),
            slots: 0,
            waits: Vec::new(),
            records: Vec::new(),
            memory: template.memory.clone(),
        };
        plan.add(&template.dag);
        plan
    }

    /// Adds all nodes of a dag, and those of the bodies in it: a body comes after its if, and whatever comes after the if, after the body. Where the dag begins and ends.
    fn add(&mut self, dag: &Dag) -> (Vec<u32>, Vec<u32>) {
        // Where each node begins and ends; they differ for an if.
        let mut places: Vec<(u32, u32)> = Vec::with_capacity(dag.node_count());
        for work in dag.node_weights() {
            let first = self.push(work.clone());
            let mut last = first;
            match work {
                Work::Gather { slots, .. } => self.slots = slots.len(),
                Work::WaitEvent(event) => self.waits.push((first, event.0)),
                Work::RecordEvent(event) => self.records.push((first, event.0)),
                Work::If { body, .. } => {
                    let (begins, ends) = self.add(body);
                    last = self.push(Work::EndIf);
                    self.nodes[first as usize].body = first + 1..last;
                    begins.into_iter().for_each(|node| self.order(first, node));
                    ends.into_iter().for_each(|node| self.order(node, last));
                    self.order(first, last);
                }
                _ => {}
            }
            places.push((first, last));
        }
        for edge in dag.raw_edges() {
            let (before, after) = (edge.source().index(), edge.target().index());
            self.order(places[before].1, places[after].0);
        }
        let outer = |direction| dag.externals(direction).map(NodeIndex::index);
        (
            outer(Incoming).map(|node| places[node].0).collect(),
            outer(Outgoing).map(|node| places[node].1).collect(),
        )
    }

    fn push(&mut self, work: Work) -> u32 {
        self.nodes.push(PlanNode {
            work,
            before: 0,
            after: SmallVec::new(),
            body: 0..0,
        });
        self.nodes.len() as u32 - 1
    }

    fn order(&mut self, before: u32, after: u32) {
        self.nodes[before as usize].after.push(after);
        self.nodes[after as usize].before += 1;
    }

    /// Whether another plan differs from this one in nothing but its nodes' parameters.
    pub(super) fn same_shape(&self, other: &Plan) -> bool {
        let same = |a: &PlanNode, b: &PlanNode| {
            a.work.node_kind() == b.work.node_kind() && a.after == b.after && a.before == b.before
        };
        self.slots == other.slots
            && self.nodes.len() == other.nodes.len()
            && self.nodes.iter().zip(&other.nodes).all(|(a, b)| same(a, b))
    }
}

/// How far the launch at a stream's head has come. One for each stream; its buffers are used again.
#[derive(Default)]
pub(super) struct Run {
    started: bool,
    left: usize,
    pending: Vec<u32>,
    ready: Vec<u32>,
    /// The nodes of bodies that do not run this time.
    skipped: Vec<Range<u32>>,
    /// The nodes that recorded an event.
    recorded: SmallVec<[u32; 2]>,
}

impl Run {
    /// Sets out on a launch, unless that was done before.
    pub(super) fn start(&mut self, plan: &Plan) {
        if self.started {
            return;
        }
        self.started = true;
        self.left = plan.nodes.len();
        self.skipped.clear();
        self.pending.clear();
        self.pending
            .extend(plan.nodes.iter().map(|node| node.before));
        self.ready.clear();
        self.ready.extend(
            (0..)
                .zip(&plan.nodes)
                .filter(|(_, node)| node.before == 0)
                .map(|(i, _)| i),
        );
    }

    /// Whether nothing is left to run.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Whether one of the nodes that may run is allowed.
    pub(super) fn any(&self, allowed: impl Fn(u32) -> bool) -> bool {
        self.left == 0 || self.ready.iter().any(|&node| allowed(node))
    }

    /// Draws one of the nodes that may run and are allowed.
    pub(super) fn draw(&mut self, rng: &mut Rng, allowed: impl Fn(u32) -> bool) -> Option<u32> {
        let choices = self.ready.iter().filter(|&&node| allowed(node)).count();
        let chosen = rng.below(choices.max(1));
        let place = (0..self.ready.len())
            .filter(|&i| allowed(self.ready[i]))
            .nth(chosen)?;
        Some(self.ready.swap_remove(place))
    }

    /// Whether a node that records an event is done.
    pub(super) fn has_recorded(&self, node: u32) -> bool {
        self.recorded.contains(&node)
    }

    /// Notes that a node is done; what waited for it alone may run.
    pub(super) fn finish(&mut self, plan: &Plan, node: u32) {
        self.left -= 1;
        if let Work::RecordEvent(_) = plan.nodes[node as usize].work {
            self.recorded.push(node);
        }
        for &next in &plan.nodes[node as usize].after {
            self.pending[next as usize] -= 1;
            if self.pending[next as usize] == 0 {
                self.ready.push(next);
            }
        }
    }

    /// Runs a node, unless it is of a body that does not run.
    pub(super) fn perform(
        &mut self,
        plan: &Plan,
        node: u32,
        world: &mut World,
        sources: &[DevicePtr],
    ) -> Result<(), Broken> {
        let PlanNode { work, body, .. } = &plan.nodes[node as usize];
        if self.skipped.iter().any(|skipped| skipped.contains(&node)) {
            return Ok(());
        }
        if let Work::If { predicate, .. } = work {
            if !world.holds(*predicate)? {
                self.skipped.push(body.clone());
            }
            return Ok(());
        }
        world.run(work, Some(sources))
    }

    /// Makes room for the next launch.
    pub(super) fn reset(&mut self) {
        self.started = false;
        self.left = 0;
        self.ready.clear();
        self.recorded.clear();
    }
}
