//! The safetensors files of a model directory, validated before use, then mapped or read in large pieces.
//! It knows bytes, shapes and dtypes, not what a tensor is for: weights.rs gives names their meaning.
//! File format: 8 bytes of header length (little endian), a JSON header, then the bytes of the tensors without gaps
//! (github.com/huggingface/safetensors).
use anyhow::{bail, Context, Result};
use memmap2::{Advice, Mmap};
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::marker::PhantomData;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

/// One read request covers at most this many bytes: large enough for any storage, small enough to show progress.
pub const PIECE_BYTES: usize = 16 << 20;

/// All tensors of a directory, by name.
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Arc<Shard>>,
    tensors: BTreeMap<String, Tensor>,
    log: Arc<Mutex<Vec<ReadCall>>>,
}

/// A named array in a file, or rows of one in memory (`Tensor::select`). Clones share the bytes.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    /// As in the file, outermost first: [rows, cols] of a matrix that maps cols inputs to rows outputs.
    pub shape: Vec<usize>,
    /// Name of the file within the directory.
    pub file: String,
    shard: Arc<Shard>,
    start: usize, // from the start of the file, bytes
    len: usize,   // bytes
    loaded: Arc<OnceLock<Loaded>>,
    /// `loaded` is all there is: no place in a file.
    selected: bool,
}

/// How bytes reach memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    Mmap,
    Plain,
    /// `Plain` for files on a network file system, where a page fault costs a round trip; `Mmap` elsewhere.
    Auto,
}

/// Element types by their safetensors names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

/// One request for tensor bytes: a read call, or a range of a mapping brought into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadCall {
    /// Index of the file in name order.
    pub shard: usize,
    /// From the start of the file, bytes.
    pub offset: usize,
    pub bytes: usize,
}

impl Checkpoint {
    /// Opens model.safetensors, or the files that model.safetensors.index.json names, and validates every header.
    /// Reads no tensor. Errors name the file, what was expected, what was found.
    pub fn open(dir: &Path, read: Read) -> Result<Checkpoint> {
        let (files, index) = find_files(dir)?;
        let log = Arc::new(Mutex::new(Vec::new()));
        let mut shards = Vec::new();
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        for file in files {
            let path = dir.join(&file);
            let (shard, entries) = open_shard(&path, shards.len(), read, log.clone())?;
            let shard = Arc::new(shard);
            for entry in entries {
                let tensor = Tensor {
                    name: entry.name.clone(),
                    dtype: entry.dtype,
                    shape: entry.shape,
                    file: file.clone(),
                    shard: shard.clone(),
                    start: entry.start,
                    len: entry.len,
                    loaded: Arc::default(),
                    selected: false,
                };
                if let Some(earlier) = tensors.insert(entry.name, tensor) {
                    bail!(
                        "{}: expected tensor {} once, found it in {} and in {file}",
                        dir.display(),
                        earlier.name,
                        earlier.file
                    );
                }
            }
            shards.push(shard);
        }
        if let Some(index) = index {
            compare_with_index(dir, &index, &tensors)?;
        }
        Ok(Checkpoint { dir: dir.to_owned(), shards, tensors, log })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Every request for tensor bytes so far, in order; headers are not counted.
    pub fn reads(&self) -> Vec<ReadCall> {
        self.log.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

/// For `-v`: files, bytes and how they are read.
impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mapped = self.shards.iter().filter(|shard| shard.map.is_some()).count();
        let bytes: usize = self.shards.iter().map(|shard| shard.len).sum();
        let how = match mapped {
            0 => "plain reads".to_string(),
            n if n == self.shards.len() => "mapped".to_string(),
            n => format!("{n} mapped, the others by plain reads"),
        };
        write!(
            f,
            "{} tensors in {} file(s), {:.1} MB, {how}",
            self.tensors.len(),
            self.shards.len(),
            bytes as f64 / 1e6
        )
    }
}

impl Tensor {
    /// The bytes, aligned for the dtype: in place when mapped, else as `load` read them.
    /// Panics on a tensor that `load` has not seen and that cannot be used in place.
    pub fn bytes(&self) -> &[u8] {
        if let Some(loaded) = self.loaded.get() {
            return &bytemuck::cast_slice(&loaded.buffer)[loaded.start..loaded.start + self.len];
        }
        match &self.shard.map {
            Some(map) if self.is_aligned() => &map[self.start..self.start + self.len],
            _ => panic!("{} used before checkpoint::load", self.name),
        }
    }

