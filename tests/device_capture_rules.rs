//! Every capture rule that was measured on an H200 (driver 580, CUDA 13.0), put to the simulated device.
//!
//! The rows are the measurement's own text: the call; the capture mode (or the stream kind); its result; the capture's status after
//! it; what ending the capture gave; the nodes captured. Each row is run, written in the same form, and compared.

use std::sync::{Arc, Mutex};
use std::thread;

use cudagraph_trees::device::host::{
    HostBuffer, HostDevice, HostEvent, HostExec, HostFunction, HostGraph, HostStream,
};
use cudagraph_trees::device::kernels;
use cudagraph_trees::device::{
    CaptureMode, CaptureStatus, Code, Device, DeviceError, DevicePtr, KernelArg, LaunchConfig,
};

const MIB: u64 = 1 << 20;

const MEASURED: &str = "
  cuMemAlloc                                         global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuMemAlloc                                         thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuMemAlloc                                         relaxed  ok                               active       end ok                           no nodes
  cuMemFree                                          global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuMemFree                                          thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuMemFree                                          relaxed  ok                               active       end ok                           no nodes
  cuMemCreate                                        global   ok                               active       end ok                           no nodes
  cuMemMap + cuMemSetAccess                          global   ok                               active       end ok                           no nodes
  cuMemUnmap                                         global   ok                               active       end ok                           no nodes
  cuMemCreate                                        thread   ok                               active       end ok                           no nodes
  cuMemMap + cuMemSetAccess                          thread   ok                               active       end ok                           no nodes
  cuMemUnmap                                         thread   ok                               active       end ok                           no nodes
  cuMemCreate                                        relaxed  ok                               active       end ok                           no nodes
  cuMemMap + cuMemSetAccess                          relaxed  ok                               active       end ok                           no nodes
  cuMemUnmap                                         relaxed  ok                               active       end ok                           no nodes
  cuMemHostAlloc                                     global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuModuleLoadData                                   global   ok                               active       end ok                           no nodes
  cuEventQuery, event outside the capture            global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuEventSynchronize, event outside                  global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamQuery, other stream                        global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamSynchronize, other stream                  global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuCtxSynchronize                                   global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuMemcpyDtoD (synchronous)                         global   ok                               active       end ok                           no nodes
  cuMemsetD8 (synchronous)                           global   ok                               active       end ok                           no nodes
  cuMemGetInfo                                       global   ok                               active       end ok                           no nodes
  cuGraphInstantiate of another graph                global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuGraphLaunch of another graph, other stream       global   ok                               active       end ok                           no nodes
  cuMemHostAlloc                                     thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuModuleLoadData                                   thread   ok                               active       end ok                           no nodes
  cuEventQuery, event outside the capture            thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuEventSynchronize, event outside                  thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamQuery, other stream                        thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamSynchronize, other stream                  thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuCtxSynchronize                                   thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuMemcpyDtoD (synchronous)                         thread   ok                               active       end ok                           no nodes
  cuMemsetD8 (synchronous)                           thread   ok                               active       end ok                           no nodes
  cuMemGetInfo                                       thread   ok                               active       end ok                           no nodes
  cuGraphInstantiate of another graph                thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuGraphLaunch of another graph, other stream       thread   ok                               active       end ok                           no nodes
  cuMemHostAlloc                                     relaxed  ok                               active       end ok                           no nodes
  cuModuleLoadData                                   relaxed  ok                               active       end ok                           no nodes
  cuEventQuery, event outside the capture            relaxed  ok                               active       end ok                           no nodes
  cuEventSynchronize, event outside                  relaxed  ok                               active       end ok                           no nodes
  cuStreamQuery, other stream                        relaxed  ok                               active       end ok                           no nodes
  cuStreamSynchronize, other stream                  relaxed  ok                               active       end ok                           no nodes
  cuCtxSynchronize                                   relaxed  STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuMemcpyDtoD (synchronous)                         relaxed  ok                               active       end ok                           no nodes
  cuMemsetD8 (synchronous)                           relaxed  ok                               active       end ok                           no nodes
  cuMemGetInfo                                       relaxed  ok                               active       end ok                           no nodes
  cuGraphInstantiate of another graph                relaxed  ok                               active       end ok                           no nodes
  cuGraphLaunch of another graph, other stream       relaxed  ok                               active       end ok                           no nodes
  (nothing)                                          thread   ok                               active       end ok                           no nodes
  cuStreamSynchronize, capturing stream              thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamQuery, capturing stream                    thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamBeginCapture again                         thread   ILLEGAL_STATE (401)              active       end ok                           no nodes
  cuMemAllocAsync, capturing stream                  thread   ok                               active       end ok                           mem_alloc×1
  cuMemAllocAsync, other stream                      thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuMemFreeAsync of that, capturing stream           thread   ok                               active       end ok                           no nodes
    ... and freed from outside afterwards                     ok
  cuMemFreeAsync of a cuMemAlloc pointer             thread   INVALID_VALUE (1)                active       end ok                           no nodes
    ... and freed with cuMemFree afterwards                   ok
  cuStreamWaitEvent, event recorded outside          thread   STREAM_CAPTURE_ISOLATION (905)   INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamWaitEvent, event never recorded            thread   ok                               active       end ok                           no nodes
  cuStreamWaitEvent EXTERNAL, recorded outside       thread   ok                               active       end ok                           wait_event×1
  cuEventRecord then cuEventQuery                    thread   CAPTURED_EVENT (907)             INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
    ... cuEventQuery after the capture ended                  INVALID_VALUE (1)
    ... cuStreamWaitEvent after the capture ended             INVALID_VALUE (1)
  fork to another stream, no join                    thread   ok                               active       end STREAM_CAPTURE_UNJOINED (904) -
  fork, launch on both, join                         thread   ok                               active       end ok                           kernel×2
  cuGraphLaunch into the capturing stream            thread   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuGraphExecKernelNodeSetParams, other exec         thread   ok                               active       end ok                           no nodes
  cuGraphExecUpdate, other exec                      thread   ok                               active       end ok                           no nodes
  cuLaunchHostFunc                                   thread   ok                               active       end ok                           host×1
  cuMemcpyHtoDAsync, pageable source                 thread   ok                               active       end ok                           memcpy×1
  cuMemcpyDtoHAsync, pageable target                 thread   ok                               active       end ok                           memcpy×1
  cuMemsetD32Async + DtoDAsync                       thread   ok                               active       end ok                           memcpy×1 memset×1
  zero-byte cuMemcpyDtoDAsync                        thread   ok                               active       end ok                           no nodes
  kernel on the legacy stream                        thread   ok                               active       end ok                           no nodes
  kernel on the legacy stream, blocking capture      thread   STREAM_CAPTURE_IMPLICIT (906)    INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamBeginCapture on the legacy stream          0        STREAM_CAPTURE_UNSUPPORTED (900)
  cuStreamBeginCapture on the legacy stream          1        STREAM_CAPTURE_UNSUPPORTED (900)
  cuStreamBeginCapture on the legacy stream          2        STREAM_CAPTURE_UNSUPPORTED (900)
  relaxed for one call by exchanging the mode        global   ok                               active       end ok                           no nodes
  cuMemAlloc on another thread                       global   STREAM_CAPTURE_UNSUPPORTED (900) INVALIDATED  end STREAM_CAPTURE_INVALIDATED (901) -
  cuStreamEndCapture on another thread               global   STREAM_CAPTURE_WRONG_THREAD (908) none         end ILLEGAL_STATE (401)          -
  cuMemAlloc on another thread                       thread   ok                               active       end ok                           no nodes
  cuStreamEndCapture on another thread               thread   STREAM_CAPTURE_WRONG_THREAD (908) none         end ILLEGAL_STATE (401)          -
  cuMemAlloc on another thread                       relaxed  ok                               active       end ok                           no nodes
  cuStreamEndCapture on another thread               relaxed  ok                               none         end ILLEGAL_STATE (401)          -
