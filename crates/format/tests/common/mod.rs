//! Files for the tests: a small GGUF writer, a small safetensors writer, folders.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A fresh folder for a test.
pub fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// Writes GGUF with whatever counts, types and offsets it is told, right or wrong.
#[derive(Clone)]
pub struct GgufWriter {
    pub version: u32,
    pub alignment: usize,
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    pub keys: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub data: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        let (keys, tensors, data) = Default::default();
        GgufWriter {
            version: 3,
            alignment: 32,
            tensor_count: None,
            key_count: None,
            keys,
            tensors,
            data,
        }
    }
}

pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// An array value: its element type, its count, its elements.
pub fn array(ty: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

impl GgufWriter {
    pub fn key(mut self, key: impl AsRef<[u8]>, ty: u32, value: &[u8]) -> Self {
        self.keys.push([&string(key)[..], &ty.to_le_bytes(), value].concat());
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.key(key, 8, &string(value))
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.key(key, 4, &value.to_le_bytes())
    }

    /// A tensor at the next aligned offset. `dims` are in the order of the file, innermost first.
    pub fn tensor(mut self, name: &str, dims: &[u64], ty: u32, data: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend_from_slice(data);
        self.tensor_at(name, dims, ty, offset)
    }

    /// A tensor that says that its data is at `offset`, without data.
    pub fn tensor_at(mut self, name: impl AsRef<[u8]>, dims: &[u64], ty: u32, offset: u64) -> Self {
        let mut info = string(name);
        info.extend((dims.len() as u32).to_le_bytes());
        info.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
        info.extend(ty.to_le_bytes());
        info.extend(offset.to_le_bytes());
        self.tensors.push(info);
        self
    }

    pub fn build(self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        file.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        file.extend(self.keys.concat());
        file.extend(self.tensors.concat());
        if !self.data.is_empty() {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
        }
        file.extend(self.data);
        file
    }
}

/// A valid file with keys of every type and tensors of several encodings.
pub fn small_gguf() -> Vec<u8> {
    let floats: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    GgufWriter::default()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .key("llama.rms", 6, &1e-5f32.to_le_bytes())
        .key("signed", 5, &(-7i32).to_le_bytes())
        .key("big", 10, &u64::MAX.to_le_bytes())
        .key("flag", 7, &[1])
        .key("tokens", 9, &array(8, 2, &[string("<s>"), string("é")].concat()))
        .key("types", 9, &array(5, 3, &[1i32, 3, -1].map(i32::to_le_bytes).concat()))
        .key(
            "scores",
            9,
            &array(6, 2, &[0.5f32, -1.0].map(f32::to_le_bytes).concat()),
        )
        .key("bytes", 9, &array(0, 3, &[1, 2, 255]))
        .key("nested", 9, &array(9, 1, &array(7, 2, &[0, 1])))
        .key("empty", 9, &array(8, 0, &[]))
        .tensor("a.weight", &[3, 2], 0, &floats)
        .tensor("b.weight", &[64, 1], 2, &[0x3c; 36])
        .tensor("c.new", &[5], 99, &[7; 40])
        .tensor("d.ints", &[3], 26, &[0; 12])
        .build()
}

pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// A valid file with three tensors.
pub fn small_safetensors() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "c":{"dtype":"I64","shape":[],"data_offsets":[28,36]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]}}  "#;
    let data: Vec<u8> = (0..36).collect();
    safetensors(header, &data)
}

/// A valid file with a tensor of each quantised kind, and one of floats.
pub fn small_quantized() -> Vec<u8> {
    use tightfit_format::{Block, Encoding, safetensors::Layout};
    let mut layout = Layout::default();
    for block in [Block::Int8, Block::Int4, Block::Nf4, Block::Q4_0] {
        layout.push(block.name(), Encoding::Block(block), &[3, 32]).unwrap();
    }
    layout.push("norm", Encoding::Bf16, &[5]).unwrap();
    let layout = layout.finish(&[("format", "pt")]);
    let mut file = layout.header().to_vec();
    file.resize(layout.bytes() as usize, 0x35);
    file
}
