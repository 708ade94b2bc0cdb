//! The simulator over programs of real configs.

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::{DType, StepProgram};
use lockstep_plan::{Plan, plan};
use lockstep_sim::machine::{Family, Point, Table};
use lockstep_sim::{Catalogue, Constants, Forecast, Framework, Hardware, MachineProfile, Setting, Workload, simulate};

fn planned(text: &str) -> Plan {
    plan(&Devices::new(), &Config::parse(text, "run.toml", &[]).unwrap()).unwrap()
}

fn forecast(plan: &Plan, hardware: &Hardware) -> Forecast {
    let (framework, constants) = (Framework::lockstep(), Constants::builtin());
    let programs = &plan.compiled.programs;
    simulate(programs, StepProgram::TRAIN, &plan.asked(), hardware, &framework, &constants).unwrap()
}

fn cluster(name: &str) -> Hardware {
    Catalogue::builtin().hardware(name).unwrap()
}

/// A small model on a GPU, with more of a config.
fn small(more: &str) -> String {
    format!(
        "[model]\nvocab_size = 512\nlayers = 8\ndim = 256\nheads = 8\nffn = 512\n[train]\nseq = 256\nglobal_batch = 64\n\
         micro_batch = 2\ndevice = \"cuda\"\n[precision]\npolicy = \"bf16\"\n{more}"
    )
}

const LAYOUTS: [&str; 8] = [
    "",
    "[parallel]\ndp = 4\nzero = 3\n[recompute]\npolicy = \"full\"\n",
    "[parallel]\ndp = 2\nzero = 2\ntp = 2\nsequence_parallel = true\n",
    "[parallel]\npp = 4\n",
    "[parallel]\npp = 4\ndp = 2\nzero = 1\nschedule = \"interleaved\"\nvirtual = 2\n",
    "[parallel]\npp = 2\nschedule = \"zb-h1\"\n",
    "[parallel]\npp = 2\nschedule = \"zb-v\"\ntp = 2\n",
    "[parallel]\ncp = 2\npp = 2\nschedule = \"gpipe\"\n",
];

#[test]
fn peak_memory_is_the_arena_and_the_same_comes_out_every_time() {
    let hardware = cluster("leonardo");
    for layout in LAYOUTS {
        let plan = planned(&small(layout));
        let found = forecast(&plan, &hardware);
        for (role, program) in found.roles.iter().zip(&plan.compiled.programs) {
            assert_eq!(role.memory_bytes, program.arena_bytes, "{layout}");
        }
        assert_eq!(found.memory_bytes, plan.memory.total_bytes, "{layout}");
        assert_eq!(found, forecast(&plan, &hardware), "{layout}");
    }
}

#[test]
fn what_is_left_out_changes_nothing_and_time_adds_up() {
    let hardware = cluster("meta-24k");
    let (framework, constants) = (Framework::lockstep(), Constants::builtin());
    let terms = constants.terms(&framework, &hardware);
    for layout in LAYOUTS {
        let text = small(layout).replace("global_batch = 64", "global_batch = 512");
        let plan = planned(&text);
        let found = forecast(&plan, &hardware);
        let work = Workload::new(&plan.compiled.programs, StepProgram::TRAIN, &framework).unwrap();
        let price = work.on(&hardware, &framework).price(&terms).unwrap();
        assert!((price - found.step_s).abs() < 1e-8 * price, "{layout}: {price} {}", found.step_s);
        for role in &found.roles {
            // Slots follow each other, and end with the step.
            let ordered = role.slots.windows(2).all(|pair| pair[1].start_s >= pair[0].end_s - 1e-12);
            assert!(ordered && role.slots.last().is_some_and(|s| s.end_s <= found.step_s + 1e-12), "{layout}");
            // Kernels, what they wait for and what overlapping costs are all of the time.
            let overlapped: f64 =
                role.classes.iter().filter(|(class, _)| class.starts_with("collectives")).map(|(_, s)| s).sum();
            let all: f64 = role.classes.values().sum::<f64>() - overlapped + role.exposed_communication_s;
            assert!((all / found.step_s - 1.0).abs() < 0.02, "{layout}: {all} of {}", found.step_s);
        }
        assert!(found.mfu > 0.0 && found.mfu <= found.hfu && found.hfu < 1.0, "{layout}: {} {}", found.mfu, found.hfu);
    }
}

