//! Traps in reading the files of model families, as the trackers of other frameworks tell of them. A test compares a golden model with
//! `transformers`, and then shows that the other reading, which passes every check of names and shapes, would be seen in its logits.

mod golden_model;

use golden_model::{Golden, error, further_losses, loaded, step};
use lockstep_config::{Config, ModelConfig, RopeScalingConfig};
use lockstep_exec::{Executor, reference};
use lockstep_ir::{Axis, DType, Dim, Graph, Op, TensorType};
use lockstep_model::names;
use safetensors::SafeTensors;

/// What logits may differ by, and what a wrong reading differs by at least.
const RIGHT: f64 = 1e-5;
const WRONG: f64 = 1e-3;

/// A golden model, which may be read wrongly.
struct Trap {
    golden: Golden,
    config: Config,
}

impl Trap {
    /// A golden model that is computed as transformers computes it.
    fn of(case: &str) -> Self {
        let trap = Self::unchecked(case);
        let far = trap.far();
        assert!(far < RIGHT, "{case}: logits differ by {far:.1e}");
        trap
    }

    fn unchecked(case: &str) -> Self {
        let golden = Golden::open(case);
        let config = golden.config();
        Self { golden, config }
    }

    /// How far the logits are from those of transformers.
    fn far(&self) -> f64 {
        let (_, mut executor) = loaded(&self.golden, &self.config, 1, false, false);
        step(&mut executor, 1, 0.0, [1.0; 2]);
        let bytes = executor.read(names::LOGITS, 0).unwrap();
        let logits: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        error(&logits, &self.golden.f32("logits"))
    }

    fn with(mut self, change: impl FnOnce(&mut ModelConfig)) -> Self {
        change(&mut self.config.model);
        self
    }

    /// With rows of a weight in another order: row `i` is what row `from(i)` was.
    fn rows(mut self, name: &str, from: impl Fn(usize) -> usize) -> Self {
        let (data, shape) = (self.golden.f32(name), self.shape(name));
        let columns = data.len() / shape[0];
        put(&mut self.golden, name, (0..data.len()).map(|i| data[from(i / columns) * columns + i % columns]));
        self
    }

    /// With columns of a matrix in another order.
    fn columns(mut self, name: &str, from: impl Fn(usize) -> usize) -> Self {
        let data = self.golden.f32(name);
        let columns = *self.shape(name).last().unwrap();
        put(&mut self.golden, name, (0..data.len()).map(|i| data[i - i % columns + from(i % columns)]));
        self
    }

    /// With two weights of one shape in each other's place.
    fn swapped(mut self, [a, b]: [&str; 2]) -> Self {
        let (left, right) = (self.golden.f32(a), self.golden.f32(b));
        put(&mut self.golden, a, right.into_iter());
        put(&mut self.golden, b, left.into_iter());
        self
    }

    fn each(mut self, name: &str, change: impl Fn(f32) -> f32) -> Self {
        let data = self.golden.f32(name);
        put(&mut self.golden, name, data.into_iter().map(change));
        self
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        SafeTensors::deserialize(&self.golden.bytes).unwrap().tensor(name).unwrap().shape().to_vec()
    }

    /// Asserts that this would be seen.
    fn assert_seen(&self) {
        let far = self.far();
        assert!(far > WRONG, "logits differ by {far:.1e} alone");
    }

    fn assert_same(&self) {
        let far = self.far();
        assert!(far < RIGHT, "logits differ by {far:.1e}");
    }
}

/// Puts other numbers into a tensor of a golden file.
fn put(golden: &mut Golden, name: &str, numbers: impl Iterator<Item = f32>) {
    let data: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
    let start = SafeTensors::deserialize(&golden.bytes).unwrap().tensor(name).unwrap().data().as_ptr();
    let start = start as usize - golden.bytes.as_ptr() as usize;
    assert_eq!(golden.f32(name).len() * 4, data.len());
    golden.bytes[start..start + data.len()].copy_from_slice(&data);
}

/// What the CPU's definition of an op makes of a one of this type.
fn of_one(op: Op, dtype: DType) -> f32 {
    let mut graph = Graph::new();
    let x = graph.input("x", TensorType::new(dtype, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Embed, 1)]));
    let y = graph.op(op, &[x], "y").unwrap()[0];
    graph.outputs.push(y);
    let values = reference::evaluate(&graph, |value| (value == x).then(|| vec![1.0]));
    values[y.0].as_ref().unwrap()[0] as f32
}

