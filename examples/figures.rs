//! What replays, checkpoints and allocations cost: one `name<TAB>value<TAB>unit` a line, times in nanoseconds of the calling thread.
//!
//! `cargo run --release --example figures [-- [--device host|cuda] [FILTER]]`; only figures whose name contains FILTER are measured.
//!
//! Times are medians over many calls. The device is drained every 32 calls, outside of what is timed. Names are those that the figures
//! of other runtimes are printed under, so that the columns can be joined. On the simulated device a launch is an entry in a queue, so
//! `raw_replay` is that device's floor, not a GPU's.
#![forbid(unsafe_code)]

#[path = "support/device.rs"]
mod device;
#[path = "support/numbers.rs"]
mod numbers;
#[path = "support/random.rs"]
mod random;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use cudagraph_trees::device::kernels::KernelSet;
use cudagraph_trees::device::{CaptureMode, Device};
use cudagraph_trees::pool::{
    Adopt, Allocation, Pool, PoolConfig, Restored, StreamId, Tag, Unclaimed,
};
use cudagraph_trees::{
    Allocator, Arg, Budget, Function, FunctionSpec, Graph, GraphTrees, Outputs, Phase, PoolOptions,
    Tensor, lend,
};
use numbers::Numbers;
use random::Random;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Elements of the tensors that trees work on.
const N: u64 = 256;
const STREAM: StreamId = StreamId(0);

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn ns(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64
}

/// How often a call is made.
#[derive(Clone, Copy)]
struct Rounds {
    warm: usize,
    timed: usize,
    drain: usize,
}

const USUAL: Rounds = Rounds {
    warm: 200,
    timed: 2000,
    drain: 32,
};
const CHAIN: Rounds = Rounds {
    warm: 50,
    timed: 400,
    drain: 4,
};

struct Bench<D: Device> {
    device: D,
    allocator: Allocator<D>,
    kernels: Arc<KernelSet<D>>,
    stream: D::Stream,
    filter: String,
    /// What was printed.
    seen: RefCell<Vec<(String, f64)>>,
}

impl<D: Device> Bench<D> {
    fn new(device: D, filter: String) -> Outcome<Self> {
        Ok(Bench {
            allocator: Allocator::new(device.clone())?,
            kernels: Arc::new(KernelSet::load(&device)?),
            stream: device.create_stream()?,
            device,
            filter,
            seen: RefCell::default(),
        })
    }

    fn wants(&self, name: &str) -> bool {
        name.contains(&self.filter)
    }

    fn put(&self, name: &str, value: f64, unit: &str) {
        if self.wants(name) {
            println!("{name}\t{value:.1}\t{unit}");
            self.seen.borrow_mut().push((name.to_owned(), value));
        }
    }

    fn ratio(&self, name: &str, value: f64) {
        if self.wants(name) {
            println!("{name}\t{value:.3}\tx");
            self.seen.borrow_mut().push((name.to_owned(), value));
        }
    }

    fn drain(&self) -> Outcome {
        Ok(self.device.synchronize_device()?)
    }

    /// Median time of a call.
    fn time(&self, rounds: Rounds, mut call: impl FnMut() -> Outcome) -> Outcome<f64> {
        let mut times = Vec::with_capacity(rounds.timed);
        for round in 0..rounds.warm + rounds.timed {
            let start = Instant::now();
            call()?;
            let time = ns(start);
            if round >= rounds.warm {
                times.push(time);
            }
            if round % rounds.drain == rounds.drain - 1 {
                self.drain()?;
            }
        }
        self.drain()?;
        Ok(median(times))
    }

    fn tensor(&self) -> Outcome<Tensor<D>> {
        let tensor = self.allocator.alloc(&self.stream, 4 * N)?;
        self.kernels
            .fill(&self.device, &self.stream, tensor.ptr()?, N, 1.0)?;
        Ok(tensor)
    }

    // ---- graphs ---------------------------------------------------------------------------------

