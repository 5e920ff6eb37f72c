//! Padded inputs: a batch of any size in a graph that was recorded for more, with the rest filled.
//!
//! A graph works on as many rows as it was recorded with. A smaller batch leaves the rest of the input as some earlier batch wrote it, and a kernel that takes
//! those values for indices goes wherever they say. So the rest gets a value of the caller's, each time.

use std::fmt;
use std::marker::PhantomData;

use crate::allocator::Allocator;
use crate::device::{Call, CaptureStatus, Code, Device, DeviceError, Pattern};
use crate::error::{Error, Result};
use crate::storage::Tensor;

/// The numbers of rows that there are graphs for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// Ascending, none twice, none zero, at least one.
    sizes: Box<[u64]>,
}

impl Buckets {
    /// Buckets of these sizes, in rows, in whatever order.
    ///
    /// # Errors
    /// [`Error::Padding`] where there is none, or one of no rows.
    pub fn new(sizes: impl IntoIterator<Item = u64>) -> Result<Self> {
        let mut sizes: Vec<u64> = sizes.into_iter().collect();
        sizes.sort_unstable();
        sizes.dedup();
        match sizes.first() {
            None => Err(Error::Padding(
                "there is no bucket: give at least one size".into(),
            )),
            Some(0) => Err(Error::Padding(
                "a bucket of 0 rows holds nothing: leave it out".into(),
            )),
            Some(_) => Ok(Buckets {
                sizes: sizes.into(),
            }),
        }
    }

    /// The smallest bucket that as many rows fit into.
    #[must_use]
    pub fn fit(&self, rows: u64) -> Option<u64> {
        let at = self.sizes.partition_point(|size| *size < rows);
        self.sizes.get(at).copied()
    }

    /// All of them, ascending.
    #[must_use]
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// The largest.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.sizes.last().copied().unwrap_or(0)
    }
}

/// One input of a function, which is passed padded to a bucket's size.
///
/// It has memory of its own for the largest bucket, and each batch is written there: the rows, then the fill value up to the bucket's end. All begin at the same address, so the
/// function declares the input [static](crate::FunctionSpec::static_input) (with a [key](Padded::key) for each bucket), and it is not copied once more. Pad on the stream that the run is called
/// on: the next batch overwrites this one after the work of that stream. It cannot come before the [`Padded`] of this one is dropped, so keep that until the run has been called; threads
/// that share an input hold its lock so long.
///
/// ```
/// # use std::sync::Arc;
/// # use cudagraph_trees::device::{Device, host::HostDevice, kernels::KernelSet};
/// # use cudagraph_trees::{Allocator, Buckets, FunctionSpec, GraphTrees, PaddedInput, lend};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = HostDevice::new();
/// # let allocator = Allocator::new(device.clone())?;
/// # let trees = GraphTrees::new(&allocator)?;
/// # let kernels = Arc::new(KernelSet::load(&device)?);
/// # let stream = device.create_stream()?;
/// let double = trees.register(FunctionSpec::new("double").static_input(0), move |recorder, mut inputs| {
///     let x = inputs.take(0)?;
///     let out = recorder.alloc(x.bytes())?;
///     kernels.scale_add(recorder.device(), recorder.stream(), out.ptr()?, x.ptr()?, x.bytes() / 4, 2.0, 0.0)?;
///     Ok(vec![out])
/// })?;
/// let mut input = PaddedInput::new(&allocator, &stream, Buckets::new([1, 2, 4, 8])?, 4, -1.0_f32)?;
/// let x = allocator.alloc(&stream, 3 * 4)?; // three rows of four bytes
/// # x.write(&device, &stream, &[1.0_f32, 2.0, 3.0].map(f32::to_le_bytes).concat())?;
/// let step = trees.step();
/// let padded = input.pad(&stream, &x)?; // three rows, and one of the fill value
/// let out = trees.run(&double, &step, &[padded.key()], &stream, &mut [lend(padded.tensor())])?;
/// let rows = padded.cut(&out[0])?; // three rows again
/// assert_eq!((padded.bucket(), rows.bytes()), (4, 12));
/// # assert_eq!(rows.read(&device, &stream)?, [2.0_f32, 4.0, 6.0].map(f32::to_le_bytes).concat());
/// # assert_eq!(out[0].read(&device, &stream)?[12..], (-2.0_f32).to_le_bytes());
/// # Ok(())
/// # }
/// ```
pub struct PaddedInput<D: Device> {
    allocator: Allocator<D>,
    buckets: Buckets,
    row_bytes: u64,
    fill: Pattern,
    place: Tensor<D>,
    /// Where it was padded last: a batch that comes on another stream waits for the work there.
    last: D::Stream,
    event: D::Event,
}

