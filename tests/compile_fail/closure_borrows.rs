//! A function is kept: its closure owns what it uses.
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{FunctionSpec, GraphTrees, Tensor};

fn misuse(trees: &GraphTrees<HostDevice>, weight: Tensor<HostDevice>) {
    let weight = &weight;
    let _ = trees.register(FunctionSpec::new("f"), move |_, _| Ok(vec![weight.clone()]));
}

fn main() {}
