//! Which device an example runs on: `--device host` (the default), `--device cuda`, or `--device cuda-plain`, whose memory is not virtual.

use std::error::Error;

use cudagraph_trees::device::Device;
use cudagraph_trees::device::host::HostDevice;

/// An example's main job, for whatever device.
pub trait Job {
    /// Does it.
    fn run<D: Device>(self, device: D) -> Result<(), Box<dyn Error>>;
}

/// Takes `--device NAME` out of the arguments; the name, and the other arguments.
pub fn chosen(arguments: impl Iterator<Item = String>) -> Result<(String, Vec<String>), String> {
    let mut arguments = arguments.skip(1);
    let (mut device, mut others) = ("host".to_owned(), Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--device" => {
                device = arguments
                    .next()
                    .ok_or("--device needs a name: host, cuda or cuda-plain")?;
            }
            _ => others.push(argument),
        }
    }
    Ok((device, others))
}

/// Does the job on the device of that name.
pub fn run_on(device: &str, job: impl Job) -> Result<(), Box<dyn Error>> {
    match device {
        "host" => job.run(HostDevice::new()),
        #[cfg(feature = "cuda-any")]
        "cuda" => job.run(cudagraph_trees::device::cuda::CudaDevice::new(0)?),
        #[cfg(feature = "cuda-any")]
        "cuda-plain" => {
            use cudagraph_trees::device::cuda::{CudaDevice, CudaMemory, CudaOptions};
            let plain = CudaOptions::default().memory(CudaMemory::Plain);
            job.run(CudaDevice::with_options(0, plain)?)
        }
        #[cfg(not(feature = "cuda-any"))]
        "cuda" | "cuda-plain" => Err("this was built without the feature `cuda`".into()),
        other => {
            Err(format!("no device is called {other}; there are host, cuda and cuda-plain").into())
        }
    }
}
