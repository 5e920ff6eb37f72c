//! From a function to what is registered: cut at graph breaks, without dead code, with the last use of every value known.

use std::collections::HashMap;

use super::ir::{Graph, IrError, Op, Var};

/// A piece of a function between two graph breaks.
pub struct Part {
    /// The piece as a function of its own.
    pub code: Graph,
    /// Its inputs, as values of the whole: inputs of it, or made by earlier parts.
    pub takes: Vec<Var>,
    /// Its outputs, as values of the whole.
    pub gives: Vec<Var>,
}

/// Cuts a function at its graph breaks. Parts without work are left out.
pub fn partition(whole: &Graph) -> Result<Vec<Part>, IrError> {
    for (index, output) in whole.outputs.iter().enumerate() {
        if !whole.node(*output).op.runs() {
            return Err(IrError::PassedThrough(index));
        }
    }
    let needed = needed(whole);
    let mut parts = Vec::new();
    let mut start = 0;
    let breaks = whole.ordered().filter(|(_, node)| node.op == Op::Break);
    for end in breaks.map(|(var, _)| var.0).chain([whole.nodes.len()]) {
        let part = cut(whole, &needed, start, end);
        if part.code.nodes.iter().any(|node| node.op.runs()) {
            parts.push(part);
        }
        start = end;
    }
    Ok(parts)
}

/// Which operations have an effect: outputs, changes in place, and what these need.
fn needed(graph: &Graph) -> Vec<bool> {
    let mut needed = vec![false; graph.nodes.len()];
    for output in &graph.outputs {
        needed[output.0] = true;
    }
    for (var, node) in graph.ordered().rev() {
        needed[var.0] |= node.op.in_place();
        if needed[var.0] {
            for operand in &node.operands {
                needed[operand.0] = true;
            }
        }
    }
    needed
}

/// The operations `start..end`, as a function of what lies before them.
fn cut(whole: &Graph, needed: &[bool], start: usize, end: usize) -> Part {
    let mut part = Part {
        code: Graph::default(),
        takes: Vec::new(),
        gives: Vec::new(),
    };
    let mut local: HashMap<usize, Var> = HashMap::new();
    let inside = whole.ordered().skip(start).take(end - start);
    for (var, node) in inside.clone() {
        if !needed[var.0] || !node.op.runs() {
            continue;
        }
        let operands = node.operands.iter().map(|operand| {
            *local.entry(operand.0).or_insert_with(|| {
                let outer = whole.node(*operand);
                if let Op::Variable(_) = outer.op {
                    return part.code.push(outer.op, vec![], outer.shape);
                }
                part.takes.push(*operand);
                part.code.input(outer.shape)
            })
        });
        let operands = operands.collect();
        let made = part.code.push(node.op, operands, node.shape);
        local.insert(var.0, made);
    }
    let used_later = |var: Var| {
        let mut later = whole.ordered().skip(end);
        whole.outputs.contains(&var)
            || later.any(|(user, node)| needed[user.0] && node.operands.contains(&var))
    };
    for (var, _) in inside.filter(|(var, node)| node.op.runs() && used_later(*var)) {
        if let Some(made) = local.get(&var.0) {
            part.gives.push(var);
            part.code.outputs.push(*made);
        }
    }
    part
}

/// The schedule of a part's memory: for each operation, the values whose last use it is. Outputs have none.
pub fn last_uses(code: &Graph) -> Vec<Vec<Var>> {
    let mut seen = vec![false; code.nodes.len()];
    for output in &code.outputs {
        seen[output.0] = true;
    }
    let mut dying = vec![Vec::new(); code.nodes.len()];
    for (var, node) in code.ordered().rev() {
        for operand in &node.operands {
            if !std::mem::replace(&mut seen[operand.0], true) {
                dying[var.0].push(*operand);
            }
        }
    }
    dying
}

/// The same between parts: for each part and each value it takes, whether nobody takes it after. Outputs of the whole are not used up.
pub fn last_takes(whole: &Graph, parts: &[Part]) -> Vec<Vec<bool>> {
    let mut seen = whole.outputs.clone();
    let mut last: Vec<Vec<bool>> = parts
        .iter()
        .rev()
        .map(|part| {
            let last = part.takes.iter().map(|var| !seen.contains(var)).collect();
            seen.extend(&part.takes);
            last
        })
        .collect();
    last.reverse();
    last
}
