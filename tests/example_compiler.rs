//! The compiler of `examples/compiler`, piece by piece: its gradients are the difference quotients, its parts are what breaks and last
//! uses make of a function, and whatever it compiles computes what the uncompiled run does.

#![allow(dead_code)] // the example's program is not run here

#[path = "../examples/compiler/backend.rs"]
mod backend;
mod common;
#[path = "../examples/compiler/compiled.rs"]
mod compiled;
#[path = "../examples/compiler/eager.rs"]
mod eager;
#[path = "../examples/compiler/grad.rs"]
mod grad;
#[path = "../examples/compiler/ir.rs"]
mod ir;
#[path = "../examples/compiler/kernels.rs"]
mod kernels;
#[path = "../examples/compiler/lower.rs"]
mod lower;
#[path = "../examples/compiler/partition.rs"]
mod partition;
#[path = "../examples/support/random.rs"]
mod random;

use std::sync::Arc;

use backend::{Backend, Place};
use common::Rig;
use compiled::Compiled;
use cudagraph_trees::device::Device;
use cudagraph_trees::{Tensor, lend};
use eager::Eager;
use grad::grad;
use ir::{Graph, IrError, Op, Shape, Var, Variable};
use lower::Library;
use partition::{last_takes, last_uses, partition};
use random::Random;

const SQUARE: Shape = Shape(4, 4);
const VARIABLES: [Variable; 3] = [
    Variable {
        number: 0,
        shape: SQUARE,
    },
    Variable {
        number: 1,
        shape: SQUARE,
    },
    Variable {
        number: 2,
        shape: Shape(1, 4),
    },
];

fn uniform(random: &mut Random, shape: Shape) -> Vec<f32> {
    let mut next = |_| random.between(-1.0, 1.0) as f32;
    (0..shape.elements()).map(&mut next).collect()
}

fn place<D: Device>(rig: &Rig<D>) -> Place<D> {
    Place {
        device: rig.device.clone(),
        allocator: rig.allocator.clone(),
        stream: rig.stream.clone(),
    }
}

/// Both ways to run a function, each with variables of its own.
fn both<D: Device>(place: &Place<D>, random: &mut Random) -> (Compiled<D>, Eager<D>) {
    let library = Arc::new(Library::load(&place.device).unwrap());
    let first = VARIABLES.map(|variable| (variable, uniform(random, variable.shape)));
    let mine = place.variables(&first).unwrap();
    let theirs = place.variables(&first).unwrap();
    (
        Compiled::new(place.clone(), library.clone(), mine).unwrap(),
        Eager::new(place.clone(), library, theirs),
    )
}

fn bits<D: Device>(place: &Place<D>, tensors: &[Tensor<D>]) -> Vec<Vec<u32>> {
    let values = tensors.iter().map(|tensor| place.download(tensor).unwrap());
    values
        .map(|values| values.into_iter().map(f32::to_bits).collect())
        .collect()
}

/// A function that uses every operation with a derivative, with its loss.
fn differentiable(ta: bool, tb: bool) -> (Graph, Var) {
    let mut f = Graph::default();
    let x = f.input(SQUARE);
    let [a, b, bias] = VARIABLES.map(|variable| f.variable(variable));
    let product = f.matmul((a, ta), (b, tb)).unwrap();
    let mixed = f.pairwise(Op::Mul, product, a).unwrap();
    let half = f.scale(b, 0.5);
    let mixed = f.pairwise(Op::Sub, mixed, half).unwrap();
    f.graph_break();
    let mixed = f.relu(mixed);
    let mixed = f.bias_add(mixed, bias).unwrap();
    let mixed = f.pairwise(Op::Add, mixed, product).unwrap();
    let loss = f.mean_squared_error(x, mixed).unwrap();
    f.outputs = vec![loss];
    (f, loss)
}

/// Runs a function uncompiled.
fn eagerly<D: Device>(
    place: &Place<D>,
    library: &Arc<Library<D>>,
    code: &Graph,
    variables: &[Vec<f32>; 3],
    args: &[&Tensor<D>],
) -> Vec<Tensor<D>> {
    let first: Vec<_> = VARIABLES.into_iter().zip(variables.clone()).collect();
    let variables = place.variables(&first).unwrap();
    let mut eager = Eager::new(place.clone(), library.clone(), variables);
    let args = args.iter().map(|tensor| lend(tensor)).collect();
    eager.call(code, args).unwrap()
}

