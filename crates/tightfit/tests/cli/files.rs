//! The output folder: what is in it, whose it is, and disks that are full.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::stop::{Signal, Started};
use crate::util::{
    BIN, TINY, check_checkpoint, check_run, expect, folder, last_checkpoint, metrics, names, run, tiny, trained, with,
};

#[test]
fn a_folder_holds_a_whole_run_and_is_not_overwritten_unasked() {
    let dir = folder("out").join("new/deep");
    expect(with(tiny("--eval-every 2"), "--out", &dir), 0, &[]);
    let result = check_run(&dir);
    assert_eq!(result["status"], "done");
    let steps = metrics(&dir);
    assert_eq!(steps.len(), 3);
    assert!(steps[0]["eval_loss"].is_null() && steps[1]["eval_loss"].is_f64());
    assert_eq!(steps[2]["eval_loss"], result["eval_loss"]);
    let mode = |name: &str| fs::metadata(dir.join(name)).unwrap().permissions().mode();
    assert_eq!(
        mode("model.safetensors"),
        mode("config.json"),
        "as readable as any other file"
    );

    let files = || {
        names(&dir)
            .into_iter()
            .map(|name| dir.join(name))
            .filter(|path| path.is_file())
    };
    let content = || files().map(|path| fs::read(path).unwrap());
    let before: Vec<_> = content().collect();
    for flags in ["", "--plan-only", "--lr 1e30"] {
        expect(
            with(tiny(flags), "--out", &dir),
            2,
            &["holds the result of another run", "--overwrite"],
        );
    }
    expect(
        with(tiny("--overwrite --budget 1KiB"), "--out", &dir),
        3,
        &["does not fit"],
    );
    assert!(content().eq(before), "a refused run changes nothing");
    expect(with(tiny("--overwrite --steps 5"), "--out", &dir), 0, &[]);
    assert_eq!(check_run(&dir)["steps"], 5);
    let weights = || fs::read(dir.join("model.safetensors")).unwrap();
    let before = weights();
    expect(with(tiny("--overwrite --lr 1e30"), "--out", &dir), 1, &["at step"]);
    assert!(
        weights() == before,
        "a run that comes to nothing leaves the weights of the one before"
    );
}

#[test]
fn equal_runs_write_equal_files() {
    let dir = folder("equal");
    let [first, second] = ["a", "b"].map(|name| dir.join(name));
    expect(with(tiny(""), "--out", &first), 0, &[]);
    expect(with(tiny("--threads 1"), "--out", &second), 0, &[]);
    for name in ["plan.json", "config.toml", "config.json", "model.safetensors"] {
        assert_eq!(
            fs::read(first.join(name)).unwrap(),
            fs::read(second.join(name)).unwrap(),
            "{name}"
        );
    }
    assert!(trained(&first) == trained(&second));
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let dir = folder("unwritable");
    let file = dir.join("file");
    fs::write(&file, "mine").unwrap();
    expect(
        with(tiny(""), "--out", &file),
        1,
        &[file.to_str().unwrap(), "not a directory"],
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    expect(
        with(tiny(""), "--out", file.join("below")),
        1,
        &["file/below", "ot a directory"],
    );
    // Not even root can make a folder here.
    expect(
        with(tiny(""), "--out", "/proc/tightfit"),
        1,
        &["cannot write /proc/tightfit"],
    );
    fs::create_dir(dir.join("plan.json")).unwrap();
    expect(with(tiny(""), "--out", &dir), 1, &["plan.json", "directory"]);
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let dir = folder("shared");
    let mut first = Started::new(with(tiny("--steps 1000000"), "--out", &dir));
    first.wait_for("step 1/");
    expect(with(tiny(""), "--out", &dir), 1, &["another run is writing"]);
    first.send(Signal::Term);
    assert_eq!(first.finish().code, Some(5));
    check_run(&dir);
}

#[test]
fn a_disk_that_is_full_in_the_end_leaves_the_checkpoint() {
    let dir = folder("full");
    let mut started = Started::new(with(tiny("--steps 1000000"), "--out", &dir));
    started.wait_for("step 1/");
    // What is written here meets a full disk.
    std::os::unix::fs::symlink("/dev/full", dir.join("result.json.partial")).unwrap();
    started.send(Signal::Term);
    let done = started.finish();
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(
        done.stderr.contains("No space left") && done.stderr.contains("result.json"),
        "{done:?}"
    );
    assert!(
        !dir.join("result.json").exists(),
        "a result says that all else is there"
    );
    assert!(names(&dir).iter().all(|left| !left.ends_with(".partial")));
    check_checkpoint(&last_checkpoint(&dir));
}

/// The file system takes no more of a file than a limit: as a disk that fills up while a checkpoint is written.
#[test]
fn a_checkpoint_that_cannot_be_written_leaves_the_last_good_one() {
    let dir = folder("full-checkpoint");
    let mut started = Started::new(with(tiny("--steps 1000000 --save-every 20"), "--out", &dir));
    started.wait_for("step 1/");
    while !dir.join("checkpoint-20/state.json").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    started.limit_file_size(40_000);
    let done = started.finish();
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.stderr.contains("File too large"), "{done:?}");
    assert!(names(&dir).iter().all(|left| !left.ends_with(".partial")));
    let step = check_checkpoint(&last_checkpoint(&dir));
    assert!(step >= 20 && step.is_multiple_of(20), "{step}");
    assert!(!dir.join("result.json").exists());
}

#[test]
fn a_limit_on_file_sizes_ends_the_run_with_whole_lines() {
    let limited = |blocks: u32, dir: &str| {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &format!("ulimit -f {blocks}; exec {BIN} train {TINY} --steps 1000000 --out {dir}"),
        ]);
        command
    };
    let dir = folder("limited-plan");
    expect(limited(1, dir.to_str().unwrap()), 1, &["plan.json", "File too large"]);
    assert_eq!(names(&dir), ["metrics.jsonl"]);

    // Enough for the plan. The metrics reach it after some hundred steps.
    let dir = folder("limited-metrics");
    let done = run(limited(64, dir.to_str().unwrap()));
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.stderr.contains("metrics.jsonl: File too large"), "{done:?}");
    assert!(metrics(&dir).len() > 10);
}
