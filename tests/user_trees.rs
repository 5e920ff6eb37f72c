//! What users reported of functions that decide, count and move inside a tree (T3-12, T11-03, T11-06).

mod common;

use std::sync::{Arc, Mutex, OnceLock};

use common::{Ops, Rig};
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{
    Device, Fault, FaultReason, Kernel, KernelArg, KernelContext, LaunchConfig, kernels,
};
use cudagraph_trees::pool::PoolError;
use cudagraph_trees::{
    Arg, BodyResult, Error, Function, FunctionSpec, Inputs, Phase, Recorder, Tensor, give, lend,
};

use Phase::{Record, Replay, Warmup};

suite!(
    t3_12_warmup_and_recording_work_in_place_alike,
    t11_03_a_position_that_the_function_advances_itself,
    t11_06_a_static_pointer_changes_twenty_times,
);

/// What an operation decided: the phase, whether nobody else held its input, whether its output lies where the input lay.
type Decisions = Arc<Mutex<Vec<(Phase, bool, bool)>>>;

/// x * 2 + 1, in the input's memory if nobody else holds it. Only then is a kernel wanted that nothing has loaded before.
fn in_place_if_unique<D: Device>(
    ops: &Ops<D>,
    rec: &mut Recorder<'_, D>,
    mut inputs: Inputs<D>,
    cold: &OnceLock<D::Function>,
    decisions: &Decisions,
) -> BodyResult<D> {
    let x = inputs.take(0)?;
    let (place, bytes, weak) = (x.ptr()?, x.bytes(), x.downgrade());
    let doubled = ops.apply(rec, &x, 2.0, 0.0)?;
    drop(x);
    let unique = weak.upgrade().is_none();
    let out = rec.alloc(bytes)?;
    decisions
        .lock()
        .unwrap()
        .push((rec.phase(), unique, out.ptr()? == place));
    if unique {
        if cold.get().is_none() {
            assert_eq!(rec.phase(), Warmup, "loaded before anything is recorded");
            let _ = cold.set(rec.device().load(&kernels::scale_add())?);
        }
        let args = [
            KernelArg::Ptr(out.ptr()?),
            KernelArg::Ptr(doubled.ptr()?),
            KernelArg::U64(bytes / 4),
            KernelArg::F32(1.0),
            KernelArg::F32(1.0),
        ];
        let config = LaunchConfig::for_elements(bytes / 4);
        rec.launch(cold.get().unwrap(), config, &args)?;
    } else {
        let (to, from) = (out.ptr()?, doubled.ptr()?);
        ops.kernels
            .scale_add(rec.device(), rec.stream(), to, from, bytes / 4, 1.0, 1.0)?;
    }
    Ok(vec![out])
}

fn t3_12_warmup_and_recording_work_in_place_alike<D: Device>(rig: Rig<D>) {
    /// What is passed, and whether the function may have it.
    const KINDS: [(&str, bool); 6] = [
        ("an output given", true),
        ("an output given, and held", false),
        ("an output lent", false),
        ("an eager tensor given", true),
        ("an eager tensor given, and held", true), // a copy of it is the function's own
        ("an eager tensor lent", true),
    ];
    for (kind, unique) in KINDS {
        let decisions = Decisions::default();
        let (cold, seen) = (OnceLock::new(), decisions.clone());
        let a = rig.scale_add("a", 3.0, 0.0);
        let f = rig.register(FunctionSpec::new("f"), move |k, rec, inputs| {
            in_place_if_unique(k, rec, inputs, &cold, &seen)
        });
        let before = rig.trees.counts();
        let mut phases = Vec::new();
        for round in 0..5 {
            let value = round as f32 + 1.0;
            let x = rig.floats(&[value; 4]);
            let step = rig.trees.step();
            let of_tree = kind.starts_with("an output");
            let input = if of_tree { rig.one(&a, &step, &x) } else { x };
            let held = (kind.ends_with("held") || kind.ends_with("lent")).then(|| input.clone());
            let mut args = match &held {
                Some(held) if kind.ends_with("lent") => [lend(held)],
                _ => [give(input.clone())],
            };
            drop(input);
            let out = rig.call(&f, &step, &[], &mut args);
            phases.push(out.phase());
            let was = if of_tree { 3.0 * value } else { value };
            assert_eq!(rig.read(&out[0]), [2.0 * was + 1.0; 4], "{kind}");
            if let Some(held) = &held {
                assert_eq!(rig.read(held), [was; 4], "{kind}");
            }
        }
        assert_eq!(phases, [Warmup, Record, Replay, Replay, Replay], "{kind}");
        // In the warmup as in the recording.
        assert_eq!(
            *decisions.lock().unwrap(),
            [(Warmup, unique, unique), (Record, unique, unique)],
            "{kind}"
        );
        let counts = rig.trees.counts();
        assert_eq!(counts.failed_captures, 0, "{kind}");
        let recorded = if kind.starts_with("an output") { 2 } else { 1 };
        assert_eq!(counts.recordings, before.recordings + recorded, "{kind}");
    }
    rig.finish();
}

