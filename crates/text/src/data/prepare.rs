//! Reads data files, encodes, cuts, packs and writes.

use std::{
    io::{self, BufReader},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::chat::Message;

use super::{
    encoder::Encoder,
    entry::MAX_VOCAB_SIZE,
    error::DataError,
    files::{DataFile, Kind, Place},
    json::{self, BadLine, Sample},
    lines::{Line, LineReader, MAX_LINE_BYTES},
    options::{Counts, Long, Options, Prepared, Progress, TokenFiles},
    pieces::{Cutter, Piece},
    split::RowSets,
    text::TextReader,
};

/// Malformed lines whose faults are kept for the report.
const KEPT_BAD_LINES: usize = 5;

/// Bytes read between two reports of progress.
const PROGRESS_BYTES: u64 = 256 << 10;

/// Turns data files into token files; see [the module](super) for what the files may hold.
///
/// Reads and writes through buffers of a fixed size: memory does not depend on the size of the files, only on that of a row
/// and of the longest line of JSON, which is at most [`MAX_LINE_BYTES`]. The same files, options and tokenizer give the same
/// rows. `progress` is called now and then, and `stop` is looked at for each line and chunk.
///
/// # Errors
/// [`DataError`], naming the file and line at fault. The token files then hold nothing of use.
pub fn prepare(
    files: &[PathBuf],
    encoder: &dyn Encoder,
    options: &Options,
    out: TokenFiles<'_>,
    progress: &mut dyn FnMut(Progress),
    stop: &AtomicBool,
) -> Result<Prepared, DataError> {
    check(options)?;
    let files = files
        .iter()
        .map(|path| DataFile::open(path))
        .collect::<Result<Vec<_>, _>>()?;
    let mut preparation = Preparation {
        encoder,
        options,
        cutter: Cutter::new(options.seq, options.stride.unwrap_or(options.seq)),
        rows: RowSets::new(options, out).map_err(write_error)?,
        counts: Counts::default(),
        progress: Reporter {
            progress,
            stop,
            total_bytes: files.iter().map(|file| file.bytes).sum(),
            bytes_before: 0,
            reported: 0,
        },
    };
    for file in files {
        preparation.progress.bytes_before += match file.kind {
            Kind::Text => preparation.text_file(&file)?,
            Kind::Lines => preparation.lines_file(&file)?,
        };
    }
    preparation.finish()
}

fn check(options: &Options) -> Result<(), DataError> {
    let fail = |name, reason: &str| {
        Err(DataError::Option {
            name,
            reason: reason.to_owned(),
        })
    };
    let seq = options.seq;
    if seq == 0 || seq >= i32::MAX as usize {
        return fail("seq", "it is at least 1 and below 2147483647");
    }
    if !(1..=MAX_VOCAB_SIZE).contains(&options.vocab_size) {
        return fail("vocab_size", "it is at least 1 and at most 2^29");
    }
    if options.stride.is_some_and(|stride| !(1..=seq).contains(&stride)) {
        return fail("stride", "it is at least 1 and at most seq");
    }
    if !(0.0..1.0).contains(&options.eval_fraction) {
        return fail("eval_fraction", "it is at least 0 and below 1");
    }
    Ok(())
}

/// How the sample at hand is cut and held out.
#[derive(Clone, Copy)]
struct Sink {
    long: Long,
    /// Whether each piece, or the sample as a whole, is held out or not.
    by_piece: bool,
}

/// Why a line's sample is not in the rows.
enum Fault {
    Bad(BadLine),
    Fatal(DataError),
}

impl From<DataError> for Fault {
    fn from(error: DataError) -> Self {
        Self::Fatal(error)
    }
}

impl From<BadLine> for Fault {
    fn from(bad: BadLine) -> Self {
        Self::Bad(bad)
    }
}

struct Preparation<'a> {
    encoder: &'a dyn Encoder,
    options: &'a Options,
    cutter: Cutter,
    rows: RowSets<'a>,
    counts: Counts,
    progress: Reporter<'a>,
}

