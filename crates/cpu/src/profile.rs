//! How fast a machine is: what predicted times are made of.
//!
//! An operation takes a fixed time to be handed to the threads, and then time in proportion to its work. What that work is depends
//! on the family: a matrix product computes and packs, attention computes, all else passes over its operands at a speed of its own
//! (a SwiGLU is no faster than its exponentials, a residual connection no slower than memory). Every speed is a figure of the
//! profile that [`calibrate`](crate::calibrate::calibrate) measures.

use serde::{Deserialize, Serialize};
use tightfit_ir::op::{Apollo, Attention, LinearCrossEntropy, Op, Rule};
use tightfit_ir::{DType, Link, Type};

use crate::floats::Float;
use crate::gemm::Form;
use crate::simd::Isa;
use crate::target::{linear_cross_entropy_shape, product_form, size};

/// Speeds of one machine, with one instruction set and number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Seconds that a call takes however small it is.
    pub call_seconds: f64,
    /// Floating-point operations of matrix products, per second.
    pub product_flops: f64,
    /// Weighed bytes that products move beside those (`Form::traffic_bytes`), per second.
    pub product_bytes: f64,
    /// Floating-point operations of attention, per second.
    pub attention: Rows,
    /// Floating-point operations of attention's gradient, per second.
    pub attention_backward: Rows,
    /// Bytes of operands and results per second, by family.
    pub passes: Passes,
    /// To the next tier.
    pub link: Link,
}

/// Floating-point operations per second by how far apart the rows of keys and values lie.
///
/// Rows a multiple of 4 KiB apart fall onto the same few lines of the first-level cache (4 KiB is what one way of it holds), so that
/// a block of them does not stay there: the fate of models whose key heads are together a power of two wide.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rows {
    /// Anything else.
    pub spread: f64,
    /// A multiple of 4 KiB.
    pub aliased: f64,
}

impl Rows {
    /// For that attention on `q`. Of rows in 16 bits it works on dense copies.
    fn of(&self, op: &Attention, q: &Type) -> f64 {
        let apart = op.kv_heads.saturating_mul(op.head_dim).saturating_mul(4);
        match apart.is_multiple_of(4096) && q.dtype == DType::F32 {
            true => self.aliased,
            false => self.spread,
        }
    }
}

/// Bytes of operands and results per second, of what passes over them once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passes {
    /// Memory: sums, copies, lookups, zeros.
    pub memory: f64,
    /// RMSNorm and LayerNorm.
    pub norm: f64,
    /// Their gradients.
    pub norm_backward: f64,
    /// Rotary positions.
    pub rope: f64,
    /// Their table of sines and cosines.
    pub rope_table: f64,
    /// SwiGLU.
    pub swiglu: f64,
    /// Its gradient.
    pub swiglu_backward: f64,
    /// GELU.
    pub gelu: f64,
    /// Its gradient.
    pub gelu_backward: f64,
    /// Softmax and cross-entropy: of logits read.
    pub softmax: f64,
    /// Their gradient.
    pub softmax_backward: f64,
    /// AdamW, and all other optimizers with states of 32 bits.
    pub adamw: f64,
    /// AdamW with states of 8 bits, which are looked up.
    pub adamw_8bit: f64,
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Floating-point operations per second.
    Flops,
    /// Bytes per second.
    Bytes,
}

/// Threads that a machine's memory is taken to keep up with.
const MEMORY_THREADS: usize = 8;

