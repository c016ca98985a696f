//! A session runs one plan: it feeds, calls and reads, makes no decision and allocates nothing.

use std::ops::Range;
use std::path::Path;

use tightfit_cpu::{Cpu, pool::Pool};
use tightfit_ir::{Slot, Target};
use tightfit_plan::{Direction, MOST_IN_FLIGHT, Plan, ProgramCalls, Transfer, Work};

use crate::arena::{Arena, ArenaError, Element};
use crate::tier::{self, Scratch, Ticket, TierError, TransferError, Transfers};

/// Why a session cannot start.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// No memory.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// A plan that offloads, and nowhere to.
    #[error("the plan keeps {bytes} bytes in a file, and no folder for it was given")]
    NoScratch {
        /// On the lower tier.
        bytes: u64,
    },
    /// No lower tier.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// No thread.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// As many as asked for.
        threads: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A plan for another backend.
    #[error("the plan is for `{plan}`, this session runs on `{session}`")]
    Target {
        /// What the plan was made for.
        plan: String,
        /// What there is.
        session: String,
    },
}

/// Stack of each worker thread, in bytes: kernels recurse nowhere and keep tiles in registers and workspaces.
pub const STACK_BYTES: usize = 256 << 10;

/// A name that a program does not have, or what a [`Driver`] could not do.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The step has no such routine.
    #[error("the plan has no routine `{0}`")]
    Routine(String),
    /// The program has no such input or result.
    #[error("the program has no {kind} `{name}`")]
    Name {
        /// Input or result.
        kind: &'static str,
        /// As asked for.
        name: String,
    },
    /// The lower tier failed. What the arena holds is of no use any more.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The driver could not feed or read.
    #[error(transparent)]
    Driver(Box<dyn std::error::Error + Send + Sync>),
}

/// What feeds a routine's programs and reads their results.
pub trait Driver {
    /// Writes the fed inputs of run `repeat` of a program.
    ///
    /// # Errors
    /// The data cannot be had; the routine stops there.
    fn feed(&mut self, program: &str, repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError>;

    /// Reads the results of run `repeat` of a program.
    ///
    /// # Errors
    /// The results cannot be used; the routine stops there.
    fn read(&mut self, program: &str, repeat: u32, results: &Results<'_>) -> Result<(), RunError>;
}

/// The fed inputs of one program.
pub struct Feed<'a> {
    arena: &'a mut Arena,
    slots: &'a [(String, Slot)],
}

impl Feed<'_> {
    /// Whether the program has an input of that name.
    pub fn has(&self, name: &str) -> bool {
        self.slots.iter().any(|(slot, _)| slot == name)
    }

    /// Inputs by name, all of them of one element type, to write.
    ///
    /// # Errors
    /// The program has no such input.
    pub fn inputs<T: Element, const N: usize>(&mut self, names: [&str; N]) -> Result<[&mut [T]; N], RunError> {
        let mut ranges = [const { 0..0 }; N];
        for (range, name) in ranges.iter_mut().zip(names) {
            *range = find(self.slots, "input", name)?;
        }
        Ok(self.arena.slices_mut(ranges))
    }

    /// Writes a one-element `f32` input.
    ///
    /// # Errors
    /// The program has no such input.
    pub fn scalar(&mut self, name: &str, value: f32) -> Result<(), RunError> {
        let [input] = self.inputs([name])?;
        input.fill(value);
        Ok(())
    }
}

/// The results of one program.
pub struct Results<'a> {
    arena: &'a Arena,
    slots: &'a [(String, Slot)],
}

impl Results<'_> {
    /// Whether the program has a result of that name.
    pub fn has(&self, name: &str) -> bool {
        self.slots.iter().any(|(slot, _)| slot == name)
    }

    /// The `f32` result of that name.
    ///
    /// # Errors
    /// The program has no such result.
    pub fn result(&self, name: &str) -> Result<&[f32], RunError> {
        Ok(self.arena.slice(find(self.slots, "result", name)?))
    }

    /// The one-element result of that name.
    ///
    /// # Errors
    /// The program has no such result.
    pub fn scalar(&self, name: &str) -> Result<f32, RunError> {
        Ok(self.result(name)?[0])
    }
}

fn find(slots: &[(String, Slot)], kind: &'static str, name: &str) -> Result<Range<u64>, RunError> {
    let slot = slots.iter().find(|(slot, _)| slot == name).map(|(_, slot)| slot);
    let slot = slot.ok_or_else(|| RunError::Name {
        kind,
        name: name.to_owned(),
    })?;
    Ok(slot.offset..slot.offset + slot.ty.bytes())
}

/// One plan's arena, threads and calls.
pub struct Session {
    pub(crate) plan: Plan,
    /// Before the arena, so that it is dropped first: transfers use the arena's memory.
    pub(crate) transfers: Option<Transfers>,
    pub(crate) arena: Arena,
    pub(crate) cpu: Cpu,
    pub(crate) routines: Vec<(String, Vec<ProgramCalls>)>,
    poison: bool,
}

impl Session {
    /// Starts `threads − 1` workers and a session on them, with this machine's best instruction set, for a plan without a lower tier.
    ///
    /// # Errors
    /// As [`on`](Self::on), or the system has no threads to give.
    pub fn new(plan: Plan, threads: usize) -> Result<Self, SessionError> {
        Self::with_scratch(plan, threads, None)
    }

    /// As [`new`](Self::new), for any plan: what it has on the lower tier goes to a file without a name in the folder `scratch`.
    ///
    /// # Errors
    /// As [`on`](Self::on), or the system has no threads to give.
    pub fn with_scratch(plan: Plan, threads: usize, scratch: Option<&Path>) -> Result<Self, SessionError> {
        let pool = Pool::new(threads, STACK_BYTES).map_err(|source| SessionError::Threads { threads, source })?;
        Self::on(plan, Cpu::new(pool), scratch)
    }

