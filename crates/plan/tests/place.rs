//! Placement over families of traces: always valid, never below the bound, close to it, and repeatable.

use std::time::Instant;

use proptest::prelude::*;
use tightfit_plan::place::{Effort, PlaceError, Placement, Span, place};
use tightfit_plan::validate::{Violation, validate};

use traces::Rng;

const ALIGN: u64 = 64;

/// Enough to find the optimum of a handful of spans, without a second per case where the bound is out of reach.
const EXACT: Effort = Effort {
    tolerance: None,
    looks: 2_000_000,
};

/// Generated spans that look like the memory of real programs.
mod traces {
    use tightfit_plan::place::Span;

    /// SplitMix64 (Steele, Lea & Flood, 2014).
    pub struct Rng(pub u64);

    impl Rng {
        pub fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }

        /// From `low` up to and including `high`.
        pub fn within(&mut self, low: u64, high: u64) -> u64 {
            low + self.next() % (high - low + 1)
        }

        pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
            from[self.within(0, from.len() as u64 - 1) as usize]
        }
    }

    /// A program under way: the step it is at and the spans it has made.
    #[derive(Default)]
    struct Trace {
        now: u32,
        spans: Vec<Span>,
    }

    impl Trace {
        /// A buffer live from now until [`Trace::free`].
        fn alloc(&mut self, size: u64) -> usize {
            self.spans.push(Span {
                size,
                start: self.now,
                end: u32::MAX,
            });
            self.spans.len() - 1
        }

        /// Last used now.
        fn free(&mut self, span: usize) {
            self.spans[span].end = self.now;
        }

        fn workspace(&mut self, size: u64) {
            let span = self.alloc(size);
            self.free(span);
        }

        /// What is never freed lives until the end.
        fn finish(mut self) -> Vec<Span> {
            for span in &mut self.spans {
                span.end = span.end.min(self.now);
            }
            self.spans
        }
    }

    /// A LLaMA-style training step: saved activations freed in reverse order, short-lived temporaries
    /// and workspaces between them, weight gradients that stay until the update.
    pub fn transformer(seed: u64, layers: usize) -> Vec<Span> {
        let rng = &mut Rng(seed);
        let tokens = rng.within(1, 8) * rng.pick(&[128, 200, 512]);
        let hidden = 64 * rng.within(2, 32);
        let kv = hidden / rng.pick(&[1, 2, 3, 4]);
        let ffn = 64 * rng.within(hidden / 32, hidden / 16);
        let vocab = rng.pick(&[256, 32_000, 49_152]);
        let keep_gradients = rng.within(0, 1) == 1;
        let (x, f) = (4 * tokens * hidden, 4 * tokens * ffn);
        let mut t = Trace::default();
        for bytes in [4 * vocab * hidden, 4 * hidden * hidden * layers as u64, 8 * tokens] {
            t.alloc(bytes);
        }
        let embedding_gradient = t.alloc(4 * vocab * hidden);
        let mut residual = t.alloc(x);
        let mut saved = Vec::new();
        for _ in 0..layers {
            let mut layer = vec![(residual, x)];
            // Norm, q, k, v, rotated q and k; attention and its log-sum-exp; norm; gate, up, product.
            for (bytes, workspace) in [
                (x, 4 * tokens),
                (x, 4 * hidden * 96),
                (4 * tokens * kv, 4 * hidden * 96),
                (4 * tokens * kv, 4 * hidden * 96),
                (x, 0),
                (4 * tokens * 9, 1 << 16),
                (x, 4 * tokens),
                (f, 4 * hidden * 96),
                (f, 4 * hidden * 96),
                (f, 0),
            ] {
                t.now += 1;
                layer.push((t.alloc(bytes), bytes));
                t.workspace(workspace);
            }
            t.now += 1;
            let down = t.alloc(x);
            t.now += 1;
            residual = t.alloc(x);
            t.free(down);
            saved.push(layer);
        }
        t.now += 1;
        let mut gradient = t.alloc(x);
        t.workspace(4 * vocab * tokens.min(256));
        t.free(residual);
        for layer in saved.into_iter().rev() {
            for (span, bytes) in layer.into_iter().rev() {
                t.now += 1;
                let next = t.alloc(bytes);
                let weight = t.alloc(bytes / tokens * hidden);
                t.workspace(4 * hidden * 96);
                t.free(span);
                t.free(gradient);
                gradient = next;
                if !keep_gradients {
                    t.now += 1;
                    t.free(weight);
                }
            }
        }
        t.now += 1;
        t.free(gradient);
        t.free(embedding_gradient);
        t.finish()
    }

    /// A U-Net training step: resolution falls and channels rise level by level, skip connections
    /// join equal levels, odd image sides make sizes that do not nest.
    pub fn unet(seed: u64, levels: u32, blocks: usize) -> Vec<Span> {
        let rng = &mut Rng(seed);
        let side = rng.within(65, 600);
        let channels = 16 * rng.within(1, 5);
        let bytes = |level: u32| 4 * (channels << level) * (side >> level) * (side >> level);
        let mut t = Trace::default();
        let mut saved = Vec::new();
        let mut x = t.alloc(bytes(0));
        let path = (0..levels).chain((0..levels - 1).rev());
        for (i, level) in path.enumerate() {
            let up = i as u32 >= levels;
            for block in 0..blocks {
                t.now += 1;
                // The first block on the way up reads the concatenation with the skip connection.
                let widen = if up && block == 0 { 2 } else { 1 };
                let y = t.alloc(widen * bytes(level));
                t.workspace(rng.pick(&[0, bytes(level) / 2, bytes(level) * 9 / 4]));
                let activated = t.alloc(bytes(level));
                saved.push((x, widen * bytes(level)));
                saved.push((y, bytes(level)));
                x = activated;
                t.now += 1;
            }
        }
        let mut gradient = t.alloc(bytes(0));
        for (span, size) in saved.into_iter().rev() {
            t.now += 1;
            let next = t.alloc(size);
            t.workspace(rng.pick(&[0, size / 2, size]));
            t.free(span);
            t.free(gradient);
            gradient = next;
        }
        t.free(x);
        t.finish()
    }

    /// No structure at all: log-uniform sizes, uniform starts, mostly short lives.
    pub fn random(seed: u64, count: usize) -> Vec<Span> {
        let rng = &mut Rng(seed);
        let steps = count as u64 * 2;
        let span = |_| {
            let scale = rng.within(4, 24);
            let size = rng.within(0, 1 << scale);
            let start = rng.within(0, steps);
            let longest = rng.pick(&[3, steps / 20 + 1, steps / 3 + 1]);
            let end = start + rng.within(0, longest);
            Span {
                size,
                start: start as u32,
                end: end as u32,
            }
        };
        (0..count).map(span).collect()
    }
}

