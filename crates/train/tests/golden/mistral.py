"""Golden values for Mistral, from Hugging Face transformers: as `llama.py`, which says what the files hold.

The window is shorter than the sequences, so that most queries do not see the first keys.
"""

from llama import store
from transformers import MistralConfig, MistralForCausalLM

CASES = {
    "mistral": dict(
        architecture="mistral", vocab_size=53, layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn=40,
        rope_theta=10000.0, norm_eps=1e-5, window=5, tied=False,
    ),
}


def build(case):
    return MistralForCausalLM(MistralConfig(
        vocab_size=case["vocab_size"],
        num_hidden_layers=case["layers"],
        hidden_size=case["dim"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        intermediate_size=case["ffn"],
        rms_norm_eps=case["norm_eps"],
        sliding_window=case["window"],
        tie_word_embeddings=case["tied"],
        rope_parameters={"rope_type": "default", "rope_theta": case["rope_theta"]},
        max_position_embeddings=128,
        attn_implementation="eager",
    ))


if __name__ == "__main__":
    store(CASES, build)
