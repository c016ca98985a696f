//! What data files came to, for people and programs.

use std::fmt;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use tightfit_text::data::Counts;

/// The rows of a run, and what was found when they were made; a resumed run finds its rows made.
#[derive(Clone, Debug)]
pub struct DataReport {
    /// Rows to train on.
    pub train_rows: u64,
    /// Rows held out.
    pub eval_rows: u64,
    /// What was found in the files.
    pub counts: Option<Counts>,
}

impl Serialize for DataReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let counts = self.counts.as_ref();
        let mut fields = serializer.serialize_struct("DataReport", 11)?;
        fields.serialize_field("train_rows", &self.train_rows)?;
        fields.serialize_field("eval_rows", &self.eval_rows)?;
        fields.serialize_field("samples", &counts.map(|c| c.samples))?;
        fields.serialize_field("tokens", &counts.map(|c| c.tokens))?;
        fields.serialize_field("targets", &counts.map(|c| c.targets))?;
        fields.serialize_field("split", &counts.map(|c| c.split))?;
        fields.serialize_field("dropped", &counts.map(|c| c.dropped))?;
        fields.serialize_field("uncounted_pieces", &counts.map(|c| c.uncounted_pieces))?;
        fields.serialize_field("padding", &counts.map(|c| c.padding))?;
        fields.serialize_field("bad_lines", &counts.map(|c| c.bad_lines))?;
        fields.serialize_field("first_bad", &counts.map(|c| &c.first_bad))?;
        fields.end()
    }
}

/// E.g. `1000 samples, 120000 tokens: 230 rows to train on, 12 held out; 3 samples cut to fit a row`.
impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(counts) = &self.counts {
            write!(f, "{}, {} tokens: ", many(counts.samples, "sample"), counts.tokens)?;
        }
        write!(
            f,
            "{} to train on, {} held out",
            many(self.train_rows, "row"),
            self.eval_rows
        )?;
        let Some(counts) = &self.counts else {
            return Ok(());
        };
        for (count, what, words) in [
            (counts.split, "sample", "cut to fit a row"),
            (counts.dropped, "sample", "dropped, longer than a row"),
            (counts.uncounted_pieces, "piece", "dropped, nothing to learn in it"),
            (counts.bad_lines, "bad line", "skipped"),
        ] {
            if count > 0 {
                write!(f, "; {} {words}", many(count, what))?;
            }
        }
        counts
            .first_bad
            .iter()
            .try_for_each(|bad| write!(f, "\n         {bad}"))
    }
}

/// E.g. `1 row`, `2 rows`.
pub fn many(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
