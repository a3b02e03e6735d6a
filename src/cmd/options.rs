//! Every flag and its help, and the options structs that they become.
//!
//! argh reads the flags. What it lacks is added here: groups of flags that several commands share. A group is a macro
//! (`model_flags`, `answer_flags`) that hands its flags on, to its own struct and to each command's. A new flag is one
//! field here and its use; its completions, and which words are switches, follow from it (cli.rs).
use crate::decode::{Sampling, MAX_DRAFTS};
use crate::gpu::machine::Slice;
use crate::gpu::params::COMM_MAX_RANKS;
use crate::gpu::ranks::algorithm::Algorithm;
use crate::model::plan::Ranks;
use anyhow::{bail, Result};
use argh::{ArgsInfo, FromArgs};
use std::path::PathBuf;
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Auto,
    Cpu,
    Cuda,
}

/// Where drafts come from; the default is nowhere.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    /// An EAGLE-3 drafter.
    pub dir: Option<PathBuf>,
    /// The model's own layer for multi-token prediction.
    pub mtp: bool,
    /// Repetitions in prompt and answer.
    pub ngram: bool,
}

// argh takes fields of type Option for flags without a default, and Vec for flags that may be repeated; these are
// neither.
/// None: `auto`, which is what is fastest.
pub type Auto<T> = Option<T>;
/// `128,512`
pub type List = Vec<usize>;
/// `a.jsonl,b.jsonl`
pub type Files = Vec<PathBuf>;

/// Flags of every command. `then` gets the command, groups before, and this one.
macro_rules! model_flags {
    ($then:ident $command:tt $($groups:tt)*) => {
        $then! {
            $command $($groups)*
            /// Which model runs where.
            ModelOptions model_options {
            /// model directory (default: $VOLLEY_MODEL, else models/smollm2-135m-instruct)
            #[argh(option, short = 'm')]
            pub model: Option<PathBuf>,
            /// auto, cpu or cuda (default: auto, which is cuda where there is a usable GPU)
            #[argh(option, default = "Device::Auto")]
            pub device: Device,
            /// which GPUs, a list (default: the first, or as many as --tp takes)
            #[argh(option, from_str_fn(list), default = "vec![]")]
            pub gpus: List,
            /// tensor-parallel ranks that share the model: one a GPU, or --ranks-per-gpu (default: one for each of
            /// --gpus)
            #[argh(option, from_str_fn(positive))]
            pub tp: Option<usize>,
            /// ranks on each GPU, for tests (default: 1)
            #[argh(option, from_str_fn(positive), default = "1")]
            pub ranks_per_gpu: usize,
            /// how ranks add up what each has: auto, push, pull, two-shot, nccl or nccl-allreduce (default: auto, what
            /// is fastest and right at start)
            #[argh(option, from_str_fn(collective), default = "None")]
            pub collective: Auto<Algorithm>,
            /// whether ranks divide attention: auto, split or whole (default: auto, which is split unless a sum over
            /// ranks takes longer than reading all of it)
            #[argh(option, from_str_fn(attention), default = "None")]
            pub attention: Auto<bool>,
            /// the NCCL library (default: libnccl.so.2 where the system looks)
            #[argh(option)]
            pub nccl: Option<PathBuf>,
            /// stop when a pair of GPUs does not reach each other's memory, instead of a slower way
            #[argh(switch)]
            pub require_p2p: bool,
            /// stop when a CUDA graph cannot be captured, instead of a warning and launches one by one
            #[argh(switch)]
            pub require_graphs: bool,
            /// most tokens of prompt and output together (default: the model's, less where its KV cache would pass 1
            /// GiB, or an eighth of the GPU)
            #[argh(option, short = 'c', from_str_fn(count))]
            pub context: Option<usize>,
            /// read the weights instead of mapping them (default on network file systems)
            #[argh(switch)]
            pub no_mmap: bool,
            /// where drafts come from: an EAGLE-3 drafter's DIR or mtp (the model's own layer for multi-token
            /// prediction), ngram, two with a comma between, or none (default: the model's directory with -eagle3
            /// behind its name, if there is one)
            #[argh(option)]
            pub draft: Option<Draft>,
            /// drafts a cycle, 1 to 7, or auto: as many as pay (default: auto)
            #[argh(option, from_str_fn(draft_tokens), default = "None")]
            pub draft_tokens: Auto<usize>,
            /// of a drafter with the whole vocabulary, draft only the 32768 tokens that this FILE counts most: JSON,
            /// {"id": count} or a list of ids, the most frequent first
            #[argh(option)]
            pub draft_vocab: Option<PathBuf>,
            /// a weights.toml for checkpoints with other tensor names (default: built in)
            #[argh(option)]
            pub weights: Option<PathBuf>,
            /// turn bf16 matrices that every token reads into FP8 at load: fewer bytes a token, other answers (default:
            /// as stored)
            #[argh(switch)]
            pub fp8_dense: bool,
            /// say on stderr what was loaded and how; -vv also prints the plan
            #[argh(switch, short = 'v')]
            pub verbose: u8,
            }
        }
    };
}

