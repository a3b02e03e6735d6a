// Compiles kernels/*.cu to one fatbin each, placed in OUT_DIR as <name>.fatbin, and writes OUT_DIR/fatbins.rs for
// src/gpu to include:
//   pub const FATBINS: &[(&str, &[u8])]    (name of the .cu file, fatbin), empty when built without nvcc
//   pub const ARCHS: &[u32]               compute capabilities with machine code (90 for 9.0); PTX: u32, the one of the
//   portable code
//   pub const BUILT_WITH: &str             version of nvcc and the targets, or the sentence that says why there are no
//   kernels
//
// nvcc is looked for in this order; the first that answers `--version` wins:
//   1. $NVCC                      2. $CUDA_HOME/bin, $CUDA_PATH/bin
//   3. nvcc on PATH               4. /usr/local/cuda/bin
//   5. the folder filled by scripts/cuda-toolchain.sh: $CUDA_TOOLCHAIN_DIR, else <repo>/.cuda-toolchain
// Without one the build succeeds, with a warning, and the program runs on the CPU only. VOLLEY_FATBIN_DIR=DIR skips the
// compiler and takes DIR/<name>.fatbin (a build machine without nvcc). With the feature static-nccl, libnccl_static.a
// is linked from $NCCL_STATIC_DIR. CUDA_ARCHS="90a;120a" is the list of targets; PTX for compute_90 is always added,
// for newer chips.
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{exit, Command};
use std::{env, fs, thread};

const DEFAULT_ARCHS: &str = "90a;120a";
/// Portable code for chips without machine code of their own.
const PTX: u32 = 90;
const FLAGS: &[&str] = &["-fatbin", "-O3", "-std=c++17", "-lineinfo", "--threads=2", "-compress-mode=size"];
const NO_NVCC: &str = "built without CUDA kernels: no nvcc was found; install the CUDA toolkit (12.8 or later) and set CUDA_HOME, or run scripts/cuda-toolchain.sh, then build again";

fn main() {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap());
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    for name in [
        "NVCC",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_TOOLCHAIN_DIR",
        "CUDA_ARCHS",
        "VOLLEY_FATBIN_DIR",
        "NVCC_CCBIN",
        "NCCL_STATIC_DIR",
    ] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    link_unwinder(&out);
    if env::var_os("CARGO_FEATURE_STATIC_NCCL").is_some() {
        link_nccl(&root);
    }
    let sources = files(&root.join("kernels"), &["cu"]);
    let headers = files(&root.join("kernels"), &["h", "cuh"]);
    println!("cargo:rerun-if-changed=kernels");
    for f in sources.iter().chain(&headers) {
        println!("cargo:rerun-if-changed={}", f.display());
    }

    let (sources, built_with, targets) = if let Some(dir) = env::var_os("VOLLEY_FATBIN_DIR").map(PathBuf::from) {
        for source in &sources {
            let name = Path::new(source.file_stem().unwrap()).with_extension("fatbin");
            if let Err(e) = fs::copy(dir.join(&name), out.join(&name)) {
                fail(&format!("VOLLEY_FATBIN_DIR: {}: {e}", dir.join(&name).display()));
            }
        }
        let targets: Vec<String> = wanted_archs().iter().map(|a| format!("sm_{a}")).collect();
        (sources, format!("compiled elsewhere (VOLLEY_FATBIN_DIR), {}", targets.join(" ")), targets)
    } else if let Some((nvcc, version)) = find_nvcc(&root) {
        let targets = targets(&nvcc);
        compile(&nvcc, &version, &targets, &sources, &headers, &out);
        let built_with = format!("{version}, {}", targets.join(" "));
        (sources, built_with, targets)
    } else {
        println!("cargo:warning={NO_NVCC}");
        (vec![], NO_NVCC.to_string(), vec![])
    };

    let archs: Vec<&str> = targets.iter().map(|t| t.trim_start_matches("sm_").trim_end_matches(['a', 'f'])).collect();
    let mut table = format!(
        "pub const BUILT_WITH: &str = {built_with:?};\npub const ARCHS: &[u32] = &[{}];\npub const PTX: u32 = {PTX};\npub const FATBINS: &[(&str, &[u8])] = &[\n",
        archs.join(", ")
    );
    for source in &sources {
        let name = source.file_stem().unwrap().to_str().unwrap();
        table += &format!("    ({name:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\"))),\n");
    }
    fs::write(out.join("fatbins.rs"), table + "];\n").unwrap();
}

fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    exit(1)
}

/// The standard library asks for GCC's unwinder as a shared library, libgcc_s. A linker script of that name, found
/// first, takes it from the archives instead, so that the program needs glibc alone. Without GCC's archives the shared
/// one stays.
fn link_unwinder(out: &Path) {
    let archive = |name: &str| {
        let answer = Command::new("cc").arg(format!("-print-file-name={name}")).output().ok()?;
        let path = String::from_utf8_lossy(&answer.stdout).trim().to_string();
        Path::new(&path).is_absolute().then_some(path) // the bare name: there is none
    };
    if let (Some(unwinder), Some(support)) = (archive("libgcc_eh.a"), archive("libgcc.a")) {
        fs::write(out.join("libgcc_s.so"), format!("GROUP ( {unwinder} {support} )\n")).unwrap();
        println!("cargo:rustc-link-search=native={}", out.display());
    }
}

/// NCCL and what it needs beside glibc: the CUDA runtime and the C++ library, all from archives, so that the program
/// needs no shared library of theirs.
fn link_nccl(root: &Path) {
    let cure = "set NCCL_STATIC_DIR to the folder of libnccl_static.a (package libnccl-dev, or NCCL's own build)";
    let nccl = env::var_os("NCCL_STATIC_DIR")
        .map(PathBuf::from)
        .unwrap_or_else(|| fail(&format!("feature static-nccl: {cure}")));
    let cuda = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from);
    let toolchain = env::var_os("CUDA_TOOLCHAIN_DIR").map_or(root.join(".cuda-toolchain"), PathBuf::from);
    let cuda = cuda.chain([toolchain, "/usr/local/cuda".into()]).flat_map(|dir| [dir.join("lib64"), dir.join("lib")]);
    let compiler = env::var_os("CXX").unwrap_or("g++".into());
    let cxx = Command::new(compiler)
        .arg("-print-file-name=libstdc++.a")
        .output()
        .map(|o| String::from_utf8_lossy(&o.stdout).trim().to_string());
    let cxx = cxx.ok().and_then(|p| Path::new(&p).parent().map(Path::to_path_buf));
    let folders: Vec<PathBuf> = [nccl].into_iter().chain(cuda).chain(cxx).collect();
    // All of NCCL: its kernels are registered by objects that nothing refers to.
    for (library, modifiers) in
        [("nccl_static", "+whole-archive,-bundle"), ("cudart_static", "-bundle"), ("stdc++", "-bundle")]
    {
        let file = format!("lib{library}.a");
        let Some(folder) = folders.iter().find(|folder| folder.join(&file).is_file()) else {
            let looked: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
            fail(&format!("feature static-nccl: {file} is in none of {}; {cure}", looked.join(", ")));
        };
        println!("cargo:rustc-link-search=native={}", folder.display());
        println!("cargo:rustc-link-lib=static:{modifiers}={library}");
    }
    // Parts of libc itself since glibc 2.34.
    for library in ["dl", "rt", "pthread"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
}

/// The files of `dir` with one of the extensions, sorted.
fn files(dir: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    found.retain(|p| p.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)));
    found.sort();
    found
}

