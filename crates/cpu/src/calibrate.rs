//! Measures a machine: a [`Profile`] from operations of a training step's shapes, in about a quarter of a minute.
//!
//! Every family of operations runs as in a session, on operands that are not in the cache. The shapes are those of a model of
//! moderate width: at them a speed neither shows what a call costs nor needs much memory (256 MiB at a time).

mod stopwatch;

use std::time::Duration;

use tightfit_ir::op::{
    Accumulate, AdamW, AdamW8bit, Add, Approximate, Attention, AttentionBackward, Gelu, GeluBackward, Linear,
    LinearBackwardInput, LinearBackwardWeight, Op, RmsNorm, RmsNormBackward, Rope, RopeTable, Rounding, STATE_BLOCK,
    SoftmaxCrossEntropy, SoftmaxCrossEntropyBackward, SwiGlu, SwiGluBackward,
};
use tightfit_ir::{DType, Link, Type};

use crate::gemm::Form;
use crate::profile::{Passes, Profile, Rows};
use crate::run::Cpu;
use crate::target::size;
use stopwatch::Run;

/// Rows, and columns of one that is passed over.
const ROWS: u64 = 1024;
const COLUMNS: u64 = 1536;
/// Width of a head.
const HEAD: u64 = 64;
/// Products of `T × K` and `N × K`, as T, N, K: wide, deep, thin and with few rows.
const PRODUCTS: [[u64; 3]; 5] = [
    [1024, 1024, 1024],
    [1024, 1536, 512],
    [512, 2048, 2048],
    [1024, 192, 576],
    [256, 8192, 512],
];

/// Measurements that [`calibrate`] makes: as often it calls `progress`.
pub const MEASUREMENTS: usize = 3 * PRODUCTS.len() + 18;

/// How long each of them should take: all together a quarter of a minute.
pub const SPAN: Duration = Duration::from_millis(400);

/// Measures this machine with the threads and instruction set of `cpu`, but for the link, which is not this backend's.
/// Each measurement takes about `span`; `progress` is called before it, with what it is of.
pub fn calibrate(cpu: &Cpu, link: Link, span: Duration, progress: &mut dyn FnMut(&'static str)) -> Profile {
    let mut bench = Bench {
        cpu,
        span,
        progress,
        call_seconds: 0.0,
    };
    let small = Type::f32([16]);
    bench.call_seconds = bench.run("calls", Add {}, &[small.clone(), small]).seconds;
    let (product_flops, product_bytes) = bench.products();
    let (attention, attention_backward) = bench.attention();
    let passes = bench.passes();
    Profile {
        call_seconds: bench.call_seconds,
        product_flops,
        product_bytes,
        attention,
        attention_backward,
        passes,
        link,
    }
}

struct Bench<'a> {
    cpu: &'a Cpu,
    span: Duration,
    progress: &'a mut dyn FnMut(&'static str),
    call_seconds: f64,
}

