use crate::util::*;
use tightfit_cpu::floats::{Float, Floats};
use tightfit_cpu::gemm::View;
use tightfit_cpu::kernel::*;

const IGNORE: i32 = -100;

struct Case {
    rows: usize,
    vocab: usize,
    logits: Vec<f32>,
    targets: Vec<i32>,
    token_count: f32,
}

impl Case {
    fn new(rows: usize, vocab: usize, scale: f32) -> Self {
        let mut random = Random::new((rows * vocab) as u64);
        let logits = random.vec(rows * vocab, scale);
        let targets = targets(&mut random, rows, vocab);
        Self {
            rows,
            vocab,
            logits,
            targets,
            token_count: rows as f32 + 2.5,
        }
    }
}

/// Random targets, every fifth row ignored.
fn targets(random: &mut Random, rows: usize, vocab: usize) -> Vec<i32> {
    (0..rows)
        .map(|t| if t % 5 == 3 { IGNORE } else { random.below(vocab) as i32 })
        .collect()
}

struct Reference {
    losses: Vec<f64>,
    lse: Vec<f64>,
    dlogits: Vec<f64>,
}

impl Reference {
    fn new(case: &Case, logits: &[f64]) -> Self {
        let mut r = Self {
            losses: vec![],
            lse: vec![],
            dlogits: vec![],
        };
        for (x, &target) in logits.chunks(case.vocab).zip(&case.targets) {
            let max = x.iter().fold(f64::MIN, |m, &x| m.max(x));
            let lse = max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
            r.lse.push(lse);
            r.losses.push(if target == IGNORE {
                0.0
            } else {
                lse - x[target as usize]
            });
            for (i, x) in x.iter().enumerate() {
                let hit = if i as i32 == target { 1.0 } else { 0.0 };
                let d = ((x - lse).exp() - hit) / f64::from(case.token_count);
                r.dlogits.push(if target == IGNORE { 0.0 } else { d });
            }
        }
        r
    }

    fn loss(&self, case: &Case) -> f64 {
        self.losses.iter().sum::<f64>() / f64::from(case.token_count)
    }
}

#[test]
fn reference_gradient_agrees_with_finite_differences() {
    let case = Case::new(6, 9, 3.0);
    let logits = f64s(&case.logits);
    let want = Reference::new(&case, &logits);
    check_gradient(|x| Reference::new(&case, x).loss(&case), &logits, &want.dlogits);
}

fn cases() -> [Case; 6] {
    [
        Case::new(1, 1, 1.0),
        Case::new(12, 5, 10.0),
        Case::new(300, 256, 5.0),
        Case::new(7, 1025, 30.0),
        Case::new(9, 4999, 90.0),
        Case::new(3, 49_152, 8.0),
    ]
}

#[test]
fn rows_agree() {
    for case in cases() {
        let want = Reference::new(&case, &f64s(&case.logits));
        every_context(
            |cx| {
                let mut logits = Buffer::from(&case.logits);
                let (mut losses, mut losses_only) = (Buffer::new(case.rows), Buffer::new(case.rows));
                let mut args = CrossEntropyRows {
                    rows: case.rows,
                    vocab: case.vocab,
                    logits: logits.ptr(),
                    targets: case.targets.as_ptr(),
                    ignore_index: IGNORE,
                    token_count: &case.token_count,
                    scale: None,
                    losses: losses_only.ptr(),
                    gradient: false,
                };
                // SAFETY: buffers of the shapes given.
                unsafe { cross_entropy_rows(cx, &args) };
                assert_eq!(logits.get(), case.logits, "logits are only read");
                (args.losses, args.gradient) = (losses.ptr(), true);
                // SAFETY: as above.
                unsafe { cross_entropy_rows(cx, &args) };
                [losses, losses_only, logits].iter().map(|b| b.get().to_vec()).collect()
            },
            |got| {
                close("losses", &got[0], &want.losses, 1e-6);
                close("losses without gradient", &got[1], &want.losses, 1e-6);
                close("dlogits", &got[2], &want.dlogits, 1e-6);
            },
        );
    }
}

