//! Refusals of keys that are missing or do not go together, with the whole text that the user sees.

mod common;

use common::{TINY, check, check_set};
use lockstep_config::{Config, TrainOnTurns};
use lockstep_ir::Hint;

#[test]
fn adapters_have_a_rank() {
    let refused = |more: &str| Config::parse(&format!("{TINY}{more}"), "run.toml", &[]).unwrap_err().with_hint();
    for keys in ["alpha = 4.0", "targets = [\"q_proj\"]", "dropout = 0.1", "init_from = \"adapter\""] {
        let key = keys.split(' ').next().unwrap();
        let error = refused(&format!("[lora]\n{keys}\n"));
        assert!(
            error.contains(&format!("lora.{key} is given, and without lora.rank there are no adapters")),
            "{error}"
        );
        assert!(error.contains("hint: set lora.rank, such as 16"), "{error}");
    }
}

#[test]
fn a_missing_shape_names_the_key_and_the_presets() {
    check(
        "[train]\nsteps = 3\n",
        r#"
model.vocab_size is not set
  --> run.toml
hint: set it, or choose a model.preset: "llama-15m", "llama-29m", "llama-124m", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "mistral-7b", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "olmoe-1b-7b", "deepseek-moe-16b", "deepseek-v3-mha", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b", "smollm3-3b", "olmo-2-7b", "olmo-2-32b", "gemma-3-270m", "gemma-3-1b"
"#,
    );
    check(
        "# tiny\n[model]\nvocab_size = 256\nlayers = 2\n",
        r#"
model.dim is not set
  --> run.toml:2
  |
2 | [model]
  |  ^^^^^
hint: set it, or choose a model.preset: "llama-15m", "llama-29m", "llama-124m", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "mistral-7b", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "olmoe-1b-7b", "deepseek-moe-16b", "deepseek-v3-mha", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b", "smollm3-3b", "olmo-2-7b", "olmo-2-32b", "gemma-3-270m", "gemma-3-1b"
"#,
    );
}

#[test]
fn hidden_units_are_four_times_the_width_for_gpt2_and_required_elsewhere() {
    let shape = "[model]\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\n";
    let gpt2 = Config::parse(&format!("{shape}architecture = \"gpt2\"\n"), "run.toml", &[]).unwrap();
    assert_eq!((gpt2.model.ffn, gpt2.model.positions, gpt2.model.tied_embeddings), (128, Some(1024), true));
    let error = Config::parse(shape, "run.toml", &[]).unwrap_err().with_hint();
    assert!(error.starts_with("model.ffn is not set\n  --> run.toml:1"), "{error}");
}

#[test]
fn a_key_of_another_architecture_is_refused() {
    let gpt2 = "[model]\narchitecture = \"gpt2\"\nvocab_size = 256\nlayers = 2\ndim = 33\nheads = 3\n";
    check(
        &format!("{gpt2}kv_heads = 1\n"),
        "
model.kv_heads is given, and model.architecture = \"gpt2\" has as many as heads
  --> run.toml:7
  |
7 | kv_heads = 1
  |            ^
hint: remove model.kv_heads, or choose another model.architecture
",
    );
    let refused = |text: &str| Config::parse(text, "run.toml", &[]).unwrap_err().with_hint();
    let scaling = "rope_scaling = { factor = 2, low_freq_factor = 1, high_freq_factor = 4, original_context = 8 }\n";
    assert!(refused(&format!("{gpt2}{scaling}")).contains("has learned positions, not RoPE"));
    assert!(refused(&format!("{gpt2}head_dim = 8\n")).contains("has model.dim / model.heads"));
    assert!(refused(&format!("{TINY}positions = 8\n")).contains("has RoPE, not learned positions"));
    assert!(refused(&format!("{TINY}dropout = 0.1\n")).contains("model.architecture = \"llama\" has no dropout"));
    // An odd width of heads is nothing to rotary embeddings that are not there.
    assert_eq!(Config::parse(gpt2, "run.toml", &[]).unwrap().model.head_dim, 11);
}

