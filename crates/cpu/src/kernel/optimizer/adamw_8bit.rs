//! AdamW with block-wise states of 8 bits (Dettmers et al., 2021).

use tightfit_ir::op::STATE_BLOCK;

use super::super::vector::{load, store};
use super::super::{Context, TILE};
use super::adamw::{Adam, AdamStep};
use super::codes::{Map, SIGNED, UNSIGNED};
use super::{Scalars, Update};
use crate::multiversion;
use crate::simd::Simd;

/// Elements that share a scale.
const BLOCK: usize = STATE_BLOCK as usize;

/// A state: codes of a dynamic map, and the scale of each block of them.
#[derive(Clone, Copy)]
pub struct Codes {
    /// A code for each element, updated in place.
    pub codes: *mut u8,
    /// A scale for each [`STATE_BLOCK`] elements, updated in place.
    pub absmax: *mut f32,
}

/// One step for one parameter tensor.
pub struct AdamW8bit {
    /// What every update takes.
    pub update: Update,
    /// First moments.
    pub m: Codes,
    /// Second moments.
    pub v: Codes,
    /// Constants.
    pub adam: Adam,
}

shared!(AdamW8bit);

/// As [`adamw`](super::adamw()), with moments that are read from codes and written as codes.
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn adamw_8bit(cx: &Context, args: &AdamW8bit) {
    // SAFETY: the caller's contract.
    let Some(scalars) = (unsafe { args.update.scalars() }) else {
        return;
    };
    let step = AdamStep::new(&args.adam, scalars.step);
    let maps = (&*SIGNED, &*UNSIGNED);
    cx.for_each(args.update.len.div_ceil(TILE), |isa, tile, _| {
        let end = args.update.len.min((tile + 1) * TILE);
        for start in (tile * TILE..end).step_by(BLOCK) {
            // SAFETY: the caller's contract; blocks are disjoint.
            unsafe { update_block(isa, args, &scalars, &step, maps, start) }
        }
    });
}

const _: () = assert!(TILE.is_multiple_of(BLOCK), "tiles are whole blocks");

multiversion! {
    unsafe fn update_block(args: &AdamW8bit, scalars: &Scalars, step: &AdamStep, maps: (&Map, &Map), start: usize)
        = update_body;
}

#[inline(always)]
unsafe fn update_body<S: Simd>(
    s: S,
    args: &AdamW8bit,
    scalars: &Scalars,
    step: &AdamStep,
    (signed, unsigned): (&Map, &Map),
    start: usize,
) {
    let n = BLOCK.min(args.update.len - start);
    let step = *step;
    let keep = s.splat(scalars.keep);
    let minus_step_size = s.splat(-((scalars.lr / step.bias_correction1) as f32));
    let (mut m, mut v) = ([0.0; BLOCK], [0.0; BLOCK]);
    // SAFETY: the block lies within `len`; each vector is read before it is written.
    unsafe {
        args.m.decode(signed, start, &mut m[..n]);
        args.v.decode(unsigned, start, &mut v[..n]);
        let part = args.update.part(scalars, start);
        let (m_at, v_at) = (m.as_mut_ptr(), v.as_mut_ptr());
        let zero = s.splat(0.0);
        let (mut m_max, mut v_max) = (zero, zero);
        each_vector!(S, n, i, len => {
            let g = part.gradient(s, i, len);
            let (m1, v1) = step.moments(s, g, load(s, m_at.add(i), len), load(s, v_at.add(i), len));
            let w0 = s.mul(part.weight(s, i, len), keep);
            let w1 = s.add(w0, s.div(s.mul(minus_step_size, m1), step.denominator(s, v1)));
            m_max = s.max(s.max(m1, s.sub(zero, m1)), m_max);
            v_max = s.max(v1, v_max);
            store(s, m_at.add(i), m1, len);
            store(s, v_at.add(i), v1, len);
            part.set_weight(s, i, w1, len);
        });
        args.m.encode(s, signed, start, s.reduce_max(m_max), &mut m[..n]);
        args.v.encode(s, unsigned, start, s.reduce_max(v_max), &mut v[..n]);
    }
}

impl Codes {
    /// The elements of the block that begins at `start`.
    ///
    /// # Safety
    /// The block lies within the state.
    #[inline(always)]
    unsafe fn decode(self, map: &Map, start: usize, out: &mut [f32]) {
        // SAFETY: the caller's contract.
        unsafe {
            let absmax = *self.absmax.add(start / BLOCK);
            for (i, x) in out.iter_mut().enumerate() {
                *x = map.values[usize::from(*self.codes.add(start + i))] * absmax;
            }
        }
    }

    /// Writes the elements of the block that begins at `start`, of which `absmax` is the largest magnitude; uses them up.
    ///
    /// # Safety
    /// The block lies within the state.
    #[inline(always)]
    unsafe fn encode<S: Simd>(self, s: S, map: &Map, start: usize, absmax: f32, elements: &mut [f32]) {
        // A block of zeros has no scale; zero over anything else is zero.
        let divisor = s.splat(if absmax > 0.0 { absmax } else { 1.0 });
        let (at, n) = (elements.as_mut_ptr(), elements.len());
        // SAFETY: the caller's contract.
        unsafe {
            each_vector!(S, n, i, len => {
                store(s, at.add(i), s.div(load(s, at.add(i), len), divisor), len);
            });
            *self.absmax.add(start / BLOCK) = absmax;
            for (i, &x) in elements.iter().enumerate() {
                *self.codes.add(start + i) = map.nearest(x);
            }
        }
    }
}
