//! Data to feed a model: valid ids, documents of different lengths, ignored targets.

use tightfit_ir::Tensor;

use crate::interpret::Named;
use crate::rng::Rng;

/// What a batch must fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSpec {
    /// Rows of one micro-batch.
    pub rows: u64,
    /// Tokens and targets lie in `0..vocab_size`.
    pub vocab_size: u64,
    /// The longest document, in rows.
    pub context: u64,
    /// The target of rows that count nothing.
    pub ignore_index: i32,
}

/// One batch as its micro-batches: `tokens`, `targets`, `positions`, `doc_start`, and the `token_count` of all of them together.
///
/// Positions start again with each document; about one target in five is ignored, never all.
pub fn batch(spec: BatchSpec, micro_batches: usize, seed: u64) -> Vec<Named> {
    let mut rng = Rng::new(seed);
    let mut batch: Vec<Named> = (0..micro_batches).map(|_| micro_batch(spec, &mut rng)).collect();
    let targets = batch.iter().flat_map(|fed| &fed["targets"].data);
    let count = targets
        .filter(|&&target| target != f64::from(spec.ignore_index))
        .count();
    for fed in &mut batch {
        fed.insert("token_count".to_owned(), Tensor::scalar(count as f64));
    }
    batch
}

fn micro_batch(spec: BatchSpec, rng: &mut Rng) -> Named {
    let mut columns: [Vec<f64>; 4] = Default::default();
    let [tokens, targets, positions, doc_start] = &mut columns;
    let mut end = 0;
    for row in 0..spec.rows {
        if row == end {
            end += 1 + rng.below(spec.context);
            doc_start.push(row as f64);
        } else {
            doc_start.push(doc_start[row as usize - 1]);
        }
        positions.push(row as f64 - doc_start[row as usize]);
        tokens.push(rng.below(spec.vocab_size) as f64);
        targets.push(match rng.below(5) {
            0 if row > 0 => f64::from(spec.ignore_index),
            _ => rng.below(spec.vocab_size) as f64,
        });
    }
    let names = ["tokens", "targets", "positions", "doc_start"].map(str::to_owned);
    let tensors = columns.map(|column| Tensor::new([spec.rows], column));
    names.into_iter().zip(tensors).collect()
}
