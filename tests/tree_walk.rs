//! Random walks over a tree, beside an interpreter that keeps every value. Whatever is held, dropped, given, lent, viewed, cloned and
//! in whatever order steps are opened and closed: a handle that may be read has exactly its value, and one of an ended step is stale.
//! The row of the tables of what users report: T2-03.

mod common;

use common::Rig;
use cudagraph_trees::device::Device;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::{Error, Function, FunctionSpec, GraphTrees, Phase, Step, Tensor, give, lend};

/// A small generator of random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What the functions compute, on the host: two floats in, two floats out, for each output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// x + 1 and x * 3; the temporary between them dies inside.
    Two,
    /// The input itself, and its second element as a view, and x + y.
    Alias,
    /// (x * y) where both inputs die inside before the last step, in 600 floats of scratch memory.
    Consume,
}

const KINDS: [Kind; 3] = [Kind::Two, Kind::Alias, Kind::Consume];
const DEPTH: usize = 6;

type Pair = [f32; 2];

/// A held handle, and what it must read as.
struct Held<D: Device> {
    tensor: Tensor<D>,
    value: Vec<f32>,
    /// Which of the open steps it belongs to; `None` for an eager tensor, which never goes stale.
    step: Option<u64>,
}

struct Walk<D: Device> {
    rig: Rig<D>,
    functions: Vec<Function>,
    random: Random,
    steps: Vec<Step>,
    held: Vec<Held<D>>,
    streams: Vec<D::Stream>,
    depth: usize,
    seen: [u64; 3],
    log: String,
}

fn functions<D: Device>(rig: &Rig<D>) -> Vec<Function> {
    let two = rig.register(FunctionSpec::new("two"), |k, rec, mut inputs| {
        let (x, _) = (inputs.take(0)?, inputs.take(1)?);
        let doubled = k.apply(rec, &x, 2.0, 0.0)?;
        let tripled = k.sum(rec, &doubled, &x)?;
        drop(doubled);
        let next = k.apply(rec, &x, 1.0, 1.0)?;
        Ok(vec![next, tripled])
    });
    let alias = rig.register(FunctionSpec::new("alias"), |k, rec, mut inputs| {
        let (x, y) = (inputs.take(0)?, inputs.take(1)?);
        let sum = k.sum(rec, &x, &y)?;
        drop(y);
        let second = x.view(4, 4)?;
        Ok(vec![x, second, sum])
    });
    let consume = rig.register(FunctionSpec::new("consume"), |k, rec, mut inputs| {
        let scratch = rec.alloc(2400)?;
        let (x, y) = (inputs.take(0)?, inputs.take(1)?);
        k.kernels
            .fill(rec.device(), rec.stream(), scratch.ptr()?, 600, 5.0)?;
        let product = k.product(rec, &x, &y)?;
        drop((x, y, scratch));
        Ok(vec![k.apply(rec, &product, 1.0, 0.0)?])
    });
    vec![two, alias, consume]
}

fn expected(kind: Kind, x: Pair, y: Pair) -> Vec<Vec<f32>> {
    let each = |f: fn(f32, f32) -> f32| vec![f(x[0], y[0]), f(x[1], y[1])];
    match kind {
        Kind::Two => vec![each(|x, _| x + 1.0), each(|x, _| x * 2.0 + x)],
        Kind::Alias => vec![x.to_vec(), vec![x[1]], each(|x, y| x + y)],
        Kind::Consume => vec![each(|x, y| x * y)],
    }
}

impl<D: Device> Walk<D> {
    fn new(device: D, seed: u64) -> Self {
        let rig = Rig::new(device);
        let functions = functions(&rig);
        let streams = vec![rig.stream.clone(), rig.device.create_stream().unwrap()];
        Walk {
            functions,
            random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
            steps: Vec::new(),
            held: Vec::new(),
            streams,
            depth: 0,
            seen: [0; 3],
            log: format!("seed {seed}\n"),
            rig,
        }
    }

    fn note(&mut self, line: String) {
        self.log.push_str(&line);
        self.log.push('\n');
    }

    fn is_open(&self, step: Option<u64>) -> bool {
        step.is_none_or(|number| self.steps.iter().any(|s| s.number() == number))
    }

    /// Looks at one handle. `ran`: a run has been made since the last step was closed, so what belongs to closed steps is stale.
    fn look(&self, held: &Held<D>, ran: bool) {
        let got = self.rig.try_read(&held.tensor);
        match got {
            Ok(bits) => {
                assert!(
                    !ran || self.is_open(held.step),
                    "{:?} of step {:?} is readable after its end\n{}",
                    held.tensor,
                    held.step,
                    self.log
                );
                assert_eq!(
                    bits,
                    held.value,
                    "{:?}\n{}\n{}",
                    held.tensor,
                    self.log,
                    self.rig.trees.picture()
                );
            }
            Err(Error::Stale(_)) => assert!(
                !self.is_open(held.step),
                "{:?} of open step {:?} is stale\n{}",
                held.tensor,
                held.step,
                self.log
            ),
            Err(other) => panic!("{:?}: {other}\n{}", held.tensor, self.log),
        }
    }

