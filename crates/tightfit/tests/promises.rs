//! Promises 1 and 3, on the built-in job and on random models: the measured peak is the planned one, and results are the same
//! bits in an arena and in separate buffers, with freed bytes poisoned, and on any number of threads. Promise 4: techniques that
//! trade time for memory leave the result alone.

#[path = "common/flags.rs"]
mod flags;
#[path = "common/job.rs"]
mod job;
#[path = "common/run.rs"]
mod run;

use std::collections::BTreeMap;
use std::time::Instant;

use proptest::prelude::*;
use run::{Machine, Recorder, Run, persistent};
use tightfit::data::Text;
use tightfit::train::{Trainer, evaluate};
use tightfit::{Adam, Job, Optimizer, OptimizerConfig, Request, Session, Settings, Step, training_step};
use tightfit_cpu::simd::Isa;
use tightfit_ir::{DType, Graph, OutputKind, Tensor};
use tightfit_pass::{EVALUATE, TRAIN, UPDATE, autodiff};
use tightfit_plan::plan::Layout;
use tightfit_testkit::data;
use tightfit_testkit::interpret::{Interpreter, Named};
use tightfit_testkit::random;

const STEPS: u64 = 3;

/// The yardstick, with memory of its own for every buffer, and the ways of running that must equal it bit for bit.
fn machines(isa: Isa) -> [Machine; 6] {
    let machine = |threads| Machine::new(isa, threads);
    let poison = true;
    [
        Machine {
            layout: Layout::Separate,
            ..machine(1)
        },
        machine(1),
        machine(2),
        machine(3),
        Machine { poison, ..machine(1) },
        Machine { poison, ..machine(2) },
    ]
}

/// Everything that a run leaves behind, as bits.
#[derive(Debug, PartialEq)]
struct Bits {
    losses: Vec<u64>,
    persistent: BTreeMap<String, Vec<u32>>,
}

