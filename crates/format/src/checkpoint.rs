//! A checkpoint: its open files and the catalogue of its tensors.

use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata as FileMetadata},
    io::{self, BufReader, Read},
    os::unix::fs::{FileExt, FileTypeExt},
    path::{Path, PathBuf},
};

use crate::{Contents, Encoding, Entry, FormatError, Problem, decode, error::quoted, gguf, index, safetensors};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A checkpoint: its open files and the catalogue of its tensors.
///
/// Reads are positioned (`pread`), so that one checkpoint serves many threads.
#[derive(Debug)]
pub struct Checkpoint {
    /// What was opened, for errors.
    path: PathBuf,
    files: Vec<OpenFile>,
    tensors: BTreeMap<String, Entry>,
    metadata: Option<gguf::Metadata>,
    folder: Option<PathBuf>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Checkpoint {
    /// Opens a checkpoint and reads its headers.
    ///
    /// `path` is a folder (with `model.safetensors`, else `model.safetensors.index.json` and its shards, else a single `.gguf`), an index
    /// (`.json`), a `.safetensors` file or a `.gguf` file. A file of another name is taken for what its first bytes say.
    ///
    /// # Errors
    /// What cannot be opened, is not a regular file, or breaks the rules of its format.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let metadata = fs::metadata(path).map_err(|e| FormatError::io(path, e))?;
        if metadata.is_dir() {
            return Self::open_folder(path);
        }
        match path.extension().and_then(|e| e.to_str()) {
            Some("gguf") => Self::open_gguf(path),
            Some("safetensors") => Self::open_single(path),
            Some("json") => Self::open_index(path),
            _ => {
                let file = OpenFile::open(path)?;
                let mut start = Vec::with_capacity(Contents::LOOK);
                let read = (&file.file).take(Contents::LOOK as u64).read_to_end(&mut start);
                read.map_err(|e| FormatError::io(path, e))?;
                match Contents::of(&start) {
                    Contents::Gguf => Self::open_gguf(path),
                    Contents::Safetensors => Self::open_single(path),
                    contents => Err(FormatError::Mistaken {
                        path: path.to_owned(),
                        expected: "a safetensors or GGUF file",
                        contents,
                    }),
                }
            }
        }
    }

    fn open_folder(path: &Path) -> Result<Self, FormatError> {
        let mut checkpoint = if is_there(&path.join(SINGLE)) {
            Self::open_single(&path.join(SINGLE))?
        } else if is_there(&path.join(INDEX)) {
            Self::open_index(&path.join(INDEX))?
        } else {
            Self::open_gguf(&only_gguf(path)?)?
        };
        checkpoint.path = path.to_owned();
        Ok(checkpoint)
    }

    fn open_gguf(path: &Path) -> Result<Self, FormatError> {
        let file = OpenFile::open(path)?;
        let header = gguf::parse(BufReader::new(&file.file), file.bytes, path)?;
        Ok(Checkpoint {
            path: path.to_owned(),
            files: vec![file],
            tensors: header.tensors,
            metadata: Some(header.metadata),
            folder: None,
        })
    }

    fn open_single(path: &Path) -> Result<Self, FormatError> {
        let file = OpenFile::open(path)?;
        let tensors = safetensors::parse(&file.file, file.bytes, path)?;
        Ok(Checkpoint {
            path: path.to_owned(),
            files: vec![file],
            tensors,
            metadata: None,
            folder: Some(folder_of(path)),
        })
    }