#[test]
fn sequences_are_no_longer_than_the_positions() {
    check(
        "[model]\narchitecture = \"gpt2\"\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\n[train]\nseq = 2048\n",
        "
train.seq = 2048 is more than the 1024 rows of model.positions
  --> run.toml:8
  |
8 | seq = 2048
  |       ^^^^
hint: choose at most 1024 tokens per sequence, or more positions
",
    );
}

#[test]
fn heads_must_divide_the_width() {
    check(
        "[model]\npreset = \"llama-15m\"\nheads = 7\n",
        "
model.heads = 7 does not divide model.dim = 288
  --> run.toml:3
  |
3 | heads = 7
  |         ^
hint: 6 or 8 heads divide it; or set model.head_dim
",
    );
}

#[test]
fn the_block_of_gpt2_takes_no_parts_of_others() {
    check(
        "[model]\npreset = \"gpt2\"\nsliding_window = 64\n",
        "
model.sliding_window = 64 is given, and model.architecture = \"gpt2\" has a block of its own without it
  --> run.toml:3
  |
3 | sliding_window = 64
  |                  ^^
hint: choose another model.architecture, or remove model.sliding_window
",
    );
    let refused = |keys: &str| {
        let text = format!("[model]\npreset = \"gpt2\"\n{keys}\n");
        Config::parse(&text, "run.toml", &[]).expect_err(keys).with_hint()
    };
    for (keys, said) in [
        ("norms = \"post\"", "model.norms = \"post\" is given"),
        ("norm_plus_one = true", "model.norm_plus_one = true is given"),
        ("qk_norm = \"head\"", "model.qk_norm = \"head\" is given"),
        ("activation = \"silu\"", "model.activation = \"silu\" is given"),
        ("embedding_scale = 2.0", "model.embedding_scale = 2.0 is given"),
        ("softmax_scale_dim = 32", "model.softmax_scale_dim = 32 is given"),
        ("rope_layers = [1, 0]", "model.rope_layers = [1, 0] is given"),
    ] {
        let error = refused(keys);
        assert!(error.contains(said) && error.contains("has a block of its own"), "{error}");
    }
}

#[test]
fn patterns_fit_the_layers_and_the_window() {
    let refused = |keys: &str, said: &str| {
        let error = Config::parse(&format!("{TINY}{keys}\n"), "run.toml", &[]).expect_err(keys).with_hint();
        assert!(error.contains(said) && error.contains("\nhint: "), "{error}");
    };
    refused(
        "layer_types = [\"sliding\", \"full\"]",
        "model.layer_types has \"sliding\" layers, and model.sliding_window",
    );
    refused(
        "sliding_window = 4\nlayer_types = [\"full\"]",
        "model.sliding_window = 4 is given, and model.layer_types has no \"sliding\" layer",
    );
    refused("rope_layers = [1, 1, 1, 0, 1, 1, 0]", "model.rope_layers has 7 entries, and there are model.layers = 6");
    let alike = "model.rope_local_theta = 100.0 is for models with both sliding and full layers; here all are alike";
    refused("rope_local_theta = 100.0", alike);
    refused("sliding_window = 4\nrope_local_theta = 100.0", alike);
    refused("layer_types = [\"global\"]", "\"global\" is not one of the kinds of layers it lists");
    refused("rope_layers = [2]", "2 is not one of the numbers 0 and 1 it lists");
    refused(
        "rope_scaling = { type = \"longrope\", factor = 2 }",
        "model.rope_scaling.type = \"longrope\" is not known",
    );
    refused("rope_scaling = { type = \"yarn\", factor = 2 }", "model.rope_scaling.original_context is not set");
    refused("rope_scaling = { type = \"linear\", factor = 2, beta_fast = 3 }", "beta_fast is not a key of");
    refused(
        "rope_scaling = { type = \"yarn\", factor = 2, original_context = 8, beta_fast = 1 }",
        "model.rope_scaling.beta_fast = 1.0 is not above beta_slow = 1.0",
    );
}

