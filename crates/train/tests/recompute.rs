//! Values that are given up and computed again: the same bits under every policy and layout, fewer bytes, more FLOPs.

use lockstep_config::Config;
use lockstep_ir::Layout;
use lockstep_train::{Plan, compare, plan};

const POLICIES: [&str; 5] = ["none", "selective", "full", "every-k", "sqrt"];

fn config(policy: &str, keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 5\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\n\
         [train]\nseq = 12\nglobal_batch = 8\nmicro_batch = 1\nthreads = 1\n[recompute]\npolicy = \"{policy}\"\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

#[test]
fn every_policy_gives_the_same_bits_on_every_layout() {
    let layouts: Vec<Layout> =
        ["dp=2", "dp=2,zero=3", "tp=2", "tp=2,sp", "pp=2", "pp=4,gpipe", "dp=2,zero=1,tp=2,sp,pp=2"]
            .map(|l| l.parse().unwrap())
            .to_vec();
    for keys in ["", "[precision]\npolicy = \"bf16\""] {
        let run = |policy: &str| compare(&config(policy, keys), &layouts, 3, &mut |_| ()).unwrap();
        let kept = run("none");
        for policy in &POLICIES[1..] {
            for (with, without) in run(policy).iter().zip(&kept) {
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
        plan(&Config::parse(&text, "run.toml", &[]).unwrap()).unwrap()
    };
    let [none, selective, full, every, sqrt] = POLICIES.map(planned);
    let activations = |p: &Plan| p.memory.classes["activations"];
    assert!(activations(&selective) < activations(&none) * 9 / 10);
    assert!(activations(&full) < activations(&none) / 4);
    assert_eq!(activations(&every), activations(&sqrt));
    // No matrix product is computed twice; all of a layer but its last product is.
    assert_eq!(selective.step_flops.hardware, none.step_flops.hardware);
    let forward = none.step_flops.model / 3;
    let added = (full.step_flops.hardware - none.step_flops.hardware) as f64;
    assert!((0.6..1.0).contains(&(added / forward as f64)), "{}", added / forward as f64);
    assert_eq!(full.step_flops.model, none.step_flops.model);
}
