//! A mix as flags, so that it can be asked for.

use crate::settings::{Count, Settings};

/// What of a job a search chooses, as flags: how numbers are stored and what is trained; and how a step is cut, and what leaves memory.
pub fn flags(settings: &Settings) -> [String; 2] {
    let method = settings.method;
    let mut numbers = format!("--method {} --precision {}", method.name(), settings.precision);
    if method.has_adapters() {
        numbers += &format!(" --base {}", settings.base);
    }
    numbers += &format!(" --optimizer {}", settings.optimizer);
    let mut cut = format!("--micro-batch {}", settings.micro_batch_rows());
    if settings.update_in_backward {
        cut += " --update-in-backward";
    }
    if let Count::Of(tokens) = settings.loss_chunk {
        cut += &format!(" --loss-chunk {tokens}");
    }
    if let Some(tokens) = settings.mlp_tile.0 {
        cut += &format!(" --mlp-tile {tokens}");
    }
    cut += &format!(" --recompute {} --offload {}", settings.recompute, settings.offload);
    [numbers, cut]
}