    /// Maps the arena and makes every page of it resident. Persistent tensors are not filled yet.
    ///
    /// # Errors
    /// The system has no memory or disk to give, or the plan is for another instruction set or number of threads.
    pub fn on(plan: Plan, cpu: Cpu, scratch: Option<&Path>) -> Result<Self, SessionError> {
        if plan.target() != cpu.target().name() {
            return Err(SessionError::Target {
                plan: plan.target().to_owned(),
                session: cpu.target().name().to_owned(),
            });
        }
        let transfers = match (plan.lower_tier_bytes(), scratch) {
            (0, _) => None,
            (bytes, Some(folder)) => Some(lower_tier(folder, bytes)?),
            (bytes, None) => return Err(SessionError::NoScratch { bytes }),
        };
        let mut arena = Arena::map(plan.peak())?;
        arena.fill(cpu.pool());
        let routines = plan.step().routines.iter().enumerate();
        let routines = routines
            .map(|(index, routine)| (routine.name.clone(), plan.calls(index)))
            .collect();
        Ok(Self {
            plan,
            transfers,
            arena,
            cpu,
            routines,
            poison: false,
        })
    }

    /// Whether freed bytes are overwritten as soon as they are freed. Results must not change; runs are slower.
    pub fn set_poison(&mut self, poison: bool) {
        self.poison = poison;
    }

    /// Runs a routine once: its programs in order, each as often as it repeats. Allocates nothing on any thread.
    ///
    /// # Errors
    /// There is no such routine, or the driver failed.
    pub fn run(&mut self, routine: &str, driver: &mut dyn Driver) -> Result<(), RunError> {
        let Some((_, programs)) = self.routines.iter().find(|(name, _)| name == routine) else {
            return Err(RunError::Routine(routine.to_owned()));
        };
        for program in programs {
            for repeat in 0..program.repeat {
                let mut feed = Feed {
                    arena: &mut self.arena,
                    slots: &program.fed,
                };
                driver.feed(&program.name, repeat, &mut feed)?;
                let mut begun = Begun::default();
                for action in &program.actions {
                    match &action.work {
                        Work::Call(call) => {
                            begun.wait(self.transfers.as_ref(), action.after)?;
                            // SAFETY: the plan was validated: every slot lies inside of the arena, at the backend's alignment,
                            // and overlaps no other live bytes but where the operation permits it; transfers that touch the
                            // same bytes are done. The arena is borrowed mutably.
                            unsafe { self.cpu.run(self.arena.as_ptr(), call) };
                        }
                        Work::Transfer(transfer) => {
                            // SAFETY: as above; calls that touch the bytes wait for the transfer, and all transfers are done
                            // before the loop over the actions is left behind.
                            unsafe { begun.begin(self.transfers.as_ref(), self.arena.as_ptr(), transfer) };
                        }
                    }
                    if self.poison && !action.freed.is_empty() {
                        begun.wait(self.transfers.as_ref(), begun.count)?;
                        action.freed.iter().for_each(|range| self.arena.poison(range.clone()));
                    }
                }
                begun.wait(self.transfers.as_ref(), begun.count)?;
                let results = Results {
                    arena: &self.arena,
                    slots: &program.read,
                };
                driver.read(&program.name, repeat, &results)?;
            }
            if self.poison {
                program
                    .freed_at_end
                    .iter()
                    .for_each(|range| self.arena.poison(range.clone()));
            }
        }
        Ok(())
    }

    /// What is run.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The way to the lower tier, if the plan has one.
    pub fn transfers(&self) -> Option<&Transfers> {
        self.transfers.as_ref()
    }

    /// The memory.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }
}

/// Opens the lower tier.
fn lower_tier(folder: &Path, bytes: u64) -> Result<Transfers, TierError> {
    let scratch = Scratch::create(folder, bytes)?;
    Transfers::start(scratch, MOST_IN_FLIGHT).map_err(TierError::Thread)
}

/// Transfers that one run of a program has begun.
#[derive(Default)]
struct Begun {
    count: usize,
    /// The last [`MOST_IN_FLIGHT`] ones: number `n` is in slot `n % MOST_IN_FLIGHT`. Those before are done.
    tickets: [Ticket; MOST_IN_FLIGHT],
}

impl Begun {
    /// # Safety
    /// The transfer's bytes lie inside of the arena that begins at `arena` and of the lower tier, and until it is waited for nothing
    /// writes them, nor reads them if they are fetched.
    unsafe fn begin(&mut self, transfers: Option<&Transfers>, arena: *mut u8, transfer: &Transfer) {
        // A plan with transfers has a lower tier.
        let Some(transfers) = transfers else { return };
        let ticket = tier::Transfer {
            direction: match transfer.direction {
                Direction::Fetch => tier::Direction::FromFile,
                Direction::Store => tier::Direction::ToFile,
            },
            memory: arena.wrapping_add(transfer.memory.start as usize),
            bytes: transfer.memory.end - transfer.memory.start,
            offset: transfer.lower,
        };
        // SAFETY: the caller's contract.
        self.tickets[self.count % MOST_IN_FLIGHT] = unsafe { transfers.submit(ticket) };
        self.count += 1;
    }

    /// Waits until the first `after` are done.
    fn wait(&self, transfers: Option<&Transfers>, after: usize) -> Result<(), TransferError> {
        match (transfers, after.checked_sub(1)) {
            (Some(transfers), Some(last)) => transfers.wait(self.tickets[last % MOST_IN_FLIGHT]),
            _ => Ok(()),
        }
    }
}
