//! What real programs for this device have as groups, without a device.

use lockstep_compile::{
    AdamW, Context, Offload, Optimizer, Precision, Recompute, Steps, compile, compile_forward, fusable_matmuls,
};
use lockstep_config::Config;
use lockstep_ir::graph::Phase;
use lockstep_ir::program::{Instr, Segment};
use lockstep_ir::{DType, DeviceProfile, Fusion, Layout, Op, StepProgram, verify};
use lockstep_model::{CacheShape, Form};

const GPT2: &str = "[model]
architecture = \"gpt2\"
vocab_size = 64
layers = 2
dim = 64
heads = 4
ffn = 256
";

const LLAMA: &str = "[model]
vocab_size = 64
layers = 2
dim = 64
heads = 4
kv_heads = 2
ffn = 256
";

/// A program for this device; `faster` says what a device has measured of all matmuls that could fuse GELU.
fn program(model: &str, recompute: Recompute, faster: bool) -> StepProgram {
    let fusions = super::super::profile("cuda", DType::BF16, DType::F32, false).fusions;
    program_of(model, (8, 128), recompute, fusions, faster)
}

fn program_of(
    model: &str,
    (batch, seq): (usize, usize),
    recompute: Recompute,
    fusions: Vec<Fusion>,
    faster: bool,
) -> StepProgram {
    let config = Config::parse(&format!("{model}[data]\npaths = [\".\"]\n"), "run.toml", &[]).unwrap();
    let mut context = context_of(recompute, fusions);
    let graph = lockstep_model::build(&config.model, batch, seq).unwrap();
    let plain = compile(&graph, &context).unwrap().programs;
    if !faster {
        return plain.into_iter().next().unwrap();
    }
    context.device.faster = fusable_matmuls(&plain);
    compile(&graph, &context).unwrap().programs.remove(0)
}

fn context_of(recompute: Recompute, fusions: Vec<Fusion>) -> Context {
    Context {
        device: DeviceProfile { fusions, ..super::super::profile("cuda", DType::BF16, DType::F32, false) },
        layout: Layout::single(1),
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
        precision: Precision::of(DType::BF16, DType::F32),
        recompute,
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    }
}

fn segment<'a>(program: &'a StepProgram, name: &str) -> &'a Segment {
    program.segments.iter().find(|s| s.name == name).unwrap()
}

/// The groups of a segment as their ops, each once, and how often it is there.
fn groups(program: &StepProgram, name: &str) -> Vec<(String, usize)> {
    let segment = segment(program, name);
    let mut found: Vec<(String, usize)> = Vec::new();
    for group in &segment.groups {
        let ops: Vec<&str> = segment.instrs[group.instrs.clone()].iter().map(|i| i.op.name()).collect();
        let ops = ops.join(" ");
        match found.iter_mut().find(|(known, _)| *known == ops) {
            Some((_, count)) => *count += 1,
            None => found.push((ops, 1)),
        }
    }
    found
}

fn check(found: Vec<(String, usize)>, expected: &[(&str, usize)]) {
    let found: Vec<(&str, usize)> = found.iter().map(|(name, count)| (name.as_str(), *count)).collect();
    assert_eq!(found, expected);
}

#[test]
fn matmuls_fuse_gelu_and_its_derivative_where_that_is_faster() {
    let program = program(GPT2, Recompute::None, true);
    check(groups(&program, "forward"), &[("linear add_bias", 6), ("linear add_bias gelu", 2)]);
    check(
        groups(&program, "backward"),
        &[
            ("layer_norm_grad_weight bias_grad layer_norm_grad bias_grad", 1),
            ("linear_grad_input gelu_grad", 2),
            ("layer_norm_grad_weight bias_grad add_layer_norm_grad bias_grad", 3),
            ("layer_norm_grad_weight bias_grad add_layer_norm_grad", 1),
        ],
    );
    let is_update = |i: &&Instr| matches!(i.op, Op::AdamW { .. });
    let updates = segment(&program, "update").instrs.iter().filter(is_update).count();
    check(groups(&program, "update"), &[(&vec!["adamw"; updates].join(" "), 1)]);
}

#[test]
fn gradients_of_gelu_and_bias_go_together_where_matmuls_take_neither() {
    let program = program(GPT2, Recompute::None, false);
    check(groups(&program, "forward"), &[("linear add_bias", 8)]);
    check(
        groups(&program, "backward"),
        &[
            ("layer_norm_grad_weight bias_grad layer_norm_grad bias_grad", 1),
            ("gelu_grad bias_grad", 2),
            ("layer_norm_grad_weight bias_grad add_layer_norm_grad bias_grad", 3),
            ("layer_norm_grad_weight bias_grad add_layer_norm_grad", 1),
        ],
    );
}

#[test]
fn a_llama_has_the_gradients_of_its_norms_and_its_updates_together() {
    let program = program(LLAMA, Recompute::None, true);
    check(groups(&program, "forward"), &[]);
    check(
        groups(&program, "backward"),
        &[("rms_norm_grad_weight rms_norm_grad", 1), ("rms_norm_grad_weight add_rms_norm_grad", 4)],
    );
    assert_eq!(segment(&program, "update").groups.len(), 1);
}

