//! A small fuzzer on stable Rust: inputs made from seeds by structure (JSON) and by bytes, kept as further seeds when
//! they are accepted, or refused in a new way. A panic, an input that takes too long and an absurd allocation are
//! failures; their inputs are saved. fuzz.rs says what is fuzzed.
use crate::support::Random;
use serde::de::IgnoredAny;
use serde_json::{json, Map, Value};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// What an input is, so that changes may keep it readable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Bytes,
    Json,
    /// Length, JSON, data.
    Safetensors,
}

const WORKER: &str = "fuzz ";

/// No input takes this long on a busy machine.
const HANG: Duration = Duration::from_secs(20);
/// No input is worth more memory: so much, and so much for each of its bytes.
const MOST: usize = 64 << 20;
const MOST_PER_BYTE: usize = 8 << 10;

/// Runs the seeds of tests/data/fuzz/NAME and these, then changes of them for $VOLLEY_FUZZ_SECONDS (default: 5).
/// `words` are put into inputs, besides those that the seeds have. The target says whether it accepts an input or
/// refuses it, in one line. Some of both must occur.
pub fn fuzz(
    name: &str,
    format: Format,
    seeds: Vec<Vec<u8>>,
    words: &[&str],
    target: impl FnMut(&[u8]) -> anyhow::Result<()> + Send + 'static,
) {
    let seconds = variable("VOLLEY_FUZZ_SECONDS").unwrap_or(5);
    let seed =
        variable("VOLLEY_FUZZ_SEED").unwrap_or_else(|| UNIX_EPOCH.elapsed().map_or(0, |now| now.as_nanos() as u64));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz");
    fs::create_dir_all(&out).unwrap();
    remember_panics();
    let mut corpus = seeds;
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fuzz").join(name);
    let mut files: Vec<PathBuf> = fs::read_dir(kept).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    corpus.extend(files.iter().map(|file| fs::read(file).unwrap()));
    assert!(!corpus.is_empty(), "{name} has no seeds");

    let since = Arc::new(Mutex::new(Instant::now()));
    let worker = Worker {
        name: name.into(),
        format,
        words: words.iter().map(|word| word.to_string()).collect(),
        max_len: 2 * corpus.iter().map(Vec::len).max().unwrap_or(0) + 1024,
        corpus,
        refused: Vec::new(),
        random: Random::new(seed),
        seen: HashSet::new(),
        now: File::create(out.join(name)).unwrap(),
        out: out.clone(),
        since: since.clone(),
        failures: Vec::new(),
        inputs: [0; 2],
        target: Box::new(target),
    };
    // as much as the main thread has
    let thread = std::thread::Builder::new().name(format!("{WORKER}{name}")).stack_size(8 << 20);
    let until = Instant::now() + Duration::from_secs(seconds);
    let thread = thread.spawn(move || worker.run(until)).unwrap();
    while !thread.is_finished() {
        std::thread::sleep(Duration::from_millis(20));
        let waiting = since.lock().unwrap().elapsed();
        assert!(waiting < HANG, "{name}: an input takes more than {HANG:?}; it is in {}", out.join(name).display());
    }
    let done = thread.join().expect("the worker catches panics");
    println!(
        "{name}: {} inputs accepted, {} refused, {} ends, seed {seed}",
        done.inputs[0],
        done.inputs[1],
        done.seen.len()
    );
    assert!(done.failures.is_empty(), "{name}: {} failures:\n{}", done.failures.len(), done.failures.join("\n"));
    assert!(done.inputs.iter().all(|n| *n > 0), "{name}: expected some inputs to be accepted and some to be refused");
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value}: expected a number")))
}

type Target = Box<dyn FnMut(&[u8]) -> anyhow::Result<()> + Send>;

