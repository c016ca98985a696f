//! Where a step's time goes, and how well it was predicted: seconds, share and speed of each kind of operation, beside the seconds
//! that the machine's profile gives them. Takes the flags of `train`; without any, a step of SmolLM2-135M's shape.
//!
//! `cargo run --release --example profile [-- --layers 4 --batch 2 --shapes]`

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Instant;

use clap::Parser;
use tightfit::data::{BatchBuffers, Split, Text};
use tightfit::op::{AliasKind, Op, Rule};
use tightfit::{DType, Plan, Request};
use tightfit_cpu::{Cpu, pool::Pool};
use tightfit_exec::Arena;
use tightfit_ir::{Call, Phase, Slot, Target, Type};
use tightfit_plan::ProgramCalls;

/// Times every operation of a training step.
#[derive(Parser)]
struct Args {
    /// Steps that are timed; each operation's median counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    repeats: usize,
    /// A line for each operation and shape, not for each operation
    #[arg(long)]
    shapes: bool,
    /// The job
    #[command(flatten)]
    request: Request,
}

/// One call's figures: its kind, and how long it took each time.
struct Timed {
    kind: String,
    /// Part of a block's forward: what recomputing would run again.
    recomputable: bool,
    predicted: f64,
    flops: u64,
    bytes: u64,
    seconds: Vec<f64>,
}

impl Timed {
    fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }
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
    let settings = args.request.or(shape).resolve(u64::MAX)?;
    let threads = settings.threads;
    let text = Text::generated(&settings)?;
    let plan = tightfit::Job::plan(settings, None)?.plan;
    let cpu = Cpu::new(Pool::new(threads, tightfit_exec::STACK_BYTES)?);
    let mut arena = Arena::map(plan.peak())?;
    // Every page is resident before anything is timed.
    arena.fill(cpu.pool());
    for (tensor, &offset) in plan.liveness().persistent.iter().zip(plan.persistent_offsets()) {
        let data = arena.slice_mut(offset..offset + tensor.ty.bytes());
        tightfit_exec::init::fill(cpu.pool(), data, 0, tensor.init, 1, &tensor.name);
    }
    let calibration = tightfit::calibration::for_machine(cpu.target().isa, threads);
    println!(
        "predicted from {} speeds",
        if calibration.measured { "measured" } else { "assumed" }
    );
    let mut target = cpu.target().clone();
    target.profile = calibration.profile;
    let programs = plan.calls(0);
    let mut timed: Vec<Vec<Timed>> = (0..programs.len())
        .map(|index| describe(&plan, index, &programs[index], &target, args.shapes))
        .collect();
    let mut steps = Vec::new();
    for _ in 0..args.repeats.max(1) {
        let step = Instant::now();
        for (program, timed) in programs.iter().zip(&mut timed) {
            for _ in 0..program.repeat {
                feed(&mut arena, program, &text)?;
                for (call, timed) in program.calls().zip(timed.iter_mut()) {
                    let started = Instant::now();
                    // SAFETY: the plan was validated and the arena holds it.
                    unsafe { cpu.run(arena.as_ptr(), call) };
                    timed.seconds.push(started.elapsed().as_secs_f64());
                }
            }
        }
        steps.push(step.elapsed().as_secs_f64());
    }
    let calls = programs.iter().zip(&timed);
    report(calls.flat_map(|(program, timed)| timed.iter().map(|timed| (f64::from(program.repeat), timed))));
    steps.sort_by(f64::total_cmp);
    println!(
        "a step took {:.3} s (median of {})",
        steps[steps.len() / 2],
        steps.len()
    );
    Ok(())
}

