//! Adapters of experts as PEFT keeps them with transformers 5, where the matrices of all experts of a layer are one tensor, those of gate
//! and up together (`target_parameters`).
//!
//! ```text
//! A  [experts · rank, inputs]     an expert after the other
//! B  [outputs, rank · experts]    experts side by side in every column of rank
//! ```
//!
//! We keep a module per expert, as transformers 4 did and as PEFT still reads it. So gate and up, which share an A here, get it both. An
//! adapter of twice the rank is what PEFT makes of our form: gate has the first half and up the second, and nothing stands beside these blocks.

use super::unfit;
use crate::{Part, Result};
use lockstep_checkpoint::{HeldTensors, TensorSource, WeightsFolder};
use lockstep_config::{Config, LoraConfig};
use lockstep_model::adapters::{A, B};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The tensors that the matrices of all experts are in.
const GATE_UP: &str = "gate_up_proj";
const DOWN: &str = "down_proj";

/// The form of the adapters of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Together {
    /// Whether the experts' down projections have adapters.
    down: bool,
    /// Ranks of adapters of gate and up, in ranks of the others: 1 or 2.
    ranks: usize,
}

impl Together {
    /// What `adapter_config.json` says; none where every module has adapters of its own.
    pub(super) fn read(theirs: &Value, lora: &LoraConfig) -> Result<Option<Self>, String> {
        let targets: Vec<&str> =
            theirs["target_parameters"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let ends = |target: &str, name: &str| target == name || target.ends_with(&format!(".{name}"));
        if let Some(other) = targets.iter().find(|target| ![GATE_UP, DOWN].iter().any(|name| ends(target, name))) {
            return Err(format!("target_parameters has {other:?}"));
        }
        let (rank, alpha) = (lora.rank.unwrap_or(0) as f64, lora.alpha.unwrap_or(0.0));
        let mut twice = [false; 2];
        for (twice, (field, plain)) in twice.iter_mut().zip([("rank_pattern", rank), ("alpha_pattern", alpha)]) {
            for (pattern, value) in theirs[field].as_object().into_iter().flatten() {
                let known = !targets.is_empty() && pattern.ends_with(GATE_UP) && value.as_f64() == Some(2.0 * plain);
                if !known {
                    return Err(format!("{field} gives modules ranks of their own"));
                }
                *twice = true;
            }
        }
        if twice[0] != twice[1] {
            return Err("one of rank_pattern and alpha_pattern has no part of the other".to_owned());
        }
        let down = targets.iter().any(|target| ends(target, DOWN));
        Ok((!targets.is_empty()).then_some(Self { down, ranks: if twice[0] { 2 } else { 1 } }))
    }

    /// The adapters of a folder, by the names that they have where every expert is a module, after `prefix`; what the folder lacks is left out.
    pub(super) fn unpack(
        self,
        weights: &WeightsFolder,
        prefix: &str,
        config: &Config,
        parts: &[Part],
        hint: &str,
    ) -> Result<HeldTensors> {
        let (source, mut held) = (TensorSource::Folder(weights), HeldTensors::of(weights.path()));
        let mut read: BTreeMap<String, Packed> = BTreeMap::new();
        let mut left: BTreeSet<&str> = weights.names().collect();
        let (experts, rank) = (config.model.experts.unwrap_or(1), config.lora.rank.unwrap_or(1));
        for part in parts {
            let name = format!("{prefix}{}", part.name);
            if let Some((shape, elements)) = source.whole(&name)? {
                left.remove(name.as_str());
                held.put(name, shape, elements);
                continue;
            }
            let Some(matrix) = Matrix::of(&part.name) else { continue };
            let inner = if matrix.half.is_some() && self.down { ".base_layer" } else { "" };
            let from =
                format!("{prefix}{}.experts{inner}{}", matrix.block.replace("block_sparse_moe", "mlp"), matrix.end);
            if !read.contains_key(&from) {
                let Some((shape, elements)) = source.whole(&from)? else { continue };
                let ranks = rank * if matrix.half.is_some() { self.ranks } else { 1 };
                let packed = Packed { shape, elements, experts, ranks, is_a: matrix.end == A };
                packed
                    .check(self.ranks == 2 && matrix.half.is_some())
                    .map_err(|cause| unfit(weights.path(), format!("tensor `{from}`: {cause}"), hint.to_owned()))?;
                read.insert(from.clone(), packed);
            }
            left.remove(from.as_str());
            let Some(packed) = read.get(&from) else { continue };
            let elements = packed.of(matrix.expert, matrix.half, rank).filter(|found| found.len() == part.elements);
            let elements = elements.ok_or_else(|| {
                let cause = format!(
                    "tensor `{from}` is {:?}, which is not {} for each of {experts} experts",
                    packed.shape,
                    shown(&part.shape)
                );
                unfit(weights.path(), cause, hint.to_owned())
            })?;
            held.put(name, part.shape.clone(), elements);
        }
        super::refuse_others(weights.path(), left.into_iter(), hint)?;
        Ok(held)
    }
}

fn shown(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" × ")
}