#[test]
fn kv_heads_must_divide_heads() {
    check(
        "[model]\nkv_heads = 5\npreset = \"llama-29m\"\n",
        "
model.kv_heads = 5 does not divide model.heads = 8
  --> run.toml:2
  |
2 | kv_heads = 5
  |            ^
hint: 4 or 8 kv heads divide it
",
    );
}

#[test]
fn an_odd_head_is_refused() {
    check(
        "[model]\npreset = \"llama-29m\"\nhead_dim = 33\n",
        "
model.head_dim = 33 is odd, and RoPE rotates pairs
  --> run.toml:3
  |
3 | head_dim = 33
  |            ^^
hint: choose an even model.head_dim, or other model.heads (model.head_dim defaults to model.dim / model.heads)
",
    );
}

#[test]
fn micro_batches_must_divide_the_batch() {
    check(
        &format!("{TINY}[train]\nmicro_batch = 5\nglobal_batch = 12\n"),
        "
train.micro_batch = 5 does not divide train.global_batch = 12
  --> run.toml:4
  |
4 | micro_batch = 5
  |               ^
hint: use micro_batch = 4 or 6
",
    );
}

#[test]
fn tokens_must_be_whole_sequences() {
    check(
        &format!("{TINY}[train]\nglobal_batch = \"900 tokens\"\n"),
        r#"
train.global_batch = 900 tokens is not a whole number of sequences of train.seq = 256
  --> run.toml:4
  |
4 | global_batch = "900 tokens"
  |                ^^^^^^^^^^^^
hint: use "768 tokens" (3 × 256) or "1024 tokens" (4 × 256)
"#,
    );
    check_set(
        TINY,
        &["train.micro_batch=100 tokens"],
        r#"
train.micro_batch = 100 tokens is not a whole number of sequences of train.seq = 256
  --> --set train.micro_batch=100 tokens
hint: use "256 tokens" (1 × 256)
"#,
    );
    check(
        &format!("{TINY}[train]\nglobal_batch = \"15T tokens\"\nseq = 1000\n"),
        r#"
train.global_batch = 15000000000000 tokens is 15000000000 sequences, which is out of range
  --> run.toml:4
  |
4 | global_batch = "15T tokens"
  |                ^^^^^^^^^^^^
hint: give at most 4294967296 sequences
"#,
    );
}

#[test]
fn sizes_past_any_machine_are_refused() {
    check(
        &format!("{TINY}layers = 16777216\nffn = 16777216\n"),
        "
the model would have 243199946174054400 parameters
  --> run.toml:3
  |
3 | layers = 16777216
  |          ^^^^^^^^
hint: at most 2^48 are accepted; check model.vocab_size, layers, dim, heads, head_dim and ffn
",
    );
    check(
        &format!("{TINY}[train]\nseq = 16777216\nglobal_batch = \"4B\"\n"),
        r#"
one micro-batch of 4000000000 sequences of 16777216 tokens would have 2688649527296000000000 activations
  --> run.toml:5
  |
5 | global_batch = "4B"
  |                ^^^^
hint: at most 2^56 are accepted; lower train.micro_batch or train.seq
"#,
    );
    check(
        &format!("{TINY}[train]\nsteps = \"1T\"\nglobal_batch = \"4M\"\nmicro_batch = 1\n"),
        r#"
the run would read 1024000000000000000000 tokens
  --> run.toml:5
  |
5 | global_batch = "4M"
  |                ^^^^
hint: at most 2^60 are accepted; lower train.steps, train.seq or train.global_batch
"#,
    );
}

