//! The matrix product, in memory that the caller gives.
//!
//! The structure follows BLIS (Van Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS Functionality", ACM
//! TOMS 2015), with one loop turned: C is cut into column blocks, and a block of B as deep as the workspace has room for is
//! packed by all threads together. Then they share the tiles of C; a tile runs through all of that depth while it stays in the
//! second-level cache, so that C is read and written once and threads wait for each other twice. Each register tile is computed
//! by the micro-kernel in `kernel.rs`.
//!
//! Sums are `f32`. Matrices may be stored in 16 bits, B also in a quantised format: they are converted block by block while they are
//! packed. Where an instruction multiplies bfloat16 and A is stored so, B is rounded to it instead, and two terms share a word. A C in
//! 16 bits would round partial sums, so then B is packed as deep as the sum and a tile's sums are kept in `f32` until they are complete.
//!
//! Every element of C is summed in one order, k ascending within blocks and blocks ascending, and the blocks depend on shape and
//! instruction set only. So results are bit-equal for any number of threads, and under any tiling of C.

mod blocking;
mod form;
mod kernel;
mod matrix;
mod output;
mod pack;
mod terms;

use crate::floats::Floats;
use crate::multiversion;
use crate::pool::{Member, Pool};
use crate::simd::{Isa, Portable};
use blocking::Blocking;
use kernel::Micro;
use output::Output;
use std::ops::Range;
use terms::{Pairs, Single, Terms};

pub use form::Form;
pub use matrix::{BlockView, Matrix, View};

/// Alignment of the workspace in bytes.
pub const WORKSPACE_ALIGN: usize = 64;

/// `C = A · B`, plus a matrix and a row if given: `C[i, j] = Σ A[i, p] B[p, j] + D[i, j] + bias[j]`.
///
/// C is `m × n`, A is `m × k`, B is `k × n`. With `k = 0` the sum is zero and the rest is added.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// A, `m × k`.
    pub a: View,
    /// B, `k × n`.
    pub b: Matrix,
    /// C, `m × n`, rows of contiguous numbers. What it held before is not read.
    pub c: Floats,
    /// Numbers from one row of C to the next.
    pub c_stride: usize,
    /// D, `m × n`, stored as C is, and its row stride. It may be C itself with the same stride, which accumulates
    /// in place.
    pub add: Option<(Floats, usize)>,
    /// A row of `n` numbers.
    pub bias: Option<Floats>,
}

impl Gemm {
    /// Its form.
    pub fn form(&self) -> Form {
        let form = Form::new(self.m, self.n, self.k).stored(self.a.data.stored(), self.c.stored());
        match self.b {
            Matrix::Floats(_) => form,
            Matrix::Block(b) => form.decoding(b.block, b.transposed),
        }
    }

    /// Computes the product on every thread of `pool`.
    ///
    /// # Safety
    /// - This machine can run `isa`.
    /// - All elements of the views, of D and of bias are readable, those of C writable.
    /// - C overlaps none of them, but D when it is C with the same stride.
    /// - `workspace` is aligned to [`WORKSPACE_ALIGN`], holds the [`Form::workspace_bytes`] of
    ///   [`form`](Self::form) and `pool.threads()`, and overlaps nothing else.
    pub unsafe fn run(&self, pool: &Pool, isa: Isa, workspace: *mut u8) {
        let job = &Job {
            gemm: *self,
            workspace: workspace.cast(),
        };
        // SAFETY: the caller's contract.
        pool.team(|member| unsafe { product(isa, &member, job) });
    }

    /// Computes the product on the calling thread, for kernels that give each of their own tiles
    /// to one thread.
    ///
    /// # Safety
    /// As for [`run`](Gemm::run), with the workspace for one thread.
    pub unsafe fn run_serial(&self, isa: Isa, workspace: *mut u8) {
        let job = &Job {
            gemm: *self,
            workspace: workspace.cast(),
        };
        // SAFETY: the caller's contract.
        unsafe { product(isa, &Member::solo(), job) };
    }
}

/// What the members of a team share.
struct Job {
    gemm: Gemm,
    workspace: *mut f32,
}

// SAFETY: members read A, B, D and bias, and write disjoint parts of C and of the workspace
// between two barriers.
unsafe impl Sync for Job {}

/// One member's part of the product.
///
/// # Safety
/// As for [`Gemm::run`]; every member of the team calls it.
unsafe fn product(isa: Isa, member: &Member, job: &Job) {
    // SAFETY: the caller's contract; `isa` multiplies what is asked of it.
    unsafe {
        match job.gemm.form().terms_in_word(isa) {
            1 => product_of_singles(isa, member, job),
            _ => product_of_pairs(isa, member, job),
        }
    }
}

