//! Help, usage errors, pipes, exit codes, signals and the terminal, on the real binary. What models make of it is in
//! cases.rs.
#[path = "support/binary.rs"]
mod binary;
#[path = "support/drafter.rs"]
mod drafter;
mod support;

use binary::{finish, on, run, run_with, signal, volley, wait, Terminal};
use drafter::D0;
use serde_json::json;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::T0;
use tempfile::TempDir;

const COMMANDS: [&str; 3] = ["chat", "run", "bench"];

fn t0() -> TempDir {
    let dir = TempDir::new().unwrap();
    T0::new().write(dir.path());
    dir
}

/// A model that goes on for minutes: its context is long, and nothing ends its answers.
fn endless() -> TempDir {
    let dir = TempDir::new().unwrap();
    T0::new().set("max_position_embeddings", 1_000_000).write(dir.path());
    dir
}

fn path(dir: &TempDir) -> &str {
    dir.path().to_str().unwrap()
}

/// Everything but glibc is inside; drivers are opened at run time.
#[test]
fn the_program_needs_glibc_alone() {
    let out = Command::new("ldd").arg(env!("CARGO_BIN_EXE_volley")).output().expect("ldd, a part of glibc");
    let needed = String::from_utf8(out.stdout).unwrap();
    let names: Vec<&str> =
        needed.lines().filter_map(|line| line.split_whitespace().next()?.rsplit('/').next()).collect();
    let glibc = [
        "linux-vdso.so.1",
        "ld-linux-x86-64.so.2",
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "librt.so.1",
        "libpthread.so.0",
    ];
    assert!(names.contains(&"libc.so.6") && names.iter().all(|name| glibc.contains(name)), "{needed}");
}

#[test]
fn help_goes_to_stdout() {
    for flag in ["--help", "-h"] {
        let done = run(&[flag]).expect(0);
        assert!(
            done.err.is_empty()
                && COMMANDS.iter().all(|c| done.text().contains(c))
                && done.text().contains("Exit codes"),
            "{}",
            done.text()
        );
        for command in COMMANDS {
            let done = run(&[command, flag]).expect(0);
            assert!(
                done.err.is_empty() && done.text().starts_with(&format!("Usage: volley {command}")),
                "{}",
                done.text()
            );
            assert!(done.text().contains("default: "), "{}", done.text());
        }
    }
    let version = run(&["--version"]).expect(0);
    assert!(version.text().starts_with(&format!("volley {}", env!("CARGO_PKG_VERSION"))));
    // What runs on which chip: machine code and portable code, or why there is none.
    assert!(version.text().contains("\nkernels: ") && version.text().contains("\nNCCL: "), "{}", version.text());
    assert!(
        version.text().contains("sm_90a") && version.text().contains("portable code")
            || version.text().contains("no nvcc"),
        "{}",
        version.text()
    );
}

