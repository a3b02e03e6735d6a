//! Which exit code an error earns. A plain error is the user's: bad input, flag or model.
//!
//! `machine` and `internal` make errors of the other kinds where the fact is known; `exit_code` finds them under any context. main.rs is
//! the only place that prints errors.
use std::fmt;
use std::io::{self, ErrorKind};

pub const FINE: u8 = 0;
pub const INTERNAL: u8 = 1;
pub const BAD_INPUT: u8 = 2;
pub const MACHINE: u8 = 3;
pub const INTERRUPTED: u8 = 130;
/// What a shell reports for a process that SIGTERM ended.
pub const TERMINATED: u8 = 143;

/// The machine cannot do it: driver, peer access, memory.
#[derive(Debug)]
struct Machine(String);

/// Something that cannot happen did: our mistake.
#[derive(Debug)]
struct Internal(String);

pub fn machine(message: impl Into<String>) -> anyhow::Error {
    Machine(message.into()).into()
}

pub fn internal(message: impl Into<String>) -> anyhow::Error {
    Internal(message.into()).into()
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Internal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "internal: {}; please report this", self.0)
    }
}

impl std::error::Error for Machine {}
impl std::error::Error for Internal {}

/// `FINE` for a closed stdout: `volley run | head -1` has what it wanted.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if error.chain().any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)) {
        FINE
    } else if error.chain().any(|e| e.is::<Machine>()) {
        MACHINE
    } else if error.chain().any(|e| e.is::<Internal>()) {
        INTERNAL
    } else {
        BAD_INPUT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{anyhow, Context};

    #[test]
    fn codes() {
        let check = |error: anyhow::Error, code| assert_eq!(exit_code(&error), code, "{error:#}");
        check(anyhow!("bad flag"), BAD_INPUT);
        check(machine("no driver"), MACHINE);
        check(Err::<(), _>(machine("no driver")).context("loading").unwrap_err(), MACHINE);
        check(internal("x").context("loading"), INTERNAL);
        check(anyhow!(io::Error::from(ErrorKind::BrokenPipe)).context("writing"), FINE);
        check(anyhow!(io::Error::from(ErrorKind::NotFound)), BAD_INPUT);
    }
}
