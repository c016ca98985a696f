//! How fast each format is made and read on one core, and how far it is from what went in.
//!
//!     cargo run --release -p tightfit-quant --example speed

use std::hint::black_box;
use std::time::Instant;

use tightfit_quant::{Block, Encoder};

const ROWS: usize = 1024;
const COLS: usize = 4096;

/// Elements decoded by a call: a tile that stays in the first cache.
const TILE: usize = 2048;

/// Times what is measured is repeated; the fastest counts.
const REPEATS: usize = 7;

fn main() {
    let values = normals(ROWS * COLS);
    println!("{ROWS} x {COLS}, normal, in tiles of {TILE}");
    println!("format  bits/element  decode G/s  encode G/s  relative squared error");
    for block in [Block::Int8, Block::Int4, Block::Nf4] {
        let (rows, cols) = (ROWS as u64, COLS as u64);
        let mut bytes = vec![0; block.bytes(rows, cols) as usize];
        let mut scratch = vec![0.0; block.scratch_floats(rows, cols) as usize];
        let encode = fastest(|| {
            let mut encoder = Encoder::new(block, ROWS, COLS, &mut bytes, &mut scratch);
            encoder.push(black_box(&values));
            encoder.finish();
        });
        let mut tile = [0.0; TILE];
        let decode = fastest(|| {
            for start in (0..ROWS * COLS).step_by(TILE) {
                block.decode(black_box(&bytes), ROWS, COLS, start, &mut tile);
                black_box(&tile);
            }
        });
        let mut decoded = vec![0.0; ROWS * COLS];
        block.decode(&bytes, ROWS, COLS, 0, &mut decoded);
        let error: f64 = values
            .iter()
            .zip(&decoded)
            .map(|(&x, &y)| f64::from(x - y).powi(2))
            .sum();
        let square: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
        println!(
            "{block:6}  {:12.3}  {decode:10.2}  {encode:10.2}  {:.3e}",
            bytes.len() as f64 * 8.0 / values.len() as f64,
            error / square,
        );
    }
}

/// Elements per nanosecond.
fn fastest(mut run: impl FnMut()) -> f64 {
    let seconds = (0..REPEATS).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    (ROWS * COLS) as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}

/// Roughly normal numbers: sums of twelve uniform ones.
fn normals(count: usize) -> Vec<f32> {
    let mut state = 1_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..count)
        .map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
        .collect()
}