/// `pick_f32(dst, table, position, n)`: row `position[0]` of a table of rows of `n`.
fn pick() -> Kernel {
    fn float(context: &mut dyn KernelContext, at: &KernelArg, index: u64) -> Result<f32, Fault> {
        let KernelArg::Ptr(ptr) = at else {
            return Err(Fault {
                kernel: "pick_f32".into(),
                address: "an argument that must be a pointer".into(),
                bytes: 0,
                reason: FaultReason::BadArgument,
            });
        };
        let mut bytes = [0; 4];
        context.read(ptr.offset(4 * index), &mut bytes)?;
        Ok(f32::from_le_bytes(bytes))
    }
    Kernel::new("pick_f32")
        .host(|context| {
            let [dst, table, position, count] =
                [0, 1, 2, 3].map(|index| context.arg(index));
            let (table, position) = (table?, position?);
            if let (KernelArg::Ptr(dst), KernelArg::U64(count)) = (dst?, count?) {
                let row = float(context, &position, 0)? as u64;
                for index in 0..count {
                    let value = float(context, &table, row * count + index)?;
                    context.write(dst.offset(4 * index), &value.to_le_bytes())?;
                }
            }
            Ok(())
        })
        .cuda(
            "extern \"C\" __global__ void pick_f32(float* dst, const float* table, const float* position, unsigned long long n) {\n  \
             unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;\n  \
             if (i < n) dst[i] = table[(unsigned long long)position[0] * n + i];\n}\n",
        )
}

/// A decoding loop: nothing about the position comes from the host, so one recording serves all steps.
fn t11_03_a_position_that_the_function_advances_itself<D: Device>(rig: Rig<D>) {
    const REPLAYS: usize = 100;
    const WIDTH: usize = 8;
    let rows = REPLAYS + 2;
    let value = |row: usize, column: usize| (row * 10 + column) as f32;
    let table: Vec<f32> = (0..rows * WIDTH)
        .map(|index| value(index / WIDTH, index % WIDTH))
        .collect();
    let table = rig.floats(&table);
    let position = rig.floats(&[0.0]);
    let total = rig.floats(&[0.0; WIDTH]);
    let pick = rig.device.load(&pick()).unwrap();
    let spec = FunctionSpec::new("decode")
        .bind(0, &table)
        .bind(1, &position)
        .bind(2, &total);
    let decode = rig.register(spec, move |k, rec, inputs| {
        let [table, position, total, x] = [0, 1, 2, 3].map(|index| inputs.get(index));
        let (table, position, total, x) = (table?.ptr()?, position?.ptr()?, total?.ptr()?, x?);
        let row = rec.alloc(x.bytes())?;
        let args = [
            KernelArg::Ptr(row.ptr()?),
            KernelArg::Ptr(table),
            KernelArg::Ptr(position),
            KernelArg::U64(WIDTH as u64),
        ];
        rec.launch(&pick, LaunchConfig::for_elements(WIDTH as u64), &args)?;
        let (device, stream) = (rec.device(), rec.stream());
        // What was seen so far is state as well.
        k.kernels
            .add(device, stream, total, total, row.ptr()?, WIDTH as u64)?;
        k.kernels.increment(device, stream, position, 1, 1.0)?;
        Ok(vec![k.sum(rec, &row, x)?])
    });
    let x = rig.floats(&[0.0; WIDTH]);
    let mut sums = [0.0; WIDTH];
    for row in 0..rows {
        rig.put(&x, &[row as f32; WIDTH]);
        let step = rig.trees.step();
        let (phase, out) = rig.phased(&decode, &step, &x);
        assert_eq!(phase, [Warmup, Record, Replay][row.min(2)], "row {row}");
        let want: [f32; WIDTH] = std::array::from_fn(|column| value(row, column));
        assert_eq!(rig.read(&out), want.map(|v| v + row as f32), "row {row}");
        sums.iter_mut().zip(want).for_each(|(sum, v)| *sum += v);
    }
    assert_eq!(rig.read(&position), [rows as f32]);
    assert_eq!(rig.read(&total), sums);
    let counts = rig.trees.counts();
    assert_eq!((counts.recordings, counts.replays), (1, REPLAYS as u64));
    drop((decode, table, position, total, x));
    rig.finish();
}

/// weight * x + x, of which the weight keeps its address.
fn weighted<D: Device>(rig: &Rig<D>) -> Function {
    let spec = FunctionSpec::new("f").static_input(0);
    rig.register(spec, |k, rec, mut inputs| {
        let (weight, x) = (inputs.take(0)?, inputs.take(1)?);
        let product = k.product(rec, &weight, &x)?;
        Ok(vec![k.sum(rec, &product, &x)?])
    })
}

