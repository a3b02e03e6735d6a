//! User cases of the open set, on the real binary: each test is named after its case. Loading in finer detail is tested
//! in checkpoint.rs, text in text.rs, signals (O24) in cli.rs: docs/cases.md has the whole table.
#[path = "support/binary.rs"]
mod binary;
#[path = "support/quantised.rs"]
mod quantised;
mod support;

use binary::{finish, on, volley, Done, Terminal};
use half::bf16;
use quantised::{read_tensors, write_quantised, Scheme};
use serde_json::{json, Value};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{
    join_safetensors, shard_name, split_safetensors, write_safetensors, Head, BOS, CHATML, IM_END, IM_START, T0,
};
use tempfile::TempDir;
use volley::text::Tokenizer;

fn made(t0: &T0) -> TempDir {
    let dir = TempDir::new().unwrap();
    t0.write(dir.path());
    dir
}

/// One greedy answer with `run --json`: ids of the tokens, and the last object.
fn answer(dir: &Path, args: &[&str]) -> (Vec<u64>, Value) {
    let done = on(dir, "run", &[&["--json"], args, &["--", "hi"]].concat(), b"").expect(0);
    let mut lines = done.json();
    let last = lines.pop().unwrap();
    (lines.iter().filter_map(|line| line["token"].as_u64()).collect(), last)
}

fn ids(dir: &Path, args: &[&str]) -> Vec<u64> {
    answer(dir, args).0
}

/// Ids that `--show-tokens` names on stderr.
fn prompt_ids(done: &Done) -> Vec<u32> {
    let line = done
        .err
        .lines()
        .find_map(|line| line.strip_prefix("prompt tokens: "))
        .unwrap_or_else(|| panic!("{}", done.err));
    serde_json::from_str(line).unwrap()
}

/// A model that says these ids and then ends: attention and feed-forward are off, and the head sends each token to the
/// next. No id may occur twice. The first follows the last of the chat prompt, a line break.
fn scripted(script: &[u32]) -> TempDir {
    let t0 = T0::new();
    let dir = made(&t0);
    let mut tensors = t0.tensors();
    let embed = tensors.iter().find(|t| t.name == "model.embed_tokens.weight").unwrap().bytes.clone();
    let row = |id: u32| id as usize * 128..(id as usize + 1) * 128; // 64 numbers of two bytes
    for tensor in &mut tensors {
        if tensor.name.ends_with("o_proj.weight") || tensor.name.ends_with("down_proj.weight") {
            tensor.bytes.fill(0);
        } else if tensor.name.ends_with("norm.weight") {
            tensor.bytes = bf16::ONE.to_le_bytes().repeat(tensor.bytes.len() / 2);
        } else if tensor.name == "lm_head.weight" {
            tensor.bytes.fill(0);
            let mut from = u32::from(b'\n');
            for &to in script.iter().chain([&IM_END]) {
                assert!(tensor.bytes[row(to)].iter().all(|&b| b == 0), "{to} occurs twice");
                tensor.bytes[row(to)].copy_from_slice(&embed[row(from)]);
                from = to;
            }
        }
    }
    write_safetensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

fn bytes(text: &[u8]) -> Vec<u32> {
    text.iter().map(|&b| b.into()).collect()
}

/// docs/cases.md has all cases, and names tests that exist.
#[test]
fn the_table_of_cases_is_true() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = fs::read_to_string(root.join("docs/cases.md")).unwrap();
    let (mut folders, mut sources) = (vec![root.join("tests"), root.join("src")], String::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
            } else if entry.extension().is_some_and(|end| end == "rs") {
                sources += &fs::read_to_string(entry).unwrap();
            }
        }
    }
    for case in 1..=25 {
        assert!(table.contains(&format!("\n| O{case:02} ")), "O{case:02} is not in the table");
    }
    let is_test = |name: &&str| {
        name.contains('_') && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    let named: Vec<&str> = table.split('`').skip(1).step_by(2).filter(is_test).collect();
    assert!(named.len() > 80, "{named:?}");
    for name in named {
        assert!(sources.contains(&format!("fn {name}(")), "no test {name}");
    }
}

