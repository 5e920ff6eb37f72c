//! What people look at: pools and trees as text, and a tree as a Graphviz file.
//!
//! Pictures are made from snapshots and views, plain values; nothing here touches a pool or a tree. They print the same on
//! every machine and device: addresses are segment+offset, names are numbers in order of creation.

mod dot;
mod pool;
mod tree;

use crate::device::Device;
use crate::pool::Tag;
use crate::tree::GraphTrees;

pub use dot::tree_dot;
pub use pool::pool_picture;
pub use tree::tree_picture;

impl<D: Device> GraphTrees<D> {
    /// The tree and its pool as text. See [`tree_picture`] and [`pool_picture`]; live blocks are named by the output they are.
    #[must_use]
    pub fn picture(&self) -> String {
        let view = self.view();
        let owner = |tag: Tag| {
            view.held
                .iter()
                .find(|h| h.storage.0 == tag.0)
                .map(|h| format!("{}.{}", h.function, h.output))
        };
        let mut text = tree_picture(&view);
        text.push_str(&pool_picture(
            &format!("pool {}", self.pool_id()),
            &self.pool_snapshot(),
            &owner,
        ));
        if !view.books_exact {
            text.push_str(
                "books: as of the last recording; what is held lies where the tree says\n",
            );
        }
        text
    }
}
