//! What `tightfit calibrate` has measured, kept for each machine: a small file in the user's cache folder.
//!
//! Predictions need it, results do not: a file that is not there, damaged or of another machine means the figures that are assumed
//! for a common server, and a note that says so.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tightfit_cpu::Profile;
use tightfit_cpu::simd::Isa;
use tightfit_exec::checkpoint;

use crate::failure::Failure;
use crate::input::read_regular;

/// Raised when the file changes its meaning.
const SCHEMA_VERSION: u32 = 1;
/// Most bytes of the file.
const MAX_FILE: u64 = 1 << 16;
/// Longest part of a file's name that is of the processor's.
const MAX_NAME: usize = 64;

/// What figures are of: they hold for no other processor, instruction set or number of threads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor, as the system names it.
    pub cpu: String,
    /// The instruction set of the kernels.
    pub isa: String,
    /// Threads that compute.
    pub threads: usize,
}

impl Machine {
    /// This machine.
    pub fn this(isa: Isa, threads: usize) -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").ok().as_deref().and_then(model_name);
        Self {
            cpu: cpu.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            isa: isa.name().to_owned(),
            threads,
        }
    }

    /// The file's name: of letters, digits and dashes, whatever the processor is called.
    fn file_name(&self) -> String {
        let mut name = String::new();
        for c in self.cpu.chars().take(MAX_NAME) {
            match c.is_ascii_alphanumeric() {
                true => name.push(c.to_ascii_lowercase()),
                false if !name.ends_with('-') => name.push('-'),
                false => {}
            }
        }
        format!("{}-{}-{}t.json", name.trim_matches('-'), self.isa, self.threads)
    }
}

/// The processor's name in `/proc/cpuinfo`, where it has one (proc(5)).
fn model_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    let (_, name) = line.split_once(':')?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// The file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    schema_version: u32,
    machine: Machine,
    profile: Profile,
}

/// The figures that predictions are made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// They.
    pub profile: Profile,
    /// Whether they were measured here; if not, they are assumed.
    pub measured: bool,
    /// Why a file that is there was not used.
    pub note: Option<String>,
}

/// What was measured for this instruction set and number of threads on this machine, or what is assumed.
pub fn for_machine(isa: Isa, threads: usize) -> Calibration {
    let assumed = Calibration {
        profile: Profile::assumed(isa, threads),
        measured: false,
        note: None,
    };
    match folder() {
        Some(folder) => read(&folder, &Machine::this(isa, threads), assumed),
        None => assumed,
    }
}

fn read(folder: &Path, machine: &Machine, assumed: Calibration) -> Calibration {
    let path = folder.join(machine.file_name());
    let note = |why: &dyn std::fmt::Display| Calibration {
        note: Some(format!(
            "{} is not used: {why}; `tightfit calibrate` makes it anew",
            path.display()
        )),
        ..assumed.clone()
    };
    let text = match read_regular(&path, MAX_FILE) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return assumed,
        Err(error) => return note(&error),
    };
    match serde_json::from_str::<Kept>(&text) {
        Err(error) => note(&error),
        Ok(kept) if kept.schema_version != SCHEMA_VERSION => {
            note(&format_args!("it is of version {}", kept.schema_version))
        }
        Ok(kept) if kept.machine != *machine => note(&"it is of another machine"),
        Ok(kept) if !kept.profile.is_valid() => note(&"it has a speed that is no positive number"),
        Ok(kept) => Calibration {
            profile: kept.profile,
            measured: true,
            note: None,
        },
    }
}

/// `$XDG_CACHE_HOME/tightfit`, or `~/.cache/tightfit`, by the XDG base directory specification: a relative path is ignored.
pub fn folder() -> Option<PathBuf> {
    let absolute = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("tightfit"))
}

