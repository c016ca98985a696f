//! A model that tightfit has never heard of, planned and trained within a budget: an MLP with LayerNorm and GELU that learns
//! which of four spirals a point lies on.
//!
//! `cargo run --release --example your_model`

use std::error::Error;
use std::process::ExitCode;

use tightfit::op::Approximate;
use tightfit::{
    Adam, Builder, Driver, Feed, Forward, ModelError, Optimizer, OptimizerConfig, Results, RunError, Session, Type,
    plan_for_cpu, training_step,
};

const POINTS: u64 = 1024;
const CLASSES: u64 = 4;
const STEPS: u32 = 300;
const BUDGET: u64 = 32 << 20;
const THREADS: usize = 2;

/// From points in the plane to a loss. Weights are named by their scopes: `classifier.0.fc.weight`, ….
fn classifier() -> Result<Forward, ModelError> {
    let mut b = Builder::new(0.1);
    let points = b.input("points", Type::f32([POINTS, 2]));
    let labels = b.input("labels", Type::i32([POINTS]));
    let count = b.input("count", Type::f32([1]));
    let logits = b.scope("classifier", |b| {
        let mut x = b.linear_bias("embed", points, 128)?;
        for layer in 0..3 {
            x = b.scope(&layer.to_string(), |b| {
                let normed = b.layer_norm("norm", x, 1e-5)?;
                let hidden = b.linear_bias("fc", normed, 256)?;
                let hidden = b.gelu(hidden, Approximate::None)?;
                b.linear_onto("proj", hidden, x)
            })?;
        }
        b.linear_bias("head", x, CLASSES)
    })?;
    let loss = b.softmax_cross_entropy(logits, labels, count)?;
    b.finish("loss", loss)
}

/// Feeds the same spirals at every step, and keeps the loss.
struct Spirals {
    step: u32,
    loss: f32,
}

impl Driver for Spirals {
    fn feed(&mut self, program: &str, _repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        if program == "update" {
            feed.scalar("lr", 2e-3)?;
            return feed.scalar("step", self.step as f32);
        }
        let [points] = feed.inputs::<f32, 1>(["points"])?;
        for (i, point) in points.chunks_exact_mut(2).enumerate() {
            let (arm, along) = (i as u64 % CLASSES, i as f32 / POINTS as f32);
            let angle = 4.0 * along + arm as f32 * std::f32::consts::TAU / CLASSES as f32;
            point.copy_from_slice(&[along * angle.cos(), along * angle.sin()]);
        }
        let [labels] = feed.inputs::<i32, 1>(["labels"])?;
        for (i, label) in labels.iter_mut().enumerate() {
            *label = (i as u64 % CLASSES) as i32;
        }
        feed.scalar("count", POINTS as f32)
    }

    fn read(&mut self, program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        if program == "micro_step" {
            self.loss = results.scalar("loss")?;
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let adamw = OptimizerConfig {
        optimizer: Optimizer::AdamW(Adam {
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
        }),
        weight_decay: 0.01,
        clip_norm: Some(1.0),
        loss_scale: None,
        seed: 1,
    };
    let plan = plan_for_cpu(training_step(classifier()?, &adamw, 1, None)?, THREADS)?;
    println!("planned peak   {} bytes", plan.peak());
    plan.fit(BUDGET, tightfit::reserve::reserve_bytes(THREADS)?)?;

    let mut session = Session::new(plan, THREADS)?;
    session.initialise(1)?;
    let mut spirals = Spirals {
        step: 0,
        loss: f32::NAN,
    };
    for step in 1..=STEPS {
        spirals.step = step;
        session.run("train", &mut spirals)?;
        if step == 1 || step % 100 == 0 {
            println!("step {step:>3}       loss {:.4}", spirals.loss);
        }
    }
    println!("measured peak  {} bytes", session.arena().measured_peak());
    Ok(())
}
