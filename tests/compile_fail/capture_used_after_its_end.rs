//! What is allocated or enqueued after the end of a capture is not of its graph.
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{Capture, Result, Tensor};

fn misuse(capture: Capture<'_, HostDevice>) -> Result<Tensor<HostDevice>> {
    capture.end()?;
    capture.alloc(4)
}

fn main() {}