fn placed(spans: &[Span], effort: Effort) -> Placement {
    let placement = place(spans, ALIGN, effort).unwrap();
    validate(spans, &placement.offsets, ALIGN, placement.peak).unwrap();
    assert!(placement.lower_bound <= placement.peak);
    // Not an over-estimate either: one byte less does not hold it.
    if placement.peak > 0 {
        validate(spans, &placement.offsets, ALIGN, placement.peak - 1).unwrap_err();
    }
    placement
}

type Family = (&'static str, fn(u64) -> Vec<Span>, f64);

/// Name, spans for a seed, and the greatest gap allowed at [`Effort::NORMAL`].
///
/// `report` below prints what they rest on. Its worst of 40 seeds: transformers 0.54 %, U-Nets 0.07 %,
/// random 60, 500 and 2500: 0.001 %, 3.2 % and 12.3 %. The gap is to a bound that may be out of reach.
const FAMILIES: [Family; 8] = [
    ("transformer 6", |seed| traces::transformer(seed, 6), 0.01),
    ("transformer 30", |seed| traces::transformer(seed, 30), 0.01),
    ("transformer 65", |seed| traces::transformer(seed, 65), 0.01),
    ("u-net 4 x 2", |seed| traces::unet(seed, 4, 2), 0.01),
    ("u-net 5 x 4", |seed| traces::unet(seed, 5, 4), 0.01),
    ("random 60", |seed| traces::random(seed, 60), 0.01),
    ("random 500", |seed| traces::random(seed, 500), 0.05),
    ("random 2500", |seed| traces::random(seed, 2_500), 0.15),
];

#[test]
fn gaps_stay_within_what_was_measured() {
    for (name, family, limit) in FAMILIES {
        for seed in 0..6 {
            let gap = placed(&family(seed), Effort::NORMAL).gap();
            assert!(gap <= limit, "{name}, seed {seed}: gap {:.3} %", gap * 100.0);
        }
    }
}

/// `cargo test --release -p tightfit-plan --test place -- --ignored --nocapture report`
#[test]
#[ignore = "prints gaps and times; the limits above come from it"]
fn report() {
    println!("family               spans   gap %: median    mean   worst   ms: median   worst");
    let large: Family = ("random 10000", |seed| traces::random(seed, 10_000), 1.0);
    for (name, family, _) in FAMILIES.into_iter().chain([large]) {
        for (effort_name, effort) in [("quick", Effort::QUICK), ("normal", Effort::NORMAL)] {
            let (mut gaps, mut times, mut count) = (Vec::new(), Vec::new(), 0);
            for seed in 0..40 {
                let spans = family(seed);
                let begin = Instant::now();
                let placement = place(&spans, ALIGN, effort).unwrap();
                times.push(begin.elapsed().as_secs_f64() * 1e3);
                gaps.push(placement.gap() * 1e2);
                count = spans.len();
            }
            gaps.sort_by(f64::total_cmp);
            times.sort_by(f64::total_cmp);
            let mean = gaps.iter().sum::<f64>() / 40.0;
            println!(
                "{name:14}{effort_name:7}{count:5}{:16.3}{mean:8.3}{:8.3}{:13.2}{:8.2}",
                gaps[20], gaps[39], times[20], times[39]
            );
        }
    }
}

/// Spans with little structure, small enough for shrinking to be of use.
fn spans(count: std::ops::Range<usize>, largest: u64, steps: u32) -> impl Strategy<Value = Vec<Span>> {
    let span = (0..=largest, 0..steps, 0..steps).prop_map(|(size, a, b)| Span {
        size,
        start: a.min(b),
        end: a.max(b),
    });
    prop::collection::vec(span, count)
}

/// The lowest peak by exhaustion. Lowering a span until it rests on the arena's floor or on another
/// never hurts, and placing by ascending offset then reproduces the result by first fit: so one of
/// the n! orders under first fit is optimal.
fn optimal_peak(spans: &[Span], align: u64) -> u64 {
    fn descend(spans: &[Span], align: u64, offsets: &mut Vec<Option<u64>>, peak: u64, best: &mut u64) {
        if peak >= *best {
            return;
        }
        let rest: Vec<usize> = (0..spans.len()).filter(|&i| offsets[i].is_none()).collect();
        if rest.is_empty() {
            *best = peak;
        }
        for i in rest {
            let fits = |at: u64| !(0..spans.len()).any(|j| clash(spans, i, at, j, offsets[j]));
            let mut at = 0;
            while !fits(at) {
                at += align;
            }
            offsets[i] = Some(at);
            descend(spans, align, offsets, peak.max(at + spans[i].size), best);
            offsets[i] = None;
        }
    }
    fn clash(spans: &[Span], i: usize, at: u64, j: usize, other: Option<u64>) -> bool {
        let (a, b) = (spans[i], spans[j]);
        let in_time = a.start <= b.end && b.start <= a.end;
        other.is_some_and(|o| in_time && at < o + b.size && o < at + a.size)
    }
    let spans: Vec<Span> = spans.iter().copied().filter(|s| s.size > 0).collect();
    let mut best = u64::MAX;
    descend(&spans, align, &mut vec![None; spans.len()], 0, &mut best);
    best
}

/// Every pair at every byte and time step: what an overlap is, spelled out.
fn overlaps_by_exhaustion(spans: &[Span], offsets: &[u64]) -> bool {
    let cells = |i: usize| {
        let (span, at): (Span, u64) = (spans[i], offsets[i]);
        (span.start..=span.end).flat_map(move |t| (at..at + span.size).map(move |byte| (t, byte)))
    };
    let mut taken = std::collections::HashSet::new();
    (0..spans.len()).flat_map(cells).any(|cell| !taken.insert(cell))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_spans_are_placed_validly(spans in spans(0..60, 5_000, 40)) {
        placed(&spans, Effort::QUICK);
    }

    #[test]
    fn any_program_is_placed_validly(seed: u64, layers in 1..6_usize, levels in 1..5_u32) {
        placed(&traces::transformer(seed, layers), Effort::QUICK);
        placed(&traces::unet(seed, levels, layers), Effort::QUICK);
    }

    #[test]
    fn the_bound_is_below_the_optimum_and_the_peak_not_far_above(
        spans in spans(1..8, 9, 8),
        align in prop::sample::select(vec![1_u64, 2, 4]),
    ) {
        let placement = place(&spans, align, EXACT).unwrap();
        let optimum = optimal_peak(&spans, align);
        prop_assert!(placement.lower_bound <= optimum);
        prop_assert!(optimum <= placement.peak);
        // The search stops within one alignment of the bound.
        prop_assert!(placement.peak < optimum + align);
    }

    #[test]
    fn the_validator_agrees_with_exhaustion(
        spans in spans(2..7, 6, 6),
        offsets in prop::collection::vec(0..14_u64, 7),
    ) {
        let offsets = &offsets[..spans.len()];
        let overlaps = matches!(validate(&spans, offsets, 1, 100), Err(Violation::Overlap { .. }));
        prop_assert_eq!(overlaps, overlaps_by_exhaustion(&spans, offsets));
    }

    #[test]
    fn a_span_moved_onto_another_is_caught(seed: u64) {
        let spans = traces::random(seed, 80);
        let mut placement = placed(&spans, Effort::QUICK);
        let rng = &mut Rng(seed);
        let live_together = |i: usize, j: usize| {
            let (a, b) = (spans[i], spans[j]);
            i != j && a.size > 0 && b.size > 0 && a.start <= b.end && b.start <= a.end
        };
        let pairs: Vec<(usize, usize)> = (0..80)
            .flat_map(|i| (0..80).map(move |j| (i, j)))
            .filter(|&(i, j)| live_together(i, j))
            .collect();
        prop_assume!(!pairs.is_empty());
        let (moved, onto) = rng.pick(&pairs);
        placement.offsets[moved] = placement.offsets[onto];
        let violation = validate(&spans, &placement.offsets, ALIGN, u64::MAX).unwrap_err();
        let Violation::Overlap { first, second, time } = violation else {
            panic!("{violation}");
        };
        // The moved span may meet others too, and they come first; it is always one of the two.
        prop_assert!(first == moved || second == moved);
        prop_assert!(live_together(first, second));
        prop_assert_eq!(time, spans[first].start.max(spans[second].start));
    }
}

#[test]
fn the_same_spans_get_the_same_offsets() {
    let spans = traces::random(7, 400);
    let first = placed(&spans, Effort::NORMAL);
    assert_eq!(first, placed(&spans, Effort::NORMAL));
    // Only the steps at which spans start matter, not how far apart they are.
    let stretched: Vec<Span> = spans
        .iter()
        .map(|s| Span {
            start: s.start * 1_000,
            end: s.end * 1_000 + 999,
            ..*s
        })
        .collect();
    assert_eq!(first, placed(&stretched, Effort::NORMAL));
}

#[test]
fn spans_of_the_whole_timeline_lie_lowest() {
    let whole = Span {
        size: 100,
        start: 0,
        end: 9,
    };
    let brief = |start| Span {
        size: 1_000,
        start,
        end: start,
    };
    let spans = [brief(0), whole, brief(5), Span { size: 128, ..whole }];
    let placement = placed(&spans, Effort::NORMAL);
    assert_eq!(placement.offsets, [256, 128, 256, 0]);
    assert_eq!(placement.peak, 1_256);
    assert_eq!(placement.lower_bound, 1_252);
}

#[test]
fn nothing_takes_no_room() {
    assert_eq!(placed(&[], Effort::NORMAL).peak, 0);
    let spans = [Span {
        size: 0,
        start: 0,
        end: u32::MAX,
    }; 3];
    let placement = placed(&spans, Effort::NORMAL);
    assert_eq!((placement.peak, placement.lower_bound), (0, 0));
    // Amid others, at any offset, it is in nobody's way.
    let spans = [
        Span {
            size: 64,
            start: 0,
            end: 1,
        },
        Span {
            size: 0,
            start: 0,
            end: 1,
        },
    ];
    assert_eq!(validate(&spans, &[0, 0], ALIGN, 64), Ok(()));
}

#[test]
fn sizes_that_could_wrap_are_refused() {
    let span = |size| Span {
        size,
        start: 0,
        end: u32::MAX,
    };
    let fifteen = [span(1 << 60); 15];
    assert_eq!(placed(&fifteen, Effort::NORMAL).peak, 15 << 60);
    let sixteen = [span(1 << 60); 16];
    let refused = PlaceError::TooLarge {
        span: 15,
        size: 1 << 60,
    };
    assert_eq!(place(&sixteen, ALIGN, Effort::NORMAL), Err(refused));
    let refused = PlaceError::TooLarge {
        span: 0,
        size: u64::MAX,
    };
    assert_eq!(place(&[span(u64::MAX)], ALIGN, Effort::NORMAL), Err(refused));
}

#[test]
fn malformed_input_is_named() {
    let inverted = [Span {
        size: 1,
        start: 3,
        end: 2,
    }];
    let error = PlaceError::Lifetime {
        span: 0,
        start: 3,
        end: 2,
    };
    assert_eq!(place(&inverted, ALIGN, Effort::NORMAL), Err(error));
    for align in [0, 48] {
        assert_eq!(place(&[], align, Effort::NORMAL), Err(PlaceError::Align { align }));
    }
}

#[test]
fn the_validator_names_what_is_wrong() {
    let spans = [
        Span {
            size: 100,
            start: 0,
            end: 4,
        },
        Span {
            size: 64,
            start: 4,
            end: 6,
        },
    ];
    assert_eq!(validate(&spans, &[0, 128], ALIGN, 192), Ok(()));
    let cases = [
        (vec![0], Violation::Count { spans: 2, offsets: 1 }),
        (
            vec![0, 100],
            Violation::Misaligned {
                span: 1,
                offset: 100,
                align: ALIGN,
            },
        ),
        (
            vec![0, 192],
            Violation::OutOfArena {
                span: 1,
                offset: 192,
                size: 64,
                arena_bytes: 192,
            },
        ),
        (
            vec![0, 64],
            Violation::Overlap {
                first: 0,
                second: 1,
                time: 4,
            },
        ),
    ];
    for (offsets, violation) in cases {
        assert_eq!(validate(&spans, &offsets, ALIGN, 192), Err(violation));
    }
    let far = u64::MAX - 63;
    let wraps = Violation::OutOfArena {
        span: 0,
        offset: far,
        size: 100,
        arena_bytes: u64::MAX,
    };
    assert_eq!(validate(&spans, &[far, 0], ALIGN, u64::MAX), Err(wraps));
}
