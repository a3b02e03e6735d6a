//! Every flag and its help, nothing else: arguments become the options structs of cmd, or a usage error (exit code 2).
//!
//! argh reads the flags. What it lacks is added here: flags that several commands share (the `command!` macros), and
//! `--name=value`, `-n5`, `-vv`, a lone `-` (`spread`). A new flag is a field in one of the macros or structs and a
//! line in the conversion below it.
use crate::cmd::{
    bench, chat, doctor, run, Algorithm, AnswerOptions, Device, Draft, ModelOptions, Ranks, Slice, COMM_MAX_RANKS,
};
use crate::completions::{Program, Values};
use crate::decode::Sampling;
use crate::decode::MAX_DRAFTS;
use crate::error;
use anyhow::{bail, Result};
use argh::{ArgsInfo, FromArgs};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
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
        return print(&crate::cmd::version());
    }
    match volley.command {
        Some(Command::Chat(c)) => chat::chat(&c.model_options(), &c.answer_options()?, c.json),
        Some(Command::Run(r)) => {
            let prompt = (!r.prompt.is_empty()).then(|| r.prompt.join(" "));
            run::run(&r.model_options(), &r.answer_options()?, &run::Options { prompt, raw: r.raw, json: r.json })
        }
        Some(Command::Bench(b)) => {
            let model = ModelOptions { random: b.random, slice: b.slice()?, ..b.model_options() };
            let options = bench::Options {
                prompts: b.prompt_tokens.0,
                generate: b.generate,
                depths: b.depth.0,
                repeat: b.repeat,
                widths: b.widths.0,
                profile: b.profile,
                cycle: b.cycle,
                prompt_files: b.prompts.0,
                limit: b.limit,
                json: b.json,
            };
            bench::bench(&model, &options)
        }
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

/// A command: its own flags, then those that every command has. They say which model runs where.
macro_rules! command {
    ($(#[$attribute:meta])* $name:ident { $($own:tt)* }) => {
        #[derive(FromArgs, ArgsInfo)]
        $(#[$attribute])*
        struct $name {
            $($own)*
            /// model directory (default: $VOLLEY_MODEL, else models/smollm2-135m-instruct)
            #[argh(option, short = 'm')]
            model: Option<PathBuf>,
            /// auto, cpu or cuda (default: auto, which is cuda where there is a usable GPU)
            #[argh(option, default = "Device::Auto")]
            device: Device,
            /// which GPUs, a list (default: the first, or as many as --tp takes)
            #[argh(option, default = "List(vec![])")]
            gpus: List,
            /// tensor-parallel ranks that share the model: one a GPU, or --ranks-per-gpu (default: one for each of
            /// --gpus)
            #[argh(option, from_str_fn(positive))]
            tp: Option<usize>,
            /// ranks on each GPU, for tests (default: 1)
            #[argh(option, from_str_fn(positive), default = "1")]
            ranks_per_gpu: usize,
            /// how ranks add up what each has: auto, push, pull, two-shot, nccl or nccl-allreduce (default: auto, what
            /// is fastest and right at start)
            #[argh(option, default = "Collective(None)")]
            collective: Collective,
            /// whether ranks divide attention: auto, split or whole (default: auto, which is split unless a sum over
            /// ranks takes longer than reading all of it)
            #[argh(option, default = "Attention(None)")]
            attention: Attention,
            /// the NCCL library (default: libnccl.so.2 where the system looks)
            #[argh(option)]
            nccl: Option<PathBuf>,
            /// stop when a pair of GPUs does not reach each other's memory, instead of a slower way
            #[argh(switch)]
            require_p2p: bool,
            /// stop when a CUDA graph cannot be captured, instead of a warning and launches one by one
            #[argh(switch)]
            require_graphs: bool,
            /// most tokens of prompt and output together (default: the model's, less where its KV cache would pass 1
            /// GiB, or an eighth of the GPU)
            #[argh(option, short = 'c', from_str_fn(count))]
            context: Option<usize>,
            /// read the weights instead of mapping them (default on network file systems)
            #[argh(switch)]
            no_mmap: bool,
            /// where drafts come from: an EAGLE-3 drafter's DIR or mtp (the model's own layer for multi-token
            /// prediction), ngram, two with a comma between, or none (default: the model's directory with -eagle3
            /// behind its name, if there is one)
            #[argh(option)]
            draft: Option<Draft>,
            /// drafts a cycle, 1 to 7, or auto: as many as pay (default: auto)
            #[argh(option, default = "DraftTokens(None)")]
            draft_tokens: DraftTokens,
            /// of a drafter with the whole vocabulary, draft only the 32768 tokens that this FILE counts most: JSON,
            /// {"id": count} or a list of ids, the most frequent first
            #[argh(option)]
            draft_vocab: Option<PathBuf>,
            /// a weights.toml for checkpoints with other tensor names (default: built in)
            #[argh(option)]
            weights: Option<PathBuf>,
            /// turn bf16 matrices that every token reads into FP8 at load: fewer bytes a token, other answers (default:
            /// as stored)
            #[argh(switch)]
            fp8_dense: bool,
            /// say on stderr what was loaded and how; -vv also prints the plan
            #[argh(switch, short = 'v')]
            verbose: u8,
        }

        impl $name {
            fn model_options(&self) -> ModelOptions {
                ModelOptions {
                    dir: self.model.clone(),
                    device: self.device,
                    context: self.context,
                    no_mmap: self.no_mmap,
                    draft: self.draft.clone(),
                    draft_tokens: self.draft_tokens.0,
                    draft_vocab: self.draft_vocab.clone(),
                    weights: self.weights.clone(),
                    gpus: self.gpus.0.clone(),
                    tp: self.tp,
                    ranks_per_gpu: self.ranks_per_gpu,
                    collective: self.collective.0,
                    whole_attention: self.attention.0,
                    nccl: self.nccl.clone(),
                    require_p2p: self.require_p2p,
                    require_graphs: self.require_graphs,
                    random: false,
                    fp8_dense: self.fp8_dense,
                    slice: None,
                    verbose: self.verbose,
                }
            }
        }
    };
}

/// A command that answers prompts: its own flags, then sampling and where an answer ends.
macro_rules! answering_command {
    ($(#[$attribute:meta])* $name:ident { $($own:tt)* }) => {
        command! {
            $(#[$attribute])*
            $name {
                $($own)*
                /// system message (default: none, or the template's own)
                #[argh(option, short = 's')]
                system: Option<String>,
                /// most tokens of an answer (default: until the context is full)
                #[argh(option, short = 'n', from_str_fn(count))]
                max_tokens: Option<usize>,
                /// tokens before an answer may end by itself (default: 0)
                #[argh(option, from_str_fn(count), default = "0")]
                min_tokens: usize,
                /// from 0, the most likely token, over 1, the model's own distribution, to ever more even (default: 0)
                #[argh(option, short = 't', from_str_fn(number), default = "Sampling::default().temperature")]
                temperature: f32,
                /// sample among the k most likely tokens; 0 is off (default: 0)
                #[argh(option, from_str_fn(count), default = "Sampling::default().top_k")]
                top_k: usize,
                /// sample among the fewest tokens with this much probability, 0 to 1 (default: 1, off)
                #[argh(option, from_str_fn(number), default = "Sampling::default().top_p")]
                top_p: f32,
                /// sample among tokens at least this fraction as likely as the best, 0 to 1 (default: 0, off)
                #[argh(option, from_str_fn(number), default = "Sampling::default().min_p")]
                min_p: f32,
                /// start of the random numbers, for an answer that can be had again (default: drawn and printed)
                #[argh(option, from_str_fn(seed))]
                seed: Option<u64>,
                /// above 1: less of what is in prompt or output already (default: 1, off)
                #[argh(option, from_str_fn(number), default = "Sampling::default().repetition_penalty")]
                repetition_penalty: f32,
                /// subtracted from logits of tokens in the output, -100 to 100 (default: 0)
                #[argh(option, from_str_fn(number), default = "Sampling::default().presence_penalty")]
                presence_penalty: f32,
                /// the same for every time a token occurs, -100 to 100 (default: 0)
                #[argh(option, from_str_fn(number), default = "Sampling::default().frequency_penalty")]
                frequency_penalty: f32,
                /// ID=X adds X to the logit of a token, -inf bans it; may be repeated
                #[argh(option, from_str_fn(bias))]
                logit_bias: Vec<(u32, f32)>,
                /// end an answer before this text; may be repeated
                #[argh(option)]
                stop: Vec<String>,
                /// go on after the model's end tokens
                #[argh(switch)]
                ignore_eos: bool,
                /// ask templates that know the switch not to think first
                #[argh(switch)]
                no_think: bool,
                /// print the token ids of prompt and answer on stderr
                #[argh(switch)]
                show_tokens: bool,
            }
        }

        impl $name {
            fn answer_options(&self) -> Result<AnswerOptions> {
                let sampling = Sampling {
                    temperature: self.temperature,
                    top_k: self.top_k,
                    top_p: self.top_p,
                    min_p: self.min_p,
                    seed: self.seed.unwrap_or(0),
                    repetition_penalty: self.repetition_penalty,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    logit_bias: self.logit_bias.clone(),
                    min_tokens: self.min_tokens,
                };
                // Before seconds of loading; ids are checked again when the vocabulary is known.
                sampling.check(u32::MAX as usize)?;
                Ok(AnswerOptions {
                    sampling,
                    seed: self.seed,
                    max_tokens: self.max_tokens,
                    stops: self.stop.clone(),
                    ignore_eos: self.ignore_eos,
                    system: self.system.clone(),
                    no_think: self.no_think,
                    show_tokens: self.show_tokens,
                })
            }
        }
    };
}

answering_command! {
    /// Talk with a model; /help lists the commands of the conversation.
    #[argh(
        subcommand,
        name = "chat",
        help_triggers("-h", "--help"),
        usage = "[options]",
        note = "--json reads one request a line: {{\"messages\": [{{\"role\": \"user\", \"content\": \"...\"}}], \"temperature\": 0.7, \"stop\": [\"...\"],\n\"max_tokens\": 100, \"seed\": 1, ...}} and answers {{\"delta\": \"...\"}} lines, then one object with \"done\"."
    )]
    Chat {
        /// one request object a line on stdin, JSON lines on stdout
        #[argh(switch)]
        json: bool,
    }
}

answering_command! {
    /// Answer one prompt and exit. Piped stdin comes before the prompt argument.
    #[argh(
        subcommand,
        name = "run",
        help_triggers("-h", "--help"),
        usage = "[options] [--] [prompt...]",
        example = "volley run -n 100 \"What is the capital of France?\"",
        example = "git log | volley run \"What changed?\""
    )]
    Run {
        /// the prompt; several words are joined by spaces
        #[argh(positional)]
        prompt: Vec<String>,
        /// give the prompt to the model as it is, without the chat template
        #[argh(switch)]
        raw: bool,
        /// one JSON object a token, then one with reason, counts and times
        #[argh(switch)]
        json: bool,
    }
}

command! {
    /// Measure latency: time to the first token, time per token, and how much of the memory's speed that is.
    #[argh(
        subcommand,
        name = "bench",
        help_triggers("-h", "--help"),
        usage = "[options]",
        example = "volley bench -p 128,512 -d 0,2048",
        example = "volley bench --prompts prompts/mt_bench.jsonl,prompts/humaneval.jsonl -g 200",
        note = "Lists are numbers with commas between; every prompt length runs at every depth."
    )]
    Bench {
        /// prompt tokens, a list (default: 128)
        #[argh(option, short = 'p', default = "List(vec![128])")]
        prompt_tokens: List,
        /// tokens generated in each run (default: 64)
        #[argh(option, short = 'g', from_str_fn(positive), default = "64")]
        generate: usize,
        /// tokens in the cache before the prompt, a list (default: 0)
        #[argh(option, short = 'd', default = "List(vec![0])")]
        depth: List,
        /// runs of each row, after one that warms up (default: 3)
        #[argh(option, short = 'r', from_str_fn(positive), default = "3")]
        repeat: usize,
        /// files of prompts, a list: plain and speculative decoding side by side instead of the rows above
        #[argh(option, default = "Files(vec![])")]
        prompts: Files,
        /// prompts of each file, from its start (default: 4)
        #[argh(option, from_str_fn(positive), default = "4")]
        limit: usize,
        /// widths of verify passes to time at each depth, a list (default: none)
        #[argh(option, default = "List(vec![])")]
        widths: List,
        /// where the time of a token goes, step by step
        #[argh(switch)]
        profile: bool,
        /// what the passes of a speculative cycle cost, and the accept length that pays for them
        #[argh(switch)]
        cycle: bool,
        /// random weights: config.json is enough
        #[argh(switch)]
        random: bool,
        /// measure one rank of a model split over N, alone on one GPU: R/N, such as 0/8; what it adds up lacks the
        /// other ranks' shares
        #[argh(option)]
        slice: Option<Share>,
        /// with --slice: each sum over ranks takes so many microseconds (default: it costs nothing)
        #[argh(option)]
        comm_us: Option<f64>,
        /// one JSON object a row, with all samples
        #[argh(switch)]
        json: bool,
    }
}

