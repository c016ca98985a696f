//! A model and its rewrite on the same data, through the interpreter.

use tightfit_ir::Forward;
use tightfit_pass::{PassError, autodiff};
use tightfit_testkit::data::batch;
use tightfit_testkit::interpret::{Named, initial, run};
use tightfit_testkit::random::RandomModel;

/// The loss and every gradient of a model, in `f64`; the loss alone where nothing trains.
fn results(forward: &Forward, feed: &Named) -> Named {
    match autodiff(forward.clone()) {
        Ok(step) => run(&step.routines[0].programs[0].graph, feed).outputs(),
        Err(PassError::Illegal { message, .. }) if message.contains("nothing to train") => {
            run(&forward.graph, feed).outputs()
        }
        Err(error) => panic!("{error}\n{}", forward.graph),
    }
}

/// What differs between a model's results and those of its rewrite, by more than sums in another order can.
pub fn difference(model: &RandomModel, rewritten: &Forward, seed: u64) -> Option<String> {
    let mut feed = batch(model.batch, 1, seed).remove(0);
    feed.extend(initial(&model.forward.graph, seed));
    let (expected, found) = (results(&model.forward, &feed), results(rewritten, &feed));
    if !expected.keys().eq(found.keys()) {
        return Some(format!("{:?} became {:?}", expected.keys(), found.keys()));
    }
    expected.iter().find_map(|(name, want)| {
        let scale = want.data.iter().fold(1e-6, |max: f64, x| max.max(x.abs()));
        let differs = |(want, got): (&f64, &f64)| (want - got).abs().is_nan() || (want - got).abs() > 1e-11 * scale;
        let at = want.data.iter().zip(&found[name].data).position(differs)?;
        Some(format!(
            "{name}[{at}] is {}, was {}",
            found[name].data[at], want.data[at]
        ))
    })
}