    pub fn n_bytes(&self) -> usize {
        self.len
    }

    /// Copies bytes `offset..offset + out.len()` of the tensor, by plain reads of up to `PIECE_BYTES`. This is how a
    /// rank fetches its own rows without holding the others; it works the same whether or not the file is mapped.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        match offset.checked_add(out.len()) {
            Some(end) if end <= self.len && self.selected => {
                out.copy_from_slice(&self.bytes()[offset..end]);
                Ok(())
            }
            Some(end) if end <= self.len => self.shard.read(self.start + offset, out, &mut |_| ()),
            _ => bail!(
                "{}: expected a range within {} bytes, found {} bytes at {offset}",
                self.name,
                self.len,
                out.len()
            ),
        }
    }

    /// These rows of a matrix, in this order, as a tensor of its own in memory; they are read now.
    pub fn select(&self, rows: &[u32]) -> Result<Tensor> {
        let [n, columns] = self.shape[..] else { bail!("{}: expected a matrix, found {self}", self.name) };
        if let Some(row) = rows.iter().find(|row| **row as usize >= n) {
            bail!("{}: expected rows below {n}, found {row}", self.name);
        }
        let row_bytes = columns * self.dtype.bytes();
        let len = rows.len() * row_bytes;
        let mut buffer = vec![0u128; len.div_ceil(ALIGN)];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
        for (row, out) in rows.iter().zip(bytes[..len].chunks_exact_mut(row_bytes.max(1))) {
            self.read_at(*row as usize * row_bytes, out)?;
        }
        let name = format!("{} ({} rows of it)", self.name, rows.len());
        let loaded = Arc::new(OnceLock::from(Loaded { buffer: Arc::new(buffer), start: 0 }));
        Ok(Tensor { name, shape: vec![rows.len(), columns], start: 0, len, loaded, selected: true, ..self.clone() })
    }

    /// Copies runs of `row_bytes` bytes that lie `stride` bytes apart, from byte `offset` of the tensor on, until `out`
    /// is full: a rank's columns. One read in the log, of the bytes that were copied; where little lies between runs it
    /// is read as well, and dropped.
    pub fn read_rows(&self, offset: usize, stride: usize, row_bytes: usize, out: &mut [u8]) -> Result<()> {
        let rows = out.len() / row_bytes.max(1);
        let end =
            rows.checked_sub(1).and_then(|n| n.checked_mul(stride)).and_then(|n| n.checked_add(offset + row_bytes));
        match end {
            Some(end) if end <= self.len && row_bytes <= stride && rows * row_bytes == out.len() => {
                if !self.selected {
                    return self.shard.read_rows(self.start + offset, stride, row_bytes, out);
                }
                let runs = self.bytes()[offset..].chunks(stride);
                out.chunks_exact_mut(row_bytes).zip(runs).for_each(|(out, run)| out.copy_from_slice(&run[..row_bytes]));
                Ok(())
            }
            _ => bail!(
                "{}: expected {row_bytes} of each {stride} bytes within {}, found {} in all",
                self.name,
                self.len,
                out.len()
            ),
        }
    }

    /// Asks the system to have the bytes of such runs in its cache soon: a disk is as fast as it can be only with many
    /// requests at a time. A hint, and no read of the log. The system's own guesses at what comes next end for this
    /// file: between a rank's rows they would be those of other ranks.
    pub fn advise_rows(&self, offset: usize, stride: usize, row_bytes: usize, rows: usize) {
        if !self.selected {
            self.shard.advise_rows(self.start + offset, stride, row_bytes, rows);
        }
    }

    /// Whether both are one tensor of one file.
    pub fn is(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.shard, &other.shard) && self.name == other.name
    }

    /// Whether both hold the same dtype, shape and bytes. Reads both, a piece at a time.
    pub fn equals(&self, other: &Tensor) -> Result<bool> {
        if (self.dtype, &self.shape) != (other.dtype, &other.shape) {
            return Ok(false);
        }
        let mut ours = vec![0; self.len.min(PIECE_BYTES)];
        let mut theirs = ours.clone();
        for offset in (0..self.len).step_by(PIECE_BYTES) {
            let n = PIECE_BYTES.min(self.len - offset);
            self.read_at(offset, &mut ours[..n])?;
            other.read_at(offset, &mut theirs[..n])?;
            if ours[..n] != theirs[..n] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_aligned(&self) -> bool {
        self.start % self.dtype.bytes() == 0
    }
}

/// For errors: `[4096, 4096] bf16`.
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:?} {}", self.shape, self.dtype)
    }
}

