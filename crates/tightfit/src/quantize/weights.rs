//! The weights of a model, what they are used for, and where their values come from.

use tightfit_cpu::pool::Pool;
use tightfit_exec::init;
use tightfit_exec::load::LoadError;
use tightfit_format::{Checkpoint, Encoding, Entry, FormatError};
use tightfit_ir::{Binding, Init, Op, Role};
use tightfit_model::{BatchShape, DecoderConfig, ModelError, RowOrder, Sources};

/// What a weight is used for. A tied table is both an embedding and a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// As the matrix of a linear layer.
    pub linear: bool,
    /// As the table of an embedding.
    pub embedding: bool,
    /// As the matrix from the last hidden state to the logits.
    pub head: bool,
}

/// A weight of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// As Hugging Face names it.
    pub name: String,
    /// Outermost first.
    pub shape: Vec<u64>,
    /// How a fresh one is filled.
    pub init: Init,
    /// What for.
    pub uses: Uses,
}

impl Weight {
    /// Rows and columns; a vector is a column.
    pub fn matrix(&self) -> (u64, u64) {
        let rows = self.shape.first().copied().unwrap_or(1);
        (rows, self.shape.iter().skip(1).product())
    }
}

/// The weights of a model in the order of its layers.
///
/// # Errors
/// A setting that no model can have.
pub fn weights(config: &DecoderConfig) -> Result<Vec<Weight>, ModelError> {
    let smallest = BatchShape {
        batch: 1,
        seq: 1,
        loss_chunk: 1,
    };
    let graph = config.loss(smallest)?.graph;
    let uses = |id| {
        graph.nodes.iter().fold(Uses::default(), |uses, node| {
            let reads = |operand: usize| node.inputs.get(operand) == Some(&id);
            match node.op {
                Op::Linear(_) => Uses {
                    linear: uses.linear || reads(1),
                    ..uses
                },
                Op::Embedding(_) => Uses {
                    embedding: uses.embedding || node.inputs.contains(&id),
                    ..uses
                },
                Op::LinearCrossEntropy(_) => Uses {
                    head: uses.head || reads(1),
                    ..uses
                },
                _ => uses,
            }
        })
    };
    let weights = graph.inputs().filter_map(|(id, value, binding)| match binding {
        Binding::Persistent { init, .. } if value.role == Role::Weight => Some(Weight {
            name: value.name.to_string(),
            shape: value.ty.shape.dims().to_vec(),
            init,
            uses: uses(id),
        }),
        _ => None,
    });
    Ok(weights.collect())
}

/// Where values come from.
pub enum Source<'a> {
    /// A file, and which of its tensors is which weight.
    File(&'a Checkpoint, &'a Sources),
    /// Nothing: the seed decides.
    Fresh(u64),
}

impl Source<'_> {
    /// How a weight is stored there. Fresh weights count as bf16.
    pub fn encoding(&self, weight: &Weight) -> Encoding {
        self.find(weight).map_or(Encoding::Bf16, |(entry, _)| entry.encoding)
    }

    /// The file's tensor of a weight, and the order of its rows.
    pub fn find(&self, weight: &Weight) -> Option<(&Entry, RowOrder)> {
        match self {
            Self::Fresh(_) => None,
            Self::File(checkpoint, sources) => {
                let source = sources.weights.get(&weight.name)?;
                Some((checkpoint.tensors().get(&source.name)?, source.rows))
            }
        }
    }
}

/// Reads weights, a few rows at a time, for one thread.
pub struct Reader<'a> {
    source: &'a Source<'a>,
    staging: Vec<u8>,
    pool: Pool,
}

/// Bytes of a file that are read at one time.
const STAGING: usize = 1 << 20;

impl<'a> Reader<'a> {
    /// For the calling thread.
    ///
    /// # Errors
    /// Never: a pool of one starts no thread.
    pub fn new(source: &'a Source<'a>) -> std::io::Result<Self> {
        Ok(Self {
            source,
            staging: vec![0; STAGING],
            pool: Pool::new(1, tightfit_exec::STACK_BYTES)?,
        })
    }

    /// Rows of a weight from row `first`, an even one, as floats.
    ///
    /// # Errors
    /// The file cannot be read, is not of floats, or has a value that is not finite.
    pub fn floats(&mut self, weight: &Weight, first: u64, out: &mut [f32]) -> Result<(), LoadError> {
        let (rows, cols) = weight.matrix();
        match self.source {
            Source::Fresh(seed) => init::fill(&self.pool, out, first * cols, weight.init, *seed, &weight.name),
            Source::File(checkpoint, _) => {
                let (entry, order) = self.source.find(weight).ok_or_else(|| missing(checkpoint, weight))?;
                let mut read =
                    |row: u64, out: &mut [f32]| checkpoint.read_f32(entry, row * cols, &mut self.staging, out);
                match order {
                    RowOrder::AsIs => read(first, out)?,
                    order => {
                        for (row, out) in (first..).zip(out.chunks_exact_mut(cols as usize)) {
                            read(order.file_row(rows, row), out)?;
                        }
                    }
                }
            }
        }
        match out.iter().enumerate().find(|(_, x)| !x.is_finite()) {
            None => Ok(()),
            Some((index, &value)) => Err(LoadError::NotFinite {
                tensor: weight.name.clone(),
                index: first * cols + index as u64,
                value,
            }),
        }
    }

    /// Rows of a weight from row `first`, an even one, in the bytes that they have there.
    ///
    /// # Errors
    /// As [`floats`](Self::floats), but for values, at which nobody looks.
    pub fn bytes(&mut self, weight: &Weight, first: u64, floats: &mut [f32], out: &mut [u8]) -> Result<(), LoadError> {
        let Source::File(checkpoint, _) = self.source else {
            self.floats(weight, first, floats)?;
            return Ok(tightfit_format::encode(Encoding::Bf16, floats, out)?);
        };
        let (entry, order) = self.source.find(weight).ok_or_else(|| missing(checkpoint, weight))?;
        let (rows, _) = weight.matrix();
        let row_bytes = entry.bytes() / rows.max(1);
        match order {
            RowOrder::AsIs => checkpoint.read(entry, first * row_bytes, out)?,
            order => {
                for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes as usize)) {
                    checkpoint.read(entry, order.file_row(rows, row) * row_bytes, out)?;
                }
            }
        }
        Ok(())
    }
}

fn missing(checkpoint: &Checkpoint, weight: &Weight) -> FormatError {
    FormatError::NoTensor {
        path: checkpoint.path().to_owned(),
        tensor: weight.name.clone(),
    }
}
