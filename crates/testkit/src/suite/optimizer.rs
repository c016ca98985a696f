//! Cases of the updates: every optimizer, a gradient's norm, the global norm and what follows from it.

use tightfit_ir::op::{
    Adafactor, AdamW, AdamW8bit, Apollo, AppliedStep, GlobalNorm, GradientFactor, Lion, Norm, Rounding, STATE_BLOCK,
    Sgd, UpdateLossScale,
};
use tightfit_ir::{DType, Op, Shape, Tensor, Type};

use super::{Cases, Operand, float};

/// What one update differs from another in, whatever the optimizer.
struct Variant {
    name: &'static str,
    weight: DType,
    rounding: Rounding,
    step: f64,
    factor: Option<f64>,
}

/// Each of them once: first and later steps, every dtype of the weight, a factor, and one that says to skip. Rounding a step does not take it
/// into other random directions of APOLLO.
fn variants() -> [Variant; 5] {
    let nearest = Rounding::Nearest;
    let stochastic = Rounding::Stochastic { key: 7 };
    [
        ("first step", DType::F32, nearest, 1.0, None),
        ("later step, clipped", DType::F32, nearest, 1234.0, Some(0.25)),
        ("bf16", DType::Bf16, nearest, 3.0, Some(1.0)),
        ("f16, stochastic rounding", DType::F16, stochastic, 250.0, None),
        ("bf16, skipped", DType::Bf16, stochastic, 3.0, Some(f64::NAN)),
    ]
    .map(|(name, weight, rounding, step, factor)| Variant {
        name,
        weight,
        rounding,
        step,
        factor,
    })
}

/// Adds the variants of an update. `states` makes the states of a weight; before the first step they are zeros.
fn add(
    cases: &mut Cases,
    shape: impl Into<Shape>,
    op: impl Fn(&Variant) -> Op,
    states: impl Fn(&mut Cases, bool) -> Vec<Operand>,
) {
    let shape = shape.into();
    for variant in variants() {
        let weight = stored(variant.weight, cases.normal(shape.clone(), 1.0));
        let mut operands = vec![weight, cases.normal(shape.clone(), 0.1)];
        operands.extend(states(cases, variant.step == 1.0));
        operands.extend([1e-3, variant.step].map(|x| float(Tensor::scalar(x))));
        operands.extend(variant.factor.map(|factor| float(Tensor::scalar(factor))));
        cases.add(variant.name, op(&variant), operands);
    }
}

/// An operand as numbers of that dtype, which it is rounded to.
fn stored(dtype: DType, (mut ty, mut tensor): Operand) -> Operand {
    ty.dtype = dtype;
    tensor.data.iter_mut().for_each(|x| {
        *x = match dtype {
            DType::Bf16 => half::bf16::from_f64(*x).to_f64(),
            DType::F16 => half::f16::from_f64(*x).to_f64(),
            _ => *x,
        }
    });
    (ty, tensor)
}

/// A state of that shape: normal, or zeros before the first step.
fn state(cases: &mut Cases, shape: impl Into<Shape>, fresh: bool, std: f64) -> Operand {
    let (ty, mut tensor) = cases.normal(shape, std);
    if fresh {
        tensor.data.fill(0.0);
    }
    (ty, tensor)
}

/// A state that is never negative, and positive after the first step.
fn squares(cases: &mut Cases, shape: impl Into<Shape>, fresh: bool) -> Operand {
    let (ty, mut tensor) = state(cases, shape, fresh, 0.01);
    if !fresh {
        tensor.data.iter_mut().for_each(|x| *x = x.abs() + 1e-3);
    }
    super::exact(ty, tensor)
}

fn adam(variant: &Variant) -> AdamW {
    AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        factor: variant.factor.is_some(),
        rounding: variant.rounding,
    }
}

pub(super) fn adamw(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    add(
        cases,
        shape,
        |variant| adam(variant).into(),
        |cases, fresh| vec![state(cases, shape, fresh, 0.1), squares(cases, shape, fresh)],
    );
}

pub(super) fn adamw_8bit(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    let blocks = (shape[0] * shape[1]).div_ceil(STATE_BLOCK);
    let codes = |cases: &mut Cases, zero: f64, fresh| {
        let mut codes = Tensor::zeros(shape);
        // Those of the largest magnitudes are what a block has at least one of.
        codes
            .data
            .fill_with(|| if fresh { zero } else { cases.rng.below(256) as f64 });
        [(Type::new(DType::U8, shape), codes), squares(cases, [blocks], fresh)]
    };
    add(
        cases,
        shape,
        |variant| AdamW8bit(adam(variant)).into(),
        |cases, fresh| [codes(cases, 127.0, fresh), codes(cases, 0.0, fresh)].concat(),
    );
}

