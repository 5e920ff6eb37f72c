//! A graph is not dropped, and its pool with it, while it captures.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Allocator, Graph, Result};

fn misuse(allocator: &Allocator<HostDevice>, stream: &HostStream) -> Result<()> {
    let mut graph = Graph::new(allocator);
    let capture = graph.capture(stream)?;
    drop(graph);
    capture.end()
}

fn main() {}
