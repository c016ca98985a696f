//! The search on decoders of real shapes; weights are never touched.

use std::time::Instant;

use tightfit_cpu::CpuTarget;
use tightfit_cpu::simd::Isa;
use tightfit_ir::{Phase, Step};
use tightfit_model::family::FAMILIES;
use tightfit_model::{BatchShape, DecoderConfig, LayerType};
use tightfit_pass::{Adam, Optimizer, OptimizerConfig, autodiff, optimizer};
use tightfit_plan::report::format_bytes;
use tightfit_search::blocks::Blocks;
use tightfit_search::explain::Reason;
use tightfit_search::{Backend, Fit, Limits, Recompute, fit};

const NO_LIMIT: Limits = Limits {
    arena_bytes: u64::MAX,
    lower_tier_bytes: u64::MAX,
};

fn target() -> CpuTarget {
    CpuTarget::with_isa(Isa::Avx2, 2)
}

fn training(config: &DecoderConfig, batch: u64, seq: u64) -> Step {
    let shape = BatchShape {
        batch,
        seq,
        loss_chunk: 512,
    };
    let adamw = OptimizerConfig {
        optimizer: Optimizer::AdamW(Adam {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
        }),
        weight_decay: 0.1,
        clip_norm: None,
        loss_scale: None,
        seed: 1,
    };
    optimizer(autodiff(config.loss(shape).unwrap()).unwrap(), &adamw).unwrap()
}

fn smollm2() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 49152,
        hidden_size: 576,
        intermediate_size: 1536,
        num_hidden_layers: 30,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: Some(64),
        tie_word_embeddings: true,
        ..DecoderConfig::default()
    }
}

fn llama_7b() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 32000,
        hidden_size: 4096,
        intermediate_size: 11008,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 32,
        head_dim: Some(128),
        tie_word_embeddings: false,
        ..DecoderConfig::default()
    }
}

fn small(family: &str) -> DecoderConfig {
    let family = FAMILIES.iter().find(|known| known.model_type == family).unwrap();
    DecoderConfig {
        family,
        vocab_size: 512,
        hidden_size: 64,
        intermediate_size: 160,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: Some(16),
        ..(family.defaults)()
    }
}

fn run(config: &DecoderConfig, batch: u64, seq: u64, limits: Limits, recompute: Recompute) -> Fit {
    fit(
        training(config, batch, seq),
        &Backend::of(&target()),
        &limits,
        recompute.into(),
    )
    .unwrap()
}

/// The parts that some block runs again, in the order of the block.
fn recomputed(fit: &Fit) -> Vec<&str> {
    let ways = fit.explanation.classes.iter().flat_map(|class| &class.ways);
    let mut parts: Vec<&str> = ways.flat_map(|way| &way.recomputed).map(|part| &*part.part).collect();
    parts.dedup();
    parts
}

#[test]
fn alike_blocks_are_one_class() {
    for family in FAMILIES {
        let step = training(&small(family.model_type), 1, 64);
        let blocks = Blocks::of(&step.routines[0].programs[0].graph, &target());
        let sizes: Vec<usize> = blocks.classes.iter().map(|class| class.blocks.len()).collect();
        assert_eq!(sizes, [6], "{}", family.model_type);
        let class = &blocks.classes[0];
        assert_eq!(class.blocks[3].name, "model.layers.3");
        let last = class.parts.last().unwrap();
        assert_eq!(
            (&*last.label, last.saved_bytes()),
            ("mlp.down_proj/linear", 0),
            "it enters the next block"
        );
    }
}

#[test]
fn blocks_that_differ_are_classes_of_their_own() {
    let mut config = small("qwen3");
    config.sliding_window = Some(32);
    let windowed = |layer| match layer % 3 {
        0 => LayerType::Full,
        _ => LayerType::Sliding,
    };
    config.layer_types = Some((0..6).map(windowed).collect());
    let step = training(&config, 1, 64);
    let blocks = Blocks::of(&step.routines[0].programs[0].graph, &target());
    let sizes: Vec<usize> = blocks.classes.iter().map(|class| class.blocks.len()).collect();
    assert_eq!(sizes, [2, 4]);
}

#[test]
fn cheap_results_go_first() {
    let fit = run(&smollm2(), 4, 512, NO_LIMIT, Recompute::Percent(66.0));
    println!("{}", fit.explanation);
    let parts = recomputed(&fit);
    for cheap in [
        "input_layernorm/rms_norm",
        "post_attention_layernorm/rms_norm",
        "mlp/swiglu",
    ] {
        assert!(parts.contains(&cheap), "{cheap} is kept, {parts:?} are not");
    }
    assert!(!parts.iter().any(|part| part.contains("linear")), "{parts:?}");
}

#[test]
fn half_of_the_activations_cost_a_tenth_of_the_time_at_most() {
    let fit = run(&smollm2(), 4, 512, NO_LIMIT, Recompute::Percent(50.0));
    println!("{}", fit.explanation);
    let explanation = &fit.explanation;
    assert!(2 * explanation.kept_bytes <= explanation.saved_bytes);
    assert!(explanation.recompute_seconds < 0.10 * explanation.step_seconds);
    assert!(explanation.gap < 0.005, "gap {}", explanation.gap);
}

