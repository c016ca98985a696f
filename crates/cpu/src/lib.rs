//! The CPU backend: kernels over pointers and sizes, in memory that the plan gives them.

pub mod calibrate;
pub mod floats;
pub mod gemm;
pub mod kernel;
pub mod pool;
pub mod profile;
pub mod run;
pub mod simd;
pub mod target;

pub use profile::Profile;
pub use run::Cpu;
pub use target::CpuTarget;
