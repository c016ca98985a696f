//! What this machine gives a process, and what the process has taken of it.
//!
//! Everything is read from `/proc` and the cgroup file system; other systems than Linux get
//! [`MemoryError::Unsupported`], and a budget has to be passed there.

mod bytes;
mod cgroup;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

pub use bytes::{ParseBytesError, parse_bytes};
pub use cgroup::CgroupLimit;
pub use tightfit_plan::report::format_bytes;

/// Why a memory figure cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Not Linux.
    #[error("reading memory figures is unsupported on this system, pass --budget")]
    Unsupported,
    /// A file of `/proc` or of the cgroup file system cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file does not hold the field it should, or the field is not a number of bytes.
    #[error("{} has no valid `{field}`", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
    },
}

/// The budget that a job gets if none is asked for, and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultBudget {
    /// The budget: the smaller of `available` and what the cgroup leaves, less `margin`.
    pub bytes: u64,
    /// `MemAvailable` of the whole machine.
    pub available: u64,
    /// The tightest limit of this process's cgroups, if there is one.
    pub cgroup: Option<CgroupLimit>,
    /// Left for the rest of the machine: 5 %, at least 256 MiB.
    pub margin: u64,
}

impl DefaultBudget {
    const MIN_MARGIN: u64 = 256 << 20;

    fn new(available: u64, cgroup: Option<CgroupLimit>) -> Self {
        let room = cgroup
            .as_ref()
            .map_or(available, |limit| available.min(limit.remaining()));
        let margin = (room / 20).max(Self::MIN_MARGIN);
        Self {
            bytes: room.saturating_sub(margin),
            available,
            cgroup,
            margin,
        }
    }
}

/// For example `3.55 GiB (cgroup /sys/fs/cgroup/job leaves 3.80 GiB, less a margin of 256.00 MiB)`.
impl fmt::Display for DefaultBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (", format_bytes(self.bytes))?;
        match &self.cgroup {
            Some(limit) if limit.remaining() < self.available => {
                write!(
                    f,
                    "cgroup {} leaves {}",
                    limit.dir.display(),
                    format_bytes(limit.remaining())
                )?;
            }
            _ => write!(f, "{} available", format_bytes(self.available))?,
        }
        write!(f, ", less a margin of {})", format_bytes(self.margin))
    }
}

/// The budget to use if the user names none. It counts memory that is free now, so it is for the process to come: what
/// the calling process already holds is not in it.
///
/// # Errors
/// Those of [`available_bytes`] and [`cgroup_limit`].
pub fn default_budget() -> Result<DefaultBudget, MemoryError> {
    Ok(DefaultBudget::new(available_bytes()?, cgroup_limit()?))
}

/// `MemAvailable`: bytes that the machine can give to new work without swapping, by the kernel's estimate.
///
/// # Errors
/// [`MemoryError`] if `/proc/meminfo` cannot be read or lacks the field (kernels before 3.14).
pub fn available_bytes() -> Result<u64, MemoryError> {
    read_kib_field("/proc/meminfo", "MemAvailable")
}

/// `VmHWM`: the highest resident size of this process so far, mapped file pages included, in bytes.
///
/// `ru_maxrss` would not do: it survives `exec`, so it may report the parent's peak. Since Linux 6.2 the peak is taken
/// from per-CPU counters that lag behind: once memory has been given back, it may read lower than the true peak by up
/// to `max(32, 2 · CPUs)` pages for each CPU (100 KiB seen on 2 CPUs).
///
/// # Errors
/// [`MemoryError`] if `/proc/self/status` cannot be read or lacks the field.
pub fn process_peak_bytes() -> Result<u64, MemoryError> {
    read_kib_field("/proc/self/status", "VmHWM")
}

/// `VmRSS`: the resident size of this process now, mapped file pages included, in bytes.
///
/// # Errors
/// [`MemoryError`] if `/proc/self/status` cannot be read or lacks the field.
pub fn process_resident_bytes() -> Result<u64, MemoryError> {
    read_kib_field("/proc/self/status", "VmRSS")
}