#[test]
fn o01_a_damaged_shard_does_not_load() {
    let check = |change: &dyn Fn(&Path), words: &[&str]| {
        let dir = made(&T0::new().shards(3));
        let shard = dir.path().join(shard_name(2, 3));
        change(&shard);
        on(dir.path(), "run", &["hi"], b"").expect_error(2, words);
    };
    let name = shard_name(2, 3);
    let whole = made(&T0::new().shards(3));
    let len = fs::metadata(whole.path().join(&name)).unwrap().len();
    let cut = |n: u64| move |path: &Path| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(n).unwrap();
    let incomplete = "the download is likely incomplete";
    check(&cut(len - 4096), &[&name, &len.to_string(), &(len - 4096).to_string(), incomplete]);
    check(&cut(100), &[&name, "found 100", incomplete]);
    check(&cut(5), &[&name, "found 5", incomplete]);
    let append = |path: &Path| fs::OpenOptions::new().append(true).open(path).unwrap().write_all(&[0; 16]).unwrap();
    check(&append, &[&name, &len.to_string(), &(len + 16).to_string(), "appended"]);
    let huge = |path: &Path| {
        let mut file = fs::read(path).unwrap();
        file[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
        fs::write(path, file).unwrap();
    };
    check(&huge, &[&name, &(1u64 << 60).to_string(), incomplete]);
    // Entries of the header changed, its length kept.
    let entry = |change: fn(&mut Value)| {
        move |path: &Path| {
            let (mut header, data) = split_safetensors(path);
            let tensor =
                header.as_object_mut().unwrap().iter_mut().find(|(name, _)| *name != "__metadata__").unwrap().1;
            change(tensor);
            fs::write(path, join_safetensors(&serde_json::to_vec(&header).unwrap(), &data)).unwrap();
        }
    };
    check(&entry(|t| t["shape"][0] = json!(t["shape"][0].as_u64().unwrap() + 1)), &[&name, "bytes"]);
    let overlap = |t: &mut Value| {
        t["data_offsets"][0] = json!(t["data_offsets"][0].as_u64().unwrap() + 64);
        t["data_offsets"][1] = json!(t["data_offsets"][1].as_u64().unwrap() + 64);
    };
    check(&entry(overlap), &[&name]);
}

#[test]
fn o02_absent_shards_are_listed_in_one_line() {
    let dir = made(&T0::new().shards(3));
    fs::remove_file(dir.path().join(shard_name(3, 3))).unwrap();
    let start = Instant::now();
    on(dir.path(), "run", &["hi"], b"").expect_error(2, &[&shard_name(3, 3), dir.path().to_str().unwrap()]);
    assert!(start.elapsed() < Duration::from_secs(1));
    fs::remove_file(dir.path().join(shard_name(1, 3))).unwrap();
    symlink("../blobs/gone", dir.path().join(shard_name(1, 3))).unwrap();
    on(dir.path(), "chat", &[], b"hi\n").expect_error(2, &[&shard_name(1, 3), &shard_name(3, 3), "dangling link"]);
    // Before a GPU is opened, so that it is the error on a machine without one, too.
    for device in ["cuda", "auto"] {
        binary::run(&["run", "-m", dir.path().to_str().unwrap(), "--device", device, "hi"])
            .expect_error(2, &[&shard_name(3, 3)]);
    }
}

#[test]
fn o03_tied_and_untied_heads() {
    let get = |t0: T0| on(made(&t0).path(), "run", &["--json", "-v", "-n", "12", "hi"], b"").expect(0);
    let tokens = |done: &Done| done.json().iter().map(|line| line["token"].clone()).collect::<Vec<_>>();
    let tied = get(T0::new().tied(true));
    let spare_equal = get(T0::new().tied(true).head(Head::Equal));
    let spare_other = get(T0::new().tied(true).head(Head::Own));
    let untied_equal = get(T0::new().tied(false).head(Head::Equal));
    let untied_own = get(T0::new().tied(false).head(Head::Own));
    for other in [&spare_equal, &spare_other, &untied_equal] {
        assert_eq!(tokens(&tied), tokens(other));
    }
    assert_ne!(tokens(&tied), tokens(&untied_own)); // the test would see a wrong head
    assert_eq!(spare_other.err.matches("lm_head.weight").count(), 1, "{}", spare_other.err);
    assert!(!spare_equal.err.contains("lm_head.weight"), "{}", spare_equal.err);
    let dir = made(&T0::new().tied(false).head(Head::Absent));
    on(dir.path(), "run", &["hi"], b"").expect_error(2, &["lm_head.weight", "tie_word_embeddings"]);
}

/// Reads are large and of needed tensors only: checkpoint.rs counts them. Here: both ways give the same, and the choice
/// is printed.
#[test]
fn o05_mapped_and_plain_reads_are_equal() {
    let dir = made(&T0::new().shards(3).padding(1 << 20));
    let mapped = on(dir.path(), "run", &["-v", "-n", "20", "hi"], b"").expect(0);
    let plain = on(dir.path(), "run", &["-v", "-n", "20", "--no-mmap", "hi"], b"").expect(0);
    assert_eq!(mapped.out, plain.out);
    assert!(mapped.err.contains("mapped") && plain.err.contains("plain reads"), "{} {}", mapped.err, plain.err);
}

/// A library that stands for slow storage: support/slow_storage.c.
fn slow_storage(dir: &Path) -> std::path::PathBuf {
    let (source, library) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/slow_storage.c"), dir.join("slow_storage.so"));
    let compiled = Command::new("g++")
        .args(["-xc", "-O1", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(source)
        .arg("-ldl")
        .status();
    assert!(compiled.expect("g++, which the kernels' tests need too").success());
    library
}

/// On a network mount weights are read, not mapped, in few large pieces and nothing that is not needed; at a terminal a
/// load that takes its time shows bytes and rate.
#[test]
fn o05_a_slow_network_mount() {
    let (padding, shards) = (6 << 20, 2);
    let t0 = T0::new().shards(shards).padding(padding).set("hidden_size", 1024).set("intermediate_size", 4096);
    let dir = made(&t0);
    let (library, log) = (slow_storage(dir.path()), dir.path().join("reads"));
    let mut command = volley(&["run", "-m", dir.path().to_str().unwrap(), "--device", "cpu", "-v", "-n", "1", "hi"]);
    command.env("LD_PRELOAD", library).env("SLOW_LOG", &log).env("SLOW_MS", "400");
    let mut terminal = Terminal::start(command);
    terminal.send("\x04"); // stdin is a terminal, and is not read
    let (shown, code) = terminal.end();
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("plain reads") && !shown.contains("mapped"), "{shown}");
    assert!(shown.contains("loading") && shown.contains("MiB of ") && shown.contains("MiB/s"), "{shown}");
    let reads: Vec<usize> = fs::read_to_string(log).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    let used: usize =
        t0.tensors().iter().filter(|tensor| tensor.dtype == "BF16").map(|tensor| tensor.bytes.len()).sum();
    let (large, small): (Vec<usize>, Vec<usize>) = reads.iter().partition(|bytes| **bytes >= 1 << 20);
    // Small: two for each header, and the tail of each of at most six runs.
    assert!(small.len() <= 2 * shards + 6, "{reads:?}");
    assert!(large.len() >= 2 && reads.iter().sum::<usize>() < used + (64 << 10), "{reads:?}, {used} bytes are used");
}

#[test]
fn o04_fp8_scales_are_used() {
    let (dir, plain) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write_quantised(&T0::new(), Scheme::Fp8Block(32, 32), dir.path(), plain.path());
    let run = |dir: &Path| on(dir, "run", &["-v", "-n", "12", "hi"], b"");
    // Seven linear layers of each of four decoder layers.
    let done = run(dir.path()).expect(0);
    assert!(
        done.err.contains("28 quantised matrices with 28 tensors of scales, fp8 e4m3 in blocks of 32 x 32"),
        "{}",
        done.err
    );
    assert_eq!(done.out, run(plain.path()).expect(0).out);
    let file = dir.path().join("model.safetensors");
    let mut tensors = read_tensors(&file);
    let name = "model.layers.2.mlp.up_proj.weight_scale_inv";
    tensors.retain(|tensor| tensor.name != name);
    write_safetensors(&file, &tensors);
    run(dir.path()).expect_error(2, &[name, "no such tensor"]);
}

#[test]
fn o06_rope_scaling_is_used() {
    // A prompt that fills most of the context: at short distances the kinds hardly differ.
    let prompt = "a long way round ".repeat(12);
    let long = |t0: &T0| {
        on(made(t0).path(), "run", &["--raw", "--json", "--ignore-eos", "-v", "-n", "12", &prompt], b"").expect(0)
    };
    let tokens = |done: &Done| done.json().iter().map(|line| line["token"].clone()).collect::<Vec<_>>();
    let llama3 = |key: &str| json!({key: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32});
    let plain = long(&T0::new());
    let (old, new) = (long(&T0::new().rope(llama3("type"))), long(&T0::new().rope(llama3("rope_type"))));
    assert_eq!(tokens(&old), tokens(&new));
    assert_ne!(tokens(&old), tokens(&plain));
    assert!(plain.json().pop().unwrap()["prompt_tokens"].as_u64().unwrap() > 100);
    let rope = |done: &Done| {
        done.err.lines().find(|line| line.starts_with("rope: ")).unwrap_or_else(|| panic!("{}", done.err)).to_string()
    };
    assert!(rope(&old).contains("llama3") && rope(&old).contains('8'), "{}", rope(&old));
    for (kind, scaling) in [
        ("linear", json!({"rope_type": "linear", "factor": 4.0})),
        ("yarn", json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})),
    ] {
        let done = long(&T0::new().rope(scaling));
        assert!(rope(&done).contains(kind) && rope(&done).contains('4'), "{}", rope(&done));
        assert_ne!(tokens(&done), tokens(&plain), "{kind}");
    }
    let dir = made(&T0::new().rope(json!({"rope_type": "spiral", "factor": 2.0})));
    on(dir.path(), "run", &["hi"], b"").expect_error(2, &["spiral"]);
}

