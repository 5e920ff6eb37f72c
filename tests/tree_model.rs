//! Random programs on a tree, beside an interpreter that has no graphs and never uses memory twice.
//!
//! Five functions; outputs held, dropped, given, lent, cloned, viewed, carried from step to step; static inputs that move, change their bytes and die; inputs
//! written in place; steps that overlap; recordings that go (budgets, limits, invalidation, functions dropped); captures, launches and allocations that fail.
//! The simulated device runs what is enqueued in an order drawn from the program's seed. A handle that may be read has exactly the interpreter's bytes; one whose
//! step is open may always be read; one whose step has ended may not, once a run has been made that did not take it.
//!
//! `CUDAGRAPH_TREES_PROGRAMS=FROM..TO` runs these seeds in place of the usual ones.

mod common;

use std::cell::RefCell;
use std::rc::Rc;

use common::Rig;
use cudagraph_trees::device::faulty::Faulty;
use cudagraph_trees::device::host::HostDevice;
use cudagraph_trees::device::{Call, Code, Device};
use cudagraph_trees::{
    Arg, Budget, Error, Function, FunctionSpec, MovePolicy, OnMove, OnOverwrite, Phase, Step,
    StorageId, Tensor, give, lend,
};

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

/// Floats of every whole tensor.
const N: usize = 4;
/// Tensors that are passed as static.
const PARAMS: usize = 3;

/// What the functions do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// x + key, x * 2: two outputs, a temporary that dies inside.
    Two,
    /// The input itself, its second half, and x + y.
    Alias,
    /// x * p, where p is static.
    Scale,
    /// s += x in place; s itself, and s * 2.
    Update,
    /// x * y, where both die inside before the last allocation.
    Consume,
}

const KINDS: [Kind; 5] = [
    Kind::Two,
    Kind::Alias,
    Kind::Scale,
    Kind::Update,
    Kind::Consume,
];

/// The bytes of one storage, as the interpreter has them.
type Cell = Rc<RefCell<Vec<f32>>>;

/// A handle, and the interpreter's.
struct Held<D: Device> {
    tensor: Tensor<D>,
    cell: Cell,
    start: usize,
    len: usize,
    /// Whose output it is; `None` for what never goes stale.
    step: Option<u64>,
    /// The last run took it as an input: it may be there still although its step has ended.
    just_taken: bool,
}

impl<D: Device> Held<D> {
    fn value(&self) -> Vec<f32> {
        self.cell.borrow()[self.start..self.start + self.len].to_vec()
    }

    fn again(&self) -> Self {
        Held {
            tensor: self.tensor.clone(),
            cell: self.cell.clone(),
            ..*self
        }
    }
}

/// What a program is made with.
struct Setting {
    copies_out: bool,
    update_is_static: bool,
    on_move: MovePolicy,
    max_recordings: usize,
    small_budget: bool,
    faults: bool,
    /// What the program's loop does.
    body: Vec<Plan>,
    /// Whether the last turn's output is the next one's input.
    carries: bool,
    /// Whether none, one, or all of the outputs of a turn are held on.
    keeps: usize,
}

/// One call.
#[derive(Clone, Copy, Debug)]
struct Plan {
    kind: Kind,
    key: i64,
    param: usize,
    uses_param: bool,
    give_x: bool,
    give_y: bool,
    /// Both inputs are the newest tensor.
    newest: bool,
}

impl Plan {
    fn draw(random: &mut Random) -> Self {
        Plan {
            kind: KINDS[random.below(KINDS.len())],
            key: random.below(3) as i64,
            param: random.below(PARAMS),
            uses_param: !random.one_in(4),
            give_x: random.one_in(2),
            give_y: random.one_in(2),
            newest: false,
        }
    }
}

