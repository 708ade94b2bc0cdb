//! Every kernel compiles where NVRTC is found; every op is right where a device is.

use lockstep_cuda::{CudaExecutor, Device, Gpu, compile_all, profile};
use lockstep_exec::conformance;
use lockstep_exec::{ExecError, Executor};
use lockstep_ir::{DType, StepProgram};

#[test]
fn every_source_compiles_for_hopper() {
    match compile_all(90) {
        Err(lockstep_cuda::CudaError::Library { name, .. }) => println!("skipped: no {name}"),
        Err(error) => panic!("{error}"),
        Ok(code) => {
            assert!(!code.is_empty());
            code.iter().for_each(|(name, code)| assert!(code.starts_with(b"\x7fELF"), "{name} is no machine code"));
        }
    }
}

#[test]
fn every_op_conforms_on_the_device() {
    if !Device::count().is_ok_and(|n| n > 0) {
        println!("skipped: no CUDA device");
        return;
    }
    let gpu = Gpu::open(0, false).unwrap();
    for (compute, deterministic) in [(DType::F32, false), (DType::BF16, false), (DType::BF16, true)] {
        let load = |p: StepProgram| -> Result<Box<dyn Executor>, ExecError> {
            Ok(Box::new(CudaExecutor::load(&gpu, p, deterministic)?))
        };
        let outcomes =
            conformance::run(&profile("cuda", compute, DType::Fixed64, deterministic), compute, false, &mut { load })
                .unwrap();
        let failed: Vec<_> = outcomes.iter().filter(|o| o.failure.is_some()).collect();
        assert!(failed.is_empty(), "{failed:?}");
    }
}
