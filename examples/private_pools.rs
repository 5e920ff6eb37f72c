//! Private pools: graphs that share one save memory, and must then be replayed in the order of their capture.
//!
//! The scenarios of PyTorch's pull request 51436, which brought private pools, each with the numbers it must give:
//! two successive graphs, concurrent replay from separate pools and from one, three graphs in a safe and an unsafe
//! order, statistics, and a result that is used after its graph is gone.
//!
//! `cargo run --release --example private_pools [-- --device host|cuda]`
#![forbid(unsafe_code)]

#[path = "support/device.rs"]
mod device;

use std::error::Error;
use std::fmt::{Debug, Display};

use cudagraph_trees::device::Device;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::pool::PoolStats;
use cudagraph_trees::{Allocator, Capture, CaptureOptions, Graph, PoolHandle, Tensor};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const MIB: u64 = 1 << 20;

/// A device, what is needed to work on it, and the count of checks.
struct Scene<D: Device> {
    device: D,
    allocator: Allocator<D>,
    kernels: KernelSet<D>,
    stream: D::Stream,
    checks: usize,
}

impl<D: Device> Scene<D> {
    fn new(device: D) -> Outcome<Self> {
        Ok(Scene {
            allocator: Allocator::new(device.clone())?,
            kernels: KernelSet::load(&device)?,
            stream: device.create_stream()?,
            device,
            checks: 0,
        })
    }

    fn check<T: PartialEq + Debug>(&mut self, what: impl Display, got: T, want: T) -> Outcome {
        if got != want {
            return Err(format!("{what}: {got:?}, not {want:?}").into());
        }
        println!("   {what}: {got:?}");
        self.checks += 1;
        Ok(())
    }

    /// An eager tensor of `n` elements of one value.
    fn full(&self, n: usize, value: f32) -> Outcome<Tensor<D>> {
        let tensor = self.allocator.alloc(&self.stream, 4 * n as u64)?;
        self.kernels
            .fill(&self.device, &self.stream, tensor.ptr()?, n as u64, value)?;
        Ok(tensor)
    }

    /// The sum of a tensor's elements.
    fn sum(&self, tensor: &Tensor<D>) -> Outcome<f64> {
        let bytes = tensor.read(&self.device, &self.stream)?;
        let floats = bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        Ok(floats.sum())
    }

