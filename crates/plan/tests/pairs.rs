//! All-to-alls of a mixture as DeepSeek's framework runs them: a row crosses the network once per node, routers choose few groups of experts, and
//! pairs of micro-batches hide them.

mod common;

use common::{Gpus, config};
use lockstep_ir::StepProgram;
use lockstep_plan::plan;
use lockstep_sim::{Catalogue, Constants, Framework, Hardware, Workload};

/// Eight ranks of experts in each of two stages, two on a node: with groups of experts or without.
fn programs(groups: &str) -> Vec<StepProgram> {
    let text = format!(
        "[model]\narchitecture = \"dots1\"\nvocab_size = 1024\nlayers = 8\ndim = 1024\nheads = 8\nkv_heads = 8\nffn = 1024\n\
         expert_ffn = 512\nexperts = 16\nexperts_per_token = 4\nshared_experts = 1\ndense_layers = 1\n{groups}\n[train]\nseq = 1024\n\
         global_batch = 256\nmicro_batch = 1\n[precision]\npolicy = \"bf16\"\n[parallel]\nep = 8\nep_bound = 1.0\npp = 2\nschedule = \"zb-v\"\n"
    );
    plan(&Gpus, &config(&text)).unwrap_or_else(|error| panic!("{error}")).compiled.programs
}

fn network(gigabits: f64) -> Hardware {
    let mut hardware = Hardware::assumed(Catalogue::builtin().gpu("h800").unwrap());
    (hardware.cluster.gpus_per_node, hardware.cluster.node_bytes_per_s) = (2, gigabits * 1e9 / 8.0);
    hardware
}

fn ours() -> Framework {
    Framework { sends_once_per_node: false, kernels_beside_exchanges: None, ..Framework::named("hai-llm").unwrap() }
}

fn seconds(programs: &[StepProgram], hardware: &Hardware, framework: &Framework) -> f64 {
    let work = Workload::new(programs, StepProgram::TRAIN, framework).unwrap();
    work.on(hardware, framework).price(&Constants::builtin().terms(framework, hardware)).unwrap()
}

#[test]
fn a_row_that_crosses_once_per_node_takes_less_of_the_network_and_with_few_groups_still_less() {
    let hardware = network(100.0);
    let once = Framework { sends_once_per_node: true, ..ours() };
    let (free, limited) = (programs(""), programs("expert_groups = 8\nexpert_top_groups = 2"));
    // Where every row is sent to every expert, groups change nothing.
    let [all, few] = [&free, &limited].map(|p| seconds(p, &hardware, &ours()));
    assert!((all / few - 1.0).abs() < 0.01, "{all} {few}");
    let [once_all, once_few] = [&free, &limited].map(|p| seconds(p, &hardware, &once));
    assert!(once_few < 0.9 * once_all && once_all < 0.95 * all, "{all} {once_all} {once_few}");
}

#[test]
fn pairs_of_micro_batches_hide_all_to_alls_as_far_as_there_are_kernels() {
    let programs = programs("");
    let pairs = Framework { kernels_beside_exchanges: Some(1.0), ..ours() };
    let fewer = Framework { kernels_beside_exchanges: Some(0.8), ..ours() };
    // Next to no network: all-to-alls take no time, and nothing is left to hide.
    let none = network(1e7);
    let kernels = seconds(&programs, &none, &ours());
    for gigabits in [800.0, 200.0, 50.0, 5.0] {
        let hardware = network(gigabits);
        let [alone, paired, with_fewer] = [&ours(), &pairs, &fewer].map(|f| seconds(&programs, &hardware, f));
        assert!(paired < 1.001 * with_fewer && paired < alone, "{gigabits}: {alone} {paired} {with_fewer}");
        assert!(paired > 0.98 * kernels, "{gigabits}: {paired} {kernels}");
        // What is hidden is no more than kernels take.
        assert!(alone - paired < 1.02 * kernels, "{gigabits}: {alone} {paired} {kernels}");
    }
    // On a slow network all-to-alls are all there is.
    let [alone, paired] = [&ours(), &pairs].map(|f| seconds(&programs, &network(1.0), f));
    assert!(paired > 0.9 * alone, "{alone} {paired}");
}