impl Dtype {
    /// Size of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::Bool | Dtype::U8 | Dtype::I8 | Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::F8E8M0 => 1,
            Dtype::U16 | Dtype::I16 | Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 4,
            Dtype::U64 | Dtype::I64 | Dtype::F64 => 8,
        }
    }

    fn from_name(name: &str) -> Option<Dtype> {
        DTYPES.iter().find(|(_, n)| *n == name).map(|(dtype, _)| *dtype)
    }
}

/// Lower case, as we print types everywhere.
impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (_, name) = DTYPES.iter().find(|(dtype, _)| dtype == self).expect("DTYPES lists every dtype");
        f.write_str(&name.to_lowercase())
    }
}

const DTYPES: [(Dtype, &str); 16] = [
    (Dtype::Bool, "BOOL"),
    (Dtype::U8, "U8"),
    (Dtype::I8, "I8"),
    (Dtype::F8E4M3, "F8_E4M3"),
    (Dtype::F8E5M2, "F8_E5M2"),
    (Dtype::F8E8M0, "F8_E8M0"),
    (Dtype::U16, "U16"),
    (Dtype::I16, "I16"),
    (Dtype::F16, "F16"),
    (Dtype::Bf16, "BF16"),
    (Dtype::U32, "U32"),
    (Dtype::I32, "I32"),
    (Dtype::F32, "F32"),
    (Dtype::U64, "U64"),
    (Dtype::I64, "I64"),
    (Dtype::F64, "F64"),
];

/// Makes `bytes` of the given tensors ready, and of no others: plain files are read, mapped ones are brought into
/// memory ahead of use. Neighbours in a file are fetched together, in file order. `progress` gets (bytes done, bytes in
/// all) after each piece.
pub fn load<'a>(tensors: impl IntoIterator<Item = &'a Tensor>, progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
    let mut wanted: Vec<&Tensor> = tensors.into_iter().filter(|tensor| tensor.loaded.get().is_none()).collect();
    // By file (pointers, as a drafter's checkpoint has a shard 0 too), then by place; clones come to lie side by side.
    let place = |tensor: &&Tensor| {
        (tensor.shard.index, Arc::as_ptr(&tensor.shard), tensor.start, tensor.len, Arc::as_ptr(&tensor.loaded))
    };
    wanted.sort_by_key(place);
    wanted.dedup_by_key(|tensor| Arc::as_ptr(&tensor.loaded));
    let total = wanted.iter().map(|tensor| tensor.len).sum();
    let mut done = 0;
    let mut advance = |bytes| {
        done += bytes;
        progress(done, total);
    };
    let adjacent = |a: &&Tensor, b: &&Tensor| {
        Arc::ptr_eq(&a.shard, &b.shard) && a.start + a.len == b.start && a.is_aligned() && b.is_aligned()
    };
    for run in wanted.chunk_by(adjacent) {
        let (first, last) = (run[0], run[run.len() - 1]);
        let len = last.start + last.len - first.start;
        match &first.shard.map {
            Some(map) if first.is_aligned() => first.shard.populate(map, first.start, len, &mut advance)?,
            _ => {
                // A run keeps its alignment in the file; a tensor that is misaligned there is a run of its own and
                // starts at 0.
                let phase = if first.is_aligned() { first.start % ALIGN } else { 0 };
                let mut buffer = vec![0u128; (phase + len).div_ceil(ALIGN)];
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
                first.shard.read(first.start, &mut bytes[phase..phase + len], &mut advance)?;
                let buffer = Arc::new(buffer);
                for tensor in run {
                    let loaded = Loaded { buffer: buffer.clone(), start: phase + tensor.start - first.start };
                    // Another thread may have loaded the same bytes meanwhile; either copy serves.
                    let _ = tensor.loaded.set(loaded);
                }
            }
        }
    }
    Ok(())
}

