//! Random numbers that are the same in warmup, record, replay and eager runs.
//!
//! A [`Generator`]'s seed and offset live in device memory, and each draw is two pieces of work in stream order: one that reads
//! them and writes the numbers, one that moves the offset on. Captured, both become nodes of the graph, so every replay draws
//! where the last draw ended, whatever that was, with nothing to be done by the host. The numbers are Philox4x32-10 (Salmon
//! et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): number `i` of a draw is lane `i % 4` of block `offset + i / 4`,
//! keyed by the seed; both devices give the same bits.

use std::panic::Location;
use std::sync::Arc;

use crate::allocator::{Allocator, refuse_tensor};
use crate::device::{
    Call, CaptureStatus, Code, Device, DeviceError, DevicePtr, Fault, FaultReason, Kernel,
    KernelArg, KernelContext, LaunchConfig,
};
use crate::error::{Error, Result};
use crate::storage::Tensor;
use crate::sync::{Mutex, lock};

/// Bytes of a generator's state: the seed, then the offset in blocks of four numbers, 64 bits each.
pub const STATE_BYTES: u64 = 16;

/// A stream of random numbers with its state on the device. Clones are the same generator.
///
/// Draws and seeding are ordered by the streams they are enqueued on; a generator used on several streams needs the
/// caller's events between them.
///
/// A generator draws from one [state](GeneratorState) at a time, and which one that is can be [exchanged](Generator::exchange_state), during a capture too. That is done by
/// the host, at once, and is not captured: a graph has the addresses of the states that its draws were captured with, and goes on drawing from those.
/// It keeps their memory, whoever drops generator and states. (Of a capture that neither a [`Graph`](crate::Graph) nor a tree of this allocator began, nobody
/// says when its graph goes: states drawn from in it are kept as long as the allocator.)
#[derive(Clone, Debug)]
pub struct Generator<D: Device> {
    allocator: Allocator<D>,
    /// The state that is drawn from now.
    current: Arc<Mutex<GeneratorState<D>>>,
    uniform: D::Function,
    advance: D::Function,
}

/// Seed and offset of a [`Generator`], in device memory that belongs to the last of its handles: generators, graphs that draw from it, and clones of this, which
/// are the same state.
#[derive(Clone, Debug)]
pub struct GeneratorState<D: Device> {
    device: D,
    memory: Tensor<D>,
}

impl<D: Device> GeneratorState<D> {
    /// A state of undefined bytes, in the default pool, wherever allocations are routed to.
    fn new(
        allocator: &Allocator<D>,
        stream: &D::Stream,
        at: &'static Location<'static>,
    ) -> Result<Self> {
        let memory = allocator.default_pool().alloc_at(stream, STATE_BYTES, at)?;
        Ok(GeneratorState {
            device: allocator.device().clone(),
            memory,
        })
    }

    /// Sets seed and offset (in blocks of four numbers): what is enqueued on `stream` from here on draws from there, replays too.
    ///
    /// # Errors
    /// The device's; on a capturing stream it is refused, with the capture as it was: a graph draws from the seed that holds when it is launched.
    pub fn set(&self, stream: &D::Stream, seed: u64, offset: u64) -> Result<()> {
        let mut bytes = [0; STATE_BYTES as usize];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..].copy_from_slice(&offset.to_le_bytes());
        self.on(stream, |device| self.memory.write(device, stream, &bytes))
    }

    /// Seed and offset after all that was enqueued on `stream` so far. Waits for it.
    ///
    /// # Errors
    /// The device's; refused on a capturing stream.
    pub fn get(&self, stream: &D::Stream) -> Result<(u64, u64)> {
        let bytes = self.on(stream, |device| self.memory.read(device, stream))?;
        let half = |at: usize| {
            bytes[at..at + 8]
                .iter()
                .rev()
                .fold(0, |n, b| n << 8 | u64::from(*b))
        };
        Ok((half(0), half(8)))
    }

    /// Enqueues work that uses it, and notes that the stream does: the last handle may go before the work has run.
    fn on<T>(&self, stream: &D::Stream, work: impl FnOnce(&D) -> Result<T>) -> Result<T> {
        if !self.device.owns(stream) {
            return Err(Error::ForeignStream);
        }
        if let Some(storage) = self.memory.storage() {
            storage.used_by_run(stream);
        }
        work(&self.device)
    }
}

/// Whether they are the same state, not whether equal numbers come next.
impl<D: Device> PartialEq for GeneratorState<D> {
    fn eq(&self, other: &Self) -> bool {
        self.memory.is_same_storage(&other.memory)
    }
}