/// A batch in its bucket, until the next one.
pub struct Padded<'a, D: Device> {
    tensor: Tensor<D>,
    rows: u64,
    bucket: u64,
    _input: PhantomData<&'a mut PaddedInput<D>>,
}

impl<D: Device> PaddedInput<D> {
    /// An input of rows of `row_bytes` each, of which those that a batch leaves are filled with `fill`. Its memory is of the allocator's default pool.
    ///
    /// # Errors
    /// [`Error::Padding`] where a row is no whole number of fill values; [`Error::Pool`], [`Error::ForeignStream`]; the device's.
    #[track_caller]
    pub fn new(
        allocator: &Allocator<D>,
        stream: &D::Stream,
        buckets: Buckets,
        row_bytes: u64,
        fill: impl Into<Pattern>,
    ) -> Result<Self> {
        let fill = fill.into();
        if row_bytes == 0 || !row_bytes.is_multiple_of(fill.bytes()) {
            let size = fill.bytes();
            return Err(Error::Padding(format!(
                "a row of {row_bytes} B is no whole number of fill values of {size} B each"
            )));
        }
        let largest = buckets.largest();
        let bytes = largest.checked_mul(row_bytes).ok_or_else(|| {
            Error::Padding(format!(
                "{largest} rows of {row_bytes} B are more than can be counted"
            ))
        })?;
        Ok(PaddedInput {
            place: allocator.default_pool().alloc_at(
                stream,
                bytes,
                std::panic::Location::caller(),
            )?,
            event: allocator.device().create_event()?,
            allocator: allocator.clone(),
            buckets,
            row_bytes,
            fill,
            last: stream.clone(),
        })
    }

    /// Its buckets.
    #[must_use]
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// Copies a batch in, and fills the rest of its bucket, in stream order, after what was enqueued for the batch before (which it overwrites: that has been run by then, and is
    /// not run again). A batch of no rows is all fill.
    ///
    /// # Errors
    /// [`Error::NoBucket`] where the batch is larger than the largest bucket; [`Error::Padding`] where it is no whole number of rows; [`Error::Stale`],
    /// [`Error::ForeignTensor`], [`Error::ForeignStream`]; the device's, with [`Code::StreamCaptureIsolation`] where the stream of the batch before captures now.
    ///
    /// The tensor may be dropped when this has returned, whatever stream it is of: its memory is not used again before it has been read.
    pub fn pad(&mut self, stream: &D::Stream, batch: &Tensor<D>) -> Result<Padded<'_, D>> {
        if !batch.bytes().is_multiple_of(self.row_bytes) {
            return Err(Error::Padding(format!(
                "a batch of {} B is no whole number of rows of {} B",
                batch.bytes(),
                self.row_bytes
            )));
        }
        let device = self.allocator.device().clone();
        self.pad_with(stream, batch.bytes() / self.row_bytes, |rows| {
            let _stays = batch.begin_copy(&device, stream)?;
            if rows.is_empty() || batch.address() == rows.address() {
                return Ok(());
            }
            if let Some(storage) = batch.storage() {
                storage.used_by(stream, None);
            }
            Ok(device.copy(stream, rows.address(), batch.address(), rows.bytes())?)
        })
    }

    /// The same for a batch that `write` writes to its place: by a copy [from pinned memory](Tensor::copy_from_pinned), say, or a kernel. It gets the rows of the batch (the empty
    /// tensor where there are none), and enqueues its work on `stream`.
    ///
    /// # Errors
    /// As [`pad`](PaddedInput::pad), and those of `write`.
    pub fn pad_with(
        &mut self,
        stream: &D::Stream,
        rows: u64,
        write: impl FnOnce(&Tensor<D>) -> Result<()>,
    ) -> Result<Padded<'_, D>> {
        let bucket = self.buckets.fit(rows).ok_or(Error::NoBucket {
            rows,
            largest: self.buckets.largest(),
        })?;
        self.come_after(stream)?;
        let tensor = self.place.view(0, bucket * self.row_bytes)?;
        let bytes = rows * self.row_bytes;
        write(&tensor.view(0, bytes)?)?;
        self.allocator.device().fill_pattern(
            stream,
            tensor.address().offset(bytes),
            self.fill,
            tensor.bytes() - bytes,
        )?;
        Ok(Padded {
            tensor,
            rows,
            bucket,
            _input: PhantomData,
        })
    }

    /// Makes a stream wait for the work of the one that had the batch before. A stream that captures has an order of its own.
    fn come_after(&mut self, stream: &D::Stream) -> Result<()> {
        let device = self.allocator.device();
        if !device.owns(stream) {
            return Err(Error::ForeignStream);
        }
        if self.last == *stream || device.capture_status(stream)? != CaptureStatus::None {
            return Ok(());
        }
        if device.capture_status(&self.last)? != CaptureStatus::None {
            let detail = "the batch before was padded on a stream that captures now, and this one is to come after its work: end the capture first";
            let code = Code::StreamCaptureIsolation;
            return Err(DeviceError::new(Call::Wait, code, detail).into());
        }
        self.place.record_stream(stream)?;
        device.record(&self.event, &self.last)?;
        device.wait(stream, &self.event)?;
        self.last = stream.clone();
        Ok(())
    }
}