";

/// A device with everything that the rows need, and a capture underway on `stream`.
struct Scene {
    device: HostDevice,
    stream: HostStream,
    other: HostStream,
    /// Recorded on `other` before the capture.
    outside: HostEvent,
    /// Recorded by the rows that capture it.
    event: HostEvent,
    never: HostEvent,
    function: HostFunction,
    graph: HostGraph,
    exec: HostExec,
    /// Two mapped ranges of 2 MiB, one after the other, and a third that is reserved.
    range: DevicePtr,
    plain: DevicePtr,
    pooled: DevicePtr,
    buffer: HostBuffer,
}

impl Scene {
    fn new(blocking: bool) -> Scene {
        let device = HostDevice::new();
        let stream = if blocking {
            device.create_blocking_stream()
        } else {
            device.create_stream()
        }
        .unwrap();
        let other = device.create_stream().unwrap();
        let range = device.reserve(6 * MIB).unwrap();
        device.map(range, 2 * MIB).unwrap();
        device.map(range.offset(2 * MIB), 2 * MIB).unwrap();
        let function = device.load(&kernels::fill()).unwrap();
        let (outside, event, never) = (
            device.create_event().unwrap(),
            device.create_event().unwrap(),
            device.create_event().unwrap(),
        );
        let range_arg = [
            KernelArg::Ptr(range),
            KernelArg::U64(4),
            KernelArg::F32(1.0),
        ];
        device.begin_capture(&other, CaptureMode::Relaxed).unwrap();
        device
            .launch(&other, &function, LaunchConfig::for_elements(4), &range_arg)
            .unwrap();
        let graph = device.end_capture(&other).unwrap();
        let exec = device.instantiate(&graph).unwrap();
        let plain = device.mem_alloc(4096).unwrap();
        let pooled = device.mem_alloc_async(&other, 4096).unwrap();
        let buffer = Arc::new(Mutex::new(vec![7; 64]));
        let scene = Scene {
            device,
            stream,
            other,
            outside,
            event,
            never,
            function,
            graph,
            exec,
            range,
            plain,
            pooled,
            buffer,
        };
        scene.device.fill(&scene.other, scene.range, 1, 64).unwrap();
        scene.device.record(&scene.outside, &scene.other).unwrap();
        scene
    }

