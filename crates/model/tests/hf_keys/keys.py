"""Asks Hugging Face transformers what every key of `config.json` does, and writes `keys.json`.

Run as `python keys.py` in this folder. It needs the packages torch (CPU will do) and transformers; no network. Last run
with torch 2.15.0 and transformers 5.23.0.

A small model of every family that is imported has random weights. Keys are those of all config classes, the names that
classes map to others, and those that files of earlier versions have. Each is given another value, one at a time, and
the model is built and run again on the same weights and the same tokens. `keys.json` has, by `model_type`:

    base       the config.json of the small model, every key written out
    defaults   what transformers takes for a key of the class that is not there
    same       other names of a key that the class takes for it
    changes    [key, value, effect] of every key of the class, and of others that have an effect; a key `a.b` is `b` in the
               object `a`

An effect is one of

    none       the model and its logits have the same bits, and so has the loss
    loss       logits have the same bits, the loss has not
    logits     logits are others
    shape      the model has other tensors
    refused    transformers does not build or run such a model
"""

import copy
import json
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

logging.set_verbosity(50)
warnings.filterwarnings("ignore")

SEQ = 24
LLAMA = dict(
    vocab_size=53, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=40, max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    pad_token_id=None, bos_token_id=1, eos_token_id=2,
)
DEFAULT = {"rope_type": "default", "rope_theta": 20000.0}
KINDS = ["sliding_attention", "full_attention"]
BY_KIND = {"full_attention": DEFAULT, "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
MOE = LLAMA | dict(num_experts_per_tok=2, moe_intermediate_size=12)
LATENT = dict(
    num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1,
    kv_lora_rank=8, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
)
MODELS = {
    "llama": LLAMA | dict(head_dim=8),
    "mistral": LLAMA | dict(head_dim=8, sliding_window=None),
    "qwen2": LLAMA,
    "qwen3": LLAMA | dict(head_dim=8),
    "mixtral": LLAMA | dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": MOE | dict(num_experts=4),
    "olmoe": LLAMA | dict(num_experts=4, num_experts_per_tok=2),
    "dots1": MOE | dict(
        head_dim=8, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, sliding_window=None,
        n_group=2, topk_group=1,
    ),
    "deepseek_v2": MOE | LATENT | dict(topk_method="group_limited_greedy"),
    "deepseek_v3": MOE | LATENT,
    "gpt_oss": LLAMA | dict(
        head_dim=8, num_local_experts=6, num_experts_per_tok=3, sliding_window=5, layer_types=KINDS, swiglu_limit=0.01,
    ),
    "smollm3": LLAMA | dict(no_rope_layers=[1, 0]),
    "olmo2": LLAMA,
    "olmo3": LLAMA | dict(sliding_window=5, layer_types=KINDS, rope_parameters=BY_KIND),
    "gemma3_text": LLAMA | dict(
        head_dim=8, query_pre_attn_scalar=6, sliding_window=5, layer_types=KINDS, rope_parameters=BY_KIND,
    ),
    "gpt2": dict(
        vocab_size=53, n_embd=32, n_layer=2, n_head=4, n_positions=128, pad_token_id=None, bos_token_id=1,
        eos_token_id=2,
    ),
}

LLAMA3 = {"rope_type": "llama3", "rope_theta": 20000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}

YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 20000.0, "original_max_position_embeddings": 16}

# Other values of keys that no class of these has, or whose type does not say which values make sense.
VALUES = {
    "architectures": [["OtherForCausalLM"]],
    "attention_bias": [True],
    "activation_function": ["relu"],
    "attn_logit_softcapping": [0.5],
    "final_logit_softcapping": [0.5],
    "hidden_activation": ["gelu", "silu"],
    "clip_qkv": [0.01],
    "decoder_sparse_step": [2],
    "dtype": ["bfloat16"],
    "first_k_dense_replace": [0],
    "head_dim": [16],
    "hidden_act": ["gelu"],
    "hidden_size": [64],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "is_causal": [False],
    "is_decoder": [True],
    "label2id": [{"a": 0, "b": 1, "c": 2}],
    "layer_types": [
        ["full_attention", "sliding_attention"], ["sliding_attention", "sliding_attention"],
        ["full_attention", "full_attention"],
    ],
    "max_position_embeddings": [64],
    "max_window_layers": [1],
    "mlp_only_layers": [[0]],
    "n_embd": [64],
    "n_group": [1, 4],
    "n_inner": [40],
    "n_positions": [64],
    "no_rope_layers": [[1, 1], [0, 1], [1, 0, 1]],
    "norm_topk_prob": [True, False],
    "num_attention_heads": [2],
    "n_head": [2],
    "num_key_value_heads": [4, 2],
    "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5],
    "q_lora_rank": [None, 6],
    "qk_rope_head_dim": [2],
    "per_layer_config": [{"1": {"intermediate_size": 24}}],
    "problem_type": ["regression"],
    "quantization_config": [{"quant_method": "fp8"}],
    "rms_norm_eps": [0.1],
    "layer_norm_epsilon": [0.1],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 300.0}, LLAMA3,
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 20000.0},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 20000.0, "original_max_position_embeddings": 16},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0, "mscale_all_dim": 0.7},
        BY_KIND | {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}},
        BY_KIND | {"full_attention": YARN}, BY_KIND | {"full_attention": YARN | {"truncate": False}},
        BY_KIND | {"sliding_attention": YARN}, {"full_attention": DEFAULT}, {"sliding_attention": DEFAULT},
    ],
    "rope_parameters.attention_factor": [2.0],
    "rope_parameters.factor": [2.0],
    "rope_parameters.original_max_position_embeddings": [16],
    "rope_parameters.partial_rotary_factor": [0.5],
    "rope_parameters.rope_theta": [300.0],
    "rope_parameters.rope_type": ["linear"],
    "rope_parameters.type": ["linear"],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}, LLAMA3],
    "rope_local_base_freq": [300.0],
    "rope_theta": [300.0],
    "scale_attn_weights": [False],
    "sliding_window": [5, 3],
    "sliding_window_pattern": [2, 3],
    "summary_activation": ["tanh"],
    "topk_group": [2],
    "topk_method": ["greedy", "noaux_tc"],
    "torch_dtype": ["bfloat16"],
    "transformers_version": ["4.0.0"],
    "use_sliding_window": [True],
    "vocab_size": [59],
}

