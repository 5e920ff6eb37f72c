//! The intermediate representation: a function is a list of operations in order, each of which makes one matrix of `f32`.
//!
//! [`Graph`] is also its own builder; every method checks the shapes. Variables (parameters, optimizer state) live outside of all
//! functions and are changed in place.

use thiserror::Error;

/// Why a function cannot be built or compiled.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum IrError {
    #[error("{op:?} takes no {left:?} and {right:?}")]
    Shapes { op: Op, left: Shape, right: Shape },
    #[error("{0:?} changes its first operand in place, which is to be a variable")]
    NotAVariable(Op),
    #[error("the loss is {0:?}, not a scalar")]
    NotScalar(Shape),
    #[error("{0:?} has no derivative here")]
    NotDifferentiable(Op),
    #[error("output {0} is an input or a variable of the function: it makes nothing there")]
    PassedThrough(usize),
    #[error("the loss does not depend on variable {0}")]
    Independent(usize),
}

/// Rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape(pub u32, pub u32);

impl Shape {
    pub const SCALAR: Shape = Shape(1, 1);

    pub fn elements(self) -> u64 {
        u64::from(self.0) * u64::from(self.1)
    }

    pub fn bytes(self) -> u64 {
        4 * self.elements()
    }

    fn transposed(self, really: bool) -> Shape {
        if really { Shape(self.1, self.0) } else { self }
    }
}

/// What an operation makes, by its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Var(pub usize);

/// A matrix outside of all functions, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    pub number: usize,
    pub shape: Shape,
}

/// What is done. `a` and `b` are the operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// What the caller passes.
    Input,
    /// What lies in the variable of this number.
    Variable(usize),
    /// The same number everywhere.
    Fill(f32),
    /// `a b`, either of them transposed.
    Matmul {
        ta: bool,
        tb: bool,
    },
    Add,
    Sub,
    Mul,
    Scale(f32),
    Relu,
    /// `a` where `b`, a result of [`Relu`](Op::Relu), is positive; 0 elsewhere.
    ReluGrad,
    /// `a`, with the row `b` added to each of its rows.
    BiasAdd,
    /// The sum of the rows: one row.
    SumRows,
    /// The sum of all: a scalar.
    Sum,
    /// A scalar, everywhere.
    Broadcast,
    /// `a = b`, in place.
    Assign,
    /// `a -= by * b`, in place.
    Descend(f32),
    /// Ends one compiled function; what follows is another.
    Break,
}

impl Op {
    /// Whether it changes its first operand and makes nothing of its own.
    pub fn in_place(self) -> bool {
        matches!(self, Op::Assign | Op::Descend(_))
    }

    /// Whether there is something to run.
    pub fn runs(self) -> bool {
        !matches!(self, Op::Input | Op::Variable(_) | Op::Break)
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub operands: Vec<Var>,
    pub shape: Shape,
}

/// A function.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    pub nodes: Vec<Node>,
    pub inputs: Vec<Var>,
    pub outputs: Vec<Var>,
}

impl Graph {
    pub fn node(&self, var: Var) -> &Node {
        &self.nodes[var.0]
    }

    pub fn shape(&self, var: Var) -> Shape {
        self.node(var).shape
    }

    /// All operations, in order.
    pub fn ordered(&self) -> impl DoubleEndedIterator<Item = (Var, &Node)> + Clone {
        self.nodes
            .iter()
            .enumerate()
            .map(|(place, node)| (Var(place), node))
    }

    /// The variables it uses, in order: where, and which.
    pub fn variables(&self) -> impl Iterator<Item = (Var, usize)> {
        self.ordered().filter_map(|(var, node)| match node.op {
            Op::Variable(number) => Some((var, number)),
            _ => None,
        })
    }

    /// Appends an operation without looking at it.
    pub fn push(&mut self, op: Op, operands: Vec<Var>, shape: Shape) -> Var {
        self.nodes.push(Node {
            op,
            operands,
            shape,
        });
        Var(self.nodes.len() - 1)
    }

