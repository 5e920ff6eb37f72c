//! The rest of the driver's calls, for programs and tests that need the driver's whole rule book.
//!
//! The runtime itself uses none of them: it maps memory and never asks the driver's allocator.

use std::sync::{Arc, PoisonError};

use super::device::check_copy;
use super::graph::{GraphMemory, Plan};
use super::state::{Allocated, State};
use super::work::Work;
use super::{HostBuffer, HostDevice, HostExec, HostFunction, HostGraph, HostStream};
use crate::device::{
    Call, Code, Device, DeviceError, DevicePtr, Kernel, KernelArg, MemoryInfo, Pattern, Result,
};
use crate::sync::MutexGuard;

/// The graph differs from the executable in more than parameters (`CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE`).
const UPDATE_FAILURE: Code = Code::Other(910);

impl State {
    /// Reserves and maps whole granules for an allocation of the driver's.
    fn allocate(
        &mut self,
        call: Call,
        bytes: u64,
        granularity: u64,
        kind: Allocated,
    ) -> Result<DevicePtr> {
        let (ptr, rounded) = self.reserve_rounded(call, bytes, granularity)?;
        let counted = kind != Allocated::Host;
        if let Err(error) = self.world.memory.map(call, ptr, rounded, counted) {
            self.world.memory.release(call, ptr, rounded)?;
            return Err(error);
        }
        self.allocated.insert(ptr.0, kind);
        Ok(ptr)
    }

    fn reserve_rounded(
        &mut self,
        call: Call,
        bytes: u64,
        granularity: u64,
    ) -> Result<(DevicePtr, u64)> {
        let rounded = bytes.checked_next_multiple_of(granularity);
        let too_much =
            || DeviceError::new(call, Code::OutOfMemory, format!("{bytes} B are asked for"));
        let rounded = rounded.ok_or_else(too_much)?;
        Ok((self.world.memory.reserve(call, rounded)?, rounded))
    }

    /// What the allocation at `ptr` is, refused unless it is one of `kind`.
    fn expect_allocated(&self, call: Call, ptr: DevicePtr, kind: Allocated) -> Result<u64> {
        let bytes = self.world.memory.mapped_at(ptr);
        bytes
            .filter(|_| self.allocated.get(&ptr.0) == Some(&kind))
            .ok_or_else(|| not_allocated(call))
    }

    fn free(&mut self, call: Call, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.allocated.remove(&ptr.0);
        self.world.memory.unmap(call, ptr, bytes)?;
        self.world.memory.release(call, ptr, bytes)
    }

    /// Work of a call that returns when it is done: on the default stream.
    fn run_now(&mut self, call: Call, work: Work) -> Result<()> {
        let key = self.default_stream;
        self.submit(call, key, work)?;
        let end = self.end_of(key);
        self.run_until(call, |state| state.reached(end))
    }
}

fn not_allocated(call: Call) -> DeviceError {
    DeviceError::new(
        call,
        Code::InvalidValue,
        "no allocation that this call frees begins at this address",
    )
}