impl Preparation<'_> {
    /// Reads a text file as one document; returns its bytes.
    fn text_file(&mut self, file: &DataFile<'_>) -> Result<u64, DataError> {
        let sink = Sink {
            long: Long::Split,
            by_piece: true,
        };
        let mut reader = TextReader::new(file.file()?);
        let mut place = file.at(1);
        let mut begin = true;
        while let Some((line, chunk)) = reader.next().map_err(|error| file.text_error(error))? {
            place.line = line;
            self.encode(chunk, begin, true, place, sink)?;
            begin = false;
            self.progress.at(reader.bytes(), self.tokens())?;
        }
        if !begin {
            self.end_of_document(place, sink)?;
            self.end_of_sample(sink)?;
        }
        file.end(reader.bytes())
    }

    /// Reads a file of JSON lines; returns its bytes.
    fn lines_file(&mut self, file: &DataFile<'_>) -> Result<u64, DataError> {
        let mut reader = LineReader::new(BufReader::new(file.file()?));
        while let Some((number, line)) = reader.next().map_err(|error| file.read_error(error))? {
            let place = file.at(number);
            let result = match line {
                Line::Bytes(line) if line.trim_ascii().is_empty() => Ok(()),
                Line::Bytes(line) => json::parse(line)
                    .map_err(Fault::Bad)
                    .and_then(|sample| self.sample(sample, place)),
                Line::TooLong => Err(BadLine::new(format!("longer than {} MiB", MAX_LINE_BYTES >> 20)).into()),
            };
            match result {
                Ok(()) => {}
                Err(Fault::Bad(bad)) => self.bad_line(bad, place)?,
                Err(Fault::Fatal(error)) => return Err(error),
            }
            self.progress.at(reader.bytes(), self.tokens())?;
        }
        file.end(reader.bytes())
    }

    /// Encodes a line's sample. What makes a sample bad is found out before a piece of it is in a row.
    fn sample(&mut self, sample: Sample, place: Place<'_>) -> Result<(), Fault> {
        let sink = Sink {
            long: self.options.long,
            by_piece: false,
        };
        match sample {
            Sample::Text(text) => {
                not_empty("text", &text)?;
                self.encode(&text, true, true, place, sink)?;
                self.end_of_document(place, sink)?;
            }
            Sample::Completion { prompt, completion } => {
                not_empty("completion", &completion)?;
                self.completion(&prompt, &completion, place, sink)?;
            }
            Sample::Instruction {
                instruction,
                input,
                output,
            } => {
                not_empty("output", &output)?;
                let request = match input.is_empty() {
                    true => instruction,
                    false => format!("{instruction}\n\n{input}"),
                };
                let message = |role: &str, content: &str| Message {
                    role: role.to_owned(),
                    content: content.to_owned(),
                };
                let messages = [message("user", &request), message("assistant", &output)];
                if !self.conversation(&messages, place, sink)? {
                    self.completion(&format!("{request}\n\n"), &output, place, sink)?;
                }
            }
            Sample::Messages(messages) => {
                if !self.conversation(&messages, place, sink)? {
                    return Err(BadLine::new("`messages` need a chat template, and the tokenizer has none").into());
                }
            }
        }
        match self.end_of_sample(sink)? {
            0 => Err(BadLine::new("no token to learn: it takes one token and one before it").into()),
            _ => Ok(()),
        }
    }

    fn completion(&mut self, prompt: &str, completion: &str, place: Place<'_>, sink: Sink) -> Result<(), DataError> {
        self.encode(prompt, true, false, place, sink)?;
        self.encode(completion, false, true, place, sink)?;
        self.end_of_sequence(place, sink)
    }

    /// Encodes messages as the chat template renders them; false where there is none.
    fn conversation(&mut self, messages: &[Message], place: Place<'_>, sink: Sink) -> Result<bool, Fault> {
        let segments = self.encoder.chat(messages);
        let segments = segments.map_err(|error| BadLine::new(error.to_string()))?;
        let Some(segments) = segments else {
            return Ok(false);
        };
        if segments
            .iter()
            .all(|segment| !segment.answer || segment.text.is_empty())
        {
            return Err(BadLine::new("nothing to learn: the messages have no answer by the assistant").into());
        }
        for segment in segments.iter().filter(|segment| !segment.text.is_empty()) {
            self.encode(&segment.text, false, segment.answer, place, sink)?;
        }
        Ok(true)
    }

    /// Encodes text that counts or does not, and goes on where the sample's text has ended.
    fn encode(&mut self, text: &str, begin: bool, counts: bool, place: Place<'_>, sink: Sink) -> Result<(), DataError> {
        let encoder = self.encoder;
        let mut pushed = Ok(());
        let mut push = |tokens: &[u32]| {
            if pushed.is_ok() {
                pushed = tokens
                    .iter()
                    .try_for_each(|&token| self.push(token, counts, place, sink));
            }
        };
        let encoded = encoder.encode(text, begin, &mut push);
        pushed?;
        encoded.map_err(|source| place.encode_error(source))
    }

    fn push(&mut self, token: u32, counts: bool, place: Place<'_>, sink: Sink) -> Result<(), DataError> {
        if token as usize >= self.options.vocab_size {
            return Err(DataError::Token {
                path: place.path.to_owned(),
                line: place.line,
                token,
                vocab_size: self.options.vocab_size,
            });
        }
        let rows = &mut self.rows;
        let mut emit = |piece: Piece<'_>| rows.add(piece, sink.by_piece);
        self.cutter
            .push(token, counts, sink.long, &mut emit)
            .map_err(write_error)
    }

    fn end_of_document(&mut self, place: Place<'_>, sink: Sink) -> Result<(), DataError> {
        if self.options.end_documents {
            self.end_of_sequence(place, sink)?;
        }
        Ok(())
    }

    /// Ends a sample's text, if the tokenizer has a token for it and the text does not end with it.
    fn end_of_sequence(&mut self, place: Place<'_>, sink: Sink) -> Result<(), DataError> {
        match self.encoder.eos() {
            Some(eos) if self.cutter.last() != Some(eos) => self.push(eos, true, place, sink),
            _ => Ok(()),
        }
    }

    /// Ends a sample and returns the targets it has; one without any is not counted.
    fn end_of_sample(&mut self, sink: Sink) -> Result<u64, DataError> {
        let rows = &mut self.rows;
        let mut emit = |piece: Piece<'_>| rows.add(piece, sink.by_piece);
        let cut = self.cutter.finish(&mut emit).map_err(write_error)?;
        let kept = self.rows.next_sample();
        if cut.targets > 0 {
            self.counts.samples += 1;
            self.counts.tokens += cut.tokens;
            self.counts.pieces += kept;
            self.counts.uncounted_pieces += cut.pieces - kept;
            self.counts.split += u64::from(cut.pieces > 1 && !sink.by_piece);
            self.counts.dropped += u64::from(cut.dropped);
        }
        Ok(cut.targets)
    }

    fn bad_line(&mut self, bad: BadLine, place: Place<'_>) -> Result<(), DataError> {
        let error = DataError::Line {
            path: place.path.to_owned(),
            line: place.line,
            column: bad.column,
            reason: bad.reason,
        };
        if !self.options.skip_bad_lines {
            return Err(error);
        }
        self.counts.bad_lines += 1;
        if self.counts.first_bad.len() < KEPT_BAD_LINES {
            self.counts.first_bad.push(error.to_string());
        }
        Ok(())
    }

    fn tokens(&self) -> u64 {
        self.counts.tokens + self.cutter.tokens()
    }

    fn finish(mut self) -> Result<Prepared, DataError> {
        let rows = self.rows.finish().map_err(write_error)?;
        if rows.train == 0 {
            return Err(no_rows(&self.counts, self.options));
        }
        self.counts.targets = rows.targets;
        self.counts.padding = rows.padding;
        Ok(Prepared {
            train_rows: rows.train,
            eval_rows: rows.eval,
            counts: self.counts,
            fingerprint: rows.fingerprint,
        })
    }
}

