#!/usr/bin/env bash
# Steps of an H200 as the catalogue predicts them, which was not measured by `bench --save`, beside what they took: the fifteen shapes of
# foresight.sh (bench/configs/h200), and the last times of bench/records/foresight-h200.txt. Needs no GPU. Fails where the median case is more
# than 5% off.
# usage: bench/scripts/catalogue.sh LOCKSTEP > bench/records/catalogue-h200.txt
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/catalogue.sh LOCKSTEP}")
cd "$(dirname "$(realpath "$0")")/.."
for config in configs/h200/*.toml; do
    "$lockstep" explain "$config" --gpu h200 --format json 2> /dev/null | python3 -c '
import json, sys
print(sys.argv[1], 1e3 * json.load(sys.stdin)["forecast"]["step_s"])' "$(basename "$config" .toml)"
done | python3 -c '
import statistics, sys
measured = {}
for line in open("records/foresight-h200.txt"):
    words = line.split()
    if len(words) == 8 and words[2] == words[4] == "ms":
        measured[words[0]] = float(words[3])
off = []
print("%-14s %11s %11s %7s" % ("case", "predicted", "measured", "ratio"))
for line in sys.stdin:
    name, predicted = line.split()
    ratio = float(predicted) / measured[name]
    off.append(abs(ratio - 1))
    print("%-14s %8.1f ms %8.1f ms %7.3f" % (name, float(predicted), measured[name], ratio))
median, worst = statistics.median(off), max(off)
print("%d cases: the median is %.1f%% off, the worst %.1f%%" % (len(off), 100 * median, 100 * worst))
sys.exit(median > 0.05)
'
