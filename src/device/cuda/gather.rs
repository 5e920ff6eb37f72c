//! The gather: one kernel of ours that copies all moving inputs, its sources in its parameters.
//!
//! The parameters of a launch are at most 4 KiB, which is room for [`MOST`] slots; more take several launches, which a graph
//! holds as several nodes and this device treats as one. There are four sizes of the kernel, because a launch costs
//! by the size of its parameters.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::SUCCESS;
use super::inner::Inner;
use super::module::{Function, Origin};
use super::stream::Handle;
use crate::device::{Call, Code, DeviceError, DevicePtr, GatherSlot, Result};
use crate::sync::lock;

/// The kernels, by how many slots they have room for.
const SIZES: [usize; 4] = [4, 16, 64, MOST];
/// The slots of one launch, at most.
const MOST: usize = 144;
/// What one block copies.
const CHUNK: u64 = 32 << 10;
/// Threads of a block.
const THREADS: u32 = 256;

const SOURCE: &str = include_str!("gather.cu");

/// The gather kernels, loaded.
pub(super) struct GatherKernels([Arc<Function>; 4]);

impl GatherKernels {
    /// How many slots the kernel with this handle has room for, if it is one of these.
    pub(super) fn room(&self, function: sys::CUfunction) -> Option<usize> {
        let index = self.0.iter().position(|ours| ours.raw.0 == function)?;
        Some(SIZES[index])
    }
}

/// What a kernel node is, by its kernel.
pub(super) enum KernelNode {
    /// A launch of a gather kernel: its slots, and the node's parameters, whose own are not kept.
    Gather(Slots, sys::CUDA_KERNEL_NODE_PARAMS),
    /// What reads the predicate of an if.
    If,
    Other,
}

/// The parameters of one launch, laid out as `Slots` in `gather.cu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    room: usize,
    words: Box<[u64]>,
}

impl Slots {
    /// How many 8-byte words the parameters of a kernel with this much room have.
    const fn len(room: usize) -> usize {
        1 + room / 2 + 3 * room
    }

    /// The smallest that has room. `first` is the number of the first slot among the graph's. `None` where the chunks have no number.
    fn new(first: usize, slots: &[GatherSlot], sources: &[DevicePtr]) -> Option<Self> {
        let room = SIZES.into_iter().find(|room| *room >= slots.len())?;
        let mut words = vec![0_u64; Self::len(room)].into_boxed_slice();
        let halves: &mut [u32] = bytemuck::cast_slice_mut(&mut words);
        halves[0] = u32::try_from(slots.len()).ok()?;
        halves[1] = u32::try_from(first).ok()?;
        let mut chunk = 0_u32;
        for (index, slot) in slots.iter().enumerate() {
            halves[2 + index] = chunk;
            let more = u32::try_from(slot.bytes.div_ceil(CHUNK)).ok()?;
            chunk = chunk.checked_add(more)?;
        }
        // A grid has one dimension less than 2^31 blocks long.
        i32::try_from(chunk).ok()?;
        let mut all = Slots { room, words };
        for (index, (slot, source)) in slots.iter().zip(sources).enumerate() {
            let base = all.base();
            all.words[base + index] = slot.dst.0;
            all.words[base + 2 * room + index] = slot.bytes;
            all.set_source(index, *source);
        }
        Some(all)
    }

    /// Reads the parameters of a launch back.
    ///
    /// # Safety
    /// `params` are those of a launch of the kernel with this much room.
    pub(super) unsafe fn read(room: usize, params: *const c_void) -> Self {
        let mut words = vec![0_u64; Self::len(room)].into_boxed_slice();
        // SAFETY: the kernel's one parameter has exactly this many bytes, and the buffer has room for them.
        unsafe {
            ptr::copy_nonoverlapping(
                params.cast::<u8>(),
                words.as_mut_ptr().cast::<u8>(),
                8 * Self::len(room),
            );
        }
        Slots { room, words }
    }

    fn base(&self) -> usize {
        1 + self.room / 2
    }

    fn halves(&self) -> &[u32] {
        bytemuck::cast_slice(&self.words)
    }

    pub(super) fn count(&self) -> usize {
        self.halves()[0] as usize
    }

