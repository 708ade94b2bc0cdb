"""Texts by greedy decoding of the models that the other scripts here make, from Hugging Face transformers.

Run as `python texts.py` once the other scripts have written their files; it writes `texts.json` next to itself: of every model prompts and what
follows each. Some prompts are longer than a page of the KV cache, and two of them begin alike. Models run in float64, without a cache. Prompts are drawn
again where the two most probable tokens of any position are closer than float32 can tell. Last run with transformers 5.23.0.
"""

import json
from pathlib import Path

import experts
import gpt2
import gpt_oss
import latent
import llama
import parts
import qwen3
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
# The least difference of the logits of the two most probable tokens.
MARGIN = 1e-3
PAGE = 96


def with_mixture(case, seed, build):
    return experts.golden(case | {"architecture": case.get("architecture", case.get("model_type"))}, seed, build)


MODELS = {
    "llama_gqa_tied": (llama, llama.golden),
    "llama3_rope": (llama, llama.golden),
    "gpt2_untied": (gpt2, llama.golden),
    "qwen3": (qwen3, llama.golden),
    "qwen3_moe": (experts, with_mixture),
    "mixtral": (experts, with_mixture),
    "gemma3_text": (parts, llama.golden),
    "olmo2": (parts, llama.golden),
    "smollm3": (parts, llama.golden),
    "gpt_oss": (gpt_oss, llama.golden),
    "deepseek_v3": (latent, with_mixture),
}


def follow(model, prompt, count):
    """What follows a prompt, and the least margin of a token."""
    seen, least = torch.tensor([prompt]), float("inf")
    with torch.no_grad():
        for _ in range(count):
            logits = model(seen, use_cache=False).logits[0, -1]
            best = logits.topk(2)
            least = min(least, (best.values[0] - best.values[1]).item())
            seen = torch.cat([seen, best.indices[:1].reshape(1, 1)], 1)
    return seen[0, len(prompt):].tolist(), least


def texts(case, model):
    rng = torch.Generator().manual_seed(7)
    draw = lambda n: torch.randint(case["vocab_size"], (n,), generator=rng).tolist()
    few = case.get("positions", 128) < PAGE
    lengths, count = ([1, 3, 5, 8], 10) if few else ([1, 4, 11, PAGE + 3, PAGE + 9], 18)
    beginning, found = draw(PAGE + 1), []
    for length in lengths:
        least = 0.0
        while least < MARGIN:
            prompt = draw(length) if length < PAGE else beginning + draw(length - len(beginning))
            after, least = follow(model, prompt, count)
        found.append({"prompt": prompt, "text": after})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    experts.whole = llama.golden
    models = {}
    for name, (script, golden) in MODELS.items():
        case = script.CASES[name]
        model, tensors = golden(case, list(script.CASES).index(name), script.build)
        stored = load_file(HERE / f"{name}.safetensors")
        assert all(torch.equal(stored[key], tensors[key]) for key in stored if key.startswith("param."))
        models[name] = texts(case, model)
        print(name, len(models[name]))
    lines = [json.dumps(name) + ": " + json.dumps(model) for name, model in models.items()]
    (HERE / "texts.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
