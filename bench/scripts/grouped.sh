#!/usr/bin/env bash
# Grouped matmuls of experts beside dense ones, on a Hopper GPU with nvcc: about 40 s. Fails where a result is wrong.
# usage: bench/scripts/grouped.sh > bench/records/grouped.txt
set -euo pipefail
cd "$(dirname "$0")"
program=$(mktemp)
nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -diag-suppress 177 -o "$program" grouped.cu -lcublas -lcuda
"$program"
