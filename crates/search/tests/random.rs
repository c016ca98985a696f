//! The search on random models, limits and settings: plans are valid, limits hold where they are said to, results are the same bits.

use proptest::prelude::*;
use tightfit_cpu::CpuTarget;
use tightfit_cpu::simd::Isa;
use tightfit_pass::{accumulate, autodiff};
use tightfit_search::{Backend, Limits, Recompute, fit};
use tightfit_testkit::interpret::Interpreter;
use tightfit_testkit::{data, random};

fn recompute() -> impl Strategy<Value = Recompute> {
    prop_oneof![
        4 => Just(Recompute::Auto),
        1 => Just(Recompute::None),
        1 => Just(Recompute::Block),
        1 => (0..4096_u64).prop_map(Recompute::Bytes),
        1 => (0.0..110.0).prop_map(Recompute::Percent),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_job_is_planned_and_computes_the_same(
        model in random::model(),
        recompute in recompute(),
        limit in 0.3..1.1_f64,
        micro_batches in 1_u32..3,
        seed in any::<u64>(),
    ) {
        let Ok(step) = autodiff(model.forward) else {
            // Nothing to train reaches the loss.
            return Ok(());
        };
        let step = accumulate(step, micro_batches).unwrap();
        let target = CpuTarget::with_isa(Isa::Avx2, 1);
        let limits = |arena_bytes| Limits { arena_bytes, lower_tier_bytes: u64::MAX };
        let plain = fit(step.clone(), &Backend::of(&target), &limits(u64::MAX), Recompute::None.into()).unwrap();
        prop_assert_eq!(plain.plan.step(), &step);

        let arena_bytes = (plain.plan.arena_bytes() as f64 * limit) as u64;
        let found = fit(step.clone(), &Backend::of(&target), &limits(arena_bytes), recompute.into()).unwrap();
        prop_assert_eq!(found.fits, found.plan.arena_bytes() <= arena_bytes);
        prop_assert_eq!(&found.choice.apply(step.clone(), &target).unwrap(), found.plan.step());
        let explanation = &found.explanation;
        let ways = explanation.classes.iter().flat_map(|class| &class.ways);
        let kept: u64 = ways.map(|way| way.kept_bytes * way.blocks.len() as u64).sum();
        prop_assert_eq!(kept, explanation.kept_bytes);
        prop_assert!(kept <= explanation.saved_bytes);
        if let Recompute::Auto = recompute {
            prop_assert!(found.plan.arena_bytes() <= plain.plan.arena_bytes());
        }

        let batch = data::batch(model.batch, micro_batches as usize, seed);
        let run = |step| Interpreter::new(step, seed).run(&step.routines[0], |_, repeat| batch[repeat as usize % batch.len()].clone());
        prop_assert_eq!(run(found.plan.step()), run(&step));
    }
}