#[test]
fn a_checkpoint_per_block_keeps_nothing_inside() {
    let fit = run(&smollm2(), 4, 512, NO_LIMIT, Recompute::Block);
    println!("{}peak {}", fit.explanation, format_bytes(fit.plan.peak()));
    assert_eq!(fit.explanation.kept_bytes, 0);
    assert_eq!(fit.explanation.reason, Reason::WholeBlocks);
    assert!(!recomputed(&fit).contains(&"mlp.down_proj/linear"));
    // One block at a time is there again: the order is that of the backward.
    let graph = &fit.plan.step().routines[0].programs[0].graph;
    let order = fit.plan.order(0, 0).iter().map(|&id| graph.node(id));
    let layer = |scope: &str| scope.split('.').nth(2).unwrap().parse::<u32>().unwrap();
    let in_layers = order.filter(|node| node.phase != Phase::Forward && node.scope.starts_with("model.layers."));
    let layers: Vec<u32> = in_layers.map(|node| layer(&node.scope)).collect();
    assert!(layers.is_sorted_by(|a, b| a >= b), "{layers:?}");
    assert!(fit.explanation.recompute_seconds < 0.30 * fit.explanation.step_seconds);
}

#[test]
fn less_is_kept_the_less_is_asked_for_and_it_costs_more() {
    let mut last = (u64::MAX, -1.0);
    for percent in [100.0, 90.0, 75.0, 60.0, 50.0, 40.0, 25.0, 10.0, 0.0] {
        let fit = run(&smollm2(), 4, 512, NO_LIMIT, Recompute::Percent(percent));
        let at = (fit.explanation.kept_bytes, fit.explanation.recompute_seconds);
        println!(
            "{percent:>5} %: kept {:>10}, peak {:>10}, {:5.2} % more time, gap {:.3} %",
            format_bytes(at.0),
            format_bytes(fit.plan.peak()),
            100.0 * at.1 / fit.explanation.step_seconds,
            100.0 * fit.explanation.gap
        );
        assert!(at.0 <= last.0 && at.1 >= last.1);
        assert!(at.0 as f64 <= percent / 100.0 * fit.explanation.saved_bytes as f64);
        last = at;
    }
}

#[test]
fn what_fits_is_left_alone() {
    let fit = run(&small("llama"), 1, 64, NO_LIMIT, Recompute::Auto);
    assert_eq!((fit.explanation.reason, fit.rounds), (Reason::Fits, 1));
    assert!(fit.choice.programs[0].recompute.is_empty());
}

#[test]
fn what_does_not_fit_is_made_to() {
    let config = smollm2();
    let whole = run(&config, 4, 512, NO_LIMIT, Recompute::None).plan.arena_bytes();
    let least = run(&config, 4, 512, NO_LIMIT, Recompute::Block).plan.arena_bytes();
    println!(
        "all kept {}, one checkpoint per block {}",
        format_bytes(whole),
        format_bytes(least)
    );
    let mut last = 0.0;
    for tenth in (1..10).rev() {
        let arena_bytes = least + (whole - least) / 10 * tenth;
        let limits = Limits {
            arena_bytes,
            ..NO_LIMIT
        };
        let fit = run(&config, 4, 512, limits, Recompute::Auto);
        let explanation = &fit.explanation;
        println!(
            "limit {:>10}: arena {:>10}, kept {:>10}, {:.2} % more time, {} rounds",
            format_bytes(arena_bytes),
            format_bytes(fit.plan.arena_bytes()),
            format_bytes(explanation.kept_bytes),
            100.0 * explanation.recompute_seconds / explanation.step_seconds,
            fit.rounds
        );
        assert!(fit.fits);
        assert!(fit.plan.arena_bytes() <= arena_bytes);
        assert!(fit.plan.arena_bytes() >= arena_bytes - arena_bytes / 50, "room is left");
        assert!(explanation.recompute_seconds >= last);
        last = explanation.recompute_seconds;
        let clones = fit.plan.step().routines[0].programs[0].graph.nodes.iter();
        assert_eq!(
            clones.filter(|n| n.phase == Phase::Recompute).count(),
            fit.choice.programs[0].recompute.len()
        );
    }
}

#[test]
fn what_cannot_fit_is_said_to() {
    let limits = Limits {
        arena_bytes: 1 << 20,
        ..NO_LIMIT
    };
    let fit = run(&small("llama"), 1, 64, limits, Recompute::Auto);
    assert!(!fit.fits);
    assert_eq!(fit.explanation.kept_bytes, 0);
}

/// Times are printed, not asserted: `cargo test --release -p tightfit-search --test decoders -- --nocapture seven`.
#[test]
fn seven_billion_parameters_are_planned() {
    let step = training(&llama_7b(), 4, 2048);
    let whole = fit(step.clone(), &Backend::of(&target()), &NO_LIMIT, Recompute::None.into())
        .unwrap()
        .plan
        .arena_bytes();
    for saved in [8, 24] {
        let limits = Limits {
            arena_bytes: whole - (saved << 30),
            ..NO_LIMIT
        };
        let start = Instant::now();
        let fit = fit(step.clone(), &Backend::of(&target()), &limits, Recompute::Auto.into()).unwrap();
        println!(
            "{:?}, {} rounds, arena {} of {}",
            start.elapsed(),
            fit.rounds,
            format_bytes(fit.plan.arena_bytes()),
            format_bytes(whole)
        );
        println!("{}", fit.explanation);
        assert!(fit.fits);
    }
}
