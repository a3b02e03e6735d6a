//! The answer as it appears: token ids to bytes, bytes to valid UTF-8, text up to the first stop string.
//! `TextStream` is what the engine uses; `Utf8Stream` and `StopStream` are its two halves, free of any tokenizer.
//! What is shown does not depend on how the ids were grouped: verify blocks of any size give the same text.

use super::bytes::strip_once;
use super::tokenizer::Tokenizer;
use anyhow::{ensure, Result};

/// Shows the ids of one answer. Special tokens (the text of EOS among them) are hidden unless asked for.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    show_special: bool,
    /// The decoder drops one space at the start of a text, and nothing has been decoded yet.
    strip_space: bool,
    utf8: Utf8Stream,
    stop: StopStream,
}

/// What one push makes visible.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pushed {
    /// New text; always whole characters, never shown before.
    pub text: String,
    /// Set once, by the push that completes a stop string.
    pub stop: Option<StopHit>,
}

/// A completed stop string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopHit {
    /// Which stop string, as an index into the list given at the start.
    pub stop: usize,
    /// The token that completed it, as an index into the ids of this push. Later ids of the push count for nothing.
    pub token: usize,
}

impl<'a> TextStream<'a> {
    /// `stops` may be empty; an empty stop string is an error.
    pub fn new(tokenizer: &'a Tokenizer, stops: &[String], show_special: bool) -> Result<Self> {
        Ok(TextStream {
            tokenizer,
            show_special,
            strip_space: tokenizer.strips_leading_space(),
            utf8: Utf8Stream::default(),
            stop: StopStream::new(stops)?,
        })
    }

    /// Takes any number of ids. After a stop nothing more is shown.
    pub fn push(&mut self, ids: &[u32]) -> Pushed {
        let mut shown = Pushed::default();
        for (token, &id) in ids.iter().enumerate() {
            if self.stop.stopped() {
                break;
            }
            if !self.show_special && self.tokenizer.is_special(id) {
                continue;
            }
            let bytes = self.tokenizer.token_bytes(id);
            let text = self.utf8.push(strip_once(&bytes, &mut self.strip_space));
            let (text, stop) = self.stop.push(&text);
            shown.text += &text;
            shown.stop = stop.map(|stop| StopHit { stop, token });
        }
        shown
    }

    /// The end of the answer: whatever was held back for a stop string that did not come, and one U+FFFD for a
    /// character cut in the middle. Empty after a stop.
    pub fn finish(self) -> String {
        if self.stop.stopped() {
            return String::new();
        }
        self.stop.finish() + &self.utf8.finish()
    }
}

/// Bytes in, text out as soon as a character is complete. Invalid bytes become U+FFFD exactly as in
/// `String::from_utf8_lossy` of the whole, however the bytes were cut.
#[derive(Debug, Default)]
pub struct Utf8Stream {
    pending: Vec<u8>, // the start of a character, at most 3 bytes between calls
}

impl Utf8Stream {
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text += valid;
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text += std::str::from_utf8(valid).expect("checked up to here");
                    rest = after;
                    let Some(n_invalid) = error.error_len() else {
                        break; // a character that may still be completed
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[n_invalid..];
                }
            }
        }
        self.pending = rest.to_vec();
        text
    }

    /// One U+FFFD if the input ended inside a character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Text in, text out up to the first stop string. The stop that is complete first wins; of two that end at the same
/// character, the one that started first. Text is held back only while it may be the start of a stop: at most the
/// longest stop less one character.
#[derive(Debug)]
pub struct StopStream {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopStream {
    pub fn new(stops: &[String]) -> Result<Self> {
        for (i, stop) in stops.iter().enumerate() {
            ensure!(!stop.is_empty(), "stop string {}: expected text, found an empty string; leave it out", i + 1);
        }
        Ok(StopStream { stops: stops.to_vec(), held: String::new(), stopped: false })
    }

