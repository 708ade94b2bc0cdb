use super::*;
use lockstep_checkpoint::{open, save};
use lockstep_compile::{AdamW, Context, Offload, Optimizer, Precision, Recompute, Steps, compile_forward};
use lockstep_exec::cpu::{self, CpuExecutor};
use lockstep_ir::{Axis, Dim, Graph, Init, Layout, Section};
use serde_json::json;

const EXPERTS: usize = 3;

/// A stack of experts with gate and up packed, one without sections, and a plain packed matrix.
fn graph() -> Graph {
    let mut g = Graph::new();
    let names = |kinds: &[&str]| -> Vec<String> {
        (0..EXPERTS).flat_map(|e| kinds.iter().map(move |k| format!("experts.{e}.{k}.weight"))).collect()
    };
    let ffn = Section { axis: Axis::Ffn, count: 4, unit: 1 };
    let (stack, embed) = (Dim::new(Axis::Scalar, EXPERTS), Dim::new(Axis::Embed, 5));
    let packed = Dim::packed([ffn, ffn]);
    let init = || Init::Normal { std: 0.02 };
    let mut parameter = |name: &str, dims: Vec<Dim>, parts: Vec<String>| {
        let parameter = Parameter::new(init(), parts);
        g.state(name, TensorType::new(DType::F32, dims), State::Parameter(parameter))
    };
    parameter("gate_up", vec![stack.clone(), packed.clone(), embed.clone()], names(&["gate", "up"]));
    parameter("down", vec![stack, embed.clone(), Dim::new(Axis::Ffn, 4)], names(&["down"]));
    parameter("plain", vec![packed, embed], vec!["gate.weight".into(), "up.weight".into()]);
    g
}

fn executor() -> (Vec<Tensor>, CpuExecutor) {
    let context = Context {
        device: cpu::profile(1, DType::F32, DType::F32),
        layout: Layout::single(1),
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
        precision: Precision::FP32,
        recompute: Recompute::None,
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    };
    let program = compile_forward(&[("nothing", graph())], &context).unwrap();
    (program.tensors.clone(), CpuExecutor::load(program, 1).unwrap())
}

#[test]
fn a_stack_has_names_per_entry_and_section() {
    let graph = graph();
    let found: Vec<(String, Vec<usize>, usize)> = graph
        .parameters()
        .flat_map(|(_, value, parameter)| parts(parameter, &value.ty))
        .map(|p| (p.name, p.shape, p.start))
        .collect();
    let part = |name: &str, shape: [usize; 2], start| (name.to_owned(), shape.to_vec(), start);
    assert_eq!(
        found,
        [
            part("experts.0.gate.weight", [4, 5], 0),
            part("experts.0.up.weight", [4, 5], 20),
            part("experts.1.gate.weight", [4, 5], 40),
            part("experts.1.up.weight", [4, 5], 60),
            part("experts.2.gate.weight", [4, 5], 80),
            part("experts.2.up.weight", [4, 5], 100),
            part("experts.0.down.weight", [5, 4], 0),
            part("experts.1.down.weight", [5, 4], 20),
            part("experts.2.down.weight", [5, 4], 40),
            part("gate.weight", [4, 5], 0),
            part("up.weight", [4, 5], 20),
        ]
    );
}

#[test]
fn a_stack_goes_through_a_checkpoint_under_the_names_of_its_entries() {
    let dir = tempfile::tempdir().unwrap();
    let (tensors, mut first) = executor();
    load(&tensors, &mut first, Weights::Initial, 7).unwrap();
    let path = save(dir.path(), 1, &groups(&tensors, &first), &json!({}), 1, &mut |_, _| ()).unwrap();
    let loaded = open(&path).unwrap();
    assert_eq!(loaded.tensor(MODEL, "experts.2.up.weight").unwrap().shape, [4, 5]);
    let (_, mut second) = executor();
    restore(&tensors, &mut second, &loaded).unwrap();
    for tensor in &tensors {
        assert_eq!(first.read(&tensor.name, 0).unwrap(), second.read(&tensor.name, 0).unwrap(), "{}", tensor.name);
    }
    // An expert starts as it would alone: by its own name.
    let mut alone = vec![0.0f32; 20];
    Init::Normal { std: 0.02 }.fill(7, "experts.1.up.weight", 5, &mut alone);
    let stack = first.read("gate_up", 0).unwrap();
    let values: Vec<f32> = stack.as_chunks().0[60..80].iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(values, alone);
}
