//! What the suites of the CUDA device share.
#![allow(dead_code)] // each suite uses its part

use std::sync::{Mutex, MutexGuard, PoisonError};

use cudagraph_trees::device::cuda::{CudaDevice, CudaMemory, CudaOptions, CudaStream};
use cudagraph_trees::device::{Call, Code, Device, DeviceError, DevicePtr};

pub const MIB: u64 = 1 << 20;

/// The tests run one by one: what one does beside another's capture in the global mode would break it.
pub fn device() -> Option<(MutexGuard<'static, ()>, CudaDevice)> {
    let alone = one_by_one();
    Some((alone, cuda()?))
}

/// The first device with this memory, whatever was chosen, and alone as well.
pub fn with_memory(memory: CudaMemory) -> Option<(MutexGuard<'static, ()>, CudaDevice)> {
    let alone = one_by_one();
    Some((alone, open(memory)?))
}

fn one_by_one() -> MutexGuard<'static, ()> {
    static ONE_BY_ONE: Mutex<()> = Mutex::new(());
    ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The memory that `CUDAGRAPH_TREES_DEVICE` asks for: `cuda` or `cuda-plain`.
fn wanted() -> Option<CudaMemory> {
    match std::env::var("CUDAGRAPH_TREES_DEVICE").ok()?.as_str() {
        "cuda" => Some(CudaMemory::Virtual),
        "cuda-plain" => Some(CudaMemory::Plain),
        _ => None,
    }
}

/// The first device, with the memory that was chosen. Where there is none, that is said, and the test passes, unless one was chosen.
pub fn cuda() -> Option<CudaDevice> {
    open(wanted().unwrap_or_default())
}

fn open(memory: CudaMemory) -> Option<CudaDevice> {
    match CudaDevice::with_options(0, CudaOptions::default().memory(memory)) {
        Ok(device) => Some(device),
        Err(why) => {
            assert!(wanted().is_none(), "no CUDA device: {why}");
            println!("skipped: no CUDA device ({why})");
            None
        }
    }
}

/// Memory that is given back at the end.
pub struct Range<'a> {
    pub device: &'a CudaDevice,
    pub ptr: DevicePtr,
    pub bytes: u64,
}

impl<'a> Range<'a> {
    pub fn new(device: &'a CudaDevice, bytes: u64) -> Self {
        let bytes = bytes.next_multiple_of(device.granularity());
        let ptr = device.reserve(bytes).unwrap();
        device.map(ptr, bytes).unwrap();
        Range { device, ptr, bytes }
    }
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        self.device.unmap(self.ptr, self.bytes).unwrap();
        self.device.release(self.ptr, self.bytes).unwrap();
    }
}

pub fn read(device: &CudaDevice, stream: &CudaStream, ptr: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    device.read(stream, &mut read, ptr).unwrap();
    read
}

/// Bytes that tell places apart.
pub fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i.wrapping_mul(167) ^ (i >> 8) ^ seed.wrapping_mul(41)) as u8)
        .collect()
}

pub fn codes<T: std::fmt::Debug>(result: Result<T, DeviceError>) -> (Call, Code) {
    let error = result.unwrap_err();
    (error.call, error.code)
}
