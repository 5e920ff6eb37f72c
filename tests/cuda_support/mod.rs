//! What the suites of the CUDA device share.
#![allow(dead_code)] // each suite uses its part

use std::ffi::{c_int, c_uint};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudagraph_trees::device::cuda::{CudaDevice, CudaMemory, CudaOptions, CudaStream};
use cudagraph_trees::device::{Call, Code, Device, DeviceError, DevicePtr};
use cudarc::driver::sys;

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

/// This thread's current context; null for none.
pub fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is to a live local.
    assert_eq!(
        unsafe { sys::cuCtxGetCurrent(&raw mut context) },
        sys::CUresult::CUDA_SUCCESS
    );
    context
}

type Create = unsafe extern "C" fn(*mut sys::CUcontext, c_uint, c_int) -> c_int;
type Destroy = unsafe extern "C" fn(sys::CUcontext) -> c_int;

/// A context of its own on the first device, current on the thread that made it, and destroyed there.
pub struct OtherContext {
    library: libloading::Library,
    pub raw: sys::CUcontext,
}

impl OtherContext {
    /// On a machine with a driver and a device.
    pub fn new() -> Self {
        let names = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
        // SAFETY: the names are the driver's own, and it is loaded already.
        let library = names
            .iter()
            .find_map(|name| unsafe { libloading::Library::new(*name) }.ok());
        let library = library.unwrap();
        let mut raw = std::ptr::null_mut();
        // SAFETY: every driver has this function, of this signature, beside the later ones of the same name; the pointer is to a live local.
        let code = unsafe {
            let create = library.get::<Create>(b"cuCtxCreate_v2").unwrap();
            create(&raw mut raw, 0, 0)
        };
        assert_eq!(code, 0);
        OtherContext { library, raw }
    }
}

impl Drop for OtherContext {
    fn drop(&mut self) {
        // SAFETY: as above; the context is destroyed once, and nothing of it is in use.
        unsafe {
            let destroy = self.library.get::<Destroy>(b"cuCtxDestroy_v2").unwrap();
            destroy(self.raw);
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
