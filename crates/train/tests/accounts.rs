//! What ranks communicate and hold, against what is known from the literature.

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::account::{self, Communication};
use lockstep_ir::blocks::attention_blocks;
use lockstep_ir::graph::State;
use lockstep_ir::program::{Lifetime, Role};
use lockstep_ir::{Axes, Layout, StepProgram};
use lockstep_plan::{Plan, plan};

const MICRO_BATCHES: u64 = 4;

fn config(layers: usize, dim: usize, keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = {layers}\ndim = {dim}\nheads = 8\nkv_heads = 4\nffn = {}\n\
         [train]\nseq = 16\nglobal_batch = 64\nmicro_batch = 1\nthreads = 1\n{keys}\n",
        2 * dim
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

fn planned(config: &Config, layout: &str) -> Plan {
    let layout: Layout = layout.parse().unwrap();
    let mut config = config.at(&layout);
    config.train.global_batch = layout.mesh.size(Axes::SEQUENCES) * MICRO_BATCHES as usize;
    plan(&Devices::new(), &config).unwrap()
}

/// Calls and bytes of an op in one more layer, in a step: the difference between two depths.
fn per_layer(layout: &str, dim: usize, segments: &[&str], op: &str, axis: &str) -> (u64, u64) {
    let total = |layers: usize| {
        let plan = planned(&config(layers, dim, ""), layout);
        let program = plan.program();
        let all = account::communication(program, program.entry(StepProgram::TRAIN).unwrap());
        let mine = |e: &&Communication| segments.contains(&e.segment) && (e.op, e.axis.as_str()) == (op, axis);
        all.iter().filter(mine).fold((0, 0), |(calls, bytes), e| (calls + e.calls, bytes + e.bytes))
    };
    let ((calls, bytes), (fewer, less)) = (total(3), total(2));
    (calls - fewer, bytes - less)
}

const BACKWARD: [&str; 2] = ["backward", "backward_last"];
/// Bytes of the residual stream of a micro-batch: 1 sequence of 16 positions of 64 f32.
const RESIDUAL: u64 = 16 * 64 * 4;
/// Bytes of a layer's parameters at dim 128: two norms, 16 heads of 16 in Q, K and V, the output projection, ffn 256.
const LAYER: u64 = (2 * 128 + 16 * 16 * 128 + 128 * 128 + 3 * 256 * 128) * 4;

#[test]
fn tensor_parallel_layers_sum_twice_in_each_direction() {
    let m = MICRO_BATCHES;
    assert_eq!(per_layer("tp=2", 64, &["forward"], "all_reduce", "tp"), (2 * m, 2 * m * RESIDUAL));
    assert_eq!(per_layer("tp=2", 64, &BACKWARD, "all_reduce", "tp"), (2 * m, 2 * m * RESIDUAL));
    for op in ["all_gather", "reduce_scatter"] {
        assert_eq!(per_layer("tp=2", 64, &["forward", "backward"], op, "tp"), (0, 0), "{op}");
    }
}

/// Bytes that a rank sends for one more layer, in a micro-batch, by op: the difference between two depths.
fn sent_per_layer(layout: &str, keys: &str, segments: &[&str], op: &str) -> u64 {
    let total = |layers: usize| {
        let plan = planned(&config(layers, 64, keys), layout);
        let program = plan.program();
        let all = account::communication(program, program.entry(StepProgram::TRAIN).unwrap());
        let mine = |e: &&Communication| segments.contains(&e.segment) && (e.op, e.axis.as_str()) == (op, "cp");
        all.iter().filter(mine).map(|e| e.sent_bytes).sum::<u64>()
    };
    (total(3) - total(2)) / MICRO_BATCHES
}

#[test]
fn context_parallel_layers_pass_keys_and_values_on_and_their_gradients_back() {
    // 16 positions, 4 key heads of 8.
    let (seq, kv_dim) = (16, 4 * 8);
    for (keys, bytes) in [("", 4), ("[precision]\npolicy = \"bf16\"", 2)] {
        for cp in [2, 4, 8] {
            let elements = 2 * (cp - 1) * seq / cp * kv_dim;
            let ring = |segments| sent_per_layer(&format!("cp={cp}"), keys, segments, "shift");
            assert_eq!(ring(&["forward"]), elements * bytes, "forward, cp={cp}");
            // Keys and values again, and their gradients in f32.
            assert_eq!(ring(&BACKWARD), elements * bytes + elements * 4, "backward, cp={cp}");
            let layout = format!("cp={cp},context=gather");
            let gathered = |segments, op| sent_per_layer(&layout, keys, segments, op);
            assert_eq!(gathered(&["forward"], "all_gather"), elements * bytes, "forward, {layout}");
            assert_eq!(gathered(&BACKWARD, "all_gather"), elements * bytes, "backward, {layout}");
            assert_eq!(gathered(&BACKWARD, "reduce_scatter"), elements * 4, "backward, {layout}");
        }
    }
}

#[test]
fn ulysses_sends_heads_there_and_back_in_either_direction() {
    // 16 positions, 8 query heads and 4 key heads of 8.
    let (seq, q_dim, kv_dim) = (16, 8 * 8, 4 * 8);
    for (keys, bytes) in [("", 4), ("[precision]\npolicy = \"bf16\"", 2)] {
        for cp in [2, 4] {
            let elements = 2 * (q_dim + kv_dim) * seq / cp * (cp - 1) / cp;
            let layout = format!("cp={cp},context=a2a");
            let sent = |segments, op| sent_per_layer(&layout, keys, segments, op);
            assert_eq!(sent(&["forward"], "all_to_all"), elements * bytes, "forward, {layout}");
            assert_eq!(sent(&BACKWARD, "all_to_all"), elements * bytes, "backward, {layout}");
            for op in ["shift", "all_gather", "reduce_scatter"] {
                assert_eq!(sent(&["forward", "backward", "backward_last"], op), 0, "{op}, {layout}");
            }
        }
    }
    // Recomputed with what forward has sent, or from the residual stream on: then it is sent again.
    let elements = |parts: u64| 2 * parts * (q_dim + kv_dim) * seq / 4;
    for (policy, again) in [("selective", elements(1)), ("full", elements(2))] {
        let keys = format!("[recompute]\npolicy = \"{policy}\"");
        let sent = sent_per_layer("cp=2,context=a2a", &keys, &BACKWARD, "all_to_all");
        assert_eq!(sent, again * 4, "{policy}");
    }
}

#[test]
fn context_parallel_ranks_share_activations_work_and_blocks_of_attention() {
    let mut config = config(4, 64, "");
    config.train.seq = 1024;
    let one = planned(&config, "dp=1");
    let flops = |plan: &Plan| {
        let program = plan.program();
        account::flops(program, program.entry(StepProgram::TRAIN).unwrap()).unwrap()
    };
    let saved = |plan: &Plan| {
        let saved = |r: &&lockstep_ir::program::Region| matches!(r.lifetime, Lifetime::Saved(_));
        plan.program().regions.iter().filter(saved).map(|r| r.bytes()).sum::<u64>()
    };
    for cp in [2u64, 4] {
        for context in ["ring", "gather"] {
            let plan = planned(&config, &format!("cp={cp},context={context}"));
            assert_eq!(saved(&plan) * cp, saved(&one), "cp={cp}, {context}");
            let (part, whole) = (flops(&plan), flops(&one));
            let n = u128::from(cp);
            assert_eq!((part.model * n, part.causal * n), (whole.model, whole.causal), "cp={cp}, {context}");
            assert_eq!(part.hardware * n, whole.hardware, "cp={cp}, {context}");
            let program = plan.program();
            let blocks = attention_blocks(program, program.entry(StepProgram::TRAIN).unwrap());
            assert_eq!(blocks.len(), cp as usize);
            assert!(blocks[0] > 0 && blocks.iter().all(|n| *n == blocks[0]), "cp={cp}, {context}: {blocks:?}");
        }
    }
    for cp in [2u64, 4] {
        let plan = planned(&config, &format!("cp={cp},context=a2a"));
        // The output of attention as ranks have its heads, besides, as they have its positions.
        assert_eq!(saved(&plan) * cp, saved(&one) + 4 * 1024 * 64 * 4, "cp={cp}");
        let (part, whole, n) = (flops(&plan), flops(&one), u128::from(cp));
        assert_eq!((part.model * n, part.causal * n), (whole.model, whole.causal), "cp={cp}");
        assert_eq!(part.hardware * n, whole.hardware, "cp={cp}");
        let program = plan.program();
        assert!(attention_blocks(program, program.entry(StepProgram::TRAIN).unwrap()).is_empty());
    }
    let program = one.program();
    assert!(attention_blocks(program, program.entry(StepProgram::TRAIN).unwrap()).is_empty());
}

#[test]
fn sequence_parallel_layers_gather_and_scatter_and_backward_gathers_again() {
    let m = MICRO_BATCHES;
    assert_eq!(per_layer("tp=2,sp", 64, &["forward"], "all_gather", "tp"), (2 * m, 2 * m * RESIDUAL));
    assert_eq!(per_layer("tp=2,sp", 64, &["forward"], "reduce_scatter", "tp"), (2 * m, 2 * m * RESIDUAL));
    assert_eq!(per_layer("tp=2,sp", 64, &BACKWARD, "all_gather", "tp"), (4 * m, 4 * m * RESIDUAL));
    assert_eq!(per_layer("tp=2,sp", 64, &BACKWARD, "reduce_scatter", "tp"), (2 * m, 2 * m * RESIDUAL));
    assert_eq!(per_layer("tp=2,sp", 64, &["forward", "backward"], "all_reduce", "tp"), (0, 0));
    // Once per step: the gradients of the two norms, which each rank has of its own positions.
    assert_eq!(per_layer("tp=2,sp", 64, &["backward_last"], "all_reduce", "tp"), (1, 2 * 64 * 4));
}

#[test]
fn gradients_travel_once_per_step_at_levels_0_and_1_and_once_per_micro_batch_above() {
    let m = MICRO_BATCHES;
    let all = ["forward", "backward", "backward_last", "update"];
    let of = |layout: &str, op: &str| per_layer(layout, 128, &all, op, "dp");
    assert_eq!((of("dp=2", "all_reduce"), of("dp=2", "reduce_scatter")), ((1, LAYER), (0, 0)));
    assert_eq!((of("dp=2,zero=1", "reduce_scatter"), of("dp=2,zero=1", "all_gather")), ((1, LAYER), (1, LAYER)));
    assert_eq!((of("dp=2,zero=2", "reduce_scatter"), of("dp=2,zero=2", "all_gather")), ((m, m * LAYER), (1, LAYER)));
    assert_eq!(of("dp=2,zero=3", "reduce_scatter"), (m, m * LAYER));
    assert_eq!(per_layer("dp=2,zero=3", 128, &["forward"], "all_gather", "dp"), (m, m * LAYER));
    assert_eq!(per_layer("dp=2,zero=3", 128, &["backward"], "all_gather", "dp"), (m, m * LAYER));
    assert_eq!(per_layer("dp=2,zero=3", 128, &["update"], "all_gather", "dp"), (0, 0));
    for layout in ["dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"] {
        assert_eq!(of(layout, "all_reduce"), (0, 0), "{layout}");
    }
}

#[test]
fn parameters_that_stay_gathered_travel_once_and_take_their_memory() {
    let m = MICRO_BATCHES;
    let all = ["forward", "backward"];
    assert_eq!(per_layer("dp=2,zero=3,no-reshard", 128, &all, "all_gather", "dp"), (m, m * LAYER));
    let bytes = |layers: usize, layout: &str| planned(&config(layers, 128, ""), layout).memory.total_bytes;
    let per_layer = |layout: &str| bytes(3, layout) - bytes(2, layout);
    assert_eq!(per_layer("dp=2,zero=3,no-reshard"), per_layer("dp=2,zero=3") + LAYER);
}

#[test]
fn stages_gather_and_scatter_their_own_layers_for_every_micro_batch() {
    let m = MICRO_BATCHES;
    for schedule in ["1f1b", "gpipe"] {
        let plan = planned(&config(4, 128, ""), &format!("dp=2,zero=3,pp=2,{schedule}"));
        for (stage, program) in plan.compiled.programs.iter().enumerate() {
            let all = account::communication(program, program.entry(StepProgram::TRAIN).unwrap());
            let of = |op: &str, segment: &str| {
                let mine = all.iter().filter(|e| e.op == op && e.axis == "dp" && e.segment.starts_with(segment));
                mine.fold((0, 0), |(calls, bytes), e| (calls + e.calls, bytes + e.bytes))
            };
            // Two layers; the embedding on the first stage, norm and head on the last, whose gradients are made in forward.
            let (table, norm) = (256 * 128 * 4, 128 * 4);
            let (forward, backward) = if stage == 0 { (table, (0, 0)) } else { (table + norm, (1, norm)) };
            assert_eq!(of("all_gather", "forward"), (3 * m, m * (2 * LAYER + forward)), "stage {stage}");
            assert_eq!(
                of("all_gather", "backward"),
                ((2 + backward.0) * m, m * (2 * LAYER + backward.1)),
                "stage {stage}"
            );
            let scattered = of("reduce_scatter", "").1;
            assert_eq!(scattered, m * (2 * LAYER + forward), "stage {stage}");
            assert_eq!(of("all_gather", "update"), (0, 0));
        }
    }
}

#[test]
fn replicas_reduce_shards_once_per_step() {
    let of = |layout: &str, op: &str, axis: &str| per_layer(layout, 128, &["backward", "backward_last"], op, axis);
    let m = MICRO_BATCHES;
    assert_eq!(of("dp_replicate=2,dp=2", "all_reduce", "dp_replicate×dp"), (1, LAYER));
    for (zero, times) in [(1, 1), (2, m), (3, m)] {
        let layout = format!("dp_replicate=2,dp=2,zero={zero}");
        assert_eq!(of(&layout, "reduce_scatter", "dp"), (times, times * LAYER), "{layout}");
        assert_eq!(of(&layout, "all_reduce", "dp_replicate"), (1, LAYER / 2), "{layout}");
    }
}

#[test]
fn stages_send_the_residual_stream_and_its_gradient() {
    let plan = planned(&config(4, 64, ""), "pp=2");
    let calls = |stage: usize, op: &str| {
        let program = &plan.compiled.programs[stage];
        let all = account::communication(program, program.entry(StepProgram::TRAIN).unwrap());
        all.iter().filter(|e| e.op == op).fold((0, 0), |(c, b), e| (c + e.calls, b + e.bytes))
    };
    let m = MICRO_BATCHES;
    for stage in 0..2 {
        assert_eq!(calls(stage, "send"), (m, m * RESIDUAL), "stage {stage}");
        assert_eq!(calls(stage, "receive"), (m, m * RESIDUAL), "stage {stage}");
    }
}

/// Bytes of parameters, gradients and optimizer state on a rank.
fn state_bytes(plan: &Plan) -> u64 {
    let program = plan.program();
    let kept = |role: &Role| {
        matches!(
            role,
            Role::State(State::Parameter(_) | State::Gradient { .. } | State::Moment { .. } | State::Master { .. })
        )
    };
    program.tensors.iter().filter(|t| kept(&t.role)).map(|t| program.buffers[t.buffer.0].bytes).sum()
}

#[test]
fn sharded_state_falls_as_the_zero_paper_says_to_the_byte() {
    let keys = "[precision]\npolicy = \"bf16\"\ngradients = \"bf16\"";
    for n in [2u64, 4] {
        // Every tensor divides into n ranges of whole blocks: no padding.
        let even = config(2, 64 * n as usize, keys);
        let at = |zero: u8| {
            planned(&even, &format!("dp={n}{}", if zero > 0 { format!(",zero={zero}") } else { String::new() }))
        };
        let p = at(0).parameters;
        assert_eq!(state_bytes(&at(0)), 16 * p);
        assert_eq!(state_bytes(&at(1)), 4 * p + 12 * p / n);
        assert_eq!(state_bytes(&at(2)), 2 * p + 14 * p / n);
        assert_eq!(state_bytes(&at(3)), 16 * p / n);
        assert!((0..4).all(|zero| account::padding(at(zero).program()) == 0));
    }
    // Where tensors do not divide, what is more is padding, and it is named.
    let odd = config(2, 80, keys);
    let p = planned(&odd, "dp=4").parameters;
    for (zero, exact) in [(1, 4 * 4 * p + 12 * p), (2, 4 * 2 * p + 14 * p), (3, 16 * p)] {
        let plan = planned(&odd, &format!("dp=4,zero={zero}"));
        let padding = account::padding(plan.program());
        assert!(padding > 0);
        assert_eq!(4 * state_bytes(&plan), exact + padding, "level {zero}");
    }
}

#[test]
fn fp32_gradients_cost_18_bytes_per_parameter_and_full_fp32_16() {
    let bytes = |keys: &str| {
        let plan = planned(&config(2, 64, keys), "dp=1");
        (state_bytes(&plan), plan.parameters)
    };
    let (mixed, p) = bytes("[precision]\npolicy = \"bf16\"");
    assert_eq!(mixed, 18 * p);
    assert_eq!(bytes("").0, 16 * p);
}
