//! What a search may choose, beside what the user has fixed.

use crate::settings::{
    AskedMethod, Base, Count, Method, MlpTile, Offload, Optimizer, Precision, Recompute, Request, Settings,
    SettingsError,
};

/// How numbers are stored, and what is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// What is trained.
    pub method: Method,
    /// Of activations and trained weights.
    pub precision: Precision,
    /// Of weights that are not trained.
    pub base: Base,
    /// What updates them.
    pub optimizer: Optimizer,
}

/// What a mix does to the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fidelity {
    /// All in `f32`.
    Exact,
    /// Activations in 16 bits, trained weights and their state in 32.
    Mixed,
    /// So many of weights, state and base in fewer bits.
    Lossy(u8),
}

impl Fidelity {
    /// As reports call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Mixed => "mixed",
            Self::Lossy(_) => "lossy",
        }
    }
}

impl Numbers {
    /// From what changes a result least to what changes it most: exact before mixed before lossy, and before that full before LoRA before
    /// QLoRA.
    pub fn rank(&self) -> (u8, Fidelity) {
        let method = match self.method {
            Method::Full => 0,
            Method::Lora => 1,
            Method::Qlora => 2,
        };
        (method, self.fidelity())
    }

    /// Of the numbers alone.
    pub fn fidelity(&self) -> Fidelity {
        let lossy = [
            self.precision == Precision::Bf16,
            self.optimizer != Optimizer::AdamW,
            self.method == Method::Lora && matches!(self.base, Base::Quantised(_)),
        ];
        match lossy.into_iter().filter(|&is| is).count() {
            0 if self.precision == Precision::F32 => Fidelity::Exact,
            0 => Fidelity::Mixed,
            parts => Fidelity::Lossy(parts as u8),
        }
    }
}

/// How a step is cut: nothing of it changes a result but for rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Whether weights are updated inside of the backward.
    pub update_in_backward: bool,
    /// Sequences in memory at one time.
    pub micro_batch: u64,
    /// Tokens whose logits exist at one time, where that is not what is usual.
    pub loss_chunk: Option<u64>,
    /// Whether MLPs go through their tokens in parts.
    pub mlp_tiles: bool,
}

/// Parts in which MLPs go through their tokens, where they do.
pub const MLP_TILES: u64 = 8;

/// Logits of so few tokens are tried where nothing else fits.
const SMALL_CHUNK: u64 = 128;

/// Most micro-batches that are tried by themselves, halving or so from one to the next.
const MOST_CUTS: usize = 5;

/// What is open of a job.
#[derive(Clone, Debug)]
pub struct Space {
    request: Request,
    budget: u64,
    batch: u64,
    has_bf16: bool,
}

impl Space {
    /// Of what a request leaves open. `has_bf16` says whether the device computes with such numbers.
    ///
    /// # Errors
    /// What is fixed cannot be.
    pub fn new(request: Request, budget: u64, has_bf16: bool) -> Result<Self, SettingsError> {
        let mut space = Self {
            request,
            budget,
            batch: 1,
            has_bf16,
        };
        // Whatever is wrong with what is fixed is wrong with all of it.
        space.batch = space.plain()?.batch;
        Ok(space)
    }

    /// What the process may use of the device's memory.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// The same with sequences of another length.
    ///
    /// # Errors
    /// What is fixed cannot be.
    pub fn with_seq(&self, seq: u64) -> Result<Self, SettingsError> {
        let request = Request {
            seq: Some(seq),
            ..self.request.clone()
        };
        Self::new(request, self.budget, self.has_bf16)
    }

    /// The same with so many sequences.
    ///
    /// # Errors
    /// As [`with_seq`](Self::with_seq).
    pub fn with_batch(&self, batch: u64) -> Result<Self, SettingsError> {
        let request = Request {
            batch: Some(batch),
            ..self.request.clone()
        };
        Self::new(request, self.budget, self.has_bf16)
    }

    /// The same within another budget.
    ///
    /// # Errors
    /// As [`with_seq`](Self::with_seq).
    pub fn with_budget(&self, budget: u64) -> Result<Self, SettingsError> {
        let mut request = self.request.clone();
        request.budget = None;
        Self::new(request, budget, self.has_bf16)
    }

    /// The job without any technique but those that are fixed.
    ///
    /// # Errors
    /// What is fixed cannot be.
    pub fn plain(&self) -> Result<Settings, SettingsError> {
        let mut request = self.request.clone();
        request.recompute.get_or_insert(Recompute::None);
        request.offload.get_or_insert(Offload::None);
        let mut settings = request.resolve_to_plan(self.budget)?;
        if self.request.loss_chunk.is_none() {
            settings.loss_chunk = Count::Of(settings.micro_batch_shape().tokens());
        }
        Ok(settings)
    }

    /// Every way to store numbers that is open, from what changes a result least.
    pub fn numbers(&self) -> Vec<Numbers> {
        let request = &self.request;
        let given = |method: Method| match request.method {
            Some(AskedMethod::Of(given)) => given == method,
            Some(AskedMethod::Auto) | None => true,
        };
        let mut all = Vec::new();
        for method in [Method::Full, Method::Lora, Method::Qlora]
            .into_iter()
            .filter(|&method| given(method))
        {
            for precision in self.precisions() {
                for &base in self.bases(method) {
                    for optimizer in self.optimizers(method) {
                        let numbers = Numbers {
                            method,
                            precision,
                            base,
                            optimizer,
                        };
                        // What is fixed beside may not go with it.
                        if self.settings(&numbers, None, Offload::None).is_ok() {
                            all.push(numbers);
                        }
                    }
                }
            }
        }
        all.sort_by_key(Numbers::rank);
        all
    }

