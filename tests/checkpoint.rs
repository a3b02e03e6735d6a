//! Loading: damaged files, absent shards, tied heads, reads, rope tables, end tokens, strict configs, claims (cases O01
//! to O03, O05 to O07). Each case says what an error must name; the untouched model loads in the same test.
#[path = "support/drafter.rs"]
mod drafter;
mod support;

use anyhow::Result;
use proptest::prelude::*;
use serde_json::{json, Value};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use support::{
    join_safetensors, shard_name, split_safetensors, to_v5, write_json, write_safetensors, Head, TensorData, T0,
};
use tempfile::{tempdir, TempDir};
use volley::model::checkpoint::{self, Checkpoint, Dtype, Read, PIECE_BYTES};
use volley::model::claim::{claim, claim_mtp};
use volley::model::config::Config;
use volley::model::draft::DraftModel;
use volley::model::role::{Role, WeightId};
use volley::model::rope::RopeScaling;
use volley::model::table::Table;
use volley::model::weights::{Fuse, Slice, Split, Weights};

fn made(model: T0) -> TempDir {
    let dir = tempdir().unwrap();
    model.write(dir.path());
    dir
}

fn open(dir: &Path, read: Read) -> Result<(Config, Checkpoint, Weights)> {
    let config = Config::open(dir)?;
    let checkpoint = Checkpoint::open(dir, read)?;
    let weights = claim(&Table::builtin()?, &config, &checkpoint)?;
    Ok((config, checkpoint, weights))
}

/// The error of loading `dir`, in both ways of reading: one line, the same for both, with every word.
#[track_caller]
fn refused(dir: &Path, words: &[&str]) -> String {
    let errors = [Read::Mmap, Read::Plain].map(|read| match open(dir, read) {
        Ok(_) => panic!("expected an error with {words:?}, found a model that loads"),
        Err(error) => format!("{error:#}"),
    });
    assert_eq!(errors[0], errors[1]);
    has(&errors[0], words)
}

#[track_caller]
fn has(error: &str, words: &[&str]) -> String {
    for word in words {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
    assert!(!error.contains('\n'), "expected one line: {error}");
    error.into()
}

fn tiny(arch: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny").join(arch)
}

fn id(role: Role, layer: Option<usize>) -> WeightId {
    WeightId::of_target(role, layer)
}

// ---- O01: damaged files

const INCOMPLETE: &str = "the download is likely incomplete";

/// Loads three shards, then again with shard 2 changed by `damage` (header, data) -> file.
#[track_caller]
fn damaged(words: &[&str], damage: impl Fn(Value, Vec<u8>) -> Vec<u8>) -> String {
    let dir = made(T0::new().shards(3));
    open(dir.path(), Read::Mmap).expect("loads before the damage");
    let path = dir.path().join(shard_name(2, 3));
    let (header, data) = split_safetensors(&path);
    fs::write(&path, damage(header, data)).unwrap();
    let file = shard_name(2, 3);
    let mut all = vec![file.as_str()];
    all.extend_from_slice(words);
    refused(dir.path(), &all)
}

fn join(header: &Value, data: &[u8]) -> Vec<u8> {
    join_safetensors(&serde_json::to_vec(header).unwrap(), data)
}

#[test]
fn a_cut_file_says_how_much_is_there() {
    let whole = std::cell::Cell::new(0);
    let cut = |header: Value, data: Vec<u8>| {
        let file = join(&header, &data);
        whole.set(file.len());
        file[..file.len() - 4096].to_vec()
    };
    let error = damaged(&[INCOMPLETE], cut);
    has(&error, &[&format!("expected {} bytes, found {}", whole.get(), whole.get() - 4096)]);
    damaged(&[INCOMPLETE, "found 100"], |header, data| join(&header, &data)[..100].to_vec());
    damaged(&[INCOMPLETE, "expected at least 8 bytes, found 5"], |_, _| vec![1; 5]);
    damaged(&[INCOMPLETE, "expected at least 8 bytes, found 0"], |_, _| vec![]);
}

#[test]
fn appended_bytes_have_their_own_text() {
    let error = damaged(&["16 bytes were appended"], |header, data| [join(&header, &data), vec![0; 16]].concat());
    assert!(!error.contains(INCOMPLETE), "{error}");
}

#[test]
fn an_absurd_header_length_is_refused_without_allocating() {
    for len in [1u64 << 60, u64::MAX, u64::MAX - 7, 100_000_001] {
        let ((), largest) = largest_allocation(|| {
            damaged(&[INCOMPLETE, &len.to_string()], |header, data| {
                [&len.to_le_bytes(), &join(&header, &data)[8..]].concat()
            });
        });
        assert!(largest < 1 << 20, "{largest} bytes at once");
    }
}

#[test]
fn tensors_must_tile_the_file() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let end = |header: &Value| header[name]["data_offsets"][1].as_u64().unwrap();
    let start = |header: &Value| header[name]["data_offsets"][0].as_u64().unwrap();
    // Two tensors over the same bytes: the second keeps its size and starts earlier.
    damaged(&["overlaps", INCOMPLETE], |mut header, data| {
        header[name]["data_offsets"] = json!([start(&header) - 2, end(&header) - 2]);
        join(&header, &data)
    });
    damaged(&["leaves a gap", INCOMPLETE], |mut header, data| {
        header[name]["data_offsets"] = json!([start(&header) + 2, end(&header) + 2]);
        join(&header, &data)
    });
    damaged(&[name, "expected 16640 bytes for [128, 65] bf16, found 16384 bytes", INCOMPLETE], |mut header, data| {
        header[name]["shape"] = json!([128, 65]);
        join(&header, &data)
    });
    damaged(&[name, "expected 32768 bytes", "f32", "found 16384 bytes"], |mut header, data| {
        header[name]["dtype"] = json!("F32");
        join(&header, &data)
    });
    damaged(&[name, "impossible"], |mut header, data| {
        header[name]["shape"] = json!([1u64 << 40, 1u64 << 40]);
        join(&header, &data)
    });
    damaged(&[name, "impossible"], |mut header, data| {
        header[name]["data_offsets"] = json!([end(&header), start(&header)]);
        join(&header, &data)
    });
    damaged(&[name, "\"Q3_K\"", "BF16"], |mut header, data| {
        header[name]["dtype"] = json!("Q3_K");
        join(&header, &data)
    });
    damaged(&[name, "shape", "found fewer"], |mut header, data| {
        header[name].as_object_mut().unwrap().remove("shape");
        join(&header, &data)
    });
    damaged(&["header", "damaged"], |mut header, data| {
        header[name]["shape"] = json!([-64, 128]);
        join(&header, &data)
    });
    damaged(&["header", "damaged"], |_, data| join_safetensors(b"[1, 2", &data));
    damaged(&["expected tensor a once"], |_, _| {
        let entry = r#"{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}"#;
        join_safetensors(format!(r#"{{"a": {entry}, "a": {entry}}}"#).as_bytes(), &[])
    });
}

#[test]
fn a_file_of_another_kind_is_named() {
    damaged(&["Git LFS pointer", "git lfs pull"], |_, _| {
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n".to_vec()
    });
    damaged(&["not a safetensors file"], |_, _| b"<!DOCTYPE html><html>404</html>".to_vec());
    let dir = made(T0::new());
    let path = dir.path().join("model.safetensors");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    refused(dir.path(), &["model.safetensors", "not a regular file"]);
    fs::remove_dir(&path).unwrap();
    // Opening a pipe without a writer would wait for ever.
    let c_path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(c_path.as_ptr(), 0o600) }, 0);
    refused(dir.path(), &["model.safetensors", "not a regular file"]);
}

