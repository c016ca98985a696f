//! Predicted times: a number for every operation, and more for more.

use tightfit_cpu::simd::Isa;
use tightfit_cpu::target::CpuTarget;
use tightfit_ir::op::{Accumulate, Attention, Linear, LinearCrossEntropy, Op, Rule};
use tightfit_ir::{Target, Type};
use tightfit_testkit::suite::{Case, Dims, cases, edge_cases};

const ISAS: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Portable];

fn seconds(target: &CpuTarget, op: &Op, types: &[Type]) -> f64 {
    let results = op.infer(types).unwrap();
    target.seconds(
        op,
        &types.iter().collect::<Vec<_>>(),
        &results.iter().collect::<Vec<_>>(),
    )
}

fn of_case(target: &CpuTarget, case: &Case) -> f64 {
    seconds(target, &case.op, &case.types)
}

#[test]
fn every_operation_takes_a_finite_time_and_a_view_none() {
    for isa in ISAS {
        let target = CpuTarget::with_isa(isa, 3);
        assert!(target.profile.is_valid());
        for case in edge_cases() {
            let seconds = of_case(&target, &case);
            let view = matches!(case.op, Op::Reshape(_) | Op::Settle(_));
            assert!(seconds.is_finite(), "{case}");
            assert_eq!(seconds > 0.0, !view, "{case}: {seconds}");
        }
    }
}

#[test]
fn twice_the_size_takes_longer() {
    let [small, large] = [1, 2].map(|n| {
        cases(
            Dims {
                rows: n * 36,
                cols: n * 48,
                inner: n * 24,
            },
            7,
        )
    });
    assert_eq!(small.len(), large.len());
    for isa in ISAS {
        let target = CpuTarget::with_isa(isa, 2);
        for (small, large) in small.iter().zip(&large) {
            assert_eq!(small.op.name(), large.op.name());
            let (less, more) = (of_case(&target, small), of_case(&target, large));
            assert!(more >= less, "{small}: {less}, {large}: {more}");
        }
    }
}

fn linear(t: u64, n: u64, k: u64) -> (Op, Vec<Type>) {
    let op = Linear {
        bias: false,
        accumulate: Accumulate::NONE,
    };
    (op.into(), vec![Type::f32([t, k]), Type::f32([n, k])])
}

#[test]
fn products_of_few_rows_are_slower_per_flop() {
    let target = CpuTarget::with_isa(Isa::Avx2, 2);
    let per_row = |rows: u64| {
        let (op, types) = linear(rows, 2048, 2048);
        seconds(&target, &op, &types) / rows as f64
    };
    assert!(per_row(16) > 1.5 * per_row(2048));
    assert!(per_row(512) > 1.02 * per_row(2048));
}

#[test]
fn a_loss_with_gradients_takes_three_products() {
    let target = CpuTarget::with_isa(Isa::Avx2, 2);
    let (rows, hidden, vocab) = (1024, 576, 49152);
    let operands = [
        Type::f32([rows, hidden]),
        Type::f32([vocab, hidden]),
        Type::i32([rows]),
        Type::f32([1]),
    ];
    let loss = |gradients| LinearCrossEntropy {
        input_gradient: gradients,
        weight_gradient: gradients,
        ..LinearCrossEntropy::new(512, -100)
    };
    let alone = seconds(&target, &loss(false).into(), &operands);
    let whole = seconds(&target, &loss(true).into(), &operands);
    assert!(whole > 2.5 * alone && whole < 4.0 * alone, "{alone} {whole}");
    let (op, types) = linear(rows, vocab, hidden);
    let logits = seconds(&target, &op, &types);
    assert!(alone > logits && alone < 1.5 * logits, "{alone} {logits}");
}

#[test]
fn attention_on_rows_of_keys_4_kib_apart_is_slower() {
    let target = CpuTarget::with_isa(Isa::Avx2, 2);
    let seconds = |kv_heads: u64| {
        let op = Attention {
            heads: 48,
            kv_heads,
            head_dim: 64,
            scale: 0.125,
            context: 512,
            window: None,
        };
        let (q, kv) = (Type::f32([512, 48 * 64]), Type::f32([512, kv_heads * 64]));
        seconds(&target, &op.into(), &[q, kv.clone(), kv, Type::i32([512])])
    };
    assert_eq!(seconds(12), seconds(24));
    let rates = target.profile.attention;
    let ratio = (seconds(16) - target.profile.call_seconds) / (seconds(24) - target.profile.call_seconds);
    assert!((ratio * rates.aliased / rates.spread - 1.0).abs() < 1e-6, "{ratio}");
}