impl Bench {
    fn slice(&self) -> Result<Option<Slice>> {
        match (&self.slice, self.comm_us) {
            (None, Some(us)) => bail!("--comm-us {us}: expected --slice as well, whose sums take so long"),
            (_, Some(us)) if !(0.0..=1e6).contains(&us) => {
                bail!("--comm-us {us}: expected microseconds from 0 to 1000000")
            }
            (share, comm_us) => Ok(share.as_ref().map(|share| Slice { ranks: share.0, comm_us })),
        }
    }
}

/// `R/N`: rank R of N.
struct Share(Ranks);

impl FromStr for Share {
    type Err = String;
    fn from_str(word: &str) -> Result<Share, String> {
        let numbers = word.split_once('/').and_then(|(rank, count)| Some((rank.parse().ok()?, count.parse().ok()?)));
        match numbers {
            Some((rank, count)) if rank < count && count <= COMM_MAX_RANKS => Ok(Share(Ranks::new(rank, count))),
            _ => Err(format!("expected a rank below a number of ranks up to {COMM_MAX_RANKS}, such as 0/8")),
        }
    }
}

/// Flags without a value: their short form may be bundled, and what follows them is no value.
const SWITCHES: [&str; 18] = [
    "--fp8-dense",
    "--require-graphs",
    "--require-p2p",
    "--profile",
    "--cycle",
    "--random",
    "--version",
    "--help",
    "-h",
    "--no-mmap",
    "--verbose",
    "-v",
    "--ignore-eos",
    "--no-think",
    "--show-tokens",
    "--json",
    "--raw",
    "--",
];

