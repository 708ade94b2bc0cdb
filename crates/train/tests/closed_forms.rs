//! The program's counts against the closed forms of the literature, and how they grow.

use lockstep_config::Config;
use lockstep_train::{Account, ClosedForm, Plan, account, plan};

fn planned(text: &str) -> (Plan, Account) {
    let config = Config::parse(text, "run.toml", &[]).unwrap();
    let plan = plan(&config).unwrap();
    let account = account(&config, &plan).unwrap();
    (plan, account)
}

fn form<'a>(account: &'a Account, name: &str) -> &'a ClosedForm {
    account.closed_forms.iter().find(|f| f.name.starts_with(name)).unwrap_or_else(|| panic!("{name}"))
}

#[test]
fn programs_hold_against_the_formulas() {
    for model in [
        "preset = \"llama-15m\"",
        "preset = \"llama-3.2-1b\"",
        "preset = \"llama-3-8b\"",
        "layers = 3\ndim = 64\nheads = 8\nkv_heads = 2\nhead_dim = 16\nffn = 96\nvocab_size = 131",
    ] {
        for precision in ["policy = \"fp32\"", "policy = \"bf16\"", "policy = \"bf16\"\ngradients = \"bf16\""] {
            let text = format!(
                "[model]\n{model}\n[precision]\n{precision}\n[train]\nseq = 256\nglobal_batch = 4\nmicro_batch = 2\n"
            );
            let (_, account) = planned(&text);
            assert_eq!(account.closed_forms.len(), 8);
            for f in &account.closed_forms {
                assert_eq!(f.program, f.closed, "{model}, {precision}: {f:?}");
            }
        }
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
fn full_recomputation_repeats_the_forward_pass_of_layers_but_their_last_product() {
    let text = "[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 2048\nglobal_batch = 2\nmicro_batch = 1\n";
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
    // Attention that never stores its scores leaves selective recomputation no product to repeat.
    let selective = account.policies.iter().find(|p| p.policy == "selective").unwrap();
    assert_eq!(selective.added_flops, 0.0);
    assert!(selective.less_than_none_bytes > 0 && full.less_than_none_bytes > selective.less_than_none_bytes);
    assert!(account.policies.iter().all(|p| p.chosen == (p.policy == "none")));
}

#[test]
fn counts_grow_as_the_formulas_say() {
    let (_, account) = planned("[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 1024\nglobal_batch = 2\n");
    let growth = |doubled: &str| account.growth.iter().find(|g| g.doubled == doubled).unwrap();
    let near = |x: f64, expected: f64| assert!((x - expected).abs() < 0.02 * expected, "{x} is not {expected}");
    for (doubled, parameters, activations) in
        [("batch", 1.0, 2.0), ("sequence", 1.0, 2.0), ("width", 3.74, 2.0), ("depth", 1.87, 2.0)]
    {
        near(growth(doubled).parameters, parameters);
        near(growth(doubled).classes["optimizer"], parameters);
        near(growth(doubled).classes["activations"], activations);
    }
    assert_eq!(growth("batch").model_flops, 2.0);
    // Attention grows with the square of the sequence, everything else with the sequence.
    let share = 12.0 * 32.0 * 1024.0 * 4096.0 / 46_638_563_328.0;
    near(growth("sequence").model_flops, 2.0 + 2.0 * share);
    assert!(!account.growth[0].classes.contains_key("communication"));
}