    pub(super) fn first(&self) -> usize {
        self.halves()[1] as usize
    }

    /// The sources, in the order of the slots.
    pub(super) fn sources(&self) -> impl Iterator<Item = DevicePtr> {
        let first = self.base() + self.room;
        self.words[first..first + self.count()]
            .iter()
            .map(|word| DevicePtr(*word))
    }

    pub(super) fn set_source(&mut self, index: usize, source: DevicePtr) {
        let at = self.base() + self.room + index;
        self.words[at] = source.0;
    }

    /// How many blocks a launch has.
    fn blocks(&self) -> u32 {
        let last = self.count() - 1;
        let bytes = self.words[self.base() + 2 * self.room + last];
        // `new` saw to it that the sum has a number.
        (self.halves()[2 + last] + bytes.div_ceil(CHUNK) as u32).max(1)
    }

    /// Where the parameters lie, for the driver.
    pub(super) fn as_param(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }
}

impl Inner {
    /// The gather kernels; compiled and loaded at the first call.
    pub(super) fn gather_kernels(&self) -> Result<&GatherKernels> {
        if let Some(kernels) = self.gather.get() {
            return Ok(kernels);
        }
        let origin = Origin::Source(SOURCE.into());
        let mut loaded = Vec::with_capacity(SIZES.len());
        for room in SIZES {
            let function = self.load_from(&origin, &format!("cudagraph_trees_gather_{room}"))?;
            if function.params[..] != [8 * Slots::len(room) as u32] {
                let detail = format!("{} takes {:?} B", function.name, function.params);
                return Err(DeviceError::new(Call::Gather, Code::NotSupported, detail));
            }
            loaded.push(function);
        }
        let Ok(kernels) = loaded.try_into() else {
            unreachable!("one for each size");
        };
        Ok(self.gather.get_or_init(|| GatherKernels(kernels)))
    }

    /// Loads the gather kernels while it is quiet. A device that cannot compile them works without, until it is asked to gather.
    pub(super) fn prepare_gather(&self) {
        if let Err(error) = self.gather_kernels() {
            tracing::debug!(%error, "the gather kernel cannot be had");
        }
    }

    /// Launches a gather, as many times as its slots need.
    pub(super) fn launch_gather(
        &self,
        stream: &Handle,
        slots: &[GatherSlot],
        sources: &[DevicePtr],
    ) -> Result<()> {
        let call = Call::Gather;
        let kernels = self.gather_kernels()?;
        let mut launches = Vec::with_capacity(slots.len().div_ceil(MOST));
        for (part, (slots, sources)) in slots.chunks(MOST).zip(sources.chunks(MOST)).enumerate() {
            launches.push(Slots::new(part * MOST, slots, sources).ok_or_else(|| {
                let bytes: u128 = slots.iter().map(|slot| u128::from(slot.bytes)).sum();
                let detail = format!(
                    "{} slots of {bytes} B in all; that is too much",
                    slots.len()
                );
                DeviceError::new(call, Code::InvalidValue, detail)
            })?);
        }
        self.claim_gather(call, stream)?;
        for mut slots in launches {
            let index = SIZES.iter().position(|room| *room == slots.room);
            let function = &kernels.0[index.unwrap_or_default()];
            let blocks = slots.blocks();
            let mut params = [slots.as_param()];
            // SAFETY: the kernel takes one parameter, of exactly the size of the words of its room; the driver copies it at the
            // call. The handle keeps the stream alive.
            let code = unsafe {
                (self.driver.cuLaunchKernel)(
                    function.raw.0,
                    blocks,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    stream.raw.0,
                    params.as_mut_ptr(),
                    ptr::null_mut(),
                )
            };
            self.check(call, code, || {
                format!(
                    "a gather of {} slots on stream {}",
                    slots.count(),
                    stream.id
                )
            })?;
        }
        Ok(())
    }

