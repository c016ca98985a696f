//! Files for the targets that read by path. Run with `TMPDIR` on a memory file system.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::PathBuf,
};

/// A file that each input overwrites.
#[derive(Debug)]
pub struct Scratch {
    /// Where it is.
    pub path: PathBuf,
    /// Open for reading and writing.
    pub file: File,
}

impl Scratch {
    /// An empty file, in a folder of this process.
    ///
    /// # Errors
    /// No such folder or file can be made.
    pub fn new(name: &str) -> io::Result<Self> {
        let folder = std::env::temp_dir().join(format!("tightfit-fuzz-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let path = folder.join(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)?;
        Ok(Scratch { path, file })
    }

    /// Makes these bytes all that is in the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(bytes, 0)
    }
}
