//! Worker threads that never allocate once they run.
//!
//! The plan owns every byte of a training step, so starting parallel work must not allocate on
//! any thread. No library we know promises that: rayon boxes jobs into its injector and grows
//! its deques, scoped threads allocate a stack each. This pool has one job at a time, stored by
//! reference, and stacks of the size its owner asked for.
//!
//! Tiles are handed out dynamically through one counter. That keeps cores busy when some are
//! slower or shared, and it cannot change results as long as what a tile computes does not depend
//! on who computes it.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Polls before a waiting thread starts to yield: some tens of microseconds, longer than the
/// serial gap between two kernels, shorter than waking a parked thread.
const SPINS: usize = 2000;
/// Yields before a waiting thread parks.
const YIELDS: usize = 64;

/// A fixed set of threads that run one job together.
///
/// The thread that calls is worker 0, the others are spawned. A pool belongs to one thread at a
/// time (it is `Send`, not `Sync`), so a job cannot start another job on the same pool.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let pool = tightfit_cpu::pool::Pool::new(2, 256 << 10)?;
/// let sum = AtomicUsize::new(0);
/// pool.for_each(10, |tile, _worker| {
///     sum.fetch_add(tile, Ordering::Relaxed);
/// });
/// assert_eq!(sum.into_inner(), 45);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    not_sync: PhantomData<Cell<()>>,
}

impl Pool {
    /// Starts `threads - 1` threads with stacks of `stack_bytes`; the caller is the other one.
    /// Returns when all of them have started, so that nothing is allocated later.
    ///
    /// # Errors
    /// `InvalidInput` for zero threads, or what the system says when it cannot start one.
    pub fn new(threads: usize, stack_bytes: usize) -> io::Result<Pool> {
        if threads == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a pool needs a thread"));
        }
        let oversubscribed = thread::available_parallelism().is_ok_and(|cores| threads > cores.get());
        let shared = Arc::new(Shared::new(if oversubscribed { 0 } else { SPINS }));
        let mut pool = Pool {
            shared,
            workers: Vec::with_capacity(threads - 1),
            not_sync: PhantomData,
        };
        for id in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = thread::Builder::new()
                .name(format!("tightfit-{id}"))
                .stack_size(stack_bytes);
            pool.workers.push(thread.spawn(move || shared.work(id, threads))?);
        }
        pool.team(|_| ());
        Ok(pool)
    }

    /// How many threads run a job, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(tile, worker)` once for each `tile` below `tiles` and returns when all are done.
    ///
    /// # Panics
    /// If `f` panics, with its panic; some tiles may not have run then.
    pub fn for_each(&self, tiles: usize, f: impl Fn(usize, usize) + Sync) {
        self.team(|member| member.draw(tiles).for_each(|tile| f(tile, member.id)));
    }

    /// Calls `f` once on every thread and returns when all are done.
    ///
    /// # Panics
    /// If `f` panics on any thread, with the first panic. Members that wait at a barrier are
    /// released and abandon the job.
    pub fn team(&self, f: impl Fn(Member) + Sync) {
        let count = self.threads();
        if count == 1 {
            return f(Member::solo());
        }
        let shared = &*self.shared;
        let job: &(dyn Fn(Member) + Sync) = &f;
        // SAFETY: the lifetime is erased only until the end of this function, which waits for
        // every worker to be done with the job, also when it panics.
        let job: Job = unsafe { std::mem::transmute(job) };
        shared.publish(Some(job), self.workers.len());
        shared.run(job, 0, count);
        shared.wait(&shared.caller, || shared.pending.0.load(SeqCst) == 0);
        if shared.abandoned.load(Acquire)
            && let Some(panic) = lock(&shared.panic).take()
        {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.publish(None, self.workers.len());
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a job, and has nothing else that could fail.
            let _ = worker.join();
        }
    }
}

/// One thread's part in a [`Pool::team`].
///
/// [`barrier`](Member::barrier) and [`tiles`](Member::tiles) are collective: every member calls
/// them, in the same order and with the same number of tiles, or all wait forever.
#[derive(Debug)]
pub struct Member<'a> {
    /// Which member this is, below `count`.
    pub id: usize,
    /// How many there are.
    pub count: usize,
    /// None for a team of one.
    shared: Option<&'a Shared>,
    /// Tickets that earlier rounds of tiles have used up.
    tickets: Cell<usize>,
}

