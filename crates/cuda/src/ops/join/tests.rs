//! What is joined of real programs, without a device.

use super::*;
use lockstep_compile::{AdamW, Context, Optimizer, Precision, Recompute, Steps, compile};
use lockstep_config::Config;
use lockstep_ir::{Coordinates, DType, Layout};

const GPT2: &str = "[model]
architecture = \"gpt2\"
vocab_size = 64
layers = 2
dim = 64
heads = 4
ffn = 256
";

fn program(model: &str, recompute: Recompute) -> StepProgram {
    let config = Config::parse(&format!("{model}[data]\npaths = [\".\"]\n"), "run.toml", &[]).unwrap();
    let precision = Precision { compute: DType::BF16, gradients: DType::F32 };
    let context = Context {
        device: super::super::profile("cuda", DType::BF16, DType::F32, false),
        layout: Layout::single(1),
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
        precision,
        recompute,
        steps: Steps::default(),
    };
    let graph = lockstep_model::build(&config.model, 8, 128).unwrap();
    compile(&graph, &context).unwrap().programs.remove(0)
}

/// The groups of a segment that have more than one instruction, each once, as its ops and how often it is there. Every instruction
/// must be in one group.
fn joined(program: &StepProgram, segment: &str, worth: bool) -> Vec<(String, usize)> {
    let here = Coordinates::default();
    let bind = |i| Bound::new(program, i, here).unwrap();
    let bounds: Vec<Vec<Bound>> = program.segments.iter().map(|s| s.instrs.iter().map(bind).collect()).collect();
    let groups = groups(program, &bounds, &|_| Ok(worth)).unwrap();
    let at = program.segments.iter().position(|s| s.name == segment).unwrap();
    let instrs = &program.segments[at].instrs;
    let mut all: Vec<usize> = groups[at].iter().flatten().copied().collect();
    all.sort();
    assert_eq!(all, (0..instrs.len()).collect::<Vec<_>>());
    let mut found: Vec<(String, usize)> = Vec::new();
    for group in groups[at].iter().filter(|g| g.len() > 1) {
        let ops = group.iter().map(|i| instrs[*i].op.name()).collect::<Vec<_>>().join(" ");
        match found.iter_mut().find(|(name, _)| *name == ops) {
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
    let program = program(GPT2, Recompute::None);
    check(joined(&program, "forward", true), &[("linear add_bias", 6), ("linear add_bias gelu", 2)]);
    check(
        joined(&program, "backward", true),
        &[
            ("layer_norm_grad_weight bias_grad layer_norm_grad bias_grad", 1),
            ("linear_grad_input gelu_grad", 2),
            ("layer_norm_grad_weight bias_grad add_layer_norm_grad bias_grad", 3),
            ("layer_norm_grad_weight bias_grad add_layer_norm_grad", 1),
        ],
    );
}

#[test]
fn gradients_of_gelu_and_bias_go_together_where_products_take_neither() {
    let program = program(GPT2, Recompute::None);
    check(joined(&program, "forward", false), &[("linear add_bias", 8)]);
    let backward = joined(&program, "backward", false);
    assert!(backward.contains(&("gelu_grad bias_grad".to_owned(), 2)), "{backward:?}");
    assert!(!backward.iter().any(|(ops, _)| ops.starts_with("linear")), "{backward:?}");
}

#[test]
fn a_recomputed_gelu_has_the_bits_of_the_first() {
    for recompute in [Recompute::Selective, Recompute::Full] {
        let program = program(GPT2, recompute.clone());
        for segment in ["forward", "backward"] {
            let found = joined(&program, segment, true);
            assert!(!found.iter().any(|(ops, _)| ops.ends_with(" gelu")), "{recompute:?}: {found:?}");
        }
    }
    // The input of a GELU may be recomputed without it.
    let program_of = |ops: &[&str]| program(GPT2, Recompute::Ops(ops.iter().map(|op| op.to_string()).collect()));
    let sums = program_of(&["add_bias"]);
    let recomputed =
        |op: Op| sums.segments.iter().flat_map(|s| &s.instrs).any(|i| i.op == op && i.phase != Phase::Forward);
    assert!(recomputed(Op::AddBias) && !recomputed(Op::Gelu));
    check(joined(&sums, "forward", true), &[("linear add_bias", 8)]);
    let others = program_of(&["layer_norm", "add_layer_norm"]);
    check(joined(&others, "forward", true), &[("linear add_bias", 6), ("linear add_bias gelu", 2)]);
    // What was saved is there before the matmul; what is recomputed is not.
    let derivative = |recompute| {
        joined(&program(GPT2, recompute), "backward", true).contains(&("linear_grad_input gelu_grad".into(), 2))
    };
    assert!(derivative(Recompute::Selective));
    assert!(!derivative(Recompute::Full));
}

#[test]
fn a_gelu_in_place_of_what_it_reads_is_left_to_its_kernel() {
    let program = program(GPT2, Recompute::None);
    check(joined(&program, "evaluate", true), &[("linear add_bias", 8)]);
}

#[test]
fn what_is_written_where_a_norms_gradients_have_their_scratch_is_not_joined_with_them() {
    let all = "layer_norm_grad_weight bias_grad add_layer_norm_grad bias_grad";
    let first = |program: &StepProgram| {
        let at = program.segments.iter().position(|s| s.name == "backward").unwrap();
        let ops = |w: &[Instr]| w.iter().map(|i| i.op.name()).collect::<Vec<_>>().join(" ");
        (at, program.segments[at].instrs.windows(4).position(|w| ops(w) == all).unwrap())
    };
    let fewer = "layer_norm_grad_weight bias_grad add_layer_norm_grad";
    // Of the four: which one writes there, and whether those before it are still joined.
    for (writer, still) in [(1, false), (2, false), (3, true)] {
        let mut program = program(GPT2, Recompute::None);
        let (segment, at) = first(&program);
        let before = joined(&program, "backward", false);
        let count = |found: &[(String, usize)], name: &str| found.iter().find(|f| f.0 == name).map_or(0, |f| f.1);
        let scratch = program.segments[segment].instrs[at].workspace.unwrap();
        program.segments[segment].instrs[at + writer].outputs[0].as_mut().unwrap().buffer = scratch;
        let after = joined(&program, "backward", false);
        assert_eq!(count(&after, all), count(&before, all) - 1, "{writer}: {after:?}");
        assert_eq!(count(&after, fewer), count(&before, fewer) + usize::from(still), "{writer}: {after:?}");
    }
}
