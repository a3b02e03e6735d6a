//! The CUDA driver, opened at run time. The only file with driver calls.
//!
//! cudarc panics where a library or a symbol is missing, so `driver_version` asks first. Our own layer is used instead
//! of cudarc's slices because those record events of their own, which a stream capture does not allow.
use super::device::{Driver, Info, Launch, Raw};
use super::fatbins;
use crate::error::machine;
use anyhow::{Context, Result};
use cudarc::driver::{result, sys};
use std::cell::RefCell;
use std::ffi::{c_void, CString};
use std::ptr;

/// The first driver whose calls we all use (cuFuncLoad, graphs with programmatic edges): CUDA 12.4.
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
        return Err(machine(format!(
            "the NVIDIA driver does not answer ({asked:?}): reinstall it, or use --device cpu"
        )));
    }
    check_version(version)?;
    result::init().map_err(|e| {
        machine(format!("the NVIDIA driver is installed but finds no usable GPU ({e}): use --device cpu"))
    })?;
    Ok(version)
}

/// A driver that is too old is refused in one sentence.
pub fn check_version(version: i32) -> Result<()> {
    let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
    if version < NEEDED_DRIVER {
        return Err(machine(format!(
            "the NVIDIA driver supports CUDA {}, this program needs {}: update the driver, or use --device cpu",
            text(version),
            text(NEEDED_DRIVER)
        )));
    }
    Ok(())
}

/// Whether the embedded kernels run on compute capability `sm` (90 for 9.0): machine code for it, or portable code
/// (PTX) that is not newer.
pub fn check_sm(name: &str, sm: u32, archs: &[u32], ptx: u32) -> Result<()> {
    if archs.contains(&sm) || sm >= ptx {
        return Ok(());
    }
    let list: Vec<String> = archs.iter().map(|a| format!("{}.{}", a / 10, a % 10)).collect();
    Err(machine(format!(
        "{name} has compute capability {}.{}; this program has kernels for {} and portable code for {}.{} and later: use --device cpu",
        sm / 10,
        sm % 10,
        list.join(", "),
        ptx / 10,
        ptx % 10
    )))
}

pub fn device_count() -> Result<usize> {
    driver_version()?;
    Ok(result::device::get_count()? as usize)
}

/// PCI address of a GPU as sysfs writes it, 0000:17:00.0.
pub fn pci_bus_id(ordinal: usize) -> Result<String> {
    driver_version()?;
    bus_id(result::device::get(ordinal as i32)?)
}

fn bus_id(device: sys::CUdevice) -> Result<String> {
    let mut text = [0; 16];
    // Sound: writes at most the bytes of the array, with a 0 at the end.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, device).result()? };
    Ok(text.iter().take_while(|&&c| c != 0).map(|&c| (c as u8 as char).to_ascii_lowercase()).collect())
}

/// Whether a driver's call was refused: the machine's fault, not the user's.
pub fn is_driver_error(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<result::DriverError>())
}

/// One GPU: its primary context, current on this thread, the stream everything runs on, and the embedded kernels.
pub struct Cuda {
    info: Info,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// GPUs whose memory this one reaches; their contexts are held until the end.
    peers: RefCell<Vec<sys::CUdevice>>,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
}

