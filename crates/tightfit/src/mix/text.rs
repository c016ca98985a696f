//! The answer in words and bars.

use std::fmt::Write;

use super::levers::{FOLKLORE, Kind, Levers};
use super::report::PlanReport;
use super::vary::Curve;
use super::why;
use crate::Role;
use crate::memory::format_bytes;
use crate::techniques::saved;

/// Columns of the bar.
const BAR: usize = 60;

impl PlanReport {
    /// For people.
    pub fn text(&self) -> String {
        let mut lines = vec![self.verdict()];
        for change in &self.nearest {
            let needed = format_bytes(change.needed_bytes);
            lines.push(format!("         it fits with {}: {needed}", change.change));
        }
        if !self.fits {
            let peak = &self.plan.peak;
            lines.push(format!("peak     in {}/{}, {}", peak.routine, peak.program, peak.op));
        }
        lines.push(format!("model    {}", self.job()));
        lines.extend(self.bars());
        lines.extend(self.mix_lines());
        lines.extend(levers(&self.levers));
        lines.extend(self.curves.iter().flat_map(Curve::lines));
        if let Some((what, buffers)) = self.words.why.as_ref().zip(self.why.as_ref()) {
            lines.extend(why::lines(what, buffers));
        }
        if self.words.is_card {
            lines.push(
                "note     for tightfit's own backend on that card: it says nothing of what PyTorch would need"
                    .to_owned(),
            );
        }
        let (mixes, seconds) = (self.tried.len(), self.planning_seconds);
        lines.push(format!("planned  {mixes} mixes in {seconds:.2} s"));
        lines.join("\n")
    }

    /// Whether it fits, and with how much.
    pub fn verdict(&self) -> String {
        let needed = format_bytes(self.minimum_budget_bytes);
        let (budget, device) = (format_bytes(self.budget_bytes), &self.device);
        let (beyond, tier) = (format_bytes(self.host_bytes), self.words.lower_tier);
        match (self.fits, self.host_bytes) {
            (true, 0) => format!("fits     {needed} of {budget} on {device}, resident"),
            (true, _) => format!("fits     {needed} of {budget} on {device}, streamed: {beyond} in {tier}"),
            (false, 0) => {
                format!("does not fit: the smallest mix that was found needs {needed} of {device}, which has {budget}")
            }
            (false, _) => format!(
                "does not fit: the smallest mix that was found needs {needed} of {device}, which has {budget}, and {beyond} of \
                 {tier}, of which there are {}",
                format_bytes(self.words.lower_tier_bytes)
            ),
        }
    }

    /// What is trained on what.
    pub fn job(&self) -> String {
        format!(
            "{:.2} M parameters; {} × {} tokens a step",
            self.parameters as f64 / 1e6,
            self.words.batch,
            self.words.seq
        )
    }

    /// What was chosen, and how long it takes.
    pub fn mix_lines(&self) -> Vec<String> {
        let [numbers, cut] = &self.words.flags;
        let mut lines = vec![
            format!("mix      {numbers} ({})", self.fidelity),
            format!("         {cut}"),
        ];
        saved(&self.words.explanation, &mut lines);
        let speeds = match (self.words.is_card, self.words.seconds_are_measured) {
            (true, _) => "by data sheets",
            (false, true) => "by the speeds of this machine",
            (false, false) => "by assumed speeds: `tightfit calibrate` measures this machine",
        };
        lines.push(format!(
            "time     {:.3} s a step, {:.0} tokens/s, {speeds}",
            self.seconds_per_step, self.tokens_per_second
        ));
        if let Some(fastest) = self
            .fastest_seconds_per_step
            .filter(|&fastest| fastest < self.seconds_per_step)
        {
            lines.push(format!(
                "         the fastest mix that fits takes {fastest:.3} s; this one changes results less"
            ));
        }
        lines
    }

    /// What the device's bytes are for, each a part of one bar.
    fn bars(&self) -> Vec<String> {
        let placed: u64 = self.by_role.iter().map(|(_, bytes)| bytes).sum();
        let roles = self.by_role.iter().map(|(role, bytes)| (role.to_string(), *bytes));
        let gaps = (
            "gaps between buffers".to_owned(),
            self.arena_bytes.saturating_sub(placed),
        );
        let reserve = self.reserve.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes));
        let needed = self.minimum_budget_bytes;
        let free = (FREE.to_owned(), self.budget_bytes.saturating_sub(needed));
        let parts = roles
            .chain([gaps])
            .chain(reserve)
            .chain([free])
            .filter(|(_, bytes)| *bytes > 0);
        let whole = needed.max(self.budget_bytes).max(1);
        let column = |bytes: u64| (bytes as f64 / whole as f64 * BAR as f64).round() as usize;
        let mut from = 0_u64;
        let lines = parts.map(|(name, bytes)| {
            let (start, end) = (column(from), column(from + bytes));
            from += bytes;
            let mark = if name == FREE { "░" } else { "█" };
            let bar = format!("{}{}", " ".repeat(start), mark.repeat((end - start).max(1)));
            format!("  {:>11}  {name:<23} {bar}", format_bytes(bytes))
        });
        lines.collect()
    }
}

/// What nothing needs.
const FREE: &str = "free";

/// Each technique on the job, and what is none.
fn levers(levers: &Levers) -> Vec<String> {
    let mut lines = vec![format!(
        "levers   the plain job takes {} for its arena and {:.3} s a step:",
        format_bytes(levers.plain_arena_bytes),
        levers.plain_seconds
    )];
    lines.extend(levers.plain_by_role.iter().map(|&(role, bytes)| {
        let words = match role {
            Role::Weight => format!(", {}", levers.plain_weights),
            _ => String::new(),
        };
        format!("  {:>11}  {role}{words}", format_bytes(bytes))
    }));
    lines.push("         each technique alone:".to_owned());
    for lever in &levers.levers {
        let kind = match lever.kind {
            Kind::Exact => "exact",
            Kind::Rounding => "rounding",
            Kind::Mixed => "mixed",
            Kind::Lossy => "lossy",
            Kind::Method => "method",
        };
        let sign = match lever.saved_bytes {
            0 => "",
            saved if saved < 0 => "+",
            _ => "-",
        };
        let saved = format!("{sign}{}", format_bytes(lever.saved_bytes.unsigned_abs()));
        let mut line = format!(
            "  {saved:>11}  × {:<6.2} {kind:<9} {:<38}",
            lever.time_factor, lever.name
        );
        // Writing to a string cannot fail.
        let _ = write!(
            line,
            "{}{}",
            lever.flags,
            if lever.in_mix { "  (in the mix)" } else { "" }
        );
        lines.push(line);
    }
    for (what, instead) in FOLKLORE {
        lines.push(format!("          0 B  {what}: {instead}"));
    }
    lines
}