/// Flags of commands that answer prompts: sampling, and where an answer ends. Those of every command follow.
macro_rules! answer_flags {
    ($then:ident $command:tt) => {
        model_flags! {
            $then $command
            /// How answers are made.
            AnswerOptions answer_options {
            /// system message (default: none, or the template's own)
            #[argh(option, short = 's')]
            pub system: Option<String>,
            /// most tokens of an answer (default: until the context is full)
            #[argh(option, short = 'n', from_str_fn(count))]
            pub max_tokens: Option<usize>,
            /// tokens before an answer may end by itself (default: 0)
            #[argh(option, from_str_fn(count), default = "0")]
            pub min_tokens: usize,
            /// from 0, the most likely token, over 1, the model's own distribution, to ever more even (default: 0)
            #[argh(option, short = 't', from_str_fn(number), default = "Sampling::default().temperature")]
            pub temperature: f32,
            /// sample among the k most likely tokens; 0 is off (default: 0)
            #[argh(option, from_str_fn(count), default = "Sampling::default().top_k")]
            pub top_k: usize,
            /// sample among the fewest tokens with this much probability, 0 to 1 (default: 1, off)
            #[argh(option, from_str_fn(number), default = "Sampling::default().top_p")]
            pub top_p: f32,
            /// sample among tokens at least this fraction as likely as the best, 0 to 1 (default: 0, off)
            #[argh(option, from_str_fn(number), default = "Sampling::default().min_p")]
            pub min_p: f32,
            /// start of the random numbers, for an answer that can be had again (default: drawn and printed)
            #[argh(option, from_str_fn(seed))]
            pub seed: Option<u64>,
            /// above 1: less of what is in prompt or output already (default: 1, off)
            #[argh(option, from_str_fn(number), default = "Sampling::default().repetition_penalty")]
            pub repetition_penalty: f32,
            /// subtracted from logits of tokens in the output, -100 to 100 (default: 0)
            #[argh(option, from_str_fn(number), default = "Sampling::default().presence_penalty")]
            pub presence_penalty: f32,
            /// the same for every time a token occurs, -100 to 100 (default: 0)
            #[argh(option, from_str_fn(number), default = "Sampling::default().frequency_penalty")]
            pub frequency_penalty: f32,
            /// ID=X adds X to the logit of a token, -inf bans it; may be repeated
            #[argh(option, from_str_fn(bias))]
            pub logit_bias: Vec<(u32, f32)>,
            /// end an answer before this text; may be repeated
            #[argh(option)]
            pub stop: Vec<String>,
            /// go on after the model's end tokens
            #[argh(switch)]
            pub ignore_eos: bool,
            /// ask templates that know the switch not to think first
            #[argh(switch)]
            pub no_think: bool,
            /// print the token ids of prompt and answer on stderr
            #[argh(switch)]
            pub show_tokens: bool,
            }
        }
    };
}

