//! What goes to the lower tier: what was asked for, or the fewest kinds of tensors that make a step fit in the least time.
//!
//! For each candidate the search over what blocks keep runs by itself ([`fit`](mod@crate::fit)), and the predicted time of the whole
//! plan, transfers beside the computation, decides. Two bounds leave candidates out that need no plan to be beaten: the bytes of what
//! stays in memory in any case, and the time of the kernels without recomputing or of the link alone.

use std::collections::BTreeMap;

use tightfit_ir::{Binding, Link, OutputKind, Phase, Role, Step};
use tightfit_pass::TRAIN;
use tightfit_plan::PlanError;

use crate::fit::{Activations, Backend, Fit, FitError, Limits, Recompute, Tiers, fit_on, seconds};

/// What to offload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// Whatever it takes to fit.
    Auto,
    /// These.
    Kinds {
        /// What blocks keep for the backward.
        activations: bool,
        /// The optimizer's state.
        optimizer: bool,
        /// Weights.
        weights: bool,
    },
}

/// What to do to a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Request {
    /// What to make again.
    pub recompute: Recompute,
    /// What to move away.
    pub offload: Offload,
}

impl From<Recompute> for Request {
    /// That, and nothing moved away.
    fn from(recompute: Recompute) -> Self {
        Self {
            recompute,
            offload: Offload::None,
        }
    }
}

/// Bytes on their way at one time, from the least that overlaps with computation.
const WINDOWS: [u64; 3] = [0, 64 << 20, 512 << 20];

/// A plan that is slower by less than this is as good.
const TOLERANCE: f64 = 0.01;

/// Plans a step within limits, recomputing and offloading what is asked for or what it takes.
///
/// # Errors
/// Sizes that cannot be addressed, or a step without training.
pub fn fit(step: Step, backend: &Backend<'_>, limits: &Limits, request: Request) -> Result<Fit, FitError> {
    if !addressable(&step) {
        return Err(PlanError::TooLarge.into());
    }
    let plain = Tiers::default();
    let within = |tiers| fit_on(tiers, step.clone(), backend, limits, request.recompute);
    match request.offload {
        Offload::None => within(plain),
        Offload::Kinds {
            activations,
            optimizer,
            weights,
        } => {
            let kinds = Tiers {
                activations: if activations {
                    Activations::Leave
                } else {
                    Activations::Stay
                },
                optimizer,
                weights,
                ..plain
            };
            widened(within(kinds)?, kinds, within)
        }
        Offload::Auto => automatic(&step, backend, limits, within),
    }
}

/// Whether bytes can be added up, there and back, without a thought of overflow.
fn addressable(step: &Step) -> bool {
    let values = step.programs().flat_map(|(_, program)| &program.graph.values);
    values.map(|value| u128::from(value.ty.bytes())).sum::<u128>() <= u128::from(u64::MAX / 4)
}

/// The kinds that make it fit in the least time, or else the smallest that was found. What cannot be better than what was found by its
/// bounds is not planned.
fn automatic(
    step: &Step,
    backend: &Backend<'_>,
    limits: &Limits,
    within: impl Fn(Tiers) -> Result<Fit, FitError>,
) -> Result<Fit, FitError> {
    let (compute, _) = seconds(step, backend.target);
    let tensors = tensors(step);
    let link_seconds = |tiers: &Tiers| -> f64 {
        let leaving = tensors.values().filter(|tensor| tensor.leaves(tiers));
        leaving.map(|tensor| tensor.link_seconds(backend.target.link())).sum()
    };
    let kinds = [(false, false), (true, false), (false, true), (true, true)];
    let [stay, optimizer, weights, all] = kinds.map(|(optimizer, weights)| {
        let tiers = Tiers {
            optimizer,
            weights,
            ..Tiers::default()
        };
        // What the computation hides of the link, these leave to activations.
        let link_seconds = (compute - link_seconds(&tiers)).max(0.0);
        Tiers {
            activations: Activations::AsNeeded { link_seconds },
            ..tiers
        }
    });
    let in_memory = |tiers: &Tiers| -> u64 {
        let staying = tensors.values().filter(|tensor| !tensor.leaves(tiers));
        staying.map(|tensor| tensor.bytes).sum()
    };
    let may_fit = |tiers: &Tiers| *tiers == all || in_memory(tiers) <= limits.arena_bytes;
    let (able, unable): (Vec<Tiers>, Vec<Tiers>) = [Tiers::default(), stay, optimizer, weights, all]
        .into_iter()
        .partition(may_fit);
    let mut candidates = able.into_iter().chain(unable);
    let mut chosen = candidates.next().unwrap_or(all);
    let mut best = within(chosen)?;
    for tiers in candidates {
        let is_beaten = match best.fits {
            true => in_memory(&tiers) > limits.arena_bytes || !is_quicker(compute.max(link_seconds(&tiers)), &best),
            // What is on its way takes room as well: where all is small, moving less can need less.
            false => best.lower_tier_excess == 0 && in_memory(&tiers) >= best.plan.arena_bytes(),
        };
        if is_beaten {
            continue;
        }
        let other = within(tiers)?;
        if better(&other, &best) {
            (best, chosen) = (other, tiers);
        }
    }
    match best.choice.offloads() {
        true => widened(best, chosen, within),
        false => Ok(best),
    }
}

