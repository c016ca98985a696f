//! Text files that the user names.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a UTF-8 file of at most `most` bytes: one that is larger is not what the user meant, and does not belong in memory.
///
/// # Errors
/// The file is not readable, not UTF-8, or larger.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?.take(most + 1).read_to_string(&mut text);
    match read {
        Ok(_) if text.len() as u64 > most => Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it is larger than {most} bytes"),
        )),
        Ok(_) => Ok(text),
        Err(error) => Err(error),
    }
}

/// As [`read_text`], of a regular file only: opening a pipe would wait for someone to write to it.
///
/// # Errors
/// As [`read_text`], or it is no regular file.
pub fn read_regular(path: &Path, most: u64) -> io::Result<String> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    read_text(path, most)
}