/// What argh does not know: `--name=value` and `-n5` become two words, `-vv` becomes `-v -v`, a lone `-` (stdin, which
/// is read anyway) goes.
fn spread(words: &[String]) -> Result<Vec<String>> {
    let mut out = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let is_switch = |flag: &str| SWITCHES.contains(&flag);
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

impl FromStr for Device {
    type Err = String;
    fn from_str(word: &str) -> Result<Device, String> {
        match word {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda),
            _ => Err("expected auto, cpu or cuda".into()),
        }
    }
}

impl FromStr for Draft {
    type Err = String;
    fn from_str(list: &str) -> Result<Draft, String> {
        let mut draft = Draft::default();
        for word in list.split(',') {
            match word {
                "none" if list == "none" => {}
                "ngram" if !draft.ngram => draft.ngram = true,
                "mtp" if draft.dir.is_none() && !draft.mtp => draft.mtp = true,
                "" | "none" | "ngram" => {
                    return Err("expected a drafter's DIR, mtp, ngram, DIR,ngram, mtp,ngram or none".into())
                }
                dir if draft.dir.is_none() && !draft.mtp => draft.dir = Some(dir.into()),
                dir => return Err(format!("expected one drafter, found {dir:?} as well")),
            }
        }
        Ok(draft)
    }
}

