//! The program's counts against the analytical formulas of the literature, and their scaling.

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_plan::{Account, Formula, Plan, account, plan};

fn planned(text: &str) -> (Plan, Account) {
    let config = Config::parse(text, "run.toml", &[]).unwrap();
    let plan = plan(&Devices::new(), &config).unwrap();
    let account = account(&Devices::new(), &config, &plan).unwrap();
    (plan, account)
}

fn form<'a>(account: &'a Account, name: &str) -> &'a Formula {
    account.formulas.iter().find(|f| f.name.starts_with(name)).unwrap_or_else(|| panic!("{name}"))
}

#[test]
fn programs_hold_against_the_formulas() {
    for model in [
        "preset = \"llama-15m\"",
        "preset = \"llama-3.2-1b\"",
        "preset = \"llama-3-8b\"",
        "preset = \"gpt2\"",
        "preset = \"qwen2.5-0.5b\"",
        "preset = \"qwen3-0.6b\"",
        "preset = \"mistral-7b\"",
        "architecture = \"mixtral\"\nlayers = 3\ndim = 64\nheads = 4\nffn = 96\nvocab_size = 131\nexperts = 6\nexperts_per_token = 3",
        "preset = \"qwen3-30b-a3b\"\nlayers = 3",
        "preset = \"olmoe-1b-7b\"\nlayers = 3",
        "preset = \"deepseek-moe-16b\"\nlayers = 3",
        "preset = \"deepseek-v3-mha\"\nlayers = 4\nexperts = 16\nexpert_groups = 4",
        "preset = \"deepseek-v2-lite\"\nlayers = 3\nexperts = 16",
        "preset = \"deepseek-v3\"\nlayers = 4\nexperts = 16\nexpert_groups = 4",
        "layers = 3\ndim = 64\nheads = 4\nffn = 96\nvocab_size = 131\nkv_lora_rank = 24\nqk_nope_head_dim = 16\nqk_rope_head_dim = 8\nv_head_dim = 12",
        "preset = \"gpt-oss-20b\"\nlayers = 4\nexperts = 8",
        "layers = 3\ndim = 64\nheads = 4\nffn = 96\nvocab_size = 131\nattention_sinks = true\nactivation = \"clamped_swiglu\"",
        "preset = \"smollm3-3b\"\nlayers = 4",
        "preset = \"olmo-2-7b\"\nlayers = 3",
        "preset = \"gemma-3-270m\"\nsliding_window = 64",
        "architecture = \"olmo3\"\nlayers = 4\ndim = 64\nheads = 4\nffn = 96\nvocab_size = 131\nsliding_window = 100",
        "architecture = \"mixtral\"\nlayers = 3\ndim = 64\nheads = 4\nffn = 96\nvocab_size = 131\nexperts = 6\nnorms = \"sandwich\"",
        "preset = \"llama-15m\"\nattention = \"naive\"",
        "architecture = \"gpt2\"\nlayers = 3\ndim = 64\nheads = 4\nffn = 96\nvocab_size = 131\ntied_embeddings = false\ndropout = 0.1",
        "layers = 3\ndim = 64\nheads = 8\nkv_heads = 2\nhead_dim = 16\nffn = 96\nvocab_size = 131",
    ] {
        for precision in
            ["policy = \"fp32\"", "policy = \"fp16\"", "policy = \"bf16\"", "policy = \"bf16\"\ngradients = \"bf16\""]
        {
            let text = format!(
                "[model]\n{model}\n[precision]\n{precision}\n[train]\nseq = 256\nglobal_batch = 4\nmicro_batch = 2\n"
            );
            let (_, account) = planned(&text);
            assert_eq!(account.formulas.len(), 8, "{model}");
            for f in &account.formulas {
                assert_eq!(f.program, f.closed, "{model}, {precision}: {f:?}");
            }
        }
    }
}

