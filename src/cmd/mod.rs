//! What a person or a script calls: one file per command (run, chat, bench, doctor), and what they share: options.rs has
//! every flag, load.rs makes a model of them, gpus.rs says where ranks are, answer.rs makes one answer.
//!
//! stdout carries the answer or JSON lines, nothing else; everything else goes through `terminal::tell` to stderr.
pub mod answer;
pub mod bench;
pub mod chat;
pub mod check;
pub mod doctor;
mod gpus;
pub mod load;
pub mod options;
pub mod run;
pub mod signal;
mod stats;
pub mod terminal;
pub mod version;
