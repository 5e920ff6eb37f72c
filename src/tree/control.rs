//! What an embedder sets and asks of a tree besides running it: policies, budgets, reports, advice.

use std::sync::Arc;

use super::function::Function;
use super::{Advice, Budget, FunctionReport, GraphTrees, NodeId, OnOverwrite, ReasonKind};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sync::{lock, raise};

impl<D: Device> GraphTrees<D> {
    /// Removes all recordings of a function, with what was recorded below them: their graphs go at once, and the next [`trim`](crate::Allocator::trim) gives back
    /// what memory only they needed. Outputs that are held stay. The function stays registered, and warms up anew, also where it turned out to be
    /// too small or not to be captured.
    ///
    /// # Errors
    /// [`Error::ForeignHandle`]; [`Error::Nested`]; the pool's, with nothing removed.
    pub fn invalidate(&self, function: &Function) -> Result<()> {
        let Some(key) = function.key_in(&self.inner.owner) else {
            return Err(Error::ForeignHandle { what: "function" });
        };
        let state = self.inner.enter(function.shared_name())?;
        if state.down {
            return Ok(());
        }
        self.inner.invalidate(state, key)
    }

    /// What the tree may keep from now on; what is above goes at once, as far as it is not in use (while a closure of the tree is running: when that run ends).
    pub fn set_budget(&self, budget: Budget) {
        let mut state = lock(&self.inner.state);
        state.budget = budget;
        if state.busy.is_none() && state.is_over_budget(0) {
            // Runs of which nothing is held are not in use, though the path lists them still.
            while state.tip_is_dead() {
                state.cut_tip();
            }
        }
        raise(&self.inner.untidy);
        let removed = self.inner.tidy(&mut state);
        drop(state);
        self.inner.deliver(removed);
    }

    /// What happens from now on to outputs that are held when their generation ends.
    pub fn on_overwrite(&self, policy: OnOverwrite) {
        lock(&self.inner.state).on_overwrite = policy;
    }

    /// Whether recordings that are made from now on keep their graph's template beside the executable, for [`debug_dump`](GraphTrees::debug_dump). At first they do
    /// not: it takes memory of the host's, of which no budget knows.
    pub fn keep_templates(&self, keep: bool) {
        lock(&self.inner.state).keeps_templates = keep;
    }

    /// The picture of one recording's graph, in the DOT language: the driver's on CUDA, with all it knows of each graph node. See [`Device::graph_dot`]. Which node a
    /// run was, its [`Outputs`](crate::Outputs::node) say; of the tree itself, [`picture`](GraphTrees::picture) and [`tree_dot`](crate::inspect::tree_dot) are pictures.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]; [`Error::TemplateNotKept`]; the device's.
    pub fn debug_dump(&self, node: NodeId) -> Result<String> {
        let template = {
            let state = lock(&self.inner.state);
            let node = state
                .nodes
                .values()
                .find(|n| n.id == node)
                .ok_or(Error::UnknownNode(node))?;
            node.graph.template.clone().ok_or(Error::TemplateNotKept)?
        };
        Ok(self.inner.allocator.device().graph_dot(&template)?)
    }

    /// Makes runs for these kinds of reasons errors ([`Error::Refused`]), in place of the kinds before: [`ReasonKind::EAGER`] for no fallbacks, with the
    /// recordings besides for a service that is to be warm, none (`&[]`) as at the beginning.
    pub fn refuse(&self, kinds: &[ReasonKind]) {
        lock(&self.inner.state).refused = kinds.iter().fold(0, |all, kind| all | kind.bit());
    }

    /// Tells `hook` of advice from now on: once for each function and kind of reason it first ran eagerly for, where
    /// something can be done about it (not for keys that are not to be captured, and graphs too small). It is called at the end of that run, without a lock. (Advice is also a `tracing` warning.)
    pub fn on_advice(&self, hook: impl Fn(&Advice) + Send + Sync + 'static) {
        let old = lock(&self.inner.on_advice).replace(Arc::new(hook));
        drop(old);
    }

    /// How often a function's runs did what, and why.
    ///
    /// # Errors
    /// [`Error::ForeignHandle`].
    pub fn report(&self, function: &Function) -> Result<FunctionReport> {
        let key = function.key_in(&self.inner.owner);
        let state = lock(&self.inner.state);
        let Some(f) = key.and_then(|key| state.functions.get(key)) else {
            return if state.down {
                Err(Error::ShutDown)
            } else {
                Err(Error::ForeignHandle { what: "function" })
            };
        };
        let counted = ReasonKind::ALL.into_iter().zip(f.reasons);
        Ok(FunctionReport {
            replays: f.replays,
            recordings: f.recordings,
            reasons: counted.filter(|(_, count)| *count > 0).collect(),
        })
    }
}
