//! What an accepted config holds: defaults, presets, overrides, units, paths.

use lockstep_ir::Hint;
use std::path::Path;

use lockstep_config::{
    Architecture, Change, Config, PrecisionPolicy, QkNorm, RopeScalingConfig, SaveEvery, legal, presets, schema,
};
use lockstep_ir::Layout;

fn parse(text: &str) -> Config {
    parse_set(text, &[])
}

fn parse_set(text: &str, overrides: &[&str]) -> Config {
    let overrides: Vec<_> = overrides.iter().map(|s| s.to_string()).collect();
    Config::parse(text, "/home/ada/run.toml", &overrides).unwrap_or_else(|error| panic!("{error}"))
}

const TINY: &str = "[model]\npreset = \"llama-15m\"\n";

#[test]
fn the_interval_of_checkpoints_may_be_found_when_a_run_begins() {
    let config = parse_set(TINY, &["checkpoint.every=auto"]);
    assert_eq!(config.checkpoint.every, SaveEvery::Auto);
    assert!(config.resolved_toml().contains("every = \"auto\"  # --set"));
    let found = config.with_checkpoint_every(12, "12 steps of 1.0 s");
    assert_eq!(found.checkpoint.every, SaveEvery::Steps(12));
    assert!(found.resolved_toml().contains("every = 12  # auto: 12 steps of 1.0 s"), "{}", found.resolved_toml());
    let error = Config::parse(&format!("{TINY}[checkpoint]\nevery = \"often\"\n"), "run.toml", &[]).unwrap_err();
    assert!(error.with_hint().contains("is not a count or \"auto\""), "{error}");
    assert_eq!(parse_set(TINY, &["checkpoint.every=2K"]).checkpoint.every, SaveEvery::Steps(2000));
}