fn gradients_are_the_difference_quotients<D: Device>(rig: Rig<D>) {
    let place = place(&rig);
    let library = Arc::new(Library::load(&place.device).unwrap());
    let mut random = Random::new(3);
    let variables = VARIABLES.map(|variable| uniform(&mut random, variable.shape));
    let x = place.upload(SQUARE, &uniform(&mut random, SQUARE)).unwrap();
    for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
        let (code, loss) = differentiable(ta, tb);
        let made = grad(&code, loss, &VARIABLES).unwrap();
        let forward = eagerly(&place, &library, &made.forward, &variables, &[&x]);
        let saved: Vec<_> = made
            .takes
            .iter()
            .map(|source| match source {
                grad::Source::Input(_) => &x,
                grad::Source::Output(output) => &forward[*output],
            })
            .collect();
        let gradients = eagerly(&place, &library, &made.backward, &variables, &saved);
        for (number, gradient) in gradients.iter().enumerate() {
            for (element, got) in place.download(gradient).unwrap().into_iter().enumerate() {
                let [less, more] = [-1e-3, 1e-3].map(|by| {
                    let mut moved = variables.clone();
                    moved[number][element] += by;
                    let loss = &eagerly(&place, &library, &code, &moved, &[&x])[0];
                    place.download(loss).unwrap()[0]
                });
                let want = (more - less) / 2e-3;
                assert!(
                    (got - want).abs() < 5e-3,
                    "{ta} {tb}, variable {number}, element {element}: {got}, not {want}"
                );
            }
        }
    }
}

/// A function of random operations, breaks and changes in place.
fn anything(random: &mut Random) -> Graph {
    let mut f = Graph::default();
    let mut made = vec![f.input(SQUARE), f.input(SQUARE)];
    let [a, b, bias] = VARIABLES.map(|variable| f.variable(variable));
    made.extend([a, b]);
    let first = made.len();
    for _ in 0..4 + random.below(16) {
        let x = made[random.below(made.len())];
        let y = made[random.below(made.len())];
        let new = match random.below(12) {
            0 => f.pairwise(Op::Add, x, y).unwrap(),
            1 => f.pairwise(Op::Sub, x, y).unwrap(),
            2 => f.pairwise(Op::Mul, x, y).unwrap(),
            3 => f.pairwise(Op::ReluGrad, x, y).unwrap(),
            4 => f.relu(x),
            5 => f.scale(x, 0.25),
            6 => {
                let (tx, ty) = (random.below(2) == 1, random.below(2) == 1);
                f.matmul((x, tx), (y, ty)).unwrap()
            }
            7 => f.bias_add(x, bias).unwrap(),
            8 => {
                let sums = f.sum_rows(x);
                f.bias_add(y, sums).unwrap()
            }
            9 => {
                let sum = f.sum(x);
                f.broadcast(sum, SQUARE).unwrap()
            }
            10 => {
                let op = [Op::Assign, Op::Descend(0.125)][random.below(2)];
                f.change(op, [a, b][random.below(2)], x).unwrap();
                continue;
            }
            _ => {
                f.graph_break();
                continue;
            }
        };
        made.push(new);
    }
    f.outputs = made[first..].iter().copied().rev().take(2).collect();
    f
}

fn whatever_is_compiled_computes_what_the_uncompiled_run_does<D: Device>(rig: Rig<D>) {
    let place = place(&rig);
    for seed in 0..24 {
        let random = &mut Random::new(seed);
        let functions: Vec<Graph> = (0..2 + random.below(3)).map(|_| anything(random)).collect();
        let (mut compiled, mut eager) = both(&place, random);
        let load = |(index, code): (usize, &Graph)| {
            let name = format!("f{index}");
            compiled.load(&name, code).unwrap()
        };
        let codes: Vec<_> = functions.iter().enumerate().map(load).collect();
        let inputs = [(); 3].map(|()| {
            let values = uniform(random, SQUARE);
            place.upload(SQUARE, &values).unwrap()
        });
        let mut recorded = 0;
        for step in 0..24 {
            compiled.begin_step();
            let mut held = Vec::new();
            for index in 0..functions.len() {
                // The last function is left out now and then: the tree has more than one path.
                if step > 12 && index + 1 == functions.len() && random.below(3) == 0 {
                    continue;
                }
                let args = [random.below(3), random.below(3)].map(|input| &inputs[input]);
                let both = [(); 2].map(|()| args.map(lend).into_iter().collect());
                let [mine, theirs] = both;
                let got = compiled.call(&codes[index], mine).unwrap();
                let want = eager.call(&functions[index], theirs).unwrap();
                held.push((got, want));
            }
            for (got, want) in &held {
                let (got, want) = (bits(&place, got), bits(&place, want));
                assert_eq!(got, want, "seed {seed}, step {step}");
            }
            drop(held);
            let trees = compiled.trees();
            if step == 2 {
                recorded = trees.counts().recordings;
            }
            trees.audit().unwrap();
        }
        assert!(compiled.trees().counts().recordings <= 2 * recorded);
        let (mine, theirs) = (compiled.variables(), eager.variables());
        assert_eq!(bits(&place, mine), bits(&place, theirs), "seed {seed}");
    }
}

