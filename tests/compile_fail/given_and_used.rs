//! What was given up is not the caller's any more.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Function, GraphTrees, Result, Step, Tensor, give};

fn misuse(
    trees: &GraphTrees<HostDevice>,
    (f, step, stream): (&Function, &Step, &HostStream),
    (device, x): (&HostDevice, Tensor<HostDevice>),
) -> Result<Vec<u8>> {
    trees.run(f, step, &[], stream, &mut [give(x)])?;
    x.read(device, stream)
}

fn main() {}
