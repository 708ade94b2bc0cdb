"""Checks adapters against PEFT, from outside: what is exported loads there, what PEFT saves is read here.

Run as `python adapters.py PATH/TO/lockstep`. It needs Python 3.10 or later with the packages torch (CPU will do), transformers and peft; no
network. It prints one line per check and ends with an error at the first that fails. Last run with torch 2.15.0, transformers 5.23.0
and peft 0.21.2.

For a small random model of every family below:
  * trained with adapters and exported alone, PEFT loads the folder on the model, and its logits are those of the merged export;
  * adapters that PEFT has made, saved and given values are read by `lora.init_from`: a merged export has the logits of PEFT.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig)

TEXT = "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(200))
SHAPE = dict(vocab_size=256, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=96, max_position_embeddings=512, tie_word_embeddings=False)
BOTH = ["gate_up_proj", "down_proj"]
DENSE = ["q_proj", "v_proj"]

# The targets of lockstep, and of PEFT: modules and parameters.
CASES = {
    "llama": (LlamaConfig(**SHAPE), ["q_proj", "down_proj"], (["q_proj", "down_proj"], None)),
    "mixtral": (MixtralConfig(**SHAPE, num_local_experts=4), ["*"], (["q_proj", "k_proj", "v_proj", "o_proj"], BOTH)),
    "mixtral, down alone": (MixtralConfig(**SHAPE, num_local_experts=4), DENSE + ["w2"], (DENSE, ["down_proj"])),
    "mixtral, gate and up": (MixtralConfig(**SHAPE, num_local_experts=4), DENSE + ["w1", "w3"], (DENSE, ["gate_up_proj"])),
    "qwen3_moe": (
        Qwen3MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=12),
        DENSE + ["experts.*"], (DENSE, ["mlp.experts." + name for name in BOTH]),
    ),
    "olmoe": (OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, pad_token_id=None), DENSE + ["experts.*"], (DENSE, BOTH)),
    "deepseek_v3": (
        DeepseekV3Config(**SHAPE | dict(num_key_value_heads=4), n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
                         moe_intermediate_size=24, first_k_dense_replace=1, n_group=2, topk_group=1, kv_lora_rank=20, q_lora_rank=24,
                         qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, pad_token_id=None),
        ["o_proj", "mlp.experts.*"], (["o_proj"], BOTH),
    ),
}


def lockstep(*args, folder):
    done = subprocess.run([sys.argv[1], *map(str, args)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))}: {done.stderr}")
    return done


def logits(model):
    tokens = torch.tensor([list(TEXT.encode()[:64])])
    with torch.no_grad():
        return model.float().eval()(input_ids=tokens, use_cache=False).logits


def run(folder, name, targets, more=""):
    quoted = ", ".join(f'"{target}"' for target in targets)
    (folder / f"{name}.toml").write_text(
        f'[data]\npaths = ["text.txt"]\n[train]\ninit_from = "base"\nsteps = 3\nseq = 32\nglobal_batch = 4\nvalidate_every = 0\n'
        f'[precision]\npolicy = "fp32"\n[lora]\nrank = 4\nalpha = 6.0\ntargets = [{quoted}]\n{more}'
    )
    lockstep("train", f"{name}.toml", "--run-dir", name, "--quiet", folder=folder)
    lockstep("checkpoint", "export", name, "--out", f"{name}-merged", folder=folder)
    return logits(AutoModelForCausalLM.from_pretrained(folder / f"{name}-merged"))


def check(name, what, found, expected):
    apart = (found - expected).abs().max().item() / expected.abs().max().item()
    if not apart < 2e-5:
        sys.exit(f"{name}: {what}: logits are {apart:.1e} apart")
    print(f"{name:<22}{what}: logits {apart:.1e} apart")


def main():
    warnings.filterwarnings("ignore")
    for name, (config, targets, (modules, parameters)) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "text.txt").write_text(TEXT)
            torch.manual_seed(1)
            base = AutoModelForCausalLM.from_config(config)
            base.save_pretrained(folder / "base")
            untrained = logits(base)
            # Out.
            merged = run(folder, "run", targets, "[optimizer]\nlr = 2e-2\nwarmup_steps = 0\n")
            assert (merged - untrained).abs().max() > 1e-3, "the adapters have learnt nothing"
            said = lockstep("checkpoint", "export", "run", "--out", "adapter", "--adapter", folder=folder).stderr
            adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")
            more = "init_from = \"{}\"\n[optimizer]\nlr = 1e-12\nwarmup_steps = 0\n"
            if parameters == ["gate_up_proj"]:
                # PEFT looks for these inside of adapters of down.
                assert "have some: adapt all three" in said, said
            else:
                check(name, "exported, loaded by PEFT", logits(adapted), merged)
                # What PEFT makes of that, back.
                adapted.save_pretrained(folder / "again")
                check(name, "saved by PEFT, read back", run(folder, "back", targets, more.format("again")), merged)
            # In.
            config = LoraConfig(r=4, lora_alpha=6, target_modules=modules, target_parameters=parameters)
            made = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), config)
            for parameter in made.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.1)
            made.save_pretrained(folder / "made")
            check(name, "made by PEFT, read", run(folder, "in", targets, more.format("made")), logits(made))


if __name__ == "__main__":
    main()
