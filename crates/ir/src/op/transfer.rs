//! Copies between memory and the lower tier. They run beside the computation, in the order in which they are begun.
//!
//! A `fetch` begins where it stands: its result has its memory from there on, and whoever reads it waits until it is there. A
//! `store` begins where it stands, too, and its operand must stay as it is until it is done: a `settle` further on, which runs
//! nothing, says how long the operand's memory is kept for that.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, AliasKind, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::{Tier, Type};

/// `x on the lower tier → x in memory`, any dtype and shape.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fetch {}

impl Rule for Fetch {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("fetch", inputs, 1)?;
        on_tier(&check, "x", &inputs[0], Tier::Lower)?;
        Ok(vec![inputs[0].on(Tier::Memory)])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(0, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        vec![inputs[0].clone()]
    }
}

/// `x in memory (, old on the lower tier) → x on the lower tier`, over `old` if it is given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Store {
    /// Whether there is an operand that the result takes the place of.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub over: bool,
}

impl Rule for Store {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("store", inputs, 1 + usize::from(self.over))?;
        on_tier(&check, "x", &inputs[0], Tier::Memory)?;
        let stored = inputs[0].on(Tier::Lower);
        if self.over {
            check.exactly(1, "what it replaces", &stored)?;
        }
        Ok(vec![stored])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(0, &inputs[..1], outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        self.over.then(|| Alias::in_place(0, 1)).into_iter().collect()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        vec![inputs[0].clone()]
    }
}

/// `stored: the result of a store, x: its operand → stored`, a view: until here, `x` keeps its memory for the store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Settle {}

impl Rule for Settle {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("settle", inputs, 2)?;
        on_tier(&check, "stored", &inputs[0], Tier::Lower)?;
        check.exactly(1, "x", &inputs[0].on(Tier::Memory))?;
        Ok(vec![inputs[0].clone()])
    }

    fn cost(&self, _inputs: &[&Type], _outputs: &[&Type]) -> Cost {
        Cost::default()
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias {
            output: 0,
            input: 0,
            kind: AliasKind::View,
        }]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        vec![inputs[0].clone()]
    }
}

fn on_tier(check: &Check<'_>, what: &str, ty: &Type, tier: Tier) -> Result<(), OpError> {
    if ty.tier != tier {
        let place = match tier {
            Tier::Memory => "memory",
            Tier::Lower => "the lower tier",
        };
        return check.invalid(format!("{what} is {ty}, expected it in {place}"));
    }
    Ok(())
}
