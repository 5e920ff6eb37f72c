//! What CUDA there is on this machine, or why there is none.

use std::fmt;

use super::codes;
use super::driver::{Driver, OLDEST};
use crate::device::{Call, Code, DeviceError};

/// Why a CUDA device cannot be had. Nothing about it panics: a machine without a GPU is an ordinary one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// There is no CUDA driver.
    #[error("there is no CUDA driver on this machine ({reason})")]
    NoDriver {
        /// What the dynamic loader said.
        reason: String,
    },
    /// The driver is older than CUDA 12.4.
    #[error(
        "the CUDA driver is of version {}, and at least {} is needed{}",
        Version(*.version),
        Version(OLDEST),
        .missing.map_or(String::new(), |name| format!(" ({name} is missing)"))
    )]
    OldDriver {
        /// Its version: 1000 * major + 10 * minor, or 0 where it does not say.
        version: i32,
        /// The first function that it lacks.
        missing: Option<&'static str>,
    },
    /// There is a driver, but no such device.
    #[error("there is no CUDA device {ordinal}: the driver shows {devices}")]
    NoDevice {
        /// The device that was asked for.
        ordinal: u32,
        /// How many there are.
        devices: u32,
    },
    /// The driver refused.
    #[error(transparent)]
    Failed(#[from] DeviceError),
}

impl CudaUnavailable {
    /// A call of the driver failed while a device was opened.
    pub(super) fn failed(driver: &Driver, call: &'static str, number: u32) -> Self {
        let detail = codes::text(driver, number);
        CudaUnavailable::Failed(DeviceError::new(
            Call::Driver(call),
            codes::code(number),
            detail,
        ))
    }
}

/// For programs that hold one kind of error.
impl From<CudaUnavailable> for DeviceError {
    fn from(unavailable: CudaUnavailable) -> Self {
        let code = match &unavailable {
            CudaUnavailable::NoDriver { .. } => Code::NotFound,
            CudaUnavailable::OldDriver { .. } => Code::NotSupported,
            CudaUnavailable::NoDevice { .. } => Code::NoDevice,
            CudaUnavailable::Failed(error) => return error.clone(),
        };
        DeviceError::new(Call::Driver("cuInit"), code, unavailable.to_string())
    }
}

struct Version(i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// What CUDA there is on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probe {
    /// The driver's version: 1000 * major + 10 * minor.
    pub driver: i32,
    /// How many devices it shows.
    pub devices: u32,
}

/// Looks for a driver and counts its devices, without making a context.
///
/// # Errors
/// Why there is no device. A driver without a device is [`CudaUnavailable::NoDevice`].
pub fn probe() -> Result<Probe, CudaUnavailable> {
    let driver = Driver::get()?;
    match driver.device_count()? {
        0 => Err(CudaUnavailable::NoDevice {
            ordinal: 0,
            devices: 0,
        }),
        devices => Ok(Probe {
            driver: driver.version(),
            devices,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CudaDevice;
    use super::*;

    #[test]
    fn a_machine_without_cuda_says_so() {
        match probe() {
            Ok(there) => {
                assert!(there.driver >= OLDEST && there.devices > 0);
                let beyond = CudaDevice::new(there.devices).unwrap_err();
                assert_eq!(
                    beyond,
                    CudaUnavailable::NoDevice {
                        ordinal: there.devices,
                        devices: there.devices
                    }
                );
            }
            Err(why) => {
                let opened = CudaDevice::new(0).unwrap_err();
                assert_eq!(opened, why);
                let error = DeviceError::from(opened);
                if let CudaUnavailable::NoDriver { reason } = why {
                    assert!(reason.contains("cuda"), "{reason}");
                    assert_eq!(error.code, Code::NotFound);
                }
            }
        }
    }

    #[test]
    fn an_old_driver_is_named() {
        let old = CudaUnavailable::OldDriver {
            version: 11_080,
            missing: Some("cuFuncGetParamInfo"),
        };
        assert_eq!(
            old.to_string(),
            "the CUDA driver is of version 11.8, and at least 12.4 is needed (cuFuncGetParamInfo is missing)"
        );
    }
}
