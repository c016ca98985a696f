//! How long a plan takes: its calls one after the other, its transfers beside them.

use tightfit_ir::Target;

use crate::calls::{Direction, Work};
use crate::plan::Plan;

/// What one run of a routine is expected to take, repeats included. All in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// From begin to end.
    pub seconds: f64,
    /// In which kernels run.
    pub compute: f64,
    /// In which transfers run.
    pub link: f64,
    /// Bytes fetched and stored.
    pub link_bytes: u64,
}

impl Prediction {
    /// In which kernels wait for transfers.
    pub fn stalled(&self) -> f64 {
        (self.seconds - self.compute).max(0.0)
    }
}

impl Plan {
    /// Predicts a routine's time on a target, whose speeds need not be those that the plan was made with.
    pub fn predict(&self, routine: usize, target: &dyn Target) -> Prediction {
        let link = target.link();
        let mut total = Prediction::default();
        for program in self.calls(routine) {
            // When the kernels, and when the link, are free again.
            let (mut clock, mut free) = (0.0_f64, 0.0_f64);
            let mut run = Prediction::default();
            let mut done = Vec::new();
            for action in &program.actions {
                match &action.work {
                    Work::Transfer(transfer) => {
                        let bytes = transfer.memory.end - transfer.memory.start;
                        let rate = match transfer.direction {
                            Direction::Fetch => link.read,
                            Direction::Store => link.write,
                        };
                        let seconds = bytes as f64 / rate;
                        free = free.max(clock) + seconds;
                        done.push(free);
                        run.link += seconds;
                        run.link_bytes += bytes;
                    }
                    Work::Call(call) => {
                        if let Some(&ready) = action.after.checked_sub(1).and_then(|last| done.get(last)) {
                            clock = clock.max(ready);
                        }
                        let inputs: Vec<_> = call.inputs.iter().map(|slot| &slot.ty).collect();
                        let outputs: Vec<_> = call.outputs.iter().map(|slot| &slot.ty).collect();
                        let seconds = target.seconds(&call.op, &inputs, &outputs);
                        clock += seconds;
                        run.compute += seconds;
                    }
                }
            }
            let repeat = f64::from(program.repeat);
            total.seconds += clock.max(free) * repeat;
            total.compute += run.compute * repeat;
            total.link += run.link * repeat;
            total.link_bytes += run.link_bytes * u64::from(program.repeat);
        }
        total
    }
}
