//! A replay takes its inputs anew: there is no run that reads what the last one left at the addresses.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Function, GraphTrees, Outputs, Result, Step};

fn misuse(
    trees: &GraphTrees<HostDevice>,
    (f, step, stream): (&Function, &Step, &HostStream),
) -> Result<Outputs<HostDevice>> {
    trees.run(f, step, &[], stream)
}

fn main() {}
