//! The room of outputs that are looked at is not used again.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Function, GraphTrees, Outputs, Result, Step};

fn misuse(
    trees: &GraphTrees<HostDevice>,
    (f, step, stream): (&Function, &Step, &HostStream),
    mut out: Outputs<HostDevice>,
) -> Result<u64> {
    let first = &out[0];
    trees.run_into(f, step, &[], stream, &mut [], &mut out)?;
    Ok(first.bytes())
}

fn main() {}