// ---- O02: absent shards

#[test]
fn one_line_lists_every_missing_shard() {
    let dir = made(T0::new().shards(3));
    let here = dir.path().to_str().unwrap().to_owned();
    fs::remove_file(dir.path().join(shard_name(3, 3))).unwrap();
    refused(dir.path(), &[&shard_name(3, 3), "absent", "looked in", &here, "1 cannot be found", INCOMPLETE]);

    // As in a half-finished hub cache: links to blobs, one of which never came.
    let link = dir.path().join(shard_name(1, 3));
    fs::rename(&link, dir.path().join("blob")).unwrap();
    std::os::unix::fs::symlink("blobs/0123", &link).unwrap();
    let both = [&shard_name(1, 3), "dangling link to blobs/0123", &shard_name(3, 3), "absent", "2 cannot be found"];
    let error = refused(dir.path(), &both.map(|word| word as &str));
    assert!(!error.contains(&shard_name(2, 3)), "the shard that is there is not listed: {error}");

    // The same link, whole.
    fs::remove_file(&link).unwrap();
    T0::new().shards(3).write(dir.path());
    fs::rename(&link, dir.path().join("blob")).unwrap();
    std::os::unix::fs::symlink("blob", &link).unwrap();
    open(dir.path(), Read::Mmap).unwrap();
}

#[test]
fn directories_without_our_files_say_what_they_hold() {
    let dir = made(T0::new());
    let model = dir.path().join("model.safetensors");
    fs::rename(&model, dir.path().join("pytorch_model.bin")).unwrap();
    refused(dir.path(), &["model.safetensors", "only PyTorch", "convert"]);
    fs::rename(dir.path().join("pytorch_model.bin"), dir.path().join("model.gguf")).unwrap();
    refused(dir.path(), &["only GGUF"]);
    fs::rename(dir.path().join("model.gguf"), dir.path().join(shard_name(1, 2))).unwrap();
    refused(dir.path(), &["without model.safetensors.index.json"]);
    fs::remove_file(dir.path().join(shard_name(1, 2))).unwrap();
    refused(dir.path(), &["no weights; download"]);
    std::os::unix::fs::symlink("../blobs/99", &model).unwrap();
    refused(dir.path(), &["dangling link to ../blobs/99"]);

    let error = Checkpoint::open(&dir.path().join("nowhere"), Read::Auto).err().unwrap();
    has(&format!("{error:#}"), &["nowhere", "expected a model directory", "nothing there"]);
    let error = Checkpoint::open(&dir.path().join("config.json"), Read::Auto).err().unwrap();
    has(&format!("{error:#}"), &["config.json", "found a file"]);
}

#[test]
fn index_and_headers_must_agree() {
    let dir = made(T0::new().shards(3));
    let path = dir.path().join("model.safetensors.index.json");
    let index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let with = |change: &dyn Fn(&mut Value), words: &[&str]| {
        let mut changed = index.clone();
        change(&mut changed["weight_map"]);
        write_json(&path, &changed);
        refused(dir.path(), words);
    };
    let (one, two) = (shard_name(1, 3), shard_name(2, 3));
    with(&|map| map["lm_head.weight"] = json!(two), &["lm_head.weight", &one, &two]);
    with(&|map| map["model.extra"] = json!(two), &["model.extra", &two, "found in no file"]);
    with(&|map| drop(map.as_object_mut().unwrap().remove("lm_head.weight")), &["does not name lm_head.weight", &one]);
    with(&|map| map["model.extra"] = json!("../model.safetensors"), &["names of files", "../model.safetensors"]);
    with(&|map| *map = json!({}), &["expected tensors in weight_map"]);
    with(&|map| *map = json!([]), &["model.safetensors.index.json", "JSON"]);

    // A tensor in two shards.
    write_json(&path, &index);
    open(dir.path(), Read::Mmap).unwrap();
    let tensors = T0::new().tensors();
    let shard: Vec<TensorData> = tensors.iter().take(2).cloned().collect();
    write_safetensors(&dir.path().join(&two), &shard);
    refused(dir.path(), &["expected tensor lm_head.weight once", &one, &two]);
}

// ---- O03: tied and untied heads

#[test]
fn a_tied_head_is_the_embedding() {
    let embed = |weights: &Weights| weights.get(id(Role::Embed, None)).parts[0].clone();
    let head = |weights: &Weights| weights.get(id(Role::Head, None)).clone();
    for read in [Read::Mmap, Read::Plain] {
        // a: tied, no head; b: tied, head present and equal.
        for own in [Head::Absent, Head::Equal] {
            let (config, _, weights) = open(made(T0::new().tied(true).head(own)).path(), read).unwrap();
            weights.load(&mut |_, _| ()).unwrap();
            assert!(config.tied && weights.notes.is_empty());
            assert_eq!(head(&weights).parts[0].name, "model.embed_tokens.weight");
            assert_eq!(head(&weights).parts[0].bytes().as_ptr(), embed(&weights).bytes().as_ptr());
            assert_eq!(
                (head(&weights).split, weights.get(id(Role::Embed, None)).split),
                (Split::Vocab, Split::Replicated)
            );
        }
        // b, with another head: the shared table, and one note.
        let (_, _, weights) = open(made(T0::new().tied(true).head(Head::Own)).path(), read).unwrap();
        assert_eq!(head(&weights).parts[0].name, "model.embed_tokens.weight");
        assert_eq!(weights.notes.len(), 1);
        has(&weights.notes[0], &["lm_head.weight", "model.safetensors", "differs", "tie_word_embeddings"]);
        // c: untied, head present.
        let (config, _, weights) = open(made(T0::new()).path(), read).unwrap();
        weights.load(&mut |_, _| ()).unwrap();
        assert!(!config.tied && weights.notes.is_empty());
        assert_eq!(head(&weights).parts[0].name, "lm_head.weight");
        assert_ne!(head(&weights).parts[0].bytes(), embed(&weights).bytes());
    }
    // d: untied by config, no head.
    let dir = made(T0::new().head(Head::Absent));
    let words =
        ["lm_head.weight", "[512, 64]", "no such tensor", "tie_word_embeddings = false", dir.path().to_str().unwrap()];
    refused(dir.path(), &words);
}

// ---- O05: reads

