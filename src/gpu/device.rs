//! One GPU as the engine sees it: memory, kernels, graphs, events, all freed in the right order.
//!
//! Two drivers stand behind it: cuda.rs, and shim.rs, which runs the same kernels compiled by g++ (tests on machines
//! without a GPU). Nothing here is Send: one thread per GPU makes and uses its own.
use anyhow::{Context, Result};
use std::cell::Cell;
use std::mem;
use std::rc::Rc;

/// What a driver can do. Addresses are device addresses; handles are the driver's own.
pub trait Driver {
    fn info(&self) -> &Info;
    /// Free and total device memory in bytes.
    fn memory(&self) -> Result<(usize, usize)>;
    fn allocate(&self, bytes: usize) -> Result<u64>;
    fn free(&self, at: u64);
    /// Page-locked host memory, zeroed: host pointer and device address.
    fn allocate_pinned(&self, bytes: usize) -> Result<(*mut u8, u64)>;
    fn free_pinned(&self, at: *mut u8);
    /// Ordered with the stream. `from` must stay as it is until the stream gets there.
    fn upload(&self, from: &[u8], to: u64) -> Result<()>;
    /// Waits for the stream, then copies.
    fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;
    fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<()>;
    /// Resolves and loads a kernel; `shared` is the most dynamic shared memory it is launched with.
    fn kernel(&self, name: &str, shared: u32) -> Result<u64>;
    fn launch(&self, kernel: u64, launch: Launch, params: &[u8]) -> Result<()>;
    fn begin_capture(&self) -> Result<()>;
    fn end_capture(&self) -> Result<u64>;
    fn replay(&self, graph: u64) -> Result<()>;
    fn destroy_graph(&self, graph: u64);
    fn synchronize(&self) -> Result<()>;
    /// Whether the stream has done all; waits for nothing.
    fn is_idle(&self) -> Result<bool>;
    fn create_event(&self) -> Result<u64>;
    fn record_event(&self, event: u64) -> Result<()>;
    fn wait_event(&self, event: u64) -> Result<()>;
    fn elapsed_ms(&self, from: u64, to: u64) -> Result<f32>;
    fn destroy_event(&self, event: u64);
    /// Makes the memory of GPU `ordinal` of this process readable and writable for this GPU's kernels.
    fn reach(&self, ordinal: usize) -> Result<()>;
    /// The driver's own handles, for libraries that queue work themselves; None where there are none.
    fn raw(&self) -> Option<Raw>;
}

#[derive(Clone, Copy, Debug)]
pub struct Raw {
    pub context: u64,
    pub stream: u64,
}

#[derive(Clone, Debug)]
pub struct Info {
    /// Number of the GPU in this process.
    pub ordinal: usize,
    /// PCI address, as in sysfs (0000:17:00.0).
    pub bus_id: String,
    /// GPU-xxxxxxxx-..., as nvidia-smi prints it.
    pub uuid: String,
    pub name: String,
    /// Compute capability, 90 for 9.0.
    pub sm: u32,
    pub n_sms: usize,
    /// The highest clocks of SMs and memory in MHz; 0 where nobody says.
    pub clock_mhz: usize,
    pub memory_clock_mhz: usize,
    /// Width of the memory's bus; 0 where nobody says.
    pub memory_bits: usize,
    /// CUDA version of the driver, 1000 * major + 10 * minor.
    pub driver: i32,
}

impl Info {
    /// Bytes per second of the memory, which moves data twice a clock; 0 where nobody says.
    pub fn memory_rate(&self) -> f64 {
        2e6 * self.memory_clock_mhz as f64 * self.memory_bits as f64 / 8.0
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub grid: (u32, u32, u32),
    pub block: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// The blocks may start while the previous kernel drains (programmatic dependent launch): the kernel waits for its
    /// inputs itself.
    pub early: bool,
}

/// A params struct of a kernel: `#[repr(C)]`, the twin of the struct of the same name in kernels/params.h.
///
/// # Safety
/// The layout must be that of the C++ struct, without padding.
pub unsafe trait Params: Copy {}

#[derive(Clone)]
pub struct Gpu {
    driver: Rc<dyn Driver>,
    /// Device and pinned allocations so far: there are none between the first and the last token.
    allocations: Rc<Cell<usize>>,
}

impl Gpu {
    pub fn new(driver: Rc<dyn Driver>) -> Gpu {
        Gpu { driver, allocations: Rc::default() }
    }

    /// For a driver that stands before this one.
    pub fn driver(&self) -> Rc<dyn Driver> {
        self.driver.clone()
    }

    /// How often device or page-locked memory was allocated, by all clones together.
    pub fn allocations(&self) -> usize {
        self.allocations.get()
    }

    pub fn info(&self) -> &Info {
        self.driver.info()
    }

    pub fn memory(&self) -> Result<(usize, usize)> {
        self.driver.memory()
    }

    /// Zeroed.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        let bytes = bytes.max(16);
        self.allocations.set(self.allocations.get() + 1);
        let start = self.driver.allocate(bytes)?;
        let memory = Memory { driver: self.driver.clone(), start, bytes };
        self.driver.fill(start, 0, bytes)?;
        Ok(memory)
    }

    /// Device memory with a copy of `data`.
    pub fn store<T: bytemuck::NoUninit>(&self, data: &[T]) -> Result<Memory> {
        let memory = self.allocate(mem::size_of_val(data))?;
        self.driver.upload(bytemuck::cast_slice(data), memory.start)?;
        self.driver.synchronize()?;
        Ok(memory)
    }

