//! Every op is right on a device.

mod on_device;

use lockstep_compile::{AdamW, Context, Offload, Optimizer, Precision, Recompute, Steps, compile};
use lockstep_config::Config;
use lockstep_cuda::{CudaExecutor, Gpu, profile};
use lockstep_exec::conformance;
use lockstep_exec::{ExecError, Executor};
use lockstep_ir::Hint;
use lockstep_ir::{DType, Layout, StepProgram, StepScalars, bf16};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    on_device::run(&[
        ("every_op_conforms_in_fp32", || conforms(DType::F32, false)),
        ("every_op_conforms_in_bf16", || conforms(DType::BF16, false)),
        ("every_op_conforms_in_bf16_deterministic", || conforms(DType::BF16, true)),
        ("every_op_conforms_in_fp16", || conforms(DType::F16, false)),
        ("every_op_conforms_in_fp16_deterministic", || conforms(DType::F16, true)),
        ("ranks_that_share_the_device_communicate_as_all_do", communicates),
        ("the_first_number_that_is_not_finite_is_found", finds_nans),
        // The last: it abandons the device.
        ("an_op_that_takes_too_long_in_a_graph_is_named", stalls),
    ])
}

/// A training step in bf16.
fn step(model: &str, (batch, seq): (usize, usize)) -> StepProgram {
    let config = Config::parse(&format!("[model]\n{model}\n[data]\npaths = [\".\"]\n"), "run.toml", &[]).unwrap();
    let context = Context {
        device: profile("cuda", DType::BF16, DType::F32, false),
        layout: Layout::single(1),
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
        precision: Precision::of(DType::BF16, DType::F32),
        recompute: Recompute::default(),
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    };
    let graph = lockstep_model::build(&config.model, batch, seq).unwrap();
    compile(&graph, &context).unwrap().programs.remove(0)
}

fn finds_nans() {
    let gpu = Gpu::open(0, false).unwrap();
    for (architecture, weight, op) in
        [("llama", "layers.1.wo", "linear"), ("gpt2", "layers.1.attention_out.weight", "linear and add_bias")]
    {
        let model =
            format!("architecture = \"{architecture}\"\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 4\nffn = 128");
        let mut executor = CudaExecutor::load(&gpu, step(&model, (2, 64)), false).unwrap();
        assert!(executor.check_numbers());
        let scalars =
            StepScalars { lr: 1e-3, inverse_count: 1.0 / 128.0, clip: 1.0, bias1: 0.1, bias2: 0.05, loss_scale: 1.0 };
        let scalars: Vec<u8> = scalars.to_array().iter().flat_map(|x| x.to_le_bytes()).collect();
        executor.write(StepScalars::NAME, 0, &scalars).unwrap();
        // Weights of zeros: everything is finite.
        (0..3).for_each(|_| executor.run(StepProgram::TRAIN).unwrap());
        let mut bytes = executor.read(weight, 0).unwrap().into_owned();
        bytes[200..202].copy_from_slice(&bf16::from_f32(f32::NAN).to_le_bytes());
        executor.write(weight, 0, &bytes).unwrap();
        let Err(ExecError::NotFinite(found)) = executor.run(StepProgram::TRAIN) else { panic!("{architecture}") };
        // Row 1 of the weight: column 1 of what it makes.
        assert_eq!((found.op.as_str(), found.layer, found.element), (op, Some(1), 1), "{found}");
        assert!(found.value.is_nan() && found.inputs == [format!("`{weight}`")], "{found}");
    }
}

fn stalls() {
    let gpu = Gpu::open(0, false).unwrap();
    gpu.watch(Duration::from_secs(60));
    // The matmul up takes tens of milliseconds, and what is before it one at most.
    let program = step("vocab_size = 256\nlayers = 1\ndim = 4096\nheads = 32\nffn = 65536", (8, 2048));
    let small = program.tensors.iter().min_by_key(|t| t.ty.bytes()).unwrap().name.clone();
    let mut executor = CudaExecutor::load(&gpu, program, false).unwrap();
    // The second run is captured, and the third replays the graph.
    for _ in 0..3 {
        executor.run(StepProgram::TRAIN).unwrap();
        executor.read(&small, 0).unwrap();
    }
    gpu.watch(Duration::from_millis(6));
    executor.run(StepProgram::TRAIN).unwrap();
    let error = executor.read(&small, 0).unwrap_err().with_hint();
    println!("    {}", error.lines().next().unwrap_or_default());
    // With what comes before it and takes less than a mark is worth.
    assert!(error.contains(": it is in ") && error.contains("linear, layer 0, forward, micro-batch 0"), "{error}");
}

fn communicates() {
    let gpu = Gpu::open(0, false).unwrap();
    let ranks = |count| lockstep_cuda::subjects(&gpu, count, Duration::from_secs(10)).unwrap();
    lockstep_exec::comm::conformance::check(&ranks).unwrap();
}

fn conforms(compute: DType, deterministic: bool) {
    let gpu = Gpu::open(0, false).unwrap();
    let load = |p: StepProgram| -> Result<Box<dyn Executor>, ExecError> {
        Ok(Box::new(CudaExecutor::load(&gpu, p, deterministic)?))
    };
    let profile = profile("cuda", compute, DType::Fixed64, deterministic);
    let outcomes = conformance::run(&profile, compute, false, conformance::SEED, &[], &mut { load }).unwrap();
    assert!(!outcomes.is_empty());
    let failed: Vec<_> = outcomes.iter().filter(|o| o.failure.is_some()).collect();
    assert!(failed.is_empty(), "{failed:?}");
}
