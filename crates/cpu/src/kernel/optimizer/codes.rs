//! The nearest code of a dynamic map by a table and two comparisons.

use std::sync::LazyLock;

use tightfit_quant::dynamic;

/// Bits of a number's magnitude that tell its cell: the exponent and six of the fraction. No cell has more than two boundaries between
/// codes inside.
const SHIFT: u32 = 17;
/// The cell of 2⁻²³ and all that is smaller: nearer to zero than to any other value.
const FIRST: u32 = 104 << 6;
/// Cells of one sign, the last one being that of 1.
const CELLS: usize = (23 << 6) + 1;

/// A dynamic map as kernels read and write it.
pub struct Map {
    /// The value of each code.
    pub values: &'static [f32; 256],
    /// The boundary between each code and the next.
    boundaries: [f32; 256],
    /// The code of the least number of each cell: of positive numbers, then of negative ones.
    codes: [u8; 2 * CELLS],
}

/// For first moments.
pub static SIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(dynamic::signed()));
/// For second moments.
pub static UNSIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(dynamic::unsigned()));

impl Map {
    fn new(values: &'static [f32; 256]) -> Self {
        let least = |cell: usize| match cell.checked_sub(CELLS) {
            None => match cell {
                0 => 0.0,
                _ => f32::from_bits((FIRST + cell as u32) << SHIFT),
            },
            Some(cell) => -f32::from_bits(((FIRST + cell as u32 + 1) << SHIFT) - 1),
        };
        Self {
            values,
            boundaries: std::array::from_fn(|code| match values.get(code + 1) {
                Some(next) => 0.5 * (values[code] + next),
                None => f32::INFINITY,
            }),
            codes: std::array::from_fn(|cell| dynamic::nearest(values, least(cell))),
        }
    }

    /// The code of the value that is nearest to `x`, which is from −1 to 1; the lower of two that are equally near.
    #[inline(always)]
    pub fn nearest(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let magnitude = ((bits & 0x7FFF_FFFF) >> SHIFT).saturating_sub(FIRST);
        let cell = (magnitude as usize).min(CELLS - 1) + (bits >> 31) as usize * CELLS;
        let code = self.codes[cell];
        let code = code + u8::from(x > self.boundaries[usize::from(code)]);
        code + u8::from(x > self.boundaries[usize::from(code)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_finds_what_a_search_finds() {
        for map in [&*SIGNED, &*UNSIGNED] {
            let ends = (0..=CELLS as u32).flat_map(|cell| {
                let bits = (FIRST + cell) << SHIFT;
                [bits - 1, bits, bits + 1]
            });
            let cells = ends.map(f32::from_bits);
            let around = map.boundaries.iter().flat_map(|b| [b.next_down(), *b, b.next_up()]);
            let spread = (0..200_000_u32).map(|i| f32::from_bits(i.wrapping_mul(0x9E37_79B9)));
            let numbers = cells.chain(around).chain(spread).chain([0.0, f32::MIN_POSITIVE, 1.0]);
            for x in numbers.flat_map(|x| [x, -x]).filter(|x| x.abs() <= 1.0) {
                assert_eq!(map.nearest(x), dynamic::nearest(map.values, x), "{x:e}");
            }
        }
    }
}