#[test]
fn o07_every_end_token_counts() {
    // Greedy without ends; A and B are ids that occur for the first time around steps 9 and 20.
    let all = ids(made(&T0::new()).path(), &["-n", "60", "--ignore-eos"]);
    let first_from = |step: usize| (step..all.len()).find(|&i| !all[..i].contains(&all[i])).expect("a new id");
    let (at_a, at_b) = (first_from(6), first_from(first_from(6) + 1));
    let (a, b) = (all[at_a], all[at_b]);
    let check = |t0: &T0, at: usize| {
        let dir = made(t0);
        let (tokens, last) = answer(dir.path(), &["-n", "60"]);
        assert_eq!(
            (tokens.len(), &last["done"], &last["eos_id"], &last["tokens"]),
            (at + 1, &json!("eos"), &json!(all[at]), &json!(at + 1))
        );
        // The end token's own text is not shown.
        let tokenizer = Tokenizer::open(dir.path()).unwrap();
        let shown: Vec<u32> = all[..at].iter().map(|&id| id as u32).collect();
        assert_eq!(last["text"], json!(tokenizer.decode(&shown, true)));
        assert_eq!(ids(dir.path(), &["-n", "60", "--ignore-eos"]), all);
    };
    check(&T0::new().eos(json!(b)).generation("eos_token_id", json!([b, a])), at_a);
    check(&T0::new().eos(json!([b])), at_b);
    check(&T0::new().eos(json!(b)), at_b);
    check(&T0::new().eos(json!(IM_END)).generation("eos_token_id", json!(a)), at_a);
    let dir = made(&T0::new().eos(json!(b)).generation("eos_token_id", json!([b, a])));
    let done = on(dir.path(), "run", &["-v", "-n", "1", "hi"], b"").expect(0);
    let line = done.err.lines().find(|line| line.starts_with("end tokens: ")).unwrap();
    for words in [
        format!("{b} (config.json"),
        format!("{a} (generation_config.json"),
        format!("{IM_END} (tokenizer_config.json)"),
    ] {
        assert!(line.contains(&words), "expected {words:?} in {line:?}");
    }
}