fn bits(tensors: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<u32>> {
    let tensors = tensors.into_iter();
    tensors
        .map(|(name, data)| (name, data.into_iter().map(f32::to_bits).collect()))
        .collect()
}

/// Trains and evaluates the job, and holds the arena's use to the plan.
fn run_job(settings: &Settings, machine: Machine) -> Bits {
    let step = Job::plan(settings.clone(), None).unwrap().plan.step().clone();
    let mut session = machine.session(step);
    session.initialise(settings.seed).unwrap();
    let text = Text::generated(settings).unwrap();
    let mut trainer = Trainer::new(settings, &text);
    let mut losses = Vec::new();
    for step in 1..=STEPS {
        trainer.start(step, 1e-3).unwrap();
        session.run(TRAIN, &mut trainer).unwrap();
        losses.push(trainer.loss().to_bits());
    }
    losses.push(evaluate(&mut session, &text).unwrap().to_bits());
    assert_peak(&session, machine);
    Bits {
        losses,
        persistent: bits(persistent(&mut session)),
    }
}

fn assert_peak(session: &Session, machine: Machine) {
    let (measured, planned) = (session.arena().measured_peak(), session.plan().peak());
    assert_eq!(measured, planned, "measured and planned peak on {machine:?}");
}

#[test]
fn the_job_is_bit_equal_however_it_is_run() {
    for isa in Isa::available() {
        for (micro_batches, clip_norm) in [(1, Some(1.0)), (2, Some(1.0)), (3, None)] {
            let settings = job::small(1, micro_batches, clip_norm);
            let [yardstick, others @ ..] = machines(*isa);
            let expected = run_job(&settings, yardstick);
            for machine in others {
                let found = run_job(&settings, machine);
                // Not `assert_eq`, which would print every weight.
                assert!(found == expected, "{machine:?} differs, {micro_batches} micro-batches");
            }
        }
    }
}

#[test]
fn every_thread_count_and_micro_batch_peaks_as_planned() {
    for threads in 1..=3 {
        for micro_batches in 1..=3 {
            let settings = job::small(threads, micro_batches, Some(1.0));
            run_job(&settings, Machine::new(Isa::detect(), threads));
        }
    }
}

/// A job whose matrices and saved activations are large enough to be offloaded. A clipping that bites, and an `adam_eps` that keeps
/// updates smooth: at 1e-8 the first ones are the sign of a gradient, however small.
const OFFLOADED: &str = "--hidden-size 132 --intermediate-size 141 --heads 3 --kv-heads 3 --layers 2 --batch 4 --seq 33 --lr 0.01 \
                         --clip-norm 0.25 --adam-eps 1e-3 --eval-batches 1 --recompute none";

/// Promise 4, what is exact: 20 steps, their losses and norms, an evaluation and every persistent tensor.
#[test]
fn recompute_and_offload_are_bit_equal_to_the_plain_run_over_20_steps_at_1_to_3_threads() {
    let everything = "--offload activations,optimizer,weights";
    for micro_batch in ["", "--micro-batch 2"] {
        let run = |threads: usize, techniques: &str| {
            let flags = format!("{OFFLOADED} {micro_batch} --threads {threads} {techniques}");
            flags::train(flags::job(&flags), 20, threads == 2)
        };
        let plain = run(1, "");
        for threads in 1..=3 {
            for techniques in [
                "--recompute block",
                "--recompute 50%",
                everything,
                &format!("--recompute 200KiB {everything}"),
            ] {
                let same = run(threads, techniques).alike(&plain);
                // Not `assert_eq`, which would print every weight.
                assert!(same, "{micro_batch} {techniques} differs on {threads} threads");
            }
        }
    }
}

/// Promise 4, what cuts sums otherwise.
#[test]
fn accumulate_and_chunk_loss_agree_with_the_plain_run_over_20_steps() {
    let run = |techniques: &str| flags::train(flags::job(&format!("{OFFLOADED} --threads 2 {techniques}")), 20, false);
    let plain = run("");
    for techniques in [
        "--micro-batch 1",
        "--micro-batch 2",
        "--loss-chunk 1",
        "--loss-chunk 50",
        "--micro-batch 2 --loss-chunk 13",
    ] {
        let (error, of) = run(techniques).relative_error(&plain);
        assert!(0.0 < error && error <= 1e-5, "{techniques}: {of} is off by {error:e}");
    }
}

fn smollm2_135m() -> Settings {
    let request = Request {
        vocab_size: Some(49152),
        hidden_size: Some(576),
        intermediate_size: Some(1536),
        num_hidden_layers: Some(30),
        num_attention_heads: Some(9),
        num_key_value_heads: Some(3),
        batch: Some(4),
        seq: Some(512),
        threads: Some(2),
        ..Request::default()
    };
    request.resolve(u64::MAX).unwrap()
}

#[test]
fn placement_is_within_one_percent_of_the_lower_bound() {
    for settings in [Request::default().resolve(u64::MAX).unwrap(), smollm2_135m()] {
        let gap = Job::plan(settings, None).unwrap().plan.summary().gap();
        assert!(gap <= 0.01, "{:.2} %", 100.0 * gap);
    }
}

/// `cargo test --release --test promises -- --ignored --nocapture`
#[test]
#[ignore = "prints a time"]
fn planning_time() {
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let started = Instant::now();
            let job = Job::plan(smollm2_135m(), None).unwrap();
            assert!(job.plan.peak() > 0);
            started.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!(
        "SmolLM2-135M, 4 × 512: built and planned in {:.3} s (median of {})",
        times[4],
        times.len()
    );
}

/// One run of a random model's job: every result in turn, and what is kept.
#[derive(Debug, PartialEq)]
struct Trace {
    runs: Vec<Run>,
    persistent: BTreeMap<String, Vec<f32>>,
}

/// The routine and the data of every run: `STEPS` optimizer steps, then an evaluation.
struct Feeds {
    batches: Vec<Vec<Named>>,
}

impl Feeds {
    fn routine(&self, index: usize) -> &'static str {
        if index + 1 < self.batches.len() {
            TRAIN
        } else {
            EVALUATE
        }
    }

    fn data(&self, index: usize, program: &str, repeat: u32) -> Named {
        match program {
            UPDATE => [("lr", 0.01), ("step", (index + 1) as f64)]
                .map(|(name, x)| (name.to_owned(), Tensor::scalar(x)))
                .into(),
            // Any other program takes a micro-batch or nothing.
            _ => self.batches[index].get(repeat as usize).cloned().unwrap_or_default(),
        }
    }
}

fn trace(step: &Step, initial: &Named, feeds: &Feeds, machine: Machine) -> Trace {
    let mut session = machine.session(step.clone());
    for (name, tensor) in initial {
        let weight = session.persistent_mut(name).unwrap();
        weight.iter_mut().zip(&tensor.data).for_each(|(to, x)| *to = *x as f32);
    }
    let mut runs = Vec::new();
    for index in 0..feeds.batches.len() {
        let mut recorder = Recorder::new(&session, |program, repeat| feeds.data(index, program, repeat));
        session.run(feeds.routine(index), &mut recorder).unwrap();
        runs.append(&mut recorder.runs);
    }
    assert_peak(&session, machine);
    Trace {
        runs,
        persistent: persistent(&mut session),
    }
}

