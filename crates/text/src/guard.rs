//! Panics of third-party parsers, which become errors.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Guarded calls that this thread is inside of.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Calls `call`; a panic there becomes an error.
///
/// Callers use nothing again that such a call leaves half done; that is why asserting unwind safety is right.
pub(crate) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, Box<dyn Any + Send>> {
    DEPTH.set(DEPTH.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(call));
    DEPTH.set(DEPTH.get() - 1);
    result
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no reason given")
}

/// Keeps panics that this crate catches and makes errors of from being reported twice: from now on, the process's panic hook is not
/// called for them. Other panics go to the hook that was set before. Programs call it once, when they start; later calls do nothing.
pub fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            // A thread that is ending has no flag any more, and no guarded call either.
            if DEPTH.try_with(Cell::get).unwrap_or(0) == 0 {
                previous(info);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn caught_panics_are_quiet_and_others_are_not() {
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            // Other tests may fail meanwhile.
            match info.payload().downcast_ref::<&str>() {
                Some(&"of this test") => drop(SEEN.fetch_add(1, Ordering::Relaxed)),
                _ => previous(info),
            }
        }));
        let seen = |call: fn()| {
            let before = SEEN.load(Ordering::Relaxed);
            let _ = std::thread::spawn(call).join();
            SEEN.load(Ordering::Relaxed) - before
        };
        let caught = || {
            let panic = guarded(|| panic!("of this test")).unwrap_err();
            assert_eq!(panic_message(&*panic), "of this test");
        };
        assert_eq!(seen(caught), 1);
        quiet_panics();
        quiet_panics();
        assert_eq!(seen(caught), 0);
        // After a guarded call, panics are the thread's own again.
        assert_eq!(
            seen(|| {
                let _ = guarded(|| panic!("of this test"));
                panic!("of this test");
            }),
            1
        );
    }
}
