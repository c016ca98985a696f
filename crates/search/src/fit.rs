//! From a step and limits to a plan: what blocks keep follows from the exact peak of whole plans.
//!
//! How the peak depends on what blocks keep is left to the planner: a limit of kept bytes is chosen for, applied, scheduled and
//! placed; where the arena comes out too large, the limit shrinks by the excess, and where there is room left, it grows by that.
//! The last limit that fitted and the last that did not enclose the next one, so that the search narrows, and it ends after
//! [`MAX_ROUNDS`] at the latest with the best plan found.
//!
//! Blocks that keep least come first: the backward begins with the last block, when all others' results are alive and there is
//! least room to make anything again.

use tightfit_ir::{NodeId, Phase, Step, Target};
use tightfit_pass::{PassError, SMALLEST, TRAIN};
use tightfit_plan::place::Effort;
use tightfit_plan::plan::{Draft, Layout};
use tightfit_plan::{Plan, PlanError, Prediction, schedule};

use crate::blocks::{Blocks, Class};
use crate::choice::{Choice, ProgramChoice};
use crate::explain::{ClassChoice, Explanation, Reason, WayChoice};
use crate::knapsack::{Capacity, Group, Item, Selection, choose};
use crate::menu::{Way, menu, whole_block, with_offload};

/// Plans that are made while searching.
pub const MAX_ROUNDS: u32 = 8;

/// Room worth less than this fraction of the arena is not searched for.
const WORTHWHILE: u64 = 256;

/// What to recompute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Recompute {
    /// As little as makes the arena fit.
    #[default]
    Auto,
    /// Nothing.
    None,
    /// All that the backward reads of a block, from what enters it.
    Block,
    /// What it takes to keep at most that many bytes in blocks, whether the rest fits or not.
    Bytes(u64),
    /// The same, in percent of what blocks would keep.
    Percent(f64),
}

/// What a plan may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The arena.
    pub arena_bytes: u64,
    /// The lower tier.
    pub lower_tier_bytes: u64,
}

/// What of a step is on the lower tier.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tiers {
    /// The optimizer's state is.
    pub optimizer: bool,
    /// Weights are.
    pub weights: bool,
    /// Saved activations.
    pub activations: Activations,
    /// Bytes on their way at one time: see [`Offload::window`](tightfit_pass::Offload::window).
    pub window: u64,
}

/// What blocks keep for their backward may be on the lower tier meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activations {
    /// It stays in memory.
    #[default]
    Stay,
    /// As much of it is as it takes, with so many seconds of the link in one run of a training program.
    AsNeeded {
        /// There and back.
        link_seconds: f64,
    },
    /// All of it is, and what enters blocks as well.
    Leave,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// A technique that does not apply.
    #[error(transparent)]
    Pass(#[from] PassError),
    /// No order or placement.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// The plan that was found.
#[derive(Clone, Debug)]
pub struct Fit {
    /// Every byte of it.
    pub plan: Plan,
    /// Whether it is within the limits. If not, nothing that was tried is.
    pub fits: bool,
    /// Bytes by which it exceeds the lower tier's limit.
    pub lower_tier_excess: u64,
    /// How long one optimizer step is expected to take.
    pub prediction: Prediction,
    /// What was done to the step.
    pub choice: Choice,
    /// In words and numbers.
    pub explanation: Explanation,
    /// Plans made to find it.
    pub rounds: u32,
}

/// Plans a step within limits, recomputing what is asked for or what it takes. A plan that is about `like` another one starts from what
/// that one keeps.
///
/// # Errors
/// Sizes that cannot be addressed, or a step without training.
pub(crate) fn fit_on(
    tiers: Tiers,
    step: &Step,
    backend: &Backend<'_>,
    limits: &Limits,
    recompute: Recompute,
    like: Option<&Explanation>,
) -> Result<Fit, FitError> {
    let mut search = Search::new(tiers, step, backend, limits);
    match recompute {
        Recompute::None => search.finish(u64::MAX, Reason::KeepAll),
        Recompute::Block => {
            search.menus = search
                .blocks
                .classes
                .iter()
                .map(|class| vec![whole_block(class)])
                .collect();
            search.finish(u64::MAX, Reason::WholeBlocks)
        }
        Recompute::Bytes(kept_bytes) => search.finish(kept_bytes, Reason::Asked { kept_bytes }),
        Recompute::Percent(percent) => {
            let kept_bytes = (search.blocks.saved_bytes() as f64 * percent / 100.0) as u64;
            search.finish(kept_bytes, Reason::Asked { kept_bytes })
        }
        Recompute::Auto => search.auto(like),
    }
}

/// The time that no plan of a step beats which keeps at most so many bytes in blocks: kernels, what is made again for that, and the link.
/// Infinite where blocks cannot keep so little.
pub(crate) fn least_seconds(tiers: Tiers, step: &Step, backend: &Backend<'_>, kept_bytes: u64, compute: f64) -> f64 {
    let limits = Limits {
        arena_bytes: kept_bytes,
        lower_tier_bytes: u64::MAX,
    };
    let search = Search::new(tiers, step, backend, &limits);
    let selection = search.selection(kept_bytes);
    match selection.total.bytes <= kept_bytes {
        true => compute + selection.bound,
        false => f64::INFINITY,
    }
}

/// What a step is planned for.
pub struct Backend<'a> {
    /// The numbers of a backend.
    pub target: &'a dyn Target,
    /// What is added to a step once it is known which tensors are where, such as staging buffers to load and save them.
    pub complete: &'a dyn Fn(Step) -> Step,
}

