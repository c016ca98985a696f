//! The scratch file and its transfers, on the disk that the build folder is on.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tightfit_exec::Arena;
use tightfit_exec::tier::{
    Direction, Failure, Moved, PAGE, Scratch, ScratchError, Ticket, Transfer, TransferError, Transfers, measure_link,
};

const MIB: u64 = 1 << 20;

/// A new folder, so that a test finds its own file among those of the process.
fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tier-{test}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The unlinked file in a folder, opened once more.
fn reopen(folder: &Path) -> File {
    let links = fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let ours = |link: &PathBuf| fs::read_link(link).is_ok_and(|target| target.starts_with(folder));
    let link = links.into_iter().find(ours).unwrap();
    File::options().read(true).write(true).open(link).unwrap()
}

fn transfers(folder: &Path, bytes: u64, capacity: usize) -> Transfers {
    Transfers::start(Scratch::create(folder, bytes).unwrap(), capacity).unwrap()
}

/// A transfer between the arena's `at` and the file's `offset`.
fn submit(transfers: &Transfers, direction: Direction, arena: &mut Arena, at: u64, bytes: u64, offset: u64) -> Ticket {
    assert!(at + bytes <= arena.len());
    let transfer = Transfer {
        direction,
        // SAFETY: inside of the arena.
        memory: unsafe { arena.as_ptr().add(at as usize) },
        bytes,
        offset,
    };
    // SAFETY: tests keep the arena until after the transfers, and use its other parts meanwhile.
    unsafe { transfers.submit(transfer) }
}

/// Numbers below `end`, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

#[test]
fn what_was_written_is_read_and_neighbours_stay() {
    let folder = folder("random");
    let (page, pages) = (PAGE as u64, 64);
    let transfers = transfers(&folder, pages * page, 3);
    let mut arena = Arena::map(pages * page).unwrap();
    let mut random = Random(1);
    // None where the rest of a page was overwritten.
    let mut file = vec![Some(0); (pages * page) as usize];
    for round in 0..400 {
        let at = random.below(pages);
        let offset = random.below(pages);
        let most = (pages - at.max(offset)) * page;
        let bytes = match round % 3 {
            0 => random.below(most / page + 1) * page,
            1 => random.below(page.min(most)),
            _ => random.below(most + 1),
        };
        let (at, offset) = (at * page, offset * page);
        let memory = arena.slice_mut::<u8>(0..pages * page);
        memory.fill_with(|| random.below(256) as u8);
        let before = memory.to_vec();
        let (in_memory, in_file) = (
            at as usize..(at + bytes) as usize,
            offset as usize..(offset + bytes) as usize,
        );
        if random.below(2) == 0 {
            let ticket = submit(&transfers, Direction::ToFile, &mut arena, at, bytes, offset);
            transfers.wait(ticket).unwrap();
            assert!(arena.slice::<u8>(0..pages * page) == before, "memory was written");
            file[in_file.start..in_file.end.next_multiple_of(PAGE)].fill(None);
            for (kept, &byte) in file[in_file].iter_mut().zip(&before[in_memory]) {
                *kept = Some(byte);
            }
        } else {
            let ticket = submit(&transfers, Direction::FromFile, &mut arena, at, bytes, offset);
            transfers.wait(ticket).unwrap();
            let after = arena.slice::<u8>(0..pages * page);
            assert!(after[..in_memory.start] == before[..in_memory.start]);
            assert!(after[in_memory.end..] == before[in_memory.end..]);
            for (kept, &byte) in file[in_file].iter().zip(&after[in_memory]) {
                assert_eq!(kept.unwrap_or(byte), byte, "round {round}: {bytes} bytes at {offset}");
            }
        }
    }
}

#[test]
fn transfers_are_made_in_order() {
    let folder = folder("order");
    // More than fit the ring, so that `submit` waits as well.
    let transfers = transfers(&folder, MIB, 4);
    let mut arena = Arena::map(66 * MIB).unwrap();
    for number in 0..64 {
        arena
            .slice_mut::<u8>(number * MIB..(number + 1) * MIB)
            .fill(number as u8);
    }
    for number in 0..64 {
        submit(&transfers, Direction::ToFile, &mut arena, number * MIB, MIB, 0);
        if number == 31 {
            submit(&transfers, Direction::FromFile, &mut arena, 64 * MIB, MIB, 0);
        }
    }
    let last = submit(&transfers, Direction::FromFile, &mut arena, 65 * MIB, MIB, 0);
    transfers.wait(last).unwrap();
    assert!(arena.slice::<u8>(64 * MIB..65 * MIB).iter().all(|&byte| byte == 31));
    assert!(arena.slice::<u8>(65 * MIB..66 * MIB).iter().all(|&byte| byte == 63));
    let (read, written) = (2 * MIB, 64 * MIB);
    assert_eq!(transfers.moved(), Moved { read, written });
    assert!(transfers.waited() > Duration::ZERO);
}

#[test]
fn nothing_is_waited_for_twice() {
    let folder = folder("tickets");
    let transfers = transfers(&folder, MIB, 4);
    let mut arena = Arena::map(MIB).unwrap();
    transfers.wait(Ticket::default()).unwrap();
    transfers.drain().unwrap();
    assert_eq!(transfers.waited(), Duration::ZERO);
    let first = submit(&transfers, Direction::ToFile, &mut arena, 0, MIB, 0);
    let second = submit(&transfers, Direction::ToFile, &mut arena, 0, MIB, 0);
    assert!(first < second);
    transfers.wait(second).unwrap();
    let waited = transfers.waited();
    transfers.wait(first).unwrap();
    transfers.drain().unwrap();
    assert_eq!(transfers.waited(), waited);
}

