//! A CUDA context that a kernel's fault costs. Alone in its process, since the context is the process's.
#![cfg(feature = "cuda-any")]

mod cuda_support;

use cuda_support::cuda;
use cudagraph_trees::device::cuda::CudaMemory;
use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::device::{Call, Code, Device, DevicePtr};

#[test]
fn a_lost_context_is_reported_and_remembered() {
    let Some(d) = cuda() else { return };
    let page = d.granularity();
    let set = KernelSet::load(&d).unwrap();
    let stream = d.create_stream().unwrap();
    let event = d.create_event().unwrap();
    let ptr = d.reserve(2 * page).unwrap();
    d.map(ptr, page).unwrap();
    set.fill(&d, &stream, ptr, 4, 1.0).unwrap();
    d.synchronize(&stream).unwrap();

    // Reserved, and nothing mapped there. Plain memory has no such place: there it is an address that nobody has.
    let nowhere = match d.memory() {
        CudaMemory::Plain => DevicePtr(page),
        _ => ptr.offset(page),
    };
    set.fill(&d, &stream, nowhere, 4, 1.0).unwrap();
    let heard = d.synchronize(&stream).unwrap_err();
    assert_eq!(
        (heard.call, heard.code),
        (Call::Synchronize, Code::IllegalAddress),
        "{heard}"
    );
    assert!(heard.detail.contains("the context is lost"), "{heard}");
    let mut byte = [0];
    for (later, call) in [
        (d.synchronize(&stream), Call::Synchronize),
        (d.record(&event, &stream), Call::Record),
        (d.fill(&stream, ptr, 0, 1), Call::Fill),
        (d.read(&stream, &mut byte, ptr), Call::Read),
        (d.map(ptr.offset(page), page), Call::Map),
        (d.memory_info().map(drop), Call::MemoryInfo),
        (d.create_stream().map(drop), Call::CreateStream),
        (d.gather(&stream, &[], &[]), Call::Gather),
        (
            d.copy(&stream, DevicePtr::NULL, DevicePtr::NULL, 0),
            Call::Copy,
        ),
    ] {
        let later = later.unwrap_err();
        assert_eq!(
            (later.call, later.code),
            (call, Code::IllegalAddress),
            "{later}"
        );
        assert!(later.detail.contains("Synchronize reported it"), "{later}");
    }
    // What takes down is still admitted.
    d.unmap(ptr, page).unwrap();
    d.release(ptr, 2 * page).unwrap();
    assert_eq!(d.counts().mapped_bytes, 0);
    drop((set, stream, event, d));
}
