//! Chat templates: Jinja as transformers runs it, on minijinja. `ChatTemplate` turns messages into text; which parts of
//! that text may become control tokens is the business of tokenizer.rs. Semantics follow transformers 5,
//! utils/chat_template_utils.py.

use anyhow::{anyhow, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value as Json};

/// One message of a conversation, as chat keeps it and as JSON requests bring it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    /// A string, or in JSON also a list of `{"type": "text", "text": ...}` parts, joined by line breaks.
    #[serde(deserialize_with = "content_text")]
    pub content: String,
    /// Whatever else the template may read: `reasoning_content`, `name`, `tool_calls`, ...
    #[serde(flatten)]
    pub extra: Map<String, Json>,
}

impl Message {
    pub fn new(role: &str, content: &str) -> Self {
        Message { role: role.into(), content: content.into(), extra: Map::new() }
    }
}

/// How a conversation is rendered.
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further template variables, such as `enable_thinking`.
    pub variables: Map<String, Json>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
}

/// Steps of a render, one of which also pays for 64 bytes. Published templates take some hundred for a message, a few
/// for each of its bytes at most.
const FUEL: u64 = 200_000;
const FUEL_PER_BYTE: u64 = 100;

const NAME: &str = "chat template"; // has no .html ending, so nothing is escaped

impl ChatTemplate {
    /// `special_tokens`: names (`bos_token`, ...) and texts, visible to the template as variables.
    pub fn new(source: &str, special_tokens: &[(&str, &str)]) -> Result<Self> {
        let source = in_jinja_alone(source);
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::None => Ok(out.write_str("None")?), // Python's spelling
            ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
            _ => minijinja::escape_formatter(out, state, value),
        });
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refused(message)))
        });
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        for (name, text) in special_tokens {
            environment.add_global(name.to_string(), *text);
        }
        environment.add_template_owned(NAME, source.clone()).map_err(describe)?;
        Ok(ChatTemplate { environment, source })
    }

    /// The template as text, for questions about which tokens it writes.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The conversation as one text. A template that refuses the messages (`raise_exception`) gives its words as the
    /// error.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        // as transformers passes them
        let mut variables = Map::from_iter([("tools".into(), Json::Null), ("documents".into(), Json::Null)]);
        variables.extend(options.variables.clone());
        variables.insert("messages".into(), serde_json::to_value(messages)?);
        variables.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        // A template that goes on and on, or doubles a text again and again, ends: what it may do is in proportion to
        // what it was given.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(FUEL + FUEL_PER_BYTE * serde_json::to_string(&variables)?.len() as u64));
        let template = environment.get_template(NAME).map_err(describe)?;
        template.render(Value::from(Serde(variables))).map_err(describe)
    }
}

/// The message of `raise_exception`, kept as the error's source so that it can be told from faults of the template
/// itself.
#[derive(Debug)]
struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

fn describe(error: Error) -> anyhow::Error {
    let mut cause: Option<&dyn std::error::Error> = Some(&error);
    while let Some(inner) = cause {
        if let Some(Refused(message)) = inner.downcast_ref() {
            return anyhow!("the chat template refuses these messages: {message}");
        }
        cause = inner.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return anyhow!("the chat template does not end for these messages: it takes more steps than {FUEL} and {FUEL_PER_BYTE} for each of their bytes");
    }
    anyhow!("{error}") // names the template and the line
}