/// The name of a weight of a layer in a golden file.
fn layer(index: usize, name: &str) -> String {
    format!("param.model.layers.{index}.{name}")
}

/// Where element `i` of a head of `rope` elements comes from if pairs side by side are taken for halves.
fn halves_of_pairs(i: usize, rope: usize) -> usize {
    if i.is_multiple_of(2) { i / 2 } else { rope / 2 + i / 2 }
}

fn scaling(model: &mut ModelConfig, change: impl FnOnce(&mut RopeScalingConfig)) {
    change(model.rope_scaling.as_mut().unwrap());
}

#[test]
fn deepseek_rotates_pairs_side_by_side_and_not_halves() {
    let (nope, rope, latent) = (6, 4, 10);
    let (queries, keys) = (layer(0, "self_attn.q_b_proj.weight"), layer(0, "self_attn.kv_a_proj_with_mqa.weight"));
    let of_head = |i: usize| match i % (nope + rope) {
        inside if inside < nope => i,
        inside => i - inside + nope + halves_of_pairs(inside - nope, rope),
    };
    let of_key = |i: usize| if i < latent { i } else { latent + halves_of_pairs(i - latent, rope) };
    Trap::of("deepseek_v3").rows(&queries, of_head).rows(&keys, of_key).assert_seen();
}

#[test]
fn deepseek_s_latent_stands_before_the_shared_key() {
    let (latent, rope) = (10, 4);
    let name = layer(0, "self_attn.kv_a_proj_with_mqa.weight");
    Trap::of("deepseek_v3").rows(&name, |i| (i + rope) % (latent + rope)).assert_seen();
}

#[test]
fn deepseek_s_kv_b_has_keys_and_values_of_each_head_together() {
    let (heads, nope, value) = (4, 6, 7);
    let name = layer(0, "self_attn.kv_b_proj.weight");
    // As if there were all keys, and then all values.
    let from = |i: usize| {
        let (head, inside) = (i / (nope + value), i % (nope + value));
        if inside < nope { head * nope + inside } else { heads * nope + head * value + inside - nope }
    };
    Trap::of("deepseek_v3").rows(&name, from).assert_seen();
}

#[test]
fn norms_of_deepseek_s_latents_have_an_eps_of_their_own() {
    let trap = Trap::of("deepseek_v3");
    assert_eq!(trap.config.model.norm_eps, 1e-5);
    let graph = lockstep_model::build(&trap.config.model, 1, 12).unwrap();
    let eps = |value: &str| {
        let made = graph.values.iter().position(|v| v.name == value).unwrap();
        let node = graph.nodes.iter().find(|node| node.outputs.contains(&Some(lockstep_ir::ValueId(made)))).unwrap();
        node.op
    };
    for latent in ["layers.0.q_a_normed", "layers.0.kv_a_normed"] {
        assert_eq!(eps(latent), Op::rms_norm(1e-6), "{latent}");
    }
    assert_eq!(eps("layers.0.n1"), Op::rms_norm(1e-5));
}

#[test]
fn deepseek_s_scores_have_mscale_at_all_lengths() {
    // The context that RoPE is scaled from is 8, and sequences of 6 would have it too: no length enters the factor.
    let without = |scaling: &mut RopeScalingConfig| {
        if let RopeScalingConfig::Yarn { mscale_all_dim, .. } = scaling {
            *mscale_all_dim = None;
        }
    };
    for case in ["deepseek_v3", "deepseek_v2", "deepseek_v2_lite"] {
        Trap::of(case).with(|model| scaling(model, without)).assert_seen();
    }
}

#[test]
fn deepseek_v3_s_groups_that_are_left_out_have_no_chance_where_scores_are_negative() {
    // Biases that are far below 0 choose as they would above: groups that are left out have −∞, and not 0.
    let mut trap = Trap::of("deepseek_v3");
    for index in 1..3 {
        trap = trap.each(&layer(index, "mlp.gate.e_score_correction_bias"), |bias| bias - 4.0);
    }
    trap.assert_same();
}

#[test]
fn deepseek_v3_s_biases_choose_experts_and_do_not_weigh_them() {
    let mut trap = Trap::of("deepseek_v3");
    for index in 1..3 {
        trap = trap.each(&layer(index, "mlp.gate.e_score_correction_bias"), |_| 0.0);
    }
    trap.assert_seen();
}

