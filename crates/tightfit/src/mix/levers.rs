//! What each technique is worth on one job: its bytes and its time against the job without any.

use serde::Serialize;
use tightfit_plan::Plan;
use tightfit_search::{Fit, Limits};

use super::device::Device;
use super::search::Candidate;
use super::space::{MLP_TILES, Space};
use crate::Role;
use crate::failure::Failure;
use crate::job::{self, JobError};
use crate::settings::{Base, Count, Method, MlpTile, Offload, Optimizer, Precision, Recompute, Settings};
use crate::subject::Subject;

/// What a technique does to a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nothing, to the bit.
    Exact,
    /// Sums are cut otherwise.
    Rounding,
    /// Activations have 16 bits.
    Mixed,
    /// Weights, or what updates them, have fewer bits.
    Lossy,
    /// Something else is trained.
    Method,
}

/// A technique on a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lever {
    /// In words.
    pub name: &'static str,
    /// As flags.
    pub flags: String,
    /// By which the device's memory that the plain job needs is less; negative where it is more.
    pub saved_bytes: i64,
    /// The time of a step against that of the plain job.
    pub time_factor: f64,
    /// What it does to a result.
    pub kind: Kind,
    /// Whether the chosen mix has it.
    pub in_mix: bool,
}

/// The job without techniques, and what each of them is worth beside it.
#[derive(Clone, Debug, Serialize)]
pub struct Levers {
    /// Bytes of the plain job's arena.
    pub plain_arena_bytes: u64,
    /// At its peak, by role.
    pub plain_by_role: Vec<(Role, u64)>,
    /// Its weights: how many, and of how many bytes each, where all have as many.
    pub plain_weights: String,
    /// The time of its step.
    pub plain_seconds: f64,
    /// Each technique alone.
    pub levers: Vec<Lever>,
}

/// What people try that changes nothing here, and what it does instead.
pub const FOLKLORE: [(&str, &str); 4] = [
    (
        "emptying caches (`torch.cuda.empty_cache()`)",
        "gives memory back that this process would use again; one arena has no cache",
    ),
    (
        "`pin_memory=False` and fewer loader workers",
        "saves host memory, none of the card's",
    ),
    (
        "`cudnn.benchmark=False`",
        "chooses convolution kernels; a transformer has none",
    ),
    (
        "`gc.collect()` and `del` in the loop",
        "frees what is dead; a plan has given those bytes away already",
    ),
];

/// A technique.
struct Technique {
    name: &'static str,
    flags: &'static str,
    kind: Kind,
    /// Gives it to a job.
    apply: fn(&mut Settings),
    /// Whether a mix has it.
    is_in: fn(&Candidate) -> bool,
}

const TECHNIQUES: [Technique; 14] = [
    Technique {
        name: "loss in chunks",
        flags: "--loss-chunk auto",
        kind: Kind::Rounding,
        apply: |settings| settings.loss_chunk = Count::Auto,
        is_in: |mix| match mix.settings.loss_chunk {
            Count::Of(rows) => rows < mix.settings.micro_batch_shape().tokens(),
            Count::Auto => false,
        },
    },
    Technique {
        name: "recompute: one checkpoint per block",
        flags: "--recompute block",
        kind: Kind::Exact,
        apply: |settings| settings.recompute = Recompute::Block,
        is_in: |mix| mix.fit.choice.recomputes(),
    },
    Technique {
        name: "MLP in tiles",
        flags: "--mlp-tile N",
        kind: Kind::Rounding,
        apply: |settings| settings.mlp_tile = MlpTile(Some(settings.micro_batch_shape().tokens().div_ceil(MLP_TILES))),
        is_in: |mix| mix.settings.mlp_tile.0.is_some(),
    },
    Technique {
        name: "micro-batches of one sequence",
        flags: "--micro-batch 1",
        kind: Kind::Rounding,
        apply: |settings| settings.micro_batch = Count::Of(1),
        is_in: |mix| mix.settings.micro_batches() > 1,
    },
    Technique {
        name: "update in backward, without clipping",
        flags: "--update-in-backward --clip-norm none",
        kind: Kind::Exact,
        apply: |settings| {
            settings.update_in_backward = true;
            settings.clip_norm.0 = None;
        },
        is_in: |mix| mix.settings.update_in_backward,
    },
    Technique {
        name: "bf16 activations, f32 weights",
        flags: "--precision bf16-mixed",
        kind: Kind::Mixed,
        apply: |settings| settings.precision = Precision::Bf16Mixed,
        is_in: |mix| mix.settings.precision == Precision::Bf16Mixed,
    },
    Technique {
        name: "bf16 weights, rounded stochastically",
        flags: "--precision bf16",
        kind: Kind::Lossy,
        apply: |settings| settings.precision = Precision::Bf16,
        is_in: |mix| mix.settings.precision == Precision::Bf16,
    },
    Technique {
        name: "8-bit AdamW",
        flags: "--optimizer adamw-8bit",
        kind: Kind::Lossy,
        apply: |settings| settings.optimizer = Optimizer::AdamW8bit,
        is_in: |mix| mix.settings.optimizer == Optimizer::AdamW8bit,
    },
    Technique {
        name: "Adafactor",
        flags: "--optimizer adafactor",
        kind: Kind::Lossy,
        apply: |settings| settings.optimizer = Optimizer::Adafactor,
        is_in: |mix| mix.settings.optimizer == Optimizer::Adafactor,
    },
    Technique {
        name: "offload the optimizer's state",
        flags: "--offload optimizer",
        kind: Kind::Exact,
        apply: |settings| settings.offload = kinds(false, true, false),
        is_in: |mix| mix.fit.choice.offload_optimizer,
    },
    Technique {
        name: "offload activations",
        flags: "--offload activations",
        kind: Kind::Exact,
        apply: |settings| settings.offload = kinds(true, false, false),
        is_in: |mix| {
            mix.fit
                .choice
                .programs
                .iter()
                .any(|program| !program.offload.is_empty())
        },
    },
    Technique {
        name: "offload weights",
        flags: "--offload weights",
        kind: Kind::Exact,
        apply: |settings| settings.offload = kinds(false, false, true),
        is_in: |mix| mix.fit.choice.offload_weights,
    },
    Technique {
        name: "LoRA",
        flags: "--method lora",
        kind: Kind::Method,
        apply: |settings| settings.method = Method::Lora,
        is_in: |mix| mix.settings.method == Method::Lora,
    },
    Technique {
        name: "QLoRA, NF4",
        flags: "--method qlora",
        kind: Kind::Method,
        apply: |settings| (settings.method, settings.base) = (Method::Qlora, Base::Auto),
        is_in: |mix| mix.settings.method == Method::Qlora,
    },
];

