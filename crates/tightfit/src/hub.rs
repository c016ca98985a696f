//! Models by their id on the Hugging Face hub, as far as they are in its cache on this machine.
//!
//! The layout is huggingface_hub's: `models--ORG--NAME/refs/main` names a commit, `snapshots/COMMIT` holds its files. Nothing is fetched:
//! `hf download ORG/NAME config.json` does that, with the user's mirror, token and proxy.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::input::read_regular;

/// Most bytes of the file that names a commit.
const MAX_REF: u64 = 256;

/// The configuration of the model with that id, if it is in the cache.
pub fn cached_config(id: &str) -> Option<PathBuf> {
    config_in(&cache()?, id)
}

/// Whether a name has the form of an id.
pub fn is_id(name: &str) -> bool {
    let plain = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed)
    };
    name.split_once('/')
        .is_some_and(|(org, model)| plain(org) && plain(model))
}

/// The folder that huggingface_hub keeps models in.
fn cache() -> Option<PathBuf> {
    let var = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || {
        let cache = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
        var("HF_HOME").or_else(|| cache.map(|cache| cache.join("huggingface")))
    };
    var("HF_HUB_CACHE").or_else(|| home().map(|home| home.join("hub")))
}

fn config_in(cache: &Path, id: &str) -> Option<PathBuf> {
    if !is_id(id) {
        return None;
    }
    let model = cache.join(format!("models--{}", id.replace('/', "--")));
    let snapshots = model.join("snapshots");
    let named = read_regular(&model.join("refs").join("main"), MAX_REF).ok();
    let named = named.map(|commit| snapshots.join(commit.trim()).join("config.json"));
    if let Some(config) = named.filter(|config| config.is_file()) {
        return Some(config);
    }
    // Of a model that was fetched by a commit there is no name.
    let mut configs: Vec<PathBuf> = fs::read_dir(snapshots)
        .ok()?
        .flatten()
        .map(|snapshot| snapshot.path().join("config.json"))
        .filter(|config| config.is_file())
        .collect();
    configs.sort();
    configs.pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_that_main_is_at_comes_first() {
        let cache = env::temp_dir().join(format!("tightfit-hub-{}", std::process::id()));
        let model = cache.join("models--acme--tiny-1.5");
        for commit in ["aaaa", "bbbb"] {
            let snapshot = model.join("snapshots").join(commit);
            fs::create_dir_all(&snapshot).unwrap();
            fs::write(snapshot.join("config.json"), commit).unwrap();
        }
        let found = || config_in(&cache, "acme/tiny-1.5").map(|path| fs::read_to_string(path).unwrap());
        assert_eq!(found().as_deref(), Some("bbbb"));
        fs::create_dir_all(model.join("refs")).unwrap();
        fs::write(model.join("refs/main"), "aaaa\n").unwrap();
        assert_eq!(found().as_deref(), Some("aaaa"));
        assert_eq!(config_in(&cache, "acme/other"), None);
        fs::remove_dir_all(&cache).unwrap();
    }

    #[test]
    fn ids_are_two_plain_names() {
        assert!(is_id("Qwen/Qwen2.5-7B") && is_id("a/b_c"));
        for no in ["llama-2-7b", "../x", "a/../b", "/etc/passwd", "a/b/c", "a/", "./x"] {
            assert!(!is_id(no), "{no}");
        }
    }
}
