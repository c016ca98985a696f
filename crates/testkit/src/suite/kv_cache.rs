//! Cases of generation with a cache: prompts and single tokens, at its start, inside, up to its last row and beyond its ends.

use tightfit_ir::op::{CachedAttention, KvAppend};

use super::attention::HEADS;
use super::{Cases, Operand, integer};

/// New rows, rows of the cache, and where the new ones start.
fn places(cases: &Cases) -> [(&'static str, u64, u64, i32); 8] {
    let rows = cases.dims.rows;
    let capacity = 2 * rows + cases.dims.inner;
    let left = (capacity - rows) as i32;
    [
        ("an empty cache", rows, capacity, 0),
        ("inside the cache", rows, capacity, left / 2),
        ("up to the last row", rows, capacity, left),
        ("one token", 1, capacity, capacity as i32 / 2),
        ("all of the cache", rows, rows, 0),
        ("beyond the last row", rows, capacity, left + 1 + rows as i32 / 2),
        ("far outside", rows, capacity, i32::MAX),
        ("before the first row", rows, capacity, -1 - rows as i32 / 2),
    ]
}

fn start(row: i32) -> Operand {
    integer(vec![f64::from(row)])
}

pub(super) fn kv_append(cases: &mut Cases) {
    for (name, rows, capacity, row) in places(cases) {
        let [cache, new] = [capacity, rows].map(|rows| cases.activation([rows, cases.dims.cols], 1.0));
        cases.add(name, KvAppend {}, vec![cache, new, start(row)]);
    }
}

pub(super) fn cached_attention(cases: &mut Cases) {
    for (index, (name, rows, capacity, row)) in places(cases).into_iter().enumerate() {
        let windows = match index % 2 {
            0 => [None, Some(1 + capacity / 3)],
            _ => [Some(1), Some(capacity + 2)],
        };
        for (heads, kv_heads, head_dim) in HEADS {
            for window in windows {
                let query = cases.activation([rows, heads * head_dim], 1.0);
                let [keys, values] = [(); 2].map(|()| cases.activation([capacity, kv_heads * head_dim], 1.0));
                let op = CachedAttention {
                    heads,
                    kv_heads,
                    head_dim,
                    scale: 1.0 / (head_dim as f64).sqrt(),
                    window,
                };
                cases.add(name, op, vec![query, keys, values, start(row)]);
            }
        }
    }
}