    /// Captures `body` into a graph, with a pool of its own or the one that is given.
    fn capture<T>(
        &self,
        pool: Option<PoolHandle<D>>,
        body: impl FnOnce(&Capture<'_, D>) -> Outcome<T>,
    ) -> Outcome<(Graph<D>, T)> {
        let mut graph = Graph::new(&self.allocator);
        let options = CaptureOptions {
            pool,
            ..CaptureOptions::default()
        };
        let capture = graph.capture_with(&self.stream, options)?;
        let made = body(&capture)?;
        capture.end()?;
        Ok((graph, made))
    }

    /// A new tensor of the capture: x + add.
    fn plus(&self, capture: &Capture<'_, D>, x: &Tensor<D>, add: f32) -> Outcome<Tensor<D>> {
        let out = capture.alloc(x.bytes())?;
        let (to, from, n) = (out.ptr()?, x.ptr()?, x.bytes() / 4);
        self.kernels
            .scale_add(&self.device, capture.stream(), to, from, n, 1.0, add)?;
        Ok(out)
    }

    /// (x + val) + (x + val), with temporaries.
    fn with_temporaries(
        &self,
        capture: &Capture<'_, D>,
        t: &Tensor<D>,
        val: f32,
    ) -> Outcome<Tensor<D>> {
        let x = self.plus(capture, &self.plus(capture, t, 0.0)?, val)?;
        let y = self.plus(capture, &self.plus(capture, t, 0.0)?, val)?;
        let out = capture.alloc(t.bytes())?;
        let n = t.bytes() / 4;
        let stream = capture.stream();
        self.kernels
            .add(&self.device, stream, out.ptr()?, x.ptr()?, y.ptr()?, n)?;
        Ok(out)
    }

    /// Five times the above, from `t`.
    fn five_times(
        &self,
        capture: &Capture<'_, D>,
        mut t: Tensor<D>,
        val: f32,
    ) -> Outcome<Tensor<D>> {
        for _ in 0..5 {
            t = self.with_temporaries(capture, &t, val)?;
        }
        Ok(t)
    }

    /// What private pools have reserved, in bytes.
    fn reserved(&self) -> u64 {
        let pools = self.allocator.private_pools();
        pools.iter().map(|p| p.2.reserved_bytes.current).sum()
    }

    fn two_successive(&mut self, shared: bool) -> Outcome {
        println!("== two successive graphs, {}", pools(shared));
        let size = 1000;
        let a = self.full(size, 1.0)?;
        let (g0, b) = self.capture(None, |capture| {
            let b = self.plus(capture, &a, 0.0)?;
            self.five_times(capture, b, 1.0)
        })?;
        let pool = shared.then(|| g0.pool()).transpose()?;
        let (g1, b) = self.capture(pool, |capture| self.five_times(capture, b, 1.0))?;
        g0.replay(&self.stream)?;
        g1.replay(&self.stream)?;
        let sum = self.sum(&b)?;
        self.check("sum of the result", sum, 3070.0 * size as f64)?;
        let segments = if shared { 1 } else { 2 };
        self.check("bytes reserved", self.reserved(), segments * 2 * MIB)?;
        drop((g0, g1, a, b));
        self.allocator.trim()?;
        self.check("bytes reserved after both are gone", self.reserved(), 0)
    }

    /// Two graphs of one input, replayed at once on two streams: their sums over the size, or the device's code.
    fn concurrent(&mut self, shared: bool) -> Outcome<[f64; 2]> {
        let size = 10_000;
        let a = self.full(size, 1.0)?;
        let graph_of = |pool, val| {
            self.capture(pool, |capture| {
                let b = self.plus(capture, &a, 0.0)?;
                self.five_times(capture, b, val)
            })
        };
        let (g0, b) = graph_of(None, 1.0)?;
        let (g1, c) = graph_of(shared.then(|| g0.pool()).transpose()?, 2.0)?;
        self.device.synchronize(&self.stream)?;
        let streams = [self.device.create_stream()?, self.device.create_stream()?];
        g0.replay(&streams[0])?;
        g1.replay(&streams[1])?;
        for stream in &streams {
            self.device.synchronize(stream)?;
        }
        let size = size as f64;
        Ok([self.sum(&b)? / size, self.sum(&c)? / size])
    }

    fn three_successive(&mut self, shared: bool) -> Outcome {
        println!("== three graphs, {}", pools(shared));
        let size = 1000;
        let a = self.full(size, 1.0)?;
        let (g0, (b, c, d)) = self.capture(None, |capture| {
            let b = self.plus(capture, &a, 0.0)?;
            let c = self.plus(capture, &b, 1.0)?;
            let d = self.plus(capture, &b, 2.0)?;
            Ok((b, c, d))
        })?;
        let pool = || shared.then(|| g0.pool()).transpose();
        let (g1, e) = self.capture(pool()?, |capture| {
            let e = self.plus(capture, &c, 3.0)?;
            drop(c); // its block is free from here on: in a shared pool, for the next graph
            Ok(e)
        })?;
        let (g2, f) = self.capture(pool()?, |capture| self.plus(capture, &d, 4.0))?;
        let graphs = [&g0, &g1, &g2];
        // Out of order, g1 reads f where c lay: 7 + 3.
        let unsafe_e = if shared { 10.0 } else { 5.0 };
        for (order, want) in [([0, 1, 2], 5.0), ([0, 2, 1], unsafe_e)] {
            for graph in order {
                graphs[graph].replay(&self.stream)?;
            }
            let sums = (self.sum(&e)?, self.sum(&f)?);
            let size = size as f64;
            self.check(
                format_args!("sums of e and f in order {order:?}"),
                sums,
                (want * size, 7.0 * size),
            )?;
        }
        drop((a, b, d));
        Ok(())
    }

    /// Segments, bytes reserved, live blocks, live bytes.
    fn statistics(
        &mut self,
        title: &str,
        bytes: u64,
        captured: [u64; 4],
        left: [u64; 4],
    ) -> Outcome {
        println!("== statistics, {title}");
        let n = bytes as usize / 4;
        let a = self.full(n, 1.0)?;
        let (graph, b) = self.capture(None, |capture| {
            let mut b = self.plus(capture, &a, 0.0)?;
            for _ in 0..5 {
                let c = self.plus(capture, &b, 0.0)?;
                b = self.plus(capture, &c, 1.0)?;
            }
            Ok(b)
        })?;
        let four = |s: PoolStats| {
            [
                s.segments.current,
                s.reserved_bytes.current,
                s.live_blocks.current,
                s.live_bytes.current,
            ]
        };
        let pool = graph.pool()?;
        self.check("after the capture", four(pool.stats()), captured)?;
        self.allocator.trim()?;
        self.check("after a trim", four(pool.stats()), captured)?;
        graph.replay(&self.stream)?;
        graph.replay(&self.stream)?;
        let id = pool.id();
        drop((graph, pool));
        self.allocator.trim()?;
        let pools = self.allocator.private_pools();
        let stats = pools.iter().find(|p| p.0 == id).map(|p| four(p.2));
        let stats = stats.ok_or("the pool is gone, though a tensor lies in it")?;
        self.check("graph gone, after a trim", stats, left)?;
        let sum = self.sum(&b)?;
        self.check("sum of the result, still", sum, 6.0 * n as f64)?;
        drop((a, b));
        self.allocator.trim()?;
        self.check("bytes reserved, result gone", self.reserved(), 0)
    }
}

fn pools(shared: bool) -> &'static str {
    if shared { "one pool" } else { "separate pools" }
}

