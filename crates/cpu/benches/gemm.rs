//! Speed of f32 matrix products: ours, the `gemm` crate and `matrixmultiply`, interleaved.
//!
//!     cargo bench -p tightfit-cpu --bench gemm
//!
//! prints one JSON line per shape, GFLOP/s (medians). With `-- --stdin` it measures the shapes it
//! reads, one `layout m n k` per line, as `bench/gemm.py` does to compare with PyTorch. Layouts:
//! `nt` is A · Bᵀ (linear forward), `nn` A · B (input gradient), `tn` Aᵀ · B (weight gradient),
//! all of row-major matrices. `THREADS` sets the number of threads (default 2).

use std::io::{self, BufRead, Write};
use std::time::{Duration, Instant};
use tightfit_cpu::floats::Floats;
use tightfit_cpu::gemm::{Form, Gemm, View, WORKSPACE_ALIGN};
use tightfit_cpu::pool::Pool;
use tightfit_cpu::simd::Isa;

const DEFAULT: &str = "nt 2048 576 576\nnn 2048 576 576\ntn 576 576 2048";
const ROUNDS: usize = 7;

#[derive(Clone, Copy)]
struct Shape<'a> {
    layout: &'a str,
    m: usize,
    n: usize,
    k: usize,
}

impl Shape<'_> {
    fn parse(line: &str) -> Option<Shape<'_>> {
        let mut words = line.split_whitespace();
        let layout = words.next().filter(|word| ["nn", "nt", "tn"].contains(word))?;
        let mut size = || words.next()?.parse().ok();
        Some(Shape {
            layout,
            m: size()?,
            n: size()?,
            k: size()?,
        })
    }

    fn a(&self, a: &[f32]) -> View {
        match self.layout {
            "tn" => View::row_major(a.as_ptr(), self.m).transposed(),
            _ => View::row_major(a.as_ptr(), self.k),
        }
    }

    fn b(&self, b: &[f32]) -> View {
        match self.layout {
            "nt" => View::row_major(b.as_ptr(), self.k).transposed(),
            _ => View::row_major(b.as_ptr(), self.n),
        }
    }
}

fn main() -> io::Result<()> {
    let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(2);
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("MATMUL_NUM_THREADS", threads.to_string()) };
    let pool = Pool::new(threads, 256 << 10)?;
    if std::env::args().any(|arg| arg == "--stdin") {
        io::stdin().lock().lines().try_for_each(|line| report(&pool, &line?))
    } else {
        DEFAULT.lines().try_for_each(|line| report(&pool, line))
    }
}

fn report(pool: &Pool, line: &str) -> io::Result<()> {
    let Some(shape) = Shape::parse(line) else {
        return Err(io::Error::other(format!("not `layout m n k`: {line}")));
    };
    let [ours, gemm, matrixmultiply] = measure(pool, shape);
    let Shape { layout, m, n, k } = shape;
    let mut out = io::stdout();
    writeln!(
        out,
        r#"{{"layout":"{layout}","m":{m},"n":{n},"k":{k},"ours":{ours:.1},"gemm":{gemm:.1},"matrixmultiply":{matrixmultiply:.1}}}"#
    )?;
    out.flush()
}

/// Median GFLOP/s of the three libraries.
fn measure(pool: &Pool, shape: Shape) -> [f64; 3] {
    let Shape { m, n, k, .. } = shape;
    let values = |len: usize| (0..len).map(|i| (i * 37 % 101) as f32 / 101.0 - 0.5).collect();
    let (a, b): (Vec<f32>, Vec<f32>) = (values(m * k), values(k * n));
    let mut c = vec![0.0f32; m * n];
    let isa = Isa::detect();
    let bytes = Form::new(m, n, k).workspace_bytes(isa, pool.threads()) as usize;
    let mut workspace = vec![0u8; bytes + WORKSPACE_ALIGN];
    let aligned = workspace.as_ptr().align_offset(WORKSPACE_ALIGN);
    let (a, b) = (shape.a(&a), shape.b(&b));

    let mut runs: [(Vec<f64>, usize); 3] = Default::default();
    // One library after the other: their idle threads spin for a while and would slow the next one down.
    for (which, (times, repeats)) in runs.iter_mut().enumerate() {
        for _ in 0..ROUNDS {
            let c = c.as_mut_ptr();
            // SAFETY: views and C cover whole buffers of their size, the workspace is aligned and
            // large enough, and this machine was asked what it can run.
            let mut product = || unsafe {
                match which {
                    0 => {
                        let product = Gemm {
                            m,
                            n,
                            k,
                            a,
                            b: b.into(),
                            c: Floats::of_mut(c),
                            c_stride: n,
                            add: None,
                            bias: None,
                        };
                        product.run(pool, isa, workspace.as_mut_ptr().add(aligned));
                    }
                    1 => gemm_crate(pool.threads(), shape, a, b, c),
                    _ => matrix_multiply(shape, a, b, c),
                }
            };
            if *repeats == 0 {
                product();
                let time = seconds(1, &mut product);
                *repeats = (Duration::from_millis(40).as_secs_f64() / time).ceil() as usize;
            }
            times.push(seconds(*repeats, &mut product));
        }
    }
    runs.map(|(mut times, _)| {
        times.sort_by(f64::total_cmp);
        2.0 * (m * n * k) as f64 / times[times.len() / 2] * 1e-9
    })
}

/// Seconds per call.
fn seconds(repeats: usize, f: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..repeats).for_each(|_| f());
    start.elapsed().as_secs_f64() / repeats as f64
}

/// Where a matrix is, with the floats from row to row and from column to column.
fn strides(view: View) -> (*const f32, isize, isize) {
    let (data, stride) = (view.data.address().cast_const().cast(), view.stride as isize);
    match view.transposed {
        true => (data, 1, stride),
        false => (data, stride, 1),
    }
}

unsafe fn gemm_crate(threads: usize, shape: Shape, a: View, b: View, c: *mut f32) {
    let Shape { m, n, k, .. } = shape;
    let ((a, rsa, csa), (b, rsb, csb)) = (strides(a), strides(b));
    // SAFETY: the caller's contract.
    unsafe {
        #[rustfmt::skip]
        gemm::gemm(
            m, n, k, c, 1, n as isize, false, a, csa, rsa, b, csb, rsb,
            0.0, 1.0, false, false, false, gemm::Parallelism::Rayon(threads),
        );
    }
}

unsafe fn matrix_multiply(shape: Shape, a: View, b: View, c: *mut f32) {
    let Shape { m, n, k, .. } = shape;
    let ((a, rsa, csa), (b, rsb, csb)) = (strides(a), strides(b));
    // SAFETY: the caller's contract.
    unsafe {
        #[rustfmt::skip]
        matrixmultiply::sgemm(
            m, k, n, 1.0, a, rsa, csa, b, rsb, csb, 0.0, c, n as isize, 1,
        );
    }
}
