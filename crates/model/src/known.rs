//! Models by name: `known.json` has their sizes, as the `config.json` of the repository beside each says.
//!
//! These are facts to plan with where no file is at hand. What does not decide a plan (tokens that end a text, dtypes) is left out.

use std::sync::LazyLock;

use serde_json::Value;
use tightfit_ir::DType;

use crate::config::DecoderConfig;
use crate::error::ModelError;

/// A model that goes by a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    /// As the command takes it, such as `llama-2-7b`.
    pub name: String,
    /// The repository on the Hugging Face hub whose `config.json` this is.
    pub repository: String,
    /// Parameters as published, a tied table counted once.
    pub parameters: u64,
    /// What its files store weights as.
    pub dtype: DType,
    config: String,
}

static TABLE: LazyLock<Vec<Known>> = LazyLock::new(|| {
    let table: Vec<Value> = serde_json::from_str(include_str!("known.json")).unwrap_or_default();
    let text = |entry: &Value, field: &str| entry[field].as_str().unwrap_or_default().to_owned();
    let known = table.iter().map(|entry| Known {
        name: text(entry, "name"),
        repository: text(entry, "repository"),
        parameters: entry["parameters"].as_u64().unwrap_or_default(),
        dtype: match entry["dtype"].as_str() {
            Some("float16") => DType::F16,
            _ => DType::Bf16,
        },
        config: entry["config"].to_string(),
    });
    known.collect()
});

impl Known {
    /// Every model of the table, families together and small ones first.
    pub fn all() -> &'static [Self] {
        &TABLE
    }

    /// The model of that name: as in the table, or as its repository is called, in any case, tuned for chat or not.
    pub fn named(name: &str) -> Option<&'static Self> {
        let wanted = plain(name);
        Self::all().iter().find(|known| {
            let tail = known.repository.rsplit('/').next().unwrap_or_default();
            [&known.name, &known.repository, tail]
                .iter()
                .any(|own| plain(own) == wanted)
        })
    }

    /// Its configuration.
    ///
    /// # Errors
    /// Never for what is in the table, as a test sees to.
    pub fn config(&self) -> Result<DecoderConfig, ModelError> {
        DecoderConfig::from_hf(&self.config)
    }
}

/// What is left of a name without its case and the endings of tuned and converted models.
fn plain(name: &str) -> String {
    let mut name = name.to_ascii_lowercase();
    const ENDINGS: [&str; 4] = ["-hf", "-instruct", "-chat", "-base"];
    while let Some(rest) = ENDINGS.iter().find_map(|ending| name.strip_suffix(ending)) {
        name = rest.to_owned();
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_has_the_parameters_that_were_published() {
        assert_eq!(Known::all().len(), 37);
        for known in Known::all() {
            let config = known.config().unwrap();
            assert_eq!(config.parameters(), known.parameters, "{}", known.name);
        }
    }

    #[test]
    fn names_and_repositories_find_a_model_and_no_other() {
        for known in Known::all() {
            for name in [&known.name, &known.repository, &known.name.to_uppercase()] {
                assert_eq!(Known::named(name), Some(known), "{name}");
            }
        }
        let name = |name: &str| Known::named(name).map(|known| &*known.name);
        assert_eq!(name("Llama-2-7b-chat-hf"), Some("llama-2-7b"));
        assert_eq!(name("Qwen/Qwen2.5-7B-Instruct"), Some("qwen2.5-7b"));
        assert_eq!(name("gpt-5"), None);
    }
}
