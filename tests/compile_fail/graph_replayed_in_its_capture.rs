//! A graph is not launched, reset or captured again while it captures.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Graph, Result};

fn misuse(graph: &mut Graph<HostDevice>, stream: &HostStream) -> Result<()> {
    let capture = graph.capture(stream)?;
    graph.replay(stream)?;
    graph.reset();
    let again = graph.capture(stream)?;
    again.end()?;
    capture.end()
}

fn main() {}
