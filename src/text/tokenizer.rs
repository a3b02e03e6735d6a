//! Text to ids and ids to bytes, from a checkpoint's tokenizer.json (or tiktoken.model: tiktoken.rs), with the settings
//! and the chat template of the files beside it. The splitting and merging is HF's own crate; this file adds what
//! surrounds it: which BOS is written, which parts of a chat may become control tokens, and the raw bytes of each
//! token. Rendering is in template.rs, streaming in stream.rs.

use super::bytes::{byte_characters, strip_once};
use super::shield::shield;
use super::template::{ChatOptions, ChatTemplate, Message};
use super::tiktoken::{self, Tiktoken, Vocabulary, KIMI_ENDS, KIMI_WORDS};
use anyhow::{anyhow, bail, ensure, Context, Result};
use serde::Deserialize;
use serde_json::{Map, Value as Json};
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::path::Path;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, DecoderWrapper, Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper, SplitDelimiterBehavior, TokenizerImpl,
};

/// The tokenizer of one checkpoint.
pub struct Tokenizer {
    hf: HfTokenizer,
    spelling: Spelling,
    special: HashSet<u32>,
    /// Added tokens that are not special but that the chat template writes, such as DeepSeek's `<｜User｜>`: turn marks
    /// all the same.
    template_marks: HashSet<u32>,
    eos: Option<u32>,
    /// Further control tokens that end an answer, by the tokenizer's kind.
    ends: Vec<u32>,
    raw: RawRule,
    template: Option<ChatTemplate>,
    vocab_size: usize,
    dir: String,
}

type HfTokenizer = TokenizerImpl<
    Vocabulary,
    tokenizers::NormalizerWrapper,
    Unguard,
    tokenizers::PostProcessorWrapper,
    tokenizers::DecoderWrapper,
>;

impl Tokenizer {
    /// Reads `dir`/tokenizer.json, or if there is none tiktoken.model, and, where present, tokenizer_config.json,
    /// special_tokens_map.json and the chat template in chat_template.jinja, tokenizer_config.json or
    /// chat_template.json (the first that has one).
    pub fn open(dir: &Path) -> Result<Self> {
        shield(|| Self::read(dir)).with_context(|| dir.display().to_string())
    }

    fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.exists() && dir.join(tiktoken::FILE).exists() {
            return Self::open_tiktoken(dir);
        }
        let json = std::fs::read(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                anyhow!("tokenizer.json: no such file; the tokenizer belongs beside the weights, download it with the model")
            }
            _ => anyhow!("tokenizer.json: {error}"),
        })?;
        let hf: HfTokenizer =
            serde_json::from_slice(&json).map_err(|error| anyhow!("tokenizer.json: no valid tokenizer: {error}"))?;
        Self::from_parts(dir, hf)
    }

    fn open_tiktoken(dir: &Path) -> Result<Self> {
        let model = Tiktoken::open(dir, &read_json(dir, "tokenizer_config.json")?)?;
        // Those with names are in tokenizer_config.json, as are tokens added to any other tokenizer.
        let reserved: Vec<AddedToken> = model.reserved_tokens().map(|text| AddedToken::from(text, true)).collect();
        let mut hf = HfTokenizer::new(Vocabulary::Tiktoken(Box::new(model)));
        let words = SplitPattern::Regex(KIMI_WORDS.into());
        let split = Split::new(words, SplitDelimiterBehavior::Isolated, false).map_err(anyhow::Error::msg)?;
        hf.with_pre_tokenizer(Some(Unguard(Some(PreTokenizerWrapper::Split(split)))));
        hf.with_decoder(Some(DecoderWrapper::ByteLevel(ByteLevel::default())));
        hf.add_special_tokens(reserved).map_err(anyhow::Error::msg)?;
        let mut tokenizer = Self::from_parts(dir, hf)?;
        tokenizer.ends = KIMI_ENDS.iter().filter_map(|text| tokenizer.token_id(text)).collect();
        Ok(tokenizer)
    }

    fn from_parts(dir: &Path, mut hf: HfTokenizer) -> Result<Self> {
        if hf.get_pre_tokenizer().is_none() {
            hf.with_pre_tokenizer(Some(Unguard(None)));
        }
        hf.with_truncation(None).map_err(anyhow::Error::msg)?;
        hf.with_padding(None);
        let spelling = Spelling::of(&serde_json::to_value(hf.get_decoder())?)?;

        let config = read_json(dir, "tokenizer_config.json")?;
        let map = read_json(dir, "special_tokens_map.json")?;
        add_declared_tokens(&mut hf, &config)?;
        let mut names = Vec::new();
        for name in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            if let Some(text) = token_text(&config, name).or_else(|| token_text(&map, name)) {
                let known = add_special_token(&mut hf, &text)?;
                ensure!(
                    known || !matches!(name, "bos_token" | "eos_token"),
                    "{name} is {text:?}, which is no token of tokenizer.json; the files belong to different models"
                );
                names.push((name, text));
            }
        }
        let named = |name| names.iter().find(|(n, _)| *n == name).and_then(|(_, text)| hf.token_to_id(text));
        let (bos, eos) = (named("bos_token"), named("eos_token"));

        let added = hf.get_added_tokens_decoder();
        let special = (added.iter())
            .filter(|(_, token)| token.special || names.iter().any(|(_, text)| *text == token.content))
            .map(|(id, _)| *id)
            .collect();
        let names: Vec<(&str, &str)> = names.iter().map(|(name, text)| (*name, text.as_str())).collect();
        let template = template_source(dir, &config)?.map(|source| ChatTemplate::new(&source, &names)).transpose()?;
        let template_marks = (added.iter())
            .filter(|(_, token)| !token.special && !token.content.trim().is_empty())
            .filter(|(_, token)| template.as_ref().is_some_and(|template| template.source().contains(&token.content)))
            .map(|(id, _)| *id)
            .collect();
        let vocab_size = added.keys().map(|id| *id as usize + 1).max().unwrap_or(0).max(ids(hf.get_model()));
        let raw = RawRule::of(&config, hf.get_post_processor().is_some(), bos, eos)?;
        Ok(Tokenizer {
            hf,
            spelling,
            special,
            template_marks,
            eos,
            ends: Vec::new(),
            raw,
            template,
            vocab_size,
            dir: dir.display().to_string(),
        })
    }

    /// Ids of a text as the tokenizer itself would have it, BOS included where it adds one. Special tokens in the text
    /// count.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>> {
        match self.raw {
            RawRule::PostProcessor => self.encode(&escape(text), true),
            RawRule::Around { bos, eos } => {
                let ids = self.encode(&escape(text), false)?;
                Ok(bos.into_iter().chain(ids).chain(eos).collect())
            }
        }
    }

    /// Ids of a text that a template wrote: nothing is added, special tokens in the text count.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.encode(&escape(text), false)
    }

    /// Ids of a conversation: exactly what the template writes, nothing added. Where no message has the text of a
    /// special token, these are the ids of transformers' `apply_chat_template`. Special tokens typed into a message
    /// stay ordinary text; in messages that are not the assistant's or the system's, so do the other added tokens which
    /// the template uses as marks. Errors: no template, or a template that refuses the messages.
    pub fn encode_chat(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>> {
        let guarded: Vec<Message> =
            shield(|| Ok(messages.iter().map(|message| self.guard_message(message)).collect()))?;
        self.encode(&self.template()?.render(&guarded, options)?, false)
    }

    /// The conversation as text, for people; `encode_chat` has the ids.
    pub fn render_chat(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        self.template()?.render(messages, options)
    }

    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// The bytes that a token stands for, in part of a character perhaps. Empty for an id without a token (padding of
    /// the vocabulary).
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let added = self.hf.get_added_vocabulary().get_added_tokens_decoder();
        match added.get(&id) {
            Some(token) => token.content.clone().into_bytes(),
            None => self.hf.get_model().id_to_token(id).map_or(Vec::new(), |token| self.spelling.bytes(&token)),
        }
    }

    /// The text of ids; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut strip_space = self.strips_leading_space();
        let shown = ids.iter().filter(|id| !skip_special || !self.is_special(**id));
        let bytes: Vec<u8> =
            shown.flat_map(|id| strip_once(&self.token_bytes(*id), &mut strip_space).to_vec()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Control tokens such as BOS, EOS and turn marks, by the tokenizer's own account.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The highest id plus one. A checkpoint's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token by its text.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.hf.token_to_id(text)
    }

    /// The id of `eos_token`, one of the ids that end an answer.
    pub fn eos_text_id(&self) -> Option<u32> {
        self.eos
    }

    /// Control tokens that end an answer whatever the files beside say.
    pub fn end_ids(&self) -> &[u32] {
        &self.ends
    }

    pub(super) fn strips_leading_space(&self) -> bool {
        matches!(self.spelling, Spelling::Pieces { strip_space: true, .. })
    }

    fn template(&self) -> Result<&ChatTemplate> {
        self.template
            .as_ref()
            .with_context(|| format!("{}: no chat template; use --raw, or add chat_template.jinja", self.dir))
    }

    /// `text` may hold guards.
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encode = || self.hf.encode_fast(text, add_special_tokens).map_err(|error| anyhow!("{error}"));
        let encoding = shield(encode).with_context(|| format!("{}: the tokenizer cannot encode the text", self.dir))?;
        let ids = encoding.get_ids();
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab_size) {
            bail!("{}: tokenizer.json: post_processor: expected ids below {}, found {id}", self.dir, self.vocab_size);
            // words have others
        }
        Ok(ids.to_vec())
    }

    fn guard_message(&self, message: &Message) -> Message {
        let trusted = matches!(message.role.as_str(), "assistant" | "system");
        let extra = message.extra.iter().map(|(key, value)| (key.clone(), self.guard_json(value, trusted))).collect();
        Message { role: self.guard(&message.role, false), content: self.guard(&message.content, trusted), extra }
    }

    fn guard_json(&self, value: &Json, trusted: bool) -> Json {
        match value {
            Json::String(text) => self.guard(text, trusted).into(),
            Json::Array(items) => items.iter().map(|item| self.guard_json(item, trusted)).collect(),
            Json::Object(items) => {
                items.iter().map(|(key, item)| (self.guard(key, trusted), self.guard_json(item, trusted))).collect()
            }
            other => other.clone(),
        }
    }

    /// The text with a guard between the characters of each control token in it, so that it is no longer found as one.
    /// Templates still see the text, trim it and cut it; `Unguard` takes the guards out when control tokens have been
    /// found.
    fn guard(&self, text: &str, trusted: bool) -> String {
        let mut text = escape(text).into_owned();
        loop {
            // Repeated, because a token may hide behind one that overlaps it.
            let found = self.hf.get_added_vocabulary().extract_and_normalize(self.hf.get_normalizer(), &text);
            let spans: Vec<(usize, usize)> = (found.get_splits(OffsetReferential::Original, OffsetType::Byte).iter())
                .filter_map(|(_, span, tokens)| Some((*span, tokens.as_ref()?.first()?.id)))
                .filter(|(_, id)| self.special.contains(id) || (!trusted && self.template_marks.contains(id)))
                .map(|(span, _)| span)
                .filter(|(start, end)| text[*start..*end].chars().nth(1).is_some()) // between: there must be two
                .collect();
            if spans.is_empty() {
                return text;
            }
            for (start, end) in spans.into_iter().rev() {
                let mut guarded = String::new();
                for c in text[start..end].chars() {
                    if !guarded.is_empty() {
                        guarded.push(GUARD);
                    }
                    guarded.push(c);
                }
                text.replace_range(start..end, &guarded);
            }
        }
    }
}