/// None: auto.
struct Collective(Option<Algorithm>);

impl FromStr for Collective {
    type Err = String;
    fn from_str(word: &str) -> Result<Collective, String> {
        let named = Algorithm::NAMES.into_iter().find(|(name, _)| *name == word);
        match (word, named) {
            ("auto", _) => Ok(Collective(None)),
            (_, Some((_, algorithm))) => Ok(Collective(Some(algorithm))),
            _ => Err(format!("expected auto or one of {}", Algorithm::NAMES.map(|(name, _)| name).join(", "))),
        }
    }
}

/// None: auto.
struct Attention(Option<bool>);

impl FromStr for Attention {
    type Err = String;
    fn from_str(word: &str) -> Result<Attention, String> {
        match word {
            "auto" => Ok(Attention(None)),
            "split" => Ok(Attention(Some(false))),
            "whole" => Ok(Attention(Some(true))),
            _ => Err("expected auto, split or whole".into()),
        }
    }
}

struct DraftTokens(Option<usize>);

impl FromStr for DraftTokens {
    type Err = String;
    fn from_str(word: &str) -> Result<DraftTokens, String> {
        match word {
            "auto" => Ok(DraftTokens(None)),
            _ => match count(word) {
                Ok(n @ 1..=MAX_DRAFTS) => Ok(DraftTokens(Some(n))),
                _ => Err(format!("expected auto or a number from 1 to {MAX_DRAFTS}; --draft none turns drafting off")),
            },
        }
    }
}

