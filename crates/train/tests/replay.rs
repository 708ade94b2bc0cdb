//! The replay corpus: what programs look like, how large they are and which losses they give. A change that is called a
//! refactoring leaves it as it is.
//!
//! Programs are compiled for device profiles that are data (`replay/profiles.txt`), not for the machine at hand: `replay/corpus.txt` is the
//! same everywhere. It has a line per part of a program (its hash) for a CPU with AMX, and a line per program for other devices. What runs is
//! hashed (`replay/text.rs`): kernels, shapes, offsets, streams, order, collectives; not what ops, values and dimensions are called. The bits
//! of three fp32 losses (`replay/losses.txt`) are those of the vector path at hand: with fused multiply-add, and without (`portable`).
//!
//! After a change that is meant to change programs, `LOCKSTEP_REPLAY=DIR cargo test -p lockstep-train --test replay` writes these three files
//! and every printed program to `DIR`: compare the programs with those of the commit before (`diff -r`), then take over the files; losses
//! again with `LOCKSTEP_CPU=portable`.

mod common;
#[path = "replay/profiles.rs"]
mod profiles;
#[path = "replay/text.rs"]
mod text;

use common::{losses, write_corpus};
use lockstep_config::{Bytes, Config, DeviceChoice, FrozenPrecision, PrecisionPolicy};
use lockstep_exec::cpu::Simd;
use lockstep_ir::{StepProgram, counter};
use lockstep_plan::{GenerationShape, PlanError, cache_plan, generation_program, plan};
use profiles::{FIRST, GPU, OTHERS, Recorded};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Architectures, by their keys in `[model]`.
const MODELS: [(&str, &str); 20] = [
    ("llama", "kv_heads = 2"),
    ("tied", "kv_heads = 2\ntied_embeddings = true"),
    ("qwen2", "architecture = \"qwen2\"\nkv_heads = 2"),
    ("qwen3", "architecture = \"qwen3\"\nkv_heads = 2"),
    ("mistral", "architecture = \"mistral\"\nkv_heads = 2\nsliding_window = 5"),
    ("gpt2", "architecture = \"gpt2\"\npositions = 16\ndropout = 0.1"),
    ("naive", "kv_heads = 2\nattention = \"naive\""),
    ("mixtral", "architecture = \"mixtral\"\nkv_heads = 2\nexperts = 4"),
    ("qwen3_moe", "architecture = \"qwen3_moe\"\nkv_heads = 2\nexperts = 8\nexperts_per_token = 3\nexpert_ffn = 24"),
    ("olmoe", "architecture = \"olmoe\"\nkv_heads = 2\nexperts = 4"),
    ("deepseek", "architecture = \"deepseek\"\nexperts = 4"),
    ("dots1", "architecture = \"dots1\"\nexperts = 4"),
    ("heads", "kv_heads = 4"),
    ("olmo2", "architecture = \"olmo2\"\nkv_heads = 2"),
    (
        "gemma3",
        "architecture = \"gemma3_text\"\nkv_heads = 2\nsliding_window = 5\nlayer_types = [\"sliding\", \"full\"]\nsoftmax_scale_dim = 6",
    ),
    ("smollm3", "architecture = \"smollm3\"\nkv_heads = 2"),
    (
        "deepseek_v2",
        "architecture = \"deepseek_v2\"\nexperts = 4\nkv_lora_rank = 12\nqk_nope_head_dim = 6\nqk_rope_head_dim = 4\nv_head_dim = 8",
    ),
    (
        "deepseek_v3",
        "architecture = \"deepseek_v3\"\nexperts = 4\nq_lora_rank = 10\nkv_lora_rank = 12\nqk_nope_head_dim = 6\nqk_rope_head_dim = 4\n\
         v_head_dim = 8",
    ),
    ("mtp", "kv_heads = 2\nmtp_depth = 2\nmtp_loss = 0.3"),
    ("gpt_oss", "architecture = \"gpt_oss\"\nkv_heads = 2\nexperts = 4\nsliding_window = 5"),
];

/// Which models are tried in a way.
#[derive(Clone, Copy, PartialEq)]
enum Of {
    All,
    Llama,
    /// A Llama whose heads have keys of their own.
    Heads,
    /// Mixtures of experts.
    Experts,
    Mixtral,
    /// Latent attention.
    Latent,
}

