//! Memory limits of control groups, version 2 and version 1.
//!
//! `/proc/self/cgroup` names this process's groups, `/proc/self/mountinfo` where their file systems are (cgroups(7),
//! proc_pid_mountinfo(5)). A group's limit binds all groups below it, so every directory up to the mount is read.

use std::path::{Path, PathBuf};

use super::{MemoryError, read, read_if_present};

/// A cgroup's memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupLimit {
    /// The group's directory.
    pub dir: PathBuf,
    /// Bytes that the group's processes may use together.
    pub limit: u64,
    /// Bytes that they use now and that the kernel cannot simply take back: usage less inactive file pages.
    pub used: u64,
}

impl CgroupLimit {
    /// Bytes that the limit leaves.
    pub fn remaining(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// The names of one version's files.
struct Layout {
    limit: &'static str,
    usage: &'static str,
    /// Field of `memory.stat` that counts inactive file pages, of child groups too.
    inactive_file: &'static str,
}

const V2: Layout = Layout {
    limit: "memory.max",
    usage: "memory.current",
    inactive_file: "inactive_file",
};
const V1: Layout = Layout {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    inactive_file: "total_inactive_file",
};

/// The limit that leaves least, given the text of `/proc/self/cgroup` and `/proc/self/mountinfo`.
pub(super) fn tightest(cgroups: &str, mountinfo: &str) -> Result<Option<CgroupLimit>, MemoryError> {
    let mut tightest: Option<CgroupLimit> = None;
    for line in cgroups.lines() {
        // hierarchy-ID:controllers:path; version 2 is hierarchy 0 and names no controllers.
        let mut parts = line.splitn(3, ':');
        let (Some(hierarchy), Some(controllers), Some(group)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (layout, mount) = if hierarchy == "0" && controllers.is_empty() {
            (V2, find_mount(mountinfo, |kind, _| kind == "cgroup2"))
        } else if controllers.split(',').any(|name| name == "memory") {
            let has_memory = |options: &str| options.split(',').any(|name| name == "memory");
            (
                V1,
                find_mount(mountinfo, |kind, options| kind == "cgroup" && has_memory(options)),
            )
        } else {
            continue;
        };
        let Some(mount) = mount else { continue };
        for dir in mount
            .directory_of(Path::new(group))
            .ancestors()
            .take_while(|dir| dir.starts_with(mount.point))
        {
            if let Some(limit) = limit_of(dir, &layout)?
                && tightest
                    .as_ref()
                    .is_none_or(|best| limit.remaining() < best.remaining())
            {
                tightest = Some(limit);
            }
        }
    }
    Ok(tightest)
}

/// A mounted cgroup file system.
#[derive(Clone, Copy)]
struct Mount<'a> {
    /// The group that is mounted; in a container often the container's own.
    root: &'a Path,
    /// Where.
    point: &'a Path,
}

impl Mount<'_> {
    /// The directory of `group`. A group outside the mounted one is another namespace's name for it.
    fn directory_of(self, group: &Path) -> PathBuf {
        match group.strip_prefix(self.root) {
            Ok(below) => self.point.join(below),
            Err(_) => self.point.to_owned(),
        }
    }
}

/// The first mount whose file system type and super options satisfy `wanted`.
fn find_mount(mountinfo: &str, wanted: impl Fn(&str, &str) -> bool) -> Option<Mount<'_>> {
    mountinfo.lines().find_map(|line| {
        // ID parent major:minor root point options [optional fields] - type source super-options
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let (kind, options) = (after.next()?, after.nth(1)?);
        let mut before = before.split(' ');
        let (root, point) = (before.nth(3)?, before.next()?);
        wanted(kind, options).then(|| Mount {
            root: Path::new(root),
            point: Path::new(point),
        })
    })
}

/// The limit of one directory; none if it has no limit file (the root of version 2) or an unlimited one.
fn limit_of(dir: &Path, layout: &Layout) -> Result<Option<CgroupLimit>, MemoryError> {
    let path = dir.join(layout.limit);
    let Some(text) = read_if_present(&path)? else {
        return Ok(None);
    };
    if text.trim() == "max" {
        return Ok(None);
    }
    let limit = number(&text, path, layout.limit)?;
    // Version 1 writes "no limit" as the largest whole number of pages; no machine has 2^62 bytes.
    if limit >= 1 << 62 {
        return Ok(None);
    }
    let path = dir.join(layout.usage);
    let usage = number(&read(&path)?, path, layout.usage)?;
    let path = dir.join("memory.stat");
    let stat = read(&path)?;
    let inactive = stat
        .lines()
        .find_map(|line| line.strip_prefix(layout.inactive_file)?.strip_prefix(' '))
        .ok_or_else(|| MemoryError::Field {
            path: path.clone(),
            field: layout.inactive_file,
        })?;
    let inactive = number(inactive, path, layout.inactive_file)?;
    Ok(Some(CgroupLimit {
        dir: dir.to_owned(),
        limit,
        used: usage.saturating_sub(inactive),
    }))
}

