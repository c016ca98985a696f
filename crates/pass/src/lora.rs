//! LoRA: the model is frozen, and each linear layer that is targeted gets a trainable branch of low rank beside it.
//!
//! **Does.** `y = x·Wᵀ (+ bias) (+ residual)` becomes `y0`, and `y = y0 + (scaling · dropout(x)·Aᵀ)·Bᵀ`, added in place onto `y0`. `A`
//! (`r × K`) starts uniform within `±1/√K`, as PEFT's does, and `B` (`N × r`) at zero, so that training starts from the model as it
//! is. The scaling is `alpha / r`, for rsLoRA `alpha / √r`.
//!
//! **Saves** the gradients and the optimizer's state of all that is frozen. Of the activations only those stay that adapters read:
//! a layer's input, for `A`, and the `r` columns between `A` and `B`. What a frozen layer alone would have kept is gone. **Costs** `r·(K + N)` weights with
//! their gradients and state for each layer, and their products: `r·(1/K + 1/N)` of the layer's own.
//!
//! **Changes** what is trained. The head, a tied embedding and norms stay as they are. With dropout, evaluation and generation are made
//! without it.
//!
//! A model pass, the first one: those after it see linear layers like any other.
//!
//! Hu et al. 2021, arXiv:2106.09685; the scaling of rsLoRA: Kalajdzievski 2023, arXiv:2312.03732.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tightfit_ir::op::{Dropout, Linear, Rule, Scale};
use tightfit_ir::{Binding, Forward, Graph, Init, Node, NodeId, Op, Phase, Role, Source, Type, ValueId};

use crate::PassError;
use crate::edit::Edit;

const PASS: &str = "lora";

/// The input of a model with dropout: the number of the micro-batch's first token in the whole run, in two words (see
/// [`Dropout`]).
pub const FIRST_TOKEN: &str = "first_token";

/// What adapters are added, and to what.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Columns between the two matrices of an adapter.
    pub rank: u64,
    /// What the branch is scaled by, together with the rank.
    pub alpha: f64,
    /// Whether the scaling is `alpha / √rank` instead of `alpha / rank`.
    pub rslora: bool,
    /// The share of the branch's inputs that are dropped in training; 0 for none.
    pub dropout: f64,
    /// Decides what is dropped.
    pub seed: u64,
    /// Which layers.
    pub targets: Targets,
}

/// Which linear layers get an adapter. A layer's name is that of its weight without `.weight`. Heads, whose results are logits, never
/// do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All.
    AllLinear,
    /// Those that one of these patterns names, each of which names one at least.
    Patterns(Vec<Pattern>),
    /// Exactly these.
    Layers(BTreeSet<String>),
}

impl Targets {
    /// Whether a linear layer of that name is one of them.
    pub fn select(&self, layer: &str) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Patterns(patterns) => patterns.iter().any(|pattern| pattern.names(layer)),
            Self::Layers(layers) => layers.contains(layer),
        }
    }
}

/// A layer's name or the end of one that begins behind a dot, such as `q_proj` or `self_attn.q_proj`. A `*` stands for any characters:
/// `layers.1*.mlp.*_proj`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(pub String);

impl Pattern {
    /// Whether it names that layer.
    pub fn names(&self, layer: &str) -> bool {
        let behind_dots = layer.match_indices('.').map(|(at, _)| &layer[at + 1..]);
        [layer].into_iter().chain(behind_dots).any(|end| glob(&self.0, end))
    }
}

/// Whether a text is what a pattern says; each `*` takes as little as it can, which is enough to find out.
fn glob(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut text) = text.strip_prefix(start) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match text.find(part) {
            Some(at) => text = &text[at + part.len()..],
            None => return false,
        }
    }
    text.ends_with(last)
}

