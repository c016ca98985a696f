//! The matrix product against a naive one in f64, for every instruction set this machine has.

use proptest::prelude::*;
use tightfit_cpu::gemm::{Gemm, View, WORKSPACE_ALIGN, workspace_bytes};
use tightfit_cpu::pool::Pool;
use tightfit_cpu::simd::Isa;

/// What surrounds the matrices and must survive.
const GUARD: f32 = 12345.0;
/// What the workspace holds before a product; no packed float has these bytes.
const FILL: u8 = 0xA5;

#[derive(Clone, Copy, Debug)]
enum Add {
    Nothing,
    /// D is C: accumulate in place.
    InPlace,
    Other,
}

#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    /// A is stored transposed.
    a_transposed: bool,
    b_transposed: bool,
    /// Floats between the elements of a row (1: contiguous) and after each row.
    gaps: [usize; 2],
    add: Add,
    bias: bool,
}

fn dimension(max: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 2 => Just(1), 8 => 2..40usize, 4 => 40..max]
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (dimension(230), dimension(420), dimension(700));
    let add = prop_oneof![Just(Add::Nothing), Just(Add::InPlace), Just(Add::Other)];
    (shape, any::<[bool; 3]>(), 1..3usize, 0..3usize, add).prop_map(
        |((m, n, k), [a_transposed, b_transposed, bias], gap, pad, add)| Case {
            m,
            n,
            k,
            a_transposed,
            b_transposed,
            gaps: [gap, pad],
            add,
            bias,
        },
    )
}

/// A stored matrix: `rows × cols` as the product sees it.
struct Matrix {
    data: Vec<f32>,
    row_stride: usize,
    col_stride: usize,
}

impl Matrix {
    fn new(rows: usize, cols: usize, transposed: bool, [gap, pad]: [usize; 2], seed: u32) -> Self {
        let (outer, inner) = if transposed { (cols, rows) } else { (rows, cols) };
        let stride = inner * gap + pad;
        let (row_stride, col_stride) = if transposed { (gap, stride) } else { (stride, gap) };
        let mut state = seed;
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        Matrix {
            data: (0..outer * stride).map(|_| value()).collect(),
            row_stride,
            col_stride,
        }
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        f64::from(self.data[i * self.row_stride + j * self.col_stride])
    }

    fn view(&self) -> View {
        let Matrix {
            ref data,
            row_stride,
            col_stride,
        } = *self;
        View {
            ptr: data.as_ptr(),
            row_stride,
            col_stride,
        }
    }
}

/// The workspace of a product, filled, with a guard behind.
struct Workspace {
    data: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Workspace {
    fn new(bytes: u64) -> Self {
        let bytes = bytes as usize;
        let data = vec![FILL; bytes + 2 * WORKSPACE_ALIGN];
        let start = data.as_ptr().align_offset(WORKSPACE_ALIGN);
        Workspace { data, start, bytes }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let (used, guard) = self.data[self.start..].split_at(self.bytes);
        prop_assert!(guard.iter().all(|&byte| byte == FILL), "written past the workspace");
        if let Some(last) = used.last_chunk::<4>() {
            prop_assert_ne!(last, &[FILL; 4], "the last word is not written");
        }
        Ok(())
    }
}

struct Data {
    a: Matrix,
    b: Matrix,
    c: Vec<f32>,
    c_stride: usize,
    d: Matrix,
    bias: Vec<f32>,
}

impl Data {
    fn new(case: &Case) -> Data {
        let &Case { m, n, k, gaps, .. } = case;
        let c_stride = n + gaps[1];
        let c = Matrix::new(m, n, false, [1, gaps[1]], 3);
        let mut c = if matches!(case.add, Add::InPlace) {
            c.data
        } else {
            vec![f32::NAN; m * c_stride]
        };
        for row in c.chunks_mut(c_stride.max(1)) {
            row[n..].fill(GUARD);
        }
        Data {
            a: Matrix::new(m, k, case.a_transposed, gaps, 1),
            b: Matrix::new(k, n, case.b_transposed, gaps, 2),
            c,
            c_stride,
            d: Matrix::new(m, n, false, [1, 7], 4),
            bias: Matrix::new(1, n, false, [1, 0], 5).data,
        }
    }

