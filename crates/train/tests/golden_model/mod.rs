//! A model of a golden file, loaded with its weights and its batch.
// Each test binary uses a part of this.
#![allow(dead_code)]

use lockstep_compile::{AdamW, Context, Offload, Optimizer, Precision, compile};
use lockstep_config::Config;
use lockstep_exec::Executor;
use lockstep_exec::cpu::{CpuExecutor, profile};
use lockstep_infer::feed::further;
use lockstep_infer::{Part, parts};
use lockstep_ir::graph::State;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{DType, Layout, StepProgram, StepScalars, fixed};
use lockstep_model::adapters::adapt;
use lockstep_model::names;
use safetensors::SafeTensors;
use std::collections::HashMap;
use std::path::Path;

pub const TOLERANCE: f64 = 1e-4;
/// Of the logits of models with latent attention or attention sinks.
pub const CLOSE_LOGITS: f64 = 2e-6;

/// A golden file.
pub struct Golden {
    pub bytes: Vec<u8>,
    pub metadata: HashMap<String, String>,
}

impl Golden {
    pub fn open(case: &str) -> Self {
        Self::read(Path::new(&format!("{}/tests/golden/{case}.safetensors", env!("CARGO_MANIFEST_DIR"))))
    }

    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap();
        Self { bytes, metadata }
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let data = tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec();
        data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn raw(&self, name: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.bytes).unwrap().tensor(name).unwrap().data().to_vec()
    }

    pub fn config(&self) -> Config {
        let m = &self.metadata;
        if let Some(theirs) = m.get("config") {
            let theirs = lockstep_model::hf::read_config(&serde_json::from_str(theirs).unwrap()).unwrap();
            // Modules that predict further tokens, where the file has them.
            let weight = m.get("mtp_loss");
            let modules = if weight.is_some() { theirs.further } else { 0 };
            let theirs = theirs.with_further(modules);
            let text = format!("{}[train]\nseq = 12\nglobal_batch = 2\n", theirs.table);
            let mut config = Config::parse(&text, "golden.toml", &[]).unwrap();
            // What transformers trains without, unless it is asked for.
            config.model.balance_loss = 0.0;
            config.model.mtp_loss = weight.map_or(config.model.mtp_loss, |weight| weight.parse().unwrap());
            return config;
        }
        let scaling = m.get("rope_factor").map_or(String::new(), |factor| {
            let (low, high, original) = (&m["rope_low"], &m["rope_high"], &m["rope_original"]);
            format!(
                "rope_scaling = {{ factor = {factor}, low_freq_factor = {low}, high_freq_factor = {high}, \
                 original_context = {original} }}"
            )
        });
        let keys = [
            "vocab_size",
            "layers",
            "dim",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "rope_theta",
            "positions",
            "window",
            "norm_eps",
            "experts",
            "experts_per_token",
            "expert_ffn",
            "norm_topk",
            "shared_experts",
            "dense_layers",
            "router_scale",
            "expert_groups",
            "expert_top_groups",
        ];
        let lines: Vec<String> = keys.iter().filter_map(|k| Some(format!("{k} = {}", m.get(*k)?))).collect();
        let (tied, architecture) = (&m["tied"], m.get("architecture").map_or("llama", String::as_str));
        // What transformers trains without, unless it is asked for.
        let alone = if m.contains_key("experts") { "balance_loss = 0.0" } else { "" };
        let text = format!(
            "[model]\n{alone}\narchitecture = \"{architecture}\"\n{}\ntied_embeddings = {tied}\n{scaling}\n\
             [train]\nseq = 12\nglobal_batch = 2\n",
            lines.join("\n")
        );
        Config::parse(&text, "golden.toml", &[]).unwrap()
    }
}

/// A tensor as the graph has it, from one as checkpoints have it.
pub fn own(config: &Config, part: &Part, data: &[f32]) -> Vec<f32> {
    let is_transposed = lockstep_model::hf::is_transposed(&config.model, &part.name);
    let is_interleaved = lockstep_model::hf::is_interleaved(&config.model, &part.name);
    // Of every expert, if there are experts: outputs, which may alternate between two halves, and inputs.
    let (rows, columns) = match part.shape[..] {
        [rows, columns] if is_transposed => (rows, columns),
        [_, rows, columns] => (rows, columns),
        [_, rows] => (rows, 1),
        _ => (data.len(), 1),
    };
    let element = |i: usize| {
        let (entry, row, column) = (i / (rows * columns), i / columns % rows, i % columns);
        let row = if is_interleaved { 2 * (row % (rows / 2)) + row / (rows / 2) } else { row };
        entry * rows * columns + if is_transposed { column * rows + row } else { row * columns + column }
    };
    (0..data.len()).map(|i| data[element(i)]).collect()
}

