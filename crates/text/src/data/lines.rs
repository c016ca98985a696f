//! The lines of a file, none of them longer than memory allows.

use std::io::{self, BufRead, Read};

/// A line with more bytes than this is a bad one.
pub const MAX_LINE_BYTES: usize = 16 << 20;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// What [`LineReader::next`] found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    /// A line without its line feed.
    Bytes(&'a [u8]),
    /// A line of more than [`MAX_LINE_BYTES`], passed over.
    TooLong,
}

/// Reads lines into one buffer.
pub(super) struct LineReader<R> {
    reader: R,
    line: Vec<u8>,
    number: u64,
    bytes: u64,
}

impl<R: BufRead> LineReader<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            line: Vec::new(),
            number: 0,
            bytes: 0,
        }
    }

    /// Bytes of the file read.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next line and its number, from 1. The first is without a byte order mark.
    pub(super) fn next(&mut self) -> io::Result<Option<(u64, Line<'_>)>> {
        self.line.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        let read = (&mut self.reader).take(limit).read_until(b'\n', &mut self.line)?;
        if read == 0 {
            return Ok(None);
        }
        self.bytes += read as u64;
        self.number += 1;
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
        } else if self.line.len() > MAX_LINE_BYTES {
            self.bytes += self.reader.skip_until(b'\n')? as u64;
            return Ok(Some((self.number, Line::TooLong)));
        }
        let line = match self.line.strip_prefix(BYTE_ORDER_MARK) {
            Some(rest) if self.number == 1 => rest,
            _ => &self.line,
        };
        Ok(Some((self.number, Line::Bytes(line))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_numbers_and_a_limit() {
        let mut file = b"\xef\xbb\xbfone\n\n".to_vec();
        file.extend(vec![b'x'; MAX_LINE_BYTES]);
        file.push(b'\n');
        file.extend(vec![b'y'; 3 * MAX_LINE_BYTES]);
        file.extend(b"\nlast");
        let mut lines = LineReader::new(&file[..]);
        assert_eq!(lines.next().unwrap(), Some((1, Line::Bytes(b"one"))));
        assert_eq!(lines.next().unwrap(), Some((2, Line::Bytes(b""))));
        assert_eq!(
            lines.next().unwrap(),
            Some((3, Line::Bytes(&vec![b'x'; MAX_LINE_BYTES])))
        );
        assert_eq!(lines.next().unwrap(), Some((4, Line::TooLong)));
        assert!(lines.line.capacity() <= 2 * MAX_LINE_BYTES);
        assert_eq!(lines.next().unwrap(), Some((5, Line::Bytes(b"last"))));
        assert_eq!(lines.next().unwrap(), None);
        assert_eq!(lines.bytes(), file.len() as u64);
    }
}
