//! The CUDA device: memory under graphs, streams, kernels, contexts. Without a device each test says so and passes, unless the variable
//! `CUDAGRAPH_TREES_DEVICE` is `cuda`.
#![cfg(feature = "cuda-any")]

mod cuda_support;

use std::thread;

use cuda_support::{MIB, OtherContext, Range, codes, current, device, pattern, read, with_memory};
use cudagraph_trees::device::cuda::{
    CudaCounts, CudaDevice, CudaMemory, CudaOptions, CudaStream, CudaUnavailable, probe,
};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, GatherSlot, Kernel, KernelArg, LaunchConfig,
    Mark,
};
use cudarc::driver::{CudaContext, sys};

#[test]
fn a_machine_says_what_cuda_it_has() {
    let beyond = CudaDevice::with_options(u32::MAX, CudaOptions::default()).map(drop);
    assert_eq!(beyond, CudaDevice::new(u32::MAX).map(drop));
    match (probe(), beyond) {
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

const MEMORIES: [CudaMemory; 2] = [CudaMemory::Virtual, CudaMemory::Plain];

const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

#[test]
fn memory_is_booked_and_given_back() {
    for memory in MEMORIES {
        let Some((_alone, d)) = with_memory(memory) else {
            return;
        };
        assert_eq!(d.memory(), memory);
        booked(&d);
    }
}

/// The same calls are refused, whatever the memory.
fn booked(d: &CudaDevice) {
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

    // More than there is: nothing is left behind. Plain memory is taken when it is reserved.
    let much = (d.memory_info().unwrap().total + page).next_multiple_of(page);
    let (call, refused) = match d.reserve(much) {
        Err(refused) => (Call::Reserve, refused),
        Ok(ptr) => {
            let refused = d.map(ptr, much).unwrap_err();
            d.release(ptr, much).unwrap();
            (Call::Map, refused)
        }
    };
    let plain = d.memory() == CudaMemory::Plain;
    assert_eq!(call, if plain { Call::Reserve } else { Call::Map });
    assert_eq!(
        (refused.call, refused.code),
        (call, Code::OutOfMemory),
        "{refused}"
    );
    assert!(refused.detail.contains("are free"), "{refused}");
    assert_eq!(d.counts(), before);
}

#[test]
fn plain_memory_is_taken_from_reserve_to_release() {
    let Some((_alone, d)) = with_memory(CudaMemory::Plain) else {
        return;
    };
    let bytes = 64 * d.granularity();
    // The driver may take a little more or less than what is asked for.
    let before = d.memory_info().unwrap().free;
    let taken = || before.saturating_sub(d.memory_info().unwrap().free) >= bytes;
    let ptr = d.reserve(bytes).unwrap();
    assert!(taken());
    let counts = |mapped_bytes, mapped_ranges| {
        let now = d.counts();
        assert_eq!(
            (now.mapped_bytes, now.mapped_ranges, now.reserved_ranges),
            (mapped_bytes, mapped_ranges, 1)
        );
    };
    counts(0, 0);
    d.map(ptr, bytes).unwrap();
    counts(bytes, 1);
    d.unmap(ptr, bytes).unwrap();
    counts(0, 0);
    assert!(taken());
    d.release(ptr, bytes).unwrap();
    assert!(!taken());
    assert_eq!(d.counts(), CudaCounts::default());
}

#[test]
fn memory_is_taken_and_given_back_while_a_stream_captures() {
    for memory in MEMORIES {
        let Some((_alone, d)) = with_memory(memory) else {
            return;
        };
        let page = d.granularity();
        let set = KernelSet::load(&d).unwrap();
        let stream = d.create_stream().unwrap();
        let kept = Range::new(&d, page);
        for mode in MODES {
            for here in [true, false] {
                let take = || {
                    let other = d.reserve(page).unwrap();
                    d.map(other, page).unwrap();
                    let range = d.reserve(2 * page).unwrap();
                    d.map(range, 2 * page).unwrap();
                    d.unmap(other, page).unwrap();
                    d.release(other, page).unwrap();
                    range
                };
                d.begin_capture(&stream, mode).unwrap();
                let range = match here {
                    true => take(),
                    false => thread::scope(|scope| scope.spawn(take).join().unwrap()),
                };
                set.fill(&d, &stream, range, 4, 2.0).unwrap();
                set.scale_add(&d, &stream, kept.ptr, range, 4, 3.0, 1.0)
                    .unwrap();
                let graph = d.end_capture(&stream).unwrap();
                let info = d.graph_info(&graph).unwrap();
                assert_eq!((info.nodes(), info.kernels), (2, 2));
                let exec = d.instantiate(&graph).unwrap();
                d.fill(&stream, kept.ptr, 0, 16).unwrap();
                d.launch_graph(&exec, &stream, &[]).unwrap();
                let want = [7.0_f32; 4].map(f32::to_le_bytes).concat();
                assert_eq!(
                    read(&d, &stream, kept.ptr, 16),
                    want,
                    "{memory:?}, {mode:?}, here: {here}"
                );
                d.unmap(range, 2 * page).unwrap();
                d.release(range, 2 * page).unwrap();
            }
        }
    }
}

#[test]
fn memory_comes_and_goes_under_a_graph() {
    for memory in MEMORIES {
        if let Some((_alone, d)) = with_memory(memory) {
            comes_and_goes(&d);
        }
    }
}

fn comes_and_goes(d: &CudaDevice) {
    let page = d.granularity();
    let set = KernelSet::load(d).unwrap();
    let stream = d.create_stream().unwrap();
    let ptr = d.reserve(page).unwrap();
    // Captured and made executable while nothing is mapped there.
    d.begin_capture(&stream, CaptureMode::ThreadLocal).unwrap();
    set.increment(d, &stream, ptr, 4, 1.0).unwrap();
    let graph = d.end_capture(&stream).unwrap();
    assert_eq!(d.graph_info(&graph).unwrap().kernels, 1);
    let exec = d.instantiate(&graph).unwrap();
    drop(graph);
    for round in 0..3 {
        d.map(ptr, page).unwrap();
        let start = [round as f32; 4];
        d.write(&stream, ptr, bytemuck::cast_slice(&start)).unwrap();
        d.launch_graph(&exec, &stream, &[]).unwrap();
        let got = read(d, &stream, ptr, 16);
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

/// Adds a million numbers by one thread, into the memory's last word: long enough that a missing wait shows.
fn long(d: &CudaDevice, set: &KernelSet<CudaDevice>, stream: &CudaStream, range: &Range<'_>) {
    set.sum(d, stream, range.ptr.offset(16 * MIB), range.ptr, 1 << 20)
        .unwrap();
}

/// Whether all of a stream's work has run, by the driver's word.
fn is_idle(stream: sys::CUstream) -> bool {
    // SAFETY: the stream is alive.
    unsafe { sys::cuStreamQuery(stream) == sys::CUresult::CUDA_SUCCESS }
}

#[test]
fn quiescing_waits_for_streams_that_the_device_does_not_know() {
    let Some((_alone, d)) = device() else { return };
    let set = KernelSet::load(&d).unwrap();
    let context = d.context().clone();
    context.bind_to_thread().unwrap(); // what the null stream is, is the context's to say
    for mode in MODES {
        let range = Range::new(&d, 32 * MIB);
        let capturing = d.create_stream().unwrap();
        set.fill(&d, &capturing, range.ptr, 1 << 20, 1.0).unwrap();
        d.synchronize(&capturing).unwrap();
        // A stream of cudarc's that the device has forgotten again, and the default stream.
        let theirs = context.new_stream().unwrap();
        let known = d.stream_from_cudarc(theirs.clone()).unwrap();
        long(&d, &set, &known, &range);
        drop(known);
        assert!(!is_idle(theirs.cu_stream()));
        d.begin_capture(&capturing, mode).unwrap();
        thread::scope(|scope| scope.spawn(|| d.quiesce().unwrap()).join().unwrap());
        d.quiesce().unwrap();
        assert_eq!(d.capture_status(&capturing), Ok(CaptureStatus::Active));
        d.end_capture(&capturing).unwrap();
        assert!(is_idle(theirs.cu_stream()), "{mode:?}");

        long(&d, &set, &d.default_stream(), &range);
        d.quiesce().unwrap();
        assert!(is_idle(std::ptr::null_mut()));

        // What was enqueued before the stream began to capture.
        d.fill(&capturing, range.ptr.offset(16 * MIB), 0, 4)
            .unwrap();
        long(&d, &set, &capturing, &range);
        d.begin_capture(&capturing, mode).unwrap();
        d.quiesce().unwrap();
        d.end_capture(&capturing).unwrap();
        assert!(is_idle(capturing.raw()), "{mode:?}");
    }
}

#[test]
fn a_device_ends_beside_a_capture_of_another() {
    let Some((_alone, d)) = device() else { return };
    let set = KernelSet::load(&d).unwrap();
    let stream = d.create_stream().unwrap();
    let range = Range::new(&d, 32 * MIB);
    set.fill(&d, &stream, range.ptr, 1 << 20, 1.0).unwrap();
    d.synchronize(&stream).unwrap();
    let (out, total) = (range.ptr.offset(20 * MIB), range.ptr.offset(16 * MIB));
    for (memory, mode, here) in MEMORIES
        .into_iter()
        .flat_map(|memory| MODES.map(|mode| (memory, mode)))
        .flat_map(|(memory, mode)| [true, false].map(|here| (memory, mode, here)))
    {
        // Another device in the same context, with kernels loaded, memory mapped, and work in flight that touches it.
        let options = CudaOptions::default().memory(memory);
        let other = CudaDevice::adopt_with(d.context().clone(), options).unwrap();
        let theirs = KernelSet::load(&other).unwrap();
        let page = other.granularity();
        let ptr = other.reserve(2 * page).unwrap();
        other.map(ptr, page).unwrap();
        other.map(ptr.offset(page), page).unwrap();
        let working = other.create_stream().unwrap();
        d.fill(&stream, total, 0, 4).unwrap();
        d.synchronize(&stream).unwrap();
        theirs
            .sum(&other, &working, ptr, range.ptr, 1 << 20)
            .unwrap();
        theirs.copy(&other, &working, total, ptr, 1).unwrap();

        d.begin_capture(&stream, mode).unwrap();
        set.fill(&d, &stream, out, 4, 3.0).unwrap();
        let leaving = move || drop((theirs, working, other));
        match here {
            true => leaving(),
            false => thread::scope(|scope| scope.spawn(leaving).join().unwrap()),
        }
        let at = format!("{memory:?}, {mode:?}, here: {here}");
        assert_eq!(d.capture_status(&stream), Ok(CaptureStatus::Active), "{at}");
        let graph = d.end_capture(&stream).unwrap();
        let exec = d.instantiate(&graph).unwrap();
        d.launch_graph(&exec, &stream, &[]).unwrap();
        assert_eq!(
            read(&d, &stream, out, 16),
            [3.0_f32; 4].map(f32::to_le_bytes).concat(),
            "{at}"
        );
        let sum = (1_u32 << 20) as f32;
        assert_eq!(read(&d, &stream, total, 4), sum.to_le_bytes(), "{at}");
    }
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

/// Makes each call of a device once, and looks after each whether the caller's current context is what it was.
fn every_call(d: &CudaDevice) {
    let before = current();
    let kept = |what: &str| assert_eq!(current(), before, "after {what}");
    macro_rules! call {
        ($call:expr) => {{
            let result = $call;
            kept(stringify!($call));
            result
        }};
    }
    let page = call!(d.granularity());
    call!(d.info());
    call!(d.memory_info()).unwrap();
    let ptr = call!(d.reserve(page)).unwrap();
    call!(d.map(ptr, page)).unwrap();
    call!(d.manage(ptr, page));
    let stream = call!(d.create_stream()).unwrap();
    let default = call!(d.default_stream());
    call!(d.mark(&stream, ptr, 16, Mark::Live));
    call!(stream.cudarc());
    // SAFETY: `stream` outlives it.
    let same = call!(unsafe { d.stream_from_raw(stream.raw()) }).unwrap();
    let function = call!(d.load_ptx(PTX.as_bytes(), "put_word")).unwrap();
    let set = call!(KernelSet::load(d)).unwrap();
    let args = [KernelArg::Ptr(ptr), KernelArg::U32(0x0403_0201)];
    let one = LaunchConfig::for_elements(1);
    call!(d.launch(&stream, &function, one, &args)).unwrap();
    call!(d.copy(&stream, ptr.offset(512), ptr, 4)).unwrap();
    call!(d.fill(&stream, ptr.offset(516), 7, 4)).unwrap();
    call!(d.write(&stream, ptr.offset(520), &[9; 4])).unwrap();
    let slots = [GatherSlot {
        dst: ptr.offset(1024),
        bytes: 12,
    }];
    let sources = [ptr.offset(512)];
    call!(d.gather(&stream, &slots, &sources)).unwrap();
    let mut bytes = [0; 12];
    call!(d.read(&stream, &mut bytes, ptr.offset(1024))).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4, 7, 7, 7, 7, 9, 9, 9, 9]);
    let event = call!(d.create_event()).unwrap();
    call!(d.record(&event, &stream)).unwrap();
    call!(d.wait(&default, &event)).unwrap();
    call!(d.synchronize_event(&event)).unwrap();
    assert_eq!(call!(d.query_event(&event)), Ok(true));
    call!(d.synchronize(&stream)).unwrap();
    assert_eq!(call!(d.query(&stream)), Ok(true));
    call!(d.synchronize_device()).unwrap();
    call!(d.quiesce()).unwrap();
    call!(d.begin_capture(&stream, CaptureMode::ThreadLocal)).unwrap();
    call!(d.gather(&stream, &slots, &sources)).unwrap();
    call!(d.quiesce()).unwrap();
    let status = call!(d.capture_status(&stream)).unwrap();
    assert_eq!(status, CaptureStatus::Active);
    let graph = call!(d.end_capture(&stream)).unwrap();
    assert_eq!(call!(d.graph_info(&graph)).unwrap().kernels, 1);
    let exec = call!(d.instantiate(&graph)).unwrap();
    call!(d.launch_graph(&exec, &stream, &[ptr])).unwrap();
    call!(d.read(&stream, &mut bytes, ptr.offset(1024))).unwrap();
    assert_eq!(bytes[..4], [1, 2, 3, 4]);
    // A refusal, too.
    call!(d.map(ptr, page)).unwrap_err();
    call!(drop(exec));
    call!(drop(graph));
    call!(drop(event));
    call!(drop((function, set)));
    call!(drop((same, default)));
    call!(drop(stream));
    call!(d.unmap(ptr, page)).unwrap();
    call!(d.release(ptr, page)).unwrap();
    // Devices that come and go, with memory or without.
    for memory in MEMORIES {
        let options = CudaOptions::default().memory(memory);
        let other = call!(CudaDevice::with_options(0, options)).unwrap();
        let left = call!(other.reserve(page)).unwrap();
        call!(other.map(left, page)).unwrap();
        call!(drop(other));
        let other = call!(CudaDevice::adopt_with(d.context().clone(), options)).unwrap();
        call!(drop(other));
    }
    call!(probe()).unwrap();
}

#[test]
fn t4_16_every_call_leaves_the_callers_context_current() {
    let Some((_alone, d)) = device() else { return };
    // A thread without a context, and one that works in another.
    thread::scope(|scope| {
        let none = || {
            assert!(current().is_null());
            every_call(&d);
        };
        scope.spawn(none).join().unwrap();
        let another = || {
            let other = OtherContext::new();
            assert_eq!(current(), other.raw);
            assert_ne!(other.raw, d.raw_context());
            every_call(&d);
        };
        scope.spawn(another).join().unwrap();
    });
    // And one that works in the device's own.
    d.context().bind_to_thread().unwrap();
    every_call(&d);
    assert_eq!(current(), d.raw_context());
}
