//! Where everything that a launch points at lives: plain addresses, so that passes can be lowered without a GPU.
//! Whoever takes the memory keeps it: Machine of a GPU's, tests of none.
use super::matrix::{Absorbed, Matrix};
use super::params::{
    attention_chunks, DraftRows, SamplingParams, State, DRAFT_SCRATCH_BYTES, EXPERT_WORK_BYTES, LATENT_CHUNKS,
    ROUTER_SPLITS, SAMPLE_SCRATCH_BYTES,
};
use crate::model::config::Config;
use crate::model::draft::DraftModel;
use crate::model::plan::{
    BufferId, BufferKind, BufferName, KvLayout, Pass, Plan, Shard, Step, FEATURE_ROWS, MAX_WIDTH, PREFILL_ROWS,
};
use crate::model::role::WeightId;
use crate::model::rope::Rope;
use anyhow::{ensure, Context, Result};
use std::collections::BTreeMap;
use std::mem::size_of;

/// Device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    pub start: u64,
    pub bytes: usize,
}

impl Region {
    /// Device address `offset` bytes in.
    pub fn at(&self, offset: usize) -> u64 {
        assert!(offset <= self.bytes, "offset {offset} in {} bytes", self.bytes);
        self.start + offset as u64
    }
}

pub struct Arena {
    pub weights: Weights,
    /// By buffer name.
    pub buffers: BTreeMap<BufferName, Region>,
    /// Beside the buffers that are read through a norm.
    pub normed: BTreeMap<BufferName, Normed>,
    pub cache: Cache,
    pub capacity: usize,
    pub drafter: Option<DraftArena>,
    pub draft_scratch: Region,
    /// Of each 16 rows of a pass: sums of the router, [ROUTER_SPLITS, 16, n_experts] f32, and what experts_up makes of
    /// them.
    pub router_sums: Region,
    pub expert_work: Region,
    pub attention_partials: Region,
    pub attention_counters: Region,
    pub state: Region,
    pub options: Region,
    pub sample_scratch: Region,
    pub sample_list: Region,
    /// The head's maximum of each of its blocks, [MAX_WIDTH, head_blocks] f32 and their ids.
    pub max_value: Region,
    pub max_id: Region,
    pub counts: Region,
    pub bias: Region,
    pub history: Region,
    pub ring: u64,
}

/// What of the weights is in memory.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    pub matrices: BTreeMap<WeightId, Matrix>,
    pub absorbed: BTreeMap<WeightId, Absorbed>,
    /// Norm weights and biases, bf16; biases of routers, f32.
    pub vectors: BTreeMap<WeightId, u64>,
}

/// Rows of a buffer times a norm weight, [rows, dim] bf16, and the sums of squares of each 16 columns, f32. norm_rows
/// of prefill also leaves 1/rms, [rows] f32.
#[derive(Clone, Copy, Debug)]
pub struct Normed {
    pub rows: Region,
    pub squares: Region,
    pub inverse_rms: Region,
}

/// Keys [layer][kv head][capacity][head_dim], values [layer][kv head][head_dim][capacity], bf16, and the rotation of
/// their positions. A latent cache has keys only: [layer][capacity][kv_rank + rope_dim].
#[derive(Clone, Copy, Debug)]
pub struct Cache {
    pub keys: Region,
    pub values: Region,
    /// [rope_dim / 2] f32
    pub inverse_frequencies: Region,
    pub rope_factor: f32,
}

impl Cache {
    /// Bytes of keys and of values.
    pub fn bytes(kv: &KvLayout, capacity: usize) -> [usize; 2] {
        [kv.head_dim, kv.value_dim].map(|dim| 2 * kv.n_layers * kv.n_kv_heads * dim * capacity)
    }
}

/// What a drafter has of its own.
pub struct DraftArena {
    pub cache: Cache,
    /// Tapped features, [FEATURE_ROWS, dim] bf16 by position.
    pub ring: Region,
    pub rows: Region,
    /// Draft id to target id, i32; None: the same ids.
    pub target_ids: Option<Region>,
}

impl Arena {
    pub fn buffer(&self, plan: &Plan, id: BufferId) -> u64 {
        self.buffers[&plan.buffer(id).name].at(0)
    }

    pub fn normed(&self, plan: &Plan, id: BufferId) -> &Normed {
        &self.normed[&plan.buffer(id).name]
    }

    pub fn drafter(&self) -> Result<&DraftArena> {
        self.drafter.as_ref().context("no drafter is loaded")
    }
}