impl Setting {
    fn draw(random: &mut Random) -> Self {
        let then = [OnMove::Record, OnMove::Copy, OnMove::Eager, OnMove::Skip][random.below(4)];
        Setting {
            copies_out: random.one_in(3),
            update_is_static: random.one_in(2),
            on_move: MovePolicy {
                after: random.below(3) as u32,
                then,
            },
            max_recordings: if random.one_in(4) { 3 } else { 1000 },
            small_budget: random.one_in(4),
            faults: random.one_in(2),
            body: (0..1 + random.below(4))
                .map(|_| Plan {
                    newest: true,
                    ..Plan::draw(random)
                })
                .collect(),
            carries: random.one_in(2),
            keeps: random.below(3),
        }
    }
}

type D = Faulty<HostDevice>;

struct Program {
    rig: Rig<D>,
    random: Random,
    setting: Setting,
    functions: Vec<Option<Function>>,
    steps: Vec<Step>,
    held: Vec<Held<D>>,
    /// What is passed as static: replaced now and then.
    params: Vec<Held<D>>,
    streams: Vec<<D as Device>::Stream>,
    log: Vec<String>,
    seen: Seen,
}

/// How often what was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    warmups: u64,
    recordings: u64,
    replays: u64,
    eager: u64,
    errors: u64,
}

impl Program {
    fn new(seed: u64) -> Self {
        let device = Faulty::new(HostDevice::builder().seed(seed).build().unwrap());
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let setting = Setting::draw(&mut random);
        let rig = Rig::new(device);
        if setting.copies_out {
            rig.trees.on_overwrite(OnOverwrite::Copy);
        }
        if setting.small_budget {
            rig.trees.set_budget(Budget {
                graphs: 1 + random.below(4),
                ..Budget::default()
            });
        }
        let streams = vec![rig.stream.clone(), rig.device.create_stream().unwrap()];
        let mut program = Program {
            rig,
            random,
            functions: (0..KINDS.len()).map(|_| None).collect(),
            steps: Vec::new(),
            held: Vec::new(),
            params: Vec::new(),
            streams,
            log: vec![format!("seed {seed}, copies out: {}", setting.copies_out)],
            seen: Seen::default(),
            setting,
        };
        for _ in 0..PARAMS {
            let param = program.eager();
            program.params.push(param);
        }
        program
    }

    fn note(&mut self, line: String) {
        self.log.push(line);
    }

    #[track_caller]
    fn wrong(&self, what: &str) -> ! {
        panic!(
            "{what}\n{}\n{}",
            self.log.join("\n"),
            self.rig.trees.picture()
        )
    }

    /// Waits for a stream; work that went wrong is the program's end.
    fn wait(&self, stream: &<D as Device>::Stream) {
        if let Err(error) = self.rig.device.synchronize(stream) {
            self.wrong(&format!("{error}: {:?}", error.fault));
        }
    }

    fn eager(&mut self) -> Held<D> {
        let value: Vec<f32> = (0..N).map(|_| self.random.below(9) as f32).collect();
        let tensor = self.rig.floats(&value);
        // It may be read on the other stream.
        self.wait(&self.rig.stream);
        Held {
            tensor,
            cell: Rc::new(RefCell::new(value)),
            start: 0,
            len: N,
            step: None,
            just_taken: false,
        }
    }

