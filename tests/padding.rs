//! Batches of any size in graphs of a few sizes: what fills the rest, and what comes out.
mod common;

use common::{Rig, wrapped};
use cudagraph_trees::device::{Call, CaptureMode, Code, Device, DeviceError, DevicePtr, Pattern};
use cudagraph_trees::{
    Buckets, Error, Function, FunctionSpec, Graph, Padded, PaddedInput, Phase, Tensor, lend,
};

suite!(
    t6_11_the_tail_of_a_smaller_batch_is_filled,
    t6_11_fill_values_of_every_size,
    t6_11_a_bucket_for_each_batch,
    a_batch_from_pinned_memory,
    batches_on_several_streams,
    inside_a_capture,
    what_does_not_fit_is_refused,
    patterns_of_a_device,
);

fn doubles<D: Device>(rig: &Rig<D>) -> Function {
    rig.register(
        FunctionSpec::new("double").static_input(0).inputs(1),
        |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            Ok(vec![k.apply(rec, &x, 2.0, 0.0)?])
        },
    )
}

/// Runs on a padded batch: the phase, all rows of the output, and the batch's.
#[track_caller]
fn run<D: Device>(rig: &Rig<D>, f: &Function, padded: &Padded<D>) -> (Phase, Vec<f32>, Vec<f32>) {
    let step = rig.trees.step();
    let out = rig.call(f, &step, &[padded.key()], &mut [lend(padded.tensor())]);
    let rows = padded.cut(&out[0]).unwrap();
    (out.phase(), rig.read(&out[0]), rig.read(&rows))
}

fn t6_11_the_tail_of_a_smaller_batch_is_filled<D: Device>(rig: Rig<D>) {
    let f = doubles(&rig);
    let buckets = Buckets::new([8]).unwrap();
    let mut input = PaddedInput::new(&rig.allocator, &rig.stream, buckets, 4, -1.0_f32).unwrap();
    let eight = rig.floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let three = rig.floats(&[10.0, 20.0, 30.0]);
    for phase in [Phase::Warmup, Phase::Record, Phase::Replay] {
        let padded = input.pad(&rig.stream, &eight).unwrap();
        assert_eq!((padded.rows(), padded.bucket()), (8, 8));
        let all = vec![2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0];
        assert_eq!(run(&rig, &f, &padded), (phase, all.clone(), all));
    }
    for _ in 0..2 {
        let padded = input.pad(&rig.stream, &three).unwrap();
        assert_eq!((padded.rows(), padded.bucket()), (3, 8));
        let mut all = vec![20.0, 40.0, 60.0];
        let rows = all.clone();
        all.resize(8, -2.0);
        assert_eq!(run(&rig, &f, &padded), (Phase::Replay, all, rows));
    }
    // No rows at all.
    let padded = input.pad(&rig.stream, &Tensor::empty()).unwrap();
    assert_eq!(
        run(&rig, &f, &padded),
        (Phase::Replay, vec![-2.0; 8], vec![])
    );
    drop(padded);
    drop((input, f, eight, three));
    rig.finish();
}

fn t6_11_fill_values_of_every_size<D: Device>(rig: Rig<D>) {
    let fills: [(Pattern, &[u8]); 6] = [
        (0xAB_u8.into(), &[0xAB]),
        (0x0102_u16.into(), &[0x02, 0x01]),
        ((-1_i32).into(), &[0xFF]),
        (f32::NAN.into(), &f32::NAN.to_le_bytes()),
        (i64::MIN.into(), &i64::MIN.to_le_bytes()),
        (1.5_f64.into(), &1.5_f64.to_le_bytes()),
    ];
    for (fill, value) in fills {
        let buckets = Buckets::new([4, 100]).unwrap();
        let mut input = PaddedInput::new(&rig.allocator, &rig.stream, buckets, 24, fill).unwrap();
        // What was there before is everywhere.
        let all = rig.allocator.alloc(&rig.stream, 2400).unwrap();
        all.write(&rig.device, &rig.stream, &[0x55; 2400]).unwrap();
        input.pad(&rig.stream, &all).unwrap();
        let batch = rig.allocator.alloc(&rig.stream, 24).unwrap();
        batch.write(&rig.device, &rig.stream, &[1; 24]).unwrap();
        let padded = input.pad(&rig.stream, &batch).unwrap();
        let bytes = padded.tensor().read(&rig.device, &rig.stream).unwrap();
        let tail: Vec<u8> = value.iter().copied().cycle().take(72).collect();
        assert_eq!(
            (&bytes[..24], &bytes[24..]),
            (&[1; 24][..], &tail[..]),
            "{fill:?}"
        );
        // Beyond its bucket nothing is written.
        let batch = all.view(0, 5 * 24).unwrap();
        let padded = input.pad(&rig.stream, &batch).unwrap();
        let bytes = padded.tensor().read(&rig.device, &rig.stream).unwrap();
        let tail: Vec<u8> = value.iter().copied().cycle().take(95 * 24).collect();
        assert_eq!(
            (&bytes[..120], &bytes[120..]),
            (&[0x55; 120][..], &tail[..]),
            "{fill:?}"
        );
        drop(padded);
        drop((batch, all, input));
    }
    rig.finish();
}