impl Profile {
    /// What is taken for a machine that was not measured: figures of one core of a Zen 3 server with AVX2, times the threads.
    /// AVX-512 is taken to be no faster, as its clocks and its memory often are not, and what a compiler makes of the baseline's
    /// vectors to compute at a fifth of the speed.
    pub fn assumed(isa: Isa, threads: usize) -> Self {
        let (products, passes) = match isa {
            Isa::Avx512Bf16 | Isa::Avx512 | Isa::Avx2 => (1.0, 1.0),
            Isa::Portable | Isa::PortableBf16 => (0.2, 0.3),
        };
        let compute = |rate: f64| rate * products * threads as f64;
        let pass = |rate: f64| rate * passes * threads.min(MEMORY_THREADS) as f64;
        Self {
            call_seconds: 4e-6,
            product_flops: compute(95e9),
            product_bytes: pass(14e9),
            attention: Rows {
                spread: compute(63e9),
                aliased: compute(46e9),
            },
            attention_backward: Rows {
                spread: compute(62e9),
                aliased: compute(54e9),
            },
            passes: Passes {
                memory: pass(18e9),
                norm: pass(15e9),
                norm_backward: pass(14e9),
                rope: pass(19e9),
                rope_table: pass(0.6e9),
                swiglu: pass(14e9),
                swiglu_backward: pass(18e9),
                gelu: pass(14e9),
                gelu_backward: pass(9.6e9),
                softmax: pass(4.7e9),
                softmax_backward: pass(12e9),
                adamw: pass(28e9),
                adamw_8bit: pass(6e9),
            },
            link: Link { read: 1e9, write: 1e9 },
        }
    }

    /// Every figure, with a name for people.
    pub fn figures(&self) -> Vec<(&'static str, f64, Unit)> {
        let passes = &self.passes;
        vec![
            ("a call", self.call_seconds, Unit::Seconds),
            ("products", self.product_flops, Unit::Flops),
            ("products' packing", self.product_bytes, Unit::Bytes),
            ("attention", self.attention.spread, Unit::Flops),
            ("... rows 4 KiB apart", self.attention.aliased, Unit::Flops),
            ("attention backward", self.attention_backward.spread, Unit::Flops),
            ("... rows 4 KiB apart", self.attention_backward.aliased, Unit::Flops),
            ("memory", passes.memory, Unit::Bytes),
            ("norm", passes.norm, Unit::Bytes),
            ("norm backward", passes.norm_backward, Unit::Bytes),
            ("rope", passes.rope, Unit::Bytes),
            ("rope table", passes.rope_table, Unit::Bytes),
            ("swiglu", passes.swiglu, Unit::Bytes),
            ("swiglu backward", passes.swiglu_backward, Unit::Bytes),
            ("gelu", passes.gelu, Unit::Bytes),
            ("gelu backward", passes.gelu_backward, Unit::Bytes),
            ("softmax", passes.softmax, Unit::Bytes),
            ("softmax backward", passes.softmax_backward, Unit::Bytes),
            ("adamw", passes.adamw, Unit::Bytes),
            ("adamw, 8-bit states", passes.adamw_8bit, Unit::Bytes),
            ("link, read", self.link.read, Unit::Bytes),
            ("link, write", self.link.write, Unit::Bytes),
        ]
    }

    /// Whether every figure is a positive number, as predictions need it.
    pub fn is_valid(&self) -> bool {
        let mut figures = self.figures().into_iter();
        figures.all(|(_, value, _)| value.is_finite() && value > 0.0)
    }

