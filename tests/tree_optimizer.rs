//! An optimizer over the tree: parameters and state are static and written in place, gradients are copied in unless a graph made them. Names carry the
//! rows of the tables.

mod common;

use common::Rig;
use cudagraph_trees::device::{
    Device, DevicePtr, Fault, FaultReason, Kernel, KernelArg, KernelContext, LaunchConfig,
};
use cudagraph_trees::{Function, FunctionSpec, InputView, Mismatch, Phase, Reason, Tensor};

suite!(
    static_30_an_optimizer_step_is_the_eager_one,
    static_31_a_state_tensor_is_replaced,
    static_37_gradients_of_graphs_need_no_copy,
);

use Phase::{Record, Replay, Warmup};

const LR: f32 = 0.01;
const BETAS: [f32; 2] = [0.9, 0.999];
const EPS: f32 = 1e-8;

fn bad(what: &str) -> Fault {
    Fault {
        kernel: "adam_f32".into(),
        address: format!("an argument that must be {what}"),
        bytes: 0,
        reason: FaultReason::BadArgument,
    }
}

/// One element of a step: parameter, gradient, both moments; `powers` are those of the betas.
fn adam_element(powers: [f32; 2], p: f32, g: f32, m: f32, v: f32) -> [f32; 3] {
    let m = BETAS[0] * m + (1.0 - BETAS[0]) * g;
    let v = BETAS[1] * v + (1.0 - BETAS[1]) * (g * g);
    let (mean, square) = (m / (1.0 - powers[0]), v / (1.0 - powers[1]));
    [p - LR * (mean / (square.sqrt() + EPS)), m, v]
}

/// `adam_f32(p, g, m, v, powers, n)`: one step of Adam, in place.
fn adam() -> Kernel {
    fn ptr(context: &dyn KernelContext, index: usize) -> Result<DevicePtr, Fault> {
        match context.arg(index)? {
            KernelArg::Ptr(ptr) => Ok(ptr),
            _ => Err(bad("a pointer")),
        }
    }
    fn read(context: &mut dyn KernelContext, at: usize, index: u64) -> Result<f32, Fault> {
        let mut bytes = [0; 4];
        let from = ptr(context, at)?.offset(4 * index);
        context.read(from, &mut bytes)?;
        Ok(f32::from_le_bytes(bytes))
    }
    Kernel::new("adam_f32")
        .host(|context| {
            let KernelArg::U64(n) = context.arg(5)? else {
                return Err(bad("a count"));
            };
            let powers = [read(context, 4, 0)?, read(context, 4, 1)?];
            for i in 0..n {
                let [p, g, m, v] = [
                    read(context, 0, i)?,
                    read(context, 1, i)?,
                    read(context, 2, i)?,
                    read(context, 3, i)?,
                ];
                for (at, value) in [0, 2, 3].into_iter().zip(adam_element(powers, p, g, m, v)) {
                    let to = ptr(context, at)?.offset(4 * i);
                    context.write(to, &value.to_le_bytes())?;
                }
            }
            Ok(())
        })
        .cuda(
            "extern \"C\" __global__ void adam_f32(float* p, const float* g, float* m, float* v, const float* powers, unsigned long long n) {\n  \
             unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;\n  \
             if (i >= n) return;\n  \
             float b1 = 0.9f, b2 = 0.999f;\n  \
             m[i] = __fadd_rn(__fmul_rn(b1, m[i]), __fmul_rn(1.0f - b1, g[i]));\n  \
             v[i] = __fadd_rn(__fmul_rn(b2, v[i]), __fmul_rn(1.0f - b2, __fmul_rn(g[i], g[i])));\n  \
             float mean = __fdiv_rn(m[i], 1.0f - powers[0]), square = __fdiv_rn(v[i], 1.0f - powers[1]);\n  \
             p[i] = __fsub_rn(p[i], __fmul_rn(0.01f, __fdiv_rn(mean, __fadd_rn(__fsqrt_rn(square), 1e-8f))));\n}\n",
        )
}

const WIDTH: usize = 6;

/// Parameters and state on the device, and what they are to be.
struct Optimizer<D: Device> {
    tensors: Vec<Tensor<D>>,
    p: [f32; WIDTH],
    m: [f32; WIDTH],
    v: [f32; WIDTH],
    powers: [f32; 2],
}

impl<D: Device> Optimizer<D> {
    fn new(rig: &Rig<D>) -> Self {
        let p = std::array::from_fn(|i| i as f32 - 2.5);
        let zeros = [0.0; WIDTH];
        Optimizer {
            tensors: vec![
                rig.floats(&p),
                rig.floats(&zeros),
                rig.floats(&zeros),
                rig.floats(&[1.0, 1.0]),
            ],
            p,
            m: zeros,
            v: zeros,
            powers: [1.0, 1.0],
        }
    }

    /// The step on the host.
    fn step(&mut self, gradient: &[f32]) {
        self.powers = std::array::from_fn(|i| self.powers[i] * BETAS[i]);
        for (i, g) in gradient.iter().enumerate() {
            let element = adam_element(self.powers, self.p[i], *g, self.m[i], self.v[i]);
            [self.p[i], self.m[i], self.v[i]] = element;
        }
    }

    #[track_caller]
    fn check(&self, rig: &Rig<D>) {
        assert_eq!(rig.read(&self.tensors[0]), self.p);
        assert_eq!(rig.read(&self.tensors[1]), self.m);
        assert_eq!(rig.read(&self.tensors[2]), self.v);
        assert_eq!(rig.read(&self.tensors[3]), self.powers);
    }
}

