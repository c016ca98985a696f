use crate::util::*;
use tightfit_cpu::kernel::*;

const EPS: f32 = 1e-5;

#[derive(Default)]
struct Norm {
    y: Vec<f64>,
    mean: Vec<f64>,
    rstd: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
    db: Vec<f64>,
}

/// LayerNorm where `centred`, else RMSNorm with a bias of zero; forward and backward.
fn reference(centred: bool, x: &[f64], w: &[f64], b: &[f64], dy: &[f64]) -> Norm {
    let h = w.len();
    let mut r = Norm {
        dw: vec![0.0; h],
        db: vec![0.0; h],
        ..Default::default()
    };
    for (x, dy) in x.chunks(h).zip(dy.chunks(h)) {
        let mean = if centred { x.iter().sum::<f64>() / h as f64 } else { 0.0 };
        let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / h as f64;
        let rstd = 1.0 / (var + f64::from(EPS)).sqrt();
        let xhat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
        let g: Vec<f64> = dy.iter().zip(w).map(|(d, w)| d * w).collect();
        let mean_g = if centred { g.iter().sum::<f64>() / h as f64 } else { 0.0 };
        let mean_gx = inner(&g, &xhat) / h as f64;
        for i in 0..h {
            r.y.push(xhat[i] * w[i] + b[i]);
            r.dx.push(rstd * (g[i] - mean_g - xhat[i] * mean_gx));
            r.dw[i] += dy[i] * xhat[i];
            r.db[i] += dy[i];
        }
        r.mean.push(mean);
        r.rstd.push(rstd);
    }
    r
}

struct Case {
    rows: usize,
    hidden: usize,
    x: Vec<f32>,
    w: Vec<f32>,
    b: Vec<f32>,
    dy: Vec<f32>,
    acc_dx: Vec<f32>,
    acc_dw: Vec<f32>,
    acc_db: Vec<f32>,
}

impl Case {
    fn new(rows: usize, hidden: usize, shift: f32) -> Self {
        let mut random = Random::new((rows * 1000 + hidden) as u64);
        let n = rows * hidden;
        Self {
            rows,
            hidden,
            x: random.vec(n, 2.0).iter().map(|x| x + shift).collect(),
            w: random.vec(hidden, 1.0),
            b: random.vec(hidden, 1.0),
            dy: random.vec(n, 1.0),
            acc_dx: random.vec(n, 1.0),
            acc_dw: random.vec(hidden, 1.0),
            acc_db: random.vec(hidden, 1.0),
        }
    }
}

fn plus(a: &[f64], b: &[f32]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, &b)| a + f64::from(b)).collect()
}

const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 7), (70, 37), (1000, 64), (45, 577), (2, 20000)];

#[test]
fn reference_gradients_agree_with_finite_differences() {
    for centred in [false, true] {
        let case = Case::new(5, 11, 0.5);
        let (x, w, b, dy) = (f64s(&case.x), f64s(&case.w), f64s(&case.b), f64s(&case.dy));
        let want = reference(centred, &x, &w, &b, &dy);
        check_gradient(|x| inner(&reference(centred, x, &w, &b, &dy).y, &dy), &x, &want.dx);
        check_gradient(|w| inner(&reference(centred, &x, w, &b, &dy).y, &dy), &w, &want.dw);
        check_gradient(|b| inner(&reference(centred, &x, &w, b, &dy).y, &dy), &b, &want.db);
    }
}

#[test]
fn rms_norm_agrees() {
    for (rows, hidden) in SHAPES {
        let case = &Case::new(rows, hidden, 0.0);
        let no_bias = vec![0.0; hidden];
        let want = reference(false, &f64s(&case.x), &f64s(&case.w), &no_bias, &f64s(&case.dy));
        // Outputs of their own; then in place, accumulating.
        for in_place in [false, true] {
            every_context(
                |cx| rms_norm_run(cx, case, in_place),
                |got| {
                    close("y", &got[0], &want.y, 2e-6);
                    close("rstd", &got[1], &want.rstd, 2e-6);
                    if in_place {
                        close("dx", &got[2], &plus(&want.dx, &case.acc_dx), 3e-6);
                        close("dw", &got[3], &plus(&want.dw, &case.acc_dw), 3e-6);
                    } else {
                        close("dx", &got[2], &want.dx, 3e-6);
                        close("dw", &got[3], &want.dw, 3e-6);
                    }
                },
            );
        }
    }
}

