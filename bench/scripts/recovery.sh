#!/usr/bin/env bash
# How long an elastic run of 85M parameters in four processes with ZeRO 1 takes to go on when a rank is killed, on an idle machine, and where that time goes.
# usage: bench/scripts/recovery.sh LOCKSTEP [TIMES] > bench/records/recovery.txt
source "$(dirname "$0")/killing.sh"
times=${2:-3}
echo "# bench/scripts/recovery.sh at ${COMMIT:-$(git -C "$OLDPWD" rev-parse --short HEAD 2>/dev/null)}, $(nproc) cores"
cat >run.toml <<'TOML'
[model]
preset = "llama-124m"
vocab_size = 256
[data]
paths = ["corpus"]
[train]
steps = 12
seq = 32
global_batch = 12
micro_batch = 1
device = "cpu"
validation_sequences = 0
[parallel]
dp = 4
zero = 1
[checkpoint]
every = 1000
[cluster]
snapshot_every = 2
TOML
for time in $(seq "$times"); do
    rm -rf run
    "$lockstep" launch run.toml --run-dir run --elastic 2..4 >out 2>err &
    launcher=$!
    until [ "$(cat run/metrics.jsonl 2>/dev/null | wc -l)" -ge 5 ]; do
        kill -0 $launcher || { cat err && exit 1; }
        sleep 0.1
    done
    kill -9 "$(rank_of $launcher 2)"
    wait $launcher || { tail -30 err && exit 1; }
    python3 - <<'PY'
import json
world = [e for e in map(json.loads, open("run/events.jsonl")) if e["event"] == "world"][0]
parts = ", ".join(f"{part} {world[part + '_s']:.1f}" for part in ("agreed", "gathered", "compiled", "loaded"))
print(f"noticed after {world['noticed_s']:.1f} s, then {world['recovery_s']:.1f} s ({parts}); from memory: {world['from_memory']}, steps done again: {world['lost_steps']}")
assert world["from_memory"] and world["noticed_s"] + world["recovery_s"] <= 10
PY
done