    fn open_index(path: &Path) -> Result<Self, FormatError> {
        let file = OpenFile::open(path)?;
        let mut json = Vec::new();
        (&file.file)
            .take(file.bytes)
            .read_to_end(&mut json)
            .map_err(|e| FormatError::io(path, e))?;
        let contents = Contents::of(&json);
        if contents != Contents::Json {
            return Err(FormatError::Mistaken {
                path: path.to_owned(),
                expected: "an index of shards",
                contents,
            });
        }
        let index = index::parse(&json, path)?;
        drop(json);

        let folder = folder_of(path);
        let mut files: Vec<OpenFile> = Vec::new();
        let mut tensors: BTreeMap<String, Entry> = BTreeMap::new();
        for (number, shard) in index.shards.iter().enumerate() {
            let shard_path = folder.join(shard);
            let file = match OpenFile::open(&shard_path) {
                Err(FormatError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    return Err(FormatError::corrupt(path, "index", Problem::NoShard(quoted(shard))));
                }
                opened => opened?,
            };
            for (name, mut entry) in safetensors::parse(&file.file, file.bytes, &shard_path)? {
                entry.file = number as u32;
                if let Some(first) = tensors.get(&name) {
                    let problem = Problem::TwoShards(quoted(&index.shards[first.file as usize]), quoted(shard));
                    return Err(FormatError::corrupt(path, format!("tensor {}", quoted(&name)), problem));
                }
                tensors.insert(name, entry);
            }
            files.push(file);
        }
        for (name, &shard) in &index.tensors {
            if tensors.get(name).is_none_or(|entry| entry.file as usize != shard) {
                let problem = Problem::NotInShard {
                    listed: quoted(&index.shards[shard]),
                };
                return Err(FormatError::corrupt(path, format!("tensor {}", quoted(name)), problem));
            }
        }
        Ok(Checkpoint {
            path: path.to_owned(),
            files,
            tensors,
            metadata: None,
            folder: Some(folder),
        })
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors by name, of whatever encoding.
    pub fn tensors(&self) -> &BTreeMap<String, Entry> {
        &self.tensors
    }

    /// The metadata of a GGUF file; `None` for safetensors.
    pub fn metadata(&self) -> Option<&gguf::Metadata> {
        self.metadata.as_ref()
    }

    /// The folder that has `config.json` and the tokenizer beside the safetensors files; `None` for GGUF, which has them inside.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The files that hold tensors, and their sizes in bytes when they were opened.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.files.iter().map(|f| (f.path.as_path(), f.bytes))
    }

    /// The tensor `name`, which must be there.
    ///
    /// # Errors
    /// [`FormatError::NoTensor`].
    pub fn tensor(&self, name: &str) -> Result<&Entry, FormatError> {
        self.tensors.get(name).ok_or_else(|| self.no_tensor(name))
    }

    /// The tensor `name`, which must be there and be of floats.
    ///
    /// # Errors
    /// [`FormatError::NoTensor`]; [`FormatError::NotFloats`] for an encoding that does not decode.
    pub fn floats(&self, name: &str) -> Result<&Entry, FormatError> {
        let entry = self.tensor(name)?;
        self.check_floats(entry)?;
        Ok(entry)
    }

    /// Reads `out.len()` bytes of a tensor from its byte `offset`. Allocates nothing unless it fails.
    ///
    /// # Errors
    /// [`FormatError::CutShort`] if the file has become shorter; [`FormatError::Range`] for bytes that the tensor does not have.
    pub fn read(&self, entry: &Entry, offset: u64, out: &mut [u8]) -> Result<(), FormatError> {
        let len = out.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > entry.bytes) {
            return Err(FormatError::Range {
                tensor: entry.name.clone(),
                offset,
                len,
                bytes: entry.bytes,
            });
        }
        let file = self.file(entry)?;
        let start = entry.offset + offset;
        file.file.read_exact_at(out, start).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => FormatError::CutShort {
                path: file.path.clone(),
                tensor: entry.name.clone(),
                offset: start,
                end: start + len,
            },
            _ => FormatError::io(&file.path, error),
        })
    }

    /// Reads the `out.len()` elements of a tensor from element `first`, as floats, through `staging`: a buffer for encoded bytes, of any
    /// size from one block. Allocates nothing unless it fails. A tensor of a quantised format of our own is read whole each time, and
    /// `staging` must hold its [`bytes`](Entry::bytes).
    ///
    /// # Errors
    /// As [`read`](Checkpoint::read) and [`decode`](crate::decode()); `first` and `out.len()` must be whole blocks, and so
    /// must `staging` have room for one.
    pub fn read_f32(&self, entry: &Entry, first: u64, staging: &mut [u8], out: &mut [f32]) -> Result<(), FormatError> {
        let encoding = entry.encoding;
        if let Encoding::Block(block) = encoding
            && block.encodes()
        {
            let [elements, cols] = [entry.elements() as usize, entry.row_elements() as usize];
            let whole = staging.get_mut(..entry.bytes as usize);
            let (Some(whole), Some(true)) = (
                whole,
                first.checked_add(out.len() as u64).map(|end| end <= elements as u64),
            ) else {
                return Err(FormatError::Blocks {
                    encoding,
                    bytes: staging.len(),
                    elements: out.len(),
                });
            };
            self.read(entry, 0, whole)?;
            block.decode(whole, elements / cols.max(1), cols, first as usize, out);
            return Ok(());
        }
        self.check_floats(entry)?;
        let (block_bytes, block_elements) = (encoding.block_bytes(), encoding.block_elements());
        let blocks = staging.len() / block_bytes as usize;
        let whole = first.is_multiple_of(block_elements) && (out.len() as u64).is_multiple_of(block_elements);
        if !whole || (blocks == 0 && !out.is_empty()) {
            return Err(FormatError::Blocks {
                encoding,
                bytes: staging.len(),
                elements: out.len(),
            });
        }
        let mut offset = (first / block_elements).saturating_mul(block_bytes);
        for out in out.chunks_mut((blocks * block_elements as usize).max(1)) {
            let bytes = out.len() / block_elements as usize * block_bytes as usize;
            self.read(entry, offset, &mut staging[..bytes])?;
            decode(encoding, &staging[..bytes], out)?;
            offset += bytes as u64;
        }
        Ok(())
    }

    fn check_floats(&self, entry: &Entry) -> Result<(), FormatError> {
        if entry.encoding.decodes() {
            return Ok(());
        }
        Err(FormatError::NotFloats {
            path: self.file(entry)?.path.clone(),
            tensor: entry.name.clone(),
            encoding: entry.encoding,
        })
    }

    /// The file of an entry. An entry of another checkpoint may name one that is not here.
    fn file(&self, entry: &Entry) -> Result<&OpenFile, FormatError> {
        self.files
            .get(entry.file as usize)
            .ok_or_else(|| self.no_tensor(&entry.name))
    }

    fn no_tensor(&self, name: &str) -> FormatError {
        FormatError::NoTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
        }
    }
}

