//! A tree as people and tests look at it: a plain value, the same on every machine.

use super::node::{InputSpec, NodeId, OutputSpec};
use super::path::Run;
use super::{GraphTrees, NodeKey, State};
use crate::allocator::PoolHandle;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pool::{PoolSnapshot, PoolStats};
use crate::storage::StorageId;
use crate::sync::lock;

/// How often a tree did what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Runs that were warmups.
    pub warmups: u64,
    /// Nodes recorded.
    pub recordings: u32,
    /// Runs that were replays.
    pub replays: u64,
    /// Restores of a node's checkpoint.
    pub restores: u64,
    /// Captures that failed for their own reasons, and were answered eagerly.
    pub failed_captures: u64,
}

/// A tree at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeView {
    /// In order of registration.
    pub functions: Vec<FunctionView>,
    /// In order of recording.
    pub nodes: Vec<NodeView>,
    /// Nodes without a parent, in order of recording.
    pub roots: Vec<NodeId>,
    /// The runs of the path: a recorded node, or the name of a function that was warmed up.
    pub path: Vec<Result<NodeId, String>>,
    /// How many output storages of the path are held.
    pub live: usize,
    /// Whether the pool's books say so too.
    pub books_exact: bool,
}

/// A function of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionView {
    /// Its name.
    pub name: String,
    /// Its keys, in order of their first run, and whether each is warm.
    pub keys: Vec<(Vec<i64>, bool)>,
}

/// A node of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// Its number.
    pub id: NodeId,
    /// Its function's name.
    pub function: String,
    /// Its key.
    pub key: Vec<i64>,
    /// The node below which it was recorded.
    pub parent: Option<NodeId>,
    /// Its children, in order of recording.
    pub children: Vec<NodeId>,
    /// Its graph's nodes.
    pub graph_nodes: usize,
    /// Its inputs, in words.
    pub inputs: Vec<String>,
    /// Its outputs.
    pub outputs: Vec<OutputView>,
}

/// An output of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputView {
    /// What it is, in words.
    pub kind: String,
    /// The storage that the node makes for it.
    pub storage: Option<StorageId>,
    /// Whether that storage is held.
    pub live: bool,
}

impl<D: Device> GraphTrees<D> {
    /// The tree as it is now.
    #[must_use]
    pub fn view(&self) -> TreeView {
        lock(&self.inner.state).view()
    }

    /// How often it did what.
    #[must_use]
    pub fn counts(&self) -> Counts {
        lock(&self.inner.state).counts
    }

    /// How many output storages of the path are held.
    #[must_use]
    pub fn path_live(&self) -> usize {
        lock(&self.inner.state).path_live()
    }

    /// For each root, in order of recording, how many nodes lie below it.
    #[must_use]
    pub fn descendants(&self) -> Vec<usize> {
        let state = lock(&self.inner.state);
        state.roots.iter().map(|root| state.descendants(*root)).collect()
    }

    /// The pool's statistics.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        self.inner.pool.stats()
    }

    /// The pool's blocks. After a replay the books lag behind: they say what was held when they were last exact, less what died since.
    #[must_use]
    pub fn pool_snapshot(&self) -> PoolSnapshot {
        self.inner.pool.snapshot()
    }

    /// Why the last capture that failed did so, in words.
    #[must_use]
    pub fn last_failure(&self) -> Option<String> {
        lock(&self.inner.state).last_failure.as_ref().map(ToString::to_string)
    }

    /// Compares the pool's live blocks with the outputs that the tree tracks. After a replay there is nothing to compare.
    ///
    /// # Errors
    /// [`Error::Books`] names the addresses, as segment+offset, that are allocated and not tracked, or tracked and not allocated.
    pub fn audit(&self) -> Result<()> {
        let state = lock(&self.inner.state);
        if !state.books_exact {
            return Ok(());
        }
        let mut tracked = Vec::new();
        for entry in &state.path {
            let live = state.live_of(entry);
            for word in 0..live.words() {
                let mut bits = live.word(word);
                while bits != 0 {
                    tracked.push(state.slot(entry, word * 64 + bits.trailing_zeros() as usize).ptr().0);
                    bits &= bits - 1;
                }
            }
        }
        let check = self.inner.pool.check_live(&tracked);
        if check.is_exact() {
            return Ok(());
        }
        let place = |address: &u64| match self.inner.pool.locate(crate::device::DevicePtr(*address)) {
            Some((segment, offset)) => format!("{segment}+{offset}"),
            None => "outside the pool".to_owned(),
        };
        Err(Error::Books(format!(
            "not allocated in the pool but should be: [{}]; in the pool and not tracked as outputs: [{}]",
            check.missing.iter().map(place).collect::<Vec<_>>().join(", "),
            check.untracked.iter().map(|a| place(a)).collect::<Vec<_>>().join(", "),
        )))
    }

    /// The tree's pool, for looking at.
    pub(crate) fn pool(&self) -> &PoolHandle<D> {
        &self.inner.pool
    }
}

