//! From a [`Call`] to its kernel.

mod dispatch;
mod frame;

use tightfit_ir::Call;

use crate::kernel::Context;
use crate::pool::Pool;
use crate::simd::Isa;
use crate::target::CpuTarget;

use dispatch::dispatch;
use frame::Frame;

/// The CPU backend: threads and an instruction set.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    target: CpuTarget,
}

impl Cpu {
    /// This machine's instruction set on these threads.
    pub fn new(pool: Pool) -> Self {
        Self::with_isa(pool, Isa::detect())
    }

    /// Another instruction set that this machine can run; in place of one that it cannot, the best that it can. The
    /// [`target`](Self::target) says which it is, and tells a plan for the other one apart.
    pub fn with_isa(pool: Pool, isa: Isa) -> Self {
        let isa = match Isa::available().contains(&isa) {
            true => isa,
            false => Isa::detect(),
        };
        let target = CpuTarget::with_isa(isa, pool.threads());
        Self { pool, target }
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// What plans for this backend are made with.
    pub fn target(&self) -> &CpuTarget {
        &self.target
    }

    /// Runs one call in the arena that begins at `arena`. Allocates nothing.
    ///
    /// # Safety
    /// Every slot of the call and its workspace lie inside of memory that `arena` points to and that nothing else accesses
    /// during the call; offsets are aligned to [`ALIGNMENT`](crate::target::ALIGNMENT), as is `arena`; results overlap
    /// operands only as the operation permits; the workspace has the size that the target gave.
    pub unsafe fn run(&self, arena: *mut u8, call: &Call) {
        let frame = Frame { arena, call };
        let cx = Context {
            pool: &self.pool,
            isa: self.target.isa,
        };
        // SAFETY: the caller's contract is that of every kernel; shapes follow from the types, which `verify` has checked.
        unsafe { dispatch(&cx, &frame) }
    }
}
