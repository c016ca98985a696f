//! What every operation's rule promises, over the suite's cases; and what the rules refuse.

use proptest::prelude::*;
use tightfit_ir::op::{
    Accumulate, AdamW, AdamW8bit, Add, Apollo, Attention, AttentionBackward, BiasBackward, CachedAttention, Cost,
    Embedding, EmbeddingBackward, Gelu, GlobalNorm, KvAppend, LayerNorm, LayerNormBackward, Linear,
    LinearBackwardInput, LinearBackwardWeight, LinearCrossEntropy, Norm, PadRows, Reshape, RmsNorm, RmsNormBackward,
    Rope, RopeScaling, RopeTable, Rounding, Rule, SliceRows, SoftmaxCrossEntropy, SoftmaxCrossEntropyBackward, SwiGlu,
    SwiGluBackward, Zero,
};
use tightfit_ir::{DType, Op, Shape, Type};
use tightfit_testkit::rng::Rng;
use tightfit_testkit::suite::{Case, any_case, edge_cases};

fn cost(case: &Case) -> Cost {
    let results = case.results();
    case.op.cost(
        &case.types.iter().collect::<Vec<_>>(),
        &results.iter().collect::<Vec<_>>(),
    )
}

#[test]
fn references_give_what_type_rules_say_and_costs_are_at_least_the_results() {
    for case in edge_cases() {
        let results = case.results();
        let reference = case.op.reference(&case.inputs);
        let shapes: Vec<&Shape> = reference.iter().map(|result| &result.shape).collect();
        assert_eq!(shapes, results.iter().map(|ty| &ty.shape).collect::<Vec<_>>(), "{case}");
        // These leave most of their result as it is.
        if !matches!(
            case.op,
            Op::Reshape(_) | Op::Settle(_) | Op::EmbeddingBackward(_) | Op::KvAppend(_) | Op::PadRows(_)
        ) {
            let written: u64 = results.iter().map(Type::bytes).sum();
            assert!(cost(&case).bytes >= written, "{case}");
        }
    }
}

#[test]
fn every_aliasing_joins_a_result_and_an_operand_of_equal_size() {
    for case in edge_cases() {
        let results = case.results();
        for alias in case.op.aliases() {
            let (result, operand) = (&results[alias.output], &case.types[alias.input]);
            assert_eq!(result.bytes(), operand.bytes(), "{case}: {alias:?}");
        }
    }
}

#[test]
fn an_accumulating_variant_adds_its_addend_and_nothing_else() {
    let mut rng = Rng::new(7);
    for case in edge_cases() {
        let results = case.results();
        for output in 0..results.len() {
            let Some((op, addend)) = case.op.accumulating(output) else {
                continue;
            };
            if op == case.op {
                // It does so already: the place it names holds the addend.
                assert_eq!(case.types[addend], results[output], "{case}");
                continue;
            }
            let (mut types, mut inputs) = (case.types.clone(), case.inputs.clone());
            let added = rng.tensor(results[output].shape.clone(), 1.0);
            types.insert(addend, results[output].clone());
            inputs.insert(addend, added.clone());
            assert_eq!(op.infer(&types).as_ref(), Ok(&results), "{case}");
            let (plain, accumulated) = (case.op.reference(&case.inputs), op.reference(&inputs));
            for (i, (plain, accumulated)) in plain.iter().zip(&accumulated).enumerate() {
                let expected = if i == output { plain.plus(&added) } else { plain.clone() };
                let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * (1.0 + b.abs());
                assert!(
                    accumulated.data.iter().zip(&expected.data).all(near),
                    "{case}: result {i}"
                );
            }
            let in_place = op.aliases().iter().any(|a| a.output == output && a.input == addend);
            assert!(in_place, "{case}: result {output} can lie over its addend");
        }
    }
}

#[test]
fn addends_stand_in_the_order_of_their_results() {
    let none = Accumulate::NONE;
    assert!(none.is_none() && none.count() == 0 && none.operand(4, 0).is_none());
    let (second, addend) = none.with(4, 1);
    assert_eq!((addend, second.operand(4, 0), second.operand(4, 1)), (4, None, Some(4)));
    // The first result's addend goes before the second's.
    let (both, addend) = second.with(4, 0);
    assert_eq!((addend, both.count()), (4, 2));
    assert_eq!(
        (both.operand(4, 0), both.operand(4, 1), both.operand(4, 2)),
        (Some(4), Some(5), None)
    );
    let (all, addend) = both.with(4, 2);
    assert_eq!((addend, all.operand(4, 2)), (6, Some(6)));
    assert_eq!(both.with(4, 1), (both, 5));
}

