//! The replay corpus: what programs look like, how large they are and which losses they give. A change that is called a
//! refactoring leaves it as it is.
//!
//! `replay/corpus.txt` has a line per part of a program (its hash) and the bits of three fp32 losses. After a change that is meant to
//! change programs, `LOCKSTEP_REPLAY=DIR cargo test -p lockstep-train --test replay` writes the corpus and every printed program to
//! `DIR`: compare the programs with those of the commit before (`diff -r`), then take over the new `corpus.txt`.

mod common;

use common::{losses, write_corpus};
use lockstep_config::{Config, PrecisionPolicy};
use lockstep_ir::{StepProgram, counter};
use lockstep_plan::{generation_program, plan};
use lockstep_train::Devices;
use std::fmt::Write;
use std::path::Path;

/// Architectures, by their keys in `[model]`.
const MODELS: [(&str, &str); 7] = [
    ("llama", "kv_heads = 2"),
    ("tied", "kv_heads = 2\ntied_embeddings = true"),
    ("qwen2", "architecture = \"qwen2\"\nkv_heads = 2"),
    ("qwen3", "architecture = \"qwen3\"\nkv_heads = 2"),
    ("mistral", "architecture = \"mistral\"\nkv_heads = 2\nsliding_window = 5"),
    ("gpt2", "architecture = \"gpt2\"\npositions = 16\ndropout = 0.1"),
    ("naive", "kv_heads = 2\nattention = \"naive\""),
];

/// Everything else: a name and lines for `[train]` and the tables behind it.
const WAYS: [(&str, &str); 23] = [
    ("one", ""),
    ("accumulate", "micro_batch = 2"),
    ("reproducible", "micro_batch = 2\nreproducible = true"),
    ("bf16", "[precision]\npolicy = \"bf16\""),
    ("bf16-gradients", "micro_batch = 4\n[precision]\npolicy = \"bf16\"\ngradients = \"bf16\""),
    ("fp16", "[precision]\npolicy = \"fp16\""),
    ("selective", "[recompute]\npolicy = \"selective\""),
    ("full", "micro_batch = 4\n[recompute]\npolicy = \"full\""),
    ("sqrt", "[recompute]\npolicy = \"sqrt\""),
    ("documents", "[data]\npaths = [\".\"]\nextensions = [\"txt\"]\ndocument_mask = true"),
    ("lion", "[optimizer]\nname = \"lion\""),
    ("muon", "[optimizer]\nname = \"muon\""),
    ("dp2", "[parallel]\ndp = 2"),
    ("dp2-zero1", "micro_batch = 2\n[parallel]\ndp = 2\nzero = 1"),
    ("dp2-zero2", "micro_batch = 2\n[parallel]\ndp = 2\nzero = 2"),
    ("dp2-zero3-full", "micro_batch = 2\n[parallel]\ndp = 2\nzero = 3\n[recompute]\npolicy = \"full\""),
    ("tp2", "[parallel]\ntp = 2"),
    ("tp2-sp", "[parallel]\ntp = 2\nsequence_parallel = true"),
    ("pp2-gpipe", "micro_batch = 2\n[parallel]\npp = 2\nschedule = \"gpipe\""),
    ("pp4-1f1b", "micro_batch = 1\n[parallel]\npp = 4"),
    ("dp2-tp2-pp2", "micro_batch = 1\n[parallel]\ndp = 2\ntp = 2\npp = 2"),
    ("dp2-zero1-tp2-sp-pp2", "micro_batch = 1\n[parallel]\ndp = 2\nzero = 1\ntp = 2\nsequence_parallel = true\npp = 2"),
    ("dp2-zero3-tp2-bf16", "[parallel]\ndp = 2\nzero = 3\ntp = 2\n[precision]\npolicy = \"bf16\""),
];

/// Ways that every architecture is tried in; Llama is tried in all.
const FOR_ALL: [&str; 5] = ["one", "selective", "dp2-zero3-full", "tp2-sp", "dp2-tp2-pp2"];