fn t6_11_a_bucket_for_each_batch<D: Device>(rig: Rig<D>) {
    let f = doubles(&rig);
    let buckets = Buckets::new([1, 2, 4, 8]).unwrap();
    let mut input = PaddedInput::new(&rig.allocator, &rig.stream, buckets, 4, 0.5_f32).unwrap();
    for round in 0..4 {
        for rows in [8, 3, 1, 2, 5, 4, 7] {
            let values: Vec<f32> = (0..rows).map(|n| (10 * round + n) as f32).collect();
            let batch = rig.floats(&values);
            let padded = input.pad(&rig.stream, &batch).unwrap();
            let bucket = (rows as u64).next_power_of_two();
            assert_eq!(
                (padded.bucket(), padded.tensor().bytes()),
                (bucket, 4 * bucket)
            );
            let (phase, mut all, cut) = run(&rig, &f, &padded);
            if round > 1 {
                assert_eq!(phase, Phase::Replay);
            }
            let doubled: Vec<f32> = values.iter().map(|v| 2.0 * v).collect();
            assert_eq!(cut, doubled);
            assert_eq!(
                all.split_off(rows as usize),
                vec![1.0; bucket as usize - rows as usize]
            );
        }
    }
    // In place: a recording for each bucket, and no node but the kernel.
    let view = rig.trees.view();
    let nodes: Vec<usize> = view.nodes.iter().map(|n| n.graph_nodes).collect();
    assert_eq!(nodes, [1; 4]);
    drop((input, f));
    rig.finish();
}

fn a_batch_from_pinned_memory<D: Device>(rig: Rig<D>) {
    let f = doubles(&rig);
    let buckets = Buckets::new([2, 4]).unwrap();
    let mut input = PaddedInput::new(&rig.allocator, &rig.stream, buckets, 4, -0.5_f32).unwrap();
    let tokens = rig.allocator.alloc_pinned(16).unwrap();
    let kept: Vec<_> = (0..6).map(|_| rig.floats(&[0.0; 4])).collect();
    for (n, kept) in kept.iter().enumerate() {
        let values = [n as f32, n as f32 + 0.5, n as f32 + 0.75];
        tokens
            .write(0, &values.map(f32::to_le_bytes).concat())
            .unwrap();
        let padded = input
            .pad_with(&rig.stream, 3, |rows| {
                assert_eq!(rows.bytes(), 12);
                rows.copy_from_pinned(&rig.stream, &tokens, 0)
            })
            .unwrap();
        let step = rig.trees.step();
        let out = rig.call(&f, &step, &[padded.key()], &mut [lend(padded.tensor())]);
        rig.scale_into(&rig.stream, kept, &out[0], 1.0, 0.0);
    }
    for (n, kept) in kept.iter().enumerate() {
        let n = n as f32;
        assert_eq!(
            rig.read(kept),
            [2.0 * n, 2.0 * n + 1.0, 2.0 * n + 1.5, -1.0]
        );
    }
    // An error of the writer's is the call's.
    let failed = input.pad_with(&rig.stream, 1, |rows| rows.view(0, 5).map(drop));
    assert!(
        matches!(failed, Err(Error::View { of: 4, .. })),
        "{failed:?}"
    );
    drop((kept, tokens, input, f));
    rig.finish();
}