    fn function(&mut self, kind: Kind) -> Function {
        if let Some(f) = &self.functions[kind as usize] {
            return f.clone();
        }
        let name = format!("{kind:?}").to_lowercase();
        let mut spec = FunctionSpec::new(&name)
            .on_static_move(self.setting.on_move)
            .on_managed_move(self.setting.on_move)
            .max_recordings(self.setting.max_recordings);
        let rig = &self.rig;
        let f = match kind {
            Kind::Two => {
                if self.random.one_in(2) {
                    spec = spec.capture_if(|key| key[0] != 2);
                }
                rig.register(spec, |k, rec, mut inputs| {
                    let x = inputs.take(0)?;
                    let add = *inputs.value::<f32>(1)?;
                    let copy = k.apply(rec, &x, 1.0, 0.0)?;
                    let doubled = k.sum(rec, &copy, &x)?;
                    drop(copy);
                    Ok(vec![k.apply(rec, &x, 1.0, add)?, doubled])
                })
            }
            Kind::Alias => rig.register(spec, |k, rec, mut inputs| {
                let (x, y) = (inputs.take(0)?, inputs.take(1)?);
                let sum = k.sum(rec, &x, &y)?;
                drop(y);
                let half = x.view(8, 8)?;
                Ok(vec![x, half, sum])
            }),
            Kind::Scale => rig.register(spec.static_input(1), |k, rec, inputs| {
                Ok(vec![k.product(rec, inputs.get(0)?, inputs.get(1)?)?])
            }),
            Kind::Update => {
                if self.setting.update_is_static {
                    spec = spec.static_input(0);
                }
                rig.register(spec.mutates(0), |k, rec, mut inputs| {
                    let (s, x) = (inputs.take(0)?, inputs.take(1)?);
                    let doubled = rec.alloc(s.bytes())?;
                    let (device, stream, n) = (rec.device(), rec.stream(), N as u64);
                    k.kernels
                        .add(device, stream, s.ptr()?, s.ptr()?, x.ptr()?, n)?;
                    k.kernels
                        .scale_add(device, stream, doubled.ptr()?, s.ptr()?, n, 2.0, 0.0)?;
                    Ok(vec![s, doubled])
                })
            }
            Kind::Consume => rig.register(spec, |k, rec, mut inputs| {
                let scratch = rec.alloc(2400)?;
                let (x, y) = (inputs.take(0)?, inputs.take(1)?);
                k.kernels
                    .fill(rec.device(), rec.stream(), scratch.ptr()?, 600, 5.0)?;
                let product = k.product(rec, &x, &y)?;
                drop((x, y, scratch));
                Ok(vec![k.apply(rec, &product, 1.0, 0.0)?])
            }),
        };
        self.functions[kind as usize] = Some(f.clone());
        f
    }

    fn is_open(&self, step: Option<u64>) -> bool {
        step.is_none_or(|number| self.steps.iter().any(|s| s.number() == number))
    }

    /// Looks at all handles. `ran`: a run has been made since the last step was closed.
    fn look(&self, ran: bool) {
        for held in self.held.iter().chain(&self.params) {
            match self.rig.try_read(&held.tensor) {
                Ok(got) => {
                    let ended = !self.is_open(held.step) && !self.setting.copies_out;
                    if ran && ended && !held.just_taken {
                        self.wrong(&format!("{:?} is readable after its end", held.tensor));
                    }
                    if got != held.value() {
                        self.wrong(&format!(
                            "{:?} has {got:?}, not {:?}",
                            held.tensor,
                            held.value()
                        ));
                    }
                }
                Err(Error::Stale(_)) => {
                    if self.is_open(held.step) || self.setting.copies_out {
                        self.wrong(&format!(
                            "{:?} of step {:?} is stale: {:?}",
                            held.tensor,
                            held.step,
                            held.tensor.check()
                        ));
                    }
                }
                Err(other) => self.wrong(&format!("{:?}: {other}", held.tensor)),
            }
        }
        if let Err(error) = self.rig.trees.audit() {
            self.wrong(&error.to_string());
        }
    }

    /// The newest whole tensor that may be an input.
    fn newest(&mut self) -> usize {
        let fits = |held: &Held<D>| held.len == N && held.tensor.is_current();
        match self.held.iter().rposition(fits) {
            Some(index) => index,
            None => self.pick(),
        }
    }

    /// A whole tensor that may be an input: its index among the held.
    fn pick(&mut self) -> usize {
        let fits: Vec<usize> = (0..self.held.len())
            .filter(|i| self.held[*i].len == N && self.held[*i].tensor.is_current())
            .collect();
        // Half the time the newest, so that paths come again.
        match fits.last() {
            Some(newest) if self.random.one_in(2) => *newest,
            Some(_) => fits[self.random.below(fits.len())],
            None => {
                let held = self.eager();
                self.held.push(held);
                self.held.len() - 1
            }
        }
    }

