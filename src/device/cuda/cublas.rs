//! cuBLAS inside captures: its workspace comes from our memory.

use std::ffi::{c_int, c_void};

use libloading::Library;

use super::CudaDevice;
use crate::device::{Call, Code, DeviceError};
use crate::error::Result;
use crate::storage::Tensor;

/// The size that NVIDIA recommends for a workspace on Hopper and later, in bytes.
pub const CUBLAS_WORKSPACE: u64 = 32 << 20;

type SetWorkspace = unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int;

/// Lets a cuBLAS handle work in `workspace`.
///
/// With the workspace of its own, cuBLAS allocates from the driver's pool, and a capture gets memory nodes, which the runtime refuses
/// ([`Error::MemoryNodes`](crate::Error::MemoryNodes)). So give each handle a tensor from the [`Allocator`](crate::Allocator), of
/// [`CUBLAS_WORKSPACE`] bytes say, before capturing. `cublasSetStream` takes it away again: set the stream first. One handle works on one
/// stream at a time; two that run at once need two workspaces.
///
/// The function is looked up in the cuBLAS that the process has loaded; none is loaded for it.
///
/// # Errors
/// [`Code::NotFound`] where no cuBLAS is loaded; cuBLAS's status as [`Code::Other`]; [`Error::Stale`](crate::Error::Stale).
///
/// # Safety
/// `handle` is a `cublasHandle_t` of the loaded cuBLAS, of the tensor's context, and no other thread uses it meanwhile. The tensor is held, by
/// this handle or a clone, until the workspace is set anew, or the handle is destroyed and its work has run, **and** as long as a graph
/// that was captured with it is launched. It is no output of a tree, which would be overwritten.
pub unsafe fn set_cublas_workspace(
    handle: *mut c_void,
    workspace: &Tensor<CudaDevice>,
) -> Result<()> {
    let call = Call::Driver("cublasSetWorkspace");
    let ptr = workspace.ptr()?;
    let Some(set) = find() else {
        let detail = "no cuBLAS is loaded in this process: there can be no handle of it";
        return Err(DeviceError::new(call, Code::NotFound, detail).into());
    };
    let bytes = usize::try_from(workspace.bytes()).unwrap_or(usize::MAX);
    // SAFETY: the caller's promise; the address names device memory of this many bytes, and host memory is not meant by it.
    let status = unsafe {
        set(
            handle,
            std::ptr::with_exposed_provenance_mut(ptr.0 as usize),
            bytes,
        )
    };
    if status != 0 {
        let detail = format!("{bytes} B at {ptr:?}: cuBLAS says {status}");
        let code = Code::Other(status.cast_unsigned());
        return Err(DeviceError::new(call, code, detail).into());
    }
    Ok(())
}

/// The function of the loaded library, by the names that its versions have.
fn find() -> Option<SetWorkspace> {
    let libraries = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];
    libraries.into_iter().find_map(|name| {
        let library = loaded(name)?;
        // SAFETY: the function of this name has had this signature since it was there; statuses are a C enum.
        let set = unsafe { library.get::<SetWorkspace>(b"cublasSetWorkspace_v2") };
        let set = set.ok().map(|set| *set);
        // It is loaded, and has a handle in use, whatever becomes of this name for it.
        std::mem::forget(library);
        set
    })
}

#[cfg(unix)]
fn loaded(name: &str) -> Option<Library> {
    use libloading::os::unix::{Library as Unix, RTLD_LAZY};
    /// Only what is loaded already: no initialiser runs.
    const RTLD_NOLOAD: i32 = 4;
    // SAFETY: nothing is loaded.
    unsafe { Unix::open(Some(name), RTLD_LAZY | RTLD_NOLOAD) }
        .map(Library::from)
        .ok()
}

#[cfg(not(unix))]
fn loaded(_: &str) -> Option<Library> {
    None
}