/// The folder, made if need be.
///
/// # Errors
/// There is no place for it, or it cannot be made.
pub fn make_folder() -> Result<PathBuf, Failure> {
    let none = || io::Error::new(ErrorKind::NotFound, "neither XDG_CACHE_HOME nor HOME names a folder");
    let folder = folder().ok_or_else(none);
    let made = folder.and_then(|folder| {
        fs::create_dir_all(&folder)
            .map(|()| folder.clone())
            .map_err(|error| named(&folder, &error))
    });
    made.map_err(|source| Failure::Write {
        what: "what is measured".to_owned(),
        source,
    })
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Keeps figures of a machine in that folder, whole or not at all; the file.
///
/// # Errors
/// It cannot be written.
pub fn save(folder: &Path, machine: &Machine, profile: &Profile) -> Result<PathBuf, Failure> {
    let path = folder.join(machine.file_name());
    let kept = Kept {
        schema_version: SCHEMA_VERSION,
        machine: machine.clone(),
        profile: *profile,
    };
    checkpoint::replace(&path, |mut file| {
        let json = serde_json::to_string_pretty(&kept)?;
        file.write_all(json.as_bytes())?;
        file.write_all(b"\n")
    })?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(threads: usize) -> Machine {
        Machine {
            cpu: "A (fast) CPU @ 3.00GHz / ../..".to_owned(),
            isa: "avx2".to_owned(),
            threads,
        }
    }

    fn empty_folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("tightfit-calibration-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn assumed() -> Calibration {
        Calibration {
            profile: Profile::assumed(Isa::Avx2, 3),
            measured: false,
            note: None,
        }
    }

    #[test]
    fn what_is_saved_is_read_to_the_bit_and_for_that_machine_only() {
        let folder = empty_folder("trip");
        assert_eq!(read(&folder, &machine(3), assumed()), assumed(), "nothing is there");
        let profile = Profile {
            product_flops: 1e11 / 3.0,
            ..assumed().profile
        };
        let path = save(&folder, &machine(3), &profile).unwrap();
        assert_eq!(path.file_name().unwrap(), "a-fast-cpu-3-00ghz-avx2-3t.json");
        let found = read(&folder, &machine(3), assumed());
        assert_eq!((found.profile, found.measured, found.note), (profile, true, None));
        assert_eq!(read(&folder, &machine(2), assumed()), assumed(), "other threads");
        let others = Machine {
            cpu: "a fast CPU  3.00GHz".to_owned(),
            ..machine(3)
        };
        assert_eq!(others.file_name(), machine(3).file_name());
        let note = read(&folder, &others, assumed()).note.unwrap();
        assert!(note.contains("another machine"), "{note}");
        let names: Vec<_> = fs::read_dir(&folder).unwrap().collect();
        assert_eq!(names.len(), 1, "nothing but the file stays: {names:?}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn damaged_files_mean_the_assumed_figures_and_a_note() {
        let folder = empty_folder("damage");
        let path = save(&folder, &machine(3), &assumed().profile).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        let damaged = [
            String::new(),
            whole[..whole.len() / 2].to_owned(),
            "[".repeat(50_000),
            whole.replace("\"schema_version\": 1", "\"schema_version\": 2"),
            whole.replace("\"product_flops\": ", "\"product_flops\": -"),
            whole.replace("\"product_flops\": ", "\"flops\": "),
            format!("{whole}{}", " ".repeat(1 << 17)),
        ];
        for text in damaged {
            assert_ne!(text, whole);
            fs::write(&path, &text).unwrap();
            let found = read(&folder, &machine(3), assumed());
            let note = found.note.unwrap();
            assert!(note.contains(path.to_str().unwrap()), "{note}");
            assert_eq!((found.profile, found.measured), (assumed().profile, false));
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(read(&folder, &machine(3), assumed()).note.is_some(), "a folder");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn processors_are_named_as_the_system_names_them() {
        assert_eq!(
            model_name("processor\t: 0\nmodel name\t: AMD EPYC\nflags\t: fpu\n").as_deref(),
            Some("AMD EPYC")
        );
        assert_eq!(model_name("processor\t: 0\nBogoMIPS\t: 50\n"), None);
    }
}