fn kinds(activations: bool, optimizer: bool, weights: bool) -> Offload {
    Offload::Of {
        activations,
        optimizer,
        weights,
    }
}

/// Plans the job without any technique but what the user has fixed, and with each of them; what is the same is left out.
///
/// # Errors
/// The plain job cannot be planned.
pub fn levers(space: &Space, subject: &Subject<'_>, device: &Device) -> Result<Levers, Failure> {
    let plain = space.plain()?;
    let planned = |settings: &Settings| -> Result<Fit, JobError> {
        let unlimited = Limits {
            arena_bytes: u64::MAX,
            lower_tier_bytes: u64::MAX,
        };
        job::fit_on(&mut settings.clone(), subject, device.target(), &unlimited)
    };
    let fit = planned(&plain)?;
    let (plain_arena_bytes, plain_seconds) = (fit.plan.arena_bytes(), fit.prediction.seconds);
    let plain_by_role = fit.plan.summary().peak.by_role;
    let plain_weights = weights(&fit.plan);
    drop(fit);
    let mut levers = Vec::new();
    for technique in &TECHNIQUES {
        let mut settings = plain.clone();
        (technique.apply)(&mut settings);
        // What does not go with what is fixed is no lever.
        let Some(fit) = planned(&settings).ok().filter(|_| settings != plain) else {
            continue;
        };
        levers.push(Lever {
            name: technique.name,
            flags: match settings.mlp_tile.0 {
                Some(tokens) => technique.flags.replace('N', &tokens.to_string()),
                None => technique.flags.to_owned(),
            },
            saved_bytes: plain_arena_bytes as i64 - fit.plan.arena_bytes() as i64,
            time_factor: fit.prediction.seconds / plain_seconds,
            kind: technique.kind,
            in_mix: false,
        });
    }
    levers.sort_by_key(|lever| -lever.saved_bytes);
    Ok(Levers {
        plain_arena_bytes,
        plain_by_role,
        plain_weights,
        plain_seconds,
        levers,
    })
}

/// The arithmetic of a plan's weights in words.
fn weights(plan: &Plan) -> String {
    let weights = || {
        let tensors = plan.liveness().persistent.iter();
        tensors.filter(|tensor| tensor.role == Role::Weight)
    };
    let elements: u64 = weights().map(|tensor| tensor.ty.shape.elements()).sum();
    let bytes: u64 = weights().map(|tensor| tensor.ty.bytes()).sum();
    let each = match elements {
        0 => String::new(),
        _ if bytes.is_multiple_of(elements) => format!(" × {} B", bytes / elements),
        _ => String::new(),
    };
    format!("{}{each} = {} B", grouped(elements), grouped(bytes))
}

/// A number with its digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

impl Levers {
    /// Says which of them a mix has.
    pub fn mark(&mut self, mix: &Candidate) {
        for lever in &mut self.levers {
            let technique = TECHNIQUES.iter().find(|technique| technique.name == lever.name);
            lever.in_mix = technique.is_some_and(|technique| (technique.is_in)(mix));
        }
    }
}