/// An operation's cost on those operands.
fn cost_of(op: impl Into<Op>, types: &[Type]) -> Cost {
    let op = op.into();
    let results = op.infer(types).unwrap();
    op.cost(&types.iter().collect::<Vec<_>>(), &results.iter().collect::<Vec<_>>())
}

fn linear(bias: bool) -> Linear {
    Linear {
        bias,
        accumulate: Accumulate::NONE,
    }
}

fn attention(context: u64, window: Option<u64>) -> Attention {
    Attention {
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        scale: 1.0,
        context,
        window,
    }
}

#[test]
fn products_cost_two_flops_for_each_multiply_add() {
    let (t, n, k) = (7, 5, 3);
    let (x, weight, dy) = (Type::f32([t, k]), Type::f32([n, k]), Type::f32([t, n]));
    let flops = 2 * t * n * k;
    let forward = cost_of(linear(false), &[x.clone(), weight.clone()]);
    assert_eq!(forward.flops, flops);
    assert_eq!(forward.bytes, 4 * (t * k + n * k + t * n));
    assert_eq!(
        cost_of(LinearBackwardInput::default(), &[dy.clone(), weight.clone()]).flops,
        flops
    );
    assert_eq!(cost_of(LinearBackwardWeight::default(), &[x.clone(), dy]).flops, flops);
    let loss = |input_gradient, weight_gradient| LinearCrossEntropy {
        input_gradient,
        weight_gradient,
        ..LinearCrossEntropy::new(2, -100)
    };
    let operands = [x, weight, Type::i32([t]), Type::f32([1])];
    let alone = cost_of(loss(false, false), &operands).flops;
    assert!(alone >= flops);
    assert_eq!(cost_of(loss(true, false), &operands).flops, alone + flops);
    assert_eq!(cost_of(loss(true, true), &operands).flops, alone + 2 * flops);
}

#[test]
fn attention_costs_a_triangle_or_a_band() {
    let t = 64;
    let (q, kv, rows) = (Type::f32([t, 32]), Type::f32([t, 16]), Type::i32([t]));
    let operands = [q.clone(), kv.clone(), kv, rows];
    let flops = |context, window| cost_of(attention(context, window), &operands).flops;
    // Two products over those pairs, in all heads, two flops each.
    let of_pairs = |pairs| 2 * 2 * pairs * 4 * 8;
    assert_eq!(flops(t, None), of_pairs(t * (t + 1) / 2));
    assert_eq!(flops(16, None), of_pairs(4 * 16 * 17 / 2), "four documents");
    assert_eq!(
        flops(1000, None),
        flops(t, None),
        "a document is no longer than the rows"
    );
    let (window, full) = (24, t - 24);
    let band = window * (window + 1) / 2 + full * window;
    assert_eq!(flops(t, Some(window)), of_pairs(band));
    assert_eq!(flops(1000, Some(window)), of_pairs(band));
    assert_eq!(flops(16, Some(window)), flops(16, None));
    assert_eq!(flops(t, Some(t)), flops(t, None), "a window that hides nothing");
    let [query, key, value, doc_start] = operands.clone();
    let saved = [query.clone(), Type::f32([t, 4]), query.clone()];
    let backward = [[query, key, value, doc_start].to_vec(), saved.to_vec()].concat();
    let ratio = cost_of(AttentionBackward(attention(t, None)), &backward).flops as f64 / flops(t, None) as f64;
    assert_eq!(ratio, 2.5, "five products instead of two");
}

#[test]
fn costs_of_absurd_sizes_saturate() {
    let huge = u64::MAX / 2;
    let (x, weight) = (Type::f32([huge, huge]), Type::f32([huge, huge]));
    let cost = cost_of(linear(false), &[x, weight]);
    assert_eq!((cost.flops, cost.bytes), (u64::MAX, u64::MAX));
}

