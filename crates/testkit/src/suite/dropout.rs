//! Cases of dropout: few and many zeros, token numbers at the ends of their words.

use tightfit_ir::op::{Dropout, token_words};

use super::{Cases, integer};

pub(super) fn dropout(cases: &mut Cases) {
    let last = u64::from(u32::MAX);
    for (name, p, first_row, token) in [
        ("the first tokens", 0.1, 0, 0),
        ("tokens across a word's end", 0.5, 0, last - 2),
        ("some rows of a batch", 0.9, 5, 3 * last),
        ("the last tokens", 0.5, 1, u64::MAX),
    ] {
        let x = cases.activation([cases.dims.rows, cases.dims.cols], 1.0);
        let key = cases.rng.bits();
        let words = token_words(token).map(f64::from).to_vec();
        cases.add(name, Dropout { p, key, first_row }, vec![x, integer(words)]);
    }
}
