use crate::util::*;
use tightfit_cpu::floats::Floats;
use tightfit_cpu::kernel::*;
use tightfit_ir::op::Rounding;

#[test]
fn norm_agrees() {
    for len in [0, 1, 5, 65_536, 70_000, 200_001] {
        let x = Random::new(len as u64).vec(len, 0.1);
        let want = x.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        every_context(
            |cx| {
                let mut result = Buffer::new(1);
                let mut workspace = Buffer::bytes(norm_workspace(len));
                // f64 partials want eight bytes of alignment; vectors of floats of this size have
                // it.
                assert_eq!(workspace.ptr() as usize % 8, 0);
                let args = Norm {
                    len,
                    x: x.as_ptr(),
                    norm: result.ptr(),
                    workspace: workspace.ptr().cast(),
                };
                // SAFETY: buffers of the length given.
                unsafe { norm(cx, &args) };
                workspace.assert_last_word_written();
                vec![result.get().to_vec()]
            },
            |got| close("norm", &got[0], &[want], 1e-6),
        );
    }
}

#[test]
fn a_global_norm_is_summed_beyond_the_range_of_f32() {
    for norms in [vec![0.5_f32], vec![3e-30, 0.0, 4e-30], vec![3e25, 1.0, 4e25]] {
        let want = norms.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let mut result = 0.0;
        let args = GlobalNorm {
            count: norms.len(),
            norms: &|index| &norms[index],
            scale: None,
            norm: &mut result,
        };
        // SAFETY: as many norms as said.
        unsafe { global_norm(&args) };
        assert_eq!(result, want as f32);
    }
}

#[test]
fn adamw_agrees_over_several_steps() {
    let (beta1, beta2, eps, weight_decay) = (0.9, 0.95, 1e-8, 0.1);
    for (n, max_norm) in [(1, None), (1003, Some(1.0)), (40_000, None), (40_000, Some(0.5))] {
        let mut random = Random::new(n as u64);
        let w0 = random.vec(n, 1.0);
        let gradients: Vec<Vec<f32>> = (0..5).map(|_| random.vec(n, 0.3)).collect();
        let lrs = [1e-3f32, 5e-3, 4e-3, 2e-3, 1e-4];
        let norms: Vec<f32> = (0..5).map(|i| 0.2 + 0.4 * i as f32).collect();
        let (mut w, mut m, mut v) = (f64s(&w0), vec![0.0; n], vec![0.0; n]);
        for step in 0..5 {
            let lr = f64::from(lrs[step]);
            let norm = f64::from(norms[step]);
            let clip = max_norm.map_or(1.0, |max: f32| (f64::from(max) / (norm + 1e-6)).min(1.0));
            let t = step as i32 + 1;
            for i in 0..n {
                let g = f64::from(gradients[step][i]) * clip;
                w[i] *= 1.0 - lr * weight_decay;
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                let denominator = (v[i] / (1.0 - f64::powi(beta2, t))).sqrt() + eps;
                w[i] -= lr / (1.0 - f64::powi(beta1, t)) * m[i] / denominator;
            }
        }
        every_context(
            |cx| {
                let mut pw = Buffer::from(&w0);
                let (mut pm, mut pv) = (Buffer::from(&vec![0.0; n]), Buffer::from(&vec![0.0; n]));
                for step in 0..5 {
                    let mut factor = 0.0;
                    let clip = GradientFactor {
                        norm: &norms[step],
                        max_norm,
                        scale: None,
                        factor: &mut factor,
                    };
                    // SAFETY: single floats.
                    unsafe { gradient_factor(&clip) };
                    let args = AdamW {
                        update: Update {
                            len: n,
                            weight: Floats::of_mut(pw.ptr()),
                            rounding: Rounding::Nearest,
                            gradient: gradients[step].as_ptr(),
                            lr: &lrs[step],
                            step: &(step as f32 + 1.0),
                            factor: Some(&factor),
                            weight_decay,
                        },
                        m: pm.ptr(),
                        v: pv.ptr(),
                        adam: Adam { beta1, beta2, eps },
                    };
                    // SAFETY: buffers of `n` floats.
                    unsafe { adamw(cx, &args) };
                }
                [pw, pm, pv].iter().map(|b| b.get().to_vec()).collect()
            },
            |got| {
                close("w", &got[0], &w, 1e-6);
                close("m", &got[1], &m, 1e-7);
                close("v", &got[2], &v, 1e-7);
            },
        );
    }
}