    fn kernel(&self, stream: &HostStream) -> Result<(), DeviceError> {
        let args = self.args();
        self.device
            .launch(stream, &self.function, LaunchConfig::for_elements(4), &args)
    }

    fn args(&self) -> [KernelArg; 3] {
        [
            KernelArg::Ptr(self.range),
            KernelArg::U64(4),
            KernelArg::F32(1.0),
        ]
    }

    /// The row's call, on this thread.
    fn call(&self, name: &str) -> Result<(), DeviceError> {
        let Scene {
            device: d,
            stream,
            other,
            outside,
            event,
            never,
            exec,
            graph,
            buffer,
            ..
        } = self;
        let [first, second, third] = [0, 2, 4].map(|at| self.range.offset(at * MIB));
        match name {
            "(nothing)" => Ok(()),
            "cuMemAlloc" => d.mem_alloc(4096).map(drop),
            "cuMemFree" => d.mem_free(self.plain),
            "cuMemCreate" => d.reserve(2 * MIB).map(drop),
            "cuMemMap + cuMemSetAccess" => d.map(third, 2 * MIB),
            "cuMemUnmap" => d.unmap(second, 2 * MIB),
            "cuMemHostAlloc" => d.mem_host_alloc(4096).map(drop),
            "cuModuleLoadData" => d.module_load(&kernels::add()).map(drop),
            "cuEventQuery, event outside the capture" => d.query_event(outside).map(drop),
            "cuEventSynchronize, event outside" => d.synchronize_event(outside),
            "cuStreamQuery, other stream" => d.query(other).map(drop),
            "cuStreamSynchronize, other stream" => d.synchronize(other),
            "cuCtxSynchronize" => d.synchronize_device(),
            "cuMemcpyDtoD (synchronous)" => d.memcpy_dtod_sync(second, first, 64),
            "cuMemsetD8 (synchronous)" => d.memset_sync(first, 9, 64),
            "cuMemGetInfo" => d.mem_get_info().map(drop),
            "cuGraphInstantiate of another graph" => d.instantiate(graph).map(drop),
            "cuGraphLaunch of another graph, other stream" => d.launch_graph(exec, other, &[]),
            "cuStreamSynchronize, capturing stream" => d.synchronize(stream),
            "cuStreamQuery, capturing stream" => d.query(stream).map(drop),
            "cuStreamBeginCapture again" => d.begin_capture(stream, CaptureMode::ThreadLocal),
            "cuMemAllocAsync, capturing stream" => d.mem_alloc_async(stream, 4096).map(drop),
            "cuMemAllocAsync, other stream" => d.mem_alloc_async(other, 4096).map(drop),
            // "That" is what the refused call before it gave: the null address.
            "cuMemFreeAsync of that, capturing stream" => d.mem_free_async(stream, DevicePtr::NULL),
            "cuMemFreeAsync of a cuMemAlloc pointer" => d.mem_free_async(stream, self.plain),
            "cuStreamWaitEvent, event recorded outside" => d.wait(stream, outside),
            "cuStreamWaitEvent, event never recorded" => d.wait(stream, never),
            "cuStreamWaitEvent EXTERNAL, recorded outside" => d.wait_external(stream, outside),
            "cuEventRecord then cuEventQuery" => {
                d.record(event, stream)?;
                d.query_event(event).map(drop)
            }
            "fork to another stream, no join" => {
                d.record(event, stream)?;
                d.wait(other, event)?;
                self.kernel(other)
            }
            "fork, launch on both, join" => {
                d.record(event, stream)?;
                d.wait(other, event)?;
                self.kernel(stream)?;
                self.kernel(other)?;
                d.record(event, other)?;
                d.wait(stream, event)
            }
            "cuGraphLaunch into the capturing stream" => d.launch_graph(exec, stream, &[]),
            "cuGraphExecKernelNodeSetParams, other exec" => {
                d.exec_kernel_set_params(exec, 0, &self.args())
            }
            "cuGraphExecUpdate, other exec" => d.exec_update(exec, graph),
            "cuLaunchHostFunc" => d.launch_host_func(stream, || {}),
            "cuMemcpyHtoDAsync, pageable source" => d.memcpy_htod_async(stream, first, buffer),
            "cuMemcpyDtoHAsync, pageable target" => d.memcpy_dtoh_async(stream, buffer, first),
            "cuMemsetD32Async + DtoDAsync" => {
                d.fill(stream, first, 1, 64)?;
                d.copy(stream, second, first, 64)
            }
            "zero-byte cuMemcpyDtoDAsync" => d.copy(stream, second, first, 0),
            "kernel on the legacy stream" | "kernel on the legacy stream, blocking capture" => {
                self.kernel(&d.default_stream())
            }
            "relaxed for one call by exchanging the mode" => {
                let before = d.exchange_capture_mode(CaptureMode::Relaxed)?;
                assert_eq!(before, CaptureMode::Global);
                d.mem_alloc(4096)?;
                assert_eq!(d.exchange_capture_mode(before)?, CaptureMode::Relaxed);
                Ok(())
            }
            "cuMemAlloc on another thread" => elsewhere(|| d.mem_alloc(4096).map(drop)),
            "cuStreamEndCapture on another thread" => elsewhere(|| d.end_capture(stream).map(drop)),
            "... and freed from outside afterwards" => d.mem_free_async(other, DevicePtr::NULL),
            "... and freed with cuMemFree afterwards" => d.mem_free(self.plain),
            "... cuEventQuery after the capture ended" => d.query_event(event).map(drop),
            "... cuStreamWaitEvent after the capture ended" => d.wait(other, event),
            _ => panic!("the table has a row that the test does not know: {name}"),
        }
    }
}

