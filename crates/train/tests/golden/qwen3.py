"""Golden values for Qwen 3, from Hugging Face transformers: as `llama.py`, which says what the files hold."""

from llama import shape, store
from transformers import Qwen3Config, Qwen3ForCausalLM

CASES = {
    "qwen3": dict(
        architecture="qwen3", vocab_size=53, layers=2, dim=24, heads=4, kv_heads=2, head_dim=10, ffn=40,
        rope_theta=1000000.0, norm_eps=1e-6, tied=False,
    ),
    "qwen3_tied": dict(
        architecture="qwen3", vocab_size=61, layers=2, dim=32, heads=4, kv_heads=1, head_dim=8, ffn=48,
        rope_theta=1000000.0, norm_eps=1e-6, tied=True,
    ),
}


def build(case):
    return Qwen3ForCausalLM(Qwen3Config(**shape(case), head_dim=case["head_dim"]))


if __name__ == "__main__":
    store(CASES, build)
