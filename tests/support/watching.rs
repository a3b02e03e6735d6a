//! A driver before another one that sees what is captured: it counts the launches of graphs, and refuses those of some
//! passes, as a driver without room for them would. Each test binary uses a part of this module.
#![allow(dead_code)]
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use volley::gpu::device::{Driver, Gpu, Info, Launch, Raw};
use volley::model::plan::Pass;

thread_local! {
    /// Launches of the graphs that were captured on this thread, in order.
    static GRAPHS: RefCell<Vec<usize>> = RefCell::default();
}

/// Launches of the last `n` graphs that were captured on this thread, in order.
pub fn last_graphs(n: usize) -> Vec<usize> {
    GRAPHS.with_borrow(|graphs| graphs[graphs.len() - n..].to_vec())
}

pub struct Watching {
    driver: Rc<dyn Driver>,
    /// Whether the graph of a pass of the target model is refused.
    refuse: fn(Pass) -> bool,
    names: RefCell<HashMap<u64, String>>,
    /// Since the capture began: kernels, and blocks in x.
    captured: RefCell<Vec<(String, usize)>>,
}

/// Sees what is captured on `gpu`.
pub fn watched(gpu: &Gpu) -> Gpu {
    refusing(gpu, |_| false)
}

/// The same; graphs of these passes are refused.
pub fn refusing(gpu: &Gpu, refuse: fn(Pass) -> bool) -> Gpu {
    let driver = gpu.driver();
    Gpu::new(Rc::new(Watching { driver, refuse, names: RefCell::default(), captured: RefCell::default() }))
}

impl Watching {
    /// A pass of the target begins with a block of `embed` a row; what ends a prefill pass is no verify pass's.
    fn pass(&self) -> Option<Pass> {
        let captured = self.captured.borrow();
        match (captured.first()?, captured.last()?) {
            ((first, rows), (last, _)) if first == "embed" && last == "prefill_advance" => {
                Some(Pass::Prefill { rows: *rows })
            }
            ((first, width), _) if first == "embed" => Some(Pass::Verify { width: *width }),
            _ => None,
        }
    }
}

impl Driver for Watching {
    fn kernel(&self, name: &str, shared: u32) -> anyhow::Result<u64> {
        let kernel = self.driver.kernel(name, shared)?;
        self.names.borrow_mut().insert(kernel, name.into());
        Ok(kernel)
    }

    fn launch(&self, kernel: u64, launch: Launch, params: &[u8]) -> anyhow::Result<()> {
        self.captured.borrow_mut().push((self.names.borrow()[&kernel].clone(), launch.grid.0 as usize));
        self.driver.launch(kernel, launch, params)
    }

    fn begin_capture(&self) -> anyhow::Result<()> {
        self.captured.borrow_mut().clear();
        self.driver.begin_capture()
    }

    fn end_capture(&self) -> anyhow::Result<u64> {
        let graph = self.driver.end_capture()?;
        if self.pass().is_some_and(self.refuse) {
            self.driver.destroy_graph(graph);
            anyhow::bail!("refused by the test");
        }
        GRAPHS.with_borrow_mut(|graphs| graphs.push(self.captured.borrow().len()));
        Ok(graph)
    }

    fn info(&self) -> &Info {
        self.driver.info()
    }

    fn memory(&self) -> anyhow::Result<(usize, usize)> {
        self.driver.memory()
    }

    fn allocate(&self, bytes: usize) -> anyhow::Result<u64> {
        self.driver.allocate(bytes)
    }

    fn free(&self, at: u64) {
        self.driver.free(at)
    }

    fn allocate_pinned(&self, bytes: usize) -> anyhow::Result<(*mut u8, u64)> {
        self.driver.allocate_pinned(bytes)
    }

    fn free_pinned(&self, at: *mut u8) {
        self.driver.free_pinned(at)
    }

    fn upload(&self, from: &[u8], to: u64) -> anyhow::Result<()> {
        self.driver.upload(from, to)
    }

    fn download(&self, from: u64, to: &mut [u8]) -> anyhow::Result<()> {
        self.driver.download(from, to)
    }

    fn fill(&self, at: u64, byte: u8, bytes: usize) -> anyhow::Result<()> {
        self.driver.fill(at, byte, bytes)
    }

    fn replay(&self, graph: u64) -> anyhow::Result<()> {
        self.driver.replay(graph)
    }

    fn destroy_graph(&self, graph: u64) {
        self.driver.destroy_graph(graph)
    }

    fn synchronize(&self) -> anyhow::Result<()> {
        self.driver.synchronize()
    }

    fn is_idle(&self) -> anyhow::Result<bool> {
        self.driver.is_idle()
    }

    fn create_event(&self) -> anyhow::Result<u64> {
        self.driver.create_event()
    }

    fn record_event(&self, event: u64) -> anyhow::Result<()> {
        self.driver.record_event(event)
    }

    fn wait_event(&self, event: u64) -> anyhow::Result<()> {
        self.driver.wait_event(event)
    }

    fn elapsed_ms(&self, from: u64, to: u64) -> anyhow::Result<f32> {
        self.driver.elapsed_ms(from, to)
    }

    fn destroy_event(&self, event: u64) {
        self.driver.destroy_event(event)
    }

    fn reach(&self, ordinal: usize) -> anyhow::Result<()> {
        self.driver.reach(ordinal)
    }

    fn raw(&self) -> Option<Raw> {
        self.driver.raw()
    }
}
