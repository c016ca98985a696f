//! Which queries see which keys, within a pair of blocks.

use super::AttentionShape;

/// A pair of blocks: queries `t0..t0 + queries` and keys `k0..k0 + keys`.
#[derive(Clone, Copy)]
pub struct Pair {
    /// First query.
    pub t0: usize,
    /// Number of queries.
    pub queries: usize,
    /// First key.
    pub k0: usize,
    /// Number of keys.
    pub keys: usize,
}

impl Pair {
    /// The queries, counted from `t0`, that see any of the keys `first..end`, counted from `k0`.
    ///
    /// # Safety
    /// Both blocks lie within the shape, `doc_start` is readable for its rows.
    #[inline(always)]
    pub unsafe fn queries_of(
        &self,
        shape: &AttentionShape,
        doc_start: *const i32,
        first: usize,
        end: usize,
    ) -> (usize, usize) {
        let from = (self.k0 + first).saturating_sub(self.t0);
        let mut to = self.queries;
        // SAFETY: `t0 + to − 1` is a row.
        while to > from && unsafe { shape.first_key(doc_start, self.t0 + to - 1) } >= self.k0 + end {
            to -= 1;
        }
        (from.min(to), to)
    }

    /// The keys, counted from `k0`, that any of the queries `first..end`, counted from `t0`, sees.
    ///
    /// # Safety
    /// Both blocks lie within the shape, `doc_start` is readable for its rows.
    #[inline(always)]
    pub unsafe fn keys_of(
        &self,
        shape: &AttentionShape,
        doc_start: *const i32,
        first: usize,
        end: usize,
    ) -> (usize, usize) {
        // SAFETY: `t0 + first` is a row.
        let seen = unsafe { shape.first_key(doc_start, self.t0 + first) };
        let from = seen.saturating_sub(self.k0);
        let to = (self.t0 + end).saturating_sub(self.k0).min(self.keys);
        (from.min(to), to)
    }

    /// Whether every query sees every key.
    ///
    /// # Safety
    /// Both blocks lie within the shape, `doc_start` is readable for its rows.
    pub unsafe fn unmasked(&self, shape: &AttentionShape, doc_start: *const i32) -> bool {
        let last = self.t0 + self.queries - 1;
        // SAFETY: `last` is a row.
        let seen = unsafe { shape.first_key(doc_start, last) };
        seen <= self.k0 && self.k0 + self.keys <= self.t0 + 1
    }
}
