//! Pictures of captured graphs by the device (CAP-12): of a graph object, and of a tree's node. What the row calls debug mode is that the template is kept.

mod common;

use common::{Rig, on_cuda};
use cudagraph_trees::device::{CaptureMode, Device};
use cudagraph_trees::{Error, FunctionSpec, Graph, NodeId, Phase, Tensor};

suite!(
    cap_12_a_dump_needs_the_template,
    cap_12_a_dump_shows_the_nodes,
    cap_12_a_node_of_a_tree_is_dumped,
    cap_12_a_dump_touches_no_capture,
);

/// What every device's picture has: the language, and each kernel's name as often as it was captured. (A driver may say a name twice.)
#[track_caller]
fn check(dot: &str, kernels: &[(&str, usize)]) {
    assert!(dot.trim_start().starts_with("digraph"), "{dot}");
    assert!(dot.trim_end().ends_with('}'), "{dot}");
    for (name, count) in kernels {
        let mut found = dot.matches(name).count();
        if on_cuda() && found > 0 {
            found = found.min(*count);
        }
        assert_eq!(found, *count, "{name} in {dot}");
    }
}

/// Folders of this process that a dump may have left among the temporary files.
fn left_behind() -> usize {
    let prefix = format!("cudagraph-trees-{}-", std::process::id());
    let all = std::fs::read_dir(std::env::temp_dir()).unwrap();
    all.filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_string_lossy().starts_with(&prefix)
    })
    .count()
}

/// Captures y = 2x + 1, then z = y + y, then a copy of z, and a byte set.
fn capture_four<D: Device>(rig: &Rig<D>, graph: &mut Graph<D>, x: &Tensor<D>) -> [Tensor<D>; 3] {
    let d = &rig.device;
    let capture = graph.capture(&rig.stream).unwrap();
    let y = rig.captured(&capture, x, 2.0, 1.0);
    let (z, copy) = (capture.alloc(16).unwrap(), capture.alloc(16).unwrap());
    let [py, pz, pc] = [&y, &z, &copy].map(|t| t.ptr().unwrap());
    rig.kernels.add(d, &rig.stream, pz, py, py, 4).unwrap();
    d.copy(&rig.stream, pc, pz, 16).unwrap();
    d.fill(&rig.stream, pc, 7, 1).unwrap();
    capture.end().unwrap();
    [y, z, copy]
}

fn cap_12_a_dump_needs_the_template<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    assert!(matches!(graph.debug_dump(), Err(Error::NotCaptured)));
    drop(capture_four(&rig, &mut graph, &x));
    let refused = graph.debug_dump().unwrap_err();
    assert!(matches!(refused, Error::TemplateNotKept), "{refused}");
    assert!(refused.to_string().contains("keep_template"), "{refused}");
    // It is too late for the graph that was captured already, and not for the next.
    graph.keep_template(true);
    assert!(matches!(graph.debug_dump(), Err(Error::TemplateNotKept)));
    graph.reset();
    assert!(matches!(graph.debug_dump(), Err(Error::NotCaptured)));
    drop(capture_four(&rig, &mut graph, &x));
    check(&graph.debug_dump().unwrap(), &[("scale_add", 1)]);
    // And it holds for later ones, until it is taken back.
    graph.reset();
    drop(capture_four(&rig, &mut graph, &x));
    check(&graph.debug_dump().unwrap(), &[("scale_add", 1)]);
    graph.reset();
    graph.keep_template(false);
    drop(capture_four(&rig, &mut graph, &x));
    assert!(matches!(graph.debug_dump(), Err(Error::TemplateNotKept)));
    assert_eq!(left_behind(), 0);
    drop((graph, x));
    rig.finish();
}

