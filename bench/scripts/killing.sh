# What scripts that kill runs have in common, to be sourced with LOCKSTEP as the first argument: a folder that goes with them, a corpus, the bits
# of a run, the ranks of a launcher.
set -euo pipefail
lockstep=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir corpus
for file in 1 2 3 4 5 6 7 8; do
    for line in $(seq 180); do echo "line $((line * 7 + file * 31)): the square of $((line % 97)) is $((line % 97 * (line % 97)))."; done >corpus/$file.txt
done

# The bits of a run: step, loss, gradient norm, validation loss.
bits() {
    python3 - "$1/metrics.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    m = json.loads(line)
    print(m["step"], repr(m["loss"]), repr(m["grad_norm"]), repr(m.get("val_loss")))
PY
}
# The process of a rank that a launcher has started, or nothing.
rank_of() {
    for pid in $(pgrep -P "$1" || true); do
        if tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "RANK=$2"; then echo "$pid"; fi
    done
}
