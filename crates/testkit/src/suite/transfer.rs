//! Cases of the copies between memory and the lower tier.

use tightfit_ir::Tier;
use tightfit_ir::op::{Fetch, Settle, Store};

use super::{Cases, Operand};

pub(super) fn fetch(cases: &mut Cases) {
    let stored = lower(matrix(cases));
    cases.add("from the lower tier", Fetch {}, vec![stored]);
}

pub(super) fn store(cases: &mut Cases) {
    let (new, old) = (matrix(cases), lower(matrix(cases)));
    cases.add("to new bytes", Store { over: false }, vec![new.clone()]);
    cases.add("over old bytes", Store { over: true }, vec![new, old]);
}

pub(super) fn settle(cases: &mut Cases) {
    let x = matrix(cases);
    cases.add("a stored matrix", Settle {}, vec![lower(x.clone()), x]);
}

fn matrix(cases: &mut Cases) -> Operand {
    cases.activation([cases.dims.rows, cases.dims.cols], 1.0)
}

fn lower((ty, tensor): Operand) -> Operand {
    (ty.on(Tier::Lower), tensor)
}
