//! The CUDA driver behind calls that are hard to misuse: contexts, memory, kernels, graphs, events.
//!
//! The driver is opened at run time. cudarc panics where a library or a symbol is missing, so `driver_version` asks first. Our own layer is
//! used instead of cudarc's slices because those record events of their own, which a stream capture does not allow. All objects belong to
//! the context that is current on the thread that made them; nothing here is Send.
use crate::error::machine;
use anyhow::{Context as _, Result};
use cudarc::driver::{result, sys};
use std::ffi::{c_void, CString};
use std::marker::PhantomData;
use std::{mem, ptr};

/// The first driver whose calls we all use (cuFuncLoad, graph edges with PDL): CUDA 12.4.
pub const NEEDED_DRIVER: i32 = 12040;

/// Checks that a driver is installed and new enough; its CUDA version as 1000 * major + 10 * minor.
pub fn driver_version() -> Result<i32> {
    // Sound: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(machine("no NVIDIA driver: libcuda.so.1 was not found; install the driver, or use --device cpu"));
    }
    let mut version = 0;
    // Sound: writes one integer; needs no initialisation.
    let asked = unsafe { sys::cuDriverGetVersion(&mut version) };
    if asked != sys::CUresult::CUDA_SUCCESS {
        return Err(machine(format!("the NVIDIA driver does not answer ({asked:?}); reinstall it, or use --device cpu")));
    }
    if version < NEEDED_DRIVER {
        return Err(machine(format!(
            "the NVIDIA driver supports CUDA {}.{}, this program needs {}.{}: update the driver, or use --device cpu",
            version / 1000,
            version % 1000 / 10,
            NEEDED_DRIVER / 1000,
            NEEDED_DRIVER % 1000 / 10
        )));
    }
    result::init().map_err(|e| machine(format!("the NVIDIA driver is installed but finds no usable GPU ({e})")))?;
    Ok(version)
}

pub fn device_count() -> Result<usize> {
    driver_version()?;
    Ok(result::device::get_count()? as usize)
}

/// One GPU with its primary context current on this thread, and the stream everything runs on.
pub struct Gpu {
    pub ordinal: usize,
    pub name: String,
    /// Compute capability, 90 for 9.0.
    pub sm: u32,
    pub n_sms: usize,
    device: sys::CUdevice,
    pub stream: sys::CUstream,
    _not_send: PhantomData<*mut ()>,
}

impl Gpu {
    pub fn open(ordinal: usize) -> Result<Gpu> {
        let count = device_count()?;
        if ordinal >= count {
            return Err(machine(format!("GPU {ordinal} was asked for, this machine has {count} (0 to {})", count.saturating_sub(1))));
        }
        let device = result::device::get(ordinal as i32)?;
        // Sound: the device exists; released in Drop.
        let context = unsafe { result::primary_ctx::retain(device)? };
        unsafe { result::ctx::set_current(context)? };
        let attribute = |a| -> Result<i32> { Ok(unsafe { result::device::get_attribute(device, a)? }) };
        use sys::CUdevice_attribute::*;
        let sm = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? + attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let n_sms = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        Ok(Gpu { ordinal, name: result::device::get_name(device)?, sm: sm as u32, n_sms, device, stream, _not_send: PhantomData })
    }

