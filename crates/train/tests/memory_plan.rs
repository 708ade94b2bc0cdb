//! The planner against the liveness lower bound.

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::Hint;
use lockstep_ir::StepProgram;
use lockstep_ir::account;
use lockstep_plan::plan;

#[test]
fn the_arena_is_within_5_percent_of_the_liveness_lower_bound() {
    for preset in lockstep_config::presets() {
        // GPT-2 has learned 1024 positions.
        let longest = if preset.starts_with("gpt2") { 1024 } else { 2048 };
        for micro_batches in [1, 8] {
            for seq in [512, longest] {
                let text = format!(
                    "[model]\npreset = \"{preset}\"\n[train]\nseq = {seq}\nglobal_batch = 8\nmicro_batch = {}\n[precision]\npolicy = \"fp32\"\n",
                    8 / micro_batches
                );
                let plan = plan(&Devices::new(), &Config::parse(&text, "run.toml", &[]).unwrap()).unwrap();
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
    let config =
        Config::parse("[model]\npreset = \"llama-29m\"\n[precision]\npolicy = \"fp32\"", "run.toml", &[]).unwrap();
    let plan = plan(&Devices::new(), &config).unwrap();
    assert_eq!(plan.memory.classes.values().sum::<u64>(), plan.program().arena_bytes);
    assert_eq!(plan.memory.total_bytes, plan.program().arena_bytes);
}

#[test]
fn parameters_and_flops_are_those_of_the_literature() {
    let config = |preset: &str| {
        Config::parse(&format!("[model]\npreset = \"{preset}\"\n[train]\nseq = 4096"), "run.toml", &[]).unwrap()
    };
    let llama_3_8b = plan(&Devices::new(), &config("llama-3-8b")).unwrap();
    assert_eq!(llama_3_8b.parameters, 8_030_261_248);
    // 6 × (all parameters but the embedding table and the norms) + 12 × layers × seq × heads × head_dim.
    let matmul = 8_030_261_248u64 - 128_256 * 4096 - (2 * 32 + 1) * 4096;
    let per_token = 6 * matmul + 12 * 32 * 4096 * 4096;
    assert_eq!(llama_3_8b.model_flops_per_token(), per_token as f64);
    assert_eq!(plan(&Devices::new(), &config("llama-3.2-1b")).unwrap().parameters, 1_235_814_400);
}

#[test]
fn the_same_config_gives_the_same_program() {
    let config =
        Config::parse("[model]\npreset = \"llama-15m\"\n[precision]\npolicy = \"fp32\"", "run.toml", &[]).unwrap();
    let text = || plan(&Devices::new(), &config).unwrap().program().to_string();
    assert_eq!(text(), text());
}

#[test]
fn weight_decay_spares_norms_and_nothing_else() {
    let config =
        Config::parse("[model]\npreset = \"llama-15m\"\n[precision]\npolicy = \"fp32\"", "run.toml", &[]).unwrap();
    let plan = plan(&Devices::new(), &config).unwrap();
    let update = plan.program().segments.iter().find(|s| s.name == "update").unwrap();
    let mut norms = 0;
    for instr in &update.instrs {
        let lockstep_ir::Op::AdamW { decay, .. } = instr.op else { continue };
        let name = &plan.program().values[instr.inputs[0].value];
        norms += usize::from(name.contains("norm"));
        assert_eq!(decay, if name.contains("norm") { 0.0 } else { 0.1 }, "{name}");
    }
    assert_eq!(norms, 2 * 6 + 1);
}

#[test]
fn bytes_per_parameter_are_those_of_the_literature() {
    let bytes = |precision: &str| {
        let text = format!("[model]\npreset = \"llama-3-8b\"\n[precision]\n{precision}\n[train]\nseq = 128");
        let plan = plan(&Devices::new(), &Config::parse(&text, "run.toml", &[]).unwrap()).unwrap();
        let classes = ["parameters", "gradients", "optimizer"].map(|c| plan.memory.classes[c]);
        classes.iter().sum::<u64>() as f64 / plan.parameters as f64
    };
    // The rope table, step scalars and padding are all that comes on top.
    for (precision, expected) in [
        ("policy = \"fp32\"", 16.0),
        ("policy = \"bf16\"\ngradients = \"fp32\"", 18.0),
        ("policy = \"bf16\"\ngradients = \"bf16\"", 16.0),
        ("policy = \"fp16\"\ngradients = \"fp32\"", 18.0),
        ("policy = \"fp16\"\ngradients = \"bf16\"", 16.0),
    ] {
        assert!((bytes(precision) - expected).abs() < 1e-4, "{precision}: {}", bytes(precision));
    }
}

#[test]
fn numbers_that_the_device_cannot_hold_are_refused() {
    let refusal = |keys: &str| {
        let text = format!("[model]\npreset = \"llama-15m\"\n{keys}");
        plan(&Devices::new(), &Config::parse(&text, "run.toml", &[]).unwrap()).unwrap_err().with_hint()
    };
    assert!(refusal("[optimizer]\neps = 1e-60").starts_with("optimizer.eps = "));
    assert!(refusal("[optimizer]\nbeta2 = 0.9999999999").starts_with("optimizer.beta2 = "));
    assert!(refusal("[train]\nglobal_batch = 4000000000\nmicro_batch = 1\nseq = 2").contains("too long"));
}

#[test]
fn flops_of_the_largest_runs_do_not_overflow() {
    let text = "[model]\nlayers = 126\ndim = 16384\nheads = 128\nkv_heads = 8\nffn = 53248\nvocab_size = 128256\n\
                [train]\nseq = 8192\nglobal_batch = 2048\nmicro_batch = 16";
    let plan = plan(&Devices::new(), &Config::parse(text, "run.toml", &[]).unwrap()).unwrap();
    let per_token = plan.model_flops_per_token();
    assert!((per_token / 2.63e12 - 1.0).abs() < 0.01, "{per_token}");
}
