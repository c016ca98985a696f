use crate::util::*;
use tightfit_cpu::kernel::*;
use tightfit_cpu::multiversion;
use tightfit_cpu::simd::{Isa, Simd};

const LENGTHS: [usize; 5] = [1, 7, 100, 16384, 50_003];

#[test]
fn add_agrees_and_works_in_place() {
    for n in LENGTHS {
        let mut random = Random::new(n as u64);
        let (a, b) = (random.vec(n, 3.0), random.vec(n, 3.0));
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(a + b)).collect();
        every_context(
            |cx| {
                let (mut c, mut over_a, mut over_b) = (Buffer::new(n), Buffer::from(&a), Buffer::from(&b));
                let (pa, pb) = (a.as_ptr(), b.as_ptr());
                // SAFETY: buffers of `n` floats.
                unsafe {
                    add(
                        cx,
                        &Add {
                            len: n,
                            a: pa.into(),
                            b: pb.into(),
                            c: c.ptr().into(),
                        },
                    );
                    add(
                        cx,
                        &Add {
                            len: n,
                            a: over_a.ptr().into(),
                            b: pb.into(),
                            c: over_a.ptr().into(),
                        },
                    );
                    add(
                        cx,
                        &Add {
                            len: n,
                            a: pa.into(),
                            b: over_b.ptr().into(),
                            c: over_b.ptr().into(),
                        },
                    );
                }
                [c, over_a, over_b].iter().map(|b| b.get().to_vec()).collect()
            },
            |got| got.iter().for_each(|c| close("c", c, &want, 0.0)),
        );
    }
}

#[test]
fn zero_fills_exactly() {
    for n in [0, 1, 1000, 300_000] {
        every_context(
            |cx| {
                let mut buffer = Buffer::new(n);
                // SAFETY: `n` floats.
                unsafe { zero(cx, buffer.ptr().cast(), n * 4) };
                vec![buffer.get().to_vec()]
            },
            |got| assert!(got[0].iter().all(|v| v.to_bits() == 0)),
        );
    }
}

fn swiglu_reference(gate: &[f64], up: &[f64], dact: &[f64]) -> [Vec<f64>; 3] {
    let mut out = [vec![], vec![], vec![]];
    for ((g, u), d) in gate.iter().zip(up).zip(dact) {
        let s = 1.0 / (1.0 + (-g).exp());
        out[0].push(g * s * u);
        out[1].push(d * u * s * (1.0 + g * (1.0 - s)));
        out[2].push(d * g * s);
    }
    out
}

#[test]
fn swiglu_agrees() {
    for n in LENGTHS {
        let mut random = Random::new(n as u64);
        let (gate, up, dact) = (random.vec(n, 20.0), random.vec(n, 3.0), random.vec(n, 1.0));
        let [act, dgate, dup] = swiglu_reference(&f64s(&gate), &f64s(&up), &f64s(&dact));
        if n == 100 {
            let (g, u, d) = (f64s(&gate), f64s(&up), f64s(&dact));
            check_gradient(|g| inner(&swiglu_reference(g, &u, &d)[0], &d), &g, &dgate);
            check_gradient(|u| inner(&swiglu_reference(&g, u, &d)[0], &d), &u, &dup);
        }
        // Where dgate and dup go: new buffers, or over two of gate (0), up (1) and dact (2).
        for over in [None, Some((0, 1)), Some((1, 0)), Some((2, 1)), Some((0, 2))] {
            every_context(
                |cx| {
                    let mut inputs = [&gate, &up, &dact].map(|x| Buffer::from(x));
                    let [g, u, d] = [0, 1, 2].map(|i| inputs[i].ptr());
                    let (mut y, mut new) = (Buffer::new(n), [Buffer::new(n), Buffer::new(n)]);
                    let (dgate, dup) = match over {
                        Some((i, j)) => ([g, u, d][i], [g, u, d][j]),
                        None => (new[0].ptr(), new[1].ptr()),
                    };
                    let backward = SwigluBackward {
                        len: n,
                        gate: g.into(),
                        up: u.into(),
                        dact: d.into(),
                        dgate: dgate.into(),
                        dup: dup.into(),
                    };
                    // SAFETY: buffers of `n` floats.
                    unsafe {
                        swiglu(
                            cx,
                            &Swiglu {
                                len: n,
                                gate: g.into(),
                                up: u.into(),
                                act: y.ptr().into(),
                            },
                        );
                        swiglu_backward(cx, &backward);
                    }
                    let (dgate, dup) = match over {
                        Some((i, j)) => (inputs[i].get(), inputs[j].get()),
                        None => (new[0].get(), new[1].get()),
                    };
                    vec![y.get().to_vec(), dgate.to_vec(), dup.to_vec()]
                },
                |got| {
                    close("act", &got[0], &act, 1e-6);
                    close("dgate", &got[1], &dgate, 1e-6);
                    close("dup", &got[2], &dup, 1e-6);
                },
            );
        }
    }
}

/// The error function by its series, to 1e-13 for |x| ≤ 6.
fn erf_f64(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    // e^(−x²) Σ 2ⁿ x^(2n+1) / (2n+1)!!: all terms positive.
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / (2 * n + 1) as f64;
        sum += term;
    }
    sum * (-x * x).exp() * 2.0 / std::f64::consts::PI.sqrt()
}

