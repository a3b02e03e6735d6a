//! Where committed data lies, and SmolLM2 if it was fetched. Each test binary uses a part of this module.
use std::io::Write;
use std::path::{Path, PathBuf};

pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// The directory of SmolLM2, or a line that says why the test is skipped (past the capture of cargo test, so that CI
/// can count it).
pub fn smollm2() -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/smollm2-135m-instruct");
    if dir.join("MANIFEST.json").exists() {
        return Some(dir);
    }
    let _ = writeln!(std::io::stderr(), "skipped: no {}; scripts/fetch_smollm2.py fetches it", dir.display());
    None
}
