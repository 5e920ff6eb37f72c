//! Random numbers that are the same in warmup, record, replay and eager runs.
//!
//! A [`Generator`]'s seed and offset live in device memory, and each draw is two pieces of work in stream order: one that reads
//! them and writes the numbers, one that moves the offset on. Captured, both become nodes of the graph, so every replay draws
//! where the last draw ended, whatever that was, with nothing to be done by the host. The numbers are Philox4x32-10 (Salmon
//! et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): number `i` of a draw is lane `i % 4` of block `offset + i / 4`,
//! keyed by the seed; both devices give the same bits.

use crate::allocator::Allocator;
use crate::device::{
    Device, DevicePtr, Fault, FaultReason, Kernel, KernelArg, KernelContext, LaunchConfig,
};
use crate::error::Result;
use crate::storage::Tensor;

/// Bytes of a generator's state: the seed, then the offset in blocks of four numbers, 64 bits each.
pub const STATE_BYTES: u64 = 16;

/// A stream of random numbers with its state on the device.
///
/// Draws and seeding are ordered by the streams they are enqueued on; a generator used on several streams needs the
/// caller's events between them. Clones share the state.
#[derive(Clone, Debug)]
pub struct Generator<D: Device> {
    device: D,
    state: Tensor<D>,
    uniform: D::Function,
    advance: D::Function,
}

impl<D: Device> Generator<D> {
    /// A generator with this seed and offset 0. Its state is allocated from the default pool; make it before capturing.
    ///
    /// # Errors
    /// The pool's and the device's.
    pub fn new(allocator: &Allocator<D>, stream: &D::Stream, seed: u64) -> Result<Self> {
        let device = allocator.device().clone();
        let state = allocator.alloc(stream, STATE_BYTES)?;
        let (uniform, advance) = (
            device.load(&uniform_kernel())?,
            device.load(&advance_kernel())?,
        );
        let generator = Generator {
            device,
            state,
            uniform,
            advance,
        };
        generator.set(stream, seed, 0)?;
        Ok(generator)
    }

    /// Starts anew with another seed: what is enqueued on `stream` from here on draws from its beginning, replays too.
    ///
    /// # Errors
    /// The device's; on a capturing stream it is refused, with the capture as it was: a graph draws from the seed that holds when it is launched.
    pub fn seed(&self, stream: &D::Stream, seed: u64) -> Result<()> {
        self.set(stream, seed, 0)
    }

    /// Sets seed and offset (in blocks of four numbers).
    ///
    /// # Errors
    /// As [`seed`](Generator::seed).
    pub fn set(&self, stream: &D::Stream, seed: u64, offset: u64) -> Result<()> {
        let mut bytes = [0; STATE_BYTES as usize];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..].copy_from_slice(&offset.to_le_bytes());
        self.state.write(&self.device, stream, &bytes)
    }

    /// Seed and offset after all that was enqueued on `stream` so far. Waits for it.
    ///
    /// # Errors
    /// The device's; refused on a capturing stream.
    pub fn get(&self, stream: &D::Stream) -> Result<(u64, u64)> {
        let bytes = self.state.read(&self.device, stream)?;
        let half = |at: usize| {
            bytes[at..at + 8]
                .iter()
                .rev()
                .fold(0, |n, b| n << 8 | u64::from(*b))
        };
        Ok((half(0), half(8)))
    }

    /// Draws `n` numbers, uniform in [0, 1), into `dst`, and moves the offset on by ⌈n/4⌉. The numbers are multiples of 2⁻²⁴.
    ///
    /// # Errors
    /// The device's.
    pub fn uniform(&self, stream: &D::Stream, dst: DevicePtr, n: u64) -> Result<()> {
        if n == 0 {
            return Ok(());
        }
        let state = KernelArg::Ptr(self.state.ptr()?);
        let blocks = n.div_ceil(4);
        self.device.launch(
            stream,
            &self.uniform,
            LaunchConfig::for_elements(blocks),
            &[KernelArg::Ptr(dst), KernelArg::U64(n), state],
        )?;
        let one = LaunchConfig {
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
        };
        Ok(self
            .device
            .launch(stream, &self.advance, one, &[state, KernelArg::U64(blocks)])?)
    }
}

