//! Text to ids and back: tokenizer, chat template, streaming. Knows nothing of decoding.
//! Every error from here is about the user's input or model files, so commands answer it with exit code 2.
//! Life of a request: `Tokenizer::open`, `encode_chat` or `encode_raw`, then a `TextStream` for the answer.
mod bytes;
mod shield;
pub mod stream;
pub mod template;
mod tiktoken;
pub mod tokenizer;

pub use shield::shielded;
pub use stream::{Pushed, StopHit, StopStream, TextStream, Utf8Stream};
pub use template::{ChatOptions, ChatTemplate, Message};
pub use tokenizer::Tokenizer;
