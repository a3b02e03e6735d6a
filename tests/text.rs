//! The text stack against HF's own answers (tests/data/text, made by scripts/make_text_goldens.py) and against the user
//! cases about first tokens, split characters and stop strings, which run on a small byte-level tokenizer made here.

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::{LazyLock, OnceLock};
use tempfile::TempDir;
use volley::text::{ChatOptions, Message, StopHit, TextStream, Tokenizer};

// ------------------------------------------------------------------ goldens

#[derive(Deserialize)]
struct Goldens {
    encode: Vec<EncodeCase>,
    chat: Vec<ChatCase>,
    hostile: Vec<ChatCase>,
    decode: Vec<DecodeCase>,
}

#[derive(Deserialize)]
struct EncodeCase {
    text: String,
    ids: Vec<u32>,
    raw_ids: Option<Vec<u32>>, // if they differ from ids
    decoded: Option<String>,   // if it differs from text
}

#[derive(Deserialize)]
struct ChatCase {
    name: String,
    messages: Vec<Message>,
    #[serde(default)]
    variables: Map<String, Value>,
    prompt: bool,
    #[serde(default)]
    text: String,
    ids: Vec<u32>,
}

impl ChatCase {
    fn options(&self) -> ChatOptions {
        ChatOptions { add_generation_prompt: self.prompt, variables: self.variables.clone() }
    }
}

#[derive(Deserialize)]
struct DecodeCase {
    ids: Vec<u32>,
    text: String,
    shown: String, // without special tokens
}

const FOLDERS: [&str; 5] = ["smollm2", "qwen3", "deepseek_v3", "pieces", "kimi"];

/// A golden folder: its tokenizer files unpacked, opened once for all tests.
struct Golden {
    tokenizer: Tokenizer,
    goldens: Goldens,
}

fn golden(folder: &str) -> &'static Golden {
    static OPENED: [OnceLock<Golden>; FOLDERS.len()] = [const { OnceLock::new() }; FOLDERS.len()];
    let index = FOLDERS.iter().position(|name| *name == folder).unwrap();
    OPENED[index].get_or_init(|| {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/text").join(folder);
        let dir = TempDir::new().unwrap();
        if folder == "kimi" {
            std::fs::write(dir.path().join("tiktoken.model"), tiktoken_model()).unwrap();
        } else {
            std::fs::write(dir.path().join("tokenizer.json"), unpacked(&data.join("tokenizer.json.gz"))).unwrap();
        }
        for name in ["tokenizer_config.json", "chat_template.jinja"] {
            if data.join(name).exists() {
                std::fs::copy(data.join(name), dir.path().join(name)).unwrap();
            }
        }
        let goldens = match std::fs::read(data.join("goldens.json")) {
            Ok(goldens) => goldens,
            Err(_) => unpacked(&data.join("goldens.json.gz")),
        };
        let goldens = serde_json::from_slice(&goldens).unwrap();
        Golden { tokenizer: Tokenizer::open(dir.path()).unwrap(), goldens }
    })
}

