//! The matrix product against a naive one in f64, for every instruction set this machine has.

use proptest::prelude::*;
use tightfit_cpu::floats::{Float, Floats};
use tightfit_cpu::gemm::{BlockView, Form, Gemm, Matrix, View, WORKSPACE_ALIGN};
use tightfit_cpu::pool::Pool;
use tightfit_cpu::simd::Isa;
use tightfit_quant::{Block, Encoder};

/// What surrounds the matrices and must survive.
const GUARD: u8 = 0x5A;
/// What the workspace holds before a product; no packed word has these bytes.
const FILL: u8 = 0xA5;

const FLOATS: [Float; 3] = [Float::F32, Float::Bf16, Float::F16];

#[derive(Clone, Copy, Debug)]
enum Add {
    Nothing,
    /// D is C: accumulate in place.
    InPlace,
    Other,
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug)]
enum Stored {
    Float(Float),
    Block(Block),
}

#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    /// A is stored transposed.
    a_transposed: bool,
    b_transposed: bool,
    /// Numbers after each stored row.
    pad: usize,
    a: Float,
    b: Stored,
    c: Float,
    add: Add,
    bias: Option<Float>,
}

impl Case {
    fn new(m: usize, n: usize, k: usize) -> Self {
        Self {
            m,
            n,
            k,
            a_transposed: false,
            b_transposed: false,
            pad: 0,
            a: Float::F32,
            b: Stored::Float(Float::F32),
            c: Float::F32,
            add: Add::Nothing,
            bias: None,
        }
    }
}

fn dimension(max: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 2 => Just(1), 8 => 2..40usize, 4 => 40..max]
}

fn float() -> impl Strategy<Value = Float> {
    prop::sample::select(FLOATS.to_vec())
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (dimension(230), dimension(420), dimension(700));
    let add = prop_oneof![Just(Add::Nothing), Just(Add::InPlace), Just(Add::Other)];
    let b = prop_oneof![
        3 => float().prop_map(Stored::Float),
        1 => prop::sample::select(vec![Block::Nf4, Block::Int4, Block::Int8, Block::Q8_0, Block::Q4K]).prop_map(Stored::Block),
    ];
    let stored = (float(), b, float(), prop::option::of(float()));
    (shape, any::<[bool; 2]>(), 0..3usize, stored, add).prop_map(
        |((m, n, k), [a_transposed, b_transposed], pad, (a, b, c, bias), add)| {
            let whole = match b {
                Stored::Block(block) => block.row_multiple() as usize,
                Stored::Float(_) => 1,
            };
            let (n_unit, k_unit) = if b_transposed { (1, whole) } else { (whole, 1) };
            Case {
                m,
                n: n.next_multiple_of(n_unit),
                k: k.next_multiple_of(k_unit),
                a_transposed,
                b_transposed,
                pad,
                a,
                b,
                c,
                add,
                bias,
            }
        },
    )
}

/// A stored matrix: `rows × cols` as the product sees it.
struct Stock {
    /// What its bytes stand for, stored row after stored row.
    values: Vec<f32>,
    bytes: Vec<u8>,
    stored: Stored,
    rows: usize,
    /// Numbers from one stored row to the next.
    stride: usize,
    transposed: bool,
}

impl Stock {
    fn new(rows: usize, cols: usize, transposed: bool, pad: usize, stored: Stored, seed: u32) -> Self {
        let (rows, cols) = if transposed { (cols, rows) } else { (rows, cols) };
        let mut state = seed;
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let stride = match stored {
            Stored::Float(_) => cols + pad,
            Stored::Block(_) => cols,
        };
        let mut values: Vec<f32> = (0..rows * stride).map(|_| value()).collect();
        let bytes = match stored {
            Stored::Float(float) => values.iter().flat_map(|&x| encode(float, x)).collect(),
            Stored::Block(block) => quantised(block, rows, cols, &values),
        };
        match stored {
            Stored::Float(float) => values = decode(float, &bytes),
            Stored::Block(block) => block.decode(&bytes, rows, cols, 0, &mut values),
        }
        Stock {
            values,
            bytes,
            stored,
            rows,
            stride,
            transposed,
        }
    }

    fn at(&self, i: usize, j: usize) -> f32 {
        let (row, col) = if self.transposed { (j, i) } else { (i, j) };
        self.values[row * self.stride + col]
    }

    fn floats(&self) -> Floats {
        match self.stored {
            Stored::Float(float) => Floats::new(self.bytes.as_ptr().cast_mut(), float),
            Stored::Block(block) => panic!("{block} is no float"),
        }
    }

    fn view(&self) -> View {
        let view = View::rows_of(self.floats(), self.stride);
        if self.transposed { view.transposed() } else { view }
    }

    fn matrix(&self) -> Matrix {
        match self.stored {
            Stored::Float(_) => self.view().into(),
            Stored::Block(block) => Matrix::Block(BlockView {
                block,
                bytes: self.bytes.as_ptr(),
                rows: self.rows,
                cols: self.stride,
                transposed: self.transposed,
            }),
        }
    }
}

