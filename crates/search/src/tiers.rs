//! What goes to the lower tier: what was asked for, or the fewest kinds of tensors that make a step fit in the least time.
//!
//! For each candidate the search over what blocks keep runs by itself ([`fit`](mod@crate::fit)), and the predicted time of the whole
//! plan, transfers beside the computation, decides. Bounds leave candidates out that need no plan to be beaten: the bytes of what
//! stays in memory in any case; and the time of the link alone, or of the kernels and of what must run again for the rest to have room.

use std::collections::BTreeMap;

use tightfit_ir::{Binding, Link, OutputKind, Phase, Program, Role, Step, Target};
use tightfit_pass::TRAIN;
use tightfit_plan::PlanError;

use crate::fit::{Activations, Backend, Fit, FitError, Limits, Recompute, Tiers, fit_on, least_seconds, seconds};

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

impl Offload {
    /// Whether what blocks keep leaves memory whatever it takes.
    fn moves_activations(self) -> bool {
        matches!(self, Self::Kinds { activations: true, .. })
    }
}

/// What to do to a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// What to make again.
    pub recompute: Recompute,
    /// What to move away.
    pub offload: Offload,
    /// A plan that takes longer is of no use: nothing is done for its sake.
    pub most_seconds: f64,
}

impl From<Recompute> for Request {
    /// That, and nothing moved away.
    fn from(recompute: Recompute) -> Self {
        Self {
            recompute,
            offload: Offload::None,
            most_seconds: f64::INFINITY,
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
    let within = |tiers| fit_on(tiers, &step, backend, limits, request.recompute, None);
    let wider = |tiers, narrow: &Fit| {
        fit_on(
            tiers,
            &step,
            backend,
            limits,
            request.recompute,
            Some(&narrow.explanation),
        )
    };
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
            widened(within(kinds)?, kinds, request.most_seconds, wider)
        }
        Offload::Auto => automatic(&step, backend, limits, request, within, wider),
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
    request: Request,
    within: impl Fn(Tiers) -> Result<Fit, FitError>,
    wider: impl Fn(Tiers, &Fit) -> Result<Fit, FitError>,
) -> Result<Fit, FitError> {
    let mut candidates = candidates(step, backend, limits, request);
    if candidates
        .iter()
        .any(|candidate| candidate.seconds <= request.most_seconds)
    {
        candidates.retain(|candidate| candidate.seconds <= request.most_seconds);
    }
    // Of those that may take about as long, the one that moves least comes first; last what cannot fit, from the smallest.
    candidates.sort_by_key(|candidate| {
        let about = (candidate.seconds.ln() / (1.0 + TOLERANCE).ln()).round() as i64;
        let size = if candidate.seconds.is_finite() {
            0
        } else {
            candidate.in_memory
        };
        (about, size)
    });
    let mut best: Option<(Fit, Tiers)> = None;
    for Candidate {
        tiers,
        seconds,
        in_memory,
    } in candidates
    {
        let is_beaten = match &best {
            None => false,
            Some((best, _)) if best.fits => !is_quicker(seconds, best),
            // What is on its way takes room as well: where all is small, moving less can need less.
            Some((best, _)) => best.lower_tier_excess == 0 && in_memory >= best.plan.arena_bytes(),
        };
        if is_beaten {
            continue;
        }
        let other = within(tiers)?;
        if best.as_ref().is_none_or(|(best, _)| better(&other, best)) {
            best = Some((other, tiers));
        }
    }
    match best {
        Some((best, tiers)) if best.choice.offloads() => widened(best, tiers, request.most_seconds, wider),
        Some((best, _)) => Ok(best),
        None => within(Tiers::default()),
    }
}

/// Kinds that may be on the lower tier together.
struct Candidate {
    tiers: Tiers,
    /// No plan of them takes less; infinite where none fits.
    seconds: f64,
    /// Of persistent tensors.
    in_memory: u64,
}

/// Everything that a request allows, from what moves least.
fn candidates(step: &Step, backend: &Backend<'_>, limits: &Limits, request: Request) -> Vec<Candidate> {
    let (compute, _) = seconds(step, backend.target);
    let tensors = tensors(step);
    let candidate = |mut tiers: Tiers| -> Candidate {
        let (leaving, staying): (Vec<&Tensor>, Vec<&Tensor>) =
            tensors.values().partition(|tensor| tensor.leaves(&tiers));
        let link = backend.target.link();
        let link_seconds: f64 = leaving.iter().map(|tensor| tensor.link_seconds(link)).sum();
        if let Activations::AsNeeded { link_seconds: left } = &mut tiers.activations {
            // What the computation hides of the link, these leave to activations.
            *left = (compute - link_seconds).max(0.0);
        }
        let in_memory = staying.iter().map(|tensor| tensor.bytes).sum();
        let kernels = match (limits.arena_bytes.checked_sub(in_memory), request.recompute) {
            (None, _) => f64::INFINITY,
            (Some(room), Recompute::Auto) => least_seconds(tiers, step, backend, room, compute),
            (Some(_), _) => compute,
        };
        Candidate {
            tiers,
            seconds: kernels.max(link_seconds),
            in_memory,
        }
    };
    kinds(request.offload).into_iter().map(candidate).collect()
}

/// The kinds that may be on the lower tier together, from what moves least to what moves most.
fn kinds(offload: Offload) -> Vec<Tiers> {
    let of = |activations, optimizer, weights| Tiers {
        activations,
        optimizer,
        weights,
        ..Tiers::default()
    };
    let as_needed = Activations::AsNeeded { link_seconds: 0.0 };
    match offload {
        Offload::None => vec![Tiers::default()],
        Offload::Kinds {
            activations: true,
            optimizer,
            weights,
        } => vec![of(Activations::Leave, optimizer, weights)],
        Offload::Kinds { optimizer, weights, .. } => vec![of(Activations::Stay, optimizer, weights)],
        Offload::Auto => vec![
            Tiers::default(),
            of(as_needed, false, false),
            of(as_needed, true, false),
            of(as_needed, false, true),
            of(as_needed, true, true),
        ],
    }
}

/// What no plan of a step can beat: found without making one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Of an optimizer step.
    pub seconds: f64,
    /// Whether what stays between programs has room.
    pub fits: bool,
}