#[test]
fn plain_reads_are_large_sequential_and_only_of_what_is_used() {
    // Hidden 1024 makes shards of some 20 MB; the padding splits each layer's tensors in two.
    let padding = 3 << 20;
    let model = T0::new().shards(2).padding(padding).set("hidden_size", 1024).set("intermediate_size", 4096);
    let dir = made(model.clone());
    let (_, checkpoint, weights) = open(dir.path(), Read::Plain).unwrap();
    assert!(checkpoint.reads().is_empty(), "nothing is read before load: {:?}", checkpoint.reads());
    let mut seen = (0, 0);
    weights
        .load(&mut |done, total| {
            assert!(done > seen.0 && done <= total, "{done} of {total} after {seen:?}");
            seen = (done, total);
        })
        .unwrap();

    let used: usize =
        model.tensors().iter().filter(|tensor| tensor.dtype == "BF16").map(|tensor| tensor.bytes.len()).sum();
    let reads = checkpoint.reads();
    assert_eq!(reads.iter().map(|read| read.bytes).sum::<usize>(), used, "padding is not read");
    assert_eq!(seen, (used, used));
    assert!(reads.is_sorted_by_key(|read| (read.shard, read.offset)), "{reads:?}");
    // One gap per layer: at most 2 shards + 4 gaps runs, each cut in pieces; only the tail of a run may be short.
    let runs =
        reads.iter().zip(&reads[1..]).filter(|(a, b)| (a.shard, a.offset + a.bytes) != (b.shard, b.offset)).count() + 1;
    assert!(runs <= 6, "{runs} runs: {reads:?}");
    assert!(reads.iter().filter(|read| read.bytes < 1 << 20).count() <= runs, "{reads:?}");
    assert!(reads.iter().all(|read| read.bytes <= PIECE_BYTES));
    assert!(reads.len() <= runs + used / PIECE_BYTES, "{reads:?}");

    // What was read is what was written; a second load reads nothing.
    for tensor in model.tensors().iter().filter(|tensor| tensor.dtype == "BF16") {
        assert_eq!(checkpoint.get(&tensor.name).unwrap().bytes(), tensor.bytes, "{}", tensor.name);
    }
    weights.load(&mut |_, _| ()).unwrap();
    assert_eq!(checkpoint.reads().len(), reads.len());
    has(&checkpoint.to_string(), &["2 file(s)", "plain reads"]);
}

#[test]
fn mapped_and_plain_give_the_same_bytes() {
    let dir = made(T0::new().shards(3));
    let (_, mapped, mapped_weights) = open(dir.path(), Read::Mmap).unwrap();
    let (_, plain, plain_weights) = open(dir.path(), Read::Plain).unwrap();
    has(&mapped.to_string(), &["3 file(s)", "mapped"]);
    let (_, auto, _) = open(dir.path(), Read::Auto).unwrap();
    has(&auto.to_string(), &["mapped"]); // the temporary directory is on a local disk
    mapped_weights.load(&mut |_, _| ()).unwrap();
    plain_weights.load(&mut |_, _| ()).unwrap();
    for tensor in mapped.tensors() {
        let other = plain.get(&tensor.name).unwrap();
        assert!(tensor.bytes() == other.bytes() && tensor.equals(other).unwrap());
        let mut middle = vec![0; tensor.n_bytes() / 2];
        other.read_at(tensor.n_bytes() / 4, &mut middle).unwrap();
        assert_eq!(middle, tensor.bytes()[tensor.n_bytes() / 4..][..middle.len()]);
        // Four of each sixteen bytes, from the ninth on.
        let expected: Vec<u8> =
            tensor.bytes()[8..].chunks(16).filter(|run| run.len() >= 4).flat_map(|run| &run[..4]).copied().collect();
        for tensor in [tensor, other] {
            let mut runs = vec![0; expected.len()];
            tensor.read_rows(8, 16, 4, &mut runs).unwrap();
            assert!(runs == expected);
            has(
                &tensor.read_rows(tensor.n_bytes(), 16, 4, &mut runs).unwrap_err().to_string(),
                &[&tensor.name, "4 of each 16 bytes"],
            );
        }
        let error = tensor.read_at(1, &mut vec![0; tensor.n_bytes()]).unwrap_err();
        has(&error.to_string(), &[&tensor.name, "expected a range within"]);
    }
    assert!(!mapped.get("lm_head.weight").unwrap().equals(plain.get("model.embed_tokens.weight").unwrap()).unwrap());
}

#[test]
fn two_checkpoints_load_together() {
    // As a model and its drafter: equal names, files and places, other bytes.
    let models = [T0::new(), T0::new().seed(1)];
    for read in [Read::Mmap, Read::Plain] {
        let opened = models.clone().map(|model| Checkpoint::open(made(model).path(), read).unwrap());
        checkpoint::load(opened.iter().flat_map(|checkpoint| checkpoint.tensors()), &mut |_, _| ()).unwrap();
        for (model, checkpoint) in models.iter().zip(&opened) {
            for tensor in model.tensors() {
                assert_eq!(checkpoint.get(&tensor.name).unwrap().bytes(), tensor.bytes, "{}", tensor.name);
            }
        }
    }
}

#[test]
fn misaligned_tensors_are_made_usable() {
    let dir = made(T0::new());
    let path = dir.path().join("model.safetensors");
    let (header, data) = split_safetensors(&path);
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len() | 1, b' ');
    fs::write(&path, join_safetensors(&header, &data)).unwrap();
    for read in [Read::Mmap, Read::Plain] {
        let (_, checkpoint, weights) = open(dir.path(), read).unwrap();
        weights.load(&mut |_, _| ()).unwrap();
        for tensor in T0::new().tensors() {
            let bytes = checkpoint.get(&tensor.name).unwrap().bytes();
            assert_eq!((bytes, bytes.as_ptr() as usize % 2), (&tensor.bytes[..], 0), "{}", tensor.name);
        }
    }
}

#[test]
fn a_file_cut_after_opening_is_an_error_not_a_signal() {
    let dir = made(T0::new());
    for read in [Read::Mmap, Read::Plain] {
        T0::new().write(dir.path());
        let (_, checkpoint, weights) = open(dir.path(), read).unwrap();
        fs::File::options().write(true).open(dir.path().join("model.safetensors")).unwrap().set_len(4096).unwrap();
        let error = weights.load(&mut |_, _| ()).unwrap_err();
        has(&format!("{error:#}"), &["model.safetensors", "the file changed"]);
        let tensor = checkpoint.get("model.norm.weight").unwrap();
        assert!(tensor.read_at(0, &mut vec![0; tensor.n_bytes()]).is_err());
    }
}

// ---- O06: rope

#[test]
fn rope_tables_equal_those_of_an_independent_program() {
    let cases: Value = serde_json::from_str(include_str!("data/rope/frequencies.json")).unwrap();
    let cases = cases.as_array().unwrap();
    let mut kinds = std::collections::BTreeSet::new();
    for case in cases {
        let kind = case["kind"].as_str().unwrap();
        let dim = case["dim"].as_u64().unwrap() as usize;
        kinds.insert(kind);
        for spelling in ["rope_type", "type", "v5"] {
            let mut scaling = case["scaling"].clone();
            scaling[if spelling == "type" { "type" } else { "rope_type" }] = kind.into();
            let model = T0::new().set("rope_theta", case["theta"].clone()).rope(scaling);
            let model = if spelling == "v5" { model.v5() } else { model };
            let config = Config::parse(&model.config_json().to_string(), None).unwrap();
            let table = config.rope.inverse_frequencies(dim);
            let expected = case["frequencies"].as_array().unwrap();
            assert_eq!(table.len(), expected.len());
            for (i, (found, expected)) in table.iter().zip(expected).enumerate() {
                let expected = expected.as_f64().unwrap();
                assert!(
                    (f64::from(*found) / expected - 1.0).abs() < 1e-6,
                    "{kind} {i}: expected {expected}, found {found}"
                );
            }
            let factor = case["attention_factor"].as_f64().unwrap();
            assert!((f64::from(config.rope.attention_factor()) / factor - 1.0).abs() < 1e-6, "{kind}: {case}");
            let shown = config.rope.to_string();
            assert!(shown.starts_with(kind), "{shown}");
            if let Some(factor) = case["scaling"]["factor"].as_f64() {
                has(&shown, &[&format!("factor {factor}")]);
                // The tables tell scaled from plain.
                let plain = volley::model::rope::Rope { scaling: RopeScaling::Default, ..config.rope };
                assert_ne!(plain.inverse_frequencies(dim), table);
            }
        }
    }
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), ["default", "linear", "llama3", "yarn"]);
}

