"""Golden values for gpt-oss, from Hugging Face transformers: as `experts.py`, which says what the files hold, but with the tensors of all experts
as transformers has them.

The metadata of these files is the whole `config.json`. Windows are shorter than the sequences. The context that RoPE is scaled from is such that
the range of frequencies between which YaRN interpolates ends between two of them, so that it matters whether it is truncated.
Last run with torch 2.15.0 and transformers 5.23.0.
"""

import json
from pathlib import Path

import experts
import llama
import torch
from parts import build, config_of

SHAPE = dict(
    model_type="gpt_oss", hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
    num_experts_per_tok=3, max_position_embeddings=128, pad_token_id=None, bos_token_id=1, eos_token_id=2,
    experts_implementation="eager",
)

CASES = {
    # Layers with a window and without, a RoPE as published models have it, and a limit that clamps a good part of gate and up.
    "gpt_oss": dict(
        SHAPE, vocab_size=53, num_hidden_layers=4, intermediate_size=16, num_local_experts=6, sliding_window=5,
        swiglu_limit=0.4,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 223,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    ),
    # As wide inside as outside, so that no shape says which way round a matrix is; no window and no scaling.
    "gpt_oss_plain": dict(
        SHAPE, vocab_size=59, num_hidden_layers=2, intermediate_size=24, num_local_experts=5,
        layer_types=["full_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
    ),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, (name, case) in enumerate(CASES.items()):
        model, tensors = llama.golden(case, seed, build)
        tokens, targets = tensors["tokens"].long(), tensors["targets"].long()
        tensors |= {"losses": experts.train(model, tokens, targets), "greedy": experts.greedy(model, tokens)}
        fields = {key: value for key, value in config_of(case).to_dict().items() if not key.startswith("_")}
        path = Path(__file__).with_name(f"{name}.safetensors")
        llama.write(path, tensors, {"config": json.dumps(fields, sort_keys=True)})
        print(f"{path.name}: loss {tensors['loss'].item():.6f}, {path.stat().st_size} bytes")
