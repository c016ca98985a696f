//! The graph as data: what a training job computes, written down before anything runs.
//!
//! A [`Graph`] is a list of nodes over SSA values with static shapes. A [`Forward`] is a model; a [`Step`] is
//! everything one job repeats (training, evaluation, …) as routines of programs. Every operation is a variant of the closed
//! enum [`Op`], and each has its type rule, cost, aliasing, gradient and naive reference in one file under [`op`].

pub mod graph;
pub mod op;
pub mod order;
pub mod random;
pub mod stage;
pub mod target;
pub mod tensor;
pub mod text;
pub mod types;
pub mod verify;

pub use graph::{Binding, Graph, Init, Node, NodeId, Output, OutputKind, Source, Value, ValueId};
pub use op::{Op, OpError};
pub use stage::{Forward, Program, Routine, Step};
pub use target::{Call, Link, Slot, Target};
pub use tensor::Tensor;
pub use tightfit_quant::Block;
pub use types::{DType, Phase, Role, Shape, Tier, Type};
pub use verify::VerifyError;
