//! The rules that every input is held to, whatever the target: [`check`].
//!
//! An input may not panic, may not take more memory at one time than 16 times its size plus 16 MiB, and may not take more than five
//! seconds of processor time. Whatever breaks a rule ends the process, and libFuzzer keeps the input.

pub mod batches;
pub mod files;
mod memory;
mod signals;
pub mod tokenizer;

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind, set_hook},
    process::abort,
    time::Duration,
};

/// Processor time that an input may take.
const LONGEST: Duration = Duration::from_secs(5);

/// Memory that an input may take: so many times its bytes, and so many bytes more.
const TIMES: usize = 16;
const MORE: usize = 16 << 20;

thread_local! {
    /// What the last panic said and where.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Sets the rules up; the `init` of every target.
///
/// libFuzzer's own hook ends the process at any panic. Our readers promise to turn panics of the parsers that they use into errors,
/// so those have to unwind. A panic that starts in our code is a bug even where something catches it.
pub fn init() {
    signals::report_stack_overflows();
    set_hook(Box::new(|panic: &PanicHookInfo<'_>| {
        let theirs = |file: &str| file.contains("/registry/") || file.starts_with("/rustc/");
        if !panic.location().is_some_and(|place| theirs(place.file())) {
            eprintln!("a panic in our code: {panic}");
            abort();
        }
        PANIC.replace(panic.to_string());
    }));
}

/// Runs `work` on an input under the rules.
pub fn check<T>(input: &[u8], work: impl FnOnce() -> T) -> T {
    let start = processor_time();
    memory::limit(TIMES * input.len() + MORE);
    let result = catch_unwind(AssertUnwindSafe(work));
    memory::no_limit();
    let time = processor_time() - start;
    if time > LONGEST {
        eprintln!("{time:?} for {} bytes, more than {LONGEST:?}", input.len());
        abort();
    }
    result.unwrap_or_else(|payload| {
        eprintln!("a panic that nobody caught: {}", PANIC.take());
        resume_unwind(payload)
    })
}

/// Processor time that this process has taken, on all its threads. The machine may be busy with other things.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` may be written to.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(result, 0, "no clock of processor time");
    // Both are positive, and a second has fewer than 2^32 nanoseconds.
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Whether an error says something.
pub fn says(error: impl std::fmt::Display) {
    assert!(!error.to_string().is_empty());
}