#[test]
fn a_preset_alone_is_a_config() {
    let config = parse("[model]\npreset = \"llama-3.2-1b\"\n");
    let model = &config.model;
    assert_eq!((model.vocab_size, model.layers, model.dim), (128_256, 16, 2048));
    assert_eq!((model.heads, model.kv_heads, model.head_dim, model.ffn), (32, 8, 64, 8192));
    assert_eq!((model.rope_theta, model.tied_embeddings), (500_000.0, true));
    let llama3 =
        RopeScalingConfig::Llama3 { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
    assert_eq!(model.rope_scaling, Some(llama3));

    assert_eq!((config.train.steps, config.train.seq, config.train.global_batch), (1000, 8192, 8));
    assert_eq!(config.precision.policy, PrecisionPolicy::Bf16);
    assert_eq!(config.preset_of("train.seq"), Some("llama-3.2-1b"));
    assert_eq!((config.train.micro_batch, config.accumulation_steps()), (8, 1));
    assert_eq!((config.optimizer.lr, config.optimizer.warmup_steps), (3e-4, 100));
    assert_eq!((config.checkpoint.every, config.checkpoint.keep), (SaveEvery::Steps(100), 3));
    assert_eq!((config.data.tokenizer.as_str(), config.data.paths.len()), ("bytes", 0));
}

#[test]
fn a_preset_has_the_sequence_length_of_its_pre_training_and_explicit_keys_win() {
    let seq = |name: &str| parse(&format!("[model]\npreset = \"{name}\"\n")).train.seq;
    assert_eq!(
        ["llama-3.1-8b", "llama-3-70b", "gpt2", "llama-2-7b", "qwen3-8b"].map(seq),
        [8192, 8192, 1024, 4096, 4096]
    );
    let config = parse_set("[model]\npreset = \"llama-3.1-8b\"\n[train]\nseq = 512\n", &["precision.policy=fp32"]);
    assert_eq!((config.train.seq, config.precision.policy), (512, PrecisionPolicy::Fp32));
    assert_eq!(config.preset_of("train.seq"), None);
    let explicit = parse("[model]\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 4\nffn = 128\n");
    assert_eq!((explicit.train.seq, explicit.precision.policy), (1024, PrecisionPolicy::Fp32));
}

#[test]
fn llama_3_1_scales_its_rope_and_llama_3_does_not() {
    let scaling = |name: &str| parse(&format!("[model]\npreset = \"{name}\"\n")).model.rope_scaling;
    assert_eq!(scaling("llama-3-8b"), None);
    for size in ["8b", "70b", "405b"] {
        let found = scaling(&format!("llama-3.1-{size}"));
        let llama3 = RopeScalingConfig::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        assert_eq!(found, Some(llama3), "{size}");
    }
}

#[test]
fn every_preset_is_accepted() {
    for name in presets() {
        let config = parse(&format!("[model]\npreset = \"{name}\"\n"));
        assert_eq!(config.model.preset.as_deref(), Some(name));
        // Qwen 3's and Gemma 3's heads are wider than their share of the stream in some sizes, those of latent attention and of gpt-oss too.
        let m = &config.model;
        let own = m.qk_norm == QkNorm::Head || m.latent().is_some() || m.attention_sinks;
        assert!(m.dim == m.heads * m.head_dim || own, "{name}");
    }
}

#[test]
fn scores_of_deepseek_are_multiplied_by_the_square_of_yarns_mscale() {
    for (name, expected) in [("deepseek-v3", 1.8738542), ("deepseek-v2-lite", 1.5896262), ("llama-3-8b", 1.0)] {
        let config = parse(&format!("[model]\npreset = \"{name}\"\n"));
        let found = config.model.rope_scaling.as_ref().map_or(1.0, RopeScalingConfig::score_factor);
        assert!((found - expected).abs() < 1e-7, "{name}: {found}");
    }
}

#[test]
fn explicit_keys_win_over_a_preset_beside_or_below_them() {
    let config = parse("[model]\nlayers = 2\npreset = \"llama-29m\"\n");
    assert_eq!((config.model.layers, config.model.dim), (2, 512));
    let config = parse_set("[model]\npreset = \"llama-29m\"\n", &["model.layers=2"]);
    assert_eq!((config.model.layers, config.model.dim), (2, 512));
    let config = parse_set("[model]\nlayers = 3\n", &["model.preset=llama-29m", "model.layers=2"]);
    assert_eq!((config.model.layers, config.model.dim), (2, 512));
}

#[test]
fn an_explicit_shape_derives_its_heads() {
    let config = parse("[model]\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 4\nffn = 128\n");
    assert_eq!((config.model.kv_heads, config.model.head_dim), (4, 16));
    assert_eq!(config.model.rope_scaling, None);
    let config = parse("[model]\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 3\nhead_dim = 20\nffn = 128\n");
    assert_eq!((config.model.kv_heads, config.model.head_dim), (3, 20));
}

#[test]
fn counts_take_decimal_suffixes_and_floats_take_integers() {
    let config = parse(&format!(
        "{TINY}[train]\nsteps = \"2K\"\nseq = 0x200\nvalidate_every = 1_000\n[optimizer]\ngrad_clip = 1\n"
    ));
    assert_eq!((config.train.steps, config.train.seq, config.train.validate_every), (2000, 512, 1000));
    assert_eq!(config.optimizer.grad_clip, 1.0);
}

#[test]
fn a_batch_in_tokens_becomes_sequences_wherever_seq_is_given() {
    let config =
        parse(&format!("{TINY}[train]\nglobal_batch = \"4M tokens\"\nmicro_batch = \"8K tokens\"\nseq = 2000\n"));
    assert_eq!((config.train.global_batch, config.train.micro_batch), (2000, 4));
    assert_eq!(config.accumulation_steps(), 500);
    let config = parse(&format!("{TINY}[train]\nglobal_batch = \"64 sequences\"\n"));
    assert_eq!(config.train.global_batch, 64);
}

#[test]
fn a_rank_computes_its_share_of_the_batch_at_once_unless_told_otherwise() {
    let config = parse_set(TINY, &["train.global_batch=64", "parallel.dp=4"]);
    assert_eq!((config.train.micro_batch, config.accumulation_steps()), (16, 1));
    let config = parse(&format!("{TINY}[train]\nglobal_batch = 1024\nmicro_batch = 2\n[parallel]\ndp = 128\n"));
    assert_eq!(config.accumulation_steps(), 4);
    let tokens = ["train.global_batch=64K tokens", "train.seq=1000", "parallel.dp=2"];
    assert_eq!(parse_set(TINY, &tokens).train.micro_batch, 32);
}

#[test]
fn the_layout_is_that_of_the_parallel_table() {
    assert_eq!(parse(TINY).layout(), Layout::single(1));
    let text =
        "[parallel]\ndp = 2\ntp = 2\npp = 3\nzero = 1\nsequence_parallel = true\nschedule = \"gpipe\"\ntimeout = 5\n";
    let config = parse_set(&format!("{TINY}{text}"), &["train.micro_batch=1"]);
    let written: Layout = "dp=2,zero=1,tp=2,sp,pp=3,gpipe".parse().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(config.layout(), Layout { micro_batches: 4, ..written });
    assert_eq!(config.parallel.timeout, 5.0);
    assert_eq!(legal::check(&config.layout(), &config.extents()), []);
    let virtual_stages = |keys: &str| parse(&format!("{TINY}[parallel]\npp = 2\n{keys}\n"));
    for (keys, text) in [
        ("", "pp=2"),
        ("schedule = \"interleaved\"", "pp=2,interleaved,virtual=2"),
        ("schedule = \"interleaved\"\nvirtual = 3", "pp=2,interleaved,virtual=3"),
        ("schedule = \"zb-v\"", "pp=2,zb-v"),
    ] {
        let written: Layout = text.parse().unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(virtual_stages(keys).layout(), written, "{keys}");
    }
    // Stages cut by hand stay with layouts of as many.
    let config = virtual_stages("schedule = \"zb-v\"\nstages = [1, 1, 2, 2]");
    assert_eq!(config.parallel.stages, [1, 1, 2, 2]);
    for (text, stages) in [("pp=2,interleaved", 4), ("pp=4", 4), ("pp=2", 0), ("pp=3,zb-v", 0)] {
        assert_eq!(config.at(&text.parse().unwrap()).parallel.stages.len(), stages, "{text}");
    }
}

#[test]
fn overrides_win_over_the_file_and_the_last_wins() {
    let text = format!("{TINY}[train]\nsteps = 10\n");
    let config = parse_set(&text, &["train.steps=20", "train.steps = 30", "optimizer.lr=1e-3"]);
    assert_eq!((config.train.steps, config.optimizer.lr), (30, 1e-3));
    let config = parse_set(&text, &["train.global_batch=2048 tokens", "data.paths=[\"a=b\", 'c']"]);
    assert_eq!(config.train.global_batch, 8);
    assert_eq!(config.data.paths, ["a=b", "c"]);
    let config = parse_set(&text, &["model.preset=llama-124m", "train.reproducible=true"]);
    assert_eq!((config.model.dim, config.train.reproducible), (768, true));
}

#[test]
fn a_short_run_warms_up_within_its_steps() {
    assert_eq!(parse_set(TINY, &["train.steps=20"]).optimizer.warmup_steps, 20);
    assert_eq!(parse_set(TINY, &["train.steps=0"]).optimizer.warmup_steps, 100);
}

#[test]
fn constants_follow_from_the_optimizer_and_the_schedule() {
    let constants = |set: &[&str]| {
        let o = parse_set(TINY, set).optimizer;
        (o.beta1, o.beta2, o.eps, o.momentum)
    };
    assert_eq!(constants(&[]), (Some(0.9), Some(0.95), Some(1e-8), None));
    assert_eq!(constants(&["optimizer.name=lion"]), (Some(0.9), Some(0.99), None, None));
    assert_eq!(constants(&["optimizer.name=sgd"]), (None, None, None, Some(0.9)));
    assert_eq!(constants(&["optimizer.name=muon"]), (Some(0.9), Some(0.95), Some(1e-8), Some(0.95)));
    let falls = |set: &[&str]| {
        let o = parse_set(TINY, set).optimizer;
        (o.min_lr_ratio, o.decay_steps)
    };
    assert_eq!(falls(&[]), (Some(0.1), None));
    assert_eq!(falls(&["optimizer.schedule=wsd"]), (Some(0.1), Some(100)));
    assert_eq!(falls(&["optimizer.schedule=wsd", "train.steps=105"]), (Some(0.1), Some(5)));
    assert_eq!(falls(&["optimizer.schedule=constant"]), (None, None));
}

#[test]
fn groups_are_read_in_both_forms() {
    let config = parse(&format!("{TINY}[[optimizer.groups]]\nmatch = \"*.mlp.*\"\nlr_scale = 2\n"));
    let set = parse_set(TINY, &["optimizer.groups=[{ match = '*.mlp.*', lr_scale = 2.0 }]"]);
    assert_eq!(config.optimizer.groups.len(), 1);
    assert_eq!((config.optimizer.groups[0].lr_scale, config.optimizer.groups[0].weight_decay), (Some(2.0), None));
    assert_eq!(config, set);
}

#[test]
fn data_paths_start_from_the_folder_of_the_config() {
    let config = parse(&format!("{TINY}[data]\npaths = [\"docs\", \"/srv/books\"]\n"));
    assert_eq!(config.data.paths, ["docs", "/srv/books"]);
    assert_eq!(config.data_paths(), [Path::new("/home/ada/docs"), Path::new("/srv/books")]);
    assert!(config.require_data().is_ok());
}

#[test]
fn a_budget_is_a_number_of_bytes_with_its_unit() {
    let config = parse(&format!("{TINY}[recompute]\npolicy = \"budget\"\nbudget = \"1.5 GiB\"\n"));
    assert_eq!(config.recompute.budget.map(|b| b.0), Some(3 << 29));
    assert!(config.resolved_toml().contains("budget = \"1536 MiB\""));
    let config = parse_set(TINY, &["recompute.policy=list", "recompute.ops=['swiglu']"]);
    assert_eq!(config.recompute.ops, ["swiglu"]);
}

#[test]
fn the_schema_lists_every_key_once() {
    let keys = schema();
    let mut paths: Vec<_> = keys.iter().map(|key| key.path).collect();
    // Keys are added; one that goes is missed here.
    assert!(paths.len() >= 127);
    paths.sort_unstable();
    paths.dedup();
    assert_eq!(paths.len(), keys.len());

    let resolved = parse(TINY).resolved_toml();
    for key in &keys {
        let name = key.path.split('.').next_back().expect("a path has a name");
        assert!(resolved.contains(&format!("{name} = ")) || resolved.contains(&format!("# {name} is not set")));
        assert!(key.meaning.ends_with('.') && !key.meaning.contains("  "), "{}", key.meaning);
    }
}

#[test]
fn the_schema_reads_as_a_listing() {
    let rows = schema();
    let row = |path: &str| {
        let key = rows.iter().find(|key| key.path == path).expect("listed");
        (key.type_text.as_str(), key.default.as_str(), key.meaning.as_str())
    };
    assert_eq!(
        row("train.seq"),
        ("count", "1024", "Sequence length: tokens per sequence. A preset gives that of its pre-training.")
    );
    assert_eq!(row("optimizer.lr").0, "number, greater than 0");
    assert_eq!(row("model.dim").1, "required, or from model.preset");
    assert!(row("model.head_dim").1.starts_with("model.dim / model.heads; with model.kv_lora_rank, "));
    assert_eq!(row("model.preset").1, "not set");
    assert_eq!(row("data.tokenizer").0, "\"bytes\", or a path");
    assert_eq!(row("data.corpora").0, "list of { name, paths, weight, schedule }");
}

#[test]
fn defaults_of_families_are_what_the_listing_says() {
    let config = |family: Architecture| {
        let features = family.features();
        // A pattern of layers is the default where there is a window.
        let block = if features.gpt2_block { "" } else { "ffn = 48\nsliding_window = 8\n" };
        let experts = if features.experts { "experts = 4\n" } else { "" };
        let text = format!(
            "[model]\narchitecture = \"{family}\"\nvocab_size = 64\nlayers = 6\ndim = 32\nheads = 4\n{block}{experts}"
        );
        parse(&text)
    };
    let configs: Vec<(Architecture, Config)> = Architecture::ALL.iter().map(|one| (*one, config(*one))).collect();
    let usual = config(Architecture::Llama);
    let mut held = 0;
    for key in schema().iter().filter(|key| key.path.starts_with("model.")) {
        // What is given to some of them above, and what follows from that, is no default of a family.
        let given = ["model.architecture", "model.experts", "model.sliding_window"].contains(&key.path);
        let follows = ["with model.experts", "with model.kv_lora_rank", "with model.activation"]
            .iter()
            .any(|with| key.default.contains(with))
            || key.default == "model.head_dim";
        if given || follows {
            continue;
        }
        let words: Vec<&str> = key.default.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
        let named: Vec<&str> = Architecture::WORDS.iter().copied().filter(|word| words.contains(word)).collect();
        let differ = configs.iter().filter(|(_, config)| config.value(key.path) != usual.value(key.path));
        let differ: Vec<&str> = differ.map(|(family, _)| family.word()).collect();
        assert_eq!(named, differ, "{}: {}", key.path, key.default);
        held += usize::from(!named.is_empty());
    }
    assert!(held >= 12, "{held}");
}

#[test]
fn corpora_are_listed_with_their_weights() {
    let text = format!("{TINY}[[data.corpora]]\nname = \"code\"\npaths = [\"src\", \"/srv\"]\nweight = 0.3\n");
    let set = "data.corpora=[{ name = 'code', paths = ['src', '/srv'], weight = 0.3 }]";
    for config in [parse(&text), parse_set(TINY, &[set])] {
        assert_eq!(config.data.corpora.len(), 1);
        assert_eq!(config.data.corpora[0].name, "code");
        assert_eq!(config.data.corpora[0].weight, 0.3);
        assert_eq!(config.corpora()[0].paths, ["/home/ada/src", "/srv"]);
        assert!(config.require_data().is_ok());
    }
}

#[test]
fn a_tokenizer_is_bytes_or_a_path_from_the_folder_of_the_config() {
    assert_eq!(parse(TINY).tokenizer_path(), None);
    let config = parse_set(TINY, &["data.tokenizer=tokenizer.json", "data.prepared=../data"]);
    assert_eq!(config.tokenizer_path().as_deref(), Some(Path::new("/home/ada/tokenizer.json")));
    assert_eq!(config.prepared_dir().as_deref(), Some(Path::new("/home/ada/../data")));
}

#[test]
fn a_schedule_that_is_longer_than_the_run_is_shortened_with_a_warning() {
    let check = |keys: &str, steps: &str, expected: (u64, Option<u64>), warnings: &[&str]| {
        let config = parse_set(&format!("{TINY}[optimizer]\n{keys}\n"), &[steps]);
        assert_eq!((config.optimizer.warmup_steps, config.optimizer.decay_steps), expected, "{keys}");
        assert_eq!(config.warnings(), warnings, "{keys}");
        // What is written into a run directory reads back as the same.
        let again = parse(&config.resolved_toml());
        assert!(again == config && again.warnings().is_empty(), "{keys}");
    };
    let long = "optimizer.warmup_steps = 100 is more than train.steps = 3: the warmup is shortened to 3";
    check("warmup_steps = 100", "train.steps=3", (3, None), &[long]);
    check("warmup_steps = 3", "train.steps=3", (3, None), &[]);
    let decay = "optimizer.warmup_steps = 40 and optimizer.decay_steps = 20 are more than train.steps = 50: the decay is \
                 shortened to 10";
    check("schedule = \"wsd\"\nwarmup_steps = 40\ndecay_steps = 20", "train.steps=50", (40, Some(10)), &[decay]);
    check("warmup_steps = 40", "train.steps=0", (40, None), &[]);
}

#[test]
fn validation_is_a_small_part_of_a_short_run() {
    let check = |train: &str, expected: usize| {
        let config = parse(&format!("{TINY}[train]\n{train}\n"));
        assert_eq!(config.train.validation_sequences, expected, "{train}");
    };
    check("", 64);
    check("steps = 1", 2);
    check("steps = 1\nglobal_batch = 2", 1);
    check("steps = 20\nmicro_batch = 2", 40);
    check("validate_every = 5", 10);
    check("steps = 10\nvalidate_every = 0", 20);
    check("validation_sequences = 0", 0);
}

#[test]
fn changes_win_over_everything_and_say_when_they_were_made() {
    let change = |step, text: &str| Change { step, text: text.to_owned() };
    let config = parse_set(&format!("{TINY}[optimizer]\nlr = 1e-3\n"), &["train.steps=50"]);
    let changed = config.with_changes(&[change(10, "optimizer.lr=2e-3"), change(20, "train.steps=90")]).unwrap();
    assert_eq!((changed.optimizer.lr, changed.train.steps), (2e-3, 90));
    let text = changed.resolved_toml();
    assert!(
        text.contains("lr = 0.002  # --change at step 10\n") && text.contains("steps = 90  # --change at step 20\n")
    );
    let differences = changed.differences(&config);
    let found: Vec<_> = differences.iter().map(|d| (d.path, d.changeable, d.follows)).collect();
    let expected =
        [("train.steps", true, false), ("optimizer.lr", true, false), ("optimizer.warmup_steps", true, true)];
    assert_eq!(found, expected);
    assert_eq!((changed.value("train.steps"), config.value("model.window")), ("90".into(), "not set".into()));
    let error = config.with_changes(&[change(1, "train.steps=x")]).unwrap_err().with_hint();
    assert!(error.contains("--> --change train.steps=x"), "{error}");
}

#[test]
fn every_word_of_the_schema_is_read_and_written_back() {
    let words = |path: &str| {
        let key = schema().into_iter().find(|key| key.path == path).unwrap_or_else(|| panic!("no key {path}"));
        key.type_text.split(", ").map(|word| word.trim_matches('"').to_owned()).collect::<Vec<_>>()
    };
    let mut count = 0;
    for (path, more) in [
        ("model.architecture", ""),
        ("model.attention", ""),
        ("train.device", ""),
        ("precision.policy", ""),
        ("precision.gradients", ""),
        ("parallel.schedule", "[parallel]\npp = 2\n"),
        ("recompute.policy", "[recompute]\nops = [\"swiglu\"]\n"),
        ("optimizer.name", ""),
        ("optimizer.schedule", ""),
    ] {
        for word in words(path) {
            let more = match word.as_str() {
                "list" => more,
                _ if path == "parallel.schedule" => more,
                "budget" => "[recompute]\nbudget = \"1 GiB\"\n",
                _ => "",
            };
            let moe = ["mixtral", "qwen3_moe", "olmoe", "deepseek", "dots1", "deepseek_v2", "deepseek_v3", "gpt_oss"];
            let experts = if moe.contains(&word.as_str()) { "experts = 4\n" } else { "" };
            let text = format!(
                "[model]\nvocab_size = 8\nlayers = 4\ndim = 8\nheads = 2\nffn = 16\n{experts}[train]\nseq = 8\n{more}"
            );
            let config = Config::parse(&text, "run.toml", &[format!("{path}={word}")]);
            let config = config.unwrap_or_else(|error| panic!("{path} = {word}: {error}"));
            let key = path.split_once('.').unwrap().1;
            let line = format!("{key} = \"{word}\"  # --set");
            assert!(config.resolved_toml().lines().any(|l| l.starts_with(&line)), "{line}\n{}", config.resolved_toml());
            count += 1;
        }
    }
    assert!(count >= 30, "{count}");
}
