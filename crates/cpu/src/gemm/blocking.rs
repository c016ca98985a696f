//! How a product is cut into blocks: by shape, storage and instruction set only.
//!
//! Terms of the sum are counted in words of the micro-kernel, which hold one or two of them.

use super::form::Form;
use super::matrix::Granularity;
use crate::floats::Float;
use crate::simd::Isa;
use std::ops::Range;

/// The most that a block may hold, for one instruction set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Rows of the micro-kernel.
    pub mr: usize,
    /// Columns of the micro-kernel: two vectors.
    pub nr: usize,
    /// Words of the sum per turn of the micro-kernel's loop, which share the row addresses.
    pub unroll: usize,
    /// Depth: a panel of B (`kc × nr`) stays in the first-level cache beside what streams past it.
    kc: usize,
    /// Rows of a tile: a block of A (`mc × kc`) stays in the second-level cache.
    mc: usize,
    /// Columns of a tile: small enough that threads finish together.
    tile_n: usize,
    /// Columns of the packed block of B, which stays in the last-level cache.
    nc: usize,
}

/// Words that a packed block of B holds at most: a part of the last-level cache.
const PACKED_B: usize = 3 << 19;

/// Panels that it has at least where it must be as deep as the whole sum.
const LEAST_PANELS: usize = 2;

/// Tiles that a column block should have at least, so that threads finish together.
const TILES: usize = 24;

/// 24 of 32 registers hold the tile of C.
pub(super) const AVX512: Sizes = Sizes {
    mr: 12,
    nr: 32,
    unroll: 1,
    kc: 256,
    mc: 192,
    tile_n: 192,
    nc: 1536,
};
/// 12 of 16 registers hold the tile of C.
pub(super) const AVX2: Sizes = Sizes {
    mr: 6,
    nr: 16,
    unroll: 4,
    kc: 384,
    mc: 96,
    tile_n: 192,
    nc: 1536,
};
/// As many rows as the baseline's registers allow: 32 of NEON, 16 of SSE2.
pub(super) const PORTABLE: Sizes = Sizes {
    mr: if cfg!(target_arch = "aarch64") { 6 } else { 2 },
    ..AVX2
};

impl Sizes {
    /// The sizes of an instruction set, which this machine need not have: plans are made for others.
    fn of(isa: Isa) -> Sizes {
        match isa {
            Isa::Avx512Bf16 | Isa::Avx512 => AVX512,
            Isa::Avx2 => AVX2,
            Isa::Portable | Isa::PortableBf16 => PORTABLE,
        }
    }

    /// Rows of a tile where `across` tiles lie side by side. Few rows are cut finer, down to a few register tiles.
    #[inline(always)]
    fn tile_rows(&self, m: usize, across: usize) -> usize {
        let rows = m.div_ceil(TILES.div_ceil(across.max(1)));
        even(m, self.mc.min(rows.max(4 * self.mr)), self.mr)
    }

    /// Rows of a tile that spans the block of C. It packs its rows of A, of which not the rows but the columns are contiguous: so
    /// it ends with a cache line of those.
    #[inline(always)]
    fn wide_rows(&self, m: usize) -> usize {
        const LINES: usize = 48; // Three cache lines: a multiple of every `mr`.
        let whole = m.next_multiple_of(self.mr);
        self.tile_rows(m, 1).next_multiple_of(LINES).min(self.mc).min(whole)
    }
}

/// The blocks of one product, evenly cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocking {
    m: usize,
    n: usize,
    k: usize,
    kc: usize,
    /// Depth of a packed block of B: as many `kc` as it has room for.
    deep: usize,
    mc: usize,
    wide_mc: usize,
    tile_n: usize,
    nc: usize,
    /// Whether sums are complete before they are stored, as C would round each part of them.
    rounded: bool,
}

impl Blocking {
    pub(super) fn new(isa: Isa, form: &Form) -> Blocking {
        Self::with(&Sizes::of(isa), form, form.terms_in_word(isa))
    }

    /// `in_word`: the terms of the sum in a word.
    #[inline(always)]
    pub(super) fn with(sizes: &Sizes, form: &Form, in_word: usize) -> Blocking {
        let &Form { m, n, c, .. } = form;
        let Granularity { k: terms, n: columns } = form.granularity;
        let k = form.k.div_ceil(in_word);
        let (k_unit, n_unit) = ((terms / in_word).max(8), columns.max(sizes.nr));
        let kc = even(k, multiple(sizes.kc, k_unit), k_unit).min(k);
        let rounded = c != Float::F32;
        let (deep, nc) = if rounded {
            let room = (PACKED_B / k.max(1)).clamp(LEAST_PANELS * sizes.nr, sizes.nc);
            (k, even(n, multiple(room, n_unit), n_unit))
        } else {
            let nc = even(n, multiple(sizes.nc, n_unit), n_unit);
            let turns = (PACKED_B / (kc * nc).max(1)).clamp(1, k.div_ceil(kc.max(1)).max(1));
            ((turns * kc).min(k), nc)
        };
        let tile_n = even(nc, sizes.tile_n, sizes.nr);
        Blocking {
            m,
            n,
            k,
            kc,
            deep,
            mc: sizes.tile_rows(m, nc.div_ceil(tile_n.max(1))),
            wide_mc: sizes.wide_rows(m),
            tile_n,
            nc,
            rounded,
        }
    }