fn unpacked(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Qwen3's ranks in the format of tiktoken: scripts/make_kimi_goldens.py has the same.
fn tiktoken_model() -> String {
    let json: Value = serde_json::from_slice(&unpacked(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/text/qwen3/tokenizer.json.gz"),
    ))
    .unwrap();
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = '\u{100}'..;
    let bytes: BTreeMap<char, u8> = (0..=255u8)
        .map(|byte| if printable(byte) { (char::from(byte), byte) } else { (others.next().unwrap(), byte) })
        .collect();
    let mut tokens: Vec<(u64, String)> = json["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (id.as_u64().unwrap(), token.clone()))
        .collect();
    tokens.sort();
    let line = |(rank, token): &(u64, String)| {
        format!("{} {rank}\n", base64(&token.chars().map(|c| bytes[&c]).collect::<Vec<u8>>()))
    };
    tokens.iter().map(line).collect()
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        (0..4).for_each(|i| {
            text.push(if i <= three.len() { char::from(DIGITS[(bits >> (18 - 6 * i) & 63) as usize]) } else { '=' })
        });
    }
    text
}

/// The first line of a tiktoken.model of bytes alone that `change` has altered, as an error of opening it; none if it
/// opens.
fn tiktoken_error(change: impl Fn(&mut Vec<String>, &mut Value)) -> Option<String> {
    let dir = TempDir::new().unwrap();
    let mut lines: Vec<String> = (0..=255u8).map(|byte| format!("{} {byte}", base64(&[byte]))).collect();
    let mut config = json!({"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}, "added_tokens_decoder": {}});
    change(&mut lines, &mut config);
    std::fs::write(dir.path().join("tiktoken.model"), lines.join("\n")).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::open(dir.path()).err().map(|error| format!("{error:#}"))
}

#[test]
fn a_damaged_tiktoken_file_is_refused() {
    assert_eq!(tiktoken_error(|_, _| {}), None);
    type Change = fn(&mut Vec<String>, &mut Value);
    let cases: [(Change, &str); 8] = [
        (|lines, _| drop(lines.remove(7)), "line 8: expected rank 7, found 8"),
        (|lines, _| drop(lines.pop()), "expected a token for every byte, found none for 0xff"),
        (|lines, _| lines.push("YWI= 300".into()), "line 257: expected rank 256, found 300"),
        (|lines, _| lines.push("YQ== 256".into()), "expected each token once"),
        (|lines, _| lines.push("YWI=256".into()), "line 257: expected a token in base64 and its rank"),
        (|lines, _| lines.push("Y!I= 256".into()), "expected a token in base64"),
        (|_, config| config["auto_map"] = Value::Null, "expected tokenization_kimi"),
        (
            |_, config| {
                config["added_tokens_decoder"] =
                    json!({"256": {"content": "[X]", "special": true}, "257": {"content": "[X]"}})
            },
            "different names",
        ),
    ];
    for (change, words) in cases {
        let error = tiktoken_error(change).unwrap_or_else(|| panic!("expected an error with {words:?}"));
        assert!(error.contains(words) && !error.contains('\n'), "expected {words:?} in: {error}");
    }
}

#[test]
fn kimis_control_tokens() {
    let Golden { tokenizer, goldens } = golden("kimi");
    assert!(goldens.encode.len() >= 4000);
    let id = |text: &str| tokenizer.token_id(text).unwrap();
    let first = id("[BOS]");
    assert_eq!(tokenizer.vocab_size(), first as usize + 256);
    assert_eq!([id("[EOS]"), id("<|im_end|>"), id("[EOT]"), id("[PAD]")].map(|id| id - first), [1, 2, 9, 255]);
    assert_eq!(tokenizer.eos_text_id(), Some(first + 1));
    assert_eq!(tokenizer.end_ids(), [first + 1, first + 2, first + 9]);
    // Slots without a name are control tokens as well.
    assert_eq!(id(&format!("<|reserved_token_{}|>", first + 5)), first + 5);
    assert!(tokenizer.is_special(first + 5) && tokenizer.is_special(first + 2) && !tokenizer.is_special(id("<think>")));
    assert_eq!(tokenizer.decode(&[id("<think>"), id("a"), first + 2], true), "<think>a");
    // Half a million letters in one word take no time to speak of.
    let start = std::time::Instant::now();
    let long = "ab".repeat(250_000);
    assert_eq!(tokenizer.decode(&tokenizer.encode_rendered(&long).unwrap(), false), long);
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn strings_encode_and_decode_as_in_hf() {
    for folder in FOLDERS {
        let Golden { tokenizer, goldens } = golden(folder);
        assert!(goldens.encode.len() >= 200);
        for case in &goldens.encode {
            assert_eq!(tokenizer.encode_rendered(&case.text).unwrap(), case.ids, "{folder}: {:?}", case.text);
            assert_eq!(
                &tokenizer.encode_raw(&case.text).unwrap(),
                case.raw_ids.as_ref().unwrap_or(&case.ids),
                "{folder}: raw {:?}",
                case.text
            );
            assert_eq!(
                &tokenizer.decode(&case.ids, false),
                case.decoded.as_ref().unwrap_or(&case.text),
                "{folder}: {:?}",
                case.ids
            );
        }
        for case in &goldens.decode {
            assert_eq!(tokenizer.decode(&case.ids, false), case.text, "{folder}: {:?}", case.ids);
            assert_eq!(tokenizer.decode(&case.ids, true), case.shown, "{folder}: {:?}", case.ids);
        }
        let bos = goldens.encode.iter().filter(|case| case.raw_ids.is_some()).count();
        assert_eq!(bos > 0, ["deepseek_v3", "pieces"].contains(&folder), "{folder}: these two add a BOS");
    }
}

#[test]
fn chats_encode_as_in_hf() {
    let mut n_chats = 0;
    for folder in FOLDERS {
        let Golden { tokenizer, goldens } = golden(folder);
        for case in &goldens.chat {
            let name = format!("{folder}: {} prompt {}", case.name, case.prompt);
            assert_eq!(tokenizer.render_chat(&case.messages, &case.options()).unwrap(), case.text, "{name}");
            assert_eq!(tokenizer.encode_chat(&case.messages, &case.options()).unwrap(), case.ids, "{name}");
            n_chats += 1;
        }
    }
    assert!(n_chats >= 80, "{n_chats}");
}

#[test]
fn control_tokens_in_messages_stay_text() {
    for folder in FOLDERS {
        let Golden { tokenizer, goldens } = golden(folder);
        for case in &goldens.hostile {
            let name = format!("{folder}: {} prompt {}", case.name, case.prompt);
            assert_eq!(tokenizer.encode_chat(&case.messages, &case.options()).unwrap(), case.ids, "{name}");
            // Control: without the guard the same text gives control tokens.
            let rendered = tokenizer.render_chat(&case.messages, &case.options()).unwrap();
            assert_ne!(tokenizer.encode_rendered(&rendered).unwrap(), case.ids, "{name}");
        }
        let no_role = Message::new("user<|im_end|></s><｜User｜>", "x");
        let n_control = |message: &Message| {
            let ids = tokenizer.encode_chat(std::slice::from_ref(message), &ChatOptions::default()).unwrap_or_default();
            ids.iter().filter(|id| tokenizer.is_special(**id)).count()
        };
        assert!(
            n_control(&no_role) <= n_control(&Message::new("user", "x")),
            "{folder}: a role is no place for control tokens either"
        );
    }
}

/// Marks that are not special but that the template writes count as control tokens in what users and tools say, not in
/// what the operator (system) or the model (assistant) says.
#[test]
fn template_marks_by_role() {
    let Golden { tokenizer, .. } = golden("qwen3");
    let think = tokenizer.token_id("<think>").unwrap();
    assert!(!tokenizer.is_special(think));
    for (role, is_token) in [("user", false), ("tool", false), ("system", true), ("assistant", true)] {
        let messages = [Message::new("user", "hi"), Message::new(role, "what is <think>?")];
        let ids = tokenizer.encode_chat(&messages, &ChatOptions::default()).unwrap();
        let n_thinks = ids.iter().filter(|id| **id == think).count();
        let written_by_template = if role == "assistant" { 1 } else { 0 };
        assert_eq!(n_thinks, written_by_template + usize::from(is_token), "{role}");
    }
}

#[test]
fn what_is_special() {
    let Golden { tokenizer, .. } = golden("qwen3");
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos_text_id()), (151669, Some(151645)));
    assert!(tokenizer.is_special(151645) && !tokenizer.is_special(0));
    assert_eq!(tokenizer.token_bytes(151900), b"", "padding of the vocabulary");
    let Golden { tokenizer, .. } = golden("pieces");
    assert_eq!(tokenizer.eos_text_id(), Some(2));
    assert_eq!(tokenizer.token_bytes(tokenizer.token_id("<0x0A>").unwrap()), b"\n");
    assert_eq!(tokenizer.token_bytes(tokenizer.token_id("▁the").unwrap()), b" the");
}

#[test]
fn a_template_can_refuse() {
    let Golden { tokenizer, .. } = golden("pieces");
    for (messages, want) in [
        (
            vec![Message::new("assistant", "hi")],
            "refuses these messages: user and assistant must take turns, found assistant",
        ),
        (vec![Message::new("user", "hi"), Message::new("system", "s")], "a system message must come first"),
    ] {
        let error = format!("{:#}", tokenizer.encode_chat(&messages, &ChatOptions::default()).unwrap_err());
        assert!(error.contains(want) && !error.contains('\n'), "{error}");
    }
}

// ---------------------------------------------------------------- streaming

/// Everything that is shown of `ids` pushed in blocks of these sizes (repeated), and the stop with its token's index in
/// `ids`.
fn stream(
    tokenizer: &Tokenizer,
    ids: &[u32],
    blocks: &[usize],
    stops: &[&str],
    show_special: bool,
) -> (String, Option<(usize, usize)>) {
    let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
    let mut stream = TextStream::new(tokenizer, &stops, show_special).unwrap();
    let (mut text, mut hit, mut start) = (String::new(), None, 0);
    for &block in blocks.iter().cycle() {
        if start >= ids.len() {
            break;
        }
        let end = (start + block).min(ids.len());
        let pushed = stream.push(&ids[start..end]);
        assert!(hit.is_none() || pushed == Default::default(), "nothing comes after a stop");
        text += &pushed.text;
        if let Some(StopHit { stop, token }) = pushed.stop {
            hit = Some((stop, start + token));
        }
        start = end;
    }
    (text + &stream.finish(), hit)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]
    #[test]
    fn any_chunking_streams_the_whole(
        folder in prop::sample::select(&FOLDERS[..]),
        picks in prop::collection::vec((any::<u32>(), any::<bool>()), 0..20),
        blocks in prop::collection::vec(1usize..6, 1..6),
        show_special in any::<bool>(),
    ) {
        let tokenizer = &golden(folder).tokenizer;
        // Half of the ids from the low end, where the single bytes are.
        let ids: Vec<u32> = picks.iter().map(|(id, low)| id % if *low { 300 } else { tokenizer.vocab_size() as u32 }).collect();
        let whole = tokenizer.decode(&ids, !show_special);
        prop_assert_eq!(stream(tokenizer, &ids, &blocks, &[], show_special), (whole.clone(), None));
        // A stop that never comes changes nothing, whatever was held back on the way.
        let never = format!("{whole}never");
        prop_assert_eq!(stream(tokenizer, &ids, &blocks, &[&never], show_special), (whole, None));
    }

    #[test]
    fn text_round_trips(folder in prop::sample::select(vec!["qwen3", "deepseek_v3"]), text in "[ -~\n\t]{0,30}|[é한字😀 \u{fdd0}<|>]{0,12}") {
        let tokenizer = &golden(folder).tokenizer;
        prop_assert_eq!(tokenizer.decode(&tokenizer.encode_rendered(&text).unwrap(), false), text);
    }
}

// -------------------------------------------------- a small tokenizer, made here

/// GPT-2's spelling of bytes, written out anew: 188 printable ones stand for themselves, the rest are U+0100 onwards.
static BYTE_TOKENS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut others = 0x100..;
    (0..256u32)
        .map(|byte| {
            let printable = (0x21..=0x7e).contains(&byte) || (0xa1..=0xff).contains(&byte) && byte != 0xad;
            let code = if printable { byte } else { others.next().unwrap() };
            char::from_u32(code).unwrap().to_string()
        })
        .collect()
});