/// Every flag that --help has is in every script, and the shells accept the scripts.
#[test]
fn completions_of_every_flag() {
    let dir = TempDir::new().unwrap();
    for (shell, check) in
        [("bash", &["bash", "-n"] as &[&str]), ("zsh", &["zsh", "-n"]), ("fish", &["fish", "--no-execute"])]
    {
        let script = run(&["completions", shell]).expect(0);
        let (script, file) = (script.text(), dir.path().join(shell));
        std::fs::write(&file, script).unwrap();
        match Command::new(check[0]).args(&check[1..]).arg(&file).status() {
            Ok(status) => assert!(status.success(), "{shell} does not accept it"),
            // Past the capture of cargo test, so that it is counted.
            Err(_) => drop(std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("skipped: no {shell} to check its completions with\n"),
            )),
        }
        let mut seen = 0;
        for command in COMMANDS.iter().chain(&["doctor"]) {
            let help = run(&[command, "--help"]).expect(0);
            let words =
                help.text().lines().map(str::trim_start).filter(|line| line.starts_with('-')).flat_map(|line| {
                    line.split_whitespace()
                        .map(|word| word.trim_end_matches(','))
                        .take_while(|word| word.starts_with('-'))
                        .collect::<Vec<_>>()
                });
            for flag in words.filter(|flag| !["-h", "--help"].contains(flag)) {
                let fish =
                    flag.strip_prefix("--").map_or_else(|| format!(" -s {}", &flag[1..]), |long| format!(" -l {long}"));
                assert!(
                    script.contains(if shell == "fish" { &fish } else { flag }),
                    "{shell} has no {flag} of {command}"
                );
                seen += 1;
            }
        }
        assert!(seen > 80, "only {seen} flags found");
    }
    // As bash asks it: words so far, and which of them the cursor is on.
    let complete = |words: &[&str]| {
        let script = format!(
            "source {}; COMP_WORDS=({}); COMP_CWORD={}; _volley; echo \"${{COMPREPLY[@]}}\"",
            dir.path().join("bash").display(),
            words.join(" "),
            words.len() - 1
        );
        String::from_utf8(Command::new("bash").args(["-c", &script]).output().unwrap().stdout)
            .unwrap()
            .trim()
            .to_string()
    };
    assert_eq!(complete(&["volley", "d"]), "doctor");
    assert_eq!(complete(&["volley", "run", "--device", "c"]), "cpu cuda");
    assert_eq!(complete(&["volley", "bench", "--wi"]), "--widths");
    assert_eq!(complete(&["volley", "completions", "z"]), "zsh");
    assert_eq!(complete(&["volley", "run", "--draft", "ng"]), "ngram");
    assert_eq!(complete(&["volley", "run", "-m", path(&dir)]), path(&dir));
    run(&["completions", "tcsh"]).expect_error(2, &["tcsh", "bash, zsh or fish"]);
}

#[test]
fn usage_errors_are_one_line_and_exit_2() {
    let check = |args: &[&str], words: &[&str]| drop(run(args).expect_error(2, words));
    check(&[], &["chat, run, bench"]);
    check(&["jump"], &["jump"]);
    check(&["run", "--jump", "hi"], &["--jump", "volley run --help"]);
    check(&["run", "--seed"], &["--seed"]);
    check(&["run", "--seed=-1", "hi"], &["--seed", "-1", "from 0 to 18446744073709551615"]);
    check(&["run", "--seed", "1", "--seed", "2", "hi"], &["--seed"]);
    check(&["run", "-n", "many", "hi"], &["-n", "many"]);
    check(&["run", "--json=yes", "hi"], &["--json takes no value"]);
    check(&["run", "--device", "tpu", "hi"], &["auto, cpu or cuda"]);
    check(&["doctor", "--device", "cpu"], &["checks a GPU"]);
    check(&["run", "--logit-bias", "5", "hi"], &["ID=X"]);
    check(&["bench", "-d", "0,x"], &["-d", "0,x"]);
    check(&["bench", "-r", "0"], &["-r", "from 1"]);
    check(&["bench", "-p", "0"], &["prompt-tokens 0"]);
    check(&["run", "-m", "/nowhere", "hi"], &["/nowhere"]);
}

/// A word that is not UTF-8 is refused, not a panic.
#[test]
fn arguments_that_are_not_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let mut command = volley(&["run"]);
    command.arg(std::ffi::OsStr::from_bytes(b"\xff"));
    finish(command.spawn().unwrap()).expect_error(2, &["UTF-8"]);
}

#[test]
fn default_model_that_is_absent_names_the_cure() {
    let empty = TempDir::new().unwrap();
    let mut command = volley(&["run", "hi"]);
    finish(command.current_dir(empty.path()).spawn().unwrap()).expect_error(2, &["scripts/fetch_smollm2.py"]);
    let mut command = volley(&["run", "-n", "1", "hi"]);
    finish(command.env("VOLLEY_MODEL", "/nowhere").spawn().unwrap()).expect_error(2, &["/nowhere"]);
    let model = t0();
    let mut command = volley(&["run", "-n", "1", "hi"]);
    finish(command.env("VOLLEY_MODEL", path(&model)).spawn().unwrap()).expect(0);
}

#[test]
fn spellings_of_flags_are_equal() {
    let model = t0();
    let ids = |args: &[&str]| on(model.path(), "run", args, b"").expect(0).json()[0]["token"].clone();
    let first = ids(&["--json", "--max-tokens", "1", "--seed", "3", "-t", "1", "hi"]);
    assert_eq!(first, ids(&["--json", "--max-tokens=1", "--seed=3", "-t1", "hi"]));
    assert_eq!(first, ids(&["hi", "-n1", "--temperature=1.0", "--seed", "3", "--json", "-"]));
    assert_eq!(first, ids(&["-n1", "--temperature=1.0", "--seed", "3", "--json", "--", "hi"]));
}

