//! How a tensor's elements are stored.

use std::fmt;

use tightfit_quant::Block;

/// How a tensor's elements are stored.
///
/// Elements are stored in blocks: a whole number of elements in a whole number of bytes. Only the quantised formats of our own are
/// not: they are whole matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// Quantised, as `ggml` does it or as we do.
    Block(Block),
    /// Known and listed, but not decoded.
    Opaque(&'static Opaque),
    /// A `ggml` type that this version does not know, by its number.
    Unknown(u32),
}

/// An encoding that is listed but not decoded: integers, `F64`, FP8, rarer quantisations.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Opaque {
    name: &'static str,
    block_elements: u64,
    block_bytes: u64,
}

impl Encoding {
    /// The name that the file formats use; `type N` for a `ggml` type of unknown name.
    pub fn name(self) -> String {
        self.to_string()
    }

    /// Elements in a block, at least 1.
    pub fn block_elements(self) -> u64 {
        self.block().0
    }

    /// Bytes in a block; 0 for [`Encoding::Unknown`], whose size nobody can tell, and for the [quantised formats](Block::encodes) of
    /// our own, which keep their scales apart.
    pub fn block_bytes(self) -> u64 {
        self.block().1
    }

    /// Whether [`decode`](crate::decode) can make `f32` of it, a block at a time. The quantised formats of our own are decoded from the
    /// whole matrix, by [`Block::decode`].
    pub fn decodes(self) -> bool {
        self.block_bytes() > 0 && !matches!(self, Encoding::Opaque(_))
    }

    fn block(self) -> (u64, u64) {
        match self {
            Encoding::F32 => (1, 4),
            Encoding::F16 | Encoding::Bf16 => (1, 2),
            Encoding::Block(block) => block.independent().unwrap_or((1, 0)),
            Encoding::Opaque(opaque) => (opaque.block_elements, opaque.block_bytes),
            Encoding::Unknown(_) => (1, 0),
        }
    }

    /// The encoding of a number of `enum ggml_type`.
    pub(crate) fn from_ggml(number: u32) -> Self {
        match number {
            0 => Encoding::F32,
            1 => Encoding::F16,
            2 => Encoding::Block(Block::Q4_0),
            3 => Encoding::Block(Block::Q4_1),
            6 => Encoding::Block(Block::Q5_0),
            7 => Encoding::Block(Block::Q5_1),
            8 => Encoding::Block(Block::Q8_0),
            10 => Encoding::Block(Block::Q2K),
            11 => Encoding::Block(Block::Q3K),
            12 => Encoding::Block(Block::Q4K),
            13 => Encoding::Block(Block::Q5K),
            14 => Encoding::Block(Block::Q6K),
            30 => Encoding::Bf16,
            _ => match GGML_OPAQUE.iter().find(|(n, _)| *n == number) {
                Some((_, opaque)) => Encoding::Opaque(opaque),
                None => Encoding::Unknown(number),
            },
        }
    }

    /// The encoding of a `dtype` of a safetensors header, or `None` where the format does not have it.
    pub fn from_safetensors(dtype: &str) -> Option<Self> {
        match dtype {
            "F32" => Some(Encoding::F32),
            "F16" => Some(Encoding::F16),
            "BF16" => Some(Encoding::Bf16),
            _ => SAFETENSORS_OPAQUE
                .iter()
                .find(|o| o.name == dtype)
                .map(Encoding::Opaque),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Encoding::F32 => "F32",
            Encoding::F16 => "F16",
            Encoding::Bf16 => "BF16",
            Encoding::Block(block) => return f.write_str(&block.name().to_uppercase()),
            Encoding::Opaque(opaque) => opaque.name,
            Encoding::Unknown(number) => return write!(f, "type {number}"),
        })
    }
}

const fn opaque(name: &'static str, block_elements: u64, block_bytes: u64) -> Opaque {
    Opaque {
        name,
        block_elements,
        block_bytes,
    }
}

/// `enum ggml_type` of `ggml.h`, without those that are decoded; block sizes from `ggml-common.h`.
static GGML_OPAQUE: [(u32, Opaque); 21] = [
    (9, opaque("Q8_1", 32, 36)),
    (15, opaque("Q8_K", 256, 292)),
    (16, opaque("IQ2_XXS", 256, 66)),
    (17, opaque("IQ2_XS", 256, 74)),
    (18, opaque("IQ3_XXS", 256, 98)),
    (19, opaque("IQ1_S", 256, 50)),
    (20, opaque("IQ4_NL", 32, 18)),
    (21, opaque("IQ3_S", 256, 110)),
    (22, opaque("IQ2_S", 256, 82)),
    (23, opaque("IQ4_XS", 256, 136)),
    (24, opaque("I8", 1, 1)),
    (25, opaque("I16", 1, 2)),
    (26, opaque("I32", 1, 4)),
    (27, opaque("I64", 1, 8)),
    (28, opaque("F64", 1, 8)),
    (29, opaque("IQ1_M", 256, 56)),
    (34, opaque("TQ1_0", 256, 54)),
    (35, opaque("TQ2_0", 256, 66)),
    (39, opaque("MXFP4", 32, 17)),
    (40, opaque("NVFP4", 64, 36)),
    (41, opaque("Q1_0", 128, 18)),
];

/// The dtypes of safetensors 0.8, without those that are decoded. Elements of less than a byte are packed over the whole tensor.
static SAFETENSORS_OPAQUE: [Opaque; 19] = [
    opaque("BOOL", 1, 1),
    opaque("F4", 2, 1),
    opaque("F6_E2M3", 4, 3),
    opaque("F6_E3M2", 4, 3),
    opaque("U8", 1, 1),
    opaque("I8", 1, 1),
    opaque("F8_E5M2", 1, 1),
    opaque("F8_E4M3", 1, 1),
    opaque("F8_E8M0", 1, 1),
    opaque("F8_E4M3FNUZ", 1, 1),
    opaque("F8_E5M2FNUZ", 1, 1),
    opaque("I16", 1, 2),
    opaque("U16", 1, 2),
    opaque("I32", 1, 4),
    opaque("U32", 1, 4),
    opaque("C64", 1, 8),
    opaque("F64", 1, 8),
    opaque("I64", 1, 8),
    opaque("U64", 1, 8),
];
