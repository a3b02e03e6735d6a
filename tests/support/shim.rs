//! The kernels compiled for the CPU, as the driver that tests use where no GPU is needed.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::OnceLock;
use volley::gpu::device::Gpu;
use volley::gpu::shim::Shim;

/// libvolley_shim.so, built once per test run.
pub fn library() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let out = Command::new("scripts/shim.sh").output().expect("scripts/shim.sh runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        PathBuf::from(String::from_utf8(out.stdout).expect("a path").lines().last().expect("a path"))
    })
}

/// A GPU of its own.
pub fn gpu() -> Gpu {
    Gpu::new(Rc::new(Shim::open(library()).unwrap()))
}