fn rms_norm_run(cx: &Context, case: &Case, in_place: bool) -> Vec<Vec<f32>> {
    let &Case { rows, hidden, .. } = case;
    let (mut y, mut rstd) = (Buffer::new(rows * hidden), Buffer::new(rows));
    let mut dx = if in_place {
        Buffer::from(&case.acc_dx)
    } else {
        Buffer::from(&case.dy)
    };
    let mut dw = if in_place {
        Buffer::from(&case.acc_dw)
    } else {
        Buffer::new(hidden)
    };
    if in_place {
        y = Buffer::from(&case.x);
    }
    let mut workspace = Buffer::bytes(rms_norm_backward_workspace(rows, hidden));
    let forward = RmsNorm {
        rows,
        hidden,
        eps: EPS,
        x: if in_place {
            y.ptr().into()
        } else {
            case.x.as_ptr().into()
        },
        w: case.w.as_ptr().into(),
        y: y.ptr().into(),
        rstd: rstd.ptr(),
    };
    let backward = RmsNormBackward {
        rows,
        hidden,
        x: case.x.as_ptr().into(),
        w: case.w.as_ptr().into(),
        rstd: rstd.ptr(),
        // Over `dy` where not over the accumulator.
        dy: if in_place {
            case.dy.as_ptr().into()
        } else {
            dx.ptr().into()
        },
        acc_dx: in_place.then_some(dx.ptr().cast_const().into()),
        acc_dw: in_place.then_some(dw.ptr().cast_const()),
        dx: Some(dx.ptr().into()),
        dw: Some(dw.ptr()),
        workspace: workspace.ptr().cast(),
    };
    // SAFETY: buffers of the shapes given.
    unsafe {
        rms_norm(cx, &forward);
        rms_norm_backward(cx, &backward);
    }
    workspace.assert_last_word_written();
    [y, rstd, dx, dw].iter().map(|b| b.get().to_vec()).collect()
}

#[test]
fn layer_norm_agrees() {
    for (rows, hidden) in SHAPES {
        let case = &Case::new(rows, hidden, 3.0);
        let (x, w, b, dy) = (f64s(&case.x), f64s(&case.w), f64s(&case.b), f64s(&case.dy));
        let want = reference(true, &x, &w, &b, &dy);
        // A row of one element has no variance: rstd is 1/√eps, and rounding is multiplied by it.
        let tolerance = if hidden == 1 { 1e-3 } else { 1e-5 };
        for in_place in [false, true] {
            every_context(
                |cx| layer_norm_run(cx, case, in_place),
                |got| {
                    close("y", &got[0], &want.y, tolerance);
                    close("mean", &got[1], &want.mean, 2e-6);
                    close("rstd", &got[2], &want.rstd, 3e-6);
                    if in_place {
                        close("dx", &got[3], &plus(&want.dx, &case.acc_dx), tolerance);
                        close("dw", &got[4], &plus(&want.dw, &case.acc_dw), tolerance);
                        close("db", &got[5], &plus(&want.db, &case.acc_db), tolerance);
                    } else {
                        close("dx", &got[3], &want.dx, tolerance);
                        close("dw", &got[4], &want.dw, tolerance);
                        close("db", &got[5], &want.db, tolerance);
                    }
                },
            );
        }
    }
}

fn layer_norm_run(cx: &Context, case: &Case, in_place: bool) -> Vec<Vec<f32>> {
    let &Case { rows, hidden, .. } = case;
    let mut y = if in_place {
        Buffer::from(&case.x)
    } else {
        Buffer::new(rows * hidden)
    };
    let (mut mean, mut rstd) = (Buffer::new(rows), Buffer::new(rows));
    let mut dx = if in_place {
        Buffer::from(&case.acc_dx)
    } else {
        Buffer::from(&case.dy)
    };
    let mut dw = if in_place {
        Buffer::from(&case.acc_dw)
    } else {
        Buffer::new(hidden)
    };
    let mut db = if in_place {
        Buffer::from(&case.acc_db)
    } else {
        Buffer::new(hidden)
    };
    let mut workspace = Buffer::bytes(layer_norm_backward_workspace(rows, hidden));
    let forward = LayerNorm {
        rows,
        hidden,
        eps: EPS,
        x: if in_place {
            y.ptr().into()
        } else {
            case.x.as_ptr().into()
        },
        w: case.w.as_ptr().into(),
        b: case.b.as_ptr().into(),
        y: y.ptr().into(),
        mean: mean.ptr(),
        rstd: rstd.ptr(),
    };
    let backward = LayerNormBackward {
        rows,
        hidden,
        x: case.x.as_ptr().into(),
        w: case.w.as_ptr().into(),
        mean: mean.ptr(),
        rstd: rstd.ptr(),
        dy: if in_place {
            case.dy.as_ptr().into()
        } else {
            dx.ptr().into()
        },
        acc_dx: in_place.then_some(dx.ptr().cast_const().into()),
        acc_dw: in_place.then_some(dw.ptr().cast_const()),
        acc_db: in_place.then_some(db.ptr().cast_const()),
        dx: Some(dx.ptr().into()),
        dw: Some(dw.ptr()),
        db: Some(db.ptr()),
        workspace: workspace.ptr().cast(),
    };
    // SAFETY: buffers of the shapes given.
    unsafe {
        layer_norm(cx, &forward);
        layer_norm_backward(cx, &backward);
    }
    workspace.assert_last_word_written();
    [y, mean, rstd, dx, dw, db].iter().map(|b| b.get().to_vec()).collect()
}

#[test]
fn layer_norm_of_a_large_mean_keeps_its_variance() {
    let case = &Case::new(4, 61, 1000.0);
    let (x, w, b, dy) = (f64s(&case.x), f64s(&case.w), f64s(&case.b), f64s(&case.dy));
    let want = reference(true, &x, &w, &b, &dy);
    every_context(
        |cx| layer_norm_run(cx, case, false),
        |got| close("y", &got[0], &want.y, 1e-3),
    );
}
