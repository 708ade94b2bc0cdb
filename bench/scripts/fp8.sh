#!/usr/bin/env bash
# Training steps in fp8 beside bf16 on one GPU, alternating, medians of the rounds; and beside a peer where one is named.
# usage: bench/scripts/fp8.sh LOCKSTEP [ROUNDS [PEER]] > bench/records/fp8.txt
#   PEER  a command that takes `--fp8 tensorwise` (or nothing, for bf16) after it and prints a JSON object with tokens_per_s and peak_gib:
#         a plain Llama of the same size in PyTorch, "python3 torch_llama.py 1b --compile"
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/fp8.sh LOCKSTEP [ROUNDS [PEER]]}")
rounds=${2:-3}
peer=${3:-}
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "# bench/scripts/fp8.sh at ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}, $rounds rounds"
"$lockstep" doctor | grep -E "device 0|cuBLASLt" || true

# NAME ARGUMENTS...: a step, as a line "tokens/s GiB" after others of its name.
step() {
    "$lockstep" bench train --device cuda --steps 10 "${@:2}" >"$work/out" 2>&1 || { cat "$work/out" && exit 1; }
    sed -n 's/^\([0-9,]*\) tokens\/s.*/\1/p; s/.*peak \([0-9.]*\) GiB.*/\1/p' "$work/out" | tr -d , | paste -sd' ' >>"$work/$1"
}
for _ in $(seq "$rounds"); do
    for precision in bf16 fp8; do
        step "1b-$precision" --preset llama-3.2-1b --seq 4096 --batch 8 --precision $precision
        step "8b-$precision" --preset llama-3.1-8b --seq 4096 --batch 1 --gradients bf16 --precision $precision
        step "gpt2-xl-$precision" --preset gpt2-xl --seq 1024 --batch 16 --precision $precision
        step "124m-$precision" --preset llama-124m --seq 1024 --batch 64 --precision $precision
        step "moe-3b-$precision" bench/configs/moe-3b.toml --batch 4 --recompute budget=51.9GiB --precision $precision
    done
    for precision in bf16 fp8; do
        step "moe-3b-saved-$precision" bench/configs/moe-3b.toml --batch 4 --recompute none --precision $precision
    done
    for recipe in delayed rowwise block; do
        step "1b-$recipe-fp8" --preset llama-3.2-1b --seq 4096 --batch 8 --precision fp8 --set precision.fp8_recipe=$recipe
    done
    step "1b-51.4GiB-fp8" --preset llama-3.2-1b --seq 4096 --batch 8 --precision fp8 --recompute budget=51.4GiB
    if [ -n "$peer" ]; then
        for how in bf16 fp8; do
            $peer $([ $how = fp8 ] && echo --fp8 tensorwise) | python3 -c '
import json, sys
m = json.loads(sys.stdin.read().strip().splitlines()[-1])
print(m["tokens_per_s"], m["peak_gib"])' >>"$work/peer-$how" || echo "the peer failed in $how" >&2
        done
    fi
done
python3 - "$work" <<'PY'
import pathlib, statistics, sys
of = {}
for file in pathlib.Path(sys.argv[1]).iterdir():
    if file.name != "out":
        of[file.name] = list(zip(*[map(float, line.split()) for line in file.read_text().splitlines()]))
speed = lambda name: statistics.median(of[name][0])
base = {name: "1b-bf16" for name in ["1b-51.4GiB-fp8", "1b-delayed-fp8", "1b-rowwise-fp8", "1b-block-fp8"]}
print(f'{"":<18} {"tokens/s":>9} {"GiB":>7}  beside bf16   rounds')
for name in sorted(of):
    other = base.get(name, name.replace("-fp8", "-bf16"))
    ratio = f"{speed(name) / speed(other):.3f}" if name.endswith("fp8") and other in of else ""
    rounds = " ".join(f"{rate:.0f}" for rate in of[name][0])
    print(f"{name:<18} {speed(name):>9.0f} {statistics.median(of[name][1]):>7.2f}  {ratio:>11}   {rounds}")
if "peer-fp8" in of:
    for ours in ["1b-fp8", "1b-51.4GiB-fp8"]:
        print(f"{ours} beside the peer in fp8: {speed(ours) / speed('peer-fp8'):.3f}")
PY
