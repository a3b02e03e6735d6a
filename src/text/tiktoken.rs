//! tiktoken.model, the vocabulary of Kimi-K2 and its kin, as a model of HF's tokenizer crate: a line for each token,
//! its bytes in base64 and its rank. A word becomes the token that it is, or else its bytes, of which the two
//! neighbours whose union has the lowest rank are joined, the leftmost first, as long as there are such. Which words a
//! text has is said by a pattern that is not in the file.
use super::bytes::byte_characters;
use anyhow::{bail, ensure, Context, Result};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value as Json};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};
use tokenizers::models::{bpe::BpeTrainer, TrainerWrapper};
use tokenizers::{Model, ModelWrapper, Token};

pub const FILE: &str = "tiktoken.model";

/// Words of Kimi's text, as published in its tokenization_kimi.py: runs of Han; letters with what stands before them
/// and an English ending behind; up to three digits; signs; line ends; spaces, of which the last belongs to the next
/// word.
#[rustfmt::skip]
pub const KIMI_WORDS: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Ids behind the ranks that are kept for control tokens.
const N_SPECIAL: u32 = 256;

/// Control tokens that end an answer.
pub const KIMI_ENDS: [&str; 3] = ["[EOS]", "<|im_end|>", "[EOT]"];

/// A vocabulary of tokenizer.json, or that of tiktoken.model.
pub enum Vocabulary {
    Json(Box<ModelWrapper>),
    Tiktoken(Box<Tiktoken>),
}

pub struct Tiktoken {
    ranks: HashMap<Vec<u8>, u32>,
    /// By id: bytes spelled as in GPT-2's tokenizer.json, or the text of a control token.
    texts: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Tiktoken {
    /// Reads `dir`/tiktoken.model. Names of control tokens come from tokenizer_config.json; the others are
    /// `<|reserved_token_ID|>`.
    pub fn open(dir: &Path, config: &Map<String, Json>) -> Result<Tiktoken> {
        // The pattern of words comes with the code that the config names.
        let code = config.get("auto_map").map(|map| map["AutoTokenizer"].to_string()).unwrap_or_default();
        ensure!(
            code.contains("tokenization_kimi"),
            "tokenizer_config.json: auto_map: expected tokenization_kimi, whose pattern of words is known, found {}",
            if code.is_empty() { "none" } else { &code }
        );
        let text = std::fs::read_to_string(dir.join(FILE)).context(FILE)?;
        Tiktoken::parse(&text, config).context(FILE)
    }

    fn parse(text: &str, config: &Map<String, Json>) -> Result<Tiktoken> {
        let mut characters: Vec<char> = vec!['\0'; 256];
        byte_characters().into_iter().for_each(|(c, byte)| characters[byte as usize] = c);
        let (mut ranks, mut texts) = (HashMap::new(), Vec::new());
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
            let token =
                line.split_once(' ').and_then(|(token, rank)| Some((base64(token)?, rank.parse::<u32>().ok()?)));
            let Some((token, rank)) = token.filter(|(token, _)| !token.is_empty()) else {
                bail!("line {}: expected a token in base64 and its rank, found {line:?}", i + 1);
            };
            ensure!(rank as usize == texts.len(), "line {}: expected rank {}, found {rank}", i + 1, texts.len());
            texts.push(token.iter().map(|byte| characters[*byte as usize]).collect());
            ensure!(
                ranks.insert(token, rank).is_none(),
                "line {}: expected each token once, found {line:?} again",
                i + 1
            );
        }
        if let Some(byte) = (0..=255u8).find(|byte| !ranks.contains_key(&[*byte][..])) {
            bail!("expected a token for every byte, found none for 0x{byte:02x}");
        }
        let n_ranks = texts.len() as u32;
        let names = config.get("added_tokens_decoder").and_then(Json::as_object);
        for id in n_ranks..n_ranks + N_SPECIAL {
            let name = names.and_then(|names| names.get(&id.to_string())?["content"].as_str());
            texts.push(name.map_or_else(|| reserved(id), str::to_string));
        }
        let ids: HashMap<String, u32> = texts.iter().cloned().zip(0..).collect();
        ensure!(ids.len() == texts.len(), "expected control tokens of different names, found one twice");
        Ok(Tiktoken { ranks, texts, ids })
    }

