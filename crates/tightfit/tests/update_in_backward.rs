//! Updates inside of the backward change memory and nothing else: the same bits as the plain run, no gradient that outlives its
//! layer, and a peak that is lower by the gradients.

#[path = "common/job.rs"]
mod job;
#[path = "common/run.rs"]
mod run;

use std::collections::BTreeMap;

use proptest::prelude::*;
use run::{Machine, Recorder, persistent};
use tightfit::data::Text;
use tightfit::settings::ClipNorm;
use tightfit::train::Trainer;
use tightfit::{
    Adam, CpuTarget, Job, Optimizer, OptimizerConfig, Plan, Request, Role, Session, Settings, Step, training_step,
};
use tightfit_cpu::simd::Isa;
use tightfit_ir::{NodeId, Tensor, Tier};
use tightfit_pass::{MICRO_STEP, NORM_STEP, TRAIN, autodiff, update_in_backward};
use tightfit_plan::liveness::{Buffer, RoutineLiveness};
use tightfit_plan::place::Effort;
use tightfit_plan::plan::Layout;
use tightfit_plan::schedule::Schedule;
use tightfit_testkit::interpret::{Interpreter, Named};
use tightfit_testkit::{data, random};

/// A clipping that bites on every one of the first steps, and none.
const CLIPS: [Option<f64>; 2] = [None, Some(0.25)];

/// The job's plain step, and the one that updates in the backward.
fn steps(settings: &Settings) -> (Step, Step) {
    let plain = Job::plan(settings.clone(), None).unwrap().plan.step().clone();
    let moved = update_in_backward(plain.clone()).unwrap();
    (plain, moved)
}

fn assert_peak(session: &Session) {
    assert_eq!(session.arena().measured_peak(), session.plan().peak());
}

/// What five steps leave behind: each loss and gradient norm, and every persistent tensor, as bits.
type Left = (Vec<(u64, Option<u32>)>, BTreeMap<String, Vec<u32>>);

fn train(settings: &Settings, step: Step, machine: Machine) -> Left {
    let mut session = machine.session(step);
    session.initialise(settings.seed).unwrap();
    let text = Text::generated(settings).unwrap();
    let mut trainer = Trainer::new(settings, &text);
    let mut reports = Vec::new();
    for step in 1..=5 {
        trainer.start(step, 1e-3).unwrap();
        session.run(TRAIN, &mut trainer).unwrap();
        let norm = trainer.grad_norm();
        if let (Some(norm), Some(max)) = (norm, settings.clip_norm.0) {
            assert!(f64::from(norm) > max, "a norm of {norm} is not clipped");
        }
        reports.push((trainer.loss().to_bits(), norm.map(f32::to_bits)));
    }
    assert_peak(&session);
    (reports, bits(persistent(&mut session)))
}

fn bits(tensors: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<u32>> {
    let bits = |data: Vec<f32>| data.into_iter().map(f32::to_bits).collect();
    tensors.into_iter().map(|(name, data)| (name, bits(data))).collect()
}

#[test]
fn five_steps_are_the_bits_of_the_plain_run() {
    for clip_norm in CLIPS {
        for tied in [true, false] {
            let settings = Settings {
                tie_word_embeddings: tied,
                ..job::small(1, 1, clip_norm)
            };
            let (plain, moved) = steps(&settings);
            let machine = Machine::new(Isa::detect(), 1);
            let expected = train(&settings, plain, machine);
            assert!(expected.0.iter().all(|(_, norm)| norm.is_some() == clip_norm.is_some()));
            for threads in 1..=3 {
                let poison = threads == 2;
                let machine = Machine {
                    threads,
                    poison,
                    ..machine
                };
                // Not `assert_eq`, which would print every weight.
                let same = train(&settings, moved.clone(), machine) == expected;
                assert!(same, "tied: {tied}, clipped to {clip_norm:?}, on {machine:?}");
            }
        }
    }
}

/// Results of a random model's steps by name, in the order they were read, and what is kept.
fn trace(step: &Step, initial: &Named, batches: &[Named], machine: Machine) -> BTreeMap<String, Vec<u32>> {
    let mut session = machine.session(step.clone());
    for (name, tensor) in initial {
        let weight = session.persistent_mut(name).unwrap();
        weight.iter_mut().zip(&tensor.data).for_each(|(to, x)| *to = *x as f32);
    }
    let mut read: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (index, batch) in batches.iter().enumerate() {
        let mut data = batch.clone();
        data.insert("lr".to_owned(), Tensor::scalar(0.01));
        data.insert("step".to_owned(), Tensor::scalar((index + 1) as f64));
        let mut recorder = Recorder::new(&session, |_, _| data.clone());
        session.run(TRAIN, &mut recorder).unwrap();
        for (name, result) in recorder.runs.into_iter().flat_map(|run| run.results) {
            read.entry(name).or_default().extend(result);
        }
    }
    assert_peak(&session);
    read.extend(persistent(&mut session));
    bits(read)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn random_models_keep_the_bits(
        model in random::model(),
        clip_norm in prop::option::of(0.1..10.0_f64),
        threads in 1..=3_usize,
        separate: bool,
        seed: u64,
    ) {
        // Some have nothing to train.
        prop_assume!(autodiff(model.forward.clone()).is_ok());
        let config = OptimizerConfig {
            optimizer: Optimizer::AdamW(Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 }),
            weight_decay: 0.1,
            clip_norm,
            loss_scale: None,
            seed: 1,
        };
        let plain = training_step(model.forward, &config, 1, None).unwrap();
        let moved = update_in_backward(plain.clone()).unwrap();
        let initial = Interpreter::new(&plain, seed).persistent;
        let batches: Vec<Named> = (0..3).flat_map(|n| data::batch(model.batch, 1, seed.wrapping_add(n))).collect();
        let machine = Machine::new(Isa::detect(), 1);
        let expected = trace(&plain, &initial, &batches, machine);
        let layout = if separate { Layout::Separate } else { Layout::Shared };
        let machine = Machine { threads, layout, poison: true, ..machine };
        prop_assert!(trace(&moved, &initial, &batches, machine) == expected);
    }
}

