use crate::util::*;
use tightfit_cpu::kernel::*;

#[test]
fn embedding_and_its_gradient_agree() {
    for (rows, hidden, vocab) in [(1, 1, 1), (50, 13, 5), (700, 64, 1000), (9, 600, 70)] {
        let mut random = Random::new((rows * hidden) as u64);
        let ids: Vec<i32> = (0..rows).map(|_| random.below(vocab) as i32).collect();
        let (w, acc) = (random.vec(vocab * hidden, 1.0), random.vec(vocab * hidden, 1.0));
        let dy = random.vec(rows * hidden, 1.0);
        let mut want_y = vec![];
        let mut want_dw = vec![0.0; vocab * hidden];
        for (t, &id) in ids.iter().enumerate() {
            let at = id as usize * hidden;
            want_y.extend(f64s(&w[at..at + hidden]));
            for i in 0..hidden {
                want_dw[at + i] += f64::from(dy[t * hidden + i]);
            }
        }
        let with_acc: Vec<f64> = want_dw.iter().zip(&acc).map(|(d, &a)| d + f64::from(a)).collect();
        every_context(
            |cx| {
                let n = vocab * hidden;
                let mut y = Buffer::new(rows * hidden);
                let (mut plain, mut sum, mut over) = (Buffer::new(n), Buffer::new(n), Buffer::from(&acc));
                let (ids, w) = (ids.as_ptr(), w.as_ptr());
                let dy = dy.as_ptr();
                let backward = |acc, dw| EmbeddingBackward {
                    rows,
                    hidden,
                    vocab,
                    ids,
                    dy: dy.into(),
                    acc,
                    dw,
                };
                // SAFETY: buffers of the shapes given.
                unsafe {
                    embedding(
                        cx,
                        &Embedding {
                            rows,
                            hidden,
                            vocab,
                            ids,
                            w: Table::Floats(w.into()),
                            y: y.ptr().into(),
                        },
                    );
                    embedding_backward(cx, &backward(None, plain.ptr()));
                    embedding_backward(cx, &backward(Some(acc.as_ptr()), sum.ptr()));
                    embedding_backward(cx, &backward(Some(over.ptr().cast_const()), over.ptr()));
                }
                [y, plain, sum, over].iter().map(|b| b.get().to_vec()).collect()
            },
            |got| {
                close("y", &got[0], &want_y, 0.0);
                close("dw", &got[1], &want_dw, 1e-6);
                close("acc + dw", &got[2], &with_acc, 1e-6);
                close("acc + dw in place", &got[3], &with_acc, 1e-6);
            },
        );
    }
}

#[test]
fn rope_agrees_and_its_inverse_undoes_it() {
    for (rows, heads, head_dim) in [(1, 1, 2), (33, 3, 10), (300, 9, 64), (5, 2, 96)] {
        let frequency = |i: usize| 1.0 / f32::powf(10_000.0, 2.0 * i as f32 / head_dim as f32);
        let mut random = Random::new((rows * head_dim) as u64);
        let positions: Vec<i32> = (0..rows).map(|_| random.below(131_072) as i32).collect();
        let x = random.vec(rows * heads * head_dim, 1.0);
        let half = head_dim / 2;
        let mut want = vec![0.0; x.len()];
        let mut want_cs = vec![0.0; rows * head_dim];
        for t in 0..rows {
            for i in 0..half {
                let (sin, cos) = f64::from(positions[t] as f32 * frequency(i)).sin_cos();
                want_cs[t * head_dim + i] = cos;
                want_cs[t * head_dim + half + i] = sin;
                for h in 0..heads {
                    let at = (t * heads + h) * head_dim + i;
                    let (a, b) = (f64::from(x[at]), f64::from(x[at + half]));
                    want[at] = a * cos - b * sin;
                    want[at + half] = b * cos + a * sin;
                }
            }
        }
        every_context(
            |cx| {
                let (mut cs, mut y) = (Buffer::new(rows * head_dim), Buffer::new(x.len()));
                let mut back = Buffer::new(x.len());
                let table = RopeTable {
                    rows,
                    head_dim,
                    frequency: &frequency,
                    positions: positions.as_ptr(),
                    cs: cs.ptr(),
                };
                let (cs_ptr, b) = (cs.ptr(), back.ptr());
                let rotate = |inverse, x: *const f32, y: *mut f32| Rope {
                    rows,
                    heads,
                    head_dim,
                    inverse,
                    x: x.into(),
                    cs: cs_ptr,
                    y: y.into(),
                };
                // SAFETY: buffers of the shapes given.
                unsafe {
                    rope_table(cx, &table);
                    rope(cx, &rotate(false, x.as_ptr(), y.ptr()));
                    rope(cx, &rotate(false, x.as_ptr(), b));
                    rope(cx, &rotate(true, b, b));
                }
                [cs, y, back].iter().map(|b| b.get().to_vec()).collect()
            },
            |got| {
                close("cs", &got[0], &want_cs, 2e-7);
                close("y", &got[1], &want, 5e-7);
                close("inverse", &got[2], &f64s(&x), 1e-6);
            },
        );
    }
}
