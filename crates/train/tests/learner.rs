//! What a book on parallel training begins with.

use lockstep_compile::{AdamW, Context, Offload, Optimizer, Precision, Recompute, Steps, compile_forward};
use lockstep_exec::{Executor, ThreadWorld, cpu};
use lockstep_ir::account;
use lockstep_ir::graph::{Parameter, State};
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Layout, Op, TensorType};
use std::time::Duration;

/// (1 2)·A·B with A = B = [[1,2],[3,4]]: A split by columns, B by rows, so that one sum at the end is enough.
#[test]
fn a_column_split_and_a_row_split_need_one_all_reduce() {
    let mut g = Graph::new();
    let (embed, hidden) = (Dim::new(Axis::Embed, 2), Dim::new(Axis::Ffn, 2));
    let row = |dim: &Dim| TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 1), dim.clone()]);
    let x = g.input("x", row(&embed));
    let mut matrix = |name: &str, rows: &Dim, columns: &Dim| {
        let parameter = Parameter { decay: false, ..Parameter::new(Init::Ones, vec![name.to_owned()]) };
        let ty = TensorType::new(DType::F32, [rows.clone(), columns.clone()]);
        g.state(name, ty, State::Parameter(parameter))
    };
    // Weights are stored as [outputs, inputs].
    let a = matrix("a", &hidden, &embed);
    let b = matrix("b", &embed, &hidden);
    let y = g.op(Op::Linear, &[x, a], "y").unwrap()[0];
    let z = g.op(Op::Linear, &[y, b], "z").unwrap()[0];
    g.outputs.push(z);

    let context = Context {
        device: cpu::profile(1, DType::F32, DType::F32),
        layout: "tp=2".parse::<Layout>().unwrap(),
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.0),
        precision: Precision::FP32,
        recompute: Recompute::None,
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    };
    let program = compile_forward(&[("product", g)], &context).unwrap();
    let calls = account::communication(&program, program.entry("product").unwrap());
    let found: Vec<_> = calls.iter().map(|e| (e.op, e.axis.as_str(), e.ranks, e.calls, e.bytes)).collect();
    assert_eq!(found, [("all_reduce", "tp", 2, 1, 8)]);
    let sizes = |name: &str| program.tensor(name).unwrap().ty.sizes();
    assert_eq!((sizes("a"), sizes("b")), (vec![1, 2], vec![2, 1]));

    let mut ranks = ThreadWorld::on_cpu(vec![program], 1, Duration::from_secs(5)).unwrap();
    let bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    ranks.write("product.x", 0, &bytes(&[1.0, 2.0])).unwrap();
    let transposed = bytes(&[1.0, 3.0, 2.0, 4.0]);
    ranks.write("a", 0, &transposed).unwrap();
    ranks.write("b", 0, &transposed).unwrap();
    ranks.run("product").unwrap();
    assert_eq!(ranks.read("product.z", 0).unwrap().as_ref(), bytes(&[37.0, 54.0]));
}