/// `content` of a message: a string or a list of text parts.
fn content_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    use serde::de::Error;
    match Json::deserialize(deserializer)? {
        Json::String(text) => Ok(text),
        Json::Array(parts) => {
            let part_text = |(i, part): (usize, &Json)| match (part["type"].as_str(), part["text"].as_str()) {
                (Some("text"), Some(text)) => Ok(text.to_string()),
                _ => Err(D::Error::custom(format!(
                    "content part {i}: expected {{\"type\": \"text\", \"text\": ...}}, found {part}"
                ))),
            };
            Ok(parts.iter().enumerate().map(part_text).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        other => Err(D::Error::custom(format!("content: expected a string or a list of text parts, found {other}"))),
    }
}

/// Rewrites what is not Jinja but what Python's makes of it; the `-` and `+` signs of a tag keep their effect on the
/// white space around it. transformers marks assistant text with `{% generation %}` blocks: `if true` leaves the same
/// text. Kimi's template appends to a list of a namespace and pops from it, which values here cannot do: it gets a new
/// list instead.
fn in_jinja_alone(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text += before;
        let Some(end) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(2 + end + 2);
        let inside = &tag[2..2 + end];
        match inside.trim_matches(['-', '+']).trim() {
            name @ ("generation" | "endgeneration") => {
                text += "{%";
                text += &inside.replace(name, if name == "generation" { "if true" } else { "endif" });
                text += "%}";
            }
            plain => text += &without_list_methods(inside, plain).unwrap_or_else(|| tag.into()),
        }
        rest = after;
    }
    text + rest
}

/// `set x = ns.list.append(y)` and `set x = ns.list.pop(0)` as assignments; None for any other tag. `plain` is `inside`
/// without its signs.
fn without_list_methods(inside: &str, plain: &str) -> Option<String> {
    let (name, call) = plain.strip_prefix("set ")?.split_once('=')?;
    let call = call.trim();
    let (object, call) = call.split_at(call.find(".append(").or(call.find(".pop("))?);
    let is_path = object.contains('.') && object.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '.'));
    let (before, after) = (&inside[..inside.find("set ")?], &inside[inside.trim_end_matches(['-', '+']).len()..]);
    match call.strip_prefix(".append(").and_then(|rest| rest.strip_suffix(')')) {
        Some(item) if is_path => Some(format!("{{%{before}set {object} = {object} + [{item}] {after}%}}")),
        None if is_path && call == ".pop(0)" => {
            Some(format!("{{%{before}set {name} = {object}[0] %}}{{% set {object} = {object}[1:] {after}%}}"))
        }
        _ => None,
    }
}

/// Python's `datetime.now().strftime(format)`, local time.
fn strftime_now(format: String) -> Result<String, Error> {
    let refuse = |why: &str| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {why}"));
    if format.is_empty() {
        return Ok(format);
    }
    let c_format = std::ffi::CString::new(format.as_str()).map_err(|_| refuse("the format has a NUL character"))?;
    let mut buffer = [0u8; 512];
    // Safe: all pointers are to live locals, localtime_r fills `now`, strftime writes at most `buffer.len()` bytes.
    let written = unsafe {
        let seconds = libc::time(std::ptr::null_mut());
        let mut now: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&seconds, &mut now).is_null() {
            return Err(refuse("the clock has no local time"));
        }
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), c_format.as_ptr(), &now)
    };
    if written == 0 {
        return Err(refuse("longer than 511 bytes"));
    }
    Ok(String::from_utf8_lossy(&buffer[..written]).into_owned())
}

/// `tojson` as transformers overrides it: Python's `json.dumps`, nothing escaped for HTML, non-ASCII kept unless asked.
fn to_json(value: &Value, positional: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let invalid = |what: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    const MOST_INDENT: usize = 100;
    if positional.len() > 4 {
        return Err(invalid(format!("expected at most 4 arguments, found {}", positional.len())));
    }
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => options.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match argument(1, "indent")? {
        None => None,
        Some(indent) => {
            let count = || usize::try_from(indent.clone()).ok().filter(|n| *n <= MOST_INDENT).map(|n| " ".repeat(n));
            let text = indent.as_str().filter(|text| text.len() <= MOST_INDENT).map(str::to_string).or_else(count);
            Some(text.ok_or_else(|| {
                invalid(format!("indent {indent:.20}: expected a text or a number of spaces, up to {MOST_INDENT}"))
            })?)
        }
    };
    let separators = match argument(2, "separators")? {
        None => [if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()],
        Some(pair) => serde_json::to_value(&pair)
            .and_then(serde_json::from_value)
            .map_err(|_| invalid(format!("separators {pair} are no pair of strings")))?,
    };
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|v| v.is_true());
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(invalid("the value is undefined".into()));
    }
    let json = serde_json::to_value(value).map_err(|error| invalid(error.to_string()))?;
    let mut text = String::new();
    JsonStyle { ensure_ascii, indent, separators, sort_keys }.write(&json, 0, &mut text);
    Ok(text)
}

