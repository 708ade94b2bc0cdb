"""Golden values for the Llama model, from Hugging Face transformers.

Run as `python llama.py`; it writes one `<case>.safetensors` per case next to
itself, the same bytes on every run. Last run with Python 3.11, torch 2.15.0,
transformers 5.22.2, safetensors 0.8.0 and numpy 2.4.6.

Each file holds, with the case's configuration as strings in the metadata:

    tokens, targets   int32 [2, 12]; targets are drawn on their own, not shifted
    param.<hf name>   float32; a tied model has no lm_head
    logits            float32 [2, 12, vocab]
    loss              float32 [1], the mean cross entropy over all 24 targets
    grad.<hf name>    float32, the gradient of `loss`

Parameters are drawn in float32, so they are stored exactly. The model then runs
in float64, except where transformers itself goes through float32: inside
RMSNorm, the attention softmax, and the rotary cos/sin. Results are rounded to
float32 for storage.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, SEQ = 2, 12

CASES = {
    "llama_mha": dict(
        vocab_size=53, layers=2, dim=24, heads=4, kv_heads=4, head_dim=6, ffn=40,
        rope_theta=10000.0, norm_eps=1e-6, tied=False,
    ),
    "llama_gqa_tied": dict(
        vocab_size=61, layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn=48,
        rope_theta=500000.0, norm_eps=1e-5, tied=True,
    ),
    "llama3_rope": dict(
        vocab_size=40, layers=2, dim=32, heads=4, kv_heads=1, head_dim=16, ffn=40,
        rope_theta=10000.0, norm_eps=1e-5, tied=False,
        rope_factor=4.0, rope_low=1.0, rope_high=4.0, rope_original=32,
    ),
}


def shape(case):
    """What the configs of Llama and its relatives call the numbers of a case."""
    return dict(
        vocab_size=case["vocab_size"],
        num_hidden_layers=case["layers"],
        hidden_size=case["dim"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        intermediate_size=case["ffn"],
        rms_norm_eps=case["norm_eps"],
        tie_word_embeddings=case["tied"],
        rope_parameters={"rope_type": "default", "rope_theta": case["rope_theta"]},
        max_position_embeddings=128,
        attn_implementation="eager",
    )


def build(case):
    rope = {"rope_type": "default", "rope_theta": case["rope_theta"]}
    if "rope_factor" in case:
        rope |= {
            "rope_type": "llama3",
            "factor": case["rope_factor"],
            "low_freq_factor": case["rope_low"],
            "high_freq_factor": case["rope_high"],
            "original_max_position_embeddings": case["rope_original"],
        }
    return LlamaForCausalLM(LlamaConfig(**shape(case) | {"rope_parameters": rope}, head_dim=case["head_dim"]))


def golden(case, seed, build):
    """The model of a case and the tensors to store for it."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(case["vocab_size"], (BATCH, SEQ), generator=rng)
    tokens, targets = draw(), draw()

    model = build(case)
    with torch.no_grad():
        for name, p in model.named_parameters():  # a tied parameter comes once
            noise = torch.randn(p.shape, generator=rng)
            p.copy_(0.1 * noise + (not name.endswith("bias")) if p.dim() == 1 else 0.15 * noise)
    model.double()

    logits = model(tokens, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss / targets.numel()
    loss.backward()

    f32 = lambda x: x.detach().to(torch.float32).contiguous()
    tensors = {
        "tokens": tokens.to(torch.int32),
        "targets": targets.to(torch.int32),
        "logits": f32(logits),
        "loss": f32(loss).reshape(1),
    }
    for name, p in model.named_parameters():
        tensors[f"param.{name}"] = f32(p)
        tensors[f"grad.{name}"] = f32(p.grad)
    return model, tensors


def write(path, tensors, metadata):
    """Saves with the metadata in order; safetensors' own order varies by run."""
    data = save(tensors, metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = metadata
    header = json.dumps(header, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def store(cases, build, show=lambda name, case, model: None):
    """Writes the file of every case and prints its loss."""
    torch.set_num_threads(1)
    losses = {}
    for seed, (name, case) in enumerate(cases.items()):
        model, tensors = golden(case, seed, build)
        as_text = lambda v: str(v).lower() if isinstance(v, bool) else str(v)
        metadata = {key: as_text(value) for key, value in case.items()}
        write(Path(__file__).parent / f"{name}.safetensors", tensors, metadata)
        losses[name] = tensors["loss"].item()
        show(name, case, model)

    print(f"{'case':<16}loss")
    for name, loss in losses.items():
        print(f"{name:<16}{loss:.7f}")


def show_frequencies(name, case, model):
    half = torch.arange(0, case["head_dim"], 2) / case["head_dim"]
    print(f"{name}: inverse frequencies")
    print("  plain ", (case["rope_theta"] ** -half).tolist())
    print("  in use", model.model.rotary_emb.inv_freq.tolist())


if __name__ == "__main__":
    store(CASES, build, show_frequencies)
