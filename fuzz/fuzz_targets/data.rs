//! Data files, prepared and read back. The first two bytes choose the kind of file and the options.

#![no_main]

use std::sync::{OnceLock, atomic::AtomicBool};

use libfuzzer_sys::fuzz_target;
use tightfit_fuzz::{batches::read_all, check, files::Scratch, init, says};
use tightfit_text::{
    Message, Segment,
    data::{EncodeError, Encoder, Long, Options, Rows, TokenFiles, prepare},
};

struct Files {
    lines: Scratch,
    text: Scratch,
    train: Scratch,
    eval: Scratch,
}

static FILES: OnceLock<Files> = OnceLock::new();

fn files() -> &'static Files {
    let scratch = |name| Scratch::new(name).expect("a folder for files");
    FILES.get_or_init(|| Files {
        lines: scratch("a.jsonl"),
        text: scratch("a.txt"),
        train: scratch("train"),
        eval: scratch("eval"),
    })
}

fuzz_target!(init: init(), |input: &[u8]| {
    if let Some((&[switches, sizes], file)) = input.split_first_chunk::<2>() {
        let files = files();
        let source = if switches & 1 == 0 { &files.lines } else { &files.text };
        source.write(file).expect("a file to write");
        check(file, || read(files, source, switches, sizes));
    }
});

fn read(files: &Files, source: &Scratch, switches: u8, sizes: u8) {
    let on = |bit: u8| switches & (1 << bit) != 0;
    let seq = 1 + usize::from(sizes & 15);
    let encoder = Bytes {
        begin: on(1),
        chat: on(2),
        eos: on(3),
    };
    let options = Options {
        seq,
        vocab_size: VOCAB_SIZE,
        long: if on(4) { Long::Drop } else { Long::Split },
        stride: on(5).then(|| 1 + usize::from(sizes >> 4) % seq),
        skip_bad_lines: on(6),
        eval_fraction: if on(7) { 0.3 } else { 0.0 },
        end_documents: true,
        seed: sizes.into(),
    };
    let out = TokenFiles {
        train: &files.train.file,
        eval: &files.eval.file,
    };
    let stop = AtomicBool::new(false);
    let prepared = match prepare(
        std::slice::from_ref(&source.path),
        &encoder,
        &options,
        out,
        &mut |_| {},
        &stop,
    ) {
        Ok(prepared) => prepared,
        Err(error) => return says(error),
    };
    let mut targets = 0;
    for (scratch, rows) in [(&files.train, prepared.train_rows), (&files.eval, prepared.eval_rows)] {
        let file = scratch.file.try_clone().expect("another handle");
        let read = Rows::open(file, &scratch.path).expect("what is written can be read");
        assert_eq!(read.rows(), rows);
        if rows > 0 {
            targets += read_all(read, VOCAB_SIZE, 1 + usize::from(sizes & 3)).expect("what is written can be read");
        }
    }
    assert_eq!(targets, prepared.counts.targets);
}

const BOS: u32 = 256;
const EOS: u32 = 257;
const VOCAB_SIZE: usize = 258;

/// A token per byte; conversations as roles and contents.
struct Bytes {
    begin: bool,
    chat: bool,
    eos: bool,
}

impl Encoder for Bytes {
    fn encode(&self, text: &str, begin: bool, push: &mut dyn FnMut(&[u32])) -> Result<(), EncodeError> {
        if text.contains("refuse") {
            return Err("a text that it refuses".into());
        }
        if begin && self.begin {
            push(&[BOS]);
        }
        text.bytes().for_each(|byte| push(&[byte.into()]));
        Ok(())
    }

    fn chat(&self, messages: &[Message]) -> Result<Option<Vec<Segment>>, EncodeError> {
        let segments = messages.iter().flat_map(|message| {
            let answer = message.role == "assistant";
            [(&message.role, false), (&message.content, answer)].map(|(text, answer)| Segment {
                text: text.clone(),
                answer,
            })
        });
        Ok(self.chat.then(|| segments.collect()))
    }

    fn eos(&self) -> Option<u32> {
        self.eos.then_some(EOS)
    }
}
