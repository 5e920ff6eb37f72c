//! A thread that may outlive the closure does not get the recorder. (A scoped one may have the stream.)
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{FunctionSpec, GraphTrees};

fn misuse(trees: &GraphTrees<HostDevice>) {
    let _ = trees.register(FunctionSpec::new("f"), |recorder, _| {
        std::thread::spawn(move || recorder.alloc(4));
        Ok(vec![])
    });
}

fn main() {}