/// Concurrent replay on `devices`, each with another schedule.
fn concurrent<D: Device>(devices: &[D]) -> Outcome<usize> {
    let schedules = devices.len();
    println!("== concurrent replay, separate pools, {schedules} schedules");
    let mut checks = 0;
    for (seed, device) in devices.iter().enumerate() {
        let mut scene = Scene::new(device.clone())?;
        let sums = scene.concurrent(false)?;
        scene.check(
            format_args!("sums over the size, schedule {seed}"),
            sums,
            [94.0, 156.0],
        )?;
        checks += scene.checks;
    }
    println!("== concurrent replay, one pool, {schedules} schedules: not promised");
    for (seed, device) in devices.iter().enumerate() {
        let sums = Scene::new(device.clone())?.concurrent(true)?;
        let verdict = if sums == [94.0, 156.0] {
            "no harm done, by luck"
        } else {
            "corrupted"
        };
        println!("   sums over the size, schedule {seed}: {sums:?}, {verdict}");
    }
    Ok(checks)
}

/// The simulated device under several schedules, without the check that would stop a graph at the first byte it takes from another.
fn schedules() -> Outcome<Vec<HostDevice>> {
    let device = |seed| {
        HostDevice::builder()
            .seed(seed)
            .check_ownership(false)
            .build()
    };
    Ok((0..8).map(device).collect::<Result<_, _>>()?)
}

struct PrivatePools;

impl device::Job for PrivatePools {
    fn run<D: Device>(self, device: D) -> Outcome {
        let mut scene = Scene::new(device.clone())?;
        let any: &dyn std::any::Any = &device;
        let concurrent = match any.downcast_ref::<HostDevice>() {
            Some(_) => concurrent(&schedules()?)?,
            None => concurrent(&[device])?,
        };
        run(&mut scene, concurrent)
    }
}

fn main() -> Outcome {
    let (name, _) = device::chosen(std::env::args())?;
    device::run_on(&name, PrivatePools)
}

fn run<D: Device>(scene: &mut Scene<D>, concurrent: usize) -> Outcome {
    scene.two_successive(false)?;
    scene.two_successive(true)?;
    scene.three_successive(false)?;
    scene.three_successive(true)?;
    scene.allocator.trim()?;
    let (small, large) = (2 * MIB, 20 * MIB);
    for (title, bytes, captured, left) in [
        ("512 B", 512, [1, small, 1, 512], [1, small, 1, 512]),
        ("1 MiB", MIB, [2, 2 * small, 1, MIB], [1, small, 1, MIB]),
        (
            "1 MiB + 512 B",
            MIB + 512,
            [1, large, 1, MIB + 512],
            [1, large, 1, MIB + 512],
        ),
        (
            "10 MiB - 512 B",
            10 * MIB - 512,
            [2, 2 * large, 1, 10 * MIB - 512],
            [1, large, 1, 10 * MIB - 512],
        ),
        (
            "10 MiB + 512 B",
            10 * MIB + 512,
            [3, 36 * MIB, 1, 10 * MIB + 512],
            [1, 12 * MIB, 1, 10 * MIB + 512],
        ),
    ] {
        scene.statistics(title, bytes, captured, left)?;
    }
    println!("ok: {} checks", scene.checks + concurrent);
    Ok(())
}
