//! Which tensor of a checkpoint fills which weight.

use std::collections::{BTreeMap, BTreeSet};

use tightfit_ir::{Role, Shape};

use crate::config::{DIVISORS, DecoderConfig};
use crate::decoder::BatchShape;
use crate::error::{ModelError, excerpt};

/// How a checkpoint spells its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// As weights are named here: safetensors of Hugging Face.
    HuggingFace,
    /// As llama.cpp names them: GGUF.
    Gguf,
}

/// In which order a tensor of a file has the rows of its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// The same.
    AsIs,
    /// Within each of `heads` equal parts, of `D` rows, the file has pairs where the weight has halves: row `2·i + j` of the file's
    /// part is row `j·D/2 + i` of the weight's (`j < 2`). Both rotate the same pairs, in one case neighbours and in the other rows
    /// `D/2` apart.
    InterleavedHeads {
        /// Heads.
        heads: u64,
    },
}

impl RowOrder {
    /// The file's row that is row `row` of a weight of `rows` rows.
    pub fn file_row(self, rows: u64, row: u64) -> u64 {
        match self {
            Self::InterleavedHeads { heads } if heads > 0 && rows >= 2 * heads => {
                let (head_dim, half) = (rows / heads, rows / heads / 2);
                let (head, within) = (row / head_dim, row % head_dim);
                head * head_dim + within % half * 2 + within / half
            }
            _ => row,
        }
    }
}

/// Where a weight is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSource {
    /// The tensor's name in the file.
    pub name: String,
    /// How its rows are ordered.
    pub rows: RowOrder,
}

/// A checkpoint's tensors, matched to the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// Every weight by name.
    pub weights: BTreeMap<String, TensorSource>,
    /// Tensors that say nothing more: a copy of a tied table, rotary frequencies.
    pub ignored: Vec<String>,
}

/// A block's layers, here and in GGUF.
const BLOCK: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

impl DecoderConfig {
    /// Every weight of the model by name, with its shape.
    ///
    /// # Errors
    /// A setting that no model can have.
    pub fn weights(&self) -> Result<BTreeMap<String, Shape>, ModelError> {
        let smallest = BatchShape {
            batch: 1,
            seq: 1,
            loss_chunk: 1,
        };
        let graph = self.logits(smallest)?.graph;
        let weights = graph.inputs().filter(|(_, value, _)| value.role == Role::Weight);
        Ok(weights
            .map(|(_, value, _)| (value.name.to_string(), value.ty.shape.clone()))
            .collect())
    }

    /// The tensor that fills a weight of this model.
    pub fn source(&self, naming: Naming, weight: &str) -> TensorSource {
        match naming {
            Naming::HuggingFace => TensorSource {
                name: weight.to_owned(),
                rows: RowOrder::AsIs,
            },
            Naming::Gguf => TensorSource {
                name: gguf_name(weight).unwrap_or_else(|| weight.to_owned()),
                rows: self.gguf_rows(weight),
            },
        }
    }

    /// Matches the tensors of a checkpoint, given with their shapes, to the weights.
    ///
    /// # Errors
    /// A weight without a tensor, a tensor without a weight, a tensor of another shape: by name. A tied table needs no tensor for the
    /// head.
    pub fn sources<'a>(
        &self,
        naming: Naming,
        tensors: impl IntoIterator<Item = (&'a str, &'a [u64])>,
    ) -> Result<Sources, ModelError> {
        let tensors: BTreeMap<&str, &[u64]> = tensors.into_iter().collect();
        let mut unused: BTreeSet<&str> = tensors.keys().copied().collect();
        let mut weights = BTreeMap::new();
        for (weight, shape) in self.weights()? {
            let source = self.source(naming, &weight);
            let Some(&found) = tensors.get(source.name.as_str()) else {
                return Err(ModelError::MissingTensor { tensor: source.name });
            };
            if found != shape.dims() {
                return Err(ModelError::TensorShape {
                    tensor: source.name,
                    found: Shape::from(found.to_vec()).to_string(),
                    expected: shape.to_string(),
                });
            }
            unused.remove(source.name.as_str());
            weights.insert(weight, source);
        }
        let unexpected = unused.iter().find(|tensor| !self.harmless(naming, tensor));
        if let Some(tensor) = unexpected {
            return Err(ModelError::UnexpectedTensor {
                tensor: excerpt(tensor),
                family: self.family.model_type,
            });
        }
        Ok(Sources {
            weights,
            ignored: unused.into_iter().map(str::to_owned).collect(),
        })
    }

    /// Whether a tensor that fills no weight may be there all the same.
    fn harmless(&self, naming: Naming, tensor: &str) -> bool {
        match naming {
            // Old versions of transformers saved the frequencies; and some save a tied table twice.
            Naming::HuggingFace => {
                tensor.ends_with("rotary_emb.inv_freq") || (tensor == "lm_head.weight" && self.tie_word_embeddings)
            }
            // Read with the metadata.
            Naming::Gguf => tensor == DIVISORS,
        }
    }

    fn gguf_rows(&self, weight: &str) -> RowOrder {
        let interleaved = self.family.gguf.is_some_and(|naming| naming.interleaved);
        let heads = match weight.rsplit('.').nth(1) {
            Some("q_proj") => self.num_attention_heads,
            Some("k_proj") => self.num_key_value_heads,
            _ => return RowOrder::AsIs,
        };
        if interleaved {
            RowOrder::InterleavedHeads { heads }
        } else {
            RowOrder::AsIs
        }
    }
}

/// The name that llama.cpp gives a weight, if it is one of a decoder.
fn gguf_name(weight: &str) -> Option<String> {
    let (layer, kind) = weight.rsplit_once('.')?;
    let name = match layer {
        "model.embed_tokens" => "token_embd".to_owned(),
        "model.norm" => "output_norm".to_owned(),
        "lm_head" => "output".to_owned(),
        _ => {
            let (number, layer) = layer.strip_prefix("model.layers.")?.split_once('.')?;
            let (_, name) = BLOCK.iter().find(|(ours, _)| *ours == layer)?;
            format!("blk.{number}.{name}")
        }
    };
    Some(format!("{name}.{kind}"))
}
