//! The main job: g1→g2 and g1→g3 share one pool; every output is checked against plain arithmetic.
//!
//! `cargo run --release --example replay_path [-- --device host|cuda]`
#![forbid(unsafe_code)]

#[path = "support/device.rs"]
mod device;

use std::error::Error;
use std::sync::Arc;

use cudagraph_trees::device::Device;
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::{Allocator, Function, FunctionSpec, GraphTrees, Tensor, lend};

const N: u64 = 1024;

struct Driver<D: Device> {
    device: D,
    stream: D::Stream,
    trees: GraphTrees<D>,
    input: Tensor<D>,
    checked: usize,
}

impl<D: Device> Driver<D> {
    /// Runs g1, then another function on its output, and checks both.
    fn step(
        &mut self,
        title: &str,
        picture: bool,
        round: u32,
        functions: [&Function; 2],
        expect: impl Fn(f32) -> f32,
    ) -> Result<(), Box<dyn Error>> {
        let x: Vec<f32> = (0..N).map(|i| (i % 97) as f32 + round as f32).collect();
        let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.input.write(&self.device, &self.stream, &bytes)?;

        let step = self.trees.step();
        let first = self.trees.run(
            functions[0],
            &step,
            &[],
            &self.stream,
            &mut [lend(&self.input)],
        )?;
        let second = self.trees.run(
            functions[1],
            &step,
            &[],
            &self.stream,
            &mut [lend(&first[0])],
        )?;
        println!(
            "== {title}: {} {:?}, {} {:?}",
            functions[0].name(),
            first.phase(),
            functions[1].name(),
            second.phase()
        );
        if picture {
            println!("{}", self.trees.picture());
        }

        self.check(&first[0], x.iter().map(|v| v + 1.0))?;
        self.check(&second[0], x.iter().map(|v| expect(v + 1.0)))
    }

    fn check(
        &mut self,
        output: &Tensor<D>,
        expected: impl Iterator<Item = f32>,
    ) -> Result<(), Box<dyn Error>> {
        let bytes = output.read(&self.device, &self.stream)?;
        for (index, (got, want)) in bytes.chunks_exact(4).zip(expected).enumerate() {
            let got = f32::from_le_bytes([got[0], got[1], got[2], got[3]]);
            if got.to_bits() != want.to_bits() {
                return Err(format!("element {index} is {got}, not {want}").into());
            }
        }
        self.checked += 1;
        Ok(())
    }
}

/// A function out = in * scale + add over `N` floats.
fn scale_add<D: Device>(
    trees: &GraphTrees<D>,
    kernels: &Arc<KernelSet<D>>,
    name: &str,
    scale: f32,
    add: f32,
) -> Result<Function, Box<dyn Error>> {
    let kernels = kernels.clone();
    Ok(
        trees.register(FunctionSpec::new(name), move |recorder, mut inputs| {
            let x = inputs.take(0)?;
            let out = recorder.alloc(x.bytes())?;
            kernels.scale_add(
                recorder.device(),
                recorder.stream(),
                out.ptr()?,
                x.ptr()?,
                N,
                scale,
                add,
            )?;
            Ok(vec![out])
        })?,
    )
}

fn drive<D: Device>(device: D) -> Result<usize, Box<dyn Error>> {
    let allocator = Allocator::new(device.clone())?;
    let stream = device.create_stream()?;
    let kernels = Arc::new(KernelSet::load(&device)?);
    let trees = GraphTrees::new(&allocator)?;
    let g1 = scale_add(&trees, &kernels, "g1", 1.0, 1.0)?;
    let g2 = scale_add(&trees, &kernels, "g2", 2.0, 0.0)?;
    let g3 = scale_add(&trees, &kernels, "g3", 3.0, -1.0)?;
    let input = allocator.alloc(&stream, 4 * N)?;

    let mut driver = Driver {
        device,
        stream,
        trees,
        input,
        checked: 0,
    };
    let (double, triple) = (|y: f32| y * 2.0, |y: f32| y * 3.0 + -1.0);
    driver.step("first run", true, 0, [&g1, &g2], double)?;
    driver.step("second run", true, 1, [&g1, &g2], double)?;
    driver.step("third run", false, 2, [&g1, &g2], double)?;
    driver.step("switch to g3", true, 3, [&g1, &g3], triple)?;
    driver.step("g3 again", false, 4, [&g1, &g3], triple)?;
    driver.step("back to g2", true, 5, [&g1, &g2], double)?;
    driver.step("and to g3", false, 6, [&g1, &g3], triple)?;
    Ok(driver.checked)
}

struct ReplayPath;

impl device::Job for ReplayPath {
    fn run<D: Device>(self, device: D) -> Result<(), Box<dyn Error>> {
        let checked = drive(device)?;
        println!("ok: {checked} outputs checked");
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (name, _) = device::chosen(std::env::args())?;
    device::run_on(&name, ReplayPath)
}