/// One node of a routine's time line.
struct Moment<'a> {
    program: &'a str,
    scope: &'a str,
    op: &'static str,
}

/// The time line of `train`: `None` where results are read.
fn moments(plan: &Plan) -> Vec<Option<Moment<'_>>> {
    let index = plan
        .step()
        .routines
        .iter()
        .position(|routine| routine.name == TRAIN)
        .unwrap();
    let programs = plan.step().routines[index].programs.iter().enumerate();
    let moments = programs.flat_map(|(number, program)| {
        let nodes = plan.order(index, number).iter().map(|&id| {
            let node = program.graph.node(id);
            Some(Moment {
                program: &program.name,
                scope: &node.scope,
                op: node.op.name(),
            })
        });
        nodes.chain([None])
    });
    moments.collect()
}

fn liveness(plan: &Plan) -> &RoutineLiveness {
    let index = plan
        .step()
        .routines
        .iter()
        .position(|routine| routine.name == TRAIN)
        .unwrap();
    &plan.liveness().routines[index]
}

fn gradients(plan: &Plan) -> impl Iterator<Item = &Buffer> {
    let buffers = liveness(plan).buffers.iter();
    buffers.filter(|buffer| buffer.role == Role::Gradient)
}

/// The plan of a step's own order.
fn as_it_stands(step: Step) -> Plan {
    let target = CpuTarget::new(2);
    let graphs = step.programs().map(|(_, program)| &program.graph);
    let orders = graphs.map(|graph| (0..graph.nodes.len() as u32).map(NodeId).collect());
    let orders = orders.collect();
    let schedule = Schedule::new(step, orders).unwrap();
    tightfit_plan::plan(schedule, &target, Layout::Shared, Effort::default()).unwrap()
}

/// The layer that a scope is part of, or the module where it is part of none.
fn layer(scope: &str) -> &str {
    let module = scope.strip_suffix(".weight").unwrap_or(scope);
    match scope.strip_prefix("model.layers.").and_then(|rest| rest.find('.')) {
        Some(digits) => &scope["model.layers.".len()..][..digits],
        None => module,
    }
}

#[test]
fn no_gradient_outlives_its_layer_but_a_tied_table() {
    for clip_norm in CLIPS {
        for tied in [true, false] {
            let settings = Settings {
                tie_word_embeddings: tied,
                ..job::small(2, 1, clip_norm)
            };
            let (_, moved) = steps(&settings);
            let plan = as_it_stands(moved);
            let moments = moments(&plan);
            let mut tables = Vec::new();
            for gradient in gradients(&plan) {
                let life = &moments[gradient.start as usize..=gradient.end as usize];
                let of_table = gradient.label.to_string() == "lm_head/linear_cross_entropy#2";
                if tied && of_table {
                    tables.push((gradient, life));
                    continue;
                }
                let layers: Vec<&str> = life.iter().map(|at| layer(at.as_ref().unwrap().scope)).collect();
                assert!(
                    layers.iter().all(|layer| *layer == layers[0]),
                    "tied: {tied}, clipped to {clip_norm:?}: {} lives through {layers:?}",
                    gradient.label,
                );
            }
            if !tied {
                continue;
            }
            // One buffer for each backward, from the loss through the scatter to what uses it at once.
            let programs: &[&str] = match clip_norm {
                Some(_) => &[NORM_STEP, MICRO_STEP],
                None => &[MICRO_STEP],
            };
            assert_eq!(tables.len(), programs.len());
            for ((gradient, life), name) in tables.into_iter().zip(programs) {
                let ops: Vec<&str> = life.iter().map(|at| at.as_ref().unwrap().op).collect();
                let used_by = if *name == NORM_STEP { "norm" } else { "adamw" };
                assert_eq!(life[0].as_ref().unwrap().program, *name);
                assert_eq!(ops[0], "linear_cross_entropy");
                assert_eq!(ops[ops.len() - 2..], ["embedding_backward", used_by]);
                assert_eq!(gradient.bytes, 4 * settings.vocab_size * settings.hidden_size);
                let beside = gradients(&plan).filter(|other| {
                    other.bytes >= gradient.bytes && other.start <= gradient.end && gradient.start <= other.end
                });
                assert_eq!(beside.count(), 1);
            }
        }
    }
}

