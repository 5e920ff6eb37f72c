//! Graphs of the simulated device: sources of a launch, branches, launches in flight.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use cudagraph_trees::device::host::{HostDevice, HostExec, HostStream};
use cudagraph_trees::device::kernels::{self, KernelSet};
use cudagraph_trees::device::{
    Call, CaptureMode, Code, Device, DeviceError, DevicePtr, GatherSlot, GraphInfo, KernelArg,
};

const MIB: u64 = 1 << 20;

fn scene(seed: u64) -> (HostDevice, HostStream, DevicePtr) {
    let device = HostDevice::builder().seed(seed).build().unwrap();
    let stream = device.create_stream().unwrap();
    let ptr = device.reserve(2 * MIB).unwrap();
    device.map(ptr, 2 * MIB).unwrap();
    (device, stream, ptr)
}

fn bytes<const N: usize>(device: &HostDevice, stream: &HostStream, ptr: DevicePtr) -> [u8; N] {
    let mut bytes = [0; N];
    device.read(stream, &mut bytes, ptr).unwrap();
    bytes
}

/// Captures what `work` enqueues, and makes it executable.
fn capture(device: &HostDevice, stream: &HostStream, work: impl FnOnce()) -> (HostExec, GraphInfo) {
    device
        .begin_capture(stream, CaptureMode::ThreadLocal)
        .unwrap();
    work();
    let graph = device.end_capture(stream).unwrap();
    (
        device.instantiate(&graph).unwrap(),
        device.graph_info(&graph).unwrap(),
    )
}

/// Gathers two inputs of 2 bytes to 1024 and 1026, then copies the 4 bytes to 2048.
fn gathering(device: &HostDevice, stream: &HostStream, ptr: DevicePtr) -> (HostExec, GraphInfo) {
    let slots = [1024, 1026].map(|at| GatherSlot {
        dst: ptr.offset(at),
        bytes: 2,
    });
    capture(device, stream, || {
        device.gather(stream, &slots, &[ptr, ptr]).unwrap();
        device
            .copy(stream, ptr.offset(2048), ptr.offset(1024), 4)
            .unwrap();
    })
}

#[test]
fn each_launch_brings_its_own_sources() {
    let (device, stream, ptr) = scene(0);
    let (exec, info) = gathering(&device, &stream, ptr);
    assert_eq!(
        info,
        GraphInfo {
            kernels: 1,
            copies: 1,
            ..GraphInfo::default()
        }
    );
    device
        .write(&stream, ptr, &[0, 1, 2, 3, 4, 5, 6, 7])
        .unwrap();
    // Both in flight before either runs.
    device
        .launch_graph(&exec, &stream, &[ptr, ptr.offset(6)])
        .unwrap();
    device
        .copy(&stream, ptr.offset(4096), ptr.offset(2048), 4)
        .unwrap();
    device
        .launch_graph(&exec, &stream, &[ptr.offset(4), ptr.offset(2)])
        .unwrap();
    assert_eq!(bytes(&device, &stream, ptr.offset(4096)), [0, 1, 6, 7]);
    assert_eq!(bytes(&device, &stream, ptr.offset(2048)), [4, 5, 2, 3]);
    assert_eq!(device.counts().graph_launches, 2);
}

#[test]
fn sources_and_slots_must_agree() {
    let (device, stream, ptr) = scene(0);
    let (exec, _) = gathering(&device, &stream, ptr);
    let refused = device.launch_graph(&exec, &stream, &[ptr]).unwrap_err();
    assert_eq!(
        (refused.call, refused.code),
        (Call::LaunchGraph, Code::InvalidValue)
    );
    assert_eq!(
        refused.detail,
        "1 sources are given; the graph's gather node has 2 slots"
    );
    let slot = GatherSlot { dst: ptr, bytes: 2 };
    assert_eq!(
        device.gather(&stream, &[slot], &[]).unwrap_err().code,
        Code::InvalidValue
    );

    // A graph has one gather at most; the refusal leaves the capture alone.
    let (_, info) = capture(&device, &stream, || {
        device.gather(&stream, &[slot], &[ptr.offset(8)]).unwrap();
        let second = device
            .gather(&stream, &[slot], &[ptr.offset(8)])
            .unwrap_err();
        assert_eq!(second.code, Code::NotSupported);
    });
    assert_eq!(info.nodes(), 1);
    assert_eq!(device.counts().graph_launches, 0);
}

