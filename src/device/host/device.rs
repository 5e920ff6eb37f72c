//! The device's trait, call by call: what is refused first, then what is done.

use std::sync::Arc;

use super::dot;
use super::graph::Plan;
use super::stream::{Entry, Record};
use super::work::{Body, Work};
use super::{HostDevice, HostEvent, HostExec, HostFunction, HostGraph, HostPinned, HostStream};
use crate::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, DeviceInfo, DevicePtr, EventState,
    GatherSlot, GraphInfo, Kernel, KernelArg, LaunchConfig, Mark, MemoryInfo, Pattern, Result,
};
use crate::sync::thread;

/// Milliseconds that the clock moves by with a piece of work.
const MS_PER_TICK: f32 = 1e-3;

/// Refuses a range that two copies could not agree on.
pub(super) fn check_copy(call: Call, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
    if dst.0.abs_diff(src.0) < bytes {
        let detail = format!(
            "{bytes} B are copied onto themselves, {} B further; source and target must not overlap",
            dst.0.abs_diff(src.0)
        );
        return Err(DeviceError::new(call, Code::InvalidValue, detail));
    }
    Ok(())
}

impl HostDevice {
    fn fill_on(
        &self,
        call: Call,
        stream: &HostStream,
        dst: DevicePtr,
        pattern: Pattern,
        bytes: u64,
    ) -> Result<()> {
        self.on(call, stream, |state, key| {
            if let Some(detail) = pattern.misfit(dst, bytes) {
                return Err(DeviceError::new(call, Code::InvalidValue, detail));
            }
            if bytes == 0 {
                return state.admit(call, key).map(drop);
            }
            let work = Work::Fill {
                dst,
                pattern,
                bytes,
            };
            state.submit(call, key, work)
        })
    }

    fn copy_pinned(
        &self,
        call: Call,
        stream: &HostStream,
        (memory, offset, bytes): (&HostPinned, u64, u64),
        work: Work,
    ) -> Result<()> {
        self.check_ours(call, "pinned memory", &memory.device)?;
        self.on(call, stream, |state, key| {
            memory.range(call, offset, bytes)?;
            if bytes == 0 {
                return state.admit(call, key).map(drop);
            }
            state.submit(call, key, work)
        })
    }
}

impl Device for HostDevice {
    type Stream = HostStream;
    type Event = HostEvent;
    type Function = HostFunction;
    type Graph = HostGraph;
    type Exec = HostExec;
    type Pinned = HostPinned;

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "simulated".into(),
            ordinal: 0,
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    fn owns(&self, stream: &HostStream) -> bool {
        Arc::ptr_eq(&self.inner, &stream.0.device)
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        Ok(self.enter(Call::MemoryInfo)?.world.memory.info())
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity
    }

    fn reserve(&self, bytes: u64) -> Result<DevicePtr> {
        self.enter(Call::Reserve)?
            .world
            .memory
            .reserve(Call::Reserve, bytes)
    }

    fn release(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.lock(Call::Release)?
            .world
            .memory
            .release(Call::Release, ptr, bytes)
    }

    fn map(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.enter(Call::Map)?
            .world
            .memory
            .map(Call::Map, ptr, bytes, true)
    }

    fn manage(&self, ptr: DevicePtr, bytes: u64) {
        if self.inner.ownership
            && let Ok(mut state) = self.lock(Call::Driver("manage"))
        {
            state.world.memory.mark(ptr, bytes, Mark::Dead, u32::MAX);
        }
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.lock(Call::Unmap)?
            .world
            .memory
            .unmap(Call::Unmap, ptr, bytes)
    }

    /// Marks on a device that a fault stopped, and on a stream whose capture is broken, are lost with everything else there.
    /// A mark that is run when something else has been mapped at its range since leaves that alone; captured ones do not ask.
    fn mark(&self, stream: &HostStream, ptr: DevicePtr, bytes: u64, mark: Mark) {
        let call = Call::Driver("mark");
        if bytes > 0
            && self.inner.ownership
            && let Ok((mut state, key)) = self.enter_on(call, stream)
        {
            let captured = state.streams[key].joined.is_some();
            let before = if captured {
                u32::MAX
            } else {
                state.world.memory.mappings()
            };
            state.mark(
                call,
                key,
                Work::Mark {
                    ptr,
                    bytes,
                    mark,
                    before,
                },
            );
        }
    }

    fn alloc_pinned(&self, bytes: u64) -> Result<HostPinned> {
        self.new_pinned(Call::AllocPinned, bytes)
    }

    fn create_stream(&self) -> Result<HostStream> {
        self.new_stream(Call::CreateStream, false)
    }