/// Everything else: a name, the models, and lines for `[train]` and the tables after it.
const WAYS: [(&str, Of, &str); 67] = [
    ("one", Of::All, ""),
    ("accumulate", Of::Llama, "micro_batch = 2"),
    ("reproducible", Of::Llama, "micro_batch = 2\nreproducible = true"),
    ("bf16", Of::All, "[precision]\npolicy = \"bf16\""),
    ("bf16-gradients", Of::Llama, "micro_batch = 4\n[precision]\npolicy = \"bf16\"\ngradients = \"bf16\""),
    ("fp16", Of::Llama, "[precision]\npolicy = \"fp16\""),
    ("tf32", Of::All, "[precision]\npolicy = \"tf32\""),
    ("fp8", Of::Llama, "[precision]\npolicy = \"fp8\"\nfp8_weights = 0"),
    (
        "fp8-full",
        Of::Llama,
        "micro_batch = 2\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0\n[recompute]\npolicy = \"full\"",
    ),
    (
        "fp8-cp2-tp2-sp",
        Of::Llama,
        "micro_batch = 4\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0\n[parallel]\ncp = 2\ntp = 2\nsequence_parallel = true",
    ),
    (
        "fp8-rowwise-tp2-sp",
        Of::Llama,
        "micro_batch = 4\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0\nfp8_recipe = \"rowwise\"\n[parallel]\ntp = 2\nsequence_parallel = true",
    ),
    (
        "fp8-delayed-dp2-zero3-tp2",
        Of::Llama,
        "micro_batch = 2\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0\nfp8_recipe = \"delayed\"\n[parallel]\ndp = 2\nzero = 3\ntp = 2",
    ),
    (
        "fp8-dp2-zero3-pp2-zb-v",
        Of::Llama,
        "micro_batch = 1\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0\n[parallel]\ndp = 2\nzero = 3\npp = 2\nschedule = \"zb-v\"",
    ),
    (
        "state-bf16-dp2-zero1-tp2",
        Of::Llama,
        "micro_batch = 2\n[precision]\npolicy = \"bf16\"\nmoments = \"bf16\"\nmaster = \"bf16\"\n[parallel]\ndp = 2\nzero = 1\ntp = 2",
    ),
    ("noise-scale", Of::Llama, "micro_batch = 2\nnoise_scale = true"),
    ("ramp", Of::Llama, "micro_batch = 2\nbatch_ramp = [{ tokens = 256, global_batch = 16 }]"),
    ("selective", Of::All, "[recompute]\npolicy = \"selective\""),
    ("full", Of::Llama, "micro_batch = 4\n[recompute]\npolicy = \"full\""),
    ("sqrt", Of::Llama, "[recompute]\npolicy = \"sqrt\""),
    ("every-k", Of::Llama, "[recompute]\npolicy = \"every-k\"\nevery = 3"),
    ("budget", Of::Llama, "[recompute]\npolicy = \"budget\"\nbudget = \"2750KiB\""),
    ("documents", Of::Llama, "[data]\npaths = [\".\"]\nextensions = [\"txt\"]\ndocument_mask = true"),
    ("tasks", Of::Llama, "[eval]\ntasks = [\"tasks.jsonl\"]"),
    ("tasks-tp2", Of::Llama, "[eval]\ntasks = [\"tasks.jsonl\"]\n[parallel]\ntp = 2"),
    ("sgd", Of::Llama, "[optimizer]\nname = \"sgd\""),
    ("lion", Of::Llama, "[optimizer]\nname = \"lion\""),
    ("muon", Of::Llama, "[optimizer]\nname = \"muon\""),
    ("muon-dp2-zero3-tp2", Of::Llama, "[optimizer]\nname = \"muon\"\n[parallel]\ndp = 2\nzero = 3\ntp = 2"),
    ("dp2", Of::Llama, "[parallel]\ndp = 2"),
    ("dp2-zero1", Of::Llama, "micro_batch = 2\n[parallel]\ndp = 2\nzero = 1"),
    ("dp2-zero2", Of::Llama, "micro_batch = 2\n[parallel]\ndp = 2\nzero = 2"),
    ("dp2-zero3", Of::Llama, "micro_batch = 2\n[parallel]\ndp = 2\nzero = 3\nreshard_after_forward = false"),
    ("dp2-zero3-full", Of::All, "micro_batch = 2\n[parallel]\ndp = 2\nzero = 3\n[recompute]\npolicy = \"full\""),
    ("hsdp-zero1", Of::Llama, "micro_batch = 1\n[parallel]\ndp_replicate = 2\ndp = 2\nzero = 1"),
    ("hsdp-zero2", Of::Llama, "micro_batch = 1\n[parallel]\ndp_replicate = 2\ndp = 2\nzero = 2"),
    ("hsdp-zero3", Of::Llama, "micro_batch = 1\n[parallel]\ndp_replicate = 2\ndp = 2\nzero = 3"),
    ("tp2", Of::Llama, "[parallel]\ntp = 2"),
    ("tp2-sp", Of::All, "[parallel]\ntp = 2\nsequence_parallel = true"),
    ("tp4-sp", Of::Llama, "[parallel]\ntp = 4\nsequence_parallel = true"),
    ("cp2", Of::All, "[parallel]\ncp = 2"),
    ("cp4-zero1", Of::Llama, "micro_batch = 2\n[parallel]\ncp = 4\nzero = 1"),
    ("cp2-gather", Of::Llama, "[parallel]\ncp = 2\ncontext = \"gather\""),
    ("cp2-a2a", Of::Heads, "[parallel]\ncp = 2\ncontext = \"a2a\""),
    ("cp2-a2a-tp2-sp", Of::Heads, "[parallel]\ncp = 2\ncontext = \"a2a\"\ntp = 2\nsequence_parallel = true"),
    ("pp2-gpipe", Of::Llama, "micro_batch = 2\n[parallel]\npp = 2\nschedule = \"gpipe\""),
    ("pp4-1f1b", Of::Llama, "micro_batch = 1\n[parallel]\npp = 4"),
    ("pp2-interleaved", Of::Llama, "micro_batch = 1\n[parallel]\npp = 2\nschedule = \"interleaved\"\nvirtual = 2"),
    ("pp2-zb-h1", Of::All, "micro_batch = 1\n[parallel]\npp = 2\nschedule = \"zb-h1\""),
    ("pp4-zb-h1-zero1", Of::Llama, "micro_batch = 1\n[parallel]\ndp = 2\nzero = 1\npp = 4\nschedule = \"zb-h1\""),
    ("pp2-zb-v", Of::Llama, "micro_batch = 1\n[parallel]\npp = 2\nschedule = \"zb-v\""),
    ("pp2-zb-v-zero3", Of::Llama, "micro_batch = 1\n[parallel]\ndp = 2\nzero = 3\npp = 2\nschedule = \"zb-v\""),
    ("offload-activations", Of::Llama, "micro_batch = 2\n[offload]\nactivations = true"),
    (
        "offload-pp2-zb-v-zero3",
        Of::Llama,
        "micro_batch = 1\n[parallel]\ndp = 2\nzero = 3\npp = 2\nschedule = \"zb-v\"\n[offload]\nactivations = true\noptimizer = true",
    ),
    ("dp2-tp2-pp2", Of::All, "micro_batch = 1\n[parallel]\ndp = 2\ntp = 2\npp = 2"),
    (
        "dp2-zero1-tp2-sp-pp2",
        Of::Llama,
        "micro_batch = 1\n[parallel]\ndp = 2\nzero = 1\ntp = 2\nsequence_parallel = true\npp = 2",
    ),
    (
        "dp2-zero3-cp2-pp2",
        Of::Llama,
        "micro_batch = 1\n[parallel]\ndp = 2\nzero = 3\ncp = 2\npp = 2\nschedule = \"interleaved\"",
    ),
    ("dp2-zero3-tp2-bf16", Of::Llama, "[parallel]\ndp = 2\nzero = 3\ntp = 2\n[precision]\npolicy = \"bf16\""),
    ("ep2", Of::Experts, "micro_batch = 2\n[parallel]\nep = 2"),
    ("ep2-bound", Of::Mixtral, "micro_batch = 2\n[parallel]\nep = 2\nep_bound = 1.5"),
    ("dp2-zero3-ep2", Of::Experts, "micro_batch = 2\n[parallel]\ndp = 2\nzero = 3\nep = 2"),
    ("hsdp-zero2-ep2", Of::Mixtral, "micro_batch = 1\n[parallel]\ndp_replicate = 2\nzero = 2\nep = 2"),
    ("ep2-tp2-sp", Of::Mixtral, "micro_batch = 2\n[parallel]\nep = 2\ntp = 2\nsequence_parallel = true"),
    ("cp2-ep2", Of::Mixtral, "micro_batch = 2\n[parallel]\ncp = 2\nep = 2"),
    ("cp2-latent", Of::Latent, "[parallel]\ncp = 2\ncontext = \"latent\""),
    (
        "cp4-latent-tp2-sp-bf16",
        Of::Latent,
        "micro_batch = 2\n[parallel]\ncp = 4\ncontext = \"latent\"\ntp = 2\nsequence_parallel = true\n[precision]\npolicy = \"bf16\"",
    ),
    (
        "dp2-zero3-cp2-latent-pp2-zb-v-full",
        Of::Latent,
        "micro_batch = 1\n[parallel]\ndp = 2\nzero = 3\ncp = 2\ncontext = \"latent\"\npp = 2\nschedule = \"zb-v\"\n[recompute]\npolicy = \"full\"",
    ),
    ("ep2-pp2-zb-v", Of::Mixtral, "micro_batch = 1\n[parallel]\nep = 2\npp = 2\nschedule = \"zb-v\""),
];

