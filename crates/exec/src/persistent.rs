//! Persistent tensors by name: weights and optimizer state, wherever they live.
//!
//! What is in memory is there as a whole. What is on the lower tier is reached in pieces, through a staging buffer that the plan holds
//! for the routine during which it is filled or read.

use std::ops::Range;

use tightfit_cpu::pool::Pool;
use tightfit_ir::{Binding, Graph, OutputKind, Role, Tier, Type};
use tightfit_plan::liveness::Persistent;

use crate::checkpoint::SAVE;
use crate::init;
use crate::load::{self, LOAD};
use crate::session::Session;
use crate::tier::TransferError;

/// The input of a routine through which lower-tier tensors go.
const PIECES: &str = "pieces";

/// Most bytes of it: long transfers, and still small beside any model.
const PIECE_BYTES: u64 = 1 << 20;

/// Gives a routine the staging buffer that its access to `tensors` needs: none, if all of them are in memory.
pub fn add_staging<'a>(graph: &mut Graph, tensors: impl Iterator<Item = &'a Type>) {
    let lower = tensors.filter(|ty| ty.tier == Tier::Lower);
    if let Some(largest) = lower.map(Type::bytes).max() {
        let ty = Type::f32([largest.min(PIECE_BYTES) / 4]);
        let pieces = graph.input(PIECES, ty, Role::HostStage, Binding::Fed);
        graph.output(PIECES, pieces, OutputKind::Read);
    }
}

/// Why a persistent tensor cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// Not one of the plan's.
    #[error("the plan has no tensor `{0}`")]
    Missing(String),
    /// A tensor on the lower tier, and a plan without a way to it.
    #[error("the plan has no staging buffer to reach `{tensor}` on the lower tier in `{routine}`")]
    Staging {
        /// The tensor.
        tensor: String,
        /// The routine that should have it.
        routine: &'static str,
    },
    /// The lower tier failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

/// A part of a persistent tensor, to be filled.
pub struct Piece<'a> {
    /// Index of its first element in the tensor.
    pub first: u64,
    /// Its elements.
    pub values: &'a mut [f32],
    /// What is staged in the routine `load` beside it, as [`load::routine`] asked for; may be empty.
    pub staging: &'a mut [u8],
    /// To work on it.
    pub pool: &'a Pool,
}

impl Session {
    /// Fills every persistent tensor as the model says.
    ///
    /// # Errors
    /// The lower tier cannot be written.
    pub fn initialise(&mut self, seed: u64) -> Result<(), TensorError> {
        self.initialise_roles(seed, Role::ALL)
    }