    /// Seconds of one run of an operation with this instruction set.
    pub fn seconds(&self, isa: Isa, op: &Op, inputs: &[&Type], outputs: &[&Type]) -> f64 {
        let cost = op.cost(inputs, outputs);
        let (flops, bytes) = (cost.flops as f64, cost.bytes as f64);
        let passes = &self.passes;
        // Arithmetic is in `f32` however numbers are stored: where it sets the pace, a pass over 16 bits is no faster.
        let types = inputs.iter().chain(outputs);
        let computed: f64 = types.map(|ty| 4.0 * ty.shape.elements() as f64).sum();
        let work = match op {
            // Views: nothing runs.
            Op::Reshape(_) | Op::Settle(_) => return 0.0,
            Op::Linear(_) | Op::LinearBackwardInput(_) => self.product(isa, &product_form(op, inputs, outputs), false),
            Op::LinearBackwardWeight(_) => self.product(isa, &product_form(op, inputs, outputs), true),
            Op::LinearCrossEntropy(op) => self.linear_cross_entropy(isa, op, inputs),
            Op::Attention(op) => flops / self.attention.of(op, inputs[0]),
            Op::AttentionBackward(op) => flops / self.attention_backward.of(&op.0, inputs[0]),
            // A few rows against a cache: as slow as the arithmetic or as reading the cache.
            Op::CachedAttention(_) => (flops / self.attention.spread).max(bytes / passes.memory),
            Op::RmsNorm(_) | Op::LayerNorm(_) => computed / passes.norm,
            Op::RmsNormBackward(_) | Op::LayerNormBackward(_) => computed / passes.norm_backward,
            Op::Rope(_) => computed / passes.rope,
            Op::RopeTable(_) => bytes / passes.rope_table,
            Op::SwiGlu(_) => computed / passes.swiglu,
            Op::SwiGluBackward(_) => computed / passes.swiglu_backward,
            Op::Gelu(_) => computed / passes.gelu,
            Op::GeluBackward(_) => computed / passes.gelu_backward,
            Op::SoftmaxCrossEntropy(_) => computed / passes.softmax,
            Op::SoftmaxCrossEntropyBackward(_) => computed / passes.softmax_backward,
            Op::AdamW(_) | Op::Lion(_) | Op::Sgd(_) | Op::Adafactor(_) => bytes / passes.adamw,
            Op::AdamW8bit(_) => bytes / passes.adamw_8bit,
            Op::Apollo(op) => self.apollo(isa, op, inputs) + bytes / passes.adamw,
            Op::Add(_)
            | Op::Cast(_)
            | Op::BiasBackward(_)
            | Op::Dropout(_)
            | Op::Embedding(_)
            | Op::EmbeddingBackward(_)
            | Op::Fetch(_)
            | Op::AppliedStep(_)
            | Op::GlobalNorm(_)
            | Op::GradientFactor(_)
            | Op::KvAppend(_)
            | Op::Norm(_)
            | Op::PadRows(_)
            | Op::Scale(_)
            | Op::SliceRows(_)
            | Op::Store(_)
            | Op::UpdateLossScale(_)
            | Op::Zero(_) => bytes / passes.memory,
        };
        self.call_seconds + work
    }

    /// A product; the micro-kernel multiplies as many words in a second whatever they hold.
    fn product(&self, isa: Isa, form: &Form, transposed_a: bool) -> f64 {
        let flops = 2.0 * form.m as f64 * form.n as f64 * form.k as f64;
        let in_word = form.terms_in_word(isa) as f64;
        flops / (in_word * self.product_flops) + form.traffic_bytes(isa, transposed_a) / self.product_bytes
    }

    /// APOLLO's projection of the gradient.
    fn apollo(&self, isa: Isa, op: &Apollo, inputs: &[&Type]) -> f64 {
        let (rows, cols) = (size(inputs[0].dim(0)), size(inputs[0].dim(1)));
        let form = Form::new(rows.max(cols), size(op.rank), rows.min(cols));
        self.product(isa, &form, rows < cols)
    }

    /// Chunk by chunk: logits, their loss, and the gradients that are asked for.
    fn linear_cross_entropy(&self, isa: Isa, op: &LinearCrossEntropy, inputs: &[&Type]) -> f64 {
        let shape = linear_cross_entropy_shape(op, inputs[0], inputs[1]);
        let (rows, hidden, vocab) = (shape.rows, shape.hidden, shape.vocab);
        let chunk = shape.chunk.clamp(1, rows.max(1));
        let decoding = |form: Form, transposed| match shape.w {
            Some(block) => form.decoding(block, transposed),
            None => form,
        };
        let of_chunk = |n: usize| {
            let logits = 4.0 * n as f64 * vocab as f64;
            let product = decoding(Form::new(n, vocab, hidden).stored(shape.x, Float::F32), true);
            let mut seconds = self.product(isa, &product, false) + logits / self.passes.softmax;
            if op.input_gradient || op.weight_gradient {
                // Read and written over.
                seconds += 2.0 * logits / self.passes.softmax_backward;
            }
            if op.input_gradient {
                seconds += self.product(isa, &decoding(Form::new(n, hidden, vocab), false), false);
            }
            if op.weight_gradient {
                seconds += self.product(isa, &Form::new(vocab, hidden, n), true);
            }
            seconds
        };
        let whole = (rows / chunk) as f64 * of_chunk(chunk);
        match rows % chunk {
            0 => whole,
            rest => whole + of_chunk(rest),
        }
    }
}