    fn look_at_all(&self, ran: bool) {
        for held in &self.held {
            self.look(held, ran);
        }
    }

    /// A pair that may be an input: its index among the held, of the right length and readable.
    fn pick(&mut self) -> Option<usize> {
        let fits: Vec<usize> = (0..self.held.len())
            .filter(|i| {
                self.held[*i].value.len() == 2
                    && self.held[*i].tensor.is_current()
                    && self.is_open(self.held[*i].step)
            })
            .collect();
        // Half the time the newest, so that paths come again.
        match fits.last() {
            Some(newest) if self.random.one_in(2) => Some(*newest),
            Some(_) => Some(fits[self.random.below(fits.len())]),
            None => None,
        }
    }

    fn eager(&mut self) {
        let value = vec![self.random.below(20) as f32, self.random.below(20) as f32];
        let tensor = self.rig.floats(&value);
        // It may be read on the other stream.
        self.rig.device.synchronize(&self.rig.stream).unwrap();
        self.held.push(Held {
            tensor,
            value,
            step: None,
        });
    }

    fn run(&mut self) {
        if self.steps.is_empty() {
            let step = self.rig.trees.step();
            self.steps.push(step);
            self.depth = 0;
        }
        let number = self.random.below(self.steps.len());
        let step_number = self.steps[number].number();
        let kind = KINDS[self.random.below(3)];
        while self
            .held
            .iter()
            .filter(|h| h.step.is_none() && h.value.len() == 2)
            .count()
            < 2
        {
            self.eager();
        }
        let (i, j) = match (self.pick(), self.pick()) {
            (Some(i), Some(j)) => (i, j),
            _ => unreachable!("there are two eager tensors"),
        };
        let pair = |h: &Held<D>| -> Pair { [h.value[0], h.value[1]] };
        let (x, y) = (pair(&self.held[i]), pair(&self.held[j]));
        let give_x = self.random.one_in(2);
        let give_y = i != j && self.random.one_in(2);
        // An eager tensor is given on its own stream: elsewhere its death would not be in order with the run.
        let eager = |index: usize| self.held[index].step.is_none();
        let may_move = !(give_x && eager(i) || give_y && eager(j));
        let other = may_move && self.random.one_in(5);
        let stream = self.streams[usize::from(other)].clone();
        // What becomes of an input that is returned: the step it belongs to is its own.
        let owner = self.held[i].step;
        let from_path = owner.is_some();

        // Given ones leave the held, highest index first.
        let mut taken: [Option<Held<D>>; 2] = [None, None];
        let mut order = [(i, 0usize, give_x), (j, 1, give_y)];
        order.sort_by_key(|(index, ..)| std::cmp::Reverse(*index));
        let (mut li, mut lj) = (i, j);
        for (index, which, given) in order {
            if given {
                taken[which] = Some(self.held.remove(index));
                if li > index {
                    li -= 1;
                }
                if lj > index {
                    lj -= 1;
                }
            }
        }
        // The same handle given as x and lent as y: y is a clone of it.
        let same = (give_x && i == j).then(|| taken[0].as_ref().unwrap().tensor.clone());
        // A lent input is a handle that the caller keeps; a given one is the caller's last.
        let lent_x = (!give_x).then(|| self.held[li].tensor.clone());
        let lent_y = (!give_y).then(|| match &same {
            Some(t) => t.clone(),
            None => self.held[lj].tensor.clone(),
        });
        let what = format!(
            "run {kind:?} in step {step_number} of {}{:?} and {}{:?}",
            if give_x { "given " } else { "" },
            lent_x.as_ref().or(taken[0].as_ref().map(|h| &h.tensor)),
            if give_y { "given " } else { "" },
            lent_y.as_ref().or(taken[1].as_ref().map(|h| &h.tensor)),
        );
        let given_x = taken[0].take().map(|h| h.tensor);
        let given_y = taken[1].take().map(|h| h.tensor);
        let outputs = {
            let first = match (given_x, &lent_x) {
                (Some(t), _) => give(t),
                (None, Some(t)) => lend(t),
                _ => unreachable!(),
            };
            let second = match (given_y, &lent_y) {
                (Some(t), _) => give(t),
                (None, Some(t)) => lend(t),
                _ => unreachable!(),
            };
            let mut args = [first, second];
            self.rig.trees.run(
                &self.functions[kind as usize],
                &self.steps[number],
                &[],
                &stream,
                &mut args,
            )
        };
        let outputs = outputs.unwrap_or_else(|e| panic!("{what}: {e}\n{}", self.log));
        self.note(format!(
            "{what}: {:?} {:?}",
            outputs.phase(),
            outputs.node()
        ));
        self.seen[match outputs.phase() {
            Phase::Warmup => 0,
            Phase::Record => 1,
            Phase::Replay => 2,
            Phase::Inline | Phase::Eager => unreachable!("nothing captures"),
        }] += 1;
        self.depth += 1;
        // Reads below are on the first stream.
        self.rig.device.synchronize(&stream).unwrap();
        for (index, (tensor, value)) in outputs.into_iter().zip(expected(kind, x, y)).enumerate() {
            // An input that lies on the path is returned as it is, and stays of the step that it was made in; a copied one is a new output.
            let step = if kind == Kind::Alias && index < 2 && from_path {
                owner
            } else {
                Some(step_number)
            };
            let value: Vec<f32> = value;
            // Keep values small by keeping only what is small.
            if value.iter().all(|v| v.abs() < 1e6) && !self.random.one_in(4) {
                self.held.push(Held {
                    tensor,
                    value,
                    step,
                });
            }
        }
        self.look_at_all(true);
    }

