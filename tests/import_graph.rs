//! The house's plan: files of src know each other without circles, its modules only as ALLOWED says, and no file or
//! function is longer than a room.
//!
//! `cargo test --test import_graph -- --nocapture` prints the graph of modules. It reads the sources: every path that
//! starts at the crate's root or with `super::`, and every `use` of a child, counts as an edge to the file of the
//! deepest module in it; comments and test modules are excluded.
use regex::Regex;
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

/// Most lines of a file of src or kernels, and of a function of src.
const FILE_LINES: usize = 600;
const FUNCTION_LINES: usize = 120;
/// One thing each, and longer.
const LONG_FILES: [&str; 2] = ["src/model/checkpoint.rs", "src/cli.rs"];

// What is still being divided: entries go as they are done, none comes.
const FILES_TO_DIVIDE: &[&str] = &[
    "src/cpu/reference.rs",
    "src/gpu/machine.rs",
    "src/gpu/weights.rs",
    "kernels/shim/cuda_cpu.h",
    "kernels/shim/test_sample.cpp",
];
const FUNCTIONS_TO_DIVIDE: &[&str] = &["parse", "decoder_layer", "fmt", "build", "rows"];
const CIRCLES_TO_CUT: &[&str] =
    &["model/plan/drafter.rs", "model/plan/layer.rs", "model/plan/target.rs", "gpu/lower/draft.rs"];

type Graph = BTreeMap<String, BTreeSet<String>>;

#[test]
fn modules_know_only_what_the_layout_allows() {
    let graph = modules(&file_graph(&sources()));
    for (from, to) in &graph {
        println!("{from} -> {}", to.iter().cloned().collect::<Vec<_>>().join(", "));
    }
    assert!(graph["cpu"].contains("model"), "no edge from cpu to model was found: the reader of sources is broken");
    assert_eq!(forbidden(&graph), Vec::<String>::new());
    assert_eq!(circle(&graph), None);
}

#[test]
fn files_know_each_other_without_circles() {
    let mut graph = file_graph(&sources());
    assert!(graph["decode/engine.rs"].contains("decode/policy.rs"), "the reader of sources is broken");
    for file in CIRCLES_TO_CUT {
        graph.remove(*file);
    }
    assert_eq!(circle(&graph), None);
}

#[test]
fn forbidden_edges_and_circles_are_noticed() {
    let file = |path: &str, text: &str| (PathBuf::from(path), text.to_string());
    let graph = file_graph(&[
        file("cpu/reference.rs", "use std::fmt;\nuse crate::decode::Engine;"),
        file("model/plan.rs", "use crate::{gpu::{self, machine::Machine}, text::{a, b}};"),
        file("decode/mod.rs", "pub use engine::{Engine, Answer};\n/// crate::text is only named\nmod engine;"),
        file("decode/engine.rs", "use super::sample;\nlet x = crate::cpu::reference::Reference::new();"),
        file("decode/sample.rs", "use super::Engine;\n#[cfg(test)]\nmod tests {\n    use crate::error::line;\n}"),
        file("decode/policy.rs", "use super::sample::{Sampling};"),
        file("gpu/mod.rs", ""),
        file("gpu/machine.rs", ""),
        file("text/mod.rs", "use super::error::machine;"),
        file("error.rs", ""),
    ]);
    let to = |from: &str| graph[from].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(to("model/plan.rs"), ["gpu/machine.rs", "gpu/mod.rs", "text/mod.rs"]);
    assert_eq!(to("decode/policy.rs"), ["decode/sample.rs"]);
    let between = modules(&graph);
    assert_eq!(forbidden(&between), ["decode -> cpu", "model -> gpu", "model -> text", "text -> error"]);
    assert_eq!(circle(&between), Some(vec!["cpu".into(), "decode".into(), "cpu".into()]));
    // Inside a folder: by way of what mod.rs hands on.
    let inside: Graph = graph.into_iter().filter(|(from, _)| from != "cpu/reference.rs").collect();
    let found = circle(&inside).expect("engine, sample, mod");
    assert_eq!(found, ["decode/engine.rs", "decode/sample.rs", "decode/mod.rs", "decode/engine.rs"]);
}

