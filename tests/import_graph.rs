//! The modules of src know each other only as ALLOWED says, without cycles.
//!
//! `cargo test --test import_graph -- --nocapture` prints the graph. It reads the sources: every path that starts at
//! the crate's root (`crate::`, enough `super::`, `volley::` in main.rs) counts as an edge, comments excluded.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Who may know whom. A module that is not named knows nobody; one absent from every list is known by nobody.
const ALLOWED: &[(&str, &[&str])] = &[
    ("main", &["cli", "cmd", "error", "text"]),
    ("cli", &["cmd", "completions", "error"]),
    ("cmd", &["cpu", "decode", "error", "gpu", "model", "text"]),
    ("cpu", &["decode", "model"]),
    ("gpu", &["decode", "error", "model"]),
    ("decode", &[]),
    ("model", &[]),
    ("text", &[]),
    ("error", &[]),
];

type Graph = BTreeMap<String, BTreeSet<String>>;

#[test]
fn modules_know_only_what_the_layout_allows() {
    let graph = module_graph(&sources());
    for (from, to) in &graph {
        println!("{from} -> {}", to.iter().cloned().collect::<Vec<_>>().join(", "));
    }
    assert!(graph["cpu"].contains("model"), "no edge from cpu to model was found: the reader of sources is broken");
    assert_eq!(forbidden(&graph), Vec::<String>::new());
    assert_eq!(cycle(&graph), None);
}

#[test]
fn a_forbidden_edge_and_a_cycle_are_noticed() {
    let file = |path: &str, text: &str| (PathBuf::from(path), text.to_string());
    let graph = module_graph(&[
        file("cpu/reference.rs", "use std::fmt;\nuse crate::decode::Engine;"),
        file("model/plan.rs", "use crate::{gpu::Machine, text::{a, b}};"),
        file(
            "decode/engine.rs",
            "// crate::text is only named\nuse super::sample;\nlet x = crate::cpu::Reference::new();",
        ),
        file("text/mod.rs", "use super::error::machine;"),
    ]);
    assert_eq!(forbidden(&graph), ["decode -> cpu", "model -> gpu", "model -> text", "text -> error"]);
    assert_eq!(cycle(&graph), Some(vec!["cpu".into(), "decode".into(), "cpu".into()]));
}

/// All of src: (path below src, text).
fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut folders, mut files) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push((path.strip_prefix(&root).unwrap().to_path_buf(), std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files
}

/// Edges between the top modules: src/text/stream.rs belongs to `text`, src/cli.rs to `cli`. lib.rs only lists them.
fn module_graph(sources: &[(PathBuf, String)]) -> Graph {
    let mut graph = Graph::new();
    for (path, text) in sources.iter().filter(|(path, _)| path != Path::new("lib.rs")) {
        let parts: Vec<String> = path.with_extension("").iter().map(|p| p.to_string_lossy().into_owned()).collect();
        // `super::` leads to the crate's root from a file of the root and from X/mod.rs; a test module's own `super::`
        // names no module.
        let root = if parts.len() == 1 || parts[1] == "mod" { "super::" } else { "super::super::" };
        let prefixes: &[&str] = if parts[0] == "main" { &["volley::", "crate::"] } else { &["crate::", root] };
        let known: BTreeSet<String> = ALLOWED.iter().map(|(name, _)| name.to_string()).collect();
        let to = graph.entry(parts[0].clone()).or_default();
        to.extend(named(text, prefixes).into_iter().filter(|name| known.contains(name) && *name != parts[0]));
    }
    graph
}

/// The names that follow one of the prefixes: `crate::a::b` gives a, `crate::{a::b, c}` gives a and c.
fn named(text: &str, prefixes: &[&str]) -> BTreeSet<String> {
    let code: String = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
    let mut names = BTreeSet::new();
    for prefix in prefixes {
        for (at, _) in code.match_indices(prefix) {
            // `my_crate::` and `super::super::` are other paths than `crate::` and `super::`.
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let rest = &code[at + prefix.len()..];
            let ident =
                |s: &str| s.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("").to_string();
            match rest.strip_prefix('{') {
                None => drop(names.insert(ident(rest))),
                Some(group) => {
                    let (mut depth, mut start) = (0, 0);
                    for (i, c) in group.char_indices() {
                        if depth == 0 && (c == ',' || c == '}') {
                            names.insert(ident(&group[start..i]));
                            start = i + 1;
                        }
                        match c {
                            '{' => depth += 1,
                            '}' if depth == 0 => break,
                            '}' => depth -= 1,
                            _ => {}
                        }
                    }
                }
            }
        }
    }
    names
}

fn forbidden(graph: &Graph) -> Vec<String> {
    let allowed = |from: &str, to: &str| ALLOWED.iter().any(|(name, list)| *name == from && list.contains(&to));
    let edges = graph.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    edges.filter(|(from, to)| !allowed(from, to)).map(|(from, to)| format!("{from} -> {to}")).collect()
}

/// Some cycle, its first node again at the end.
fn cycle(graph: &Graph) -> Option<Vec<String>> {
    fn visit(node: &String, graph: &Graph, path: &mut Vec<String>, done: &mut BTreeSet<String>) -> Option<Vec<String>> {
        if let Some(start) = path.iter().position(|n| n == node) {
            return Some([&path[start..], std::slice::from_ref(node)].concat());
        }
        if done.contains(node) {
            return None;
        }
        path.push(node.clone());
        let found = graph.get(node).into_iter().flatten().find_map(|next| visit(next, graph, path, done));
        path.pop();
        done.insert(node.clone());
        found
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|node| visit(node, graph, &mut Vec::new(), &mut done))
}