const ALIGN: usize = size_of::<u128>();

/// Runs this far apart are read by themselves.
const APART: usize = 64 << 10;
/// Of spans of runs and of hints. The system takes at most one request of the disk, or its own look-ahead, from a hint,
/// and drops the rest of it.
const REQUEST_BYTES: usize = 256 << 10;

/// A run of neighbouring tensors in memory of our own.
struct Loaded {
    buffer: Arc<Vec<u128>>, // u128 for its alignment
    start: usize,           // of the tensor, bytes
}

struct Shard {
    path: PathBuf,
    index: usize,
    file: File,
    len: usize,        // bytes, as found when opened
    map: Option<Mmap>, // the whole file
    log: Arc<Mutex<Vec<ReadCall>>>,
}

impl Shard {
    fn read(&self, start: usize, out: &mut [u8], advance: &mut dyn FnMut(usize)) -> Result<()> {
        let mut offset = start;
        for piece in out.chunks_mut(PIECE_BYTES) {
            self.log(offset, piece.len());
            self.read_exact(offset, piece)?;
            offset += piece.len();
            advance(piece.len());
        }
        Ok(())
    }

    fn read_exact(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset as u64).with_context(|| {
            format!(
                "{}: expected {} bytes at {offset}, the file changed or cannot be read",
                self.path.display(),
                out.len()
            )
        })
    }

    fn read_rows(&self, start: usize, stride: usize, row_bytes: usize, out: &mut [u8]) -> Result<()> {
        self.log(start, out.len());
        let together = if stride <= APART { (REQUEST_BYTES / stride).max(1) } else { 1 };
        let mut span = vec![0; (together - 1) * stride + row_bytes];
        for (i, rows) in out.chunks_mut(together * row_bytes).enumerate() {
            let span = &mut span[..(rows.len() / row_bytes - 1) * stride + row_bytes];
            self.read_exact(start + i * together * stride, span)?;
            let runs = span.chunks(stride).map(|run| &run[..row_bytes]);
            rows.chunks_exact_mut(row_bytes).zip(runs).for_each(|(row, run)| row.copy_from_slice(run));
        }
        Ok(())
    }

    fn advise_rows(&self, start: usize, stride: usize, row_bytes: usize, rows: usize) {
        let advise = |offset: usize, bytes: usize, advice| {
            use std::os::fd::AsRawFd;
            // SAFETY: no memory is passed. An error means that the hint was not taken.
            unsafe { libc::posix_fadvise(self.file.as_raw_fd(), offset as i64, bytes as i64, advice) };
        };
        advise(0, 0, libc::POSIX_FADV_RANDOM);
        let (n, bytes) = if stride <= APART {
            (rows.min(1), rows.saturating_sub(1) * stride + row_bytes)
        } else {
            (rows, row_bytes)
        };
        for start in (0..n).map(|i| start + i * stride) {
            for offset in (0..bytes).step_by(REQUEST_BYTES) {
                advise(start + offset, REQUEST_BYTES.min(bytes - offset), libc::POSIX_FADV_WILLNEED);
            }
        }
    }

    /// Asks for pages in large requests instead of one fault at a time.
    fn populate(&self, map: &Mmap, start: usize, len: usize, advance: &mut dyn FnMut(usize)) -> Result<()> {
        for offset in (start..start + len).step_by(PIECE_BYTES) {
            let bytes = PIECE_BYTES.min(start + len - offset);
            self.log(offset, bytes);
            match map.advise_range(Advice::PopulateRead, offset, bytes) {
                // Kernels before 5.14 do not know the advice: pages then come one fault at a time, which is slower, not
                // wrong.
                Err(error) if error.kind() != ErrorKind::InvalidInput => {
                    return Err(error).with_context(|| {
                        format!(
                            "{}: expected {bytes} bytes at {offset}, the file changed or cannot be read",
                            self.path.display()
                        )
                    })
                }
                _ => advance(bytes),
            }
        }
        Ok(())
    }

    fn log(&self, offset: usize, bytes: usize) {
        let call = ReadCall { shard: self.index, offset, bytes };
        self.log.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(call);
    }
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Tensor name and file name pairs of an index.
type Index = Vec<(String, String)>;

