//! `volley run`: one prompt in, one answer out, as text or as JSON lines.
use super::answer::{self, Ended, Piece};
use super::load::Session;
use super::options::Run;
use super::stats;
use super::terminal::{tell, text};
use crate::error;
use crate::text::Message;
use anyhow::{bail, Context, Result};
use serde_json::json;
use std::io::{self, IsTerminal, Read, Write};

pub fn run(run: &Run) -> Result<u8> {
    let options = &run.answer_options();
    options.check()?;
    let argument = (!run.prompt.is_empty()).then(|| run.prompt.join(" "));
    let prompt = prompt(argument.as_deref(), run.raw)?;
    let mut session = Session::load(&run.model_options())?;
    let ids = if run.raw {
        if options.system.is_some() {
            bail!("--system needs the chat template, which --raw leaves out");
        }
        session.tokenizer.encode_raw(&prompt)?
    } else {
        if !session.tokenizer.has_template() {
            bail!("{} has no chat template: use --raw to give it the prompt as it is", session.model.name);
        }
        let system = options.system.iter().map(|text| Message::new("system", text));
        let messages: Vec<Message> = system.chain([Message::new("user", &prompt)]).collect();
        answer::chat_ids(&session, &messages, options.no_think)?
    };
    if options.show_tokens {
        tell(format_args!("prompt tokens: {ids:?}"));
    }
    let (sampling, seed) = answer::sampling(options);
    let ask = options.ask(&ids, &sampling);
    let mut out = io::stdout();
    let reply = answer::answer(&mut session, &ask, &mut |piece: Piece| {
        if !run.json {
            out.write_all(piece.text.as_bytes())?;
        } else if let Some(token) = piece.token {
            writeln!(out, "{}", json!({ "token": token, "text": piece.text, "us": piece.time.as_micros() as u64 }))?;
        } else {
            writeln!(out, "{}", json!({ "text": piece.text }))?;
        }
        out.flush()
    })?;
    if run.json {
        writeln!(out, "{}", reply.summary(seed))?;
    } else if !reply.text.ends_with('\n') {
        writeln!(out)?;
    }
    if options.show_tokens {
        tell(format_args!("answer tokens: {:?}", reply.answer.tokens));
    }
    if reply.ended == Ended::Context {
        tell(format_args!("the context of {} tokens is full: the answer ends here", session.model.engine.context()));
    }
    if session.model.shows_stats() {
        tell(format_args!("{}", stats::line(&session.model, ids.len(), &reply.answer, reply.statistics.as_ref())));
        if let (Some(s), true) = (&reply.statistics, session.model.verbose > 0) {
            tell(format_args!("{}", stats::speculation(s)));
        }
    }
    Ok(if reply.ended == Ended::Interrupt { error::INTERRUPTED } else { error::FINE })
}

/// Piped stdin, a blank line, the argument; either may be absent.
fn prompt(argument: Option<&str>, raw: bool) -> Result<String> {
    let mut parts = Vec::new();
    if !io::stdin().is_terminal() {
        if argument.is_some() && !stdin_is_ready() {
            tell(format_args!("waiting for stdin to end; </dev/null leaves it out"));
        }
        let mut bytes = Vec::new();
        io::stdin().lock().read_to_end(&mut bytes).context("stdin cannot be read")?;
        let text = text(bytes, 0)?;
        parts.push(if raw { text } else { text.replace("\r\n", "\n").trim_end_matches('\n').to_string() });
    }
    parts.extend(argument.map(str::to_string));
    parts.retain(|part| !part.is_empty());
    let prompt = parts.join("\n\n");
    if prompt.is_empty() || (!raw && prompt.trim().is_empty()) {
        bail!("the prompt is empty: give it as an argument, or pipe it into stdin");
    }
    Ok(prompt)
}

/// Whether stdin has something, or has ended, within two seconds.
fn stdin_is_ready() -> bool {
    let mut stdin = libc::pollfd { fd: libc::STDIN_FILENO, events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor, on the stack.
    unsafe { libc::poll(&mut stdin, 1, 2000) != 0 }
}
