//! How long one operation takes, measured as a session runs it: through [`Cpu::run`], on operands that are not in the cache.

use std::time::{Duration, Instant};

use tightfit_ir::op::{AliasKind, Cost, Op, Rule};
use tightfit_ir::{Call, DType, Slot, Target, Type};

use crate::run::Cpu;
use crate::target::{ALIGNMENT, size};

/// Sets of operands take turns until all of them are at least so large: what a step reads was written a while ago.
const COLD_BYTES: u64 = 64 << 20;
/// But no more sets than this, so that small operations are set up quickly.
const MAX_SETS: u64 = 64;
/// How often an operation runs at least, unless it takes [`PATIENCE`] times as long as it should.
const OFTEN: usize = 7;
const PATIENCE: u32 = 5;

/// What one run of an operation comes to.
pub(super) struct Run {
    /// The median.
    pub seconds: f64,
    pub cost: Cost,
}

impl Run {
    /// Per second.
    pub fn flops(&self) -> f64 {
        self.cost.flops as f64 / self.seconds
    }

    /// Per second.
    pub fn bytes(&self) -> f64 {
        self.cost.bytes as f64 / self.seconds
    }
}

/// Runs `op` on operands of these types for about `span`, in memory that is allocated for it and given back.
///
/// # Panics
/// The operands do not fit the operation.
pub(super) fn measure(cpu: &Cpu, span: Duration, op: impl Into<Op>, inputs: &[Type]) -> Run {
    let op = op.into();
    // The caller's contract: operands are written down in `calibrate.rs`, and its test runs every one.
    let outputs = op.infer(inputs).expect("operands fit their operation");
    let cost = op.cost(&inputs.iter().collect::<Vec<_>>(), &outputs.iter().collect::<Vec<_>>());
    let mut memory = Memory::new(cpu, &op, inputs, &outputs);
    let mut times = Vec::new();
    let started = Instant::now();
    for turn in 0.. {
        let set = turn % memory.calls.len();
        let begun = Instant::now();
        memory.run(cpu, set);
        // The first turn faults the results' pages in.
        if turn > 0 {
            times.push(begun.elapsed());
            let elapsed = started.elapsed();
            if elapsed >= span && (times.len() >= OFTEN || elapsed >= span * PATIENCE) {
                break;
            }
        }
    }
    times.sort_unstable();
    let seconds = times[times.len() / 2].as_secs_f64();
    Run { seconds, cost }
}

/// Sets of operands in one allocation, with results and a workspace that they share: a plan writes to where it has read lately.
struct Memory {
    words: Vec<u32>,
    /// Where the first aligned byte is.
    start: usize,
    bytes: usize,
    calls: Vec<Call>,
}

impl Memory {
    fn new(cpu: &Cpu, op: &Op, inputs: &[Type], outputs: &[Type]) -> Self {
        let mut next = 0_u64;
        let mut place = |bytes: u64| {
            let offset = next;
            next = (next + bytes).next_multiple_of(ALIGNMENT);
            offset
        };
        let set: u64 = inputs.iter().map(Type::bytes).sum();
        let sets = COLD_BYTES / set.max(1) + 1;
        let types: (Vec<_>, Vec<_>) = (inputs.iter().collect(), outputs.iter().collect());
        let workspace = cpu.target().workspace(op, &types.0, &types.1);
        let scratch = place(workspace);
        let mut slot = |ty: &Type| Slot {
            offset: place(ty.bytes()),
            ty: ty.clone(),
        };
        let results: Vec<_> = outputs.iter().map(&mut slot).collect();
        let calls = (0..sets.clamp(2, MAX_SETS)).map(|_| {
            let operands: Vec<_> = inputs.iter().map(&mut slot).collect();
            let updated = |output| updated(op, output).map(|input| operands[input].clone());
            let results = results.iter().enumerate();
            Call {
                op: op.clone(),
                outputs: results
                    .map(|(output, slot)| updated(output).unwrap_or_else(|| slot.clone()))
                    .collect(),
                inputs: operands.clone(),
                workspace: scratch..scratch + workspace,
            }
        });
        let calls: Vec<_> = calls.collect();
        let (bytes, align) = (size(next), size(ALIGNMENT));
        let words = vec![0; (bytes + align).div_ceil(4)];
        let start = words.as_ptr().align_offset(align) * 4;
        let mut memory = Self {
            words,
            start,
            bytes,
            calls,
        };
        memory.fill();
        memory
    }

    /// Floats between 0.25 and 0.75 that look random, as multipliers take longer on those than on equal ones; integers are 0,
    /// which is a token, a target and the start of a document.
    fn fill(&mut self) {
        let floats = |slot: &&Slot| slot.ty.dtype == DType::F32;
        for call in &self.calls {
            for slot in call.inputs.iter().filter(floats) {
                let first = (self.start + size(slot.offset)) / 4;
                let words = &mut self.words[first..first + size(slot.ty.shape.elements())];
                let mut random = 0x9E37_79B9_u32;
                for word in words {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    *word = (0.25 + (random >> 8) as f32 / (1 << 25) as f32).to_bits();
                }
            }
        }
    }

    fn run(&mut self, cpu: &Cpu, set: usize) {
        let arena = self.words[self.start / 4..][..self.bytes.div_ceil(4)]
            .as_mut_ptr()
            .cast();
        // SAFETY: `place` laid every slot and the workspace aligned into `bytes` bytes, apart but for results that update their
        // operand as the operation permits; the memory is borrowed mutably; integers are valid for every operation.
        unsafe { cpu.run(arena, &self.calls[set]) };
    }
}

/// The operand that a result is written over in a step's plan: state and accumulated gradients.
fn updated(op: &Op, output: usize) -> Option<usize> {
    let state = matches!(op, Op::AdamW(_) | Op::AdamW8bit(_));
    let accumulated = op.accumulating(output).is_some_and(|(same, _)| same == *op);
    let mut aliases = op.aliases().into_iter();
    let alias = aliases.find(|alias| alias.output == output && alias.kind == AliasKind::InPlace)?;
    (state || accumulated).then_some(alias.input)
}
