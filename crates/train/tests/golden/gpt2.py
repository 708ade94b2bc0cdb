"""Golden values for GPT-2, from Hugging Face transformers: as `llama.py`, which says what the files hold.

Projections have the shape that GPT-2's checkpoints give them, [in, out].
"""

from llama import store
from transformers import GPT2Config, GPT2LMHeadModel

CASES = {
    "gpt2": dict(
        architecture="gpt2", vocab_size=53, layers=2, dim=30, heads=6, ffn=40, positions=12, norm_eps=1e-5, tied=True,
    ),
    "gpt2_untied": dict(
        architecture="gpt2", vocab_size=40, layers=2, dim=24, heads=4, ffn=96, positions=20, norm_eps=1e-5, tied=False,
    ),
}


def build(case):
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=case["vocab_size"],
        n_layer=case["layers"],
        n_embd=case["dim"],
        n_head=case["heads"],
        n_inner=case["ffn"],
        n_positions=case["positions"],
        layer_norm_epsilon=case["norm_eps"],
        tie_word_embeddings=case["tied"],
        activation_function="gelu_new",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation="eager",
    ))


if __name__ == "__main__":
    store(CASES, build)
