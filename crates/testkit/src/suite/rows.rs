//! Cases of rows taken out and put back: at both ends, in the middle, one row and all of them.

use tightfit_ir::op::{Accumulate, PadRows, SliceRows};

use super::Cases;

/// What is particular, the first row and how many.
fn ranges(rows: u64) -> [(&'static str, u64, u64); 5] {
    let part = rows.div_ceil(3);
    [
        ("the first rows", 0, part),
        ("rows in the middle", (rows - part) / 2, part),
        ("the last rows", rows - part, part),
        ("the last row", rows - 1, 1),
        ("all rows", 0, rows),
    ]
}

pub(super) fn slice_rows(cases: &mut Cases) {
    for (name, start, rows) in ranges(cases.dims.rows) {
        let x = cases.activation([cases.dims.rows, cases.dims.cols], 1.0);
        cases.add(name, SliceRows { start, rows }, vec![x]);
    }
}

pub(super) fn pad_rows(cases: &mut Cases) {
    let total = cases.dims.rows;
    for (name, start, rows) in ranges(total) {
        let x = cases.activation([rows, cases.dims.cols], 1.0);
        let op = PadRows {
            start,
            total,
            accumulate: Accumulate::NONE,
        };
        cases.add(name, op, vec![x]);
    }
}
