"""Golden values for adapters, from PEFT, beside the models of `llama.py`, `experts.py` and `gpt2.py` with their batches.

Run as `python lora.py`, behind those; it writes one `lora_<case>.safetensors` per case, the same bytes on every run. Last run with Python 3.11,
torch 2.15.0, transformers 5.23.0 and peft 0.21.2. Each file holds

    lora.<name>    float32, where adapters start: A and B of every module, B not zero
    losses         float32 [21], before and after each of 20 steps of AdamW on the batch (lr 0.01, betas 0.9 and 0.95, decay 0.1)
    grad.<name>    float32, the gradients before the first
    after.<name>   float32, the adapters after the last

The mixture's adapters are read from a folder that has a module per expert, as transformers 4 did and as we write it. With transformers 5,
which keeps the matrices of all experts in one tensor and gate and up as one, PEFT makes one adapter of twice the rank of those of gate and
up, as blocks: what is beside the blocks is no weight of any module, and is kept at zero here.
"""

import copy
import re
import tempfile
from pathlib import Path

import experts
import gpt2
import llama
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

RANK, ALPHA, STEPS = 3, 5.0, 20

CASES = {
    "llama_gqa_tied": (llama, ["q_proj", "v_proj", "down_proj"]),
    "mixtral": (experts, ["k_proj", "o_proj", "w1", "w2", "w3"]),
    "gpt2": (gpt2, ["c_attn", "c_proj", "c_fc"]),
}


PREFIX = "base_model.model."


def draw(rng, *shape):
    return 0.2 * torch.randn(*shape, generator=rng, dtype=torch.float64).float()


def of_experts(model, rng):
    """The matrices of every expert's adapters, by the names that files have for them."""
    drawn = {}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        for weight, sections in [("gate_up_proj", ["w1", "w3"]), ("down_proj", ["w2"])]:
            count, outputs, inputs = getattr(module, weight).shape
            shapes = [("A", (count, RANK, inputs)), ("B", (count, outputs // len(sections), RANK))]
            for kind, shape in shapes:
                for section in sections:
                    for expert, matrix in enumerate(draw(rng, *shape)):
                        of = name.replace(".mlp.", ".block_sparse_moe.")
                        drawn[f"{of}.{expert}.{section}.lora_{kind}.weight"] = matrix.contiguous()
    return drawn


def parts_of_experts(name, module):
    """(name, part of a tensor, tensor) of the adapters of a layer's experts, which PEFT has in two modules, one inside of the other."""
    of = name.replace(".mlp.", ".block_sparse_moe.").removesuffix(".base_layer")
    sections = ["w1", "w3"] if module.parameter_name == "gate_up_proj" else ["w2"]
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    count, n = module.num_experts, len(sections)
    outputs, inputs = b.shape[0] // n, a.shape[1]
    blocks = torch.block_diag(*[torch.ones(outputs, RANK)] * n)[:, :, None].expand(-1, -1, count).flatten(1)
    b.register_hook(lambda grad: grad * blocks)
    for i, section in enumerate(sections):
        for expert in range(count):
            rows = lambda x, i=i, e=expert: x.reshape(count, n, RANK, inputs)[e, i]
            columns = lambda x, i=i, e=expert: x.reshape(n, outputs, n, RANK, count)[i, :, i, :, e]
            yield f"{of}.{expert}.{section}.lora_A.weight", rows, a
            yield f"{of}.{expert}.{section}.lora_B.weight", columns, b


def adapt(model, targets, rng):
    """(name, part of a tensor, tensor) of all adapters."""
    mixture = "w1" in targets
    drawn = of_experts(model, rng) if mixture else {}
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=[t for t in targets if not re.fullmatch("w[123]", t)],
        fan_in_fan_out="c_attn" in targets, lora_dropout=0.0,
    )
    plain = lambda name: name.removeprefix(PREFIX).replace(".default.weight", ".weight")
    for name, parameter in get_peft_model(copy.deepcopy(model), config).named_parameters():
        if "lora_" in name:
            drawn[plain(name)] = draw(rng, *parameter.shape)
    config.target_modules = targets
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file({PREFIX + name: x for name, x in drawn.items()}, f"{folder}/adapter_model.safetensors")
        model = PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False).double()
    named = []
    for name, module in model.named_modules():
        if hasattr(module, "parameter_name"):
            named += parts_of_experts(name.removeprefix(PREFIX), module)
    known = {id(tensor) for _, _, tensor in named}
    named += [(plain(name), lambda x: x, p) for name, p in model.named_parameters() if "lora_" in name and id(p) not in known]
    assert {name: part(tensor).float().equal(drawn[name]) for name, part, tensor in named} == dict.fromkeys(drawn, True)
    return model, named


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
