//! The suite checks itself: the reference passes, and backends with typical mistakes do not.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tightfit_ir::op::{Alias, Rule};
use tightfit_ir::{DType, Op, Tensor};
use tightfit_testkit::suite::{
    Backend, Case, EDGES, any_case, cases, cases_like, check, check_all, edge_cases, placements,
};

/// The reference, rounded to `f32`, with mistakes that a test adds.
struct Reference<F>(F);

impl<F: FnMut(&Case, &[Alias], Vec<Tensor>) -> Vec<Tensor>> Backend for Reference<F> {
    fn run(&mut self, case: &Case, aliases: &[Alias]) -> Result<Vec<Vec<f32>>, String> {
        let results = (self.0)(case, aliases, case.op.reference(&case.inputs));
        let rounded = |tensor: Tensor| tensor.data.into_iter().map(|x| x as f32).collect();
        Ok(results.into_iter().map(rounded).collect())
    }
}

#[test]
fn the_reference_passes_every_edge_case() {
    check_all(&mut Reference(|_: &Case, _: &[Alias], results| results), &edge_cases());
}

#[test]
fn every_case_belongs_to_its_operations_family() {
    let dims = EDGES[3];
    for case in cases(dims, 1) {
        let family = cases_like(&case.op, dims, 1);
        assert!(family.iter().any(|other| other.op == case.op), "{case}");
    }
}

#[test]
fn a_relative_error_of_1e_4_is_found_in_every_f32_result_of_every_operation() {
    // By operation and result: cases, and how many of them failed as they should.
    let mut found: BTreeMap<(&str, usize), (u32, u32)> = BTreeMap::new();
    let cases: Vec<Case> = EDGES[3..8].iter().flat_map(|&dims| cases(dims, 0)).collect();
    for output in 0..3 {
        let mut backend = Reference(|case: &Case, _: &[Alias], mut results: Vec<Tensor>| {
            // Twice what rounding may do to a result in 16 bits.
            let rounding = match case.results()[output].dtype {
                DType::Bf16 => 2_f64.powi(-7),
                DType::F16 => 2_f64.powi(-10),
                _ => 0.0,
            };
            // The largest element: others may be small beside what was summed to make them.
            let result = &mut results[output].data;
            if let Some(x) = result.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())) {
                *x *= 1.0 + rounding + 1e-4;
            }
            results
        });
        let is_f32 = |case: &&Case| case.results().get(output).is_some_and(|ty| ty.dtype == DType::F32);
        for case in cases.iter().filter(is_f32) {
            let result = &case.op.reference(&case.inputs)[output];
            if result.data.iter().any(|&x| x != 0.0) {
                let (count, failed) = found.entry((case.op.name(), output)).or_default();
                *count += 1;
                *failed += u32::from(check(&mut backend, case).is_err());
            }
        }
    }
    for (result, (count, failed)) in found {
        // Where operands nearly cancel, rounding them can do as much.
        assert!(failed * 20 >= count * 19, "{result:?}: {failed} of {count}");
    }
}

#[test]
fn a_result_that_depends_on_its_placement_fails() {
    let spoil = |_: &Case, aliases: &[Alias], mut results: Vec<Tensor>| {
        if let Some(alias) = aliases.first() {
            results[alias.output].data[0] += 1.0;
        }
        results
    };
    let mut backend = Reference(spoil);
    let in_place = |case: &&Case| placements(&case.op).len() > 1;
    for case in edge_cases().iter().filter(in_place) {
        assert!(check(&mut backend, case).is_err(), "{case}");
    }
}

#[test]
fn not_a_number_and_missing_results_fail() {
    let cases = edge_cases();
    let mut nan = Reference(|_: &Case, _: &[Alias], mut results: Vec<Tensor>| {
        results[0].data[0] = f64::NAN;
        results
    });
    let mut missing = Reference(|_: &Case, _: &[Alias], results: Vec<Tensor>| results[1..].to_vec());
    for case in cases.iter().step_by(7) {
        assert!(check(&mut nan, case).is_err(), "{case}");
        assert!(check(&mut missing, case).is_err(), "{case}");
    }
}

#[test]
fn placements_are_every_matching_of_results_with_operands() {
    let cases = cases(EDGES[0], 0);
    let op = |name: &str| cases.iter().find(|case| case.op.name() == name).unwrap().op.clone();
    let count = |op: &Op| placements(op).len();
    assert_eq!(count(&op("linear")), 1);
    assert_eq!(count(&op("add")), 3);
    assert_eq!(count(&op("adamw")), 8);
    // No result, one (2 × 3), or both over different operands (3 × 2).
    assert_eq!(count(&op("swiglu_backward")), 1 + 6 + 6);
    // A view is not a choice.
    assert_eq!(placements(&op("reshape")), [op("reshape").aliases()]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_cases_are_well_formed(case in any_case()) {
        let results = case.results();
        let reference = case.op.reference(&case.inputs);
        prop_assert_eq!(results.len(), reference.len());
        for (ty, result) in results.iter().zip(&reference) {
            prop_assert_eq!(&ty.shape, &result.shape);
            prop_assert!(result.data.iter().all(|x| x.is_finite()));
        }
    }
}
