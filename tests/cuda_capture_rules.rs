//! A sample of the measured capture rules, put to the CUDA device: what the simulated device is held to, the driver says itself.
#![cfg(feature = "cuda-any")]

mod cuda_support;

use cuda_support::cuda;
use cudagraph_trees::device::cuda::{
    CudaDevice, CudaEvent, CudaExec, CudaFunction, CudaGraph, CudaStream,
};
use cudagraph_trees::device::kernels;
use cudagraph_trees::device::{
    Call, CaptureMode, CaptureStatus, Code, Device, DeviceError, DevicePtr, KernelArg, LaunchConfig,
};

/// The call; the mode (g, t, r); its code (0: ok); whether the capture stays sound; the end's code; the nodes captured.
type Row = (&'static str, char, u32, bool, u32, usize);

const ROWS: &[Row] = &[
    ("nothing", 't', 0, true, 0, 0),
    ("map", 'g', 0, true, 0, 0),
    ("map", 't', 0, true, 0, 0),
    ("map", 'r', 0, true, 0, 0),
    ("unmap", 'g', 0, true, 0, 0),
    ("unmap", 'r', 0, true, 0, 0),
    ("load", 'g', 0, true, 0, 0),
    ("memory info", 'g', 0, true, 0, 0),
    ("query event outside", 'g', 900, false, 901, 0),
    ("query event outside", 't', 900, false, 901, 0),
    ("query event outside", 'r', 0, true, 0, 0),
    ("synchronize event outside", 'g', 900, false, 901, 0),
    ("query other", 't', 900, false, 901, 0),
    ("synchronize other", 'g', 900, false, 901, 0),
    ("synchronize other", 'r', 0, true, 0, 0),
    ("synchronize device", 'g', 900, false, 901, 0),
    ("synchronize device", 'r', 900, false, 901, 0),
    ("instantiate other", 'g', 900, false, 901, 0),
    ("instantiate other", 'r', 0, true, 0, 0),
    ("launch other graph, other stream", 'g', 0, true, 0, 0),
    ("synchronize capturing", 't', 900, false, 901, 0),
    ("query capturing", 't', 900, false, 901, 0),
    ("begin again", 't', 401, true, 0, 0),
    ("wait for outside", 't', 905, false, 901, 0),
    ("wait for never", 't', 0, true, 0, 0),
    ("record then query", 't', 907, false, 901, 0),
    ("fork, no join", 't', 0, true, 904, 0),
    ("fork, launch on both, join", 't', 0, true, 0, 2),
    ("launch graph into it", 't', 900, false, 901, 0),
    ("fill and copy", 't', 0, true, 0, 2),
    ("copy nothing", 't', 0, true, 0, 0),
    ("kernel on the default stream", 't', 0, true, 0, 0),
    ("end elsewhere", 'g', 908, true, 401, 0),
    ("end elsewhere", 'r', 0, true, 401, 0),
    // The runtime's own rules.
    ("write", 'g', 900, true, 0, 0),
    ("read", 'g', 900, true, 0, 0),
    ("write other", 'g', 0, true, 0, 0),
    ("write much to other", 't', 0, true, 0, 0),
    ("read other", 'g', 900, false, 901, 0),
    ("read other", 'r', 0, true, 0, 0),
];

struct Scene {
    d: CudaDevice,
    stream: CudaStream,
    other: CudaStream,
    /// Recorded on `other` before the capture.
    outside: CudaEvent,
    event: CudaEvent,
    never: CudaEvent,
    function: CudaFunction,
    graph: CudaGraph,
    exec: CudaExec,
    /// Four pages, of which the first two are mapped by one call each.
    ptr: DevicePtr,
}

impl Scene {
    fn new(d: CudaDevice) -> Self {
        let page = d.granularity();
        let (stream, other) = (d.create_stream().unwrap(), d.create_stream().unwrap());
        let ptr = d.reserve(4 * page).unwrap();
        d.map(ptr, page).unwrap();
        d.map(ptr.offset(page), page).unwrap();
        let event = || d.create_event().unwrap();
        let (outside, event, never) = (event(), event(), event());
        let function = d.load(&kernels::fill()).unwrap();
        d.begin_capture(&other, CaptureMode::Relaxed).unwrap();
        d.fill(&other, ptr, 1, 4).unwrap();
        let graph = d.end_capture(&other).unwrap();
        let exec = d.instantiate(&graph).unwrap();
        d.record(&outside, &other).unwrap();
        Scene {
            d,
            stream,
            other,
            outside,
            event,
            never,
            function,
            graph,
            exec,
            ptr,
        }
    }

    fn kernel(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        let args = [
            KernelArg::Ptr(self.ptr),
            KernelArg::U64(4),
            KernelArg::F32(1.0),
        ];
        self.d
            .launch(stream, &self.function, LaunchConfig::for_elements(4), &args)
    }

    fn call(&self, name: &str) -> Result<(), DeviceError> {
        let Scene {
            d,
            stream,
            other,
            outside,
            event,
            never,
            exec,
            graph,
            ptr,
            ..
        } = self;
        let page = d.granularity();
        match name {
            "nothing" => Ok(()),
            "map" => d.map(ptr.offset(2 * page), page),
            "unmap" => d.unmap(ptr.offset(page), page),
            "load" => d.load(&kernels::add()).map(drop),
            "memory info" => d.memory_info().map(drop),
            "query event outside" => d.query_event(outside).map(drop),
            "synchronize event outside" => d.synchronize_event(outside),
            "query other" => d.query(other).map(drop),
            "synchronize other" => d.synchronize(other),
            "synchronize device" => d.synchronize_device(),
            "instantiate other" => d.instantiate(graph).map(drop),
            "launch other graph, other stream" => d.launch_graph(exec, other, &[]),
            "synchronize capturing" => d.synchronize(stream),
            "query capturing" => d.query(stream).map(drop),
            "begin again" => d.begin_capture(stream, CaptureMode::ThreadLocal),
            "wait for outside" => d.wait(stream, outside),
            "wait for never" => d.wait(stream, never),
            "record then query" => {
                d.record(event, stream)?;
                d.query_event(event).map(drop)
            }
            "fork, no join" => {
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
            "launch graph into it" => d.launch_graph(exec, stream, &[]),
            "fill and copy" => {
                d.fill(stream, *ptr, 1, 64)?;
                d.copy(stream, ptr.offset(page), *ptr, 64)
            }
            "copy nothing" => d.copy(stream, ptr.offset(page), *ptr, 0),
            "kernel on the default stream" => self.kernel(&d.default_stream()),
            "end elsewhere" => {
                std::thread::scope(|s| s.spawn(|| d.end_capture(stream).map(drop)).join().unwrap())
            }
            "write" => d.write(stream, *ptr, &[1]),
            "read" => d.read(stream, &mut [0], *ptr),
            "write other" => d.write(other, *ptr, &[1]),
            "write much to other" => d.write(other, *ptr, &vec![1; 1 << 20]),
            "read other" => d.read(other, &mut [0], *ptr),
            _ => panic!("no such call: {name}"),
        }
    }

    /// Every stream is free again, and works.
    fn check_usable(&self) {
        for stream in [&self.stream, &self.other] {
            assert_eq!(self.d.capture_status(stream), Ok(CaptureStatus::None));
            self.kernel(stream).unwrap();
            self.d.synchronize(stream).unwrap();
        }
    }
}

fn number<T>(result: &Result<T, DeviceError>) -> u32 {
    result.as_ref().err().map_or(0, |error| error.code.number())
}

/// T3-04: what breaks a capture through an event of it, and what a stream meets that joins it late.
fn captures_are_known_by_their_events(d: &CudaDevice) {
    let s = Scene::new(d.clone());
    let d = &s.d;
    for stream in [&s.stream, &s.other] {
        d.begin_capture(stream, CaptureMode::Relaxed).unwrap();
        s.kernel(stream).unwrap();
    }
    d.record(&s.event, &s.stream).unwrap();
    let merged = d.wait(&s.other, &s.event).unwrap_err();
    assert_eq!((merged.code.number(), merged.position), (902, Some(2)));
    for stream in [&s.stream, &s.other] {
        let broken = d.capture_status(stream) == Ok(CaptureStatus::Invalidated);
        let first = d.end_capture(stream).err().and_then(|error| error.first);
        let position = (stream == &s.other).then_some(2);
        let named = first.map(|first| (first.call, first.position));
        assert_eq!(named, broken.then_some((Call::Wait, position)));
    }
    d.begin_capture(&s.stream, CaptureMode::Relaxed).unwrap();
    d.record(&s.event, &s.stream).unwrap();
    d.wait(&s.other, &s.event).unwrap();
    s.kernel(&s.other).unwrap();
    let waited = d.synchronize(&s.other).unwrap_err();
    assert_eq!(waited.position, Some(2));
    let third = d.create_stream().unwrap();
    let joined = d.wait(&third, &s.event).unwrap_err();
    assert_eq!(joined.position, None);
    if joined.code == Code::StreamCaptureInvalidated {
        assert_eq!(joined.root(), &waited);
    }
    assert_eq!(s.kernel(&s.stream).unwrap_err().root(), &waited);
    assert_eq!(d.end_capture(&s.stream).unwrap_err().root(), &waited);
    // Ended elsewhere than it was begun.
    d.begin_capture(&s.stream, CaptureMode::Relaxed).unwrap();
    d.record(&s.event, &s.stream).unwrap();
    d.wait(&s.other, &s.event).unwrap();
    let ended = d.end_capture(&s.other).unwrap_err();
    assert_eq!((ended.code.number(), ended.position), (903, None));
    let broken = d.capture_status(&s.stream) == Ok(CaptureStatus::Invalidated);
    let first = d.end_capture(&s.stream).unwrap_err().first;
    assert_eq!(first.as_deref(), broken.then_some(&ended));
    s.check_usable();
}

/// One test, so that no other thread's calls meet a capture in the global mode.
#[test]
fn the_driver_answers_as_measured() {
    let Some(d) = cuda() else { return };
    assert_eq!(
        number(&d.begin_capture(&d.default_stream(), CaptureMode::Global)),
        900
    );
    let mut wrong = Vec::new();
    for row in ROWS {
        let (name, mode, ..) = *row;
        let s = Scene::new(d.clone());
        let mode_of = match mode {
            'g' => CaptureMode::Global,
            't' => CaptureMode::ThreadLocal,
            _ => CaptureMode::Relaxed,
        };
        s.d.begin_capture(&s.stream, mode_of).unwrap();
        let called = s.call(name);
        let sound = s.d.capture_status(&s.stream).unwrap() != CaptureStatus::Invalidated;
        let end = s.d.end_capture(&s.stream);
        if !sound {
            // T3-04: the end names the refusal.
            let first = end.as_ref().err().and_then(|error| error.first.as_deref());
            if first.is_none() || first != called.as_ref().err() {
                wrong.push(format!(
                    "{name} {mode}: {called:?}, and the end names {first:?}"
                ));
            }
        }
        let nodes = end
            .as_ref()
            .map_or(0, |graph| s.d.graph_info(graph).unwrap().nodes());
        let got = (name, mode, number(&called), sound, number(&end), nodes);
        if got != *row {
            wrong.push(format!(
                "{got:?} instead of {row:?}: {called:?}, {:?}",
                end.err()
            ));
        }
        s.check_usable();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    captures_are_known_by_their_events(&d);
}