    fn expected(kind: Kind, add: f32, x: &[f32], y: &[f32]) -> Vec<Vec<f32>> {
        let each = |f: fn(f32, f32) -> f32| -> Vec<f32> {
            x.iter().zip(y).map(|(x, y)| f(*x, *y)).collect()
        };
        match kind {
            Kind::Two => vec![x.iter().map(|x| x + add).collect(), each(|x, _| x + x)],
            Kind::Alias => vec![x.to_vec(), x[2..].to_vec(), each(|x, y| x + y)],
            Kind::Scale | Kind::Consume => vec![each(|x, y| x * y)],
            Kind::Update => {
                let s = each(|x, y| x + y);
                let doubled = s.iter().map(|s| 2.0 * s).collect();
                vec![s, doubled]
            }
        }
    }

    /// Makes the next call of some kind fail, of those after which the program can go on.
    fn inject(&mut self) -> Option<Call> {
        if !self.setting.faults || !self.random.one_in(6) {
            return None;
        }
        let (call, code) = [
            (Call::BeginCapture, Code::Other(999)),
            (Call::EndCapture, Code::StreamCaptureInvalidated),
            (Call::Instantiate, Code::OutOfMemory),
            (Call::GraphInfo, Code::Other(998)),
            (Call::LaunchGraph, Code::LaunchFailed),
            (Call::Map, Code::OutOfMemory),
            (Call::Gather, Code::Other(997)),
            (Call::Copy, Code::Other(996)),
        ][self.random.below(8)];
        self.rig.device.fail(call, 1, code);
        Some(call)
    }

    /// One turn of the program's loop: a step of its own, the same calls in the same order, each on the last one's output.
    fn turn(&mut self) {
        if self.random.one_in(2) {
            self.note("close all".into());
            self.steps.clear();
        }
        let step = self.rig.trees.step();
        self.note(format!("turn in step {}", step.number()));
        self.steps.push(step);
        if !self.setting.carries {
            let x = self.eager();
            self.held.push(x);
        }
        let before = self.held.len();
        for plan in self.setting.body.clone() {
            self.call(self.steps.len() - 1, plan);
        }
        // Held on over the turns: none, the last, or all of it.
        match self.setting.keeps {
            0 => self.held.truncate(before),
            1 => {
                let last = self.held.pop();
                self.held.truncate(before);
                self.held.extend(last);
            }
            _ => {}
        }
        if self.held.len() > 12 {
            self.held.drain(..6);
        }
        if self.steps.len() > 2 {
            drop(self.steps.remove(0));
        }
        self.look(false);
    }

    fn run(&mut self) {
        if self.steps.is_empty() {
            self.steps.push(self.rig.trees.step());
        }
        let at = self.random.below(self.steps.len());
        let plan = Plan::draw(&mut self.random);
        self.call(at, plan);
    }

