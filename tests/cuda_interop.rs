//! Our memory in cudarc's own calls, and in cuBLAS.
#![cfg(feature = "cuda-any")]

mod common;
mod cuda_support;

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use common::Rig;
use cuda_support::{device, pattern};
use cudagraph_trees::device::cuda::{
    CUBLAS_WORKSPACE, CudaDevice, TypedView, TypedViewMut, set_cublas_workspace,
};
use cudagraph_trees::device::{Code, Device};
use cudagraph_trees::{Error, FunctionSpec, Graph, Phase, Tensor};
use cudarc::driver::{
    CudaFunction, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, DriverError, LaunchConfig,
    PushKernelArg,
};
use cudarc::nvrtc::Ptx;

const SCALE: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry scale(.param .u64 dst, .param .u64 src, .param .f32 by) {
    .reg .u64 %d, %s, %o;
    .reg .u32 %t;
    .reg .f32 %f, %b;
    ld.param.u64 %d, [dst];
    ld.param.u64 %s, [src];
    ld.param.f32 %b, [by];
    mov.u32 %t, %tid.x;
    mul.wide.u32 %o, %t, 4;
    add.u64 %d, %d, %o;
    add.u64 %s, %s, %o;
    ld.global.f32 %f, [%s];
    mul.f32 %f, %f, %b;
    st.global.f32 [%d], %f;
    ret;
}
";

/// dst = src * by, launched by cudarc.
fn scale(
    stream: &CudaStream,
    function: &CudaFunction,
    dst: &mut TypedViewMut<'_, f32>,
    src: &TypedView<'_, f32>,
    by: f32,
) -> Result<(), DriverError> {
    let config = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (src.len() as u32, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut args = stream.launch_builder(function);
    args.arg(dst).arg(src).arg(&by);
    // SAFETY: two pointers and a float are what the kernel takes, and the block is no longer than the memory.
    unsafe { args.launch(config) }.map(|_| ())
}

/// What cudarc's calls ask of a slice, the views are: this test is its own compilation.
#[test]
fn views_are_slices() {
    fn read<T, S: DeviceSlice<T> + DevicePtr<T> + Send + Sync>() {}
    fn write<T, S: DeviceSlice<T> + DevicePtr<T> + DevicePtrMut<T> + Send + Sync>() {}
    read::<f32, TypedView<'_, f32>>();
    write::<f32, TypedViewMut<'_, f32>>();
    write::<[u16; 4], TypedViewMut<'_, [u16; 4]>>();
    fn fetch(stream: &Arc<CudaStream>, view: &TypedView<'_, f32>) -> Result<Vec<f32>, DriverError> {
        stream.clone_dtoh(view)
    }
    let _ = (fetch, scale);
}

fn ints(rig: &Rig<CudaDevice>, bytes: &[u8]) -> Tensor<CudaDevice> {
    let tensor = rig
        .allocator
        .alloc(&rig.stream, bytes.len() as u64)
        .unwrap();
    tensor.write(&rig.device, &rig.stream, bytes).unwrap();
    tensor
}

#[test]
fn cudarc_copies_to_from_and_between_tensors() {
    let Some((_alone, device)) = device() else {
        return;
    };
    // A second stream of cudarc's: event tracking is in force from here on.
    let other = device.context().new_stream().unwrap();
    let rig = Rig::new(device.clone());
    let stream = rig.stream.cudarc().clone();
    let bytes = pattern(1, 4000);
    let (a, b) = (ints(&rig, &bytes), ints(&rig, &pattern(2, 4000)));
    let words: Vec<u32> = bytemuck_words(&bytes);
    {
        let view = a.typed::<u32>(&rig.stream).unwrap();
        assert_eq!((view.len(), view.num_bytes()), (1000, 4000));
        assert_eq!(stream.clone_dtoh(&view).unwrap(), words);
        let mut to = b.typed_mut::<u32>(&rig.stream).unwrap();
        stream.memcpy_dtod(&view, &mut to).unwrap();
        assert_eq!(stream.clone_dtoh(&to).unwrap(), words);
    }
    assert_eq!(b.read(&rig.device, &rig.stream).unwrap(), bytes);
    // A slice of cudarc's, on its own stream: its events are waited for, ours is ordered by hand.
    let mut theirs = other.alloc_zeros::<u32>(1000).unwrap();
    rig.device.synchronize(&rig.stream).unwrap();
    other
        .memcpy_dtod(&a.typed::<u32>(&rig.stream).unwrap(), &mut theirs)
        .unwrap();
    assert_eq!(other.clone_dtoh(&theirs).unwrap(), words);
    let part = b.view(400, 400).unwrap();
    {
        let mut part = part.typed_mut::<u32>(&rig.stream).unwrap();
        stream.memset_zeros(&mut part).unwrap();
        stream.memcpy_htod(&[9, 8, 7], &mut part).unwrap();
        assert_eq!(stream.clone_dtoh(&part).unwrap()[..4], [9, 8, 7, 0]);
    }
    device.context().check_err().unwrap();
    drop((a, b, part, theirs, stream));
    rig.finish();
}

fn bytemuck_words(bytes: &[u8]) -> Vec<u32> {
    let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    bytes.chunks_exact(4).map(word).collect()
}

#[test]
fn cudarc_works_inside_a_capture_with_event_tracking_on() {
    let Some((_alone, device)) = device() else {
        return;
    };
    let _other = device.context().new_stream().unwrap();
    let rig = Rig::new(device.clone());
    let module = device.context().load_module(Ptx::from_src(SCALE)).unwrap();
    let function = module.load_function("scale").unwrap();
    let x = rig.floats(&[1.0; 32]);
    let stream = rig.stream.cudarc().clone();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    let (y, z) = (capture.alloc(128).unwrap(), capture.alloc(128).unwrap());
    {
        let x = x.typed::<f32>(&rig.stream).unwrap();
        let mut to = y.typed_mut::<f32>(&rig.stream).unwrap();
        scale(&stream, &function, &mut to, &x, 3.0).unwrap();
        let mut copy = z.typed_mut::<f32>(&rig.stream).unwrap();
        stream.memset_zeros(&mut copy).unwrap();
        let half = y.view(0, 64).unwrap();
        let half = half.typed::<f32>(&rig.stream).unwrap();
        stream.memcpy_dtod(&half, &mut copy).unwrap();
    }
    capture.end().unwrap();
    let info = graph.info().unwrap();
    assert_eq!((info.kernels, info.fills, info.copies), (1, 1, 1));
    for value in [1.0, 2.0] {
        rig.put(&x, &[value; 32]);
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [3.0 * value; 32]);
        let z = rig.read(&z);
        assert_eq!(
            (&z[..16], &z[16..]),
            (&[3.0 * value; 16][..], &[0.0; 16][..])
        );
    }
    device.context().check_err().unwrap();
    drop((graph, x, y, z, stream));
    rig.finish();
}

