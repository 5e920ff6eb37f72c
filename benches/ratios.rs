//! What must stay cheap, as ratios of figures of one run on the simulated device: `cargo bench`.
//!
//! Times move with the machine, ratios hardly; the bounds leave room for a loaded machine. The figures are those of
//! `examples/figures.rs`, where each is described.

#[allow(dead_code)] // its `main`
#[path = "../examples/figures.rs"]
mod figures;

use std::error::Error;
use std::process::ExitCode;

use cudagraph_trees::device::host::HostDevice;

/// Numerator, denominator, and the most their ratio may be.
const BOUNDS: [(&str, &str, f64); 6] = [
    // The state is a value: keeping ten thousand blocks costs little more than keeping ten.
    (
        "checkpoint.take.blocks=10000",
        "checkpoint.take.blocks=10",
        20.0,
    ),
    // Returning costs what has changed, not what there is.
    (
        "checkpoint.restore.blocks=10000.pairs=10000.net=100",
        "checkpoint.restore.blocks=10000",
        0.25,
    ),
    // Bound statics cost a replay nothing.
    (
        "tree_replay.bound=1000.copied=1.outputs=1",
        "tree_replay.bound=0.copied=1.outputs=1",
        1.2,
    ),
    // A node costs the same at any depth.
    (
        "tree_path.chain.depth=64.per_node",
        "tree_path.chain.depth=4.per_node",
        1.5,
    ),
    // Who goes for want of room is not searched among all.
    ("record.full.tree.kernels=1", "record.tree.kernels=1", 4.0),
    // More live blocks, hardly dearer blocks.
    (
        "alloc.trace.live=10000.max=2^20.hot",
        "alloc.trace.live=64.max=2^20.hot",
        6.0,
    ),
];

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let seen = figures::measure(HostDevice::new(), "")?;
    let find = |name: &str| {
        let found = seen.iter().find(|(n, _)| n == name);
        found
            .map(|(_, v)| *v)
            .ok_or_else(|| format!("no figure {name}"))
    };
    let mut failed = 0;
    for (numerator, denominator, most) in BOUNDS {
        let ratio = find(numerator)? / find(denominator)?;
        let verdict = if ratio <= most { "ok" } else { "TOO MUCH" };
        failed += u32::from(ratio > most);
        println!("{numerator} / {denominator}\t{ratio:.2}\tat most {most}\t{verdict}");
    }
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
