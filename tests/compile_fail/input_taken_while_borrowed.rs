//! An input that is looked at is not taken out meanwhile.
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{Inputs, Result};

fn misuse(mut inputs: Inputs<HostDevice>) -> Result<u64> {
    let x = inputs.get(0)?;
    drop(inputs.take(0)?);
    Ok(x.bytes())
}

fn main() {}
