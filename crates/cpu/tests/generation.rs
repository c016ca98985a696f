//! Generation through a plan: a cache that is updated in place and then read, by one program for the prompt and one for each token.

use tightfit_cpu::Cpu;
use tightfit_cpu::pool::Pool;
use tightfit_ir::op::{CachedAttention, KvAppend};
use tightfit_ir::{Binding, Graph, Init, OutputKind, Phase, Program, Role, Routine, Slot, Step, Type};
use tightfit_plan::place::Effort;
use tightfit_plan::plan::{Layout, Plan, plan};
use tightfit_plan::{ProgramCalls, Storage, schedule};

const CAPACITY: u64 = 24;
const PROMPT: u64 = 13;
const WIDTH: u64 = 8;

/// `rows` new tokens whose queries, keys and values are fed: both caches are appended to, then attended to.
fn attend(rows: u64) -> Graph {
    let mut graph = Graph::new();
    let fed = |graph: &mut Graph, name, ty| graph.input(name, ty, Role::Input, Binding::Fed);
    let [q, k, v] = ["q", "k", "v"].map(|name| fed(&mut graph, name, Type::f32([rows, WIDTH])));
    let start = fed(&mut graph, "start", Type::i32([1]));
    let binding = Binding::Persistent {
        init: Init::Zeros,
        trainable: false,
    };
    let [k, v] = [("k_cache", k), ("v_cache", v)].map(|(name, new)| {
        let cache = graph.input(name, Type::f32([CAPACITY, WIDTH]), Role::KvCache, binding);
        let operands = [cache, new, start];
        let made = graph.push(
            KvAppend {}.into(),
            &operands,
            &"attention".into(),
            Phase::Forward,
            Role::KvCache,
        );
        let now = made.unwrap()[0];
        graph.output(&format!("{name}.now"), now, OutputKind::Update(cache));
        now
    });
    let attention = CachedAttention {
        heads: 2,
        kv_heads: 2,
        head_dim: WIDTH / 2,
        scale: 0.5,
        window: None,
    };
    let made = graph.push(
        attention.into(),
        &[q, k, v, start],
        &"attention".into(),
        Phase::Forward,
        Role::Activation,
    );
    graph.output("o", made.unwrap()[0], OutputKind::Read);
    graph
}

fn planned(cpu: &Cpu) -> Plan {
    let routine = |name: &str, rows| Routine {
        name: name.to_owned(),
        programs: vec![Program {
            name: name.to_owned(),
            repeat: 1,
            graph: attend(rows),
        }],
    };
    let step = Step {
        routines: vec![routine("prompt", PROMPT), routine("token", 1)],
    };
    step.verify().unwrap();
    let schedule = schedule(step, cpu.target()).unwrap();
    let plan = plan(schedule, cpu.target(), Layout::Shared, Effort::default()).unwrap();
    plan.validate().unwrap();
    plan
}

struct Session<'a> {
    cpu: &'a Cpu,
    memory: Vec<u8>,
}

impl<'a> Session<'a> {
    fn new(cpu: &'a Cpu, plan: &Plan) -> Self {
        let memory = vec![0; (plan.peak() + plan.alignment()) as usize];
        Self { cpu, memory }
    }

    fn arena(&mut self) -> *mut u8 {
        let start = self.memory.as_ptr().align_offset(64);
        self.memory[start..].as_mut_ptr()
    }

    fn at(&mut self, slot: &Slot) -> *mut u8 {
        // SAFETY: a plan's slots lie inside of its arena.
        unsafe { self.arena().add(slot.offset as usize) }
    }

    /// Runs one program on tokens that start at `first`; gives its `o`.
    fn run(&mut self, program: &ProgramCalls, first: u64) -> Vec<f32> {
        for (name, slot) in &program.fed {
            let elements = slot.ty.shape.elements() as usize;
            let to = self.at(slot);
            for i in 0..elements {
                // SAFETY: element `i` of the slot, which is aligned.
                unsafe {
                    match &**name {
                        "start" => to.cast::<i32>().add(i).write(first as i32),
                        _ => to.cast::<f32>().add(i).write(data(name, first * WIDTH + i as u64)),
                    }
                }
            }
        }
        for call in program.calls() {
            // SAFETY: a valid plan's call in its arena.
            unsafe { self.cpu.run(self.arena(), call) };
        }
        let (name, slot) = &program.read[0];
        assert_eq!(name, "o");
        let from = self.at(slot).cast::<f32>();
        // SAFETY: the slot's elements.
        (0..slot.ty.shape.elements() as usize)
            .map(|i| unsafe { *from.add(i) })
            .collect()
    }
}

/// Element `i` of all tokens' queries, keys or values.
fn data(name: &str, i: u64) -> f32 {
    let seed = u64::from(name.as_bytes()[0]);
    ((i * 7 + seed * 13) % 29) as f32 / 29.0 - 0.5
}

#[test]
fn a_cache_keeps_its_bytes_in_every_program_and_is_written_in_place() {
    let cpu = Cpu::new(Pool::new(1, 1 << 20).unwrap());
    let plan = planned(&cpu);
    let names: Vec<&str> = plan.liveness().persistent.iter().map(|p| &*p.name).collect();
    assert_eq!(names, ["k_cache", "v_cache"]);
    for (routine, live) in plan.liveness().routines.iter().enumerate() {
        let graph = &plan.step().routines[routine].programs[0].graph;
        for output in &graph.outputs {
            if let OutputKind::Update(input) = output.kind {
                let storage = &live.programs[0].storage;
                assert_eq!(storage[output.value.index()], storage[input.index()]);
                assert!(matches!(storage[input.index()], Storage::Persistent(_)));
            }
        }
        assert!(live.buffers.iter().all(|buffer| buffer.role != Role::KvCache), "a copy");
    }
}

#[test]
fn a_prompt_and_then_tokens_give_the_same_bits_as_tokens_alone() {
    let cpu = Cpu::new(Pool::new(2, 1 << 20).unwrap());
    let plan = planned(&cpu);
    let [prompt, token] = [0, 1].map(|routine| plan.calls(routine).remove(0));
    let [mut whole, mut alone] = [(); 2].map(|()| Session::new(&cpu, &plan));
    let mut expected = whole.run(&prompt, 0);
    let mut one_by_one = Vec::new();
    for t in 0..CAPACITY {
        if t >= PROMPT {
            expected.extend(whole.run(&token, t));
        }
        one_by_one.extend(alone.run(&token, t));
    }
    assert_eq!(one_by_one, expected);
    // A first token attends to itself alone: its output is its value.
    let first: Vec<f32> = (0..WIDTH).map(|i| data("v", i)).collect();
    assert_eq!(expected[..WIDTH as usize], first);
    assert_ne!(expected[WIDTH as usize..][..WIDTH as usize], first);
}