/// nvcc's path and version line.
fn find_nvcc(root: &Path) -> Option<(PathBuf, String)> {
    let mut candidates: Vec<PathBuf> = env::var_os("NVCC").map(PathBuf::from).into_iter().collect();
    candidates
        .extend(["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(|d| Path::new(&d).join("bin/nvcc")));
    candidates.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()).map(|d| d.join("nvcc")));
    candidates.push("/usr/local/cuda/bin/nvcc".into());
    candidates
        .push(env::var_os("CUDA_TOOLCHAIN_DIR").map_or(root.join(".cuda-toolchain"), PathBuf::from).join("bin/nvcc"));
    candidates.iter().find_map(|p| {
        // Links are resolved first: the pip layout finds its headers beside the real binary only.
        let p = fs::canonicalize(p).ok()?;
        let answer = Command::new(&p).arg("--version").output().ok().filter(|o| o.status.success())?;
        let text = String::from_utf8_lossy(&answer.stdout).into_owned();
        let version = text.lines().find_map(|l| l.split("release ").nth(1)).unwrap_or("of unknown version");
        Some((p, format!("nvcc {version}")))
    })
}

fn wanted_archs() -> Vec<String> {
    let wanted = env::var("CUDA_ARCHS").unwrap_or(DEFAULT_ARCHS.into());
    wanted.split([';', ',', ' ']).filter(|a| !a.is_empty()).map(String::from).collect()
}

/// `CUDA_ARCHS` as far as this nvcc knows them: a newer list must not break an older toolkit.
fn targets(nvcc: &Path) -> Vec<String> {
    let known = Command::new(nvcc)
        .arg("--list-gpu-arch")
        .output()
        .unwrap_or_else(|e| fail(&format!("{} --list-gpu-arch: {e}", nvcc.display())));
    let known = String::from_utf8_lossy(&known.stdout).into_owned();
    let mut kept = vec![];
    for arch in wanted_archs() {
        if known.lines().any(|l| l.trim() == format!("compute_{}", arch.trim_end_matches(['a', 'f']))) {
            kept.push(format!("sm_{arch}"));
        } else {
            println!("cargo:warning=this nvcc does not know sm_{arch}: left out");
        }
    }
    kept
}

/// One fatbin per source, two at a time. A fatbin is kept until its source, a header, a flag, a target or nvcc changes:
/// <name>.key holds the hash.
fn compile(nvcc: &Path, version: &str, targets: &[String], sources: &[PathBuf], headers: &[PathBuf], out: &Path) {
    let mut common = DefaultHasher::new();
    (version, targets, FLAGS, env::var_os("NVCC_CCBIN")).hash(&mut common);
    for header in headers {
        (header.file_name(), fs::read(header).unwrap()).hash(&mut common);
    }
    let build = |source: &PathBuf| -> bool {
        let target = out.join(source.file_stem().unwrap()).with_extension("fatbin");
        let mut key = common.clone();
        fs::read(source).unwrap().hash(&mut key);
        let (key, key_file) = (format!("{:016x}", key.finish()), target.with_extension("key"));
        if target.exists() && fs::read_to_string(&key_file).is_ok_and(|k| k == key) {
            return true;
        }
        let _ = fs::remove_file(&key_file);
        let mut command = Command::new(nvcc);
        command.args(FLAGS);
        for t in targets {
            command.arg(format!("-gencode=arch={},code={t}", t.replace("sm_", "compute_")));
        }
        command.arg(format!("-gencode=arch=compute_{PTX},code=compute_{PTX}"));
        if let Some(host_compiler) = env::var_os("NVCC_CCBIN") {
            command.arg("-ccbin").arg(host_compiler);
        }
        match command.arg("-o").arg(&target).arg(source).output() {
            Ok(o) if o.status.success() => fs::write(&key_file, key).is_ok(),
            Ok(o) => {
                eprintln!("error: {} on {}:\n{}", nvcc.display(), source.display(), String::from_utf8_lossy(&o.stderr));
                false
            }
            Err(e) => fail(&format!("{}: {e}", nvcc.display())),
        }
    };
    let lanes: Vec<Vec<&PathBuf>> = (0..2).map(|lane| sources.iter().skip(lane).step_by(2).collect()).collect();
    let fine = thread::scope(|scope| {
        let running: Vec<_> = lanes.iter().map(|lane| scope.spawn(|| lane.iter().all(|s| build(s)))).collect();
        running.into_iter().all(|r| r.join().unwrap())
    });
    if !fine {
        exit(1);
    }
}