/// The files to open, sorted by name, all present; and the index if there is one.
fn find_files(dir: &Path) -> Result<(Vec<String>, Option<Index>)> {
    if !dir.is_dir() {
        let found = if dir.exists() { "a file" } else { "nothing there" };
        bail!("{}: expected a model directory, found {found}", dir.display());
    }
    if dir.join(SINGLE).symlink_metadata().is_ok() {
        if let Some(problem) = absence(&dir.join(SINGLE)) {
            bail!("{}: expected {SINGLE}, found {problem}; the download is likely incomplete", dir.display());
        }
        return Ok((vec![SINGLE.into()], None));
    }
    let path = dir.join(INDEX);
    if path.symlink_metadata().is_err() {
        bail!("{}: expected {SINGLE} or {INDEX}, found {}", dir.display(), other_weights(dir));
    }
    if let Some(problem) = absence(&path) {
        bail!("{}: expected {INDEX}, found {problem}; the download is likely incomplete", dir.display());
    }
    #[derive(Deserialize)]
    struct IndexFile {
        weight_map: Pairs<String>,
    }
    let text = std::fs::read(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
    let index: IndexFile = parse_json(&text, &path)?;
    let index = index.weight_map.0;
    let mut names = BTreeSet::new();
    for (tensor, _) in &index {
        if !names.insert(tensor) {
            bail!("{}: expected tensor {tensor} once, found it twice", path.display());
        }
    }
    let files: BTreeSet<&String> = index.iter().map(|(_, file)| file).collect();
    if files.is_empty() {
        bail!("{}: expected tensors in weight_map, found none", path.display());
    }
    let plain = |file: &str| !file.is_empty() && !file.contains(['/', '\0']) && file != ".." && file != ".";
    if let Some(file) = files.iter().find(|file| !plain(file)) {
        bail!("{}: expected names of files beside it, found {file:?}", path.display());
    }
    let missing: Vec<String> =
        files.iter().filter_map(|file| absence(&dir.join(file)).map(|problem| format!("{file} ({problem})"))).collect();
    if !missing.is_empty() {
        bail!(
            "{}: expected {} files named by {INDEX}, {} cannot be found: {}; looked in {}; the download is likely incomplete",
            dir.display(),
            files.len(),
            missing.len(),
            missing.join(", "),
            dir.display()
        );
    }
    Ok((files.into_iter().cloned().collect(), Some(index)))
}

/// Why `path` is not a regular file, if it is not.
fn absence(path: &Path) -> Option<String> {
    match (path.metadata(), path.read_link()) {
        (Ok(metadata), _) if metadata.is_file() => None,
        (Ok(_), _) => Some("not a regular file".into()),
        (Err(_), Ok(target)) => Some(format!("dangling link to {}", target.display())),
        (Err(error), _) if error.kind() == ErrorKind::NotFound => Some("absent".into()),
        (Err(error), _) => Some(error.to_string()),
    }
}

/// What a directory without our files holds instead, and what to do about it.
fn other_weights(dir: &Path) -> String {
    let names: Vec<String> = match dir.read_dir() {
        Ok(entries) => entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect(),
        Err(error) => return error.to_string(),
    };
    let has = |ending: &str| names.iter().any(|name| name.ends_with(ending));
    if has(".safetensors") {
        format!("other .safetensors files without {INDEX}; download the index too")
    } else if has(".bin") || has(".pt") || has(".pth") {
        "only PyTorch .bin or .pt files; convert them to safetensors first".into()
    } else if has(".gguf") {
        "only GGUF files; use the safetensors release of the model".into()
    } else {
        "no weights; download the model".into()
    }
}

/// Names and files of the index must be those of the headers.
fn compare_with_index(dir: &Path, index: &Index, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let listed: BTreeMap<&str, &str> = index.iter().map(|(name, file)| (name.as_str(), file.as_str())).collect();
    for (name, file) in &listed {
        match tensors.get(*name) {
            Some(tensor) if tensor.file == **file => {}
            Some(tensor) => bail!("{}: {INDEX} expects {name} in {file}, found in {}", dir.display(), tensor.file),
            None => bail!("{}: {INDEX} expects {name} in {file}, found in no file", dir.display()),
        }
    }
    match tensors.values().find(|tensor| !listed.contains_key(tensor.name.as_str())) {
        Some(tensor) => bail!("{}: {INDEX} does not name {}, found in {}", dir.display(), tensor.name, tensor.file),
        None => Ok(()),
    }
}

/// A tensor as its header gives it, checked; offsets from the start of the file.
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    start: usize,
    len: usize,
}

