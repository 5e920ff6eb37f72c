//! A tensor of one device is no input of a tree on another kind of device.
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Function, GraphTrees, Outputs, Result, Step, Tensor, lend};

fn misuse(
    trees: &GraphTrees<HostDevice>,
    (f, step, stream): (&Function, &Step, &HostStream),
    x: &Tensor<Faulty<HostDevice>>,
) -> Result<Outputs<HostDevice>> {
    trees.run(f, step, &[], stream, &mut [lend(x)])
}

fn main() {}
