//! What both ways of running a function have in common: code is loaded once and called many times, in steps.

use std::error::Error;

use cudagraph_trees::device::Device;
use cudagraph_trees::{Allocator, Arg, Tensor};

use super::ir::{Graph, Shape, Variable};

/// A way to run functions.
pub trait Backend<D: Device> {
    /// A function, ready to be called.
    type Code;

    /// Makes a function ready.
    fn load(&mut self, name: &str, function: &Graph) -> Result<Self::Code, Box<dyn Error>>;

    /// Ends the step before, if any, and begins the next. Results of calls are good until then.
    fn begin_step(&mut self);

    /// Calls a function. Given inputs are used up.
    fn call(
        &mut self,
        code: &Self::Code,
        args: Vec<Arg<'_, D>>,
    ) -> Result<Vec<Tensor<D>>, Box<dyn Error>>;

    /// The variables, in order of number.
    fn variables(&self) -> &[Tensor<D>];
}

/// Where work goes: a device, its default pool, a stream.
#[derive(Clone)]
pub struct Place<D: Device> {
    pub device: D,
    pub allocator: Allocator<D>,
    pub stream: D::Stream,
}

impl<D: Device> Place<D> {
    pub fn new(device: D) -> Result<Self, Box<dyn Error>> {
        Ok(Place {
            allocator: Allocator::new(device.clone())?,
            stream: device.create_stream()?,
            device,
        })
    }

    /// A matrix of these values.
    pub fn upload(&self, shape: Shape, values: &[f32]) -> Result<Tensor<D>, Box<dyn Error>> {
        let tensor = self.allocator.alloc(&self.stream, shape.bytes())?;
        tensor.write(&self.device, &self.stream, bytemuck::cast_slice(values))?;
        Ok(tensor)
    }

    /// The values of a matrix.
    pub fn download(&self, tensor: &Tensor<D>) -> Result<Vec<f32>, Box<dyn Error>> {
        let bytes = tensor.read(&self.device, &self.stream)?;
        Ok(bytes
            .chunks_exact(4)
            .map(bytemuck::pod_read_unaligned)
            .collect())
    }

    /// Every variable, with the values it begins with.
    pub fn variables(
        &self,
        variables: &[(Variable, Vec<f32>)],
    ) -> Result<Vec<Tensor<D>>, Box<dyn Error>> {
        variables
            .iter()
            .map(|(variable, values)| self.upload(variable.shape, values))
            .collect()
    }
}

/// The tensor of an input.
pub fn tensor<'t, D: Device>(arg: &'t Arg<'_, D>) -> Result<&'t Tensor<D>, Box<dyn Error>> {
    match arg {
        Arg::Lend(tensor) => Ok(tensor),
        Arg::Give(tensor) => Ok(tensor),
        Arg::Value(_) | Arg::Taken => Err("a function takes tensors only, each once".into()),
    }
}