#[test]
fn slices_go_there_and_back() {
    let folder = folder("slices");
    let transfers = transfers(&folder, 2 * MIB, 1);
    let mut arena = Arena::map(2 * MIB).unwrap();
    arena.slice_mut::<u32>(0..400_000).fill(7);
    transfers.write(8192, arena.slice::<u8>(0..400_000)).unwrap();
    transfers.read(8192, arena.slice_mut::<u8>(MIB..MIB + 400_000)).unwrap();
    assert!(arena.slice::<u32>(MIB..MIB + 400_000).iter().all(|&word| word == 7));
}

#[test]
#[should_panic(expected = "does not start at a page")]
fn memory_starts_at_a_page() {
    let folder = folder("unaligned");
    let mut arena = Arena::map(MIB).unwrap();
    let _ = transfers(&folder, MIB, 1).read(0, arena.slice_mut::<u8>(512..1024));
}

#[test]
fn the_first_error_stays() {
    let folder = folder("outside");
    let transfers = transfers(&folder, MIB, 8);
    let mut arena = Arena::map(MIB).unwrap();
    arena.slice_mut::<u8>(0..MIB).fill(9);
    submit(&transfers, Direction::ToFile, &mut arena, 0, MIB, 0);
    let error = transfers.write(MIB - 4096, arena.slice(0..4097)).unwrap_err();
    let expected = TransferError {
        direction: Direction::ToFile,
        offset: MIB - 4096,
        bytes: 4097,
        failure: Failure::Outside(MIB),
    };
    assert_eq!(error, expected);
    assert_eq!(
        error.to_string(),
        "cannot write the scratch file (4097 bytes at byte 1044480): it has 1048576 bytes"
    );
    // Where the reader is not reached, nothing is read.
    let memory = arena.slice_mut::<u8>(0..MIB);
    memory.fill(5);
    assert_eq!(transfers.read(0, memory), Err(expected));
    assert!(memory.iter().all(|&byte| byte == 5));
    assert_eq!(transfers.drain(), Err(expected));
    let (read, written) = (0, MIB);
    assert_eq!(transfers.moved(), Moved { read, written });
    assert_eq!(reopen(&folder).metadata().unwrap().len(), MIB);
}

#[test]
fn an_offset_may_not_wrap() {
    let folder = folder("wrap");
    let transfers = transfers(&folder, MIB, 1);
    let mut arena = Arena::map(MIB).unwrap();
    let end = u64::MAX - 4095;
    let error = transfers.read(end, arena.slice_mut(0..MIB)).unwrap_err();
    assert_eq!(error.failure, Failure::Outside(MIB));
}

#[test]
fn a_file_cut_short_is_an_error() {
    let folder = folder("cut");
    let transfers = transfers(&folder, MIB, 2);
    let mut arena = Arena::map(MIB).unwrap();
    reopen(&folder).set_len(MIB / 2 + 100).unwrap();
    let error = transfers.read(0, arena.slice_mut(0..MIB)).unwrap_err();
    assert_eq!((error.offset, error.failure), (0, Failure::Ended));
}

#[test]
fn the_file_has_no_name_and_all_its_space() {
    let folder = folder("space");
    let scratch = Scratch::create(&folder, 5 * MIB + 1).unwrap();
    assert_eq!(scratch.bytes(), 5 * MIB + 4096);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    let file = reopen(&folder).metadata().unwrap();
    assert_eq!(file.len(), scratch.bytes());
    assert!(file.blocks() * 512 >= scratch.bytes(), "{} blocks", file.blocks());
}

#[test]
fn memory_is_no_lower_tier() {
    let folder = Path::new("/dev/shm");
    if !folder.exists() {
        return;
    }
    let error = Scratch::create(folder, MIB).unwrap_err();
    assert!(matches!(error, ScratchError::InMemory { kind: "tmpfs", .. }));
    assert!(error.to_string().contains("--scratch DIR"));
}

#[test]
fn a_disk_that_is_too_small_is_named() {
    let folder = folder("full");
    for bytes in [1 << 50, u64::MAX] {
        let error = Scratch::create(&folder, bytes).unwrap_err();
        assert!(matches!(&error, ScratchError::Space { needed, free, .. } if *needed >= bytes && *free < 1 << 50));
    }
    let error = Scratch::create(&folder, 1 << 50).unwrap_err().to_string();
    assert!(
        error.contains("needs 1024.00 TiB, and `") && error.contains("--scratch DIR"),
        "{error}"
    );
    let error = Scratch::create(&folder.join("missing"), MIB).unwrap_err();
    assert!(matches!(error, ScratchError::Folder { .. }), "{error}");
}

#[test]
fn dropping_abandons_what_has_not_begun() {
    let folder = folder("drop");
    let mut arena = Arena::map(64 * MIB).unwrap();
    arena.slice_mut::<u8>(0..64 * MIB).fill(1);
    let transfers = transfers(&folder, 65 * MIB, 256);
    // Seconds of work on the fastest disks.
    for _ in 0..255 {
        submit(&transfers, Direction::ToFile, &mut arena, 0, 64 * MIB, 0);
    }
    submit(&transfers, Direction::ToFile, &mut arena, 0, MIB, 64 * MIB);
    let file = reopen(&folder);
    drop(transfers);
    let mut last = [7];
    file.read_exact_at(&mut last, 64 * MIB).unwrap();
    assert_eq!(last, [0], "the last transfer was made");
}

#[test]
fn a_link_has_a_speed() {
    let link = measure_link(&folder("link"), 64 * MIB).unwrap();
    assert!(link.read > 1e5 && link.read.is_finite(), "{link:?}");
    assert!(link.write > 1e5 && link.write.is_finite(), "{link:?}");
}
