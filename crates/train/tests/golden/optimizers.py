"""Golden values for the optimizers.

Run as `python optimizers.py`; it writes `optimizers.safetensors` next to itself,
the same bytes on every run. Last run with Python 3.11, torch 2.15.0 and
safetensors 0.8.0.

The file holds, for a tiny Llama:

    param.<hf name>         float32, where every optimizer starts
    grad.<step>.<hf name>   float32, the gradients of four steps
    <optimizer>.<hf name>   float32, the parameters after them

Optimizers run in float64. AdamW is torch's. SGD is torch's with the decay
decoupled: applied to the weights before its step. Lion is written out below, from
its paper. Muon is written out too, since torch's iterates in bfloat16; torch's
must come close. Weights decay, norms do not.
"""

from pathlib import Path

import torch
from safetensors.torch import save

STEPS, LR, DECAY = 4, 0.01, 0.1
DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 8, 2, 1, 6, 12, 16

LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, DIM),
    LAYER + "input_layernorm.weight": (DIM,),
    LAYER + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, DIM),
    LAYER + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, DIM),
    LAYER + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, DIM),
    LAYER + "self_attn.o_proj.weight": (DIM, HEADS * HEAD_DIM),
    LAYER + "post_attention_layernorm.weight": (DIM,),
    LAYER + "mlp.gate_proj.weight": (FFN, DIM),
    LAYER + "mlp.up_proj.weight": (FFN, DIM),
    LAYER + "mlp.down_proj.weight": (DIM, FFN),
    "model.norm.weight": (DIM,),
    "lm_head.weight": (VOCAB, DIM),
}


def decay_of(name):
    return 0.0 if "norm" in name else DECAY


def with_torch(optimizer, decoupled):
    """The update of an optimizer of torch; `decoupled`: torch does not decay."""

    def run(name, w, grads):
        w = torch.nn.Parameter(w.clone())
        o = optimizer([w], 0.0 if decoupled else decay_of(name))
        for g in grads:
            w.grad = g
            if decoupled:
                w.data *= 1 - LR * decay_of(name)
            o.step()
        return w.data

    return run


adamw = with_torch(
    lambda w, decay: torch.optim.AdamW(w, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay), False)
sgd = with_torch(lambda w, _: torch.optim.SGD(w, lr=LR, momentum=0.9), True)
torch_muon = with_torch(
    lambda w, decay: torch.optim.Muon(
        w, lr=LR, weight_decay=decay, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"), False)


def lion(name, w, grads, beta1=0.9, beta2=0.99):
    m = torch.zeros_like(w)
    for g in grads:
        w = w * (1 - LR * decay_of(name)) - LR * torch.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
    return w


def orthogonal(x):
    a, b, c = 3.4445, -4.7750, 2.0315
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon(name, w, grads, momentum=0.95):
    if w.dim() != 2 or "embed" in name or "lm_head" in name:
        return adamw(name, w, grads)
    m, before = torch.zeros_like(w), w
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        update = orthogonal(momentum * m + (1 - momentum) * g)
        w = w * (1 - LR * decay_of(name)) - LR * 0.2 * max(w.shape) ** 0.5 * update
    moved = torch_muon(name, before, grads) - before
    assert (w - before - moved).norm() < 0.02 * moved.norm(), name
    return w


def main():
    torch.manual_seed(7)
    tensors = {}
    for name, shape in SHAPES.items():
        tensors["param." + name] = torch.randn(shape)
        for step in range(STEPS):
            tensors[f"grad.{step}.{name}"] = 0.1 * torch.randn(shape)
    for optimizer, update in {"adamw": adamw, "lion": lion, "sgd": sgd, "muon": muon}.items():
        for name in SHAPES:
            grads = [tensors[f"grad.{step}.{name}"].double() for step in range(STEPS)]
            start = tensors["param." + name].double().clone()
            tensors[f"{optimizer}.{name}"] = update(name, start, grads).float().contiguous()
    Path(__file__).with_suffix(".safetensors").write_bytes(save(tensors))


main()