/// max|a − b| ÷ max|b|.
pub fn error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let difference = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0f32, |m, d| {
        assert!(!d.is_nan());
        m.max(d)
    });
    // An expert that no token has gone to has a gradient of zeros.
    if difference == 0.0 { 0.0 } else { f64::from(difference) / f64::from(largest) }
}

/// The program of a golden model, with its weights and its batch.
pub fn loaded(
    golden: &Golden,
    config: &Config,
    micro_batches: usize,
    fused: bool,
    reproducible: bool,
) -> (StepProgram, CpuExecutor) {
    let (threads, batch) = (2, 2 / micro_batches);
    let optimizer = Optimizer::adamw(
        AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
        if config.lora.rank.is_some() { 0.1 } else { 0.0 },
    );
    let gradients = if reproducible { DType::Fixed64 } else { DType::F32 };
    let precision = Precision::of(DType::F32, gradients);
    let device = profile(threads, precision.compute, precision.gradients);
    let recompute = lockstep_compile::Recompute::None;
    let steps = lockstep_compile::Steps::default();
    let layout = Layout::single(micro_batches);
    let offload = Offload::default();
    let context = Context { device, layout, stages: vec![], optimizer, precision, recompute, steps, offload };
    let mut forward = adapt(lockstep_model::build(&config.model, batch, 12).unwrap(), &config.lora).unwrap();
    if !fused {
        // Logits that are used are not fused away.
        let logits = forward.values.iter().position(|v| v.name == names::LOGITS).unwrap();
        forward.outputs.push(lockstep_ir::ValueId(logits));
    }
    let program = compile(&forward, &context).unwrap().programs.swap_remove(0);
    let mut executor = CpuExecutor::load(program.clone(), threads).unwrap();
    for tensor in &program.tensors {
        match &tensor.role {
            Role::State(State::Parameter(p)) if config.lora.rank.is_none() || p.frozen => {
                let part = |part: &Part| own(config, part, &golden.f32(&format!("param.{}", part.name)));
                put(&mut executor, tensor, parts(p, &tensor.ty).iter().flat_map(part));
            }
            Role::State(State::Constant(init)) => {
                let mut table = vec![0.0f32; tensor.ty.elements()];
                init.fill(0, &tensor.name, tensor.ty.dims[1].size(), &mut table);
                let data: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
                executor.write(&tensor.name, 0, &data).unwrap();
            }
            _ => {}
        }
    }
    for name in [names::TOKENS, names::TARGETS] {
        let ids = golden.raw(name);
        for (m, share) in ids.chunks(ids.len() / micro_batches).enumerate() {
            executor.write(name, m, share).unwrap();
        }
    }
    let ids = |name| golden.raw(name).as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect::<Vec<u32>>();
    let (tokens, targets) = (ids(names::TOKENS), ids(names::TARGETS));
    for depth in 1..=config.model.mtp_depth {
        let loss_scale = (config.model.mtp_loss / config.model.mtp_depth as f64) as f32;
        let scalars = StepScalars { lr: 0.0, inverse_count: 0.0, clip: 0.0, bias1: 1.0, bias2: 1.0, loss_scale };
        let bytes: Vec<u8> = scalars.to_array().iter().flat_map(|x| x.to_le_bytes()).collect();
        let name = format!("{}.{}", StepScalars::NAME, names::further(names::LOSS, depth));
        // Unfused, the loss has its weight itself.
        if program.tensors.iter().any(|tensor| tensor.name == name) {
            executor.write(&name, 0, &bytes).unwrap();
        }
        for (name, ids) in [names::TOKENS, names::TARGETS].iter().zip(further((&tokens, &targets), None, 12, depth)) {
            for (m, share) in ids.chunks(ids.len() / micro_batches).enumerate() {
                let bytes: Vec<u8> = share.iter().flat_map(|id| id.to_le_bytes()).collect();
                executor.write(&names::further(name, depth), m, &bytes).unwrap();
            }
        }
    }
    (program, executor)
}