/// `a.jsonl,b.jsonl`
struct Files(Vec<PathBuf>);

impl FromStr for Files {
    type Err = String;
    fn from_str(list: &str) -> Result<Files, String> {
        match list.split(',').any(str::is_empty) {
            true => Err("expected files with commas between".into()),
            false => Ok(Files(list.split(',').map(PathBuf::from).collect())),
        }
    }
}

command! {
    /// Check driver, GPU and kernels; with -m or $VOLLEY_MODEL, the model too.
    #[argh(
        subcommand,
        name = "doctor",
        help_triggers("-h", "--help"),
        usage = "[options]",
        example = "volley doctor -m models/smollm2-135m-instruct",
        note = "One line a check. Exit codes: 0 all hold, 1 some do not, 2 bad flag or model, 3 driver, GPU or memory."
    )]
    Doctor {}
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
    let collectives: Vec<&str> = ["auto"].into_iter().chain(Algorithm::NAMES.map(|(name, _)| name)).collect();
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

/// `128,512`
struct List(Vec<usize>);

impl FromStr for List {
    type Err = String;
    fn from_str(word: &str) -> Result<List, String> {
        word.split(',').map(count).collect::<Result<_, _>>().map(List)
    }
}

fn count(word: &str) -> Result<usize, String> {
    word.parse().map_err(|_| format!("expected a whole number from 0 to {}", usize::MAX))
}

fn positive(word: &str) -> Result<usize, String> {
    count(word).ok().filter(|&n| n > 0).ok_or_else(|| format!("expected a whole number from 1 to {}", usize::MAX))
}

fn seed(word: &str) -> Result<u64, String> {
    word.parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

/// Any float; the ranges are `Sampling::check`'s.
fn number(word: &str) -> Result<f32, String> {
    word.parse().map_err(|_| "expected a number such as 0.7".into())
}

fn bias(word: &str) -> Result<(u32, f32), String> {
    let pair = word.split_once('=').and_then(|(id, x)| Some((id.parse().ok()?, x.parse().ok()?)));
    pair.ok_or_else(|| "expected ID=X, a token id and a number such as 198=-2.5 or 198=-inf".into())
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

    /// Every flag of every command is a switch exactly if SWITCHES says so.
    #[test]
    fn switches_are_complete() {
        let mut seen = 0;
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
                assert_eq!(takes_value, !SWITCHES.contains(&flag), "{command} {flag}");
                seen += 1;
            }
        }
        assert!(seen > 30, "only {seen} flags found in the help");
    }

    #[test]
    fn numbers_are_strict() {
        assert!(
            count("5").is_ok()
                && count("-5").is_err()
                && count("5.0").is_err()
                && count("").is_err()
                && count("99999999999999999999").is_err()
        );
        assert!(positive("0").is_err() && positive("1").is_ok());
        assert!(number("0.7").is_ok() && number("0,7").is_err() && number("1f").is_err());
        assert_eq!(bias("7=-inf"), Ok((7, f32::NEG_INFINITY)));
        assert!(bias("7").is_err() && bias("x=1").is_err() && bias("-1=1").is_err());
        assert_eq!(Draft::from_str("ngram"), Ok(Draft { ngram: true, ..Draft::default() }));
        assert_eq!(
            Draft::from_str("a/b,ngram"),
            Ok(Draft { dir: Some("a/b".into()), ngram: true, ..Draft::default() })
        );
        assert_eq!(Draft::from_str("mtp,ngram"), Ok(Draft { mtp: true, ngram: true, ..Draft::default() }));
        assert_eq!(Draft::from_str("none"), Ok(Draft::default()));
        assert!(["", "a,b", "a,mtp", "mtp,a", "mtp,mtp", "none,ngram", "ngram,ngram", "a,"]
            .iter()
            .all(|word| Draft::from_str(word).is_err()));
        assert!(
            DraftTokens::from_str("7").is_ok()
                && DraftTokens::from_str("0").is_err()
                && DraftTokens::from_str("8").is_err()
        );
        assert_eq!(List::from_str("0,4096").ok().unwrap().0, [0, 4096]);
        assert!(List::from_str("0,,1").is_err() && List::from_str("").is_err());
    }
}
