use super::*;
use crate::{Axis, Dim, Section};

fn ty(dims: &[(Axis, usize)]) -> TensorType {
    TensorType::new(DType::F32, dims.iter().map(|&(a, n)| Dim::new(a, n)).collect::<Vec<_>>())
}

#[test]
fn linear_infers_its_output_and_counts_two_flops_per_product() {
    let x = ty(&[(Axis::Batch, 2), (Axis::Seq, 3), (Axis::Embed, 5)]);
    let w = ty(&[(Axis::Ffn, 7), (Axis::Embed, 5)]);
    let y = Op::Linear.infer(&[&x, &w]).unwrap();
    assert_eq!(y[0].to_string(), "f32[batch:2, seq:3, ffn:7]");
    assert_eq!(Op::Linear.flops(&[&x, &w], &[true]).unwrap().model, 2 * 2 * 3 * 5 * 7);
}

#[test]
fn a_dimension_with_another_meaning_is_refused_even_at_the_same_size() {
    let x = ty(&[(Axis::Batch, 2), (Axis::Seq, 3), (Axis::Ffn, 5)]);
    let w = ty(&[(Axis::Ffn, 7), (Axis::Embed, 5)]);
    let error = Op::Linear.infer(&[&x, &w]).unwrap_err();
    assert_eq!(error.to_string(), "linear: input `w` has embed:5 where `k` is ffn:5");
}

#[test]
fn attention_reads_heads_from_the_packed_dimension() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let packed = Dim::packed([head(Axis::Heads, 6), head(Axis::KvHeads, 2), head(Axis::KvHeads, 2)]);
    let qkv = TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 8), packed]);
    let out = Op::Attention { documents: false, window: None }.infer(&[&qkv]).unwrap();
    assert_eq!(out[0].to_string(), "f32[batch:1, seq:8, heads:6×4]");
    assert_eq!(out[1].to_string(), "f32[batch:1, heads:6, seq:8]");
    let flops = Op::Attention { documents: false, window: None }.flops(&[&qkv], &[true, true]).unwrap();
    assert_eq!((flops.model, flops.causal), (4 * 8 * 8 * 24, 2 * 8 * 8 * 24));
    let windowed = |window| Op::Attention { documents: false, window: Some(window) };
    let flops = |window| windowed(window).flops(&[&qkv], &[true, true]).unwrap();
    // Three positions of a triangle without its corner, and five of a whole window.
    let all = 4 * 24 * (8 * 3);
    assert_eq!(flops(3), Flops { model: all, causal: all - 2 * 24 * 3 * 3, hardware: all });
    assert_eq!(flops(8), flops(100));
    let starts = |seq| TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, seq)]);
    assert_eq!(Op::Attention { documents: true, window: None }.infer(&[&qkv, &starts(8)]).unwrap(), out);
    let error = Op::Attention { documents: true, window: None }.infer(&[&qkv, &starts(7)]).unwrap_err();
    assert_eq!(error.to_string(), "document_attention: input `starts` has seq:7 where `s` is seq:8");
}

#[test]
fn a_cache_must_hold_the_keys_and_values_of_the_packed_dimension() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let kv = head(Axis::KvHeads, 2);
    let act = |rows, dim| TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, rows), dim]);
    let qkv = act(3, Dim::packed([head(Axis::Heads, 6), kv, kv]));
    let cache = act(16, Dim::packed([kv, kv]));
    let number = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1)]);
    let attention = Op::CachedAttention { window: None };
    let out = attention.infer(&[&qkv, &cache, &number, &number]).unwrap();
    assert_eq!(out[0].to_string(), "f32[batch:1, seq:3, heads:6×4]");
    assert_eq!(out[1], cache);
    let flops = attention.flops(&[&qkv, &cache, &number, &number], &[true, true]).unwrap();
    assert_eq!(flops.hardware, 4 * 3 * 16 * 24);
    let refusal = |cache: TensorType| attention.infer(&[&qkv, &cache, &number, &number]).unwrap_err();
    let one_head = refusal(act(16, Dim::packed([head(Axis::KvHeads, 1), kv])));
    assert!(one_head.to_string().contains("the cache must hold"), "{one_head}");
    let short = refusal(act(2, Dim::packed([kv, kv])));
    assert_eq!(short.to_string(), "cached_attention: cache has 2 rows for 3");
}

#[test]
fn norms_of_heads_have_a_weight_of_two_sections_and_a_deviation_per_head() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let packed = Dim::packed([head(Axis::Heads, 6), head(Axis::KvHeads, 2), head(Axis::KvHeads, 2)]);
    let qkv = TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 8), packed]);
    let weight = |n| {
        let of_head = Section { axis: Axis::HeadDim, count: n, unit: 1 };
        TensorType::new(DType::F32, [Dim::packed([of_head, of_head])])
    };
    let norm = Op::QkNorm { eps: 1e-6 };
    let out = norm.infer(&[&qkv, &weight(4)]).unwrap();
    assert_eq!((&out[0], out[1].to_string().as_str()), (&qkv, "f32[batch:1, seq:8, heads:6+kv_heads:2]"));
    let error = norm.infer(&[&qkv, &weight(3)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "qk_norm: `i` is head_dim:3+head_dim:3 where the heads ask for head_dim:4+head_dim:4"
    );
}

#[test]
fn weights_of_attention_are_of_every_query_and_key() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let packed = Dim::packed([head(Axis::Heads, 6), head(Axis::KvHeads, 2), head(Axis::KvHeads, 2)]);
    let qkv = TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 8), packed]);
    let scores = Op::AttentionScores { documents: false, window: None };
    let p = scores.infer(&[&qkv]).unwrap().remove(0);
    assert_eq!(p.to_string(), "f32[batch:1, heads:6, seq:8, seq:8]");
    let mix = Op::AttentionMix { window: None };
    assert_eq!(mix.infer(&[&p, &qkv]).unwrap()[0].to_string(), "f32[batch:1, seq:8, heads:6×4]");
    let whole = Op::Attention { documents: false, window: None }.flops(&[&qkv], &[true, true]).unwrap();
    let naive = scores.flops(&[&qkv], &[true]).unwrap() + mix.flops(&[&p, &qkv], &[true]).unwrap();
    assert_eq!(naive, whole);
    let fewer = ty(&[(Axis::Batch, 1), (Axis::Heads, 5), (Axis::Seq, 8), (Axis::Seq, 8)]);
    let error = mix.infer(&[&fewer, &qkv]).unwrap_err();
    assert_eq!(error.to_string(), "attention_mix: `q` is heads:5 where the heads ask for heads:6");
}

#[test]
fn every_in_place_pair_names_operands_of_equal_shape() {
    let norms = [Op::AddRmsNorm { eps: 0.0 }, Op::AddLayerNorm { eps: 0.0 }, Op::AddLayerNormGrad];
    let head_norms = [Op::QkNorm { eps: 0.0 }, Op::QkNormGrad];
    let pointwise = [Op::Add, Op::AddBias, Op::AddPositionsAt, Op::Gelu, Op::GeluGrad, Op::SwiGluGrad, Op::AddState];
    let ropes = [false, true].map(|documents| Op::Rope { inverse: false, documents });
    let ops =
        [&norms[..], &head_norms, &pointwise, &ropes, &[Op::RopeAt, Op::CachedAttention { window: None }]].concat();
    for spec in ops.iter().map(Op::spec) {
        for &(input, output) in spec.in_place {
            assert_eq!(spec.inputs[input].dims, spec.outputs[output].dims, "{}", spec.name);
        }
    }
}
