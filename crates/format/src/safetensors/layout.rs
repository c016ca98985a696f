//! A file to be written: its header, and where each tensor's bytes go.

use serde_json::{Map, Value, json};

use super::{METADATA, quantized};
use crate::{Encoding, Entry, Problem};

/// The header is padded with blanks, so that tensors start at a multiple of this.
const ALIGNMENT: usize = 8;

/// A safetensors file before it is written: whoever fills it writes [`header`](Layout::header) first and each tensor's bytes at its
/// [`offset`](Entry::offset), in any order.
///
/// ```
/// use tightfit_format::{Block, Encoding, safetensors::{self, Layout}};
///
/// let mut layout = Layout::default();
/// layout.push("w", Encoding::Block(Block::Nf4), &[2, 64])?;
/// layout.push("norm", Encoding::F32, &[64])?;
/// let layout = layout.finish(&[("format", "pt")]);
///
/// let mut file = layout.header().to_vec();
/// file.resize(layout.bytes() as usize, 0);
/// let path = std::path::Path::new("model.safetensors");
/// let tensors = safetensors::parse(file.as_slice(), layout.bytes(), path).unwrap();
/// assert_eq!(tensors["w"].shape, [2, 64]);
/// assert!(layout.entries().iter().all(|entry| tensors[&entry.name] == *entry));
/// # Ok::<(), tightfit_format::Problem>(())
/// ```
#[derive(Debug, Default)]
pub struct Layout {
    entries: Vec<Entry>,
    header: Vec<u8>,
}

impl Layout {
    /// Adds a tensor. Of the encodings, those of safetensors and the quantised ones can be written.
    ///
    /// # Errors
    /// A shape whose size overflows, or that is not made of whole blocks.
    pub fn push(&mut self, name: &str, encoding: Encoding, shape: &[u64]) -> Result<(), Problem> {
        let bytes = Entry::size(shape, encoding)?;
        self.entries.push(Entry {
            name: name.to_owned(),
            encoding,
            shape: shape.to_vec(),
            file: 0,
            offset: 0,
            bytes,
        });
        Ok(())
    }

    /// Places the tensors, those of the largest elements first, so that all are aligned, and makes the header, with `metadata` and the
    /// list of what is quantised.
    pub fn finish(mut self, metadata: &[(&str, &str)]) -> Self {
        let blocked = |entry: &Entry| matches!(entry.encoding, Encoding::Block(_));
        self.entries.sort_by_key(|entry| {
            std::cmp::Reverse(if blocked(entry) {
                0
            } else {
                entry.encoding.block_bytes()
            })
        });

        let mut texts: Map<String, Value> = metadata.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        if let Some(text) = quantized::text(&self.entries) {
            texts.insert(quantized::KEY.into(), text.into());
        }
        let mut header = Map::from_iter([(METADATA.to_owned(), texts.into())]);
        let mut end = 0;
        for entry in &mut self.entries {
            (entry.offset, end) = (end, end + entry.bytes);
            let (dtype, shape) = match entry.encoding {
                Encoding::Block(_) => ("U8".to_owned(), json!([entry.bytes])),
                encoding => (encoding.name(), json!(entry.shape)),
            };
            let info = json!({ "dtype": dtype, "shape": shape, "data_offsets": [entry.offset, end] });
            header.insert(entry.name.clone(), info);
        }
        let mut json = Value::from(header).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(ALIGNMENT), b' ');
        self.header = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
        for entry in &mut self.entries {
            entry.offset += self.header.len() as u64;
        }
        self
    }

    /// The file's first bytes.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The tensors in the order of their bytes.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Bytes of the whole file.
    pub fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.entries.iter().map(Entry::bytes).sum::<u64>()
    }
}
