//! Where a long text may be cut so that its pieces have, joined, the tokens of the whole.
//!
//! Encoding costs hundreds of bytes of memory per byte of text, so long texts are encoded in pieces of at most [`PIECE`] bytes. In the
//! rules, `p` is a character that is no whitespace, and `n` the character after what is shown.
//!
//! **Byte-level BPE** splits a text into words by a regular expression and merges inside words only. It is enough to cut where, in the
//! whole text, one word ends: no expression looks backwards, so the right piece goes on as the whole did, and the only look-ahead,
//! `\s+(?!\S)`, is for words of whitespace, of which none ends a left piece. Of the known expressions ([`super::gguf::SPLITS`] and GPT-2's):
//! - `p␣` and `p⇥` are cut before the whitespace, which no word takes in that begins with something else.
//! - `p` and any other whitespace (`⏎`) is cut before the whitespace if `p` is an ASCII letter or digit or an ideograph. Words of punctuation
//!   take newlines that follow.
//! - `p⏎n` is cut after the newline if `n` is a letter. Punctuation may take the newline, but does not go on into a letter; one
//!   expression, with `[\r\n/]*`, goes on into a slash.
//! - An ideograph, `，`, an ideograph (also `、` and `。`) is cut before the punctuation, where words of letters end.
//!
//! NFC, the normaliser of some of these, joins nothing across whitespace or between ideographs.
//!
//! **SentencePiece BPE** has no words: merges may go anywhere. But a merge across a place makes a token with both sides in it. If no token
//! has a `▁` (its space) after another character, `p␣` can be cut before the space; `p⏎` likewise. A text is given a space in front, which
//! a piece must not have: `Metaspace` gives none to a piece that begins with one; for `Prepend`, which always gives one, one space of the
//! piece is left out; before a newline, the token of the space is dropped.
//!
//! **Added tokens** are found before all that. Rules that an added token could break (it lies across the cut, or takes whitespace beside it)
//! are not used.
//!
//! **Anything else** (unknown expressions) is cut before spaces too, which is right for all we know of, but not proven.

use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::pre_tokenizers::PreTokenizerWrapper as Pre;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Model, ModelWrapper, NormalizerWrapper as Norm};

/// Bytes of text that are encoded at a time, at most.
pub(super) const PIECE: usize = 64 << 10;

/// SentencePiece's space.
const SPACE: char = '▁';

/// A piece of a text, and the token to leave out if its ids begin with it.
#[derive(Debug, PartialEq)]
pub(super) struct Piece<'t> {
    pub text: &'t str,
    pub leave_out: Option<u32>,
}

/// Which rules a tokenizer's texts are cut by.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rules {
    ByteLevel,
    SentencePiece {
        space: bool,
        newline: bool,
        /// The normaliser puts a space before every piece, so that a cut leaves out one.
        prepends: bool,
        /// The token of the space that is put before a piece that begins with a newline.
        prefix: Option<u32>,
    },
    Unproven,
}

/// A cut: where the left piece ends, where the right one begins, and the token to leave out of the right one.
type Cut = (usize, usize, Option<u32>);

/// Finds the places where a tokenizer's texts can be cut.
#[derive(Debug)]
pub(super) struct Cutter {
    rules: Rules,
    /// The most bytes of a piece.
    limit: usize,
    /// Whether added tokens allow cuts before whitespace, after newlines, between ideographs.
    before: bool,
    after: bool,
    ideographs: bool,
    /// SentencePiece treats what follows an added token like the begin of a text: no cut beside one of these.
    beside: Vec<String>,
}

impl Cutter {
    pub(super) fn new(inner: &tokenizers::Tokenizer, limit: usize) -> Self {
        let rules = if byte_level(inner) {
            Rules::ByteLevel
        } else {
            sentencepiece(inner).unwrap_or(Rules::Unproven)
        };
        let added = inner.get_added_tokens_decoder();
        let contents = || added.values().map(|t| &t.content).filter(|content| !content.is_empty());
        Self {
            rules,
            limit,
            before: !added.values().any(crosses),
            after: !added.values().any(|t| t.lstrip || t.content.contains('\n')),
            ideographs: !contents().any(|content| content.chars().any(is_ideograph)),
            beside: if matches!(rules, Rules::SentencePiece { .. }) {
                contents().cloned().collect()
            } else {
                Vec::new()
            },
        }
    }