    /// C after the product; `pool: None` computes it on this thread alone.
    fn product(&self, case: &Case, isa: Isa, pool: Option<&Pool>) -> Result<Vec<f32>, TestCaseError> {
        let &Case { m, n, k, .. } = case;
        let threads = pool.map_or(1, Pool::threads);
        let mut workspace = Workspace::new(workspace_bytes(isa, m, n, k, threads));
        let mut c = self.c.clone();
        let gemm = Gemm {
            m,
            n,
            k,
            a: self.a.view(),
            b: self.b.view(),
            c: c.as_mut_ptr(),
            c_stride: self.c_stride,
            add: match case.add {
                Add::Nothing => None,
                Add::InPlace => Some((c.as_ptr(), self.c_stride)),
                Add::Other => Some((self.d.data.as_ptr(), self.d.row_stride)),
            },
            bias: case.bias.then_some(self.bias.as_ptr()),
        };
        // SAFETY: all buffers have the sizes of the product; `isa` comes from `available`.
        unsafe {
            let start = workspace.data.as_mut_ptr().add(workspace.start);
            match pool {
                Some(pool) => gemm.run(pool, isa, start),
                None => gemm.run_serial(isa, start),
            }
        }
        workspace.check()?;
        Ok(c)
    }

    fn check(&self, case: &Case, c: &[f32]) -> Result<(), TestCaseError> {
        for i in 0..case.m {
            for j in 0..case.n {
                let terms = (0..case.k).map(|p| self.a.at(i, p) * self.b.at(p, j));
                let (mut sum, mut size) = terms.fold((0.0, 1.0), |(s, t), x| (s + x, t + x.abs()));
                for extra in [
                    match case.add {
                        Add::Nothing => 0.0,
                        Add::InPlace => f64::from(self.c[i * self.c_stride + j]),
                        Add::Other => self.d.at(i, j),
                    },
                    if case.bias { f64::from(self.bias[j]) } else { 0.0 },
                ] {
                    sum += extra;
                    size += extra.abs();
                }
                let got = f64::from(c[i * self.c_stride + j]);
                prop_assert!((got - sum).abs() <= 1e-6 * size, "C[{i}, {j}] = {got}, not {sum}");
            }
            let behind = &c[i * self.c_stride + case.n..(i + 1) * self.c_stride];
            prop_assert!(behind.iter().all(|&x| x == GUARD), "row {i} written past its end");
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    #[test]
    fn agrees_with_a_naive_product_for_any_number_of_threads(case in cases()) {
        let data = Data::new(&case);
        for &isa in Isa::available() {
            let serial = data.product(&case, isa, None)?;
            data.check(&case, &serial)?;
            for threads in 1..=3 {
                let pool = Pool::new(threads, 256 << 10).unwrap();
                let c = data.product(&case, isa, Some(&pool))?;
                let bits = |c: &[f32]| c.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                prop_assert!(bits(&c) == bits(&serial), "{isa:?}: {threads} threads differ");
            }
        }
    }
}

/// More than one block in every direction.
#[test]
fn large_products_agree() {
    for (a_transposed, b_transposed) in [(false, false), (false, true), (true, false)] {
        let case = Case {
            m: 301,
            n: 1601,
            k: 333,
            a_transposed,
            b_transposed,
            gaps: [1, 0],
            add: Add::Other,
            bias: true,
        };
        let data = Data::new(&case);
        for &isa in Isa::available() {
            let serial = data.product(&case, isa, None).unwrap();
            data.check(&case, &serial).unwrap();
            let pool = Pool::new(3, 256 << 10).unwrap();
            assert_eq!(data.product(&case, isa, Some(&pool)).unwrap(), serial, "{isa:?}");
        }
    }
}

/// Plans are made for machines with other instruction sets than this one.
#[test]
fn workspace_is_known_for_every_instruction_set() {
    for isa in [Isa::Avx512, Isa::Avx2, Isa::Portable] {
        for (m, n, k) in [(1, 1, 1), (2048, 576, 576), (256, 49152, 576)] {
            let bytes = |threads| workspace_bytes(isa, m, n, k, threads);
            let per_thread = bytes(2) - bytes(1);
            assert!(bytes(1) > per_thread && per_thread % WORKSPACE_ALIGN as u64 == 0);
            assert_eq!(bytes(3), bytes(2) + per_thread);
            assert!(bytes(1) < 4 << 20, "{isa:?}: a few MiB at most");
        }
        for (m, n, k) in [(0, 5, 5), (5, 0, 5), (5, 5, 0)] {
            assert_eq!(workspace_bytes(isa, m, n, k, 3), 0);
        }
    }
}