pub(super) fn lion(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    let op = |variant: &Variant| Lion {
        beta1: 0.9,
        beta2: 0.99,
        weight_decay: 0.1,
        factor: variant.factor.is_some(),
        rounding: variant.rounding,
    };
    add(
        cases,
        shape,
        |variant| op(variant).into(),
        |cases, fresh| vec![state(cases, shape, fresh, 0.1)],
    );
}

pub(super) fn sgd(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    for momentum in [0.9, 0.0] {
        let op = |variant: &Variant| Sgd {
            momentum,
            weight_decay: 0.1,
            factor: variant.factor.is_some(),
            rounding: variant.rounding,
        };
        add(
            cases,
            shape,
            |variant| op(variant).into(),
            |cases, fresh| {
                let buffer = (momentum != 0.0).then(|| state(cases, shape, fresh, 0.1));
                buffer.into_iter().collect()
            },
        );
    }
}

pub(super) fn adafactor(cases: &mut Cases) {
    let (rows, cols) = (cases.dims.rows, cases.dims.cols);
    let op = |variant: &Variant, factored| Adafactor {
        factored,
        decay: 0.8,
        eps: 1e-30,
        clip: 1.0,
        weight_decay: 0.1,
        factor: variant.factor.is_some(),
        rounding: variant.rounding,
    };
    add(
        cases,
        [rows, cols],
        |variant| op(variant, true).into(),
        |cases, fresh| vec![squares(cases, [rows], fresh), squares(cases, [cols], fresh)],
    );
    add(
        cases,
        [cols],
        |variant| op(variant, false).into(),
        |cases, fresh| vec![squares(cases, [cols], fresh)],
    );
}

pub(super) fn apollo(cases: &mut Cases) {
    let (rows, cols) = (cases.dims.rows, cases.dims.cols);
    let rank = rows.min(cols).div_ceil(3);
    let moments = [rows.max(cols), rank];
    let op = |variant: &Variant| Apollo {
        rank,
        refresh: 200,
        key: 11,
        growth: 1.01,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        factor: variant.factor.is_some(),
        rounding: variant.rounding,
    };
    add(
        cases,
        [rows, cols],
        |variant| op(variant).into(),
        |cases, fresh| {
            // A norm that the next is held to.
            let norm = float(Tensor::scalar(if fresh { 0.0 } else { 0.5 }));
            vec![state(cases, moments, fresh, 0.1), squares(cases, moments, fresh), norm]
        },
    );
}

pub(super) fn norm(cases: &mut Cases) {
    let (rows, cols, inner) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    for operand in [
        cases.normal([rows, cols], 1.0),
        cases.normal([inner], 2.0),
        cases.normal([1], 1.0),
    ] {
        cases.add("a gradient", Norm {}, vec![operand]);
    }
}

fn scalars<const N: usize>(numbers: [f64; N]) -> Vec<Operand> {
    numbers.map(|x| float(Tensor::scalar(x))).into()
}

pub(super) fn global_norm(cases: &mut Cases) {
    let plain = GlobalNorm { scaled: false };
    cases.add("one gradient", plain.clone(), scalars([0.75]));
    // Their squares are no finite numbers of `f32`.
    cases.add("several gradients", plain, scalars([3e-30, 2e25, 0.0, 1.5e25]));
    cases.add(
        "gradients of a scaled loss",
        GlobalNorm { scaled: true },
        scalars([3.0, 4.0, 1024.0]),
    );
}

pub(super) fn gradient_factor(cases: &mut Cases) {
    for (max_norm, norm) in [(Some(0.5), 7.25), (Some(1e6), 7.25), (None, 7.25), (Some(1.0), 0.0)] {
        for scale in [None, Some(65536.0)] {
            let op = GradientFactor {
                max_norm,
                scaled: scale.is_some(),
            };
            let mut operands = scalars([norm]);
            operands.extend(scale.map(|scale| float(Tensor::scalar(scale))));
            cases.add("a finite norm", op, operands);
        }
    }
}

pub(super) fn update_loss_scale(cases: &mut Cases) {
    for (name, operands) in [
        ("went well", [3.0, 1024.0, 4.0, 2.0]),
        ("grows", [3.0, 1024.0, 12.0, 2.0]),
        ("too large to grow", [3.0, 2e38, 12.0, 2.0]),
        ("backs off", [f64::INFINITY, 1024.0, 4.0, 2.0]),
        ("backs off", [f64::NAN, 1024.0, 4.0, 2.0]),
    ] {
        let op = UpdateLossScale {
            growth: 2.0,
            backoff: 0.5,
            growth_interval: 10,
        };
        cases.add(name, op, scalars(operands));
    }
}

pub(super) fn applied_step(cases: &mut Cases) {
    cases.add("some were skipped", AppliedStep {}, scalars([12.0, 5.0]));
}