fn batches_on_several_streams<D: Device>(rig: Rig<D>) {
    let f = doubles(&rig);
    let streams = [(); 3].map(|()| rig.device.create_stream().unwrap());
    let buckets = Buckets::new([4]).unwrap();
    let mut input = PaddedInput::new(&rig.allocator, &rig.stream, buckets, 4, 9.0_f32).unwrap();
    let mut all = Vec::new();
    for n in 0..9 {
        let stream = &streams[n % 3];
        let batch = rig.allocator.alloc(stream, 8).unwrap();
        let bytes = [n as f32, -1.0].map(f32::to_le_bytes).concat();
        batch.write(&rig.device, stream, &bytes).unwrap();
        let padded = input.pad(stream, &batch).unwrap();
        let step = rig.trees.step();
        let args = &mut [lend(padded.tensor())];
        let out = rig.trees.run(&f, &step, &[4], stream, args).unwrap();
        let kept = rig.allocator.alloc(stream, 16).unwrap();
        rig.scale_into(stream, &kept, &out[0], 1.0, 0.0);
        all.push(kept);
    }
    for (n, kept) in all.iter().enumerate() {
        let bytes = kept.read(&rig.device, &streams[n % 3]).unwrap();
        let expected = [2.0 * n as f32, -2.0, 18.0, 18.0].map(f32::to_le_bytes);
        assert_eq!(bytes, expected.concat());
    }
    // The batch before was on a stream that captures by now.
    let last = &streams[8 % 3];
    rig.device
        .begin_capture(last, CaptureMode::ThreadLocal)
        .unwrap();
    let refused = input.pad(&rig.stream, &Tensor::empty()).unwrap_err();
    assert!(
        matches!(
            &refused,
            Error::Device(DeviceError {
                code: Code::StreamCaptureIsolation,
                ..
            })
        ),
        "{refused}"
    );
    drop(rig.device.end_capture(last).unwrap());
    input.pad(&rig.stream, &Tensor::empty()).unwrap();
    drop((all, input, f));
    rig.finish();
}

fn inside_a_capture<D: Device>(rig: Rig<D>) {
    let buckets = Buckets::new([4]).unwrap();
    let mut input = PaddedInput::new(&rig.allocator, &rig.stream, buckets, 8, f64::MAX).unwrap();
    let stream = rig.device.create_stream().unwrap();
    let batch = rig.floats(&[1.0; 4]);
    rig.device.synchronize(&rig.stream).unwrap();
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&stream).unwrap();
    let padded = input.pad(capture.stream(), &batch).unwrap();
    capture.end().unwrap();
    for value in [2.0_f32, 3.0] {
        rig.put(&batch, &[value; 4]);
        rig.device.synchronize(&rig.stream).unwrap();
        graph.replay(&stream).unwrap();
        let bytes = padded.tensor().read(&rig.device, &stream).unwrap();
        assert_eq!(bytes[..16], [value; 4].map(f32::to_le_bytes).concat());
        assert_eq!(bytes[16..], [f64::MAX; 2].map(f64::to_le_bytes).concat());
    }
    drop(padded);
    drop((graph, batch, input));
    rig.finish();
}

