"""Golden values for Qwen 2, from Hugging Face transformers: as `llama.py`, which says what the files hold."""

from llama import shape, store
from transformers import Qwen2Config, Qwen2ForCausalLM

CASES = {
    "qwen2": dict(
        architecture="qwen2", vocab_size=53, layers=2, dim=24, heads=4, kv_heads=2, head_dim=6, ffn=40,
        rope_theta=1000000.0, norm_eps=1e-6, tied=False,
    ),
    "qwen2_tied": dict(
        architecture="qwen2", vocab_size=61, layers=2, dim=32, heads=4, kv_heads=1, head_dim=8, ffn=48,
        rope_theta=1000000.0, norm_eps=1e-6, tied=True,
    ),
}


def build(case):
    return Qwen2ForCausalLM(Qwen2Config(**shape(case)))


if __name__ == "__main__":
    store(CASES, build)