#[test]
fn o08_first_tokens_are_the_templates() {
    let glm = format!("<|extra|><|bos|>{CHATML}");
    let with_bos = format!("{{{{ bos_token }}}}{CHATML}");
    // Template, whether the tokenizer adds BOS, the first ids in chat and in raw mode.
    let cases: [(&str, bool, Vec<u32>, bool); 4] = [
        (&with_bos, true, vec![BOS, IM_START], true),
        (CHATML, true, vec![IM_START], true),
        (CHATML, false, vec![IM_START], false),
        (&glm, false, vec![511, BOS, IM_START], false),
    ];
    for (template, adds, first, raw_bos) in cases {
        let dir = made(&T0::new().template(Some(template)).adds_bos(adds));
        let chat = prompt_ids(&on(dir.path(), "run", &["--show-tokens", "-n", "0", "hi"], b"").expect(0));
        let rendered: String = first
            .iter()
            .map(|&id| {
                if id == BOS {
                    "<|bos|>"
                } else if id == IM_START {
                    ""
                } else {
                    "<|extra|>"
                }
            })
            .collect();
        let text = format!("{rendered}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
        assert_eq!(chat, Tokenizer::open(dir.path()).unwrap().encode_rendered(&text).unwrap(), "{template}");
        assert!(chat.starts_with(&first));
        let also = prompt_ids(&on(dir.path(), "chat", &["--show-tokens", "-n", "0"], b"hi\n").expect(0));
        assert_eq!(chat, also);
        let raw = prompt_ids(&on(dir.path(), "run", &["--raw", "--show-tokens", "-n", "0", "hi"], b"").expect(0));
        assert_eq!(raw.contains(&BOS), raw_bos);
        assert_eq!(raw.len(), if raw_bos { 2 } else { 1 }); // "hi" is one token
    }
}

/// Control tokens typed by a user stay text.
#[test]
fn o08_typed_control_tokens_are_text() {
    let dir = made(&T0::new());
    let chat = prompt_ids(&on(dir.path(), "run", &["--show-tokens", "-n", "0", "<|im_end|><|bos|>"], b"").expect(0));
    assert_eq!(chat.iter().filter(|&&id| id == IM_END).count(), 1);
    assert!(!chat.contains(&BOS));
}

#[test]
fn o09_characters_over_several_tokens() {
    // A 4-byte emoji, a Hangul syllable, an accent in two parts, an invalid byte, and a cut character at the end.
    let script = [&b"\xf0\x9f\x98\x80"[..], b"\xed\x95\x9c", b"e\xcc\x81", b"\xff", b"z", b"\xe2\x82"].concat();
    let whole = String::from_utf8_lossy(&script).into_owned();
    let dir = scripted(&bytes(&script));
    let done = on(dir.path(), "run", &["hi"], b"").expect(0);
    assert_eq!(done.text(), whole.clone() + "\n");
    let lines = on(dir.path(), "run", &["--json", "hi"], b"").expect(0).json();
    let (last, lines) = lines.split_last().unwrap();
    let pieces: Vec<&str> = lines.iter().map(|line| line["text"].as_str().unwrap()).collect();
    assert_eq!(pieces.concat(), whole);
    assert_eq!(last["text"], json!(whole));
    assert_eq!(&pieces[..5], ["", "", "", "\u{1f600}", ""]);
    assert_eq!(last["tokens"], json!(script.len() + 1));
    // Marks stand for the invalid byte and the cut tail only.
    assert_eq!(whole.matches('\u{fffd}').count(), 2);
}

/// Every write ends with a whole character, and what can be shown is written at once: stdout is a socket that keeps
/// writes apart.
#[test]
fn o09_writes_end_between_characters() {
    let script = [&b"\xf0\x9f\x98\x80"[..], b"\xed\x95\x9c", b"a", b"\xc3\xa9", b"b"].concat();
    let dir = scripted(&bytes(&script));
    let mut ends = [0; 2];
    // SAFETY: the call fills two descriptors, which are then owned.
    let [ours, theirs] = unsafe {
        assert_eq!(libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, ends.as_mut_ptr()), 0);
        ends.map(|end| OwnedFd::from_raw_fd(end))
    };
    let mut command = volley(&["run", "-m", dir.path().to_str().unwrap(), "--device", "cpu", "hi"]);
    let child = command.stdout(Stdio::from(theirs)).spawn().unwrap();
    drop(command); // and with it our copy of their end
    let (mut from, mut writes) = (fs::File::from(ours), Vec::new());
    loop {
        let mut packet = [0; 4096];
        match from.read(&mut packet).unwrap() {
            0 => break,
            n => writes.push(String::from_utf8(packet[..n].to_vec()).expect("whole characters")),
        }
    }
    finish(child).expect(0);
    assert_eq!(writes, ["\u{1f600}", "한", "a", "é", "b", "\n"]);
}

