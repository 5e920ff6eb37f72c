//! Recordings that go: because their function is unregistered or invalidated, a static input died, or the budget is spent.
//!
//! A node goes with all that was recorded below it. What is held of its outputs owns its memory from then on, as after a warmup. What is removed is handed
//! back to the caller, who drops it when no lock is held: closures and values are the user's, and may do anything in their drop.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::function::{FunctionState, HeldBound, Never};
use super::node::{InputSpec, Node};
use super::path::{Entry, Run, Warm};
use super::reason::Advice;
use super::{FunctionKey, Inner, NodeKey, State};
use crate::device::Device;
use crate::error::Result;
use crate::storage::Storage;
use crate::sync::{MutexGuard, lock, lower, raise};

/// What was removed, to be dropped without a lock.
pub(super) struct Removed<D: Device> {
    _nodes: Vec<Node<D>>,
    _functions: Vec<FunctionState<D>>,
    /// What was looked at, perhaps by its last handle.
    _looked_at: Vec<LookedAt<D>>,
    _buried: Vec<Buried>,
    advice: Vec<Advice>,
}

/// Something of the caller's, whose drop may do anything.
pub(super) type Buried = Box<dyn Any + Send>;

/// A static input, or a function's bound tensors.
enum LookedAt<D: Device> {
    Storage(#[allow(dead_code)] Arc<Storage<D>>), // held, not read
    Bound(#[allow(dead_code)] HeldBound<D>),
}

impl<D: Device> Removed<D> {
    fn nothing() -> Self {
        Removed {
            _nodes: Vec::new(),
            _functions: Vec::new(),
            _looked_at: Vec::new(),
            _buried: Vec::new(),
            advice: Vec::new(),
        }
    }
}

/// Tidies up at a run's end, however the run ends. To be dropped when no lock is held.
pub(super) struct Tidied<'i, D: Device> {
    inner: &'i Inner<D>,
    /// What was removed at the run's begin.
    pub(super) removed: Option<Removed<D>>,
}

impl<'i, D: Device> Tidied<'i, D> {
    pub(super) fn new(inner: &'i Inner<D>) -> Self {
        Tidied {
            inner,
            removed: None,
        }
    }
}

impl<D: Device> Drop for Tidied<'_, D> {
    #[inline]
    fn drop(&mut self) {
        if self.inner.untidy.load(Ordering::Acquire) {
            self.inner.tidy_after();
        }
        if self.removed.is_some() {
            self.inner.deliver(self.removed.take());
        }
    }
}

/// Where a function's handle says that it is gone.
pub(super) trait Registry: Send + Sync {
    fn leave(&self, key: FunctionKey);
}

impl<D: Device> Registry for Inner<D> {
    fn leave(&self, key: FunctionKey) {
        let mut state = lock(&self.state);
        state.leaving.push(key);
        raise(&self.untidy);
        let removed = self.tidy(&mut state);
        drop(state);
        self.deliver(removed);
    }
}

impl<D: Device> Inner<D> {
    /// Removes what is to go, unless a closure is running: then at that run's end. Asked by every run, at its begin and end; one load where there is nothing.
    pub(super) fn tidy(&self, state: &mut State<D>) -> Option<Removed<D>> {
        if !self.untidy.load(Ordering::Acquire) {
            return None;
        }
        let mut removed = Removed::nothing();
        removed._buried = std::mem::take(&mut state.buried);
        if state.busy.is_some() {
            return Some(removed);
        }
        lower(&self.untidy);
        removed.advice = std::mem::take(&mut state.advice);
        let leaving = std::mem::take(&mut state.leaving);
        let looked_at = &mut removed._looked_at;
        let mut gone = |node: &Node<D>| {
            leaving.contains(&node.variant.0)
                || state.functions[node.variant.0].is_dead(looked_at)
                || node.inputs.iter().any(|input| input.is_dead(looked_at))
        };
        let doomed: Vec<NodeKey> = state
            .nodes
            .iter()
            .filter(|(_, node)| gone(node))
            .map(|(key, _)| key)
            .collect();
        match self.remove(state, &doomed) {
            Ok(nodes) => {
                removed._nodes = nodes;
                for key in leaving {
                    state.forget_places(|_, function| function == key);
                    removed._functions.extend(state.functions.remove(key));
                }
                removed._nodes.extend(self.make_room(state, 0));
            }
            Err(error) => {
                tracing::warn!(%error, "recordings are to go, and what is held of them cannot own its memory yet; tried again at the next run");
                state.leaving = leaving;
                raise(&self.untidy);
            }
        }
        Some(removed)
    }