#[test]
fn files_and_functions_are_rooms() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = texts(&root.join("src"), &["rs"]);
    files.extend(texts(&root.join("kernels"), &["cu", "cuh", "h", "cpp"]));
    let files: Vec<(String, String)> = files
        .into_iter()
        .map(|(path, text)| (path.strip_prefix(root).unwrap().to_string_lossy().into_owned(), text))
        .collect();
    let may = |path: &str| LONG_FILES.contains(&path) || FILES_TO_DIVIDE.contains(&path);
    let long: Vec<String> = long_files(&files).into_iter().filter(|path| !may(path)).collect();
    assert!(long.is_empty(), "over {FILE_LINES} lines: {long:?}");
    let long = long_functions(&files);
    let long: Vec<&(String, String, usize)> =
        long.iter().filter(|(_, name, _)| !FUNCTIONS_TO_DIVIDE.contains(&name.as_str())).collect();
    assert!(long.is_empty(), "over {FUNCTION_LINES} lines: {long:?}");
}

#[test]
fn long_files_and_functions_are_noticed() {
    let function = |lines: usize| format!("    pub(super) fn f<T>(\n{}    }}\n", "        g();\n".repeat(lines - 2));
    let text = format!("impl A {{\n{}{}    fn one() {{}}\n}}\n", function(121), function(120));
    let files = [("src/a.rs".to_string(), text), ("src/b.rs".to_string(), "\n".repeat(600))];
    assert_eq!(long_functions(&files), [("src/a.rs".to_string(), "f".to_string(), 121)]);
    assert_eq!(long_files(&files), Vec::<String>::new());
    assert_eq!(long_files(&[("kernels/c.cu".to_string(), "\n".repeat(601))]), ["kernels/c.cu"]);
}

fn long_files(files: &[(String, String)]) -> Vec<String> {
    files.iter().filter(|(_, text)| text.lines().count() > FILE_LINES).map(|(path, _)| path.clone()).collect()
}

/// File, name and lines of functions that are too long. rustfmt puts the end where the beginning stands.
fn long_functions(files: &[(String, String)]) -> Vec<(String, String, usize)> {
    let head = Regex::new(r#"^( *)(?:pub(?:\(\w+\))? )?(?:(?:const|unsafe|extern "C") )*fn (\w+)"#).unwrap();
    let mut long = Vec::new();
    for (path, text) in files.iter().filter(|(path, _)| path.ends_with(".rs")) {
        let lines: Vec<&str> = text.lines().collect();
        for (start, line) in lines.iter().enumerate() {
            let Some(found) = head.captures(line).filter(|_| !line.ends_with(['}', ';'])) else { continue };
            let end = format!("{}}}", &found[1]);
            let length = lines[start..].iter().take_while(|line| **line != end).count() + 1;
            if length > FUNCTION_LINES {
                long.push((path.clone(), found[2].to_string(), length));
            }
        }
    }
    long
}

/// Files with these endings below a folder, and what they say.
fn texts(root: &Path, endings: &[&str]) -> Vec<(PathBuf, String)> {
    let (mut folders, mut files) = (vec![root.to_path_buf()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| endings.iter().any(|ending| e == *ending)) {
                let text = std::fs::read_to_string(&path).unwrap();
                files.push((path, text));
            }
        }
    }
    files
}

/// All of src: (path below src, text).
fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let below = |(path, text): (PathBuf, String)| (path.strip_prefix(&root).unwrap().to_path_buf(), text);
    texts(&root, &["rs"]).into_iter().map(below).collect()
}

/// The module that a file is: `a/mod.rs` is a, `a/b.rs` a::b.
fn module(path: &Path) -> Vec<String> {
    let mut parts: Vec<String> = path.with_extension("").iter().map(|p| p.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod") {
        parts.pop();
    }
    parts
}

