//! stderr for notes, stdin that is no terminal, and how sizes are shown.
use anyhow::{Context, Result};
use std::fmt;
use std::io::{self, BufRead, IsTerminal, Write};
use std::time::{Duration, Instant};

/// A line on stderr. A closed stderr is no reason to stop.
pub fn tell(line: fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// A bar on stderr for loads that take over a second, where stderr is a terminal.
pub struct Progress {
    start: Instant,
    bar: Option<indicatif::ProgressBar>,
}

impl Progress {
    pub fn begin() -> Progress {
        Progress { start: Instant::now(), bar: None }
    }

    pub fn show(&mut self, done: usize, total: usize) {
        if self.bar.is_none() && self.start.elapsed() > Duration::from_secs(1) && io::stderr().is_terminal() {
            let style = "loading {bar:30} {bytes} of {total_bytes}, {binary_bytes_per_sec}";
            let style = indicatif::ProgressStyle::with_template(style).expect("a fixed template");
            self.bar = Some(indicatif::ProgressBar::new(total as u64).with_style(style));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The lines of a stream that is no terminal: UTF-8 without BOM, line ends removed, the last line with or without one.
pub struct Lines<R> {
    from: R,
    offset: usize, // bytes read before the next line
}

impl<R: BufRead> Lines<R> {
    pub fn new(from: R) -> Lines<R> {
        Lines { from, offset: 0 }
    }

    /// The next line; None at the end. The inner error is a line that is not UTF-8; reading may go on after it.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Result<String>>> {
        let mut bytes = Vec::new();
        let n = self.from.read_until(b'\n', &mut bytes).context("stdin cannot be read")?;
        if n == 0 {
            return Ok(None);
        }
        let start = self.offset;
        self.offset += n;
        Ok(Some(text(bytes, start).map(|line| {
            let line = line.strip_suffix('\n').unwrap_or(&line);
            line.strip_suffix('\r').unwrap_or(line).to_string()
        })))
    }
}

/// Bytes of stdin from `start` on as text; a BOM at the very start is not part of it.
pub fn text(mut bytes: Vec<u8>, start: usize) -> Result<String> {
    const BOM: &[u8] = "\u{feff}".as_bytes();
    let mut skipped = 0;
    if start == 0 && bytes.starts_with(BOM) {
        bytes.drain(..BOM.len());
        skipped = BOM.len();
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = start + skipped + error.utf8_error().valid_up_to();
        anyhow::anyhow!(
            "stdin: expected UTF-8, found byte 0x{:02x} at offset {at}",
            error.as_bytes()[at - start - skipped]
        )
    })
}

/// `269.1 MB`
pub fn shown_bytes(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        1e12.. => format!("{:.2} TB", bytes / 1e12),
        1e9.. => format!("{:.2} GB", bytes / 1e9),
        1e6.. => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.1} kB", bytes / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let all = |bytes: &[u8]| {
            let mut lines = Lines::new(bytes);
            let mut all = Vec::new();
            while let Some(line) = lines.next().unwrap() {
                all.push(line.map_err(|e| e.to_string()));
            }
            all
        };
        let ok = |s: &str| Ok(s.to_string());
        assert_eq!(all(b""), []);
        assert_eq!(all(b"hi"), [ok("hi")]);
        assert_eq!(
            all("\u{feff}a\r\n\nb\u{feff}\r\nc\rd\n".as_bytes()),
            [ok("a"), ok(""), ok("b\u{feff}"), ok("c\rd")]
        );
        assert_eq!(all(b"a\0b\n"), [ok("a\0b")]);
        let bad = |byte: &str, at: usize| Err(format!("stdin: expected UTF-8, found byte 0x{byte} at offset {at}"));
        assert_eq!(all(b"ab\n\xffc\nd\n"), [ok("ab"), bad("ff", 3), ok("d")]);
        assert_eq!(all(b"\xef\xbb\xbfa\xc3"), [bad("c3", 4)]);
    }
}
