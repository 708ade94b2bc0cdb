"""Golden values for families with latent attention (MLA), from Hugging Face transformers: as `experts.py`, which says what the files hold.

The metadata of these files is the whole `config.json`. Heads of V are narrower than those of Q and K, in one case wider; contexts that
RoPE is scaled from are shorter than the sequences. Last run with transformers 5.23.0.
"""

import json
from pathlib import Path

import experts
import llama
import torch
from parts import build, config_of

SHAPE = dict(
    num_hidden_layers=3, hidden_size=24, num_attention_heads=4, num_key_value_heads=4, intermediate_size=36,
    n_shared_experts=2, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, first_k_dense_replace=1,
    kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, max_position_embeddings=128,
    pad_token_id=None, bos_token_id=1, eos_token_id=2, experts_implementation="eager",
)


def yarn(mscale, mscale_all_dim):
    return {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 8,
        "beta_fast": 32, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale_all_dim,
    }


CASES = {
    # Queries without a latent, a free choice of experts: DeepSeek-V2-Lite.
    "deepseek_v2_lite": dict(
        SHAPE, model_type="deepseek_v2", vocab_size=53, q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy",
        rope_parameters=yarn(0.707, 0.707),
    ),
    # Groups of which the best expert counts, a scale of the weights: DeepSeek-V2.
    "deepseek_v2": dict(
        SHAPE, model_type="deepseek_v2", vocab_size=59, q_lora_rank=9, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0, rope_parameters=yarn(1.0, 0.5),
    ),
    # Sigmoid scores, a bias of the choice, groups of which the two best experts count: DeepSeek-V3.
    "deepseek_v3": dict(
        SHAPE, model_type="deepseek_v3", vocab_size=61, q_lora_rank=9, n_group=4, topk_group=2, rms_norm_eps=1e-5,
        rope_parameters=yarn(1.0, 1.0),
    ),
    # No scaling of RoPE, and heads of V that are wider than those of Q and K.
    "deepseek_v3_wide": dict(
        SHAPE, model_type="deepseek_v3", vocab_size=47, q_lora_rank=None, n_group=1, topk_group=1, v_head_dim=13,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
    ),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    experts.whole = llama.golden
    for seed, (name, case) in enumerate(CASES.items()):
        _, tensors = experts.golden(case | {"architecture": case["model_type"]}, seed, build)
        fields = {key: value for key, value in config_of(case).to_dict().items() if not key.startswith("_")}
        path = Path(__file__).with_name(f"{name}.safetensors")
        llama.write(path, tensors, {"config": json.dumps(fields, sort_keys=True)})
        print(f"{path.name}: loss {tensors['loss'].item():.6f}, {path.stat().st_size} bytes")