/// Which matrix of an expert's adapters a name is.
struct Matrix<'a> {
    /// The block that has the experts.
    block: &'a str,
    expert: usize,
    /// Which half of gate and up; none of down.
    half: Option<usize>,
    /// `A` or `B`.
    end: &'static str,
}

impl<'a> Matrix<'a> {
    fn of(name: &'a str) -> Option<Self> {
        let (block, rest) = name.split_once(".experts.")?;
        let end = [A, B].into_iter().find(|end| rest.ends_with(end))?;
        let (expert, module) = rest.strip_suffix(end)?.split_once('.')?;
        let half = match module {
            "gate_proj" | "w1" => Some(0),
            "up_proj" | "w3" => Some(1),
            "down_proj" | "w2" => None,
            _ => return None,
        };
        Some(Self { block, expert: expert.parse().ok()?, half, end })
    }
}

/// The adapters of all experts of a layer in one tensor.
struct Packed {
    shape: Vec<usize>,
    elements: Vec<f32>,
    experts: usize,
    /// The rank of each expert's.
    ranks: usize,
    is_a: bool,
}

impl Packed {
    /// Whether it has that many experts of that rank, and gate and up in `blocks`, where they should be.
    fn check(&self, blocks: bool) -> Result<(), String> {
        let wide = self.experts * self.ranks;
        let (rows, columns) = match self.shape[..] {
            [rows, columns] => (rows, columns),
            _ => return Err(format!("it has {} dimensions, not 2", self.shape.len())),
        };
        let found = if self.is_a { rows } else { columns };
        if found != wide {
            return Err(format!(
                "it is {rows} × {columns}, which is not rank {} for each of {} experts",
                self.ranks, self.experts
            ));
        }
        let half = (rows / 2, self.ranks / 2 * self.experts);
        let is_beside = |at: usize| (at / columns < half.0) != (at % columns < half.1);
        if blocks && !self.is_a && self.elements.iter().enumerate().any(|(at, x)| *x != 0.0 && is_beside(at)) {
            return Err(
                "gate and up read both halves of its rank, so they are no adapters of rank r of each".to_owned()
            );
        }
        Ok(())
    }

    /// The part of an expert, of gate or up where they stand together.
    fn of(&self, expert: usize, half: Option<usize>, rank: usize) -> Option<Vec<f32>> {
        let (rows, columns) = (self.shape[0], self.shape[1]);
        // Where both halves have a rank of their own.
        let first = if self.ranks > rank { half? * rank } else { 0 };
        if self.is_a {
            let from = expert * self.ranks + first;
            return self.elements.get(from * columns..(from + rank) * columns).map(<[f32]>::to_vec);
        }
        let (top, count) = half.map_or((0, rows), |half| (half * (rows / 2), rows / 2));
        let row = |row: usize| (first..first + rank).map(move |r| row * columns + r * self.experts + expert);
        (top..top + count).flat_map(row).map(|at| self.elements.get(at).copied()).collect()
    }
}

/// What PEFT with transformers 5 cannot do with adapters of these modules, in which every expert is one.
pub(super) fn warnings(config: &Config, modules: &[&str]) -> Vec<String> {
    if config.model.experts.is_none() {
        return Vec::new();
    }
    let with = "PEFT with transformers 5";
    let ends =
        |name: &str| modules.iter().any(|module| module.contains(".experts.") && module.ends_with(&format!(".{name}")));
    let mut warnings = Vec::new();
    for [gate, up, down] in [["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]] {
        if ends(gate) != ends(up) || ends(gate) && !ends(down) {
            warnings.push(format!(
                "{with} reads adapters of {gate} and {up} of experts only where {gate}, {up} and {down} have some: adapt all three, or load these with transformers 4"
            ));
        }
    }
    let dense = ["gate_proj", "up_proj", "down_proj"];
    let taken = |module: &&&str| {
        !module.contains(".experts.") && dense.iter().any(|name| module.ends_with(&format!(".{name}")))
    };
    if let Some(module) = modules.iter().find(taken) {
        warnings.push(format!(
            "{with} takes {module} for a module of experts, and leaves its adapter out: load the folder with transformers 4, or export the model with its adapters merged"
        ));
    }
    warnings
}