struct Worker {
    name: String,
    format: Format,
    words: Vec<String>,
    max_len: usize,
    /// Seeds, and what was accepted.
    corpus: Vec<Vec<u8>>,
    /// What was refused, each in another way.
    refused: Vec<Vec<u8>>,
    random: Random,
    /// Ways in which inputs ended.
    seen: HashSet<String>,
    /// Where inputs that failed are.
    out: PathBuf,
    /// The input that runs, under the target's name.
    now: File,
    since: Arc<Mutex<Instant>>,
    failures: Vec<String>,
    /// Accepted, refused.
    inputs: [u64; 2],
    target: Target,
}

impl Worker {
    fn run(mut self, until: Instant) -> Worker {
        for seed in &self.corpus.clone() {
            if let Ok(value) = serde_json::from_slice(seed) {
                strings(&value, &mut self.words);
            }
            self.try_one(seed);
        }
        self.words.sort();
        self.words.dedup();
        while Instant::now() < until && self.failures.len() < 20 {
            // What was accepted is nearer to what matters than what was refused in a new way.
            let list = if self.refused.is_empty() || !self.random.one_in(4) { &self.corpus } else { &self.refused };
            let mut input = self.random.pick(list).clone();
            for _ in 0..1 + self.random.below(4) {
                input = self.changed(self.format, &input);
            }
            input.truncate(self.max_len);
            self.try_one(&input);
        }
        self
    }

