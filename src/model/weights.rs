//! The weights of a model: of which tensors each is made, how they are joined, how ranks divide them. claim.rs makes
//! them of a checkpoint, by the rules of weights.toml.
use super::checkpoint::{self, Dtype, Tensor};
use super::quant::{floats, Block, Format};
use super::role::WeightId;
use anyhow::{bail, ensure, Context, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;

/// The tensors of one weight, checked: parts[i] is [rows[i], cols], or [rows[i]] for vectors, stored as `format` says,
/// all of one dtype.
#[derive(Clone)]
pub struct Weight {
    /// With experts, the parts of expert 0, then those of expert 1, ...
    pub parts: Vec<Tensor>,
    /// The scales of each part; none where the format is plain.
    pub scales: Vec<Tensor>,
    pub format: Format,
    pub rows: Vec<usize>,
    /// 1 for vectors.
    pub cols: usize,
    /// 1 for weights that are no experts'.
    pub n_experts: usize,
    /// Of each part, rows at the end of each unit that the checkpoint has in rotated pairs (2i, 2i + 1). Here they come
    /// evens first, so that i is rotated with i + half: see `rope_order`.
    pub rope: Vec<usize>,
    pub fuse: Fuse,
    pub split: Split,
    /// Rows or columns that stay together when ranks divide the weight: head_dim for heads, else 1.
    pub unit: usize,
}

/// How the parts are joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fuse {
    /// One part after the other.
    #[default]
    Rows,
    /// Row 0 of every part, row 1 of every part, ...
    Interleave,
}

/// How ranks divide a weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Rows in units of heads; parts with fewer heads than ranks (keys, values) are replicated, so that a rank has the
    /// head its queries use.
    Heads,
    Rows,
    Columns,
    /// Rows that are tokens: `vocab_rows`.
    Vocab,
    #[default]
    Replicated,
}

/// What a rank reads of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

/// The tokens of one rank: an equal number for all but the last, and a multiple of 16, the rows of a tile of weights.
/// None: a rank would have none.
pub fn vocab_rows(vocab: usize, rank: usize, ranks: usize) -> Option<Range<usize>> {
    let share = if ranks > 1 { vocab.div_ceil(ranks).next_multiple_of(16) } else { vocab };
    (rank < ranks && (ranks - 1) * share < vocab).then(|| rank * share..vocab.min((rank + 1) * share))
}

/// All weights of a model. A tied head is there under its own id, with the tensor of the embedding.
#[derive(Clone, Default)]
pub struct Weights {
    pub(super) map: BTreeMap<WeightId, Weight>,
    /// Worth a line to the user, not an error.
    pub notes: Vec<String>,
}

impl Weights {
    /// Panics when the model has no such weight: the plan asks for what the config promises, and `claim` has checked
    /// that.
    pub fn get(&self, id: WeightId) -> &Weight {
        self.find(id).unwrap_or_else(|| panic!("the plan asks for {id}, which the table of weights does not have"))
    }

