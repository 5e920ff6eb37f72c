//! A function is called through a shared handle: its closure has no cell of its own.
use std::cell::Cell;

use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{FunctionSpec, GraphTrees};

fn misuse(trees: &GraphTrees<HostDevice>) {
    let calls = Cell::new(0);
    let _ = trees.register(FunctionSpec::new("f"), move |_, _| {
        calls.set(calls.get() + 1);
        Ok(vec![])
    });
}

fn main() {}