# Keys of files of earlier versions, and keys that any model may have.
OLD = {"head_dim", "is_causal", "original_max_position_embeddings", "partial_rotary_factor", "per_layer_config",
       "quantization_config", "rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern", "torch_dtype"}


def others(key, value):
    if key in VALUES:
        return [other for other in VALUES[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value + 0.25]
    if isinstance(value, str):
        return ["other"]
    return [1]


def build(fields):
    fields = copy.deepcopy(fields)
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def run(model, tokens):
    with torch.no_grad():
        out = model(tokens, labels=tokens, use_cache=False, return_dict=True)
    return out.logits, out.loss


def effect(fields, weights, expected, tokens):
    try:
        model = build(fields)
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        if shapes != {name: value.shape for name, value in weights.items()}:
            return "shape"
        model.load_state_dict(weights)
        logits, loss = run(model, tokens)
    except Exception:
        return "refused"
    if not torch.equal(logits, expected[0]):
        return "logits"
    return "none" if torch.equal(loss, expected[1]) else "loss"


def changed(base, key, value):
    fields = copy.deepcopy(base)
    outer, _, inner = key.partition(".")
    if inner:
        fields[outer] = dict(fields.get(outer) or {}) | {inner: value}
    else:
        fields[outer] = value
    return fields


def plain(fields):
    return json.loads(json.dumps(fields, default=str))


def main():
    bases, same = {}, {}
    for name, sizes in MODELS.items():
        config = CONFIG_MAPPING[name](**copy.deepcopy(sizes))
        bases[name] = {key: value for key, value in plain(config.to_dict()).items() if not key.startswith("_")}
        same[name] = dict(config.attribute_map)
    union = set(VALUES).union(*bases.values(), *same.values())
    result = {}
    for name, base in bases.items():
        torch.manual_seed(7)
        tokens = torch.randint(0, 53, (2, SEQ))
        model = build(base)
        # Far from the initial values, so that no effect is lost in rounding.
        weights = {key: torch.randn_like(value) * 0.3 for key, value in model.state_dict().items()}
        if "lm_head.weight" in weights and base["tie_word_embeddings"]:
            embedding = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
            weights["lm_head.weight"] = weights[embedding]
        model.load_state_dict(weights)
        expected = run(model, tokens)
        changes = []
        for key in sorted(union - {"model_type"}):
            outer, _, inner = key.partition(".")
            value = base.get(outer)
            # Another name stands in the place of the key that it means.
            target = same[name].get(key)
            if target is not None:
                value = base[target]
            for other in others(key, value.get(inner) if inner and isinstance(value, dict) else value):
                fields = changed(base, key, other)
                if target is not None:
                    del fields[target]
                found = effect(fields, weights, expected, tokens)
                # What this family's class does not have matters where it has an effect.
                if outer in base or target is not None or key in OLD or found != "none":
                    changes.append([key, other, found])
        defaults = {}
        for key in base:
            try:
                fields = {k: copy.deepcopy(v) for k, v in base.items() if k != key}
                defaults[key] = plain(CONFIG_MAPPING[name].from_dict(fields).to_dict()).get(key)
            except Exception:
                pass
        defaults.pop("model_type", None)
        result[name] = {"base": base, "defaults": defaults, "same": same[name], "changes": changes}
    rows = []
    for name, family in result.items():
        one = lambda value: json.dumps(value, sort_keys=True)
        changes = ",\n".join(f"   {one(change)}" for change in family["changes"])
        rows.append(
            f' "{name}": {{\n  "base": {one(family["base"])},\n  "defaults": {one(family["defaults"])},\n'
            f'  "same": {one(family["same"])},\n  "changes": [\n{changes}\n  ]\n }}'
        )
    Path(__file__).with_name("keys.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
