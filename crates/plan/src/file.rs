//! The plan as a file: JSON that a person can read, `diff` can compare and a later run can follow to the same offsets.
//!
//! It holds the settings that made the plan, a hash of the graph, every program's order and every buffer with its offset. The
//! graph itself is not in it: whoever loads the file builds the step again from the settings, and loading checks that it is the
//! same one and that every offset is still legal for it.

use serde::{Deserialize, Serialize};
use tightfit_ir::{NodeId, Role, Step, Target, Tier};

use crate::error::PlanError;
use crate::plan::{Layout, Plan, graph_hash};
use crate::schedule::Schedule;

/// Raised whenever an older program could misread the file.
pub const SCHEMA_VERSION: u32 = 1;

/// Why a plan file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Not JSON of this form.
    #[error("not a plan file: {0}")]
    Json(#[from] serde_json::Error),
    /// From another version of the program.
    #[error("plan file of schema version {found}, this program reads {SCHEMA_VERSION}: make the plan again")]
    Version {
        /// The file's.
        found: u32,
    },
    /// For another job or backend.
    #[error("the plan is for another {what}: it says {found}, this job has {expected}")]
    Mismatch {
        /// Graph, target, ….
        what: &'static str,
        /// In the file.
        found: String,
        /// Of the job.
        expected: String,
    },
    /// An order or offsets that the step does not allow.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// What the file holds.
#[derive(Debug, Serialize, Deserialize)]
pub struct PlanFile {
    /// See [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The resolved settings of the job.
    pub settings: serde_json::Value,
    /// What was chosen where settings leave a choice, as whoever made the plan needs it to make the step again.
    pub choice: serde_json::Value,
    /// The backend.
    pub target: String,
    /// Of every offset, in bytes.
    pub alignment: u64,
    /// SHA-256 of the step's text form.
    pub graph_hash: String,
    /// How buffers share the arena.
    pub layout: Layout,
    /// Highest planned byte, plus one.
    pub planned_peak_bytes: u64,
    /// No placement of the same buffers has a lower peak.
    pub lower_bound_bytes: u64,
    /// The persistent region.
    pub persistent: Vec<PersistentEntry>,
    /// Each routine's programs and buffers.
    pub routines: Vec<RoutineEntry>,
}

/// A persistent tensor.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistentEntry {
    /// Its name.
    pub name: String,
    /// Its type in text form.
    pub ty: String,
    /// What it is for.
    pub role: Role,
    /// Its offset in the arena.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
}

/// A routine.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutineEntry {
    /// Its name.
    pub name: String,
    /// Highest planned byte while it runs, plus one.
    pub peak_bytes: u64,
    /// Highest planned byte of the lower tier while it runs, plus one.
    pub lower_tier_peak_bytes: u64,
    /// No placement of its buffers has a lower peak.
    pub lower_bound_bytes: u64,
    /// Its programs in order.
    pub programs: Vec<ProgramEntry>,
    /// Its transient buffers.
    pub buffers: Vec<BufferEntry>,
}

/// A program.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramEntry {
    /// Its name.
    pub name: String,
    /// How often it runs.
    pub repeat: u32,
    /// The order of its nodes.
    pub order: Vec<NodeId>,
}

/// A transient buffer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferEntry {
    /// What it holds.
    pub label: String,
    /// What it is for.
    pub role: Role,
    /// Where it is.
    pub tier: Tier,
    /// Its offset in its tier's arena.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
    /// First step of the routine at which it is alive.
    pub start: u32,
    /// Last such step.
    pub end: u32,
}

impl Plan {
    /// The plan as a file's content.
    pub fn to_file(&self, settings: serde_json::Value, choice: serde_json::Value) -> PlanFile {
        let persistent = self.liveness().persistent.iter().zip(self.persistent_offsets());
        let routines = self.step().routines.iter().enumerate().map(|(index, routine)| {
            let placed = &self.routines()[index];
            let programs = routine.programs.iter().enumerate().map(|(at, program)| ProgramEntry {
                name: program.name.clone(),
                repeat: program.repeat,
                order: self.order(index, at).to_vec(),
            });
            let buffers = self.liveness().routines[index].buffers.iter().zip(&placed.offsets);
            RoutineEntry {
                name: routine.name.clone(),
                peak_bytes: placed.peak,
                lower_tier_peak_bytes: placed.lower_tier_peak,
                lower_bound_bytes: placed.lower_bound,
                programs: programs.collect(),
                buffers: buffers
                    .map(|(buffer, &offset)| BufferEntry {
                        label: buffer.label.to_string(),
                        role: buffer.role,
                        tier: buffer.tier,
                        offset,
                        bytes: buffer.bytes,
                        start: buffer.start,
                        end: buffer.end,
                    })
                    .collect(),
            }
        });
        PlanFile {
            schema_version: SCHEMA_VERSION,
            settings,
            choice,
            target: self.target().to_owned(),
            alignment: self.alignment(),
            graph_hash: self.graph_hash(),
            layout: self.layout(),
            planned_peak_bytes: self.peak(),
            lower_bound_bytes: self.lower_bound(),
            persistent: persistent
                .map(|(tensor, &offset)| PersistentEntry {
                    name: tensor.name.clone(),
                    ty: tensor.ty.to_string(),
                    role: tensor.role,
                    offset,
                    bytes: tensor.ty.bytes(),
                })
                .collect(),
            routines: routines.collect(),
        }
    }
}

