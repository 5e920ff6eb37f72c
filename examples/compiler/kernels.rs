//! The routines that operations are lowered to: for each a body for the simulated device and CUDA C.
//!
//! Both give the same bits: every product and sum is rounded by itself, and a sum adds from its first term to its last. Some are
//! the crate's own kernels; the rest is here.

use cudagraph_trees::device::{
    DevicePtr, Fault, FaultReason, Kernel, KernelArg, KernelContext, kernels,
};

/// A routine, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Routine {
    Fill,
    ScaleAdd,
    Add,
    Sub,
    Mul,
    Relu,
    ReluGrad,
    BiasAdd,
    Broadcast,
    Copy,
    Descend,
    Sum,
    SumRows,
    Matmul,
}

impl Routine {
    pub const ALL: [Routine; 14] = [
        Routine::Fill,
        Routine::ScaleAdd,
        Routine::Add,
        Routine::Sub,
        Routine::Mul,
        Routine::Relu,
        Routine::ReluGrad,
        Routine::BiasAdd,
        Routine::Broadcast,
        Routine::Copy,
        Routine::Descend,
        Routine::Sum,
        Routine::SumRows,
        Routine::Matmul,
    ];

    /// The kernel behind it.
    pub fn kernel(self) -> Kernel {
        match self {
            Routine::Fill => kernels::fill(),
            Routine::ScaleAdd => kernels::scale_add(),
            Routine::Add => kernels::add(),
            Routine::Mul => kernels::mul(),
            Routine::Copy => kernels::copy(),
            Routine::Sum => kernels::sum(),
            Routine::Sub => sub(),
            Routine::Relu => relu(),
            Routine::ReluGrad => relu_grad(),
            Routine::BiasAdd => bias_add(),
            Routine::Broadcast => broadcast(),
            Routine::Descend => descend(),
            Routine::SumRows => sum_rows(),
            Routine::Matmul => matmul(),
        }
    }
}

/// A launch as a host body sees it: arguments by type, arrays as vectors.
struct Host<'a, 'b> {
    context: &'a mut (dyn KernelContext + 'b),
    name: &'static str,
}

impl Host<'_, '_> {
    fn wrong(&self, index: usize) -> Fault {
        Fault {
            kernel: self.name.into(),
            address: format!("argument {index}"),
            bytes: 0,
            reason: FaultReason::BadArgument,
        }
    }

    fn ptr(&self, index: usize) -> Result<DevicePtr, Fault> {
        match self.context.arg(index)? {
            KernelArg::Ptr(ptr) => Ok(ptr),
            _ => Err(self.wrong(index)),
        }
    }

    fn count(&self, index: usize) -> Result<usize, Fault> {
        match self.context.arg(index)? {
            KernelArg::U32(n) => Ok(n as usize),
            _ => Err(self.wrong(index)),
        }
    }

    fn f32(&self, index: usize) -> Result<f32, Fault> {
        match self.context.arg(index)? {
            KernelArg::F32(value) => Ok(value),
            _ => Err(self.wrong(index)),
        }
    }

