//! What keeping less for the backward costs: bytes kept against time, predicted and measured. Takes the flags of `train`; without any,
//! a step of SmolLM2-135M's shape.
//!
//! Every point runs beside the plain job, whose steps alternate with its own, so that a machine that is shared slows both alike.
//!
//! `cargo run --release --example curve [-- --batch 4 --seq 512 --pairs 3]`

use std::error::Error;
use std::time::Instant;

use clap::Parser;
use tightfit::data::Text;
use tightfit::settings::Recompute;
use tightfit::train::Trainer;
use tightfit::{Job, Request, Session, Settings};
use tightfit_pass::TRAIN;

/// Measures the time of a step against what it keeps.
#[derive(Parser)]
struct Args {
    /// Pairs of steps, one of the plain job and one of the point's, that are timed; medians count
    #[arg(long, value_name = "N", default_value_t = 3)]
    pairs: usize,
    /// Percent of the saved bytes that the points keep; a point with one checkpoint for each block is last
    #[arg(long, value_name = "P", value_delimiter = ',', default_values_t = [90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0])]
    keep: Vec<f64>,
    /// The job
    #[command(flatten)]
    request: Request,
}

/// A job that is stepped through.
struct Runner<'a> {
    session: Session,
    trainer: Trainer<'a>,
    step: u64,
}

impl<'a> Runner<'a> {
    fn new(job: Job, text: &'a Text) -> Result<Self, Box<dyn Error>> {
        let scratch = job.settings.scratch_dir(None);
        let trainer = Trainer::new(&job.settings, text);
        let mut session = Session::with_scratch(job.plan, job.settings.threads, Some(&scratch))?;
        session.initialise(job.settings.seed)?;
        Ok(Self {
            session,
            trainer,
            step: 0,
        })
    }

    /// Seconds of one more step.
    fn step(&mut self) -> Result<f64, Box<dyn Error>> {
        self.step += 1;
        self.trainer.start(self.step, 1e-4)?;
        let started = Instant::now();
        self.session.run(TRAIN, &mut self.trainer)?;
        Ok(started.elapsed().as_secs_f64())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let shape = Request {
        vocab_size: Some(49152),
        hidden_size: Some(576),
        intermediate_size: Some(1536),
        num_hidden_layers: Some(30),
        num_attention_heads: Some(9),
        num_key_value_heads: Some(3),
        seq: Some(512),
        ..Request::default()
    };
    let plain = Settings {
        recompute: Recompute::None,
        ..args.request.or(shape).resolve(u64::MAX)?
    };
    let text = Text::generated(&plain)?;
    let job = Job::plan(plain.clone(), None)?;
    let kept = |job: &Job| job.explanation.as_ref().map_or(0, |explanation| explanation.kept_bytes);
    let (all, expected) = (kept(&job), job.prediction.seconds);
    let mut yardstick = Runner::new(job, &text)?;
    yardstick.step()?;
    println!("all kept: {:.0} MiB, predicted {expected:.2} s", mebibytes(all));
    println!("      kept    MiB  arena MiB   predicted          measured   error");
    let percents = args.keep.iter().map(|&percent| Recompute::Percent(percent));
    let mut errors = Vec::new();
    for recompute in percents.chain([Recompute::Block]) {
        let job = Job::plan(
            Settings {
                recompute,
                ..plain.clone()
            },
            None,
        )?;
        let (bytes, arena, predicted) = (kept(&job), job.plan.peak(), job.prediction.seconds);
        let mut point = Runner::new(job, &text)?;
        point.step()?;
        let (mut plain_times, mut times, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 0..args.pairs.max(1) {
            // Each goes first in every other pair.
            let (a, b) = match pair % 2 {
                0 => (yardstick.step()?, point.step()?),
                _ => {
                    let b = point.step()?;
                    (yardstick.step()?, b)
                }
            };
            plain_times.push(a);
            times.push(b);
            ratios.push(b / a);
        }
        let measured = median(times);
        errors.push((predicted / measured - 1.0).abs());
        println!(
            "{:>10} {:>6.0} {:>10.0} {predicted:>6.2} s {:+5.1} % {measured:>6.2} s {:+5.1} % {:+6.1} %",
            recompute.to_string(),
            mebibytes(bytes),
            mebibytes(arena),
            100.0 * (predicted / expected - 1.0),
            100.0 * (median(ratios) - 1.0),
            100.0 * (predicted / measured - 1.0),
        );
    }
    let worst = errors.iter().copied().fold(0.0, f64::max);
    println!(
        "error of the prediction: median {:.1} %, worst {:.1} %",
        100.0 * median(errors),
        100.0 * worst
    );
    Ok(())
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
