#!/usr/bin/env bash
# How long steps wait for a checkpoint of 1 GB in the background, beside a copy of as many bytes and beside a synchronous save, on one rank and
# on two: bench/save.sh LOCKSTEP [SIZE]. Fails where they wait longer than 1.2 times the copy, which takes a machine with nothing else to do.
set -euo pipefail
lockstep=$(realpath "$1")
size=${2:-1GB}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for ranks in 1 2; do
    "$lockstep" bench checkpoint --size "$size" --ranks $ranks --rounds 8 --disk "$work" | tee "$work/$ranks.txt"
    awk '/in the background/ && /steps wait/ { if ($NF > 1.2) { print "FAILED: " $NF " copies"; exit 1 } }' "$work/$ranks.txt"
done
