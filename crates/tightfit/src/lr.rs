//! The learning rate as a function of the step.

use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine from the peak to the minimum (Loshchilov & Hutter, "SGDR", arXiv:1608.03983, without restarts).
    Cosine,
    /// A straight line from the peak to the minimum.
    Linear,
    /// The peak throughout.
    Constant,
}

/// A decay's name that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown learning rate decay `{0}`: use cosine, linear or constant")]
pub struct UnknownDecay(String);

impl FromStr for Decay {
    type Err = UnknownDecay;

    fn from_str(name: &str) -> Result<Self, UnknownDecay> {
        match name {
            "cosine" => Ok(Self::Cosine),
            "linear" => Ok(Self::Linear),
            "constant" => Ok(Self::Constant),
            _ => Err(UnknownDecay(name.to_owned())),
        }
    }
}

impl fmt::Display for Decay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cosine => "cosine",
            Self::Linear => "linear",
            Self::Constant => "constant",
        })
    }
}

/// Linear warm-up to a peak, then a decay to a fraction of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The highest learning rate, reached at step `warmup_steps`.
    pub peak: f64,
    /// Steps before the peak; 0 starts at the peak.
    pub warmup_steps: u64,
    /// Steps of the run, the warm-up included.
    pub total_steps: u64,
    /// How it falls from step `warmup_steps` to step `total_steps`.
    pub decay: Decay,
    /// The learning rate at step `total_steps` and after, as a fraction of the peak (not used by [`Decay::Constant`]).
    pub min_ratio: f64,
}

impl Schedule {
    /// The learning rate of `step`, counted from 0.
    ///
    /// During the warm-up it is `peak · (step + 1) / (warmup_steps + 1)`: no step is spent at a rate of 0. A run shorter
    /// than its warm-up ends on the ramp.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step as f64 + 1.0) / (self.warmup_steps as f64 + 1.0);
        }
        let progress = if step >= self.total_steps {
            1.0
        } else {
            (step - self.warmup_steps) as f64 / (self.total_steps - self.warmup_steps) as f64
        };
        let height = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            Decay::Linear => 1.0 - progress,
            Decay::Constant => return self.peak,
        };
        self.peak * (self.min_ratio + (1.0 - self.min_ratio) * height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay, warmup_steps: u64, total_steps: u64) -> Schedule {
        Schedule {
            peak: 2e-3,
            warmup_steps,
            total_steps,
            decay,
            min_ratio: 0.1,
        }
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-12
    }

    #[test]
    fn ends_and_middle() {
        for decay in [Decay::Cosine, Decay::Linear] {
            let s = schedule(decay, 9, 109);
            assert!(close(s.lr(0), 2e-4));
            assert!(close(s.lr(8), 1.8e-3));
            assert!(close(s.lr(9), 2e-3));
            assert!(close(s.lr(59), 1.1e-3), "halfway between peak and minimum");
            assert!(
                s.lr(108) > 2e-4 && s.lr(108) < 2.2e-4,
                "the last step is still above the minimum"
            );
            assert!(close(s.lr(109), 2e-4) && close(s.lr(u64::MAX), 2e-4));
        }
        let s = schedule(Decay::Constant, 9, 109);
        assert!(close(s.lr(9), 2e-3) && close(s.lr(108), 2e-3) && close(s.lr(1000), 2e-3));
        let quarter = schedule(Decay::Cosine, 0, 100).lr(25) / 2e-3;
        assert!(close(
            quarter,
            0.1 + 0.9 * 0.5 * (1.0 + std::f64::consts::FRAC_1_SQRT_2)
        ));
    }

    #[test]
    fn rises_through_the_warmup_then_falls_without_a_jump() {
        for decay in [Decay::Cosine, Decay::Linear, Decay::Constant] {
            let s = schedule(decay, 10, 210);
            for step in 0..300 {
                let change = s.lr(step + 1) - s.lr(step);
                if step < 10 {
                    assert!(close(change, 2e-3 / 11.0), "step {step}");
                } else {
                    // The steepest fall of a half cosine is π/2 times that of the line.
                    assert!(
                        change <= 0.0 && change > -2e-3 * PI / 2.0 / 200.0,
                        "step {step}: {change}"
                    );
                }
            }
        }
    }

    #[test]
    fn without_warmup_the_first_step_is_the_peak() {
        for decay in [Decay::Cosine, Decay::Linear, Decay::Constant] {
            assert!(close(schedule(decay, 0, 100).lr(0), 2e-3));
            assert!(close(schedule(decay, 0, 1).lr(0), 2e-3));
        }
    }

    #[test]
    fn a_run_shorter_than_its_warmup_ends_on_the_ramp() {
        let s = schedule(Decay::Cosine, 100, 10);
        assert!(close(s.lr(9), 2e-3 * 10.0 / 101.0));
        assert!(close(s.lr(99), 2e-3 * 100.0 / 101.0));
        assert!(close(s.lr(100), 2e-4));
    }

    #[test]
    fn names_parse_and_print() {
        for decay in [Decay::Cosine, Decay::Linear, Decay::Constant] {
            assert_eq!(decay.to_string().parse(), Ok(decay));
        }
        let error = "step".parse::<Decay>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown learning rate decay `step`: use cosine, linear or constant"
        );
    }
}
