//! A mean in f32 whose sum is added up in PyTorch's order, so that an NF4 offset has the bits that bitsandbytes' has.
//!
//! That order is of one thread with vectors of eight (AVX2); with other vectors, and from 32 768 values with more threads, PyTorch's own
//! mean is another one in its last bits. Columns of four vectors are summed in a cascade of levels, each of which takes the sum of the one
//! below when that has been added to so many times; then vectors, lanes, and what no vector was full of.

/// Values of a vector.
const LANES: usize = 8;
/// Vectors that are summed apart from each other.
const VECTORS: usize = 4;
const LEVELS: usize = 4;

type Vector = [f32; LANES];

/// The mean of at least one value.
pub(crate) fn mean(values: &[f32]) -> f32 {
    sum(values) / values.len() as f32
}

fn sum(values: &[f32]) -> f32 {
    let (vectors, rest) = values.as_chunks::<LANES>();
    if vectors.is_empty() {
        // Too few for a vector: four columns of scalars.
        let (rows, rest) = values.as_chunks::<VECTORS>();
        let mut columns = cascade(rows, |sum, x| sum + x);
        columns[0] = rest.iter().fold(columns[0], |sum, x| sum + x);
        return columns[1..].iter().fold(columns[0], |sum, x| sum + x);
    }
    let (rows, rest_vectors) = vectors.as_chunks::<VECTORS>();
    let [first, others @ ..] = cascade(rows, add);
    let first = rest_vectors.iter().fold(first, |sum, &vector| add(sum, vector));
    let lanes = others.into_iter().fold(first, add);
    let rest = rest.iter().fold(0.0, |sum, x| sum + x);
    lanes.iter().fold(rest, |sum, x| sum + x)
}

/// The sums of columns.
fn cascade<T: Copy + Default>(rows: &[[T; VECTORS]], add: impl Fn(T, T) -> T) -> [T; VECTORS] {
    let add_all = |to: &mut [T; VECTORS], from: &[T; VECTORS]| {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = add(*to, from);
        }
    };
    // Each level is added to this often, as a power of two.
    let power = (rows.len().next_power_of_two().ilog2() as usize / LEVELS).max(4);
    let step = 1 << power;
    let mut levels = [[T::default(); VECTORS]; LEVELS];
    let steps = rows.chunks_exact(step);
    let rest = steps.remainder();
    for (i, rows_of_step) in steps.enumerate() {
        rows_of_step.iter().for_each(|row| add_all(&mut levels[0], row));
        let done = (i + 1) * step;
        for level in 1..LEVELS {
            let below = std::mem::take(&mut levels[level - 1]);
            add_all(&mut levels[level], &below);
            if done & ((step - 1) << (level * power)) != 0 {
                break;
            }
        }
    }
    rest.iter().for_each(|row| add_all(&mut levels[0], row));
    let [mut sums, upper @ ..] = levels;
    upper.iter().for_each(|level| add_all(&mut sums, level));
    sums
}

fn add(a: Vector, b: Vector) -> Vector {
    std::array::from_fn(|lane| a[lane] + b[lane])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `fixtures/nf4.py` has the means of the same values.
    #[test]
    fn the_bits_are_those_of_pytorch() {
        let fixture: serde_json::Value = serde_json::from_str(include_str!("../../../fixtures/nf4.json")).unwrap();
        let means = fixture["means"].as_object().unwrap();
        assert_eq!(means.len(), 10);
        for (count, expected) in means {
            let value = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32;
            let values: Vec<f32> = (0..count.parse().unwrap()).map(value).collect();
            let expected = u32::from_str_radix(expected.as_str().unwrap(), 16).unwrap();
            assert_eq!(mean(&values), f32::from_bits(expected), "{count} values");
        }
    }
}
