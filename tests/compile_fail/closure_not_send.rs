//! A function runs on whichever thread runs it: its closure may be sent there.
use std::rc::Rc;

use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{FunctionSpec, GraphTrees};

fn misuse(trees: &GraphTrees<HostDevice>, shared: Rc<u64>) {
    let _ = trees.register(FunctionSpec::new("f"), move |recorder, _| {
        Ok(vec![recorder.alloc(*shared)?])
    });
}

fn main() {}
