//! What is lent to a run lives until the run has read it.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Function, GraphTrees, Outputs, Result, Step, Tensor, lend};

fn misuse(
    trees: &GraphTrees<HostDevice>,
    (f, step, stream): (&Function, &Step, &HostStream),
    x: Tensor<HostDevice>,
) -> Result<Outputs<HostDevice>> {
    let mut args = [lend(&x)];
    drop(x);
    trees.run(f, step, &[], stream, &mut args)
}

fn main() {}
