//! Writing the file: threads that take tensors, the largest first.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use tightfit_format::Entry;
use tightfit_ir::Block;
use tightfit_quant::Encoder;

use super::weights::Reader;
use super::{Item, Plan, QuantizeError, Source, Squares};

/// Elements that are read, decoded and written at one time.
const CHUNK: u64 = 1 << 18;

/// Writes the planned file by `threads` threads, and says by how much each of the plan's items differs from what it was. `progress` is
/// told how many more bytes are written.
///
/// # Errors
/// The source cannot be read, the file cannot be written, or `stop` was set. The file is then of no use.
pub fn write(
    plan: &Plan,
    source: &Source<'_>,
    file: &File,
    threads: usize,
    stop: &AtomicBool,
    progress: &(impl Fn(u64) + Sync),
) -> Result<Vec<Squares>, QuantizeError> {
    file.set_len(plan.layout.bytes())?;
    file.write_all_at(plan.layout.header(), 0)?;
    let items: BTreeMap<&str, usize> = (0..)
        .zip(&plan.items)
        .map(|(i, item)| (&*item.weight.name, i))
        .collect();
    // The layout was made of the items.
    let mut order: Vec<(usize, &Entry)> = plan
        .layout
        .entries()
        .iter()
        .map(|entry| (items[&*entry.name], entry))
        .collect();
    order.sort_by_key(|(_, entry)| Reverse(entry.elements()));

    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let stopped = || stop.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed);
    let work = || {
        let mut worker = Worker {
            reader: Reader::new(source)?,
            file,
            stopped: &stopped,
            progress,
            floats: Vec::new(),
            decoded: Vec::new(),
            bytes: Vec::new(),
            scratch: Vec::new(),
        };
        let mut done = Vec::new();
        while let Some(&(index, entry)) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((index, worker.item(&plan.items[index], entry)?));
        }
        Ok(done)
    };
    let results: Vec<_> = thread::scope(|scope| {
        let noted = || work().inspect_err(|_: &QuantizeError| failed.store(true, Ordering::Relaxed));
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(noted)).collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined
            .map(|result| result.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    // A thread that another one's error has stopped has nothing to say.
    let (told, others): (Vec<_>, Vec<_>) = results
        .into_iter()
        .partition(|result| !matches!(result, Err(QuantizeError::Stopped)));
    let mut squares = vec![Squares::default(); plan.items.len()];
    for result in told.into_iter().chain(others) {
        for (index, of_item) in result? {
            squares[index] = of_item;
        }
    }
    Ok(squares)
}

/// A thread's memory: of one quantised tensor and of a few rows.
struct Worker<'a, P> {
    reader: Reader<'a>,
    file: &'a File,
    stopped: &'a (dyn Fn() -> bool + Sync),
    progress: &'a P,
    floats: Vec<f32>,
    decoded: Vec<f32>,
    bytes: Vec<u8>,
    scratch: Vec<f32>,
}

impl<P: Fn(u64)> Worker<'_, P> {
    fn item(&mut self, item: &Item, entry: &Entry) -> Result<Squares, QuantizeError> {
        match item.block {
            Some(block) => self.quantize(item, block, entry),
            None => self.copy(item, entry).map(|()| Squares::default()),
        }
    }

    /// Quantises a matrix, writes it, and reads its source again to see what it lost.
    fn quantize(&mut self, item: &Item, block: Block, entry: &Entry) -> Result<Squares, QuantizeError> {
        let (rows, cols) = item.weight.matrix();
        self.bytes.resize(entry.bytes() as usize, 0);
        self.scratch.resize(block.scratch_floats(rows, cols) as usize, 0.0);
        let (row_count, col_count) = (rows as usize, cols as usize);
        let mut encoder = Encoder::new(block, row_count, col_count, &mut self.bytes, &mut self.scratch);
        for (first, rows) in chunks(rows, cols) {
            self.floats.resize((rows * cols) as usize, 0.0);
            check(self.stopped)?;
            self.reader.floats(&item.weight, first, &mut self.floats)?;
            encoder.push(&self.floats);
        }
        encoder.finish();
        self.file.write_all_at(&self.bytes, entry.offset())?;
        (self.progress)(entry.bytes());

        let mut squares = Squares::default();
        for (first, rows) in chunks(rows, cols) {
            self.floats.resize((rows * cols) as usize, 0.0);
            self.decoded.resize(self.floats.len(), 0.0);
            check(self.stopped)?;
            self.reader.floats(&item.weight, first, &mut self.floats)?;
            let start = (first * cols) as usize;
            block.decode(&self.bytes, row_count, col_count, start, &mut self.decoded);
            squares.add(&self.floats, &self.decoded);
        }
        Ok(squares)
    }

    /// Writes a tensor as it is.
    fn copy(&mut self, item: &Item, entry: &Entry) -> Result<(), QuantizeError> {
        let (rows, cols) = item.weight.matrix();
        let row_bytes = entry.bytes() / rows.max(1);
        for (first, rows) in chunks(rows, cols) {
            self.floats.resize((rows * cols) as usize, 0.0);
            self.bytes.resize((rows * row_bytes) as usize, 0);
            check(self.stopped)?;
            self.reader
                .bytes(&item.weight, first, &mut self.floats, &mut self.bytes)?;
            self.file
                .write_all_at(&self.bytes, entry.offset() + first * row_bytes)?;
            (self.progress)(self.bytes.len() as u64);
        }
        Ok(())
    }
}

fn check(stopped: &dyn Fn() -> bool) -> Result<(), QuantizeError> {
    if stopped() {
        return Err(QuantizeError::Stopped);
    }
    Ok(())
}

/// First rows and numbers of rows of the chunks of a matrix; each begins at an even row, where [`Reader`] can.
fn chunks(rows: u64, cols: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = (CHUNK / cols.max(1)).next_multiple_of(2).max(2);
    (0..rows)
        .step_by(step as usize)
        .map(move |first| (first, step.min(rows - first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_rows_from_even_ones() {
        for (rows, cols) in [(1, 1), (7, 100_000), (1000, 1000), (5, 1 << 20)] {
            let mut next = 0;
            for (first, count) in chunks(rows, cols) {
                assert_eq!(first, next);
                assert!(first % 2 == 0 && count > 0);
                next += count;
            }
            assert_eq!(next, rows);
        }
    }
}