fn open_shard(path: &Path, index: usize, read: Read, log: Arc<Mutex<Vec<ReadCall>>>) -> Result<(Shard, Vec<Entry>)> {
    let file = File::open(path).with_context(|| format!("{}: cannot be opened", path.display()))?;
    let len = file.metadata().with_context(|| format!("{}: cannot be read", path.display()))?.len();
    let len =
        usize::try_from(len).with_context(|| format!("{}: {len} bytes exceed the address space", path.display()))?;
    let entries = read_header(&file, len, path)?;
    let mapped = match read {
        Read::Mmap => true,
        Read::Plain => false,
        Read::Auto => !is_network(&file),
    };
    let map = if mapped {
        // SAFETY: the map is read only, and its length was validated against the header. Somebody who cuts the file
        // while we run ends the process with SIGBUS; no program that maps files can prevent that, and `--no-mmap` does.
        Some(
            unsafe { Mmap::map(&file) }
                .with_context(|| format!("{}: cannot be mapped; try --no-mmap", path.display()))?,
        )
    } else {
        None
    };
    Ok((Shard { path: path.to_owned(), index, file, len, map, log }, entries))
}

/// The format's own limit: a larger length is damage, not a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

fn read_header(file: &File, file_len: usize, path: &Path) -> Result<Vec<Entry>> {
    let shown = path.display();
    let cut = |expected: usize| {
        format!("{shown}: expected {expected} bytes, found {file_len}: the download is likely incomplete")
    };
    if file_len < 8 {
        bail!("{shown}: expected at least 8 bytes, found {file_len}: the download is likely incomplete");
    }
    let read =
        |out: &mut [u8], offset| file.read_exact_at(out, offset).with_context(|| format!("{shown}: cannot be read"));
    let mut prefix = [0; 8];
    read(&mut prefix, 0)?;
    if &prefix == b"version " {
        bail!("{shown}: expected safetensors, found a Git LFS pointer of {file_len} bytes; run git lfs pull");
    }
    let header_len = u64::from_le_bytes(prefix);
    if header_len > MAX_HEADER_BYTES {
        bail!(
            "{shown}: expected a header of at most {MAX_HEADER_BYTES} bytes, found a length of {header_len} in a file of {file_len} bytes: \
             not a safetensors file, or the download is likely incomplete"
        );
    }
    let data_start = 8 + header_len as usize;
    if data_start > file_len {
        bail!(cut(data_start));
    }
    let mut header = vec![0; header_len as usize];
    read(&mut header, 8)?;
    let header: Pairs<HeaderEntry> = parse_json(&header, path).with_context(|| {
        format!("{shown}: the header of {header_len} bytes is damaged; not a safetensors file, or the download is likely incomplete")
    })?;

    let mut entries = Vec::with_capacity(header.0.len());
    for (name, entry) in header.0 {
        let HeaderEntry { dtype: Some(dtype), shape: Some(shape), data_offsets: Some((begin, end)) } = entry else {
            bail!("{shown}: {name}: expected dtype, shape and data_offsets, found fewer");
        };
        let Some(known) = Dtype::from_name(&dtype) else {
            let names: Vec<&str> = DTYPES.iter().map(|(_, name)| *name).collect();
            bail!("{shown}: {name}: expected one of {}, found dtype {dtype:?}", names.join(" "));
        };
        let expected = shape.iter().try_fold(known.bytes(), |product, n| product.checked_mul(*n));
        let found = end.checked_sub(begin);
        // Overflow on either side is a mismatch as well; what cannot be computed is not printed.
        if expected.is_none() || expected != found {
            let bytes = |n: Option<usize>| n.map_or("an impossible number of".to_string(), |n| n.to_string());
            bail!(
                "{shown}: {name}: expected {} bytes for {shape:?} {known}, found {} bytes ({begin} to {end}): the file is damaged, or the download is \
                 likely incomplete",
                bytes(expected),
                bytes(found)
            );
        }
        entries.push(Entry { name, dtype: known, shape, start: begin, len: end - begin });
    }

    // Contiguous from the end of the header to the end of the file: no overlap, no gap, nothing cut, nothing appended.
    entries.sort_by(|a, b| (a.start, a.len, &a.name).cmp(&(b.start, b.len, &b.name)));
    let end = entries.iter().map(|entry| entry.start + entry.len).max().unwrap_or(0);
    let expected = data_start
        .checked_add(end)
        .with_context(|| format!("{shown}: expected offsets within the file, found {end}"))?;
    if expected > file_len {
        bail!(cut(expected));
    }
    if expected < file_len {
        bail!(
            "{shown}: expected {expected} bytes, found {file_len}: {} bytes were appended; fetch the file again",
            file_len - expected
        );
    }
    let mut at = 0;
    for entry in &entries {
        if entry.start != at {
            let what = if entry.start < at { "overlaps the tensor before it" } else { "leaves a gap" };
            bail!(
                "{shown}: {}: expected to start at byte {at}, found {}: it {what}; the file is damaged, or the download is likely incomplete",
                entry.name,
                entry.start
            );
        }
        at += entry.len;
    }
    let mut names = BTreeSet::new();
    if let Some(entry) = entries.iter().find(|entry| !names.insert(&entry.name)) {
        bail!("{shown}: expected tensor {} once, found it twice", entry.name);
    }
    for entry in &mut entries {
        entry.start += data_start;
    }
    Ok(entries)
}

