//! How fast a machine is: what predicted times are made of.

use tightfit_ir::Link;
use tightfit_ir::op::{Cost, Op};

/// Measured speeds of one machine with one number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    /// Floating-point operations of matrix products, per second.
    pub product_flops: f64,
    /// Floating-point operations of everything else, per second.
    pub other_flops: f64,
    /// Bytes to and from memory, per second.
    pub memory_bytes: f64,
    /// To the next tier.
    pub link: Link,
}

impl Default for Profile {
    /// Two cores of a common server, for plans where nothing was measured.
    fn default() -> Self {
        Self {
            product_flops: 100e9,
            other_flops: 20e9,
            memory_bytes: 15e9,
            link: Link { read: 1e9, write: 1e9 },
        }
    }
}

impl Profile {
    /// Seconds of one run: the longer of computing and of moving bytes.
    pub fn seconds(&self, op: &Op, cost: Cost) -> f64 {
        let flops = match op {
            Op::Linear(_) | Op::LinearBackwardInput(_) | Op::LinearBackwardWeight(_) | Op::LinearCrossEntropy(_) => {
                self.product_flops
            }
            _ => self.other_flops,
        };
        (cost.flops as f64 / flops).max(cost.bytes as f64 / self.memory_bytes)
    }
}
