//! Every kernel against a naive reference in f64, on every instruction set this machine has, with
//! 1, 2 and 3 threads that must agree to the bit. Gradients of the references are checked against
//! finite differences of their forward.

mod attention;
mod cross_entropy;
mod elementwise;
mod embedding;
mod kv_cache;
mod norm;
mod optimizer;
mod util;
