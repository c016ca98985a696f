//! A text file, in chunks.

use std::io::{self, Read};

use super::cut::{CHUNK_BYTES, cut};

/// Why a text file cannot be read on.
#[derive(Debug)]
pub(super) enum TextError {
    Read(io::Error),
    /// No text at this byte of the file, on this line (from 1).
    NotText {
        line: u64,
        offset: u64,
        reason: &'static str,
    },
}

/// Reads UTF-8 in chunks of at most [`CHUNK_BYTES`], without a byte order mark and with `\n` for `\r\n`.
pub(super) struct TextReader<R> {
    reader: R,
    ended: bool,
    /// Read but not looked at: the start of a character or of `\r\n`, and what is read after it.
    raw: Vec<u8>,
    /// Byte of the file at which `raw` begins, and its line.
    offset: u64,
    raw_line: u64,
    /// Checked text, of which `taken` bytes were handed out.
    text: String,
    taken: usize,
    /// Line of the file at which the text that was not handed out begins.
    line: u64,
}

impl<R: Read> TextReader<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            ended: false,
            raw: Vec::new(),
            offset: 0,
            raw_line: 1,
            text: String::new(),
            taken: 0,
            line: 1,
        }
    }

    /// Bytes of the file looked at.
    pub(super) fn bytes(&self) -> u64 {
        self.offset
    }

    /// The next chunk and the line at which it begins.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &str)>, TextError> {
        self.text.drain(..self.taken);
        // One byte more than a chunk shows whether the chunk is the last.
        while self.text.len() <= CHUNK_BYTES && !self.ended {
            self.read()?;
        }
        self.taken = cut(&self.text);
        let chunk = &self.text[..self.taken];
        let line = self.line;
        self.line += line_feeds(chunk.as_bytes());
        Ok((!chunk.is_empty()).then_some((line, chunk)))
    }

    fn read(&mut self) -> Result<(), TextError> {
        let read = (&mut self.reader)
            .take(CHUNK_BYTES as u64)
            .read_to_end(&mut self.raw)
            .map_err(TextError::Read)?;
        self.ended = read == 0;
        let mut valid = match str::from_utf8(&self.raw) {
            Ok(text) => text,
            // An unfinished character, perhaps finished by what is read next.
            Err(error) if error.error_len().is_none() && !self.ended => valid_part(&self.raw, error.valid_up_to()),
            Err(error) => return Err(self.not_text(error.valid_up_to(), "not UTF-8")),
        };
        if let Some(at) = valid.find('\0') {
            return Err(self.not_text(at, "a NUL, so this is not text,"));
        }
        if !self.ended {
            valid = valid.strip_suffix('\r').unwrap_or(valid);
        }
        let length = valid.len();
        if self.offset == 0 {
            valid = valid.strip_prefix('\u{feff}').unwrap_or(valid);
        }
        self.raw_line += line_feeds(valid.as_bytes());
        let mut lines = valid.split("\r\n");
        self.text.extend(lines.next());
        lines.for_each(|line| self.text.extend(["\n", line]));
        self.offset += length as u64;
        self.raw.drain(..length);
        Ok(())
    }

    fn not_text(&self, at: usize, reason: &'static str) -> TextError {
        TextError::NotText {
            line: self.raw_line + line_feeds(&self.raw[..at]),
            offset: self.offset + at as u64,
            reason,
        }
    }
}

fn valid_part(bytes: &[u8], valid_up_to: usize) -> &str {
    str::from_utf8(&bytes[..valid_up_to]).unwrap_or_default()
}

fn line_feeds(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&byte| byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Hands out `step` bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let step = self.1.min(buffer.len());
            self.0.read(&mut buffer[..step])
        }
    }

    fn read_all(bytes: &[u8]) -> Result<String, (u64, u64)> {
        let mut reader = TextReader::new(Slow(bytes, 1000));
        let mut all = String::new();
        loop {
            match reader.next() {
                Ok(Some((line, chunk))) => {
                    assert!(chunk.len() <= CHUNK_BYTES);
                    assert_eq!(line, 1 + line_feeds(all.as_bytes()));
                    all.push_str(chunk);
                }
                Ok(None) => break,
                Err(TextError::NotText { line, offset, .. }) => return Err((line, offset)),
                Err(TextError::Read(error)) => panic!("{error}"),
            }
        }
        assert_eq!(reader.bytes(), bytes.len() as u64);
        Ok(all)
    }

    #[test]
    fn line_ends_and_the_byte_order_mark() {
        for (bytes, text) in [
            ("\u{feff}a\r\nb\r\r\nc\rd\r", "a\nb\r\nc\rd\r"),
            ("", ""),
            ("\u{feff}", ""),
            ("a\u{feff}\n", "a\u{feff}\n"),
        ] {
            assert_eq!(read_all(bytes.as_bytes()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn what_is_not_text_has_a_place() {
        assert_eq!(read_all(b"one\ntwo\xff"), Err((2, 7)));
        assert_eq!(read_all(b"one\r\n\r\n\0"), Err((3, 7)));
        assert_eq!(read_all(b"\xff\xfeo\0n\0"), Err((1, 0)));
        assert_eq!(read_all("a\n中".as_bytes().split_last().unwrap().1), Err((2, 2)));
        let mut long = "é\r\n".repeat(CHUNK_BYTES).into_bytes();
        long.push(0x80);
        assert_eq!(read_all(&long), Err((CHUNK_BYTES as u64 + 1, 4 * CHUNK_BYTES as u64)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn text_comes_back(unit in "[a-b \r\n中é]{1,20}", times in 1usize..20_000, shift in 0usize..4) {
            let text = "x".repeat(shift) + &unit.repeat(times);
            prop_assert_eq!(read_all(text.as_bytes()).unwrap(), text.replace("\r\n", "\n"));
        }
    }
}
