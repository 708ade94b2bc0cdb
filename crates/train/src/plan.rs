use crate::TrainError;
use lockstep_compile::{AdamW, Compiled, Context, compile};
use lockstep_config::Config;
use lockstep_exec::cpu;
use lockstep_ir::account::{self, MemoryBill};
use lockstep_ir::op::Flops;
use lockstep_ir::{Graph, Layout, StepProgram};

/// A compiled config with its account: what `explain` prints and `train` runs.
#[derive(Debug)]
pub struct Plan {
    /// The model's forward graph, before any pass.
    pub forward: Graph,
    /// The program and the graph after every pass.
    pub compiled: Compiled,
    /// The device it was compiled for.
    pub device: String,
    /// Threads of the CPU executor.
    pub threads: usize,
    /// Elements of all parameters.
    pub parameters: u64,
    /// Tokens of one step.
    pub tokens_per_step: u64,
    /// FLOPs of one step.
    pub step_flops: Flops,
    /// Bytes by class, layer and moment.
    pub memory: MemoryBill,
}

impl Plan {
    /// The placed program.
    pub fn program(&self) -> &StepProgram {
        &self.compiled.program
    }

    /// Model FLOPs per token.
    pub fn model_flops_per_token(&self) -> f64 {
        self.step_flops.model as f64 / self.tokens_per_step as f64
    }
}

/// What the passes of a forward program need to know, and the threads it will run on.
pub(crate) fn forward_context(config: &Config) -> (Context, usize) {
    let (context, threads) = training_context(config);
    let device = cpu::profile(threads, false);
    (Context { device, layout: Layout { micro_batches: 1 }, reproducible: false, ..context }, threads)
}

fn training_context(config: &Config) -> (Context, usize) {
    let threads = if config.train.threads == 0 { cpu::cores() } else { config.train.threads };
    let o = &config.optimizer;
    let context = Context {
        device: cpu::profile(threads, config.train.reproducible),
        layout: Layout { micro_batches: config.accumulation_steps() },
        optimizer: AdamW {
            beta1: o.beta1 as f32,
            beta2: o.beta2 as f32,
            eps: o.eps as f32,
            decay: o.weight_decay as f32,
        },
        reproducible: config.train.reproducible,
    };
    (context, threads)
}

/// Compiles a config for this machine.
pub fn plan(config: &Config) -> Result<Plan, TrainError> {
    let (context, threads) = training_context(config);
    let internal = |e| TrainError::Compile(lockstep_compile::CompileError::Type(e));
    let forward = lockstep_model::build(&config.model, config.train.micro_batch, config.train.seq).map_err(internal)?;
    let compiled = compile(&forward, &context)?;
    let program = &compiled.program;
    let step_flops = match program.entry(StepProgram::TRAIN) {
        Some(entry) => account::flops(program, entry).map_err(internal)?,
        None => Flops::default(),
    };
    Ok(Plan {
        device: context.device.name,
        threads,
        parameters: forward.parameters().map(|(_, v, _)| v.ty.elements() as u64).sum(),
        tokens_per_step: (config.train.global_batch * config.train.seq) as u64,
        step_flops,
        memory: account::memory(program),
        forward,
        compiled,
    })
}
