//! Context parallelism against one rank: ring and gather, with everything that looks at positions.

mod common;

use common::check_layouts as check;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::op::Ring;
use lockstep_ir::program::{Instr, Stream};
use lockstep_ir::{Layout, Op};
use lockstep_plan::plan;

fn config(model: &str, keys: &str) -> Config {
    let default =
        |key: &str, value: &str| if model.contains(key) { String::new() } else { format!("{key} = {value}\n") };
    let (heads, ffn) = (default("kv_heads", "2"), default("ffn", "48"));
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\n{heads}{ffn}{model}\n\
         [train]\nseq = 24\nglobal_batch = 4\nthreads = 1\nmicro_batch = 1\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap_or_else(|e| panic!("{e}"))
}

const GPT2: &str = "architecture = \"gpt2\"\nkv_heads = 4\nffn = 96\npositions = 26\ndropout = 0.2";
const QWEN2: &str = "architecture = \"qwen2\"";
const QWEN3: &str = "architecture = \"qwen3\"\nhead_dim = 10";
const MISTRAL: &str = "architecture = \"mistral\"\nsliding_window = 7";

const BF16: &str = "[precision]\npolicy = \"bf16\"";
const DOCUMENTS: &str = "[data]\ndocument_mask = true";

/// Two key heads: with tp=4 neighbours share one.
const LAYOUTS: [&str; 14] = [
    "cp=2",
    "cp=2,context=gather",
    "cp=4",
    "cp=4,context=gather",
    "cp=3",
    "dp=2,cp=2,zero=1",
    "dp=2,cp=2,context=gather,zero=3",
    "cp=2,zero=2",
    "cp=2,tp=2",
    "cp=2,tp=2,sp",
    "cp=2,context=gather,tp=4,sp",
    "cp=2,pp=2",
    "cp=2,context=gather,pp=2,gpipe",
    "cp=2,tp=2,sp,pp=2",
];
/// Those that differ most.
const FEW: [&str; 4] = ["cp=2", "cp=4,context=gather", "dp=2,cp=2,zero=3", "cp=2,tp=4,sp"];

#[test]
fn llama_computes_the_same_on_parts_of_sequences() {
    check(&config("", ""), &LAYOUTS);
    check(&config("tied_embeddings = true", BF16), &FEW);
}

#[test]
fn learned_positions_and_dropout_are_those_of_the_sequence() {
    check(&config(GPT2, ""), &LAYOUTS);
    check(&config(GPT2, BF16), &FEW);
    check(&config(GPT2, DOCUMENTS), &FEW);
}

#[test]
fn documents_and_windows_are_those_of_the_sequence() {
    check(&config("", DOCUMENTS), &LAYOUTS);
    check(&config(MISTRAL, ""), &FEW);
    check(&config(MISTRAL, &format!("{BF16}\n{DOCUMENTS}")), &FEW);
}

#[test]
fn relatives_of_llama_compute_the_same() {
    check(&config(QWEN2, ""), &FEW);
    check(&config(QWEN3, DOCUMENTS), &FEW);
}

#[test]
fn recomputed_attention_is_split_as_the_first() {
    for policy in ["selective", "full", "sqrt"] {
        for model in [QWEN3, GPT2] {
            check(&config(model, &format!("[recompute]\npolicy = \"{policy}\"")), &FEW);
        }
    }
}

#[test]
fn sums_in_fixed_point_and_prompts() {
    check(&config("", "reproducible = true"), &FEW);
    check(&config("", &format!("{DOCUMENTS}\nprompt_field = \"prompt\"")), &FEW);
}

#[test]
fn a_step_of_the_ring_waits_for_its_own_keys_and_not_for_those_of_the_next() {
    let layout: Layout = "cp=4".parse().unwrap();
    let plan = plan(&Devices::new(), &config("", "").at(&layout)).unwrap();
    let mut steps = 0;
    for segment in &plan.program().segments {
        let shift = |i: &Instr| matches!(i.op, Op::Shift { .. });
        assert!(segment.instrs.iter().filter(|i| shift(i)).all(|i| i.stream == Stream::Communication));
        // Where each buffer of keys was last filled by a shift, and every shift that is under way.
        for (at, instr) in segment.instrs.iter().enumerate() {
            let (Op::PartAttention { ring: Some(Ring { step, parts }), .. }
            | Op::PartAttentionGrad { ring: Some(Ring { step, parts }), .. }) = instr.op
            else {
                continue;
            };
            let keys = &instr.inputs[if matches!(instr.op, Op::PartAttention { .. }) { 1 } else { 2 }];
            let fills = |i: &Instr| shift(i) && i.outputs.iter().flatten().any(|o| o.value == keys.value);
            let filled = segment.instrs[..at].iter().rposition(fills);
            assert_eq!(filled.is_some(), step > 0);
            assert!(instr.waits.iter().all(|w| Some(*w) <= filled), "step {step} waits for {:?}", instr.waits);
            let on_the_way = |i: &Instr| shift(i) && i.inputs.iter().any(|x| x.value == keys.value);
            assert_eq!(segment.instrs[..at].iter().any(on_the_way), step + 1 < parts);
            steps += 1;
        }
    }
    // Forward and backward of four layers, and evaluation.
    assert!(steps >= 3 * 4 * 4, "{steps}");
}

#[test]
fn sequences_of_32768_positions_on_four_ranks() {
    let text = "[model]\narchitecture = \"mistral\"\nsliding_window = 200\nvocab_size = 61\nlayers = 1\ndim = 8\n\
                heads = 2\nkv_heads = 1\nffn = 8\n[train]\nseq = 32768\nglobal_batch = 1\nthreads = 1\n";
    let config = Config::parse(text, "run.toml", &[]).unwrap();
    let found = check(&config, &["cp=4", "cp=4,context=gather"]);
    let alone = plan(&Devices::new(), &config).unwrap().program().arena_bytes;
    assert!(found[0].arena_bytes[0] * 3 < alone, "{:?} of {alone}", found[0].arena_bytes);
}

#[test]
fn a_run_tells_how_unequal_documents_make_the_work_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    common::write_corpus(dir.path());
    common::tiny(dir.path(), "steps = 1\nmicro_batch = 2\nvalidation_sequences = 0");
    let notes = |keys: &[&str]| {
        let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
        let config = Config::load(&dir.path().join("run.toml"), &keys).unwrap();
        let mut notes = Vec::new();
        let run_dir = dir.path().join(format!("run-{}", keys.len()));
        common::run_with(&config, &run_dir, &mut |event| {
            if let lockstep_train::Event::Note(note) = event {
                notes.push(note.to_string());
            }
        })
        .unwrap();
        notes.iter().filter(|note| note.contains("cp ranks")).count()
    };
    assert_eq!(notes(&["parallel.cp=2", "data.document_mask=true"]), 1);
    assert_eq!(notes(&["parallel.cp=2"]), 0);
}
