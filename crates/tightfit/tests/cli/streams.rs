//! Where words go, and what happens where they cannot.

use std::fs::{File, OpenOptions};
use std::process::{Command, Stdio};

use crate::util::{BIN, TINY, check_run, expect, folder, json, run, tiny, with};

fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

#[test]
fn a_full_stdout_is_an_error_that_is_said() {
    for flags in ["", "--plan-only", "--print-config", "--json", "--json --plan-only"] {
        let mut command = tiny(flags);
        command.stdout(full()).stderr(Stdio::piped());
        let done = command.spawn().unwrap().wait_with_output().unwrap();
        let stderr = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{flags}: {stderr}");
        assert!(
            stderr.contains("cannot write to stdout: No space left"),
            "{flags}: {stderr}"
        );
    }
}

#[test]
fn a_full_or_closed_stderr_costs_nothing_but_words() {
    let mut command = tiny("--json");
    command.stderr(full());
    let done = run(command);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(json(&done)["status"], "done");

    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec {BIN} train {TINY} --json 2>&-")]);
    assert_eq!(json(&run(command))["status"], "done");
}

#[test]
fn a_reader_that_goes_away_does_not_end_the_run() {
    let dir = folder("reader-gone");
    let mut command = with(tiny("--steps 20"), "--out", &dir);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(check_run(&dir)["steps"], 20);
}

#[test]
fn no_environment_and_no_writable_folder_are_needed() {
    let mut command = tiny("");
    // In `/proc` not even root can make a file.
    command.env_clear().current_dir("/proc");
    expect(command, 0, &["step 3/3"]);
}