/// Of a target that is nearly certain the loss is what the other exponentials add up to, however tiny beside the target's 1.
#[test]
fn tiny_losses_keep_their_digits() {
    let (rows, vocab) = (10, 2500);
    for gap in [3.0, 10.0, 17.0, 25.0, 60.0] {
        let mut random = Random::new(gap as u64);
        let mut logits = random.vec(rows * vocab, 2.0);
        // The first and the last class, both sides of where blocks of 1024 meet, and some between.
        let targets: Vec<i32> = vec![0, 2499, 1023, 1024, 1025, 2047, 2048, 7, 8, 2495];
        for (t, &target) in targets.iter().enumerate() {
            logits[t * vocab + target as usize] = 2.0 + gap;
        }
        let loss_of = |x: &[f32], target: i32| {
            let own = f64::from(x[target as usize]);
            let others = x.iter().enumerate().filter(|(i, _)| *i as i32 != target);
            others.map(|(_, &x)| (f64::from(x) - own).exp()).sum::<f64>().ln_1p()
        };
        let rows_of = logits.chunks(vocab).zip(&targets);
        let want: Vec<f64> = rows_of.map(|(x, &target)| loss_of(x, target)).collect();
        let mean = want.iter().sum::<f64>() / rows as f64;
        let token_count = rows as f32;
        every_context(
            |cx| {
                let (mut chunk, mut plain) = (Buffer::from(&logits), Buffer::from(&logits));
                let (mut losses, mut loss, mut lse) = (Buffer::new(rows), Buffer::new(1), Buffer::new(rows));
                let mut workspace = Buffer::bytes(softmax_cross_entropy_workspace(rows));
                let fused = CrossEntropyRows {
                    rows,
                    vocab,
                    logits: chunk.ptr(),
                    targets: targets.as_ptr(),
                    ignore_index: IGNORE,
                    token_count: &token_count,
                    scale: None,
                    losses: losses.ptr(),
                    gradient: true,
                };
                let whole = SoftmaxCrossEntropy {
                    rows,
                    vocab,
                    logits: plain.ptr().into(),
                    targets: targets.as_ptr(),
                    ignore_index: IGNORE,
                    token_count: &token_count,
                    loss: loss.ptr(),
                    lse: lse.ptr(),
                    workspace: workspace.ptr().cast(),
                };
                // SAFETY: buffers of the shapes given.
                unsafe {
                    cross_entropy_rows(cx, &fused);
                    softmax_cross_entropy(cx, &whole);
                }
                let at_target = |t: usize| chunk.get()[t * vocab + targets[t] as usize];
                let gradients = (0..rows).map(at_target).collect();
                vec![losses.get().to_vec(), loss.get().to_vec(), gradients]
            },
            |got| {
                let near = |got: f32, want: f64| (f64::from(got) - want).abs() <= 2e-6 * want.abs();
                for (t, want) in want.iter().enumerate() {
                    let gradient = (-want).exp_m1() / rows as f64;
                    assert!(
                        near(got[0][t], *want),
                        "row {t}, gap {gap}: {} is not {want}",
                        got[0][t]
                    );
                    assert!(
                        near(got[2][t], gradient),
                        "row {t}, gap {gap}: {} is not {gradient}",
                        got[2][t]
                    );
                }
                assert!(near(got[1][0], mean), "gap {gap}: {} is not {mean}", got[1][0]);
            },
        );
    }
}

#[test]
fn softmax_cross_entropy_agrees() {
    for case in cases() {
        let want = Reference::new(&case, &f64s(&case.logits));
        let dlogits = &want.dlogits;
        every_context(
            |cx| {
                let mut logits = Buffer::from(&case.logits);
                let (mut loss, mut lse) = (Buffer::new(1), Buffer::new(case.rows));
                let mut workspace = Buffer::bytes(softmax_cross_entropy_workspace(case.rows));
                let forward = SoftmaxCrossEntropy {
                    rows: case.rows,
                    vocab: case.vocab,
                    logits: logits.ptr().into(),
                    targets: case.targets.as_ptr(),
                    ignore_index: IGNORE,
                    token_count: &case.token_count,
                    loss: loss.ptr(),
                    lse: lse.ptr(),
                    workspace: workspace.ptr().cast(),
                };
                let backward = SoftmaxCrossEntropyBackward {
                    rows: case.rows,
                    vocab: case.vocab,
                    logits: logits.ptr().into(),
                    lse: lse.ptr(),
                    targets: case.targets.as_ptr(),
                    ignore_index: IGNORE,
                    token_count: &case.token_count,
                    scale: None,
                    dlogits: logits.ptr().into(),
                };
                // SAFETY: buffers of the shapes given.
                unsafe {
                    softmax_cross_entropy(cx, &forward);
                    softmax_cross_entropy_backward(cx, &backward);
                }
                workspace.assert_last_word_written();
                [loss, lse, logits].iter().map(|b| b.get().to_vec()).collect()
            },
            |got| {
                close("loss", &got[0], &[want.loss(&case)], 1e-6);
                close("lse", &got[1], &want.lse, 1e-6);
                close("dlogits", &got[2], dlogits, 5e-6);
            },
        );
    }
}