/// The highest id of a vocabulary plus one. Few have holes, so that asking for each id is cheaper than a copy of the
/// whole.
fn ids(model: &Vocabulary) -> usize {
    let n = model.get_vocab_size();
    match (0..n as u32).all(|id| model.id_to_token(id).is_some()) {
        true => n,
        false => model.get_vocab().values().map(|id| *id as usize + 1).max().unwrap_or(0),
    }
}

/// A noncharacter, so that hardly a text has it. One that is in a text is doubled on the way in.
const GUARD: char = '\u{fdd0}';

fn escape(text: &str) -> Cow<'_, str> {
    match text.contains(GUARD) {
        true => Cow::Owned(text.replace(GUARD, "\u{fdd0}\u{fdd0}")),
        false => Cow::Borrowed(text),
    }
}

/// The checkpoint's pre-tokenizer, after taking guards out. It runs at the right moment: added tokens have been cut out
/// already, and words are not split yet. So a guarded text gets the ids that it would have if its control tokens were
/// unknown.
#[derive(Deserialize)]
struct Unguard(Option<PreTokenizerWrapper>);

impl PreTokenizer for Unguard {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        text.normalize(|part| {
            if part.get().contains(GUARD) {
                // Of two in a row the second is kept: that is a doubled one.
                let after_guard = Cell::new(false);
                part.filter(|c| {
                    let doubled = after_guard.get();
                    after_guard.set(c == GUARD && !doubled);
                    c != GUARD || doubled
                });
            }
            Ok(())
        })?;
        self.0.as_ref().map_or(Ok(()), |inner| inner.pre_tokenize(text))
    }
}

