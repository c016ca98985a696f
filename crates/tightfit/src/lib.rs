//! tightfit plans every byte of a training job before its first step, in one arena, and runs exactly that plan.
//!
//! The line that data follows: a model ([`Builder`], [`DecoderConfig`]) is a [`Forward`]; [`training_step`] makes it a [`Step`];
//! [`plan_for_cpu`] orders and places it; a [`Session`] runs it. `examples/your_model.rs` walks that line with a model of its own.

pub mod adapters;
pub mod alternatives;
pub mod calibration;
pub mod checkpoints;
pub mod choose;
pub mod cli;
pub mod command;
pub mod console;
pub mod data;
pub mod failure;
pub mod follow;
pub mod generate;
pub mod heap;
pub mod hub;
pub mod inference;
pub mod input;
pub mod job;
pub mod lr;
pub mod memory;
pub mod merge;
pub mod mix;
pub mod output;
pub mod pretrained;
pub mod quantize;
pub mod report;
pub mod reserve;
pub mod resume;
pub mod sample;
pub mod settings;
pub mod stop;
pub mod subject;
pub mod techniques;
pub mod train;

pub use job::{Job, JobError, plan_for_cpu, training_step};
pub use settings::{Request, Settings, SettingsError};

pub use tightfit_cpu::{Cpu, CpuTarget};
pub use tightfit_exec::{Driver, Feed, Results, RunError, Session, SessionError};
pub use tightfit_ir::{DType, Forward, Init, Role, Shape, Step, Type, ValueId, op};
pub use tightfit_model::{BatchShape, Builder, DecodeShape, DecoderConfig, ModelError};
pub use tightfit_pass::{Adafactor, Adam, Apollo, Lion, LossScale, Optimizer, OptimizerConfig, PassError, Sgd};
pub use tightfit_plan::{Infeasible, Plan, PlanError, Summary};