    fn default_stream(&self) -> HostStream {
        self.stream_handle(self.inner.default_stream, 0)
    }

    fn stream_id(&self, stream: &HostStream) -> u32 {
        stream.0.id
    }

    fn synchronize(&self, stream: &HostStream) -> Result<()> {
        let call = Call::Synchronize;
        self.on(call, stream, |state, key| {
            state.refuse_capturing(call, key, "a capturing stream cannot be waited for")?;
            state.refuse_unsafe(call)?;
            let end = state.end_of(key);
            state.run_until(call, |state| state.reached(end))
        })
    }

    fn synchronize_device(&self) -> Result<()> {
        let call = Call::SynchronizeDevice;
        let mut state = self.enter(call)?;
        state.refuse_any_capture(call)?;
        state.run_until(call, |state| state.busy.is_empty())
    }

    fn quiesce(&self) -> Result<()> {
        let call = Call::Quiesce;
        self.enter(call)?
            .run_until(call, |state| state.busy.is_empty())
    }

    fn query(&self, stream: &HostStream) -> Result<bool> {
        let call = Call::Query;
        self.on(call, stream, |state, key| {
            state.refuse_capturing(call, key, "a capturing stream cannot be asked")?;
            state.refuse_unsafe(call)?;
            let end = state.end_of(key);
            state.poll(call, |state| state.reached(end))
        })
    }

    fn create_event(&self) -> Result<HostEvent> {
        self.new_event(Call::CreateEvent, false)
    }

    fn create_timed_event(&self) -> Result<HostEvent> {
        self.new_event(Call::CreateTimedEvent, true)
    }

    fn record(&self, event: &HostEvent, stream: &HostStream) -> Result<()> {
        let call = Call::Record;
        self.check_ours(call, "event", &event.device)?;
        self.on(call, stream, |state, key| {
            match state.captured_record(call, key)? {
                Some(captured) => state.note_record(event.key(), captured),
                None => state.record_here(event.key(), key),
            }
            Ok(())
        })
    }

    fn wait(&self, stream: &HostStream, event: &HostEvent) -> Result<()> {
        let call = Call::Wait;
        self.check_ours(call, "event", &event.device)?;
        self.on(call, stream, |state, key| {
            let record = state.events[event.key()].last.clone();
            if !state.wait_captured(call, key, &record)?
                && let Record::Point(point) = record
            {
                state.refuse_capturing(
                    call,
                    key,
                    "the event was recorded outside of the capture",
                )?;
                state.enqueue(key, Entry::Wait(point));
            }
            Ok(())
        })
    }

    fn record_external(&self, event: &HostEvent, stream: &HostStream) -> Result<()> {
        let call = Call::RecordExternal;
        self.check_ours(call, "event", &event.device)?;
        self.on(call, stream, |state, key| {
            match state.admit(call, key)? {
                Some(_) => drop(state.capture(key, Work::RecordEvent(event.held.clone()))),
                None => state.record_here(event.key(), key),
            }
            Ok(())
        })
    }

    fn wait_external(&self, stream: &HostStream, event: &HostEvent) -> Result<()> {
        let call = Call::WaitExternal;
        self.check_ours(call, "event", &event.device)?;
        self.on(call, stream, |state, key| {
            if state.admit(call, key)?.is_some() {
                state.capture(key, Work::WaitEvent(event.held.clone()));
                return Ok(());
            }
            let record = state.events[event.key()].last.clone();
            if !state.wait_captured(call, key, &record)?
                && let Record::Point(point) = record
            {
                state.enqueue(key, Entry::Wait(point));
            }
            Ok(())
        })
    }

    fn elapsed(&self, start: &HostEvent, end: &HostEvent) -> Result<f32> {
        let call = Call::Elapsed;
        self.check_ours(call, "event", &start.device)?;
        self.check_ours(call, "event", &end.device)?;
        let state = self.enter(call)?;
        let time = |which, event: &HostEvent| {
            let event = &state.events[event.key()];
            let state = match (&event.last, event.time) {
                _ if !event.timed => EventState::Untimed,
                (Record::Never, _) => EventState::Never,
                (Record::Captured { .. }, _) => EventState::Captured,
                (Record::Point(_), None) => EventState::Pending,
                (Record::Point(_), Some(time)) => return Ok(time),
            };
            Err(state.no_time(which))
        };
        let (start, end) = (time("start", start)?, time("end", end)?);
        Ok((end as f64 - start as f64) as f32 * MS_PER_TICK)
    }

