//! The real binary as a person or a script uses it: with arguments, pipes, signals, a terminal.
//! Each test binary uses a part of this module.
#![allow(dead_code)]

use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Nothing in the tests takes this long.
const LIMIT: Duration = Duration::from_secs(60);

pub struct Done {
    /// None: ended by a signal.
    pub code: Option<i32>,
    pub out: Vec<u8>,
    pub err: String,
}

impl Done {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap_or_else(|e| panic!("stdout is not UTF-8 ({e}): {:?}", self.out))
    }

    /// stdout as JSON lines.
    pub fn json(&self) -> Vec<Value> {
        self.text()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}; stderr: {}", self.err)))
            .collect()
    }

    pub fn expect(self, code: i32) -> Done {
        assert_eq!(self.code, Some(code), "stdout: {:?}, stderr: {}", String::from_utf8_lossy(&self.out), self.err);
        self
    }

    /// Exit code 2, nothing on stdout, one line `error: ...` with all of these words on stderr.
    pub fn expect_error(self, code: i32, words: &[&str]) -> Done {
        let done = self.expect(code);
        assert!(done.out.is_empty(), "stdout: {}", done.text());
        let errors: Vec<&str> = done.err.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(
            errors.len() == 1 && done.err.trim_end().ends_with(errors[0]),
            "expected one line, the last, found {:?}",
            done.err
        );
        for word in words {
            assert!(errors[0].contains(word), "expected {word:?} in {:?}", errors[0]);
        }
        done
    }
}

pub fn volley(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_volley"));
    command.args(args).env_remove("VOLLEY_MODEL").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs to the end, with these bytes on stdin.
pub fn run_with(args: &[&str], stdin: &[u8]) -> Done {
    let mut child = volley(args).stdin(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let bytes = stdin.to_vec();
    // a program that has seen enough closes its end
    let writer = std::thread::spawn(move || drop(pipe.write_all(&bytes)));
    let done = finish(child);
    writer.join().unwrap();
    done
}

pub fn run(args: &[&str]) -> Done {
    run_with(args, b"")
}

/// `run` or `chat` on a model directory.
pub fn on(dir: &Path, command: &str, args: &[&str], stdin: &[u8]) -> Done {
    run_with(&[&[command, "-m", dir.to_str().unwrap(), "--device", "cpu"], args].concat(), stdin)
}

pub fn finish(mut child: Child) -> Done {
    let mut stdout = child.stdout.take();
    let out = std::thread::spawn(move || read_all(stdout.as_mut()));
    let mut stderr = child.stderr.take();
    let err = std::thread::spawn(move || read_all(stderr.as_mut()));
    let status = wait(&mut child, LIMIT);
    Done {
        code: status.code(),
        out: out.join().unwrap(),
        err: String::from_utf8_lossy(&err.join().unwrap()).into_owned(),
    }
}

fn read_all(from: Option<&mut impl Read>) -> Vec<u8> {
    let mut all = Vec::new();
    if let Some(from) = from {
        from.read_to_end(&mut all).unwrap();
    }
    all
}

pub fn wait(child: &mut Child, limit: Duration) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > limit {
            child.kill().unwrap();
            panic!("still running after {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn signal(child: &Child, signal: i32) {
    // SAFETY: the child has not been waited for, so the id is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

/// Reads until `n` bytes have come.
pub fn read_some(from: &mut impl Read, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    from.read_exact(&mut bytes).unwrap();
    bytes
}

/// A program at a terminal of its own.
pub struct Terminal {
    pub child: Child,
    master: File,
    seen: Vec<u8>,
    shown: usize, // bytes of `seen` that were waited for already
}

impl Terminal {
    pub fn start(mut command: Command) -> Terminal {
        // SAFETY: plain calls on descriptors that are ours; ptsname is used at once.
        let (master, slave) = unsafe {
            let master = libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC);
            assert!(master >= 0 && libc::grantpt(master) == 0 && libc::unlockpt(master) == 0);
            let mut name = [0; 64];
            assert_eq!(libc::ptsname_r(master, name.as_mut_ptr(), name.len()), 0);
            let slave = libc::open(name.as_ptr(), libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC);
            assert!(slave >= 0);
            (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave))
        };
        let end = || Stdio::from(slave.try_clone().unwrap());
        command.stdin(end()).stdout(end()).stderr(end()).env("TERM", "xterm");
        // SAFETY: both calls may be made between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let flags = libc::O_NONBLOCK;
        // SAFETY: the descriptor is open.
        unsafe { libc::fcntl(master.as_raw_fd(), libc::F_SETFL, flags) };
        Terminal { child, master, seen: Vec::new(), shown: 0 }
    }

    pub fn send(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this text appears after what was waited for before.
    pub fn expect(&mut self, text: &str) {
        let start = Instant::now();
        loop {
            let new = &self.seen[self.shown..];
            if let Some(at) = new.windows(text.len()).position(|window| window == text.as_bytes()) {
                self.shown += at + text.len();
                return;
            }
            assert!(
                start.elapsed() < LIMIT,
                "expected {text:?} on the terminal, found {:?}",
                String::from_utf8_lossy(new)
            );
            self.pump();
        }
    }

    /// Closes this end, as a window that is closed does.
    pub fn close(self) -> Child {
        self.child
    }

    /// Everything on the terminal until the program ends, and its exit code.
    pub fn end(mut self) -> (String, Option<i32>) {
        let start = Instant::now();
        let status = loop {
            self.pump();
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(
                start.elapsed() < LIMIT,
                "still running; on the terminal: {:?}",
                String::from_utf8_lossy(&self.seen)
            );
        };
        self.pump();
        (String::from_utf8_lossy(&self.seen).into_owned(), status.code())
    }

    /// Whether the terminal shows what is typed and gives it line by line.
    pub fn is_cooked(&self) -> bool {
        // SAFETY: termios is plain data and filled by the call.
        unsafe {
            let mut state: libc::termios = std::mem::zeroed();
            assert_eq!(libc::tcgetattr(self.master.as_raw_fd(), &mut state), 0);
            state.c_lflag & (libc::ECHO | libc::ICANON) == libc::ECHO | libc::ICANON
        }
    }

    fn pump(&mut self) {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = self.master.read(&mut bytes) {
            self.seen.extend_from_slice(&bytes[..n]);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