#[test]
fn data_are_paths_or_corpora() {
    check(
        &format!("{TINY}[data]\npaths = [\"a\"]\ncorpora = [{{ name = \"b\", paths = [\"c\"], weight = 1 }}]\n"),
        "
data.paths and data.corpora are both given
  --> run.toml:4
  |
4 | paths = [\"a\"]
  |         ^^^^^
hint: list the paths as a corpus of their own, with a name and a weight
",
    );
}

#[test]
fn an_eos_token_needs_a_tokenizer() {
    check(
        &format!("{TINY}[data]\neos_token = \"</s>\"\n"),
        "
data.eos_token = \"</s>\" is given, and data.tokenizer = \"bytes\" ends documents with a byte 0
  --> run.toml:4
  |
4 | eos_token = \"</s>\"
  |             ^^^^^^
hint: remove data.eos_token, or name a tokenizer.json
",
    );
}

#[test]
fn a_bos_token_needs_a_tokenizer() {
    check(
        &format!("{TINY}[data]\nbos_token = \"<s>\"\n"),
        "
data.bos_token = \"<s>\" is given, and data.tokenizer = \"bytes\" begins them with none
  --> run.toml:4
  |
4 | bos_token = \"<s>\"
  |             ^^^^^
hint: remove data.bos_token, or name a tokenizer.json
",
    );
}

#[test]
fn addresses_are_refused_where_they_stand() {
    check(
        &format!("{TINY}[data]\npaths = [\"s3://bucket/text\", \"gs://bucket/text\"]\n"),
        "
gs://bucket/text: this is an address, and data.paths names files, folders and objects in buckets
  --> run.toml:4
  |
4 | paths = [\"s3://bucket/text\", \"gs://bucket/text\"]
  |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
hint: of addresses, s3://BUCKET/KEY is read; of others, copy the files to a folder first, and name it; hf:datasets/OWNER/NAME is a dataset on the Hugging Face Hub
",
    );
    check(
        &format!("{TINY}[data]\ntokenizer = \"https://hub/tokenizer.json\"\n"),
        "
https://hub/tokenizer.json: this is an address, and data.tokenizer names a file
  --> run.toml:4
  |
4 | tokenizer = \"https://hub/tokenizer.json\"
  |             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
hint: set data.tokenizer = \"hf:OWNER/NAME\" for the tokenizer of a model on the Hugging Face Hub, or fetch its tokenizer.json
",
    );
    check(
        &format!("{TINY}[train]\ninit_from = \"hf://owner/model\"\n"),
        "
hf://owner/model: this is an address, and train.init_from names a folder
  --> run.toml:4
  |
4 | init_from = \"hf://owner/model\"
  |             ^^^^^^^^^^^^^^^^^^
hint: copy the folder first (`aws s3 sync`), and name it; hf:OWNER/NAME is a model on the Hugging Face Hub
",
    );
}

#[test]
fn buckets_are_taken_where_they_are_read_and_written_and_refused_elsewhere() {
    let error = |keys: &str| {
        Config::parse(&format!("{TINY}{keys}"), "run.toml", &[])
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    let taken = "[data]\npaths = [\"s3://b-1/text\"]\nprepared = \"s3://b-1/tokens\"\n[checkpoint]\nmirror = \"s3://b-1/runs\"\n";
    assert_eq!(error(taken), "");
    for (keys, said) in [
        ("[data]\nprepared = \"https://host/tokens\"\n", "data.prepared names a folder, here or in a bucket"),
        ("[data]\ncache = \"s3://b-1/cache\"\n", "data.cache names a folder"),
        ("[data]\ntokenizer = \"s3://b-1/tokenizer.json\"\n", "data.tokenizer names a file"),
        ("[train]\ninit_from = \"s3://b-1/model\"\n", "train.init_from names a folder"),
        ("[checkpoint]\nmirror = \"gs://b-1/runs\"\n", "checkpoint.mirror names a folder, here or in a bucket"),
    ] {
        let error = error(keys);
        assert!(error.contains("this is an address") && error.contains(said), "{keys}: {error}");
    }
}

#[test]
fn a_recompute_policy_has_the_keys_that_it_reads_and_no_others() {
    check(
        &format!("{TINY}[recompute]\npolicy = \"budget\"\n"),
        "
recompute.policy = \"budget\" needs recompute.budget
  --> run.toml:4
  |
4 | policy = \"budget\"
  |          ^^^^^^^^
hint: give recompute.budget = \"40 GiB\", say
",
    );
    check(
        &format!("{TINY}[recompute]\nops = [\"swiglu\"]\n"),
        "
recompute.ops is given, and recompute.policy = \"none\" does not read it
  --> run.toml:4
  |
4 | ops = [\"swiglu\"]
  |       ^^^^^^^^^^
hint: set recompute.policy = \"list\", or remove recompute.ops
",
    );
    check(
        &format!("{TINY}[recompute]\npolicy = \"budget\"\nbudget = \"4 gigs\"\n"),
        "
recompute.budget = \"4 gigs\" is not a size
  --> run.toml:5
  |
5 | budget = \"4 gigs\"
  |          ^^^^^^^^
hint: give a number and its unit, such as \"4 GiB\" (KiB, MiB, GiB, TiB; KB, MB, GB, TB; B)
",
    );
}

#[test]
fn keys_that_a_schedule_does_not_read_are_refused() {
    check(
        &format!("{TINY}[optimizer]\ndecay_steps = 20\n"),
        "
optimizer.decay_steps = 20 is given, and optimizer.schedule = \"cosine\" does not read it
  --> run.toml:4
  |
4 | decay_steps = 20
  |               ^^
hint: remove optimizer.decay_steps, or choose optimizer.schedule = \"wsd\"
",
    );
    check(
        &format!("{TINY}[optimizer]\nschedule = \"constant\"\nmin_lr_ratio = 0.5\n"),
        "
optimizer.min_lr_ratio = 0.5 is given, and optimizer.schedule = \"constant\" does not fall
  --> run.toml:5
  |
5 | min_lr_ratio = 0.5
  |                ^^^
hint: remove optimizer.min_lr_ratio, or choose another optimizer.schedule
",
    );
}

#[test]
fn constants_that_an_optimizer_does_not_read_are_refused() {
    for (name, key) in [("lion", "eps"), ("sgd", "beta2"), ("adamw", "momentum")] {
        check_set(
            &format!("{TINY}[optimizer]\n{key} = 0.5\n"),
            &[&format!("optimizer.name={name}")],
            &format!(
                "
optimizer.{key} = 0.5 is given, and optimizer.name = \"{name}\" does not read it
  --> --set optimizer.name={name}
hint: remove optimizer.{key}, or choose another optimizer.name
"
            ),
        );
    }
}

#[test]
fn a_group_must_change_something() {
    check(
        &format!("{TINY}[[optimizer.groups]]\nmatch = \"*\"\n"),
        "
optimizer.groups: the group \"*\" changes nothing
  --> run.toml:3
  |
3 | [[optimizer.groups]]
  | ^^^^^^^^^^^^^^^^^^^^
hint: give it a lr_scale, a weight_decay, or both
",
    );
}

#[test]
fn a_ramp_grows_in_whole_micro_batches() {
    check(
        &format!(
            "{TINY}[train]\nbatch_ramp = [{{ tokens = 9, global_batch = 16 }}, {{ tokens = 9, global_batch = 32 }}]\n"
        ),
        "
train.batch_ramp: 9 tokens do not come after those before them
  --> run.toml:4
  |
4 | batch_ramp = [{ tokens = 9, global_batch = 16 }, { tokens = 9, global_batch = 32 }]
  |                                                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
hint: list the sizes in the order of their tokens
",
    );
    check_set(
        TINY,
        &["train.batch_ramp=[{ tokens = 9, global_batch = 8 }]"],
        "
train.batch_ramp: 8 sequences from 9 tokens on are not more than the 8 before
  --> --set train.batch_ramp=[{ tokens = 9, global_batch = 8 }]
hint: let every size be larger than the one before; the first is train.global_batch
",
    );
    check_set(
        &format!("{TINY}[train]\nmicro_batch = 2\n[parallel]\ndp = 4\n"),
        &["train.batch_ramp=[{ tokens = 9, global_batch = 20 }]"],
        "
parallel.dp × train.micro_batch = 4 × 2 does not divide the 20 sequences of a step in train.batch_ramp
  --> --set train.batch_ramp=[{ tokens = 9, global_batch = 20 }]
hint: use 16 or 24 sequences there, or a train.micro_batch that divides all sizes
",
    );
}

#[test]
fn chats_have_keys_of_their_own() {
    let with = |keys: &str| {
        Config::parse(&format!("{TINY}[data]\n{keys}\n"), "run.toml", &[])
            .map_err(|error| error.to_string().lines().next().unwrap_or_default().to_owned())
    };
    let chat = "format = \"chat\"\ntokenizer = \"t.json\"";
    let config = with(chat).unwrap();
    assert!(config.data.document_mask && config.leaves_targets_out());
    assert_eq!((config.data.text_field.as_str(), config.data.train_on), ("messages", Some(TrainOnTurns::Assistant)));
    assert!(!with(&format!("{chat}\ntrain_on = \"all\"")).unwrap().leaves_targets_out());
    for (keys, error) in [
        (
            "format = \"chat\"".to_owned(),
            "data.format = \"chat\" is given, and data.tokenizer = \"bytes\" has no special tokens to keep turns apart",
        ),
        ("train_on = \"last\"".to_owned(), "data.train_on is given, and data.format = \"text\" has no turns"),
        (
            "chat_template = \"a.jinja\"".to_owned(),
            "data.chat_template is given, and data.format = \"text\" has no turns",
        ),
        (
            format!("{chat}\nprompt_field = \"a\""),
            "data.prompt_field = \"a\" is given, and the prompts of a chat are its own messages",
        ),
        (
            "special_tokens = [\"<s>\"]".to_owned(),
            "data.special_tokens = [\"<s>\"] is given, and data.tokenizer = \"bytes\" has no special tokens",
        ),
        (
            format!("{chat}\n[train]\nnoise_scale = true\nmicro_batch = 1"),
            "train.noise_scale is not measured where data.train_on leaves some targets out",
        ),
    ] {
        assert_eq!(with(&keys).unwrap_err(), error);
    }
}

#[test]
fn the_noise_scale_needs_gradients_of_two_sizes() {
    check(
        &format!("{TINY}[train]\nnoise_scale = true\n"),
        "
train.noise_scale = true needs two micro-batches per step and rank, and train.micro_batch = 8 makes one
  --> run.toml:4
  |
4 | noise_scale = true
  |               ^^^^
hint: lower train.micro_batch, or raise train.global_batch
",
    );
}

#[test]
fn a_loss_scale_is_of_fp16() {
    check_set(
        TINY,
        &["precision.growth_interval=5"],
        "
precision.growth_interval = 5 is given, and precision.policy = \"bf16\" has no loss scale
  --> --set precision.growth_interval=5
hint: remove precision.growth_interval, or choose precision.policy = \"fp16\"
",
    );
    check_set(
        TINY,
        &["precision.policy=fp16", "precision.loss_scale=1000"],
        "
precision.loss_scale = 1000 is out of range
  --> --set precision.loss_scale=1000
hint: give a number that is a power of 2 from 1 to 2^30
",
    );
}

#[test]
fn fp8_has_keys_of_its_own_and_depends_on_the_micro_batch() {
    for (key, value) in [("fp8_weights", 0), ("fp8_skip_first", 1), ("fp8_skip_last", 2), ("shadow_every", 10)] {
        let change = match value {
            0 => String::new(),
            _ => format!(" (a run that goes on: --change precision.{key}=0)"),
        };
        check_set(
            TINY,
            &[&format!("precision.{key}={value}")],
            &format!(
                "
precision.{key} = {value} is given, and precision.policy = \"bf16\" has no fp8
  --> --set precision.{key}={value}
hint: remove precision.{key}{change}, or choose precision.policy = \"fp8\"
"
            ),
        );
    }
    check_set(
        TINY,
        &["precision.fp8_recipe=block"],
        "
precision.fp8_recipe = \"block\" is given, and precision.policy = \"bf16\" has no fp8
  --> --set precision.fp8_recipe=block
hint: remove precision.fp8_recipe (a run that goes on: --change precision.fp8_recipe=current), or choose precision.policy = \"fp8\"
",
    );
    check_set(
        TINY,
        &["precision.policy=fp8", "train.reproducible=true"],
        "
train.reproducible = true asks for the same bits at any train.micro_batch, and the scales of fp8 are those of a micro-batch
  --> --set train.reproducible=true
hint: remove train.reproducible, or choose precision.policy = \"bf16\"
",
    );
}

#[test]
fn experts_are_as_many_as_a_token_takes_and_of_families_that_have_them() {
    let shape = "[model]\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nffn = 64\n";
    let dots1 = format!("{shape}architecture = \"dots1\"\nexperts = 12\n");
    check(
        &format!("{dots1}experts_per_token = 13\n"),
        "
model.experts_per_token = 13 is more than model.experts = 12
  --> run.toml:9
  |
9 | experts_per_token = 13
  |                     ^^
hint: choose at most 12
",
    );
    check_set(
        &dots1,
        &["model.expert_groups=5"],
        "
model.expert_groups = 5 does not make groups of two or more of model.experts = 12
  --> --set model.expert_groups=5
hint: 4 groups do
",
    );
    let refused = |text: &str, set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        Config::parse(text, "run.toml", &set).unwrap_err().with_hint()
    };
    for (set, said, hint) in [
        (
            &["model.expert_groups=2", "model.expert_top_groups=3"][..],
            "model.expert_top_groups = 3 is more than model.expert_groups = 2",
            "choose at most 2",
        ),
        (
            &["model.expert_groups=4", "model.experts_per_token=5"],
            "model.experts_per_token = 5 is more than the 3 experts of model.expert_top_groups = 1",
            "choose at most 3, or 2 groups",
        ),
        (
            &["model.dense_layers=2"],
            "model.dense_layers = 2 leaves none of model.layers = 2 with experts",
            "choose at most 1",
        ),
        (
            &["model.architecture=\"mixtral\"", "model.shared_experts=2"],
            "model.shared_experts = 2 is given, and model.architecture = \"mixtral\" does not have it",
            "use model.architecture = \"deepseek\", \"dots1\", \"deepseek_v2\" or \"deepseek_v3\" or remove model.shared_experts",
        ),
        (
            &["model.architecture=\"deepseek\"", "model.balance_bias=0.001"],
            "model.balance_bias = 0.001 is given, and model.architecture = \"deepseek\" does not have it",
            "use model.architecture = \"dots1\" or \"deepseek_v3\", or model.balance_loss, or remove model.balance_bias",
        ),
    ] {
        let error = refused(&dots1, set);
        assert!(error.contains(said) && error.contains(&format!("hint: {hint}")), "{error}");
    }
    let error = refused(&format!("{shape}balance_bias = 0.1\n"), &[]);
    assert!(error.contains("model.architecture = \"llama\" does not have it"), "{error}");
}

#[test]
fn sizes_of_latent_attention_go_together() {
    let shape = "[model]\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nffn = 64\n";
    let refused = |keys: &str| Config::parse(&format!("{shape}{keys}\n"), "run.toml", &[]).expect_err(keys).with_hint();
    for (keys, said, hint) in [
        (
            "v_head_dim = 8",
            "model.v_head_dim = 8 is of latent attention, and model.kv_lora_rank is not set",
            "set model.kv_lora_rank, or remove model.v_head_dim",
        ),
        (
            "kv_lora_rank = 8\nkv_heads = 2",
            "model.kv_heads = 2 is given, and with model.kv_lora_rank there are as many as heads, 4",
            "remove model.kv_heads",
        ),
        (
            "kv_lora_rank = 8\nqk_rope_head_dim = 5",
            "model.qk_rope_head_dim = 5 is odd, and RoPE rotates pairs",
            "choose an even model.qk_rope_head_dim",
        ),
        (
            "kv_lora_rank = 8\nhead_dim = 8",
            "model.head_dim = 8 is given, and model.qk_nope_head_dim + model.qk_rope_head_dim = 192",
            "remove model.head_dim",
        ),
        (
            "kv_lora_rank = 8\nqk_norm = \"head\"",
            "model.qk_norm = \"head\" is given, and with model.kv_lora_rank norms are of the latents",
            "set model.qk_norm = \"none\"",
        ),
        (
            "kv_lora_rank = 8\narchitecture = \"qwen2\"",
            "model.kv_lora_rank = 8 is given, and model.architecture = \"qwen2\" has no latent attention",
            "choose another model.architecture, or remove model.kv_lora_rank",
        ),
    ] {
        let error = refused(keys);
        assert!(error.contains(said) && error.contains(&format!("hint: {hint}")), "{error}");
    }
    let config = Config::parse(&format!("{shape}kv_lora_rank = 8\n"), "run.toml", &[]).unwrap();
    assert_eq!((config.model.head_dim, config.model.value_dim(), config.model.rope_dim()), (192, 128, 64));
}

#[test]
fn attention_sinks_and_limits_of_a_swiglu_go_with_what_has_them() {
    let shape = "[model]\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nffn = 64\n";
    let parsed = |keys: &str| Config::parse(&format!("{shape}{keys}\n"), "run.toml", &[]);
    for (keys, said, hint) in [
        (
            "attention_sinks = true\nattention = \"naive\"",
            "model.attention = \"naive\" has no attention sinks, and model.attention_sinks = true",
            "use model.attention = \"flash\", which computes the same, or set model.attention_sinks = false",
        ),
        (
            "swiglu_limit = 7.0",
            "model.swiglu_limit = 7.0 is given, and model.activation = \"silu\" clamps nothing",
            "remove model.swiglu_limit, or choose model.activation = \"clamped_swiglu\"",
        ),
        (
            "architecture = \"gpt2\"\nattention_sinks = true",
            "model.attention_sinks = true is given, and model.architecture = \"gpt2\" has a block of its own without it",
            "choose another model.architecture, or remove model.attention_sinks",
        ),
    ] {
        let error = parsed(keys).expect_err(keys).with_hint();
        assert!(error.contains(said) && error.contains(&format!("hint: {hint}")), "{error}");
    }
    assert_eq!(parsed("activation = \"clamped_swiglu\"").unwrap().model.swiglu_limit, Some(7.0));
    let gpt_oss = parsed("architecture = \"gpt_oss\"\nexperts = 4\nsliding_window = 8").unwrap().model;
    assert!(gpt_oss.attention_sinks && gpt_oss.rope_local_theta.is_none() && gpt_oss.layer_types.len() == 2);
}

#[test]
fn a_password_in_an_address_is_refused_and_not_shown() {
    let problem =
        "telemetry.mlflow_uri has a user name or a password in it, and everybody who sees the run would see them";
    let hint = "hint: write the address without them, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN";
    let key = |address: &str| format!("{TINY}[telemetry]\nmlflow_uri = \"{address}\"\n");
    check(&key("https://ada:secret@host:5000/base"), &format!("{problem}\n  --> run.toml:4\n{hint}"));
    let set = "telemetry.mlflow_uri=https://ada@host";
    check_set(TINY, &[set], &format!("{problem}\n  --> --set telemetry.mlflow_uri\n{hint}"));
    let sound = "https://host/@home";
    assert_eq!(Config::parse(&key(sound), "run.toml", &[]).unwrap().telemetry.mlflow_uri.as_deref(), Some(sound));
}