    fn try_one(&mut self, input: &[u8]) {
        *self.since.lock().unwrap() = Instant::now();
        // One open file: ext4 brings what is truncated, written and closed to the disk, which takes longer than most
        // inputs.
        self.now.write_all_at(input, 0).and_then(|()| self.now.set_len(input.len() as u64)).unwrap();
        PANIC.with(|panic| panic.borrow_mut().clear());
        USED.with(|used| used.set((0, 0)));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (self.target)(input)));
        let most = USED.with(Cell::get).1.max(0) as usize;
        let panic = PANIC.with(|panic| panic.borrow().clone());
        let failure = match &result {
            Err(_) => Some(panic),
            // Caught on its way: others' crates may, we may not.
            _ if panic.contains("panicked at src/") => Some(panic),
            _ if most > MOST + MOST_PER_BYTE * input.len() => Some(format!("{most} bytes of memory")),
            Ok(_) => None,
        };
        let accepted = matches!(result, Ok(Ok(())));
        self.inputs[usize::from(!accepted)] += 1;
        let Some(failure) = failure else {
            let end = result.expect("no panic").map_or_else(|error| shape(&format!("{error:#}")), |()| String::new());
            let readable = self.format != Format::Json || serde_json::from_slice::<IgnoredAny>(input).is_ok();
            let list = if accepted && readable { &mut self.corpus } else { &mut self.refused };
            if accepted && readable || self.seen.insert(end) {
                match list.len() < 1000 {
                    true => list.push(input.to_vec()),
                    false => *self.random.pick_mut(list) = input.to_vec(),
                }
            }
            return;
        };
        if self.seen.insert(shape(&failure)) {
            let file = self.out.join(format!("{}-{:016x}", self.name, hash(input)));
            fs::write(&file, input).unwrap();
            self.failures.push(format!("{failure} ({})", file.display()));
        }
    }

    fn changed(&mut self, format: Format, input: &[u8]) -> Vec<u8> {
        match format {
            Format::Safetensors if input.len() > 8 && !self.random.one_in(5) => {
                let len = u64::from_le_bytes(input[..8].try_into().unwrap()) as usize;
                let Some(header) = input[8..].get(..len) else { return self.changed(Format::Bytes, input) };
                let header = self.changed(Format::Json, header);
                [&(header.len() as u64).to_le_bytes(), &header[..], &input[8 + len..]].concat()
            }
            Format::Json if !self.random.one_in(5) => match serde_json::from_slice(input) {
                Ok(mut value) => {
                    let at = self.random.below(self.corpus.len());
                    let other = serde_json::from_slice(&self.corpus[at]).unwrap_or_else(|_| self.interesting());
                    self.change_json(&mut value, &other);
                    serde_json::to_vec(&value).unwrap()
                }
                Err(_) => self.changed(Format::Bytes, input),
            },
            _ => self.change_bytes(input.to_vec()),
        }
    }

    fn change_bytes(&mut self, mut input: Vec<u8>) -> Vec<u8> {
        let random = &mut self.random;
        let at = random.below(input.len() + 1);
        let most = if random.one_in(3) { 1 + input.len() } else { 12 };
        let end = (at + 1 + random.below(most)).min(input.len());
        match random.below(9) {
            0 if at < input.len() => input[at] ^= 1 << random.below(8),
            1 if at < input.len() => {
                input[at] = *random.pick(b"\0\x01\x7f\x80\xc3\xff\"'\\{}[]()<>,:;=-+.0919eE %|_\n\r\t/*#&")
            }
            2 => drop(input.drain(at..end)),
            3 => {
                let copy = input[at..end].to_vec();
                let to = random.below(input.len() + 1);
                input.splice(to..to, copy);
            }
            4 => {
                // Repeated, so that what may be nested is.
                let copy = input[at..end].to_vec();
                let n = if random.one_in(4) { 2000 } else { 20 };
                input.splice(at..at, copy.repeat(n.min(self.max_len / (1 + copy.len()))));
            }
            5 | 6 => {
                let word = random.pick(&self.words).clone();
                input.splice(at..if random.one_in(2) { end } else { at }, word.into_bytes());
            }
            7 => {
                let is_digit = |i: &usize| input[*i].is_ascii_digit();
                let Some(from) = (at..input.len()).find(is_digit) else { return input };
                let to = (from..input.len()).find(|i| !is_digit(i)).unwrap_or(input.len());
                input.splice(from..to, random.pick(&NUMBERS).bytes());
            }
            _ => {
                let other = random.pick(&self.corpus).clone();
                let from = random.below(other.len() + 1);
                let to = (from + random.below(40)).min(other.len());
                input.splice(at..end, other[from..to].iter().copied());
            }
        }
        input
    }

    fn change_json(&mut self, value: &mut Value, other: &Value) {
        let words = self.words.clone();
        let word = self.random.pick(&words).clone();
        let fresh = match self.random.one_in(3) {
            true => node(&mut other.clone(), &mut self.random).clone(),
            false => self.interesting(),
        };
        let node = node(value, &mut self.random);
        let random = &mut self.random;
        match node {
            Value::Object(items) if !random.one_in(4) => {
                let at = random.below(items.len().max(1));
                let key = items.keys().nth(at).cloned();
                match (random.below(4), key) {
                    (0, Some(key)) => drop(items.shift_remove(&key)),
                    (1, Some(key)) => {
                        let old = items.shift_remove(&key).expect("its key was just read");
                        items.insert(word, old);
                    }
                    (2, Some(key)) => drop(items.insert(key, fresh)),
                    _ => drop(items.insert(word, fresh)),
                }
            }
            Value::Array(items) if !random.one_in(4) => {
                let at = random.below(items.len().max(1));
                match random.below(4) {
                    0 if !items.is_empty() => drop(items.remove(at)),
                    1 if !items.is_empty() => items.insert(at, items[at].clone()),
                    2 if !items.is_empty() => items[at] = fresh,
                    _ => items.push(fresh),
                }
            }
            Value::Number(n) if random.one_in(2) => {
                let x = n.as_f64().unwrap_or(0.0);
                let changes = [x + 1.0, x - 1.0, -x, 2.0 * x, x / 2.0, x * 1e6, x * 1e-6];
                let x = *random.pick(&changes);
                *node = if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) };
            }
            Value::String(text) if random.one_in(2) => {
                let text = text.clone().into_bytes();
                let changed = self.change_bytes(text);
                *node = String::from_utf8_lossy(&changed).into();
            }
            _ if random.one_in(8) => {
                let deep = 1 + random.below(150);
                *node =
                    (0..deep).fold(
                        node.take(),
                        |inner, _| if random.one_in(2) { json!([inner]) } else { json!({ "a": inner }) },
                    );
            }
            _ => *node = fresh,
        }
    }

    fn interesting(&mut self) -> Value {
        match self.random.below(12) {
            0 => Value::Null,
            1 => true.into(),
            2 => false.into(),
            3 => json!([]),
            4 => Value::Object(Map::new()),
            5 => "".into(),
            6 => "a".repeat(self.random.below(3000)).into(),
            7 => self.random.pick(&self.words).clone().into(),
            8 => vec![0; self.random.below(300)].into(),
            _ => {
                let number = *self.random.pick(&NUMBERS);
                serde_json::from_str(number).unwrap_or(Value::Null)
            }
        }
    }
}

