//! A plan needs a machine's description, not the machine: nothing here can run a program.

use lockstep_compile::Precision;
use lockstep_config::{Config, OffloadSize, OptimizerName};
use lockstep_ir::DeviceProfile;
use lockstep_ir::Hint;
use lockstep_plan::{
    GenerationShape, Machine, PlanError, Rates, Room, Target, account, cache_plan, checkpoint_bytes, evaluate,
    evaluation_program, generation_program, largest_micro_batches, plan, ways_to_fit, with_fitting_offload,
};
use lockstep_sim::{Catalogue, Hardware};
use std::collections::BTreeMap;

/// A machine of this many cores, with a GPU or without.
struct Described {
    cores: usize,
    gpu: bool,
}

impl Machine for Described {
    fn cores(&self) -> usize {
        self.cores
    }

    fn has_gpus(&self, ranks: usize) -> bool {
        self.gpu && ranks == 1
    }

    fn profile(&self, device: Target, threads: usize, precision: Precision) -> DeviceProfile {
        DeviceProfile {
            name: format!("{} of {threads} threads in {}", device.name(), precision.compute),
            alignment: 64,
            cross_entropy_logits: 1 << 20,
            cross_entropy_rows: 1 << 10,
            workspaces: BTreeMap::new(),
            workspaces_with_optional: BTreeMap::new(),
            fusions: Vec::new(),
            faster: Vec::new(),
            fp8_weights: 0,
        }
    }
}

fn config(keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nffn = 48\n[train]\nseq = 16\nglobal_batch = 8\n{keys}"
    );
    Config::parse(&text, "run.toml", &[]).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_profile_of_the_machine_is_what_programs_are_compiled_for() {
    let machine = Described { cores: 12, gpu: false };
    let planned = |keys: &str| plan(&machine, &config(keys)).unwrap();
    assert_eq!((planned("").device.as_str(), planned("").target), ("cpu of 12 threads in f32", Target::Cpu));
    assert_eq!(planned("[parallel]\ndp = 4\n").device, "cpu of 3 threads in f32");
    assert_eq!(planned("device = \"cuda\"\n[precision]\npolicy = \"bf16\"\n").device, "cuda of 12 threads in bf16");
}

#[test]
fn every_optimizer_of_the_config_has_a_rule_and_a_checkpoint_of_its_moments() {
    for name in OptimizerName::ALL {
        let config = config(&format!("[optimizer]\nname = \"{name}\"\n"));
        let plan = plan(&Described { cores: 1, gpu: false }, &config).unwrap();
        let (planned, estimated) = (plan.checkpoint_bytes(), checkpoint_bytes(&config, plan.parameters));
        assert!(planned <= estimated && estimated < 2 * planned, "{name}: {planned} {estimated}");
    }
    // Rows of 192 elements are no whole blocks: those of 256 are.
    let keys = "[precision]\npolicy = \"bf16\"\nmoments = \"int8\"\nmaster = \"bf16\"\n[optimizer]\nname = \"adamw\"\n";
    let text =
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 192\nheads = 4\nffn = 256\n[train]\nseq = 16\nglobal_batch = 8\n";
    let config = Config::parse(&format!("{text}{keys}"), "run.toml", &[]).unwrap();
    let plan = plan(&Described { cores: 1, gpu: false }, &config).unwrap();
    assert_eq!(plan.checkpoint_bytes(), checkpoint_bytes(&config, plan.parameters));
}

#[test]
fn auto_takes_a_gpu_for_one_rank_where_there_is_one() {
    let target = |gpu, keys| plan(&Described { cores: 1, gpu }, &config(keys)).unwrap().target;
    assert_eq!(target(true, ""), Target::Cuda { deterministic: false });
    assert_eq!(target(true, "[precision]\npolicy = \"fp16\"\n"), Target::Cuda { deterministic: false });
    assert_eq!(target(false, ""), Target::Cpu);
    assert_eq!(target(true, "[parallel]\ndp = 2\n"), Target::Cpu);
    // What a GPU does not do stays on the CPU, unless it was asked for there.
    assert_eq!(target(true, "reproducible = true\n"), Target::Cpu);
    let asked = plan(&Described { cores: 1, gpu: false }, &config("reproducible = true\ndevice = \"cuda\"\n"));
    assert!(matches!(asked, Err(PlanError::NotOnDevice { what: "train.reproducible", .. })), "{asked:?}");
}

