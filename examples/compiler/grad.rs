//! Automatic differentiation: from a function with a scalar loss, the function of its gradients.
//!
//! The reverse walk mirrors graph breaks: where the forward function is cut, the backward one is cut too. Variables are not saved but
//! read again, so nothing may change them between the two.

use super::ir::{Graph, IrError, Op, Shape, Var, Variable};

/// Where the caller of a backward function gets an input of it from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// This input of the forward function.
    Input(usize),
    /// This output of it.
    Output(usize),
}

/// A function split in two for training.
pub struct Gradients {
    /// The function, which now returns after its own outputs also what the backward function needs of it.
    pub forward: Graph,
    /// The gradients of the loss, in the order asked for.
    pub backward: Graph,
    /// What the backward function takes.
    pub takes: Vec<Source>,
}

/// The gradients of `loss`, a value of `forward`, by the given variables.
pub fn grad(forward: &Graph, loss: Var, by: &[Variable]) -> Result<Gradients, IrError> {
    if forward.shape(loss) != Shape::SCALAR {
        return Err(IrError::NotScalar(forward.shape(loss)));
    }
    let mut reverse = Reverse {
        forward,
        depends: depends(forward, by),
        backward: Graph::default(),
        gradients: vec![None; forward.nodes.len()],
        saved: Vec::new(),
    };
    let seed = reverse.backward.fill(Shape::SCALAR, 1.0);
    reverse.gradients[loss.0] = Some(seed);
    for (var, node) in forward.ordered().rev() {
        if node.op == Op::Break {
            reverse.backward.graph_break();
        } else if let Some(gradient) = reverse.gradients[var.0] {
            reverse.through(var, gradient)?;
        }
    }
    let mut outputs = Vec::new();
    for variable in by {
        let place = forward
            .variables()
            .find(|(_, number)| *number == variable.number);
        let gradient = place.and_then(|(var, _)| reverse.gradients[var.0]);
        outputs.push(gradient.ok_or(IrError::Independent(variable.number))?);
    }
    let (mut backward, saved) = (reverse.backward, reverse.saved);
    backward.outputs = outputs;
    let mut forward = forward.clone();
    let takes = saved
        .iter()
        .map(|&(var, _)| source(&mut forward, var))
        .collect();
    Ok(Gradients {
        forward,
        backward,
        takes,
    })
}

/// Which values depend on the variables.
fn depends(graph: &Graph, by: &[Variable]) -> Vec<bool> {
    let mut depends: Vec<bool> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let is_one =
            matches!(node.op, Op::Variable(number) if by.iter().any(|v| v.number == number));
        depends.push(is_one || node.operands.iter().any(|operand| depends[operand.0]));
    }
    depends
}

/// Where a value that the backward function needs is found; it becomes an output where it is none yet.
fn source(forward: &mut Graph, var: Var) -> Source {
    if let Some(input) = forward.inputs.iter().position(|v| *v == var) {
        return Source::Input(input);
    }
    let output = forward.outputs.iter().position(|v| *v == var);
    Source::Output(output.unwrap_or_else(|| {
        forward.outputs.push(var);
        forward.outputs.len() - 1
    }))
}

/// The reverse walk.
struct Reverse<'f> {
    forward: &'f Graph,
    depends: Vec<bool>,
    backward: Graph,
    /// By forward value: the gradient so far, a value of the backward function.
    gradients: Vec<Option<Var>>,
    /// Forward values that are inputs of the backward function, and as what.
    saved: Vec<(Var, Var)>,
}

impl Reverse<'_> {
    /// From the gradient of what an operation makes to those of its operands.
    fn through(&mut self, var: Var, gradient: Var) -> Result<(), IrError> {
        let forward = self.forward;
        let node = forward.node(var);
        match (node.op, node.operands.as_slice()) {
            (Op::Input | Op::Variable(_) | Op::Fill(_), _) => Ok(()),
            (Op::Matmul { ta, tb }, &[a, b]) => {
                // For c = a b: da = dc b', db = a' dc; with an operand transposed, so is its gradient.
                self.pass(a, |s| {
                    let b = s.saved(b);
                    if ta {
                        s.backward.matmul((b, tb), (gradient, true))
                    } else {
                        s.backward.matmul((gradient, false), (b, !tb))
                    }
                })?;
                self.pass(b, |s| {
                    let a = s.saved(a);
                    if tb {
                        s.backward.matmul((gradient, true), (a, ta))
                    } else {
                        s.backward.matmul((a, !ta), (gradient, false))
                    }
                })
            }
            (Op::Add, &[a, b]) => {
                self.pass(a, |_| Ok(gradient))?;
                self.pass(b, |_| Ok(gradient))
            }
            (Op::Sub, &[a, b]) => {
                self.pass(a, |_| Ok(gradient))?;
                self.pass(b, |s| Ok(s.backward.scale(gradient, -1.0)))
            }
            (Op::Mul, &[a, b]) => {
                self.pass(a, |s| s.times(gradient, b))?;
                self.pass(b, |s| s.times(gradient, a))
            }
            (Op::Scale(by), &[a]) => self.pass(a, |s| Ok(s.backward.scale(gradient, by))),
            (Op::Relu, &[a]) => self.pass(a, |s| {
                let result = s.saved(var);
                s.backward.pairwise(Op::ReluGrad, gradient, result)
            }),
            (Op::BiasAdd, &[a, bias]) => {
                self.pass(a, |_| Ok(gradient))?;
                self.pass(bias, |s| Ok(s.backward.sum_rows(gradient)))
            }
            (Op::Sum, &[a]) => self.pass(a, |s| s.backward.broadcast(gradient, forward.shape(a))),
            (op, _) => Err(IrError::NotDifferentiable(op)),
        }
    }

    /// Adds to an operand's gradient, if anybody asks for it.
    fn pass(
        &mut self,
        operand: Var,
        make: impl FnOnce(&mut Self) -> Result<Var, IrError>,
    ) -> Result<(), IrError> {
        if !self.depends[operand.0] {
            return Ok(());
        }
        let made = make(self)?;
        self.gradients[operand.0] = Some(match self.gradients[operand.0] {
            Some(so_far) => self.backward.pairwise(Op::Add, so_far, made)?,
            None => made,
        });
        Ok(())
    }

    fn times(&mut self, gradient: Var, operand: Var) -> Result<Var, IrError> {
        let operand = self.saved(operand);
        self.backward.pairwise(Op::Mul, gradient, operand)
    }

    /// A forward value, as the backward function sees it.
    fn saved(&mut self, var: Var) -> Var {
        let node = self.forward.node(var);
        if let Op::Variable(number) = node.op {
            let shape = node.shape;
            return self.backward.variable(Variable { number, shape });
        }
        if let Some((_, input)) = self.saved.iter().find(|(v, _)| *v == var) {
            return *input;
        }
        let input = self.backward.input(node.shape);
        self.saved.push((var, input));
        input
    }
}
