//! `calibrate`, but for the measuring itself, which takes its time.

use std::fs;
use std::process::Command;

use super::util::{BIN, expect, folder, run};

fn calibrate() -> Command {
    let mut command = Command::new(BIN);
    command.arg("calibrate");
    command
}

#[test]
fn help_says_what_is_kept_where_and_shows_an_example() {
    let mut command = calibrate();
    command.arg("--help");
    let done = run(command);
    assert_eq!(done.code, Some(0));
    for word in ["half a minute", ".cache/tightfit", "tightfit calibrate --threads"] {
        assert!(done.stdout.contains(word), "{word}: {}", done.stdout);
    }
}

#[test]
fn a_result_that_cannot_be_kept_is_refused_before_it_is_measured() {
    let mut command = calibrate();
    command.env_remove("HOME").env("XDG_CACHE_HOME", "relative/is/ignored");
    expect(command, 1, &["XDG_CACHE_HOME", "HOME"]);
    let file = folder("calibrate").join("a-file");
    fs::write(&file, "no folder").unwrap();
    let mut command = calibrate();
    command.env("XDG_CACHE_HOME", &file);
    expect(command, 1, &["a-file"]);
    let mut command = calibrate();
    command.args(["--threads", "0"]);
    expect(command, 2, &["--threads"]);
}
