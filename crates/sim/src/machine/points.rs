//! Measured times over sizes, and what is between them.

use super::Setting;
use crate::matmul::filled;
use crate::work::Demand;
use lockstep_ir::DType;

/// What kind of size an op has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Matmuls.
    Matmul,
    /// Fused attention.
    Attention,
    /// Attention whose scores exist.
    Scores,
    /// Kernels that do nothing but read and write, the optimizer's included.
    Bytes,
    /// Collectives and messages.
    Together,
}

/// Keys of a tile of attention: those on the diagonal are computed whole.
const TILE: f64 = 128.0;

/// What a tile of queries costs a GPU to begin and to end, in keys that it could have read: on an H200 attention of 1,024, 2,048 and 4,096
/// positions reaches 264, 320 and 381 TFLOP/s forward and 203, 250 and 290 backward with heads of 64, with heads of 128 alike.
const BEGUN: f64 = 600.0;

impl Family {
    /// The kind and size of what a kernel is asked for; none for what is no kernel.
    pub fn of(demand: &Demand) -> Option<(Self, Vec<f64>)> {
        let numbers = |all: &[u64]| all.iter().map(|n| *n as f64).collect();
        Some(match *demand {
            Demand::Matmul { rows, cols, inner, calls, bytes, .. } => {
                (Family::Matmul, numbers(&[rows, cols, inner, calls, bytes]))
            }
            Demand::Attention { flops, bytes, head_dim, seq, .. } => {
                (Family::Attention, numbers(&[seq, head_dim, flops, bytes]))
            }
            Demand::Scores { flops, bytes, .. } => (Family::Scores, numbers(&[flops, bytes])),
            Demand::Elementwise { bytes } | Demand::Quantise { bytes } | Demand::Optimizer { bytes } => {
                (Family::Bytes, numbers(&[bytes]))
            }
            Demand::Nothing
            | Demand::HostCopy { .. }
            | Demand::Collective { .. }
            | Demand::Send { .. }
            | Demand::Receive { .. } => return None,
        })
    }

    /// The columns of a size, as a file names them.
    pub const fn columns(self) -> &'static [&'static str] {
        match self {
            Family::Matmul => &["rows", "cols", "inner", "calls", "bytes"],
            Family::Attention => &["seq", "head_dim", "flops", "bytes"],
            Family::Scores => &["flops", "bytes"],
            Family::Bytes => &["bytes"],
            Family::Together => &["ranks", "bytes"],
        }
    }

    /// All of them.
    pub const ALL: [Family; 5] = [Family::Matmul, Family::Attention, Family::Scores, Family::Bytes, Family::Together];

    /// Seconds at the peak rates, of which measured times are multiples.
    pub(super) fn bound(self, size: &[f64], flops_per_s: f64, bytes_per_s: f64, units: usize) -> f64 {
        let bound = match (self, size) {
            (Family::Matmul, [rows, cols, inner, calls, bytes]) => {
                let full = match units {
                    0 => 1.0,
                    units => filled(*rows as u64, *cols as u64, *inner as u64, units as u64),
                };
                2.0 * calls * rows * cols * inner / (flops_per_s * full) + bytes / bytes_per_s
            }
            (Family::Attention, [seq, _, flops, bytes]) => {
                let more = if units == 0 { TILE } else { TILE + BEGUN };
                flops * (1.0 + more / seq) / flops_per_s + bytes / bytes_per_s
            }
            (Family::Scores, [flops, bytes]) => flops / flops_per_s + bytes / bytes_per_s,
            (Family::Bytes, [bytes]) | (Family::Together, [_, bytes]) => bytes / bytes_per_s,
            (Family::Matmul | Family::Attention | Family::Scores | Family::Bytes | Family::Together, _) => 0.0,
        };
        bound.max(1e-9)
    }

    /// Where a size lies: sizes that are a factor of two apart in one extent are 1 apart.
    fn place(self, size: &[f64]) -> Vec<f64> {
        let log = |x: &f64| x.max(1.0).log2();
        match (self, size) {
            (Family::Matmul, [rows, cols, inner, ..]) => vec![log(rows), log(cols), log(inner)],
            // Kernels are made for a size of heads; few heads leave processors idle; heads that share keys (GQA) read fewer bytes for a FLOP.
            (Family::Attention, [seq, head_dim, flops, bytes]) => {
                vec![log(seq), 3.0 * log(head_dim), 0.25 * log(flops), log(&(64.0 * bytes * seq / flops.max(1.0)))]
            }
            (Family::Together, [ranks, bytes]) => vec![2.0 * log(ranks), log(bytes)],
            (Family::Matmul | Family::Attention | Family::Scores | Family::Bytes | Family::Together, _) => {
                size.iter().map(log).collect()
            }
        }
    }
}

/// A measured time.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The size, in the columns of the family.
    pub size: Vec<f64>,
    /// Seconds.
    pub seconds: f64,
}

/// The measured times of one op.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Its name; of a collective, that of the pattern.
    pub op: String,
    /// The type that it computes in.
    pub dtype: DType,
    /// What sizes it has.
    pub family: Family,
    /// The times, each of another size.
    pub points: Vec<Point>,
}

impl Table {
    /// Adds a point, or replaces that of the same size.
    pub fn add(&mut self, point: Point) {
        match self.points.iter_mut().find(|known| known.size == point.size) {
            Some(known) => *known = point,
            None => self.points.push(point),
        }
    }

    /// How many times the roofline bound something of this size takes.
    pub(super) fn share(&self, setting: &Setting, size: &[f64]) -> Option<f64> {
        share(setting, std::iter::once(self), size)
    }
}

/// Points further away than the nearest count less, by this power of the distance.
const POWER: i32 = 4;

/// How many times the roofline bound something of this size takes, by the points of these tables: the geometric mean of their shares,
/// each weighted by how near it is.
pub(super) fn share<'a>(setting: &Setting, tables: impl Iterator<Item = &'a Table>, size: &[f64]) -> Option<f64> {
    let (mut sum, mut weights) = (0.0, 0.0);
    for table in tables {
        let here = table.family.place(size);
        for point in &table.points {
            let there = table.family.place(&point.size);
            let square: f64 = here.iter().zip(&there).map(|(a, b)| (a - b).powi(2)).sum();
            let weight = 1.0 / (square + 1e-4).powi(POWER / 2);
            sum += weight * (point.seconds / setting.bound(table.family, table.dtype, &point.size)).ln();
            weights += weight;
        }
    }
    (weights > 0.0).then(|| (sum / weights).exp())
}