    fn precisions(&self) -> Vec<Precision> {
        match (self.request.precision, self.has_bf16) {
            (Some(given), _) => vec![given],
            (None, true) => vec![Precision::F32, Precision::Bf16Mixed, Precision::Bf16],
            (None, false) => vec![Precision::F32, Precision::F16Mixed],
        }
    }

    fn bases(&self, method: Method) -> &[Base] {
        match (&self.request.base, method) {
            (Some(given), _) => std::slice::from_ref(given),
            (None, Method::Full | Method::Qlora) => &[Base::Auto],
            (None, Method::Lora) => &[Base::Auto, Base::Quantised(tightfit_ir::Block::Int8)],
        }
    }

    fn optimizers(&self, method: Method) -> Vec<Optimizer> {
        match (self.request.optimizer, method) {
            (Some(given), _) => vec![given],
            (None, Method::Full) => vec![Optimizer::AdamW, Optimizer::AdamW8bit, Optimizer::Adafactor],
            (None, Method::Lora | Method::Qlora) => vec![Optimizer::AdamW, Optimizer::AdamW8bit],
        }
    }

    /// Every cut that is open, in stages: those of each take less memory and more time than those of the stage before, and are for what
    /// does not fit otherwise. Within a stage the first take least time.
    pub fn cuts(&self) -> Vec<Vec<Cut>> {
        let whole = self.whole_cuts();
        let with = |loss_chunk: Option<u64>, mlp_tiles: bool| -> Vec<Cut> {
            let cut = |cut: &Cut| Cut {
                loss_chunk,
                mlp_tiles,
                ..*cut
            };
            whole.iter().map(cut).collect()
        };
        let small_chunk = self.request.loss_chunk.is_none().then_some(SMALL_CHUNK);
        let mut stages = vec![with(None, false)];
        if small_chunk.is_some() {
            stages.push(with(small_chunk, false));
        }
        if self.request.mlp_tile.is_none() {
            stages.push(with(small_chunk, true));
        }
        stages
    }

    fn whole_cuts(&self) -> Vec<Cut> {
        let micro_batches = match self.request.micro_batch {
            Some(Count::Of(rows)) => vec![rows],
            Some(Count::Auto) | None => halves(self.batch),
        };
        let mut cuts = Vec::new();
        for micro_batch in micro_batches {
            for update_in_backward in [false, true] {
                let given = self.request.update_in_backward;
                let is_open = given.is_none_or(|given| given == update_in_backward);
                // Gradients that never meet cannot be summed.
                if is_open && !(update_in_backward && micro_batch < self.batch) {
                    cuts.push(Cut {
                        update_in_backward,
                        micro_batch,
                        loss_chunk: None,
                        mlp_tiles: false,
                    });
                }
            }
        }
        cuts
    }

    /// What may leave memory.
    pub fn offload(&self) -> Offload {
        self.request.offload.unwrap_or(Offload::Auto)
    }

    /// The settings of a mix; without a cut, of the largest micro-batch.
    ///
    /// # Errors
    /// What is fixed does not go with it.
    pub fn settings(&self, numbers: &Numbers, cut: Option<Cut>, offload: Offload) -> Result<Settings, SettingsError> {
        let mut request = self.request.clone();
        request.method = Some(numbers.method.into());
        request.precision = Some(numbers.precision);
        request.base = Some(numbers.base);
        request.optimizer = Some(numbers.optimizer);
        request.offload = Some(offload);
        if let Some(cut) = cut {
            request.micro_batch = Some(Count::Of(cut.micro_batch));
            request.update_in_backward = Some(cut.update_in_backward);
            request.loss_chunk = cut.loss_chunk.map(Count::Of).or(request.loss_chunk);
            if cut.mlp_tiles {
                let seq = request.clone().resolve_to_plan(self.budget)?.seq;
                request.mlp_tile = Some(MlpTile(Some((cut.micro_batch * seq).div_ceil(MLP_TILES))));
            }
        }
        request.resolve_to_plan(self.budget)
    }
}

/// A batch and what is left of it as it is cut to about a half, again and again; the last is one sequence.
fn halves(batch: u64) -> Vec<u64> {
    let divisors = (1..=batch.isqrt()).filter(|n| batch.is_multiple_of(*n));
    let mut divisors: Vec<u64> = divisors.flat_map(|n| [n, batch / n]).collect();
    divisors.sort_unstable_by_key(|n| u64::MAX - n);
    divisors.dedup();
    let mut kept: Vec<u64> = Vec::new();
    for n in divisors {
        if kept.last().is_none_or(|last| n * 2 <= *last) && kept.len() + 1 < MOST_CUTS || n == 1 && batch > 1 {
            kept.push(n);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_halved_and_end_with_one() {
        assert_eq!(halves(1), [1]);
        assert_eq!(halves(8), [8, 4, 2, 1]);
        assert_eq!(halves(12), [12, 6, 3, 1]);
        assert_eq!(halves(7), [7, 1]);
        assert_eq!(halves(256), [256, 128, 64, 32, 1]);
    }
}