#[test]
fn deepseek_v3_normalises_chosen_weights_before_it_scales_them() {
    Trap::of("deepseek_v3").with(|model| model.norm_topk = false).assert_seen();
    Trap::of("deepseek_v2").with(|model| model.norm_topk = true).assert_seen();
    Trap::of("deepseek_v2").with(|model| model.router_scale = 1.0).assert_seen();
}

#[test]
fn deepseek_chooses_groups_before_experts() {
    for case in ["deepseek_v3", "deepseek_v2"] {
        Trap::of(case).with(|model| (model.expert_groups, model.expert_top_groups) = (1, 1)).assert_seen();
    }
}

#[test]
fn deepseek_v3_s_module_takes_the_embedding_first_and_the_normed_result_second() {
    let far = |trap: &Trap| {
        let (_, mut executor) = loaded(&trap.golden, &trap.config, 1, true, false);
        step(&mut executor, 1, 0.0, [1.0; 2]);
        error(&further_losses(&executor, &trap.config, 1), &trap.golden.f32("further"))
    };
    let of = || Trap::unchecked("deepseek_v3_mtp");
    let module = of().config.model.layers;
    let [joined, embedding, hidden] =
        ["eh_proj", "enorm", "hnorm"].map(|name| layer(module, &format!("{name}.weight")));
    let dim = of().config.model.dim;
    assert!(far(&of()) < RIGHT);
    assert!(far(&of().columns(&joined, |i| (i + dim) % (2 * dim))) > WRONG);
    assert!(far(&of().swapped([&embedding, &hidden])) > WRONG / 10.0);
    // The norm of the model's result comes before the module's own.
    assert!(far(&of().each("param.model.norm.weight", |w| 2.0 - w)) > WRONG);
}

#[test]
fn gemma_s_norms_multiply_by_one_plus_their_weights() {
    Trap::of("gemma3_text").with(|model| model.norm_plus_one = false).assert_seen();
}

#[test]
fn gemma_s_scores_are_scaled_by_query_pre_attn_scalar() {
    let wrong = |model: &mut ModelConfig| model.softmax_scale_dim = model.head_dim;
    Trap::of("gemma3_text").with(wrong).assert_seen();
}

#[test]
fn gemma_s_two_norms_around_the_mlp_and_the_one_behind_attention_are_not_each_other() {
    let names = ["post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"];
    let names = names.map(|name| layer(0, &format!("{name}.weight")));
    for [a, b] in [[0, 1], [1, 2], [0, 2]] {
        Trap::of("gemma3_text").swapped([&names[a], &names[b]]).assert_seen();
    }
}

#[test]
fn gemma_scales_the_rope_of_full_layers_and_has_another_base_in_the_others() {
    Trap::of("gemma3_text").with(|model| model.rope_local_theta = None).assert_seen();
    Trap::of("gemma3_text").with(|model| model.rope_scaling = None).assert_seen();
}

#[test]
fn gemma_s_embedding_is_scaled_and_its_head_is_not() {
    Trap::of("gemma3_text").with(|model| model.embedding_scale = 1.0).assert_seen();
}

/// The root of the width is rounded as the type of the weights rounds it: Gemma 3's five sizes.
#[test]
fn gemma_s_embedding_scale_is_rounded_to_bf16_there() {
    for (dim, rounded) in [(640, 25.25), (1152, 34.0), (2560, 50.5), (3840, 62.0), (5376, 73.5)] {
        let text = format!(
            "[model]\narchitecture = \"gemma3_text\"\nvocab_size = 16\nlayers = 1\ndim = {dim}\nheads = 1\nffn = 8\nhead_dim = 8\n"
        );
        let scale = Config::parse(&text, "gemma.toml", &[]).unwrap().model.embedding_scale;
        assert!((scale - f64::from(dim as f32).sqrt()).abs() < 1e-9, "{scale}");
        // The op that multiplies by it rounds it as its operand is.
        let op = Op::Scale { factor: scale as f32, rounded: true };
        assert_eq!((of_one(op, DType::BF16), of_one(op, DType::F32)), (rounded, scale as f32), "{dim}");
    }
}

#[test]
fn a_window_counts_its_own_token() {
    for case in ["gemma3_text", "olmo3", "gpt_oss", "mistral"] {
        for change in [-1isize, 1] {
            let wrong = |model: &mut ModelConfig| {
                model.sliding_window = model.sliding_window.map(|window| window.strict_add_signed(change));
            };
            Trap::of(case).with(wrong).assert_seen();
        }
    }
}

