//! The real SmolLM2-135M-Instruct agrees with transformers, by the numbers in `fixtures/smollm2.json`: tokens, logits, loss, every
//! gradient, greedy generation, and perplexity on a public text.
//!
//! The model and the text are not in the repository; `scripts/fetch_smollm2.py` and `scripts/fetch_text.py` put them into `models/`.

#[path = "common/fixture.rs"]
mod fixture;
#[path = "common/run.rs"]
mod run;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use fixture::Fixture;
use run::{Recorder, with_gradients_read};
use tightfit::generate::{GenerateError, Generation};
use tightfit::pretrained::Pretrained;
use tightfit::sample::{Sampler, Sampling};
use tightfit::{BatchShape, Session, plan_for_cpu};
use tightfit_exec::load;
use tightfit_ir::{Routine, Step, Tensor};
use tightfit_pass::{TRAIN, autodiff, gradient_name, no_grad};
use tightfit_testkit::interpret::Named;
use tightfit_text::chat::{ChatTemplate, Message};

const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const TEXT: &str = "kjv.txt";
const THREADS: usize = 2;

/// A file of `models/`, if it was fetched.
fn fetched(name: &str, script: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name);
    if path.exists() {
        return Some(path);
    }
    // The test harness swallows what `eprintln!` says.
    let _ = writeln!(
        std::io::stderr(),
        "skipped, as models/{name} is not there: run `python scripts/{script}`"
    );
    None
}

fn model() -> Option<Pretrained> {
    Some(Pretrained::open(&fetched(MODEL, "fetch_smollm2.py")?).unwrap())
}

/// A session of a step with the model's weights.
fn session(model: &Pretrained, mut step: Step) -> Session {
    let load = load::routine(&model.fills(), step.persistent());
    step.routines.push(load);
    let mut session = Session::new(plan_for_cpu(step, THREADS).unwrap(), THREADS).unwrap();
    session.initialise_roles(0, &[tightfit::Role::KvCache]).unwrap();
    model.load(&mut session).unwrap();
    session
}

/// The fixture's text as one document.
fn document(fixture: &Fixture) -> (BatchShape, Named) {
    let numbers = |field: &str| fixture.numbers(&format!("/forward/{field}"));
    let (tokens, targets) = (numbers("tokens"), numbers("targets"));
    let rows = tokens.len() as u64;
    let counted = targets.iter().filter(|&&target| target >= 0.0).count();
    let data = Named::from([
        ("tokens".to_owned(), Tensor::new([rows], tokens)),
        ("targets".to_owned(), Tensor::new([rows], targets)),
        (
            "positions".to_owned(),
            Tensor::new([rows], (0..rows).map(|t| t as f64).collect()),
        ),
        ("doc_start".to_owned(), Tensor::zeros([rows])),
        ("token_count".to_owned(), Tensor::scalar(counted as f64)),
    ]);
    let shape = BatchShape {
        batch: 1,
        seq: rows,
        loss_chunk: 512,
    };
    (shape, data)
}

#[test]
fn tokens_and_logits() {
    let (Some(model), fixture) = (model(), Fixture::load("smollm2")) else {
        return;
    };
    let text = fixture.text("/forward/text");
    let tokens = model.tokenizer().unwrap().encode(&text, true).unwrap();
    assert_eq!(
        tokens.iter().map(|&t| f64::from(t)).collect::<Vec<_>>(),
        fixture.numbers("/forward/tokens")
    );

    let (shape, data) = document(&fixture);
    let forward = no_grad(model.config.logits(shape).unwrap()).unwrap();
    let step = Step {
        routines: vec![Routine::of("logits", forward.graph)],
    };
    let mut session = session(&model, step);
    let mut recorder = Recorder::new(&session, |_, _| data.clone());
    session.run("logits", &mut recorder).unwrap();
    let logits = &recorder.runs[0].results["logits"];
    let vocab_size = model.config.vocab_size as usize;
    let rows: Vec<&[f32]> = logits.chunks(vocab_size).collect();
    let mut largest = 0.0_f64;
    let mut near = |what: &str, found: f64, expected: f64, tolerance: f64| {
        assert!(
            (found - expected).abs() <= tolerance,
            "{what}: {found}, expected {expected}"
        );
        largest = largest.max((found - expected).abs());
    };
    let expected = |field: &str| fixture.numbers(&format!("/forward/{field}"));
    for (row, logits) in rows.iter().enumerate() {
        let at = |field: &str| expected(&format!("rows/{field}"))[row];
        let wide = || logits.iter().map(|&x| f64::from(x));
        near(
            &format!("logit {} of row {row}", at("argmax")),
            f64::from(logits[at("argmax") as usize]),
            at("max"),
            1e-3,
        );
        near(
            &format!("mean of row {row}"),
            wide().sum::<f64>() / vocab_size as f64,
            at("mean"),
            1e-3,
        );
        let max = wide().fold(f64::NEG_INFINITY, f64::max);
        near(
            &format!("log-sum-exp of row {row}"),
            max + wide().map(|x| (x - max).exp()).sum::<f64>().ln(),
            at("logsumexp"),
            1e-3,
        );
    }
    for (index, row) in expected("logits/positions").into_iter().enumerate() {
        for (ids, values) in [
            (
                expected(&format!("logits/top_ids/{index}")),
                expected(&format!("logits/top/{index}")),
            ),
            (expected("logits/fixed_ids"), expected(&format!("logits/fixed/{index}"))),
        ] {
            for (id, value) in ids.into_iter().zip(values) {
                near(
                    &format!("logit {id} of row {row}"),
                    f64::from(rows[row as usize][id as usize]),
                    value,
                    1e-3,
                );
            }
        }
    }
    println!("largest difference of a logit or a row's summary: {largest:.1e}");
}