    /// Keeps something of the caller's until the lock is free: the run that has it is about to end, and drops it then.
    #[cold]
    pub(super) fn bury(&self, state: &mut State<D>, something: impl Any + Send) {
        state.buried.push(Box::new(something));
        raise(&self.untidy);
    }

    /// Tidies up at a run's end.
    #[cold]
    fn tidy_after(&self) {
        let removed = {
            let mut state = lock(&self.state);
            self.tidy(&mut state)
        };
        self.deliver(removed);
    }

    /// Drops what was removed, and says what there is to say. No lock is held.
    pub(super) fn deliver(&self, removed: Option<Removed<D>>) {
        let Some(removed) = removed else { return };
        let hook = lock(&self.on_advice).clone();
        if let Some(hook) = hook {
            removed.advice.iter().for_each(|advice| hook(advice));
        }
    }

    /// Removes all recordings of a function; its keys are to be warmed up anew.
    pub(super) fn invalidate(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        function: FunctionKey,
    ) -> Result<()> {
        let doomed: Vec<NodeKey> = state
            .nodes
            .iter()
            .filter(|(_, node)| node.variant.0 == function)
            .map(|(key, _)| key)
            .collect();
        let nodes = self.remove(&mut state, &doomed)?;
        let f = &mut state.functions[function];
        let skip_warmup = f.skip_warmup;
        for variant in &mut f.variants {
            variant.warm = skip_warmup;
            variant.captured();
            // What its graph was like is not known any more; what the caller chose is.
            variant.never = variant.never.filter(|never| *never == Never::Unwanted);
        }
        state.forget_places(|_, f| f == function);
        drop(state);
        drop(nodes);
        Ok(())
    }

    /// Removes nodes and all below them. An error leaves everything as it was.
    pub(super) fn remove(&self, state: &mut State<D>, doomed: &[NodeKey]) -> Result<Vec<Node<D>>> {
        let all = state.subtrees(doomed);
        if all.is_empty() {
            return Ok(Vec::new());
        }
        let on =
            |entry: &Entry<D>| matches!(entry.run, Run::Node { node, .. } if all.contains(&node));
        if state.path.iter().chain(&state.carried).any(on) {
            self.catch_up_anywhere(state)?;
            state.release_runs(&all);
        }
        let nodes: Vec<Node<D>> = all.iter().filter_map(|key| state.unlink(*key)).collect();
        for node in &nodes {
            self.pool.unpin(&node.graph.baked.pins);
        }
        state.forget_places(|parent, _| parent.is_some_and(|key| all.contains(&key)));
        tracing::debug!(nodes = nodes.len(), "recordings removed");
        Ok(nodes)
    }

    /// Makes the books say what is held, where no run's stream is at hand: on the last of those that runs were called on, after the others.
    fn catch_up_anywhere(&self, state: &mut State<D>) -> Result<()> {
        self.hear_of_streams(state);
        let free = |used: &&D::Stream| matches!(self.captures(used), Ok(false));
        let streams: Vec<D::Stream> = state.streams.iter().filter(free).cloned().collect();
        let last = streams.last().unwrap_or(&self.stream).clone();
        if !state.books_exact {
            for used in streams.iter().filter(|used| **used != last) {
                self.follow(used, &last)?;
            }
        }
        self.catch_up(state, &last)?;
        if !state.streams.contains(&last) {
            // All of them capture. The next run comes after what was told the device here.
            state.streams.push(last);
        }
        if state.streams.len() > 1 {
            // As in a run: what is in use on several streams does not die in the order of one.
            state.all_held().for_each(|storage| storage.hush());
        }
        Ok(())
    }

    /// Lets go of all that the graphs of a tree that ends have pinned.
    pub(super) fn unpin_all(&self, state: &State<D>) {
        for node in state.nodes.values() {
            self.pool.unpin(&node.graph.baked.pins);
        }
    }

    /// Removes recordings until there is room for `more` graphs within the budget.
    #[inline]
    pub(super) fn make_room(&self, state: &mut State<D>, more: usize) -> Vec<Node<D>> {
        match state.is_over_budget(more) {
            true => self.evict(state, more),
            false => Vec::new(),
        }
    }

