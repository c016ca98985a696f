//! The operands, results and workspace of a call, by their index, as kernels take them.

use tightfit_ir::op::{Accumulate, Rounding};
use tightfit_ir::{Call, DType, Slot};

use crate::floats::Floats;
use crate::gemm::{BlockView, Gemm, Matrix, View};
use crate::kernel::{self, Table};
use crate::target::{size, stored};

/// A call with its arena.
pub(super) struct Frame<'a> {
    pub arena: *mut u8,
    pub call: &'a Call,
}

impl Frame<'_> {
    fn at<T>(&self, slot: &Slot) -> *mut T {
        // Inside of the arena by the caller's contract; wrapping so that this needs none.
        self.arena.wrapping_add(size(slot.offset)).cast()
    }

    pub fn input(&self, index: usize) -> *const f32 {
        self.at::<f32>(&self.call.inputs[index]).cast_const()
    }

    /// An operand that may be stored in 16 bits.
    pub fn floats(&self, index: usize) -> Floats {
        let slot = &self.call.inputs[index];
        Floats::new(self.at(slot), stored(&slot.ty))
    }

    /// A result that may be stored in 16 bits.
    pub fn result(&self, index: usize) -> Floats {
        let slot = &self.call.outputs[index];
        Floats::new(self.at(slot), stored(&slot.ty))
    }

    /// An embedding's table.
    pub fn table(&self, index: usize) -> Table {
        match self.call.inputs[index].ty.dtype {
            DType::Block(block) => Table::Block(block, self.at::<u8>(&self.call.inputs[index]).cast_const()),
            _ => Table::Floats(self.floats(index)),
        }
    }

    /// A matrix of numbers.
    pub fn view(&self, index: usize) -> View {
        View::rows_of(self.floats(index), self.dim(index, 1))
    }

    /// A matrix that may be quantised.
    pub fn matrix(&self, index: usize) -> Matrix {
        let slot = &self.call.inputs[index];
        match slot.ty.dtype {
            DType::Block(block) => Matrix::Block(BlockView {
                block,
                bytes: self.at::<u8>(slot).cast_const(),
                rows: self.dim(index, 0),
                cols: self.dim(index, 1),
                transposed: false,
            }),
            _ => self.view(index).into(),
        }
    }

    pub fn ids(&self, index: usize) -> *const i32 {
        self.at::<i32>(&self.call.inputs[index]).cast_const()
    }

    pub fn output(&self, index: usize) -> *mut f32 {
        self.at(&self.call.outputs[index])
    }

    pub fn workspace(&self) -> *mut u8 {
        self.arena.wrapping_add(size(self.call.workspace.start))
    }

    /// Dimension `axis` of operand `index`.
    pub fn dim(&self, index: usize, axis: usize) -> usize {
        size(self.call.inputs[index].ty.dim(axis))
    }

    pub fn elements(&self, index: usize) -> usize {
        size(self.call.inputs[index].ty.shape.elements())
    }

    /// What result `output` is added to, where both are `f32`.
    pub fn addend(&self, accumulate: Accumulate, own: usize, output: usize) -> Option<*const f32> {
        accumulate.operand(own, output).map(|index| self.input(index))
    }

    /// What result `output` is added to, where both may be stored in 16 bits.
    pub fn added(&self, accumulate: Accumulate, own: usize, output: usize) -> Option<Floats> {
        accumulate.operand(own, output).map(|index| self.floats(index))
    }

    /// For kernels that only work in place: copies an operand to where its result goes, if that is elsewhere.
    ///
    /// # Safety
    /// As [`Cpu::run`](super::Cpu::run).
    pub unsafe fn bring(&self, output: usize, input: usize) {
        let from = &self.call.inputs[input];
        let bytes = size(from.ty.bytes());
        let (from, to) = (self.at::<u8>(from), self.at::<u8>(&self.call.outputs[output]));
        if from != to {
            // SAFETY: both are whole tensors of one type, apart since results overlap operands exactly or not at all.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
        }
    }

    /// What every update takes, with its results where they go: after the weight and the gradient come the states, the learning rate and
    /// the step, and the factor, if there is one.
    ///
    /// # Safety
    /// As [`Cpu::run`](super::Cpu::run).
    pub unsafe fn update(&self, factor: bool, rounding: Rounding, weight_decay: f64) -> kernel::Update {
        let states = self.call.outputs.len() - 1;
        // SAFETY: the caller's contract.
        unsafe {
            self.bring(0, 0);
            (1..=states).for_each(|output| self.bring(output, output + 1));
        }
        kernel::Update {
            len: self.elements(0),
            weight: self.result(0),
            rounding,
            gradient: self.input(1),
            lr: self.input(2 + states),
            step: self.input(3 + states),
            factor: factor.then(|| self.input(4 + states)),
            weight_decay,
        }
    }

    /// `C = A·B`, plus `add` and `bias`, into result 0.
    pub fn product(&self, a: View, b: Matrix, k: usize, add: Option<Floats>, bias: Option<Floats>) -> Gemm {
        let c = &self.call.outputs[0].ty;
        let (m, n) = (size(c.dim(0)), size(c.dim(1)));
        Gemm {
            m,
            n,
            k,
            a,
            b,
            c: self.result(0),
            c_stride: n,
            add: add.map(|d| (d, n)),
            bias,
        }
    }
}