/// Bytes of one number of a buffer.
pub fn element_bytes(kind: BufferKind) -> usize {
    match kind {
        BufferKind::Logits | BufferKind::Stream | BufferKind::Routes => 4,
        BufferKind::Activation | BufferKind::Feature => 2,
    }
}

/// Most blocks of a skinny linear kernel: as many as stay on the GPU at once.
pub fn linear_blocks(n_sms: usize) -> usize {
    2 * n_sms
}

/// Floats of the partials, and counters, that a step of attention in a pass of `rows` over `chunks` chunks has.
fn attention_scratch(step: &Step, rows: usize, chunks: usize) -> [usize; 2] {
    match step {
        Step::Attention(a) => {
            let columns = (rows * a.n_heads / a.n_kv_heads).next_multiple_of(32);
            [a.n_kv_heads * chunks * columns * (a.head_dim + 2), a.n_kv_heads * MAX_WIDTH * a.n_heads]
        }
        Step::LatentAttend(a) => [chunks * rows * a.n_heads * (a.dims.kv_rank + 2), 0],
        _ => [0, 0],
    }
}

/// How much of everything the passes of a model need: known before any memory is taken.
pub struct Sizes {
    /// Positions of the caches.
    pub capacity: usize,
    /// KV chunks that cover them.
    pub chunks: usize,
    /// Some attention is latent: chunks are those of kernels/mla.cu.
    pub latent: bool,
    cache: CacheSizes,
    drafter: Option<DraftSizes>,
    /// Bytes.
    buffers: BTreeMap<BufferName, usize>,
    /// Numbers of a row.
    normed: BTreeMap<BufferName, usize>,
    partials: usize,
    counters: usize,
    router_sums: usize,
    expert_work: usize,
    vocab: usize,
    /// Of this rank.
    shard_vocab: usize,
    n_sms: usize,
}

struct CacheSizes {
    kv: KvLayout,
    inverse_frequencies: usize,
    rope_factor: f32,
}

struct DraftSizes {
    cache: CacheSizes,
    ring: usize,
    target_ids: Option<usize>,
}

/// Rows of the largest pass.
const ROWS: usize = PREFILL_ROWS[PREFILL_ROWS.len() - 1];

impl Sizes {
    /// `plans` are all of the target and of the drafter.
    pub fn of(
        config: &Config,
        drafter: Option<&DraftModel>,
        plans: &BTreeMap<Pass, Plan>,
        shard: Shard,
        context: usize,
        n_sms: usize,
    ) -> Result<Sizes> {
        let capacity = (context + 2 * MAX_WIDTH).next_multiple_of(1024);
        let latent = config.latent.is_some() || drafter.is_some_and(|d| d.shape.latent().is_some());
        let chunks = attention_chunks(capacity, latent);
        ensure!(
            !latent || chunks <= LATENT_CHUNKS,
            "a context of {context}: latent attention on the GPU goes up to 376,800 tokens; use a smaller --context"
        );
        let cache = |plan: &Plan, rope: &Rope, dim| CacheSizes {
            kv: plan.kv,
            inverse_frequencies: 4 * rope.inverse_frequencies(dim).len(),
            rope_factor: rope.attention_factor(),
        };
        let draft_plan =
            plans.values().find(|plan| matches!(plan.pass, Pass::Draft { .. } | Pass::DraftPrefill { .. }));
        let drafter = drafter.zip(draft_plan).map(|(d, plan)| DraftSizes {
            cache: cache(plan, &d.rope, d.shape.rope_dim()),
            ring: 2 * FEATURE_ROWS * d.shape.features_dim(),
            target_ids: d.map.as_ref().map(|map| 4 * map.len()),
        });
        let mut sizes = Sizes {
            capacity,
            chunks,
            latent,
            cache: cache(&plans[&Pass::Verify { width: 1 }], &config.rope, config.rope_dim()),
            drafter,
            buffers: BTreeMap::new(),
            normed: BTreeMap::new(),
            partials: 0,
            counters: 0,
            router_sums: 0,
            expert_work: 0,
            vocab: config.vocab,
            shard_vocab: shard.vocab,
            n_sms,
        };
        plans.values().for_each(|plan| sizes.add(plan));
        Ok(sizes)
    }

