"""Checks import and export against Hugging Face transformers, from outside.

Run as `python roundtrip.py PATH/TO/lockstep`. It needs Python 3.10 or later with the
packages torch (CPU will do), transformers and safetensors; no network. It prints one
line per check and ends with an error at the first that fails. Last run with torch
2.15.0, transformers 5.23.0 and safetensors 0.8.0.

For a small random model of every architecture:
  * saved by transformers, imported, exported: transformers loads the export with no
    missing and no unexpected key, every weight has the same bits, and so have logits;
  * `lockstep eval` of the import gives the loss that transformers gives;
  * the same for shards and for bf16 weights.
For a model that lockstep trained: transformers loads the export, its loss on a text is
that of `lockstep eval` to 1e-4, and the exported tokenizer makes bytes of text.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import (AutoModelForCausalLM, AutoTokenizer, DeepseekV2Config, DeepseekV3Config, Gemma3TextConfig,
                          GPT2Config, GptOssConfig, LlamaConfig, MistralConfig, Olmo2Config, Olmo3Config, Qwen2Config, Qwen3Config, SmolLM3Config)

TEXT = "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(12))
ROPE = {"rope_type": "default", "rope_theta": 20000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SHAPE = dict(vocab_size=256, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=96, max_position_embeddings=512)

LATENT = SHAPE | dict(
    num_key_value_heads=4, num_hidden_layers=3, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3,
    moe_intermediate_size=24, first_k_dense_replace=1, n_group=4, topk_group=2, kv_lora_rank=20, qk_nope_head_dim=12,
    qk_rope_head_dim=8, v_head_dim=10, pad_token_id=None,
)

CASES = {
    "llama": LlamaConfig(**SHAPE, head_dim=16, rope_parameters=ROPE, tie_word_embeddings=False),
    "llama, tied, llama3 rotary": LlamaConfig(**SHAPE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral, window": MistralConfig(**SHAPE, rope_parameters=ROPE, sliding_window=40),
    "mistral": MistralConfig(**SHAPE, rope_parameters=ROPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE, rope_parameters=ROPE),
    "qwen2, tied": Qwen2Config(**SHAPE, rope_parameters=ROPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=20, rope_parameters=ROPE),
    "smollm3": SmolLM3Config(**SHAPE | dict(num_hidden_layers=5), rope_parameters=YARN, pad_token_id=None),
    "olmo2": Olmo2Config(**SHAPE, rope_parameters=ROPE, pad_token_id=None),
    "olmo3": Olmo3Config(**SHAPE | dict(num_hidden_layers=5), sliding_window=40, pad_token_id=None,
                         rope_parameters={"full_attention": YARN, "sliding_attention": ROPE}),
    "gemma3": Gemma3TextConfig(**SHAPE | dict(num_hidden_layers=7), head_dim=20, query_pre_attn_scalar=24,
                               sliding_window=40, rope_parameters={"full_attention": LINEAR, "sliding_attention": ROPE}),
    "deepseek_v2": DeepseekV2Config(**LATENT, q_lora_rank=None, topk_method="group_limited_greedy", rope_parameters=ROPE),
    "deepseek_v3": DeepseekV3Config(**LATENT, q_lora_rank=24, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)),
    "gpt_oss": GptOssConfig(**SHAPE | dict(num_hidden_layers=3), head_dim=20, num_local_experts=6, num_experts_per_tok=3,
                            sliding_window=40, swiglu_limit=0.05, rope_parameters=YARN | dict(truncate=False)),
    "gpt2": GPT2Config(vocab_size=256, n_embd=48, n_layer=2, n_head=4, n_positions=512),
    "gpt2, untied": GPT2Config(vocab_size=256, n_embd=48, n_layer=2, n_head=4, n_inner=64, n_positions=512,
                               tie_word_embeddings=False),
}

CONFIG = """
[model]
vocab_size = 256
layers = 2
dim = 48
heads = 4
kv_heads = 2
ffn = 96
tied_embeddings = true
[data]
paths = ["text"]
[train]
steps = 40
seq = 64
global_batch = 8
[optimizer]
lr = 3e-3
[parallel]
dp = 2
zero = 3
"""


def lockstep(*args):
    done = subprocess.run([sys.argv[1], *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    wrong = {name: keys for name, keys in info.items() if keys}
    assert not wrong, wrong
    return model.eval()


def tokens(text):
    """The text as lockstep reads it: bytes, and a byte 0 at the end."""
    return torch.tensor([[*text.encode(), 0]])


def loss(model, text):
    ids = tokens(text)
    with torch.no_grad():
        logits = model.float()(ids[:, :-1], use_cache=False).logits[0]
    return cross_entropy(logits, ids[0, 1:]).item()


def evaluated(run, text_file):
    return json.loads(lockstep("eval", run, "--data", text_file, "--seq", 512, "--format", "json"))["loss"]


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def round_trip(name, config, folder, dtype=torch.float32, shard="5GB"):
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too
            p.add_(0.1 * torch.randn(p.shape))
    model = model.to(dtype)
    model.save_pretrained(folder / "theirs", max_shard_size=shard)
    lockstep("checkpoint", "import", folder / "theirs", "--out", folder / "run")
    lockstep("checkpoint", "export", folder / "run", "--out", folder / "ours")
    ours = load(folder / "ours")
    same_weights(model, ours)
    theirs = load(folder / "theirs")
    with torch.no_grad():
        logits = [m(tokens(TEXT), use_cache=False).logits for m in (theirs, ours)]
    assert torch.equal(*logits)
    shards = len(list((folder / "theirs").glob("*.safetensors")))
    line = f"{name}, {dtype}, {shards} file(s): {len(model.state_dict())} tensors and logits the same"
    if dtype == torch.float32:
        text_file = folder / "text.txt"
        text_file.write_text(TEXT)
        a, b = evaluated(folder / "run", text_file), loss(model, TEXT)
        assert abs(a - b) < 1e-4, (a, b)
        line += f"; loss {a:.6f} by lockstep, {b:.6f} by transformers"
    print(line, flush=True)


def trained(folder):
    (folder / "text").mkdir()
    for i in range(8):
        (folder / "text" / f"{i}.txt").write_text("".join(f"{i} times {j} is {i * j}.\n" for j in range(200)))
    (folder / "run.toml").write_text(CONFIG)
    lockstep("train", folder / "run.toml", "--run-dir", folder / "run")
    text_file = folder / "eval.txt"
    text_file.write_text(TEXT)
    expected = evaluated(folder / "run", text_file)
    for dtype, tolerance in (("f32", 1e-4), ("bf16", 2e-2)):
        lockstep("checkpoint", "export", folder / "run", "--out", folder / dtype, "--dtype", dtype)
        found = loss(load(folder / dtype), TEXT)
        assert abs(found - expected) < tolerance, (found, expected)
        print(f"trained on 2 ranks, exported in {dtype}: loss {expected:.6f} by lockstep, {found:.6f} by transformers")
    tokenizer = AutoTokenizer.from_pretrained(folder / "f32")
    text = TEXT + "é € 😀\t\n  end"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    print("its tokenizer makes bytes of text, and text of bytes")


def main():
    for name, config in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            round_trip(name, config, Path(folder))
    for name in ("llama", "gpt2"):
        for dtype, shard in ((torch.bfloat16, "5GB"), (torch.float32, "60KB")):
            with tempfile.TemporaryDirectory() as folder:
                round_trip(name, CASES[name], Path(folder), dtype, shard)
    with tempfile.TemporaryDirectory() as folder:
        trained(Path(folder))


if __name__ == "__main__":
    main()
