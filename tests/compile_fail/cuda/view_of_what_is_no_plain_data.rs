//! Bytes of the device are viewed as what any bytes may be.
use cudagraph_trees::device::cuda::{CudaDevice, CudaStream};
use cudagraph_trees::{Result, Tensor};

fn misuse(tensor: &Tensor<CudaDevice>, stream: &CudaStream) -> Result<()> {
    tensor.typed::<bool>(stream)?;
    Ok(())
}

fn main() {}
