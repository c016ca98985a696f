//! Whatever the bytes: no panic, and no more memory than the file's size allows.

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    path::Path,
};

use common::{GgufWriter, array, safetensors, small_gguf, small_quantized, small_safetensors, string};
use proptest::prelude::*;
use tightfit_format::{Entry, FormatError, gguf, index};

/// Counts the bytes of the thread that asks.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    LIVE.set(LIVE.get() + bytes);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: everything is passed on to the system's allocator; the counters are plain cells that never allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `f` and gives its result with the most bytes that lived at one time.
fn peak<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = f();
    (result, (PEAK.get() - before) as usize)
}

fn parse_gguf(bytes: &[u8]) -> Result<Vec<Entry>, FormatError> {
    let header = gguf::parse(bytes, bytes.len() as u64, Path::new("f"))?;
    Ok(header.tensors.into_values().collect())
}

fn parse_safetensors(bytes: &[u8]) -> Result<Vec<Entry>, FormatError> {
    let tensors = tightfit_format::safetensors::parse(bytes, bytes.len() as u64, Path::new("f"))?;
    Ok(tensors.into_values().collect())
}

/// The promise is 16 times the file plus 16 MiB; 16 KiB instead keep it from being kept by small files in any case.
fn check(bytes: &[u8], parse: fn(&[u8]) -> Result<Vec<Entry>, FormatError>) -> Result<(), TestCaseError> {
    let (result, memory) = peak(|| parse(bytes));
    prop_assert!(
        memory <= 16 * bytes.len() + (16 << 10),
        "{memory} bytes for a file of {}",
        bytes.len()
    );
    match result {
        // What a catalogue promises to those who read by it.
        Ok(mut entries) => {
            entries.sort_by_key(|e| (e.offset(), e.bytes()));
            for pair in entries.windows(2) {
                prop_assert!(pair[0].offset() + pair[0].bytes() <= pair[1].offset());
            }
            for entry in &entries {
                prop_assert!(entry.offset() + entry.bytes() <= bytes.len() as u64);
                prop_assert!(entry.row_bytes() <= entry.bytes() || entry.elements() == 0 || !entry.encoding.decodes());
            }
        }
        Err(error) => prop_assert!(error.to_string().starts_with("f: ")),
    }
    Ok(())
}

/// Overwrites up to four places, or cuts the file.
fn mutate(mut bytes: Vec<u8>, edits: Vec<(prop::sample::Index, Vec<u8>)>, cut: Option<prop::sample::Index>) -> Vec<u8> {
    for (at, new) in edits {
        let at = at.index(bytes.len());
        for (old, new) in bytes[at..].iter_mut().zip(new) {
            *old = new;
        }
    }
    if let Some(cut) = cut {
        bytes.truncate(cut.index(bytes.len()));
    }
    bytes
}

/// Bytes that a number of a file is likely to be overwritten with by someone who means harm, or any.
fn edit() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        any::<u8>().prop_map(|b| vec![b]),
        any::<u64>().prop_map(|n| n.to_le_bytes().to_vec()),
        (0u32..64).prop_map(|shift| (1u64 << shift).to_le_bytes().to_vec()),
        (0u32..44).prop_map(|n| n.to_le_bytes().to_vec()),
        Just(u64::MAX.to_le_bytes().to_vec()),
        prop::sample::select(vec!["[", "{", "\"", "9", "-", "0,", "99999999999999999999", "a\":"])
            .prop_map(|s| s.into()),
    ]
}

