//! Events with time, and events that graphs record and wait for (CAP-14).

mod common;

use std::sync::Arc;

use common::{Rig, hosts, on_cuda};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, CaptureMode, CaptureStatus, Code, Device, DeviceError};
use cudagraph_trees::{FunctionSpec, Graph, Phase, Tensor};

suite!(
    cap_14_the_time_between_events_of_a_stream,
    cap_14_a_graph_takes_its_own_time,
    cap_14_the_second_graph_waits_for_the_first,
    cap_14_a_stream_waits_for_the_middle_of_a_graph,
    cap_14_a_tree_records_events_of_the_callers,
    cap_14_a_graph_keeps_its_events,
    cap_14_no_time_is_an_error,
    cap_14_external_calls_are_operations_of_a_capture,
    cap_14_outside_of_captures_external_is_plain,
    an_event_of_a_capture_that_has_ended_breaks_who_waits_in_a_capture,
);

/// Makes `stream` busy for a while: this many kernels.
fn busy<D: Device>(rig: &Rig<D>, stream: &D::Stream, x: &Tensor<D>, kernels: usize) {
    let (ptr, n) = (x.ptr().unwrap(), x.bytes() / 4);
    for _ in 0..kernels {
        rig.kernels
            .increment(&rig.device, stream, ptr, n, 1.0)
            .unwrap();
    }
}

/// The time is that of so many pieces of work, on the device whose clock is its work; more than none on any.
#[track_caller]
fn took(elapsed: f32, pieces: u32) {
    assert!(elapsed > 0.0, "{elapsed} ms");
    if !on_cuda() {
        let expected = pieces as f32 * 1e-3;
        assert!(
            (elapsed - expected).abs() < 1e-6,
            "{elapsed} ms of {expected}"
        );
    }
}

fn code<T: std::fmt::Debug>(result: Result<T, DeviceError>) -> (Call, Code, String) {
    let error = result.unwrap_err();
    (error.call, error.code, error.detail)
}

fn cap_14_the_time_between_events_of_a_stream<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let x = rig.floats(&[0.0; 4]);
    d.synchronize(&rig.stream).unwrap();
    let [start, middle, end] = [0; 3].map(|_| d.create_timed_event().unwrap());
    d.record(&start, &rig.stream).unwrap();
    busy(&rig, &rig.stream, &x, 20);
    d.record(&middle, &rig.stream).unwrap();
    busy(&rig, &rig.stream, &x, 30);
    d.record(&end, &rig.stream).unwrap();
    d.synchronize_event(&end).unwrap();
    let all = d.elapsed(&start, &end).unwrap();
    took(all, 50);
    took(d.elapsed(&start, &middle).unwrap(), 20);
    took(d.elapsed(&middle, &end).unwrap(), 30);
    assert_eq!(d.elapsed(&middle, &middle), Ok(0.0));
    assert_eq!(d.elapsed(&end, &start), Ok(-all));
    // The last record counts.
    d.record(&start, &rig.stream).unwrap();
    busy(&rig, &rig.stream, &x, 10);
    d.record(&start, &rig.stream).unwrap();
    busy(&rig, &rig.stream, &x, 5);
    d.record(&end, &rig.stream).unwrap();
    d.synchronize(&rig.stream).unwrap();
    took(d.elapsed(&start, &end).unwrap(), 5);
    assert_eq!(rig.read(&x), [65.0; 4]);
    drop((x, start, middle, end));
    rig.finish();
}

fn cap_14_a_graph_takes_its_own_time<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let x = rig.floats(&[0.0; 4]);
    let [start, end] = [0; 2].map(|_| d.create_timed_event().unwrap());
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    busy(&rig, &rig.stream, &x, 3);
    d.record_external(&start, &rig.stream).unwrap();
    busy(&rig, &rig.stream, &x, 40);
    d.record_external(&end, &rig.stream).unwrap();
    busy(&rig, &rig.stream, &x, 2);
    capture.end().unwrap();
    let info = graph.info().unwrap();
    assert_eq!((info.kernels, info.other), (45, 2));
    // A capture records nothing: there is nothing to wait for, and no time.
    for event in [&start, &end] {
        assert_eq!(d.query_event(event), Ok(true));
        assert_eq!(d.synchronize_event(event), Ok(()));
    }
    let (call, refused, detail) = code(d.elapsed(&start, &end));
    assert_eq!((call, refused), (Call::Elapsed, Code::InvalidHandle));
    assert!(
        detail.contains("start") && detail.contains("never recorded"),
        "{detail}"
    );
    for round in 1..=3 {
        graph.replay(&rig.stream).unwrap();
        d.synchronize_event(&end).unwrap();
        took(d.elapsed(&start, &end).unwrap(), 40);
        assert_eq!(rig.read(&x), [45.0 * round as f32; 4]);
    }
    drop((graph, x, start, end));
    rig.finish();
}

