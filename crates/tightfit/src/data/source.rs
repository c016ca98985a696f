//! Seeded text-like bytes whose entropy per byte is known in closed form.
//!
//! The text is a first-order Markov chain over a lexicon of `W` pronounceable words. After word `w`, branch `k` is
//! drawn with a fixed probability `p_k` and the next word is `σ_k(w)`. Three properties make the entropy exact:
//!
//! - Every `σ_k` is a permutation, so the chain is doubly stochastic: uniform over words is stationary.
//! - For a given `w` the successors `σ_k(w)` are distinct, so a transition carries exactly `H(p) = -Σ p_k ln p_k` nats.
//! - A word ends with a blank or a line feed, its only one, so the bytes tell where every word ends and which it is.
//!
//! By the chain rule the entropy rate is `H(p) / mean word length` in nats per byte (Cover & Thomas, *Elements of
//! Information Theory*, 2nd ed., theorem 4.2.4 and section 4.3). No predictor has a lower expected loss.

/// Token ids are bytes.
pub const VOCAB_SIZE: u64 = 256;

/// Words of a lexicon.
const WORDS: usize = 64;

/// Branch probabilities times [`BRANCH_TOTAL`].
const BRANCH_WEIGHTS: [u8; 4] = [8, 4, 2, 2];

/// A power of two, so that the top bits of a random number draw a branch without any bias.
const BRANCH_TOTAL: u64 = 1 << BRANCH_BITS;
const BRANCH_BITS: u32 = 4;

/// Sets the language's random numbers apart from those of the walks with the same seed.
const LANGUAGE_KEY: u64 = u64::from_le_bytes(*b"language");

/// Longest word without its punctuation, in bytes.
const MAX_LETTERS: usize = 8;

const ONSETS: [&str; 26] = [
    "b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "dr", "fl", "gr", "kl", "pl",
    "st", "tr", "sh", "th",
];
const VOWELS: [&str; 13] = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ou"];
const CODAS: [&str; 9] = ["", "", "", "n", "r", "s", "l", "m", "t"];

/// A lexicon with its Markov chain.
///
/// Where a word follows one that ends a sentence it begins with a capital. That is a function of the two words, so it
/// adds no entropy.
#[derive(Clone, Debug)]
pub struct Language {
    /// Each word with the punctuation and the blank or line feed that belong to it.
    words: Vec<String>,
    /// `successors[w][k]` is `σ_k(w)`.
    successors: Vec<[u16; BRANCH_WEIGHTS.len()]>,
    /// Bytes of all words together.
    total_bytes: u64,
}

impl Language {
    /// The language of a seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = SplitMix64::keyed(&[seed, LANGUAGE_KEY]);
        let words = lexicon(&mut rng);
        let total_bytes = words.iter().map(|word| word.len() as u64).sum();
        // σ_k(ring[i]) = next(ring[i + k]), where `next` is one cycle through all words and `ring` a random circular
        // order. Each σ_k is a permutation, for one word they differ because `ring[i + k]` differ, and σ_0 = `next`
        // reaches every word from every word, so the chain is irreducible.
        let cycle = rng.permutation();
        let ring = rng.permutation();
        let mut next = [0; WORDS];
        for (i, &word) in cycle.iter().enumerate() {
            next[usize::from(word)] = cycle[(i + 1) % WORDS];
        }
        let mut successors = vec![[0; BRANCH_WEIGHTS.len()]; WORDS];
        for (i, &word) in ring.iter().enumerate() {
            for (k, successor) in successors[usize::from(word)].iter_mut().enumerate() {
                *successor = next[usize::from(ring[(i + k) % WORDS])];
            }
        }
        Self {
            words,
            successors,
            total_bytes,
        }
    }

    /// `H(p)`: nats per word, given all words before it.
    pub fn entropy_per_word(&self) -> f64 {
        BRANCH_WEIGHTS
            .iter()
            .map(|&weight| f64::from(weight) / BRANCH_TOTAL as f64)
            .map(|p| -p * p.ln())
            .sum()
    }

    /// Mean bytes of a word, with its punctuation and blank, under the stationary (uniform) distribution.
    pub fn mean_word_bytes(&self) -> f64 {
        self.total_bytes as f64 / self.words.len() as f64
    }

    /// The entropy rate in nats per byte: the floor of the mean cross-entropy loss of a byte-level model.
    pub fn entropy_per_byte(&self) -> f64 {
        self.entropy_per_word() / self.mean_word_bytes()
    }
}

