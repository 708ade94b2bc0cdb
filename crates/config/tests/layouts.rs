//! Refusals of layouts that do not fit the model or the batch, with the whole text that the user sees.

mod common;

use common::{TINY, check, check_set};
use lockstep_config::Config;
use lockstep_ir::Schedule;

#[test]
fn tp_must_split_the_heads() {
    check(
        &format!("{TINY}[parallel]\ntp = 4\n"),
        "
parallel.tp = 4 does not divide model.heads = 6
  --> run.toml:4
  |
4 | tp = 4
  |      ^
hint: use tp = 3 or 6
",
    );
}

#[test]
fn tp_must_split_the_key_value_heads_the_hidden_units_and_the_sequence() {
    check_set(
        "[model]\npreset = \"llama-29m\"\nheads = 24\nhead_dim = 32\nkv_heads = 6\n",
        &["parallel.tp=4"],
        "
parallel.tp = 4 does not divide model.kv_heads = 6 and is no multiple of it
  --> --set parallel.tp=4
hint: use tp = 3 or 6
",
    );
    check(
        "[parallel]\ntp = 4\n[model]\npreset = \"llama-29m\"\nffn = 1538\n",
        "
parallel.tp = 4 does not divide model.ffn = 1538
  --> run.toml:2
  |
2 | tp = 4
  |      ^
hint: use tp = 2
",
    );
    check(
        &format!("{TINY}[parallel]\ntp = 3\nsequence_parallel = true\n"),
        "
parallel.tp = 3 does not divide train.seq = 256, which sequence_parallel splits
  --> run.toml:4
  |
4 | tp = 3
  |      ^
hint: use tp = 2
",
    );
}

#[test]
fn sequence_parallelism_needs_tp() {
    check(
        &format!("{TINY}[parallel]\nsequence_parallel = true\n"),
        "
parallel.sequence_parallel = true splits sequences among tp ranks, and parallel.tp = 1
  --> run.toml:4
  |
4 | sequence_parallel = true
  |                     ^^^^
hint: use sequence_parallel = false, or tp = 2
",
    );
}

#[test]
fn dp_must_divide_the_batch() {
    check(
        &format!("{TINY}[train]\nglobal_batch = 12\n[parallel]\ndp = 5\n"),
        "
parallel.dp = 5 does not divide train.global_batch = 12
  --> run.toml:6
  |
6 | dp = 5
  |      ^
hint: use dp = 4 or 6
",
    );
    check_set(
        &format!("{TINY}[parallel]\ndp = 4\n"),
        &["train.global_batch=6"],
        "
parallel.dp = 4 does not divide train.global_batch = 6
  --> --set train.global_batch=6
hint: use dp = 3 or 6
",
    );
}

#[test]
fn dp_times_the_micro_batch_must_divide_the_batch() {
    check(
        &format!("{TINY}[train]\nglobal_batch = 24\nmicro_batch = 5\n[parallel]\ndp = 2\n"),
        "
parallel.dp × train.micro_batch = 2 × 5 does not divide train.global_batch = 24
  --> run.toml:5
  |
5 | micro_batch = 5
  |               ^
hint: use micro_batch = 4 or 6
",
    );
}

#[test]
fn stages_must_have_layers() {
    check(
        &format!("{TINY}[parallel]\npp = 8\n"),
        "
parallel.pp = 8 is more than model.layers = 6, and every stage needs a layer
  --> run.toml:4
  |
4 | pp = 8
  |      ^
hint: use pp = 6
",
    );
}