/// Operands that an operation refuses, and a part of the message.
fn refusals() -> Vec<(Op, Vec<Type>, &'static str)> {
    let m = |rows, cols| Type::f32([rows, cols]);
    let v = |n| Type::f32([n]);
    let ids = |n| Type::i32([n]);
    let norm = || RmsNorm { eps: 1e-5 };
    let norm_backward = RmsNormBackward {
        input: true,
        weight: true,
        accumulate: Accumulate::NONE,
    };
    let layer_norm_backward = LayerNormBackward {
        input: true,
        weight: true,
        bias: true,
        accumulate: Accumulate::NONE,
    };
    let embedding_backward = EmbeddingBackward {
        vocab_size: 5,
        accumulate: Accumulate::NONE,
    };
    let adamw = |factor| AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        factor,
        rounding: Rounding::Nearest,
    };
    let at_random = AdamW {
        rounding: Rounding::Stochastic { key: 1 },
        ..adamw(false)
    };
    let apollo = |rank| Apollo {
        rank,
        refresh: 200,
        key: 1,
        growth: 1.01,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        factor: false,
        rounding: Rounding::Nearest,
    };
    let heads = |heads, kv_heads| Attention {
        heads,
        kv_heads,
        ..attention(4, None)
    };
    let loss = LinearCrossEntropy::new(4, -100);
    let gelu = Gelu {
        approximate: tightfit_ir::op::Approximate::None,
    };
    let wrong_addend = LinearCrossEntropy {
        weight_gradient: true,
        accumulate: Accumulate::NONE.with(4, 0).0,
        ..loss.clone()
    };
    let table = |theta, scaling| -> Op {
        let head_dim = 4;
        RopeTable {
            head_dim,
            theta,
            scaling,
        }
        .into()
    };
    let llama3 = |low_freq_factor, high_freq_factor| {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: 8192.0,
        };
        table(1e4, Some(scaling))
    };
    let cached = |heads, window| CachedAttention {
        heads,
        kv_heads: 2,
        head_dim: 8,
        scale: 1.0,
        window,
    };
    let slice = |start, rows| -> Op { SliceRows { start, rows }.into() };
    let pad = |start, accumulate| -> Op {
        let total = 8;
        PadRows {
            start,
            total,
            accumulate,
        }
        .into()
    };
    let sixteen = |n| [m(4, 32), m(4, 16), m(4, 16), ids(n)].to_vec();
    vec![
        (Add {}.into(), vec![m(2, 3), m(3, 2)], "f32[3x2], expected f32[2x3]"),
        (Add {}.into(), vec![ids(2), ids(2)], "expected floating-point numbers"),
        (
            heads(4, 3).into(),
            sixteen(4),
            "heads is 4, which kv_heads 3 does not divide",
        ),
        (heads(4, 0).into(), sixteen(4), "kv_heads must be at least 1"),
        (
            heads(2, 2).into(),
            sixteen(4),
            "q's columns is 32, heads·head_dim is 16",
        ),
        (heads(4, 4).into(), sixteen(4), "k is f32[4x16], expected f32[4x32]"),
        (heads(4, 2).into(), sixteen(3), "doc_start's rows is 3, rows is 4"),
        (attention(4, Some(0)).into(), sixteen(4), "window must be at least 1"),
        (
            AttentionBackward(heads(4, 2)).into(),
            [sixteen(4), vec![m(4, 32), m(4, 2), m(4, 32)]].concat(),
            "lse is f32[4x2], expected f32[4x4]",
        ),
        (
            SoftmaxCrossEntropy { ignore_index: -1 }.into(),
            vec![m(2, 3), ids(3), v(1)],
            "targets's rows is 3",
        ),
        (
            SoftmaxCrossEntropy { ignore_index: -1 }.into(),
            vec![m(2, 3), ids(2), v(2)],
            "token_count is f32[2]",
        ),
        (
            SoftmaxCrossEntropyBackward {
                ignore_index: -1,
                scaled: false,
            }
            .into(),
            vec![m(2, 3), v(3), ids(2), v(1)],
            "lse is f32[3], expected f32[2]",
        ),
        (
            Embedding::default().into(),
            vec![v(2), m(5, 3)],
            "ids is f32[2], expected i32 of rank 1",
        ),
        (
            Embedding::default().into(),
            vec![ids(2), v(3)],
            "weight is f32[3], expected floating-point numbers of rank 2",
        ),
        (
            embedding_backward.into(),
            vec![ids(2), m(3, 4)],
            "ids's rows is 2, rows is 3",
        ),
        (
            gelu.into(),
            vec![ids(2)],
            "x is i32[2], expected floating-point numbers",
        ),
        (
            LayerNorm { eps: 1e-5 }.into(),
            vec![m(2, 3), v(3), v(2)],
            "bias is f32[2], expected floating-point numbers of [3]",
        ),
        (
            layer_norm_backward.into(),
            vec![m(2, 3), v(3), v(2), v(3), m(2, 3)],
            "rstd is f32[3], expected f32[2]",
        ),
        (
            linear(false).into(),
            vec![m(2, 3), m(4, 5)],
            "weight's columns is 5, x's columns is 3",
        ),
        (linear(true).into(), vec![m(2, 3), m(4, 3)], "takes 3 operands, got 2"),
        (
            linear(true).into(),
            vec![m(2, 3), m(4, 3), v(3)],
            "bias is f32[3], expected floating-point numbers of [4]",
        ),
        (
            LinearBackwardInput::default().into(),
            vec![m(2, 3), m(4, 5)],
            "weight's rows is 4, dy's columns is 3",
        ),
        (
            LinearBackwardWeight::default().into(),
            vec![m(2, 3), m(4, 5)],
            "dy's rows is 4, x's rows is 2",
        ),
        (
            BiasBackward::default().into(),
            vec![v(2)],
            "dy is f32[2], expected floating-point numbers of rank 2",
        ),
        (
            LinearCrossEntropy::new(0, -100).into(),
            vec![m(2, 3), m(5, 3), ids(2), v(1)],
            "chunk must be at least 1",
        ),
        (
            wrong_addend.into(),
            vec![m(2, 3), m(5, 3), ids(2), v(1), v(1)],
            "result 0 cannot accumulate",
        ),
        (
            loss.into(),
            vec![m(2, 3), m(5, 4), ids(2), v(1)],
            "weight's columns is 4, x's columns is 3",
        ),
        (
            adamw(false).into(),
            vec![v(3), v(3), v(2), v(3), v(1), v(1)],
            "m is f32[2], expected f32[3]",
        ),
        (
            adamw(true).into(),
            vec![v(3), v(3), v(3), v(3), v(1), v(1)],
            "takes 7 operands, got 6",
        ),
        (
            at_random.into(),
            vec![v(3), v(3), v(3), v(3), v(1), v(1)],
            "which leaves nothing to round at random",
        ),
        (
            AdamW8bit(adamw(false)).into(),
            vec![m(20, 20), m(20, 20), m(20, 20), v(2), m(20, 20), v(2), v(1), v(1)],
            "m is f32[20x20], expected u8[20x20]",
        ),
        (
            apollo(2).into(),
            vec![m(3, 5), m(3, 5), m(5, 2), m(3, 2), v(1), v(1), v(1)],
            "v is f32[3x2], expected f32[5x2]",
        ),
        (
            apollo(0).into(),
            vec![m(3, 5), m(3, 5), m(5, 0), m(5, 0), v(1), v(1), v(1)],
            "rank must be at least 1",
        ),
        (
            GlobalNorm::default().into(),
            vec![v(1), v(3)],
            "operand 1 is f32[3], expected f32[1]",
        ),
        (GlobalNorm::default().into(), vec![], "takes 1 operands, got 0"),
        (Norm {}.into(), vec![ids(3)], "x is i32[3], expected f32"),
        (
            Reshape { shape: [5].into() }.into(),
            vec![m(2, 3)],
            "new shape's elements is 5, the operand's is 6",
        ),
        (
            norm().into(),
            vec![v(3), v(3)],
            "x is f32[3], expected floating-point numbers of rank 2",
        ),
        (
            norm().into(),
            vec![m(2, 3), v(2)],
            "weight is f32[2], expected floating-point numbers of [3]",
        ),
        (
            norm_backward.into(),
            vec![m(2, 3), v(3), v(2), m(3, 3)],
            "dy is f32[3x3], expected f32[2x3]",
        ),
        (
            Rope { inverse: false }.into(),
            vec![m(2, 6), m(2, 4)],
            "6 columns, which head_dim 4 does not divide",
        ),
        (
            Rope { inverse: false }.into(),
            vec![m(2, 6), m(3, 2)],
            "table is f32[3x2], expected f32[2x2]",
        ),
        (
            Rope { inverse: false }.into(),
            vec![m(2, 6), m(2, 3)],
            "head_dim is 3, expected an even number",
        ),
        (
            RopeTable {
                head_dim: 3,
                theta: 1e4,
                scaling: None,
            }
            .into(),
            vec![ids(2)],
            "head_dim is 3, expected an even number",
        ),
        (
            RopeTable {
                head_dim: 0,
                theta: 1e4,
                scaling: None,
            }
            .into(),
            vec![ids(2)],
            "head_dim must be at least 1",
        ),
        (table(0.0, None), vec![ids(2)], "theta is 0, expected a positive number"),
        (
            table(f64::NAN, None),
            vec![ids(2)],
            "theta is NaN, expected a positive number",
        ),
        (
            table(1e4, Some(RopeScaling::Linear { factor: -1.0 })),
            vec![ids(2)],
            "factor is -1, expected a positive number",
        ),
        (llama3(1.0, 1.0), vec![ids(2)], "expected more than low_freq_factor 1"),
        (llama3(0.0, 1.0), vec![ids(2)], "low_freq_factor is 0, expected"),
        (llama3(1.0, 1e39), vec![ids(2)], "high_freq_factor is inf, expected"),
        (
            KvAppend {}.into(),
            vec![m(8, 3), m(2, 4), ids(1)],
            "rows is f32[2x4], expected f32[2x3]",
        ),
        (
            KvAppend {}.into(),
            vec![m(8, 3), m(9, 3), ids(1)],
            "9 rows do not fit the cache's 8",
        ),
        (
            KvAppend {}.into(),
            vec![m(8, 3), m(2, 3), ids(2)],
            "start's rows is 2, rows is 1",
        ),
        (slice(0, 0), vec![m(8, 3)], "rows must be at least 1"),
        (slice(7, 2), vec![m(8, 3)], "2 rows from row 7 on do not lie in 8"),
        (
            slice(u64::MAX, 1),
            vec![m(8, 3)],
            "1 rows from row 18446744073709551615 on do not lie in 8",
        ),
        (pad(4, Accumulate::NONE), vec![m(0, 3)], "rows must be at least 1"),
        (
            pad(4, Accumulate::NONE),
            vec![m(5, 3)],
            "5 rows from row 4 on do not lie in 8",
        ),
        (
            pad(4, Accumulate::NONE.with(1, 0).0),
            vec![m(4, 3), m(8, 4)],
            "the addend is f32[8x4], expected f32[8x3]",
        ),
        (
            cached(4, Some(0)).into(),
            vec![m(2, 32), m(9, 16), m(9, 16), ids(1)],
            "window must be at least 1",
        ),
        (
            cached(3, None).into(),
            vec![m(2, 24), m(9, 16), m(9, 16), ids(1)],
            "heads is 3, which kv_heads 2 does not divide",
        ),
        (
            cached(4, None).into(),
            vec![m(2, 32), m(0, 16), m(0, 16), ids(1)],
            "k_cache's rows must be at least 1",
        ),
        (
            cached(4, None).into(),
            vec![m(2, 32), m(9, 32), m(9, 16), ids(1)],
            "k_cache is f32[9x32], expected f32[9x16]",
        ),
        (
            cached(4, None).into(),
            vec![m(2, 32), m(9, 16), m(8, 16), ids(1)],
            "v_cache is f32[8x16], expected f32[9x16]",
        ),
        (
            SwiGlu {}.into(),
            vec![m(2, 3), m(2, 4)],
            "up is f32[2x4], expected f32[2x3]",
        ),
        (
            SwiGluBackward {}.into(),
            vec![m(2, 3), m(2, 3), m(3, 3)],
            "dy is f32[3x3], expected f32[2x3]",
        ),
        (Zero { ty: v(2) }.into(), vec![v(2)], "takes 0 operands, got 1"),
    ]
}