fn encode(float: Float, x: f32) -> Vec<u8> {
    match float {
        Float::F32 => x.to_ne_bytes().to_vec(),
        Float::Bf16 => half::bf16::from_f32(x).to_ne_bytes().to_vec(),
        Float::F16 => half::f16::from_f32(x).to_ne_bytes().to_vec(),
    }
}

fn decode(float: Float, bytes: &[u8]) -> Vec<f32> {
    let numbers = bytes.chunks_exact(float.size());
    let floats = Floats::new(bytes.as_ptr().cast_mut(), float);
    // SAFETY: as many numbers as there are chunks; unaligned ones are not: vectors of bytes come aligned from the allocator.
    numbers.enumerate().map(|(i, _)| unsafe { floats.get(i) }).collect()
}

/// A matrix in that format: those of our own encode the values, of `ggml`'s any bytes are one but for their scales.
fn quantised(block: Block, rows: usize, cols: usize, values: &[f32]) -> Vec<u8> {
    let bytes = block.bytes(rows as u64, cols as u64) as usize;
    let mut out = vec![0; bytes];
    if block.encodes() {
        let mut scratch = vec![0.0; block.scratch_floats(rows as u64, cols as u64) as usize];
        let mut encoder = Encoder::new(block, rows, cols, &mut out, &mut scratch);
        encoder.push(values);
        encoder.finish();
        return out;
    }
    for (byte, value) in out.iter_mut().zip(values.iter().cycle()) {
        *byte = (value * 1e6) as i32 as u8;
    }
    let elements = block.row_multiple();
    for block_bytes in out.chunks_exact_mut(block.bytes(1, elements) as usize) {
        // The scale, and of q4_k the minimum's; of q8_0 two codes.
        block_bytes[..2].copy_from_slice(&half::f16::from_f32(0.01).to_ne_bytes());
        block_bytes[2..4].copy_from_slice(&half::f16::from_f32(0.02).to_ne_bytes());
    }
    out
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
    a: Stock,
    b: Stock,
    c: Vec<u8>,
    /// What C holds, if it is added to.
    before: Vec<f32>,
    c_stride: usize,
    d: Stock,
    bias: Option<Stock>,
}

impl Data {
    fn new(case: &Case) -> Data {
        let &Case { m, n, k, pad, .. } = case;
        let c_stride = n + pad;
        let stored = Stored::Float(case.c);
        let mut c = vec![0xFF; m * c_stride * case.c.size()];
        let mut before = Vec::new();
        if matches!(case.add, Add::InPlace) {
            let numbers = Stock::new(m, n, false, pad, stored, 3);
            (c, before) = (numbers.bytes, numbers.values);
        }
        for row in c.chunks_mut((c_stride * case.c.size()).max(1)) {
            row[n * case.c.size()..].fill(GUARD);
        }
        Data {
            a: Stock::new(m, k, case.a_transposed, pad, Stored::Float(case.a), 1),
            b: Stock::new(k, n, case.b_transposed, pad, case.b, 2),
            c,
            before,
            c_stride,
            d: Stock::new(m, n, false, 7, stored, 4),
            bias: case
                .bias
                .map(|float| Stock::new(1, n, false, 0, Stored::Float(float), 5)),
        }
    }

    /// C after the product; `pool: None` computes it on this thread alone.
    fn product(&self, case: &Case, isa: Isa, pool: Option<&Pool>) -> Result<Vec<u8>, TestCaseError> {
        let &Case { m, n, k, .. } = case;
        let threads = pool.map_or(1, Pool::threads);
        let mut bytes = self.c.clone();
        let c = Floats::new(bytes.as_mut_ptr(), case.c);
        let gemm = Gemm {
            m,
            n,
            k,
            a: self.a.view(),
            b: self.b.matrix(),
            c,
            c_stride: self.c_stride,
            add: match case.add {
                Add::Nothing => None,
                Add::InPlace => Some((c, self.c_stride)),
                Add::Other => Some((self.d.floats(), self.d.stride)),
            },
            bias: self.bias.as_ref().map(Stock::floats),
        };
        let mut workspace = Workspace::new(gemm.form().workspace_bytes(isa, threads));
        // SAFETY: all buffers have the sizes of the product; `isa` comes from `available`.
        unsafe {
            let start = workspace.data.as_mut_ptr().add(workspace.start);
            match pool {
                Some(pool) => gemm.run(pool, isa, start),
                None => gemm.run_serial(isa, start),
            }
        }
        workspace.check()?;
        Ok(bytes)
    }