fn not_empty(key: &str, text: &str) -> Result<(), BadLine> {
    match text.is_empty() {
        true => Err(BadLine::new(format!("nothing to learn: `{key}` is empty"))),
        false => Ok(()),
    }
}

fn write_error(source: io::Error) -> DataError {
    DataError::Write { source }
}

fn no_rows(counts: &Counts, options: &Options) -> DataError {
    let reason = match (counts.dropped, counts.first_bad.first()) {
        (0, None) => "the files hold no text".to_owned(),
        (0, Some(first)) => format!("all {} lines are malformed, the first: {first}", counts.bad_lines),
        (dropped, _) => format!(
            "all {dropped} samples are longer than a row of {} tokens; make rows longer or split long samples",
            options.seq
        ),
    };
    DataError::NoRows { reason }
}

/// Calls the caller back, but not for every line.
struct Reporter<'a> {
    progress: &'a mut dyn FnMut(Progress),
    stop: &'a AtomicBool,
    total_bytes: u64,
    /// Bytes of the files that are done.
    bytes_before: u64,
    reported: u64,
}

impl Reporter<'_> {
    fn at(&mut self, bytes_of_file: u64, tokens: u64) -> Result<(), DataError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(DataError::Stopped);
        }
        let bytes = self.bytes_before + bytes_of_file;
        if bytes - self.reported >= PROGRESS_BYTES || bytes == self.total_bytes {
            self.reported = bytes;
            (self.progress)(Progress {
                bytes,
                total_bytes: self.total_bytes,
                tokens,
            });
        }
        Ok(())
    }
}
