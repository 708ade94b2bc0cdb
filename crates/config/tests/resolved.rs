//! The resolved file: origins, round trips, and what changed between two configs.

use lockstep_config::{Bytes, Config, RecomputePolicy, presets, schema};
use lockstep_ir::Layout;

fn parse(text: &str, overrides: &[&str]) -> Config {
    let overrides: Vec<_> = overrides.iter().map(|s| s.to_string()).collect();
    Config::parse(text, "/home/ada/run.toml", &overrides).unwrap_or_else(|error| panic!("{error}"))
}

const EXAMPLE: &str = r#"
[model]
preset = "llama-29m"
layers = 4

[data]
paths = ["docs", "it's \"quoted\" \\ here\n"]

[train]
steps = 300
global_batch = "16K tokens"
seq = 500
"#;

#[test]
fn every_value_shows_its_origin() {
    let config = parse(EXAMPLE, &["optimizer.lr=1e-3", "train.micro_batch=4"]);
    let expected = r#"[model]
preset = "llama-29m"  # run.toml:3
architecture = "llama"  # default
vocab_size = 8192  # preset llama-29m
layers = 4  # run.toml:4
dim = 512  # preset llama-29m
heads = 8  # preset llama-29m
kv_heads = 4  # preset llama-29m
# kv_lora_rank is not set
# q_lora_rank is not set
# qk_nope_head_dim is not set
# qk_rope_head_dim is not set
# v_head_dim is not set
head_dim = 64  # default
ffn = 1536  # preset llama-29m
activation = "silu"  # default
# swiglu_limit is not set
# experts is not set
# experts_per_token is not set
# expert_ffn is not set
norm_topk = true  # default
# shared_experts is not set
dense_layers = 0  # default
router_scale = 1.0  # default
expert_groups = 1  # default
expert_top_groups = 1  # default
balance_bias = 0.0  # default
balance_loss = 0.01  # default
z_loss = 0.0  # default
mtp_depth = 0  # default
mtp_loss = 0.1  # default
# positions is not set
rope_theta = 500000.0  # default
# rope_scaling is not set
rope_layers = []  # default
# sliding_window is not set
layer_types = []  # default
# rope_local_theta is not set
qk_norm = "none"  # default
softmax_scale_dim = 64  # default
attention_sinks = false  # default
attention = "flash"  # default
norms = "pre"  # default
norm_plus_one = false  # default
norm_eps = 1e-5  # default
tied_embeddings = true  # preset llama-29m
embedding_scale = 1.0  # default
dropout = 0.0  # default
init_std = 0.02  # default

[data]
paths = ["/home/ada/docs", "/home/ada/it's \"quoted\" \\ here\u000A"]  # run.toml:7
corpora = []  # default
extensions = ["txt", "md", "rst", "tex", "html", "csv", "json", "jsonl", "jsonl.zst", "parquet", "toml", "yaml", "yml", "rs", "py", "c", "h", "cc", "cpp", "hpp", "cu", "cuh", "go", "java", "js", "ts", "sh", "sql"]  # default
format = "text"  # default
# chat_template is not set
# train_on is not set
special_tokens = []  # default
text_field = "text"  # default
# prompt_field is not set
tokenizer = "bytes"  # default
# eos_token is not set
# bos_token is not set
# prepared is not set
# cache is not set
cache_size = "16 GiB"  # default
bucket_timeout = 600.0  # default
document_mask = false  # default
validation_fraction = 0.05  # default

[train]
steps = 300  # run.toml:10
seq = 500  # run.toml:12
global_batch = 32  # run.toml:11
batch_ramp = []  # default
micro_batch = 4  # --set
seed = 0  # default
# init_from is not set
reproducible = false  # default
noise_scale = false  # default
validate_every = 50  # default
validation_sequences = 64  # default
device = "auto"  # default
gpu = 0  # default
deterministic = false  # default
threads = 0  # default

[precision]
policy = "bf16"  # preset llama-29m
gradients = "fp32"  # default
moments = "fp32"  # default
master = "fp32"  # default
frozen = "policy"  # default
fp8_recipe = "current"  # default
# fp8_weights is not set
fp8_skip_first = 0  # default
fp8_skip_last = 0  # default
shadow_every = 0  # default
# loss_scale is not set
# growth_interval is not set

[parallel]
layout = "given"  # default
# ranks is not set
dp = 1  # default
dp_replicate = 1  # default
cp = 1  # default
context = "ring"  # default
ep = 1  # default
# ep_bound is not set
tp = 1  # default
pp = 1  # default
zero = 0  # default
reshard_after_forward = true  # default
sequence_parallel = false  # default
schedule = "1f1b"  # default
virtual = 1  # default
stages = []  # default
timeout = 60.0  # default

[recompute]
policy = "none"  # default
every = 2  # default
ops = []  # default
# budget is not set

[offload]
optimizer = false  # default
activations = false  # default

[optimizer]
name = "adamw"  # default
lr = 0.001  # --set
schedule = "cosine"  # default
min_lr_ratio = 0.1  # default
warmup_steps = 100  # default
# decay_steps is not set
beta1 = 0.9  # default
beta2 = 0.95  # default
eps = 1e-8  # default
# momentum is not set
weight_decay = 0.1  # default
grad_clip = 1.0  # default
groups = []  # default

[lora]
# rank is not set
# alpha is not set
dropout = 0.0  # default
targets = ["*"]  # default
# init_from is not set

[spikes]
skip = false  # default
z = 10.0  # default
window = 128  # default
skips = 3  # default
roll_backs = 3  # default

[checkpoint]
every = 100  # default
keep = 3  # default
# every_minutes is not set
keep_every = 0  # default
keep_best = false  # default
# mirror is not set
asynchronous = true  # default

[eval]
tasks = []  # default
every = 1000  # default
items = 0  # default

[telemetry]
SINKS
[cluster]
# elastic is not set
snapshot_every = 10  # default
spares = 0  # default
cross_check = 0  # default
# time is not set
# nodes is not set
# gpus_per_node is not set
# cpus_per_rank is not set
# account is not set
# partition is not set
# qos is not set
signal_before = 180  # default
modules = []  # default
setup = []  # default
# container is not set
srun = []  # default
sbatch = []  # default
"#;
    // The sinks of metrics are a list of their own, and all are off.
    let keys = schema();
    let sinks = keys.iter().filter_map(|key| Some((key.path.strip_prefix("telemetry.")?, key.default == "false")));
    let line =
        |(key, switch)| if switch { format!("{key} = false  # default\n") } else { format!("# {key} is not set\n") };
    let sinks: String = sinks.map(line).collect();
    assert_eq!(config.resolved_toml(), expected.replace("SINKS\n", &format!("{sinks}\n")));
}

