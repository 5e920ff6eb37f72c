//! The trait's methods: who belongs to whom is checked, the context made current, the driver asked.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::inner::{Current, Inner};
use super::stream::Handle;
use super::{CudaDevice, CudaEvent, CudaExec, CudaFunction, CudaGraph, CudaPinned, CudaStream};
use super::{conditional, dot, event, fill, graph, pinned, quiesce, stream};
use crate::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, DeviceInfo, DevicePtr, GatherSlot,
    GraphInfo, Kernel, KernelArg, LaunchConfig, Mark, MemoryInfo, Pattern, Result,
};
use crate::sync::lock;

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

    /// Makes a call on a stream. Where the stream captures, it is one of the capture's operations, or refused as such.
    fn on<T>(
        &self,
        call: Call,
        stream: &CudaStream,
        f: impl FnOnce(&Handle) -> Result<T>,
    ) -> Result<T> {
        let (_current, stream) = self.enter_on(call, stream)?;
        let result = match call {
            // Refused on any capturing stream, whose capture is left alone.
            Call::Read | Call::Write => Ok(()),
            _ => self.inner.refuse_beside_body(call, stream),
        };
        let result = result.and_then(|()| f(stream));
        self.inner.answer(call, stream, result)
    }

    /// Begins a call on a stream with an event.
    fn enter_with<'a>(
        &'a self,
        call: Call,
        event: &CudaEvent,
        stream: &'a CudaStream,
    ) -> Result<(Current<'a>, &'a Handle)> {
        self.check_ours(call, "event", &event.held.device)?;
        self.enter_on(call, stream)
    }

    fn enter_event(&self, call: Call, event: &CudaEvent) -> Result<Current<'_>> {
        self.check_ours(call, "event", &event.held.device)?;
        self.inner.enter(call)
    }

    /// Completes the error of a call of the host about an event.
    fn refused_event(&self, event: &CudaEvent, error: DeviceError) -> DeviceError {
        let capture = event.capture.load(Ordering::Relaxed);
        self.inner.refused(None, capture, error)
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
    type Pinned = CudaPinned;

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.inner.name.clone(),
            ordinal: self.inner.ordinal.cast_unsigned(),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    fn owns(&self, stream: &CudaStream) -> bool {
        Arc::ptr_eq(&self.inner, &stream.0.device)
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

    fn alloc_pinned(&self, bytes: u64) -> Result<CudaPinned> {
        pinned::alloc(&self.inner, bytes)
    }

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
        let call = Call::Synchronize;
        self.on(call, stream, |stream| self.inner.wait_for(call, stream))
    }

    fn synchronize_device(&self) -> Result<()> {
        let call = Call::SynchronizeDevice;
        let _current = self.inner.enter(call)?;
        // SAFETY: no pointers; the context is current.
        let code = unsafe { (self.inner.driver.cuCtxSynchronize)() };
        self.inner
            .check(call, code, || "to wait for the device".into())
            .map_err(|error| self.inner.refused(None, 0, error))
    }

    fn quiesce(&self) -> Result<()> {
        quiesce::quiesce(&self.inner)
    }

    fn query(&self, stream: &CudaStream) -> Result<bool> {
        let call = Call::Query;
        self.on(call, stream, |stream| {
            // SAFETY: the handle keeps the stream alive.
            let code = unsafe { (self.inner.driver.cuStreamQuery)(stream.raw.0) };
            self.ready(call, code, "whether a stream's work has run")
        })
    }

    fn create_event(&self) -> Result<CudaEvent> {
        stream::create_event(&self.inner, Call::CreateEvent, false)
    }

    fn create_timed_event(&self) -> Result<CudaEvent> {
        stream::create_event(&self.inner, Call::CreateTimedEvent, true)
    }

    fn record(&self, event: &CudaEvent, stream: &CudaStream) -> Result<()> {
        let call = Call::Record;
        let (_current, stream) = self.enter_with(call, event, stream)?;
        if let Err(error) = self.inner.refuse_beside_body(call, stream) {
            return self.inner.answer(call, stream, Err(error));
        }
        event::record(&self.inner, call, event, stream)
    }

    fn wait(&self, stream: &CudaStream, event: &CudaEvent) -> Result<()> {
        let call = Call::Wait;
        let (_current, stream) = self.enter_with(call, event, stream)?;
        if let Err(error) = self.inner.refuse_beside_body(call, stream) {
            return self.inner.answer(call, stream, Err(error));
        }
        event::wait(&self.inner, call, stream, event)
    }

    fn record_external(&self, event: &CudaEvent, stream: &CudaStream) -> Result<()> {
        let call = Call::RecordExternal;
        let (_current, stream) = self.enter_with(call, event, stream)?;
        if let Err(error) = self.inner.refuse_beside_body(call, stream) {
            return self.inner.answer(call, stream, Err(error));
        }
        match self.inner.status(call, stream)? {
            CaptureStatus::None => event::record(&self.inner, call, event, stream),
            _ => event::record_node(&self.inner, call, event, stream),
        }
    }

    fn wait_external(&self, stream: &CudaStream, event: &CudaEvent) -> Result<()> {
        let call = Call::WaitExternal;
        let (_current, stream) = self.enter_with(call, event, stream)?;
        match self.inner.status(call, stream)? {
            CaptureStatus::None => event::wait(&self.inner, call, stream, event),
            _ => event::wait_node(&self.inner, call, stream, event),
        }
    }

    fn elapsed(&self, start: &CudaEvent, end: &CudaEvent) -> Result<f32> {
        let call = Call::Elapsed;
        self.check_ours(call, "event", &end.held.device)?;
        let _current = self.enter_event(call, start)?;
        event::elapsed(&self.inner, start, end)
    }

    fn query_event(&self, event: &CudaEvent) -> Result<bool> {
        let call = Call::QueryEvent;
        let _current = self.enter_event(call, event)?;
        // SAFETY: the handle keeps the event alive.
        let code = unsafe { (self.inner.driver.cuEventQuery)(event.handle()) };
        self.ready(call, code, "whether an event was reached")
            .map_err(|error| self.refused_event(event, error))
    }

    fn poll_event(&self, event: &CudaEvent) -> Result<bool> {
        let call = Call::PollEvent;
        let _current = self.enter_event(call, event)?;
        let _relaxed = self.inner.relax(call)?;
        // SAFETY: the handle keeps the event alive.
        let code = unsafe { (self.inner.driver.cuEventQuery)(event.handle()) };
        self.ready(call, code, "whether an event was reached")
    }

    fn synchronize_event(&self, event: &CudaEvent) -> Result<()> {
        let call = Call::SynchronizeEvent;
        let _current = self.enter_event(call, event)?;
        // SAFETY: the handle keeps the event alive.
        let code = unsafe { (self.inner.driver.cuEventSynchronize)(event.handle()) };
        self.inner
            .check(call, code, || "to wait for an event".into())
            .map_err(|error| self.refused_event(event, error))
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
        self.on(call, stream, |stream| {
            self.inner
                .launch_function(stream, &function.function, config, args)
        })
    }

    fn copy(&self, stream: &CudaStream, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        let call = Call::Copy;
        self.on(call, stream, |stream| {
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
        })
    }

    fn fill(&self, stream: &CudaStream, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        let call = Call::Fill;
        self.on(call, stream, |stream| {
            if bytes == 0 {
                return self.inner.nothing_to_do(call, stream);
            }
            // SAFETY: no host memory is meant by the address; the handle keeps the stream alive.
            let code = unsafe {
                (self.inner.driver.cuMemsetD8Async)(dst.0, value, bytes as usize, stream.raw.0)
            };
            self.inner
                .check(call, code, || format!("{bytes} B at {dst:?}"))
        })
    }

    fn fill_pattern(
        &self,
        stream: &CudaStream,
        dst: DevicePtr,
        pattern: Pattern,
        bytes: u64,
    ) -> Result<()> {
        self.on(Call::FillPattern, stream, |stream| {
            fill::fill(&self.inner, stream, dst, pattern, bytes)
        })
    }

    /// The driver copies pageable memory aside before its call returns, but says so only of small copies, and not where the device
    /// reads such memory itself. Otherwise the stream is waited for. Captures of other streams do not mind either.
    fn write(&self, stream: &CudaStream, dst: DevicePtr, src: &[u8]) -> Result<()> {
        let call = Call::Write;
        self.on(call, stream, |stream| {
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
        })
    }

    fn read(&self, stream: &CudaStream, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        let call = Call::Read;
        self.on(call, stream, |stream| {
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
        })
    }

    fn copy_from_pinned(
        &self,
        stream: &CudaStream,
        dst: DevicePtr,
        src: &CudaPinned,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        let call = Call::CopyFromPinned;
        self.check_ours(call, "pinned memory", src.device())?;
        self.on(call, stream, |stream| {
            src.copy_out(stream, dst, offset, bytes)
        })
    }

    fn copy_to_pinned(
        &self,
        stream: &CudaStream,
        dst: &CudaPinned,
        offset: u64,
        src: DevicePtr,
        bytes: u64,
    ) -> Result<()> {
        let call = Call::CopyToPinned;
        self.check_ours(call, "pinned memory", dst.device())?;
        self.on(call, stream, |stream| {
            dst.copy_in(stream, offset, src, bytes)
        })
    }

    fn gather(
        &self,
        stream: &CudaStream,
        slots: &[GatherSlot],
        sources: &[DevicePtr],
    ) -> Result<()> {
        let call = Call::Gather;
        self.on(call, stream, |stream| {
            if slots.len() != sources.len() {
                let detail = format!(
                    "{} sources are given for {} slots; give one for each",
                    sources.len(),
                    slots.len()
                );
                return Err(DeviceError::new(call, Code::InvalidValue, detail));
            }
            if slots.is_empty() {
                return self.inner.nothing_to_do(call, stream);
            }
            self.inner.launch_gather(stream, slots, sources)
        })
    }

    fn begin_capture(&self, stream: &CudaStream, mode: CaptureMode) -> Result<()> {
        let call = Call::BeginCapture;
        let (_current, handle) = self.enter_on(call, stream)?;
        self.inner.prepare_gather();
        let raw_mode = stream::raw_mode(mode);
        // Known before it begins, so that nobody takes the stream for one that does not capture.
        handle.capture_begins();
        // SAFETY: the handle keeps the stream alive.
        let code = unsafe { (self.inner.driver.cuStreamBeginCapture_v2)(handle.raw.0, raw_mode) };
        let begun = self
            .inner
            .check(call, code, || format!("a capture on stream {}", handle.id));
        match begun {
            Ok(()) => lock(&self.inner.begun).begin(handle.id, Arc::downgrade(&stream.0), mode),
            Err(_) => self.inner.note_end(handle),
        }
        begun
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        // It is the thread's, whatever context is current.
        let call = Call::ExchangeCaptureMode;
        let before = self
            .inner
            .exchange_mode(call, stream::raw_mode(mode) as u32)?;
        Ok(match before {
            1 => CaptureMode::ThreadLocal,
            2 => CaptureMode::Relaxed,
            _ => CaptureMode::Global,
        })
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

    /// Costs what [`capture_status`](Device::capture_status) does.
    fn capture_id(&self, stream: &CudaStream) -> Result<Option<u64>> {
        let call = Call::CaptureId;
        self.check_ours(call, "stream", &stream.0.device)?;
        if stream.0.id != 0 && self.inner.nothing_captures() {
            return Ok(None);
        }
        let _current = self.inner.current(call)?;
        let id = self.inner.capture_id(&stream.0);
        Ok(id.and_then(|id| self.inner.whole_capture(id)))
    }

    fn end_capture(&self, stream: &CudaStream) -> Result<CudaGraph> {
        self.check_ours(Call::EndCapture, "stream", &stream.0.device)?;
        graph::end_capture(&self.inner, &stream.0)
    }

    fn begin_if(&self, stream: &CudaStream, predicate: DevicePtr, body: &CudaStream) -> Result<()> {
        let call = Call::BeginIf;
        self.check_ours(call, "body's stream", &body.0.device)?;
        self.on(call, stream, |_| {
            conditional::begin_if(&self.inner, &stream.0, predicate, &body.0)
        })
    }

    fn end_if(&self, stream: &CudaStream, body: &CudaStream) -> Result<()> {
        let call = Call::EndIf;
        self.check_ours(call, "stream", &stream.0.device)?;
        self.check_ours(call, "body's stream", &body.0.device)?;
        let _current = self.inner.current(call)?;
        let result = conditional::end_if(&self.inner, &stream.0, &body.0);
        self.inner.answer(call, &stream.0, result)
    }

    fn refuse(&self, stream: &CudaStream, error: DeviceError, invalidate: bool) -> DeviceError {
        match self.enter_on(error.call, stream) {
            Ok((_current, _)) => self.inner.refuse(&stream.0, error, invalidate),
            Err(_) => error,
        }
    }

    fn graph_info(&self, graph: &CudaGraph) -> Result<GraphInfo> {
        Ok(graph.0.info)
    }

    fn graph_dot(&self, graph: &CudaGraph) -> Result<String> {
        self.check_ours(Call::GraphDot, "graph", &graph.0.device)?;
        dot::picture(graph)
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
        let call = Call::LaunchGraph;
        self.check_ours(call, "executable", &exec.device)?;
        self.on(call, stream, |stream| exec.launch(stream, sources))
    }

    fn launch_graph_mut(
        &self,
        exec: &mut CudaExec,
        stream: &CudaStream,
        sources: &[DevicePtr],
    ) -> Result<()> {
        let call = Call::LaunchGraph;
        self.check_ours(call, "executable", &exec.device)?;
        self.on(call, stream, |stream| exec.launch_mut(stream, sources))
    }
}