fn cap_12_a_dump_shows_the_nodes<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0, 2.0, 3.0, 4.0]);
    let mut graph = Graph::new(&rig.allocator);
    graph.keep_template(true);
    let [y, z, copy] = capture_four(&rig, &mut graph, &x);
    let dot = graph.debug_dump().unwrap();
    check(&dot, &[("scale_add", 1)]);
    let lower = dot.to_lowercase();
    for kind in ["kernel", "memcpy", "memset"] {
        assert!(lower.contains(kind), "{kind} in {dot}");
    }
    if !on_cuda() {
        let [px, py, pz, pc] = [&x, &y, &z, &copy].map(|t| t.ptr().unwrap());
        let grid = "grid [1, 1, 1] block [256, 1, 1] shared 0 B";
        let numbers = dot.lines().filter_map(|line| line.trim().split_once(" ["));
        let n: Vec<&str> = numbers.map(|(name, _)| name).collect();
        // Whatever the simulated device's marks are, they are no nodes, and the order goes through them.
        let expected = format!(
            "digraph graph_0 {{\n  \
             {a} [label=\"kernel scale_add_f32 {grid} ({py:?}, {px:?}, 4, 2, 1)\"];\n  \
             {b} [label=\"kernel add_f32 {grid} ({pz:?}, {py:?}, {py:?}, 4)\"];\n  \
             {c} [label=\"memcpy 16 B {pz:?} to {pc:?}\"];\n  \
             {d} [label=\"memset 1 B at {pc:?} to 0x07\"];\n  \
             {a} -> {b};\n  {b} -> {c};\n  {c} -> {d};\n}}\n",
            a = n[0],
            b = n[1],
            c = n[2],
            d = n[3],
        );
        assert_eq!(dot, expected);
    }
    // It is a picture: nothing has run, and the graph runs as before; and the same graph's is the same again.
    assert_eq!(graph.debug_dump().unwrap(), dot);
    graph.replay(&rig.stream).unwrap();
    assert_eq!(rig.read(&z), [6.0, 10.0, 14.0, 18.0]);
    assert_eq!(left_behind(), 0);
    drop((graph, x, y, z, copy));
    rig.finish();
}

fn cap_12_a_node_of_a_tree_is_dumped<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let (f, g) = (
        rig.scale_add("f", 2.0, 0.0),
        rig.register(FunctionSpec::new("g"), |k, rec, mut inputs| {
            let x = inputs.take(0)?;
            let y = k.product(rec, &x, &x)?;
            Ok(vec![k.product(rec, &y, &x)?])
        }),
    );
    let run = |want: Phase| -> [NodeId; 2] {
        let step = rig.trees.step();
        let y = rig.run(&f, &step, &[&x]);
        let z = rig.run(&g, &step, &[&y[0]]);
        assert_eq!((y.phase(), z.phase()), (want, want));
        assert_eq!(rig.read(&z[0]), [8.0; 4]);
        [&y, &z].map(|out| out.node().unwrap_or(NodeId(99)))
    };
    let [nowhere, _] = run(Phase::Warmup);
    let unknown = rig.trees.debug_dump(nowhere).unwrap_err();
    assert!(
        matches!(unknown, Error::UnknownNode(NodeId(99))),
        "{unknown}"
    );
    let plain = run(Phase::Record);
    assert!(matches!(
        rig.trees.debug_dump(plain[1]),
        Err(Error::TemplateNotKept)
    ));
    // Recorded anew, with templates.
    rig.trees.keep_templates(true);
    rig.trees.invalidate(&f).unwrap();
    assert!(matches!(
        rig.trees.debug_dump(plain[0]),
        Err(Error::UnknownNode(_))
    ));
    rig.trees.invalidate(&g).unwrap();
    run(Phase::Warmup);
    let nodes = run(Phase::Record);
    assert_eq!(run(Phase::Replay), nodes);
    let dots = nodes.map(|node| rig.trees.debug_dump(node).unwrap());
    check(&dots[0], &[("scale_add", 1)]);
    check(&dots[1], &[("scale_add", 0)]);
    if !on_cuda() {
        let p = x.ptr().unwrap();
        assert!(
            dots[0].contains(&format!("kernel gather 16 B {p:?} to ")),
            "{}",
            dots[0]
        );
        check(&dots[1], &[("kernel mul_f32 ", 2), (" -> ", 1)]);
    }
    // Later ones do without.
    rig.trees.keep_templates(false);
    check(
        &rig.trees.debug_dump(nodes[0]).unwrap(),
        &[("scale_add", 1)],
    );
    rig.trees.shutdown().unwrap();
    assert!(matches!(
        rig.trees.debug_dump(nodes[0]),
        Err(Error::UnknownNode(_))
    ));
    drop((f, g, x));
    rig.finish();
}

fn cap_12_a_dump_touches_no_capture<D: Device>(rig: Rig<D>) {
    let x = rig.floats(&[1.0; 4]);
    let mut graph = Graph::new(&rig.allocator);
    graph.keep_template(true);
    drop(capture_four(&rig, &mut graph, &x));
    let d = &rig.device;
    let other = d.create_stream().unwrap();
    for mode in [
        CaptureMode::Global,
        CaptureMode::ThreadLocal,
        CaptureMode::Relaxed,
    ] {
        d.begin_capture(&other, mode).unwrap();
        d.fill(&other, x.ptr().unwrap(), 0, 4).unwrap();
        check(&graph.debug_dump().unwrap(), &[("scale_add", 1)]);
        let ended = d.end_capture(&other).unwrap();
        assert_eq!(d.graph_info(&ended).unwrap().fills, 1);
    }
    drop((graph, x));
    rig.finish();
}