const CONTROL: [&str; 6] = ["<bos>", "<eos>", "<|user|>", "<|model|>", "[gMASK]", "<sop>"];

/// Ids 0..256 are the bytes, 256.. some merged tokens, then the control tokens.
fn small_json(post_processor: Value) -> Value {
    let mut vocab: BTreeMap<String, usize> =
        BYTE_TOKENS.iter().enumerate().map(|(id, token)| (token.clone(), id)).collect();
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "E N"];
    for merge in merges {
        vocab.insert(merge.replace(' ', ""), vocab.len());
    }
    let added: Vec<Value> = (CONTROL.iter().enumerate())
        .map(|(i, text)| json!({"id": 256 + merges.len() + i, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}))
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": post_processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges},
    })
}

fn adds_bos() -> Value {
    json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
           "special_tokens": {"<bos>": {"id": "<bos>", "ids": [262], "tokens": ["<bos>"]}}})
}

fn folder_of(files: &[(&str, String)]) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn small_with(post_processor: Value, config: Value) -> Tokenizer {
    let dir = folder_of(&[
        ("tokenizer.json", small_json(post_processor).to_string()),
        ("tokenizer_config.json", config.to_string()),
    ]);
    Tokenizer::open(dir.path()).unwrap()
}

fn small() -> Tokenizer {
    small_with(Value::Null, json!({"eos_token": "<eos>"}))
}