/// What `encode_raw` adds. As in transformers 5, `add_bos_token` or `add_eos_token` in the config overrule the
/// post-processor.
enum RawRule {
    PostProcessor,
    Around { bos: Option<u32>, eos: Option<u32> },
}

impl RawRule {
    fn of(config: &Map<String, Json>, has_post_processor: bool, bos: Option<u32>, eos: Option<u32>) -> Result<Self> {
        let flag = |name: &str| match config.get(name) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => {
                bail!("tokenizer_config.json: {name}: expected true or false, found {other}")
            }
        };
        let (add_bos, add_eos) = (flag("add_bos_token")?, flag("add_eos_token")?);
        if add_bos.is_none() && add_eos.is_none() && has_post_processor {
            return Ok(RawRule::PostProcessor);
        }
        Ok(RawRule::Around { bos: bos.filter(|_| add_bos == Some(true)), eos: eos.filter(|_| add_eos == Some(true)) })
    }
}

/// How a vocabulary spells bytes.
#[derive(Debug, PartialEq)]
enum Spelling {
    /// One printable character for each byte, as in GPT-2.
    ByteLevel { bytes: HashMap<char, u8> },
    /// SentencePiece: `▁` is a space, `<0x0A>` a byte, and the text begins with a space that is not shown.
    Pieces { byte_fallback: bool, strip_space: bool },
}

impl Spelling {
    /// From the decoder of tokenizer.json.
    fn of(decoder: &Json) -> Result<Self> {
        let steps = match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().cloned().unwrap_or_default(),
            Some(_) => vec![decoder.clone()],
            None => bail!("tokenizer.json: decoder: expected ByteLevel, Metaspace or a Sequence, found none"),
        };
        let (mut spaces, mut byte_fallback, mut strip_space) = (false, false, false);
        for step in &steps {
            match step["type"].as_str().unwrap_or_default() {
                "ByteLevel" if steps.len() == 1 => return Ok(Spelling::ByteLevel { bytes: byte_characters() }),
                "Metaspace" => {
                    ensure!(
                        step["replacement"] == "▁",
                        "tokenizer.json: decoder: expected the replacement ▁, found {}",
                        step["replacement"]
                    );
                    spaces = true;
                    strip_space = step["prepend_scheme"] != "never";
                }
                "Replace" if step["pattern"]["String"] == "▁" && step["content"] == " " => spaces = true,
                "ByteFallback" => byte_fallback = true,
                "Fuse" => {}
                "Strip" if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => strip_space = true,
                _ => bail!(
                    "tokenizer.json: decoder: expected ByteLevel, or ▁ for spaces with byte fallback, found {step}"
                ),
            }
        }
        ensure!(spaces, "tokenizer.json: decoder: expected a step that turns ▁ into spaces, found {decoder}");
        Ok(Spelling::Pieces { byte_fallback, strip_space })
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            // A token with a character outside the table is not spelled by bytes: it is its own text.
            Spelling::ByteLevel { bytes } => token
                .chars()
                .map(|c| bytes.get(&c).copied())
                .collect::<Option<_>>()
                .unwrap_or_else(|| token.as_bytes().to_vec()),
            Spelling::Pieces { byte_fallback, .. } => {
                let hex = token
                    .strip_prefix("<0x")
                    .and_then(|rest| rest.strip_suffix('>'))
                    .filter(|hex| *byte_fallback && hex.len() == 2);
                match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                    Some(byte) => vec![byte],
                    None => token.replace('▁', " ").into_bytes(),
                }
            }
        }
    }
}

