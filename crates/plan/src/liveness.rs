//! Which bytes each value occupies, and from when to when.
//!
//! A routine has one time line: the nodes of its programs, one after the other, each one step, and one more step at the end of each
//! program, when its results are read. A program that repeats stands on it
//! once; what it carries from one run to the next is alive through all of it. Values share a buffer when one is a view of another,
//! when a result takes over an input's storage, and where an operation may write a result over an operand that nothing reads again.

use std::collections::{HashMap, HashSet};

use tightfit_ir::graph::Label;
use tightfit_ir::op::{AliasKind, Rule};
use tightfit_ir::{
    Binding, Graph, Init, NodeId, OutputKind, Program, Role, Routine, Step, Target, Tier, Type, ValueId,
};

/// Whether results may lie over operands by choice. Views and updates always do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InPlace {
    /// Wherever the operation permits it and nothing reads the operand again.
    WherePossible,
    /// Never: every result has memory of its own. For comparison runs.
    Never,
}

/// A tensor that keeps its bytes for the whole job.
#[derive(Clone, Debug, PartialEq)]
pub struct Persistent {
    /// Unique in the step.
    pub name: String,
    /// Dtype and shape.
    pub ty: Type,
    /// Weight, optimizer state, ….
    pub role: Role,
    /// How it is filled.
    pub init: Init,
}

/// Memory of one routine with one lifetime.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// A name for people.
    pub label: Label,
    /// What it is for.
    pub role: Role,
    /// Where it is.
    pub tier: Tier,
    /// Its size.
    pub bytes: u64,
    /// First step of the routine's time line at which it is alive.
    pub start: u32,
    /// Last such step, inclusive.
    pub end: u32,
}

/// Where a value's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Index into [`Liveness::persistent`].
    Persistent(usize),
    /// Index into the routine's [`buffers`](RoutineLiveness::buffers).
    Buffer(usize),
}

/// The storage of one program's values.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramLiveness {
    /// The time step of its first node.
    pub start: u32,
    /// By value.
    pub storage: Vec<Storage>,
    /// By node: the buffer of its workspace.
    pub workspace: Vec<Option<usize>>,
}

/// One routine's buffers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutineLiveness {
    /// All transient memory of the routine.
    pub buffers: Vec<Buffer>,
    /// In the order they run.
    pub programs: Vec<ProgramLiveness>,
    /// Steps of the time line.
    pub steps: u32,
}

/// Everything a step keeps in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Liveness {
    /// In order of first appearance.
    pub persistent: Vec<Persistent>,
    /// As in the step.
    pub routines: Vec<RoutineLiveness>,
}

impl RoutineLiveness {
    /// Bytes of a tier's buffers alive at each step.
    pub fn live_bytes(&self, tier: Tier) -> Vec<u64> {
        let mut born = vec![0_u64; self.steps as usize + 1];
        let mut died = born.clone();
        for buffer in self.buffers.iter().filter(|buffer| buffer.tier == tier) {
            born[buffer.start as usize] = born[buffer.start as usize].saturating_add(buffer.bytes);
            died[buffer.end as usize + 1] = died[buffer.end as usize + 1].saturating_add(buffer.bytes);
        }
        let mut live = 0_u64;
        let steps = self.steps as usize;
        (0..steps)
            .map(|t| {
                live = live.saturating_sub(died[t]).saturating_add(born[t]);
                live
            })
            .collect()
    }
}

impl Liveness {
    /// A tier's persistent bytes and the most transient bytes alive there at one step of any routine.
    pub fn peak_live_bytes(&self, tier: Tier) -> u64 {
        let persistent = self.persistent.iter().filter(|p| p.ty.tier == tier);
        let persistent = persistent.fold(0_u64, |n, p| n.saturating_add(p.ty.bytes()));
        let live = self.routines.iter().flat_map(|r| r.live_bytes(tier));
        let transient = live.max().unwrap_or(0);
        persistent.saturating_add(transient)
    }
}

impl Liveness {
    /// Whether anything is on the lower tier.
    pub fn uses_lower_tier(&self) -> bool {
        let transient = self.routines.iter().flat_map(|r| &r.buffers).map(|buffer| buffer.tier);
        let mut tiers = self.persistent.iter().map(|tensor| tensor.ty.tier).chain(transient);
        tiers.any(|tier| tier == Tier::Lower)
    }
}