    fn check(&self, case: &Case, isa: Isa, bytes: &[u8]) -> Result<(), TestCaseError> {
        let pairs = isa.multiplies_bf16() && case.a == Float::Bf16;
        let b = |p, j| match pairs {
            true => half::bf16::from_f32(self.b.at(p, j)).to_f64(),
            false => f64::from(self.b.at(p, j)),
        };
        let (relative, least) = match case.c {
            Float::F32 => (0.0, 0.0),
            Float::Bf16 => (2_f64.powi(-8), 0.0),
            Float::F16 => (2_f64.powi(-10), 2_f64.powi(-24)),
        };
        let c = decode(case.c, bytes);
        let columns: Vec<f64> = (0..case.n)
            .flat_map(|j| (0..case.k).map(move |p| (p, j)))
            .map(|(p, j)| b(p, j))
            .collect();
        // Of many rows a few, and the last one.
        let few = 1 + case.m / 40;
        for i in (0..case.m).filter(|&i| i % few == 0 || i + 1 == case.m) {
            let row: Vec<f64> = (0..case.k).map(|p| self.a.at(i, p).into()).collect();
            for j in 0..case.n {
                let terms = row.iter().zip(&columns[j * case.k..]).map(|(a, b)| a * b);
                let (mut sum, mut size) = terms.fold((0.0, 1.0), |(s, t), x| (s + x, t + x.abs()));
                for extra in [
                    match case.add {
                        Add::Nothing => 0.0,
                        Add::InPlace => self.before[i * self.c_stride + j],
                        Add::Other => self.d.at(i, j),
                    },
                    self.bias.as_ref().map_or(0.0, |bias| bias.at(0, j)),
                ] {
                    sum += f64::from(extra);
                    size += f64::from(extra).abs();
                }
                let got = f64::from(c[i * self.c_stride + j]);
                let allowed = 1e-6 * size + relative * sum.abs() + least;
                prop_assert!((got - sum).abs() <= allowed, "C[{i}, {j}] = {got}, not {sum}");
            }
        }
        for i in 0..case.m {
            let row = &bytes[i * self.c_stride * case.c.size()..(i + 1) * self.c_stride * case.c.size()];
            let behind = &row[case.n * case.c.size()..];
            prop_assert!(behind.iter().all(|&x| x == GUARD), "row {i} written past its end");
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn agrees_with_a_naive_product_for_any_number_of_threads(case in cases()) {
        let data = Data::new(&case);
        for &isa in Isa::available() {
            let serial = data.product(&case, isa, None)?;
            data.check(&case, isa, &serial)?;
            for threads in 1..=3 {
                let pool = Pool::new(threads, 256 << 10).unwrap();
                let c = data.product(&case, isa, Some(&pool))?;
                prop_assert!(c == serial, "{isa:?}: {threads} threads differ");
            }
        }
    }
}

/// More than one block in every direction.
#[test]
fn large_products_agree() {
    let floats = |float| (float, Stored::Float(float), float);
    for (a, b, c) in [
        floats(Float::F32),
        floats(Float::Bf16),
        (Float::Bf16, Stored::Block(Block::Nf4), Float::Bf16),
        (Float::F16, Stored::Block(Block::Q4K), Float::F16),
    ] {
        for (a_transposed, b_transposed) in [(false, false), (false, true), (true, false)] {
            let (n, k) = match b {
                Stored::Float(_) => (1601, 333),
                Stored::Block(_) if b_transposed => (1601, 768),
                Stored::Block(_) => (1792, 333),
            };
            let case = Case {
                a_transposed,
                b_transposed,
                pad: 1,
                a,
                b,
                c,
                add: Add::Other,
                bias: Some(a),
                ..Case::new(301, n, k)
            };
            let data = Data::new(&case);
            for &isa in Isa::available() {
                let serial = data.product(&case, isa, None).unwrap();
                data.check(&case, isa, &serial).unwrap();
                let pool = Pool::new(3, 256 << 10).unwrap();
                assert_eq!(data.product(&case, isa, Some(&pool)).unwrap(), serial, "{isa:?}");
            }
        }
    }
}

/// A sum so long that a C in 16 bits could not have whole panels of B in the room there is.
#[test]
fn a_rounded_result_of_a_long_sum_is_rounded_once() {
    let case = Case {
        a: Float::Bf16,
        b: Stored::Float(Float::Bf16),
        c: Float::Bf16,
        ..Case::new(5, 70, 60_000)
    };
    let data = Data::new(&case);
    for &isa in Isa::available() {
        let c = data.product(&case, isa, None).unwrap();
        data.check(&case, isa, &c).unwrap();
    }
}

/// Plans are made for machines with other instruction sets than this one.
#[test]
fn workspace_is_known_for_every_instruction_set() {
    for isa in Isa::ALL {
        for (m, n, k) in [(1, 1, 1), (2048, 576, 576), (256, 49152, 576)] {
            for (a, c) in [
                (Float::F32, Float::F32),
                (Float::Bf16, Float::Bf16),
                (Float::F16, Float::F32),
            ] {
                let bytes = |threads| Form::new(m, n, k).stored(a, c).workspace_bytes(isa, threads);
                let per_thread = bytes(2) - bytes(1);
                assert!(bytes(1) > per_thread && per_thread % WORKSPACE_ALIGN as u64 == 0);
                assert_eq!(bytes(3), bytes(2) + per_thread);
                assert!(bytes(1) < 4 << 20, "{isa:?}: a few MiB at most");
            }
        }
        for (m, n, k) in [(0, 5, 5), (5, 0, 5), (5, 5, 0)] {
            assert_eq!(Form::new(m, n, k).workspace_bytes(isa, 3), 0);
        }
    }
}