impl Member<'_> {
    /// A team of one, which needs no pool.
    pub fn solo() -> Member<'static> {
        Member {
            id: 0,
            count: 1,
            shared: None,
            tickets: Cell::new(0),
        }
    }

    /// Waits until every member is here; what any wrote before, all can read after.
    pub fn barrier(&self) {
        let Some(shared) = self.shared else { return };
        let generation = shared.generation.0.load(Acquire);
        if shared.arrived.0.fetch_add(1, AcqRel) + 1 == self.count {
            shared.arrived.0.store(0, Relaxed);
            shared.generation.0.store(generation + 1, Release);
            return;
        }
        let mut polls = 0;
        while shared.generation.0.load(Acquire) == generation {
            if shared.abandoned.load(Relaxed) {
                resume_unwind(Box::new(Abandoned));
            }
            polls += 1;
            if polls < shared.spins {
                std::hint::spin_loop()
            } else {
                thread::yield_now()
            }
        }
    }

    /// Tiles `0..tiles`, each going to whichever member is free. The end of the iterator is a
    /// barrier: when it returns `None`, all tiles are done.
    ///
    /// This is an iterator, not a method that takes a closure, because a closure in the middle of
    /// a kernel would be compiled without the kernel's target features.
    pub fn tiles(&self, tiles: usize) -> impl Iterator<Item = usize> {
        let mut draw = self.draw(tiles);
        std::iter::from_fn(move || {
            let tile = draw.next();
            if tile.is_none() {
                self.barrier();
            }
            tile
        })
    }

    /// [`tiles`](Member::tiles) without the barrier, which must follow before the next.
    fn draw(&self, tiles: usize) -> impl Iterator<Item = usize> {
        let first = self.tickets.get();
        // Each member draws one ticket too many.
        self.tickets.set(first + tiles + self.count);
        let mut own = 0..tiles;
        std::iter::from_fn(move || match self.shared {
            None => own.next(),
            Some(shared) => {
                let tile = shared.ticket.0.fetch_add(1, Relaxed) - first;
                (tile < tiles).then_some(tile)
            }
        })
    }
}

type Job = &'static (dyn Fn(Member) + Sync);

/// The panic of a member that left a barrier because another one panicked.
struct Abandoned;

/// A cache line of its own (two, as processors fetch them in pairs).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

