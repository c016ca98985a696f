//! The page of `plan --html` in a browser: what it draws, and that nothing of it asks for anything outside.
//!
//! `cargo test --release -p tightfit --test page -- --ignored`, with Debian's `chromium`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const BIN: &str = env!("CARGO_BIN_EXE_tightfit");

/// A folder of this name, empty.
fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

/// What a page is after its scripts have run, and whether it has asked for anything: requests that are not the browser's own have no
/// origin when they come from a file.
fn browse(page: &Path, dir: &Path) -> (String, bool) {
    let log = dir.join("net.json");
    let output = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-sync",
        ])
        .args(["--disable-background-networking", "--disable-component-update"])
        .args(["--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("--log-net-log={}", log.display()))
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("chromium is installed");
    let requests = fs::read_to_string(&log).unwrap();
    (
        String::from_utf8(output.stdout).unwrap(),
        requests.contains("\"initiator\":\"null\""),
    )
}

#[test]
#[ignore = "needs chromium"]
fn the_page_draws_the_plan_and_asks_for_nothing() {
    let dir = folder("page");
    // A page that does ask for something is seen to.
    let asking = dir.join("asking.html");
    fs::write(&asking, "<img src=\"http://127.0.0.1:9/x.png\">").unwrap();
    assert!(browse(&asking, &dir).1);

    let page = dir.join("report.html");
    let planned = Command::new(BIN)
        .args("plan tinyllama-1.1b --device a5000 --batch 2 --seq 512 --vary seq=256..1024 --html".split(' '))
        .arg(&page)
        .output()
        .unwrap();
    assert!(planned.status.success(), "{planned:?}");
    let (drawn, asks) = browse(&page, &dir);
    assert!(!asks, "the page asks for something");
    assert!(drawn.contains("data-drawn=\"yes\""), "the script has ended early");
    let words = String::from_utf8(planned.stdout).unwrap();
    let verdict = words.lines().next().unwrap();
    assert!(
        drawn.contains(&format!("<h1 id=\"verdict\">{verdict}</h1>")),
        "{verdict}"
    );
    // Roles as areas, levers and the curve as rows, mixes as points.
    let count = |what: &str| drawn.matches(what).count();
    assert!(count("<path d=\"M") >= 5, "{} areas", count("<path d=\"M"));
    assert!(count("<tr>") >= 20, "{} rows", count("<tr>"));
    assert!(count("<circle") >= 1);
    for word in ["activation", "offload weights", "By seq", "1024"] {
        assert!(drawn.contains(word), "{word}");
    }
}