    /// Free and total device memory in bytes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        Ok(result::mem_get_info()?)
    }

    pub fn attribute(&self, a: sys::CUdevice_attribute) -> Result<i32> {
        // Sound: the device exists.
        Ok(unsafe { result::device::get_attribute(self.device, a)? })
    }

    pub fn synchronize(&self) -> Result<()> {
        // Sound: our own stream.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|e| machine(format!("GPU {} stopped: {e}", self.ordinal)))
    }

    /// Launches `kernel` with one params struct. `early` lets its blocks start while the previous kernel drains (programmatic dependent
    /// launch): the kernel waits for its inputs itself.
    pub fn launch<P: Params>(&self, kernel: &Kernel, launch: Launch, params: &P) -> Result<()> {
        assert_eq!(kernel.params_bytes, mem::size_of::<P>(), "params of {}", kernel.name);
        // Sound: zero is a valid attribute; the id and value below complete it.
        let mut attribute: sys::CUlaunchAttribute = unsafe { mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid.0,
            gridDimY: launch.grid.1,
            gridDimZ: launch.grid.2,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: self.stream,
            attrs: &mut attribute,
            numAttrs: launch.early as u32,
        };
        let mut args = [params as *const P as *mut c_void];
        // Sound: the params struct has the size the kernel was declared with, and its pointers are device memory of this machine.
        unsafe { sys::cuLaunchKernelEx(&config, kernel.function, args.as_mut_ptr(), ptr::null_mut()).result() }
            .with_context(|| format!("launch {} with {launch:?}", kernel.name))
    }

    /// Captures what `body` launches into a graph. What `body` allocates or waits for fails.
    pub fn capture(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // Sound: our own stream; every begin is followed by its end.
        unsafe { result::stream::begin_capture(self.stream, mode)? };
        let done = body();
        let graph = unsafe { result::stream::end_capture(self.stream) };
        done?;
        let graph = graph?;
        let mut exec = ptr::null_mut();
        // Sound: `graph` was just made.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result() }.context("instantiate the graph")?;
        let graph = Graph { graph, exec };
        unsafe { sys::cuGraphUpload(exec, self.stream).result() }.context("upload the graph")?;
        Ok(graph)
    }

    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // Sound: graph and stream are alive.
        unsafe { result::graph::launch(graph.exec, self.stream) }.context("launch a graph")
    }

    pub fn event(&self) -> Result<Event> {
        Ok(Event(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?))
    }

    pub fn record(&self, event: &Event) -> Result<()> {
        // Sound: event and stream are alive.
        Ok(unsafe { result::event::record(event.0, self.stream)? })
    }

    /// Host memory to device memory, ordered with the stream. `source` must stay as it is until the stream gets there: pinned memory, or
    /// followed by `synchronize`.
    pub fn upload<T: Copy>(&self, source: &[T], to: u64) -> Result<()> {
        // Sound: the caller's `to` has room (Memory::at checks).
        Ok(unsafe { result::memcpy_htod_async(to, source, self.stream)? })
    }

    pub fn download<T: Copy + Default>(&self, from: u64, n: usize) -> Result<Vec<T>> {
        let mut out = vec![T::default(); n];
        // Sound: waits before `out` is read.
        unsafe { result::memcpy_dtoh_async(&mut out, from, self.stream)? };
        self.synchronize()?;
        Ok(out)
    }

    pub fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<()> {
        // Sound: the caller's memory.
        Ok(unsafe { result::memset_d8_async(to, byte, bytes, self.stream)? })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Sound: last use of the stream; errors at exit have nobody to tell.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// A params struct of a kernel: `#[repr(C)]`, the twin of the struct of the same name in kernels/params.h, checked by size.
///
/// # Safety
/// The layout must be that of the C++ struct.
pub unsafe trait Params: Copy {}

#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub grid: (u32, u32, u32),
    pub block: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    pub early: bool,
}

/// A loaded fatbin.
pub struct Module(sys::CUmodule);

impl Module {
    pub fn load(image: &[u8], what: &str) -> Result<Module> {
        // Sound: the image is a fatbin of ours, copied by the driver.
        let module = unsafe { result::module::load_data(image.as_ptr() as *const c_void) };
        Ok(Module(module.map_err(|e| machine(format!("the GPU's driver cannot load the kernels of {what} ({e})")))?))
    }

    /// Resolves and loads a kernel now: lazily, its first launch could fall into a capture.
    pub fn kernel<P: Params>(&self, name: &'static str, shared: u32) -> Result<Kernel> {
        let symbol = CString::new(name).expect("no NUL in our names");
        // Sound: the module is alive; functions live as long as it.
        let function = unsafe { result::module::get_function(self.0, symbol) }.with_context(|| format!("kernel {name}"))?;
        unsafe { sys::cuFuncLoad(function).result() }.with_context(|| format!("load kernel {name}"))?;
        if shared > 48 << 10 {
            let a = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            unsafe { sys::cuFuncSetAttribute(function, a, shared as i32).result() }.with_context(|| format!("shared memory of {name}"))?;
        }
        Ok(Kernel { name, function, params_bytes: mem::size_of::<P>() })
    }
}

