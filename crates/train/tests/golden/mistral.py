"""Golden values for Mistral, from Hugging Face transformers: as `llama.py`, which says what the files hold.

The window is shorter than the sequences, so that most queries do not see the first keys.
"""

from llama import shape, store
from transformers import MistralConfig, MistralForCausalLM

CASES = {
    "mistral": dict(
        architecture="mistral", vocab_size=53, layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn=40,
        rope_theta=10000.0, norm_eps=1e-5, window=5, tied=False,
    ),
}


def build(case):
    return MistralForCausalLM(MistralConfig(**shape(case), head_dim=case["head_dim"], sliding_window=case["window"]))


if __name__ == "__main__":
    store(CASES, build)