/// The options of Python's `json.dumps`.
struct JsonStyle {
    ensure_ascii: bool,
    indent: Option<String>,
    separators: [String; 2], // between items, after a key
    sort_keys: bool,
}

impl JsonStyle {
    fn write(&self, value: &Json, depth: usize, out: &mut String) {
        match value {
            Json::Array(items) => self.write_block(['[', ']'], items.iter().map(|item| (None, item)), depth, out),
            Json::Object(items) => {
                let mut items: Vec<(Option<&str>, &Json)> =
                    items.iter().map(|(key, item)| (Some(key.as_str()), item)).collect();
                if self.sort_keys {
                    items.sort_by_key(|(key, _)| *key);
                }
                self.write_block(['{', '}'], items.into_iter(), depth, out)
            }
            Json::String(text) => self.write_string(text, out),
            other => *out += &other.to_string(),
        }
    }

    fn write_block<'j>(
        &self,
        [open, close]: [char; 2],
        items: impl ExactSizeIterator<Item = (Option<&'j str>, &'j Json)>,
        depth: usize,
        out: &mut String,
    ) {
        let n_items = items.len();
        let new_line = |depth: usize, out: &mut String| {
            if let (Some(indent), true) = (&self.indent, n_items > 0) {
                out.push('\n');
                *out += &indent.repeat(depth);
            }
        };
        out.push(open);
        for (i, (key, item)) in items.enumerate() {
            if i > 0 {
                *out += &self.separators[0];
            }
            new_line(depth + 1, out);
            if let Some(key) = key {
                self.write_string(key, out);
                *out += &self.separators[1];
            }
            self.write(item, depth + 1, out);
        }
        new_line(depth, out);
        out.push(close);
    }

    fn write_string(&self, text: &str, out: &mut String) {
        for c in Json::from(text).to_string().chars() {
            if self.ensure_ascii && !matches!(c, ' '..='~') {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| *out += &format!("\\u{unit:04x}"));
            } else {
                out.push(c);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, variables: Json) -> Result<String> {
        let options = ChatOptions { add_generation_prompt: false, variables: variables.as_object().unwrap().clone() };
        ChatTemplate::new(source, &[("bos_token", "<s>")])?.render(&[Message::new("user", "hi")], &options)
    }

    fn check(source: &str, variables: Json, want: &str) {
        assert_eq!(render(source, variables).unwrap(), want, "{source}");
    }

    fn check_error(source: &str, want: &str) {
        let error = format!("{:#}", render(source, json!({})).unwrap_err());
        assert!(error.contains(want) && !error.contains('\n'), "{source}: {error}");
    }

    #[test]
    fn as_transformers_renders() {
        check("{{ bos_token }}{{ messages[0].content }}{{ messages[0]['role'] }}\n", json!({}), "<s>hiuser");
        check("a\n  {% if true %}\n  b\n  {% endif %}\nc\n\n", json!({}), "a\n  b\nc\n"); // trim_blocks, lstrip_blocks
        check("{{ x }} {{ not x }} {{ none }} {{ missing }}", json!({"x": true}), "True False None ");
        check("{{ tools is defined and tools is none }}", json!({}), "True");
        check("{{ '<b>' }}{{ x }}", json!({"x": "&"}), "<b>&"); // no escaping
        check("{{ ' a b '.strip().split(' ')[-1].startswith('b') }}", json!({}), "True");
        check(
            "{{ x.get('k', 'd') }}{% for k, v in x.items() %}{{ k }}{{ v }}{% endfor %}",
            json!({"x": {"z": 1, "a": 2}}),
            "dz1a2",
        );
        check("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", json!({}), "012");
        check(
            "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            json!({}),
            "1",
        );
    }

    #[test]
    fn generation_tags() {
        check("x\n{%- generation -%}\n y {%- endgeneration %}\nz", json!({}), "xyz");
        check("x\n  {% generation %}\ny\n  {% endgeneration %}\nz", json!({}), "x\ny\nz");
        check("{{ messages[0].content }}{# generation #} {% raw %}{% endraw %}", json!({}), "hi ");
        check_error("a {%}", "chat template:1");
        check_error("{% generation", "chat template:1"); // left as it is for minijinja to complain about
    }

    #[test]
    fn json_as_python_writes_it() {
        let x = json!({"x": {"b": [1, 2.5, "é<'\u{7f}\"\n"], "a": {}, "c": null, "d": true, "e": []}});
        check(
            "{{ x | tojson }}",
            x.clone(),
            "{\"b\": [1, 2.5, \"é<'\u{7f}\\\"\\n\"], \"a\": {}, \"c\": null, \"d\": true, \"e\": []}",
        );
        check(
            "{{ x.b | tojson(ensure_ascii=true, separators=(',', ':')) }}",
            x.clone(),
            "[1,2.5,\"\\u00e9<'\\u007f\\\"\\n\"]",
        );
        check(
            "{{ x | tojson(indent=2, sort_keys=true) }}",
            json!({"x": {"b": [1], "a": {}}}),
            "{\n  \"a\": {},\n  \"b\": [\n    1\n  ]\n}",
        );
        check("{{ '😀' | tojson(true) }}", json!({}), "\"\\ud83d\\ude00\"");
        check_error("{{ 1 | tojson(colour=1) }}", "colour");
        check_error("{{ [1] | tojson(indent=99999999) }}", "indent 99999999: expected");
        check_error("{{ 1 | tojson(indent='a', separators=1) }}", "separators 1");
    }

    #[test]
    fn dates() {
        let year: i32 = render("{{ strftime_now('%Y') }}", json!({})).unwrap().parse().unwrap();
        assert!(year >= 2025, "{year}");
        check("{{ strftime_now('') }}{{ strftime_now('100%%') }}", json!({}), "100%");
    }

    #[test]
    fn errors_name_the_cause() {
        check_error(
            "{{ raise_exception('roles must alternate') }}",
            "the chat template refuses these messages: roles must alternate",
        );
        check_error(
            "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}",
            "refuses these messages: deep",
        );
        check_error("a\n{{ missing.field }}", "chat template:2");
        check_error("a\n{% if %}", "chat template:2");
    }

    #[test]
    fn templates_end() {
        let loops = "{% for a in range(9999) %}".repeat(4) + &"{% endfor %}".repeat(4);
        check_error(&loops, "does not end");
        check_error(
            "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "does not end",
        );
        check_error("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion");
        // A megabyte in ten thousand messages goes through every published kind of loop.
        let template = "{% set ns = namespace(x=[]) %}{% for m in messages %}{% set x = ns.x.append(m) %}{% endfor %}{% for m in ns.x %}{{ m.content }}{% endfor %}";
        let messages = vec![Message::new("user", &"x".repeat(100)); 10_000];
        let text = ChatTemplate::new(template, &[]).unwrap().render(&messages, &ChatOptions::default()).unwrap();
        assert_eq!(text.len(), 1_000_000);
    }

    #[test]
    fn messages_from_json() {
        let parse = |text: &str| serde_json::from_str::<Message>(text);
        let parts = r#"{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}"#;
        assert_eq!(parse(parts).unwrap(), Message::new("user", "a\nb"));
        let extra = parse(r#"{"role": "assistant", "content": "x", "reasoning_content": "r"}"#).unwrap();
        assert_eq!(extra.extra["reasoning_content"], "r");
        for (text, want) in [
            (r#"{"role": "user", "content": [{"type": "image_url"}]}"#, "content part 0"),
            (r#"{"role": "user", "content": null}"#, "found null"),
            (r#"{"content": "a"}"#, "role"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(want), "{text}: {error}");
        }
    }
}
