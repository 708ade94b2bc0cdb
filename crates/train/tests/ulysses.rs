//! Context parallelism by all-to-all (Ulysses) against one rank, with everything that looks at heads or positions.

mod common;

use common::check_layouts as check;
use lockstep_config::Config;

/// Four key heads: tp × cp divides them.
fn config(model: &str, keys: &str) -> Config {
    let kv_heads = if model.contains("kv_heads") { "" } else { "kv_heads = 4\n" };
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 8\nffn = 48\n{kv_heads}{model}\n\
         [train]\nseq = 24\nglobal_batch = 4\nthreads = 1\nmicro_batch = 1\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap_or_else(|e| panic!("{e}"))
}

const GPT2: &str = "architecture = \"gpt2\"\nkv_heads = 8\npositions = 26\ndropout = 0.2";
const QWEN2: &str = "architecture = \"qwen2\"";
const QWEN3: &str = "architecture = \"qwen3\"\nhead_dim = 10";
const MISTRAL: &str = "architecture = \"mistral\"\nsliding_window = 7";
const MIXTRAL: &str = "architecture = \"mixtral\"\nexperts = 4\nexperts_per_token = 2";
const OLMOE: &str = "architecture = \"olmoe\"\nexperts = 4\nexperts_per_token = 2";

const BF16: &str = "[precision]\npolicy = \"bf16\"";
const DOCUMENTS: &str = "[data]\ndocument_mask = true";

const LAYOUTS: [&str; 16] = [
    "cp=2,context=a2a",
    "cp=4,context=a2a",
    "cp=2,context=a2a,zero=1",
    "cp=2,context=a2a,zero=2",
    "cp=4,context=a2a,zero=3",
    "dp=2,cp=2,context=a2a",
    "dp=2,cp=2,context=a2a,zero=3",
    "dp_replicate=2,dp=2,cp=2,context=a2a,zero=1",
    "cp=2,context=a2a,tp=2",
    "cp=2,context=a2a,tp=2,sp",
    "cp=2,context=a2a,pp=2",
    "cp=2,context=a2a,pp=2,interleaved,virtual=2",
    "cp=2,context=a2a,pp=2,zb-h1",
    "cp=2,context=a2a,pp=2,zb-v",
    "cp=2,context=a2a,tp=2,sp,pp=2",
    "dp=2,cp=2,context=a2a,tp=2,zero=1",
];
/// Those that differ most.
const FEW: [&str; 4] =
    ["cp=2,context=a2a", "cp=4,context=a2a", "dp=2,cp=2,context=a2a,zero=3", "cp=2,context=a2a,tp=2,sp"];

#[test]
fn llama_computes_the_same_on_parts_of_the_heads() {
    check(&config("", ""), &LAYOUTS);
    check(&config("tied_embeddings = true", BF16), &FEW);
}

#[test]
fn several_sequences_at_a_time_keep_their_places() {
    let mut two = config("", DOCUMENTS);
    two.train.micro_batch = 2;
    check(&two, &FEW[..2]);
    check(&two, &["cp=2,context=a2a,tp=2,sp,pp=2"]);
}

#[test]
fn other_attention_computes_the_same() {
    for model in [GPT2, QWEN2, QWEN3, MISTRAL, "kv_heads = 8"] {
        check(&config(model, DOCUMENTS), &FEW[2..]);
    }
    check(&config(MISTRAL, &format!("{BF16}\n{DOCUMENTS}")), &FEW[2..]);
}

#[test]
fn recomputed_attention_is_sent_as_the_first() {
    for (model, policy) in [(QWEN3, "selective"), (GPT2, "full"), (QWEN3, "sqrt")] {
        check(&config(model, &format!("[recompute]\npolicy = \"{policy}\"\n{DOCUMENTS}")), &FEW[2..]);
    }
}

#[test]
fn experts_are_split_beside_it() {
    let layouts = [
        "cp=2,context=a2a,ep=2",
        "cp=2,context=a2a,zero=1,ep=2",
        "cp=2,context=a2a,zero=3,ep=2",
        "dp=2,cp=2,context=a2a,zero=2,ep=2",
        "cp=2,context=a2a,ep=2,pp=2",
    ];
    check(&config(MIXTRAL, DOCUMENTS), &layouts);
    check(&config(OLMOE, ""), &layouts[..1]);
    check(&config(MIXTRAL, ""), &["cp=2,context=a2a,ep=2,tp=2,sp"]);
}

#[test]
fn sums_in_fixed_point_and_prompts() {
    check(&config("", "reproducible = true"), &FEW[2..]);
    check(&config("", &format!("{DOCUMENTS}\nprompt_field = \"prompt\"")), &FEW[2..]);
}
