"""Random small models of every family, from Hugging Face transformers: as `llama.py`, which says what the files hold.

Run as `python families.py FOLDER [COUNT [FAMILY...]]`; it writes COUNT models (8) of each family to FOLDER, the same bytes on every
run. `bench/scripts/families.sh` compares all of them; `families/` has the smallest file of each family for the test suite, which
`python families.py families 8 --smallest` writes.

The metadata of a file is its `config.json`: with all fields, or, every second one, with those alone that are not the defaults of the class,
as transformers itself saves it. Models run in float64 throughout, also where their own code goes through float32. `logits_in_float32` and
`gradients_in_float32` are how far the same model in float32 is from that, as max|a-b| / max|b| of the worst tensor, also where its weights differ
by half of their last bit: norms of small results make some models as sensitive as that to rounding. Sequences are of 12 tokens, and windows and the contexts that RoPE is scaled from shorter and longer.
Last run with Python 3.11, torch 2.15.0 and transformers 5.23.0.
"""

import json
import random
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

import experts
import llama
from parts import build, config_of

TOKENS = dict(pad_token_id=None, bos_token_id=1, eos_token_id=2)


def rope(r, kinds, theta=None, **more):
    """The parameters of a rotary embedding of one of these kinds."""
    found = {"rope_type": r.choice(kinds), "rope_theta": theta or r.choice([500.0, 10000.0, 1e6])}
    kind = found["rope_type"]
    if kind != "default":
        found["factor"] = r.choice([1.5, 4.0, 40.0])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": r.choice([2.0, 4.0])}
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = r.choice([4, 8, 32])
    if kind == "yarn":
        found |= r.choice([{}, {"beta_fast": 16.0, "beta_slow": 0.5}])
        found |= r.choice([{}, {"attention_factor": 1.25}])
        found |= more
    return found


def shape(r, kv="any", head_dim=None):
    """The extents of a decoder. Without `head_dim`, heads divide the width."""
    heads = r.choice([1, 2, 3, 4, 6])
    if head_dim is None:
        hidden = heads * r.choice([4, 6, 8])
    else:
        hidden = r.choice([12, 18, 20, 24])
    found = dict(
        vocab_size=r.randint(23, 61), num_hidden_layers=r.randint(1, 5), hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=r.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        intermediate_size=r.choice([9, 16, 27, 36]), rms_norm_eps=r.choice([1e-6, 1e-5, 1e-3]),
        tie_word_embeddings=r.random() < 0.5, max_position_embeddings=r.choice([64, 128]), **TOKENS,
    )
    if kv == "all":
        found["num_key_value_heads"] = heads
    if head_dim:
        found["head_dim"] = r.choice(head_dim)
    return found


def kinds(r, layers):
    """Which layers slide; nothing said half of the time."""
    types = ["sliding_attention", "full_attention"]
    return r.choice([{}, {"layer_types": [r.choice(types) for _ in range(layers)]}])


PLAIN = ["default", "linear", "llama3", "yarn"]


def decoder(r, head_dim=None, **more):
    truncate = r.choice([{}, {"truncate": False}])
    return shape(r, head_dim=head_dim) | {"rope_parameters": rope(r, PLAIN, **truncate)} | more


def mixture(r, count):
    n = r.randint(2, 9)
    return {count: n, "num_experts_per_tok": r.randint(1, min(4, n)), "experts_implementation": "eager"}


def latent(r, v3):
    groups = r.choice([1, 2, 4])
    of_group = r.choice([2, 3])
    top = r.randint(1, groups)
    case = shape(r, kv="all", head_dim=[4]) | dict(
        q_lora_rank=r.choice([None, 5, 9]), kv_lora_rank=r.choice([6, 10, 16]), qk_nope_head_dim=r.choice([3 if v3 else 4, 6, 8]),
        qk_rope_head_dim=r.choice([2, 4, 6]), v_head_dim=r.choice([3, 7, 12]), n_routed_experts=groups * of_group,
        n_group=groups, topk_group=top, num_experts_per_tok=r.randint(1, min(4, top * of_group)),
        n_shared_experts=r.choice([1, 2]), moe_intermediate_size=r.choice([5, 12]), routed_scaling_factor=r.choice([1.0, 2.5]),
        experts_implementation="eager",
    )
    del case["head_dim"]
    case["first_k_dense_replace"] = r.randint(0, case["num_hidden_layers"] - 1)
    weights = r.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707, "mscale_all_dim": 1.2}])
    case["rope_parameters"] = rope(r, PLAIN, **weights)
    if v3:
        return case | dict(norm_topk_prob=r.random() < 0.5)
    return case | dict(topk_method=r.choice(["greedy", "group_limited_greedy"]))


def smollm3(r):
    case = decoder(r, head_dim=[6, 8, 10])
    # The list, or an interval that the class makes the list of.
    listed = {"no_rope_layers": [r.randint(0, 1) for _ in range(case["num_hidden_layers"])]}
    return case | r.choice([listed, {"no_rope_layer_interval": r.choice([2, 3])}])


def two_ropes(r, sliding_theta=None):
    full = rope(r, PLAIN)
    return {"rope_parameters": {"full_attention": full, "sliding_attention": rope(r, ["default"], sliding_theta)}}


def olmo3(r):
    case = shape(r) | two_ropes(r) | dict(sliding_window=r.choice([1, 3, 5, 14]))
    return case | kinds(r, case["num_hidden_layers"])


def gemma3(r):
    case = shape(r, head_dim=[6, 10, 16]) | two_ropes(r)
    case |= dict(query_pre_attn_scalar=r.choice([4, 7, 16]), sliding_window=r.choice([1, 3, 5, 14]))
    return case | kinds(r, case["num_hidden_layers"])


