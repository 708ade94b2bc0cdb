#!/usr/bin/env bash
# A small mixture of experts on two threads of the CPU beside PyTorch, in turn: tokens/s of every round, and the ratio of medians.
#
#     bench/scripts/moe-tiny.sh LOCKSTEP PEER [ROUNDS] > bench/records/moe-tiny.txt
#
# PEER is a command that trains the shape of bench/configs/moe-tiny.toml in PyTorch on random tokens (dropless experts sorted by token, AdamW, gradient clipping, bf16 by
# autocast) and prints a JSON object with `tokens_per_s`; `--precision fp32|bf16` is appended. Both take two threads and 8 steps.
set -euo pipefail
lockstep=$1 peer=$2 rounds=${3:-5}
here=$(cd "$(dirname "$0")" && pwd)
rate() {
    python3 -c 'import json, sys; print(round(json.loads(sys.stdin.read().strip().splitlines()[-1])["tokens_per_s"]))'
}
echo "$("$lockstep" --version), $(nproc) cores: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
for precision in fp32 bf16; do
    ours=() theirs=()
    for ((round = 0; round < rounds; round++)); do
        ours+=("$("$lockstep" bench train "$here/../configs/moe-tiny.toml" --precision "$precision" --steps 8 --format json | tr -d '\n' | rate)")
        theirs+=("$($peer --precision "$precision" --steps 8 | rate)")
    done
    python3 - "$precision" "${ours[*]}" "${theirs[*]}" <<'PYTHON'
import statistics, sys
precision, ours, theirs = sys.argv[1], *([int(x) for x in text.split()] for text in sys.argv[2:])
print(f"{precision}: ours {ours}, peer {theirs} tokens/s; medians {statistics.median(ours)} / {statistics.median(theirs)}"
      f" = {statistics.median(ours) / statistics.median(theirs):.2f}")
PYTHON
done