multiversion! {
    /// # Safety
    /// As for [`product`].
    unsafe fn product_of_singles(member: &Member, job: &Job) = singles_body;
}

#[inline(always)]
unsafe fn singles_body<S: Micro>(s: S, member: &Member, job: &Job) {
    // SAFETY: the caller's contract.
    unsafe { product_body(s, Single, member, job) }
}

/// # Safety
/// As for [`product`], and `isa` multiplies bfloat16.
unsafe fn product_of_pairs(isa: Isa, member: &Member, job: &Job) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn avx512(member: &Member, job: &Job) {
        // SAFETY: the instructions exist here; the rest is the caller's contract.
        unsafe {
            let s = crate::simd::Avx512::new_unchecked();
            product_body(s, Pairs::new_unchecked(), member, job)
        }
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller vouches that this machine can run `isa`.
        Isa::Avx512Bf16 => unsafe { avx512(member, job) },
        // SAFETY: no vectors of AVX-512; the rest is the caller's contract.
        _ => unsafe { product_body(Portable, Pairs::new_unchecked(), member, job) },
    }
}

#[inline(always)]
unsafe fn product_body<S: Micro, T: Terms<S>>(s: S, t: T, member: &Member, job: &Job) {
    let Job { gemm, workspace } = job;
    let &Gemm { k, b, .. } = gemm;
    let a = Matrix::Floats(gemm.a);
    let blocking = Blocking::with(&S::SIZES, &gemm.form(), T::IN_WORD);
    let nr = S::SIZES.nr;
    // SAFETY: within the workspace.
    let (packed_a, sums, packed_b) = unsafe {
        let own = blocking.packed_a() + blocking.sums();
        let packed_a = workspace.add(member.id * own);
        let sums = packed_a.add(blocking.packed_a());
        (packed_a, sums, workspace.add(member.count * own))
    };
    let terms = |words: &Range<usize>| words.start * T::IN_WORD..k.min(words.end * T::IN_WORD);

    // Rows of contiguous words are read where they are.
    let rows_of_words = a.words(T::IN_WORD, k).filter(|_| !a.is_transposed());
    let blocking = match rows_of_words {
        Some(_) => blocking,
        None => blocking.copying(),
    };
    // Blocks of a quantised matrix that lie across the panels are decoded once for all of them.
    let width = match b.is_block() && !b.is_transposed() {
        true => pack::WIDTH,
        false => nr,
    };
    for columns in blocking.column_blocks() {
        let panels = columns.len().div_ceil(nr);
        let groups = columns.len().div_ceil(width);
        for deep in blocking.deep_blocks() {
            // Each depth block's panels follow those of the block before.
            let packed = |depth: usize| packed_b.wrapping_add((depth - deep.start) * panels * nr);
            for part in member.tiles(groups * blocking.depth_blocks(&deep).count()) {
                let depth = blocking.depth_block(&deep, part / groups);
                let first = part % groups * width;
                let part = columns.start + first..columns.end.min(columns.start + first + width);
                // SAFETY: the panels are inside B and their copy inside the packed block.
                unsafe {
                    let copy = packed(depth.start).add(first * depth.len());
                    pack::panels::<S, T>(s, &b, k, terms(&depth), part, copy);
                }
            }
            for tile in member.tiles(blocking.tiles(columns.len())) {
                let (rows, tile_columns) = blocking.tile(tile, &columns);
                // All of the sum that is packed, while the tile of C is in the second-level cache.
                for depth in blocking.depth_blocks(&deep) {
                    let kc = depth.len();
                    // SAFETY: all blocks are inside their matrices and copies.
                    unsafe {
                        let a = match rows_of_words {
                            Some((words, stride)) => (words.add(rows.start * stride + depth.start), stride),
                            None => {
                                let stride = blocking.a_stride();
                                pack::rows::<S, T>(s, &a, k, rows.clone(), terms(&depth), packed_a, stride);
                                (packed_a.cast_const(), stride)
                            }
                        };
                        for j in tile_columns.clone().step_by(nr) {
                            let cols = nr.min(tile_columns.end - j);
                            let b = packed(depth.start).add((j - columns.start) * kc);
                            let first = depth.start == 0;
                            let out = if blocking.rounded() {
                                let sums = sums.wrapping_add(j - tile_columns.start);
                                Output::sums(sums, blocking.sums_stride(), first, cols)
                            } else {
                                Output::of(gemm, first, rows.start, j, cols)
                            };
                            kernel::panel(s, t, rows.len(), kc, a, b, out);
                        }
                    }
                }
                if blocking.rounded() {
                    // SAFETY: the tile is inside of C, and its sums are complete.
                    unsafe { output::round(s, gemm, (rows, tile_columns), sums, blocking.sums_stride()) };
                }
            }
        }
    }
}
