//! Captures beside other threads and other streams (user reports T4-*).

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use common::Rig;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{
    CaptureMode, CaptureStatus, Code, Device, DeviceError, Fault, FaultReason, Kernel, KernelArg,
    LaunchConfig,
};
use cudagraph_trees::{CaptureOptions, FunctionSpec, Graph, Phase, Tensor, lend};

const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

suite!(
    t4_02_another_thread_allocates_and_frees_across_captures,
    t4_02_tensors_of_captures_are_freed_on_another_thread,
    t4_04_a_watchdog_polls_events_of_before,
    t4_05_what_waits_and_what_it_breaks,
    t4_07_memory_of_another_stream_is_freed_inside,
    a_tree_records_beside_another_capture_of_the_thread,
    t4_10_a_function_forks_and_allocates_there,
    t4_11_kernels_are_loaded_and_dropped_beside_a_capture,
    t4_11_a_library_that_goes_elsewhere_costs_one_recording,
    t4_12_many_streams_and_events_around_a_capture,
);

/// Tells other threads at its end, also in a panic, that they may end.
struct Tells<'a>(&'a AtomicBool);

impl Drop for Tells<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn t4_02_another_thread_allocates_and_frees_across_captures<D: Device>(rig: Rig<D>) {
    const CAPTURES: u64 = 200;
    let x = rig.floats(&[1.0; 16]);
    let over = AtomicBool::new(false);
    let turns = AtomicU64::new(0);
    thread::scope(|scope| {
        let (rig, over, turns) = (&rig, &over, &turns);
        scope.spawn(move || {
            let stream = rig.device.create_stream().unwrap();
            let mut held: Vec<Tensor<D>> = Vec::new();
            for turn in 0.. {
                // Of all sizes, so that segments come, too. Nothing is given back to the device while something captures.
                let bytes = 1 << (9 + turn % 14);
                held.push(rig.allocator.alloc(&stream, bytes).unwrap());
                if held.len() > 8 {
                    held.swap_remove(turn as usize % 8);
                }
                turns.store(turn, Ordering::Relaxed);
                if over.load(Ordering::Acquire) && turn >= 100 {
                    break;
                }
            }
        });
        let _tells = Tells(over);
        for index in 0..CAPTURES {
            let mut graph = Graph::new(&rig.allocator);
            let capture = graph.capture(&rig.stream).unwrap();
            let y = rig.captured(&capture, &x, index as f32, 0.0);
            drop(rig.captured(&capture, &x, 7.0, 0.0));
            capture.end().unwrap();
            graph.replay(&rig.stream).unwrap();
            if index % 20 == 0 {
                assert_eq!(rig.read(&y), [index as f32; 16]);
            }
        }
    });
    assert!(turns.load(Ordering::Relaxed) >= 100);
    drop(x);
    rig.device.synchronize_device().unwrap();
    rig.finish();
}

fn t4_02_tensors_of_captures_are_freed_on_another_thread<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 16]);
    let (send, receive) = std::sync::mpsc::channel::<Tensor<D>>();
    thread::scope(|scope| {
        // Whatever comes is dropped, at whatever moment that is for the captures.
        scope.spawn(move || receive.into_iter().for_each(drop));
        let f = rig.scale_add("f", 2.0, 1.0);
        for index in 0..100 {
            rig.put(&x, &[index as f32; 16]);
            let mut graph = Graph::new(&rig.allocator);
            let capture = graph.capture(&rig.stream).unwrap();
            send.send(rig.captured(&capture, &x, 5.0, 0.0)).unwrap();
            let y = rig.captured(&capture, &x, 3.0, 0.0);
            capture.end().unwrap();
            graph.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&y), [3.0 * index as f32; 16]);
            send.send(y).unwrap();
            let step = rig.trees.step();
            let out = rig.one(&f, &step, &x);
            assert_eq!(rig.read(&out), [2.0 * index as f32 + 1.0; 16]);
            send.send(out).unwrap();
        }
        drop(send);
    });
    drop(x);
    rig.finish();
}

