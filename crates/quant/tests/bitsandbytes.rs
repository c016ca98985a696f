//! NF4 against bitsandbytes: `fixtures/nf4.py`.

use serde_json::Value;
use tightfit_quant::{Block, Encoder, dynamic};

fn fixture() -> Value {
    serde_json::from_str(include_str!("../../../fixtures/nf4.json")).unwrap()
}

fn floats(entry: &Value) -> Vec<f32> {
    let digits = entry["f32_hex"].as_str().unwrap().as_bytes().chunks_exact(8);
    digits
        .map(|d| f32::from_bits(u32::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()))
        .collect()
}

fn octets(entry: &Value) -> Vec<u8> {
    let digits = entry.as_str().unwrap().as_bytes().chunks_exact(2);
    digits
        .map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap())
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn the_dynamic_maps_are_the_published_ones() {
    let fixture = fixture();
    assert_eq!(bits(dynamic::signed()), bits(&floats(&fixture["signed"])));
    assert_eq!(bits(dynamic::unsigned()), bits(&floats(&fixture["unsigned"])));
}

#[test]
fn codes_and_scales_are_those_of_bitsandbytes() {
    let fixture = fixture();
    let cases = fixture["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 8);
    for (name, case) in cases {
        let values = floats(&case["values"]);
        let [rows, cols] = [0, 1].map(|i| case["values"]["shape"][i].as_u64().unwrap());
        let mut bytes = vec![0xAA; Block::Nf4.bytes(rows, cols) as usize];
        let mut scales = vec![f32::NAN; Block::Nf4.scratch_floats(rows, cols) as usize];
        let mut encoder = Encoder::new(Block::Nf4, rows as usize, cols as usize, &mut bytes, &mut scales);
        values.chunks(cols as usize).for_each(|row| encoder.push(row));
        encoder.finish();

        let expected = floats(&case["nested"]);
        let (nested, rest) = bytes.split_at(expected.len() * 4);
        let (offset, rest) = rest.split_at(4);
        let (scale_codes, codes) = rest.split_at(scales.len());
        assert_eq!(
            bits(&scales),
            bits(&floats(&case["scales"])),
            "{name}: first-level scales"
        );
        assert_eq!(codes, octets(&case["codes"]), "{name}: codes");
        assert_eq!(scale_codes, octets(&case["scale_codes"]), "{name}: codes of the scales");

        let second_level: Vec<f32> = [offset, nested]
            .into_iter()
            .flat_map(|bytes| bytes.as_chunks().0)
            .map(|&bytes| f32::from_le_bytes(bytes))
            .collect();
        assert_eq!(
            bits(&second_level),
            bits(&[floats(&case["offset"]), expected].concat()),
            "{name}: offset, nested scales"
        );
        if case.get("dequantized").is_some() {
            let expected = floats(&case["dequantized"]);
            let mut found = vec![f32::NAN; values.len()];
            Block::Nf4.decode(&bytes, rows as usize, cols as usize, 0, &mut found);
            assert_eq!(bits(&found), bits(&expected), "{name}: dequantised");
        }
    }
}
