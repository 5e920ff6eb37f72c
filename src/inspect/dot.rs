//! A tree as a Graphviz file.

use petgraph::dot::{Config, Dot};
use petgraph::graph::DiGraph;

use super::tree::title;
use crate::tree::TreeView;

/// The tree in the DOT language: a vertex for each node, an edge from parent to child, the path drawn bold.
#[must_use]
pub fn tree_dot(view: &TreeView) -> String {
    let mut graph = DiGraph::<String, ()>::new();
    let vertices: Vec<_> = view
        .nodes
        .iter()
        .map(|n| (n.id, graph.add_node(title(n))))
        .collect();
    let vertex = |id| vertices.iter().find(|(n, _)| *n == id).map(|(_, v)| *v);
    for node in &view.nodes {
        if let (Some(parent), Some(child)) = (node.parent.and_then(vertex), vertex(node.id)) {
            graph.add_edge(parent, child, ());
        }
    }
    let on_path = |v| {
        view.path
            .iter()
            .any(|run| run.as_ref().ok().copied().and_then(vertex) == Some(v))
    };
    let attributes = |_: &DiGraph<String, ()>, (v, name): (_, &String)| {
        let bold = if on_path(v) { ", style=bold" } else { "" };
        format!("label=\"{}\"{bold}", name.replace('"', "'"))
    };
    let dot = Dot::with_attr_getters(
        &graph,
        &[Config::EdgeNoLabel, Config::NodeNoLabel],
        &|_, _| String::new(),
        &attributes,
    );
    format!("{dot:?}")
}
