"""Golden values for families whose layers differ, from Hugging Face transformers: as `llama.py`, which says what the files hold, and the
`losses` of ten steps, as `experts.py` does; `losses_in_float32` are those of the same model in float32, which for Gemma 3 part from them by 5%,
as AdamW's first updates are of one size however small a gradient is.

The metadata of these files is the whole `config.json`. Windows are shorter than the sequences, and so are the contexts
that RoPE is scaled from. Last run with torch 2.15.0 and transformers 5.23.0.
"""

import copy
import json
from pathlib import Path

import experts
import torch
from llama import golden, write
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SHAPE = dict(
    num_hidden_layers=4, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, intermediate_size=36,
    max_position_embeddings=128, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

CASES = {
    # Every third layer has no RoPE; that of the others is scaled.
    "smollm3": dict(
        SHAPE, model_type="smollm3", vocab_size=53, no_rope_layers=[1, 1, 0, 1], rope_parameters=YARN | {"truncate": False},
    ),
    "olmo2": dict(SHAPE, model_type="olmo2", vocab_size=53, rope_parameters=DEFAULT),
    # As many key heads as query heads; which layers slide is what the class takes by itself.
    "olmo3": dict(
        SHAPE, model_type="olmo3", vocab_size=59, num_key_value_heads=4, sliding_window=5,
        rope_parameters={"full_attention": YARN, "sliding_attention": DEFAULT},
    ),
    # A softmax scale that is not of the heads' width, and a scaling of full layers alone.
    "gemma3_text": dict(
        SHAPE, model_type="gemma3_text", vocab_size=61, num_key_value_heads=1, head_dim=10, query_pre_attn_scalar=7,
        sliding_window=5, layer_types=KINDS,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}, "sliding_attention": DEFAULT,
        },
    ),
}


def config_of(case):
    config = CONFIG_MAPPING[case["model_type"]].from_dict(json.loads(json.dumps(case)))
    config._attn_implementation = "eager"
    return config


def build(case):
    return AutoModelForCausalLM.from_config(config_of(case))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, (name, case) in enumerate(CASES.items()):
        model, tensors = golden(case, seed, build)
        tokens, targets = tensors["tokens"].long(), tensors["targets"].long()
        tensors["losses"] = experts.train(model, tokens, targets)
        tensors["losses_in_float32"] = experts.train(copy.deepcopy(model).float(), tokens, targets)
        fields = {key: value for key, value in config_of(case).to_dict().items() if not key.startswith("_")}
        metadata = {"config": json.dumps(fields, sort_keys=True)}
        path = Path(__file__).with_name(f"{name}.safetensors")
        write(path, tensors, metadata)
        loss = tensors["loss"].item()
        print(f"{path.name}: loss {loss:.6f}, {path.stat().st_size} bytes")
