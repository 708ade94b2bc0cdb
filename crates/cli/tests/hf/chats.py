"""Checks from outside that a model which lockstep has tuned on chats answers and stops in transformers.

Run as `python chats.py PATH/TO/lockstep`. It needs Python 3.10 or later with the packages torch (CPU will do) and transformers; no network. It
prints one line per question and ends with an error at the first that fails. Last run with torch 2.15.0 and transformers 5.23.0.

A tiny model learns the colours of six things from conversations, all its weights and then with adapters; its export answers by
`apply_chat_template` and `generate`, with the special tokens and the template that went out with it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

COLOURS = {"sky": "blue", "grass": "green", "blood": "red", "snow": "white", "night": "black", "sun": "yellow"}
CONFIG = """
[data]
paths = ["chats.jsonl"]
format = "chat"
tokenizer = "tokenizer.json"
[optimizer]
lr = 4e-3
warmup_steps = 5
[train]
seq = 96
global_batch = 8
validate_every = 0
"""
MODEL = "[model]\nvocab_size = 384\nlayers = 2\ndim = 64\nheads = 4\nkv_heads = 2\nffn = 128\n"


def question(thing):
    return {"role": "user", "content": f"The colour of {thing}?"}


def lockstep(*args, folder):
    done = subprocess.run([sys.argv[1], *map(str, args)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))}: {done.stderr}")


def check(folder, name, colours):
    lockstep("checkpoint", "export", name, "--out", f"{name}-hf", folder=folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / f"{name}-hf")
    model = AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf").eval()
    for thing, colour in colours.items():
        prompt = tokenizer.apply_chat_template([question(thing)], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**prompt, max_new_tokens=20, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        answer = out[0, prompt["input_ids"].shape[1]:]
        if tokenizer.decode(answer, skip_special_tokens=True) != colour or tokenizer.decode(answer[-1:]) != "<|im_end|>":
            sys.exit(f"{name}: {thing}: {tokenizer.decode(answer)!r}")
        print(f"{name}: {thing}: {tokenizer.decode(answer)}")


def write(folder, colours):
    pairs = list(colours.items())
    with open(folder / "chats.jsonl", "w") as file:
        for i in range(144):
            turns = [pairs[i % 6], pairs[i // 6 % 6]]
            messages = [m for thing, colour in turns for m in (question(thing), {"role": "assistant", "content": colour})]
            file.write(json.dumps({"messages": messages}) + "\n")


def main():
    fixtures = Path(__file__).parent / "../../../data/tests/fixtures/chats"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "tokenizer.json").write_bytes((fixtures / "tokenizer.json").read_bytes())
        template = "{{ bos_token }}" + (fixtures / "chatml.jinja").read_text()
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
        write(folder, COLOURS)
        (folder / "run.toml").write_text(MODEL + CONFIG + "steps = 90\n")
        lockstep("train", "run.toml", "--run-dir", "all", "--quiet", folder=folder)
        check(folder, "all", COLOURS)
        # Other answers, by adapters.
        other = dict(zip(COLOURS, reversed(COLOURS.values())))
        write(folder, other)
        (folder / "lora.toml").write_text(CONFIG.replace("[train]", '[train]\ninit_from = "all-hf"') + "steps = 90\n[lora]\nrank = 16\n")
        lockstep("train", "lora.toml", "--run-dir", "lora", "--quiet", folder=folder)
        check(folder, "lora", other)


if __name__ == "__main__":
    main()
