//! Runs a case on a backend, compares with the reference, and tries every permitted placement in memory.

use tightfit_ir::op::{AdamW8bit, Alias, AliasKind, Rounding, Rule};
use tightfit_ir::{DType, Op, Tensor};

use super::Case;
use crate::rng::Rng;

/// Whatever runs operations.
pub trait Backend {
    /// Runs the case's operation once and returns its results, each row-major; every dtype as the `f32` of the same number.
    ///
    /// Each alias says that the result's buffer must be the operand's buffer; all other buffers are apart from each other. Buffers
    /// of results that alias nothing must hold garbage before the run, so that results nobody wrote are found.
    ///
    /// # Errors
    /// The backend cannot run it, in words.
    fn run(&mut self, case: &Case, aliases: &[Alias]) -> Result<Vec<Vec<f32>>, String>;

    /// The operands as the backend computes with them: hardware that multiplies nothing but bfloat16 rounds to it what is not.
    fn operands(&self, case: &Case) -> Vec<Tensor> {
        case.inputs.clone()
    }
}

/// Checks a case: results against the reference, then every permitted in-place placement against those, bit for bit.
///
/// # Errors
/// The first element that differs, with its case.
pub fn check(backend: &mut dyn Backend, case: &Case) -> Result<(), String> {
    let mut apart: Option<Vec<Vec<f32>>> = None;
    for aliases in placements(&case.op) {
        let describe = |message: String| format!("{case}, placed {aliases:?}: {message}");
        let results = backend.run(case, &aliases).map_err(describe)?;
        match &apart {
            None => {
                let inputs = backend.operands(case);
                compare(&Case { inputs, ..case.clone() }, &results).map_err(describe)?;
                apart = Some(results);
            }
            Some(apart) => same_bits(apart, &results).map_err(describe)?,
        }
    }
    Ok(())
}

/// Checks many cases.
///
/// # Panics
/// Any fails: the message lists the first failures.
pub fn check_all(backend: &mut dyn Backend, cases: &[Case]) {
    let failures: Vec<String> = cases.iter().filter_map(|case| check(backend, case).err()).collect();
    let shown = failures.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(
        failures.is_empty(),
        "{} of {} cases fail:\n{shown}",
        failures.len(),
        cases.len()
    );
}

/// Every way to lay an operation's results over its operands that [`Rule::aliases`] permits. Views are part of each; the first has
/// nothing in place.
pub fn placements(op: &Op) -> Vec<Vec<Alias>> {
    let (views, in_place): (Vec<_>, Vec<_>) = op.aliases().into_iter().partition(|a| a.kind == AliasKind::View);
    let mut placements = vec![views];
    for alias in in_place {
        let fits = |placed: &&Vec<Alias>| {
            placed
                .iter()
                .all(|a| a.output != alias.output && a.input != alias.input)
        };
        let extended: Vec<_> = placements.iter().filter(fits).cloned().collect();
        placements.extend(extended.into_iter().map(|mut placed| {
            placed.push(alias);
            placed
        }));
    }
    placements
}

/// How many times the unavoidable rounding error a result may be off.
///
/// That error is what rounding the operands to `f32` does to the result: half an ulp of the result, or more where the operation is
/// ill-conditioned. Sums of `n` terms add about `√n` of it, which 64 covers at the suite's sizes.
fn slack(op: &Op) -> f64 {
    match op {
        Op::Cast(_)
        | Op::Embedding(_)
        | Op::Fetch(_)
        | Op::KvAppend(_)
        | Op::Reshape(_)
        | Op::Settle(_)
        | Op::SliceRows(_)
        | Op::Store(_)
        | Op::Zero(_) => 0.0,
        Op::Add(_) | Op::PadRows(_) | Op::AppliedStep(_) | Op::UpdateLossScale(_) => 1.0,
        Op::Dropout(_) | Op::Scale(_) => 2.0,
        Op::Rope(_) | Op::RopeTable(_) | Op::SoftmaxCrossEntropyBackward(_) | Op::GradientFactor(_) => 4.0,
        Op::Gelu(_)
        | Op::GeluBackward(_)
        | Op::SwiGlu(_)
        | Op::SwiGluBackward(_)
        | Op::AdamW(_)
        | Op::AdamW8bit(_)
        | Op::Lion(_)
        | Op::Sgd(_) => 16.0,
        Op::Linear(_)
        | Op::LinearBackwardInput(_)
        | Op::LinearBackwardWeight(_)
        | Op::BiasBackward(_)
        | Op::EmbeddingBackward(_)
        | Op::RmsNorm(_)
        | Op::RmsNormBackward(_)
        | Op::LayerNorm(_)
        | Op::LayerNormBackward(_)
        | Op::Attention(_)
        | Op::AttentionBackward(_)
        | Op::CachedAttention(_)
        | Op::SoftmaxCrossEntropy(_)
        | Op::LinearCrossEntropy(_)
        | Op::Adafactor(_)
        | Op::Apollo(_)
        | Op::GlobalNorm(_)
        | Op::Norm(_) => 64.0,
    }
}