#[test]
fn programs_with_further_tokens_hold_against_the_formulas_there_are() {
    for model in [
        "preset = \"llama-15m\"\nmtp_depth = 1",
        "layers = 3\ndim = 64\nheads = 8\nkv_heads = 2\nffn = 96\nvocab_size = 131\ntied_embeddings = true\nmtp_depth = 3",
        "preset = \"deepseek-v3\"\nlayers = 4\nexperts = 16\nexpert_groups = 4\nmtp_depth = 2",
        "architecture = \"olmo3\"\nlayers = 4\ndim = 64\nheads = 4\nffn = 96\nvocab_size = 131\nsliding_window = 100\nmtp_depth = 1",
    ] {
        let (_, account) =
            planned(&format!("[model]\n{model}\n[train]\nseq = 256\nglobal_batch = 4\nmicro_batch = 2\n"));
        assert_eq!(account.formulas.len(), 2, "{model}");
        for f in &account.formulas {
            assert_eq!(f.program, f.closed, "{model}: {f:?}");
        }
    }
}

#[test]
fn programs_in_fp8_hold_against_the_formulas_there_are() {
    let sizes = "layers = 3\ndim = 256\nheads = 4\nkv_heads = 2\nffn = 384\nvocab_size = 131";
    for model in [sizes.to_owned(), format!("architecture = \"mixtral\"\nexperts = 6\n{sizes}")] {
        for recipe in ["current", "rowwise", "block"] {
            let text = format!(
                "[model]\n{model}\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0\nfp8_recipe = \"{recipe}\"\n\
                 [train]\nseq = 256\nglobal_batch = 4\nmicro_batch = 2\n"
            );
            let (_, account) = planned(&text);
            for f in &account.formulas {
                assert_eq!(f.program, f.closed, "{model}, {recipe}: {f:?}");
            }
            // What is saved has one where a tensor has one unit and no expert.
            let saved = account.formulas.iter().any(|f| f.name.starts_with("bytes that a layer saves"));
            assert_eq!(saved, recipe == "current" && !model.contains("experts"), "{model}, {recipe}");
        }
    }
}

#[test]
fn what_ulysses_sends_is_as_its_formula_says() {
    let model = "[model]\nlayers = 4\ndim = 64\nheads = 8\nkv_heads = 4\nffn = 96\nvocab_size = 131\n";
    let train = "[train]\nseq = 32\nglobal_batch = 16\nmicro_batch = 2\n";
    for (keys, bytes) in [
        ("cp = 2", 2 * 32 * 2 * 4 * (64 + 32) / 4),
        ("cp = 4", 2 * 32 * 2 * 4 * (64 + 32) * 3 / 16),
        ("cp = 2\ntp = 2\npp = 2\ndp = 2\nzero = 1", 2 * 32 * 2 * 4 * (64 + 32) / 8),
    ] {
        let precision = "[precision]\npolicy = \"bf16\"\n";
        let (_, account) = planned(&format!("{model}{precision}{train}[parallel]\ncontext = \"a2a\"\n{keys}\n"));
        let sent = form(&account, "bytes that a rank sends");
        assert_eq!((sent.closed, sent.program), (f64::from(bytes), f64::from(bytes)), "{keys}: {sent:?}");
    }
}

#[test]
fn llama_3_8b_has_the_counts_of_its_paper() {
    let (plan, account) =
        planned("[model]\npreset = \"llama-3-8b\"\n[precision]\npolicy = \"bf16\"\n[train]\nseq = 4096\n");
    assert_eq!(plan.parameters, 8_030_261_248);
    assert_eq!(form(&account, "parameters").closed, 8_030_261_248.0);
    assert_eq!(form(&account, "bytes of states").closed, 18.0 * 8_030_261_248.0);
}