/// The groups of a step of decoding.
fn decoding(model: &str, texts: usize, apart: bool) -> Vec<(String, usize)> {
    let config = Config::parse(&format!("{model}[data]\npaths = [\".\"]\n"), "run.toml", &[]).unwrap();
    let cache = CacheShape { slots: texts, blocks: 1, page: 96, pages: texts, window_pages: 1, apart };
    let form = Form::NextToken { batch: texts, positions: 1, cache, known: 64 };
    let graph = lockstep_model::build_form(&config.model, form).unwrap();
    let context = context_of(Recompute::None, Fusion::ALL.to_vec());
    groups(&compile_forward(&[("decode", graph)], &context).unwrap(), "decode")
}

#[test]
fn a_step_of_decoding_is_five_kernels_a_layer() {
    let one = [
        ("rms_norm linear", 1),
        ("rope_at cached_attention", 2),
        ("add_rms_norm linear swiglu", 2),
        ("add_rms_norm linear", 2),
    ];
    check(decoding(LLAMA, 1, true), &one);
    // A norm of many rows is a kernel of its own; rows of one text see what others write.
    check(decoding(LLAMA, 8, true), &[("rope_at cached_attention", 2), ("linear swiglu", 2)]);
    check(decoding(LLAMA, 8, false), &[("linear swiglu", 2)]);
    check(decoding(LLAMA, 64, true), &[]);
    // Layer norms and GELU stay apart.
    check(decoding(GPT2, 1, true), &[("linear add_bias", 8)]);
}

#[test]
fn a_recomputed_gelu_has_the_bits_of_the_first() {
    for recompute in [Recompute::Selective, Recompute::Full] {
        let program = program(GPT2, recompute.clone(), true);
        for segment in ["forward", "backward"] {
            let found = groups(&program, segment);
            assert!(!found.iter().any(|(ops, _)| ops.ends_with(" gelu")), "{recompute:?}: {found:?}");
        }
    }
    // The input of a GELU may be recomputed without it.
    let program_of = |ops: &[&str]| program(GPT2, Recompute::Ops(ops.iter().map(|op| op.to_string()).collect()), true);
    let sums = program_of(&["add_bias"]);
    let recomputed =
        |op: Op| sums.segments.iter().flat_map(|s| &s.instrs).any(|i| i.op == op && i.phase != Phase::Forward);
    assert!(recomputed(Op::AddBias) && !recomputed(Op::Gelu));
    check(groups(&sums, "forward"), &[("linear add_bias", 8)]);
    let others = program_of(&["layer_norm", "add_layer_norm"]);
    check(groups(&others, "forward"), &[("linear add_bias", 6), ("linear add_bias gelu", 2)]);
    // What was saved is there before the matmul; what is recomputed is not.
    let derivative = |recompute| {
        groups(&program(GPT2, recompute, true), "backward").contains(&("linear_grad_input gelu_grad".into(), 2))
    };
    assert!(derivative(Recompute::Selective));
    assert!(!derivative(Recompute::Full));
}

#[test]
fn a_gelu_in_place_of_what_it_reads_is_left_to_its_kernel() {
    let program = program(GPT2, Recompute::None, true);
    check(groups(&program, "evaluate"), &[("linear add_bias", 8)]);
}

#[test]
fn groups_that_are_not_one_moment_or_not_of_their_kind_are_refused() {
    let sound = program(GPT2, Recompute::None, true);
    let at = sound.segments.iter().position(|s| s.name == "backward").unwrap();
    let refused = |change: &dyn Fn(&mut StepProgram)| {
        let mut program = sound.clone();
        change(&mut program);
        verify::program(&program, crate::driver::ALIGNMENT).unwrap_err().to_string()
    };
    // Two of the group have their scratch in one place.
    let shared = refused(&|program| {
        let segment = &program.segments[at];
        let first = segment.groups[0].instrs.start;
        let [a, b] = [first, first + 1].map(|i| segment.instrs[i].workspace.unwrap());
        program.buffers[a.0].offset = program.buffers[b.0].offset;
    });
    assert!(shared.contains("share memory"), "{shared}");
    let longer = refused(&|program| program.segments[at].groups[0].instrs.end += 1);
    assert!(longer.contains("has other ops"), "{longer}");
    let twice = refused(&|program| {
        let first = program.segments[at].groups[0].clone();
        program.segments[at].groups.insert(1, first);
    });
    assert!(twice.contains("stands where another group does"), "{twice}");
}

#[test]
fn groups_take_no_more_memory() {
    for (preset, batch, seq) in [("llama-3.2-1b", 8, 4096), ("llama-124m", 64, 1024), ("gpt2-xl", 16, 1024)] {
        let model = format!("[model]\npreset = \"{preset}\"\n");
        let arena = |fusions: &[Fusion], faster| {
            program_of(&model, (batch, seq), Recompute::None, fusions.to_vec(), faster).arena_bytes
        };
        let apart = arena(&[], false);
        for faster in [false, true] {
            let fused = arena(&Fusion::ALL, faster);
            assert!(fused <= apart, "{preset}: {fused} bytes, {apart} without groups");
        }
    }
}
