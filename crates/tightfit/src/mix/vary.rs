//! One setting varied, and the mix of each of its values: a curve of peak and time.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::device::{Device, Reserve};
use super::search::search;
use super::space::Space;
use crate::failure::Failure;
use crate::memory::{format_bytes, parse_bytes};
use crate::subject::Subject;

/// What is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Key {
    /// Tokens of a sequence.
    Seq,
    /// Sequences of a step.
    Batch,
    /// What the process may use of the device's memory.
    Budget,
}

/// `seq=512..8192`: from the first value by doubling, and the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vary {
    /// What.
    pub key: Key,
    /// Its values, rising.
    pub values: Vec<u64>,
}

const EXPECTED: &str = "expected seq=FROM..TO, batch=FROM..TO or budget=FROM..TO, such as seq=512..8192";

impl FromStr for Vary {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (key, range) = text.split_once('=').ok_or(EXPECTED)?;
        let (from, to) = range.split_once("..").ok_or(EXPECTED)?;
        let key = match key {
            "seq" => Key::Seq,
            "batch" => Key::Batch,
            "budget" => Key::Budget,
            _ => return Err(EXPECTED.to_owned()),
        };
        let number = |text: &str| match key {
            Key::Budget => parse_bytes(text).map_err(|error| error.to_string()),
            Key::Seq | Key::Batch => text.parse().map_err(|_| EXPECTED.to_owned()),
        };
        let (from, to) = (number(from)?, number(to)?);
        if from == 0 || from > to {
            return Err(format!("{EXPECTED}: from 1 on, and not falling"));
        }
        let doubled = std::iter::successors(Some(from), |value| value.checked_mul(2));
        let mut values: Vec<u64> = doubled.take_while(|&value| value < to).collect();
        values.push(to);
        Ok(Self { key, values })
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Seq => "seq",
            Self::Batch => "batch",
            Self::Budget => "budget",
        })
    }
}

/// The mix of one value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The value.
    pub value: u64,
    /// Whether the mix fits.
    pub fits: bool,
    /// What it needs of the device's memory, the reserve included.
    pub needed_bytes: u64,
    /// What it needs beyond that.
    pub host_bytes: u64,
    /// Expected of a step.
    pub seconds_per_step: f64,
    /// From that.
    pub tokens_per_second: f64,
    /// Method, precision, optimizer and micro-batch.
    pub mix: String,
}

/// A curve.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// What was varied.
    pub key: Key,
    /// By value.
    pub points: Vec<Point>,
}

/// Plans each value.
///
/// # Errors
/// A value that no job can have.
pub fn curve(
    vary: &Vary,
    space: &Space,
    subject: &Subject<'_>,
    device: &Device,
    reserve: &Reserve,
    lower_tier_bytes: u64,
) -> Result<Curve, Failure> {
    let with = |value: u64| match vary.key {
        Key::Seq => space.with_seq(value),
        Key::Batch => space.with_batch(value),
        Key::Budget => space.with_budget(value),
    };
    // Whatever is wrong with a value is said before any is planned.
    vary.values.iter().try_for_each(|&value| with(value).map(|_| ()))?;
    let point = |&value: &u64| -> Result<Point, Failure> {
        let space = with(value)?;
        let limits = device.limits(space.budget(), reserve, lower_tier_bytes);
        let outcome = search(&space, subject, device, &limits)?;
        let candidate = &outcome.candidate;
        let (settings, plan) = (&candidate.settings, &candidate.fit.plan);
        let tokens = settings.batch.saturating_mul(settings.seq) as f64;
        Ok(Point {
            value,
            fits: outcome.fastest_seconds.is_some(),
            needed_bytes: plan.arena_bytes().saturating_add(reserve.bytes()),
            host_bytes: plan.lower_tier_bytes(),
            seconds_per_step: candidate.seconds(),
            tokens_per_second: tokens / candidate.seconds(),
            mix: candidate.to_string(),
        })
    };
    Ok(Curve {
        key: vary.key,
        points: vary.values.iter().map(point).collect::<Result<_, _>>()?,
    })
}

impl Curve {
    /// A table for people.
    pub fn lines(&self) -> Vec<String> {
        let header = format!(
            "{:<11}{:>12}  {:>12}  {:>12}  {:>10}  mix",
            self.key.to_string(),
            "device",
            "beyond it",
            "s/step",
            "tokens/s"
        );
        let rows = self.points.iter().map(|point| {
            let value = match self.key {
                Key::Budget => format_bytes(point.value),
                Key::Seq | Key::Batch => point.value.to_string(),
            };
            let needed = format_bytes(point.needed_bytes);
            let verdict = if point.fits { "" } else { "does not fit: " };
            format!(
                "{value:<11}{needed:>12}  {:>12}  {:>12.3}  {:>10.0}  {verdict}{}",
                format_bytes(point.host_bytes),
                point.seconds_per_step,
                point.tokens_per_second,
                point.mix
            )
        });
        [header].into_iter().chain(rows).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_double_and_end_where_they_say() {
        let values = |text: &str| text.parse::<Vary>().map(|vary| vary.values);
        assert_eq!(values("seq=512..8192"), Ok(vec![512, 1024, 2048, 4096, 8192]));
        assert_eq!(values("batch=3..10"), Ok(vec![3, 6, 10]));
        assert_eq!(values("budget=1GiB..2GiB"), Ok(vec![1 << 30, 2 << 30]));
        for wrong in [
            "seq",
            "seq=1",
            "seq=0..4",
            "seq=8..4",
            "rank=1..2",
            "seq=a..b",
            "budget=1apple..2",
        ] {
            assert!(values(wrong).is_err(), "{wrong}");
        }
    }
}
