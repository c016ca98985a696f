//! Encoders that a test can read, and files to try them on.

use std::{
    fs::{self, File, OpenOptions},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use tightfit_text::{
    Message, Segment,
    data::{
        BatchBuffers, Batches, DataError, EncodeError, Encoder, Long, Options, Prepared, Rows, TokenFiles, prepare,
    },
};

pub const BOS: u32 = 256;
/// The byte ETX, so that text can hold it.
pub const EOS: u32 = 3;
pub const VOCAB_SIZE: usize = 257;

/// One token per byte, [`BOS`] first; conversations as `role:content␃`.
pub struct Bytes {
    pub chat: bool,
}

impl Encoder for Bytes {
    fn encode(&self, text: &str, begin: bool, push: &mut dyn FnMut(&[u32])) -> Result<(), EncodeError> {
        if text.contains('☠') {
            return Err("tokenizer: a poisoned text".into());
        }
        if begin {
            push(&[BOS]);
        }
        text.bytes().for_each(|byte| push(&[u32::from(byte)]));
        Ok(())
    }

    fn chat(&self, messages: &[Message]) -> Result<Option<Vec<Segment>>, EncodeError> {
        if messages.iter().any(|message| message.role == "tool") {
            return Err("chat template: no tools, please".into());
        }
        let segments = messages.iter().flat_map(|message| {
            [
                Segment {
                    text: format!("{}:", message.role),
                    answer: false,
                },
                Segment {
                    text: format!("{}\u{3}", message.content),
                    answer: message.role == "assistant",
                },
            ]
        });
        Ok(self.chat.then(|| segments.collect()))
    }

    fn eos(&self) -> Option<u32> {
        Some(EOS)
    }
}

/// One token per number; the text is numbers with blanks around them.
pub struct Numbers {
    pub eos: Option<u32>,
}

impl Encoder for Numbers {
    fn encode(&self, text: &str, _: bool, push: &mut dyn FnMut(&[u32])) -> Result<(), EncodeError> {
        let tokens: Result<Vec<u32>, _> = text.split_ascii_whitespace().map(str::parse).collect();
        push(&tokens?);
        Ok(())
    }

    fn chat(&self, _: &[Message]) -> Result<Option<Vec<Segment>>, EncodeError> {
        Ok(None)
    }

    fn eos(&self) -> Option<u32> {
        self.eos
    }
}

pub fn options(seq: usize) -> Options {
    Options {
        seq,
        vocab_size: VOCAB_SIZE,
        long: Long::Split,
        stride: None,
        skip_bad_lines: false,
        eval_fraction: 0.0,
        end_documents: true,
        seed: 0,
    }
}

/// A folder that goes away.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!(
            "tightfit-data-{}-{}",
            std::process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// An empty file, open for reading and writing.
    pub fn create(&self, name: &str) -> File {
        let mut open = OpenOptions::new();
        open.read(true).write(true).create(true).truncate(true);
        open.open(self.0.join(name)).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What was prepared, and the rows.
pub struct Done {
    pub prepared: Prepared,
    pub train: Rows,
    pub eval: Rows,
}

pub fn run(encoder: &dyn Encoder, options: &Options, files: &[PathBuf]) -> Result<Done, DataError> {
    let folder = Folder::new();
    let (train, eval) = (folder.create("train"), folder.create("eval"));
    let out = TokenFiles {
        train: &train,
        eval: &eval,
    };
    let prepared = prepare(files, encoder, options, out, &mut |_| {}, &AtomicBool::new(false))?;
    Ok(Done {
        prepared,
        train: Rows::open(train, Path::new("train")).unwrap(),
        eval: Rows::open(eval, Path::new("eval")).unwrap(),
    })
}

/// Prepares one file of this name.
pub fn run_on(
    encoder: &dyn Encoder,
    options: &Options,
    name: &str,
    bytes: impl AsRef<[u8]>,
) -> Result<Done, DataError> {
    let folder = Folder::new();
    run(encoder, options, &[folder.write(name, bytes)])
}

/// Owned buffers of a micro-batch.
pub struct Batch {
    pub tokens: Vec<i32>,
    pub targets: Vec<i32>,
    pub positions: Vec<i32>,
    pub doc_start: Vec<i32>,
}

impl Batch {
    pub fn new(tokens: usize) -> Self {
        // No value that a batch could have.
        let filled = || vec![i32::MIN; tokens];
        Self {
            tokens: filled(),
            targets: filled(),
            positions: filled(),
            doc_start: filled(),
        }
    }

    pub fn buffers(&mut self) -> BatchBuffers<'_> {
        BatchBuffers {
            tokens: &mut self.tokens,
            targets: &mut self.targets,
            positions: &mut self.positions,
            doc_start: &mut self.doc_start,
        }
    }
}

pub fn fill(batches: &Batches, index: u64) -> Batch {
    let mut batch = Batch::new(batches.token_count());
    let counted = batches.fill(index, &mut batch.buffers()).unwrap();
    assert_eq!(counted, batches.counted(index).unwrap());
    assert_eq!(counted, batch.targets.iter().filter(|&&target| target >= 0).count());
    batch
}

/// All rows of a file, one after the other, none if it has none.
pub fn all_rows(rows: Rows) -> Vec<Batch> {
    if rows.rows() == 0 {
        return Vec::new();
    }
    let batches = Batches::in_order(rows, 1).unwrap();
    (0..batches.per_epoch()).map(|index| fill(&batches, index)).collect()
}

/// The documents of rows of bytes, one per line: what is learned in brackets, [`BOS`] as `^`, [`EOS`] as `$`.
pub fn show(rows: &[Batch]) -> String {
    let mut shown = String::new();
    for row in rows {
        for t in 0..row.tokens.len() {
            let starts = row.positions[t] == 0;
            let learned = t > 0 && row.targets[t - 1] >= 0;
            assert!(!(starts && learned));
            let padding = starts && row.tokens[t] == 0;
            if starts && !padding && !shown.is_empty() {
                shown.push('\n');
            }
            if !padding {
                push_token(&mut shown, row.tokens[t], learned);
            }
        }
        if let Some(&target @ 0..) = row.targets.last() {
            push_token(&mut shown, target, true);
        }
    }
    shown.replace("][", "")
}

fn push_token(shown: &mut String, token: i32, learned: bool) {
    let shown_as = match token as u32 {
        BOS => '^',
        EOS => '$',
        byte => char::from(byte as u8),
    };
    match learned {
        true => shown.extend(['[', shown_as, ']']),
        false => shown.push(shown_as),
    }
}
