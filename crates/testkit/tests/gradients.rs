//! Every gradient rule, and whole random models through `autodiff`, against finite differences in `f64`.

use proptest::prelude::*;
use tightfit_ir::{Forward, Graph, Op, Tensor};
use tightfit_testkit::data::batch;
use tightfit_testkit::gradcheck::{check_model, check_rule};
use tightfit_testkit::interpret::initial;
use tightfit_testkit::random::model;
use tightfit_testkit::suite::{Dims, cases};

const SIZES: [(u64, u64, u64); 4] = [(1, 1, 1), (1, 5, 2), (4, 3, 5), (7, 2, 3)];

#[test]
fn every_gradient_rule_agrees_with_finite_differences() {
    let mut failures = Vec::new();
    for (seed, (rows, cols, inner)) in (0..).zip(SIZES) {
        for case in cases(Dims { rows, cols, inner }, seed) {
            // The rule turns the loss alone into the variants that make gradients, which may be scaled: those have none to be asked for.
            let made =
                matches!(&case.op, Op::LinearCrossEntropy(op) if op.input_gradient || op.weight_gradient || op.scaled);
            if !made {
                failures.extend(check_rule(&case, seed).err());
            }
        }
    }
    assert!(failures.is_empty(), "{} fail:\n{}", failures.len(), failures.join("\n"));
}

/// Both gradients of one node belong to one value: neither can be added onto the other in that node.
#[test]
fn a_weight_that_is_both_operands_of_the_loss() {
    let text = "\
%0 = input \"w\" f32[3x2] weight persistent normal(1) trainable
%1 = input \"targets\" i32[3] input fed
%2 = input \"token_count\" f32[1] input fed
%3: f32[1] activation = linear_cross_entropy{\"chunk\":2,\"ignore_index\":-100}(%0, %0, %1, %2) @\"loss\" forward
output \"loss\" = %3 read
";
    let graph = Graph::parse(text).unwrap();
    let mut feed = initial(&graph, 3);
    let targets = Tensor::new([3], vec![2.0, -100.0, 0.0]);
    feed.extend([("targets".into(), targets), ("token_count".into(), Tensor::scalar(2.0))]);
    assert_eq!(check_model(&Forward { graph }, &feed, 3), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn every_gradient_of_a_random_model_agrees_with_finite_differences(model in model(), seed: u64) {
        let mut feed = batch(model.batch, 1, seed).remove(0);
        feed.extend(initial(&model.forward.graph, seed));
        match check_model(&model.forward, &feed, seed) {
            Err(message) if message.contains("nothing to train") => {}
            result => prop_assert!(result.is_ok(), "{}\n{}", result.unwrap_err(), model.forward.graph),
        }
    }
}
