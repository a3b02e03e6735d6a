//! `volley chat`: a conversation at a terminal or over a pipe, or JSON requests one a line.
//!
//! Nothing is ever dropped from a conversation: when the context is full, that is said, and the person decides. Every
//! turn renders the whole conversation; the engine finds the prefix that its cache already holds.
use super::answer::{self, draw_seed, Ask, Ended, Piece, Reply};
use super::load::Session;
use super::options::{AnswerOptions, Chat};
use super::terminal::{tell, Lines};
use super::{signal, stats};
use crate::decode::Sampling;
use crate::error;
use crate::text::Message;
use anyhow::{bail, Result};
use rustyline::config::Behavior;
use rustyline::error::ReadlineError;
use rustyline::DefaultEditor;
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal, StdinLock, Write};

pub fn chat(chat: &Chat) -> Result<u8> {
    let options = &chat.answer_options();
    options.check()?;
    let session = Session::load(&chat.model_options())?;
    if !session.tokenizer.has_template() {
        bail!("{} has no chat template: use volley run --raw", session.model.name);
    }
    options.sampling().check(session.model.config.vocab)?;
    if chat.json {
        return serve(session, options);
    }
    if io::stdin().is_terminal() {
        tell(format_args!("{} on {}; /help lists the commands", session.model.name, session.model.device));
    }
    let (sampling, _) = answer::sampling(options);
    let system = options.system.iter().map(|text| Message::new("system", text));
    let mut conversation = Conversation {
        session,
        options,
        sampling,
        messages: system.collect(),
        turns: 0,
        tokens: 0,
        last: "no answer yet".into(),
        last_drafts: None,
    };
    conversation.talk(&mut Input::open()?)
}

const COMMANDS: &str = "/help /clear /system TEXT /regen /stats /exit";

const HELP: &str = "\
/help         this list
/clear        start a new conversation; the system message stays
/system TEXT  set the system message, without TEXT remove it; the conversation stays
/regen        answer the last message again, with a new seed
/stats        speed of the last answer, and what the context holds
/exit         leave, as Ctrl-D does
\"\"\"           begins and ends a message of several lines, or one that starts with /
Ctrl-C stops an answer; at the prompt it leaves";

struct Conversation<'a> {
    session: Session,
    options: &'a AnswerOptions,
    sampling: Sampling,
    messages: Vec<Message>,
    /// Answers so far and their tokens, for /stats.
    turns: usize,
    tokens: usize,
    last: String,
    last_drafts: Option<String>,
}