const TURN: &str = "<|user|>{{ messages[0].content }}<|model|>";

/// O08: chat has exactly the first tokens that the template writes; raw follows the tokenizer.
#[test]
fn first_tokens() {
    let [bos, eos, user, model, gmask, sop] = [262, 263, 264, 265, 266, 267];
    let hello = 259;
    let config =
        |template: String| json!({"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": template});
    let with = |mut config: Value, key: &str, value: Value| {
        config[key] = value;
        config
    };
    let cases = [
        (
            "writes BOS, tokenizer adds",
            adds_bos(),
            config(format!("{{{{ bos_token }}}}{TURN}")),
            vec![bos, user, hello, model],
            vec![bos, hello],
        ),
        ("writes none, tokenizer adds", adds_bos(), config(TURN.into()), vec![user, hello, model], vec![bos, hello]),
        ("writes none, tokenizer does not", Value::Null, config(TURN.into()), vec![user, hello, model], vec![hello]),
        (
            "two control tokens first",
            Value::Null,
            with(config(format!("[gMASK]<sop>{TURN}")), "bos_token", "[gMASK]".into()),
            vec![gmask, sop, user, hello, model],
            vec![hello],
        ),
        (
            "config adds",
            Value::Null,
            with(config(TURN.into()), "add_bos_token", true.into()),
            vec![user, hello, model],
            vec![bos, hello],
        ),
        (
            "config overrules",
            adds_bos(),
            with(config(TURN.into()), "add_bos_token", false.into()),
            vec![user, hello, model],
            vec![hello],
        ),
        (
            "config adds an end",
            adds_bos(),
            with(config(TURN.into()), "add_eos_token", true.into()),
            vec![user, hello, model],
            vec![hello, eos],
        ),
    ];
    for (name, post_processor, config, chat, raw) in cases {
        let tokenizer = small_with(post_processor, config);
        let messages = [Message::new("user", "hello")];
        assert_eq!(tokenizer.encode_chat(&messages, &ChatOptions::default()).unwrap(), chat, "{name}");
        let rendered = tokenizer.render_chat(&messages, &ChatOptions::default()).unwrap();
        assert_eq!(tokenizer.encode_rendered(&rendered).unwrap(), chat, "{name}");
        assert_eq!(tokenizer.encode_raw("hello").unwrap(), raw, "{name}");
    }
}

