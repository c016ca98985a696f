//! Pages between memory and a file, past the page cache.
//!
//! Direct I/O (`O_DIRECT`, see open(2)) moves bytes between the device and the memory named, so the kernel caches nothing. It wants
//! file offsets, addresses and lengths aligned, here to [`PAGE`]. Where a file system refuses it, the same pages go through the page
//! cache in small pieces, and each piece is written out and dropped before the next.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fcntl_setfl, fdatasync};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};

/// What offsets in the file and addresses in memory are multiples of, in bytes: what direct I/O asks for on every device in use.
pub const PAGE: usize = 4096;

/// Most bytes of one direct call. The kernel keeps the device's queue full from one large request, and every end of a request drains
/// it: as few as the system allows (one call moves less than 2 GiB) are fastest, as fast as two threads with smaller ones.
const DIRECT_PIECE: usize = 1 << 30;
/// Most bytes of one call through the page cache, which holds as many at a time.
const BUFFERED_PIECE: usize = 8 << 20;

/// Where the last bytes of a buffer pass through: less than a page, and only whole ones go to the file.
#[repr(align(4096))]
pub(super) struct Bounce([u8; PAGE]);

impl Bounce {
    pub(super) fn new() -> Self {
        Self([0; PAGE])
    }
}

/// Why bytes did not get where they should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The system said so.
    #[error("{0}")]
    System(#[from] Errno),
    /// No more bytes came, or went.
    #[error("it ends there: something has cut it short")]
    Ended,
    /// There is no such place.
    #[error("it has {0} bytes")]
    Outside(u64),
}

/// A file that is read and written in whole pages.
#[derive(Debug)]
pub(super) struct PageFile {
    file: OwnedFd,
    direct: bool,
}

impl PageFile {
    /// Takes an open file of at least one page, the first of which it overwrites. `direct` asks for direct I/O, which is then used if
    /// a page can be written and read that way: some file systems agree when asked and refuse when used.
    ///
    /// # Errors
    /// The file's flags cannot be read or set.
    pub(super) fn new(file: OwnedFd, direct: bool) -> Result<Self, Errno> {
        let flags = fcntl_getfl(&file)?;
        let mut page = Bounce::new();
        if direct
            && fcntl_setfl(&file, flags | OFlags::DIRECT).is_ok()
            && retry_on_intr(|| pwrite(&file, &page.0, 0)) == Ok(PAGE)
            && retry_on_intr(|| pread(&file, &mut page.0[..], 0)) == Ok(PAGE)
        {
            return Ok(Self { file, direct: true });
        }
        fcntl_setfl(&file, flags.difference(OFlags::DIRECT))?;
        // No read ahead: nobody would drop those pages. Advice that is not taken costs memory, no more.
        let _ = fadvise(&file, 0, None, Advice::Random);
        Ok(Self { file, direct: false })
    }

    pub(super) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Writes `memory` at `offset`. Both start at a page; what follows the last byte in its page of the file is lost.
    pub(super) fn write(&self, offset: u64, memory: &[u8], bounce: &mut Bounce) -> Result<(), Failure> {
        let (pages, tail) = memory.split_at(memory.len() / PAGE * PAGE);
        self.write_pages(offset, pages)?;
        if !tail.is_empty() {
            bounce.0[..tail.len()].copy_from_slice(tail);
            self.write_pages(offset + pages.len() as u64, &bounce.0)?;
        }
        Ok(())
    }

    /// Reads all of `memory` from `offset`. Both start at a page.
    pub(super) fn read(&self, offset: u64, memory: &mut [u8], bounce: &mut Bounce) -> Result<(), Failure> {
        let (pages, tail) = memory.split_at_mut(memory.len() / PAGE * PAGE);
        self.read_pages(offset, pages)?;
        if !tail.is_empty() {
            self.read_pages(offset + pages.len() as u64, &mut bounce.0)?;
            tail.copy_from_slice(&bounce.0[..tail.len()]);
        }
        Ok(())
    }

    fn write_pages(&self, offset: u64, pages: &[u8]) -> Result<(), Failure> {
        self.in_pieces(pages.len(), |piece| {
            let at = offset + piece.start as u64;
            let written = pwrite(&self.file, &pages[piece], at)?;
            if !self.direct {
                // Dirty pages cannot be dropped.
                fdatasync(&self.file)?;
                self.forget(at, written);
            }
            Ok(written)
        })?;
        self.forget_whole(offset, pages.len());
        Ok(())
    }

    fn read_pages(&self, offset: u64, pages: &mut [u8]) -> Result<(), Failure> {
        self.in_pieces(pages.len(), |piece| {
            let at = offset + piece.start as u64;
            let read = pread(&self.file, &mut pages[piece], at)?;
            if !self.direct {
                self.forget(at, read);
            }
            Ok(read)
        })?;
        self.forget_whole(offset, pages.len());
        Ok(())
    }

