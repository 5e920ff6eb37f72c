//! What people see: pictures of tree and pool at each step, the dot file, and the text of errors, each as a snapshot under `snapshots/`.

mod common;

use common::Rig;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::inspect::{tree_dot, tree_picture};
use cudagraph_trees::{Error, FunctionSpec, give, lend};

/// Compares a text with the snapshot of a name. Places in source files are left out of it: they move with each edit.
fn check(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/snapshots"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, without_lines(text)));
}

/// `tests/x.rs:12:3` becomes `tests/x.rs:LINE`.
fn without_lines(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(".rs:") {
        let (before, after) = rest.split_at(at + 4);
        out.push_str(before);
        out.push_str("LINE");
        rest = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == ':');
        if rest.len() < after.len() && after[..after.len() - rest.len()].ends_with(':') {
            out.push(':');
        }
    }
    out + rest
}

#[test]
fn tree_the_path_and_its_switch() {
    let rig = Rig::new(HostDevice::new());
    let g1 = rig.scale_add("g1", 1.0, 1.0);
    let g2 = rig.scale_add("g2", 2.0, 0.0);
    let g3 = rig.scale_add("g3", 3.0, 0.0);
    let x = rig.floats(&[1.0; 1024]);
    let mut text = String::new();
    for (title, second, result) in [
        ("first run", &g2, 4.0),
        ("second run", &g2, 4.0),
        ("third run", &g2, 4.0),
        ("switch to g3", &g3, 6.0),
        ("g3 again", &g3, 6.0),
        ("g3 once more", &g3, 6.0),
        ("back to g2", &g2, 4.0),
    ] {
        let step = rig.trees.step();
        let (p1, y) = rig.phased(&g1, &step, &x);
        let (p2, z) = rig.phased(second, &step, &y);
        assert_eq!(rig.read(&z), [result; 1024]);
        text += &format!(
            "== {title}: g1 {p1:?}, {} {p2:?}\n{}\n",
            second.name(),
            rig.trees.picture()
        );
    }
    check("tree_path_and_switch", &text);
    check("tree_path_and_switch_dot", &tree_dot(&rig.trees.view()));
    drop(x);
    rig.finish();
}

/// Every kind of input and output there is.
#[test]
fn tree_kinds() {
    let rig = Rig::new(HostDevice::new());
    let (param, outside) = (rig.floats(&[1.0, 2.0]), rig.floats(&[3.0, 4.0]));
    let constant = outside.clone();
    let spec = FunctionSpec::new("kinds")
        .bind(5, &param)
        .static_input(1)
        .skip_warmup();
    let kinds = rig.register(spec, move |k, rec, mut inputs| {
        let first = inputs.take(0)?;
        let fresh = k.sum(rec, &first, inputs.get(1)?)?;
        let fixed = inputs.take(1)?;
        let managed = inputs.take(2)?;
        let bound = inputs.get(5)?.clone();
        Ok(vec![
            fresh.view(4, 4)?,
            fresh,
            first,
            fixed.view(4, 4)?,
            managed,
            bound,
            constant.view(0, 4)?,
            rec.alloc(0)?,
        ])
    });
    let make = rig.scale_add("make", 1.0, 1.0);
    let step = rig.trees.step();
    drop(rig.one(&make, &step, &param));
    let y = rig.one(&make, &step, &param);
    let view = y.view(4, 4).unwrap();
    let args = &mut [
        give(outside.clone()),
        lend(&outside),
        lend(&view),
        give(cudagraph_trees::Tensor::empty()),
        cudagraph_trees::Arg::Value(std::sync::Arc::new(7u8)),
    ];
    let out = rig.call(&kinds, &step, &[7, -1], args);
    assert_eq!(rig.read(&out[1]), [6.0, 8.0]);
    check("tree_kinds", &rig.trees.picture());
    drop((out, view, y));
    check("tree_kinds_dropped", &tree_picture(&rig.trees.view()));
    drop((param, outside, step));
    rig.finish();
}

#[test]
fn tree_error_texts() {
    let rig = Rig::new(HostDevice::new());
    let x = rig.floats(&[1.0]);
    let mut text = String::new();
    let mut add = |title: &str, error: &Error| text += &format!("{title}\n  {error}\n");
    let f = rig.scale_add("f", 1.0, 1.0);
    let g = rig.scale_add("g", 1.0, 1.0);
    let old = rig.one(&f, &rig.trees.step(), &x);
    drop(rig.one(&g, &rig.trees.step(), &x));
    add("a stale output", &rig.try_read(&old).unwrap_err());

    let slot = std::sync::Arc::new(std::sync::Mutex::new(None));
    let cache = slot.clone();
    let keeps = rig.register(FunctionSpec::new("keeps"), move |_, rec, _| {
        *cache.lock().unwrap() = Some(rec.alloc(4096)?);
        Ok(vec![])
    });
    let step = rig.trees.step();
    let result = rig.trees.run(&keeps, &step, &[], &rig.stream, &mut []);
    add("memory kept inside", &result.unwrap_err());
    let kept = slot.lock().unwrap().take().unwrap();
    add("and read afterwards", &rig.try_read(&kept).unwrap_err());

    let fails = rig.register(FunctionSpec::new("fails").skip_warmup(), |_, rec, _| {
        rec.alloc(1 << 50)?;
        Ok(vec![])
    });
    let result = rig.trees.run(&fails, &step, &[], &rig.stream, &mut []);
    add("a closure that fails", &result.unwrap_err());

    let bound = rig.floats(&[1.0]);
    let dies = rig.register(FunctionSpec::new("dies").bind(0, &bound), |_, _, _| {
        Ok(vec![])
    });
    drop(bound);
    let result = rig.trees.run(&dies, &step, &[], &rig.stream, &mut []);
    add("a bound input that died", &result.unwrap_err());
    check("tree_error_texts", &text);
    drop((x, old, kept, step));
    rig.finish();
}

#[test]
fn lines_are_left_out() {
    assert_eq!(
        without_lines("at tests/a.rs:12:34, and src/b.rs:5 (x, at c.rs:1:2): end"),
        "at tests/a.rs:LINE, and src/b.rs:LINE (x, at c.rs:LINE): end"
    );
}
