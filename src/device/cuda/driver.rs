//! The driver's functions that this device calls, looked up by name in the library that is there.
//!
//! Types are cudarc's; the functions are not called through cudarc, for three reasons. cudarc's wrappers return the
//! driver's code as a Rust enum, and a newer driver's code that the enum lacks would be undefined behaviour: here a
//! code is a number. They panic where the library or one symbol is missing: here that is a value. And which of them exist
//! depends on the version feature, which another crate may have chosen: here a name is a name. Where this crate
//! chose the version (feature `cuda`), the compiler compares each declaration with cudarc's.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

use super::unavailable::CudaUnavailable;

/// The code of a call that went well.
pub(super) const SUCCESS: u32 = 0;

/// The oldest driver that has every function below, as the driver numbers it: CUDA 12.4.
pub(super) const OLDEST: i32 = 12_040;

/// The driver's library, in the order in which the names are tried. cudarc tries them too.
const NAMES: &[&str] = if cfg!(windows) {
    &["nvcuda.dll"]
} else {
    &["libcuda.so.1", "libcuda.so"]
};

macro_rules! functions {
    ($(fn $name:ident $([compared with $bound:ident])? ($($arg:ident: $type:ty),* $(,)?);)*) => {
        /// The driver's functions. A result is the driver's code as a number.
        #[allow(non_snake_case)] // the driver's names
        pub(super) struct Driver {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Driver {
            /// Looks each function up; the error names the first that is missing.
            ///
            /// # Safety
            /// The library is the CUDA driver, and is never unloaded.
            unsafe fn look_up(library: &Library) -> Result<Self, &'static str> {
                Ok(Driver {
                    $($name: {
                        // SAFETY: the driver's function of this name has this signature: names carry the version
                        // of their signature, and the declarations are compared with cudarc's below.
                        *unsafe { library.get(stringify!($name).as_bytes()) }.map_err(|_| stringify!($name))?
                    },)*
                })
            }
        }

        #[cfg(feature = "cuda")]
        const _: () = {
            $(let _: unsafe fn($($type),*) -> sys::CUresult = functions!(@bound $name $($bound)?);)*
        };
    };
    (@bound $name:ident) => { sys::$name };
    (@bound $name:ident $bound:ident) => { sys::$bound };
}