    fn machine(&self) {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|l| l.strip_prefix("model name"));
        let cpu = model.map_or("unknown", |m| m.trim_start_matches([' ', '\t', ':']));
        if self.wants("machine") {
            let device = self.device.info();
            println!("machine\t{cpu}; device {}\t", device.name);
        }
    }

    fn raw_replay(&self) -> Outcome {
        for kernels in [1, 16, 128] {
            let name = format!("raw_replay.kernels={kernels}");
            if !self.wants(&name) {
                continue;
            }
            let x = self.allocator.alloc(&self.stream, 4096)?;
            self.kernels
                .fill(&self.device, &self.stream, x.ptr()?, 1024, 0.0)?;
            let mut graph = Graph::new(&self.allocator);
            let capture = graph.capture(&self.stream)?;
            for _ in 0..kernels {
                self.kernels
                    .increment(&self.device, capture.stream(), x.ptr()?, 1024, 1.0)?;
            }
            capture.end()?;
            let ns = self.time(USUAL, || Ok(graph.replay(&self.stream)?))?;
            self.put(&name, ns, "ns");
        }
        Ok(())
    }

    /// What a replay of a function with one copied input and one output costs over the bare launch of a graph. Both are timed in turns,
    /// a few calls each: what the processor's clock does in the meantime, it does to both.
    fn over_bare(&self) -> Outcome {
        const TURNS: usize = 80;
        const CALLS: Rounds = Rounds {
            warm: 10,
            timed: 54,
            drain: 32,
        };
        let name = "tree_replay.over_bare";
        if !self.wants(name) {
            return Ok(());
        }
        let x = self.tensor()?;
        let mut graph = Graph::new(&self.allocator);
        let capture = graph.capture(&self.stream)?;
        self.kernels
            .increment(&self.device, capture.stream(), x.ptr()?, N, 1.0)?;
        capture.end()?;
        let trees = GraphTrees::new(&self.allocator)?;
        let f = self.plain(&trees, "f")?;
        let (mut args, mut out) = ([lend(&x)], Outputs::new());
        let mut ratios = Vec::with_capacity(TURNS);
        for turn in 0..TURNS + 2 {
            let bare = self.time(CALLS, || Ok(graph.replay(&self.stream)?))?;
            let tree = self.time(CALLS, || {
                let step = trees.step();
                trees.run_into(&f, &step, &[], &self.stream, &mut args, &mut out)?;
                out.clear();
                Ok(())
            })?;
            if turn >= 2 {
                ratios.push(tree / bare);
            }
        }
        ratios.sort_by(f64::total_cmp);
        self.ratio(&format!("{name}.quarter"), ratios[TURNS / 4]);
        self.ratio(name, ratios[TURNS / 2]);
        self.ratio(&format!("{name}.three_quarters"), ratios[TURNS * 3 / 4]);
        Ok(())
    }

    /// A function of `outputs` outputs: the input at `input`, plus 0, 1, 2, ...
    fn function(
        &self,
        trees: &GraphTrees<D>,
        spec: FunctionSpec<D>,
        input: usize,
        outputs: usize,
    ) -> Outcome<Function> {
        let kernels = self.kernels.clone();
        let body = move |recorder: &mut cudagraph_trees::Recorder<'_, D>,
                         inputs: cudagraph_trees::Inputs<D>| {
            let x = inputs.get(input)?;
            let mut made = Vec::with_capacity(outputs);
            for i in 0..outputs {
                let out = recorder.alloc(x.bytes())?;
                let (to, from) = (out.ptr()?, x.ptr()?);
                let (device, stream) = (recorder.device(), recorder.stream());
                kernels.scale_add(device, stream, to, from, N, 1.0, i as f32)?;
                made.push(out);
            }
            Ok(made)
        };
        Ok(trees.register(spec, body)?)
    }

    /// One function that is replayed, a generation a call; tokens, arguments and the outputs' drop are in the time. The arguments are
    /// lent, in a list that is made once.
    fn tree_replay(&self) -> Outcome {
        let passed = [
            (0, 1, 1),
            (4, 1, 1),
            (16, 1, 1),
            (100, 1, 1),
            (1000, 1, 1),
            (4, 8, 1),
            (4, 1, 16),
            (4, 32, 32),
        ]
        .map(|(statics, copied, outputs)| (false, statics, copied, outputs));
        let bound = [0, 4, 16, 100, 1000].map(|n| (true, n, 1, 1));
        for (bound, statics, copied, outputs) in passed.into_iter().chain(bound) {
            let kind = if bound { "bound" } else { "static" };
            let name = format!("tree_replay.{kind}={statics}.copied={copied}.outputs={outputs}");
            if !self.wants(&name) {
                continue;
            }
            let trees = GraphTrees::new(&self.allocator)?;
            let parameters = (0..statics)
                .map(|_| self.tensor())
                .collect::<Outcome<Vec<_>>>()?;
            let moving = (0..copied)
                .map(|_| self.tensor())
                .collect::<Outcome<Vec<_>>>()?;
            let mut spec = FunctionSpec::new("f");
            for (i, parameter) in parameters.iter().enumerate() {
                spec = if bound {
                    spec.bind(i, parameter)
                } else {
                    spec.static_input(i)
                };
            }
            let f = self.function(&trees, spec, statics, outputs)?;
            let lent = parameters.iter().filter(|_| !bound).chain(&moving);
            let mut args: Vec<Arg<'_, D>> = lent.map(lend).collect();
            let mut out = Outputs::new();
            let ns = self.time(USUAL, || {
                let step = trees.step();
                trees.run_into(&f, &step, &[], &self.stream, &mut args, &mut out)?;
                out.clear();
                Ok(())
            })?;
            if trees.counts().recordings != 1 {
                return Err(format!("{name}: {} recordings", trees.counts().recordings).into());
            }
            self.put(&name, ns, "ns");
        }
        Ok(())
    }

    /// Runs `f` of one lent input.
    fn one(
        &self,
        trees: &GraphTrees<D>,
        f: &Function,
        step: &cudagraph_trees::Step,
        x: &Tensor<D>,
    ) -> Outcome<Outputs<D>> {
        Ok(trees.run(f, step, &[], &self.stream, &mut [lend(x)])?)
    }

    fn plain(&self, trees: &GraphTrees<D>, name: &str) -> Outcome<Function> {
        self.function(trees, FunctionSpec::new(name), 0, 1)
    }

    fn tree_path(&self) -> Outcome {
        let x = self.tensor()?;
        if self.wants("tree_path.g1g2") || self.wants("tree_path.alternate") {
            let trees = GraphTrees::new(&self.allocator)?;
            let g1 = self.plain(&trees, "g1")?;
            let seconds = [self.plain(&trees, "g2")?, self.plain(&trees, "g3")?];
            let go = |second: usize| -> Outcome {
                let step = trees.step();
                let first = self.one(&trees, &g1, &step, &x)?;
                self.one(&trees, &seconds[second], &step, &first[0])?;
                Ok(())
            };
            for _ in 0..8 {
                go(0)?;
                go(1)?;
            }
            let recorded = trees.counts().recordings;
            self.put("tree_path.g1g2", self.time(USUAL, || go(0))?, "ns");
            let mut turn = 0;
            let ns = self.time(USUAL, || {
                turn = 1 - turn;
                go(turn)
            })?;
            self.put("tree_path.alternate", ns, "ns");
            if trees.counts().recordings != recorded {
                return Err("tree_path: something was recorded while it was timed".into());
            }
        }
        for depth in [1, 4, 16, 64] {
            let name = format!("tree_path.chain.depth={depth}.per_node");
            if !self.wants(&name) {
                continue;
            }
            let trees = GraphTrees::new(&self.allocator)?;
            let functions = (0..depth)
                .map(|i| self.plain(&trees, &format!("f{i}")))
                .collect::<Outcome<Vec<_>>>()?;
            let mut kept: Vec<Outputs<D>> = (0..depth).map(|_| Outputs::new()).collect();
            let mut chain = || -> Outcome {
                let step = trees.step();
                for (i, f) in functions.iter().enumerate() {
                    let (before, rest) = kept.split_at_mut(i);
                    let input = before.last().map_or(&x, |outputs| &outputs[0]);
                    let args = &mut [lend(input)];
                    trees.run_into(f, &step, &[], &self.stream, args, &mut rest[0])?;
                }
                kept.iter_mut().for_each(Outputs::clear);
                Ok(())
            };
            for _ in 0..6 {
                chain()?;
            }
            let ns = self.time(CHAIN, chain)?;
            self.put(&name, ns / depth as f64, "ns");
        }
        Ok(())
    }

    /// A function runs below a replayed one for the second time: the pool is brought back, and a child recorded and launched.
    fn record_child_after_replay(&self) -> Outcome {
        let name = "record_child_after_replay";
        if !self.wants(name) {
            return Ok(());
        }
        let x = self.tensor()?;
        let trees = GraphTrees::new(&self.allocator)?;
        let g1 = self.plain(&trees, "g1")?;
        for _ in 0..4 {
            let step = trees.step();
            self.one(&trees, &g1, &step, &x)?;
        }
        let mut times = Vec::new();
        for k in 0..20 {
            let child = self.plain(&trees, &format!("k{k}"))?;
            for phase in [Phase::Warmup, Phase::Record] {
                let step = trees.step();
                let first = self.one(&trees, &g1, &step, &x)?;
                self.drain()?;
                let start = Instant::now();
                let out = self.one(&trees, &child, &step, &first[0])?;
                let time = ns(start);
                if out.phase() != phase || first.phase() != Phase::Replay {
                    return Err(
                        format!("{name}: {:?}, then {:?}", first.phase(), out.phase()).into(),
                    );
                }
                if phase == Phase::Record {
                    times.push(time);
                }
            }
        }
        self.drain()?;
        self.put(name, median(times), "ns");
        Ok(())
    }

    // ---- the pool by itself, over a backing of numbers ---------------------------------------------

    fn checkpoint(&self) -> Outcome {
        for n in [10, 100, 1000, 10_000] {
            let take = format!("checkpoint.take.blocks={n}");
            let restore = format!("checkpoint.restore.blocks={n}");
            if !self.wants(&take) && !self.wants(&restore) {
                continue;
            }
            let mut pool = Pool::new(PoolConfig::default(), Numbers::new())?;
            let live = blocks(&mut pool, n)?;
            let mut times = Vec::new();
            for _ in 0..200 {
                let start = Instant::now();
                let kept = pool.checkpoint();
                times.push(ns(start));
                drop(kept);
            }
            self.put(&take, median(times), "ns");

            // All blocks are freed; the restore makes all live again, each with a new owner.
            let kept = pool.checkpoint();
            let adopt: Vec<Adopt> = live
                .iter()
                .map(|saved| Adopt {
                    saved: *saved,
                    tag: Tag(2),
                })
                .collect();
            let (mut now, mut report, mut times) = (live, Restored::default(), Vec::new());
            for _ in 0..50 {
                for block in now.drain(..) {
                    pool.free(block)?;
                }
                let start = Instant::now();
                pool.restore_into(&kept, &adopt, Unclaimed::Free, &mut report)?;
                times.push(ns(start));
                if report.adopted.len() != n || report.kept != 0 {
                    return Err(format!("{restore}: {} adopted", report.adopted.len()).into());
                }
                now.extend(&report.adopted);
            }
            self.put(&restore, median(times), "ns");
        }
        self.net()
    }

    /// 10,000 live blocks of 2,048 B and 4,096 B in turn; a checkpoint; 100 of them drawn as victims. Then 10,000 pairs: a victim is drawn,
    /// freed, and allocated again with its own size, so it is another allocation afterwards (mostly at the place of the last victim of that
    /// size). Whatever the number of pairs, at most the 100 victims differ from the checkpoint; a last round over all of them sees to it that
    /// exactly 100 do. The restore adopts the 100; 9,900 are kept.
    fn net(&self) -> Outcome {
        let name = "checkpoint.restore.blocks=10000.pairs=10000.net=100";
        if !self.wants(name) {
            return Ok(());
        }
        let mut random = Random::new(7);
        let mut pool = Pool::new(PoolConfig::default(), Numbers::new())?;
        let mut live = blocks(&mut pool, 10_000)?;
        let mut order: Vec<usize> = (0..live.len()).collect();
        for i in 0..100 {
            let other = i + random.below(order.len() - i);
            order.swap(i, other);
        }
        // A node lists what it adopts in the order in which that was allocated.
        let victims = &mut order[..100];
        victims.sort_unstable();
        let kept = pool.checkpoint();
        let adopt: Vec<Adopt> = victims
            .iter()
            .map(|&v| Adopt {
                saved: live[v],
                tag: Tag(2),
            })
            .collect();
        let (mut report, mut times) = (Restored::default(), Vec::new());
        for _ in 0..50 {
            let drawn = (0..9_900).map(|_| random.below(100)).collect::<Vec<_>>();
            for at in drawn.into_iter().chain(0..100) {
                let victim = victims[at];
                pool.free(live[victim])?;
                live[victim] = pool.alloc(STREAM, size(victim), Tag(3))?;
            }
            let start = Instant::now();
            pool.restore_into(&kept, &adopt, Unclaimed::Free, &mut report)?;
            times.push(ns(start));
            let counts = (report.kept, report.adopted.len(), report.orphaned.len());
            if counts != (9_900, 100, 100) {
                return Err(format!("{name}: kept, adopted and orphaned are {counts:?}").into());
            }
            for (&victim, adopted) in victims.iter().zip(&report.adopted) {
                pool.free(live[victim])?; // the orphan's, to no effect
                live[victim] = *adopted;
            }
        }
        self.put(name, median(times), "ns");
        Ok(())
    }

    /// The same through a pool's handle: blocks are owned by tensors, and the restore moves them to other tensors and tells the device.
    fn handle(&self) -> Outcome {
        for n in [10, 100, 1000, 10_000] {
            let take = format!("checkpoint.handle.take.blocks={n}");
            let restore = format!("checkpoint.handle.restore.blocks={n}");
            if !self.wants(&take) && !self.wants(&restore) {
                continue;
            }
            let pool = self.allocator.create_pool(PoolOptions::default())?;
            let mut live = (0..n)
                .map(|i| pool.alloc(&self.stream, size(i)))
                .collect::<Result<Vec<_>, _>>()?;
            let ns = self.time(
                Rounds {
                    warm: 5,
                    timed: 50,
                    drain: 32,
                },
                || {
                    drop(pool.checkpoint());
                    Ok(())
                },
            )?;
            self.put(&take, ns, "ns");
            let kept = pool.checkpoint();
            let mut times = Vec::new();
            for _ in 0..20 {
                let heirs = live
                    .iter()
                    .map(|t| Ok(pool.unowned(t.ptr()?, t.bytes())))
                    .collect::<Outcome<Vec<_>>>()?;
                live.clear();
                self.drain()?;
                let adopt: Vec<&Tensor<D>> = heirs.iter().collect();
                let start = Instant::now();
                let done = pool.restore(&self.stream, &kept, &adopt, Unclaimed::Free)?;
                times.push(self::ns(start));
                if done.adopted != n {
                    return Err(format!("{restore}: {} adopted", done.adopted).into());
                }
                live = heirs;
            }
            self.put(&restore, median(times), "ns");
            self.drain()?;
        }
        Ok(())
    }

    fn alloc(&self) -> Outcome {
        for size in [512, 4096, 1 << 20, 2 << 20, 20 << 20] {
            let name = format!("alloc.pair.size={size}");
            if self.wants(&name) {
                let mut pool = Pool::new(PoolConfig::default(), Numbers::new())?;
                let mut pairs = |count: u32| -> Outcome<f64> {
                    let start = Instant::now();
                    for _ in 0..count {
                        let block = pool.alloc(STREAM, size, Tag(1))?;
                        pool.free(std::hint::black_box(block))?;
                    }
                    Ok(ns(start) / f64::from(count))
                };
                pairs(100)?;
                let times = (0..5).map(|_| pairs(200_000)).collect::<Outcome<_>>()?;
                self.put(&name, median(times), "ns");
            }
            // The same through the allocator: its lock, a storage, two marks for the device.
            let name = format!("alloc.tensor.size={size}");
            if self.wants(&name) {
                let ns = self.time(USUAL, || {
                    drop(self.allocator.alloc(&self.stream, size)?);
                    Ok(())
                })?;
                self.put(&name, ns, "ns");
            }
        }
        for (live, top) in [(64, 20), (1000, 20), (1000, 24), (10_000, 20)] {
            let name = format!("alloc.trace.live={live}.max=2^{top}");
            if !["cold", "hot", "reserved_over_allocated"]
                .iter()
                .any(|kind| self.wants(&format!("{name}.{kind}")))
            {
                continue;
            }
            let runs = (0..5)
                .map(|_| trace(live, 100_000, f64::from(top)))
                .collect::<Outcome<Vec<_>>>()?;
            let figure = |i: usize| median(runs.iter().map(|run| run[i]).collect());
            self.put(&format!("{name}.cold"), figure(0), "ns");
            self.put(&format!("{name}.hot"), figure(1), "ns");
            let name = format!("{name}.reserved_over_allocated");
            if self.wants(&name) {
                println!("{name}\t{:.3}\tratio", figure(2));
            }
        }
        Ok(())
    }

    /// One recording, to its first launch, by the calls of the device alone.
    fn by_hand(
        &self,
        capture: &D::Stream,
        kernels: usize,
        (x, out): (&Tensor<D>, &Tensor<D>),
    ) -> Outcome<(f64, D::Exec)> {
        let start = Instant::now();
        self.device
            .begin_capture(capture, CaptureMode::ThreadLocal)?;
        for _ in 0..kernels {
            let (dst, src) = (out.ptr()?, x.ptr()?);
            self.kernels
                .scale_add(&self.device, capture, dst, src, N, 1.0, 1.0)?;
        }
        let graph = self.device.end_capture(capture)?;
        let exec = self.device.instantiate(&graph)?;
        // The template is not needed any more, here as there.
        drop(graph);
        self.device.launch_graph(&exec, &self.stream, &[])?;
        Ok((ns(start), exec))
    }

    /// The same by a tree: a function of its own, at the root.
    fn by_tree(
        &self,
        trees: &GraphTrees<D>,
        kernels: usize,
        x: &Tensor<D>,
    ) -> Outcome<(f64, Function)> {
        let k = self.kernels.clone();
        let spec = FunctionSpec::new("f").static_input(0).skip_warmup();
        let f = trees.register(spec, move |rec, inputs| {
            let src = inputs.get(0)?.ptr()?;
            let out = rec.alloc(4 * N)?;
            for _ in 0..kernels {
                k.scale_add(rec.device(), rec.stream(), out.ptr()?, src, N, 1.0, 1.0)?;
            }
            Ok(vec![out])
        })?;
        let step = trees.step();
        let start = Instant::now();
        let outputs = trees.run(&f, &step, &[], &self.stream, &mut [lend(x)])?;
        let time = ns(start);
        match outputs.phase() {
            Phase::Record => Ok((time, f)),
            other => Err(format!("a {other} where a recording is timed").into()),
        }
    }

    /// Recordings by hand and by a tree, in turns. Executables are kept in both: where one is destroyed,
    /// the driver has its memory at hand for the next (`by_hand.dropped`), but a tree keeps its recordings.
    fn record(&self) -> Outcome {
        const ROUNDS: usize = 64;
        for kernels in [1, 4, 64] {
            let name = |kind: &str| format!("record.{kind}.kernels={kernels}");
            let kinds = ["by_hand.dropped", "by_hand", "tree", "over_by_hand"];
            if !kinds.iter().any(|kind| self.wants(&name(kind))) {
                continue;
            }
            let (x, out) = (self.tensor()?, self.tensor()?);
            let capture = self.device.create_stream()?;
            let by_hand = || self.by_hand(&capture, kernels, (&x, &out));
            let trees = GraphTrees::new(&self.allocator)?;
            let mut dropped = Vec::new();
            for _ in 0..ROUNDS {
                dropped.push(by_hand()?.0);
                self.drain()?;
            }
            let (mut hand, mut tree) = (Vec::new(), Vec::new());
            // A function that is dropped takes its recording along.
            let mut kept = Vec::new();
            for round in 0..ROUNDS {
                // Either comes first as often, and in no fixed order: the driver has costs that come up at every second executable, or every fourth.
                for turn in [0, 1] {
                    if (round.count_ones() + turn) % 2 == 0 {
                        let (time, exec) = by_hand()?;
                        hand.push(time);
                        kept.push((Some(exec), None));
                    } else {
                        let (time, f) = self.by_tree(&trees, kernels, &x)?;
                        tree.push(time);
                        kept.push((None, Some(f)));
                    }
                    self.drain()?;
                }
            }
            let (hand, tree) = (median(hand), median(tree));
            self.put(&name("by_hand.dropped"), median(dropped), "ns");
            self.put(&name("by_hand"), hand, "ns");
            self.put(&name("tree"), tree, "ns");
            self.ratio(&name("over_by_hand"), tree / hand);
        }
        Ok(())
    }

    /// The same where the tree's budget is full, so that the recording that was used the longest ago goes for each new one; by hand, the oldest executable does.
    fn record_full(&self) -> Outcome {
        const ROUNDS: usize = 64;
        let name = |kind: &str| format!("record.full.{kind}.kernels=1");
        if !["by_hand", "tree", "over_by_hand"]
            .iter()
            .any(|kind| self.wants(&name(kind)))
        {
            return Ok(());
        }
        let (x, out) = (self.tensor()?, self.tensor()?);
        let capture = self.device.create_stream()?;
        let trees = GraphTrees::new(&self.allocator)?;
        let (mut functions, mut execs) = (Vec::new(), VecDeque::new());
        for _ in 0..Budget::default().graphs {
            functions.push(self.by_tree(&trees, 1, &x)?.1);
        }
        self.drain()?;
        let (mut hand, mut tree) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            for turn in [0, 1] {
                if (round.count_ones() + turn) % 2 == 0 {
                    let (time, exec) = self.by_hand(&capture, 1, (&x, &out))?;
                    execs.push_back(exec);
                    let start = Instant::now();
                    let oldest = (execs.len() > ROUNDS / 4).then(|| execs.pop_front());
                    drop(oldest);
                    hand.push(time + ns(start));
                } else {
                    let (time, f) = self.by_tree(&trees, 1, &x)?;
                    tree.push(time);
                    functions.push(f);
                }
                self.drain()?;
            }
        }
        let (hand, tree) = (median(hand), median(tree));
        self.put(&name("by_hand"), hand, "ns");
        self.put(&name("tree"), tree, "ns");
        self.ratio(&name("over_by_hand"), tree / hand);
        Ok(())
    }

    fn all(&self) -> Outcome {
        self.machine();
        self.raw_replay()?;
        self.over_bare()?;
        self.tree_replay()?;
        self.tree_path()?;
        self.record_child_after_replay()?;
        self.record()?;
        self.record_full()?;
        self.checkpoint()?;
        self.handle()?;
        self.alloc()
    }
}

