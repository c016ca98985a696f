//! Persistent tensors by name: weights and optimizer state, wherever they live and however they are stored.
//!
//! What is in memory is there as a whole. What is on the lower tier is reached in pieces, through a staging buffer that the plan holds
//! for the routine during which it is filled or read. Numbers that are stored in fewer bits than an `f32` are made as `f32` some rows at
//! a time, in another such buffer, and converted from there.

use std::ops::Range;

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use tightfit_cpu::pool::Pool;
use tightfit_ir::{Binding, Block, DType, Graph, Init, OutputKind, Role, Tier, Type};
use tightfit_plan::liveness::Persistent;
use tightfit_quant::Encoder;

use crate::checkpoint::SAVE;
use crate::init;
use crate::load::{self, LOAD};
use crate::session::Session;
use crate::tier::TransferError;

/// The input of a routine through which lower-tier tensors go.
const PIECES: &str = "pieces";

/// The input of [`LOAD`] that holds numbers as `f32` on their way into fewer bits.
const VALUES: &str = "values";

/// The input of [`LOAD`] that quantising needs beside its result.
const SCRATCH: &str = "scratch";

/// Most bytes of a piece and of such numbers: long transfers, and still small beside any model.
const PIECE_BYTES: u64 = 1 << 20;

/// Gives a routine the staging buffer that its access to `tensors` needs: none, if all of them are in memory.
pub fn add_staging<'a>(graph: &mut Graph, tensors: impl Iterator<Item = &'a Type>) {
    let lower = tensors.filter(|ty| ty.tier == Tier::Lower);
    if let Some(largest) = lower.map(piece_bytes).max() {
        add(graph, PIECES, Type::new(DType::U8, [largest]));
    }
}

/// Gives [`LOAD`] the buffers in which numbers are made that `tensors` store in fewer bits: none, if there are no such tensors.
pub fn add_conversion<'a>(graph: &mut Graph, tensors: impl Iterator<Item = &'a Type> + Clone) {
    let converted = tensors.filter(|ty| converts(ty.dtype));
    if let Some(largest) = converted.clone().map(|ty| rows_at_once(ty) * ty.cols()).max() {
        add(graph, VALUES, Type::f32([largest]));
    }
    let scratch = converted.filter_map(|ty| match ty.dtype {
        DType::Block(block) => Some(block.scratch_floats(ty.rows(), ty.cols())),
        _ => None,
    });
    if let Some(largest) = scratch.max().filter(|&floats| floats > 0) {
        add(graph, SCRATCH, Type::f32([largest]));
    }
}

fn add(graph: &mut Graph, name: &str, ty: Type) {
    let staging = graph.input(name, ty, Role::HostStage, Binding::Fed);
    graph.output(name, staging, OutputKind::Read);
}

/// Whether numbers are made as `f32` first.
fn converts(dtype: DType) -> bool {
    match dtype {
        DType::Bf16 | DType::F16 | DType::Block(_) => true,
        DType::F32 | DType::I32 | DType::U8 => false,
    }
}

/// Rows of a tensor that are made at one time; an even number, unless it is all of them.
fn rows_at_once(ty: &Type) -> u64 {
    let fit = PIECE_BYTES / 4 / ty.cols().max(1);
    (fit / 2 * 2).max(2).min(ty.rows())
}

/// Bytes of the staging buffer for a tensor on the lower tier. What is quantised is made as a whole, as its scales stand apart from its
/// codes.
fn piece_bytes(ty: &Type) -> u64 {
    match ty.dtype {
        DType::Block(_) => ty.bytes(),
        _ => ty.bytes().min(PIECE_BYTES),
    }
}