    /// `text` in pieces.
    pub(super) fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = Piece<'t>> {
        let mut rest = text;
        let mut leave_out = None;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (end, next, then) = if rest.len() <= self.limit {
                (rest.len(), rest.len(), None)
            } else {
                self.last_cut(rest)
            };
            let piece = Piece {
                text: &rest[..end],
                leave_out,
            };
            (rest, leave_out) = (&rest[next..], then);
            Some(piece)
        })
    }

    /// Whether a space is put before texts, but a newline in front of the text keeps it, and the rest, apart.
    pub(super) fn newline_leads(&self) -> bool {
        matches!(
            self.rules,
            Rules::SentencePiece {
                newline: true,
                prefix: Some(_),
                ..
            }
        )
    }

    /// The last cut that leaves no more than the limit on the left, where `text` is longer than that.
    fn last_cut(&self, text: &str) -> Cut {
        let at_whitespace = (1..self.limit).rev().find_map(|at| self.cut_at_whitespace(text, at));
        at_whitespace
            .or_else(|| self.cut_between_ideographs(text))
            .unwrap_or_else(|| {
                let end = char_boundary(text, self.limit);
                (end, end, None)
            })
    }

    /// The cut before or after the byte `at`, if that is whitespace and a rule allows one.
    fn cut_at_whitespace(&self, text: &str, at: usize) -> Option<Cut> {
        let space = match text.as_bytes()[at] {
            b' ' | b'\t' => true,
            b'\n' | b'\r' => false,
            _ => return None,
        };
        let (left, right) = (&text[..at], &text[at + 1..]);
        let p = left.chars().next_back().filter(|&p| !p.is_whitespace() && p != SPACE)?;
        match self.rules {
            Rules::ByteLevel if self.before && (space || p.is_ascii_alphanumeric() || is_ideograph(p)) => {
                Some((at, at, None))
            }
            Rules::ByteLevel => {
                let lone = text.as_bytes()[at] == b'\n' && right.chars().next().is_some_and(char::is_alphabetic);
                (self.after && lone).then_some((at + 1, at + 1, None))
            }
            Rules::SentencePiece {
                space,
                newline,
                prepends,
                prefix,
            } => {
                let beside = self
                    .beside
                    .iter()
                    .any(|token| left.ends_with(&**token) || right.starts_with(&**token));
                match text.as_bytes()[at] {
                    _ if beside || !self.before => None,
                    b' ' => space.then_some((at, at + usize::from(prepends), None)),
                    b'\n' => newline.then_some((at, at, prefix)),
                    _ => None,
                }
            }
            Rules::Unproven => (self.before && space).then_some((at, at, None)),
        }
    }

    fn cut_between_ideographs(&self, text: &str) -> Option<Cut> {
        if self.rules != Rules::ByteLevel || !self.ideographs {
            return None;
        }
        let head = &text[..char_boundary(text, self.limit)];
        let allowed = |&(at, mark): &(usize, char)| {
            matches!(mark, '，' | '、' | '。')
                && head[..at].chars().next_back().is_some_and(is_ideograph)
                && head[at + mark.len_utf8()..].chars().next().is_some_and(is_ideograph)
        };
        head.char_indices().rev().find(allowed).map(|(at, _)| (at, at, None))
    }
}

/// The last place not after the byte `at` where a character of `text` begins or the text ends.
pub(super) fn char_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len()))
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0)
}

fn is_ideograph(c: char) -> bool {
    ('\u{4e00}'..='\u{9fff}').contains(&c)
}

/// Whether an added token could lie across a cut before whitespace, or take whitespace from behind one.
fn crosses(token: &AddedToken) -> bool {
    let content = &*token.content;
    let begins_inside =
        |(at, c): (usize, char)| at > 0 && c.is_whitespace() && !content[..at].ends_with(char::is_whitespace);
    let begins_with = content.starts_with(char::is_whitespace);
    token.rstrip || content.char_indices().any(begins_inside) || (token.single_word && begins_with)
}