/// The same job through the references in `f64`.
fn reference(step: &Step, mut interpreter: Interpreter, feeds: &Feeds) -> Trace {
    let narrow = |tensor: &Tensor| tensor.data.iter().map(|&x| x as f32).collect();
    let mut runs = Vec::new();
    for index in 0..feeds.batches.len() {
        let routine = step.routine(feeds.routine(index)).unwrap();
        let ran = interpreter.run(routine, |program, repeat| feeds.data(index, &program.name, repeat));
        runs.extend(ran.into_iter().map(|run| {
            let program = routine
                .programs
                .iter()
                .find(|program| program.name == run.program)
                .unwrap();
            let read = program
                .graph
                .outputs
                .iter()
                .filter(|output| output.kind == OutputKind::Read);
            let results = read.map(|output| (output.name.to_string(), narrow(&run.outputs[&*output.name])));
            Run {
                results: results.collect(),
                program: run.program,
            }
        }));
    }
    let kept = interpreter.persistent.iter();
    Trace {
        runs,
        persistent: kept.map(|(name, tensor)| (name.clone(), narrow(tensor))).collect(),
    }
}

/// What rounding may do to a model's results, relative to the largest of a tensor: its activations may be stored in few bits.
fn tolerance(graph: &Graph) -> f32 {
    let of = |dtype| match dtype {
        DType::Bf16 => 0.15,
        DType::F16 => 0.02,
        _ => 1e-3,
    };
    graph.values.iter().map(|value| of(value.ty.dtype)).fold(0.0, f32::max)
}

/// Whether all elements are as near to the tensor's largest, or to 1e-2 where that is smaller.
fn near(found: &[f32], expected: &[f32], tolerance: f32) -> bool {
    let largest = expected.iter().fold(1e-2_f32, |largest, x| largest.max(x.abs()));
    found.len() == expected.len()
        && found
            .iter()
            .zip(expected)
            .all(|(x, y)| (x - y).abs() <= tolerance * largest)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn random_models_keep_the_promises(
        model in random::model(),
        isa in prop::sample::select(Isa::available()),
        micro_batches in 1..=3_u32,
        clip_norm in prop::option::of(0.1..10.0_f64),
        seed: u64,
    ) {
        // Some have nothing to train.
        prop_assume!(autodiff(model.forward.clone()).is_ok());
        // A large `eps` keeps the first updates smooth: at 1e-8 they are the sign of a gradient, however small.
        let config = OptimizerConfig {
            optimizer: Optimizer::AdamW(Adam { beta1: 0.9, beta2: 0.95, eps: 0.1 }),
            weight_decay: 0.1,
            clip_norm,
            loss_scale: None,
            seed: 1,
        };
        let tolerance = tolerance(&model.forward.graph);
        let step = training_step(model.forward.clone(), &config, micro_batches, Some(model.forward)).unwrap();
        let counts = [micro_batches as usize; STEPS as usize].into_iter().chain([1]);
        let feeds = Feeds {
            batches: counts.zip(seed..).map(|(count, seed)| data::batch(model.batch, count, seed)).collect(),
        };
        let interpreter = Interpreter::new(&step, seed);
        let initial = interpreter.persistent.clone();

        let [yardstick, others @ ..] = machines(isa);
        let expected = trace(&step, &initial, &feeds, yardstick);
        for machine in others {
            let found = trace(&step, &initial, &feeds, machine);
            for (found, expected) in found.runs.iter().zip(&expected.runs) {
                prop_assert_eq!(found, expected, "{:?} differs", machine);
            }
            prop_assert!(bits(found.persistent) == bits(expected.persistent.clone()), "{:?} differs", machine);
        }

        let exact = reference(&step, interpreter, &feeds);
        prop_assert_eq!(expected.runs.len(), exact.runs.len());
        for (index, (found, exact)) in expected.runs.iter().zip(&exact.runs).enumerate() {
            prop_assert_eq!(&found.program, &exact.program);
            for (name, exact) in &exact.results {
                let found = &found.results[name];
                prop_assert!(near(found, exact, tolerance), "run {}: {} is {:?}, expected {:?}", index, name, found, exact);
            }
        }
        for (name, exact) in &exact.persistent {
            let found = &expected.persistent[name];
            prop_assert!(near(found, exact, tolerance), "{} is {:?}, expected {:?}", name, found, exact);
        }
    }
}
