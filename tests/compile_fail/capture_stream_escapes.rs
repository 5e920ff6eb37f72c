//! The stream that captures is lent as long as it does.
use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Graph, Result};

fn misuse<'s>(graph: &mut Graph<HostDevice>, stream: &HostStream) -> Result<&'s HostStream> {
    let capture = graph.capture(stream)?;
    let captures = capture.stream();
    capture.end()?;
    Ok(captures)
}

fn main() {}