impl Conversation<'_> {
    fn talk(&mut self, input: &mut Input) -> Result<u8> {
        loop {
            let message = match input.message()? {
                Said::Line(line) if line.trim().is_empty() => continue,
                Said::Line(line) if line.starts_with('/') => {
                    if self.command(line.trim())? {
                        return Ok(error::FINE);
                    }
                    continue;
                }
                Said::Line(text) | Said::Block(text) => text,
                Said::End => return Ok(error::FINE),
                Said::Interrupt => return Ok(error::INTERRUPTED),
            };
            self.messages.push(Message::new("user", &message));
            self.answer()?;
        }
    }

    /// True to leave.
    fn command(&mut self, line: &str) -> Result<bool> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match (word, rest.trim()) {
            ("/help" | "/?", "") => tell(format_args!("{HELP}")),
            ("/exit" | "/quit" | "/bye", "") => return Ok(true),
            ("/clear", "") => {
                self.messages.retain(|message| message.role == "system");
                tell(format_args!("new conversation"));
            }
            ("/system", text) => {
                self.messages.retain(|message| message.role != "system");
                if text.is_empty() {
                    tell(format_args!("no system message"));
                } else {
                    self.messages.insert(0, Message::new("system", text));
                    tell(format_args!("system message set"));
                }
            }
            ("/regen", "") => self.regenerate()?,
            ("/stats", "") => {
                let context = self.session.model.engine.context();
                tell(format_args!("{}", self.last));
                self.last_drafts.iter().for_each(|drafts| tell(format_args!("{drafts}")));
                let counters = self.session.model.engine.counters();
                tell(format_args!(
                    "replays: prefill {}, verify {}, draft {}; eager {}",
                    counters.prefill_replays, counters.verify_replays, counters.draft_replays, counters.eager
                ));
                tell(format_args!("{} answers, {} tokens; context of {context} tokens", self.turns, self.tokens));
            }
            _ => tell(format_args!(
                "error: {line}: expected one of {COMMANDS}; a message that starts with / goes between \"\"\""
            )),
        }
        Ok(false)
    }

    fn regenerate(&mut self) -> Result<()> {
        let Some(last) = self.messages.iter().rposition(|message| message.role == "user") else {
            tell(format_args!("error: /regen: there is no message to answer yet"));
            return Ok(());
        };
        self.messages.truncate(last + 1);
        self.sampling.seed = draw_seed();
        tell(format_args!("seed: {}", self.sampling.seed));
        if self.sampling.temperature == 0.0 {
            tell(format_args!(
                "the temperature is 0, so the answer stays the same; start with -t 0.7 or so for others"
            ));
        }
        self.answer()
    }

    /// Answers the last message. If that cannot be done the message is taken back, and the conversation is as before.
    fn answer(&mut self) -> Result<()> {
        match self.try_answer() {
            Ok(reply) => {
                self.turns += 1;
                self.tokens += reply.answer.tokens.len();
                self.last =
                    stats::line(&self.session.model, reply.prompt_tokens, &reply.answer, reply.statistics.as_ref());
                self.last_drafts = reply.statistics.as_ref().map(stats::speculation);
                let context = self.session.model.engine.context();
                match reply.ended {
                    Ended::Context => tell(format_args!(
                        "the context of {context} tokens is full: the answer ends here; /clear starts a new conversation"
                    )),
                    Ended::Interrupt => tell(format_args!("[stopped]")),
                    _ => {}
                }
                if self.session.model.shows_stats() {
                    tell(format_args!("{}", self.last));
                }
                self.messages.push(Message::new("assistant", &reply.text));
                Ok(())
            }
            Err(error) if error::exit_code(&error) == error::BAD_INPUT => {
                self.messages.pop();
                tell(format_args!("error: {}", error::line(&error)));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn try_answer(&mut self) -> Result<Reply> {
        let ids = answer::chat_ids(&self.session, &self.messages, self.options.no_think)?;
        let context = self.session.model.engine.context();
        if ids.len() > context {
            bail!(
                "the context is full: with this message the conversation has {} tokens, the context holds {context}; nothing was dropped, the \
                 message was not answered; /clear starts a new conversation, -c at the start makes the context larger",
                ids.len()
            );
        }
        if self.options.show_tokens {
            tell(format_args!("prompt tokens: {ids:?}"));
        }
        let ask = self.options.ask(&ids, &self.sampling);
        let mut out = io::stdout();
        let reply = answer::answer(&mut self.session, &ask, &mut |piece: Piece| {
            out.write_all(piece.text.as_bytes())?;
            out.flush()
        })?;
        if !reply.text.ends_with('\n') {
            writeln!(out)?;
        }
        if self.options.show_tokens {
            tell(format_args!("answer tokens: {:?}", reply.answer.tokens));
        }
        Ok(reply)
    }
}

/// Where messages come from.
enum Input {
    Terminal(Box<DefaultEditor>),
    Pipe(Lines<StdinLock<'static>>),
}

enum Said {
    Line(String),
    /// What stood between two `"""`.
    Block(String),
    End,
    Interrupt,
}

impl Input {
    fn open() -> Result<Input> {
        if !io::stdin().is_terminal() {
            return Ok(Input::Pipe(Lines::new(io::stdin().lock())));
        }
        // With stdout redirected the prompt goes to the terminal, not into the file.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = rustyline::Config::builder().behavior(behavior).auto_add_history(true).build();
        Ok(Input::Terminal(Box::new(DefaultEditor::with_config(config)?)))
    }

    /// A line, or all lines from one that starts with `"""` to one that ends with it.
    fn message(&mut self) -> Result<Said> {
        const MARK: &str = "\"\"\"";
        let first = match self.line("> ")? {
            Said::Line(line) => line,
            other => return Ok(other),
        };
        let Some(first) = first.strip_prefix(MARK) else { return Ok(Said::Line(first)) };
        let mut block = first.to_string();
        loop {
            if let Some(block) = block.trim_end().strip_suffix(MARK) {
                return Ok(Said::Block(block.trim_matches('\n').to_string()));
            }
            match self.line("... ")? {
                Said::Line(line) => block = block + "\n" + &line,
                Said::End => bail!("stdin ended inside {MARK}: expected another {MARK} at the end of the message"),
                other => return Ok(other),
            }
        }
    }

    fn line(&mut self, prompt: &str) -> Result<Said> {
        match self {
            Input::Pipe(lines) => lines.next()?.transpose().map(|line| line.map_or(Said::End, Said::Line)),
            Input::Terminal(editor) => match signal::while_editing(|| editor.readline(prompt)) {
                Ok(line) => Ok(Said::Line(line)),
                Err(ReadlineError::Eof) => Ok(Said::End),
                Err(ReadlineError::Interrupted) => Ok(Said::Interrupt),
                Err(error) => Err(anyhow::anyhow!("the terminal cannot be read: {error}")),
            },
        }
    }
}

/// One request of `--json`. Fields that are absent have the values of the flags.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonRequest {
    messages: Vec<Message>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<u64>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// Token id to number, as in `{"198": -100}`.
    logit_bias: Option<BTreeMap<u32, f32>>,
    min_tokens: Option<usize>,
    max_tokens: Option<usize>,
    stop: Option<Vec<String>>,
    ignore_eos: Option<bool>,
    no_think: Option<bool>,
}

impl JsonRequest {
    fn sampling(&self, flags: &Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(flags.temperature),
            top_k: self.top_k.unwrap_or(flags.top_k),
            top_p: self.top_p.unwrap_or(flags.top_p),
            min_p: self.min_p.unwrap_or(flags.min_p),
            seed: 0,
            repetition_penalty: self.repetition_penalty.unwrap_or(flags.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(flags.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(flags.frequency_penalty),
            logit_bias: self
                .logit_bias
                .as_ref()
                .map_or_else(|| flags.logit_bias.clone(), |bias| bias.iter().map(|(&id, &x)| (id, x)).collect()),
            min_tokens: self.min_tokens.unwrap_or(flags.min_tokens),
        }
    }
}

/// The loop of `--json`: bad requests are answered with an error object, and the loop goes on.
fn serve(mut session: Session, options: &AnswerOptions) -> Result<u8> {
    let mut lines = Lines::new(io::stdin().lock());
    let mut out = io::stdout();
    while let Some(line) = lines.next()? {
        if line.as_ref().is_ok_and(|line| line.trim().is_empty()) {
            continue;
        }
        let last = line.and_then(|line| respond(&mut session, options, &line));
        let last = match last {
            Ok(summary) => summary,
            Err(error) if error::exit_code(&error) == error::BAD_INPUT => json!({ "error": error::line(&error) }),
            Err(error) => return Err(error),
        };
        writeln!(out, "{last}")?;
        out.flush()?;
    }
    Ok(error::FINE)
}

/// Prints the deltas of one answer; the last object is returned.
fn respond(session: &mut Session, options: &AnswerOptions, line: &str) -> Result<serde_json::Value> {
    let request: JsonRequest = serde_json::from_str(line).map_err(|error| anyhow::anyhow!("request: {error}"))?;
    let mut messages = request.messages.clone();
    if messages.is_empty() {
        bail!("request: expected at least one message, found none");
    }
    if let (Some(system), false) = (&options.system, messages[0].role == "system") {
        messages.insert(0, Message::new("system", system));
    }
    let ids = answer::chat_ids(session, &messages, request.no_think.unwrap_or(options.no_think))?;
    if options.show_tokens {
        tell(format_args!("prompt tokens: {ids:?}"));
    }
    let (sampling, seed) = answer::seeded(request.sampling(&options.sampling()), request.seed.or(options.seed));
    let ask = Ask {
        prompt: &ids,
        sampling: &sampling,
        stops: request.stop.as_ref().unwrap_or(&options.stop),
        max_tokens: request.max_tokens.or(options.max_tokens),
        ignore_eos: request.ignore_eos.unwrap_or(options.ignore_eos),
    };
    let mut out = io::stdout();
    let reply = answer::answer(session, &ask, &mut |piece: Piece| {
        if piece.text.is_empty() {
            return Ok(());
        }
        writeln!(out, "{}", json!({ "delta": piece.text }))?;
        out.flush()
    })?;
    if options.show_tokens {
        tell(format_args!("answer tokens: {:?}", reply.answer.tokens));
    }
    if session.model.shows_stats() {
        tell(format_args!("{}", stats::line(&session.model, ids.len(), &reply.answer, reply.statistics.as_ref())));
    }
    Ok(reply.summary(seed))
}