#[test]
fn closed_pipes_are_no_error() {
    let model = endless();
    for args in [&["run", "hi"] as &[&str], &["run", "--json", "hi"]] {
        let mut child = volley(&[args, &["-m", path(&model), "--ignore-eos"]].concat()).spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        out.read_exact(&mut [0; 10]).unwrap();
        drop(out);
        finish(child).expect(0);
    }
    // Help as well, and stderr gone.
    let mut child = volley(&["--help"]).spawn().unwrap();
    drop(child.stdout.take());
    finish(child).expect(0);
    let mut child = volley(&["run", "-v", "-n", "3", "-m", path(&model), "hi"]).spawn().unwrap();
    drop(child.stderr.take());
    finish(child).expect(0);
}

#[test]
fn verbose_says_what_was_loaded() {
    let model = t0();
    let quiet = on(model.path(), "run", &["-n", "5", "hi"], b"").expect(0);
    assert!(quiet.err.is_empty(), "{}", quiet.err);
    let loud = on(model.path(), "run", &["-n", "5", "-v", "hi"], b"").expect(0);
    for words in [
        "llama",
        "rope: ",
        "end tokens: 506 (config.json and tokenizer_config.json)",
        "context: 256 of the model's 256",
        "KV cache",
        "plan: ",
        "loaded in",
        "tok/s",
    ] {
        assert!(loud.err.contains(words), "expected {words:?} in {}", loud.err);
    }
    assert_eq!(quiet.out, loud.out);
    assert!(!loud.err.contains("layers.3.qkv"));
    let louder = on(model.path(), "run", &["-n", "5", "-vv", "hi"], b"").expect(0);
    assert!(louder.err.contains("layers.3.qkv") && louder.err.contains("accept"), "{}", louder.err);
}

#[test]
fn another_table_of_weights() {
    let model = t0();
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("weights.toml");
    let built_in = on(model.path(), "run", &["-n", "8", "hi"], b"").expect(0);
    let same = on(model.path(), "run", &["-n", "8", "--weights", table.to_str().unwrap(), "hi"], b"").expect(0);
    assert_eq!(built_in.out, same.out);
    let renamed = model.path().join("renamed.toml");
    std::fs::write(
        &renamed,
        std::fs::read_to_string(&table).unwrap().replace("model.norm.weight", "model.other_norm.weight"),
    )
    .unwrap();
    on(model.path(), "run", &["--weights", renamed.to_str().unwrap(), "hi"], b"")
        .expect_error(2, &["model.other_norm.weight"]);
    std::fs::write(&renamed, "[llama").unwrap();
    on(model.path(), "run", &["--weights", renamed.to_str().unwrap(), "hi"], b"").expect_error(2, &["renamed.toml"]);
}

#[test]
fn context_is_checked() {
    let model = t0();
    on(model.path(), "run", &["-c", "257", "hi"], b"").expect_error(2, &["context 257", "from 1 to 256"]);
    on(model.path(), "run", &["-c", "0", "hi"], b"").expect_error(2, &["context 0", "from 1 to 256"]);
    let done = on(model.path(), "run", &["-c", "40", "--ignore-eos", "--json", "hi"], b"").expect(0);
    let last = done.json().pop().unwrap();
    assert_eq!(last["done"], "context");
    assert_eq!(last["tokens"].as_u64().unwrap() + last["prompt_tokens"].as_u64().unwrap(), 40);
    assert!(done.err.contains("context of 40 tokens is full"), "{}", done.err);
}

