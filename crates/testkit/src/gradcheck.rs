//! Gradient rules against central finite differences in `f64`, one operation at a time and whole models through `autodiff`.

use tightfit_ir::op::{Gradient, OutputGradient, Rule};
use tightfit_ir::{Binding, DType, Forward, Graph, NodeId, Op, OpError, OutputKind, Phase, Role, Tensor, ValueId};

use crate::interpret::{Named, run};
use crate::rng::Rng;
use crate::suite::{Case, within};

/// A failed comparison is relative to the largest slope of the tensor.
const TOLERANCE: f64 = 1e-6;

/// What an operation can give gradients for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Differentiable {
    /// These operands, from the gradient of result 0.
    Operands(Vec<usize>),
    /// These operands, as the loss itself.
    Loss(Vec<usize>),
    /// Nothing: it is a gradient or an update, and its rule says so.
    Never,
}

/// What an operation can give gradients for. A closed match: a new operation does not compile until it is decided here.
pub fn differentiable(op: &Op) -> Differentiable {
    use Differentiable::{Loss, Never, Operands};
    match op {
        Op::Add(_) | Op::SwiGlu(_) | Op::RmsNorm(_) => Operands(vec![0, 1]),
        Op::Attention(_) | Op::LayerNorm(_) => Operands(vec![0, 1, 2]),
        Op::Embedding(_) => Operands(vec![1]),
        Op::Cast(_) | Op::Dropout(_) | Op::Gelu(_) | Op::Reshape(_) | Op::Rope(_) | Op::Scale(_) | Op::SliceRows(_) => {
            Operands(vec![0])
        }
        Op::PadRows(pad) => Operands((0..1 + pad.accumulate.count()).collect()),
        Op::Linear(linear) => Operands((0..2 + usize::from(linear.bias) + linear.accumulate.count()).collect()),
        Op::RopeTable(_) | Op::Zero(_) => Operands(Vec::new()),
        Op::LinearCrossEntropy(_) => Loss(vec![0, 1]),
        Op::SoftmaxCrossEntropy(_) => Loss(vec![0]),
        Op::AttentionBackward(_)
        | Op::CachedAttention(_)
        | Op::KvAppend(_)
        | Op::SoftmaxCrossEntropyBackward(_)
        | Op::EmbeddingBackward(_)
        | Op::Fetch(_)
        | Op::GeluBackward(_)
        | Op::LayerNormBackward(_)
        | Op::LinearBackwardInput(_)
        | Op::LinearBackwardWeight(_)
        | Op::BiasBackward(_)
        | Op::Adafactor(_)
        | Op::AdamW(_)
        | Op::AdamW8bit(_)
        | Op::Apollo(_)
        | Op::AppliedStep(_)
        | Op::GlobalNorm(_)
        | Op::GradientFactor(_)
        | Op::Lion(_)
        | Op::Sgd(_)
        | Op::UpdateLossScale(_)
        | Op::Norm(_)
        | Op::RmsNormBackward(_)
        | Op::Settle(_)
        | Op::Store(_)
        | Op::SwiGluBackward(_) => Never,
    }
}

/// Checks the gradient rule of a case's operation: all operands wanted together, then each alone.
///
/// # Errors
/// What differs, with the case.
pub fn check_rule(case: &Case, seed: u64) -> Result<(), String> {
    let describe = |message: String| format!("{case}: {message}");
    let (mut operands, loss) = match differentiable(&case.op) {
        Differentiable::Operands(operands) => (operands, false),
        Differentiable::Loss(operands) => (operands, true),
        Differentiable::Never => return refuses(case).map_err(describe),
    };
    // What is quantised is frozen.
    operands.retain(|&operand| !matches!(case.types[operand].dtype, DType::Block(_)));
    let cotangent = match loss {
        true => Tensor::scalar(1.0),
        false => Rng::new(seed).tensor(case.results()[0].shape.clone(), 1.0),
    };
    let slopes: Vec<Tensor> = operands
        .iter()
        .map(|&i| finite_differences(case, i, &cotangent))
        .collect();
    let alone = operands.iter().map(|&operand| vec![operand]);
    for wanted in alone.chain([operands.clone()]).filter(|wanted| !wanted.is_empty()) {
        let given = analytic(case, &wanted, (!loss).then_some(&cotangent)).map_err(describe)?;
        for (operand, gradient) in wanted.iter().zip(&given) {
            // Every wanted operand is one of `operands`, for which there are slopes.
            let at = operands.iter().position(|o| o == operand).unwrap_or_default();
            close(gradient, &slopes[at])
                .map_err(|message| describe(format!("wanted {wanted:?}, gradient of operand {operand}{message}")))?;
        }
    }
    Ok(())
}

