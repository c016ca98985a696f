//! `config.json`, read and written.

use serde_json::{Map, Value, json};

use super::json::Fields;
use super::{DecoderConfig, rope};
use crate::error::{ModelError, excerpt};
use crate::family::Family;

/// Fields that say how a model was saved, run or classified with: nothing about what it computes.
const HARMLESS: &[&str] = &[
    "attn_implementation",
    "dtype",
    "id2label",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
];

/// Settings of generation that old files kept here.
const GENERATION: &[&str] = &[
    "do_sample",
    "max_length",
    "max_new_tokens",
    "min_length",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

impl DecoderConfig {
    /// Reads a `config.json`, of transformers 4 or 5. What is absent is what transformers assumes.
    ///
    /// # Errors
    /// A text that is no JSON object or gives a field twice; an unknown `model_type`; a field that is unknown, of the wrong type or of
    /// an impossible value, by name.
    pub fn from_hf(text: &str) -> Result<Self, ModelError> {
        let mut fields = Fields::parse(text)?;
        let model_type: Option<String> = fields.take("model_type")?;
        let model_type = model_type.ok_or_else(|| missing("model_type"))?;
        let family = Family::of_model_type(&model_type)?;
        let mut config = (family.defaults)();

        check_architecture(&mut fields, family)?;
        fields.only("hidden_act", "silu".to_owned())?;
        for switch in ["is_encoder_decoder", "is_decoder", "add_cross_attention"] {
            fields.only(switch, false)?;
        }
        // Training here has no dropout.
        fields.only("attention_dropout", 0.0)?;
        fields.only("chunk_size_feed_forward", 0_u64)?;
        fields.read("vocab_size", &mut config.vocab_size)?;
        fields.read("hidden_size", &mut config.hidden_size)?;
        fields.read("intermediate_size", &mut config.intermediate_size)?;
        fields.read("num_hidden_layers", &mut config.num_hidden_layers)?;
        fields.read("num_attention_heads", &mut config.num_attention_heads)?;
        let assumed = family.num_key_value_heads.unwrap_or(config.num_attention_heads);
        let key_value_heads = fields.take_nullable("num_key_value_heads")?.unwrap_or(Some(assumed));
        config.num_key_value_heads = key_value_heads.unwrap_or(config.num_attention_heads);
        fields.read_nullable("head_dim", &mut config.head_dim)?;
        fields.read("max_position_embeddings", &mut config.max_position_embeddings)?;
        fields.read("rms_norm_eps", &mut config.rms_norm_eps)?;
        fields.read("initializer_range", &mut config.initializer_range)?;
        fields.read("tie_word_embeddings", &mut config.tie_word_embeddings)?;
        fields.read_nullable("bos_token_id", &mut config.bos_token_id)?;
        fields.read_nullable("pad_token_id", &mut config.pad_token_id)?;
        if let Some(ids) = fields.take_nullable("eos_token_id")? {
            config.eos_token_id = ids.unwrap_or_default();
        }
        fields.ignore(HARMLESS);
        fields.ignore(GENERATION);
        rope::read(&mut fields, &mut config)?;
        (family.read)(&mut fields, &mut config)?;
        fields.finish(family.model_type)?;
        config.check()?;
        config.head_dim = Some(config.head_dim());
        Ok(config)
    }

    /// The `config.json` of the model as it is saved, in `f32`. transformers 4 and 5 load it, and [`from_hf`](Self::from_hf) reads it
    /// as the same configuration.
    pub fn to_hf(&self) -> Value {
        let eos = match self.eos_token_id[..] {
            [] => Value::Null,
            [only] => only.into(),
            ref many => many.into(),
        };
        let fields = [
            ("architectures", json!([self.family.architecture])),
            ("model_type", self.family.model_type.into()),
            ("vocab_size", self.vocab_size.into()),
            ("hidden_size", self.hidden_size.into()),
            ("intermediate_size", self.intermediate_size.into()),
            ("num_hidden_layers", self.num_hidden_layers.into()),
            ("num_attention_heads", self.num_attention_heads.into()),
            ("num_key_value_heads", self.num_key_value_heads.into()),
            ("head_dim", self.head_dim().into()),
            ("max_position_embeddings", self.max_position_embeddings.into()),
            ("hidden_act", "silu".into()),
            ("rms_norm_eps", self.rms_norm_eps.into()),
            ("attention_dropout", 0.0.into()),
            ("initializer_range", self.initializer_range.into()),
            ("tie_word_embeddings", self.tie_word_embeddings.into()),
            ("bos_token_id", self.bos_token_id.into()),
            ("eos_token_id", eos),
            ("pad_token_id", self.pad_token_id.into()),
            ("dtype", "float32".into()),
        ];
        let mut json: Map<_, _> = fields
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        rope::write(self, &mut json);
        (self.family.write)(self, &mut json);
        Value::Object(json)
    }
}

/// A file may say which model its weights are of; only a language model's are enough.
fn check_architecture(fields: &mut Fields, family: &Family) -> Result<(), ModelError> {
    match fields.take::<Vec<String>>("architectures")? {
        Some(names) if !names.iter().any(|name| name == family.architecture) => {
            let names = excerpt(&names.join(", "));
            Err(fields.error("architectures", format!("{names}, expected {}", family.architecture)))
        }
        _ => Ok(()),
    }
}

fn missing(field: &str) -> ModelError {
    ModelError::MissingField {
        field: field.to_owned(),
    }
}