/// Whether this is one of the byte-level tokenizers whose rules are known.
fn byte_level(inner: &tokenizers::Tokenizer) -> bool {
    let normalizer = match inner.get_normalizer() {
        None | Some(Norm::NFC(_) | Norm::NFD(_)) => true,
        Some(Norm::Sequence(list)) => list.as_ref().is_empty(),
        Some(_) => false,
    };
    let known = |pre: &Pre| match pre {
        Pre::ByteLevel(bytes) => !bytes.add_prefix_space,
        Pre::Digits(_) => true,
        Pre::Split(split) => {
            let SplitPattern::Regex(regex) = &split.pattern else {
                return false;
            };
            let isolated = split.behavior == SplitDelimiterBehavior::Isolated && !split.invert;
            isolated && super::gguf::SPLITS.iter().any(|known| known == regex)
        }
        _ => false,
    };
    let pre = match inner.get_pre_tokenizer() {
        Some(Pre::Sequence(list)) => list.as_ref(),
        Some(pre) => std::slice::from_ref(pre),
        None => &[],
    };
    normalizer && pre.iter().all(known) && matches!(pre.last(), Some(Pre::ByteLevel(_)))
}

/// The rules of a SentencePiece-like BPE tokenizer, if this is one.
fn sentencepiece(inner: &tokenizers::Tokenizer) -> Option<Rules> {
    let ModelWrapper::BPE(bpe) = inner.get_model() else {
        return None;
    };
    // Otherwise an unknown character and its unknown neighbour could become one token across a cut.
    if bpe.fuse_unk && !bpe.byte_fallback {
        return None;
    }
    let space_id = bpe.token_to_id(&SPACE.to_string())?;
    let (prepends, prefixes) = match (inner.get_normalizer(), inner.get_pre_tokenizer()) {
        (None, Some(Pre::Metaspace(meta))) if meta.get_replacement() == SPACE => {
            (false, meta.get_prepend_scheme() != PrependScheme::Never)
        }
        (Some(Norm::Sequence(list)), None) => match list.as_ref() {
            [Norm::Prepend(prepend), Norm::Replace(replace)]
                if prepend.prepend == SPACE.to_string() && is_space_rule(replace) =>
            {
                (true, true)
            }
            _ => return None,
        },
        _ => return None,
    };
    let (mut space, mut newline) = (true, true);
    for token in bpe.get_vocab().keys() {
        let begins_inside = |what| {
            token
                .char_indices()
                .any(|(at, c)| c == what && at > 0 && !token[..at].ends_with(what))
        };
        space &= !begins_inside(SPACE);
        newline &= !begins_inside('\n');
    }
    Some(Rules::SentencePiece {
        space,
        newline,
        prepends,
        prefix: prefixes.then_some(space_id),
    })
}

