"""Golden values for modules that predict further tokens (MTP), written after the DeepSeek-V3 paper (arXiv 2412.19437, section 2.2) with layers of
Hugging Face transformers: as `latent.py`, which says what the files hold.

    h_0 = the normed result of the model's layers
    h_k = norm(layer([norm(embedding of the token k further on) | norm(h_(k-1))] @ projection))
    loss = (sum of the model's token losses + weight / depth * sum over k of those of head(h_k) against the target k further on) / targets

What would be past the end of a sequence is no target. `further` is float32 [depth], the sums of the modules' losses, each divided by all 24 targets;
`loss` is the model's own, and `grad.*` are those of the sum above. Names are those of the published model, whose modules are numbered as layers.
The metadata has `mtp_loss`, the weight, beside the `config.json`. Last run with transformers 5.23.0.
"""

import json
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import MtpLayer

import experts
import llama
from latent import SHAPE, yarn
from parts import build, config_of

CASES = {
    # Two modules with experts, latent attention and a scaled RoPE.
    "deepseek_v3_mtp": (0.3, dict(
        SHAPE, model_type="deepseek_v3", vocab_size=43, num_hidden_layers=2, q_lora_rank=9, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, num_nextn_predict_layers=2, rope_parameters=yarn(1.0, 1.0),
    )),
    # One that shares a tied table.
    "deepseek_v3_mtp_tied": (0.1, dict(
        SHAPE, model_type="deepseek_v3", vocab_size=37, num_hidden_layers=2, q_lora_rank=None, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, num_nextn_predict_layers=1, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )),
}


class WithFurther(torch.nn.Module):
    def __init__(self, case):
        super().__init__()
        self.whole = build(case)
        config, depth = config_of(case), case["num_nextn_predict_layers"]
        decoder, norm = type(self.whole.model.layers[-1]), type(self.whole.model.norm)
        layers = range(config.num_hidden_layers, config.num_hidden_layers + depth)
        self.further = torch.nn.ModuleList([MtpLayer(config, decoder, norm, layer) for layer in layers])

    def forward(self, tokens):
        """The normed result of the layers, and after it those of the modules."""
        found = [self.whole.model(tokens, use_cache=False).last_hidden_state]
        places = torch.arange(tokens.shape[1])[None]
        angles = self.whole.model.rotary_emb(found[0], places)
        mask = torch.full((tokens.shape[1],) * 2, float("-inf"), dtype=found[0].dtype).triu(1)[None, None]
        for k, module in enumerate(self.further, 1):
            ahead = torch.cat([tokens[:, k:], tokens[:, -1:].expand(-1, k)], 1)
            found.append(module(
                self.whole.model.embed_tokens(ahead), found[-1], position_embeddings=angles, attention_mask=mask, position_ids=places,
                past_key_values=None,
            ))
        return found


def published(name, layers):
    if not name.startswith("further."):
        return name.removeprefix("whole.")
    _, k, rest = name.split(".", 2)
    rest = rest.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{layers + int(k)}.{rest}"


def golden(case, weight, seed):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(case["vocab_size"], (llama.BATCH, llama.SEQ), generator=rng)
    tokens, targets = draw(), draw()
    model = WithFurther(case)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in named.items():
            noise = torch.randn(p.shape, generator=rng)
            p.copy_(0.1 * noise + 1 if p.dim() == 1 else 0.15 * noise)
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    for buffer in biases.values():
        buffer.copy_(0.1 * torch.randn(buffer.shape, generator=rng))
    model.double()
    states, losses = model(tokens), []
    for k, state in enumerate(states):
        end = llama.SEQ - k
        logits = model.whole.lm_head(state)[:, :end]
        losses.append(cross_entropy(logits.flatten(0, 1), targets[:, k:].flatten(), reduction="sum") / targets.numel())
    further = torch.stack(losses[1:])
    (losses[0] + weight * further.mean()).backward()
    f32 = lambda x: x.detach().to(torch.float32).contiguous()
    tensors = {
        "tokens": tokens.to(torch.int32), "targets": targets.to(torch.int32), "logits": f32(model.whole.lm_head(states[0])),
        "loss": f32(losses[0]).reshape(1), "further": f32(further),
    }
    layers = case["num_hidden_layers"]
    for name, p in named.items():
        for kind, tensor in (("param", p), ("grad", p.grad)):
            tensors |= {f"{kind}.{n}": f32(t) for n, t in experts.split(published(name, layers), tensor, False)}
    tensors |= {f"param.{published(name, layers)}": f32(b) for name, b in biases.items()}
    return tensors


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, (name, (weight, case)) in enumerate(CASES.items()):
        tensors = golden(case, weight, seed)
        fields = {key: value for key, value in config_of(case).to_dict().items() if not key.startswith("_")}
        fields["num_nextn_predict_layers"] = case["num_nextn_predict_layers"]
        path = Path(__file__).with_name(f"{name}.safetensors")
        llama.write(path, tensors, {"config": json.dumps(fields, sort_keys=True), "mtp_loss": str(weight)})
        print(f"{path.name}: loss {tensors['loss'].item():.6f}, {tensors['further'].tolist()}, {path.stat().st_size} bytes")