#[test]
fn olmo_s_two_norms_of_a_layer_are_behind_its_blocks_and_not_each_other() {
    let names =
        ["post_attention_layernorm", "post_feedforward_layernorm"].map(|name| layer(0, &format!("{name}.weight")));
    for case in ["olmo2", "olmo3"] {
        Trap::of(case).swapped([&names[0], &names[1]]).assert_seen();
    }
}

#[test]
fn olmo_2_norms_queries_over_all_heads() {
    // Heads in another order, in the weights and in the norm alike, compute the same; in the norm alone they do not.
    let (heads, width) = (4, 6);
    let turned = |i: usize| (i + width) % (heads * width);
    let norm = layer(0, "self_attn.q_norm.weight");
    Trap::of("olmo2").rows(&norm, turned).assert_seen();
}

#[test]
fn smollm_s_list_says_which_layers_have_rope() {
    let trap = Trap::of("smollm3");
    assert_eq!(trap.config.model.with_short_patterns().rope_layers, [1, 1, 0]);
    trap.with(|model| model.rope_layers = vec![0, 0, 1, 0]).assert_seen();
    Trap::of("smollm3").with(|model| model.rope_layers = Vec::new()).assert_seen();
}

#[test]
fn gpt_oss_has_gate_and_up_by_turns() {
    let half = 16;
    for name in ["gate_up_proj", "gate_up_proj_bias"] {
        let name = layer(0, &format!("mlp.experts.{name}"));
        Trap::of("gpt_oss").columns(&name, |i| i % 2 * half + i / 2).assert_seen();
    }
}

#[test]
fn gpt_oss_has_matrices_of_experts_by_inputs_where_no_shape_says_so() {
    let mut trap = Trap::of("gpt_oss_plain");
    let name = layer(0, "mlp.experts.down_proj");
    let (data, shape) = (trap.golden.f32(&name), trap.shape(&name));
    let [_, rows, columns] = shape[..] else { panic!("{shape:?}") };
    assert_eq!(rows, columns);
    let at = |i: usize| i - i % (rows * columns) + i % columns * columns + i % (rows * columns) / columns;
    put(&mut trap.golden, &name, (0..data.len()).map(|i| data[at(i)]));
    trap.assert_seen();
}

#[test]
fn gpt_oss_s_sinks_take_from_every_softmax() {
    Trap::of("gpt_oss").each(&layer(0, "self_attn.sinks"), |_| -1e4).assert_seen();
    // They are not divided by the root of the head's width.
    Trap::of("gpt_oss").each(&layer(0, "self_attn.sinks"), |sink| sink / 10f32.sqrt()).assert_seen();
}

#[test]
fn gpt_oss_interpolates_between_frequencies_that_are_not_whole_and_multiplies_by_yarn_s_factor() {
    let whole = |scaling: &mut RopeScalingConfig| {
        if let RopeScalingConfig::Yarn { truncate, .. } = scaling {
            *truncate = true;
        }
    };
    let no_factor = |scaling: &mut RopeScalingConfig| {
        if let RopeScalingConfig::Yarn { attention_factor, .. } = scaling {
            *attention_factor = Some(1.0);
        }
    };
    Trap::of("gpt_oss").with(|model| scaling(model, whole)).assert_seen();
    Trap::of("gpt_oss").with(|model| scaling(model, no_factor)).assert_seen();
}

#[test]
fn gpt_oss_has_a_window_in_its_first_layer_and_not_in_its_second() {
    Trap::of("gpt_oss").with(|model| model.layer_types.reverse()).assert_seen();
}

#[test]
fn gpt_oss_clamps_gate_and_up() {
    Trap::of("gpt_oss").with(|model| model.swiglu_limit = Some(7.0)).assert_seen();
}

/// A weight of the right shape under another name passes all checks of names and shapes.
#[test]
fn norms_of_one_shape_under_each_other_s_names_are_seen() {
    let names = ["input_layernorm", "post_attention_layernorm"].map(|name| layer(0, &format!("{name}.weight")));
    for case in ["llama_mha", "deepseek_v3", "gpt_oss", "qwen3", "smollm3"] {
        Trap::of(case).swapped([&names[0], &names[1]]).assert_seen();
    }
}
