//! Which exit code an error earns. A plain error is the user's: bad input, flag or model.
//!
//! `machine` and `internal` make errors of the other kinds where the fact is known; `exit_code` finds them under any
//! context. main.rs is the only place that prints errors.
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

/// The one line that is shown. What others wrote may be part of it: control characters, which could start a new line or
/// move a terminal's cursor, are spelled out.
pub fn line(error: &anyhow::Error) -> String {
    let is_bad = |c: char| {
        c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    format!("{error:#}")
        .chars()
        .map(|c| if is_bad(c) { c.escape_default().to_string() } else { c.to_string() })
        .collect()
}

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
    fn lines() {
        assert_eq!(line(&anyhow!("a\n\u{1b}[2Jb\u{202e}c é한").context("in x")), "in x: a\\n\\u{1b}[2Jb\\u{202e}c é한");
    }

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
