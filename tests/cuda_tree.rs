//! The whole runtime on the CUDA device: warm up, record, replay, with inputs that move.
#![cfg(feature = "cuda-any")]

mod common;
mod cuda_support;

use common::Rig;
use cuda_support::{OtherContext, current};
use cudagraph_trees::device::Device;
use cudagraph_trees::device::cuda::CudaMemory;
use cudagraph_trees::{FunctionSpec, Phase};

#[test]
fn on_cuda() {
    for memory in [CudaMemory::Virtual, CudaMemory::Plain] {
        if let Some((_alone, device)) = cuda_support::with_memory(memory) {
            warmed_recorded_and_replayed(Rig::new(device));
        }
    }
}

/// Also from threads with no context current, or another than the device's, which stays so (T4-16).
#[test]
fn t4_16_on_threads_with_other_contexts() {
    let Some((_alone, device)) = cuda_support::with_memory(CudaMemory::Virtual) else {
        return;
    };
    for other in [false, true] {
        let device = device.clone();
        let whole = move || {
            let context = other.then(OtherContext::new);
            let before = current();
            assert_eq!(before.is_null(), context.is_none());
            warmed_recorded_and_replayed(Rig::new(device));
            assert_eq!(current(), before);
        };
        std::thread::spawn(whole).join().unwrap();
    }
}

/// What the scenario asks of CUDA, the simulated device does.
#[test]
fn on_the_simulated_device() {
    for device in common::hosts() {
        warmed_recorded_and_replayed(Rig::new(device));
    }
}

fn warmed_recorded_and_replayed<D: Device>(rig: Rig<D>) {
    let f = rig.scale_add("f", 2.0, 1.0);
    let g = rig.register(FunctionSpec::new("g"), |k, rec, mut inputs| {
        let (x, y) = (inputs.take(0)?, inputs.take(1)?);
        let product = k.product(rec, &x, &y)?;
        Ok(vec![k.sum(rec, &product, &y)?])
    });
    let mut phases = Vec::new();
    for round in 0..6 {
        let step = rig.trees.step();
        // A new input each time: its address moves.
        let x = rig.floats(&[round as f32, 1.5]);
        let hold = rig.floats(&[0.0; 100]);
        let (phase, y) = rig.phased(&f, &step, &x);
        phases.push(phase);
        let z = rig.run(&g, &step, &[&x, &y]).only().unwrap();
        let y_want = [round as f32 * 2.0 + 1.0, 4.0];
        assert_eq!(rig.read(&y), y_want);
        assert_eq!(rig.read(&z), [round as f32 * y_want[0] + y_want[0], 10.0]);
        drop(hold);
    }
    assert_eq!(phases[..2], [Phase::Warmup, Phase::Record]);
    assert_eq!(phases[3..], [Phase::Replay; 3]);
    drop((f, g));
    rig.finish();
}
