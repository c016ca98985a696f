//! What each technique does in a plan and why, in words and numbers.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tightfit_pass::{NORM_STEP, TRAIN};
use tightfit_search::Explanation;
use tightfit_search::explain::{Reason, WayChoice};

use crate::Role;
use crate::job::Job;
use crate::memory::format_bytes;
use crate::settings::{Count, Settings};

/// Ways of blocks, and parts of one way, that the text lists; JSON has all.
const LISTED: usize = 3;

/// Every technique with what was chosen for it.
#[derive(Clone, Debug, Serialize)]
pub struct Techniques {
    /// What every block keeps, and why; `null` for a plan that was read from a file.
    pub recompute: Option<Explanation>,
    /// What is in a file; `null` if nothing is.
    pub offload: Option<OffloadReport>,
    /// Whether weights are updated inside of the backward.
    pub update_in_backward: bool,
    /// How often a step runs forward and backward on each micro-batch: twice where updates inside of the backward wait for the
    /// gradients' norm.
    pub backward_runs: u32,
    /// Sequences in memory at one time.
    pub micro_batch: Chosen,
    /// Tokens whose logits exist at one time.
    pub loss_chunk: Chosen,
    /// Tokens that an MLP takes at one time; `null` for all of them.
    pub mlp_tile: Option<u64>,
}

/// A number that the user gave or left open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Chosen {
    /// It.
    pub value: u64,
    /// Whether it was left to the planner.
    pub auto: bool,
}

/// What is on the lower tier.
#[derive(Clone, Debug, Serialize)]
pub struct OffloadReport {
    /// Whether some of what the backward reads is.
    pub activations: bool,
    /// Whether the optimizer's state is.
    pub optimizer: bool,
    /// Whether weights are.
    pub weights: bool,
    /// Most bytes that are fetched ahead of their use, and most that wait to be stored, but for one tensor.
    pub window_bytes: u64,
    /// Bytes there, by role.
    pub by_role: Vec<(Role, u64)>,
    /// The folder of the file.
    pub scratch: PathBuf,
}

impl Techniques {
    /// Of a job whose settings left to the planner what they leave in `asked`, and whose lower tier is a file in `scratch`.
    pub fn of(job: &Job, asked: &Settings, scratch: &Path) -> Self {
        let chosen = |asked, value| Chosen {
            value,
            auto: asked == Count::Auto,
        };
        let choice = &job.chosen.choice;
        let train = job.plan.step().routine(TRAIN);
        let clips_in_two = train.is_some_and(|train| train.programs.iter().any(|program| program.name == NORM_STEP));
        Self {
            recompute: job.explanation.clone(),
            offload: choice.offloads().then(|| OffloadReport {
                activations: choice.programs.iter().any(|program| !program.offload.is_empty()),
                optimizer: choice.offload_optimizer,
                weights: choice.offload_weights,
                window_bytes: choice.window,
                by_role: job.plan.summary().lower_tier_by_role,
                scratch: std::path::absolute(scratch).unwrap_or_else(|_| scratch.to_owned()),
            }),
            update_in_backward: job.settings.update_in_backward,
            backward_runs: 1 + u32::from(clips_in_two),
            micro_batch: chosen(asked.micro_batch, job.settings.micro_batch_rows()),
            loss_chunk: chosen(
                asked.loss_chunk,
                match job.settings.loss_chunk {
                    Count::Of(rows) => rows,
                    Count::Auto => job.settings.micro_batch_shape().tokens(),
                },
            ),
            mlp_tile: job.settings.mlp_tile.0,
        }
    }