/// Whether a rule replaces spaces by `▁`. The crate keeps the pattern private, but not its JSON.
fn is_space_rule(replace: &tokenizers::normalizers::Replace) -> bool {
    let pattern = serde_json::to_value(replace)
        .ok()
        .and_then(|rule| serde_json::from_value(rule.get("pattern")?.clone()).ok());
    replace.content == SPACE.to_string() && pattern == Some(ReplacePattern::String(" ".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn fixture(name: &str) -> Value {
        let path = format!("{}/../../fixtures/tokenizers/{name}.json", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    /// The tokenizers of the fixtures, and kinds of SentencePiece that are not among them.
    fn tokenizers() -> Vec<(String, tokenizers::Tokenizer)> {
        let mut all: Vec<(String, Value)> = ["gpt2", "smollm", "qwen2", "llama3", "nemo", "spm"]
            .map(|name| (name.to_owned(), fixture(name)))
            .into();
        let mut bare = fixture("spm");
        bare["pre_tokenizer"]["prepend_scheme"] = json!("never");
        let mut always = fixture("spm");
        always["pre_tokenizer"]["prepend_scheme"] = json!("always");
        let mut prepending = fixture("spm");
        prepending["pre_tokenizer"] = Value::Null;
        prepending["normalizer"] = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
        let mut blanks = fixture("gpt2");
        for (id, content) in [(900, "  "), (901, "a\nb"), (902, "木。木"), (903, " y")] {
            let token = json!({"id": id, "content": content, "single_word": false, "lstrip": id == 903, "rstrip": false, "normalized": false, "special": false});
            blanks["added_tokens"].as_array_mut().unwrap().push(token);
        }
        all.extend(
            [
                ("bare", bare),
                ("always", always),
                ("prepending", prepending),
                ("blanks", blanks),
            ]
            .map(|(n, v)| (n.to_owned(), v)),
        );
        all.into_iter()
            .map(|(name, spec)| (name, tokenizers::Tokenizer::from_bytes(spec.to_string()).unwrap()))
            .collect()
    }

    /// Words and what stands between them: everything that the rules speak of.
    fn text() -> impl Strategy<Value = String> {
        let word = prop_oneof![
            8 => "[a-zA-Z]{1,12}",
            2 => "[a-z]{1,4}'(s|ll|re|T|x)",
            2 => "[0-9]{1,8}",
            3 => "[!-/:-@\\[-`{-~]{1,4}",
            3 => "[一-龥]{1,6}[，。、]?",
            1 => "([一-龥]{1,3}，){1,20}[一-龥]{1,3}",
            1 => "(木。木){10,20}",
            1 => "[а-яéüÅ\u{301}\u{323}😀👍ﬁⅣ]{1,4}",
            2 => proptest::sample::select(vec!["<|im_start|>", "<think>", "</s>", "▁", "a\nb", "木。木", " y"]).prop_map(str::to_owned),
        ];
        let gap = prop_oneof![
            6 => Just(" ".to_owned()),
            3 => Just("\n".to_owned()),
            3 => Just(String::new()),
            4 => "[ \n\t\r\u{a0}]{1,5}",
        ];
        proptest::collection::vec((word, gap), 5..80)
            .prop_map(|words| words.into_iter().map(|(word, gap)| word + &gap).collect())
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole() {
        let all = tokenizers();
        let mut cuts = vec![0; all.len()];
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
            cases: 300,
            ..ProptestConfig::default()
        });
        let cuts_of = std::cell::RefCell::new(&mut cuts);
        let result = runner.run(&(text(), 60..200_usize), |(text, limit)| {
            for (at, (name, inner)) in all.iter().enumerate() {
                let cutter = Cutter::new(inner, limit);
                let mut ids = Vec::new();
                let mut rest = &*text;
                for piece in cutter.pieces(&text) {
                    prop_assert!(piece.text.len() <= limit);
                    let encoding = inner.encode_fast(piece.text, false).unwrap();
                    let skip = usize::from(
                        piece
                            .leave_out
                            .is_some_and(|id| encoding.get_ids().first() == Some(&id)),
                    );
                    ids.extend_from_slice(&encoding.get_ids()[skip..]);
                    rest = rest
                        .trim_start_matches(' ')
                        .strip_prefix(piece.text.trim_start_matches(' '))
                        .unwrap();
                    cuts_of.borrow_mut()[at] += 1;
                }
                prop_assert!(rest.is_empty());
                // Short limits leave some pieces without any place to cut; that is what the last rule is for.
                let forced = forced_cut(&cutter, &text);
                let whole = inner.encode_fast(&*text, false).unwrap();
                prop_assert!(
                    forced || ids == whole.get_ids(),
                    "{}: {:?}\n{:?}\n{:?}",
                    name,
                    text,
                    ids,
                    whole.get_ids()
                );
            }
            Ok(())
        });
        result.unwrap();
        assert!(cuts.iter().all(|&n| n > 1000), "{cuts:?}");
    }

    /// Whether a text had to be cut where no rule allows it.
    fn forced_cut(cutter: &Cutter, text: &str) -> bool {
        let mut rest = text;
        while rest.len() > cutter.limit {
            let by_rule = (1..cutter.limit)
                .rev()
                .find_map(|at| cutter.cut_at_whitespace(rest, at))
                .or_else(|| cutter.cut_between_ideographs(rest));
            match by_rule {
                None => return true,
                Some((_, next, _)) => rest = &rest[next..],
            }
        }
        false
    }
}