fn config(dir: &Path, model: &str, way: &str) -> Config {
    let data = if way.contains("[data]") { "" } else { "[data]\npaths = [\".\"]\nextensions = [\"txt\"]\n" };
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = 4\ndim = 32\nheads = 4\nffn = 48\n{model}\n{data}\
         [train]\nsteps = 3\nseq = 16\nglobal_batch = 8\nthreads = 1\ndevice = \"cpu\"\n{way}\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    std::fs::write(dir.join("tasks.jsonl"), "{\"query\": \"the square\", \"target\": \" of\"}\n").unwrap();
    Config::load(&dir.join("run.toml"), &["optimizer.warmup_steps=1".into()]).unwrap()
}

/// Lines on the parts of a program: its memory, every segment, its schedules.
fn parts(program: &StepProgram) -> String {
    let mut lines = String::new();
    let mut part = |name: &str, text: &str| writeln!(lines, "  {name} {:016x}", counter::key(0, text)).unwrap();
    part("memory", &text::memory(program));
    for segment in &program.segments {
        part(&format!("segment {segment}"), &text::segment(program, segment));
    }
    part("entries", &text::entries(program));
    lines
}

/// All that the corpus hashes of a program.
fn whole(program: &StepProgram) -> String {
    let segments = program.segments.iter().map(|segment| format!("{segment}\n{}", text::segment(program, segment)));
    format!("{}{}{}", text::memory(program), segments.collect::<String>(), text::entries(program))
}