/// Where threads sleep.
#[derive(Debug, Default)]
struct Bed {
    parked: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Bed {
    fn sleep_until(&self, done: impl Fn() -> bool) {
        let mut guard = lock(&self.lock);
        // Either this store is seen by `wake_all`, or `done` sees what was stored before it.
        self.parked.fetch_add(1, SeqCst);
        while !done() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.parked.fetch_sub(1, Relaxed);
    }

    fn wake_all(&self) {
        if self.parked.load(SeqCst) > 0 {
            drop(lock(&self.lock));
            self.wake.notify_all();
        }
    }
}

struct Shared {
    /// Written by the caller while no worker runs a job; None asks workers to end.
    job: UnsafeCell<Option<Job>>,
    /// Counts jobs; a change makes `job` valid.
    epoch: Line<AtomicUsize>,
    /// Workers that have not finished the current job.
    pending: Line<AtomicUsize>,
    /// The next tile, plus the tickets that earlier rounds used up.
    ticket: Line<AtomicUsize>,
    arrived: Line<AtomicUsize>,
    generation: Line<AtomicUsize>,
    /// Set when a member panicked.
    abandoned: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    spins: usize,
    workers: Bed,
    caller: Bed,
}

// SAFETY: `job` is written only by the one thread that owns the `Pool`, before it bumps `epoch`
// and after `pending` of the previous job reached zero; workers read it in between.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("jobs", &self.epoch.0)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn new(spins: usize) -> Shared {
        Shared {
            job: UnsafeCell::new(None),
            epoch: Line::default(),
            pending: Line::default(),
            ticket: Line::default(),
            arrived: Line::default(),
            generation: Line::default(),
            abandoned: AtomicBool::new(false),
            panic: Mutex::new(None),
            spins,
            workers: Bed::default(),
            caller: Bed::default(),
        }
    }

    fn publish(&self, job: Option<Job>, workers: usize) {
        // SAFETY: no worker reads it before `epoch` changes.
        unsafe { *self.job.get() = job };
        self.ticket.0.store(0, Relaxed);
        self.arrived.0.store(0, Relaxed);
        self.abandoned.store(false, Relaxed);
        self.pending.0.store(workers, Relaxed);
        self.epoch.0.fetch_add(1, SeqCst);
        self.workers.wake_all();
    }

    /// A worker's life.
    fn work(&self, id: usize, count: usize) {
        for epoch in 0.. {
            self.wait(&self.workers, || self.epoch.0.load(SeqCst) != epoch);
            // SAFETY: the change of `epoch` says that the job was written, and it is not written
            // again before this worker has decremented `pending`.
            let Some(job) = (unsafe { *self.job.get() }) else {
                return;
            };
            self.run(job, id, count);
            if self.pending.0.fetch_sub(1, SeqCst) == 1 {
                self.caller.wake_all();
            }
        }
    }

    /// One member's part of a job; keeps the first panic for the caller.
    fn run(&self, job: Job, id: usize, count: usize) {
        let member = Member {
            id,
            count,
            shared: Some(self),
            tickets: Cell::new(0),
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(member)))
            && !panic.is::<Abandoned>()
        {
            lock(&self.panic).get_or_insert(panic);
            self.abandoned.store(true, Release);
        }
    }

    /// Spins, then yields, then sleeps until `done`.
    fn wait(&self, bed: &Bed, done: impl Fn() -> bool) {
        for poll in 0..self.spins + YIELDS {
            if done() {
                return;
            }
            if poll < self.spins {
                std::hint::spin_loop()
            } else {
                thread::yield_now()
            }
        }
        bed.sleep_until(done);
    }
}

/// Nothing panics while it holds one of the pool's locks, so a poisoned lock is a sound one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> Pool {
        Pool::new(threads, 128 << 10).unwrap()
    }

    #[test]
    fn every_tile_runs_once() {
        for threads in 1..=5 {
            let pool = pool(threads);
            for tiles in [0, 1, 2, 7, 1000] {
                let hits: Vec<_> = (0..tiles).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(tiles, |tile, worker| {
                    assert!(worker < threads);
                    hits[tile].fetch_add(1, Relaxed);
                });
                assert!(hits.iter().all(|hit| hit.load(Relaxed) == 1), "{threads} {tiles}");
            }
        }
    }

    #[test]
    fn phases_of_a_team_see_each_other() {
        for threads in 1..=5 {
            let (rounds, tiles) = (200, 9);
            let cells: Vec<_> = (0..tiles).map(|_| AtomicUsize::new(0)).collect();
            pool(threads).team(|member| {
                assert!(member.id < member.count && member.count == threads);
                for round in 0..rounds {
                    for tile in member.tiles(tiles) {
                        assert_eq!(cells[tile].swap(round + 1, Relaxed), round);
                    }
                    assert!(cells.iter().all(|cell| cell.load(Relaxed) == round + 1));
                    member.barrier();
                }
            });
        }
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let pool = pool(3);
        for _ in 0..3 {
            thread::sleep(std::time::Duration::from_millis(20));
            let ran = AtomicUsize::new(0);
            pool.team(|_| {
                ran.fetch_add(1, Relaxed);
            });
            assert_eq!(ran.into_inner(), 3);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = pool(3);
        for victim in 0..3 {
            let job = || {
                pool.team(|member| {
                    if member.id == victim {
                        // Without the message that `panic!` would print.
                        resume_unwind(Box::new(victim));
                    }
                    member.barrier();
                })
            };
            let panic = catch_unwind(AssertUnwindSafe(job)).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&victim));
            every_member_runs(&pool);
        }
    }

    fn every_member_runs(pool: &Pool) {
        let ran = AtomicUsize::new(0);
        pool.team(|member| {
            member.barrier();
            ran.fetch_add(1, Relaxed);
        });
        assert_eq!(ran.into_inner(), pool.threads());
    }

    #[test]
    fn a_pool_needs_a_thread() {
        assert_eq!(Pool::new(0, 1 << 16).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