#[test]
fn heads_that_no_kernel_of_a_gpu_takes_are_refused_by_their_key() {
    let wide = |keys: &str, device: &str| {
        let text = format!(
            "[model]\nvocab_size = 64\nlayers = 1\ndim = 32\nheads = 2\nffn = 48\n{keys}\n[train]\nseq = 8\nglobal_batch = 1\n\
             device = \"{device}\"\n"
        );
        plan(&Described { cores: 1, gpu: true }, &Config::parse(&text, "run.toml", &[]).unwrap())
    };
    let latent = "kv_lora_rank = 16\nqk_nope_head_dim = 16\nqk_rope_head_dim = 8\nv_head_dim = 264";
    for (keys, said) in [("head_dim = 320", "model.head_dim = 320"), (latent, "model.v_head_dim = 264")] {
        let error = wide(keys, "cuda").unwrap_err().with_hint();
        let expected = format!(
            "{said} does not run with train.device = \"cuda\", whose kernels take heads of at most 256 elements"
        );
        assert!(error.starts_with(&expected) && error.contains("\nhint: choose model."), "{error}");
        // A CPU takes any.
        assert!(wide(keys, "cpu").is_ok() && wide(keys, "auto").unwrap().target == Target::Cpu);
    }
}

#[test]
fn latents_that_no_kernel_of_a_gpu_takes_over_a_cache_are_refused_where_text_is_written() {
    let text = |device: &str| {
        format!(
            "[model]\nvocab_size = 64\nlayers = 1\ndim = 32\nheads = 2\nffn = 48\nkv_lora_rank = 1000\nqk_nope_head_dim = 16\n\
             qk_rope_head_dim = 32\nv_head_dim = 16\n[train]\nseq = 8\nglobal_batch = 1\ndevice = \"{device}\"\n"
        )
    };
    let machine = Described { cores: 1, gpu: true };
    let of = |device| Config::parse(&text(device), "run.toml", &[]).unwrap();
    let error = cache_plan(&machine, &of("cuda"), &GenerationShape::one(8)).unwrap_err().with_hint();
    assert!(error.starts_with("model.kv_lora_rank = 1000 ") && error.contains("of at most 992"), "{error}");
    assert!(cache_plan(&machine, &of("cpu"), &GenerationShape::one(8)).is_ok());
    assert!(plan(&machine, &of("cuda")).is_ok());
}

#[test]
fn experts_and_the_shared_expert_that_reads_the_same_are_quantised_in_every_recipe() {
    for recipe in ["current", "delayed", "rowwise", "block"] {
        let text = format!(
            "[model]\narchitecture = \"deepseek\"\nvocab_size = 256\nlayers = 2\ndim = 128\nheads = 2\nkv_heads = 2\nffn = 256\n\
             expert_ffn = 128\nexperts = 4\nexperts_per_token = 2\nshared_experts = 1\ndense_layers = 1\n[train]\nseq = 128\n\
             global_batch = 1\ndevice = \"cuda\"\n[precision]\npolicy = \"fp8\"\nfp8_recipe = \"{recipe}\"\n"
        );
        let config = Config::parse(&text, "run.toml", &[]).unwrap_or_else(|error| panic!("{error}"));
        let planned = plan(&Described { cores: 1, gpu: true }, &config).unwrap_or_else(|error| panic!("{error}"));
        let text = planned.compiled.programs[0].to_string();
        let of_shared = match recipe {
            "rowwise" => "rowwise_linear(",
            "block" => "blockwise_linear(",
            _ => "fp8_linear(",
        };
        assert!(text.contains("fp8_grouped(") && text.contains(of_shared), "{recipe}: {text}");
    }
}

#[test]
fn all_that_is_shown_of_a_plan_needs_no_device() {
    let machine = Described { cores: 2, gpu: false };
    let config = config("");
    let planned = plan(&machine, &config).unwrap();
    assert!(account(&machine, &config, &planned).unwrap().policies.iter().any(|policy| policy.chosen));
    let rows = largest_micro_batches(&machine, &config, 1 << 30).unwrap();
    assert!(rows.iter().all(|row| row.micro_batch.is_some()), "{rows:?}");
    let room = Room { bytes: planned.memory.total_bytes, shared: true, place: "here".into() };
    assert!(room.verdict(&planned.stages, 1).fits);
    assert_eq!(planned.require_memory(&machine, &config, Some(room.bytes), None).unwrap(), room.bytes);
    let error = planned.require_memory(&machine, &config, Some(room.bytes - 1), None).unwrap_err();
    assert!(error.is_request() && error.with_hint().contains("train.micro_batch = "), "{error}");
    let cut = lockstep_plan::Cut { sequences: 3, rest: 5 };
    assert_eq!(evaluation_program(&machine, &config, (2, 16, 1), cut, false).unwrap().0.entries.len(), 2);
    let cache = cache_plan(&machine, &config, &GenerationShape::one(16)).unwrap();
    assert_eq!(generation_program(&machine, &config, &cache).unwrap().1, 2);
}