/// Draws words until all of them are distinct; of every 16, two carry a comma, one ends a sentence and one a line.
fn lexicon(rng: &mut SplitMix64) -> Vec<String> {
    let mut words: Vec<String> = Vec::with_capacity(WORDS);
    while words.len() < WORDS {
        let mut word = String::new();
        for _ in 0..=rng.below(3) {
            word.push_str(ONSETS[rng.below(ONSETS.len())]);
            word.push_str(VOWELS[rng.below(VOWELS.len())]);
        }
        word.push_str(CODAS[rng.below(CODAS.len())]);
        let letters = |entry: &str| entry.trim_end_matches([',', '.', ' ', '\n']).len();
        if word.len() > MAX_LETTERS || words.iter().any(|entry| entry[..letters(entry)] == word) {
            continue;
        }
        word.push_str(match words.len() % 16 {
            3 | 11 => ", ",
            14 => ". ",
            15 => ".\n",
            _ => " ",
        });
        words.push(word);
    }
    words
}

/// An endless walk through a [`Language`].
///
/// It begins at a byte chosen uniformly from all bytes of the lexicon, perhaps inside a word. That is the stationary
/// state, so the expected information of *every* byte, the first ones included, is [`Language::entropy_per_byte`] for
/// a reader who knows the state. A model that reads only the bytes has to find the state first: over a row of `n`
/// bytes its expected loss exceeds the entropy rate by at most `ln(total bytes) / n`.
#[derive(Clone, Debug)]
pub struct TextSource<'a> {
    language: &'a Language,
    rng: SplitMix64,
    word: usize,
    /// Position of the next byte within the word.
    offset: usize,
    starts_sentence: bool,
}

impl<'a> TextSource<'a> {
    /// The walk of `language` with this key. Walks with different keys are independent.
    pub fn new(language: &'a Language, key: u64) -> Self {
        Self::keyed(language, &[key])
    }

    /// The walk whose key is a sequence of counters.
    pub(super) fn keyed(language: &'a Language, key: &[u64]) -> Self {
        let mut rng = SplitMix64::keyed(key);
        let mut offset = rng.below(language.total_bytes as usize);
        let mut word = 0;
        while offset >= language.words[word].len() {
            offset -= language.words[word].len();
            word += 1;
        }
        Self {
            language,
            rng,
            word,
            offset,
            starts_sentence: false,
        }
    }

    /// The next byte.
    pub fn next_byte(&mut self) -> u8 {
        let text = self.language.words[self.word].as_bytes();
        let byte = text[self.offset];
        let byte = if self.starts_sentence && self.offset == 0 {
            byte.to_ascii_uppercase()
        } else {
            byte
        };
        self.offset += 1;
        if self.offset == text.len() {
            self.starts_sentence = text.contains(&b'.');
            self.word = usize::from(self.language.successors[self.word][self.rng.branch()]);
            self.offset = 0;
        }
        byte
    }

    /// Fills `bytes` with the next bytes; allocates nothing.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        bytes.fill_with(|| self.next_byte());
    }
}

/// SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
#[derive(Clone, Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator whose state is a hash of `key`: each part is mixed in before the next, so nearby counters give
    /// unrelated generators.
    fn keyed(key: &[u64]) -> Self {
        Self(key.iter().fold(0, |state, &part| Self(state ^ part).next()))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An index in `0..n`, biased by at most `n / 2^64`.
    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// A branch `k`, with probability exactly `BRANCH_WEIGHTS[k] / BRANCH_TOTAL`.
    fn branch(&mut self) -> usize {
        let mut draw = self.next() >> (64 - BRANCH_BITS);
        let mut k = 0;
        while draw >= u64::from(BRANCH_WEIGHTS[k]) {
            draw -= u64::from(BRANCH_WEIGHTS[k]);
            k += 1;
        }
        k
    }

    /// The words in random order (Fisher–Yates).
    fn permutation(&mut self) -> [u16; WORDS] {
        let mut order = std::array::from_fn(|i| i as u16);
        for i in (1..WORDS).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

// `branch` relies on this to end.
const _: () = {
    let [a, b, c, d] = BRANCH_WEIGHTS;
    assert!(a as u64 + b as u64 + c as u64 + d as u64 == BRANCH_TOTAL);
};

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    const SAMPLE_BYTES: usize = 2_000_000;

    fn sample(language: &Language, key: u64, bytes: usize) -> String {
        let mut text = vec![0; bytes];
        TextSource::new(language, key).fill(&mut text);
        String::from_utf8(text).unwrap()
    }

    /// The whole words of `text`, in lower case and with their punctuation, blank or line feed.
    fn whole_words(text: &str) -> Vec<String> {
        let mut words: Vec<_> = text
            .split_inclusive([' ', '\n'])
            .skip(1)
            .map(str::to_lowercase)
            .collect();
        words.pop();
        words
    }

    #[test]
    fn the_lexicon_is_a_prefix_code_of_distinct_words() {
        for seed in 0..20 {
            let language = Language::new(seed);
            let stems: BTreeSet<_> = language
                .words
                .iter()
                .map(|word| word.trim_end_matches([',', '.', ' ', '\n']))
                .collect();
            assert_eq!(stems.len(), WORDS);
            for word in &language.words {
                let end = word.find([' ', '\n']).unwrap();
                assert_eq!(end, word.len() - 1, "{word:?} must end at its only blank");
                assert!(word.trim_end().len() >= 2 && word.len() <= MAX_LETTERS + 2, "{word:?}");
            }
        }
    }

    #[test]
    fn the_chain_is_doubly_stochastic_with_distinct_successors_and_irreducible() {
        for seed in 0..20 {
            let language = Language::new(seed);
            for k in 0..BRANCH_WEIGHTS.len() {
                let image: BTreeSet<_> = language.successors.iter().map(|of_word| of_word[k]).collect();
                assert_eq!(image.len(), WORDS, "branch {k} is not a permutation");
            }
            for of_word in &language.successors {
                assert_eq!(of_word.iter().collect::<BTreeSet<_>>().len(), BRANCH_WEIGHTS.len());
            }
            let (mut seen, mut word) = (BTreeSet::new(), 0);
            while seen.insert(word) {
                word = language.successors[usize::from(word)][0];
            }
            assert_eq!(seen.len(), WORDS, "branch 0 is not a single cycle");
        }
    }

    /// An oracle that knows the chain reads the text back, word by word; its mean loss is the stated entropy.
    #[test]
    fn an_oracle_pays_the_stated_entropy() {
        for seed in [0, 1, 42] {
            let language = Language::new(seed);
            let index: BTreeMap<_, _> = language
                .words
                .iter()
                .enumerate()
                .map(|(i, w)| (w.as_str(), i))
                .collect();
            let words: Vec<_> = whole_words(&sample(&language, seed, SAMPLE_BYTES))
                .iter()
                .map(|w| index[w.as_str()])
                .collect();
            let (mut nats, mut bytes) = (0.0, 0.0);
            for pair in words.windows(2) {
                let k = language.successors[pair[0]]
                    .iter()
                    .position(|&next| usize::from(next) == pair[1])
                    .unwrap();
                nats -= (f64::from(BRANCH_WEIGHTS[k]) / BRANCH_TOTAL as f64).ln();
                bytes += language.words[pair[1]].len() as f64;
            }
            let transitions = (words.len() - 1) as f64;
            // -ln p_k has standard deviation below 0.6 nats, so five standard errors are 3 / sqrt(n).
            let tolerance = 3.0 / transitions.sqrt();
            let per_word = nats / transitions;
            assert!((per_word - language.entropy_per_word()).abs() < tolerance, "{per_word}");
            let (measured, stated) = (nats / bytes, language.entropy_per_byte());
            assert!(
                (measured / stated - 1.0).abs() < 0.01,
                "measured {measured}, stated {stated}"
            );
        }
    }

    /// Counting which word follows which, without knowing the chain, gives the same entropy.
    #[test]
    fn counts_of_word_pairs_agree() {
        let language = Language::new(7);
        let words = whole_words(&sample(&language, 1, SAMPLE_BYTES));
        let mut counts: BTreeMap<&str, BTreeMap<&str, f64>> = BTreeMap::new();
        for pair in words.windows(2) {
            *counts.entry(&pair[0]).or_default().entry(&pair[1]).or_default() += 1.0;
        }
        let pairs = (words.len() - 1) as f64;
        let mut nats = 0.0;
        for followers in counts.values() {
            let total: f64 = followers.values().sum();
            // Uniform occupancy: every word is as frequent as every other, within the chain's own noise.
            assert!((total / pairs * WORDS as f64 - 1.0).abs() < 0.1, "{total} of {pairs}");
            nats -= followers
                .values()
                .map(|count| count * (count / total).ln())
                .sum::<f64>();
        }
        let bytes: usize = words[1..].iter().map(String::len).sum();
        let (measured, stated) = (nats / bytes as f64, language.entropy_per_byte());
        assert!(
            (measured / stated - 1.0).abs() < 0.01,
            "measured {measured}, stated {stated}"
        );
    }

    /// Words begin equally often at every byte of a walk, so short rows have the stated entropy too.
    #[test]
    fn a_walk_starts_in_the_stationary_state() {
        let language = Language::new(3);
        const WALKS: u64 = 40_000;
        const BYTES: usize = 12;
        let mut ends = [0u32; BYTES];
        for key in 0..WALKS {
            let mut source = TextSource::new(&language, key);
            for end in &mut ends {
                *end += u32::from(matches!(source.next_byte(), b' ' | b'\n'));
            }
        }
        let p = 1.0 / language.mean_word_bytes();
        let tolerance = 5.0 * (p * (1.0 - p) / WALKS as f64).sqrt();
        for (i, &end) in ends.iter().enumerate() {
            let rate = f64::from(end) / WALKS as f64;
            assert!((rate - p).abs() < tolerance, "byte {i}: {rate} of {p}");
        }
    }

    #[test]
    fn the_seed_and_the_key_decide_the_text_and_the_cut_does_not() {
        let language = Language::new(5);
        let text = sample(&language, 9, 1000);
        assert_eq!(text, sample(&Language::new(5), 9, 1000));
        assert_ne!(text, sample(&language, 10, 1000));
        assert_ne!(text, sample(&Language::new(6), 9, 1000));
        let mut source = TextSource::new(&language, 9);
        let mut pieces = vec![0; 1000];
        pieces.chunks_mut(7).for_each(|piece| source.fill(piece));
        assert_eq!(text.as_bytes(), pieces);
    }

    /// Pins the text of seed 0: changing it changes every figure that documents quote.
    #[test]
    fn it_looks_like_text() {
        let text = sample(&Language::new(0), 0, 240);
        assert_eq!(
            text,
            "grun hugrun zulistim floubri guzekor peaplat flezot stes, trusim. Klushi.\nTrogrou tirear kelaisu reklewe \
             flabrim poun gotuhou. Vun fadakil thigrol shan tratreal drou stoul zulistim gotuhou. Fohen. Vezili maple. \
             Zuzo fogrel stom flabrim poun"
        );
    }
}
