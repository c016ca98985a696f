//! The formats and their sizes.

use std::fmt;

/// How a quantised matrix is stored.
///
/// Matrices are `[rows, cols]`, row-major. Formats of our own keep their scales in front of their codes, so that a product can find
/// both by the element's index; those of `ggml` keep each block's scales beside its codes. Numbers are little-endian. Of two 4-bit codes
/// in a byte, the even element's is in the high nibble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Block {
    /// 8 bits, and a scale for each row: `f32[rows]`, then `i8[rows, cols]`. An element is `code * scale`.
    Int8,
    /// 4 bits, and a scale and a minimum for every [`GROUP`](Block::GROUP) elements: `(f16, f16)[groups]`, then the codes. An element
    /// is `code * scale + min`.
    Int4,
    /// 4-bit normal floats with doubly quantised scales (Dettmers et al. 2023, arXiv:2305.14314): a nested scale for every
    /// [`NESTED`](Block::NESTED) groups and an offset, `f32[nested + 1]`, then `u8[groups]`, then the codes. An element is
    /// `value[code] * (map[u8] * nested + offset)`.
    Nf4,
    /// `ggml`: 4 bits and a scale per 32.
    Q4_0,
    /// `ggml`: 4 bits, a scale and a minimum per 32.
    Q4_1,
    /// `ggml`: 5 bits and a scale per 32.
    Q5_0,
    /// `ggml`: 5 bits, a scale and a minimum per 32.
    Q5_1,
    /// `ggml`: 8 bits and a scale per 32.
    Q8_0,
    /// `ggml`: 2 bits; a 4-bit scale and minimum per 16.
    Q2K,
    /// `ggml`: 3 bits; a 6-bit scale per 16.
    Q3K,
    /// `ggml`: 4 bits; a 6-bit scale and minimum per 32.
    Q4K,
    /// `ggml`: 5 bits; a 6-bit scale and minimum per 32.
    Q5K,
    /// `ggml`: 6 bits; an 8-bit scale per 16.
    Q6K,
}

impl Block {
    /// Every format.
    pub const ALL: [Self; 13] = [
        Self::Int8,
        Self::Int4,
        Self::Nf4,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Elements that share a scale in [`Int4`](Self::Int4) and [`Nf4`](Self::Nf4), counted through the whole matrix.
    pub const GROUP: u64 = 64;

    /// First-level scales of [`Nf4`](Self::Nf4) that share a second-level one.
    pub const NESTED: u64 = 256;

    /// The name in text forms, plans and files, e.g. `nf4`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Nf4 => "nf4",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q8_0 => "q8_0",
            Self::Q2K => "q2_k",
            Self::Q3K => "q3_k",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
        }
    }

    /// The format of that [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|block| block.name() == name)
    }

    /// Bytes of a matrix, saturating; `cols` must be a multiple of [`row_multiple`](Self::row_multiple).
    pub fn bytes(self, rows: u64, cols: u64) -> u64 {
        let elements = rows.saturating_mul(cols);
        let groups = elements.div_ceil(Self::GROUP);
        if let Some((block_elements, block_bytes)) = self.independent() {
            return elements.div_ceil(block_elements).saturating_mul(block_bytes);
        }
        let (scales, codes) = match self {
            Self::Int8 => (rows.saturating_mul(4), elements),
            Self::Nf4 => {
                let nested = (groups.div_ceil(Self::NESTED) + 1) * 4;
                (nested.saturating_add(groups), elements.div_ceil(2))
            }
            _ => (groups.saturating_mul(4), elements.div_ceil(2)),
        };
        scales.saturating_add(codes)
    }

    /// What the columns of a matrix must be a multiple of.
    pub fn row_multiple(self) -> u64 {
        self.independent().map_or(1, |(block_elements, _)| block_elements)
    }

    /// Elements and bytes of a block, where blocks can be read one by one: those of `ggml` (its `ggml-common.h`). `None` for the formats
    /// of our own.
    pub fn independent(self) -> Option<(u64, u64)> {
        match self {
            Self::Int8 | Self::Int4 | Self::Nf4 => None,
            Self::Q4_0 => Some((32, 18)),
            Self::Q4_1 => Some((32, 20)),
            Self::Q5_0 => Some((32, 22)),
            Self::Q5_1 => Some((32, 24)),
            Self::Q8_0 => Some((32, 34)),
            Self::Q2K => Some((256, 84)),
            Self::Q3K => Some((256, 110)),
            Self::Q4K => Some((256, 144)),
            Self::Q5K => Some((256, 176)),
            Self::Q6K => Some((256, 210)),
        }
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
