//! Ctrl-C and SIGTERM. While an answer is made the first Ctrl-C only raises a flag; at any other time, and the second
//! time, it leaves.
//!
//! The handlers touch atomics, restore the terminal if a line was being edited, and `_exit`: all that a signal handler
//! may do. The system takes back memory, GPU memory included.
use crate::error;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::OnceLock;

static ANSWERING: AtomicBool = AtomicBool::new(false);
static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static EDITING: AtomicBool = AtomicBool::new(false);
static COOKED: OnceLock<libc::termios> = OnceLock::new();

/// Once, at the start of the program.
pub fn install() {
    for (signal, handler) in [(libc::SIGINT, on_interrupt as *const ()), (libc::SIGTERM, on_terminate as *const ())] {
        // SAFETY: an all-zero sigaction is a valid one (no flags, empty mask), and the handlers only do what signal
        // handlers may.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// From here until it is dropped an answer is being made: the first Ctrl-C makes `interrupted` true, the next one
/// leaves.
pub struct Answering(());

impl Answering {
    pub fn begin() -> Answering {
        INTERRUPTED.store(false, SeqCst);
        ANSWERING.store(true, SeqCst);
        Answering(())
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        ANSWERING.store(false, SeqCst);
    }
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(SeqCst)
}

/// Runs a line editor, which may put the terminal into raw mode; a signal meanwhile restores it.
pub fn while_editing<T>(edit: impl FnOnce() -> T) -> T {
    COOKED.get_or_init(|| {
        // SAFETY: termios is plain data; tcgetattr fills it or leaves the zeros.
        unsafe {
            let mut state = std::mem::zeroed();
            libc::tcgetattr(libc::STDIN_FILENO, &mut state);
            state
        }
    });
    EDITING.store(true, SeqCst);
    let result = edit();
    EDITING.store(false, SeqCst);
    result
}

/// Ends the process at once. What was printed was flushed when it was printed.
pub fn leave(code: u8) -> ! {
    if EDITING.load(SeqCst) {
        if let Some(state) = COOKED.get() {
            // SAFETY: the state came from tcgetattr; tcsetattr may be called in a signal handler.
            unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, state) };
        }
    }
    // SAFETY: ends the process.
    unsafe { libc::_exit(code.into()) }
}

extern "C" fn on_interrupt(_: libc::c_int) {
    if !ANSWERING.load(SeqCst) || INTERRUPTED.swap(true, SeqCst) {
        leave(error::INTERRUPTED);
    }
}

extern "C" fn on_terminate(_: libc::c_int) {
    leave(error::TERMINATED);
}