def gpt_oss(r):
    case = decoder(r, head_dim=[6, 8, 10]) | mixture(r, "num_local_experts")
    case |= dict(sliding_window=r.choice([1, 3, 5, 14]), swiglu_limit=r.choice([0.3, 1.0, 7.0]))
    return case | kinds(r, case["num_hidden_layers"])


def qwen_moe(r):
    more = mixture(r, "num_experts") | dict(moe_intermediate_size=r.choice([5, 12]), norm_topk_prob=r.random() < 0.5)
    return decoder(r, head_dim=[6, 8, 10]) | more


def olmoe(r):
    return decoder(r) | mixture(r, "num_experts") | dict(norm_topk_prob=r.random() < 0.5)


def dots1(r):
    case = latent(r, True)
    for key in [key for key in case if key.startswith(("q_lora", "kv_lora", "qk_", "v_head"))]:
        del case[key]
    case |= dict(head_dim=r.choice([6, 8]), rope_parameters=rope(r, PLAIN), sliding_window=None)
    case["num_key_value_heads"] = r.choice([1, case["num_attention_heads"]])
    return case


FAMILIES = {
    "deepseek_v2": lambda r: latent(r, False),
    "deepseek_v3": lambda r: latent(r, True),
    "gemma3_text": gemma3,
    "gpt_oss": gpt_oss,
    "olmo2": decoder,
    "olmo3": olmo3,
    "smollm3": smollm3,
    "olmoe": olmoe,
    "llama": lambda r: decoder(r, head_dim=r.choice([None, [6, 8, 10]])),
    "mistral": lambda r: decoder(r, head_dim=[6, 8, 10], sliding_window=r.choice([None, 1, 5, 14])),
    "qwen2": decoder,
    "qwen3": lambda r: decoder(r, head_dim=[6, 8, 10]),
    "qwen3_moe": qwen_moe,
    "mixtral": lambda r: decoder(r, head_dim=[6, 8]) | mixture(r, "num_local_experts"),
    "dots1": dots1,
}


class Exact(TorchFunctionMode):
    """Computes in float64 what asks for float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wide = lambda x: torch.float64 if x is torch.float32 else x
        if function is torch.Tensor.float:
            # A copy, as there: complex views need one.
            return args[0].double().clone(memory_format=torch.contiguous_format)
        return function(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def exact(case):
    model = build(case)
    forward = model.forward

    def within(*args, **kwargs):
        with Exact():
            return forward(*args, **kwargs)

    model.forward = within
    return model


def fields_of(config, whole):
    fields = config.to_dict() if whole else config.to_diff_dict()
    return {key: value for key, value in fields.items() if not key.startswith("_")}


def in_float32(case, seed, tensors):
    """How far transformers in float32 is from these tensors, at worst: with these weights, and with weights that differ by half of their last bit."""
    rng, worst = torch.Generator().manual_seed(seed), [0.0, 0.0]
    for last_bit in [0.0, 0.5, 0.5, 0.5]:
        model = experts.with_biases(build, seed)(case)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = 2 * torch.rand(p.shape, generator=rng) - 1
                p.copy_(tensors[f"param.{name}"] * (1 + last_bit * 2**-23 * noise.double()))
        logits = model(tensors["tokens"].long(), use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), tensors["targets"].long().flatten()).backward()
        far = lambda found, expected: ((found - expected).abs().max() / expected.abs().max()).item()
        expected = {name: tensors[f"grad.{name}"] for name, _ in model.named_parameters()}
        largest = max(grad.abs().max() for grad in expected.values())
        # Routers that give every token to one expert with a weight of 1 have gradients of rounding errors.
        gradients = [far(p.grad, expected[n]) for n, p in model.named_parameters() if expected[n].abs().max() > 1e-9 * largest]
        worst = [max(a, b) for a, b in zip(worst, [far(logits, tensors["logits"]), max(gradients)])]
    return {"logits_in_float32": repr(worst[0]), "gradients_in_float32": repr(worst[1])}


def make(family, number):
    """The tensors of a random model and its metadata."""
    r = random.Random(f"{family} {number}")
    case = FAMILIES[family](r) | {"model_type": family}
    # Classes that do not take a width which heads do not divide.
    if family in ("llama", "deepseek_v2", "gemma3_text"):
        case["hidden_size"] += -case["hidden_size"] % case["num_attention_heads"]
    seed = r.randrange(1 << 30)
    model, tensors = llama.golden(case, seed, experts.with_biases(exact, seed))
    found, sensitive = {}, in_float32(case, seed, tensors)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensors[f"param.{name}"] = buffer.to(torch.float32)
    for name, tensor in tensors.items():
        kind, dot, rest = name.partition(".")
        apart = dot and family != "gpt_oss"
        parts = experts.split(rest, tensor, family == "mixtral") if apart else [(rest, tensor)]
        found |= {f"{kind}{dot}{part}": w for part, w in parts}
    fields = json.dumps(fields_of(config_of(case), number % 2 == 0), sort_keys=True)
    return found, {"config": fields} | sensitive


if __name__ == "__main__":
    torch.set_num_threads(1)
    smallest = "--smallest" in sys.argv
    folder, *rest = [word for word in sys.argv[1:] if word != "--smallest"]
    count, families = int(rest[0]) if rest else 8, rest[1:] or list(FAMILIES)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for family in families:
        made = [(number, *make(family, number)) for number in range(count)]
        if smallest:
            made = [min(made, key=lambda model: sum(tensor.numel() for tensor in model[1].values()))]
        for number, tensors, metadata in made:
            path = folder / f"{family}-{number}.safetensors"
            llama.write(path, tensors, metadata)
            print(f"{path.name}: loss {tensors['loss'].item():.6f}, {path.stat().st_size} bytes", flush=True)
