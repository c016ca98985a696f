//! Rotary tables against Hugging Face's: `rope.json`, which `rope.py` beside it writes.

use serde::Deserialize;
use tightfit_ir::Tensor;
use tightfit_ir::op::{RopeTable, Rule};

#[derive(Deserialize)]
struct Fixture {
    positions: Vec<f64>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    #[serde(flatten)]
    op: RopeTable,
    inverse_frequencies: Vec<f32>,
    table: Vec<Vec<f64>>,
}

fn fixture() -> Fixture {
    serde_json::from_str(include_str!("rope.json")).unwrap()
}

#[test]
fn inverse_frequencies_are_hugging_face_s_bit_for_bit() {
    for case in fixture().cases {
        let made: Vec<f32> = case.op.inverse_frequencies().collect();
        assert_eq!(made, case.inverse_frequencies, "{:?}", case.op);
    }
}

#[test]
fn tables_agree_with_hugging_face_at_long_contexts() {
    let Fixture { positions, cases } = fixture();
    let positions = Tensor::new([positions.len() as u64], positions);
    for case in cases {
        let table = case.op.reference(std::slice::from_ref(&positions)).swap_remove(0);
        for (t, expected) in case.table.iter().enumerate() {
            for (i, (made, expected)) in table.row(t).iter().zip(expected).enumerate() {
                assert!(
                    (made - expected).abs() <= 1e-6,
                    "{:?} at {}[{i}]: {made}, expected {expected}",
                    case.op,
                    positions.data[t]
                );
            }
        }
    }
}
