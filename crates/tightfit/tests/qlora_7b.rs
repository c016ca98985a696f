//! QLoRA of a model of LLaMA-2-7B's shape: a step on 1 × 512 tokens within 5 GiB for the whole process, and within 2 GiB with the
//! base's weights streamed from a file, to the same bits.
//!
//! Takes a quarter of an hour, 8 GB of disk and 5 GB of memory, so it is no part of the usual tests:
//!
//! `cargo test --release --test qlora_7b -- --ignored --nocapture`
//!
//! The first run makes the base, random weights in NF4, as `tightfit quantize --fresh fixtures/llama_2_7b.json --base nf4 --out DIR`
//! does; `QLORA_7B=DIR` names one that is there.

#[path = "common/limit.rs"]
mod limit;

use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use limit::limit_memory;
use tightfit::data::Text;
use tightfit::memory::process_peak_bytes;
use tightfit::pretrained::Pretrained;
use tightfit::reserve::Before;
use tightfit::settings::{Bytes, ClipNorm, Method, Offload, Precision};
use tightfit::train::Trainer;
use tightfit::{Request, Role, Session, Settings, choose};
use tightfit_exec::persistent::TensorError;
use tightfit_pass::TRAIN;

const IN_MEMORY: u64 = 5 << 30;
const STREAMED: u64 = 2 << 30;

/// The base's folder.
fn base() -> PathBuf {
    if let Ok(folder) = std::env::var("QLORA_7B") {
        return folder.into();
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("llama-2-7b-nf4");
    if !folder.exists() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama_2_7b.json");
        let mut quantize = Command::new(env!("CARGO_BIN_EXE_tightfit"));
        quantize.args(["quantize", "--base", "nf4", "--fresh"]).arg(config);
        assert!(quantize.arg("--out").arg(&folder).status().unwrap().success());
    }
    folder
}

fn settings(budget: u64, offload: Offload) -> Settings {
    let request = Request {
        method: Some(Method::Qlora.into()),
        precision: Some(Precision::Bf16Mixed),
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

/// A step: the bits of its loss, and a hash of the adapters that it leaves.
fn step(model: &Pretrained, settings: &Settings) -> (u64, u64) {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let started = Instant::now();
    let job = choose::plan(settings, Some(model), u64::MAX, &mut Before::default()).unwrap();
    println!(
        "planned in {:.2} s: arena {} MiB, lower tier {} MiB; expected {:.1} s, by assumed speeds",
        started.elapsed().as_secs_f64(),
        job.plan.arena_bytes() >> 20,
        job.plan.lower_tier_bytes() >> 20,
        job.prediction.seconds,
    );
    let mut session = Session::with_scratch(job.plan, settings.threads, Some(scratch)).unwrap();
    let started = Instant::now();
    let fresh = [Role::Adapter, Role::OptimizerState];
    session.initialise_roles(settings.seed, &fresh).unwrap();
    model.load(&mut session).unwrap();
    println!("read in {:.1} s", started.elapsed().as_secs_f64());
    let text = Text::generated(settings).unwrap();
    let mut trainer = Trainer::new(settings, &text);
    let started = Instant::now();
    trainer.start(1, 1e-3).unwrap();
    session.run(TRAIN, &mut trainer).unwrap();
    println!(
        "a step: loss {:.4}, {:.1} s",
        trainer.loss(),
        started.elapsed().as_secs_f64()
    );
    assert_eq!(session.arena().measured_peak(), session.plan().peak());
    let mut hasher = DefaultHasher::new();
    for name in session.persistent_names(Role::Adapter) {
        let hashed = session.read(&name, |piece| -> Result<(), TensorError> {
            hasher.write(piece);
            Ok(())
        });
        hashed.unwrap();
    }
    (trainer.loss().to_bits(), hasher.finish())
}

#[test]
#[ignore = "takes a quarter of an hour, 8 GB of disk and 5 GB of memory"]
fn seven_billion_weights_are_adapted_within_5_gib_and_streamed_within_2() {
    let model = Pretrained::open(&base()).unwrap();
    let mut results = Vec::new();
    for (budget, offload) in [(STREAMED, Offload::Auto), (IN_MEMORY, Offload::None)] {
        limit_memory(budget);
        results.push(step(&model, &settings(budget, offload)));
        // The smaller one first, as a process's peak stays.
        let peak = process_peak_bytes().unwrap();
        println!("the process took {} MiB at most, of {}", peak >> 20, budget >> 20);
        assert!(peak <= budget, "{peak} bytes");
        limit_memory(u64::MAX);
    }
    assert_eq!(results[0], results[1]);
}