impl PlanFile {
    /// Reads a file's content. [`Self::rebuild`] checks it against the job.
    ///
    /// # Errors
    /// Not JSON of this form, or of another schema version.
    pub fn parse(json: &str) -> Result<Self, FileError> {
        #[derive(Deserialize)]
        struct Version {
            schema_version: u32,
        }
        let Version { schema_version } = serde_json::from_str(json)?;
        if schema_version != SCHEMA_VERSION {
            return Err(FileError::Version { found: schema_version });
        }
        Ok(serde_json::from_str(json)?)
    }

    /// The content as JSON, one buffer a line, so that `diff` shows buffers.
    ///
    /// # Errors
    /// Never for a plan of this program; JSON can refuse some values.
    pub fn to_json(&self) -> Result<String, FileError> {
        let mut text = String::new();
        write_lines(&mut text, &serde_json::to_value(self)?, 0);
        text.push('\n');
        Ok(text)
    }

    /// The plan of `step` that this file describes: the same orders and offsets.
    ///
    /// # Errors
    /// The file is for another graph or backend, or its orders or offsets are not legal for this one.
    pub fn rebuild(&self, step: Step, target: &dyn Target) -> Result<Plan, FileError> {
        let same = |what, found: String, expected: String| {
            if found == expected {
                return Ok(());
            }
            Err(FileError::Mismatch { what, found, expected })
        };
        same("target", self.target.clone(), target.name().to_owned())?;
        same("graph", self.graph_hash.clone(), graph_hash(&step))?;
        let orders = self.routines.iter().flat_map(|r| &r.programs).map(|p| p.order.clone());
        let schedule = Schedule::new(step, orders.collect())?;
        let offsets = |r: &RoutineEntry| r.buffers.iter().map(|buffer| buffer.offset).collect();
        let plan = Plan::with_offsets(
            schedule,
            target,
            self.layout,
            self.routines.iter().map(offsets).collect(),
        )?;
        same("alignment", self.alignment.to_string(), plan.alignment().to_string())?;
        let rebuilt = plan.to_file(self.settings.clone(), self.choice.clone());
        alike("tensor", &self.persistent, &rebuilt.persistent)?;
        alike("routine", &self.routines, &rebuilt.routines)?;
        let totals = |file: &Self| format!("{} of {}", file.planned_peak_bytes, file.lower_bound_bytes);
        same("peak", totals(self), totals(&rebuilt))?;
        Ok(plan)
    }
}

/// Checks that the file's entries are those of the rebuilt plan.
fn alike<T: PartialEq + std::fmt::Debug>(what: &'static str, found: &[T], expected: &[T]) -> Result<(), FileError> {
    let differs = (0..found.len().max(expected.len())).find(|&i| found.get(i) != expected.get(i));
    let Some(index) = differs else {
        return Ok(());
    };
    let words = |entry: Option<&T>| entry.map_or("nothing".to_owned(), |entry| format!("{entry:?}"));
    Err(FileError::Mismatch {
        what,
        found: words(found.get(index)),
        expected: words(expected.get(index)),
    })
}

/// Writes JSON with each leaf object or array on one line.
fn write_lines(text: &mut String, value: &serde_json::Value, depth: usize) {
    use serde_json::Value;
    let nested = |v: &Value| matches!(v, Value::Object(_) | Value::Array(_));
    let pad = "  ".repeat(depth + 1);
    let close = "  ".repeat(depth);
    match value {
        Value::Object(map) if map.values().any(nested) => {
            text.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                text.push_str(if i == 0 { "\n" } else { ",\n" });
                text.push_str(&format!("{pad}{}: ", Value::from(key.as_str())));
                write_lines(text, item, depth + 1);
            }
            text.push_str(&format!("\n{close}}}"));
        }
        Value::Array(items) if items.iter().any(nested) => {
            text.push('[');
            for (i, item) in items.iter().enumerate() {
                text.push_str(if i == 0 { "\n" } else { ",\n" });
                text.push_str(&pad);
                write_lines(text, item, depth + 1);
            }
            text.push_str(&format!("\n{close}]"));
        }
        leaf => text.push_str(&leaf.to_string()),
    }
}
