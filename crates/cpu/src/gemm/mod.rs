//! The f32 matrix product, in memory that the caller gives.
//!
//! The structure follows BLIS (Van Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS Functionality", ACM
//! TOMS 2015), with one loop turned: C is cut into column blocks, and a block of B as deep as the workspace has room for is
//! packed by all threads together. Then they share the tiles of C; a tile runs through all of that depth while it stays in the
//! second-level cache, so that C is read and written once and threads wait for each other twice. Each register tile is computed
//! by the micro-kernel in `kernel.rs`.
//!
//! Every element of C is summed in one order, k ascending within blocks and blocks ascending, and the blocks depend on shape and
//! instruction set only. So results are bit-equal for any number of threads, and under any tiling of C.

mod blocking;
mod kernel;
mod pack;

use crate::multiversion;
use crate::pool::{Member, Pool};
use crate::simd::Isa;
use blocking::Blocking;
use kernel::{Micro, Output};

/// Alignment of the workspace in bytes.
pub const WORKSPACE_ALIGN: usize = 64;

/// A matrix of floats to read: element (i, j) is at `ptr + i * row_stride + j * col_stride`.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Element (0, 0).
    pub ptr: *const f32,
    /// Floats from one row to the next.
    pub row_stride: usize,
    /// Floats from one column to the next.
    pub col_stride: usize,
}

impl View {
    /// Rows of contiguous floats, `stride` apart.
    pub fn row_major(ptr: *const f32, stride: usize) -> View {
        View {
            ptr,
            row_stride: stride,
            col_stride: 1,
        }
    }

    /// The same matrix with rows and columns exchanged.
    pub fn transposed(self) -> View {
        View {
            ptr: self.ptr,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// The part that starts at element (i, j).
    ///
    /// # Safety
    /// That element is in the same allocation, or its end.
    #[inline(always)]
    unsafe fn at(self, i: usize, j: usize) -> View {
        // SAFETY: the caller's contract.
        let ptr = unsafe { self.ptr.add(i * self.row_stride + j * self.col_stride) };
        View { ptr, ..self }
    }
}

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
    pub b: View,
    /// C, `m × n`, rows of contiguous floats. What it held before is not read.
    pub c: *mut f32,
    /// Floats from one row of C to the next.
    pub c_stride: usize,
    /// D, `m × n`, and its row stride. It may be C itself with the same stride, which accumulates
    /// in place.
    pub add: Option<(*const f32, usize)>,
    /// A row of `n` floats.
    pub bias: Option<*const f32>,
}

/// Bytes of workspace that a product of this shape uses with `threads` threads; exact.
///
/// The packed block of B comes last and is filled to its end by every product, so that the last
/// byte of the workspace is written whatever the threads do.
pub fn workspace_bytes(isa: Isa, m: usize, n: usize, k: usize, threads: usize) -> u64 {
    let blocking = Blocking::new(isa, m, n, k);
    4 * (threads * blocking.packed_a() + blocking.packed_b()) as u64
}

/// What a product of this shape moves in memory, in bytes, each weighed by what it costs: predicted times add it to the flops'.
/// `copied_a`: the columns of A are contiguous, not its rows, so that its blocks are copied too.
///
/// B is packed once; a copied A once for each column block; C is written by each deep block and read by all but the first. With
/// the weights 4, 2 and 1 two rates fit the products of `docs/benchmarks.md` to 2 % (median; 8 % at worst).
pub(crate) fn traffic_bytes(isa: Isa, (m, n, k): (usize, usize, usize), copied_a: bool) -> f64 {
    let blocking = Blocking::new(isa, m, n, k);
    let (m, n, k) = (m as f64, n as f64, k as f64);
    let a = if copied_a {
        m * k * blocking.count_column_blocks() as f64
    } else {
        0.0
    };
    let c = m * n * (2 * blocking.count_deep_blocks()).saturating_sub(1) as f64;
    4.0 * (4.0 * n * k + 2.0 * a + c)
}

impl Gemm {
    /// Computes the product on every thread of `pool`.
    ///
    /// # Safety
    /// - This machine can run `isa`.
    /// - All elements of the views, of D and of bias are readable, those of C writable.
    /// - C overlaps none of them, but D when it is C with the same stride.
    /// - `workspace` is aligned to [`WORKSPACE_ALIGN`], holds [`workspace_bytes`] for
    ///   `pool.threads()`, and overlaps nothing else.
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

multiversion! {
    /// One member's part of the product.
    ///
    /// # Safety
    /// As for [`Gemm::run`]; every member of the team calls it.
    unsafe fn product(member: &Member, job: &Job) = product_body;
}

#[inline(always)]
unsafe fn product_body<S: Micro>(s: S, member: &Member, job: &Job) {
    let Job { gemm, workspace } = job;
    let blocking = Blocking::with(&S::SIZES, gemm.m, gemm.n, gemm.k);
    let nr = S::SIZES.nr;
    // SAFETY: within the workspace.
    let packed_a = unsafe { workspace.add(member.id * blocking.packed_a()) };
    // SAFETY: within the workspace.
    let packed_b = unsafe { workspace.add(member.count * blocking.packed_a()) };

    // Rows of contiguous floats are read where they are.
    let pack_a = gemm.a.col_stride != 1;
    let blocking = if pack_a { blocking.wide() } else { blocking };
    for columns in blocking.column_blocks() {
        let panels = columns.len().div_ceil(nr);
        for deep in blocking.deep_blocks() {
            // Each depth block's panels follow those of the block before.
            let packed = |depth: usize| packed_b.wrapping_add((depth - deep.start) * panels * nr);
            for part in member.tiles(panels * blocking.depth_blocks(&deep).count()) {
                let depth = blocking.depth_block(&deep, part / panels);
                let (panel, kc) = (part % panels, depth.len());
                let j = columns.start + panel * nr;
                // SAFETY: the panel is inside B and its copy inside the packed block.
                unsafe {
                    let copy = packed(depth.start).add(panel * nr * kc);
                    pack::panel(s, gemm.b.at(depth.start, j), kc, nr.min(columns.end - j), copy);
                }
            }
            for tile in member.tiles(blocking.tiles(columns.len())) {
                let (rows, tile_columns) = blocking.tile(tile, &columns);
                // All of the sum that is packed, while the tile of C is in the second-level cache.
                for depth in blocking.depth_blocks(&deep) {
                    let kc = depth.len();
                    // SAFETY: all blocks are inside their matrices and copies.
                    unsafe {
                        let mut a = gemm.a.at(rows.start, depth.start);
                        if pack_a {
                            let stride = blocking.a_stride();
                            pack::copy(s, a, rows.len(), kc, packed_a, stride);
                            a = View::row_major(packed_a, stride);
                        }
                        for j in tile_columns.clone().step_by(nr) {
                            let cols = nr.min(tile_columns.end - j);
                            let b = packed(depth.start).add((j - columns.start) * kc);
                            let out = Output::of(gemm, depth.start == 0, rows.start, j, cols);
                            kernel::panel(s, rows.len(), kc, a.ptr, a.row_stride, b, out);
                        }
                    }
                }
            }
        }
    }
}