const M: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const W: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four words of Philox4x32-10.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let product = |at: usize| u64::from(M[at / 2]) * u64::from(counter[at]);
        let (a, b) = (product(0), product(2));
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(W[0]), key[1].wrapping_add(W[1])];
    }
    counter
}

/// Words `4 * block ..` of the stream that `seed` keys.
fn block(seed: u64, block: u64) -> [u32; 4] {
    philox(
        [block as u32, (block >> 32) as u32, 0, 0],
        [seed as u32, (seed >> 32) as u32],
    )
}

fn ptr(context: &dyn KernelContext, name: &str, index: usize) -> Result<DevicePtr, Fault> {
    match context.arg(index)? {
        KernelArg::Ptr(ptr) => Ok(ptr),
        _ => Err(wrong(name, index, "a pointer")),
    }
}

fn count(context: &dyn KernelContext, name: &str, index: usize) -> Result<u64, Fault> {
    match context.arg(index)? {
        KernelArg::U64(n) => Ok(n),
        _ => Err(wrong(name, index, "a count (u64)")),
    }
}

fn wrong(name: &str, index: usize, wanted: &str) -> Fault {
    Fault {
        kernel: name.into(),
        address: format!("argument {index}, which must be {wanted}"),
        bytes: 0,
        reason: FaultReason::BadArgument,
    }
}

fn read_u64(context: &mut dyn KernelContext, at: DevicePtr) -> Result<u64, Fault> {
    let mut bytes = [0; 8];
    context.read(at, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

const PHILOX: &str = r#"
__device__ void philox(unsigned int c[4], unsigned int k0, unsigned int k1) {
  for (int round = 0; round < 10; ++round) {
    unsigned long long a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    unsigned int n0 = (unsigned int)(b >> 32) ^ c[1] ^ k0, n2 = (unsigned int)(a >> 32) ^ c[3] ^ k1;
    c[0] = n0; c[1] = (unsigned int)b; c[2] = n2; c[3] = (unsigned int)a;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
}
extern "C" __global__ void philox_uniform_f32(float* dst, unsigned long long n, const unsigned long long* state) {
  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x, seed = state[0], offset = state[1];
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < (n + 3) / 4; i += step) {
    unsigned long long block = offset + i;
    unsigned int c[4] = {(unsigned int)block, (unsigned int)(block >> 32), 0, 0};
    philox(c, (unsigned int)seed, (unsigned int)(seed >> 32));
    for (int lane = 0; lane < 4 && 4 * i + lane < n; ++lane)
      dst[4 * i + lane] = (float)(c[lane] >> 8) * 5.9604644775390625e-08f;
  }
}
"#;

fn uniform_kernel() -> Kernel {
    const NAME: &str = "philox_uniform_f32";
    Kernel::new(NAME).cuda(PHILOX).host(|context| {
        let (dst, n, state) = (
            ptr(context, NAME, 0)?,
            count(context, NAME, 1)?,
            ptr(context, NAME, 2)?,
        );
        let (seed, offset) = (
            read_u64(context, state)?,
            read_u64(context, state.offset(8))?,
        );
        let words = (0..n.div_ceil(4)).flat_map(|i| block(seed, offset.wrapping_add(i)));
        let bytes: Vec<u8> = words
            .take(n as usize)
            .flat_map(|w| ((w >> 8) as f32 * f32::powi(2.0, -24)).to_le_bytes())
            .collect();
        context.write(dst, &bytes)
    })
}

fn advance_kernel() -> Kernel {
    const NAME: &str = "philox_advance";
    let cuda = "extern \"C\" __global__ void philox_advance(unsigned long long* state, unsigned long long blocks) { state[1] += blocks; }\n";
    Kernel::new(NAME).cuda(cuda).host(|context| {
        let (state, blocks) = (ptr(context, NAME, 0)?, count(context, NAME, 1)?);
        let offset = read_u64(context, state.offset(8))?.wrapping_add(blocks);
        context.write(state.offset(8), &offset.to_le_bytes())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123's own test vectors for philox4x32-10.
    #[test]
    fn known_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