fn gelu_reference(kind: GeluKind, x: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
    let mut out = [vec![], vec![]];
    for (&x, dy) in x.iter().zip(dy) {
        let (y, slope) = match kind {
            GeluKind::Erf => {
                let phi = 0.5 * (1.0 + erf_f64(x / 2f64.sqrt()));
                let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
                (x * phi, phi + x * density)
            }
            GeluKind::Tanh => {
                let k = (2.0 / std::f64::consts::PI).sqrt();
                let t = (k * (x + 0.044715 * x.powi(3))).tanh();
                let du = k * (1.0 + 3.0 * 0.044715 * x * x);
                (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du)
            }
        };
        out[0].push(y);
        out[1].push(dy * slope);
    }
    out
}

#[test]
fn gelu_agrees() {
    for kind in [GeluKind::Erf, GeluKind::Tanh] {
        for n in LENGTHS {
            let mut random = Random::new(n as u64);
            let (x, dy) = (random.vec(n, 6.0), random.vec(n, 1.0));
            let [y, dx] = gelu_reference(kind, &f64s(&x), &f64s(&dy));
            if n == 100 {
                let d = f64s(&dy);
                check_gradient(|x| inner(&gelu_reference(kind, x, &d)[0], &d), &f64s(&x), &dx);
            }
            every_context(
                |cx| {
                    let mut over_x = Buffer::from(&x);
                    let (mut back_x, mut back_dy) = (Buffer::from(&x), Buffer::from(&dy));
                    let backward = |x: *const f32, dy: *const f32, dx: *mut f32| GeluBackward {
                        len: n,
                        kind,
                        x: x.into(),
                        dy: dy.into(),
                        dx: dx.into(),
                    };
                    // SAFETY: buffers of `n` floats.
                    unsafe {
                        gelu(
                            cx,
                            &Gelu {
                                len: n,
                                kind,
                                x: over_x.ptr().into(),
                                y: over_x.ptr().into(),
                            },
                        );
                        let p = back_x.ptr();
                        gelu_backward(cx, &backward(p, dy.as_ptr(), p));
                        let p = back_dy.ptr();
                        gelu_backward(cx, &backward(x.as_ptr(), p, p));
                    }
                    [over_x, back_x, back_dy].iter().map(|b| b.get().to_vec()).collect()
                },
                |got| {
                    close("y", &got[0], &y, 1e-6);
                    close("dx over x", &got[1], &dx, 1e-6);
                    close("dx over dy", &got[2], &dx, 1e-6);
                },
            );
        }
    }
}

#[test]
fn bias_backward_agrees() {
    for (rows, cols) in [(1, 1), (3, 70), (1000, 64), (77, 1003)] {
        let mut random = Random::new((rows + cols) as u64);
        let (dy, acc) = (random.vec(rows * cols, 1.0), random.vec(cols, 1.0));
        let mut want = vec![0.0; cols];
        for (i, &d) in dy.iter().enumerate() {
            want[i % cols] += f64::from(d);
        }
        let with_acc: Vec<f64> = want.iter().zip(&acc).map(|(w, &a)| w + f64::from(a)).collect();
        every_context(
            |cx| {
                let (mut plain, mut over) = (Buffer::new(cols), Buffer::from(&acc));
                let args = |acc, db| BiasBackward {
                    rows,
                    cols,
                    dy: dy.as_ptr().into(),
                    acc,
                    db,
                };
                // SAFETY: buffers of the shapes given.
                unsafe {
                    bias_backward(cx, &args(None, plain.ptr()));
                    bias_backward(cx, &args(Some(over.ptr().cast_const()), over.ptr()));
                }
                vec![plain.get().to_vec(), over.get().to_vec()]
            },
            |got| {
                close("db", &got[0], &want, 2e-6);
                close("acc + db", &got[1], &with_acc, 2e-6);
            },
        );
    }
}

multiversion! {
    unsafe fn exp_all(x: &[f32], y: &mut [f32]) = exp_body;
}

#[inline(always)]
unsafe fn exp_body<S: Simd>(s: S, x: &[f32], y: &mut [f32]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: only lanes below the length are touched.
        unsafe {
            let v = exp(s, s.load_first(x.as_ptr().add(i), x.len() - i));
            s.store_first(y.as_mut_ptr().add(i), v, x.len() - i);
        }
    }
}

#[test]
fn exp_is_within_two_ulps_over_its_range() {
    let mut x: Vec<f32> = (-87_300..=88_300).map(|i| i as f32 / 1000.0).collect();
    x.extend((-20_000..20_000).map(|i| i as f32 * 3.1e-6));
    for &isa in Isa::available() {
        let mut y = vec![0.0; x.len()];
        // SAFETY: `available` lists what can run.
        unsafe { exp_all(isa, &x, &mut y) };
        for (&x, &y) in x.iter().zip(&y) {
            let want = f64::from(x).exp();
            // A unit in the last place of the f32 result.
            let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
            assert!(
                (f64::from(y) - want).abs() <= 2.0 * ulp,
                "{isa:?}: exp({x}) = {y}, not {want}"
            );
        }
        let edges = [f32::NEG_INFINITY, -1e30, -90.0, 0.0, f32::NAN, f32::NAN, 0.0, 0.0];
        let mut y = [0.0; 8];
        // SAFETY: as above.
        unsafe { exp_all(isa, &edges, &mut y) };
        assert_eq!(y[..4], [0.0, 0.0, 0.0, 1.0], "{isa:?}");
        assert!(y[4].is_nan(), "{isa:?}: NaN must not vanish");
        // SAFETY: as above.
        unsafe { exp_all(isa, &[1000.0; 8], &mut y) };
        assert!(y[0] > 1e38, "{isa:?}");
    }
}
