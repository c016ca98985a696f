//! A session runs one plan: it feeds, calls and reads, makes no decision and allocates nothing.

use std::ops::Range;

use tightfit_cpu::{Cpu, pool::Pool};
use tightfit_ir::{Role, Slot, Target, Type};
use tightfit_plan::{Plan, ProgramCalls};

use crate::arena::{Arena, ArenaError, Element};
use crate::init;

/// Why a session cannot start.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// No memory.
    #[error(transparent)]
    Arena(#[from] ArenaError),
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
    plan: Plan,
    arena: Arena,
    cpu: Cpu,
    routines: Vec<(String, Vec<ProgramCalls>)>,
    poison: bool,
}

impl Session {
    /// Starts `threads − 1` workers and a session on them, with this machine's best instruction set.
    ///
    /// # Errors
    /// The system has no memory or threads to give, or the plan is for another machine.
    pub fn new(plan: Plan, threads: usize) -> Result<Self, SessionError> {
        let pool = Pool::new(threads, STACK_BYTES).map_err(|source| SessionError::Threads { threads, source })?;
        Self::on(plan, Cpu::new(pool))
    }

    /// Maps the arena and makes every page of it resident. Persistent tensors are not filled yet.
    ///
    /// # Errors
    /// The system has no memory to give, or the plan is for another instruction set or number of threads.
    pub fn on(plan: Plan, cpu: Cpu) -> Result<Self, SessionError> {
        if plan.target() != cpu.target().name() {
            return Err(SessionError::Target {
                plan: plan.target().to_owned(),
                session: cpu.target().name().to_owned(),
            });
        }
        let mut arena = Arena::map(plan.peak())?;
        arena.fill(cpu.pool());
        let routines = plan.step().routines.iter().enumerate();
        let routines = routines
            .map(|(index, routine)| (routine.name.clone(), plan.calls(index)))
            .collect();
        Ok(Self {
            plan,
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

    /// Fills every persistent tensor as the model says.
    pub fn initialise(&mut self, seed: u64) {
        self.initialise_roles(seed, Role::ALL);
    }

    /// Fills the persistent tensors of these roles as the model says.
    pub fn initialise_roles(&mut self, seed: u64, roles: &[Role]) {
        let tensors = self
            .plan
            .liveness()
            .persistent
            .iter()
            .zip(self.plan.persistent_offsets());
        for (tensor, &offset) in tensors.filter(|(tensor, _)| roles.contains(&tensor.role)) {
            let data = self.arena.slice_mut(offset..offset + tensor.ty.bytes());
            init::fill(self.cpu.pool(), data, tensor.init, seed, &tensor.name);
        }
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
                for (call, freed) in program.calls.iter().zip(&program.freed) {
                    // SAFETY: the plan was validated: every slot lies inside of the arena, at the backend's alignment, and
                    // overlaps no other live bytes but where the operation permits it. The arena is borrowed mutably.
                    unsafe { self.cpu.run(self.arena.as_ptr(), call) };
                    if self.poison {
                        freed.iter().for_each(|range| self.arena.poison(range.clone()));
                    }
                }
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

    /// The memory.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// A persistent `f32` tensor by name.
    pub fn persistent(&self, name: &str) -> Option<&[f32]> {
        self.persistent_range(name).map(|range| self.arena.slice(range))
    }

    /// A persistent `f32` tensor by name, to fill.
    pub fn persistent_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        self.persistent_range(name).map(|range| self.arena.slice_mut(range))
    }

    /// The names of the persistent tensors of a role.
    pub fn persistent_names(&self, role: Role) -> Vec<String> {
        let tensors = self.plan.liveness().persistent.iter();
        tensors
            .filter(|tensor| tensor.role == role)
            .map(|tensor| tensor.name.clone())
            .collect()
    }

    /// A persistent tensor's dtype and shape.
    pub fn persistent_type(&self, name: &str) -> Option<&Type> {
        let mut tensors = self.plan.liveness().persistent.iter();
        tensors.find(|tensor| tensor.name == name).map(|tensor| &tensor.ty)
    }

    /// The fed input `staging` of a routine's only program, and a persistent `f32` tensor that is filled through it.
    pub(crate) fn staged(&mut self, routine: &str, staging: &str, name: &str) -> Option<(&mut [u8], &mut [f32])> {
        let tensor = self.persistent_range(name)?;
        let (_, programs) = self.routines.iter().find(|(name, _)| name == routine)?;
        let (_, slot) = programs.first()?.fed.iter().find(|(name, _)| name == staging)?;
        Some(self.arena.two_mut(slot.offset..slot.offset + slot.ty.bytes(), tensor))
    }

    fn persistent_range(&self, name: &str) -> Option<Range<u64>> {
        let index = self
            .plan
            .liveness()
            .persistent
            .iter()
            .position(|tensor| tensor.name == name)?;
        let offset = self.plan.persistent_offsets()[index];
        Some(offset..offset + self.plan.liveness().persistent[index].ty.bytes())
    }
}
