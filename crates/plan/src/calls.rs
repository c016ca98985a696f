//! A plan as the list of calls that a backend runs.

use std::ops::Range;

use tightfit_ir::op::{AliasKind, Rule};
use tightfit_ir::{Binding, Call, Op, OutputKind, Slot, Tier, ValueId};

use crate::plan::Plan;

/// Which way a transfer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the lower tier to memory.
    Fetch,
    /// From memory to the lower tier.
    Store,
}

/// A copy between the tiers, done beside the calls that follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// The bytes in the arena.
    pub memory: Range<u64>,
    /// Where they are on the lower tier.
    pub lower: u64,
}

/// What happens at one step of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// A kernel runs.
    Call(Call),
    /// A transfer begins. Transfers are done one after the other, in the order in which they begin.
    Transfer(Transfer),
}

/// One step of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Action {
    /// The program's transfers that must be done before: the first so many.
    pub after: usize,
    /// What happens.
    pub work: Work,
    /// Bytes of the arena that nothing reads any more once it has.
    pub freed: Vec<Range<u64>>,
}

/// One program, ready to run.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramCalls {
    /// Its name.
    pub name: String,
    /// How often it runs.
    pub repeat: u32,
    /// Its nodes in order; views need none. All transfers are done before its results are read.
    pub actions: Vec<Action>,
    /// Bytes that nothing reads any more once the program's results were read after its last run.
    pub freed_at_end: Vec<Range<u64>>,
    /// What the session writes before each run.
    pub fed: Vec<(String, Slot)>,
    /// What the session reads after each run.
    pub read: Vec<(String, Slot)>,
}

impl ProgramCalls {
    /// Its calls in order, without the transfers between them.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        self.actions.iter().filter_map(|action| match &action.work {
            Work::Call(call) => Some(call),
            Work::Transfer(_) => None,
        })
    }
}

impl Plan {
    /// The programs of one routine with every value's bytes resolved.
    pub fn calls(&self, routine: usize) -> Vec<ProgramCalls> {
        (0..self.step().routines[routine].programs.len())
            .map(|program| self.program_calls(routine, program))
            .collect()
    }

    fn program_calls(&self, routine: usize, index: usize) -> ProgramCalls {
        let program = &self.step().routines[routine].programs[index];
        let graph = &program.graph;
        let live = &self.liveness().routines[routine];
        let placed = &live.programs[index];
        let slot = |id: ValueId| Slot {
            offset: self.offset(routine, placed.storage[id.index()]),
            ty: graph.ty(id).clone(),
        };
        let bytes = |buffer: usize| {
            let offset = self.routines()[routine].offsets[buffer];
            offset..offset + live.buffers[buffer].bytes
        };
        let order = self.order(routine, index);
        let mut ending = vec![Vec::new(); order.len() + 1];
        let in_memory = live.buffers.iter().enumerate();
        for (buffer, span) in in_memory.filter(|(_, buffer)| buffer.tier == Tier::Memory) {
            if let Some(list) = span
                .end
                .checked_sub(placed.start)
                .and_then(|t| ending.get_mut(t as usize))
            {
                list.push(bytes(buffer));
            }
        }
        let freed_at_end = ending.pop().unwrap_or_default();
        let mut actions = Vec::<Action>::new();
        let mut pending = Pending::default();
        for (&id, ending) in order.iter().zip(ending) {
            let node = graph.node(id);
            if node.op.aliases().iter().any(|alias| alias.kind == AliasKind::View) {
                if let Some(last) = actions.last_mut() {
                    last.freed.extend(ending);
                }
                continue;
            }
            let inputs: Vec<Slot> = node.inputs.iter().map(|&v| slot(v)).collect();
            let outputs: Vec<Slot> = node.outputs.iter().map(|&v| slot(v)).collect();
            let transfer = match (&node.op, &inputs[..], &outputs[..]) {
                (Op::Fetch(_), [from, ..], [to]) => Some((Direction::Fetch, to, from)),
                (Op::Store(_), [from, ..], [to]) => Some((Direction::Store, from, to)),
                _ => None,
            };
            let work = match transfer {
                Some((direction, memory, lower)) => Work::Transfer(Transfer {
                    direction,
                    memory: memory.offset..memory.offset + memory.ty.bytes(),
                    lower: lower.offset,
                }),
                None => Work::Call(Call {
                    op: node.op.clone(),
                    inputs,
                    outputs,
                    workspace: placed.workspace[id.index()].map_or(0..0, bytes),
                }),
            };
            actions.push(Action {
                after: pending.needed_by(&work),
                work,
                freed: ending,
            });
        }
        let fed = graph.inputs().filter(|(.., binding)| *binding == Binding::Fed);
        let read = graph.outputs.iter().filter(|output| output.kind == OutputKind::Read);
        ProgramCalls {
            name: program.name.clone(),
            repeat: program.repeat,
            actions,
            freed_at_end,
            fed: fed.map(|(id, value, _)| (value.name.to_string(), slot(id))).collect(),
            read: read
                .map(|output| (output.name.to_string(), slot(output.value)))
                .collect(),
        }
    }
}

/// Most transfers under way: whoever runs a plan begins another one only when the first of these is done.
pub const MOST_IN_FLIGHT: usize = 32;

/// Transfers that may still be under way.
#[derive(Default)]
struct Pending {
    /// Each with how many had begun once it had.
    transfers: Vec<(usize, Transfer)>,
    begun: usize,
}

impl Pending {
    /// How many of the program's first transfers must be done before `work`: the last one that it shares bytes of the arena with, one of the
    /// two writing them, and so all before that. Transfers need not wait for each other, being done in order.
    fn needed_by(&mut self, work: &Work) -> usize {
        let call = match work {
            Work::Transfer(transfer) => {
                self.begun += 1;
                let done = self.begun.saturating_sub(MOST_IN_FLIGHT);
                self.transfers.retain(|(begun, _)| *begun > done);
                self.transfers.push((self.begun, transfer.clone()));
                return 0;
            }
            Work::Call(call) => call,
        };
        let range = |slot: &Slot| slot.offset..slot.offset + slot.ty.bytes();
        let written = || call.outputs.iter().map(range).chain([call.workspace.clone()]);
        let conflicts = |transfer: &Transfer| match transfer.direction {
            Direction::Fetch => {
                let mut touched = call.inputs.iter().map(range).chain(written());
                touched.any(|bytes| overlap(&bytes, &transfer.memory))
            }
            Direction::Store => written().any(|bytes| overlap(&bytes, &transfer.memory)),
        };
        let last = self.transfers.iter().rposition(|(_, transfer)| conflicts(transfer));
        let Some(last) = last else { return 0 };
        let after = self.transfers[last].0;
        self.transfers.drain(..=last);
        after
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