#[test]
fn o10_stop_strings_are_never_half_shown() {
    let text = "abcdefghijklmnop";
    let dir = scripted(&bytes(text.as_bytes()));
    let check = |stops: &[&str], shown: &str, stop: Option<&str>| {
        let args: Vec<&str> = stops.iter().flat_map(|stop| ["--stop", stop]).collect();
        let (tokens, last) = answer(dir.path(), &args);
        assert_eq!((last["text"].as_str(), last["stop"].as_str()), (Some(shown), stop), "{stops:?}");
        assert_eq!(last["done"], json!(if stop.is_some() { "stop" } else { "eos" }));
        // The count covers what was generated: up to the token that completed the stop, or the end token.
        let n = stop.map_or(text.len() + 1, |stop| shown.len() + stop.len());
        assert_eq!((tokens.len(), last["tokens"].as_u64()), (n, Some(n as u64)));
        let done = on(dir.path(), "run", &[&args[..], &["hi"]].concat(), b"").expect(0);
        assert_eq!(done.text(), format!("{shown}\n"));
    };
    check(&["fg"], "abcde", Some("fg"));
    check(&["efgh"], "abcd", Some("efgh"));
    check(&["efgh", "ef"], "abcd", Some("ef"));
    check(&["ef", "efgh"], "abcd", Some("ef"));
    check(&["efgX"], text, None);
    check(&["opX"], text, None); // held back to the end, then released
    check(&["fghX", "hi"], "abcdefg", Some("hi"));
    check(&["a"], "", Some("a"));
    check(&["nothing", "klm"], "abcdefghij", Some("klm"));
    // Text that may become a stop waits, and no longer than that.
    let lines = on(dir.path(), "run", &["--json", "--stop", "efgX", "hi"], b"").expect(0).json();
    let pieces: Vec<&str> = lines[..lines.len() - 1].iter().map(|line| line["text"].as_str().unwrap()).collect();
    assert_eq!(&pieces[3..9], ["d", "", "", "", "efgh", "i"]);
    on(dir.path(), "run", &["--stop", "", "hi"], b"").expect_error(2, &["stop string"]);
    // The stop is inside a token: "th" and " th" are tokens of T0, the stop ends within.
    let tokenizer = Tokenizer::open(dir.path()).unwrap();
    let ids = tokenizer.encode_rendered("go to the end").unwrap();
    let dir = scripted(&ids);
    let (_, last) = answer(dir.path(), &["--stop", "o t"]);
    assert_eq!((last["text"].as_str(), last["stop"].as_str()), (Some("g"), Some("o t")));
}