    /// The text that may be shown now, and the index of the stop that this text completed.
    pub fn push(&mut self, text: &str) -> (String, Option<usize>) {
        if self.stopped {
            return (String::new(), None);
        }
        self.held += text;
        let first = (self.stops.iter().enumerate())
            .filter_map(|(i, stop)| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, i)))
            .min();
        if let Some((_, start, stop)) = first {
            self.stopped = true;
            self.held.truncate(start);
            return (std::mem::take(&mut self.held), Some(stop));
        }
        let kept = self.held.split_off(self.held.len() - self.longest_possible_start());
        (std::mem::replace(&mut self.held, kept), None)
    }

    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// What was held back for a stop that did not come.
    pub fn finish(self) -> String {
        self.held
    }

    /// Bytes at the end of `held` that begin some stop string.
    fn longest_possible_start(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        (self.held.char_indices())
            .map(|(start, _)| &self.held[start..])
            .find(|tail| tail.len() < longest && self.stops.iter().any(|stop| stop.starts_with(tail)))
            .map_or(0, str::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|s| s.to_string()).collect()
    }

    /// Every prefix of what is shown, then the stop that ended it.
    fn stream(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>, String) {
        let mut stream = StopStream::new(&strings(stops)).unwrap();
        let mut shown = Vec::new();
        let mut hit = None;
        for piece in pieces {
            let (text, stop) = stream.push(piece);
            shown.push(text);
            hit = hit.or(stop);
        }
        (shown, hit, stream.finish())
    }

    fn check(stops: &[&str], pieces: &[&str], shown: &[&str], stop: Option<usize>, rest: &str) {
        assert_eq!(
            stream(stops, pieces),
            (strings(shown), stop, rest.to_string()),
            "stops {stops:?}, pieces {pieces:?}"
        );
    }

    #[test]
    fn stops() {
        check(&[], &["a", "b"], &["a", "b"], None, "");
        check(&["END"], &["aE", "N", "D!"], &["a", "", ""], Some(0), "");
        check(&["END"], &["aE", "N", "d!"], &["a", "", "ENd!"], None, "");
        check(&["END"], &["aE", "N"], &["a", ""], None, "EN"); // released at the end
        check(&["ab", "abc"], &["xabc"], &["x"], Some(0), ""); // a prefix of another is complete first
        check(&["abc", "ab"], &["xa", "bc"], &["x", ""], Some(1), "");
        check(&["bcd", "c"], &["abcd"], &["ab"], Some(1), ""); // complete first, although it starts later
        check(&["c", "bc"], &["abc"], &["a"], Some(1), ""); // same end: the one that starts first
        check(&["aab"], &["aaa", "b"], &["a", ""], Some(0), ""); // the match fails and restarts inside itself
        check(&["né"], &["n", "é"], &["", ""], Some(0), "");
        check(&["\n\n"], &["a\n", "b\n", "\nc"], &["a", "\nb", ""], Some(0), "");
        assert!(StopStream::new(&strings(&["a", ""])).unwrap_err().to_string().contains("stop string 2"));
    }

    /// The obvious definition: walk the whole text character by character.
    fn stop_reference(stops: &[String], text: &str) -> (String, Option<usize>) {
        for end in text.char_indices().map(|(i, c)| i + c.len_utf8()) {
            let done = (stops.iter().enumerate())
                .filter(|(_, s)| text[..end].ends_with(s.as_str()))
                .max_by_key(|(i, s)| (s.len(), usize::MAX - i));
            if let Some((i, stop)) = done {
                return (text[..end - stop.len()].to_string(), Some(i));
            }
        }
        (text.to_string(), None)
    }

    proptest! {
        #[test]
        fn utf8_chunks_equal_the_whole(chunks in prop::collection::vec(prop::collection::vec(
            prop_oneof![any::<u8>(), prop::sample::select("aé€👩\u{200d}한".as_bytes())], 0..5), 0..12)) {
            let mut stream = Utf8Stream::default();
            let mut text: String = chunks.iter().map(|chunk| stream.push(chunk)).collect();
            text += &stream.finish();
            let whole = chunks.concat();
            prop_assert_eq!(text, String::from_utf8_lossy(&whole));
        }

        #[test]
        fn stop_chunks_equal_the_whole(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            chunks in prop::collection::vec("[abcé]{0,4}", 0..10),
        ) {
            let (want, want_stop) = stop_reference(&stops, &chunks.concat());
            let mut stream = StopStream::new(&stops).unwrap();
            let longest = stops.iter().map(|s| s.chars().count()).max().unwrap_or(1);
            let (mut text, mut stop) = (String::new(), None);
            for (i, chunk) in chunks.iter().enumerate() {
                let (new, hit) = stream.push(chunk);
                text += &new;
                stop = stop.or(hit);
                prop_assert!(want.starts_with(&text), "shown {:?} of {:?}", text, want);
                let held = chunks[..=i].concat().chars().count() - text.chars().count();
                prop_assert!(stop.is_some() || held < longest, "{} characters held, longest stop {}", held, longest);
            }
            text += &stream.finish();
            prop_assert_eq!((text, stop), (want, want_stop));
        }
    }
}
