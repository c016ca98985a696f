//! Where a long text may be cut so that its pieces have, joined, the tokens of the whole.
//!
//! Encoding costs hundreds of bytes of memory per byte of text, so long texts are encoded in pieces of at most [`PIECE`] bytes. In the
//! rules below, `p` and `n` are the characters before and after a whitespace character; both are no whitespace, so that the whitespace stands alone.
//!
//! **Byte-level BPE** splits a text into words by a regular expression and merges inside words only. It is enough to cut where, in the
//! whole text, one word ends, and no expression looks backwards, so the right piece starts as it did in the whole. Of the known
//! expressions ([`super::gguf::SPLITS`]):
//! - `p␣n` is cut before the space. None of them takes a space after a character that is none, so a word ends there. The
//!   only look-ahead, `\s+(?!\S)`, starts at whitespace.
//! - `p⏎n`, where `n` is a letter, is cut after the newline. Punctuation may take newlines that follow it, and a run of whitespace takes
//!   its newlines, but neither goes on into a letter, and no word but those begins with a newline. (A word may: `[\r\n/]*` of one
//!   expression goes on into a slash. That is why `n` is a letter.)
//! - An ideograph, `，`, an ideograph (also `、` and `。`) is cut before the punctuation: runs of letters end at it.
//!
//! NFC, the normaliser of some of these, joins nothing across a space, a newline or between ideographs.
//!
//! **SentencePiece BPE** has no words: merges may go anywhere. But a merge across a place makes a token with both sides in it. If no token has a
//! `▁` (its space) or newline after another character, `p␣n` can be cut before the space and `p⏎n` before the newline. A text is given a space in
//! front, which a piece must not have: `Metaspace` gives none to a piece that begins with one; for `Prepend`, which always gives one, the
//! piece's own space is left out; the token of a space before a newline is dropped.
//!
//! **Added tokens** are found before all that. A rule is not used if an added token could lie across such a cut, or take whitespace beside it.
//!
//! **Anything else** (unigram, unknown expressions) is cut before single spaces too, which is right for all we know of, but not proven.

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

/// How a space between two other characters is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Space {
    No,
    /// The right piece begins with it.
    Before,
    /// It is left out: the normaliser puts one before every piece.
    Instead,
}

/// How a newline between two other characters is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Newline {
    No,
    /// The left piece ends with it.
    After,
    /// The right piece begins with it; the space that is put before that, if one is, has this id.
    Before(Option<u32>),
}

/// The places where a tokenizer's texts can be cut.
#[derive(Debug)]
pub(super) struct Cutter {
    space: Space,
    newline: Newline,
    /// Between an ideograph and the punctuation of ideographs.
    ideographs: bool,
    /// SentencePiece treats what follows an added token like the begin of a text: no cut beside one of these.
    beside: Vec<String>,
}

impl Cutter {
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> Self {
        let added = inner.get_added_tokens_decoder();
        let mut cutter = match (byte_level(inner), sentencepiece(inner)) {
            (true, _) => Self { space: Space::Before, newline: Newline::After, ideographs: true, beside: Vec::new() },
            (_, Some((space, newline))) => {
                let beside = added.values().map(|t| t.content.clone()).filter(|t| !t.is_empty()).collect();
                Self { space, newline, ideographs: false, beside }
            }
            _ => Self { space: Space::Before, newline: Newline::No, ideographs: false, beside: Vec::new() },
        };
        if added.values().any(crosses_space) {
            cutter.space = Space::No;
        }
        if added.values().any(crosses_newline) {
            cutter.newline = Newline::No;
        }
        let has_ideograph = |t: &AddedToken| t.content.chars().any(is_ideograph);
        cutter.ideographs &= !added.values().any(has_ideograph);
        cutter
    }

