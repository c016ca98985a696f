//! Promise 2: nothing is allocated during a step, on any thread.
//!
//! A program of its own (`harness = false`), because the counts are of all threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};

use tightfit::data::Text;
use tightfit::settings::Settings;
use tightfit::train::{Run, Trainer, evaluate, train};
use tightfit::{Job, Session};
use tightfit_pass::TRAIN;

#[path = "common/job.rs"]
mod job;

/// Calls to the allocator since the program began.
static CALLS: AtomicU64 = AtomicU64::new(0);
/// Bytes that are allocated now, and the most there were since it was last set.
static LIVE: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);

/// The system's allocator, counting.
struct Counting;

fn count(bytes: i64) {
    CALLS.fetch_add(1, SeqCst);
    let live = LIVE.fetch_add(bytes, SeqCst) + bytes;
    PEAK.fetch_max(live, SeqCst);
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as i64 - layout.size() as i64);
        // SAFETY: the caller's contract.
        unsafe { System.realloc(block, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    the_counter_counts();
    for threads in 1..=3 {
        for clip_norm in [Some(1.0), None] {
            for micro_batches in [1, 3] {
                no_step_allocates(&job::small(threads, micro_batches, clip_norm));
            }
        }
    }
    memory_does_not_grow_with_steps();
    println!("nothing is allocated during a step");
}

/// So that a broken counter cannot make the rest pass.
fn the_counter_counts() {
    let before = CALLS.load(SeqCst);
    let block = std::hint::black_box(vec![0_u8; 1000]);
    assert_eq!(CALLS.load(SeqCst), before + 1);
    std::thread::spawn(move || drop(block)).join().unwrap();
    assert!(CALLS.load(SeqCst) > before + 2, "another thread's calls count");
}

fn session(settings: &Settings) -> Session {
    let plan = Job::plan(settings.clone(), None).unwrap().plan;
    let mut session = Session::new(plan, settings.threads).unwrap();
    session.initialise(settings.seed).unwrap();
    session
}

fn no_step_allocates(settings: &Settings) {
    let mut session = session(settings);
    let text = Text::generated(settings).unwrap();
    let mut trainer = Trainer::new(settings, &text);
    for step in 1..=3 {
        let before = CALLS.load(SeqCst);
        trainer.start(step, 1e-3).unwrap();
        session.run(TRAIN, &mut trainer).unwrap();
        let trained = CALLS.load(SeqCst);
        let loss = evaluate(&mut session, &text).unwrap();
        let evaluated = CALLS.load(SeqCst);
        let (threads, micro_batches, clip_norm) = (settings.threads, settings.micro_batches(), settings.clip_norm);
        let case = format!("step {step}, {threads} threads, {micro_batches} micro-batches, {clip_norm:?}");
        assert_eq!(trained - before, 0, "calls to the allocator in training, {case}");
        assert_eq!(evaluated - trained, 0, "calls to the allocator in evaluation, {case}");
        assert!(loss.is_finite() && trainer.loss().is_finite(), "{case}");
    }
}

/// What the loop itself needs is the same for any number of steps: nothing is left, and the most there was is equal but for the
/// times of the steps, 8 bytes each, which are sorted at the end.
fn memory_does_not_grow_with_steps() {
    let growth = |steps: u64| {
        let settings = Settings {
            steps,
            eval_every: 2,
            ..job::small(2, 3, Some(1.0))
        };
        let mut session = session(&settings);
        let stop = AtomicBool::new(false);
        let text = Text::generated(&settings).unwrap();
        let before = LIVE.load(SeqCst);
        PEAK.store(before, SeqCst);
        let run = Run {
            settings: &settings,
            text: &text,
            done: 0,
            loss_first: None,
            stop: &stop,
        };
        let outcome = train(&mut session, &run, |_, _| true).unwrap();
        assert_eq!(outcome.steps, steps);
        (LIVE.load(SeqCst) - before, PEAK.load(SeqCst) - before)
    };
    let ((left_3, peak_3), (left_60, peak_60)) = (growth(3), growth(60));
    assert_eq!((left_3, left_60), (0, 0), "bytes left after training");
    assert!(
        peak_60 - peak_3 <= 57 * 8 * 2,
        "{peak_3} bytes for 3 steps, {peak_60} for 60"
    );
}