/// What is known of a program's calls before they run.
fn describe(plan: &Plan, index: usize, program: &ProgramCalls, target: &dyn Target, shapes: bool) -> Vec<Timed> {
    let graph = &plan.step().routines[0].programs[index].graph;
    let view = |op: &Op| op.aliases().iter().any(|alias| alias.kind == AliasKind::View);
    let nodes = plan.order(0, index).iter().map(|&id| graph.node(id));
    let nodes = nodes.filter(|node| !view(&node.op));
    let describe = |(node, call): (&tightfit_ir::Node, &Call)| {
        let (inputs, outputs) = (types(&call.inputs), types(&call.outputs));
        let cost = call.op.cost(&inputs, &outputs);
        let once = matches!(
            call.op,
            Op::LinearCrossEntropy(_) | Op::SoftmaxCrossEntropy(_) | Op::Embedding(_) | Op::RopeTable(_)
        );
        let mut kind = call.op.name().to_owned();
        if shapes {
            let operands = inputs.iter().take(2).map(|ty| format!(" {ty}"));
            kind.extend(operands);
        }
        Timed {
            kind,
            recomputable: node.phase == Phase::Forward && !once,
            predicted: target.seconds(&call.op, &inputs, &outputs),
            flops: cost.flops,
            bytes: cost.bytes,
            seconds: Vec::new(),
        }
    };
    nodes.zip(program.calls()).map(describe).collect()
}

fn types(slots: &[Slot]) -> Vec<&Type> {
    slots.iter().map(|slot| &slot.ty).collect()
}

/// Sums over calls.
#[derive(Default)]
struct Sum {
    seconds: f64,
    predicted: f64,
    flops: f64,
    bytes: f64,
}

impl Sum {
    fn add(&mut self, repeat: f64, call: &Timed) {
        self.seconds += repeat * call.median();
        self.predicted += repeat * call.predicted;
        self.flops += repeat * call.flops as f64;
        self.bytes += repeat * call.bytes as f64;
    }

    fn line(&self, name: &str, width: usize, total: f64) -> String {
        format!(
            "{name:<width$}{:>9.3}{:>7.1}%{:>10.1}{:>8.1}{:>11.3}{:>7.2}",
            self.seconds,
            100.0 * self.seconds / total,
            self.flops / self.seconds / 1e9,
            self.bytes / self.seconds / 1e9,
            self.predicted,
            self.predicted / self.seconds
        )
    }
}

/// A line for each kind, the slowest first, and the sums.
fn report<'a>(calls: impl Iterator<Item = (f64, &'a Timed)>) {
    let mut kinds: BTreeMap<&str, Sum> = BTreeMap::new();
    let (mut forward, mut all) = (Sum::default(), Sum::default());
    for (repeat, call) in calls {
        kinds.entry(&call.kind).or_default().add(repeat, call);
        all.add(repeat, call);
        if call.recomputable {
            forward.add(repeat, call);
        }
    }
    let mut rows: Vec<_> = kinds.into_iter().collect();
    rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    let width = rows.iter().map(|row| row.0.len()).max().unwrap_or(0).max(32);
    println!(
        "{:<width$}{:>9}{:>8}{:>10}{:>8}{:>11}{:>7}",
        "operation", "s", "share", "GFLOP/s", "GB/s", "predicted", "ratio"
    );
    for (name, sum) in &rows {
        println!("{}", sum.line(name, width, all.seconds));
    }
    println!("{}", forward.line("the blocks' forward", width, all.seconds));
    println!("{}", all.line("all", width, all.seconds));
}

/// Writes a batch and a count of 1 for every scalar: what the scalars are does not change the time.
fn feed(arena: &mut Arena, program: &ProgramCalls, text: &Text) -> Result<(), Box<dyn Error>> {
    let range = |slot: &Slot| slot.offset..slot.offset + slot.ty.bytes();
    for (_, slot) in program.fed.iter().filter(|(_, slot)| slot.ty.dtype == DType::F32) {
        arena.slice_mut::<f32>(range(slot)).fill(1.0);
    }
    let ids =
        ["tokens", "targets", "positions", "doc_start"].map(|name| program.fed.iter().find(|(fed, _)| fed == name));
    if let [Some(a), Some(b), Some(c), Some(d)] = ids {
        let [tokens, targets, positions, doc_start] = arena.slices_mut([a, b, c, d].map(|(_, slot)| range(slot)));
        let mut buffers = BatchBuffers {
            tokens,
            targets,
            positions,
            doc_start,
        };
        text.fill(Split::Train, 0, &mut buffers)?;
    }
    Ok(())
}