    /// Control tokens that no file names.
    pub fn reserved_tokens(&self) -> impl Iterator<Item = &str> {
        let control = self.texts.iter().enumerate().skip(self.ranks.len());
        control.filter(|(id, text)| **text == reserved(*id as u32)).map(|(_, text)| text.as_str())
    }

    /// Tokens of a word: rank, and its bytes' range in the word.
    fn encode(&self, word: &[u8]) -> Vec<(u32, usize, usize)> {
        if let Some(rank) = self.ranks.get(word) {
            return vec![(*rank, 0, word.len())];
        }
        // A list of parts by their start: each one's end is the start of the next. Where a part has been joined to the
        // one before, `end` is 0.
        let n = word.len();
        let mut end: Vec<usize> = (1..=n).collect();
        let mut before: Vec<usize> = (0..n).map(|i| i.wrapping_sub(1)).collect();
        // (rank of the union, start, end of the union): the lowest rank first, the leftmost of these.
        let mut unions = BinaryHeap::new();
        let union = |start: usize, end: &[usize]| {
            let next = end[start];
            let rank = self.ranks.get(&word[start..*end.get(next)?])?;
            Some(Reverse((*rank, start, end[next])))
        };
        unions.extend((0..n).filter_map(|start| union(start, &end)));
        while let Some(Reverse((_, start, union_end))) = unions.pop() {
            let next = end[start];
            // Parts have changed since: these are in the heap again, as they are now.
            if next == 0 || next >= n || end[next] != union_end {
                continue;
            }
            end[start] = union_end;
            end[next] = 0;
            if union_end < n {
                before[union_end] = start;
            }
            unions.extend(union(start, &end));
            if start > 0 {
                unions.extend(union(before[start], &end));
            }
        }
        let mut tokens = Vec::new();
        let mut start = 0;
        while start < n {
            tokens.push((self.ranks[&word[start..end[start]]], start, end[start]));
            start = end[start];
        }
        tokens
    }
}

fn reserved(id: u32) -> String {
    format!("<|reserved_token_{id}|>")
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Vocabulary::Json(Box::new(ModelWrapper::deserialize(deserializer)?)))
    }
}

impl Model for Vocabulary {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Vocabulary::Json(model) => model.tokenize(word),
            Vocabulary::Tiktoken(model) => {
                let token = |(id, start, end): (u32, usize, usize)| {
                    Token::new(id, model.texts[id as usize].clone(), (start, end))
                };
                Ok(model.encode(word.as_bytes()).into_iter().map(token).collect())
            }
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Vocabulary::Json(model) => model.token_to_id(token),
            Vocabulary::Tiktoken(model) => model.ids.get(token).copied(),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Vocabulary::Json(model) => model.id_to_token(id),
            Vocabulary::Tiktoken(model) => model.texts.get(id as usize).cloned(),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Vocabulary::Json(model) => model.get_vocab(),
            Vocabulary::Tiktoken(model) => model.ids.clone(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Vocabulary::Json(model) => model.get_vocab_size(),
            Vocabulary::Tiktoken(model) => model.texts.len(),
        }
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a vocabulary is only read here".into())
    }

    fn get_trainer(&self) -> TrainerWrapper {
        TrainerWrapper::BpeTrainer(BpeTrainer::default())
    }
}

/// Bytes of a text in standard base64; None if it is none.
fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if text.len() % 4 != 0 || text.len() - digits.len() > 2 {
        return None;
    }
    let (mut bytes, mut bits, mut n_bits) = (Vec::new(), 0u32, 0);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        n_bits += 6;
        if n_bits >= 8 {
            n_bits -= 8;
            bytes.push((bits >> n_bits) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_the_standard() {
        for (text, bytes) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYg==", "foob"),
            ("Zm9vYmE=", "fooba"),
            ("Zm9vYmFy", "foobar"),
        ] {
            assert_eq!(base64(text).unwrap(), bytes.as_bytes());
        }
        assert_eq!(base64("/+8=").unwrap(), [0xff, 0xef]);
        for bad in ["Zg", "Zg=", "Z===", "Zm9v!A==", "Z g="] {
            assert_eq!(base64(bad), None, "{bad}");
        }
    }
}