/// The first: y = x * 2, late. The second: z = y + 1. Each on a stream of its own.
struct Pair<D: Device> {
    graphs: [Graph<D>; 2],
    streams: [D::Stream; 2],
    x: Tensor<D>,
    y: Tensor<D>,
    z: Tensor<D>,
    _late: Tensor<D>,
}

impl<D: Device> Pair<D> {
    fn new(rig: &Rig<D>, event: &D::Event, waits: bool) -> Self {
        let d = &rig.device;
        let streams = [0; 2].map(|_| d.create_stream().unwrap());
        let [x, y, z, late] = [0; 4].map(|_| rig.floats(&[0.0; 4]));
        d.synchronize(&rig.stream).unwrap();
        let mut graphs = [0; 2].map(|_| Graph::new(&rig.allocator));
        let capture = graphs[0].capture(&streams[0]).unwrap();
        busy(rig, &streams[0], &late, 20);
        rig.scale_into(&streams[0], &y, &x, 2.0, 0.0);
        d.record_external(event, &streams[0]).unwrap();
        busy(rig, &streams[0], &late, 20);
        capture.end().unwrap();
        let capture = graphs[1].capture(&streams[1]).unwrap();
        if waits {
            d.wait_external(&streams[1], event).unwrap();
        }
        rig.scale_into(&streams[1], &z, &y, 1.0, 1.0);
        capture.end().unwrap();
        assert_eq!(graphs[1].info().unwrap().other, usize::from(waits));
        Pair {
            graphs,
            streams,
            x,
            y,
            z,
            _late: late,
        }
    }

    /// What the second makes of a value that the first was given.
    fn run(&self, rig: &Rig<D>, value: f32) -> Vec<f32> {
        let d = &rig.device;
        rig.put(&self.x, &[value; 4]);
        d.synchronize(&rig.stream).unwrap();
        for (graph, stream) in self.graphs.iter().zip(&self.streams) {
            graph.replay(stream).unwrap();
        }
        for stream in &self.streams {
            d.synchronize(stream).unwrap();
        }
        rig.read(&self.z)
    }
}

fn cap_14_the_second_graph_waits_for_the_first<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let event = d.create_event().unwrap();
    let pair = Pair::new(&rig, &event, true);
    assert_eq!(d.query_event(&event), Ok(true), "before the first launch");
    // Nothing was recorded yet, so the second alone waits for nothing.
    pair.graphs[1].replay(&pair.streams[1]).unwrap();
    d.synchronize(&pair.streams[1]).unwrap();
    assert_eq!(rig.read(&pair.z), [1.0; 4]);
    for round in 1..=8 {
        let value = round as f32;
        assert_eq!(pair.run(&rig, value), [2.0 * value + 1.0; 4]);
        assert_eq!(d.query_event(&event), Ok(true));
    }
    drop((pair, event));
    rig.finish();
}

/// Without the wait, some schedule of the simulated device runs the second too early.
#[test]
fn cap_14_without_the_wait_some_schedule_is_wrong() {
    let wrong = (0..16).filter(|seed| {
        let rig = Rig::new(HostDevice::builder().seed(*seed).build().unwrap());
        let event = rig.device.create_event().unwrap();
        Pair::new(&rig, &event, false).run(&rig, 3.0) != [7.0; 4]
    });
    assert!(wrong.count() > 0);
}