impl<'a> Backend<'a> {
    /// A backend, with nothing to add.
    pub fn of(target: &'a dyn Target) -> Self {
        Self {
            target,
            complete: &|step| step,
        }
    }
}

struct Search<'a> {
    tiers: Tiers,
    step: &'a Step,
    target: &'a dyn Target,
    complete: &'a dyn Fn(Step) -> Step,
    limits: Limits,
    /// By program: its name and blocks. They are of the same classes: all run the same model, and memory is for one at a time.
    programs: Vec<(String, Blocks)>,
    /// Those of the first program.
    blocks: Blocks,
    /// By class.
    menus: Vec<Vec<Way>>,
    rounds: u32,
}

/// A choice with its plan.
struct Found {
    selection: Selection,
    plan: Planned,
}

/// A plan, as far as it is worth making: what is too large in any placement is not placed.
enum Planned {
    Placed(Plan),
    TooLarge(Draft),
}

impl Planned {
    /// Bytes of the lower tier; 0 for what is too large for the arena.
    fn lower_tier_bytes(&self) -> u64 {
        match self {
            Self::Placed(plan) => plan.lower_tier_bytes(),
            Self::TooLarge(_) => 0,
        }
    }

    /// Bytes of the arena; at least so many for what is too large.
    fn arena_bytes(&self) -> u64 {
        match self {
            Self::Placed(plan) => plan.arena_bytes(),
            Self::TooLarge(draft) => draft.least_arena_bytes(),
        }
    }
}

impl<'a> Search<'a> {
    fn new(tiers: Tiers, step: &'a Step, backend: &Backend<'a>, limits: &Limits) -> Self {
        let Backend { target, complete } = *backend;
        let programs = step.routine(TRAIN).into_iter().flat_map(|train| &train.programs);
        let mut programs: Vec<(String, Blocks)> = programs
            .filter(|program| program.graph.nodes.iter().any(|node| node.phase == Phase::Forward))
            .map(|program| (program.name.clone(), Blocks::of(&program.graph, target)))
            .collect();
        let blocks = programs
            .first()
            .map_or_else(Blocks::default, |(_, blocks)| blocks.clone());
        programs.retain(|(_, other)| other.alike(&blocks));
        let ways = |class| {
            let menu = menu(class);
            match tiers.activations {
                Activations::AsNeeded { .. } => with_offload(class, &menu),
                Activations::Stay | Activations::Leave => menu,
            }
        };
        let menus = blocks.classes.iter().map(ways).collect();
        Self {
            tiers,
            step,
            target,
            complete,
            limits: *limits,
            programs,
            blocks,
            menus,
            rounds: 0,
        }
    }

