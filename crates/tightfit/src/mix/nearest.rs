//! Where nothing fits: the nearest changes that would.

use serde::Serialize;
use tightfit_gpu::{Card, GpuTarget};
use tightfit_model::Known;

use super::device::Device;
use super::search::{self, Outcome};
use super::space::Space;
use crate::failure::Failure;
use crate::memory::format_bytes;
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
    let seq = space.plain()?.seq;
    for shorter in (1..=HALVINGS).map(|halving| seq >> halving).filter(|&seq| seq > 0) {
        if let Some(needed_bytes) = fits(&space.with_seq(shorter)?, subject) {
            let change = format!("--seq {shorter}");
            changes.push(Change { change, needed_bytes });
            break;
        }
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
    for known in smaller.into_iter().take(MODELS) {
        if let Some(needed_bytes) = Subject::known(known).ok().and_then(|subject| fits(space, &subject)) {
            let change = format!("a smaller model, such as {}", known.name);
            changes.push(Change { change, needed_bytes });
            break;
        }
    }
    let Device::Card(target) = device else {
        return Ok(changes);
    };
    let plan = &smallest.candidate.fit.plan;
    let needed_bytes = plan.arena_bytes().saturating_add(reserve_bytes);
    if plan.arena_bytes() <= limits.arena_bytes {
        let change = format!("{} of host memory", format_bytes(plan.lower_tier_bytes()));
        changes.push(Change { change, needed_bytes });
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
