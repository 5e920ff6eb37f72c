//! What is dropped while a stream captures does not touch the capture: of no kind, on no thread, in no mode.
//! (User reports T3-09, T4-11.)

mod common;

use std::thread;

use common::Rig;
use cudagraph_trees::device::{
    CaptureMode, CaptureStatus, Device, DevicePtr, GatherSlot, KernelArg, LaunchConfig, kernels,
};
use cudagraph_trees::{CaptureOptions, Graph};

const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

suite!(
    handles_of_the_device,
    work_in_flight,
    graphs_pools_and_trees,
    an_allocator_with_segments,
    what_a_drop_waits_for_has_run,
    events_and_streams_of_the_capture_itself,
);

type Drops = Box<dyn FnOnce() + Send>;

/// One of everything that is destroyed by dropping it, used before.
struct Things<D: Device> {
    exec: D::Exec,
    gathering: D::Exec,
    graph: D::Graph,
    fresh: D::Event,
    recorded: D::Event,
    stream: D::Stream,
    function: D::Function,
}

impl<D: Device> Things<D> {
    fn new(rig: &Rig<D>, ptr: DevicePtr) -> Self {
        let d = &rig.device;
        let stream = d.create_stream().unwrap();
        let captured = |work: &dyn Fn()| {
            d.begin_capture(&stream, CaptureMode::ThreadLocal).unwrap();
            work();
            d.end_capture(&stream).unwrap()
        };
        let graph = captured(&|| d.fill(&stream, ptr, 7, 64).unwrap());
        let slots = [GatherSlot {
            dst: ptr.offset(64),
            bytes: 64,
        }];
        let gather = captured(&|| d.gather(&stream, &slots, &[ptr]).unwrap());
        let (exec, gathering) = (
            d.instantiate(&graph).unwrap(),
            d.instantiate(&gather).unwrap(),
        );
        d.launch_graph(&exec, &stream, &[]).unwrap();
        d.launch_graph(&gathering, &stream, &[ptr]).unwrap();
        let recorded = d.create_event().unwrap();
        d.record(&recorded, &stream).unwrap();
        Things {
            exec,
            gathering,
            graph,
            fresh: d.create_event().unwrap(),
            recorded,
            stream,
            function: d.load(&kernels::fill()).unwrap(),
        }
    }

    /// The drops, one by one, each with its name.
    fn into_drops(self) -> Vec<(&'static str, Drops)> {
        let Things {
            exec,
            gathering,
            graph,
            fresh,
            recorded,
            stream,
            function,
        } = self;
        vec![
            ("executable", Box::new(|| drop(exec))),
            ("executable with a gather", Box::new(|| drop(gathering))),
            ("graph", Box::new(|| drop(graph))),
            ("event", Box::new(|| drop(fresh))),
            ("recorded event", Box::new(|| drop(recorded))),
            ("stream", Box::new(|| drop(stream))),
            ("function", Box::new(|| drop(function))),
        ]
    }
}

fn elsewhere(f: impl FnOnce() + Send) {
    thread::scope(|scope| scope.spawn(f).join().unwrap());
}