#[test]
fn o12_temperatures_and_odd_mixes() {
    let dir = made(&T0::new());
    let get = |args: &[&str]| ids(dir.path(), &[&["-n", "24", "--ignore-eos"], args].concat());
    let greedy = get(&[]);
    for mix in [
        &["--top-p", "0"] as &[&str],
        &["--top-p", "0.5", "--top-k", "3"],
        &["--top-k", "1000"],
        &["--min-p", "1"],
        &["--seed", "4"],
    ] {
        assert_eq!(get(&[&["-t", "0"], mix].concat()), greedy, "temperature 0 with {mix:?}");
    }
    for narrow in [
        &["-t", "1", "--top-k", "1"] as &[&str],
        &["-t", "1", "--top-p", "0"],
        &["-t", "1", "--min-p", "1"],
        &["-t", "1e-9"],
        &["-t", "1e-38"],
    ] {
        assert_eq!(get(&[narrow, &["--seed", "4"]].concat()), greedy, "{narrow:?}");
    }
    let seeds: Vec<_> = (1..=5).map(|seed| get(&["-t", "1", "--seed", &seed.to_string()])).collect();
    for (i, one) in seeds.iter().enumerate() {
        assert!(*one != greedy && seeds[..i].iter().all(|other| other != one), "seed {} is no seed", i + 1);
    }
    assert_eq!(seeds[2], get(&["-t", "1", "--seed", "3"]));
    assert_eq!(seeds[2], get(&["-t", "1", "--seed", "3", "--top-k", "512", "--top-p", "1", "--min-p", "0"]));
    // Very hot: as good as uniform, so that a repeat in 24 tokens of 512 is rare and 12 different ones are certain.
    let mut hot = get(&["-t", "1e9", "--seed", "1"]);
    hot.sort_unstable();
    hot.dedup();
    assert!(hot.len() > 12, "{hot:?}");
    let refused = |args: &[&str], words: &[&str]| {
        drop(on(dir.path(), "run", &[args, &["hi"]].concat(), b"").expect_error(2, words))
    };
    refused(&["-t", "-1"], &["temperature -1", "from 0"]);
    refused(&["-t", "NaN"], &["temperature NaN", "from 0"]);
    refused(&["-t", "inf"], &["temperature inf", "from 0"]);
    refused(&["--top-p", "1.5"], &["top-p 1.5", "from 0 to 1"]);
    refused(&["--top-p", "nan"], &["top-p NaN", "from 0 to 1"]);
    refused(&["--min-p", "-0.1"], &["min-p -0.1", "from 0 to 1"]);
    refused(&["--top-k", "-1"], &["--top-k", "-1", "from 0"]);
    refused(&["--repetition-penalty", "0"], &["repetition-penalty 0", "above 0"]);
    refused(&["--logit-bias", "512=1"], &["logit-bias for token 512", "0 to 511"]);
    let all: Vec<String> = (0..512).flat_map(|id| ["--logit-bias".to_string(), format!("{id}=-inf")]).collect();
    refused(&all.iter().map(String::as_str).collect::<Vec<_>>(), &["bans all 512 tokens"]);
}

