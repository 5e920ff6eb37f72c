//! What the suites share: a rig of device, allocator, kernels and tree, built for every device.
#![allow(dead_code)] // each suite uses its part

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudagraph_trees::device::Device;
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::pool::{Backing, BackingError, PoolSnapshot, StreamId};
use cudagraph_trees::{
    Advice, Allocator, Arg, BodyResult, Capture, Function, FunctionSpec, GraphTrees, Inputs,
    Outputs, Phase, ReasonKind, Recorder, Result, Step, Tensor, give, lend,
};

/// A device with everything that stands on it.
pub struct Rig<D: Device> {
    pub device: D,
    pub allocator: Allocator<D>,
    pub kernels: Arc<KernelSet<D>>,
    pub stream: D::Stream,
    pub trees: GraphTrees<D>,
}

impl<D: Device> Rig<D> {
    pub fn new(device: D) -> Self {
        let allocator = Allocator::new(device.clone()).unwrap();
        let kernels = Arc::new(KernelSet::load(&device).unwrap());
        let stream = device.create_stream().unwrap();
        let trees = GraphTrees::new(&allocator).unwrap();
        Rig {
            device,
            allocator,
            kernels,
            stream,
            trees,
        }
    }

    /// An eager tensor of these values.
    #[track_caller]
    pub fn floats(&self, values: &[f32]) -> Tensor<D> {
        let tensor = self
            .allocator
            .alloc(&self.stream, 4 * values.len() as u64)
            .unwrap();
        self.put(&tensor, values);
        tensor
    }

    #[track_caller]
    pub fn put(&self, tensor: &Tensor<D>, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensor.write(&self.device, &self.stream, &bytes).unwrap();
    }

    #[track_caller]
    pub fn read(&self, tensor: &Tensor<D>) -> Vec<f32> {
        self.try_read(tensor).unwrap()
    }

    pub fn try_read(&self, tensor: &Tensor<D>) -> Result<Vec<f32>> {
        let bytes = tensor.read(&self.device, &self.stream)?;
        Ok(bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect())
    }

