//! Where a step's time goes: seconds, share and speed of each kind of operation, on a SmolLM2-135M-shaped step.
//!
//! `cargo run --release --example profile [-- BATCH SEQ LAYERS THREADS]`

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Instant;

use tightfit::data::{BatchBuffers, Split, Text};
use tightfit::op::Rule;
use tightfit::{DType, Request, Type};
use tightfit_cpu::{Cpu, pool::Pool};
use tightfit_exec::Arena;
use tightfit_ir::Slot;
use tightfit_plan::ProgramCalls;

fn main() -> Result<(), Box<dyn Error>> {
    let mut sizes = std::env::args().skip(1).map(|arg| arg.parse::<u64>());
    let mut size = |default| sizes.next().unwrap_or(Ok(default));
    let (batch, seq, layers, threads) = (size(4)?, size(512)?, size(30)?, size(2)? as usize);
    let settings = Request {
        vocab_size: Some(49152),
        hidden_size: Some(576),
        intermediate_size: Some(1536),
        num_hidden_layers: Some(layers),
        num_attention_heads: Some(9),
        num_key_value_heads: Some(3),
        batch: Some(batch),
        seq: Some(seq),
        threads: Some(threads),
        ..Request::default()
    };
    let settings = settings.resolve(u64::MAX)?;
    let text = Text::generated(&settings)?;
    let plan = tightfit::Job::plan(settings, None)?.plan;
    let cpu = Cpu::new(Pool::new(threads, tightfit_exec::STACK_BYTES)?);
    let mut arena = Arena::map(plan.peak())?;
    // Every page is resident before anything is timed.
    arena.fill(cpu.pool());
    for (tensor, &offset) in plan.liveness().persistent.iter().zip(plan.persistent_offsets()) {
        let data = arena.slice_mut(offset..offset + tensor.ty.bytes());
        tightfit_exec::init::fill(cpu.pool(), data, tensor.init, 1, &tensor.name);
    }
    let mut kinds: BTreeMap<&str, (f64, u64, u64)> = BTreeMap::new();
    for program in plan.calls(0) {
        feed(&mut arena, &program, &text)?;
        for call in &program.calls {
            let started = Instant::now();
            // SAFETY: the plan was validated and the arena holds it.
            unsafe { cpu.run(arena.as_ptr(), call) };
            let types = |slots: &[Slot]| slots.iter().map(|slot| slot.ty.clone()).collect::<Vec<Type>>();
            let (inputs, outputs) = (types(&call.inputs), types(&call.outputs));
            let cost = call
                .op
                .cost(&inputs.iter().collect::<Vec<_>>(), &outputs.iter().collect::<Vec<_>>());
            let kind = kinds.entry(call.op.name()).or_default();
            kind.0 += started.elapsed().as_secs_f64();
            kind.1 += cost.flops;
            kind.2 += cost.bytes;
        }
    }
    let total: f64 = kinds.values().map(|kind| kind.0).sum();
    let mut rows: Vec<_> = kinds.into_iter().collect();
    rows.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    println!(
        "{:<32}{:>9}{:>8}{:>10}{:>8}",
        "operation", "s", "share", "GFLOP/s", "GB/s"
    );
    for (name, (seconds, flops, bytes)) in rows {
        println!(
            "{name:<32}{seconds:>9.3}{:>7.1}%{:>10.1}{:>8.1}",
            100.0 * seconds / total,
            flops as f64 / seconds / 1e9,
            bytes as f64 / seconds / 1e9
        );
    }
    println!("{:<32}{total:>9.3}", "all");
    Ok(())
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