    fn call(&mut self, at: usize, plan: Plan) {
        let step_number = self.steps[at].number();
        let Plan {
            kind, key, param, ..
        } = plan;
        let f = self.function(kind);
        let key = [key];
        let add = key[0] as f32;

        // The second input is static, a held tensor, or (for `Two`) a host value. Given ones leave the held.
        let i = if plan.newest {
            self.newest()
        } else {
            self.pick()
        };
        let (x_is_param, y_is_param) = match kind {
            Kind::Update => (plan.uses_param, false),
            Kind::Scale => (false, plan.uses_param),
            _ => (false, false),
        };
        let j = if plan.newest { i } else { self.pick() };
        let x = if x_is_param {
            &self.params[param]
        } else {
            &self.held[i]
        };
        let y = if y_is_param {
            &self.params[param]
        } else {
            &self.held[j]
        };
        let (x, mut y) = (x.again(), y.again());
        // What is written in place and read besides would be read before or after, as the device likes.
        if kind == Kind::Update && Rc::ptr_eq(&x.cell, &y.cell) {
            y = self.eager();
        }
        let give_x = !x_is_param && plan.give_x;
        let give_y = !y_is_param && kind != Kind::Scale && !give_x && plan.give_y;
        let dead = if give_x { Some(i) } else { give_y.then_some(j) };
        let other = self.random.one_in(8);
        let stream = self.streams[usize::from(other)].clone();
        let value: cudagraph_trees::Value = std::sync::Arc::new(add);
        let value = self.values(kind, key[0], value);
        let lent = [
            (!give_x).then(|| x.tensor.clone()),
            (!give_y).then(|| y.tensor.clone()),
        ];
        let mut given = [
            give_x.then(|| x.tensor.clone()),
            give_y.then(|| y.tensor.clone()),
        ];
        let what = format!(
            "{kind:?}{key:?} in step {step_number} on {}: {}{:?}, {}{:?}",
            usize::from(other),
            if give_x { "given " } else { "" },
            x.tensor,
            if give_y { "given " } else { "" },
            y.tensor,
        );
        // The caller's own handle goes where it is given up: its clones above are dropped with it.
        if let Some(dead) = dead {
            self.held.remove(dead);
        }
        let before = Self::expected(kind, add, &x.value(), &y.value());
        let ids: [Option<StorageId>; 2] = [x.tensor.storage_id(), y.tensor.storage_id()];
        let cells = [x.cell.clone(), y.cell.clone()];
        let owners = [x.step, y.step];
        let weak_x = x.tensor.downgrade();
        let (x_handle, y_handle) = (x, y);
        let fault = self.inject();
        for held in self.held.iter_mut().chain(&mut self.params) {
            let id = held.tensor.storage_id();
            held.just_taken = ids.contains(&id);
        }
        drop((x_handle, y_handle));
        let mut args: Vec<Arg<'_, D>> = (0..2)
            .map(|index| match (given[index].take(), &lent[index]) {
                _ if index == 1 && kind == Kind::Two => Arg::Value(value.clone()),
                (Some(tensor), _) => give(tensor),
                (None, Some(tensor)) => lend(tensor),
                (None, None) => Arg::Taken,
            })
            .collect();
        self.note(what);
        let outcome = self
            .rig
            .trees
            .run(&f, &self.steps[at], &key, &stream, &mut args);
        self.rig.device.clear();
        let left: Vec<Option<Tensor<D>>> = args.iter_mut().map(Arg::take).collect();
        drop(args);
        // A lent tensor lives until it has been read, on whatever stream.
        self.wait(&stream);
        drop(lent);
        match outcome {
            Err(error) => {
                self.note(format!("  {error}"));
                self.seen.errors += 1;
                if fault.is_none() {
                    self.wrong("an error without a fault");
                }
                // What was not given up is the caller's again.
                for (index, tensor) in left.into_iter().enumerate() {
                    self.held.extend(tensor.map(|tensor| Held {
                        tensor,
                        cell: cells[index].clone(),
                        start: 0,
                        len: N,
                        step: owners[index],
                        just_taken: true,
                    }));
                }
                // Whatever it came to, nothing was enqueued that writes: allocations come first, and a capture does nothing.
                self.wait(&stream);
                self.look(false);
            }
            Ok(outputs) => {
                self.note(format!(
                    "  {:?} {:?} {:?}",
                    outputs.phase(),
                    outputs.node(),
                    outputs.reason()
                ));
                let phase = outputs.phase();
                *match phase {
                    Phase::Warmup => &mut self.seen.warmups,
                    Phase::Record => &mut self.seen.recordings,
                    Phase::Replay => &mut self.seen.replays,
                    Phase::Eager => &mut self.seen.eager,
                    Phase::Inline => self.wrong("nothing captures"),
                } += 1;
                self.wait(&stream);
                if kind == Kind::Update {
                    // Seen by everybody who has it.
                    cells[0].borrow_mut().copy_from_slice(&before[0]);
                }
                let mut fresh: Vec<(Option<StorageId>, Cell)> = Vec::new();
                // The first input returned, and not a copy of it, which may lie in the same storage, of the next generation.
                let x_lives = weak_x.upgrade().is_some();
                for (index, (tensor, value)) in outputs.into_iter().zip(before).enumerate() {
                    let id = tensor.storage_id();
                    let passed = match kind {
                        Kind::Alias => index < 2,
                        Kind::Update => index == 0,
                        _ => false,
                    } && x_lives
                        && ids[0] == id;
                    let (cell, step) = match passed {
                        true => (cells[0].clone(), owners[0]),
                        false => {
                            let known = fresh.iter().find(|(other, _)| *other == id);
                            let cell = known.map_or_else(
                                || Rc::new(RefCell::new(value.clone())),
                                |(_, cell)| cell.clone(),
                            );
                            fresh.push((id, cell.clone()));
                            (cell, (phase != Phase::Eager).then_some(step_number))
                        }
                    };
                    let (start, len) = (tensor.offset() as usize / 4, value.len());
                    let held = Held {
                        tensor,
                        cell,
                        start,
                        len,
                        step,
                        just_taken: passed,
                    };
                    // Values stay small by letting go of what is large.
                    if value.iter().all(|v| v.abs() < 1e5) && !self.random.one_in(4) {
                        self.held.push(held);
                    }
                }
                self.look(true);
            }
        }
        for param in 0..self.params.len() {
            if self.params[param].value().iter().any(|v| v.abs() > 1e4) {
                self.rewrite(param);
            }
        }
    }