/// A persistent tensor.
struct Tensor {
    role: Role,
    bytes: u64,
    /// How often a step of training fetches it at least: for a forward, and for what comes after.
    reads: u32,
    /// Whether training updates it.
    written: bool,
}

impl Tensor {
    /// Whether it is on the lower tier.
    fn leaves(&self, tiers: &Tiers) -> bool {
        let moved = tightfit_pass::Offload {
            optimizer: tiers.optimizer,
            weights: tiers.weights,
            ..tightfit_pass::Offload::default()
        };
        moved.takes(self.role, self.bytes)
    }

    /// The least time of the link that it takes in one step.
    fn link_seconds(&self, link: Link) -> f64 {
        let fetched = self.bytes as f64 * f64::from(self.reads) / link.read;
        let stored = if self.written {
            self.bytes as f64 / link.write
        } else {
            0.0
        };
        fetched + stored
    }
}

/// A step's persistent tensors by name.
fn tensors(step: &Step) -> BTreeMap<&str, Tensor> {
    let mut tensors = BTreeMap::new();
    for (routine, program) in step.programs() {
        let graph = &program.graph;
        // By value: whether a forward node reads it, and whether another one does.
        let mut readers = vec![[false; 2]; graph.values.len()];
        for node in &graph.nodes {
            let direction = usize::from(node.phase != Phase::Forward);
            node.inputs
                .iter()
                .for_each(|value| readers[value.index()][direction] = true);
        }
        for (id, value, binding) in graph.inputs() {
            if !matches!(binding, Binding::Persistent { .. }) {
                continue;
            }
            let tensor = tensors.entry(&*value.name).or_insert(Tensor {
                role: value.role,
                bytes: value.ty.bytes(),
                reads: 0,
                written: false,
            });
            if routine.name == TRAIN {
                let directions = readers[id.index()].iter().filter(|&&reads| reads).count();
                tensor.reads += directions as u32 * program.repeat;
            }
        }
        for output in &graph.outputs {
            if let OutputKind::Update(input) = output.kind
                && let Some(tensor) = tensors.get_mut(&*graph.value(input).name)
            {
                tensor.written |= routine.name == TRAIN;
            }
        }
    }
    tensors
}

/// The same kinds with the window that takes the least time.
fn widened(narrow: Fit, tiers: Tiers, within: impl Fn(Tiers) -> Result<Fit, FitError>) -> Result<Fit, FitError> {
    let mut best = narrow;
    for window in WINDOWS.into_iter().skip(1) {
        if !best.fits || best.prediction.stalled() < TOLERANCE * best.prediction.seconds {
            break;
        }
        let wider = within(Tiers { window, ..tiers })?;
        if better(&wider, &best) {
            best = wider;
        }
    }
    Ok(best)
}

/// Whether a plan fits where another does not, or takes less time, or, where none fits, is smaller: in memory, as long as the lower tier
/// holds the rest.
fn better(a: &Fit, b: &Fit) -> bool {
    match (a.fits, b.fits) {
        (true, true) => is_quicker(a.prediction.seconds, b),
        (false, false) => (a.lower_tier_excess, a.plan.arena_bytes()) < (b.lower_tier_excess, b.plan.arena_bytes()),
        (fits, _) => fits,
    }
}

/// Whether a time is worth preferring to a plan's.
fn is_quicker(seconds: f64, than: &Fit) -> bool {
    seconds < (1.0 - TOLERANCE) * than.prediction.seconds
}
