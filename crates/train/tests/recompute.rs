//! Values that are recomputed, not saved: the same bits under every policy and layout, fewer bytes, more FLOPs.

use lockstep_compile::Recompute;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::Hint;
use lockstep_ir::Layout;
use lockstep_plan::{Plan, plan};
use lockstep_train::compare;

const POLICIES: [&str; 5] = ["none", "selective", "full", "every-k", "sqrt"];

/// A list of ops, and a budget that all layouts can keep and not all without recomputing.
fn chosen(layouts: &[Layout], keys: &str) -> [String; 2] {
    let all: Vec<Layout> = layouts.iter().chain([&"dp=1".parse().unwrap()]).copied().collect();
    let planned = |policy: &str, layout: &Layout| plan(&Devices::new(), &config(policy, keys).at(layout)).unwrap();
    let least = all.iter().map(|layout| planned("full", layout).memory.total_bytes).max().unwrap();
    let budget = format!("budget\"\nbudget = \"{least} B\"\n#");
    assert!(all.iter().any(|layout| planned(&budget, layout).recompute != Recompute::None));
    ["list\"\nops = [\"rms_norm\", \"linear\", \"swiglu\"]\n#".to_owned(), budget]
}

fn config(policy: &str, keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 5\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\n\
         [train]\nseq = 12\nglobal_batch = 8\nmicro_batch = 1\nthreads = 1\n[recompute]\npolicy = \"{policy}\"\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

#[test]
fn every_policy_gives_the_same_bits_on_every_layout() {
    let layouts: Vec<Layout> = [
        "dp=2",
        "dp=2,zero=3,no-reshard",
        "tp=2",
        "tp=2,sp",
        "dp=2,zero=3,pp=2",
        "pp=4,gpipe",
        "dp=2,zero=1,tp=2,sp,pp=2",
    ]
    .map(|l| l.parse().unwrap())
    .to_vec();
    for keys in ["", "[precision]\npolicy = \"bf16\""] {
        let run = |policy: &str| compare(&Devices::new(), &config(policy, keys), &layouts, 3, &mut |_| ()).unwrap();
        let saved = run("none");
        for policy in POLICIES[1..].iter().map(ToString::to_string).chain(chosen(&layouts, keys)) {
            for (with, without) in run(&policy).iter().zip(&saved) {
                assert_eq!(with.losses, without.losses, "{policy}, {}", with.layout);
                assert!(with.kept, "{policy}: {with:?}");
            }
        }
    }
}

#[test]
fn policies_trade_bytes_for_flops() {
    let planned = |policy: &str| -> Plan {
        let text = format!(
            "[model]\npreset = \"llama-3.2-1b\"\n[train]\nseq = 4096\nglobal_batch = 1\n[precision]\npolicy = \"bf16\"\n\
             [recompute]\npolicy = \"{policy}\"\nevery = 4\n"
        );
        plan(&Devices::new(), &Config::parse(&text, "run.toml", &[]).unwrap()).unwrap()
    };
    let [none, selective, full, every, sqrt] = POLICIES.map(planned);
    let activations = |p: &Plan| p.memory.classes["activations"];
    assert!(activations(&selective) < activations(&none) * 9 / 10);
    assert!(activations(&full) < activations(&none) / 4);
    assert_eq!(activations(&every), activations(&sqrt));
    // No matmul is computed twice; all of a layer but its last matmul is.
    assert_eq!(selective.step_flops.hardware, none.step_flops.hardware);
    let forward = none.step_flops.model / 3;
    let added = (full.step_flops.hardware - none.step_flops.hardware) as f64;
    assert!((0.6..1.0).contains(&(added / forward as f64)), "{}", added / forward as f64);
    assert_eq!(full.step_flops.model, none.step_flops.model);
}

#[test]
fn a_list_gives_up_what_its_ops_make() {
    let planned = |policy: &str| plan(&Devices::new(), &config(policy, "")).unwrap();
    let listed = |ops: &str| planned(&format!("list\"\nops = [{ops}]\n#"));
    // The ops that selective recomputation knows as cheap, by name; of the fused norm it keeps the sum.
    let norms_and_activation = listed("\"rms_norm\", \"swiglu\"");
    let none = planned("none");
    assert_eq!(norms_and_activation.step_flops.hardware, none.step_flops.hardware);
    assert!(norms_and_activation.memory.total_bytes < none.memory.total_bytes);
    assert!(planned("selective").memory.total_bytes < norms_and_activation.memory.total_bytes);
    let everything = listed("\"rms_norm\", \"add_rms_norm\", \"linear\", \"rope\", \"attention\", \"swiglu\"");
    assert_eq!(everything.program().to_string(), planned("full").program().to_string());
}

#[test]
fn ops_that_make_nothing_to_give_up_are_refused() {
    let refusal = |op: &str| plan(&Devices::new(), &config(&format!("list\"\nops = [\"{op}\"]\n#"), "")).unwrap_err();
    let text = refusal("rms_nrom").with_hint();
    assert!(text.contains("did you mean \"rms_norm\"?") && text.contains("add_rms_norm, attention, linear"), "{text}");
    for op in ["add", "embedding", "linear_cross_entropy", "linear_grad_input"] {
        assert!(refusal(op).to_string().contains("makes nothing that a layer"), "{op}");
        assert!(refusal(op).is_request());
    }
}

#[test]
fn a_budget_is_kept_and_an_impossible_one_names_the_least() {
    let planned = |policy: &str| plan(&Devices::new(), &config(policy, ""));
    let budget = |bytes: u64| planned(&format!("budget\"\nbudget = \"{bytes} B\"\n#"));
    let [none, selective, full] = ["none", "selective", "full"].map(|p| planned(p).unwrap());
    let arena = |p: &Plan| p.memory.total_bytes;
    assert_eq!(budget(arena(&none)).unwrap().program(), none.program());
    // What selective recomputation reaches without a matmul, a budget does too.
    let same = budget(arena(&selective)).unwrap();
    assert!(arena(&same) <= arena(&selective));
    assert_eq!(same.step_flops, none.step_flops);
    let error = budget(1 << 10).unwrap_err();
    let least = match error {
        lockstep_plan::PlanError::OverBudget { least, .. } => least,
        other => panic!("{other}"),
    };
    assert!(least <= arena(&full));
    assert_eq!(arena(&budget(least).unwrap()), least);
    let text = budget(least - 1).unwrap_err().with_hint();
    assert!(
        text.contains(&format!("at least {}", lockstep_ir::units::bytes(least))) && text.contains("hint: "),
        "{text}"
    );
}

#[test]
fn a_budget_for_a_model_of_126_layers_is_found() {
    let text = |policy: &str| {
        format!(
            "[model]\nlayers = 126\ndim = 16384\nheads = 128\nkv_heads = 8\nffn = 53248\nvocab_size = 128256\n\
             [train]\nseq = 8192\nglobal_batch = 16\nmicro_batch = 1\n[parallel]\ntp = 8\npp = 16\n\
             sequence_parallel = true\n[precision]\npolicy = \"bf16\"\n[recompute]\npolicy = \"{policy}\"\n"
        )
    };
    let planned =
        |policy: &str| plan(&Devices::new(), &Config::parse(&text(policy), "run.toml", &[]).unwrap()).unwrap();
    let [none, selective, full] = ["none", "selective", "full"].map(planned);
    let arena = |p: &Plan| p.memory.total_bytes;
    let middle = (arena(&selective) + arena(&full)) / 2;
    let found = planned(&format!("budget\"\nbudget = \"{middle} B\"\n#"));
    assert!(arena(&found) <= middle && arena(&found) > middle * 9 / 10);
    let added = |p: &Plan| p.step_flops.hardware - none.step_flops.hardware;
    assert!(added(&found) > 0 && added(&found) < added(&full), "{} of {}", added(&found), added(&full));
}

/// Masks are other ones in every layer, layers of one kind all the same: else the search would not end.
#[test]
fn a_budget_with_dropout_takes_its_layers_as_alike() {
    let text = |policy: &str| {
        format!(
            "[model]\npreset = \"gpt2\"\ndropout = 0.1\n[train]\nseq = 256\nglobal_batch = 4\n\
             [precision]\npolicy = \"fp32\"\n[recompute]\npolicy = \"{policy}\"\n"
        )
    };
    let planned =
        |policy: &str| plan(&Devices::new(), &Config::parse(&text(policy), "run.toml", &[]).unwrap()).unwrap();
    let [none, full] = ["none", "full"].map(planned);
    let arena = |p: &Plan| p.memory.total_bytes;
    let middle = (arena(&none) + arena(&full)) / 2;
    let found = planned(&format!("budget\"\nbudget = \"{middle} B\"\n#"));
    assert!(arena(&found) <= middle && found.step_flops.hardware < full.step_flops.hardware);
    let Recompute::Values(recomputed) = &found.recompute else { panic!("{:?}", found.recompute) };
    assert!(recomputed.by_first.iter().chain(&recomputed.by_rest).all(|c| c.kind == 0), "{recomputed:?}");
}

#[test]
fn a_gpt_with_dropout_and_naive_attention_gives_the_same_bits_under_every_policy() {
    let config = |policy: &str| {
        let text = format!(
            "[model]\narchitecture = \"gpt2\"\nvocab_size = 131\nlayers = 3\ndim = 32\nheads = 4\ndropout = 0.1\n\
             positions = 12\nattention = \"naive\"\n[train]\nseq = 12\nglobal_batch = 4\nmicro_batch = 1\nthreads = 1\n\
             [recompute]\npolicy = \"{policy}\n"
        );
        Config::parse(&text, "run.toml", &[]).unwrap()
    };
    let layouts: Vec<Layout> = ["tp=2,sp", "pp=2"].map(|l| l.parse().unwrap()).to_vec();
    let run = |policy: &str| compare(&Devices::new(), &config(policy), &layouts, 3, &mut |_| ()).unwrap();
    let saved = run("none\"");
    let budget = plan(&Devices::new(), &config("selective\"")).unwrap().memory.total_bytes;
    let list = "list\"\nops = [\"layer_norm\", \"attention_scores\", \"add_bias\", \"gelu\"]".to_owned();
    for policy in ["selective\"".to_owned(), "full\"".to_owned(), list, format!("budget\"\nbudget = \"{budget} B\"")] {
        for (with, without) in run(&policy).iter().zip(&saved) {
            assert_eq!(with.losses, without.losses, "{policy}, {}", with.layout);
            assert!(with.kept, "{policy}: {with:?}");
        }
    }
}
