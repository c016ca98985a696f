//! The scratch file: on a disk, without a name, with room for every byte before anything runs.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, ftruncate, open, statfs, statvfs, unlink};
use rustix::io::{Errno, retry_on_intr};
use tightfit_plan::report::format_bytes;

use super::direct::{Bounce, Failure, PAGE, PageFile};

/// File systems that keep their files in memory, by the magic number that statfs(2) gives.
const IN_MEMORY: [(u32, &str); 3] = [
    (0x0102_1994, "tmpfs"),
    (0x8584_58f6, "ramfs"),
    (0x9584_58f6, "hugetlbfs"),
];

/// Names tried where a file cannot be made without one.
const NAMES: u32 = 100;

/// Why there is no scratch file.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// The system refused.
    #[error("cannot make a scratch file in `{}`: {source}; name a folder on a disk with --scratch DIR", folder.display())]
    Folder {
        /// Where.
        folder: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The folder is memory itself.
    #[error(
        "`{}` is a {kind}, which is memory: what is offloaded there saves none; name a folder on a disk with --scratch DIR",
        folder.display()
    )]
    InMemory {
        /// Where.
        folder: PathBuf,
        /// The file system.
        kind: &'static str,
    },
    /// The disk is too full.
    #[error(
        "the scratch file needs {}, and `{}` has {} free; name a folder on another disk with --scratch DIR",
        format_bytes(*needed), folder.display(), format_bytes(*free)
    )]
    Space {
        /// Where.
        folder: PathBuf,
        /// Bytes of the file.
        needed: u64,
        /// Bytes that this user may still write.
        free: u64,
    },
}

/// An unlinked file of fixed size on a disk, which goes when it is dropped, or when the process ends, however it ends.
///
/// Its bytes are zeros, or what a transfer left there last. They move through [`Transfers`](super::Transfers).
#[derive(Debug)]
pub struct Scratch {
    file: PageFile,
    bytes: u64,
}

impl Scratch {
    /// Makes a file of at least `bytes`, in whole pages, and reserves the disk space, so that the disk cannot be too full later. (Where the
    /// file system reserves none, what is free is only compared; a file system that copies on write may also want more.)
    ///
    /// # Errors
    /// The folder cannot be written to, is in memory, or its disk has too little space.
    pub fn create(folder: &Path, bytes: u64) -> Result<Self, ScratchError> {
        Self::check(folder, bytes)?;
        let refused = |error| ScratchError::refused(folder, error);
        let bytes = whole_pages(bytes);
        let file = unlinked(folder).map_err(refused)?;
        match reserve(&file, bytes) {
            Err(Errno::NOSPC) => return Err(ScratchError::full(folder, bytes)),
            reserved => reserved.map_err(refused)?,
        }
        let file = PageFile::new(file, true).map_err(refused)?;
        Ok(Self { file, bytes })
    }

    /// Whether a folder is on a disk that has so much room now. Writes nothing.
    ///
    /// # Errors
    /// It is not, or the system does not say.
    pub fn check(folder: &Path, bytes: u64) -> Result<(), ScratchError> {
        let refused = |error| ScratchError::refused(folder, error);
        let magic = statfs(folder).map_err(refused)?.f_type as u32;
        if let Some(&(_, kind)) = IN_MEMORY.iter().find(|(number, _)| *number == magic) {
            return Err(ScratchError::InMemory {
                folder: folder.to_owned(),
                kind,
            });
        }
        match free(folder).map_err(refused)? < whole_pages(bytes) {
            true => Err(ScratchError::full(folder, whole_pages(bytes))),
            false => Ok(()),
        }
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether transfers bypass the page cache. Where the file system does not allow that, the cache is dropped behind them.
    pub fn is_direct(&self) -> bool {
        self.file.is_direct()
    }

    pub(super) fn write(&self, offset: u64, memory: &[u8], bounce: &mut Bounce) -> Result<(), Failure> {
        self.check_range(offset, memory.len())?;
        self.file.write(offset, memory, bounce)
    }

    pub(super) fn read(&self, offset: u64, memory: &mut [u8], bounce: &mut Bounce) -> Result<(), Failure> {
        self.check_range(offset, memory.len())?;
        self.file.read(offset, memory, bounce)
    }

    fn check_range(&self, offset: u64, bytes: usize) -> Result<(), Failure> {
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Failure::Outside(self.bytes)),
        }
    }
}

impl ScratchError {
    fn refused(folder: &Path, error: Errno) -> Self {
        Self::Folder {
            folder: folder.to_owned(),
            source: error.into(),
        }
    }

    fn full(folder: &Path, needed: u64) -> Self {
        match free(folder) {
            Ok(free) => Self::Space {
                folder: folder.to_owned(),
                needed,
                free,
            },
            Err(error) => Self::refused(folder, error),
        }
    }
}

fn whole_pages(bytes: u64) -> u64 {
    let page = PAGE as u64;
    bytes.max(1).div_ceil(page).saturating_mul(page)
}

/// Bytes that this user may still write to a folder's disk.
fn free(folder: &Path) -> Result<u64, Errno> {
    statvfs(folder).map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// An open file that has no name: it cannot be left behind.
fn unlinked(folder: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    // Whatever the reason, a named file fails for the same one, or does not.
    open(folder, flags, Mode::RUSR | Mode::WUSR).or_else(|_| unnamed(folder))
}

/// [`unlinked`] where files begin with a name.
fn unnamed(folder: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    for number in 0..NAMES {
        let path = folder.join(format!(".tightfit-scratch-{}-{number}", std::process::id()));
        match open(&path, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::EXIST) => {}
            file => {
                let file = file?;
                unlink(&path)?;
                return Ok(file);
            }
        }
    }
    Err(Errno::EXIST)
}

/// Makes the file `bytes` long and its blocks its own, where the file system can.
fn reserve(file: &OwnedFd, bytes: u64) -> Result<(), Errno> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => ftruncate(file, bytes),
        reserved => reserved,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_a_name_loses_it() {
        let folder = std::env::temp_dir().join(format!("tightfit-unnamed-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        // A name that another process of this number left behind.
        std::fs::write(folder.join(format!(".tightfit-scratch-{}-0", std::process::id())), "").unwrap();
        let file = unnamed(&folder).unwrap();
        reserve(&file, 4096).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        let file = PageFile::new(file, true).unwrap();
        let mut back = [0];
        file.write(0, &[7], &mut Bounce::new()).unwrap();
        file.read(0, &mut back, &mut Bounce::new()).unwrap();
        assert_eq!(back, [7]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
