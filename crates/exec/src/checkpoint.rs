//! Checkpoint files: safetensors, streamed from the arena, whole or not there.
//!
//! A file is written under another name, synced, and renamed over the old one, so that a full disk or a kill leaves the last good
//! file. The tensors are written from where they lie: saving needs no memory of its own.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use safetensors::{Dtype, View, serialize_to_file};
use tightfit_ir::Role;

use crate::session::Session;

/// Why a checkpoint could not be saved.
#[derive(Debug, thiserror::Error)]
#[error("cannot save {}: {message}", path.display())]
pub struct SaveError {
    /// The file.
    pub path: PathBuf,
    /// What went wrong.
    pub message: String,
}

/// Writes the persistent tensors of the given roles to `path`, with `metadata` in its header.
///
/// # Errors
/// The file cannot be written whole; what was at `path` before is still there.
pub fn save(
    session: &Session,
    roles: &[Role],
    metadata: HashMap<String, String>,
    path: &Path,
) -> Result<(), SaveError> {
    let tensors = session
        .plan()
        .liveness()
        .persistent
        .iter()
        .filter(|tensor| roles.contains(&tensor.role));
    let views = tensors.filter_map(|tensor| {
        let data = session.persistent(&tensor.name)?;
        let shape = tensor.ty.shape.dims().iter().map(|&d| d as usize).collect();
        Some((tensor.name.as_str(), F32View { shape, data }))
    });
    replace(path, |partial| {
        serialize_to_file(views, Some(metadata), partial).map_err(|error| error.to_string())
    })
}

/// Makes `path` by writing another file first: the content is there whole, or as it was.
///
/// # Errors
/// Writing, syncing or renaming fails; the other file is removed.
pub fn replace(path: &Path, write: impl FnOnce(&Path) -> Result<(), String>) -> Result<(), SaveError> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let synced = write(&partial).and_then(|()| {
        let finish = || -> std::io::Result<()> {
            File::open(&partial)?.sync_all()?;
            fs::rename(&partial, path)?;
            // The new name is durable once the folder is synced.
            match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                Some(parent) => File::open(parent)?.sync_all(),
                None => File::open(".")?.sync_all(),
            }
        };
        finish().map_err(|error| error.to_string())
    });
    synced.map_err(|message| {
        // It may not exist; what matters is reported below.
        let _ = fs::remove_file(&partial);
        SaveError {
            path: path.to_owned(),
            message,
        }
    })
}

/// A tensor where it lies.
struct F32View<'a> {
    shape: Vec<usize>,
    data: &'a [f32],
}

impl View for F32View<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // SAFETY: floats are plain bytes, and a byte has no alignment.
        let bytes = unsafe { std::slice::from_raw_parts(self.data.as_ptr().cast(), size_of_val(self.data)) };
        Cow::Borrowed(bytes)
    }

    fn data_len(&self) -> usize {
        size_of_val(self.data)
    }
}