#[test]
fn unknown_rope_is_refused_by_name() {
    let refuse = |scaling: Value, words: &[&str]| refused_config(T0::new().rope(scaling), words);
    refuse(json!({"rope_type": "longrope", "factor": 2.0}), &["longrope", "llama3"]);
    refuse(json!({"type": "dynamic", "factor": 2.0}), &["dynamic", "yarn"]);
    refuse(json!({"type": "mrope", "mrope_section": [16, 24, 24]}), &["mrope"]);
    refuse(json!({"type": "linear", "rope_type": "yarn", "factor": 2.0}), &["linear", "yarn", "agree"]);
    refuse(json!({"factor": 2.0}), &["rope_scaling.factor"]);
    refuse(json!({"type": "linear"}), &["rope_scaling.factor", "found none"]);
    refuse(json!({"type": "linear", "factor": 0.5}), &["at least 1", "0.5"]);
    refuse(json!({"type": "linear", "factor": "2"}), &["rope_scaling.factor", "expected a number"]);
    refuse(json!({"type": "linear", "factor": 2.0, "short_factor": [1.0]}), &["rope_scaling.short_factor"]);
    refuse(
        json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
        &["low_freq_factor"],
    );
    refuse(
        json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        &["original_max_position_embeddings"],
    );
    refuse(json!({"type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 2.0}), &["beta_slow"]);
    refuse(json!("linear"), &["rope_scaling", "object"]);
    let nested = json!({"full_attention": {"rope_type": "default", "rope_theta": 1e4}});
    refused_config(T0::new().set("rope_parameters", nested), &["rope_parameters.full_attention"]);
    let other = json!({"rope_type": "default", "rope_theta": 5e5});
    refused_config(T0::new().set("rope_parameters", other), &["rope_theta", "10000", "500000"]);
}

// ---- O07: end tokens

#[test]
fn end_tokens_of_all_files_count_once_with_their_sources() {
    let eos = |model: T0| Config::open(made(model).path()).unwrap().eos;
    let (config, generation, both) =
        ("config.json", "generation_config.json", "config.json and generation_config.json");
    assert_eq!(eos(T0::new().eos(json!(7))), [(7, config)]);
    assert_eq!(eos(T0::new().eos(json!([7, 9]))), [(7, config), (9, config)]);
    assert_eq!(eos(T0::new().eos(json!(7)).generation("eos_token_id", json!([9, 7]))), [(7, both), (9, generation)]);
    assert_eq!(eos(T0::new().eos(json!([7, 7])).generation("eos_token_id", 7)), [(7, both)]);
    assert_eq!(eos(T0::new().eos(json!(null)).generation("eos_token_id", 8)), [(8, generation)]);
    assert_eq!(eos(T0::new().remove("eos_token_id")), []);
    // Sampling defaults are not ours to read, whatever they are.
    assert_eq!(eos(T0::new().eos(json!(7)).generation("temperature", 0.6).generation("novel", true)), [(7, config)]);

    refused_config(T0::new().eos(json!(512)), &["config.json: eos_token_id", "512"]);
    refused_config(T0::new().eos(json!([1, "x"])), &["eos_token_id", "\"x\""]);
    refused_config(T0::new().eos(json!(-1)), &["eos_token_id", "-1"]);
    let error = Config::open(made(T0::new().generation("eos_token_id", 600)).path()).unwrap_err();
    has(&format!("{error:#}"), &["generation_config.json: eos_token_id", "600", "512"]);

    let bos = |model: T0| Config::open(made(model).path()).unwrap().bos;
    assert_eq!(bos(T0::new().set("bos_token_id", 3)), Some(3));
    assert_eq!(bos(T0::new().remove("bos_token_id").generation("bos_token_id", 4)), Some(4));
    assert_eq!(bos(T0::new().set("bos_token_id", Value::Null)), None);
}

// ---- Config

#[track_caller]
fn refused_config(model: T0, words: &[&str]) {
    match Config::parse(&model.config_json().to_string(), None) {
        Ok(config) => panic!("expected an error with {words:?}, found {config:?}"),
        Err(error) => drop(has(&format!("{error:#}"), words)),
    }
}

/// After the published files of these models.
const CONFIGS: [&str; 7] = [
    include_str!("data/configs/llama-3.1-8b-instruct.json"),
    include_str!("data/configs/llama-3.2-1b.json"),
    include_str!("data/configs/mistral-7b-v0.3.json"),
    include_str!("data/configs/qwen2.5-0.5b.json"),
    include_str!("data/configs/qwen2.5-7b-instruct.json"),
    include_str!("data/configs/qwen3-8b.json"),
    include_str!("data/configs/smollm2-135m-instruct.json"),
];

#[test]
fn published_configs_load_in_both_dialects() {
    let mut facts = Vec::new();
    for text in CONFIGS {
        let hub = Config::parse(text, None).unwrap();
        let v5 = Config::parse(&to_v5(serde_json::from_str(text).unwrap()).to_string(), None).unwrap();
        assert_eq!(hub, v5);
        facts.push((
            hub.arch.clone(),
            hub.head_dim,
            hub.qkv_bias,
            hub.o_bias,
            hub.qk_norm,
            hub.tied,
            hub.eos.len(),
            hub.rope.to_string(),
        ));
    }
    let fact = |arch: &str, head_dim, qkv_bias, qk_norm, tied, n_eos, rope: &str| {
        (arch.to_string(), head_dim, qkv_bias, false, qk_norm, tied, n_eos, rope.to_string())
    };
    let expected = [
        fact("llama", 128, false, false, false, 3, "llama3, factor 8, original context 8192, theta 500000"),
        fact("llama", 64, false, false, true, 1, "llama3, factor 32, original context 8192, theta 500000"),
        fact("mistral", 128, false, false, false, 1, "default, theta 1000000"),
        fact("qwen2", 64, true, false, true, 1, "default, theta 1000000"),
        fact("qwen2", 128, true, false, false, 1, "default, theta 1000000"),
        fact("qwen3", 128, false, true, false, 1, "default, theta 1000000"),
        fact("llama", 64, false, false, true, 1, "default, theta 100000"),
    ];
    assert_eq!(facts, expected);
}

#[test]
fn what_changes_the_arithmetic_is_read_or_refused() {
    let refuse = |key: &str, value: Value, words: &[&str]| {
        let mut all = vec![key];
        all.extend_from_slice(words);
        refused_config(T0::new().set(key, value), &all);
    };
    refuse("hidden_act", json!("gelu_pytorch_tanh"), &["silu", "gelu_pytorch_tanh"]);
    refuse("quantization_config", json!({"quant_method": "awq"}), &["quantised"]);
    refuse("sliding_window", json!(128), &["full attention", "128"]);
    refuse(
        "layer_types",
        json!(["full_attention", "sliding_attention", "full_attention", "full_attention"]),
        &["sliding_attention"],
    );
    refuse("layer_types", json!(["full_attention"]), &["expected 4 entries, found 1"]);
    refuse("partial_rotary_factor", json!(0.5), &["0.5"]);
    refuse("rope_interleaved", json!(true), &[]);
    refuse("attn_logit_softcapping", json!(50.0), &[]);
    refuse("final_logit_softcapping", json!(30.0), &[]);
    refuse("attention_sinks", json!(4), &[]);
    refuse("num_local_experts", json!(8), &[]);
    refuse("residual_multiplier", json!(0.22), &[]);
    refuse("no_rope_layers", json!([1, 1, 1, 0]), &[]);
    refuse("clip_qkv", json!(8.0), &["may change the arithmetic"]);
    refuse("attention_bias", json!("yes"), &["true or false"]);
    refused_config(T0::new().arch("mistral").set("attention_bias", true), &["attention_bias"]);
    // The default of Mistral's config class is a window.
    let absent: Value = T0::new().arch("mistral").set("max_position_embeddings", 8192).config_json();
    assert!(Config::parse(&absent.to_string(), None).is_ok(), "null is no window");
    let Value::Object(mut absent) = absent else { unreachable!() };
    absent.shift_remove("sliding_window");
    let error = Config::parse(&Value::Object(absent).to_string(), None).unwrap_err();
    has(&format!("{error:#}"), &["sliding_window", "4096"]);
    // Qwen's windows need a flag.
    let qwen = |first: usize| {
        T0::new()
            .arch("qwen2")
            .set("sliding_window", 64)
            .set("use_sliding_window", true)
            .set("max_window_layers", first)
    };
    refused_config(qwen(2), &["sliding_window", "64"]);

    let accept = |model: T0| Config::parse(&model.config_json().to_string(), None).unwrap();
    accept(qwen(4)); // no layer is left for the window
    accept(T0::new().set("sliding_window", 256)); // a window as long as the context
    accept(
        T0::new()
            .set("clip_qkv", Value::Null)
            .set("_name_or_path", "x")
            .set("unsloth_version", "2026.1")
            .set("partial_rotary_factor", 1.0),
    );
    let biases = accept(T0::new().biases());
    assert!(biases.qkv_bias && biases.o_bias && biases.mlp_bias);
    let qwen2 = accept(T0::new().arch("qwen2"));
    assert!(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.mlp_bias);
}

#[test]
fn config_numbers_have_ranges() {
    let refuse = |key: &str, value: Value, words: &[&str]| {
        let mut all = vec![key];
        all.extend_from_slice(words);
        refused_config(T0::new().set(key, value), &all);
    };
    let counts = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ];
    for key in counts {
        for value in [json!(0), json!(-3), json!(1.5), json!(1u64 << 62), json!("64")] {
            refuse(key, value.clone(), &[&value.to_string(), "expected a number from 1"]);
        }
        if !["head_dim", "num_key_value_heads"].contains(&key) {
            refused_config(T0::new().remove(key), &[key, "found none"]);
        }
    }
    refuse("num_key_value_heads", json!(3), &["num_attention_heads", "multiple"]);
    refuse("head_dim", json!(15), &["even", "15"]);
    refused_config(T0::new().remove("head_dim").set("hidden_size", 66), &["hidden_size", "multiple", "66"]);
    for value in [json!(0.0), json!(-1e-5), json!(2.0), json!("1e-5")] {
        refuse("rms_norm_eps", value, &[]);
    }
    refused_config(T0::new().remove("rms_norm_eps"), &["rms_norm_eps", "found none"]);
    refuse("rope_theta", json!(0), &[]);
    refuse("rope_theta", json!(1.0), &["above 1"]);
    let config =
        Config::parse(&T0::new().remove("head_dim").remove("num_key_value_heads").config_json().to_string(), None)
            .unwrap();
    assert_eq!((config.head_dim, config.n_kv_heads), (16, 4));
}

#[test]
fn other_architectures_are_refused_by_name() {
    let with = |change: Value| {
        let mut config = T0::new().config_json();
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        Config::parse(&config.to_string(), None).map_err(|error| format!("{error:#}"))
    };
    has(
        &with(json!({"architectures": ["GPT2LMHeadModel"]})).unwrap_err(),
        &["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    );
    has(&with(json!({"architectures": null, "model_type": "gemma3"})).unwrap_err(), &["gemma3"]);
    has(&with(json!({"model_type": "phi3"})).unwrap_err(), &["model_type", "llama", "phi3"]);
    has(&with(json!({"architectures": null, "model_type": null})).unwrap_err(), &["neither"]);
    has(&with(json!({"architectures": ["A", "B"]})).unwrap_err(), &["architectures", "one name"]);
    assert_eq!(with(json!({"architectures": null})).unwrap().arch, "llama");
    for text in ["", "[]", "{", "null", "{\"hidden_size\": 1e999}"] {
        has(&format!("{:#}", Config::parse(text, None).unwrap_err()), &["config.json"]);
    }
    let dir = tempdir().unwrap();
    has(&format!("{:#}", Config::open(dir.path()).unwrap_err()), &["config.json", dir.path().to_str().unwrap()]);
}

// ---- Weights

#[test]
fn the_tiny_checkpoints_are_claimed_in_both_dialects() {
    for arch in ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"] {
        let dir = tiny(arch);
        let hub = Config::open(&dir).unwrap();
        let v5 = Config::parse(&fs::read_to_string(dir.join("config_v5.json")).unwrap(), None).unwrap();
        assert_eq!(hub, v5);
        let checkpoint = Checkpoint::open(&dir, Read::Auto).unwrap();
        let weights = claim(&Table::builtin().unwrap(), &hub, &checkpoint).unwrap();
        let claimed: std::collections::BTreeSet<&str> =
            weights.iter().flat_map(|(_, weight)| &weight.parts).map(|part| part.name.as_str()).collect();
        assert_eq!(claimed.into_iter().collect::<Vec<_>>(), checkpoint.names().collect::<Vec<_>>(), "{arch}");
        if hub.latent.is_some() {
            assert!(weights.find(id(Role::Qkv, Some(1))).is_none());
            continue;
        }
        let qkv = weights.get(id(Role::Qkv, Some(1)));
        let (q, kv) = (hub.n_heads * hub.head_dim, hub.n_kv_heads * hub.head_dim);
        assert_eq!((qkv.rows.as_slice(), qkv.cols, qkv.dtype()), ([q, kv, kv].as_slice(), hub.hidden, Dtype::Bf16));
        assert_eq!(qkv.parts[1].name, "model.layers.1.self_attn.k_proj.weight");
        let gate_up = if hub.has_experts(0) { Role::ExpertGateUp } else { Role::GateUp };
        assert_eq!(weights.get(id(gate_up, Some(0))).fuse, Fuse::Interleave);
        assert_eq!(weights.find(id(Role::QkvBias, Some(0))).is_some(), arch == "qwen2");
        assert_eq!(weights.find(id(Role::KNorm, Some(0))).is_some(), arch.starts_with("qwen3"));
        assert!(weights.find(id(Role::Qkv, Some(hub.n_layers))).is_none());
    }
}

#[test]
fn every_row_of_the_table_is_used() {
    let models = [
        T0::new().biases(),
        T0::new().arch("mistral"),
        T0::new().arch("qwen2").dtype("F16"),
        T0::new().arch("qwen3").set("attention_bias", true).dtype("F32"),
        T0::new().padding(8).tied(true),
    ];
    let mut used: std::collections::BTreeSet<(String, String)> = models
        .into_iter()
        .flat_map(|model| {
            let (config, _, weights) = open(made(model).path(), Read::Mmap).unwrap();
            weights.iter().map(|(id, _)| (config.arch.clone(), id.role.to_string())).collect::<Vec<_>>()
        })
        .collect();
    let (config, _, target) = open(made(T0::new()).path(), Read::Mmap).unwrap();
    for per_feature in [false, true] {
        let mut d0 = drafter::D0::new();
        d0.random("embed_tokens.weight", &[512, 64]);
        if per_feature {
            d0.set("fc_norm", true);
            for i in 0..3 {
                d0.random(&format!("fc_norm.{i}.weight"), &[64]);
            }
        } else {
            d0.set("norm_before_fc", true)
                .set("attention_bias", true)
                .set("model_type", "qwen3")
                .random("input_norm.weight", &[192]);
            for (head, rows) in [("q", 64), ("k", 32), ("v", 32)] {
                d0.random(&format!("midlayer.self_attn.{head}_proj.bias"), &[rows]);
            }
            d0.random("midlayer.self_attn.q_norm.weight", &[16]).random("midlayer.self_attn.k_norm.weight", &[16]);
        }
        let dir = tempdir().unwrap();
        d0.write(dir.path());
        let drafter = DraftModel::open(dir.path(), &config, &target, Some(512), Read::Mmap).unwrap();
        used.extend(drafter.weights.iter().map(|(id, _)| ("eagle3".to_string(), id.role.to_string())));
    }
    let drafts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/draft");
    let (config, _, target) = open(&drafts.join("target"), Read::Mmap).unwrap();
    let latent = DraftModel::open(&drafts.join("latent"), &config, &target, None, Read::Mmap).unwrap();
    used.extend(latent.weights.iter().map(|(id, _)| ("eagle3".to_string(), id.role.to_string())));
    for name in ["qwen3_moe", "deepseek_v3", "kimi_k25_int4"] {
        let (config, _, weights) = open(&tiny(name), Read::Mmap).unwrap();
        used.extend(weights.iter().map(|(id, _)| (config.arch.clone(), id.role.to_string())));
    }
    // Qwen3-MoE without experts in any layer is Qwen3; Kimi-K2 is DeepSeek-V3 by another name.
    let with = |dir: &Path, change: &dyn Fn(&mut Value)| {
        let mut config: Value = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
        change(&mut config);
        let config = Config::parse(&config.to_string(), None).unwrap();
        let weights = claim(&Table::builtin().unwrap(), &config, &Checkpoint::open(dir, Read::Mmap).unwrap()).unwrap();
        weights.iter().map(|(id, _)| (config.arch.clone(), id.role.to_string())).collect::<Vec<_>>()
    };
    used.extend(with(made(T0::new().arch("qwen3")).path(), &|config| {
        let experts = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "mlp_only_layers": [0, 1, 2, 3],
        });
        config.as_object_mut().unwrap().extend(experts.as_object().unwrap().clone());
    }));
    used.extend(with(&tiny("deepseek_v3"), &|config| config["model_type"] = json!("kimi_k2")));
    let (config, checkpoint, _) = open(&tiny("dsv3_mtp"), Read::Mmap).unwrap();
    let mtp = claim_mtp(&Table::builtin().unwrap(), &config, &checkpoint).unwrap();
    used.extend(mtp.iter().map(|(id, _)| (config.arch.clone(), id.role.to_string())));
    let table: toml::Table = toml::from_str(include_str!("../weights.toml")).unwrap();
    for (arch, section) in &table {
        for scope in ["model", "layer", "mtp"] {
            for role in section.get(scope).and_then(|scope| scope.as_table()).into_iter().flat_map(|table| table.keys())
            {
                assert!(
                    used.contains(&(arch.clone(), role.clone())),
                    "{arch}.{scope}.{role} is claimed by no test model"
                );
            }
        }
        assert!(used.iter().any(|(used, _)| used == arch), "{arch}");
    }
    assert_eq!(id(Role::GateUpBias, Some(3)).to_string(), "layers.3.gate_up_bias");
    assert_eq!(id(Role::FinalNorm, None).to_string(), "final_norm");
}

/// Writes T0 with its tensors changed.
fn with_tensors(change: impl Fn(&mut Vec<TensorData>)) -> TempDir {
    let dir = made(T0::new());
    let mut tensors = T0::new().tensors();
    change(&mut tensors);
    write_safetensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

#[test]
fn claims_name_tensor_expected_found_and_file() {
    let name = "model.layers.3.self_attn.k_proj.weight";
    let at = |tensors: &Vec<TensorData>| tensors.iter().position(|tensor| tensor.name == name).unwrap();
    open(with_tensors(|_| ()).path(), Read::Mmap).unwrap();

    let dir = with_tensors(|tensors| drop(tensors.remove(at(tensors))));
    refused(dir.path(), &[name, "expected [32, 64] bf16", "found no such tensor in", dir.path().to_str().unwrap()]);
    let dir = with_tensors(|tensors| {
        let i = at(tensors);
        tensors[i].shape = vec![64, 32];
    });
    refused(
        dir.path(),
        &[&format!("{name}: expected [32, 64] bf16, f16 or f32, found [64, 32] bf16 in model.safetensors")],
    );
    let dir = with_tensors(|tensors| {
        let i = at(tensors);
        tensors[i].dtype = "I16";
    });
    refused(dir.path(), &[name, "found [32, 64] i16 in model.safetensors"]);
    let dir = with_tensors(|tensors| {
        let i = at(tensors);
        tensors[i].dtype = "F16";
    });
    refused(dir.path(), &[name, "expected bf16 as model.layers.3.self_attn.q_proj.weight", "f16"]);
    let dir = with_tensors(|tensors| {
        let i = at(tensors);
        tensors[i].name = name.replace("k_proj", "key");
    });
    refused(
        dir.path(),
        &[name, "model.layers.3.self_attn.key.weight: expected no such tensor", "[32, 64] bf16 in model.safetensors"],
    );

    // A layer too many, a bias that the config does not know, a layer that is not there: no more than five named.
    let dir = made(T0::new().set("num_hidden_layers", 5));
    write_json(&dir.path().join("config.json"), &T0::new().config_json());
    let error = refused(dir.path(), &["model.layers.4.", "4 layers", "; and 4 more"]);
    assert_eq!(error.matches("expected no such tensor").count(), 5, "{error}");
    let dir = made(T0::new().biases());
    write_json(&dir.path().join("config.json"), &T0::new().config_json());
    refused(dir.path(), &["model.layers.0.mlp.down_proj.bias", "; and 23 more"]);
    let dir = made(T0::new());
    write_json(&dir.path().join("config.json"), &T0::new().biases().config_json());
    refused(dir.path(), &["model.layers.0.self_attn.o_proj.bias: expected [64]"]);
    write_json(&dir.path().join("config.json"), &T0::new().set("num_hidden_layers", 4096).config_json());
    refused(dir.path(), &["model.layers.4.", "; and 36823 more"]);

    // The ignored name is a pattern, not a prefix.
    let spare = |name: &'static str| {
        with_tensors(|tensors| {
            tensors.insert(0, TensorData { name: name.into(), dtype: "F32", shape: vec![1], bytes: vec![0; 4] })
        })
    };
    open(spare("model.layers.3.self_attn.rotary_emb.inv_freq").path(), Read::Mmap).unwrap();
    for name in [
        "model.layers.x.self_attn.rotary_emb.inv_freq",
        "model.layers..self_attn.rotary_emb.inv_freq",
        "model.layers.3.self_attn.rotary_emb.inv_freq2",
    ] {
        refused(spare(name).path(), &[name]);
    }
}

/// With 12 query heads of 8: n_kv_heads, ranks that work.
#[test]
fn ranks_divide_every_weight() {
    for (n_kv_heads, works) in [
        (12, vec![1, 2, 3, 4, 6]),
        (4, vec![1, 2, 4]),
        (3, vec![1, 3, 6]),
        (2, vec![1, 2, 4, 6]),
        (1, vec![1, 2, 3, 4, 6]),
    ] {
        let model =
            T0::new().biases().set("num_attention_heads", 12).set("num_key_value_heads", n_kv_heads).set("head_dim", 8);
        let model = model
            .set("hidden_size", 96)
            .set("intermediate_size", 840)
            .set("vocab_size", 840)
            .set("num_hidden_layers", 1);
        let model = model.eos(json!(1)).set("bos_token_id", 0);
        let (config, _, weights) = open(made(model).path(), Read::Mmap).unwrap();
        for ranks in 1..=8 {
            let qkv = weights.get(id(Role::Qkv, Some(0)));
            if !works.contains(&ranks) {
                let list = works.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ");
                let error = qkv.part_of_rank(0, ranks).unwrap_err();
                has(
                    &format!("{error:#}"),
                    &["q_proj", "expected a number of ranks that divides", &list, &format!("found {ranks}")],
                );
                continue;
            }
            let slices = |role, rank| {
                weights
                    .get(id(role, (role != Role::Head && role != Role::Embed).then_some(0)))
                    .part_of_rank(rank, ranks)
                    .unwrap()
            };
            for rank in 0..ranks {
                let qkv = slices(Role::Qkv, rank);
                // Query rows tile; each query head finds its own KV head on its rank, and no other is there.
                let n = 96 / ranks;
                assert_eq!(qkv[0], Slice { rows: rank * n..(rank + 1) * n, cols: 0..96 });
                let kv_head = |q_head: usize| q_head / (config.n_heads / config.n_kv_heads);
                let (first, last) = (qkv[0].rows.start / 8, qkv[0].rows.end / 8 - 1);
                assert_eq!(
                    qkv[1].rows,
                    kv_head(first) * 8..(kv_head(last) + 1) * 8,
                    "{n_kv_heads} KV heads, rank {rank} of {ranks}"
                );
                assert_eq!(qkv[1], qkv[2]);
                let bias = slices(Role::QkvBias, rank);
                assert_eq!(
                    bias.iter().map(|slice| slice.rows.clone()).collect::<Vec<_>>(),
                    qkv.iter().map(|slice| slice.rows.clone()).collect::<Vec<_>>()
                );
                assert_eq!(slices(Role::O, rank), [Slice { rows: 0..96, cols: qkv[0].rows.clone() }]);
                let f = 840 / ranks;
                let gate_up = Slice { rows: rank * f..(rank + 1) * f, cols: 0..96 };
                assert_eq!(slices(Role::GateUp, rank), [gate_up.clone(), gate_up]);
                assert_eq!(slices(Role::Down, rank), [Slice { rows: 0..96, cols: rank * f..(rank + 1) * f }]);
                // Whole tiles of 16 tokens: the last rank has fewer.
                let tokens = [840, 432, 288, 224, 0, 144][ranks - 1];
                assert_eq!(
                    slices(Role::Head, rank),
                    [Slice { rows: rank * tokens..840.min((rank + 1) * tokens), cols: 0..96 }]
                );
                assert_eq!(slices(Role::Embed, rank), [Slice { rows: 0..840, cols: 0..96 }]);
                assert_eq!(slices(Role::OBias, rank), [Slice { rows: 0..96, cols: 0..1 }]);
            }
            assert!(weights.get(id(Role::Qkv, Some(0))).part_of_rank(ranks, ranks).is_err());
        }
        assert!(weights.get(id(Role::Qkv, Some(0))).part_of_rank(0, 0).is_err());
        // A head is never cut: 96 columns divide by 8 ranks, 12 heads do not.
        assert!(weights.get(id(Role::O, Some(0))).part_of_rank(0, 8).is_err());
    }
}

#[test]
fn a_table_of_the_users_own() {
    let builtin = include_str!("../weights.toml");
    let dir = with_tensors(|tensors| {
        tensors.iter_mut().for_each(|tensor| tensor.name = tensor.name.replace("model.", "gpt."))
    });
    let path = dir.path().join("mine.toml");
    fs::write(&path, builtin.replace("model.layers", "gpt.layers").replace("\"model.", "\"gpt.")).unwrap();
    let (config, checkpoint) = (Config::open(dir.path()).unwrap(), Checkpoint::open(dir.path(), Read::Auto).unwrap());
    claim(&Table::open(&path).unwrap(), &config, &checkpoint).unwrap();
    refused(dir.path(), &["model.embed_tokens.weight", "no such tensor"]);

    let refuse = |from: &str, to: &str, words: &[&str]| {
        assert!(builtin.contains(from), "{from}");
        match Table::parse(&builtin.replacen(from, to, 1)) {
            Ok(_) => panic!("expected an error with {words:?}"),
            Err(error) => drop(has(&format!("{error:#}"), words)),
        }
    };
    refuse("final_norm =", "final_nrom =", &["llama.final_nrom", "expected a role of", "final_norm"]);
    refuse("rows = [\"vocab\"]", "rows = [\"vocabulary\"]", &["llama.embed", "vocabulary"]);
    refuse("rows = [\"vocab\"]", "rows = []", &["llama.embed", "rows: expected 1", "found 0"]);
    refuse("cols = \"hidden\"", "columns = \"hidden\"", &["columns"]);
    refuse("cols = \"n_heads * head_dim\", ", "", &["llama.o", "columns to split", "vector"]);
    refuse("\"model.norm.weight\"", "\"model.norm.{}.weight\"", &["llama.final_norm", "expected 0 {}"]);
    refuse("{}.input_layernorm", "0.input_layernorm", &["llama.attn_norm", "expected 1 {}"]);
    refuse("when = \"untied\"", "when = \"united\"", &["llama.head", "untied", "united"]);
    refuse("split = \"columns\"", "split = \"cols\"", &["cols"]);
    refuse("like = \"llama\"", "like = \"qwen3\"", &["mistral", "like", "qwen3"]);
    refuse("[llama]", "[llama", &["TOML"]);
    let without = builtin.replace("[mistral]\nlike = \"llama\"\n", "");
    let error = claim(&Table::parse(&without).unwrap(), &Config { arch: "mistral".into(), ..config }, &checkpoint)
        .err()
        .unwrap();
    has(&format!("{error:#}"), &["mistral", "llama, qwen2, qwen3"]);
}

// ---- The fixture itself

#[test]
fn the_fixture_is_what_it_says() {
    let dir = made(T0::new().adds_bos(true));
    let (config, checkpoint, _) = open(dir.path(), Read::Mmap).unwrap();
    assert_eq!((config.hidden, config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim), (64, 4, 4, 2, 16));
    assert_eq!((config.ffn_dim, config.vocab, config.context), (128, 512, 256));
    assert!(checkpoint.tensors().map(|tensor| tensor.n_bytes()).sum::<usize>() < 1 << 20);
    let tokenizer = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.get_vocab_size(true), 512);
    let text = "<|im_start|>user\nthe cat  sat, naïve 你好 🙂\u{1}<|im_end|>";
    let encoding = tokenizer.encode(text, false).unwrap();
    assert_eq!(encoding.get_ids()[0], support::IM_START);
    assert_eq!(encoding.get_ids().last(), Some(&support::IM_END));
    assert_eq!(tokenizer.decode(encoding.get_ids(), false).unwrap(), text);
    assert!(encoding.len() < text.len(), "some merges apply");
    assert_eq!(tokenizer.encode("a", true).unwrap().get_ids()[0], support::BOS);
    // Values depend on the name and the seed alone.
    let norm = |model: T0| model.tensors().into_iter().find(|tensor| tensor.name == "model.norm.weight").unwrap().bytes;
    assert_eq!(norm(T0::new()), norm(T0::new().tied(true).shards(3).biases()));
    assert_ne!(norm(T0::new()), norm(T0::new().seed(1)));
}

