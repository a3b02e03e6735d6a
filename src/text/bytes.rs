//! How bytes stand in a vocabulary, and the space that some decoders drop.
use std::collections::HashMap;

/// GPT-2's table: printable Latin-1 bytes stand for themselves, the other 68 are U+0100 onwards, in order.
pub(super) fn byte_characters() -> HashMap<char, u8> {
    let mut others = '\u{100}'..;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => (char::from(byte), byte),
            _ => (others.next().expect("68 of them"), byte),
        })
        .collect()
}

/// The bytes without the one leading space that some decoders drop at the start of a text; `pending` says whether it is
/// due.
pub(super) fn strip_once<'b>(bytes: &'b [u8], pending: &mut bool) -> &'b [u8] {
    if bytes.is_empty() || !std::mem::take(pending) {
        return bytes;
    }
    bytes.strip_prefix(b" ").unwrap_or(bytes)
}