#[test]
fn a_gather_that_faults_moves_nothing() {
    let (device, stream, ptr) = scene(0);
    let (exec, _) = gathering(&device, &stream, ptr);
    device.write(&stream, ptr, &[1; 8]).unwrap();
    device.fill(&stream, ptr.offset(1024), 9, 4).unwrap();
    device
        .launch_graph(&exec, &stream, &[ptr, ptr.offset(2 * MIB - 1)])
        .unwrap();
    let fault = device.synchronize(&stream).unwrap_err().fault.unwrap();
    assert_eq!((fault.kernel.as_str(), fault.bytes), ("gather", 1));
    device.clear_fault();
    assert_eq!(bytes(&device, &stream, ptr.offset(1024)), [9; 4]);
}

/// Two branches write one byte after a common start; `join` says what the end copies.
fn branches(seed: u64) -> [u8; 3] {
    let (device, main, ptr) = scene(seed);
    let side = device.create_stream().unwrap();
    let (fork, join) = (
        device.create_event().unwrap(),
        device.create_event().unwrap(),
    );
    let (exec, info) = capture(&device, &main, || {
        device.fill(&main, ptr, 1, 3).unwrap();
        device.record(&fork, &main).unwrap();
        device.wait(&side, &fork).unwrap();
        device.fill(&main, ptr, 2, 1).unwrap();
        device.fill(&side, ptr, 3, 1).unwrap();
        device.fill(&side, ptr.offset(1), 4, 1).unwrap();
        device.record(&join, &side).unwrap();
        device.wait(&main, &join).unwrap();
        device.copy(&main, ptr.offset(2), ptr.offset(1), 1).unwrap();
    });
    assert_eq!((info.fills, info.copies), (4, 1));
    device.launch_graph(&exec, &main, &[]).unwrap();
    bytes(&device, &main, ptr)
}

#[test]
fn branches_interleave_and_joins_hold() {
    let seen: BTreeSet<[u8; 3]> = (0..64).map(branches).collect();
    // The branches race for the first byte; what comes after the join sees all of both.
    assert_eq!(seen, [[2, 4, 4], [3, 4, 4]].into());
    for seed in 0..16 {
        assert_eq!(branches(seed), branches(seed));
    }
}

#[test]
fn nodes_interleave_with_other_streams() {
    let run = |seed: u64| {
        let (device, stream, ptr) = scene(seed);
        let other = device.create_stream().unwrap();
        let (exec, _) = capture(&device, &stream, || {
            device.fill(&stream, ptr, 1, 1).unwrap();
            device.fill(&stream, ptr, 2, 1).unwrap();
        });
        device.launch_graph(&exec, &stream, &[]).unwrap();
        device.copy(&other, ptr.offset(1), ptr, 1).unwrap();
        device.synchronize(&stream).unwrap();
        bytes::<1>(&device, &other, ptr.offset(1))
    };
    let seen: BTreeSet<[u8; 1]> = (0..64).map(run).collect();
    assert_eq!(seen, [[1], [2], [0xCD]].into());
}

#[test]
fn what_is_in_flight_outlives_its_handles() {
    let (device, stream, ptr) = scene(0);
    let before = device.counts();
    let (exec, _) = gathering(&device, &stream, ptr);
    assert_eq!((device.counts().execs, device.counts().graphs), (1, 0));
    device.write(&stream, ptr, &[1, 2, 3, 4]).unwrap();
    device
        .launch_graph(&exec, &stream, &[ptr.offset(2), ptr])
        .unwrap();
    drop(exec);
    assert_eq!(bytes(&device, &stream, ptr.offset(2048)), [3, 4, 1, 2]);
    assert_eq!(device.counts().execs, before.execs);
}

