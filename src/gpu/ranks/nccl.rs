//! NCCL, as far as it is needed: ring all-gathers and all-reduces of bf16. A table of a dozen functions from
//! libnccl.so.2, opened at run time, or linked in (feature static-nccl). One GPU needs none of it.
//!
//! cudarc's own NCCL layer looks for libnccl.so, never for libnccl.so.2, which is what packages install, and panics
//! where a symbol is missing.
use crate::error::machine;
use crate::gpu::cuda;
use crate::gpu::device::Raw;
use anyhow::{Context, Result};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::path::Path;
use std::sync::{mpsc, Arc, Mutex, MutexGuard};
use std::time::Duration;
use std::{env, mem, ptr, thread};

type Handle = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

const BF16: c_int = 9;
const SUM: c_int = 0;

/// Connecting and the first run of every size end by then, or the rank fails.
const PATIENCE: Duration = Duration::from_secs(30);

macro_rules! functions {
    ($($field:ident = $symbol:ident($($type:ty),*) -> $result:ty;)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($type),*) -> $result),* }

        #[cfg(not(feature = "static-nccl"))]
        impl Functions {
            fn find(library: &libloading::Library) -> Result<Functions, libloading::Error> {
                // Sound: the types are those of nccl.h, unchanged since NCCL 2.10.
                unsafe { Ok(Functions { $($field: *library.get(concat!(stringify!($symbol), "\0").as_bytes())?),* }) }
            }
        }

        #[cfg(feature = "static-nccl")]
        impl Functions {
            fn linked() -> Functions {
                extern "C" { $(fn $symbol($(_: $type),*) -> $result;)* }
                Functions { $($field: $symbol),* }
            }
        }
    };
}

