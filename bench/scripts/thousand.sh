#!/usr/bin/env bash
# A thousand prompts of 10 to 400 tokens with a cache that holds 16 of them: all finish, as they do one by one. Killed at random twenty times and started again, they give the same
# file. Trains a small model first, for half a minute.
# usage: bench/scripts/thousand.sh LOCKSTEP [DEVICE] > bench/records/thousand.txt      DEVICE is cuda where none is given
#   PROMPTS, KILLS, MOST  in the environment: other numbers than 1000 and 20, and the most seconds until a kill (1.5)
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/thousand.sh LOCKSTEP [DEVICE]}")
device=${2:-cuda}
prompts=${PROMPTS:-1000} kills=${KILLS:-20} most=${MOST:-1.5}
echo "# bench/scripts/thousand.sh $device at ${COMMIT:-$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null)}"
docs=$(realpath "$(dirname "$0")/../../docs")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 - "$prompts" <<'PY'
import json, random, sys
random.seed(7)
words = "the order of sums and the state of a rank is kept in pages that texts take as they grow".split()
with open("prompts.jsonl", "w") as f:
    for i in range(int(sys.argv[1])):
        text = " ".join(random.choice(words) for _ in range(100))[: random.randint(10, 400)]
        f.write(json.dumps({"prompt": text}) + "\n")
PY
cat > run.toml <<TOML
[model]
vocab_size = 256
layers = 4
dim = 512
heads = 8
kv_heads = 4
ffn = 1024
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
"$lockstep" train run.toml --run-dir run --quiet
# A position takes 4 KiB in all layers, a text 1.4 MiB in the middle: 16 of them at a time, where 64 would be under way.
write() {
    local out=$1
    shift
    "$lockstep" generate run --prompts prompts.jsonl --out "$out" --max-tokens 60 --temperature 1 --top-p 1 --logprobs "$@" 2>&1 | tail -1
}
few() { write "$1" --batch 64 --cache 24MiB; }
few all.jsonl
write one.jsonl --batch 1
cmp all.jsonl one.jsonl
echo "$prompts prompts, one by one: the same bytes"
killed=0 finished=0
while [ "$killed" -lt "$kills" ]; do
    seconds=$(python3 -c "import random; print(round(random.uniform(0.2, $most), 2))")
    few killed.jsonl > said &
    waiting=$!
    sleep "$seconds"
    if pkill -KILL -f "generate run --prompts prompts.jsonl --out killed.jsonl"; then
        wait "$waiting" || true
        killed=$((killed + 1))
        echo "kill $killed after $seconds s: $(cat killed.jsonl* 2> /dev/null | wc -l) lines"
    else
        wait "$waiting"
        cmp all.jsonl killed.jsonl
        finished=$((finished + 1))
        rm -f killed.jsonl*
    fi
done
few killed.jsonl
cmp all.jsonl killed.jsonl
echo "killed $killed times in $((finished + 1)) runs: the same bytes"