#[test]
fn system_message_and_raw() {
    let model = t0();
    let prompt = |args: &[&str]| {
        let done = on(model.path(), "run", &[&["-n", "0", "--show-tokens", "hi"], args].concat(), b"").expect(0);
        let line = done.err.lines().find_map(|line| line.strip_prefix("prompt tokens: ")).unwrap().to_string();
        serde_json::from_str::<Vec<u32>>(&line).unwrap()
    };
    let (plain, system, raw) = (prompt(&[]), prompt(&["-s", "be brief"]), prompt(&["--raw"]));
    assert!(system.ends_with(&plain) && system.len() > plain.len());
    assert!(raw.len() < plain.len() && !raw.contains(&support::IM_START));
    on(model.path(), "run", &["--raw", "-s", "x", "hi"], b"").expect_error(2, &["--system", "--raw"]);
    let bare = TempDir::new().unwrap();
    T0::new().template(None).write(bare.path());
    on(bare.path(), "run", &["hi"], b"").expect_error(2, &["no chat template", "--raw"]);
    on(bare.path(), "chat", &[], b"hi\n").expect_error(2, &["no chat template", "--raw"]);
    on(bare.path(), "run", &["--raw", "-n", "2", "hi"], b"").expect(0);
}

#[test]
fn drawn_seeds_are_printed_and_repeat() {
    let model = t0();
    let answer = |args: &[&str]| {
        on(model.path(), "run", &[&["-n", "20", "-t", "1", "--ignore-eos", "hi"], args].concat(), b"").expect(0)
    };
    let first = answer(&[]);
    let seed = first.err.trim().strip_prefix("seed: ").unwrap_or_else(|| panic!("{:?}", first.err)).to_string();
    let again = answer(&["--seed", &seed]);
    assert_eq!((first.out, ""), (again.out, again.err.as_str()));
    let json = answer(&["--json"]);
    assert_eq!(json.json().pop().unwrap()["seed"].to_string(), json.err.trim().strip_prefix("seed: ").unwrap());
    assert_ne!(answer(&["--seed", "1"]).out, answer(&["--seed", "2"]).out);
    assert!(on(model.path(), "run", &["-n", "2", "--json", "hi"], b"").json().pop().unwrap()["seed"].is_null());
}

/// 20 runs each, with one thread and with two, with drafts and without: one text.
#[test]
fn the_same_seed_gives_the_same_tokens_every_time() {
    let dir = TempDir::new().unwrap();
    let (model, drafter) = (dir.path().join("t0"), dir.path().join("d0"));
    T0::new().write(&model);
    D0::new().write(&drafter);
    let drafter = drafter.to_str().unwrap();
    let mut texts: Vec<Vec<u8>> = Vec::new();
    for draft in ["none", "ngram", drafter, &format!("{drafter},ngram")] {
        for run in 0..20 {
            let args = [
                "run",
                "-m",
                model.to_str().unwrap(),
                "--device",
                "cpu",
                "--draft",
                draft,
                "-n",
                "60",
                "-t",
                "1.5",
                "--top-p",
                "0.95",
            ];
            let mut command = volley(&[&args[..], &["--seed", "7", "--ignore-eos", "hi"]].concat());
            texts.push(
                finish(command.env("RAYON_NUM_THREADS", if run % 2 == 0 { "1" } else { "2" }).spawn().unwrap())
                    .expect(0)
                    .out,
            );
        }
    }
    assert!(texts[0].len() > 60 && texts.iter().all(|text| *text == texts[0]));
}

/// 10,000 tokens of chat with answers stopped by Ctrl-C, contexts that end and /clear, at random: scripts/long_chat.py
/// says what must hold. The same on a GPU: scripts/gpu_check.sh.
#[test]
fn a_long_conversation_stays_as_it_began() {
    let dir = TempDir::new().unwrap();
    let (model, drafter) = (dir.path().join("t0"), dir.path().join("d0"));
    T0::new().set("max_position_embeddings", 1024).write(&model);
    D0::new().write(&drafter);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/long_chat.py");
    for (seed, draft) in [("1", "none".to_string()), ("2", format!("{},ngram", drafter.display()))] {
        let mut command = Command::new("python3");
        command.arg(&script).args([
            env!("CARGO_BIN_EXE_volley"),
            "--tokens",
            "5000",
            "--context",
            "1024",
            "--checks",
            "10",
            "--seed",
            seed,
        ]);
        command.args(["--draft", &draft, "--model"]).arg(&model);
        let done = command.output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
        println!("{said}");
        for words in [" stopped, ", " to the end of the context, ", "10 answers equal"] {
            assert!(said.contains(words) && !said.contains(&format!(" 0{words}")), "{said}");
        }
    }
}

