//! Stack overflows, reported as other crashes are.
//!
//! libFuzzer keeps the input of a crash from inside its signal handler, which needs a stack of its own where the stack is what ran out.
//! It runs on one if the default handler was already set to.

use std::{mem::zeroed, ptr::null_mut};

/// libFuzzer's handler keeps a path and some lines of text on it.
const STACK_BYTES: usize = 1 << 20;

/// Gives signal handlers a stack. To be called on the thread that runs the inputs, before libFuzzer sets its handlers.
pub fn report_stack_overflows() {
    let stack = libc::stack_t {
        // Used until the process ends.
        ss_sp: Vec::leak(vec![0_u8; STACK_BYTES]).as_mut_ptr().cast(),
        ss_flags: 0,
        ss_size: STACK_BYTES,
    };
    // SAFETY: all of `sigaction` is integers, for which zeros are valid.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = libc::SIG_DFL;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: the stack is leaked, so it stays, and nothing else refers to it; the default handler may be set at any time.
    let results = unsafe {
        [
            libc::sigaltstack(&stack, null_mut()),
            libc::sigaction(libc::SIGSEGV, &action, null_mut()),
        ]
    };
    assert_eq!(results, [0, 0], "no stack for signal handlers");
}