/// The optimizer's step: parameters, moments and powers are static, the gradient is passed last.
fn optimizer_step<D: Device>(rig: &Rig<D>) -> Function {
    let adam = rig.device.load(&adam()).unwrap();
    let betas = rig.floats(&BETAS);
    let mut spec = FunctionSpec::new("adam");
    for position in 0..4 {
        spec = spec.static_input(position).mutates(position);
    }
    rig.register(spec, move |k, rec, inputs| {
        let mut at = [DevicePtr::NULL; 5];
        for (index, at) in at.iter_mut().enumerate() {
            *at = inputs.get(index)?.ptr()?;
        }
        let [p, m, v, powers, g] = at;
        k.kernels
            .mul(rec.device(), rec.stream(), powers, powers, betas.ptr()?, 2)?;
        let args = [
            KernelArg::Ptr(p),
            KernelArg::Ptr(g),
            KernelArg::Ptr(m),
            KernelArg::Ptr(v),
            KernelArg::Ptr(powers),
            KernelArg::U64(WIDTH as u64),
        ];
        rec.launch(&adam, LaunchConfig::for_elements(WIDTH as u64), &args)?;
        Ok(vec![])
    })
}

fn gradient(round: usize) -> [f32; WIDTH] {
    std::array::from_fn(|i| (i as f32 - 1.5) * (round as f32 + 1.0) * 0.25)
}

fn static_30_an_optimizer_step_is_the_eager_one<D: Device>(rig: Rig<D>) {
    let adam = optimizer_step(&rig);
    let mut optimizer = Optimizer::new(&rig);
    for (round, phase) in [Warmup, Record, Replay, Replay, Replay, Replay]
        .into_iter()
        .enumerate()
    {
        let g = rig.floats(&gradient(round));
        let eager = rig.allocator.stats().live_blocks.allocated;
        let mut inputs: Vec<&Tensor<D>> = optimizer.tensors.iter().collect();
        inputs.push(&g);
        let out = rig.run(&adam, &rig.trees.step(), &inputs);
        assert_eq!(out.phase(), phase);
        assert_eq!(rig.allocator.stats().live_blocks.allocated, eager);
        optimizer.step(&gradient(round));
        optimizer.check(&rig);
    }
    assert_eq!(rig.trees.counts().recordings, 1);
    let view = rig.trees.view();
    let bytes = 4 * WIDTH as u64;
    let fixed = |bytes| InputView::Static { bytes };
    assert_eq!(
        view.nodes[0].inputs,
        [
            fixed(bytes),
            fixed(bytes),
            fixed(bytes),
            fixed(8),
            InputView::Copied { bytes }
        ]
    );
    assert_eq!(view.nodes[0].graph_nodes, 3, "a copy and two kernels");
    drop((adam, optimizer));
    rig.finish();
}

fn static_31_a_state_tensor_is_replaced<D: Device>(rig: Rig<D>) {
    for replaced in 0..4 {
        let adam = optimizer_step(&rig);
        let mut optimizer = Optimizer::new(&rig);
        let mut reasons = Vec::new();
        let mut kept = Vec::new();
        for round in 0..6 {
            if round == 4 {
                let old = &optimizer.tensors[replaced];
                let new = rig.floats(&rig.read(old));
                kept.push(std::mem::replace(&mut optimizer.tensors[replaced], new));
            }
            let g = rig.floats(&gradient(round));
            let mut inputs: Vec<&Tensor<D>> = optimizer.tensors.iter().collect();
            inputs.push(&g);
            let out = rig.run(&adam, &rig.trees.step(), &inputs);
            optimizer.step(&gradient(round));
            optimizer.check(&rig);
            reasons.push(out.reason());
        }
        let moved = Mismatch::StaticMoved {
            input: replaced,
            recorded: kept[0].ptr().unwrap(),
            passed: optimizer.tensors[replaced].ptr().unwrap(),
        };
        assert_eq!(
            reasons[2..],
            [None, None, Some(Reason::Changed(moved)), None]
        );
        assert_eq!(rig.trees.report(&adam).unwrap().recordings, 2);
    }
    rig.finish();
}

fn static_37_gradients_of_graphs_need_no_copy<D: Device>(rig: Rig<D>) {
    let adam = optimizer_step(&rig);
    let backward = rig.scale_add("backward", 0.5, 0.0);
    let mut optimizer = Optimizer::new(&rig);
    let twice = |round| gradient(round).map(|g| 2.0 * g);
    for graphed in [true, false] {
        for round in 0..4 {
            let step = rig.trees.step();
            let loss = rig.floats(&twice(round));
            let g = if graphed {
                rig.one(&backward, &step, &loss)
            } else {
                rig.floats(&gradient(round))
            };
            let mut inputs: Vec<&Tensor<D>> = optimizer.tensors.iter().collect();
            inputs.push(&g);
            rig.run(&adam, &step, &inputs);
            optimizer.step(&gradient(round));
            optimizer.check(&rig);
        }
    }
    let view = rig.trees.view();
    let of_adam: Vec<_> = view.nodes.iter().filter(|n| n.function == "adam").collect();
    assert_eq!(of_adam.len(), 2);
    assert!(
        matches!(&of_adam[0].inputs[4], InputView::Managed { function, .. } if function == "backward")
    );
    assert_eq!(of_adam[0].graph_nodes, 2, "nothing is copied in");
    assert!(matches!(of_adam[1].inputs[4], InputView::Copied { .. }));
    assert_eq!(of_adam[1].graph_nodes, 3);
    drop((adam, optimizer));
    rig.finish();
}