fn config(dir: &Path, model: &str, way: &str) -> Config {
    let data = if way.contains("[data]") { "" } else { "[data]\npaths = [\".\"]\nextensions = [\"txt\"]\n" };
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = 4\ndim = 32\nheads = 4\nffn = 48\n{model}\n{data}\
         [train]\nsteps = 3\nseq = 16\nglobal_batch = 8\nthreads = 1\ndevice = \"cpu\"\n{way}\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    Config::load(&dir.join("run.toml"), &["optimizer.warmup_steps=1".into()]).unwrap()
}

/// Lines on the parts of a printed program: what is before the first segment, every segment, every entry.
fn parts(text: &str) -> String {
    let mut lines = String::new();
    let mut part = |name: &str, text: &str| writeln!(lines, "  {name} {:016x}", counter::key(0, text)).unwrap();
    let (head, rest) = text.split_once("segment ").unwrap_or((text, ""));
    part("buffers", head);
    let (segments, entries) = rest.split_once("\nentry ").unwrap_or((rest, ""));
    for segment in segments.split("\nsegment ") {
        part(&format!("segment {}", segment.lines().next().unwrap_or_default()), segment);
    }
    part("entries", entries);
    lines
}

fn describe(name: &str, programs: &[StepProgram], dump: Option<&Path>) -> String {
    let mut lines = String::new();
    for (stage, program) in programs.iter().enumerate() {
        let text = program.to_string();
        writeln!(lines, "{name}, stage {stage}: arena {} bytes", program.arena_bytes).unwrap();
        lines.push_str(&parts(&text));
        if let Some(dir) = dump {
            std::fs::write(dir.join(format!("{name}-{stage}.txt")), text).unwrap();
        }
    }
    lines
}

#[test]
fn programs_and_losses_are_those_of_the_corpus() {
    let dump = std::env::var_os("LOCKSTEP_REPLAY").map(std::path::PathBuf::from);
    if let Some(dir) = &dump {
        std::fs::create_dir_all(dir).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let (mut corpus, mut configs) = (String::new(), 0);
    for (model, keys) in MODELS {
        for (way, train) in WAYS.iter().filter(|(way, _)| model == "llama" || FOR_ALL.contains(way)) {
            let name = format!("{model}-{way}");
            let config = config(dir.path(), keys, train);
            corpus += &describe(&name, &plan(&Devices::new(), &config).unwrap().compiled.programs, dump.as_deref());
            if config.precision.policy == PrecisionPolicy::Fp32 {
                let run = dir.path().join("run");
                let bits: Vec<String> =
                    losses(&config, &run).iter().map(|(loss, ..)| format!("{:016x}", loss.to_bits())).collect();
                writeln!(corpus, "  losses {}", bits.join(" ")).unwrap();
                std::fs::remove_dir_all(run).unwrap();
            }
            configs += 1;
        }
        let config = config(dir.path(), keys, "");
        let (program, _) = generation_program(&Devices::new(), &config, 16).unwrap();
        corpus += &describe(&format!("{model}-generate"), &[program], dump.as_deref());
        configs += 1;
    }
    assert!(configs >= 40, "{configs}");
    if let Some(dir) = &dump {
        std::fs::write(dir.join("corpus.txt"), &corpus).unwrap();
    }
    let recorded = include_str!("replay/corpus.txt");
    let apart = corpus.lines().zip(recorded.lines()).position(|(a, b)| a != b);
    if let Some(line) = apart.or((corpus.lines().count() != recorded.lines().count()).then_some(0)) {
        let program = corpus.lines().take(line + 1).filter(|l| !l.starts_with(' ')).last().unwrap_or_default();
        panic!(
            "line {} of replay/corpus.txt, {program}:\n was {:?}\n is  {:?}\nsee the top of this file for what to do",
            line + 1,
            recorded.lines().nth(line).unwrap_or_default(),
            corpus.lines().nth(line).unwrap_or_default(),
        );
    }
}