    /// A few lines for people, of a step of which each micro-batch has so many tokens.
    pub fn lines(&self, micro_batch_tokens: u64) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(explanation) = self.recompute.as_ref().filter(|kept| kept.saved_bytes > 0) {
            saved(explanation, &mut lines);
        }
        if self.update_in_backward {
            let twice = match self.backward_runs {
                1 => "",
                _ => "; for the norm to clip by, forward and backward run twice",
            };
            lines.push(format!(
                "update   in the backward, each weight as its gradient is complete{twice}"
            ));
        }
        if self.loss_chunk.value < micro_batch_tokens {
            lines.push(format!("loss     in chunks of {} tokens", self.loss_chunk.value));
        }
        if let Some(tokens) = self.mlp_tile.filter(|&tokens| tokens < micro_batch_tokens) {
            lines.push(format!("mlp      in tiles of {tokens} tokens"));
        }
        lines
    }
}

/// What blocks keep for their backward, and why.
pub(crate) fn saved(explanation: &Explanation, lines: &mut Vec<String>) {
    let why = match explanation.reason {
        Reason::KeepAll | Reason::Fits if explanation.kept_bytes < explanation.saved_bytes => {
            "the rest is offloaded".to_owned()
        }
        Reason::KeepAll => "as asked".to_owned(),
        Reason::Fits => "it fits".to_owned(),
        Reason::WholeBlocks => "one checkpoint per block, as asked".to_owned(),
        Reason::Asked { kept_bytes } => format!("at most {}, as asked", format_bytes(kept_bytes)),
        Reason::LowerTier {
            needed_bytes,
            limit_bytes,
        } => format!(
            "with all of it the file takes {}, and there is room for {}",
            format_bytes(needed_bytes),
            format_bytes(limit_bytes)
        ),
        Reason::Arena {
            needed_bytes,
            limit_bytes,
        } => format!(
            "with all of it the arena takes {}, and the budget leaves {}",
            format_bytes(needed_bytes),
            format_bytes(limit_bytes)
        ),
    };
    let of = match explanation.saved_bytes - explanation.kept_bytes.min(explanation.saved_bytes) {
        0 => "all".to_owned(),
        _ => format!("of {}", format_bytes(explanation.saved_bytes)),
    };
    lines.push(format!(
        "saved    {:>11}  {of} that blocks keep for the backward beside their inputs: {why}",
        format_bytes(explanation.kept_bytes)
    ));
    if explanation.recompute_seconds > 0.0 {
        let share = 100.0 * explanation.recompute_seconds / explanation.step_seconds.max(f64::MIN_POSITIVE);
        lines.push(format!(
            "                      making the rest again takes {share:.1} % more time"
        ));
    }
    let ways = explanation.classes.iter().flat_map(|class| &class.ways);
    let ways: Vec<&WayChoice> = ways.collect();
    let changed = |way: &&&WayChoice| !way.recomputed.is_empty() || !way.offloaded.is_empty();
    for way in ways.iter().filter(changed).take(LISTED) {
        let mut what = Vec::new();
        for (verb, parts) in [("recompute", &way.recomputed), ("offload", &way.offloaded)] {
            // What saves most comes first; what runs again only for others to start from saves nothing itself.
            let mut parts: Vec<_> = parts.iter().collect();
            parts.sort_by_key(|part| u64::MAX - part.bytes);
            let names: Vec<&str> = parts.iter().take(LISTED).map(|part| part.part.as_str()).collect();
            let more = match parts.len().saturating_sub(LISTED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            if !names.is_empty() {
                what.push(format!("{verb} {}{more}", names.join(", ")));
            }
        }
        lines.push(format!(
            "         {:>11}  in {}: {}",
            format_bytes(way.kept_bytes),
            blocks(way),
            what.join("; ")
        ));
    }
    let listed = ways.iter().filter(changed).count().saturating_sub(LISTED);
    if listed > 0 {
        lines.push(format!("                      and {listed} more ways: see --json"));
    }
}

/// The blocks of a way, by the first and the last.
fn blocks(way: &WayChoice) -> String {
    match &way.blocks[..] {
        [] => "no block".to_owned(),
        [only] => only.clone(),
        [first, .., last] => {
            let number = last.rsplit('.').next().unwrap_or(last);
            format!("each of {first} to {number}")
        }
    }
}
