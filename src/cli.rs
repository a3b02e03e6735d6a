//! Arguments become a command with its options, or a usage error (exit code 2); the command runs.
//!
//! Every flag and its help is in cmd/options.rs, where argh reads them. What argh lacks is added here: `--name=value`,
//! `-n5`, `-vv`, a lone `-` (`spread`), and scripts that complete flags in a shell.
use crate::cmd::options::{collectives, Bench, Chat, Doctor, Run};
use crate::cmd::{bench, chat, doctor, run, version};
use crate::completions::{Program, Values};
use crate::error;
use anyhow::{bail, Result};
use argh::{ArgsInfo, FlagInfoKind, FromArgs};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Write;
use std::str::FromStr;

/// Parses the arguments, runs the command, and returns its exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> Result<u8> {
    let mut words = Vec::new();
    for arg in args.into_iter().skip(1) {
        match arg.into_string() {
            Ok(word) => words.push(word),
            Err(arg) => bail!("argument {:?}: expected UTF-8", arg.to_string_lossy()),
        }
    }
    let words = spread(&words)?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let volley = match Volley::from_args(&["volley"], &words) {
        Ok(volley) => volley,
        Err(argh::EarlyExit { output, status: Ok(()) }) => return print(output.trim_end()),
        Err(argh::EarlyExit { output, status: Err(()) }) => {
            let command =
                words.first().filter(|word| COMMANDS.contains(word)).map_or(String::new(), |word| format!(" {word}"));
            bail!("{}; volley{command} --help lists what there is", output.trim_end().replace('\n', " "));
        }
    };
    if volley.version {
        return print(&version::version());
    }
    match volley.command {
        Some(Command::Chat(c)) => chat::chat(&c),
        Some(Command::Run(r)) => run::run(&r),
        Some(Command::Bench(b)) => bench::bench(&b),
        Some(Command::Doctor(d)) => doctor::doctor(&d.model_options()),
        Some(Command::Completions(c)) => print(completions(c.shell).trim_end()),
        None => bail!("expected a command: {}; volley --help explains them", COMMANDS.join(", ")),
    }
}

const COMMANDS: [&str; 5] = ["chat", "run", "bench", "doctor", "completions"];

/// A decode engine for one person and one stream: the lowest latency per token that the memory allows.
#[derive(FromArgs, ArgsInfo)]
#[argh(
    help_triggers("-h", "--help"),
    example = "volley chat",
    example = "volley run \"What is the capital of France?\"",
    example = "git diff | volley run \"Write a commit message\"",
    example = "volley bench -d 0,4096 --json > before.jsonl",
    note = "stdout carries the answer, or JSON lines, and nothing else; notes and errors go to stderr.\nExit codes: 0 fine, 1 internal error, 2 bad input, flag or model, 3 the machine, 130 interrupted."
)]
struct Volley {
    /// print the version
    #[argh(switch)]
    version: bool,
    #[argh(subcommand)]
    command: Option<Command>,
}

#[derive(FromArgs, ArgsInfo)]
#[argh(subcommand)]
enum Command {
    Chat(Chat),
    Run(Run),
    Bench(Bench),
    Doctor(Doctor),
    Completions(Completions),
}

/// Print a completion script for a shell.
#[derive(FromArgs, ArgsInfo)]
#[argh(
    subcommand,
    name = "completions",
    help_triggers("-h", "--help"),
    example = "volley completions bash > ~/.local/share/bash-completion/completions/volley",
    example = "volley completions zsh > ~/.zfunc/_volley",
    example = "volley completions fish > ~/.config/fish/completions/volley.fish"
)]
struct Completions {
    /// bash, zsh or fish
    #[argh(positional)]
    shell: Shell,
}

#[derive(Clone, Copy)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl FromStr for Shell {
    type Err = String;
    fn from_str(word: &str) -> Result<Shell, String> {
        match word {
            "bash" => Ok(Shell::Bash),
            "zsh" => Ok(Shell::Zsh),
            "fish" => Ok(Shell::Fish),
            _ => Err("expected bash, zsh or fish".into()),
        }
    }
}