#[test]
fn loss_and_every_gradient() {
    const TOLERANCE: f64 = 1e-4;
    let (Some(model), fixture) = (model(), Fixture::load("smollm2")) else {
        return;
    };
    let (shape, data) = document(&fixture);
    let step = with_gradients_read(autodiff(model.config.loss(shape).unwrap()).unwrap());
    let mut session = session(&model, step);
    let mut recorder = Recorder::new(&session, |_, _| data.clone());
    session.run(TRAIN, &mut recorder).unwrap();
    let results = &recorder.runs[0].results;
    let (loss, expected) = (f64::from(results["loss"][0]), fixture.number("/forward/loss"));
    assert!(
        (loss / expected - 1.0).abs() <= TOLERANCE,
        "loss {loss}, expected {expected}"
    );
    println!("loss {loss}, expected {expected}");
    let names = fixture.names("/gradients");
    assert_eq!(names.len() + 1, results.len(), "one gradient for each weight");
    let mut largest = 0.0_f64;
    for name in names {
        let gradient = &results[&gradient_name(&name)];
        let number = |field: &str| fixture.number(&format!("/gradients/{name}/{field}"));
        let norm = number("norm");
        let found = gradient.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let key = format!("projection.{name}");
        let values = (0_u32..).map(|index| f64::from(fixture::value(&key, index)) / 131_072.0);
        let projection: f64 = gradient.iter().zip(values).map(|(&x, v)| f64::from(x) * v).sum();
        for (what, found, expected) in [("norm", found, norm), ("projection", projection, number("projection"))] {
            let error = (found - expected).abs() / norm;
            assert!(
                error <= TOLERANCE,
                "{what} of the gradient of {name}: {found}, expected {expected}"
            );
            largest = largest.max(error);
        }
    }
    println!("largest error of a gradient's norm or projection: {largest:.1e}");
}

#[test]
fn greedy_generation_of_64_tokens() {
    let (Some(model), fixture) = (model(), Fixture::load("smollm2")) else {
        return;
    };
    let tokenizer = model.tokenizer().unwrap();
    let template = ChatTemplate::of(&tokenizer).unwrap().unwrap();
    let message = Message {
        role: fixture.text("/greedy/chat/messages/0/role"),
        content: fixture.text("/greedy/chat/messages/0/content"),
    };
    let chat = template.render(&[message], true).unwrap();
    assert_eq!(chat, fixture.text("/greedy/chat/prompt"));
    for (kind, prompt) in [("chat", chat), ("plain", fixture.text("/greedy/plain/prompt"))] {
        let tokens_of = |field: &str| -> Vec<u32> {
            fixture
                .numbers(&format!("/greedy/{kind}/{field}"))
                .iter()
                .map(|&t| t as u32)
                .collect()
        };
        let prompt = tokenizer.encode(&prompt, false).unwrap();
        assert_eq!(prompt, tokens_of("prompt_tokens"));
        let generation = Generation {
            prompt: prompt.len(),
            max_tokens: 64,
        };
        let mut session = session(&model, generation.step(&model.config, tightfit_pass::no_grad).unwrap());
        let vocab_size = model.config.vocab_size as usize;
        let greedy = Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            seed: 0,
        };
        let mut sampler = Sampler::new(greedy, vocab_size);
        let mut tokens = Vec::new();
        generation
            .run(&mut session, &prompt, vocab_size, &mut sampler, |token| {
                tokens.push(token);
                Ok::<_, GenerateError>(true)
            })
            .unwrap();
        assert_eq!(tokens, tokens_of("tokens"), "{kind}");
        assert_eq!(
            tokenizer.decode(&tokens, true).unwrap(),
            fixture.text(&format!("/greedy/{kind}/text"))
        );
        assert_eq!(session.arena().measured_peak(), session.plan().peak());
    }
}

#[test]
fn perplexity_of_a_public_text() {
    let (Some(_), Some(text)) = (fetched(MODEL, "fetch_smollm2.py"), fetched(TEXT, "fetch_text.py")) else {
        return;
    };
    let fixture = Fixture::load("smollm2");
    let bytes = std::fs::read(text).unwrap();
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("perplexity.txt");
    let prefix_bytes = fixture.number("/perplexity/text_bytes") as usize;
    std::fs::write(&prefix, &bytes[..prefix_bytes]).unwrap();
    for (kind, flags) in [("packed", &[][..]), ("strided", &["--stride", "256"])] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tightfit"));
        command
            .args(["eval", "--json", "--seq", "512", "--batch", "2"])
            .args(flags);
        command
            .arg("--model")
            .arg(fetched(MODEL, "").unwrap())
            .arg("--data")
            .arg(&prefix);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            report["tokens"].as_u64(),
            Some(fixture.number("/perplexity/targets") as u64)
        );
        let (found, expected) = (
            report["perplexity"].as_f64().unwrap(),
            fixture.number(&format!("/perplexity/{kind}/perplexity")),
        );
        println!("{kind}: {found}, expected {expected}");
        assert!(
            (found / expected - 1.0).abs() <= 1e-3,
            "{kind}: {found}, expected {expected}"
        );
    }
}