    /// `text` in pieces of at most [`PIECE`] bytes.
    pub(super) fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = Piece<'t>> {
        let mut rest = text;
        let mut leave_out = None;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (end, next, then) = if rest.len() <= PIECE { (rest.len(), rest.len(), None) } else { self.last_cut(rest) };
            let piece = Piece { text: &rest[..end], leave_out };
            (rest, leave_out) = (&rest[next..], then);
            Some(piece)
        })
    }

    /// The last cut in the first [`PIECE`] bytes: where the left piece ends, where the right one begins, and what it must leave out.
    fn last_cut(&self, text: &str) -> (usize, usize, Option<u32>) {
        let bytes = text.as_bytes();
        let whitespace = (1..PIECE).rev().filter(|&at| matches!(bytes[at], b' ' | b'\n'));
        whitespace.clone().find_map(|at| self.cut_at(text, at)).or_else(|| self.cut_ideographs(text)).unwrap_or_else(|| {
            let end = text.floor_char_boundary(PIECE);
            (end, end, None)
        })
    }

    /// The cut at the whitespace byte `at`, if there may be one.
    fn cut_at(&self, text: &str, at: usize) -> Option<(usize, usize, Option<u32>)> {
        let (left, right) = (&text[..at], &text[at + 1..]);
        let (p, n) = (left.chars().next_back()?, right.chars().next()?);
        let lone = |c: char| !c.is_whitespace() && c != SPACE;
        if !lone(p) || !lone(n) {
            return None;
        }
        if self.beside.iter().any(|token| left.ends_with(&**token) || right.starts_with(&**token)) {
            return None;
        }
        if text.as_bytes()[at] == b' ' {
            match self.space {
                Space::No => None,
                Space::Before => Some((at, at, None)),
                Space::Instead => Some((at, at + 1, None)),
            }
        } else {
            match self.newline {
                Newline::No => None,
                Newline::After => n.is_alphabetic().then_some((at + 1, at + 1, None)),
                Newline::Before(space) => Some((at, at, space)),
            }
        }
    }

    fn cut_ideographs(&self, text: &str) -> Option<(usize, usize, Option<u32>)> {
        let head = &text[..text.floor_char_boundary(PIECE)];
        let cut = |&(at, mark): &(usize, char)| {
            matches!(mark, '，' | '、' | '。')
                && head[..at].chars().next_back().is_some_and(is_ideograph)
                && head[at + mark.len_utf8()..].chars().next().is_some_and(is_ideograph)
        };
        let found = self.ideographs.then(|| head.char_indices().rev().find(cut)).flatten();
        found.map(|(at, _)| (at, at, None))
    }
}

fn is_ideograph(c: char) -> bool {
    ('\u{4e00}'..='\u{9fff}').contains(&c)
}

/// Whether `p␣n` may be cut before the space for this added token's sake.
fn crosses_space(token: &AddedToken) -> bool {
    let inside = token.content.char_indices().any(|(at, c)| c == ' ' && at > 0);
    inside || token.rstrip || (token.single_word && token.content.starts_with(' '))
}

/// Whether `p⏎n` may not be cut before or after the newline for this added token's sake.
fn crosses_newline(token: &AddedToken) -> bool {
    token.content.contains('\n') || token.lstrip || token.rstrip
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
            let SplitPattern::Regex(regex) = &split.pattern else { return false };
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
fn sentencepiece(inner: &tokenizers::Tokenizer) -> Option<(Space, Newline)> {
    let ModelWrapper::BPE(bpe) = inner.get_model() else { return None };
    // Otherwise an unknown character and its unknown neighbour could become one token across a cut.
    if bpe.fuse_unk && !bpe.byte_fallback {
        return None;
    }
    let space_id = bpe.token_to_id(&SPACE.to_string())?;
    let (space, prefixed) = match (inner.get_normalizer(), inner.get_pre_tokenizer()) {
        (None, Some(Pre::Metaspace(meta))) if meta.get_replacement() == SPACE => {
            (Space::Before, meta.get_prepend_scheme() != PrependScheme::Never)
        }
        (Some(Norm::Sequence(list)), None) => match list.as_ref() {
            [Norm::Prepend(prepend), Norm::Replace(replace)] => {
                (prepend.prepend == SPACE.to_string() && is_space_rule(replace)).then_some((Space::Instead, true))?
            }
            _ => return None,
        },
        _ => return None,
    };
    let (mut crosses_space, mut crosses_newline) = (false, false);
    for token in bpe.get_vocab().keys() {
        let after = |what| token.char_indices().any(|(at, c)| c == what && at > 0 && !token[..at].ends_with(what));
        crosses_space |= after(SPACE);
        crosses_newline |= after('\n');
    }
    let newline = if crosses_newline { Newline::No } else { Newline::Before(prefixed.then_some(space_id)) };
    Some((if crosses_space { Space::No } else { space }, newline))
}

/// Whether a rule replaces spaces by `▁`. The crate keeps the pattern private, but not its JSON.
fn is_space_rule(replace: &tokenizers::normalizers::Replace) -> bool {
    let pattern = serde_json::to_value(replace).ok().and_then(|rule| serde_json::from_value(rule.get("pattern")?.clone()).ok());
    replace.content == SPACE.to_string() && pattern == Some(ReplacePattern::String(" ".into()))
}
