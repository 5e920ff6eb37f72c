//! The trait's methods: who belongs to whom is checked, the context made current, the driver asked.

use std::sync::Arc;

use cudarc::driver::sys;

use super::inner::{Current, Inner};
use super::stream::Handle;
use super::{CudaDevice, CudaEvent, CudaExec, CudaFunction, CudaGraph, CudaStream};
use super::{graph, quiesce, stream};
use crate::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, DeviceInfo, DevicePtr, GatherSlot,
    GraphInfo, Kernel, KernelArg, LaunchConfig, Mark, MemoryInfo, Result,
};

/// The most bytes that the driver is known to have copied aside from pageable memory before its call returns.
const STAGED: usize = 64 << 10;

impl CudaDevice {
    fn check_ours(&self, call: Call, what: &str, device: &Arc<Inner>) -> Result<()> {
        if Arc::ptr_eq(&self.inner, device) {
            return Ok(());
        }
        let detail = format!("the {what} belongs to another device");
        Err(DeviceError::new(call, Code::InvalidValue, detail))
    }

    /// Begins a call on a stream.
    fn enter_on<'a>(
        &'a self,
        call: Call,
        stream: &'a CudaStream,
    ) -> Result<(Current<'a>, &'a Handle)> {
        self.check_ours(call, "stream", &stream.0.device)?;
        Ok((self.inner.enter(call)?, &stream.0))
    }

    /// The same with an event.
    fn enter_with<'a>(
        &'a self,
        call: Call,
        event: &CudaEvent,
        stream: &'a CudaStream,
    ) -> Result<(Current<'a>, &'a Handle)> {
        self.check_ours(call, "event", &event.device)?;
        self.enter_on(call, stream)
    }

    fn enter_event(&self, call: Call, event: &CudaEvent) -> Result<Current<'_>> {
        self.check_ours(call, "event", &event.device)?;
        self.inner.enter(call)
    }

    /// Reads the code of a question whose answer may be "not yet".
    fn ready(&self, call: Call, code: u32, asked: &str) -> Result<bool> {
        if code == Code::NotReady.number() {
            return Ok(false);
        }
        self.inner.check(call, code, || asked.into()).map(|()| true)
    }
}

