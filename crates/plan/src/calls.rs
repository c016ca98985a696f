//! A plan as the list of calls that a backend runs.

use std::ops::Range;

use tightfit_ir::op::{AliasKind, Rule};
use tightfit_ir::{Binding, Call, OutputKind, Slot, ValueId};

use crate::plan::Plan;

/// One program, ready to run.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramCalls {
    /// Its name.
    pub name: String,
    /// How often it runs.
    pub repeat: u32,
    /// Its nodes in order; views need no call.
    pub calls: Vec<Call>,
    /// By call: bytes that nothing reads any more once it has run.
    pub freed: Vec<Vec<Range<u64>>>,
    /// Bytes that nothing reads any more once the program's results were read after its last run.
    pub freed_at_end: Vec<Range<u64>>,
    /// What the session writes before each run.
    pub fed: Vec<(String, Slot)>,
    /// What the session reads after each run.
    pub read: Vec<(String, Slot)>,
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
        for (buffer, span) in live.buffers.iter().enumerate() {
            if let Some(list) = span
                .end
                .checked_sub(placed.start)
                .and_then(|t| ending.get_mut(t as usize))
            {
                list.push(bytes(buffer));
            }
        }
        let freed_at_end = ending.pop().unwrap_or_default();
        let (mut calls, mut freed) = (Vec::new(), Vec::<Vec<Range<u64>>>::new());
        for (&id, ending) in order.iter().zip(ending) {
            let node = graph.node(id);
            if node.op.aliases().iter().any(|alias| alias.kind == AliasKind::View) {
                if let Some(last) = freed.last_mut() {
                    last.extend(ending);
                }
                continue;
            }
            calls.push(Call {
                op: node.op.clone(),
                inputs: node.inputs.iter().map(|&v| slot(v)).collect(),
                outputs: node.outputs.iter().map(|&v| slot(v)).collect(),
                workspace: placed.workspace[id.index()].map_or(0..0, bytes),
            });
            freed.push(ending);
        }
        let fed = graph.inputs().filter(|(.., binding)| *binding == Binding::Fed);
        let read = graph.outputs.iter().filter(|output| output.kind == OutputKind::Read);
        ProgramCalls {
            name: program.name.clone(),
            repeat: program.repeat,
            calls,
            freed,
            freed_at_end,
            fed: fed.map(|(id, value, _)| (value.name.to_string(), slot(id))).collect(),
            read: read
                .map(|output| (output.name.to_string(), slot(output.value)))
                .collect(),
        }
    }
}