fn describe(name: &str, programs: &[StepProgram], dump: Option<&Path>) -> String {
    let mut lines = String::new();
    for (stage, program) in programs.iter().enumerate() {
        writeln!(lines, "{name}, stage {stage}: arena {} bytes", program.arena_bytes).unwrap();
        lines.push_str(&parts(program));
        if let Some(dir) = dump {
            std::fs::write(dir.join(format!("{name}-{stage}.txt")), program.to_string()).unwrap();
        }
    }
    lines
}

/// A line on the programs of one device.
fn summary(device: &str, programs: Result<Vec<StepProgram>, PlanError>) -> String {
    let programs = match programs {
        Ok(programs) => programs,
        Err(PlanError::NotOnDevice { what, .. }) => return format!("  {device}: {what} is not for it\n"),
        Err(error) => panic!("{device}: {error}"),
    };
    let arena: u64 = programs.iter().map(|program| program.arena_bytes).sum();
    let text: String = programs.iter().map(whole).collect();
    format!("  {device}: arenas {arena} bytes, {:016x}\n", counter::key(0, &text))
}

/// The folder that a new corpus is written to, where one is asked for.
fn dump() -> Option<PathBuf> {
    let dir = PathBuf::from(std::env::var_os("LOCKSTEP_REPLAY")?);
    std::fs::create_dir_all(&dir).unwrap();
    Some(dir)
}

/// Holds lines against those that were recorded.
fn compare(file: &str, found: &str, recorded: &str) {
    if let Some(dir) = dump() {
        std::fs::write(dir.join(file), found).unwrap();
    }
    let apart = found.lines().zip(recorded.lines()).position(|(a, b)| a != b);
    if let Some(line) = apart.or((found.lines().count() != recorded.lines().count()).then_some(0)) {
        let program = found.lines().take(line + 1).filter(|l| !l.starts_with(' ')).last().unwrap_or_default();
        panic!(
            "line {} of replay/{file}, {program}:\n was {:?}\n is  {:?}\nsee the top of this file for what to do",
            line + 1,
            recorded.lines().nth(line).unwrap_or_default(),
            found.lines().nth(line).unwrap_or_default(),
        );
    }
}

