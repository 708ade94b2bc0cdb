"""Golden values for adapters, from PEFT, beside the models of `llama.py`, `experts.py` and `gpt2.py` with their batches.

Run as `python lora.py`, behind those; it writes one `lora_<case>.safetensors` per case, the same bytes on every run. Last run with Python 3.11,
torch 2.15.0, transformers 5.23.0 and peft 0.21.2. Each file holds

    lora.<name>    float32, where adapters start: A and B of every module, B not zero
    losses         float32 [21], before and after each of 20 steps of AdamW on the batch (lr 0.01, betas 0.9 and 0.95, decay 0.1)
    grad.<name>    float32, the gradients before the first
    after.<name>   float32, the adapters after the last

PEFT adapts all experts of a layer at once, and gate and up as one. Ours have an adapter each, so theirs are written out here: a
parametrisation of the weights.
"""

import re
from pathlib import Path

import experts
import gpt2
import llama
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

RANK, ALPHA, STEPS = 3, 5.0, 20

CASES = {
    "llama_gqa_tied": (llama, ["q_proj", "v_proj", "down_proj"]),
    "mixtral": (experts, ["k_proj", "o_proj", "experts"]),
    "gpt2": (gpt2, ["c_attn", "c_proj", "c_fc"]),
}


class OfExperts(torch.nn.Module):
    """Adds B·A to the matrices of every expert, section by section."""

    def __init__(self, weight, sections, rng):
        super().__init__()
        count, outputs, inputs = weight.shape
        new = lambda *shape: torch.nn.Parameter(0.2 * torch.randn(*shape, generator=rng, dtype=torch.float64).float().double())
        self.a = torch.nn.ParameterList([new(count, RANK, inputs) for _ in sections])
        self.b = torch.nn.ParameterList([new(count, outputs // len(sections), RANK) for _ in sections])
        self.sections = sections

    def forward(self, weight):
        return weight + ALPHA / RANK * torch.cat([b @ a for a, b in zip(self.a, self.b)], dim=1)

    def named(self, module):
        for section, a, b in zip(self.sections, self.a, self.b):
            for expert in range(a.shape[0]):
                yield f"{module}.{expert}.{section}.lora_A.weight", lambda x, e=expert: x[e], a
                yield f"{module}.{expert}.{section}.lora_B.weight", lambda x, e=expert: x[e], b


def adapt(model, targets, rng):
    """(name, part of a tensor, tensor) of all adapters."""
    named = []
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if "experts" in targets:
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                for weight, sections in [("gate_up_proj", ["w1", "w3"]), ("down_proj", ["w2"])]:
                    added = OfExperts(getattr(module, weight), sections, rng)
                    parametrize.register_parametrization(module, weight, added)
                    # As files have it.
                    named += added.named(name.replace(".mlp.", ".block_sparse_moe."))
    modules = [t for t in targets if t != "experts"]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, fan_in_fan_out="c_attn" in targets, lora_dropout=0.0)
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if ".parametrizations." in name:
            parameter.requires_grad_(not name.endswith("original"))
        elif "lora_" in name:
            with torch.no_grad():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64).float())
            name = re.sub(r"^base_model\.model\.", "", name).replace(".default.weight", ".weight")
            named.append((name, lambda x: x, parameter))
    return model.double(), named


def store(name, module, targets):
    cases = list(module.CASES)
    model, tensors = llama.golden(module.CASES[name], cases.index(name), module.build)
    model, named = adapt(model, targets, torch.Generator().manual_seed(7))
    tokens, targets = tensors["tokens"].long(), tensors["targets"].long()
    f32 = lambda x: x.detach().to(torch.float32).contiguous()
    found = {f"lora.{name}": f32(part(tensor)) for name, part, tensor in named}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            found |= {f"grad.{name}": f32(part(tensor.grad)) for name, part, tensor in named}
        if step < STEPS:
            optimizer.step()
    found |= {f"after.{name}": f32(part(tensor)) for name, part, tensor in named}
    found["losses"] = torch.tensor(losses, dtype=torch.float32)
    llama.write(Path(__file__).parent / f"lora_{name}.safetensors", found, {"rank": str(RANK), "alpha": str(ALPHA)})
    print(f"{name:<16}{len(named)} tensors, losses {losses[0]:.6f} to {losses[-1]:.6f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (module, targets) in CASES.items():
        store(name, module, targets)
