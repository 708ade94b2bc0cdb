//! `train --debug-nans` names the first number that is not finite.

mod common;

use common::{Place, plant};

#[test]
fn a_nan_in_a_weight_is_named_with_its_tensor_op_layer_and_micro_batch() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--quiet", "--run-dir", "run"]);
    place.ok(&["checkpoint", "export", "run", "--out", "hf"]);
    plant(&place.path("hf/model.safetensors"), "model.layers.1.mlp.down_proj.weight", f32::NAN);
    let train = |dir: &'static str, more: &[&'static str]| {
        let mut args = vec!["train", "run.toml", "--quiet", "--run-dir", dir, "--set", "train.init_from=hf"];
        args.extend(["--set", "train.validation_sequences=0", "--set", "train.micro_batch=2", "--debug-nans"]);
        args.extend(more);
        args
    };
    let text = place.fails(1, &train("one", &[]));
    let expected = "error: step 1: `layers.1.ffn_out` has NaN at element 0 of 3,072: made by linear in layer 1, forward, micro-batch 0; \
                    not finite were already `layers.1.wdown`\n";
    assert_eq!(text, expected);
    // The stage that has the layer.
    let text = place.fails(1, &train("two", &["--set", "parallel.pp=2"]));
    assert!(
        text.starts_with("error: step 1: rank 1 ") && text.contains("made by linear in layer 1, forward"),
        "{text}"
    );
}

#[test]
fn what_training_itself_makes_infinite_is_named_and_else_nothing_changes() {
    let place = Place::new();
    let set =
        ["--set", "optimizer.lr=1e30", "--set", "optimizer.warmup_steps=0", "--set", "train.validation_sequences=0"];
    let text =
        place.fails(1, &[&["train", "run.toml", "--quiet", "--run-dir", "wild", "--debug-nans"][..], &set].concat());
    // Norms keep what is forward finite, however large weights are.
    let expected =
        "error: step 2: `grad.final_norm` has NaN at element 0 of 48: made by rms_norm_grad_weight, backward";
    assert!(text.starts_with(expected), "{text}");
    place.ok(&["train", "run.toml", "--quiet", "--run-dir", "plain"]);
    place.ok(&["train", "run.toml", "--quiet", "--run-dir", "looked", "--debug-nans"]);
    assert_eq!(place.trajectory("looked"), place.trajectory("plain"));
}