#[test]
fn a_layer_of_full_attention_takes_24_s_d_squared_and_12_s_squared_d() {
    let (d, s, f) = (512.0, 256.0, 1536.0);
    let text = "[model]\nlayers = 2\ndim = 512\nheads = 8\nffn = 1536\nvocab_size = 256\n[train]\nseq = 256\n";
    let (_, account) = planned(text);
    let attention = form(&account, "attention FLOPs");
    assert_eq!(attention.formula, "24 · S · D² + 12 · S² · D");
    assert_eq!(attention.program, 24.0 * s * d * d + 12.0 * s * s * d);
    assert_eq!(form(&account, "MLP FLOPs").program, 18.0 * s * d * f);
    // Inference is the forward pass: a third.
    assert_eq!(form(&account, "of both").program, (24.0 * s * d * d + 12.0 * s * s * d + 18.0 * s * d * f) / 3.0);
}

#[test]
fn full_recomputation_repeats_the_forward_pass_of_layers_but_their_last_matmul() {
    let text = "[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 2048\nglobal_batch = 2\nmicro_batch = 1\n[precision]\npolicy = \"fp32\"\n";
    let (plan, account) = planned(text);
    let layer = form(&account, "attention FLOPs").program + form(&account, "MLP FLOPs").program;
    let last = 2.0 * 2048.0 * 4096.0 * 14336.0;
    let added = form(&account, "FLOPs that full").program;
    assert_eq!((added + last) / layer, 1.0 / 3.0);
    // Of all that a step does, the head included, that is less.
    let full = account.policies.iter().find(|p| p.policy == "full").unwrap();
    assert_eq!(full.added_flops, added * 32.0 * 2.0);
    assert!((0.2..0.25).contains(&full.added_share), "{}", full.added_share);
    assert_eq!(full.added_share, full.added_flops / plan.step_flops.hardware as f64);
    // Attention that never stores its scores leaves selective recomputation no matmul to repeat.
    let selective = account.policies.iter().find(|p| p.policy == "selective").unwrap();
    assert_eq!(selective.added_flops, 0.0);
    assert!(selective.less_than_none_bytes > 0 && full.less_than_none_bytes > selective.less_than_none_bytes);
    assert!(account.policies.iter().all(|p| p.chosen == (p.policy == "none")));
}

#[test]
fn counts_grow_as_the_formulas_say() {
    let (_, account) = planned(
        "[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 1024\nglobal_batch = 2\n[precision]\npolicy = \"fp32\"\n",
    );
    let scaling = |doubled: &str| account.scaling.iter().find(|g| g.doubled == doubled).unwrap();
    let near = |x: f64, expected: f64| assert!((x - expected).abs() < 0.02 * expected, "{x} is not {expected}");
    for (doubled, parameters, activations) in
        [("batch", 1.0, 2.0), ("sequence", 1.0, 2.0), ("width", 3.74, 2.0), ("depth", 1.87, 2.0)]
    {
        near(scaling(doubled).parameters, parameters);
        near(scaling(doubled).classes["optimizer"], parameters);
        near(scaling(doubled).classes["activations"], activations);
    }
    assert_eq!(scaling("batch").model_flops, 2.0);
    // Attention grows with the square of the sequence, everything else with the sequence.
    let share = 12.0 * 32.0 * 1024.0 * 4096.0 / 46_638_563_328.0;
    near(scaling("sequence").model_flops, 2.0 + 2.0 * share);
    assert!(!account.scaling[0].classes.contains_key("communication"));
}

/// A GPT of this shape with naive attention, in bf16.
fn gpt(layers: usize, dim: usize, heads: usize, seq: usize, policy: &str) -> (Plan, Account) {
    planned(&format!(
        "[model]\narchitecture = \"gpt2\"\nlayers = {layers}\ndim = {dim}\nheads = {heads}\nvocab_size = 51200\n\
         positions = {seq}\ndropout = 0.1\nattention = \"naive\"\n[train]\nseq = {seq}\nglobal_batch = 1\n\
         [precision]\npolicy = \"bf16\"\n[recompute]\npolicy = \"{policy}\"\n"
    ))
}