impl LoraConfig {
    /// What the branch is multiplied by.
    pub fn scaling(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

/// The names of the two matrices of a layer's adapter: `A` and `B`.
pub fn adapter_names(layer: &str) -> [String; 2] {
    ["lora_A", "lora_B"].map(|matrix| format!("{layer}.{matrix}.weight"))
}

/// The model frozen, with adapters.
///
/// # Errors
/// The rank is 0, or a pattern or a layer names nothing that an adapter can be added to.
pub fn lora(forward: Forward, config: &LoraConfig) -> Result<Forward, PassError> {
    if config.rank == 0 {
        return Err(PassError::illegal(PASS, "the rank is at least 1"));
    }
    let mut graph = forward.graph;
    freeze(&mut graph);
    let targets = targets(&graph, &config.targets)?;
    let mut rewrite = Rewrite {
        first_token: (config.dropout > 0.0)
            .then(|| graph.input(FIRST_TOKEN, Type::i32([2]), Role::Input, Binding::Fed)),
        edit: Edit::new(graph),
        config,
        adapters: HashMap::new(),
        replaced: HashMap::new(),
    };
    for index in 0..rewrite.edit.graph().nodes.len() {
        rewrite.node(index, targets.get(&NodeId(index as u32)))?;
    }
    let graph = rewrite.finish();
    graph.verify().map_err(PassError::verify(PASS))?;
    Ok(Forward { graph })
}

/// The linear layers of a model that may have adapters, in their order.
pub fn linear_layers(forward: &Forward) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (_, name) in layers(&forward.graph) {
        if !names.iter().any(|known| *known == *name) {
            names.push(name.to_owned());
        }
    }
    names
}

/// Makes every parameter untrainable.
fn freeze(graph: &mut Graph) {
    for value in &mut graph.values {
        if let Source::Input(Binding::Persistent { trainable, .. }) = &mut value.source {
            *trainable = false;
        }
    }
}

/// Products with a weight of their own that are no heads, and the name of each layer.
fn layers(graph: &Graph) -> impl Iterator<Item = (NodeId, &str)> {
    graph.nodes.iter().zip(0..).filter_map(|(node, index)| {
        let (Op::Linear(_), [_, weight, ..]) = (&node.op, &node.inputs[..]) else {
            return None;
        };
        let weight = graph.value(*weight);
        let is_weight = weight.role == Role::Weight && matches!(weight.source, Source::Input(_));
        (is_weight && !is_head(graph, node)).then(|| (NodeId(index), layer_name(&weight.name)))
    })
}

/// Whether a node's result is logits: what the model gives, or what its loss is of.
pub(crate) fn is_head(graph: &Graph, node: &Node) -> bool {
    let logits = node.outputs[0];
    let given = graph.outputs.iter().any(|output| output.value == logits);
    let is_loss = |node: &Node| matches!(node.op, Op::SoftmaxCrossEntropy(_)) && node.inputs[0] == logits;
    given || graph.nodes.iter().any(is_loss)
}

fn layer_name(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// The nodes that get an adapter, with their layers' names.
fn targets(graph: &Graph, targets: &Targets) -> Result<HashMap<NodeId, String>, PassError> {
    let all: Vec<(NodeId, &str)> = layers(graph).collect();
    let missing = match targets {
        Targets::AllLinear => None,
        Targets::Patterns(patterns) => {
            let missing = |pattern: &&Pattern| !all.iter().any(|(_, name)| pattern.names(name));
            patterns.iter().find(missing).map(|pattern| &pattern.0)
        }
        Targets::Layers(layers) => layers.iter().find(|layer| !all.iter().any(|(_, name)| name == *layer)),
    };
    if let Some(missing) = missing {
        let mut known: Vec<&str> = all
            .iter()
            .map(|(_, name)| name.rsplit('.').next().unwrap_or(name))
            .collect();
        known.sort_unstable();
        known.dedup();
        return Err(PassError::illegal(
            PASS,
            format!("no linear layer is called `{missing}`: there are {}", known.join(", ")),
        ));
    }
    let found: HashMap<NodeId, String> = all
        .into_iter()
        .filter(|(_, name)| targets.select(name))
        .map(|(id, name)| (id, name.to_owned()))
        .collect();
    if found.is_empty() {
        return Err(PassError::illegal(PASS, "the model has no linear layer but its head"));
    }
    Ok(found)
}

/// A graph on its way.
struct Rewrite<'a> {
    config: &'a LoraConfig,
    edit: Edit,
    first_token: Option<ValueId>,
    /// By weight: its two matrices. A weight that several nodes read has one adapter.
    adapters: HashMap<ValueId, [ValueId; 2]>,
    /// Results of targeted nodes, and what their readers read now.
    replaced: HashMap<ValueId, ValueId>,
}

impl Rewrite<'_> {
    /// Redirects a node's operands, and adds the branch if it is a target.
    fn node(&mut self, index: usize, layer: Option<&String>) -> Result<(), PassError> {
        for input in &mut self.edit.node_mut(index).inputs {
            *input = self.replaced.get(input).copied().unwrap_or(*input);
        }
        let Some(layer) = layer else {
            return Ok(());
        };
        let node = &self.edit.graph().nodes[index];
        let (x, weight, y0, scope) = (node.inputs[0], node.inputs[1], node.outputs[0], node.scope.clone());
        let [a, b] = self.adapter(weight, layer);
        let mut branch = Branch {
            edit: &mut self.edit,
            position: index,
            scope: &scope,
        };
        let mut x = x;
        if let Some(first_token) = self.first_token {
            let dropout = Dropout {
                p: self.config.dropout,
                key: tightfit_ir::random::seeded(self.config.seed, layer),
                first_row: 0,
            };
            x = branch.push(dropout, &[x, first_token])?;
        }
        let mut h = branch.push(Linear::default(), &[x, a])?;
        let by = self.config.scaling();
        if by != 1.0 {
            h = branch.push(Scale { by }, &[h])?;
        }
        branch.position = index + 1;
        let y = match Linear::default().accumulating(0) {
            Some((onto, _)) => branch.push(onto, &[h, b, y0])?,
            // A linear layer accumulates.
            None => y0,
        };
        self.replaced.insert(y0, y);
        Ok(())
    }