fn cap_14_a_stream_waits_for_the_middle_of_a_graph<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let event = d.create_event().unwrap();
    let pair = Pair::new(&rig, &event, false);
    let side = d.create_stream().unwrap();
    let copy = rig.floats(&[0.0; 4]);
    for round in 1..=4 {
        rig.put(&pair.x, &[round as f32; 4]);
        d.synchronize(&rig.stream).unwrap();
        pair.graphs[0].replay(&pair.streams[0]).unwrap();
        // It is recorded by the launch, not only when the graph comes to it.
        d.wait(&side, &event).unwrap();
        rig.scale_into(&side, &copy, &pair.y, 10.0, 0.0);
        let bytes = copy.read(d, &side).unwrap();
        assert_eq!(
            bytes,
            [20.0 * round as f32; 4].map(f32::to_le_bytes).concat()
        );
        // The side has read before the next round writes.
        d.synchronize(&pair.streams[0]).unwrap();
    }
    drop((pair, event, copy));
    rig.finish();
}

/// The host hears of the middle before the end.
#[test]
fn cap_14_the_middle_of_a_graph_is_reached_before_its_end() {
    for device in hosts() {
        let rig = Rig::new(device);
        let d = &rig.device;
        let x = rig.floats(&[0.0; 4]);
        let [middle, end] = [0; 2].map(|_| d.create_event().unwrap());
        let mut graph = Graph::new(&rig.allocator);
        let capture = graph.capture(&rig.stream).unwrap();
        busy(&rig, &rig.stream, &x, 5);
        d.record_external(&middle, &rig.stream).unwrap();
        busy(&rig, &rig.stream, &x, 5);
        d.record_external(&end, &rig.stream).unwrap();
        capture.end().unwrap();
        d.synchronize(&rig.stream).unwrap();
        for _ in 0..3 {
            let before = d.counts().kernels_run;
            graph.replay(&rig.stream).unwrap();
            assert_eq!(d.poll_event(&middle), Ok(false));
            d.synchronize_event(&middle).unwrap();
            assert_eq!(d.counts().kernels_run, before + 5);
            assert_eq!(d.poll_event(&middle), Ok(true));
            assert_eq!(d.poll_event(&end), Ok(false));
            d.synchronize_event(&end).unwrap();
            assert_eq!(d.counts().kernels_run, before + 10);
        }
        drop((graph, x, middle, end));
        rig.finish();
    }
}

fn cap_14_a_tree_records_events_of_the_callers<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let events = Arc::new([0; 2].map(|_| d.create_timed_event().unwrap()));
    let used = events.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        rec.device().record_external(&used[0], rec.stream())?;
        let mut y = k.apply(rec, &x, 2.0, 0.0)?;
        for _ in 0..9 {
            y = k.apply(rec, &y, 1.0, 1.0)?;
        }
        rec.device().record_external(&used[1], rec.stream())?;
        Ok(vec![y])
    });
    let side = d.create_stream().unwrap();
    let copy = rig.floats(&[0.0; 4]);
    for (round, want) in [Phase::Warmup, Phase::Record, Phase::Replay, Phase::Replay]
        .into_iter()
        .enumerate()
    {
        let x = rig.floats(&[round as f32; 4]);
        let step = rig.trees.step();
        let (phase, y) = rig.phased(&f, &step, &x);
        assert_eq!(phase, want);
        // In a warmup as in a replay: recorded where the function records it.
        d.wait(&side, &events[1]).unwrap();
        rig.scale_into(&side, &copy, &y, 1.0, 0.0);
        y.record_stream(&side).unwrap();
        let bytes = copy.read(d, &side).unwrap();
        assert_eq!(
            bytes,
            [2.0 * round as f32 + 9.0; 4].map(f32::to_le_bytes).concat()
        );
        let elapsed = d.elapsed(&events[0], &events[1]).unwrap();
        assert!(elapsed > 0.0, "{elapsed} ms in the {want}");
    }
    drop((f, events, copy));
    rig.finish();
}

fn cap_14_a_graph_keeps_its_events<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let event = d.create_event().unwrap();
    let pair = Pair::new(&rig, &event, true);
    drop(event);
    // Whatever takes its place.
    let others: Vec<_> = (0..8).map(|_| d.create_event().unwrap()).collect();
    for round in 1..=4 {
        for other in &others {
            d.record(other, &rig.stream).unwrap();
        }
        assert_eq!(pair.run(&rig, round as f32), [2.0 * round as f32 + 1.0; 4]);
    }
    drop((pair, others));
    rig.finish();
}

