//! Copies of blocks of A and B in the order in which the micro-kernel reads them.

use super::View;
use super::kernel::Micro;

/// Copies a `rows × cols` block to rows of contiguous floats, `stride` apart.
///
/// # Safety
/// The block is readable, the rows are writable, and they do not overlap.
#[inline(always)]
pub(super) unsafe fn copy<S: Micro>(s: S, src: View, rows: usize, cols: usize, dst: *mut f32, stride: usize) {
    // SAFETY: all offsets below are inside the block and the rows.
    unsafe {
        if src.col_stride == 1 {
            for i in 0..rows {
                let (src, dst) = (src.at(i, 0).ptr, dst.add(i * stride));
                for j in (0..cols).step_by(S::LANES) {
                    if j + S::LANES <= cols {
                        s.store(dst.add(j), s.load(src.add(j)));
                    } else {
                        s.store_first(dst.add(j), s.load_first(src.add(j), cols - j), cols - j);
                    }
                }
            }
            return;
        }
        let (whole_rows, whole_cols) = if src.row_stride == 1 {
            (rows & !7, cols & !7)
        } else {
            (0, 0)
        };
        for j in (0..whole_cols).step_by(8) {
            for i in (0..whole_rows).step_by(8) {
                s.transpose8(src.at(i, j).ptr, src.col_stride, dst.add(i * stride + j), stride);
            }
        }
        for i in 0..rows {
            let start = if i < whole_rows { whole_cols } else { 0 };
            for j in start..cols {
                *dst.add(i * stride + j) = *src.at(i, j).ptr;
            }
        }
    }
}

/// Packs a `kc × cols` panel of B, `cols` at most `nr`, to rows of `nr` floats, with zeros on the
/// right.
///
/// # Safety
/// The panel is readable, `kc * nr` floats at `dst` are writable, and they do not overlap.
#[inline(always)]
pub(super) unsafe fn panel<S: Micro>(s: S, src: View, kc: usize, cols: usize, dst: *mut f32) {
    let nr = S::SIZES.nr;
    // SAFETY: rows of `nr` floats are inside the destination.
    unsafe {
        copy(s, src, kc, cols, dst, nr);
        if cols < nr {
            for p in 0..kc {
                dst.add(p * nr + cols).write_bytes(0, nr - cols);
            }
        }
    }
}