/// Time of processors that the process has used, in ticks of 10 ms.
fn ticks(child: &std::process::Child) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// At the prompt nothing runs: not after the start, not after an answer, at a terminal or a pipe.
#[test]
fn idle_uses_no_processor() {
    let model = t0();
    let mut terminal = chat_terminal(model.path());
    let rest = |child: &std::process::Child| {
        std::thread::sleep(Duration::from_millis(200));
        let before = ticks(child);
        std::thread::sleep(Duration::from_secs(2));
        ticks(child) - before
    };
    assert!(rest(&terminal.child) <= 1);
    let before = ticks(&terminal.child);
    terminal.send("hi\r");
    terminal.expect("tok/s");
    terminal.expect("> ");
    assert!(ticks(&terminal.child) > before, "an answer takes time, and it is seen");
    assert!(rest(&terminal.child) <= 1);
    terminal.send("\x04");
    assert_eq!(terminal.end().1, Some(0));
    let mut child = volley(&["chat", "--json", "-m", path(&model)]).stdin(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(rest(&child) <= 1);
    drop(child.stdin.take());
    finish(child).expect(0);
}

#[test]
fn bench_rows() {
    let model = t0();
    let args = ["-p", "8,20", "-d", "0,30", "-g", "12", "-r", "2"];
    let json = on(model.path(), "bench", &[&args[..], &["--json"]].concat(), b"").expect(0).json();
    assert_eq!(json.len(), 4);
    for (row, (depth, prompt)) in json.iter().zip([(0, 8), (0, 20), (30, 8), (30, 20)]) {
        assert_eq!((row["depth"].as_u64(), row["prompt_tokens"].as_u64()), (Some(depth), Some(prompt)));
        assert_eq!(
            row["samples"]["token_ms"]
                .as_array()
                .unwrap()
                .iter()
                .map(|run| run.as_array().unwrap().len())
                .collect::<Vec<_>>(),
            [11, 11]
        );
        for key in
            ["first_token_ms", "tokens_per_s", "bytes_per_token", "read_gb_s", "read_rate_gb_s", "share_of_read_rate"]
        {
            assert!(row[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {row}");
        }
        assert_eq!(
            (row["dtype"].as_str(), row["device"].as_str(), row["threads"].as_u64().is_some()),
            (Some("bf16"), Some("cpu"), true)
        );
        assert!(row["read_rate_gb_s"].as_f64().unwrap() > 0.5);
    }
    // KV rows count: a deeper row reads more for each token, by 4 layers of keys and values in f32.
    let bytes = |i: usize| json[i]["bytes_per_token"].as_f64().unwrap();
    assert_eq!(bytes(2) - bytes(0), (30 * 4 * 2 * 2 * 16 * 4) as f64);
    let hash = |i: usize| json[i]["tokens_hash"].clone();
    assert!(hash(0) != hash(1));
    // Pictures of it.
    let done = on(model.path(), "bench", &[&args[..], &["--widths", "1,2,8", "--json"]].concat(), b"").expect(0);
    std::fs::write(model.path().join("bench.jsonl"), done.out).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/plot_bench.py");
    let plot = |file: &str| {
        Command::new("python3")
            .arg(&script)
            .arg(model.path().join(file))
            .arg("--out")
            .arg(model.path())
            .output()
            .unwrap()
    };
    assert!(plot("bench.jsonl").status.success());
    for (file, words) in
        [("latency_by_depth.svg", "Time of a token by depth"), ("cost_by_width.svg", "rows verified together")]
    {
        let svg = std::fs::read_to_string(model.path().join(file)).unwrap();
        assert!(
            svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains(words) && svg.contains("<polyline"),
            "{svg}"
        );
    }
    assert!(!plot("config.json").status.success());
    let text = on(model.path(), "bench", &args, b"").expect(0);
    let rows: Vec<&str> = text.text().lines().collect();
    assert_eq!(rows.len(), 6, "{rows:?}");
    assert!(rows[0].contains("bf16") && rows[2].ends_with(&hash(0).as_str().unwrap()[..8]), "{rows:?}");
    on(model.path(), "bench", &["-p", "300"], b"").expect_error(2, &["context 364", "256"]);
}

#[test]
fn chat_answers_every_line_and_knows_its_commands() {
    let model = t0();
    let script =
        "hi\n/stats\n/system be brief\nhi\n/regen\n/clear\n/jump\n\"\"\"two\nlines\"\"\"\n/help\n/exit\nnever\n";
    let done = on(model.path(), "chat", &["-n", "4", "--show-tokens"], script.as_bytes()).expect(0);
    assert_eq!(done.err.matches("prompt tokens:").count(), 4, "{}", done.err);
    for words in [
        "1 answers, 4 tokens",
        "system message set",
        "seed: ",
        "temperature is 0",
        "new conversation",
        "error: /jump",
        "/help /clear /system",
        "Ctrl-C",
    ] {
        assert!(done.err.contains(words), "expected {words:?} in {}", done.err);
    }
    assert!(!done.text().contains("> ") || !done.err.contains("> "));
    let without_n = on(model.path(), "chat", &["-n", "4"], b"/regen\n").expect(0);
    assert!(without_n.err.contains("no message to answer") && without_n.out.is_empty());
    on(model.path(), "chat", &[], b"\"\"\"open\nline\n").expect_error(2, &["ended inside"]);
    // A template that refuses: said, the message taken back, the conversation goes on.
    let strict = TempDir::new().unwrap();
    let template = format!(
        "{{% if messages[-1].content == 'no' %}}{{{{ raise_exception('not that') }}}}{{% endif %}}{}",
        support::CHATML
    );
    T0::new().template(Some(&template)).write(strict.path());
    let done = on(strict.path(), "chat", &["-n", "1", "--show-tokens"], b"no\nhi\n").expect(0);
    assert!(done.err.contains("not that") && done.err.matches("prompt tokens:").count() == 1, "{}", done.err);
}

#[test]
fn chat_json_goes_on_after_errors() {
    let model = t0();
    let request = |extra: &str| format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"hi\"}}]{extra}}}\n");
    let lines = [
        request(", \"max_tokens\": 3"),
        "nonsense\n".into(),
        request(", \"temprature\": 1"),
        request(", \"temperature\": -1"),
        "{\"messages\": []}\n".into(),
        "\n".into(),
        request(", \"stop\": [\"\"]"),
        request(", \"temperature\": 1, \"seed\": 5, \"max_tokens\": 2"),
        request(", \"temperature\": 1, \"max_tokens\": 2"),
        request(", \"logit_bias\": {\"65\": 100}, \"max_tokens\": 3, \"ignore_eos\": true"),
    ];
    let mut stdin = lines.concat().into_bytes();
    stdin.extend(b"\xff\xfe\n");
    stdin.extend(request(", \"max_tokens\": 1").trim_end().as_bytes());
    let done = on(model.path(), "chat", &["--json"], &stdin).expect(0);
    let all = done.json();
    let ends: Vec<_> = all.iter().filter(|line| line.get("delta").is_none()).collect();
    assert_eq!(ends.len(), 11, "{all:?}");
    let error = |i: usize, word: &str| {
        assert!(ends[i]["error"].as_str().is_some_and(|e| e.contains(word)), "{word}: {}", ends[i])
    };
    assert_eq!((ends[0]["done"].as_str(), ends[0]["tokens"].as_u64()), (Some("length"), Some(3)));
    error(1, "request");
    error(2, "temprature");
    error(3, "temperature");
    error(4, "at least one message");
    error(5, "stop string");
    assert_eq!(ends[6]["seed"], json!(5));
    assert!(ends[7]["seed"].is_u64());
    assert_eq!(ends[8]["text"], json!("AAA"));
    error(9, "UTF-8");
    assert_eq!(ends[10]["tokens"], json!(1));
    let deltas: String =
        all.iter().skip_while(|line| line.get("error").is_none()).filter_map(|line| line["delta"].as_str()).collect();
    assert!(deltas.contains("AAA"));
}

#[test]
fn o24_sigint_while_loading_and_reading() {
    // A FIFO that nobody writes to stands for slow storage, then for a slow stdin.
    let model = t0();
    let config = model.path().join("config.json");
    std::fs::remove_file(&config).unwrap();
    assert!(Command::new("mkfifo").arg(&config).status().unwrap().success());
    let loading = volley(&["run", "-m", path(&model), "hi"]).spawn().unwrap();
    let reading = volley(&["run", "-m", path(&model), "hi"]).stdin(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    for (mut child, sent, code) in [(loading, libc::SIGINT, 130), (reading, libc::SIGINT, 130)] {
        signal(&child, sent);
        let start = Instant::now();
        assert_eq!(wait(&mut child, Duration::from_secs(2)).code(), Some(code), "after {:?}", start.elapsed());
    }
}

#[test]
fn o24_sigint_during_an_answer() {
    let model = endless();
    for (args, sent, code) in [
        (&["run", "hi"] as &[&str], libc::SIGINT, 130),
        (&["run", "--json", "hi"], libc::SIGINT, 130),
        (&["run", "hi"], libc::SIGTERM, 143),
    ] {
        let mut child = volley(&[args, &["-m", path(&model), "--ignore-eos"]].concat()).spawn().unwrap();
        let first = binary::read_some(child.stdout.as_mut().unwrap(), 20);
        signal(&child, sent);
        let start = Instant::now();
        let mut rest = Vec::new();
        child.stdout.as_mut().unwrap().read_to_end(&mut rest).unwrap();
        assert_eq!(wait(&mut child, Duration::from_secs(2)).code(), Some(code));
        assert!(start.elapsed() < Duration::from_secs(2));
        // What was printed stays, whole lines with --json, whose last object says why.
        let all = String::from_utf8([first, rest].concat()).unwrap();
        if args.contains(&"--json") {
            let last: serde_json::Value = serde_json::from_str(all.lines().last().unwrap()).unwrap();
            assert_eq!(last["done"], "interrupt");
        }
    }
    // During prefill: minutes of it.
    let mut child = volley(&["run", "-m", path(&model), &"word ".repeat(25_000)]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(child.try_wait().unwrap().is_none());
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child, Duration::from_secs(2)).code(), Some(130));
}

/// In chat --json the first Ctrl-C ends the answer and the loop goes on; at rest it ends the program.
#[test]
fn o24_sigint_in_chat_json() {
    use std::io::{BufRead, BufReader, Write};
    let model = endless();
    let mut child =
        volley(&["chat", "--json", "-m", path(&model), "--ignore-eos"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(&line.unwrap()).unwrap());
    let request = |extra: &str| format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"hi\"}}]{extra}}}\n");
    stdin.write_all(request("").as_bytes()).unwrap();
    assert!(lines.next().unwrap()["delta"].is_string());
    signal(&child, libc::SIGINT);
    let last = lines.find(|line| line.get("delta").is_none()).unwrap();
    assert_eq!(last["done"], "interrupt");
    stdin.write_all(request(", \"max_tokens\": 2").as_bytes()).unwrap();
    let last = lines.find(|line| line.get("delta").is_none()).unwrap();
    assert_eq!((last["done"].as_str(), last["reused_tokens"].as_u64() > Some(3)), (Some("length"), true));
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child, Duration::from_secs(2)).code(), Some(130));
}