impl Bench<'_> {
    /// One run of an operation, less the fixed time of a call. One that is lost in the noise of that took half of it at least.
    fn run(&mut self, what: &'static str, op: impl Into<Op>, inputs: &[Type]) -> Run {
        (self.progress)(what);
        let run = stopwatch::measure(self.cpu, self.span, op, inputs);
        Run {
            seconds: (run.seconds - self.call_seconds).max(run.seconds / 2.0),
            ..run
        }
    }

    /// The two speeds of products that fit their times best.
    fn products(&mut self) -> (f64, f64) {
        let mut samples = Vec::new();
        for [t, n, k] in PRODUCTS {
            let (x, weight, dy) = (Type::f32([t, k]), Type::f32([n, k]), Type::f32([t, n]));
            let forward = Linear {
                bias: false,
                accumulate: Accumulate::NONE,
            };
            let [m, n, k] = [t, n, k].map(size);
            samples.push(self.sample(forward, &[x.clone(), weight.clone()], (m, n, k), false));
            samples.push(self.sample(LinearBackwardInput::default(), &[dy.clone(), weight], (m, k, n), false));
            samples.push(self.sample(LinearBackwardWeight::default(), &[x, dy], (n, k, m), true));
        }
        fit(&samples)
    }

    /// With m, n and k of the product that the kernel makes of the operation.
    fn sample(
        &mut self,
        op: impl Into<Op>,
        inputs: &[Type],
        (m, n, k): (usize, usize, usize),
        transposed_a: bool,
    ) -> Sample {
        let run = self.run("matrix products", op, inputs);
        Sample {
            flops: run.cost.flops as f64,
            bytes: Form::new(m, n, k).traffic_bytes(self.cpu.target().isa, transposed_a),
            seconds: run.seconds,
        }
    }

    /// Flops per second, forward and backward.
    fn attention(&mut self) -> (Rows, Rows) {
        // Keys of 768 bytes a row, and of 4 KiB.
        let (spread, spread_backward) = self.attention_of(9, 3);
        let (aliased, aliased_backward) = self.attention_of(16, 16);
        let backward = Rows {
            spread: spread_backward,
            aliased: aliased_backward,
        };
        (Rows { spread, aliased }, backward)
    }

    fn attention_of(&mut self, heads: u64, kv_heads: u64) -> (f64, f64) {
        let rows = ROWS;
        let attention = Attention {
            heads,
            kv_heads,
            head_dim: HEAD,
            scale: 1.0 / (HEAD as f64).sqrt(),
            context: rows,
            window: None,
        };
        let (q, kv) = (Type::f32([rows, heads * HEAD]), Type::f32([rows, kv_heads * HEAD]));
        let (doc_start, lse) = (Type::i32([rows]), Type::f32([rows, heads]));
        let operands = [q.clone(), kv.clone(), kv, doc_start];
        let forward = self.run("attention", attention.clone(), &operands);
        let saved = [q.clone(), lse, q];
        let backward = self.run(
            "attention",
            AttentionBackward(attention),
            &[&operands[..], &saved].concat(),
        );
        (forward.flops(), backward.flops())
    }

    /// Bytes per second of everything else.
    fn passes(&mut self) -> Passes {
        let x = Type::f32([ROWS, COLUMNS]);
        let (one, two, three) = ([x.clone()], [x.clone(), x.clone()], [x.clone(), x.clone(), x.clone()]);
        let (weight, rstd) = (Type::f32([COLUMNS]), Type::f32([ROWS]));
        let norm_backward = RmsNormBackward {
            input: true,
            weight: true,
            accumulate: Accumulate::NONE,
        };
        let table = RopeTable {
            head_dim: HEAD,
            theta: 1e4,
            scaling: None,
        };
        let approximate = Approximate::None;
        let ignore_index = -100;
        let [targets, count] = [Type::i32([ROWS]), Type::f32([1])];
        let adamw = AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            factor: false,
            rounding: Rounding::Nearest,
        };
        let state = [&[x.clone(), x.clone()], &two[..], &[count.clone(), count.clone()]].concat();
        let codes = Type::new(DType::U8, x.shape.clone());
        let absmax = Type::f32([x.shape.elements().div_ceil(STATE_BLOCK)]);
        let codes = [
            &[x.clone(), x.clone()],
            &[codes.clone(), absmax.clone(), codes, absmax][..],
            &[count.clone(), count.clone()],
        ]
        .concat();
        let mut bytes = |what, op: Op, inputs: &[Type]| self.run(what, op, inputs).bytes();
        Passes {
            memory: bytes("memory", Add {}.into(), &two),
            norm: bytes("norms", RmsNorm { eps: 1e-5 }.into(), &[x.clone(), weight.clone()]),
            norm_backward: bytes(
                "norms",
                norm_backward.into(),
                &[x.clone(), weight, rstd.clone(), x.clone()],
            ),
            rope: bytes(
                "rotary positions",
                Rope { inverse: false }.into(),
                &[x.clone(), Type::f32([ROWS, HEAD])],
            ),
            rope_table: bytes("rotary positions", table.into(), std::slice::from_ref(&targets)),
            swiglu: bytes("exponentials", SwiGlu {}.into(), &two),
            swiglu_backward: bytes("exponentials", SwiGluBackward {}.into(), &three),
            gelu: bytes("exponentials", Gelu { approximate }.into(), &one),
            gelu_backward: bytes("exponentials", GeluBackward { approximate }.into(), &two),
            softmax: bytes(
                "exponentials",
                SoftmaxCrossEntropy { ignore_index }.into(),
                &[x.clone(), targets.clone(), count.clone()],
            ),
            softmax_backward: bytes(
                "exponentials",
                SoftmaxCrossEntropyBackward {
                    ignore_index,
                    scaled: false,
                }
                .into(),
                &[x, rstd, targets, count],
            ),
            adamw: bytes("the optimizer", adamw.clone().into(), &state),
            adamw_8bit: bytes("the optimizer", AdamW8bit(adamw).into(), &codes),
        }
    }
}