fn t4_04_a_watchdog_polls_events_of_before<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 16]);
    let d = &rig.device;
    let events: Vec<_> = (0..4)
        .map(|_| {
            let event = d.create_event().unwrap();
            d.record(&event, &rig.stream).unwrap();
            event
        })
        .collect();
    let poll = || {
        for event in &events {
            d.query_event(event).unwrap();
        }
    };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                poll();
                if over.load(Ordering::Acquire) {
                    break;
                }
            }
        });
        let _tells = Tells(&over);
        let f = rig.scale_add("f", 2.0, 0.0);
        for index in 0..50 {
            rig.put(&x, &[index as f32; 16]);
            let mut graph = Graph::new(&rig.allocator);
            let capture = graph.capture(&rig.stream).unwrap();
            let y = rig.captured(&capture, &x, 3.0, 0.0);
            // Also for certain in the midst of it.
            thread::scope(|inside| inside.spawn(poll).join().unwrap());
            capture.end().unwrap();
            graph.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&y), [3.0 * index as f32; 16]);
            // A new key is a new recording.
            for _ in 0..3 {
                let step = rig.trees.step();
                let out = rig.call(&f, &step, &[index], &mut [lend(&x)]);
                assert_eq!(rig.read(&out[0]), [2.0 * index as f32; 16]);
            }
        }
    });
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.failed_captures), (50, 0));
    drop((x, events));
    rig.finish();
}

/// One way to wait or to ask, and whether it is refused, and breaks the capture, in each mode: made by the thread that captures, by another.
struct Row<D: Device> {
    name: &'static str,
    call: fn(&D, &Others<D>) -> Result<(), DeviceError>,
    here: [bool; 3],
    elsewhere: [bool; 3],
}

/// What waits are for: the capturing stream, another one, an event of that.
struct Others<D: Device> {
    capturing: D::Stream,
    other: D::Stream,
    outside: D::Event,
}

/// Columns: global, thread-local, relaxed. As the driver answers (a row of the device's, not of the thread's, is that of the whole device).
fn rows<D: Device>() -> Vec<Row<D>> {
    let row = |name, call, here: [u8; 3], elsewhere: [u8; 3]| Row {
        name,
        call,
        here: here.map(|refused| refused == 1),
        elsewhere: elsewhere.map(|refused| refused == 1),
    };
    vec![
        row(
            "synchronize the device",
            |d: &D, _: &Others<D>| d.synchronize_device(),
            [1, 1, 1],
            [1, 1, 1],
        ),
        row(
            "synchronize the capturing stream",
            |d: &D, o: &Others<D>| d.synchronize(&o.capturing),
            [1, 1, 1],
            [1, 1, 1],
        ),
        row(
            "query the capturing stream",
            |d: &D, o: &Others<D>| d.query(&o.capturing).map(drop),
            [1, 1, 1],
            [1, 1, 1],
        ),
        row(
            "synchronize another stream",
            |d: &D, o: &Others<D>| d.synchronize(&o.other),
            [1, 1, 0],
            [1, 0, 0],
        ),
        row(
            "query another stream",
            |d: &D, o: &Others<D>| d.query(&o.other).map(drop),
            [1, 1, 0],
            [1, 0, 0],
        ),
        row(
            "synchronize an event",
            |d: &D, o: &Others<D>| d.synchronize_event(&o.outside),
            [1, 1, 0],
            [1, 0, 0],
        ),
        row(
            "query an event",
            |d: &D, o: &Others<D>| d.query_event(&o.outside).map(drop),
            [1, 1, 0],
            [1, 0, 0],
        ),
        row(
            "quiesce the device",
            |d: &D, _: &Others<D>| d.quiesce(),
            [0; 3],
            [0; 3],
        ),
        row(
            "ask for free memory",
            |d: &D, _: &Others<D>| d.memory_info().map(drop),
            [0; 3],
            [0; 3],
        ),
        row(
            "wait on another stream for its own event",
            |d: &D, o: &Others<D>| d.wait(&o.other, &o.outside),
            [0; 3],
            [0; 3],
        ),
        row(
            "record another stream's event",
            |d: &D, o: &Others<D>| d.record(&o.outside, &o.other),
            [0; 3],
            [0; 3],
        ),
    ]
}

impl<D: Device> Others<D> {
    fn of(rig: &Rig<D>) -> Self {
        let d = &rig.device;
        let others = Others {
            capturing: rig.stream.clone(),
            other: d.create_stream().unwrap(),
            outside: d.create_event().unwrap(),
        };
        d.record(&others.outside, &others.other).unwrap();
        others
    }
}

/// What a call beside a capture came to: its code, whether the capture was broken then, whether ending it failed.
type Came = (Option<Code>, bool, bool);

/// The row's verdict.
fn verdict(refused: bool) -> Came {
    let code = refused.then_some(Code::StreamCaptureUnsupported);
    (code, refused, refused)
}

