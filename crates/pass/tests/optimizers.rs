//! Every optimizer on a small model, through the interpreter: with loss scaling, with overflows, and with updates inside of the backward.

use tightfit_ir::op::{Add, Approximate, Rounding};
use tightfit_ir::{Binding, DType, Forward, Graph, Init, Op, OutputKind, Phase, Role, Routine, Step, Tensor, Type};
use tightfit_model::Builder;
use tightfit_pass::{
    Adafactor, Adam, Apollo, Lion, LossScale, MICRO_STEP, Optimizer, OptimizerConfig, Sgd, TRAIN, accumulate, autodiff,
    gradient_name, loss_scale, optimizer, update_in_backward,
};
use tightfit_testkit::data::{BatchSpec, batch};
use tightfit_testkit::interpret::{Interpreter, Named, ProgramRun};

const ADAM: Adam = Adam {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
};

const OPTIMIZERS: [Optimizer; 7] = [
    Optimizer::AdamW(ADAM),
    Optimizer::AdamW8bit(ADAM),
    Optimizer::Adafactor(Adafactor {
        decay: 0.8,
        eps: 1e-30,
        clip: 1.0,
    }),
    Optimizer::Lion(Lion {
        beta1: 0.9,
        beta2: 0.99,
    }),
    Optimizer::Apollo(Apollo {
        adam: ADAM,
        rank: 3,
        refresh: 2,
    }),
    Optimizer::Sgd(Sgd { momentum: 0.9 }),
    Optimizer::Sgd(Sgd { momentum: 0.0 }),
];

const ROWS: u64 = 6;
const VOCABULARY: u64 = 130;
const HIDDEN: u64 = 32;

/// A block with a tied table that is large enough for states of 8 bits.
fn model() -> Forward {
    let mut b = Builder::new(0.2);
    let [tokens, targets] = ["tokens", "targets"].map(|name| b.input(name, Type::i32([ROWS])));
    let count = b.input("token_count", Type::f32([1]));
    let [x, table] = b.embedding("embed", tokens, VOCABULARY, HIDDEN).unwrap();
    let x = b.scope("mlp", |b| {
        let normed = b.rms_norm("norm", x, 1e-5).unwrap();
        let hidden = b.linear_bias("up", normed, 8).unwrap();
        let hidden = b.gelu(hidden, Approximate::Tanh).unwrap();
        b.linear_onto("down", hidden, x).unwrap()
    });
    let loss = b.linear_cross_entropy(x, table, targets, count, 4).unwrap();
    b.finish("loss", loss).unwrap()
}

fn step(chosen: Optimizer, clip_norm: Option<f64>, scale: Option<LossScale>) -> Step {
    let mut step = autodiff(model()).unwrap();
    if let Some(scale) = &scale {
        step = loss_scale(step, scale).unwrap();
    }
    let config = OptimizerConfig {
        optimizer: chosen,
        weight_decay: 0.1,
        clip_norm,
        loss_scale: scale,
        seed: 1,
    };
    let step = optimizer(step, &config).unwrap();
    step.verify().unwrap();
    step
}

/// Runs steps from one seed, and gives what each program read and what is kept after each step.
fn train(step: &Step, steps: u64) -> Vec<(Vec<ProgramRun>, Named)> {
    let mut interpreter = Interpreter::new(step, 3);
    (1..=steps)
        .map(|number| train_step(&mut interpreter, step, number, number))
        .collect()
}

/// One step, on that batch.
fn train_step(interpreter: &mut Interpreter, step: &Step, data: u64, number: u64) -> (Vec<ProgramRun>, Named) {
    let spec = BatchSpec {
        rows: ROWS,
        vocab_size: VOCABULARY,
        context: 6,
        ignore_index: -100,
    };
    let mut feed = batch(spec, 1, data).remove(0);
    for (name, number) in [("lr", 0.01), ("step", number as f64)] {
        feed.insert(name.to_owned(), Tensor::scalar(number));
    }
    let runs = interpreter.run(step.routine(TRAIN).unwrap(), |_, _| feed.clone());
    (runs, interpreter.persistent.clone())
}

/// What a step read, from whichever program.
fn read(runs: &[ProgramRun], name: &str) -> f64 {
    let found = runs.iter().find_map(|run| run.outputs.get(name));
    found.unwrap_or_else(|| panic!("no {name}")).data[0]
}