/// A model of many weights on few tokens.
fn narrow(tied: bool, clip_norm: Option<f64>) -> Settings {
    let request = Request {
        hidden_size: Some(64),
        intermediate_size: Some(128),
        num_hidden_layers: Some(8),
        batch: Some(1),
        seq: Some(4),
        tie_word_embeddings: Some(tied),
        clip_norm: Some(ClipNorm(clip_norm)),
        threads: Some(1),
        ..Request::default()
    };
    request.resolve(u64::MAX).unwrap()
}

/// What weighs in a plan, in bytes.
struct Weights {
    persistent: u64,
    /// All gradients together.
    gradients: u64,
    /// Those of the largest layer.
    layer: u64,
    table: u64,
}

fn weights(plan: &Plan) -> Weights {
    let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
    let persistent = &plan.liveness().persistent;
    for weight in persistent.iter().filter(|tensor| tensor.role == Role::Weight) {
        *layers.entry(layer(&weight.name)).or_default() += weight.ty.bytes();
    }
    let table = layers["model.embed_tokens"];
    let inner = layers.iter().filter(|(layer, _)| layer.parse::<u32>().is_ok());
    Weights {
        persistent: persistent.iter().map(|tensor| tensor.ty.bytes()).sum(),
        gradients: layers.values().sum(),
        layer: inner.map(|(_, bytes)| *bytes).max().unwrap(),
        table,
    }
}

#[test]
fn the_peak_is_lower_by_the_gradients() {
    for clip_norm in CLIPS {
        for tied in [true, false] {
            let (plain, moved) = steps(&narrow(tied, clip_norm));
            let [plain, moved] = [plain, moved].map(|step| Machine::new(Isa::detect(), 1).plan(step));
            let of = weights(&plain);
            assert!(plain.peak() >= of.persistent + of.gradients);
            // A tied table's gradient is beside those of a layer, another head's is gone before the first layer's is made.
            let gradients = if tied {
                of.table + of.layer
            } else {
                of.table.max(of.layer)
            };
            let alive = |role: fn(Role) -> bool| {
                let mut only = liveness(&moved).clone();
                only.buffers.retain(|buffer| role(buffer.role));
                only.live_bytes(Tier::Memory).into_iter().max().unwrap()
            };
            assert!(alive(|role| role == Role::Gradient) <= gradients);
            let most = of.persistent + gradients + alive(|role| role != Role::Gradient);
            let slack = of.persistent / 100;
            assert!(
                moved.peak() <= most + slack,
                "tied: {tied}, clipped to {clip_norm:?}: a peak of {}, expected at most {most}",
                moved.peak()
            );
            assert!(most + slack < plain.peak(), "the bound says nothing");
        }
    }
}

/// `cargo test --release --test update_in_backward -- --ignored --nocapture`
#[test]
#[ignore = "prints figures"]
fn peaks_of_smollm2_135m() {
    for (clip_norm, batch, seq) in [(None, 4, 512), (Some(1.0), 4, 512), (None, 1, 128), (Some(1.0), 1, 128)] {
        let request = Request {
            vocab_size: Some(49152),
            hidden_size: Some(576),
            intermediate_size: Some(1536),
            num_hidden_layers: Some(30),
            num_attention_heads: Some(9),
            num_key_value_heads: Some(3),
            batch: Some(batch),
            seq: Some(seq),
            threads: Some(2),
            clip_norm: Some(ClipNorm(clip_norm)),
            ..Request::default()
        };
        let (plain, moved) = steps(&request.resolve(u64::MAX).unwrap());
        for (name, step) in [("plain", plain), ("update in backward", moved)] {
            let plan = Machine::new(Isa::detect(), 2).plan(step);
            let summary = plan.summary();
            println!(
                "{batch} × {seq}, clipped to {clip_norm:?}, {name}: {} bytes, at the peak {} in {}; {:.3e} flops",
                plan.peak(),
                summary.peak.op,
                summary.peak.program,
                summary.flops as f64,
            );
        }
    }
}
