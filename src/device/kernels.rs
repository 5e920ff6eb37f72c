//! A few elementwise kernels on `f32`, the same for both devices: a host body and CUDA C that give the same bits.
//!
//! Sums and products are rounded one by one on both sides (no fused multiply-add), and [`sum`] adds from the first
//! element to the last. Elementwise kernels may run in place; ranges that overlap otherwise give no defined result.
//! Counts are elements, addresses are of 4-byte elements.

mod set;

use super::{DevicePtr, Fault, FaultReason, Kernel, KernelArg, KernelContext, Result};
pub use set::KernelSet;

/// Elements that a host body handles at a time.
const PIECE: u64 = 1 << 14;

/// Reads the arguments of a launch by type.
struct Args<'a, 'b> {
    context: &'a mut (dyn KernelContext + 'b),
    name: &'static str,
}

impl Args<'_, '_> {
    fn wrong(&self, index: usize, wanted: &str) -> Fault {
        let address = format!("argument {index}, which must be {wanted}");
        Fault {
            kernel: self.name.into(),
            address,
            bytes: 0,
            reason: FaultReason::BadArgument,
        }
    }

    fn ptr(&self, index: usize) -> Result<DevicePtr, Fault> {
        match self.context.arg(index)? {
            KernelArg::Ptr(ptr) => Ok(ptr),
            _ => Err(self.wrong(index, "a pointer")),
        }
    }

    fn count(&self, index: usize) -> Result<u64, Fault> {
        match self.context.arg(index)? {
            KernelArg::U64(n) => Ok(n),
            _ => Err(self.wrong(index, "a count (u64)")),
        }
    }

    fn f32(&self, index: usize) -> Result<f32, Fault> {
        match self.context.arg(index)? {
            KernelArg::F32(value) => Ok(value),
            _ => Err(self.wrong(index, "an f32")),
        }
    }

    /// Elements `start..start + out.len()` of an array.
    fn read(&mut self, array: DevicePtr, start: u64, out: &mut [f32]) -> Result<(), Fault> {
        self.context
            .read(array.offset(start * 4), bytemuck::cast_slice_mut(out))
    }

    /// Writes `n` elements at `dst`, each computed from the same element of the sources.
    fn map<const N: usize>(
        &mut self,
        dst: DevicePtr,
        sources: [DevicePtr; N],
        n: u64,
        f: impl Fn([f32; N]) -> f32,
    ) -> Result<(), Fault> {
        let mut inputs = [const { Vec::new() }; N];
        let mut out = Vec::new();
        let mut start = 0;
        while start < n {
            let len = PIECE.min(n - start) as usize;
            for (input, &source) in inputs.iter_mut().zip(&sources) {
                input.resize(len, 0.0);
                self.read(source, start, input)?;
            }
            out.clear();
            out.extend((0..len).map(|i| f(std::array::from_fn(|k| inputs[k][i]))));
            self.context
                .write(dst.offset(start * 4), bytemuck::cast_slice(&out))?;
            start += len as u64;
        }
        Ok(())
    }
}

/// A kernel of this module: its name, its host body, its CUDA C.
fn kernel(
    name: &'static str,
    cuda: &'static str,
    body: impl Fn(&mut Args<'_, '_>) -> Result<(), Fault> + Send + Sync + 'static,
) -> Kernel {
    Kernel::new(name)
        .host(move |context| body(&mut Args { context, name }))
        .cuda(cuda)
}

/// CUDA C of a kernel that sets element `i` of `dst`, for all `i < n`, in a loop over the grid.
macro_rules! elementwise {
    ($name:literal, $parameters:literal, $value:literal) => {
        concat!(
            "extern \"C\" __global__ void ",
            $name,
            "(",
            $parameters,
            ") {\n",
            "  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;\n",
            "  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)\n",
            "    dst[i] = ",
            $value,
            ";\n}\n"
        )
    };
}