#[test]
fn the_resolved_file_reads_back_as_an_equal_config_from_another_folder() {
    let round_trip = |config: Config| {
        let text = config.resolved_toml();
        let again = Config::parse(&text, "/scratch/run-7/run.toml", &[]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(again, config);
        assert_eq!(again.differences(&config), []);
        assert_eq!(again.data_paths(), config.data_paths());
    };
    for name in presets() {
        round_trip(parse(&format!("[model]\npreset = \"{name}\"\n"), &[]));
    }
    round_trip(parse(EXAMPLE, &[]));
    round_trip(parse(EXAMPLE, &["train.seed=9223372036854775807", "optimizer.lr=1.2345678901234567e-300"]));
    round_trip(parse(EXAMPLE, &["optimizer.eps=123456789e100", "data.extensions=[]", "train.steps=0"]));
    let corpora =
        "data.corpora=[{ name = 'a', paths = ['x'], weight = 1 }, { name = 'b', paths = ['/y'], weight = 0.5 }]";
    let tokens =
        ["data.tokenizer=t/tokenizer.json", "data.eos_token=<end>", "data.prepared=shared", "train.init_from=runs/a/"];
    round_trip(parse(EXAMPLE, &[&["data.paths=[]", corpora], &tokens[..]].concat()));
    for name in ["lion", "sgd", "muon"] {
        round_trip(parse(EXAMPLE, &[&format!("optimizer.name={name}"), "optimizer.schedule=wsd"]));
    }
    let groups = "optimizer.groups=[{ match = '*\"norm', lr_scale = 0.5 }, { match = 'b', weight_decay = 0 }]";
    round_trip(parse(EXAMPLE, &[groups, "optimizer.schedule=constant"]));
    round_trip(parse(EXAMPLE, &["train.batch_ramp=[{ tokens = '2B', global_batch = '64K tokens' }]"]));
    round_trip(parse(EXAMPLE, &["precision.policy=fp16"]));
    round_trip(parse("[model]\nvocab_size = 8\nlayers = 1\ndim = 2\nheads = 1\nffn = 1\n", &[]));
}

#[test]
fn equality_ignores_origins() {
    let given = "[model]\npreset = \"llama-15m\"\n[train]\nsteps = 1000\n";
    let set = parse("[model]\npreset = \"llama-15m\"\n", &["train.steps=1000"]);
    assert_eq!(parse(given, &[]), set);
    assert_ne!(parse(given, &["train.steps=1001"]), set);
}

#[test]
fn differences_list_what_changes_the_trajectory() {
    let before = parse(EXAMPLE, &[]);
    let after = parse(EXAMPLE, &["train.steps=600", "optimizer.beta2=0.99", "model.preset=llama-3.2-1b"]);
    let found = after.differences(&before);
    let found: Vec<_> = found.iter().map(|d| (d.path, d.ours.as_str(), d.theirs.as_str())).collect();
    assert!(found.contains(&("train.steps", "600", "300")));
    assert!(found.contains(&("optimizer.beta2", "0.99", "0.95")));
    assert!(found.contains(&("model.dim", "2048", "512")));
    let scaling = found.iter().find(|(path, ..)| *path == "model.rope_scaling").expect("one of them scales");
    assert_eq!(scaling.2, "not set");
    assert!(scaling.1.starts_with("{ factor = 32.0"));
}

#[test]
fn differences_leave_out_how_a_run_is_carried_out() {
    let before = parse(EXAMPLE, &[]);
    let conduct = [
        "checkpoint.every=7",
        "checkpoint.keep=9",
        "train.threads=2",
        "train.validate_every=3",
        "train.validation_sequences=4",
        "data.paths=['elsewhere']",
        "data.extensions=['txt']",
        "parallel.tp=4",
        "parallel.pp=2",
        "parallel.sequence_parallel=true",
        "parallel.schedule=zb-v",
        "parallel.virtual=2",
        "parallel.stages=[1, 1, 1, 1]",
        "parallel.timeout=5",
        "parallel.layout=auto",
        "parallel.ranks=4",
    ];
    let after = parse(EXAMPLE, &conduct);
    assert_eq!(after.differences(&before), []);
    assert_ne!(after, before);
}

#[test]
fn a_run_may_go_on_with_any_layout_and_micro_batch() {
    let before = parse(EXAMPLE, &["train.micro_batch=2"]);
    let layout =
        ["parallel.dp=8", "parallel.zero=1", "parallel.tp=2", "parallel.pp=2", "parallel.schedule=interleaved"];
    let after = parse(EXAMPLE, &layout);
    assert_ne!(after.train.micro_batch, before.train.micro_batch);
    assert_eq!(after.differences(&before), []);
    assert_ne!(after, before);
}

#[test]
fn a_shape_written_out_is_no_different_from_its_preset() {
    let preset = parse("[model]\npreset = \"llama-15m\"\n", &[]);
    let text = preset.resolved_toml().replace("preset = \"llama-15m\"", "");
    assert_eq!(parse(&text, &[]).differences(&preset), []);
}

#[test]
fn moving_corpora_and_tokenizer_changes_nothing_and_other_weights_do() {
    let parse = |paths: &str, weight: &str, tokenizer: &str| {
        let corpora = format!("data.corpora=[{{ name = 'a', paths = ['{paths}'], weight = {weight} }}]");
        parse("[model]\npreset = \"llama-15m\"\n", &[&corpora, &format!("data.tokenizer={tokenizer}")])
    };
    let before = parse("x", "1", "old/tokenizer.json");
    assert_eq!(parse("y", "1", "new/tokenizer.json").differences(&before), []);
    let changed: Vec<_> = parse("x", "2", "bytes").differences(&before).iter().map(|d| d.path).collect();
    assert_eq!(changed, ["data.corpora", "data.tokenizer"]);
}

#[test]
fn a_planned_layout_says_how_it_was_found_and_keeps_what_was_given() {
    let config = parse(EXAMPLE, &["parallel.layout=auto", "parallel.ranks=8", "parallel.tp=2"]);
    assert!(config.plans_layout() && config.layout_planned().is_none());
    assert_eq!(config.ranks(), Some(8));
    let layout: Layout = "dp=4,zero=1,tp=2,sp".parse().unwrap();
    let planned =
        config.with_planned_layout(&layout, 1, (RecomputePolicy::Budget, Some(Bytes(3 << 30))), "the fastest");
    assert_eq!((planned.layout_planned(), planned.plans_layout()), (Some("the fastest"), false));
    assert_eq!(planned.ranks(), Some(8));
    let text = planned.resolved_toml();
    for line in [
        "dp = 4  # auto: the fastest",
        "tp = 2  # --set",
        "policy = \"budget\"  # auto: the fastest",
        "budget = \"3 GiB\"  # auto: the fastest",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    // Written out, it is a config of the same layout.
    let again = parse(&text, &[]);
    assert_eq!((again.layout(), again.recompute.clone()), (planned.layout(), planned.recompute.clone()));
    assert_eq!(parse(EXAMPLE, &["parallel.layout=auto"]).ranks(), None);
    assert_eq!(parse(EXAMPLE, &[]).ranks(), Some(1));
}
