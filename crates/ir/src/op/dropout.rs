//! Inverted dropout (Srivastava et al. 2014), its mask a function of where an element stands and of nothing else.
//!
//! Every element draws from a counter: its token's number in the whole run, its column, and a key for the layer. So a recomputation,
//! a batch cut into other micro-batches or rows cut into tiles have the mask that they would have had, on any number of threads
//! (Salmon et al. 2011 make the case for such generators). Nothing is saved for the backward, which draws the mask again.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::random::{STEP, mix};
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// `x: T[M, N], first_token: i32[2] → y: T[M, N]`: 0 with probability `p`, else `x / (1 − p)`. Row `t` is token
/// `first_token + first_row + t`. Linear in `x`: its gradient is the operation itself, with the same mask.
///
/// `first_token` is a number of 64 bits, its low half first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// The share of elements that become zero: above 0 and below 1.
    pub p: f64,
    /// What tells this layer's masks, in this run, from all others'.
    pub key: u64,
    /// The row of the batch that row 0 of `x` is, where `x` has some of its rows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first_row: u64,
}

fn is_zero(row: &u64) -> bool {
    *row == 0
}

impl Dropout {
    /// What kept elements are multiplied by.
    pub fn factor(&self) -> f32 {
        (1.0 / (1.0 - self.p)) as f32
    }

    /// Elements whose draw is below it are dropped.
    pub fn threshold(&self) -> u32 {
        // Saturates: for p of nearly 1 all but one in 2³² draws.
        (self.p * 2_f64.powi(32)) as u32
    }

    /// The draws of a row: of row `row` of `x`, in a batch that begins with token `first_token`.
    #[inline(always)]
    pub fn draws(&self, first_token: u64, row: u64) -> Draws {
        let token = first_token.wrapping_add(self.first_row).wrapping_add(row);
        Draws::new(self.key, token)
    }
}

/// The token number in an operand `first_token`.
pub fn token_number(words: [i32; 2]) -> u64 {
    let [low, high] = words.map(|word| u64::from(word.cast_unsigned()));
    low | high << 32
}

/// The words of an operand `first_token`.
pub fn token_words(token: u64) -> [i32; 2] {
    [token as u32, (token >> 32) as u32].map(u32::cast_signed)
}

/// Uniform 32-bit numbers, one for each column of a row.
///
/// The row's 64 bits come from SplitMix64's finalizer (Steele, Lea and Flood 2014). One half of them and the column go through a
/// finalizer of 32 bits (`lowbias32`, Wellons 2018, <https://nullprogram.com/blog/2018/07/31/>), then once more with the other half:
/// a few integer multiplications that vectorise.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    low: u32,
    high: u32,
}

impl Draws {
    #[inline(always)]
    fn new(key: u64, token: u64) -> Self {
        let row = mix(key.wrapping_add(token.wrapping_mul(STEP)));
        Self {
            low: row as u32,
            high: (row >> 32) as u32,
        }
    }

    /// The draw of a column.
    #[inline(always)]
    pub fn at(self, column: u32) -> u32 {
        mix32(mix32(column ^ self.low) ^ self.high)
    }
}

#[inline(always)]
fn mix32(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
    x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

impl Rule for Dropout {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("dropout", inputs, 2)?;
        let x = check.float(0, "x", 2)?;
        check.exactly(1, "first_token", &Type::new(DType::I32, [2]))?;
        if !(self.p > 0.0 && self.p < 1.0 && self.factor().is_finite()) {
            return check.invalid(format!("p is {}, expected above 0 and below 1", self.p));
        }
        Ok(vec![x.clone()])
    }

    /// A draw takes a dozen integer operations.
    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(outputs[0].shape.elements().saturating_mul(16), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let dx = g.emit(self.clone(), &[dy, g.input(1)])?[0];
        g.give(0, dx);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let words = [inputs[1].data[0], inputs[1].data[1]].map(|word| word as i32);
        let first_token = token_number(words);
        let factor = 1.0 / (1.0 - self.p);
        let mut y = inputs[0].clone();
        for row in 0..y.rows() {
            let draws = self.draws(first_token, row as u64);
            for (column, x) in y.row_mut(row).iter_mut().enumerate() {
                *x *= if draws.at(column as u32) < self.threshold() {
                    0.0
                } else {
                    factor
                };
            }
        }
        vec![y]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dropped(p: f64, key: u64, tokens: std::ops::Range<u64>, columns: u32) -> Vec<bool> {
        let op = Dropout { p, key, first_row: 0 };
        let rows = tokens.map(|token| op.draws(token, 0));
        let threshold = op.threshold();
        rows.flat_map(|draws| (0..columns).map(move |column| draws.at(column) < threshold))
            .collect()
    }

    #[test]
    fn as_many_are_dropped_as_asked_and_neighbours_do_not_go_together() {
        for p in [0.01, 0.1, 0.5, 0.9] {
            let (rows, columns) = (512_usize, 513_usize);
            let mask = dropped(p, 7, 0..rows as u64, columns as u32);
            let share = |both: usize, of: usize| both as f64 / of as f64;
            let deviations = |found: f64, expected: f64, n: usize| {
                (found - expected).abs() / (expected * (1.0 - expected) / n as f64).sqrt()
            };
            let all = share(mask.iter().filter(|&&dropped| dropped).count(), mask.len());
            assert!(deviations(all, p, mask.len()) < 4.0, "p {p}: {all}");
            // Elements side by side, in a row and below each other, and of the next key.
            let other = dropped(p, 8, 0..rows as u64, columns as u32);
            for (what, pairs) in [
                ("row", mask.iter().zip(&mask[1..]).collect::<Vec<_>>()),
                ("column", mask.iter().zip(&mask[columns..]).collect()),
                ("key", mask.iter().zip(&other).collect()),
            ] {
                let both = share(pairs.iter().filter(|(a, b)| **a && **b).count(), pairs.len());
                assert!(deviations(both, p * p, pairs.len()) < 4.0, "p {p}, {what}: {both}");
            }
        }
    }

    #[test]
    fn token_numbers_go_through_their_words() {
        for token in [0, 1, u64::from(u32::MAX), 1 << 32, (5 << 32) + (7 << 28), u64::MAX] {
            assert_eq!(token_number(token_words(token)), token);
        }
    }

    #[test]
    fn rows_of_a_tile_draw_as_in_the_whole() {
        let op = |first_row| Dropout {
            p: 0.5,
            key: 3,
            first_row,
        };
        assert_eq!(op(10).draws(100, 4).at(9), op(0).draws(100, 14).at(9));
        assert_ne!(op(0).draws(100, 4).at(9), op(0).draws(101, 4).at(9));
    }
}
