//! AdamW with states of 8 bits.

use serde::{Deserialize, Serialize};
use tightfit_quant::dynamic;

use super::super::{Alias, Cost, Gradient, Op, OpError, Rule};
use super::{AdamW, Update, infer_update, update_aliases, update_cost};
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// Elements of a state that share one scale.
pub const STATE_BLOCK: u64 = 256;

/// `weight, gradient, m: u8, m_absmax: f32[B], v: u8, v_absmax: f32[B], lr, step (, factor) → weight, m, m_absmax, v, v_absmax`.
///
/// [`AdamW`] whose states are codes of the 8-bit dynamic maps, signed for the first moment and unsigned for the second, times the largest
/// magnitude of their block; `B` blocks of [`STATE_BLOCK`] elements in row-major order, the last one maybe shorter. The weight is updated
/// by the moments as they are before they are rounded to codes. Dettmers et al. 2021, arXiv:2110.02861.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AdamW8bit(pub AdamW);

impl Rule for AdamW8bit {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        infer_update("adamw_8bit", inputs, self.0.factor, self.0.rounding, |weight| {
            let codes = Type::new(DType::U8, weight.shape.clone());
            let absmax = Type::f32([weight.shape.elements().div_ceil(STATE_BLOCK)]);
            let types = [&codes, &absmax, &codes, &absmax];
            let names = ["m", "m's absmax", "v", "v's absmax"];
            names.into_iter().zip(types.map(Type::clone)).collect()
        })
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        update_cost(40, 0, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        update_aliases(4)
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        Update::run(inputs, self.0.factor, |update| {
            update.decay(self.0.weight_decay);
            let [m_codes, m_absmax, v_codes, v_absmax] = &mut update.states[..] else {
                unreachable!()
            };
            let (signed, unsigned) = (dynamic::signed(), dynamic::unsigned());
            let mut m = decode(signed, m_codes, m_absmax);
            let mut v = decode(unsigned, v_codes, v_absmax);
            for (i, &g) in update.gradient.data.iter().enumerate() {
                let (m1, v1, change) = self.0.moments(g, (m[i], v[i]), update.step);
                (m[i], v[i]) = (m1, v1);
                update.weight.data[i] += update.lr * change;
            }
            encode(signed, &m, m_codes, m_absmax);
            encode(unsigned, &v, v_codes, v_absmax);
        })
    }
}

/// A state's elements.
fn decode(map: &[f32; 256], codes: &Tensor, absmax: &Tensor) -> Vec<f64> {
    let blocks = codes.data.chunks(STATE_BLOCK as usize).zip(&absmax.data);
    blocks
        .flat_map(|(codes, absmax)| codes.iter().map(move |&code| f64::from(map[code as usize]) * absmax))
        .collect()
}

/// The codes of a state's elements, and the scales of its blocks.
fn encode(map: &[f32; 256], state: &[f64], codes: &mut Tensor, absmax: &mut Tensor) {
    let blocks = codes.data.chunks_mut(STATE_BLOCK as usize).zip(&mut absmax.data);
    for (state, (codes, absmax)) in state.chunks(STATE_BLOCK as usize).zip(blocks) {
        *absmax = state.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
        for (code, x) in codes.iter_mut().zip(state) {
            let x = if *absmax > 0.0 { x / *absmax } else { 0.0 };
            let distance = |code: usize| (f64::from(map[code]) - x).abs();
            *code = (0..256)
                .min_by(|&a, &b| distance(a).total_cmp(&distance(b)))
                .unwrap_or(0) as f64;
        }
    }
}