    /// The two matrices beside a weight.
    fn adapter(&mut self, weight: ValueId, layer: &str) -> [ValueId; 2] {
        if let Some(&adapter) = self.adapters.get(&weight) {
            return adapter;
        }
        let graph = self.edit.graph_mut();
        let [n, k] = [0, 1].map(|axis| graph.ty(weight).dim(axis));
        let rank = self.config.rank;
        let mut matrix = |name: &str, shape: [u64; 2], init| {
            let binding = Binding::Persistent { init, trainable: true };
            graph.input(name, Type::f32(shape), Role::Adapter, binding)
        };
        let [a, b] = adapter_names(layer);
        let uniform = Init::Uniform(1.0 / (k as f64).sqrt());
        let adapter = [matrix(&a, [rank, k], uniform), matrix(&b, [n, rank], Init::Zeros)];
        self.adapters.insert(weight, adapter);
        adapter
    }

    fn finish(mut self) -> Graph {
        for output in &mut self.edit.graph_mut().outputs {
            output.value = self.replaced.get(&output.value).copied().unwrap_or(output.value);
        }
        self.edit.finish()
    }
}

/// Where nodes of a branch go.
struct Branch<'a> {
    edit: &'a mut Edit,
    position: usize,
    scope: &'a Arc<str>,
}

impl Branch<'_> {
    fn push(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> Result<ValueId, PassError> {
        self.edit
            .insert(self.position, op, inputs, self.scope, Phase::Forward, Role::Activation)
            .map_err(PassError::op(PASS, self.scope))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_ends_of_names() {
        let q = "model.layers.10.self_attn.q_proj";
        for (pattern, names) in [
            ("q_proj", true),
            ("self_attn.q_proj", true),
            (q, true),
            ("*_proj", true),
            ("layers.1*.q_proj", true),
            ("layers.*.self_attn.*", true),
            ("model.*", true),
            ("proj", false),
            ("_proj", false),
            ("k_proj", false),
            ("q_proj.", false),
            ("layers.1.*", false),
            ("*.mlp.*", false),
            ("q*q_proj", false),
            ("", false),
        ] {
            assert_eq!(Pattern(pattern.to_owned()).names(q), names, "{pattern}");
        }
    }

    #[test]
    fn scaling_is_by_the_rank_or_its_root() {
        let config = |rslora| LoraConfig {
            rank: 16,
            alpha: 32.0,
            rslora,
            dropout: 0.0,
            seed: 0,
            targets: Targets::AllLinear,
        };
        assert_eq!((config(false).scaling(), config(true).scaling()), (2.0, 8.0));
    }
}