fn handles_of_the_device<D: Device>(rig: Rig<D>) {
    let memory = rig.floats(&[0.0; 64]);
    let ptr = memory.ptr().unwrap();
    let d = &rig.device;
    let fill = d.load(&kernels::fill()).unwrap();
    d.synchronize(&rig.stream).unwrap();
    let mut broken = Vec::new();
    for mode in MODES {
        for here in [true, false] {
            let count = Things::new(&rig, ptr).into_drops().len();
            for which in 0..count {
                let mut drops = Things::new(&rig, ptr).into_drops();
                let (name, dropping) = drops.swap_remove(which);
                d.begin_capture(&rig.stream, mode).unwrap();
                let args = [KernelArg::Ptr(ptr), KernelArg::U64(4), KernelArg::F32(2.0)];
                d.launch(&rig.stream, &fill, LaunchConfig::for_elements(4), &args)
                    .unwrap();
                if here {
                    dropping();
                } else {
                    elsewhere(dropping);
                }
                let status = d.capture_status(&rig.stream).unwrap();
                match d.end_capture(&rig.stream) {
                    Ok(graph) => {
                        let exec = d.instantiate(&graph).unwrap();
                        d.launch_graph(&exec, &rig.stream, &[]).unwrap();
                    }
                    Err(error) => {
                        broken.push(format!(
                            "{name}, {mode:?}, here: {here}: {status:?}, {error}"
                        ));
                    }
                }
                drop(drops);
                d.synchronize_device().unwrap();
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    drop((memory, fill));
    rig.finish();
}

fn work_in_flight<D: Device>(rig: Rig<D>) {
    let memory = rig.floats(&[0.0; 64]);
    let ptr = memory.ptr().unwrap();
    let d = &rig.device;
    d.synchronize(&rig.stream).unwrap();
    for mode in MODES {
        let things = Things::new(&rig, ptr);
        let capturing = d.create_stream().unwrap();
        d.begin_capture(&capturing, mode).unwrap();
        // A graph launched, an event waited for, a stream written to, and all of it dropped before it has run.
        d.launch_graph(&things.exec, &things.stream, &[]).unwrap();
        d.launch_graph(&things.gathering, &things.stream, &[ptr])
            .unwrap();
        d.record(&things.recorded, &things.stream).unwrap();
        d.wait(&rig.stream, &things.recorded).unwrap();
        drop(things);
        assert_eq!(d.capture_status(&capturing), Ok(CaptureStatus::Active));
        d.end_capture(&capturing).unwrap();
        let mut bytes = [0; 128];
        d.read(&rig.stream, &mut bytes, ptr).unwrap();
        assert_eq!(bytes, [7; 128], "{mode:?}");
    }
    drop(memory);
    rig.finish();
}

fn graphs_pools_and_trees<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    for mode in MODES {
        for here in [true, false] {
            // A tree that has warmed up, recorded and replayed; a graph; a pool that holds memory; a stream's handle.
            let trees = cudagraph_trees::GraphTrees::new(&rig.allocator).unwrap();
            let kernels = rig.kernels.clone();
            let f = trees
                .register(
                    cudagraph_trees::FunctionSpec::new("f"),
                    move |rec, mut inputs| {
                        let x = inputs.take(0)?;
                        let out = rec.alloc(x.bytes())?;
                        kernels.scale_add(
                            rec.device(),
                            rec.stream(),
                            out.ptr()?,
                            x.ptr()?,
                            x.bytes() / 4,
                            2.0,
                            0.0,
                        )?;
                        Ok(vec![out])
                    },
                )
                .unwrap();
            for _ in 0..3 {
                let step = trees.step();
                let args = &mut [cudagraph_trees::lend(&x)];
                drop(trees.run(&f, &step, &[], &rig.stream, args).unwrap());
            }
            let mut graph = Graph::new(&rig.allocator);
            let capture = graph.capture(&rig.stream).unwrap();
            let y = rig.captured(&capture, &x, 3.0, 0.0);
            capture.end().unwrap();
            let pool = rig.allocator.create_pool(Default::default()).unwrap();
            let z = pool.alloc(&rig.stream, 1 << 20).unwrap();
            rig.device.synchronize(&rig.stream).unwrap();

            let mut new = Graph::new(&rig.allocator);
            let options = CaptureOptions { pool: None, mode };
            let capture = new.capture_with(&rig.stream, options).unwrap();
            let out = rig.captured(&capture, &x, 5.0, 0.0);
            let leaving = move || drop((trees, f, graph, y, z, pool));
            if here {
                leaving();
            } else {
                elsewhere(leaving);
            }
            capture.end().unwrap();
            new.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&out), [5.0; 4], "{mode:?}, here: {here}");
        }
    }
    drop(x);
    rig.finish();
}