/// `a[m, k] · b[k, n]`, both given by element.
fn product(
    (m, n, k): (usize, usize, usize),
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for p in 0..k {
            let a = a(i, p);
            for j in 0..n {
                c[i * n + j] += a * b(p, j);
            }
        }
    }
    c
}

#[test]
fn linear_cross_entropy_agrees() {
    for (rows, hidden, vocab, chunk) in [(1, 3, 2, 4), (37, 19, 301, 16), (130, 64, 1000, 64)] {
        let mut random = Random::new((rows * hidden) as u64);
        let (x, w) = (random.vec(rows * hidden, 1.0), random.vec(vocab * hidden, 1.0));
        let acc = random.vec(vocab * hidden, 0.1);
        let targets = targets(&mut random, rows, vocab);
        let (fx, fw) = (f64s(&x), f64s(&w));
        let size = (rows, vocab, hidden);
        let logits = product(size, |i, p| fx[i * hidden + p], |p, j| fw[j * hidden + p]);
        let case = Case {
            rows,
            vocab,
            logits: vec![],
            targets,
            token_count: rows as f32,
        };
        let want = Reference::new(&case, &logits);
        let d = &want.dlogits;
        let dx = product(
            (rows, hidden, vocab),
            |i, p| d[i * vocab + p],
            |p, j| fw[p * hidden + j],
        );
        let dw = product(
            (vocab, hidden, rows),
            |i, p| d[p * vocab + i],
            |p, j| fx[p * hidden + j],
        );
        let dw_acc: Vec<f64> = dw.iter().zip(&acc).map(|(d, &a)| d + f64::from(a)).collect();

        // (dx, dw) asked for; accumulating; dx over x and dw over its accumulator.
        let variants = [(true, true, false), (true, true, true), (false, false, false)];
        for (with_dx, with_dw, in_place) in variants {
            every_context(
                |cx| {
                    let mut loss = Buffer::new(1);
                    let mut px = Buffer::from(&x);
                    let mut pdx = Buffer::new(rows * hidden);
                    let mut pdw = Buffer::new(vocab * hidden);
                    if in_place {
                        pdw = Buffer::from(&acc);
                    }
                    let threads = cx.pool.threads();
                    let isa = cx.isa;
                    let shape = LinearCrossEntropyShape {
                        rows,
                        hidden,
                        vocab,
                        chunk,
                        x: Float::F32,
                        w: None,
                        input_gradient: with_dx,
                    };
                    let bytes = linear_cross_entropy_workspace(isa, &shape, threads);
                    let mut workspace = Buffer::bytes(bytes + 64);
                    let aligned = workspace.ptr().align_offset(64);
                    let args = LinearCrossEntropy {
                        shape,
                        x: Floats::of_mut(px.ptr()),
                        w: View::row_major(w.as_ptr(), hidden).into(),
                        targets: case.targets.as_ptr(),
                        ignore_index: IGNORE,
                        token_count: &case.token_count,
                        scale: None,
                        acc_dw: in_place.then_some(pdw.ptr().cast_const()),
                        loss: loss.ptr(),
                        dx: with_dx.then_some(Floats::of_mut(if in_place { px.ptr() } else { pdx.ptr() })),
                        dw: with_dw.then_some(pdw.ptr()),
                        workspace: workspace.ptr().wrapping_add(aligned).cast(),
                    };
                    // SAFETY: buffers of the shapes given.
                    unsafe { linear_cross_entropy(cx, &args) };
                    let last = aligned + bytes as usize / 4 - 1;
                    assert_ne!(workspace.get()[last].to_bits(), FILL.to_bits());
                    let behind = &workspace.get()[last + 1..];
                    assert!(behind.iter().all(|v| v.to_bits() == FILL.to_bits()));
                    let dx = if in_place { px } else { pdx };
                    [loss, dx, pdw].iter().map(|b| b.get().to_vec()).collect()
                },
                |got| {
                    close("loss", &got[0], &[want.loss(&case)], 2e-6);
                    if with_dx {
                        close("dx", &got[1], &dx, 1e-6);
                        close("dw", &got[2], if in_place { &dw_acc } else { &dw }, 1e-6);
                    }
                },
            );
        }
    }
}
