//! A pool's fresh memory has no owner until the pool hands it out.

use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Code, Device, FaultReason};
use cudagraph_trees::{Allocator, Tensor};

#[test]
fn what_a_pool_has_not_handed_out_may_not_be_touched() {
    let device = HostDevice::new();
    let allocator = Allocator::new(device.clone()).unwrap();
    let stream = device.create_stream().unwrap();
    let tensor: Tensor<HostDevice> = allocator.alloc(&stream, 512).unwrap();
    tensor.write(&device, &stream, &[7; 512]).unwrap();
    assert_eq!(tensor.read(&device, &stream).unwrap(), [7; 512]);

    device
        .fill(&stream, tensor.ptr().unwrap().offset(512), 1, 4)
        .unwrap();
    let error = device.synchronize(&stream).unwrap_err();
    assert_eq!(error.code, Code::IllegalAddress);
    let fault = error.fault.unwrap();
    assert_eq!(
        (fault.kernel.as_str(), fault.address.as_str()),
        ("fill", "S0+512")
    );
    assert_eq!(fault.reason, FaultReason::NotLive);
}

#[test]
fn what_is_freed_is_poisoned_in_stream_order() {
    let device = HostDevice::new();
    let allocator = Allocator::new(device.clone()).unwrap();
    let stream = device.create_stream().unwrap();
    let tensor: Tensor<HostDevice> = allocator.alloc(&stream, 1024).unwrap();
    let ptr = tensor.ptr().unwrap();
    // Enqueued before the free: it may still touch the memory.
    device.fill(&stream, ptr, 3, 1024).unwrap();
    drop(tensor);
    device.synchronize(&stream).unwrap();
    // Enqueued after it: it may not.
    device.fill(&stream, ptr, 3, 8).unwrap();
    let fault = device.synchronize(&stream).unwrap_err().fault.unwrap();
    assert_eq!(
        (fault.address.as_str(), fault.reason),
        ("S0+0", FaultReason::NotLive)
    );
}
