//! The operation suite on the CPU backend: every instruction set of this machine, results also equal for any number of threads.

use proptest::prelude::*;
use tightfit_cpu::Cpu;
use tightfit_cpu::pool::Pool;
use tightfit_cpu::simd::Isa;
use tightfit_cpu::target::CpuTarget;
use tightfit_ir::op::Alias;
use tightfit_ir::{Call, DType, Op, Slot, Target, Tensor, Type};
use tightfit_testkit::suite::{Backend, Case, any_case, check, check_all, edge_cases};

/// What no kernel computes: fills everything before a run.
const GARBAGE: u8 = 0xA5;
const ALIGNMENT: u64 = 64;

/// Runs cases in an arena in which all buffers lie apart, with unused bytes between them.
struct Arena(Cpu);

/// Hands out offsets.
struct Layout {
    next: u64,
}

impl Layout {
    fn place(&mut self, bytes: u64) -> u64 {
        let offset = self.next;
        self.next = (offset + bytes).next_multiple_of(ALIGNMENT) + ALIGNMENT;
        offset
    }

    fn slot(&mut self, ty: &Type) -> Slot {
        Slot {
            offset: self.place(ty.bytes()),
            ty: ty.clone(),
        }
    }
}

impl Backend for Arena {
    fn run(&mut self, case: &Case, aliases: &[Alias]) -> Result<Vec<Vec<f32>>, String> {
        let results = case.results();
        let types: (Vec<&Type>, Vec<&Type>) = (case.types.iter().collect(), results.iter().collect());
        let workspace = self.0.target().workspace(&case.op, &types.0, &types.1);
        let mut layout = Layout { next: ALIGNMENT };
        let inputs: Vec<Slot> = case.types.iter().map(|ty| layout.slot(ty)).collect();
        let outputs: Vec<Slot> = (0..results.len())
            .map(|output| match aliases.iter().find(|alias| alias.output == output) {
                Some(alias) => Slot {
                    offset: inputs[alias.input].offset,
                    ty: results[output].clone(),
                },
                None => layout.slot(&results[output]),
            })
            .collect();
        let scratch = layout.place(workspace);
        let call = Call {
            op: case.op.clone(),
            inputs,
            outputs,
            workspace: scratch..scratch + workspace,
        };

        let size = layout.next as usize;
        let mut memory = vec![GARBAGE; size + ALIGNMENT as usize];
        let start = memory.as_ptr().align_offset(ALIGNMENT as usize);
        let arena = &mut memory[start..start + size];
        for (index, (slot, tensor)) in call.inputs.iter().zip(&case.inputs).enumerate() {
            let bytes = match &case.quantised {
                Some(quantised) if quantised.operand == index => quantised.bytes.clone(),
                _ => encode(slot.ty.dtype, &tensor.data),
            };
            arena[slot.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        let before = arena.to_vec();
        // SAFETY: every slot and the workspace lie inside of the arena, aligned; results lie over operands only as the case's
        // aliases say, and nothing else has the memory.
        unsafe { self.0.run(arena.as_mut_ptr(), &call) };

        let mut writable = vec![false; size];
        let written = call
            .outputs
            .iter()
            .map(|slot| (slot.offset, slot.ty.bytes()))
            .chain([(scratch, workspace)]);
        for (offset, bytes) in written {
            writable[offset as usize..][..bytes as usize].fill(true);
        }
        if let Some(at) = (0..size).find(|&at| !writable[at] && arena[at] != before[at]) {
            return Err(format!("byte {at} was written, which belongs to no result: {call:?}"));
        }
        if workspace > 0 && arena[(scratch + workspace) as usize - 1] == GARBAGE {
            return Err("the workspace's last byte was not written".to_owned());
        }
        let read = |slot: &Slot| {
            decode(
                slot.ty.dtype,
                &arena[slot.offset as usize..][..slot.ty.stored_bytes() as usize],
            )
        };
        Ok(call.outputs.iter().map(read).collect())
    }

    fn operands(&self, case: &Case) -> Vec<Tensor> {
        let mut operands = case.inputs.clone();
        let linear = matches!(case.op, Op::Linear(_) | Op::LinearBackwardInput(_));
        if linear && self.0.target().isa.multiplies_bf16() && case.types[0].dtype == DType::Bf16 {
            // Through `f32`, which each number is: `from_f64` does not see the last bits of that.
            let weight = operands[1].data.iter_mut();
            weight.for_each(|x| *x = half::bf16::from_f32(*x as f32).to_f64());
        }
        operands
    }
}

/// Numbers as an operand of that dtype holds them.
fn encode(dtype: DType, numbers: &[f64]) -> Vec<u8> {
    let bits = |bits: u16| bits.to_ne_bytes().to_vec();
    let encode = |x: f64| match dtype {
        DType::F32 => (x as f32).to_ne_bytes().to_vec(),
        DType::Bf16 => bits(half::bf16::from_f64(x).to_bits()),
        DType::F16 => bits(half::f16::from_f64(x).to_bits()),
        DType::I32 => (x as i32).to_ne_bytes().to_vec(),
        DType::U8 => vec![x as u8],
        DType::Block(block) => panic!("{block} has no single elements"),
    };
    numbers.iter().flat_map(|&x| encode(x)).collect()
}

/// The numbers of a result of that dtype.
fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let (words, halves) = (bytes.as_chunks::<4>().0.iter(), bytes.as_chunks::<2>().0.iter());
    match dtype {
        DType::F32 => words.map(|&word| f32::from_ne_bytes(word)).collect(),
        DType::Bf16 => halves.map(|&half| half::bf16::from_ne_bytes(half).to_f32()).collect(),
        DType::F16 => halves.map(|&half| half::f16::from_ne_bytes(half).to_f32()).collect(),
        DType::I32 => words.map(|&word| i32::from_ne_bytes(word) as f32).collect(),
        DType::U8 => bytes.iter().map(|&byte| f32::from(byte)).collect(),
        DType::Block(block) => panic!("no operation makes {block}"),
    }
}

fn backends() -> impl Iterator<Item = (Isa, Arena)> {
    let pool = |threads| Pool::new(threads, 1 << 20).unwrap();
    Isa::available()
        .iter()
        .map(move |&isa| (isa, Arena(Cpu::with_isa(pool(2), isa))))
}

#[test]
fn every_edge_case() {
    let cases = edge_cases();
    for (isa, mut backend) in backends() {
        println!("{isa:?}");
        check_all(&mut backend, &cases);
    }
}

#[test]
fn an_instruction_set_that_this_machine_has_not_is_never_run() {
    for isa in Isa::ALL {
        let cpu = Cpu::with_isa(Pool::new(1, 1 << 20).unwrap(), isa);
        let runs = cpu.target().isa;
        assert!(Isa::available().contains(&runs), "{runs:?}");
        assert_eq!(runs == isa, Isa::available().contains(&isa), "{isa:?}");
        assert_eq!(cpu.target(), &CpuTarget::with_isa(runs, 1));
    }
}

#[test]
fn threads_do_not_change_bits() {
    for &isa in Isa::available() {
        let mut backends = [1, 2, 3].map(|threads| Arena(Cpu::with_isa(Pool::new(threads, 1 << 20).unwrap(), isa)));
        for case in edge_cases() {
            let [one, rest @ ..] = &mut backends;
            let bits =
                |results: Vec<Vec<f32>>| -> Vec<u32> { results.concat().into_iter().map(f32::to_bits).collect() };
            // Views have to lie over their operands; whatever else can is left apart.
            let placement = &tightfit_testkit::suite::placements(&case.op)[0];
            let expected = bits(one.run(&case, placement).unwrap());
            for backend in rest {
                assert_eq!(
                    bits(backend.run(&case, placement).unwrap()),
                    expected,
                    "{case}, {isa:?}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn random_cases(case in any_case()) {
        for (_, mut backend) in backends() {
            prop_assert_eq!(check(&mut backend, &case), Ok(()));
        }
    }
}
