//! What was chosen and why, for reports.

use std::fmt;

use serde::Serialize;
use tightfit_plan::report::format_bytes;

use crate::blocks::{Block, Class};
use crate::menu::Way;

/// Why anything is recomputed, or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Everything was asked to be kept.
    KeepAll,
    /// Everything kept fits.
    Fits,
    /// One checkpoint per block was asked for.
    WholeBlocks,
    /// That many bytes were asked to be kept at most.
    Asked {
        /// The limit.
        kept_bytes: u64,
    },
    /// With everything kept, what leaves memory would be larger than the lower tier may be.
    LowerTier {
        /// Bytes with everything kept.
        needed_bytes: u64,
        /// What there may be.
        limit_bytes: u64,
    },
    /// With everything kept, the arena would be larger than it may be.
    Arena {
        /// Bytes with everything kept.
        needed_bytes: u64,
        /// What there may be.
        limit_bytes: u64,
    },
}

/// What every block keeps, and what that costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Why.
    pub reason: Reason,
    /// Bytes that blocks keep for the backward of one micro-batch if all is kept.
    pub saved_bytes: u64,
    /// Bytes of those that they keep.
    pub kept_bytes: u64,
    /// Predicted time of a step with everything kept.
    pub step_seconds: f64,
    /// Predicted time of what is recomputed in a step.
    pub recompute_seconds: f64,
    /// How much less time a better choice for the same bytes could take at most, as a fraction of the step's.
    pub gap: f64,
    /// Each class of blocks.
    pub classes: Vec<ClassChoice>,
}

/// The blocks of one structure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassChoice {
    /// How many there are.
    pub blocks: usize,
    /// Bytes that one of them keeps if all is kept.
    pub saved_bytes: u64,
    /// The ways that are taken, least kept first.
    pub ways: Vec<WayChoice>,
}

/// Blocks that do the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WayChoice {
    /// Their scopes.
    pub blocks: Vec<String>,
    /// Bytes that each keeps in memory.
    pub kept_bytes: u64,
    /// Predicted time that each spends on recomputing, in one backward.
    pub seconds: f64,
    /// What each keeps.
    pub kept: Vec<PartChoice>,
    /// What each runs again.
    pub recomputed: Vec<PartChoice>,
    /// What each sends to the next tier.
    pub offloaded: Vec<PartChoice>,
}

/// One forward node of a block.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartChoice {
    /// Scope within the block and operation.
    pub part: String,
    /// Bytes that the backward reads of it.
    pub bytes: u64,
    /// Predicted time of running it again.
    pub seconds: f64,
}

impl WayChoice {
    pub(crate) fn new(class: &Class, way: &Way, blocks: &[Block]) -> Self {
        let choice = |part: usize, bytes: u64| PartChoice {
            part: class.parts[part].label.clone(),
            bytes,
            seconds: class.parts[part].seconds,
        };
        let mut result = Self {
            blocks: blocks.iter().map(|block| block.name.clone()).collect(),
            kept_bytes: way.resident_bytes,
            seconds: way.seconds,
            kept: Vec::new(),
            recomputed: Vec::new(),
            offloaded: Vec::new(),
        };
        for (index, part) in class.parts.iter().enumerate() {
            if way.recomputed.contains(&index) {
                result.recomputed.push(choice(index, part.saved_bytes()));
                continue;
            }
            let leaves = |output: usize| way.offloaded.contains(&(index, output));
            let bytes = |away: bool| -> u64 {
                let results = part.saved.iter().filter(|&&(output, _)| leaves(output) == away);
                results.map(|&(_, bytes)| bytes).sum()
            };
            for (bytes, list) in [(bytes(false), &mut result.kept), (bytes(true), &mut result.offloaded)] {
                if bytes > 0 {
                    list.push(choice(index, bytes));
                }
            }
        }
        result
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason {
            Reason::KeepAll => writeln!(f, "everything is kept, as asked")?,
            Reason::Fits => writeln!(f, "everything is kept: it fits")?,
            Reason::WholeBlocks => writeln!(f, "one checkpoint per block, as asked")?,
            Reason::Asked { kept_bytes } => writeln!(f, "at most {} kept, as asked", format_bytes(kept_bytes))?,
            Reason::LowerTier {
                needed_bytes,
                limit_bytes,
            } => writeln!(
                f,
                "with everything kept the lower tier would need {}, {} more than there is",
                format_bytes(needed_bytes),
                format_bytes(needed_bytes.saturating_sub(limit_bytes))
            )?,
            Reason::Arena {
                needed_bytes,
                limit_bytes,
            } => writeln!(
                f,
                "with everything kept the arena would need {}, {} more than there is",
                format_bytes(needed_bytes),
                format_bytes(needed_bytes.saturating_sub(limit_bytes))
            )?,
        }
        writeln!(
            f,
            "blocks keep {} of {}; recomputing takes {:.1} % of the step's time",
            format_bytes(self.kept_bytes),
            format_bytes(self.saved_bytes),
            100.0 * self.recompute_seconds / self.step_seconds.max(f64::MIN_POSITIVE)
        )?;
        for class in &self.classes {
            for way in class
                .ways
                .iter()
                .filter(|way| !way.recomputed.is_empty() || !way.offloaded.is_empty())
            {
                let names = match &way.blocks[..] {
                    [only] => only.clone(),
                    [first, .., last] => format!("{first} to {last} ({} blocks)", way.blocks.len()),
                    [] => continue,
                };
                writeln!(
                    f,
                    "  {names}: {} of {} each",
                    format_bytes(way.kept_bytes),
                    format_bytes(class.saved_bytes)
                )?;
                for (verb, parts) in [("recomputed", &way.recomputed), ("offloaded", &way.offloaded)] {
                    for part in parts {
                        writeln!(
                            f,
                            "    {verb} {:>10}  {:7.2} ms  {}",
                            format_bytes(part.bytes),
                            1e3 * part.seconds,
                            part.part
                        )?;
                    }
                }
            }
        }
        Ok(())
    }
}
