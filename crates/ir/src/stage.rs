//! The stages of the line that data follows, as far as they are graphs: [`Forward`], then [`Step`].

use crate::graph::{Binding, Graph};
use crate::types::Type;

/// A model: from fed inputs and weights to a result named `loss` (training, evaluation) or `logits` (generation).
#[derive(Clone, Debug, PartialEq)]
pub struct Forward {
    /// The graph; every node is in phase forward.
    pub graph: Graph,
}

/// A graph that runs `repeat` times in a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// E.g. `micro_step`, `update`.
    pub name: String,
    /// How often it runs each time its routine runs; at least 1. Never unrolled.
    pub repeat: u32,
    /// What it computes.
    pub graph: Graph,
}

/// Programs that run in order, e.g. `train`: micro-step × N, update. Carried values live inside one run of a routine.
#[derive(Clone, Debug, PartialEq)]
pub struct Routine {
    /// E.g. `train`, `evaluate`.
    pub name: String,
    /// In the order they run.
    pub programs: Vec<Program>,
}

impl Routine {
    /// A routine of one program of the same name that runs once.
    pub fn of(name: &str, graph: Graph) -> Self {
        Self {
            name: name.to_owned(),
            programs: vec![Program {
                name: name.to_owned(),
                repeat: 1,
                graph,
            }],
        }
    }
}

/// Everything a job repeats. Persistent inputs of one name are one tensor in every program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Routines share the transient part of the arena: at any time, one of them runs.
    pub routines: Vec<Routine>,
}

impl Step {
    /// The routine of that name.
    pub fn routine(&self, name: &str) -> Option<&Routine> {
        self.routines.iter().find(|routine| routine.name == name)
    }

    /// The names and types of all persistent tensors; one that several programs have comes several times.
    pub fn persistent(&self) -> impl Iterator<Item = (&str, &Type)> + Clone {
        let inputs = self.programs().flat_map(|(_, program)| program.graph.inputs());
        let persistent = inputs.filter(|(.., binding)| matches!(binding, Binding::Persistent { .. }));
        persistent.map(|(_, value, _)| (&*value.name, &value.ty))
    }

    /// Every program with the routine it belongs to.
    pub fn programs(&self) -> impl Iterator<Item = (&Routine, &Program)> + Clone {
        self.routines
            .iter()
            .flat_map(|routine| routine.programs.iter().map(move |program| (routine, program)))
    }
}
