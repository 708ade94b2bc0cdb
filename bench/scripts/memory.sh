#!/usr/bin/env bash
# Training steps of models that are larger than what keeps their state in fp32: state in fewer bits, and state or activations in the memory of the host.
# usage: bench/scripts/memory.sh LOCKSTEP [ROWS...] > bench/records/memory.txt
#   ROWS  names of rows, by their beginnings: "13b 32b"; all where none is given. Needs a GPU of 140 GB, and 100 GiB of the host's memory.
# Limits stand for smaller cards: of 24, 16 and 8 GB, 22.3, 14.6 and 7.2 GiB are left to an arena and a context of 0.53 GiB.
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/memory.sh LOCKSTEP [ROWS...]}")
shift
wanted=("$@")
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "# bench/scripts/memory.sh ${wanted[*]:-} at ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}"
"$lockstep" doctor | grep -E "device 0" || true
printf "%-26s %9s %10s %9s %9s %9s %7s\n" "" tokens/s "ms a step" TFLOP/s "GPU, GiB" "host, GiB" loss

# NAME ARGUMENTS...: one row.
row() {
    local name=$1 found
    shift
    if [ ${#wanted[@]} -gt 0 ]; then
        found=
        for start in "${wanted[@]}"; do [[ $name == "$start"* ]] && found=1; done
        [ -n "$found" ] || return 0
    fi
    if ! timeout 300 "$lockstep" bench train --device cuda --steps "${STEPS:-4}" "$@" >"$work/out" 2>&1; then
        printf "%-26s FAILED: %s\n" "$name" "$(grep -m1 -E "error" "$work/out" || tail -1 "$work/out")"
        return 0
    fi
    python3 - "$name" "$work/out" <<'PY'
import re, sys
text = open(sys.argv[2]).read()
find = lambda pattern: (re.search(pattern, text) or [None, "-"])[1]
print(f'{sys.argv[1]:<26} {find(r"([0-9,.]+) tokens/s"):>9} {find(r"([0-9.]+) ms a step"):>10} {find(r"([0-9.]+) TFLOP/s"):>9} '
      f'{find(r"peak ([0-9.]+) GiB"):>9} {find(r"host memory: ([0-9.]+)"):>9} {find(r"loss ([0-9.]+)"):>7}')
PY
}
bf16="--set precision.master=bf16 --set precision.moments=bf16 --gradients bf16"
int8="--set precision.master=bf16 --set precision.moments=int8 --gradients bf16"
all="--seq 4096 --batch 8 --micro-batch 1"
b32="--preset qwen2.5-7b --set model.layers=64 --set model.dim=5120 --set model.heads=40 --set model.kv_heads=8 --set model.ffn=27648 --set model.head_dim=128"
# Models larger than the card.
row 13b-fp32-master --preset llama-2-13b $all --set precision.moments=bf16 --gradients bf16 --recompute full --set offload.optimizer=auto
row 13b-20GiB --preset llama-2-13b $all --set precision.moments=bf16 --gradients bf16 --recompute budget=138.4GiB --set "offload.optimizer=20 GiB"
row 13b-30GiB --preset llama-2-13b $all --set precision.moments=bf16 --gradients bf16 --recompute budget=138.4GiB --set "offload.optimizer=30 GiB"
row 13b-20GiB-fp8 --preset llama-2-13b $all --set precision.moments=bf16 --gradients bf16 --recompute budget=138.0GiB --set "offload.optimizer=20 GiB" --precision fp8
row 13b-bf16-fp8 --preset llama-2-13b $all $bf16 --recompute budget=138.0GiB --precision fp8
row 32b-bf16-int8 $b32 $all $int8 --recompute full --set offload.optimizer=auto
# Eight billion parameters in less memory.
row 8b --preset llama-3.1-8b $all --gradients bf16
row 8b-80GiB --preset llama-3.1-8b $all $bf16 --recompute budget=79.4GiB
row 8b-offload --preset llama-3.1-8b $all --gradients bf16 --set offload.optimizer=true
row 8b-offload-micro-2 --preset llama-3.1-8b --seq 4096 --batch 8 --micro-batch 2 --gradients bf16 --set offload.optimizer=true
row 8b-offload-40GiB --preset llama-3.1-8b $all --gradients bf16 --set "offload.optimizer=40 GiB"
row 8b-half-offload --preset llama-3.1-8b $all --gradients bf16 --set "offload.optimizer=45 GiB"
row 8b-batch1 --preset llama-3.1-8b --seq 4096 --batch 1 --gradients bf16
row 8b-batch1-80GiB --preset llama-3.1-8b --seq 4096 --batch 1 $bf16 --recompute budget=79.4GiB
row 8b-batch1-m-bf16 --preset llama-3.1-8b --seq 4096 --batch 1 --gradients bf16 --set precision.moments=bf16
row 8b-batch1-m-int8 --preset llama-3.1-8b --seq 4096 --batch 1 --gradients bf16 --set precision.moments=int8
# LoRA and full fine-tuning.
row 8b-lora-24GB --preset llama-3.1-8b $all --set lora.rank=16 --recompute budget=21.7GiB
row 8b-lora-24GB-fp8 --preset llama-3.1-8b $all --set lora.rank=16 --recompute budget=21.7GiB --precision fp8
# One billion.
row 1b --preset llama-3.2-1b --seq 4096 --batch 8
row 1b-24GB --preset llama-3.2-1b $all $bf16 --recompute budget=21.7GiB
row 1b-24GB-fp32-offload --preset llama-3.2-1b $all --gradients bf16 --recompute budget=21.7GiB --set offload.optimizer=true
# Activations in the memory of the host, beside recomputation: the same tokens, in turns. A long sequence of eight billion parameters, and one billion.
for turn in 1 2; do
    long="--preset llama-3.1-8b --seq 32768 --batch 2 --micro-batch 1 $bf16"
    row saved-8b-full-$turn $long --recompute full
    row saved-8b-full-out-$turn $long --recompute full --set offload.activations=true
    row saved-8b-budget-$turn $long --recompute budget=136GiB
    row saved-8b-budget-16GiB-$turn $long --recompute budget=136GiB --set "offload.activations=16 GiB"
    row saved-8b-selective-out-$turn $long --recompute selective --set offload.activations=true
    row saved-1b-none-$turn --preset llama-3.2-1b --seq 4096 --batch 8 --recompute none
    row saved-1b-none-8GiB-$turn --preset llama-3.2-1b --seq 4096 --batch 8 --recompute none --set "offload.activations=8 GiB"
    row saved-1b-none-out-$turn --preset llama-3.2-1b --seq 4096 --batch 8 --recompute none --set offload.activations=true
    row saved-1b-selective-$turn --preset llama-3.2-1b --seq 4096 --batch 8 --recompute selective
    row saved-1b-full-$turn --preset llama-3.2-1b --seq 4096 --batch 8 --recompute full
    row saved-1b-full-out-$turn --preset llama-3.2-1b --seq 4096 --batch 8 --recompute full --set offload.activations=true
done
# What smaller cards train.
row 3b-24GB --preset llama-3.2-3b $all $int8 --recompute budget=21.7GiB --set "offload.optimizer=8 GiB"
row 3b-lora-16GB --preset llama-3.2-3b $all --set lora.rank=16 --recompute budget=14.0GiB
row 1b-16GB --preset llama-3.2-1b $all $int8 --recompute budget=14.0GiB
row 1b-lora-8GB --preset llama-3.2-1b $all --set lora.rank=16 --recompute budget=6.6GiB
row 0.5b-8GB --preset qwen2.5-0.5b $all $int8 --recompute budget=6.6GiB
# Beside peers: llm.c 47.8k at 54.1 GiB; PyTorch 60.7k; llmq 61.1k with weights, gradients and moments in bf16.
row peers-gpt2-xl --preset gpt2-xl --seq 1024 --batch 16 $bf16 --recompute budget=53.5GiB
row peers-1b --preset llama-3.2-1b --seq 4096 --batch 8 --set precision.moments=bf16 --recompute budget=38.9GiB
row peers-qwen2.5-1.5b --preset qwen2.5-1.5b --seq 1024 --batch 64 --micro-batch 32 $bf16
