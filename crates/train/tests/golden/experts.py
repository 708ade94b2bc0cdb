"""Golden values for mixtures of experts, from Hugging Face transformers: as `llama.py`, which says what the files hold.

Transformers keeps the matrices of all experts in one tensor; files have one for
each expert, and these are the names that are stored here.
"""

import llama
from llama import shape
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

CASES = {
    "mixtral": dict(
        architecture="mixtral", vocab_size=53, layers=2, dim=24, heads=4, kv_heads=2, head_dim=6, ffn=40,
        experts=5, experts_per_token=2, rope_theta=1000000.0, norm_eps=1e-5, tied=False,
    ),
    "qwen3_moe": dict(
        architecture="qwen3_moe", vocab_size=61, layers=2, dim=32, heads=4, kv_heads=2, head_dim=10, ffn=48,
        experts=9, experts_per_token=3, expert_ffn=20, norm_topk=False, rope_theta=1000000.0, norm_eps=1e-6, tied=True,
    ),
}


def build(case):
    common = dict(num_experts_per_tok=case["experts_per_token"], head_dim=case["head_dim"], experts_implementation="eager")
    if case["architecture"] == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**shape(case), **common, num_local_experts=case["experts"]))
    more = dict(num_experts=case["experts"], moe_intermediate_size=case["expert_ffn"], norm_topk_prob=case["norm_topk"])
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape(case), **common, **more))


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


def golden(case, seed, build):
    model, tensors = whole(case, seed, build)
    found = {}
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
