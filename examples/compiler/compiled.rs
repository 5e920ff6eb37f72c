//! The compiled run: every part of a function is a function of a graph tree.
//!
//! Variables are bound at registration. Values that go from part to part stay in the tree's pool, and are given at their last
//! use, so that the part may use their memory. Parts of equal code are one function of the tree, whatever they were cut from.

use std::error::Error;
use std::sync::Arc;

use cudagraph_trees::device::Device;
use cudagraph_trees::{
    Arg, BodyResult, Function, FunctionSpec, GraphTrees, Inputs, Recorder, Step, Tensor, give, lend,
};

use super::backend::{Backend, Place, tensor};
use super::ir::{Graph, Var};
use super::lower::Library;
use super::partition::{Part, last_takes, last_uses, partition};

pub struct Compiled<D: Device> {
    place: Place<D>,
    trees: GraphTrees<D>,
    library: Arc<Library<D>>,
    variables: Vec<Tensor<D>>,
    /// What was registered, by its code.
    registered: Vec<(Graph, Function)>,
    /// Parts that turned out to be registered already: the part's name, the function's.
    shared: Vec<(String, String)>,
    step: Option<Step>,
}

/// A compiled function.
pub struct Code {
    /// How many values it has in all.
    values: usize,
    inputs: Vec<Var>,
    pieces: Vec<Piece>,
    outputs: Vec<Var>,
}

/// A call of the tree.
struct Piece {
    function: Function,
    /// What it takes, and whether nobody needs it after.
    takes: Vec<(Var, bool)>,
    gives: Vec<Var>,
}

impl<D: Device> Compiled<D> {
    pub fn new(
        place: Place<D>,
        library: Arc<Library<D>>,
        variables: Vec<Tensor<D>>,
    ) -> Result<Self, Box<dyn Error>> {
        Ok(Compiled {
            trees: GraphTrees::new(&place.allocator)?,
            place,
            library,
            variables,
            registered: Vec::new(),
            shared: Vec::new(),
            step: None,
        })
    }

    pub fn trees(&self) -> &GraphTrees<D> {
        &self.trees
    }

    pub fn shared(&self) -> &[(String, String)] {
        &self.shared
    }

    /// The tree's function for a part.
    fn register(&mut self, name: &str, part: &Part) -> Result<Function, Box<dyn Error>> {
        if let Some((_, function)) = self.registered.iter().find(|(code, _)| *code == part.code) {
            let found = function.name().to_owned();
            self.shared.push((name.to_owned(), found));
            return Ok(function.clone());
        }
        let mut spec = FunctionSpec::new(name);
        let passed = part.code.inputs.len();
        for (index, (_, number)) in part.code.variables().enumerate() {
            spec = spec.bind(passed + index, &self.variables[number]);
        }
        let code = part.code.clone();
        let (dying, library) = (last_uses(&code), self.library.clone());
        let function = self.trees.register(spec, move |recorder, inputs| {
            run_part(&code, &dying, &library, recorder, inputs)
        })?;
        self.registered.push((part.code.clone(), function.clone()));
        Ok(function)
    }
}

/// What is warmed up and recorded: a part's operations on the recorder's stream, each value dropped at its last use.
fn run_part<D: Device>(
    code: &Graph,
    dying: &[Vec<Var>],
    library: &Library<D>,
    recorder: &mut Recorder<'_, D>,
    mut inputs: Inputs<D>,
) -> BodyResult<D> {
    let mut values: Vec<Tensor<D>> = Vec::new();
    values.resize_with(code.nodes.len(), Tensor::empty);
    let variables = code.variables().map(|(var, _)| var);
    for (position, var) in code.inputs.iter().copied().chain(variables).enumerate() {
        values[var.0] = inputs.take(position)?;
    }
    for (var, node) in code.ordered().filter(|(_, node)| node.op.runs()) {
        let operands = node.operands.iter().map(|operand| values[operand.0].ptr());
        let operands = operands.collect::<Result<Vec<_>, _>>()?;
        let dst = if node.op.in_place() {
            operands[0]
        } else {
            values[var.0] = recorder.alloc(node.shape.bytes())?;
            values[var.0].ptr()?
        };
        library.launch(
            recorder.device(),
            recorder.stream(),
            code,
            var,
            dst,
            &operands,
        )?;
        for dead in &dying[var.0] {
            values[dead.0] = Tensor::empty();
        }
    }
    let outputs = code.outputs.iter().map(|output| values[output.0].clone());
    Ok(outputs.collect())
}

impl<D: Device> Backend<D> for Compiled<D> {
    type Code = Code;

    fn load(&mut self, name: &str, function: &Graph) -> Result<Code, Box<dyn Error>> {
        let parts = partition(function)?;
        let mut pieces = Vec::new();
        for (index, (part, last)) in parts.iter().zip(last_takes(function, &parts)).enumerate() {
            let name = match parts.len() {
                1 => name.to_owned(),
                _ => format!("{name}.{index}"),
            };
            pieces.push(Piece {
                function: self.register(&name, part)?,
                takes: part.takes.iter().copied().zip(last).collect(),
                gives: part.gives.clone(),
            });
        }
        Ok(Code {
            values: function.nodes.len(),
            inputs: function.inputs.clone(),
            pieces,
            outputs: function.outputs.clone(),
        })
    }

    fn begin_step(&mut self) {
        self.step = None;
        self.step = Some(self.trees.step());
    }

    fn call(
        &mut self,
        code: &Code,
        args: Vec<Arg<'_, D>>,
    ) -> Result<Vec<Tensor<D>>, Box<dyn Error>> {
        let step = self.step.as_ref().ok_or("no step was begun")?;
        if args.len() != code.inputs.len() {
            return Err("the number of inputs differs".into());
        }
        let mut values = Vec::new();
        values.resize_with(code.values, || Arg::Taken);
        for (var, arg) in code.inputs.iter().zip(args) {
            values[var.0] = arg;
        }
        for piece in &code.pieces {
            let mut args: Vec<Arg<'_, D>> = Vec::with_capacity(piece.takes.len());
            for (var, last) in &piece.takes {
                // What the caller lent stays lent.
                args.push(match last {
                    true => std::mem::replace(&mut values[var.0], Arg::Taken),
                    false => Arg::Taken,
                });
            }
            for (arg, (var, last)) in args.iter_mut().zip(&piece.takes) {
                if !last {
                    *arg = lend(tensor(&values[var.0])?);
                }
            }
            let stream = &self.place.stream;
            let made = self
                .trees
                .run(&piece.function, step, &[], stream, &mut args)?;
            drop(args);
            for (var, tensor) in piece.gives.iter().zip(made) {
                values[var.0] = give(tensor);
            }
        }
        code.outputs
            .iter()
            .map(|output| Ok(tensor(&values[output.0])?.clone()))
            .collect()
    }

    fn variables(&self) -> &[Tensor<D>] {
        &self.variables
    }
}
