//! A tree as people and tests look at it: a plain value, the same on every machine.

use super::node::{InputSpec, NodeId, OutputSpec};
use super::path::Run;
use super::{GraphTrees, NodeKey, State};
use crate::allocator::{PoolHandle, PoolId};
use crate::device::{Device, DeviceError, DevicePtr};
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
    /// Runs inside a capture of the caller's.
    pub inlined: u64,
    /// Runs that were eager, outside of the tree.
    pub eager: u64,
    /// Nodes removed.
    pub removed: u64,
}

impl Counts {
    /// A clock of the tree: recordings and replays.
    pub(super) fn uses(&self) -> u64 {
        u64::from(self.recordings) + self.replays
    }
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
    /// The outputs of the path that are held, in order of the path.
    pub held: Vec<HeldView>,
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
    /// Its passed inputs.
    pub inputs: Vec<InputView>,
    /// Its outputs.
    pub outputs: Vec<OutputView>,
}

/// What a node takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputView {
    /// Zero bytes.
    Empty,
    /// An output of an ancestor, in place.
    Managed {
        /// The ancestor's function.
        function: String,
        /// The first output in that storage.
        output: usize,
        /// Where the input begins in it, in bytes.
        offset: u64,
        /// Its length.
        bytes: u64,
    },
    /// A tensor that keeps its address.
    Static {
        /// Its length.
        bytes: u64,
    },
    /// Copied in at each launch.
    Copied {
        /// Its length.
        bytes: u64,
    },
    /// A host value.
    Value,
}

/// What a node gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputView {
    /// Zero bytes.
    Empty,
    /// In a storage that the graph makes.
    Fresh {
        /// The storage.
        storage: StorageId,
        /// Where the storage lies, as segment+offset.
        place: String,
        /// Where the output begins in it, in bytes.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// Whether the storage is held.
        held: bool,
    },
    /// In the storage of a passed input.
    Input {
        /// Which.
        input: usize,
        /// Where the output begins in that storage, in bytes.
        offset: u64,
        /// Its length.
        bytes: u64,
    },
    /// An input bound at registration, or a view of it.
    Bound,
    /// Memory from outside the pool that the function returns of its own.
    Constant {
        /// Its length.
        bytes: u64,
    },
}

/// An output of the path that somebody holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldView {
    /// The function.
    pub function: String,
    /// The first output in the storage.
    pub output: usize,
    /// The storage.
    pub storage: StorageId,
    /// Where it lies, as segment+offset.
    pub place: String,
    /// Its length in bytes.
    pub bytes: u64,
}

impl<D: Device> GraphTrees<D> {
    /// The tree as it is now.
    #[must_use]
    pub fn view(&self) -> TreeView {
        lock(&self.inner.state).view(&|ptr| place(&self.inner.pool, ptr))
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
        state
            .roots
            .iter()
            .map(|root| state.descendants(*root))
            .collect()
    }

    /// The pool's statistics.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        self.inner.pool.stats()
    }

    /// The pool's number within its allocator.
    #[must_use]
    pub fn pool_id(&self) -> PoolId {
        self.inner.pool.id()
    }

    /// The pool's blocks. After a replay the books lag behind: they say what was held when they were last exact, less what died since.
    #[must_use]
    pub fn pool_snapshot(&self) -> PoolSnapshot {
        self.inner.pool.snapshot()
    }

    /// Why the last capture that failed did so, in words: also which of its operations the device refused first, and why.
    #[must_use]
    pub fn last_failure(&self) -> Option<String> {
        lock(&self.inner.state)
            .last_failure
            .as_ref()
            .map(ToString::to_string)
    }

    /// The device's refusal that the last capture which failed goes back to: the one that broke it, whatever the closure made of it. `None` where
    /// the device refused nothing, or the capture was broken past it.
    #[must_use]
    pub fn last_refusal(&self) -> Option<DeviceError> {
        let state = lock(&self.inner.state);
        state.last_failure.as_ref()?.first.as_deref().cloned()
    }

    /// Compares the pool's live blocks with the outputs that the tree tracks. After a replay there is nothing to compare.
    ///
    /// # Errors
    /// [`Error::Books`] names the addresses, as segment+offset, that are allocated and not tracked, or tracked and not allocated.
    pub fn audit(&self) -> Result<()> {
        let state = lock(&self.inner.state);
        // After the end, what is held is its holders'.
        if !state.books_exact || state.down {
            return Ok(());
        }
        let tracked: Vec<_> = state.all_held().collect();
        let addresses: Vec<u64> = tracked.iter().map(|storage| storage.ptr().0).collect();
        let mut check = self.inner.pool.check_live(&addresses);
        // A handle that another thread drops gives its block back before the tree knows.
        check.missing.retain(|address| {
            let mut there = tracked.iter().filter(|s| s.ptr().0 == *address);
            there.any(|storage| storage.owners() > 0)
        });
        if check.is_exact() {
            return Ok(());
        }
        let place = |address: u64| place(&self.inner.pool, DevicePtr(address));
        Err(Error::Books(format!(
            "not allocated in the pool but should be: [{}]; in the pool and not tracked as outputs: [{}]",
            check
                .missing
                .iter()
                .map(|a| place(*a))
                .collect::<Vec<_>>()
                .join(", "),
            check
                .untracked
                .iter()
                .map(|b| place(b.allocation.address()))
                .collect::<Vec<_>>()
                .join(", "),
        )))
    }
}

