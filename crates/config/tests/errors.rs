//! Refusals of one key or value, with the whole text that the user sees.

mod common;

use common::{TINY, check, check_set};
use lockstep_config::{Architecture, Config};
use lockstep_ir::Hint;

#[test]
fn an_unknown_key_is_refused_with_the_nearest_one() {
    check(
        "[train]\nstesp = 300\n",
        "
train.stesp is not a key of [train]
  --> run.toml:2
  |
2 | stesp = 300
  | ^^^^^
hint: did you mean `steps`?
",
    );
}

#[test]
fn a_key_of_another_table_is_pointed_to() {
    check(
        "[train]\nlr = 1e-3\n",
        "
train.lr is not a key of [train]
  --> run.toml:2
  |
2 | lr = 1e-3
  | ^^
hint: did you mean `optimizer.lr`?
",
    );
    check(
        "steps = 3\n",
        "
steps is not a table of the config
  --> run.toml:1
  |
1 | steps = 3
  | ^^^^^
hint: did you mean `train.steps`?
",
    );
}

#[test]
fn a_key_like_no_other_gets_the_list() {
    check(
        "[checkpoint]\nbananas = 3\n",
        "
checkpoint.bananas is not a key of [checkpoint]
  --> run.toml:2
  |
2 | bananas = 3
  | ^^^^^^^
hint: the keys of [checkpoint] are every, keep, every_minutes, keep_every, keep_best, mirror, asynchronous
",
    );
}

#[test]
fn an_unknown_table_is_refused() {
    check(
        "[modle]\ndim = 3\n",
        "
modle is not a table of the config
  --> run.toml:1
  |
1 | [modle]
  |  ^^^^^
hint: did you mean `model`?
",
    );
    check(
        "[zebra]\n",
        "
zebra is not a table of the config
  --> run.toml:1
  |
1 | [zebra]
  |  ^^^^^
hint: the tables are model, data, train, precision, parallel, recompute, offload, optimizer, lora, spikes, checkpoint, eval, telemetry, cluster
",
    );
}

#[test]
fn the_first_of_several_problems_in_file_order_is_reported() {
    check(
        "[train]\nsteps = -1\n[data]\ntokenizer = 3\n[alpha]\n",
        r#"
train.steps = -1 is out of range
  --> run.toml:2
  |
2 | steps = -1
  |         ^^
hint: give an integer from 0 to 1099511627776, or a string with a decimal suffix (K, M, B or T) such as "2K"
"#,
    );
}

#[test]
fn wrong_units_are_refused_with_what_is_accepted() {
    for value in ["\"4 GiB\"", "\"12 parsecs\"", "\"4m\"", "true", "1.5", "1979-05-27", "[1]", "\"\"", "inf"] {
        let carets = "^".repeat(value.len());
        check(
            &format!("[train]\nseq = {value}\n"),
            &format!(
                r#"
train.seq = {value} is not a count
  --> run.toml:2
  |
2 | seq = {value}
  |       {carets}
hint: give an integer from 1 to 16777216, or a string with a decimal suffix (K, M, B or T) such as "2K"
"#
            ),
        );
    }
}

#[test]
fn a_batch_of_something_else_is_refused() {
    check(
        "[train]\nglobal_batch = \"4M bytes\"\n",
        r#"
train.global_batch = "4M bytes" is not a number of sequences or tokens
  --> run.toml:2
  |
2 | global_batch = "4M bytes"
  |                ^^^^^^^^^^
hint: give a number of sequences from 1 to 4294967296, or a string in tokens with a decimal suffix (K, M, B or T) such as "4M tokens"
"#,
    );
}

#[test]
fn numbers_out_of_range_are_refused() {
    for value in ["0", "-1", "16777217", "99999999999999999999999999", "\"15T\""] {
        let carets = "^".repeat(value.len());
        check(
            &format!("[model]\ndim = {value}\n"),
            &format!(
                r#"
model.dim = {value} is out of range
  --> run.toml:2
  |
2 | dim = {value}
  |       {carets}
hint: give an integer from 1 to 16777216, or a string with a decimal suffix (K, M, B or T) such as "2K"
"#
            ),
        );
    }
}

#[test]
fn floats_keep_their_bounds() {
    check(
        "[optimizer]\nbeta1 = 1.0\n",
        "
optimizer.beta1 = 1.0 is out of range
  --> run.toml:2
  |
2 | beta1 = 1.0
  |         ^^^
hint: give a number from 0 up to, but not, 1
",
    );
    for value in ["nan", "inf", "-inf", "1e999"] {
        let carets = "^".repeat(value.len());
        check(
            &format!("[optimizer]\nlr = {value}\n"),
            &format!(
                "
optimizer.lr = {value} is not a finite number
  --> run.toml:2
  |
2 | lr = {value}
  |      {carets}
hint: give a number greater than 0
"
            ),
        );
    }
}

