//! Reads `fixtures/*.json`, as `fixtures/README.md` defines them.

// Each test uses a part of it.
#![allow(dead_code)]

use std::path::Path;

use serde_json::Value;
use tightfit::{DecoderConfig, Session};
use tightfit_ir::Tensor;
use tightfit_testkit::interpret::Named;

/// One file.
pub struct Fixture(Value);

impl Fixture {
    pub fn load(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../fixtures/{name}.json"));
        Self(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    }

    /// A number at a path such as `/config/rows`.
    pub fn number(&self, path: &str) -> f64 {
        self.0.pointer(path).unwrap().as_f64().unwrap()
    }

    /// Numbers, flattened row by row.
    pub fn numbers(&self, path: &str) -> Vec<f64> {
        fn flatten(value: &Value, into: &mut Vec<f64>) {
            match value {
                Value::Array(items) => items.iter().for_each(|item| flatten(item, into)),
                number => into.push(number.as_f64().unwrap()),
            }
        }
        let mut numbers = Vec::new();
        flatten(self.0.pointer(path).unwrap(), &mut numbers);
        numbers
    }

    /// The tensors of an object by name.
    pub fn tensors(&self, path: &str) -> Vec<(String, Vec<f32>)> {
        let tensors = self.0.pointer(path).unwrap().as_object().unwrap();
        tensors
            .iter()
            .map(|(name, entry)| (name.clone(), decode(entry)))
            .collect()
    }

    /// A string.
    pub fn text(&self, path: &str) -> String {
        self.0.pointer(path).unwrap().as_str().unwrap().to_owned()
    }

    /// The names in an object.
    pub fn names(&self, path: &str) -> Vec<String> {
        self.0
            .pointer(path)
            .unwrap()
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect()
    }

    pub fn llama(&self) -> DecoderConfig {
        let mut config = self.0["config"].clone();
        config["model_type"] = "llama".into();
        DecoderConfig::from_hf(&config.to_string()).unwrap()
    }

    /// Sequences and tokens of a batch.
    pub fn batch_shape(&self) -> (u64, u64) {
        let rows = self.0["batches"][0]["tokens"].as_array().unwrap();
        (rows.len() as u64, rows[0].as_array().unwrap().len() as u64)
    }

    /// Batch `index`, in `micro_batches` equal parts. The token count is of the whole batch.
    pub fn batch(&self, index: usize, micro_batches: usize) -> Vec<Named> {
        let at = |field: &str| format!("/batches/{index}/{field}");
        let (tokens, targets) = (self.numbers(&at("tokens")), self.numbers(&at("targets")));
        let seq = self.batch_shape().1 as usize;
        let has = |field| self.0["batches"][index].get(field).is_some();
        let documents = if has("documents") {
            self.numbers(&at("documents"))
        } else {
            vec![0.0; tokens.len()]
        };
        let positions = if has("positions") {
            self.numbers(&at("positions"))
        } else {
            (0..tokens.len()).map(|t| (t % seq) as f64).collect()
        };
        let count = targets.iter().filter(|&&target| target >= 0.0).count();
        let rows = tokens.len() / micro_batches;
        let part = |part: usize| {
            let span = part * rows..(part + 1) * rows;
            let mut doc_start: Vec<f64> = Vec::new();
            for t in span.clone() {
                let continues = t % seq != 0 && documents[t] == documents[t - 1];
                let start = if continues {
                    doc_start[doc_start.len() - 1]
                } else {
                    (t - span.start) as f64
                };
                doc_start.push(start);
            }
            let column = |numbers: &[f64]| Tensor::new([rows as u64], numbers[span.clone()].to_vec());
            Named::from([
                ("tokens".to_owned(), column(&tokens)),
                ("targets".to_owned(), column(&targets)),
                ("positions".to_owned(), column(&positions)),
                ("doc_start".to_owned(), Tensor::new([rows as u64], doc_start)),
                ("token_count".to_owned(), Tensor::scalar(count as f64)),
            ])
        };
        (0..micro_batches).map(part).collect()
    }
}

/// A tensor's bits.
fn decode(entry: &Value) -> Vec<f32> {
    let hex = entry["f32_hex"].as_str().unwrap().as_bytes().chunks(8);
    hex.map(|digits| f32::from_bits(u32::from_str_radix(str::from_utf8(digits).unwrap(), 16).unwrap()))
        .collect()
}

/// Element `index` of the tensor `name`, in `[-32768, 32767]`.
pub fn value(name: &str, index: u32) -> f32 {
    let seed = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    let mut x = index.wrapping_mul(0x9e37_79b9).wrapping_add(seed);
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^= x >> 16;
    (x >> 16) as f32 - 32768.0
}

/// The input of the MLP, `count` elements.
pub fn input(count: u64) -> Tensor {
    let data = (0..count).map(|i| f64::from(value("input", i as u32)) / 32768.0);
    Tensor::new([count], data.collect())
}

/// Fills the weights that were trained from.
pub fn fill_weights(session: &mut Session) {
    for tensor in session.plan().liveness().persistent.clone() {
        let weight = session.persistent_mut(&tensor.name).unwrap();
        if tensor.name.contains(".exp_avg") {
            weight.fill(0.0);
            continue;
        }
        let norm = tensor.ty.shape.dims().len() == 1 && tensor.name.ends_with(".weight");
        let centre = if norm { 1.0 } else { 0.0 };
        for (index, x) in weight.iter_mut().enumerate() {
            *x = centre + value(&tensor.name, index as u32) / 131_072.0;
        }
    }
}

#[test]
fn values_are_those_of_the_readme() {
    let first = |name, centre: f32| [0, 1, 2].map(|i| f64::from(centre + value(name, i) / 131_072.0));
    assert_eq!(
        first("lm_head.weight", 0.0),
        [
            0.134_994_506_835_937_5,
            -0.024_368_286_132_812_5,
            -0.180_610_656_738_281_25
        ]
    );
    assert_eq!(
        first("model.norm.weight", 1.0)[..2],
        [1.154_281_616_210_937_5, 0.757_675_170_898_437_5]
    );
}