functions! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: sys::CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
    fn cuGetErrorString(error: sys::CUresult, text: *mut *const c_char);

    fn cuCtxGetCurrent(context: *mut sys::CUcontext);
    fn cuCtxSetCurrent(context: sys::CUcontext);
    fn cuCtxSynchronize();
    fn cuThreadExchangeStreamCaptureMode(mode: *mut sys::CUstreamCaptureMode);

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(ptr: *mut sys::CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(ptr: sys::CUdeviceptr);
    fn cuMemHostAlloc(ptr: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(ptr: *mut c_void);
    fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        prop: *const sys::CUmemAllocationProp,
        option: sys::CUmemAllocationGranularity_flags,
    );
    fn cuMemAddressReserve(ptr: *mut sys::CUdeviceptr, bytes: usize, alignment: usize, at: sys::CUdeviceptr, flags: c_ulonglong);
    fn cuMemAddressFree(ptr: sys::CUdeviceptr, bytes: usize);
    fn cuMemCreate(
        handle: *mut sys::CUmemGenericAllocationHandle,
        bytes: usize,
        prop: *const sys::CUmemAllocationProp,
        flags: c_ulonglong,
    );
    fn cuMemRelease(handle: sys::CUmemGenericAllocationHandle);
    fn cuMemMap(
        ptr: sys::CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: sys::CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    );
    fn cuMemUnmap(ptr: sys::CUdeviceptr, bytes: usize);
    fn cuMemSetAccess(ptr: sys::CUdeviceptr, bytes: usize, access: *const sys::CUmemAccessDesc, count: usize);

    fn cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
    fn cuStreamDestroy_v2(stream: sys::CUstream);
    fn cuStreamGetCtx(stream: sys::CUstream, context: *mut sys::CUcontext);
    fn cuStreamSynchronize(stream: sys::CUstream);
    fn cuStreamQuery(stream: sys::CUstream);
    fn cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    fn cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: sys::CUevent);
    fn cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    fn cuEventRecordWithFlags(event: sys::CUevent, stream: sys::CUstream, flags: c_uint);
    fn cuEventQuery(event: sys::CUevent);
    fn cuEventSynchronize(event: sys::CUevent);
    // The first of its name, which every driver has. The bindings of CUDA 13 know its successor (12.8) only, of the same signature.
    fn cuEventElapsedTime [compared with cuEventElapsedTime_v2] (milliseconds: *mut f32, start: sys::CUevent, end: sys::CUevent);

    fn cuModuleLoadDataEx(
        module: *mut sys::CUmodule,
        image: *const c_void,
        count: c_uint,
        options: *mut sys::CUjit_option,
        values: *mut *mut c_void,
    );
    fn cuModuleUnload(module: sys::CUmodule);
    fn cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    fn cuFuncGetParamInfo(function: sys::CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    fn cuLaunchKernel(
        function: sys::CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: sys::CUstream,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    fn cuMemcpyHtoDAsync_v2(dst: sys::CUdeviceptr, src: *const c_void, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyDtoDAsync_v2(dst: sys::CUdeviceptr, src: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    fn cuMemsetD8Async(dst: sys::CUdeviceptr, value: u8, bytes: usize, stream: sys::CUstream);
    fn cuMemsetD16Async(dst: sys::CUdeviceptr, value: u16, count: usize, stream: sys::CUstream);
    fn cuMemsetD32Async(dst: sys::CUdeviceptr, value: c_uint, count: usize, stream: sys::CUstream);
    fn cuMemsetD2D32Async(
        dst: sys::CUdeviceptr,
        pitch: usize,
        value: c_uint,
        width: usize,
        height: usize,
        stream: sys::CUstream,
    );

    fn cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
    fn cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
    fn cuStreamIsCapturing(stream: sys::CUstream, status: *mut sys::CUstreamCaptureStatus);
    fn cuStreamGetCaptureInfo_v3(
        stream: sys::CUstream,
        status: *mut sys::CUstreamCaptureStatus,
        id: *mut u64,
        graph: *mut sys::CUgraph,
        dependencies: *mut *const sys::CUgraphNode,
        edges: *mut *const sys::CUgraphEdgeData,
        count: *mut usize,
    );
    fn cuStreamUpdateCaptureDependencies_v2(
        stream: sys::CUstream,
        dependencies: *mut sys::CUgraphNode,
        edges: *const sys::CUgraphEdgeData,
        count: usize,
        flags: c_uint,
    );
    fn cuGraphConditionalHandleCreate(
        handle: *mut sys::CUgraphConditionalHandle,
        graph: sys::CUgraph,
        context: sys::CUcontext,
        default: c_uint,
        flags: c_uint,
    );
    fn cuGraphAddNode_v2(
        node: *mut sys::CUgraphNode,
        graph: sys::CUgraph,
        dependencies: *const sys::CUgraphNode,
        edges: *const sys::CUgraphEdgeData,
        count: usize,
        params: *mut sys::CUgraphNodeParams,
    );
    fn cuGraphDestroy(graph: sys::CUgraph);
    fn cuGraphDebugDotPrint(graph: sys::CUgraph, path: *const c_char, flags: c_uint);
    fn cuGraphGetNodes(graph: sys::CUgraph, nodes: *mut sys::CUgraphNode, count: *mut usize);
    fn cuGraphNodeGetType(node: sys::CUgraphNode, kind: *mut sys::CUgraphNodeType);
    fn cuGraphKernelNodeGetParams_v2(node: sys::CUgraphNode, params: *mut sys::CUDA_KERNEL_NODE_PARAMS);
    fn cuGraphInstantiateWithFlags(exec: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong);
    fn cuGraphExecDestroy(exec: sys::CUgraphExec);
    fn cuGraphExecKernelNodeSetParams_v2(
        exec: sys::CUgraphExec,
        node: sys::CUgraphNode,
        params: *const sys::CUDA_KERNEL_NODE_PARAMS,
    );
    fn cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream);
}

/// What the dynamic loader said.
pub(super) fn said(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

impl Driver {
    /// The driver of this machine, initialised. Found once; a machine without one is asked again each time.
    pub(super) fn get() -> Result<&'static Driver, CudaUnavailable> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let driver = Self::open()?;
        Ok(DRIVER.get_or_init(|| driver))
    }

    fn open() -> Result<Driver, CudaUnavailable> {
        let mut reasons = Vec::new();
        let library = NAMES.iter().find_map(|name| {
            // SAFETY: loading runs the library's initialisers, and the names are the CUDA driver's own.
            unsafe { Library::new(*name) }
                .map_err(|error| reasons.push(said(&error)))
                .ok()
        });
        let Some(library) = library else {
            return Err(CudaUnavailable::NoDriver {
                reason: reasons.join("; "),
            });
        };
        // The functions are used until the process ends.
        let library: &'static Library = Box::leak(Box::new(library));
        let version = Self::version_of(library);
        // SAFETY: as for the names above; the library was leaked.
        match unsafe { Self::look_up(library) } {
            Ok(driver) if version >= OLDEST => driver.init().map(|()| driver),
            Ok(_) => Err(CudaUnavailable::OldDriver {
                version,
                missing: None,
            }),
            Err(missing) => Err(CudaUnavailable::OldDriver {
                version,
                missing: Some(missing),
            }),
        }
    }

    /// The driver's version, from the one function that the oldest has too; 0 where even that is missing.
    fn version_of(library: &Library) -> i32 {
        let mut version = 0;
        // SAFETY: this function has had this signature since the first driver, and needs no initialisation.
        unsafe {
            if let Ok(get) =
                library.get::<unsafe extern "C" fn(*mut c_int) -> u32>(b"cuDriverGetVersion")
            {
                get(&raw mut version);
            }
        }
        version
    }

    fn init(&self) -> Result<(), CudaUnavailable> {
        // SAFETY: takes no pointer, may be called any number of times and from any thread.
        match unsafe { (self.cuInit)(0) } {
            SUCCESS => Ok(()),
            100 => Err(CudaUnavailable::NoDevice {
                ordinal: 0,
                devices: 0,
            }),
            code => Err(CudaUnavailable::failed(self, "cuInit", code)),
        }
    }

    /// The driver's version as it numbers it: 1000 * major + 10 * minor.
    pub(super) fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: the pointer is to a live local.
        unsafe { (self.cuDriverGetVersion)(&raw mut version) };
        version
    }

    /// How many devices the driver shows.
    pub(super) fn device_count(&self) -> Result<u32, CudaUnavailable> {
        let mut count = 0;
        // SAFETY: the pointer is to a live local.
        match unsafe { (self.cuDeviceGetCount)(&raw mut count) } {
            SUCCESS => Ok(u32::try_from(count).unwrap_or(0)),
            code => Err(CudaUnavailable::failed(self, "cuDeviceGetCount", code)),
        }
    }
}
