#!/usr/bin/env bash
# Runs the tests of processes many times beside a load, and says which failed:
#   bench/scripts/repeat.sh [TIMES [AT_ONCE]]     50 rounds, one at a time, if not given
# The load is a busy loop on every core, or the other rounds where several run at once.
# BUILT=FOLDER takes the tests' executables from there (launch, ranks, failures, mpi, nccl, slurm, exec_lib) instead of building them:
# for a machine without cargo. TESTS="nccl ranks" runs those alone.
set -uo pipefail
cd "$(dirname "$0")/../.."
times=${1:-50}
at_once=${2:-1}
tests=(${TESTS:-launch ranks failures mpi nccl slurm})
work=$(mktemp -d)
load=()
trap 'kill "${load[@]}" 2>/dev/null; rm -rf "$work"' EXIT
if [ -z "${BUILT:-}" ]; then
    BUILT=$work/built
    mkdir "$BUILT"
    # The executables that cargo names: "Executable tests/launch.rs (target/debug/deps/launch-…)".
    cargo test --no-run --workspace --lib $(printf -- '--test %s ' "${tests[@]}") 2> "$work/cargo" || { cat "$work/cargo" && exit 1; }
    for test in "${tests[@]}"; do
        ln -s "$PWD/$(sed -n "s|.*tests/$test.rs (\(.*\))|\1|p" "$work/cargo")" "$BUILT/$test"
    done
    ln -s "$PWD/$(sed -n 's|.*(\(.*lockstep_exec-.*\))|\1|p' "$work/cargo")" "$BUILT/exec_lib"
fi
for _ in $([ "$at_once" = 1 ] && seq "$(nproc)"); do
    nice sh -c 'while :; do :; done' &
    load+=($!)
done

# ROUND TEST [FILTER]: one of the tests; where it fails, KEEP=FOLDER keeps what it said.
one() {
    (cd crates/cli && "$BUILT/$2" "${@:3}") > "$work/$1-$2" 2>&1 || { cp "$work/$1-$2" "${KEEP:-$work}/failed-$1-$2" && return 1; }
}

round() {
    local failed=0 jobs=() test job
    for test in "${tests[@]}"; do
        one "$1" "$test" &
        jobs+=($!)
    done
    one "$1" exec_lib comm::processes || failed=1
    for job in "${jobs[@]}"; do wait "$job" || failed=1; done
    echo "round $1: $(cat "$work/$1"-* | awk '/^test result/ { passed += $4; failed += $6 } END { print passed, "passed,", failed, "failed" }') after $SECONDS s"
    return $failed
}

running=()
failed=0
SECONDS=0
for i in $(seq "$times"); do
    round "$i" &
    running+=($!)
    if [ "${#running[@]}" -ge "$at_once" ]; then
        wait "${running[0]}" || failed=$((failed + 1))
        running=("${running[@]:1}")
    fi
done
for one in "${running[@]}"; do wait "$one" || failed=$((failed + 1)); done
grep -h -E '^test .* FAILED' "$work"/[0-9]*-* | sort | uniq -c
echo "$times rounds, $at_once at once, on $(nproc) cores: $failed with a failure"
[ "$failed" = 0 ]
