#!/usr/bin/env bash
# Runs the tests of processes many times in a row beside a load on every core, and stops at the first failure:
#   bench/repeat.sh [TIMES]        50 if not given
set -euo pipefail
cd "$(dirname "$0")/.."
times=${1:-50}
tests=(launch ranks failures mpi nccl slurm)
cargo test --no-run -p lockstep-exec --lib
cargo test --no-run -p lockstep-cli $(printf -- '--test %s ' "${tests[@]}")
load=()
trap 'kill "${load[@]}" 2>/dev/null || true' EXIT
for _ in $(seq "$(nproc)"); do
    nice sh -c 'while :; do :; done' &
    load+=($!)
done
for i in $(seq "$times"); do
    echo "round $i of $times"
    cargo test --quiet -p lockstep-exec --lib comm::processes
    for test in "${tests[@]}"; do
        cargo test --quiet -p lockstep-cli --test "$test"
    done
done
echo "$times rounds without a failure"
