//! The same handle is not lent and given up in one run.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Function, GraphTrees, Outputs, Result, Step, Tensor, give, lend};

fn misuse(
    trees: &GraphTrees<HostDevice>,
    (f, step, stream): (&Function, &Step, &HostStream),
    x: Tensor<HostDevice>,
) -> Result<Outputs<HostDevice>> {
    trees.run(f, step, &[], stream, &mut [lend(&x), give(x)])
}

fn main() {}