/// A graph of the case's operation alone, its operands fed as `0`, `1`, ….
fn graph_of(case: &Case) -> (Graph, Named) {
    let mut graph = Graph::new();
    let mut feed = Named::new();
    let mut operands = Vec::new();
    for (i, (ty, tensor)) in case.types.iter().zip(&case.inputs).enumerate() {
        operands.push(graph.input(&i.to_string(), ty.clone(), Role::Input, Binding::Fed));
        feed.insert(i.to_string(), tensor.clone());
    }
    let pushed = graph.push(
        case.op.clone(),
        &operands,
        &"case".into(),
        Phase::Forward,
        Role::Activation,
    );
    match pushed {
        Ok(_) => (graph, feed),
        Err(error) => panic!("{case}: {error}"),
    }
}

/// The rule must say that there is no gradient.
fn refuses(case: &Case) -> Result<(), String> {
    let (mut graph, _) = graph_of(case);
    let results = vec![OutputGradient::One; case.results().len()];
    let wanted = vec![true; case.inputs.len()];
    let mut rule = Gradient::new(&mut graph, NodeId(0), results, wanted);
    match case.op.gradient(&mut rule) {
        Err(OpError::NotDifferentiable { .. }) => Ok(()),
        other => Err(format!("expected that it has no gradient, got {other:?}")),
    }
}

/// The gradients that the rule's nodes compute for the wanted operands, in that order.
fn analytic(case: &Case, wanted: &[usize], cotangent: Option<&Tensor>) -> Result<Vec<Tensor>, String> {
    let (mut graph, mut feed) = graph_of(case);
    let types = case.results();
    let mut results = vec![OutputGradient::None; types.len()];
    results[0] = OutputGradient::One;
    if let Some(cotangent) = cotangent {
        let dy = graph.input("cotangent", types[0].clone(), Role::Input, Binding::Fed);
        feed.insert("cotangent".to_owned(), cotangent.clone());
        results[0] = OutputGradient::Value(dy);
    }
    let flags = (0..case.inputs.len()).map(|i| wanted.contains(&i)).collect();
    let mut rule = Gradient::new(&mut graph, NodeId(0), results, flags);
    case.op.gradient(&mut rule).map_err(|error| error.to_string())?;
    let given = rule.finish().map_err(|error| error.to_string())?;
    let indices: Vec<usize> = given.iter().map(|(operand, _)| *operand).collect();
    if indices != wanted {
        return Err(format!("wanted gradients of {wanted:?}, given {indices:?}"));
    }
    let values = run(&graph, &feed);
    Ok(given
        .iter()
        .map(|(_, gradient)| values.value(*gradient).clone())
        .collect())
}

/// The slope of `Σ cotangent·result 0` along every element of an operand.
fn finite_differences(case: &Case, operand: usize, cotangent: &Tensor) -> Tensor {
    let mut inputs = case.inputs.clone();
    let mut slopes = Tensor::zeros(inputs[operand].shape.clone());
    let h = width(&inputs[operand]);
    for i in 0..slopes.data.len() {
        slopes.data[i] = slope(inputs[operand].data[i], h, |x| {
            inputs[operand].data[i] = x;
            let result = case.op.reference(&inputs).swap_remove(0);
            result.data.iter().zip(&cotangent.data).map(|(y, d)| y * d).sum()
        });
    }
    slopes
}