fn what_does_not_fit_is_refused<D: Device>(rig: Rig<D>) {
    let (allocator, stream) = (&rig.allocator, &rig.stream);
    let buckets = || Buckets::new([2, 4]).unwrap();
    let refused = |result: Result<PaddedInput<D>, Error>, words: &str| {
        let error = result.unwrap_err();
        assert!(
            matches!(&error, Error::Padding(_)) && error.to_string().contains(words),
            "{error}"
        );
    };
    refused(
        PaddedInput::new(allocator, stream, buckets(), 6, 1_u32),
        "6 B",
    );
    refused(
        PaddedInput::new(allocator, stream, buckets(), 0, 1_u8),
        "0 B",
    );
    refused(
        PaddedInput::new(allocator, stream, buckets(), u64::MAX / 2, 1_u8),
        "counted",
    );
    let mut input = PaddedInput::new(allocator, stream, buckets(), 8, 1_u32).unwrap();
    let batch = rig.floats(&[1.0; 10]);
    let error = input.pad(stream, &batch).unwrap_err();
    assert!(
        matches!(
            error,
            Error::NoBucket {
                rows: 5,
                largest: 4
            }
        ),
        "{error}"
    );
    let error = input.pad(stream, &batch.view(0, 12).unwrap()).unwrap_err();
    assert!(
        matches!(&error, Error::Padding(words) if words.contains("12 B")),
        "{error}"
    );
    let padded = input.pad(stream, &batch.view(0, 24).unwrap()).unwrap();
    let error = padded.cut(&batch.view(0, 10).unwrap()).unwrap_err();
    assert!(
        matches!(&error, Error::Padding(words) if words.contains("10 B")),
        "{error}"
    );
    // As many rows, of another width; and nothing of nothing.
    assert_eq!(padded.cut(&batch.view(0, 16).unwrap()).unwrap().bytes(), 12);
    assert_eq!(padded.cut(&Tensor::empty()).unwrap().bytes(), 0);
    // Its own rows are where they are to be.
    let rows = padded.cut(padded.tensor()).unwrap();
    drop(padded);
    let again = input.pad(stream, &rows).unwrap();
    assert_eq!(rig.read(again.tensor())[..6], [1.0; 6]);
    drop((again, rows));
    drop((batch, input));
    rig.finish();
}

fn patterns_of_a_device<D: Device>(rig: Rig<D>) {
    let d = &rig.device;
    let memory = rig.allocator.alloc(&rig.stream, 4096).unwrap();
    let ptr = memory.ptr().unwrap();
    let wide = Pattern::from(0x0102_0304_0506_0708_u64);
    d.fill(&rig.stream, ptr, 0xEE, 4096).unwrap();
    d.fill_pattern(&rig.stream, ptr.offset(8), wide, 4000)
        .unwrap();
    let bytes = memory.read(d, &rig.stream).unwrap();
    let mut expected = vec![0xEE; 4096];
    for value in expected[8..4008].chunks_exact_mut(8) {
        value.copy_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1]);
    }
    assert!(bytes == expected);
    // Captured, a fill.
    let mut graph = Graph::new(&rig.allocator);
    let capture = graph.capture(&rig.stream).unwrap();
    d.fill_pattern(&rig.stream, ptr, 0x1234_u16.into(), 6)
        .unwrap();
    d.fill_pattern(&rig.stream, ptr.offset(8), 7_u32.into(), 0)
        .unwrap();
    capture.end().unwrap();
    let info = graph.info().unwrap();
    assert_eq!((info.fills, info.nodes()), (1, 1));
    graph.replay(&rig.stream).unwrap();
    let bytes = memory.view(0, 8).unwrap().read(d, &rig.stream).unwrap();
    assert_eq!(bytes, [0x34, 0x12, 0x34, 0x12, 0x34, 0x12, 0xEE, 0xEE]);
    let refused = |dst: DevicePtr, bytes: u64| {
        let error = d
            .fill_pattern(&rig.stream, dst, 7_u32.into(), bytes)
            .unwrap_err();
        assert_eq!(
            (error.call, error.code),
            (Call::FillPattern, Code::InvalidValue),
            "{error}"
        );
    };
    refused(ptr.offset(2), 8);
    refused(ptr, 10);
    drop((graph, memory));
    rig.finish();
}

#[test]
fn a_fill_that_fails_is_the_calls_error() {
    let rig = Rig::new(wrapped());
    let buckets = Buckets::new([4]).unwrap();
    let mut input = PaddedInput::new(&rig.allocator, &rig.stream, buckets, 4, 1.0_f32).unwrap();
    let batch = rig.floats(&[1.0]);
    for call in [Call::Copy, Call::FillPattern] {
        rig.device.fail(call, 1, Code::InvalidValue);
        let error = input.pad(&rig.stream, &batch).unwrap_err();
        assert!(
            matches!(&error, Error::Device(e) if e.call == call),
            "{error}"
        );
    }
    let padded = input.pad(&rig.stream, &batch).unwrap();
    assert_eq!(rig.read(padded.tensor()), [1.0; 4]);
    drop(padded);
    drop((batch, input));
    rig.finish();
}
