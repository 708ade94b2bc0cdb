#!/bin/sh
# What `lockstep plan` proposes for runs that others have published (docs/public-runs.md): all of them, or those that are named.
# Usage: bench/scripts/plan-public.sh [LOCKSTEP [RUN...]] > bench/records/plan-public.txt
set -eu
lockstep=$(realpath "${1:-target/release/lockstep}")
[ $# -eq 0 ] || shift
cd "$(dirname "$0")/../configs/public"
time=$(mktemp)
trap 'rm "$time"' EXIT
run() {
    echo "\$ lockstep plan $*"
    /usr/bin/time -f '%e s wall, %U s user, %S s system, %M KiB resident' -o "$time" "$lockstep" plan "$@" 2> /dev/null || echo "it failed"
    cat "$time"
    echo
}
for name in ${*:-tinyllama-1.1b mpt-7b opt-175b llama-3.1-405b nemotron-4-340b mt-nlg-530b deepseek-v3}; do
    case $name in
        tinyllama-1.1b) run $name.toml --gpu a100-40gb --gpus 16 --tokens 3T ;;
        mpt-7b) run $name.toml --gpu a100-40gb --gpus 440 --tokens 1T ;;
        opt-175b) run $name.toml --gpu a100 --gpus 992 ;;
        llama-3.1-405b)
            run $name.toml --cluster meta-24k --gpus 8192
            run $name.toml --cluster meta-24k --gpus 16384 --why dp=128,zero=1,tp=8,sp,pp=16,interleaved,virtual=4
            ;;
        nemotron-4-340b) run $name.toml --gpu h100 --gpus 6144 ;;
        mt-nlg-530b) run $name.toml --cluster selene --gpus 2240 ;;
        deepseek-v3) run $name.toml --gpu h800 --gpus 2048 ;;
        *) echo "no run is called $name" >&2; exit 2 ;;
    esac
done
