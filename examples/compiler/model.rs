//! What is compiled: a network of two layers with a graph break between them, its gradients, and two optimizer steps.

use super::grad::{Gradients, grad};
use super::ir::{Graph, IrError, Op, Shape, Var, Variable};

pub const BATCH: u32 = 16;
pub const FEATURES: u32 = 8;
pub const HIDDEN: u32 = 16;
pub const TARGETS: u32 = 4;

/// Weights and biases of both layers.
pub const PARAMETERS: [Variable; 4] = [
    variable(0, FEATURES, HIDDEN),
    variable(1, 1, HIDDEN),
    variable(2, HIDDEN, TARGETS),
    variable(3, 1, TARGETS),
];

const fn variable(number: usize, rows: u32, cols: u32) -> Variable {
    Variable {
        number,
        shape: Shape(rows, cols),
    }
}

/// The optimizer's state for a parameter.
pub fn momentum(parameter: Variable) -> Variable {
    Variable {
        number: parameter.number + PARAMETERS.len(),
        ..parameter
    }
}

/// The functions of the program.
pub struct Model {
    /// Batch and targets to loss, and what the backward function needs.
    pub training: Gradients,
    /// Batch and targets to loss.
    pub evaluate: Graph,
    /// From gradients: a step with the momentum gathered so far.
    pub descend: Graph,
    /// From gradients: a short step that forgets the momentum, for when the loss has risen much.
    pub brake: Graph,
}

impl Model {
    pub fn new() -> Result<Self, IrError> {
        let (evaluate, loss) = forward()?;
        Ok(Model {
            training: grad(&evaluate, loss, &PARAMETERS)?,
            evaluate,
            descend: optimizer(0.9, 0.05)?,
            brake: optimizer(0.0, 0.02)?,
        })
    }
}

fn forward() -> Result<(Graph, Var), IrError> {
    let mut f = Graph::default();
    let x = f.input(Shape(BATCH, FEATURES));
    let targets = f.input(Shape(BATCH, TARGETS));
    let [w1, b1, w2, b2] = PARAMETERS.map(|parameter| f.variable(parameter));
    let hidden = f.matmul((x, false), (w1, false))?;
    let hidden = f.bias_add(hidden, b1)?;
    let hidden = f.relu(hidden);
    f.graph_break();
    let y = f.matmul((hidden, false), (w2, false))?;
    let y = f.bias_add(y, b2)?;
    let loss = f.mean_squared_error(y, targets)?;
    f.outputs = vec![loss];
    Ok((f, loss))
}

/// `v = keep * v + g; p -= rate * v`, for every parameter.
fn optimizer(keep: f32, rate: f32) -> Result<Graph, IrError> {
    let mut f = Graph::default();
    let gradients = PARAMETERS.map(|parameter| f.input(parameter.shape));
    for (parameter, gradient) in PARAMETERS.into_iter().zip(gradients) {
        let (p, v) = (f.variable(parameter), f.variable(momentum(parameter)));
        let kept = f.scale(v, keep);
        let moved = f.pairwise(Op::Add, kept, gradient)?;
        f.change(Op::Assign, v, moved)?;
        f.change(Op::Descend(rate), p, moved)?;
    }
    Ok(f)
}