// ---- Fuzzing: whatever the bytes are, an answer and no large allocation

struct Counting;

thread_local!(static LARGEST: Cell<usize> = const { Cell::new(0) });

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.with(|largest| largest.set(largest.get().max(layout.size())));
        System.alloc(layout)
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.with(|largest| largest.set(largest.get().max(layout.size())));
        System.alloc_zeroed(layout)
    }
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.with(|largest| largest.set(largest.get().max(size)));
        System.realloc(old, layout, size)
    }
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        System.dealloc(old, layout)
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result, and the largest allocation that this thread made for it.
fn largest_allocation<T>(f: impl FnOnce() -> T) -> (T, usize) {
    LARGEST.with(|largest| largest.set(0));
    let result = f();
    (result, LARGEST.with(Cell::get))
}

/// A small valid file: header and data.
fn small() -> (String, Vec<u8>) {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"U8","shape":[0,7],"data_offsets":[32,32]}}"#;
    (header.into(), (0..32).collect())
}

/// Opens the bytes as model.safetensors: no panic, nothing allocated beyond a small multiple of the file, every tensor
/// readable.
fn open_bytes(bytes: &[u8]) -> Result<Checkpoint> {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let (result, largest) = largest_allocation(|| Checkpoint::open(dir.path(), Read::Plain));
    // The JSON reader keeps a shape's "0," of two bytes as a number of eight, in a vector that doubles.
    assert!(largest <= 16 * bytes.len() + 4096, "{largest} bytes at once for a file of {}", bytes.len());
    if let Ok(checkpoint) = &result {
        let (loaded, largest) = largest_allocation(|| checkpoint::load(checkpoint.tensors(), &mut |_, _| ()));
        loaded.unwrap();
        assert!(largest <= 16 * bytes.len() + 4096, "{largest} bytes at once for a file of {}", bytes.len());
        assert_eq!(
            checkpoint.tensors().map(|tensor| tensor.bytes().len()).sum::<usize>(),
            checkpoint.tensors().map(|tensor| tensor.n_bytes()).sum::<usize>()
        );
    }
    result
}

