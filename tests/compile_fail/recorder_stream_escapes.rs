//! The stream that captures is the closure's to use, as long as it is called.
use std::sync::{Arc, Mutex};

use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::{FunctionSpec, GraphTrees};

fn misuse(trees: &GraphTrees<HostDevice>, kept: Arc<Mutex<Option<&'static HostStream>>>) {
    let _ = trees.register(FunctionSpec::new("f"), move |recorder, _| {
        *kept.lock().unwrap() = Some(recorder.stream());
        Ok(vec![])
    });
}

fn main() {}