    fn add(&mut self, plan: &Plan) {
        // Routes are made and read in kernels of their own form.
        for buffer in plan.buffers.iter().filter(|buffer| buffer.kind != BufferKind::Routes) {
            let bytes = self.buffers.entry(buffer.name).or_default();
            *bytes = (*bytes).max(buffer.rows * buffer.dim * element_bytes(buffer.kind));
        }
        for step in &plan.steps {
            let normed = step.inputs().iter().filter(|input| input.norm.is_some());
            self.normed.extend(normed.map(|input| (plan.buffer(input.x).name, plan.buffer(input.x).dim)));
            if let Step::Router(router) = step {
                self.router_sums = self.router_sums.max(4 * ROWS * router.routing.n_experts * ROUTER_SPLITS);
                self.expert_work = ROWS / MAX_WIDTH * EXPERT_WORK_BYTES;
            }
            // Prefill goes through latent attention in slabs, and through the other kind without partials.
            let [partials, counters] = attention_scratch(step, MAX_WIDTH, self.chunks);
            self.partials = self.partials.max(4 * partials);
            self.counters = self.counters.max(4 * counters);
        }
    }

    /// Bytes of the caches.
    pub fn kv_bytes(&self) -> usize {
        self.target_kv_bytes()
            + self.drafter.iter().flat_map(|d| Cache::bytes(&d.cache.kv, self.capacity)).sum::<usize>()
    }

    pub fn target_kv_bytes(&self) -> usize {
        Cache::bytes(&self.cache.kv, self.capacity).iter().sum()
    }

    /// Bytes of all that is neither weights nor caches, nearly.
    pub fn work_bytes(&self) -> usize {
        self.buffers.values().sum::<usize>()
            + self.normed.values().map(|dim| ROWS * (2 * dim + dim / 4)).sum::<usize>()
            + ROWS * 4
            + self.partials
            + self.router_sums
            + self.expert_work
            + SAMPLE_SCRATCH_BYTES
            + self.vocab * (MAX_WIDTH * 8 + 8)
            + 4 * self.capacity
    }

    /// `take` gives so many bytes, zeroed, to what is named; `ring` is that of records.
    pub fn place(
        &self,
        weights: Weights,
        ring: u64,
        take: &mut dyn FnMut(&str, usize) -> Result<Region>,
    ) -> Result<Arena> {
        let mut cache = |of: &CacheSizes, what: &str| -> Result<Cache> {
            let [keys, values] = Cache::bytes(&of.kv, self.capacity);
            Ok(Cache {
                keys: take(&format!("{what}keys"), keys)?,
                values: take(&format!("{what}values"), values)?,
                inverse_frequencies: take(&format!("{what}inverse_frequencies"), of.inverse_frequencies)?,
                rope_factor: of.rope_factor,
            })
        };
        let target = cache(&self.cache, "")?;
        let drafter =
            self.drafter.as_ref().map(|d| Ok::<_, anyhow::Error>((d, cache(&d.cache, "draft_")?))).transpose()?;
        let drafter = drafter.map(|(d, cache)| {
            Ok::<_, anyhow::Error>(DraftArena {
                cache,
                ring: take("feature_ring", d.ring)?,
                rows: take("draft_rows", size_of::<DraftRows>())?,
                target_ids: d.target_ids.map(|bytes| take("target_ids", bytes)).transpose()?,
            })
        });
        let drafter = drafter.transpose()?;
        let mut buffers = BTreeMap::new();
        for (&name, &bytes) in &self.buffers {
            buffers.insert(name, take(&name.to_string(), bytes)?);
        }
        let mut normed = BTreeMap::new();
        for (&name, &dim) in &self.normed {
            let region = Normed {
                rows: take(&format!("normed_{name}"), ROWS * dim * 2)?,
                squares: take(&format!("squares_{name}"), ROWS * dim.div_ceil(16) * 4)?,
                inverse_rms: take(&format!("inverse_rms_{name}"), ROWS * 4)?,
            };
            normed.insert(name, region);
        }
        let maxima = 4 * MAX_WIDTH * linear_blocks(self.n_sms);
        Ok(Arena {
            weights,
            buffers,
            normed,
            cache: target,
            capacity: self.capacity,
            drafter,
            draft_scratch: take("draft_scratch", DRAFT_SCRATCH_BYTES)?,
            router_sums: take("router_sums", self.router_sums)?,
            expert_work: take("expert_work", self.expert_work)?,
            attention_partials: take("attention_partials", self.partials)?,
            attention_counters: take("attention_counters", self.counters)?,
            state: take("state", size_of::<State>())?,
            options: take("options", size_of::<SamplingParams>())?,
            sample_scratch: take("sample_scratch", SAMPLE_SCRATCH_BYTES)?,
            sample_list: take("sample_list", MAX_WIDTH * self.shard_vocab * 8)?,
            max_value: take("max_value", maxima)?,
            max_id: take("max_id", maxima)?,
            counts: take("counts", 4 * self.vocab)?,
            bias: take("bias", 4 * self.vocab)?,
            history: take("history", 4 * self.capacity)?,
            ring,
        })
    }
}
