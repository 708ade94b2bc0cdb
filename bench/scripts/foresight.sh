#!/usr/bin/env bash
# Predicted against measured on this machine: in every round it is measured (bench --save), then steps of models of several sizes are
# predicted and timed: on a CPU by the lower quartile of six steps, as bench --save takes the lower quartile of its own, and on a GPU by
# the median. Prints a line per case: the median over rounds of predicted ÷ measured. Fails where the median case is more
# than 10% off or one more than 20%; on a GPU, where the median case is more than 3% off or one more than 8%.
# usage: bench/scripts/foresight.sh LOCKSTEP [cpu|cuda] [ROUNDS] > bench/records/foresight-cpu.txt
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/foresight.sh LOCKSTEP [cpu|cuda] [ROUNDS]}")
here=$(dirname "$(realpath "$0")")
device=${2:-cpu}
rounds=${3:-7}
folder=$(mktemp -d)
export LOCKSTEP_MACHINES=${LOCKSTEP_MACHINES:-$folder/machines}
cd "$folder"

# NAME BENCH-ARGUMENTS...
cases=()
case $device in
cpu)
    shapes=(
        "15m --preset llama-15m --seq 256 --batch 4"
        "29m --preset llama-29m --seq 512 --batch 2"
        "gpt2-7m gpt2.toml"
        "wide-11m wide.toml"
    )
    cat > gpt2.toml <<< $'[model]\narchitecture = "gpt2"\nvocab_size = 6000\nlayers = 4\ndim = 304\nheads = 4\nffn = 1216\n[train]\nseq = 200\nglobal_batch = 4'
    cat > wide.toml <<< $'[model]\nvocab_size = 3000\nlayers = 2\ndim = 768\nheads = 6\nkv_heads = 3\nffn = 1536\n[train]\nseq = 384\nglobal_batch = 2'
    for shape in "${shapes[@]}"; do
        read -r name args <<< "$shape"
        for precision in fp32 bf16; do
            cases+=("$name/$precision $args --precision $precision --steps 6")
            cases+=("$name/$precision/recompute $args --precision $precision --recompute full --steps 6")
            cases+=("$name/$precision/dp=2 $args --precision $precision --set parallel.dp=2 --micro-batch 1 --steps 6")
            cases+=("$name/$precision/pp=2 $args --precision $precision --set parallel.pp=2 --micro-batch 1 --steps 6")
        done
    done
    ;;
cuda)
    cases+=(
        "124m --preset llama-124m --seq 1024 --batch 64 --steps 36"
        "1b --preset llama-3.2-1b --seq 4096 --batch 8 --steps 10"
        "gpt2-xl --preset gpt2-xl --seq 1024 --batch 16 --steps 14"
        "8b --preset llama-3-8b --seq 4096 --batch 1 --gradients bf16 --recompute selective --steps 11"
        "350m mid.toml --steps 36"
        "3b-4layers big.toml --steps 36"
        "gpt2-90m odd.toml --recompute full --steps 44"
        "1b-32k --preset llama-3.2-1b --seq 32768 --batch 1 --steps 9"
        "1b-micro-2k --preset llama-3.2-1b --seq 2048 --batch 8 --micro-batch 1 --steps 15"
        "0.5b-gqa-8k --preset qwen2.5-0.5b --seq 8192 --batch 4 --steps 18"
        "gpt2-774m --preset gpt2-large --seq 1024 --batch 16 --steps 24"
        "3b --preset llama-3.2-3b --seq 4096 --batch 4 --gradients bf16 --steps 8"
        "moe-3b $here/../configs/moe-3b.toml --batch 4 --steps 24"
        "mla-1.3b latent.toml --steps 9"
        "1b-fp8 --preset llama-3.2-1b --seq 4096 --batch 8 --precision fp8 --steps 12"
    )
    cat > latent.toml <<< $'[model]\nvocab_size = 32000\nlayers = 24\ndim = 2048\nheads = 16\nffn = 5632\nkv_lora_rank = 512\nqk_nope_head_dim = 128\nqk_rope_head_dim = 64\nv_head_dim = 128\n[train]\nseq = 4096\nglobal_batch = 8'
    cat > mid.toml <<< $'[model]\nvocab_size = 40000\nlayers = 16\ndim = 1280\nheads = 20\nkv_heads = 4\nffn = 3456\n[train]\nseq = 2048\nglobal_batch = 12'
    cat > big.toml <<< $'[model]\nvocab_size = 100352\nlayers = 4\ndim = 3328\nheads = 26\nkv_heads = 13\nffn = 9216\n[train]\nseq = 3072\nglobal_batch = 4'
    cat > odd.toml <<< $'[model]\narchitecture = "gpt2"\nvocab_size = 50304\nlayers = 8\ndim = 896\nheads = 14\nffn = 3584\n[train]\nseq = 1024\nglobal_batch = 48'
    # About four seconds of each, in which the clock settles.
    for i in "${!cases[@]}"; do
        [[ ${cases[i]} == *--precision* ]] || cases[i]+=" --precision bf16"
    done
    ;;
*) echo "the device is cpu or cuda, not $device" >&2; exit 2 ;;
esac

echo "# $("$lockstep" --version), $device, $rounds rounds"
for ((round = 1; round <= rounds; round++)); do
    "$lockstep" bench --save here --device "$device" 2> save.log | sed 's/^/# /; /saved in/d'
    for entry in "${cases[@]}"; do
        read -r name args <<< "$entry"
        # shellcheck disable=SC2086
        "$lockstep" bench train $args --device "$device" --format json 2> case.log > case.json || { cat case.log >&2; continue; }
        python3 - "$name" "$round" <<'PYTHON' | tee -a rows.txt >&2
import json, sys
case = json.load(open("case.json"))
predicted = case["prediction"]["step_s"]
measured = case["quartile_s"] if case["device"] == "cpu" else case["step_s"]
print(sys.argv[1], sys.argv[2], predicted, measured, case["prediction"]["memory_bytes"], case["arena_bytes"])
PYTHON
    done
done
python3 - "$device" <<'PYTHON'
import statistics, sys
cases = {}
for line in open("rows.txt"):
    name, _, *numbers = line.split()
    cases.setdefault(name, []).append([float(n) for n in numbers])
print(f"{'case':32} {'predicted':>11} {'measured':>11} {'ratio':>7} {'lowest':>7} {'highest':>7}")
off = []
for name, rows in cases.items():
    ratios = sorted(p / m for p, m, *_ in rows)
    predicted, measured = (1e3 * statistics.median(row[i] for row in rows) for i in (0, 1))
    ratio = statistics.median(ratios)
    off.append(abs(ratio - 1))
    print(f"{name:32} {predicted:8.1f} ms {measured:8.1f} ms {ratio:7.3f} {ratios[0]:7.3f} {ratios[-1]:7.3f}")
median, worst = statistics.median(off), max(off)
print(f"{len(off)} cases: the median is {100 * median:.1f}% off, the worst {100 * worst:.1f}%")
allowed = (0.10, 0.20) if sys.argv[1] == "cpu" else (0.03, 0.08)
sys.exit(median > allowed[0] or worst > allowed[1])
PYTHON
