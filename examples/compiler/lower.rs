//! Lowering: from an operation to the launch of one routine. Compiled and uncompiled runs share it.

use cudagraph_trees::device::{Device, DevicePtr, KernelArg, LaunchConfig, Result};

use super::ir::{Graph, Op, Var};
use super::kernels::Routine;

/// A launch, short of the device.
pub struct Launch {
    pub routine: Routine,
    pub config: LaunchConfig,
    pub args: Vec<KernelArg>,
}

/// The launch of an operation: what it makes goes to `dst`, its operands lie at `operands`.
/// `None` for what does not run.
pub fn lower(code: &Graph, var: Var, dst: DevicePtr, operands: &[DevicePtr]) -> Option<Launch> {
    let node = code.node(var);
    let elements = node.shape.elements();
    // The crate's kernels count in 64 bits, ours in 32.
    let long = KernelArg::U64(elements);
    let short = KernelArg::U32(node.shape.0 * node.shape.1);
    let first = node.operands.first().map(|operand| code.shape(*operand));
    let mut config = LaunchConfig::for_elements(elements);
    let (routine, rest) = match node.op {
        Op::Input | Op::Variable(_) | Op::Break => return None,
        Op::Fill(value) => (Routine::Fill, vec![long, KernelArg::F32(value)]),
        Op::Scale(by) => {
            let rest = vec![long, KernelArg::F32(by), KernelArg::F32(0.0)];
            (Routine::ScaleAdd, rest)
        }
        Op::Add => (Routine::Add, vec![long]),
        Op::Mul => (Routine::Mul, vec![long]),
        Op::Sub => (Routine::Sub, vec![short]),
        Op::Relu => (Routine::Relu, vec![short]),
        Op::ReluGrad => (Routine::ReluGrad, vec![short]),
        Op::BiasAdd => (Routine::BiasAdd, vec![short, KernelArg::U32(node.shape.1)]),
        Op::Broadcast => (Routine::Broadcast, vec![short]),
        Op::Sum => {
            config = LaunchConfig {
                grid: [1; 3],
                block: [1; 3],
                shared_bytes: 0,
            };
            (Routine::Sum, vec![KernelArg::U64(first?.elements())])
        }
        Op::SumRows => (Routine::SumRows, vec![KernelArg::U32(first?.0), short]),
        Op::Matmul { ta, tb } => {
            let inner = if ta { first?.0 } else { first?.1 };
            let numbers = [node.shape.1, inner, ta.into(), tb.into()].map(KernelArg::U32);
            let rest = [short].into_iter().chain(numbers).collect();
            (Routine::Matmul, rest)
        }
        Op::Assign => (Routine::Copy, vec![long]),
        Op::Descend(by) => (Routine::Descend, vec![short, KernelArg::F32(by)]),
    };
    // What is changed in place is the destination and no source.
    let sources = &operands[usize::from(node.op.in_place())..];
    let args = [dst]
        .iter()
        .chain(sources)
        .map(|ptr| KernelArg::Ptr(*ptr))
        .chain(rest)
        .collect();
    Some(Launch {
        routine,
        config,
        args,
    })
}

/// All routines, loaded on one device.
pub struct Library<D: Device> {
    /// In the order of [`Routine::ALL`], which is that of their declaration.
    loaded: Vec<D::Function>,
}

impl<D: Device> Library<D> {
    pub fn load(device: &D) -> Result<Self> {
        let loaded = Routine::ALL.map(|routine| device.load(&routine.kernel()));
        Ok(Library {
            loaded: loaded.into_iter().collect::<Result<_>>()?,
        })
    }

    /// Enqueues an operation.
    pub fn launch(
        &self,
        device: &D,
        stream: &D::Stream,
        code: &Graph,
        var: Var,
        dst: DevicePtr,
        operands: &[DevicePtr],
    ) -> Result<()> {
        match lower(code, var, dst, operands) {
            Some(launch) => {
                let function = &self.loaded[launch.routine as usize];
                device.launch(stream, function, launch.config, &launch.args)
            }
            None => Ok(()),
        }
    }
}