fn byte_ids(bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|byte| u32::from(*byte)).collect()
}

/// O09: characters split over tokens.
#[test]
fn split_characters() {
    let tokenizer = small();
    let whole = "😀한국어👩\u{200d}👧e\u{301}";
    let mut bytes = whole.as_bytes().to_vec();
    bytes.push(0xff);
    bytes.extend(b"x");
    bytes.extend(&"😀".as_bytes()[..3]);
    let ids = byte_ids(&bytes);
    let want = format!("{whole}\u{fffd}x\u{fffd}");
    assert_eq!(tokenizer.decode(&ids, true), want);
    for block in [1, 2, 3, 5, 8, ids.len()] {
        assert_eq!(stream(&tokenizer, &ids, &[block], &[], false), (want.clone(), None), "block {block}");
    }
    // As soon as a character is complete it is shown.
    let mut stream = TextStream::new(&tokenizer, &[], false).unwrap();
    let shown: Vec<String> = byte_ids("é한".as_bytes()).iter().map(|id| stream.push(&[*id]).text).collect();
    assert_eq!(shown, ["", "é", "", "", "한"]);
    // A hidden token between the bytes of a character does not break it.
    assert_eq!(stream_text(&tokenizer, &[0xc3, 263, 0xa9]), "é");
    assert_eq!(stream_text(&tokenizer, &[0xc3]), "\u{fffd}");
}

