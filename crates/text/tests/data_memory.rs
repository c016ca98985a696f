//! What preparing and reading data allocate: preparing a bounded amount, reading nothing.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    path::Path,
    sync::atomic::AtomicBool,
};

use tightfit_text::data::{Batches, Options, Rows, TokenFiles, prepare};

#[path = "data/toy.rs"]
#[allow(dead_code, reason = "shared with the other test binary")]
mod toy;

use toy::{Batch, Bytes, Folder, options};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Counts what each thread allocates.
struct Counting;

fn count(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
    ALLOCATIONS.set(ALLOCATIONS.get() + u64::from(bytes > 0));
}

// SAFETY: every call is passed on to the system's allocator as it came; the counters do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    // `realloc` is left to the trait: it allocates, copies and frees, so a moment with both is counted.
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `work` has allocated at one time.
fn peak<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before) as u64)
}

fn prepare_peak(folder: &Folder, name: &str, options: &Options) -> (bool, u64) {
    let files = [folder.path().join(name)];
    let (train, eval) = (folder.create("train"), folder.create("eval"));
    let out = TokenFiles {
        train: &train,
        eval: &eval,
    };
    let stop = AtomicBool::new(false);
    let (result, bytes) = peak(|| prepare(&files, &Bytes { chat: true }, options, out, &mut |_| {}, &stop));
    (result.is_ok(), bytes)
}

/// Memory does not grow with the file.
#[test]
fn preparing_is_bounded_whatever_the_size() {
    let folder = Folder::new();
    let unit = "Some text of some words.\r\n";
    for (name, repeated) in [
        ("a.txt", unit.to_owned()),
        ("a.jsonl", format!("{{\"text\": {unit:?}}}\n")),
    ] {
        let peaks = [1 << 16, 1 << 18].map(|times| {
            folder.write(name, repeated.repeat(times));
            let (done, peak) = prepare_peak(&folder, name, &options(512));
            assert!(done);
            peak
        });
        println!("{name}: {peaks:?} bytes");
        assert!(peaks[1] < 8 << 20, "{name}: {peaks:?}");
        assert!(peaks[1] <= peaks[0] + 4096, "{name}: {peaks:?}");
    }
}

/// Neither does it grow much with a line, or with a row that is far longer than the data.
#[test]
fn hostile_lines_take_memory_in_proportion() {
    let folder = Folder::new();
    const LONG: usize = 4 << 20;
    let files = [
        format!("{{\"text\": \"{}\"}}", "a".repeat(LONG)),
        format!("{{\"text\": \"{}\"}}", "\\u0001".repeat(LONG / 6)),
        // A string where an object or an array should be, of characters that grow when quoted.
        format!("\"{}\"", "\u{7f}".repeat(LONG)),
        format!("{{\"messages\": \"{}\"}}", "\u{7f}".repeat(LONG)),
        format!("{{\"messages\": [\"{}\"]}}", "\u{7f}".repeat(LONG)),
        format!("{{\"{}\": 1}}", "\u{7f}".repeat(LONG)),
        format!("{{\"x\": {}", "[".repeat(LONG)),
        format!(
            "{{\"messages\": [{}",
            "{\"role\":\"\",\"content\":\"\"},".repeat(LONG / 25)
        ),
        format!("{{{}\"text\": \"a\"}}", "\"\":0,".repeat(LONG / 5)),
        format!("{{\"text\": {}}}", "9".repeat(LONG)),
        "x".repeat(3 * (16 << 20)),
        "x\n".repeat(LONG / 2),
    ];
    for (i, file) in files.iter().enumerate() {
        folder.write("a.jsonl", file);
        for seq in [64, 1 << 24] {
            let options = Options {
                skip_bad_lines: true,
                ..options(seq)
            };
            // Rows so long are padded to gigabytes on disk, so only files without a sample are tried with them.
            if seq > 64 && [0, 1, 8].contains(&i) {
                continue;
            }
            let (_, peak) = prepare_peak(&folder, "a.jsonl", &options);
            let times = peak as f64 / file.len() as f64;
            println!("file {i}, seq {seq}: {peak} bytes, {times:.1} times the file");
            assert!(peak <= 16 * file.len() as u64 + (16 << 20), "file {i}: {times}");
        }
    }
}

#[test]
fn filling_a_batch_allocates_nothing() {
    let folder = Folder::new();
    let path = folder.write("a.txt", "Some text of some words.\n".repeat(4000));
    let (train, eval) = (folder.create("train"), folder.create("eval"));
    let out = TokenFiles {
        train: &train,
        eval: &eval,
    };
    let stop = AtomicBool::new(false);
    // Rows longer than what is read at a time.
    prepare(&[path], &Bytes { chat: false }, &options(3000), out, &mut |_| {}, &stop).unwrap();
    let batches = Batches::shuffled(Rows::open(train, Path::new("train")).unwrap(), 2, 1).unwrap();
    let mut batch = Batch::new(batches.token_count());
    let mut buffers = batch.buffers();
    let before = ALLOCATIONS.get();
    let mut counted = 0;
    for index in 0..100 {
        counted += batches.counted(index).unwrap();
        counted += batches.fill(index, &mut buffers).unwrap();
    }
    let allocations = ALLOCATIONS.get() - before;
    assert!(counted > 0);
    assert_eq!(allocations, 0);
    // The counter counts.
    drop(Box::new(0));
    assert!(ALLOCATIONS.get() > before);
}
