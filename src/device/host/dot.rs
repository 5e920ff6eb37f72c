//! A captured graph in the DOT language: what `cuGraphDebugDotPrint` is to the driver's graphs.

use std::fmt::Write as _;

use petgraph::graph::NodeIndex;

use super::graph::Dag;
use super::work::Work;
use crate::device::{KernelArg, LaunchConfig};

/// The graph's nodes, by number in order of capture, and their order. Marks are no nodes: what comes after one comes after what it came after. The body of an if is a cluster
/// of its own, behind its node.
pub(super) fn picture(dag: &Dag) -> String {
    let mut text = String::from("digraph graph_0 {\n");
    draw(&mut text, dag, "n");
    text.push_str("}\n");
    text
}

/// Writes the nodes of a dag, whose names begin with `name`.
fn draw(text: &mut String, dag: &Dag, name: &str) {
    let is_node = |index: &NodeIndex| dag[*index].node_kind().is_some();
    // Writing to a string cannot fail.
    for index in dag.node_indices().filter(is_node) {
        let (at, label) = (index.index(), escaped(&label(&dag[index])));
        let _ = writeln!(text, "  {name}{at} [label=\"{label}\"];");
        if let Work::If { body, .. } = &dag[index] {
            let _ = writeln!(text, "  subgraph cluster_{name}{at} {{");
            draw(text, body, &format!("{name}{at}_"));
            text.push_str("  }\n");
        }
    }
    for index in dag.node_indices().filter(is_node) {
        for before in before(dag, index) {
            let _ = writeln!(
                text,
                "  {name}{} -> {name}{};",
                before.index(),
                index.index()
            );
        }
    }
}

/// The nodes that a node depends on directly, marks looked through.
fn before(dag: &Dag, index: NodeIndex) -> Vec<NodeIndex> {
    let (mut found, mut seen) = (Vec::new(), vec![index]);
    let mut left = vec![index];
    while let Some(at) = left.pop() {
        for before in dag.neighbors_directed(at, petgraph::Incoming) {
            if seen.contains(&before) {
                continue;
            }
            seen.push(before);
            match dag[before].node_kind() {
                Some(_) => found.push(before),
                None => left.push(before),
            }
        }
    }
    found.sort_unstable();
    found
}

/// What a node does, its kind first.
fn label(work: &Work) -> String {
    let what = match work {
        Work::Kernel { body, config, args } => {
            let LaunchConfig {
                grid,
                block,
                shared_bytes,
            } = config;
            let args: Vec<String> = args.iter().map(argument).collect();
            format!(
                "{} grid {grid:?} block {block:?} shared {shared_bytes} B ({})",
                body.name,
                args.join(", ")
            )
        }
        Work::Gather { slots, sources } => {
            let copies = slots.iter().zip(sources.iter());
            let copies = copies.map(|(s, from)| format!("{} B {from:?} to {:?}", s.bytes, s.dst));
            format!("gather {}", copies.collect::<Vec<_>>().join(", "))
        }
        Work::Copy { dst, src, bytes } => format!("{bytes} B {src:?} to {dst:?}"),
        Work::Fill {
            dst,
            pattern,
            bytes,
        } => {
            let (value, digits) = (u64::from_le_bytes(pattern.to_bytes()), 2 * pattern.bytes());
            let width = 2 + digits as usize;
            format!("{bytes} B at {dst:?} to {value:#0width$x}")
        }
        Work::FromPinned {
            dst, offset, bytes, ..
        } => format!("{bytes} B from byte {offset} of a pinned buffer to {dst:?}"),
        Work::ToPinned {
            offset, src, bytes, ..
        } => format!("{bytes} B from {src:?} to byte {offset} of a pinned buffer"),
        Work::Write { dst, .. } | Work::FromHost { dst, .. } => format!("from the host to {dst:?}"),
        Work::Read { src, .. } | Work::ToHost { src, .. } => format!("from {src:?} to the host"),
        Work::Allocate { ptr, bytes } => format!("{bytes} B at {ptr:?}"),
        Work::Free { ptr, .. } => format!("{ptr:?}"),
        Work::If { predicate, .. } => format!("if the byte at {predicate:?} is not 0"),
        Work::Call(_)
        | Work::WaitEvent(_)
        | Work::RecordEvent(_)
        | Work::Mark { .. }
        | Work::EndIf => String::new(),
    };
    let kind = work.node_kind().unwrap_or("mark");
    format!("{kind} {what}").trim_end().to_owned()
}

fn argument(arg: &KernelArg) -> String {
    match arg {
        KernelArg::Ptr(ptr) => format!("{ptr:?}"),
        KernelArg::U32(n) => n.to_string(),
        KernelArg::I32(n) => n.to_string(),
        KernelArg::U64(n) => n.to_string(),
        KernelArg::F32(x) => x.to_string(),
        KernelArg::F64(x) => x.to_string(),
    }
}

/// As a quoted string of the language has it: a kernel's name is the caller's.
fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"")
}
