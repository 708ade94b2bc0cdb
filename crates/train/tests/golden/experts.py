"""Golden values for mixtures of experts, from Hugging Face transformers: as `llama.py`, which says what the files hold.

Transformers keeps the matrices of all experts in one tensor; files have one for
each expert, and these are the names that are stored here. Besides:

    losses            float32 [10], before each of ten steps of AdamW on the batch (lr 0.01, betas 0.9 and 0.95, no decay)
    greedy            int32 [64], the tokens that follow the first four of the first sequence, by greedy decoding

Transformers has no class for DeepSeek-MoE, whose own code is loaded from its
folder: its model here is Llama's with the mixture of DeepSeek-V2 (softmax
scores, not normalised, shared experts) in all layers but the first.
"""

import copy

import llama
import torch
from llama import shape
from torch.nn.functional import cross_entropy
from transformers import (
    DeepseekV2Config, Dots1Config, Dots1ForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig,
    MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

CASES = {
    "mixtral": dict(
        architecture="mixtral", vocab_size=53, layers=2, dim=24, heads=4, kv_heads=2, head_dim=6, ffn=40,
        experts=5, experts_per_token=2, rope_theta=1000000.0, norm_eps=1e-5, tied=False,
    ),
    "qwen3_moe": dict(
        architecture="qwen3_moe", vocab_size=61, layers=2, dim=32, heads=4, kv_heads=2, head_dim=10, ffn=48,
        experts=9, experts_per_token=3, expert_ffn=20, norm_topk=False, rope_theta=1000000.0, norm_eps=1e-6, tied=True,
    ),
    "olmoe": dict(
        architecture="olmoe", vocab_size=47, layers=2, dim=24, heads=4, kv_heads=2, head_dim=6, ffn=20,
        experts=7, experts_per_token=3, norm_topk=False, rope_theta=10000.0, norm_eps=1e-5, tied=False,
    ),
    "deepseek": dict(
        architecture="deepseek", vocab_size=43, layers=3, dim=24, heads=4, kv_heads=4, head_dim=6, ffn=44,
        experts=7, experts_per_token=3, expert_ffn=12, shared_experts=2, dense_layers=1, norm_topk=False,
        rope_theta=10000.0, norm_eps=1e-6, tied=False,
    ),
    "dots1": dict(
        architecture="dots1", vocab_size=59, layers=3, dim=20, heads=4, kv_heads=2, head_dim=10, ffn=36,
        experts=12, experts_per_token=3, expert_ffn=12, shared_experts=1, dense_layers=1, norm_topk=True,
        router_scale=2.5, expert_groups=4, expert_top_groups=2, rope_theta=10000.0, norm_eps=1e-6, tied=False,
    ),
}


def build(case):
    common = dict(num_experts_per_tok=case["experts_per_token"], experts_implementation="eager")
    if case["architecture"] == "mixtral":
        return MixtralForCausalLM(
            MixtralConfig(**shape(case), **common, head_dim=case["head_dim"], num_local_experts=case["experts"])
        )
    common |= dict(norm_topk_prob=case["norm_topk"])
    if case["architecture"] == "olmoe":
        return OlmoeForCausalLM(OlmoeConfig(**shape(case), **common, num_experts=case["experts"], pad_token_id=None))
    common |= dict(moe_intermediate_size=case["expert_ffn"])
    if case["architecture"] == "qwen3_moe":
        more = dict(num_experts=case["experts"], head_dim=case["head_dim"])
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape(case), **common, **more))
    common |= dict(
        n_routed_experts=case["experts"], n_shared_experts=case["shared_experts"],
        first_k_dense_replace=case["dense_layers"],
    )
    if case["architecture"] == "deepseek":
        model = LlamaForCausalLM(LlamaConfig(**shape(case), head_dim=case["head_dim"]))
        config = DeepseekV2Config(**shape(case), **common, topk_method="greedy", routed_scaling_factor=1.0)
        for layer in model.model.layers[case["dense_layers"]:]:
            layer.mlp = DeepseekV2Moe(config)
        return model
    more = dict(
        head_dim=case["head_dim"], routed_scaling_factor=case["router_scale"], n_group=case["expert_groups"],
        topk_group=case["expert_top_groups"], sliding_window=None,
    )
    return Dots1ForCausalLM(Dots1Config(**shape(case), **common, **more))


def split(name, tensor, mixtral):
    """The tensors of a file that a parameter stands for."""
    if mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    base, _, last = name.rpartition(".")
    if last not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
        yield name, tensor
        return
    for e, w in enumerate(tensor):
        if last == "down_proj":
            yield f"{base}.{e}.{down}.weight", w.contiguous()
            continue
        for part, w in zip((gate, up), w.chunk(2)):
            yield f"{base}.{e}.{part}.weight", w.contiguous()


def with_biases(build, seed):
    """The biases of choices are no parameters: they are drawn before these."""

    def make(case):
        model, rng = build(case), torch.Generator().manual_seed(1000 + seed)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=rng))
        return model

    return make


def train(model, tokens, targets):
    """The losses before ten steps, of a copy."""
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for _ in range(10):
        optimizer.zero_grad()
        logits = model(tokens, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return torch.tensor(losses, dtype=torch.float32)


def greedy(model, tokens):
    seen = tokens[:1, :4]
    with torch.no_grad():
        for _ in range(64):
            best = model(seen, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            seen = torch.cat([seen, best], 1)
    return seen[0, 4:].to(torch.int32)


def golden(case, seed, build):
    model, tensors = whole(case, seed, with_biases(build, seed))
    tokens, targets = tensors["tokens"].long(), tensors["targets"].long()
    found = {"losses": train(model, tokens, targets), "greedy": greedy(model, tokens)}
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensors[f"param.{name}"] = buffer.to(torch.float32)
    for name, tensor in tensors.items():
        kind, dot, rest = name.partition(".")
        if not dot:
            found[name] = tensor
            continue
        for part, w in split(rest, tensor, case["architecture"] == "mixtral"):
            found[f"{kind}.{part}"] = w
    return model, found


if __name__ == "__main__":
    whole, llama.golden = llama.golden, golden
    llama.store(CASES, build)
