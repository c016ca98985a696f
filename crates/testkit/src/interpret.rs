//! Runs graphs and steps through the naive references, every value an exact buffer of its own.

use std::collections::BTreeMap;

use tightfit_ir::op::Rule;
use tightfit_ir::{Binding, Graph, Init, OutputKind, Program, Routine, Step, Tensor, Type, Value, ValueId};

use crate::rng::Rng;

/// Tensors by name: what is fed, carried or kept.
pub type Named = BTreeMap<String, Tensor>;

/// Every value of one run of a graph.
#[derive(Clone, Debug)]
pub struct Values<'g> {
    graph: &'g Graph,
    values: Vec<Tensor>,
}

impl Values<'_> {
    /// A value.
    pub fn value(&self, id: ValueId) -> &Tensor {
        &self.values[id.index()]
    }

    /// The result of that name.
    ///
    /// # Panics
    /// The graph has none.
    pub fn output(&self, name: &str) -> &Tensor {
        match self.graph.output_named(name) {
            Some(output) => self.value(output.value),
            None => panic!("the graph has no output {name:?}"),
        }
    }

    /// All results by name.
    pub fn outputs(&self) -> Named {
        let outputs = self.graph.outputs.iter();
        outputs
            .map(|output| (output.name.to_string(), self.value(output.value).clone()))
            .collect()
    }
}

/// Runs a graph on inputs by name; names that the graph does not have are ignored.
///
/// # Panics
/// The graph does not verify, an input is missing, or one has another shape than the graph says.
pub fn run<'g>(graph: &'g Graph, inputs: &Named) -> Values<'g> {
    if let Err(error) = graph.verify() {
        panic!("{error}\n{graph}");
    }
    let mut values = vec![None; graph.values.len()];
    for (id, value, _) in graph.inputs() {
        let Some(tensor) = inputs.get(&*value.name) else {
            panic!("input {:?} is missing", value.name);
        };
        assert_eq!(tensor.shape, value.ty.shape, "input {:?}", value.name);
        values[id.index()] = Some(tensor.clone());
    }
    for node in &graph.nodes {
        // A verified graph defines before it uses, and each value once.
        let operands: Vec<Tensor> = node.inputs.iter().filter_map(|id| values[id.index()].clone()).collect();
        for (id, result) in node.outputs.iter().zip(node.op.reference(&operands)) {
            assert_eq!(result.shape, graph.ty(*id).shape, "{}'s reference", node.op.name());
            values[id.index()] = Some(result);
        }
    }
    Values {
        graph,
        values: values.into_iter().flatten().collect(),
    }
}

/// What one run of one program gave.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramRun {
    /// The program's name.
    pub program: String,
    /// Which of its repeats, from 0.
    pub repeat: u32,
    /// All its results by name, those included that were carried or kept.
    pub outputs: Named,
}

/// The state of a job between its steps: runs routines as a session would.
#[derive(Clone, Debug)]
pub struct Interpreter {
    /// Weights and optimizer state.
    pub persistent: Named,
}

impl Interpreter {
    /// Persistent tensors filled as their inputs ask, from a seed and their names.
    pub fn new(step: &Step, seed: u64) -> Self {
        let graphs = step.programs().map(|(_, program)| &program.graph);
        Self {
            persistent: graphs.flat_map(|graph| initial(graph, seed)).collect(),
        }
    }

    /// Runs a routine once: every program as often as it repeats, with what `feed` gives for that program and repeat.
    ///
    /// # Panics
    /// As [`run`], and where a carried input was not left by an earlier program.
    pub fn run(&mut self, routine: &Routine, mut feed: impl FnMut(&Program, u32) -> Named) -> Vec<ProgramRun> {
        let mut carried = Named::new();
        let mut runs = Vec::new();
        for program in &routine.programs {
            for repeat in 0..program.repeat {
                let mut inputs = feed(program, repeat);
                for (_, value, binding) in program.graph.inputs() {
                    let kept = match binding {
                        Binding::Fed => continue,
                        Binding::Persistent { .. } => self.persistent.get(&*value.name),
                        Binding::Carried => carried.get(&*value.name),
                    };
                    inputs.extend(kept.map(|tensor| (value.name.to_string(), tensor.clone())));
                }
                let values = run(&program.graph, &inputs);
                for output in &program.graph.outputs {
                    let tensor = values.value(output.value).clone();
                    match output.kind {
                        OutputKind::Read => {}
                        OutputKind::Carry => drop(carried.insert(output.name.to_string(), tensor)),
                        OutputKind::Update(input) => {
                            let name = program.graph.value(input).name.to_string();
                            match program.graph.binding(input) {
                                Some(Binding::Carried) => carried.insert(name, tensor),
                                _ => self.persistent.insert(name, tensor),
                            };
                        }
                    }
                }
                runs.push(ProgramRun {
                    program: program.name.clone(),
                    repeat,
                    outputs: values.outputs(),
                });
            }
        }
        runs
    }
}

/// A tensor whose elements are all that number.
fn filled(ty: &Type, number: f64) -> Tensor {
    let mut tensor = Tensor::zeros_of(ty);
    tensor.data.fill(number);
    tensor
}

/// A graph's persistent inputs, filled as they ask from a seed and their names with exact `f32` values.
pub fn initial(graph: &Graph, seed: u64) -> Named {
    let fill = |value: &Value, init| match init {
        Init::Zeros => Tensor::zeros_of(&value.ty),
        Init::Ones => filled(&value.ty, 1.0),
        Init::Constant(number) => filled(&value.ty, number),
        Init::Normal(std) => Rng::named(seed, &value.name).tensor(value.ty.shape.clone(), std),
        Init::Uniform(bound) => {
            let mut rng = Rng::named(seed, &value.name);
            let mut tensor = Tensor::zeros_of(&value.ty);
            tensor
                .data
                .fill_with(|| f64::from((bound * (2.0 * rng.unit() - 1.0)) as f32));
            tensor
        }
    };
    graph
        .inputs()
        .filter_map(|(_, value, binding)| match binding {
            Binding::Persistent { init, .. } => Some((value.name.to_string(), fill(value, init))),
            Binding::Fed | Binding::Carried => None,
        })
        .collect()
}
