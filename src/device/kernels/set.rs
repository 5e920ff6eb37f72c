//! All kernels of this module, loaded once, with a typed launch for each.

use super::{add, copy, fill, increment, mul, scale_add, sum};
use crate::device::{Device, DevicePtr, KernelArg, LaunchConfig, Result};

/// All kernels of this module, loaded on one device.
///
/// Each method launches its kernel on `stream`; with no elements, the elementwise ones launch nothing.
///
/// # Errors
/// What [`Device::load`] and [`Device::launch`] give.
#[derive(Clone, Debug)]
pub struct KernelSet<D: Device> {
    fill: D::Function,
    scale_add: D::Function,
    add: D::Function,
    mul: D::Function,
    copy: D::Function,
    increment: D::Function,
    sum: D::Function,
}

impl<D: Device> KernelSet<D> {
    /// Loads them all. Do it before capturing.
    pub fn load(device: &D) -> Result<Self> {
        Ok(KernelSet {
            fill: device.load(&fill())?,
            scale_add: device.load(&scale_add())?,
            add: device.load(&add())?,
            mul: device.load(&mul())?,
            copy: device.load(&copy())?,
            increment: device.load(&increment())?,
            sum: device.load(&sum())?,
        })
    }

    /// `dst = value`.
    pub fn fill(
        &self,
        device: &D,
        stream: &D::Stream,
        dst: DevicePtr,
        n: u64,
        value: f32,
    ) -> Result<()> {
        launch(
            device,
            stream,
            &self.fill,
            n,
            &[
                KernelArg::Ptr(dst),
                KernelArg::U64(n),
                KernelArg::F32(value),
            ],
        )
    }

    /// `dst = src * scale + add`.
    #[allow(clippy::too_many_arguments)] // the kernel's own
    pub fn scale_add(
        &self,
        device: &D,
        stream: &D::Stream,
        dst: DevicePtr,
        src: DevicePtr,
        n: u64,
        scale: f32,
        add: f32,
    ) -> Result<()> {
        let args = [
            KernelArg::Ptr(dst),
            KernelArg::Ptr(src),
            KernelArg::U64(n),
            KernelArg::F32(scale),
            KernelArg::F32(add),
        ];
        launch(device, stream, &self.scale_add, n, &args)
    }

    /// `dst = a + b`.
    pub fn add(
        &self,
        device: &D,
        stream: &D::Stream,
        dst: DevicePtr,
        a: DevicePtr,
        b: DevicePtr,
        n: u64,
    ) -> Result<()> {
        launch(
            device,
            stream,
            &self.add,
            n,
            &[
                KernelArg::Ptr(dst),
                KernelArg::Ptr(a),
                KernelArg::Ptr(b),
                KernelArg::U64(n),
            ],
        )
    }

    /// `dst = a * b`.
    pub fn mul(
        &self,
        device: &D,
        stream: &D::Stream,
        dst: DevicePtr,
        a: DevicePtr,
        b: DevicePtr,
        n: u64,
    ) -> Result<()> {
        launch(
            device,
            stream,
            &self.mul,
            n,
            &[
                KernelArg::Ptr(dst),
                KernelArg::Ptr(a),
                KernelArg::Ptr(b),
                KernelArg::U64(n),
            ],
        )
    }

    /// `dst = src`.
    pub fn copy(
        &self,
        device: &D,
        stream: &D::Stream,
        dst: DevicePtr,
        src: DevicePtr,
        n: u64,
    ) -> Result<()> {
        launch(
            device,
            stream,
            &self.copy,
            n,
            &[KernelArg::Ptr(dst), KernelArg::Ptr(src), KernelArg::U64(n)],
        )
    }

    /// `dst = dst + by`.
    pub fn increment(
        &self,
        device: &D,
        stream: &D::Stream,
        dst: DevicePtr,
        n: u64,
        by: f32,
    ) -> Result<()> {
        launch(
            device,
            stream,
            &self.increment,
            n,
            &[KernelArg::Ptr(dst), KernelArg::U64(n), KernelArg::F32(by)],
        )
    }

    /// `dst[0]` = the sum of `src`.
    pub fn sum(
        &self,
        device: &D,
        stream: &D::Stream,
        dst: DevicePtr,
        src: DevicePtr,
        n: u64,
    ) -> Result<()> {
        let config = LaunchConfig {
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
        };
        device.launch(
            stream,
            &self.sum,
            config,
            &[KernelArg::Ptr(dst), KernelArg::Ptr(src), KernelArg::U64(n)],
        )
    }
}

fn launch<D: Device>(
    device: &D,
    stream: &D::Stream,
    function: &D::Function,
    n: u64,
    args: &[KernelArg],
) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    device.launch(stream, function, LaunchConfig::for_elements(n), args)
}
