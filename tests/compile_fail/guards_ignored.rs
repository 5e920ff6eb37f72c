//! A guard that is dropped at once does nothing: the compiler says so.
#![deny(unused_must_use)]

use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{Allocator, Graph, GraphTrees, PoolHandle, Result};

fn misuse(
    (trees, allocator): (&GraphTrees<HostDevice>, &Allocator<HostDevice>),
    (graph, stream): (&mut Graph<HostDevice>, &HostStream),
    pool: &PoolHandle<HostDevice>,
) -> Result<()> {
    trees.step();
    graph.capture(stream)?;
    allocator.route_thread(pool)?;
    Ok(())
}

fn main() {}
