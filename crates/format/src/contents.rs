//! What a file seems to be, by its first bytes.

use std::fmt;

/// What a file seems to be, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contents {
    /// Nothing at all.
    Empty,
    /// `GGUF`.
    Gguf,
    /// The formats of `llama.cpp` before GGUF.
    OldGgml,
    /// A header length and a brace.
    Safetensors,
    /// What a repository holds where Git LFS was not run.
    GitLfsPointer,
    /// A zip: `torch.save` writes one, too.
    Zip,
    /// A Python pickle: an old `torch.save`.
    Pickle,
    /// A web page, often a login or an error page that was saved under the name of a download.
    Html,
    /// HDF5, as Keras writes it.
    Hdf5,
    /// gzip.
    Gzip,
    /// A JSON text.
    Json,
    /// Something else.
    Other,
}

impl Contents {
    /// Bytes of a file that `of` is given.
    pub(crate) const LOOK: usize = 64;

    /// What begins with these bytes: at least 64 of them, or the whole file.
    pub fn of(start: &[u8]) -> Self {
        // Before the rest: the length of a safetensors header may look like the magic of something shorter.
        if let Some(&[a, b, c, d, 0, 0, 0, 0, b'{']) = start.first_chunk::<9>()
            && u32::from_le_bytes([a, b, c, d]) >= 2
        {
            return Contents::Safetensors;
        }
        let text = start.trim_ascii_start().to_ascii_lowercase();
        let magics: [(&[u8], Contents); 9] = [
            (b"GGUF", Contents::Gguf),
            (b"lmgg", Contents::OldGgml),
            (b"fmgg", Contents::OldGgml),
            (b"tjgg", Contents::OldGgml),
            (b"PK\x03\x04", Contents::Zip),
            (b"\x89HDF", Contents::Hdf5),
            (b"\x1f\x8b", Contents::Gzip),
            (b"version https://git-lfs", Contents::GitLfsPointer),
            (b"version https://hawser", Contents::GitLfsPointer),
        ];
        if let Some((_, contents)) = magics.iter().find(|(magic, _)| start.starts_with(magic)) {
            return *contents;
        }
        match (start, text.as_slice()) {
            ([], _) => Contents::Empty,
            // PROTO, then a protocol that exists.
            ([0x80, 2..=5, ..], _) => Contents::Pickle,
            (_, text) if text.starts_with(b"<!doctype") || text.starts_with(b"<html") => Contents::Html,
            (_, [b'{', ..]) => Contents::Json,
            _ => Contents::Other,
        }
    }
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Contents::Empty => "an empty file",
            Contents::Gguf => "a GGUF file (name it .gguf)",
            Contents::OldGgml => "a GGML file from before GGUF (convert the original model again)",
            Contents::Safetensors => "a safetensors file (name it .safetensors)",
            Contents::GitLfsPointer => "a git-LFS pointer, not the file itself: run `git lfs pull`",
            Contents::Zip => "a zip archive (PyTorch's .bin and .pt files are; save the model as safetensors)",
            Contents::Pickle => "a Python pickle (save the model as safetensors)",
            Contents::Html => "an HTML page: a login or error page instead of the download?",
            Contents::Hdf5 => "an HDF5 file (save the model as safetensors)",
            Contents::Gzip => "a gzip file (unpack it first)",
            Contents::Json => "a JSON text",
            Contents::Other => "something else, or damaged",
        })
    }
}
