use crate::util::*;
use tightfit_cpu::floats::Float;
use tightfit_cpu::kernel::*;

struct Case {
    shape: AttentionShape,
    doc_start: Vec<i32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
}

impl Case {
    fn new(shape: AttentionShape, longest: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let queries = shape.rows * shape.heads * shape.head_dim;
        let keys = shape.rows * shape.kv_heads * shape.head_dim;
        Self {
            shape,
            doc_start: documents(&mut random, shape.rows, longest),
            q: random.vec(queries, 2.0),
            k: random.vec(keys, 2.0),
            v: random.vec(keys, 1.0),
            d_o: random.vec(queries, 1.0),
        }
    }
}

#[derive(Default)]
struct Reference {
    o: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

/// Forward and backward, row by row.
fn reference(case: &Case, q: &[f64], k: &[f64], v: &[f64]) -> Reference {
    let AttentionShape {
        rows,
        heads,
        kv_heads,
        head_dim: d,
        scale,
        window,
    } = case.shape;
    let scale = f64::from(scale);
    let mut r = Reference {
        o: vec![0.0; q.len()],
        lse: vec![0.0; rows * heads],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
    };
    for t in 0..rows {
        let first = (case.doc_start[t] as usize).max((t + 1).saturating_sub(window.unwrap_or(rows)));
        for h in 0..heads {
            let query = (t * heads + h) * d;
            let key = |j: usize| (j * kv_heads + h / (heads / kv_heads)) * d;
            let scores: Vec<f64> = (first..=t)
                .map(|j| scale * inner(&q[query..query + d], &k[key(j)..key(j) + d]))
                .collect();
            let max = scores.iter().fold(f64::MIN, |m, &s| m.max(s));
            let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
            r.lse[t * heads + h] = lse;
            let d_o: Vec<f64> = f64s(&case.d_o[query..query + d]);
            for (j, score) in (first..=t).zip(&scores) {
                for i in 0..d {
                    r.o[query + i] += (score - lse).exp() * v[key(j) + i];
                }
            }
            let delta = inner(&r.o[query..query + d], &d_o);
            for (j, score) in (first..=t).zip(&scores) {
                let p = (score - lse).exp();
                let ds = p * (inner(&d_o, &v[key(j)..key(j) + d]) - delta) * scale;
                for i in 0..d {
                    r.dq[query + i] += ds * k[key(j) + i];
                    r.dk[key(j) + i] += ds * q[query + i];
                    r.dv[key(j) + i] += p * d_o[i];
                }
            }
        }
    }
    r
}

/// Output, log-sum-exp and the three gradients of the kernels.
fn run(cx: &Context, case: &Case) -> Vec<Vec<f32>> {
    let shape = case.shape;
    let threads = cx.pool.threads();
    let (mut o, mut lse) = (Buffer::new(case.q.len()), Buffer::new(shape.rows * shape.heads));
    let mut workspace = Buffer::bytes(attention_workspace(&shape, Float::F32, threads));
    let forward = Attention {
        shape,
        q: case.q.as_ptr().into(),
        k: case.k.as_ptr().into(),
        v: case.v.as_ptr().into(),
        doc_start: case.doc_start.as_ptr(),
        o: o.ptr().into(),
        lse: lse.ptr(),
        workspace: workspace.ptr().cast(),
    };
    // SAFETY: buffers of the shapes given.
    unsafe { attention(cx, &forward) };
    workspace.assert_last_word_written();
    let mut dq = Buffer::new(case.q.len());
    let (mut dk, mut dv) = (Buffer::new(case.k.len()), Buffer::new(case.k.len()));
    let mut workspace = Buffer::bytes(attention_backward_workspace(&shape, Float::F32, threads));
    let backward = AttentionBackward {
        shape,
        q: forward.q,
        k: forward.k,
        v: forward.v,
        o: o.ptr().into(),
        lse: lse.ptr(),
        d_o: case.d_o.as_ptr().into(),
        doc_start: forward.doc_start,
        dq: dq.ptr().into(),
        dk: dk.ptr().into(),
        dv: dv.ptr().into(),
        workspace: workspace.ptr().cast(),
    };
    // SAFETY: buffers of the shapes given.
    unsafe { attention_backward(cx, &backward) };
    workspace.assert_last_word_written();
    [o, lse, dq, dk, dv].iter().map(|b| b.get().to_vec()).collect()
}

fn check(shape: AttentionShape, longest: usize, seed: u64) {
    let case = Case::new(shape, longest, seed);
    let want = reference(&case, &f64s(&case.q), &f64s(&case.k), &f64s(&case.v));
    every_context(
        |cx| run(cx, &case),
        |got| {
            close("o", &got[0], &want.o, 3e-6);
            close("lse", &got[1], &want.lse, 3e-6);
            close("dq", &got[2], &want.dq, 1e-5);
            close("dk", &got[3], &want.dk, 1e-5);
            close("dv", &got[4], &want.dv, 1e-5);
        },
    );
}

fn shape(rows: usize, heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionShape {
        rows,
        heads,
        kv_heads,
        head_dim,
        scale,
        window: None,
    }
}

#[test]
fn reference_gradients_agree_with_finite_differences() {
    let case = Case::new(
        AttentionShape {
            window: Some(7),
            ..shape(23, 4, 2, 6)
        },
        15,
        1,
    );
    let (q, k, v) = (f64s(&case.q), f64s(&case.k), f64s(&case.v));
    let d_o = f64s(&case.d_o);
    let want = reference(&case, &q, &k, &v);
    check_gradient(|q| inner(&reference(&case, q, &k, &v).o, &d_o), &q, &want.dq);
    check_gradient(|k| inner(&reference(&case, &q, k, &v).o, &d_o), &k, &want.dk);
    check_gradient(|v| inner(&reference(&case, &q, &k, v).o, &d_o), &v, &want.dv);
}

#[test]
fn one_long_document() {
    check(shape(320, 3, 1, 64), usize::MAX >> 1, 2);
}

#[test]
fn documents_of_all_lengths() {
    check(shape(300, 4, 2, 16), 40, 3);
    check(shape(517, 2, 2, 32), 200, 4);
    check(shape(130, 2, 1, 24), 3, 5);
}

#[test]
fn odd_shapes() {
    check(shape(1, 1, 1, 4), 1, 6);
    check(shape(65, 3, 3, 10), 65, 7);
    check(shape(129, 5, 1, 70), 80, 8);
    check(shape(64, 2, 2, 128), 64, 9);
}

#[test]
fn sliding_window() {
    for (window, seed) in [(1, 10), (17, 11), (64, 12), (100, 13), (1000, 14)] {
        let windowed = AttentionShape {
            window: Some(window),
            ..shape(333, 2, 1, 16)
        };
        check(windowed, 250, seed);
    }
}

#[test]
fn large_scores_stay_finite() {
    let mut case = Case::new(shape(100, 2, 1, 16), 60, 15);
    case.q.iter_mut().for_each(|q| *q *= 60.0);
    let want = reference(&case, &f64s(&case.q), &f64s(&case.k), &f64s(&case.v));
    every_context(
        |cx| run(cx, &case),
        |got| {
            close("o", &got[0], &want.o, 1e-3);
            close("lse", &got[1], &want.lse, 1e-5);
            close("dq", &got[2], &want.dq, 1e-3);
            close("dk", &got[3], &want.dk, 1e-3);
        },
    );
}