/// Finds every buffer of a step whose programs run in these orders.
pub fn analyse(step: &Step, orders: &[Vec<NodeId>], target: &dyn Target, in_place: InPlace) -> Liveness {
    let mut liveness = Liveness::default();
    let mut names = HashMap::new();
    let mut orders = orders.iter();
    for routine in &step.routines {
        let mut builder = RoutineBuilder::new(routine, target, in_place);
        for (index, order) in orders.by_ref().take(routine.programs.len()).enumerate() {
            let positions = positions(&routine.programs[index].graph, order);
            builder.positions.push(positions);
        }
        builder.carried_ends();
        for index in 0..routine.programs.len() {
            builder.program(index, &mut liveness.persistent, &mut names);
        }
        liveness.routines.push(builder.result);
    }
    liveness
}

/// By node: its place in the order.
fn positions(graph: &Graph, order: &[NodeId]) -> Vec<u32> {
    let mut positions = vec![0; graph.nodes.len()];
    for (place, id) in order.iter().enumerate() {
        positions[id.index()] = place as u32;
    }
    positions
}

/// Steps that a program takes on the time line: one for each node, and one at the end in which its results are read.
fn steps(program: &Program) -> u32 {
    program.graph.nodes.len() as u32 + 1
}

struct RoutineBuilder<'a> {
    routine: &'a Routine,
    target: &'a dyn Target,
    in_place: InPlace,
    /// By program, by node.
    positions: Vec<Vec<u32>>,
    starts: Vec<u32>,
    /// By carried name: the last step at which any program touches it.
    carried_ends: HashMap<&'a str, u32>,
    /// By carried name: its buffer.
    carried: HashMap<&'a str, usize>,
    result: RoutineLiveness,
}

impl<'a> RoutineBuilder<'a> {
    fn new(routine: &'a Routine, target: &'a dyn Target, in_place: InPlace) -> Self {
        let mut starts = Vec::new();
        let mut at = 0;
        for program in &routine.programs {
            starts.push(at);
            at += steps(program);
        }
        Self {
            routine,
            target,
            in_place,
            positions: Vec::new(),
            starts,
            carried_ends: HashMap::new(),
            carried: HashMap::new(),
            result: RoutineLiveness {
                steps: at,
                ..RoutineLiveness::default()
            },
        }
    }

    fn end_of(&self, program: usize) -> u32 {
        self.starts[program] + steps(&self.routine.programs[program]) - 1
    }

    /// How long each carried name lives: to its last reader, or through the whole of a program that repeats.
    fn carried_ends(&mut self) {
        for (index, program) in self.routine.programs.iter().enumerate() {
            let graph = &program.graph;
            let reads = self.last_reads(index);
            let updated: HashSet<ValueId> = graph
                .outputs
                .iter()
                .filter_map(|output| match output.kind {
                    OutputKind::Update(input) => Some(input),
                    _ => None,
                })
                .collect();
            for (id, value, binding) in graph.inputs() {
                if binding != Binding::Carried {
                    continue;
                }
                let end = if program.repeat > 1 || updated.contains(&id) {
                    self.end_of(index)
                } else {
                    reads[id.index()].unwrap_or(self.starts[index])
                };
                let last = self.carried_ends.entry(&value.name).or_insert(end);
                *last = end.max(*last);
            }
        }
    }

    /// By value: the last step at which a node of the program reads it.
    fn last_reads(&self, program: usize) -> Vec<Option<u32>> {
        let graph = &self.routine.programs[program].graph;
        let mut reads: Vec<Option<u32>> = vec![None; graph.values.len()];
        for (node, position) in graph.nodes.iter().zip(&self.positions[program]) {
            for input in &node.inputs {
                let read = &mut reads[input.index()];
                *read = (*read).max(Some(self.starts[program] + position));
            }
        }
        reads
    }