    /// Notes that the capture which the stream takes part in, if any, has its gather. It may have one.
    fn claim_gather(&self, call: Call, stream: &Handle) -> Result<()> {
        let Some(capture) = self.capture_id(stream) else {
            return Ok(());
        };
        if self.is_in_body(stream) {
            let detail = "a gather is asked for in the body of an if, where no launch could bring its sources; gather before the if";
            return Err(DeviceError::new(call, Code::NotSupported, detail));
        }
        let mut gathered = lock(&self.gathered);
        if gathered.contains(&capture) {
            let detail = "a graph holds at most one gather, and this one has it";
            return Err(DeviceError::new(call, Code::NotSupported, detail));
        }
        gathered.push(capture);
        Ok(())
    }

    /// What a graph's kernel node is to this device.
    pub(super) fn kernel_of(&self, node: sys::CUgraphNode) -> Result<KernelNode> {
        if self.gather.get().is_none() && self.if_kernel.get().is_none() {
            return Ok(KernelNode::Other);
        }
        let mut params = std::mem::MaybeUninit::<sys::CUDA_KERNEL_NODE_PARAMS>::zeroed();
        // SAFETY: the node is a kernel's and lives; the pointer is to a struct of the driver's layout.
        let code =
            unsafe { (self.driver.cuGraphKernelNodeGetParams_v2)(node, params.as_mut_ptr()) };
        // A kernel of another kind than modules have cannot be read so; it is not ours.
        if code != SUCCESS {
            return Ok(KernelNode::Other);
        }
        // SAFETY: zero is a value of each of its fields, and the driver wrote the others.
        let mut params = unsafe { params.assume_init() };
        if self
            .if_kernel
            .get()
            .is_some_and(|ours| ours.raw.0 == params.func)
        {
            return Ok(KernelNode::If);
        }
        let Some(room) = self.gather.get().and_then(|ours| ours.room(params.func)) else {
            return Ok(KernelNode::Other);
        };
        if params.kernelParams.is_null() {
            let detail = "the driver does not give back the parameters of the gather node";
            return Err(DeviceError::new(
                Call::EndCapture,
                Code::NotSupported,
                detail,
            ));
        }
        // SAFETY: the driver gives an array of pointers, one for each parameter of the kernel, of which this one has one; it is good
        // as long as the node is.
        let slots = unsafe { Slots::read(room, *params.kernelParams) };
        params.kernelParams = ptr::null_mut();
        Ok(KernelNode::Gather(slots, params))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(dst: u64, bytes: u64) -> GatherSlot {
        GatherSlot {
            dst: DevicePtr(dst),
            bytes,
        }
    }

    #[test]
    fn slots_are_laid_out_as_the_kernel_reads_them() {
        let slots = [slot(0x100, 5), slot(0x200, 0), slot(0x300, CHUNK + 1)];
        let sources = [1, 2, 3].map(DevicePtr);
        let mut laid = Slots::new(144, &slots, &sources).unwrap();
        assert_eq!((laid.room, laid.count(), laid.first()), (4, 3, 144));
        assert_eq!(laid.halves()[..6], [3, 144, 0, 1, 1, 0]);
        assert_eq!(laid.words[3..7], [0x100, 0x200, 0x300, 0]);
        assert_eq!(laid.words[7..11], [1, 2, 3, 0]);
        assert_eq!(laid.words[11..], [5, 0, CHUNK + 1, 0]);
        assert_eq!(laid.blocks(), 3);
        laid.set_source(1, DevicePtr(9));
        assert!(laid.sources().eq([1, 9, 3].map(DevicePtr)));
        // SAFETY: the words are those of this room.
        let again = unsafe { Slots::read(4, laid.as_param()) };
        assert_eq!(again, laid);
    }

    #[test]
    fn the_smallest_kernel_with_room_is_taken() {
        for (count, room) in [(1, 4), (4, 4), (5, 16), (64, 64), (65, 144), (144, 144)] {
            let slots = vec![slot(0, 1); count];
            let laid = Slots::new(0, &slots, &vec![DevicePtr(0); count]).unwrap();
            assert_eq!((laid.room, laid.blocks()), (room, count as u32));
            assert!(8 * Slots::len(room) <= 4096);
        }
        let most = [slot(0, CHUNK << 31)];
        assert_eq!(Slots::new(0, &most, &[DevicePtr(0)]), None);
        let empty = Slots::new(0, &[slot(0, 0)], &[DevicePtr(0)]).unwrap();
        assert_eq!(empty.blocks(), 1);
    }
}
