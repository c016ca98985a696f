//! Cases of attention and RoPE: grouped queries, documents of different lengths, sliding windows.

use tightfit_ir::Tensor;
use tightfit_ir::op::{Attention, AttentionBackward, Rope, RopeScaling, RopeTable};

use super::{Cases, Operand, forward, integer};

/// Heads, key-value heads, `head_dim`: one of each, grouped queries, sizes that no vector divides, and the usual 64.
pub(super) const HEADS: [(u64, u64, u64); 4] = [(1, 1, 1), (4, 2, 6), (3, 1, 9), (2, 2, 64)];

/// Every attention of the suite with `q, k, v, doc_start` for it.
fn variants(cases: &mut Cases) -> Vec<(&'static str, Attention, Vec<Operand>)> {
    let rows = cases.dims.rows;
    let mut variants = Vec::new();
    for (heads, kv_heads, head_dim) in HEADS {
        let longest = rows.div_ceil(3);
        for (name, context, window) in [
            ("one document", rows, None),
            ("documents", longest, None),
            ("context beyond the rows", rows + 9, None),
            ("window of one row", rows, Some(1)),
            ("window inside documents", longest, Some(1 + longest / 2)),
            ("window beyond documents", longest, Some(rows + 3)),
        ] {
            let doc_start = match name {
                "one document" | "window of one row" => integer(vec![0.0; rows as usize]),
                _ => integer(doc_starts(cases, longest)),
            };
            let query = cases.activation([rows, heads * head_dim], 1.0);
            let [key, value] = [(); 2].map(|()| cases.activation([rows, kv_heads * head_dim], 1.0));
            let op = Attention {
                heads,
                kv_heads,
                head_dim,
                scale: 1.0 / (head_dim as f64).sqrt(),
                context,
                window,
            };
            variants.push((name, op, vec![query, key, value, doc_start]));
        }
    }
    let (_, op, operands) = variants[0].clone();
    let sure = Attention { scale: 30.0, ..op };
    variants.push(("sure of one row", sure, operands));
    variants
}

/// Where each row's document starts; no document is longer than `longest`.
fn doc_starts(cases: &mut Cases, longest: u64) -> Vec<f64> {
    let lengths = std::iter::repeat_with(|| 1 + cases.rng.below(longest));
    let starts = lengths.scan(0, |next, length| {
        let start = *next;
        *next += length;
        Some(std::iter::repeat_n(start as f64, length as usize))
    });
    starts.flatten().take(cases.dims.rows as usize).collect()
}

pub(super) fn attention(cases: &mut Cases) {
    for (name, op, operands) in variants(cases) {
        cases.add(name, op, operands);
    }
}

pub(super) fn attention_backward(cases: &mut Cases) {
    for (name, op, mut operands) in variants(cases) {
        let saved = forward(op.clone(), &operands);
        operands.extend(saved);
        operands.push(cases.activation([cases.dims.rows, op.heads * op.head_dim], 1.0));
        cases.add(name, AttentionBackward(op), operands);
    }
}

pub(super) fn rope(cases: &mut Cases) {
    for (heads, _, head_dim) in HEADS {
        let head_dim = 2 * head_dim;
        let positions = positions(cases);
        let table = RopeTable {
            head_dim,
            theta: 10_000.0,
            scaling: None,
        };
        let table = forward(table, &[positions]).swap_remove(0);
        for inverse in [false, true] {
            let x = cases.activation([cases.dims.rows, heads * head_dim], 1.0);
            cases.add("table of random positions", Rope { inverse }, vec![x, table.clone()]);
        }
    }
}

pub(super) fn rope_table(cases: &mut Cases) {
    let linear = RopeScaling::Linear { factor: 4.0 };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192.0,
    };
    for (_, _, head_dim) in HEADS {
        for (name, theta, scaling) in [
            ("random positions", 10_000.0, None),
            ("a larger base", 500_000.0, None),
            ("linear scaling", 10_000.0, Some(linear)),
            ("llama3 scaling", 500_000.0, Some(llama3)),
        ] {
            let table = RopeTable {
                head_dim: 2 * head_dim,
                theta,
                scaling,
            };
            let positions = positions(cases);
            cases.add(name, table, vec![positions]);
        }
    }
}

/// Positions up to those of long documents, where angles are large; the first is 0.
fn positions(cases: &mut Cases) -> Operand {
    let (ty, mut positions): (_, Tensor) = cases.ids(cases.dims.rows, 131_072);
    positions.data[0] = 0.0;
    (ty, positions)
}
