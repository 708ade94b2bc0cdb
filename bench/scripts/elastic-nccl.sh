#!/usr/bin/env bash
# Four NCCL processes that share one GPU train an elastic run; a rank is killed, again and again, and started again. The others abort, connect, capture
# their graphs anew and go on: bench/scripts/elastic-nccl.sh LOCKSTEP [KILLS]
# Prints the run's history and the losses beside those of an undisturbed run. Fails where the run does not end or losses are further apart than 1%.
source "$(dirname "$0")/killing.sh"
kills=${2:-5}
cat >run.toml <<TOML
[model]
preset = "llama-15m"
vocab_size = 256
[data]
paths = ["corpus"]
[train]
steps = $((12 * kills + 12))
seq = 64
global_batch = 12
micro_batch = 1
device = "cuda"
deterministic = true
validate_every = 48
validation_sequences = 8
[parallel]
dp = 4
zero = 1
[checkpoint]
every = 1000
[cluster]
snapshot_every = 6
TOML
touch none
lines() { cat none "$1/metrics.jsonl" 2>/dev/null | wc -l; }
# Whether all four train: no world has come after the first one, or the last has four ranks.
all_train() {
    local last
    last=$(cat none killed/events.jsonl 2>/dev/null | grep '"world"' | tail -1 || true)
    [ -z "$last" ] || grep -q '"ranks":4' <<<"$last"
}

"$lockstep" launch run.toml --run-dir killed --elastic 2..4 --restarts 1000 --share-gpus >killed.out 2>killed.err &
launcher=$!
for kill in $(seq "$kills"); do
    until=$((SECONDS + 60))
    until all_train && [ "$(lines killed)" -ge $((12 * kill)) ]; do
        if ! kill -0 $launcher || [ $SECONDS -gt $until ]; then
            echo "before kill $kill: $(lines killed) steps after $SECONDS s"
            cat killed/events.jsonl
            tail -40 killed.err
            kill -9 $launcher $(pgrep -P $launcher)
            exit 1
        fi
        sleep 0.1
    done
    echo "kill $kill after $(lines killed) steps, $SECONDS s"
    pid=$(rank_of $launcher $((kill % 4)))
    [ -z "$pid" ] || kill -9 "$pid"
    sleep 1
done
wait $launcher || { tail -30 killed.err && exit 1; }
grep -E "go on|goes on" killed.err
"$lockstep" launch run.toml --quiet --run-dir whole --share-gpus >whole.out 2>whole.err || { tail -30 whole.err && exit 1; }
python3 - $((12 * kills + 12)) <<'PY'
import json, sys
steps = int(sys.argv[1])
read = lambda run: {m["step"]: m for m in map(json.loads, open(f"{run}/metrics.jsonl"))}
killed, whole = read("killed"), read("whole")
assert len(killed) == len(whole) == steps, (len(killed), len(whole))
apart = max(abs(killed[s]["loss"] - whole[s]["loss"]) / whole[s]["loss"] for s in whole)
same = sum(killed[s]["loss"] == whole[s]["loss"] for s in whole)
last = killed[steps]
first = min((s for s in whole if killed[s]["loss"] != whole[s]["loss"]), default=None)
where = f"the first that differs is that of step {first}, {apart:.1e} apart at most" if first else "none differs"
print(f"{same} of {len(whole)} losses have the same bits, {where}; goodput {last['goodput']:.2f}")
assert apart < 0.01
PY