const NUMBERS: [&str; 24] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "64",
    "255",
    "256",
    "65535",
    "65536",
    "1000000",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e-320",
    "-0.0",
    "0.5",
];

/// Any node of a document, the higher ones more often.
fn node<'v>(value: &'v mut Value, random: &mut Random) -> &'v mut Value {
    let n = match value {
        Value::Object(items) => items.len(),
        Value::Array(items) => items.len(),
        _ => 0,
    };
    if n == 0 || random.one_in(5) {
        return value;
    }
    let at = random.below(n);
    let inner = match value {
        Value::Object(items) => items.values_mut().nth(at),
        Value::Array(items) => items.get_mut(at),
        _ => None,
    };
    node(inner.expect("at is below n"), random)
}

/// Keys and short texts of a document.
fn strings(value: &Value, words: &mut Vec<String>) {
    match value {
        Value::String(text) if text.len() < 80 => words.push(text.clone()),
        Value::Array(items) => items.iter().take(100).for_each(|item| strings(item, words)),
        Value::Object(items) => items.iter().take(300).for_each(|(key, item)| {
            words.push(key.clone());
            strings(item, words);
        }),
        _ => {}
    }
}

/// A message without what differs from input to input: numbers, and what is quoted.
fn shape(message: &str) -> String {
    let unquoted: String = message.split(['"', '`']).step_by(2).collect();
    unquoted.chars().filter(|c| c.is_ascii_alphabetic() || " :._".contains(*c)).take(120).collect()
}

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
    /// Bytes that this thread holds, and the most that it held, since the input began.
    static USED: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// Panics of workers are kept for the report, those of others printed as ever.
fn remember_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANIC.with(|kept| *kept.borrow_mut() = panic.to_string().replace('\n', " "));
            if std::thread::current().name().is_none_or(|name| !name.starts_with(WORKER)) {
                default(panic);
            }
        }));
    });
}

/// The system's allocator, with an account of each thread. What is absurd altogether is refused, which ends the
/// process: the input is on disk.
pub struct Counting;

const REFUSED: usize = 4 << 30;

fn account(freed: usize, taken: usize) {
    let _ = USED.try_with(|used| {
        let (now, most) = used.get();
        let now = now + taken as isize - freed as isize;
        used.set((now, most.max(now)));
    });
}

// SAFETY: passes every call on to the system's allocator, or says that there is no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        account(0, layout.size());
        if layout.size() > REFUSED {
            std::ptr::null_mut()
        } else {
            System.alloc(layout)
        }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        account(0, layout.size());
        if layout.size() > REFUSED {
            std::ptr::null_mut()
        } else {
            System.alloc_zeroed(layout)
        }
    }
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        account(layout.size(), size);
        if size > REFUSED {
            std::ptr::null_mut()
        } else {
            System.realloc(old, layout, size)
        }
    }
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        account(layout.size(), 0);
        System.dealloc(old, layout)
    }
}
