//! Fresh weights: each element from the seed, the tensor's name and its index, so that neither threads nor order matter.

use tightfit_cpu::pool::Pool;
use tightfit_ir::Init;
use tightfit_ir::random::{STEP, mix, seeded};

/// Elements of one tile; even, as normals are made in pairs.
const TILE: usize = 1 << 16;

/// Fills a part of a tensor that begins at its element `first`, an even number.
pub fn fill(pool: &Pool, part: &mut [f32], first: u64, init: Init, seed: u64, name: &str) {
    match init {
        Init::Zeros => part.fill(0.0),
        Init::Ones => part.fill(1.0),
        Init::Constant(value) => part.fill(value as f32),
        Init::Normal(std) => normal(pool, part, first, std, seeded(seed, name)),
        Init::Uniform(bound) => {
            let key = seeded(seed, name);
            each_tile(pool, part, |start, out| {
                for (index, x) in out.iter_mut().enumerate() {
                    *x = (bound * (2.0 * draw(key, first + (start + index) as u64) - 1.0)) as f32;
                }
            });
        }
    }
}

fn normal(pool: &Pool, tensor: &mut [f32], first: u64, std: f64, key: u64) {
    each_tile(pool, tensor, |start, part| {
        for (pair, out) in part.chunks_mut(2).enumerate() {
            let index = first / 2 + (start / 2 + pair) as u64;
            let normals = box_muller(draw(key, 2 * index), draw(key, 2 * index + 1));
            for (x, z) in out.iter_mut().zip(normals) {
                *x = (std * z) as f32;
            }
        }
    });
}

/// Calls `fill` with each tile of a tensor and the tile's first element.
fn each_tile(pool: &Pool, tensor: &mut [f32], fill: impl Fn(usize, &mut [f32]) + Sync) {
    let len = tensor.len();
    let base = Base(tensor.as_mut_ptr());
    pool.for_each(len.div_ceil(TILE), |tile, _| {
        let start = tile * TILE;
        let count = TILE.min(len - start);
        // SAFETY: tiles are disjoint parts of `tensor`, which is borrowed mutably for the whole call.
        fill(start, unsafe { std::slice::from_raw_parts_mut(base.at(start), count) });
    });
}

/// Two independent standard normals (Box and Muller 1958) from two uniforms in (0, 1].
fn box_muller(a: f64, b: f64) -> [f64; 2] {
    let radius = (-2.0 * a.ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * b).sin_cos();
    [radius * cos, radius * sin]
}

/// Uniform in (0, 1], number `index` of the stream of that seed and name.
pub fn uniform(seed: u64, name: &str, index: u64) -> f64 {
    draw(seeded(seed, name), index)
}

/// Uniform in (0, 1], number `index` of the stream `key`.
fn draw(key: u64, index: u64) -> f64 {
    let bits = mix(key.wrapping_add(index.wrapping_mul(STEP)));
    ((bits >> 11) + 1) as f64 / (1_u64 << 53) as f64
}

/// A tensor's first element, handed to the threads.
#[derive(Clone, Copy)]
struct Base(*mut f32);

// SAFETY: the threads write disjoint tiles.
unsafe impl Sync for Base {}

impl Base {
    /// # Safety
    /// The index lies inside of the tensor.
    unsafe fn at(self, index: usize) -> *mut f32 {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(index) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INITS: [Init; 2] = [Init::Normal(0.02), Init::Uniform(0.02)];

    fn sample(init: Init, threads: usize, seed: u64, name: &str) -> Vec<f32> {
        let pool = Pool::new(threads, 1 << 16).unwrap();
        let mut tensor = vec![0.0; 3 * TILE + 7];
        // In two parts, as on the lower tier.
        let (head, tail) = tensor.split_at_mut(TILE + 2);
        let second = head.len() as u64;
        fill(&pool, head, 0, init, seed, name);
        fill(&pool, tail, second, init, seed, name);
        tensor
    }

    #[test]
    fn normals_have_the_stated_moments() {
        let tensor = sample(INITS[0], 2, 1, "w");
        let n = tensor.len() as f64;
        let mean = tensor.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = tensor.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
        // Four standard errors of each.
        assert!(mean.abs() < 4.0 * 0.02 / n.sqrt(), "mean {mean}");
        assert!(
            (variance.sqrt() / 0.02 - 1.0).abs() < 4.0 / (2.0 * n).sqrt(),
            "std {}",
            variance.sqrt()
        );
    }

    #[test]
    fn uniforms_fill_their_interval_evenly() {
        let tensor = sample(INITS[1], 2, 1, "w");
        let n = tensor.len() as f64;
        assert!(tensor.iter().all(|x| x.abs() <= 0.02));
        let mean = tensor.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = tensor.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
        // Four standard errors of each: a uniform's variance is b²/3, and that of its square 4·b⁴/45.
        let b: f64 = 0.02;
        assert!(mean.abs() < 4.0 * b / (3.0 * n).sqrt(), "mean {mean}");
        assert!(
            (variance - b * b / 3.0).abs() < 4.0 * b * b * (4.0 / 45.0 / n).sqrt(),
            "{variance}"
        );
    }

    #[test]
    fn seed_and_name_decide_and_neither_threads_nor_parts_do() {
        for init in INITS {
            let tensor = sample(init, 1, 1, "w");
            let mut whole = vec![0.0; tensor.len()];
            fill(&Pool::new(1, 1 << 16).unwrap(), &mut whole, 0, init, 1, "w");
            assert_eq!(tensor, whole);
            assert_eq!(tensor, sample(init, 3, 1, "w"));
            assert_ne!(tensor, sample(init, 1, 2, "w"));
            assert_ne!(tensor, sample(init, 1, 1, "v"));
        }
    }
}