/// A JSON object beside tokenizer.json; empty if there is no such file.
fn read_json(dir: &Path, name: &str) -> Result<Map<String, Json>> {
    match std::fs::read(dir.join(name)) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| anyhow!("{name}: expected a JSON object: {error}")),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Map::new()),
        Err(error) => bail!("{name}: {error}"),
    }
}

/// Config files write a token as its text or as an object with its text as `content`.
fn token_text(config: &Map<String, Json>, name: &str) -> Option<String> {
    let token = config.get(name)?;
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_string)
}

/// Adds the tokens of `added_tokens_decoder` and `additional_special_tokens` that tokenizer.json does not list, as
/// transformers does.
fn add_declared_tokens(hf: &mut HfTokenizer, config: &Map<String, Json>) -> Result<()> {
    let empty = Map::new();
    let declared = config.get("added_tokens_decoder").and_then(Json::as_object).unwrap_or(&empty);
    let mut tokens = Vec::new();
    for (id, token) in declared {
        let (Ok(id), Some(text)) = (id.parse::<u32>(), token["content"].as_str()) else {
            bail!("tokenizer_config.json: added_tokens_decoder: expected an id and a token with content, found {id:?}: {token}");
        };
        let flag = |name: &str| token[name].as_bool().unwrap_or(false);
        let added = AddedToken::from(text, flag("special"))
            .single_word(flag("single_word"))
            .lstrip(flag("lstrip"))
            .rstrip(flag("rstrip"))
            .normalized(token["normalized"].as_bool().unwrap_or(!flag("special")));
        tokens.push((id, added));
    }
    tokens.sort_by_key(|(id, _)| *id);
    for (id, token) in tokens {
        let text = token.content.clone();
        if !hf.get_added_vocabulary().get_vocab().contains_key(&text) {
            hf.add_tokens([token]).map_err(anyhow::Error::msg)?;
        }
        let found = hf.token_to_id(&text);
        ensure!(
            found == Some(id),
            "{text:?} has id {id} in tokenizer_config.json but {} in tokenizer.json; the files belong to different models",
            found.map_or("none".to_string(), |found| found.to_string())
        );
    }
    for token in config.get("additional_special_tokens").and_then(Json::as_array).into_iter().flatten() {
        add_special_token(hf, token.as_str().or_else(|| token["content"].as_str()).unwrap_or_default())?;
    }
    Ok(())
}

/// Makes a word of the vocabulary a special token, unless it is an added token already. False if there is no such word.
fn add_special_token(hf: &mut HfTokenizer, text: &str) -> Result<bool> {
    let known = hf.token_to_id(text).is_some();
    if known && !hf.get_added_vocabulary().get_vocab().contains_key(text) {
        hf.add_special_tokens([AddedToken::from(text, true)]).map_err(anyhow::Error::msg)?;
    }
    Ok(known)
}

/// The chat template's text. Of a list of named templates, the one called `default`.
fn template_source(dir: &Path, config: &Map<String, Json>) -> Result<Option<String>> {
    match std::fs::read_to_string(dir.join("chat_template.jinja")) {
        Ok(source) => return Ok(Some(source)),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => bail!("chat_template.jinja: {error}"),
    }
    let beside = read_json(dir, "chat_template.json")?;
    for (file, settings) in [("tokenizer_config.json", config), ("chat_template.json", &beside)] {
        match settings.get("chat_template") {
            None | Some(Json::Null) => {}
            Some(Json::String(source)) => return Ok(Some(source.clone())),
            Some(Json::Array(named)) => {
                let default =
                    named.iter().find(|entry| entry["name"] == "default").and_then(|entry| entry["template"].as_str());
                let names: Vec<String> = named.iter().map(|entry| entry["name"].to_string()).collect();
                return Ok(Some(
                    default
                        .with_context(|| {
                            format!("{file}: chat_template: expected one named \"default\", found {}", names.join(", "))
                        })?
                        .to_string(),
                ));
            }
            Some(other) => bail!("{file}: chat_template: expected a text or a list of named templates, found {other}"),
        }
    }
    Ok(None)
}