fn chat_terminal(model: &Path) -> Terminal {
    let mut terminal =
        Terminal::start(volley(&["chat", "-m", model.to_str().unwrap(), "--device", "cpu", "--ignore-eos"]));
    terminal.expect("> ");
    terminal
}

#[test]
fn o24_ctrl_c_at_a_terminal() {
    let model = endless();
    let mut terminal = chat_terminal(model.path());
    terminal.send("hi\r");
    terminal.expect("hi");
    std::thread::sleep(Duration::from_millis(300)); // into the answer
    assert!(terminal.is_cooked());
    terminal.send("\x03");
    terminal.expect("[stopped]");
    terminal.expect("tok/s"); // statistics at a terminal
    terminal.expect("> ");
    terminal.send("/stats\r");
    terminal.expect("1 answers"); // the history is there
    terminal.expect("> ");
    terminal.send("\x1b[A\x1b[A\r"); // the line before last again
    std::thread::sleep(Duration::from_millis(300));
    terminal.send("\x03");
    terminal.expect("from the cache");
    terminal.expect("> ");
    terminal.send("\x03");
    assert_eq!(terminal.end().1, Some(130));

    let mut terminal = chat_terminal(model.path());
    terminal.send("\x04");
    assert_eq!(terminal.end().1, Some(0));
}

