//! Where nothing fits: the nearest changes that would.

use serde::Serialize;
use tightfit_gpu::{Card, GpuTarget};
use tightfit_model::Known;

use super::device::Device;
use super::search::{self, Outcome};
use super::space::Space;
use crate::failure::Failure;
use crate::memory::format_bytes;
use crate::settings::SettingsError;
use crate::subject::Subject;
use tightfit_search::Limits;

/// How often the sequence is halved, at most.
const HALVINGS: u32 = 5;

/// Smaller models that are tried, at most.
const MODELS: usize = 4;

/// A change with which the job fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// In words.
    pub change: String,
    /// Bytes that the device then needs, its reserve included.
    pub needed_bytes: u64,
}

/// Of changes from the smallest to the largest, the first that fits, and what it then needs. Where the last does not, none does.
fn first<N: Copy, T>(changes: &[(N, T)], fits: impl Fn(&T) -> Option<u64>) -> Option<(N, u64)> {
    let ((last, largest), smaller) = changes.split_last()?;
    let needed = fits(largest)?;
    let found = smaller.iter().find_map(|(name, change)| Some((*name, fits(change)?)));
    Some(found.unwrap_or((*last, needed)))
}

/// The longest sequence, the largest model and the smallest card that would do, as far as there are such.
///
/// # Errors
/// What is fixed cannot be.
pub fn nearest(
    space: &Space,
    subject: &Subject<'_>,
    device: &Device,
    limits: &Limits,
    reserve_bytes: u64,
    smallest: &Outcome,
) -> Result<Vec<Change>, Failure> {
    let fits_on = |space: &Space, subject: &Subject<'_>, device: &Device, limits: &Limits| -> Option<u64> {
        let plan = search::smallest(space, subject, device, limits).ok()?.fit.plan;
        let fits = plan.arena_bytes() <= limits.arena_bytes && plan.lower_tier_bytes() <= limits.lower_tier_bytes;
        fits.then_some(plan.arena_bytes())
    };
    let fits = |space: &Space, subject: &Subject<'_>| -> Option<u64> {
        fits_on(space, subject, device, limits).map(|arena| arena.saturating_add(reserve_bytes))
    };
    let mut changes = Vec::new();
    let plan = &smallest.candidate.fit.plan;
    let needed_bytes = plan.arena_bytes().saturating_add(reserve_bytes);
    let is_of_budget = needed_bytes <= device.memory_bytes()?.max(space.budget())
        && plan.lower_tier_bytes() <= limits.lower_tier_bytes
        && plan.arena_bytes() > limits.arena_bytes;
    if is_of_budget {
        let change = format!("--budget {needed_bytes}");
        changes.push(Change { change, needed_bytes });
    }
    let seq = space.plain()?.seq;
    let shorter = (1..=HALVINGS).map(|halving| seq >> halving).filter(|&seq| seq > 0);
    let shorter = shorter.map(|seq| Ok((seq, space.with_seq(seq)?)));
    let shorter: Vec<(u64, Space)> = shorter.collect::<Result<_, SettingsError>>()?;
    if let Some((seq, needed_bytes)) = first(&shorter, |space| fits(space, subject)) {
        let change = format!("--seq {seq}");
        changes.push(Change { change, needed_bytes });
    }
    let parameters = subject.config.parameters();
    let mut smaller: Vec<&Known> = Known::all()
        .iter()
        .filter(|known| known.parameters < parameters)
        .collect();
    smaller.sort_by_key(|known| u64::MAX - known.parameters);
    smaller.dedup_by_key(|known| known.parameters);
    // A few of them, each about half as large as the one before.
    let mut last = parameters;
    smaller.retain(|known| {
        let is_next = known.parameters <= last / 2;
        if is_next {
            last = known.parameters;
        }
        is_next
    });
    let smaller: Vec<(&str, &Known)> = smaller
        .into_iter()
        .take(MODELS)
        .map(|known| (&*known.name, known))
        .collect();
    let fits_known = |known: &&Known| Subject::known(known).ok().and_then(|subject| fits(space, &subject));
    if let Some((name, needed_bytes)) = first(&smaller, fits_known) {
        let change = format!("a smaller model, such as {name}");
        changes.push(Change { change, needed_bytes });
    }
    let Device::Card(target) = device else {
        return Ok(changes);
    };
    if plan.arena_bytes() <= limits.arena_bytes {
        let change = format!("{} of host memory", format_bytes(plan.lower_tier_bytes()));
        changes.push(Change { change, needed_bytes });
    }
    if is_of_budget {
        return Ok(changes);
    }
    let mut larger: Vec<&Card> = Card::all()
        .iter()
        .filter(|card| card.memory_mib > target.card().memory_mib)
        .collect();
    larger.sort_by_key(|card| card.memory_mib);
    // One of each size.
    larger.dedup_by_key(|card| card.memory_mib.next_multiple_of(4 << 10));
    for card in larger {
        let device = Device::Card(GpuTarget::new(card));
        let reserve = device.reserve(true)?;
        let limits = device.limits(card.memory_bytes(), &reserve, limits.lower_tier_bytes);
        if let Some(arena) = fits_on(space, subject, &device, &limits) {
            changes.push(Change {
                change: format!(
                    "a larger card, such as {} ({})",
                    card.name,
                    format_bytes(card.memory_bytes())
                ),
                needed_bytes: arena.saturating_add(reserve.bytes()),
            });
            break;
        }
    }
    Ok(changes)
}
