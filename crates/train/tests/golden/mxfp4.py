"""Experts in mxfp4, from Hugging Face transformers: a small gpt-oss as it is published, and what transformers makes of it in bf16.

Run as `python mxfp4.py` in this folder. `mxfp4.safetensors` has its `config.json` as metadata, and by names in a file:

    file.*        the weights as published: `*_blocks` and `*_scales` of the experts' matrices (uint8, random), all others in bf16
    expected.*    bf16, the weights that `transformers` computes with

Scales are from 2^-12 to 2^3, and one is the smallest there is. Last run with transformers 5.23.0.
"""

import json
from pathlib import Path

import llama
import torch
from parts import build, config_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CASE = dict(
    model_type="gpt_oss", vocab_size=53, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, intermediate_size=64, num_local_experts=3, num_experts_per_tok=2, sliding_window=5,
    max_position_embeddings=128, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(7)
    config = config_of(CASE)
    tensors = {}
    for name, parameter in build(CASE).named_parameters():
        if parameter.dim() < 3:
            tensors[f"file.{name}"] = (0.1 * torch.randn(parameter.shape, generator=rng)).to(torch.bfloat16)
            tensors[f"expected.{name}"] = tensors[f"file.{name}"].clone()
            continue
        experts, inputs, outputs = parameter.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=rng, dtype=torch.uint8)
        scales = torch.randint(115, 131, (experts, outputs, inputs // 32), generator=rng, dtype=torch.uint8)
        scales[0, 0, 0] = 1
        tensors[f"file.{name}_blocks"], tensors[f"file.{name}_scales"] = blocks, scales
        tensors[f"expected.{name}"] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
        assert tensors[f"expected.{name}"].shape == parameter.shape
    fields = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    path = Path(__file__).with_name("mxfp4.safetensors")
    llama.write(path, tensors, {"config": json.dumps(fields, sort_keys=True)})
    print(f"{path.name}: {path.stat().st_size} bytes")
