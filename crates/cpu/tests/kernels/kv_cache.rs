use crate::util::*;
use tightfit_cpu::kernel::*;

/// A conversation of `length` tokens in a cache of `capacity` rows.
#[derive(Clone, Copy)]
struct Shape {
    length: usize,
    capacity: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
}

struct Tokens {
    shape: Shape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Tokens {
    fn new(shape: Shape, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut rows = |heads, scale| random.vec(shape.length * heads * shape.head_dim, scale);
        Self {
            shape,
            q: rows(shape.heads, 2.0),
            k: rows(shape.kv_heads, 2.0),
            v: rows(shape.kv_heads, 1.0),
        }
    }

    /// Every row's attention to all rows before it.
    fn reference(&self) -> Vec<f64> {
        let Shape {
            length,
            heads,
            kv_heads,
            head_dim: d,
            window,
            ..
        } = self.shape;
        let (q, k, v) = (f64s(&self.q), f64s(&self.k), f64s(&self.v));
        let mut o = vec![0.0; q.len()];
        for t in 0..length {
            for h in 0..heads {
                let query = (t * heads + h) * d;
                let key = |j: usize| (j * kv_heads + h / (heads / kv_heads)) * d;
                let first = (t + 1).saturating_sub(window.unwrap_or(length));
                let score = |j| inner(&q[query..query + d], &k[key(j)..key(j) + d]) * f64::from(scale(d));
                let max = (first..=t).map(score).fold(f64::MIN, f64::max);
                let sum: f64 = (first..=t).map(|j| (score(j) - max).exp()).sum();
                for j in first..=t {
                    let p = (score(j) - max).exp() / sum;
                    (0..d).for_each(|i| o[query + i] += p * v[key(j) + i]);
                }
            }
        }
        o
    }

    /// The same through a cache, `chunk` tokens at a time.
    fn generate(&self, cx: &Context, chunk: usize) -> Vec<f32> {
        let Shape {
            length,
            capacity,
            heads,
            kv_heads,
            head_dim,
            window,
        } = self.shape;
        let width = kv_heads * head_dim;
        // What is in rows that no token has reached yet must not matter.
        let [mut k_cache, mut v_cache] = [(); 2].map(|()| Buffer::new(capacity * width));
        let mut o = Buffer::new(self.q.len());
        for first in (0..length).step_by(chunk) {
            let rows = chunk.min(length - first);
            let start = first as i32;
            for (cache, new) in [(&mut k_cache, &self.k), (&mut v_cache, &self.v)] {
                let append = KvAppend {
                    rows,
                    capacity,
                    width,
                    new: new[first * width..].as_ptr().into(),
                    start: &start,
                    cache: cache.ptr().into(),
                };
                // SAFETY: `rows` new rows and a cache of the shape given.
                unsafe { kv_append(cx, &append) };
            }
            let at = first * heads * head_dim;
            let attention = CachedAttention {
                rows,
                capacity,
                heads,
                kv_heads,
                head_dim,
                scale: scale(head_dim),
                window,
                q: self.q[at..].as_ptr().into(),
                k: k_cache.ptr().into(),
                v: v_cache.ptr().into(),
                start: &start,
                // SAFETY: inside of the output.
                o: unsafe { o.ptr().add(at).into() },
                workspace: std::ptr::null_mut(),
            };
            // SAFETY: `rows` queries and outputs, and caches of the shape given.
            unsafe { cached_attention(cx, &attention) };
        }
        o.get().to_vec()
    }
}

fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// Correct, and the same bits however the tokens are cut.
fn check(shape: Shape, seed: u64) {
    let tokens = Tokens::new(shape, seed);
    let want = tokens.reference();
    let chunks = [shape.length, 1, 7, 64, 100];
    every_context(
        |cx| chunks.map(|chunk| tokens.generate(cx, chunk)).to_vec(),
        |got| {
            close("o", &got[0], &want, 3e-6);
            for (o, chunk) in got.iter().zip(chunks) {
                let differs = o.iter().zip(&got[0]).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(differs, None, "{chunk} tokens at a time");
            }
        },
    );
}

#[test]
fn a_prompt_in_any_pieces_gives_the_same_bits() {
    let shape = Shape {
        length: 300,
        capacity: 333,
        heads: 6,
        kv_heads: 2,
        head_dim: 64,
        window: None,
    };
    check(shape, 1);
    for (window, seed) in [(1, 2), (17, 3), (64, 4), (100, 5), (1000, 6)] {
        let window = Some(window);
        check(
            Shape {
                head_dim: 16,
                window,
                ..shape
            },
            seed,
        );
    }
}

#[test]
fn odd_shapes() {
    for (seed, (length, heads, kv_heads, head_dim)) in (7..).zip([
        (1, 1, 1, 1),
        (65, 3, 3, 10),
        (130, 5, 1, 70),
        (64, 2, 2, 128),
        (33, 4, 2, 6),
    ]) {
        let shape = Shape {
            length,
            capacity: length,
            heads,
            kv_heads,
            head_dim,
            window: None,
        };
        check(shape, seed);
    }
}

#[test]
fn large_scores_stay_finite() {
    let shape = Shape {
        length: 150,
        capacity: 150,
        heads: 2,
        kv_heads: 1,
        head_dim: 16,
        window: None,
    };
    let mut tokens = Tokens::new(shape, 12);
    tokens.q.iter_mut().for_each(|q| *q *= 60.0);
    let want = tokens.reference();
    every_context(
        |cx| vec![tokens.generate(cx, 40)],
        |got| close("o", &got[0], &want, 1e-3),
    );
}
