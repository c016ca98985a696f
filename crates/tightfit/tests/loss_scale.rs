//! Gradients that overflow `f16`, in real kernels: an update that would not be finite changes nothing but the scale, and training goes
//! on as soon as gradients fit.

#[path = "common/flags.rs"]
mod flags;
#[path = "common/run.rs"]
mod run;

use std::collections::BTreeMap;

use tightfit::data::Text;
use tightfit::train::Trainer;
use tightfit::{LossScale, OptimizerConfig, Session, Step, plan_for_cpu, training_step};
use tightfit_ir::DType;
use tightfit_pass::{TRAIN, autocast, update_in_backward};

const FLAGS: &str = "--hidden-size 64 --intermediate-size 96 --heads 2 --kv-heads 1 --layers 2 --batch 2 --seq 32 --threads 2 \
                     --precision f16-mixed --clip-norm none";

/// The job of the flags, with a loss that is scaled by 2⁴⁰ at first, which no `f16` gradient can hold.
fn step(in_backward: bool) -> Step {
    let settings = flags::settings(FLAGS).unwrap();
    let forward = settings.fresh_model().loss(settings.micro_batch_shape()).unwrap();
    let config = OptimizerConfig {
        loss_scale: Some(LossScale {
            init: 2_f64.powi(40),
            growth_interval: 3,
            ..LossScale::default()
        }),
        ..settings.optimizer()
    };
    let step = training_step(autocast(forward, DType::F16).unwrap(), &config, 1, None).unwrap();
    match in_backward {
        true => update_in_backward(step).unwrap(),
        false => step,
    }
}

/// What a run leaves but for the scale's own numbers, and those.
fn state(session: &mut Session) -> (BTreeMap<String, Vec<f32>>, [f32; 3]) {
    let mut tensors = run::persistent(session);
    let scale =
        ["scale", "good_steps", "skipped"].map(|name| tensors.remove(&format!("loss_scale.{name}")).unwrap()[0]);
    (tensors, scale)
}

#[test]
fn updates_that_overflow_are_skipped_until_gradients_fit() {
    for in_backward in [false, true] {
        let settings = flags::settings(FLAGS).unwrap();
        let plan = plan_for_cpu(step(in_backward), settings.threads).unwrap();
        let mut session = Session::new(plan, settings.threads).unwrap();
        session.initialise(settings.seed).unwrap();
        let text = Text::generated(&settings).unwrap();
        let mut trainer = Trainer::new(&settings, &text);
        let (mut skipped, mut applied, mut grown) = (0, 0, false);
        for number in 1..=60 {
            let (before, [scale, ..]) = state(&mut session);
            trainer.start(number, 1e-3).unwrap();
            session.run(TRAIN, &mut trainer).unwrap();
            assert!(
                trainer.loss().is_finite(),
                "the loss is read as it is: {}",
                trainer.loss()
            );
            let (after, [next, good, count]) = state(&mut session);
            if next < scale {
                assert_eq!(next, scale / 2.0);
                assert!(before == after, "step {number} was skipped");
                assert_eq!(good, 0.0);
                skipped += 1;
            } else {
                assert!(before != after, "step {number} was applied");
                grown |= next == scale * 2.0;
                applied += 1;
            }
            assert_eq!(count, skipped as f32);
        }
        // 2⁴⁰ is far too large, and what fits is found.
        assert!(skipped >= 10, "{skipped} updates were skipped");
        assert!(applied >= 20 && grown, "{applied} updates were applied");
    }
}
