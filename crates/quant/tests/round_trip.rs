//! What the formats of our own promise for any matrix.

use proptest::prelude::*;
use tightfit_quant::{Block, Encoder, dynamic};

const OWN: [Block; 3] = [Block::Int8, Block::Int4, Block::Nf4];

fn encode(block: Block, rows: usize, cols: usize, values: &[f32], rows_a_push: usize) -> Vec<u8> {
    let (r, c) = (rows as u64, cols as u64);
    // Not zeros: every byte is written.
    let mut bytes = vec![0xAA; block.bytes(r, c) as usize];
    let mut scratch = vec![f32::NAN; block.scratch_floats(r, c) as usize];
    let mut encoder = Encoder::new(block, rows, cols, &mut bytes, &mut scratch);
    if cols > 0 {
        values.chunks(cols * rows_a_push).for_each(|rows| encoder.push(rows));
    }
    encoder.finish();
    bytes
}

fn decode(block: Block, rows: usize, cols: usize, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * cols];
    block.decode(bytes, rows, cols, 0, &mut out);
    out
}

/// Rows, columns, and values between -1 and 1 times a power of two.
fn matrices() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    (0_usize..6, 0_usize..200, -12..12).prop_flat_map(|(rows, cols, exponent)| {
        let value = (-1.0_f32..1.0).prop_map(move |x| x * 2_f32.powi(exponent));
        (Just(rows), Just(cols), prop::collection::vec(value, rows * cols))
    })
}

