#!/usr/bin/env bash
# Texts of a file of prompts do not depend on what is written beside them: one at a time, 32 at once, and 7 in a cache that holds a part of them, with
# `train.deterministic` on a GPU, for a plain model and for one with sinks and windows. Trains both first, for half a minute.
# usage: bench/scripts/prompts.sh LOCKSTEP [DEVICE]      DEVICE is cuda where none is given
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/prompts.sh LOCKSTEP [DEVICE]}")
device=${2:-cuda}
docs=$(realpath "$(dirname "$0")/../../docs")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 - <<'PY'
import json
with open("prompts.jsonl", "w") as f:
    for i in range(80):
        f.write(json.dumps({"prompt": "the order of sums and the state of a rank " * (i % 11 + 1) + str(i)}) + "\n")
PY
sinks='attention_sinks = true
sliding_window = 128
layer_types = ["sliding", "full"]
activation = "clamped_swiglu"'
for model in plain sinks; do
    cat > run.toml <<TOML
[model]
vocab_size = 256
layers = 4
dim = 512
heads = 8
kv_heads = 4
ffn = 1024
$([ $model = plain ] || echo "$sinks")
[data]
paths = ["$docs"]
extensions = ["md"]
[train]
steps = ${STEPS:-120}
seq = 512
global_batch = 16
device = "$device"
deterministic = true
[precision]
policy = "bf16"
TOML
    "$lockstep" train run.toml --run-dir $model --quiet
    write() {
        local out=$1
        shift
        "$lockstep" generate $model --prompts prompts.jsonl --out "$model-$out" --max-tokens 60 --temperature 1 --top-p 1 --logprobs "$@" 2>&1 | tail -1
    }
    write all.jsonl
    write one.jsonl --batch 1
    write few.jsonl --batch 7 --cache 5MiB
    cmp $model-all.jsonl $model-one.jsonl
    cmp $model-all.jsonl $model-few.jsonl
    echo "$model: the same bytes"
done
