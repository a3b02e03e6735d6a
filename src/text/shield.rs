//! Files of a tokenizer are read by others' crates, which panic on some that their authors did not foresee. Here such a
//! panic is an error like any other. The program's panic hook asks `shielded` and stays silent.
use anyhow::{anyhow, Result};
use std::cell::Cell;
use std::panic::{catch_unwind, AssertUnwindSafe};

thread_local!(static SHIELDED: Cell<bool> = const { Cell::new(false) });

/// Whether a panic of this thread is expected at this moment.
pub fn shielded() -> bool {
    SHIELDED.get()
}

/// Runs `call`, which may panic on what others wrote. Whatever it changes must be dropped on an error.
pub(super) fn shield<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = SHIELDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    SHIELDED.set(before);
    result.unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(anyhow!("not valid: {}", words.unwrap_or("no reason given")))
    })
}
