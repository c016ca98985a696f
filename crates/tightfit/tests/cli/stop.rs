//! Signals at every moment of a run.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::util::{Done, check_run, folder, json, names, tiny, with};

#[derive(Clone, Copy, Debug)]
pub enum Signal {
    Int,
    Term,
    Hup,
    Kill,
}

/// A running command whose stderr is read as it comes.
pub struct Started {
    pub child: Child,
    stderr: BufReader<ChildStderr>,
    said: String,
}

impl Started {
    pub fn new(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Self {
            child,
            stderr,
            said: String::new(),
        }
    }

    /// Reads stderr up to a line with `words`.
    pub fn wait_for(&mut self, words: &str) {
        let mut line = String::new();
        while !line.contains(words) {
            line.clear();
            assert_ne!(
                self.stderr.read_line(&mut line).unwrap(),
                0,
                "no {words:?} in {}",
                self.said
            );
            self.said.push_str(&line);
        }
    }

    /// Waits until signals are watched: it is the first thing that the command does.
    fn wait_for_watch(&self) {
        let status = format!("/proc/{}/status", self.child.id());
        let caught = || {
            let status = fs::read_to_string(&status).unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap()
        };
        // The last of those it watches is SIGHUP, number 1.
        while caught() & 1 == 0 {
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn send(&self, signal: Signal) {
        let name = format!("{signal:?}").to_uppercase();
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// From here on the run can write no file beyond that size.
    pub fn limit_file_size(&self, bytes: u64) {
        let limit = format!("prlimit --pid {} --fsize={bytes}", self.child.id());
        assert!(Command::new("sh").args(["-c", &limit]).status().unwrap().success());
    }

    pub fn finish(mut self) -> Done {
        let mut stdout = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        self.stderr.read_to_string(&mut self.said).unwrap();
        let stderr = self.said;
        assert!(!stderr.contains("panicked"), "{stderr}");
        Done {
            code: self.child.wait().unwrap().code(),
            stdout,
            stderr,
        }
    }
}

/// Makes the run wait where it saves: it copies `config.json` into the checkpoint, and opening a pipe to read waits for a writer.
fn block_saving(dir: &Path) {
    let file = dir.join("config.json");
    fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
}

/// Whether this process, and so its children, ignores SIGINT and SIGHUP, as in the background of some shells.
fn ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let ignored = u64::from_str_radix(mask.trim(), 16).unwrap() & 0b11 != 0;
    if ignored {
        println!("skipped: this process was started to ignore SIGINT or SIGHUP");
    }
    ignored
}

#[test]
fn before_there_is_anything_to_save_a_signal_ends_the_run_at_once() {
    if ignored() {
        return;
    }
    let dir = folder("stop-early");
    // Planning this takes about a second, and its steps much longer than that.
    let deep = "--layers 400 --seq 64 --json";
    for signal in [Signal::Int, Signal::Term, Signal::Hup] {
        let started = Started::new(with(tiny(deep), "--out", dir.join("planning")));
        started.wait_for_watch();
        started.send(signal);
        let done = started.finish();
        assert_eq!((done.code, &*done.stdout), (Some(5), ""), "{done:?}");
        assert!(done.stderr.contains("nothing to save"), "{done:?}");
        assert!(!dir.join("planning").exists());
    }
    // Planned, and on the way to the end of the first step.
    let wide = "--batch 4096 --micro-batch 1 --seq 64 --json";
    let mut started = Started::new(with(tiny(wide), "--out", dir.join("started")));
    started.wait_for("total");
    started.send(Signal::Term);
    let done = started.finish();
    assert_eq!(done.code, Some(5), "{done:?}");
    assert!(!dir.join("started/model.safetensors").exists());
}

#[test]
fn a_signal_in_the_middle_saves_the_steps_that_are_done() {
    if ignored() {
        return;
    }
    for signal in [Signal::Int, Signal::Term, Signal::Hup] {
        let dir = folder("stop-middle");
        let mut started = Started::new(with(tiny("--steps 1000000 --json"), "--out", &dir));
        started.wait_for("step 1/");
        started.send(signal);
        let done = started.finish();
        assert_eq!(done.code, Some(5), "{done:?}");
        let result = check_run(&dir);
        assert_eq!(json(&done), result);
        assert_eq!(result["status"], "stopped");
        assert!(result["eval_loss"].is_null());
        let steps = &result["steps"];
        assert!(done.stderr.contains(&format!(
            "stopped after step {steps} of 1000000: saved; go on by `tightfit train --resume"
        )));
    }
}

#[test]
fn without_a_folder_a_stop_says_that_nothing_is_saved() {
    let mut started = Started::new(tiny("--steps 1000000"));
    started.wait_for("step 1/");
    started.send(Signal::Term);
    let done = started.finish();
    assert_eq!(done.code, Some(5), "{done:?}");
    assert!(done.stderr.contains("nothing saved, as no --out was given"), "{done:?}");
}

#[test]
fn an_evaluation_does_not_hold_up_a_stop() {
    let dir = folder("stop-evaluation");
    let mut started = Started::new(with(tiny("--steps 2 --eval-batches 10000000"), "--out", &dir));
    started.wait_for("step 1/");
    thread::sleep(Duration::from_millis(200));
    started.send(Signal::Term);
    let done = started.finish();
    assert_eq!(done.code, Some(5), "{done:?}");
    let result = check_run(&dir);
    assert_eq!(result["status"], "stopped");
    assert!(result["eval_loss"].is_null());
}

#[test]
fn a_second_signal_ends_the_run_even_while_it_saves() {
    let dir = folder("stop-twice");
    let mut started = Started::new(with(tiny("--steps 1000000"), "--out", &dir));
    started.wait_for("step 1/");
    block_saving(&dir);
    // One request often comes as two signals, close together.
    started.send(Signal::Term);
    started.send(Signal::Term);
    started.wait_for("stopping once this step is done");
    thread::sleep(Duration::from_millis(600));
    assert!(
        started.child.try_wait().unwrap().is_none(),
        "two signals at once are one request"
    );
    started.send(Signal::Term);
    let done = started.finish();
    assert_eq!(done.code, Some(5), "{done:?}");
    assert!(done.stderr.contains("stopped at once"), "{done:?}");
    check_unsaved(&dir);
}

#[test]
fn a_kill_while_saving_leaves_no_half_written_file() {
    let dir = folder("killed");
    let mut started = Started::new(with(tiny("--steps 1000000"), "--out", &dir));
    started.wait_for("step 1/");
    block_saving(&dir);
    started.send(Signal::Term);
    started.wait_for("stopping once this step is done");
    thread::sleep(Duration::from_millis(100));
    started.send(Signal::Kill);
    assert_eq!(started.finish().code, None);
    check_unsaved(&dir);
    // The next run clears up, and takes the folder.
    fs::remove_file(dir.join("config.json")).unwrap();
    let done = crate::util::expect(with(tiny(""), "--out", &dir), 0, &[]);
    assert_eq!(check_run(&dir)["steps"], 3, "{done:?}");
}

/// Checks that no final name exists for what was not saved.
fn check_unsaved(dir: &Path) {
    let names = names(dir);
    assert!(names.iter().any(|name| name.ends_with(".partial")), "{names:?}");
    assert!(
        names
            .iter()
            .all(|name| !name.starts_with("checkpoint-") || name.ends_with(".partial")),
        "{names:?}"
    );
    assert!(!dir.join("model.safetensors").exists());
}

#[test]
fn signals_that_are_set_to_be_ignored_stay_ignored() {
    let dir = folder("nohup");
    let mut command = Command::new("sh");
    let flags = format!("{} --steps 1000000 --out {}", crate::util::TINY, dir.display());
    command.args(["-c", &format!("trap '' HUP; exec {} train {flags}", crate::util::BIN)]);
    let mut started = Started::new(command);
    started.wait_for("step 1/");
    started.send(Signal::Hup);
    thread::sleep(Duration::from_millis(200));
    assert!(started.child.try_wait().unwrap().is_none(), "as under nohup");
    started.send(Signal::Term);
    assert_eq!(started.finish().code, Some(5));
    check_run(&dir);
}
