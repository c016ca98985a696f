//! Numbers in few bits: how quantised tensors are laid out, made and read.
//!
//! A [`Block`] names a format. A tensor of it is one run of bytes, so that whatever moves or keeps buffers needs to know no more
//! than [`Block::bytes`]. An [`Encoder`] makes such a tensor row by row; [`Block::decode`] reads any part of it. Both work in memory
//! that they are given.

mod block;
mod decode;
pub mod dynamic;
mod encoder;
mod ggml;
mod groups;
mod int4;
mod int8;
mod mean;
mod nf4;

pub use block::Block;
pub use encoder::Encoder;

/// Rounds a number of magnitude below 2²² to the nearest integer, ties to even. Above 2²³ an `f32` has no fraction: two additions do it,
/// in vectors on every machine.
#[inline(always)]
fn round(x: f32) -> f32 {
    const SHIFT: f32 = (3 << 22) as f32;
    x + SHIFT - SHIFT
}

/// `x` between `low` and `high`, or `low` for NaN: a minimum and a maximum in vectors, where `clamp` has to keep NaNs.
#[inline(always)]
fn within(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > low { x } else { low };
    if x < high { x } else { high }
}