/// The struct of each group.
macro_rules! groups {
    (() $(#[$about:meta] $group:ident $to:ident { $($fields:tt)* })*) => {
        $(
            #[$about]
            #[derive(Clone, Debug, FromArgs)]
            pub struct $group {
                $($fields)*
            }

            /// As without any flag.
            impl Default for $group {
                fn default() -> $group {
                    $group::from_args(&["volley"], &[]).expect("no flag must be given")
                }
            }
        )*
    };
}

/// The struct of a command: its own flags, then those of its groups, which it can be asked for. argh must see whether a
/// type is an Option, which a `ty` would hide.
macro_rules! define {
    (($(#[$about:meta])* $name:ident { $($own:tt)* })
     $(#[$_:meta] $group:ident $to:ident { $($(#[$attribute:meta])* pub $flag:ident: $type:ident $(<$of:tt>)?,)* })*) => {
        #[derive(FromArgs, ArgsInfo)]
        $(#[$about])*
        pub struct $name {
            $($own)*
            $($($(#[$attribute])* pub $flag: $type $(<$of>)?,)*)*
        }

        impl $name {
            $(
                pub fn $to(&self) -> $group {
                    $group { $($flag: self.$flag.clone(),)* }
                }
            )*
        }
    };
}

macro_rules! command {
    ($($command:tt)*) => { model_flags! { define ($($command)*) } };
}

macro_rules! answering_command {
    ($($command:tt)*) => { answer_flags! { define ($($command)*) } };
}

answer_flags! { groups () }

impl AnswerOptions {
    /// Before seconds of loading; ids are checked again when the vocabulary is known.
    pub fn check(&self) -> Result<()> {
        self.sampling().check(u32::MAX as usize)
    }

    /// The seed counts only where one is given.
    pub fn sampling(&self) -> Sampling {
        Sampling {
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
        }
    }
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
        pub json: bool,
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
        pub prompt: Vec<String>,
        /// give the prompt to the model as it is, without the chat template
        #[argh(switch)]
        pub raw: bool,
        /// one JSON object a token, then one with reason, counts and times
        #[argh(switch)]
        pub json: bool,
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
        #[argh(option, short = 'p', from_str_fn(list), default = "vec![128]")]
        pub prompt_tokens: List,
        /// tokens generated in each run (default: 64)
        #[argh(option, short = 'g', from_str_fn(positive), default = "64")]
        pub generate: usize,
        /// tokens in the cache before the prompt, a list (default: 0)
        #[argh(option, short = 'd', from_str_fn(list), default = "vec![0]")]
        pub depth: List,
        /// runs of each row, after one that warms up (default: 3)
        #[argh(option, short = 'r', from_str_fn(positive), default = "3")]
        pub repeat: usize,
        /// files of prompts, a list: plain and speculative decoding side by side instead of the rows above
        #[argh(option, from_str_fn(files), default = "vec![]")]
        pub prompts: Files,
        /// prompts of each file, from its start (default: 4)
        #[argh(option, from_str_fn(positive), default = "4")]
        pub limit: usize,
        /// widths of verify passes to time at each depth, a list (default: none)
        #[argh(option, from_str_fn(list), default = "vec![]")]
        pub widths: List,
        /// where the time of a token goes, step by step
        #[argh(switch)]
        pub profile: bool,
        /// what the passes of a speculative cycle cost, and the accept length that pays for them
        #[argh(switch)]
        pub cycle: bool,
        /// random weights: config.json is enough
        #[argh(switch)]
        pub random: bool,
        /// measure one rank of a model split over N, alone on one GPU: R/N, such as 0/8; what it adds up lacks the
        /// other ranks' shares
        #[argh(option, from_str_fn(share))]
        pub slice: Option<Ranks>,
        /// with --slice: each sum over ranks takes so many microseconds (default: it costs nothing)
        #[argh(option)]
        pub comm_us: Option<f64>,
        /// one JSON object a row, with all samples
        #[argh(switch)]
        pub json: bool,
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

impl Bench {
    /// The rank that is measured alone.
    pub fn slice(&self) -> Result<Option<Slice>> {
        match (self.slice, self.comm_us) {
            (None, Some(us)) => bail!("--comm-us {us}: expected --slice as well, whose sums take so long"),
            (_, Some(us)) if !(0.0..=1e6).contains(&us) => {
                bail!("--comm-us {us}: expected microseconds from 0 to 1000000")
            }
            (ranks, comm_us) => Ok(ranks.map(|ranks| Slice { ranks, comm_us })),
        }
    }
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

/// Words of `--collective`.
pub fn collectives() -> Vec<&'static str> {
    ["auto"].into_iter().chain(Algorithm::NAMES.map(|(name, _)| name)).collect()
}

fn collective(word: &str) -> Result<Auto<Algorithm>, String> {
    let named = Algorithm::NAMES.into_iter().find(|(name, _)| *name == word);
    match (word, named) {
        ("auto", _) => Ok(None),
        (_, Some((_, algorithm))) => Ok(Some(algorithm)),
        _ => Err(format!("expected auto or one of {}", Algorithm::NAMES.map(|(name, _)| name).join(", "))),
    }
}

/// Whether every rank has all of it.
fn attention(word: &str) -> Result<Auto<bool>, String> {
    match word {
        "auto" => Ok(None),
        "split" => Ok(Some(false)),
        "whole" => Ok(Some(true)),
        _ => Err("expected auto, split or whole".into()),
    }
}

fn draft_tokens(word: &str) -> Result<Auto<usize>, String> {
    match word {
        "auto" => Ok(None),
        _ => match count(word) {
            Ok(n @ 1..=MAX_DRAFTS) => Ok(Some(n)),
            _ => Err(format!("expected auto or a number from 1 to {MAX_DRAFTS}; --draft none turns drafting off")),
        },
    }
}

/// `R/N`: rank R of N.
fn share(word: &str) -> Result<Ranks, String> {
    let numbers = word.split_once('/').and_then(|(rank, count)| Some((rank.parse().ok()?, count.parse().ok()?)));
    match numbers {
        Some((rank, count)) if rank < count && count <= COMM_MAX_RANKS => Ok(Ranks::new(rank, count)),
        _ => Err(format!("expected a rank below a number of ranks up to {COMM_MAX_RANKS}, such as 0/8")),
    }
}

fn files(list: &str) -> Result<Files, String> {
    match list.split(',').any(str::is_empty) {
        true => Err("expected files with commas between".into()),
        false => Ok(list.split(',').map(PathBuf::from).collect()),
    }
}

fn list(word: &str) -> Result<List, String> {
    word.split(',').map(count).collect()
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
        assert!(draft_tokens("7").is_ok() && draft_tokens("0").is_err() && draft_tokens("8").is_err());
        assert_eq!(list("0,4096").unwrap(), [0, 4096]);
        assert!(list("0,,1").is_err() && list("").is_err());
    }

    /// What a test that gives no flag gets is what a person gets.
    #[test]
    fn defaults_are_those_of_the_flags() {
        let model = ModelOptions::default();
        assert_eq!((model.device, model.ranks_per_gpu, model.verbose), (Device::Auto, 1, 0));
        assert!(model.model.is_none() && model.gpus.is_empty() && !model.require_graphs);
        assert_eq!(AnswerOptions::default().sampling(), Sampling::default());
    }
}