    /// The same where there is none.
    #[cold]
    fn evict(&self, state: &mut State<D>, more: usize) -> Vec<Node<D>> {
        let mut all = Vec::new();
        while state.is_over_budget(more) {
            let Some(key) = state.oldest_leaf() else {
                break;
            };
            match self.remove(state, &[key]) {
                Ok(nodes) => all.extend(nodes),
                Err(error) => {
                    tracing::warn!(%error, "a recording could not be removed");
                    break;
                }
            }
        }
        all
    }
}

impl<D: Device> State<D> {
    /// Nodes and all below them, parents first.
    fn subtrees(&self, roots: &[NodeKey]) -> Vec<NodeKey> {
        let mut all: Vec<NodeKey> = Vec::new();
        let mut next: Vec<NodeKey> = roots.to_vec();
        while let Some(key) = next.pop() {
            if !all.contains(&key)
                && let Some(node) = self.nodes.get(key)
            {
                all.push(key);
                next.extend(node.children.iter().map(|(_, child)| *child));
            }
        }
        all
    }

    /// Runs of these nodes become runs without a node: what is held of them owns its block already.
    fn release_runs(&mut self, nodes: &[NodeKey]) {
        let State {
            path,
            carried,
            nodes: all,
            functions,
            ..
        } = self;
        for entry in path.iter_mut().chain(carried) {
            let Run::Node { node: key, .. } = entry.run else {
                continue;
            };
            if nodes.contains(&key) {
                let node = &all[key];
                entry.run = Run::Warm(Box::new(Warm {
                    function: functions[node.variant.0].name.clone(),
                    slots: node.slots.iter().map(|(s, _)| s.clone()).collect(),
                    live: node.live.clone(),
                }));
            }
        }
    }

    /// Takes a node out of the tree.
    fn unlink(&mut self, key: NodeKey) -> Option<Node<D>> {
        let node = self.nodes.remove(key)?;
        if node.children.is_empty() {
            self.leaves.remove(key, &node);
        }
        match node.parent {
            Some(above) => {
                // Gone before what is below it, if both go.
                if let Some(parent) = self.nodes.get_mut(above) {
                    parent.children.retain(|(_, child)| *child != key);
                    if parent.children.is_empty() {
                        self.leaves.add(above, parent);
                    }
                }
            }
            None => {
                // Those that go for want of room are among the first.
                if let Some(at) = self.roots.iter().position(|root| *root == key) {
                    self.roots.remove(at);
                }
            }
        }
        let f = &mut self.functions[node.variant.0];
        f.recordings -= 1;
        f.variants[node.variant.1].roots.retain(|root| *root != key);
        self.graph_bytes -= node.graph.info.exec_bytes();
        self.counts.removed += 1;
        Some(node)
    }

    /// Whether there are more graphs, or larger ones, than the budget says, if `more` are made.
    pub(super) fn is_over_budget(&self, more: usize) -> bool {
        self.nodes.len() + more > self.budget.graphs || self.graph_bytes > self.budget.graph_bytes
    }

    /// Of the recordings with nothing below them that no run of the path or before is of, the one that was used the longest ago.
    pub(super) fn oldest_leaf(&mut self) -> Option<NodeKey> {
        let in_use = |key: NodeKey| {
            let mut entries = self.path.iter().chain(&self.carried);
            entries.any(|e| matches!(e.run, Run::Node { node, .. } if node == key))
        };
        self.leaves.oldest(&mut self.nodes, in_use)
    }

    fn forget_places(&mut self, gone: impl Fn(Option<NodeKey>, FunctionKey) -> bool) {
        let skips = &mut self.skips;
        self.places.retain(|(parent, function), place| {
            let keep = !gone(*parent, *function);
            *skips -= usize::from(!keep && place.is_skipped());
            keep
        });
    }
}

impl<D: Device> FunctionState<D> {
    /// Whether a tensor that it bound is gone.
    fn is_dead(&self, looked_at: &mut Vec<LookedAt<D>>) -> bool {
        if !self.lost_bound() {
            return false;
        }
        let held = self.hold_bound();
        let died = held.died.is_some();
        looked_at.push(LookedAt::Bound(held));
        died
    }
}

impl<D: Device> InputSpec<D> {
    /// Whether it is a static input that is gone: the graph has its address, and the memory may be anybody's.
    fn is_dead(&self, looked_at: &mut Vec<LookedAt<D>>) -> bool {
        let InputSpec::Static {
            storage: Some(weak),
            ..
        } = self
        else {
            return false;
        };
        let Some(storage) = weak.upgrade() else {
            return true;
        };
        let died = storage.owners() == 0;
        looked_at.push(LookedAt::Storage(storage));
        died
    }
}