/// Gives what is free of the heap back to the system and forgets the peak so far, after a phase that is over for good (tokenising).
/// Where the system does neither, later figures are larger than they need be.
pub fn end_of_phase() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` may be called at any time.
    unsafe {
        libc::malloc_trim(0)
    };
    // "5" sets VmHWM to VmRSS; see proc_pid_clear_refs(5).
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Bytes of all mapped files (the program and its libraries), whether they are resident or not.
///
/// # Errors
/// [`MemoryError`] if `/proc/self/maps` cannot be read.
pub fn file_bytes() -> Result<u64, MemoryError> {
    Ok(file_mappings(&read(Path::new("/proc/self/maps"))?))
}

/// `RssFile`: bytes of mapped files that are resident.
///
/// # Errors
/// [`MemoryError`] if `/proc/self/status` cannot be read or lacks the field (kernels before 4.5).
pub fn resident_file_bytes() -> Result<u64, MemoryError> {
    read_kib_field("/proc/self/status", "RssFile")
}

/// The bytes that `/proc/PID/maps` shows as mapped from files.
fn file_mappings(maps: &str) -> u64 {
    let sizes = maps.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        // Address, permissions, offset, device, inode, path: an inode of 0 is anonymous.
        let inode = fields.nth(3)?;
        let size = u64::from_str_radix(end, 16)
            .ok()?
            .checked_sub(u64::from_str_radix(start, 16).ok()?)?;
        (inode != "0").then_some(size)
    });
    sizes.sum()
}

/// The tightest memory limit among this process's cgroups (v2 and v1) and their parents: the one that leaves least.
///
/// # Errors
/// [`MemoryError`] if `/proc/self/cgroup`, `/proc/self/mountinfo` or a limit that exists cannot be read. A kernel
/// without cgroups has no limit, which is no error.
pub fn cgroup_limit() -> Result<Option<CgroupLimit>, MemoryError> {
    if !cfg!(target_os = "linux") {
        return Err(MemoryError::Unsupported);
    }
    let Some(cgroups) = read_if_present(Path::new("/proc/self/cgroup"))? else {
        return Ok(None);
    };
    cgroup::tightest(&cgroups, &read(Path::new("/proc/self/mountinfo"))?)
}

fn read_kib_field(path: &str, field: &'static str) -> Result<u64, MemoryError> {
    if !cfg!(target_os = "linux") {
        return Err(MemoryError::Unsupported);
    }
    let path = Path::new(path);
    kib_field(&read(path)?, field).ok_or_else(|| MemoryError::Field {
        path: path.to_owned(),
        field,
    })
}

/// The bytes of a line such as `MemAvailable:   23346400 kB`; the kernel's kB is 1024 bytes (proc(5)).
fn kib_field(text: &str, field: &str) -> Option<u64> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

fn read(path: &Path) -> Result<String, MemoryError> {
    std::fs::read_to_string(path).map_err(|source| MemoryError::Read {
        path: path.to_owned(),
        source,
    })
}

fn read_if_present(path: &Path) -> Result<Option<String>, MemoryError> {
    match read(path) {
        Ok(text) => Ok(Some(text)),
        Err(MemoryError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       24684096 kB\nMemFree:        20459508 kB\nMemAvailable:   23346400 kB\n\
                           HugePages_Total:       0\n";
    const STATUS: &str = "Name:\ttightfit\nVmPeak:\t   10348 kB\nVmHWM:\t    4088 kB\nVmRSS:\t    3076 kB\n";
    const GIB: u64 = 1 << 30;

    #[test]
    fn fields_are_found_and_scaled() {
        assert_eq!(kib_field(MEMINFO, "MemAvailable"), Some(23_346_400 * 1024));
        assert_eq!(kib_field(STATUS, "VmHWM"), Some(4088 * 1024));
        assert_eq!(kib_field(STATUS, "VmRSS"), Some(3076 * 1024));
    }

    #[test]
    fn missing_and_malformed_fields_are_refused() {
        assert_eq!(kib_field(MEMINFO, "Mem"), None);
        assert_eq!(kib_field(MEMINFO, "HugePages_Total"), None, "not a size");
        assert_eq!(kib_field("VmRSS: many kB\n", "VmRSS"), None);
        assert_eq!(
            kib_field("VmRSS: 18446744073709551615 kB\n", "VmRSS"),
            None,
            "overflows"
        );
        let error = MemoryError::Field {
            path: "/proc/meminfo".into(),
            field: "MemAvailable",
        };
        assert_eq!(error.to_string(), "/proc/meminfo has no valid `MemAvailable`");
    }

    #[test]
    fn the_smaller_room_less_the_margin_is_the_budget() {
        let limit = |limit, used| {
            Some(CgroupLimit {
                dir: "/sys/fs/cgroup/job".into(),
                limit,
                used,
            })
        };
        let budget = DefaultBudget::new(20 * GIB, None);
        assert_eq!((budget.bytes, budget.margin), (19 * GIB, GIB));
        assert_eq!(
            budget.to_string(),
            "19.00 GiB (20.00 GiB available, less a margin of 1.00 GiB)"
        );
        let budget = DefaultBudget::new(20 * GIB, limit(5 * GIB, GIB));
        assert_eq!((budget.bytes, budget.margin), (4 * GIB - (256 << 20), 256 << 20));
        assert_eq!(
            budget.to_string(),
            "3.75 GiB (cgroup /sys/fs/cgroup/job leaves 4.00 GiB, less a margin of 256.00 MiB)"
        );
        assert_eq!(DefaultBudget::new(20 * GIB, limit(40 * GIB, GIB)).bytes, 19 * GIB);
        assert_eq!(
            DefaultBudget::new(20 * GIB, limit(GIB, 2 * GIB)).bytes,
            0,
            "over its limit already"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_answers_and_touching_memory_shows() {
        assert!(default_budget().unwrap().bytes < available_bytes().unwrap());
        let before = process_resident_bytes().unwrap();
        let block = std::hint::black_box(vec![1u8; 128 << 20]);
        // Half the block leaves room for what other tests free meanwhile.
        let touched = before + (64 << 20);
        assert!(process_resident_bytes().unwrap() > touched);
        drop(block);
        assert!(process_peak_bytes().unwrap() > touched);
        assert!(process_resident_bytes().unwrap() < touched);
    }

    #[cfg(not(target_os = "linux"))]
    #[test]
    fn elsewhere_the_user_is_asked_for_a_budget() {
        assert!(matches!(default_budget(), Err(MemoryError::Unsupported)));
    }
}
