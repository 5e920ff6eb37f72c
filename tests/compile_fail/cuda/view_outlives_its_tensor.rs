//! A typed view keeps its tensor: no call of cudarc's gets memory that was freed.
use cudagraph_trees::device::cuda::{CudaDevice, CudaStream};
use cudagraph_trees::{Result, Tensor};
use cudarc::driver::DeviceSlice;

fn misuse(tensor: Tensor<CudaDevice>, stream: &CudaStream) -> Result<usize> {
    let view = tensor.typed::<f32>(stream)?;
    drop(tensor);
    Ok(view.len())
}

fn main() {}