#[test]
fn o24_two_quick_sigints_and_sigterm() {
    let model = endless();
    let mut terminal = chat_terminal(model.path());
    terminal.send("hi\r");
    std::thread::sleep(Duration::from_millis(300));
    signal(&terminal.child, libc::SIGINT);
    signal(&terminal.child, libc::SIGINT);
    let start = Instant::now();
    // Signals that come together may be one: then the first stopped the answer, and the prompt is there.
    std::thread::sleep(Duration::from_millis(200));
    if terminal.child.try_wait().unwrap().is_none() {
        signal(&terminal.child, libc::SIGINT);
    }
    assert_eq!(terminal.end().1, Some(130));
    assert!(start.elapsed() < Duration::from_secs(2));

    // At the prompt the terminal is raw; it is given back as it was.
    for (sent, code) in [(libc::SIGTERM, 143), (libc::SIGINT, 130)] {
        let mut terminal = chat_terminal(model.path());
        assert!(!terminal.is_cooked());
        signal(&terminal.child, sent);
        wait(&mut terminal.child, Duration::from_secs(2));
        assert!(terminal.is_cooked());
        assert_eq!(terminal.end().1, Some(code));
    }
}

/// A terminal that goes away takes the program with it, at the prompt and in an answer.
#[test]
fn o24_terminal_closed() {
    let model = endless();
    for keys in ["", "hi\r"] {
        let mut terminal = chat_terminal(model.path());
        terminal.send(keys);
        std::thread::sleep(Duration::from_millis(300));
        let mut child = terminal.close();
        wait(&mut child, Duration::from_secs(2));
    }
}

