//! The optimizers by name.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// Which optimizer changes the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimizer {
    /// AdamW with `f32` state.
    AdamW,
    /// AdamW with block-wise states of 8 bits.
    AdamW8bit,
    /// Adafactor.
    Adafactor,
    /// Lion.
    Lion,
    /// APOLLO.
    Apollo,
    /// SGD with momentum.
    Sgd,
}

impl Optimizer {
    const ALL: [(Self, &str); 6] = [
        (Self::AdamW, "adamw"),
        (Self::AdamW8bit, "adamw-8bit"),
        (Self::Adafactor, "adafactor"),
        (Self::Lion, "lion"),
        (Self::Apollo, "apollo"),
        (Self::Sgd, "sgd"),
    ];

    /// Settings that some optimizers have: which those are.
    const SETTINGS: [(&str, &[Self]); 6] = [
        ("beta1", &[Self::AdamW, Self::AdamW8bit, Self::Apollo, Self::Lion]),
        ("beta2", &[Self::AdamW, Self::AdamW8bit, Self::Apollo, Self::Lion]),
        ("adam_eps", &[Self::AdamW, Self::AdamW8bit, Self::Apollo]),
        ("momentum", &[Self::Sgd]),
        ("apollo_rank", &[Self::Apollo]),
        ("apollo_refresh", &[Self::Apollo]),
    ];

    /// Settings that mean nothing to this one.
    pub(in crate::settings) fn settings_of_others(self) -> impl Iterator<Item = &'static str> {
        let others = Self::SETTINGS.into_iter().filter(move |(_, of)| !of.contains(&self));
        others.map(|(name, _)| name)
    }

    /// The optimizers that have a setting.
    pub(in crate::settings) fn with(setting: &str) -> &'static [Self] {
        let found = Self::SETTINGS.into_iter().find(|(name, _)| *name == setting);
        found.map_or(&[], |(_, of)| of)
    }

    /// What learning rates that suit AdamW are multiplied by: Lion's steps are as large as the learning rate in every weight, and SGD's
    /// as small as gradients are.
    pub(in crate::settings) fn lr_ratio(self) -> f64 {
        match self {
            Self::Lion => 0.1,
            Self::Sgd => 10.0,
            Self::AdamW | Self::AdamW8bit | Self::Adafactor | Self::Apollo => 1.0,
        }
    }
}

impl FromStr for Optimizer {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|(_, name)| *name == text);
        found
            .map(|(optimizer, _)| optimizer)
            .ok_or("expected adamw, adamw-8bit, adafactor, lion, apollo or sgd")
    }
}

impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::ALL.iter().find(|(optimizer, _)| optimizer == self);
        f.write_str(found.map_or("", |(_, name)| name))
    }
}

impl Serialize for Optimizer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