/// A capture of x * 3 in this mode, with a call inside of it. A graph that comes of it gives the right bytes.
fn captured_around<D: Device>(
    rig: &Rig<D>,
    x: &Tensor<D>,
    mode: CaptureMode,
    call: impl FnOnce() -> Result<(), DeviceError>,
) -> Came {
    let mut graph = Graph::new(&rig.allocator);
    let options = CaptureOptions { pool: None, mode };
    let capture = graph.capture_with(&rig.stream, options).unwrap();
    let y = rig.captured(&capture, x, 3.0, 0.0);
    let called = call();
    let broken = rig.device.capture_status(&rig.stream) == Ok(CaptureStatus::Invalidated);
    let ended = capture.end();
    // Whatever came of it, the next one works.
    if ended.is_ok() {
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [6.0; 4]);
    }
    (called.err().map(|error| error.code), broken, ended.is_err())
}

/// Makes a call on this thread, or on another.
fn on_thread<T: Send>(here: bool, call: impl FnOnce() -> T + Send) -> T {
    if here {
        return call();
    }
    thread::scope(|scope| scope.spawn(call).join().unwrap())
}

fn t4_05_what_waits_and_what_it_breaks<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[2.0; 4]);
    let others = Others::of(&rig);
    let mut wrong = Vec::new();
    for row in rows::<D>() {
        for (column, mode) in MODES.into_iter().enumerate() {
            for here in [true, false] {
                let came = captured_around(&rig, &x, mode, || {
                    on_thread(here, || (row.call)(&rig.device, &others))
                });
                let refused = if here { row.here } else { row.elsewhere }[column];
                if came != verdict(refused) {
                    wrong.push(format!("{}, {mode:?}, here: {here}: {came:?}", row.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    drop((x, others));
    rig.finish();
}

/// The rule is one of a device: what waits for one device does not touch a capture of another, also where it breaks one of its own.
#[test]
fn t4_05_what_waits_for_another_device_breaks_nothing() {
    let [ours, theirs] =
        [3, 4].map(|seed| Rig::new(HostDevice::builder().seed(seed).build().unwrap()));
    let [x, y] = [&ours, &theirs].map(|rig| rig.floats(&[2.0; 4]));
    let others = Others::of(&theirs);
    let mut wrong = Vec::new();
    for row in rows::<HostDevice>() {
        for (column, mode) in MODES.into_iter().enumerate() {
            for (here, both) in [(true, true), (true, false), (false, true), (false, false)] {
                let call = || on_thread(here, || (row.call)(&theirs.device, &others));
                let mut there = None;
                let came = captured_around(&ours, &x, mode, || {
                    if !both {
                        return call();
                    }
                    there = Some(captured_around(&theirs, &y, mode, call));
                    Ok(())
                });
                let refused = if here { row.here } else { row.elsewhere }[column];
                let want = both.then(|| verdict(refused));
                if (came, there) != (verdict(false), want) {
                    let (name, at) = (row.name, format!("{mode:?}, here: {here}, both: {both}"));
                    wrong.push(format!("{name}, {at}: {came:?}, {there:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    drop((x, y, others));
    ours.finish();
    theirs.finish();
}

/// A kernel that nobody has loaded yet: `late_N(dst)` writes N to four floats.
fn late(number: usize) -> Kernel {
    Kernel::new(format!("late_{number}"))
        .host(move |context| match context.arg(0)? {
            KernelArg::Ptr(dst) => {
                context.write(dst, &[number as f32; 4].map(f32::to_le_bytes).concat())
            }
            _ => Err(Fault {
                kernel: "late".into(),
                address: "argument 0, which must be a pointer".into(),
                bytes: 0,
                reason: FaultReason::BadArgument,
            }),
        })
        .cuda(format!(
            "extern \"C\" __global__ void late_{number}(float* dst) {{ dst[threadIdx.x] = {number}.0f; }}"
        ))
}

fn t4_11_kernels_are_loaded_and_dropped_beside_a_capture<D: Device>(rig: Rig<D>) {
    // Numbers of this run's own: the device keeps what it has loaded.
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let d = &rig.device;
    let x = rig.floats(&[2.0; 4]);
    let z = rig.floats(&[0.0; 4]);
    let four = LaunchConfig {
        grid: [1; 3],
        block: [4, 1, 1],
        shared_bytes: 0,
    };
    for mode in MODES {
        for here in [true, false] {
            let number = NEXT.fetch_add(2, Ordering::Relaxed);
            let came = captured_around(&rig, &x, mode, || {
                // One that goes again at once, and one that the capture itself launches.
                on_thread(here, || d.load(&late(number)).map(drop))?;
                let function = on_thread(here, || d.load(&late(number + 1)))?;
                d.launch(
                    &rig.stream,
                    &function,
                    four,
                    &[KernelArg::Ptr(z.ptr().unwrap())],
                )
            });
            assert_eq!(came, verdict(false), "{mode:?}, here: {here}");
            assert_eq!(rig.read(&z), [(number + 1) as f32; 4]);
        }
    }
    drop((x, z));
    rig.finish();
}

/// What destroying a library's handle does on another thread is to wait for the device: a recording that meets it is given up, answered eagerly, and
/// done again by the next call.
fn t4_11_a_library_that_goes_elsewhere_costs_one_recording<D: Device>(rig: Rig<D>) {
    let going = Arc::new(AtomicBool::new(true));
    let (device, library) = (rig.device.clone(), going.clone());
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let y = k.apply(rec, &x, 2.0, 0.0)?;
        if rec.phase() == Phase::Record && library.swap(false, Ordering::Relaxed) {
            let waited = on_thread(false, || device.synchronize_device());
            assert_eq!(waited.unwrap_err().code, Code::StreamCaptureUnsupported);
        }
        Ok(vec![k.apply(rec, &y, 1.0, 1.0)?])
    });
    let x = rig.floats(&[0.0; 4]);
    let mut phases = Vec::new();
    for round in 0..5 {
        rig.put(&x, &[round as f32; 4]);
        let step = rig.trees.step();
        let (phase, y) = rig.phased(&f, &step, &x);
        assert_eq!(rig.read(&y), [2.0 * round as f32 + 1.0; 4]);
        phases.push(phase);
    }
    use Phase::{Eager, Record, Replay, Warmup};
    assert_eq!(phases, [Warmup, Eager, Record, Replay, Replay]);
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.failed_captures), (1, 1));
    assert!(!going.load(Ordering::Relaxed));
    drop((x, f));
    rig.finish();
}

/// A recording instantiates a graph, which a capture of the same thread would mind.
fn a_tree_records_beside_another_capture_of_the_thread<D: Device>(rig: Rig<D>) {
    let other = rig.device.create_stream().unwrap();
    let x = rig.floats(&[3.0; 16]);
    rig.device.synchronize(&rig.stream).unwrap();
    for mode in MODES {
        let f = rig.scale_add("f", 2.0, 1.0);
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions { pool: None, mode };
        let capture = graph.capture_with(&other, options).unwrap();
        let y = rig.captured(&capture, &x, 5.0, 0.0);
        for phase in [Phase::Warmup, Phase::Record, Phase::Replay] {
            let step = rig.trees.step();
            let (went, _) = rig.phased(&f, &step, &x);
            assert_eq!(went, phase, "{mode:?}");
            assert_eq!(rig.device.capture_status(&other), Ok(CaptureStatus::Active));
        }
        // So does a graph of its own.
        let mut second = Graph::new(&rig.allocator);
        let inner = second.capture(&rig.stream).unwrap();
        let z = rig.captured(&inner, &x, 7.0, 0.0);
        inner.end().unwrap();
        assert_eq!(rig.device.capture_status(&other), Ok(CaptureStatus::Active));
        capture.end().unwrap();
        graph.replay(&rig.stream).unwrap();
        second.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&y), [15.0; 16]);
        assert_eq!(rig.read(&z), [21.0; 16]);
        let step = rig.trees.step();
        let (went, out) = rig.phased(&f, &step, &x);
        assert_eq!((went, rig.read(&out)), (Phase::Replay, vec![7.0; 16]));
        assert_eq!(rig.trees.counts().failed_captures, 0);
    }
    drop(x);
    rig.finish();
}

fn t4_07_memory_of_another_stream_is_freed_inside<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let default = d.default_stream();
    for mode in MODES {
        let a = rig.allocator.alloc(&default, 64).unwrap();
        a.write(d, &default, &[0; 64]).unwrap();
        d.synchronize(&default).unwrap();
        let mut graph = Graph::new(&rig.allocator);
        let options = CaptureOptions { pool: None, mode };
        let capture = graph.capture_with(&rig.stream, options).unwrap();
        let y = rig.captured(&capture, &a, 3.0, 0.0);
        let ptr = a.ptr().unwrap();
        drop(a);
        // It is free for its own stream at once, and no event is asked for that.
        let b = rig.allocator.alloc(&default, 64).unwrap();
        assert_eq!(b.ptr().unwrap(), ptr);
        // A tensor of the capture's own, freed and allocated inside, is the graph's alone.
        let z = rig.captured(&capture, &y, 1.0, 0.0);
        let inside = z.ptr().unwrap();
        drop(z);
        let again = rig.captured(&capture, &y, 2.0, 1.0);
        assert_eq!(again.ptr().unwrap(), inside);
        assert_eq!(
            d.capture_status(&rig.stream),
            Ok(CaptureStatus::Active),
            "{mode:?}"
        );
        capture.end().unwrap();
        // What the graph reads is `b`'s by now: it is written before, so that the launch is sound.
        b.write(d, &default, &[1.0f32; 16].map(f32::to_le_bytes).concat())
            .unwrap();
        d.synchronize(&default).unwrap();
        graph.replay(&rig.stream).unwrap();
        assert_eq!(rig.read(&again), [7.0; 16]);
        drop((b, y, again, graph));
    }
    rig.finish();
}

fn t4_10_a_function_forks_and_allocates_there<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let side = d.create_stream().unwrap();
    let events = [d.create_event().unwrap(), d.create_event().unwrap()];
    let allocator = rig.allocator.clone();
    let there = side.clone();
    let f = rig.register(FunctionSpec::new("f"), move |k, rec, mut inputs| {
        let x = inputs.take(0)?;
        let (device, stream) = (rec.device(), rec.stream());
        let bytes = x.bytes();
        let scale = |on: &D::Stream, to: &Tensor<D>, from: &Tensor<D>, by| {
            let (to, from) = (to.ptr()?, from.ptr()?);
            let done = k
                .kernels
                .scale_add(device, on, to, from, bytes / 4, by, 0.0);
            done.map_err(cudagraph_trees::Error::from)
        };
        device.record(&events[0], stream)?;
        device.wait(&there, &events[0])?;
        // A temporary and an output of the side stream, beside work on the function's own.
        let temporary = allocator.alloc(&there, bytes)?;
        scale(&there, &temporary, &x, 2.0)?;
        let output = allocator.alloc(&there, bytes)?;
        scale(&there, &output, &temporary, 5.0)?;
        drop(temporary);
        let own = rec.alloc(bytes)?;
        scale(stream, &own, &x, 3.0)?;
        device.record(&events[1], &there)?;
        device.wait(stream, &events[1])?;
        let sum = k.sum(rec, &own, &output)?;
        Ok(vec![sum, output])
    });
    let x = rig.floats(&[0.0; 256]);
    let eager = rig.allocator.stats().live_blocks.current;
    let mut phases = Vec::new();
    for round in 0..6 {
        rig.put(&x, &[round as f32; 256]);
        let step = rig.trees.step();
        let outputs = rig.run(&f, &step, &[&x]);
        phases.push(outputs.phase());
        // All of it is the tree's, in every phase.
        assert_eq!(rig.allocator.stats().live_blocks.current, eager);
        rig.trees.audit().unwrap();
        assert_eq!(rig.read(&outputs[0]), [13.0 * round as f32; 256]);
        assert_eq!(rig.read(&outputs[1]), [10.0 * round as f32; 256]);
    }
    use Phase::{Record, Replay, Warmup};
    assert_eq!(phases, [Warmup, Record, Replay, Replay, Replay, Replay]);
    assert_eq!(
        rig.trees.view().nodes[0].graph_nodes,
        5,
        "with the input's copy"
    );
    drop((x, f, side));
    rig.finish();
}

fn t4_12_many_streams_and_events_around_a_capture<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let streams: Vec<_> = (0..4).map(|_| d.create_stream().unwrap()).collect();
    let event = d.create_event().unwrap();
    let f = rig.scale_add("f", 2.0, 0.0);
    let g = rig.scale_add("g", 1.0, 1.0);
    let x = rig.floats(&[1.0; 16]);
    d.synchronize(&rig.stream).unwrap();
    for round in 0..12 {
        let at = |offset: usize| &streams[(round + offset) % 4];
        let run = |function, step: &_, stream: &D::Stream, input: &Tensor<D>| {
            let args = &mut [lend(input)];
            let outputs = rig.trees.run(function, step, &[], stream, args);
            outputs.unwrap().only().unwrap()
        };
        let step = rig.trees.step();
        // Each piece on another stream than the one before, and a chain of events beside: no capture hears of an event from outside of it.
        let y = run(&f, &step, at(0), &x);
        d.record(&event, at(0)).unwrap();
        d.wait(at(2), &event).unwrap();
        let z = run(&g, &step, at(1), &y);
        let bytes = z.read(d, at(1)).unwrap();
        assert_eq!(bytes, [3.0f32; 16].map(f32::to_le_bytes).concat());
        drop((y, z));
    }
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.failed_captures), (2, 0));
    drop((x, f, g, streams, event));
    rig.finish();
}