/// An allocator's end waits for work that touches its memory, on whatever stream, and breaks no capture of another's.
fn an_allocator_with_segments<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let x = rig.floats(&[1.0; 4]);
    let ordered = d.create_event().unwrap();
    for mode in MODES {
        for here in [true, false] {
            let other = Rig::new(rig.device.clone());
            let (seen, also) = (rig.floats(&[0.0; 4]), rig.floats(&[0.0; 4]));
            d.synchronize(&rig.stream).unwrap();
            // Segments of a tree, of a pool and of the default pool, and work in flight in each.
            let f = other.scale_add("f", 2.0, 1.0);
            let a = other.floats(&[5.0; 4]);
            let mut phases = Vec::new();
            let y = (0..3)
                .map(|_| {
                    let (phase, y) = other.phased(&f, &other.trees.step(), &a);
                    phases.push(phase);
                    y
                })
                .last()
                .unwrap();
            assert_eq!(phases[2], cudagraph_trees::Phase::Replay);
            let pool = other.allocator.create_pool(Default::default()).unwrap();
            let z = pool.alloc(&other.stream, 4 << 20).unwrap();
            other.scale_into(&other.stream, &z, &y, 3.0, 0.0);
            other.scale_into(&other.stream, &seen, &z.view(0, 16).unwrap(), 1.0, 4.0);
            // The stream that is to capture reads it, too.
            d.record(&ordered, &other.stream).unwrap();
            d.wait(&rig.stream, &ordered).unwrap();
            rig.scale_into(&rig.stream, &also, &a, 2.0, 0.0);
            d.record(&ordered, &rig.stream).unwrap();
            d.wait(&other.stream, &ordered).unwrap();

            let mut graph = Graph::new(&rig.allocator);
            let options = CaptureOptions { pool: None, mode };
            let capture = graph.capture_with(&rig.stream, options).unwrap();
            let out = rig.captured(&capture, &x, 3.0, 0.0);
            let leaving = move || drop((f, a, y, z, pool, other));
            if here {
                leaving();
            } else {
                elsewhere(leaving);
            }
            let at = format!("{mode:?}, here: {here}");
            assert_eq!(
                d.capture_status(&rig.stream),
                Ok(CaptureStatus::Active),
                "{at}"
            );
            let late = rig.captured(&capture, &out, 1.0, 1.0);
            capture.end().unwrap();
            graph.replay(&rig.stream).unwrap();
            assert_eq!(rig.read(&out), [3.0; 4], "{at}");
            assert_eq!(rig.read(&late), [4.0; 4], "{at}");
            assert_eq!(rig.read(&seen), [37.0; 4], "{at}");
            assert_eq!(rig.read(&also), [10.0; 4], "{at}");
            assert_eq!(d.synchronize_device(), Ok(()));
        }
    }
    drop(x);
    rig.finish();
}

/// Also on the default stream, on a stream that is gone, and on one that began to capture afterwards.
fn what_a_drop_waits_for_has_run<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let memory = rig.allocator.alloc(&rig.stream, 4 * 64).unwrap();
    let ptr = memory.ptr().unwrap();
    for (round, mode) in MODES.into_iter().enumerate() {
        d.synchronize(&rig.stream).unwrap();
        let value = round as u8 + 1;
        let [live, gone, capturing] = [(); 3].map(|()| d.create_stream().unwrap());
        let streams = [&d.default_stream(), &live, &gone, &capturing];
        for (place, stream) in streams.into_iter().enumerate() {
            for value in [0, 0xEE, value] {
                d.fill(stream, ptr.offset(64 * place as u64), value, 64)
                    .unwrap();
            }
        }
        drop(gone);
        d.begin_capture(&capturing, mode).unwrap();
        d.quiesce().unwrap();
        elsewhere(|| d.quiesce().unwrap());
        d.fill(&capturing, ptr, 9, 1).unwrap();
        assert_eq!(d.capture_status(&capturing), Ok(CaptureStatus::Active));
        d.end_capture(&capturing).unwrap();
        // No order with any of the four but that.
        let mut bytes = [0; 256];
        d.read(&rig.stream, &mut bytes, ptr).unwrap();
        assert_eq!(bytes, [value; 256], "{mode:?}");
    }
    drop(memory);
    rig.finish();
}

fn events_and_streams_of_the_capture_itself<D: Device>(rig: Rig<D>) {
    let memory = rig.floats(&[0.0; 64]);
    let ptr = memory.ptr().unwrap();
    let d = &rig.device;
    for mode in MODES {
        d.synchronize(&rig.stream).unwrap();
        d.begin_capture(&rig.stream, mode).unwrap();
        let (fork, join) = (d.create_event().unwrap(), d.create_event().unwrap());
        let side = d.create_stream().unwrap();
        d.record(&fork, &rig.stream).unwrap();
        d.wait(&side, &fork).unwrap();
        drop(fork);
        d.fill(&side, ptr, 3, 64).unwrap();
        d.record(&join, &side).unwrap();
        d.wait(&rig.stream, &join).unwrap();
        drop(join);
        let graph = d.end_capture(&rig.stream).unwrap();
        drop(side);
        let exec = d.instantiate(&graph).unwrap();
        drop(graph);
        d.launch_graph(&exec, &rig.stream, &[]).unwrap();
        drop(exec);
        let mut bytes = [0; 64];
        d.read(&rig.stream, &mut bytes, ptr).unwrap();
        assert_eq!(bytes, [3; 64], "{mode:?}");
    }
    drop(memory);
    rig.finish();
}