    /// Registers a function of one input: out = in * scale + add, elementwise.
    pub fn scale_add(&self, name: &str, scale: f32, add: f32) -> Function {
        self.register(FunctionSpec::new(name), move |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            let out = k.apply(rec, &x, scale, add)?;
            Ok(vec![out])
        })
    }

    /// Registers a function that gets the kernels besides.
    pub fn register<F>(&self, spec: FunctionSpec<D>, body: F) -> Function
    where
        F: Fn(&Ops<D>, &mut Recorder<'_, D>, Inputs<D>) -> BodyResult<D> + Send + Sync + 'static,
    {
        let ops = Ops {
            kernels: self.kernels.clone(),
        };
        self.trees
            .register(spec, move |rec, inputs| body(&ops, rec, inputs))
            .unwrap()
    }

    /// Registers a function and counts the runs of its body.
    pub fn counted<F>(&self, spec: FunctionSpec<D>, body: F) -> (Function, Arc<AtomicUsize>)
    where
        F: Fn(&Ops<D>, &mut Recorder<'_, D>, Inputs<D>) -> BodyResult<D> + Send + Sync + 'static,
    {
        let count = Arc::new(AtomicUsize::new(0));
        let counter = count.clone();
        let f = self.register(spec, move |k, rec, inputs| {
            counter.fetch_add(1, Ordering::Relaxed);
            body(k, rec, inputs)
        });
        (f, count)
    }

    /// Runs a function of lent inputs.
    #[track_caller]
    pub fn run(&self, f: &Function, step: &Step, inputs: &[&Tensor<D>]) -> Outputs<D> {
        let mut args: Vec<Arg<'_, D>> = inputs.iter().map(|t| lend(t)).collect();
        self.trees
            .run(f, step, &[], &self.stream, &mut args)
            .unwrap()
    }

    /// Runs a function of one lent input and one output.
    #[track_caller]
    pub fn one(&self, f: &Function, step: &Step, input: &Tensor<D>) -> Tensor<D> {
        self.run(f, step, &[input]).only().unwrap()
    }

    /// The same, with the phase it went through.
    #[track_caller]
    pub fn phased(&self, f: &Function, step: &Step, input: &Tensor<D>) -> (Phase, Tensor<D>) {
        let outputs = self.run(f, step, &[input]);
        (outputs.phase(), outputs.only().unwrap())
    }

    /// Runs a function with any inputs and key.
    #[track_caller]
    pub fn call(
        &self,
        f: &Function,
        step: &Step,
        key: &[i64],
        args: &mut [Arg<'_, D>],
    ) -> Outputs<D> {
        self.trees.run(f, step, key, &self.stream, args).unwrap()
    }

    /// Runs a function of one given input and one output: the phase, and the output.
    #[track_caller]
    pub fn moved(&self, f: &Function, step: &Step, input: Tensor<D>) -> (Phase, Tensor<D>) {
        let outputs = self.call(f, step, &[], &mut [give(input)]);
        (outputs.phase(), outputs.only().unwrap())
    }

    /// The advice that the tree gives from now on.
    pub fn advice(&self) -> Said {
        let said = Said::default();
        let hears = said.clone();
        let hook = move |advice: &Advice| hears.lock().unwrap().push(advice.clone());
        self.trees.on_advice(hook);
        said
    }

    /// The functions of the nodes that are there, in order of recording.
    pub fn nodes(&self) -> String {
        let view = self.trees.view();
        let names: Vec<_> = view.nodes.iter().map(|n| n.function.as_str()).collect();
        names.join(" ")
    }

    /// The layout of the tree's pool.
    pub fn layout(&self) -> String {
        layout(&self.trees.pool_snapshot())
    }

    /// In a capture of a single graph: a new tensor x * scale + add.
    #[track_caller]
    pub fn captured(
        &self,
        capture: &Capture<'_, D>,
        x: &Tensor<D>,
        scale: f32,
        add: f32,
    ) -> Tensor<D> {
        let out = capture.alloc(x.bytes()).unwrap();
        self.scale_into(capture.stream(), &out, x, scale, add);
        out
    }

    /// out = x * scale + add, on any stream.
    #[track_caller]
    pub fn scale_into(
        &self,
        stream: &D::Stream,
        out: &Tensor<D>,
        x: &Tensor<D>,
        scale: f32,
        add: f32,
    ) {
        self.kernels
            .scale_add(
                &self.device,
                stream,
                out.ptr().unwrap(),
                x.ptr().unwrap(),
                x.bytes().min(out.bytes()) / 4,
                scale,
                add,
            )
            .unwrap();
    }

    /// Live blocks of the tree's pool.
    pub fn blocks(&self) -> u64 {
        self.trees.pool_stats().live_blocks.current
    }

    /// Nothing is left: the leak oracle of every scenario.
    #[track_caller]
    pub fn finish(self) {
        let Rig {
            device,
            allocator,
            kernels,
            stream,
            trees,
        } = self;
        trees.audit().unwrap();
        drop(trees);
        device.synchronize(&stream).unwrap();
        for (id, uses, stats) in allocator.private_pools() {
            assert_eq!(
                (uses, stats.live_blocks.current),
                (0, 0),
                "pool {id} is in use after the scenario"
            );
        }
        allocator.trim().unwrap();
        assert_eq!(
            allocator.private_pools(),
            vec![],
            "segments of private pools after trim"
        );
        assert_eq!(
            allocator.stats().live_blocks.current,
            0,
            "blocks of the default pool"
        );
        assert_eq!(
            allocator.stats().segments.current,
            0,
            "segments of the default pool"
        );
        drop(kernels);
    }
}

/// Advice that was given.
pub type Said = Arc<Mutex<Vec<Advice>>>;

/// To whom it was given, and for what kind of reason.
pub fn kinds(said: &Said) -> Vec<(String, ReasonKind)> {
    let said = said.lock().unwrap();
    said.iter()
        .map(|a| (a.function.clone(), a.reason.kind()))
        .collect()
}

/// The kernels, for closures.
pub struct Ops<D: Device> {
    pub kernels: Arc<KernelSet<D>>,
}

impl<D: Device> Ops<D> {
    /// A new tensor: x * scale + add.
    #[track_caller]
    pub fn apply(
        &self,
        rec: &mut Recorder<'_, D>,
        x: &Tensor<D>,
        scale: f32,
        add: f32,
    ) -> Result<Tensor<D>> {
        let out = rec.alloc(x.bytes())?;
        self.kernels.scale_add(
            rec.device(),
            rec.stream(),
            out.ptr()?,
            x.ptr()?,
            x.bytes() / 4,
            scale,
            add,
        )?;
        Ok(out)
    }

    /// A new tensor: a * b.
    #[track_caller]
    pub fn product(
        &self,
        rec: &mut Recorder<'_, D>,
        a: &Tensor<D>,
        b: &Tensor<D>,
    ) -> Result<Tensor<D>> {
        let out = rec.alloc(a.bytes())?;
        self.kernels.mul(
            rec.device(),
            rec.stream(),
            out.ptr()?,
            a.ptr()?,
            b.ptr()?,
            a.bytes() / 4,
        )?;
        Ok(out)
    }

    /// A new tensor: a + b.
    #[track_caller]
    pub fn sum(
        &self,
        rec: &mut Recorder<'_, D>,
        a: &Tensor<D>,
        b: &Tensor<D>,
    ) -> Result<Tensor<D>> {
        let out = rec.alloc(a.bytes())?;
        self.kernels.add(
            rec.device(),
            rec.stream(),
            out.ptr()?,
            a.ptr()?,
            b.ptr()?,
            a.bytes() / 4,
        )?;
        Ok(out)
    }
}

/// The host device under a few schedules.
pub fn hosts() -> impl Iterator<Item = HostDevice> {
    [1, 2, 7]
        .into_iter()
        .map(|seed| HostDevice::builder().seed(seed).build().unwrap())
}

/// The device that `CUDAGRAPH_TREES_DEVICE` chooses for the suites.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    Host,
    Cuda,
    CudaPlain,
}

pub fn chosen() -> Chosen {
    match std::env::var("CUDAGRAPH_TREES_DEVICE") {
        Err(_) => Chosen::Host,
        Ok(name) => match name.as_str() {
            "host" => Chosen::Host,
            "cuda" => Chosen::Cuda,
            "cuda-plain" => Chosen::CudaPlain,
            other => panic!("CUDAGRAPH_TREES_DEVICE={other}: there are host, cuda and cuda-plain"),
        },
    }
}

/// Whether the suites are to run on the first CUDA device.
pub fn on_cuda() -> bool {
    chosen() != Chosen::Host
}

/// The CUDA device, one for all tests of a binary, with the memory that was chosen.
#[cfg(feature = "cuda-any")]
pub fn cuda() -> cudagraph_trees::device::cuda::CudaDevice {
    use cudagraph_trees::device::cuda::{CudaDevice, CudaMemory, CudaOptions};
    static DEVICE: std::sync::OnceLock<CudaDevice> = std::sync::OnceLock::new();
    DEVICE
        .get_or_init(|| {
            let memory = match chosen() {
                Chosen::CudaPlain => CudaMemory::Plain,
                Chosen::Host | Chosen::Cuda => CudaMemory::Virtual,
            };
            CudaDevice::with_options(0, CudaOptions::default().memory(memory))
                .unwrap_or_else(|why| panic!("no CUDA device: {why}"))
        })
        .clone()
}

/// Without the feature there is none.
#[cfg(not(feature = "cuda-any"))]
pub fn cuda() -> HostDevice {
    panic!("the tests were built without the feature `cuda`")
}

/// On a CUDA device tests run one by one: what waits for the whole device would break another test's capture.
pub fn one_by_one() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    on_cuda().then(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs each scenario, a `fn name<D: Device>(rig: Rig<D>)`, over the chosen device: `suite!(name, ..)`. On the host device under a few
/// schedules; on either also behind an adaptor that could make calls fail and does not.
#[macro_export]
macro_rules! suite {
    ($($name:ident),+ $(,)?) => {
        mod plain {
            $(#[test] fn $name() {
                let _alone = $crate::common::one_by_one();
                if $crate::common::on_cuda() {
                    super::$name($crate::common::Rig::new($crate::common::cuda()));
                } else {
                    for device in $crate::common::hosts() {
                        super::$name($crate::common::Rig::new(device));
                    }
                }
            })+
        }
        mod faulty {
            $(#[test] fn $name() {
                use cudagraph_trees::device::faulty::Faulty;
                let _alone = $crate::common::one_by_one();
                if $crate::common::on_cuda() {
                    super::$name($crate::common::Rig::new(Faulty::new($crate::common::cuda())));
                } else {
                    super::$name($crate::common::Rig::new($crate::common::wrapped()));
                }
            })+
        }
    };
}

