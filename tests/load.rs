//! Weights from disk to the point where a GPU takes over: `Layout::place` over a driver that keeps what is uploaded and
//! computes nothing. Several staging buffers' worth, where tests with the kernels' twins load less than one; and how
//! fast a rank's share of a large checkpoint comes from a disk:
//!
//!     VOLLEY_LOAD=DIR VOLLEY_LOAD_SLICE=0/8 cargo test --test load -- --nocapture
mod support;

use anyhow::Result;
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;
use support::T0;
use tempfile::tempdir;
use volley::gpu::device::{Driver, Gpu, Info, Launch, Raw};
use volley::gpu::kernels::Kernels;
use volley::gpu::weights::{Layout, Source};
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::claim::claim;
use volley::model::config::Config;
use volley::model::plan::{self, Pass, Ranks};
use volley::model::table::Table;
use volley::model::weights::Weights;

/// Addresses that nobody reads; bytes of uploads, where they are kept, in their order.
struct Sink {
    info: Info,
    at: Cell<u64>,
    kept: Option<RefCell<Vec<u8>>>,
}

impl Driver for Sink {
    fn info(&self) -> &Info {
        &self.info
    }
    fn memory(&self) -> Result<(usize, usize)> {
        Ok((1 << 40, 1 << 40))
    }
    fn allocate(&self, bytes: usize) -> Result<u64> {
        let at = self.at.get();
        self.at.set((at + bytes as u64).next_multiple_of(256));
        Ok(at)
    }
    fn free(&self, _: u64) {}
    fn allocate_pinned(&self, bytes: usize) -> Result<(*mut u8, u64)> {
        // Never freed: tests load once or twice.
        Ok((Box::leak(vec![0u128; bytes.div_ceil(16)].into_boxed_slice()).as_mut_ptr().cast(), 0))
    }
    fn free_pinned(&self, _: *mut u8) {}
    fn upload(&self, from: &[u8], _: u64) -> Result<()> {
        if let Some(kept) = &self.kept {
            kept.borrow_mut().extend_from_slice(from);
        }
        Ok(())
    }
    fn download(&self, _: u64, _: &mut [u8]) -> Result<()> {
        unreachable!("nothing is computed")
    }
    fn fill(&self, _: u64, _: u8, _: usize) -> Result<()> {
        Ok(())
    }
    fn kernel(&self, _: &str, _: u32) -> Result<u64> {
        Ok(0)
    }
    fn launch(&self, _: u64, _: Launch, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn begin_capture(&self) -> Result<()> {
        Ok(())
    }
    fn end_capture(&self) -> Result<u64> {
        Ok(0)
    }
    fn replay(&self, _: u64) -> Result<()> {
        Ok(())
    }
    fn destroy_graph(&self, _: u64) {}
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn is_idle(&self) -> Result<bool> {
        Ok(true)
    }
    fn create_event(&self) -> Result<u64> {
        Ok(0)
    }
    fn record_event(&self, _: u64) -> Result<()> {
        Ok(())
    }
    fn wait_event(&self, _: u64) -> Result<()> {
        Ok(())
    }
    fn elapsed_ms(&self, _: u64, _: u64) -> Result<f32> {
        Ok(0.0)
    }
    fn destroy_event(&self, _: u64) {}
    fn reach(&self, _: usize) -> Result<()> {
        Ok(())
    }
    fn raw(&self) -> Option<Raw> {
        None
    }
}

/// Loads a rank's share; its weights, the bytes that were asked for, and what was uploaded if it is kept.
fn load(dir: &Path, read: Read, ranks: Ranks, keep: bool) -> (Weights, usize, Vec<u8>) {
    let info = Info {
        ordinal: 0,
        bus_id: "sink".into(),
        uuid: "GPU-sink".into(),
        name: "sink".into(),
        sm: 90,
        n_sms: 4,
        clock_mhz: 0,
        memory_clock_mhz: 0,
        memory_bits: 0,
        driver: 0,
    };
    let sink = Rc::new(Sink { info, at: Cell::new(0), kept: keep.then(RefCell::default) });
    let gpu = Gpu::new(sink.clone());
    let kernels = Kernels::load(&gpu).unwrap();
    let config = Config::open(dir).unwrap();
    let checkpoint = Checkpoint::open(dir, read).unwrap();
    let weights = claim(&Table::builtin().unwrap(), &config, &checkpoint).unwrap();
    let plan = plan::target(&config, Pass::Verify { width: 1 }, ranks, &[]).unwrap();
    let layout = Layout::of(&[&plan], config.vocab, Vec::new()).unwrap();
    let mut seen = 0;
    let mut progress = |done, total| {
        assert!(done >= seen && done <= total, "{done} of {total} after {seen}");
        seen = done;
    };
    layout.place(&gpu, &kernels, &Source::Checkpoint(&weights), None, ranks, &mut progress).unwrap();
    let bytes = checkpoint.reads().iter().map(|call| call.bytes).sum();
    let kept = sink.kept.as_ref().map(|kept| kept.borrow().clone()).unwrap_or_default();
    (weights, bytes, kept)
}

/// More than two staging buffers of 64 MiB: every byte of a share is uploaded once, in the order of the file's rows,
/// and no other.
#[test]
fn several_batches_hold_the_share() {
    let dir = tempdir().unwrap();
    T0::new()
        .shards(2)
        .set("hidden_size", 2048)
        .set("intermediate_size", 6144)
        .set("num_hidden_layers", 4)
        .write(dir.path());
    let ranks = Ranks::new(1, 2);
    for read in [Read::Mmap, Read::Plain] {
        let (weights, bytes, uploaded) = load(dir.path(), read, ranks, true);
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        for (_, weight) in weights.iter() {
            for (part, slice) in weight.parts.iter().zip(weight.part_of_rank(ranks.rank, ranks.count).unwrap()) {
                let to = if weight.cols == 1 { &mut vectors } else { &mut matrices };
                for row in slice.rows {
                    let at = to.len();
                    to.resize(at + 2 * slice.cols.len(), 0);
                    part.read_at(2 * (row * weight.cols + slice.cols.start), &mut to[at..]).unwrap();
                }
            }
        }
        assert!(matrices.len() > 128 << 20, "{} bytes are two batches at most", matrices.len());
        assert_eq!(bytes, matrices.len() + vectors.len());
        matrices.extend(vectors);
        assert!(
            uploaded == matrices,
            "{read:?}: {} bytes were uploaded, {} are the share; or their order differs",
            uploaded.len(),
            matrices.len()
        );
    }
}

/// Prints a time where a checkpoint is given.
#[test]
fn a_share_of_a_given_checkpoint_is_timed() {
    let (Some(dir), Ok(slice)) = (std::env::var_os("VOLLEY_LOAD"), std::env::var("VOLLEY_LOAD_SLICE")) else { return };
    let (rank, count) = slice.split_once('/').expect("RANK/COUNT");
    let start = Instant::now();
    let (_, bytes, _) =
        load(Path::new(&dir), Read::Auto, Ranks::new(rank.parse().unwrap(), count.parse().unwrap()), false);
    let seconds = start.elapsed().as_secs_f64();
    println!("slice {slice}: {:.3} GB in {seconds:.2} s, {:.2} GB/s", bytes as f64 / 1e9, bytes as f64 / 1e9 / seconds);
}