/// Also of a template, of launches that are underway, and of a capture that comes to nothing; and nothing is kept for longer.
#[test]
fn cap_14_events_go_with_the_last_graph() {
    let rig = Rig::new(HostDevice::new());
    let d = &rig.device;
    let x = rig.floats(&[0.0; 4]);
    let before = d.counts().events;
    let event = d.create_event().unwrap();
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    d.wait_external(&rig.stream, &event).unwrap();
    busy(&rig, &rig.stream, &x, 2);
    d.record_external(&event, &rig.stream).unwrap();
    drop(event);
    let template = d.end_capture(&rig.stream).unwrap();
    assert_eq!(d.counts().events, before + 1);
    let exec = d.instantiate(&template).unwrap();
    drop(template);
    assert_eq!(d.counts().events, before + 1);
    d.launch_graph(&exec, &rig.stream, &[]).unwrap();
    drop(exec);
    assert_eq!(d.counts().events, before + 1);
    assert_eq!(rig.read(&x), [2.0; 4]);
    assert_eq!(d.counts().events, before);
    let event = d.create_event().unwrap();
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    d.record_external(&event, &rig.stream).unwrap();
    drop(event);
    d.synchronize(&rig.stream).unwrap_err();
    d.end_capture(&rig.stream).unwrap_err();
    assert_eq!(d.counts().events, before);
    drop(x);
    rig.finish();
}

fn cap_14_no_time_is_an_error<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let x = rig.floats(&[0.0; 4]);
    let plain = d.create_event().unwrap();
    let [done, never, captured] = [0; 3].map(|_| d.create_timed_event().unwrap());
    d.record(&plain, &rig.stream).unwrap();
    d.record(&done, &rig.stream).unwrap();
    d.synchronize(&rig.stream).unwrap();
    let refused = |start: &D::Event, end: &D::Event, want: Code, words: &str| {
        let (call, code, detail) = code(d.elapsed(start, end));
        assert_eq!((call, code), (Call::Elapsed, want), "{detail}");
        assert!(detail.contains(words), "{detail}");
    };
    refused(
        &plain,
        &done,
        Code::InvalidHandle,
        "the start event was made without timing",
    );
    refused(
        &done,
        &plain,
        Code::InvalidHandle,
        "the end event was made without timing",
    );
    refused(
        &never,
        &done,
        Code::InvalidHandle,
        "the start event was never recorded",
    );
    refused(
        &done,
        &never,
        Code::InvalidHandle,
        "the end event was never recorded",
    );
    // In a capture nothing runs, and asking does not break it.
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    busy(&rig, &rig.stream, &x, 1);
    d.record(&captured, &rig.stream).unwrap();
    refused(
        &done,
        &captured,
        Code::InvalidValue,
        "the end event was last recorded in a capture",
    );
    assert_eq!(d.elapsed(&done, &done), Ok(0.0));
    assert_eq!(d.capture_status(&rig.stream), Ok(CaptureStatus::Active));
    capture.end().unwrap();
    refused(
        &captured,
        &done,
        Code::InvalidValue,
        "the start event was last recorded in a capture",
    );
    // Recorded anew, it is an event like any.
    d.record(&captured, &rig.stream).unwrap();
    d.synchronize(&rig.stream).unwrap();
    assert!(d.elapsed(&done, &captured).unwrap() >= 0.0);
    if !on_cuda() {
        // There, nothing runs before it is waited for.
        d.record(&done, &rig.stream).unwrap();
        refused(
            &done,
            &captured,
            Code::NotReady,
            "the start event is not reached yet",
        );
        d.synchronize_event(&done).unwrap();
        assert_eq!(d.elapsed(&done, &captured), Ok(0.0));
    }
    drop((graph, x, plain, done, never, captured));
    rig.finish();
}