    fn program(&mut self, index: usize, persistent: &mut Vec<Persistent>, names: &mut HashMap<&'a str, usize>) {
        let Program { graph, repeat, .. } = &self.routine.programs[index];
        let (start, end) = (self.starts[index], self.end_of(index));
        let mut reads = self.last_reads(index);
        for output in &graph.outputs {
            let until = match output.kind {
                OutputKind::Read | OutputKind::Update(_) => end,
                OutputKind::Carry => self.carried_ends.get(&*output.name).copied().unwrap_or(end).max(end),
            };
            let read = &mut reads[output.value.index()];
            *read = if output.kind == OutputKind::Carry && *repeat == 1 {
                // Alive to its last reader; a gradient that no later program reads dies where it is made.
                (*read).max(self.carried_ends.get(&*output.name).copied())
            } else {
                (*read).max(Some(until))
            };
        }

        let mut storage: Vec<Option<Storage>> = vec![None; graph.values.len()];
        for (id, value, binding) in graph.inputs() {
            let place = match binding {
                Binding::Persistent { init, .. } => {
                    let slot = *names.entry(&*value.name).or_insert_with(|| {
                        persistent.push(Persistent {
                            name: value.name.to_string(),
                            ty: value.ty.clone(),
                            role: value.role,
                            init,
                        });
                        persistent.len() - 1
                    });
                    Storage::Persistent(slot)
                }
                Binding::Carried => Storage::Buffer(self.carried[&*value.name]),
                Binding::Fed => {
                    let last = reads[id.index()].unwrap_or(start);
                    Storage::Buffer(self.buffer(graph, id, start, last))
                }
            };
            storage[id.index()] = Some(place);
        }
        for output in &graph.outputs {
            if let OutputKind::Update(input) = output.kind {
                for value in graph.in_place_path(output.value, input).unwrap_or_default() {
                    storage[value.index()] = storage[input.index()];
                }
            }
        }

        // In-place choices must not overwrite inputs, nor what took over their storage: these are all buffers so far.
        let pinned = self.result.buffers.len();
        let mut order: Vec<usize> = (0..graph.nodes.len()).collect();
        order.sort_unstable_by_key(|&node| self.positions[index][node]);
        let mut workspace = vec![None; graph.nodes.len()];
        for node in order {
            let time = start + self.positions[index][node];
            self.results(graph, node, time, &reads, &mut storage, pinned);
            workspace[node] = self.workspace(graph, node, time);
        }
        for output in &graph.outputs {
            if let (OutputKind::Carry, Some(Storage::Buffer(buffer))) = (output.kind, storage[output.value.index()]) {
                self.carried.insert(&output.name, buffer);
                if *repeat > 1 {
                    self.result.buffers[buffer].start = start;
                }
            }
        }
        self.result.programs.push(ProgramLiveness {
            start,
            // Every value is an input or some node's result, as `verify` has checked.
            storage: storage.into_iter().flatten().collect(),
            workspace,
        });
    }

    /// Gives the results of one node their storage.
    fn results(
        &mut self,
        graph: &Graph,
        node: usize,
        time: u32,
        reads: &[Option<u32>],
        storage: &mut [Option<Storage>],
        pinned: usize,
    ) {
        let node = &graph.nodes[node];
        let aliases = node.op.aliases();
        let mut taken = Vec::new();
        for (output, &id) in node.outputs.iter().enumerate() {
            let last = reads[id.index()].map_or(time, |read| read.max(time));
            if let Some(place) = storage[id.index()] {
                self.extend(place, last);
                continue;
            }
            let choice = aliases.iter().filter(|alias| alias.output == output).find_map(|alias| {
                let operand = node.inputs[alias.input];
                let place = storage[operand.index()]?;
                if alias.kind == AliasKind::View {
                    return Some(place);
                }
                let Storage::Buffer(buffer) = place else {
                    return None;
                };
                let readers = node.inputs.iter().filter(|v| storage[v.index()] == Some(place)).count();
                let free = self.result.buffers[buffer].end == time
                    && buffer >= pinned
                    && !taken.contains(&buffer)
                    && readers == 1
                    && graph.ty(operand).bytes() == graph.ty(id).bytes();
                (self.in_place == InPlace::WherePossible && free).then_some(place)
            });
            let place = match choice {
                Some(place) => {
                    self.extend(place, last);
                    place
                }
                None => Storage::Buffer(self.buffer(graph, id, time, last)),
            };
            if let Storage::Buffer(buffer) = place {
                taken.push(buffer);
            }
            storage[id.index()] = Some(place);
        }
    }

    fn workspace(&mut self, graph: &Graph, node: usize, time: u32) -> Option<usize> {
        let node = &graph.nodes[node];
        let bytes = self
            .target
            .workspace(&node.op, &graph.operand_types(node), &graph.result_types(node));
        (bytes > 0).then(|| {
            self.result.buffers.push(Buffer {
                label: Label::Workspace {
                    scope: node.scope.clone(),
                    op: node.op.name(),
                },
                role: Role::Workspace,
                tier: Tier::Memory,
                bytes,
                start: time,
                end: time,
            });
            self.result.buffers.len() - 1
        })
    }

    fn buffer(&mut self, graph: &Graph, id: ValueId, start: u32, end: u32) -> usize {
        let value = graph.value(id);
        self.result.buffers.push(Buffer {
            label: graph.describe(id),
            role: value.role,
            tier: value.ty.tier,
            bytes: value.ty.bytes(),
            start,
            end,
        });
        self.result.buffers.len() - 1
    }

    fn extend(&mut self, place: Storage, last: u32) {
        if let Storage::Buffer(buffer) = place {
            let end = &mut self.result.buffers[buffer].end;
            *end = last.max(*end);
        }
    }
}