    pub fn find(&self, id: WeightId) -> Option<&Weight> {
        self.map.get(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (WeightId, &Weight)> {
        self.map.iter().map(|(id, weight)| (*id, weight))
    }

    /// Adds a weight that the checkpoint does not have: a drafter's share of its target.
    pub fn insert(&mut self, id: WeightId, weight: Weight) {
        self.map.insert(id, weight);
    }

    /// Joins the weights of a drafter to those of its target.
    pub fn add(&mut self, other: Weights) {
        self.map.extend(other.map);
        self.notes.extend(other.notes);
    }

    /// Makes the bytes of all parts ready; see `checkpoint::load`.
    pub fn load(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        checkpoint::load(self.map.values().flat_map(|weight| weight.parts.iter().chain(&weight.scales)), progress)
    }

    /// For -v: the quantised matrices, how many scale tensors they have, and how they are stored. None where all are
    /// plain.
    pub fn quantised(&self) -> Option<String> {
        let quantised = || self.map.values().filter(|weight| weight.format != Format::Plain);
        let (matrices, scales) =
            quantised().fold((0, 0), |(m, s), weight| (m + weight.parts.len(), s + weight.scales.len()));
        let format = quantised().next()?.format;
        Some(format!("{matrices} quantised matrices with {scales} tensors of scales, {format}"))
    }
}

impl Weight {
    pub fn dtype(&self) -> Dtype {
        self.parts[0].dtype
    }

    /// Rows of all parts.
    pub fn n_rows(&self) -> usize {
        self.rows.iter().sum()
    }

    /// The slice of each part that `rank` of `ranks` holds. An uneven split is an error that lists the numbers of
    /// ranks, up to 8, that work.
    pub fn part_of_rank(&self, rank: usize, ranks: usize) -> Result<Vec<Slice>> {
        ensure!(rank < ranks, "{}: expected a rank below {ranks}, found {rank}", self.parts[0].name);
        self.slices(rank, ranks).with_context(|| {
            let works = |n: &usize| (0..*n).all(|rank| self.slices(rank, *n).is_some());
            let work: Vec<String> = (1..=8).filter(works).map(|n| n.to_string()).collect();
            let whole = if self.format == Format::Plain {
                String::new()
            } else {
                format!(" and cuts no block ({})", self.format)
            };
            format!(
                "{}: expected a number of ranks that divides {}{whole}, {}, found {ranks}",
                self.parts[0].name,
                self.parts[0],
                work.join(" or ")
            )
        })
    }

    /// The scales of a slice of a part, as rows and columns of its scale tensor. The slice must cut no block, as those
    /// of ranks do not.
    pub fn scale_slice(&self, slice: &Slice) -> Slice {
        let block = self.format.block().expect("a quantised weight");
        let range = |of: &Range<usize>, size: usize| of.start / size..of.end.div_ceil(size);
        Slice { rows: range(&slice.rows, block.rows), cols: block.cols.map_or(0..1, |cols| range(&slice.cols, cols)) }
    }

    /// Where row `row` of a part stands in the checkpoint: rotated pairs are taken apart there, evens first.
    pub fn rope_order(&self, part: usize, row: usize) -> usize {
        let rope = self.rope[part];
        // A part that is not divided by heads is one unit.
        let unit = if self.unit > 1 { self.unit } else { self.rows[part] };
        let (start, i) = (row - row % unit, (row % unit).wrapping_sub(unit - rope));
        if i >= rope {
            return row;
        }
        start + unit - rope + if i < rope / 2 { 2 * i } else { 2 * (i - rope / 2) + 1 }
    }

    fn slices(&self, rank: usize, ranks: usize) -> Option<Vec<Slice>> {
        let even = |len: usize| {
            let share = self.unit * exact(exact(len, self.unit)?, ranks)?;
            Some(rank * share..(rank + 1) * share)
        };
        // The heads of a smaller part: rank r's queries use head r * heads / ranks.
        let replicated = |len: usize| {
            let heads = exact(len, self.unit)?;
            let head = rank / exact(ranks, heads)?;
            Some(head * self.unit..(head + 1) * self.unit)
        };
        let most = self.rows.iter().max()?;
        let whole = |range: &Range<usize>, block: usize, len: usize| {
            range.start % block == 0 && (range.end % block == 0 || range.end == len)
        };
        let slice = |rows: &usize| {
            let (all_rows, all_cols) = (0..*rows, 0..self.cols);
            let slice = match self.split {
                Split::Replicated => Slice { rows: all_rows, cols: all_cols },
                Split::Rows => Slice { rows: even(*rows)?, cols: all_cols },
                Split::Vocab => Slice { rows: vocab_rows(*rows, rank, ranks)?, cols: all_cols },
                Split::Columns => Slice { rows: all_rows, cols: even(self.cols)? },
                Split::Heads if rows < most => {
                    Slice { rows: even(*rows).or_else(|| replicated(*rows))?, cols: all_cols }
                }
                Split::Heads => Slice { rows: even(*rows)?, cols: all_cols },
            };
            let cuts_none = |block: Block| {
                whole(&slice.rows, block.rows, *rows)
                    && block.cols.is_none_or(|cols| whole(&slice.cols, cols, self.cols))
            };
            self.format.block().is_none_or(cuts_none).then_some(slice)
        };
        self.rows.iter().map(slice).collect()
    }
}

fn exact(n: usize, by: usize) -> Option<usize> {
    (by > 0 && n % by == 0).then(|| n / by)
}

/// Every scale must be a finite number above zero: zero, infinity or NaN is a file that was not written to its end, or
/// not by a quantiser. The tensors must be in memory.
pub fn check_scales(weights: &Weights) -> Result<()> {
    for (_, weight) in weights.iter() {
        for scale in &weight.scales {
            if let Some((i, bad)) = floats(scale)?.into_iter().enumerate().find(|(_, s)| !(s.is_finite() && *s > 0.0)) {
                bail!("{} in {}: expected scales above zero, found {bad} at {i}", scale.name, scale.file);
            }
        }
    }
    Ok(())
}
