//! The CUDA device: memory under graphs, streams, kernels, the gather, contexts. Without a device each test says so and passes, unless the
//! variable `CUDAGRAPH_TREES_DEVICE` is `cuda`.
#![cfg(feature = "cuda-any")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use cudagraph_trees::device::cuda::{CudaDevice, CudaStream, CudaUnavailable, probe};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, DevicePtr, GatherSlot, Kernel,
    KernelArg, LaunchConfig,
};
use cudarc::driver::{CudaContext, sys};

const MIB: u64 = 1 << 20;

/// The tests run one by one: what one does beside another's capture in the global mode would break it.
fn device() -> Option<(MutexGuard<'static, ()>, CudaDevice)> {
    static ONE_BY_ONE: Mutex<()> = Mutex::new(());
    let alone = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
    match CudaDevice::new(0) {
        Ok(device) => Some((alone, device)),
        Err(why) => {
            let wanted = std::env::var("CUDAGRAPH_TREES_DEVICE").is_ok_and(|kind| kind == "cuda");
            assert!(!wanted, "no CUDA device: {why}");
            println!("skipped: no CUDA device ({why})");
            None
        }
    }
}

/// Memory that is given back at the end.
struct Range<'a> {
    device: &'a CudaDevice,
    ptr: DevicePtr,
    bytes: u64,
}

impl<'a> Range<'a> {
    fn new(device: &'a CudaDevice, bytes: u64) -> Self {
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

fn read(device: &CudaDevice, stream: &CudaStream, ptr: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    device.read(stream, &mut read, ptr).unwrap();
    read
}

/// Bytes that tell places apart.
fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i.wrapping_mul(167) ^ (i >> 8) ^ seed.wrapping_mul(41)) as u8)
        .collect()
}

fn codes<T: std::fmt::Debug>(result: Result<T, DeviceError>) -> (Call, Code) {
    let error = result.unwrap_err();
    (error.call, error.code)
}