    /// Tiles for a product whose blocks of A are copied: as wide as the block of C and lower instead, so that each row of A is in one
    /// of them and packed once. Not where a tile's sums are kept beside C, which would be as wide.
    #[inline(always)]
    pub(super) fn copying(self) -> Blocking {
        if self.rounded {
            return self;
        }
        Blocking {
            mc: self.wide_mc,
            tile_n: self.nc,
            ..self
        }
    }

    /// Words from one row of a packed block of A to the next: an odd number of cache lines, so
    /// that rows spread over all sets of the cache.
    pub(super) fn a_stride(&self) -> usize {
        (self.kc.div_ceil(16) | 1) * 16
    }

    /// Words of one thread's packed block of A, a multiple of a cache line.
    pub(super) fn packed_a(&self) -> usize {
        match (self.is_empty(), self.rounded) {
            (true, _) => 0,
            (false, true) => self.mc.saturating_mul(self.a_stride()),
            (false, false) => self.wide_mc.saturating_mul(self.a_stride()),
        }
    }

    /// Whether a tile's sums are kept in the workspace until they are complete, and rounded then.
    #[inline(always)]
    pub(super) fn rounded(&self) -> bool {
        self.rounded
    }

    /// Floats from one row of such sums to the next.
    #[inline(always)]
    pub(super) fn sums_stride(&self) -> usize {
        self.tile_n
    }

    /// Floats of one thread's sums, a multiple of a cache line.
    pub(super) fn sums(&self) -> usize {
        match self.rounded && !self.is_empty() {
            true => self.mc * self.tile_n,
            false => 0,
        }
    }

    /// Words of the packed block of B. The first block is the largest and fills it.
    pub(super) fn packed_b(&self) -> usize {
        match self.is_empty() {
            true => 0,
            // A product that no memory holds: it never runs.
            false => self.deep.saturating_mul(self.nc),
        }
    }

    /// Column blocks of C, outermost.
    pub(super) fn column_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        blocks(if self.m == 0 { 0 } else { self.n }, self.nc)
    }

    /// Blocks of the sum over k that are packed together. An empty sum is one empty block, which still sets C.
    pub(super) fn deep_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let empty = (self.k == 0).then_some(0..0);
        blocks(self.k, self.deep).chain(empty)
    }

    /// How often each row of A is copied, if it is: once for every tile that it is in.
    pub(super) fn copies_of_a(&self) -> usize {
        let tile_n = self.copying().tile_n;
        self.n.div_ceil(tile_n.max(1))
    }

    /// How many blocks of the sum there are.
    pub(super) fn count_deep_blocks(&self) -> usize {
        self.k.div_ceil(self.deep.max(1)).max(1)
    }

    /// The turns of the micro-kernel in a packed block: one that sets C also where there is nothing to sum, unless rounding sets it.
    pub(super) fn depth_blocks(&self, deep: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (blocking, deep) = (*self, deep.clone());
        let least = usize::from(!self.rounded);
        (0..deep.len().div_ceil(self.kc.max(1)).max(least)).map(move |turn| blocking.depth_block(&deep, turn))
    }

    /// One of them.
    pub(super) fn depth_block(&self, deep: &Range<usize>, turn: usize) -> Range<usize> {
        let start = deep.start + turn * self.kc;
        start..deep.end.min(start + self.kc)
    }

    /// Tiles of a column block of C.
    pub(super) fn tiles(&self, columns: usize) -> usize {
        self.m.div_ceil(self.mc) * columns.div_ceil(self.tile_n)
    }

    /// Rows and columns of a tile. Neighbours share a block of A.
    pub(super) fn tile(&self, tile: usize, columns: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let across = columns.len().div_ceil(self.tile_n);
        let row = tile / across * self.mc;
        let column = columns.start + tile % across * self.tile_n;
        (
            row..self.m.min(row + self.mc),
            column..columns.end.min(column + self.tile_n),
        )
    }

    fn is_empty(&self) -> bool {
        self.m == 0 || self.n == 0 || self.k == 0
    }
}

/// The largest multiple of `unit` up to `max`; at least one.
#[inline(always)]
fn multiple(max: usize, unit: usize) -> usize {
    (max - max % unit).max(unit)
}

/// The size of blocks that cut `total` into the fewest blocks of at most `max`, evenly, rounded
/// up to a multiple of `unit`.
#[inline(always)]
fn even(total: usize, max: usize, unit: usize) -> usize {
    let blocks = total.div_ceil(max).max(1);
    total.div_ceil(blocks).next_multiple_of(unit)
}

fn blocks(total: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..total)
        .step_by(size.max(1))
        .map(move |start| start..total.min(start + size))
}
