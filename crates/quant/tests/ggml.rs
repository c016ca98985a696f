//! Every format of `ggml` against the bits of `gguf-py`: `fixtures/gguf_blocks.py`.

use tightfit_quant::Block;

fn hex<const DIGITS: usize>(text: &str) -> Vec<u32> {
    let digits = text.as_bytes().chunks_exact(DIGITS);
    digits
        .map(|d| u32::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn every_format_has_the_bits_of_the_reference() {
    let fixture: serde_json::Value = serde_json::from_str(include_str!("../../../fixtures/gguf_blocks.json")).unwrap();
    for block in Block::ALL.into_iter().filter(|block| !block.encodes()) {
        let case = &fixture[block.name().to_uppercase()];
        let bytes: Vec<u8> = hex::<2>(case["bytes_hex"].as_str().unwrap())
            .iter()
            .map(|&b| b as u8)
            .collect();
        let expected = hex::<8>(case["f32_hex"].as_str().unwrap());
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let mut out = vec![f32::NAN; expected.len()];
        block.decode_blocks(&bytes, &mut out);
        assert_eq!(bits(&out), expected, "{block}");

        let (elements, _) = block.independent().unwrap();
        let mut second = vec![f32::NAN; elements as usize];
        block.decode(&bytes, 1, expected.len(), elements as usize, &mut second);
        assert_eq!(
            bits(&second),
            expected[elements as usize..2 * elements as usize],
            "{block}"
        );
    }
}

#[test]
fn what_is_not_a_number_stays_so() {
    let mut block = [0u8; 18];
    block[1] = 0x7e;
    let mut out = [0.0; 32];
    Block::Q4_0.decode_blocks(&block, &mut out);
    assert!(out.iter().all(|v| v.is_nan()));
}

#[test]
#[should_panic(expected = "whole blocks")]
fn a_part_of_a_block_is_refused() {
    Block::Q4_0.decode(&[0; 36], 1, 64, 16, &mut [0.0; 32]);
}