    fn query_event(&self, event: &HostEvent) -> Result<bool> {
        let call = Call::QueryEvent;
        let (mut state, record) = self.enter_event(call, event)?;
        let Record::Point(point) = record else {
            return Ok(true);
        };
        state.poll(call, |state| state.reached(point))
    }

    fn poll_event(&self, event: &HostEvent) -> Result<bool> {
        let call = Call::PollEvent;
        self.check_ours(call, "event", &event.device)?;
        let state = self.enter(call)?;
        // Nothing is run for it: who polls may hold locks that work takes.
        Ok(match state.events[event.key()].last {
            Record::Point(point) => state.reached(point),
            _ => true,
        })
    }

    fn synchronize_event(&self, event: &HostEvent) -> Result<()> {
        let call = Call::SynchronizeEvent;
        let (mut state, record) = self.enter_event(call, event)?;
        let Record::Point(point) = record else {
            return Ok(());
        };
        state.run_until(call, |state| state.reached(point))
    }

    fn load(&self, kernel: &Kernel) -> Result<HostFunction> {
        let call = Call::Load;
        let Some(run) = &kernel.host else {
            let detail = format!(
                "the kernel {} has no body for the simulated device; give it one with Kernel::host",
                kernel.name
            );
            return Err(DeviceError::new(call, Code::NotFound, detail));
        };
        let mut state = self.enter(call)?;
        let key = (
            kernel.name.to_string(),
            Arc::as_ptr(run).cast::<()>().addr(),
        );
        let body = || {
            Arc::new(Body {
                name: kernel.name.to_string(),
                run: run.clone(),
            })
        };
        Ok(HostFunction(
            state.bodies.entry(key).or_insert_with(body).clone(),
        ))
    }

    fn launch(
        &self,
        stream: &HostStream,
        function: &HostFunction,
        config: LaunchConfig,
        args: &[KernelArg],
    ) -> Result<()> {
        let call = Call::Launch;
        self.on(call, stream, |state, key| {
            if config.grid.contains(&0) || config.block.contains(&0) {
                let detail = format!(
                    "{} is launched with {config:?}; no extent may be 0",
                    function.0.name
                );
                return Err(DeviceError::new(call, Code::InvalidValue, detail));
            }
            let work = Work::Kernel {
                body: function.0.clone(),
                config,
                args: args.into(),
            };
            state.submit(call, key, work)?;
            state.accepted.launches += 1;
            Ok(())
        })
    }

    fn copy(&self, stream: &HostStream, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        let call = Call::Copy;
        self.on(call, stream, |state, key| {
            check_copy(call, dst, src, bytes)?;
            if bytes == 0 {
                return state.admit(call, key).map(drop);
            }
            state.submit(call, key, Work::Copy { dst, src, bytes })
        })
    }

    fn fill(&self, stream: &HostStream, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        self.fill_on(Call::Fill, stream, dst, Pattern::B8(value), bytes)
    }

    fn fill_pattern(
        &self,
        stream: &HostStream,
        dst: DevicePtr,
        pattern: Pattern,
        bytes: u64,
    ) -> Result<()> {
        self.fill_on(Call::FillPattern, stream, dst, pattern, bytes)
    }

    fn write(&self, stream: &HostStream, dst: DevicePtr, src: &[u8]) -> Result<()> {
        let call = Call::Write;
        self.on(call, stream, |state, key| {
            state.refuse_pageable(call, key)?;
            if src.is_empty() {
                return Ok(());
            }
            let src = src.into();
            state.submit(call, key, Work::Write { dst, src })
        })
    }

    fn read(&self, stream: &HostStream, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        let call = Call::Read;
        self.on(call, stream, |state, key| {
            state.refuse_pageable(call, key)?;
            state.refuse_unsafe(call)?;
            if !dst.is_empty() {
                let bytes = dst.len();
                state.submit(call, key, Work::Read { src, bytes })?;
            }
            let end = state.end_of(key);
            state.run_until(call, |state| state.reached(end))?;
            if !dst.is_empty() {
                dst.copy_from_slice(&state.world.read_back);
            }
            Ok(())
        })
    }

    fn copy_from_pinned(
        &self,
        stream: &HostStream,
        dst: DevicePtr,
        src: &HostPinned,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        let work = Work::FromPinned {
            dst,
            src: src.memory.clone(),
            offset,
            bytes,
        };
        self.copy_pinned(Call::CopyFromPinned, stream, (src, offset, bytes), work)
    }

    fn copy_to_pinned(
        &self,
        stream: &HostStream,
        dst: &HostPinned,
        offset: u64,
        src: DevicePtr,
        bytes: u64,
    ) -> Result<()> {
        let work = Work::ToPinned {
            dst: dst.memory.clone(),
            offset,
            src,
            bytes,
        };
        self.copy_pinned(Call::CopyToPinned, stream, (dst, offset, bytes), work)
    }