#[test]
fn type_rules_refuse_with_the_operation_and_both_sides() {
    let wrong: Vec<String> = refusals()
        .into_iter()
        .filter_map(|(op, types, words)| match op.infer(&types) {
            Ok(_) => Some(format!("{op:?} takes {types:?}")),
            Err(error) => {
                let said = error.to_string();
                let right = said.starts_with(op.name()) && said.contains(words);
                (!right).then(|| format!("{said:?} does not say {words:?}"))
            }
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// One operand more or less, of another dtype, or of another rank, fits no operation, save a few that take any.
    #[test]
    fn operands_that_do_not_fit_are_refused(case in any_case(), at: prop::sample::Index, what in 0..3) {
        let name = case.op.name();
        let mut types = case.types.clone();
        prop_assume!(!types.is_empty());
        let operand = at.index(types.len());
        match what {
            0 => drop(types.remove(operand)),
            1 => types[operand].dtype = DType::U8,
            _ => types[operand].shape.0.push(2),
        }
        // Codes are bytes.
        prop_assume!(types != case.types);
        let takes_any = match what {
            0 => name == "global_norm" && case.types.len() > 1,
            1 => ["reshape", "fetch", "store"].contains(&name),
            _ => ["cast", "norm", "gelu", "fetch", "store"].contains(&name),
        };
        match case.op.infer(&types) {
            Err(error) => prop_assert!(error.to_string().starts_with(name), "{}", error),
            Ok(_) => prop_assert!(takes_any, "{} takes {:?}", case, types),
        }
    }
}
