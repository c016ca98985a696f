//! What the data targets do with rows.

use tightfit_text::data::{BatchBuffers, Batches, IGNORE_INDEX, Rows, RowsError};

/// Reads every row once, holds the buffers to their description, and returns the sum of the counted targets.
///
/// # Errors
/// What reading says of a file that is damaged.
pub fn read_all(rows: Rows, vocab_size: usize, micro_batch: usize) -> Result<u64, RowsError> {
    let batches = Batches::in_order(rows, micro_batch)?;
    let [mut tokens, mut targets, mut positions, mut doc_start] = [(); 4].map(|()| vec![0; batches.token_count()]);
    let mut sum = 0;
    for index in 0..batches.per_epoch() {
        let mut buffers = BatchBuffers {
            tokens: &mut tokens,
            targets: &mut targets,
            positions: &mut positions,
            doc_start: &mut doc_start,
        };
        let counted = batches.fill(index, &mut buffers)?;
        assert_eq!(batches.counted(index)?, counted);
        let seq = batches.rows().seq();
        let vocabulary = 0..vocab_size as i32;
        for t in 0..batches.token_count() {
            assert!(vocabulary.contains(&tokens[t]));
            assert!(targets[t] == IGNORE_INDEX || vocabulary.contains(&targets[t]));
            assert!(doc_start[t] as usize >= t / seq * seq);
            assert_eq!(positions[t], t as i32 - doc_start[t]);
        }
        assert_eq!(
            targets.iter().filter(|&&target| target != IGNORE_INDEX).count(),
            counted
        );
        sum += counted as u64;
    }
    Ok(sum)
}
