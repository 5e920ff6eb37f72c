//! A whole program without `unsafe`: a tree with a chain of two that is held across steps, a graph without a tree, and a private pool.
#![forbid(unsafe_code)]

use std::sync::Arc;

use cudagraph_trees::device::host::{HostDevice, HostStream};
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::device::{Device, DeviceError};
use cudagraph_trees::{
    Allocator, Error, FunctionSpec, Graph, GraphTrees, Inputs, Phase, PoolOptions, Recorder,
    Tensor, give, lend,
};

type Kernels = Arc<KernelSet<HostDevice>>;

fn read(x: &Tensor<HostDevice>, device: &HostDevice, stream: &HostStream) -> Result<f32, Error> {
    let bytes = x.read(device, stream)?;
    Ok(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// out = in * 2
fn double(
    kernels: &Kernels,
    recorder: &mut Recorder<'_, HostDevice>,
    mut inputs: Inputs<HostDevice>,
) -> Result<Vec<Tensor<HostDevice>>, Box<dyn std::error::Error + Send + Sync>> {
    let x = inputs.take(0)?;
    let out = recorder.alloc(x.bytes())?;
    let n = x.bytes() / 4;
    kernels.scale_add(
        recorder.device(),
        recorder.stream(),
        out.ptr()?,
        x.ptr()?,
        n,
        2.0,
        0.0,
    )?;
    Ok(vec![out])
}

fn tree(
    allocator: &Allocator<HostDevice>,
    kernels: &Kernels,
    stream: &HostStream,
) -> Result<(), Error> {
    let device = allocator.device();
    let trees = GraphTrees::new(allocator)?;
    let [f, g] = ["f", "g"].map(|name| {
        let kernels = kernels.clone();
        trees.register(FunctionSpec::new(name), move |recorder, inputs| {
            double(&kernels, recorder, inputs)
        })
    });
    let (f, g) = (f?, g?);
    let x = allocator.alloc(stream, 4)?;
    for (value, phase) in [
        (1.0f32, Phase::Warmup),
        (2.0, Phase::Record),
        (3.0, Phase::Replay),
    ] {
        x.write(device, stream, &value.to_le_bytes())?;
        let step = trees.step();
        let y = trees
            .run(&f, &step, &[], stream, &mut [lend(&x)])?
            .only()
            .expect("one output");
        let z = trees.run(&g, &step, &[], stream, &mut [give(y)])?;
        assert_eq!(
            (z.phase(), read(&z[0], device, stream)?),
            (phase, value * 4.0)
        );
    }
    trees.shutdown()
}

fn graph(
    allocator: &Allocator<HostDevice>,
    kernels: &Kernels,
    stream: &HostStream,
) -> Result<(), Error> {
    let device = allocator.device();
    let pool = allocator.create_pool(PoolOptions::default())?;
    let x = pool.alloc(stream, 4)?;
    x.write(device, stream, &1.0f32.to_le_bytes())?;
    device.synchronize(stream)?;
    let mut graph = Graph::new(allocator);
    let capture = graph.capture(stream)?;
    let y = capture.alloc(4)?;
    let captured: Result<(), DeviceError> = kernels.scale_add(
        capture.device(),
        capture.stream(),
        y.ptr()?,
        x.ptr()?,
        1,
        1.0,
        1.0,
    );
    captured?;
    capture.end()?;
    graph.replay(stream)?;
    assert_eq!(read(&y, device, stream)?, 2.0);
    Ok(())
}

fn main() -> Result<(), Error> {
    let device = HostDevice::new();
    let allocator = Allocator::new(device.clone())?;
    let kernels = Arc::new(KernelSet::load(&device)?);
    let stream = device.create_stream()?;
    tree(&allocator, &kernels, &stream)?;
    graph(&allocator, &kernels, &stream)
}
