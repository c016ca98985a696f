//! Runs steps on any instruction set, number of threads and layout, with named tensors as data.

// Each test uses a part of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::Path;

use tightfit::{Cpu, CpuTarget, DType, Driver, Feed, Plan, Results, RunError, Session, Step};
use tightfit_cpu::{pool::Pool, simd::Isa};
use tightfit_exec::STACK_BYTES;
use tightfit_exec::persistent::TensorError;
use tightfit_ir::{Binding, OutputKind};
use tightfit_plan::{place::Effort, plan, plan::Layout, schedule};
use tightfit_testkit::interpret::Named;

/// How a step is run; results must not depend on `threads`, `layout` or `poison`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    pub isa: Isa,
    pub threads: usize,
    pub layout: Layout,
    pub poison: bool,
}

impl Machine {
    /// What jobs run on, but for the instruction set.
    pub fn new(isa: Isa, threads: usize) -> Self {
        Self {
            isa,
            threads,
            layout: Layout::Shared,
            poison: false,
        }
    }

    pub fn plan(&self, step: Step) -> Plan {
        let target = CpuTarget::with_isa(self.isa, self.threads);
        let schedule = schedule(step, &target).unwrap();
        plan(schedule, &target, self.layout, Effort::default()).unwrap()
    }

    /// A session, whose lower tier is beside the build.
    pub fn session(&self, step: Step) -> Session {
        let pool = Pool::new(self.threads, STACK_BYTES).unwrap();
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let mut session = Session::on(self.plan(step), Cpu::with_isa(pool, self.isa), Some(scratch)).unwrap();
        session.set_poison(self.poison);
        session
    }
}

/// The results that the session reads from one run of one program.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub program: String,
    pub results: BTreeMap<String, Vec<f32>>,
}

/// Feeds whatever a program asks for from named tensors and keeps everything it gives.
pub struct Recorder<F> {
    step: Step,
    data: F,
    pub runs: Vec<Run>,
}

impl<F: FnMut(&str, u32) -> Named> Recorder<F> {
    /// `data` gives the tensors for run `repeat` of a program; it may give more than the program asks for.
    pub fn new(session: &Session, data: F) -> Self {
        Self {
            step: session.plan().step().clone(),
            data,
            runs: Vec::new(),
        }
    }

    fn program(&self, name: &str) -> &tightfit_ir::Program {
        let mut programs = self.step.programs().map(|(_, program)| program);
        programs.find(|program| program.name == name).unwrap()
    }
}

impl<F: FnMut(&str, u32) -> Named> Driver for Recorder<F> {
    fn feed(&mut self, program: &str, repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        let data = (self.data)(program, repeat);
        for (_, value, binding) in self.program(program).graph.inputs() {
            if binding != Binding::Fed {
                continue;
            }
            let numbers = data[&*value.name].data.iter();
            match value.ty.dtype {
                DType::I32 => {
                    let [input] = feed.inputs::<i32, 1>([&*value.name])?;
                    input.iter_mut().zip(numbers).for_each(|(to, x)| *to = *x as i32);
                }
                _ => {
                    let [input] = feed.inputs::<f32, 1>([&*value.name])?;
                    input.iter_mut().zip(numbers).for_each(|(to, x)| *to = *x as f32);
                }
            }
        }
        Ok(())
    }

    fn read(&mut self, program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        let outputs = self.program(program).graph.outputs.iter();
        let read = outputs.filter(|output| output.kind == OutputKind::Read);
        let read = read.map(|output| Ok((output.name.to_string(), results.result(&output.name)?.to_vec())));
        let results = read.collect::<Result<_, RunError>>()?;
        self.runs.push(Run {
            program: program.to_owned(),
            results,
        });
        Ok(())
    }
}

/// Every persistent tensor's bytes, on whichever tier.
pub fn persistent_bytes(session: &mut Session) -> BTreeMap<String, Vec<u8>> {
    let tensors = session.plan().liveness().persistent.iter();
    let names: Vec<String> = tensors.map(|tensor| tensor.name.clone()).collect();
    let mut all = BTreeMap::new();
    for name in names {
        let mut values = Vec::new();
        let read = session.read(&name, |piece| -> Result<(), TensorError> {
            values.extend_from_slice(piece);
            Ok(())
        });
        read.unwrap();
        all.insert(name, values);
    }
    all
}

/// The numbers of every persistent tensor, on whichever tier; quantised ones, which nothing changes, are left out.
pub fn persistent(session: &mut Session) -> BTreeMap<String, Vec<f32>> {
    let numbers = |dtype, bytes: Vec<u8>| -> Option<Vec<f32>> {
        let (words, halves) = (bytes.as_chunks::<4>().0.iter(), bytes.as_chunks::<2>().0.iter());
        Some(match dtype {
            DType::F32 => words.map(|&word| f32::from_le_bytes(word)).collect(),
            DType::Bf16 => halves.map(|&half| half::bf16::from_le_bytes(half).to_f32()).collect(),
            DType::F16 => halves.map(|&half| half::f16::from_le_bytes(half).to_f32()).collect(),
            DType::U8 => bytes.into_iter().map(f32::from).collect(),
            DType::I32 | DType::Block(_) => return None,
        })
    };
    let all = persistent_bytes(session).into_iter();
    let all = all.filter_map(|(name, bytes)| {
        let numbers = numbers(session.persistent_type(&name)?.dtype, bytes)?;
        Some((name, numbers))
    });
    all.collect()
}

/// The step with gradients read by the session, where a job would carry them to the update.
pub fn with_gradients_read(mut step: Step) -> Step {
    let programs = step.routines.iter_mut().flat_map(|routine| &mut routine.programs);
    for output in programs.flat_map(|program| &mut program.graph.outputs) {
        if output.kind == OutputKind::Carry {
            output.kind = OutputKind::Read;
        }
    }
    step
}

/// The norm of the difference over the norm of what is expected.
pub fn relative_error(x: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(x.len(), expected.len());
    let square = |x: f64| x * x;
    let pairs = x.iter().zip(expected);
    let difference = pairs.map(|(&x, &y)| square(f64::from(x) - f64::from(y)));
    let norm = expected.iter().map(|&y| square(f64::from(y)));
    (difference.sum::<f64>() / norm.sum::<f64>()).sqrt()
}