/// What the format's own library says of the same bytes.
fn open_by_the_book(bytes: &[u8]) -> bool {
    safetensors::SafeTensors::deserialize(bytes).is_ok()
}

/// Replaces some bytes of a text by others that JSON is sensitive to.
fn mutations() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    let byte = prop_oneof![prop::sample::select(br#"0123456789{}[]",:-+.eE ab"#.to_vec()), any::<u8>()];
    prop::collection::vec((any::<prop::sample::Index>(), byte), 1..4)
}

fn mutate(text: &str, mutations: &[(prop::sample::Index, u8)]) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    for (at, byte) in mutations {
        let at = at.index(bytes.len());
        bytes[at] = *byte;
    }
    bytes
}

#[test]
fn the_small_file_is_valid() {
    let (header, data) = small();
    let bytes = join_safetensors(header.as_bytes(), &data);
    assert!(open_by_the_book(&bytes));
    let checkpoint = open_bytes(&bytes).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(checkpoint.get("b").unwrap().bytes(), &data[24..]);
    assert!(open_bytes(&bytes[..bytes.len() - 1]).is_err() && !open_by_the_book(&bytes[..bytes.len() - 1]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn damaged_headers_never_panic_and_are_judged_as_by_the_book(mutations in mutations()) {
        let (header, data) = small();
        let bytes = join_safetensors(&mutate(&header, &mutations), &data);
        let ours = open_bytes(&bytes);
        // We may refuse more (types we have no use for, a name twice), never less.
        prop_assert!(ours.is_err() || open_by_the_book(&bytes), "{}", String::from_utf8_lossy(&bytes[8..]));
    }

    #[test]
    fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), len in 0u64..300) {
        let _ = open_bytes(&bytes);
        let _ = open_bytes(&[&len.to_le_bytes(), bytes.as_slice()].concat());
    }

    #[test]
    fn sizes_that_overflow_never_panic(shape in prop::collection::vec(any::<u64>(), 0..4), begin in any::<u64>(), end in any::<u64>()) {
        for (begin, end) in [(begin, end), (0, end % 64), (begin % 64, u64::MAX)] {
            let header = json!({"a": {"dtype": "F64", "shape": shape, "data_offsets": [begin, end]}});
            let _ = open_bytes(&join_safetensors(header.to_string().as_bytes(), &[0; 32]));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn damaged_indexes_never_panic(mutations in mutations()) {
        let dir = tempdir().unwrap();
        let (header, data) = small();
        fs::write(dir.path().join("x"), join_safetensors(header.as_bytes(), &data)).unwrap();
        let index = br#"{"metadata":{"total_size":32},"weight_map":{"a":"x","b":"x","c":"x"}}"#;
        let index = std::str::from_utf8(index).unwrap();
        fs::write(dir.path().join("model.safetensors.index.json"), mutate(index, &mutations)).unwrap();
        let (_, largest) = largest_allocation(|| Checkpoint::open(dir.path(), Read::Plain).map(drop));
        prop_assert!(largest < 1 << 16, "{largest} bytes at once");
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        prop_assert!(Checkpoint::open(dir.path(), Read::Plain).is_ok());
    }

    #[test]
    fn damaged_configs_never_panic(which in 0..CONFIGS.len(), mutations in mutations()) {
        if let Ok(text) = String::from_utf8(mutate(CONFIGS[which], &mutations)) {
            if let Ok(config) = Config::parse(&text, Some(&text)) {
                let table = config.rope.inverse_frequencies(config.head_dim);
                prop_assert!(table.iter().all(|f| f.is_finite()) && config.rope.attention_factor().is_finite());
            }
        }
    }

    #[test]
    fn damaged_tables_never_panic(mutations in mutations()) {
        if let Ok(text) = String::from_utf8(mutate(include_str!("../weights.toml"), &mutations)) {
            let _ = Table::parse(&text);
        }
    }
}
