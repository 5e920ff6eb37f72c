//! Synthetic regression data and first parameters, from a seed. Plain arithmetic only: the same on every machine.

use super::ir::Variable;
use super::model::{BATCH, FEATURES, PARAMETERS, TARGETS, momentum};
use super::random::Random;

/// Batches to train on.
pub const BATCHES: usize = 6;

/// Inputs and targets of one batch.
pub struct Batch {
    pub x: Vec<f32>,
    pub targets: Vec<f32>,
}

pub struct Data {
    pub training: Vec<Batch>,
    pub held_out: Batch,
    /// Parameters and momenta with their first values, in order of number.
    pub variables: Vec<(Variable, Vec<f32>)>,
}

impl Data {
    pub fn new(random: &mut Random) -> Self {
        let mut uniform = |n: u32, bound: f64| -> Vec<f32> {
            (0..n)
                .map(|_| random.between(-bound, bound) as f32)
                .collect()
        };
        let teacher = uniform(FEATURES * TARGETS, 1.0);
        let mut batch = || {
            let x = uniform(BATCH * FEATURES, 1.0);
            let noise = uniform(BATCH * TARGETS, 0.2);
            Batch {
                targets: targets(&teacher, &x, &noise),
                x,
            }
        };
        let training = (0..BATCHES).map(|_| batch()).collect();
        let held_out = batch();
        let mut variables: Vec<(Variable, Vec<f32>)> = PARAMETERS
            .into_iter()
            .map(|p| (p, uniform(p.shape.0 * p.shape.1, 0.4)))
            .collect();
        variables.extend(PARAMETERS.map(|p| (momentum(p), vec![0.0; p.shape.elements() as usize])));
        Data {
            training,
            held_out,
            variables,
        }
    }
}

/// What the network is to learn: the absolute value of a linear map, with noise.
fn targets(teacher: &[f32], x: &[f32], noise: &[f32]) -> Vec<f32> {
    let (features, targets) = (FEATURES as usize, TARGETS as usize);
    let value = |(i, noise): (usize, &f32)| {
        let row = &x[i / targets * features..][..features];
        let column = teacher.iter().skip(i % targets).step_by(targets);
        let sum = row
            .iter()
            .zip(column)
            .fold(0.0_f32, |sum, (x, w)| sum + x * w);
        sum.abs() + noise
    };
    noise.iter().enumerate().map(value).collect()
}
