//! Bytes against time: the mixes of smaller budgets, for the figure that shows what less memory would cost.

use super::device::{Device, Reserve};
use super::search::{Tried, search};
use super::space::Space;
use crate::failure::Failure;
use crate::subject::Subject;

/// Parts of what the chosen mix needs that are searched for as well, in percent.
const PARTS: [u64; 4] = [70, 50, 35, 25];

/// Every mix that is planned within parts of `needed_bytes`; whether each fits is told of the whole budget.
///
/// # Errors
/// What is fixed cannot be.
pub fn front(
    space: &Space,
    subject: &Subject<'_>,
    device: &Device,
    reserve: &Reserve,
    lower_tier_bytes: u64,
    needed_bytes: u64,
) -> Result<Vec<Tried>, Failure> {
    let mut all = Vec::new();
    for part in PARTS {
        let budget = needed_bytes / 100 * part;
        let smaller = space.with_budget(budget)?;
        let limits = device.limits(budget, reserve, lower_tier_bytes);
        let outcome = search(&smaller, subject, device, &limits)?;
        all.extend(outcome.tried_beside(reserve.bytes()).into_iter().map(|tried| Tried {
            fits: tried.needed_bytes <= space.budget() && tried.host_bytes <= lower_tier_bytes,
            ..tried
        }));
        if outcome.fastest_seconds.is_none() {
            break;
        }
    }
    Ok(all)
}
