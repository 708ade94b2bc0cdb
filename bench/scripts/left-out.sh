#!/bin/sh
# How far off predictions are on rows that the constants were not fitted to, by what was left out: all groups, or those that are named.
# Usage: bench/scripts/left-out.sh [LOCKSTEP [NAME...]] > bench/records/left-out.txt
set -eu
lockstep=$(realpath "${1:-target/release/lockstep}")
[ $# -eq 0 ] || shift
cd "$(dirname "$0")/../records/published"
fitted=$(mktemp)
trap 'rm "$fitted"' EXIT
for name in ${*:-nanotron torchtitan llm-foundry korthikanti megatron_sc21 megatron megatron_core megatron_bridge}; do
    rounds=
    # Its rows are most of all: what is left to fit to needs more rounds.
    [ "$name" != nanotron ] || rounds='--rounds 24'
    echo "\$ lockstep validate *.csv --fit constants.toml --leave-out $name${rounds:+ $rounds}"
    "$lockstep" validate ./*.csv --fit "$fitted" --leave-out "$name" $rounds 2> /dev/null |
        awk '/^Assumed|rows are not represented/ { exit } { print }'
done
