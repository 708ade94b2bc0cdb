#!/usr/bin/env bash
# How long steps wait for a checkpoint in the background, beside a copy of as many bytes and beside a synchronous save.
#   bench/scripts/save.sh LOCKSTEP [SIZE]   of 1 GB on the CPU, on one rank and on two. Fails where they wait longer than 1.2 times the copy,
#                                   which takes a machine with nothing else to do.
#   bench/scripts/save.sh LOCKSTEP 1b       of Llama-3.2-1B with AdamW on a GPU.
set -euo pipefail
lockstep=$(realpath "$1")
size=${2:-1GB}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ "$size" = 1b ]; then
    printf '[model]\npreset = "llama-3.2-1b"\n[train]\nseq = 4096\nglobal_batch = 8\ndevice = "cuda"\n[precision]\npolicy = "bf16"\n' > "$work/run.toml"
    "$lockstep" bench checkpoint "$work/run.toml" --rounds 3 --disk "$work"
    exit
fi
for ranks in 1 2; do
    "$lockstep" bench checkpoint --size "$size" --ranks $ranks --rounds 12 --disk "$work" | tee "$work/$ranks.txt"
    awk '/in the background/ && /steps wait/ { if ($NF > 1.2) { print "FAILED: " $NF " copies"; exit 1 } }' "$work/$ranks.txt"
done
