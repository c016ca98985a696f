//! What is trained of a model.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tightfit_pass::Pattern;

use super::Written;

/// Which parameters are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// All of them.
    Full,
    /// Adapters beside frozen weights.
    Lora,
    /// Adapters beside frozen weights that are quantised.
    Qlora,
}

impl Method {
    /// As flags spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Lora => "lora",
            Self::Qlora => "qlora",
        }
    }

    /// Whether adapters are trained.
    pub fn has_adapters(self) -> bool {
        self != Self::Full
    }
}

impl Written for Method {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "full" => Ok(Self::Full),
            "lora" => Ok(Self::Lora),
            "qlora" => Ok(Self::Qlora),
            _ => Err("expected full, lora or qlora".to_owned()),
        }
    }
}

/// The method that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedMethod {
    /// Whichever changes the result least among those that fit and take no longer than need be.
    Auto,
    /// This one.
    Of(Method),
}

impl AskedMethod {
    /// Whether adapters may be trained.
    pub fn may_have_adapters(self) -> bool {
        self != Self::Of(Method::Full)
    }
}

impl From<Method> for AskedMethod {
    fn from(method: Method) -> Self {
        Self::Of(method)
    }
}

impl Written for AskedMethod {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => match Method::read(text) {
                Ok(method) => Ok(Self::Of(method)),
                Err(_) => Err("expected full, lora, qlora or auto".to_owned()),
            },
        }
    }
}

impl<'de> Deserialize<'de> for AskedMethod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::read(&text).map_err(serde::de::Error::custom)
    }
}

/// The layers that adapters are added to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// Every linear layer but the head.
    AllLinear,
    /// Those that these patterns name.
    Patterns(Vec<Pattern>),
}

impl From<Targets> for tightfit_pass::Targets {
    fn from(targets: Targets) -> Self {
        match targets {
            Targets::AllLinear => Self::AllLinear,
            Targets::Patterns(patterns) => Self::Patterns(patterns),
        }
    }
}

const ALL_LINEAR: &str = "all-linear";

impl FromStr for Targets {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == ALL_LINEAR {
            return Ok(Self::AllLinear);
        }
        let patterns = text.split(',').map(|pattern| Pattern(pattern.trim().to_owned()));
        let patterns: Vec<Pattern> = patterns.collect();
        if patterns.iter().any(|pattern| pattern.0.is_empty()) {
            return Err("expected all-linear, or names of layers such as q_proj,v_proj or layers.1*.mlp.*");
        }
        Ok(Self::Patterns(patterns))
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllLinear => f.write_str(ALL_LINEAR),
            Self::Patterns(patterns) => {
                let names: Vec<&str> = patterns.iter().map(|pattern| &*pattern.0).collect();
                f.write_str(&names.join(","))
            }
        }
    }
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