fn elsewhere<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(f).join().unwrap())
}

/// A result as the measurement wrote it.
fn code<T>(result: &Result<T, DeviceError>) -> String {
    let Err(error) = result else {
        return "ok".into();
    };
    let name = match error.code {
        Code::InvalidValue => "INVALID_VALUE",
        Code::IllegalState => "ILLEGAL_STATE",
        Code::StreamCaptureUnsupported => "STREAM_CAPTURE_UNSUPPORTED",
        Code::StreamCaptureInvalidated => "STREAM_CAPTURE_INVALIDATED",
        Code::StreamCaptureUnjoined => "STREAM_CAPTURE_UNJOINED",
        Code::StreamCaptureIsolation => "STREAM_CAPTURE_ISOLATION",
        Code::StreamCaptureImplicit => "STREAM_CAPTURE_IMPLICIT",
        Code::CapturedEvent => "CAPTURED_EVENT",
        Code::StreamCaptureWrongThread => "STREAM_CAPTURE_WRONG_THREAD",
        other => panic!("no row gives {other:?}: {error}"),
    };
    format!("{name} ({})", error.code.number())
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The call of a row (what stands before two spaces) and its first word after that, which is the mode where there is one.
fn split(row: &str) -> (String, &str) {
    let row = row.trim();
    let (name, rest) = row.split_once("  ").unwrap();
    (name.to_owned(), rest.split_whitespace().next().unwrap())
}

#[test]
fn every_measured_row_holds() {
    let mut scene = None;
    let mut rows = 0;
    for row in MEASURED.lines().filter(|row| !row.is_empty()) {
        let (name, mode) = split(row);
        rows += 1;
        let got = if name.starts_with("...") {
            let scene: &Scene = scene.as_ref().unwrap();
            format!("{name} {}", code(&scene.call(&name)))
        } else if name == "cuStreamBeginCapture on the legacy stream" {
            let modes = [
                CaptureMode::Global,
                CaptureMode::ThreadLocal,
                CaptureMode::Relaxed,
            ];
            let d = HostDevice::new();
            let begun = d.begin_capture(&d.default_stream(), modes[mode.parse::<usize>().unwrap()]);
            format!("{name} {mode} {}", code(&begun))
        } else {
            let s = scene.insert(Scene::new(name.ends_with("blocking capture")));
            let capture_mode = match mode {
                "global" => CaptureMode::Global,
                "thread" => CaptureMode::ThreadLocal,
                "relaxed" => CaptureMode::Relaxed,
                _ => panic!("no such mode: {row}"),
            };
            s.device.begin_capture(&s.stream, capture_mode).unwrap();
            let result = s.call(&name);
            let status = match s.device.capture_status(&s.stream).unwrap() {
                CaptureStatus::None => "none",
                CaptureStatus::Active => "active",
                CaptureStatus::Invalidated => "INVALIDATED",
            };
            let end = s.device.end_capture(&s.stream);
            if status == "INVALIDATED" {
                // T3-04: the end names the refusal, whether a call on a stream of the capture or any other.
                let first = end.as_ref().unwrap_err().first.as_deref();
                assert_eq!(first, result.as_ref().err(), "{row}");
            }
            let nodes = end
                .as_ref()
                .map_or_else(|_| "-".to_owned(), ToString::to_string);
            for stream in [&s.stream, &s.other] {
                assert_eq!(
                    s.device.capture_status(stream),
                    Ok(CaptureStatus::None),
                    "{row}"
                );
            }
            format!(
                "{name} {mode} {} {status} end {} {nodes}",
                code(&result),
                code(&end)
            )
        };
        assert_eq!(words(&got), words(row));
    }
    assert_eq!(rows, 89);
}

#[test]
fn pageable_copies_are_refused_and_leave_the_capture_alone() {
    let s = Scene::new(false);
    s.device
        .begin_capture(&s.stream, CaptureMode::Global)
        .unwrap();
    assert_eq!(
        s.device.write(&s.stream, s.range, &[1]).unwrap_err().code,
        Code::StreamCaptureUnsupported
    );
    assert_eq!(
        s.device
            .read(&s.stream, &mut [0], s.range)
            .unwrap_err()
            .code,
        Code::StreamCaptureUnsupported
    );
    assert_eq!(s.device.write(&s.other, s.range, &[1]), Ok(()));
    assert_eq!(
        s.device.capture_status(&s.stream),
        Ok(CaptureStatus::Active)
    );
    // Reading waits, and waiting for another stream is what the capture minds.
    assert_eq!(
        s.device.read(&s.other, &mut [0], s.range).unwrap_err().code,
        Code::StreamCaptureUnsupported
    );
    assert_eq!(
        s.device.capture_status(&s.stream),
        Ok(CaptureStatus::Invalidated)
    );
    assert_eq!(
        s.kernel(&s.stream).unwrap_err().code,
        Code::StreamCaptureInvalidated
    );
    assert_eq!(
        s.device.end_capture(&s.stream).unwrap_err().code,
        Code::StreamCaptureInvalidated
    );
}

#[test]
fn memory_from_outside_is_not_freed_inside() {
    let s = Scene::new(false);
    s.device
        .begin_capture(&s.stream, CaptureMode::ThreadLocal)
        .unwrap();
    let refused = s.device.mem_free_async(&s.stream, s.pooled).unwrap_err();
    assert_eq!(refused.code, Code::InvalidValue);
    assert_eq!(
        s.device.end_capture(&s.stream).unwrap().to_string(),
        "no nodes"
    );
    assert_eq!(s.device.mem_free_async(&s.other, s.pooled), Ok(()));
}

#[test]
fn captures_do_not_mix() {
    let s = Scene::new(false);
    let d = &s.device;
    d.begin_capture(&s.stream, CaptureMode::Relaxed).unwrap();
    d.begin_capture(&s.other, CaptureMode::Relaxed).unwrap();
    d.record(&s.event, &s.stream).unwrap();
    s.kernel(&s.other).unwrap();
    let merged = d.wait(&s.other, &s.event).unwrap_err();
    assert_eq!(
        (merged.code, merged.position),
        (Code::StreamCaptureMerge, Some(2))
    );
    // It broke both, of one of which it was an operation.
    for (stream, position) in [(&s.stream, None), (&s.other, Some(2))] {
        let ended = d.end_capture(stream).unwrap_err();
        assert_eq!(ended.code, Code::StreamCaptureInvalidated);
        let first = ended.first.unwrap();
        assert_eq!(
            (first.code, first.position),
            (Code::StreamCaptureMerge, position)
        );
    }
    // A capture ends where it was begun.
    d.begin_capture(&s.stream, CaptureMode::Relaxed).unwrap();
    d.record(&s.event, &s.stream).unwrap();
    d.wait(&s.other, &s.event).unwrap();
    assert_eq!(
        d.end_capture(&s.other).unwrap_err().code,
        Code::StreamCaptureUnmatched
    );
    assert_eq!(
        d.end_capture(&s.stream).unwrap_err().code,
        Code::StreamCaptureInvalidated
    );
    assert_eq!(d.capture_status(&s.other), Ok(CaptureStatus::None));
}

/// T3-04: counted are calls that become nodes, on whichever stream, and those that are refused in the place of one.
#[test]
fn t3_04_what_is_an_operation() {
    let s = Scene::new(false);
    let d = &s.device;
    let position = |result: Result<(), DeviceError>| result.unwrap_err().position;
    let free = || d.mem_free_async(&s.stream, s.plain); // always refused, and touches no capture
    assert_eq!(position(free()), None, "nothing captures");
    d.begin_capture(&s.stream, CaptureMode::Relaxed).unwrap();
    assert_eq!(position(free()), Some(1));
    s.kernel(&s.stream).unwrap();
    d.fill(&s.stream, s.range, 1, 0).unwrap();
    d.launch_host_func(&s.stream, || {}).unwrap();
    d.mem_alloc_async(&s.stream, 4096).unwrap();
    assert_eq!(position(free()), Some(6));
    // Neither events nor other streams count, until an event joins them.
    d.record(&s.event, &s.stream).unwrap();
    s.kernel(&s.other).unwrap();
    d.wait(&s.other, &s.event).unwrap();
    s.kernel(&s.other).unwrap();
    assert_eq!(position(free()), Some(8));
    assert_eq!(position(d.write(&s.stream, s.range, &[1])), Some(9));
    let begun = d.begin_capture(&s.stream, CaptureMode::Relaxed);
    assert_eq!(position(begun), None);
    let ended = d.end_capture(&s.other).unwrap_err();
    assert_eq!(
        (ended.code, ended.position, &ended.first),
        (Code::StreamCaptureUnmatched, None, &None)
    );
    let late = s.kernel(&s.other).unwrap_err();
    assert_eq!(
        (late.code, late.position),
        (Code::StreamCaptureInvalidated, Some(10))
    );
    assert_eq!(late.first.as_deref(), Some(&ended));
    // Nor does a stream that would join what is broken.
    let third = d.create_stream().unwrap();
    let joined = d.wait(&third, &s.event).unwrap_err();
    assert_eq!((joined.position, joined.root()), (None, &ended));
    assert_eq!(d.end_capture(&s.stream).unwrap_err().root(), &ended);
    assert_eq!(position(free()), None, "it is over");
}

#[test]
fn an_unended_capture_goes_with_its_stream() {
    let s = Scene::new(false);
    s.device
        .begin_capture(&s.stream, CaptureMode::Global)
        .unwrap();
    s.device.record(&s.event, &s.stream).unwrap();
    s.device.wait(&s.other, &s.event).unwrap();
    assert_eq!(s.device.counts().captures, 1);
    let Scene {
        device,
        stream,
        other,
        ..
    } = s;
    drop(stream);
    assert_eq!(device.capture_status(&other), Ok(CaptureStatus::None));
    assert_eq!((device.counts().captures, device.counts().streams), (0, 1));
    assert_eq!(device.synchronize_device(), Ok(()));
}

#[test]
fn memory_of_a_graph_comes_at_its_launch_and_goes_with_it() {
    let s = Scene::new(false);
    let d = &s.device;
    d.synchronize(&s.other).unwrap();
    let before = d.counts();
    d.begin_capture(&s.stream, CaptureMode::ThreadLocal)
        .unwrap();
    let ptr = d.mem_alloc_async(&s.stream, 4096).unwrap();
    d.fill(&s.stream, ptr, 5, 64).unwrap();
    let graph = d.end_capture(&s.stream).unwrap();
    assert_eq!(graph.to_string(), "mem_alloc×1 memset×1");
    assert_eq!(d.graph_info(&graph).unwrap().memory, 1);
    assert_eq!(d.counts().mapped_bytes, before.mapped_bytes);
    // Never launched: nothing to free.
    assert_eq!(
        d.mem_free_async(&s.other, ptr).unwrap_err().code,
        Code::InvalidValue
    );
    let exec = d.instantiate(&graph).unwrap();
    assert_eq!(d.instantiate(&graph).unwrap_err().code, Code::NotSupported);
    d.launch_graph(&exec, &s.stream, &[]).unwrap();
    let mut bytes = [0; 64];
    d.read(&s.stream, &mut bytes, ptr).unwrap();
    assert_eq!(
        (bytes, d.counts().mapped_bytes),
        ([5; 64], before.mapped_bytes + 2 * MIB)
    );
    drop((graph, exec));
    let after = d.counts();
    assert_eq!(
        (after.mapped_bytes, after.reserved_ranges),
        (before.mapped_bytes, before.reserved_ranges)
    );
}