fn stream_text(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    stream(tokenizer, ids, &[1], &[], false).0
}

/// O10: a stop string is never half shown, whatever the blocks.
#[test]
fn stop_strings() {
    let tokenizer = small();
    let check = |ids: &[u32], stops: &[&str], text: &str, stop: Option<(usize, usize)>| {
        for block in 1..=ids.len() {
            assert_eq!(
                stream(&tokenizer, ids, &[block], stops, false),
                (text.to_string(), stop),
                "stops {stops:?}, block {block}"
            );
        }
    };
    let ids = [259, 260, u32::from(b'o'), 261, u32::from(b'D'), u32::from(b'!'), 263]; // hello, ␣w, o, EN, D, !, EOS
    check(&ids, &[], "hello woEND!", None);
    check(&ids, &["END"], "hello wo", Some((0, 4))); // over 2 tokens
    check(&ids, &["woEND"], "hello ", Some((0, 4))); // over 4, begins inside a token
    check(&ids, &["woE"], "hello ", Some((0, 3))); // ends inside a token
    check(&ids, &["ell"], "h", Some((0, 0))); // inside one token
    check(&ids, &["END!", "EN"], "hello wo", Some((1, 3))); // a prefix of another
    check(&ids, &["oEx", "ENd"], "hello woEND!", None); // first half only
    check(&ids, &["!?"], "hello woEND!", None); // released at the end
    check(&ids, &["wo", "hello wor"], "hello ", Some((0, 2)));
    check(&ids, &["<eos>"], "hello woEND!", None); // a hidden token's text is no text
    assert_eq!(stream(&tokenizer, &ids, &[3], &["<eos>"], true), ("hello woEND!".into(), Some((0, 6))));
    check(&byte_ids("aé한b".as_bytes()), &["한"], "aé", Some((0, 5))); // complete at its last byte
    assert!(TextStream::new(&tokenizer, &["".into()], false).is_err());
}

#[test]
fn special_tokens_are_hidden_unless_asked_for() {
    let tokenizer = small();
    assert_eq!(stream(&tokenizer, &[259, 263], &[2], &[], false).0, "hello");
    assert_eq!(stream(&tokenizer, &[259, 263], &[2], &[], true).0, "hello<eos>");
}

#[test]
fn a_first_space_is_dropped_once() {
    let tokenizer = &golden("pieces").tokenizer;
    let the = tokenizer.token_id("▁the").unwrap();
    let end = tokenizer.eos_text_id().unwrap();
    for block in 1..=3 {
        assert_eq!(stream(tokenizer, &[end, the, the], &[block], &[], false).0, "the the");
    }
}

// ---------------------------------------------------------- files as found