    fn move_once(&mut self) {
        match self.random.below(20) {
            0..=9 if self.depth < DEPTH => self.run(),
            0..=10 => {
                // The depth is reached: close the step, sometimes only one of several.
                if !self.steps.is_empty() {
                    let index = self.random.below(self.steps.len());
                    let step = self.steps.remove(index);
                    self.note(format!("close step {}", step.number()));
                    drop(step);
                    if self.steps.is_empty() {
                        self.depth = 0;
                    }
                }
            }
            11 if self.steps.len() < 3 => {
                let step = self.rig.trees.step();
                self.note(format!("open step {}", step.number()));
                self.steps.push(step);
            }
            12..=15 => {
                if !self.held.is_empty() {
                    let index = self.random.below(self.held.len());
                    let held = self.held.swap_remove(index);
                    self.note(format!("drop {:?}", held.tensor));
                    if self.random.one_in(3) {
                        std::thread::scope(|s| {
                            s.spawn(|| drop(held));
                        });
                    }
                }
            }
            16 => self.eager(),
            17 => {
                if let Some(index) = self.pick() {
                    let (tensor, step) = (self.held[index].tensor.clone(), self.held[index].step);
                    let value = self.held[index].value.clone();
                    self.note(format!("clone {tensor:?}"));
                    self.held.push(Held {
                        tensor,
                        value,
                        step,
                    });
                }
            }
            18 => {
                if let Some(index) = self.pick() {
                    let half = 4 * self.random.below(2) as u64;
                    let tensor = self.held[index].tensor.view(half, 4).unwrap();
                    let value = vec![self.held[index].value[half as usize / 4]];
                    let step = self.held[index].step;
                    self.note(format!("view {tensor:?}"));
                    self.held.push(Held {
                        tensor,
                        value,
                        step,
                    });
                }
            }
            _ => {
                if self.random.one_in(4) {
                    self.note("drop all".into());
                    self.held.clear();
                }
            }
        }
        self.look_at_all(false);
        self.rig
            .trees
            .audit()
            .unwrap_or_else(|e| panic!("{e}\n{}", self.log));
    }

    fn finish(mut self) -> [u64; 3] {
        // What is held outlives the tree.
        if self.random.one_in(2) {
            let readable: Vec<bool> = self.held.iter().map(|h| h.tensor.is_current()).collect();
            let Walk {
                rig,
                held,
                steps,
                functions,
                ..
            } = self;
            let allocator = rig.allocator.clone();
            let old = GraphTrees::new(&allocator).unwrap();
            let Rig {
                device,
                allocator,
                kernels,
                stream,
                trees,
            } = rig;
            drop((trees, functions));
            drop(steps);
            for (held, readable) in held.iter().zip(readable) {
                match held.tensor.read(&device, &stream) {
                    Ok(bytes) => {
                        let value: Vec<f32> = bytes
                            .chunks_exact(4)
                            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                            .collect();
                        assert_eq!(value, held.value, "outlives the tree");
                        assert!(readable);
                    }
                    Err(Error::Stale(_)) => assert!(!readable),
                    Err(other) => panic!("{other}"),
                }
            }
            drop(held);
            Rig {
                device,
                allocator,
                kernels,
                stream,
                trees: old,
            }
            .finish();
        } else {
            self.held.clear();
            self.rig.finish();
        }
        self.seen
    }
}

fn walk<D: Device>(device: D, seed: u64, moves: usize) -> [u64; 3] {
    let mut walk = Walk::new(device, seed);
    for _ in 0..moves {
        walk.move_once();
    }
    walk.finish()
}

#[test]
fn t2_03_random_walks() {
    let mut seen = [0; 3];
    for seed in 0..100 {
        let device = HostDevice::builder().seed(seed).build().unwrap();
        for (all, one) in seen.iter_mut().zip(walk(device, seed, 200)) {
            *all += one;
        }
    }
    let [warmups, recordings, replays] = seen;
    assert!(
        warmups > 300 && recordings > 1000 && replays > 1000,
        "{seen:?}: a walk that sees too little"
    );
}

#[test]
fn t2_03_over_the_adaptor() {
    for seed in 1000..1010 {
        walk(common::wrapped(), seed, 200);
    }
}