/// Every sampling option changes the answer; ignored ones would be silent.
#[test]
fn o13_sampling_options_count() {
    let dir = made(&T0::new());
    let get = |args: &[&str]| ids(dir.path(), &[&["-n", "40", "--ignore-eos"], args].concat());
    let greedy = get(&[]);
    let favourite = format!("{}=-inf", greedy[0]);
    for option in [
        &["--repetition-penalty", "1.5"] as &[&str],
        &["--presence-penalty", "3"],
        &["--frequency-penalty", "2"],
        &["--logit-bias", &favourite],
    ] {
        assert_ne!(get(option), greedy, "{option:?} changes nothing");
    }
    assert!(!get(&["--logit-bias", &favourite]).contains(&greedy[0]));
    let ends = made(&T0::new().eos(json!(greedy[0])));
    assert_eq!(answer(ends.path(), &["-n", "40"]).1["tokens"], json!(1));
    let (tokens, _) = answer(ends.path(), &["-n", "40", "--min-tokens", "5"]);
    assert!(tokens.len() > 5 && !tokens[..5].contains(&greedy[0]), "{tokens:?}");
}

#[test]
fn o16_the_end_of_the_context() {
    let dir = made(&T0::new());
    let raw = |n: usize| on(dir.path(), "run", &["--raw", "--json", "--ignore-eos"], "~".repeat(n).as_bytes());
    for (n, tokens) in [(255, 1), (256, 0)] {
        let last = raw(n).expect(0).json().pop().unwrap();
        assert_eq!(
            (&last["prompt_tokens"], &last["tokens"], &last["done"]),
            (&json!(n), &json!(tokens), &json!("context"))
        );
    }
    for n in [257, 5000] {
        raw(n).expect_error(2, &[&format!("{n} tokens"), "256"]);
    }
    // A chat that grows over the end: said, with the way out, and nothing is dropped.
    let line = "a message of some length, so that a few of them fill it\n";
    let script = format!("{}/clear\nhi\n", line.repeat(6));
    let done =
        on(dir.path(), "chat", &["-n", "20", "--ignore-eos", "-s", "be brief", "--show-tokens"], script.as_bytes())
            .expect(0);
    assert!(
        done.err.contains("the context is full") && done.err.contains("/clear") && done.err.contains("256"),
        "{}",
        done.err
    );
    let prompts: Vec<Vec<u32>> = done
        .err
        .lines()
        .filter_map(|line| line.strip_prefix("prompt tokens: "))
        .map(|list| serde_json::from_str(list).unwrap())
        .collect();
    let system =
        Tokenizer::open(dir.path()).unwrap().encode_rendered("<|im_start|>system\nbe brief<|im_end|>\n").unwrap();
    assert!(prompts.len() > 2 && prompts.iter().all(|ids| ids.starts_with(&system)), "{prompts:?}");
    let (last, before) = prompts.split_last().unwrap();
    assert!(before.windows(2).all(|two| two[1].len() > two[0].len()) && last.len() < before[0].len());
    // The same over JSON: an error object, and the loop goes on.
    let request = |text: &str| json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).to_string();
    let done =
        on(dir.path(), "chat", &["--json"], format!("{}\n{}\n", request(&"~".repeat(300)), request("hi")).as_bytes())
            .expect(0);
    let lines = done.json();
    assert!(lines[0]["error"].as_str().unwrap().contains("256"), "{lines:?}");
    assert_eq!(lines.last().unwrap()["done"], json!("length"));
}

/// Only new tokens are computed in the next turn, when the answer is text that encodes to the tokens it came from.
#[test]
fn o15_the_next_turn_reuses_the_cache() {
    let tokenizer = Tokenizer::open(made(&T0::new()).path()).unwrap();
    let script = tokenizer.encode_rendered("Good day!").unwrap();
    let dir = scripted(&script);
    let request = |messages: Value| json!({ "messages": messages }).to_string();
    let user = |text: &str| json!({"role": "user", "content": text});
    let stdin = format!(
        "{}\n{}\n",
        request(json!([user("hi")])),
        request(json!([user("hi"), {"role": "assistant", "content": "Good day!"}, user("more")]))
    );
    let lines = on(dir.path(), "chat", &["--json"], stdin.as_bytes()).expect(0).json();
    let ends: Vec<&Value> = lines.iter().filter(|line| line.get("delta").is_none()).collect();
    let n = |i: usize, key: &str| ends[i][key].as_u64().unwrap();
    assert_eq!((ends[0]["text"].as_str(), n(0, "reused_tokens")), (Some("Good day!"), 0));
    // The cache holds all but the end token; its last row is computed again.
    let held = n(0, "prompt_tokens") + n(0, "tokens") - 1;
    assert_eq!(n(1, "reused_tokens"), held - 1);
    assert_eq!(n(1, "prefilled_tokens"), n(1, "prompt_tokens") - 1 - (held - 1));
    assert_eq!(ends[1]["text"], json!("Good day!"));
}

