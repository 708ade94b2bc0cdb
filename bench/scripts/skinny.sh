#!/usr/bin/env bash
# Times the kernels for few rows by themselves, with 32 rows and one and the shapes of a model of 1B, in microseconds a launch: bench/scripts/skinny.sh
# Needs nvcc and a GPU. KERNELS=FOLDER takes other sources than those of the tree. With nvdisasm, also says how many copies of weights stand before the wait for
# the kernels before (ACQBULK): where none does, nothing is read early.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
kernels=${KERNELS:-$here/../../crates/cuda/kernels}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
    printf '#include <cstdio>\n#include <cstdlib>\n#include <cuda_runtime.h>\n'
    cat "$kernels"/{common,sums,units,skinny}.cuh
    echo 'SKINNIES(bf16, bf16, bf16, 2)'
    cat "$here/skinny.cu"
} >"$work/skinny.cu"
nvcc -O3 -arch=sm_90a -o "$work/skinny" "$work/skinny.cu"
"$work/skinny"
if command -v nvdisasm >/dev/null; then
    nvcc -O3 -arch=sm_90a -cubin -o "$work/skinny.cubin" "$work/skinny.cu"
    nvdisasm -c "$work/skinny.cubin" | awk '
        /\.section[ \t]+\.text\./ { name = $2; sub(/^.*\.text\./, "", name); sub(/,.*/, "", name); early = 0; waited = 0 }
        /ACQBULK/ && !waited { waited = 1; print "  " name ": " early " copies before the wait" }
        /LDGSTS/ && !waited { early++ }'
fi