fn completions(shell: Shell) -> String {
    let mut info = Volley::get_args_info();
    info.name = "volley";
    let collectives = collectives();
    let values = |name: &str| match name {
        "--model" => Values::Folder,
        "--nccl" | "--weights" | "--prompts" | "--draft-vocab" => Values::File,
        "--device" => Values::Words(&["auto", "cpu", "cuda"]),
        "--collective" => Values::Words(&collectives),
        "--draft" => Values::WordsOrFolder(&["none", "ngram", "mtp"]),
        "--draft-tokens" => Values::Words(&["auto", "1", "2", "3", "4", "5", "6", "7"]),
        "completions" => Values::Words(&["bash", "zsh", "fish"]),
        _ => Values::Any,
    };
    let program = Program { info: &info, values: &values };
    match shell {
        Shell::Bash => program.bash(),
        Shell::Zsh => program.zsh(),
        Shell::Fish => program.fish(),
    }
}

/// Flags without a value: their short form may be bundled, and what follows them is no value.
fn switches() -> BTreeSet<String> {
    let info = Volley::get_args_info();
    let flags = info.commands.iter().flat_map(|command| command.command.flags).chain(info.flags);
    let switches = flags.filter(|flag| matches!(flag.kind, FlagInfoKind::Switch));
    let spelled = switches.flat_map(|flag| flag.short.map(|c| format!("-{c}")).into_iter().chain([flag.long.into()]));
    spelled.chain(["-h", "--help", "--"].map(String::from)).collect()
}

/// What argh does not know: `--name=value` and `-n5` become two words, `-vv` becomes `-v -v`, a lone `-` (stdin, which
/// is read anyway) goes.
fn spread(words: &[String]) -> Result<Vec<String>> {
    let switches = switches();
    let mut out = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let is_switch = |flag: &str| switches.contains(flag);
        let letter = word.strip_prefix('-').and_then(|rest| rest.chars().next()).filter(char::is_ascii_alphabetic);
        if word == "--" {
            out.push(word.clone());
            out.extend(words.cloned());
            break;
        } else if word == "-" {
            continue;
        } else if let (true, Some((name, value))) = (word.starts_with("--"), word.split_once('=')) {
            if is_switch(name) {
                bail!("{word}: {name} takes no value");
            }
            out.extend([name.to_string(), value.to_string()]);
        } else if let (Some(letter), true) = (letter, word.len() > 2) {
            let flag = format!("-{letter}");
            if is_switch(&flag) {
                out.extend(word[1..].chars().map(|c| format!("-{c}")));
            } else {
                out.extend([flag, word[2..].to_string()]);
            }
        } else {
            out.push(word.clone());
            if word.starts_with('-') && !is_switch(word) {
                out.extend(words.next().cloned());
            }
        }
    }
    Ok(out)
}

/// Text for a person who asked for it.
fn print(text: &str) -> Result<u8> {
    let mut out = std::io::stdout();
    writeln!(out, "{text}")?;
    Ok(error::FINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_string).collect()
    }

    #[test]
    fn spread_words() {
        let check = |line: &str, want: &str| assert_eq!(spread(&words(line)).unwrap(), words(want), "{line}");
        check("run --max-tokens=5 hi", "run --max-tokens 5 hi");
        check("run -n5 -vv -t -0.5", "run -n 5 -v -v -t -0.5");
        check("run --logit-bias=3=-1", "run --logit-bias 3=-1");
        check("run --stop --a=b -x=y", "run --stop --a=b -x =y"); // a value stays whole
        check("run --stop -foo --raw -n7", "run --stop -foo --raw -n 7");
        check("run - -- --a=b -n5 -", "run -- --a=b -n5 -");
        check("run -5", "run -5");
        assert!(spread(&words("run --json=yes")).unwrap_err().to_string().contains("--json takes no value"));
    }

    /// Every flag of every command takes a value exactly if `switches` does not name it.
    #[test]
    fn switches_are_complete() {
        let (mut seen, switches) = (0, switches());
        for command in COMMANDS {
            let Err(help) = Volley::from_args(&["volley"], &[command, "--help"]) else {
                panic!("help is an early exit")
            };
            let words = |line: &'static str| {
                line.split_whitespace().map(|word| word.trim_end_matches(',')).take_while(|word| word.starts_with('-'))
            };
            let help: &'static str = help.output.leak();
            for flag in help.lines().flat_map(words).filter(|flag| !["-h", "--help", "--"].contains(flag)) {
                let takes_value = match Volley::from_args(&["volley"], &[command, flag]) {
                    Ok(_) => false,
                    Err(exit) => exit.output.contains("No value provided"),
                };
                assert_eq!(takes_value, !switches.contains(flag), "{command} {flag}");
                seen += 1;
            }
        }
        assert!(seen > 30, "only {seen} flags found in the help");
    }
}