/// All fields are required; as options, so that the error can name the tensor.
#[derive(Deserialize)]
struct HeaderEntry {
    dtype: Option<String>,
    shape: Option<Vec<usize>>,
    data_offsets: Option<(usize, usize)>,
}

/// A JSON object with its repeated keys kept, so that they can be refused, and without the free text of `__metadata__`.
struct Pairs<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
            type Value = Pairs<T>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<T>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<BTreeMap<String, String>>()?;
                    } else {
                        pairs.push((name, map.next_value()?));
                    }
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Object(PhantomData))
    }
}

fn parse_json<T: DeserializeOwned>(text: &[u8], path: &Path) -> Result<T> {
    // All of it, as the JSON reader does not look into strings that nobody wants.
    let text = std::str::from_utf8(text).with_context(|| format!("{}: expected UTF-8", path.display()))?;
    serde_json::from_str(text).with_context(|| format!("{}: expected JSON as described", path.display()))
}

/// Whether pages of the file come over a network, or through a daemon, one request at a time.
fn is_network(file: &File) -> bool {
    use std::os::fd::AsRawFd;
    let mut stat = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open, and `stat` is read only if the call filled it.
    let filled = unsafe { libc::fstatfs(file.as_raw_fd(), stat.as_mut_ptr()) == 0 };
    filled && NETWORK.contains(&(unsafe { stat.assume_init() }.f_type as u32))
}

/// Magic numbers from linux/magic.h and the file systems' own headers.
const NETWORK: [u32; 11] = [
    0x6969,      // NFS
    0x517b,      // SMB
    0xff53_4d42, // CIFS
    0xfe53_4d42, // SMB2
    0x6573_5546, // FUSE: sshfs, s3fs, virtiofs
    0x0102_1997, // 9p
    0x0bd0_0bd0, // Lustre
    0x00c3_6400, // Ceph
    0x4750_4653, // GPFS
    0x1983_0326, // BeeGFS
    0x5346_414f, // AFS
];