/// One product's work and time.
struct Sample {
    flops: f64,
    bytes: f64,
    seconds: f64,
}

/// Speeds `F` and `B` such that `flops / F + bytes / B` is nearest to the seconds of all samples, by least squares of the relative
/// error. Samples that show no time of their own for the bytes leave it all to the flops.
fn fit(samples: &[Sample]) -> (f64, f64) {
    let sum = |f: fn(f64, f64) -> f64| {
        let terms = samples
            .iter()
            .map(|sample| f(sample.flops / sample.seconds, sample.bytes / sample.seconds));
        terms.sum::<f64>()
    };
    // The normal equations of rows (f, b) and right sides of 1.
    let (ff, fb, bb) = (sum(|f, _| f * f), sum(|f, b| f * b), sum(|_, b| b * b));
    let (f, b) = (sum(|f, _| f), sum(|_, b| b));
    let determinant = ff * bb - fb * fb;
    let per_flop = (f * bb - b * fb) / determinant;
    let per_byte = (b * ff - f * fb) / determinant;
    match per_flop > 0.0 && per_byte > 0.0 {
        true => (1.0 / per_flop, 1.0 / per_byte),
        // Next to nothing, and still a number.
        false => (ff / f, 1e3 * bb / b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;

    #[test]
    fn a_fit_finds_the_speeds_that_made_the_times() {
        let sample = |flops, bytes, noise| Sample {
            flops,
            bytes,
            seconds: noise * (flops / 2e11 + bytes / 3e10),
        };
        let shapes = [(1e9, 1e7), (1e9, 6e7), (4e9, 5e7), (1e8, 9e6)];
        let exact: Vec<_> = shapes.iter().map(|&(f, b)| sample(f, b, 1.0)).collect();
        let (flops, bytes) = fit(&exact);
        assert!((flops / 2e11 - 1.0).abs() < 1e-6 && (bytes / 3e10 - 1.0).abs() < 1e-6);
        let noisy = shapes.iter().zip([1.02, 0.98, 1.01, 0.99]);
        let noisy: Vec<_> = noisy.map(|(&(f, b), noise)| sample(f, b, noise)).collect();
        let (flops, bytes) = fit(&noisy);
        assert!((flops / 2e11 - 1.0).abs() < 0.1 && (bytes / 3e10 - 1.0).abs() < 0.3);
    }

    #[test]
    fn times_without_a_trace_of_bytes_still_make_speeds() {
        let samples =
            [(1e9, 9e7, 1.0), (4e9, 1e7, 4.0)].map(|(flops, bytes, seconds)| Sample { flops, bytes, seconds });
        let (flops, bytes) = fit(&samples);
        assert!((flops / 1e9 - 1.0).abs() < 0.1, "{flops}");
        assert!(bytes.is_finite() && bytes > 0.0);
    }

    #[test]
    fn a_machine_is_measured() {
        let cpu = Cpu::new(Pool::new(1, 256 << 10).unwrap());
        let link = Link { read: 5e8, write: 4e8 };
        let mut measured = 0;
        let profile = calibrate(&cpu, link, Duration::ZERO, &mut |_| measured += 1);
        assert!(profile.is_valid(), "{profile:?}");
        assert_eq!(profile.link, link);
        assert_eq!(measured, MEASUREMENTS);
    }
}
