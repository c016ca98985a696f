//! Every encoding against the bits of `gguf-py`: `fixtures/gguf_blocks.py`.

use tightfit_format::{Block, Encoding, FormatError, decode};

const ENCODINGS: [Encoding; 13] = [
    Encoding::F32,
    Encoding::F16,
    Encoding::Bf16,
    Encoding::Block(Block::Q4_0),
    Encoding::Block(Block::Q4_1),
    Encoding::Block(Block::Q5_0),
    Encoding::Block(Block::Q5_1),
    Encoding::Block(Block::Q8_0),
    Encoding::Block(Block::Q2K),
    Encoding::Block(Block::Q3K),
    Encoding::Block(Block::Q4K),
    Encoding::Block(Block::Q5K),
    Encoding::Block(Block::Q6K),
];

fn hex<const DIGITS: usize>(text: &str) -> Vec<u32> {
    let digits = text.as_bytes().chunks_exact(DIGITS);
    digits
        .map(|d| u32::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn every_encoding_has_the_bits_of_the_reference() {
    let fixture: serde_json::Value = serde_json::from_str(include_str!("../../../fixtures/gguf_blocks.json")).unwrap();
    assert_eq!(fixture.as_object().unwrap().len(), ENCODINGS.len());
    for encoding in ENCODINGS {
        let case = &fixture[encoding.name()];
        let bytes: Vec<u8> = hex::<2>(case["bytes_hex"].as_str().unwrap())
            .iter()
            .map(|&b| b as u8)
            .collect();
        let expected = hex::<8>(case["f32_hex"].as_str().unwrap());
        let mut out = vec![f32::NAN; expected.len()];
        decode(encoding, &bytes, &mut out).unwrap();
        let bits: Vec<u32> = out.iter().map(|v| v.to_bits()).collect();
        assert_eq!(bits, expected, "{encoding}");
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let halves = [0x7c00u16, 0xfc00, 0x7e01, 0x7c01].map(u16::to_le_bytes).concat();
    let mut out = [0.0; 4];
    decode(Encoding::F16, &halves, &mut out).unwrap();
    assert_eq!(out[..2], [f32::INFINITY, f32::NEG_INFINITY]);
    assert!(out[2].is_nan() && out[3].is_nan());

    let mut block = [0u8; 18];
    block[1] = 0x7e;
    let mut out = [0.0; 32];
    decode(Encoding::Block(Block::Q4_0), &block, &mut out).unwrap();
    assert!(out.iter().all(|v| v.is_nan()));
}

#[test]
fn lengths_that_do_not_belong_together_are_an_error() {
    for encoding in ENCODINGS {
        let (bytes, elements) = (encoding.block_bytes() as usize, encoding.block_elements() as usize);
        for (bytes, elements) in [
            (bytes - 1, elements),
            (bytes + 1, elements),
            (bytes, elements + 1),
            (bytes, 0),
        ] {
            let mut out = vec![1.5; elements];
            let result = decode(encoding, &vec![0; bytes], &mut out);
            assert!(
                matches!(result, Err(FormatError::Blocks { .. })),
                "{encoding} {bytes} {elements}"
            );
            assert!(out.iter().all(|&v| v == 1.5));
        }
        decode(encoding, &[], &mut []).unwrap();
    }
    assert!(decode(Encoding::Unknown(99), &[], &mut []).is_err());
}