    /// Fills the persistent tensors of these roles as the model says.
    ///
    /// # Errors
    /// The lower tier cannot be written.
    pub fn initialise_roles(&mut self, seed: u64, roles: &[Role]) -> Result<(), TensorError> {
        for index in 0..self.plan.liveness().persistent.len() {
            let Persistent { name, role, init, .. } = self.plan.liveness().persistent[index].clone();
            if roles.contains(&role) {
                self.fill(&name, |piece| -> Result<(), TensorError> {
                    init::fill(piece.pool, piece.values, piece.first, init, seed, &name);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Fills a tensor: as a whole if it is in memory, else piece by piece in order.
    ///
    /// # Errors
    /// There is no such tensor, `fill` failed, or the lower tier cannot be written.
    pub fn fill<E: From<TensorError>>(
        &mut self,
        name: &str,
        mut fill: impl FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (tier, place) = self.place(name)?;
        let staging = self.staging(LOAD, load::STAGING).unwrap_or(0..0);
        match tier {
            Tier::Memory => {
                let (values, staging) = self.arena.two_mut(place, staging);
                fill(Piece {
                    first: 0,
                    values,
                    staging,
                    pool: self.cpu.pool(),
                })
            }
            Tier::Lower => {
                let pieces = self.pieces(name, LOAD)?;
                let Some(transfers) = &self.transfers else {
                    return Err(no_way(name, LOAD).into());
                };
                for (piece, at) in split(&pieces, &place) {
                    let (values, staging) = self.arena.two_mut(piece.clone(), staging.clone());
                    fill(Piece {
                        first: (at - place.start) / 4,
                        values,
                        staging,
                        pool: self.cpu.pool(),
                    })?;
                    let written = transfers.write(at, self.arena.slice(piece));
                    written.map_err(TensorError::from)?;
                }
                Ok(())
            }
        }
    }

    /// Reads a tensor: as a whole if it is in memory, else piece by piece in order.
    ///
    /// # Errors
    /// There is no such tensor, `read` failed, or the lower tier cannot be read.
    pub fn read<E: From<TensorError>>(
        &mut self,
        name: &str,
        mut read: impl FnMut(&[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (tier, place) = self.place(name)?;
        if tier == Tier::Memory {
            return read(self.arena.slice(place));
        }
        let pieces = self.pieces(name, SAVE)?;
        let Some(transfers) = &self.transfers else {
            return Err(no_way(name, SAVE).into());
        };
        for (piece, at) in split(&pieces, &place) {
            let fetched = transfers.read(at, self.arena.slice_mut(piece.clone()));
            fetched.map_err(TensorError::from)?;
            read(self.arena.slice(piece))?;
        }
        Ok(())
    }

    /// A persistent `f32` tensor in memory by name.
    pub fn persistent(&self, name: &str) -> Option<&[f32]> {
        match self.place(name) {
            Ok((Tier::Memory, place)) => Some(self.arena.slice(place)),
            _ => None,
        }
    }

    /// A persistent `f32` tensor in memory by name, to fill.
    pub fn persistent_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        match self.place(name) {
            Ok((Tier::Memory, place)) => Some(self.arena.slice_mut(place)),
            _ => None,
        }
    }

    /// The names of the persistent tensors of a role.
    pub fn persistent_names(&self, role: Role) -> Vec<String> {
        let tensors = self.plan.liveness().persistent.iter();
        tensors
            .filter(|tensor| tensor.role == role)
            .map(|tensor| tensor.name.clone())
            .collect()
    }

    /// A persistent tensor's dtype, shape and tier.
    pub fn persistent_type(&self, name: &str) -> Option<&Type> {
        let mut tensors = self.plan.liveness().persistent.iter();
        tensors.find(|tensor| tensor.name == name).map(|tensor| &tensor.ty)
    }

    /// A tensor's tier and its bytes there.
    fn place(&self, name: &str) -> Result<(Tier, Range<u64>), TensorError> {
        let mut tensors = self.plan.liveness().persistent.iter();
        let index = tensors
            .position(|tensor| tensor.name == name)
            .ok_or_else(|| TensorError::Missing(name.to_owned()))?;
        let ty = &self.plan.liveness().persistent[index].ty;
        let offset = self.plan.persistent_offsets()[index];
        Ok((ty.tier, offset..offset + ty.bytes()))
    }

    /// The bytes of a fed input of a routine's only program.
    fn staging(&self, routine: &str, input: &str) -> Option<Range<u64>> {
        let (_, programs) = self.routines.iter().find(|(name, _)| name == routine)?;
        let (_, slot) = programs.first()?.fed.iter().find(|(name, _)| name == input)?;
        Some(slot.offset..slot.offset + slot.ty.bytes())
    }

    /// The staging buffer through which a routine reaches a tensor on the lower tier.
    fn pieces(&self, tensor: &str, routine: &'static str) -> Result<Range<u64>, TensorError> {
        self.staging(routine, PIECES).ok_or_else(|| no_way(tensor, routine))
    }
}

fn no_way(tensor: &str, routine: &'static str) -> TensorError {
    TensorError::Staging {
        tensor: tensor.to_owned(),
        routine,
    }
}

/// Cuts bytes of the lower tier into parts that fit the staging buffer: the part of the buffer, and where it goes.
fn split(pieces: &Range<u64>, place: &Range<u64>) -> impl Iterator<Item = (Range<u64>, u64)> + use<> {
    let (pieces, place) = (pieces.clone(), place.clone());
    let size = pieces.end - pieces.start;
    (place.start..place.end).step_by(size.max(1) as usize).map(move |at| {
        let bytes = size.min(place.end - at);
        (pieces.start..pieces.start + bytes, at)
    })
}