impl Device for CudaDevice {
    type Stream = CudaStream;
    type Event = CudaEvent;
    type Function = CudaFunction;
    type Graph = CudaGraph;
    type Exec = CudaExec;

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.inner.name.clone(),
            ordinal: self.inner.ordinal.cast_unsigned(),
        }
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let call = Call::MemoryInfo;
        let _current = self.inner.enter(call)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to live locals.
        let code = unsafe { (self.inner.driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.inner.check(call, code, || "free memory".into())?;
        Ok(MemoryInfo {
            free: free as u64,
            total: total as u64,
        })
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity
    }

    fn reserve(&self, bytes: u64) -> Result<DevicePtr> {
        self.inner.reserve(bytes)
    }

    fn release(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.inner.release(ptr, bytes)
    }

    fn map(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.inner.map(ptr, bytes)
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.inner.unmap(ptr, bytes)
    }

    /// Does nothing: the driver does not know who owns what.
    fn mark(&self, _: &CudaStream, _: DevicePtr, _: u64, _: Mark) {}

    fn create_stream(&self) -> Result<CudaStream> {
        self.inner.prepare_gather();
        stream::create(&self.inner)
    }

    fn default_stream(&self) -> CudaStream {
        stream::legacy(&self.inner)
    }

    fn stream_id(&self, stream: &CudaStream) -> u32 {
        stream.0.id
    }

    fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        let (_current, stream) = self.enter_on(Call::Synchronize, stream)?;
        self.inner.wait_for(Call::Synchronize, stream)
    }

    fn synchronize_device(&self) -> Result<()> {
        let call = Call::SynchronizeDevice;
        let _current = self.inner.enter(call)?;
        // SAFETY: no pointers; the context is current.
        let code = unsafe { (self.inner.driver.cuCtxSynchronize)() };
        self.inner
            .check(call, code, || "to wait for the device".into())
    }

    fn quiesce(&self) -> Result<()> {
        quiesce::quiesce(&self.inner)
    }

    fn query(&self, stream: &CudaStream) -> Result<bool> {
        let call = Call::Query;
        let (_current, stream) = self.enter_on(call, stream)?;
        // SAFETY: the handle keeps the stream alive.
        let code = unsafe { (self.inner.driver.cuStreamQuery)(stream.raw.0) };
        self.ready(call, code, "whether a stream's work has run")
    }

    fn create_event(&self) -> Result<CudaEvent> {
        stream::create_event(&self.inner)
    }

    fn record(&self, event: &CudaEvent, stream: &CudaStream) -> Result<()> {
        let call = Call::Record;
        let (_current, stream) = self.enter_with(call, event, stream)?;
        // SAFETY: the handles keep event and stream alive.
        let code = unsafe { (self.inner.driver.cuEventRecord)(event.raw.0, stream.raw.0) };
        self.inner
            .check(call, code, || format!("an event on stream {}", stream.id))
    }

    fn wait(&self, stream: &CudaStream, event: &CudaEvent) -> Result<()> {
        let call = Call::Wait;
        let (_current, stream) = self.enter_with(call, event, stream)?;
        // SAFETY: the handles keep event and stream alive.
        let code = unsafe { (self.inner.driver.cuStreamWaitEvent)(stream.raw.0, event.raw.0, 0) };
        self.inner.check(call, code, || {
            format!("that stream {} waits for an event", stream.id)
        })
    }

    fn query_event(&self, event: &CudaEvent) -> Result<bool> {
        let call = Call::QueryEvent;
        let _current = self.enter_event(call, event)?;
        // SAFETY: the handle keeps the event alive.
        let code = unsafe { (self.inner.driver.cuEventQuery)(event.raw.0) };
        self.ready(call, code, "whether an event was reached")
    }

    fn synchronize_event(&self, event: &CudaEvent) -> Result<()> {
        let call = Call::SynchronizeEvent;
        let _current = self.enter_event(call, event)?;
        // SAFETY: the handle keeps the event alive.
        let code = unsafe { (self.inner.driver.cuEventSynchronize)(event.raw.0) };
        self.inner
            .check(call, code, || "to wait for an event".into())
    }

    fn load(&self, kernel: &Kernel) -> Result<CudaFunction> {
        Ok(CudaFunction {
            function: self.inner.load_kernel(kernel)?,
            device: self.inner.clone(),
        })
    }

    fn launch(
        &self,
        stream: &CudaStream,
        function: &CudaFunction,
        config: LaunchConfig,
        args: &[KernelArg],
    ) -> Result<()> {
        let call = Call::Launch;
        self.check_ours(call, "function", &function.device)?;
        let (_current, stream) = self.enter_on(call, stream)?;
        self.inner
            .launch_function(stream, &function.function, config, args)
    }

    fn copy(&self, stream: &CudaStream, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        let call = Call::Copy;
        let (_current, stream) = self.enter_on(call, stream)?;
        if dst.0.abs_diff(src.0) < bytes {
            let apart = dst.0.abs_diff(src.0);
            let detail = format!(
                "{bytes} B are copied onto themselves, {apart} B further; source and target must not overlap"
            );
            return Err(DeviceError::new(call, Code::InvalidValue, detail));
        }
        if bytes == 0 {
            return self.inner.nothing_to_do(call, stream);
        }
        // SAFETY: no host memory is meant by either address; the handle keeps the stream alive.
        let code = unsafe {
            (self.inner.driver.cuMemcpyDtoDAsync_v2)(dst.0, src.0, bytes as usize, stream.raw.0)
        };
        self.inner
            .check(call, code, || format!("{bytes} B from {src:?} to {dst:?}"))
    }

    fn fill(&self, stream: &CudaStream, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        let call = Call::Fill;
        let (_current, stream) = self.enter_on(call, stream)?;
        if bytes == 0 {
            return self.inner.nothing_to_do(call, stream);
        }
        // SAFETY: no host memory is meant by the address; the handle keeps the stream alive.
        let code = unsafe {
            (self.inner.driver.cuMemsetD8Async)(dst.0, value, bytes as usize, stream.raw.0)
        };
        self.inner
            .check(call, code, || format!("{bytes} B at {dst:?}"))
    }

    /// The driver copies pageable memory aside before its call returns, but says so only of small copies, and not where the device
    /// reads such memory itself. Otherwise the stream is waited for. Captures of other streams do not mind either.
    fn write(&self, stream: &CudaStream, dst: DevicePtr, src: &[u8]) -> Result<()> {
        let call = Call::Write;
        let (_current, stream) = self.enter_on(call, stream)?;
        self.inner.refuse_pageable(call, stream)?;
        if src.is_empty() {
            return Ok(());
        }
        let _relaxed = self.inner.relax(call)?;
        // SAFETY: the source is live for its length until this function returns, and has been read by then.
        let code = unsafe {
            (self.inner.driver.cuMemcpyHtoDAsync_v2)(
                dst.0,
                src.as_ptr().cast(),
                src.len(),
                stream.raw.0,
            )
        };
        self.inner
            .check(call, code, || format!("{} B to {dst:?}", src.len()))?;
        if src.len() > STAGED || self.inner.reads_pageable {
            self.inner.wait_for(call, stream)?;
        }
        Ok(())
    }

    fn read(&self, stream: &CudaStream, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        let call = Call::Read;
        let (_current, stream) = self.enter_on(call, stream)?;
        self.inner.refuse_pageable(call, stream)?;
        // Waiting is what a capture elsewhere may mind. It is done before the copy: once that is enqueued, nothing may
        // keep this function from waiting for it.
        self.inner.wait_for(call, stream)?;
        if dst.is_empty() {
            return Ok(());
        }
        let _relaxed = self.inner.relax(call)?;
        // SAFETY: the target is live and exclusive for its length until this function returns, and is waited for by then: the
        // mode is relaxed, so the wait is refused only if the stream began to capture meanwhile (then the copy was
        // captured, and the capture is broken now), or fails because the context is lost, which runs nothing any more.
        let code = unsafe {
            (self.inner.driver.cuMemcpyDtoHAsync_v2)(
                dst.as_mut_ptr().cast(),
                src.0,
                dst.len(),
                stream.raw.0,
            )
        };
        self.inner
            .check(call, code, || format!("{} B from {src:?}", dst.len()))?;
        self.inner.wait_for(call, stream)
    }

    fn gather(
        &self,
        stream: &CudaStream,
        slots: &[GatherSlot],
        sources: &[DevicePtr],
    ) -> Result<()> {
        let call = Call::Gather;
        if slots.len() != sources.len() {
            let detail = format!(
                "{} sources are given for {} slots; give one for each",
                sources.len(),
                slots.len()
            );
            return Err(DeviceError::new(call, Code::InvalidValue, detail));
        }
        let (_current, stream) = self.enter_on(call, stream)?;
        if slots.is_empty() {
            return self.inner.nothing_to_do(call, stream);
        }
        self.inner.launch_gather(stream, slots, sources)
    }

    fn begin_capture(&self, stream: &CudaStream, mode: CaptureMode) -> Result<()> {
        let call = Call::BeginCapture;
        let (_current, stream) = self.enter_on(call, stream)?;
        self.inner.prepare_gather();
        let mode = match mode {
            CaptureMode::Global => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => {
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            }
            CaptureMode::Relaxed => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        };
        // Known before it begins, so that nobody takes the stream for one that does not capture.
        stream.capture_begins();
        // SAFETY: the handle keeps the stream alive.
        let code = unsafe { (self.inner.driver.cuStreamBeginCapture_v2)(stream.raw.0, mode) };
        let begun = self
            .inner
            .check(call, code, || format!("a capture on stream {}", stream.id));
        if begun.is_err() {
            self.inner.note_end(stream);
        }
        begun
    }

    /// Costs no call of the driver as long as every capture is begun and ended through this device, and no stream or event is shared with others.
    fn capture_status(&self, stream: &CudaStream) -> Result<CaptureStatus> {
        let call = Call::CaptureStatus;
        self.check_ours(call, "stream", &stream.0.device)?;
        if stream.0.id != 0 && self.inner.nothing_captures() {
            return Ok(CaptureStatus::None);
        }
        let _current = self.inner.current(call)?;
        self.inner.status(call, &stream.0)
    }

    fn end_capture(&self, stream: &CudaStream) -> Result<CudaGraph> {
        self.check_ours(Call::EndCapture, "stream", &stream.0.device)?;
        graph::end_capture(&self.inner, &stream.0)
    }

    fn graph_info(&self, graph: &CudaGraph) -> Result<GraphInfo> {
        Ok(graph.0.info)
    }

    fn instantiate(&self, graph: &CudaGraph) -> Result<CudaExec> {
        self.check_ours(Call::Instantiate, "graph", &graph.0.device)?;
        graph::instantiate(&graph.0)
    }

    fn launch_graph(
        &self,
        exec: &CudaExec,
        stream: &CudaStream,
        sources: &[DevicePtr],
    ) -> Result<()> {
        self.check_ours(Call::LaunchGraph, "executable", &exec.device)?;
        let (_current, stream) = self.enter_on(Call::LaunchGraph, stream)?;
        exec.launch(stream, sources)
    }
}
