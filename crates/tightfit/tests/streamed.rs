//! A model of TinyLlama-1.1B's shape, all of whose weights are trained in `f32` within 2 GiB for the whole process: weights and
//! AdamW's state are 13.2 GB, and stream through memory from a file. The result has the bits of a run with all of them in memory.
//!
//! Takes minutes, 14 GB of disk and 14 GB of memory, so it is no part of the usual tests:
//!
//! `cargo test --release --test streamed -- --ignored --nocapture`
//!
//! `STREAMED_LAYERS=2` makes it shorter.

#[path = "common/limit.rs"]
mod limit;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::time::Instant;

use limit::limit_memory;
use tightfit::data::Text;
use tightfit::memory::process_peak_bytes;
use tightfit::reserve::Before;
use tightfit::settings::{Bytes, ClipNorm, Offload};
use tightfit::train::Trainer;
use tightfit::{Request, Session, Settings, choose};
use tightfit_exec::persistent::TensorError;
use tightfit_exec::tier::measure_link;
use tightfit_pass::TRAIN;

const BUDGET: u64 = 2 << 30;
const STEPS: u64 = 3;

fn settings(budget: u64, offload: Offload) -> Settings {
    let layers = std::env::var("STREAMED_LAYERS").map_or(22, |layers| layers.parse().unwrap());
    let request = Request {
        vocab_size: Some(32_000),
        hidden_size: Some(2048),
        intermediate_size: Some(5632),
        num_hidden_layers: Some(layers),
        num_attention_heads: Some(32),
        num_key_value_heads: Some(4),
        tie_word_embeddings: Some(false),
        batch: Some(1),
        seq: Some(512),
        threads: Some(2),
        update_in_backward: Some(true),
        clip_norm: Some(ClipNorm(None)),
        offload: Some(offload),
        budget: Some(Bytes(budget)),
        ..Request::default()
    };
    request.resolve(u64::MAX).unwrap()
}

/// What a run leaves behind: the bits of its losses, and a hash of every persistent tensor's.
#[derive(Debug, PartialEq)]
struct Trace {
    losses: Vec<u64>,
    tensors: BTreeMap<String, u64>,
}

/// One run and how long its steps took.
fn run(settings: &Settings, scratch: &Path) -> (Trace, Vec<f64>) {
    let started = Instant::now();
    let job = choose::plan(settings, None, u64::MAX, &mut Before::default()).unwrap();
    let predicted = job.prediction;
    println!(
        "planned in {:.2} s: arena {} MiB, lower tier {} MiB; predicted {:.1} s per step: kernels {:.1} s, link {:.1} s",
        started.elapsed().as_secs_f64(),
        job.plan.arena_bytes() >> 20,
        job.plan.lower_tier_bytes() >> 20,
        predicted.seconds,
        predicted.compute,
        predicted.link,
    );
    let mut session = Session::with_scratch(job.plan, settings.threads, Some(scratch)).unwrap();
    session.initialise(settings.seed).unwrap();
    let text = Text::generated(settings).unwrap();
    let mut trainer = Trainer::new(settings, &text);
    let (mut losses, mut times) = (Vec::new(), Vec::new());
    for step in 1..=STEPS {
        let before = session.transfers().map(|link| (link.moved(), link.waited()));
        let started = Instant::now();
        trainer.start(step, 1e-3).unwrap();
        session.run(TRAIN, &mut trainer).unwrap();
        times.push(started.elapsed().as_secs_f64());
        losses.push(trainer.loss().to_bits());
        print!(
            "step {step}: loss {:.4}, {:.1} s",
            trainer.loss(),
            times[times.len() - 1]
        );
        if let (Some(link), Some((moved, waited))) = (session.transfers(), before) {
            print!(
                ", of which waited {:.1} s; read {} MiB, wrote {} MiB",
                (link.waited() - waited).as_secs_f64(),
                (link.moved().read - moved.read) >> 20,
                (link.moved().written - moved.written) >> 20,
            );
        }
        println!();
    }
    assert_eq!(session.arena().measured_peak(), session.plan().peak());
    let tensors = session.plan().liveness().persistent.iter();
    let names: Vec<String> = tensors.map(|tensor| tensor.name.clone()).collect();
    let mut tensors = BTreeMap::new();
    for name in names {
        let mut hasher = DefaultHasher::new();
        let hashed = session.read(&name, |piece| -> Result<(), TensorError> {
            hasher.write(piece);
            Ok(())
        });
        hashed.unwrap();
        tensors.insert(name, hasher.finish());
    }
    (Trace { losses, tensors }, times)
}

#[test]
#[ignore = "takes minutes, 14 GB of disk and 14 GB of memory"]
fn a_model_of_1_1_billion_weights_trains_within_2_gib() {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let link = measure_link(scratch, 2 << 30).unwrap();
    println!(
        "link: reads {:.2} GB/s, writes {:.2} GB/s",
        link.read / 1e9,
        link.write / 1e9
    );

    limit_memory(BUDGET);
    let (streamed, streamed_times) = run(&settings(BUDGET, Offload::Auto), scratch);
    let peak = process_peak_bytes().unwrap();
    println!("the process took {} MiB at most", peak >> 20);
    assert!(peak <= BUDGET, "{peak} bytes");

    limit_memory(u64::MAX);
    let (plain, plain_times) = run(&settings(u64::MAX, Offload::None), scratch);
    let ratios: Vec<String> = streamed_times
        .iter()
        .zip(&plain_times)
        .map(|(streamed, plain)| format!("{:.2}", streamed / plain))
        .collect();
    println!("streamed steps take {} of the time in memory", ratios.join(", "));
    assert_eq!(streamed, plain);
}