fn temporaries_share_their_memory<D: Device>(rig: Rig<D>) {
    let place = place(&rig);
    let mut f = Graph::default();
    let shape = Shape(64, 64);
    let mut x = f.input(shape);
    for _ in 0..30 {
        x = f.scale(x, 2.0);
    }
    f.outputs = vec![x];
    let (mut compiled, _) = both(&place, &mut Random::new(1));
    let code = compiled.load("chain", &f).unwrap();
    let input = place.upload(shape, &[1.0; 4096]).unwrap();
    for _ in 0..3 {
        compiled.begin_step();
        let made = compiled.call(&code, vec![lend(&input)]).unwrap();
        let values = place.download(&made[0]).unwrap();
        assert_eq!(values, [2.0_f32.powi(30); 4096]);
    }
    let peak = compiled.trees().pool_stats().live_bytes.peak;
    assert_eq!(peak, 2 * shape.bytes(), "one comes, one goes");
}

suite!(
    gradients_are_the_difference_quotients,
    whatever_is_compiled_computes_what_the_uncompiled_run_does,
    temporaries_share_their_memory,
);

#[test]
fn a_break_cuts_a_function_and_dead_code_goes() {
    let mut f = Graph::default();
    let x = f.input(SQUARE);
    let a = f.variable(VARIABLES[0]);
    let early = f.pairwise(Op::Add, x, a).unwrap();
    f.scale(early, 3.0); // nobody uses it
    f.graph_break();
    f.graph_break();
    let late = f.pairwise(Op::Mul, early, x).unwrap();
    let result = f.relu(late);
    f.change(Op::Assign, a, result).unwrap();
    f.outputs = vec![result];

    let parts = partition(&f).unwrap();
    let ops = |code: &Graph| -> Vec<Op> { code.nodes.iter().map(|node| node.op).collect() };
    assert_eq!(parts.len(), 2);
    assert_eq!(ops(&parts[0].code), [Op::Input, Op::Variable(0), Op::Add]);
    assert_eq!(
        (&*parts[0].takes, &*parts[0].gives),
        (&[x][..], &[early][..])
    );
    assert_eq!(
        ops(&parts[1].code),
        [
            Op::Input,
            Op::Input,
            Op::Mul,
            Op::Relu,
            Op::Variable(0),
            Op::Assign
        ]
    );
    assert_eq!(parts[1].takes, [early, x]);
    assert_eq!(parts[1].gives, [result]);
    assert_eq!(last_takes(&f, &parts), [vec![false], vec![true, true]]);
    // Both inputs die in the product, the product in the relu; the result is an output.
    let dying = last_uses(&parts[1].code);
    assert_eq!(dying[2], [Var(0), Var(1)]);
    assert_eq!(dying[3], [Var(2)]);
    assert_eq!(dying[5], [Var(4)]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut f = Graph::default();
    let (x, row) = (f.input(SQUARE), f.input(Shape(1, 4)));
    assert!(matches!(
        f.pairwise(Op::Add, x, row),
        Err(IrError::Shapes { .. })
    ));
    assert!(f.matmul((x, false), (row, false)).is_err());
    f.matmul((x, false), (row, true)).unwrap();
    assert_eq!(
        f.change(Op::Assign, x, x),
        Err(IrError::NotAVariable(Op::Assign))
    );
    let error = grad(&f, x, &VARIABLES).map(|_| ()).unwrap_err();
    assert_eq!(error, IrError::NotScalar(SQUARE));
    let loss = f.mean_squared_error(x, x).unwrap();
    let error = grad(&f, loss, &VARIABLES).map(|_| ()).unwrap_err();
    assert_eq!(error, IrError::Independent(0));
    f.outputs = vec![loss, x];
    let error = partition(&f).map(|_| ()).unwrap_err();
    assert_eq!(error, IrError::PassedThrough(1));
}