/// Edges between files; lib.rs, which only lists modules, is none.
fn file_graph(sources: &[(PathBuf, String)]) -> Graph {
    let sources: Vec<_> = sources.iter().filter(|(path, _)| path != Path::new("lib.rs")).collect();
    let name = |path: &Path| path.to_string_lossy().into_owned();
    let files: BTreeMap<Vec<String>, String> = sources.iter().map(|(path, _)| (module(path), name(path))).collect();
    let above = Regex::new(r"(?:^|[^\w:])(crate|volley|self|super(?:::super)*)::").unwrap();
    let child = Regex::new(r"\buse (\w+)::").unwrap();
    let mut graph = Graph::new();
    for (path, text) in sources {
        let (own, code) = (module(path), code(text));
        let mut named: Vec<Vec<String>> = Vec::new();
        for found in above.captures_iter(&code) {
            let base = match &found[1] {
                "crate" | "volley" => Vec::new(),
                "self" => own.clone(),
                supers => own[..own.len().saturating_sub(supers.split("::").count())].to_vec(),
            };
            let rest = &code[found.get(0).unwrap().end()..];
            named.extend(paths(rest).into_iter().map(|path| [base.clone(), path].concat()));
        }
        for found in child.captures_iter(&code) {
            let at = found.get(1).unwrap();
            if files.contains_key(&[own.clone(), vec![at.as_str().to_string()]].concat()) {
                named.extend(paths(&code[at.start()..]).into_iter().map(|path| [own.clone(), path].concat()));
            }
        }
        // The deepest module of a path, if there is one.
        let file_of = |path: &Vec<String>| (1..=path.len()).rev().find_map(|n| files.get(&path[..n]));
        let to = named.iter().filter_map(file_of).filter(|to| **to != name(path)).cloned();
        graph.insert(name(path), to.collect());
    }
    graph
}

/// Without comments and the tests at the end.
fn code(text: &str) -> String {
    let code: String = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
    let tests = Regex::new(r"#\[cfg\(test\)\]\s*mod \w+ \{").unwrap();
    let end = tests.find(&code).map_or(code.len(), |found| found.start());
    code[..end].to_string()
}

/// The paths that a text begins with: `a::{b, c::d}` gives a::b and a::c::d.
fn paths(text: &str) -> Vec<Vec<String>> {
    let text = text.trim_start();
    if let Some(group) = text.strip_prefix('{') {
        return members(group).into_iter().flat_map(paths).collect();
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let tails = rest.strip_prefix("::").map_or(vec![Vec::new()], paths);
    tails.into_iter().map(|tail| [vec![name.to_string()], tail].concat()).collect()
}

/// What stands between commas, up to the end of the group.
fn members(group: &str) -> Vec<&str> {
    let (mut all, mut depth, mut start) = (Vec::new(), 0, 0);
    for (i, c) in group.char_indices() {
        if depth == 0 && (c == ',' || c == '}') {
            all.push(&group[start..i]);
            start = i + 1;
        }
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    all
}

/// Edges between the top modules: text/stream.rs belongs to `text`, cli.rs to `cli`.
fn modules(files: &Graph) -> Graph {
    let top = |file: &str| module(Path::new(file)).swap_remove(0);
    let mut graph = Graph::new();
    for (from, to) in files {
        let to = to.iter().map(|to| top(to)).filter(|to| *to != top(from));
        graph.entry(top(from)).or_default().extend(to);
    }
    graph
}

fn forbidden(graph: &Graph) -> Vec<String> {
    let allowed = |from: &str, to: &str| ALLOWED.iter().any(|(name, list)| *name == from && list.contains(&to));
    let edges = graph.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    edges.filter(|(from, to)| !allowed(from, to)).map(|(from, to)| format!("{from} -> {to}")).collect()
}

/// Some circle, its first node again at the end.
fn circle(graph: &Graph) -> Option<Vec<String>> {
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
