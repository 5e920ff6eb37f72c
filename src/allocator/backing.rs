//! Where a pool's segments come from: the device's memory, or a backing of the caller's.

use crate::device::{Device, DevicePtr};
use crate::pool::{Backing, BackingError};

use super::CustomBacking;

/// A pool's backing within the allocator.
pub(super) enum PoolBacking<D: Device> {
    Device(D),
    Custom(CustomBacking),
}

impl<D: Device> PoolBacking<D> {
    pub(super) fn device(device: D) -> Self {
        PoolBacking::Device(device)
    }

    pub(super) fn custom(backing: CustomBacking) -> Self {
        PoolBacking::Custom(backing)
    }

    /// What a segment takes of the device: whole pages.
    fn whole(device: &D, bytes: u64) -> u64 {
        bytes.next_multiple_of(device.granularity())
    }
}

impl<D: Device> Backing for PoolBacking<D> {
    fn reserve(&mut self, bytes: u64) -> Result<u64, BackingError> {
        match self {
            PoolBacking::Device(d) => Ok(d.reserve(Self::whole(d, bytes))?.0),
            PoolBacking::Custom(b) => b.reserve(bytes),
        }
    }

    fn map(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        match self {
            PoolBacking::Device(d) => {
                let whole = Self::whole(d, bytes);
                d.map(DevicePtr(address), whole)?;
                d.manage(DevicePtr(address), whole);
                Ok(())
            }
            PoolBacking::Custom(b) => b.map(address, bytes),
        }
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        match self {
            PoolBacking::Device(d) => Ok(d.unmap(DevicePtr(address), Self::whole(d, bytes))?),
            PoolBacking::Custom(b) => b.unmap(address, bytes),
        }
    }

    fn release(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        match self {
            PoolBacking::Device(d) => Ok(d.release(DevicePtr(address), Self::whole(d, bytes))?),
            PoolBacking::Custom(b) => b.release(address, bytes),
        }
    }
}