#[test]
fn what_no_view_can_be() {
    let Some((_alone, device)) = device() else {
        return;
    };
    let rig = Rig::new(device);
    let x = rig.floats(&[1.0; 5]);
    let refused = |error: Error| match error {
        Error::Device(error) => error.code,
        other => panic!("{other}"),
    };
    assert_eq!(
        refused(x.typed::<f64>(&rig.stream).unwrap_err()),
        Code::InvalidValue
    );
    let odd = x.view(2, 8).unwrap();
    assert_eq!(
        refused(odd.typed::<f32>(&rig.stream).unwrap_err()),
        Code::InvalidValue
    );
    assert_eq!(odd.typed::<u16>(&rig.stream).unwrap().len(), 4);
    assert!(
        Tensor::empty()
            .typed::<f32>(&rig.stream)
            .unwrap()
            .is_empty()
    );
    // A stale handle.
    let f = rig.scale_add("f", 2.0, 0.0);
    let step = rig.trees.step();
    let y = rig.one(&f, &step, &x);
    assert_eq!(y.typed::<f32>(&rig.stream).unwrap().len(), 5);
    drop(step);
    let step = rig.trees.step();
    drop(rig.one(&f, &step, &x));
    assert!(matches!(y.typed::<f32>(&rig.stream), Err(Error::Stale(_))));
    drop((x, y, odd, f, step));
    rig.finish();
}

/// A stream whose cudarc handle outlives it stays good, and one without goes.
#[test]
fn a_stream_lives_as_long_as_cudarcs_handle() {
    let Some((_alone, device)) = device() else {
        return;
    };
    let stream = device.create_stream().unwrap();
    let theirs = stream.cudarc().clone();
    assert_eq!(theirs.cu_stream(), stream.raw());
    drop(stream);
    theirs.synchronize().unwrap();
    let slice = theirs.clone_htod(&[1u8, 2, 3]).unwrap();
    assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [1, 2, 3]);
    let wrapped = device.stream_from_cudarc(theirs.clone()).unwrap();
    assert!(Arc::ptr_eq(wrapped.cudarc(), &theirs));
    assert!(device.default_stream().cudarc().cu_stream().is_null());
}

// ---- cuBLAS -------------------------------------------------------------------------------------

/// A file of cuBLAS, for the test below; where it is not named, `libcublas.so` of the loader's path is taken.
const CUBLAS_VARIABLE: &str = "CUDAGRAPH_TREES_CUBLAS";

type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
type SetStream = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
#[rustfmt::skip]
type Sgemm = unsafe extern "C" fn(
    *mut c_void, c_int, c_int, c_int, c_int, c_int,
    *const f32, u64, c_int, u64, c_int, *const f32, u64, c_int,
) -> c_int;

/// A handle of the cuBLAS that is there.
struct Cublas {
    library: libloading::Library,
    handle: *mut c_void,
}

