//! How numbers are stored: precision of a run, and what a frozen base is kept in.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};
use tightfit_ir::{Block, DType};
use tightfit_pass::Storage;

use super::Written;

/// What weights and activations are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// All of it 32 bits.
    F32,
    /// Activations in `bf16`, trained weights in `f32`.
    Bf16Mixed,
    /// Activations in `f16`, trained weights in `f32`; the loss is scaled.
    F16Mixed,
    /// Activations and trained weights in `bf16`; updates are rounded stochastically.
    Bf16,
}

impl Precision {
    const ALL: [Self; 4] = [Self::F32, Self::Bf16Mixed, Self::F16Mixed, Self::Bf16];

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16Mixed => "bf16-mixed",
            Self::F16Mixed => "f16-mixed",
            Self::Bf16 => "bf16",
        }
    }

    /// What activations are stored as.
    pub fn activations(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16Mixed | Self::Bf16 => DType::Bf16,
            Self::F16Mixed => DType::F16,
        }
    }

    /// What trained weights are stored as.
    pub fn weights(self) -> DType {
        match self {
            Self::F32 | Self::Bf16Mixed | Self::F16Mixed => DType::F32,
            Self::Bf16 => DType::Bf16,
        }
    }

    /// Whether small gradients are lost, unless the loss is scaled.
    pub fn needs_scaled_loss(self) -> bool {
        self == Self::F16Mixed
    }
}

impl FromStr for Precision {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut all = Self::ALL.into_iter();
        all.find(|precision| precision.name() == text)
            .ok_or("expected f32, bf16-mixed, f16-mixed or bf16")
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Precision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Whether the loss is scaled so that small gradients are not lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossScaling {
    /// Where activations are `f16`.
    Auto,
    /// Never.
    None,
}

impl Written for LossScaling {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            _ => Err("expected auto or none".to_owned()),
        }
    }
}

/// What weights are kept in that are not trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// What the method and the precision ask for: NF4 for QLoRA, else 16 bits where activations have 16.
    Auto,
    /// As in the file.
    AsIs,
    /// Rounded to these numbers as they are read.
    Floats(DType),
    /// Quantised as they are read.
    Quantised(Block),
}

impl Base {
    /// What flags may say beside `auto` and `as-is`.
    const FORMATS: [Self; 6] = [
        Self::Floats(DType::F32),
        Self::Floats(DType::Bf16),
        Self::Floats(DType::F16),
        Self::Quantised(Block::Int8),
        Self::Quantised(Block::Int4),
        Self::Quantised(Block::Nf4),
    ];

    /// How frozen weights are stored; what is open is as in the file.
    pub fn storage<'a>(self, file: &'a dyn Fn(&str) -> Option<DType>) -> Storage<'a> {
        let storage = Storage {
            trained: DType::F32,
            base: None,
            tables: false,
            floats: None,
            file,
        };
        match self {
            Self::Auto | Self::AsIs => storage,
            // Whatever the file has becomes that.
            Self::Floats(dtype) => Storage {
                floats: Some(dtype),
                file: &|_| None,
                ..storage
            },
            Self::Quantised(block) => Storage {
                base: Some(block),
                ..storage
            },
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::AsIs => "as-is",
            Self::Floats(dtype) => dtype.name(),
            Self::Quantised(block) => block.name(),
        }
    }
}

impl FromStr for Base {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut all = [Self::Auto, Self::AsIs].into_iter().chain(Self::FORMATS);
        all.find(|base| base.name() == text)
            .ok_or("expected auto, as-is, f32, bf16, f16, int8, int4 or nf4")
    }
}

impl fmt::Display for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Base {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
