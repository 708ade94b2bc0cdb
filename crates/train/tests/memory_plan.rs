//! The planner against the liveness lower bound.

use lockstep_config::Config;
use lockstep_ir::StepProgram;
use lockstep_ir::account;
use lockstep_train::plan;

#[test]
fn the_arena_is_within_5_percent_of_the_liveness_lower_bound() {
    for preset in lockstep_config::presets() {
        for micro_batches in [1, 8] {
            for seq in [512, 2048] {
                let text = format!(
                    "[model]\npreset = \"{preset}\"\n[train]\nseq = {seq}\nglobal_batch = 8\nmicro_batch = {}\n",
                    8 / micro_batches
                );
                let plan = plan(&Config::parse(&text, "run.toml", &[]).unwrap()).unwrap();
                let program = plan.program();
                let bound = account::peak(program, program.entry(StepProgram::TRAIN).unwrap()).live_bytes;
                let excess = program.arena_bytes as f64 / bound as f64 - 1.0;
                assert!(excess < 0.05, "{preset}, {micro_batches} micro-batches, seq {seq}: {:.1}%", 100.0 * excess);
            }
        }
    }
}

#[test]
fn the_classes_of_the_bill_sum_to_the_arena() {
    let config = Config::parse("[model]\npreset = \"llama-29m\"", "run.toml", &[]).unwrap();
    let plan = plan(&config).unwrap();
    assert_eq!(plan.memory.classes.values().sum::<u64>(), plan.program().arena_bytes);
    assert_eq!(plan.memory.total_bytes, plan.program().arena_bytes);
}

#[test]
fn parameters_and_flops_are_those_of_the_literature() {
    let config = |preset: &str| {
        Config::parse(&format!("[model]\npreset = \"{preset}\"\n[train]\nseq = 4096"), "run.toml", &[]).unwrap()
    };
    let llama_3_8b = plan(&config("llama-3-8b")).unwrap();
    assert_eq!(llama_3_8b.parameters, 8_030_261_248);
    // 6 × (all parameters but the embedding table and the norms) + 12 × layers × seq × heads × head_dim.
    let matmul = 8_030_261_248u64 - 128_256 * 4096 - (2 * 32 + 1) * 4096;
    let per_token = 6 * matmul + 12 * 32 * 4096 * 4096;
    assert_eq!(llama_3_8b.model_flops_per_token(), per_token as f64);
    assert_eq!(plan(&config("llama-3.2-1b")).unwrap().parameters, 1_235_814_400);
}

#[test]
fn the_same_config_gives_the_same_program() {
    let config = Config::parse("[model]\npreset = \"llama-15m\"", "run.toml", &[]).unwrap();
    let text = || plan(&config).unwrap().program().to_string();
    assert_eq!(text(), text());
}
