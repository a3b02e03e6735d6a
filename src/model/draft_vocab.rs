//! Which tokens a drafter with the whole vocabulary may draft, from a file that says how frequent they are. Its head is
//! most of what a draft reads: with 32,768 of Kimi-K2.5's 163,840 rows it is a fifth. The idea is FR-Spec's (arXiv
//! 2502.14856).
use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Most tokens that are kept.
pub const MOST: usize = 32768;

/// The ids that `path` names as the `MOST` most frequent, ascending; of equals the lowest. JSON: `{"id": count}`, or a
/// list of ids, the most frequent first.
pub fn read(path: &Path, vocab: usize) -> Result<Vec<u32>> {
    let read = || -> Result<Vec<u32>> {
        let text = std::fs::read_to_string(path).context("expected a file of token frequencies")?;
        parse(&text, vocab)
    };
    read().with_context(|| format!("--draft-vocab {}", path.display()))
}

/// The same of a file's text.
pub fn parse(text: &str, vocab: usize) -> Result<Vec<u32>> {
    const FORMS: &str = "expected JSON, {\"id\": count} or a list of ids, the most frequent first";
    let json: Value = serde_json::from_str(text).context(FORMS)?;
    let id = |id: Option<u64>, shown: &dyn std::fmt::Display| match id {
        Some(id) if id < vocab as u64 => Ok(id as u32),
        _ => bail!("expected ids from 0 to {} of the model's vocabulary, found {shown}", vocab - 1),
    };
    let falling: Vec<u32> = match json {
        Value::Array(ids) => ids.iter().map(|value| id(value.as_u64(), value)).collect::<Result<_>>()?,
        Value::Object(counts) => {
            let mut counted = Vec::new();
            for (key, count) in &counts {
                let Some(count) = count.as_u64() else {
                    bail!("expected how often id {key} was counted, found {count}")
                };
                counted.push((std::cmp::Reverse(count), id(key.parse().ok(), key)?));
            }
            counted.sort();
            counted.into_iter().map(|(_, id)| id).collect()
        }
        other => bail!("{FORMS}; found {other}"),
    };
    let mut kept = BTreeSet::new();
    for id in falling {
        ensure!(kept.len() == MOST || kept.insert(id), "expected each id once, found {id} again");
    }
    ensure!(!kept.is_empty(), "expected at least one id, found none");
    Ok(kept.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::{parse, MOST};

    #[test]
    fn the_most_frequent_ids_ascend() {
        assert_eq!(parse("[7, 3, 5]", 8).unwrap(), [3, 5, 7]);
        assert_eq!(parse(r#"{"7": 1, "3": 9, "5": 0}"#, 8).unwrap(), [3, 5, 7]);
        // Rare ones go; of equals the higher ids.
        let vocab = MOST + 10;
        let counts: Vec<String> = (0..vocab).map(|id| format!("\"{id}\": {}", if id < 5 { 1 } else { 7 })).collect();
        let kept = parse(&format!("{{{}}}", counts.join(", ")), vocab).unwrap();
        assert_eq!(kept, (5..MOST as u32 + 5).collect::<Vec<u32>>());
        let falling: Vec<String> = (0..vocab).rev().map(|id| id.to_string()).collect();
        assert_eq!(
            parse(&format!("[{}]", falling.join(",")), vocab).unwrap(),
            (10..vocab as u32).collect::<Vec<u32>>()
        );
    }

    #[test]
    fn others_are_refused_by_name() {
        for (text, words) in [
            ("", "expected JSON"),
            ("3", "found 3"),
            ("[]", "found none"),
            ("[1, 8]", "ids from 0 to 7 of the model's vocabulary, found 8"),
            ("[1, -1]", "found -1"),
            ("[1, 2, 1]", "found 1 again"),
            (r#"{"1": 2.5}"#, "how often id 1 was counted, found 2.5"),
            (r#"{"x": 2}"#, "found x"),
        ] {
            let error = format!("{:#}", parse(text, 8).unwrap_err());
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
