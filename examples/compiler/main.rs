//! A small compiler that embeds the runtime: a network of two layers is trained for 300 steps by compiled functions, and every loss
//! and every parameter is compared, bit for bit, with an uncompiled run of the same program.
//!
//! `ir` → `grad` (backward functions) → `partition` (cut at graph breaks, last uses) → `lower` (launches of `kernels`)
//! → `compiled` (functions of a graph tree) or `eager` (one operation after another). `model`, `data` and `train` are the program.
//!
//! `cargo run --release --example compiler [-- --device host|cuda]`
#![forbid(unsafe_code)]

mod backend;
mod compiled;
mod data;
#[path = "../support/device.rs"]
mod device;
mod eager;
mod grad;
mod ir;
mod kernels;
mod lower;
mod model;
mod partition;
#[path = "../support/random.rs"]
mod random;
mod train;

use std::error::Error;
use std::sync::Arc;

use cudagraph_trees::device::Device;
use cudagraph_trees::{GraphTrees, NodeId, TreeView};

use backend::{Backend, Place};
use compiled::Compiled;
use data::{BATCHES, Batch, Data};
use eager::Eager;
use ir::Shape;
use lower::Library;
use model::{BATCH, FEATURES, Model, PARAMETERS, TARGETS};
use random::Random;
use train::{Branch, Pair, Trainer};

const STEPS: usize = 300;
/// The held-out data are looked at every so many steps.
const EVALUATE_EVERY: usize = 10;
/// By then everything is recorded.
const SETTLED: usize = 25;

struct Training;

impl device::Job for Training {
    fn run<D: Device>(self, device: D) -> Result<(), Box<dyn Error>> {
        let place = Place::new(device)?;
        let library = Arc::new(Library::load(&place.device)?);
        let mut random = Random::new(7);
        let data = Data::new(&mut random);
        let model = Model::new()?;
        let variables = place.variables(&data.variables)?;
        let compiled = Compiled::new(place.clone(), library.clone(), variables)?;
        let mut compiled = Trainer::new(place.clone(), compiled, &model)?;
        let variables = place.variables(&data.variables)?;
        let eager = Eager::new(place.clone(), library, variables);
        let mut eager = Trainer::new(place.clone(), eager, &model)?;
        let upload = |batch: &Batch| -> Result<Pair<D>, Box<dyn Error>> {
            Ok((
                place.upload(Shape(BATCH, FEATURES), &batch.x)?,
                place.upload(Shape(BATCH, TARGETS), &batch.targets)?,
            ))
        };
        let batches = data.training.iter().map(upload);
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        let held_out = upload(&data.held_out)?;

        let (mut brakes, mut evaluations, mut last_recorded) = (0, 0, 0);
        for step in 0..STEPS {
            let batch = &batches[random.below(BATCHES)];
            let held_out = (step % EVALUATE_EVERY == 0).then_some(&held_out);
            let before = compiled.backend().trees().counts().recordings;
            let outcome = compiled.step(batch, held_out)?;
            let expected = eager.step(batch, held_out)?;
            if !outcome.same(&expected) {
                return Err(format!("step {step}: {outcome:?}, uncompiled {expected:?}").into());
            }
            if compiled.backend().trees().counts().recordings > before {
                last_recorded = step;
            }
            brakes += usize::from(outcome.branch == Branch::Brake);
            if let Some(held_out) = outcome.held_out {
                evaluations += 1;
                if step % 50 == 0 {
                    println!(
                        "step {step:3}: loss {:.6}, held out {held_out:.6}",
                        outcome.loss
                    );
                }
            }
        }
        println!("{STEPS} steps: {brakes} braked, {evaluations} evaluated");
        for (part, function) in compiled.backend().shared() {
            println!("{part} is the same code as {function}");
        }
        report(compiled.backend().trees());
        println!("last recording: step {last_recorded}");
        if last_recorded >= SETTLED {
            return Err(format!("step {last_recorded} still recorded").into());
        }
        let equal = compare(&place, &compiled, &eager)?;
        println!("ok: {STEPS} losses and {equal} parameters equal");
        Ok(())
    }
}

/// Compares all variables bit for bit; the number of parameters.
fn compare<D: Device>(
    place: &Place<D>,
    compiled: &Trainer<D, Compiled<D>>,
    eager: &Trainer<D, Eager<D>>,
) -> Result<usize, Box<dyn Error>> {
    let pairs = compiled
        .backend()
        .variables()
        .iter()
        .zip(eager.backend().variables());
    for (number, (a, b)) in pairs.enumerate() {
        let bytes = [a, b].map(|tensor| tensor.read(&place.device, &place.stream));
        let [a, b] = bytes;
        if a? != b? {
            return Err(format!("variable {number} differs from the uncompiled run").into());
        }
    }
    Ok(PARAMETERS.len())
}

/// The tree, what it did, and what it holds.
fn report<D: Device>(trees: &GraphTrees<D>) {
    let (view, counts, pool) = (trees.view(), trees.counts(), trees.pool_stats());
    println!(
        "{} functions, {} nodes, {} root(s):",
        view.functions.len(),
        view.nodes.len(),
        view.roots.len()
    );
    for root in &view.roots {
        print_below(&view, *root, 1);
    }
    println!(
        "{} warmups, {} recordings, {} replays, {} restores, {} failed captures",
        counts.warmups, counts.recordings, counts.replays, counts.restores, counts.failed_captures
    );
    println!(
        "pool: {} B reserved, at most {} B live",
        pool.reserved_bytes.current, pool.live_bytes.peak
    );
}

fn print_below(view: &TreeView, id: NodeId, depth: usize) {
    let Some(node) = view.nodes.iter().find(|node| node.id == id) else {
        return;
    };
    println!(
        "{:1$}{2}: {3} graph nodes",
        "",
        2 * depth,
        node.function,
        node.graph_nodes
    );
    for child in &node.children {
        print_below(view, *child, depth + 1);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (name, _) = device::chosen(std::env::args())?;
    device::run_on(&name, Training)
}