proptest! {
    #[test]
    fn any_part_is_that_of_the_whole((rows, cols, values) in matrices(), from in 0.0..1.0, to in 0.0..1.0, pushed in 1_usize..4) {
        for block in OWN {
            let bytes = encode(block, rows, cols, &values, pushed);
            prop_assert_eq!(&bytes, &encode(block, rows, cols, &values, 1));
            let whole = decode(block, rows, cols, &bytes);
            let end = (to * (values.len() + 1) as f64) as usize;
            let start = (from * (end + 1) as f64) as usize;
            let mut part = vec![f32::NAN; end - start];
            block.decode(&bytes, rows, cols, start, &mut part);
            prop_assert_eq!(&part[..], &whole[start..end]);
        }
    }

    #[test]
    fn int8_is_off_by_half_a_step_and_exact_again((rows, cols, values) in matrices()) {
        let bytes = encode(Block::Int8, rows, cols, &values, 1);
        let decoded = decode(Block::Int8, rows, cols, &bytes);
        for (row, found) in values.chunks(cols.max(1)).zip(decoded.chunks(cols.max(1))) {
            let largest = row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            for (x, y) in row.iter().zip(found) {
                prop_assert!((x - y).abs() <= largest / 127.0 * 0.50001);
            }
        }
        let again = encode(Block::Int8, rows, cols, &decoded, 1);
        prop_assert_eq!(&again[rows * 4..], &bytes[rows * 4..]);
    }

    #[test]
    fn int4_is_no_worse_than_the_steps_between_the_extremes((rows, cols, values) in matrices()) {
        let bytes = encode(Block::Int4, rows, cols, &values, 1);
        let decoded = decode(Block::Int4, rows, cols, &bytes);
        for (group, found) in values.chunks(64).zip(decoded.chunks(64)) {
            let low = group.iter().copied().fold(f32::INFINITY, f32::min);
            let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            // Half a step, and what binary16 takes from the minimum, and from 15 steps.
            let rounding = (low.abs() + (high - low)) * 2_f32.powi(-11) + 16.0 * 2_f32.powi(-25);
            let bound = (high - low) / 30.0 + 2.0 * rounding;
            let error: f32 = group.iter().zip(found).map(|(x, y)| (x - y).powi(2)).sum();
            prop_assert!(error <= group.len() as f32 * bound * bound * 1.0001, "{error} {bound}");
        }
    }

    #[test]
    fn int4_keeps_what_it_can_hold(codes in prop::collection::vec(0_u8..16, 62), scale in 1_i16..100, min in -100_i16..100) {
        // With both extremes in the group, its scale and minimum are found again.
        let values: Vec<f32> =
            codes.iter().chain(&[0, 15]).map(|&code| f32::from(code) * f32::from(scale) + f32::from(min)).collect();
        let bytes = encode(Block::Int4, 1, 64, &values, 1);
        prop_assert_eq!(decode(Block::Int4, 1, 64, &bytes), values);
    }

    #[test]
    fn nf4_is_off_by_half_the_widest_step_and_keeps_its_codes((rows, cols, values) in matrices()) {
        let bytes = encode(Block::Nf4, rows, cols, &values, 1);
        let decoded = decode(Block::Nf4, rows, cols, &bytes);
        let scales: Vec<f32> =
            values.chunks(64).map(|group| group.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()))).collect();
        let mean = scales.iter().sum::<f32>() / scales.len().max(1) as f32;
        let spread = scales.iter().fold(0.0_f32, |largest, scale| largest.max((scale - mean).abs()));
        for ((group, found), scale) in values.chunks(64).zip(decoded.chunks(64)).zip(&scales) {
            for (x, y) in group.iter().zip(found) {
                // Codes are at most 0.31 apart, and codes of scales at most 0.015.
                let bound = 0.153 * scale + 0.0075 * spread + 1e-6 * mean;
                prop_assert!((x - y).abs() <= bound, "{x} {y} {scale}");
            }
        }
        if spread < 0.5 * mean {
            let groups = values.len().div_ceil(64);
            let codes = (groups.div_ceil(256) + 1) * 4 + groups;
            let again = encode(Block::Nf4, rows, cols, &decoded, 1);
            prop_assert_eq!(&again[codes..], &bytes[codes..]);
        }
    }

    #[test]
    fn nothing_that_is_not_finite_stops_it(bits in prop::collection::vec(any::<u32>(), 0..200)) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        for block in OWN {
            let bytes = encode(block, 1, values.len(), &values, 1);
            decode(block, 1, values.len(), &bytes);
        }
    }

    #[test]
    fn any_bytes_decode(rows in 0_usize..6, cols in 0_usize..150, seed in any::<u8>()) {
        for block in OWN {
            let bytes: Vec<u8> =
                (0..block.bytes(rows as u64, cols as u64)).map(|i| (i as u8).wrapping_mul(113) ^ seed).collect();
            decode(block, rows, cols, &bytes);
        }
    }

    #[test]
    fn the_nearest_code_is_nearest(x in -1.2_f32..1.2, exponent in 0..20) {
        let x = x * 0.5_f32.powi(exponent);
        for map in [dynamic::signed(), dynamic::unsigned()] {
            let chosen = (map[usize::from(dynamic::nearest(map, x))] - x).abs();
            let least = map.iter().map(|value| (value - x).abs()).fold(f32::INFINITY, f32::min);
            prop_assert!(chosen <= least * 1.000_01);
        }
    }
}

#[test]
fn small_and_large_numbers_are_kept_or_flushed() {
    // Too small for a step: zeros, no division by it.
    let tiny = [f32::from_bits(1), -f32::from_bits(7)];
    assert_eq!(
        decode(Block::Int8, 1, 2, &encode(Block::Int8, 1, 2, &tiny, 1)),
        [0.0, 0.0]
    );
    // Beyond binary16: its largest number.
    let large = decode(Block::Int4, 1, 2, &encode(Block::Int4, 1, 2, &[1e30, -1e30], 1));
    assert!(large.iter().all(|x| x.is_finite()));
    assert_eq!(large[1], -65504.0);
}

#[test]
#[should_panic(expected = "rows are missing")]
fn a_matrix_is_complete() {
    let mut bytes = vec![0; Block::Int8.bytes(2, 2) as usize];
    let mut encoder = Encoder::new(Block::Int8, 2, 2, &mut bytes, &mut []);
    encoder.push(&[1.0, 2.0]);
    encoder.finish();
}