impl<D: Device> State<D> {
    fn descendants(&self, node: NodeKey) -> usize {
        self.nodes[node]
            .children
            .iter()
            .map(|(_, child)| 1 + self.descendants(*child))
            .sum()
    }

    fn view(&self, place: &dyn Fn(DevicePtr) -> String) -> TreeView {
        let mut functions: Vec<_> = self.functions.values().collect();
        functions.sort_by_key(|f| f.number);
        let functions = functions
            .into_iter()
            .map(|f| FunctionView {
                name: f.name.to_string(),
                keys: f
                    .variants
                    .iter()
                    .map(|v| (v.key.to_vec(), v.warm))
                    .collect(),
            })
            .collect();
        let mut nodes: Vec<_> = self
            .nodes
            .keys()
            .map(|key| self.node_view(key, place))
            .collect();
        nodes.sort_by_key(|n| n.id);
        let path = self
            .path
            .iter()
            .map(|entry| match &entry.run {
                Run::Node { node, .. } => Ok(self.nodes[*node].id),
                Run::Warm(warm) => Err(warm.function.to_string()),
            })
            .collect();
        let mut held = Vec::new();
        for storage in self.all_held() {
            let Some(home) = storage.home() else { continue };
            let (function, output) = (home.function.to_string(), home.output);
            held.push(HeldView {
                function,
                output,
                storage: storage.id(),
                place: place(storage.ptr()),
                bytes: storage.bytes(),
            });
        }
        TreeView {
            functions,
            nodes,
            roots: self.roots.iter().map(|r| self.nodes[*r].id).collect(),
            path,
            held,
            books_exact: self.books_exact,
        }
    }

    fn node_view(&self, key: NodeKey, place: &dyn Fn(DevicePtr) -> String) -> NodeView {
        let node = &self.nodes[key];
        let function = &self.functions[node.variant.0];
        let input = |input: &InputSpec<D>| match input {
            InputSpec::Empty => InputView::Empty,
            InputSpec::Managed {
                storage,
                offset,
                bytes,
            } => {
                let (function, output) = storage.home().map_or_else(Default::default, |home| {
                    (home.function.to_string(), home.output)
                });
                InputView::Managed {
                    function,
                    output,
                    offset: *offset,
                    bytes: *bytes,
                }
            }
            InputSpec::Static { bytes, .. } => InputView::Static { bytes: *bytes },
            InputSpec::Copied { bytes, .. } => InputView::Copied { bytes: *bytes },
            InputSpec::Value(_) => InputView::Value,
        };
        let output = |output: &OutputSpec<D>| match output {
            OutputSpec::Empty => OutputView::Empty,
            OutputSpec::Fresh {
                slot,
                offset,
                bytes,
            } => {
                let storage = &node.slots[*slot].0;
                let held = node.live.word(slot / 64) >> (slot % 64) & 1 == 1;
                OutputView::Fresh {
                    storage: storage.id(),
                    place: place(storage.ptr()),
                    offset: *offset,
                    bytes: *bytes,
                    held,
                }
            }
            OutputSpec::Input {
                input,
                offset,
                bytes,
            } => OutputView::Input {
                input: *input,
                offset: *offset,
                bytes: *bytes,
            },
            OutputSpec::Bound(_) => OutputView::Bound,
            OutputSpec::Constant(tensor) => OutputView::Constant {
                bytes: tensor.bytes(),
            },
        };
        NodeView {
            id: node.id,
            function: function.name.to_string(),
            key: function.variants[node.variant.1].key.to_vec(),
            parent: node.parent.map(|p| self.nodes[p].id),
            children: node
                .children
                .iter()
                .map(|(_, child)| self.nodes[*child].id)
                .collect(),
            graph_nodes: node.graph.info.nodes(),
            inputs: node.inputs.iter().map(input).collect(),
            outputs: node.outputs.iter().map(output).collect(),
        }
    }
}

/// Segment and offset of an address of the pool.
fn place<D: Device>(pool: &PoolHandle<D>, ptr: DevicePtr) -> String {
    match pool.locate(ptr) {
        Some((segment, offset)) => format!("S{}+{offset}", segment.0),
        None => "outside the pool".to_owned(),
    }
}
