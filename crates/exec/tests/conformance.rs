//! Every op on the CPU executor against the f64 reference.

use lockstep_exec::conformance;
use lockstep_exec::cpu::{CpuExecutor, profile};
use lockstep_ir::op::Spec;
use lockstep_ir::{DType, OpKind};

fn conforms(compute: DType, threads: usize) {
    // Fixed-point sums need the most scratch; the other cases have some to spare.
    let profile = profile(threads, compute, DType::Fixed64);
    let load = &mut |program| Ok(Box::new(CpuExecutor::load(program, threads)?) as _);
    let outcomes = conformance::run(&profile, compute, true, conformance::SEED, &[], load).unwrap();
    let failed: Vec<_> = outcomes.iter().filter(|o| o.failure.is_some()).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    // Limits are those of the coarsest type in a case: bf16 sums have theirs where all else is f32.
    assert!(outcomes.iter().all(|o| o.error <= o.limit));
    let in_bf16 = |o: &&conformance::CaseOutcome| o.case.contains("summed in bf16");
    assert!(outcomes.iter().filter(in_bf16).all(|o| o.limit > 1e-3), "a limit of bf16");
    let named = |spec: &Spec| outcomes.iter().any(|o| o.case.starts_with(&format!("{}(", spec.name)));
    let specs = OpKind::ALL.iter().flat_map(|kind| kind.rows()).copied();
    assert!(specs.filter(|s| s.has_kernel()).all(named));
}

#[test]
fn the_cpu_executor_conforms_in_f32_on_one_thread() {
    conforms(DType::F32, 1);
}

#[test]
fn the_cpu_executor_conforms_in_f32_on_two_threads() {
    conforms(DType::F32, 2);
}

#[test]
fn the_cpu_executor_conforms_in_bf16() {
    conforms(DType::BF16, 2);
}

#[test]
fn the_cpu_executor_conforms_in_f16() {
    conforms(DType::F16, 1);
}
