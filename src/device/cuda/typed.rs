//! Tensors as cudarc's own calls take them.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::AnyBitPattern;
use cudarc::driver::{
    DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop, sys,
};

use super::{CudaDevice, CudaStream};
use crate::device::{Call, Code, DeviceError};
use crate::error::Result;
use crate::storage::Tensor;

/// A tensor's bytes as elements that are read, for cudarc's calls: copies, cuBLAS, NCCL, kernel arguments. See
/// [`Tensor::typed`].
pub struct TypedView<'t, T>(Range<'t, T>);

/// A tensor's bytes as elements that are written. See [`Tensor::typed_mut`].
pub struct TypedViewMut<'t, T>(Range<'t, T>);

struct Range<'t, T> {
    ptr: sys::CUdeviceptr,
    len: usize,
    stream: &'t Arc<cudarc::driver::CudaStream>,
    /// The handle that keeps the memory.
    _tensor: PhantomData<&'t Tensor<CudaDevice>>,
    _elements: PhantomData<fn() -> T>,
}

impl Tensor<CudaDevice> {
    /// The tensor's bytes as elements, for cudarc's own calls.
    ///
    /// The view implements cudarc's [`DeviceSlice`] and [`DevicePtr`], and is taken as a kernel's argument by
    /// [`LaunchArgs::arg`](PushKernelArg::arg). While it lives, so does the memory.
    ///
    /// cudarc is told of no event to wait for and none to record, so its event tracking adds nothing for this memory: not the waits that break a
    /// capture, but no order between streams either. As for every tensor, work belongs on the stream that the memory is for, or ordered with it; and
    /// once the handle is dropped, that stream's later work may have the memory. [`DeviceSlice::stream`] is `stream`. A handle that goes stale while
    /// a view lives, because a step was dropped and another run took the memory, reads that run's bytes; and one that was moved reads from where it lay. The view
    /// has the address that [`ptr`](Tensor::ptr) gave, with the same rule: the token of the output's step protects it.
    ///
    /// # Errors
    /// [`Error::Stale`](crate::Error::Stale); [`Code::InvalidValue`] where the bytes are no whole number of aligned elements, or the stream belongs to
    /// another context than the tensor.
    pub fn typed<'t, T: DeviceRepr + AnyBitPattern>(
        &'t self,
        stream: &'t CudaStream,
    ) -> Result<TypedView<'t, T>> {
        Ok(TypedView(self.elements(stream)?))
    }

    /// The same, to be written: the view implements [`DevicePtrMut`] too. Other handles on the memory, and other views, are not kept from
    /// reading it meanwhile: as with [`write`](Tensor::write), only the order on streams says what they see.
    ///
    /// # Errors
    /// As [`typed`](Tensor::typed).
    pub fn typed_mut<'t, T: DeviceRepr + AnyBitPattern>(
        &'t self,
        stream: &'t CudaStream,
    ) -> Result<TypedViewMut<'t, T>> {
        Ok(TypedViewMut(self.elements(stream)?))
    }

    fn elements<'t, T>(&'t self, stream: &'t CudaStream) -> Result<Range<'t, T>> {
        let wrong =
            |detail: String| DeviceError::new(Call::Driver("typed"), Code::InvalidValue, detail);
        let device = self.storage().and_then(|s| s.memory()).map(|m| m.device());
        if device.is_some_and(|device| device.inner.raw != stream.0.device.raw) {
            let detail = "the stream belongs to another context than the tensor";
            return Err(wrong(detail.into()).into());
        }
        let ptr = self.ptr()?.0;
        let (bytes, align) = (self.bytes(), align_of::<T>() as u64);
        let size = size_of::<T>() as u64;
        if size == 0 || !bytes.is_multiple_of(size) || !ptr.is_multiple_of(align) {
            let detail = format!(
                "{bytes} B at {ptr:#x} are no whole number of elements of {size} B, aligned to {align} B"
            );
            return Err(wrong(detail).into());
        }
        let len = usize::try_from(bytes / size)
            .map_err(|_| wrong(format!("{bytes} B are too many to be counted")))?;
        Ok(Range {
            ptr,
            len,
            stream: stream.cudarc(),
            _tensor: PhantomData,
            _elements: PhantomData,
        })
    }
}

macro_rules! view {
    ($name:ident) => {
        impl<T> DeviceSlice<T> for $name<'_, T> {
            fn len(&self) -> usize {
                self.0.len
            }

            fn stream(&self) -> &Arc<cudarc::driver::CudaStream> {
                self.0.stream
            }
        }

        impl<T> DevicePtr<T> for $name<'_, T> {
            /// Waits for nothing and records nothing.
            fn device_ptr<'a>(
                &'a self,
                _: &'a cudarc::driver::CudaStream,
            ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
                (self.0.ptr, SyncOnDrop::Record(None))
            }
        }

        impl<T> fmt::Debug for $name<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let element = std::any::type_name::<T>();
                write!(
                    f,
                    "{}({:#x}: [{element}; {}])",
                    stringify!($name),
                    self.0.ptr,
                    self.0.len
                )
            }
        }
    };
}

view!(TypedView);
view!(TypedViewMut);

impl<T> DevicePtrMut<T> for TypedViewMut<'_, T> {
    /// Waits for nothing and records nothing.
    fn device_ptr_mut<'a>(
        &'a mut self,
        _: &'a cudarc::driver::CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.0.ptr, SyncOnDrop::Record(None))
    }
}

// SAFETY: what is pushed is a reference to the address, which lives as long as the arguments, and is how a kernel takes a pointer.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b TypedView<'_, T>> for LaunchArgs<'a> {
    #[inline(always)] // as the trait asks
    fn arg(&mut self, arg: &'b TypedView<'_, T>) -> &mut Self {
        PushKernelArg::<&'b sys::CUdeviceptr>::arg(self, &arg.0.ptr)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut TypedViewMut<'_, T>> for LaunchArgs<'a> {
    #[inline(always)] // as the trait asks
    fn arg(&mut self, arg: &'b mut TypedViewMut<'_, T>) -> &mut Self {
        PushKernelArg::<&'b sys::CUdeviceptr>::arg(self, &arg.0.ptr)
    }
}