/// Mean losses of modules that predict further tokens, of the step that was run.
pub fn further_losses(executor: &CpuExecutor, config: &Config, micro_batches: usize) -> Vec<f32> {
    let of = |depth, m| {
        let bytes = executor.read(&names::further(names::LOSS, depth), m).unwrap();
        bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).sum::<f64>()
    };
    let depths = 1..=config.model.mtp_depth;
    depths.map(|depth| ((0..micro_batches).map(|m| of(depth, m)).sum::<f64>() / 24.0) as f32).collect()
}

pub fn put(executor: &mut CpuExecutor, tensor: &Tensor, values: impl Iterator<Item = f32>) {
    let data: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    executor.write(&tensor.name, 0, &data).unwrap();
}

pub fn read(executor: &CpuExecutor, name: &str) -> Vec<f32> {
    executor.read(name, 0).unwrap().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Runs a step with this learning rate, and gives its loss.
pub fn step(executor: &mut CpuExecutor, micro_batches: usize, lr: f32, [bias1, bias2]: [f32; 2]) -> f32 {
    let scalars = StepScalars { lr, inverse_count: 1.0 / 24.0, clip: 1e9, bias1, bias2, loss_scale: 1.0 };
    let scalars: Vec<u8> = scalars.to_array().iter().flat_map(|x| x.to_le_bytes()).collect();
    executor.write(StepScalars::NAME, 0, &scalars).unwrap();
    executor.run(StepProgram::TRAIN).unwrap();
    let mut loss = 0.0;
    for m in 0..micro_batches {
        let bytes = executor.read(names::LOSS, m).unwrap();
        loss += bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).sum::<f64>();
    }
    (loss / 24.0) as f32
}

/// max|a − b| ÷ max|b|; of what is 0 but for rounding where `largest` is the largest gradient of all, 100 · max|a| ÷ `largest`.
fn error_beside(largest: f64, found: &[f32], expected: &[f32]) -> f64 {
    let most = |x: &[f32]| f64::from(x.iter().fold(0.0f32, |m, x| m.max(x.abs())));
    if most(expected) >= 1e-9 * largest {
        return error(found, expected);
    }
    assert!(found.iter().all(|x| x.is_finite()) && found.len() == expected.len());
    100.0 * most(found) / largest
}

/// The largest element of all gradients in a file.
pub fn largest_gradient(golden: &Golden) -> f64 {
    let file = SafeTensors::deserialize(&golden.bytes).unwrap();
    let names = file.names().into_iter().filter(|name| name.starts_with("grad."));
    let largest = |name: &str| golden.f32(name).iter().fold(0.0f32, |m, x| m.max(x.abs()));
    f64::from(names.map(largest).fold(0.0f32, f32::max))
}

/// How far the gradient of every parameter is from the one in the file, by its name there; `largest` as [`error_beside`] takes it.
pub fn gradient_errors(
    golden: &Golden,
    config: &Config,
    (program, executor): (&StepProgram, &CpuExecutor),
    reproducible: bool,
    largest: f64,
) -> Vec<(String, f64)> {
    let gradient = |tensor: &Tensor, part: &Part| -> Vec<f32> {
        let name = format!("grad.{}", tensor.name);
        let bytes = executor.read(&name, 0).unwrap();
        let all: Vec<f32> = match reproducible {
            true => bytes.as_chunks().0.iter().map(|b| fixed::to_f32(i64::from_le_bytes(*b))).collect(),
            false => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        };
        // The program sums over tokens; the golden values are of the mean.
        all[part.start..part.start + part.elements].iter().map(|x| x / 24.0).collect()
    };
    let mut errors = Vec::new();
    for tensor in &program.tensors {
        let Role::State(State::Parameter(p)) = &tensor.role else { continue };
        // A bias of the choice has no gradient.
        for part in parts(p, &tensor.ty).into_iter().filter(|_| p.balance.is_none()) {
            let expected = own(config, &part, &golden.f32(&format!("grad.{}", part.name)));
            errors.push((part.name.clone(), error_beside(largest, &gradient(tensor, &part), &expected)));
        }
    }
    let expected =
        SafeTensors::deserialize(&golden.bytes).unwrap().names().iter().filter(|n| n.starts_with("grad.")).count();
    assert_eq!(errors.len(), expected);
    errors
}