fn number(text: &str, path: PathBuf, field: &'static str) -> Result<u64, MemoryError> {
    text.trim().parse().map_err(|_| MemoryError::Field { path, field })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A cgroup file system in a directory of its own, removed at the end.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("tightfit-cgroup-{name}-{}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        fn group(&self, layout: &Layout, name: &str, limit: &str, usage: u64, inactive: u64) {
            let dir = self.0.join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(layout.limit), format!("{limit}\n")).unwrap();
            fs::write(dir.join(layout.usage), format!("{usage}\n")).unwrap();
            fs::write(
                dir.join("memory.stat"),
                format!("anon 1\n{} {inactive}\nslab 2\n", layout.inactive_file),
            )
            .unwrap();
        }

        fn mountinfo(&self, root: &str, kind: &str, options: &str) -> String {
            let point = self.0.display();
            format!(
                "22 1 0:20 / /proc rw - proc proc rw\n\
                 30 23 0:27 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu\n\
                 31 23 0:28 {root} {point} rw,nosuid shared:4 - {kind} cgroup {options}\n"
            )
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            // A leftover in the temporary directory harms nothing.
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn version_2_takes_the_parent_that_leaves_least() {
        let tree = Tree::new("v2");
        fs::create_dir_all(&tree.0).unwrap();
        tree.group(&V2, "user", &(900 * MIB).to_string(), 800 * MIB, 100 * MIB);
        tree.group(&V2, "user/job", &(500 * MIB).to_string(), 100 * MIB, 0);
        tree.group(&V2, "user/job/step", "max", 100 * MIB, 0);
        tree.group(&V2, "other", &MIB.to_string(), MIB, 0);
        let mounts = tree.mountinfo("/", "cgroup2", "rw,nsdelegate");
        let found = tightest("1:cpu:/user\n0::/user/job/step\n", &mounts).unwrap().unwrap();
        let expected = CgroupLimit {
            dir: tree.0.join("user"),
            limit: 900 * MIB,
            used: 700 * MIB,
        };
        assert_eq!(found, expected);
        assert_eq!(found.remaining(), 200 * MIB);
    }

    #[test]
    fn version_1_reads_the_memory_controller_and_its_no_limit() {
        let tree = Tree::new("v1");
        tree.group(&V1, "", "9223372036854771712", 900 * MIB, 0);
        tree.group(&V1, "a", &(600 * MIB).to_string(), 50 * MIB, 20 * MIB);
        let mounts = tree.mountinfo("/", "cgroup", "rw,memory");
        let found = tightest("5:cpu,cpuacct:/\n4:memory:/a\n0::/\n", &mounts)
            .unwrap()
            .unwrap();
        assert_eq!(
            found,
            CgroupLimit {
                dir: tree.0.join("a"),
                limit: 600 * MIB,
                used: 30 * MIB
            }
        );
        assert_eq!(tightest("4:memory:/\n", &mounts).unwrap(), None);
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_mount() {
        let tree = Tree::new("container");
        tree.group(&V1, "", &(64 * MIB).to_string(), MIB, 0);
        let mounts = tree.mountinfo("/docker/8f3a", "cgroup", "rw,memory");
        for cgroups in ["4:memory:/docker/8f3a\n", "4:memory:/elsewhere\n"] {
            assert_eq!(tightest(cgroups, &mounts).unwrap().unwrap().limit, 64 * MIB);
        }
    }

    #[test]
    fn no_cgroups_no_mount_and_no_files_mean_no_limit() {
        let tree = Tree::new("none");
        assert_eq!(tightest("", "").unwrap(), None);
        assert_eq!(tightest("0::/job\n", "").unwrap(), None);
        assert_eq!(
            tightest("0::/job\n", &tree.mountinfo("/", "cgroup2", "rw")).unwrap(),
            None
        );
    }

    #[test]
    fn a_malformed_limit_names_its_file() {
        let tree = Tree::new("malformed");
        tree.group(&V2, "job", "plenty", 0, 0);
        let error = tightest("0::/job\n", &tree.mountinfo("/", "cgroup2", "rw")).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{} has no valid `memory.max`", tree.0.join("job/memory.max").display())
        );
        fs::write(tree.0.join("job/memory.max"), "1048576\n").unwrap();
        fs::write(tree.0.join("job/memory.stat"), "anon 1\n").unwrap();
        let error = tightest("0::/job\n", &tree.mountinfo("/", "cgroup2", "rw")).unwrap_err();
        assert!(
            matches!(
                error,
                MemoryError::Field {
                    field: "inactive_file",
                    ..
                }
            ),
            "{error}"
        );
    }
}
