"""A training step of a decoder with latent attention in PyTorch: the peer that bench/scripts/latent.sh runs beside Lockstep.

Parameters are fp32 under autocast to bf16, the model is compiled, AdamW is fused, gradients are clipped: what a PyTorch user would write. Attention
has heads of 192 for Q and K and of 128 for V; `--attention` says how they go through scaled_dot_product_attention.
"""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

a = argparse.ArgumentParser()
a.add_argument("--attention", choices=["cudnn", "cudnn-padded", "flash-padded"], default="cudnn")
a.add_argument("--layers", type=int, default=24)
a.add_argument("--dim", type=int, default=2048)
a.add_argument("--heads", type=int, default=16)
a.add_argument("--ffn", type=int, default=5632)
a.add_argument("--vocab", type=int, default=32000)
a.add_argument("--latent", type=int, default=512)
a.add_argument("--nope", type=int, default=128)
a.add_argument("--rope", type=int, default=64)
a.add_argument("--value", type=int, default=128)
a.add_argument("--seq", type=int, default=4096)
a.add_argument("--batch", type=int, default=8)
a.add_argument("--steps", type=int, default=6)
a.add_argument("--device", default="cuda")
a = a.parse_args()
head = a.nope + a.rope


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


def rotate(x, cos, sin):
    """RoPE in halves of the last axis."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.before_attention, self.before_mlp, self.of_latent = Norm(a.dim), Norm(a.dim), Norm(a.latent)
        self.q, self.down = linear(a.dim, a.heads * head), linear(a.dim, a.latent + a.rope)
        self.up = linear(a.latent, a.heads * (a.nope + a.value))
        self.out = linear(a.heads * a.value, a.dim)
        self.gate, self.linear, self.back = linear(a.dim, a.ffn), linear(a.dim, a.ffn), linear(a.ffn, a.dim)

    def attention(self, x, cos, sin):
        b, s, _ = x.shape
        q_nope, q_rope = self.q(x).view(b, s, a.heads, head).transpose(1, 2).split([a.nope, a.rope], -1)
        latent, k_rope = self.down(x).split([a.latent, a.rope], -1)
        kv = self.up(self.of_latent(latent)).view(b, s, a.heads, a.nope + a.value).transpose(1, 2)
        k_nope, v = kv.split([a.nope, a.value], -1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(b, a.heads, s, a.rope)
        q, k = torch.cat([q_nope, rotate(q_rope, cos, sin)], -1), torch.cat([k_nope, k_rope], -1)
        if a.attention.endswith("padded"):
            v = F.pad(v, (0, head - a.value))
        kernel = SDPBackend.FLASH_ATTENTION if a.attention.startswith("flash") else SDPBackend.CUDNN_ATTENTION
        with sdpa_kernel(kernel if a.device == "cuda" else SDPBackend.MATH):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=head**-0.5)
        return self.out(o[..., : a.value].transpose(1, 2).reshape(b, s, -1))

    def forward(self, x, cos, sin):
        x = x + self.attention(self.before_attention(x), cos, sin)
        h = self.before_mlp(x)
        return x + self.back(F.silu(self.gate(h)) * self.linear(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(a.vocab, a.dim)
        self.layers = nn.ModuleList(Layer() for _ in range(a.layers))
        self.norm, self.head = Norm(a.dim), nn.Linear(a.dim, a.vocab, bias=False)
        angle = torch.outer(torch.arange(a.seq).float(), 10000.0 ** (-torch.arange(0, a.rope, 2).float() / a.rope))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens).to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, a.vocab).float(), targets.reshape(-1))


torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
model = Model().to(a.device)
count = sum(p.numel() for p in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
compiled = torch.compile(model)
tokens = torch.randint(a.vocab, (a.batch, a.seq + 1), device=a.device)
wait = torch.cuda.synchronize if a.device == "cuda" else lambda: None


def step():
    with torch.autocast(a.device, torch.bfloat16):
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


for _ in range(3):
    loss = step()
times = []
for _ in range(a.steps):
    wait()
    start = time.perf_counter()
    loss = step()
    wait()
    times.append(time.perf_counter() - start)
median = sorted(times)[len(times) // 2]
peak = torch.cuda.max_memory_reserved() / 2**30 if a.device == "cuda" else 0
print(f"{a.batch * a.seq / median:.0f} tokens/s, {1e3 * median:.1f} ms a step, {peak:.1f} GiB, {count} parameters, loss {loss.item():.3f}")
