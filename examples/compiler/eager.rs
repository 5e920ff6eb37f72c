//! The uncompiled run: every operation at once, into fresh memory of the default pool. No breaks, no schedule, no graphs.

use std::error::Error;
use std::sync::Arc;

use cudagraph_trees::device::Device;
use cudagraph_trees::{Arg, Tensor};

use super::backend::{Backend, Place, tensor};
use super::ir::{Graph, Op};
use super::lower::Library;

pub struct Eager<D: Device> {
    place: Place<D>,
    library: Arc<Library<D>>,
    variables: Vec<Tensor<D>>,
}

impl<D: Device> Eager<D> {
    pub fn new(place: Place<D>, library: Arc<Library<D>>, variables: Vec<Tensor<D>>) -> Self {
        Eager {
            place,
            library,
            variables,
        }
    }
}

impl<D: Device> Backend<D> for Eager<D> {
    type Code = Graph;

    fn load(&mut self, _: &str, function: &Graph) -> Result<Graph, Box<dyn Error>> {
        Ok(function.clone())
    }

    fn begin_step(&mut self) {}

    fn call(
        &mut self,
        code: &Graph,
        args: Vec<Arg<'_, D>>,
    ) -> Result<Vec<Tensor<D>>, Box<dyn Error>> {
        let Place {
            device,
            allocator,
            stream,
        } = &self.place;
        let mut args = args.iter();
        // By value of the function; empty for what makes nothing.
        let mut values: Vec<Tensor<D>> = Vec::with_capacity(code.nodes.len());
        for (var, node) in code.ordered() {
            let made = match node.op {
                Op::Input => tensor(args.next().ok_or("an input is missing")?)?.clone(),
                Op::Variable(number) => self.variables[number].clone(),
                Op::Break => Tensor::empty(),
                op if op.in_place() => values[node.operands[0].0].clone(),
                _ => allocator.alloc(stream, node.shape.bytes())?,
            };
            let operands = node.operands.iter().map(|operand| values[operand.0].ptr());
            let operands = operands.collect::<Result<Vec<_>, _>>()?;
            self.library
                .launch(device, stream, code, var, made.ptr()?, &operands)?;
            values.push(made);
        }
        let outputs = code.outputs.iter().map(|output| values[output.0].clone());
        Ok(outputs.collect())
    }

    fn variables(&self) -> &[Tensor<D>] {
        &self.variables
    }
}