/// The ways that a model is tried in: a name, and lines for `[train]`.
fn ways(model: &str, keys: &str) -> impl Iterator<Item = (String, &'static str)> {
    let is = |of: Of| match of {
        Of::All => true,
        Of::Llama => model == "llama",
        Of::Heads => model == "heads",
        Of::Experts => keys.contains("experts = "),
        Of::Mixtral => model == "mixtral",
        Of::Latent => keys.contains("kv_lora_rank = "),
    };
    // Scores that are stored go over no parts of sequences.
    let refused = |way: &str| model == "naive" && way.contains("cp2");
    let tried = WAYS.iter().filter(|(way, of, _)| is(*of) && !refused(way));
    tried.map(|(way, _, train)| (format!("{model}-{way}"), *train)).collect::<Vec<_>>().into_iter()
}

#[test]
fn programs_are_those_of_the_corpus() {
    let (dump, dir) = (dump(), tempfile::tempdir().unwrap());
    write_corpus(dir.path());
    let machines: Vec<(&str, Recorded)> = OTHERS.iter().map(|name| (*name, Recorded::new(name))).collect();
    let on = |config: &Config, device: &str| match device {
        GPU => {
            let mut config = config.clone();
            config.train.device = DeviceChoice::Cuda;
            // Between the arenas of full recomputation and of none.
            config.recompute.budget = config.recompute.budget.map(|_| Bytes(35_000_000));
            config
        }
        _ => config.clone(),
    };
    let first = Recorded::new(FIRST);
    let (mut corpus, mut count) = (String::new(), 0);
    for (model, keys) in MODELS {
        for (name, train) in ways(model, keys) {
            let config = config(dir.path(), keys, train);
            corpus += &describe(&name, &plan(&first, &config).unwrap().compiled.programs, dump.as_deref());
            for (device, machine) in &machines {
                corpus += &summary(device, plan(machine, &on(&config, device)).map(|plan| plan.compiled.programs));
            }
            count += 1;
        }
        for (way, tp, frozen) in [
            ("generate", 1, FrozenPrecision::Policy),
            ("generate-tp2", 2, FrozenPrecision::Policy),
            ("generate-int8", 1, FrozenPrecision::Int8),
        ] {
            let mut config = config(dir.path(), keys, "");
            config.precision.frozen = frozen;
            let generate = |machine, config: &Config| {
                let shape = GenerationShape { texts: 2, tp, ..GenerationShape::one(16) };
                let cache = cache_plan(machine, config, &shape)?;
                generation_program(machine, config, &cache)
            };
            let (program, _) = generate(&first, &config).unwrap();
            corpus += &describe(&format!("{model}-{way}"), &[program], dump.as_deref());
            for (device, machine) in &machines {
                let program = generate(machine, &on(&config, device));
                corpus += &summary(device, program.map(|(program, _)| vec![program]));
            }
            count += 1;
        }
    }
    assert!(count >= 150, "{count} configs");
    compare("corpus.txt", &corpus, include_str!("replay/corpus.txt"));
}

#[test]
fn losses_are_those_that_were_recorded() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let fused = if Simd::current() == Simd::Portable { "portable" } else { "fused" };
    let recorded = include_str!("replay/losses.txt");
    let mut found = String::new();
    for (name, keys, train) in
        MODELS.into_iter().flat_map(|(m, keys)| ways(m, keys).map(move |(name, t)| (name, keys, t)))
    {
        let config = config(dir.path(), keys, train);
        if config.precision.policy != PrecisionPolicy::Fp32 {
            continue;
        }
        let run = dir.path().join("run");
        let bits: Vec<String> =
            losses(&config, &run).iter().map(|(loss, ..)| format!("{:016x}", loss.to_bits())).collect();
        std::fs::remove_dir_all(run).unwrap();
        // What this machine does not say stays as it is.
        let mut lines = BTreeMap::from([(fused, bits.join(" "))]);
        let of_this = recorded.lines().filter_map(|line| line.strip_prefix(&format!("{name} ")));
        for (path, bits) in of_this.filter_map(|rest| rest.split_once(": ")) {
            lines.entry(path).or_insert_with(|| bits.to_owned());
        }
        lines.iter().for_each(|(path, bits)| writeln!(found, "{name} {path}: {bits}").unwrap());
    }
    compare("losses.txt", &found, recorded);
}

#[test]
fn losses_are_recorded_of_both_vector_paths() {
    let of = |path: &str| -> Vec<&str> {
        let lines = include_str!("replay/losses.txt").lines().filter_map(|line| line.split_once(": "));
        lines.filter_map(|(name, _)| name.strip_suffix(path)).collect()
    };
    assert_eq!(of(" fused"), of(" portable"), "record losses again with LOCKSTEP_CPU=portable");
}

#[test]
fn profiles_are_those_of_the_executors() {
    compare("profiles.txt", &profiles::of_the_executors(), include_str!("replay/profiles.txt"));
}
