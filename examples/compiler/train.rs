//! The training program, written once for both backends.
//!
//! The host reads every loss and decides by it which optimizer runs: such a branch is why a compiler cannot put a whole step into one graph.

use std::error::Error;

use cudagraph_trees::device::Device;
use cudagraph_trees::{Arg, Tensor, give, lend};

use super::backend::{Backend, Place};
use super::grad::Source;
use super::model::Model;

/// The loss has risen much when it is so many times the last one.
const RISE: f32 = 1.25;

/// Which optimizer ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Branch {
    Descend,
    Brake,
}

/// What one step came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    pub loss: f32,
    pub branch: Branch,
    /// The loss on held-out data, where it was asked for.
    pub held_out: Option<f32>,
}

impl Outcome {
    /// Equal bit for bit.
    pub fn same(&self, other: &Outcome) -> bool {
        let bits = |o: &Outcome| (o.loss.to_bits(), o.branch, o.held_out.map(f32::to_bits));
        bits(self) == bits(other)
    }
}

/// A batch and its targets on the device.
pub type Pair<D> = (Tensor<D>, Tensor<D>);

pub struct Trainer<D: Device, B: Backend<D>> {
    place: Place<D>,
    backend: B,
    forward: B::Code,
    backward: B::Code,
    takes: Vec<Source>,
    evaluate: B::Code,
    descend: B::Code,
    brake: B::Code,
    last: f32,
}

impl<D: Device, B: Backend<D>> Trainer<D, B> {
    pub fn new(place: Place<D>, mut backend: B, model: &Model) -> Result<Self, Box<dyn Error>> {
        Ok(Trainer {
            place,
            forward: backend.load("forward", &model.training.forward)?,
            backward: backend.load("backward", &model.training.backward)?,
            takes: model.training.takes.clone(),
            evaluate: backend.load("evaluate", &model.evaluate)?,
            descend: backend.load("descend", &model.descend)?,
            brake: backend.load("brake", &model.brake)?,
            backend,
            last: f32::INFINITY,
        })
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// One step: forward, backward, optimizer; then the held-out data, if given.
    pub fn step(
        &mut self,
        (x, targets): &Pair<D>,
        held_out: Option<&Pair<D>>,
    ) -> Result<Outcome, Box<dyn Error>> {
        self.backend.begin_step();
        let inputs = [x, targets];
        let made = self
            .backend
            .call(&self.forward, inputs.map(lend).into_iter().collect())?;
        let loss = self.scalar(&made[0])?;
        let branch = match loss > RISE * self.last {
            true => Branch::Brake,
            false => Branch::Descend,
        };
        self.last = loss;

        // Backward uses the activations up; the batch stays.
        let mut made: Vec<Option<Tensor<D>>> = made.into_iter().map(Some).collect();
        let saved: Vec<Arg<'_, D>> = self
            .takes
            .iter()
            .map(|source| match source {
                Source::Input(input) => lend(inputs[*input]),
                Source::Output(output) => made[*output].take().map_or(Arg::Taken, give),
            })
            .collect();
        drop(made);
        let gradients = self.backend.call(&self.backward, saved)?;
        let optimizer = match branch {
            Branch::Descend => &self.descend,
            Branch::Brake => &self.brake,
        };
        self.backend
            .call(optimizer, gradients.into_iter().map(give).collect())?;

        let held_out = match held_out {
            Some((x, targets)) => {
                let made = self
                    .backend
                    .call(&self.evaluate, vec![lend(x), lend(targets)])?;
                Some(self.scalar(&made[0])?)
            }
            None => None,
        };
        Ok(Outcome {
            loss,
            branch,
            held_out,
        })
    }

    fn scalar(&self, tensor: &Tensor<D>) -> Result<f32, Box<dyn Error>> {
        let values = self.place.download(tensor)?;
        Ok(*values.first().ok_or("a loss is empty")?)
    }
}