/// Why a persistent tensor cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// Not one of the plan's.
    #[error("the plan has no tensor `{0}`")]
    Missing(String),
    /// A plan without the buffer through which a tensor is reached.
    #[error("the plan has no staging buffer to reach `{tensor}` in `{routine}`")]
    Staging {
        /// The tensor.
        tensor: String,
        /// The routine that should have it.
        routine: &'static str,
    },
    /// Raw bytes that should start as numbers.
    #[error("`{tensor}` holds {dtype} and can only start as zeros")]
    NotNumbers {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: &'static str,
    },
    /// A number that its dtype cannot hold.
    #[error("`{tensor}` has the value {value}, which is infinite as {dtype}: store it as bf16 or f32")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// The number.
        value: f32,
        /// The tensor's dtype.
        dtype: &'static str,
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
    /// The lower tier cannot be written, or the plan has no way to a tensor.
    pub fn initialise(&mut self, seed: u64) -> Result<(), TensorError> {
        self.initialise_roles(seed, Role::ALL)
    }

    /// Fills the persistent tensors of these roles as the model says.
    ///
    /// # Errors
    /// As [`initialise`](Self::initialise).
    pub fn initialise_roles(&mut self, seed: u64, roles: &[Role]) -> Result<(), TensorError> {
        for index in 0..self.plan.liveness().persistent.len() {
            let Persistent { name, role, init, .. } = self.plan.liveness().persistent[index].clone();
            if roles.contains(&role) {
                self.initialise_tensor(&name, init, seed)?;
            }
        }
        Ok(())
    }

    /// Fills a tensor as the model says.
    ///
    /// # Errors
    /// As [`initialise`](Self::initialise).
    pub fn initialise_tensor(&mut self, name: &str, init: Init, seed: u64) -> Result<(), TensorError> {
        let dtype = self.persistent_type(name).map(|ty| ty.dtype);
        match (dtype, init) {
            (Some(DType::U8 | DType::I32), Init::Zeros) => self.fill_bytes(name, |_, bytes| {
                bytes.fill(0);
                Ok(())
            }),
            _ => self.fill(name, |piece| {
                init::fill(piece.pool, piece.values, piece.first, init, seed, name);
                Ok(())
            }),
        }
    }

    /// Fills a tensor of numbers, which `fill` gives as `f32`: as a whole if it is in memory as that, else piece by piece in order.
    ///
    /// # Errors
    /// There is no such tensor, it has no numbers, `fill` failed, or the lower tier cannot be written.
    pub fn fill<E: From<TensorError>>(
        &mut self,
        name: &str,
        mut fill: impl FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (ty, place) = self.place(name)?;
        for part in self.parts(name, &ty, &place, LOAD)? {
            match ty.dtype {
                DType::F32 => self.make(part.first / 4, part.memory.clone(), &mut fill)?,
                DType::Bf16 | DType::F16 => self.make_halves(name, &ty, &part, &mut fill)?,
                DType::Block(block) => self.quantise(name, block, &ty, &part, &mut fill)?,
                DType::I32 | DType::U8 => return Err(not_numbers(name, ty.dtype).into()),
            }
            self.keep(&part)?;
        }
        Ok(())
    }

    /// Fills a tensor with its bytes: as a whole if it is in memory, else piece by piece in order. `fill` is given the number of the
    /// first byte.
    ///
    /// # Errors
    /// There is no such tensor, `fill` failed, or the lower tier cannot be written.
    pub fn fill_bytes<E: From<TensorError>>(
        &mut self,
        name: &str,
        mut fill: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (ty, place) = self.place(name)?;
        for part in self.parts(name, &ty, &place, LOAD)? {
            fill(part.first, self.arena.slice_mut(part.memory.clone()))?;
            self.keep(&part)?;
        }
        Ok(())
    }

    /// Reads a tensor's bytes: as a whole if it is in memory, else piece by piece in order.
    ///
    /// # Errors
    /// There is no such tensor, `read` failed, or the lower tier cannot be read.
    pub fn read<E: From<TensorError>>(
        &mut self,
        name: &str,
        mut read: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (ty, place) = self.place(name)?;
        for part in self.parts(name, &ty, &place, SAVE)? {
            if let (Some(at), Some(transfers)) = (part.lower, &self.transfers) {
                let fetched = transfers.read(at, self.arena.slice_mut(part.memory.clone()));
                fetched.map_err(TensorError::from)?;
            }
            read(self.arena.slice(part.memory))?;
        }
        Ok(())
    }

    /// A persistent `f32` tensor in memory by name.
    pub fn persistent(&self, name: &str) -> Option<&[f32]> {
        self.floats(name).map(|place| self.arena.slice(place))
    }

    /// A persistent `f32` tensor in memory by name, to fill.
    pub fn persistent_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        self.floats(name).map(|place| self.arena.slice_mut(place))
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

    /// Lets `fill` write `f32` elements from number `first` on.
    fn make<E>(
        &mut self,
        first: u64,
        values: Range<u64>,
        fill: &mut impl FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let staging = self.staging(LOAD, load::STAGING).unwrap_or(0..0);
        let ([values], [staging]) = self.arena.parts_mut([values], [staging]);
        fill(Piece {
            first,
            values,
            staging,
            pool: self.cpu.pool(),
        })
    }

    /// Makes a part of a tensor of 16-bit numbers.
    fn make_halves<E: From<TensorError>>(
        &mut self,
        name: &str,
        ty: &Type,
        part: &Part,
        fill: &mut impl FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let elements = (part.memory.end - part.memory.start) / 2;
        let at_once = rows_at_once(ty) * ty.cols();
        for start in (0..elements).step_by(at_once.max(1) as usize) {
            let count = at_once.min(elements - start);
            let values = self.values(name, count)?;
            self.make(part.first / 2 + start, values.clone(), fill)?;
            let first = part.memory.start + 2 * start;
            let to = first..first + 2 * count;
            let ([values], [halves]) = self.arena.parts_mut::<f32, u16, 1, 1>([values], [to]);
            let infinite = match ty.dtype {
                DType::Bf16 => {
                    let halves = halves.reinterpret_cast_mut::<bf16>();
                    halves.convert_from_f32_slice(values);
                    halves.iter().position(|half| half.is_infinite())
                }
                _ => {
                    let halves = halves.reinterpret_cast_mut::<f16>();
                    halves.convert_from_f32_slice(values);
                    halves.iter().position(|half| half.is_infinite())
                }
            };
            if let Some(index) = infinite {
                return Err(E::from(TensorError::TooLarge {
                    tensor: name.to_owned(),
                    value: values[index],
                    dtype: ty.dtype.name(),
                }));
            }
        }
        Ok(())
    }

    /// Makes a quantised tensor, which a part is the whole of.
    fn quantise<E: From<TensorError>>(
        &mut self,
        name: &str,
        block: Block,
        ty: &Type,
        part: &Part,
        fill: &mut impl FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (rows, cols) = (ty.rows(), ty.cols());
        let scratch = block.scratch_floats(rows, cols);
        let scratch = match self.staging(LOAD, SCRATCH) {
            Some(staged) if staged.end - staged.start >= 4 * scratch => staged.end - 4 * scratch..staged.end,
            _ if scratch == 0 => 0..0,
            _ => return Err(no_way(name, LOAD).into()),
        };
        let at_once = rows_at_once(ty);
        let values = self.values(name, at_once * cols)?;
        let staging = self.staging(LOAD, load::STAGING).unwrap_or(0..0);
        let ([values, scratch], [staging, bytes]) =
            self.arena.parts_mut([values, scratch], [staging, part.memory.clone()]);
        let mut encoder = Encoder::new(block, rows as usize, cols as usize, bytes, scratch);
        for row in (0..rows).step_by(at_once.max(1) as usize) {
            let count = at_once.min(rows - row) * cols;
            let from = values.len() - count as usize;
            fill(Piece {
                first: row * cols,
                values: &mut values[from..],
                staging: &mut *staging,
                pool: self.cpu.pool(),
            })?;
            encoder.push(&values[from..]);
        }
        encoder.finish();
        Ok(())
    }

    /// Where so many numbers are made: at the buffer's end, so that its last word is written, as workspaces' are.
    fn values(&self, tensor: &str, count: u64) -> Result<Range<u64>, TensorError> {
        match self.staging(LOAD, VALUES) {
            Some(values) if values.end - values.start >= 4 * count => Ok(values.end - 4 * count..values.end),
            _ => Err(no_way(tensor, LOAD)),
        }
    }

    /// Takes a part to the lower tier, if it belongs there.
    fn keep(&self, part: &Part) -> Result<(), TensorError> {
        if let (Some(at), Some(transfers)) = (part.lower, &self.transfers) {
            transfers.write(at, self.arena.slice(part.memory.clone()))?;
        }
        Ok(())
    }

    /// A tensor's type and its bytes on its tier.
    fn place(&self, name: &str) -> Result<(Type, Range<u64>), TensorError> {
        let mut tensors = self.plan.liveness().persistent.iter();
        let index = tensors
            .position(|tensor| tensor.name == name)
            .ok_or_else(|| TensorError::Missing(name.to_owned()))?;
        let ty = self.plan.liveness().persistent[index].ty.clone();
        let offset = self.plan.persistent_offsets()[index];
        let bytes = ty.stored_bytes();
        Ok((ty, offset..offset + bytes))
    }

    /// The bytes of a tensor that is in memory as `f32`.
    fn floats(&self, name: &str) -> Option<Range<u64>> {
        let (ty, place) = self.place(name).ok()?;
        (ty.dtype == DType::F32 && ty.tier == Tier::Memory).then_some(place)
    }

    /// A tensor in the parts in which a routine reaches it.
    fn parts(
        &self,
        name: &str,
        ty: &Type,
        place: &Range<u64>,
        routine: &'static str,
    ) -> Result<impl Iterator<Item = Part> + use<>, TensorError> {
        let (size, pieces) = match ty.tier {
            Tier::Memory => (place.end - place.start, None),
            Tier::Lower => {
                let pieces = self.staging(routine, PIECES).filter(|_| self.transfers.is_some());
                let pieces = pieces.ok_or_else(|| no_way(name, routine))?;
                (piece_bytes(ty).min(pieces.end - pieces.start), Some(pieces))
            }
        };
        let place = place.clone();
        let starts = (place.start..place.end).step_by(size.max(1) as usize);
        Ok(starts.map(move |at| {
            let bytes = size.min(place.end - at);
            Part {
                first: at - place.start,
                memory: match &pieces {
                    None => at..at + bytes,
                    Some(pieces) => pieces.start..pieces.start + bytes,
                },
                lower: pieces.is_some().then_some(at),
            }
        }))
    }

    /// The bytes of a fed input of a routine's only program.
    fn staging(&self, routine: &str, input: &str) -> Option<Range<u64>> {
        let (_, programs) = self.routines.iter().find(|(name, _)| name == routine)?;
        let (_, slot) = programs.first()?.fed.iter().find(|(name, _)| name == input)?;
        Some(slot.offset..slot.offset + slot.ty.bytes())
    }
}

/// A part of a tensor: all of it, or what fits the staging buffer.
struct Part {
    /// Number of its first byte in the tensor.
    first: u64,
    /// Where it is in memory, for good or on its way.
    memory: Range<u64>,
    /// Where it goes on the lower tier.
    lower: Option<u64>,
}

pub(crate) fn no_way(tensor: &str, routine: &'static str) -> TensorError {
    TensorError::Staging {
        tensor: tensor.to_owned(),
        routine,
    }
}

fn not_numbers(tensor: &str, dtype: DType) -> TensorError {
    TensorError::NotNumbers {
        tensor: tensor.to_owned(),
        dtype: dtype.name(),
    }
}