impl HostDevice {
    fn enter_unsafe(&self, call: Call) -> Result<MutexGuard<'_, State>> {
        let mut state = self.enter(call)?;
        state.refuse_unsafe(call)?;
        Ok(state)
    }

    /// `cuMemAlloc`: whole granules, live, of undefined bytes.
    pub fn mem_alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let call = Call::Driver("cuMemAlloc");
        self.enter_unsafe(call)?
            .allocate(call, bytes, self.inner.granularity, Allocated::Plain)
    }

    /// `cuMemFree`: waits for all work of the device first. Takes what [`mem_alloc`](HostDevice::mem_alloc) gave, and what
    /// [`mem_alloc_async`](HostDevice::mem_alloc_async) gave outside of a capture.
    pub fn mem_free(&self, ptr: DevicePtr) -> Result<()> {
        let call = Call::Driver("cuMemFree");
        let mut state = self.enter_unsafe(call)?;
        if ptr == DevicePtr::NULL {
            return Ok(());
        }
        let found = state.expect_allocated(call, ptr, Allocated::Plain);
        let bytes = found.or_else(|_| state.expect_allocated(call, ptr, Allocated::Async))?;
        state.run_until(call, |state| state.busy.is_empty())?;
        state.free(call, ptr, bytes)
    }

    /// `cuMemHostAlloc`: page-locked host memory, which the device reaches at the address. Takes no device memory.
    pub fn mem_host_alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let call = Call::Driver("cuMemHostAlloc");
        self.enter_unsafe(call)?
            .allocate(call, bytes, self.inner.granularity, Allocated::Host)
    }

    /// `cuMemFreeHost`: waits for all work of the device first.
    pub fn mem_free_host(&self, ptr: DevicePtr) -> Result<()> {
        let call = Call::Driver("cuMemFreeHost");
        let mut state = self.enter_unsafe(call)?;
        let bytes = state.expect_allocated(call, ptr, Allocated::Host)?;
        state.run_until(call, |state| state.busy.is_empty())?;
        state.free(call, ptr, bytes)
    }

    /// `cuModuleLoadData`: the same as [`load`](Device::load).
    pub fn module_load(&self, kernel: &Kernel) -> Result<HostFunction> {
        self.load(kernel)
    }

    /// `cuMemcpyDtoD`: on the default stream, and waited for.
    pub fn memcpy_dtod_sync(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        let call = Call::Driver("cuMemcpyDtoD");
        check_copy(call, dst, src, bytes)?;
        self.enter(call)?
            .run_now(call, Work::Copy { dst, src, bytes })
    }

    /// `cuMemsetD8`: on the default stream, and waited for.
    pub fn memset_sync(&self, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        let call = Call::Driver("cuMemsetD8");
        self.enter(call)?.run_now(
            call,
            Work::Fill {
                dst,
                pattern: Pattern::B8(value),
                bytes,
            },
        )
    }

    /// `cuMemGetInfo`: the same as [`memory_info`](Device::memory_info).
    pub fn mem_get_info(&self) -> Result<MemoryInfo> {
        self.memory_info()
    }

    /// `cuMemAllocAsync`. On a capturing stream a memory node: the address is the graph's, and has memory once a launch runs.
    pub fn mem_alloc_async(&self, stream: &HostStream, bytes: u64) -> Result<DevicePtr> {
        let call = Call::Driver("cuMemAllocAsync");
        let granularity = self.inner.granularity;
        self.on(call, stream, |state, key| {
            let Some(capture) = state.admit(call, key)? else {
                state.refuse_unsafe(call)?;
                return state.allocate(call, bytes, granularity, Allocated::Async);
            };
            let (ptr, bytes) = state.reserve_rounded(call, bytes, granularity)?;
            state.allocated.insert(ptr.0, Allocated::Graph(capture));
            let memory = GraphMemory {
                ptr,
                bytes,
                gate: self.inner.gate.clone(),
            };
            state.captures[capture].memory.push(Arc::new(memory));
            state.capture(key, Work::Allocate { ptr, bytes });
            Ok(ptr)
        })
    }

    /// `cuMemFreeAsync`. On a capturing stream a memory node, for an address that the same capture allocated; any other is
    /// refused there, and the capture left alone. Outside of a capture, for what [`mem_alloc_async`](HostDevice::mem_alloc_async)
    /// gave, and for what a graph allocated once it was launched. The null address is freed by doing nothing.
    pub fn mem_free_async(&self, stream: &HostStream, ptr: DevicePtr) -> Result<()> {
        let call = Call::Driver("cuMemFreeAsync");
        self.on(call, stream, |state, key| {
            let capture = state.admit(call, key)?;
            if ptr == DevicePtr::NULL {
                return Ok(());
            }
            let free = |release| Work::Free { ptr, release };
            match (state.allocated.get(&ptr.0).copied(), capture) {
                (Some(Allocated::Async), None) => {
                    state.refuse_unsafe(call)?;
                    state.allocated.remove(&ptr.0);
                    state.submit(call, key, free(true))
                }
                (Some(Allocated::Graph(of)), Some(here)) if of == here => {
                    state.capture(key, free(false));
                    Ok(())
                }
                (Some(Allocated::Graph(_)), None)
                    if state.world.memory.mapped_at(ptr).is_some() =>
                {
                    state.refuse_unsafe(call)?;
                    state.submit(call, key, free(false))
                }
                _ => Err(not_allocated(call)),
            }
        })
    }

    /// `cuLaunchHostFunc`: a function of the host in stream order. It cannot call this device.
    pub fn launch_host_func(
        &self,
        stream: &HostStream,
        function: impl Fn() + Send + Sync + 'static,
    ) -> Result<()> {
        let call = Call::Driver("cuLaunchHostFunc");
        let work = Work::Call(Arc::new(function));
        self.on(call, stream, |state, key| state.submit(call, key, work))
    }

    /// `cuMemcpyHtoDAsync` from pageable memory: read at the call, or (captured) by each launch. The buffer must not be locked then.
    pub fn memcpy_htod_async(
        &self,
        stream: &HostStream,
        dst: DevicePtr,
        src: &HostBuffer,
    ) -> Result<()> {
        let call = Call::Driver("cuMemcpyHtoDAsync");
        self.on(call, stream, |state, key| {
            let work = match state.admit(call, key)? {
                Some(_) => Work::FromHost {
                    dst,
                    src: src.clone(),
                },
                None => Work::Write {
                    dst,
                    src: src
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .as_slice()
                        .into(),
                },
            };
            state.submit(call, key, work)
        })
    }

    /// `cuMemcpyDtoHAsync` to pageable memory, filled when the work runs. The buffer must not be locked then.
    pub fn memcpy_dtoh_async(
        &self,
        stream: &HostStream,
        dst: &HostBuffer,
        src: DevicePtr,
    ) -> Result<()> {
        let call = Call::Driver("cuMemcpyDtoHAsync");
        let work = Work::ToHost {
            dst: dst.clone(),
            src,
        };
        self.on(call, stream, |state, key| state.submit(call, key, work))
    }

    /// `cuGraphExecKernelNodeSetParams`: the arguments of the `kernel`-th kernel node (in order of capture, gather
    /// nodes not counted) for launches to come.
    pub fn exec_kernel_set_params(
        &self,
        exec: &HostExec,
        kernel: usize,
        args: &[KernelArg],
    ) -> Result<()> {
        let call = Call::Driver("cuGraphExecKernelNodeSetParams");
        self.check_ours(call, "executable", &exec.device)?;
        let mut state = self.enter(call)?;
        let plan = Arc::make_mut(&mut state.execs[exec.key]);
        let mut kernels = plan
            .nodes
            .iter_mut()
            .filter_map(|node| match &mut node.work {
                Work::Kernel { args, .. } => Some(args),
                _ => None,
            });
        let Some(found) = kernels.nth(kernel) else {
            return Err(DeviceError::new(
                call,
                Code::InvalidValue,
                format!("the executable has no kernel node {kernel}"),
            ));
        };
        *found = args.into();
        Ok(())
    }

    /// `cuGraphExecUpdate`: the parameters of all nodes from another graph of the same shape, for launches to come.
    ///
    /// # Errors
    /// [`Code::Other`] 910 where the shapes differ, or the graph has memory nodes.
    pub fn exec_update(&self, exec: &HostExec, graph: &HostGraph) -> Result<()> {
        let call = Call::Driver("cuGraphExecUpdate");
        self.check_ours(call, "executable", &exec.device)?;
        self.check_ours(call, "graph", &graph.device)?;
        let mut state = self.enter(call)?;
        let plan = Plan::new(&graph.template);
        let current = &mut state.execs[exec.key];
        if graph.template.info().memory > 0 || !current.same_shape(&plan) {
            let detail = "the graph differs from the executable in more than parameters; instantiate it anew";
            return Err(DeviceError::new(call, UPDATE_FAILURE, detail));
        }
        *current = Arc::new(plan);
        Ok(())
    }

    /// `cuStreamCreate` without `CU_STREAM_NON_BLOCKING`: a stream that waits for the default stream's work, and the default
    /// stream for its.
    pub fn create_blocking_stream(&self) -> Result<HostStream> {
        self.new_stream(Call::CreateStream, true)
    }
}