impl<D: Device> State<D> {
    fn descendants(&self, node: NodeKey) -> usize {
        self.nodes[node].children.iter().map(|(_, child)| 1 + self.descendants(*child)).sum()
    }

    fn view(&self) -> TreeView {
        let mut functions: Vec<_> = self.functions.values().collect();
        functions.sort_by_key(|f| f.number);
        let functions = functions
            .into_iter()
            .map(|f| FunctionView { name: f.name.to_string(), keys: f.variants.iter().map(|v| (v.key.to_vec(), v.warm)).collect() })
            .collect();
        let mut nodes: Vec<_> = self.nodes.keys().map(|key| self.node_view(key)).collect();
        nodes.sort_by_key(|n| n.id);
        let path = self
            .path
            .iter()
            .map(|entry| match &entry.run {
                Run::Node { node, .. } => Ok(self.nodes[*node].id),
                Run::Warm(warm) => Err(warm.function.to_string()),
            })
            .collect();
        TreeView { functions, nodes, roots: self.roots.iter().map(|r| self.nodes[*r].id).collect(), path, live: self.path_live(), books_exact: self.books_exact }
    }

    fn node_view(&self, key: NodeKey) -> NodeView {
        let node = &self.nodes[key];
        let function = &self.functions[node.variant.0];
        let inputs = node
            .inputs
            .iter()
            .map(|input| match input {
                InputSpec::Empty => "empty".to_owned(),
                InputSpec::Managed { storage, offset, bytes } => match storage.home() {
                    Some(home) => format!("managed {}.{} +{offset} {bytes} B", home.function, home.output),
                    None => format!("managed +{offset} {bytes} B"),
                },
                InputSpec::Static { bytes, .. } => format!("static {bytes} B"),
                InputSpec::Copied { bytes } => format!("copied {bytes} B"),
                InputSpec::Value(_) => "value".to_owned(),
            })
            .collect();
        let outputs = node
            .outputs
            .iter()
            .map(|output| match output {
                OutputSpec::Empty => OutputView { kind: "empty".to_owned(), storage: None, live: false },
                OutputSpec::Fresh { slot, offset, bytes } => {
                    let storage = &node.slots[*slot].0;
                    let live = node.live.word(slot / 64) >> (slot % 64) & 1 == 1;
                    OutputView { kind: format!("fresh s{slot} +{offset} {bytes} B"), storage: Some(storage.id()), live }
                }
                OutputSpec::Input { input, offset, bytes } => OutputView { kind: format!("input {input} +{offset} {bytes} B"), storage: None, live: false },
                OutputSpec::Bound(_) => OutputView { kind: "bound input".to_owned(), storage: None, live: false },
                OutputSpec::Constant(tensor) => OutputView { kind: format!("constant {} B", tensor.bytes()), storage: None, live: false },
            })
            .collect();
        NodeView {
            id: node.id,
            function: function.name.to_string(),
            key: function.variants[node.variant.1].key.to_vec(),
            parent: node.parent.map(|p| self.nodes[p].id),
            children: node.children.iter().map(|(_, child)| self.nodes[*child].id).collect(),
            graph_nodes: node.info.nodes(),
            inputs,
            outputs,
        }
    }
}