pub struct Kernel {
    pub name: &'static str,
    function: sys::CUfunction,
    params_bytes: usize,
}

/// Device memory, freed on drop. Bytes.
pub struct Memory {
    start: u64,
    bytes: usize,
}

impl Memory {
    pub fn new(bytes: usize) -> Result<Memory> {
        let bytes = bytes.max(16);
        // Sound: freed once, in Drop.
        Ok(Memory { start: unsafe { result::malloc_sync(bytes)? }, bytes })
    }

    /// Zeroed.
    pub fn zeroed(gpu: &Gpu, bytes: usize) -> Result<Memory> {
        let memory = Memory::new(bytes)?;
        gpu.fill(memory.start, 0, memory.bytes)?;
        Ok(memory)
    }

    pub fn of<T: Copy>(gpu: &Gpu, data: &[T]) -> Result<Memory> {
        let memory = Memory::new(mem::size_of_val(data))?;
        gpu.upload(data, memory.start)?;
        gpu.synchronize()?;
        Ok(memory)
    }

    /// Device address `offset` bytes in.
    pub fn at(&self, offset: usize) -> u64 {
        assert!(offset <= self.bytes, "offset {offset} in {} bytes", self.bytes);
        self.start + offset as u64
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Sound: allocated in `new`, nobody else frees it.
        let _ = unsafe { result::free_sync(self.start) };
    }
}

/// Page-locked host memory that the GPU can read and write: [n] of T.
pub struct Pinned<T> {
    start: *mut T,
    n: usize,
}

impl<T: Copy> Pinned<T> {
    pub fn zeroed(n: usize) -> Result<Pinned<T>> {
        let bytes = n * mem::size_of::<T>();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // Sound: zeroed before anybody reads; zero is valid for the plain structs used here.
        let start = unsafe { result::malloc_host(bytes, flags)? } as *mut T;
        unsafe { ptr::write_bytes(start, 0, n) };
        Ok(Pinned { start, n })
    }

    pub fn device(&self) -> Result<u64> {
        let mut at = 0;
        // Sound: our own allocation.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut at, self.start as *mut c_void, 0).result()? };
        Ok(at)
    }

    /// Reads what the GPU wrote: volatile, because it changes under us.
    pub fn read(&self, i: usize) -> T {
        assert!(i < self.n);
        // Sound: in bounds.
        unsafe { ptr::read_volatile(self.start.add(i)) }
    }

    pub fn write(&mut self, i: usize, value: T) {
        assert!(i < self.n);
        // Sound: in bounds.
        unsafe { ptr::write_volatile(self.start.add(i), value) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // Sound: n elements; the caller orders GPU copies from it by events.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.n) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // Sound: allocated in `zeroed`.
        let _ = unsafe { result::free_host(self.start as *mut c_void) };
    }
}

pub struct Event(sys::CUevent);

impl Event {
    pub fn wait(&self) -> Result<()> {
        // Sound: alive.
        Ok(unsafe { result::event::synchronize(self.0)? })
    }

    /// Milliseconds from this event to `later`.
    pub fn ms_until(&self, later: &Event) -> Result<f32> {
        // Sound: both alive.
        Ok(unsafe { result::event::elapsed(self.0, later.0)? })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // Sound: alive until here.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

pub struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

impl Graph {
    pub fn nodes(&self) -> usize {
        let mut n = 0;
        // Sound: asks for the count only.
        let _ = unsafe { sys::cuGraphGetNodes(self.graph, ptr::null_mut(), &mut n) };
        n
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Sound: alive until here.
        unsafe {
            let _ = sys::cuGraphExecDestroy(self.exec);
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}
