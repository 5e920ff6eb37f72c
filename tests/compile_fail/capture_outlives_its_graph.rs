//! A capture does not go where its graph may be gone before it.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Allocator, Graph, Result};

fn misuse(allocator: &Allocator<HostDevice>, stream: &HostStream) -> Result<()> {
    let mut graph = Graph::new(allocator);
    let capture = graph.capture(stream)?;
    std::thread::spawn(move || capture.end());
    Ok(())
}

fn main() {}
