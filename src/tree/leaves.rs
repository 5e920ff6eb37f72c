//! Which recording goes where a budget is full: the leaves, in the order in which they were used last. Touched by `record` and `remove`, which make and
//! take nodes, and by who looks for the oldest.
//!
//! A replay tells nobody: it writes the time into its node. So a leaf may have been used since it was listed; whoever looks for the oldest lists it again
//! then, which is once for each replay at most. As long as nobody has looked, nothing is listed, and it costs nothing.

use std::collections::BTreeSet;
use std::ops::Bound;

use slotmap::SlotMap;

use super::NodeKey;
use super::node::{Node, NodeId};
use crate::device::Device;

/// The leaves of a tree.
#[derive(Default)]
pub(super) struct Leaves {
    order: Option<BTreeSet<Listed>>,
}

/// When it was used last, as far as that is known; who was recorded first comes first otherwise.
type Listed = (u64, NodeId, NodeKey);

fn list<D: Device>(key: NodeKey, node: &mut Node<D>) -> Listed {
    node.listed = node.used;
    (node.listed, node.id, key)
}

impl Leaves {
    /// A node has nothing below it: it is new, or the last one below went. O(log leaves).
    #[inline]
    pub(super) fn add<D: Device>(&mut self, key: NodeKey, node: &mut Node<D>) {
        if let Some(order) = &mut self.order {
            order.insert(list(key, node));
        }
    }

    /// A leaf goes, or gets something below it. O(log leaves).
    #[inline]
    pub(super) fn remove<D: Device>(&mut self, key: NodeKey, node: &Node<D>) {
        if let Some(order) = &mut self.order {
            order.remove(&(node.listed, node.id, key));
        }
    }

    /// The leaf that was used the longest ago, of those that are not in use. O(log leaves) for each that is in use or was used since it was listed; the first
    /// time O(nodes * log leaves).
    pub(super) fn oldest<D: Device>(
        &mut self,
        nodes: &mut SlotMap<NodeKey, Node<D>>,
        in_use: impl Fn(NodeKey) -> bool,
    ) -> Option<NodeKey> {
        let order = self.order.get_or_insert_with(|| {
            let leaves = nodes.iter_mut().filter(|(_, n)| n.children.is_empty());
            leaves.map(|(key, node)| list(key, node)).collect()
        });
        let mut behind = Bound::Unbounded;
        loop {
            let &next = order.range((behind, Bound::Unbounded)).next()?;
            let (listed, _, key) = next;
            let node = &mut nodes[key];
            if node.used != listed {
                order.remove(&next);
                order.insert(list(key, node));
            } else if in_use(key) {
                behind = Bound::Excluded(next);
            } else {
                return Some(key);
            }
        }
    }
}
