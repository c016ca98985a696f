//! Element types, shapes, and the two labels that every report speaks in: roles and phases.

use std::fmt;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use tightfit_quant::Block;

/// How elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of an `F32`.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// 32-bit signed integer: token ids, positions.
    I32,
    /// Raw byte.
    U8,
    /// A matrix in few bits, with its scales.
    Block(Block),
}

impl DType {
    /// The element types, without those that store several elements together.
    const PLAIN: [Self; 5] = [Self::F32, Self::Bf16, Self::F16, Self::I32, Self::U8];

    /// The name used in text forms, e.g. `f32`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::Block(block) => block.name(),
        }
    }

    /// The dtype of that [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        let plain = Self::PLAIN.into_iter().find(|dtype| dtype.name() == name);
        plain.or_else(|| Block::from_name(name).map(Self::Block))
    }

    /// Whether elements are floating-point numbers that operations compute with and write.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::Bf16 | Self::F16)
    }

    /// Bytes of a contiguous tensor, saturating.
    pub fn bytes(self, shape: &Shape) -> u64 {
        let size = match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::U8 => 1,
            DType::Block(block) => {
                let cols = shape.0.last().copied().unwrap_or(1);
                let rows = shape.0.iter().rev().skip(1).fold(1, |n: u64, &d| n.saturating_mul(d));
                return block.bytes(rows, cols);
            }
        };
        shape.elements().saturating_mul(size)
    }
}

impl From<DType> for &'static str {
    fn from(dtype: DType) -> Self {
        dtype.name()
    }
}

impl TryFrom<String> for DType {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        Self::from_name(&name).ok_or_else(|| format!("there is no dtype `{name}`"))
    }
}

/// A static shape, outermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape(pub SmallVec<[u64; 4]>);

impl Shape {
    /// The number of elements, saturating at `u64::MAX` so that an absurd shape is too large and never wraps.
    pub fn elements(&self) -> u64 {
        self.0.iter().fold(1, |n, &d| n.saturating_mul(d))
    }

    /// The dimensions.
    pub fn dims(&self) -> &[u64] {
        &self.0
    }
}

impl<const N: usize> From<[u64; N]> for Shape {
    fn from(dims: [u64; N]) -> Self {
        Self(SmallVec::from_slice(&dims))
    }
}

impl From<Vec<u64>> for Shape {
    fn from(dims: Vec<u64>) -> Self {
        Self(SmallVec::from_vec(dims))
    }
}

impl FromIterator<u64> for Shape {
    fn from_iter<T: IntoIterator<Item = u64>>(dims: T) -> Self {
        Self(dims.into_iter().collect())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("x")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

/// What types on the lower tier end with in text forms.
pub(crate) const LOWER_SUFFIX: &str = "@lower";

/// Where bytes live. Operations compute in memory; `fetch` and `store` go between the tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The memory that kernels work in: a card's own, or on the CPU backend the process's.
    #[default]
    Memory,
    /// The tier below: host memory for a card, a file for the CPU backend.
    Lower,
}

impl Tier {
    fn is_memory(&self) -> bool {
        *self == Self::Memory
    }
}

/// A dtype, a shape and a tier. Printed as `f32[2048x576]`, on the lower tier as `f32[2048x576]@lower`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Shape,
    /// Where the bytes live.
    #[serde(default, skip_serializing_if = "Tier::is_memory")]
    pub tier: Tier,
}

impl Type {
    /// A type of that dtype and shape, in memory.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self {
            dtype,
            shape: shape.into(),
            tier: Tier::Memory,
        }
    }

    /// The same type on another tier.
    pub fn on(&self, tier: Tier) -> Self {
        Self { tier, ..self.clone() }
    }

    /// An `f32` tensor.
    pub fn f32(shape: impl Into<Shape>) -> Self {
        Self::new(DType::F32, shape)
    }

    /// An `i32` tensor.
    pub fn i32(shape: impl Into<Shape>) -> Self {
        Self::new(DType::I32, shape)
    }

    /// Bytes of a buffer that holds it, saturating: whole words of four bytes, by which use of memory is measured.
    pub fn bytes(&self) -> u64 {
        self.stored_bytes().checked_next_multiple_of(4).unwrap_or(u64::MAX)
    }

    /// Bytes of a contiguous tensor and nothing more, as in a file; saturating.
    pub fn stored_bytes(&self) -> u64 {
        self.dtype.bytes(&self.shape)
    }

    /// The size of dimension `axis`, 1 where there is none.
    pub fn dim(&self, axis: usize) -> u64 {
        self.shape.0.get(axis).copied().unwrap_or(1)
    }

    /// All dimensions but the last, multiplied: the rows of a matrix.
    pub fn rows(&self) -> u64 {
        let dims = self.shape.dims();
        dims[..dims.len().saturating_sub(1)]
            .iter()
            .fold(1, |n, &d| n.saturating_mul(d))
    }

    /// The last dimension: the columns of a matrix.
    pub fn cols(&self) -> u64 {
        self.shape.0.last().copied().unwrap_or(1)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype.name(), self.shape)?;
        match self.tier {
            Tier::Memory => Ok(()),
            Tier::Lower => f.write_str(LOWER_SUFFIX),
        }
    }
}

/// Defines an enum of labels with their names, so that text forms and reports spell each in one place.
macro_rules! labels {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$doc])* $variant),+ }

        impl $name {
            /// Every label, in the order reports list them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The label as text forms and reports write it.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// The label of that [`name`](Self::name).
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$variant),)+ _ => None }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

labels! {
    /// What a buffer is for. Reports add bytes up by role.
    Role {
        /// A model parameter.
        Weight = "weight",
        /// A low-rank or other added trainable branch.
        Adapter = "adapter",
        /// A gradient of a parameter.
        Gradient = "gradient",
        /// Momenta and other state of the optimizer.
        OptimizerState = "optimizer_state",
        /// Data fed from outside: tokens, targets, the learning rate.
        Input = "input",
        /// An intermediate value, or the gradient of one.
        Activation = "activation",
        /// Scratch memory of one node.
        Workspace = "workspace",
        /// Keys and values kept between decoding steps.
        KvCache = "kv_cache",
        /// A staging buffer of a transfer between tiers.
        HostStage = "host_stage",
    }
}

labels! {
    /// Which part of a step a node belongs to.
    Phase {
        /// The model's own computation.
        Forward = "forward",
        /// Gradients.
        Backward = "backward",
        /// Forward work done again so that its result need not be kept.
        Recompute = "recompute",
        /// The optimizer.
        Update = "update",
        /// Copies between tiers.
        Transfer = "transfer",
    }
}