    /// The choice that keeps at most that many bytes, or the least that can be kept.
    fn selection(&self, kept_bytes: u64) -> Selection {
        let link = self.target.link();
        let item = |way: &Way| Item {
            bytes: way.resident_bytes,
            seconds: way.seconds,
            link_seconds: way.link_bytes as f64 / 2.0 * (link.read.recip() + link.write.recip()),
        };
        let groups = self.blocks.classes.iter().zip(&self.menus);
        let groups: Vec<Group> = groups
            .map(|(class, menu)| Group {
                blocks: class.blocks.len(),
                items: menu.iter().map(item).collect(),
            })
            .collect();
        let link_seconds = match self.tiers.activations {
            Activations::AsNeeded { link_seconds } => link_seconds,
            Activations::Stay | Activations::Leave => 0.0,
        };
        // The least with as much of the link as it takes, and the least with none, which is within any limit of it.
        let least = |link_seconds: f64| -> u64 {
            let of_group = |group: &Group| {
                let items = group.items.iter().filter(|item| item.link_seconds <= link_seconds);
                items.map(|item| item.bytes).min().unwrap_or(0) * group.blocks as u64
            };
            groups.iter().map(of_group).sum()
        };
        let within = |bytes: u64| choose(&groups, Capacity { bytes, link_seconds });
        let mut selection = within(kept_bytes.max(least(f64::INFINITY)));
        if selection.is_none() {
            // The limit of the link is what keeps it from being less: as little as that allows.
            let (mut low, mut high) = (kept_bytes.max(least(f64::INFINITY)), kept_bytes.max(least(0.0)));
            selection = within(high);
            while high - low > (self.blocks.saved_bytes() / WORTHWHILE).max(1) {
                let middle = low + (high - low) / 2;
                match within(middle) {
                    Some(smaller) => (selection, high) = (Some(smaller), middle),
                    None => low = middle,
                }
            }
        }
        selection.unwrap_or(Selection {
            counts: Vec::new(),
            total: Item {
                bytes: 0,
                seconds: 0.0,
                link_seconds: 0.0,
            },
            bound: 0.0,
        })
    }

    /// By class: every block's way, least kept first.
    fn assignment(&self, selection: &Selection) -> Vec<Vec<usize>> {
        let classes = self.menus.iter().zip(&selection.counts);
        let assign = |(menu, counts): (&Vec<Way>, &Vec<usize>)| {
            let mut ways: Vec<usize> = counts.iter().enumerate().flat_map(|(way, &n)| vec![way; n]).collect();
            ways.sort_by_key(|&way| menu[way].resident_bytes);
            ways
        };
        classes.map(assign).collect()
    }

    fn choice(&self, selection: &Selection) -> Choice {
        let assignment = self.assignment(selection);
        let choose = |(program, blocks): &(String, Blocks)| {
            let mut choice = ProgramChoice {
                program: program.clone(),
                keep: blocks.entries.iter().map(|entry| entry.value).collect(),
                offload: match self.tiers.activations {
                    Activations::Leave => large_entries(blocks),
                    _ => Vec::new(),
                },
                ..ProgramChoice::default()
            };
            for ((class, menu), ways) in blocks.classes.iter().zip(&self.menus).zip(&assignment) {
                for (block, &way) in class.blocks.iter().zip(ways) {
                    let way = &menu[way];
                    let nodes = way.recomputed.iter().map(|&part| block.nodes[part]);
                    choice.recompute.extend(nodes);
                    let results = self
                        .done_as(class, way)
                        .offloaded
                        .into_iter()
                        .map(|(part, output)| (block.nodes[part], output));
                    choice.offload.extend(results);
                }
            }
            choice
        };
        Choice {
            programs: self.programs.iter().map(choose).collect(),
            offload_optimizer: self.tiers.optimizer,
            offload_weights: self.tiers.weights,
            window: self.tiers.window,
        }
    }

    fn plan(&mut self, selection: &Selection, effort: Effort) -> Result<Planned, FitError> {
        self.rounds += 1;
        let step = self.choice(selection).apply(self.step.clone(), self.target)?;
        let step = (self.complete)(step);
        let draft = Draft::new(schedule(step, self.target)?, self.target, Layout::Shared)?;
        Ok(match draft.least_arena_bytes() <= self.limits.arena_bytes {
            true => Planned::Placed(draft.place(effort)?),
            false => Planned::TooLarge(draft),
        })
    }

    /// The choice that keeps at most that many bytes, and its plan. Where it offloads more than the lower tier holds, it is made again with
    /// less of the link, which stays the limit from there on.
    fn attempt(&mut self, kept_bytes: u64, effort: Effort) -> Result<Found, FitError> {
        loop {
            let selection = self.selection(kept_bytes);
            let plan = self.plan(&selection, effort)?;
            let excess = plan.lower_tier_bytes().saturating_sub(self.limits.lower_tier_bytes);
            let used = selection.total.link_seconds;
            match &mut self.tiers.activations {
                Activations::AsNeeded { link_seconds } if excess > 0 && used > 0.0 => {
                    let link = self.target.link();
                    let spare = excess as f64 * (link.read.recip() + link.write.recip());
                    *link_seconds = match self.rounds < MAX_ROUNDS {
                        true => (used - spare).max(0.0),
                        false => 0.0,
                    };
                }
                _ => return Ok(Found { selection, plan }),
            }
        }
    }