#[test]
fn chunks_go_with_their_schedule_and_have_layers() {
    check(
        &format!("{TINY}[parallel]\npp = 2\nvirtual = 2\n"),
        "
parallel.virtual = 2, and parallel.schedule = \"1f1b\" has one chunk of layers per rank
  --> run.toml:5
  |
5 | virtual = 2
  |           ^
hint: use virtual = 1, or schedule = \"interleaved\" or \"zb-v\"
",
    );
    check(
        &format!("{TINY}[parallel]\npp = 2\nschedule = \"interleaved\"\nvirtual = 4\n"),
        "
parallel.pp × parallel.virtual = 2 × 4 are more than model.layers = 6, and every virtual stage needs a layer
  --> run.toml:6
  |
6 | virtual = 4
  |           ^
hint: use virtual = 3
",
    );
    check(
        &format!("{TINY}[parallel]\nschedule = \"zb-h1\"\n"),
        "
parallel.schedule = \"zb-h1\" orders the stages of a pipeline, and parallel.pp = 1
  --> run.toml:4
  |
4 | schedule = \"zb-h1\"
  |            ^^^^^^^
hint: use schedule = \"1f1b\", or pp = 2 or more
",
    );
}

#[test]
fn stages_cut_by_hand_make_up_the_model() {
    check(
        &format!("{TINY}[parallel]\npp = 2\nstages = [2, 2, 2]\n"),
        "
parallel.stages lists 3 stages, and parallel.pp × parallel.virtual = 2 × 1 are 2
  --> run.toml:5
  |
5 | stages = [2, 2, 2]
  |          ^^^^^^^^^
hint: write [3, 3], or remove parallel.stages
",
    );
    check(
        &format!("{TINY}[parallel]\npp = 2\nschedule = \"zb-v\"\nstages = [1, 1, 2, 1]\n"),
        "
parallel.stages has 5 layers in all, and model.layers = 6
  --> run.toml:6
  |
6 | stages = [1, 1, 2, 1]
  |          ^^^^^^^^^^^^
hint: write [1, 2, 1, 2], or remove parallel.stages
",
    );
    check(
        &format!("{TINY}[parallel]\npp = 2\nstages = [0, 6]\n"),
        "
parallel.stages gives stage 0 no layer, and only the last one can do without
  --> run.toml:5
  |
5 | stages = [0, 6]
  |          ^^^^^^
hint: write [3, 3], or remove parallel.stages
",
    );
    let head_alone = Config::parse(&format!("{TINY}[parallel]\npp = 2\nstages = [6, 0]\n"), "run.toml", &[]);
    assert_eq!(head_alone.map(|config| config.parallel.stages).ok(), Some(vec![6, 0]));
}

#[test]
fn zero_needs_dp_and_keeps_only_what_it_gathers() {
    check(
        &format!("{TINY}[parallel]\nzero = 1\n"),
        "
parallel.zero = 1 shards state over dp ranks, and parallel.dp = 1
  --> run.toml:4
  |
4 | zero = 1
  |        ^
hint: use zero = 0, or dp = 2 or more
",
    );
    check(
        &format!("{TINY}[parallel]\ndp = 2\nzero = 2\nreshard_after_forward = false\n"),
        "
parallel.reshard_after_forward = false keeps gathered parameters, and parallel.zero = 2 gathers none
  --> run.toml:6
  |
6 | reshard_after_forward = false
  |                         ^^^^^
hint: use reshard_after_forward = true, or zero = 3
",
    );
}

#[test]
fn values_out_of_range_and_unknown_schedules_are_refused() {
    check_set(
        TINY,
        &["parallel.zero=4"],
        "
parallel.zero = 4 is out of range
  --> --set parallel.zero=4
hint: give an integer from 0 to 3
",
    );
    check_set(
        TINY,
        &["parallel.pp=0"],
        "
parallel.pp = 0 is out of range
  --> --set parallel.pp=0
hint: give an integer from 1 to 65536, or a string with a decimal suffix (K, M, B or T) such as \"2K\"
",
    );
    check_set(
        TINY,
        &["parallel.schedule=1b1f"],
        &format!(
            "
parallel.schedule = 1b1f is not known
  --> --set parallel.schedule=1b1f
hint: choose one of {}
",
            Schedule::NAMES.map(|name| format!("{name:?}")).join(", ")
        ),
    );
    check_set(
        TINY,
        &["parallel.timeout=1e300"],
        "
parallel.timeout = 1e300 is out of range
  --> --set parallel.timeout=1e300
hint: give a number greater than 0, up to 86400
",
    );
}