    fn gather(
        &self,
        stream: &HostStream,
        slots: &[GatherSlot],
        sources: &[DevicePtr],
    ) -> Result<()> {
        let call = Call::Gather;
        self.on(call, stream, |state, key| {
            if slots.len() != sources.len() {
                let detail = format!(
                    "{} sources are given for {} slots; give one for each",
                    sources.len(),
                    slots.len()
                );
                return Err(DeviceError::new(call, Code::InvalidValue, detail));
            }
            let capture = state.admit(call, key)?;
            if slots.is_empty() {
                return Ok(());
            }
            if let Some(capture) = capture {
                state.claim_gather(call, capture)?;
            }
            let work = Work::Gather {
                slots: slots.into(),
                sources: sources.into(),
            };
            state.submit(call, key, work)
        })
    }

    fn begin_capture(&self, stream: &HostStream, mode: CaptureMode) -> Result<()> {
        let (mut state, key) = self.enter_on(Call::BeginCapture, stream)?;
        state.begin_capture(key, mode)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut state = self.enter(Call::ExchangeCaptureMode)?;
        let here = thread::current().id();
        let before = match mode {
            CaptureMode::Global => state.thread_modes.remove(&here),
            other => state.thread_modes.insert(here, other),
        };
        Ok(before.unwrap_or(CaptureMode::Global))
    }

    fn capture_status(&self, stream: &HostStream) -> Result<CaptureStatus> {
        self.check_ours(Call::CaptureStatus, "stream", &stream.0.device)?;
        self.lock(Call::CaptureStatus)?.capture_status(stream.0.key)
    }

    fn capture_id(&self, stream: &HostStream) -> Result<Option<u64>> {
        self.check_ours(Call::CaptureId, "stream", &stream.0.device)?;
        Ok(self.lock(Call::CaptureId)?.capture_id(stream.0.key))
    }

    fn end_capture(&self, stream: &HostStream) -> Result<HostGraph> {
        self.check_ours(Call::EndCapture, "stream", &stream.0.device)?;
        let template = self.lock(Call::EndCapture)?.end_capture(stream.0.key)?;
        Ok(HostGraph {
            device: self.inner.clone(),
            template,
        })
    }

    fn begin_if(&self, stream: &HostStream, predicate: DevicePtr, body: &HostStream) -> Result<()> {
        let call = Call::BeginIf;
        self.check_ours(call, "body's stream", &body.0.device)?;
        self.on(call, stream, |state, key| {
            state.begin_if(call, key, predicate, body.0.key)
        })
    }

    fn end_if(&self, stream: &HostStream, body: &HostStream) -> Result<()> {
        let call = Call::EndIf;
        self.check_ours(call, "stream", &stream.0.device)?;
        self.check_ours(call, "body's stream", &body.0.device)?;
        let (mut state, key) = (self.lock(call)?, stream.0.key);
        state.on(call, key, |state| state.end_if(call, key, body.0.key))
    }

    fn refuse(&self, stream: &HostStream, error: DeviceError, invalidate: bool) -> DeviceError {
        match self.enter_on(error.call, stream) {
            Ok((mut state, key)) => state.refuse(key, error, invalidate),
            Err(_) => error,
        }
    }

    fn graph_info(&self, graph: &HostGraph) -> Result<GraphInfo> {
        Ok(graph.template.info())
    }

    fn graph_dot(&self, graph: &HostGraph) -> Result<String> {
        self.check_ours(Call::GraphDot, "graph", &graph.device)?;
        Ok(dot::picture(&graph.template.dag))
    }

    fn instantiate(&self, graph: &HostGraph) -> Result<HostExec> {
        let call = Call::Instantiate;
        self.check_ours(call, "graph", &graph.device)?;
        let mut state = self.enter(call)?;
        state.refuse_unsafe(call)?;
        if !graph.template.claim() {
            let detail = "a graph with memory nodes can be made executable once, and it has been";
            return Err(DeviceError::new(call, Code::NotSupported, detail));
        }
        let key = state.execs.insert(Arc::new(Plan::new(&graph.template)));
        Ok(HostExec {
            device: self.inner.clone(),
            key,
        })
    }

    fn launch_graph(
        &self,
        exec: &HostExec,
        stream: &HostStream,
        sources: &[DevicePtr],
    ) -> Result<()> {
        let call = Call::LaunchGraph;
        self.on(call, stream, |state, key| {
            self.check_ours(call, "executable", &exec.device)?;
            state.launch(call, exec.key, key, sources)
        })
    }
}