#[test]
fn the_bubble_of_equal_stages_is_that_of_the_formula() {
    for (m, p) in [(8, 4), (32, 4), (16, 8)] {
        let text = small(&format!("[parallel]\npp = {p}\n"))
            .replace("global_batch = 64", &format!("global_batch = {}", 2 * m));
        // The output head is small beside the layers.
        let text = text.replace("vocab_size = 512", "vocab_size = 64").replace("dim = 256", "dim = 2048");
        let text = text.replace("ffn = 512", "ffn = 8192").replace("seq = 256", "seq = 4096");
        let found = forecast(&planned(&text), &cluster("meta-24k"));
        let formula = (p - 1) as f64 / (m + p - 1) as f64;
        assert!((found.bubble - formula).abs() < 0.03, "p = {p}, m = {m}: {} {formula}", found.bubble);
    }
}

/// Llama 3.1 405B as it was trained (its paper, table 4).
fn llama_405b(dp: usize, cp: usize, seq: usize, batch: usize) -> String {
    format!(
        "[model]\npreset = \"llama-3.1-405b\"\n[train]\nseq = {seq}\nglobal_batch = {batch}\nmicro_batch = 1\ndevice = \"cuda\"\n\
         [precision]\npolicy = \"bf16\"\n[parallel]\ndp = {dp}\nzero = 1\ntp = 8\nsequence_parallel = true\ncp = {cp}\npp = 16\n\
         schedule = \"interleaved\"\nvirtual = 4\n"
    )
}

#[test]
fn llama_3_405b_runs_at_about_the_published_mfu() {
    let hardware = cluster("meta-24k");
    for (dp, cp, seq, batch, published) in
        [(64, 1, 8192, 2048, 0.43), (128, 1, 8192, 2048, 0.41), (8, 16, 131_072, 128, 0.38)]
    {
        let plan = planned(&llama_405b(dp, cp, seq, batch));
        let found = forecast(&plan, &hardware);
        assert!((found.mfu / published - 1.0).abs() < 0.1, "dp = {dp}, cp = {cp}: {} {published}", found.mfu);
    }
}

/// A machine whose matmuls of every kind reach 10 GFLOP/s, and on which nothing else takes any time.
fn planted() -> MachineProfile {
    let table = |op: &str, family: Family, size: &[f64], seconds: f64| {
        let points = vec![Point { size: size.to_vec(), seconds }];
        Table { op: op.to_owned(), dtype: DType::F32, family, points }
    };
    let mut tables: Vec<Table> = ["linear", "linear_grad_input", "linear_grad_weight", "linear_cross_entropy"]
        .map(|op| table(op, Family::Matmul, &[64.0, 64.0, 64.0, 1.0, 1.0], 2.0 * 64f64.powi(3) / 1e10))
        .into();
    for op in ["attention", "attention_grad"] {
        tables.push(table(op, Family::Attention, &[64.0, 16.0, 1e6, 1e4], 1e-12));
    }
    tables.push(table("adamw", Family::Bytes, &[1e6], 1e-12));
    let setting = Setting { threads: 1, bytes_per_s: 1e30, tables, ..Setting::nominal() };
    MachineProfile { name: "planted".into(), processor: String::new(), saved_unix_s: 0, settings: vec![setting] }
}

#[test]
fn a_machine_of_planted_rates_gives_the_time_that_a_hand_computes() {
    let (layers, dim, ffn, vocab, tokens) = (3, 64, 160, 256, 4 * 64);
    let text = format!(
        "[model]\nvocab_size = {vocab}\nlayers = {layers}\ndim = {dim}\nheads = 4\nkv_heads = 4\nffn = {ffn}\n[train]\nseq = 64\n\
         global_batch = 4\nmicro_batch = 2\ndevice = \"cpu\"\nthreads = 1\n[precision]\npolicy = \"fp32\"\n"
    );
    let profile = planted();
    let measured = profile.measured(1, 1).unwrap();
    let price = |text: &str| {
        let plan = planned(text);
        let work = Workload::new(&plan.compiled.programs, StepProgram::TRAIN, &Framework::lockstep()).unwrap();
        work.measured(&measured, &Framework::lockstep()).0.price(&measured.setting.terms()).unwrap()
    };
    // Forward, and twice as much backward: q, k, v, o; gate, up, down; the head.
    let weights = layers * (4 * dim * dim + 3 * dim * ffn) + dim * vocab;
    let expected = 6.0 * (weights * tokens) as f64 / 1e10;
    let found = price(&text);
    assert!((found / expected - 1.0).abs() < 1e-3, "{found} {expected}");
    // Everything in the layers is computed once more.
    let again = price(&format!("{text}[recompute]\npolicy = \"full\"\n"));
    let most = expected + 2.0 * (layers * (4 * dim * dim + 3 * dim * ffn) * tokens) as f64 / 1e10;
    assert!(again > 1.15 * found && again <= 1.001 * most, "{again} {found} {most}");
}