/// An adaptor around the host device: the suite holds over it as over the device itself.
pub fn wrapped() -> Faulty<HostDevice> {
    Faulty::new(HostDevice::new())
}

/// A pool's picture in one line, with its streams named `st0`, `st1` in order of appearance, whatever their numbers.
pub fn layout(snapshot: &PoolSnapshot) -> String {
    let mut snapshot = snapshot.clone();
    let mut seen = Vec::new();
    for segment in &mut snapshot.segments {
        let at = seen
            .iter()
            .position(|s| *s == segment.stream)
            .unwrap_or_else(|| {
                seen.push(segment.stream);
                seen.len() - 1
            });
        segment.stream = StreamId(at as u32);
    }
    snapshot.layout()
}

/// What a [`Toy`] holds and has done, in bytes and ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ToyCounts {
    pub mapped: u64,
    pub ranges: usize,
    pub given_back: u64,
}

/// A backing of addresses behind which nothing lies.
pub struct Toy {
    next: u64,
    descending: bool,
    counts: Arc<Mutex<ToyCounts>>,
}

impl Toy {
    /// With addresses that ascend, and what it counts.
    pub fn new() -> (Toy, Arc<Mutex<ToyCounts>>) {
        let counts = Arc::new(Mutex::new(ToyCounts::default()));
        let toy = Toy {
            next: 1 << 40,
            descending: false,
            counts: counts.clone(),
        };
        (toy, counts)
    }

    /// With addresses that descend.
    pub fn descending() -> Toy {
        Toy {
            descending: true,
            ..Toy::new().0
        }
    }
}

impl Backing for Toy {
    fn reserve(&mut self, bytes: u64) -> Result<u64, BackingError> {
        if self.descending {
            self.next -= bytes;
            return Ok(self.next);
        }
        self.next += bytes;
        Ok(self.next - bytes)
    }

    fn map(&mut self, _address: u64, bytes: u64) -> Result<(), BackingError> {
        let mut counts = self.counts.lock().unwrap();
        counts.mapped += bytes;
        counts.ranges += 1;
        Ok(())
    }

    fn unmap(&mut self, _address: u64, bytes: u64) -> Result<(), BackingError> {
        let mut counts = self.counts.lock().unwrap();
        counts.mapped -= bytes;
        counts.ranges -= 1;
        counts.given_back += bytes;
        Ok(())
    }

    fn release(&mut self, _address: u64, _bytes: u64) -> Result<(), BackingError> {
        Ok(())
    }
}
