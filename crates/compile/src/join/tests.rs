use crate::passes::tests::small_model;
use crate::{compile, fusable_matmuls};
use lockstep_ir::graph::{Loss, Parameter, State};
use lockstep_ir::program::Segment;
use lockstep_ir::verify;
use lockstep_ir::{Axis, DType, Dim, Fusion, Graph, Init, Op, StepProgram, TensorType, ValueId, Workspace};

/// An MLP with biases and GELU after a norm, and a head, for a device that fuses these.
fn program(fusions: &[Fusion], faster: bool) -> StepProgram {
    offloading(fusions, faster, 0)
}

/// The same with this many bytes of activations in the host's memory, which wait there for all backward passes.
fn offloading(fusions: &[Fusion], faster: bool, activations: u64) -> StepProgram {
    let (_, mut context) = small_model();
    context.layout.schedule = "gpipe".parse().unwrap();
    context.offload.activations = activations;
    let mut g = Graph::new();
    let (vocab, embed, ffn) = (Dim::new(Axis::Vocab, 8), Dim::new(Axis::Embed, 4), Dim::new(Axis::Ffn, 16));
    let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 4)]);
    let (tokens, targets) = (g.input("tokens", ids.clone()), g.input("targets", ids));
    let mut parameter = |name: &str, dims: &[&Dim]| {
        let parameter = Parameter::new(Init::Ones, vec![name.to_owned()]);
        let dims: Vec<Dim> = dims.iter().map(|d| (*d).clone()).collect();
        g.state(name, TensorType::new(DType::F32, dims), State::Parameter(parameter))
    };
    let (table, norm, norm_bias) =
        (parameter("table", &[&vocab, &embed]), parameter("norm", &[&embed]), parameter("norm_bias", &[&embed]));
    let (up, up_bias) = (parameter("up", &[&ffn, &embed]), parameter("up_bias", &[&ffn]));
    let (down, down_bias) = (parameter("down", &[&embed, &ffn]), parameter("down_bias", &[&embed]));
    let mut op = |op, inputs: &[ValueId], name| g.op(op, inputs, name).unwrap()[0];
    let x = op(Op::Embedding, &[tokens, table], "x");
    let normed = op(Op::layer_norm(1e-5), &[x, norm, norm_bias], "normed");
    let h = op(Op::Linear, &[normed, up], "h");
    let h = op(Op::AddBias, &[h, up_bias], "h.biased");
    let a = op(Op::Gelu, &[h], "a");
    let y = op(Op::Linear, &[a, down], "y");
    let y = op(Op::AddBias, &[y, down_bias], "y.biased");
    let logits = op(Op::Linear, &[y, table], "logits");
    let loss = op(Op::CrossEntropy, &[logits, targets], "loss");
    g.outputs.push(loss);
    g.losses.push(Loss { value: loss, weight: 1.0 });
    let scratch = || Workspace { fixed: 256, terms: Vec::new() };
    context.device.workspaces =
        ["linear", "linear_grad_input", "layer_norm_grad_weight", "bias_grad"].map(|op| (op, scratch())).into();
    context.device.fusions = fusions.to_vec();
    let mut programs = compile(&g, &context).unwrap().programs;
    if faster {
        context.device.faster = fusable_matmuls(&programs);
        programs = compile(&g, &context).unwrap().programs;
    }
    programs.remove(0)
}

fn segment<'a>(program: &'a StepProgram, name: &str) -> &'a Segment {
    program.segments.iter().find(|s| s.name == name).unwrap()
}

/// The instructions of a segment by their ops, groups in brackets.
fn shown(program: &StepProgram, name: &str) -> String {
    let segment = segment(program, name);
    let op = |i: usize| {
        let name = segment.instrs[i].op.name();
        match segment.group_of(i).map(|g| (g.instrs.start == i, g.instrs.end == i + 1)) {
            Some((true, _)) => format!("({name}"),
            Some((_, true)) => format!("{name})"),
            _ => name.to_owned(),
        }
    };
    (0..segment.instrs.len()).map(op).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_device_that_fuses_nothing_gets_the_program_as_it_is() {
    let program = program(&[], true);
    assert!(program.segments.iter().all(|s| s.groups.is_empty()));
    assert_eq!(
        shown(&program, "backward"),
        "bias_grad linear_grad_input linear_grad_weight gelu_grad bias_grad linear_grad_input linear_grad_weight \
         layer_norm_grad_weight bias_grad layer_norm_grad embedding_grad"
    );
}

#[test]
fn what_is_done_as_one_stands_side_by_side() {
    let program = program(&Fusion::ALL, true);
    assert_eq!(
        shown(&program, "forward"),
        "embedding layer_norm (linear add_bias gelu) (linear add_bias) linear_cross_entropy"
    );
    // The gradient of the GELU followed that of the weight.
    assert_eq!(
        shown(&program, "backward"),
        "bias_grad (linear_grad_input gelu_grad) linear_grad_weight bias_grad linear_grad_input linear_grad_weight \
         (layer_norm_grad_weight bias_grad layer_norm_grad) embedding_grad"
    );
    let printed = program.to_string();
    assert!(printed.contains(" as one with the next 2 (matmul + bias + GELU)"), "{printed}");
}

#[test]
fn a_matmul_that_is_not_faster_with_gelu_leaves_it_to_a_kernel() {
    let program = program(&Fusion::ALL, false);
    assert_eq!(
        shown(&program, "forward"),
        "embedding layer_norm (linear add_bias) gelu (linear add_bias) linear_cross_entropy"
    );
    assert_eq!(
        shown(&program, "backward"),
        "bias_grad linear_grad_input linear_grad_weight (gelu_grad bias_grad) linear_grad_input linear_grad_weight \
         (layer_norm_grad_weight bias_grad layer_norm_grad) embedding_grad"
    );
}

#[test]
fn a_group_is_one_moment_for_memory() {
    let program = program(&Fusion::ALL, true);
    let segment = segment(&program, "backward");
    let group = segment.groups.iter().find(|g| g.fusion == Fusion::NormGradients).unwrap();
    // The scratch of the first is in use until the last is done, and that of the last from the first on.
    for i in group.instrs.clone() {
        assert_eq!(segment.in_use(i), group.instrs.start..=group.instrs.end - 1);
    }
    assert_eq!(fusable_matmuls(std::slice::from_ref(&program)).len(), 2);
}

#[test]
fn copies_of_activations_stand_between_no_instructions_that_are_done_as_one() {
    for faster in [false, true] {
        let (stays, goes) = (program(&Fusion::ALL, faster), offloading(&Fusion::ALL, faster, u64::MAX));
        verify::program(&goes, 64).unwrap();
        for name in ["forward", "backward"] {
            let copies = |op: &&str| ["offload", "fetch"].contains(op);
            let shown_of_goes = shown(&goes, name);
            let (copied, rest): (Vec<&str>, Vec<&str>) = shown_of_goes.split(' ').partition(copies);
            assert_eq!((copied.len() > 3, rest.join(" ")), (true, shown(&stays, name)), "{shown_of_goes}");
        }
        // The first of a group waits for all that the group reads.
        let backward = segment(&goes, "backward");
        let late =
            |g: &lockstep_ir::FusedGroup| backward.instrs[g.instrs.clone()][1..].iter().any(|i| !i.waits.is_empty());
        assert!(!backward.groups.iter().any(late) && !backward.groups.is_empty());
        assert_eq!(fusable_matmuls(&[goes]), fusable_matmuls(&[stays]));
    }
}
