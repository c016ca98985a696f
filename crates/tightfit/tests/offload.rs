//! Offloading changes no bit: weights, optimizer state and activations on the lower tier, however a step is run.

#[path = "common/run.rs"]
mod run;

use std::collections::BTreeMap;

use run::{Machine, Recorder, Run, persistent};
use tightfit::{
    Adam, BatchShape, CpuTarget, DecoderConfig, Optimizer, OptimizerConfig, Plan, Session, Step, training_step,
};
use tightfit_cpu::simd::Isa;
use tightfit_exec::{checkpoint, load};
use tightfit_ir::{NodeId, Phase, Role, Tensor, Tier};
use tightfit_pass::{EVALUATE, MICRO_STEP, Offload, TRAIN, offload};
use tightfit_plan::plan::Layout;
use tightfit_testkit::interpret::Named;
use tightfit_testkit::rng::Rng;

const SHAPE: BatchShape = BatchShape {
    batch: 2,
    seq: 48,
    loss_chunk: 32,
};
const VOCABULARY: u64 = 300;

/// Matrices are larger than the smallest that is offloaded, most of them by an odd number of bytes.
fn model() -> DecoderConfig {
    DecoderConfig {
        vocab_size: VOCABULARY,
        hidden_size: 132,
        intermediate_size: 141,
        num_hidden_layers: 3,
        num_attention_heads: 3,
        num_key_value_heads: 3,
        max_position_embeddings: 64,
        ..DecoderConfig::default()
    }
}

fn step(micro_batches: u32, clip_norm: Option<f64>, choose: impl FnOnce(&Step) -> Offload) -> Step {
    let forward = model().loss(SHAPE).unwrap();
    let optimizer = OptimizerConfig {
        optimizer: Optimizer::AdamW(Adam {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
        }),
        weight_decay: 0.1,
        clip_norm,
        loss_scale: None,
        seed: 1,
    };
    let step = training_step(forward.clone(), &optimizer, micro_batches, Some(forward)).unwrap();
    let choice = choose(&step);
    let mut step = offload(step, &choice, &CpuTarget::new(1)).unwrap();
    let routines = [
        load::routine(&[], step.persistent()),
        checkpoint::routine(step.persistent().map(|(_, ty)| ty)),
    ];
    step.routines.extend(routines);
    step.verify().unwrap();
    step
}

/// Every forward node whose results are large enough.
fn activations(step: &Step) -> Vec<(String, Vec<(NodeId, usize)>)> {
    let mut programs = step.programs().map(|(_, program)| program);
    let program = programs.find(|program| program.name == MICRO_STEP).unwrap();
    let graph = &program.graph;
    let nodes = graph.nodes.iter().enumerate().filter(|(_, node)| {
        let large = node.outputs.iter().any(|&value| graph.ty(value).bytes() >= 32 << 10);
        node.phase == Phase::Forward && large && graph.view_of(node.outputs[0]).is_none()
    });
    let nodes = nodes.map(|(index, _)| (NodeId(index as u32), 0)).collect();
    vec![(MICRO_STEP.to_owned(), nodes)]
}

fn data(program: &str, repeat: u32, step: u64) -> Named {
    let rows = SHAPE.tokens();
    let mut rng = Rng::named(step, &format!("{program}{repeat}"));
    let mut ids = |n: u64| (0..rows).map(|_| rng.below(n) as f64).collect::<Vec<_>>();
    let (tokens, targets) = (ids(VOCABULARY), ids(VOCABULARY));
    let positions = (0..rows).map(|row| (row % SHAPE.seq) as f64).collect();
    let starts = (0..rows).map(|row| (row / SHAPE.seq * SHAPE.seq) as f64).collect();
    let columns = [
        ("tokens", tokens),
        ("targets", targets),
        ("positions", positions),
        ("doc_start", starts),
    ];
    let mut named: Named = columns
        .into_iter()
        .map(|(name, data)| (name.to_owned(), Tensor::new([rows], data)))
        .collect();
    let scalars = [("token_count", rows as f64), ("lr", 1e-3), ("step", step as f64)];
    named.extend(scalars.map(|(name, value)| (name.to_owned(), Tensor::scalar(value))));
    named
}

/// What a few steps and an evaluation leave behind, as bits.
fn bits(session: &mut Session) -> (Vec<Vec<u32>>, BTreeMap<String, Vec<u32>>) {
    session.initialise(7).unwrap();
    let to_bits = |values: &Vec<f32>| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let mut read = Vec::new();
    for count in 1..=3 {
        let routine = if count == 3 { EVALUATE } else { TRAIN };
        let mut recorder = Recorder::new(session, |program, repeat| data(program, repeat, count));
        session.run(routine, &mut recorder).unwrap();
        let runs: Vec<Run> = recorder.runs;
        read.extend(runs.iter().flat_map(|run| run.results.values().map(to_bits)));
    }
    let tensors = persistent(session);
    let tensors = tensors.iter().map(|(name, values)| (name.clone(), to_bits(values)));
    (read, tensors.collect())
}

fn lower(plan: &Plan, role: Role) -> u64 {
    let tensors = plan.liveness().persistent.iter();
    let lower = tensors.filter(|tensor| tensor.role == role && tensor.ty.tier == Tier::Lower);
    lower.map(|tensor| tensor.ty.bytes()).sum()
}

#[test]
fn every_kind_and_all_together_are_bit_equal_to_the_plain_run() {
    let isa = Isa::detect();
    for (micro_batches, clip_norm) in [(1, None), (1, Some(1.0)), (2, Some(1.0))] {
        let plain = step(micro_batches, clip_norm, |_| Offload::default());
        let mut session = Machine::new(isa, 1).session(plain);
        let expected = bits(&mut session);
        let in_memory = session.plan().peak();
        for kinds in 1..8_u32 {
            let (optimizer, weights) = (kinds & 1 != 0, kinds & 2 != 0);
            let offloaded = |window| {
                step(micro_batches, clip_norm, |step| Offload {
                    optimizer,
                    weights,
                    activations: if kinds & 4 != 0 { activations(step) } else { Vec::new() },
                    window,
                })
            };
            let mut machines = vec![
                (Machine::new(isa, 1), 0),
                (Machine::new(isa, 2), u64::MAX),
                (Machine::new(isa, 3), 1 << 18),
            ];
            machines.push((
                Machine {
                    poison: true,
                    ..Machine::new(isa, 1)
                },
                1 << 17,
            ));
            machines.push((
                Machine {
                    layout: Layout::Separate,
                    ..Machine::new(isa, 2)
                },
                1 << 19,
            ));
            for (machine, window) in machines {
                let mut session = machine.session(offloaded(window));
                let found = bits(&mut session);
                assert!(
                    found == expected,
                    "kinds {kinds:b}, {machine:?}, {micro_batches} micro-batches"
                );
                assert_eq!(
                    session.arena().measured_peak(),
                    session.plan().peak(),
                    "kinds {kinds:b}, {machine:?}"
                );
                assert_eq!(lower(session.plan(), Role::OptimizerState) > 0, optimizer);
                assert_eq!(lower(session.plan(), Role::Weight) > 0, weights);
                // What this model saves for its backward is less than what its update takes.
                if window == 0 && (optimizer || weights) {
                    assert!(session.plan().peak() < in_memory, "kinds {kinds:b} save nothing");
                }
            }
        }
    }
}