/// `fill_f32(dst, n, value)`: `dst = value`.
#[must_use]
pub fn fill() -> Kernel {
    let cuda = elementwise!(
        "fill_f32",
        "float* dst, unsigned long long n, float value",
        "value"
    );
    kernel("fill_f32", cuda, |args| {
        let value = args.f32(2)?;
        args.map(args.ptr(0)?, [], args.count(1)?, |[]| value)
    })
}

/// `scale_add_f32(dst, src, n, scale, add)`: `dst = src * scale + add`, rounded twice.
#[must_use]
pub fn scale_add() -> Kernel {
    let cuda = elementwise!(
        "scale_add_f32",
        "float* dst, const float* src, unsigned long long n, float scale, float add",
        "__fadd_rn(__fmul_rn(src[i], scale), add)"
    );
    kernel("scale_add_f32", cuda, |args| {
        let (scale, add) = (args.f32(3)?, args.f32(4)?);
        args.map(args.ptr(0)?, [args.ptr(1)?], args.count(2)?, |[x]| {
            x * scale + add
        })
    })
}

/// `add_f32(dst, a, b, n)`: `dst = a + b`.
#[must_use]
pub fn add() -> Kernel {
    let cuda = elementwise!(
        "add_f32",
        "float* dst, const float* a, const float* b, unsigned long long n",
        "__fadd_rn(a[i], b[i])"
    );
    kernel("add_f32", cuda, |args| {
        args.map(
            args.ptr(0)?,
            [args.ptr(1)?, args.ptr(2)?],
            args.count(3)?,
            |[a, b]| a + b,
        )
    })
}

/// `mul_f32(dst, a, b, n)`: `dst = a * b`.
#[must_use]
pub fn mul() -> Kernel {
    let cuda = elementwise!(
        "mul_f32",
        "float* dst, const float* a, const float* b, unsigned long long n",
        "__fmul_rn(a[i], b[i])"
    );
    kernel("mul_f32", cuda, |args| {
        args.map(
            args.ptr(0)?,
            [args.ptr(1)?, args.ptr(2)?],
            args.count(3)?,
            |[a, b]| a * b,
        )
    })
}

/// `copy_f32(dst, src, n)`: `dst = src`.
#[must_use]
pub fn copy() -> Kernel {
    let cuda = elementwise!(
        "copy_f32",
        "float* dst, const float* src, unsigned long long n",
        "src[i]"
    );
    kernel("copy_f32", cuda, |args| {
        args.map(args.ptr(0)?, [args.ptr(1)?], args.count(2)?, |[x]| x)
    })
}

/// `increment_f32(dst, n, by)`: `dst = dst + by`, in place.
#[must_use]
pub fn increment() -> Kernel {
    let cuda = elementwise!(
        "increment_f32",
        "float* dst, unsigned long long n, float by",
        "__fadd_rn(dst[i], by)"
    );
    kernel("increment_f32", cuda, |args| {
        let (dst, by) = (args.ptr(0)?, args.f32(2)?);
        args.map(dst, [dst], args.count(1)?, |[x]| x + by)
    })
}

/// `sum_f32(dst, src, n)`: one element, the sum of `n` from first to last, starting at 0. One thread does it.
#[must_use]
pub fn sum() -> Kernel {
    let cuda = "extern \"C\" __global__ void sum_f32(float* dst, const float* src, unsigned long long n) {\n  \
                if (blockIdx.x != 0 || threadIdx.x != 0) return;\n  \
                float total = 0.0f;\n  \
                for (unsigned long long i = 0; i < n; ++i) total = __fadd_rn(total, src[i]);\n  \
                dst[0] = total;\n}\n";
    kernel("sum_f32", cuda, |args| {
        let (dst, src, n) = (args.ptr(0)?, args.ptr(1)?, args.count(2)?);
        let (mut total, mut start, mut piece) = (0.0_f32, 0, Vec::new());
        while start < n {
            piece.resize(PIECE.min(n - start) as usize, 0.0);
            args.read(src, start, &mut piece)?;
            total = piece.iter().fold(total, |total, x| total + x);
            start += piece.len() as u64;
        }
        args.context.write(dst, bytemuck::bytes_of(&total))
    })
}
