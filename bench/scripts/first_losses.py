#!/usr/bin/env python3
"""Compares the first losses of a run with those of PyTorch from the same weights on the same tokens.

    first_losses.py --model FOLDER --run RUN [--lockstep PATH] [--steps 5] [--bound X] [--device cuda]

FOLDER is a Hugging Face folder of a Llama that `lockstep checkpoint export` wrote; RUN is a run directory whose run
started from it (train.init_from). Hyperparameters come from RUN/run.toml, learning rates and our losses from
RUN/metrics.jsonl, tokens from `lockstep data inspect RUN --step N --tokens`. Exits with 1 where a loss differs by more
than the bound, relative to ours. Needs torch and nothing else.

Letters: B batch, S sequence, D model, H heads, E head.
"""

import argparse
import json
import math
import mmap
import pathlib
import subprocess
import sys

import torch
import torch.nn.functional as F

BOUNDS = {"fp32": 1e-4, "bf16": 5e-3}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_config(path):
    """The resolved run.toml, as {table: {key: value}}: every value stands on a line of its own, as JSON would have it."""
    tables, table = {}, {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            table = tables.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, value = line.split(" = ", 1)
            try:
                table[key] = json.loads(value.split("  # ")[0])
            except json.JSONDecodeError:
                table[key] = value
    return tables


def read_weights(folder):
    """All tensors of a folder of safetensors, in f32."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    weights = {}
    for name in files:
        with open(folder / name, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(data[:8], "little")
        for tensor, about in json.loads(data[8:start]).items():
            if tensor == "__metadata__":
                continue
            first, end = about["data_offsets"]
            dtype = DTYPES[about["dtype"]]
            count = (end - first) // dtype.itemsize
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start + first)
            weights[tensor] = flat.reshape(about["shape"]).float()
    return weights


def read_tokens(lockstep, run, step):
    """Tokens of a step, [B, S + 1]: those of every sequence and the target of its last."""
    command = [lockstep, "data", "inspect", str(run), "--step", str(step), "--tokens", "--format", "json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return torch.tensor([sample["tokens"] for sample in found["step"]["samples"]])


def frequencies(model):
    """Angles per position, [E / 2], with the scaling of Llama 3 where the model has it."""
    e = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    rope = model.get("rope_parameters") or {}
    theta = model.get("rope_theta") or rope["rope_theta"]
    inverse = theta ** (-torch.arange(0, e, 2, dtype=torch.float64) / e)
    scaling = model.get("rope_scaling") or rope
    if scaling.get("rope_type", "default") == "default":
        return inverse
    if scaling["rope_type"] != "llama3":
        sys.exit(f"rotary scaling {scaling['rope_type']} is not known here")
    wavelength = 2 * math.pi / inverse
    ratio = scaling["original_max_position_embeddings"] / wavelength
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((ratio - low) / (high - low)).clamp(0, 1)
    return inverse * (smooth + (1 - smooth) / scaling["factor"])


class Llama:
    """Forward pass on f32 originals: matrices and activations are rounded to `compute` wherever they are used."""

    def __init__(self, model, weights, compute, device):
        self.model, self.compute = model, compute
        self.weights = {name: w.to(device).requires_grad_() for name, w in weights.items()}
        self.inverse = frequencies(model)

    def weight(self, name):
        return self.weights[name].to(self.compute)

    def norm(self, x, name):
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model["rms_norm_eps"])
        return (x * self.weight(name).float()).to(self.compute)

    def rotate(self, x, cos, sin):
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self.compute)

    def loss(self, tokens, targets):
        """Sum of the losses of all targets."""
        model = self.model
        h, kv = model["num_attention_heads"], model["num_key_value_heads"]
        angles = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float64), self.inverse).to(tokens.device)
        cos, sin = angles.cos().float(), angles.sin().float()
        x = F.embedding(tokens, self.weight("model.embed_tokens.weight"))
        for layer in range(model["num_hidden_layers"]):
            of = lambda part: f"model.layers.{layer}.{part}.weight"
            y = self.norm(x, of("input_layernorm"))
            heads = lambda part, n: F.linear(y, self.weight(of(part))).unflatten(-1, (n, -1)).transpose(1, 2)
            q = self.rotate(heads("self_attn.q_proj", h), cos, sin)
            k = self.rotate(heads("self_attn.k_proj", kv), cos, sin).repeat_interleave(h // kv, 1)
            v = heads("self_attn.v_proj", kv).repeat_interleave(h // kv, 1)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.linear(o, self.weight(of("self_attn.o_proj")))
            y = self.norm(x, of("post_attention_layernorm"))
            gate = F.silu(F.linear(y, self.weight(of("mlp.gate_proj"))).float())
            y = (gate * F.linear(y, self.weight(of("mlp.up_proj"))).float()).to(self.compute)
            x = x + F.linear(y, self.weight(of("mlp.down_proj")))
        x = self.norm(x, "model.norm.weight")
        head = "model.embed_tokens.weight" if model["tie_word_embeddings"] else "lm_head.weight"
        logits = F.linear(x.float(), self.weight(head).float())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class AdamW:
    """Adam with decoupled decay of matrices, after clipping by the norm of all gradients."""

    def __init__(self, weights, config):
        self.weights, self.config, self.updates = weights, config, 0
        self.moments = {n: (torch.zeros_like(w), torch.zeros_like(w)) for n, w in weights.items()}

    @torch.no_grad()
    def step(self, lr):
        c = self.config
        norm = math.sqrt(sum(w.grad.double().square().sum().item() for w in self.weights.values()))
        factor = min(1.0, c["grad_clip"] / norm) if c["grad_clip"] > 0 else 1.0
        self.updates += 1
        for name, w in self.weights.items():
            m, v = self.moments[name]
            g = w.grad * factor
            m.lerp_(g, 1 - c["beta1"])
            v.lerp_(g.square(), 1 - c["beta2"])
            mean = m / (1 - c["beta1"] ** self.updates)
            spread = (v / (1 - c["beta2"] ** self.updates)).sqrt_().add_(c["eps"])
            w.mul_(1 - lr * c["weight_decay"] * (w.ndim > 1)).addcdiv_(mean, spread, value=-lr)
            w.grad = None
        return norm


def refuse_others(config, model):
    """Ends where the run has something that is not written down above."""
    wanted = [
        (model["model_type"], "llama", "model_type"),
        (config["model"]["dropout"], 0.0, "model.dropout"),
        (config["model"].get("window"), None, "model.window"),
        (config["data"]["document_mask"], False, "data.document_mask"),
        (config["optimizer"]["name"], "adamw", "optimizer.name"),
        (config["optimizer"]["groups"], [], "optimizer.groups"),
        (config["precision"]["policy"] in BOUNDS, True, "precision.policy is fp32 or bf16:"),
        ("init_from" in config["train"], True, "train.init_from is set:"),
    ]
    for found, needed, what in wanted:
        if found != needed:
            sys.exit(f"cannot compare: {what} {found}, only {needed} is known here")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--lockstep", default="lockstep")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bound", type=float, help=f"by default {BOUNDS}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    config = read_config(args.run / "run.toml")
    model = json.loads((args.model / "config.json").read_text())
    refuse_others(config, model)
    lines = [json.loads(line) for line in (args.run / "metrics.jsonl").read_text().splitlines()[: args.steps]]
    if len(lines) < args.steps:
        sys.exit(f"{args.run} has {len(lines)} steps, {args.steps} are needed")
    precision = config["precision"]["policy"]
    bound = args.bound or BOUNDS[precision]
    torch.backends.cuda.matmul.allow_tf32 = False
    compute = torch.float32 if precision == "fp32" else torch.bfloat16
    llama = Llama(model, read_weights(args.model), compute, args.device)
    optimizer = AdamW(llama.weights, config["optimizer"])
    parameters = sum(w.numel() for w in llama.weights.values())
    print(f"{parameters:,} parameters in {precision} on {args.device}, torch {torch.__version__}, bound {bound:g}")
    print("step   lockstep    pytorch  difference   gradient norms")
    worst = 0.0
    for line in lines:
        tokens = read_tokens(args.lockstep, args.run, line["step"]).to(args.device)
        total = 0.0
        for part in tokens.split(config["train"]["micro_batch"]):
            loss = llama.loss(part[:, :-1], part[:, 1:]) / tokens[:, 1:].numel()
            loss.backward()
            total += loss.item()
        norm = optimizer.step(line["lr"])
        difference = abs(total - line["loss"]) / abs(line["loss"])
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
        norms = f"{line['grad_norm']:.5f} {norm:.5f}"
        print(f"{line['step']:4} {line['loss']:10.6f} {total:10.6f}    {difference:.1e}   {norms}", flush=True)
    print(f"largest difference {worst:.1e} of the loss, {'within' if worst <= bound else 'BEYOND'} {bound:g}")
    sys.exit(worst > bound)


if __name__ == "__main__":
    main()