    /// The `n` elements at a pointer argument.
    fn load(&mut self, index: usize, n: usize) -> Result<Vec<f32>, Fault> {
        let mut values = vec![0.0; n];
        let ptr = self.ptr(index)?;
        self.context
            .read(ptr, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Writes the array that argument 0 points to.
    fn store(&mut self, values: impl Iterator<Item = f32>) -> Result<(), Fault> {
        let values: Vec<f32> = values.collect();
        self.context
            .write(self.ptr(0)?, bytemuck::cast_slice(&values))
    }
}

/// A kernel of one thread for each element `i < n` of `dst`: its parameters and statements in CUDA C, and the same in Rust.
fn kernel(
    name: &'static str,
    parameters: &str,
    statements: &str,
    body: impl Fn(&mut Host<'_, '_>) -> Result<(), Fault> + Send + Sync + 'static,
) -> Kernel {
    Kernel::new(name)
        .host(move |context| body(&mut Host { context, name }))
        .cuda(format!(
            "extern \"C\" __global__ void {name}(float* dst, {parameters}) {{\n  \
             unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n  \
             if (i >= n) return;\n  {statements}\n}}\n"
        ))
}

/// `dst[i] = a[i] - b[i]`
fn sub() -> Kernel {
    kernel(
        "sub_f32",
        "const float* a, const float* b, unsigned n",
        "dst[i] = __fsub_rn(a[i], b[i]);",
        |host| {
            let n = host.count(3)?;
            let (a, b) = (host.load(1, n)?, host.load(2, n)?);
            host.store(a.iter().zip(&b).map(|(a, b)| a - b))
        },
    )
}

/// `dst[i] = a[i] > 0 ? a[i] : 0`
fn relu() -> Kernel {
    kernel(
        "relu_f32",
        "const float* a, unsigned n",
        "dst[i] = a[i] > 0.0f ? a[i] : 0.0f;",
        |host| {
            let n = host.count(2)?;
            let a = host.load(1, n)?;
            host.store(a.iter().map(|&a| if a > 0.0 { a } else { 0.0 }))
        },
    )
}

/// `dst[i] = b[i] > 0 ? a[i] : 0`
fn relu_grad() -> Kernel {
    kernel(
        "relu_grad_f32",
        "const float* a, const float* b, unsigned n",
        "dst[i] = b[i] > 0.0f ? a[i] : 0.0f;",
        |host| {
            let n = host.count(3)?;
            let (a, b) = (host.load(1, n)?, host.load(2, n)?);
            host.store(
                a.iter()
                    .zip(&b)
                    .map(|(&a, &b)| if b > 0.0 { a } else { 0.0 }),
            )
        },
    )
}

/// `dst[i] = a[i] + bias[i % cols]`
fn bias_add() -> Kernel {
    kernel(
        "bias_add_f32",
        "const float* a, const float* bias, unsigned n, unsigned cols",
        "dst[i] = __fadd_rn(a[i], bias[i % cols]);",
        |host| {
            let (n, cols) = (host.count(3)?, host.count(4)?);
            let (a, bias) = (host.load(1, n)?, host.load(2, cols)?);
            host.store(a.iter().zip(bias.iter().cycle()).map(|(a, b)| a + b))
        },
    )
}

/// `dst[i] = a[0]`
fn broadcast() -> Kernel {
    kernel(
        "broadcast_f32",
        "const float* a, unsigned n",
        "dst[i] = a[0];",
        |host| {
            let (n, a) = (host.count(2)?, host.load(1, 1)?);
            host.store(std::iter::repeat_n(a[0], n))
        },
    )
}

/// `dst[i] -= by * a[i]`, rounded twice
fn descend() -> Kernel {
    kernel(
        "descend_f32",
        "const float* a, unsigned n, float by",
        "dst[i] = __fsub_rn(dst[i], __fmul_rn(by, a[i]));",
        |host| {
            let (n, by) = (host.count(2)?, host.f32(3)?);
            let (dst, a) = (host.load(0, n)?, host.load(1, n)?);
            host.store(dst.iter().zip(&a).map(|(d, a)| d - by * a))
        },
    )
}

/// `dst[i]` = the sum of column `i` of `rows` x `n`, from the first row
fn sum_rows() -> Kernel {
    kernel(
        "sum_rows_f32",
        "const float* a, unsigned rows, unsigned n",
        "float total = 0.0f;\n  \
         for (unsigned r = 0; r < rows; ++r) total = __fadd_rn(total, a[r * n + i]);\n  \
         dst[i] = total;",
        |host| {
            let (rows, n) = (host.count(2)?, host.count(3)?);
            let a = host.load(1, rows * n)?;
            host.store((0..n).map(|i| (0..rows).fold(0.0, |total, r| total + a[r * n + i])))
        },
    )
}

/// `dst = a b`: `n` elements in rows of `cols`, `inner` products in each; `ta`, `tb`: the operand lies transposed
fn matmul() -> Kernel {
    kernel(
        "matmul_f32",
        "const float* a, const float* b, unsigned n, unsigned cols, unsigned inner, unsigned ta, unsigned tb",
        "unsigned rows = n / cols, r = i / cols, c = i % cols;\n  \
         float total = 0.0f;\n  \
         for (unsigned p = 0; p < inner; ++p)\n    \
         total = __fadd_rn(total, __fmul_rn(a[ta ? p * rows + r : r * inner + p], b[tb ? c * inner + p : p * cols + c]));\n  \
         dst[i] = total;",
        |host| {
            let (n, cols, inner) = (host.count(3)?, host.count(4)?, host.count(5)?);
            let (ta, tb) = (host.count(6)? != 0, host.count(7)? != 0);
            let rows = n / cols;
            let (a, b) = (host.load(1, rows * inner)?, host.load(2, inner * cols)?);
            host.store((0..n).map(|i| {
                let (r, c) = (i / cols, i % cols);
                (0..inner).fold(0.0, |total, p| {
                    let x = a[if ta { p * rows + r } else { r * inner + p }];
                    let y = b[if tb { c * inner + p } else { p * cols + c }];
                    total + x * y
                })
            }))
        },
    )
}
