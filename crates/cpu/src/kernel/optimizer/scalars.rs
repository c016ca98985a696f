//! The few numbers that belong to an update as a whole.

/// `factor` from the gradients' norm.
pub struct GradientFactor {
    /// The gradients' global norm, one float.
    pub norm: *const f32,
    /// Largest norm allowed: gradients are scaled by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does.
    pub max_norm: Option<f32>,
    /// What the loss was multiplied by, one float.
    pub scale: Option<*const f32>,
    /// Result, one float; NaN where the norm is not finite.
    pub factor: *mut f32,
}

/// See [`GradientFactor`].
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn gradient_factor(args: &GradientFactor) {
    // SAFETY: the caller's contract.
    let (norm, scale) = unsafe { (*args.norm, args.scale.map_or(1.0, |scale| *scale)) };
    let clip = args
        .max_norm
        .map_or(1.0, |max_norm| (max_norm / (norm + 1e-6)).min(1.0));
    let factor = if norm.is_finite() { clip / scale } else { f32::NAN };
    // SAFETY: the caller's contract.
    unsafe { *args.factor = factor };
}

/// The loss's scale after an update. As that of PyTorch's `GradScaler`.
pub struct UpdateLossScale {
    /// The gradients' global norm, one float; not finite where the update was skipped.
    pub norm: *const f32,
    /// The scale, updated in place.
    pub scale: *mut f32,
    /// Updates in a row that went well, updated in place.
    pub good_steps: *mut f32,
    /// Updates that were skipped, updated in place.
    pub skipped: *mut f32,
    /// What the scale is multiplied by after updates that went well.
    pub growth: f32,
    /// What it is multiplied by after one that was skipped.
    pub backoff: f32,
    /// How many in a row must go well.
    pub growth_interval: u64,
}

/// See [`UpdateLossScale`].
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn update_loss_scale(args: &UpdateLossScale) {
    // SAFETY: the caller's contract; the four numbers are apart.
    let (norm, scale, good_steps, skipped) =
        unsafe { (*args.norm, &mut *args.scale, &mut *args.good_steps, &mut *args.skipped) };
    if !norm.is_finite() {
        *scale *= args.backoff;
        *good_steps = 0.0;
        *skipped += 1.0;
        return;
    }
    *good_steps += 1.0;
    if *good_steps >= args.growth_interval as f32 {
        *good_steps = 0.0;
        let grown = *scale * args.growth;
        if grown.is_finite() {
            *scale = grown;
        }
    }
}