#[test]
fn changed_parameters_hold_from_the_next_launch() {
    let (device, stream, ptr) = scene(0);
    let function = device.load(&kernels::fill()).unwrap();
    let config = cudagraph_trees::device::LaunchConfig::for_elements(1);
    let args = |value| {
        [
            KernelArg::Ptr(ptr),
            KernelArg::U64(1),
            KernelArg::F32(value),
        ]
    };
    let template = |value| {
        device.begin_capture(&stream, CaptureMode::Relaxed).unwrap();
        device
            .launch(&stream, &function, config, &args(value))
            .unwrap();
        device.end_capture(&stream).unwrap()
    };
    let exec = device.instantiate(&template(1.0)).unwrap();
    let value = || f32::from_le_bytes(bytes(&device, &stream, ptr));
    let launch = || device.launch_graph(&exec, &stream, &[]).unwrap();
    launch();
    device.exec_kernel_set_params(&exec, 0, &args(2.0)).unwrap();
    assert_eq!(value(), 1.0);
    launch();
    assert_eq!(value(), 2.0);
    device.exec_update(&exec, &template(3.0)).unwrap();
    launch();
    assert_eq!(value(), 3.0);
    assert_eq!(
        device
            .exec_kernel_set_params(&exec, 1, &[])
            .unwrap_err()
            .code,
        Code::InvalidValue
    );
    device.begin_capture(&stream, CaptureMode::Relaxed).unwrap();
    let other = device.end_capture(&stream).unwrap();
    assert_eq!(
        device.exec_update(&exec, &other).unwrap_err().code,
        Code::Other(910)
    );
}

#[test]
fn host_functions_and_pageable_memory_act_at_each_launch() {
    let (device, stream, ptr) = scene(0);
    let (calls, from, to) = (
        Arc::new(Mutex::new(0)),
        Arc::new(Mutex::new(vec![1; 4])),
        Arc::new(Mutex::new(vec![0; 4])),
    );
    let counted = calls.clone();
    let (exec, info) = capture(&device, &stream, || {
        device.memcpy_htod_async(&stream, ptr, &from).unwrap();
        device.memcpy_dtoh_async(&stream, &to, ptr).unwrap();
        device
            .launch_host_func(&stream, move || *counted.lock().unwrap() += 1)
            .unwrap();
    });
    assert_eq!(
        info,
        GraphInfo {
            copies: 2,
            other: 1,
            ..GraphInfo::default()
        }
    );
    for round in 1..=3_u8 {
        *from.lock().unwrap() = vec![round; 4];
        device.launch_graph(&exec, &stream, &[]).unwrap();
        device.synchronize(&stream).unwrap();
        assert_eq!(
            (*calls.lock().unwrap(), to.lock().unwrap().clone()),
            (round, vec![round; 4])
        );
    }
}

#[test]
fn an_external_wait_holds_a_launch_until_the_event() {
    for seed in 0..32 {
        let (device, stream, ptr) = scene(seed);
        let other = device.create_stream().unwrap();
        let event = device.create_event().unwrap();
        let (exec, info) = capture(&device, &stream, || {
            device.wait_external(&stream, &event).unwrap();
            device.copy(&stream, ptr.offset(1), ptr, 1).unwrap();
        });
        assert_eq!((info.copies, info.other), (1, 1));
        device.fill(&other, ptr, 1, 1).unwrap();
        device.fill(&other, ptr, 2, 1).unwrap();
        device.record(&event, &other).unwrap();
        device.launch_graph(&exec, &stream, &[]).unwrap();
        assert_eq!(bytes(&device, &stream, ptr.offset(1)), [2]);
    }
}

#[test]
fn kernels_in_a_graph_compute_what_they_compute_eagerly() -> Result<(), DeviceError> {
    let (device, stream, ptr) = scene(9);
    let set = KernelSet::load(&device)?;
    let n = 20_000;
    let [x, y, z, total] = [0, 1, 2, 3].map(|at| ptr.offset(at * (MIB / 4)));
    let work = || -> Result<(), DeviceError> {
        set.fill(&device, &stream, x, n, 0.1)?;
        set.scale_add(&device, &stream, y, x, n, 3.0, -0.25)?;
        set.mul(&device, &stream, z, x, y, n)?;
        set.add(&device, &stream, z, z, y, n)?;
        set.copy(&device, &stream, x, z, n)?;
        set.sum(&device, &stream, total, x, n)
    };
    let one = 0.1_f32 * 3.0 + -0.25;
    let one = 0.1_f32 * one + one;
    let expected = (0..n).fold(0.0_f32, |total, _| total + one).to_le_bytes();
    work()?;
    assert_eq!(bytes(&device, &stream, total), expected);
    let (exec, info) = capture(&device, &stream, || work().unwrap());
    assert_eq!(
        info,
        GraphInfo {
            kernels: 6,
            ..GraphInfo::default()
        }
    );
    device.fill(&stream, total, 0, 4)?;
    device.launch_graph(&exec, &stream, &[])?;
    assert_eq!(bytes(&device, &stream, total), expected);
    Ok(())
}