functions! {
    version = ncclGetVersion(*mut c_int) -> c_int;
    unique_id = ncclGetUniqueId(*mut UniqueId) -> c_int;
    init_rank = ncclCommInitRank(*mut Handle, c_int, UniqueId, c_int) -> c_int;
    all_gather = ncclAllGather(*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> c_int;
    all_reduce = ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
    async_error = ncclCommGetAsyncError(Handle, *mut c_int) -> c_int;
    abort = ncclCommAbort(Handle) -> c_int;
    destroy = ncclCommDestroy(Handle) -> c_int;
    error_string = ncclGetErrorString(c_int) -> *const c_char;
    last_error = ncclGetLastError(Handle) -> *const c_char;
}

pub struct Library {
    functions: Functions,
    /// 10000 * major + 100 * minor + patch.
    pub version: i32,
    #[cfg(not(feature = "static-nccl"))]
    _library: libloading::Library,
}

/// What NCCL is told where the user's environment does not say otherwise. Ring and LL: few bytes, one order of sums,
/// nothing left to its guesses about the machine. One graph at a time uses a communicator and nothing beside it: mixing
/// support would add nodes that wait. Multicast only costs start-up time.
const DEFAULTS: [(&str, &str); 4] =
    [("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL"), ("NCCL_GRAPH_MIXING_SUPPORT", "0"), ("NCCL_NVLS_ENABLE", "0")];
/// Where ranks share a GPU (NCCL 2.30 and later).
const SHARED_DEFAULTS: [(&str, &str); 2] = [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_MAX_CTAS", "1")];

/// Names and values; `shared`: ranks share a GPU.
pub fn defaults(shared: bool) -> impl Iterator<Item = (&'static str, &'static str)> {
    DEFAULTS.into_iter().chain(SHARED_DEFAULTS.into_iter().filter(move |_| shared))
}

/// Sets the defaults; before any thread of the process starts, since it changes the environment. Returns all NCCL_
/// settings, for -v.
pub fn configure(shared: bool) -> Vec<(String, String)> {
    for (name, value) in defaults(shared) {
        if env::var_os(name).is_none() {
            env::set_var(name, value);
        }
    }
    let mut all: Vec<(String, String)> = env::vars().filter(|(name, _)| name.starts_with("NCCL_")).collect();
    all.sort();
    all
}

impl Library {
    #[cfg(not(feature = "static-nccl"))]
    pub fn open(file: Option<&Path>) -> Result<Arc<Library>> {
        let name = file.unwrap_or(Path::new("libnccl.so.2"));
        let cure = "install libnccl2 or the nvidia-nccl-cu13 package, name the file with --nccl FILE, or use --collective push";
        // Sound: NCCL's constructors do nothing that we could disturb.
        let library = unsafe { libloading::Library::new(name) }
            .map_err(|e| machine(format!("NCCL: {}: {e}; {cure}", name.display())))?;
        let functions = Functions::find(&library)
            .map_err(|e| machine(format!("NCCL: {}: {e}: expected NCCL 2.19 or later; {cure}", name.display())))?;
        Library { functions, version: 0, _library: library }.checked()
    }

    #[cfg(feature = "static-nccl")]
    pub fn open(file: Option<&Path>) -> Result<Arc<Library>> {
        if let Some(file) = file {
            anyhow::bail!(
                "--nccl {}: NCCL is linked into this program (static-nccl); leave the flag out",
                file.display()
            );
        }
        Library { functions: Functions::linked(), version: 0 }.checked()
    }

    fn checked(mut self) -> Result<Arc<Library>> {
        // Sound: writes one integer.
        let code = unsafe { (self.functions.version)(&mut self.version) };
        self.check("ncclGetVersion", code)?;
        Ok(Arc::new(self))
    }

    /// Which NCCL this program has, for `--version`.
    pub fn built_with() -> String {
        #[cfg(feature = "static-nccl")]
        return Library::open(None).map_or_else(
            |e| format!("linked in, but {e:#}"),
            |library| format!("{} linked in", library.version_text()),
        );
        #[cfg(not(feature = "static-nccl"))]
        "libnccl.so.2 or --nccl FILE, opened when ranks ask for it".to_string()
    }

    pub fn version_text(&self) -> String {
        format!("{}.{}.{}", self.version / 10000, self.version / 100 % 100, self.version % 100)
    }

    /// For rank 0: what all ranks connect with.
    pub fn unique_id(&self) -> Result<[u8; 128]> {
        let mut id = UniqueId([0; 128]);
        // Sound: writes 128 bytes.
        self.check("ncclGetUniqueId", unsafe { (self.functions.unique_id)(&mut id) })?;
        Ok(id.0)
    }

    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // Sound: NCCL's strings live as long as the library; null is allowed as a communicator.
        let text =
            |p: *const c_char| if p.is_null() { "".into() } else { unsafe { CStr::from_ptr(p) }.to_string_lossy() };
        let (error, last) =
            unsafe { (text((self.functions.error_string)(code)), text((self.functions.last_error)(ptr::null_mut()))) };
        let last = last.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ");
        Err(machine(format!(
            "NCCL {}: {call}: {error}{}{last}; NCCL_DEBUG=INFO says more",
            self.version_text(),
            if last.is_empty() { "" } else { ": " }
        )))
    }
}

/// What is run once after connecting: all-gathers, or all-reduces. Not both: an algorithm that the user forces may know
/// only one of them.
pub struct WarmUp {
    pub sums: bool,
    /// In elements.
    pub sizes: Vec<usize>,
    /// Device memory: the largest size, and ranks times as much.
    pub from: u64,
    pub to: u64,
}

/// A rank's communicator. It goes after the graphs that use it, those captured and those made of them: NCCL waits for
/// them, for ever.
pub struct Comm(Arc<Shared>);

/// Ends what a communicator waits for, from another thread.
pub struct Aborter(Arc<Shared>);

struct Shared {
    library: Arc<Library>,
    raw: Raw,
    /// Null once it was given up.
    handle: Mutex<Handle>,
}
// Sound: a communicator may be used by any thread, one at a time, which the mutex sees to.
unsafe impl Send for Shared {}
unsafe impl Sync for Shared {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Handle> {
        self.handle.lock().unwrap_or_else(|e| e.into_inner()) // a pointer is whole at any time
    }

    /// The caller's alone from now on; null: somebody else has it.
    fn take(&self) -> Handle {
        mem::replace(&mut *self.lock(), ptr::null_mut())
    }

    fn abort(&self, handle: Handle) {
        // Sound: it was taken, so nobody else uses it any more.
        unsafe { (self.library.functions.abort)(handle) };
    }
}

impl Aborter {
    /// Kernels that wait for a rank which is gone end soon. NCCL goes on to wait for all graphs that use the
    /// communicator, so this is a thread of its own, which nobody waits for.
    pub fn abort(&self) {
        let (shared, handle) = (self.0.clone(), self.0.take() as usize);
        if handle != 0 {
            // Without a thread the kernels go on, and the process ends without them.
            let _ = thread::Builder::new().name("nccl abort".into()).spawn(move || {
                if cuda::enter(shared.raw).is_ok() {
                    shared.abort(handle as Handle);
                }
            });
        }
    }
}

impl Comm {
    /// All ranks at the same time, each with the id of rank 0. NCCL waits for ever for a rank that does not come: it
    /// does so in a thread of its own, which is left behind when patience ends.
    pub fn connect(
        library: &Arc<Library>,
        raw: Raw,
        ranks: usize,
        rank: usize,
        id: [u8; 128],
        warm_up: WarmUp,
    ) -> Result<Comm> {
        let (sender, receiver) = mpsc::channel();
        let library = library.clone();
        let version = library.version_text();
        thread::Builder::new().name(format!("nccl {rank}")).spawn(move || {
            let connect = || -> Result<Comm> {
                cuda::enter(raw)?;
                let mut handle = ptr::null_mut();
                // Sound: the id is one of NCCL's; the context of the rank's GPU is current.
                let code =
                    unsafe { (library.functions.init_rank)(&mut handle, ranks as c_int, UniqueId(id), rank as c_int) };
                library.check("ncclCommInitRank", code)?;
                let comm = Comm(Arc::new(Shared { library, raw, handle: Mutex::new(handle) }));
                for &n in &warm_up.sizes {
                    match warm_up.sums {
                        true => comm.all_reduce(warm_up.from, warm_up.to, n)?,
                        false => comm.all_gather(warm_up.from, warm_up.to, n)?,
                    }
                    cuda::wait(raw)?;
                }
                comm.check()?;
                Ok(comm)
            };
            let _ = sender.send(connect()); // nobody listens when patience has ended
        })?;
        match receiver.recv_timeout(PATIENCE) {
            Ok(connected) => connected.with_context(|| format!("rank {rank}")),
            Err(_) => Err(machine(format!(
                "rank {rank}: NCCL {version} did not connect {ranks} ranks within {} s; NCCL_DEBUG=INFO says where it waits; --collective push needs no NCCL",
                PATIENCE.as_secs()
            ))),
        }
    }

    /// to [ranks][n] = every rank's from [n], bf16; queued on the rank's stream, or captured.
    pub fn all_gather(&self, from: u64, to: u64, n: usize) -> Result<()> {
        let (handle, Shared { library, raw, .. }) = (self.live()?, &*self.0);
        // Sound: addresses of device memory of these sizes.
        library.check("ncclAllGather", unsafe {
            (library.functions.all_gather)(
                from as *const c_void,
                to as *mut c_void,
                n,
                BF16,
                *handle,
                raw.stream as *mut c_void,
            )
        })
    }

    /// to [n] = the sum of every rank's from [n], in bf16 and NCCL's order.
    pub fn all_reduce(&self, from: u64, to: u64, n: usize) -> Result<()> {
        let (handle, Shared { library, raw, .. }) = (self.live()?, &*self.0);
        // Sound: addresses of device memory of this size.
        library.check("ncclAllReduce", unsafe {
            (library.functions.all_reduce)(
                from as *const c_void,
                to as *mut c_void,
                n,
                BF16,
                SUM,
                *handle,
                raw.stream as *mut c_void,
            )
        })
    }

    /// What went wrong on NCCL's side since.
    pub fn check(&self) -> Result<()> {
        let (handle, library) = (self.live()?, &self.0.library);
        let mut error = 0;
        // Sound: writes one integer.
        library.check("ncclCommGetAsyncError", unsafe { (library.functions.async_error)(*handle, &mut error) })?;
        library.check("NCCL's own threads", error)
    }

    pub fn aborter(&self) -> Aborter {
        Aborter(self.0.clone())
    }

    /// Gives up on ranks that are gone. No graph uses it.
    pub fn abort(self) {
        self.0.abort(self.0.take());
    }

    fn live(&self) -> Result<MutexGuard<'_, Handle>> {
        let handle = self.0.lock();
        match handle.is_null() {
            true => Err(machine("NCCL was stopped: another rank failed")),
            false => Ok(handle),
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let handle = self.0.take();
        if !handle.is_null() {
            // Sound: last use; nothing is queued any more.
            unsafe { (self.0.library.functions.destroy)(handle) };
        }
    }
}