/// Below it kernels may flush to zero, or clamp the argument of an exponential.
const TINY: f64 = 1e-35;

fn compare(case: &Case, results: &[Vec<f32>]) -> Result<(), String> {
    let expected = case.op.reference(&case.inputs);
    if results.len() != expected.len() {
        return Err(format!("{} results, expected {}", results.len(), expected.len()));
    }
    let types = case.results();
    let errors = rounding_errors(case, &expected);
    let slack = slack(&case.op);
    for (output, ((got, want), error)) in results.iter().zip(&expected).zip(&errors).enumerate() {
        if got.len() != want.data.len() {
            return Err(format!(
                "result {output} has {} elements, expected {}",
                got.len(),
                want.data.len()
            ));
        }
        let (relative, least) = rounding(&case.op, types[output].dtype);
        let allowed = match is_code(&case.op, types[output].dtype) {
            true => 0.0,
            false => slack * error + if slack > 0.0 { TINY } else { 0.0 },
        };
        for (i, (&got, &want)) in got.iter().zip(&want.data).enumerate() {
            let allowed = allowed + relative * want.abs() + least;
            if !within(f64::from(got), want, allowed) {
                return Err(format!("result {output}[{i}] is {got}, expected {want} ± {allowed:e}"));
            }
        }
    }
    Ok(())
}

/// What storing an `f32` as that dtype does to it at most: relative to it, and where it is nearly zero. An ulp, as the number that is
/// rounded is itself a little off.
fn rounding(op: &Op, dtype: DType) -> (f64, f64) {
    // To either neighbour, the reference being the number between them.
    let times = if is_stochastic(op) { 2.0 } else { 1.0 };
    match dtype {
        DType::Bf16 => (times * 2_f64.powi(-8), TINY),
        DType::F16 => (times * 2_f64.powi(-11), times * 2_f64.powi(-25)),
        // The neighbour of a code, where a number lies between both.
        _ if is_code(op, dtype) => (0.0, 1.0),
        _ => (0.0, 0.0),
    }
}

/// Whether a result of that dtype holds codes.
fn is_code(op: &Op, dtype: DType) -> bool {
    matches!(op, Op::AdamW8bit(_)) && dtype == DType::U8
}

fn is_stochastic(op: &Op) -> bool {
    let rounding = match op {
        Op::AdamW(op) | Op::AdamW8bit(AdamW8bit(op)) => op.rounding,
        Op::Adafactor(op) => op.rounding,
        Op::Apollo(op) => op.rounding,
        Op::Lion(op) => op.rounding,
        Op::Sgd(op) => op.rounding,
        _ => Rounding::Nearest,
    };
    rounding != Rounding::Nearest
}

/// Whether a number is close enough to another; NaN never is.
pub(crate) fn within(got: f64, want: f64, allowed: f64) -> bool {
    (got - want).abs() <= allowed
}

/// For each result the largest change that rounding its operands makes, over a few samples: at least half an ulp of the result.
fn rounding_errors(case: &Case, expected: &[Tensor]) -> Vec<f64> {
    const HALF_ULP: f64 = f32::EPSILON as f64 / 2.0;
    let largest = |tensor: &Tensor| tensor.data.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    // A tail of GELU is what 1 + erf leaves of x: as good as that sum, not as its tiny rest.
    let cancelled = match case.op {
        Op::Gelu(_) => largest(&case.inputs[0]),
        Op::GeluBackward(_) => largest(&case.inputs[1]),
        _ => 0.0,
    };
    let scales = expected.iter().map(|want| largest(want).max(cancelled));
    let mut errors: Vec<f64> = scales.map(|scale| HALF_ULP * scale).collect();
    for sample in 0..3 {
        let mut rng = Rng::new(sample);
        let mut inputs = case.inputs.clone();
        for (input, ty) in inputs.iter_mut().zip(&case.types) {
            if ty.dtype.is_float() {
                input
                    .data
                    .iter_mut()
                    .for_each(|x| *x *= 1.0 + HALF_ULP * (2.0 * rng.unit() - 1.0));
            }
        }
        for ((error, want), moved) in errors.iter_mut().zip(expected).zip(case.op.reference(&inputs)) {
            let changes = want.data.iter().zip(&moved.data).map(|(a, b)| (a - b).abs());
            *error = changes.fold(*error, f64::max);
        }
    }
    errors
}

fn same_bits(apart: &[Vec<f32>], placed: &[Vec<f32>]) -> Result<(), String> {
    if apart.len() != placed.len() {
        return Err(format!("{} results, {} when apart", placed.len(), apart.len()));
    }
    for (output, (a, b)) in apart.iter().zip(placed).enumerate() {
        if a.len() != b.len() {
            return Err(format!(
                "result {output} has {} elements, {} when apart",
                b.len(),
                a.len()
            ));
        }
        if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
            return Err(format!("result {output}[{i}] is {}, but {} when apart", b[i], a[i]));
        }
    }
    Ok(())
}
