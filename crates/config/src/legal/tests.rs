use super::*;
use lockstep_ir::Hint;

const LLAMA: Extents = Extents {
    layers: 32,
    heads: 32,
    kv_heads: 8,
    ffn: 14336,
    dense_ffn: None,
    experts: None,
    vocab: 128_256,
    seq: 8192,
    global_batch: 1024,
    micro_batch: 2,
    gathered_head: None,
    naive_attention: false,
    latent: false,
    noise_scale: false,
};

/// A model whose every extent is this.
fn all_of_size(n: usize) -> Extents {
    let (layers, heads, kv_heads, ffn, vocab) = (n, n, n, n, n);
    Extents { layers, heads, kv_heads, ffn, vocab, seq: n, global_batch: n, micro_batch: n, ..LLAMA }
}

fn layout(text: &str) -> Layout {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The keys at fault, with the nearest values.
fn refused(text: &str, shape: Extents) -> Vec<(&'static str, String)> {
    check(&layout(text), &shape).into_iter().map(|refusal| (refusal.key, refusal.nearest)).collect()
}

fn one(key: &'static str, nearest: &str) -> Vec<(&'static str, String)> {
    vec![(key, nearest.to_owned())]
}

#[test]
fn a_batch_of_1024_in_micro_batches_of_2_on_128_ranks_accumulates_4_times() {
    assert_eq!(LLAMA.micro_batches(128), Some(4));
    assert_eq!(check(&layout("dp=128"), &LLAMA), []);
    assert_eq!(LLAMA.micro_batches(1), Some(512));
    assert_eq!(LLAMA.micro_batches(512), Some(1));
    assert_eq!(LLAMA.micro_batches(1024), None);
    assert_eq!(LLAMA.micro_batches(3), None);
    assert_eq!(LLAMA.micro_batches(0), None);
}

#[test]
fn usual_layouts_fit() {
    let odd_vocabulary = Extents { vocab: 50_257, ..LLAMA };
    for text in ["dp=1", "dp=64,zero=3", "tp=8,sp", "dp=8,zero=1,tp=8,sp,pp=4", "pp=32,gpipe", "tp=16", "tp=32"] {
        assert_eq!(check(&layout(text), &LLAMA), [], "{text}");
        assert_eq!(check(&layout(text), &odd_vocabulary), [], "{text}");
    }
    let single = Extents { experts: Some(1), gathered_head: Some(1), ..all_of_size(1) };
    assert_eq!(check(&Layout::single(1), &single), []);
}

#[test]
fn tp_divides_the_heads_and_the_hidden_units() {
    let ffn = Extents { ffn: 14, ..LLAMA };
    assert_eq!(refused("tp=5", LLAMA)[0], ("parallel.tp", "tp = 4 or 8".to_owned()));
    assert_eq!(refused("tp=64", LLAMA)[0], ("parallel.tp", "tp = 32".to_owned()));
    assert_eq!(refused("tp=4", ffn), one("parallel.tp", "tp = 2"));
    let [refusal] = &check(&layout("tp=4"), &ffn)[..] else { panic!("one rule is broken") };
    assert_eq!(refusal.with_hint(), "parallel.tp = 4 does not divide model.ffn = 14\nhint: use tp = 2");
    assert_eq!(refusal.with, ["model.ffn"]);
}

#[test]
fn every_tp_rank_has_a_part_of_the_vocabulary() {
    let shape = |vocab| Extents { heads: 8, kv_heads: 8, ffn: 8, vocab, ..LLAMA };
    assert_eq!(check(&layout("tp=4"), &shape(4)), []);
    assert_eq!(refused("tp=4", shape(3)), one("parallel.tp", "tp = 2"));
    // Parts of two leave the fourth rank nothing.
    assert_eq!(refused("tp=4", shape(5)), one("parallel.tp", "tp = 2"));
}

#[test]
fn tp_divides_the_key_value_heads_or_is_a_multiple_of_them() {
    let shape = Extents { heads: 24, kv_heads: 6, ffn: 24, ..LLAMA };
    for fits in ["tp=2", "tp=3", "tp=6", "tp=12", "tp=24"] {
        assert_eq!(check(&layout(fits), &shape), [], "{fits}");
    }
    assert_eq!(refused("tp=4", shape), one("parallel.tp", "tp = 3 or 6"));
    assert_eq!(refused("tp=8", shape), one("parallel.tp", "tp = 6 or 12"));
}

#[test]
fn ranks_that_share_a_key_head_divide_it_where_matrices_are_gathered() {
    let muon = Extents { gathered_head: Some(128 * 4096), ..LLAMA };
    for fits in ["tp=2", "tp=8,sp", "tp=32", "dp=8,zero=3,tp=2", "dp=8,zero=1,pp=4"] {
        assert_eq!(check(&layout(fits), &muon), [], "{fits}");
    }
    let odd = Extents { gathered_head: Some(2 * 33), ..LLAMA };
    assert_eq!(check(&layout("tp=16"), &odd), []);
    assert_eq!(refused("tp=32", odd), one("parallel.tp", "tp = 16"));
}

#[test]
fn sequence_parallelism_needs_tp_and_a_sequence_that_it_divides() {
    assert_eq!(refused("sp", LLAMA), one("parallel.sequence_parallel", "sequence_parallel = false, or tp = 2"));
    let odd = Extents { seq: 1021, ..LLAMA };
    assert_eq!(refused("sp", odd), one("parallel.sequence_parallel", "sequence_parallel = false"));
    let seq = Extents { seq: 1028, ..LLAMA };
    assert_eq!(refused("tp=8,sp", seq), one("parallel.tp", "tp = 4"));
    assert_eq!(check(&layout("tp=8"), &seq), []);
}

#[test]
fn context_parallelism_cuts_sequences_into_two_chunks_for_every_rank() {
    for fits in ["cp=2", "cp=4,context=gather,dp=8,zero=3", "cp=16,tp=8,sp,pp=2", "cp=4096", "cp=2,zero=1"] {
        assert_eq!(check(&layout(fits), &LLAMA), [], "{fits}");
    }
    assert_eq!(refused("cp=3", LLAMA), one("parallel.cp", "cp = 2 or 4, or seq = 8196"));
    assert_eq!(refused("cp=8192", LLAMA), one("parallel.cp", "cp = 4096, or seq = 16384"));
    let odd = Extents { seq: 1022, ..LLAMA };
    assert_eq!(refused("cp=2", odd), one("parallel.cp", "cp = 1 or 7, or seq = 1024"));
    assert_eq!(refused("cp=73,tp=2,sp", odd), []);
    let seq = Extents { seq: 48, ..LLAMA };
    assert_eq!(refused("cp=8,tp=4,sp", seq), one("parallel.tp", "tp = 2"));
    assert_eq!(refused("cp=16,tp=4,sp", seq), one("parallel.cp", "cp = 12, or seq = 128"));
    let naive = Extents { naive_attention: true, ..LLAMA };
    assert_eq!(refused("cp=2", naive), one("parallel.cp", "attention = \"flash\", or cp = 1"));
}

#[test]
fn all_to_all_gives_ranks_whole_key_heads() {
    for fits in
        ["cp=8,context=a2a", "cp=2,context=a2a,tp=4,sp,pp=2", "dp=2,zero=3,cp=4,context=a2a,tp=2", "context=a2a"]
    {
        assert_eq!(check(&layout(fits), &LLAMA), [], "{fits}");
    }
    let ring = |cp: &str| one("parallel.context", &format!("context = \"ring\", or cp = {cp}"));
    assert_eq!(refused("cp=16,context=a2a", LLAMA), ring("8"));
    assert_eq!(refused("cp=8,context=a2a,tp=2", LLAMA), ring("4"));
    assert_eq!(refused("cp=2,context=a2a,tp=16", LLAMA), ring("1"));
    let twelve = Extents { heads: 24, kv_heads: 12, ffn: 24, seq: 48, ..LLAMA };
    assert_eq!(refused("cp=8,context=a2a", twelve), ring("6 or 12"));
    assert_eq!(
        check(&layout("cp=4,context=a2a,tp=4"), &LLAMA)[0].reason,
        "parallel.context = \"a2a\" gives ranks whole heads, and parallel.tp × parallel.cp = 4 × 4 does not divide \
         model.kv_heads = 8"
    );
    assert_eq!(check(&layout("cp=16,tp=4,sp"), &LLAMA), []);
}

#[test]
fn the_latent_goes_around_where_keys_and_values_expand_from_one() {
    assert_eq!(refused("cp=2,context=latent", LLAMA), one("parallel.context", "context = \"ring\""));
    let latent = Extents { latent: true, kv_heads: 32, ..LLAMA };
    for fits in ["cp=2,context=latent", "dp=2,zero=3,cp=4,context=latent,tp=2,sp,pp=2,zb-v"] {
        assert_eq!(refused(fits, latent), [], "{fits}");
    }
    assert_eq!(refused("context=latent", LLAMA), []);
}

#[test]
fn dp_and_the_micro_batch_divide_the_batch() {
    assert_eq!(refused("dp=3", LLAMA), one("parallel.dp", "dp = 2 or 4"));
    assert_eq!(refused("dp=2000", LLAMA), one("parallel.dp", "dp = 512"));
    assert_eq!(refused("dp=1024", LLAMA), one("train.micro_batch", "micro_batch = 1"));
    let thirds = Extents { micro_batch: 3, ..LLAMA };
    assert_eq!(refused("dp=1", thirds), one("train.micro_batch", "micro_batch = 2 or 4"));
    let reasons: Vec<_> = ["dp=1", "dp=4"].iter().map(|text| check(&layout(text), &thirds)[0].reason.clone()).collect();
    assert_eq!(
        reasons,
        [
            "train.micro_batch = 3 does not divide train.global_batch = 1024",
            "parallel.dp × train.micro_batch = 4 × 3 does not divide train.global_batch = 1024"
        ]
    );
}

#[test]
fn replicas_share_the_batch_too() {
    assert_eq!(check(&layout("dp_replicate=2,dp=64,zero=3"), &LLAMA), []);
    assert_eq!(check(&layout("dp_replicate=8"), &LLAMA), []);
    assert_eq!(refused("dp_replicate=3", LLAMA), one("parallel.dp_replicate", "dp_replicate = 2 or 4"));
    assert_eq!(refused("dp_replicate=4,dp=256", LLAMA), one("train.micro_batch", "micro_batch = 1"));
    assert_eq!(refused("dp_replicate=4,dp=300", LLAMA), one("parallel.dp", "dp = 128"));
    assert_eq!(refused("dp_replicate=2,zero=1", LLAMA), one("parallel.zero", "zero = 0, or dp = 2 or more"));
    let thirds = Extents { micro_batch: 3, ..LLAMA };
    let reasons = ["dp_replicate=2,dp=4", "dp_replicate=2", "dp_replicate=4,dp=3"];
    assert_eq!(
        reasons.map(|text| check(&layout(text), &thirds)[0].reason.clone()),
        [
            "parallel.dp × parallel.dp_replicate × train.micro_batch = 4 × 2 × 3 does not divide train.global_batch = 1024",
            "parallel.dp_replicate × train.micro_batch = 2 × 3 does not divide train.global_batch = 1024",
            "parallel.dp = 3 does not divide train.global_batch / parallel.dp_replicate = 1024 / 4",
        ]
    );
}

#[test]
fn ep_divides_the_experts_and_shares_the_batch() {
    let experts = Extents { experts: Some(12), ..LLAMA };
    for fits in ["ep=4", "dp=2,ep=2,zero=3", "ep=2,zero=1", "dp_replicate=2,ep=4,tp=2,sp,pp=2", "cp=2,ep=2"] {
        assert_eq!(check(&layout(fits), &experts), [], "{fits}");
    }
    assert_eq!(check(&layout("ep=2,bound=1.5"), &experts), []);
    assert_eq!(refused("dp=2,bound=1.5", LLAMA), one("parallel.ep_bound", "no ep_bound"));
    // 6 and 12 divide the experts, but not the batch.
    assert_eq!(refused("ep=8", experts), one("parallel.ep", "ep = 4"));
    // 8 divides the batch, but not the experts.
    let few = Extents { global_batch: 24, micro_batch: 1, experts: Some(20), ..LLAMA };
    assert_eq!(refused("ep=5", few), one("parallel.ep", "ep = 4"));
    // The noise scale leaves one size.
    assert_eq!(refused("ep=8", Extents { noise_scale: true, ..experts }), one("parallel.ep", "ep = 1"));
    let none = one("parallel.ep", "ep = 1; dp has ranks with sequences of their own");
    assert_eq!(refused("ep=2", LLAMA), none);
    assert_eq!(refused("ep=3", experts), one("parallel.ep", "ep = 2 or 4"));
    assert_eq!(refused("dp=256,ep=4", experts), one("train.micro_batch", "micro_batch = 1"));
    assert_eq!(
        check(&layout("dp=256,ep=4"), &experts)[0].reason,
        "parallel.dp × parallel.ep × train.micro_batch = 256 × 4 × 2 does not divide train.global_batch = 1024"
    );
}

#[test]
fn every_stage_has_a_layer() {
    assert_eq!(check(&layout("pp=32"), &LLAMA), []);
    assert_eq!(refused("pp=33", LLAMA), one("parallel.pp", "pp = 32"));
}

#[test]
fn every_virtual_stage_has_a_layer_and_a_schedule_as_many_chunks_as_it_can_have() {
    for fits in ["pp=8,interleaved", "pp=8,interleaved,virtual=4", "pp=16,zb-v", "pp=32,zb-h1", "pp=2,zb-v,virtual=2"] {
        assert_eq!(check(&layout(fits), &LLAMA), [], "{fits}");
    }
    let other = |nearest: &str| one("parallel.virtual", nearest);
    assert_eq!(refused("pp=8,virtual=2", LLAMA), other("virtual = 1, or schedule = \"interleaved\" or \"zb-v\""));
    assert_eq!(refused("pp=8,zb-h1,virtual=3", LLAMA), other("virtual = 1, or schedule = \"interleaved\""));
    assert_eq!(refused("pp=8,zb-v,virtual=3", LLAMA), other("virtual = 2, or schedule = \"interleaved\""));
    let ones = "virtual = 2, or schedule = \"1f1b\" or \"gpipe\" or \"zb-h1\"";
    assert_eq!(refused("pp=8,interleaved,virtual=1", LLAMA), other(ones));
    assert_eq!(refused("pp=8,interleaved,virtual=5", LLAMA), other("virtual = 4"));
    assert_eq!(refused("pp=20,interleaved", LLAMA), other("pp = 16"));
    assert_eq!(refused("pp=20,zb-v", LLAMA), other("pp = 16"));
    assert_eq!(refused("pp=40,zb-v", LLAMA), one("parallel.pp", "pp = 16"));
    let two = Extents { layers: 2, ..LLAMA };
    assert_eq!(refused("pp=2,zb-v", two), other("schedule = \"1f1b\" with virtual = 1"));
    let needs_pp = |nearest: &str| one("parallel.schedule", nearest);
    for schedule in ["gpipe", "interleaved", "zb-h1", "zb-v"] {
        assert_eq!(refused(schedule, LLAMA), needs_pp("schedule = \"1f1b\", or pp = 2 or more"));
    }
    assert_eq!(refused("zb-v", two), needs_pp("schedule = \"1f1b\""));
}

#[test]
fn zero_needs_dp() {
    assert_eq!(refused("zero=1", LLAMA), one("parallel.zero", "zero = 0, or dp = 2 or more"));
    for text in ["dp=2,zero=1,pp=2", "dp=2,zero=2,pp=2", "dp=2,zero=3,pp=2", "dp=2,zero=3,no-reshard"] {
        assert_eq!(check(&layout(text), &LLAMA), [], "{text}");
    }
    let nearest = "reshard_after_forward = true, or zero = 3";
    assert_eq!(refused("dp=2,zero=2,no-reshard", LLAMA), one("parallel.reshard_after_forward", nearest));
    let four = Layout { zero: 4, ..layout("dp=2") };
    assert_eq!(check(&four, &LLAMA)[0].nearest, "zero = 3");
}

#[test]
fn sizes_of_nothing_are_refused_before_anything_is_divided_by_them() {
    let sizes = MeshAxis::ALL;
    let mesh = sizes.into_iter().fold(lockstep_ir::Mesh::ONE, |mesh, axis| mesh.with(axis, 0));
    assert_eq!(check(&Layout { mesh, ..Layout::single(1) }, &all_of_size(0)).len(), 14);
    assert_eq!(refused("tp=2", Extents { kv_heads: 0, ..LLAMA }), one("model.kv_heads", "kv_heads = 1"));
}

#[test]
fn several_faults_are_all_named() {
    let keys: Vec<_> = refused("dp=3,tp=3,pp=64,zero=2", LLAMA).into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["parallel.tp", "parallel.tp", "parallel.tp", "parallel.dp", "parallel.pp"]);
}

#[test]
fn what_a_refusal_calls_nearest_fits() {
    for tp in 1..=40 {
        let shape = Extents { heads: 36, kv_heads: 12, ffn: 72, ..LLAMA };
        let wanted = layout(&format!("tp={tp}"));
        for refusal in check(&wanted, &shape) {
            let sizes = refusal.nearest.trim_start_matches("tp = ").split(" or ");
            for size in sizes.filter_map(|size| size.parse().ok()) {
                let fits = Layout { mesh: wanted.mesh.with(MeshAxis::Tp, size), ..wanted };
                assert_eq!(check(&fits, &shape), [], "{refusal}");
            }
        }
    }
}

#[test]
fn batches_of_any_size_are_checked_at_once() {
    let large = Extents { global_batch: 1 << 32, micro_batch: (1 << 32) - 1, ..LLAMA };
    assert_eq!(refused("dp=65536", large), one("train.micro_batch", "micro_batch = 65536"));
}