#[test]
fn o25_stdin() {
    let dir = made(&T0::new());
    let chat = |stdin: &[u8]| on(dir.path(), "chat", &["-n", "3", "--show-tokens", "--logit-bias", "65=100"], stdin);
    let prompts = |done: &Done| {
        done.err.lines().filter(|line| line.starts_with("prompt tokens: ")).map(str::to_string).collect::<Vec<_>>()
    };
    // The end of input: nothing, a line without its end, three lines, empty ones.
    let done = chat(b"").expect(0);
    assert!(done.out.is_empty() && done.err.is_empty());
    let mut null = volley(&["chat", "-m", dir.path().to_str().unwrap()]);
    assert!(finish(null.stdin(Stdio::null()).spawn().unwrap()).expect(0).out.is_empty());
    let hi = chat(b"hi\n").expect(0);
    assert_eq!(hi.text(), "AAA\n"); // no prompt marks, only the model's text
    assert_eq!(prompts(&chat(b"hi").expect(0)), prompts(&hi));
    assert_eq!(chat(b"a\nb\nc\n").expect(0).text(), "AAA\nAAA\nAAA\n");
    assert!(chat(b"\n   \n\t\n").expect(0).out.is_empty());
    // Line ends and BOM are no part of a message; a NUL is.
    assert_eq!(prompts(&chat(b"hi\r\n").expect(0)), prompts(&hi));
    assert_eq!(prompts(&chat(b"\xef\xbb\xbfhi\r\n").expect(0)), prompts(&hi));
    assert_ne!(prompts(&chat(b"h\0i\n").expect(0)), prompts(&hi));
    // Not UTF-8: what was complete is answered, then the offset.
    let done = chat(b"hi\nab\xffc\nhi\n").expect(2);
    assert_eq!(done.text(), "AAA\n");
    assert!(done.err.contains("offset 5") && done.err.contains("0xff"), "{}", done.err);
    // A megabyte in one line: too long for the context, said, and the next line is answered.
    let done = chat(&[&b"~".repeat(1 << 20)[..], b"\nhi\n"].concat()).expect(0);
    assert_eq!(done.text(), "AAA\n");
    assert!(done.err.contains("the context is full"), "{:.300}", done.err);
    // One-shot: an empty prompt, or one of spaces, is refused.
    for stdin in [&b""[..], b"\n", b"  \n"] {
        on(dir.path(), "run", &[], stdin).expect_error(2, &["prompt is empty"]);
        on(dir.path(), "run", &[""], stdin).expect_error(2, &["prompt is empty"]);
    }
    on(dir.path(), "run", &["--raw"], b"").expect_error(2, &["prompt is empty"]);
    on(dir.path(), "run", &[], b"ab\xc3(").expect_error(2, &["offset 2"]);
    // Stdin, a blank line, the argument.
    let run = |args: &[&str], stdin: &[u8]| {
        prompt_ids(&on(dir.path(), "run", &[&["--show-tokens", "-n", "0"], args].concat(), stdin).expect(0))
    };
    assert_eq!(run(&["question"], b"text\r\nof two lines\r\n"), run(&["text\nof two lines\n\nquestion"], b""));
    assert_eq!(run(&[], b"text\n"), run(&["text"], b""));
    assert_eq!(run(&["two", "words"], b""), run(&["two words"], b""));
}

/// Lines are answered as they come, on a pipe that stays open.
#[test]
fn o25_a_pipe_that_never_closes() {
    let dir = made(&T0::new());
    let mut child = volley(&["chat", "-m", dir.path().to_str().unwrap(), "-n", "3", "--logit-bias", "65=100"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    for _ in 0..2 {
        stdin.write_all(b"hi\n").unwrap();
        let mut reply = [0; 4];
        child.stdout.as_mut().unwrap().read_exact(&mut reply).unwrap();
        assert_eq!(&reply, b"AAA\n");
    }
    drop(stdin);
    finish(child).expect(0);
}
