//! Whole models against `transformers`: logits, loss and every gradient. The scripts in `golden` made the files.

mod golden_model;

use golden_model::{CLOSE_LOGITS, Golden, TOLERANCE, error, further_losses, gradient_errors, loaded, put, read, step};
use lockstep_config::Config;
use lockstep_exec::Executor;
use lockstep_infer::parts;
use lockstep_ir::graph::State;
use lockstep_ir::program::{Role, Tensor};
use lockstep_model::names;

fn check(case: &str, micro_batches: usize, fused: bool, reproducible: bool) {
    let golden = Golden::open(case);
    let config = golden.config();
    let (program, mut executor) = loaded(&golden, &config, micro_batches, fused, reproducible);
    // A learning rate of zero: parameters stay, gradients can be read.
    let found = step(&mut executor, micro_batches, 0.0, [1.0; 2]);
    assert!(error(&[found], &golden.f32("loss")) < TOLERANCE, "{case}: loss {found}");
    if config.model.mtp_depth > 0 {
        let found = further_losses(&executor, &config, micro_batches);
        assert!(error(&found, &golden.f32("further")) < TOLERANCE, "{case}: losses of further tokens {found:?}");
    }
    if !fused {
        let bytes = executor.read(names::LOGITS, 0).unwrap();
        let logits: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let e = error(&logits, &golden.f32("logits"));
        let close = config.model.latent().is_some() || config.model.attention_sinks;
        let most = if close { CLOSE_LOGITS } else { TOLERANCE };
        assert!(e < most, "{case}: logits differ by {e:.1e}");
    }
    for (name, e) in gradient_errors(&golden, &config, (&program, &executor), reproducible, 0.0) {
        assert!(e < TOLERANCE, "{case}: gradient of {name} differs by {e:.1e}");
    }
}

const CASES: [&str; 27] = [
    "llama_mha",
    "llama_gqa_tied",
    "llama3_rope",
    "gpt2",
    "gpt2_untied",
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "qwen3_tied",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "deepseek",
    "dots1",
    "smollm3",
    "olmo2",
    "olmo3",
    "gemma3_text",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_wide",
    "gpt_oss",
    "gpt_oss_plain",
    "deepseek_v3_mtp",
    "deepseek_v3_mtp_tied",
];

/// Files that have ten steps besides.
const STEPS: [&str; 15] = [
    "smollm3",
    "olmo2",
    "olmo3",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "deepseek",
    "dots1",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_wide",
    "gpt_oss",
    "gpt_oss_plain",
];

#[test]
fn fused_models_agree_with_transformers() {
    CASES.iter().for_each(|case| check(case, 1, true, false));
}

#[test]
fn unfused_models_agree_with_transformers_logits_included() {
    CASES.iter().for_each(|case| check(case, 1, false, false));
}

#[test]
fn accumulated_and_reproducible_gradients_agree_with_transformers() {
    for case in CASES {
        check(case, 2, true, false);
        check(case, 1, true, true);
        check(case, 2, true, true);
    }
}

#[test]
fn ten_steps_of_adamw_agree_with_transformers() {
    for case in STEPS {
        let golden = Golden::open(case);
        let (_, mut executor) = loaded(&golden, &golden.config(), 2, true, false);
        let losses = golden.f32("losses");
        // As far off as transformers in float32 may be, where a file says it.
        let rounded = match case {
            "smollm3" | "olmo2" | "olmo3" | "gemma3_text" => golden.f32("losses_in_float32"),
            _ => losses.clone(),
        };
        for (i, (expected, rounded)) in losses.into_iter().zip(rounded).enumerate() {
            let bias = [0.9f64, 0.95].map(|beta| (1.0 - beta.powi(i as i32 + 1)) as f32);
            let found = step(&mut executor, 2, 0.01, bias);
            let most = TOLERANCE.max(4.0 * error(&[rounded], &[expected]));
            assert!(error(&[found], &[expected]) < most, "{case}: loss {found} of step {i}, not {expected}");
        }
    }
}

#[test]
fn adapters_agree_with_peft_in_gradients_and_twenty_steps() {
    let cases = [
        ("llama_gqa_tied", r#"["q_proj", "v_proj", "down_proj"]"#, 2 * 3),
        ("mixtral", r#"["k_proj", "o_proj", "experts.*"]"#, 2 * (2 + 5 * 3)),
        ("gpt2", r#"["c_attn", "c_proj", "c_fc"]"#, 2 * 4),
    ];
    for (case, targets, modules) in cases {
        let (golden, adapters) = (Golden::open(case), Golden::open(&format!("lora_{case}")));
        let mut config = golden.config();
        let text = format!(
            "[model]\npreset = \"llama-15m\"\n[lora]\nrank = {}\nalpha = {}\ntargets = {targets}\n",
            adapters.metadata["rank"], adapters.metadata["alpha"]
        );
        config.lora = Config::parse(&text, "lora.toml", &[]).unwrap().lora;
        let (program, mut executor) = loaded(&golden, &config, 2, true, false);
        let trained = |t: &&Tensor| matches!(&t.role, Role::State(State::Parameter(p)) if !p.frozen);
        let trained: Vec<&Tensor> = program.tensors.iter().filter(trained).collect();
        let all = |tensor: &Tensor| match &tensor.role {
            Role::State(State::Parameter(p)) => parts(p, &tensor.ty),
            _ => Vec::new(),
        };
        let count: usize = trained.iter().map(|tensor| all(tensor).len()).sum();
        assert_eq!(count, 2 * modules, "{case}");
        let theirs = |kind: &str, tensor: &Tensor| -> Vec<f32> {
            all(tensor).iter().flat_map(|part| adapters.f32(&format!("{kind}.{}", part.name))).collect()
        };
        trained.iter().for_each(|tensor| put(&mut executor, tensor, theirs("lora", tensor).into_iter()));
        let kept: Vec<(&str, Vec<f32>)> = (program.tensors.iter())
            .filter(|t| matches!(&t.role, Role::State(State::Parameter(p)) if p.frozen))
            .map(|t| (t.name.as_str(), read(&executor, &t.name)))
            .collect();
        for name in program.tensors.iter().map(|t| &t.name).filter(|name| name.starts_with("grad.")) {
            assert!(
                trained.iter().any(|t| *name == format!("grad.{}", t.name)),
                "{case}: {name} is of a frozen weight"
            );
        }
        for (i, expected) in adapters.f32("losses").into_iter().enumerate() {
            let bias = [0.9f64, 0.95].map(|beta| (1.0 - beta.powi(i as i32 + 1)) as f32);
            let (last, found) = (i == 20, step(&mut executor, 2, if i == 20 { 0.0 } else { 0.01 }, bias));
            assert!(error(&[found], &[expected]) < TOLERANCE, "{case}: loss {found} of step {i}, not {expected}");
            for tensor in &trained {
                if i == 0 {
                    let found: Vec<f32> =
                        read(&executor, &format!("grad.{}", tensor.name)).iter().map(|x| x / 24.0).collect();
                    let e = error(&found, &theirs("grad", tensor));
                    assert!(e < TOLERANCE, "{case}: the gradient of {} differs by {e:.1e}", tensor.name);
                }
                if last {
                    // Adam divides by roots of squares: what is nearly 0 may move either way.
                    let e = error(&read(&executor, &tensor.name), &theirs("after", tensor));
                    assert!(e < 10.0 * TOLERANCE, "{case}: {} differs by {e:.1e} after 20 steps", tensor.name);
                }
            }
        }
        for (name, before) in kept {
            assert_eq!(read(&executor, name), before, "{case}: {name} is frozen");
        }
    }
}
