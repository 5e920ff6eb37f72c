//! A token has one owner: a generation cannot be kept open, or made up, behind its back.
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{GraphTrees, Step};

fn misuse(trees: &GraphTrees<HostDevice>) -> (Step, Step) {
    let step = trees.step();
    (step.clone(), step)
}

fn main() {}