#[test]
fn cap_14_events_of_another_device_are_refused() {
    let rig = Rig::new(HostDevice::new());
    let other = HostDevice::new();
    let (ours, theirs) = (
        rig.device.create_timed_event().unwrap(),
        other.create_timed_event().unwrap(),
    );
    let d = &rig.device;
    for result in [
        d.record_external(&theirs, &rig.stream),
        d.wait_external(&rig.stream, &theirs),
        d.elapsed(&ours, &theirs).map(drop),
        d.elapsed(&theirs, &ours).map(drop),
        d.record_external(&ours, &other.create_stream().unwrap()),
    ] {
        let (_, code, detail) = code(result);
        assert_eq!(code, Code::InvalidValue);
        assert!(detail.contains("another device"), "{detail}");
    }
    drop((ours, theirs));
    rig.finish();
}

fn cap_14_external_calls_are_operations_of_a_capture<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let x = rig.floats(&[0.0; 4]);
    let p = x.ptr().unwrap();
    let event = d.create_event().unwrap();
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    d.wait_external(&rig.stream, &event).unwrap();
    busy(&rig, &rig.stream, &x, 1);
    d.record_external(&event, &rig.stream).unwrap();
    let onto_itself = d.copy(&rig.stream, p, p, 4).unwrap_err();
    assert_eq!(
        (onto_itself.code, onto_itself.position),
        (Code::InvalidValue, Some(4))
    );
    let broke = d.synchronize(&rig.stream).unwrap_err();
    assert_eq!(broke.position, Some(5));
    // A broken capture takes neither.
    for (position, (call, result)) in [
        (Call::RecordExternal, d.record_external(&event, &rig.stream)),
        (Call::WaitExternal, d.wait_external(&rig.stream, &event)),
    ]
    .into_iter()
    .enumerate()
    {
        let refused = result.unwrap_err();
        assert_eq!(
            (refused.call, refused.code),
            (call, Code::StreamCaptureInvalidated)
        );
        assert_eq!(refused.position, Some(6 + position as u64));
        assert_eq!(refused.root().position, Some(5));
    }
    d.end_capture(&rig.stream).unwrap_err();
    assert_eq!(rig.read(&x), [0.0; 4]);
    assert_eq!(d.query_event(&event), Ok(true));
    drop((x, event));
    rig.finish();
}

fn cap_14_outside_of_captures_external_is_plain<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let side = d.create_stream().unwrap();
    let (x, copy) = (rig.floats(&[0.0; 4]), rig.floats(&[0.0; 4]));
    d.synchronize(&rig.stream).unwrap();
    let event = d.create_timed_event().unwrap();
    // Of an event that was never recorded: for nothing.
    d.wait_external(&side, &event).unwrap();
    for round in 1..=4 {
        busy(&rig, &rig.stream, &x, 20);
        d.record_external(&event, &rig.stream).unwrap();
        d.wait_external(&side, &event).unwrap();
        rig.scale_into(&side, &copy, &x, 1.0, 0.0);
        let bytes = copy.read(d, &side).unwrap();
        assert_eq!(
            bytes,
            [20.0 * round as f32; 4].map(f32::to_le_bytes).concat()
        );
        assert_eq!(d.elapsed(&event, &event), Ok(0.0));
    }
    drop((x, copy, event));
    rig.finish();
}

fn an_event_of_a_capture_that_has_ended_breaks_who_waits_in_a_capture<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let (x, other) = (rig.floats(&[0.0; 4]), d.create_stream().unwrap());
    let event = d.create_event().unwrap();
    d.begin_capture(&rig.stream, CaptureMode::ThreadLocal)
        .unwrap();
    d.record(&event, &rig.stream).unwrap();
    d.end_capture(&rig.stream).unwrap();

    d.begin_capture(&other, CaptureMode::ThreadLocal).unwrap();
    d.fill(&other, x.ptr().unwrap(), 0, 16).unwrap();
    let refused = d.wait(&other, &event).unwrap_err();
    assert_eq!(
        (refused.code, refused.position),
        (Code::InvalidValue, Some(2))
    );
    assert_eq!(d.capture_status(&other), Ok(CaptureStatus::Invalidated));
    let ended = d.end_capture(&other).err().unwrap();
    assert_eq!(ended.root(), &refused);
    // Where nothing captures it is refused, and that is all.
    let refused = d.wait(&other, &event).unwrap_err();
    assert_eq!((refused.code, refused.position), (Code::InvalidValue, None));
    d.record(&event, &rig.stream).unwrap();
    d.wait(&other, &event).unwrap();
    drop((x, other, event));
    rig.finish();
}