fn edits() -> impl Strategy<Value = Vec<(prop::sample::Index, Vec<u8>)>> {
    prop::collection::vec((any::<prop::sample::Index>(), edit()), 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_gguf(edits in edits(), cut: Option<prop::sample::Index>) {
        check(&mutate(small_gguf(), edits, cut), parse_gguf)?;
    }

    #[test]
    fn mutated_safetensors(edits in edits(), cut: Option<prop::sample::Index>) {
        check(&mutate(small_safetensors(), edits, cut), parse_safetensors)?;
    }

    #[test]
    fn mutated_quantized(edits in edits(), cut: Option<prop::sample::Index>) {
        check(&mutate(small_quantized(), edits, cut), parse_safetensors)?;
    }

    /// What we accept, the reference accepts: with as many tensors.
    #[test]
    fn no_more_lenient_than_the_reference(edits in edits(), cut: Option<prop::sample::Index>) {
        let bytes = mutate(small_safetensors(), edits, cut);
        if let Ok(ours) = parse_safetensors(&bytes) {
            let reference = ::safetensors::SafeTensors::read_metadata(&bytes);
            let (_, reference) = reference.map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(reference.tensors().len(), ours.len());
        }
    }

    #[test]
    fn mutated_index(edits in edits(), cut: Option<prop::sample::Index>) {
        let json = br#"{"metadata":{"total_size":7},"weight_map":{"a":"x.safetensors","b":"y.safetensors","c":"x.safetensors"}}"#;
        let bytes = mutate(json.to_vec(), edits, cut);
        let (result, memory) = peak(|| index::parse(&bytes, Path::new("f")));
        prop_assert!(memory <= 16 * bytes.len() + (16 << 10));
        if let Ok(index) = result {
            prop_assert!(index.shards.iter().all(|s| Path::new(s).file_name().is_some_and(|name| name == s.as_str())));
        }
    }
}

/// Valid files that cost the most memory per byte: many of the smallest items.
#[test]
fn the_densest_files_stay_within_16_times_their_size() {
    const N: usize = 60_000;
    let name = |i: usize| {
        let digits = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
        let text: Vec<u8> = [i / 62 / 62, i / 62 % 62, i % 62].map(|d| digits[d]).to_vec();
        String::from_utf8(text).unwrap()
    };
    let writer = GgufWriter::default;
    let gguf: [(&str, Vec<u8>); 6] = [
        (
            "tensors",
            (0..N).fold(writer(), |w, i| w.tensor_at(name(i), &[0], 0, 0)).build(),
        ),
        ("keys", (0..N).fold(writer(), |w, i| w.key(name(i), 7, &[0])).build()),
        (
            "bytes",
            writer().key("k", 9, &array(0, 1 << 20, &vec![7; 1 << 20])).build(),
        ),
        (
            "empty strings",
            writer().key("k", 9, &array(8, N as u64, &string("").repeat(N))).build(),
        ),
        (
            "strings",
            writer()
                .key("k", 9, &array(8, N as u64, &string("x").repeat(N)))
                .build(),
        ),
        (
            "arrays",
            writer()
                .key("k", 9, &array(9, N as u64, &array(0, 1, &[1]).repeat(N)))
                .build(),
        ),
    ];
    for (what, bytes) in gguf {
        let (result, memory) = peak(|| gguf::parse(bytes.as_slice(), bytes.len() as u64, Path::new("f")));
        result.unwrap();
        assert!(
            memory <= 16 * bytes.len(),
            "{what}: {:.1} times",
            memory as f64 / bytes.len() as f64
        );
    }

    let items = |item: &dyn Fn(usize) -> String| (0..N).map(item).collect::<Vec<_>>().join(",");
    let tensors = items(&|i| {
        format!(
            "\"{}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
            name(i)
        )
    });
    let bytes = safetensors(&format!("{{{tensors}}}"), &[]);
    let (result, memory) = peak(|| parse_safetensors(&bytes).map(drop));
    result.unwrap();
    assert!(
        memory <= 16 * bytes.len(),
        "safetensors: {:.1} times",
        memory as f64 / bytes.len() as f64
    );

    let tensors = items(&|i| {
        format!(
            "\"{}\":{{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[{},{}]}}",
            name(i),
            5 * i,
            5 * i + 5
        )
    });
    let list = items(&|i| {
        format!(
            "\\\"{}\\\":{{\\\"format\\\":\\\"int8\\\",\\\"shape\\\":[1,1]}}",
            name(i)
        )
    });
    let header = format!("{{\"__metadata__\":{{\"tightfit.quantized\":\"{{{list}}}\"}},{tensors}}}");
    let bytes = safetensors(&header, &vec![0; 5 * N]);
    let (result, memory) = peak(|| parse_safetensors(&bytes).map(drop));
    result.unwrap();
    assert!(
        memory <= 16 * bytes.len(),
        "quantised: {:.1} times",
        memory as f64 / bytes.len() as f64
    );

    let json = format!(
        "{{\"weight_map\":{{{}}}}}",
        items(&|i| format!("\"{}\":\"{}\"", name(i), name(i)))
    );
    let (result, memory) = peak(|| index::parse(json.as_bytes(), Path::new("f")).map(drop));
    result.unwrap();
    assert!(
        memory <= 16 * json.len(),
        "index: {:.1} times",
        memory as f64 / json.len() as f64
    );
}
