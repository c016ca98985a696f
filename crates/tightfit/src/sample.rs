//! From logits to the next token.

use tightfit_exec::init::uniform;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f64,
    /// Only this many of the likeliest tokens; 0 takes all (Fan et al. 2018, arXiv:1805.04833).
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability (Holtzman et al. 2019, arXiv:1904.09751).
    pub top_p: f64,
    /// Decides every draw.
    pub seed: u64,
}

/// Chooses tokens; allocates once.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    /// Tokens and their weights, likeliest first where they are sorted.
    candidates: Vec<(u32, f64)>,
    drawn: u64,
}

impl Sampler {
    /// For a vocabulary of that size.
    pub fn new(sampling: Sampling, vocab_size: usize) -> Self {
        Self {
            sampling,
            candidates: Vec::with_capacity(vocab_size),
            drawn: 0,
        }
    }

    /// The next token, as transformers chooses it: temperature, then `top_k`, then `top_p`. The first of equals is the likeliest.
    pub fn next(&mut self, logits: &[f32]) -> u32 {
        let Sampling {
            temperature,
            top_k,
            top_p,
            seed,
        } = self.sampling;
        let best = likeliest(logits);
        if temperature == 0.0 {
            return best;
        }
        let max = f64::from(logits[best as usize]);
        let weight = |logit: f32| ((f64::from(logit) - max) / temperature).exp();
        self.candidates.clear();
        self.candidates.extend(
            logits
                .iter()
                .enumerate()
                .map(|(token, &logit)| (token as u32, weight(logit))),
        );
        let order = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, order);
            self.candidates.truncate(top_k);
        }
        if top_p < 1.0 {
            self.candidates.sort_unstable_by(order);
            let mut left = top_p * self.total();
            let reached = self.candidates.iter().position(|&(_, weight)| {
                left -= weight;
                left <= 0.0
            });
            self.candidates.truncate(reached.map_or(usize::MAX, |last| last + 1));
        }
        let mut left = uniform(seed, "generate", self.drawn) * self.total();
        self.drawn += 1;
        let drawn = self.candidates.iter().find(|(_, weight)| {
            left -= weight;
            left <= 0.0
        });
        // Rounding can leave a little of the draw behind the last one.
        drawn.or(self.candidates.last()).map_or(best, |(token, _)| *token)
    }

    fn total(&self) -> f64 {
        self.candidates.iter().map(|(_, weight)| weight).sum()
    }
}

/// The first of the largest logits.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, 2.0, -1.0];

    fn counts(sampling: Sampling) -> [u32; 5] {
        let mut sampler = Sampler::new(sampling, LOGITS.len());
        let mut counts = [0; 5];
        for _ in 0..20_000 {
            counts[sampler.next(&LOGITS) as usize] += 1;
        }
        counts
    }

    fn sampling(temperature: f64, top_k: usize, top_p: f64) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            seed: 3,
        }
    }

    #[test]
    fn zero_temperature_takes_the_first_of_the_likeliest() {
        assert_eq!(counts(sampling(0.0, 0, 1.0)), [0, 20_000, 0, 0, 0]);
    }

    #[test]
    fn frequencies_are_the_softmax() {
        let temperature = 0.7;
        let weights = LOGITS.map(|logit| (f64::from(logit) / temperature).exp());
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts(sampling(temperature, 0, 1.0)).into_iter().zip(weights) {
            let p = weight / total;
            // Five standard errors.
            let tolerance = 5.0 * (p * (1.0 - p) / 20_000.0).sqrt();
            assert!(
                (f64::from(count) / 20_000.0 - p).abs() < tolerance,
                "{count} of 20000 for {p}"
            );
        }
    }

    #[test]
    fn top_k_and_top_p_leave_the_unlikely_out() {
        let nonzero = |counts: [u32; 5]| counts.map(|count| count > 0);
        assert_eq!(nonzero(counts(sampling(1.0, 3, 1.0))), [false, true, true, true, false]);
        // The two likeliest have 0.79 of the probability.
        assert_eq!(
            nonzero(counts(sampling(1.0, 0, 0.75))),
            [false, true, false, true, false]
        );
        assert_eq!(
            nonzero(counts(sampling(1.0, 0, 0.85))),
            [false, true, true, true, false]
        );
        assert_eq!(
            nonzero(counts(sampling(1.0, 1, 1.0))),
            [false, true, false, false, false]
        );
    }

    #[test]
    fn the_seed_decides() {
        let draw = |seed| {
            let mut sampler = Sampler::new(
                Sampling {
                    seed,
                    ..sampling(1.0, 0, 1.0)
                },
                LOGITS.len(),
            );
            (0..50).map(|_| sampler.next(&LOGITS)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