    /// By how many bytes a plan exceeds the lower tier, as far as that depends on how much is recomputed, and the arena.
    fn excess(&self, plan: &Planned) -> (u64, u64) {
        let lower_tier = match self.tiers.activations {
            Activations::Leave => plan.lower_tier_bytes().saturating_sub(self.limits.lower_tier_bytes),
            Activations::Stay | Activations::AsNeeded { .. } => 0,
        };
        (lower_tier, plan.arena_bytes().saturating_sub(self.limits.arena_bytes))
    }

    /// As little as makes it fit.
    fn auto(mut self, like: Option<&Explanation>) -> Result<Fit, FitError> {
        let limit = self.limits.arena_bytes;
        if let Some(like) = like.filter(|like| like.reason != Reason::Fits) {
            let found = self.attempt(like.kept_bytes, Effort::QUICK)?;
            if self.excess(&found.plan) == (0, 0) {
                return self.done(improved(found)?, like.reason);
            }
        }
        let whole = self.attempt(u64::MAX, Effort::default())?;
        let (needed_bytes, excess) = (whole.plan.arena_bytes(), self.excess(&whole.plan));
        if excess == (0, 0) || self.blocks.saved_bytes() == 0 {
            return self.done(whole, Reason::Fits);
        }
        let reason = match excess {
            (_, 0) => Reason::LowerTier {
                needed_bytes: whole.plan.lower_tier_bytes(),
                limit_bytes: self.limits.lower_tier_bytes,
            },
            _ => Reason::Arena {
                needed_bytes,
                limit_bytes: limit,
            },
        };
        let least = self.selection(0).total.bytes;
        // The last limits of kept bytes that did and did not fit.
        let (mut low, mut high) = (None::<u64>, whole.selection.total.bytes);
        let mut best: Option<Found> = None;
        let mut kept = high.saturating_sub(excess.0.max(excess.1)).max(least);
        let mut lightest = whole;
        while self.rounds < MAX_ROUNDS {
            let found = self.attempt(kept, Effort::QUICK)?;
            let (bytes, arena) = (found.selection.total.bytes, found.plan.arena_bytes());
            let excess = self.excess(&found.plan);
            let next = if excess == (0, 0) {
                low = Some(bytes.max(kept.min(high)));
                best = Some(found);
                let room = limit - arena;
                if room < limit / WORTHWHILE {
                    break;
                }
                kept.saturating_add(room)
            } else {
                if self.is_lighter(&found, &lightest) {
                    lightest = found;
                }
                high = bytes;
                if bytes <= least {
                    break;
                }
                if low.is_none() {
                    // Whether anything fits at all, before what fits best is looked for.
                    let smallest = self.attempt(0, Effort::QUICK)?;
                    if self.excess(&smallest.plan) != (0, 0) {
                        if self.is_lighter(&smallest, &lightest) {
                            lightest = smallest;
                        }
                        break;
                    }
                    low = Some(smallest.selection.total.bytes);
                    best = Some(smallest);
                }
                kept.min(bytes).saturating_sub(excess.0.max(excess.1)).max(least)
            };
            let floor = low.unwrap_or(least);
            if high.saturating_sub(floor) <= self.blocks.saved_bytes() / WORTHWHILE && low.is_some() {
                break;
            }
            kept = match next {
                next if next >= high || low.is_some_and(|low| next <= low) => floor + (high - floor) / 2,
                next => next,
            };
        }
        self.done(improved(best.unwrap_or(lightest))?, reason)
    }

    /// Of two choices that do not fit.
    fn is_lighter(&self, a: &Found, b: &Found) -> bool {
        let size = |found: &Found| (self.excess(&found.plan).0, found.plan.arena_bytes());
        size(a) < size(b)
    }

    fn finish(mut self, kept_bytes: u64, reason: Reason) -> Result<Fit, FitError> {
        let found = self.attempt(kept_bytes, Effort::default())?;
        self.done(found, reason)
    }