/// Bytes of the `i`-th block of the checkpoints.
fn size(i: usize) -> u64 {
    if i % 2 == 1 { 2048 } else { 4096 }
}

fn blocks(pool: &mut Pool<Numbers>, n: usize) -> Outcome<Vec<Allocation>> {
    let all = (0..n).map(|i| pool.alloc(STREAM, size(i), Tag(1)));
    Ok(all.collect::<Result<_, _>>()?)
}

/// Holds `live` blocks; each step frees one at random and allocates another, of a size between 512 B and 2^top, uniform in its logarithm.
/// Nanoseconds a step the first time and the second (the same sizes), and bytes reserved over bytes handed out, at their peaks.
fn trace(live: usize, steps: usize, top: f64) -> Outcome<[f64; 3]> {
    let mut random = Random::new(7);
    let sizes: Vec<u64> = (0..steps + live)
        .map(|_| random.between(9.0, top).exp2() as u64)
        .collect();
    let victims: Vec<usize> = (0..steps).map(|_| random.below(live)).collect();
    let mut pool = Pool::new(PoolConfig::default(), Numbers::new())?;
    let mut held = sizes[steps..]
        .iter()
        .map(|bytes| pool.alloc(STREAM, *bytes, Tag(1)))
        .collect::<Result<Vec<_>, _>>()?;
    let mut times = [0.0; 2];
    for time in &mut times {
        let start = Instant::now();
        for (&victim, &bytes) in victims.iter().zip(&sizes) {
            pool.free(held[victim])?;
            held[victim] = pool.alloc(STREAM, bytes, Tag(1))?;
        }
        *time = ns(start) / steps as f64;
    }
    let stats = pool.stats();
    let ratio = stats.reserved_bytes.peak as f64 / stats.live_bytes.peak as f64;
    Ok([times[0], times[1], ratio])
}

/// All figures on a device whose name contains `filter`, printed, and as values.
pub fn measure<D: Device>(device: D, filter: &str) -> Outcome<Vec<(String, f64)>> {
    let bench = Bench::new(device, filter.to_owned())?;
    bench.all()?;
    Ok(bench.seen.take())
}

/// All figures whose name contains a filter.
struct Figures {
    filter: String,
}

impl device::Job for Figures {
    fn run<D: Device>(self, device: D) -> Outcome {
        measure(device, &self.filter).map(drop)
    }
}

fn run() -> Outcome {
    let (name, others) = device::chosen(std::env::args())?;
    if let Some(option) = others.iter().find(|arg| arg.starts_with('-')) {
        return Err(format!("{option} is no option; there is --device NAME").into());
    }
    let filter = others.into_iter().next_back().unwrap_or_default();
    device::run_on(&name, Figures { filter })
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
