//! Ctrl-C, SIGTERM and SIGHUP: a request to stop, to which a run answers once it can.
//!
//! Until the first step is done there is nothing to save, and the process ends at once. After that the first request lets the run
//! finish its step and save; a second ends the process at once. Files are written under other names and renamed when whole
//! ([`checkpoint::replace`](tightfit_exec::checkpoint::replace)), so that ending at once leaves none half-written.

use std::io::{self, Write};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// The exit code of a run that the user stopped.
pub const STOPPED: u8 = 5;

/// Requests that come closer together are one: a signal to a process group often arrives twice, once from the terminal or
/// scheduler and once passed on by a parent such as `timeout`.
const ONE_REQUEST: Duration = Duration::from_millis(500);

/// Enough for a few small frames.
const STACK_BYTES: usize = 64 << 10;

/// What a request is answered with.
struct Words {
    first: &'static str,
    second: &'static str,
}

/// What the user asked of the run, and whether the run has anything to save.
#[derive(Debug, Default)]
pub struct Stop {
    requested: AtomicBool,
    has_state: AtomicBool,
}

impl Stop {
    /// Begins to watch for signals, on a thread of its own. Signals that the parent has set to be ignored stay ignored, so that
    /// `nohup` works.
    ///
    /// # Errors
    /// The system gives no signal handler or no thread.
    pub fn watch() -> io::Result<Arc<Self>> {
        Self::watch_saying(Words {
            first: "stopping once this step is done (again to stop at once, without saving)",
            second: "stopped at once: nothing was saved after the last checkpoint",
        })
    }

    /// As [`watch`](Self::watch), for a file that is written: the first request is to remove what there is of it.
    ///
    /// # Errors
    /// As [`watch`](Self::watch).
    pub fn watch_file() -> io::Result<Arc<Self>> {
        let stop = Self::watch_saying(Words {
            first: "stopping: what was written is removed (again to stop at once)",
            second: "stopped at once: a file that ends in .partial is left",
        })?;
        stop.has_state.store(true, Ordering::Relaxed);
        Ok(stop)
    }

    fn watch_saying(words: Words) -> io::Result<Arc<Self>> {
        // A write beyond `ulimit -f` is to fail, not to kill: that takes a handler, which may do nothing.
        flag::register(SIGXFSZ, Arc::default())?;
        let stop = Arc::new(Self::default());
        let ignored = ignored_signals();
        let watched = [SIGINT, SIGTERM, SIGHUP]
            .into_iter()
            .filter(|signal| ignored & (1 << (signal - 1)) == 0);
        let mut signals = Signals::new(watched)?;
        let shared = stop.clone();
        thread::Builder::new()
            .name("signals".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || shared.answer(&mut signals, &words))?;
        Ok(stop)
    }

    /// From here on there is something to save.
    pub fn first_step_done(&self) {
        self.has_state.store(true, Ordering::Relaxed);
    }

    /// Set once the user has asked the run to stop.
    pub fn requested(&self) -> &AtomicBool {
        &self.requested
    }

    fn answer(&self, signals: &mut Signals, words: &Words) {
        let mut first: Option<Instant> = None;
        for _ in signals.forever() {
            match first {
                None if !self.has_state.load(Ordering::Relaxed) => {
                    end("stopped: nothing to save yet");
                }
                None => {
                    first = Some(Instant::now());
                    self.requested.store(true, Ordering::Relaxed);
                    say(words.first);
                }
                Some(at) if at.elapsed() < ONE_REQUEST => {}
                Some(_) => end(words.second),
            }
        }
    }
}

fn say(message: &str) {
    // Whoever closed stderr does not want to know. The line break ends the terminal's `^C` or a progress bar.
    let _ = write!(io::stderr().lock(), "\n{message}\n");
}

fn end(message: &str) -> ! {
    say(message);
    process::exit(i32::from(STOPPED))
}

/// The signals that this process was started to ignore, signal `n` at bit `n − 1`; none where the system does not say.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
