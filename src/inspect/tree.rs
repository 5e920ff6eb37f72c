//! A tree as text.

use std::fmt::Write;

use super::pool::counted;
use crate::tree::{InputView, NodeId, NodeView, OutputView, TreeView};

/// Functions, nodes below their parents, inputs and outputs, the path and what is held of it.
///
/// ```text
/// tree: 2 functions, 2 nodes, 1 root
/// n0 g1: 2 graph nodes
///   in  0 copied 12 B
///   out 0 12 B at S0+0, held
///   n1 g2: 1 graph node
///     in  0 g1.0 12 B
///     out 0 12 B at S0+512, held
/// path: n0 > n1; 2 held
/// ```
#[must_use]
pub fn tree_picture(view: &TreeView) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "tree: {}, {}, {}",
        counted(view.functions.len(), "function"),
        counted(view.nodes.len(), "node"),
        counted(view.roots.len(), "root"),
    );
    for root in &view.roots {
        branch(&mut text, view, *root, 0);
    }
    let path: Vec<String> = view
        .path
        .iter()
        .map(|run| match run {
            Ok(node) => format!("n{}", node.0),
            Err(function) => format!("{function} (warmup)"),
        })
        .collect();
    let path = if path.is_empty() {
        "empty".to_owned()
    } else {
        path.join(" > ")
    };
    let _ = writeln!(text, "path: {path}; {} held", view.held.len());
    text
}

fn branch(text: &mut String, view: &TreeView, id: NodeId, depth: usize) {
    let Some(node) = view.nodes.iter().find(|n| n.id == id) else {
        return;
    };
    let pad = "  ".repeat(depth);
    let _ = writeln!(
        text,
        "{pad}{}: {}",
        title(node),
        counted(node.graph_nodes, "graph node")
    );
    for (index, input) in node.inputs.iter().enumerate() {
        let what = match input {
            InputView::Empty => "empty".to_owned(),
            InputView::Managed {
                function,
                output,
                offset,
                bytes,
            } => format!("{function}.{output}{} {bytes} B", from(*offset)),
            InputView::Static { bytes } => format!("static {bytes} B"),
            InputView::Copied { bytes } => format!("copied {bytes} B"),
            InputView::Value => "host value".to_owned(),
        };
        let _ = writeln!(text, "{pad}  in  {index} {what}");
    }
    for (index, output) in node.outputs.iter().enumerate() {
        let what = match output {
            OutputView::Empty => "empty".to_owned(),
            OutputView::Fresh {
                place,
                offset,
                bytes,
                held,
                ..
            } => {
                format!(
                    "{bytes} B at {place}{}{}",
                    from(*offset),
                    if *held { ", held" } else { "" }
                )
            }
            OutputView::Input {
                input,
                offset,
                bytes,
            } => format!("input {input}{} {bytes} B", from(*offset)),
            OutputView::Bound => "bound input".to_owned(),
            OutputView::Constant { bytes } => format!("constant {bytes} B"),
        };
        let _ = writeln!(text, "{pad}  out {index} {what}");
    }
    for child in &node.children {
        branch(text, view, *child, depth + 1);
    }
}

/// A node's number, function and key.
pub(super) fn title(node: &NodeView) -> String {
    if node.key.is_empty() {
        format!("n{} {}", node.id.0, node.function)
    } else {
        format!("n{} {}{:?}", node.id.0, node.function, node.key)
    }
}

fn from(offset: u64) -> String {
    if offset == 0 {
        String::new()
    } else {
        format!(" from +{offset}")
    }
}
