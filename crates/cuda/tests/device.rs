//! Every op is right on a device.

mod on_device;

use lockstep_cuda::{CudaExecutor, Gpu, profile};
use lockstep_exec::conformance;
use lockstep_exec::{ExecError, Executor};
use lockstep_ir::{DType, StepProgram};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    on_device::run(&[
        ("every_op_conforms_in_fp32", || conforms(DType::F32, false)),
        ("every_op_conforms_in_bf16", || conforms(DType::BF16, false)),
        ("every_op_conforms_in_bf16_deterministic", || conforms(DType::BF16, true)),
        ("ranks_that_share_the_device_communicate_as_all_do", communicates),
    ])
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
    let outcomes = conformance::run(&profile, compute, false, conformance::SEED, &mut { load }).unwrap();
    assert!(!outcomes.is_empty());
    let failed: Vec<_> = outcomes.iter().filter(|o| o.failure.is_some()).collect();
    assert!(failed.is_empty(), "{failed:?}");
}