    /// Zeroed.
    pub fn pinned<T: bytemuck::AnyBitPattern>(&self, n: usize) -> Result<Pinned<T>> {
        self.allocations.set(self.allocations.get() + 1);
        let (start, device) = self.driver.allocate_pinned(n.max(1) * mem::size_of::<T>())?;
        Ok(Pinned { driver: self.driver.clone(), start: start as *mut T, device, n })
    }

    /// Copies host memory to the device, ordered with the stream: `from` must be pinned and stay as it is until the
    /// stream gets there, or be followed by `synchronize`.
    pub fn upload<T: bytemuck::NoUninit>(&self, from: &[T], to: u64) -> Result<()> {
        self.driver.upload(bytemuck::cast_slice(from), to)
    }

    pub fn download<T: bytemuck::Pod>(&self, from: u64, n: usize) -> Result<Vec<T>> {
        let mut out = vec![T::zeroed(); n];
        self.driver.download(from, bytemuck::cast_slice_mut(&mut out))?;
        Ok(out)
    }

    pub fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<()> {
        self.driver.fill(at, byte, bytes)
    }

    pub fn kernel(&self, name: &'static str, shared: u32) -> Result<Kernel> {
        let handle = self.driver.kernel(name, shared).with_context(|| format!("kernel {name}"))?;
        Ok(Kernel { name, handle })
    }

    pub fn launch<P: Params>(&self, kernel: &Kernel, launch: Launch, params: &P) -> Result<()> {
        // Sound: Params has no padding, so every byte is initialised.
        let bytes = unsafe { std::slice::from_raw_parts(params as *const P as *const u8, mem::size_of::<P>()) };
        self.launch_bytes(kernel, launch, bytes)
    }

    /// `params` is the params struct of the kernel.
    pub fn launch_bytes(&self, kernel: &Kernel, launch: Launch, params: &[u8]) -> Result<()> {
        self.driver
            .launch(kernel.handle, launch, params)
            .with_context(|| format!("launch {} with {launch:?}", kernel.name))
    }

    /// Captures what `body` launches into a graph. Allocating or waiting inside fails.
    pub fn capture(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.driver.begin_capture()?;
        let done = body();
        let graph = self.driver.end_capture();
        done?;
        Ok(Graph { driver: self.driver.clone(), handle: graph? })
    }

    pub fn replay(&self, graph: &Graph) -> Result<()> {
        self.driver.replay(graph.handle)
    }

    pub fn synchronize(&self) -> Result<()> {
        self.driver.synchronize()
    }

    pub fn is_idle(&self) -> Result<bool> {
        self.driver.is_idle()
    }

    pub fn reach(&self, ordinal: usize) -> Result<()> {
        self.driver.reach(ordinal)
    }

    pub fn raw(&self) -> Option<Raw> {
        self.driver.raw()
    }

    pub fn event(&self) -> Result<Event> {
        Ok(Event { driver: self.driver.clone(), handle: self.driver.create_event()? })
    }

    pub fn record(&self, event: &Event) -> Result<()> {
        self.driver.record_event(event.handle)
    }

    /// Milliseconds of `body`'s work on the stream.
    pub fn time(&self, body: impl FnOnce() -> Result<()>) -> Result<f32> {
        let (start, end) = (self.event()?, self.event()?);
        self.record(&start)?;
        body()?;
        self.record(&end)?;
        end.wait()?;
        start.ms_until(&end)
    }
}

pub struct Kernel {
    pub name: &'static str,
    handle: u64,
}

/// Device memory, freed on drop.
pub struct Memory {
    driver: Rc<dyn Driver>,
    start: u64,
    bytes: usize,
}

impl Memory {
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
        self.driver.free(self.start);
    }
}

/// Page-locked host memory that the GPU reads and writes: [n] of T.
pub struct Pinned<T> {
    driver: Rc<dyn Driver>,
    start: *mut T,
    device: u64,
    n: usize,
}

impl<T: bytemuck::AnyBitPattern> Pinned<T> {
    /// Its address for kernels.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Reads what the GPU may be writing.
    pub fn read(&self, i: usize) -> T {
        assert!(i < self.n);
        // Sound: in bounds, and every bit pattern is a T.
        unsafe { std::ptr::read_volatile(self.start.add(i)) }
    }

    /// Writes what the GPU may be reading.
    pub fn write(&self, i: usize, value: T) {
        assert!(i < self.n);
        // Sound: in bounds.
        unsafe { std::ptr::write_volatile(self.start.add(i), value) }
    }

    /// What the host wrote.
    pub fn slice(&self) -> &[T] {
        // Sound: n elements that only the host writes while it reads them so.
        unsafe { std::slice::from_raw_parts(self.start, self.n) }
    }

    /// The caller orders GPU copies from and to it by events.
    pub fn slice_mut(&mut self) -> &mut [T] {
        // Sound: n elements, exclusively borrowed on the host.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.n) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        self.driver.free_pinned(self.start as *mut u8);
    }
}

pub struct Graph {
    driver: Rc<dyn Driver>,
    handle: u64,
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.driver.destroy_graph(self.handle);
    }
}

pub struct Event {
    driver: Rc<dyn Driver>,
    handle: u64,
}

impl Event {
    pub fn wait(&self) -> Result<()> {
        self.driver.wait_event(self.handle)
    }

    /// Milliseconds from this event to `later`.
    pub fn ms_until(&self, later: &Event) -> Result<f32> {
        self.driver.elapsed_ms(self.handle, later.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.driver.destroy_event(self.handle);
    }
}
