//! The gather on the CUDA device: any sizes at any alignment, sources that move, launches in flight.
#![cfg(feature = "cuda-any")]

mod cuda_support;

use cuda_support::{MIB, Range, codes, device, pattern, read};
use cudagraph_trees::device::cuda::{CudaDevice, CudaStream};
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DevicePtr, GatherSlot,
};

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
