//! What the closure borrows of its inputs goes with them.
use std::sync::{Arc, Mutex};

use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{FunctionSpec, GraphTrees, Tensor};

fn misuse(trees: &GraphTrees<HostDevice>, kept: Arc<Mutex<Option<&'static Tensor<HostDevice>>>>) {
    let _ = trees.register(FunctionSpec::new("f"), move |_, inputs| {
        *kept.lock().unwrap() = Some(inputs.get(0)?);
        Ok(vec![])
    });
}

fn main() {}
