//! The file that remembers which way of adding sums was fastest: `~/.cache/volley/collectives.json`.
use super::link::Link;
use super::tune::{Tuned, TUNED_ROWS};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// What a choice depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Key {
    /// UUIDs, by rank.
    gpus: Vec<String>,
    ranks_per_gpu: usize,
    driver: String,
    volley: String,
    nccl: Option<PathBuf>,
    hidden: usize,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    key: Key,
    tuned: Vec<Tuned>,
}

impl Key {
    pub fn of(link: &Link, nccl: Option<&Path>, hidden: usize) -> Key {
        // The driver's own version, where the system tells it; the CUDA version that it supports changes less often.
        let driver = fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
        Key {
            gpus: link.peers.iter().map(|peer| peer.uuid.clone()).collect(),
            ranks_per_gpu: link.sharing(),
            driver: format!("{} {}", link.gpu().info().driver, driver.trim()),
            volley: env!("CARGO_PKG_VERSION").into(),
            nccl: nccl.map(Path::to_path_buf),
            hidden,
        }
    }
}

/// $XDG_CACHE_HOME/volley/collectives.json, below ~/.cache without the variable; None where there is no home either.
pub fn path() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(cache.join("volley").join("collectives.json"))
}

/// A file that is damaged knows nothing.
fn entries(path: &Path) -> Vec<Entry> {
    fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

pub fn recall(link: &Link, path: &Path, key: &Key) -> Option<Vec<Tuned>> {
    let tuned = entries(path).into_iter().find(|entry| entry.key == *key)?.tuned;
    let fits = |t: &Tuned| t.variant.blocks > 0 && link.wire().fits(t.variant, key.hidden).is_ok();
    (tuned.iter().map(|t| t.rows).eq(TUNED_ROWS) && tuned.iter().all(fits)).then_some(tuned)
}

pub fn remember(path: &Path, key: Key, tuned: &[Tuned]) -> Result<()> {
    let mut all = entries(path);
    all.retain(|entry| entry.key != key);
    all.push(Entry { key, tuned: tuned.to_vec() });
    fs::create_dir_all(path.parent().context("a file has a folder")?)?;
    // Another start may read it at any time.
    let new = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&new, serde_json::to_vec_pretty(&all)?)?;
    Ok(fs::rename(&new, path)?)
}