/// The bound of a step within limits: [`floor`], and what must run again or cross the link for the rest to have room.
pub fn bound(step: &Step, backend: &Backend<'_>, limits: &Limits, request: Request) -> Bound {
    let floor = floor(step, backend.target, limits, request.offload);
    if !floor.fits || request.offload.moves_activations() {
        return floor;
    }
    let candidates = candidates(step, backend, limits, request);
    let least = candidates
        .iter()
        .map(|candidate| candidate.seconds)
        .fold(f64::INFINITY, f64::min);
    Bound {
        seconds: floor.seconds.max(least),
        fits: least.is_finite(),
    }
}

/// What also no plan of the same step in smaller parts can beat, where as much leaves memory as `offload` allows: kernels without
/// recomputing take their time, and what there is no room for is fetched at least once.
pub fn floor(step: &Step, target: &dyn Target, limits: &Limits, offload: Offload) -> Bound {
    let all = kinds(offload).pop().unwrap_or_default();
    let tensors = tensors(step);
    let sum = |leaves: bool| -> u64 {
        let tensors = tensors.values().filter(|tensor| tensor.leaves(&all) == leaves);
        tensors.map(|tensor| tensor.bytes).sum()
    };
    let (staying, leaving) = (sum(false) + carried(step), sum(true));
    let fetched = (staying + leaving).saturating_sub(limits.arena_bytes);
    Bound {
        seconds: seconds(step, target).0.max(fetched as f64 / target.link().read),
        fits: staying <= limits.arena_bytes && fetched <= limits.lower_tier_bytes,
    }
}

/// The most bytes that are carried from one program to the next: all of them are alive between the two.
fn carried(step: &Step) -> u64 {
    let into = |(_, program): (_, &Program)| -> u64 {
        let inputs = program.graph.inputs();
        let carried = inputs.filter(|(_, _, binding)| matches!(binding, Binding::Carried));
        carried.map(|(_, value, _)| value.ty.bytes()).sum()
    };
    step.programs().map(into).max().unwrap_or(0)
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
fn widened(
    narrow: Fit,
    tiers: Tiers,
    most_seconds: f64,
    wider: impl Fn(Tiers, &Fit) -> Result<Fit, FitError>,
) -> Result<Fit, FitError> {
    let mut best = narrow;
    for window in WINDOWS.into_iter().skip(1) {
        let stalled = best.prediction.stalled();
        let is_hopeless = best.prediction.seconds - stalled > most_seconds;
        if !best.fits || is_hopeless || stalled < TOLERANCE * best.prediction.seconds {
            break;
        }
        let wide = wider(Tiers { window, ..tiers }, &best)?;
        if better(&wide, &best) {
            best = wide;
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