impl OpenFile {
    /// Opens a regular file. What it is gets asked first: opening a FIFO would wait for someone to write to it.
    fn open(path: &Path) -> Result<Self, FormatError> {
        let io = |e| FormatError::io(path, e);
        check_regular(path, &fs::metadata(path).map_err(io)?)?;
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        check_regular(path, &metadata)?;
        Ok(OpenFile {
            path: path.to_owned(),
            file,
            bytes: metadata.len(),
        })
    }
}

fn check_regular(path: &Path, metadata: &FileMetadata) -> Result<(), FormatError> {
    let Some(kind) = irregular(metadata) else {
        return Ok(());
    };
    Err(FormatError::NotAFile {
        path: path.to_owned(),
        kind,
    })
}

/// What a file is that is no regular file, in words; `None` for a regular one.
pub fn irregular(metadata: &FileMetadata) -> Option<&'static str> {
    let ty = metadata.file_type();
    match () {
        () if ty.is_file() => None,
        () if ty.is_dir() => Some("a directory"),
        () if ty.is_fifo() => Some("a FIFO"),
        () if ty.is_socket() => Some("a socket"),
        () => Some("a device"),
    }
}

/// Whether a folder lists it: also a link to nothing, which is better reported than passed over.
fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// The folder that a file is in.
fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// The single `.gguf` of a folder without safetensors files, or what is wrong.
fn only_gguf(folder: &Path) -> Result<PathBuf, FormatError> {
    let io = |e| FormatError::io(folder, e);
    let mut found = Vec::new();
    let mut pickled = None;
    for item in fs::read_dir(folder).map_err(io)? {
        let path = item.map_err(io)?.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("gguf") => found.push(path),
            Some("bin" | "pt" | "pth") => pickled = Some(path),
            _ => {}
        }
    }
    found.sort();
    let name = |path: &Path| quoted(&path.file_name().unwrap_or_default().to_string_lossy());
    let problem = match (found.as_slice(), pickled) {
        ([_], _) => return Ok(found.remove(0)),
        ([first, .., last], _) => {
            format!(
                "has {} GGUF files, {} to {}: name one of them",
                found.len(),
                name(first),
                name(last)
            )
        }
        ([], Some(pickled)) => {
            format!(
                "has no `{SINGLE}`; {} is a pickle, which is not read: save the model as safetensors",
                name(&pickled)
            )
        }
        ([], None) => format!("has no `{SINGLE}`, no `{INDEX}` and no .gguf file"),
    };
    Err(FormatError::Folder {
        path: folder.to_owned(),
        problem,
    })
}