fn t11_06_a_static_pointer_changes_twenty_times<D: Device>(rig: Rig<D>) {
    const TIMES: usize = 20;
    let f = weighted(&rig);
    let x = rig.floats(&[0.0; 1000]);
    let mut weights: Vec<Tensor<D>> = Vec::new();
    let mut reserved = None;
    let mut run = |weight: &Tensor<D>, value: f32, by: f32| {
        rig.put(&x, &[value; 1000]);
        let step = rig.trees.step();
        let outputs = rig.run(&f, &step, &[weight, &x]);
        assert_eq!(rig.read(&outputs[0]), [by * value + value; 1000]);
        let now = rig.trees.pool_stats().reserved_bytes.current;
        assert_eq!(
            *reserved.get_or_insert(now),
            now,
            "each is recorded over the last"
        );
        outputs.phase()
    };
    for time in 0..TIMES {
        let by = time as f32 + 2.0;
        weights.push(rig.floats(&[by; 1000]));
        let weight = &weights[time];
        if time == 0 {
            assert_eq!(run(weight, 1.0, by), Warmup);
        }
        assert_eq!(run(weight, 2.0, by), Record, "{time}");
        assert_eq!(run(weight, 3.0, by), Replay, "{time}");
        assert_eq!(rig.trees.counts().recordings, time as u32 + 1);
    }
    // All of them are there, and read what lies in their own weight.
    for (time, weight) in weights.iter().enumerate() {
        rig.put(weight, &[-1.0 - time as f32; 1000]);
        assert_eq!(run(weight, 5.0, -1.0 - time as f32), Replay);
    }
    assert_eq!(rig.trees.counts().recordings, TIMES as u32);
    rig.trees.audit().unwrap();
    drop((f, x, weights));
    rig.finish();
}

/// Memory is short when the function is recorded for another pointer: the error says what the pool holds, the recording before stays, and once there
/// is memory the call that failed works.
#[test]
fn t11_06_out_of_memory_while_it_is_recorded_anew() {
    const LARGE: usize = 3 << 20; // elements, so 12 MiB
    let device = HostDevice::builder().memory(66 << 20).build().unwrap();
    let rig = Rig::new(device.clone());
    let f = weighted(&rig);
    let (weight, x) = (rig.floats(&[3.0; 8]), rig.floats(&[2.0; 8]));
    let replayed = |phase| {
        let step = rig.trees.step();
        let outputs = rig.run(&f, &step, &[&weight, &x]);
        assert_eq!(
            (outputs.phase(), rig.read(&outputs[0])),
            (phase, vec![8.0; 8])
        );
    };
    [Warmup, Record, Replay].into_iter().for_each(replayed);
    // Room for weight, input and the input's copy, not for what the function allocates.
    let [other, y] = [3.0, 2.0].map(|value| rig.floats(&vec![value; LARGE]));
    let ballast = rig.allocator.alloc(&rig.stream, 16 << 20).unwrap();
    let live = rig.trees.pool_stats().live_bytes.current;
    for _ in 0..3 {
        let step = rig.trees.step();
        let mut args = [lend(&other), give(y.clone())];
        let failed = rig.trees.run(&f, &step, &[], &rig.stream, &mut args);
        let Err(error) = failed.map(drop) else {
            panic!("there is no room")
        };
        let pool = match &error {
            Error::Function { source, .. } => source.downcast_ref::<Error>(),
            other => Some(other),
        };
        let Some(Error::Pool(PoolError::OutOfMemory {
            requested, state, ..
        })) = pool
        else {
            panic!("{error}")
        };
        assert_eq!(*requested, 4 * LARGE as u64);
        let holds = "14680064 B reserved in 2 segments, 12582912 B live in 1 blocks";
        assert!(state.starts_with(holds), "{state}");
        assert!(matches!(&args[1], Arg::Give(given) if given.bytes() == *requested));
        drop((args, step));
        // As before: what is live, the nodes, what they replay. What was had of memory is kept for the next time, and does not grow.
        replayed(Replay);
        let now = rig.trees.pool_stats();
        assert_eq!(now.live_bytes.current, live);
        assert_eq!(now.reserved_bytes.current, 14 << 20);
        assert_eq!(rig.trees.counts().recordings, 1);
        rig.trees.audit().unwrap();
    }
    drop(ballast);
    rig.allocator.trim().unwrap();
    for phase in [Record, Replay] {
        let step = rig.trees.step();
        let outputs = rig.run(&f, &step, &[&other, &y]);
        assert_eq!(outputs.phase(), phase);
        assert!(rig.read(&outputs[0]).iter().all(|v| *v == 8.0));
        drop((outputs, step));
        replayed(Replay);
    }
    drop((f, weight, x, other, y));
    rig.finish();
    assert_eq!(device.counts().mapped_bytes, 0);
}