impl<D: Device> Padded<'_, D> {
    /// The whole bucket: the input to be passed.
    #[must_use]
    pub fn tensor(&self) -> &Tensor<D> {
        &self.tensor
    }

    /// How many rows are the batch's.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// How many rows the bucket has.
    #[must_use]
    pub fn bucket(&self) -> u64 {
        self.bucket
    }

    /// The bucket as a number for a function's key.
    #[must_use]
    pub fn key(&self) -> i64 {
        self.bucket.cast_signed()
    }

    /// Of an output of the run, which has as many rows as the bucket, those of the batch: a view.
    ///
    /// # Errors
    /// [`Error::Padding`] where the output does not divide into as many rows; [`Error::Stale`].
    #[track_caller]
    pub fn cut(&self, output: &Tensor<D>) -> Result<Tensor<D>> {
        let bytes = output.bytes();
        if !bytes.is_multiple_of(self.bucket) {
            let bucket = self.bucket;
            return Err(Error::Padding(format!(
                "an output of {bytes} B does not divide into {bucket} rows, as many as the bucket has"
            )));
        }
        output.view(0, bytes / self.bucket * self.rows)
    }
}

impl<D: Device> fmt::Debug for PaddedInput<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PaddedInput")
            .field("buckets", &self.buckets.sizes())
            .field("row_bytes", &self.row_bytes)
            .field("fill", &self.fill)
            .finish_non_exhaustive()
    }
}

impl<D: Device> fmt::Debug for Padded<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Padded")
            .field("tensor", &self.tensor)
            .field("rows", &self.rows)
            .field("bucket", &self.bucket)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_bucket_is_taken() {
        let buckets = Buckets::new([8, 1, 4, 2, 4]).unwrap();
        assert_eq!((buckets.sizes(), buckets.largest()), (&[1, 2, 4, 8][..], 8));
        let fit = [0, 1, 2, 3, 4, 5, 8, 9].map(|rows| buckets.fit(rows));
        assert_eq!(
            fit,
            [
                Some(1),
                Some(1),
                Some(2),
                Some(4),
                Some(4),
                Some(8),
                Some(8),
                None
            ]
        );
        for wrong in [vec![], vec![0, 3]] {
            assert!(matches!(Buckets::new(wrong), Err(Error::Padding(_))));
        }
    }
}