fn is_scale(name: &str) -> bool {
    name.starts_with("loss_scale.")
}

#[test]
fn each_keeps_the_state_that_it_says() {
    let bytes = |chosen: Optimizer| {
        let step = step(chosen, None, None);
        let graph = &step.routine(TRAIN).unwrap().programs[1].graph;
        let states = graph
            .inputs()
            .filter(|(_, value, _)| value.role == Role::OptimizerState);
        states.map(|(_, value, _)| value.ty.bytes()).sum::<u64>()
    };
    // The table, the norm, `up` with its bias, and `down`.
    let (table, small) = (VOCABULARY * HIDDEN, HIDDEN + (HIDDEN * 8 + 8) + HIDDEN * 8);
    let factored = (VOCABULARY + HIDDEN) + 2 * (HIDDEN + 8) + HIDDEN + 8;
    let projected = 2 * 3 * (VOCABULARY + 2 * HIDDEN) + 3 + 2 * (HIDDEN + 8);
    let expected = [
        8 * (table + small),
        2 * table + 8 * table.div_ceil(256) + 8 * small,
        4 * factored,
        4 * (table + small),
        4 * projected,
        4 * (table + small),
        0,
    ];
    for (chosen, expected) in OPTIMIZERS.into_iter().zip(expected) {
        assert_eq!(bytes(chosen), expected, "{chosen:?}");
    }
}

#[test]
fn each_lowers_the_loss_and_updates_inside_of_the_backward_to_the_same_numbers() {
    for chosen in OPTIMIZERS {
        for (clip_norm, scale) in [(None, None), (Some(0.5), None), (None, Some(LossScale::default()))] {
            let step = step(chosen, clip_norm, scale);
            let moved = update_in_backward(step.clone()).unwrap();
            let (steps, moved) = (train(&step, 4), train(&moved, 4));
            for ((_, kept), (_, moved)) in steps.iter().zip(&moved) {
                assert_eq!(kept, moved, "{chosen:?}, {clip_norm:?}, {scale:?}");
            }
            let trained = |(_, kept): &(_, Named)| kept["embed.weight"].clone();
            assert_ne!(trained(&steps[0]), trained(&steps[3]), "{chosen:?}");
        }
    }
}

#[test]
fn a_scaled_loss_makes_the_same_step() {
    for chosen in OPTIMIZERS {
        for clip_norm in [None, Some(0.5)] {
            let plain = train(&step(chosen, clip_norm, None), 3);
            let scaled = train(&step(chosen, clip_norm, Some(LossScale::default())), 3);
            for ((runs, kept), (scaled_runs, scaled)) in plain.iter().zip(&scaled) {
                assert_eq!(read(runs, "loss"), read(scaled_runs, "loss"));
                if clip_norm.is_some() {
                    let [norm, scaled] = [runs, scaled_runs].map(|runs| read(runs, "grad_norm"));
                    assert!((norm - scaled).abs() <= 1e-12 * norm, "{norm}, scaled {scaled}");
                }
                for (name, tensor) in kept {
                    // A power of two changes no bit but where numbers are summed with others.
                    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 + 1e-9 * a.abs();
                    let near = tensor.data.iter().zip(&scaled[name].data).all(near);
                    assert!(near, "{chosen:?}: {name}");
                }
            }
        }
    }
}

