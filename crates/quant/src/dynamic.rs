//! The 8-bit dynamic map of Dettmers et al. 2021 (arXiv:2110.02861): small numbers with small steps.
//!
//! A code has a decimal exponent from -6 to 0 in unary and a fraction in the bits that are left, so each decade below 1 has twice as many
//! values as the one before it. A fraction stands for the middle of its step between 0.1 and 1. Zero and one are values too.

/// The values of the codes in ascending order, from -0.993 to 1: for what has both signs.
pub fn signed() -> &'static [f32; 256] {
    &SIGNED
}

/// The values of the codes in ascending order, from 0 to 1: one bit more for what is never negative.
pub fn unsigned() -> &'static [f32; 256] {
    &UNSIGNED
}

/// The code of the value of `map` that is nearest to `x`, the lower of two that are equally near. NaN gets code 0.
#[inline]
pub fn nearest(map: &[f32; 256], x: f32) -> u8 {
    // Binary search for the number of boundaries below `x`.
    let mut code = 0;
    let mut step = 128;
    while step > 0 {
        let next = code + step;
        if x > 0.5 * (map[next - 1] + map[next]) {
            code = next;
        }
        step /= 2;
    }
    code as u8
}

static SIGNED: [f32; 256] = {
    let mut map = [0.0; 256];
    let mut at = 128;
    let mut exponent = 0;
    while exponent < POWERS.len() {
        at = decade(&mut map, at, exponent, 1 << exponent);
        exponent += 1;
    }
    let mut i = 0;
    while i < 127 {
        map[i] = -map[254 - i];
        i += 1;
    }
    map[255] = 1.0;
    map
};

static UNSIGNED: [f32; 256] = {
    let mut map = [0.0; 256];
    let mut at = 1;
    let mut exponent = 0;
    while exponent < POWERS.len() {
        at = decade(&mut map, at, exponent, 2 << exponent);
        exponent += 1;
    }
    map[255] = 1.0;
    map
};

/// The seven exponents.
const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// Writes the middles of `steps` equal steps from 0.1 to 1, times a power of ten, and returns where the next decade begins.
///
/// The roundings are those of PyTorch, so that the maps are the published ones to the bit.
const fn decade(map: &mut [f32; 256], at: usize, exponent: usize, steps: usize) -> usize {
    let mut i = 0;
    while i < steps {
        let middle = (boundary(i, steps) + boundary(i + 1, steps)) / 2.0;
        map[at + i] = POWERS[exponent] * middle;
        i += 1;
    }
    at + steps
}

/// Boundary `i` of `steps` equal steps from 0.1 to 1, as `torch.linspace` rounds it: each half from its own end, sum and product rounded
/// once.
const fn boundary(i: usize, steps: usize) -> f32 {
    const FIRST: f32 = 0.1;
    let step = ((1.0 - FIRST) / steps as f32) as f64;
    if i < steps.div_ceil(2) {
        (FIRST as f64 + step * i as f64) as f32
    } else {
        (1.0 - step * (steps - i) as f64) as f32
    }
}