    /// Drops once more what was dropped piece by piece: the kernel keeps pages in groups, and drops none of which a piece had a part only.
    fn forget_whole(&self, offset: u64, bytes: usize) {
        if !self.direct && bytes > BUFFERED_PIECE {
            self.forget(offset, bytes);
        }
    }

    /// Drops clean pages from the page cache. What stays costs memory, no more, so there is nothing to do if it fails.
    fn forget(&self, offset: u64, bytes: usize) {
        if let Some(bytes) = NonZeroU64::new(bytes as u64) {
            let _ = fadvise(&self.file, offset, Some(bytes), Advice::DontNeed);
        }
    }

    /// Calls `step` with ranges until it has moved `len` bytes, a multiple of pages. It says how many of the range it has moved, from
    /// the start.
    fn in_pieces(&self, len: usize, mut step: impl FnMut(Range<usize>) -> Result<usize, Errno>) -> Result<(), Failure> {
        let piece = if self.direct { DIRECT_PIECE } else { BUFFERED_PIECE };
        let mut done = 0;
        while done < len {
            let moved = retry_on_intr(|| step(done..len.min(done + piece)))?;
            // A page that was moved in part is moved again, as the next call must start at one.
            let pages = moved / PAGE * PAGE;
            if pages == 0 {
                return Err(Failure::Ended);
            }
            done += pages;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSliceMut;
    use std::os::fd::AsRawFd;

    use rustix::fs::{Mode, ftruncate, open, unlink};
    use rustix::io::{ReadWriteFlags, preadv2};

    use super::*;

    const BYTES: usize = (20 << 20) + 5000;

    /// A file on the disk that this program is on.
    fn page_file(name: &str, direct: bool) -> PageFile {
        let path = std::env::current_exe().unwrap().with_extension(name);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let file = open(&path, flags, Mode::RUSR | Mode::WUSR).unwrap();
        unlink(&path).unwrap();
        ftruncate(&file, (PAGE + BYTES.next_multiple_of(PAGE)) as u64).unwrap();
        PageFile::new(file, direct).unwrap()
    }

    /// How many pages of `pages` are in the page cache: those that can be read without waiting, as a hole can. None if it cannot be asked.
    fn cached_pages(file: &PageFile, pages: Range<usize>) -> Option<usize> {
        let path = format!("/proc/self/fd/{}", file.file.as_raw_fd());
        let file = open(path, OFlags::RDONLY, Mode::empty()).unwrap();
        fadvise(&file, 0, None, Advice::Random).unwrap();
        let mut page = [0; PAGE];
        let mut count = 0;
        for number in pages {
            let offset = (number * PAGE) as u64;
            let mut into = [IoSliceMut::new(&mut page)];
            match preadv2(&file, &mut into, offset, ReadWriteFlags::NOWAIT) {
                Ok(_) => count += 1,
                Err(Errno::AGAIN) => {}
                Err(Errno::OPNOTSUPP) => return None,
                Err(error) => panic!("{error}"),
            }
        }
        Some(count)
    }

    /// Asking brings pages in, so each file is asked once.
    fn assert_nothing_cached(file: &PageFile, case: &str) {
        let pages = cached_pages(file, 1..1 + BYTES.div_ceil(PAGE));
        assert!(pages.is_none_or(|pages| pages == 0), "{pages:?} pages, {case}");
    }

    #[test]
    fn pages_go_there_and_back_and_none_stays_in_the_cache() {
        // Aligned, as the arena's are, by taking a page more than is needed.
        let mut memory = vec![0_u8; BYTES + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        let memory = &mut memory[start..start + BYTES];
        let byte = |index: usize| (index % 251) as u8;
        let mut bounce = Bounce::new();
        for (name, direct) in [("direct", true), ("buffered", false)] {
            for (index, place) in memory.iter_mut().enumerate() {
                *place = byte(index);
            }
            let [written, read] = ["written", "read"].map(|last| page_file(&format!("{name}-{last}"), direct));
            assert!(direct || !read.is_direct());
            written.write(PAGE as u64, memory, &mut bounce).unwrap();
            read.write(PAGE as u64, memory, &mut bounce).unwrap();
            memory.fill(0);
            read.read(PAGE as u64, memory, &mut bounce).unwrap();
            assert!(
                memory.iter().enumerate().all(|(index, &place)| place == byte(index)),
                "{name}"
            );
            assert_nothing_cached(&written, name);
            assert_nothing_cached(&read, name);
        }
    }

    #[test]
    fn cached_pages_are_counted() {
        let file = page_file("cached", false);
        pwrite(&file.file, &[1; 10 * PAGE], 0).unwrap();
        assert!(cached_pages(&file, 0..10).is_none_or(|pages| pages == 10));
    }
}