#[test]
fn a_machine_says_what_cuda_it_has() {
    match (probe(), CudaDevice::new(u32::MAX).map(drop)) {
        (Ok(there), Err(CudaUnavailable::NoDevice { devices, .. })) => {
            assert_eq!(there.devices, devices);
        }
        (Err(why), Err(too)) => {
            println!("no CUDA: {why}");
            assert_eq!(
                std::mem::discriminant(&why),
                std::mem::discriminant(&too),
                "{too}"
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_is_booked_and_given_back() {
    let Some((_alone, d)) = device() else { return };
    let page = d.granularity();
    let before = d.counts();
    let ptr = d.reserve(4 * page).unwrap();
    assert_eq!(ptr.0 % page, 0);
    for wrong in [
        d.map(ptr, 0),
        d.map(ptr, page - 1),
        d.map(ptr.offset(1), page),
        d.map(ptr.offset(3 * page), 2 * page),
        d.release(ptr, page),
        d.unmap(ptr, page),
    ] {
        assert_eq!(wrong.unwrap_err().code, Code::InvalidValue);
    }
    d.map(ptr.offset(page), 2 * page).unwrap();
    assert_eq!(codes(d.map(ptr, 2 * page)), (Call::Map, Code::InvalidValue));
    assert_eq!(
        codes(d.unmap(ptr.offset(page), page)),
        (Call::Unmap, Code::InvalidValue)
    );
    assert_eq!(
        codes(d.release(ptr, 4 * page)),
        (Call::Release, Code::InvalidValue)
    );
    assert_eq!(d.counts().mapped_bytes, before.mapped_bytes + 2 * page);
    d.unmap(ptr.offset(page), 2 * page).unwrap();
    d.release(ptr, 4 * page).unwrap();
    assert_eq!(d.counts(), before);

    // More than there is: nothing is left behind.
    let memory = d.memory_info().unwrap();
    let much = (memory.total + page).next_multiple_of(page);
    let ptr = d.reserve(much).unwrap();
    let refused = d.map(ptr, much).unwrap_err();
    assert_eq!(
        (refused.call, refused.code),
        (Call::Map, Code::OutOfMemory),
        "{refused}"
    );
    assert!(refused.detail.contains("are free"), "{refused}");
    d.release(ptr, much).unwrap();
    assert_eq!(d.counts(), before);
}

#[test]
fn memory_comes_and_goes_under_a_graph() {
    let Some((_alone, d)) = device() else { return };
    let page = d.granularity();
    let set = KernelSet::load(&d).unwrap();
    let stream = d.create_stream().unwrap();
    let ptr = d.reserve(page).unwrap();
    // Captured and made executable while nothing is mapped there.
    d.begin_capture(&stream, CaptureMode::ThreadLocal).unwrap();
    set.increment(&d, &stream, ptr, 4, 1.0).unwrap();
    let graph = d.end_capture(&stream).unwrap();
    assert_eq!(d.graph_info(&graph).unwrap().kernels, 1);
    let exec = d.instantiate(&graph).unwrap();
    drop(graph);
    for round in 0..3 {
        d.map(ptr, page).unwrap();
        let start = [round as f32; 4];
        d.write(&stream, ptr, bytemuck::cast_slice(&start)).unwrap();
        d.launch_graph(&exec, &stream, &[]).unwrap();
        let got = read(&d, &stream, ptr, 16);
        assert_eq!(
            got,
            bytemuck::cast_slice::<f32, u8>(&[round as f32 + 1.0; 4])
        );
        d.unmap(ptr, page).unwrap();
    }
    d.release(ptr, page).unwrap();
}

#[test]
fn writes_and_reads_are_done_when_they_return() {
    let Some((_alone, d)) = device() else { return };
    let stream = d.create_stream().unwrap();
    let range = Range::new(&d, 64 * MIB);
    for bytes in [1, 4097, 64 << 10, (64 << 10) + 1, 33 * MIB] {
        let want = pattern(bytes, bytes);
        let mut source = want.clone();
        d.write(&stream, range.ptr, &source).unwrap();
        source.fill(0xEE);
        assert!(
            read(&d, &stream, range.ptr, bytes as usize) == want,
            "{bytes} B"
        );
    }
    d.fill(&stream, range.ptr, 7, 100).unwrap();
    d.copy(&stream, range.ptr.offset(MIB), range.ptr, 100)
        .unwrap();
    assert_eq!(read(&d, &stream, range.ptr.offset(MIB), 100), [7; 100]);
    assert_eq!(
        codes(d.copy(&stream, range.ptr, range.ptr.offset(1), 4)),
        (Call::Copy, Code::InvalidValue)
    );
}

#[test]
fn kernels_give_the_bits_of_the_simulated_device() {
    fn run<D: Device>(d: &D) -> Vec<u8> {
        let (set, n) = (KernelSet::load(d).unwrap(), 1000_u64);
        let stream = d.create_stream().unwrap();
        let page = d.granularity();
        let ptr = d.reserve(page).unwrap();
        d.map(ptr, page).unwrap();
        let at = |k: u64| ptr.offset(k * 4096);
        let x: Vec<f32> = (0..n).map(|i| (i as f32).sin() * 1e3 + 1e-3).collect();
        d.write(&stream, at(0), bytemuck::cast_slice(&x)).unwrap();
        set.scale_add(d, &stream, at(1), at(0), n, 1.1, -0.3)
            .unwrap();
        set.mul(d, &stream, at(2), at(0), at(1), n).unwrap();
        set.add(d, &stream, at(3), at(2), at(1), n).unwrap();
        set.copy(d, &stream, at(4), at(3), n).unwrap();
        set.increment(d, &stream, at(4), n, 0.7).unwrap();
        set.sum(d, &stream, at(5), at(4), n).unwrap();
        set.fill(d, &stream, at(6), n, 2.5).unwrap();
        let mut bytes = vec![0; 7 * 4096];
        for k in 0..7 {
            let len = if k == 5 { 4 } else { 4 * n as usize };
            let out = &mut bytes[k * 4096..][..len];
            d.read(&stream, out, at(k as u64)).unwrap();
        }
        d.unmap(ptr, page).unwrap();
        d.release(ptr, page).unwrap();
        bytes
    }
    let Some((_alone, d)) = device() else { return };
    assert!(run(&d) == run(&HostDevice::new()));
}

const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry put_word(.param .u64 put_word_dst, .param .u32 put_word_value) {
  .reg .b64 %rd<3>;
  .reg .b32 %r<2>;
  ld.param.u64 %rd1, [put_word_dst];
  ld.param.u32 %r1, [put_word_value];
  cvta.to.global.u64 %rd2, %rd1;
  st.global.u32 [%rd2], %r1;
  ret;
}
";

#[test]
fn kernels_come_from_ptx_and_source_and_mind_their_arguments() {
    let Some((_alone, d)) = device() else { return };
    let stream = d.create_stream().unwrap();
    let range = Range::new(&d, 1);
    let function = d.load_ptx(PTX.as_bytes(), "put_word").unwrap();
    assert_eq!(
        function.raw(),
        d.load_ptx(PTX.as_bytes(), "put_word").unwrap().raw()
    );
    let one = LaunchConfig::for_elements(1);
    let args = [KernelArg::Ptr(range.ptr), KernelArg::U32(0xABCD_1234)];
    d.launch(&stream, &function, one, &args).unwrap();
    assert_eq!(
        read(&d, &stream, range.ptr, 4),
        0xABCD_1234_u32.to_le_bytes()
    );
    for wrong in [
        &args[..1],
        &[args[0], args[0]],
        &[args[0], args[1], args[1]],
    ] {
        let refused = d.launch(&stream, &function, one, wrong);
        assert_eq!(codes(refused), (Call::Launch, Code::InvalidValue));
    }
    let none = LaunchConfig {
        grid: [0, 1, 1],
        ..one
    };
    assert_eq!(
        codes(d.launch(&stream, &function, none, &args)),
        (Call::Launch, Code::InvalidValue)
    );

    let (load, not_found) = (Call::Load, Code::NotFound);
    assert_eq!(
        codes(d.load_ptx(PTX.as_bytes(), "other")),
        (load, not_found)
    );
    assert_eq!(
        codes(d.load_ptx(b"\x7fELF\xff", "f")),
        (load, Code::InvalidValue)
    );
    let broken = PTX.replace("st.global.u32", "st.nowhere.u32");
    let refused = d.load_ptx(broken.as_bytes(), "put_word").unwrap_err();
    assert!(
        refused.detail.contains("ptxas") || refused.detail.contains("line"),
        "{refused}"
    );
    assert_eq!(codes(d.load(&Kernel::new("f"))), (load, not_found));
    let wrong = Kernel::new("f").cuda("extern \"C\" __global__ void f() { x = 1; }");
    let refused = d.load(&wrong).unwrap_err();
    assert!(refused.detail.contains("identifier \"x\""), "{refused}");
}

#[test]
fn streams_have_numbers_and_events_are_points() {
    let Some((_alone, d)) = device() else { return };
    let (a, b) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    let ids = [&d.default_stream(), &a, &b].map(|stream| d.stream_id(stream));
    assert_eq!(ids, [0, 1, 2]);
    assert_eq!((a.clone() == a, a == b), (true, false));
    assert_eq!(d.default_stream(), d.default_stream());
    assert_eq!(format!("{a:?}"), "CudaStream(1)");
    let set = KernelSet::load(&d).unwrap();
    let range = Range::new(&d, 32 * MIB);
    let n = 1 << 20;
    let event = d.create_event().unwrap();
    d.wait(&b, &event).unwrap();
    assert_eq!(
        (d.query_event(&event), d.synchronize_event(&event)),
        (Ok(true), Ok(()))
    );
    set.fill(&d, &a, range.ptr, n, 1.0).unwrap();
    // One thread adds a million numbers: long enough that a missing wait would show.
    set.sum(&d, &a, range.ptr.offset(16 * MIB), range.ptr, n)
        .unwrap();
    d.record(&event, &a).unwrap();
    d.wait(&b, &event).unwrap();
    d.copy(
        &b,
        range.ptr.offset(17 * MIB),
        range.ptr.offset(16 * MIB),
        4,
    )
    .unwrap();
    assert_eq!(d.query(&b), Ok(false));
    let sum = read(&d, &b, range.ptr.offset(17 * MIB), 4);
    assert_eq!(sum, (n as f32).to_le_bytes());
    assert_eq!((d.query(&a), d.query(&b)), (Ok(true), Ok(true)));
    d.synchronize_event(&event).unwrap();
    d.synchronize_device().unwrap();

    let other = CudaDevice::new(0).unwrap();
    assert_eq!(
        codes(other.synchronize(&a)),
        (Call::Synchronize, Code::InvalidValue)
    );
    // A stream goes with its last handle, and what is enqueued still runs.
    set.fill(&d, &a, range.ptr, n, 3.0).unwrap();
    drop((a, event));
    d.synchronize_device().unwrap();
    assert_eq!(read(&d, &b, range.ptr, 4), 3.0_f32.to_le_bytes());
}

fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is to a live local.
    assert_eq!(
        unsafe { sys::cuCtxGetCurrent(&raw mut context) },
        sys::CUresult::CUDA_SUCCESS
    );
    context
}

#[test]
fn the_callers_context_stays_and_its_streams_can_be_used() {
    let Some((_alone, first)) = device() else {
        return;
    };
    std::thread::spawn(move || {
        assert!(current().is_null());
        let stream = first.create_stream().unwrap();
        first.synchronize(&stream).unwrap();
        drop((stream, first));
        let again = CudaDevice::new(0).unwrap();
        assert!(current().is_null());
        drop(again);
        assert!(current().is_null());
    })
    .join()
    .unwrap();

    let context = CudaContext::new(0).unwrap();
    let theirs = context.new_stream().unwrap();
    let device = CudaDevice::adopt(context.clone()).unwrap();
    assert_eq!(device.raw_context(), context.cu_ctx());
    let stream = device.stream_from_cudarc(theirs.clone()).unwrap();
    assert_eq!(stream.raw(), theirs.cu_stream());
    // SAFETY: `theirs` outlives it.
    let same = unsafe { device.stream_from_raw(theirs.cu_stream()) }.unwrap();
    assert_eq!(
        (&same, device.stream_id(&same)),
        (&stream, device.stream_id(&stream))
    );
    let default = device.stream_from_cudarc(context.default_stream()).unwrap();
    assert_eq!(device.stream_id(&default), 0);
    let range = Range::new(&device, 1);
    device.fill(&stream, range.ptr, 5, 8).unwrap();
    assert_eq!(read(&device, &stream, range.ptr, 8), [5; 8]);
    // SAFETY: a constant that names a stream; it is refused.
    let refused = unsafe { device.stream_from_raw(std::ptr::without_provenance_mut(2)) };
    assert_eq!(refused.unwrap_err().code, Code::InvalidValue);
    assert_eq!(current(), context.cu_ctx());
}

/// What a gather of these slots is to do, and the ranges it works in.
struct Gather<'a> {
    from: Range<'a>,
    to: Range<'a>,
    slots: Vec<GatherSlot>,
    /// Where each slot's source lies, in `from`.
    offsets: Vec<u64>,
}

impl<'a> Gather<'a> {
    fn new(device: &'a CudaDevice, sizes: &[u64], source_skew: u64, target_skew: u64) -> Self {
        let whole: u64 = sizes
            .iter()
            .map(|size| size.next_multiple_of(512) + 512)
            .sum();
        let (from, to) = (Range::new(device, whole), Range::new(device, whole));
        let (mut slots, mut offsets, mut at) = (Vec::new(), Vec::new(), 0);
        for &bytes in sizes {
            slots.push(GatherSlot {
                dst: to.ptr.offset(at + target_skew),
                bytes,
            });
            offsets.push(at + source_skew);
            at += bytes.next_multiple_of(512) + 512;
        }
        Gather {
            from,
            to,
            slots,
            offsets,
        }
    }

    fn sources(&self) -> Vec<DevicePtr> {
        self.offsets
            .iter()
            .map(|at| self.from.ptr.offset(*at))
            .collect()
    }

    /// Runs `f` and compares the whole target, what lies between the slots included.
    fn check(&self, stream: &CudaStream, sources: &[DevicePtr], seed: u64, f: impl FnOnce()) {
        let device = self.from.device;
        let bytes = pattern(seed, self.from.bytes);
        device.write(stream, self.from.ptr, &bytes).unwrap();
        device
            .fill(stream, self.to.ptr, 0xA5, self.to.bytes)
            .unwrap();
        f();
        let mut want = vec![0xA5; self.to.bytes as usize];
        for (slot, source) in self.slots.iter().zip(sources) {
            let at = (slot.dst.0 - self.to.ptr.0) as usize;
            let from = (source.0 - self.from.ptr.0) as usize;
            let size = slot.bytes as usize;
            want[at..at + size].copy_from_slice(&bytes[from..from + size]);
        }
        let got = read(device, stream, self.to.ptr, want.len());
        if got != want {
            let at = got.iter().zip(&want).position(|(a, b)| a != b).unwrap();
            panic!(
                "seed {seed}, {} slots: byte {at} is {}, not {}",
                self.slots.len(),
                got[at],
                want[at]
            );
        }
    }
}

#[test]
fn a_gather_copies_any_sizes_at_any_alignment() {
    let Some((_alone, d)) = device() else { return };
    let stream = d.create_stream().unwrap();
    let some = [
        0, 1, 3, 4, 15, 16, 17, 255, 4096, 32767, 32768, 32769, 65536, 100_001,
    ];
    for (source_skew, target_skew) in [(0, 0), (16, 0), (4, 0), (8, 4), (1, 0), (2, 3)] {
        let gather = Gather::new(&d, &some, source_skew, target_skew);
        let sources = gather.sources();
        gather.check(&stream, &sources, source_skew, || {
            d.gather(&stream, &gather.slots, &sources).unwrap();
        });
    }
    let large = Gather::new(&d, &[48 * MIB + 12, 4, 0, MIB], 0, 0);
    let sources = large.sources();
    large.check(&stream, &sources, 9, || {
        d.gather(&stream, &large.slots, &sources).unwrap()
    });
    assert_eq!(
        codes(d.gather(&stream, &large.slots, &sources[1..])),
        (Call::Gather, Code::InvalidValue)
    );
    d.gather(&stream, &[], &[]).unwrap();
}

#[test]
fn a_captured_gather_takes_new_sources_at_each_launch() {
    let Some((_alone, d)) = device() else { return };
    let stream = d.create_stream().unwrap();
    for count in [1_usize, 4, 5, 64, 65, 144, 145, 300] {
        let sizes: Vec<u64> = (0..count as u64).map(|k| 40 + 1000 * (k % 40)).collect();
        let gather = Gather::new(&d, &sizes, 0, 0);
        let first = gather.sources();
        d.begin_capture(&stream, CaptureMode::ThreadLocal).unwrap();
        d.gather(&stream, &gather.slots, &first).unwrap();
        assert_eq!(
            codes(d.gather(&stream, &gather.slots, &first)),
            (Call::Gather, Code::NotSupported)
        );
        assert_eq!(d.capture_status(&stream), Ok(CaptureStatus::Active));
        let graph = d.end_capture(&stream).unwrap();
        let info = d.graph_info(&graph).unwrap();
        assert_eq!((info.kernels, info.nodes()), (1, 1));
        let (exec, twin) = (
            d.instantiate(&graph).unwrap(),
            d.instantiate(&graph).unwrap(),
        );
        drop(graph);
        // As captured; the same again; one source moved; all moved; back.
        let mut sources = first.clone();
        for seed in 0..5 {
            match seed {
                2 => sources[count / 2] = first[0],
                3 => sources
                    .iter_mut()
                    .for_each(|source| *source = source.offset(4)),
                4 => sources.clone_from(&first),
                _ => {}
            }
            gather.check(&stream, &sources, seed, || {
                d.launch_graph(&exec, &stream, &sources).unwrap();
            });
        }
        // An executable's sources are its own.
        let moved: Vec<_> = first.iter().map(|source| source.offset(8)).collect();
        gather.check(&stream, &moved, 7, || {
            d.launch_graph(&twin, &stream, &moved).unwrap()
        });
        gather.check(&stream, &first, 8, || {
            d.launch_graph(&exec, &stream, &first).unwrap()
        });
        assert_eq!(
            codes(d.launch_graph(&exec, &stream, &first[1..])),
            (Call::LaunchGraph, Code::InvalidValue)
        );
    }
}

#[test]
fn a_launch_in_flight_keeps_its_sources() {
    let Some((_alone, d)) = device() else { return };
    let set = KernelSet::load(&d).unwrap();
    let stream = d.create_stream().unwrap();
    let range = Range::new(&d, 64 * MIB);
    let at = |k: u64| range.ptr.offset(k * 4096);
    let slow = range.ptr.offset(32 * MIB);
    for k in 0..8 {
        d.fill(&stream, at(k), k as u8 + 1, 4096).unwrap();
    }
    let slot = GatherSlot {
        dst: at(8),
        bytes: 4096,
    };
    d.begin_capture(&stream, CaptureMode::ThreadLocal).unwrap();
    d.gather(&stream, &[slot], &[at(0)]).unwrap();
    let graph = d.end_capture(&stream).unwrap();
    let exec = d.instantiate(&graph).unwrap();
    // One thread adds four million numbers, and everything below is enqueued behind it.
    set.sum(&d, &stream, at(100), slow, 1 << 22).unwrap();
    for k in 0..8 {
        d.launch_graph(&exec, &stream, &[at(k)]).unwrap();
        d.copy(&stream, at(16 + k), at(8), 4096).unwrap();
    }
    assert_eq!(d.query(&stream), Ok(false), "the work was not in flight");
    // Dropped while its launches are in flight.
    drop((exec, graph));
    for k in 0..8 {
        assert_eq!(read(&d, &stream, at(16 + k), 4096), vec![k as u8 + 1; 4096]);
    }
}

#[test]
fn threads_share_an_executable() {
    let Some((_alone, d)) = device() else { return };
    let range = Range::new(&d, 4 * MIB);
    let stream = d.create_stream().unwrap();
    let at = |k: u64| range.ptr.offset(k * 4096);
    for k in 0..4 {
        d.fill(&stream, at(k), k as u8 + 1, 64).unwrap();
    }
    let slot = GatherSlot {
        dst: at(8),
        bytes: 64,
    };
    d.begin_capture(&stream, CaptureMode::ThreadLocal).unwrap();
    d.gather(&stream, &[slot], &[at(0)]).unwrap();
    let exec = d.instantiate(&d.end_capture(&stream).unwrap()).unwrap();
    std::thread::scope(|scope| {
        for k in 0..4 {
            let (d, exec, stream) = (&d, &exec, &stream);
            scope.spawn(move || {
                for _ in 0..200 {
                    d.launch_graph(exec, stream, &[at(k)]).unwrap();
                }
            });
        }
    });
    let got = read(&d, &stream, at(8), 64);
    assert!((1..=4).contains(&got[0]) && got.iter().all(|byte| *byte == got[0]));
}
