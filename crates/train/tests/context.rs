//! Context parallelism against one rank: ring and gather, with everything that looks at positions.

mod common;

use common::check_layouts as check;
use lockstep_config::Config;

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
    check(&config("tied_embeddings = true", BF16), &LAYOUTS);
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
    check(&config(MISTRAL, ""), &LAYOUTS);
    check(&config(MISTRAL, &format!("{BF16}\n{DOCUMENTS}")), &FEW);
}

#[test]
fn relatives_of_llama_compute_the_same() {
    check(&config(QWEN2, ""), &FEW);
    check(&config(QWEN3, DOCUMENTS), &LAYOUTS);
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