    pub fn input(&mut self, shape: Shape) -> Var {
        let var = self.push(Op::Input, vec![], shape);
        self.inputs.push(var);
        var
    }

    /// The variable, at one place however often it is asked for.
    pub fn variable(&mut self, variable: Variable) -> Var {
        let found = self.variables().find(|(_, n)| *n == variable.number);
        match found {
            Some((var, _)) => var,
            None => self.push(Op::Variable(variable.number), vec![], variable.shape),
        }
    }

    pub fn fill(&mut self, shape: Shape, value: f32) -> Var {
        self.push(Op::Fill(value), vec![], shape)
    }

    pub fn matmul(&mut self, (a, ta): (Var, bool), (b, tb): (Var, bool)) -> Result<Var, IrError> {
        let (left, right) = (self.shape(a).transposed(ta), self.shape(b).transposed(tb));
        self.checked(
            Op::Matmul { ta, tb },
            [a, b],
            left.1 == right.0,
            Shape(left.0, right.1),
        )
    }

    /// [`Op::Add`], [`Op::Sub`], [`Op::Mul`], [`Op::ReluGrad`]: both operands have one shape.
    pub fn pairwise(&mut self, op: Op, a: Var, b: Var) -> Result<Var, IrError> {
        let shape = self.shape(a);
        self.checked(op, [a, b], shape == self.shape(b), shape)
    }

    pub fn bias_add(&mut self, a: Var, bias: Var) -> Result<Var, IrError> {
        let shape = self.shape(a);
        let fits = self.shape(bias) == Shape(1, shape.1);
        self.checked(Op::BiasAdd, [a, bias], fits, shape)
    }

    pub fn scale(&mut self, a: Var, by: f32) -> Var {
        self.push(Op::Scale(by), vec![a], self.shape(a))
    }

    pub fn relu(&mut self, a: Var) -> Var {
        self.push(Op::Relu, vec![a], self.shape(a))
    }

    pub fn sum_rows(&mut self, a: Var) -> Var {
        self.push(Op::SumRows, vec![a], Shape(1, self.shape(a).1))
    }

    pub fn sum(&mut self, a: Var) -> Var {
        self.push(Op::Sum, vec![a], Shape::SCALAR)
    }

    pub fn broadcast(&mut self, a: Var, shape: Shape) -> Result<Var, IrError> {
        if self.shape(a) != Shape::SCALAR {
            return Err(IrError::NotScalar(self.shape(a)));
        }
        Ok(self.push(Op::Broadcast, vec![a], shape))
    }

    /// The mean of the squared differences.
    pub fn mean_squared_error(&mut self, a: Var, b: Var) -> Result<Var, IrError> {
        let difference = self.pairwise(Op::Sub, a, b)?;
        let squares = self.pairwise(Op::Mul, difference, difference)?;
        let sum = self.sum(squares);
        Ok(self.scale(sum, 1.0 / self.shape(a).elements() as f32))
    }

    /// [`Op::Assign`] or [`Op::Descend`].
    pub fn change(&mut self, op: Op, variable: Var, value: Var) -> Result<(), IrError> {
        if !matches!(self.node(variable).op, Op::Variable(_)) {
            return Err(IrError::NotAVariable(op));
        }
        self.pairwise(op, variable, value).map(|_| ())
    }

    pub fn graph_break(&mut self) {
        self.push(Op::Break, vec![], Shape(0, 0));
    }

    fn checked(
        &mut self,
        op: Op,
        [a, b]: [Var; 2],
        fits: bool,
        shape: Shape,
    ) -> Result<Var, IrError> {
        if !fits {
            let (left, right) = (self.shape(a), self.shape(b));
            return Err(IrError::Shapes { op, left, right });
        }
        Ok(self.push(op, vec![a, b], shape))
    }
}