    /// A host value by key, always the same object: another would be another recording.
    fn values(
        &mut self,
        kind: Kind,
        key: i64,
        new: cudagraph_trees::Value,
    ) -> cudagraph_trees::Value {
        thread_local! {
            static VALUES: RefCell<Vec<(i64, cudagraph_trees::Value)>> = const { RefCell::new(Vec::new()) };
        }
        if kind != Kind::Two {
            return new;
        }
        VALUES.with_borrow_mut(|all| match all.iter().find(|(k, _)| *k == key) {
            Some((_, value)) => value.clone(),
            None => {
                all.push((key, new.clone()));
                new
            }
        })
    }

    /// Other bytes at the same address.
    fn rewrite(&mut self, param: usize) {
        let value: Vec<f32> = (0..N).map(|_| self.random.below(9) as f32).collect();
        let held = &self.params[param];
        self.rig.put(&held.tensor, &value);
        held.cell.borrow_mut().copy_from_slice(&value);
        self.wait(&self.rig.stream);
        self.note(format!("rewrite {:?}", self.params[param].tensor));
    }

    fn move_once(&mut self) {
        match self.random.below(32) {
            0..=9 => return self.turn(),
            10..=15 => return self.run(),
            16..=18 => {
                if !self.steps.is_empty() {
                    let index = self.random.below(self.steps.len());
                    let step = self.steps.remove(index);
                    self.note(format!("close step {}", step.number()));
                }
            }
            19 if self.steps.len() < 3 => {
                let step = self.rig.trees.step();
                self.note(format!("open step {}", step.number()));
                self.steps.push(step);
            }
            20..=23 => {
                if !self.held.is_empty() {
                    let index = self.random.below(self.held.len());
                    let held = self.held.swap_remove(index);
                    self.note(format!("drop {:?}", held.tensor));
                }
            }
            24 => {
                let held = self.eager();
                self.held.push(held);
            }
            25 => {
                let index = self.pick();
                let held = self.held[index].again();
                self.note(format!("clone {:?}", held.tensor));
                self.held.push(held);
            }
            26 => {
                let index = self.pick();
                let half = self.random.below(2);
                let held = &self.held[index];
                let view = Held {
                    tensor: held.tensor.view(8 * half as u64, 8).unwrap(),
                    start: held.start + 2 * half,
                    len: 2,
                    ..held.again()
                };
                self.note(format!("view {:?}", view.tensor));
                self.held.push(view);
            }
            27 => {
                let param = self.random.below(PARAMS);
                self.rewrite(param);
            }
            28 => {
                // The recordings that have its address go with it.
                let param = self.random.below(PARAMS);
                let new = self.eager();
                let old = std::mem::replace(&mut self.params[param], new);
                self.note(format!("replace {:?}", old.tensor));
            }
            29 => {
                let kind = KINDS[self.random.below(KINDS.len())];
                if self.random.one_in(2) {
                    self.note(format!("invalidate {kind:?}"));
                    let f = self.function(kind);
                    self.rig.trees.invalidate(&f).unwrap();
                } else {
                    self.note(format!("unregister {kind:?}"));
                    self.functions[kind as usize] = None;
                }
            }
            30 => {
                if self.random.one_in(4) {
                    self.note("trim".into());
                    self.rig.allocator.trim().unwrap();
                }
            }
            _ => {
                if self.random.one_in(4) {
                    self.note("drop all".into());
                    self.held.clear();
                }
            }
        }
        self.look(false);
    }