    fn done(self, Found { selection, plan }: Found, reason: Reason) -> Result<Fit, FitError> {
        let plan = match plan {
            Planned::Placed(plan) => plan,
            Planned::TooLarge(draft) => draft.place(Effort::default())?,
        };
        let routines = &plan.step().routines;
        let train = routines.iter().position(|routine| routine.name == TRAIN);
        let lower_tier_excess = plan.lower_tier_bytes().saturating_sub(self.limits.lower_tier_bytes);
        Ok(Fit {
            fits: plan.arena_bytes() <= self.limits.arena_bytes && lower_tier_excess == 0,
            lower_tier_excess,
            prediction: train.map_or_else(Prediction::default, |train| plan.predict(train, self.target)),
            choice: self.choice(&selection),
            explanation: self.explain(&selection, plan.step(), reason),
            rounds: self.rounds,
            plan,
        })
    }

    fn explain(&self, selection: &Selection, step: &Step, reason: Reason) -> Explanation {
        let (step_seconds, recompute_seconds) = seconds(step, self.target);
        let assignment = self.assignment(selection);
        let classes = self.blocks.classes.iter().zip(&self.menus).zip(assignment);
        let classes = classes.map(|((class, menu), assignment)| ClassChoice {
            blocks: class.blocks.len(),
            saved_bytes: class.saved_bytes(),
            ways: assignment
                .chunk_by(|a, b| a == b)
                .scan(0, |at, run| {
                    let blocks = &class.blocks[*at..*at + run.len()];
                    *at += run.len();
                    Some(WayChoice::new(class, &self.done_as(class, &menu[run[0]]), blocks))
                })
                .collect(),
        });
        let classes: Vec<ClassChoice> = classes.collect();
        let ways = classes.iter().flat_map(|class| &class.ways);
        let kept_bytes = ways.map(|way| way.kept_bytes * way.blocks.len() as u64).sum();
        Explanation {
            reason,
            saved_bytes: self.blocks.saved_bytes(),
            kept_bytes,
            step_seconds,
            recompute_seconds,
            gap: match selection.total.seconds {
                chosen if chosen > 0.0 => recompute_seconds / step_seconds * (1.0 - selection.bound / chosen).max(0.0),
                _ => 0.0,
            },
            classes,
        }
    }

    /// A way with what leaves memory beyond what was chosen to.
    fn done_as(&self, class: &Class, way: &Way) -> Way {
        let mut way = way.clone();
        if self.tiers.activations == Activations::Leave {
            way.offloaded = large_results(class, &way);
            let bytes = |&(part, output): &(usize, usize)| -> u64 {
                let saved = class.parts[part].saved.iter();
                saved.filter(|saved| saved.0 == output).map(|saved| saved.1).sum()
            };
            way.resident_bytes -= way.offloaded.iter().map(bytes).sum::<u64>();
        }
        way
    }
}

/// A plan placed with more effort.
fn improved(mut found: Found) -> Result<Found, PlanError> {
    if let Planned::Placed(plan) = &mut found.plan {
        plan.improve(Effort::default())?;
    }
    Ok(found)
}

/// Predicted time of a training step's kernels without recomputing, and of recomputing.
pub(crate) fn seconds(step: &Step, target: &dyn Target) -> (f64, f64) {
    let (mut plain, mut again) = (0.0, 0.0);
    for program in step.routine(TRAIN).iter().flat_map(|train| &train.programs) {
        for node in &program.graph.nodes {
            let (operands, results) = (program.graph.operand_types(node), program.graph.result_types(node));
            let seconds = target.seconds(&node.op, &operands, &results) * f64::from(program.repeat);
            match node.phase {
                Phase::Recompute => again += seconds,
                _ => plain += seconds,
            }
        }
    }
    (plain, again)
}

/// What enters blocks and stays for their backward, as far as it is large enough to leave memory.
fn large_entries(blocks: &Blocks) -> Vec<(NodeId, usize)> {
    let large = blocks.entries.iter().filter(|entry| entry.bytes >= SMALLEST);
    large.map(|entry| (entry.node, entry.output)).collect()
}

/// Results that a way keeps, as far as they are large enough to leave memory.
fn large_results(class: &Class, way: &Way) -> Vec<(usize, usize)> {
    let kept = class
        .parts
        .iter()
        .enumerate()
        .filter(|(part, _)| !way.recomputed.contains(part));
    let results = kept.flat_map(|(part, saved)| saved.saved.iter().map(move |&(output, bytes)| (part, output, bytes)));
    let large = results.filter(|&(.., bytes)| bytes >= SMALLEST);
    large.map(|(part, output, _)| (part, output)).collect()
}
