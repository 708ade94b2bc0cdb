//! What keys are called: old names, synonyms, what is not there yet.

use lockstep_config::{Config, keys_at, search};
use lockstep_ir::Hint;

const TINY: &str = "[model]\npreset = \"llama-15m\"\n";

fn parse(text: &str, overrides: &[&str]) -> Result<Config, String> {
    let overrides: Vec<_> = overrides.iter().map(|s| s.to_string()).collect();
    Config::parse(text, "run.toml", &overrides).map_err(|error| error.with_hint())
}

fn parsed(text: &str, overrides: &[&str]) -> Config {
    parse(text, overrides).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn an_old_name_is_read_with_one_warning_that_names_the_new_key() {
    let config = parsed(&format!("{TINY}[parallel]\npatience = 7\n"), &[]);
    assert_eq!(config.parallel.timeout, 7.0);
    assert_eq!(config.warnings(), ["parallel.patience is now called parallel.timeout: run.toml:4"]);
    let config = parsed(TINY, &["parallel.patience=8"]);
    assert_eq!(config.parallel.timeout, 8.0);
    assert_eq!(config.warnings(), ["parallel.patience is now called parallel.timeout: --set parallel.patience=8"]);
    assert!(parsed(TINY, &["parallel.timeout=8"]).warnings().is_empty());
    // An override wins over the file, whichever name each has.
    let config = parsed(&format!("{TINY}[parallel]\npatience = 7\n"), &["parallel.timeout=9"]);
    assert_eq!(config.parallel.timeout, 9.0);
}

#[test]
fn both_names_of_a_key_are_refused() {
    let error = parse(&format!("{TINY}[parallel]\npatience = 7\ntimeout = 8\n"), &[]).unwrap_err();
    let expected = "parallel.patience is the old name of parallel.timeout, and both are given\n --> run.toml:4\n  |\n\
                    4 | patience = 7\n  |            ^\nhint: remove parallel.patience";
    assert_eq!(error.replace("  --> ", " --> "), expected);
}

#[test]
fn a_resolved_file_of_before_the_renames_reads_as_it_did() {
    let text = "[model]\narchitecture = \"mistral\"\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 4\nffn = 128\nsliding_window = 16\n\
                [data]\ntokenizer = \"t.json\"\neos_token = \"</s>\"\n[parallel]\ntimeout = 5.0\n";
    let now = parsed(text, &[]);
    let resolved = now.resolved_toml();
    let old = resolved
        .replace("sliding_window", "window")
        .replace("eos_token", "end_token")
        .replace("\ntimeout", "\npatience");
    assert_ne!(old, resolved);
    let before = parsed(&old, &[]);
    assert_eq!(before, now);
    assert_eq!((before.differences(&now), before.warnings().len()), (Vec::new(), 3));
}

#[test]
fn keys_are_found_by_the_words_of_the_field() {
    for (words, path) in [
        ("master weights", "precision.policy"),
        ("FSDP", "parallel.zero"),
        ("fsdp", "parallel.zero"),
        ("ZeRO", "parallel.zero"),
        ("mixed precision", "precision.policy"),
        ("activation checkpointing", "recompute.policy"),
        ("gradient checkpointing", "recompute.policy"),
        ("GQA", "model.kv_heads"),
        ("sliding window", "model.sliding_window"),
        ("gradient accumulation", "train.micro_batch"),
        ("learning rate", "optimizer.lr"),
        ("warmup", "optimizer.warmup_steps"),
        ("gradient clipping", "optimizer.grad_clip"),
        ("batch size", "train.global_batch"),
        ("seq_len", "train.seq"),
        ("hidden_size", "model.dim"),
        ("EOS", "data.eos_token"),
        ("BOS", "data.bos_token"),
        ("tensor parallel", "parallel.tp"),
        ("loss scaling", "precision.loss_scale"),
        ("patience", "parallel.timeout"),
        ("ring attention", "parallel.context"),
        ("Ulysses", "parallel.context"),
        ("deepspeed-ulysses", "parallel.context"),
        ("all-to-all", "parallel.context"),
        ("context parallelism", "parallel.cp"),
        ("expert parallelism", "parallel.ep"),
        ("expert_model_parallel_size", "parallel.ep"),
        ("capacity factor", "parallel.ep_bound"),
    ] {
        let found: Vec<_> = search(words).keys.iter().map(|key| key.path).collect();
        assert!(found.first() == Some(&path), "{words}: {found:?}");
    }
    assert!(search("banana").keys.is_empty() && search("").keys.is_empty());
    // What is only mentioned is found where nothing is called so.
    assert!(search("orthogonalised").keys.iter().any(|key| key.path == "optimizer.name"));
}

#[test]
fn keys_are_found_by_path_name_and_table() {
    let paths = |path: &str| keys_at(path).iter().map(|key| key.path).collect::<Vec<_>>();
    assert_eq!(paths("train.seq"), ["train.seq"]);
    assert_eq!(paths("schedule"), ["parallel.schedule", "optimizer.schedule"]);
    assert_eq!(
        paths("[checkpoint]"),
        [
            "checkpoint.every",
            "checkpoint.keep",
            "checkpoint.every_minutes",
            "checkpoint.keep_every",
            "checkpoint.keep_best",
            "checkpoint.mirror",
            "checkpoint.asynchronous"
        ]
    );
    assert_eq!(paths("model.window"), ["model.sliding_window"]);
    assert!(paths("train.sequence").is_empty());
}

#[test]
fn a_name_from_elsewhere_suggests_the_key_that_is_meant() {
    let hint = |keys: &str, set: &[&str]| {
        let error = parse(&format!("{TINY}{keys}"), set).unwrap_err();
        error.lines().last().unwrap_or_default().to_owned()
    };
    assert_eq!(hint("[optimizer]\nlearning_rate = 1e-3\n", &[]), "hint: did you mean `lr`?");
    assert_eq!(hint("[train]\nlearning_rate = 1e-3\n", &[]), "hint: did you mean `optimizer.lr`?");
    assert_eq!(hint("", &["learning_rate=1e-3"]), "hint: did you mean `optimizer.lr`?");
    assert_eq!(hint("", &["model.hidden_size=64"]), "hint: did you mean `dim`?");
    assert_eq!(hint("[train]\nseq_len = 8\n", &[]), "hint: did you mean `seq`?");
}

#[test]
fn tf32_is_found_by_the_words_of_pytorch() {
    for words in ["allow_tf32", "set_float32_matmul_precision", "tf32"] {
        assert!(search(words).keys.iter().any(|key| key.path == "precision.policy"), "{words}");
    }
    for (words, path) in
        [("mlflow", "telemetry.mlflow"), ("wandb", "telemetry.wandb"), ("weights & biases", "telemetry.wandb")]
    {
        let found = search(words);
        assert_eq!((found.keys[0].path, found.missing.len()), (path, 0), "{words}");
    }
}

#[test]
fn what_is_not_there_yet_is_said_so() {
    assert_eq!(search("mxfp8").missing[0].what, "mxfp8 and narrower");
    let error = parse(TINY, &["precision.mxfp8=true"]).unwrap_err();
    let said = "precision.mxfp8: mxfp8 and narrower is not there yet";
    assert!(error.starts_with(said) && error.contains("\nhint: precision.policy = "), "{error}");
    // Each with what to do instead.
    for (words, what) in [
        ("s3", "reading from object storage"),
        ("push_to_hub", "uploading to the Hugging Face Hub"),
        ("longrope", "LongRoPE and dynamic NTK scaling"),
        ("final_logit_softcapping", "soft capping of logits, as Gemma 2 has it,"),
        ("partial_rotary_factor", "RoPE on a part of every head, but in latent attention,"),
        ("attention_bias", "a key for biases"),
        ("attn_output_gate", "an output gate of attention, as Qwen3-Next has it,"),
        ("comet", "logging to Comet, Neptune, ClearML or Aim"),
        ("ema", "an exponential moving average of the weights (EMA)"),
    ] {
        let found = search(words);
        let whats: Vec<_> = found.missing.iter().map(|missing| missing.what).collect();
        assert_eq!(whats, [what], "{words}");
        assert!(!found.missing[0].instead.is_empty());
    }
    let error = parse(TINY, &["model.longrope=8"]).unwrap_err();
    assert!(error.starts_with("model.longrope: LongRoPE and dynamic NTK scaling is not there yet\n"), "{error}");
    assert!(error.contains("\nhint: model.rope_scaling is that of Llama 3, linear or YaRN"), "{error}");
    let error = parse(TINY, &["model.attn_logit_softcapping=50"]).unwrap_err();
    let said = "model.attn_logit_softcapping: soft capping of logits, as Gemma 2 has it, is not there yet\n";
    assert!(error.starts_with(said) && error.contains("\nhint: model.qk_norm"), "{error}");
    // What is there is found by the words of others.
    for (words, key) in [
        ("lora", "lora.rank"),
        ("lora_alpha", "lora.alpha"),
        ("yarn", "model.rope_scaling"),
        ("rope_parameters", "model.rope_scaling"),
        ("rope_type", "model.rope_scaling"),
        ("MLA", "model.kv_lora_rank"),
        ("cpu offload", "offload.optimizer"),
        ("ZeRO-Offload", "offload.optimizer"),
        ("activation offloading", "offload.activations"),
        ("save_on_cpu", "offload.activations"),
    ] {
        assert!(search(words).keys.iter().any(|found| found.path == key), "{words}");
    }
}

#[test]
fn words_are_found_whole_or_by_their_beginning() {
    let paths = |words: &str| search(words).keys.iter().map(|key| key.path).collect::<Vec<_>>();
    assert_eq!(paths("kv")[0], "model.kv_heads");
    assert_eq!(paths("remat"), ["recompute.policy"]);
    assert!(!paths("ema").contains(&"recompute.policy"));
    assert!(paths("checkpoint").contains(&"checkpoint.every"));
}

#[test]
fn tokens_that_are_nearly_whole_sequences_are_taken_as_such_and_said() {
    let text = |seq: usize, batch: &str, ramp: &str| {
        format!("{TINY}[train]\nseq = {seq}\nmicro_batch = 1\nglobal_batch = \"{batch}\"\n{ramp}")
    };
    for (seq, batch, sequences, note) in [
        (8192, "4M tokens", 512, Some("4,000,000 tokens: 4,194,304 are taken, 512 sequences of train.seq = 8192")),
        (4096, "500K tokens", 125, Some("500,000 tokens: 512,000 are taken, 125 sequences of train.seq = 4096")),
        (8000, "4M tokens", 500, None),
        (8192, "4194304 tokens", 512, None),
        (3000, "4M tokens", 1333, Some("4,000,000 tokens: 3,999,000 are taken, 1333 sequences of train.seq = 3000")),
    ] {
        let config = parsed(&text(seq, batch, ""), &[]);
        let notes: Vec<String> = note.into_iter().map(|note| format!("train.global_batch = {note}")).collect();
        assert_eq!((config.train.global_batch, config.warnings()), (sequences, &notes[..]), "{seq} {batch}");
    }
    let ramp = "batch_ramp = [{ tokens = \"1B\", global_batch = \"8M tokens\" }]\n";
    let config = parsed(&text(8192, "4M tokens", ramp), &[]);
    assert_eq!(config.train.batch_ramp[0].global_batch, 1024);
    let note = "train.batch_ramp = 8,000,000 tokens: 8,388,608 are taken, 1024 sequences of train.seq = 8192";
    assert!(config.warnings().iter().any(|warning| warning == note), "{:?}", config.warnings());
}