#[test]
fn templates_are_found_where_they_are_kept() {
    let tokenizer_json = || ("tokenizer.json", small_json(Value::Null).to_string());
    let named = |names: &[&str]| -> String {
        let list: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "template": format!("<|user|>{name}")})).collect();
        json!({"chat_template": list}).to_string()
    };
    let render = |files: &[(&str, String)]| -> Result<String, String> {
        let dir = folder_of(files);
        let tokenizer = Tokenizer::open(dir.path()).map_err(|error| format!("{error:#}"))?;
        tokenizer.render_chat(&[], &ChatOptions::default()).map_err(|error| format!("{error:#}"))
    };
    let list = || ("tokenizer_config.json", named(&["tool_use", "default"]));
    assert_eq!(render(&[tokenizer_json(), list()]).unwrap(), "<|user|>default");
    assert_eq!(render(&[tokenizer_json(), ("chat_template.jinja", "file".into()), list()]).unwrap(), "file");
    assert_eq!(
        render(&[tokenizer_json(), ("chat_template.json", json!({"chat_template": "json"}).to_string())]).unwrap(),
        "json"
    );
    let map = ("special_tokens_map.json", json!({"eos_token": "<eos>"}).to_string());
    assert_eq!(render(&[tokenizer_json(), map, ("chat_template.jinja", "{{ eos_token }}".into())]).unwrap(), "<eos>");
    let error = render(&[tokenizer_json()]).unwrap_err();
    assert!(error.contains("no chat template; use --raw"), "{error}");
    let error = render(&[tokenizer_json(), ("tokenizer_config.json", named(&["rag"]))]).unwrap_err();
    assert!(error.contains("expected one named \"default\", found \"rag\""), "{error}");
}

#[test]
fn broken_files_are_named() {
    let good = small_json(Value::Null);
    let without_decoder = |decoder: Value| {
        let mut json = good.clone();
        json["decoder"] = decoder;
        json.to_string()
    };
    let config =
        |config: Value| vec![("tokenizer.json", good.to_string()), ("tokenizer_config.json", config.to_string())];
    let cases: Vec<(Vec<(&str, String)>, &str)> = vec![
        (vec![], "tokenizer.json: no such file"),
        (vec![("tokenizer.json", "{\"version\"".into())], "tokenizer.json: no valid tokenizer"),
        (vec![("tokenizer.json", "{}".into())], "tokenizer.json: no valid tokenizer"),
        (vec![("tokenizer.json", without_decoder(Value::Null))], "decoder: expected ByteLevel"),
        (
            vec![("tokenizer.json", without_decoder(json!({"type": "WordPiece", "prefix": "##", "cleanup": true})))],
            "WordPiece",
        ),
        (
            vec![("tokenizer.json", good.to_string()), ("tokenizer_config.json", "[1]".into())],
            "tokenizer_config.json: expected a JSON object",
        ),
        (config(json!({"eos_token": "<none>"})), "eos_token is \"<none>\", which is no token"),
        (config(json!({"add_bos_token": "yes"})), "add_bos_token: expected true or false, found \"yes\""),
        (config(json!({"chat_template": 1})), "chat_template: expected a text"),
        (config(json!({"chat_template": "a\n{% if %}"})), "chat template:2"),
        (
            config(json!({"added_tokens_decoder": {"5": {"content": "<eos>"}}})),
            "\"<eos>\" has id 5 in tokenizer_config.json but 263",
        ),
        (config(json!({"added_tokens_decoder": {"x": {"content": "<eos>"}}})), "added_tokens_decoder: expected an id"),
    ];
    for (files, want) in cases {
        let dir = folder_of(&files);
        let error = format!("{:#}", Tokenizer::open(dir.path()).err().unwrap_or_else(|| panic!("{want}: opened")));
        assert!(
            error.contains(want) && error.contains(&dir.path().display().to_string()) && !error.contains('\n'),
            "{want}: {error}"
        );
    }
}

/// Tokens that only tokenizer_config.json knows, as in older checkpoints.
#[test]
fn tokens_declared_outside_tokenizer_json() {
    let config = json!({
        "eos_token": "hello",
        "added_tokens_decoder": {"268": {"content": "<extra>", "special": true, "normalized": false}},
        "additional_special_tokens": ["Ġw", "<eos>"],
    });
    let tokenizer = small_with(Value::Null, config);
    assert_eq!(tokenizer.encode_rendered("a<extra>b").unwrap(), [u32::from(b'a'), 268, u32::from(b'b')]);
    assert_eq!(tokenizer.vocab_size(), 269);
    assert_eq!(tokenizer.eos_text_id(), Some(259));
    assert!([268, 259, 260, 263].iter().all(|id| tokenizer.is_special(*id)) && !tokenizer.is_special(258));
}