#[test]
fn a_table_is_no_value_and_a_value_no_table() {
    check(
        "[train.steps]\nfast = true\n",
        r#"
train.steps is a table, not a count
  --> run.toml:1
  |
1 | [train.steps]
  | ^^^^^^^^^^^^^
hint: give an integer from 0 to 1099511627776, or a string with a decimal suffix (K, M, B or T) such as "2K"
"#,
    );
    check(
        "train = 3\n",
        "
train is a table, and a value is given for it
  --> run.toml:1
  |
1 | train = 3
  | ^^^^^
hint: write [train] and its keys below
",
    );
    check(
        "[[train]]\nsteps = 3\n",
        "
train is a table, and a value is given for it
  --> run.toml:1
  |
1 | [[train]]
  |   ^^^^^
hint: write [train] and its keys below
",
    );
}

#[test]
fn a_key_given_twice_is_refused() {
    check(
        "[train]\nsteps = 1\nsteps = 2\n",
        "
the key steps is given twice
  --> run.toml:3
  |
3 | steps = 2
  | ^^^^^
hint: each key and each table is given once: remove one of the two, or join them
",
    );
}

#[test]
fn text_that_is_not_toml_is_refused() {
    check(
        "[model]\npreset = llama-15m\n",
        "
not valid TOML: string values must be quoted
  --> run.toml:2
  |
2 | preset = llama-15m
  |          ^^^^^^^^^
hint: write `key = value`; strings are in quotes, numbers and true or false are not (https://toml.io)
",
    );
}

#[test]
fn an_unknown_preset_is_refused_with_the_list() {
    check(
        "[model]\npreset = \"llama-3-8B-x\"\n",
        r#"
model.preset = "llama-3-8B-x" is not known
  --> run.toml:2
  |
2 | preset = "llama-3-8B-x"
  |          ^^^^^^^^^^^^^^
hint: did you mean "llama-3-8b"? choose one of "llama-15m", "llama-29m", "llama-124m", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "mistral-7b", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "olmoe-1b-7b", "deepseek-moe-16b", "deepseek-v3-mha", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b", "smollm3-3b", "olmo-2-7b", "olmo-2-32b", "gemma-3-270m", "gemma-3-1b"
"#,
    );
}

#[test]
fn a_word_that_is_no_choice_gets_the_list() {
    check(
        "[model]\narchitecture = \"mamba\"\n",
        &format!(
            r#"
model.architecture = "mamba" is not known
  --> run.toml:2
  |
2 | architecture = "mamba"
  |                ^^^^^^^
hint: choose one of "{}"
"#,
            Architecture::WORDS.join("\", \"")
        ),
    );
}

#[test]
fn lists_name_the_element_at_fault() {
    check(
        "[data]\npaths = [\"docs\", 3]\n",
        r#"
data.paths: 3 is not one of the paths it lists
  --> run.toml:2
  |
2 | paths = ["docs", 3]
  |                  ^
hint: name files or folders, relative to the config file's folder, such as ["docs", "src/main.rs"]
"#,
    );
    check(
        "[data]\nextensions = [\".rs\"]\n",
        r#"
data.extensions: ".rs" is not one of the extensions it lists
  --> run.toml:2
  |
2 | extensions = [".rs"]
  |               ^^^^^
hint: write file extensions without the dot, such as ["txt", "md"]
"#,
    );
}

#[test]
fn rope_scaling_is_complete_and_has_no_other_keys() {
    check(
        "[model]\nrope_scaling = { factor = 8, low_freq = 1 }\n",
        "
model.rope_scaling.low_freq is not a key of model.rope_scaling
  --> run.toml:2
  |
2 | rope_scaling = { factor = 8, low_freq = 1 }
  |                              ^^^^^^^^
hint: give all of { factor, low_freq_factor, high_freq_factor, original_context }
",
    );
    check(
        "[model]\nrope_scaling = { rope_type = \"yarn\", factor = 8 }\n",
        "
model.rope_scaling.rope_type is not a key of model.rope_scaling
  --> run.toml:2
  |
2 | rope_scaling = { rope_type = \"yarn\", factor = 8 }
  |                  ^^^^^^^^^
hint: it is `type` here
",
    );
    check(
        "[model]\nrope_scaling = 3\n",
        "
model.rope_scaling = 3 is not an inline table
  --> run.toml:2
  |
2 | rope_scaling = 3
  |                ^
hint: give { factor, low_freq_factor, high_freq_factor, original_context }, { type = \"linear\", factor } or { type = \"yarn\", \
factor, original_context, beta_fast, beta_slow, attention_factor, mscale_all_dim, truncate }
",
    );
    check(
        "[model]\nrope_scaling = { factor = 8 }\n",
        "
model.rope_scaling.low_freq_factor is not set
  --> run.toml:2
  |
2 | rope_scaling = { factor = 8 }
  |                ^^^^^^^^^^^^^^
hint: give all of { factor, low_freq_factor, high_freq_factor, original_context }
",
    );
    check(
        "[model.rope_scaling]\nfactor = 0.5\n",
        "
model.rope_scaling.factor = 0.5 is out of range
  --> run.toml:2
  |
2 | factor = 0.5
  |          ^^^
hint: give a number 1 or greater
",
    );
    check(
        "[model]\nrope_scaling = { factor = 8, low_freq_factor = 4, high_freq_factor = 4, original_context = \"8K\" }\n",
        r#"
model.rope_scaling.high_freq_factor = 4.0 is not above low_freq_factor = 4.0
  --> run.toml:2
  |
2 | rope_scaling = { factor = 8, low_freq_factor = 4, high_freq_factor = 4, original_context = "8K" }
  |                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
hint: Llama 3 uses low_freq_factor = 1, high_freq_factor = 4
"#,
    );
}

#[test]
fn overrides_are_refused_like_the_file() {
    let set = |text: &str, expected: &str| check_set(TINY, &[text], expected);
    set(
        "train.stesp=3",
        "
train.stesp is not a key of [train]
  --> --set train.stesp=3
hint: did you mean `steps`?
",
    );
    set(
        "train.steps=soon",
        r#"
train.steps = soon is not a count
  --> --set train.steps=soon
hint: give an integer from 0 to 1099511627776, or a string with a decimal suffix (K, M, B or T) such as "2K"
"#,
    );
    set(
        "steps=3",
        "
steps is not a key
  --> --set steps=3
hint: did you mean `train.steps`?
",
    );
    set(
        "train=3",
        "
train is a table, not a key
  --> --set train=3
hint: write --set table.key=value, such as --set train.steps=100
",
    );
    set(
        "train.steps",
        "
train.steps sets no value
  --> --set train.steps
hint: write --set table.key=value, such as --set train.steps=100
",
    );
    set(
        "train.steps=",
        "
train.steps is set to nothing
  --> --set train.steps=
hint: write --set table.key=value, such as --set train.steps=100
",
    );
    set(
        "data.paths=[src",
        "
data.paths = [src is not valid TOML: unclosed array, expected `]`
  --> --set data.paths=[src
hint: close every quote and bracket; quote the whole argument for the shell
",
    );
    set(
        "model.kv_heads=4",
        "
model.kv_heads = 4 does not divide model.heads = 6
  --> --set model.kv_heads=4
hint: 3 or 6 kv heads divide it
",
    );
}

#[test]
fn training_needs_data() {
    let config = Config::parse(TINY, "run.toml", &[]).expect("enough to explain a model");
    let error = config.require_data().expect_err("there is no data");
    assert_eq!(
        error.with_hint(),
        "data.paths is empty, so there is nothing to train on
  --> run.toml
hint: list files or folders, relative to the config file's folder: [data] paths = [\"docs\"]"
    );
}

#[test]
fn corpora_are_complete_and_have_no_other_keys() {
    let check = |corpora: &str, expected: &str, hint: &str| {
        let text = format!("[data]\ncorpora = {corpora}\n");
        let error = Config::parse(&text, "run.toml", &[]).expect_err("the config must be refused");
        assert_eq!((error.problem(), error.hint().as_deref()), (expected, Some(hint)));
    };
    check(
        "[{ name = \"a\", path = [\"b\"], weight = 1 }]",
        "data.corpora.path is not a key of data.corpora",
        "did you mean `paths`?",
    );
    check(
        "[{ name = \"a\", paths = [\"b\"] }]",
        "data.corpora.weight is not set",
        "give { name, paths, weight, schedule }",
    );
    check(
        "[{ name = \"a\", paths = [\"b\"], weight = 0 }]",
        "data.corpora: the corpus \"a\" has weight 0 all the time",
        "give it a weight greater than 0, or leave it out",
    );
    check(
        "[{ name = \"../a\", paths = [\"b\"], weight = 1 }]",
        "data.corpora.name = \"../a\" cannot be the name of a folder",
        "name the corpus with letters, digits, - and _",
    );
    check(
        "[\"a\"]",
        "data.corpora: \"a\" is not one of the corpora it lists",
        "give a list of { name, paths, weight, schedule }; schedule may be left out",
    );
    let twice = "[{ name = \"a\", paths = [\"b\"], weight = 1 }, { name = \"A\", paths = [\"c\"], weight = 1 }]";
    check(twice, "data.corpora: two corpora are named \"A\"", "give each its own name");
    let scheduled =
        |schedule: &str| format!("[{{ name = \"a\", paths = [\"b\"], weight = 1, schedule = {schedule} }}]");
    check(
        &scheduled("[{ tokens = \"2M\", weight = 3 }, { tokens = 2000000, weight = 1 }]"),
        "data.corpora.schedule: 2000000 tokens do not come after those before them",
        "list the weights in the order of their tokens",
    );
    check(
        &scheduled("[{ tokens = 9, weight = 0 }]"),
        "data.corpora: from 9 tokens on every corpus has weight 0",
        "give one of them a weight greater than 0 there",
    );
    check(&scheduled("[{ tokens = 9 }]"), "data.corpora.schedule.weight is not set", "give all of { tokens, weight }");
    check(
        &scheduled("0.5"),
        "data.corpora.schedule = 0.5 is not a list of weights",
        "give a list of { tokens, weight }, such as { tokens = \"2T\", weight = 0.3 }",
    );
}