#[test]
fn activations_in_the_memory_of_the_host_are_proposed_where_they_let_a_run_fit() {
    let machine = Described { cores: 1, gpu: true };
    let planned = |offload: &str| {
        let text = format!(
            "[model]\nvocab_size = 256\nlayers = 32\ndim = 64\nheads = 1\nffn = 64\n[train]\nseq = 8192\nglobal_batch = 1\n\
             device = \"cuda\"\n[precision]\npolicy = \"bf16\"\ngradients = \"bf16\"\nmoments = \"int8\"\nmaster = \"bf16\"\n\
             [recompute]\npolicy = \"full\"\n{offload}"
        );
        let config = Config::parse(&text, "run.toml", &[]).unwrap();
        (plan(&machine, &config).unwrap().memory, config)
    };
    let ((stays, config), (goes, _)) = (planned(""), planned("[offload]\nactivations = true\n"));
    // What enters 31 of 32 layers: a MiB each.
    assert_eq!((goes.host_bytes, goes.host_activation_bytes), (31 << 20, 31 << 20));
    assert!(goes.total_bytes + (25 << 20) < stays.total_bytes, "{} and {}", goes.total_bytes, stays.total_bytes);
    let room = Room { bytes: goes.total_bytes + (1 << 20), shared: false, place: "on a test".into() };
    let hardware = Hardware::assumed(Catalogue::builtin().gpu("h100").unwrap());
    let ways = ways_to_fit(&machine, &config, &room, Some(Rates::Catalogue(&hardware))).unwrap();
    let keys: Vec<_> = ways.changes.iter().map(|change| change.keys.join(", ")).collect();
    assert_eq!(keys, ["offload.activations = true"], "{ways}");
}

#[test]
fn what_is_saved_recomputed_and_moved_is_decided_together_by_predicted_time() {
    let machine = Described { cores: 2, gpu: true };
    let hardware = Hardware::assumed(Catalogue::builtin().gpu("h100").unwrap());
    let rates = Rates::Catalogue(&hardware);
    let config = |keys: &str| {
        let text = format!(
            "[model]\nvocab_size = 256\nlayers = 4\ndim = 2048\nheads = 16\nffn = 5632\n[train]\nseq = 32768\nglobal_batch = 1\n\
             device = \"cuda\"\n[precision]\npolicy = \"bf16\"\n{keys}"
        );
        Config::parse(&text, "run.toml", &[]).unwrap()
    };
    let evaluated = |config: &Config| evaluate(&machine, config, rates).unwrap();
    let bytes = |policy: &str| {
        let of = config(&format!("[recompute]\npolicy = \"{policy}\"\n"));
        evaluated(&of).memory().total_bytes
    };
    // A third of what recomputation may save has room.
    let budget = bytes("full") + (bytes("none") - bytes("full")) / 3;
    let under = |offload: &str| {
        config(&format!("[recompute]\npolicy = \"budget\"\nbudget = \"{budget} B\"\n[offload]\n{offload}"))
    };
    let room = Room { bytes: budget + (1 << 29), shared: false, place: "on a test".into() };
    let fitting = |config: Config, room: &Room| with_fitting_offload(&machine, config, room, Some(rates)).unwrap();
    let found = fitting(under("activations = \"auto\"\n"), &room);
    assert!(matches!(found.offload.activations, OffloadSize::Most(_)), "{:?}", found.offload.activations);
    assert!(found.resolved_toml().contains("the shortest predicted step in "), "{}", found.resolved_toml());
    let step = |config: &Config| {
        let found = evaluated(config);
        assert!(found.memory().total_bytes <= budget);
        found.forecast.step_s
    };
    // Something of each: less is recomputed than without the host's memory, and less is moved than there is.
    let (both, recomputed, moved) = (step(&found), step(&under("")), step(&under("activations = true\n")));
    assert!(both < 0.99 * recomputed && both <= moved, "{both} s beside {recomputed} and {moved}");
    // What fits without stays on the device, and so does optimizer state, whose copies are never free.
    let large = Room { bytes: 70 << 30, ..room.clone() };
    let stays = fitting(config("[offload]\nactivations = \"auto\"\noptimizer = \"auto\"\n"), &large);
    assert_eq!([stays.offload.activations, stays.offload.optimizer], [OffloadSize::All(false); 2]);
    // Together with state, where both have to go.
    let small = Room { bytes: bytes("none") / 4 * 3 + (1 << 29), ..room };
    let goes = fitting(config("[offload]\nactivations = \"auto\"\noptimizer = \"auto\"\n"), &small);
    let needs = evaluated(&goes);
    assert!(needs.memory().total_bytes + (1 << 29) <= small.bytes && needs.memory().host_bytes > 0);
}