impl<D: Device> Eq for GeneratorState<D> {}

impl<D: Device> Generator<D> {
    /// A generator with a state of this seed and offset 0. The state is allocated from the default pool; make it before capturing.
    ///
    /// # Errors
    /// The pool's and the device's; [`Error::ForeignStream`].
    #[track_caller]
    pub fn new(allocator: &Allocator<D>, stream: &D::Stream, seed: u64) -> Result<Self> {
        let device = allocator.device();
        let state = GeneratorState::new(allocator, stream, Location::caller())?;
        let (uniform, advance) = (
            device.load(&uniform_kernel())?,
            device.load(&advance_kernel())?,
        );
        state.set(stream, seed, 0)?;
        Ok(Generator {
            allocator: allocator.clone(),
            current: Arc::new(Mutex::new(state)),
            uniform,
            advance,
        })
    }

    /// The state that it draws from now.
    #[must_use]
    pub fn state(&self) -> GeneratorState<D> {
        lock(&self.current).clone()
    }

    /// Draws from another state from now on, on every clone of the generator; gives the one before. Nothing is enqueued or captured by it.
    ///
    /// # Errors
    /// [`Error::ForeignTensor`] for a state of another device.
    pub fn exchange_state(&self, state: &GeneratorState<D>) -> Result<GeneratorState<D>> {
        refuse_tensor(self.allocator.device(), &state.memory, || {
            "the state to draw from".into()
        })?;
        Ok(std::mem::replace(&mut *lock(&self.current), state.clone()))
    }

    /// A new state with the seed and offset that the present one has after all that was enqueued on `stream` so far.
    ///
    /// # Errors
    /// The pool's and the device's; [`Error::ForeignStream`]; on a capturing stream it is refused, with the capture as it was: the state would have no value before the graph runs.
    #[track_caller]
    pub fn clone_state(&self, stream: &D::Stream) -> Result<GeneratorState<D>> {
        let device = self.allocator.device();
        if !device.owns(stream) {
            return Err(Error::ForeignStream);
        }
        if device.capture_status(stream)? != CaptureStatus::None {
            let detail = "a generator's state is cloned on a stream that captures; clone it before the capture";
            let error = DeviceError::new(Call::Copy, Code::StreamCaptureUnsupported, detail);
            return Err(device.refuse(stream, error, false).into());
        }
        let state = self.state();
        let clone = GeneratorState::new(&self.allocator, stream, Location::caller())?;
        let (to, from) = (clone.memory.ptr()?, state.memory.ptr()?);
        state.on(stream, |device| {
            Ok(device.copy(stream, to, from, STATE_BYTES)?)
        })?;
        Ok(clone)
    }

    /// Starts anew with another seed, in the present state: what is enqueued on `stream` from here on draws from its beginning, replays too.
    ///
    /// # Errors
    /// As [`GeneratorState::set`].
    pub fn seed(&self, stream: &D::Stream, seed: u64) -> Result<()> {
        self.set(stream, seed, 0)
    }

    /// Sets seed and offset of the present state: [`GeneratorState::set`].
    ///
    /// # Errors
    /// As there.
    pub fn set(&self, stream: &D::Stream, seed: u64, offset: u64) -> Result<()> {
        self.state().set(stream, seed, offset)
    }

    /// Seed and offset of the present state: [`GeneratorState::get`].
    ///
    /// # Errors
    /// As there.
    pub fn get(&self, stream: &D::Stream) -> Result<(u64, u64)> {
        self.state().get(stream)
    }

    /// Draws `n` numbers, uniform in [0, 1), into `dst`, and moves the offset on by ⌈n/4⌉. The numbers are multiples of 2⁻²⁴.
    ///
    /// # Errors
    /// The device's; [`Error::ForeignStream`].
    pub fn uniform(&self, stream: &D::Stream, dst: DevicePtr, n: u64) -> Result<()> {
        if n == 0 {
            return Ok(());
        }
        let state = self.state();
        state.on(stream, |device| {
            self.allocator.keep_in_capture(stream, &state.memory)?;
            let at = KernelArg::Ptr(state.memory.ptr()?);
            let blocks = n.div_ceil(4);
            device.launch(
                stream,
                &self.uniform,
                LaunchConfig::for_elements(blocks),
                &[KernelArg::Ptr(dst), KernelArg::U64(n), at],
            )?;
            let one = LaunchConfig {
                grid: [1; 3],
                block: [1; 3],
                shared_bytes: 0,
            };
            Ok(device.launch(stream, &self.advance, one, &[at, KernelArg::U64(blocks)])?)
        })
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