#[test]
fn an_overflow_skips_the_update_and_the_scale_backs_off_and_grows() {
    // The square of a gradient times the first scale is beyond `f64`, that of one times the second is not.
    let scale = LossScale {
        init: 1e200,
        growth: 2.0,
        backoff: 1e-180,
        growth_interval: 2,
    };
    for chosen in OPTIMIZERS {
        let step = step(chosen, Some(1.0), Some(scale));
        let mut interpreter = Interpreter::new(&step, 3);
        let before = interpreter.persistent.clone();
        let (runs, after) = train_step(&mut interpreter, &step, 1, 1);
        assert_eq!(read(&runs, "grad_norm"), f64::INFINITY);
        assert!(read(&runs, "loss").is_finite());
        assert_eq!(read(&runs, "skipped_steps"), 1.0);
        for (name, tensor) in before.iter().filter(|(name, _)| !is_scale(name)) {
            assert_eq!(&after[name], tensor, "{chosen:?}: {name} of a skipped step");
        }
        let backed_off = after["loss_scale.scale"].data[0];
        assert!((backed_off / 1e20 - 1.0).abs() < 1e-12, "{backed_off:e}");

        // The second step is the first that is applied: as if it were a run's first.
        let (_, after) = train_step(&mut interpreter, &step, 2, 2);
        let plain = self::step(chosen, Some(1.0), None);
        let (_, expected) = train_step(&mut Interpreter::new(&plain, 3), &plain, 2, 1);
        for (name, tensor) in &expected {
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 + 1e-9 * a.abs();
            assert!(
                tensor.data.iter().zip(&after[name].data).all(near),
                "{chosen:?}: {name}"
            );
        }
        assert_eq!(after["loss_scale.good_steps"].data, [1.0]);
        assert_eq!(after["loss_scale.scale"].data, [backed_off]);

        let (runs, after) = train_step(&mut interpreter, &step, 3, 3);
        assert_eq!(after["loss_scale.scale"].data, [2.0 * backed_off]);
        assert_eq!(after["loss_scale.good_steps"].data, [0.0]);
        assert_eq!(read(&runs, "skipped_steps"), 1.0);
    }
}

#[test]
fn a_scaled_loss_accumulates() {
    let scale = LossScale::default();
    let made = accumulate(loss_scale(autodiff(model()).unwrap(), &scale).unwrap(), 3).unwrap();
    let config = OptimizerConfig {
        optimizer: OPTIMIZERS[0],
        weight_decay: 0.1,
        clip_norm: Some(1.0),
        loss_scale: Some(scale),
        seed: 1,
    };
    optimizer(made, &config).unwrap().verify().unwrap();
}

#[test]
fn a_loss_and_its_optimizer_are_scaled_together_and_once() {
    let config = |loss_scale| OptimizerConfig {
        optimizer: OPTIMIZERS[0],
        weight_decay: 0.1,
        clip_norm: None,
        loss_scale,
        seed: 1,
    };
    let scale = LossScale::default();
    let scaled = loss_scale(autodiff(model()).unwrap(), &scale).unwrap();
    let refusals = [
        optimizer(scaled.clone(), &config(None)),
        optimizer(autodiff(model()).unwrap(), &config(Some(scale))),
        loss_scale(scaled, &scale),
    ];
    let messages = refusals.map(|refusal| refusal.unwrap_err().to_string());
    assert!(messages[0].contains("must both be scaled"), "{}", messages[0]);
    assert_eq!(messages[0], messages[1]);
    assert!(messages[2].contains("scaled already"), "{}", messages[2]);
}

#[test]
fn weights_of_16_bits_are_rounded_at_random_each_in_its_own_way() {
    let mut graph = Graph::new();
    for (name, dtype) in [("a", DType::Bf16), ("b", DType::F16), ("c", DType::F32)] {
        let trainable = Binding::Persistent {
            init: Init::Zeros,
            trainable: true,
        };
        graph.input(name, Type::new(dtype, [2, 3]), Role::Weight, trainable);
        let gradient = graph.input(&format!("{name}'s"), Type::f32([2, 3]), Role::Gradient, Binding::Fed);
        let op = Op::from(Add {});
        let made = graph.push(op, &[gradient, gradient], &name.into(), Phase::Backward, Role::Gradient);
        graph.output(&gradient_name(name), made.unwrap()[0], OutputKind::Carry);
    }
    let config = OptimizerConfig {
        optimizer: OPTIMIZERS[0],
        weight_decay: 0.1,
        clip_norm: None,
        loss_scale: None,
        seed: 1,
    };
    let mut train = Routine::of(TRAIN, graph);
    train.programs[0].name = MICRO_STEP.to_owned();
    let step = optimizer(Step { routines: vec![train] }, &config).unwrap();
    let nodes = step.routines[0].programs[1].graph.nodes.iter();
    let roundings: Vec<Rounding> = nodes
        .filter_map(|node| match &node.op {
            Op::AdamW(op) => Some(op.rounding),
            _ => None,
        })
        .collect();
    let [
        Rounding::Stochastic { key: a },
        Rounding::Stochastic { key: b },
        Rounding::Nearest,
    ] = roundings[..]
    else {
        panic!("{roundings:?}")
    };
    assert_ne!(a, b);
}
