//! Checkpoint files: safetensors, streamed from the arena, whole or not there.
//!
//! A file is written under another name, synced, and renamed over the old one, so that a full disk or a kill leaves the last good
//! file. The tensors are written from where they lie: saving needs no memory of its own but the header. The `safetensors` crate
//! would write a temporary file that only its owner may read, under a name that nobody finds again after a kill, and its header
//! lists metadata in random order; the format is short enough to write here
//! (<https://huggingface.co/docs/safetensors/index#format>).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tightfit_format::Encoding;
use tightfit_format::safetensors::Layout;
use tightfit_ir::{DType, Graph, Role, Routine, Type};

use crate::persistent::{TensorError, add_staging};
use crate::session::Session;

/// The routine, and its program, during which a checkpoint is written.
pub const SAVE: &str = "save";

/// The routine in which `persistent` tensors are saved: it keeps them alive, and has a staging buffer where one of them is on the
/// lower tier.
pub fn routine<'a>(persistent: impl Iterator<Item = &'a Type>) -> Routine {
    let mut graph = Graph::new();
    add_staging(&mut graph, persistent);
    Routine::of(SAVE, graph)
}

/// Why a file could not be saved.
#[derive(Debug, thiserror::Error)]
#[error("cannot save {}: {source}", path.display())]
pub struct SaveError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Writes the persistent tensors of the given roles to `path` in the order of their names, each name behind `prefix`, with `metadata`
/// in its header.
///
/// # Errors
/// The file cannot be written whole; what was at `path` before is still there.
pub fn save(
    session: &mut Session,
    roles: &[Role],
    prefix: &str,
    metadata: &[(&str, &str)],
    path: &Path,
) -> Result<(), SaveError> {
    let persistent = session.plan().liveness().persistent.iter();
    let mut tensors: Vec<_> = persistent
        .filter(|tensor| roles.contains(&tensor.role))
        .cloned()
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));

    let failed = |source| SaveError {
        path: path.to_owned(),
        source,
    };
    let mut layout = Layout::default();
    for tensor in &tensors {
        let pushed = encoding(&tensor.ty).and_then(|encoding| {
            let name = format!("{prefix}{}", tensor.name);
            layout
                .push(&name, encoding, tensor.ty.shape.dims())
                .map_err(io::Error::other)
        });
        pushed.map_err(failed)?;
    }
    let layout = layout.finish(metadata);
    replace(path, |mut file| {
        file.write_all(layout.header())?;
        layout.entries().iter().try_for_each(|entry| {
            let name = entry.name.strip_prefix(prefix).unwrap_or(&entry.name);
            let written = session.read(name, |piece| file.write_all(piece).map_err(WriteError::File));
            written.map_err(WriteError::into_io)
        })
    })
}

/// Makes `path` by writing [`partial`]`(path)` first: the content is there whole, or as it was.
///
/// # Errors
/// Writing, syncing or renaming fails; the other file is removed.
pub fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> Result<(), SaveError> {
    let partial = partial(path);
    let saved = || {
        let file = File::create(&partial)?;
        write(&file)?;
        file.sync_all()?;
        fs::rename(&partial, path)?;
        // The new name is durable once the folder is synced.
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    };
    saved().map_err(|source| {
        // It may not exist; what matters is reported below.
        let _ = fs::remove_file(&partial);
        SaveError {
            path: path.to_owned(),
            source,
        }
    })
}

/// The name under which a file is written until it is whole. A process that is killed leaves it there.
pub fn partial(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

/// Bytes that a folder's file system has left for this user; `None` where it does not say.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Why a tensor could not be copied into a file.
enum WriteError {
    File(io::Error),
    Tensor(TensorError),
}

impl From<TensorError> for WriteError {
    fn from(error: TensorError) -> Self {
        Self::Tensor(error)
    }
}

impl WriteError {
    fn into_io(self) -> io::Error {
        match self {
            Self::File(error) => error,
            Self::Tensor(error) => io::Error::other(error),
        }
    }
}

/// How the file stores a tensor: as it is. Quantised weights are frozen, and stay in the file that they came from.
fn encoding(ty: &Type) -> io::Result<Encoding> {
    const { assert!(cfg!(target_endian = "little"), "safetensors are little-endian") };
    let dtype = match ty.dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
        DType::F16 => "F16",
        DType::I32 => "I32",
        DType::U8 => "U8",
        DType::Block(block) => {
            return Err(io::Error::other(format!(
                "{block} weights are not saved in checkpoints"
            )));
        }
    };
    Encoding::from_safetensors(dtype).ok_or_else(|| io::Error::other(format!("safetensors have no {dtype}")))
}
