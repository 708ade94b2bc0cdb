//! What a demand costs on some hardware.

use crate::collective::{Group, PlacedCollective};
use crate::matmul::{filled, misaligned};
use crate::work::Demand;
use crate::{Framework, Hardware, Terms};
use lockstep_ir::{Axes, Coordinates, Mesh, MeshAxis};

/// Where a program's ranks are.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    pub hardware: &'a Hardware,
    pub mesh: &'a Mesh,
    pub stage: usize,
    pub framework: &'a Framework,
}

/// A demand in seconds at the hardware's peak rates: what is left to price are the constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AtPeak {
    Nothing,
    Matmul {
        /// Seconds of the FLOPs.
        flops_s: f64,
        /// Seconds of the bytes.
        bytes_s: f64,
        /// Seconds of those of sums that are read, which nothing hides: the result is there before.
        sums_s: f64,
        /// Share of the processors that its tiles fill, as a logarithm.
        filled: f64,
        misaligned: f64,
        /// Weights whose gradients are added, ÷ bandwidth.
        gradients: f64,
        /// Logits, ÷ bandwidth.
        logits: f64,
        fp8: bool,
    },
    Attention {
        flops_s: f64,
        /// Seconds of one more key for every tile of queries.
        key_s: f64,
        bytes_s: f64,
        /// How far below 128 its heads are: 1 at 64.
        narrow: f64,
        backward: bool,
    },
    Scores {
        flops_s: f64,
        bytes_s: f64,
    },
    Elementwise {
        bytes_s: f64,
    },
    Quantise {
        bytes_s: f64,
    },
    Optimizer {
        bytes_s: f64,
    },
    HostCopy {
        /// Seconds of the bytes at the rate of the link to the host.
        bytes_s: f64,
    },
    Collective(PlacedCollective),
    Message {
        /// Seconds of the bytes at the rate of the link or the adapter.
        bytes_s: f64,
        crosses_nodes: bool,
    },
    /// Measured.
    Measured {
        seconds: f64,
    },
}

impl AtPeak {
    pub fn new(demand: &Demand, site: Site) -> Self {
        let Site { hardware, mesh, stage, framework } = site;
        let gpu = &hardware.gpu;
        let bytes_s = |bytes: u64| bytes as f64 / gpu.bytes_per_s;
        match *demand {
            Demand::Nothing | Demand::Receive { .. } => AtPeak::Nothing,
            Demand::Matmul { rows, cols, inner, calls, dtype, bytes, sums, gradients, logits } => AtPeak::Matmul {
                flops_s: 2.0 * calls as f64 * (rows * cols) as f64 * inner as f64 / gpu.peak(dtype),
                fp8: dtype.stored().is_fp8() && gpu.fp8_flops_per_s.is_some(),
                bytes_s: bytes_s(bytes),
                sums_s: bytes_s(sums),
                filled: filled(rows, cols, inner, gpu.units as u64).ln(),
                misaligned: misaligned([rows, cols, inner]),
                gradients: bytes_s(gradients),
                logits: bytes_s(logits),
            },
            Demand::Attention { flops, bytes, head_dim, seq, dtype, backward } => AtPeak::Attention {
                flops_s: flops as f64 / gpu.peak(dtype),
                key_s: flops as f64 / gpu.peak(dtype) / seq.max(1) as f64,
                bytes_s: bytes_s(bytes),
                narrow: (128.0 / head_dim.clamp(16, 128) as f64).log2(),
                backward,
            },
            Demand::Scores { flops, bytes, dtype } => {
                AtPeak::Scores { flops_s: flops as f64 / gpu.peak(dtype), bytes_s: bytes_s(bytes) }
            }
            Demand::Elementwise { bytes } => AtPeak::Elementwise { bytes_s: bytes_s(bytes) },
            Demand::Quantise { bytes } => AtPeak::Quantise { bytes_s: bytes_s(bytes) },
            Demand::Optimizer { bytes } => AtPeak::Optimizer { bytes_s: bytes_s(bytes) },
            Demand::HostCopy { bytes } => AtPeak::HostCopy { bytes_s: bytes as f64 / gpu.host_rate() },
            Demand::Collective { pattern, over, sharers, bytes, routed } => {
                let per_node = hardware.cluster.gpus_per_node;
                let group = match framework.folds_experts && over == MeshAxis::Ep.into() {
                    true => Group::of_neighbours(mesh.size(over), per_node),
                    false => Group::of(mesh, over, stage, per_node),
                };
                let group = sharers.map_or(group, |n| group.sharers(n));
                let collective = PlacedCollective::new(pattern, over, group, bytes, hardware);
                AtPeak::Collective(match routed.filter(|_| framework.sends_once_per_node) {
                    Some(routed) => collective.once_per_node(routed),
                    None => collective,
                })
            }
            Demand::Send { stage: to, bytes, .. } => {
                let per_node = hardware.cluster.gpus_per_node;
                let size = mesh.size(Axes::STAGE);
                let first = |stage| mesh.rank(Coordinates::default().with(MeshAxis::Pp, stage));
                let crosses_nodes =
                    [0, size - 1].into_iter().any(|at| (first(stage) + at) / per_node != (first(to) + at) / per_node);
                let rate = match crosses_nodes {
                    true => hardware.cluster.node_bytes_per_s / per_node as f64,
                    false => hardware.link_bytes_per_s(),
                };
                AtPeak::Message { bytes_s: bytes as f64 / rate, crosses_nodes }
            }
        }
    }

    /// Seconds, launch gaps apart.
    pub fn seconds(&self, terms: &Terms) -> f64 {
        let memory = 1.0 / terms.memory_efficiency;
        match *self {
            AtPeak::Nothing => 0.0,
            AtPeak::Measured { seconds } => seconds,
            AtPeak::HostCopy { bytes_s } => bytes_s,
            AtPeak::Matmul { flops_s, bytes_s, sums_s, filled, misaligned, gradients, logits, fp8 } => {
                let rate = terms.matmul_efficiency
                    * if fp8 { terms.matmul_fp8 } else { 1.0 }
                    * (terms.matmul_waves * filled).exp()
                    * (1.0 - terms.matmul_misaligned * misaligned);
                let (computed, moved) = (flops_s / rate, terms.matmul_bytes * bytes_s * memory);
                let besides = terms.gradient_bytes * gradients + terms.logits_bytes * logits;
                let beside = computed.min(moved - terms.matmul_bytes * sums_s * memory);
                computed + moved - terms.matmul_hidden * beside + besides * memory
            }
            AtPeak::Attention { flops_s, key_s, bytes_s, narrow, backward } => {
                let direction = if backward { terms.attention_backward } else { 1.0 };
                let rate = terms.attention_efficiency * direction * terms.attention_narrow.powf(narrow);
                (flops_s + terms.attention_tile * key_s) / rate + bytes_s * memory
            }
            AtPeak::Scores { flops_s, bytes_s } => {
                flops_s / terms.matmul_efficiency + terms.scores_passes * bytes_s * memory
            }
            AtPeak::Elementwise { bytes_s } => terms.elementwise_passes * bytes_s * memory,
            AtPeak::Quantise { bytes_s } => terms.quantise_passes * bytes_s * memory,
            AtPeak::Optimizer { bytes_s } => terms.optimizer_passes * bytes_s * memory,
            AtPeak::Collective(collective) => collective.seconds(terms),
            AtPeak::Message { bytes_s, crosses_nodes } => {
                let hop = if crosses_nodes { terms.fabric_hop } else { terms.link_hop };
                terms.collective_launch + hop + bytes_s / terms.message_efficiency
            }
        }
    }
}