    fn finish(mut self) -> Seen {
        if self.random.one_in(2) {
            self.note("shut down".into());
            self.rig.trees.shutdown().unwrap();
            self.steps.clear();
            for held in &self.held {
                match self.rig.try_read(&held.tensor) {
                    Ok(got) => assert_eq!(got, held.value(), "{}", self.log.join("\n")),
                    Err(Error::Stale(_)) => assert!(!held.tensor.is_current()),
                    Err(other) => self.wrong(&other.to_string()),
                }
            }
        }
        self.held.clear();
        self.params.clear();
        self.functions.clear();
        self.rig.device.synchronize_device().unwrap();
        self.rig.finish();
        self.seen
    }
}

fn program(seed: u64) -> Seen {
    let mut program = Program::new(seed);
    for _ in 0..60 {
        program.move_once();
    }
    program.finish()
}

/// What all of them saw, and the seeds of those that went wrong.
fn programs(seeds: std::ops::Range<u64>) -> (Seen, Vec<u64>) {
    let (mut all, mut wrong) = (Seen::default(), Vec::new());
    for seed in seeds {
        let Ok(one) = std::panic::catch_unwind(|| program(seed)) else {
            wrong.push(seed);
            continue;
        };
        all.warmups += one.warmups;
        all.recordings += one.recordings;
        all.replays += one.replays;
        all.eager += one.eager;
        all.errors += one.errors;
    }
    (all, wrong)
}

#[test]
fn random_programs_give_the_interpreters_bytes() {
    let chosen = std::env::var("CUDAGRAPH_TREES_PROGRAMS").ok();
    let (from, to) = match chosen.as_deref().and_then(|seeds| seeds.split_once("..")) {
        Some((from, to)) => (from.parse().unwrap(), to.parse().unwrap()),
        None => (0, 2000),
    };
    let (seen, wrong) = programs(from..to);
    println!("{seen:?}");
    assert_eq!(wrong, Vec::<u64>::new(), "these programs went wrong");
    if chosen.is_none() {
        let enough = [
            (seen.warmups, 10_000),
            (seen.recordings, 10_000),
            (seen.replays, 10_000),
            (seen.eager, 2_000),
            (seen.errors, 200),
        ];
        assert!(enough.iter().all(|(seen, want)| seen >= want), "{seen:?}");
    }
}

/// Programs that went wrong when they were first run: an input of an ended step used in place and ended; an error on another stream than the next run's.
#[test]
fn programs_that_went_wrong_once() {
    for seed in [
        8632, 15903, 23060, 23324, 26091, 34458, 44515, 52083, 162_785,
    ] {
        program(seed);
    }
}