/// An empty line asks again, """ takes several lines.
#[test]
fn o25_terminal_input() {
    let model = t0();
    let mut terminal = Terminal::start(volley(&["chat", "-m", path(&model), "-n", "3", "--logit-bias", "65=100"]));
    terminal.expect("> ");
    terminal.send("\r");
    terminal.expect("> ");
    terminal.send("   \r");
    terminal.expect("> ");
    terminal.send("\"\"\"a\r");
    terminal.expect("... ");
    terminal.send("b\"\"\"\r");
    terminal.expect("AAA");
    terminal.expect("> ");
    terminal.send("/exit\r");
    assert_eq!(terminal.end().1, Some(0));
}

#[test]
fn a_real_model_answers() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/smollm2-135m-instruct");
    if !model.is_dir() {
        println!("skipped: {} is not there, scripts/fetch_smollm2.py makes it", model.display());
        return;
    }
    let done = on(&model, "run", &["-n", "16", "What is the capital of France?"], b"").expect(0);
    assert!(done.text().lines().any(|line| line.contains("Paris")), "{}", done.text());
    let done =
        run_with(&["run", "-m", model.to_str().unwrap(), "-n", "3", "Say more"], b"Paris is a city.\n").expect(0);
    assert!(!done.text().trim().is_empty());
    // Second turn: only what is new is computed. The cache holds all but the last token of prompt and answer, and one
    // row is computed again.
    let first = json!({"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16});
    let done = on(&model, "chat", &["--json"], format!("{first}\n").as_bytes()).expect(0);
    let reply = done.json().pop().unwrap();
    let second = json!({"messages": [{"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": reply["text"]}, {"role": "user", "content": "And of Italy?"}], "max_tokens": 2});
    let done = on(&model, "chat", &["--json"], format!("{first}\n{second}\n").as_bytes()).expect(0);
    let last = done.json().pop().unwrap();
    let n = |value: &serde_json::Value, key: &str| value[key].as_u64().unwrap();
    let new = n(&last, "prompt_tokens") - n(&reply, "prompt_tokens") - n(&reply, "tokens");
    assert!(n(&last, "prefilled_tokens") <= new + 1, "{last}");
    assert!(n(&last, "reused_tokens") + 2 >= n(&reply, "prompt_tokens") + n(&reply, "tokens"), "{last} after {reply}");
}