impl Cuda {
    pub fn open(ordinal: usize) -> Result<Cuda> {
        let driver = driver_version()?;
        let count = device_count()?;
        if ordinal >= count {
            return Err(machine(format!(
                "GPU {ordinal}: expected one of the {count} of this machine, 0 to {}",
                count.saturating_sub(1)
            )));
        }
        let device = result::device::get(ordinal as i32)?;
        let name = result::device::get_name(device)?;
        // Sound: the device exists.
        let attribute = |a| -> Result<i32> { Ok(unsafe { result::device::get_attribute(device, a)? }) };
        use sys::CUdevice_attribute::*;
        let (major, minor) = (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let sm = (10 * major + minor) as u32;
        check_sm(&name, sm, fatbins::ARCHS, fatbins::PTX)?;
        let n_sms = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let clock_mhz = attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? as usize / 1000;
        let memory_clock_mhz = attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)? as usize / 1000;
        let memory_bits = attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)? as usize;
        fatbins::check()?;
        // Sound: released in Drop.
        let context = unsafe { result::primary_ctx::retain(device)? };
        unsafe { result::ctx::set_current(context)? };
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        let mut modules = Vec::new();
        for (file, image) in fatbins::FATBINS {
            // Sound: the image is a fatbin of ours; the driver copies it.
            let module = unsafe { result::module::load_data(image.as_ptr() as *const c_void) };
            modules.push(
                module.map_err(|e| machine(format!("the driver cannot load the kernels of {file} on {name} ({e})")))?,
            );
        }
        let uuid = result::device::get_uuid(device)?.bytes.map(|b| format!("{:02x}", b as u8)).concat();
        let uuid = format!("GPU-{}-{}-{}-{}-{}", &uuid[..8], &uuid[8..12], &uuid[12..16], &uuid[16..20], &uuid[20..]);
        let info = Info {
            ordinal,
            bus_id: bus_id(device)?,
            uuid,
            name,
            sm,
            n_sms,
            clock_mhz,
            memory_clock_mhz,
            memory_bits,
            driver,
        };
        Ok(Cuda { info, device, context, peers: RefCell::default(), stream, modules })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Sound: last use of each; errors at exit have nobody to tell.
        unsafe {
            for module in self.modules.drain(..) {
                let _ = result::module::unload(module);
            }
            let _ = result::stream::destroy(self.stream);
            for peer in self.peers.borrow_mut().drain(..) {
                let _ = result::primary_ctx::release(peer);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

// Every call below works on this object's own stream and on handles that it gave out itself; that is why the unsafe
// calls are sound unless a line says more.
impl Driver for Cuda {
    fn info(&self) -> &Info {
        &self.info
    }

    fn memory(&self) -> Result<(usize, usize)> {
        Ok(result::mem_get_info()?)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let at = unsafe { result::malloc_sync(bytes) };
        at.map_err(|e| {
            machine(format!(
                "{} bytes of GPU memory were refused ({e}): use a smaller --context, or another GPU",
                bytes
            ))
        })
    }

    fn free(&self, at: u64) {
        let _ = unsafe { result::free_sync(at) };
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<(*mut u8, u64)> {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let start = unsafe { result::malloc_host(bytes, flags) }
            .map_err(|e| machine(format!("{bytes} bytes of page-locked memory were refused ({e})")))?
            as *mut u8;
        let mut device = 0;
        // Sound: `bytes` bytes from `start` are ours.
        unsafe {
            ptr::write_bytes(start, 0, bytes);
            sys::cuMemHostGetDevicePointer_v2(&mut device, start as *mut c_void, 0).result()?;
        }
        Ok((start, device))
    }

    fn free_pinned(&self, at: *mut u8) {
        let _ = unsafe { result::free_host(at as *mut c_void) };
    }

    fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        unsafe { result::memcpy_htod_async(to, from, self.stream)? };
        Ok(())
    }

    fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // First wait: a copy to pageable memory waits inside the driver, where another rank of this GPU then cannot
        // launch what this stream waits for.
        self.synchronize()?;
        unsafe { result::memcpy_dtoh_async(to, from, self.stream)? };
        self.synchronize()
    }

    fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<()> {
        unsafe { result::memset_d8_async(at, byte, bytes, self.stream)? };
        Ok(())
    }

    fn kernel(&self, name: &str, shared: u32) -> Result<u64> {
        let symbol = CString::new(name)?;
        let found = self.modules.iter().find_map(|&m| unsafe { result::module::get_function(m, symbol.clone()) }.ok());
        let function = found.context("it is in none of the embedded fatbins")?;
        // Now: lazily, the first launch could fall into a capture.
        unsafe { sys::cuFuncLoad(function).result()? };
        if shared > 48 << 10 {
            let a = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            unsafe { sys::cuFuncSetAttribute(function, a, shared as i32).result() }
                .with_context(|| format!("{shared} bytes of shared memory"))?;
        }
        Ok(function as u64)
    }

    fn launch(&self, kernel: u64, launch: Launch, params: &[u8]) -> Result<()> {
        // Sound: zero is a valid attribute; the id and value below complete it.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
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
        let mut args = [params.as_ptr() as *mut c_void];
        // Sound: every kernel takes one params struct; callers pass the struct that its KERNEL row names.
        unsafe {
            sys::cuLaunchKernelEx(&config, kernel as sys::CUfunction, args.as_mut_ptr(), ptr::null_mut()).result()?
        };
        Ok(())
    }

    fn begin_capture(&self) -> Result<()> {
        unsafe {
            result::stream::begin_capture(self.stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?
        };
        Ok(())
    }

    fn end_capture(&self) -> Result<u64> {
        let graph = unsafe { result::stream::end_capture(self.stream)? };
        let mut exec = ptr::null_mut();
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result() };
        // The executable has a copy of all. NCCL counts both as users of a communicator, which it does not let go
        // before.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        made.context("instantiate the graph")?;
        unsafe { sys::cuGraphUpload(exec, self.stream).result().context("upload the graph")? };
        Ok(exec as u64)
    }

    fn replay(&self, graph: u64) -> Result<()> {
        unsafe { result::graph::launch(graph as sys::CUgraphExec, self.stream) }.context("launch a graph")
    }

    fn destroy_graph(&self, graph: u64) {
        let _ = unsafe { sys::cuGraphExecDestroy(graph as sys::CUgraphExec) };
    }

    fn synchronize(&self) -> Result<()> {
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|e| machine(format!("{} stopped: {e}", self.info.name)))
    }

    fn is_idle(&self) -> Result<bool> {
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.result().map(|()| true).map_err(|e| machine(format!("{} stopped: {e}", self.info.name))),
        }
    }

