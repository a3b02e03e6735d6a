//! A driver that runs the kernels on the CPU: libvolley_shim.so holds every .cu file compiled by g++ (scripts/shim.sh).
//!
//! For tests: the whole engine, its memory, graphs and launches, on a machine without a GPU. Device memory is host
//! memory; a graph is the list of its launches. Fresh memory is filled with NaN, so that reading what nobody wrote
//! shows.
use super::device::{Driver, Info, Launch, Raw};
use crate::error::machine;
use anyhow::{bail, ensure, Context, Result};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void, CString};
use std::path::Path;
use std::time::Instant;

type ShimLaunch =
    unsafe extern "C" fn(*const c_char, c_uint, c_uint, c_uint, c_uint, c_uint, *const c_void, c_uint) -> c_int;

pub struct Shim {
    info: Info,
    library: libloading::Library,
    state: RefCell<State>,
    asked: Cell<(usize, usize)>,
}

#[derive(Default)]
struct State {
    names: Vec<CString>,
    memory: BTreeMap<u64, Box<[u128]>>,
    capturing: Option<Vec<Recorded>>,
    graphs: Vec<Vec<Recorded>>,
    events: Vec<Option<Instant>>,
}

#[derive(Clone)]
struct Recorded {
    kernel: u64,
    launch: Launch,
    params: Vec<u64>, // whole words, so that they are aligned
    params_bytes: usize,
}

impl Shim {
    pub fn open(library: &Path) -> Result<Shim> {
        // Sound: our own library; its constructors only fill a table of kernels.
        let library = unsafe { libloading::Library::new(library) }
            .map_err(|e| machine(format!("{}: {e}; scripts/shim.sh makes it", library.display())))?;
        let info = Info {
            ordinal: 0,
            bus_id: "shim".into(),
            uuid: "GPU-shim".into(),
            name: "CPU shim".into(),
            sm: 90,
            n_sms: 4,
            clock_mhz: 0,
            memory_clock_mhz: 0,
            memory_bits: 0,
            driver: 0,
        };
        Ok(Shim { info, library, state: RefCell::new(State::default()), asked: Cell::new((0, 0)) })
    }

    /// How many kernels the host launched by themselves, and how many graphs.
    pub fn asked(&self) -> (usize, usize) {
        self.asked.get()
    }

    fn run(&self, recorded: &Recorded) -> Result<()> {
        // Sound: the type is that of the function in kernels/shim/shim.cpp.
        let launch = unsafe { self.library.get::<ShimLaunch>(b"volley_shim_launch\0") }?;
        let name = self.state.borrow().names[recorded.kernel as usize].clone();
        let (g, params) = (recorded.launch.grid, recorded.params.as_ptr() as *const c_void);
        // Sound: the params hold addresses of memory that this driver gave out.
        let code = unsafe {
            launch(
                name.as_ptr(),
                g.0,
                g.1,
                g.2,
                recorded.launch.block,
                recorded.launch.shared,
                params,
                recorded.params_bytes as c_uint,
            )
        };
        match code {
            0 => Ok(()),
            1 => bail!("the shim has no kernel {name:?}"),
            2 => bail!("the shim's params of {name:?} have another size than {} bytes", recorded.params_bytes),
            _ => bail!("{} threads are more than {name:?} is compiled for", recorded.launch.block),
        }
    }

    fn allocate_words(&self, bytes: usize, word: u128) -> u64 {
        let memory = vec![word; bytes.div_ceil(16)].into_boxed_slice();
        let at = memory.as_ptr() as u64;
        self.state.borrow_mut().memory.insert(at, memory);
        at
    }
}

impl Driver for Shim {
    fn info(&self) -> &Info {
        &self.info
    }

    fn memory(&self) -> Result<(usize, usize)> {
        Ok((8 << 30, 8 << 30))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        ensure!(self.state.borrow().capturing.is_none(), "allocation inside a capture");
        Ok(self.allocate_words(bytes, u128::MAX))
    }

    fn free(&self, at: u64) {
        self.state.borrow_mut().memory.remove(&at);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<(*mut u8, u64)> {
        let at = self.allocate_words(bytes, 0);
        Ok((at as *mut u8, at))
    }

    fn free_pinned(&self, at: *mut u8) {
        self.free(at as u64);
    }

    fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        ensure!(self.state.borrow().capturing.is_none(), "copy inside a capture");
        // Sound: the engine's addresses are inside memory that this driver gave out.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        ensure!(self.state.borrow().capturing.is_none(), "copy inside a capture");
        // Sound: as in upload.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<()> {
        // Sound: as in upload.
        unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes) };
        Ok(())
    }

    fn kernel(&self, name: &str, _shared: u32) -> Result<u64> {
        let mut state = self.state.borrow_mut();
        state.names.push(CString::new(name)?);
        Ok(state.names.len() as u64 - 1)
    }

    fn launch(&self, kernel: u64, launch: Launch, params: &[u8]) -> Result<()> {
        let mut words = vec![0u64; params.len().div_ceil(8)];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..params.len()].copy_from_slice(params);
        let recorded = Recorded { kernel, launch, params: words, params_bytes: params.len() };
        if let Some(list) = &mut self.state.borrow_mut().capturing {
            list.push(recorded);
            return Ok(());
        }
        let (launches, graphs) = self.asked.get();
        self.asked.set((launches + 1, graphs));
        self.run(&recorded)
    }

    fn begin_capture(&self) -> Result<()> {
        self.state.borrow_mut().capturing = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<u64> {
        let mut state = self.state.borrow_mut();
        let list = state.capturing.take().context("no capture was begun")?;
        state.graphs.push(list);
        Ok(state.graphs.len() as u64 - 1)
    }

    fn replay(&self, graph: u64) -> Result<()> {
        let (launches, graphs) = self.asked.get();
        self.asked.set((launches, graphs + 1));
        let list = self.state.borrow().graphs[graph as usize].clone();
        list.iter().try_for_each(|recorded| self.run(recorded))
    }

    fn destroy_graph(&self, graph: u64) {
        self.state.borrow_mut().graphs[graph as usize] = Vec::new();
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        Ok(true)
    }

    fn create_event(&self) -> Result<u64> {
        let mut state = self.state.borrow_mut();
        state.events.push(None);
        Ok(state.events.len() as u64 - 1)
    }

    fn record_event(&self, event: u64) -> Result<()> {
        self.state.borrow_mut().events[event as usize] = Some(Instant::now());
        Ok(())
    }

    fn wait_event(&self, _event: u64) -> Result<()> {
        Ok(())
    }

    fn elapsed_ms(&self, from: u64, to: u64) -> Result<f32> {
        let state = self.state.borrow();
        let at = |e: u64| state.events[e as usize].context("an event that was not recorded");
        Ok((at(to)? - at(from)?).as_secs_f32() * 1e3)
    }

    fn destroy_event(&self, _event: u64) {}

    fn reach(&self, _ordinal: usize) -> Result<()> {
        Ok(()) // all of it is this process's memory
    }

    fn raw(&self) -> Option<Raw> {
        None
    }
}
