"""Matrices in fp8, from Hugging Face transformers: a small DeepSeek-V3 as it is published, and what its numbers stand for in bf16.

Run as `python fp8.py` in this folder. `fp8.safetensors` has its `config.json` as metadata, and by names in a file:

    file.*        the weights as published: matrices in float8_e4m3fn, each with a float32 `*_scale_inv` for every block of 128 x 128;
                  embeddings, head, norms and router in bf16, the bias of the choice in float32
    expected.*    the same in bf16, the bias in float32

What transformers makes of whole blocks is what is stored. It takes other blocks than the model was quantised with where a matrix ends
within one; these are dequantised as the model's authors do it, who cut the blocks at the edge. Last run with transformers 5.23.0.
"""

import json
from pathlib import Path

import llama
import torch
from parts import build, config_of
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import experts

BLOCK = 128
CASE = dict(
    model_type="deepseek_v3", vocab_size=53, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=256, n_shared_experts=4, n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=36, n_group=1,
    topk_group=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=144, qk_nope_head_dim=48, qk_rope_head_dim=16,
    v_head_dim=48, max_position_embeddings=128, pad_token_id=None, bos_token_id=0, eos_token_id=1,
)
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight")


def dequantised(numbers, scales):
    """A scale for each block of 128 x 128, cut at the edges."""
    rows, columns = numbers.shape
    wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    found = (numbers.to(torch.float32) * wide).to(torch.bfloat16)
    if all(size <= BLOCK or size % BLOCK == 0 for size in (rows, columns)):
        theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.bfloat16)
        assert torch.equal(theirs, found)
        return theirs
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(11)
    config, model = config_of(CASE), build(CASE)
    weights = {n: p for name, p in model.named_parameters() for n, p in experts.split(name, p.detach(), False)}
    tensors, whole = {}, 0
    for name, weight in weights.items():
        drawn = 0.1 * torch.randn(weight.shape, generator=rng)
        if any(word in name for word in PLAIN):
            tensors[f"file.{name}"] = drawn.to(torch.bfloat16)
            tensors[f"expected.{name}"] = tensors[f"file.{name}"].clone()
            continue
        numbers = (drawn * 1000).clamp(-448, 448).to(torch.float8_e4m3fn)
        grid = [-(-size // BLOCK) for size in weight.shape]
        scales = torch.exp(torch.randn(grid, generator=rng)) * 1e-3
        tensors[f"file.{name}"], tensors[f"file.{name}_scale_inv"] = numbers, scales
        tensors[f"expected.{name}"] = dequantised(numbers, scales)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # Of a size at which bf16 has no fractions.
            drawn = 300.0 + torch.randn(buffer.shape, generator=rng)
            tensors[f"file.{name}"], tensors[f"expected.{name}"] = drawn, drawn.clone()
    fields = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    fields["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }
    fields["dtype"] = "bfloat16"
    path = Path(__file__).with_name("fp8.safetensors")
    llama.write(path, tensors, {"config": json.dumps(fields, sort_keys=True)})
    print(f"{path.name}: {path.stat().st_size} bytes")
