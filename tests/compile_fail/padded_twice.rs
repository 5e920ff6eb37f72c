//! A batch is not overwritten by the next one as long as it is passed.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{PaddedInput, Result, Tensor};

fn misuse(
    input: &mut PaddedInput<HostDevice>,
    stream: &HostStream,
    batch: &Tensor<HostDevice>,
) -> Result<()> {
    let first = input.pad(stream, batch)?;
    let second = input.pad(stream, batch)?;
    assert_ne!(first.rows(), second.rows());
    Ok(())
}

fn main() {}