impl Cublas {
    fn open(stream: *mut c_void) -> Option<Self> {
        let named = std::env::var_os(CUBLAS_VARIABLE);
        let mut names: Vec<_> = named.iter().cloned().collect();
        if named.is_none() {
            names.extend(
                ["libcublas.so.13", "libcublas.so.12", "libcublas.so"]
                    .map(std::ffi::OsString::from),
            );
        }
        // SAFETY: the names are cuBLAS's own.
        let library = names
            .iter()
            .find_map(|name| unsafe { libloading::Library::new(name) }.ok());
        let Some(library) = library else {
            assert!(named.is_none(), "{CUBLAS_VARIABLE} names no cuBLAS");
            println!("skipped: no cuBLAS; name its file in {CUBLAS_VARIABLE}");
            return None;
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the functions have these signatures; a context is current, and the stream is one of it.
        unsafe {
            let create = library.get::<Create>(b"cublasCreate_v2").unwrap();
            assert_eq!(create(&raw mut handle), 0);
            let set_stream = library.get::<SetStream>(b"cublasSetStream_v2").unwrap();
            assert_eq!(set_stream(handle, stream), 0);
        }
        Some(Cublas { library, handle })
    }

    /// c = a * b, of n x n elements.
    fn multiply(&self, n: c_int, [a, b, c]: [u64; 3]) {
        // SAFETY: the function has this signature, the matrices this size; the scalars are read at the call.
        unsafe {
            let sgemm = self.library.get::<Sgemm>(b"cublasSgemm_v2").unwrap();
            let status = sgemm(self.handle, 0, 0, n, n, n, &1.0, a, n, b, n, &0.0, c, n);
            assert_eq!(status, 0);
        }
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // SAFETY: the function has this signature, and the handle is destroyed once.
        unsafe {
            let destroy = self.library.get::<Destroy>(b"cublasDestroy_v2").unwrap();
            destroy(self.handle);
        }
    }
}

/// POOL-08, T11-02: a hundred captures of a product put no memory node into a graph, and take no memory.
#[test]
fn pool_08_t11_02_cublas_works_in_our_memory() {
    let Some((_alone, device)) = device() else {
        return;
    };
    device.context().bind_to_thread().unwrap();
    let rig = Rig::new(device.clone());
    let Some(cublas) = Cublas::open(rig.stream.raw().cast()) else {
        rig.finish();
        return;
    };
    let workspace = rig.allocator.alloc(&rig.stream, CUBLAS_WORKSPACE).unwrap();
    // SAFETY: the handle is cuBLAS's; it goes before the workspace, as the graphs do.
    unsafe { set_cublas_workspace(cublas.handle, &workspace) }.unwrap();
    const N: usize = 512;
    let a = rig.floats(&vec![1.0; N * N]);
    let b = rig.floats(&vec![2.0; N * N]);
    let address = |tensor: &Tensor<_>| tensor.ptr().unwrap().0;
    let eager = rig.floats(&vec![0.0; N * N]);
    cublas.multiply(N as c_int, [address(&a), address(&b), address(&eager)]);
    assert_eq!(rig.read(&eager)[..4], [1024.0; 4]);
    drop(eager);
    let mut free = None;
    for round in 0..100 {
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&rig.stream).unwrap();
        let c = capture.alloc((4 * N * N) as u64).unwrap();
        cublas.multiply(N as c_int, [address(&a), address(&b), address(&c)]);
        capture.end().unwrap();
        assert_eq!(graph.info().unwrap().memory, 0);
        graph.replay(&rig.stream).unwrap();
        if round % 25 == 0 {
            assert!(rig.read(&c).iter().all(|v| *v == 1024.0));
        }
        drop((graph, c));
        rig.allocator.trim().unwrap();
        let now = device.memory_info().unwrap().free;
        let before = *free.get_or_insert(now);
        assert!(
            now + (5 << 20) > before,
            "round {round}: {before} B, then {now} B"
        );
    }
    drop(cublas);
    drop((workspace, a, b));
    rig.finish();
}

/// T4-11: handles of cuBLAS are made and destroyed on another thread in the midst of recordings. What that does to a capture is for the driver to say; where it
/// breaks one, the call is answered eagerly, and so every result is right.
#[test]
fn t4_11_cublas_handles_come_and_go_beside_recordings() {
    let Some((_alone, device)) = device() else {
        return;
    };
    device.context().bind_to_thread().unwrap();
    let rig = Rig::new(device.clone());
    if Cublas::open(rig.stream.raw().cast()).is_none() {
        rig.finish();
        return;
    }
    let beside = device.create_stream().unwrap();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 2.0, 0.0)?;
        if rec.phase() == Phase::Record {
            let come_and_go = || {
                device.context().bind_to_thread().unwrap();
                drop(Cublas::open(beside.raw().cast()));
            };
            std::thread::scope(|scope| scope.spawn(come_and_go).join().unwrap());
        }
        Ok(vec![k.apply(rec, &y, 1.0, 1.0)?])
    });
    let x = rig.floats(&[0.0; 4]);
    for round in 0..20 {
        rig.put(&x, &[round as f32; 4]);
        let step = rig.trees.step();
        let y = rig.one(&f, &step, &x);
        assert_eq!(rig.read(&y), [2.0 * round as f32 + 1.0; 4]);
    }
    let counts = rig.trees.counts();
    println!(
        "{} recordings, {} captures broken",
        counts.recordings, counts.failed_captures
    );
    assert!(counts.recordings == 1 || counts.failed_captures > 0);
    drop((x, f));
    rig.finish();
}