    fn create_event(&self) -> Result<u64> {
        Ok(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)? as u64)
    }

    fn record_event(&self, event: u64) -> Result<()> {
        unsafe { result::event::record(event as sys::CUevent, self.stream)? };
        Ok(())
    }

    fn wait_event(&self, event: u64) -> Result<()> {
        unsafe { result::event::synchronize(event as sys::CUevent) }
            .map_err(|e| machine(format!("{} stopped: {e}", self.info.name)))
    }

    fn elapsed_ms(&self, from: u64, to: u64) -> Result<f32> {
        Ok(unsafe { result::event::elapsed(from as sys::CUevent, to as sys::CUevent)? })
    }

    fn destroy_event(&self, event: u64) {
        let _ = unsafe { result::event::destroy(event as sys::CUevent) };
    }

    fn reach(&self, ordinal: usize) -> Result<()> {
        if ordinal == self.info.ordinal {
            return Ok(());
        }
        let peer = result::device::get(ordinal as i32)?;
        let mut can = 0;
        unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.device, peer).result()? };
        if can == 0 {
            return Err(machine(format!(
                "GPU {} ({}) cannot reach the memory of GPU {ordinal}: expected peer access, the driver refuses it; nvidia-smi topo -p2p rw shows why",
                self.info.ordinal, self.info.bus_id
            )));
        }
        self.peers.borrow_mut().push(peer);
        // Sound: the peer's context is released in Drop.
        let enabled = unsafe { sys::cuCtxEnablePeerAccess(result::primary_ctx::retain(peer)?, 0) };
        match enabled {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            e => Err(machine(format!("GPU {} cannot reach the memory of GPU {ordinal}: {e:?}", self.info.ordinal))),
        }
    }

    fn raw(&self) -> Option<Raw> {
        Some(Raw { context: self.context as u64, stream: self.stream as u64 })
    }
}

/// Makes the context of a driver's `raw` the current one of this thread, for a library's thread beside the rank's own.
pub fn enter(raw: Raw) -> Result<()> {
    // Sound: the context lives as long as the Cuda that gave it out.
    Ok(unsafe { result::ctx::set_current(raw.context as sys::CUcontext) }?)
}

/// Waits for the stream of a driver's `raw`, from a thread that has entered.
pub fn wait(raw: Raw) -> Result<()> {
    // Sound: as in enter.
    Ok(unsafe { result::stream::synchronize(raw.stream as sys::CUstream) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{exit_code, MACHINE};

    /// An error of the machine whose one line says all of `parts`.
    fn refused(result: Result<()>, parts: &[&str]) {
        let error = result.expect_err("it must be refused");
        let line = error.to_string();
        assert_eq!(exit_code(&error), MACHINE, "{line}");
        assert!(parts.iter().all(|part| line.contains(part)) && !line.contains('\n'), "{line}");
    }

    #[test]
    fn old_drivers_are_refused() {
        refused(check_version(11080), &["supports CUDA 11.8", "needs 12.4", "--device cpu"]);
        refused(check_version(NEEDED_DRIVER - 10), &["12.3"]);
        check_version(NEEDED_DRIVER).unwrap();
        check_version(13000).unwrap();
    }

    /// The rule: machine code where it was built, else portable code on every later chip, whatever its family; older
    /// chips never.
    #[test]
    fn chips_run_machine_code_or_later_portable_code() {
        let check = |sm| check_sm("A card", sm, &[90, 120], 90);
        for sm in [90, 100, 103, 120, 121, 130] {
            check(sm).unwrap();
        }
        for (sm, text) in [(75, "7.5"), (80, "8.0"), (89, "8.9")] {
            refused(check(sm), &["A card", text, "9.0, 12.0", "portable code for 9.0", "--device cpu"]);
        }
    }

    #[test]
    fn a_missing_driver_is_a_plain_sentence() {
        // Sound: only looks for the library.
        if unsafe { sys::is_culib_present() } {
            return;
        }
        refused(driver_version().map(drop), &["no NVIDIA driver", "libcuda.so.1", "--device cpu"]);
        refused(Cuda::open(0).map(drop), &["no NVIDIA driver"]);
    }
}