/// How far to move an element: little beside the tensor's values, since what is done to tiny values bends over tiny distances.
fn width(tensor: &Tensor) -> f64 {
    1e-4 * tensor.data.iter().fold(1e-3, |max: f64, x| max.max(x.abs())).min(1.0)
}

/// The derivative of `f` at `x` by central differences of fourth order. Leaves `f` called at `x` last.
fn slope(x: f64, h: f64, mut f: impl FnMut(f64) -> f64) -> f64 {
    let near = f(x + h) - f(x - h);
    let far = f(x + 2.0 * h) - f(x - 2.0 * h);
    f(x);
    (8.0 * near - far) / (12.0 * h)
}

fn close(gradient: &Tensor, slopes: &Tensor) -> Result<(), String> {
    if gradient.shape != slopes.shape {
        return Err(format!(" has shape {}, expected {}", gradient.shape, slopes.shape));
    }
    let scale = slopes.data.iter().fold(1e-3, |max: f64, x| max.max(x.abs()));
    for (i, (got, want)) in gradient.data.iter().zip(&slopes.data).enumerate() {
        if !within(*got, *want, TOLERANCE * scale) {
            return Err(format!("[{i}] is {got}, finite differences give {want}"));
        }
    }
    Ok(())
}

/// Checks every gradient that `autodiff` makes for a model against finite differences at some elements of each weight, and that
/// nothing frozen has one.
///
/// # Errors
/// What differs, with the weight.
pub fn check_model(forward: &Forward, feed: &Named, seed: u64) -> Result<(), String> {
    let step = tightfit_pass::autodiff(forward.clone()).map_err(|error| error.to_string())?;
    let Some((_, micro_step)) = step.programs().next() else {
        return Err("autodiff made no program".to_owned());
    };
    let gradients = run(&micro_step.graph, feed);
    let loss = |feed: &Named| run(&forward.graph, feed).output("loss").data[0];
    let (made, expected) = (gradients.output("loss").data[0], loss(feed));
    if made != expected {
        return Err(format!("the step's loss is {made}, the model's {expected}"));
    }
    let mut rng = Rng::new(seed);
    let mut feed = feed.clone();
    for (id, weight, binding) in forward.graph.inputs() {
        let name = &*weight.name;
        let gradient = micro_step.graph.output_named(&tightfit_pass::gradient_name(name));
        let trains = matches!(binding, Binding::Persistent { trainable: true, .. }) && reaches_loss(&forward.graph, id);
        let gradient = match gradient {
            Some(gradient) if trains && gradient.kind == OutputKind::Carry => gradients.value(gradient.value),
            None if !trains => continue,
            _ => return Err(format!("{name}: should have a gradient: {trains}; has {gradient:?}")),
        };
        let mut tensor = feed.get(name).cloned().ok_or_else(|| format!("{name} is not fed"))?;
        if gradient.shape != tensor.shape {
            return Err(format!("{name}: its gradient has shape {}", gradient.shape));
        }
        let scale = gradient.data.iter().fold(1e-2, |max: f64, x| max.max(x.abs()));
        for _ in 0..3 {
            let i = rng.below(tensor.data.len() as u64) as usize;
            let want = slope(tensor.data[i], width(&tensor), |x| {
                tensor.data[i] = x;
                feed.insert(name.to_owned(), tensor.clone());
                loss(&feed)
            });
            let got = gradient.data[i];
            if !within(got, want, TOLERANCE * scale) {
                return Err(format!(
                    "{name}: gradient[{i}] is {got}, finite differences give {want}"
                ));
            }
        }
    }
    Ok(())
}

/// Whether a value is an operand, through any nodes, of `loss`.
fn reaches_loss(graph: &Graph, id: ValueId) -> bool {
    let mut reached = vec![false; graph.values.len()];
    reached[id.index()] = true;
    for node in &graph.nodes {
        if node.inputs.iter().any(|v| reached[v.index()]) {
            node.outputs.iter().for_each(|v| reached[v.index()] = true);
        }
    }
    graph
        .output_named("loss")
        .is_some_and(|loss| reached[loss.value.index()])
}
