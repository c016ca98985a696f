//! Where a long text file may be cut without changing its tokens.
//!
//! A text file goes through the tokenizer in chunks. The pre-tokenizers of byte-level tokenizers never join a letter to the line
//! feed before it, nor a blank between words to the word before it: cut there, the chunks have the tokens of the whole. Tokenizers
//! without words (SentencePiece) may make one other token at a cut. Text that offers no such place for half a chunk is cut where
//! it must be.

/// Bytes of a text file that are handed to the tokenizer at a time.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// Where to cut the first chunk off: behind all of `text`, if that is no more than [`CHUNK_BYTES`], or at the last good place.
pub(super) fn cut(text: &str) -> usize {
    if text.len() <= CHUNK_BYTES {
        return text.len();
    }
    let end = boundary(text, CHUNK_BYTES);
    let start = boundary(text, CHUNK_BYTES / 2);
    let last = |good: fn(&str, &str) -> bool| {
        let mut places = text[start..end].char_indices().rev().map(|(i, _)| start + i);
        places.find(|&place| good(&text[..place], &text[place..]))
    };
    last(between_lines).or_else(|| last(between_words)).unwrap_or(end)
}

/// The last character boundary that is not behind `at`.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// After the only line feed between a line and one that begins with a letter.
fn between_lines(before: &str, after: &str) -> bool {
    after.starts_with(char::is_alphabetic)
        && before
            .strip_suffix('\n')
            .is_some_and(|line| !line.ends_with(char::is_whitespace))
}

/// Before the only blank between two words.
fn between_words(before: &str, after: &str) -> bool {
    before.ends_with(char::is_alphabetic)
        && after
            .strip_prefix(' ')
            .is_some_and(|word| word.starts_with(char::is_alphabetic))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The chunks of text in which `unit` is repeated, checked to be whole and bounded.
    fn chunks_of(unit: &str) -> Vec<String> {
        let text = unit.repeat(3 * CHUNK_BYTES / unit.len());
        let (mut rest, mut chunks) = (&*text, Vec::new());
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(cut(rest));
            assert!((1..=CHUNK_BYTES).contains(&chunk.len()));
            chunks.push(chunk.to_owned());
            rest = after;
        }
        assert_eq!(chunks.concat(), text);
        chunks
    }

    #[test]
    fn lines_then_words_then_characters() {
        let lines = chunks_of("one two\nthree  four\n\n 5\n");
        assert!(
            lines[..2]
                .iter()
                .all(|chunk| chunk.ends_with("one two\n") || chunk.ends_with(" 5\n"))
        );
        let words = chunks_of("one two  3 ");
        assert!(words[..2].iter().all(|chunk| chunk.ends_with("one")));
        assert_eq!(chunks_of("中")[0].len(), CHUNK_BYTES - 1);
    }

    #[test]
    fn short_and_empty_text_is_one_chunk() {
        for text in ["", "a\nb c"] {
            assert_eq!(cut(text), text.len());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn chunks_are_the_text(units in prop::collection::vec("[a-c \n中é]{1,9}", 1..4)) {
            chunks_of(&units.concat());
        }
    }
}