#[test]
fn a_gpt_has_the_parameters_of_its_formula() {
    let (h, v, l, s) = (12288u64, 51200u64, 96u64, 2048u64);
    let (plan, account) = gpt(96, 12288, 96, 2048, "none");
    assert_eq!(plan.parameters, h * v + l * (12 * h * h + 13 * h) + 2 * h + s * h);
    let formula = &form(&account, "parameters").formula;
    assert_eq!(formula, "V · D + positions · D + L · (12 · D² + 13 · D) + 2 · D");
}

#[test]
fn a_gpt_layer_keeps_what_korthikanti_et_al_count_and_every_difference_has_a_name() {
    let (plan, account) = gpt(4, 1024, 16, 512, "none");
    let (s, h, a) = (512u64, 1024u64, 16u64);
    let program = plan.program();
    let saved = |b: &&lockstep_ir::program::Buffer| {
        matches!(program.regions[b.region].lifetime, lockstep_ir::program::Lifetime::Saved(_)) && b.layer == Some(2)
    };
    let mut kept: Vec<(&str, u64)> =
        program.buffers.iter().filter(saved).map(|b| (b.name.trim_start_matches("layers.2."), b.bytes)).collect();
    kept.sort_unstable();
    let sbh = s * h;
    // Beside each: the term of the paper, for a batch of one in 16 bits.
    let mut terms = vec![
        ("n1", 2 * sbh),                   // input of the projection to Q, K and V
        ("qkv.matmul", 6 * sbh),           // Q and K (4), V (2); the bias is added in place
        ("p", 2 * a * s * s),              // output of the softmax
        ("o", 2 * sbh),                    // input of the output projection
        ("ffn_out.matmul", 2 * sbh),       // input of a layer norm: the stream, where the last matmul was
        ("attention_out.matmul", 2 * sbh), // input of the other: bias, dropout and addition in place
        ("n2", 2 * sbh),                   // input of the first matmul of the MLP
        ("up.matmul", 8 * sbh),            // input of GELU
        ("hidden", 8 * sbh),               // input of the second matmul
        ("n1.mean", 4 * s),                // statistics of the norms, in f32: the paper leaves them out
        ("n1.rstd", 4 * s),
        ("n2.mean", 4 * s),
        ("n2.rstd", 4 * s),
    ];
    terms.sort_unstable();
    assert_eq!(kept.iter().map(|k| k.1).sum::<u64>(), terms.iter().map(|t| t.1).sum::<u64>(), "{kept:?}");
    assert_eq!(kept, terms);
    // What the paper has besides: masks of dropout (1 byte each) and the dropped-out weights of attention.
    let absent = [sbh, sbh, a * s * s, 2 * a * s * s];
    let paper = form(&account, "the same by Korthikanti");
    let statistics = 16 * s;
    assert_eq!(paper.closed, (34 * sbh + 5 * a * s * s) as f64);
    assert_eq!(paper.program, (34 * sbh + 5 * a * s * s + statistics - absent.iter().sum::<u64>()) as f64);
    assert_eq!(paper.program, form(&account, "bytes that a layer saves").closed);
}

#[test]
fn selective_recomputation_of_naive_attention_adds_one_matmul_of_it() {
    let (plan, account) = gpt(96, 12288, 96, 2048, "none");
    let of = |policy: &str| account.policies.iter().find(|p| p.policy == policy).unwrap();
    let (l, s, h) = (96.0, 2048.0, 12288.0);
    assert_eq!(of("selective").added_flops, l * 2.0 * s * s * h);
    assert!(of("selective").added_share < 0.05, "{}", of("selective").added_share);
    assert_eq!(of("selective").added_share, l * 2.0 * s * s * h / plan.step_flops.hardware as f64);
    // It keeps none of the terms that grow with the square of the sequence: 2 · a · s² · b bytes of every layer.
    assert!(of("selective").less_than_none_bytes as f64 > l * 2.0 * 96.0 * s * s);
    let full = of("full").added_flops / l;
    let layer = form(&account, "attention FLOPs").program + form(&account, "MLP FLOPs").program;
    assert_eq!((full + 8.0 * s * h * h) / layer, 1.0 / 3.0);
}
