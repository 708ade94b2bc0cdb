#!/bin/sh
# How long `lockstep plan` takes and how much memory, with every axis free: 8B on 512 GPUs, 405B on 16,384.
# Usage: bench/scripts/plan.sh [LOCKSTEP] > bench/records/plan.txt
set -eu
lockstep=${1:-target/release/lockstep}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
run() {
    printf '[model]\npreset = "%s"\n[train]\nseq = %s\nglobal_batch = %s\n' "$1" "$2" "$3" > "$folder/run.toml"
    shift 3
    echo "\$ lockstep plan run.toml $*"
    /usr/bin/time -f '%e s wall, %U s user, %S s system, %M KiB resident' -o "$folder/time" \
        "$lockstep" plan "$folder/run.toml" "$@" 2> /dev/null
    cat "$folder/time"
    echo
}
run llama-3-8b 4096 1024 --cluster leonardo --gpus 512 --tokens 15T --rejected
run llama-3-405b 8192 2048 --cluster meta-24k --gpus 16384 --tokens 15T --rejected --why "dp=128,zero=1,tp=8,sp,pp=16,interleaved,virtual=4"
